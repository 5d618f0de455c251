"""Simulators for `marl-parallel check` of which a process can have only one that is open, as of libsumo."""

from __future__ import annotations

import os
import threading

from simulators.buggy import Healthy


class RaisesBesideAnother(Healthy):
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


class HangsBesideAnother(RaisesBesideAnother):
    def refuse(self):
        threading.Event().wait()


class MixesUp(Healthy):
    """Only the latest one can be stepped."""

    latest = None

    def reset(self, seed=None, options=None):
        MixesUp.latest = self
        return super().reset(seed)

    def step(self, actions):
        if MixesUp.latest is not self:
            os.abort()
        return super().step(actions)
