"""The forms of `TianshouVecEnv`: all agents of an environment as one, or one agent after the other."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays
from marl_parallel.core.block.joining import flat_box, flat_values
from marl_parallel.core.spaces import leaves, tree_map
from marl_parallel.core.transition import COMMON
from marl_parallel.vector.rows import common_info
from marl_parallel.vector.stepper import FacadeStepper

_NUMBERS = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class Form(ABC):
    """What the arrays of a `FacadeStepper` are for Tianshou; observations and infos are copies.

    Attributes:
        action_space: The space of the action of one environment.
        observation_space: The space of what is observed of one environment.
    """

    def __init__(self, stepper: FacadeStepper, action_space: Space[Any], observation_space: Space[Any]) -> None:
        self._stepper, self._agents = stepper, tuple(stepper.view.agents)
        self.action_space, self.observation_space = action_space, observation_space

    @abstractmethod
    def actions(self, actions: NDArray[Any]) -> dict[AgentID, NDArray[Any]]:
        """By agent, the actions `(num_actions, ...)`; those of agents that do not act do not count."""

    @abstractmethod
    def rewards(self, arrays: Arrays) -> NDArray[np.float64]:
        """The rewards of all environments, `(num_envs, ...)`."""

    @abstractmethod
    def observations(self, arrays: Arrays, ids: Sequence[int]) -> NDArray[Any]:
        """What is observed of some environments."""

    @abstractmethod
    def _infos_of(self, arrays: Arrays, env_id: int, of_env: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The infos of the agents of one environment, without what is about all agents."""

    def infos(self, arrays: Arrays, ids: Sequence[int]) -> NDArray[Any]:
        """A new dict for each of these environments, also with what is about all agents."""
        infos = []
        for env_id in ids:
            of_env = arrays.infos.get(env_id, {})
            infos.append({**common_info(of_env.get(COMMON)), **self._infos_of(arrays, env_id, of_env)})
        return objects(infos)


class JointForm(Form):
    """All agents of an environment are one agent."""

    def __init__(self, stepper: FacadeStepper) -> None:
        acted, seen = _spaces(stepper)
        self._has_masks = bool(stepper.schema.mask_spaces)  # masks outside observations and infos
        self._is_single = len(seen) == 1
        self._is_flat = not self._is_single and all(isinstance(space, spaces.Box) for space in seen.values())
        self._shapes = [space.shape or () for space in acted.values()]
        self._ends = [*itertools.accumulate(int(np.prod(shape)) for shape in self._shapes)]
        joined = flat_box(seen.values()) if self._is_flat else spaces.Dict([*seen.items()])
        super().__init__(stepper, _action_space(acted), next(iter(seen.values())) if self._is_single else joined)

    def actions(self, actions: NDArray[Any]) -> dict[AgentID, NDArray[Any]]:
        if self._is_single:
            return {self._agents[0]: actions}
        parts, number = np.split(actions, self._ends[:-1], axis=1), len(actions)
        return {agent: part.reshape(number, *shape) for agent, part, shape in zip(self._agents, parts, self._shapes)}

    def rewards(self, arrays: Arrays) -> NDArray[np.float64]:
        """The sum over agents."""
        rewards: NDArray[np.float64] = arrays.rewards[:, 0] if self._is_single else arrays.rewards.sum(axis=1)
        return rewards

    def observations(self, arrays: Arrays, ids: Sequence[int]) -> NDArray[Any]:
        view, rows = self._stepper.view, [*ids]
        if self._is_flat and view.is_one_stack:
            seen: NDArray[Any] = arrays.observations[0].reshape(self._stepper.num_envs, -1)[rows]
            return seen
        by_agent = view.by_agent(arrays.observations)
        if self._is_flat:
            return flat_values(by_agent[agent][rows] for agent in self._agents)
        stacked = by_agent[self._agents[0]] if self._is_single else by_agent
        if isinstance(stacked, np.ndarray):
            return stacked[rows]
        values = stacking.one_by_one(stacked, self._stepper.num_envs)
        return objects([values[row] for row in rows])

    def _infos_of(self, arrays: Arrays, env_id: int, of_env: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Of the agent, or by agent."""
        by_agent = {key: info for key, info in of_env.items() if info and key != COMMON}
        if self._has_masks:
            masks = self._stepper.transitions.masks(env_id)
            by_agent |= {agent: {ACTION_MASK: mask, **by_agent.get(agent, {})} for agent, mask in masks.items()}
        return by_agent.get(self._agents[0], {}) if self._is_single else by_agent


class TurnForm(Form):
    """One agent after the other, as in Tianshou's `PettingZooEnv`: `Schema.observes_turn` says that this is so."""

    def __init__(self, stepper: FacadeStepper) -> None:
        acted, seen = _spaces(stepper)
        first = next(iter(seen))
        for what, declared, pad in (
            ("observation", seen, "pad_observations_v0"), ("action", acted, "pad_action_space_v0")
        ):  # fmt: skip
            for agent, space in declared.items():
                if space != declared[first]:
                    raise ValueError(
                        f"Tianshou's multi-agent algorithms need equal {what} spaces of all agents, but {first!r} has "
                        f"{declared[first]} and {agent!r} has {space}: pad them, as with SuperSuit's {pad}"
                    )
        super().__init__(stepper, _action_space({first: acted[first]}), seen[first])

    def actions(self, actions: NDArray[Any]) -> dict[AgentID, NDArray[Any]]:
        return dict.fromkeys(self._agents, actions)

    def rewards(self, arrays: Arrays) -> NDArray[np.float64]:
        """The rewards of all agents, `(num_envs, agents)`."""
        return arrays.rewards

    def observations(self, arrays: Arrays, ids: Sequence[int]) -> NDArray[Any]:
        return objects([self._turn(arrays, env_id) for env_id in ids])

    def _turn(self, arrays: Arrays, env_id: int) -> dict[str, Any]:
        """The agent whose turn it is, its observation, and its mask if it has one or its actions are `Discrete`."""
        agent = self._agent(arrays, env_id)
        group, row = self._stepper.view.group_rows[agent]
        seen = tree_map(lambda array: array[env_id, row].copy(), arrays.observations[group])
        if isinstance(seen, dict) and ACTION_MASK in seen:
            mask = seen.pop(ACTION_MASK)
            seen = seen.get("observation", seen)
        else:
            mask = self._stepper.transitions.masks(env_id).get(agent)
        if mask is not None:
            parts = mask if isinstance(mask, list | tuple) else [mask]  # of a `MultiDiscrete`
            return {"agent_id": agent, "obs": seen, "mask": (np.concatenate([*map(np.ravel, parts)]) == 1).tolist()}
        if isinstance(self.action_space, spaces.Discrete):
            return {"agent_id": agent, "obs": seen, "mask": [True] * int(self.action_space.n)}
        return {"agent_id": agent, "obs": seen}

    def _infos_of(self, arrays: Arrays, env_id: int, of_env: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Of the agent whose turn it is."""
        info: Mapping[Any, Any] = of_env.get(self._agent(arrays, env_id)) or {}
        return info

    def _agent(self, arrays: Arrays, env_id: int) -> AgentID:
        return self._agents[int(arrays.observed[env_id].argmax())]


def _spaces(stepper: FacadeStepper) -> tuple[dict[AgentID, Space[Any]], dict[AgentID, Space[Any]]]:
    """The action and observation spaces of all agents; `TypeError` for observations that Tianshou cannot take."""
    schema, agents = stepper.schema, stepper.view.agents
    acted, seen = ({agent: of[agent] for agent in agents} for of in (schema.action_spaces, schema.observation_spaces))
    for agent, space in seen.items():
        if isinstance(space, spaces.Tuple):
            raise TypeError(
                f"agent {agent!r} observes {space}: Tianshou does not support tuples; convert them to an array or a "
                "Dict with a wrapper"
            )
        if not all(isinstance(leaf, _NUMBERS) for _, leaf in leaves(space)):
            raise TypeError(
                f"agent {agent!r} observes {space}, whose values have no fixed size: convert them to an array of one "
                "shape with a wrapper, such as padded ones with a mask"
            )
    return acted, seen


def _action_space(declared: Mapping[AgentID, Space[Any]]) -> Space[Any]:
    """The space of the actions of all agents."""
    parts = [*declared.values()]
    if len(parts) == 1 and isinstance(parts[0], _NUMBERS):
        return parts[0]
    if len(parts) > 1 and all(isinstance(part, spaces.Box) for part in parts):
        return flat_box(parts)
    counts, starts = list[int](), list[int]()
    for part in parts:
        if isinstance(part, spaces.Discrete):
            counts, starts = [*counts, int(part.n)], [*starts, int(part.start)]
        elif isinstance(part, spaces.MultiDiscrete) and part.nvec.ndim == 1:
            counts, starts = [*counts, *part.nvec.tolist()], [*starts, *part.start.tolist()]
        else:
            break
    else:
        return spaces.MultiDiscrete(counts, start=starts)
    raise ValueError(
        "Tianshou needs one array of numbers as the action of an environment: Discrete and MultiDiscrete spaces of all "
        f"agents, or a Box of each; got {dict(declared)}. Convert them with a wrapper"
    )


def together(observations: Sequence[Any]) -> NDArray[Any]:
    """The observations of several environments in one array: of objects, if they are dicts."""
    return objects(observations) if isinstance(observations[0], dict) else np.stack(observations)


def objects(values: Iterable[Any]) -> NDArray[Any]:
    """An array of objects, also of equal dicts or sequences."""
    values = [*values]
    array = np.empty(len(values), object)
    array[:] = values
    return array
