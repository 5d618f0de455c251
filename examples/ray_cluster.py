"""Run simple_spread on all nodes of a Ray cluster, and kill one worker on the way.

    python examples/ray_cluster.py                             on a running cluster, else on this machine alone
    python examples/ray_cluster.py --address 10.0.0.1:6379     on that cluster

It needs `pip install -e ".[mpe,ray]"` on every node, and takes about half a minute.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections import Counter

import ray
from mpe2 import simple_spread_v3
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marl_parallel import ParallelEnv, RayBackend

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--address", help="address of the cluster's head; default: the running cluster, else a new one")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--envs", type=int, default=32, help="number of environments in all workers together")
parser.add_argument("--steps", type=int, default=500, help="steps of each environment")
args = parser.parse_args()

# Each restart is one line of the logger "marl_parallel".
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")


def node_and_pid(_):
    """The node and process of an environment; called in its worker."""
    return os.environ["RAY_NODE_ID"], os.getpid()


@ray.remote(num_cpus=0)
def end(pid):
    os.kill(pid, signal.SIGKILL)


def kill(place):
    """Kill one worker on any node, as when it runs out of memory. The batch continues."""
    node, pid = place
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(end.options(scheduling_strategy=strategy).remote(pid))


# Half a CPU per worker: Ray counts the requested CPUs and does not measure their use.
backend = RayBackend(args.address, num_cpus=0.5, placement="SPREAD")
with ParallelEnv(
    [simple_spread_v3.parallel_env] * args.envs, backend=backend, num_workers=args.workers, on_error="restart"
) as env:
    places = env.call(node_and_pid)
    for (node, pid), num_envs in Counter(places).items():
        print(f"node {node[:8]}, process {pid}: {num_envs} environments")

    observations, infos = env.reset()
    started, interrupted = time.perf_counter(), 0
    for step in range(args.steps):
        if step == args.steps // 2:
            kill(places[0])
        actions = [dict.fromkeys(acting, step % 5) for acting in env.acting]
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        interrupted += sum(info.get("__common__", {}).get("restarted", False) for info in infos)
    took = time.perf_counter() - started

    print(f"{args.steps * args.envs / took:,.0f} environment steps/s, the restart included")
    print(f"{interrupted} environments were interrupted, the others lost nothing; {env.stats().restarts} restarts")
