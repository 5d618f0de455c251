"""The scheduler: workers are greenlets of which one runs at a time, and the clock is virtual.

A worker runs until an environment comes to a point. There the draw of the point decides: it goes on after some time,
raises, dies, or hangs. All that is to happen is in one queue, by time; `wait` carries it out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet
import numpy as np

from marl_parallel import Backend
from marl_parallel.core.backend import Capabilities, most_workers
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import STEPPED, Lost, Message, Reply, Request
from marl_parallel.core.worker.caller_settings import WorkerSettings
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus
from simulation.draws import draw
from simulation.model import Wrong
from simulation.requests import Purpose, purpose_of
from simulation.simulator import AFTER_CALLS, Life, Saved, SimulatedError

if TYPE_CHECKING:
    from simulation.model import Model

_BEGINS_AT = 1000.0
_LONGEST_WAIT_S = 100.0
_LONGEST_EXCHANGE_S = 0.02
_GIVES_UP = 0.1  # how often an exchange ends although everything is here, as a doorbell may ring too early
_MOST_EVENTS = 20_000  # in one wait
_STOPPED = "stopped"
REFUSED = "a state is refused"
_CALLS = (Message.CALL, Message.ASSIGN, Message.RENDER, Message.STATE)
_ENDS_WITHIN_S = 0.1
_MORE_OFTEN = 6.0
_SLOW_S = 0.4  # to twice as much; timeouts are 1 s
_SLOWER = 3.0  # where no timeout applies
_WHILE_IDLE = 1_000_000  # added to the points of faults that occur between two requests
_DELAY_S = 0.1  # to eight times as much: before a worker begins a request
_AT_MOST_LATE_S = 0.2  # of waits after a timeout, until the pool must have ended the worker
_LONGEST_LOOK_S = 0.05  # so much of one such wait counts
_TWO_LOOKS_S = 0.02  # how long a status past its timeout stays the same before its worker may be ended
_START_S, LIMIT_S = 5.0, 1.0  # timeouts
_MOST_TIMES = 10  # so many times a timeout, if the CPU time of unpickling is unknown
_STARTS = (
    Message.ACCESS,
    Message.ATTACH,
    Message.CLOSE,
    Purpose.REBUILD,
    Purpose.PREPARE,
    Purpose.LOAD,
)  # requests


class Fault(NamedTuple):
    """A fault, by the point at which it occurs: of an environment's life, the number of points before it."""

    env_id: int
    life: int
    point: int


class Rates(NamedTuple):
    """How often something happens at a point."""

    fails: float = 0.0
    dies: float = 0.0
    hangs: float = 0.0
    late_values: float = 0.0
    infos: float = 0.0
    unreadable: float = 0.0
    differs: float = 0.0  # of environments that are constructed again, how many declare other spaces
    stopped: float = 0.0  # of workers that hang, how many go on when their stack is taken
    slow: float = 0.0  # of steps and resets, how many take most of their timeout
    idle: float = 0.0  # of idle workers, how many die or hang while the caller does something else
    delayed: float = 0.0  # of requests, how many a worker begins long after it could
    finishes: float = 0.0  # how often a worker that is past its timeout goes on when its status is read
    hang_in: tuple[str, ...] = ()  # points with a timeout, the only ones where workers hang; all if there are none
    often_at: str = ""  # a point at which faults are more frequent


class Stuck(AssertionError):
    """The caller waits, and nothing will ever happen."""


class Statuses(list[WorkerStatus]):
    """The statuses of workers; some workers go on while theirs is read."""

    def __init__(self, backend: SimulatedBackend, statuses: Iterable[WorkerStatus]) -> None:
        super().__init__(statuses)
        self._backend = backend

    def __getitem__(self, worker: Any) -> Any:
        self._backend.status_is_read(worker)
        return super().__getitem__(worker)


class NoSettings(WorkerSettings):
    """The settings of the caller, which workers in its process have already."""

    def apply(self, pickled: bytes) -> None: ...
    def look_again(self) -> None: ...


class Watched(greenlet.greenlet):
    """A greenlet that knows its worker."""

    worker: SimulatedWorker


class SimulatedWorker:
    """A worker with its requests and replies.

    Attributes:
        state: "idle", "ready" (it goes on at a time that is in the queue), "hung", "dead", "ended".
        lives: By environment, the one that was constructed here last, or that has been loaded.
        loaded: By environment, the latest one that has been made of a saved state.
        request: What it carries out, with the environment that is running and its phase: "inside" the simulator,
            "returned" from it, "failed" or "written" where a reply is sent ahead, or "replying".
        settled: The environment that was running last, if the request, or the part of it, has been carried out.
        is_late: Whether it is past its timeout; if it was only stopped, it may go on while its stack is taken.
        late, culprits: What that has interrupted, by environment; and the environments that it counts against.
        is_closed: Whether its environments have been closed, as the pool knows.
        counts: How many steps and resets have ended, as its statistics must have them: those of a request are added
            when it has been carried out.
        steps: How many steps have ended.
        since: When it has begun its latest activity; before it begins a request, when it could have begun.
        overdue: Seconds for which the pool has waited past its timeout.
        seen_late: When a wait first ended past its timeout.
        is_spared: Whether it goes on at every point.
    """

    def __init__(self, backend: SimulatedBackend, number: int, share: Sequence[int]) -> None:
        self.backend, self.number, self.share = backend, number, tuple(share)
        self.status = WorkerStatus(bytearray(WorkerStatus.NBYTES), backend.clock)
        self.in_line = number in backend.in_line  # whether it stands for the caller's own thread
        self.worker = Worker(
            self.status, lambda _: backend.block,
            own_process=not self.in_line, in_line=self.in_line, moment=backend.moment,
        )  # fmt: skip
        self.worker.settings = NoSettings()
        self.place = len(backend.all_workers)  # in the order in which workers were added; that of the one it replaces
        self.requests: deque[Request] = deque()
        self.replies: list[tuple[Request, Reply]] = []
        self.expected = 0
        self.state, self.lost_at, self.reported, self.why = "idle", 0.0, False, "dies"
        self.ends_at = 0.0  # when its process is gone
        self.is_known = False  # whether the pool knows that it is gone
        self.lives: dict[int, Life] = {}
        self.loaded: dict[int, Life] = {}
        self.request: Request | None = None
        self.running: int | None = None
        self.phase, self.activity = "", ""
        self.settled: int | None = None
        self.is_late = self.is_closed = False
        self.began_discarded = False  # whether it has begun what it carries out after a close, which discards that
        self.late: dict[int, Any] = {}
        self.culprits: list[Any] | None = None
        self.counts, self._more, self.steps = Counter[str](), Counter[str](), 0
        self.since, self.overdue, self.posted = backend.now, 0.0, 0
        self.seen_late: float | None = None
        self.is_spared = False
        self._fails = False
        self._greenlet = Watched(self._main)
        self._greenlet.worker = self

    def _main(self) -> None:
        while True:
            if self.requests and (delay := self.delay()):
                self.state, self.request = "ready", None
                self.backend.at(self.backend.now + delay, self)
                self.backend.leave()
            while not self.requests:
                self.state, self.request = "idle", None
                self.backend.leave()
            request = self.request = self.requests.popleft()
            self.running = self.settled = None
            self.began_discarded = self.backend.is_closing and request.message is not Message.CLOSE
            self.worker.execute(request, self._send)
            if request.message is Message.CLOSE or self.state == _STOPPED:
                self.state = "ended" if self.state != _STOPPED else _STOPPED
                self.ends_at = self.backend.now + _ENDS_WITHIN_S * draw(self.backend.number, self.place)
                return

    def _send(self, reply: Reply) -> None:
        request, life = self.request, self.lives.get(self.running) if self.running is not None else None
        assert request is not None
        is_step = request.message in (Message.STEP, Message.RESET) and reply.env_ids != ()
        is_complete = reply.last or (request.each and reply.env_ids != ())
        if is_complete:
            self.settled = self.running
            if self.running is None and request.message in _CALLS and request.env_ids:
                self.settled = request.env_ids[-1]  # an attribute is got without coming to a point
            self.counts += self._more
            self._more.clear()
        # Without compiled code, also one for an environment whose simulator is not called, since its episode is over.
        is_early = life is not None and not is_complete and reply.env_ids in ((), (self.running,))
        if life is not None and is_step and is_complete and not reply.failures:
            self.phase = "replying"
            self.point("reply", life, may_fail=False)
        if life is not None and is_early:
            self.phase = "failed" if reply.failures else "written"
            self.point("early", life, may_fail=False)
        self.replies.append((request, reply))
        self.expected -= reply.last
        self.since = self.backend.now if reply.last else self.since
        if self.in_line:
            self.backend.in_line_until = self.backend.now
        # Not after a result: whether it or the report of the death comes first is not known to the model.
        if life is not None and is_early and (reply.failures or reply.env_ids == ()):
            self.point("sent", life, may_fail=False)
        if is_complete:
            self.running = None
            self.settled = self.settled if reply.last else None
            self.began_discarded = self.backend.is_closing

    def new_life(self, env_id: int, seed: int, restarts: int) -> Life:
        assert self.request is not None
        life = self.backend.new_life(env_id, self, self.request.message.name, seed, restarts)
        (self.loaded if self.is_loading else self.lives)[env_id] = life
        self.backend.model.seeds.check_constructed(life, self.request)
        return life

    def begins_reset(self, life: Life, seed: int | None) -> None:
        """Called by environments before they are reset."""
        if self.state != _STOPPED and self.request is not None:
            self.backend.model.check_reset(life, self.request, seed)

    def returns(self, what: str) -> None:
        """Called by environments when a step or reset has returned or raised."""
        if not self.is_loading:
            self._more[what] += 1
            self.steps += what == "step"

    @property
    def is_loading(self) -> bool:
        """Whether it makes environments of saved states, beside the present ones."""
        return self.request is not None and purpose_of(self.request) is Purpose.LOAD

    def point(self, what: str, life: Life, *, may_fail: bool = True) -> None:
        """Called by environments, in the worker's greenlet."""
        backend = self.backend
        if self.state == _STOPPED:
            raise greenlet.GreenletExit
        if self.began_discarded:
            backend.wrong.append(f"environment {life.env_id} begins a {what} after a close")
        if what not in AFTER_CALLS:
            self.running, self.activity, self.phase = life.env_id, what.removesuffix("-end"), "inside"
            goes_on = what == "load" and life.points  # a constructor and its load are timed as one
            if what == self.activity and not goes_on:
                self.since, self.seen_late, self.overdue = backend.now, None, 0.0
        life.points += 1
        outcome = backend.decide(self, what, life, may_fail)
        if outcome == "goes on":
            return
        if outcome == "fails":
            life.raised = what
            raise SimulatedError(f"environment {life.env_id} fails in {what}")
        if outcome == "dies":
            self.state, self.lost_at = "dead", backend.now + 0.003 * backend.draw(life, 7)
            backend.at(self.lost_at, self)
        elif outcome == "hangs":
            self.state = "hung"
        else:
            self.state = "ready"
            backend.at(backend.now + float(outcome), self)
        backend.leave()
        if self.state == _STOPPED:
            raise greenlet.GreenletExit

    def delay(self) -> float:
        """Seconds before it begins the next request."""
        self.posted += 1
        keys = self.backend.number, self.place, len(self.backend.all_workers), self.posted
        if self.in_line or not self.backend.troubled or draw(*keys, 22) >= self.backend.rates.delayed:
            return 0.0
        return _DELAY_S * (1.0 + 7.0 * draw(*keys, 23))

    def due(self, *, at_most: bool = False) -> float:
        """When its timeout ends; of two that may apply to the present request, the shorter one, or the longer one."""
        request = self.request or (self.requests[0] if self.requests else None)
        if self.request is None and request is None:
            return math.inf
        starts = self.activity in ("constructor", "load", "close") if self.request is not None else False
        starts |= (at_most or self.request is None) and request is not None and purpose_of(request) in _STARTS
        if at_most and request is not None and purpose_of(request) in (Purpose.LOAD, Purpose.REPLACE):
            return self.since + _MOST_TIMES * _START_S  # it may unpickle
        return self.since + (_START_S if starts else LIMIT_S)

    @property
    def is_inside(self) -> bool:
        """Whether the caller's own thread is in the middle of a request, so that `wait` cannot return."""
        return self.in_line and self.state in ("ready", "running") and self.request is not None

    def resume(self) -> None:
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def drop(self) -> None:
        """End the greenlet, which may be in the middle of a simulator."""
        self.state = _STOPPED
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.parent = greenlet.getcurrent()
            self._greenlet.throw(greenlet.GreenletExit)


class SimulatedBackend(Backend):
    """Workers of which one runs at a time.

    Args:
        number: The history.
        rates: How often what happens.
        standbys: Whether it has them.
        hybrid: Whether worker 0 is the caller's own thread: it carries out requests while the caller waits, and neither
            dies nor hangs.
        differ: Whether environments have different agents.
        left_out: Faults that do not occur, to find those that matter.
    """

    def __init__(
        self,
        number: int,
        rates: Rates,
        *,
        standbys: bool,
        hybrid: bool,
        differ: bool,
        left_out: frozenset[Fault] = frozenset(),
    ) -> None:
        self.number, self.rates, self.differ, self._left_out = number, rates, differ, left_out
        self.capabilities = Capabilities(side_by_side=False, shares_memory=True, has_standbys=standbys, pickles=False)
        self.in_line = frozenset({0} if hybrid else ())
        self.moment = np.array([_BEGINS_AT])
        self.now = _BEGINS_AT
        self.clock: Callable[[], float] = lambda: self.now
        self.model: Model
        self.workers: dict[int, SimulatedWorker] = {}
        self.all_workers: list[SimulatedWorker] = []
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.troubled = False  # whether faults occur at present
        self.interrupt_after: tuple[int, Callable[[], None]] | None = None  # so many events, then a call in `wait`
        self.stopped = self.is_closing = False
        self.wrong: list[str] = []  # what workers must not have done
        self.block: Any = None
        self._events: list[tuple[float, int, SimulatedWorker]] = []
        self._order = itertools.count()
        self._lives: Counter[int] = Counter()
        self._reads = itertools.count()
        self.timed_out_at = math.inf  # when a worker was last ended that was past its timeout
        self.lives: list[Life] = []
        self.saved: list[Saved] = []
        self._interrupted = False
        self.check: Callable[[], None] = lambda: None  # of the pool's values, called before each wait
        self._last_reply, self._waits = self.now, 0  # when it was, and how often `wait` has been called since
        self._owner, self._has_thread = threading.get_ident(), False
        self._undelivered: list[tuple[SimulatedWorker, Request, Reply]] = []  # to the model, which hears of them later
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # of another thread, for the owner's
        self._job_done, self._is_interrupted = SimpleQueue[None](), threading.Event()

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def new_life(self, env_id: int, worker: SimulatedWorker, origin: str, seed: int, restarts: int) -> Life:
        self._lives[env_id] += 1
        self.lives.append(Life(env_id, self._lives[env_id], worker, origin, seed, restarts))
        return self.lives[-1]

    def draw(self, life: Life, purpose: int) -> float:
        return draw(self.number, life.env_id, life.number, life.points, purpose)

    def decide(self, worker: SimulatedWorker, what: str, life: Life, may_fail: bool) -> str | float:
        """What happens at a point: "goes on", "fails", "dies", "hangs", or after how many seconds it goes on."""
        if worker.is_spared:
            return "goes on"
        if self.troubled:
            fault = Fault(life.env_id, life.number, life.points)
            chance = self.draw(life, 1)
            times = _MORE_OFTEN if what in (self.rates.often_at, "load") else 1.0
            for outcome in ("fails", "dies", "hangs"):
                rate = times * getattr(self.rates, outcome)
                if chance < rate:
                    may_hang = outcome != "hangs" or not self.rates.hang_in or what in self.rates.hang_in
                    may_hang &= outcome == "fails" or not worker.in_line
                    if (outcome == "fails" and not may_fail) or not may_hang or fault in self._left_out:
                        break
                    self.faults.append(fault)
                    self.kinds[f"{outcome} in {what}"] += 1
                    self.kinds[REFUSED] += outcome == "fails" and worker.is_loading and what != "close"
                    self.note(f"environment {life.env_id} (life {life.number}) {outcome} in {what}")
                    return outcome
                chance -= rate
        if what in ("step", "reset") and self.draw(life, 8) < self.rates.slow:
            return _SLOW_S * (1.0 + self.draw(life, 9)) * (_SLOWER if worker.in_line else 1.0)
        chance = self.draw(life, 2)
        if chance < 0.5:
            return "goes on"
        return (chance - 0.5) * 0.01 if chance < 0.97 else (chance - 0.97) * 2.0

    def note(self, text: str) -> None:
        self.log.append(f"{self.now - _BEGINS_AT:9.4f} s  {text}")

    def writes_late(self, life: Life) -> bool:
        request = life.worker.request
        if request is not None and request.message in (Message.CALL, Message.RENDER, Message.STATE):
            return False  # such an observation is written by a later request
        return self.draw(life, 3) < self.rates.late_values

    def infos_of(self, life: Life) -> str:
        chance = self.draw(life, 4)
        if self.troubled and chance < self.rates.unreadable:
            fault = Fault(life.env_id, life.number, -life.points)
            if fault not in self._left_out:
                self.faults.append(fault)
                self.kinds["unreadable infos"] += 1
                self.note(f"environment {life.env_id} (life {life.number}) returns infos that cannot be unpickled")
                return "unreadable"
        chance = self.draw(life, 5)
        if chance >= self.rates.infos:
            return ""
        return ("number", "text", "object")[int(3 * chance / self.rates.infos)]

    def differs(self, life: Life) -> bool:
        """Whether an environment declares other spaces than the others."""
        fault = Fault(life.env_id, life.number, 0)
        is_first = life.worker.request is not None and life.worker.request.message is Message.ACCESS
        if not self.troubled or fault in self._left_out or (is_first and life.env_id == 0):
            return False
        if self.draw(life, 6) >= self.rates.differs:
            return False
        self.faults.append(fault)
        self.kinds["differs in constructor"] += 1
        self.kinds[REFUSED] += life.worker.is_loading
        self.note(f"environment {life.env_id} (life {life.number}) declares other spaces")
        return True

    def at(self, moment: float, worker: SimulatedWorker) -> None:
        heapq.heappush(self._events, (moment, next(self._order), worker))

    def leave(self) -> None:
        """Leave a worker's greenlet."""
        parent = greenlet.getcurrent().parent
        assert parent is not None
        parent.switch()

    def advance(self, moment: float) -> None:
        self.now = max(self.now, moment)
        self.moment[0] = self.now

    def _idle_faults(self) -> None:
        """Let idle workers die or hang."""
        for worker in [one for one in self.workers.values() if one.state == "idle" and not one.in_line and one.lives]:
            life = worker.lives[min(worker.lives)]
            fault = Fault(life.env_id, life.number, _WHILE_IDLE + life.points)
            if not self.troubled or fault in self._left_out or self.draw(life, 20) >= self.rates.idle:
                continue
            hangs = self.rates.hangs > 0.0 and not self.rates.hang_in and self.draw(life, 21) < 0.5
            worker.state, worker.lost_at = "hung" if hangs else "dead", self.now
            what = f"{'hangs' if hangs else 'dies'} while idle"
            self.faults.append(fault)
            self.kinds[what] += 1
            self.note(f"worker {worker.number} {what}")

    def status_is_read(self, number: int) -> None:
        """The pool reads a status: a worker that is past its timeout may go on right before."""
        worker = self.workers.get(number)
        if worker is None or worker.state != "hung" or worker.is_late or not self._is_owner or self.now <= worker.due():
            return
        request = worker.request
        if request is not None and (worker.phase == "replying" or request.message is Message.ACCESS):
            return  # its status stays what it is, or an error must follow
        if draw(self.number, worker.place, next(self._reads), 24) < self.rates.finishes:
            self.note(f"worker {number} goes on, late")
            self.kinds["goes on, late"] += 1
            worker.state, worker.is_spared = "running", True
            worker.resume()
            worker.is_spared = False

    def _check_overdue(self, began: float) -> None:
        """Check, after a wait, that no worker has been past its timeout for too long."""
        for worker in self.workers.values():
            if worker.state != "hung" or not worker.expected or self._is_interrupted.is_set():
                continue
            if self.now > worker.due() and worker.seen_late is None:
                worker.seen_late = self.now
            worker.overdue += min(max(self.now - max(worker.due(at_most=True), began), 0.0), _LONGEST_LOOK_S)
            if worker.overdue > _AT_MOST_LATE_S:
                raise Wrong(f"worker {worker.number} has not been ended, although it is past its timeout")

    def pass_time(self, seconds: float) -> None:
        """Let workers go on while the caller does something else."""
        self._idle_faults()
        until, waiting = self.now + seconds, []
        while self._events and self._events[0][0] <= until:
            if self._events[0][2].in_line:  # it goes on when the caller waits
                waiting.append(heapq.heappop(self._events))
            else:
                self._next_event()
        for event in waiting:
            heapq.heappush(self._events, event)
        self.advance(until)

    def _next_event(self) -> None:
        moment, _, worker = heapq.heappop(self._events)
        self.advance(moment)
        if self.workers.get(worker.number) is worker and worker.state == "ready":
            worker.state = "running"
            if self._is_owner:
                worker.resume()
            else:  # greenlets belong to one thread
                self._jobs.put(worker.resume)
                self._job_done.get()

    @property
    def _is_owner(self) -> bool:
        return threading.get_ident() == self._owner

    def call_in_thread(self, call: Callable[[], None]) -> None:
        """Start a thread that calls a function, which interrupts `wait`; `serve` must follow when that has returned."""

        def called() -> None:
            try:
                call()
            finally:
                self._is_interrupted.set()
                self._jobs.put(None)

        self._has_thread = True
        threading.Thread(target=called, daemon=True).start()
        self._is_interrupted.wait()

    def serve(self) -> None:
        """Let workers go on for the thread of `call_in_thread`, if there is one, until this has ended."""
        while self._has_thread and (job := self._jobs.get()) is not None:
            job()
            self._job_done.put(None)

    # -- the interface -------------------------------------------------------------------------------------------------

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.most_requests = most_requests
        statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES), self.clock) for _ in range(most_workers(shares))]
        self.statuses = Statuses(self, statuses)
        for number, share in enumerate(shares):
            self.start_worker(number, share)

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        assert beside not in self.in_line, "the caller's own thread has no standby"
        old = self.workers.pop(worker, None)
        assert old is None or not old.in_line, "the caller's own thread cannot be replaced"
        assert (old is None) or (beside is None)
        if old is not None:
            old.state = "dead"
            self.model.lost(old, old.why)
        new = self.workers[worker] = SimulatedWorker(self, worker, share)
        self.all_workers.append(new)
        self.statuses[worker] = new.status
        new.place = new.place if old is None else old.place

    def remove(self, worker: int, *, kill: bool) -> bool:
        present = self.workers[worker]
        if not kill and (present.state not in ("ended", "dead") or self.now < present.ends_at):
            return False
        if kill:
            self.model.standbys_fail = True
            self.model.seeds.note_used_up(self.workers[worker].share)
        self.workers.pop(worker).state = "dead"
        return True

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        self.block = bytearray(nbytes)
        return self.block

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for number, request in requests.items():
            worker = self.workers[number]
            if not worker.requests and worker.request is None:
                worker.since, worker.seen_late, worker.overdue = self.now, None, 0.0
            worker.expected += 1
            assert worker.expected <= self.most_requests, "more requests and replies in flight than was promised"
            worker.requests.append(request)
            self.model.posted(worker, request)
            if worker.state == "idle":
                worker.state = "ready"
                delay = worker.delay() + 0.0005 * draw(self.number, number, next(self._order))
                self.at(self.now + delay, worker)

    def step_all(self, requests: Mapping[int, Request], patience: float) -> bool:
        self.post(requests, together=True)
        workers, deadline = [self.workers[number] for number in requests], self.now + min(patience, _LONGEST_EXCHANGE_S)
        while not self._interrupted and any(not worker.replies and worker.state != "dead" for worker in workers):
            if self._is_interrupted_now():
                continue
            if not self._events or (self._events[0][0] > deadline and not any(one.is_inside for one in workers)):
                self.advance(deadline)
                return False
            self._next_event()
        if draw(self.number, next(self._order), 17) < _GIVES_UP or self._interrupted:
            return False
        if any(len(worker.replies) != 1 or worker.replies[0][1] is not STEPPED for worker in workers):
            return False
        self._last_reply, self._waits = self.now, 0
        for worker in workers:
            self.model.delivered(worker, *worker.replies.pop())
        return True

    def _is_interrupted_now(self) -> bool:
        """Whether a call of `interrupt_after` has been due, and has been carried out."""
        if self.interrupt_after is None:
            return False
        left, call = self.interrupt_after
        self.interrupt_after = (left - 1, call) if left > 0 else None
        if left <= 0:
            call()
        return left <= 0

    def _arrived(self) -> list[tuple[SimulatedWorker, Reply | Lost]]:
        arrived: list[tuple[SimulatedWorker, Reply | Lost]] = []
        losses: list[tuple[SimulatedWorker, Reply | Lost]] = []
        for worker in [*self.workers.values()]:
            arrived += [(worker, reply) for _, reply in worker.replies]
            self._undelivered += [(worker, *one) for one in worker.replies]
            worker.replies.clear()
            if worker.state == "dead" and worker.expected and not worker.reported and self.now >= worker.lost_at:
                worker.reported = True
                losses.append((worker, Lost(-9, "")))
        if arrived or losses:
            self._last_reply, self._waits = self.now, 0
        return [*arrived, *losses]

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        self.check()
        began = self.now
        deadline = None if timeout is None else began + timeout
        arrived, events = self._arrived(), 0
        self._waits += 1
        if self._waits > _MOST_EVENTS or self.now > self._last_reply + _LONGEST_WAIT_S:
            raise Stuck(f"it goes on for ever: {self._states()}")
        while True:
            inside = any(worker.is_inside for worker in self.workers.values())
            is_enough = len(arrived) >= at_least or any(isinstance(reply, Lost) for _, reply in arrived)
            if self._interrupted or (is_enough and not inside):
                break
            if not self._events or (deadline is not None and not inside and self._events[0][0] > deadline):
                if deadline is None:
                    raise Stuck(f"nothing will ever happen: {self._states()}")
                self.advance(deadline)
                arrived += self._arrived()
                break
            if self._is_interrupted_now():
                continue
            self._next_event()
            events += 1
            if events > _MOST_EVENTS or self.now > began + _LONGEST_WAIT_S:
                raise Stuck(f"it goes on for ever: {self._states()}")
            arrived += self._arrived()
        self._check_overdue(began)
        self._interrupted = False
        undelivered, self._undelivered = self._undelivered, []
        for worker, request, reply in undelivered:
            self.model.delivered(worker, request, reply)
        return [(worker.number, reply) for worker, reply in arrived]

    def _states(self) -> dict[int, tuple[str, list[str], int]]:
        return {
            number: (worker.state, [request.message.name for request in worker.requests], worker.expected)
            for number, worker in self.workers.items()
        }

    def interrupt(self) -> None:
        self.is_closing = True  # only a close interrupts
        self._interrupted = True
        self._is_interrupted.set()

    def end(self, worker: int) -> Sequence[Reply]:
        ended = self.workers[worker]
        assert not ended.in_line, "the caller's own thread cannot be ended"
        ended.why = "hangs" if ended.is_late else "is killed"
        self.kinds["killed for memory"] += not ended.is_late
        ended.state = "dead"
        self.model.ended(ended, ended.why)
        replies = [reply for _, reply in ended.replies]
        for request, reply in ended.replies:
            self.model.delivered(ended, request, reply)
        ended.replies.clear()
        return replies

    def memory(self, worker: int) -> int | None:
        if worker in self.in_line:
            return None
        grown = sum(life.episodes for life in self.workers[worker].lives.values())
        return (100 + 10 * grown) * 10**6 if worker in self.workers else None

    def log_tail(self, worker: int) -> str:
        """Asked for when the pool makes an error of a loss: what came with it has been applied before."""
        lost = self.workers[worker]
        if lost.reported and not lost.is_known:
            lost.is_known = True
            self.model.reported(lost)
        return ""

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        hung = self.workers[worker]
        if not harmless:
            self.timed_out_at = self.now
            if self.now < hung.due() or hung.seen_late is None or self.now < hung.seen_late + 0.99 * _TWO_LOOKS_S:
                raise Wrong(f"worker {worker} is ended at {self.now}, with a timeout until {hung.due()}")
        if hung.state == "hung" and not harmless:
            hung.is_late = True
            self.model.timed_out(hung)
            if draw(self.number, worker, len(self.all_workers), 13) < self.rates.stopped and self._is_owner:
                self.note(f"worker {worker}, which was stopped, goes on")
                hung.state = "running"
                hung.resume()
        return ""

    def stop(self, timeout: float) -> list[int]:
        self.stopped = True
        if any(worker.state not in ("ended", "dead") for worker in self.workers.values()):
            self.advance(self.now + timeout)
        return []

    def drop(self) -> None:
        """Free all greenlets, once the environment has been closed."""
        self.troubled = False
        for worker in self.all_workers:
            worker.drop()
        self.workers.clear()
        self._events.clear()

    def abandon(self) -> None:
        raise NotImplementedError("a simulation is not forked")
