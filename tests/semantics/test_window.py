"""`recv(window=)`: for so long, it waits for all environments in flight."""

from __future__ import annotations

import time

import pytest
from helpers.setups import Setup, rest
from simulators.counting import ACTIONS, Counting

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

SETUPS = [
    Setup("process", True, 3),
    Setup("thread", True, 3),
    rest(Setup("process", False, 3)),
]


class Sleeping(Counting):
    """Environment i sleeps for the i-th duration in each step."""

    def __init__(self, seed: int, env_id: int) -> None:
        super().__init__(seed=seed)
        self.seconds = (0.0, 0.02, 1.5)[env_id]

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        time.sleep(self.seconds)
        return super().step(actions)


@pytest.fixture(params=SETUPS, ids=str)
def env(request, build) -> ParallelEnv:
    env = build([Sleeping] * 3, request.param)
    env.reset()
    env.send([ACTIONS] * 3)
    return env


def test_what_is_ready_within_the_window(env):
    began = time.monotonic()
    assert sorted(env.recv(1, window=0.7).env_ids) == [0, 1]
    assert 0.65 <= time.monotonic() - began < 1.4
    assert env.recv(1, window=30.0).env_ids == (2,)
    assert time.monotonic() - began < 20.0


def test_more_than_the_window_has(env):
    """`min_envs` are waited for, however short the window is; 0 waits for the window alone."""
    assert sorted(env.recv(3, window=0.01).env_ids) == [0, 1, 2]
    env.send({2: ACTIONS})
    assert env.recv(0, window=0.01).env_ids == ()
    assert env.recv(0, window=30.0).env_ids == (2,)


def test_timeout_within_the_window(env):
    env.recv(2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"expected at least 1 environments to be ready within 0\.1 s, got 0"):
        env.recv(1, timeout=0.1, window=20.0)
    assert time.monotonic() - began < 1.3
    assert env.recv(1, timeout=30.0, window=0.1).env_ids == (2,)


@pytest.mark.parametrize(
    ("window", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError), (float("nan"), ValueError)]
)
def test_wrong_windows(window, error, build):
    env = build([Counting] * 2, Setup("process", True, 1))
    env.reset()
    env.send([ACTIONS] * 2)
    with pytest.raises(error, match="window"):
        env.recv(1, window=window)
    assert env.recv().env_ids == (0, 1)
