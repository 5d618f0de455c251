"""Measure what one exchange with a Ray actor costs the driver, by each of Ray's mechanisms, and where the time goes.

    python benchmarks/ray_calls.py               half a minute; writes results/ray_calls.json
    python benchmarks/ray_calls.py --markdown    the table for docs/ray.md, from the saved JSON

The actor returns what it gets: 2.3 kB, as much as the results of eight environments of three agents with 18 numbers.
CPU time is that of the driver's process: the thread that calls, and Ray's own threads by their names. A second node
runs on the same machine; its actors are reached like those of another machine. The last column is the CPU time of
compiled graphs that do nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import typer
from frame import AsMarkdown, Output, Results, Seconds, folder_for, markdown, read, save, show

from marl_parallel.cli.report import machine

NAME = "ray_calls"
SECONDS = 2.0
NBYTES = 2300
HEADINGS = ("", "wall time", "CPU time of the driver", "of which in the calling thread", "threads of Ray", "idle")
NOTE = (
    f"Microseconds, with {NBYTES} bytes in each direction; the other node runs on the same machine. Threads of Ray are "
    "the busiest ones of the driver. Idle: CPU time of an open graph while nothing is called, as a share of a CPU."
)
WAIT_S = 0.01
GRAPH_TIMEOUT_S = 600.0
"""Of each call of a compiled graph. Ray's own, 10 s, is too short on a busy machine."""
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
    """Cells: wall time, CPU time, and that of the calling thread, in microseconds; and the busiest threads of Ray."""
    for _ in range(WARM_UP):
        exchange()
    threads, process, thread_s = cpu_by_thread(), time.process_time(), time.thread_time()
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        exchange()
        count += 1
    took = time.perf_counter() - started, time.process_time() - process, time.thread_time() - thread_s
    used = cpu_by_thread()
    used.subtract(threads)
    rays = [(name, used) for name, used in used.most_common(5) if name not in ("python", "python3")]
    busiest = ", ".join(f"{name} {1e6 * spent / count:.0f}" for name, spent in rays[:3])
    return [*(f"{1e6 * one / count:,.0f}" for one in took), busiest]


def idle_cpu(processes: dict[str, psutil.Process], seconds: float) -> str:
    """CPU time of processes while nothing happens, as shares of a CPU."""

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    before = used()
    time.sleep(seconds)
    return ", ".join(f"{name} {(spent - before[name]) / seconds:.0%}" for name, spent in used().items())


def echo(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Echo).options(num_cpus=0.1, scheduling_strategy=where).remote()


def main(seconds: Seconds = SECONDS, output: Output = None, as_markdown: AsMarkdown = False) -> None:
    """Measure what one exchange with a Ray actor costs the driver."""
    if as_markdown:
        print(markdown(read(NAME, Results, output).page))
        return
    import ray
    from ray.cluster_utils import Cluster
    from ray.dag import InputNode

    described, data = machine(("ray",)), os.urandom(NBYTES)
    rows: dict[str, list[str]] = {}
    resources = {"num_cpus": 2, "object_store_memory": 2 * 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**resources, "include_dashboard": False})
    cluster.add_node(**resources)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        here = ray.get_runtime_context().get_node_id()
        other_node = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
        calls, distant, streaming = echo(here), echo(other_node), echo(here)
        silent = calls.execute.options(enable_task_events=False)

        def with_wait() -> object:
            ref = calls.execute.remote(data)
            ray.wait([ref])
            return ray.get(ref)

        def measure(name: str, exchange: Callable[[], object]) -> None:
            rows[name] = [*measured(exchange, seconds), ""]

        measure("a call: `ray.get(actor.method.remote(x))`", lambda: ray.get(calls.execute.remote(data)))
        measure("the same without task events", lambda: ray.get(silent.remote(data)))
        measure("with `ray.wait` before `ray.get`", with_wait)
        measure("a call that waits 10 ms in the actor", lambda: ray.get(calls.wait.remote(data)))
        measure("a call, other node", lambda: ray.get(distant.execute.remote(data)))
        items = streaming.stream.options(_generator_backpressure_num_objects=2).remote()
        measure("an item of a streaming generator", lambda: ray.get(next(items)))
        for name, node, method in (
            ("a compiled graph", here, "execute"),
            ("a compiled graph that waits 10 ms in the actor", here, "wait"),
            ("a compiled graph, other node", other_node, "execute"),
        ):
            # One at a time, each with an actor of its own: an idle graph takes CPU time.
            actor = echo(node)
            processes = {"driver": psutil.Process(), "actor": psutil.Process(ray.get(actor.pid.remote()))}
            with InputNode() as given:
                bound = getattr(actor, method).bind(given)
            graph = bound.experimental_compile(_submit_timeout=GRAPH_TIMEOUT_S, _buffer_size_bytes=1 << 16)
            measure(name, lambda graph=graph: ray.get(graph.execute(data), timeout=GRAPH_TIMEOUT_S))
            rows[name][-1] = idle_cpu(processes, seconds)
            graph.teardown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    results = Results(described, HEADINGS, [[name, *cells] for name, cells in rows.items()], NOTE)
    show(results.page)
    save(NAME, results, folder_for(output, whole=seconds == SECONDS))


if __name__ == "__main__":
    typer.run(main)
