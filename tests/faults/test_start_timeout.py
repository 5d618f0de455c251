"""`start_timeout`: CPU time of a worker that imports or unpickles does not count, up to ten times the limit.

Modules run for some time on the clock of the wall, so on a busy machine they use less of a CPU, and wait for it longer.
Tests in which waiting counts need the CPU time of workers, which only Linux shows.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import linux_only
from simulators.importing import Importing, SavesItself, SlowToUnpickle, run

from marl_parallel import ParallelEnv, WorkerTimeout
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.worker import loading
from marl_parallel.core.worker.loading import is_past

pytestmark = pytest.mark.release_independent

LIMIT_S = 0.6
LATE = f"has not finished its constructor within {LIMIT_S:g} s"
RUNS = "import time\nbegan = time.monotonic()\nwhile time.monotonic() - began < {}:\n    pass"
SLEEPS = "import time\ntime.sleep({})"
FOREVER_S = 600.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module that workers can import, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def opened(constructor: Callable[[], Any], backend: str = "process", **arguments: Any) -> ParallelEnv:
    """The environment is in a worker process, also with "hybrid"."""
    where: Any = PortableProcessBackend() if backend == "portable" else backend
    constructors = [Importing] * (backend == "hybrid") + [constructor]
    arguments = {"start_timeout": LIMIT_S, **arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # worker 0 of "hybrid" has no timeouts
        return ParallelEnv(constructors, num_workers=len(constructors), backend=where, **arguments)


def set_part(env: Any, seconds: float) -> None:
    env.unwrapped.part = SlowToUnpickle(run if seconds < FOREVER_S else time.sleep, seconds)


@pytest.mark.parametrize("backend", ["process", "hybrid", "portable"])
def test_a_worker_that_imports_for_long_starts(backend: str, module: Any) -> None:
    module("inner_of_start", RUNS.format(1.5 * LIMIT_S))
    name = module("outer_of_start", "import inner_of_start")
    opened(functools.partial(Importing, name), backend).close()


def test_a_worker_that_unpickles_for_long_starts() -> None:
    opened(SlowToUnpickle(run, 1.5 * LIMIT_S)).close()


def test_states_that_unpickle_for_long_are_loaded() -> None:
    with opened(Importing) as env:
        env.reset()
        env.call(set_part, 1.5 * LIMIT_S)
        env.load_state(env.save_state())
        env.call(set_part, FOREVER_S)  # where CPU time is unknown, it counts after ten times the limit
        with pytest.raises(WorkerTimeout, match=LATE):
            env.load_state(env.save_state())


def test_states_that_need_their_constructor_and_unpickle_for_long_are_loaded() -> None:
    with opened(functools.partial(SavesItself, 1.5 * LIMIT_S)) as env:
        env.reset()
        env.load_state(env.save_state())
        assert env.get_attr("loaded") == (True,)


def test_a_fork_server_that_imports_for_long_starts(module: Any) -> None:
    name = module("preloaded_of_start", RUNS.format(1.5 * LIMIT_S))
    opened(functools.partial(Importing, name), preload=[name]).close()


@pytest.mark.parametrize(
    ("code", "then"),
    [
        (None, time.sleep),  # a constructor that waits
        (None, run),  # or works, but imports nothing
        pytest.param(SLEEPS.format(FOREVER_S), time.sleep, marks=linux_only),  # an import that waits
        (RUNS.format(1.5 * LIMIT_S), time.sleep),  # a constructor that waits after a long import
    ],
)
def test_other_time_counts(
    code: str | None, then: Callable[[float], object], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_TIMES", 1000)
    name = None if code is None else module("waits_of_start", code)
    with pytest.raises(WorkerTimeout, match=LATE) as caught:
        opened(functools.partial(Importing, name, then, FOREVER_S))
    assert ("Imports: waits_of_start " in str(caught.value)) == (code is not None)


@linux_only
def test_unpickling_that_waits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MOST_TIMES", 1000)
    with pytest.raises(WorkerTimeout, match=LATE):
        opened(SlowToUnpickle(time.sleep, FOREVER_S))


@pytest.mark.parametrize("preload", [False, True])
def test_imports_count_from_ten_times_the_limit_on(preload: bool, module: Any) -> None:
    """The report says which modules took how long."""
    module("first_of_start", RUNS.format(0.3))
    name = module("endless_of_start", f"import first_of_start\n{RUNS.format(FOREVER_S)}")
    began = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        opened(functools.partial(Importing, name), preload=[name] * preload, start_timeout=0.2)
    assert time.monotonic() - began >= 10 * 0.2
    text = str(caught.value)
    imports = text[text.index("Imports: ") :].splitlines()[0]
    assert imports.startswith("Imports: endless_of_start for ")
    assert re.search(r" s so far, .*\bfirst_of_start \d+\.\d s", imports)
    assert "CPU time of imports does not count, up to 10 times start_timeout" in imports
    assert 'endless_of_start.py", line' in caught.value.stack


def test_without_cpu_time_the_wall_time_of_imports_of_portable_workers_does_not_count(module: Any) -> None:
    """Neither during an import nor after it."""
    name = module("sleeps_of_start", SLEEPS.format(1.2))
    opened(functools.partial(Importing, name, time.sleep, 0.3), "portable", start_timeout=1.0).close()
    with pytest.raises(WorkerTimeout, match=LATE):
        opened(functools.partial(Importing, None, time.sleep, FOREVER_S), "portable")


@pytest.mark.parametrize(
    ("elapsed", "loading", "expected"),
    [
        (0.9, 0.0, False), (1.1, 0.0, True), (1.1, 0.2, False), (9.9, 9.0, False), (9.9, 8.8, True),
        (10.1, 10.1, True), (5.0, 20.0, False),
    ],
)  # fmt: skip
def test_is_past(elapsed: float, loading: float, expected: bool) -> None:
    assert is_past(1.0, elapsed, loading) is expected
