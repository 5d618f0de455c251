"""Fixtures: what tests are repeated on, and what they get that is closed or removed after them.

pytest                 everything
pytest --setups=ray    of the tests that are repeated on many setups, those on Ray; it must be installed
pytest --setups=few    each test that is repeated on many setups runs on two workers and shared memory only, and those
                       of processes alone, to which no library's release makes a difference, do not run
CI=true pytest         a test that is skipped makes the run fail

What is about another project's library is collected only where that is installed; `.ci/run` has a place for each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import ways

if TYPE_CHECKING:
    from clusters import Grounds
    from launch_stage import Stage

    from marl_parallel import ParallelEnv

BACKENDS = ("serial", "thread", "process", *(["ray"] if importlib.util.find_spec("ray") else []))
OF_PROCESSES = {
    "test_async_faults", "test_benchmarks", "test_chaos", "test_cli_output", "test_cli_tune",
    "test_cli_watch", "test_closing",
    "test_contexts", "test_forked_children",
    "test_in_flight", "test_late_steps", "test_launching", "test_leaks", "test_notices", "test_orphans",
    "test_parents", "test_policy",
    "test_portable", "test_readiness", "test_readme", "test_restart_cases", "test_restarts", "test_scripts",
    "test_semaphores", "test_stacks", "test_step_calls", "test_stopped_workers", "test_timeouts", "test_worker_threads",
}  # fmt: skip


class Setup(NamedTuple):
    """Where environments run and how what they say travels.

    Attributes:
        backend: The kind of worker; "portable" stands for the backend that is asked for by an object.
        shared_memory: Whether through a block of memory, or pickled.
        num_workers: 1, some, or one per environment of a batch of four.
    """

    backend: str
    shared_memory: bool
    num_workers: int

    def __str__(self) -> str:
        return f"{self.backend}-{'shared' if self.shared_memory else 'pickled'}-{self.num_workers}"


# How much a worker has does not depend on how it travels: all numbers of workers with one way, some with the other.
ALL_SETUPS = [Setup(backend, *how) for backend in BACKENDS for how in ((True, 1), (True, 2), (True, 4), (False, 2))]
PACKED_SETUPS = [setup for setup in ALL_SETUPS if setup.num_workers == 2]
BACKEND_SETUPS = [setup for setup in PACKED_SETUPS if setup.shared_memory]
BESIDE_SETUPS = [Setup(backend, True, 2) for backend in (*BACKENDS[1:], "portable")]
PROCESS_SETUPS = [setup for setup in ALL_SETUPS if setup.backend == "process" and setup.shared_memory]
KILLABLE_SETUPS = [setup for setup in ALL_SETUPS if setup.backend in ("process", "ray") and setup.shared_memory]


WANTED = {
    **dict.fromkeys(["sb3", "sb3_cases", "sb3_algorithms"], ("stable_baselines3",)),
    "envpool": ("envpool", "torchrl"),
    **dict.fromkeys(["torchrl", "torchrl_learning", "tensors"], ("torchrl",)),
    **dict.fromkeys(["rllib", "rllib_runner"], ("ray", "tree", "torch")),
    **dict.fromkeys(["agilerl", "agilerl_cases", "agilerl_training"], ("agilerl",)),
    "videos": ("moviepy",),
    "examples": ("torch", "tyro"),
    **dict.fromkeys(["mlagents", "unity", "unity_player"], ("mlagents_envs",)),
    "real_simulators": (
        "highway_env",
        "lbforaging",
        "magent2",
        "momaland",
        "pyspiel",
        "rware",
        "shimmy",
        "vmas",
    ),
    "sumo": ("sumo", "sumo_rl"),
    "smarts": ("smarts", "sumo"),
    **dict.fromkeys(["ray_backend", "ray_scripts", "clusters"], ("ray",)),
}
"""The libraries without which `<name>.py` and `test_<name>.py` cannot even be imported."""


class OptionalLibraries:
    """A plugin rather than a hook of this file: it is for doctests beside this folder, too."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        wanted = WANTED.get(collection_path.stem.removeprefix("test_"), ())
        return True if any(importlib.util.find_spec(library) is None for library in wanted) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--setups",
        choices=["all", "few", "ray"],
        default="all",
        help="few: for trying other releases of libraries; what depends on none of them runs less or not at all",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OptionalLibraries())
    # What a shell script puts into the background begins with Ctrl-C ignored; it is tested there all the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--setups")
    if chosen == "all":
        return
    left_out = [item for item in items if not (_is_on_ray(item) if chosen == "ray" else _is_one_of_few(item))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_one_of_few(item: pytest.Item) -> bool:
    return item.path.stem not in OF_PROCESSES and _setup_of(item) in (None, *BACKEND_SETUPS, *BESIDE_SETUPS)


def _is_on_ray(item: pytest.Item) -> bool:
    setup = _setup_of(item)
    return setup is not None and setup.backend == "ray"


def _setup_of(item: pytest.Item) -> Setup | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    # By name: a test that imports this module has a class of its own.
    found = next((value for value in parameters.values() if type(value).__name__ == Setup.__name__), None)
    return None if found is None else Setup(*found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is skipped on somebody's laptop may be what the laptop lacks; where nobody looks, it is a failure."""
    if _skips_count(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _skips_count(config):
        terminalreporter.write_line("tests were skipped: with CI set, that is a failure", red=True)


def _skips_count(config: pytest.Config) -> bool:
    return bool(os.environ.get("CI") and config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped"))


@pytest.fixture(params=ALL_SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    """Every backend, both ways of travelling, three packings."""
    return request.param


@pytest.fixture(params=PACKED_SETUPS, ids=str)
def packed(request: pytest.FixtureRequest) -> Setup:
    """Every backend, both ways of travelling: for what does not depend on the packing."""
    return request.param


@pytest.fixture(params=BACKEND_SETUPS, ids=str)
def each(request: pytest.FixtureRequest) -> Setup:
    """Every backend: for what depends on nothing else."""
    return request.param


@pytest.fixture(params=BESIDE_SETUPS, ids=str)
def beside(request: pytest.FixtureRequest) -> Setup:
    """Every backend whose workers go on while the caller does: for what serial cannot show."""
    return request.param


@pytest.fixture(params=PROCESS_SETUPS, ids=str)
def processes(request: pytest.FixtureRequest) -> Setup:
    """Worker processes in three packings: for how they do it."""
    return request.param


@pytest.fixture(params=KILLABLE_SETUPS, ids=str)
def killable(request: pytest.FixtureRequest) -> Setup:
    """Processes of whichever backend, in three packings: for what only a process can do."""
    return request.param


@pytest.fixture(scope="session")
def grounds() -> Iterator[Grounds]:
    """Where Ray runs."""
    from clusters import Grounds

    with contextlib.closing(Grounds()) as grounds:
        yield grounds


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` on a setup and closes it after the test."""
    from marl_parallel import ParallelEnv

    made: list[ParallelEnv] = []

    def make(constructors: Sequence[Any], setup: Setup, mode: Any = True, seed: Any = 42, **more: Any) -> ParallelEnv:
        if setup.backend == "ray":
            request.getfixturevalue("grounds").one_node()
        backend = ways.arguments("portable") if setup.backend == "portable" else {}
        arguments = {**setup._asdict(), **backend, **more}
        arguments["num_workers"] = min(arguments["num_workers"], max(len(constructors), 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # four workers may be more than there are CPUs
            made.append(ParallelEnv(constructors, mode, seed, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close(terminate=True)


@pytest.fixture
def parallel(build: Callable[..., ParallelEnv]) -> Callable[..., ParallelEnv]:
    """Makes a `ParallelEnv` of copies of one constructor; in line and without auto-reset, if nothing else is said."""

    def make(constructor: Any, count: int = 3, auto_reset: Any = False, **more: Any) -> ParallelEnv:
        return build([constructor] * count, Setup("serial", True, 2), auto_reset, **more)

    return make


@pytest.fixture(params=ways.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Every way in which worker processes start."""
    return request.param


@pytest.fixture(params=ways.CONTEXTS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A launcher of each context, and what it needs."""
    from launch_stage import Stage

    with contextlib.closing(Stage(request.param)) as stage:
        yield stage


@pytest.fixture
def served() -> Iterator[Stage]:
    """A launcher that forks workers from a server, and what it needs."""
    from launch_stage import Stage

    with contextlib.closing(Stage("forkserver")) as stage:
        yield stage


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files: the name of a socket in it must not get too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
