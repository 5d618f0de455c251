"""Process-wide random number generators: `random`, `numpy.random`, and torch's on the CPU if torch is loaded."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import numpy as np


def seed_generators(seed: int) -> None:
    """Seed all of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's, if torch is loaded."""
    if (torch := _torch()) is not None:
        torch.default_generator.manual_seed(seed)


def has_torch() -> bool:
    """Whether torch is loaded."""
    return _torch() is not None


def fingerprints() -> dict[str, int]:
    """By generator, as users call it, a number that changes when it is drawn from or seeded."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}
    if (torch := _torch()) is not None:
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return {name: hash(state) for name, state in states.items()}


def _torch() -> Any:
    """Torch, if it has been imported, also completely."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


class GeneratorStates:
    """States of the generators for each environment of a worker, and one, None, for everything else in the process.

    The generators have the state of the environment that was chosen last.
    """

    def __init__(self) -> None:
        self._present: int | None = None
        self._states: dict[int | None, tuple[Any, ...]] = {}

    def switch(self, env_id: int | None) -> None:
        """Give the generators the state of an environment; one that has none yet goes on with the present one."""
        if env_id == self._present:
            return
        torch = _torch()
        self._states[self._present] = (
            random.getstate(),
            np.random.get_state(legacy=False),
            None if torch is None else torch.default_generator.get_state(),
        )
        self._present = env_id
        if env_id in self._states:
            python, numpy, of_torch = self._states[env_id]
            random.setstate(python)
            np.random.set_state(numpy)
            if torch is not None and of_torch is not None:
                torch.default_generator.set_state(of_torch)
