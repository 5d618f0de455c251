"""A simulator whose process stops, or whose native thread holds the GIL, while it sends a large info."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from simulators.forking import Walk


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_lock() -> None:
    """Hold the GIL forever, as a faulty native thread does. Signals do not interrupt it: the main thread gets them."""
    ctypes.PyDLL(None).sleep(3600)


FAULTS = {"stop": stop, "lock": keep_the_lock}


def is_in(*names: str) -> bool:
    """Whether the main thread is in a function with one of these names."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame is not None


def hold_file(broken: threading.Event) -> Callable[[], Any]:
    """Let the main thread wait for the fault between writing the file of a large message and sending it."""
    from marl_parallel.backends import process

    written, write = threading.Event(), process._file_of

    def held(body: bytes) -> int:
        fd = write(body)
        written.set()
        broken.wait()
        return fd

    process._file_of = held
    return written.wait


def wait_for_full_socket() -> None:
    """Return when the main thread has sent a part of a message and waits for the receiver."""
    spent = time.process_time()
    while True:
        time.sleep(0.1)
        before, spent = spent, time.process_time()
        if is_in("send", "finish") and spent - before < 0.01:
            return


def wait_for_write() -> None:
    """Return while the main thread writes a message to a `multiprocessing` connection, in many writes."""
    while not is_in("_send"):
        time.sleep(0.0001)


MOMENTS = {"file": hold_file, "socket": lambda _: wait_for_full_socket, "connection": lambda _: wait_for_write}


class LargeInfos(Walk):
    """Returns a large info in one step of its first life and stops while it is sent; only in environment 0.

    Args:
        fault: One of `FAULTS`; "" for none, as in a reference.
        at: The step, counted from 1.
        size: Bytes of the info.
        moment: When the fault starts, one of `MOMENTS`; or seconds after the step's end.
        inline: Whether to use up all file descriptors, so that messages go through the socket.
        flag: A file that is created just before.
    """

    def __init__(
        self, fault: str, at: int = 2, size: int = 1 << 25, moment: str | float = 0.0, inline: bool = False,
        flag: str = "", *, env_id: int, seed: int, restarts: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed)
        self.map = b""
        self.fault, self.at, self.size, self.moment, self.inline = fault, at, size, moment, inline
        self.flag = flag
        self.steps, self.faulty = 0, env_id == 0 and restarts == 0

    def pid(self) -> int:
        return os.getpid()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        self.steps += 1
        if self.faulty and self.steps == self.at:
            infos["a"] = {"image": bytes(self.size)}
            if self.fault:
                self.begin()
        return observations, rewards, terminations, truncations, infos

    def begin(self) -> None:
        if self.flag:
            open(self.flag + ".soon", "x").close()
        if self.inline:
            import resource  # not on Windows, which has no fork server either

            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        broken = threading.Event()
        wait = functools.partial(time.sleep, self.moment)
        if isinstance(self.moment, str):
            wait = MOMENTS[self.moment](broken)
        threading.Thread(target=self.wait_and_break, args=(wait, broken), daemon=True).start()

    def wait_and_break(self, wait: Callable[[], Any], broken: threading.Event) -> None:
        wait()
        if self.flag:
            os.rename(self.flag + ".soon", self.flag)
        FAULTS[self.fault]()
        broken.set()


def pause() -> None:
    """Wait for any signal, including the one that dumps the stack."""
    ctypes.CDLL(None).pause()


class FinishesLate(Walk):
    """Hangs in one step of its first life until its stack is dumped; then finishes the step.

    Args:
        fault: "stop" or "pause": how it hangs.
        only: The environment that hangs.
        at: The step, counted from 1.
    """

    def __init__(self, fault: str, only: int, at: int = 2, *, env_id: int, seed: int, restarts: int = 0) -> None:
        super().__init__(100, seed=seed)
        self.fault = {"stop": stop, "pause": pause}[fault]
        self.at = at if env_id == only and restarts == 0 else 0
        self.steps = 0

    def step(self, actions: dict) -> Any:
        self.steps += 1
        if self.steps == self.at:
            self.fault()
        return super().step(actions)
