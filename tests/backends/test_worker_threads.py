"""How many threads the numerical libraries of a worker get, and that the caller's own are left alone."""

from __future__ import annotations

import ctypes
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from simulators.deterministic import Hunt

from marl_parallel import ParallelEnv
from marl_parallel.backends.interpreter import thread_variables

pytestmark = pytest.mark.release_independent

CPUS = len(os.sched_getaffinity(0))
GETTERS = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")


def blas_threads() -> int:
    """What NumPy's OpenBLAS says itself."""
    np.ones((2, 2)) @ np.ones((2, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in maps if "openblas" in line))
    return int(next(getattr(library, name) for name in GETTERS if hasattr(library, name))())


class Limited(Hunt):
    """Notes in its constructor what it finds: the limits must hold before an environment is built."""

    def __init__(self) -> None:
        super().__init__()
        self.variables = {name: os.environ.get(name) for name in thread_variables(1)}
        self.blas = blas_threads()


@pytest.fixture
def unset(monkeypatch):
    for name in thread_variables(1):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("context", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("asked", [1, 2])
def test_as_many_as_asked(asked, context):
    mine = blas_threads()
    with ParallelEnv([Limited] * 2, num_workers=2, worker_threads=asked, context=context) as env:
        assert env.get_attr("variables") == (thread_variables(asked),) * 2
        assert env.get_attr("blas") == (asked, asked)
    assert blas_threads() == mine
    assert not set(thread_variables(1)) & set(os.environ)


@pytest.mark.usefixtures("unset")
def test_one_by_default():
    with ParallelEnv([Limited]) as env:
        assert env.get_attr("blas") == (1,)


@pytest.mark.usefixtures("unset")
def test_none_leaves_them_alone(monkeypatch):
    with ParallelEnv([Limited], worker_threads=None) as env:
        assert env.get_attr("variables") == (dict.fromkeys(thread_variables(1)),)
        assert env.get_attr("blas") == (CPUS,)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with ParallelEnv([Limited], worker_threads=None) as env:
        assert env.get_attr("variables")[0]["OMP_NUM_THREADS"] == "3"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_workers_in_this_process_change_nothing(backend):
    mine = blas_threads()
    with ParallelEnv([Limited] * 2, num_workers=2, backend=backend, worker_threads=1) as env:
        assert env.get_attr("variables") == (dict.fromkeys(thread_variables(1)),) * 2
        assert env.get_attr("blas") == (mine, mine)
    assert blas_threads() == mine


def test_torch_is_told_where_it_is_loaded(monkeypatch):
    """A forked worker has what its parent has loaded: environment variables come too late for that."""
    told: list[int] = []
    torch = types.ModuleType("torch")
    torch.set_num_threads = told.append
    torch.told = told
    monkeypatch.setitem(sys.modules, "torch", torch)

    class Learned(Hunt):
        def __init__(self) -> None:
            super().__init__()
            self.told = list(sys.modules["torch"].told)

    with ParallelEnv([Learned], worker_threads=2, context="fork") as env:
        assert env.get_attr("told") == ([2],)
    assert told == []
