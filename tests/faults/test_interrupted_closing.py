"""`close` that is interrupted, or that comes while another thread is inside a call: everything ends all the same."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import all_gone, gone, workers
from helpers.setups import Setup, rest
from helpers.start_methods import arguments
from simulators.failing import Fragile, SimulatorError, killed_by, raising
from simulators.native_arena import Arena

from marl_parallel import ParallelEnv
from marl_parallel.backends import spawn
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.process import ProcessBackend
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core import source
from marl_parallel.core.backend import Backend
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import Message, Reply, Request, answer
from marl_parallel.core.pool import pool as pool_module
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.worker_status import WorkerStatus
from marl_parallel.vector import PettingZooVecEnv, StackedVecEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.starts_anew]


_FILES = (pool_module.__file__, source.__file__)


class IdleWorkers(Backend):
    """Workers that reply to CLOSE; it counts the calls of `stop`."""

    def __init__(self) -> None:
        self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in range(2)]
        self.replies: list[Any] = []
        self.stops = 0

    def start(self, shares: Sequence[range], most_requests: int) -> None: ...

    def allocate(self, nbytes: int, layout: Layout | None = None) -> bytearray:
        return bytearray(nbytes)

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self.replies = [(worker, answer(request.message, None, {}, {}, 0.0)) for worker, request in requests.items()]

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[Any]:
        replies, self.replies = self.replies, []
        return replies

    def end(self, worker: int) -> Sequence[Reply]:
        return ()

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None: ...

    def interrupt(self) -> None: ...

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        return ""

    def stop(self, timeout: float) -> list[int]:
        self.stops += 1
        return []

    def abandon(self) -> None: ...


def interrupted_at(place: int, close: Callable[[], Any]) -> bool:
    """Call `close` with Ctrl-C at one place in `pool.py` or `source.py`; returns False if it ended before that.

    Places are those where Python handles signals, in the order of execution: where functions begin, and where they
    return.
    """
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code, caller = frame.f_code, frame.f_back
        inside = [code, *([] if event.startswith("c_") or caller is None else [caller.f_code])]
        if event != "c_call" and any(one.co_filename in _FILES for one in inside):
            count += 1
            if count > place:
                raise KeyboardInterrupt  # which ends the profile

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        close()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("ask", [True, False])
def test_ctrl_c_at_any_place_in_close(ask: bool) -> None:
    """Workers are stopped by this call of `close`, or at the latest by the next one, such as that at the exit."""
    at_once = reached = 0
    for place in range(1000):
        backend = IdleWorkers()
        pool = Pool(backend, [range(1), range(1, 2)])
        if not interrupted_at(place, lambda pool=pool: pool.close(ask=ask)):
            break
        reached += 1
        at_once += backend.stops > 0
        pool.close()
        assert backend.stops >= 1, f"never stopped after Ctrl-C at place {place}"
        stops = backend.stops
        pool.close()
        assert backend.stops == stops
        with pytest.raises(ClosedEnvironmentError):
            pool.send(Message.RESET, [0], {})
    assert reached > 15
    assert at_once > reached / 2


def test_second_ctrl_c_while_workers_are_stopped() -> None:
    backend = IdleWorkers()
    pool = Pool(backend, [range(1), range(1, 2)])
    stop = backend.stop

    def interrupted(timeout: float) -> list[int]:
        backend.stop = stop  # type: ignore[method-assign]
        raise KeyboardInterrupt

    backend.stop = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert backend.stops == 0
    pool.close()
    assert backend.stops == 1
    pool.close()
    assert backend.stops == 1


def test_close_in_a_signal_handler_during_close() -> None:
    """It does not cut the first call short."""
    backend = IdleWorkers()
    pool = Pool(backend, [range(1), range(1, 2)])
    wait, replies = backend.wait, []

    def interrupted(timeout: float | None = None, at_least: int = 1) -> list[Any]:
        pool.close()
        assert backend.stops == 0
        replies.extend(wait())
        return replies

    backend.wait = interrupted  # type: ignore[method-assign]
    pool.close()
    assert len(replies) == 2
    assert backend.stops == 1


# A second thread that closes


class Closing:
    """A first `close`, in a thread of its own, which waits inside until `leave` is set."""

    def __init__(self, close: Callable[[], Any], inside: threading.Event, leave: threading.Event) -> None:
        self.leave, self.errors = leave, list[BaseException]()
        self.thread = threading.Thread(target=self._run, args=[close])
        self.thread.start()
        assert inside.wait(30.0)

    def _run(self, close: Callable[[], Any]) -> None:
        try:
            close()
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        self.leave.set()
        self.thread.join(30.0)
        assert not self.thread.is_alive()


class ClosesLater(Fragile):
    """Its `close` waits for the test, in this process."""

    inside, leave = threading.Event(), threading.Event()

    def close(self) -> None:
        self.inside.set()
        self.leave.wait(30.0)


class ArenaClosesLater(Arena):
    def close(self) -> None:
        ClosesLater.inside.set()
        ClosesLater.leave.wait(30.0)
        super().close()


CLOSERS: dict[str, Callable[[ParallelEnv], Callable[..., Any]]] = {
    "dicts": lambda env: env.close,
    "terminate": lambda env: functools.partial(env.close, terminate=True),
    "no limit": lambda env: functools.partial(env.close, timeout=None),
    "stacked": lambda env: StackedVecEnv(env).close,
    "pettingzoo": lambda env: PettingZooVecEnv(env).close,
    "exit": lambda env: functools.partial(env.__exit__, None, None, None),
    "finalizer": lambda env: env._finalizer,
}


@pytest.fixture
def closes_later() -> Iterator[None]:
    ClosesLater.inside.clear()
    ClosesLater.leave.clear()
    yield
    ClosesLater.leave.set()


@pytest.mark.usefixtures("closes_later")
@pytest.mark.parametrize(
    ("backend", "closer"), [("serial", name) for name in CLOSERS] + [("thread", "dicts"), ("native", "dicts")]
)
def test_second_close_waits_for_the_first(backend: Any, closer: str, tmp_path: Any) -> None:
    if backend == "native":
        env = ParallelEnv.from_native(ArenaClosesLater(2))
    else:
        env = ParallelEnv([functools.partial(ClosesLater, {}, tmp_path)], backend=backend, seed=1)
    close = CLOSERS[closer](env)
    first = Closing(lambda: env.close(timeout=60.0), ClosesLater.inside, ClosesLater.leave)
    timer = threading.Timer(0.2, ClosesLater.leave.set)
    timer.start()
    close()
    assert ClosesLater.leave.is_set()
    assert env.stepper.source.freed
    timer.join()
    first.end()
    assert not first.errors


def test_second_close_waits_for_processes(start_method: str, tmp_path: Any) -> None:
    constructors = [functools.partial(Fragile, {"close": functools.partial(time.sleep, 0.5)}, tmp_path)]
    env = ParallelEnv(constructors, seed=1, **arguments(start_method))
    env.reset()
    thread = threading.Thread(target=env.close)
    thread.start()
    while not env.stepper.source.closed:
        time.sleep(0.001)
    env.close(timeout=60.0)
    assert env.stepper.source.freed
    assert all_gone(*workers(tmp_path))
    thread.join()


@pytest.mark.usefixtures("closes_later")
@pytest.mark.parametrize("timeout", [0.0, 0.1])
def test_second_close_waits_no_longer_than_its_timeout(timeout: float, tmp_path: Any) -> None:
    env = ParallelEnv([functools.partial(ClosesLater, {}, tmp_path)], backend="serial", seed=1)
    first = Closing(lambda: env.close(timeout=60.0), ClosesLater.inside, ClosesLater.leave)
    env.close(timeout=timeout)
    assert not ClosesLater.leave.is_set()
    assert first.thread.is_alive()
    first.end()
    assert env.stepper.source.freed


def test_waiting_close_frees_what_ctrl_c_has_left() -> None:
    """Ctrl-C ends the first close before workers are stopped; the one that waits stops them."""
    backend, inside, leave = IdleWorkers(), threading.Event(), threading.Event()
    pool, stop = Pool(backend, [range(1), range(1, 2)]), backend.stop

    def interrupted(timeout: float) -> list[int]:
        backend.stop = stop  # type: ignore[method-assign]
        inside.set()
        leave.wait(30.0)
        raise KeyboardInterrupt

    backend.stop = interrupted  # type: ignore[method-assign]
    first = Closing(pool.close, inside, leave)
    threading.Timer(0.1, leave.set).start()
    pool.close(timeout=60.0)
    assert backend.stops == 1
    first.end()
    assert [type(error) for error in first.errors] == [KeyboardInterrupt]


def test_forked_child_waits_for_no_thread_of_its_parent() -> None:
    backend, inside, leave = IdleWorkers(), threading.Event(), threading.Event()
    pool, stop = Pool(backend, [range(1)]), backend.stop

    def waits(timeout: float) -> list[int]:
        inside.set()
        leave.wait(30.0)
        return stop(timeout)

    backend.stop = waits  # type: ignore[method-assign]
    first = Closing(pool.close, inside, leave)
    pool.abandon()  # as in a forked child
    began = time.monotonic()
    pool.close(timeout=60.0)
    assert time.monotonic() - began < 30.0
    first.end()


# With real workers, while another thread is inside `on_restart`


class Callback:
    """An `on_restart` that returns when the test lets it, or after a minute."""

    def __init__(self) -> None:
        self.entered, self.leave, self.has_left = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, _: Any) -> None:
        self.entered.set()
        self.leave.wait(60.0)
        self.has_left.set()


class InCallback:
    """An environment whose step, in another thread, is inside a `Callback`."""

    def __init__(self, build: Callable[..., ParallelEnv], setup: Any, notes: Any) -> None:
        self.callback, self.errors = Callback(), list[BaseException]()
        faults = {"step": raising(SimulatorError, "bad terrain")}
        constructors = [functools.partial(Fragile, faults, notes), functools.partial(Fragile, {}, notes)]
        self.env = build(constructors, setup, on_error="restart", on_restart=self.callback)
        self.env.reset()
        self.thread = threading.Thread(target=self._step)
        self.thread.start()
        assert self.callback.entered.wait(30.0)

    def _step(self) -> None:
        try:
            self.env.step([{"a": 0, "b": 0}] * 2)
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        """Let the callback return: the step must end with the error of an environment that is closed."""
        assert not self.callback.has_left.is_set()
        self.callback.leave.set()
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        assert [type(error) for error in self.errors] == [ClosedEnvironmentError]
        self.env.close()


def test_close_does_not_wait_for_a_callback_without_limit(concurrent_setup, build, tmp_path, caplog):
    """Its timeout limits this, too. Processes are gone when it returns."""
    inside = InCallback(build, concurrent_setup, tmp_path)
    inside.env.close(timeout=0.1)
    if concurrent_setup.backend != "thread":
        assert gone(workers(tmp_path))
    warnings = [record.getMessage() for record in caplog.records if "close() waited" in record.getMessage()]
    assert len(warnings) == 1
    assert "on_restart=" in warnings[0]
    inside.end()


@pytest.fixture
def alarm_interrupt() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, like Ctrl-C."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm_interrupt")
def test_ctrl_c_while_close_waits_for_a_callback(concurrent_setup, build, tmp_path):
    inside = InCallback(build, concurrent_setup, tmp_path)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        inside.env.close(timeout=50.0)
    if concurrent_setup.backend != "thread":
        assert gone(workers(tmp_path))
    inside.end()


# Ctrl-C in a simulator's `close`, which is called before the environment is constructed again


class InterruptedOnClose(Fragile):
    def close(self) -> None:
        super().close()
        raise KeyboardInterrupt


@pytest.mark.parametrize("cause", ["fault", "request"])
def test_ctrl_c_in_close_before_a_restart_is_the_callers(cause, build, tmp_path):
    """With "serial" the simulator runs in the caller's thread, where Ctrl-C must end the program."""
    faults = {"step": raising(SimulatorError, "bad terrain")} if cause == "fault" else {}
    env = build([functools.partial(InterruptedOnClose, faults, tmp_path)], Setup("serial", True, 1), on_error="restart")
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step([{"a": 0, "b": 0}]) if cause == "fault" else env.restart([0])
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


@pytest.mark.usefixtures("alarm_interrupt", "closes_later")
def test_ctrl_c_while_close_waits_for_another_thread(tmp_path):
    env = ParallelEnv([functools.partial(ClosesLater, {}, tmp_path)], backend="serial", seed=1)
    first = Closing(lambda: env.close(timeout=60.0), ClosesLater.inside, ClosesLater.leave)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        env.close(timeout=50.0)
    assert not env.stepper.source.freed
    first.end()
    assert env.stepper.source.freed
    assert not first.errors


def test_callback_that_closes_while_another_thread_closes(build, tmp_path, caplog):
    """The other thread waits for the callback, so the callback does not wait for the other thread."""
    entered, errors = threading.Event(), list[BaseException]()

    def close_too(_: Any) -> None:
        entered.set()
        while not env.stepper.source.closed:
            time.sleep(0.001)
        env.close(timeout=60.0)

    def step() -> None:
        try:
            env.step([{"a": 0, "b": 0}])
        except ClosedEnvironmentError as error:
            errors.append(error)

    faults = {"step": raising(SimulatorError, "bad terrain")}
    constructors = [functools.partial(Fragile, faults, tmp_path)]
    env = build(constructors, Setup("serial", True, 1), on_error="restart", on_restart=close_too)
    env.reset()
    thread = threading.Thread(target=step)
    thread.start()
    assert entered.wait(30.0)
    began = time.monotonic()
    env.close(timeout=60.0)
    assert time.monotonic() - began < 50.0
    thread.join(30.0)
    assert len(errors) == 1
    assert not [record for record in caplog.records if "close() waited" in record.getMessage()]


def test_other_exceptions_of_close_before_a_restart_are_ignored(backend_setup, build, tmp_path):
    faults = {"step": raising(SimulatorError, "bad terrain"), "close": raising(SystemExit, 3)}
    env = build([functools.partial(Fragile, faults, tmp_path)], backend_setup, on_error="restart")
    env.reset()
    *_, infos = env.step([{"a": 0, "b": 0}])
    assert "bad terrain" in infos[0]["__common__"]["error"]
    env.close(terminate=True)


# `close` in a signal handler, in the middle of what follows a fault


@pytest.mark.parametrize(
    ("fault", "start_method", "owner", "name"),
    [
        ("hang", "forkserver", Launcher, "kill"),
        ("death", "forkserver", Launcher, "launch"),
        ("death", "portable", spawn._PipeHandle, "signal"),
        ("hang", "portable", spawn._PipeHandle, "__init__"),
        rest("hang", "forkserver", Launcher, "wait_gone"),
        rest("hang", "forkserver", Launcher, "stack"),
        rest("hang", "forkserver", Launcher, "launch"),
        rest("death", "forkserver", ProcessBackend, "start_worker"),
        rest("hang", "forkserver", ProcessBackend, "end"),
        rest("hang", "portable", spawn._PipeHandle, "signal"),
        rest("hang", "portable", spawn._PipeHandle, "hang_up"),
        rest("death", "portable", spawn._PipeHandle, "hang_up"),
        rest("hang", "portable", spawn._PipeHandle, "stack"),
        rest("hang", "portable", PortableProcessBackend, "end"),
        rest("death", "portable", PortableProcessBackend, "start_worker"),
    ],
)
def test_close_in_a_signal_handler_while_a_worker_is_replaced(fault, start_method, owner, name, tmp_path, monkeypatch):
    """The interrupted call raises `ClosedEnvironmentError`, wherever it was, and no process is left."""
    cause = {"hang": functools.partial(time.sleep, 60), "death": killed_by(signal.SIGKILL)}[fault]
    env = ParallelEnv(
        [functools.partial(Fragile, {"step": cause}, tmp_path, after=1), functools.partial(Fragile, {}, tmp_path)],
        num_workers=2,
        seed=1,
        on_error="restart",
        step_timeout=0.3 if fault == "hang" else None,
        **arguments(start_method),
    )
    env.reset()
    env.step([{"a": 0, "b": 0}] * 2)
    method, calls = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            env.close(terminate=True)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(ClosedEnvironmentError):
        env.step([{"a": 0, "b": 0}] * 2)
    assert calls
    monkeypatch.undo()
    assert gone(workers(tmp_path))
