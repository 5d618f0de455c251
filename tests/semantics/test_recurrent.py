"""`begins` says whose hidden state begins anew: compared with a loop over dicts that remembers each agent's life."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.memories import memories
from helpers.reference import Reference
from pettingzoo.classic import tictactoe_v3
from simulators.crashing import SEED, Fate, crashing
from simulators.native_arena import Arena
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.teams import Team, names
from simulators.variable_agents import VariableAgents, VariableDictAgents

from marl_parallel import ParallelEnv, RecyclePolicy, Rollout
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

STEPS, ROLLOUTS = 13, 3
MODES = pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])


class Waves:
    """Agents move one after another, and each is observed at its turn only; then all of them, in several steps."""

    possible_agents = ("a", "b", "c")
    observation_space = spaces.Dict([(agent, spaces.Box(0.0, 99.0, (1,), np.float32)) for agent in possible_agents])
    action_space = spaces.Dict([(agent, spaces.Discrete(2)) for agent in possible_agents])
    script = ("b", "a", "b", "abc", "abc", "c", "ab", "abc")

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.seen(), {}

    def seen(self) -> dict[str, Any]:
        return {agent: np.full(1, self.time, np.float32) for agent in self.script[self.time]}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        observations = self.seen()
        flags = dict.fromkeys(observations, False)
        over = {"__all__": self.time == len(self.script) - 1}
        return observations, dict.fromkeys(observations, 0.5), {**flags, "__all__": False}, {**flags, **over}, {}


class AllAtOnce(Waves):
    """All agents end in one step and come back in the next one, in which nothing else happens; then plain steps."""

    script = ("abc",) * 8

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        return observations, rewards, {**terminateds, **dict.fromkeys("abc", self.time == 3)}, truncateds, infos


def teams() -> list[Callable[..., Any]]:
    """Environments that differ in their agents."""
    return [
        functools.partial(Team, names(0, 1), 5, dies="agent_1"),
        functools.partial(Team, names(2, 1), 7, dies="agent_2", returns=True),
        functools.partial(Team, names(3), 4),
    ]


CASES: dict[str, list[Callable[..., Any]]] = {
    "comes back": [ReturningAgents] * 3,
    "comes back, flagged while dead": [functools.partial(ReturningAgents, corpses=True)] * 3,
    "all come back": [functools.partial(ReturningAgents, none_left=True)] * 3,
    "comes back, PettingZoo": [ReturningPettingZooAgents] * 3,
    "observed once more after its end": [functools.partial(ReturningPettingZooAgents, ghosts=True)] * 3,
    "dies": [functools.partial(VariableAgents, plain=True)] * 3,
    "joins": [functools.partial(VariableDictAgents, plain=True)] * 3,
    "observed at its turn": [Waves] * 3,
    "all at once": [AllAtOnce] * 3,
    "turns": [tictactoe_v3.env] * 3,
    "different agents": teams(),
}
HOWS: dict[str, dict[str, Any]] = {
    "process": {"num_workers": 2},
    "pickled": {"num_workers": 2, "shared_memory": False},
    "hybrid": {"num_workers": 2, "backend": "hybrid"},
    "halves of two workers": {"num_workers": 2, "halves": 2},
    "halves in line": {"backend": "serial", "halves": 2},
}


def drawn(env: StackedVecEnv, t: int) -> np.ndarray:
    """Actions `(num_envs, agents)`; in tic-tac-toe, a field of the board for each step."""
    if env.single_action_space.n == 9:
        return np.full((env.num_envs, env.num_agents), t % 9)
    return np.random.default_rng(t).integers(2, size=(env.num_envs, env.num_agents))


def as_dicts(env: StackedVecEnv, actions: np.ndarray, acting: Any) -> list[dict[str, int]]:
    return [{agent: actions[row, env.agents.index(agent)] for agent in one} for row, one in enumerate(acting)]


def array(env: StackedVecEnv, agents: list[set[str]]) -> np.ndarray:
    return np.array([[agent in of_env for agent in env.agents] for of_env in agents])


class Expected:
    """`begins` of one step after another, from a loop over dicts."""

    def __init__(self, env: StackedVecEnv, loop: Any, mode: str) -> None:
        self.env, self.loop, self.memories, self.t = env, loop, memories(loop, mode), 0
        observations, _ = loop.reset()
        self.begins = array(env, [one.reset(of_env) for one, of_env in zip(self.memories, observations)])

    def step(self) -> np.ndarray:
        actions = as_dicts(self.env, drawn(self.env, self.t), self.loop.acting)
        observations, _, terminateds, truncateds, infos = self.loop.step(actions)
        rows = zip(self.memories, observations, terminateds, truncateds, infos)
        self.t += 1
        self.begins = array(self.env, [one.step(*dicts) for one, *dicts in rows])
        return self.begins


def collected(rollout: Rollout) -> Callable[[], Any]:
    """Collects a rollout with actions that follow from the time, and notes that policies see the marks."""
    env, halves = rollout.env, len(rollout._parts)
    seen: list[np.ndarray] = []
    number = 0

    def act(current: Any) -> np.ndarray:
        nonlocal number
        seen.append(current.begins.copy())
        t, number = number // halves, number + 1
        return drawn(env, t)[[*current.env_ids]]

    def collect() -> Any:
        seen.clear()
        data = rollout.collect(act)
        of_steps = [np.concatenate(seen[start : start + halves]) for start in range(0, len(seen), halves)]
        assert np.array_equal(of_steps, data.begins[:-1])
        return data

    return collect


def compare(env: StackedVecEnv, rollout: Rollout, expected: Expected) -> np.ndarray:
    """Collect rollouts and compare their marks; returns all of them."""
    collect, everything = collected(rollout), [expected.begins]
    for _ in range(ROLLOUTS):
        data = collect()
        begins = [expected.begins, *[expected.step() for _ in range(STEPS)]]
        assert data.begins.dtype == np.bool_
        assert np.array_equal(data.begins, begins)
        assert (data.begins <= data.observed).all()
        everything += begins[1:]
    return np.stack(everything)


@MODES
@pytest.mark.parametrize("case", [*CASES])
def test_begins_of_rollouts(case, mode):
    constructors = CASES[case]
    with StackedVecEnv(ParallelEnv(constructors, mode, seed=5, backend="serial")) as env:
        found = compare(env, Rollout(env, STEPS), Expected(env, Reference(constructors, AutoresetMode[mode], 5), mode))
        assert found[1:].any()
        if case == "observed at its turn":
            assert found[:4, 0].tolist() == [[False, True, False], [True, False, False], [False] * 3,
                                             [False, False, True]]  # fmt: skip
        if case == "all at once":
            assert found[:6, 0].tolist() == [[True] * 3, *[[False] * 3] * 3, [True] * 3, [False] * 3]


@pytest.mark.parametrize("how", [*HOWS])
@pytest.mark.parametrize(("case", "mode"), [("comes back", "SAME_STEP"), ("different agents", "NEXT_STEP")])
def test_begins_with_workers_and_halves(case, mode, how):
    keywords = {**HOWS[how]}
    halves = keywords.pop("halves", 1)
    with StackedVecEnv(ParallelEnv(CASES[case], mode, seed=5, **keywords)) as env:
        rollout = Rollout(env, STEPS, halves=halves)
        compare(env, rollout, Expected(env, Reference(CASES[case], AutoresetMode[mode], 5), mode))


@MODES
@pytest.mark.parametrize("halves", [1, 2])
def test_begins_of_environments_that_are_restarted_or_recycled(mode, halves):
    fates = {(0, 0): Fate("SIGKILL", "step", 4), (2, 0): Fate("raise", "step", 7), (2, 1): Fate("raise", "reset", 0)}
    kinds: list[dict[str, Any]] = [
        {"on_error": "restart"}, {"on_error": "restart", "recycle": RecyclePolicy(max_episodes=1)}
    ]  # fmt: skip
    for keywords in kinds:
        make = crashing(ReturningAgents, fates if "recycle" not in keywords else {})
        opened = functools.partial(ParallelEnv, [make] * 3, mode, seed=SEED, num_workers=2, **keywords)
        with StackedVecEnv(opened()) as env, opened() as dicts:
            found = compare(env, Rollout(env, STEPS, halves=halves), Expected(env, dicts, mode))
            assert found[1:].any()
            stats = dicts.stats()
            assert stats.restarts == (0 if "recycle" in keywords else env.parallel_env.stats().restarts)
            assert "recycle" in keywords or stats.restarts >= 3


def test_begins_without_automatic_resets():
    """A reset of some environments keeps the marks of the others, whose observations stay; so does `load_state`."""
    constructors = [functools.partial(ReturningAgents, length=length) for length in (6, 8, 10)]
    loop = Reference(constructors, AutoresetMode.DISABLED, 5)
    with StackedVecEnv(ParallelEnv(constructors, False, seed=5, backend="serial")) as env:
        env.reset()
        expected, kept = Expected(env, loop, "DISABLED"), 0
        assert np.array_equal(env.begins, expected.begins)
        for t in range(40):
            env.step(drawn(env, t))
            expected.step()
            assert np.array_equal(env.begins, expected.begins)
            if over := np.flatnonzero(env.done).tolist():
                before, states = expected.begins.copy(), env.save_state([0])
                env.reset(env_ids=over)
                observations, _ = loop.reset(env_ids=over)
                for env_id, of_env in zip(over, observations):
                    before[env_id] = array(env, [expected.memories[env_id].reset(of_env)])[0]
                assert np.array_equal(env.begins, before)
                kept += np.delete(before, over, axis=0).any()
                if 0 not in over:
                    env.load_state(states, [0])
                    assert np.array_equal(env.begins, before)
        assert kept


@MODES
@pytest.mark.parametrize("halves", [1, 2])
def test_saved_rollouts_go_on_with_their_marks(mode, halves):
    constructors = CASES["comes back"]

    def opened(seed: int) -> StackedVecEnv:
        return StackedVecEnv(ParallelEnv(constructors, mode, seed=seed, backend="serial"))

    with opened(5) as env, opened(77) as other:
        rollout, later = Rollout(env, 8, halves=halves), Rollout(other, 8, halves=halves)
        collect, marked = collected(rollout), 0
        later.collect(lambda current: drawn(other, 0)[[*current.env_ids]])
        for number in range(1, 6):
            last = collect().begins[-1].copy()
            marked += last.any()
            later.load_state(rollout.save_state())
            assert np.array_equal(later.arrays.begins[0], last)
            data = later.collect(lambda current, t=8 * number: drawn(other, t)[[*current.env_ids]])
            assert np.array_equal(data.begins[0], last)
        assert marked


def test_begins_of_groups():
    """Of agents with other spaces; `group` has the marks of one."""
    constructors = CASES["comes back"]
    members = {"back": ["z", "x"], "other": ["y"]}
    with (
        StackedVecEnv(ParallelEnv(constructors, seed=5, backend="serial"), group_map=members) as env,
        StackedVecEnv(ParallelEnv(constructors, seed=5, backend="serial")) as plain,
    ):
        rollout = Rollout(env, 30)
        data = rollout.collect(lambda current: {name: np.zeros(each.shape, np.int64)
                                                for name, each in current.begins.items()})  # fmt: skip
        expected = Rollout(plain, 30).collect(lambda current: np.zeros(current.begins.shape, np.int64))
        assert np.array_equal(data.group("back").begins, expected.begins[:, :, [2, 0]])
        assert np.array_equal(data.begins["other"], expected.begins[:, :, [1]])
        assert all(np.array_equal(env.begins[name], data.begins[name][-1]) for name in members)
        assert expected.begins[1:].any()


def test_begins_of_native_simulators():
    """Episodes have three steps, and one more step resets."""
    with StackedVecEnv(ParallelEnv.from_native(Arena(4))) as env:
        rollout = Rollout(env, 10)
        data = rollout.collect(
            lambda _: {
                "tank": np.zeros((4, 2), np.int64),
                "scout": {"go": np.zeros((4, 1), np.int64), "look": np.zeros((4, 1, 2), np.float32)},
            }
        )
        for name in env.group_map:
            assert all((data.begins[name][t] == (t % 4 == 0)).all() for t in range(11))


@pytest.mark.needs("torch")
def test_begins_as_tensors():
    with StackedVecEnv(ParallelEnv(CASES["comes back"], seed=5, backend="serial")) as env:
        tensors = env.torch()
        tensors.reset()
        assert tensors.begins.all()
        tensors.step(drawn(env, 0))
        assert not tensors.begins.any()
        rollout = Rollout(env, 12)
        rollout.collect(lambda current: drawn(env, 0))
        assert np.array_equal(rollout.torch().begins.numpy(), rollout.arrays.begins)
