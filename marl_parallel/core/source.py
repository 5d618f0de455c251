"""`Source` carries out the requests of `Stepper`s; `Transitions` are the caller's side of the results.

A pool of workers (`pool/pool.py`) is a source, and its block (`block_transitions.py`) has the transitions. A simulator
that steps many environments by itself (`sources/native.py`) is both. The code above uses both in the same way, except
for features that need workers: `Batch.workers` is None without workers.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.block.records import Columns
from marl_parallel.core.block.statistics import EpisodeStatistics
from marl_parallel.core.exclusive import CALL, CallGuard
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.slots import Results
from marl_parallel.core.reports import reports
from marl_parallel.core.view import View
from marl_parallel.types import EnvError, Stats

_CLOSE = "close"  # the only key of `Source._closing`
_TICK_S = 0.005  # how often a thread looks whether another one has closed everything

StackedMasks: TypeAlias = dict[AgentID, tuple[NDArray[Any] | None, NDArray[np.bool_]]]
"""By agent, views of its action masks, `(num_envs, ...)`, and which rows the simulator reported; other rows have any
values. The views are None for masks that cannot be stacked."""


class Source(ABC):
    """Environments that requests reset and step. A fault closes everything, unless an extension deals with it.

    Attributes:
        name: The name of the source in errors.
        shares: The environments of each worker; without workers, one share of all environments.
        batch_size: How many results arrive at a time.
        partial: Whether some environments can be stepped or reset alone.
        reseeds: Whether a reset can seed environments.
        reset_replaces_automatic_one: Whether a reset right after the end of an episode replaces the automatic reset, so
            that callers without automatic resets can use it.
        in_flight: How many environments have been sent and not received.
        seeds_stale: Whether environments may use other seeds than the seeds that they declared last.
        closed: Whether `close` has begun.
        freed: Whether `close` has freed everything, or is freeing it.
        closed_by: The cause of the close, in words; "" for the caller's `close`.
        guard: One call at a time, of `ParallelEnv` and all its facades. `close` needs no entry.
    """

    name: str
    shares: Sequence[range]
    batch_size: int
    partial: bool = True
    reseeds: bool = True
    reset_replaces_automatic_one: bool = False
    in_flight: int
    seeds_stale: bool
    closed: bool
    freed: bool
    closed_by: str = ""
    guard: CallGuard

    def __init__(self) -> None:
        check_open = weakref.WeakMethod(self.check_open)  # the guard must not keep this object

        def check() -> None:
            if (checked := check_open()) is not None:
                checked()

        self.guard = CallGuard(check)
        self._closing: dict[str, tuple[int]] = {}  # the thread that closes everything now, under `_CLOSE`

    @property
    @abstractmethod
    def pending(self) -> tuple[int, ...]:
        """The environments in flight, in order of their ids."""

    @abstractmethod
    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Any:
        """`send` and `recv` in one call, while nothing is in flight; returns the leftovers of the results."""

    @abstractmethod
    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        """Begin a `STEP` or `RESET` of environments that are not in flight; `payloads` are the arguments.

        With `together`, all their results are received at once, which is faster.
        """

    @abstractmethod
    def recv(
        self,
        at_least: int,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        *,
        window: float | None = None,
    ) -> Results:
        """Wait for `at_least` results, or the results of `env_ids`.

        First wait up to `window` seconds for all in flight; after that, for `at_least`.
        """

    @abstractmethod
    def check_resets(self, env_ids: Sequence[int]) -> None:
        """Raise `ValueError` unless these environments can be reset in one call."""

    @abstractmethod
    def execute_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """Carry out a request other than a step or reset while nothing is in flight; returns results by environment."""

    @abstractmethod
    def begin_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> None:
        """Begin a request as `execute_in` does, and return; the next call must be `finish_in`."""

    @abstractmethod
    def finish_in(self, timeout: float | None) -> dict[int, Any]:
        """Wait for the results of `begin_in`; `TimeoutError` after `timeout` seconds, which loses nothing."""

    @abstractmethod
    def stats(self) -> Stats:
        """Counts and times so far."""

    def check_open(self, error: str = "") -> None:
        """Raise `ClosedEnvironmentError` if everything has been closed; by default, its text says why."""
        if self.closed:
            text = f"the environments have been closed{self.closed_by}; make a new ParallelEnv"
            raise ClosedEnvironmentError(error or text)

    def record_cause(self, error: BaseException) -> None:
        """Have `check_open` say that this error has closed everything; call it before `close`."""
        if self.closed:
            return
        call = self.guard[CALL]
        during, first_line = "" if call is None else f" in {call[0]}()", reports.first_line(error)
        if isinstance(error, KeyboardInterrupt):
            self.closed_by = f" by Ctrl-C{during}"
        else:
            name = type(error).__name__
            self.closed_by = f" by an error{during} ({name}: {first_line})" if first_line else f" by {name}{during}"

    def mark_forked(self) -> None:
        """Have `check_open` say that this process is a forked child; call it in `abandon`."""
        self._closing.clear()  # that thread does not exist here
        if not self.closed:
            self.closed_by = " in this process, which was forked from the one that made them"

    def close(self, *, ask: bool | Collection[int] = True, timeout: float = 5.0) -> EnvError | None:
        """Free everything, and with `ask`, close the environments first; returns their first error. Idempotent.

        While another thread closes, this waits for it, at most `timeout` seconds. Then it frees what Ctrl-C has left
        there.
        """
        deadline, claim = time.monotonic() + timeout, (get_ident(),)
        try:  # as in `exclusive`: Ctrl-C at any moment leaves no claim
            while (first := self._closing.setdefault(_CLOSE, claim)) is not claim:
                if not self._wait_for_close(first, deadline):
                    return None
                timeout = max(deadline - time.monotonic(), 0.0)
            return self._close(ask, timeout)
        finally:
            if _CLOSE in self._closing and self._closing[_CLOSE] is claim:
                del self._closing[_CLOSE]

    def _wait_for_close(self, claim: tuple[int], deadline: float) -> bool:
        """Wait until another call of `close` has ended; False if it has not before the deadline.

        Also False if that call is this thread's own, or waits for the call that this thread is in: the caller is a
        signal handler or a callback.
        """
        if get_ident() in (*claim, *(self.guard[CALL] or ())):
            return False
        while self._closing.get(_CLOSE) is claim:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_TICK_S)
        return True

    def _wait_for_call(self, timeout: float) -> bool:
        """Wait until the call of another thread has ended; False if it has not after so many seconds."""
        call, deadline = self.guard[CALL], time.monotonic() + timeout
        if call is not None and call[1] != get_ident():  # else a signal handler or a callback closes, or a fault
            while self.guard[CALL] is call:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_TICK_S)
        return True

    @abstractmethod
    def _close(self, ask: bool | Collection[int], timeout: float) -> EnvError | None:
        """`close`, in one thread at a time."""

    def drop_memory(self) -> None:  # noqa: B027
        """Let go of shared memory, once everything is freed and no call is in progress; `stats` still works."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child process: forget everything, and touch nothing that the parent uses."""


class Transitions(View[Sequence[Mapping[Any, Any]], Columns]):
    """Writes actions of many environments, reads their transitions, and knows the state of each environment.

    As a `View`, actions are one dict by agent for each environment, and results five tuples of such dicts.

    Attributes:
        env_ids: All environments.
        mode: The auto-reset mode.
        copies: Whether observations are copies, which belong to the caller; else views of shared memory.
        statistics: The statistics of episodes.
    """

    env_ids: tuple[int, ...]
    mode: AutoresetMode
    copies: bool
    statistics: EpisodeStatistics

    @abstractmethod
    def write(self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int], *, stacked: bool = False) -> Any:
        """Write one dict of actions for each environment; `stacked` if they come from arrays over environments."""

    @abstractmethod
    def masks(self, env_id: int) -> dict[AgentID, Any]:
        """The latest action masks that the simulator reported, by agent, in new arrays; also of agents that do not act.

        {} if the next action does not count.
        """

    @abstractmethod
    def stacked_masks(self) -> tuple[StackedMasks, list[int]]:
        """The action masks by agent, and the environments whose masks only `masks` returns."""

    def mask_array(self, agents: Sequence[AgentID]) -> tuple[NDArray[np.int8], list[int]] | None:
        """The action masks as one view `(num_envs, agents, choices)`, and the environments whose masks only `masks`
        returns. An unreported mask has a negative first entry. None if masks are not in one array, or agents missing.
        """
        return None

    @abstractmethod
    def possible_agents_of(self, env_id: int) -> Sequence[AgentID]:
        """The agents that may appear in one environment; empty if they are not known beforehand."""

    @property
    @abstractmethod
    def acting(self) -> Sequence[Sequence[AgentID]]:
        """The agents that act next, in each environment."""

    @property
    @abstractmethod
    def alive(self) -> Sequence[Sequence[AgentID]]:
        """The agents that are alive, in each environment."""

    @property
    @abstractmethod
    def over(self) -> Sequence[bool]:
        """Whether the episode has ended and no reset has followed, in each environment."""

    @property
    @abstractmethod
    def has_reset(self) -> Sequence[bool]:
        """Whether each environment has been reset at least once."""

    @abstractmethod
    def events_in(self, env_id: int) -> Mapping[AgentID, int]:
        """The events of the latest transition of an environment that has been read."""

    @abstractmethod
    def begin(self, env_ids: Iterable[int]) -> None:
        """Note that environments have been reset by the caller."""

    def drop_memory(self) -> None:
        """Let go of shared memory: nothing is written or read any more, but the properties and `masks` still work."""
