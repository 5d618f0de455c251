"""Stacked values of a space: arrays with leading axes (mostly environments, agents) in the space's dicts and tuples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.core.spaces import ARRAY_SPACES, Mismatch, as_array, check_form, fits_block, tree_map
from marl_parallel.core.spaces import copied as copied


def zeros(space: Space[Any], shape: tuple[int, ...]) -> Any:
    """Zeros with these leading axes; an array of None for a space without a fixed form."""
    if isinstance(space, spaces.Dict | spaces.Tuple):  # of a derived class too, which `tree_map` takes for a leaf
        return tree_map(lambda part: zeros(part, shape), space.spaces)
    if isinstance(space, spaces.Discrete):
        return np.zeros(shape, space.dtype)
    if isinstance(space, ARRAY_SPACES):
        return np.zeros((*shape, *space.shape), space.dtype)
    return np.full(shape, None, object)


def conform(space: Space[Any], values: Any, shape: tuple[int, ...]) -> Any:
    """Cast stacked values with these leading axes to the dtype of their space; raises `Mismatch`."""

    def of_leaf(leaf: Space[Any], array: Any) -> NDArray[Any]:
        return as_array(array, np.dtype(leaf.dtype), (*shape, *(leaf.shape or ())))

    return tree_map(of_leaf, space, values, form=check_form)


def picked(space: Space[Any], values: Any, rows: Sequence[int], count: int) -> Sequence[Any]:
    """The values at `rows` of `count` stacked values, in the dtypes of their space; other rows may be anything.

    Raises `Mismatch` for another number of values, or if a value of `rows` has another form, shape or dtype.
    """

    def of_leaf(leaf: Space[Any], stack: Any) -> Any:
        if not fits_block(leaf):
            if not isinstance(stack, list | tuple | np.ndarray) or len(stack) != count:
                got = f"{len(stack)} values" if isinstance(stack, list | tuple) else type(stack).__name__
                raise Mismatch(f"expected a sequence of {count} values, got {got}")
            return [stack[row] for row in rows]
        array, shape = np.asarray(stack), leaf.shape or ()
        if array.shape[:1] != (count,):
            raise Mismatch(f"expected an array of shape {(count, *shape)}, got shape {array.shape}")
        return as_array(array[rows], np.dtype(leaf.dtype), (len(rows), *shape))

    return one_by_one(tree_map(of_leaf, space, values, form=check_form), len(rows)) if rows else []


def whole(space: Space[Any], values: Any) -> Any:
    """Whole numbers, also in floats, in the dtype of the space, if that is an integer dtype that holds them.

    Any other values stay as they are.
    """
    if not isinstance(space, (spaces.Discrete, *ARRAY_SPACES)) or np.dtype(space.dtype).kind not in "iu":
        return values
    array = np.asarray(values)
    if array.dtype == space.dtype or array.dtype.kind not in "biuf":
        return values
    with np.errstate(invalid="ignore"):
        integers = array.astype(space.dtype)
    return integers if np.array_equal(integers, array) else values


def one_by_one(stacked: Any, count: int) -> Sequence[Any]:
    """The values along the first axis, as a list of `count` trees; arrays among them are views."""
    if not isinstance(stacked, dict | tuple):
        return [*stacked]
    # By columns rather than by `tree_map` for each row, which takes several times as long.
    parts = [one_by_one(part, count) for part in (stacked.values() if isinstance(stacked, dict) else stacked)]
    rows = zip(*parts) if parts else [()] * count
    return [dict(zip(stacked, row)) for row in rows] if isinstance(stacked, dict) else [*rows]


def put(stacked: Any, index: tuple[int, int], value: Any, whose: str) -> None:
    """Put one value at an index (environment, row); `ValueError` if it does not fit."""

    def put_leaf(array: NDArray[Any], part: Any) -> None:
        array[index] = part if array.dtype == object else as_array(part, array.dtype, array.shape[2:])

    try:
        tree_map(put_leaf, stacked, value, form=partial(check_form, remark=", as its space declares"))
    except Mismatch as error:
        where = f"{whose}, at {error.path}" if error.path else whose
        raise ValueError(f"{where}: {error}") from None


def placed(whole: Any, rows: NDArray[Any], values: Any) -> Any:
    """A copy of stacked values, with other values in some rows."""

    def with_rows(array: NDArray[Any], part: NDArray[Any]) -> NDArray[Any]:
        array = array.copy()
        array[rows] = part
        return array

    return tree_map(with_rows, whole, values)


def clear(stacked: Any, index: Any) -> None:
    """Put zeros, or None, at an index."""

    def clear_leaf(array: NDArray[Any]) -> None:
        array[index] = None if array.dtype == object else 0

    tree_map(clear_leaf, stacked)


def row(stacked: Any, env_id: int) -> Any:
    """Views of the values of one environment, which keep the first axis."""
    return tree_map(lambda array: array[env_id : env_id + 1], stacked)


def column(stacked: Any, row: int) -> Any:
    """Views of the values at one index of the second axis; a tuple for values without a fixed form."""
    if type(stacked) is np.ndarray and not stacked.dtype.hasobject:  # the most frequent
        return stacked[:, row]
    return tree_map(lambda array: tuple(array[:, row]) if array.dtype.hasobject else array[:, row], stacked)


def flat(stacked: NDArray[Any]) -> NDArray[Any]:
    """The first two axes as one; a view if possible."""
    rows, several, *shape = stacked.shape
    return stacked[:, 0] if several == 1 else stacked.reshape(rows * several, *shape)


def are_equal_arrays(values: Sequence[Any]) -> bool:
    """Whether all values are arrays of one shape and dtype, which `np.stack` keeps."""
    first = values[0]
    if type(first) is not np.ndarray or first.dtype.hasobject or not first.dtype.isnative:
        return False
    dtype, shape = first.dtype, first.shape
    return all(type(one) is np.ndarray and one.dtype == dtype and one.shape == shape for one in values)
