"""`ParallelEnv` over JaxMARL equals loops over single environments of JaxMARL, with the documented keys of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxmarl
import numpy as np
import pytest

from marl_parallel import ParallelEnv, Rollout, make
from marl_parallel.vector import PettingZooVecEnv, StackedVecEnv

NUM_ENVS, SEED = 3, 7
TASKS: dict[str, dict[str, Any]] = {
    "MPE_simple_spread_v3": {"max_steps": 6},
    "MPE_simple_speaker_listener_v4": {"max_steps": 5, "action_type": "Continuous"},  # two groups
    "switch_riddle": {},  # several discrete observations
    "coin_game": {"num_inner_steps": 4, "num_outer_steps": 2},  # with infos; agents "0" and "1"
}

pytestmark = [pytest.mark.needs("jaxmarl", "jax"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` over JaxMARL."""
    made: list[ParallelEnv] = []

    def new(task: str = "MPE_simple_spread_v3", num_envs: int = NUM_ENVS, **arguments: Any) -> ParallelEnv:
        made.append(make(f"jaxmarl:{task}", num_envs, {**TASKS.get(task, {}), **arguments}, seed=SEED))
        return made[-1]

    yield new
    for env in made:
        env.close()


class Expected:
    """One environment of JaxMARL, which begins a new episode in the step after an end."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.over, self.state = env, False, None
        self.key = jax.random.PRNGKey(seed)

    def reset(self) -> tuple[Any, ...]:
        self.key, own = jax.random.split(self.key)
        observations, self.state = self.env.reset(own)
        self.over = False
        no = dict.fromkeys([*self.env.agents, "__all__"], False)
        return self._seen(observations), dict.fromkeys(self.env.agents, 0.0), no, None

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        if self.over:
            return self.reset()
        self.key, own = jax.random.split(self.key)
        result = self.env.step_env(own, self.state, {agent: actions[agent] for agent in self.env.agents})
        observations, self.state, rewards, dones, infos = result
        self.over = bool(dones["__all__"])
        flags = {agent: bool(dones[agent]) for agent in [*self.env.agents, "__all__"]}
        paid = {agent: float(np.asarray(rewards[agent]).reshape(())) for agent in self.env.agents}
        return self._seen(observations), paid, flags, jax.tree.map(np.asarray, infos)

    def _seen(self, observations: Any) -> dict[str, Any]:
        return {agent: np.asarray(observations[agent]) for agent in self.env.agents}


def assert_equal(ours: tuple[dict[str, Any], ...], expected: tuple[Any, ...]) -> None:
    """Equal up to the order in which compiled code adds floats."""
    seen, paid, terminateds, truncateds, infos = ours
    assert seen.keys() == expected[0].keys()
    for agent, values in seen.items():
        np.testing.assert_allclose(values, expected[0][agent], 1e-4, 1e-5)
        assert paid[agent] == pytest.approx(expected[1][agent], 1e-4, 1e-4)
    assert terminateds == expected[2]
    assert truncateds == dict.fromkeys(terminateds, False)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, 1e-4, 1e-5),
        infos.get("__common__"),
        expected[3] or None,
    )


@pytest.mark.parametrize("task", TASKS)
def test_dicts(task, make_pool):
    """Whole and partial steps and resets."""
    env, bare = make_pool(task), jaxmarl.make(task, **TASKS[task])
    step, reset = jax.jit(bare.step_env), jax.jit(bare.reset)
    bare.step_env, bare.reset = step, reset
    games = [Expected(bare, SEED + env_id) for env_id in range(NUM_ENVS)]
    observations, infos = env.reset()
    for seen, game in zip(observations, games):
        np.testing.assert_equal(seen, game.reset()[0])
    assert infos == tuple({agent: {} for agent in env.possible_agents} for _ in games)
    ends = 0
    for moment in range(22):
        ids = [*range(NUM_ENVS)] if moment % 4 else [2, 0]
        if moment == 9:
            seen, _ = env.reset(env_ids=[1])
            for agent, values in games[1].reset()[0].items():
                np.testing.assert_allclose(seen[0][agent], values, 1e-5)
        given = env.sample_actions(ids)
        given = [
            {agent: of_env.get(agent, env.action_space[agent].sample()) for agent in env.possible_agents}
            for of_env in given
        ]
        results = env.step(given, ids)
        for ours, env_id, actions in zip(zip(*results), ids, given):
            assert_equal(ours, games[env_id].step(actions))
        for agent, seen in results[0][0].items():
            assert env.observation_space[agent].contains(seen if np.ndim(seen) else int(seen))
        for env_id, game in enumerate(games):
            assert env.acting[env_id] == ([] if game.over else env.possible_agents)
        ends += sum(game.over for game in games)
    assert ends or task == "switch_riddle"


def test_arrays(make_pool):
    """All environments equal the single ones, through `StackedVecEnv`, its tensors and a rollout."""
    bare = jaxmarl.make("MPE_simple_spread_v3", max_steps=6)
    bare.step_env, bare.reset = jax.jit(bare.step_env), jax.jit(bare.reset)
    games = [Expected(bare, SEED + env_id) for env_id in range(NUM_ENVS)]
    vec = StackedVecEnv(make_pool())
    rollout = Rollout(vec, 16)
    rollout.reset()
    rng = np.random.default_rng(0)
    expected = [[game.reset() for game in games]]
    for _ in range(16):
        actions = rng.integers(5, size=(NUM_ENVS, 3))
        rollout.step(actions)
        expected.append([game.step(dict(zip(vec.agents, of_env))) for game, of_env in zip(games, actions)])
    data = rollout.arrays
    for time in range(17):
        for env_id in range(NUM_ENVS):
            seen, paid, flags, _ = expected[time][env_id]
            np.testing.assert_allclose(data.observations[time, env_id], np.stack([*seen.values()]), 1e-4, 1e-5)
            if time:
                np.testing.assert_allclose(data.rewards[time - 1, env_id], [*paid.values()], 1e-4, 1e-4)
                assert data.done[time - 1, env_id] == data.terminated[time - 1, env_id] == flags["__all__"]
    over = data.done
    assert over.sum() == 2 * NUM_ENVS
    following = data.observations[1:][over]
    np.testing.assert_array_equal(data.final_observations[over], following)
    assert vec.step(np.zeros((NUM_ENVS, 3), int))[0].flags.writeable


def test_masks_and_extra_observations(make_pool):
    """SMAX: masks of what a unit can do; dead units do not act; the state of the world is in the infos."""
    env = make_pool("SMAX", num_envs=2)
    vec = StackedVecEnv(make_pool("SMAX", num_envs=2))
    _, infos = env.reset()
    vec.reset()
    assert (
        infos[0]["__common__"]["world_state"].shape
        == jaxmarl.make("SMAX").reset(jax.random.PRNGKey(0))[0]["world_state"].shape
    )
    bare = jaxmarl.make("SMAX")
    states = []
    for seed in (SEED, SEED + 1):
        key, own = jax.random.split(jax.random.PRNGKey(seed))
        states.append([key, jax.jit(bare.reset)(own)[1]])
    step = jax.jit(bare.step_env)
    for _ in range(10):
        for env_id, (_, state) in enumerate(states):
            masks = bare.get_avail_actions(state)
            for agent, mask in env.action_masks[env_id].items():
                np.testing.assert_array_equal(mask, np.asarray(masks[agent], bool))
            alive = [agent for agent, lives in zip(bare.agents, np.asarray(state.unit_alive)) if lives]
            assert env.acting[env_id] == alive
        actions = env.sample_actions()
        np.testing.assert_array_equal(vec.action_masks[1, 0], env.action_masks[1].get(vec.agents[0], np.ones(10, bool)))
        env.step(actions)
        vec.step(np.array([[of_env.get(agent, 4) for agent in vec.agents] for of_env in actions]))
        for env_id, pair in enumerate(states):
            pair[0], own = jax.random.split(pair[0])
            whole = {agent: actions[env_id].get(agent, 0) for agent in bare.agents}
            pair[1] = step(own, pair[1], whole)[1]


def test_seeds(make_pool):
    env, other = make_pool(), make_pool()
    first, _ = env.reset(seed=20)
    assert env.seed() == (20, 21, 22)
    second, _ = other.reset(seed=[22, 20, 5])
    np.testing.assert_equal(second[1], first[0])
    np.testing.assert_equal(second[0], first[2])
    env.step(env.sample_actions())
    np.testing.assert_equal(env.reset(seed=20)[0], first)
    assert not np.array_equal(env.reset()[0][0]["agent_0"], first[0]["agent_0"])


def test_asynchronous_steps(make_pool):
    env, other = make_pool(), make_pool()
    for each in (env, other):
        each.reset()
    actions = env.sample_actions()
    env.send([actions[2], actions[0]], [2, 0])
    batch = env.recv()
    assert batch.env_ids == (2, 0)
    expected = other.step([actions[0], actions[2]], [0, 2])
    np.testing.assert_equal(batch.observations, expected[0][::-1])


def test_groups(make_pool):
    vec = PettingZooVecEnv(make_pool("MPE_simple_speaker_listener_v4"))
    seen, _ = vec.reset()
    assert (seen["speaker_0"].shape, seen["listener_0"].shape) == ((NUM_ENVS, 3), (NUM_ENVS, 11))


def test_names():
    with pytest.raises(
        ValueError, match=r"JaxMARL has no environment 'MPE_simple_spread'; similar names are MPE_simple_spread_v3"
    ):
        make("jaxmarl:MPE_simple_spread")
    with pytest.raises(TypeError, match=r"jaxmarl:SMAX steps its environments by itself, .* only seed, not 'backend'"):
        make("jaxmarl:SMAX", backend="serial")
    env = make("jaxmarl:MPE_simple_spread_v3", 2, {"num_agents": 2, "num_landmarks": 2}, facade="stacked")
    assert env.agents == ["agent_0", "agent_1"]
    env.close()
