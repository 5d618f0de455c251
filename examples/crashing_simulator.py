"""A run that survives a simulator which segfaults, hangs, raises, and leaves child processes behind.

    python examples/crashing_simulator.py

It needs `pip install -e ".[mpe]"` and Linux, and takes about ten seconds. The lines with WARNING are the package's, one
for each fault.
"""

import argparse
import ctypes
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

from marl_parallel import ParallelEnv, RestartPolicy

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=1000, help="how often each copy is stepped")
args = parser.parse_args()

# Its notices go to the logger "marl_parallel". Here all logs are printed between the lines of our own.
logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

# Whatever is started from here inherits this, so that at the end we can see whether anything is left.
os.environ["STARTED_BY"] = f"crashing_simulator-{os.getpid()}"


def processes():
    """All processes that were started from here, children of children included."""
    found, mark = [], f"STARTED_BY={os.environ['STARTED_BY']}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            pass  # it has ended meanwhile, or is somebody else's
    return found


class Crashing(BaseParallelWrapper):
    """Has an engine in a process of its own, which it never ends; and breaks at its n-th step in each of its lives."""

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
    """Five copies of eight are as they should be."""
    return Crashing(simple_spread_v3.parallel_env(), *TROUBLES.get(env_id, ("", 0)))


env = ParallelEnv(
    [make_env] * 8,
    num_workers=2,
    on_error="restart",
    restart_policy=RestartPolicy(max_restarts=20, rate_limit=5, rate_period_s=60.0),
    step_timeout=1.0,  # generous: what takes longer is taken to hang
    reset_timeout=5.0,
)
with env:
    print(f"{env.num_envs} copies on {env.num_workers} workers")
    observations, infos = env.reset()
    returns, finished, interrupted = [0.0] * env.num_envs, [], 0
    for step in range(args.steps):
        actions = [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        anew = [copy for copy in range(env.num_envs) if "__common__" in infos[copy]]
        if anew:
            # These copies have been built anew, and `observations` are their first. Their old episodes were cut off:
            # all agents are truncated, with rewards of 0.0. `infos[copy]["__common__"]["error"]` is a full report.
            print(f"         step {step}: copies {anew} begin anew")
            interrupted += len(anew)
        for copy in range(env.num_envs):
            returns[copy] += sum(rewards[copy].values())
            if terminateds[copy]["__all__"] or truncateds[copy]["__all__"]:
                if copy not in anew:
                    finished.append(returns[copy])
                returns[copy] = 0.0
    print(f"{len(finished)} episodes, mean return {sum(finished) / max(len(finished), 1):.1f}; {interrupted} cut off")
    stats = env.stats()
    print(f"{stats.restarts} restarts, {[worker.restarts for worker in stats.workers]} by worker")
    print(f"{env.num_envs + stats.restarts} engines were started; {len(processes())} processes are there, workers too")

print(f"closed: {len(processes())} processes are left")
