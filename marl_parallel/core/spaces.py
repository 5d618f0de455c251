"""Spaces and their values: trees of dicts and tuples, with arrays and numbers as leaves.

`tree_map` walks every kind of tree: spaces, values, and stacks of values (`stacking.py`). `conform` casts one value to
its space. `schema.py` compares spaces, `joining.py` joins them.
"""

from __future__ import annotations

import copy
import functools
import reprlib
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
    """A value does not match its space; the text names the expected value and the actual one.

    Attributes:
        path: The keys that lead to the part in its tree, such as `['eyes'][1]`; empty for the whole value.
    """

    path = ""


class Unreadable(Mismatch):
    """A reward or a flag raises an exception when it is read as a number or a truth value."""


def unreadable(what: str, expected: str, value: Any, error: Exception) -> Unreadable:
    """The error for a value `what`: `expected` says what it must be, and reading it raised `error`."""
    reason = f"which raises {type(error).__name__}: {error}"
    return Unreadable(f"{what} must be {expected}, got {_REPR.repr(value)} of type {type(value).__name__}, {reason}")


_REPR = reprlib.Repr()  # works for objects whose `repr` raises
_REPR.maxother = 200


# -- trees -------------------------------------------------------------------------------------------------------------


def tree_map(
    function: Callable[..., Any], tree: Any, *others: Any, form: Callable[[Any, Iterable[Any]], None] | None = None
) -> Any:
    """Apply a function to the leaves of a tree, or of a space, and to the parts of other trees at the same paths.

    Args:
        function: Takes one leaf of each tree.
        tree: Dicts, lists and tuples of leaves; or a space, whose leaves are those of `leaves`.
        others: Trees of the same form.
        form: Called with each dict or tuple of `tree` and the same parts of `others`; raises if the form differs.

    Returns:
        A tree of the same form: dicts for `spaces.Dict`, tuples for `spaces.Tuple`. None stays None.

    Example:
        >>> tree_map(abs, {"a": -1, "b": (-2, 3)})
        {'a': 1, 'b': (2, 3)}
        >>> tree_map(lambda space, value: int(space.n) * value, spaces.Dict(x=spaces.Discrete(3)), {"x": 2})
        {'x': 6}
    """
    kind = type(tree)
    if kind is np.ndarray or kind in _FIXED_SIZE:  # the most frequent; `isinstance` with `spaces.Dict` is slow
        return function(tree, *others)
    if kind is spaces.Dict or kind is spaces.Tuple:
        tree = tree.spaces
    is_dict = isinstance(tree, dict)
    if not is_dict and not isinstance(tree, _SEQUENCES):
        return None if tree is None else function(tree, *others)
    if form is not None:
        form(tree, others)
    mapped = {}
    for key, part in tree.items() if is_dict else enumerate(tree):
        try:
            mapped[key] = tree_map(function, part, *[other[key] for other in others], form=form)
        except Mismatch as error:
            error.path = f"[{key!r}]{error.path}"
            raise
    return mapped if is_dict else type(tree)(mapped.values())


def check_form(tree: Any, others: Iterable[Any], remark: str = "") -> None:
    """Raise `Mismatch` if one of `others` has other keys or another length; a list may replace a tuple."""
    for other in others:
        if isinstance(tree, dict):
            if not isinstance(other, Mapping) or other.keys() != tree.keys():
                got = f"the keys {[*other]}" if isinstance(other, Mapping) else f"{other!r:.200}"
                raise Mismatch(f"expected a dict with the keys {[*tree]}{remark}, got {got}")
        elif not isinstance(other, _SEQUENCES) or len(other) != len(tree):
            raise Mismatch(f"expected a tuple of {len(tree)}{remark}, got {other!r:.200}")


def leaves(space: Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space[Any]]]:
    """The leaves of a space, each with its path; a space of a class derived from `Dict` or `Tuple` is a leaf."""
    if type(space) is not spaces.Dict and type(space) is not spaces.Tuple:
        yield path, space
        return
    for key, child in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
        yield from leaves(child, (*path, key))


def fits_block(space: Space[Any]) -> bool:
    """Whether values of a space have a fixed size, so that they can lie in the block."""
    return all(type(leaf) in _FIXED_SIZE for _, leaf in leaves(space))


def unfit_leaf(space: Space[Any]) -> str:
    """The first leaf of a space whose values have no fixed size, with its path; empty if all sizes are fixed."""
    for path, leaf in leaves(space):
        if type(leaf) not in _FIXED_SIZE:
            return f"{''.join(f'[{key!r}]' for key in path)}, {leaf}" if path else str(leaf)
    return ""


# -- choices that count from 0 -----------------------------------------------------------------------------------------


def from_zero(space: Any) -> Any:
    """The same space, with the choices of every `Discrete` and `MultiDiscrete` part counted from 0.

    Example:
        >>> from_zero(spaces.Dict(go=spaces.Discrete(3, start=5), aim=spaces.Box(0, 1)))["go"]
        Discrete(3)
    """
    if not starts_elsewhere(space):
        return space
    copied = copy.deepcopy(space)
    for _, leaf in leaves(copied):
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            leaf.start = leaf.start * 0
    return copied


def starts_elsewhere(space: Space[Any]) -> bool:
    """Whether some choices of a space do not count from 0."""
    return any(
        isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) and np.any(leaf.start) for _, leaf in leaves(space)
    )


def to_start(space: Space[Any], values: Any) -> Any:
    """Convert values of `from_zero(space)`, one or stacked, to values of the space: integers of its dtype.

    Values that do not match the space stay as they are: the simulator or its checks refuse them.
    """
    return _moved(space, values, 1)


def to_zero(space: Space[Any], values: Any) -> Any:
    """Convert values of `space` to values of `from_zero(space)`."""
    return _moved(space, values, -1)


def _moved(space: Any, values: Any, sign: int) -> Any:
    kind = type(space)
    if kind is spaces.Dict and isinstance(values, Mapping):
        return {k: _moved(space[k], part, sign) if k in space.spaces else part for k, part in values.items()}
    if kind is spaces.Tuple and isinstance(values, _SEQUENCES) and len(values) == len(space):
        return type(values)(_moved(child, part, sign) for child, part in zip(space, values))
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete) or values is None:
        return values
    if type(values) is int and isinstance(space, spaces.Discrete):
        return values + sign * int(space.start)
    array = np.asarray(values)
    shape = space.shape or ()
    if array.dtype.kind not in "biu" or array.shape[array.ndim - len(shape) :] != shape:
        return values
    moved = array.astype(np.int64) + sign * np.asarray(space.start, np.int64)
    cast = moved.astype(space.dtype)
    return (cast if np.array_equal(cast, moved) else moved)[()]


# -- one value ---------------------------------------------------------------------------------------------------------


def conform(space: Space[Any], value: Any, *, strict: bool = False, copy: bool = False) -> Any:
    """Give the arrays in a value the dtype that their space declares; everything else stays as it is.

    The result has the form of the value, not of the space: it keeps unknown keys, and a list may replace a tuple.

    Args:
        space: The declared space.
        value: The value of the simulator or the caller; None stays None.
        strict: The rules of actions: missing keys and another length raise, and a `Discrete` takes any value. Else
            such parts stay as they are, and the value of a `Discrete` has no axes.
        copy: Whether arrays are copies that may be written to; else they may be those of the value.

    Raises:
        Mismatch: A value has another shape, or an array has a dtype that cannot be cast without loss of meaning.

    Example:
        >>> conform(spaces.Box(0, 1, (2,), np.float32), [0.5, 1.0]).dtype
        dtype('float32')
    """
    kind = type(space)
    if value is None or (kind is not spaces.Dict and kind is not spaces.Tuple):
        if value is not None and kind in ARRAY_SPACES:
            array = as_array(value, np.dtype(space.dtype), space.shape)  # type: ignore[arg-type]
            return array.copy() if copy else array
        if kind is spaces.Discrete and not strict:
            check_no_axes(value, np.dtype(space.dtype))
        return value.copy() if copy and isinstance(value, np.ndarray) else value
    parts: Any = space.spaces  # type: ignore[attr-defined]
    part_of = functools.partial(conform, strict=strict, copy=copy)
    if isinstance(parts, dict):
        if isinstance(value, Mapping) and (value.keys() >= parts.keys() if strict else isinstance(value, dict)):
            ordered = {**{key: value[key] for key in parts if key in value}, **value}  # in the order of the space
            return {k: part_of(parts[k], v) if k in parts else v for k, v in ordered.items()}
    elif (strict or type(value) in _SEQUENCES) and isinstance(value, _SEQUENCES) and len(value) == len(parts):
        if isinstance(value, tuple):
            return tuple(map(part_of, parts, value))
        try:
            return [*map(functools.partial(conform, copy=copy), parts, value)]
        except Mismatch:
            return value
    if strict:
        check_form(parts, [value])
    return value


def as_array(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Turn a value into an array of exactly this dtype and shape; raises `Mismatch` if that would change numbers."""
    try:
        array = np.asarray(value)
    except Exception as error:  # `__array__` may raise anything
        raise _mismatch(dtype, shape, f"{type(value).__name__} ({error})") from error
    if array.shape != shape:
        has_numbers = array.dtype.kind in "biufc" or isinstance(value, np.ndarray)
        raise _mismatch(dtype, shape, f"shape {array.shape}" if has_numbers else described(value))
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "bui" and dtype.kind in "bui":
        # NumPy would wrap some integers around and refuse others; the check is that the numbers stay equal.
        cast = array.astype(dtype)
        if not np.array_equal(cast, array):
            raise _mismatch(dtype, shape, f"{array.dtype} values that {dtype} cannot hold")
        return cast
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise _mismatch(dtype, shape, f"dtype {array.dtype}, which cannot be cast to it")
    try:
        return array.astype(dtype)
    except FloatingPointError:  # `numpy.seterr` of the script or the simulator; rounding a tiny number is no error
        with np.errstate(under="ignore"):
            return array.astype(dtype)


def check_no_axes(value: Any, dtype: np.dtype[Any]) -> None:
    """Raise `Mismatch` if the value of a `Discrete` of this dtype has axes, such as an array of shape `(1,)`."""
    is_sequence = isinstance(value, list | tuple)
    shape = () if is_sequence else tuple(getattr(value, "shape", ()))
    if is_sequence or shape:
        got = described(value) if is_sequence else f"shape {shape}"
        raise Mismatch(f"expected an integer, or an array of shape () and dtype {dtype}, got {got}")


def described(value: Any) -> str:
    """Describe a value that is not an array of numbers, for an error message."""
    if not isinstance(value, Mapping):
        return f"{_REPR.repr(value)} of type {type(value).__name__}"
    keys = ", ".join(_REPR.repr(key) for key in value)
    return f"a {type(value).__name__} with the keys {keys}; a dict needs a spaces.Dict with these keys"


def _mismatch(dtype: np.dtype[Any], shape: tuple[int, ...], got: str) -> Mismatch:
    return Mismatch(f"expected an array of shape {shape} and dtype {dtype}, got {got}")


def has_scalars(space: Space[Any]) -> bool:
    """Whether a part of a space has arrays without axes, such as a `Box` of shape `()`."""
    return any(type(leaf) in ARRAY_SPACES and leaf.shape == () for _, leaf in leaves(space))


def as_scalars(space: Space[Any], value: Any) -> Any:
    """A value with NumPy scalars in place of arrays without axes, as Gymnasium's `iterate` returns them."""
    if type(space) is spaces.Dict and isinstance(value, dict):
        return {key: as_scalars(space[key], part) if key in space.spaces else part for key, part in value.items()}
    if type(space) is spaces.Tuple and isinstance(value, tuple) and len(value) == len(space):
        return tuple(map(as_scalars, space, value))
    is_scalar = type(space) in ARRAY_SPACES and space.shape == () and isinstance(value, np.ndarray)
    return value[()] if is_scalar else value


def is_vector(reward: Any) -> bool:
    """Whether a reward has axes, as an array or as nested sequences; a number, None and a dict have none."""
    return reward.ndim > 0 if isinstance(reward, np.ndarray) else isinstance(reward, list | tuple)


_OWN_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, np.ndarray, np.generic, type(None))


def check_reward(agent: Any, reward: Any) -> None:
    """Raise `Unreadable` if a reward of another library's type, such as a tensor, raises when it is read as numbers.

    Values that are not numbers, such as texts, do not raise: they travel as they are.
    """
    if isinstance(reward, _OWN_TYPES) or not (hasattr(reward, "__float__") or hasattr(reward, "__array__")):
        return
    try:
        np.array(reward, np.float64)
    except Exception as error:
        raise unreadable(f"the reward of agent {agent!r}", "a number", reward, error) from error


def copied(tree: Any) -> Any:
    """A tree with copies of its arrays; other leaves stay the same objects."""
    return tree_map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def zeros(space: Space[Any]) -> Any:
    """A value of zeros; None for each part without a fixed form."""
    if isinstance(space, spaces.Dict | spaces.Tuple):  # of a derived class too, which `tree_map` takes for a leaf
        return tree_map(zeros, space.spaces)
    if isinstance(space, spaces.Discrete):
        return np.dtype(space.dtype).type(0)
    return None if space.shape is None or not fits_block(space) else np.zeros(space.shape, space.dtype)
