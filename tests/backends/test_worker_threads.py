"""Threads of numerical libraries in workers; those of the caller stay unchanged."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from simulators.deterministic import Hunt

from marl_parallel import ParallelEnv
from marl_parallel.backends.interpreter import thread_variables

pytestmark = pytest.mark.release_independent

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
GETTERS = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")


def blas_threads() -> int:
    """The number of threads according to NumPy's OpenBLAS."""
    np.ones((2, 2)) @ np.ones((2, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in maps if "openblas" in line))
    return int(next(getattr(library, name) for name in GETTERS if hasattr(library, name))())


class RecordsThreads(Hunt):
    """Records the limits in its constructor: they must hold before an environment is built."""

    def __init__(self) -> None:
        super().__init__()
        self.variables = {name: os.environ.get(name) for name in thread_variables(1)}
        self.blas = blas_threads()


@pytest.fixture
def unset(monkeypatch):
    for name in thread_variables(1):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("threads", [1, 2])
def test_worker_threads_argument(threads):
    mine = blas_threads()
    with ParallelEnv([RecordsThreads] * 2, num_workers=2, worker_threads=threads) as env:
        assert env.get_attr("variables") == (thread_variables(threads),) * 2
        assert env.get_attr("blas") == (threads, threads)
    assert blas_threads() == mine
    assert not set(thread_variables(1)) & set(os.environ)


@pytest.mark.usefixtures("unset")
def test_one_by_default():
    with ParallelEnv([RecordsThreads]) as env:
        assert env.get_attr("blas") == (1,)


@pytest.mark.usefixtures("unset")
def test_none_changes_nothing(monkeypatch):
    with ParallelEnv([RecordsThreads], worker_threads=None) as env:
        assert env.get_attr("variables") == (dict.fromkeys(thread_variables(1)),)
        assert env.get_attr("blas") == (CPUS,)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with ParallelEnv([RecordsThreads], worker_threads=None) as env:
        assert env.get_attr("variables")[0]["OMP_NUM_THREADS"] == "3"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_serial_and_thread_workers_change_nothing(backend):
    mine = blas_threads()
    with ParallelEnv([RecordsThreads] * 2, num_workers=2, backend=backend, worker_threads=1) as env:
        assert env.get_attr("variables") == (dict.fromkeys(thread_variables(1)),) * 2
        assert env.get_attr("blas") == (mine, mine)
    assert blas_threads() == mine
