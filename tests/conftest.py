"""Fixtures and options of the tests.

pytest                 every test once per backend: on two workers that start in the default way, through shared memory
pytest --setups=rest   what this leaves out: other numbers of workers, other start methods, no shared memory
pytest --setups=all    both
pytest --setups=ray    the tests that are repeated on setups, those on Ray; it must be installed
CI=true pytest         a skipped test makes the run fail

Markers: `needs("ray", ...)` names the libraries without which a file cannot be imported: it is collected only where
they are installed. `release_independent` marks tests to which no release of a library makes a difference.
`whole_machine` marks tests that look at shared memory and temporary files of all programs: nothing may run beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import ROOT, TESTS, start_methods
from helpers.setups import (
    ALL_SETUPS,
    BACKEND_SETUPS,
    CONCURRENT_SETUPS,
    KILLABLE_SETUPS,
    PROCESS_SETUPS,
    TWO_WORKERS,
    Setup,
    left_out,
)

if TYPE_CHECKING:
    from helpers.launching import Stage
    from helpers.ray_clusters import Grounds

    from marl_parallel import ParallelEnv

collect_ignore = ["helpers", "simulators"]


class OptionalLibraries:
    """Ignores files whose libraries are missing: by the marker `needs`, in the package by `__doctest_requires__`.

    A plugin rather than a hook of this file, so that it holds for the package, too.
    """

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix != ".py":
            return None
        # Read from the text: a file whose library is missing cannot be imported to look at its markers.
        marked = re.search(r"(?:mark\.needs\(|__doctest_requires__ = \[)([^)\]]*)", collection_path.read_text())
        libraries = re.findall(r'"(\w+)"', marked[1]) if marked else []
        return True if any(importlib.util.find_spec(library) is None for library in libraries) else None


class MachineLock:
    """Runs each test marked `whole_machine` while no other process of pytest-xdist runs a test.

    A plugin rather than a hook of this file, so that it holds for the package's doctests, too.
    """

    def __init__(self) -> None:
        # Two folders that there are in every checkout; nothing in them is locked.
        self._queue, self._machine = os.open(TESTS, os.O_RDONLY), os.open(ROOT, os.O_RDONLY)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's timeout begins
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        alone = item.get_closest_marker("whole_machine") is not None
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        # Who waits for the machine keeps the queue: otherwise new tests could go on sharing the machine for ever.
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Not by closing them: processes that a test has forked may still hold them open.
            fcntl.flock(self._machine, fcntl.LOCK_UN)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--setups", choices=["once", "rest", "all", "ray"], default="once", help="see tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OptionalLibraries())
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(MachineLock())
    # What a shell script puts into the background begins with Ctrl-C ignored; it is tested there all the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = set(left_out(items, config.getoption("--setups")))
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is skipped on somebody's laptop may be what the laptop lacks; where nobody looks, it is a failure."""
    if _skips_count(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _skips_count(config):
        terminalreporter.write_line("tests were skipped: with CI set, that is a failure", red=True)


def _skips_count(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # none in the processes of pytest-xdist
    return bool(os.environ.get("CI") and reporter and reporter.stats.get("skipped"))


@pytest.fixture(params=ALL_SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend, with and without shared memory, on three numbers of workers."""
    return request.param


@pytest.fixture(params=TWO_WORKERS, ids=str)
def packed(request: pytest.FixtureRequest) -> Setup:
    """Every backend, with and without shared memory: for what does not depend on the number of workers."""
    return request.param


@pytest.fixture(params=BACKEND_SETUPS, ids=str)
def each(request: pytest.FixtureRequest) -> Setup:
    """Every backend: for what depends on nothing else."""
    return request.param


@pytest.fixture(params=CONCURRENT_SETUPS, ids=str)
def beside(request: pytest.FixtureRequest) -> Setup:
    """Every backend whose workers run while the caller does: for what serial cannot show."""
    return request.param


@pytest.fixture(params=PROCESS_SETUPS, ids=str)
def processes(request: pytest.FixtureRequest) -> Setup:
    """Worker processes in three numbers: for how they work."""
    return request.param


@pytest.fixture(params=KILLABLE_SETUPS, ids=str)
def killable(request: pytest.FixtureRequest) -> Setup:
    """Processes of whichever backend, in three numbers: for what only a process can do."""
    return request.param


@pytest.fixture(scope="session")
def grounds() -> Iterator[Grounds]:
    """Where Ray runs."""
    from helpers.ray_clusters import Grounds

    with contextlib.closing(Grounds()) as grounds:
        yield grounds


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` on a setup and closes it after the test."""
    from marl_parallel import ParallelEnv

    built: list[ParallelEnv] = []

    def make(constructors: Sequence[Any], setup: Setup, mode: Any = True, seed: Any = 42, **more: Any) -> ParallelEnv:
        if setup.backend == "ray":
            request.getfixturevalue("grounds").one_node()
        backend = start_methods.arguments("portable") if setup.backend == "portable" else {}
        arguments = {**setup._asdict(), **backend, **more}
        arguments["num_workers"] = min(arguments["num_workers"], max(len(constructors), 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # four workers may be more than there are CPUs
            built.append(ParallelEnv(constructors, mode, seed, **arguments))
        return built[-1]

    yield make
    for env in built:
        env.close(terminate=True)


@pytest.fixture
def parallel(build: Callable[..., ParallelEnv]) -> Callable[..., ParallelEnv]:
    """Makes a `ParallelEnv` of environments from one constructor; serial and without auto-reset by default."""

    def make(constructor: Any, count: int = 3, auto_reset: Any = False, **more: Any) -> ParallelEnv:
        return build([constructor] * count, Setup("serial", True, 2), auto_reset, **more)

    return make


@pytest.fixture(params=start_methods.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Every way in which worker processes start."""
    return request.param


@pytest.fixture(params=start_methods.CONTEXTS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A launcher of each context, and what it needs."""
    from helpers.launching import Stage

    with contextlib.closing(Stage(request.param)) as stage:
        yield stage


@pytest.fixture
def served() -> Iterator[Stage]:
    """A launcher that forks workers from a server, and what it needs."""
    from helpers.launching import Stage

    with contextlib.closing(Stage("forkserver")) as stage:
        yield stage


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files: the name of a socket in it must not get too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
