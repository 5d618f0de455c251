"""The default seed: two open batches that rely on it play the same episodes, of which a warning says so, once."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

SCRIPT = """
import functools
import warnings
import numpy as np
from gymnasium import spaces
from pettingzoo.classic import tictactoe_v3
from marl_parallel import ParallelEnv, make

class Maze:
    possible_agents = ["a"]
    observation_space = spaces.Dict(a=spaces.Box(0.0, 1.0, ()))
    action_space = spaces.Dict(a=spaces.Discrete(2))
    def __init__(self, seed=None, size=1.0):
        self.rng, self.size = np.random.default_rng(seed), size
    def reset(self):
        return {"a": self.rng.random() * self.size}, {}
    def step(self, actions):
        return {"a": 0.0}, {"a": 0.0}, {"__all__": False}, {"__all__": False}, {}

class Declares(Maze):  # its own seed, which `reset` does not replace
    def __init__(self, own=7):
        self.seed = own
        super().__init__(own)
    def reset(self, seed=None):
        return super().reset()

class Reseeded(Maze):
    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset()

def opened(maker, **how):
    return ParallelEnv([maker] * 2, backend="serial", **how)

def both(first, second, reset=lambda env: env.reset()):
    with first as one, second as other:
        one.reset()
        reset(other)

warnings.simplefilter("error")
# Seeds of their own, of which the signature, the attribute `seed`, or nobody knows; they may even be equal.
both(opened(functools.partial(Maze, seed=1)), opened(functools.partial(Maze, seed=1)))
both(opened(functools.partial(Reseeded, seed=1)), opened(functools.partial(Reseeded, seed=1)))
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "environments .* declare the same seed")
    both(opened(Declares), opened(functools.partial(Declares, 7)))
both(opened(lambda: Maze(seed=3)), opened(lambda: Maze(seed=3)))
# Other simulators, or another seed.
both(opened(lambda seed: Maze(seed)), opened(lambda seed: Maze(seed, 0.5)))
both(opened(Maze), opened(Maze), lambda env: env.reset(seed=1000))
both(opened(Reseeded), opened(Reseeded), lambda env: env.reset(seed=[5, 6]))
both(opened(Maze), opened(Maze, seed="own"))
with opened(Reseeded) as first, opened(Reseeded) as second:  # which is no longer where it was
    first.reset()
    first.reset(seed=7)
    second.reset()
with opened(tictactoe_v3.env) as first:
    first.reset()
first = opened(tictactoe_v3.env)
first.reset()
for seed in (42, 7, None):
    with opened(tictactoe_v3.env, seed=seed) as other:
        other.reset()
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    second = make("pettingzoo.classic.tictactoe_v3:env", 2, backend="serial")
    assert not [one for one in caught if "seed" in str(one.message)]
    second.reset_async()
    second.recv()
    third = opened(tictactoe_v3.env)
    third.reset()
texts = [str(one.message) for one in caught if "seed" in str(one.message)]
assert len(texts) == 1, texts
assert "pass a different seed=" in texts[0]
for env in (first, second, third):
    env.close()
print("done")
"""


def test_the_second_open_batch_warns_once():
    """At its first reset, and only if both really play the same."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr


ALIKE = """
import warnings
exec({setup!r})
with opened({maker}) as first, opened({maker}) as second, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first.reset()
    second.reset()
print([str(one.message)[:50] for one in caught])
"""


def test_seeds_that_reach_the_constructor_or_reset():
    setup = SCRIPT.partition('warnings.simplefilter("error")')[0]
    for maker in ("Maze", "Reseeded", "lambda: Reseeded(seed=3)"):
        script = ALIKE.format(setup=setup, maker=maker)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        assert done.stdout == "['this ParallelEnv and another open one both use the']\n", (maker, done.stderr)


def test_a_refused_reset_does_not_count():
    """Its seed has not reached the environments."""
    script = """
import threading, warnings
exec({setup!r})
class Optional(Reseeded):
    def reset(self, seed=None, options=None):
        return super().reset(seed)
with opened(Optional) as first, opened(Optional) as second, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first.reset()
    try:
        second.reset(seed=5, options={{"lock": threading.Lock()}})
    except TypeError as error:
        print("cannot be pickled" in str(error))
    second.reset()
print([str(one.message)[:50] for one in caught])
"""
    script = script.format(setup=SCRIPT.partition('warnings.simplefilter("error")')[0])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "True\n['this ParallelEnv and another open one both use the']\n", done.stderr


def test_the_default_is_42():
    assert inspect.signature(ParallelEnv).parameters["seed"].default == 42
