"""Signals to workers, keepers and the fork server at random moments, while all results are compared with a plain loop.

pytest                                                 two seconds
SIGNALS_FOR=600 SIGNALS_SEED=3 pytest -k outside -s    ten minutes with other numbers, and what happened
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.leaks import HeldResources
from helpers.reference import ReferenceEnv
from helpers.restart_comparison import OFTEN, actions_for
from simulators.crashing import SEED, seed_of
from simulators.deterministic import Hunt, Skirmish

from marl_parallel import ParallelEnv

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.whole_machine,
    pytest.mark.starts_anew,
    pytest.mark.skipif(sys.platform != "linux", reason="keepers and the fork server are Linux's"),
]

SECONDS = float(os.environ.get("SIGNALS_FOR", "2"))
SEEDS = [int(os.environ.get("SIGNALS_SEED", "0"))]
NAMES = ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGSTOP", "SIGCONT"]
ROLES = ["worker", "keeper", "fork server"]
NUM_ENVS, NUM_WORKERS = 6, 2
MOST_REBUILDS_UNSEEN = 50


class Compared:
    """One environment, and the plain loop that it must be equal to."""

    def __init__(self, make: Any, env_id: int) -> None:
        self.make, self.env_id, self.rebuilds = make, env_id, 0
        self.plain = self.new(seed_of(SEED, env_id, 0))

    def new(self, seed: int) -> ReferenceEnv:
        return ReferenceEnv(self.make, self.env_id, seed, AutoresetMode.SAME_STEP)

    def check_reset(self, observations: Any, infos: Any) -> None:
        if "restarted" in infos.get("__common__", {}):
            self.check_rebuilt(observations)
        else:
            assert_same(observations, self.plain.reset()[0], f"reset of {self.env_id}")

    def check_step(self, actions: Any, results: Any) -> None:
        observations, rewards, terminateds, truncateds, infos = results
        if "restarted" not in infos.get("__common__", {}):
            assert_same(results, self.plain.step(actions), f"step of {self.env_id}")
            return
        self.check_rebuilt(observations)
        assert terminateds["__all__"] or truncateds["__all__"]
        if not terminateds["__all__"] and not any(rewards.values()):
            assert truncateds == dict.fromkeys(truncateds, True)

    def check_rebuilt(self, observations: Any) -> None:
        """The observations are the first ones of a later life: one that ends in its constructor is never seen."""
        for later in range(1, MOST_REBUILDS_UNSEEN):
            plain = self.new(seed_of(SEED, self.env_id, self.rebuilds + later))
            with contextlib.suppress(AssertionError):
                assert_same(observations, plain.reset()[0])
                self.plain, self.rebuilds = plain, self.rebuilds + later
                return
        raise AssertionError(f"environment {self.env_id} was not rebuilt with one of its next seeds")


class Sender(threading.Thread):
    """Sends a signal to one of the processes below this one, again and again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random, self.stopped, self.sent = random.Random(seed), threading.Event(), Counter[str]()

    def run(self) -> None:
        while not self.stopped.wait(self.random.expovariate(1 / 0.15)):
            role, name = self.random.choice(ROLES), self.random.choice(NAMES)
            if role == "fork server" and name == "SIGKILL" and self.random.random() < 0.7:
                continue  # with it, all workers start anew
            found = [one for one in psutil.Process().children(recursive=True) if f"marl_parallel {role}" in title(one)]
            if found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.random.choice(found).send_signal(getattr(signal, name))
                    self.sent[f"{name} to {role}"] += 1


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [Hunt, Skirmish])
def test_signals_from_outside(make: Any, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """No result is wrong, the run does not end, and nothing is left."""
    caplog.set_level(logging.CRITICAL, "marl_parallel")  # else a report for each restart is kept
    before = HeldResources.now()
    sender, rng, steps = Sender(seed), np.random.default_rng(seed), 0
    with ParallelEnv(
        [make] * NUM_ENVS, seed=SEED, num_workers=NUM_WORKERS, on_error="restart", restart_policy=OFTEN,
        step_timeout=2.0, reset_timeout=2.0, start_timeout=10.0,
    ) as env:  # fmt: skip
        compared = [Compared(make, env_id) for env_id in range(NUM_ENVS)]
        sender.start()
        try:
            for one, *results in zip(compared, *env.reset(), strict=True):
                one.check_reset(*results)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                actions = [actions_for(make, rng) for _ in range(NUM_ENVS)]
                for one, given, *results in zip(compared, actions, *env.step(actions), strict=True):
                    one.check_step(given, tuple(results))
                steps += 1
        finally:
            sender.stopped.set()
            sender.join()
        print(f"{steps} steps of all, {env.stats().restarts} restarts, {dict(sorted(sender.sent.items()))}")
        assert steps > 0
    after = HeldResources.now()
    assert after.processes <= before.processes
    assert after.shared <= before.shared
    assert len(after.descriptors) <= len(before.descriptors)
