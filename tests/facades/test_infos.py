"""Infos of many rows in one dict: arrays if values fit, objects otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marl_parallel.vector.rows import vector_infos


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], np.int64),
        ([1, 2.5], np.float64),
        ([True, False], np.bool_),
        ([np.float32(1), np.float32(2)], np.float32),
        ([np.int8(1), 2.5], np.float64),
        ([np.zeros(2, np.int8), np.ones(2)], np.float64),
        (["a", 1], object),
        ([None, 1], object),
        ([np.zeros(2), np.zeros(3)], object),
        ([np.zeros(()), 1.0], object),
        ([{"x": 1}, 1], object),
        ([[1], [1, 2]], object),
        ([2**70, 1], object),
        ([2**63 + 1, 2**60 + 1], object),
        ([2**63, 2**60], np.float64),
        ([2**63, 2**64 - 1], np.uint64),
        ([np.float64(1), np.float64(2)], np.float64),
        ([np.uint8(1), np.uint8(2)], np.uint8),
        ([np.int64(-1), np.int64(2)], np.int64),
        ([True, 2], np.int64),
        ([np.array(["a"]), np.array([1])], object),
    ],
)
def test_kinds_of_values(values, dtype, order):
    values = values[::order]
    infos = vector_infos([(3, {"key": values[0]}), (1, {"key": values[1]})], 4)
    assert infos["key"].dtype == dtype
    assert infos["_key"].tolist() == [False, True, False, True]
    for row, value in ((3, values[0]), (1, values[1])):
        assert np.array_equal(infos["key"][row], value)
    if dtype is not object:
        assert not infos["key"][[0, 2]].any()


def test_nested_dicts():
    infos: Any = vector_infos([(0, {"deep": {"x": 1}}), (2, {"deep": {"y": "z"}})], 3)
    assert infos["_deep"].tolist() == [True, False, True]
    assert infos["deep"]["x"].tolist() == [1, 0, 0]
    assert infos["deep"]["_x"].tolist() == [True, False, False]
    assert infos["deep"]["y"].tolist() == [None, None, "z"]


def test_last_observations_stay_objects():
    infos = vector_infos([(1, {"final_obs": np.ones(2)}), (2, {"final_obs": {"x": 1}})], 3)
    assert infos["final_obs"].dtype == object
    assert infos["final_obs"][1].tolist() == [1.0, 1.0]
    assert infos["final_obs"][2] == {"x": 1}
