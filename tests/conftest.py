"""Fixtures and options of the tests.

pytest                 every test once, on a backend that its name chooses: two workers, shared memory
pytest --setups=rest   each test on one more setup, another kind of backend, number of workers or memory; and what is
                       marked `rest`: slow tests, and combinations of what others cover one by one
pytest --setups=all    all setups
pytest --setups=ray    the tests that are repeated on setups, on Ray, which must be installed
pytest -n 0            all tests in this process, one at a time; the default is three processes (pytest-xdist)
CI=true pytest         a skipped test makes the run fail

Markers: `needs("ray", ...)` names the libraries that a file imports: it is collected only if they are installed;
`needs("_codec")` is for tests of compiled code, also one by one.
`every_setup` marks tests that run on all other setups with `--setups=rest`.
`in_turn` marks tests, or some of their cases, that say the same about every setup. With `--setups=rest` and `ray`, such
a case is left out on most setups, in turn.
`release_independent` marks tests whose result is the same with every release of every library. `whole_machine` marks
tests that look at shared memory, processes or temporary files of all programs: while one of them runs, the other
process of pytest-xdist waits (`MachineLock`). `starts_anew` marks tests whose worker processes start as in any program;
for the others, the fork server is a fork of a process that has its libraries loaded (`helpers.fork_servers`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import ROOT, TESTS, fork_servers, start_methods
from helpers.setups import (
    ALL_SETUPS,
    BACKEND_SETUPS,
    CONCURRENT_OR_PORTABLE,
    CONCURRENT_SETUPS,
    KILLABLE_SETUPS,
    PROCESS_SETUPS,
    TWO_WORKERS,
    Setup,
    left_out,
)

from marl_parallel.core.exclusive import CALL
from marl_parallel.core.pool.pool import Pool

if TYPE_CHECKING:
    from helpers.launching import LauncherHarness
    from helpers.ray_clusters import RayClusters

    from marl_parallel import ParallelEnv

collect_ignore = ["helpers", "simulators"]


class OptionalLibraries:
    """Ignores files whose libraries are missing: by the marker `needs`, in the package by `__doctest_requires__`.

    A plugin, because hooks of this file do not apply to the package's doctests.
    """

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix != ".py":
            return None
        # Read from the text: a file whose library is missing cannot be imported to look at its markers.
        marks = re.compile(r"^(?:pytestmark = [^=]*?mark\.needs\(|__doctest_requires__ = \[)([^)\]]*)", re.MULTILINE)
        marked = marks.search(collection_path.read_text())
        libraries = re.findall(r'"(\w+)"', marked[1]) if marked else []
        return True if any(map(self.is_missing, libraries)) else None

    @staticmethod
    def is_missing(library: str) -> bool:
        if library == "_codec":
            pure = os.environ.get("MARL_PARALLEL_PURE") == "1"
            return pure or importlib.util.find_spec("marl_parallel.core._codec") is None
        return importlib.util.find_spec(library) is None


class MachineLock:
    """Runs each test marked `whole_machine` while no other process of pytest-xdist runs a test.

    A plugin, because hooks of this file do not apply to the package's doctests.
    """

    def __init__(self) -> None:
        # Locks on two folders of the checkout: nothing has to be created or cleaned up.
        self._queue, self._machine = os.open(TESTS, os.O_RDONLY), os.open(ROOT, os.O_RDONLY)
        self._is_kept = False  # whether this process has kept the machine for its next test

    @staticmethod
    def _is_alone(item: pytest.Item | None) -> bool:
        return item is not None and item.get_closest_marker("whole_machine") is not None

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's timeout begins
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        import fcntl  # not on Windows

        alone = self._is_alone(item)
        if self._is_kept and not alone:  # the next test is another one than expected
            fcntl.flock(self._machine, fcntl.LOCK_UN)
        if not (self._is_kept and alone):
            fcntl.flock(self._queue, fcntl.LOCK_EX)
            fcntl.flock(self._machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            # Who waits for the machine holds the queue; otherwise other tests could share the machine forever.
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Each wait for the tests of other processes may be long, so tests in turn wait once.
            self._is_kept = alone and self._is_alone(nextitem)
            if not self._is_kept:
                # Unlock instead of closing: processes forked by a test may still have the folder open.
                fcntl.flock(self._machine, fcntl.LOCK_UN)


class PoolChecks:
    """Calls `Pool.check` when a `ParallelEnv` of a test is closed, unless in the middle of a call or after an error.

    What it finds fails the test: an error in `close` might be caught, or come from a finalizer.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        close = Pool._close

        @functools.wraps(close)
        def checked_close(pool: Pool, *arguments: Any, **keywords: Any) -> Any:
            if pool.guard[CALL] is None and sys.exc_info()[0] is None and hasattr(pool.backend, "statuses"):
                try:
                    pool.check()
                except Exception as error:
                    self._found.append(f"{type(error).__name__}: {error}")
            return close(pool, *arguments, **keywords)

        Pool._close = checked_close  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield
        found, self._found = self._found, []
        assert not found, found[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ["one", "rest", "all", "ray"]
    parser.addoption("--setups", choices=choices, default="one", help="see tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OptionalLibraries())
    config.pluginmanager.register(PoolChecks())
    if hasattr(config, "workerinput") and sys.platform != "win32":  # a process of pytest-xdist
        config.pluginmanager.register(MachineLock())
    # Background jobs of shell scripts start with SIGINT ignored, but some tests need it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def needed(item: pytest.Item) -> tuple[str, ...]:
    """The libraries that a test needs, by its marker."""
    mark = item.get_closest_marker("needs")
    return () if mark is None else mark.args


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [item for item in items if any(map(OptionalLibraries.is_missing, needed(item)))]
    out = {*left_out(items, config.getoption("--setups")), *missing}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collections of garbage leave out what exists before the first test, which takes half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test is a failure if CI is set, because nobody reads the summary there."""
    if _skips_count(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _skips_count(config):
        terminalreporter.write_line("tests were skipped: with CI set, that is a failure", red=True)


def _skips_count(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # none in the processes of pytest-xdist
    return bool(os.environ.get("CI") and reporter and reporter.stats.get("skipped"))


@pytest.fixture(scope="session")
def server_template() -> Iterator[fork_servers.ServerTemplate]:
    """What forks the fork servers of all tests."""
    with contextlib.closing(fork_servers.ServerTemplate()) as template:
        yield template


@pytest.fixture(autouse=True)
def quick_fork_servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers start in a few milliseconds, except in tests marked `starts_anew`."""
    if fork_servers.AVAILABLE and request.node.get_closest_marker("starts_anew") is None:
        from marl_parallel.backends import launching

        template: fork_servers.ServerTemplate = request.getfixturevalue("server_template")
        monkeypatch.setattr(launching, "subprocess", template.as_subprocess())


@pytest.fixture(params=ALL_SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend on two workers; serial and processes also without shared memory; processes also on 1 and 4."""
    return request.param


@pytest.fixture(params=TWO_WORKERS, ids=str)
def two_worker_setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend on two workers, processes also without shared memory."""
    return request.param


@pytest.fixture(params=BACKEND_SETUPS, ids=str)
def backend_setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend on two workers, with shared memory."""
    return request.param


@pytest.fixture(params=CONCURRENT_SETUPS, ids=str)
def concurrent_setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend whose workers run concurrently with the caller."""
    return request.param


@pytest.fixture(params=CONCURRENT_OR_PORTABLE, ids=str)
def concurrent_or_portable(request: pytest.FixtureRequest) -> Setup:
    """The same, and portable worker processes."""
    return request.param


@pytest.fixture(params=PROCESS_SETUPS, ids=str)
def process_setup(request: pytest.FixtureRequest) -> Setup:
    """Worker processes in three numbers, with shared memory."""
    return request.param


@pytest.fixture(params=KILLABLE_SETUPS, ids=str)
def killable_setup(request: pytest.FixtureRequest) -> Setup:
    """Two workers that are processes, of every backend."""
    return request.param


@pytest.fixture(scope="session")
def ray_clusters() -> Iterator[RayClusters]:
    """Ray clusters, shared by all tests."""
    from helpers.ray_clusters import RayClusters

    with contextlib.closing(RayClusters()) as clusters:
        yield clusters


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` on a setup and closes it after the test."""
    from marl_parallel import ParallelEnv

    built: list[ParallelEnv] = []

    def make(constructors: Sequence[Any], setup: Setup, mode: Any = True, seed: Any = 42, **more: Any) -> ParallelEnv:
        if setup.backend == "ray":
            request.getfixturevalue("ray_clusters").one_node()
        backend = start_methods.arguments("portable") if setup.backend == "portable" else {}
        arguments = {**setup._asdict(), **backend, **more}
        arguments["num_workers"] = min(arguments["num_workers"], max(len(constructors), 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # four workers may be more than there are CPUs
            warnings.filterwarnings("ignore", 'with backend="hybrid", this thread steps', RuntimeWarning)
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


@pytest.fixture(params=start_methods.START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    """Worker processes from the fork server, and portable ones."""
    return request.param


@pytest.fixture
def harness() -> Iterator[LauncherHarness]:
    """A launcher."""
    from helpers.launching import LauncherHarness

    with contextlib.closing(LauncherHarness()) as harness:
        yield harness


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short path, because the paths of sockets are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
