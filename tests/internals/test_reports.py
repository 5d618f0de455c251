"""The stacks in error messages, and how processes ended."""

from __future__ import annotations

import linecache

import pytest

from marl_parallel.core.messages import Lost, LostServer
from marl_parallel.core.reports.reports import environments, manner_of_death, with_code

pytestmark = pytest.mark.release_independent

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


@pytest.mark.parametrize(
    ("exitcode", "how", "to_do"),
    [
        (-9, "SIGKILL (signal 9)", "dmesg"),
        (-15, "SIGTERM (signal 15)", "what sent that signal"),
        (-40, "a signal (signal 40)", "what sent that signal"),
        (1, "exit code 1", "stderr"),
        (0, "exit code 0", "stderr"),
        (None, "cause unknown", "stderr"),
    ],
)
def test_worker_that_ended_with_its_fork_server(exitcode, how, to_do):
    """The worker's own exit code says nothing then."""
    manner, advice = manner_of_death(Lost(-9, "", server=LostServer(4711, exitcode)))
    assert "the fork server (process 4711) ended" in manner
    assert how in manner
    assert "all its workers ended with it" in manner
    assert to_do in advice
    assert "memory ran out" not in manner


@pytest.mark.parametrize(
    ("env_ids", "text"),
    [
        ((3,), "environment 3"),
        ((0, 1), "environments 0 to 1"),
        (range(2, 6), "environments 2 to 5"),
        ((0, 2), "environments 0 and 2"),
        ((0, 2, 3), "environments 0 and 2 to 3"),
        ((1, 3, 6, 7, 8, 10), "environments 1, 3, 6 to 8 and 10"),
        ((5, 4, 9), "environments 4 to 5 and 9"),
    ],
)
def test_environments_that_are_not_neighbours(env_ids, text):
    """The share of a worker has gaps while its environments move to other workers."""
    assert environments(env_ids) == text
