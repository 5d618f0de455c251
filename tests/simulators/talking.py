"""A simulator that prints on demand, and whose next step can have a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from simulators.counting import Counting


class Talking(Counting):
    """Set `fault` to a function that the next step calls."""

    fault: Callable[[], Any] | None = None

    def pid(self) -> int:
        return os.getpid()

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line)

    def say_in_all_ways(self, word: str) -> None:
        sys.stdout.write(f"{word} stdout\n")  # in one piece, also without buffers: those of two workers may mix
        sys.stderr.write(f"{word} stderr\n")
        os.write(1, f"{word} descriptor\n".encode())
        subprocess.run(["sh", "-c", f"echo {word} child; echo {word} child-stderr >&2"], check=True)

    def configure_close(self, line: str) -> None:
        self._at_close = line

    def close(self) -> None:
        if hasattr(self, "_at_close"):
            print(self._at_close)
        super().close()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.fault is not None:
            self.fault()
        return super().step(actions)
