"""`StackedVecEnv`: its arrays equal what plain loops return, with last observations and states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.batches import all_zero, at, grouped_actions, same
from mpe2 import simple_adversary_v3, simple_spread_v3, simple_tag_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from simulators.crashing import Fate, crashing
from simulators.variable_agents import AGENTS, VariableAgents, VariableDictAgents

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.vector import Stacked, StackedVecEnv

pytestmark = pytest.mark.release_independent

ENVS, STEPS = 3, 40
MAKERS: dict[str, Callable[..., Any]] = {
    "tag": functools.partial(simple_tag_v3.parallel_env, max_cycles=9),
    "knights": knights_archers_zombies.parallel_env,
    "variable": VariableAgents,
    "plain": functools.partial(VariableAgents, plain=True),
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "views": {"num_workers": 2, "copy": False},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


class Loop:
    """A plain loop over one environment with PettingZoo's rules, in one of the auto-reset modes."""

    def __init__(self, make: Callable[..., Any], mode: str) -> None:
        self.env, self.mode, self.over = make(), mode, False

    def reset(self, seed: int | None = None) -> None:
        self.seen, _ = self.env.reset(seed=seed)
        self.paid = dict.fromkeys(self.seen, 0.0)
        self.flags: tuple[dict[str, bool], dict[str, bool]] = ({}, {})
        self.acting, self.over, self.final = [*self.env.agents], False, None
        self.state = self.env.state()

    def step(self, actions: dict[str, Any]) -> None:
        if self.over and self.mode == "NEXT_STEP":
            self.reset()
        elif self.over:
            self.seen, self.paid, self.flags, self.final = {}, {}, ({}, {}), {}
        else:
            self.seen, self.paid, *self.flags, _ = self.env.step(actions)
            self.over, self.acting = not self.env.agents, [*self.env.agents]
            self.state, self.final = self.env.state(), None
            if self.over:
                self.final, self.final_state = self.seen, self.state
                if self.mode == "SAME_STEP":
                    last = self.paid, self.flags, self.final
                    self.reset()
                    self.paid, self.flags, self.final = last


def rows(env: StackedVecEnv, value: Any) -> dict[str, Any]:
    """By agent, one value `(num_envs, ...)` out of a grouped one."""
    by_group = value if len(env.group_map) > 1 else {next(iter(env.group_map)): value}
    found = {}
    for name, agents in env.group_map.items():
        for place, agent in enumerate(agents):
            found[agent] = column(by_group[name], place)
    return found


def column(value: Any, place: int) -> Any:
    if isinstance(value, dict):
        return {key: column(part, place) for key, part in value.items()}
    return tuple(column(part, place) for part in value) if isinstance(value, tuple) else value[:, place]


def assert_equal(env: StackedVecEnv, returned: tuple[Any, ...], loops: list[Loop], mode: str) -> None:
    observations, rewards, terminations, truncations = (rows(env, value) for value in returned[:4])
    marks = [rows(env, mark) for mark in (env.present, env.present_next, env.acting, env.present_final)]
    final = rows(env, env.final_observations)
    for env_id, loop in enumerate(loops):
        assert env.done[env_id] == (loop.final is not None)
        for agent in env.agents:
            present, present_next, acting, present_final = (mark[agent][env_id] for mark in marks)
            assert present == (agent in loop.paid)
            assert rewards[agent][env_id] == loop.paid.get(agent, 0.0)
            assert present_next == (agent in loop.seen)
            if present_next:
                assert same(at(observations[agent], env_id), loop.seen[agent])
            else:
                assert all_zero(at(observations[agent], env_id))
            assert acting == (agent in loop.acting)
            assert terminations[agent][env_id] == loop.flags[0].get(agent, False)
            assert truncations[agent][env_id] == loop.flags[1].get(agent, False)
            if loop.final is not None:
                assert present_final == (agent in loop.final)
                if present_final:
                    assert same(at(final[agent], env_id), loop.final[agent])
        if env.state is not None:
            assert same(env.state[env_id], loop.state.astype(env.state_space.dtype))
            if loop.final is not None:
                assert same(env.final_state[env_id], loop.final_state.astype(env.state_space.dtype))


# Every kind of environment in one process, and one kind as views of processes.
MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")
CASES = [
    *[("serial", name, mode) for name in ("tag", "knights", "variable") for mode in MODES],
    *[("views", "plain", mode) for mode in MODES],
    *[("pickled", "variable", mode) for mode in MODES],
]


@pytest.mark.parametrize(("how", "name", "mode"), CASES)
def test_arrays_equal_plain_loops(how, name, mode):
    loops = [Loop(MAKERS[name], mode) for _ in range(ENVS)]
    rng = np.random.default_rng(0)
    with StackedVecEnv(ParallelEnv([MAKERS[name]] * ENVS, mode, seed=3, **HOWS[how]), with_state=True) as env:
        for env_id, loop in enumerate(loops):
            loop.reset(3 + env_id)
        observations, _ = env.reset(seed=3)
        nothing = {agent: np.zeros(ENVS, np.bool_) for agent in env.agents}
        by_group = [{n: np.stack([nothing[a] for a in of], 1) for n, of in env.group_map.items()} for _ in range(3)]
        zeros = [one if len(one) > 1 else next(iter(one.values())) for one in by_group]
        assert_equal(env, (observations, *zeros), loops, mode)
        for number in range(STEPS):
            actions = grouped_actions(env, rng)
            by_agent = rows(env, actions)
            if number % 2:
                env.step_async(actions)
                returned = env.step_wait()
            else:
                returned = env.step(actions)
            for env_id, loop in enumerate(loops):
                loop.step({agent: at(by_agent[agent], env_id) for agent in loop.env.agents})
            assert_equal(env, returned, loops, mode)
            over = [env_id for env_id, loop in enumerate(loops) if loop.over]
            if mode == "DISABLED" and over and number % 5 == 0:
                env.reset(env_ids=over)
                for env_id in over:
                    loops[env_id].reset()


class Sparse(gymnasium.Env):
    """Only environments with an odd number have infos, the others only in their third step; an episode has 4 steps."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self, env_id: int) -> None:
        self.env_id, self.time = env_id, 0

    def info(self) -> dict[str, Any]:
        return {"time": self.time} if self.env_id % 2 or self.time == 3 else {}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self.time = 0
        return 0, self.info()

    def step(self, action: Any) -> Any:
        self.time += 1
        return 1, 0.0, self.time == 4, False, self.info()


@pytest.mark.parametrize("how", HOWS)
def test_infos_as_a_list(how):
    """Like those by environment, with an empty dict where there are none; also as tensors' infos."""
    by_id, listed = (
        StackedVecEnv(ParallelEnv([Sparse] * ENVS, seed=1, **HOWS[how]), **form) for form in ({}, {"infos": "list"})
    )
    counts = []

    def check(infos: Any, other: Any) -> None:
        assert type(other) is list
        assert other == [infos.get(i, {}) for i in range(ENVS)]
        assert len({id(one) for one in other}) == ENVS  # not one dict for all
        counts.append(len(infos))

    check(by_id.reset()[1], listed.reset()[1])
    for step in range(9):
        actions = np.full((ENVS, 1), step % 3)
        check(by_id.step(actions)[4], listed.step(actions)[4])
    check(by_id.reset(env_ids=[1])[1], listed.reset(env_ids=[1])[1])
    assert {*counts} == {1, ENVS}
    by_id.close(), listed.close()


def test_infos_in_an_unknown_form():
    env = ParallelEnv([Sparse] * 2, backend="serial")
    with pytest.raises(ValueError, match='infos must be "dict" or "list", got 3'):
        StackedVecEnv(env, infos=3)
    StackedVecEnv(env, infos="list").close()  # nothing was claimed


def test_groups_are_named_after_their_agents():
    with StackedVecEnv(ParallelEnv([simple_tag_v3.parallel_env], backend="serial")) as env:
        assert env.group_map == {"adversary": ["adversary_0", "adversary_1", "adversary_2"], "agent": ["agent_0"]}
        assert env.single_observation_space["agent"].shape == (14,)
        observations, _ = env.reset()
        assert {name: part.shape for name, part in observations.items()} == {
            "adversary": (1, 3, 16),
            "agent": (1, 1, 14),
        }


def test_a_group_in_an_order_of_its_own():
    agents = ["agent_2", "agent_0", "agent_1"]
    actions = np.array([[1, 2, 3], [4, 0, 1]])
    with (
        StackedVecEnv(
            ParallelEnv([simple_spread_v3.parallel_env] * 2, num_workers=2), group_map={"all": agents}
        ) as env,
        ParallelEnv([simple_spread_v3.parallel_env] * 2, backend="serial") as plain,
    ):
        env.reset()
        plain.reset()
        observations, rewards, *_ = env.step(actions)
        seen, paid, *_ = plain.step([dict(zip(agents, row)) for row in actions])
        for env_id in range(2):
            for place, agent in enumerate(agents):
                assert np.array_equal(observations[env_id, place], seen[env_id][agent])
                assert rewards[env_id, place] == paid[env_id][agent]


def test_padding_of_observations_and_actions():
    """simple_adversary: the adversary observes 8 numbers, the agents 10."""
    make = simple_adversary_v3.parallel_env
    agents = ["agent_0", "adversary_0", "agent_1"]
    with (
        StackedVecEnv(ParallelEnv([make] * 2, num_workers=2), group_map={"all": agents}, pad=True) as env,
        ParallelEnv([make] * 2, backend="serial") as plain,
    ):
        assert env.single_observation_space.shape == (10,)
        assert env.observation_padding.sum(1).tolist() == [10, 8, 10]
        env.reset()
        plain.reset()
        for step in range(30):
            actions = np.random.default_rng(step).integers(5, size=(2, 3))
            observations, rewards, *_ = env.step(actions)
            seen, paid, _, _, infos = plain.step([dict(zip(agents, row)) for row in actions])
            for env_id in range(2):
                for place, agent in enumerate(agents):
                    size = len(seen[env_id][agent])
                    assert np.array_equal(observations[env_id, place, :size], seen[env_id][agent])
                    assert not observations[env_id, place, size:].any()
                    assert rewards[env_id, place] == paid[env_id][agent]
                    if env.done[env_id]:
                        last = env.final_observations[env_id, place, :size]
                        assert np.array_equal(last, infos[env_id][agent]["final_obs"])


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_state_is_that_of_the_step_if_only_the_reset_ends_the_process(shared):
    make = crashing(functools.partial(VariableAgents, plain=True), {(1, 0): Fate("os._exit", "reset", 1)})
    parallel = ParallelEnv([make] * 2, num_workers=2, on_error="restart", seed=42, shared_memory=shared)
    env = StackedVecEnv(parallel, with_state=True)
    loop = VariableAgents(plain=True)
    with env:
        env.reset()
        loop.reset(seed=43)
        while loop.agents:
            *_, infos = env.step(np.ones((2, 3), np.int64))
            loop.step(dict.fromkeys(loop.agents, 1))
        assert env.done[1]
        assert infos[1]["__common__"]["restarted"]
        assert np.array_equal(env.final_state[1], loop.state())
        assert env.state[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("same_step", [True, False])
def test_a_neighbour_of_a_crash_has_the_state_of_its_step(same_step, shared):
    """In one worker, the first has been stepped when the second ends the process; its report comes a step later."""
    make = crashing(functools.partial(VariableAgents, plain=True), {(1, 0): Fate("os._exit", "step", 2)})
    mode = "SAME_STEP" if same_step else "NEXT_STEP"
    parallel = ParallelEnv(
        [make] * 2, num_workers=1, on_error="restart", seed=42, auto_reset=mode, shared_memory=shared
    )
    with StackedVecEnv(parallel, with_state=True) as env:
        env.reset()
        for _ in range(2):
            env.step(np.ones((2, 3), np.int64))
        before = env.state.copy()
        env.step(np.ones((2, 3), np.int64))
        assert env.done.tolist() == [False, True]
        assert np.array_equal(env.final_state[1], before[1])
        state = env.state[0].copy()
        assert (before[0, 1], state[1]) == (2.0, 3.0)
        env.step(np.ones((2, 3), np.int64))
        assert env.done[0]
        assert np.array_equal(env.final_state[0], state)
        env.step(np.ones((2, 3), np.int64))
        assert env.state[0, 1] == same_step


class RaisesInState(VariableAgents):
    def state(self) -> np.ndarray:
        if self.time == 2:
            raise RuntimeError("no state today")
        return super().state()


def test_a_state_that_raises_is_an_error_of_its_environment():
    makes = [functools.partial(VariableAgents, plain=True), functools.partial(RaisesInState, plain=True)]
    with StackedVecEnv(ParallelEnv(makes, num_workers=1), with_state=True) as env:
        env.reset()
        env.step(np.ones((2, 3), np.int64))
        with pytest.raises(EnvError, match="no state today") as caught:
            env.step(np.ones((2, 3), np.int64))
        assert caught.value.env_ids == (1,)
        assert caught.value.method == "state"


class Unequal(VariableAgents):
    """Agents with other numbers of actions: a has 2, b 3, c 4."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed, plain=True)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2 + AGENTS.index(agent))

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert all(action in self.action_space(agent) for agent, action in actions.items())
        return super().step(actions)


def test_padded_actions_are_masked_and_refused():
    env = StackedVecEnv(ParallelEnv([Unequal] * 2, num_workers=2), group_map={"all": AGENTS}, pad=True)
    with env:
        env.reset()
        assert env.single_action_space == spaces.Discrete(4)
        assert env.action_masks.tolist() == [[[True] * 2 + [False] * 2, [True] * 3 + [False], [True] * 4]] * 2
        with pytest.raises(ValueError, match=r"environment 1: the action of agent 'b' is 3, which is padding"):
            env.step(np.array([[1, 2, 3], [0, 3, 0]]))
        rng = np.random.default_rng(0)
        for _ in range(20):
            env.step((env.action_masks * rng.random((2, 3, 4))).argmax(-1))
        dead = ~env.acting
        env.step(np.where(dead, 3, 0))  # actions that do not count may be anything


# -- what is refused ---------------------------------------------------------------------------------------------------


def stacked(**keywords: Any) -> StackedVecEnv:
    return StackedVecEnv(ParallelEnv([simple_tag_v3.parallel_env], backend="serial"), **keywords)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"group_map": {"all": ["agent_0"]}}, "each of the agents"),
        ({"group_map": {"x": ["agent_0", "adversary_0", "adversary_1", "adversary_2"]}}, "pass pad=True"),
    ],
)
def test_groups_that_are_refused(keywords, text):
    with pytest.raises(ValueError, match=text):
        stacked(**keywords)


def test_actions_that_are_refused_step_nothing():
    with stacked() as env:
        env.reset()
        good = {"adversary": np.zeros((1, 3), np.int64), "agent": np.zeros((1, 1), np.int64)}
        for bad, text in [
            (np.zeros((1, 4), np.int64), "by group"),
            ({"agent": good["agent"]}, "by group"),
            ({**good, "agent": np.zeros((1, 2), np.int64)}, r"group 'agent': expected shape \(1, 1\), got \(1, 2\)"),
            ({**good, "agent": np.zeros((1, 1))}, "integers"),
        ]:
            with pytest.raises(ValueError, match=text):
                env.step(bad)
        env.step(good)
        assert env.parallel_env.stats().steps == 1


def test_states_of_environments_that_have_none():
    with pytest.raises(NotImplementedError, match="no global state"):
        StackedVecEnv(ParallelEnv([VariableDictAgents], backend="serial"), with_state=True)


class Counted(VariableAgents):
    """Its states are numbers."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed, plain=True)
        self.state_space = spaces.Discrete(100)

    def state(self) -> int:
        return self.time


@pytest.mark.parametrize("shared", [True, False])
def test_states_that_are_numbers(shared):
    parallel = ParallelEnv([Counted] * 2, num_workers=2, shared_memory=shared, auto_reset=False)
    with StackedVecEnv(parallel, with_state=True) as env:
        env.reset()
        for step in range(3):
            assert same(env.state, np.full(2, step, np.int64))
            assert same(parallel.state(env_ids=[1]), np.full(1, step, np.int64))
            env.step(np.ones((2, 3), np.int64))


def test_who_acts_beside_environments_that_were_constructed_again():
    """Nobody does in these, until their reset."""
    env = StackedVecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 2, backend="serial"))
    env.reset()
    env.parallel_env.restart([1])
    agents = tuple(env.stepper.view.agents)
    arrays = env.stepper.step([Stacked(agents, np.zeros((2, len(agents)), np.int64))], env_ids=[0])
    assert arrays.acting.tolist() == [[True] * len(agents), [False] * len(agents)]
