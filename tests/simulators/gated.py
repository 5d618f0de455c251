"""Simulators that wait for files, so that a test decides when a call ends; without the libraries of the tests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from simulators.variable_agents import VariableAgents


class Levels(VariableAgents):
    """Its steps wait for the file of its environment, where one is given."""

    folder = ""
    reads = 0

    def __init__(self, env_id: int = 0) -> None:
        super().__init__(plain=True)
        self.level, self.lock = 10 * env_id, threading.Lock()

    def twice(self, factor: int = 2, *, offset: int = 0) -> int:
        return factor * self.level + offset

    @property
    def times_read(self) -> int:
        self.reads += 1
        return self.reads

    @property
    def failing(self) -> int:
        raise AttributeError("not before the start")

    def step(self, actions: Any) -> Any:
        while self.folder and not (Path(self.folder) / str(self.level)).exists():
            time.sleep(0.005)
        return super().step(actions)
