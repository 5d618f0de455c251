"""Infos of many environments in one dict, laid out as Gymnasium's vector environments do.

Every key holds an array over all rows, and `_key` a mask that says which of them are data; dicts go on in the same way
within. Unlike there, nothing depends on whose info comes first: numbers of several types make an array that holds them
all, and what does not go into one array, an array of objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def vector_infos(infos: Iterable[tuple[int, Mapping[Any, Any]]], num_rows: int) -> dict[Any, Any]:
    """One dict of arrays over all rows.

    Args:
        infos: Rows that have an info, and theirs.
        num_rows: How many rows there are.

    Example:
        >>> vector_infos([(0, {"hits": 1}), (2, {"hits": 2.5})], 3)
        {'hits': array([1. , 0. , 2.5]), '_hits': array([ True, False,  True])}
    """
    by_key: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            rows, values = by_key.setdefault(key, ([], []))
            rows.append(row)
            values.append(value)
    result: dict[Any, Any] = {}
    for key, (rows, values) in by_key.items():
        mask = np.zeros(num_rows, np.bool_)
        mask[rows] = True
        result[key], result[f"_{key}"] = _joined(key, rows, values, num_rows), mask
    return result


def _joined(key: Any, rows: Sequence[int], values: Sequence[Any], num_rows: int) -> Any:
    if key != "final_obs":  # which is easier to take one by one
        if all(isinstance(value, dict) for value in values):
            return vector_infos(zip(rows, values), num_rows)
        array = _of_numbers(rows, values, num_rows)
        if array is not None:
            return array
    objects = np.empty(num_rows, object)  # of None
    for row, value in zip(rows, values):
        objects[row] = value
    return objects


def _of_numbers(rows: Sequence[int], values: Sequence[Any], num_rows: int) -> NDArray[Any] | None:
    arrays = [np.asarray(value) for value in values if isinstance(value, (np.ndarray, *_NUMBERS))]
    if len(arrays) < len(values) or len({array.shape for array in arrays}) > 1:
        return None
    if len({isinstance(value, np.ndarray) for value in values}) > 1 or arrays[0].dtype == object:
        return None
    try:
        dtype = np.result_type(*{array.dtype for array in arrays})
    except TypeError:
        return None
    joined = np.zeros((num_rows, *arrays[0].shape), dtype)
    joined[list(rows)] = arrays
    return joined
