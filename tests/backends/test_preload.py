"""`preload=`: modules that are imported once for all worker processes, what cannot be shared, and what goes wrong."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from helpers.launching import LauncherHarness, linux_only
from helpers.processes import all_gone, wait_for

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed, WorkerTimeout
from marl_parallel.backends import launching
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.worker import preloading
from marl_parallel.core.worker.process_state import _changed
from marl_parallel.settings import WorkerPoolSettings

pytestmark = pytest.mark.release_independent

FOREVER = "import time\ntime.sleep(600)"


class Reader(gymnasium.Env[Any, Any]):
    """Reads variables of modules; `imported` has the modules that were imported before its constructor."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self, *names: str) -> None:
        modules = [sys.modules.get(name) for name in names]
        self.imported = [name for name, module in zip(names, modules) if module is not None]
        self.pids = os.getpid(), *(getattr(module, "PID", None) for module in modules)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}

    def process_state(self) -> tuple[Any, ...]:
        names = [name for name in os.environ if name.endswith("OF_PRELOAD")]
        named = UnicodeWarning, BytesWarning, ImportWarning
        filters = [(action, category.__name__) for action, _, category, _, _ in warnings.filters if category in named]
        return (
            {name: os.environ[name] for name in sorted(names)},
            [path for path in sys.path if path.endswith("of_preload")], sys.path[0], sys.path[-1],
            os.getcwd(), filters[:3], np.geterr(), sys.getrecursionlimit(),
        )  # fmt: skip

    def note_at_exit(self, name: str) -> None:
        atexit.register(vars(sys.modules[name])["note"], "worker")

    def draw(self, name: str) -> list[int]:
        one = vars(sys.modules[name])["rng"]
        return [int(one.integers(1 << 30) if hasattr(one, "integers") else one.randrange(1 << 30)) for _ in range(3)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module that workers can import, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


def opened(backend: str, *names: str, workers: int = 2, **arguments: Any) -> ParallelEnv:
    where: Any = PortableProcessBackend() if backend == "portable" else backend
    return ParallelEnv(
        [lambda: Reader(*names)] * workers, backend=where, num_workers=workers, preload=names, **arguments
    )


ON_LINUX = pytest.param("process", marks=linux_only)
"""The fork server; elsewhere, these workers are portable ones."""


@pytest.mark.parametrize("backend", [ON_LINUX, "hybrid", "portable", "serial", "thread"])
def test_modules_are_imported_before_constructors(backend: str, module: Any) -> None:
    """Once, by the fork server, where there is one; elsewhere by each worker process; not in the caller's process."""
    names = module("first_of_preload", "import os\nPID = os.getpid()"), module("second_of_preload", "PID = 0")
    with opened(backend, *names) as env:
        *of_first, (pid, imported_by, _) = env.get_attr("pids")
        in_process = [
            worker for worker in range(2) if backend not in ("serial", "thread") and (worker or backend != "hybrid")
        ]
        assert env.get_attr("imported") == tuple([*names] if worker in in_process else [] for worker in range(2))
        if backend == "process":
            assert of_first[0][1] == imported_by != os.getpid()
            assert imported_by not in (pid, of_first[0][0])
        elif backend == "portable":
            assert imported_by == pid
    assert names[0] not in sys.modules


@linux_only
def test_replaced_workers_have_the_modules(module: Any) -> None:
    name = module("kept_of_preload", "import os\nPID = os.getpid()")
    with opened("process", name, on_error="restart") as env:
        env.reset()
        before = env.get_attr("pids")
        os.kill(before[1][0], signal.SIGKILL)
        *_, infos = env.step([{"agent_0": 0}] * 2)
        assert infos[1]["__common__"]["restarted"]
        after = env.get_attr("pids")
    assert after[1][0] != before[1][0]
    assert {one[1] for one in (*before, *after)} == {before[0][1]}


@linux_only
def test_what_modules_set_in_the_process_stays(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have the caller's state with the changes of the modules, as if each of them imported the modules."""
    (tmp_path / "there_of_preload").mkdir()
    name = module(
        "sets_of_preload",
        f"""
        import os, sys, warnings
        import numpy as np
        os.environ["NEW_OF_PRELOAD"] = "of the module"
        os.environ["OTHER_OF_PRELOAD"] += "of the module"
        del os.environ["GONE_OF_PRELOAD"]
        sys.path.insert(0, "first_of_preload")
        sys.path.append("last_of_preload")
        sys.path.remove("gone_of_preload")
        warnings.filterwarnings("error", category=BytesWarning)
        warnings.simplefilter("ignore", UnicodeWarning)
        np.seterr(over="raise")
        sys.setrecursionlimit(4321)
        os.chdir({str(tmp_path / "there_of_preload")!r})
        PID = sys.argv
        """,
    )
    for variable in ("OTHER_OF_PRELOAD", "GONE_OF_PRELOAD", "CALLERS_OF_PRELOAD"):
        monkeypatch.setenv(variable, "of the caller, ")
    monkeypatch.setattr(sys, "path", [*sys.path, "gone_of_preload"])
    monkeypatch.setattr(sys, "argv", ["program", "argument"])
    found = {}
    with np.errstate(under="raise"), warnings.catch_warnings():
        warnings.simplefilter("always", ImportWarning)
        for backend in ("process", "portable"):
            with opened(backend, name, on_error="restart") as env:
                env.reset()
                found[backend], _ = env.call("process_state")
                assert backend == "portable" or env.get_attr("pids")[0][1] == ["program", "argument"]
                env.reset()  # settings of the caller are applied again
                assert env.call("process_state") == (found[backend],) * 2
    variables, path, first, last, cwd, filters, float_errors, limit = found["process"]
    assert variables == {
        "CALLERS_OF_PRELOAD": "of the caller, ",
        "NEW_OF_PRELOAD": "of the module",
        "OTHER_OF_PRELOAD": "of the caller, of the module",
    }
    assert path == [first, last] == ["first_of_preload", "last_of_preload"]
    assert Path(cwd).name == "there_of_preload"
    assert filters == [("ignore", "UnicodeWarning"), ("error", "BytesWarning"), ("always", "ImportWarning")]
    assert (float_errors["over"], float_errors["under"], limit) == ("raise", "raise", 4321)
    assert found["process"] == found["portable"]


@pytest.mark.parametrize(
    ("now", "before", "after", "expected"),
    [
        ("abc", "abc", "axbc", "axbc"),  # nothing differs: the place is known
        ("kabc", "abc", "xabc", "xkabc"),
        ("kabc", "abc", "abcx", "kabcx"),
        ("kabc", "abc", "axbc", "kabcx"),
        ("kabc", "abc", "ca", "cka"),
        ("kabc", "abc", "bac", "bkac"),
        ("kabc", "abc", "xcaby", "xckaby"),
        ("k", "abc", "", "k"),
        ("", "abc", "cx", "x"),
        ("xk", "abc", "xabc", "xk"),
    ],
)
def test_changes_of_lists(now: str, before: str, after: str, expected: str) -> None:
    assert "".join(_changed(now, before, after)) == expected


@linux_only
@pytest.mark.starts_anew  # else it does not end as an interpreter does
def test_exit_handlers_of_modules_run_in_the_fork_server_only(module: Any, tmp_path: Path) -> None:
    """Folders and files belong to all workers. Handlers of the simulators run in the workers."""
    name = module(
        "cleans_up_of_preload",
        f"""
        import atexit, os, tempfile, weakref
        PID = os.getpid()
        folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})
        def note(what):
            with open({str(tmp_path / "ended")!r}, "a") as file:
                file.write(f"{{what}} {{os.getpid()}} {{os.path.exists(folder.name)}}\\n")
        class Own:
            pass
        own = Own()
        atexit.register(note, "handler")
        weakref.finalize(own, note, "finalizer")
        """,
    )
    with opened("process", name) as env:
        pids = env.get_attr("pids")
        env.call("note_at_exit", name)
    lines = sorted(line.split() for line in (tmp_path / "ended").read_text().splitlines())
    server = str(pids[0][1])
    of_workers = sorted(["worker", str(pid), "True"] for pid, _ in pids)
    assert lines == [["finalizer", server, "True"], ["handler", server, "True"], *of_workers]
    assert not [*tmp_path.glob("tmp*")]


FAILURES = {
    "raises": ("raise ValueError('no licence')", "ValueError: no licence"),
    "exits": ("import sys\nsys.exit('no display')", "SystemExit: no display"),
    "imports what is missing": ("import no_such_library", "No module named 'no_such_library'"),
    "is no Python": ("def (", "SyntaxError"),
}


@pytest.mark.parametrize(
    ("backend", "failure"), [*[("process", failure) for failure in FAILURES], ("portable", "raises")]
)
def test_modules_that_cannot_be_imported(backend: str, failure: str, module: Any) -> None:
    code, expected = FAILURES[failure]
    name = module("fails_of_preload", f"\n\n{code}")
    with pytest.raises(EnvError) as caught:
        opened(backend, name, workers=1, on_error="restart")
    error = caught.value
    assert error.method == "preload"
    assert expected in str(error)
    assert f"{name}.py" in error.remote_traceback
    assert f"fix the import of '{name}', or leave it out of preload=" in str(error)


def test_missing_modules() -> None:
    with pytest.raises(EnvError, match="raised in preload: ModuleNotFoundError: No module named 'missing_of_preload'"):
        opened("process", "missing_of_preload")


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        pytest.param("process", "os.kill(os.getpid(), 11)", marks=linux_only),
        pytest.param("process", "os._exit(0)", marks=linux_only),
        pytest.param("process", "os._exit(3)", marks=linux_only),
        pytest.param("portable", "os.kill(os.getpid(), 11)", marks=linux_only),
        ("portable", "os._exit(3)"),
    ],
)
def test_module_that_ends_the_process(backend: str, end: str, module: Any) -> None:
    name = module("ends_of_preload", f"import os\n{end}")
    with pytest.raises(WorkerCrashed) as caught:
        opened(backend, name, workers=1)
    text = str(caught.value)
    assert "ends_of_preload.py" in caught.value.stack
    assert ("while it imported the modules of preload=('ends_of_preload',)" in text) == (backend == "process")
    assert ("run `python -c 'import ends_of_preload'` to see why" in text) == (backend == "process")
    assert "start_timeout" not in text
    assert "with preload=" not in text


@linux_only
def test_threads_of_the_fork_server_are_named(module: Any) -> None:
    name = module(
        "starts_threads_of_preload",
        """
        import threading
        threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        """,
    )
    with pytest.warns(UserWarning, match=rf"import of '{name}', .* starts threads in the fork server \(2\)") as warned:
        opened("process", name).close()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    # Where a constructor fails because of it, the warning helps most.
    with (
        pytest.warns(UserWarning, match="starts threads in the fork server"),
        pytest.raises(WorkerTimeout, match="constructor"),
    ):
        ParallelEnv([lambda: time.sleep(600)], num_workers=1, preload=[name], start_timeout=0.3)
    with warnings.catch_warnings():  # nothing is forked from this worker
        warnings.simplefilter("error")
        opened("portable", name, workers=1).close()


def test_threads_that_have_ended_are_not_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may list a thread a little longer than `join` waits for it."""
    listed = [{"1", "2"}, {"1", "3"}, {"1", "3"}, {"1"}]
    monkeypatch.setattr(preloading, "_threads", lambda: listed.pop(0))
    monkeypatch.setattr(preloading, "_THREADS_END_WITHIN_S", 600)
    monkeypatch.setattr(preloading, "_imports", preloading._Imports())
    preloading._import([module("joins_of_preload", "")], forks=True)
    assert (preloading.findings(), listed) == ((), [])
    sys.modules.pop("joins_of_preload")


@linux_only
def test_gpus_of_the_fork_server_are_named(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stand for GPUs."""
    monkeypatch.setattr(preloading, "_GPU", str(tmp_path / "nvidia"))
    monkeypatch.setattr(preloading, "_imports", preloading._Imports())
    before = (tmp_path / "nvidia0").open("wb")
    names = [
        module("opens_of_preload", f"file = open({str(tmp_path / 'nvidia1')!r}, 'wb')"),
        module("opens_and_closes_of_preload", f"open({str(tmp_path / 'nvidia2')!r}, 'wb').close()"),
    ]
    preloading.import_modules(names, forks=True)
    before.close()
    assert preloading.findings() == (preloading.Preloaded(names[0], 0, (str(tmp_path / "nvidia1"),), ()),)
    for name in names:
        getattr(sys.modules.pop(name), "file", before).close()


GENERATORS = {
    "unseeded": "import numpy as np\nrng = np.random.default_rng()",
    "seeded": "import numpy as np\nrng = np.random.default_rng(0)",
    "python": "import random\nrng = random.Random(0)",
    "other bits": "import numpy as np\nrng = np.random.Generator(np.random.Philox(0))",
}


def test_generators_are_seeded_in_each_worker(module: Any) -> None:
    """From the seed of its first environment: workers differ, and the same seed gives the same numbers everywhere."""
    names = [module(f"generator_{number}_of_preload", code) for number, code in enumerate(GENERATORS.values())]

    def drawn(backend: str, seed: int) -> dict[str, tuple[list[int], ...]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with opened(backend, *names, seed=seed) as env:
                return {name: env.call("draw", name) for name in names}

    first = drawn("process", 1)
    for name in names:
        assert first[name][0] != first[name][1], name
    assert first == drawn("process", 1) == drawn("portable", 1)
    other = drawn("process", 5)
    for name in names:
        assert other[name][0] != first[name][0], name
    assert first[names[0]] != first[names[1]], "two generators of a kind differ"


@linux_only
def test_generators_that_cannot_be_seeded_are_named(module: Any) -> None:
    name = module(
        "own_generator_of_preload",
        """
        import random
        class Own(random.Random):
            def random(self):
                return 0.5
        rng, by_the_system, of_the_process = Own(), random.SystemRandom(), random.random.__self__
        """,
    )
    with pytest.warns(UserWarning, match=rf"cannot be seeded: {name}\.rng\. All workers") as warned:
        opened("process", name).close()
    assert len(warned) == 1
    with warnings.catch_warnings():  # portable workers import the module themselves
        warnings.simplefilter("error")
        opened("portable", name, workers=1).close()


def test_process_wide_generators_are_no_generators_of_modules(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_imports", preloading._Imports())
    name = module(
        "names_of_preload", "import random\nimport numpy as np\none, two = random._inst, np.random.mtrand._rand"
    )
    before = random.getstate(), np.random.get_state(legacy=False)
    preloading.import_modules([name])
    preloading.seed_generators_once(3)
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    sys.modules.pop(name)


@linux_only
def test_an_import_that_hangs_is_an_error(module: Any) -> None:
    name = module("hangs_of_preload", FOREVER)
    with pytest.raises(WorkerTimeout) as caught:
        opened("process", name, start_timeout=0.5)
    text = str(caught.value)
    assert caught.value.method == "preload"
    assert f"has not imported the modules of preload=('{name}',) within 0.5 s" in text
    assert f"Imports: {name} for " in text
    assert "with preload=" not in text
    assert f'{name}.py", line 2' in caught.value.stack


@linux_only
def test_the_fork_server_dies_with_its_parent_while_it_imports(module: Any, tmp_path: Path) -> None:
    name = module(
        "long_of_preload", f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}.')\n{FOREVER}"
    )
    script = f"""
        import gymnasium
        from marl_parallel import ParallelEnv
        ParallelEnv([lambda: gymnasium.make("CartPole-v1")], preload=({name!r},))
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=variables)
    noted = tmp_path / "pid"
    wait_for(lambda: noted.exists() and noted.read_text().endswith("."), timeout=60)
    parent.kill()
    parent.wait()
    wait_for(lambda: all_gone(int(noted.read_text()[:-1])))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("torch", TypeError, r'preload must be a sequence of names of modules, such as \("torch",\), got \'torch\''),
        ([np], TypeError, "preload must be a sequence"),
        (None, TypeError, "preload must be a sequence"),
        (["my-module"], ValueError, "preload must have names of modules, such as .*, got 'my-module'"),
        (["a..b"], ValueError, "preload must have names"),
        (["__main__"], ValueError, "preload must have names"),
    ],
)
def test_wrong_names(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ParallelEnv([Reader], preload=value)


@linux_only
def test_a_fork_server_that_is_killed_while_it_imports_is_replaced(module: Any, tmp_path: Path) -> None:
    """As one that is killed at any other time: another one imports the modules. After five of them, it is an error."""
    code = """
        import os, pathlib, signal
        with pathlib.Path({path!r}).open("a") as file:
            file.write("x")
        if pathlib.Path({path!r}).stat().st_size <= {most}:
            os.kill(os.getpid(), signal.{signal})
        PID = os.getpid()
        """
    name = module("killed_twice_of_preload", code.format(path=str(tmp_path / "two"), most=2, signal="SIGKILL"))
    with opened("process", name) as env:
        assert all(imported_by is not None for _, imported_by in env.get_attr("pids"))
    assert (tmp_path / "two").stat().st_size == 3
    name = module("killed_of_preload", code.format(path=str(tmp_path / "all"), most=9, signal="SIGKILL"))
    with pytest.raises(RuntimeError, match=r"could not be started in 5 attempts; in the last one, the fork server"):
        opened("process", name)
    assert (tmp_path / "all").stat().st_size == 5


SLEEPS = "import time\ntime.sleep({})\n"


@linux_only
def test_the_start_of_the_fork_server_is_no_import(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_SERVER", SLEEPS.format(0.8) + launching._SERVER)
    harness = LauncherHarness(preload=[module("small_of_preload", "")], start_timeout=0.5)
    try:
        harness.launch("sleep")
    finally:
        harness.close()


@linux_only
@pytest.mark.parametrize("start_timeout", [None, 0.1])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fork_server_that_hangs_beside_its_imports_is_an_error(
    start_timeout: float | None, moment: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, hang = launching._SERVER, SLEEPS.format(600)
    text = (
        hang + text
        if moment == "before"
        else text.replace("Server{", "server = Server{").replace(".run()", "\n" + hang)
    )
    monkeypatch.setattr(launching, "_SERVER", text)
    monkeypatch.setattr(launching, "_ANSWERS_WITHIN_S", 0.3)
    monkeypatch.setattr(launching, "_ENDS_WITHIN_S", 0.1)
    harness = LauncherHarness(preload=[module("hung_of_preload", "")], start_timeout=start_timeout)
    try:
        with pytest.raises(RuntimeError, match=r"did not answer a request for a worker within 0\.3 s"):
            harness.launch("sleep")
    finally:
        harness.close()


def test_a_change_of_the_callers_list_changes_nothing(module: Any) -> None:
    """Worker processes that are started later import the same modules."""
    names = [module("listed_of_preload", "PID = 1")]
    settings = WorkerPoolSettings(preload=names)
    names.append("missing_of_preload")
    assert settings.preload == ("listed_of_preload",)
