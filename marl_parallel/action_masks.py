"""Action masks by PettingZoo's convention: where environments report them, and random actions that they allow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

KEY = "action_mask"
"""The key of an observation or info that holds the mask."""

_NUMBERS = frozenset("biuf")


def mask_of(observation: Any, info: Any) -> Any:
    """The action mask of one agent, in new arrays: its info's, else its observation's, else None."""
    for source in (info, observation):
        if isinstance(source, Mapping) and source.get(KEY) is not None:
            return own_mask(source[KEY])
    return None


def own_mask(mask: Any) -> Any:
    """A mask in new arrays, with its dicts and tuples kept; arrays of zeros and ones become bool, others do not."""
    if isinstance(mask, Mapping):
        return {key: own_mask(part) for key, part in mask.items()}
    if mask is None:
        return None
    if isinstance(mask, tuple) and not all(isinstance(part, int | float | np.generic) for part in mask):
        return tuple(map(own_mask, mask))
    try:
        array = np.array(mask)
    except Exception:  # whatever an object's `__array__` raises; of lists, because of rows of different lengths
        return tuple(map(own_mask, mask)) if isinstance(mask, list) else mask
    is_binary = array.dtype.kind in _NUMBERS and bool(((array == 0) | (array == 1)).all())
    return array.astype(np.bool_) if is_binary else array


def for_sample(space: Space[Any], mask: Any) -> Any:
    """A mask in the form for `space.sample(mask)`; None if it has another form, or allows no action."""
    if isinstance(space, spaces.Discrete):
        return _of_choices(space.n, mask)
    if isinstance(space, spaces.MultiDiscrete):
        return _of_choices(space.nvec, mask)
    if isinstance(space, spaces.MultiBinary):
        return _numbers(mask, space.shape, (0, 1, 2))
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        return {key: for_sample(child, mask.get(key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and _is_sequence(mask, len(space.spaces)):
        return tuple(for_sample(child, part) for child, part in zip(space.spaces, mask))
    return None


def random_policy(env: Any) -> Callable[[Any], list[dict[Any, Any]]]:
    """Random actions for a `ParallelEnv`, from copies of its action spaces, whose own generators do not change.

    Raises `ValueError` if an agent declares no action space.
    """
    action_space: Any = copy.deepcopy(env.action_space)  # agents need not be strings, as a Dict's keys are declared
    if action_space is None:
        raise ValueError("these simulators declare no action spaces to draw random actions from")
    if missing := [agent for agent in env.possible_agents if agent not in action_space.spaces]:
        raise ValueError(f"agent {missing[0]!r} declares no action space to draw random actions from")
    action_space.seed(0)

    def policy(_: Any) -> list[dict[Any, Any]]:
        return [
            {agent: action_space[agent].sample(for_sample(action_space[agent], masks.get(agent))) for agent in acting}
            for acting, masks in zip(env.acting, env.action_masks)
        ]

    return policy


def allows_nothing(mask: Any) -> bool:
    """Whether all entries of a mask are zero, as simulators often report for agents that cannot act."""
    if isinstance(mask, Mapping | tuple):
        return all(map(allows_nothing, mask.values() if isinstance(mask, Mapping) else mask))
    return mask is None or not np.any(mask)


def _is_sequence(mask: Any, length: int) -> bool:
    return isinstance(mask, tuple | list | np.ndarray) and len(mask) == length


def _numbers(mask: Any, shape: tuple[int, ...], values: tuple[int, ...]) -> NDArray[np.int8] | None:
    array = np.asarray(mask) if isinstance(mask, np.ndarray | list | tuple) else None
    if array is None or array.dtype.kind not in _NUMBERS or array.shape != shape or not np.isin(array, values).all():
        return None
    return array.astype(np.int8)


def _of_choices(counts: Any, mask: Any) -> Any:
    """Tuples of arrays, nested as `counts` is; one flat array of all choices, as MaskablePPO has them, is split."""
    if np.ndim(counts) == 0:
        array = _numbers(mask, (int(counts),), (0, 1))
        # If a mask allows no action, Gymnasium would return the first one, which looks like a valid choice.
        return array if array is not None and array.any() else None
    if isinstance(mask, np.ndarray) and mask.ndim == counts.ndim == 1 and len(mask) == counts.sum():
        mask = np.split(mask, np.cumsum(counts)[:-1])
    if not _is_sequence(mask, len(counts)):
        return None
    parts = tuple(map(_of_choices, counts, mask))
    return None if any(part is None for part in parts) else parts
