"""`ParallelEnv` over VMAS equals VMAS alone: same seeds and actions, same results, also where episodes end apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import vmas
from gymnasium import spaces

from marl_parallel import ParallelEnv, Rollout, make
from marl_parallel.sources.vmas import VmasPool
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv

NUM_ENVS, SEED = 4, 7
TASKS: dict[str, dict[str, Any]] = {
    "balance": {"n_agents": 2, "max_steps": 6},  # all episodes end together
    "navigation": {"n_agents": 2, "max_steps": 40},
    "simple_speaker_listener": {"max_steps": 7},  # two groups
    "football": {"n_blue_agents": 2, "n_red_agents": 2, "ai_red_agents": False, "max_steps": 8},
    "dispersion": {"n_agents": 2, "n_food": 2, "continuous_actions": False, "max_steps": 9},
    "transport": {"n_agents": 2, "continuous_actions": False, "multidiscrete_actions": True, "max_steps": 5},
}
"""With continuous, discrete and several discrete actions; with and without infos."""

pytestmark = [pytest.mark.needs("vmas", "torch"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` over VMAS."""
    made: list[ParallelEnv] = []

    def new(task: str, **arguments: Any) -> ParallelEnv:
        made.append(make(f"vmas:{task}", NUM_ENVS, {**TASKS[task], **arguments}, seed=SEED))
        return made[-1]

    yield new
    for env in made:
        env.close()


def bare(task: str) -> Any:
    """VMAS alone. Its generators are the process's: what was recorded before is not disturbed."""
    return vmas.make_env(task, num_envs=NUM_ENVS, seed=SEED, terminated_truncated=True, **TASKS[task])


class Expected:
    """A loop over VMAS alone, which begins new episodes in the step after an end."""

    def __init__(self, task: str) -> None:
        self.env = bare(task)
        self.agents = [agent.name for agent in self.env.agents]
        self.over = [False] * NUM_ENVS

    def reset(self, env_ids: list[int] | None = None) -> list[dict[str, Any]]:
        if env_ids is None or len(env_ids) == NUM_ENVS:
            observations = self.env.reset()
        else:
            for env_id in env_ids:
                observations = self.env.reset_at(env_id)
        for env_id in range(NUM_ENVS) if env_ids is None else env_ids:
            self.over[env_id] = False
        return [self._by_agent(observations, env_id) for env_id in range(NUM_ENVS)]

    def step(self, actions: list[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
        begins = [env_id for env_id in range(NUM_ENVS) if self.over[env_id]]
        dicts: list[Any] = [None] * NUM_ENVS
        no = dict.fromkeys([*self.agents, "__all__"], False)
        if len(begins) < NUM_ENVS:
            columns = [torch.from_numpy(np.stack([of_env[agent] for of_env in actions])) for agent in self.agents]
            seen, paid, terminated, truncated, infos = self.env.step(columns)
            for env_id in range(NUM_ENVS):
                ended, cut = bool(terminated[env_id]), bool(truncated[env_id])
                self.over[env_id] = ended or cut
                dicts[env_id] = (
                    self._by_agent(seen, env_id), {a: float(paid[i][env_id]) for i, a in enumerate(self.agents)},
                    dict.fromkeys([*self.agents, "__all__"], ended), dict.fromkeys([*self.agents, "__all__"], cut),
                    {a: {k: info[env_id].numpy() for k, info in infos[i].items()} for i, a in enumerate(self.agents)},
                )  # fmt: skip
        if begins:
            first = self.reset(begins)
            for env_id in begins:
                dicts[env_id] = first[env_id], dict.fromkeys(self.agents, 0.0), no, no, {a: {} for a in self.agents}
        return dicts

    def _by_agent(self, observations: Any, env_id: int) -> dict[str, Any]:
        return {agent: observations[place][env_id].numpy() for place, agent in enumerate(self.agents)}


def assert_equal(ours: tuple[dict[str, Any], ...], expected: tuple[dict[str, Any], ...]) -> None:
    np.testing.assert_equal(ours[0], expected[0])
    assert ours[1:4] == expected[1:4]
    np.testing.assert_equal(ours[4], expected[4])


@pytest.mark.parametrize("task", TASKS)
def test_dicts(task, make_pool):
    env = make_pool(task)
    first, infos = env.reset()
    assert infos == tuple({agent: {} for agent in env.possible_agents} for _ in range(NUM_ENVS))
    steps, acting = [], []
    for _ in range(25):
        actions = env.sample_actions()
        given = [
            {agent: of_env.get(agent, env.action_space[agent].sample()) for agent in env.possible_agents}
            for of_env in actions
        ]
        steps.append((given, [*zip(*env.step(given))]))
        acting.append(env.acting)
        for agent, seen in steps[-1][1][0][0].items():
            assert env.observation_space[agent].contains(seen)
    expected = Expected(task)
    np.testing.assert_equal([*first], expected.reset())
    ends = 0
    for (given, results), now in zip(steps, acting):
        for env_id, (ours, theirs) in enumerate(zip(results, expected.step(given))):
            assert_equal(ours, theirs)
            assert now[env_id] == ([] if expected.over[env_id] else expected.agents)
        ends += sum(expected.over)
    assert ends or task == "navigation"
    assert env.stats().steps + env.stats().resets == 26 * NUM_ENVS


@pytest.mark.parametrize("task", ["balance", "simple_speaker_listener", "dispersion"])
def test_episodes_that_end_apart(task, make_pool):
    """Partial resets set the environments apart, so that later some end and others do not."""
    env = make_pool(task)
    env.reset()
    steps: list[Any] = []
    for moment in range(30):
        partial = [2, 0] if moment == 3 else None
        if partial:
            seen, infos = env.reset(env_ids=partial)
            assert infos == ({agent: {} for agent in env.possible_agents},) * 2
            steps.append((partial, seen))
        actions = env.sample_actions()
        given = [
            {agent: of_env.get(agent, env.action_space[agent].sample()) for agent in env.possible_agents}
            for of_env in actions
        ]
        steps.append((given, [*zip(*env.step(given))]))
    expected, some = Expected(task), 0
    expected.reset()
    for given, results in steps:
        if isinstance(given[0], int):
            first = expected.reset(given)
            np.testing.assert_equal([*results], [first[env_id] for env_id in given])
            continue
        for ours, theirs in zip(results, expected.step(given)):
            assert_equal(ours, theirs)
        some += 0 < sum(expected.over) < NUM_ENVS
    assert some > 2


def test_arrays_and_tensors(make_pool):
    """`StackedVecEnv` has VMAS's values, and its tensors share the memory of the arrays."""
    task = "balance"
    vec, tensors = StackedVecEnv(make_pool(task)), StackedVecEnv(make_pool(task)).torch()
    recorded = []
    for each in (vec, tensors):
        rng = np.random.default_rng(0)
        each.reset(seed=SEED)
        rows: list[Any] = []
        for _ in range(20):
            actions = rng.uniform(-1, 1, (NUM_ENVS, 2, 2)).astype(np.float32)
            seen, paid, _, truncations, infos = each.step(actions if each is vec else torch.from_numpy(actions))
            rows.append((np.array(seen), np.array(paid), np.array(truncations), np.array(each.done), infos))
        recorded.append(rows)
    assert torch.is_tensor(seen)
    assert seen.numpy().ctypes.data == tensors.stepper.latest.observations[0].ctypes.data
    expected, rng, ends = Expected(task), np.random.default_rng(0), 0
    expected.env.seed(SEED)
    expected.reset()
    for ours, others in zip(*recorded):
        actions = rng.uniform(-1, 1, (NUM_ENVS, 2, 2)).astype(np.float32)
        dicts = expected.step([dict(zip(expected.agents, of_env)) for of_env in actions])
        for observations, rewards, truncations, done, infos in (ours, others):
            for env_id, (seen, paid, _, cut, info) in enumerate(dicts):
                np.testing.assert_array_equal(observations[env_id], np.stack([*seen.values()]))
                assert rewards[env_id].tolist() == [*paid.values()]
                assert truncations[env_id].tolist() == [cut[agent] for agent in expected.agents]
                np.testing.assert_equal(infos.get(env_id, {agent: {} for agent in expected.agents}), info)
            assert done.tolist() == expected.over
        ends += sum(expected.over)
    assert ends >= 2 * NUM_ENVS


def test_facades(make_pool):
    """Two groups by agent, rows of equal agents, and what a rollout stores."""
    vec = PettingZooVecEnv(make_pool("simple_speaker_listener"))
    seen, _ = vec.reset()
    assert (seen["speaker_0"].shape, seen["listener_0"].shape) == ((NUM_ENVS, 3), (NUM_ENVS, 11))
    rows = GymnasiumVectorEnv(make_pool("balance"))
    rows.reset()
    *_, infos = rows.step(rows.action_space.sample())
    assert infos["pos_rew"].shape == (2 * NUM_ENVS,)
    vec = StackedVecEnv(make_pool("balance"))
    rollout = Rollout(vec, 12)
    rollout.reset()
    for _ in range(12):
        rollout.step(np.zeros((NUM_ENVS, 2, 2), np.float32))
    data = rollout.arrays
    assert np.flatnonzero(data.done.all(axis=1)).tolist() == [5]
    np.testing.assert_array_equal(data.final_observations[5], data.observations[6])


def test_seeds(make_pool):
    """One generator draws for all environments: the seed of the first one counts."""
    env = make_pool("balance")
    first, _ = env.reset(seed=3)
    assert env.seed() == (3, 4, 5, 6)
    again, _ = env.reset(seed=[3, 0, 0, 0])
    np.testing.assert_equal(again, first)
    other, _ = env.reset(seed=4)
    assert not np.array_equal(other[0]["agent_0"], first[0]["agent_0"])
    with pytest.raises(ValueError, match="seeded all at once: reset all"):
        env.reset(seed=3, env_ids=[0])


def test_spaces(make_pool):
    assert make_pool("transport").action_space["agent_0"] == spaces.MultiDiscrete([3, 3])
    assert make_pool("dispersion").action_space["agent_0"] == spaces.Discrete(9)
    assert make_pool("balance").action_space["agent_0"] == spaces.Box(-1, 1, (2,), np.float32)


def test_refused_calls(make_pool):
    env = make_pool("balance")
    env.reset()
    actions = [{agent: np.zeros(2, np.float32) for agent in env.possible_agents}] * 2
    with pytest.raises(ValueError, match="step of 2 environments, but VMAS's balance steps all 4 at once; only resets"):
        env.step(actions, env_ids=[0, 1])
    with pytest.raises(ValueError, match="step of 2 environments, but VMAS's balance steps all 4 at once"):
        env.send(actions, env_ids=[0, 1])
    assert env.render() is None
    assert env.get_attr("n_agents") == (2,) * NUM_ENVS
    assert len(env.step(actions * 2)[0]) == NUM_ENVS
    with pytest.raises(ValueError, match="must be made with terminated_truncated=True and dict_spaces=False"):
        VmasPool(vmas.make_env("balance", num_envs=2))


def test_names():
    with pytest.raises(
        ValueError, match=r"VMAS has no scenario 'balanc'; similar scenarios are balance.*It has asym_joint"
    ):
        make("vmas:balanc")
    with pytest.raises(TypeError, match="env_kwargs has 'seed', which this package sets for VMAS"):
        make("vmas:balance", env_kwargs={"seed": 3})
    with pytest.raises(
        TypeError, match=r"vmas:balance steps its environments by itself, .* only seed, not 'num_workers'"
    ):
        make("vmas:balance", num_workers=2)
    with pytest.raises(TypeError, match="vmas:balance steps all its environments at once"):
        make("vmas:balance", wrappers=[lambda env: env])
    env = make("vmas:waterfall", 2, facade="stacked")
    assert isinstance(env, StackedVecEnv)
    env.close()
