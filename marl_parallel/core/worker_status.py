"""`WorkerStatus`: what a worker is doing and has done, as numbers in shared memory; and the timeline of a trace.

The worker writes its `WorkerStatus`, and the parent reads it at any time without a request. Each number is written
whole. There is no lock, so two numbers may be read a moment apart. During a trace, a status also stores slices of time,
which the parent's `Tracer` collects.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from marl_parallel.core.files import replaced_file
from marl_parallel.core.worker.forks import end_returning_copy
from marl_parallel.types import StepTimes, WorkerStats


class Activity(IntEnum):
    """The activities of environments; `method` and `timeout` (without `_timeout`) are the names in errors.

    LAST_STATE is the state of an episode that has ended, before the automatic reset.
    """

    START, CONSTRUCTOR, RESET, STEP, STATE, RENDER, CALL, CLOSE, LAST_STATE = range(9)

    @property
    def method(self) -> str:
        return "state" if self is Activity.LAST_STATE else self.name.lower()

    @property
    def timeout(self) -> str:
        if self is Activity.RESET:
            return "reset"
        return "start" if self in (Activity.START, Activity.CONSTRUCTOR, Activity.CLOSE) else "step"


_STEP, _RESET = int(Activity.STEP), int(Activity.RESET)


class Running(NamedTuple):
    """An environment that is carrying out an activity."""

    env_id: int
    activity: Activity
    since: float  # in seconds of the status's clock
    inside: bool  # whether the simulator is still running; else its result is being written


# Numbers of 8 bytes: what is running and since when; whether requests are discarded (1) or the parent ends the worker
# (2); seconds in simulators, in transport and waiting; the number of parts of requests begun; steps and resets that
# have ended; for the present constructor, CPU time of imports, when the present one began, the CPU time then (0 if
# unknown), and wall time of imports. The worker writes one at a time, since `struct.pack_into` writes zeros first,
# which the parent would read.
# `_ENV` is an environment's number plus one while its simulator runs, and minus this number after its return until the
# next simulator runs. When the request is done, it is this number plus `_SETTLED`. It is 0 before anything has started.
_ENV, _ACTIVITY, _SINCE, _DISCARDED, _SIMULATOR, _TRANSPORT, _WAITING, _PARTS, _STEPS, _RESETS = range(10)
_LOADED, _LOADING, _LOADING_CPU, _LOADED_WALL = range(10, 14)
# Native code of a simulator may overwrite a status. Numbers that no worker writes count as unknown, since a status only
# says what to report and when a timeout began: it must neither end a run nor hide a fault.
_SETTLED = 1 << 40
_AHEAD_S = 60.0  # by how much the clock of another machine may be estimated wrongly
_TIMES = 16  # the counts of `StepTimes`
_NAMES = _TIMES + StepTimes.SIZE  # what is being imported, a line feed, and what has been imported, as text
_NAMES_NBYTES = 256
_SECONDS, _BITS = struct.Struct("=d"), struct.Struct("=q")


def duration_index(seconds: float) -> int:
    """The index of a duration in the counts of `StepTimes`; compiled code computes the same."""
    (bits,) = _BITS.unpack(_SECONDS.pack(seconds))
    index = (bits >> 50) - ((1023 - 20) << 2)  # the exponent and two bits of the fraction; from 2**-20 s
    return int(min(max(index, 0), StepTimes.SIZE - 1))


class WorkerStatus:
    """A worker's status, in a zeroed buffer of `NBYTES` bytes, aligned to 8, that worker and parent share.

    Attributes:
        clock: Returns the time in seconds; in the worker, the clock that corresponds to `Backend.clock`.
    """

    NBYTES = 8 * _NAMES + _NAMES_NBYTES

    def __init__(self, buffer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        view = memoryview(buffer).cast("B")[: self.NBYTES]
        self._view, self._ints, self._floats = view, view.cast("q"), view.cast("d")
        self._changed = self.clock()  # when the worker last began or finished a request
        self._entered = self._inside = self._busy = self._transport = self._waited = 0.0
        self._parts = self._steps = self._resets = self._env = 0
        # For compiled code: numbers, step times, and a flag that is set in a forked child, which must not write them.
        numbers = np.frombuffer(view, np.int64)
        self.for_codec = numbers, numbers[_TIMES:_NAMES], bytearray(1)
        _of_this_process.add(self)

    # -- written by the worker ---------------------------------------------------------------------------------------

    def enter(self, env_id: int, activity: int) -> None:
        now = self._entered = self.clock()
        ints = self._ints
        self._floats[_SINCE] = now
        ints[_ACTIVITY] = activity
        ints[_ENV] = self._env = env_id + 1

    def leave(self) -> float:
        """Record that the simulator has returned, or raised; `end_request` writes sums and counts. Returns the time."""
        now = self.clock()
        seconds = now - self._entered
        self._inside += seconds
        ints = self._ints
        ints[_ENV] = -self._env
        activity = ints[_ACTIVITY]
        if activity == _STEP:
            self._steps += 1
            ints[_TIMES + duration_index(seconds)] += 1
        elif activity == _RESET:
            self._resets += 1
        return now

    def add_steps(self, seconds: float, steps: int) -> None:
        """Add steps that compiled code has carried out; it writes the numbers of `enter` and `leave` itself."""
        self._inside += seconds
        self._steps += steps

    @contextlib.contextmanager
    def during(self, env_id: int, activity: Activity) -> Iterator[None]:
        """`enter` and `leave` around a block of code; may be nested."""
        outer, outer_activity = self._ints[_ENV], self._ints[_ACTIVITY]
        is_within = 0 < outer < _SETTLED
        if is_within:
            self.leave()
        self.enter(env_id, activity)
        try:
            yield
        finally:
            self.leave()
            if is_within:
                self.enter(int(outer) - 1, int(outer_activity))

    def begin_request(self) -> None:
        now = self.clock()
        ints = self._ints
        ints[_ENV] = ints[_ACTIVITY] = 0
        self._parts += 1
        ints[_PARTS] = self._parts
        self._waited += now - self._changed
        self._floats[_WAITING] = self._waited
        self._changed = now

    def end_request(self) -> float:
        """Note that the worker has carried out the request, or the part of it; returns the time."""
        now = self.clock()
        ints, floats = self._ints, self._floats
        if -_SETTLED < (env := ints[_ENV]) < 0:
            ints[_ENV] = _SETTLED - env
        self._busy += now - self._changed
        self._transport = max(self._transport, self._busy - self._inside)  # no sum ever decreases
        floats[_SIMULATOR], floats[_TRANSPORT] = self._inside, self._transport
        ints[_STEPS], ints[_RESETS] = self._steps, self._resets
        self._changed = now
        return now

    def forget_loading(self) -> None:
        """Note that a constructor begins, which has imported nothing yet."""
        self._floats[_LOADING] = self._floats[_LOADED] = self._floats[_LOADED_WALL] = 0.0
        self._view[8 * _NAMES :] = bytes(_NAMES_NBYTES)

    def begin_loading(self, cpu_seconds: float | None) -> None:
        """Note that the worker begins to import or to unpickle, and its CPU time, if known."""
        self._floats[_LOADING_CPU] = cpu_seconds or 0.0
        self._floats[_LOADING] = self.clock()

    def end_loading(self, cpu_seconds: float | None) -> None:
        """Note that this has ended, and the CPU time that it took, if known."""
        floats = self._floats
        seconds = self.clock() - floats[_LOADING]
        floats[_LOADING] = 0.0
        floats[_LOADED_WALL] += seconds
        floats[_LOADED] += seconds if cpu_seconds is None else cpu_seconds

    def name_imports(self, present: str, imported: str) -> None:
        """Note the name of the module that is being imported, and in words what has been imported."""
        text = f"{present}\n{imported}".encode(errors="replace")[:_NAMES_NBYTES]
        self._view[8 * _NAMES :] = text.ljust(_NAMES_NBYTES, b"\0")

    # -- written by the parent ---------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Let the worker begin only a CLOSE from now on: no caller receives other results."""
        self._ints[_DISCARDED] = 1

    def end(self) -> None:
        """Call `discard`, and let a SIGTERM end the worker."""
        self._ints[_DISCARDED] = 2

    def copy(self) -> bytes:
        """All numbers, for `copy_from` on another machine."""
        return bytes(self._view)

    def forget_activity(self) -> None:
        """Note that it is not known what the worker was doing: its machine is gone, with all that it had written."""
        self._ints[_ENV] = 0

    def copy_from(self, others: bytes, ahead: float) -> None:
        """Copy another machine's status, except the parent's numbers; this clock is `ahead` by so many seconds.

        A status that arrives after a newer one is ignored, so that no count ever decreases.
        """
        if _progress(memoryview(others).cast("q")) < _progress(self._ints):
            return
        discarded = self._ints[_DISCARDED]
        self._view[:] = others
        self._floats[_SINCE] += ahead
        if self._floats[_LOADING]:
            self._floats[_LOADING] += ahead
        self._ints[_DISCARDED] = discarded

    # -- read --------------------------------------------------------------------------------------------------------

    @property
    def ready_since(self) -> float:
        """When the worker became ready, in seconds of `Backend.clock`; infinity before. Its timeouts begin then."""
        return 0.0

    @property
    def ahead(self) -> float:
        """Seconds that `Backend.clock` is ahead of the worker's clock; 0 if both are the same."""
        return 0.0

    @property
    def discarded(self) -> bool:
        return self._ints[_DISCARDED] in (1, 2)

    @property
    def is_ending(self) -> bool:
        """Whether the parent is ending the worker, so that a SIGTERM comes from the parent."""
        return self._ints[_DISCARDED] == 2

    @property
    def latest(self) -> Activity:
        """The latest activity in the present request, even if it has ended; `START` for none, or if it is unknown."""
        activity = self._ints[_ACTIVITY]
        return Activity(activity) if 0 <= activity < len(Activity) else Activity.START

    def latest_of(self, env_id: int) -> Activity:
        """`latest` if it is an activity of this environment; else `START`."""
        return self.latest if abs(self._ints[_ENV]) == env_id + 1 else Activity.START

    @property
    def _since(self) -> float:
        """When the activity began; 0.0 if that is unknown."""
        since = self._floats[_SINCE]
        return since if 0.0 <= since <= self.clock() + _AHEAD_S else 0.0

    @property
    def running(self) -> Running | None:
        env, activity = self._ints[_ENV], self._ints[_ACTIVITY]
        if env == 0 or abs(env) >= _SETTLED or not 0 <= activity < len(Activity):
            return None
        return Running(abs(env) - 1, Activity(activity), self._since, env > 0)

    def loading(self, cpu_seconds: float | None) -> float:
        """Seconds in which the present constructor has imported or unpickled: CPU time, or wall time if unknown.

        `cpu_seconds` is the CPU time of the worker now. If the caller's process cannot know it (None), wall time counts
        from beginning to end, even if the worker knows its own CPU time.
        """
        loaded = self._floats[_LOADED_WALL if cpu_seconds is None else _LOADED]
        began, cpu_then = self._floats[_LOADING], self._floats[_LOADING_CPU]
        present = 0.0
        if began:
            present = self.clock() - began if cpu_seconds is None or not cpu_then else cpu_seconds - cpu_then
        return loaded + present if loaded + present >= 0.0 else 0.0

    def imports(self) -> str:
        """What the present constructor has imported, such as "torch 8.1 s, mpe2 0.5 s"; "" if nothing took long."""
        text = bytes(self._view[8 * _NAMES :]).rstrip(b"\0").decode(errors="replace")
        present, _, imported = text.partition("\n")
        began = self._floats[_LOADING]
        now = f"{present} for {self.clock() - began:.1f} s so far" if began and present else ""
        return ", ".join(filter(None, (now, imported)))

    @property
    def settled(self) -> int | None:
        """The environment that ran last, if the request has been carried out; else None."""
        env = self._ints[_ENV]
        return env - _SETTLED - 1 if _SETTLED < env < 2 * _SETTLED else None

    @property
    def state(self) -> tuple[int, float]:
        """A value that changes whenever an activity or a request begins or ends."""
        return self._ints[_ENV], self._since

    @property
    def parts(self) -> int:
        return int(self._ints[_PARTS])

    @property
    def stats(self) -> WorkerStats:
        ints, (inside, transport, waited) = self._ints, self._floats[_SIMULATOR:_PARTS]
        return WorkerStats(
            ints[_STEPS], ints[_RESETS], simulator_s=inside, transport_s=transport, waiting_s=waited,
            step_times=StepTimes(tuple(ints[_TIMES:_NAMES].tolist())),
        )  # fmt: skip


def _progress(ints: memoryview) -> tuple[int, int]:
    """Counts that never decrease in a process: parts of requests begun, and steps and resets done."""
    return ints[_PARTS], ints[_STEPS] + ints[_RESETS]


_of_this_process: WeakSet[WorkerStatus] = WeakSet()


def _guard_in_forked_child() -> None:
    """End this forked child as soon as it returns from a simulator to a worker of its parent, and write nothing.

    Only workers call these methods, around each method of a simulator. Replacing them costs nothing in a step.
    """
    for status in list(_of_this_process):
        vars(status).update(dict.fromkeys(("enter", "leave", "begin_request", "end_request"), end_returning_copy))
        # It may import modules in the simulator.
        vars(status).update(dict.fromkeys(("begin_loading", "end_loading", "name_imports"), _write_nothing))
        status.for_codec[-1][0] = 1
    _of_this_process.clear()


def _write_nothing(*_: object) -> float:
    return 0.0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard_in_forked_child)


# -- traces ------------------------------------------------------------------------------------------------------------

MOST_SLICES = 1_000_000
"""The most slices stored for each lane; later ones are dropped, so that a forgotten trace does not fill the memory."""

SLICES = -1
"""In place of an environment's number in the results of a CLOSE: the slices that the worker has stored."""

_FIELDS = 4  # of a slice: environment, activity, begin, end; both in seconds of the status's clock
_REQUEST = -1.0  # in place of an activity: a request, whose other slices come before this slice


class TracedStatus(WorkerStatus):
    """A status that stores slices, `_FIELDS` numbers each."""

    slices: array[float]

    def leave(self) -> float:
        now = super().leave()
        self._store(self._env - 1, self.latest, self._entered, now)
        return now

    def end_request(self) -> float:
        began = self._changed
        now = super().end_request()
        self._store(-1, _REQUEST, began, now)
        return now

    def _store(self, *slice_: float) -> None:
        if len(self.slices) < _FIELDS * MOST_SLICES:
            self.slices.extend(slice_)


def is_traced(status: WorkerStatus) -> bool:
    """Whether a status stores slices."""
    return isinstance(status, TracedStatus)


def trace(status: WorkerStatus, on: bool) -> array[float] | None:
    """Let a status begin or stop storing slices; returns the slices when it stops."""
    slices: array[float] | None = vars(status).pop("slices", None)
    status.__class__ = TracedStatus if on else WorkerStatus
    if isinstance(status, TracedStatus):
        status.slices = array("d") if slices is None else slices
        return None
    return slices


class Tracer:
    """Stores slices of a pool's calls and collects those of its workers, for the file that Perfetto reads.

    Lane 0 of the file is the caller's, lane `worker + 1` a worker's.
    """

    def __init__(self, path: Path, shares: Sequence[range], clock: Callable[[], float]) -> None:
        self.path, self._clock = path, clock
        self._started = self._clock()
        self._events: list[dict[str, Any]] = []
        names = ["your program", *(f"worker {worker} (environments {[*share]})" for worker, share in enumerate(shares))]
        for lane, name in enumerate(names):
            self._add(lane, "thread_name", ph="M", args={"name": name})
            self._add(lane, "thread_sort_index", ph="M", args={"sort_index": lane})
        self._parent_slices: list[tuple[str, float, float]] = []
        self._open: set[str] = set()

    def during(self, name: str) -> AbstractContextManager[None] | None:
        """A context that stores its time as a slice of the caller's lane; None inside a slice of the same name."""
        return None if name in self._open else self._slice(name)

    @contextlib.contextmanager
    def _slice(self, name: str) -> Iterator[None]:
        self._open.add(name)
        began = self._clock()
        try:
            yield
        finally:
            self._open.discard(name)
            if len(self._parent_slices) < MOST_SLICES:
                self._parent_slices.append((name, began, self._clock()))

    def add(self, worker: int, slices: array[float], ahead: float) -> None:
        """Add the slices of a worker; the clock here is `ahead` of its clock by so many seconds."""
        lane = worker + 1
        simulators: list[tuple[float, float]] = []  # of the present request
        waiting_since: float | None = None
        for env_id, activity, began, ended in zip(*[iter(slices)] * _FIELDS):
            began, ended = began + ahead, ended + ahead
            if activity != _REQUEST:
                simulators.append((began, ended))
                self._add_slice(lane, Activity(int(activity)).method, "simulator", began, ended, env_id=int(env_id))
                continue
            if waiting_since is not None:
                self._add_slice(lane, "waiting", "worker", waiting_since, began)
            waiting_since = ended
            for entered, returned in [*simulators, (ended, ended)]:
                if entered > began:
                    self._add_slice(lane, "transport", "worker", began, entered)
                began = max(began, returned)
            simulators.clear()

    def mark_replaced(self, worker: int) -> None:
        """Mark this moment in a worker's lane."""
        self._add(worker + 1, "replaced", ph="i", s="t", ts=self._microseconds(self._clock()))

    def finish(self) -> None:
        """Write the file, whole or not at all; `OSError` if it cannot be written."""
        for name, began, ended in self._parent_slices:
            self._add_slice(0, name, "your program", began, ended)
        with replaced_file(self.path) as file:
            json.dump({"traceEvents": self._events, "displayTimeUnit": "ms"}, file)

    def _add_slice(self, lane: int, name: str, category: str, began: float, ended: float, **arguments: Any) -> None:
        begin, length = self._microseconds(began), round(1e6 * (ended - began), 3)
        self._add(lane, name, ph="X", cat=category, ts=begin, dur=length, args=arguments)

    def _add(self, lane: int, name: str, **fields: Any) -> None:
        self._events.append({"name": name, "pid": 1, "tid": lane, **fields})

    def _microseconds(self, moment: float) -> float:
        return round(1e6 * (moment - self._started), 3)
