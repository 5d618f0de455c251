"""`ShareVecEnv` and its drop-ins: a trainer of MAPPO's kind has the data that it has over pipes, bit for bit."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.mappo import Listed, Log, PipeVecEnv, Policy, SameShare, train
from mpe2 import simple_speaker_listener_v4, simple_spread_v3
from simulators.crashing import Fate, crashing
from simulators.mappo_envs import (
    Drones,
    K,
    Particles,
    Pilots,
    Pitch,
    Speakers,
    Squad,
    Swimmers,
    Wings,
    WorkersLoop,
    old,
    old_box,
)
from simulators.pymarl_envs import Gymma, PlainLoop, Skirmish
from simulators.team_battles import AGENTS, DictBattle, ParallelBattle, TeamBattle
from simulators.variable_agents import VariableAgents

from marl_parallel import EnvError, ParallelEnv, make, vector
from marl_parallel.vector import ShareDummyVecEnv, ShareSubprocVecEnv, ShareVecEnv, SubprocVecEnv

ENVS = 3


def same_data(ours: tuple[Log, Policy], theirs: tuple[Log, Policy]) -> None:
    for name, arrays in theirs[0].items():
        for time, (one, other) in enumerate(zip(ours[0][name], arrays, strict=True)):
            assert one.shape == other.shape, (name, time)
            assert np.array_equal(one, other), (name, time, one, other)
    assert np.array_equal(ours[1].actor, theirs[1].actor)
    assert np.array_equal(ours[1].critic, theirs[1].critic)


def battle(kind: Any, env_id: int, fails: bool, restarts: int = 0) -> Any:
    """Every life of an environment has another seed, and the first ones fail after different times."""
    fails_at = {(0, 0): 17, (1, 0): 30, (1, 1): 5}.get((env_id, restarts)) if fails else None
    return kind(100 * env_id + restarts, fails_at)


def over_pipes(kind: Any, fails: bool) -> tuple[Log, Policy]:
    listed = {DictBattle: lambda *one: SameShare(TeamBattle(*one)), ParallelBattle: lambda *one: Listed(kind(*one))}
    made = listed.get(kind, kind)
    envs = PipeVecEnv([lambda lives, i=i: battle(made, i, fails, lives) for i in range(ENVS)])  # type: ignore[misc]
    try:
        return train(envs)
    finally:
        envs.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("fails", [False, True], ids=["deaths", "restarts"])
@pytest.mark.parametrize("kind", [TeamBattle, DictBattle, ParallelBattle])
def test_battles_are_those_over_pipes(kind, fails, shared):
    """Many ends of episodes, by victory, defeat and limit, with deaths before them."""
    makers = [functools.partial(battle, kind, env_id, fails) for env_id in range(ENVS)]
    envs = ShareSubprocVecEnv(makers, num_workers=2, on_error="restart", shared_memory=shared)
    ours = train(envs)
    restarts = envs.parallel_env.stats().restarts
    envs.close()
    theirs = over_pipes(kind, fails)
    same_data(ours, theirs)
    assert restarts == (3 if fails else 0)
    dones, bad, active = (np.array(ours[0][name]) for name in ("dones", "bad", "active"))
    ends = dones.all(axis=2)
    assert ends.sum() > 15
    assert 0 < (bad[ends] == 0).all(axis=(1, 2)).sum() < ends.sum()  # by a limit or a restart, and not by one
    assert (active == 0).any()


@pytest.mark.parametrize("continuous", [False, True])
def test_spread_is_that_over_pipes(continuous):
    """mpe2: state for all agents, masks of ones or none, truncation only."""
    make_one = functools.partial(simple_spread_v3.parallel_env, max_cycles=9, continuous_actions=continuous)
    envs = make(make_one, ENVS, facade="share", seed=5, num_workers=2)
    ours = train(envs)
    envs.close()
    pipes = PipeVecEnv([lambda lives, seed=5 + i: Listed(make_one(), seed) for i in range(ENVS)])  # type: ignore[misc]
    theirs = train(pipes)
    pipes.close()
    same_data(ours, theirs)
    assert np.array(ours[0]["bad"]).min() == 0


def chosen(envs: Any, rng: np.random.Generator, available: Any) -> Any:
    """Random actions as the projects' runners send them: indices that masks allow, one-hot vectors, or numbers."""
    if available is not None and available[0] is not None:
        return np.array([[[rng.choice(np.flatnonzero(mask))] for mask in of_env] for of_env in available])
    space = envs.action_space[0]
    if type(space).__name__ == "Box":
        return rng.uniform(-1, 1, (envs.num_envs, envs.n_agents, 2)).astype(np.float32)
    sizes = [space.n] if hasattr(space, "n") else [*getattr(space, "nvec", [5, 3])]
    indices = [rng.integers(size, size=(envs.num_envs, envs.n_agents)) for size in sizes]
    if available is not None:
        return np.stack(indices, axis=2)
    if sizes == [6]:  # football's runner
        return indices[0]
    return np.concatenate([np.eye(size)[index] for size, index in zip(sizes, indices)], axis=2)


def equal_rows(ours: Any, theirs: Any) -> None:
    """Arrays of objects, or padded ones, too."""
    for one, other in zip(ours, theirs, strict=True):
        other = np.asarray(other)
        assert np.array_equal(one[: len(other)], other.astype(one.dtype))
        assert not one[len(other) :].any()


@pytest.mark.parametrize("kind", [Particles, Speakers, Pitch, Squad, Swimmers, Pilots, Wings, Drones])
def test_simulators_with_lists_are_those_of_a_loop(kind):
    """Four, five and six values; the spaces are the simulator's own lists."""
    has_share = kind in (Squad, Swimmers, Pilots, Wings, Drones)
    makers = [functools.partial(kind, seed) for seed in (3, 4, 5)]
    envs = (ShareSubprocVecEnv if has_share else SubprocVecEnv)(makers, num_workers=2)
    loop = WorkersLoop(kind, (3, 4, 5))
    assert [*map(str, envs.observation_space)] == [*map(str, loop.simulators[0].observation_space)]
    first = envs.reset()
    obs, share_obs, available = first if has_share else (first, None, None)
    rng, ends = np.random.default_rng(1), 0
    for _ in range(60):
        actions = chosen(envs, rng, available)
        if has_share:
            obs, share_obs, rewards, dones, infos, available = envs.step(actions)
        else:
            obs, rewards, dones, infos = envs.step(actions)
        for env_id in range(3):
            outcome, last, over = loop.step(env_id, actions[env_id])
            ends += over
            equal_rows(obs[env_id], loop.latest[env_id][0])
            assert np.array_equal(rewards[env_id], outcome[0])
            assert dones[env_id].tolist() == np.broadcast_to(np.ravel(outcome[1]), 3).tolist()
            for own, theirs in zip(infos[env_id], outcome[2] if isinstance(outcome[2], list) else [outcome[2]] * 3):
                assert theirs.items() <= own.items()
            if kind is Pitch:  # one info for all, which its runner reads as such
                assert infos[env_id]["score"] == outcome[2]["score"]
            if over:
                equal_rows(infos[env_id][0]["original_obs"], last[0])
            if has_share:
                of_all = (lambda share: [share] * K) if kind is Drones else list  # one for all
                equal_rows(share_obs[env_id], of_all(loop.latest[env_id][1]))
                if over:
                    equal_rows(infos[env_id][0]["original_state"], of_all(last[1]))
            if kind is Squad:
                assert np.array_equal(available[env_id], loop.latest[env_id][2])
                if over:
                    assert np.array_equal(infos[env_id][0]["original_avail_actions"], last[2])
            elif kind is Drones:
                assert np.array_equal(available, np.ones((3, K, 5)))
            elif has_share:
                assert available[env_id] is None
    envs.close()
    assert ends > 10


def test_simulators_of_pymarl():
    """A state for all agents, masks, a team's reward; infos of the environment are in those of each agent."""
    envs = make(Skirmish, 2, facade="share", seed=4, num_workers=2)
    simulators = [Skirmish(4), Skirmish(5)]
    for simulator in simulators:
        simulator.reset()
    obs, share_obs, available = envs.reset()
    rng, ends = np.random.default_rng(0), 0
    for _ in range(40):
        actions = chosen(envs, rng, available)
        obs, share_obs, rewards, dones, infos, available = envs.step(actions)
        for env_id, simulator in enumerate(simulators):
            reward, over, info = simulator.step(actions[env_id, :, 0])
            last = simulator.get_state(), simulator.get_avail_actions()
            assert rewards[env_id].tolist() == [[reward]] * 3
            assert dones[env_id].tolist() == [over] * 3
            assert all(info.items() <= own.items() for own in infos[env_id])
            if over:
                ends += 1
                assert infos[env_id][2]["bad_transition"] == bool(info.get("episode_limit"))
                assert np.array_equal(infos[env_id][0]["original_state"], [last[0]] * 3)
                assert np.array_equal(infos[env_id][0]["original_avail_actions"], last[1])
                simulator.reset()
            assert np.array_equal(obs[env_id], simulator.get_obs())
            assert np.array_equal(share_obs[env_id], [simulator.get_state()] * 3)
            assert np.array_equal(available[env_id], simulator.get_avail_actions())
    envs.close()
    assert ends > 4


@pytest.fixture
def spread() -> Iterator[ShareVecEnv]:
    env = make(simple_spread_v3.parallel_env, 2, {"max_cycles": 3}, facade="share", backend="serial", seed=1)
    yield env
    env.close()


def test_values_of_a_step(spread):
    obs, share_obs, available = spread.reset()
    assert [array.shape for array in (obs, share_obs, available)] == [(2, 3, 18), (2, 3, 54), (2, 3, 5)]
    assert available.dtype == np.int64
    assert [len(of) for of in (spread.observation_space, spread.share_observation_space, spread.action_space)] == [
        3
    ] * 3
    assert spread.observation_space[2].shape == (18,)
    assert spread.share_observation_space[1].shape == (54,)
    assert (spread.n_agents, spread.num_envs) == (3, 2)
    spread.step_async(np.ones((2, 3, 1)))
    obs, share_obs, rewards, dones, infos, available = spread.step_wait()
    assert rewards.shape == (2, 3, 1)
    assert dones.shape == (2, 3)
    assert (rewards.dtype, dones.dtype) == (np.float64, np.bool_)
    assert infos[1] == [{"bad_transition": False}] * 3


def test_actions_of_every_form_reach_the_simulator_as_the_same():
    """Indices, floats, one-hot vectors, without the last axis, lists of lists, and tensors with `__array__`."""
    chosen = np.array([[0, 1, 2], [3, 4, 0]])

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return chosen[..., None]

    forms = [
        chosen[..., None], chosen[..., None].astype(np.float32), chosen, np.eye(5)[chosen],
        [[np.eye(5)[action] for action in of_env] for of_env in chosen], chosen[..., None].tolist(), Tensor(),
    ]  # fmt: skip
    results = []
    for actions in forms:
        env = make(simple_spread_v3.parallel_env, 2, facade="share", backend="serial", seed=1)
        env.reset()
        results.append(env.step(actions)[0])
        env.close()
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (np.zeros((2, 2, 1)), r"begin with \(2, 3\); got \(2, 2, 1\)"),
        (np.zeros((2, 3, 3)), r"one-hot vectors \(5\) for Discrete\(5\); got shape \(2, 3, 3\)"),
        (np.full((2, 3, 1), 0.5), r"environment 0: the action of agent 'agent_0' is \[0.5\]"),
        (np.full((2, 3, 1), 5), r"environment 0: the action of agent 'agent_0' is \[5\]; expected the index"),
        (np.full((2, 3, 1), np.nan), r"agent 'agent_0' is \[nan\]"),
        (np.full((2, 3, 5), 0.2), r"agent 'agent_0' must be an index or a one-hot vector"),
        ([[0, 1], [0, 1, 2]], r"begin with \(2, 3\)"),
        ([[[0], [1], [2]], [[0, 1], [1], [0]]], "do not have one shape"),
        (None, r"takes actions \(num_envs, agents, ...\), which begin with \(2, 3\); got NoneType"),
        (3, r"begin with \(2, 3\); got int"),
        ([None], r"begin with \(2, 3\); got \(1, 0\)"),
        ([None, [0, 1, 2]], r"begin with \(2, 3\); got \(2, 0, 3\)"),
        (np.float64(1), r"begin with \(2, 3\); got \(\)"),
        (iter([]), r"begin with \(2, 3\); got list_iterator"),
        (np.full((2, 3, 1), "a"), r"must be numbers \(num_envs, agents, 1\)"),
    ],
)
def test_wrong_actions_are_refused_before_a_step(spread, actions, error):
    spread.reset()
    with pytest.raises(ValueError, match=error):
        spread.step(actions)
    assert spread.parallel_env.stats().steps == 0
    spread.step(np.zeros((2, 3, 1)))  # which still works


def test_infos_are_made_when_somebody_looks(spread):
    spread.reset()
    for _ in range(3):
        *_, dones, infos, _ = spread.step(np.zeros((2, 3, 1)))
    assert dones.all()
    assert not any(made is not None for made in infos._made)
    first = infos[0]
    assert infos[0] is first
    assert infos[-2] is first
    assert infos[0:1] == [first]
    assert len(infos) == 2
    assert first[0].keys() == {"bad_transition", "original_obs", "original_state", "original_avail_actions"}
    assert first[1] == {"bad_transition": True}
    loaded = pickle.loads(pickle.dumps(infos))
    assert [[*of_env] for of_env in loaded[1]] == [[*of_env] for of_env in infos[1]]
    with pytest.raises(IndexError, match="there are 2 environments"):
        infos[2]


def test_one_info_for_all_is_read_as_a_dict():
    """on-policy's football runner reads `infos[i]["score"]`, and others look for a key first."""
    envs = ShareSubprocVecEnv([Pitch], backend="serial")
    envs.reset()
    *_, infos, _ = envs.step(np.zeros((1, K), np.int64))
    of_env = infos[0]
    assert "score" in of_env
    assert "missing" not in of_env
    assert of_env[0] in of_env
    assert (of_env["score"], of_env.get("score"), of_env.get("missing", 5), of_env.get("missing")) == (1, 1, 5, None)
    assert {*of_env.keys()} == {"bad_transition", "score", "won"}
    assert dict(of_env.items()) == of_env[0]
    assert len(of_env) == len([*of_env]) == K
    envs.close()


def test_tuple_spaces_of_gym_come_back_as_they_are():
    class OfTuples(Pitch):
        def __init__(self, seed: int | None = None) -> None:
            super().__init__(seed)
            lists = {
                name: getattr(self, name) for name in ("observation_space", "share_observation_space", "action_space")
            }
            for name, declared in lists.items():
                made = [old("Discrete", n=6)] * K if name == "action_space" else [old_box(4)] * len(declared)
                setattr(self, name, old("Tuple", spaces=made))

    envs = ShareSubprocVecEnv([OfTuples], backend="serial")
    for name in ("observation_space", "share_observation_space", "action_space"):
        of_agents = getattr(envs, name)
        assert [type(space).__module__.partition(".")[0] for space in of_agents] == ["gym"] * K
    envs.close()


class Relay:
    """Observations are numbers, and choices have several parts."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict([(agent, spaces.Box(0, 99, (), np.float32)) for agent in "ab"])
    action_space = spaces.Dict([(agent, spaces.MultiDiscrete([2, 3])) for agent in "ab"])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return dict.fromkeys("ab", np.float32(0)), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        self.got = [action.tolist() for action in actions.values()]
        seen, rewards = dict.fromkeys("ab", np.float32(self.time)), dict.fromkeys("ab", 1.0)
        return seen, rewards, {"__all__": self.time == 2}, {"__all__": False}, {}


def test_choices_in_several_parts():
    """By index and one-hot; without available actions."""
    env = make(Relay, 1, facade="share", backend="serial")
    obs, share_obs, available = env.reset()
    assert (obs.shape, share_obs.shape) == ((1, 2, 1), (1, 2, 2))
    assert available.tolist() == [None]
    for actions in ([[[1, 2], [0, 1]]], [[[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]]):
        *_, infos, available = env.step(np.array(actions))
        assert env.parallel_env.get_attr("got") == ([[1, 2], [0, 1]],)
    assert infos[0][0]["original_avail_actions"] is None
    assert infos[0][0]["original_state"].tolist() == [[2, 2]] * 2
    assert available.tolist() == [None]
    env.close()


def test_agents_of_different_spaces():
    """Arrays of objects as on-policy's separated runners index them, or padded."""
    with make(simple_speaker_listener_v4.parallel_env, 2, facade="share", backend="serial", seed=1) as env:
        obs, share_obs, available = env.reset()
        assert (obs.shape, obs.dtype, available.shape) == ((2, 2), object, (2, 2))
        assert np.array([*obs[:, 0]]).shape == (2, 3)
        assert np.array([*available[:, 1]]).shape == (2, 5)
        assert share_obs.shape == (2, 2, 14)
        assert [space.n for space in env.action_space] == [3, 5]
        one_hot = [[np.eye(3)[2], np.eye(5)[4]], [np.eye(3)[1], np.eye(5)[0]]]
        by_one_hot = env.step(one_hot)[0]
        with pytest.raises(ValueError, match=r"environment 0: the action of agent 'speaker_0' is \[3\]"):
            env.step(np.full((2, 2, 1), 3))
    kwargs: dict[str, Any] = {"facade": "share", "facade_kwargs": {"pad": True}}
    with make(simple_speaker_listener_v4.parallel_env, 2, **kwargs, backend="serial", seed=1) as env:
        obs, share_obs, available = env.reset()
        assert (obs.shape, share_obs.shape, available.shape) == ((2, 2, 11), (2, 2, 14), (2, 2, 5))
        assert available[0].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
        assert [space.shape for space in env.observation_space] == [(11,)] * 2
        assert [space.n for space in env.action_space] == [5] * 2
        padded = env.step(np.array([[[2], [4]], [[1], [0]]]))[0]
    assert np.array_equal(padded[:, 1], np.array([*by_one_hot[:, 1]]))
    assert np.array_equal(padded[:, 0, :3], np.array([*by_one_hot[:, 0]]))
    assert not padded[:, 0, 3:].any()


@pytest.mark.parametrize("fault", ["raise", "os._exit"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "traced"])
def test_states_of_neighbours_of_a_fault(fault, compiled, tmp_path):
    """They are of the same step as the observations, also in the step in which a later environment ends the worker."""
    maker = crashing(simple_spread_v3.parallel_env, {(1, 0): Fate(fault, after=2)})
    parallel = ParallelEnv([maker] * 3, num_workers=1, on_error="restart", seed=42)
    env = ShareVecEnv(parallel, share="state")
    if not compiled:
        parallel.start_trace(tmp_path / "trace.json")
    obs, share_obs, _ = env.reset()
    for step in range(8):
        assert np.array_equal(share_obs, np.repeat(obs.reshape(3, 1, 54), 3, axis=1)), step
        obs, share_obs, *_ = env.step(np.full((3, 3, 1), step % 5))
    assert parallel.stats().restarts == (1 if fault == "raise" else 3)
    env.close()


class Cup(Pitch):
    """A match that is won in each step; it may break in the first one."""

    def __init__(self, breaks: bool, restarts: int = 0) -> None:
        super().__init__(0)
        self.breaks = breaks and restarts == 0

    def step(self, actions: Any) -> Any:
        if self.breaks:
            raise RuntimeError("the pitch is flooded")
        *results, info = super().step(actions)
        return *results, {**info, "won": True, "wins": 1}


def test_a_restart_in_the_very_first_step_has_the_keys_of_the_others():
    envs = SubprocVecEnv(
        [functools.partial(Cup, breaks) for breaks in (True, False)], on_error="restart", backend="serial"
    )
    envs.reset()
    *_, infos = envs.step(np.ones((2, 3), int))
    assert infos[0][0]["restarted"]
    assert (infos[0][2]["won"], infos[0][2]["wins"]) == (False, 0)
    envs.close()


@pytest.mark.parametrize("fault", ["raise", "os._exit"])
@pytest.mark.parametrize("kind", [TeamBattle, DictBattle, ParallelBattle])
def test_the_last_values_are_those_of_the_step_if_only_the_reset_fails(kind, fault):
    """The state and masks are those after the last action, not those before it."""
    maker = crashing(functools.partial(kind, 5), {(1, 0): Fate(fault, "reset", 1)})
    envs = ShareVecEnv(ParallelEnv([maker] * 2, num_workers=2, on_error="restart", seed=42))
    *_, available = envs.reset()
    battle, ended = TeamBattle(5), False
    battle.reset()
    while not ended:
        actions = [int(np.flatnonzero(mask)[-1]) for mask in battle.masks()]
        before, ended = available[1].tolist(), all(battle.step(actions)[3])
        _, _, _, dones, infos, available = envs.step(np.array([actions] * 2)[..., None])
    assert dones[1].all()
    assert infos[1][0]["restarted"] is True
    shares = battle.share() if kind is TeamBattle else [battle.share()[0]] * 3
    assert np.array_equal(infos[1][0]["original_state"], shares)
    assert infos[1][0]["original_avail_actions"].tolist() == battle.masks() != before
    assert np.array_equal(infos[1][0]["original_obs"], battle.observe())
    envs.close()


def test_environments_in_this_process():
    envs = ShareDummyVecEnv([functools.partial(battle, DictBattle, 0, False)])
    envs.reset()
    (simulator,) = envs.envs
    assert type(simulator) is DictBattle
    envs.step(np.ones((1, 3, 1)))
    assert simulator.battle.time == 1
    envs.close()


def test_drop_ins_keep_the_seeds_and_generators_of_simulators():
    """As in processes of their own: simulators that seed `numpy.random`, and draw from it, in one worker."""

    class Drawing(DictBattle):
        def __init__(self, seed: int) -> None:
            super().__init__(0)
            np.random.seed(seed)

        def state(self) -> np.ndarray:
            return np.full(8, np.random.random(), np.float32)

    envs = ShareSubprocVecEnv([functools.partial(Drawing, seed) for seed in (7, 8)], num_workers=1)
    assert envs.parallel_env.seed() == (None, None)
    _, share_obs, _ = envs.reset()
    envs.close()
    assert share_obs[:, 0, 0].tolist() == [np.float32(np.random.RandomState(seed).random()) for seed in (7, 8)]


def test_joined_observations_of_simulators_with_lists():
    """In place of their share observations; the lists of spaces say so."""
    envs = ShareDummyVecEnv([functools.partial(Squad, 1)], share="joined")
    obs, share_obs, _ = envs.reset()
    assert np.array_equal(share_obs[0], [obs[0].ravel()] * 3)
    assert [space.shape for space in envs.share_observation_space] == [(12,)] * 3
    assert envs.observation_space == [[4, [2, 2], [1, 3]]] * 3
    envs.close()


class Ghosts(Squad):
    """The done still move, as agents of HARL's environments whose other agents go on: their actions count."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.taken: list[Any] = []

    def get_avail_actions(self) -> Any:
        return [[1] * 5] * K

    def step(self, actions: Any) -> Any:
        self.taken.append(actions[:, 0].tolist())
        return super().step(actions)


@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"backend": "serial", "check_actions": True}, {"num_workers": 2, "pad": True}]
)
def test_actions_of_agents_that_are_done_reach_their_simulators(options):
    """As in their workers, which send all actions to `step`."""
    envs = ShareSubprocVecEnv([functools.partial(Ghosts, seed) for seed in (3, 4)], **options)
    envs.reset()
    rng, sent, dones, acted = np.random.default_rng(0), [], np.zeros((2, 3), bool), 0
    for _ in range(25):
        actions = rng.integers(1, 5, (2, 3, 1))
        acted += int((dones & ~dones.all(axis=1, keepdims=True)).sum())
        dones = envs.step(actions)[3]
        sent.append(actions[..., 0])
    assert acted > 5
    for env_id, taken in enumerate(envs.get_attr("taken")):
        assert taken == np.array(sent)[:, env_id].tolist()
    envs.close()


def test_render():
    env = make(simple_spread_v3.parallel_env, 2, {"render_mode": "rgb_array"}, facade="share", backend="serial")
    env.reset()
    frames = env.render("rgb_array")
    assert frames.ndim == 4
    assert len(frames) == 2
    env.close()
    env = make(simple_spread_v3.parallel_env, 2, facade="share", backend="serial")
    env.reset()
    assert env.render() is None
    assert env.render("rgb_array") is None
    env.close()


class Shown(Squad):
    """Renders as on-policy's and HARL's environments: there is no `render_mode`, and a list of frames."""

    def render(self, mode: str = "human") -> Any:
        self.rendered = mode
        return [np.full((2, 4, 3), self.n_agents, np.uint8)] if mode == "rgb_array" else [lambda: "a window"]


class Photographed(Squad):
    """Its `render` takes no mode, and it has no `render_mode`."""

    def render(self) -> Any:
        return np.full((2, 4, 3), self.n_agents, np.uint8)


class Closer:
    """A wrapper that takes any keywords."""

    def __init__(self, simulator: Any) -> None:
        self.env = simulator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def render(self, *args: Any, **keywords: Any) -> Any:
        return self.env.render(*args, **keywords)


@pytest.mark.parametrize("kind", [Shown, lambda: Closer(Shown())])
def test_render_with_a_mode(kind):
    envs = ShareSubprocVecEnv([kind] * 2, num_workers=1)
    envs.reset()
    frames = envs.render("rgb_array")
    assert frames.shape == (2, 1, 2, 4, 3)
    assert frames[0][0].tolist() == np.full((2, 4, 3), 3).tolist()
    assert envs.render("human") is None  # what is shown there is not sent
    assert envs.get_attr("rendered") == ("human", "human")
    envs.close()
    envs = ShareDummyVecEnv([Shown, Shown])
    envs.reset()
    assert envs.render() is None
    assert [simulator.rendered for simulator in envs.envs] == ["human"] * 2  # its own default
    envs.close()
    envs = ShareDummyVecEnv([Photographed] * 2)
    envs.reset()
    assert envs.render("rgb_array").shape == (2, 2, 4, 3)
    envs.close()
    envs = ShareDummyVecEnv([Squad])  # cannot render
    envs.reset()
    assert envs.render("rgb_array") is None
    envs.close()


class Words(VariableAgents):
    """Observes and acts in forms that these trainers do not have."""

    def __init__(self, observes: spaces.Space, acts: spaces.Space) -> None:
        super().__init__(0, plain=True)
        self.observes, self.acts = observes, acts

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observes

    def action_space(self, agent: str) -> spaces.Space:
        return self.acts


@pytest.mark.parametrize(
    ("arguments", "keywords", "error"),
    [
        ((spaces.Discrete(3), spaces.Discrete(2)), {}, r"observation space of agent 'a' is Discrete\(3\): wrap"),
        ((spaces.Dict(action_mask=spaces.MultiBinary(2)), spaces.Discrete(2)), {}, "so that it is a Box"),
        ((spaces.Box(0, 1, (2,)), spaces.Text(3)), {}, r"the action space of agent 'a' is Text"),
        ((spaces.Box(0, 1, (2,)), spaces.Discrete(2)), {"share": "all"}, 'share must be "auto", "state" or "joined"'),
    ],
)
def test_spaces_and_arguments_that_do_not_fit(arguments, keywords, error):
    with pytest.raises(ValueError, match=error):
        make(functools.partial(Words, *arguments), 1, facade="share", facade_kwargs=keywords, backend="serial")


def stateless() -> Words:
    simulator = Words(spaces.Box(0, 1, (2,)), spaces.Discrete(2))
    simulator.state_space = None  # type: ignore[assignment]
    return simulator


def test_other_errors_say_what_to_do():
    maker = functools.partial(battle, DictBattle, 0, False)
    with pytest.raises(ValueError, match="ShareVecEnv needs a ParallelEnv with auto_reset=True"):
        make(maker, 1, facade="share", auto_reset="NEXT_STEP", backend="serial")
    with pytest.raises(NotImplementedError, match='or pass share="joined"'):
        make(stateless, 1, facade="share", facade_kwargs={"share": "state"}, backend="serial")
    with pytest.raises(
        TypeError, match="ShareSubprocVecEnv takes no argument 'on_eror'; it takes ParallelEnv's arguments"
    ):
        ShareSubprocVecEnv([maker], on_eror="restart")
    with pytest.raises(ValueError, match="isolate_rng=True is impossible with threads"):
        ShareSubprocVecEnv([maker], backend="thread", isolate_rng=True)
    ShareSubprocVecEnv([maker], backend="thread").close()  # the default is not theirs
    envs = ShareSubprocVecEnv([functools.partial(battle, DictBattle, 0, True)], backend="serial")
    policy = Policy(envs, 0)
    *_, available = envs.reset()
    for _ in range(16):
        obs, *_, available = envs.step(policy.act(np.zeros((1, 3, 6)), available))
    with pytest.raises(EnvError, match="BattleError"):
        envs.step(policy.act(obs, available))
    assert envs.closed


def test_every_name_is_public():
    assert {"ShareVecEnv", "ShareSubprocVecEnv", "ShareDummyVecEnv", "SubprocVecEnv", "DummyVecEnv"} <= {
        *vector.__all__
    }
    assert AGENTS == ["agent_0", "agent_1", "agent_2"]


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("lbforaging:Foraging-8x8-2p-3f-v3", marks=pytest.mark.needs("lbforaging")),
        pytest.param("rware:rware-tiny-2ag-v2", marks=pytest.mark.needs("rware")),
    ],
)
def test_foraging_and_warehouses_equal_a_plain_loop(key):
    def construct(seed: int) -> Gymma:
        return Gymma(key, seed, True)

    loop, rng, ends = PlainLoop(construct, [5, 6], reset_seeds=True), np.random.default_rng(1), 0
    envs = ShareVecEnv(ParallelEnv([construct] * 2, "SAME_STEP", 5, num_workers=2))
    observations, share, available = envs.reset()
    for _ in range(100):
        np.testing.assert_array_equal(observations, loop.observations)
        np.testing.assert_array_equal(share, np.repeat(np.array(loop.states)[:, None], 2, axis=1))
        np.testing.assert_array_equal(available, loop.masks)
        chosen = loop.choose(rng)
        observations, share, rewards, dones, infos, available = envs.step(np.array(chosen)[..., None])
        for place in range(2):
            reward, _, truncated, _ = loop.step(place, chosen[place])
            assert rewards[place, :, 0].tolist() == [reward] * 2
            assert dones[place].tolist() == [loop.over[place]] * 2
            if loop.over[place]:
                ends += 1
                info = infos[place][0]
                assert info["bad_transition"] == truncated
                np.testing.assert_array_equal(info["original_obs"], loop.observations[place])
                np.testing.assert_array_equal(info["original_state"], [loop.states[place]] * 2)
                loop.reset(place, {})
    assert ends >= 6
    envs.close()


class Clock:
    """Two agents observe the episode and the time, which are also the state; an episode has four steps."""

    possible_agents: ClassVar[list[str]] = ["a", "b"]
    observation_space = spaces.Dict(dict.fromkeys("ab", spaces.Box(0, 999, (2,), np.float64)))
    action_space = spaces.Dict(dict.fromkeys("ab", spaces.Discrete(2)))
    state_space = spaces.Box(0, 999, (2,), np.float64)

    def __init__(self, env_id: int, restarts: int, fault: str, moment: tuple[int, int], words: bool) -> None:
        self.moment = moment if (env_id, restarts) == (1, 0) else None
        self.episode, self.fault, self.words, self.life = -1, fault, words, restarts

    def here(self) -> np.ndarray:
        return np.array([100 * self.life + 10 * self.episode, self.time], np.float64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episode, self.time = self.episode + 1, 0
        return dict.fromkeys("ab", self.here()), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        infos = {agent: {"word": "tick" * self.time, "kind": object} for agent in "ab"} if self.words else {}
        rewards = dict.fromkeys("ab", float(self.time))
        return dict.fromkeys("ab", self.here()), rewards, {"__all__": self.time == 4}, {"__all__": False}, infos

    def state(self) -> np.ndarray:
        if (self.episode, self.time) == self.moment:
            if self.fault == "raise":
                raise RuntimeError("there is no state")
            os._exit(3)
        return self.here()


@pytest.mark.parametrize("words", [False, True], ids=["no infos", "infos with words"])
@pytest.mark.parametrize("fault", ["raise", "os._exit"])
@pytest.mark.parametrize("moment", [(0, 2), (0, 4), (1, 0)], ids=["in a step", "at the end", "after the reset"])
def test_a_state_that_fails(moment, fault, words):
    """The step before an automatic reset is kept; its neighbours have the states of their observations."""
    makers = [functools.partial(Clock, fault=fault, moment=moment, words=words)] * 3
    env = ShareVecEnv(ParallelEnv(makers, num_workers=1, on_error="restart"), share="state")
    env.reset()
    for time in range(1, 6):
        obs, share_obs, rewards, dones, infos, _ = env.step(np.zeros((3, 2, 1)))
        assert np.array_equal(obs, share_obs)
        restarted = "restarted" in infos[1][0]
        assert restarted == dones[1].all() == (time == (moment[1] or 4))
        if restarted and moment == (1, 0):
            assert (rewards[1] == 4.0).all()
            assert infos[1][0]["original_obs"][0].tolist() == infos[1][0]["original_state"][0].tolist() == [0.0, 4.0]
            assert infos[1][0].get("word") == ("tick" * 4 if words else None)
        elif restarted:
            assert (rewards[1] == 0.0).all()
            assert infos[1][0]["original_state"][0].tolist() == [0.0, time - 1.0]
            assert infos[1][0]["original_obs"][0].tolist() == [0.0, {2: 2.0, 4: 3.0}[time]]
        if restarted:
            break
    env.close()
