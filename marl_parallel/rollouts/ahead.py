"""`Ahead`: rollouts that a thread collects while the caller trains on the one before."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from gymnasium.error import ClosedEnvironmentError

from marl_parallel.core.reports.reports import logger
from marl_parallel.core.source import Source
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts.arrays import Current, Policy, RolloutArrays
from marl_parallel.types import FinishedEpisode

_POLL_S = 0.05
"""How often the thread looks whether the environments have been closed."""
_REPORT_AFTER_S = 60.0
"""A policy that has not returned after this time is reported."""
_FORMAT = "marl_parallel rollout 1"


class Finished(NamedTuple):
    """A complete rollout.

    Attributes:
        arrays: Its data.
        episodes: The episodes that ended in it.
        version: How often `publish` had been called when it began.
    """

    arrays: RolloutArrays
    episodes: list[FinishedEpisode]
    version: int


class AheadStats(NamedTuple):
    """Where the time of a `with rollout.ahead(...)` block has gone.

    Attributes:
        rollouts: How many rollouts the loop has received.
        learner_waited_s: Seconds that the loop has waited for rollouts.
        collector_waited_s: Seconds that complete rollouts have waited for the loop.
    """

    rollouts: int
    learner_waited_s: float
    collector_waited_s: float


class _Stopped(Exception):
    """The block is being left: the rollout in progress ends before its next step."""


class _Answer:
    """What a function has returned, or raised, that the thread calls.

    Without locks: Ctrl-C while the caller waits might leave one locked, and the thread would never end.
    """

    def __init__(self) -> None:
        self._is_there: SimpleQueue[None] = SimpleQueue()
        self.result: tuple[Any, BaseException | None] | None = None
        self.completed = 0.0  # seconds of `time.perf_counter`

    def call(self, function: Callable[[], Any]) -> None:
        try:
            result: tuple[Any, BaseException | None] = function(), None
        except BaseException as error:
            result = None, error
        self.completed, self.result = time.perf_counter(), result
        self._is_there.put(None)
        del self, result  # the traceback of the error refers to this frame

    def wait(self, timeout: float) -> None:
        """Wait for the result; may return without it, also before the timeout."""
        with contextlib.suppress(Empty):
            self._is_there.get(timeout=timeout)


class _Collector(threading.Thread):
    """Makes all calls of the environments while the block is open, so that Ctrl-C interrupts none of them.

    It ends after `stop`, or when the environments are closed. It is a daemon, since a program may exit in the block.

    Args:
        hold: Calls a function during one call of the environments that lasts; raises if they are in use.
        source: The environments.
        policy: What `act` calls.
    """

    def __init__(self, hold: Callable[[Callable[[], None]], None], source: Source, policy: Policy) -> None:
        super().__init__(name="ahead", daemon=True)
        self._hold, self._source, self._policy, self._pid = hold, source, policy, os.getpid()
        self._requests: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._life = _Answer()  # of this thread
        self._acting_since: float | None = None
        # Not `is_alive`: Ctrl-C inside `is_alive` or `join` can mark a thread that runs as ended.
        self._has_begun = False
        self.is_stopped = False

    # -- in the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._has_begun = True
        self._life.call(self._live)

    def _live(self) -> None:
        try:
            if not self.is_stopped:
                self._hold(self._serve)
        finally:
            with contextlib.suppress(Empty):
                while True:  # what has not been called refers to this object
                    self._requests.get_nowait()

    def _serve(self) -> None:
        while not (self.is_stopped or self._source.closed):
            with contextlib.suppress(Empty):
                request = self._requests.get(timeout=_POLL_S)
                if request is not None:
                    function, answer = request
                    answer.call(function)
                    del function, answer
                del request

    def act(self, current: Current) -> Any:
        """Call the policy; raises `_Stopped` before or after it."""
        self._check_not_stopped()
        self._acting_since = time.monotonic()
        try:
            chosen = self._policy(current)
        finally:
            self._acting_since = None
        self._check_not_stopped()
        return chosen

    def _check_not_stopped(self) -> None:
        if self.is_stopped:
            raise _Stopped

    # -- in the caller's thread --------------------------------------------------------------------------------------

    def send(self, function: Callable[[], Any]) -> _Answer:
        """Have the thread call a function after those that were sent before."""
        answer = _Answer()
        self._requests.put((function, answer))
        return answer

    def receive(self, answer: _Answer) -> Any:
        """Wait for what the function has returned; raises what the function, or the thread, has raised."""
        self._wait(answer)
        latest = self._life if answer.result is None else answer
        value, error = latest.result or (None, None)
        if error is not None:
            latest.result = None, None  # else the error, its traceback and the answer would refer to each other
            try:
                raise error
            finally:
                del error
        if latest is not answer:
            self._source.check_open()  # also in a forked child
            raise ClosedEnvironmentError("the thread of ahead() has ended")
        return value

    def stop(self) -> None:
        """End soon: at once, or after the step or the policy in progress. Idempotent."""
        self.is_stopped = True
        self._requests.put(None)

    def end(self) -> None:
        """Stop, and wait until the thread has left the environments."""
        self.stop()
        if self._has_begun:
            self._wait(self._life)
            if self._life.result is not None:
                self._life.result = (
                    None,
                    None,
                )  # an error of the thread, its traceback and this object refer to each other

    def _wait(self, answer: _Answer) -> None:
        """Wait for a result, or for the end of the thread; report a policy that does not return."""
        reported = None
        while answer.result is None and self._life.result is None and os.getpid() == self._pid:
            since = self._acting_since
            if since is not None and since != reported and time.monotonic() - since >= _REPORT_AFTER_S:
                reported = since
                logger.warning(
                    "the policy of Rollout.ahead has not returned after %.0f s. Its stack:\n%s",
                    time.monotonic() - since,
                    "".join(traceback.format_stack(sys._current_frames().get(self.ident or 0))),
                )
            answer.wait(_POLL_S)


class Ahead(Iterator[RolloutArrays]):
    """The rollouts of a `with rollout.ahead(...)` block, in a loop; `Rollout.ahead` says what it does.

    Attributes:
        version: How often `publish` had been called when the latest rollout of the loop began.
        finished_episodes: The returns and lengths of the episodes that ended in that rollout.
    """

    def __init__(
        self,
        policy: Policy,
        publish: Callable[[], object],
        most: int | None,
        *,
        loaded: list[Finished],
        hold: Callable[[Callable[[], None]], None],
        collect: Callable[[Policy], tuple[RolloutArrays, list[FinishedEpisode]]],
        save: Callable[[], list[bytes]],
        as_torch: Callable[[RolloutArrays, Any, bool], RolloutArrays],
        source: Source,
    ) -> None:
        self._publish, self._most, self._loaded = publish, most, loaded
        self._save, self._as_torch, self._source = save, as_torch, source
        self.version, self.finished_episodes = 0, list[FinishedEpisode]()
        self._latest: RolloutArrays | None = None
        self._received = self._published = 0
        self._learner_waited_s = self._collector_waited_s = self._asked = 0.0
        self._collector = _Collector(hold, source, policy)
        self._collect = functools.partial(collect, self._collector.act)
        self._in_progress: _Answer | None = None
        self._has_entered = False
        weakref.finalize(self, self._collector.stop)

    def __enter__(self) -> Ahead:
        if self._has_entered:
            raise ValueError("this block of ahead() has been entered before: call Rollout.ahead() again")
        self._has_entered = True
        try:
            self._collector.start()
            self._collector.receive(self._collector.send(lambda: None))  # raises if the environments are in use
            if not self._loaded and self._most != 0:
                self._begin()
        except BaseException:
            self._collector.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._collector.end()
        dropped, self._in_progress = self._in_progress, None
        failure = None if dropped is None or dropped.result is None else dropped.result[1]
        if failure is not None and not isinstance(failure, _Stopped | ClosedEnvironmentError):
            logger.warning(
                "the rollout that was collected ahead has failed; it was dropped, because the block was left",
                exc_info=(type(failure), failure, failure.__traceback__),
            )

    def __next__(self) -> RolloutArrays:
        """The next rollout; the one before is overwritten from now on.

        Raises:
            ClosedEnvironmentError: The environments have been closed.
            ValueError: Outside the block, or after an error that this has raised.
            Exception: What the policy has raised in the thread, and the errors of `Rollout.step`.
        """
        self._check_in_block("next")
        if self._received == self._most:
            raise StopIteration
        try:
            return self._next()
        except StopIteration as error:  # else the loop would end
            raise RuntimeError("the policy or publish of ahead() raised StopIteration") from error

    def _next(self) -> RolloutArrays:
        is_loaded = bool(self._loaded)
        finished = self._loaded[0] if is_loaded else self._finished()
        if is_loaded or self._received:
            self._publish()
            self._published = finished.version + 1
        if self._in_progress is not None:
            self._collector_waited_s += max(self._asked - self._in_progress.completed, 0.0)
        self._loaded.clear()
        self._in_progress = None
        self._latest, self.finished_episodes, self.version = finished
        self._received += 1
        if self._received != self._most and self._in_progress is None:
            self._begin()
        return self._latest

    def torch(self, device: Any = "cpu", *, pin: bool = False) -> RolloutArrays:
        """The latest rollout of the loop as torch tensors.

        Args:
            device: The device of the tensors. On the CPU they share the memory of the arrays.
            pin: As in `Rollout.torch`. Call `torch.cuda.synchronize()` before the loop asks for the next rollout.
        """
        if self._latest is None:
            raise ValueError("the loop has not received a rollout: call torch() in its body")
        return self._as_torch(self._latest, device, pin)

    def save_state(self) -> list[bytes]:
        """Wait for the rollout in progress, and save it together with the environments; for `Rollout.load_state`.

        Call it at the end of the loop's body, after training on the latest rollout, and not in a handler of signals.
        Save the learner and the generators of the policy after it. A run that loads all of them goes on bit for bit:
        the first rollout of its `ahead` is the saved one, and `publish` is called before that. In the body of the last
        of `rollouts=` no rollout is in progress, and the states are those of `Rollout.save_state`.

        Raises:
            ClosedEnvironmentError: The environments have been closed.
            ValueError: Outside the block, or before the loop has received a rollout.
            TypeError: As in `ParallelEnv.save_state`.
            Exception: What the policy has raised in the thread, and the errors of `Rollout.step`.
        """
        self._check_in_block("save_state")
        if not self._received:
            raise ValueError("the loop has not received a rollout: call save_state() at the end of its body")
        finished = None if self._received == self._most else self._finished()
        states: list[bytes] = self._collector.receive(self._collector.send(self._save))
        return states if finished is None else [*states, pickle.dumps((_FORMAT, *finished))]

    def stats(self) -> AheadStats:
        """Where time has gone so far."""
        return AheadStats(self._received, self._learner_waited_s, self._collector_waited_s)

    def _check_in_block(self, name: str) -> None:
        self._source.check_open()
        if not self._has_entered:
            raise ValueError(f"{name}() was called outside the block: write `with rollout.ahead(...) as rollouts:`")
        if threading.get_ident() == self._collector.ident:
            raise ValueError(f"{name}() was called by the policy of ahead(): call it in the body of the loop")
        if self._collector.is_stopped:
            raise ValueError(f"{name}() was called after the block of ahead() has ended: open another one")

    def _begin(self) -> None:
        collect, version = self._collect, self._published
        self._in_progress = self._collector.send(lambda: Finished(*collect(), version))

    def _finished(self) -> Finished:
        """Wait for the rollout in progress. An error, also Ctrl-C, ends the block."""
        if self._in_progress is None:  # after Ctrl-C
            self._begin()
        assert self._in_progress is not None
        self._asked = time.perf_counter()
        try:
            finished: Finished = self._collector.receive(self._in_progress)
        except BaseException:
            self._collector.stop()
            raise
        finally:
            self._learner_waited_s += time.perf_counter() - self._asked
        return finished


def unpacked(state: bytes) -> Finished:
    """The rollout that `Ahead.save_state` has saved; `ValueError` for anything else."""
    try:
        kind, *fields = pickle.loads(state)
    except Exception as error:
        raise ValueError(
            f"the last state must be a rollout of Ahead.save_state; reading it raised {error!r}"
        ) from error
    if kind != _FORMAT:
        raise ValueError(f"the last state must be a rollout of Ahead.save_state, got {kind!r:.80}")
    return Finished(*fields)


def check_alike(saved: RolloutArrays, arrays: RolloutArrays) -> None:
    """Raise `ValueError` unless both have the same names, shapes and dtypes."""
    for field, tree in arrays._asdict().items():
        expected, got = (
            tree_map(lambda array: f"{array.dtype} {array.shape}", one) for one in (tree, getattr(saved, field))
        )
        if got != expected:
            raise ValueError(f"the saved rollout does not fit: expected {field} to be {expected}, got {got}")
