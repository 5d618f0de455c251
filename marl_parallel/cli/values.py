"""What a simulator returns, looked at value by value: whether it fits its space, is of a usual type, pickles, is equal.

Pure functions; who asks, and what follows from it, is in `probes.py`.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.core.pickling import dumps


class Misfit(NamedTuple):
    """How a value is not what it should be.

    Attributes:
        what: The end of a sentence that begins with what the value is.
        advice: What to do about it.
        breaks: Whether it stops a `ParallelEnv`, or ruins training; else values arrive, cast to their space's dtype.
    """

    what: str
    advice: str
    breaks: bool = True


_KNOWN = (spaces.Box, spaces.Dict, spaces.Tuple, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)


def misfit(value: Any, space: Space[Any]) -> Misfit | None:
    """How a value does not fit a space; None where it does.

    Example:
        >>> misfit(np.zeros(3, np.float32), spaces.Box(0, 1, (4,), np.float32)).what
        'has shape (3,), but its space says (4,)'
        >>> misfit({"ammo": 7}, spaces.Dict(ammo=spaces.Discrete(5))).what
        "['ammo'] is 7 (int), which is not in Discrete(5)"
    """
    if type(space) not in _KNOWN and space.contains(value):
        return None  # a class of the simulator's own says what its values are
    if isinstance(space, spaces.Dict):
        return _misfit_of_dict(value, space)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
            return Misfit(f"is {got}, but its space says a tuple of {len(space.spaces)}", "return such a tuple")
        return _first((f"[{place}]", part, child) for place, (part, child) in enumerate(zip(value, space.spaces)))
    if isinstance(space, _ARRAYS):
        return _misfit_of_array(value, space)
    if space.contains(value):
        return None
    return Misfit(f"is {_brief(value)}, which is not in {space}", "return what is in the space, or declare another one")


def _misfit_of_dict(value: Any, space: spaces.Dict) -> Misfit | None:
    if not isinstance(value, Mapping):
        return Misfit(f"is {_brief(value)}, but its space says a dict", f"return a dict with {list(space.spaces)}")
    if value.keys() != space.spaces.keys():
        return Misfit(
            f"has the keys {list(value)}, but its space says {list(space.spaces)}", "return exactly these keys"
        )
    return _first((f"[{key!r}]", value[key], child) for key, child in space.spaces.items())


def _first(parts: Iterator[tuple[str, Any, Space[Any]]]) -> Misfit | None:
    """The first misfit that breaks something; else the first of all."""
    first = None
    for name, part, space in parts:
        found = misfit(part, space)
        if found is not None:
            separator = "" if found.what.startswith("[") else " "
            named = found._replace(what=f"{name}{separator}{found.what}")
            if named.breaks:
                return named
            first = first or named
    return first


def _misfit_of_array(value: Any, space: Space[Any]) -> Misfit | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return Misfit(f"is {_brief(value)}, which is no array", "return an array of one dtype")
    assert space.dtype is not None
    if array.shape != space.shape:
        return Misfit(
            f"has shape {array.shape}, but its space says {space.shape}",
            f"return arrays of shape {space.shape}, or declare a space of shape {array.shape}",
        )
    if isinstance(value, np.ndarray | np.generic) and not np.can_cast(array.dtype, space.dtype):
        return Misfit(
            f"has dtype {array.dtype}, but its space says {space.dtype}",
            f"return arrays of this dtype, as with .astype(np.{space.dtype}), or declare dtype=np.{array.dtype}",
            breaks=not np.can_cast(array.dtype, space.dtype, "same_kind"),
        )
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        return Misfit(f"is {_brief(value)}, which is not of numbers", f"return arrays of dtype {space.dtype}")
    if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        return Misfit("contains NaN", "find where it comes from, such as a division by zero")
    return _out_of_bounds(array, space)


def _out_of_bounds(array: Any, space: Space[Any]) -> Misfit | None:
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    else:
        start = getattr(space, "start", 0)
        low = np.broadcast_to(start, array.shape)
        high = low + (space.nvec - 1 if isinstance(space, spaces.MultiDiscrete) else 1)
    outside = (array < low) | (array > high)
    if not outside.any():
        return None
    first = tuple(int(place) for place in np.argwhere(outside)[0])
    where = f" at {list(first)}" if first else ""
    return Misfit(
        f"is {array[first]}{where}, but its space says {low[first]} to {high[first]}",
        "widen the space's bounds, or clip what is returned",
        breaks=False,
    )


def odd_reward(reward: Any) -> Misfit | None:
    """What is wrong with a reward; None where it is a finite number, or an array of several.

    Example:
        >>> odd_reward(float("nan")).what, odd_reward(np.float32(1.0))
        ('is nan', None)
    """
    if isinstance(reward, Real | np.bool_):
        if math.isfinite(reward):
            return None
        return Misfit(f"is {reward}", "find where it comes from: one such number ruins what is trained with it")
    if isinstance(reward, np.ndarray | list | tuple) and np.asarray(reward).dtype.kind in "biuf":
        return None
    return Misfit(f"is {_brief(reward)}, which is no number", "return a float for each agent")


def is_flag(flag: Any) -> bool:
    """Whether it is a bool, Python's or NumPy's."""
    return isinstance(flag, bool | np.bool_)


def pickling_error(value: Any) -> str | None:
    """Why a value cannot be pickled and made again; None where it can.

    Example:
        >>> pickling_error({"a": 1}), pickling_error(iter)
        (None, None)
        >>> import threading
        >>> pickling_error(threading.Lock())
        "TypeError: cannot pickle '_thread.lock' object"
    """
    try:
        pickle.loads(dumps(value))
    except Exception as error:  # whatever a class of the simulator's raises there
        return in_brief(error)
    return None


def in_brief(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    text = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _brief(value: Any) -> str:
    text = repr(value)
    return (
        f"{text} ({type(value).__name__})" if len(text) <= 40 and text[:1] != "<" else f"of type {type(value).__name__}"
    )


# -- equality ----------------------------------------------------------------------------------------------------------


def fingerprint(value: Any, space: Space[Any] | None = None) -> str:
    """A text that is the same for values that are the same to the bit, types included.

    Args:
        value: Of any kind; of what is no plain data, the type and its attributes count.
        space: Arrays are compared as they are in this space's dtype, as `ParallelEnv` hands them on.

    Example:
        >>> fingerprint(1.0) == fingerprint(1.0), fingerprint(1.0) == fingerprint(np.float64(1.0))
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _bytes_of(value, space):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(value: Any, space: Space[Any] | None, above: tuple[int, ...] = ()) -> Iterator[bytes]:
    """Args: `above` are the ids of what it lies in; what lies in itself ends there."""
    if id(value) in above:
        yield f"^{above.index(id(value))}".encode()
        return
    within = (*above, id(value))
    if isinstance(space, _ARRAYS) and space.dtype is not None:
        array = np.asarray(value)
        value = array.astype(space.dtype) if array.dtype.kind in "biuf" else value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{type(value).__name__}{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
        return
    yield f"{type(value).__name__}(".encode()
    if isinstance(value, Mapping):
        children = space.spaces if isinstance(space, spaces.Dict) else {}
        # The order of keys is the space's, where there is one; else it counts.
        for key in dict.fromkeys([*(key for key in children if key in value), *value]):
            yield repr(key).encode()
            yield from _bytes_of(value[key], children.get(key), within)
    elif isinstance(value, list | tuple | np.ndarray):
        parts = (
            space.spaces if isinstance(space, spaces.Tuple) and len(space.spaces) == len(value) else [None] * len(value)
        )
        for part, child in zip(value, parts):
            yield from _bytes_of(part, child, within)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, float):
        yield value.hex().encode()
    elif isinstance(value, int | str | bytes | complex | None.__class__):
        yield repr(value).encode()
    elif len(above) < 10:
        # An object's own text may show where in memory it lies.
        yield from _bytes_of(getattr(value, "__dict__", None), None, within)
    yield b")"
