"""`Rollout`: its arrays hold what a plain loop stores; `gae` and `vtrace` equal a loop over each agent's lives."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from helpers.batches import grouped_actions, same
from helpers.comparison import assert_same
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic import connect_four_v3
from simulators.counting import Counting
from simulators.crashing import SEED, Fate, crashing
from simulators.masked_actions import Turnstile
from simulators.native_arena import Arena
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.rollouts import Scored, TruncatedUnseen
from simulators.unreadable_values import Gradient
from simulators.variable_agents import VariableAgents, VariableDictAgents

from marl_parallel import Extra, ParallelEnv, Rollout, gae, vtrace
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.spaces import tree_map
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

ENVS, STEPS, ROLLOUTS = 3, 17, 2
MODES = pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
MAKERS = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
    "tag": functools.partial(simple_tag_v3.parallel_env, max_cycles=9),
    "knights": functools.partial(knights_archers_zombies.parallel_env, max_cycles=11),
    "variable": VariableAgents,
    "dict rules": VariableDictAgents,
    "returning": ReturningPettingZooAgents,
    "returning dicts": ReturningAgents,
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "hybrid": {"num_workers": 2, "backend": "hybrid"},
    "views": {"num_workers": 2, "copy": False},
    "pickled": {"num_workers": 2, "shared_memory": False},
    "halves of one worker": {"num_workers": 1, "backend": "process", "halves": 2},
    "halves of two workers": {"num_workers": 2, "halves": 2},
    "halves in line": {"backend": "serial", "halves": 2},
    "halves, hybrid": {"num_workers": 2, "backend": "hybrid", "halves": 2},
    "halves, pickled": {"num_workers": 2, "shared_memory": False, "halves": 2},
}
GROUPS: dict[str, dict[str, Any]] = {"variable": {"group_map": {"all": ["b", "a", "c"]}}}


def open_env(name: str, mode: str, **how: Any) -> StackedVecEnv:
    states = name not in ("dict rules", "returning dicts") and how.get("shared_memory", True)
    parallel = ParallelEnv([MAKERS[name]] * ENVS, mode, seed=5, **how)
    return StackedVecEnv(parallel, with_state=states, **GROUPS.get(name, {}))


def drawn(env: StackedVecEnv, seed: int) -> Any:
    return grouped_actions(env, np.random.default_rng(seed))


def by_env(episode: Any) -> int:
    return episode.env_id


def copied(value: Any) -> Any:
    return tree_map(np.array, value)


def stacked(values: list[Any]) -> Any:
    return tree_map(lambda *arrays: np.stack(arrays), *values)


# Every kind of environment in one process; every way of stepping with agents that die and agents that come and go.
CASES = [
    *[("serial", name, mode) for name in MAKERS for mode in ("SAME_STEP", "NEXT_STEP")],
    *[(how, *case) for how in [*HOWS][1:] for case in (("knights", "SAME_STEP"), ("dict rules", "NEXT_STEP"))],
]


@pytest.mark.parametrize(("how", "name", "mode"), CASES)
def test_rollouts_hold_what_a_loop_stores(how, name, mode):
    keywords = {**HOWS[how]}
    halves = keywords.pop("halves", 1)
    with open_env(name, mode, **keywords) as env, open_env(name, mode, backend="serial") as plain:
        extras = {"score": (), "total": Extra((2,), np.float64, per_agent=False)}
        rollout = Rollout(env, STEPS, extras=extras, halves=halves)
        observations = copied(plain.reset()[0])
        following = observations, copied(plain.present_next), copied(plain.acting), copied(plain.state)
        for number in range(ROLLOUTS):
            steps = []
            before = [following]
            calls = iter(range(STEPS * halves))
            ended = []

            def policy(current: Any, number: int = number, calls: Any = calls) -> Any:
                t, rows = next(calls) // halves, [*current.env_ids]
                assert rollout.filled == t if halves == 1 else rollout.filled <= t
                actions = tree_map(lambda array: array[rows], drawn(env, 100 * number + t))
                score = tree_map(functools.partial(np.add, np.float32(t)), current.acting)
                return actions, {"score": score, "total": np.full((len(rows), 2), t)}

            for step in range(STEPS):
                seen, paid, terminations, truncations, _ = plain.step(drawn(plain, 100 * number + step))
                following = copied(seen), copied(plain.present_next), copied(plain.acting), copied(plain.state)
                before.append(following)
                ended += plain.parallel_env.finished_episodes
                flags = terminations, truncations, plain.terminated, plain.truncated, plain.done
                final = plain.final_observations, plain.present_final, plain.final_state
                steps.append(copied([tree_map(np.float32, paid), plain.present, *flags, *final]))
            data = rollout.collect(policy)
            assert rollout.filled == STEPS
            assert sorted(rollout.finished_episodes, key=by_env) == sorted(ended, key=by_env)
            observations, observed, acting, states = (stacked([one[place] for one in before]) for place in range(4))
            assert same(data.observations, observations)
            assert same(data.observed, observed)
            assert same(data.acting, acting)
            rewards, present, terminations, truncations, terminated, truncated, done, *_ = (
                stacked([one[place] for one in steps]) for place in range(8)
            )
            pairs = [(data.rewards, rewards), (data.present, present), (data.terminations, terminations)]
            pairs += [(data.truncations, truncations), (data.terminated, terminated), (data.truncated, truncated)]
            for actual, expected in [*pairs, (data.done, done)]:
                assert same(actual, expected)
            for t, env_id in np.argwhere(done).tolist():
                at_end = functools.partial(tree_map, lambda array, t=t, env_id=env_id: array[t, env_id])
                of_env = functools.partial(tree_map, lambda array, env_id=env_id: array[env_id])
                assert same(at_end(data.final_observations), of_env(steps[t][7]))
                assert same(at_end(data.present_final), of_env(steps[t][8]))
                if env.state is not None:
                    assert np.array_equal(data.final_states[t, env_id], steps[t][9][env_id])
            if env.state is not None:
                assert same(data.states, states)
            actions = stacked([drawn(env, 100 * number + step) for step in range(STEPS)])
            assert same(data.actions, actions)
            assert data.extras["total"][:, 0, 1].tolist() == [*range(STEPS)]
            score = env.by_group(data.extras["score"])
            for group, mask in env.by_group(acting).items():
                assert np.array_equal(score[group][3], mask[3] + np.float32(3))


@pytest.fixture
def in_place(monkeypatch) -> list[bool]:
    """For each read of observations, whether workers have written them where they stay."""
    found: list[bool] = []
    is_written = RolloutBuffer.is_written

    def spied(*args: Any) -> bool:
        found.append(is_written(*args))
        return found[-1]

    monkeypatch.setattr(RolloutBuffer, "is_written", spied)
    return found


@pytest.mark.needs("_codec")
@pytest.mark.parametrize(
    "how", ["serial", "thread", "process", "hybrid", "portable", "pickled", "halves of two workers"]
)
def test_workers_write_observations_where_they_stay(how, in_place):
    keywords = {"num_workers": 2, "backend": PortableProcessBackend()} if how == "portable" else {**HOWS[how]}
    halves = keywords.pop("halves", 1)
    with open_env("knights", "SAME_STEP", **keywords) as env:
        rollout = Rollout(env, STEPS, halves=halves)
        for _ in range(2):
            rollout.collect(lambda current: tree_map(lambda array: array[[*current.env_ids]], drawn(env, 1)))
    assert in_place == ([] if how == "pickled" else [True] * (1 + 2 * STEPS * halves))


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("how", ["serial", "process"])
def test_memory_of_rollouts_that_are_gone_is_used_again(how, in_place, monkeypatch):
    with open_env("spread", "SAME_STEP", **HOWS[how]) as env:
        backend, sizes = env.stepper.source.backend, []
        allocate = backend.allocate
        monkeypatch.setattr(backend, "allocate", lambda nbytes: sizes.append(nbytes) or allocate(nbytes))
        first, actions = Rollout(env, 4), np.zeros((ENVS, 3), np.int64)
        data = first.collect(lambda _: actions)
        before = copied(data.observations)
        del first
        for _ in range(5):  # the environment refers to the latest observations, so that two take turns
            rollout = Rollout(env, 4)
            rollout.collect(lambda _: actions)
            del rollout
        assert np.array_equal(data.observations, before)
        assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == sizes[4] == sizes[5]
        assert in_place == [True] * 6 * 5


@pytest.mark.parametrize(
    ("fault", "halves", "mode"),
    [("SIGKILL", 1, "SAME_STEP"), ("SIGKILL", 2, "NEXT_STEP"), ("raise", 1, "NEXT_STEP"), ("raise", 2, "SAME_STEP")],
)
def test_environments_that_are_restarted(fault, halves, mode):
    fates = {
        (0, 0): Fate(fault, "step", 4),
        (1, 0): Fate(fault, "step", 4),
        (2, 0): Fate(fault, "step", 9),
        (2, 1): Fate(fault, "reset", 0),
    }
    make = crashing(functools.partial(Counting, 6), fates)

    def opened() -> StackedVecEnv:
        return StackedVecEnv(ParallelEnv([make] * 4, mode, seed=SEED, num_workers=2, on_error="restart"))

    def chosen(t: int) -> np.ndarray:
        return np.random.default_rng(t).integers(3, size=(4, 2))

    with opened() as env, opened() as plain:
        rollout, calls = Rollout(env, 30, halves=halves), iter(range(30 * halves))
        data = rollout.collect(lambda current: chosen(next(calls) // halves)[[*current.env_ids]])
        observations = [plain.reset()[0]]
        for t in range(30):
            seen, paid, *_ = plain.step(chosen(t))
            observations.append(seen)
            assert np.array_equal(data.rewards[t], paid.astype(np.float32)), t
            assert np.array_equal(data.done[t], plain.done), t
            assert np.array_equal(data.final_observations[t][plain.done], plain.final_observations[plain.done]), t
            assert np.array_equal(data.acting[t + 1], plain.acting), t
        assert np.array_equal(data.observations, np.stack(observations))
        assert env.parallel_env.stats().restarts == plain.parallel_env.stats().restarts >= 2
        assert rollout.collect(lambda current: chosen(0)[[*current.env_ids]]) is rollout.arrays


# -- advantages --------------------------------------------------------------------------------------------------------


def lives(data: Any, values: np.ndarray, final_values: np.ndarray) -> Iterator[tuple[int, int, list[int], list, list]]:
    """Each life of each agent, by a plain loop: times of its actions, the rewards of each, and the value after each."""
    final = dict(zip(map(tuple, np.argwhere(data.done).tolist()), final_values))
    steps, envs, agents = data.rewards.shape
    for env_id, k in np.ndindex(envs, agents):
        ended: list[tuple[list[int], int, float | None]] = []  # times of actions, the last step, what follows
        times: list[int] = []
        for t in range(steps):
            if data.acting[t, env_id, k]:
                times.append(t)
            terminated, truncated = data.terminations[t, env_id, k], data.truncations[t, env_id, k]
            if terminated or truncated or data.done[t, env_id]:
                after = 0.0
                if not terminated:
                    done = data.done[t, env_id]
                    after = float(final[t, env_id][k] if done else values[t + 1, env_id, k])
                    if np.isnan(after) and times:
                        after = float(values[times[-1], env_id, k])
                ended.append((times, t, after))
                times = []
        ended.append((times, steps - 1, None))
        for times, last, after in ended:
            if after is None and times:
                known = data.observed[steps, env_id, k]
                after = float(values[steps if known else times[-1], env_id, k])
            borders = [*times, last + 1]
            paid = [sum(map(float, data.rewards[borders[n] : borders[n + 1], env_id, k])) for n in range(len(times))]
            yield env_id, k, times, paid, [*(float(values[t, env_id, k]) for t in times[1:]), after]


def reference(data: Any, values: np.ndarray, final_values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages by a plain loop over the actions of each agent in each of its lives."""
    advantages = np.zeros(data.rewards.shape)
    for env_id, k, times, paid, following in lives(data, values, final_values):
        later = 0.0
        for n, t in reversed([*enumerate(times)]):
            later = paid[n] + gamma * following[n] - float(values[t, env_id, k]) + gamma * lam * later
            advantages[t, env_id, k] = later
    return advantages


@MODES
@pytest.mark.parametrize(
    "name", ["spread", "variable", "dict rules", "knights", "connect four", "returning", "returning dicts"]
)
def test_advantages_equal_a_loop_over_lives(name, mode):
    rng = np.random.default_rng(1)
    for data in two_rollouts(name, mode):
        values = rng.normal(size=data.observed.shape).astype(np.float32)
        final_values = rng.normal(size=data.rewards[data.done].shape).astype(np.float32)
        advantages, returns = gae(data, values, final_values, 0.9, 0.8)
        expected = reference(data, values, final_values, 0.9, 0.8)
        assert np.allclose(advantages, expected, atol=1e-4)
        acting = data.acting[:-1]
        assert np.allclose(returns[acting], (expected + values[:-1])[acting], atol=1e-4)
        assert not returns[~acting].any()
        assert data.done.any()


@MODES
@pytest.mark.parametrize("name", ["spread", "variable", "knights", "connect four", "returning"])
def test_vtrace_equals_the_formula_of_its_paper(name, mode):
    """Equation 1 of Espeholt et al. (2018), as a sum over all later actions of a life, and section 4.2."""
    rng, gamma, lam = np.random.default_rng(2), 0.9, 0.8
    for data in two_rollouts(name, mode):
        values = rng.normal(size=data.observed.shape).astype(np.float32)
        final_values = rng.normal(size=data.rewards[data.done].shape).astype(np.float32)
        ratios = np.exp(rng.normal(size=data.rewards.shape))
        ratios[~data.acting[:-1]] = np.nan  # only actions have one
        advantages, targets = vtrace(data, values, final_values, ratios, gamma, lam=lam, max_weight=1.2, max_trace=0.7)
        expected, wanted = np.zeros((2, *data.rewards.shape))
        for env_id, k, times, paid, following in lives(data, values, final_values):
            of_life = [float(values[t, env_id, k]) for t in times]
            weights = [min(1.2, float(ratios[t, env_id, k])) for t in times]
            traces = [lam * min(0.7, float(ratios[t, env_id, k])) for t in times]
            errors = [r + gamma * after - value for r, after, value in zip(paid, following, of_life)]
            target = [
                of_life[s]
                + sum(gamma ** (n - s) * np.prod(traces[s:n]) * weights[n] * errors[n] for n in range(s, len(times)))
                for s in range(len(times))
            ]
            for s, t in enumerate(times):
                after = target[s + 1] if s + 1 < len(times) else following[s]
                wanted[t, env_id, k] = target[s]
                expected[t, env_id, k] = weights[s] * (paid[s] + gamma * after - of_life[s])
        assert np.allclose(targets, wanted, atol=1e-4)
        assert np.allclose(advantages, expected, atol=1e-4)
        ones = np.ones(data.rewards.shape)
        for by_vtrace, by_gae in zip(
            vtrace(data, values, final_values, ones, gamma), gae(data, values, final_values, gamma, 1.0)
        ):
            assert np.allclose(by_vtrace, by_gae, atol=1e-4)


def two_rollouts(name: str, mode: Any) -> Iterator[Any]:
    if name == "connect four":
        env = StackedVecEnv(ParallelEnv([connect_four_v3.env] * ENVS, mode, seed=5, backend="serial"))
    else:
        env = open_env(name, mode, backend="serial")
    with env:
        rollout = Rollout(env, 60)
        for _ in range(2):
            yield rollout.collect(lambda current: legal(env, current, rollout.filled))


def legal(env: StackedVecEnv, current: Any, step: int) -> Any:
    if not isinstance(current.observations, dict) or "action_mask" not in current.observations:
        return drawn(env, step)
    masks = current.observations["action_mask"] + 1e-9 * np.random.default_rng(step).random((ENVS, 2, 7))
    return masks.argmax(-1)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("where", ["infos", "observations"])
def test_masks_are_stored_with_the_observations_they_belong_to(where, halves):
    with StackedVecEnv(ParallelEnv([functools.partial(Turnstile, where)] * ENVS, num_workers=2)) as env:
        rollout = Rollout(env, 10, action_masks=True, halves=halves)
        for _ in range(2):
            data = rollout.collect(lambda current: current.action_masks.argmax(-1))  # `Turnstile` raises on any other
            assert data.action_masks.shape == (11, ENVS, 2, 5)
            acting = data.acting[:-1]
            assert np.array_equal(data.action_masks[:-1].argmax(-1)[acting], data.actions[acting])
            if where == "observations":
                one_left = data.acting & (data.observations["action_mask"].sum(-1) == 1)
                masks = data.observations["action_mask"].astype(bool)
                assert np.array_equal(data.action_masks[one_left], masks[one_left])


@MODES
@pytest.mark.parametrize("over", ["agent", "environment"])
def test_values_count_where_there_is_no_last_observation(over, mode):
    """A critic of states, constant 5: each step has an error of 1, also the last one before a truncation."""
    make = functools.partial(TruncatedUnseen, whole=over == "environment")
    with StackedVecEnv(ParallelEnv([make] * 2, mode, backend="serial"), with_state=True) as env:
        data = Rollout(env, 20).collect(lambda current: np.zeros(current.acting.shape, np.int64))
        assert data.final_states[data.done].any()
        values = np.full(data.observed.shape, 5, np.float32)
        final_values = np.full((data.done.sum(), 2), 5, np.float32)
        advantages, _ = gae(data, values, final_values, gamma=1.0, lam=0.0)
        acting = data.acting[:-1]
        truncated = acting & (data.truncations | data.done[:, :, None])
        assert (data.truncations & acting & ~data.observed[1:])[~data.done].any() or over == "environment"
        assert truncated.sum() > 4
        assert (advantages[acting] == 1).all()
        # NaN stands for no value: then that at the agent's last action counts.
        values[~data.observed] = np.nan
        advantages, returns = gae(data, values, final_values * np.nan, gamma=1.0, lam=0.0)
        assert (advantages[acting] == 1).all()
        assert not np.isnan(returns).any()


def test_groups_of_a_rollout():
    with open_env("tag", "SAME_STEP", backend="serial") as env:
        rollout = Rollout(env, 12, extras={"values": (), "whole": Extra(per_agent=False)})
        zeros = env.grouped({name: np.zeros((ENVS, len(of))) for name, of in env.group_map.items()})
        data = rollout.collect(lambda _: (drawn(env, 0), {"values": zeros, "whole": np.ones(ENVS)}))
        group = data.group("agent")
        assert group.observations.shape == (13, ENVS, 1, 14)
        assert group.extras["values"].shape == (12, ENVS, 1)
        assert group.extras["whole"].all()
        assert group.action_masks is None
        assert group.done is data.done
        advantages, _ = gae(group, np.zeros((13, ENVS, 1)), np.zeros((ENVS, 1)), 0.9, 0.9)
        assert advantages.shape == (12, ENVS, 1)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_input():
    parallel = ParallelEnv([MAKERS["spread"]] * ENVS, backend="serial")
    with pytest.raises(TypeError, match="needs a StackedVecEnv, got ParallelEnv"):
        Rollout(parallel, 5)
    with StackedVecEnv(parallel) as env:
        with pytest.raises(ValueError, match="num_steps must be at least 1"):
            Rollout(env, 0)
        with pytest.raises(TypeError, match=r"extras\['score'\] must be a shape or an Extra, got 3"):
            Rollout(env, 5, extras={"score": 3})
        with pytest.raises(ValueError, match="halves must be 1 or 2, got 3"):
            Rollout(env, 5, halves=3)
        with pytest.raises(MemoryError, match=r"GiB are free: collect fewer steps"):
            Rollout(env, 10**12)
        rollout = Rollout(env, 5, extras={"score": ()})
        actions, score = np.zeros((ENVS, 3), np.int64), np.zeros((ENVS, 3))
        with pytest.raises(ResetNeeded, match="call reset"):
            rollout.step(actions, score=score)
        rollout.reset(seed=3)
        with pytest.raises(TypeError, match=r"expected the extras \['score'\], got \[\]"):
            rollout.step(actions)
        for score_of_another_shape in (np.zeros(7), 0.0, np.zeros(ENVS), np.zeros((1, 3)), np.zeros((ENVS, 3, 1))):
            with pytest.raises(ValueError, match=r"^the extra 'score' must be numbers of shape \(3, 3\), got shape"):
                rollout.step(actions, score=score_of_another_shape)
        for no_numbers in (None, [["a"] * 3] * ENVS, Gradient()):
            with pytest.raises(ValueError, match=r"^the extra 'score' must be numbers of shape \(3, 3\), got"):
                rollout.step(actions, score=no_numbers)
        with pytest.raises(ValueError, match="group 'agent'"):
            rollout.step(np.zeros((ENVS, 4), np.int64), score=score)
        assert parallel.stats().steps == 0
        assert rollout.step(actions, score=score).observations.base is not None
        assert rollout.filled == 1
    with (
        StackedVecEnv(ParallelEnv([MAKERS["spread"]], backend="serial")) as one,
        pytest.raises(ValueError, match="halves=2 needs at least two environments, got 1"),
    ):
        Rollout(one, 5, halves=2)
    with (
        StackedVecEnv(ParallelEnv.from_native(Arena(4))) as native,
        pytest.raises(ValueError, match="native simulator steps all its environments at once"),
    ):
        Rollout(native, 5, halves=2)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_halves_that_are_reset_before_a_rollout_is_full(backend):
    with open_env("spread", "SAME_STEP", backend=backend, num_workers=1) as env:
        rollout = Rollout(env, 5, halves=2)
        first = rollout.reset(seed=3)
        assert [*first.env_ids] == [0]
        second = rollout.step(np.zeros((1, 3), np.int64))  # of the first half, which is in flight now
        assert [*second.env_ids] == [1, 2]
        with pytest.raises(ValueError, match="group 'agent'"):
            rollout.step(np.zeros((1, 3), np.int64))
        with pytest.raises(AlreadyPendingCallError):
            env.reset()
        again = rollout.reset(seed=3)
        assert rollout.filled == 0
        assert np.array_equal(again.observations, rollout.arrays.observations[0, :1])
        fresh = env.reset(seed=3)[0]
        assert np.array_equal(rollout.arrays.observations[0], fresh)


# By what a policy returns and whether an extra is declared, what the error says.
FORMS: dict[str, tuple[Any, bool, str]] = {
    "actions only": (
        lambda actions: actions, True,
        r"^the policy must return a pair of actions and a dict of the extras .*, got one value of type ndarray",
    ),
    "actions for two environments": (
        lambda actions: actions[:2], True,
        r"^the policy must return a pair of actions and a dict of the extras .*, got one value of type ndarray",
    ),
    "extras without a name": (
        lambda actions: (actions, actions), True,
        r"^the policy must return a pair of .* got 2 values: \(ndarray, ndarray\)",
    ),
    "three values": (
        lambda actions: (actions, {"score": actions}, None), True, r"^the policy must return a pair .* got 3 values",
    ),
    "extras that are not declared": (
        lambda actions: (actions, {"score": actions}), False,
        r"^the policy returned a pair of actions and a dict, but no extras are declared: pass .* for \['score'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_policies_that_return_another_form(form):
    returned, declared, message = FORMS[form]
    with open_env("spread", "SAME_STEP", backend="serial") as env:
        rollout = Rollout(env, 5, extras={"score": ()} if declared else None)
        with pytest.raises(TypeError, match=message):
            rollout.collect(lambda _: returned(np.zeros((ENVS, 3), np.int64)))
        assert env.parallel_env.stats().steps == 0
        assert rollout.filled == 0


def test_extras_of_groups_and_of_environments():
    with open_env("tag", "SAME_STEP", backend="serial") as env:
        rollout = Rollout(env, 12, extras={"score": (2,), "whole": Extra((), per_agent=False)})
        rollout.reset()
        actions, whole = drawn(env, 0), np.zeros(ENVS)
        score = {name: np.zeros((ENVS, len(of), 2)) for name, of in env.group_map.items()}
        with pytest.raises(
            ValueError, match=r"^the extra 'score' must be a dict by group, with the keys .*; got ndarray"
        ):
            rollout.step(actions, score=np.zeros((ENVS, 4, 2)), whole=whole)
        with pytest.raises(
            ValueError, match=r"^the extra 'score' of group 'agent' must be numbers of shape \(3, 1, 2\)"
        ):
            rollout.step(actions, score={**score, "agent": np.zeros((ENVS, 1))}, whole=whole)
        with pytest.raises(ValueError, match=r"^the extra 'whole' must be numbers of shape \(3,\), got shape \(3, 1\)"):
            rollout.step(actions, score=score, whole=whole[:, None])
        rollout.step(actions, score=score, whole=whole)


def test_environments_that_wait_for_a_reset_are_refused():
    for make in (MAKERS["spread"], MAKERS["dict rules"]):
        with (
            StackedVecEnv(ParallelEnv([make] * ENVS, False, backend="serial")) as env,
            pytest.raises(ValueError, match=r"resets by itself: pass auto_reset=True or auto_reset=\"NEXT_STEP\""),
        ):
            Rollout(env, 5)


# -- infos -------------------------------------------------------------------------------------------------------------

INFOS = {
    "won": (),
    "place": Extra((2,), np.int64),
    "episode/r": (),
    "episode/l": Extra((), np.int64),
    "score": Extra((2,), np.float64, per_agent=False),
    "length": Extra((), np.int64, per_agent=False),
    "nobody": (),
}


@MODES
@pytest.mark.parametrize("how", ["serial", "process", "pickled", "halves of two workers"])
def test_infos_that_are_named_are_kept(how, mode):
    """Compared with those that the dicts of a plain run have; nobody's stay zeros."""
    keywords = {**HOWS[how]}
    halves = keywords.pop("halves", 1)
    arguments = {"seed": 5, "episode_stats": True}
    plain = ParallelEnv([Scored] * ENVS, mode, backend="serial", **arguments)
    with StackedVecEnv(ParallelEnv([Scored] * ENVS, mode, **arguments, **keywords)) as env, plain:
        rollout = Rollout(env, STEPS, infos=INFOS, halves=halves)
        plain.reset()
        for _ in range(2):
            data = rollout.collect(lambda current: np.zeros(current.acting.shape, np.int64))
            found = 0
            for t in range(STEPS):
                infos = plain.step([{"a": 0, "b": 0}] * ENVS)[4]
                for env_id, place in np.ndindex(ENVS, 2):
                    info = infos[env_id].get("ab"[place], {})
                    expected = {"won": info.get("won"), "place": info.get("place"), "nobody": None}
                    expected |= {f"episode/{key}": info.get("episode", {}).get(key) for key in "rl"}
                    at = t, env_id, place
                    for name, value in expected.items():
                        assert data.informed[name][at] == (value is not None)
                        assert np.array_equal(
                            data.infos[name][at],
                            np.zeros_like(data.infos[name][at]) + (value or 0)
                            if not isinstance(value, list)
                            else value,
                        )
                        found += value is not None
                    common = infos[env_id].get("__common__", {})
                    for name, value in (("score", infos[env_id].get("score")), ("length", common.get("length"))):
                        assert data.informed[name][t, env_id] == (value is not None)
                        assert np.array_equal(
                            data.infos[name][t, env_id],
                            np.zeros(2 if name == "score" else ()) if value is None else value,
                        )
                        found += value is not None
            assert found > 50
            assert data.infos["place"].dtype == np.int64
            assert data.infos["won"].dtype == np.float32


@pytest.mark.parametrize("halves", [1, 2])
def test_infos_of_environments_that_return_lists(halves):
    """The form of infos makes no difference."""
    kept = []
    for form in ("dict", "list"):
        env = ParallelEnv([Scored] * ENVS, seed=5, num_workers=2, backend="thread")
        with StackedVecEnv(env, infos=form) as stacked:
            data = Rollout(stacked, STEPS, infos=INFOS, halves=halves).collect(
                lambda current: np.zeros(current.acting.shape, np.int64)
            )
            kept.append([data.infos, data.informed])
    assert_same(kept[1], kept[0])
    assert kept[0][1]["won"].any()


def test_infos_of_another_shape():
    """The step has been stored without them, and the rollout goes on."""
    with StackedVecEnv(ParallelEnv([Scored] * ENVS, seed=5, backend="serial")) as env:
        rollout = Rollout(env, 10, infos={"place": (3,), "won": ()})
        rollout.reset()
        actions, errors = np.zeros((ENVS, 2), np.int64), []
        for _ in range(9):
            try:
                rollout.step(actions)
            except ValueError as error:
                errors.append(str(error))
        assert rollout.filled == 9
        assert set(errors) == {
            "environment 0, agent 'b': the info 'place' must be numbers of shape (3,), got shape (2,)"
        }
        assert not rollout.arrays.informed["place"].any()
        assert rollout.arrays.informed["won"].any()
        with pytest.raises(TypeError, match=r"infos\['won'\] must be a shape or an Extra, got 3"):
            Rollout(env, 5, infos={"won": 3})


@pytest.mark.parametrize("value", [0.5, np.nan, -1, 300])
def test_numbers_that_the_dtype_does_not_hold(value):
    """They are refused, not rounded or wrapped around; whole floats are taken."""
    with StackedVecEnv(ParallelEnv([Scored] * ENVS, seed=5, backend="serial")) as env:
        rollout = Rollout(env, 10, extras={"x": Extra((), np.uint8)})
        rollout.reset()
        actions, x = np.zeros((ENVS, 2), np.int64), np.full((ENVS, 2), 7.0)
        rollout.step(actions, x=x)
        x[1, 0] = value
        with pytest.raises(ValueError, match=r"^the extra 'x' is .*, which its dtype uint8 cannot hold"):
            rollout.step(actions, x=x if isinstance(value, float) else x.astype(np.int64))
        assert rollout.filled == 1
        assert (rollout.arrays.extras["x"][0] == 7).all()


def test_infos_of_one_group():
    with StackedVecEnv(
        ParallelEnv([Scored] * ENVS, seed=5, backend="serial"), group_map={"x": ["b"], "y": ["a"]}
    ) as env:
        rollout = Rollout(env, 20, infos={"won": (), "length": Extra(per_agent=False)})
        data = rollout.collect(lambda _: {name: np.zeros((ENVS, 1), np.int64) for name in "xy"})
        assert data.group("x").infos["won"] is data.infos["won"]["x"]
        assert data.group("x").informed["won"].shape == (20, ENVS, 1)
        assert data.group("y").infos["length"] is data.infos["length"]
        assert data.informed["won"]["y"].any()
        assert not data.informed["won"]["x"].any()


def test_values_of_other_shapes():
    with open_env("spread", "SAME_STEP", backend="serial") as env:
        data = Rollout(env, 7).collect(lambda _: drawn(env, 0))
        with pytest.raises(ValueError, match=r"^values must have shape \(8, 3, 3\), got \(7, 3, 3\)"):
            gae(data, np.zeros((7, 3, 3)), np.zeros((3, 3)), 0.9, 0.9)
        with pytest.raises(ValueError, match=r"^final_values must have shape \(3, 3\), got \(7, 3, 3\)"):
            gae(data, np.zeros((8, 3, 3)), np.zeros((7, 3, 3)), 0.9, 0.9)
        with pytest.raises(ValueError, match=r"^ratios must have shape \(7, 3, 3\), got \(8, 3, 3\)"):
            vtrace(data, np.zeros((8, 3, 3)), np.zeros((3, 3)), np.zeros((8, 3, 3)), 0.9)


def test_steps_that_follow_a_full_rollout_begin_the_next():
    with open_env("spread", "SAME_STEP", backend="serial") as env:
        rollout = Rollout(env, 2)
        rollout.reset()
        actions = np.zeros((ENVS, 3), np.int64)
        for _ in range(2):
            last = rollout.step(actions).observations.copy()
        rollout.step(actions)
        assert rollout.filled == 1
        assert np.array_equal(rollout.arrays.observations[0], last)
