"""Simulators with scheduled faults, also after restarts.

`crashing` wraps any constructor; `helpers.restart_reference` computes the expected results. Lives are identified by
their seed alone, so a replacement with a wrong seed does not have its scheduled fault.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import psutil
from helpers.reference import keywords_of
from helpers.signals import SIGKILL, number_of

from simulators.failing import Fault, SimulatorError, hard_exit, killed_by, raising, system_exit

SEED = 42


def forever() -> None:
    while True:
        pass


class FaultKind(NamedTuple):
    """A kind of fault.

    Attributes:
        cause: Causes the fault.
        ends: What ends with it: only the environment ("env"), its process ("worker"), or its process at the timeout
            ("time").
        word: A part of the expected report.
    """

    cause: Fault
    ends: str
    word: str


FAULT_KINDS = {
    "raise": FaultKind(raising(SimulatorError, "bad terrain"), "env", "bad terrain"),
    "sys.exit": FaultKind(system_exit, "env", "SystemExit"),
    "os._exit": FaultKind(hard_exit, "worker", "exit code 7"),
    "SIGKILL": FaultKind(killed_by(SIGKILL), "worker", "SIGKILL"),
    "SIGSEGV": FaultKind(killed_by(signal.SIGSEGV), "worker", "SIGSEGV"),
    "SIGSTOP": FaultKind(killed_by(number_of("SIGSTOP")), "time", "has not finished"),
    "loop": FaultKind(forever, "time", "has not finished"),
}
RAISED = [name for name, kind in FAULT_KINDS.items() if kind.ends == "env"]
DEADLY = [name for name, kind in FAULT_KINDS.items() if kind.ends == "worker"]
HANGING = [name for name, kind in FAULT_KINDS.items() if kind.ends == "time"]


class Fate(NamedTuple):
    """The scheduled fault of a life.

    Attributes:
        fault: One of `FAULT_KINDS`.
        place: "constructor", "reset" or "step".
        after: The number of resets or steps before it that succeed.
    """

    fault: str
    place: str = "step"
    after: int = 0


Fates = Mapping[tuple[int, int], Fate]
"""By environment, and by how often it has been restarted."""


def seed_of(base: int, env_id: int, restarts: int) -> int:
    """The seed of a life: base seed plus environment for the first, derived by section 2 of the design for restarts."""
    if restarts == 0:
        return base + env_id
    return int(np.random.SeedSequence((base, env_id, restarts)).generate_state(1)[0] >> 1)


def crashing(
    make: Callable[..., Any], fates: Fates, base: int = SEED, started: Callable[[int], None] | None = None
) -> Callable[..., Any]:
    """Wrap a constructor so that its environments have these faults.

    Args:
        make: The constructor of simulators without faults.
        fates: The faults by environment and number of restarts.
        base: The base seed.
        started: Called with the environment's number at each construction.
    """
    by_seed = {(env_id, seed_of(base, env_id, n)): fate for (env_id, n), fate in fates.items()}

    def constructor(seed: int, env_id: int) -> Any:
        if started is not None:
            started(env_id)
        fate = by_seed.get((env_id, seed))
        if fate is not None and fate.place == "constructor":
            FAULT_KINDS[fate.fault].cause()
        env = make(**keywords_of(make, {"seed": seed, "env_id": env_id}))
        if fate is not None and fate.place != "constructor":
            _doom(env, fate)
        return env

    return constructor


def _doom(env: Any, fate: Fate) -> None:
    well, left = getattr(env, fate.place), fate.after

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left == 0:
            FAULT_KINDS[fate.fault].cause()
        left -= 1
        return well(*args, **kwargs)

    # Set on the object itself, so that adapters recognise it; `__wrapped__` preserves the signature of `reset`.
    method.__wrapped__ = well  # type: ignore[attr-defined]
    setattr(env, fate.place, method)


class Children:
    """Lets each simulator start two child processes, one of them in a session of its own.

    With the portable processes both are in the worker's group: others survive their worker, as docs/faults.md says.

    Args:
        tag: A unique number that identifies the processes.
    """

    def __init__(self, tag: int) -> None:
        self.argument = f"600.{tag:012d}"

    def __call__(self, env_id: int) -> None:
        for new_session in (False, True):
            child = subprocess.Popen(["sleep", self.argument], start_new_session=new_session)
            while self.argument not in psutil.Process(child.pid).cmdline():  # Linux sets it a moment after the start
                time.sleep(0.001)

    def running(self) -> set[int]:
        """The live processes with this tag."""
        found = set()
        for process in psutil.process_iter():
            try:
                if self.argument in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
            except psutil.Error:  # gone meanwhile, or none of ours
                continue
        return found

    def gone(self, seconds: float = 5.0) -> bool:
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.running()
