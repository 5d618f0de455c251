"""`Policies`: rows, choices and data are those of a loop over the simulators; and everything that may go wrong."""

from __future__ import annotations

import functools
import pickle
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.batches import at, same
from helpers.memories import memories
from helpers.reference import Reference, ReferenceEnv
from helpers.setups import Setup
from mpe2 import simple_tag_v3
from pettingzoo.classic import tictactoe_v3
from simulators.crashing import SEED as CRASHING_SEED
from simulators.crashing import Fate, crashing
from simulators.masked_actions import Turnstile
from simulators.native_arena import Arena
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.teams import Team, names
from simulators.variable_agents import VariableAgents, VariableDictAgents
from simulators.vector_rewards import Couriers
from simulators.walks import Walk

from marl_parallel import EnvError, Extra, ParallelEnv, Policies, RestartPolicy, Rollout, evaluate, pfsp_weights
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts.policies import actions_and_extras
from marl_parallel.types import FinishedEpisode
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

ENVS, STEPS, ROLLOUTS, SEED = 3, 11, 2, 5
NAMES = ["a", "b", "c"]
MODES = pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
HALVES = pytest.mark.parametrize("halves", [1, 2])
TEAMS = [
    functools.partial(Team, names(0, 1), 5, dies="agent_1"),
    functools.partial(Team, names(2, 1), 7, dies="agent_2", returns=True),
    functools.partial(Team, names(3), 4),
]


class Case(NamedTuple):
    """Environments, and how they are seen."""

    makers: list[Callable[..., Any]]
    with_state: bool = False
    masks: bool = False
    groups: dict[str, list[str]] | None = None


CASES = {
    "two groups": Case([functools.partial(simple_tag_v3.parallel_env, max_cycles=7)] * ENVS),
    "dies": Case([VariableAgents] * ENVS, with_state=True),
    "joins": Case([VariableDictAgents] * ENVS, groups={"first": ["b", "c"], "second": ["a"]}),
    "comes back": Case([ReturningAgents] * ENVS),
    "comes back, PettingZoo": Case([ReturningPettingZooAgents] * ENVS, with_state=True),
    "turns": Case([tictactoe_v3.env] * ENVS, masks=True),
    "masks": Case([functools.partial(Turnstile, "observations")] * ENVS, masks=True),
    "different agents": Case(TEAMS),
}


# -- what policies do follows from their name and one row alone --------------------------------------------------------


def leaves(value: Any) -> list[np.ndarray]:
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [np.asarray(value)]


def digest(seen: Any) -> int:
    return zlib.crc32(b"".join(leaf.astype(np.float64).tobytes() for leaf in leaves(seen)))


def chosen(name: str, seen: Any, space: Any) -> Any:
    """The action for an observation; legal if the observation has an action mask."""
    rng = np.random.default_rng((digest(seen), NAMES.index(name)))
    if isinstance(seen, Mapping) and "action_mask" in seen:
        legal = np.flatnonzero(seen["action_mask"])
        return int(rng.choice(legal)) if len(legal) else 0

    def draw(leaf: Any) -> Any:
        return rng.integers(leaf.n) if hasattr(leaf, "n") else rng.uniform(-1, 1, leaf.shape).astype(leaf.dtype)

    return tree_map(draw, space)


def score(name: str, seen: Any) -> float:
    return float(digest(seen) % 1000 + NAMES.index(name))


class Row(NamedTuple):
    """What a policy gets for one agent."""

    env_id: int
    agent: str
    seen: int
    begins: bool
    mask: list[bool] | None = None
    state: list[float] | None = None


class Recorder:
    """Policies that record their rows, by group. "a" returns all extras, "b" one of them, and "c" none.

    Attributes:
        calls: The name of the policy and its rows, of each call.
    """

    def __init__(self, env: StackedVecEnv, *, has_extras: bool = True) -> None:
        self.env, self.has_extras, self.calls = env, has_extras, list[tuple[str, dict[str, list[Row]]]]()

    def policy(self, name: str) -> Callable[[Any], Any]:
        return functools.partial(self.act, name)

    def act(self, name: str, rows: Any) -> Any:
        env, is_grouped = self.env, len(self.env.group_map) > 1
        of_groups = {group: rows.group(group) if is_grouped else rows for group in env.group_map}
        self.calls.append((name, {group: self.rows(one) for group, one in of_groups.items() if len(one.env_ids)}))
        actions, scores, pairs = {}, {}, {}
        for group, space in env.by_group(env.single_action_space).items():
            one = of_groups[group]
            if not len(one.agents):  # may be left out
                continue
            seen = [at(one.observations, row) for row in range(len(one.agents))]
            each = [chosen(name, of_row, space) for of_row in seen]
            actions[group] = tree_map(lambda *values: np.array(values), *each)
            scores[group] = [score(name, of_row) for of_row in seen]
            pairs[group] = np.array([[value, -value] for value in scores[group]])
        if not self.has_extras or name == "c":
            return env.grouped(actions)
        extras = {"score": env.grouped(scores)} | ({"pair": env.grouped(pairs)} if name == "a" else {})
        return env.grouped(actions), extras

    def rows(self, rows: Any) -> list[Row]:
        n = len(rows.env_ids)
        assert rows.acting.tolist() == rows.observed.tolist() == [True] * n
        assert rows.env_ids.dtype == np.int64
        assert rows.begins.dtype == np.bool_
        assert [len(one) for one in (rows.agents, rows.begins)] == [n, n]
        masks, state = rows.action_masks, rows.state
        return [
            Row(int(rows.env_ids[row]), rows.agents[row], digest(at(rows.observations, row)), bool(rows.begins[row]),
                None if masks is None else masks[row].tolist(), None if state is None else state[row].tolist())
            for row in range(n)
        ]  # fmt: skip


def fixed(episode: Any, rng: Any = None) -> dict[str, str]:
    """A choice that differs by environment, episode and agent."""
    return choice(episode.env_id, episode.number, episode.agents)


def choice(env_id: int, number: int, agents: Any) -> dict[str, str]:
    return {agent: NAMES[(env_id + number * (2 + place) + place) % 3] for place, agent in enumerate(agents)}


class Loop:
    """The same policies in a loop over the simulators themselves, one step at a time.

    Attributes:
        numbers: By environment, the number of its episode.
        chosen: All choices: environment, number and agents.
        names: By environment, the policies of its agents.
    """

    def __init__(self, case: Case, mode: str, agents: list[list[str]], seed: int = SEED) -> None:
        self.case, self.mode, self.agents = case, mode, agents
        self.loop = Reference(case.makers, AutoresetMode[mode], seed)
        self.memories = memories(self.loop, mode)
        self.seen, _ = self.loop.reset()
        self.fresh = [{*memory.reset(seen)} for memory, seen in zip(self.memories, self.seen)]
        self.numbers, self.names = [0] * len(agents), [dict[str, str]()] * len(agents)
        self.chosen: list[tuple[int, int, list[str]]] = []
        self.starts = {*range(len(agents))}

    def choose(self) -> None:
        for env_id in sorted(self.starts):
            self.chosen.append((env_id, self.numbers[env_id], self.agents[env_id]))
            self.names[env_id] = choice(env_id, self.numbers[env_id], self.agents[env_id])
            self.fresh[env_id] |= {*self.agents[env_id]}
        self.starts.clear()

    def acting(self, env_id: int) -> list[str]:
        one = self.loop.copies[env_id]
        return [] if one.over else one.acting

    def row(self, env_id: int, agent: str, state: Any) -> Row:
        seen = self.seen[env_id][agent]
        mask = seen["action_mask"].astype(bool).tolist() if self.case.masks else None
        begins = agent in self.fresh[env_id]  # also where others have acted since its first observation
        self.fresh[env_id].discard(agent)
        return Row(env_id, agent, digest(seen), begins, mask, state)

    def step(self) -> tuple[Any, ...]:
        """Returns names and actions of those that act, the rewards, and the ends; and whose turn it was."""
        self.choose()
        acted, actions = [], []
        for env_id, one in enumerate(self.loop.copies):
            acting, of_env = self.acting(env_id), self.names[env_id]
            seen = self.seen[env_id]
            acted.append({agent: of_env[agent] for agent in acting})
            actions.append({
                agent: chosen(of_env[agent], seen[agent], one.space("action_space", agent)) for agent in acting
            })  # fmt: skip
        before = self.seen
        self.seen, rewards, terminateds, truncateds, infos = self.loop.step(actions)
        rows = zip(self.memories, self.seen, terminateds, truncateds, infos)
        for fresh, (memory, *of_env) in zip(self.fresh, rows):
            fresh |= {*memory.step(*of_env)}
        over = [bool(one["__all__"] or other["__all__"]) for one, other in zip(terminateds, truncateds)]
        for env_id in np.flatnonzero(over).tolist():
            self.numbers[env_id] += 1
            self.starts.add(env_id)
        return before, acted, actions, rewards, over


def open_env(build: Any, setup: Setup, name: str, mode: str, **how: Any) -> StackedVecEnv:
    case = CASES[name]
    has_state = case.with_state and setup.shared_memory and setup.backend != "ray"
    group_map: Any = {} if case.groups is None else {"group_map": case.groups}
    return StackedVecEnv(build(case.makers, setup, mode, SEED, **how), with_state=has_state, **group_map)


def agents_of(env: StackedVecEnv) -> list[list[str]]:
    return [[*env.parallel_env.possible_agents_of(env_id)] for env_id in range(env.num_envs)]


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn
@HALVES
@MODES
@pytest.mark.parametrize("name", [*CASES])
def test_data_are_those_of_a_loop(build, setup, name, mode, halves):
    env, case = open_env(build, setup, name, mode), CASES[name]
    rollout = Rollout(
        env, STEPS, action_masks=case.masks, extras={"score": (), "pair": Extra((2,), np.float64)}, halves=halves
    )
    recorder, asked = Recorder(env), []
    policies = Policies(
        {name: recorder.policy(name) for name in NAMES},
        choose=lambda episode, rng: asked.append((episode.env_id, episode.number, [*episode.agents])) or fixed(episode),
    )
    first = [*rollout.reset().env_ids]
    ranges = [first, [env_id for env_id in range(ENVS) if env_id not in first]][:halves]
    assert sum(map(len, ranges)) == ENVS
    loop, columns = Loop(case, mode, agents_of(env)), env.by_group(env.group_map)
    columns = {group: env.group_map[group] for group in env.group_map}
    for _ in range(ROLLOUTS):
        recorder.calls.clear()
        data = rollout.collect(policies)
        of_group = {group: data.group(group) if len(columns) > 1 else data for group in columns}
        calls = []
        for t in range(STEPS):
            loop.choose()
            calls += expected_calls(loop, columns, ranges, env.state_space is not None)
            seen, acted, actions, rewards, over = loop.step()
            assert data.done[t].tolist() == over
            for group, agents in columns.items():
                for env_id, column in np.ndindex(ENVS, len(agents)):
                    agent, one, where = agents[column], of_group[group], (t, env_id, column)
                    acts = agent in acted[env_id]
                    assert one.acting[where] == acts
                    assert one.policies[where] == (NAMES.index(acted[env_id][agent]) if acts else -1)
                    action = tree_map(lambda array, where=where: array[where], one.actions)
                    assert digest(action) == digest(actions[env_id][agent] if acts else tree_map(np.zeros_like, action))
                    if agent in rewards[env_id]:
                        assert one.rewards[where] == np.float32(rewards[env_id][agent])
                    wanted = score(acted[env_id][agent], seen[env_id][agent]) if acts else 0.0
                    policy = acted[env_id].get(agent)
                    assert one.extras["score"][where] == (wanted if policy in ("a", "b") else 0.0)
                    assert one.extras["pair"][where].tolist() == ([wanted, -wanted] if policy == "a" else [0.0, 0.0])
        assert recorder.calls == calls
        assert data.policies.dtype == np.int32 if len(columns) == 1 else True
    loop.choose()
    rollout.collect(policies)  # chooses for episodes that have begun with the last step
    assert (
        [*asked][: len(loop.chosen)] == loop.chosen if halves == 1 else {*map(repr, asked)} >= {*map(repr, loop.chosen)}
    )
    assert len({*map(repr, asked)}) == len(asked)


def expected_calls(
    loop: Loop, columns: Mapping[str, list[str]], ranges: list[list[int]], has_state: bool
) -> list[tuple[str, dict[str, list[Row]]]]:
    """The calls of one step: of each half, each policy with rows once, in order."""
    calls = []
    for env_ids in ranges:
        for name in NAMES:
            rows: dict[str, list[Row]] = {}
            for group, agents in columns.items():
                for env_id in env_ids:
                    state = loop.loop.copies[env_id].env.state().tolist() if has_state else None
                    acting = loop.acting(env_id)
                    for agent in agents:
                        if agent in acting and loop.names[env_id][agent] == name:
                            rows.setdefault(group, []).append(loop.row(env_id, agent, state))
            if rows:
                calls.append((name, rows))
    return calls


def test_native_simulators_and_one_policy_for_all():
    """Data are those of one policy that does the same; a policy of all agents gets all rows."""
    with StackedVecEnv(ParallelEnv.from_native(Arena(4))) as env:
        rollout, recorder = Rollout(env, 9), Recorder(env, has_extras=False)
        whole = Recorder(env, has_extras=False)

        def one_policy(current: Any) -> Any:
            actions = {}
            for group, agents in env.group_map.items():
                rows = [at(at(current.observations[group], env_id), column) for env_id, column in pairs(agents)]
                each = [
                    chosen(fixed_now[env_id][agents[column]], seen, env.single_action_space[group])
                    for (env_id, column), seen in zip(pairs(agents), rows)
                ]
                stacked = tree_map(lambda *values: np.array(values), *each)
                shape = 4, len(agents)
                actions[group] = tree_map(lambda array, shape=shape: array.reshape(*shape, *array.shape[1:]), stacked)
            return actions

        def pairs(agents: list[str]) -> list[tuple[int, int]]:
            return [*np.ndindex(4, len(agents))]

        fixed_now = [choice(env_id, 0, env.parallel_env.possible_agents) for env_id in range(4)]
        policies = Policies({name: recorder.policy(name) for name in NAMES},
                            choose=lambda episode, rng: choice(episode.env_id, 0, episode.agents))  # fmt: skip
        data = tree_map(np.array, rollout.collect(policies)._asdict())
        rollout.reset()
        other = rollout.collect(one_policy)
        for field in ("observations", "rewards", "acting", "done"):
            assert same(data[field], getattr(other, field))
        for group, acting in other.acting.items():
            acted = acting[:-1]
            assert same(*(at(one[group], acted) for one in (data["actions"], other.actions)))
            assert not any(leaf[~acted].any() for leaf in leaves(data["actions"][group]))
        rollout.reset()
        rollout.collect(
            Policies({"a": whole.policy("a")}, choose=lambda episode, _: dict.fromkeys(episode.agents, "a"))
        )
        assert [{group: len(rows) for group, rows in one.items()} for _, one in whole.calls] == [
            {group: 4 * len(agents) for group, agents in env.group_map.items()}
        ] * 7  # an episode has three steps; nobody acts in the resets


# -- choices -----------------------------------------------------------------------------------------------------------


def zeros(rows: Any) -> Any:
    """A policy for discrete actions, also of one of several groups."""
    return tree_map(lambda acting: np.zeros(len(acting), np.int64), rows.acting)


class Chooser:
    """Draws a policy for each agent; records what it is asked, and what it draws."""

    def __init__(self, among: list[str] = NAMES) -> None:
        self.among, self.asked = among, dict[tuple[int, int], dict[str, str]]()

    def __call__(self, episode: Any, rng: np.random.Generator) -> dict[str, str]:
        key = episode.env_id, episode.number
        assert key not in self.asked
        self.asked[key] = {agent: str(rng.choice(self.among)) for agent in episode.agents}
        return {**self.asked[key]}


def three(choose: Any, seed: int = 0, policy: Any = zeros) -> Policies:
    return Policies(dict.fromkeys(NAMES, policy), choose=choose, seed=seed)


@HALVES
@MODES
def test_choices_of_environments_that_are_restarted(mode, halves):
    """One choice for each episode, also for one that a fault has cut short, and after faults in a reset."""
    fates = {
        (0, 0): Fate("raise", "step", 4),
        (1, 0): Fate("SIGKILL", "step", 9),
        (2, 0): Fate("raise", "reset", 0),
        (2, 1): Fate("raise", "reset", 2),
    }
    make = crashing(ReturningAgents, fates)
    with StackedVecEnv(ParallelEnv([make] * 4, mode, seed=CRASHING_SEED, num_workers=2, on_error="restart")) as env:
        chooser = Chooser()
        rollout = Rollout(env, 40, halves=halves)
        data, policies = rollout.collect(three(chooser)), three(chooser)
        assert env.parallel_env.stats().restarts >= 4
        for env_id in range(4):
            starts = [0, *(1 + np.flatnonzero(data.done[:, env_id]))]
            numbers = sorted(number for of_env, number in chooser.asked if of_env == env_id)
            assert numbers == [*range(len([start for start in starts if start < 40]))]
            for number, start in enumerate(starts):
                end = starts[number + 1] if number + 1 < len(starts) else 40
                for column, agent in enumerate(env.agents):
                    acts = data.acting[start:end, env_id, column]
                    name = chooser.asked.get((env_id, number), {}).get(agent)
                    assert {*data.policies[start:end, env_id, column][acts]} <= {policies.index(name) if name else -2}


def test_choices_do_not_depend_on_workers_or_backends(build, setup):
    chooser = Chooser()
    rollout = Rollout(StackedVecEnv(build([ReturningAgents] * 4, setup, seed=SEED)), 35)
    data = rollout.collect(three(chooser)).policies.copy()
    assert [chooser.asked, data.tolist()] == choices_in_line()
    assert len({repr(drawn) for drawn in chooser.asked.values()}) > 10


@functools.cache
def choices_in_line() -> list[Any]:
    chooser = Chooser()
    with StackedVecEnv(ParallelEnv([ReturningAgents] * 4, seed=SEED, backend="serial")) as env:
        data = Rollout(env, 35).collect(three(chooser))
        return [chooser.asked, data.policies.tolist()]


def opened(
    make: Any = ReturningAgents, count: int = 2, mode: Any = "SAME_STEP", seed: Any = SEED, **how: Any
) -> StackedVecEnv:
    return StackedVecEnv(ParallelEnv([make] * count, mode, seed, backend="serial", **how))


def drawn(episode: Any, rng: np.random.Generator) -> dict[str, str]:
    return {agent: str(rng.choice(NAMES)) for agent in episode.agents}


def test_generators_of_choices():
    """Of the environment's latest seed and the number of the episode; another stream than that of simulators."""
    found: dict[Any, float] = {}

    def note(run: str, seeds: list[int], policies_seed: int) -> None:
        def choose(episode: Any, rng: np.random.Generator) -> dict[str, str]:
            found[run, seeds[episode.env_id], episode.number] = rng.random()
            return dict.fromkeys(episode.agents, "a")

        rollout.collect(three(choose, seed=policies_seed))

    with opened(seed=SEED) as env:
        rollout = Rollout(env, 25)
        note("first", [SEED, SEED + 1], 0)
        rollout.reset(seed=[SEED + 1, SEED])
        note("swapped", [SEED + 1, SEED], 7)
    with opened(seed=SEED) as env:
        rollout = Rollout(env, 25)
        note("again", [SEED, SEED + 1], 7)
    first, swapped, again = ({key[1:]: value for key, value in found.items() if key[0] == run}
                             for run in ("first", "swapped", "again"))  # fmt: skip
    assert first == again  # `seed` of Policies is not used
    assert {key[1] for key in first} == {0, 1, 2}
    assert {key[1] for key in swapped} == {2, 3, 4}  # episodes before the reset count
    for seed in (SEED, SEED + 1):
        assert swapped[seed, 2] == first[seed, 2]
    assert len({*first.values(), *swapped.values()}) == 6 + 4
    assert not {*first.values()} & {np.random.default_rng(seed).random() for seed in range(20)}


def test_generators_of_environments_without_seeds():
    """They depend on `seed` of Policies, the environment and the number of the episode."""
    found: dict[Any, dict[Any, float]] = {}
    for run, policies_seed, seed in (("first", 3, "own"), ("again", 3, "own"), ("other", 4, "own")):
        found[run] = {}

        def choose(episode: Any, rng: np.random.Generator, run: str = run) -> dict[str, str]:
            found[run][episode.env_id, episode.number] = rng.random()
            return dict.fromkeys(episode.agents, "a")

        with opened(functools.partial(ReturningAgents, 5), seed=seed) as env:
            Rollout(env, 25).collect(three(choose, seed=policies_seed))
    assert found["first"] == found["again"]
    assert len({*found["first"].values(), *found["other"].values()}) == 2 * 6


@MODES
@HALVES
def test_choices_after_resets_and_in_the_middle_of_an_episode(mode, halves):
    """`rollout.reset` and policies that take over ask anew; episodes that others have begun have no entry."""
    with opened(mode=mode) as env:
        rollout, asked = Rollout(env, 4, halves=halves), []

        def choose(episode: Any, _: Any) -> dict[str, str]:
            asked.append(tuple(episode))
            return dict.fromkeys(episode.agents, NAMES[len(asked) % 3])

        policies, agents = three(choose), tuple(env.agents)
        rollout.collect(policies)
        assert asked == [(0, 0, agents), (1, 0, agents)]
        rollout.collect(policies)  # the same episode
        assert len(asked) == 2
        rollout.reset()
        assert len(asked) == 2
        data = rollout.collect(policies)
        assert asked[2:] == [(0, 0, agents), (1, 0, agents)]
        assert {*data.policies[data.acting[:-1]]} == {0, 1}  # the names of these calls
        assert (rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64)).policies == -1).all()
        data = rollout.collect(policies)  # in the middle, until the end of the tenth step
        assert asked[4:6] == [(0, 0, agents), (1, 0, agents)]
        assert [one.length for one in rollout.finished_episodes] == [10, 10]
        assert policies.table() == []
        while len(policies.table()) == 0:
            rollout.collect(policies)
        assert sum(pairing.episodes for pairing in policies.table()) == 2
        for _ in range(rollout.num_steps * halves):  # by hand
            rollout.step(np.zeros((len(rollout.current.env_ids), 3), np.int64))
        assert (rollout.arrays.policies == -1).all()
        before = len(asked)
        rollout.collect(policies)
        assert len(asked) == before + 2


def test_others_take_over_at_the_beginning_of_an_episode():
    """Then their episodes count: after a reset, and with NEXT_STEP after the last step of an episode."""
    for mode, steps in (("SAME_STEP", 10), ("NEXT_STEP", 10)):
        with opened(mode=mode) as env:
            rollout = Rollout(env, steps)
            rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64))
            policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
            assert len(rollout.finished_episodes) == 2
            rollout.collect(policies)
            assert (rollout.collect(policies).policies[-1] >= -1).all()
            assert sum(pairing.episodes for pairing in policies.table()) == (4 if mode == "SAME_STEP" else 2)


# -- added, replaced, removed ------------------------------------------------------------------------------------------


class Constant:
    """A policy that always does the same."""

    def __init__(self, action: int) -> None:
        self.action = action

    def __call__(self, rows: Any) -> Any:
        return np.full(len(rows.acting), self.action)


def test_a_dict_of_policies():
    a, b, c = Constant(0), Constant(1), Constant(2)
    policies = Policies({"a": a, "b": b}, choose=fixed)
    assert dict(policies) == {"a": a, "b": b}
    assert (len(policies), [*policies], policies["b"], "c" in policies) == (2, ["a", "b"], b, False)
    policies["c"] = c
    policies["a"] = c
    assert policies.pop("a") is c
    assert [policies.index(name) for name in NAMES] == [0, 1, 2]
    assert (policies.names, [*policies]) == (NAMES, ["b", "c"])
    policies["a"] = b
    assert [policies.index(name) for name in NAMES] == [0, 1, 2]
    for use in (lambda: policies.index("d"), lambda: policies["d"], lambda: policies.pop("d")):
        with pytest.raises(KeyError, match="d"):
            use()
    assert repr(policies) == "Policies(['b', 'c', 'a'])"
    assert policies != Policies(dict(policies), choose=fixed)
    assert policies in {policies}
    policies.clear()
    assert [*policies] == []


def test_policies_that_are_added_replaced_and_removed():
    """An episode has ten steps; a rollout has four."""
    with opened(count=1) as env:
        rollout, name = Rollout(env, 4), "old"
        policies = Policies({"learner": Constant(0), "old": Constant(1)},
                            choose=lambda episode, _: dict.fromkeys(episode.agents, name))  # fmt: skip

        def acted() -> list[tuple[list[int], list[int]]]:
            """By step, who has acted, and the actions."""
            data = rollout.collect(policies)
            return [
                (sorted({*data.policies[t][acts].tolist()}), sorted({*data.actions[t][acts].tolist()}))
                for t, acts in enumerate(data.acting[:-1])
            ]

        assert acted() == [([1], [1])] * 4
        policies["old"] = Constant(2)  # at once
        assert acted() == [([1], [2])] * 4
        gone = weakref.ref(policies.pop("old"))
        policies["new"] = Constant(1)
        assert gone() is not None
        assert policies._function("old") is gone()
        with pytest.raises(ValueError, match=r"environment 0: choose named the policy 'old' for agent 'x', but the "
                           r"policies are \['learner', 'new'\]"):  # fmt: skip
            acted()
        assert rollout.filled == 2
        assert (rollout.arrays.policies[:2][rollout.arrays.acting[:2]] == 1).all()
        name = "new"
        assert acted()[2:] == [([2], [1])] * 2
        assert gone() is None
        with pytest.raises(KeyError):
            policies._function("old")
        assert policies.index("old") == 1
        policies["old"], name = Constant(0), "old"
        acted()
        assert acted() == [([2], [1])] * 4
        assert acted() == [([1], [0])] * 4
        policies.pop("new")  # nobody uses it
        with pytest.raises(KeyError):
            policies._function("new")
        policies.pop("old")
        policies["old"] = Constant(2)  # back before its episode ends
        assert acted() == [([1], [2])] * 4
        name = "learner"
        assert [actors for actors, _ in acted()] == [[1], [1], [0], [0]]


def test_removed_policies_go_with_the_rollouts_that_use_them():
    for leave in (
        lambda rollout: rollout.reset(),
        lambda rollout: rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64)),
        lambda rollout: rollout.step(np.zeros((2, 3), np.int64)),
        lambda rollout: rollout.collect(three(fixed)),
    ):
        with opened() as env:
            rollout = Rollout(env, 4)
            policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
            policies["a"] = Constant(0)
            rollout.collect(policies)
            gone = weakref.ref(policies.pop("a"))
            assert gone() is not None
            leave(rollout)
            assert gone() is None


# -- the table ---------------------------------------------------------------------------------------------------------


def by_hand(episodes: list[tuple[dict[str, str], Any]]) -> dict[tuple[str, tuple[str, ...]], tuple[int, Any]]:
    """By pairing, the number of episodes and the mean return, from the choices and the finished episodes."""
    found: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
    for chosen_names, finished in episodes:
        for name in {*chosen_names.values()}:
            own = [total for agent, total in finished.returns.items() if chosen_names[agent] == name]
            others = tuple(sorted({chosen_names[agent] for agent in finished.returns} - {name}))
            if own:
                found.setdefault((name, others), []).append(sum(own) / len(own))
    return {key: (len(means), sum(means) / len(means)) for key, means in found.items()}


def assert_table(policies: Policies, expected: Any) -> None:
    table = policies.table()
    assert {(one.policy, one.others): one.episodes for one in table} == {key: n for key, (n, _) in expected.items()}
    assert len({(one.policy, one.others) for one in table}) == len(table)
    for one in table:
        mean = expected[one.policy, one.others][1]
        assert one.mean_return == pytest.approx(mean)
        assert policies.mean_return(one.policy, *reversed(one.others)) == pytest.approx(mean)
        assert np.shape(one.mean_return) == np.shape(mean)


def test_policies_of_agents_that_never_appeared_are_no_others():
    policies = Policies({"a": print, "b": print}, choose=lambda episode, rng: {})
    policies._count({"first": "a", "second": "b"}, FinishedEpisode(0, {"first": 2.0}, {"first": 1}, 1, True, False))
    assert policies.table() == [("a", (), 1, 2.0)]
    assert policies.mean_return("a") == policies.mean_return("a", "a") == 2.0


def test_pairs_that_may_be_actions():
    """If an action is itself a pair with a dict, declared extras tell them apart."""
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Dict(aim=spaces.Discrete(3))))
    action, extras = (1, {"aim": 2}), {"values": 0.5}
    assert actions_and_extras(action, [action_space], []) == (action, None)
    assert actions_and_extras(action, [action_space], ["values"]) == (action, None)
    assert actions_and_extras((action, extras), [action_space], ["values"]) == (action, extras)
    assert actions_and_extras((1, extras), [spaces.Discrete(2)], []) == (1, extras)


@MODES
@pytest.mark.parametrize("name", ["two groups", "dies", "comes back", "different agents", "turns"])
def test_table_equals_sums_by_hand(name, mode):
    case = CASES[name]
    env = StackedVecEnv(ParallelEnv(case.makers, mode, SEED, backend="serial"))
    with env:
        rollout, asked = Rollout(env, 45, action_masks=case.masks), dict[Any, Any]()

        def choose(episode: Any, rng: np.random.Generator) -> dict[str, str]:
            if rng.random() < 0.3:  # mirrored
                names_now = dict.fromkeys(episode.agents, "a")
            else:
                names_now = {agent: str(rng.choice(NAMES)) for agent in episode.agents}
            asked[episode.env_id, episode.number] = names_now
            return names_now

        recorder = Recorder(env, has_extras=False)
        policies = Policies({one: recorder.policy(one) for one in NAMES}, choose=choose)
        episodes, numbers = [], [0] * ENVS
        for _ in range(2):
            rollout.collect(policies)
            for finished in rollout.finished_episodes:
                episodes.append((asked[finished.env_id, numbers[finished.env_id]], finished))
                numbers[finished.env_id] += 1
        expected = by_hand(episodes)
        assert_table(policies, expected)
        assert ("a", ()) in expected
        assert [one.policy for one in policies.table()] == sorted(one.policy for one in policies.table())
        assert all(type(one.mean_return) is float for one in policies.table())
        assert np.isnan(policies.mean_return("a", "nobody"))
        assert np.isnan(policies.mean_return("nobody"))


def test_table_of_vector_rewards():
    makers = [Couriers] * ENVS
    with StackedVecEnv(ParallelEnv(makers, seed=SEED, backend="serial"), scalarize=(0.5, 2.0)) as env:
        rollout, recorder = Rollout(env, 8), Recorder(env, has_extras=False)
        policies = Policies({one: recorder.policy(one) for one in NAMES}, choose=fixed)
        rollout.collect(policies)
        numbers, episodes = [0] * ENVS, []
        for finished in rollout.finished_episodes:
            agents = env.parallel_env.possible_agents
            episodes.append((choice(finished.env_id, numbers[finished.env_id], agents), finished))
            numbers[finished.env_id] += 1
        assert len(episodes) == 2 * ENVS
        assert_table(policies, by_hand(episodes))
        assert all(one.mean_return.shape == (2,) for one in policies.table())


def test_returns_of_different_lengths_have_no_mean():
    """An agent has one, two or three objectives; "c" is each of them once. The mean of "b" is that of one agent."""
    make = functools.partial(Couriers, one_by_one=True)
    with ParallelEnv([make], seed=SEED, backend="serial") as parallel:
        env = StackedVecEnv(parallel, scalarize=np.sum)
        rollout = Rollout(env, 12)
        policies = three(lambda episode, _: {
            agent: "c" if place == episode.number else "b" if place == 0 else "a"
            for place, agent in enumerate(episode.agents)
        })  # fmt: skip
        rollout.collect(policies)
        assert len(rollout.finished_episodes) == 3
        table = {(one.policy, one.others): one for one in policies.table()}
        assert table["c", ("a", "b")].episodes == 2
        assert np.isnan(table["c", ("a", "b")].mean_return).all()
        assert table["b", ("a", "c")].mean_return.shape == (1,)
        assert np.isfinite(table["b", ("a", "c")].mean_return).all()


# -- wrong choices, wrong actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "arguments", "error", "text"),
    [
        ([], {"choose": fixed}, TypeError, r"policies must be a dict of functions by name, got 0 values"),
        ({}, {"choose": fixed}, ValueError, r"at least one policy, got \{\}"),
        ({1: zeros}, {"choose": fixed}, TypeError, "the name of a policy must be a string, got 1"),
        ({"a": 7}, {"choose": fixed}, TypeError, "policy 'a' must be a function of rows, got 7"),
        ({"a": zeros}, {"choose": {"x": "a"}}, TypeError, r"choose must be a function of .*, got \{'x'"),
        ({"a": zeros}, {"choose": fixed, "seed": -1}, ValueError, "seed must not be negative, got -1"),
        ({"a": zeros}, {"choose": fixed, "seed": 0.5}, TypeError, "seed must be .*0.5"),
    ],
)
def test_bad_arguments(policies, arguments, error, text):
    with pytest.raises(error, match=text):
        Policies(policies, **arguments)


def is_unstepped(rollout: Rollout) -> bool:
    return rollout.filled == 0 and (rollout.env.parallel_env.stepper.transitions.statistics.totals[:, -1] <= 0).all()


@HALVES
@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (None, TypeError, r"environment 1: choose must return a dict of names by agent, got one value of type None"),
        (["a", "a", "a"], TypeError, r"environment 1: choose must return a dict of names by agent, got 3 values"),
        ({"x": "a", "y": "a"}, ValueError,
         r"environment 1: .* for each of the agents \['x', 'y', 'z'\], got \{'x': 'a', 'y': 'a'\}"),
        ({"x": "a", "y": "a", "z": "a", "w": "a"}, ValueError, r"environment 1: .*'w': 'a'"),
        ({"x": "a", "y": "d", "z": "a"}, ValueError,
         r"environment 1: choose named the policy 'd' for agent 'y', but the policies are \['a', 'b', 'c'\]"),
        ({"x": "a", "y": ["a"], "z": "a"}, ValueError, r"environment 1: choose named the policy \['a'\] for agent 'y'"),
        ({"x": "a", "y": None, "z": "a"}, ValueError, r"environment 1: choose named the policy None for agent 'y'"),
        (KeyError("choose"), KeyError, "choose"),
    ],
)  # fmt: skip
def test_wrong_choices(answer, error, text, halves):
    """Nothing is stepped for them, and the next rollout works."""
    with opened() as env:
        rollout, is_wrong, asked = Rollout(env, 4, halves=halves), True, []

        def choose(episode: Any, _: Any) -> Any:
            asked.append(episode.env_id)
            if is_wrong and episode.env_id == 1:
                if isinstance(answer, Exception):
                    raise answer
                return answer
            return dict.fromkeys(episode.agents, "b")

        policies, calls = three(choose), []
        for name in NAMES:
            policies[name] = lambda rows: calls.append(rows) or zeros(rows)
        for _ in range(2):
            with pytest.raises(error, match=text):
                rollout.collect(policies)
        assert asked == [0, 1, 1]
        assert rollout.filled == 0
        assert len(calls) == halves - 1
        is_wrong = False
        data = rollout.collect(policies)
        assert asked == [0, 1, 1, 1]
        assert (data.policies[data.acting[:-1]] == 1).all()
        is_wrong = True
        with pytest.raises(error, match=text):
            evaluate(opened(), policies, 3)


def test_names_of_choices_may_be_strings_of_numpy():
    """As `rng.choice` returns them; the table has plain ones."""
    with opened() as env:
        policies = three(lambda episode, rng: {agent: rng.choice(NAMES) for agent in episode.agents})
        Rollout(env, 25).collect(policies)
        assert {type(name) for one in policies.table() for name in (one.policy, *one.others)} == {str}
        assert "np." not in repr(policies.table())
        result = evaluate(opened(), policies, 3)
        assert {type(name) for of_agent in result.policies.values() for name in of_agent} == {str}


def fails(error: Exception) -> Any:
    raise error


ONE_GROUP: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda rows: np.zeros(len(rows.acting) + 1, np.int64), ValueError,
     r"policy 'b': the actions must be numbers of shape \(1,\), got shape \(2,\)"),
    (lambda rows: np.zeros((len(rows.acting), 1), np.int64), ValueError, r"policy 'b': the actions .* shape \(1, 1\)"),
    (lambda rows: 0, ValueError, r"policy 'b': the actions must be numbers of shape \(1,\), got shape \(\)"),
    (lambda rows: None, ValueError, r"policy 'b': the actions must be numbers of shape \(1,\), got None"),
    (lambda rows: ["up"], ValueError, r"policy 'b': the actions must be numbers of shape \(1,\), got \['up'\]"),
    (lambda rows: np.full(1, 0.5), ValueError, r"policy 'b': the actions is 0.5, which its dtype int64 cannot hold"),
    (lambda rows: np.full(1, np.nan), ValueError, r"policy 'b': the actions is nan, which its dtype int64 cannot hold"),
    (lambda rows: {"all": zeros(rows)}, ValueError, r"policy 'b': the actions must be numbers"),
    (lambda rows: (zeros(rows), {"scores": [0.0]}), TypeError,
     r"policy 'b' returned the extras \['scores'\], which are not declared: .* declared are \['score', 'count'\]"),
    (lambda rows: (zeros(rows), {"score": [0.0, 0.0]}), ValueError,
     r"policy 'b': the extra 'score' must be numbers of shape \(1,\), got shape \(2,\)"),
    (lambda rows: (zeros(rows), {"score": ["high"]}), ValueError, r"policy 'b': the extra 'score' must be numbers"),
    (lambda rows: (zeros(rows), {"count": [0.5]}), ValueError, r"policy 'b': the extra 'count' is 0.5, which its"),
    (lambda rows: fails(ArithmeticError("b")), ArithmeticError, "b"),
]  # fmt: skip


@HALVES
@pytest.mark.parametrize(("wrong", "error", "text"), ONE_GROUP)
def test_wrong_actions_and_extras(wrong, error, text, halves):
    with opened(count=2) as env:
        rollout = Rollout(env, 4, extras={"score": (), "count": Extra((), np.int16)}, halves=halves)
        policies = three(lambda episode, _: dict(zip(episode.agents, "aba" if episode.env_id else "aaa")))
        policies["b"] = wrong
        for _ in range(2):
            with pytest.raises(error, match=text):
                rollout.collect(policies)
        assert halves == 2 or is_unstepped(rollout)
        policies["b"] = zeros
        data = rollout.collect(policies)
        assert {*data.policies[:, 1, 1][data.acting[:-1, 1, 1]]} == {1}
        if "extra" not in text:
            policies["b"] = wrong
            with pytest.raises(error, match=text):
                evaluate(opened(), policies, 3)


TWO_GROUPS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda rows: zeros(rows)["first"], r"policy 'b': the actions must be a dict by group, with the keys \['first', "
     r"'second'\]; got .*array"),
    (lambda rows: {"first": zeros(rows)["first"]}, r"policy 'b': the actions must be a dict by group, with the keys "
     r"\['first', 'second'\]; got the keys \['first'\]"),
    (lambda rows: {**zeros(rows), "third": 0}, r"got the keys \['first', 'second', 'third'\]"),
    (lambda rows: {**zeros(rows), "second": [0]}, r"policy 'b': the actions of group 'second' must be numbers of shape "
     r"\(2,\), got shape \(1,\)"),
    (lambda rows: (zeros(rows), {"score": [0.0, 0.0]}), r"policy 'b': the extra 'score' must be a dict by group"),
    (lambda rows: (zeros(rows), {"score": {"first": [0.0] * 4, "second": [0.0]}}),
     r"policy 'b': the extra 'score' of group 'second' must be numbers of shape \(2,\), got shape \(1,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "text"), TWO_GROUPS)
def test_wrong_actions_of_groups(wrong, text):
    with opened() as parallel:
        env = StackedVecEnv(ParallelEnv([ReturningAgents] * 2, backend="serial"),
                            group_map={"first": ["x", "z"], "second": ["y"]})  # fmt: skip
        assert parallel.num_envs == 2
        with env:
            rollout = Rollout(env, 4, extras={"score": ()})
            policies = Policies({"a": zeros, "b": wrong}, choose=lambda episode, _: dict.fromkeys(episode.agents, "b"))
            with pytest.raises(ValueError, match=text):
                rollout.collect(policies)
            assert is_unstepped(rollout)
            policies["b"] = zeros
            rollout.collect(policies)


def test_actions_in_trees_that_do_not_fit():
    for wrong, text in (
        (lambda rows: {"jump": [0] * 3}, r"policy 'a': the actions: expected a dict with the keys \['move', 'jump'\]"),
        (lambda rows: {"jump": [0] * 3, "move": [0] * 3},
         r"policy 'a': the actions.* must be numbers of shape \(3, 2\), got shape \(3,\)"),
    ):  # fmt: skip
        with opened(VariableAgents, count=1) as env:
            rollout = Rollout(env, 4)
            policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"), policy=wrong)
            with pytest.raises(ValueError, match=text):
                rollout.collect(policies)
            assert is_unstepped(rollout)


def test_extras_that_cannot_belong_to_agents():
    with opened() as env:
        rollout = Rollout(env, 4, extras={"score": (), "total": Extra(per_agent=False)})
        for use in (lambda: rollout.collect(three(fixed)), lambda: rollout.ahead(three(fixed), publish=lambda: None)):
            with pytest.raises(ValueError, match=r"the extras \['total'\] belong to environments, .* per_agent=True"):
                use()
        assert rollout.filled == 0
        without = Rollout(env, 4)
        with pytest.raises(TypeError, match=r"policy 'a' returned the extras \['score'\], which are not declared"):
            without.collect(three(fixed, policy=lambda rows: (zeros(rows), {"score": zeros(rows)})))
        without.collect(three(fixed, policy=lambda rows: (zeros(rows), {})))


# -- evaluation --------------------------------------------------------------------------------------------------------

ALL_MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
EPISODES, FIRST_SEED = 5, 11
PLAYED: dict[str, Callable[..., Any]] = {
    "walk": Walk, "dies": VariableAgents, "comes back": ReturningAgents, "turns": tictactoe_v3.env
}  # fmt: skip


def played(make: Any, number: int) -> tuple[dict[str, str], dict[str, float], int]:
    """The choice, the returns and the length of an episode, by a plain loop."""
    one = ReferenceEnv(make, 0, 0, AutoresetMode.DISABLED)
    observations, _ = one.reset(FIRST_SEED + number)
    own = getattr(one.env, "possible_agents", None) or one.env.aec_env.possible_agents
    chosen_names, returns, length = choice(0, number, own), dict[str, float](), 0
    while not one.over:
        observations, rewards, *flags, _ = one.step({
            agent: chosen(chosen_names[agent], observations[agent], one.space("action_space", agent))
            for agent in one.acting
        })  # fmt: skip
        length += 1
        for agent, reward in rewards.items():
            returns[agent] = returns.get(agent, 0.0) + reward
        for of_agents in flags:
            for agent, flag in of_agents.items():
                if flag and agent != "__all__":
                    returns.setdefault(agent, 0.0)
    return chosen_names, returns, length


@functools.cache
def all_played(name: str) -> list[tuple[dict[str, str], dict[str, float], int]]:
    return [played(PLAYED[name], number) for number in range(EPISODES)]


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", [*PLAYED])
def test_episodes_are_those_of_a_plain_loop(build, setup, name, mode):
    expected, asked = all_played(name), []
    for num_envs in (2, 4):
        env = StackedVecEnv(build([PLAYED[name]] * num_envs, setup, mode))
        recorder = Recorder(env, has_extras=False)

        def choose(episode: Any, _: Any, num_envs: int = num_envs) -> dict[str, str]:
            asked.append((num_envs, episode.number))
            return choice(0, episode.number, episode.agents)

        policies = Policies({one: recorder.policy(one) for one in NAMES}, choose=choose)
        result = evaluate(env, policies, EPISODES, FIRST_SEED, action_masks=name == "turns")
        assert result.repeats is True
        assert result.lengths.tolist() == [length for *_, length in expected]
        agents = {agent for _, returns, _ in expected for agent in returns}
        assert result.returns.keys() == result.policies.keys() == agents
        for index, row in enumerate(result.rows()):
            chosen_names, returns, _ = expected[index]
            for agent in agents:
                assert row[f"policy/{agent}"] == result.policies[agent][index] == chosen_names[agent]
                assert row[f"return/{agent}"] == pytest.approx(returns.get(agent, np.nan), nan_ok=True)
        finished = [(chosen_names, SimpleNamespace(returns=returns)) for chosen_names, returns, _ in expected]
        assert_table(policies, by_hand(finished))
    assert sorted(asked) == [(num_envs, number) for num_envs in (2, 4) for number in range(EPISODES)]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_choices_and_draws_do_not_depend_on_the_number_of_environments(mode):
    """Rows have generators of their own; more environments than episodes change nothing."""
    outcomes = []
    for num_envs in (1, 2, 4, 7):
        asked = []

        def choose(episode: Any, rng: np.random.Generator, asked: list[int] = asked) -> dict[str, str]:
            asked.append(episode.number)
            return {agent: str(rng.choice(NAMES)) for agent in episode.agents}

        def draw(rows: Any) -> Any:
            assert rows.rngs.shape == rows.env_ids.shape
            return np.array([rng.integers(5) for rng in rows.rngs])

        with opened(Walk, num_envs, mode) as env:
            result = evaluate(env, three(choose, policy=draw), EPISODES, FIRST_SEED)
        assert sorted(asked) == [*range(EPISODES)]
        outcomes.append((result.team_returns.tolist(), {name: of.tolist() for name, of in result.policies.items()}))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert len({*outcomes[0][1]["a"]}) > 1
    with opened(Walk, 2, mode) as env:  # the stream of a rollout with this seed and number
        assert choices_of(env) == [outcomes[0][1][agent][0] for agent in ("a", "b")]


def choices_of(env: StackedVecEnv) -> list[str]:
    """What `drawn` chooses for the first episode of an environment with the seed `FIRST_SEED`."""
    if env.stepper.mode is AutoresetMode.DISABLED:
        env = opened(Walk, 2)
    rollout, chooser = Rollout(env, 1), Chooser()
    rollout.reset(seed=FIRST_SEED)
    rollout.collect(three(chooser))
    return [*chooser.asked[0, 0].values()]


def test_episodes_that_are_played_again_keep_their_policies():
    """After a restart in the middle, in a reset, and until they have failed."""
    for fails, until, retries in (
        ({FIRST_SEED + 1: 2}, 1, 1),
        ({FIRST_SEED + 1: 0}, 1, 1),
        ({FIRST_SEED + 1: 2}, None, 2),
    ):
        simulator = functools.partial(Walk, fails=fails, until=until)
        chooser = Chooser()

        def choose(episode: Any, rng: np.random.Generator, chooser: Chooser = chooser) -> dict[str, str]:
            assert not any(number == episode.number for _, number in chooser.asked)
            return chooser(episode, rng)

        with opened(simulator, 2, False, on_error="restart", restart_policy=RestartPolicy(rate_limit=None)) as env:
            result = evaluate(env, three(choose), EPISODES, FIRST_SEED)
        assert result.retries.tolist() == [0, retries, 0, 0, 0]
        assert result.failed.tolist() == [retries == 2 and number == 1 for number in range(EPISODES)]
        by_number = {number: names_of for (_, number), names_of in chooser.asked.items()}
        assert {agent: [*of] for agent, of in result.policies.items()} == {
            agent: [by_number[number][agent] for number in range(EPISODES)] for agent in ("a", "b")
        }


def test_episodes_that_are_not_finished_have_no_entry():
    with opened(ReturningAgents, 2, False) as env:
        policies = three(fixed)
        result = evaluate(env, policies, 3, max_steps=4)
        assert result.unfinished.all()
        assert policies.table() == []
        assert result.policies == {}


def test_evaluation_of_one_policy_has_no_names():
    with opened(Walk, 2, False) as env:
        result = evaluate(env, lambda current: np.zeros(current.acting.shape, np.int64), 2)
        assert result.policies is None
        assert not any(key.startswith("policy/") for key in result.rows()[0])


def test_a_parallel_env_cannot_have_policies():
    with ParallelEnv([Walk] * 2, False, backend="serial") as parallel:
        for arguments in ({"policy": three(fixed)}, {"background": True, "snapshot": lambda: three(fixed)}):
            with pytest.raises(TypeError, match=r'Policies act on arrays: .* facade="stacked"'):
                evaluate(parallel, episodes=2, **arguments)


def test_constructors_that_differ_and_agents_that_differ():
    with StackedVecEnv(ParallelEnv(TEAMS, False, SEED, backend="serial")) as env:
        asked = []

        def choose(episode: Any, _: Any) -> dict[str, str]:
            asked.append((episode.env_id, episode.number, [*episode.agents]))
            return fixed(episode)

        policies = three(choose)
        result = evaluate(env, policies, 2, FIRST_SEED)
        agents = agents_of(env)
        assert [{*of_env} for of_env in agents] == [{*names(0, 1)}, {*names(2, 1)}, {*names(3)}]
        assert sorted(asked) == [(env_id, number, agents[env_id]) for env_id in range(3) for number in range(2)]
        for env_id in range(3):
            one = result.of_constructor(env_id)
            assert {agent: of_agent.tolist() for agent, of_agent in one.policies.items()} == {
                agent: [choice(env_id, number, agents[env_id]).get(agent) for number in range(2)]
                for agent in one.returns
            }
        for agent, of_agent in result.policies.items():
            assert of_agent.tolist() == [
                choice(env_id, number, agents[env_id]).get(agent) for env_id in range(3) for number in range(2)
            ]


def test_evaluation_in_the_background():
    """It counts in the table, too, while a rollout collects with the same policies and changes them."""
    with opened(Walk, 2) as env, opened(Walk, 2, False) as other:
        policies = three(lambda episode, rng: dict.fromkeys(episode.agents, "a"))
        expected = evaluate(other, policies, 40, FIRST_SEED)
        assert sum(one.episodes for one in policies.table()) == 40
        future = evaluate(other, episodes=40, seed=FIRST_SEED, background=True, snapshot=lambda: policies)
        rollout, ended = Rollout(env, 20), 0
        for number in range(20):
            rollout.collect(policies)
            ended += len(rollout.finished_episodes)
            policies[f"v{number}"] = zeros
            if number:
                del policies[f"v{number - 1}"]
        assert future.result(60).team_returns.tolist() == expected.team_returns.tolist()
        assert sum(one.episodes for one in policies.table()) == 80 + ended


# -- ahead -------------------------------------------------------------------------------------------------------------


class Digest:
    """Actions that follow from each row and the weights."""

    def __init__(self, weights: int) -> None:
        self.weights = weights

    def __call__(self, rows: Any) -> Any:
        return np.array([(digest(seen) + self.weights) % 3 for seen in rows.observations], np.int64)


class League:
    """Policies that change by schedule, with choices that depend on the table, and on the policies and their order.

    Args:
        rollout: Collects with them.
        changes: How often `change` has been called.
    """

    def __init__(self, rollout: Rollout, policies: Mapping[str, int], changes: int = 0) -> None:
        self.rollout, self.changes = rollout, changes
        self.policies = Policies({name: Digest(weights) for name, weights in policies.items()}, choose=self.choose)
        self.asked: list[Any] = []

    def choose(self, episode: Any, rng: np.random.Generator) -> dict[str, str]:
        counted = sum(round(pairing.mean_return * 8) for pairing in self.policies.table())
        among = [*self.policies]
        self.asked.append((tuple(episode), among, counted))
        return {
            agent: among[(counted + int(rng.integers(100)) + place) % len(among)]
            for place, agent in enumerate(episode.agents)
        }

    def change(self) -> None:
        self.changes += 1
        self.policies["learner"] = Digest(self.changes)
        self.policies[f"v{self.changes}"] = Digest(10 * self.changes)
        self.policies.pop(f"v{self.changes - 3}", None)

    def collected(self, number: int) -> list[Any]:
        """Rollouts collected one after another, with a change before each but the first two of a run."""
        found = []
        for _ in range(number):
            found.append(self.copied(self.rollout.collect(self.policies)))
            self.change()
        return found

    def copied(self, data: Any) -> list[Any]:
        policies = [self.policies.names[index] if index >= 0 else "" for index in data.policies.ravel()]
        fields = (data.observations, data.actions, data.rewards, data.acting, data.policies)
        return [*(np.array(field).tolist() for field in fields), policies]


def league(*, halves: int = 1, seed: int = SEED, policies: Mapping[str, int] | None = None, changes: int = 0) -> League:
    env = opened(ReturningAgents, 3, seed=seed)
    start = {"learner": 0, "v0": 5, "v-1": 6} if policies is None else policies
    return League(Rollout(env, 4, halves=halves), start, changes)


@pytest.mark.parametrize("halves", [1, 2])
def test_data_of_ahead_are_those_of_collect(halves):
    wanted, by_ahead = league(halves=halves), league(halves=halves)
    expected = []
    for number in range(8):
        if number >= 2:
            wanted.change()
        expected.append(wanted.copied(wanted.rollout.collect(wanted.policies)))
    found = []
    with by_ahead.rollout.ahead(by_ahead.policies, publish=by_ahead.change, rollouts=8) as rollouts:
        for data in rollouts:
            found.append(by_ahead.copied(data))
    assert found == expected
    assert by_ahead.asked == wanted.asked
    assert len({name for one in expected for name in one[-1]}) > 4


def test_policies_are_changed_in_publish_only():
    """Others would count sooner or later, by the speed of the thread."""
    one = league()
    policies = one.policies
    before, state = dict(policies), policies.save_state()
    changes: list[Callable[[], Any]] = [
        lambda: policies.__setitem__("new", Digest(0)),
        lambda: policies.__setitem__("learner", Digest(0)),
        lambda: policies.__delitem__("v0"),
        lambda: policies.pop("v0"),
        lambda: policies.popitem(),
        lambda: policies.update(new=Digest(0)),
        lambda: policies.setdefault("other", Digest(0)),
        lambda: policies.clear(),
        lambda: policies.load_state(state),
    ]
    with one.rollout.ahead(policies, publish=lambda: policies.update(new=Digest(0)), rollouts=3) as rollouts:
        for number, _ in enumerate(rollouts):
            for change in changes:
                with pytest.raises(
                    RuntimeError, match=r"policies were changed while ahead\(\) .*: change them in publish"
                ):
                    change()
            assert ("new" in policies) == bool(number)
            assert {name: policies[name] for name in before} == before
            policies.table()
            policies.save_state()
    for change in changes:
        policies.update(before)
        change()


@pytest.mark.parametrize("fails_in", ["policy", "choose", "publish", "body"])
def test_blocks_of_ahead_that_end_early_leave_policies_unlocked(fails_in):
    with opened() as env:
        rollout, is_wrong = Rollout(env, 4), False

        def work(what: str) -> None:
            if is_wrong and what == fails_in:
                raise ArithmeticError(what)

        def choose(episode: Any, _: Any) -> dict[str, str]:
            work("choose")
            return dict.fromkeys(episode.agents, "a")

        policies = three(choose, policy=lambda rows: work("policy") or zeros(rows))

        def train() -> None:
            nonlocal is_wrong
            with rollout.ahead(policies, publish=lambda: work("publish")) as rollouts:
                for _ in rollouts:
                    is_wrong = True
                    work("body")

        with pytest.raises(ArithmeticError, match=fails_in):
            train()
        policies["new"] = zeros
        is_wrong = False
        assert (rollout.collect(policies).policies >= -1).all()
        with rollout.ahead(policies, publish=lambda: None) as rollouts:
            next(rollouts)
            with pytest.raises(RuntimeError):
                del policies["new"]
        del policies["new"]


def test_changes_by_choose_or_a_policy_in_the_thread():
    with opened() as env:
        policies = three(lambda episode, _: policies.pop("c"))
        with (
            pytest.raises(RuntimeError, match="change them in publish"),
            Rollout(env, 4).ahead(policies, publish=lambda: None) as rollouts,
        ):
            next(rollouts)
        assert [*policies] == NAMES


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_blocks_of_ahead_with_one_policies(order):
    """Policies are locked until both have ended; then they are not."""
    with opened() as first, opened() as second:
        policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
        blocks = [Rollout(env, 4).ahead(policies, publish=lambda: None) for env in (first, second)]
        for block in blocks:
            block.__enter__()
            next(block)
        for place in order:
            with pytest.raises(RuntimeError, match="change them in publish"):
                policies["new"] = zeros
            blocks[place].__exit__(None, None, None)
        policies["new"] = zeros


# -- saving ------------------------------------------------------------------------------------------------------------

SAVED_IN = pytest.mark.parametrize("saved_in", [0, 2, 4])  # the rollout that a run is saved after, or in the body of


def loaded(states: Any, state: bytes, changes: int, halves: int) -> League:
    """A run in new objects, with new functions in another order, that loads what was saved."""
    names_now = [*range(-1, changes + 1)]
    functions = {f"v{number}": 10 * number if number > 0 else 5 - number for number in reversed(names_now)}
    one = league(halves=halves, seed=77, policies={**functions, "learner": changes}, changes=changes)
    one.rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64))
    one.rollout.load_state(states)
    one.policies.load_state(state)
    return one


@SAVED_IN
@HALVES
def test_a_run_goes_on_from_saved_states(saved_in, halves):
    """Also with policies that have been removed while an episode uses them, and choices that depend on the table."""
    whole, saved = league(halves=halves), league(halves=halves)
    expected = whole.collected(8)
    saved.collected(saved_in + 1)
    states, state = saved.rollout.save_state(), saved.policies.save_state()
    asked = len(saved.asked)
    one = loaded(states, state, saved.changes, halves)
    assert one.policies.table() == saved.policies.table()
    assert one.policies.save_state() == state  # before it goes on
    assert one.collected(7 - saved_in) == expected[saved_in + 1 :]
    assert one.asked == whole.asked[asked:]
    assert one.policies.table() == whole.policies.table()
    assert one.policies.names == whole.policies.names


@SAVED_IN
@HALVES
def test_a_run_of_ahead_goes_on_from_saved_states(saved_in, halves):
    whole, saved = league(halves=halves), league(halves=halves)
    expected = []
    with whole.rollout.ahead(whole.policies, publish=whole.change, rollouts=8) as rollouts:
        for data in rollouts:
            expected.append(whole.copied(data))
    with saved.rollout.ahead(saved.policies, publish=saved.change) as rollouts:
        for number, _ in enumerate(rollouts):
            if number == saved_in:
                states, state, changes = rollouts.save_state(), saved.policies.save_state(), saved.changes
                break
    one, found = loaded(states, state, changes, halves), []
    with one.rollout.ahead(one.policies, publish=one.change, rollouts=7 - saved_in) as rollouts:
        for data in rollouts:
            found.append(one.copied(data))
    assert found == expected[saved_in + 1 :]
    assert one.asked == whole.asked[len(whole.asked) - len(one.asked) :]
    assert one.policies.table() == whole.policies.table()


def test_policies_that_are_removed_after_loading_act_until_their_episodes_end():
    with opened(count=1) as env:
        policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"), policy=Constant(1))
        rollout = Rollout(env, 4)
        rollout.collect(policies)
        states, state = rollout.save_state(), policies.save_state()
        rollout.load_state(states)
        policies.load_state(state)
        del policies["a"]
        data = rollout.collect(policies)
        assert (data.policies[data.acting[:-1]] == 0).all()
        assert (data.actions[data.acting[:-1]] == 1).all()


def test_choices_are_those_of_the_rollout_that_has_collected_last():
    """Of two rollouts with one `Policies`, both saved."""
    with opened(count=1) as first, opened(count=1) as second:
        number = 0

        def choose(episode: Any, _: Any) -> dict[str, str]:
            nonlocal number
            number += 1
            return dict.fromkeys(episode.agents, NAMES[number % 3])

        policies, rollouts = three(choose), [Rollout(env, 4) for env in (first, second)]
        for rollout in rollouts:
            rollout.collect(policies)
        rollouts[0].collect(policies)
        states, state = rollouts[0].save_state(), policies.save_state()
        rollouts[0].load_state(states)
        policies.load_state(state)
        assert number == 2
        data = rollouts[0].collect(policies)
        assert {*data.policies[0][data.acting[0]]} == {1}


def test_episodes_that_others_have_begun_have_no_entry_after_loading_either():
    with opened(count=1) as env:
        rollout, policies = Rollout(env, 4), three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
        rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64))
        rollout.collect(policies)
        states, state = rollout.save_state(), policies.save_state()
        rollout.load_state(states)
        policies.load_state(state)
        rollout.collect(policies)
        assert len(rollout.finished_episodes) == 1
        assert policies.table() == []


def test_policies_of_episodes_that_have_ended_are_not_needed_to_load():
    """An episode has ten steps; after them, nobody has acted in the next one."""
    with opened(count=1) as env:
        rollout, policies = Rollout(env, 10), three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
        rollout.collect(policies)
        del policies["a"]
        states, state = rollout.save_state(), policies.save_state()
        rollout.load_state(states)
        other = Policies({"c": zeros, "b": zeros}, choose=lambda episode, _: dict.fromkeys(episode.agents, "b"))
        other.load_state(state)
        assert other.names == NAMES
        data = rollout.collect(other)
        assert {*data.policies[data.acting[:-1]]} == {1}
        assert [one.policy for one in other.table()] == ["a", "b"]


def test_states_of_other_environments_or_episodes_are_not_taken():
    """Then `choose` is asked, and the episode does not count."""
    with opened(count=2) as env:
        rollout, asked = Rollout(env, 4), []

        def choose(episode: Any, _: Any) -> dict[str, str]:
            asked.append(episode.env_id)
            return dict.fromkeys(episode.agents, "a")

        policies = three(choose)
        rollout.collect(policies)
        state = policies.save_state()
        rollout.collect(policies)
        assert asked == [0, 1]
        policies.load_state(state)  # of four steps before
        rollout.collect(policies)
        assert asked == [0, 1, 0, 1, 0, 1]
        assert policies.table() == []


def test_bad_states_change_nothing():
    with opened() as env:
        rollout, policies = Rollout(env, 4), three(fixed)
        rollout.collect(policies)
        state, states = policies.save_state(), rollout.save_state()
        few = Policies({"b": zeros}, choose=fixed)
        for target, wrong, text in (
            (policies, b"?", "must be what Policies.save_state returned; reading it raised"),
            (policies, None, "must be what Policies.save_state returned; reading it raised"),
            (policies, states[0], "must be what Policies.save_state returned"),
            (policies, pickle.dumps((1, 2, 3, 4, 5)), "must be what Policies.save_state returned, got 1"),
            (few, state, r"the state has the policies \['a', 'c'\], which are missing here: add them before"),
        ):
            before = target.save_state()
            with pytest.raises(ValueError, match=text):
                target.load_state(wrong)  # type: ignore[arg-type]
            assert target.save_state() == before
        more = Policies(dict.fromkeys(["d", "c", "b", "a"], zeros), choose=fixed)
        more.load_state(state)
        assert more.names == [*more] == ["a", "b", "c", "d"]


def test_loading_while_an_evaluation_runs():
    """Its episodes keep their policies, whose indices change."""
    with opened(Walk, 2, False) as env:
        policies = Policies({"a": Constant(1), "b": Constant(2)}, choose=lambda e, _: dict(zip(e.agents, "ab")))
        expected = evaluate(env, policies, 4, FIRST_SEED)
        other = Policies({"b": zeros, "c": zeros, "a": zeros}, choose=fixed).save_state()
        policies["c"] = zeros
        is_there, goes_on = threading.Event(), threading.Event()

        def wait(rows: Any) -> Any:
            is_there.set()
            assert goes_on.wait(60)
            return Constant(1)(rows)

        policies["a"] = wait
        future = evaluate(env, episodes=4, seed=FIRST_SEED, background=True, snapshot=lambda: policies)
        assert is_there.wait(60)
        policies.load_state(other)
        assert policies.names == ["b", "c", "a"]
        goes_on.set()
        result = future.result(60)
        assert result.team_returns.tolist() == expected.team_returns.tolist()
        assert {name: of.tolist() for name, of in result.policies.items()} == {"a": ["a"] * 4, "b": ["b"] * 4}


# -- interruptions and other uses of the data --------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_rollout_goes_on_after_an_error_of_a_policy(error, halves):
    """Nothing is lost, and `choose` is not asked again; the data are those of a run without the error."""
    found = []
    for fails_at in ((), (1, 5, 6, 17, 40)):
        calls, failures, chooser, data = 0, 0, Chooser(), []

        def act(rows: Any, fails_at: Any = fails_at) -> Any:
            nonlocal calls
            calls += 1
            if calls in fails_at:
                raise error
            return Digest(1)(rows)

        with opened(count=3) as env:
            rollout, policies = Rollout(env, 13, halves=halves), three(chooser, policy=act)
            while len(data) < 3:
                try:
                    data.append([np.array(one).tolist() for one in rollout.collect(policies)[:6] if one is not None])
                    data.append(rollout.arrays.policies.tolist())
                except error:
                    failures += 1
        assert failures == len(fails_at)
        found.append((data, chooser.asked, policies.table()))
    assert found[0] == found[1]


def test_policies_go_on_in_other_environments_after_a_fault():
    """With `on_error="raise"`: the episode of the fault has no entry."""
    fates = {(0, 0): Fate("raise", "step", 6)}
    policies = three(lambda episode, _: dict.fromkeys(episode.agents, "a"))
    with opened(crashing(ReturningAgents, fates), seed=CRASHING_SEED, on_error="raise") as env:
        rollout = Rollout(env, 4)
        rollout.collect(policies)
        with pytest.raises(EnvError):
            rollout.collect(policies)
        assert policies.table() == []
    with opened() as env:
        Rollout(env, 24).collect(policies)
    assert [(one.policy, one.others, one.episodes) for one in policies.table()] == [("a", (), 4)]


def test_the_mask_of_one_policy_for_training():
    with opened() as env:
        rollout, policies = Rollout(env, 12), three(drawn)
        data = rollout.collect(policies)
        train_on = data.acting[:-1] & (data.policies == policies.index("a"))
        assert 0 < train_on.sum() < data.acting[:-1].sum()
        assert train_on.shape == data.rewards.shape


@pytest.mark.needs("torch")
def test_policies_as_tensors():
    with opened() as env:
        rollout = Rollout(env, 4)
        rollout.collect(three(drawn))
        assert np.array_equal(rollout.torch().policies.numpy(), rollout.arrays.policies)


# -- weights of opponents ----------------------------------------------------------------------------------------------


def test_pfsp_weights():
    rates = [0.0, 0.25, 0.5, 1.0]
    hard, variance = [1, 0.5625, 0.25, 0], [0, 0.1875, 0.25, 0]
    assert pfsp_weights(rates) == pytest.approx(np.array(hard) / sum(hard))
    assert pfsp_weights(np.array(rates, np.float32), "variance") == pytest.approx(np.array(variance) / sum(variance))
    assert pfsp_weights(rates, power=1) == pytest.approx(np.array([1, 0.75, 0.5, 0]) / 2.25)
    assert pfsp_weights(rates, "hard", power=0).tolist() == [0.25] * 4
    assert pfsp_weights([1.0, 1.0]).tolist() == [0.5, 0.5]
    assert pfsp_weights([0.0, 1.0], "variance").tolist() == [0.5, 0.5]
    assert pfsp_weights([0.999, 0.999], power=500).sum() == pytest.approx(1)
    assert pfsp_weights([0.3]).dtype == np.float64
    for wrong in ([], [1.5], [-0.1], [np.nan], [[0.5]], 0.5):
        with pytest.raises(ValueError, match="win_rates must be a list of numbers from 0 to 1"):
            pfsp_weights(wrong)
    with pytest.raises(ValueError, match='weighting must be "hard" or "variance", got \'soft\''):
        pfsp_weights([0.5], "soft")  # type: ignore[arg-type]
    for power in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="power must be a number from 0"):
            pfsp_weights([0.5], power=power)


# -- found by a reader -------------------------------------------------------------------------------------------------


def tictactoe_rollout(num_steps: int = 30, **arguments: Any) -> Rollout:
    env = StackedVecEnv(ParallelEnv([tictactoe_v3.env] * 2, seed=SEED, backend="serial"))
    return Rollout(env, num_steps, action_masks=True, **arguments)


def legal(rows: Any) -> Any:
    return rows.action_masks.argmax(axis=-1)


def one_for_all(name: str) -> Any:
    return lambda episode, rng: dict.fromkeys(episode.agents, name)


def test_second_player_begins_with_its_first_row():
    """Also after saving and loading before its first move, and for policies that take over a running episode."""
    begins: dict[str, list[tuple[int, bool]]] = {"player_1": [], "player_2": []}

    def act(rows: Any) -> Any:
        for agent, env_id, is_first in zip(rows.agents, rows.env_ids.tolist(), rows.begins.tolist()):
            begins[agent].append((env_id, is_first))
        return legal(rows)

    def firsts() -> dict[str, int]:
        found = {agent: sum(is_first for _, is_first in seen) for agent, seen in begins.items()}
        for seen in begins.values():
            seen.clear()
        return found

    rollout, policies = tictactoe_rollout(1), Policies({"a": act}, choose=one_for_all("a"))
    with rollout.env:
        rollout.collect(policies)
        assert firsts() == {"player_1": 2, "player_2": 0}
        states, of_policies = rollout.save_state(), policies.save_state()
        rollout.collect(policies)
        assert firsts() == {"player_1": 0, "player_2": 2}
        rollout.collect(policies)
        assert firsts() == {"player_1": 0, "player_2": 0}
    again, other = tictactoe_rollout(1), Policies({"a": act}, choose=one_for_all("a"))
    with again.env:
        other.load_state(of_policies)
        again.load_state(states)
        again.collect(other)
        assert firsts() == {"player_1": 0, "player_2": 2}
        again.collect(other)
        again.collect(Policies({"b": act}, choose=one_for_all("b")))
        assert firsts()["player_2"] == 2


def test_policy_that_is_removed_while_evaluate_repeats_the_first_episode():
    policies = Policies(
        {"a": legal, "b": legal}, choose=lambda one, rng: dict.fromkeys(one.agents, "ab"[one.number > 0])
    )

    def progress(done: int, total: int) -> None:
        if "a" in policies:
            del policies["a"]

    with StackedVecEnv(ParallelEnv([tictactoe_v3.env], False, backend="serial")) as env:
        result = evaluate(env, policies, 3, action_masks=True, progress=progress)
    assert result.repeats
    assert result.policies is not None
    assert result.policies["player_1"].tolist() == ["a", "b", "b"]


def test_what_is_refused_changes_no_choice():
    rollout, asked = tictactoe_rollout(3), []

    def choose(episode: Any, rng: Any) -> dict[str, str]:
        asked.append(episode)
        return dict.fromkeys(episode.agents, "a")

    policies = Policies({"a": legal}, choose=choose)
    with rollout.env:
        rollout.collect(policies)
        before = [*asked]
        with pytest.raises(TypeError, match="expected the extras"):
            rollout.step(np.zeros((2, 2), np.int64), nope=1)
        for wrong in (None, {"a": legal}):
            with pytest.raises(TypeError, match="policy must be a function"):
                rollout.collect(wrong)
        rollout.ahead(legal, publish=lambda: None)  # never entered
        rollout.collect(policies)
        assert asked == before


def test_a_block_of_ahead_that_was_made_before_counts_no_game_of_its_own_policy():
    rollout, policies = tictactoe_rollout(4), Policies({"a": legal}, choose=one_for_all("a"))
    with rollout.env:
        block = rollout.ahead(lambda current: current.action_masks.argmax(axis=-1), publish=lambda: None, rollouts=1)
        rollout.collect(policies)
        with block as rollouts:
            (data,) = rollouts
        assert (data.policies == -1).all()
        assert data.done.any()
        assert policies.table() == []


def test_a_refused_step_leaves_no_index(monkeypatch):
    rollout, policies = tictactoe_rollout(1), Policies({"a": legal}, choose=one_for_all("a"))

    def refuse(actions: Any) -> Any:
        raise ValueError("refused")

    with rollout.env:
        with monkeypatch.context() as patch:
            patch.setattr(rollout.env, "step", refuse)
            with pytest.raises(ValueError, match="refused"):
                rollout.collect(policies)
        data = rollout.collect(lambda current: current.action_masks.argmax(axis=-1))
        assert (data.policies == -1).all()


def test_ctrl_c_while_an_episode_begins(monkeypatch):
    """The choice is made again."""
    rollout, policies = tictactoe_rollout(2), Policies({"a": legal, "b": legal}, choose=one_for_all("b"))
    original, left = Policies.index, [3]

    def index(self: Policies, name: str) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(self, name)

    with rollout.env:
        monkeypatch.setattr(Policies, "index", index)
        with pytest.raises(KeyboardInterrupt):
            rollout.collect(policies)
        data = rollout.collect(policies)
        assert ((data.policies == 1) == data.acting[:-1]).all()


def test_loaded_choices_for_other_agents_are_not_taken():
    states = Policies({"a": legal}, choose=one_for_all("a"))
    rollout = tictactoe_rollout(2)
    with rollout.env:
        rollout.collect(states)
    asked: list[Any] = []

    def choose(episode: Any, rng: Any) -> dict[Any, str]:
        asked.append(episode.env_id)
        return dict.fromkeys(episode.agents, "a")

    other = Policies({"a": lambda rows: np.zeros(len(rows.agents), np.int64)}, choose=choose)
    other.load_state(states.save_state())
    with StackedVecEnv(ParallelEnv([functools.partial(Team, names(0, 1), 9)], seed=SEED, backend="serial")) as env:
        wrong = Rollout(env, 2)
        wrong.collect(lambda current: np.zeros(current.acting.shape, np.int64))
        data = wrong.collect(other)
        assert asked == [0]
        assert (data.policies[data.acting[:-1]] == 0).all()
        assert other._loaded == {}


def test_errors_of_reset_come_before_steps_in_flight_are_dropped():
    env = StackedVecEnv(ParallelEnv([tictactoe_v3.env] * 2, seed=SEED, num_workers=2))
    calls = [0]

    def failing(rows: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("boom")
        return legal(rows)

    policies = Policies({"a": failing}, choose=one_for_all("a"))
    with env:
        rollout = Rollout(env, 6, action_masks=True, halves=2)
        with pytest.raises(RuntimeError, match="boom"):
            rollout.collect(policies)
        with pytest.raises(ValueError, match="seed"):
            rollout.reset(seed=-1)
        data = rollout.collect(policies)
        assert (data.acting[:-1].sum(axis=-1) == 1).all()
        assert ((data.policies == 0) == data.acting[:-1]).all()
