"""The tutorial for PettingZoo runs, with compiled code and without, and shows what a plain loop does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies

import marl_parallel

pytestmark = [pytest.mark.needs("pygame", "pymunk"), pytest.mark.release_independent]

FOLDER = ROOT / "examples" / "pettingzoo_tutorial"
SHORT = {"NUM_ENVS": 4, "NUM_UPDATES": 8, "TIMED_STEPS": 20}


def shortened(text: str) -> str:
    """The tutorial, whose constants make it last a minute, with smaller ones."""
    for name, value in SHORT.items():
        text, count = re.subn(rf"(?m)^{name} = \d+", f"{name} = {value}", text)
        assert count == 1
    return text


def alive_after(steps: int) -> list[tuple[list[str], dict[str, float]]]:
    """The agents of four environments that do nothing, in a plain loop, and their last rewards."""
    found = []
    for seed in range(1, 5):
        env = knights_archers_zombies.parallel_env(max_cycles=300)
        env.reset(seed=seed)
        for _ in range(steps):
            _, rewards, *_ = env.step(dict.fromkeys(env.agents, 5))
        found.append((list(env.agents), dict(rewards)))
    return found


@pytest.mark.parametrize("pure", ["0", "1"], ids=["compiled", "pure"])
def test_tutorial(pure, tmp_path):
    script = tmp_path / "parallel_environments.py"
    script.write_text(shortened((FOLDER / "parallel_environments.py").read_text()))
    environ = {**os.environ, "MARL_PARALLEL_PURE": pure}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    alive = alive_after(150)
    assert any(len(agents) < 4 for agents, _ in alive)
    for number, (agents, rewards) in enumerate(alive):
        assert f"environment {number}: {agents}, rewards {rewards}\n" in done.stdout
    names = ["archer_0", "archer_1", "knight_0", "knight_1"]
    assert str(np.array([[int(name in agents) for name in names] for agents, _ in alive])) in done.stdout
    assert re.search(r"update 8: \d+\.\d zombies killed, mean of \d+ episodes", done.stdout)
    assert re.search(r"WARNING worker 1 .* died in step of environment 2, .*SIGSEGV", done.stdout)
    assert "100 steps of 4 environments, 2 environments constructed again" in done.stdout
    assert re.search(r"in parallel, steps are \d+\.\d\d times as fast", done.stdout)


def test_requirements():
    """All are pinned, and the package's version is this one."""
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    assert f"marl-parallel=={marl_parallel.__version__}" in lines
    assert all(re.match(r"[\w\[\]-]+==[\d.]+(; |$)", line) for line in lines)
