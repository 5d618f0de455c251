"""Simulators for `marl-parallel check` that work, but make PettingZoo's own tests fail, exit or hang."""

from __future__ import annotations

import os
import threading

from simulators.buggy import DeadAgentsStay, Healthy

__all__ = ["DeadAgentsStay", "DiesInApiTest", "HangsInApiTest"]


class DiesInApiTest(Healthy):
    """PettingZoo's `parallel_api_test` sets `max_cycles`."""

    def __setattr__(self, name, value):
        if name == "max_cycles":
            self.break_down()
        super().__setattr__(name, value)

    def break_down(self):
        os.abort()


class HangsInApiTest(DiesInApiTest):
    def break_down(self):
        threading.Event().wait()
