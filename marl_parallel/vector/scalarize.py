"""Vector rewards as numbers: the rules of the argument `scalarize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.spaces import is_vector

Rule: TypeAlias = Sequence[float] | NDArray[Any] | Callable[[NDArray[Any]], float]
Scalarize: TypeAlias = Rule | Mapping[AgentID, Rule]
"""A weight for each objective, or a function that takes a vector and returns a number; or a dict of these by agent."""

Rules: TypeAlias = Mapping[AgentID, Callable[[NDArray[Any]], float]]
"""By agent, the function that turns a vector reward into a number."""


def reward_rules(facade: str, scalarize: Scalarize | None, reward_spaces: Mapping[AgentID, Space[Any]]) -> Rules:
    """The rules of all agents with vector rewards; checks `scalarize`."""
    if scalarize is None:
        for agent, space in reward_spaces.items():
            raise ValueError(
                f"{facade} takes rewards that are numbers, but agent {agent!r} declares vectors: its reward_space is "
                f"{space}. Pass scalarize=: a weight for each objective, or a function that takes a vector and returns "
                "a number, or a dict of these by agent"
            )
    elif not reward_spaces:
        raise ValueError(f"{facade}: scalarize= was passed, but no agent declares a reward_space of vectors")
    return {agent: _reward_rule(facade, agent, scalarize, space) for agent, space in reward_spaces.items()}


def _reward_rule(facade: str, agent: AgentID, rule: Any, space: Space[Any]) -> Callable[[NDArray[Any]], float]:
    if isinstance(rule, Mapping):
        if agent not in rule:
            raise ValueError(f"{facade}: scalarize= has no entry for agent {agent!r}; its keys are {[*rule]}")
        rule = rule[agent]
    if callable(rule):

        def number(vector: NDArray[Any]) -> float:
            result = rule(vector)
            if np.ndim(result) or isinstance(result, str | bytes | None.__class__):
                raise TypeError(
                    f"{facade}: scalarize must return a number for the reward of agent {agent!r}, {vector!r}; it "
                    f"returned {result!r}"
                )
            return float(result)

        return number
    try:
        weights = np.asarray(rule, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{facade}: scalarize= must be weights or a function, or a dict of these by agent; got {rule!r}"
        ) from None
    if weights.shape != (space.shape or ()) or not np.isfinite(weights).all():
        raise ValueError(
            f"{facade}: the rewards of agent {agent!r} have shape {space.shape or ()}, so scalarize= must be finite "
            f"weights of that shape, got {rule!r}"
        )
    return lambda vector: float(np.vdot(weights, vector))


def as_number(rules: Rules, agent: AgentID, reward: Any) -> Any:
    """A vector reward as a number; any other reward as it is."""
    return rules[agent](np.asarray(reward)) if agent in rules and is_vector(reward) else reward
