"""Stacked values of a space: arrays with leading axes, in the dicts and tuples of the space.

The leading axes mostly stand for environments and agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.core.spaces import ARRAY_SPACES, Mismatch, as_array, fits_block, tree_map

_WHOLE_NUMBERS = np.dtype(np.int64)

each = together = tree_map


def zeros(space: Space[Any], shape: tuple[int, ...]) -> Any:
    """Zeros; what has no fixed form is an array of objects, of None.

    Example:
        >>> zeros(spaces.Dict({"seen": spaces.Box(0, 1, (2,))}), (3,))["seen"].shape
        (3, 2)
    """

    def of_leaf(leaf: Space[Any]) -> Any:
        if isinstance(leaf, spaces.Dict | spaces.Tuple):  # of a derived class
            return tree_map(of_leaf, leaf.spaces)
        if isinstance(leaf, spaces.Discrete):
            return np.zeros(shape, _WHOLE_NUMBERS)
        if isinstance(leaf, ARRAY_SPACES):
            return np.zeros((*shape, *leaf.shape), leaf.dtype)
        return np.full(shape, None, object)

    return tree_map(of_leaf, space)


def conform(space: Space[Any], values: Any, shape: tuple[int, ...]) -> Any:
    """Give arrays the dtype that their space declares; those of `Discrete` values are int64.

    Args:
        space: Of one value, of a fixed size.
        values: Stacked.
        shape: The leading axes.

    Raises:
        Mismatch: They are of another form, shape or dtype.

    Example:
        >>> conform(spaces.Discrete(3), [0, 2], (2,))
        array([0, 2])
    """
    check_form(space, values)
    return tree_map(lambda leaf, array: as_array(array, _dtype(leaf), (*shape, *(leaf.shape or ()))), space, values)


def check_form(space: Space[Any], values: Any) -> None:
    """Check the dicts and tuples of stacked values; a list may stand for a tuple.

    Raises:
        Mismatch: They have other keys or another length than their space.
    """
    if type(space) is spaces.Dict:
        if not isinstance(values, Mapping) or values.keys() != space.spaces.keys():
            form = f"a dict with the keys {[*values]}" if isinstance(values, Mapping) else type(values).__name__
            raise Mismatch(f"expected a dict with the keys {[*space.spaces]}, got {form}")
        for key, child in space.spaces.items():
            check_form(child, values[key])
    elif type(space) is spaces.Tuple:
        if not isinstance(values, list | tuple) or len(values) != len(space.spaces):
            raise Mismatch(f"expected a tuple of {len(space.spaces)}, got {type(values).__name__}")
        for child, part in zip(space.spaces, values):
            check_form(child, part)


def _dtype(space: Space[Any]) -> np.dtype[Any]:
    return _WHOLE_NUMBERS if isinstance(space, spaces.Discrete) else np.dtype(space.dtype)


def copied(tree: Any) -> Any:
    """The same in arrays of one's own; what is no array stays what it is."""
    return tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def whole(space: Space[Any], values: Any) -> Any:
    """Whole numbers that come as floats as integers, where the space wants these; all else as it is.

    Example:
        >>> whole(spaces.Discrete(3), [0.0, 2.0]), whole(spaces.Discrete(3), [0.5])
        (array([0, 2]), [0.5])
    """
    if not isinstance(space, (spaces.Discrete, *ARRAY_SPACES)) or np.dtype(space.dtype).kind not in "iu":
        return values
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return values
    with np.errstate(invalid="ignore"):
        integers = array.astype(_WHOLE_NUMBERS)
    return integers if np.array_equal(integers, array) else values


def one_by_one(stacked: Any, count: int) -> Sequence[Any]:
    """The values along the first axis; arrays among them are views.

    Example:
        >>> one_by_one({"a": np.arange(2), "b": np.arange(2)}, 2) == [{"a": 0, "b": 0}, {"a": 1, "b": 1}]
        True
    """
    if isinstance(stacked, dict):
        if not stacked:
            return [{} for _ in range(count)]
        columns = zip(*[one_by_one(child, count) for child in stacked.values()])
        return [dict(zip(stacked, row)) for row in columns]
    if isinstance(stacked, tuple):
        return [*zip(*[one_by_one(part, count) for part in stacked])] or [()] * count
    return [*stacked]


def placed(whole: NDArray[Any], rows: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """A copy of an array with other values in some rows."""
    whole = whole.copy()
    whole[rows] = values
    return whole


def put(stacked: Any, place: tuple[int, int], value: Any, whose: str, path: str = "") -> None:
    """Put one value into its place; a list may stand for a tuple.

    Args:
        stacked: The arrays to write to.
        place: The environment and the row.
        value: In the form of the space.
        whose: For messages.
        path: The keys of this part in the whole value, for messages.

    Raises:
        ValueError: It is of another form, shape or dtype; the text has the keys of the part.
    """
    where = f"{whose}, at {path}" if path else whose
    if isinstance(stacked, dict) and isinstance(value, dict) and stacked.keys() == value.keys():
        for key, child in stacked.items():
            put(child, place, value[key], whose, f"{path}[{key!r}]")
    elif isinstance(stacked, tuple) and isinstance(value, list | tuple) and len(stacked) == len(value):
        for position, (child, part) in enumerate(zip(stacked, value)):
            put(child, place, part, whose, f"{path}[{position}]")
    elif isinstance(stacked, np.ndarray):
        try:
            stacked[place] = value if stacked.dtype == object else as_array(value, stacked.dtype, stacked.shape[2:])
        except Mismatch as error:
            raise ValueError(f"{where}: {error}") from None
    else:
        form = f"a dict with the keys {[*stacked]}" if isinstance(stacked, dict) else f"a tuple of {len(stacked)}"
        raise ValueError(f"{where}: expected {form}, as its space declares, got {value!r:.200}")


def clear(stacked: Any, place: Any) -> None:
    """Put zeros, or None, at a place."""

    def clear_leaf(array: NDArray[Any]) -> None:
        array[place] = None if array.dtype == object else 0

    tree_map(clear_leaf, stacked)


def column(stacked: Any, row: int) -> Any:
    """The values at one place of the second axis: views; values of no fixed form as a tuple."""
    return tree_map(lambda array: tuple(array[:, row]) if array.dtype.hasobject else array[:, row], stacked)


def flat(stacked: NDArray[Any]) -> NDArray[Any]:
    """The first two axes as one; a view, where they can be.

    Example:
        >>> flat(np.zeros((2, 3, 4))).shape
        (6, 4)
    """
    rows, several, *shape = stacked.shape
    merged: NDArray[Any] = stacked[:, 0] if several == 1 else stacked.reshape(rows * several, *shape)
    return merged


def picked(space: Space[Any], values: Any, rows: Sequence[int], count: int) -> Sequence[Any]:
    """Some of many values, one by one, in the dtypes that their space declares; no other is looked at.

    Args:
        space: Of one value.
        values: Stacked; what has no fixed form as a sequence.
        rows: Which.
        count: How many there are.

    Raises:
        Mismatch: They are not so many, or those are of another form, shape or dtype.

    Example:
        >>> [*map(int, picked(spaces.Discrete(3), np.array([2, -1, 0]), [0, 2], 3))]
        [2, 0]
    """

    def of_leaf(leaf: Space[Any], given: Any) -> Any:
        if not fits_block(leaf):
            if not isinstance(given, list | tuple | np.ndarray) or len(given) != count:
                got = f"{len(given)} values" if isinstance(given, list | tuple) else type(given).__name__
                raise Mismatch(f"expected a sequence of {count} values, got {got}")
            return [given[row] for row in rows]
        array, shape = np.asarray(given), leaf.shape or ()
        if array.shape[:1] != (count,):
            raise Mismatch(f"expected an array of shape {(count, *shape)}, got shape {array.shape}")
        return as_array(array[rows], _dtype(leaf), (len(rows), *shape))

    if not rows:
        return []
    check_form(space, values)
    return one_by_one(tree_map(of_leaf, space, values), len(rows))
