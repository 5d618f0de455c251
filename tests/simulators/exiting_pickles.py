"""Exceptions and other values of simulators whose pickles end the program that unpickles them, or hang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
WHERE = 1


def raise_one(kind: type[BaseException]) -> Any:
    raise kind("while it was unpickled")


class Pickle:
    """Unpickles by calling a function with these arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


class NamedPickle(Pickle):
    """An id of an agent."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedPickle)


class Reduced(Exception):
    """Unpickles by calling a function."""

    def __reduce__(self) -> Any:
        return self.args[0], self.args[1:]


class ExitsInInit(Exception):
    """Its text is its only argument when it is unpickled; then it takes itself for a command line."""

    def __init__(self, *arguments: str) -> None:
        if len(arguments) < 2:
            sys.exit(3)
        super().__init__(" ".join(arguments))


class ExitsInSetState(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 3

    def __setstate__(self, state: Any) -> None:
        sys.exit(self.code if hasattr(self, "code") else 3)


class ExitsInReduce(Exception):
    def __reduce__(self) -> Any:
        sys.exit(3)


class InterruptedInReduce(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class NotAnException(Exception):
    """Unpickles as a number."""

    def __reduce__(self) -> Any:
        return int, ("7",)


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "sys.exit": lambda: Reduced(sys.exit, 3),
    "init": lambda: ExitsInInit("no", "road"),
    "setstate": lambda: ExitsInSetState("no road"),
    "reduce": lambda: ExitsInReduce("no road"),
    "KeyboardInterrupt": lambda: Reduced(raise_one, KeyboardInterrupt),
    "KeyboardInterrupt in reduce": lambda: InterruptedInReduce("no road"),
    "GeneratorExit": lambda: Reduced(raise_one, GeneratorExit),
    "CancelledError": lambda: Reduced(raise_one, asyncio.CancelledError),
    "RuntimeError": lambda: Reduced(raise_one, RuntimeError),
    "MemoryError": lambda: Reduced(raise_one, MemoryError),
    "a number": lambda: NotAnException("no road"),
}


def exit_in(pid: int) -> Any:
    """Ends the process with this id only."""
    if os.getpid() == pid:
        sys.exit(3)
    return RuntimeError("no road")


def hang_in(pid: int) -> Any:
    if os.getpid() == pid:
        time.sleep(60)
    return RuntimeError("no road")


VALUES: dict[str, Callable[[], Any]] = {
    "SystemExit": lambda: Pickle(sys.exit, 3),
    "KeyboardInterrupt": lambda: Pickle(raise_one, KeyboardInterrupt),
    "GeneratorExit": lambda: Pickle(raise_one, GeneratorExit),
    "CancelledError": lambda: Pickle(raise_one, asyncio.CancelledError),
    "ValueError": lambda: Pickle(int, "seven"),
}


class Marked(spaces.Box):
    """A space with one more attribute."""

    def __init__(self, mark: Any) -> None:
        super().__init__(-np.inf, np.inf, (2,), np.float32)
        self.mark = mark


begun = threading.Event()


def slow_here(pid: int) -> Any:
    """Takes long in this process, the first time; meanwhile a signal comes."""
    if os.getpid() == pid and not begun.is_set():
        begun.set()
        for _ in range(200):  # a signal just before a sleep does not interrupt it
            time.sleep(0.1)
    return RuntimeError("slow")


def signalled_here(pid: int, number: int) -> str:
    """A signal comes in this process, the first time."""
    if os.getpid() == pid and not begun.is_set():
        begun.set()
        signal.raise_signal(signal.Signals(number))
    return "signalled"


class ExitingPickles:
    """Dict rules; two agents. One environment raises or returns a value of `VALUES` and `EXCEPTIONS`.

    Args:
        place: Where: "raises" in a step, "info", "reset info", "observation" of an unknown agent, "render", "call",
            "attribute" or "spaces".
        make: Returns the exception or the value.
        when: In which step.
    """

    possible_agents = ("a", "b")
    render_mode = "rgb_array"
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, place: str, make: Callable[[], Any], when: int = 2, *, env_id: int, restarts: int = 0) -> None:
        self.place, self.make, self.when = place, make, when
        self.bad = env_id == WHERE and not restarts
        self.time = 0
        self.observation_space = spaces.Dict([(agent, SPACE) for agent in self.possible_agents])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(3)) for agent in self.possible_agents])
        if self.bad and place == "attribute":
            self.record = make()
        if self.bad and place == "spaces":
            self.observation_space["b"] = Marked(make())
        if self.bad and place == "state":
            self.kept = make()

    def is_now(self, place: str) -> bool:
        return self.bad and self.place == place

    def observed(self) -> dict[str, Any]:
        return {agent: np.full(2, self.time, np.float32) for agent in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observed(), {"a": {"record": self.make()}} if self.is_now("reset info") else {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        now = self.time == self.when
        if now and self.is_now("raises"):
            raise self.make()
        observations, infos = self.observed(), {}
        if now and self.is_now("info"):
            infos = {"a": {"record": self.make()}}
        if now and self.is_now("observation"):
            observations["ghost"] = self.make()
        rewards = {"a": 1.0, "b": float(self.time)}
        flags = {"a": False, "b": False, "__all__": False}
        return observations, rewards, flags, dict(flags), infos

    def render(self) -> Any:
        return self.make() if self.is_now("render") else np.zeros((2, 2, 3), np.uint8)

    def told(self) -> Any:
        return self.make() if self.is_now("call") else self.time

    def close(self) -> None:
        pass
