"""Deterministic RLlib environments, and configs for env runners."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule

from marl_parallel.vector import ParallelMultiAgentEnvRunner
from simulators.dying_agents import DyingAgents, ReturningAgents


class DyingRLlibAgents(DyingAgents, MultiAgentEnv):
    """`DyingAgents` as an RLlib environment."""


class ReturningRLlibAgents(ReturningAgents, DyingRLlibAgents):
    """`ReturningAgents` as an RLlib environment."""


class Duel(DyingRLlibAgents):
    """Two agents take turns: only one observes at a time, and the other's action is pending until it does."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.possible_agents = self.agents = ["x", "y"]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.death = dict.fromkeys(self.agents, 9)
        return {"x": self.observed("x")}, {}

    def reported(self) -> list[str]:
        return self.agents if self.time == 9 else [self.agents[self.time % 2]]


class Reborn(DyingRLlibAgents):
    """Never over: its only agent dies now and then and is back in the next step."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.possible_agents = self.agents = ["x"]

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        flags = {"x": self.time % 4 == 0, "__all__": False}
        return {"x": self.observed("x")}, {"x": float(self.time)}, flags, {"x": False, "__all__": False}, {}


class Relay(DyingRLlibAgents):
    """Agent x dies at once; agent y appears at the end, after RLlib's episode, in which all agents died, has ended."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.possible_agents = self.agents = ["x", "y"]
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.resets += 1
        return {"x": self.observed("x")}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        if self.resets == 2:
            raise RuntimeError("the track ends here")
        (agent, over) = ("x", False) if self.time == 1 else ("y", True)
        flags = {"x": True, "__all__": False} if agent == "x" else {"__all__": over}
        return {agent: self.observed(agent)}, {agent: 1.0}, flags, {"__all__": False}, {}


class RewardsAreTexts(DyingRLlibAgents):
    """Its rewards fail RLlib's environment check."""

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, *others = super().step(actions)
        return observations, dict.fromkeys(rewards, "none"), *others


class WithFrames(DyingRLlibAgents):
    """Has frames."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.render_mode = "rgb_array"

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((2, 2, 3), self.time, np.uint8)


class Spread(ParallelPettingZooEnv):
    """A PettingZoo environment in RLlib's wrapper."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(simple_spread_v3.parallel_env(max_cycles=6))


class Wrapped(gymnasium.Wrapper):
    """A Gymnasium wrapper around an RLlib environment."""


class RandomModule(RandomRLModule):
    """Acts at random in any space; sets the framework, which RLlib's own module leaves empty."""

    framework = "torch"


def one_policy(agent: Any, episode: Any, **_: Any) -> str:
    return "shared"


def own_policy(agent: Any, episode: Any, **_: Any) -> str:
    return str(agent)


def config_for(env: Any, *, num_envs: int = 4, seed: int | None = 5, **env_config: Any) -> PPOConfig:
    """PPO with one policy for all agents, with serial environments unless `parallel_env` overrides it."""
    return (
        PPOConfig()
        .environment(env, env_config={"parallel_env": {"backend": "serial"}, **env_config})
        .multi_agent(policies={"shared"}, policy_mapping_fn=one_policy)
        .env_runners(env_runner_cls=ParallelMultiAgentEnvRunner, num_envs_per_env_runner=num_envs, num_env_runners=0)
        .debugging(seed=seed)
    )


def with_random_policies(config: PPOConfig, agents: Any) -> PPOConfig:
    """The same with a random policy for each agent."""
    return config.multi_agent(policies={*map(str, agents)}, policy_mapping_fn=own_policy).rl_module(
        rl_module_spec=RLModuleSpec(module_class=RandomModule)
    )


def episode_contents(episode: MultiAgentEpisode) -> dict[Any, Any]:
    """All values of an episode, by agent."""
    return {
        agent: {
            "observations": [*one.get_observations()],
            "actions": [*one.get_actions()],
            "rewards": [*map(float, one.get_rewards())],
            "infos": [*one.get_infos()],
            "flags": (bool(one.is_terminated), bool(one.is_truncated)),
        }
        for agent, one in sorted(episode.agent_episodes.items())
    } | {"flags": (bool(episode.is_terminated), bool(episode.is_truncated)), "from": episode.env_t_started}
