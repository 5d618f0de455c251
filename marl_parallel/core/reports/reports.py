"""Error messages of failed workers and environments.

The first line, which is in the log too, has the environment, the worker, the method and the line of the simulator's
code. What to do next follows, then the stack.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import os
import re
import signal
import sysconfig
from collections.abc import Sequence
from typing import NamedTuple

from marl_parallel.core.messages import Failure, Lost, LostServer
from marl_parallel.core.objects.pickling import apart, loads
from marl_parallel.core.reports.advice import summary
from marl_parallel.core.warn import PACKAGE
from marl_parallel.core.worker.loading import MOST_TIMES
from marl_parallel.core.worker_status import Activity, Running
from marl_parallel.types import EnvError, WorkerCrashed, WorkerTimeout

logger = logging.getLogger("marl_parallel")
_said: set[str] = set()  # the texts `once` of records


def _is_new(record: logging.LogRecord) -> bool:
    """Whether no record with the same text `once` has come, from this process or from a worker."""
    once = getattr(record, "once", None)
    if not isinstance(once, str):
        return True
    is_new = once not in _said
    _said.add(once)
    return is_new


logger.addFilter(_is_new)  # `logging` calls it for records of workers, too


class LongCall(NamedTuple):
    """An environment or a worker that has been in one call for a long time."""

    worker: int
    running: Running | None  # None if the worker has not begun the request
    activity: Activity
    seconds: float


WARNS_AFTER_S = 1.0
"""A process that ends within this time after its environments were closed causes no warning."""


FIRST_CONSTRUCTION = '; a fault in the first construction is always raised, also with on_error="restart"'
"""The advice with `on_error="restart"`, for errors before all environments have been constructed."""


def env_error(env_id: int, worker: int, failure: Failure, advice: str = "") -> EnvError:
    """The error of an environment that raised; its cause and `original` is the exception, if that pickles."""
    method, stack = failure.method, with_code(failure.traceback)
    to_do = failure.to_do or f"fix the simulator, or its arguments{_restart(method, advice)}"
    if failure.or_else:
        to_do = f"{to_do}; or, {failure.or_else}"
    text = (
        f"environment {env_id} (worker {worker}) raised in {method}{_at(stack)}: {failure.summary}"
        f"\n\nWhat to do: {to_do}.\n\nWhere it happened:\n{stack}"
    )
    original: BaseException | None = None
    if failure.exception is not None:
        try:
            original = apart(loads, failure.exception)
        except Exception as reason:
            # It unpickles in the worker, but not here; the message has its text all the same.
            logger.debug("the exception of environment %d does not unpickle: %s", env_id, summary(reason))
    error = EnvError(text, env_ids=(env_id,), worker=worker, original=original, method=method, remote_traceback=stack)
    error.__cause__ = original
    return error


def unreadable(env_id: int, worker: int, method: str, error: Exception) -> EnvError:
    """The error of an environment whose results of a method cannot be unpickled here."""
    text = (
        f"environment {env_id} (worker {worker}) returned observations, infos or results in {method} that cannot be "
        f"unpickled here: {summary(error)}. Return plain numbers, texts and arrays, or objects that unpickle here."
    )
    return EnvError(text, env_ids=(env_id,), worker=worker, method="unpickle")


def crashed(
    worker: int, share: Sequence[int], lost: Lost, running: Running | None, advice: str = "", log_tail: str = ""
) -> WorkerCrashed:
    """The error of a worker that died with the environments of its share; `log_tail` is from `Backend.log_tail`."""
    env_ids, during = tuple(share), ""
    if running is not None:
        env_ids, during = (running.env_id,), f" in {running.activity.method} of environment {running.env_id}"
        advice = _restart(running.activity.method, advice)
    manner, to_do = manner_of_death(lost)
    text = (
        f"worker {worker} ({environments(share)}) died{during}{_at(lost.stack)}: {manner}\n\n"
        f"What to do: {to_do}{advice}.{_section('Stack at the crash', lost.stack)}{end_of_log(log_tail)}"
    )
    return WorkerCrashed(text, env_ids=env_ids, worker=worker, exitcode=lost.exitcode, stack=lost.stack)


def timed_out(
    worker: int,
    share: Sequence[int],
    running: Running | None,
    doing: Activity,
    limit: float,
    stack: str,
    advice: str,
    log_tail: str = "",
    *,
    imports: str = "",
) -> WorkerTimeout:
    """The error of an environment, or of the environments of a worker, past the timeout of `limit` seconds.

    `imports` is from `WorkerStatus.imports`.
    """
    env_ids, who = tuple(share), f"worker {worker} ({environments(share)})"
    if running is not None:
        env_ids, who = (running.env_id,), f"environment {running.env_id} (worker {worker})"
    where = code_line(stack)
    at, hangs = (f"; it is at {where}", "fix what hangs there") if where else ("", "see where it hangs")
    text = (
        f"{who} has not finished its {doing.method} within {limit:g} s{at}\n\n"
        f"What to do: if it needs longer, raise {doing.timeout}_timeout; else {hangs}"
        f"{_restart(doing.method, advice)}.{_imports(imports)}"
        f"{_section('Stack at the timeout', stack)}{end_of_log(log_tail)}"
    )
    return WorkerTimeout(text, env_ids=env_ids, worker=worker, method=doing.method, stack=stack)


def preload_timed_out(
    worker: int, share: Sequence[int], names: Sequence[str], limit: float, imports: str, stack: str
) -> WorkerTimeout:
    """The error of a fork server that has not imported the modules of `preload` within the timeout."""
    text = (
        f"the fork server has not imported the modules of preload={tuple(names)} within {limit:g} s\n\n"
        "What to do: if they need longer, raise start_timeout; else see where it hangs."
        f"{_imports(imports, preloaded=True)}"
        f"{_section('Stack at the timeout', stack)}"
    )
    return WorkerTimeout(text, env_ids=tuple(share), worker=worker, method="preload", stack=stack)


def preload_died(
    worker: int, share: Sequence[int], names: Sequence[str], server: LostServer, imports: str, stack: str
) -> WorkerCrashed:
    """The error of a fork server that has ended while it imported the modules of `preload`."""
    ended, to_do = end_of_server(server)
    listed = f"\n\nImports: {escaped(imports)}" if imports else ""
    text = (
        f"{ended} while it imported the modules of preload={tuple(names)}{_at(stack)}\n\n"
        f"What to do: run `python -c 'import {', '.join(names)}'` to see why; or {to_do}.{listed}"
        f"{_section('Stack at the crash', stack)}"
    )
    return WorkerCrashed(text, env_ids=tuple(share), worker=worker, exitcode=server.exitcode, stack=stack)


def _imports(imports: str, *, preloaded: bool = False) -> str:
    """The section of a timeout about what has been imported; `imports` is from `WorkerStatus.imports`."""
    if not imports:
        return ""
    once = "" if preloaded else ". What several workers import can be imported once, with preload="
    return (
        f"\n\nImports: {escaped(imports)}. CPU time of imports does not count, up to {MOST_TIMES} times "
        f"start_timeout{once}"
    )


def too_large(
    worker: int,
    share: Sequence[int],
    env_id: int,
    megabytes: float,
    limit: float | None,
    running: Running | None,
    log_tail: str,
) -> WorkerCrashed:
    """The error of a worker killed because of its memory; counts as a fault of the environment `env_id`."""
    during, counts, alone = "no environment was running", "", ""
    if running is not None:
        during = f"environment {running.env_id} was in {running.activity.method}"
    if len(share) > 1:
        counts = (
            "\n\nMemory is known per worker, not per environment. This counts as one fault of environment "
            f"{env_id}, which {'was running' if running is not None else 'was the last one that ran'}."
        )
        alone = " (with envs_per_worker=1, this error names the environment that leaks)"
    text = (
        f"worker {worker} ({environments(share)}) was killed because of its memory: {megabytes:,.0f} MB, over the "
        f"limit of kill_above_mb={limit} of the RecyclePolicy; {during}{counts}\n\nWhat to do: find out what "
        f"leaks{alone}, or have environments replaced earlier, with a lower max_memory_mb or with max_episodes."
        f"{end_of_log(log_tail)}"
    )
    return WorkerCrashed(text, env_ids=(env_id,), worker=worker, exitcode=None)


def long_call(share: Sequence[int], long: LongCall, stack: str, to_do: str = "") -> str:
    """The warning about an environment, or the environments of a worker, in one call for a long time."""
    worker, running, activity, seconds = long
    time = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    what = f"worker {worker} ({environments(share)}) has been waiting for {time} to start its {activity.method}"
    if running is not None:
        what = f"environment {running.env_id} (worker {worker}) has been in {activity.method} for {time}"
    where = code_line(stack)
    at = f"; it is at {where}" if where else ""
    return f"{what}{at}{to_do}{_section('Stack now', stack)}"


def still_running(worker: int, share: Sequence[int], seconds: float, stack: str) -> str:
    """The warning about a worker whose environments are closed, but whose process does not end."""
    return (
        f"worker {worker} ({environments(share)}) has closed its environments, but its process did not end within "
        f"{seconds:.1f} s and is killed: a simulator has left a thread or a child process running, and Python waits "
        "for threads that are not daemons and for children started by multiprocessing.\n\n"
        "What to do: stop and join it in the simulator's close(), or start it with daemon=True; until then every "
        f"close() takes that long.{_section('Its threads are here', stack)}"
    )


def in_use(seconds: float, can_kill: bool) -> str:
    """The warning about a thread that is in the middle of a call while another one closes everything."""
    done = "Workers were killed" if can_kill else "Workers were left as they are"
    return (
        f"close() waited {seconds:g} s for another thread that is inside a call of this ParallelEnv, such as "
        f"on_restart= or a handler of logs. {done}, and the environments' own close() was not called. Let that "
        "function return sooner, or pass close() a longer timeout="
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for the log."""
    return next(iter(str(error).splitlines()), "")


def escaped(text: str) -> str:
    r"""A line of text with an escape in place of each character that a terminal obeys instead of showing it.

    Example:
        >>> print(escaped("\x1b[2Jçà"))
        \x1b[2Jçà
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def environments(env_ids: Sequence[int]) -> str:
    """Env ids in words, such as "environments 0 to 3" or "environments 0, 2 and 5 to 7"."""
    parts = [f"{first} to {last}" if first < last else f"{first}" for first, last in runs(env_ids)]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"environment{'s' * (len(env_ids) > 1)} {listed}"


def runs(env_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbouring env ids, in order."""
    found: list[tuple[int, int]] = []
    for env_id in sorted(env_ids):
        if found and found[-1][1] == env_id - 1:
            found[-1] = found[-1][0], env_id
        else:
            found.append((env_id, env_id))
    return found


def _restart(method: str, advice: str) -> str:
    """The advice to restart, unless this method is never restarted."""
    return "" if method in ("start", "constructor", "close") and advice != FIRST_CONSTRUCTION else advice


def _at(stack: str) -> str:
    where = code_line(stack)
    return f", at {where}" if where else ""


def _section(heading: str, stack: str) -> str:
    return f"\n\n{heading}:\n{with_code(stack)}" if stack else ""


def with_code(stack: str) -> str:
    """A worker's stack, with the code of frames in notebook cells, which only this process has."""
    lines = []
    for line in stack.splitlines(keepends=True):
        lines.append(line)
        if (frame := _FRAME.match(line)) is None or os.path.exists(frame["path"]):
            continue
        if code := linecache.getline(frame["path"], int(frame["line"])).strip():
            lines.append(f"    {code}\n")
    return "".join(lines)


def end_of_log(log_tail: str) -> str:
    """The last section of an error; `log_tail` is from `Backend.log_tail`."""
    return f"\n\nThe end of its log, {log_tail}" if log_tail else ""


def manner_of_death(lost: Lost) -> tuple[str, str]:
    """How a process died, and the advice for that."""
    alone = 'run that environment alone, with backend="serial"'
    if lost.server is not None:
        ended, to_do = end_of_server(lost.server)
        return f"{ended}, and all its workers ended with it", to_do
    if lost.reason:
        return lost.reason, "find out what ended it before you start the run again"
    if lost.exitcode is None:
        return "cause unknown", alone
    if lost.exitcode >= 0:
        return f"exit code {lost.exitcode}", f"find what in the simulator ends the process, such as os._exit; {alone}"
    manner = _signal(-lost.exitcode)
    name = manner.split()[0]
    if name == "SIGKILL":
        return f"{manner}, possibly because memory ran out", SIGKILL_ADVICE
    if name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"):
        return manner, f"fix the native code that broke, or report it to its authors; to find it, {alone}"
    if name == "SIGXCPU":
        return manner, f"raise the limit of CPU time (`ulimit -t`, resource.RLIMIT_CPU), or handle the signal; {alone}"
    if name in ("SIGALRM", "SIGVTALRM", "SIGPROF"):
        return manner, f"handle the signal where the simulator sets a timer (signal.alarm, signal.setitimer); {alone}"
    survival = f"workers survive a {name} from outside unless a simulator sets a handler for it, or the default one"
    return manner, f"find out what sent that signal, and which simulator calls signal.signal: {survival}; {alone}"


def end_of_server(server: LostServer) -> tuple[str, str]:
    """How a fork server has ended, and the advice for that."""
    ended = f"the fork server (process {server.pid}) ended"
    if server.exitcode is None:
        return f"{ended}, cause unknown", "find out what ended that process, and see the stderr of this program"
    if server.exitcode >= 0:
        return (
            f"{ended}: exit code {server.exitcode}",
            "read the stderr of this program, where the fork server writes too",
        )
    manner = _signal(-server.exitcode)
    if -server.exitcode == getattr(signal, "SIGKILL", None):
        return f"{ended}: {manner}", SIGKILL_ADVICE
    return f"{ended}: {manner}", "find out what sent that signal to it, or, if nothing did, see its stderr"


SIGKILL_ADVICE = (
    "check `dmesg` for an out-of-memory kill and run fewer environments; otherwise find out what sent SIGKILL"
)


def _signal(number: int) -> str:
    name = signal.Signals(number).name if number in [*signal.Signals] else "a signal"
    return f"{name} (signal {number})"


def _runs_simulator(frames: Sequence[re.Match[str]]) -> int:
    """2 for a worker's thread, 1 for another thread of this package, else 0."""
    if any(frame["path"] == _WORKER for frame in frames):
        return 2
    return int(any(frame["path"].startswith(PACKAGE) for frame in frames))


_FRAME = re.compile(r'^ *File "(?P<path>.+)", line (?P<line>\d+)(?P<traceback>,?) in ', re.MULTILINE)
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_WORKER = os.path.join(PACKAGE, "core", "worker", "worker.py")
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def is_of_a_library(path: str) -> bool:
    """Whether a file of Python code belongs to this package, the standard library or an installed package."""
    return path.startswith((PACKAGE, *_STDLIB)) or _INSTALLED.search(path) is not None


def code_line(stack: str) -> str:
    """The line of the simulator that a stack comes from, in words; empty if there is none.

    The stack is a traceback, or the output of `faulthandler` for all threads.
    """
    latest = stack.rpartition("Traceback (most recent call last):")[2]
    threads = [list(_FRAME.finditer(part)) for part in _THREAD.split(latest)]
    # The thread that runs the simulator, else another thread of this package, else the first thread.
    frames = max(threads, key=lambda frames: (_runs_simulator(frames), bool(frames)))
    if frames and frames[0]["traceback"]:
        frames.reverse()
    inside = [*itertools.takewhile(lambda frame: not frame["path"].startswith(PACKAGE), frames)]  # innermost first
    outside = [frame for frame in inside if not frame["path"].startswith(_STDLIB) or _INSTALLED.search(frame["path"])]
    users = [frame for frame in outside if not _INSTALLED.search(frame["path"])]
    chosen = next(iter(users or outside or inside), None)
    return f"line {chosen['line']} of {chosen['path']}" if chosen else ""
