"""`TianshouVecEnv` with one agent after the other: the data of Tianshou's own `PettingZooEnv`, and its algorithms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3
from simulators.turn_deaths import Elimination, SplitMasks, TwoSizes, fragile
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, Reinforce
from tianshou.algorithm.multiagent.marl import MultiAgentOffPolicyAlgorithm, MultiAgentOnPolicyAlgorithm
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.algorithm.random import MARLRandomDiscreteMaskedOffPolicyAlgorithm
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, PettingZooEnv
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step

from marl_parallel import ParallelEnv, make
from marl_parallel.vector import TianshouVecEnv

pytestmark = pytest.mark.needs("tianshou")

ENVS = 3
MASKED = functools.partial(Elimination, masked=True)
GAMES: dict[str, Callable[..., Any]] = {
    "tictactoe": tictactoe_v3.env,
    "connect four": connect_four_v3.env,
    "simultaneous": functools.partial(rps_v2.env, max_cycles=4),  # one agent after the other, without masks
    "dead first": Elimination,
    "dead in order": functools.partial(Elimination, dead_first=False),
    "masked": MASKED,
    "continuous": functools.partial(Elimination, continuous=True),
}
HOW: list[dict[str, Any]] = [{"num_workers": 2}, {"backend": "serial"}, {"num_workers": 1, "shared_memory": False}]


def wrapped(game: Callable[..., Any]) -> PettingZooEnv:
    return PettingZooEnv(game())


def plain(game: Callable[..., Any]) -> DummyVectorEnv:
    return DummyVectorEnv([functools.partial(wrapped, game)] * ENVS)


def facade(game: Callable[..., Any], **keywords: Any) -> TianshouVecEnv:
    return make(game, ENVS, facade="tianshou", adapter="tianshou", seed="own", **keywords)


def same(got: Any, expected: Any) -> bool:
    """Whether two trees have the same keys and values, and arrays the same dtypes."""
    if isinstance(expected, dict):
        return isinstance(got, dict) and [*got] == [*expected] and all(same(got[key], expected[key]) for key in got)
    if isinstance(expected, np.ndarray) and expected.dtype == object:
        return got.dtype == object and got.shape == expected.shape and all(map(same, got, expected))
    if isinstance(expected, np.ndarray):
        return bool(got.dtype == expected.dtype and np.array_equal(got, expected))
    return bool(got == expected)


def assert_same_results(got: Any, expected: Any) -> None:
    """All but the dtype of rewards, which Tianshou takes from each step: its buffers turn them into floats, too."""
    if len(expected) == 5:
        expected = (expected[0], expected[1].astype(np.float64), *expected[2:])
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert same(one, other), (index, one, other)


def chosen(rng: np.random.Generator, observations: Any, space: Any, *, legal: bool) -> Any:
    if isinstance(space, spaces.Box):
        return np.stack([rng.uniform(0, 3, 1).astype(np.float32) for _ in observations])
    masks = [np.flatnonzero(seen["mask"]) if legal and any(seen["mask"]) else space.n for seen in observations]
    return np.array([rng.choice(mask) for mask in masks])


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", GAMES)
def test_same_data_as_tianshous_environments(name, how):
    """Over several episodes, with illegal actions at times, all environments or some."""
    env, expected = facade(GAMES[name], **how), plain(GAMES[name])
    space = env.action_space[0]
    assert env.action_space == expected.action_space
    assert env.observation_space == expected.observation_space
    assert env.agents == expected.get_env_attr("agents", 0)[0]
    assert env.agent_idx == expected.get_env_attr("agent_idx", 0)[0]
    assert env.seed(3) == [[3], [4], [5]]
    expected.seed(3)
    results, others = env.reset(), expected.reset()
    assert_same_results(results, others)
    rng, latest, ended = np.random.default_rng(1), [*others[0]], 0
    for time in range(60):
        ids = [*range(ENVS)] if time % 3 else [2, 0]
        actions = chosen(rng, [latest[one] for one in ids], space, legal=time % 10 != 9)
        results, others = env.step(actions, ids), expected.step(actions, ids)
        assert_same_results(results, others)
        over = [one for one, flags in zip(ids, zip(*others[2:4])) if any(flags)]
        for one, seen in zip(ids, others[0]):
            latest[one] = seen
        if over:
            ended += len(over)
            results, others = env.reset(over), expected.reset(over)
            assert_same_results(results, others)
            for one, seen in zip(over, others[0]):
                latest[one] = seen
    assert ended > 3
    env.close()


def test_wrapper_of_tianshou_needs_no_adapter():
    """And nothing is different."""
    env = make(functools.partial(wrapped, Elimination), 2, facade="tianshou", seed=1, backend="serial")
    other = make(Elimination, 2, facade="tianshou", adapter="tianshou", seed=1, backend="serial")
    assert_same_results(env.reset(), other.reset())
    for action in (0, 1, 0):
        assert_same_results(env.step(np.full(2, action)), other.step(np.full(2, action)))
    assert env.get_env_attr("agent_idx") == [{"a": 0, "b": 1, "c": 2}] * 2
    env.close()
    other.close()


@pytest.mark.parametrize("adapter", ["aec", "aec-turn-based"])
def test_wrapper_of_tianshou_with_other_adapters(adapter):
    advice = "leave adapter= out; for everything else, return the environment without this wrapper"
    with pytest.raises(TypeError, match=rf"environment 0: .*PettingZooEnv is Tianshou's wrapper .* {advice}"):
        ParallelEnv([functools.partial(wrapped, Elimination)], backend="serial", adapter=adapter)


def test_derived_wrapper_of_tianshou():
    class Named(PettingZooEnv):
        name = "a game"

    class Shaped(PettingZooEnv):
        def step(self, action: Any) -> Any:
            return super().step(action)

    env = make(lambda: Named(Elimination()), facade="tianshou", backend="serial")
    assert env.get_env_attr("name") == ["a game"]
    env.close()
    with pytest.raises(TypeError, match=r"Shaped overrides `step` of Tianshou's PettingZooEnv, which is not called"):
        make(lambda: Shaped(Elimination()), facade="tianshou", backend="serial")


def test_different_spaces():
    with pytest.raises(ValueError, match=r"equal observation spaces of all agents, but 'a' has Box.* and 'b' has Box"):
        facade(TwoSizes, backend="serial")


class MasksInInfos(Elimination):
    """Action 0 is not allowed."""

    def observe(self, agent: str) -> Any:
        self.infos[agent] = {"action_mask": np.array([0, 1, 1], np.int8)}
        return super().observe(agent)


def test_masks_in_infos():
    """Tianshou's wrapper ignores these."""
    env = facade(MasksInInfos, backend="serial")
    for observations in (env.reset()[0], env.step(np.ones(ENVS, np.int64))[0]):
        assert [seen["mask"] for seen in observations] == [[False, True, True]] * ENVS
    env.close()


def test_restart():
    env = make(fragile, 2, facade="tianshou", adapter="tianshou", num_workers=2, on_error="restart")
    env.reset()
    before = [env.step(np.full(2, action)) for action in (0, 1)][-1][0]
    observations, rewards, terminated, truncated, infos = env.step(np.full(2, 2))
    assert rewards.tolist() == [[0.0, 0.0]] * 2
    assert (terminated.tolist(), truncated.tolist()) == ([False, False], [True, False])
    assert same(observations[0], before[0])
    assert infos[0] == {"restarted": True, "env_id": 0}
    assert [seen["agent_id"] for seen in observations] == ["player_1", "player_2"]
    observations, _ = env.reset(0)
    assert observations[0]["agent_id"] == "player_1"
    assert all(observations[0]["mask"])
    env.close()


@pytest.mark.parametrize("wait_num", [None, 1])
def test_saved_states(wait_num):
    env = make(
        Elimination, 2, facade="tianshou", facade_kwargs={"wait_num": wait_num}, adapter="tianshou", backend="serial"
    )
    env.reset()
    env.step(np.ones(2, np.int64))
    while env.waiting_id:
        env.step(None)
    states = env.save_state()

    def three_steps() -> dict[int, Any]:
        rows: dict[int, Any] = {}
        for _ in range(3):
            for row in zip(*env.step(np.ones(2, np.int64))):
                rows[row[4]["env_id"]] = row
            while env.waiting_id:
                for row in zip(*env.step(None)):
                    rows[row[4]["env_id"]] = row
        return rows

    first = three_steps()
    observations, _ = env.load_state(states)
    assert [seen["agent_id"] for seen in observations] == ["b", "b"]
    assert same(env.reset()[0], observations)
    second = three_steps()
    assert first.keys() == second.keys() == {0, 1}
    for env_id in first:
        assert_same_results(second[env_id], (first[env_id][0], np.asarray(first[env_id][1]), *first[env_id][2:]))
    env.close()


# -- Tianshou's algorithms ---------------------------------------------------------------------------------------------


def dqn(env: Any) -> DQN:
    shape = env.observation_space[0]["observation"].shape
    net = Net(state_shape=shape, action_shape=9, hidden_sizes=[16])
    policy = DiscreteQLearningPolicy(model=net, action_space=env.action_space[0], eps_training=0.1)
    return DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-2), n_step_return_horizon=2, target_update_freq=5)


class Logits(torch.nn.Module):
    """An actor that reads the form of the observations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 3)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        logits = self.net(torch.as_tensor(obs.obs))
        return logits.masked_fill(~torch.as_tensor(obs.mask), -1e9), state


def reinforce(env: Any) -> Reinforce:
    policy = DiscreteActorPolicy(actor=Logits(), action_space=env.action_space[0])
    return Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=1e-2))


def weights(algorithm: Any) -> list[Any]:
    return [value.detach().numpy().copy() for value in algorithm.policy.state_dict().values()]


def trained(env: Any, make_algorithms: Callable[[Any], list[Any]], agents: Any) -> tuple[Any, list[Any], set[str]]:
    """The buffer, the weights of all learners, and the keys of the losses, after a few updates."""
    torch.manual_seed(0)
    np.random.seed(0)
    env.seed(1)
    algorithms = make_algorithms(env)
    before = [weights(one) for one in algorithms]
    algorithm = MultiAgentOffPolicyAlgorithm(algorithms=algorithms, env=agents)
    collector = Collector(algorithm, env, VectorReplayBuffer(600, ENVS), exploration_noise=True)
    collector.reset()
    losses: set[str] = set()
    for _ in range(5):
        collector.collect(n_step=60)
        with policy_within_training_step(algorithm.policy):
            losses |= {*algorithm.update(buffer=collector.buffer, sample_size=32).get_loss_stats_dict()}
    env.close()
    after = [weights(one) for one in algorithms]
    learned = [any((a != b).any() for a, b in zip(*pair)) for pair in zip(before, after)]
    assert learned == [isinstance(one, DQN) for one in algorithms]
    return collector.buffer, after, losses


@pytest.mark.parametrize("in_observations", [False, True])
def test_masks_of_the_parts_of_an_action(in_observations):
    """One list, with the parts one after the other."""
    env = facade(functools.partial(SplitMasks, in_observations=in_observations), num_workers=2)
    observations, _ = env.reset()
    assert observations[0]["mask"] == [True, False, True, True, True]
    observations, *_ = env.step(np.zeros((env.env_num, 2), np.int64))
    assert [one["mask"] for one in observations] == [[True] * 5] * env.env_num
    env.close()


def learner_and_random(env: Any) -> list[Any]:
    return [MARLRandomDiscreteMaskedOffPolicyAlgorithm(action_space=env.action_space[0]), dqn(env)]


def two_learners(env: Any) -> list[Any]:
    return [dqn(env), dqn(env)]


@pytest.mark.parametrize("make_algorithms", [learner_and_random, two_learners])
def test_off_policy_training(make_algorithms):
    """The same buffer and the same weights as with Tianshou's own environments."""
    env = facade(tictactoe_v3.env, num_workers=2)
    buffer, learned, losses = trained(env, make_algorithms, env)
    expected, others, other_losses = trained(plain(tictactoe_v3.env), make_algorithms, wrapped(tictactoe_v3.env))
    assert losses == other_losses != set()
    for name in ("act", "rew", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(buffer, name), getattr(expected, name))
    for name in ("agent_id", "obs", "mask"):
        for one, other in ((buffer.obs, expected.obs), (buffer.obs_next, expected.obs_next)):
            np.testing.assert_array_equal(one[name], other[name])
    assert (buffer.rew != 0).any()
    for one, other in zip(learned, others, strict=True):
        for value, other_value in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, other_value)


def trained_on_policy(env: Any, agents: Any) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    env.seed(1)
    algorithms = [reinforce(env) for _ in range(3)]
    before = [weights(one) for one in algorithms]
    algorithm = MultiAgentOnPolicyAlgorithm(algorithms=algorithms, env=agents)
    collector = Collector(algorithm, env, VectorReplayBuffer(600, ENVS))
    collector.reset()
    for _ in range(3):
        collector.collect(n_step=60)
        with policy_within_training_step(algorithm.policy):
            algorithm.update(buffer=collector.buffer, batch_size=32, repeat=1)
        collector.reset_buffer(keep_statistics=True)
    env.close()
    after = [weights(one) for one in algorithms]
    assert all(any((a != b).any() for a, b in zip(*pair)) for pair in zip(before, after))
    return after


def test_on_policy_training():
    env, expected = facade(MASKED, num_workers=2), plain(MASKED)
    learned, others = trained_on_policy(env, env), trained_on_policy(expected, wrapped(MASKED))
    for one, other in zip(learned, others, strict=True):
        for value, other_value in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, other_value)
