"""Programs in an unusual state: blocked or ignored signals, closed or many descriptors, a removed working directory.

Each script steps environments, loses a worker and continues with its replacement.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, TESTS
from helpers.launching import linux_only, opened_by_libffi
from helpers.start_methods import START_METHODS

from marl_parallel.backends import interpreter

pytestmark = [linux_only, pytest.mark.release_independent, pytest.mark.starts_anew]


SCRIPT = """
import json, os, signal, subprocess, sys
sys.path.insert(0, {tests!r})
{before}
from simulators.deterministic import Hunt
from helpers.start_methods import arguments
from marl_parallel import ParallelEnv

def standard():
    return [os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in range(3)]

class Watched(Hunt):
    def pid(self):
        return os.getpid()

    def surroundings(self):
        print("written by a simulator")
        sys.stderr.write("written by a simulator\\n")
        return {{
            "child": subprocess.run(["sh", "-c", "exit 3"]).returncode,
            "terminated": subprocess.run(["sh", "-c", "kill -TERM $$; exit 4"]).returncode,
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "standard": standard(),
            "cwd": os.path.realpath("/proc/self/cwd"),
        }}

with ParallelEnv([Watched] * 2, num_workers=2, on_error="restart", **arguments({start_method!r})) as env:
    env.reset()
    {between}
    killed = env.call("pid")[0]
    os.kill(killed, signal.SIGKILL)
    env.reset()
    found = {{
        "surroundings": env.call("surroundings"),
        "restarts": env.stats().restarts,
        "replaced": env.call("pid")[0] != killed,
        "standard": standard(),
    }}
with open({results!r}, "w") as file:
    json.dump(found, file)
"""

# Changes this state and becomes the script, as a launcher of jobs does.
LAUNCHER = """
import os, resource, signal, sys
{state}
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def run(start_method: str, folder: Path, *, state: str = "", before: str = "", between: str = "") -> dict[str, Any]:
    """Run the script.

    Args:
        start_method: How its workers start.
        folder: The folder for its results.
        state: Statements of the program that executes the script.
        before: Statements of the script before its imports.
        between: Statements after the first reset and before a worker is killed.

    Returns:
        The script's output; values that are the same in every state are checked.
    """
    results = folder / "results.json"
    script = SCRIPT.format(
        tests=str(TESTS), start_method=start_method, results=str(results), before=before, between=between
    )
    command = [sys.executable, "-c", LAUNCHER.format(state=state), script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert (done.returncode, results.exists()) == (0, True), done.stderr
    found = json.loads(results.read_text())
    assert found["replaced"]
    assert found["restarts"] == 1
    for surroundings in found["surroundings"]:
        assert surroundings["child"] == 3
        assert surroundings["terminated"] == -signal.SIGTERM
        assert surroundings["interrupt"]
        assert surroundings["blocked"] == 0
        assert surroundings["standard"][0] == os.devnull
    return found


STATES_OF_SIGNALS = {
    "all blocked by the launcher": {"state": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"},
    "SIGCHLD blocked by the thread": {"before": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])"},
    "SIGCHLD ignored": {"state": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"},
    "SIGTERM and SIGINT ignored": {
        "state": "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)"
    },
}


@pytest.mark.parametrize("name", STATES_OF_SIGNALS)
def test_blocked_and_ignored_signals(name: str, start_method: str, tmp_path: Path) -> None:
    """Deaths are noticed, and simulators can wait for their own children."""
    run(start_method, tmp_path, **STATES_OF_SIGNALS[name])


def test_exit_code_with_sigchld_ignored(tmp_path: Path) -> None:
    """The kernel reaps the children of such a program, so it cannot wait for its workers."""
    checked = """
    from marl_parallel import WorkerCrashed
    with ParallelEnv([Watched] * 2, num_workers=2) as raising:
        raising.reset()
        os.kill(raising.call("pid")[1], signal.SIGSEGV)
        try:
            raising.reset()
        except WorkerCrashed as error:
            assert (error.exitcode, error.worker) == (-signal.SIGSEGV, 1), error
        else:
            assert False, "not noticed"
    """
    run("forkserver", tmp_path, **STATES_OF_SIGNALS["SIGCHLD ignored"], between=checked.strip())


# Output of native libraries to a closed descriptor must not reach sockets or memory of the package.
PRINT = """
    for fd in range(3):
        for _ in range(100):
            try:
                os.write(fd, b"x" * 1000)
            except OSError:
                break
"""


@pytest.mark.parametrize(
    ("start_method", "closed"),
    [*((start_method, (0, 1, 2)) for start_method in START_METHODS), ("forkserver", (1,)), ("forkserver", (0, 2))],
    ids=str,
)
def test_closed_standard_descriptors(start_method: str, closed: tuple[int, ...], tmp_path: Path) -> None:
    """As in `python train.py <&- >&- 2>&-`."""
    found = run(start_method, tmp_path, state=f"for fd in {closed}: os.close(fd)", between=PRINT.strip())
    for fd in closed:
        path = found["standard"][fd]
        assert path in (os.devnull, f"/proc/self/fd/{fd}") or opened_by_libffi(path), "taken by a file of the package"
        for surroundings in found["surroundings"]:
            assert surroundings["standard"][fd] == os.devnull


def test_many_descriptors(start_method: str, tmp_path: Path) -> None:
    """More than `select.select` supports."""
    import resource  # not on Windows

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2000
    state = "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    run(start_method, tmp_path, state=state, before="kept = [open(os.devnull) for _ in range(1200)]")


@pytest.mark.parametrize("when", ["before", "between"])
def test_removed_working_directory(when: str, start_method: str, tmp_path: Path) -> None:
    """Workers start in the root folder, because many imports read the working directory."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    moves = f"os.chdir({str(folder)!r})"
    removes = f"os.rmdir({str(folder)!r})"
    if when == "before":
        # PettingZoo cannot be imported in such a folder.
        found = run(start_method, tmp_path, before=f"import pettingzoo; {moves}; {removes}")
        assert [one["cwd"] for one in found["surroundings"]] == ["/", "/"]
    else:
        found = run(start_method, tmp_path, before=moves, between=removes)
        assert found["surroundings"][0]["cwd"] == "/"


def test_long_path_and_no_executable(start_method: str, tmp_path: Path) -> None:
    """Linux limits one argument to 128 kB; programs that embed Python may have no `sys.executable`."""
    path = "sys.path += ['/nowhere/' + 'x' * 2000 + str(number) for number in range(100)]"
    run(
        start_method,
        tmp_path,
        before=f"import multiprocessing.spawn as mp; mp.set_executable(''); sys.executable = ''; {path}",
    )


@pytest.mark.parametrize("executable", ["", None])
def test_no_interpreter(executable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr("multiprocessing.spawn._python_exe", None)
    monkeypatch.setattr(sys, "exec_prefix", "/nowhere")
    with pytest.raises(RuntimeError, match=r"Set sys\.executable .* or pass backend=\"thread\""):
        interpreter.executable()


def test_interpreter_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/given/python")
    assert interpreter.executable() == "/given/python"
