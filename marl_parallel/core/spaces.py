"""Values of a space: trees of dicts and tuples with arrays and numbers as leaves.

This module casts one value to its space, decides whether values of a space have a fixed size, walks trees, and builds
functions that make dicts of fixed keys quickly. Stacks of values are in `stacking.py`, values in the block in
`columns.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

ARRAY_SPACES = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose values are arrays."""
_FIXED_SIZE = (spaces.Discrete, *ARRAY_SPACES)
_SEQUENCES = (list, tuple)


class Mismatch(ValueError):
    """A value that is not what its space declares; the text says what was expected and what came."""


class DoesNotFit(Exception):
    """A valid value that has no place in the block; it travels pickled instead."""


# -- trees -------------------------------------------------------------------------------------------------------------


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of a tree, or of a space, and to what other trees have in the same places.

    Args:
        function: Takes one leaf of each tree.
        tree: Dicts, lists and tuples of leaves; or a space, whose leaves are those of `leaves`.
        others: Trees of the same form.

    Returns:
        A tree of the same form: dicts for `spaces.Dict`, tuples for `spaces.Tuple`. None stays None.

    Example:
        >>> tree_map(abs, {"a": -1, "b": (-2, 3)})
        {'a': 1, 'b': (2, 3)}
        >>> tree_map(lambda space, value: int(space.n) * value, spaces.Dict(x=spaces.Discrete(3)), {"x": 2})
        {'x': 6}
    """
    kind = type(tree)
    if kind is np.ndarray or kind in _FIXED_SIZE:  # the most frequent; `isinstance` of a `spaces.Dict` takes long
        return function(tree, *others)
    if isinstance(tree, dict):
        return {key: tree_map(function, part, *[other[key] for other in others]) for key, part in tree.items()}
    if isinstance(tree, _SEQUENCES):
        return kind([tree_map(function, *parts) for parts in zip(tree, *others)])
    if kind is spaces.Dict or kind is spaces.Tuple:
        return tree_map(function, tree.spaces, *others)
    return None if tree is None else function(tree, *others)


def leaves(space: Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space[Any]]]:
    """The leaves of a space, each with its path: keys of `Dict`s and positions in `Tuple`s.

    A class derived from `Dict` or `Tuple` is a leaf: its values may have any form.
    """
    if type(space) is spaces.Dict:
        children: Iterable[tuple[Any, Space[Any]]] = space.spaces.items()
    elif type(space) is spaces.Tuple:
        children = enumerate(space.spaces)
    else:
        yield path, space
        return
    for key, child in children:
        yield from leaves(child, (*path, key))


def fits_block(space: Space[Any]) -> bool:
    """Whether values of a space have a fixed size, so that they can lie in the block."""
    return all(type(leaf) in _FIXED_SIZE for _, leaf in leaves(space))


def unfit_leaf(space: Space[Any]) -> str:
    """The first part of a space whose values have no fixed size, with its path; empty if there is none.

    Example:
        >>> unfit_leaf(spaces.Dict({"image": spaces.Box(0, 1), "mission": spaces.Text(9)}))
        "['mission'], Text(1, 9, charset=...)"
    """
    for path, leaf in leaves(space):
        if type(leaf) not in _FIXED_SIZE:
            return f"{''.join(f'[{key!r}]' for key in path)}, {leaf}" if path else str(leaf)
    return ""


def split(space: Space[Any], values: list[Any], columns: list[list[Any]]) -> None:
    """Append one list for each leaf of a space to `columns`: the parts of all values.

    Raises:
        DoesNotFit: A value is not of the form of the space.
    """
    if type(space) is spaces.Dict:
        keys = space.spaces.keys()
        for value in values:
            if not isinstance(value, dict) or value.keys() != keys:
                raise DoesNotFit
        children: Iterable[tuple[Any, Space[Any]]] = space.spaces.items()
    elif type(space) is spaces.Tuple:
        size = len(space.spaces)
        for value in values:
            if type(value) is not tuple or len(value) != size:
                raise DoesNotFit
        children = enumerate(space.spaces)
    else:
        columns.append(values)
        return
    for key, child in children:
        parts = [value[key] for value in values]
        if type(child) in _FIXED_SIZE:
            columns.append(parts)
        else:
            split(child, parts, columns)


_MOST_LEAVES = 256
"""Trees with more leaves are built without compiled code: compiling takes time quadratic in their number."""


def builder(tree: Any) -> Callable[..., Any]:
    """A function that takes one value for each leaf of a tree and returns a tree of this form with these values.

    It is compiled, at half the price of `dict(zip(keys, values))`. Empty dicts and tuples are new in each result.

    Args:
        tree: Dicts and tuples, or a space; what its leaves are does not matter.

    Example:
        >>> builder({"a": 0, "b": (0, {})})(1, 2)
        {'a': 1, 'b': (2, {})}
    """
    source, keys, count = _source(tree)
    if max(count, len(keys)) > _MOST_LEAVES:
        return lambda *values: _filled(tree, iter(values))
    return _compiled(f"lambda {_names('v', count)}: {source}", keys)


def rows_builder(tree: Any) -> Callable[[Iterable[Any]], list[Any]]:
    """A function that takes rows with one value for each leaf and returns a list with a tree of each; see `builder`.

    Example:
        >>> rows_builder({"a": 0, "b": 0})([(1, 2), (3, 4)])
        [{'a': 1, 'b': 2}, {'a': 3, 'b': 4}]
    """
    source, keys, count = _source(tree)
    if max(count, len(keys)) > _MOST_LEAVES:
        return lambda rows: [_filled(tree, iter(row)) for row in rows]
    return _compiled(f"lambda rows: [{source} for ({_names('v', count)}) in rows]", keys)


def _filled(tree: Any, values: Iterator[Any]) -> Any:
    return tree_map(lambda _: next(values), tree)


def _source(tree: Any) -> tuple[str, list[Any], int]:
    """The source of an expression for a tree; the keys it names; the number of its leaves."""
    keys: list[Any] = []
    count = 0

    def of(part: Any) -> str:
        nonlocal count
        if type(part) in (spaces.Dict, spaces.Tuple):
            part = part.spaces
        if isinstance(part, dict):
            entries = []
            for key, child in part.items():
                keys.append(key)
                entries.append(f"k{len(keys) - 1}: {of(child)}")
            return "{" + ", ".join(entries) + "}"
        if isinstance(part, tuple):
            return "(" + "".join(f"{of(child)}, " for child in part) + ")"
        count += 1
        return f"v{count - 1}"

    return of(tree), keys, count


def _names(letter: str, count: int) -> str:
    return "".join(f"{letter}{place}, " for place in range(count))


def _compiled(source: str, keys: list[Any]) -> Callable[..., Any]:
    # The source holds numbered names only; the keys themselves, whatever they are, come in as arguments.
    make: Callable[..., Any] = eval(f"lambda {_names('k', len(keys))}: {source}")(*keys)
    return make


# -- one value ---------------------------------------------------------------------------------------------------------


def conform(space: Space[Any], value: Any) -> Any:
    """Give the arrays in a value the dtype that their space declares; everything else stays as it is.

    Args:
        space: The declared space.
        value: The value of the simulator or the caller. Parts that are not of the form of the space are left alone.

    Returns:
        The value, with each `Box`, `MultiDiscrete` and `MultiBinary` leaf an array of the space's dtype.

    Raises:
        Mismatch: An array has another shape, or a dtype that cannot be cast without loss of meaning.

    Example:
        >>> conform(spaces.Box(0, 1, (2,), np.float32), [0.5, 1.0]).dtype
        dtype('float32')
    """
    kind = type(space)
    if kind in ARRAY_SPACES:
        return value if value is None else as_array(value, np.dtype(space.dtype), space.shape)  # type: ignore[arg-type]
    if isinstance(space, spaces.Dict) and kind is spaces.Dict and isinstance(value, dict):
        return {k: conform(space.spaces[k], v) if k in space.spaces else v for k, v in value.items()}
    if isinstance(space, spaces.Tuple) and kind is spaces.Tuple and type(value) in _SEQUENCES:
        if len(value) != len(space.spaces):
            return value
        if type(value) is tuple:
            return tuple(map(conform, space.spaces, value))
        try:  # a list in place of a tuple stays a list, unchanged where it does not fit the space
            return [*map(conform, space.spaces, value)]
        except Mismatch:
            return value
    return value


def conform_action(space: Space[Any], action: Any) -> Any:
    """As `conform`, but parts that are missing in an action are an error. None stays None.

    Raises:
        Mismatch: As there; or a dict has not all keys, or a tuple another length.

    Example:
        >>> conform_action(spaces.Dict({"go": spaces.Discrete(3)}), {"go": 2})
        {'go': 2}
    """
    if action is None:
        return None
    if type(space) is spaces.Dict:
        if not isinstance(action, Mapping) or not action.keys() >= space.spaces.keys():
            got = f"the keys {[*action]}" if isinstance(action, Mapping) else repr(action)
            raise Mismatch(f"expected a dict with the keys {[*space.spaces]}, got {got}")
        return {k: conform_action(space.spaces[k], v) if k in space.spaces else v for k, v in action.items()}
    if type(space) is spaces.Tuple:
        if not isinstance(action, _SEQUENCES) or len(action) != len(space.spaces):
            raise Mismatch(f"expected a tuple of {len(space.spaces)}, got {action!r}")
        if isinstance(action, tuple):
            return tuple(map(conform_action, space.spaces, action))
        action = [*action]
    return conform(space, action)


def as_array(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Turn one value into an array of exactly this dtype and shape.

    Raises:
        Mismatch: It has another shape, or numbers that the dtype does not hold.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever its `__array__` raises
        raise _mismatch(dtype, shape, f"{type(value).__name__} ({error})") from error
    if array.shape != shape:
        raise _mismatch(dtype, shape, f"shape {array.shape}")
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "bui" and dtype.kind in "bui":
        # NumPy would wrap some integers round and refuse others; what counts is that the numbers stay the same.
        cast = array.astype(dtype)
        if not np.array_equal(cast, array):
            raise _mismatch(dtype, shape, f"{array.dtype} values that {dtype} cannot hold")
        return cast
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise _mismatch(dtype, shape, f"dtype {array.dtype}, which cannot be cast to it")
    return array.astype(dtype)


def _mismatch(dtype: np.dtype[Any], shape: tuple[int, ...], got: str) -> Mismatch:
    return Mismatch(f"expected an array of shape {shape} and dtype {dtype}, got {got}")


def numbers_of(array: NDArray[Any], kind: type) -> list[Any]:
    """The elements of an array, in its order, as Python or NumPy scalars of one type that holds them all."""
    if issubclass(kind, np.generic):
        return [*array.astype(kind).ravel()]
    numbers = array.ravel().tolist()
    return numbers if not numbers or type(numbers[0]) is kind else [*map(kind, numbers)]


def is_vector(reward: Any) -> bool:
    """Whether a reward has axes, as an array or as nested sequences; a number, None and a dict have none.

    Example:
        >>> is_vector(np.zeros(2)), is_vector([1, 2.0]), is_vector(np.float32(1)), is_vector(None)
        (True, True, False, False)
    """
    return reward.ndim > 0 if isinstance(reward, np.ndarray) else isinstance(reward, list | tuple)


def zeros(space: Space[Any]) -> Any:
    """A value of zeros; None for each part without a fixed form."""
    return tree_map(_zero, space)


def _zero(space: Space[Any]) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):  # of a derived class
        return zeros(space.spaces)  # type: ignore[arg-type]
    if isinstance(space, spaces.Discrete):
        return 0
    return None if space.shape is None or not fits_block(space) else np.zeros(space.shape, space.dtype)
