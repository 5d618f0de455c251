"""Simulators that break when their fates say so, whatever they are, and once more after a restart.

`crashing` wraps any constructor; what the package must return is worked out in `helpers.restart_reference`. One life is
told from the next by its seed alone, so that a fresh environment with a wrong seed does not meet its fate.
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

from simulators.failing import Fault, SimulatorError, hard_exit, killed_by, raising, system_exit

SEED = 42


def forever() -> None:
    while True:
        pass


class Way(NamedTuple):
    """A way to break.

    Attributes:
        fault: What happens.
        ends: What else ends with it: nothing ("env"), its process ("worker"), or that only when time is up ("time").
        word: What the report must say.
    """

    fault: Fault
    ends: str
    word: str


WAYS = {
    "raise": Way(raising(SimulatorError, "bad terrain"), "env", "bad terrain"),
    "sys.exit": Way(system_exit, "env", "SystemExit"),
    "os._exit": Way(hard_exit, "worker", "exit code 7"),
    "SIGKILL": Way(killed_by(signal.SIGKILL), "worker", "SIGKILL"),
    "SIGSEGV": Way(killed_by(signal.SIGSEGV), "worker", "SIGSEGV"),
    "SIGSTOP": Way(killed_by(signal.SIGSTOP), "time", "has not finished"),
    "loop": Way(forever, "time", "has not finished"),
}
RAISED = [name for name, way in WAYS.items() if way.ends == "env"]
DEADLY = [name for name, way in WAYS.items() if way.ends == "worker"]
HANGING = [name for name, way in WAYS.items() if way.ends == "time"]


class Fate(NamedTuple):
    """How a life ends.

    Attributes:
        way: One of `WAYS`.
        place: "constructor", "reset" or "step".
        after: How many resets or steps go well before.
    """

    way: str
    place: str = "step"
    after: int = 0


Fates = Mapping[tuple[int, int], Fate]
"""By environment, and by how often it has been restarted."""


def seed_of(base: int, env_id: int, restarts: int) -> int:
    """The seed of a life: the first has the base's, the n-th restart the one that the design gives it."""
    if restarts == 0:
        return base + env_id
    return int(np.random.SeedSequence((base, env_id, restarts)).generate_state(1)[0] >> 1)


def crashing(
    make: Callable[..., Any], fates: Fates, base: int = SEED, started: Callable[[int], None] | None = None
) -> Callable[..., Any]:
    """A constructor of what `make` makes, with these fates.

    Args:
        make: Makes simulators that never break.
        fates: When they do all the same.
        base: Of the seeds.
        started: Called with the environment's number whenever one is constructed.
    """
    by_seed = {(env_id, seed_of(base, env_id, n)): fate for (env_id, n), fate in fates.items()}

    def constructor(seed: int, env_id: int) -> Any:
        if started is not None:
            started(env_id)
        fate = by_seed.get((env_id, seed))
        if fate is not None and fate.place == "constructor":
            WAYS[fate.way].fault()
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
            WAYS[fate.way].fault()
        left -= 1
        return well(*args, **kwargs)

    # On the object itself: adapters see it as what it is. What wraps `reset` shows its signature.
    method.__wrapped__ = well  # type: ignore[attr-defined]
    setattr(env, fate.place, method)


class Children:
    """Has each simulator start two child processes, of which one makes a session of its own.

    Args:
        tag: A number of its own, by which they are found.
    """

    def __init__(self, tag: int) -> None:
        self.argument = f"600.{tag:012d}"

    def __call__(self, env_id: int) -> None:
        for new_session in (False, True):
            subprocess.Popen(["sleep", self.argument], start_new_session=new_session)

    def running(self) -> set[int]:
        """Those that are there now, whose ever they are."""
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
