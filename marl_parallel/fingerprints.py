"""`fingerprint`: a short text that tells whether two values of a simulator are the same, without keeping them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.core.spaces import ARRAY_SPACES, Mismatch, as_array


def fingerprint(value: Any, space: Space[Any] | None = None) -> str:
    """A text that is the same for values that are the same to the bit, types included.

    Arrays count in the dtype of the space, as `ParallelEnv` returns them; other objects by type and attributes.
    """
    return hashlib.blake2b(b"".join(_bytes_of(value, space)), digest_size=8).hexdigest()


def _bytes_of(value: Any, space: Space[Any] | None, above: tuple[int, ...] = ()) -> Iterator[bytes]:
    """The bytes of a fingerprint; `above` has the ids of the containers of the value, to end cycles."""
    if id(value) in above:
        yield f"^{above.index(id(value))}".encode()
        return
    if isinstance(space, ARRAY_SPACES):
        with contextlib.suppress(Mismatch):
            value = as_array(value, np.dtype(space.dtype), space.shape)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{type(value).__name__}{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
        return
    within = (*above, id(value))
    yield f"{type(value).__name__}(".encode()
    if isinstance(value, Mapping):
        children = space.spaces if isinstance(space, spaces.Dict) else {}
        # The order of keys is the space's if there is one; else it counts.
        for key in dict.fromkeys([*(key for key in children if key in value), *value]):
            yield repr(key).encode()
            yield from _bytes_of(value[key], children.get(key), within)
    elif isinstance(value, list | tuple | np.ndarray):
        parts = space.spaces if isinstance(space, spaces.Tuple) else ()
        for part, child in itertools.zip_longest(value, parts[: len(value)]):
            yield from _bytes_of(part, child, within)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, int | float | str | bytes | complex | None.__class__):
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()
    elif len(above) < 10:
        # An object's own text may show its address in memory.
        yield from _bytes_of(getattr(value, "__dict__", None), None, within)
    yield b")"
