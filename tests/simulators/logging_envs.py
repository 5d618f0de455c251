"""A simulator that logs and warns on demand."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

from marl_parallel.core.reports.log_records import RING_NBYTES, Ring
from simulators.counting import Counting


class OnlyHere:
    """A value that no other process can unpickle, and whose class has a readable text."""

    def __reduce__(self) -> Any:
        raise TypeError("only here")

    def __repr__(self) -> str:
        return "<only here>"


class FailsThere:
    """A value that pickles, but does not unpickle outside of the process that created it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise TypeError("fails there")
        vars(self).update(state)

    def __repr__(self) -> str:
        return "<fails there>"


class ExitsThere:
    """A value that ends the process that unpickles it, and whose class has a readable text."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)

    def __repr__(self) -> str:
        return "<exits there>"


class Unprintable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unprintable() -> None:
    raise Unprintable


class RaisesThere:
    """A value whose unpickling raises such an exception."""

    def __reduce__(self) -> Any:
        return raise_unprintable, ()


class Logging(Counting):
    """`log` logs; `at_step` is called in the next steps; the constructor and `close` log what they are."""

    at_step: Callable[[], Any] | None = None

    def __init__(self, length: int | None = None, *, seed: int) -> None:
        super().__init__(length, seed=seed)
        logging.getLogger("sim.life").info("constructed")

    def pid(self) -> int:
        return os.getpid()

    def log(self, name: str, level: int, message: Any, *args: Any, **how: Any) -> None:
        logging.getLogger(name).log(level, message, *args, **how)

    def log_many(self, count: int, length: int = 1) -> None:
        for number in range(count):
            logging.getLogger("sim").warning("%d %s", number, length * "x")

    def log_unusual_values(self) -> None:
        logger = logging.getLogger("sim")
        logger.warning("one %s", OnlyHere(), extra={"lock": threading.Lock(), "size": 3})
        logger.warning("two %s", FailsThere(), extra={"more": FailsThere()})
        logger.warning(ValueError("three"))
        logger.warning("%(four)s", {"four": [4]})
        logger.warning("%d", "not a number")
        logger.warning("six")

    def log_what_only_a_worker_can_read(self) -> None:
        """Values, mappings and names of classes whose module the caller does not have; and a record without a time."""
        module = sys.modules["only_in_worker"] = types.ModuleType("only_in_worker")
        exec("class Fields(dict): pass\nclass Text(str): pass", vars(module))
        logger = logging.getLogger("sim")
        logger.warning("%(one)s", module.Fields(one=1))
        logger.warning(module.Text("two"))
        logger.warning("%(three)s", {module.Text("three"): 3})
        logger.warning("four", extra={module.Text("size"): 4})
        logger.handle(logging.makeLogRecord({"name": "sim", "msg": "five", "levelno": 30, "created": None}))

    def log_values_that_exit(self) -> None:
        logging.getLogger("sim").warning("one %s", ExitsThere(), extra={"more": ExitsThere()})

    def log_exception(self) -> None:
        try:
            [].pop()
        except IndexError:
            logging.getLogger("sim").exception("caught", stack_info=True)

    def log_in_children(self) -> list[str]:
        """In a fork, and in a process that multiprocessing forks."""
        pid = os.fork()
        if pid == 0:
            logging.getLogger("sim").warning("in a fork")
            os._exit(0)
        os.waitpid(pid, 0)
        child = multiprocessing.get_context("fork").Process(
            target=logging.getLogger("sim").warning, args=("in a child",)
        )
        child.start()
        child.join()
        logging.getLogger("sim").warning("in the worker")
        return [str(child.exitcode)]

    def log_in_threads(self, threads: int, count: int) -> None:
        def run(number: int) -> None:
            for place in range(count):
                logging.getLogger("sim").warning("%d %d", number, place)

        running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def log_later(self, message: str) -> None:
        """When no environment runs."""

        def wait_and_log() -> None:
            release.wait()
            logging.getLogger("sim").warning(message)

        release = self._release = threading.Event()
        self._thread = threading.Thread(target=wait_and_log)
        self._thread.start()

    def configure(self, how: Callable[[], Any]) -> None:
        how()

    def levels(self, *names: str) -> list[tuple[int, int]]:
        return [(logging.getLogger(name).level, logging.getLogger(name).getEffectiveLevel()) for name in names]

    def enabled(self, name: str, level: int) -> bool:
        return logging.getLogger(name).isEnabledFor(level)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.at_step is not None:
            self.at_step()
        return super().step(actions)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        warnings.warn(message, category, stacklevel=1)

    def close(self) -> None:
        logging.getLogger("sim.life").info("closed")


def logs_and(then: Callable[[], Any]) -> Callable[[], Any]:
    """A function that logs, and then does something that ends the process."""

    def run() -> None:
        logging.getLogger("sim.death").error("last words")
        then()

    return run


def exits() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise RuntimeError("in step")


def standard_handler(name: str, level: int = logging.INFO) -> None:
    """Configure a logger as libraries do that print by themselves."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stdout))


def write_bytes(data: bytes) -> None:
    """Write bytes into this worker's queue of records, as they are."""
    (ring,) = [one for one in gc.get_objects() if type(one) is Ring]
    put(ring, data)


def put(ring: Ring, data: bytes, again: bool = False) -> None:
    """Write bytes into a queue of records, as they are; with `again`, over those that were written last."""
    begin = ring.numbers[0] - (len(data) if again else 0)
    for place, byte in enumerate(data, begin):
        ring._bytes[place % RING_NBYTES] = byte
    ring.numbers[0] = begin + len(data)
