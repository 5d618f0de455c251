"""The batch as arrays over all environments: the other view, beside dicts, of what has been done.

Facades are made of it. `ArrayView` is what they ask; what lies in a block is read in `block_arrays.py`, what a native
simulator hands out in `native_arrays.py`. How values of a space are stacked is in `stacking.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.layout import Schema, alike


class Group(NamedTuple):
    """Agents with equal observation spaces.

    Attributes:
        space: Theirs.
        positions: Theirs among the possible agents.
    """

    space: Space[Any]
    positions: list[int]


class Arrays(NamedTuple):
    """One transition of every environment, for `n` possible agents.

    Attributes:
        observations: For each group, what its agents see: arrays `(num_envs, agents of the group, ...)`, in the form of
            the space (dicts and tuples of them). What has no fixed form is an array of objects. Absent rows are zeros,
            or None.
        rewards: `(num_envs, n)`, float64; 0.0 where there is none.
        terminations: `(num_envs, n)`, bool; False where there is none.
        truncations: Likewise.
        terminated: `(num_envs,)`, bool: `terminateds["__all__"]`.
        truncated: Likewise.
        present: `(num_envs, n)`, bool: who was observed or rewarded.
        acting: `(num_envs, n)`, bool: who should act next.
        infos: By environment, its infos as they are in the dicts, where any of them says something; not to be changed.
        observed: `(num_envs, n)`, bool: whose observations are data.
        rewarded: `(num_envs, n)`, bool: who has a reward.
        flagged: `(num_envs, n)`, bool: of whom flags say something, be it False. Not to be changed.
        quiet: True where everybody is there and acts, no flag is set and no infos are told, as with most steps; that
            may be so with False, too.
        together: True where each agent is flagged as its copy is, likewise.
        vectors: By agent, rewards that are vectors: `(num_envs, *shape)` in the dtype of its reward space, zeros where
            there is none. Its column in `rewards` is 0.0. Empty where no agent declares a reward space.
        vectored: `(num_envs, n)`, bool: whose rewards are in `vectors`; None where that is empty.
    """

    observations: list[Any]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    present: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    infos: Mapping[int, dict[Any, Any]]
    observed: NDArray[np.bool_]
    rewarded: NDArray[np.bool_]
    flagged: NDArray[np.bool_]
    quiet: bool = False
    together: bool = False
    vectors: Mapping[AgentID, NDArray[Any]] = MappingProxyType({})
    vectored: NDArray[np.bool_] | None = None


class Stacked(NamedTuple):
    """Actions of several agents with equal action spaces.

    Attributes:
        agents: Whose.
        values: Theirs, in the form of the space: arrays `(num_envs, agents, ...)`, dicts and tuples of them.
    """

    agents: tuple[AgentID, ...]
    values: Any


Actions: TypeAlias = Mapping[Any, Any] | list[Stacked]
"""By agent, stacked in the form of its space: arrays `(num_envs, ...)`, dicts and tuples of them, or one value for each
environment; or of several agents at a time. Those of `Discrete` spaces reach simulators as int64."""


class ArrayView(ABC):
    """Reads and writes a batch as arrays.

    Args:
        schema: Names all agents, and a space for each of them.

    Attributes:
        agents: The possible agents, in their order.
        groups: Who of them is observed in the same form.
    """

    def __init__(self, schema: Schema) -> None:
        self.agents = list(schema.possible_agents)
        self.groups = [Group(*group) for group in alike(schema.observation_spaces, self.agents)]
        self._column = {agent: place for place, agent in enumerate(self.agents)}
        self._rows = {
            self.agents[position]: (group, row)
            for group, (_, positions) in enumerate(self.groups)
            for row, position in enumerate(positions)
        }
        self._ordered = [(agent, self._rows[agent]) for agent in self.agents]

    @abstractmethod
    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Any:
        """Write the actions of everybody who acts; what is there for others is not looked at.

        Args:
            actions: By agent or by several agents; see `Actions`.
            env_ids: Which environments are to be stepped; None for all of them. Rows of the others are not looked at.

        Returns:
            What is to be handed over for the step.

        Raises:
            ValueError: An acting agent has none, somebody is unknown, or an array is not what its space declares.
        """

    @abstractmethod
    def read(self, told: Any) -> Arrays:
        """The transitions of all environments.

        Args:
            told: What came of the step or reset.

        Raises:
            ValueError: Something has no place in an array, such as a vector of rewards or an agent that is unknown.
                All has been done, and where each environment stands is known.
        """

    @abstractmethod
    def last(self) -> Arrays:
        """What all environments have observed last, and who is there and acts, with no rewards, flags and infos.

        For `read_some`, before something is done in some of them.
        """

    @abstractmethod
    def read_some(self, env_ids: Sequence[int], told: Any, last: Arrays) -> Arrays:
        """The transitions of some environments, among the observations of all.

        Args:
            env_ids: Whose; the others have no rewards, flags and infos.
            told: As of `read`.
            last: From before it was done; not to be used any more.
        """

    @abstractmethod
    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Note what one environment has said that was stepped or reset by dicts, for `last`."""

    def by_agent(self, observations: list[Any]) -> dict[Any, Any]:
        """What each agent sees, of the arrays of all groups: views of shape `(num_envs, ...)`."""
        return {agent: stacking.column(observations[group], row) for agent, (group, row) in self._ordered}

    def _check_known(self, actions: Mapping[AgentID, Any]) -> None:
        if not actions.keys() <= self._column.keys():
            unknown = next(agent for agent in actions if agent not in self._column)
            raise ValueError(f"actions for {unknown!r}, which is none of the agents {self.agents}")

    @staticmethod
    def _check_all_there(
        actions: Mapping[AgentID, Any], acting: Sequence[Sequence[AgentID]], env_ids: Sequence[int]
    ) -> None:
        for env_id in env_ids:
            for agent in acting[env_id]:
                if agent not in actions:
                    raise ValueError(
                        f"environment {env_id}: no action for agent {agent!r}; expected one for each of "
                        f"{acting[env_id]}, got actions of {[*actions]}"
                    )
