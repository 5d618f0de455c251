"""Measure what one exchange with a Ray actor costs the driver, by each of Ray's mechanisms, and where the time goes.

    python benchmarks/ray_calls.py                half a minute

The actor returns what it gets: 2.3 kB, as much as the results of eight environments of three agents with 18 numbers.
CPU time is that of the driver's process: the thread that calls, and Ray's own threads by their names. A second node
runs on the same machine; its actors are reached like those of another machine. At the end, the CPU time of compiled
graphs that do nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
import typer
from options import Seconds
from ray.cluster_utils import Cluster
from ray.dag import InputNode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NBYTES = 2300
WAIT_S = 0.01
WARM_UP = 20


class Echo:
    def pid(self) -> int:
        return os.getpid()

    def execute(self, data: bytes) -> bytes:
        return data

    def wait(self, data: bytes) -> bytes:
        time.sleep(WAIT_S)
        return data

    def stream(self) -> Iterator[bytes]:
        while True:
            yield bytes(NBYTES)


def cpu_by_thread() -> Counter[str]:
    """Seconds of CPU time so far, by the names of threads."""
    seconds: Counter[str] = Counter()
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, used = (thread / "comm").read_text().strip(), (thread / "schedstat").read_text().split()[0]
        except OSError:  # it has ended
            continue
        seconds[name] += int(used) * 1e-9
    return seconds


def measured(exchange: Callable[[], object], seconds: float) -> list[str]:
    """Microseconds of wall time, CPU time, and that of the calling thread; and of the busiest threads of Ray."""
    for _ in range(WARM_UP):
        exchange()
    threads, process, own = cpu_by_thread(), time.process_time(), time.thread_time()
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        exchange()
        count += 1
    took = time.perf_counter() - started, time.process_time() - process, time.thread_time() - own
    used = cpu_by_thread()
    used.subtract(threads)
    rays = [(name, used) for name, used in used.most_common(5) if name not in ("python", "python3")]
    busiest = ", ".join(f"{name} {1e6 * spent / count:.0f}" for name, spent in rays[:3])
    return [*(f"{1e6 * one / count:,.0f}" for one in took), busiest]


def compiled(method: Any) -> Any:
    """A compiled graph of one call."""
    with InputNode() as given:
        node = method.bind(given)
    return node.experimental_compile(_buffer_size_bytes=1 << 16)


def idle_cpu(processes: dict[str, psutil.Process], seconds: float) -> str:
    """CPU time of processes while nothing happens, as shares of a CPU."""

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    before = used()
    time.sleep(seconds)
    return ", ".join(f"{name} {(spent - before[name]) / seconds:.0%}" for name, spent in used().items())


def echo(node_id: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Echo).options(num_cpus=0.1, scheduling_strategy=where).remote()


def main(seconds: Seconds = 2.0) -> None:
    """Measure what one exchange with a Ray actor costs the driver."""
    data, table = os.urandom(NBYTES), Table(box=SIMPLE_HEAD)
    for heading in ("µs per exchange", "wall", "CPU", "calling thread", "threads of Ray"):
        table.add_column(heading, justify="left" if heading == "threads of Ray" else "right")
    resources = {"num_cpus": 2, "object_store_memory": 2 * 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**resources, "include_dashboard": False})
    cluster.add_node(**resources)
    idle = {}
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        here = ray.get_runtime_context().get_node_id()
        there = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
        calls, distant, streaming = echo(here), echo(there), echo(here)
        silent = calls.execute.options(enable_task_events=False)

        def with_wait() -> object:
            ref = calls.execute.remote(data)
            ray.wait([ref])
            return ray.get(ref)

        def show(name: str, exchange: Callable[[], object]) -> None:
            table.add_row(name, *measured(exchange, seconds))

        show("call", lambda: ray.get(calls.execute.remote(data)))
        show("call without task events", lambda: ray.get(silent.remote(data)))
        show("call with ray.wait", with_wait)
        show("call that waits 10 ms", lambda: ray.get(calls.wait.remote(data)))
        show("call, other node", lambda: ray.get(distant.execute.remote(data)))
        items = streaming.stream.options(_generator_backpressure_num_objects=2).remote()
        show("item of a streaming generator", lambda: ray.get(next(items)))
        for name, node, method in (
            ("compiled graph", here, "execute"),
            ("compiled graph that waits 10 ms", here, "wait"),
            ("compiled graph, other node", there, "execute"),
        ):
            # One at a time, each with an actor of its own: an idle graph takes CPU time.
            actor = echo(node)
            processes = {"driver": psutil.Process(), "actor": psutil.Process(ray.get(actor.pid.remote()))}
            with InputNode() as given:
                bound = getattr(actor, method).bind(given)
            graph = bound.experimental_compile(_buffer_size_bytes=1 << 16)
            show(name, lambda graph=graph: ray.get(graph.execute(data)))
            idle[name] = idle_cpu(processes, seconds)
            graph.teardown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    Console().print(table)
    for name, shares in idle.items():
        print(f"{name}, idle: CPU time of the {shares}")


if __name__ == "__main__":
    typer.run(main)
