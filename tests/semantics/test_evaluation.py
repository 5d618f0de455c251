"""`evaluate` plays the episodes of a plain loop over one simulator, whatever the environments, workers and backend."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import zlib
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from helpers.batches import at
from helpers.reference import ReferenceEnv
from helpers.setups import Setup, rest
from mpe2 import simple_spread_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic import connect_four_v3
from pettingzoo.utils import BaseParallelWrapper
from simulators.native_arena import Arena
from simulators.pymarl_envs import Skirmish
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.variable_agents import VariableAgents, VariableDictAgents
from simulators.walks import LONG, SHORT, Walk, WalkFailed

from marl_parallel import EnvError, Extra, ParallelEnv, RestartPolicy, Rollout, evaluate
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts import EvaluationResult
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

EPISODES, SEED = 5, 11


class Knights(BaseParallelWrapper):
    """Made anew for each episode: `reset` of the simulator leaves something of the episode before."""

    def __init__(self) -> None:
        super().__init__(knights_archers_zombies.parallel_env(max_cycles=11))

    def reset(self, seed: int | None = None, options: dict | None = None) -> Any:
        self.env = knights_archers_zombies.parallel_env(max_cycles=11)
        return self.env.reset(seed=seed, options=options)


MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
MAKERS: dict[str, Any] = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
    "knights": Knights,
    "variable": VariableAgents,
    "dict rules": VariableDictAgents,
    "returning": ReturningPettingZooAgents,
    "returning dicts": ReturningAgents,
    "turns": connect_four_v3.env,
    "walk": Walk,
}
GROUPS: dict[str, Any] = {"variable": {"group_map": {"all": ["b", "a", "c"]}}}
NO_LIMIT: Any = {"on_error": "restart", "restart_policy": RestartPolicy(rate_limit=None)}


# -- policies: what an agent does follows from its own observation alone, bit by bit -----------------------------------


def leaves(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [np.asarray(value)]


def digest(seen: Any, hidden: int = 0) -> int:
    """A number that follows from an observation, and from the number of the observations before."""
    return zlib.crc32(b"".join(leaf.astype(np.float64).tobytes() for leaf in leaves(seen)), hidden)


def chosen(seen: Any, space: Any, hidden: int = 0) -> Any:
    """The action of an agent with this observation; legal if the observation has an action mask."""
    seed = digest(seen, hidden)
    if isinstance(seen, dict) and "action_mask" in seen:
        legal = np.flatnonzero(seen["action_mask"])
        return int(legal[seed % len(legal)]) if len(legal) else 0

    def draw(leaf: Any) -> Any:
        rng = np.random.default_rng(seed)
        return rng.integers(leaf.n) if hasattr(leaf, "n") else rng.uniform(-1, 1, leaf.shape).astype(leaf.dtype)

    return tree_map(draw, space)


def of_rows(env: StackedVecEnv, *, remembers: bool = False, forgets: bool = True) -> Any:
    """The policy for a `StackedVecEnv`; with `remembers`, each row has a hidden state, which `begins` resets."""
    hidden = {group: np.zeros((env.num_envs, len(agents)), np.int64) for group, agents in env.group_map.items()}

    def of_group(group: str, space: Any, current: Any) -> Any:
        observations, observed, begins = (
            env.by_group(values)[group] for values in (current.observations, current.observed, current.begins)
        )
        states, rows = hidden[group], []
        if forgets:
            states[begins] = 0
        for row in np.ndindex(states.shape):
            seen = at(at(observations, row[0]), row[1])
            rows.append(chosen(seen, space, int(states[row])))
            if remembers and observed[row]:
                states[row] = digest(seen, int(states[row]))
        return tree_map(lambda *values: np.array(values).reshape(*states.shape, *np.shape(values[0])), *rows)

    def policy(current: Any) -> Any:
        spaces = env.by_group(env.single_action_space)
        return env.grouped({group: of_group(group, space, current) for group, space in spaces.items()})

    return policy


def of_dicts(env: ParallelEnv) -> Any:
    """The policy for a `ParallelEnv`."""

    def policy(observations: Any) -> Any:
        return [
            {agent: chosen(seen[agent], env.action_space[agent]) for agent in acting if agent in seen}
            for seen, acting in zip(observations, env.acting, strict=True)
        ]

    return policy


def plain(make: Any, seed: int, *, remembers: bool = False) -> tuple[dict[str, float], int]:
    """The returns and the length of one episode by a plain loop that shares no code with the package.

    With `remembers`, each agent has a hidden state from its first observation to its end.
    """
    one = ReferenceEnv(make, 0, 0, AutoresetMode.DISABLED)
    observations, _ = one.reset(seed)
    returns: dict[str, float] = {}
    hidden: dict[str, int] = {}
    ended: list[str] = []
    length = 0
    while not one.over:
        actions = {
            agent: chosen(observations[agent], one.space("action_space", agent), hidden.get(agent, 0))
            for agent in one.acting
        }
        if remembers:
            hidden |= {a: digest(seen, hidden.get(a, 0)) for a, seen in observations.items() if a not in ended}
        observations, rewards, *flags, _ = one.step(actions)
        length += 1
        for agent, reward in rewards.items():
            returns[agent] = returns.get(agent, 0.0) + reward
        ended = [agent for of_agents in flags for agent, flag in of_agents.items() if flag and agent != "__all__"]
        for agent in ended:
            returns.setdefault(agent, 0.0)
            hidden.pop(agent, None)
    return returns, length


@functools.cache
def expected(name: str, *, remembers: bool = False) -> list[tuple[dict[str, float], int]]:
    return [plain(MAKERS[name], SEED + index, remembers=remembers) for index in range(EPISODES)]


def assert_expected(result: EvaluationResult, episodes: list[tuple[dict[str, float], int]]) -> None:
    assert result.lengths.tolist() == [length for _, length in episodes]
    assert result.finished.all()
    assert not (result.failed | result.unfinished).any()
    assert result.returns.keys() == {agent for returns, _ in episodes for agent in returns}
    for agent, of_agent in result.returns.items():
        assert of_agent == pytest.approx([returns.get(agent, np.nan) for returns, _ in episodes], nan_ok=True)
    teams = [sum(returns.values()) for returns, _ in episodes]
    assert result.team_returns == pytest.approx(teams)
    assert result.mean == pytest.approx(np.mean(teams))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        rest(name, mode) if name == "knights" and mode != "SAME_STEP" else (name, mode)
        for name in MAKERS
        for mode in MODES
    ],
)
def test_episodes_are_those_of_a_plain_loop(build, setup, name, mode):
    parallel = build([MAKERS[name]] * 3, setup, mode, 5)
    result = evaluate(parallel, of_dicts(parallel), EPISODES, SEED)
    assert_expected(result, expected(name))
    assert result.repeats is True
    assert result.seeds == tuple(range(SEED, SEED + EPISODES))
    env = StackedVecEnv(parallel, **GROUPS.get(name, {}))  # after other episodes
    assert_expected(evaluate(env, of_rows(env), EPISODES, SEED), expected(name))


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("variable", "SAME_STEP"), ("dict rules", "DISABLED"), ("returning", "NEXT_STEP"), ("walk", "DISABLED")],
)
def test_any_number_of_environments(parallel, name, mode, num_envs):
    several = parallel(MAKERS[name], num_envs, mode)
    assert_expected(evaluate(several, of_dicts(several), EPISODES, SEED), expected(name))
    env = StackedVecEnv(several, **GROUPS.get(name, {}))
    assert_expected(evaluate(env, of_rows(env), EPISODES, SEED), expected(name))


@pytest.mark.parametrize("form", [{"copy": False}, {"infos": "list"}], ids=["views", "list of infos"])
def test_other_forms_of_results(build, backend_setup, form):
    several = build([Walk] * 3, backend_setup, "DISABLED", copy=form.pop("copy", True))
    assert_expected(evaluate(several, of_dicts(several), EPISODES, SEED), expected("walk"))
    env = StackedVecEnv(several, **form)
    assert_expected(evaluate(env, of_rows(env), EPISODES, SEED), expected("walk"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["variable", "dict rules", "returning", "returning dicts", "turns"])
def test_recurrent_policies(parallel, name, mode):
    """A hidden state begins anew with each episode and life."""
    for num_envs in (1, 3) if mode == "DISABLED" else (3,):
        env = StackedVecEnv(parallel(MAKERS[name], num_envs, mode), **GROUPS.get(name, {}))
        result = evaluate(env, of_rows(env, remembers=True), EPISODES, SEED)
        assert_expected(result, expected(name, remembers=True))
    if mode == "SAME_STEP":
        without = evaluate(env, of_rows(env, remembers=True, forgets=False), EPISODES, SEED)
        assert without.lengths.tolist() != result.lengths.tolist() or {*without.team_returns} != {*result.team_returns}


@pytest.mark.parametrize("mode", MODES)
def test_short_episodes_do_not_count_more_often(mode):
    lengths = [plain(Walk, seed)[1] for seed in range(30)]
    assert {*lengths} == {SHORT, LONG}
    with ParallelEnv([Walk] * 5, mode, backend="serial") as parallel:
        result = evaluate(parallel, of_dicts(parallel), 30, 0)
    assert result.lengths.tolist() == lengths
    assert len({*result.seeds}) == 30


def test_the_first_episodes_that_happen_to_end_are_short_ones():
    """What people write in place of `evaluate`: the seeds are the same, and the mean length is wrong."""
    ended: list[int] = []
    with ParallelEnv([Walk] * 30, backend="serial") as parallel:
        observations, _ = parallel.reset(seed=0)
        while len(ended) < 30:
            observations, *_ = parallel.step(of_dicts(parallel)(observations))
            ended += [episode.length for episode in parallel.finished_episodes]
        result = evaluate(parallel, of_dicts(parallel), 30, 0)
    assert np.mean(ended[:30]) < result.lengths.mean() - 1


def test_fewer_episodes_than_environments_and_chosen_seeds():
    with ParallelEnv([Walk] * 5, False, backend="serial") as parallel:
        result = evaluate(parallel, of_dicts(parallel), seeds=[9, 3])
        assert result.seeds == (9, 3)
        assert_expected(result, [plain(Walk, 9), plain(Walk, 3)])
        assert evaluate(parallel, of_dicts(parallel)).team_returns.shape == (100,)


# -- policies that draw ------------------------------------------------------------------------------------------------


def drawn(current: Any) -> Any:
    return tree_map(lambda rngs: np.vectorize(lambda rng: rng.integers(5), otypes=[np.int64])(rngs), current.rngs)


def drawn_dicts(env: ParallelEnv) -> Any:
    def policy(observations: Any, *, rngs: Any) -> Any:
        return [{agent: rngs[i][agent].integers(5) for agent in acting} for i, acting in enumerate(env.acting)]

    return policy


def test_policies_that_draw_from_rngs_play_the_same_episodes(build, backend_setup):
    outcomes = []
    serial = Setup("serial", True, 1)
    for num_envs, mode, how in ((1, MODES[0], serial), (2, MODES[1], serial), (5, MODES[2], backend_setup)):
        parallel = build([Walk] * num_envs, how, mode)
        outcomes.append(evaluate(parallel, drawn_dicts(parallel), EPISODES, SEED))
        outcomes.append(evaluate(StackedVecEnv(parallel), drawn, EPISODES, SEED))
    assert len({one.team_returns.tobytes() for one in outcomes}) == 1
    rows: list[Any] = []
    with StackedVecEnv(ParallelEnv([Walk] * 2, backend="serial")) as env:
        evaluate(env, lambda current: rows.append(drawn(current)) or np.zeros((2, 2), np.int64), 2, SEED)
    streams = np.array(rows).reshape(len(rows), -1).T
    assert len({stream.tobytes() for stream in streams}) == 4  # two agents of two episodes


def test_rngs_exist_only_while_evaluating():
    with StackedVecEnv(ParallelEnv([Walk] * 2, backend="serial")) as env:
        assert Rollout(env, 3).reset().rngs is None


def test_a_policy_that_draws_from_elsewhere_is_no_simulator_that_does_not_repeat(recwarn):
    with StackedVecEnv(ParallelEnv([Walk] * 2, backend="serial")) as env:
        rng = np.random.default_rng(0)
        assert evaluate(env, lambda current: rng.integers(5, size=(2, 2)), EPISODES).repeats is True
    assert not recwarn.list


# -- simulators that do not repeat, constructors that differ -----------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "facade"), [(1, "stacked"), (3, "stacked"), (1, None), (3, None)])
def test_a_simulator_that_does_not_repeat_its_first_episode(num_envs, facade):
    with ParallelEnv([functools.partial(Walk, drifts=True)] * num_envs, backend="serial") as parallel:
        env: Any = parallel if facade is None else StackedVecEnv(parallel)
        policy = of_dicts(parallel) if facade is None else of_rows(env)
        other = "environments 0 and [12]" if num_envs > 1 else "twice in environment 0"
        with pytest.warns(UserWarning, match=rf"seed 11 was played .*{other}.*after reset, observations differ"):
            result = evaluate(env, policy, EPISODES, SEED)
        assert result.repeats is False
        assert result.finished.all()


@pytest.mark.parametrize("num_envs", [1, 2])
def test_environments_whose_rewards_depend_on_the_seed_of_the_constructor(num_envs, recwarn):
    with ParallelEnv([functools.partial(Walk, differs=True)] * num_envs, seed=5, backend="serial") as parallel:
        assert evaluate(parallel, of_dicts(parallel), EPISODES, SEED).repeats is (num_envs == 1)
    texts = [str(one.message) for one in recwarn.list]
    assert len(texts) == num_envs - 1
    assert all("after 1 steps, rewards differ" in text for text in texts)


def test_constructors_that_differ():
    makes = [Walk, functools.partial(Walk, differs=True), Walk, Walk, functools.partial(Walk, slow=0.0)]
    with ParallelEnv(makes, seed=5, backend="serial") as parallel:
        result = evaluate(parallel, of_dicts(parallel), 3, SEED)
        assert result.env_ids == ((0, 2, 3), (1,), (4,))
        assert result.constructors.tolist() == [0] * 3 + [1] * 3 + [2] * 3
        assert result.seeds == tuple(range(SEED, SEED + 3)) * 3
        first, second, third = map(result.of_constructor, range(3))
        assert first.seeds == second.seeds == tuple(range(SEED, SEED + 3))
        for one in (first, third):
            assert_expected(one, [plain(Walk, SEED + index) for index in range(3)])
        assert (second.team_returns > first.team_returns).all()
        assert second.rows() == result.rows()[3:6]
        with pytest.raises(ValueError, match="number must be from 0 to 2, got 3"):
            result.of_constructor(3)


def test_equal_constructors_that_are_different_objects(build, backend_setup):
    parallel = build([functools.partial(Walk, slow=0.0) for _ in range(3)], backend_setup)
    assert evaluate(parallel, of_dicts(parallel), 2).env_ids == ((0, 1, 2),)


def test_constructors_that_cannot_be_pickled_are_equal_if_they_are_one():
    lock = threading.Lock()
    make = functools.partial(lambda _: Walk(), lock)
    with ParallelEnv([make, make, functools.partial(lambda _: Walk(), lock)], backend="serial") as parallel:
        assert evaluate(parallel, of_dicts(parallel), 2).env_ids == ((0, 1), (2,))


def test_options_of_resets_that_differ():
    with ParallelEnv([Walk] * 3, backend="serial") as parallel:
        parallel.set_reset_options({"level": 2}, env_ids=[1])
        assert evaluate(parallel, of_dicts(parallel), 2).env_ids == ((0, 2), (1,))


# -- restarts, and episodes that do not end ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_episodes_with_restarts_are_played_again(mode, step, num_envs):
    """Each environment fails once in these episodes."""
    make = functools.partial(Walk, fails={SEED: step, SEED + 3: step}, until=1)
    with ParallelEnv([make] * num_envs, mode, backend="serial", **NO_LIMIT) as parallel:
        policy = of_dicts(parallel)
        result = evaluate(parallel, policy, EPISODES, SEED)
        assert_expected(result, expected("walk"))
        assert result.repeats is True
        # One environment fails once, so only in the first one; three may fail in both, and again in another one.
        assert 1 <= result.retries[0] <= 2
        assert not result.retries[[1, 2, 4]].any()
        assert result.retries.sum() <= parallel.stats().restarts <= num_envs
        assert result.retries[3] == 0 if num_envs == 1 else result.retries[3] <= 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("retries", "step"), [(0, 1), (2, 2), (2, 0), (1, 0)])
def test_episodes_that_fail_in_each_try_are_left_out(mode, retries, step):
    make = functools.partial(Walk, fails={SEED: step, SEED + 2: step})
    with StackedVecEnv(ParallelEnv([make] * 2, mode, backend="serial", **NO_LIMIT)) as env:
        result = evaluate(env, of_rows(env), EPISODES, SEED, retries=retries, infos={"place": ()})
    failed = [index in (0, 2) for index in range(EPISODES)]
    assert result.failed.tolist() == failed
    assert result.finished.tolist() == [not one for one in failed]
    assert not result.unfinished.any()
    assert result.retries.tolist() == [retries if one else 0 for one in failed]
    assert np.isnan(result.team_returns[failed]).all()
    assert np.isnan(result.returns["a"][failed]).all()
    assert result.informed["place"]["a"].tolist() == result.finished.tolist()
    others = [plain(Walk, SEED + index) for index in range(EPISODES) if not failed[index]]
    assert result.mean == pytest.approx(np.mean([sum(returns.values()) for returns, _ in others]))
    assert result.repeats is None  # the first episode is not known


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_dies_interrupts_all_of_its_episodes(build, killable_setup, mode):
    make = functools.partial(Walk, dies={SEED: 1}, until=1)
    parallel = build([make] * 4, killable_setup, mode, **NO_LIMIT)
    result = evaluate(parallel, of_dicts(parallel), EPISODES, SEED)
    assert_expected(result, expected("walk"))
    assert result.retries[:4].sum() >= 1


def test_without_restarts_a_fault_is_raised():
    make = functools.partial(Walk, fails={SEED + 1: 1})
    with (
        ParallelEnv([make] * 2, backend="serial") as parallel,
        pytest.raises(EnvError, match="on the way") as raised,
    ):
        evaluate(parallel, of_dicts(parallel), EPISODES, SEED)
    assert isinstance(raised.value.original, WalkFailed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("facade", ["stacked", None])
def test_episodes_with_too_many_steps_are_unfinished(mode, facade):
    with ParallelEnv([Walk] * 2, mode, backend="serial") as parallel:
        env: Any = parallel if facade is None else StackedVecEnv(parallel)
        policy = of_dicts(parallel) if facade is None else of_rows(env)
        result = evaluate(env, policy, EPISODES, SEED, max_steps=LONG - 1)
        exact = evaluate(env, policy, EPISODES, SEED, max_steps=LONG)
    lengths = [length for _, length in expected("walk")]
    assert {*lengths} == {SHORT, LONG}
    assert result.unfinished.tolist() == [length == LONG for length in lengths]
    assert result.finished.tolist() == [length == SHORT for length in lengths]
    assert result.lengths.tolist() == [min(length, LONG - 1) for length in lengths]
    assert np.isnan(result.team_returns[result.unfinished]).all()
    short = [sum(returns.values()) for returns, length in expected("walk") if length == SHORT]
    assert result.mean == pytest.approx(np.mean(short))
    assert result.repeats is True
    assert_expected(exact, expected("walk"))


# -- infos, statistics, videos, progress -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("facade", ["stacked", None])
def test_the_last_values_of_infos(mode, facade):
    infos = {"battle_won": Extra(dtype=np.bool_, per_agent=False), "place": Extra(dtype=np.int64), "none": ()}
    with ParallelEnv([Walk] * 2, mode, backend="serial") as parallel:
        env: Any = parallel if facade is None else StackedVecEnv(parallel)
        policy = of_dicts(parallel) if facade is None else of_rows(env)
        result = evaluate(env, policy, EPISODES, SEED, infos=infos)
        with pytest.raises(ValueError, match=r"environment 0, agent 'a', seed 11: the info 'place' must be numbers"):
            evaluate(env, policy, EPISODES, SEED, infos={"place": (2,)})
    lengths = [length for _, length in expected("walk")]
    assert result.infos["place"]["a"].tolist() == lengths
    assert result.infos["place"]["b"].tolist() == [length // 2 for length in lengths]
    assert result.informed["battle_won"].all()
    assert result.infos["battle_won"].dtype == np.bool_
    assert {*result.infos["battle_won"].tolist()} == {False, True}
    assert not result.informed["none"]["a"].any()
    row = result.rows()[0]
    assert (row["place/b"], row["battle_won"], row["none/a"]) == (
        lengths[0] // 2,
        *result.infos["battle_won"][:1],
        None,
    )
    assert row["return/a"] == result.returns["a"][0]
    assert (row["seed"], row["length"], row["return"]) == (SEED, lengths[0], result.team_returns[0])


def result_of(values: list[float], finished: list[bool] | None = None) -> EvaluationResult:
    n = len(values)
    zeros, mask = np.zeros(n, np.int64), np.array([True] * n if finished is None else finished)
    return EvaluationResult(
        tuple(range(n)), np.array(values), {}, zeros, {}, {}, zeros, mask, np.zeros(n, np.bool_), zeros, ((0,),), True
    )


def test_statistics():
    rng = np.random.default_rng(3)
    values = rng.exponential(10.0, 103)
    result = result_of([*values, 1e9], [True] * 103 + [False])
    ordered = sorted(values)
    assert result.mean == pytest.approx(sum(values) / 103)
    assert result.std == pytest.approx(np.sqrt(sum((value - sum(values) / 103) ** 2 for value in values) / 103))
    assert result.interquartile_mean == pytest.approx(sum(ordered[25:78]) / 53)  # scipy.stats.trim_mean(values, 0.25)
    low, high = result.interval
    error = result.std / np.sqrt(103)
    assert low == pytest.approx(result.mean - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(result.mean + 1.96 * error, abs=0.3 * error)
    assert result.interval == result_of([*values]).interval  # the seed is fixed
    assert "104 episodes, 1 unfinished, mean" in repr(result)


def test_the_interval_contains_the_true_mean_in_about_95_of_100_evaluations():
    rng = np.random.default_rng(4)
    intervals = [result_of([*rng.normal(size=60)]).interval for _ in range(200)]
    assert 0.9 <= np.mean([low <= 0.0 <= high for low, high in intervals]) <= 0.98


def test_statistics_without_finished_episodes():
    result = result_of([1.0, 2.0], [False, False])
    assert np.isnan([result.mean, result.std, result.interquartile_mean, *result.interval]).all()
    one = result_of([3.0])
    assert (one.mean, one.std, one.interquartile_mean, one.interval) == (3.0, 0.0, 3.0, (3.0, 3.0))


def test_vector_rewards():
    with ParallelEnv([functools.partial(Walk, vectors=True)] * 2, backend="serial") as parallel:
        result = evaluate(parallel, of_dicts(parallel), EPISODES, SEED)
        env = StackedVecEnv(parallel)
        assert np.array_equal(evaluate(env, of_rows(env), EPISODES, SEED).team_returns, result.team_returns)
    expected_first = [sum(returns.values()) for returns, _ in expected("walk")]
    assert result.team_returns[:, 0] == pytest.approx(expected_first)
    assert result.team_returns[:, 1].tolist() == [length + length // 2 for _, length in expected("walk")]
    assert result.mean.shape == result.interval[0].shape == (2,)
    assert result.rows()[0]["return"] == result.team_returns[0].tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_video_of_the_first_episode(mode, tmp_path):
    """Also after a restart, whose frames are dropped."""
    make = functools.partial(Walk, fails={SEED: 1}, until=1)
    with ParallelEnv([make] * 2, mode, backend="serial", **NO_LIMIT) as parallel:
        result = evaluate(parallel, of_dicts(parallel), 3, SEED, video=tmp_path / "first.gif")
        assert result.retries[0] >= 1
        seen = (iio.imread(tmp_path / "first.gif")[:, 0, 0, 0] / 20).round().tolist()
        last = result.lengths[0] - (mode == "SAME_STEP")  # its last frame is the next episode's
        assert seen == [*range(last + 1)]
        (tmp_path / "first.gif").unlink()
        with pytest.raises(ZeroDivisionError):
            evaluate(parallel, lambda _: 1 // 0, 3, SEED, video=tmp_path / "first.gif")
        assert not [*tmp_path.iterdir()]


def test_progress():
    calls: list[tuple[int, int]] = []
    with ParallelEnv([Walk] * 3, backend="serial") as parallel:
        evaluate(parallel, of_dicts(parallel), 5, progress=lambda *numbers: calls.append(numbers))
    assert calls == [(done, 5) for done in range(1, 6)]


def test_policies_of_rollouts_may_return_extras():
    with StackedVecEnv(ParallelEnv([Walk] * 2, backend="serial")) as env:
        policy = of_rows(env)
        result = evaluate(env, lambda current: (policy(current), {"log_probs": np.zeros((2, 2))}), EPISODES, SEED)
        assert_expected(result, expected("walk"))


def test_action_masks():
    with StackedVecEnv(ParallelEnv([connect_four_v3.env] * 2, backend="serial")) as env:
        masks: list[Any] = []

        def policy(current: Any) -> Any:
            masks.append(current.action_masks)
            return current.action_masks.argmax(axis=-1)

        assert evaluate(env, policy, 2, action_masks=True).finished.all()
        assert masks[0].shape == (2, 2, 7)
        evaluate(env, lambda current: masks.append(current.action_masks) or np.zeros((2, 2), np.int64), 2, max_steps=1)
        assert masks[-1] is None


def test_simulators_that_are_seeded_when_they_are_made(recwarn):
    """Their `reset` gets no seeds, and no warning says that these are ignored."""
    with StackedVecEnv(ParallelEnv([Skirmish] * 2, False, seed="own", backend="serial")) as env:
        result = evaluate(env, lambda current: current.action_masks.argmax(axis=-1), 3, action_masks=True)
    assert result.finished.all()
    assert not [one for one in recwarn.list if "ignored" in str(one.message)]


# -- native simulators -------------------------------------------------------------------------------------------------


class SeededArena(Arena):
    """Places depend on the seeds."""

    reseeds = True

    def reseed(self, seeds: Any) -> None:
        self.seeds = [*seeds]

    def reset(self, env_ids: Any) -> None:
        super().reset(env_ids)
        self._at[env_ids] = np.array(self.seeds, np.float32)[env_ids, None]


def test_native_simulators_begin_episodes_together():
    with ParallelEnv.from_native(SeededArena(3)) as parallel:
        seeds: list[Any] = []

        def policy(observations: Any) -> Any:
            seeds.append([float(seen["tank_0"][0]) for seen in observations])
            idle = {"go": 1, "look": np.zeros(2, np.float32)}
            return [{"tank_0": 0, "scout": idle, "tank_1": 2} for _ in observations]

        with pytest.warns(UserWarning, match="in environments 0 and 1 .* observations differ"):  # the scout's place
            result = evaluate(parallel, policy, 5, 20)
    assert seeds[0] == [20, 21, 22]
    assert result.lengths.tolist() == [3] * 5
    assert result.team_returns.tolist() == [9.0] * 5
    assert result.finished.all()


def test_native_simulators_without_seeds():
    with ParallelEnv.from_native(Arena(3)) as parallel, pytest.raises(ValueError, match="seeded only once"):
        evaluate(parallel, lambda _: [], 5)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


class Untouched(Walk):
    """May not be reset or stepped."""

    def reset(self, **_: Any) -> Any:
        raise AssertionError("reset")


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"policy": None}, TypeError, "policy must be a function"),
        ({"episodes": 0}, ValueError, "episodes must be at least 1, got 0"),
        ({"episodes": 2.5}, TypeError, "episodes must be an integer or None"),
        ({"seed": -1}, ValueError, "seed must not be negative"),
        ({"seed": None}, TypeError, "seed must be an integer, got None"),
        ({"seeds": 3}, TypeError, "seeds must be a sequence of integers"),
        ({"seeds": []}, ValueError, "seeds must have at least one seed, got 0"),
        ({"seeds": [1, None]}, TypeError, "each of seeds must be an integer"),
        ({"seeds": [1, 2], "episodes": 3}, ValueError, "seeds must have 3 seeds, one for each of episodes, got 2"),
        ({"retries": -1}, ValueError, "retries must not be negative"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1, got 0"),
        ({"infos": {"won": 1}}, TypeError, r"infos\['won'\] must be a shape or an Extra"),
        ({"progress": 3}, TypeError, "progress must be a function"),
        ({"video": "walk.avi"}, ValueError, r"path must end in \.gif or \.mp4"),
        ({"background": True}, TypeError, "background=True needs snapshot="),
        ({"background": True, "policy": None}, TypeError, "background=True needs snapshot="),
        ({"snapshot": print}, TypeError, "snapshot= is for background=True"),
        ({"background": True, "policy": None, "snapshot": int}, TypeError, "policy must be a function"),
    ],
)
@pytest.mark.parametrize("facade", ["stacked", None])
def test_wrong_arguments(facade, keywords, error, text):
    with ParallelEnv([Untouched] * 2, backend="serial") as parallel:
        env: Any = parallel if facade is None else StackedVecEnv(parallel)
        with pytest.raises(error, match=text):
            evaluate(env, **{"policy": lambda _: None, **keywords})


def test_wrong_environments():
    with pytest.raises(TypeError, match="takes a StackedVecEnv or a ParallelEnv, got int"):
        evaluate(3, print)  # type: ignore[call-overload]
    with ParallelEnv([Walk] * 2, backend="serial") as parallel:
        with pytest.raises(TypeError, match="action_masks=True is for a StackedVecEnv"):
            evaluate(parallel, print, action_masks=True)
        with pytest.raises(ValueError, match="a list with a dict of actions for each of 2 environments, got "):
            evaluate(parallel, lambda observations: observations[:1])
        parallel.reset()
        parallel.send([{"a": 0, "b": 0}] * 2)
        with pytest.raises(AlreadyPendingCallError, match=r"evaluate\(\) was called while environments"):
            evaluate(parallel, print)
    with pytest.raises(ClosedEnvironmentError):
        evaluate(parallel, print)


def test_environments_of_a_rollout():
    with StackedVecEnv(ParallelEnv([Walk] * 2, backend="serial")) as env:
        rollout = Rollout(env, 5)
        for one in (env, env.parallel_env):
            with pytest.raises(RuntimeError, match="a Rollout steps these environments"):
                evaluate(one, of_rows(env), 2)
        before = rollout.collect(of_rows(env)).observations.copy()
        del rollout
        assert evaluate(env, of_rows(env), 2).finished.all()
        again = Rollout(env, 5)
        assert again.reset(seed=42).rngs is None
        assert np.array_equal(again.collect(of_rows(env)).observations, before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("facade", ["stacked", None])
@pytest.mark.parametrize("call", ["step", "reset"])
def test_environments_that_something_else_steps(parallel, facade, call, mode):
    several = parallel(Walk, 2, mode)
    env: Any = several if facade is None else StackedVecEnv(several)
    own = of_dicts(several) if facade is None else of_rows(env)
    calls: list[Any] = []

    def policy(seen: Any) -> Any:
        actions = own(seen)
        calls.append(actions)
        if len(calls) == 2:
            env.reset() if call == "reset" else env.step(actions)
        return actions

    with pytest.raises(
        RuntimeError, match=r"environment \d was stepped or reset by something else during the evaluation, after"
    ):
        evaluate(env, policy, EPISODES, SEED)


# -- in the background -------------------------------------------------------------------------------------------------


def test_in_the_background(build, backend_setup):
    threads: list[Any] = []
    with StackedVecEnv(build([Walk] * 2, backend_setup, False)) as env:
        policy = of_rows(env)

        def snapshot() -> Any:
            threads.append(threading.current_thread())
            return lambda current: threads.append(threading.current_thread()) or policy(current)

        future = evaluate(env, None, EPISODES, SEED, background=True, snapshot=snapshot)
        assert threads[0] is threading.current_thread()
        assert isinstance(future, concurrent.futures.Future)
        assert_expected(future.result(60), expected("walk"))
        assert future.done()
        assert not future.cancelled()
        assert threading.current_thread() not in threads[1:]
        assert_expected(evaluate(env, policy, EPISODES, SEED), expected("walk"))  # it is free again


def test_a_policy_that_fails_in_the_background(caplog):
    with ParallelEnv([Walk] * 2, backend="serial") as parallel:
        with caplog.at_level(logging.WARNING, "marl_parallel"):
            future = evaluate(parallel, background=True, snapshot=lambda: lambda _: [][0])
            with pytest.raises(IndexError):
                future.result(60)
        assert "an evaluation in the background failed: IndexError" in caplog.text
        assert evaluate(parallel, of_dicts(parallel), 2).finished.all()


def test_a_snapshot_that_fails_raises_at_once():
    with ParallelEnv([Untouched] * 2, backend="serial") as parallel, pytest.raises(ZeroDivisionError):
        evaluate(parallel, background=True, snapshot=lambda: 1 // 0)


def test_an_evaluation_in_the_background_can_be_cancelled():
    """And its environment is in use until then."""
    goes_on, stepped = threading.Event(), threading.Event()
    with ParallelEnv([Walk] * 2, backend="serial") as parallel:
        policy = of_dicts(parallel)

        def waits(observations: Any) -> Any:
            stepped.set()
            assert goes_on.wait(60)
            return policy(observations)

        future = evaluate(parallel, background=True, snapshot=lambda: waits)
        assert stepped.wait(60)
        for background in ({}, {"background": True, "snapshot": lambda: policy}):
            with pytest.raises(RuntimeError, match="another evaluation steps these environments"):
                evaluate(parallel, None if background else policy, **background)
        env = StackedVecEnv(parallel)
        with pytest.raises(RuntimeError, match="an evaluation steps these environments"):
            Rollout(env, 5)
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(60)
        threading.Timer(0.2, goes_on.set).start()
        assert_expected(evaluate(parallel, policy, EPISODES, SEED), expected("walk"))  # waits for the present step
        assert future.cancelled()
        assert not [one for one in threading.enumerate() if one.name == "marl_parallel evaluation"]
