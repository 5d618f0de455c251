"""The errors that are ours. Calls out of order use Gymnasium's own (`gymnasium.error`), bad arguments Python's.

Every text says which environment, in which worker, doing what, and what to do next; the attributes say the same to
a program.
"""

from __future__ import annotations

from collections.abc import Iterable


class ParallelEnvError(RuntimeError):
    """Something went wrong in a worker.

    Attributes:
        env_ids: The environments concerned: the one that was running, or all of the worker's where that is unknown.
        worker: The worker's number, None where no worker is to blame.
    """

    def __init__(self, message: str, *, env_ids: Iterable[int] = (), worker: int | None = None) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)
        self.worker = worker


class EnvError(ParallelEnvError):
    """An environment raised. `__cause__` is the original exception where it could be pickled.

    Attributes:
        method: What the environment was doing: `"constructor"`, `"reset"`, `"step"`, `"render"`, `"close"`, ...;
            or `"observation_space('agent_0')"` where a method that gives a space raised.
        remote_traceback: The traceback from inside the worker, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        method: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.method = method
        self.remote_traceback = remote_traceback


class WorkerCrashed(ParallelEnvError):
    """A worker process died: killed, crashed natively, or ended by the simulator itself.

    Attributes:
        exitcode: Its exit code; minus the signal's number where a signal ended it; None where unknown.
        stack: The stack at a native crash (segmentation fault and the like), empty where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        exitcode: int | None = None,
        stack: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.exitcode = exitcode
        self.stack = stack


class RestartLimitExceeded(ParallelEnvError):
    """An environment failed more often than its `RestartPolicy` allows; everything is closed.

    `__cause__` is the error of the last failure.
    """


class WorkerTimeout(ParallelEnvError, TimeoutError):
    """An environment took longer than it may.

    Attributes:
        method: What the environment was doing, as in `EnvError`.
        stack: The Python stack of the hung worker, taken while it hung; empty where it could not be had.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        method: str = "",
        stack: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.method = method
        self.stack = stack
