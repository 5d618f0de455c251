"""What went wrong, told to the user: from what a worker or its end has left behind to the error that is raised.

Every text says which environment, in which worker, doing what, and what to do next. What then happens is decided in
`supervision.py`.
"""

from __future__ import annotations

import logging
import pickle
import signal
from collections.abc import Sequence

from marl_parallel.errors import EnvError, WorkerCrashed, WorkerTimeout
from marl_parallel.runtime.ledger import Activity, Running
from marl_parallel.runtime.messages import Failure, Lost

logger = logging.getLogger("marl_parallel")

_ARGUMENTS = {Activity.RESET: "reset_timeout"} | dict.fromkeys(
    (Activity.START, Activity.CONSTRUCTOR, Activity.CLOSE), "start_timeout"
)


def limit_name(activity: Activity) -> str:
    """The argument of `ParallelEnv` that limits an activity."""
    return _ARGUMENTS.get(activity, "step_timeout")


def env_error(env_id: int, worker: int, failure: Failure, advice: str = "") -> EnvError:
    """The error of an environment that raised, with the original exception as its cause where that pickles."""
    error = EnvError(
        f"environment {env_id} (worker {worker}) raised in {failure.method}: {failure.summary}{advice}\n\n"
        f"Where it happened:\n{failure.traceback}",
        env_ids=(env_id,),
        worker=worker,
        method=failure.method,
        remote_traceback=failure.traceback,
    )
    if failure.exception is not None:
        try:
            error.__cause__ = pickle.loads(failure.exception)
        except Exception as reason:
            # It could be made again in the worker, but not here; its text is in the message in any case.
            logger.debug("the exception of environment %d does not unpickle: %s", env_id, reason)
    return error


def crashed(worker: int, share: Sequence[int], lost: Lost, running: Running | None, advice: str = "") -> WorkerCrashed:
    """The error of a worker that died with environments in it."""
    env_ids = tuple(share) if running is None else (running.env_id,)
    during = "" if running is None else f" in {running.activity.method} of environment {running.env_id}"
    stack = f"\n\nIts stack:\n{lost.stack}" if lost.stack else ""
    return WorkerCrashed(
        f"worker {worker} (environments {listed(share)}) died{during}: {_manner_of_death(lost.exitcode)}. "
        f"Run the environment alone to see why{advice}{stack}",
        env_ids=env_ids,
        worker=worker,
        exitcode=lost.exitcode,
        stack=lost.stack,
    )


def timed_out(
    worker: int,
    share: Sequence[int],
    running: Running | None,
    doing: Activity,
    limit: float,
    stack: str,
    advice: str = "",
) -> WorkerTimeout:
    """The error of an environment that takes longer than it may."""
    if running is None:
        env_ids, who = tuple(share), f"worker {worker} (environments {listed(share)})"
    else:
        env_ids, who = (running.env_id,), f"environment {running.env_id} (worker {worker})"
    where = f"\n\nIt was here:\n{stack}" if stack else ""
    return WorkerTimeout(
        f"{who} has not finished its {doing.method} within {limit:g} s. If it needs longer, raise "
        f"{limit_name(doing)}; else the stack says where it hangs{advice}{where}",
        env_ids=env_ids,
        worker=worker,
        method=doing.method,
        stack=stack,
    )


def first_line(error: BaseException) -> str:
    """What a log line has room for."""
    return str(error).partition("\n")[0]


def listed(env_ids: Sequence[int]) -> str:
    """Neighbours, in words."""
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]} to {env_ids[-1]}"


def _manner_of_death(exitcode: int | None) -> str:
    if exitcode is None:
        return "how is not known"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "a signal"
    hint = ", which is also how the kernel ends a process when memory runs out" if name == "SIGKILL" else ""
    return f"{name} (signal {-exitcode}){hint}"
