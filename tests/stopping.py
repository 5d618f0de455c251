"""A simulator whose process stops, or whose native thread keeps the interpreter's lock, while it sends a large info."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from forking import Walk


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_lock() -> None:
    """As a native thread does that never gives it back; no signal interrupts it, as the main thread gets them."""
    ctypes.PyDLL(None).sleep(3600)


FAULTS = {"stop": stop, "lock": keep_the_lock}


def wait_until_in(name: str) -> None:
    """Return while the main thread is in a function of this name."""
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == name:
                return
            frame = frame.f_back
        time.sleep(0.0001)


class LargeInfos(Walk):
    """Returns a large info in one step of its first life, and stops while it is on its way; only environment 0 does.

    Args:
        fault: One of `FAULTS`; "" for none, as in a reference.
        at: In which step, counted from 1.
        size: Bytes of the info.
        during: The function that sends the message, in which the fault begins; or seconds after the step's end.
        inline: Whether this process has no descriptor left for files, so that messages go through the socket.
    """

    def __init__(
        self, fault: str, at: int = 2, size: int = 1 << 25, during: str | float = 0.0, inline: bool = False, *,
        env_id: int, seed: int, restarts: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed)
        self.map = b""
        self.fault, self.at, self.size, self.during, self.inline = fault, at, size, during, inline
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
        if self.inline:
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        threading.Thread(target=self.wait_and_break, daemon=True).start()

    def wait_and_break(self) -> None:
        if isinstance(self.during, str):
            wait_until_in(self.during)
        else:
            time.sleep(self.during)
        FAULTS[self.fault]()


def pause() -> None:
    """Waits for a signal, also for the one by which the stack is taken."""
    ctypes.CDLL(None).pause()


class FinishesLate(Walk):
    """Hangs in one step of its first life, until its stack is taken; then it finishes the step.

    Args:
        fault: "stop" or "pause": how it hangs.
        only: Which environment does.
        at: In which step, counted from 1.
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
