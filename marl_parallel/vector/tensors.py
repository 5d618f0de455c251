"""Spaces and their values in tensors: the specs that TorchRL wants, and values both ways.

Nothing here steps anything, or knows of agents and groups; those are in `torchrl.py`, which says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

from marl_parallel.core.spaces import fits_block

_Leaf = Callable[[Any], TensorSpec]


def _children(space: Space[Any]) -> list[tuple[str, Any, Space[Any]]] | None:
    """Of a space of several: names in tensordicts, keys in values, spaces; None for any other."""
    if isinstance(space, spaces.Dict):
        return [(str(key), key, child) for key, child in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [(str(place), place, child) for place, child in enumerate(space.spaces)]
    return None


def has_tensors(space: Space[Any]) -> bool:
    """Whether values of a space have a form in tensors."""
    children = _children(space)
    if children is not None:  # TorchRL loses those that are empty
        return fits_block(space) and bool(children) and all(has_tensors(child) for _, _, child in children)
    # Torch knows larger unsigned integers by name only: it can neither compare nor draw them.
    return fits_block(space) and space.dtype not in (np.uint16, np.uint32, np.uint64)


def without_tensors(space: Space[Any], path: str = "") -> str:
    """The first part of a space that has no form in tensors, with its place in the space; empty if there is none."""
    if has_tensors(space):
        return ""
    found = (without_tensors(child, f"{path}[{key!r}]") for _, key, child in _children(space) or [])
    return next(filter(None, found), f"{path}, {space}" if path else str(space))


def spec_of(space: Space[Any], shape: tuple[int, ...], leaf: _Leaf) -> TensorSpec:
    """The spec of a space for environments and agents of this shape."""
    children = _children(space)
    if children is not None:
        return Composite({name: spec_of(child, shape, leaf) for name, _, child in children}, shape=shape)
    spec = leaf(space)
    return spec.expand(*shape, *spec.shape)


def flag_spec(shape: tuple[int, ...]) -> TensorSpec:
    """The spec of flags and masks."""
    return Categorical(2, shape=shape, dtype=torch.bool)


def _bounded(low: Any, high: Any, dtype: Any) -> TensorSpec:
    bounds = [torch.from_numpy(np.array(bound, dtype)) for bound in (low, high)]
    limits = (-np.inf, np.inf) if np.dtype(dtype).kind == "f" else (0, 1)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype).min, np.iinfo(dtype).max
    shape, of_torch = bounds[0].shape, bounds[0].dtype
    if (np.asarray(low) == limits[0]).all() and (np.asarray(high) == limits[1]).all() and of_torch != torch.bool:
        return Unbounded(shape=shape, dtype=of_torch)
    return Bounded(*bounds, shape=shape, dtype=of_torch)


def action_leaf(space: Any) -> TensorSpec:
    """The spec of a space of actions that has no parts; whole numbers count from 0."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim == 1:
            return MultiCategorical(space.nvec, dtype=torch.int64)
        return _bounded(np.zeros_like(space.nvec), space.nvec - 1, np.int64)
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape[-1], shape=space.shape, dtype=torch.int8)
    return _bounded(space.low, space.high, space.dtype)


def observation_leaf(space: Any) -> TensorSpec:
    """The spec of a space of observations that has no parts, with zeros, which the rows of absent agents are."""
    dtype: Any
    if isinstance(space, spaces.MultiBinary):
        return action_leaf(space)
    if isinstance(space, spaces.Discrete):
        if space.start == 0:
            return action_leaf(space)
        low, high, dtype = space.start, space.start + space.n - 1, np.int64
    elif isinstance(space, spaces.MultiDiscrete):
        low, high, dtype = space.start, space.start + space.nvec - 1, space.dtype
    else:
        low, high, dtype = space.low, space.high, space.dtype
    return _bounded(np.minimum(low, 0), np.maximum(high, 0), dtype)


def tensors_of(values: Any, rows: slice | list[int], shape: tuple[int, int]) -> Any:
    """Some rows of stacked values; those of arrays share their memory where rows are a slice."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values[:, rows])
    items = values.items() if isinstance(values, dict) else enumerate(values)
    return TensorDict({str(key): tensors_of(value, rows, shape) for key, value in items}, batch_size=shape)


def arrays_of(space: Space[Any], value: Any) -> Any:
    """Actions in tensors as arrays, in the form of their space; whole numbers from where it starts."""
    children = _children(space)
    if children is not None:
        parts = {key: arrays_of(child, value.get(name)) for name, key, child in children}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    array = (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)  # NumPy has no bfloat16
    start = getattr(space, "start", None)
    if start is None or not np.any(start) or array.dtype.kind not in "biu":
        return array
    return array.astype(np.int64) + start
