"""`SingleEnv`: one copy of a `ParallelEnv` as a plain PettingZoo environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pettingzoo  # type: ignore[import-untyped]
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import AgentID
from marl_parallel.core.transition import ALL
from marl_parallel.parallel_env import ParallelEnv

ByAgent = dict[AgentID, Any]


class SingleEnv(pettingzoo.ParallelEnv):  # type: ignore[misc]
    """What PettingZoo's wrappers, tests and loops take; the other copies stay as they are.

    Args:
        env: Made with `auto_reset=False`.
        env_id: Which copy.
        note: Told of what it says, for whoever steps all copies: its number, observations and rewards.

    Raises:
        ValueError: It was not, or there is no such copy.
    """

    def __init__(self, env: ParallelEnv, env_id: int, note: Callable[[int, ByAgent, ByAgent], None]) -> None:
        runner = env.runner
        if runner.mode is not AutoresetMode.DISABLED:
            raise ValueError(
                "one copy as a PettingZoo environment wants a ParallelEnv with auto_reset=False, got "
                f"AutoresetMode.{runner.mode.name}"
            )
        if not 0 <= env_id < env.num_envs:
            raise ValueError(f"there is no copy {env_id!r}: they are numbered from 0 to {env.num_envs - 1}")
        self._env, self._runner, self._env_id, self._note = env, runner, env_id, note
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.possible_agents = env.possible_agents
        self.observation_spaces = runner.schema.observation_spaces
        self.action_spaces = runner.schema.action_spaces
        self.reward_spaces = runner.schema.reward_spaces
        if env.state_space is not None:
            self.state_space = env.state_space

    @property
    def agents(self) -> list[AgentID]:
        """Who is alive; nobody once the episode is over."""
        batch = self._runner.batch
        return [] if batch.over[self._env_id] else [*batch.alive[self._env_id]]

    def observation_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent."""
        return self.action_spaces[agent]

    def reward_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent whose rewards are vectors."""
        return self.reward_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[AgentID, Any], dict[AgentID, Any]]:
        """Begin a new episode; options are dropped where the simulator's own `reset` takes none."""
        if not self._runner.takes_options:
            options = None
        seeds = None if seed is None else [seed]
        (observations,), (infos,) = self._env.reset(seed=seeds, options=options, env_ids=[self._env_id])
        self._note(self._env_id, observations, {})
        return observations, infos

    def step(self, actions: dict[AgentID, Any]) -> tuple[dict[AgentID, Any], ...]:
        """Step once; `__all__` is left out, as PettingZoo knows no such key: who has no flag of its own has this."""
        told = self._env.step([actions], env_ids=[self._env_id])
        observations, rewards, terminateds, truncateds, infos = (dicts[0] for dicts in told)
        self._note(self._env_id, observations, rewards)
        left = self._runner.batch.alive[self._env_id] if terminateds[ALL] or truncateds[ALL] else []
        terminations, truncations = (
            {**{a: f for a, f in flags.items() if a != ALL}, **dict.fromkeys(left, flags[ALL])}
            for flags in (terminateds, truncateds)
        )
        return observations, rewards, terminations, truncations, infos

    def state(self) -> np.ndarray[Any, Any]:
        """The global state; raises as `ParallelEnv.state`."""
        state: np.ndarray[Any, Any] = self._env.state(env_ids=[self._env_id])[0]
        return state

    def render(self) -> Any:
        """A frame; None where `render_mode` is None."""
        frames = self._env.render(env_ids=[self._env_id])
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close all copies: they live and end together."""
        self._env.close()
