"""Copies of simple_spread in Ray actors, over all nodes there are; one actor is killed on the way.

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
parser.add_argument("--address", help="of the cluster's head; without it, the one that runs here, or a new one")
parser.add_argument("--actors", type=int, default=4)
parser.add_argument("--copies", type=int, default=32, help="of the simulator, shared out among the actors")
parser.add_argument("--steps", type=int, default=500, help="how often each copy is stepped")
args = parser.parse_args()

# A restart is a line of the logger "marl_parallel".
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")


def where(_):
    """Runs beside a simulator: the node, and the process."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


@ray.remote(num_cpus=0)
def end(pid):
    os.kill(pid, signal.SIGKILL)


def kill(place):
    """End one actor, on whichever node, as it ends where memory runs out. The batch goes on."""
    node, pid = place
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(end.options(scheduling_strategy=strategy).remote(pid))


# Half a CPU each: Ray gives an actor no more than it is told to, and counts, but does not measure.
backend = RayBackend(args.address, num_cpus=0.5, placement="SPREAD")
with ParallelEnv(
    [simple_spread_v3.parallel_env] * args.copies, backend=backend, num_workers=args.actors, on_error="restart"
) as env:
    places = env.call(where)
    for (node, pid), copies in Counter(places).items():
        print(f"node {node[:8]}, process {pid}: {copies} copies")

    observations, infos = env.reset()
    begun, interrupted = time.perf_counter(), 0
    for step in range(args.steps):
        if step == args.steps // 2:
            kill(places[0])
        actions = [dict.fromkeys(acting, step % 5) for acting in env.acting]
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        interrupted += sum(info.get("__common__", {}).get("restarted", False) for info in infos)
    took = time.perf_counter() - begun

    print(f"{args.steps * args.copies / took:,.0f} environment steps/s, the restart included")
    print(f"{interrupted} copies were interrupted, all others lost nothing; {env.stats().restarts} restarts")
