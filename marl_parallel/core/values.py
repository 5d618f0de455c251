"""Values of a space, one at a time: whether they are what it declares, and whether they have a fixed size.

Here is known what is cast and what is refused, whether a value goes into the block or not. How values lie in the block
is in `columns.py`, how several are stacked in `stacking.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

_ARRAY_SPACES = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


class Mismatch(ValueError):
    """A value that is not what its space declares; the text says what was expected and what came."""


def conform(space: Space[Any], value: Any) -> Any:
    """Give the arrays in a value the dtype that their space declares; everything else stays as it is.

    Args:
        space: The declared space.
        value: What the simulator or the caller gave.

    Returns:
        The value, with each `Box`, `MultiDiscrete` and `MultiBinary` leaf an array of the space's dtype.

    Raises:
        Mismatch: An array has another shape, or a dtype that cannot be cast without loss of meaning.

    Example:
        >>> conform(spaces.Box(0, 1, (2,), np.float32), [0.5, 1.0]).dtype
        dtype('float32')
    """
    if isinstance(space, _ARRAY_SPACES) and type(space) in _ARRAY_SPACES:
        return value if value is None else as_array(value, np.dtype(space.dtype), space.shape)
    if type(space) is spaces.Dict and isinstance(value, dict):
        return {k: conform(space.spaces[k], v) if k in space.spaces else v for k, v in value.items()}
    if type(space) is spaces.Tuple and type(value) is tuple and len(value) == len(space.spaces):
        return tuple(conform(s, v) for s, v in zip(space.spaces, value, strict=True))
    if type(space) is spaces.Tuple and type(value) is list:
        return _conform_list(space.spaces, value)
    return value


def _conform_list(children: Iterable[Space[Any]], values: list[Any]) -> list[Any]:
    """A list in place of a tuple, its arrays cast as a tuple's; unchanged if it does not fit the space."""
    children = [*children]
    if len(values) != len(children):
        return values
    try:
        return [conform(child, part) for child, part in zip(children, values)]
    except Mismatch:
        return values


def conform_action(space: Space[Any], action: Any) -> Any:
    """As `conform`; what is missing in an action is not left for the simulator to find. None is none, and stays that.

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
        if not isinstance(action, tuple | list) or len(action) != len(space.spaces):
            raise Mismatch(f"expected a tuple of {len(space.spaces)}, got {action!r}")
        if isinstance(action, list):
            return _conform_list(space.spaces, action)
        return tuple(conform_action(child, part) for child, part in zip(space.spaces, action))
    return conform(space, action)


def as_array(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Turn one value into an array of exactly this dtype and shape, or raise `Mismatch`."""
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
    """A value of the form that a space declares, of zeros; None where its values have no fixed form."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(zeros, space.spaces))
    if isinstance(space, spaces.Discrete):
        return 0
    return None if space.shape is None or not fits_block(space) else np.zeros(space.shape, space.dtype)


def unfit_leaf(space: Space[Any], path: str = "") -> str:
    """The first part of a space whose values have no fixed size, with its place; empty if there is none.

    Example:
        >>> unfit_leaf(spaces.Dict({"image": spaces.Box(0, 1), "mission": spaces.Text(9)}))
        "['mission'], Text(1, 9, charset=...)"
    """
    children: list[tuple[Any, Space[Any]]] = []
    if type(space) is spaces.Dict:
        children = [*space.spaces.items()]
    elif type(space) is spaces.Tuple:
        children = [*enumerate(space.spaces)]
    elif not fits_block(space):
        return f"{path}, {space}" if path else str(space)
    found = (unfit_leaf(child, f"{path}[{key!r}]") for key, child in children)
    return next(filter(None, found), "")


def fits_block(space: Space[Any]) -> bool:
    """Whether values of a space have a fixed size, so that they can lie in the block.

    What a class derived from one of these makes of its values is its own business.
    """
    if type(space) is spaces.Dict:
        return all(map(fits_block, space.spaces.values()))
    if type(space) is spaces.Tuple:
        return all(map(fits_block, space.spaces))
    return type(space) in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
