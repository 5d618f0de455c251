"""Simulators for `marl-parallel check` whose `reset` draws something new wherever it gets no seed."""

from __future__ import annotations

import random
import time

import numpy as np

from simulators.buggy import Healthy


class DrawsAnew(Healthy):
    """An episode that begins with a seed can be repeated."""

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        return super().reset()


class SlowlyDrawsAnew(DrawsAnew):
    """Takes so long that no episode ends while it is checked."""

    def step(self, actions):
        time.sleep(0.05)
        return super().step(actions)


class DrawsAnewLater(DrawsAnew):
    """The new number shows in a step."""

    def observe(self):
        return super().observe() if self.time else {agent: np.zeros(4, np.float32) for agent in self.agents}


class DrawsFromGlobalGenerator(Healthy):
    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(random.getrandbits(32) if seed is None else seed)
        return super().reset()
