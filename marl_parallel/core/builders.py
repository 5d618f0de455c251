"""Functions made to measure for keys that never change: half the price of `dict(zip(keys, values))`, every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

_MOST_KEYS = 256
"""For more keys nothing is made to measure: compiling takes time quadratic in their number, and gains nothing."""


def dict_of(keys: Sequence[Any]) -> Callable[..., dict[Any, Any]]:
    """A function that takes one value for each key and returns the dict of them.

    Example:
        >>> dict_of(["a", "b"])(1, 2)
        {'a': 1, 'b': 2}
    """
    if len(keys) > _MOST_KEYS:
        return lambda *values: dict(zip(keys, values))
    values = ", ".join(f"v{place}" for place in range(len(keys)))
    return _built(f"lambda {values}: ", [f"v{place}" for place in range(len(keys))], keys)


def dicts_of(keys: Sequence[Any]) -> Callable[[Iterable[Any]], list[dict[Any, Any]]]:
    """A function that takes rows with one value for each key and returns a dict of each row.

    Example:
        >>> dicts_of(["a", "b"])([(1, 2), (3, 4)])
        [{'a': 1, 'b': 2}, {'a': 3, 'b': 4}]
    """
    if len(keys) > _MOST_KEYS:
        return lambda rows: [dict(zip(keys, row)) for row in rows]
    row = "".join(f"v{place}, " for place in range(len(keys)))
    values = [f"v{place}" for place in range(len(keys))]
    return _built("lambda rows: [", values, keys, f" for ({row}) in rows]")


def empty_dicts_of(keys: Sequence[Any]) -> Callable[[], dict[Any, dict[Any, Any]]]:
    """A function that returns a dict of new, empty dicts.

    Example:
        >>> empty_dicts_of(["a", "b"])()
        {'a': {}, 'b': {}}
    """
    if len(keys) > _MOST_KEYS:
        return lambda: {key: {} for key in keys}
    return _built("lambda: ", ["{}"] * len(keys), keys)


def _built(before: str, values: Sequence[str], keys: Sequence[Any], after: str = "") -> Callable[..., Any]:
    # The source holds numbered names only; the keys themselves, whatever they are, come in as arguments.
    names = ", ".join(f"k{place}" for place in range(len(keys)))
    entries = ", ".join(f"k{place}: {value}" for place, value in enumerate(values))
    make: Callable[..., Any] = eval(f"lambda {names}: {before}{{{entries}}}{after}")(*keys)
    return make
