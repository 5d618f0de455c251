"""Vector rewards made numbers, for libraries whose rewards are numbers.

What agents' rewards are vectors is declared in their `reward_space`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.arrays import Arrays
from marl_parallel.core.spaces import is_vector

Rule: TypeAlias = Sequence[float] | NDArray[Any] | Callable[[NDArray[Any]], float]
Scalarize: TypeAlias = Rule | Mapping[AgentID, Rule]
"""Weights, one for each objective, or a function that takes one vector and returns a number; or either by agent."""


class Scalarizer:
    """Makes numbers of vector rewards.

    Args:
        scalarize: How; see `Scalarize`.
        reward_spaces: Of the agents whose rewards are vectors.
        facade: Who wants it, for messages.

    Raises:
        TypeError: It is neither weights nor a function, nor a mapping to these.
        ValueError: Weights of another shape than the rewards, an agent without a rule, or no rewards that are vectors.
    """

    def __init__(self, scalarize: Scalarize, reward_spaces: Mapping[AgentID, Space[Any]], facade: str) -> None:
        if not reward_spaces:
            raise ValueError(f"{facade}: scalarize= was passed, but no agent declares a reward_space of vectors")
        self._rules = {
            agent: _rule(agent, scalarize, space.shape or (), facade) for agent, space in reward_spaces.items()
        }

    def number(self, agent: AgentID, reward: Any) -> Any:
        """One reward as a number; one that is no vector, or of an agent that declares none, as it is."""
        rule = self._rules.get(agent)
        return reward if rule is None or not is_vector(reward) else rule(np.asarray(reward))

    def fill(self, arrays: Arrays, agents: Sequence[AgentID]) -> None:
        """Write the numbers into `arrays.rewards`.

        Args:
            arrays: With vectors.
            agents: All, in their order.
        """
        if arrays.vectored is None:
            return
        for place, agent in enumerate(agents):
            if agent in arrays.vectors:
                rule, vectors = self._rules[agent], arrays.vectors[agent]
                for env_id in np.flatnonzero(arrays.vectored[:, place]).tolist():
                    arrays.rewards[env_id, place] = rule(vectors[env_id])


def check_numbers(facade: str, reward_spaces: Mapping[AgentID, Space[Any]]) -> None:
    """Refuse rewards that are vectors where nothing makes numbers of them.

    Raises:
        ValueError: An agent declares some.
    """
    for agent, space in reward_spaces.items():
        raise ValueError(
            f"{facade} takes rewards that are numbers, but agent {agent!r} declares vectors: its reward_space is "
            f"{space}. Pass scalarize=: a weight for each objective, or a function that takes a vector and returns a "
            "number, or a dict of these by agent"
        )


def _rule(agent: AgentID, scalarize: Scalarize, shape: tuple[int, ...], facade: str) -> Callable[[NDArray[Any]], float]:
    if isinstance(scalarize, Mapping):
        if agent not in scalarize:
            raise ValueError(f"{facade}: scalarize= has nothing for agent {agent!r}; it has {[*scalarize]}")
        scalarize = scalarize[agent]
    if callable(scalarize):
        return _Checked(agent, scalarize, facade)
    try:
        weights = np.asarray(scalarize, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{facade}: scalarize= must be weights or a function, or a dict of these by agent; got {scalarize!r}"
        ) from None
    if weights.shape != shape or not np.isfinite(weights).all():
        raise ValueError(
            f"{facade}: the rewards of agent {agent!r} have shape {shape}, so scalarize= must be finite weights of "
            f"that shape, got {scalarize!r}"
        )
    return lambda vector: float(np.vdot(weights, vector))


class _Checked:
    """A function of the caller's, whose result must be a number."""

    def __init__(self, agent: AgentID, function: Callable[[NDArray[Any]], float], facade: str) -> None:
        self._agent, self._function, self._facade = agent, function, facade

    def __call__(self, vector: NDArray[Any]) -> float:
        result: Any = self._function(vector)
        if np.ndim(result) or isinstance(result, str | bytes | None.__class__):
            raise TypeError(
                f"{self._facade}: scalarize must return a number for the reward of agent {self._agent!r}, {vector!r}; "
                f"it returned {result!r}"
            )
        return float(result)
