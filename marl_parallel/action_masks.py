"""Action masks by PettingZoo's convention: where environments report them, and random actions that they allow."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

KEY = "action_mask"
"""The key of an observation or info that holds the mask."""

_NUMBERS = frozenset("biuf")


def mask_of(observation: Any, info: Any) -> Any:
    """A copy of one agent's action mask: from its info, else from its observation, else None."""
    for source in (info, observation):
        if isinstance(source, Mapping) and source.get(KEY) is not None:
            return own_mask(source[KEY])
    return None


def own_mask(mask: Any) -> Any:
    """A copy of a mask, with its dicts and tuples; arrays of zeros and ones become bool."""
    if type(mask) is np.ndarray and mask.dtype.kind in _NUMBERS:
        return mask.astype(np.bool_) if _is_binary(mask) else mask.copy()
    if isinstance(mask, Mapping):
        return {key: own_mask(part) for key, part in mask.items()}
    if mask is None:
        return None
    if isinstance(mask, tuple) and not all(isinstance(part, int | float | np.generic) for part in mask):
        return tuple(map(own_mask, mask))
    try:
        array = np.array(mask)
    except Exception:  # an object's `__array__` may raise anything; a list may have rows of different lengths
        return tuple(map(own_mask, mask)) if isinstance(mask, list) else mask
    return array.astype(np.bool_) if array.dtype.kind in _NUMBERS and _is_binary(array) else array


def for_sample(space: Space[Any], mask: Any) -> Any:
    """A mask in the form that `space.sample(mask)` takes; None if it does not match the space or allows no action."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        parts = _of_space(space, mask)
        # If a mask allows no action, Gymnasium would return the first one, which looks like a valid choice.
        return parts if _has_choices(parts) else None
    if isinstance(space, spaces.MultiBinary):
        return _numbers(mask, space.shape, (0, 1, 2))
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        return {key: for_sample(child, mask.get(key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and _is_sequence(mask, len(space.spaces)):
        return tuple(for_sample(child, part) for child, part in zip(space.spaces, mask))
    return None


class ActionSampler:
    """Draws random actions for the agents of one environment, by their action masks; equal seeds draw equal actions.

    The generators of `action_spaces` are not used. Each agent has its own, so that its actions do not depend on how
    often others act.
    """

    def __init__(self, action_spaces: Mapping[Any, Space[Any]], seed: int | Sequence[int]) -> None:
        self.spaces = copy.deepcopy(action_spaces)
        seeds = np.random.SeedSequence(seed).generate_state(len(self.spaces))
        for space, number in zip(self.spaces.values(), seeds.tolist()):
            space.seed(number)

    def sample(self, acting: Iterable[Any], masks: Mapping[Any, Any]) -> dict[Any, Any]:
        """Actions by agent. A mask that allows nothing, or does not match its space, is ignored."""
        return {agent: self.spaces[agent].sample(for_sample(self.spaces[agent], masks.get(agent))) for agent in acting}


def choices_of(space: Space[Any]) -> list[int] | None:
    """How many choices each part of an action has; None if the space is neither Discrete nor a flat MultiDiscrete."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return [*map(int, space.nvec)]
    return None


def declares_mask(observation_space: Space[Any], action_space: Space[Any]) -> bool:
    """Whether observations have a mask for an action space whose choices are known."""
    declared = isinstance(observation_space, spaces.Dict) and KEY in observation_space.spaces
    return declared and choices_of(action_space) is not None


def flat_mask(space: spaces.Discrete | spaces.MultiDiscrete, mask: Any) -> NDArray[np.int8] | None:
    """Join the masks of all parts of an action, one after the other; None if the mask does not match the space."""
    parts = _of_space(space, mask)
    return np.concatenate(parts) if isinstance(parts, tuple) else parts


def binary_rows(masks: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of an array `(rows, choices)` are zeros and ones."""
    rows: NDArray[np.bool_] = ((masks == 0) | (masks == 1)).all(axis=1)
    return rows


def with_choices(counts: Sequence[int], masks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Masks `(..., sum(counts))` where parts that allow no choice allow all: some libraries need one to draw from."""
    nothing = ~np.logical_or.reduceat(masks, np.cumsum([0, *counts[:-1]]), axis=-1)
    drawable: NDArray[np.bool_] = masks | np.repeat(nothing, counts, axis=-1)
    return drawable


def allows_nothing(mask: Any) -> bool:
    """Whether all entries of a mask are zero, as simulators often report for agents that cannot act."""
    if isinstance(mask, Mapping | tuple):
        return all(map(allows_nothing, mask.values() if isinstance(mask, Mapping) else mask))
    return mask is None or not np.any(mask)


def _is_sequence(mask: Any, length: int) -> bool:
    return isinstance(mask, tuple | list | np.ndarray) and len(mask) == length


def _numbers(mask: Any, shape: tuple[int, ...], values: tuple[int, ...]) -> NDArray[np.int8] | None:
    array = np.asarray(mask) if isinstance(mask, np.ndarray | list | tuple) else None
    if array is None or array.dtype.kind not in _NUMBERS or array.shape != shape:
        return None
    # `np.isin` takes longer than the draw itself.
    if array.dtype != np.bool_ and not np.logical_or.reduce([array == value for value in values]).all():
        return None
    return array.astype(np.int8)


def _is_binary(array: NDArray[Any]) -> bool:
    """Whether an array of numbers is zeros and ones."""
    return array.dtype == np.bool_ or bool(((array == 0) | (array == 1)).all())


def _of_space(space: spaces.Discrete | spaces.MultiDiscrete, mask: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return _numbers(mask, (int(space.n),), (0, 1))
    return _of_choices(space.nvec, mask)


def _of_choices(counts: Any, mask: Any) -> Any:
    """Arrays in tuples that are nested like `counts`; splits one flat array of all choices, as in MaskablePPO."""
    if np.ndim(counts) == 0:
        return _numbers(mask, (int(counts),), (0, 1))
    if isinstance(mask, np.ndarray) and mask.ndim == counts.ndim == 1 and len(mask) == counts.sum():
        mask = np.split(mask, np.cumsum(counts)[:-1])
    if not _is_sequence(mask, len(counts)):
        return None
    parts = tuple(map(_of_choices, counts, mask))
    return None if any(part is None for part in parts) else parts


def _has_choices(parts: Any) -> bool:
    """Whether each part of an action has a choice."""
    return all(map(_has_choices, parts)) if isinstance(parts, tuple) else parts is not None and bool(parts.any())
