"""The advice in errors about known exceptions and limits of the system; `reports.py` has it for dead workers.

`advice` is for what a simulator raises in a worker. `name_limit` and `naming_limits` are for what this package opens,
forks or allocates, in any process.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from marl_parallel.adapters import AdapterMismatch
from marl_parallel.adapters.attributes import LookupFailed
from marl_parallel.core.spaces import Mismatch, Unreadable

try:
    import resource
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

E = TypeVar("E", bound=BaseException)


def summary(error: BaseException) -> str:
    """The class and the text of an exception, also if its `__str__` raises."""
    return "".join(traceback.format_exception_only(error)).strip()


def advice(error: BaseException, *, own_process: bool) -> str:
    """What to do about an exception that a simulator has raised in this thread; empty if it is not a known one.

    Args:
        error: The exception.
        own_process: Whether this thread is the main thread of a worker process.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    for one, is_shown in _chain(error):
        if own_process and _needs_terminal(one):
            return NO_TERMINAL
        if own_process and (is_of_flags(one) or _is_of_gym(one)):
            return FLAGS if is_of_flags(one) else GYM_ID
        if not in_main_thread and _needs_main_thread(one):
            return OTHER_THREAD
        if is_shown and _is_of_a_limit(one):
            return limit_advice(one)
    if isinstance(error, LookupFailed) and error.__cause__ is not None:
        return error.to_do
    return next((f"{text}; a restart would not help" for kind, text in OF_KINDS.items() if isinstance(error, kind)), "")


OF_KINDS: dict[type[BaseException], str] = {
    Unreadable: "let the simulator return plain numbers and flags (float(reward), bool(flag))",
    Mismatch: "let the simulator return what its spaces declare, or declare what it returns",
    AdapterMismatch: "see which adapter= fits the simulator, or change the simulator",
}
"""By class, a derived one first."""


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """An exception, then its cause or the exception that was being handled, and so on; and whether it is shown.

    `raise ... from None` hides the exception that was being handled.
    """
    is_shown = True
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and all(one is not other for other in seen):
        seen.append(one)
        yield one, is_shown
        is_shown = is_shown and (one.__cause__ is not None or not one.__suppress_context__)
        one = one.__cause__ or one.__context__


# -- terminals ---------------------------------------------------------------------------------------------------------

NO_TERMINAL = 'workers have no terminal: use backend="serial", where breakpoint(), pdb and input() work'
_DEBUGGERS = {"bdb", "pdb"}
# Other debuggers raise errors of their own, as Ray's does. Reading /dev/null returns an empty text, which raises later:
# int(sys.stdin.readline()).
_USES_TERMINAL = re.compile(
    r"(?<![.\w])(?:breakpoint|set_trace)\(|db\.set_trace\(|sys\.stdin\.(?:read|buffer)|\(sys\.stdin\)|get_terminal_size\("
)


def _needs_terminal(error: BaseException) -> bool:
    """Whether an exception comes from a debugger, or from reading a terminal or the standard input."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__") for frame in frames]
    if not _DEBUGGERS.isdisjoint(modules):  # `BdbQuit`; since Python 3.14 also `SystemExit`
        return True
    if isinstance(error, EOFError) and ("EOF when reading a line" in summary(error) or "getpass" in modules[-1:]):
        return True
    if type(error).__module__ == "termios":
        return True
    if _number(error) == errno.ENXIO and getattr(error, "filename", None) == "/dev/tty":
        return True
    return any(_USES_TERMINAL.search(one.line or "") for one in traceback.extract_tb(error.__traceback__))


# -- what the caller's script has done ---------------------------------------------------------------------------------

FLAGS = (
    "workers do not have your program's absl flags: read them in your program and pass their values to the "
    "constructor, as in functools.partial(make_env, size=FLAGS.size). For flags that a library defines and reads, call "
    "absl.flags.FLAGS(sys.argv, known_only=True) in the constructor, after the import of that library"
)
GYM_ID = "import the module that registers this id with gym inside the constructor"
_OF_ABSENT_FLAGS = ("UnparsedFlagAccessError", "UnrecognizedFlagError", "AttributeError", "TypeError")


def is_of_flags(error: BaseException) -> bool:
    """Whether absl raises because flags are not parsed or not defined here, or because it does not pickle flags."""
    last: Any = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame.f_globals
    return type(error).__name__ in _OF_ABSENT_FLAGS and str(last.get("__name__")).startswith("absl.flags")


def _is_of_gym(error: BaseException) -> bool:
    """Whether an id is not registered with OpenAI's gym."""
    return any((kind.__module__, kind.__name__) == ("gym.error", "UnregisteredEnv") for kind in type(error).__mro__)


# -- threads -----------------------------------------------------------------------------------------------------------

OTHER_THREAD = (
    "the simulator needs the main thread of its process, as for signal handlers and event loops, but runs in another "
    'thread: use backend="process"'
)
_NEEDS_MAIN_THREAD = re.compile("main thread|no current event loop in thread")


def _needs_main_thread(error: BaseException) -> bool:
    return isinstance(error, ValueError | RuntimeError) and _NEEDS_MAIN_THREAD.search(summary(error)) is not None


# -- environments in one process ---------------------------------------------------------------------------------------


def only_once(*, own_process: bool) -> str:
    """What to do if a constructor has failed because the simulator can exist only once in a process."""
    return f"if the simulator can exist only once in a process, pass {a_process_each(own_process=own_process)}"


def a_process_each(*, own_process: bool) -> str:
    """The arguments that give each environment a process of its own; `own_process` is as in `advice`."""
    return "envs_per_worker=1" if own_process else 'backend="process" and envs_per_worker=1'


# -- limits of the system ----------------------------------------------------------------------------------------------


class _Limit(NamedTuple):
    """What to do where a limit of the system is reached."""

    raise_it: str
    option: str = ""  # of `ulimit`; else `command` shows the limit
    resource: str = ""  # in the module `resource`
    unit: int = 1  # of the option, in bash
    command: str = ""
    otherwise: str = "use fewer workers"


LIMITS = {
    errno.EAGAIN: _Limit(
        "raise the limit of processes and threads", "-u", "RLIMIT_NPROC",
        otherwise="that of the container or job (pids.max), or use fewer workers",
    ),
    errno.EMFILE: _Limit("raise the limit of open files", "-n", "RLIMIT_NOFILE"),
    errno.ENFILE: _Limit("raise the limit of open files of all processes", command="sysctl fs.file-max"),
    errno.EFBIG: _Limit(
        "raise the limit of file sizes, which applies to shared memory too", "-f", "RLIMIT_FSIZE", 1024,
        otherwise="use fewer environments or smaller spaces",
    ),
    errno.ENOMEM: _Limit(
        "free memory, or raise its limit", "-v", "RLIMIT_AS", 1024, otherwise="use fewer environments"
    ),
    errno.ENOSPC: _Limit(
        "free space for temporary files", command="df",
        otherwise="set TMPDIR to a folder with more space, or use fewer environments",
    ),
}  # fmt: skip
"""By error number."""


def limit_advice(error: BaseException) -> str:
    """What to do about an exception that a limit of the system has caused; empty for other exceptions."""
    limit = LIMITS.get(_number(error))
    if resource is None or limit is None:
        return ""
    how = f"`{limit.command}`"
    if limit.option:
        soft, hard = [
            "unlimited" if one == resource.RLIM_INFINITY else str(one // limit.unit)
            for one in resource.getrlimit(getattr(resource, limit.resource))
        ]
        how = f"`ulimit {limit.option}`, now {soft}, at most {hard}"
    return f"{limit.raise_it} ({how}), or {limit.otherwise}"


def _number(error: BaseException) -> int:
    """The error number of a limit that an exception may come from; 0 for other exceptions."""
    if isinstance(error, OSError):
        return error.errno if isinstance(error.errno, int) else 0
    if isinstance(error, RuntimeError) and "can't start new thread" in summary(error):
        return errno.EAGAIN
    return errno.ENOMEM if isinstance(error, MemoryError) else 0


def _is_of_a_limit(error: BaseException) -> bool:
    """Whether a simulator's exception comes from a limit of the system, and not from its own files and sockets."""
    if not isinstance(error, BlockingIOError):
        return not isinstance(error, MemoryError) and _number(error) in LIMITS.keys() - {errno.ENOSPC}
    # A process cannot be started; or a socket that does not wait has nothing to read.
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return any("fork" in (call := f"{one.name} {one.line}") or "posix_spawn" in call for one in last)


def name_limit(error: E) -> E:
    """Let the text of an exception name the limit of the system that has caused it, if one has; returns it."""
    text = limit_advice(error)
    if not text or text in str(error):
        return error
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror}. What to do: {text}"
        error.args = (error.errno, error.strerror, *error.args[2:])
    else:
        error.args = (f"{error}. What to do: {text}".removeprefix(". "),)
    return error


@contextlib.contextmanager
def naming_limits() -> Iterator[None]:
    """`name_limit` for what a block of code raises; also a decorator."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        name_limit(error)
        raise
