"""Restart a simulator that segfaults, hangs, raises, and leaves child processes behind.

    python examples/crashing_simulator.py

It needs `pip install -e ".[mpe]"` and Linux, and takes about ten seconds. The package logs one WARNING for each
fault.
"""

import argparse
import ctypes
import logging
import os
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

from marl_parallel import ParallelEnv, RestartPolicy

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=1000, help="steps of each environment")
args = parser.parse_args()

# The package logs to "marl_parallel". Here all logs go to stdout, like the output of this script.
logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

# All processes started from here inherit this variable. So the script can look for remaining processes at the end. It
# starts one before, which stays until the script ends: the resource tracker of `multiprocessing`.
resource_tracker.ensure_running()
os.environ["STARTED_BY"] = f"crashing_simulator-{os.getpid()}"


def processes():
    """The pids of all processes that were started from here, grandchildren included."""
    found, mark = [], f"STARTED_BY={os.environ['STARTED_BY']}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            pass  # it has ended, or belongs to another user
    return found


class Crashing(BaseParallelWrapper):
    """Starts an engine process that it never ends, and fails at its n-th step after each start."""

    def __init__(self, env, trouble, after):
        super().__init__(env)
        self.trouble, self.steps_left = trouble, after
        # In a session of its own: no signal to the worker's process group reaches it.
        self.engine = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"], start_new_session=True)

    def step(self, actions):
        self.steps_left -= 1
        if self.steps_left == 0:
            if self.trouble == "segfaults":
                ctypes.string_at(0)
            while self.trouble == "hangs":
                time.sleep(0.01)
            if self.trouble == "raises":
                raise RuntimeError("the engine does not answer")
        return super().step(actions)


TROUBLES = {1: ("segfaults", 450), 2: ("raises", 300), 5: ("hangs", 400)}


def make_env(env_id):
    """Three of the eight environments fail."""
    return Crashing(simple_spread_v3.parallel_env(), *TROUBLES.get(env_id, ("", 0)))


env = ParallelEnv(
    [make_env] * 8,
    num_workers=2,
    on_error="restart",
    restart_policy=RestartPolicy(max_restarts=20, rate_limit=5, rate_period_s=60.0),
    step_timeout=1.0,  # much longer than a step: a slower one counts as a hang
    reset_timeout=5.0,
)
with env:
    print(f"{env.num_envs} environments on {env.num_workers} workers")
    observations, infos = env.reset()
    returns, interrupted = [], 0
    for step in range(args.steps):
        actions = [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        rebuilt = [env_id for env_id in range(env.num_envs) if "__common__" in infos[env_id]]
        if rebuilt:
            # These environments have been rebuilt, and `observations` are their first. Their old episodes are over:
            # all agents are truncated, with rewards of 0.0. `infos[env_id]["__common__"]["error"]` is a full report.
            print(f"         step {step}: environments {rebuilt} were rebuilt")
            interrupted += len(rebuilt)
        for episode in env.finished_episodes:
            if episode.env_id not in rebuilt:
                returns.append(sum(episode.returns.values()))
    print(f"{len(returns)} episodes, mean return {sum(returns) / max(len(returns), 1):.1f}; {interrupted} interrupted")
    stats = env.stats()
    print(f"{stats.restarts} restarts, {[worker.restarts for worker in stats.workers]} by worker")
    print(f"{env.num_envs + stats.restarts} engines were started; {len(processes())} processes run, workers included")

print(f"closed: {len(processes())} processes are left")
