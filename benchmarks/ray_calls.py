"""Measure what one exchange with a Ray actor costs the driver, by each of Ray's mechanisms, and where the time goes.

    python benchmarks/ray_calls.py                half a minute

The actor returns what it gets: 2.3 kB, as much as the results of eight environments of three agents with 18 numbers.
CPU time is that of the driver's process: the thread that calls, and Ray's own threads by their names.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import typer
from options import Seconds
from ray.dag import InputNode
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

NBYTES = 2300
WAIT_S = 0.01
WARM_UP = 20


class Echo:
    def execute(self, data: bytes) -> bytes:
        return data

    def wait(self, data: bytes) -> bytes:
        time.sleep(WAIT_S)
        return data

    def stream(self):
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


def main(seconds: Seconds = 2.0) -> None:
    """Measure what one exchange with a Ray actor costs the driver."""
    data, table = os.urandom(NBYTES), Table(box=SIMPLE_HEAD)
    for heading in ("µs per exchange", "wall", "CPU", "calling thread", "threads of Ray"):
        table.add_column(heading, justify="left" if heading == "threads of Ray" else "right")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2 * 10**8)
    try:
        actors = [ray.remote(Echo).options(num_cpus=0.1).remote() for _ in range(4)]
        calls, streaming, direct, slow = actors
        silent = calls.execute.options(enable_task_events=False)
        items = streaming.stream.options(_generator_backpressure_num_objects=2).remote()
        graph, waiting = (compiled(method) for method in (direct.execute, slow.wait))

        def with_wait() -> object:
            ref = calls.execute.remote(data)
            ray.wait([ref])
            return ray.get(ref)

        for name, exchange in {
            "call": lambda: ray.get(calls.execute.remote(data)),
            "call without task events": lambda: ray.get(silent.remote(data)),
            "call with ray.wait": with_wait,
            "call that waits 10 ms": lambda: ray.get(calls.wait.remote(data)),
            "item of a streaming generator": lambda: ray.get(next(items)),
            "compiled graph": lambda: ray.get(graph.execute(data)),
            "compiled graph that waits 10 ms": lambda: ray.get(waiting.execute(data)),
        }.items():
            table.add_row(name, *measured(exchange, seconds))
        for one in (graph, waiting):
            one.teardown()
    finally:
        ray.shutdown()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
