"""Simulators for `marl-parallel check` whose `reset` draws new values without a seed."""

from __future__ import annotations

import random
import time

import numpy as np

from simulators.buggy import Healthy


class UnseededReset(Healthy):
    """Episodes that start with a seed are reproducible."""

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        return super().reset()


class SlowUnseededReset(UnseededReset):
    """So slow that no episode ends during the check."""

    def step(self, actions):
        time.sleep(0.05)
        return super().step(actions)


class LateUnseededReset(UnseededReset):
    """The new values show in a step."""

    def observe(self):
        return super().observe() if self.time else {agent: np.zeros(4, np.float32) for agent in self.agents}


class DrawsFromGlobalGenerator(Healthy):
    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(random.getrandbits(32) if seed is None else seed)
        return super().reset()
