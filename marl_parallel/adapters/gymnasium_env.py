"""Gymnasium's single-agent environments, as multi-agent environments of one agent.

A `gymnasium.Env` that hosts several agents is a dict environment; which of the two one is, `adapt` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.base import Adapter, Misfit, described, type_name, vector_reward_spaces
from marl_parallel.adapters.protocol import AgentID, Dicts, Rules

AGENT = "agent_0"
_NO_DICTS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Tuple)


class GymnasiumEnv(Adapter):
    """A single-agent environment; every result is wrapped in a dict of one entry."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A Gymnasium environment"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.possible_agents = [AGENT]
        self._space = declared(source, "observation_space")
        self.observation_spaces = _space_of_the_agent(self._space)
        self.action_spaces = _space_of_the_agent(declared(source, "action_space"))
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        try:
            result = self.source.reset(**keywords)
        except TypeError as error:
            self._check_call(error, "reset", **keywords)
            raise
        # An observation alone, as before Gymnasium, may unpack in two as well.
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._misfit("reset", "(observation, info)", result)
        observation, info = result
        if isinstance(observation, Mapping) and isinstance(self._space, _NO_DICTS):
            raise self._misfit("reset", f"one observation of {self._space}", observation)
        return {AGENT: observation}, {AGENT: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        action = actions[AGENT]
        try:
            result = self.source.step(action)
        except TypeError as error:
            self._check_call(error, "step", action)
            raise
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._misfit("step", "(observation, reward, terminated, truncated, info)", result)
        observation, reward, terminated, truncated, info = result
        if type(reward) is dict:
            raise Misfit(
                f"the reward of agent {AGENT!r} must be a number or an array, got a dict with the keys {[*reward]}; "
                'if these keys are agents, pass adapter="dict"'
            )
        return {AGENT: observation}, {AGENT: reward}, {AGENT: terminated}, {AGENT: truncated}, {AGENT: info}

    def _misfit(self, method: str, expected: str, got: Any) -> Misfit:
        return Misfit.of(
            self,
            f"`{method}` of {type_name(self.source)} must return a tuple {expected}; it returned {described(got)}",
        )


def _space_of_the_agent(space: Any) -> dict[AgentID, Space[Any]]:
    return {AGENT: space} if isinstance(space, Space) else {}
