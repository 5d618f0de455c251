"""The default seed: two open batches that rely on it play the same episodes, of which a warning says so, once."""

from __future__ import annotations

import inspect
import subprocess
import sys

from marl_parallel import ParallelEnv

SCRIPT = """
import warnings
from pettingzoo.classic import tictactoe_v3
from marl_parallel import ParallelEnv, make

warnings.simplefilter("error")
makers = [tictactoe_v3.env] * 2
with ParallelEnv(makers, backend="serial"):
    pass
first = ParallelEnv(makers, backend="serial")
for seed in (42, 7, None):
    ParallelEnv(makers, backend="serial", seed=seed).close()
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    second = make("pettingzoo.classic.tictactoe_v3:env", 2, backend="serial")
    third = ParallelEnv(makers, backend="serial")
texts = [str(one.message) for one in caught if "seed" in str(one.message)]
assert len(texts) == 1, texts
assert "pass another seed=" in texts[0]
for env in (first, second, third):
    env.close()
print("done")
"""


def test_the_second_open_batch_warns_once():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr


def test_the_default_is_42():
    assert inspect.signature(ParallelEnv).parameters["seed"].default == 42
