"""Simulators for `marl-parallel check` that allow one open instance per process, like libsumo."""

from __future__ import annotations

import os
import threading

from simulators.buggy import Healthy


class RaisesIfNotAlone(Healthy):
    running = None

    def __init__(self) -> None:
        super().__init__()
        if type(self).running is not None:
            self.refuse()
        type(self).running = self

    def refuse(self):
        raise RuntimeError("there is a simulation in this process already")

    def close(self):
        type(self).running = None


class HangsIfNotAlone(RaisesIfNotAlone):
    def refuse(self):
        threading.Event().wait()


class OnlyLatestSteps(Healthy):
    """Only the latest instance can be stepped."""

    latest = None

    def reset(self, seed=None, options=None):
        OnlyLatestSteps.latest = self
        return super().reset(seed)

    def step(self, actions):
        if OnlyLatestSteps.latest is not self:
            os.abort()
        return super().step(actions)
