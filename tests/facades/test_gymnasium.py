"""`GymnasiumVectorEnv`: one row per agent of every environment; Gymnasium's wrappers work on it unchanged."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as wrappers
from helpers.batches import all_zero, assert_vector_info, at, same
from mpe2 import simple_spread_v3, simple_tag_v3
from simulators.choices import Chooser
from simulators.variable_agents import ACTION, AGENTS, LENGTH, SPACE, VariableAgents, VariableDictAgents

from marl_parallel import ParallelEnv, make
from marl_parallel.vector import GymnasiumVectorEnv

COPIES = 3
MODES = pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
MAKERS: dict[str, Callable[..., Any]] = {
    "spread": simple_spread_v3.parallel_env,
    "variable": VariableAgents,
    "variable dicts": VariableDictAgents,
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "process": {"num_workers": 2},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


def facade_and_core(make: Callable[..., Any], mode: str, **how: Any) -> tuple[GymnasiumVectorEnv, ParallelEnv]:
    """The facade, and a `ParallelEnv` of the same environments."""
    facade = GymnasiumVectorEnv(ParallelEnv([make] * COPIES, mode, **how))
    return facade, ParallelEnv([make] * COPIES, mode, backend="serial")


class ExpectedRows:
    """The expected rows, computed from the core's dicts."""

    def __init__(self, plain: ParallelEnv, agents: list[str], mode: str) -> None:
        self.plain, self.agents, self.same_step = plain, agents, mode == "SAME_STEP"

    def assert_reset(self, returned: tuple[Any, Any], dicts: tuple[Any, ...]) -> None:
        observations, infos = returned
        for row, (env_id, agent) in enumerate(self.all()):
            self.assert_seen(at(observations, row), dicts[0][env_id], agent)
            self.assert_infos(infos, row, {**dicts[1][env_id].get(agent, {}), **self.common(dicts[1][env_id])})
            self.assert_who(infos, row, env_id, agent, agent in dicts[0][env_id])

    def assert_step(self, returned: tuple[Any, ...], dicts: tuple[Any, ...]) -> None:
        observations, rewards, terminations, truncations, infos = returned
        for row, (env_id, agent) in enumerate(self.all()):
            seen, paid, terminated, truncated, notes = (column[env_id] for column in dicts)
            flags = terminated.get(agent, False), truncated.get(agent, False)
            died, over = any(flags), terminated["__all__"] or truncated["__all__"]
            if over and not died:
                flags = terminated["__all__"], truncated["__all__"]
            self.assert_seen(at(observations, row), seen, agent)
            assert rewards[row] == paid.get(agent, 0.0)
            assert (terminations[row], truncations[row]) == flags
            self.assert_who(infos, row, env_id, agent, agent in seen or agent in paid)
            note, common = dict(notes.get(agent, {})), self.common(notes)
            if self.same_step and (over or died):
                final, reset_info = note.pop("final_obs", None), note.pop("reset_info", {})
                if not over:
                    final = seen.get(agent)
                given = infos["final_obs"][row]
                assert all_zero(given) if final is None else same(given, final)
                assert_vector_info(infos["final_info"], {**note, **common}, row)
                note = reset_info if over else note
            self.assert_infos(infos, row, {**note, **common})
        assert (rewards.dtype, terminations.dtype, truncations.dtype) == (np.float64, np.bool_, np.bool_)

    def all(self) -> list[tuple[int, str]]:
        return [(env_id, agent) for env_id in range(COPIES) for agent in self.agents]

    def common(self, notes: dict[str, Any]) -> dict[str, Any]:
        return {key: note for key, note in notes.items() if key not in self.plain.possible_agents}

    def assert_seen(self, actual: Any, seen: dict[str, Any], agent: str) -> None:
        assert same(actual, seen[agent]) if agent in seen else all_zero(actual)

    def assert_who(self, infos: dict[str, Any], row: int, env_id: int, agent: str, present: bool) -> None:
        assert infos["present"][row] == present
        assert infos["acting"][row] == (agent in self.plain.acting[env_id])

    def assert_infos(self, infos: dict[str, Any], row: int, expected: dict[str, Any]) -> None:
        ours = {"present", "acting", "final_obs", "final_info"}
        returned = {k: v for k, v in infos.items() if k.removeprefix("_") not in ours}
        assert_vector_info(returned, expected, row)


def as_dicts(actions: Any, agents: list[str], acting: tuple[list[str], ...]) -> list[dict[str, Any]]:
    return [
        {agent: at(actions, env_id * len(agents) + agents.index(agent)) for agent in able}
        for env_id, able in enumerate(acting)
    ]


@pytest.mark.parametrize(
    ("how", "name", "mode"),
    [
        *[("serial", name, mode) for name in MAKERS for mode in ("NEXT_STEP", "SAME_STEP")],
        *[("process", "variable", mode) for mode in ("NEXT_STEP", "SAME_STEP")],
        ("pickled", "variable", "SAME_STEP"),
        *[(how, "variable", "DISABLED") for how in ("serial", "process", "pickled")],
    ],
)
def test_rows_equal_the_dicts_of_the_core(how, name, mode):
    facade, plain = facade_and_core(MAKERS[name], mode, **HOWS[how])
    facade.action_space.seed(7)
    rows = ExpectedRows(plain, facade.agents, mode)
    with plain:
        rows.assert_reset(facade.reset(seed=5), plain.reset(seed=5))
        for step in range(3 * LENGTH):
            actions = facade.action_space.sample()
            if step % 3:
                facade.step_async(actions)
                returned = facade.step_wait()
            else:
                returned = facade.step(actions)
            rows.assert_step(returned, plain.step(as_dicts(actions, facade.agents, plain.acting)))
            if step == 2 * LENGTH:
                assert_partial_reset(facade, plain, rows, returned[0])
        facade.close()


def assert_partial_reset(facade: GymnasiumVectorEnv, plain: ParallelEnv, rows: ExpectedRows, before: Any) -> None:
    per_copy = len(facade.agents)
    mask = np.repeat([False, True, False], per_copy)
    options = {"reset_mask": mask}
    observations, infos = facade.reset(seed=77, options=options)
    assert options == {"reset_mask": mask}  # Gymnasium's wrappers look at it afterwards
    seen, notes = plain.reset(seed=[78], env_ids=[1])
    for row, (env_id, agent) in enumerate(rows.all()):
        if env_id == 1:
            rows.assert_seen(at(observations, row), seen[0], agent)
            rows.assert_infos(infos, row, {**notes[0].get(agent, {}), **rows.common(notes[0])})
        else:
            assert same(at(observations, row), at(before, row))
            rows.assert_infos(infos, row, {})


def test_gymnasiums_own_loop_without_automatic_resets():
    """The same code steps Gymnasium's `SyncVectorEnv` and the facade, with the same results."""
    mode = {"autoreset_mode": AutoresetMode.DISABLED}
    theirs: Any = gymnasium.make_vec("CartPole-v1", 4, "sync", vector_kwargs=mode)
    ours = make("CartPole-v1", 4, facade="gymnasium", auto_reset=False, num_workers=2)
    assert (ours.num_envs, ours.action_space) == (theirs.num_envs, theirs.action_space)
    played = []
    for env in (theirs, ours):
        env.action_space.seed(2)
        observations, _ = env.reset(seed=7)
        results = [observations]
        for _ in range(120):
            observations, rewards, terminations, truncations, _ = env.step(env.action_space.sample())
            results += [observations, rewards, terminations, truncations]
            done = np.logical_or(terminations, truncations)
            if done.any():
                observations, _ = env.reset(options={"reset_mask": done})
                results.append(observations)
        played.append(results)
        env.close()
    assert all(map(np.array_equal, *played))
    assert len(played[0]) > 480 + 10


def test_episode_statistics_without_automatic_resets():
    env = wrappers.RecordEpisodeStatistics(spread("DISABLED"))
    env.reset(seed=3)
    for _ in range(2):
        for _ in range(25):
            _, _, _, truncations, infos = env.step(env.action_space.sample())
        assert infos["episode"]["l"].tolist() == [25] * 9
        env.reset(options={"reset_mask": truncations})
    env.close()


# Attributes


@pytest.fixture(params=["NEXT_STEP", "SAME_STEP"])
def env(request):
    made = GymnasiumVectorEnv(ParallelEnv([VariableAgents] * COPIES, request.param, backend="serial"))
    yield made
    made.close()


def test_spaces_and_names(env):
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.num_envs == COPIES * len(AGENTS)
    assert (env.single_observation_space, env.single_action_space) == (SPACE, ACTION)
    assert env.observation_space == batch_space(SPACE, env.num_envs)
    assert env.action_space == batch_space(ACTION, env.num_envs)
    assert env.metadata["autoreset_mode"] is env.parallel_env.metadata["autoreset_mode"]
    assert env.observation_space.contains(env.reset()[0])
    assert env.unwrapped is env


MADE: list[Any] = []


def make_noted() -> Any:
    MADE.append(gymnasium.make("CartPole-v1"))
    return MADE[-1]


def test_envs_are_the_simulators():
    """As `SyncVectorEnv.envs`: the objects that the constructors returned; they are new after a restart."""
    MADE.clear()
    env = GymnasiumVectorEnv(ParallelEnv([make_noted] * COPIES, "NEXT_STEP", backend="serial"))
    assert [id(one) for one in env.envs] == [id(one) for one in MADE]
    env.envs[1].unwrapped.gravity = 2.0
    assert env.get_attr("gravity") == (9.8, 2.0, 9.8)
    twin = gymnasium.vector.SyncVectorEnv([functools.partial(gymnasium.make, "CartPole-v1")] * COPIES)
    assert [type(one) for one in env.envs] == [type(one) for one in twin.envs]
    env.env.restart([0])
    assert [id(one) for one in env.envs] == [id(one) for one in (MADE[3], MADE[1], MADE[2])]
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        _ = env.envs
    several = GymnasiumVectorEnv(ParallelEnv([VariableAgents] * COPIES, backend="serial"))
    assert [type(one) for one in several.envs] == [VariableAgents] * COPIES  # not one for each row


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_envs_of_other_backends(backend):
    env = GymnasiumVectorEnv(ParallelEnv([VariableAgents] * 2, backend=backend, num_workers=1))
    with pytest.raises(
        AttributeError, match=r"envs is available only with backend='serial'.*use get_attr, set_attr or call"
    ):
        _ = env.envs
    assert not hasattr(env, "envs")
    env.close()


def test_observations_are_copied_once():
    """There is no second copy for all rows."""
    env = GymnasiumVectorEnv(ParallelEnv([simple_spread_v3.parallel_env] * COPIES, "NEXT_STEP", num_workers=2))
    observations, _ = env.reset()
    assert observations.base is not None
    assert observations.base.shape == (COPIES, 3, 18)
    env.close()


def test_frames_by_row(env):
    env.reset()
    assert [frame[0, 0, 0] for frame in env.render()] == [0, 0, 0, 10, 10, 10, 20, 20, 20]


def test_seeds_by_row(env):
    env.reset(seed=4)
    rows = env.num_envs // env.parallel_env.num_envs
    assert env.np_random_seed == tuple(np.repeat(env.parallel_env.seed(), rows).tolist())
    assert env.np_random_seed[0] == 4
    env.reset_async(seed=9)
    assert env.np_random_seed[0] in (4, 9)  # it can be read now, too


@pytest.mark.parametrize("seeds", [[4, 9, 2], [4, 4, 4, 9, 9, 9, 2, 2, 2]])
def test_seeds_by_environment_or_row(seeds, env):
    with ParallelEnv([VariableAgents] * COPIES, backend="serial") as plain:
        ExpectedRows(plain, AGENTS, "NEXT_STEP").assert_reset(env.reset(seed=seeds), plain.reset(seed=[4, 9, 2]))


# Gymnasium's wrappers


def spread(mode: str = "NEXT_STEP", **how: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(ParallelEnv([simple_spread_v3.parallel_env] * COPIES, mode, backend="serial", **how))


@MODES
def test_episode_statistics(mode):
    env = wrappers.RecordEpisodeStatistics(spread(mode))
    env.reset(seed=3)
    returns = np.zeros(9)
    for _ in range(25):
        _, rewards, _, truncations, infos = env.step(env.action_space.sample())
        returns += rewards
    assert truncations.all()
    assert infos["episode"]["l"].tolist() == [25] * 9
    assert np.allclose(infos["episode"]["r"], returns)
    env.close()


def test_normalizers_and_other_wrappers():
    env: Any = wrappers.NormalizeReward(wrappers.NormalizeObservation(spread()))
    env = wrappers.DictInfoToList(env)
    env.reset(seed=3)
    seen = []
    for _ in range(60):
        observations, _, _, _, infos = env.step(env.action_space.sample())
        seen.append(observations)
    assert isinstance(infos, list)
    assert len(infos) == 9
    assert infos[0]["present"] == True  # noqa: E712
    assert abs(np.mean(seen)) < 0.3
    env.close()


def test_partial_resets_through_a_wrapper():
    env = wrappers.RecordEpisodeStatistics(spread())
    env.reset(seed=3)
    for _ in range(5):
        env.step(env.action_space.sample())
    env.reset(options={"reset_mask": np.repeat([True, False, False], 3)})
    assert env.episode_lengths.tolist() == [0] * 3 + [5] * 6
    env.close()


# Agents that differ


def test_agents_with_different_spaces_are_named():
    parallel = ParallelEnv([simple_tag_v3.parallel_env] * 2, backend="serial")
    with (
        parallel,
        pytest.raises(ValueError, match=r"space of 'agent_0' is Box.*of 'adversary_0' it is Box.*agents=\[\.\.\.\]"),
    ):
        GymnasiumVectorEnv(parallel)


def test_subset_of_agents_with_default_actions():
    chosen = ["adversary_2", "adversary_0"]
    facade = GymnasiumVectorEnv(ParallelEnv([simple_tag_v3.parallel_env] * 2, backend="serial"), agents=chosen)
    with ParallelEnv([simple_tag_v3.parallel_env] * 2, backend="serial") as plain:
        observations, _ = facade.reset(seed=3)
        seen, _ = plain.reset(seed=3)
        for _ in range(30):
            for row in range(4):
                assert same(observations[row], seen[row // 2][chosen[row % 2]])
            actions = facade.action_space.sample()
            observations, rewards, *_ = facade.step(actions)
            dicts = [
                {
                    **dict.fromkeys(plain.possible_agents, 0),
                    **dict(zip(chosen, actions[2 * i : 2 * i + 2], strict=True)),
                }
                for i in range(2)
            ]
            seen, paid, *_ = plain.step(dicts)
            assert rewards.tolist() == [paid[row // 2][chosen[row % 2]] for row in range(4)]
        facade.close()


@MODES
def test_agents_in_another_order(mode):
    parallel = ParallelEnv([VariableAgents] * COPIES, mode, backend="serial")
    facade = GymnasiumVectorEnv(parallel, agents=[*reversed(AGENTS)])
    rows = ExpectedRows(ParallelEnv([VariableAgents] * COPIES, mode, backend="serial"), facade.agents, mode)
    with rows.plain as plain:
        rows.assert_reset(facade.reset(seed=5), plain.reset(seed=5))
        for _ in range(2 * LENGTH):
            actions = facade.action_space.sample()
            rows.assert_step(facade.step(actions), plain.step(as_dicts(actions, facade.agents, plain.acting)))
        facade.close()


def test_other_agents_act_by_a_policy():
    calls = []

    def others(agent: str, seen: Any) -> Any:
        calls.append((agent, seen.shape))
        return np.full(2, 3)

    parallel = ParallelEnv([simple_tag_v3.parallel_env] * 2, backend="serial")
    env = GymnasiumVectorEnv(parallel, agents=["agent_0"], others=others)
    env.reset(seed=1)
    env.step(env.action_space.sample())
    assert calls == [(f"adversary_{index}", (2, 16)) for index in range(3)]
    env.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_agents_act_at_random(asynchronous):
    """`others` may call methods of the `ParallelEnv`."""
    parallel = ParallelEnv([simple_tag_v3.parallel_env] * 2, seed=3, backend="serial")
    drawn = []

    def others(agent: str, _: Any) -> Any:
        drawn.append([of_env[agent] for of_env in parallel.sample_actions()])
        return np.array(drawn[-1])

    env = GymnasiumVectorEnv(parallel, agents=["agent_0"], others=others)
    env.reset(seed=1)
    with pytest.raises(ValueError, match="2"):
        env.step(np.zeros(7, np.int64))
    assert not drawn  # wrong actions are refused before anybody acts
    plain = ParallelEnv([simple_tag_v3.parallel_env] * 2, seed=3, backend="serial")
    plain.reset(seed=1)
    for _ in range(5):
        actions = env.action_space.sample()
        if asynchronous:
            env.step_async(actions)
            observations = env.step_wait()[0]
        else:
            observations = env.step(actions)[0]
        by_agent = dict(zip(["adversary_0", "adversary_1", "adversary_2"], drawn[-3:]), agent_0=actions)
        expected = plain.step([{agent: of_agent[row] for agent, of_agent in by_agent.items()} for row in range(2)])[0]
        assert np.array_equal(observations, [of_env["agent_0"] for of_env in expected])
    env.close()
    plain.close()


# Wrong use


@pytest.mark.parametrize("agents", [["z"], ["a", "a"], []])
def test_unknown_agents(agents):
    with (
        ParallelEnv([VariableAgents], backend="serial") as parallel,
        pytest.raises(ValueError, match="must be some of"),
    ):
        GymnasiumVectorEnv(parallel, agents=agents)


@pytest.mark.parametrize(
    ("mask", "error", "word"),
    [
        ([True] * 9, TypeError, "numpy array of bool, got list"),
        (np.ones(9), TypeError, "numpy array of bool"),
        (np.ones(3, np.bool_), ValueError, r"shape \(9,\), got \(3,\)"),
        (np.zeros(9, np.bool_), ValueError, "at least one"),
        (np.arange(9) < 4, ValueError, r"for environment 1 it is \[True, False, False\]"),
    ],
)
def test_masks(mask, error, word, env):
    env.reset()
    with pytest.raises(error, match=word):
        env.reset(options={"reset_mask": mask})


@pytest.mark.parametrize("seeds", [[1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
def test_wrong_seeds(seeds, env):
    with pytest.raises(ValueError, match="seeds"):
        env.reset(seed=seeds)


@pytest.mark.parametrize(
    "actions",
    [
        {"move": np.zeros((9, 2), np.float32)},
        {"move": np.zeros((8, 2), np.float32), "jump": np.zeros(8, np.int64)},
        {"move": np.zeros((9, 3), np.float32), "jump": np.zeros(9, np.int64)},
        {"move": np.zeros((9, 2), np.float32), "jump": np.full(9, 0.5)},
        np.zeros(9),
    ],
    ids=["key", "rows", "shape", "dtype", "form"],
)
def test_wrong_actions(actions, env):
    env.reset()
    with pytest.raises(ValueError, match="expected"):
        env.step(actions)
    assert env.get_attr("time") == (0,) * COPIES


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("one", [0, 1.5, None, True, np.int64(0), object()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.Tuple([spaces.Discrete(2)])], ids=str
)
def test_an_action_without_rows(space, one):
    """A `TypeError`, as in Gymnasium's own vector environments, also for a part, and in `step_async`."""
    made = [functools.partial(Chooser, space)] * 2
    env = GymnasiumVectorEnv(ParallelEnv(made, "NEXT_STEP", backend="serial", adapter="gymnasium"))
    env.reset()
    for call in (env.step, env.step_async):
        for actions in (one, (one,)) if isinstance(space, spaces.Tuple) else (one,):
            with pytest.raises(TypeError, match="expected actions for 2 rows, got "):
                call(actions)
    env.step(env.action_space.sample())
    env.close()


def test_others_that_return_one_action():
    env = ParallelEnv([simple_spread_v3.parallel_env], "NEXT_STEP", backend="serial")
    env = GymnasiumVectorEnv(env, ["agent_0"], others=lambda agent, seen: 0)
    env.reset()
    with pytest.raises(TypeError, match=r"others, for agent .*: expected actions for 1 rows, got 0"):
        env.step(env.action_space.sample())
    env.close()


def test_failed_construction_is_collected_silently():
    with pytest.raises(TypeError):
        GymnasiumVectorEnv(VariableAgents())
    gc.collect()


def test_other_agents_without_a_default_action():
    class TextAgents(VariableAgents):
        def action_space(self, agent: str) -> spaces.Space:
            return spaces.Text(3) if agent == "b" else super().action_space(agent)

    env = GymnasiumVectorEnv(ParallelEnv([TextAgents], backend="serial"), agents=["a", "c"])
    env.reset()
    with pytest.raises(ValueError, match="pass others= to act"):
        env.step(env.action_space.sample())
    env.close()
