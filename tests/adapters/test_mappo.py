"""Environments of the MAPPO and HARL projects: recognition, spaces, transitions against their workers' loop, errors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from simulators.mappo_envs import (
    AGENTS,
    Drones,
    K,
    Particles,
    Pilots,
    Pitch,
    Simulator,
    Speakers,
    Squad,
    Swimmers,
    Wings,
    WorkersLoop,
    old,
    old_box,
)
from simulators.pymarl_envs import Forwarding

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import AdapterMismatch, NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.mappo_env import MAPPOEnv
from marl_parallel.vector import StackedVecEnv
from marl_parallel.wrappers import pad_spaces

pytestmark = pytest.mark.in_turn

INF = np.inf


def box(size: int, dtype: Any = np.float32, bound: float = INF) -> spaces.Box:
    return spaces.Box(-bound, bound, (size,), dtype)


KINDS = {
    Particles: ([box(4)] * K, [spaces.Discrete(5)] * K, spaces.Box(-INF, INF, (K, 12), np.float32)),
    Speakers: ([box(4)] * K, [spaces.MultiDiscrete([5, 3])] * K, spaces.Box(-INF, INF, (K, 12), np.float32)),
    Pitch: ([box(4, bound=99)] * K, [spaces.Discrete(6)] * K, spaces.Box(-99, 99, (K, 4), np.float32)),
    Squad: ([box(4)] * K, [spaces.Discrete(5)] * K, spaces.Box(-INF, INF, (K, 9), np.float32)),
    Swimmers: ([box(4), box(6), box(3)], [box(2, bound=1)] * K, spaces.Box(-INF, INF, (K, 7), np.float32)),
    Pilots: ([box(5)] * K, [spaces.MultiDiscrete([3, 5, 2])] * K, spaces.Box(-INF, INF, (K, 4), np.float64)),
    Wings: ([box(5)] * K, [spaces.MultiDiscrete([3, 5, 2])] * K, spaces.Box(-INF, INF, (K, 6), np.float64)),
    Drones: ([box(4)] * K, [spaces.Discrete(5)] * K, spaces.Box(-INF, INF, (K, 9), np.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", [lambda env: env, Forwarding])
def test_mappo_environments_are_recognised(kind, wrapper):
    adapted = adapt(wrapper(kind()))
    seen, acts, state = KINDS[kind]
    assert type(adapted) is MAPPOEnv
    assert adapted.rules is Rules.DICT
    assert adapted.possible_agents == AGENTS
    assert adapted.observation_spaces == dict(zip(AGENTS, seen))
    assert adapted.action_spaces == dict(zip(AGENTS, acts))
    assert adapted.state_space == state
    assert adapted.state_per_agent


# -- transitions -------------------------------------------------------------------------------------------------------


def choose(space: Any, mask: Any, rng: np.random.Generator) -> Any:
    """A random action that is allowed."""
    if isinstance(space, spaces.Discrete):
        return int(rng.choice(np.flatnonzero(np.ones(space.n) if mask is None else mask)))
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.nvec)
    return rng.uniform(-1, 1, space.shape).astype(space.dtype)


def as_their_runner(kind: Any, actions: list[Any]) -> Any:
    """What the projects' runners send."""
    if kind is Particles:
        return np.eye(5)[actions]
    if kind is Speakers:
        return np.concatenate([np.eye(5)[[one[0] for one in actions]], np.eye(3)[[one[1] for one in actions]]], axis=1)
    return np.array(actions).reshape(K, 1) if kind in (Squad, Drones) else np.array(actions)


def share_rows(kind: Any, observations: Any, share: Any) -> np.ndarray:
    if kind is Pitch:
        return np.stack(observations)
    if share is None:  # on-policy's runner joins observations
        return np.stack([np.concatenate(observations)] * K).astype(np.float32)
    if kind is Drones:  # one for all
        return np.stack([share] * K)
    longest = max(map(len, share))
    return np.stack([np.pad(row, (0, longest - len(row))) for row in share])


def assert_shown(env: ParallelEnv, kind: Any, place: int, observations: dict, latest: tuple[Any, Any, Any]) -> None:
    """What the environment shows of one simulator is what its loop has seen last."""
    seen, share, available = latest
    assert [*observations] == AGENTS
    for agent, one in zip(AGENTS, seen):
        dtype = env.observation_space[agent].dtype
        assert observations[agent].dtype == dtype
        np.testing.assert_array_equal(observations[agent], np.asarray(one, dtype))
    expected = {} if available is None or available[0] is None else dict(zip(AGENTS, np.array(available, bool)))
    masks = env.action_masks[place]
    assert masks.keys() == expected.keys()
    for agent, mask in expected.items():
        np.testing.assert_array_equal(masks[agent], mask)
    rows = share_rows(kind, seen, share).astype(env.state_space.dtype)
    np.testing.assert_array_equal(env.state()[place], rows)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_the_projects_workers(kind, build, setup):
    check_steps(kind, lambda: build([kind] * 4, setup, "SAME_STEP", 7))


def test_steps_without_compiled_code_equal_those_of_the_projects_workers(monkeypatch):
    monkeypatch.setattr("marl_parallel.core.block.codec.Codec", None)
    for kind in KINDS:
        check_steps(kind, lambda kind=kind: ParallelEnv([kind] * 4, "SAME_STEP", 7, backend="serial"))


def check_steps(kind: Any, construct: Any) -> None:
    loop, rng, ends, deaths = WorkersLoop(kind, [7, 8, 9, 10]), np.random.default_rng(3), 0, 0
    with construct() as env:
        observations, infos = env.reset()
        assert infos == ({agent: {} for agent in AGENTS},) * 4
        for place in range(4):
            assert_shown(env, kind, place, observations[place], loop.latest[place])
        for _ in range(40):
            acting = env.acting
            chosen = [
                [choose(env.action_space[agent], masks and masks[at], rng) for at, agent in enumerate(AGENTS)]
                for masks in (latest[2] for latest in loop.latest)
            ]
            observations, rewards, terminateds, truncateds, infos = env.step(
                [dict(zip(AGENTS, of_env)) for of_env in chosen]
            )
            for place in range(4):
                (their_rewards, dones, their_infos), last, over = loop.step(place, as_their_runner(kind, chosen[place]))
                dones = [bool(dones)] * K if np.ndim(dones) == 0 else [bool(done) for done in dones]
                assert [*rewards[place].values()] == [*np.array(their_rewards).reshape(-1)]
                bad = [bool(one.get("bad_transition")) for one in their_infos] if isinstance(their_infos, list) else []
                dead_before = [agent not in acting[place] for agent in AGENTS]
                is_truncated = [done and bool(bad) and bad[at] and not dead_before[at] for at, done in enumerate(dones)]
                assert [terminateds[place][agent] or truncateds[place][agent] for agent in AGENTS] == dones
                assert [truncateds[place][agent] for agent in AGENTS] == is_truncated
                assert terminateds[place]["__all__"] == (over and not any(is_truncated))
                assert truncateds[place]["__all__"] == (over and any(is_truncated))
                of_agents = their_infos if isinstance(their_infos, list) else [{}] * K
                for at, agent in enumerate(AGENTS):
                    info = infos[place][agent]
                    assert {key: info[key] for key in of_agents[at]} == of_agents[at]
                    assert over or info.keys() == of_agents[at].keys()
                if isinstance(their_infos, dict):
                    assert infos[place]["__common__"] == their_infos
                if not over:
                    deaths += any(dones)
                    assert env.acting[place] == [agent for agent, done in zip(AGENTS, dones) if not done]
                else:
                    ends += 1
                    assert env.acting[place] == AGENTS
                    for at, agent in enumerate(AGENTS):
                        info, dtype = infos[place][agent], env.observation_space[agent].dtype
                        np.testing.assert_array_equal(info["final_obs"], np.asarray(last[0][at], dtype))
                        if last[2] is not None and last[2][at] is not None:
                            np.testing.assert_array_equal(info["action_mask"], last[2][at])
                        else:
                            assert "action_mask" not in info
                assert_shown(env, kind, place, observations[place], loop.latest[place])
    assert ends > 12
    assert (deaths > 10) == (kind is Squad)


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("kind", [Particles, Squad, Swimmers])
def test_a_step_within_an_episode_pickles_nothing(kind, monkeypatch):
    with ParallelEnv([kind] * 2, seed=7, backend="serial") as env:
        env.reset()
        pickled: list[Any] = []
        monkeypatch.setattr(
            "marl_parallel.core.worker.worker.dump_leftovers", lambda leftovers: pickled.append(leftovers)
        )
        for _ in range(30):
            _, _, terminateds, truncateds, _ = env.step([{}] * 2)
            over = any(flags["__all__"] for flags in (*terminateds, *truncateds))
            assert over or pickled == []
            pickled.clear()
            env.state()


def test_rewards_keep_their_types():
    with ParallelEnv([Swimmers], backend="serial") as env:
        env.reset()
        _, rewards, *_ = env.step([{}])
        assert {*map(type, rewards[0].values())} == {np.float64}
    with ParallelEnv([Squad], backend="serial") as env:
        env.reset()
        _, rewards, *_ = env.step([{}])
        assert {*map(type, rewards[0].values())} == {float}


class Recorder(Squad):
    """Notes the actions it gets."""

    def step(self, actions: Any) -> Any:
        self.taken = [*getattr(self, "taken", []), actions[:, 0].tolist()]
        return super().step(actions)


def test_a_missing_action_is_the_first_that_is_allowed(parallel):
    env = parallel(Recorder, 1, True)
    env.reset()
    expected = []
    for step in range(30):
        masks, given = env.action_masks[0], {}
        if step % 2:
            given = {"agent_1": int(np.flatnonzero(masks["agent_1"])[-1])}
        expected.append([given.get(agent, int(np.flatnonzero(masks[agent])[0])) for agent in AGENTS])
        env.step([given])
    assert env.get_attr("taken")[0] == expected
    assert any(0 in actions for actions in expected)  # of a dead agent
    continuous = parallel(Swimmers, 1, True)
    continuous.reset()
    continuous.step([{}])
    assert continuous.get_attr("total") == (0.0,)


@pytest.mark.parametrize(
    ("form", "expected"), [("one-hot", np.eye(5)[[3, 1, 0]]), ("column", [[3], [1], [0]]), ("index", [3, 1, 0])]
)
def test_the_form_of_actions_can_be_chosen(form, expected):
    class Takes(Particles):
        def chosen(self, actions: Any) -> list[int]:
            np.testing.assert_array_equal(actions, expected)
            return [0] * K

    with ParallelEnv([Takes], adapter=functools.partial(MAPPOEnv, actions=form), backend="serial") as env:
        env.reset()
        env.step([dict(zip(AGENTS, [3, 1, 0]))])
    with pytest.raises(ValueError, match="actions must be None or one of 'one-hot', 'column', 'index'; got 'hot'"):
        MAPPOEnv(Particles(), actions="hot")


def test_agents_with_different_action_spaces_get_a_list_of_rows():
    class Mixed(Squad):
        def __init__(self, seed: int | None = None) -> None:
            super().__init__(seed)
            mixed = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)])
            self.action_space = [spaces.Discrete(2), spaces.Box(-1, 1, (4,)), mixed]

        def get_avail_actions(self) -> Any:
            return [[0, 1], None, None]

        def step(self, actions: Any) -> Any:
            self.taken = actions
            self.move([0] * K)
            return self.get_obs(), self.shares(), [0.0] * K, [0.0] * K, [{}] * K, self.get_avail_actions()

    with ParallelEnv([Mixed], backend="serial") as env:
        env.reset()
        assert [*env.action_masks[0]] == ["agent_0"]
        env.step([{"agent_1": np.full(4, 0.5, np.float32), "agent_2": (np.array([0.5, -0.5], np.float32), 2)}])
        first, second, third = env.get_attr("taken")[0]
        assert first.tolist() == [1]
        assert second.tolist() == [0.5] * 4
        assert third.tolist() == [0.5, -0.5, 2.0]


def test_nothing_happens_after_the_end_of_an_episode_without_auto_reset(parallel):
    env = parallel(Squad, 1, False)
    env.reset()
    while not (env.get_attr("time")[0] >= 8 or all(env.call("dead", place)[0] for place in range(K))):
        _, _, terminateds, truncateds, _ = env.step([{}])
    time, state = env.get_attr("time"), env.state()
    again = env.step([{}])
    assert again[0] == again[1] == again[4] == ({},)
    assert again[2][0] == {"__all__": terminateds[0]["__all__"]}
    assert again[3][0] == {"__all__": truncateds[0]["__all__"]}
    assert env.get_attr("time") == time
    np.testing.assert_array_equal(env.state(), state)
    env.reset(env_ids=[0])
    assert env.acting[0] == AGENTS


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1], []])
@pytest.mark.parametrize("form", ["one-hot", "column", "index"])
def test_actions_are_in_the_order_of_agents(form, order):
    """Also if some have none: theirs is the first that is allowed. All forms have the same dtype as with all."""
    adapted = MAPPOEnv(Recorder(3), actions=form)
    adapted.reset()
    first = [int(np.flatnonzero(mask)[0]) for mask in adapted.masks().values()]
    given = {AGENTS[place]: np.int64(2 + place) for place in order}
    expected = np.array([given.get(agent, number) for agent, number in zip(AGENTS, first)])
    joint = adapted._joint(given)
    if form == "one-hot":
        joint = joint.argmax(axis=1)
    assert joint.dtype == np.int64
    assert joint.tolist() == (expected[:, None] if form == "column" else expected).tolist()


@pytest.mark.parametrize("typed", [np.float64, list, lambda row: row.astype(int).tolist()])
def test_share_observations_of_every_type_are_one_array(typed):
    class Typed(Squad):
        def shares(self) -> Any:
            return [typed(row) for row in super().shares()]

    with ParallelEnv([Typed, Squad], backend="serial") as env:
        env.reset()
        states = env.state()
        assert states.dtype == np.float32
        for place in range(K):
            np.testing.assert_array_equal(states[:, place], env.call("get_state", place))


def test_share_observations_may_be_one_for_all():
    class OneState(Squad):
        def shares(self) -> Any:
            return self.get_state(5)

    with ParallelEnv([OneState] * 2, backend="serial") as env:
        env.reset()
        np.testing.assert_array_equal(env.state()[1], [env.call("get_state", 5)[1]] * K)


def test_a_restart_keeps_masks_and_share_observations(build, two_worker_setup):
    class Breaks(Squad):
        def __init__(self, seed: int | None = None, restarts: int = 0) -> None:
            super().__init__(seed)
            self.breaks = not restarts

        def step(self, actions: Any) -> Any:
            if self.breaks and self.time == 1:
                raise RuntimeError("out of ammunition")
            return super().step(actions)

    env = build([Breaks, Squad], two_worker_setup, "SAME_STEP", 3, on_error="restart")
    env.reset()
    env.step([{}] * 2)
    _, _, terminateds, truncateds, infos = env.step([{}] * 2)
    assert infos[0]["__common__"]["restarted"]
    assert truncateds[0] == dict.fromkeys([*AGENTS, "__all__"], True)
    assert not terminateds[1]["__all__"]
    assert env.acting[0] == AGENTS
    expected = WorkersLoop(Squad, [0]).latest[0][2]  # at its first step, masks do not depend on the seed
    np.testing.assert_array_equal([*env.action_masks[0].values()], expected)
    assert env.state()[0, 0, 4] == 0
    assert env.state()[1, 0, 4] == 2


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_masks_that_come_and_go(num_workers, shared_memory):
    """Available actions may be None for all, or for some agents."""

    class Now(Squad):
        def get_avail_actions(self) -> Any:
            row = [0, 1, 0, 1, 1]
            return [None, [row, None, row], [row] * K, [None] * K][self.time % 4]

        def step(self, actions: Any) -> Any:
            self.move([0] * K)
            return self.get_obs(), self.shares(), [0.0] * K, [False] * K, [{}] * K, self.get_avail_actions()

    vec = StackedVecEnv(ParallelEnv([Now] * 2, num_workers=num_workers, shared_memory=shared_memory))
    vec.reset()
    for step in range(9):
        reported = [[], ["agent_0", "agent_2"], AGENTS, []][step % 4]
        for masks in vec.env.action_masks:
            assert [*masks] == reported
            assert all(mask.tolist() == [False, True, False, True, True] for mask in masks.values())
        expected = [[0, 1, 0, 1, 1] if agent in reported else [1] * 5 for agent in AGENTS]
        np.testing.assert_array_equal(vec.action_masks, [expected] * 2)
        vec.step(np.ones((2, K), np.int64))
    vec.close()


def test_actions_of_different_numbers_can_be_padded():
    class Uneven(Squad):
        def __init__(self, seed: int | None = None) -> None:
            super().__init__(seed)
            self.action_space = [spaces.Discrete(number) for number in (2, 5, 3)]

        def get_avail_actions(self) -> Any:
            return [[0, 1], [0, 1, 1, 0, 1], [1, 0, 1]]

        def step(self, actions: Any) -> Any:
            self.move([0] * K)
            over = [self.time >= 3] * K
            return self.get_obs(), self.shares(), [0.0] * K, over, [{}] * K, self.get_avail_actions()

    expected = [[0, 1, 0, 0, 0], [0, 1, 1, 0, 1], [1, 0, 1, 0, 0]]
    with ParallelEnv([lambda: pad_spaces(Uneven())], backend="serial") as env:
        env.reset()
        for step in range(1, 7):
            np.testing.assert_array_equal([*env.action_masks[0].values()], expected)
            *_, infos = env.step([{}])
            assert ("action_mask" in infos[0]["agent_0"]) == (step % 3 == 0)
            for agent, mask in zip(AGENTS, expected):
                np.testing.assert_array_equal(infos[0][agent].get("action_mask", mask), mask)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_spaces_of_gym_are_converted():
    class Old(Squad):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = [
                old("MultiDiscrete", nvec=np.array([2, 3])), old("MultiBinary", n=4),
                old("Tuple", spaces=[old_box(2), old("Discrete", n=3)]),
            ]  # fmt: skip
            self.observation_space = [old_box(4), np.int64(6), [3, 8, 8]]  # type: ignore[list-item]

    adapted = adapt(Old())
    assert [*adapted.action_spaces.values()] == [
        spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4), spaces.Tuple([box(2), spaces.Discrete(3)]),
    ]  # fmt: skip
    assert [space.shape for space in adapted.observation_spaces.values()] == [(4,), (6,), (3, 8, 8)]
    assert [*adapted.mask_spaces] == ["agent_0"]


@pytest.mark.parametrize(
    ("name", "space", "expected"),
    [
        (
            "action_space",
            5,
            r"action_space\[0\] of .*Wrong is 5, of type builtins.int; expected a Box, Discrete, .* gym",
        ),
        ("observation_space", None, r"observation_space\[0\] of .* is None, .* gym, a size, or a list \[size, ...\]"),
        ("observation_space", [0, [1, 2]], r"observation_space\[0\] of .* is \[0, \[1, 2\]\]"),
        ("share_observation_space", "9", r"share_observation_space\[0\] of .*Wrong is 9, of type builtins.str"),
        ("action_space", old("Dict", spaces={}), r"action_space\[0\] of .* gym.spaces.space.Dict; .* gymnasium.spaces"),
        (
            "action_space",
            old("Discrete", n="x"),
            r"action_space\[0\] of .*, which cannot be converted: invalid literal",
        ),
    ],
)
def test_spaces_that_cannot_be_converted_are_refused(name, space, expected):
    class Wrong(Squad):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, [space] * K)

    with pytest.raises(NotAnEnvironment, match=expected):
        adapt(Wrong())


def test_lists_of_different_lengths_are_refused():
    class Uneven(Squad):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = self.action_space[:2]

    with pytest.raises(NotAnEnvironment, match=r"declares 3 agents, .*`observation_space` of 3, .*`action_space` of 2"):
        adapt(Uneven(), "mappo")
    with pytest.raises(NotAnEnvironment, match=r"a list `observation_space` with one space per agent; .*Bare has none"):
        adapt(type("Bare", (Squad,), {"__init__": lambda self: self.__dict__.update(n_agents=K)})(), "mappo")


THREE = [np.zeros(4)] * K
SHARE = [np.zeros(9)] * K
MASKS = [[1] * 5] * K
GOOD = THREE, SHARE, [[0.0]] * K, [False] * K, [{}] * K, MASKS


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("reset", THREE[:2], "`reset` .* must return a list of observations, or .*; it returned 2 values"),
        ("reset", (THREE, {}), "`reset` .* must return a list of observations, or .*; it returned 2 values"),
        ("reset", None, "`reset` .* must return a list of observations, or .* one value of type NoneType"),
        ("reset", (THREE, SHARE, MASKS[:2]), "`reset` .* must return 3 available actions, one row per agent, or None"),
        (
            "reset",
            (THREE, SHARE, [[1] * 4] * K),
            "must return 5 zeros and ones as the available actions of agent 'agent_0",
        ),
        ("step", GOOD[:4], "`step` .* 6 values, as `reset` returned share observations; it returned 4 values"),
        ("step", None, "`step` .* 6 values, .*; it returned one value of type NoneType"),
        ("step", (THREE[:1], *GOOD[1:]), "with 3 observations, one per agent; it returned 1 values"),
        ("step", (*GOOD[:2], [0.0], *GOOD[3:]), "`step` .* must return 3 rewards, one per agent; it returned 1 values"),
        ("step", (*GOOD[:2], [[0, 1]] * K, *GOOD[3:]), "must return 3 rewards, one number per agent"),
        (
            "step",
            (*GOOD[:2], [0.0, None, 0.0], *GOOD[3:]),
            "one number per agent; the reward of agent 'agent_1' is None",
        ),
        ("step", (*GOOD[:2], np.array(["a"] * K), *GOOD[3:]), "the reward of agent 'agent_0' is (np.str_\\()?'a'"),
        ("step", (*GOOD[:3], [False] * 2, *GOOD[4:]), "must return 3 dones, one flag per agent, or one flag; it"),
        ("step", (*GOOD[:3], [None] * K, *GOOD[4:]), "must return 3 dones, one flag per agent, or one flag; it"),
        ("step", (*GOOD[:4], [{}] * 2, MASKS), "must return 3 infos, one dict per agent, or one dict; it returned 2"),
        ("step", (*GOOD[:4], [[]] * K, MASKS), "must return 3 infos, one dict per agent, or one dict"),
        ("step", (*GOOD[:5], MASKS[0]), "must return 3 available actions, one row per agent, or None"),
    ],
)
def test_results_of_another_form_are_refused(method, result, expected):
    wrong = type("Wrong", (Squad,), {method: lambda self, *_: self.begin() or result})

    def reset_and_step(env: Any) -> None:
        env.reset()
        env.step(dict.fromkeys(AGENTS, 1))

    with pytest.raises(AdapterMismatch, match=expected) as raised:
        reset_and_step(adapt(wrong()))
    assert "It was treated as a MAPPO environment; if it is of another kind, pass adapter=" in str(raised.value)


class Two(Simulator):
    """Two agents, with observations and share observations of two numbers each: a tuple of two may be either."""

    n_agents = 2
    obs_size = (2, 2)
    observation_space = share_observation_space = [box(2)] * 2
    action_space = [spaces.Discrete(3)] * 2
    first: Any = None  # what `reset` returns
    number = 4

    def reset(self) -> Any:
        self.begin()
        return self.first

    def step(self, actions: Any) -> Any:
        self.shape = np.shape(actions)
        share = [[np.full(2, 7.0)] * 2] * (self.number > 4)
        return self.look(), *share, [0.0] * 2, [False] * 2, [{}] * 2, *[None] * (self.number == 6)


ROWS, SHARES = [np.array([1.0, 2.0]), np.array([3.0, 4.0])], [np.array([5.0, 6.0]), np.array([7.0, 8.0])]


@pytest.mark.parametrize(
    ("first", "number", "share"),
    [
        (ROWS, 4, ROWS),
        (tuple(ROWS), 4, ROWS),
        (np.stack(ROWS), 4, ROWS),
        (([1.0, 2.0], [3.0, 4.0]), 4, ROWS),
        ((ROWS, SHARES), 5, SHARES),
        ((np.stack(ROWS), np.stack(SHARES)), 5, SHARES),
        (([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]), 5, SHARES),
        ((ROWS, SHARES, None), 6, SHARES),
        ((ROWS, SHARES, [[1, 1, 1]] * 2), 6, SHARES),
    ],
)
def test_the_form_of_reset_says_how_many_values_a_step_has(first, number, share):
    simulator = type("Form", (Two,), {"first": first, "number": number})
    with ParallelEnv([simulator], backend="serial") as env:
        observations, _ = env.reset()
        np.testing.assert_array_equal([*observations[0].values()], ROWS)
        np.testing.assert_array_equal(env.state()[0], share)
        observations, *_ = env.step([{"agent_0": 1, "agent_1": 2}])
        own = [*observations[0].values()]
        np.testing.assert_array_equal(env.state()[0], own if number == 4 else np.full((2, 2), 7.0))
        assert env.get_attr("shape") == ((2,) if number == 4 else (2, 1),)
    other = type("Other", (Two,), {"first": first, "number": 4 if number > 4 else 5})
    with ParallelEnv([other], backend="serial") as env:
        env.reset()
        with pytest.raises(EnvError, match=rf"`step` .* must return \(.*\); {number} values, as `reset` returned"):
            env.step([{"agent_0": 1, "agent_1": 2}])


def test_six_values_after_observations_alone_are_refused():
    class Changes(Squad):
        def reset(self) -> Any:
            return super().reset()[0]

        def step(self, actions: Any) -> Any:
            return super().step(actions.reshape(K, 1))

    with ParallelEnv([Changes], backend="serial") as env:
        env.reset()
        with pytest.raises(EnvError, match="4 values, as `reset` returned observations; it returned 6 values"):
            env.step([dict.fromkeys(AGENTS, 1)])


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ([np.zeros(9)] * 2, "must return 3 share observations, one per agent; it returned 2 values"),
        (
            [np.zeros(8)] * K,
            r"the share observation of agent 'agent_0' of .* must have the shape \(9,\), .* it has \(8,\)",
        ),
        (None, "must return 3 share observations, one per agent; it returned one value of type NoneType"),
    ],
)
def test_share_observations_of_another_form_are_refused(share, expected):
    wrong = type("Wrong", (Squad,), {"shares": lambda self: share})
    with ParallelEnv([wrong], backend="serial") as env:
        env.reset()
        with pytest.raises(EnvError, match=expected):
            env.state()


def test_a_list_of_three_observations_is_no_triple():
    class AsTuple(Pitch):
        def reset(self) -> Any:
            return tuple(super().reset())

    class OfThree(Simulator):
        """Three agents with three numbers each: a tuple of observations looks like share observations and masks."""

        obs_size = (3, 3, 3)
        observation_space = share_observation_space = (spaces.Box(-99, 99, (3,), np.float32),) * K
        action_space = (spaces.Discrete(3),) * K

        def reset(self) -> Any:
            self.begin()
            return tuple(self.look())

        def step(self, actions: Any) -> Any:
            self.move(actions)
            return tuple(self.look()), [0.0] * K, [False] * K, [{}] * K

    for kind in (AsTuple, OfThree):
        with ParallelEnv([kind], backend="serial") as env:
            observations, _ = env.reset()
            assert [one.shape for one in observations[0].values()] == [env.observation_space["agent_0"].shape] * K
            env.step([{}])
            assert env.action_masks == ({},)
