"""Declared values: their shapes and dtypes, and their names in infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.rollouts.arrays import Extra


def declared(what: str, declared: Mapping[str, Extra | tuple[int, ...]] | None) -> dict[str, Extra]:
    """Extras or infos by name; `TypeError` if one is not a shape or an `Extra`."""
    for name, extra in (declared or {}).items():
        if not isinstance(extra, tuple):
            raise TypeError(f"{what}[{name!r}] must be a shape or an Extra, got {extra!r}")
    return {name: one if isinstance(one, Extra) else Extra(one) for name, one in (declared or {}).items()}


def shaped(what: str, value: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A value as an array of this shape; `ValueError` if it has another one, or values that the dtype cannot hold."""
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever its `__array__` raises
        raise ValueError(f"{what} must be numbers of shape {shape}, got {type(value).__name__} ({error})") from error
    are_numbers = array.dtype.kind in "biufc" or np.dtype(dtype).kind not in "biufc"
    if array.shape != shape or not are_numbers:
        got = f"shape {array.shape}" if are_numbers else f"{value!r:.200}"
        raise ValueError(f"{what} must be numbers of shape {shape}, got {got}")
    if np.dtype(dtype).kind in "biu" and not np.can_cast(array.dtype, dtype):
        with np.errstate(invalid="ignore"):  # NaN and infinity
            lost = array.astype(dtype) != array
        if lost.any():
            raise ValueError(f"{what} is {array[lost].flat[0]}, which its dtype {np.dtype(dtype)} cannot hold")
    return array


def named_in(info: Any, name: str) -> Any:
    """A value of an info, or of nested dicts, whose keys are joined by "/"; None if there is none."""
    if not isinstance(info, Mapping):
        return None
    if name in info:
        return info[name]
    first, _, rest = name.partition("/")
    return named_in(info.get(first), rest) if rest else None
