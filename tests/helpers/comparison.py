"""`assert_same`: equality to the bit and to the type, with the path of the first difference.

`spoil` overwrites results, to show whether later ones depend on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(actual: Any, expected: Any, path: str = "result") -> None:
    """Fail unless both are of equal types and equal values all the way down; NaN equals NaN, -0.0 is not 0.0.

    Args:
        actual: The package's value.
        expected: The reference's value.
        path: The position in a larger structure, for the message.
    """
    assert type(actual) is type(expected), f"{path}: {_shown(actual)} is not {_shown(expected)}"
    if isinstance(expected, dict):
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        assert not missing, f"{path}: {sorted(missing, key=str)} missing"
        assert not extra, f"{path}: {sorted(extra, key=str)} should not be there"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), f"{path}: {len(actual)} items instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    elif isinstance(expected, np.ndarray | np.generic) and expected.dtype != object:
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} instead of {expected.dtype}"
        assert actual.shape == expected.shape, f"{path}: {actual.shape} instead of {expected.shape}"
        if np.asarray(actual).tobytes() != np.asarray(expected).tobytes():
            assert _nan_to_none(actual) == _nan_to_none(expected), f"{path}: {actual!r} is not {expected!r}"
    elif isinstance(expected, np.ndarray):
        assert_same(actual.tolist(), expected.tolist(), path)
    elif isinstance(expected, float):
        assert_same(np.float64(actual), np.float64(expected), path)
    else:
        assert actual == expected, f"{path}: {_shown(actual)} is not {_shown(expected)}"


def spoil(value: Any) -> None:
    """Overwrite everything that is writable."""
    if isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            spoil(item)
    if isinstance(value, dict | list):
        value.clear()
    if isinstance(value, np.ndarray) and value.size and value.dtype != object:
        value[...] = 0 if value.dtype.kind in "ub" else -1


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.200}"


def _nan_to_none(value: Any) -> list[Any]:
    """The bytes of each number; None for NaN, whose payload bits have no meaning."""
    return [None if number != number else number.tobytes() for number in np.asarray(value).ravel()]
