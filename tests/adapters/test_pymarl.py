"""PyMARL's `MultiAgentEnv`: recognition, transitions, masks and state against a plain loop, and what is refused."""

from __future__ import annotations

import os
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from simulators.pymarl_envs import (
    AGENTS,
    N_ACTIONS,
    N_AGENTS,
    NO_OP,
    OBS,
    STATE,
    Forwarding,
    Gymma,
    Independent,
    PlainLoop,
    Silent,
    Skirmish,
    Wrapped,
)

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, make
from marl_parallel.adapters import AdapterMismatch, NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.pymarl_env import PyMARLEnv
from marl_parallel.vector import PyMARLConnections, StackedVecEnv
from marl_parallel.wrappers import pad_spaces

pytestmark = pytest.mark.in_turn

KINDS = [Skirmish, Wrapped, Independent, Silent]


class OfGymnasium(Wrapped, gymnasium.Env):
    """A Gymnasium environment with PyMARL's methods, as SMAClite would be with `get_env_info`."""

    observation_space = spaces.Tuple([spaces.Box(-1, 1, (OBS,))] * N_AGENTS)  # type: ignore[assignment]
    action_space = spaces.Tuple([spaces.Discrete(N_ACTIONS)] * N_AGENTS)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "simulator", [*KINDS, lambda: Forwarding(Skirmish()), OfGymnasium, lambda: gymnasium.Wrapper(OfGymnasium())]
)
def test_pymarl_environments_are_recognised(simulator):
    adapted = adapt(simulator())
    assert type(adapted) is PyMARLEnv
    assert adapted.rules is Rules.DICT
    assert adapted.possible_agents == AGENTS
    assert adapted.observation_spaces == dict.fromkeys(AGENTS, spaces.Box(-np.inf, np.inf, (OBS,), np.float32))
    assert adapted.action_spaces == dict.fromkeys(AGENTS, spaces.Discrete(N_ACTIONS))
    assert adapted.mask_spaces == dict.fromkeys(AGENTS, spaces.MultiBinary(N_ACTIONS))
    assert adapted.state_space == spaces.Box(-np.inf, np.inf, (STATE,), np.float32)
    assert not adapted.state_per_agent


@pytest.mark.parametrize("name", ["get_env_info", "get_obs", "get_state", "get_avail_actions"])
def test_a_simulator_without_one_of_the_methods_is_of_another_kind(name):
    lacking = type("Lacking", (Skirmish,), {name: None, "possible_agents": AGENTS})
    assert type(adapt(lacking())) is DictEnv
    with pytest.raises(NotAnEnvironment, match=f"A PyMARL environment has no method `{name}`: .*Lacking"):
        adapt(lacking(), "pymarl")


def rewards_of(reward: Any) -> dict[str, Any]:
    if isinstance(reward, list):
        return dict(zip(AGENTS, reward))
    return dict.fromkeys(AGENTS, reward.reshape(())[()] if isinstance(reward, np.ndarray) else reward)


def assert_shown(env: ParallelEnv, observations: Any, loop: PlainLoop, place: int) -> None:
    """What the environment shows of one simulator is what the plain loop has read last."""
    assert [*observations] == AGENTS
    np.testing.assert_array_equal([*observations.values()], loop.observations[place])
    assert {one.dtype for one in observations.values()} == {np.dtype(np.float32)}
    masks = env.action_masks[place]
    assert [*masks] == AGENTS
    np.testing.assert_array_equal([*masks.values()], loop.masks[place])
    np.testing.assert_array_equal(env.state()[place], loop.states[place])


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_steps_equal_a_plain_loop(kind, mode, build, setup):
    check_two_hundred_steps(kind, mode, lambda: build([kind] * 4, setup, mode, 7))


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
def test_two_hundred_steps_without_compiled_code_equal_a_plain_loop(mode, monkeypatch):
    monkeypatch.setattr("marl_parallel.core.block.codec.Codec", None)
    for kind in KINDS:
        check_two_hundred_steps(kind, mode, lambda kind=kind: ParallelEnv([kind] * 4, mode, 7, backend="serial"))


def check_two_hundred_steps(kind: Any, mode: str, construct: Any) -> None:
    loop, rng, ends = PlainLoop(kind, [7, 8, 9, 10], reset_seeds=issubclass(kind, Wrapped)), np.random.default_rng(3), 0
    with construct() as env:
        observations, infos = env.reset()
        weather = {"__common__": {"weather": 3.0}} if issubclass(kind, Wrapped) else {}
        assert infos[0] == {**{agent: {} for agent in AGENTS}, **weather}
        for place in range(4):
            assert_shown(env, observations[place], loop, place)
        for _ in range(50):
            chosen = loop.choose(rng)
            actions = [dict(zip(AGENTS, of_env)) for of_env in chosen]
            observations, rewards, terminateds, truncateds, infos = env.step(actions)
            for place in range(4):
                if loop.over[place]:  # NEXT_STEP
                    loop.reset(place, {})
                    assert rewards[place] == dict.fromkeys(AGENTS, 0.0)
                    assert not any([*terminateds[place].values(), *truncateds[place].values()])
                    assert_shown(env, observations[place], loop, place)
                    continue
                reward, terminated, truncated, info = loop.step(place, chosen[place])
                expected = rewards_of(reward)
                assert rewards[place] == expected
                assert [*map(type, rewards[place].values())] == [*map(type, expected.values())]
                assert terminateds[place] == dict.fromkeys([*AGENTS, "__all__"], bool(terminated))
                assert truncateds[place] == dict.fromkeys([*AGENTS, "__all__"], bool(truncated))
                common = infos[place].get("__common__", {})
                assert common == (info if mode != "SAME_STEP" or not loop.over[place] else {**info, **common})
                if not loop.over[place]:
                    assert [infos[place][agent] for agent in AGENTS] == [{}] * N_AGENTS
                    assert env.acting[place] == AGENTS
                    assert_shown(env, observations[place], loop, place)
                    continue
                ends += 1
                last = [infos[place][agent]["action_mask"] for agent in AGENTS]
                np.testing.assert_array_equal(last, loop.masks[place])
                if mode == "SAME_STEP":
                    final = [infos[place][agent]["final_obs"] for agent in AGENTS]
                    np.testing.assert_array_equal(final, loop.observations[place])
                    loop.reset(place, {})
                else:
                    assert env.acting[place] == []
                assert_shown(env, observations[place], loop, place)
                if mode == "DISABLED":
                    again, infos_again = env.reset(env_ids=[place])
                    loop.reset(place, {})
                    assert_shown(env, again[0], loop, place)
                    assert "action_mask" not in infos_again[0]["agent_0"]
        assert env.call("get_stats") == tuple(one.get_stats() for one in loop.simulators)
    assert ends > 12


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("kind", [Skirmish, Wrapped])
def test_a_step_pickles_nothing_but_its_large_infos(kind, monkeypatch):
    with ParallelEnv([kind] * 2, seed=7, backend="serial") as env:
        env.reset()
        pickled = []
        monkeypatch.setattr(
            "marl_parallel.core.worker.worker.dump_leftovers", lambda leftovers: pickled.append(leftovers)
        )
        for _ in range(30):
            env.step([{}] * 2)
            assert all(len(masks) == N_AGENTS for masks in env.action_masks)
            env.state()
    assert pickled == []
    assert env.stats().resets > 2


def test_a_missing_action_is_the_first_that_is_allowed(parallel):
    env = parallel(Recorder, 1, True)
    env.reset()
    expected = []
    for step in range(20):
        masks = env.action_masks[0]
        given = {"agent_1": int(np.flatnonzero(masks["agent_1"])[-1])} if step % 2 else {}
        expected.append([given.get(agent, int(np.flatnonzero(masks[agent])[0])) for agent in AGENTS])
        env.step([given])
    assert env.get_attr("taken")[0] == expected
    assert NO_OP.index(1) in [action for actions in expected for action in actions]


class Recorder(Skirmish):
    """Notes the actions it gets."""

    def step(self, actions: Any) -> Any:
        self.taken = [*getattr(self, "taken", []), actions.tolist()]
        return super().step(actions)


def test_an_agent_that_may_do_nothing_and_has_no_action_gets_action_zero():
    class Frozen(Recorder):
        def get_avail_actions(self) -> Any:
            return np.zeros((N_AGENTS, N_ACTIONS))

        def get_avail_agent_actions(self, place: int) -> Any:
            return [1] * N_ACTIONS

    with ParallelEnv([Frozen], backend="serial") as env:
        env.reset()
        env.step([{"agent_2": 4}])
        assert env.get_attr("taken")[0] == [[0, 0, 4]]
        assert not any(mask.any() for mask in env.action_masks[0].values())


def test_nothing_happens_after_the_end_of_an_episode_without_auto_reset(parallel):
    env = parallel(Skirmish, 1, False)
    env.reset()
    while env.acting[0]:
        _, _, terminateds, truncateds, _ = env.step([{}])
    stats, masks = env.call("get_stats"), env.action_masks[0]
    again = env.step([{}])
    assert again[0] == again[1] == again[4] == ({},)
    assert again[2][0] == {"__all__": terminateds[0]["__all__"]}
    assert again[3][0] == {"__all__": truncateds[0]["__all__"]}
    assert env.call("get_stats") == stats
    np.testing.assert_array_equal([*env.action_masks[0].values()], [*masks.values()])


def test_methods_of_the_simulator_are_called_by_name():
    with make(Wrapped, num_envs=2, num_workers=2) as env:
        env.reset()
        env.call("save_replay", env_ids=[1])
        assert env.get_attr("replays") == (0, 1)
        assert env.call("seed", 5) == ([5], [5])
        assert env.call("get_env_info")[0]["episode_limit"] == 9
        assert env.call("get_avail_agent_actions", 0) == tuple(
            [*map(int, masks["agent_0"])] for masks in env.action_masks
        )


def test_facades_and_random_actions_follow_the_masks():
    vec = StackedVecEnv(make(Skirmish, num_envs=3, num_workers=2))
    loop = PlainLoop(Skirmish, [*vec.env.seed()], reset_seeds=False)
    vec.reset()
    for _ in range(30):
        np.testing.assert_array_equal(vec.action_masks, loop.masks)
        chosen = [[int(np.flatnonzero(mask)[-1]) for mask in masks] for masks in vec.action_masks]
        vec.step(np.array(chosen))
        for place, actions in enumerate(chosen):
            loop.step(place, actions)
            if loop.over[place]:
                loop.reset(place, {})
    vec.close()
    with make(Skirmish, num_envs=2, backend="serial") as env:  # which asserts that actions are allowed
        env.reset()
        for _ in range(40):
            env.step(env.sample_actions())


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_masks_after_a_restart_are_those_of_the_new_simulator(mode, build, two_worker_setup):
    class Breaks(Skirmish):
        def __init__(self, seed: int | None = None, restarts: int = 0) -> None:
            super().__init__(seed)
            self.breaks = not restarts

        def step(self, actions: Any) -> Any:
            if self.breaks and self.time == 1:
                raise RuntimeError("out of ammunition")
            return super().step(actions)

    env = build([Breaks, Skirmish], two_worker_setup, mode, 3, on_error="restart")
    env.reset()
    env.step([{}] * 2)
    _, _, _, truncateds, infos = env.step([{}] * 2)
    assert truncateds[0] == dict.fromkeys([*AGENTS, "__all__"], True)
    assert infos[0]["__common__"]["restarted"]
    if mode != "SAME_STEP":
        assert env.action_masks[0] == {}
        assert len(env.action_masks[1]) == N_AGENTS
        env.step([{}] * 2) if mode == "NEXT_STEP" else env.reset(env_ids=[0])
    loop = PlainLoop(Skirmish, [0], reset_seeds=False)  # at its first step, masks do not depend on the seed
    np.testing.assert_array_equal([*env.action_masks[0].values()], loop.masks[0])
    for _ in range(20):
        env.step(env.sample_actions())
    assert env.stats().restarts == 1


def assert_masks_are_those_of_the_simulators(env: ParallelEnv) -> None:
    known = [place for place, masks in enumerate(env.action_masks) if masks]
    shown = [[*env.action_masks[place].values()] for place in known]
    np.testing.assert_array_equal(shown, np.array(env.call("get_avail_actions", env_ids=known), bool))


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_masks_after_a_crash_and_of_neighbours_in_the_same_worker(mode):
    class Crashes(Skirmish):
        def __init__(self, seed: int | None = None, env_id: int = 0, restarts: int = 0) -> None:
            super().__init__(seed)
            self.crashes = env_id == 1 and not restarts

        def step(self, actions: Any) -> Any:
            if self.crashes and self.time == 2:
                os._exit(3)
            return super().step(actions)

    with ParallelEnv([Crashes] * 4, mode, 3, num_workers=2, on_error="restart") as env:
        env.reset()
        known = []
        for _ in range(25):
            env.step(env.sample_actions())
            known.append(sum(map(bool, env.action_masks)))
            assert_masks_are_those_of_the_simulators(env)
        assert env.stats().restarts == 2
        assert known.count(4) > 20


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
def test_masks_of_a_standby_worker(mode):
    with ParallelEnv([Skirmish] * 2, mode, 3, num_workers=2, recycle=RecyclePolicy(max_episodes=1)) as env:
        env.reset()
        recycled = 0
        for _ in range(30):
            *_, terminateds, truncateds, infos = env.step(env.sample_actions())
            over = [place for place in range(2) if terminateds[place]["__all__"] or truncateds[place]["__all__"]]
            if over and mode == "DISABLED":
                _, infos = env.reset(env_ids=over)
            recycled += sum("recycled" in of_env.get("__common__", {}) for of_env in infos)
            assert [*map(len, env.action_masks)] == [N_AGENTS] * 2
            assert_masks_are_those_of_the_simulators(env)
    assert recycled > 2


@pytest.mark.parametrize(
    "rewards",
    [
        [[1.0], [2.0], [3.0]],
        np.array([[1.0], [2.0], [3.0]]),
        np.array([[1.0, 2.0, 3.0]]),
        [np.array([1.0]), np.array([[2.0]]), np.array(3.0)],
        ((1.0,), [2], np.float32(3.0)),
        np.array([1.0, 2.0, 3.0], object),
    ],
    ids=["lists", "column", "row", "arrays", "mixed", "objects"],
)
def test_rewards_of_each_may_be_lists_or_arrays_of_one(rewards):
    """In the dicts, and in a facade's arrays."""

    class Columns(Wrapped):
        def step(self, actions: Any) -> Any:
            seen, _, *others = super().step(actions)
            return seen, rewards, *others

    with ParallelEnv([Columns], backend="serial") as env:
        env.reset()
        received = env.step([{}])[1][0]
        assert received == dict(zip(AGENTS, [1.0, 2.0, 3.0]))
        assert not any(isinstance(reward, list | np.ndarray) for reward in received.values())
    with ParallelEnv([Columns], auto_reset=False, backend="serial", seed="own") as env:
        connection = PyMARLConnections(env)[0]
        connection.send(("reset", None))
        masks = connection.recv()["avail_actions"]
        connection.send(("step", masks.argmax(1)))
        assert connection.recv()["reward"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("common_reward", [True, False])
@pytest.mark.parametrize(
    "key",
    [
        pytest.param("lbforaging:Foraging-8x8-2p-3f-v3", marks=pytest.mark.needs("lbforaging")),
        pytest.param("rware:rware-tiny-2ag-v2", marks=pytest.mark.needs("rware")),
    ],
)
def test_foraging_and_warehouses_equal_a_plain_loop(key, common_reward):
    def construct(seed: int) -> Gymma:
        return Gymma(key, seed, common_reward)

    loop, rng, ends = PlainLoop(construct, [5, 6], reset_seeds=True), np.random.default_rng(1), 0
    with ParallelEnv([construct] * 2, "SAME_STEP", 5, num_workers=2) as env:
        observations, _ = env.reset()
        for _ in range(100):
            for place in range(2):
                np.testing.assert_array_equal([*observations[place].values()], loop.observations[place])
                np.testing.assert_array_equal(env.state()[place], loop.states[place])
                np.testing.assert_array_equal([*env.action_masks[place].values()], loop.masks[place])
            chosen = loop.choose(rng)
            observations, rewards, terminateds, truncateds, _ = env.step([dict(zip(AGENTS, one)) for one in chosen])
            for place in range(2):
                reward, terminated, truncated, _ = loop.step(place, chosen[place])
                assert [*rewards[place].values()] == ([reward] * 2 if common_reward else [*reward])
                assert (terminateds[place]["__all__"], truncateds[place]["__all__"]) == (terminated, truncated)
                if loop.over[place]:
                    ends += 1
                    loop.reset(place, {})
    assert ends >= 6


def test_padding_keeps_the_masks():
    with ParallelEnv([lambda seed: pad_spaces(Skirmish(seed))] * 2, backend="serial") as env:
        loop = PlainLoop(Skirmish, [42, 43], reset_seeds=False)
        env.reset()
        for _ in range(20):
            np.testing.assert_array_equal([[*one.values()] for one in env.action_masks], loop.masks)
            env.step([{}] * 2)
            for place in range(2):
                loop.step(place, [int(np.flatnonzero(mask)[0]) for mask in loop.masks[place]])
                if loop.over[place]:
                    loop.reset(place, {})


def test_schemas_with_masks_pickle():
    with ParallelEnv([Skirmish], backend="serial") as env:
        assert pickle.loads(pickle.dumps(env.stepper.schema)).mask_spaces == env.stepper.schema.mask_spaces


def test_environments_with_other_masks_are_refused():
    class More(Skirmish):
        def get_total_actions(self) -> int:
            return N_ACTIONS + 1

    with pytest.raises(ValueError, match="environment 1 differs from environment 0 in the action space of agent"):
        ParallelEnv([Skirmish, More], backend="serial")


# -- shapes, and what is refused ---------------------------------------------------------------------------------------


def test_observations_and_states_of_more_axes():
    class Seen(Skirmish):
        def get_obs_size(self) -> Any:
            return [2, 3]

        def get_state_size(self) -> Any:
            return (4, 5)

        def get_obs(self) -> Any:
            return [np.full((2, 3), place) for place in range(N_AGENTS)]

        def get_state(self) -> Any:
            return np.ones((4, 5))

    with ParallelEnv([Seen] * 2, backend="serial") as env:
        observations, _ = env.reset()
        np.testing.assert_array_equal(observations[1]["agent_2"], np.full((2, 3), 2, np.float32))
        assert env.state().shape == (2, 4, 5)


def test_a_simulator_without_a_state_has_no_state_space():
    class Stateless(Skirmish):
        def get_state_size(self) -> Any:
            return 0

    with ParallelEnv([Stateless], backend="serial") as env:
        env.reset()
        assert env.state_space is None
        with pytest.raises(NotImplementedError):
            env.state()


def test_sizes_may_come_from_the_other_methods():
    class Brief(Skirmish):
        def get_env_info(self) -> dict[str, Any]:
            return {"episode_limit": 9}

    adapted = adapt(Brief())
    assert adapted.possible_agents == AGENTS
    assert adapted.state_space.shape == (STATE,)


@pytest.mark.parametrize(
    ("entry", "value", "expected"),
    [
        ("n_agents", 0, "'n_agents', a positive number; it has 0"),
        ("n_actions", "6", "'n_actions', a positive number; it has '6'"),
        ("n_actions", True, "'n_actions', a positive number; it has True"),
        ("obs_shape", (3, -1), r"'obs_shape', a positive number, or several for arrays of more axes; it has \(3, -1\)"),
        ("state_shape", 2.5, "'state_shape', a positive number, or several for arrays of more axes; it has 2.5"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(entry, value, expected):
    class Wrong(Skirmish):
        def get_env_info(self) -> dict[str, Any]:
            return {**super().get_env_info(), entry: value}

    with pytest.raises(NotAnEnvironment, match=rf"`get_env_info` of .*Wrong must return a dict with {expected}"):
        adapt(Wrong())


REWARDS = (
    r"`step` .* must return a number as the reward, or a list or array of 3 numbers, one per agent; the reward that it "
    "returned is"
)
RESULTS = r"\(reward, terminated, info\) or \(observations, reward, terminated, truncated, info\)"


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("step", (0.0, False), rf"`step` .* must return {RESULTS}; it returned 2 values: \(float, bool\)"),
        ("step", ([], 0.0, False, {}), rf"`step` .* must return {RESULTS}; it returned 4 values"),
        ("step", None, rf"`step` .* must return {RESULTS}; it returned one value of type NoneType"),
        ("step", (0.0, [False] * 3, {}), "`step` .* must return one terminated flag for all agents; it returned 3 val"),
        ("step", (0.0, None, {}), "`step` .* must return one terminated flag for all agents; .* type NoneType"),
        ("step", (0.0, False, []), "`step` .* must return a dict of infos; it returned 0 values"),
        ("step", ([0.0] * 2, False, {}), rf"{REWARDS} \[0.0, 0.0\] \(2 values: \(float, float\)\)"),
        ("step", (np.zeros(4), False, {}), rf"{REWARDS} array.* and shape \(4,\)"),
        ("step", (np.zeros((3, 2)), False, {}), rf"{REWARDS} array.* and shape \(3, 2\)"),
        ("step", ([[1.0, 2.0]] * 3, False, {}), rf"{REWARDS} \[\[1.0, 2.0\], .* \(3 values: \(list, list, list\)\)"),
        ("step", ([1.0, [], 2.0], False, {}), rf"{REWARDS} \[1.0, \[\], 2.0\]"),
        ("step", ([1.0, None, 2.0], False, {}), rf"{REWARDS} \[1.0, None, 2.0\]"),
        ("step", (["1", "2", "3"], False, {}), rf"{REWARDS} \['1', '2', '3'\]"),
        ("step", (np.array(["1", "2", "3"]), False, {}), rf"{REWARDS} array"),
        ("step", (np.array([1j, 2, 3]), False, {}), rf"{REWARDS} array"),
        ("step", ({"agent_0": 1.0}, False, {}), rf"{REWARDS} \{{'agent_0': 1.0\}} \(one value of type dict"),
        ("step", ("1", False, {}), rf"{REWARDS} '1' \(one value of type str"),
        ("step", (None, False, {}), rf"{REWARDS} None \(one value of type NoneType"),
        ("step", (np.array([None]), False, {}), rf"{REWARDS} array\(\[None\]"),
        ("reset", [0, 1, 2], r"`reset` .* must return nothing, \(observations, state\) or \(observations, info\); it"),
        ("reset", {"agent_0": 1}, r"`reset` .* must return nothing, .*; it returned one value of type dict"),
        (
            "get_obs",
            [np.zeros(OBS)] * 2,
            "`get_obs` .* must return 3 observations, one per agent; it returned 2 values",
        ),
        ("get_obs", None, "`get_obs` .* must return 3 observations, one per agent; .* NoneType"),
        ("get_obs", [["a"] * OBS] * 3, "`get_obs` .* must return 3 arrays of numbers"),
        ("get_avail_actions", [NO_OP] * 2, "`get_avail_actions` .* must return 3 rows, .* 6 zeros and ones, .* 2 rows"),
        ("get_avail_actions", [NO_OP, NO_OP, [1]], "must return 3 rows, .*; it returned 3 rows of lengths 6, 6, 1"),
        ("get_avail_actions", [NO_OP, NO_OP, None], "must return 3 rows, .*; it returned 3 rows of lengths 6, 6, Non"),
        ("get_avail_actions", None, "must return 3 rows, .*; it returned one value of type NoneType"),
    ],
)
def test_results_of_another_form_are_refused(method, result, expected):
    wrong = type("Wrong", (Skirmish,), {method: lambda self, *_: self.begin() or result})

    def reset_and_step(env: Any) -> None:
        env.reset()
        env.step(dict.fromkeys(AGENTS, 1))

    with pytest.raises(AdapterMismatch, match=expected) as raised:
        reset_and_step(adapt(wrong()))
    assert "It was treated as a PyMARL environment; if it is of another kind, pass adapter=" in str(raised.value)


def test_an_observation_of_a_wrong_size_names_the_agent():
    class Short(Skirmish):
        def get_obs(self) -> Any:
            return [*super().get_obs()[:2], np.zeros(OBS - 1, np.float32)]

    message = r"observation of agent 'agent_2': expected .*\(7,\).* got .*\(6,\)"
    with ParallelEnv([Short], backend="serial") as env, pytest.raises(EnvError, match=message):
        env.reset()


def test_a_step_that_takes_other_arguments_is_no_pymarl_environment():
    class Other(Skirmish):
        def step(self, actions: Any, more: Any) -> Any:
            """Never called."""

    adapted = adapt(Other())
    adapted.reset()
    with pytest.raises(AdapterMismatch, match=r"cannot be called as step\(array\(\[1, 1, 1\]\)\): .* 'more'"):
        adapted.step(dict.fromkeys(AGENTS, 1))
