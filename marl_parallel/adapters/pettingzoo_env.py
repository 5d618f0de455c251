"""PettingZoo's environments: parallel ones, and AEC ones through PettingZoo's own conversions to parallel.

Whether an episode is over is not decided here; the adapters only tell who is left and whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from gymnasium import Space
from pettingzoo.utils.conversions import (  # type: ignore[import-untyped]
    aec_to_parallel,
    turn_based_aec_to_parallel,
)

from marl_parallel.adapters.attributes import declared, layers
from marl_parallel.adapters.protocol import (
    FIVE_DICTS,
    Adapter,
    AgentID,
    Dicts,
    Rules,
    declared_agents,
    spaces_by_agent,
    spaces_of,
    vector_reward_spaces,
)


class PettingZooEnv(Adapter):
    """A PettingZoo environment in which all agents act at once."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A PettingZoo parallel environment"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._parallel = self._as_parallel(source)
        self.possible_agents = declared_agents(source)
        self.observation_spaces = spaces_of(self.possible_agents, _space_lookup(source, "observation"))
        self.action_spaces = spaces_of(self.possible_agents, _space_lookup(source, "action"))
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        return self._reset_dicts(self._parallel, keywords)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        try:
            result = self._parallel.step(actions)
        except TypeError as error:
            self._check_call(error, "step", actions)
            raise
        return result if type(result) is tuple and [*map(type, result)] == FIVE_DICTS else self._five_dicts(result)

    def agents_left(self) -> Sequence[AgentID] | None:
        agents: Sequence[AgentID] | None = getattr(self._parallel, "agents", None)
        return agents

    def _as_parallel(self, source: Any) -> Any:
        return source


class ParallelizableAECEnv(PettingZooEnv):
    """An AEC environment whose agents act in a fixed cycle, so that one step is one cycle."""

    kind: ClassVar[str] = "A PettingZoo AEC environment"
    methods: ClassVar[tuple[str, ...]] = ("reset", "step", "observe", "last")

    def _as_parallel(self, source: Any) -> Any:
        return aec_to_parallel(source)


class TurnBasedAECEnv(PettingZooEnv):
    """An AEC environment in which one step is the turn of one agent."""

    kind: ClassVar[str] = "A PettingZoo AEC environment"
    methods: ClassVar[tuple[str, ...]] = ("reset", "step", "observe", "last")

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        observations, infos = super().reset(**keywords)
        # PettingZoo's conversion tells whose turn it is with every step, but not with the reset.
        turn = {"active_agent": self.turn()}
        agents = set(self._parallel.agents)
        return observations, {key: {**info, **turn} if key in agents else info for key, info in infos.items()}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        # With nobody left, PettingZoo's conversion returns four dicts.
        return super().step(actions) if self._parallel.agents else ({}, {}, {}, {}, {})

    def turn(self) -> AgentID | None:
        return self.source.agent_selection if self.agents_left() else None

    def _as_parallel(self, source: Any) -> Any:
        return turn_based_aec_to_parallel(source)


def adapt_aec(env: Any) -> PettingZooEnv:
    """Adapt an AEC environment by its metadata."""
    if (declared(env, "metadata") or {}).get("is_parallelizable", False):
        return ParallelizableAECEnv(env)
    return TurnBasedAECEnv(env)


def _space_lookup(env: Any, what: str) -> Callable[[AgentID], Space[Any] | None]:
    """The function that gives an agent's space.

    It is the method of the outermost layer that has one of its own: PettingZoo's base classes and wrappers only pass
    on to it. If no layer has one, they end in a dict and a warning, so the dict is read directly.
    """
    base = declared(env, "unwrapped")
    for layer in layers(env):
        method = getattr(type(layer), f"{what}_space", None)
        if callable(method) and not (method.__module__ or "").startswith("pettingzoo.utils."):
            lookup: Callable[[AgentID], Space[Any] | None] = getattr(layer, f"{what}_space")
            return lookup
        if layer is base:
            break
    return spaces_by_agent(declared(env if base is None else base, f"{what}_spaces")).get
