"""TorchRL's losses, collectors and policies on a `TorchRLEnv`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.error import ClosedEnvironmentError
from helpers.episodes import ENVS, SEED, PlainLoop, ended
from simulators.dying_agents import DyingAgents
from simulators.stackable import StackableAgents, spread
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ValueEstimators
from torchrl.objectives.value.functional import generalized_advantage_estimate

from marl_parallel import ParallelEnv
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")


@pytest.fixture
def variable_rollout(parallel):
    torch.manual_seed(3)
    return TorchRLEnv(parallel(StackableAgents)).rollout(40, break_when_any_done=False)


def test_advantages_do_not_leak(variable_rollout):
    """Values after an agent's death or a reset do not affect earlier advantages."""
    of_group = variable_rollout["next", "cow"]
    generator = torch.Generator().manual_seed(1)
    done, terminated = of_group["done"], of_group["terminated"]
    shape = of_group["reward"].shape

    def advantages(value: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
        following = torch.cat([value[:, 1:], value[:, :1]], 1)
        return generalized_advantage_estimate(0.9, 0.9, value, following, reward, done, terminated, time_dim=1)[0]

    value, reward = torch.rand(shape, generator=generator), of_group["reward"]
    before = advantages(value, reward)
    ends = done.squeeze(-1).nonzero().tolist()
    assert any(not variable_rollout["next", "done"][i, t].item() for i, t, _ in ends)
    assert done[variable_rollout["next", "done"].squeeze(-1)].all()
    for i, t, k in ends:
        if t + 2 >= shape[1]:
            continue
        other_value, other_reward = value.clone(), reward.clone()
        other_value[i, t + 2 :, k] += 10  # a truncated episode continues with the next one's value
        other_reward[i, t + 1 :, k] += 10
        after = advantages(other_value, other_reward)
        assert torch.equal(after[i, : t + 1, k], before[i, : t + 1, k])
        assert not torch.equal(after[i, t + 1 :, k], before[i, t + 1 :, k])


@pytest.mark.parametrize("whole", [True, False])
def test_finished_episodes(whole):
    """The reset by TorchRL's loops right after the end keeps them; `RewardSum` has the same returns."""
    env = TransformedEnv(
        TorchRLEnv(ParallelEnv([DyingAgents] * ENVS, False, SEED, num_workers=2), {"all": ["x", "y", "z"]}),
        Compose(RewardSum(), StepCounter()),
    )
    env.set_seed(SEED)
    loops = [PlainLoop(env_id, "DISABLED", seed=SEED if whole else None) for env_id in range(ENVS)]
    data = env.reset(seed=[SEED] * ENVS) if whole else env.reset()
    assert env.parallel_env.finished_episodes == ()
    ends = 0
    for _ in range(40):
        data["all", "action"] = torch.ones(ENVS, 3, dtype=torch.int64)
        data, following = env.step_and_maybe_reset(data)
        _, episodes = ended(loops)
        assert [*env.parallel_env.finished_episodes] == episodes
        over = data["next", "done"].squeeze(-1)
        returns = data["next", "all", "episode_reward"][over].squeeze(-1).tolist()
        assert returns == [[*episode[1].values()] for episode in episodes]
        assert data["next", "step_count"][over].flatten().tolist() == [episode[3] for episode in episodes]
        for env_id in over.nonzero().flatten().tolist():
            loops[env_id].reset()
        ends, data = ends + len(episodes), following
    assert ends == 12
    env.reset()
    assert env.parallel_env.finished_episodes == ()
    env.close()


def mappo(env: TorchRLEnv | TransformedEnv, group: str, actions: int) -> tuple[Any, ClipPPOLoss]:
    width, count = env.observation_spec[group, "observation"].shape[-1], len(env.group_map[group])
    shared = {"n_agents": count, "share_params": True, "depth": 1, "num_cells": 16}
    net = MultiAgentMLP(n_agent_inputs=width, n_agent_outputs=actions, centralized=False, **shared)
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=[(group, "observation")], out_keys=[(group, "logits")]),
        in_keys=[(group, "logits")],
        out_keys=[(group, "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key=(group, "log_prob"),
    )
    critic = TensorDictModule(
        MultiAgentMLP(n_agent_inputs=width, n_agent_outputs=1, centralized=True, **shared),
        in_keys=[(group, "observation")],
        out_keys=[(group, "state_value")],
    )
    loss = ClipPPOLoss(actor, critic)
    loss.set_keys(
        reward=(group, "reward"),
        action=(group, "action"),
        sample_log_prob=(group, "log_prob"),
        value=(group, "state_value"),
        done=(group, "done"),
        terminated=(group, "terminated"),
    )
    loss.loss_mask_key = (group, "mask")
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    return actor, loss


@pytest.mark.parametrize(("make", "group", "actions"), [(spread, "agent", 5), (StackableAgents, "cow", 3)])
def test_collector_and_mappo_loss(make, group, actions, parallel):
    torch.manual_seed(0)
    env = TransformedEnv(
        TorchRLEnv(parallel(make, 4, num_workers=2, backend="process")),
        RewardSum(in_keys=[(group, "reward")], out_keys=[(group, "episode_reward")], reset_keys=["_reset"]),
    )
    actor, loss = mappo(env, group, actions)
    collector = Collector(env, actor, frames_per_batch=80, total_frames=160)
    batches = 0
    for data in collector:
        batches += 1
        assert data.shape == (4, 20)
        assert data["next", "done"].any()
        assert (data["collector", "traj_ids"].unique().numel()) > 4
        loss.value_estimator(data, params=loss.critic_network_params, target_params=loss.target_critic_network_params)
        results = loss(data)
        total = results["loss_objective"] + results["loss_critic"] + results["loss_entropy"]
        assert total.isfinite()
        total.backward()
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())
        mask = data[group, "mask"]
        assert mask.all().item() is (group == "agent")
        data["advantage"][~mask] = torch.nan  # masked rows have no effect
        assert torch.equal(loss(data)["loss_objective"], results["loss_objective"])
    collector.shutdown()
    assert batches == 2
    with pytest.raises(ClosedEnvironmentError):
        env.base_env.env.step([{}] * 4)
