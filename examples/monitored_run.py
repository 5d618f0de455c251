"""Watch a run in Prometheus: simulators that raise, hang, die and leak memory.

    python examples/monitored_run.py

It needs `pip install -e ".[mpe,monitoring]"`, prints the address of the metrics, and runs until Ctrl-C.
`docs/monitoring.md` says how Prometheus and Grafana read them; `examples/grafana.json` is a dashboard.
"""

import argparse
import os
import random
import time

from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

from marl_parallel import ParallelEnv, RecyclePolicy, RestartPolicy
from marl_parallel.monitoring import PORT, Monitor

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--port", type=int, default=PORT, help="of the metrics; 0 for any that is free")
parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to run")
parser.add_argument(
    "--fault-every", type=int, default=20_000, help="steps between faults of an environment, on average"
)
args = parser.parse_args()


class Flawed(BaseParallelWrapper):
    """Keeps 100 kB of each episode, steps slower with each one, and fails now and then."""

    def __init__(self, env):
        super().__init__(env)
        self.kept = []

    def reset(self, seed=None, options=None):
        self.kept.append(b"x" * 100_000)
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        time.sleep(1e-6 * len(self.kept))
        if random.random() < 1 / args.fault_every:
            fault = random.choice(["raises", "dies", "hangs"])
            if fault == "raises":
                raise RuntimeError("the physics became unstable")
            if fault == "dies":
                os._exit(1)
            time.sleep(10)
        return super().step(actions)


env = ParallelEnv(
    [lambda: Flawed(simple_spread_v3.parallel_env())] * 8,
    num_workers=2,
    step_timeout=1.0,
    on_error="restart",
    restart_policy=RestartPolicy(rate_limit=None),
    recycle=RecyclePolicy(max_memory_mb=200),
)
with env, Monitor(env) as monitor:
    print(f"http://127.0.0.1:{monitor.serve(args.port)}/metrics", flush=True)
    until = time.monotonic() + args.seconds
    env.reset()
    while time.monotonic() < until:
        env.step(env.sample_actions())
    print(env.stats())
