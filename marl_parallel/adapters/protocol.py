"""What the runtime steps: the protocol that every kind of simulator is brought to.

Here live `MultiAgentEnv`, `Rules`, `ALL` and `COMMON`. How one kind of simulator becomes a `MultiAgentEnv` is the
business of the module named after that kind; what the results of a step *mean* is decided in
`marl_parallel.core.episode`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from gymnasium import Space

AgentID: TypeAlias = Hashable
Dicts: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]


ALL = "__all__"
"""The key of the flags that speak for the whole episode."""

COMMON = "__common__"
"""The key of the infos that are about the environment rather than an agent."""


class Rules(Enum):
    """Which convention an environment follows: who says that an episode is over, and who must act."""

    DICT = "dict"
    """The environment says `__all__` itself and is given the caller's actions unchanged."""
    PETTINGZOO = "pettingzoo"
    """The episode is over when no agent is left, unless the environment says `__all__`; every acting agent must act,
    nobody else may."""


class MultiAgentEnv(ABC):
    """One simulator behind the interface that the runtime is written against.

    Attributes:
        rules: The convention it follows.
        seeded_when_made: Whether a seed belongs to its constructor alone, so that to give `reset` one is a mistake.
        options_last: Whether the options of a reset hold for all episodes from then on; what is built anew after a
            fault is given them again.
        needs_all_actions: Whether every agent that acts must be given an action, though dict rules would pass on what
            the caller gives. PettingZoo rules demand it anyway.
        source: The simulator as its constructor returned it. Attributes and methods are looked up from here; in the
            `MultiAgentEnv` itself where it has none.
        possible_agents: All agents that may appear, in the simulator's own order; empty where open-ended.
        observation_spaces: Of the agents that declare one, in the order of `possible_agents`; where these are
            open-ended, `GroupSpaces`.
        action_spaces: Likewise.
        reward_spaces: Of the agents whose rewards are vectors; empty where all rewards are numbers.
        state_space: Of the global state, None where there is none.
        metadata: The simulator's metadata (not copied).
        render_mode: The simulator's render mode.
        reset_keywords: Which of `seed` and `options` the simulator's `reset` takes.
    """

    rules: ClassVar[Rules]
    seeded_when_made: ClassVar[bool] = False
    options_last: ClassVar[bool] = False
    needs_all_actions: ClassVar[bool] = False
    source: Any
    possible_agents: list[AgentID]
    observation_spaces: Mapping[AgentID, Space[Any]]
    action_spaces: Mapping[AgentID, Space[Any]]
    reward_spaces: Mapping[AgentID, Space[Any]] = MappingProxyType({})
    state_space: Space[Any] | None
    metadata: Mapping[str, Any]
    render_mode: str | None
    reset_keywords: frozenset[str]

    @abstractmethod
    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        """Start an episode; returns what the simulator returned: observations and infos.

        Args:
            keywords: A subset of `reset_keywords`; the caller leaves out what is not to be passed on.
        """

    @abstractmethod
    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step once; returns the simulator's own five dicts; with `__all__` only if it knows its end itself."""

    @staticmethod  # noqa: B027  # most take any
    def check_options(options: Any) -> None:
        """Refuse options that `reset` cannot take; the caller asks before any environment is touched.

        Raises:
            ValueError: It cannot take these.
        """

    def agents_left(self) -> Sequence[AgentID] | None:
        """The agents that the simulator itself still counts; None where it keeps no such list."""
        return None

    def alive(self) -> Sequence[AgentID] | None:
        """Who is alive, where the adapter keeps count; None: whoever has been seen and has not been flagged."""
        return None

    def turn(self) -> AgentID | None:
        """The only agent who may act next; None where everybody in the latest observation may."""
        return None

    @abstractmethod
    def render(self) -> Any:
        """One frame, in whatever form the simulator's render mode gives it."""

    @abstractmethod
    def state(self) -> Any:
        """The global state; only called where `state_space` is not None."""

    @abstractmethod
    def close(self) -> None:
        """Let the simulator free what it holds."""
