"""Worker processes seed torch's generator, however late the simulator imports torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.needs("torch")


class Torch(gymnasium.Env):
    """Draws from torch's process-wide generator, in the constructor too."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        import torch

        self.draw = torch.rand
        self.offset = self.draw(()).item()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self._drawn(), {}

    def step(self, action: Any) -> Any:
        return self._drawn(), 0.0, False, False, {}

    def _drawn(self) -> Any:
        return np.array([self.offset, self.draw(()).item()], np.float32)


def drawn(seed: int) -> np.ndarray:
    with ParallelEnv([Torch] * 2, seed=seed, num_workers=2) as env:
        batches = [env.reset()[0], *[env.step([{"agent_0": 0}] * 2)[0] for _ in range(3)]]
    return np.array([[of_env["agent_0"] for of_env in batch] for batch in batches])


def test_same_seed_same_draws():
    """An environment for each process; torch is first imported in the constructor, or with the constructor."""
    first, again, other = drawn(3), drawn(3), drawn(4)
    assert np.array_equal(first, again)
    assert not np.isin(first[:, 0, 1], other[:, 0, 1]).any()
    assert len(np.unique(first[..., 1])) == 8
    assert np.array_equal(first[:, 1], other[:, 0])  # both have the seed 4


def test_module_that_imports_torch(tmp_path):
    """It is loaded with the pickled constructor, after the worker has started, and seeded before the constructor."""
    (tmp_path / "of_torch.py").write_text(
        "import torch\n"
        "from gymnasium import spaces\n"
        "class Env:\n"
        "    possible_agents = ['a']\n"
        "    observation_space = action_space = spaces.Dict(a=spaces.Discrete(2))\n"
        "    def __init__(self):\n"
        "        self.offset = torch.rand(()).item()\n"
        "    def reset(self):\n"
        "        return {'a': 0}, {}\n"
        "    def step(self, actions):\n"
        "        return {'a': 0}, {}, {}, {}, {}\n"
    )
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from marl_parallel import make\n"
        "for seed in (3, 3, 4):\n"
        "    with make('of_torch:Env', 2, seed=seed, num_workers=2, adapter='dict') as env:\n"
        "        print(*env.get_attr('offset'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, again, other = (line.split() for line in done.stdout.splitlines())
    assert first == again
    assert first[1] == other[0]
    assert len({*first, *other}) == 3
