"""The stacks in error messages."""

from __future__ import annotations

import linecache

import pytest

from marl_parallel.core.reports import with_code

CELL = "/somewhere/ipykernel_1/1234.py"


@pytest.mark.parametrize("comma", [",", ""], ids=["Python's", "faulthandler's"])
def test_code_of_a_cell_is_added(comma, monkeypatch):
    code = ["def step(self):\n", "    return self.plan[9]\n"]
    monkeypatch.setitem(linecache.cache, CELL, (0, None, code, CELL))
    of_file = f'  File "{__file__}", line 1{comma} in run\n'
    unknown = f'  File "/nowhere.py", line 7{comma} in run\n'
    frame = f'  File "{CELL}", line 2{comma} in step\n'
    assert with_code(f"{of_file}{unknown}{frame}KeyError: 9\n") == (
        f"{of_file}{unknown}{frame}    return self.plan[9]\nKeyError: 9\n"
    )
