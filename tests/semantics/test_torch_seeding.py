"""Worker processes seed torch's generator, however late the simulator imports torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT

from marl_parallel import ParallelEnv, planning

pytestmark = pytest.mark.needs("torch")


class Torch(gymnasium.Env):
    """Draws from torch's process-wide generator, in the constructor too."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        import torch

        self.draw = torch.rand
        self.threads = torch.get_num_threads()
        self.offset = self.draw(()).item()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self._drawn(), {}

    def step(self, action: Any) -> Any:
        return self._drawn(), 0.0, False, False, {}

    def _drawn(self) -> Any:
        return np.array([self.offset, self.draw(()).item()], np.float32)


def drawn(seed: int, **arguments: Any) -> np.ndarray:
    with ParallelEnv([Torch] * 2, seed=seed, num_workers=2, **arguments) as env:
        batches = [env.reset()[0], *[env.step([{"agent_0": 0}] * 2)[0] for _ in range(3)]]
    return np.array([[of_env["agent_0"] for of_env in batch] for batch in batches])


def test_same_seed_same_draws():
    """An environment for each process; torch is first imported in the constructor, or with the constructor."""
    first, again, other = drawn(3), drawn(3), drawn(4)
    assert np.array_equal(first, again)
    assert not np.isin(first[:, 0, 1], other[:, 0, 1]).any()
    assert len(np.unique(first[..., 1])) == 8
    assert np.array_equal(first[:, 1], other[:, 0])  # both have the seed 4


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_that_is_preloaded(threads):
    """It is seeded as one that the constructor imports, and has as many threads."""
    with ParallelEnv([Torch] * 2, preload=["torch"], worker_threads=threads) as env:
        assert set(env.get_attr("threads")) == {threads}
    assert np.array_equal(drawn(3, preload=["torch"], worker_threads=threads), drawn(3, worker_threads=threads))


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


def test_generators_of_the_script():
    """A `torch.Generator` has a state for each environment; torch's default generator is the one of each process."""
    import torch

    names = {"__name__": "__main__", "Drawing": Drawing, "own": torch.Generator(), "default": torch.default_generator}
    code = (
        "def make(): return Drawing(lambda torch: (torch.rand((), generator=own), torch.rand((), generator=default)))"
    )
    exec(code, names)
    before = names["own"].get_state(), torch.default_generator.get_state()
    seen = []
    for backend, workers in (("process", 2), ("serial", 1)):
        with (
            pytest.warns(UserWarning, match="environments share a random generator of your program: .*'own'"),
            ParallelEnv([names["make"]] * 2, backend=backend, num_workers=workers, isolate_rng=True) as env,
        ):
            seen.append(np.array([[of_env["agent_0"] for of_env in env.reset()[0]] for _ in range(3)]))
    assert np.array_equal(seen[0], seen[1])
    assert len(np.unique(seen[0])) == 12
    assert torch.equal(before[0], names["own"].get_state())
    assert torch.equal(before[1], torch.default_generator.get_state())


def test_own_seeds_derive_from_the_programs_generator(monkeypatch):
    import torch

    def draws(seed: int) -> np.ndarray:
        monkeypatch.setattr(planning, "_made", itertools.count())
        torch.manual_seed(seed)
        before = torch.default_generator.get_state()
        with ParallelEnv([Torch] * 2, seed="own", num_workers=1, isolate_rng=True) as env:
            drawn = np.array([[of_env["agent_0"] for of_env in env.reset()[0]] for _ in range(2)])
        assert torch.equal(before, torch.default_generator.get_state())
        return drawn

    first, again, other = draws(1), draws(1), draws(2)
    assert np.array_equal(first, again)
    assert len(np.unique([first[..., 1], other[..., 1]])) == 8


class Drawing(gymnasium.Env):
    """Draws two numbers at each reset."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        import torch

        return np.array([float(one) for one in self.draw(torch)], np.float32), {}

    def step(self, action: Any) -> Any:
        raise NotImplementedError
