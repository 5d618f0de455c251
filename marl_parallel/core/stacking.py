"""Values of a space, stacked: arrays with leading axes, in the dicts and tuples of the space.

Nothing here knows what the leading axes stand for; environments and agents, mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.core.values import Mismatch, as_array, fits_block

_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
_SEQUENCES = (list, tuple)
_WHOLE_NUMBERS = np.dtype(np.int64)


def zeros(space: Space[Any], shape: tuple[int, ...]) -> Any:
    """Zeros; what has no fixed form is an array of objects, of None.

    Example:
        >>> zeros(spaces.Dict({"seen": spaces.Box(0, 1, (2,))}), (3,))["seen"].shape
        (3, 2)
    """
    if isinstance(space, spaces.Dict):
        return {key: zeros(child, shape) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(zeros(child, shape) for child in space.spaces)
    if isinstance(space, spaces.Discrete):
        return np.zeros(shape, _WHOLE_NUMBERS)
    if isinstance(space, _ARRAYS):
        return np.zeros((*shape, *space.shape), space.dtype)
    return np.full(shape, None, object)


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
    if isinstance(space, spaces.Discrete):
        return as_array(values, _WHOLE_NUMBERS, shape)
    if isinstance(space, _ARRAYS):  # asked first: it takes long to see that something is no spaces.Dict
        return as_array(values, space.dtype, (*shape, *space.shape))
    if isinstance(space, spaces.Dict):
        parts = _children(space, values)
        return {key: conform(child, parts[key], shape) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(conform(child, part, shape) for child, part in zip(space.spaces, _parts(space, values)))
    return as_array(values, np.dtype(space.dtype), (*shape, *(space.shape or ())))


def each(function: Callable[[Any], Any], tree: Any) -> Any:
    """What a function makes of each array, in the same form; None stays None.

    Example:
        >>> each(abs, {"a": -1, "b": (-2, 3)})
        {'a': 1, 'b': (2, 3)}
    """
    if type(tree) is np.ndarray:  # as it mostly is
        return function(tree)
    if isinstance(tree, dict):
        return {key: each(function, child) for key, child in tree.items()}
    if isinstance(tree, _SEQUENCES):
        return type(tree)([each(function, part) for part in tree])
    return None if tree is None else function(tree)


def together(function: Callable[..., Any], *trees: Any) -> Any:
    """What a function makes of the arrays in the same place of several trees of one form; None stays None.

    Example:
        >>> together(max, {"a": 1, "b": (2, 30)}, {"a": 10, "b": (20, 3)})
        {'a': 10, 'b': (20, 30)}
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: together(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, _SEQUENCES):
        return type(first)([together(function, *parts) for parts in zip(*trees)])
    return None if first is None else function(*trees)


def copied(tree: Any) -> Any:
    """The same in arrays of one's own; what is no array stays what it is."""
    return each(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def whole(space: Space[Any], values: Any) -> Any:
    """Whole numbers that come as floats as integers, where the space wants these; all else as it is.

    Example:
        >>> whole(spaces.Discrete(3), [0.0, 2.0]), whole(spaces.Discrete(3), [0.5])
        (array([0, 2]), [0.5])
    """
    if not isinstance(space, (spaces.Discrete, *_ARRAYS)) or np.dtype(space.dtype).kind not in "iu":
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
    """Put one value where it belongs; a list may stand for a tuple.

    Args:
        stacked: Where.
        place: The environment and the row.
        value: In the form of the space.
        whose: For messages.
        path: Where in the whole value this is a part, for messages.

    Raises:
        ValueError: It is of another form, shape or dtype; the text has the keys of the part.
    """
    if isinstance(stacked, dict) and isinstance(value, dict) and stacked.keys() == value.keys():
        for key, child in stacked.items():
            put(child, place, value[key], whose, f"{path}[{key!r}]")
    elif isinstance(stacked, tuple) and isinstance(value, _SEQUENCES) and len(stacked) == len(value):
        for position, (child, part) in enumerate(zip(stacked, value)):
            put(child, place, part, whose, f"{path}[{position}]")
    elif isinstance(stacked, np.ndarray):
        try:
            stacked[place] = value if stacked.dtype == object else as_array(value, stacked.dtype, stacked.shape[2:])
        except Mismatch as error:
            raise ValueError(f"{_with_path(whose, path)}: {error}") from None
    else:
        form = f"a dict with the keys {[*stacked]}" if isinstance(stacked, dict) else f"a tuple of {len(stacked)}"
        raise ValueError(f"{_with_path(whose, path)}: expected {form}, as its space declares, got {value!r:.200}")


def _with_path(whose: str, path: str) -> str:
    return f"{whose}, at {path}" if path else whose


def clear(stacked: Any, place: Any) -> None:
    """Put zeros, or None, at a place."""
    if isinstance(stacked, np.ndarray):
        stacked[place] = None if stacked.dtype == object else 0
    else:
        for child in stacked.values() if isinstance(stacked, dict) else stacked:
            clear(child, place)


def column(stacked: Any, row: int) -> Any:
    """What is at one place of the second axis: views; values of no fixed form as a tuple."""
    if isinstance(stacked, dict):
        return {key: column(child, row) for key, child in stacked.items()}
    if isinstance(stacked, tuple):
        return tuple(column(child, row) for child in stacked)
    return tuple(stacked[:, row]) if stacked.dtype.hasobject else stacked[:, row]


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
    if not rows:
        return []
    if type(space) is spaces.Dict:
        parts = _children(space, values)
        columns = [picked(child, parts[key], rows, count) for key, child in space.spaces.items()]
        return [dict(zip(space.spaces, row)) for row in zip(*columns)] if columns else [{} for _ in rows]
    if type(space) is spaces.Tuple:
        columns = [picked(child, part, rows, count) for child, part in zip(space.spaces, _parts(space, values))]
        return [*zip(*columns)] if columns else [()] * len(rows)
    if not fits_block(space):
        if not isinstance(values, list | tuple | np.ndarray) or len(values) != count:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise Mismatch(f"expected a sequence of {count} values, got {got}")
        return [values[row] for row in rows]
    array = np.asarray(values)
    if array.shape[:1] != (count,):
        raise Mismatch(f"expected an array of shape {(count, *(space.shape or ()))}, got shape {array.shape}")
    dtype = _WHOLE_NUMBERS if isinstance(space, spaces.Discrete) else np.dtype(space.dtype)
    return [*as_array(array[rows], dtype, (len(rows), *(space.shape or ())))]


def _children(space: spaces.Dict, values: Any) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping) or values.keys() != space.spaces.keys():
        form = f"the keys {[*values]}" if isinstance(values, Mapping) else type(values).__name__
        raise Mismatch(f"expected a dict with the keys {[*space.spaces]}, got {form}")
    return values


def _parts(space: Space[Any], values: Any) -> tuple[Any, ...]:
    count = len(space.spaces)  # type: ignore[attr-defined]
    if not isinstance(values, _SEQUENCES) or len(values) != count:
        raise Mismatch(f"expected a tuple of {count}, got {type(values).__name__}")
    return tuple(values)
