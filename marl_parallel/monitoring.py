"""`Monitor`: the metrics of a run, for TensorBoard, Weights & Biases and Prometheus.

Numbers come from two places: `ParallelEnv.stats`, which reads what workers write to shared memory, and a listener of
`EpisodeStatistics`, which is called for each episode that ends. Nothing is added to a step.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.types import FinishedEpisode, Stats, StepTimes, WorkerStats, how_to_install, installed

PORT = 9464
"""The port of `Monitor.serve`."""

_KINDS = ("exception", "death", "timeout", "neighbour", "request")


class TensorBoardWriter(Protocol):
    """A writer such as `torch.utils.tensorboard.SummaryWriter` or `tensorboardX.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class WandbRun(Protocol):
    """A run of Weights & Biases: the result of `wandb.init`."""

    def log(self, data: dict[str, Any], step: int) -> object: ...


class _Episodes:
    """The number of ended episodes, and returns and lengths of the last ones, at most `window`."""

    def __init__(self, window: int) -> None:
        self._lock = threading.Lock()  # guards what `add` changes: Prometheus reads it in another thread
        self._counts: Counter[int] = Counter()  # by environment
        latest: Callable[[], deque[float]] = lambda: deque(maxlen=window)  # noqa: E731
        # By "return" or "length", and the agent or environment.
        self._of_agents: dict[tuple[str, str], deque[float]] = defaultdict(latest)
        self._of_envs: dict[tuple[str, str], deque[float]] = defaultdict(latest)

    def add(self, episode: FinishedEpisode) -> None:
        with self._lock:
            env, returns = str(episode.env_id), episode.returns
            self._counts[episode.env_id] += 1
            self._of_envs["length", env].append(float(episode.length))
            if len({np.shape(total) for total in returns.values()}) == 1:
                for name, value in _components(env, sum(returns.values())):
                    self._of_envs["return", name].append(value)
            for agent, total in returns.items():
                self._of_agents["length", str(agent)].append(float(episode.lengths[agent]))
                for name, value in _components(str(agent), total):
                    self._of_agents["return", name].append(value)

    def means(self) -> tuple[dict[int, int], dict[tuple[str, str], float], dict[tuple[str, str], float]]:
        """Episodes by environment, and the means by agent and by environment."""

        def means(latest: Mapping[tuple[str, str], deque[float]]) -> dict[tuple[str, str], float]:
            return {key: statistics.fmean(values) for key, values in latest.items()}

        with self._lock:
            return dict(self._counts), means(self._of_agents), means(self._of_envs)


class Monitor:
    """The metrics of one `ParallelEnv`: written by `log`, or read by Prometheus after `serve`.

    `docs/monitoring.md` lists all metrics. Returns and lengths are means over the last episodes, at most `window` of
    each agent and of each environment; the return of an environment is the sum over its agents.

    Args:
        env: The environments, or a facade of them, such as a `StackedVecEnv`. The monitor does not close them.
        writer: What `log` writes to: an object with `add_scalar` (TensorBoard) or with `log` (Weights & Biases); None
            to write nothing.
        name: The prefix of names in `log`, before a slash; the label `name` in Prometheus. For programs with several
            `ParallelEnv`, such as `"train"` and `"eval"`.
        window: The most episodes in each mean.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `window` is less than 1, or `name` is empty.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         if tag in ("env/steps", "env/episodes", "env/length/agent_0"):
        ...             print(step, tag, value)
        >>> def make():
        ...     return simple_spread_v3.parallel_env(max_cycles=5)
        >>> with ParallelEnv([make] * 2, num_workers=1) as env, Monitor(env, Printer()) as monitor:
        ...     observations, infos = env.reset()
        ...     for _ in range(12):
        ...         result = env.step(env.sample_actions())
        ...     values = monitor.log(step=24)
        24 env/steps 24.0
        24 env/episodes 4.0
        24 env/length/agent_0 5.0
    """

    def __init__(
        self,
        env: Any,
        writer: TensorBoardWriter | WandbRun | None = None,
        *,
        name: str = "env",
        window: int = 100,
    ) -> None:
        parallel_env = getattr(env, "parallel_env", env)
        if not isinstance(parallel_env, ParallelEnv):
            raise TypeError(f"env must be a ParallelEnv or a facade of one, got {env!r}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        if isinstance(window, bool) or not isinstance(window, int | np.integer):
            raise TypeError(f"window must be a number of episodes, got {window!r}")
        if window < 1 or not name:
            raise ValueError("name is empty" if not name else f"window must be at least 1, got {window}")
        self._write = _written_by(writer)
        self._env, self._name = parallel_env, name
        self._episodes = _Episodes(int(window))
        self._logged, self._logged_at = parallel_env.stats(), time.monotonic()
        self._server: tuple[Any, threading.Thread] | None = None
        self._listeners = parallel_env.stepper.transitions.statistics.listeners
        self._listeners.append(self._episodes.add)  # which does not refer to the environments

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the endpoint and count no more episodes. Idempotent; the environments stay open."""
        if self._episodes.add in self._listeners:
            self._listeners.remove(self._episodes.add)
        if self._server is not None:
            (server, thread), self._server = self._server, None
            server.shutdown()
            server.server_close()
            thread.join()

    # -- TensorBoard and Weights & Biases ------------------------------------------------------------------------------

    def log(self, step: int) -> dict[str, float]:
        """Write all metrics, and return them by name.

        Counts include everything since the start. Times, shares and `steps_per_second` cover the time since the last
        call. Times of workers that have not stepped since then are left out, and so is `steps_per_second` if the clock
        has not advanced.

        Args:
            step: The position on the horizontal axis, such as the number of environment steps.
        """
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise TypeError(f"step must be an integer, got {step!r}")
        stats, now = self._env.stats(), time.monotonic()
        before, seconds = self._logged, now - self._logged_at
        self._logged, self._logged_at = stats, now
        values = {f"{self._name}/{name}": float(value) for name, value in self._values(stats, before, seconds)}
        self._write(values, int(step))
        return values

    def _values(self, stats: Stats, before: Stats, seconds: float) -> Iterator[tuple[str, float]]:
        for count in ("steps", "resets", "faults", "restarts", "recycled"):
            yield count, getattr(stats, count)
        yield from [(f"restarts/{kind}", stats.restart_kinds[kind]) for kind in _KINDS]
        if seconds > 0:
            yield "steps_per_second", (stats.steps - before.steps) / seconds
        numbered = enumerate(zip(stats.workers, before.workers, self._memory(stats)))
        for worker, (now, earlier, memory) in numbered:
            yield from [(f"{name}/worker_{worker}", value) for name, value in _of_interval(now, earlier)]
            if memory is not None:
                yield f"memory_mb/worker_{worker}", memory / 1e6
        episodes, of_agents, of_envs = self._episodes.means()
        yield "episodes", sum(episodes.values())
        for (name, env), value in of_envs.items():
            yield f"{name}/env_{env}", value
        for (name, agent), value in of_agents.items():
            yield f"{name}/{agent}", value

    def _memory(self, stats: Stats) -> list[int | None]:
        workers = self._env.stepper.workers
        return [None] * len(stats.workers) if workers is None else workers.pool.memory()

    # -- Prometheus ----------------------------------------------------------------------------------------------------

    def serve(self, port: int = PORT, address: str = "127.0.0.1") -> int:
        """Serve the metrics over HTTP for Prometheus, in a thread, until `close`; returns the port.

        Args:
            port: The port to listen on; 0 takes any free one.
            address: The address to listen on. The default serves only programs on this machine; `"0.0.0.0"` serves
                everyone who can reach the machine, without a password.

        Raises:
            ModuleNotFoundError: prometheus-client is not installed.
            OSError: The port is in use, or the address is not one of this machine.
            RuntimeError: The metrics are served already.
        """
        if self._server is not None:
            raise RuntimeError(f"the metrics are served already, at port {self._server[0].server_port}")
        if not installed("prometheus_client"):
            raise ModuleNotFoundError(
                f"serve needs prometheus-client: {how_to_install('monitoring')}", name="prometheus_client"
            )
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = start_http_server(port, address, registry)
        except OSError as error:
            raise OSError(
                error.errno, f"the metrics cannot be served at {address}:{port}: {error.strerror or error}"
            ) from error
        served: int = self._server[0].server_port
        return served

    def collect(self) -> Iterable[Any]:
        """The current metrics as metric families of prometheus-client, for `CollectorRegistry.register`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def family(kind: Callable[..., Any], name: str, text: str, labels: list[str]) -> Any:
            families.append(kind(f"marl_parallel_{name}", text, labels=["name", *labels]))
            return lambda values, *more: families[-1].add_metric([self._name, *map(str, values)], *more)

        families: list[Any] = []
        stats = self._env.stats()
        for name, text in _COUNTS.items():
            add = family(CounterMetricFamily, name, text, ["worker"])
            for worker, worker_stats in enumerate(stats.workers):
                add([worker], getattr(worker_stats, name))
        add = family(
            CounterMetricFamily, "restarts", "Environments rebuilt after a fault, or on request.", ["worker", "kind"]
        )
        for worker, worker_stats in enumerate(stats.workers):
            for kind in _KINDS:
                add([worker, kind], worker_stats.restart_kinds[kind])
        add = family(CounterMetricFamily, "seconds", "Seconds of workers, by kind of work.", ["worker", "work"])
        for worker, worker_stats in enumerate(stats.workers):
            for work in ("simulator", "transport", "waiting"):
                add([worker, work], getattr(worker_stats, f"{work}_s"))
        add = family(HistogramMetricFamily, "step_seconds", "Durations of simulators' steps.", ["worker"])
        for worker, worker_stats in enumerate(stats.workers):
            add([worker], _buckets(worker_stats.step_times), None)  # the sum is not known
        add = family(
            GaugeMetricFamily, "memory_bytes", "Memory of a worker and what its simulators started.", ["worker"]
        )
        for worker, memory in enumerate(self._memory(stats)):
            if memory is not None:
                add([worker], memory)
        episodes, of_agents, of_envs = self._episodes.means()
        add = family(CounterMetricFamily, "episodes", "Episodes ended.", ["env"])
        for env_id, count in episodes.items():
            add([env_id], count)
        for label, means in (("env", of_envs), ("agent", of_agents)):
            for measure in ("return", "length"):
                name = f"{'episode' if label == 'env' else label}_{measure}"
                add = family(GaugeMetricFamily, name, f"Mean {measure} of the last episodes.", [label])
                for (kind, labelled), value in means.items():
                    if kind == measure:
                        add([labelled], value)
        return families


_COUNTS = {
    "steps": "Environment steps.",
    "resets": "Episodes begun.",
    "faults": "Exceptions, deaths and timeouts after which environments were restarted.",
    "recycled": "Environments replaced as the RecyclePolicy says.",
}


def _written_by(writer: Any) -> Callable[[dict[str, float], int], None]:
    """How values are passed to a writer."""
    if writer is None:
        return lambda values, step: None
    if callable(getattr(writer, "add_scalar", None)):

        def add_scalars(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return add_scalars
    if callable(getattr(writer, "log", None)):
        return lambda values, step: writer.log(values, step=step)
    raise TypeError(f"writer must have a method add_scalar (TensorBoard) or log (Weights & Biases), got {writer!r}")


def _components(name: str, total: Any) -> Iterator[tuple[str, float]]:
    """A return by name; a vector return has one value for each component, with its index in the name."""
    values = np.asarray(total, np.float64)
    if values.ndim == 0:
        yield name, float(values)
    else:
        for index in np.ndindex(values.shape):
            yield f"{name}[{','.join(map(str, index))}]", float(values[index])


def _of_interval(now: WorkerStats, before: WorkerStats) -> Iterator[tuple[str, float]]:
    """The metrics of a worker between two readings of its statistics."""
    seconds = {work: getattr(now, work) - getattr(before, work) for work in ("simulator_s", "transport_s", "waiting_s")}
    total = sum(seconds.values())
    if total > 0:
        yield "waiting_share", seconds["waiting_s"] / total
    times = now.step_times - before.step_times
    if times.total > 0:
        yield "step_ms_p50", 1e3 * times.quantile(0.5)
        yield "step_ms_p99", 1e3 * times.quantile(0.99)


def _buckets(times: StepTimes) -> list[tuple[str, float]]:
    """The buckets of a Prometheus histogram: two for each octave."""
    bounds, upto, buckets = times.bounds(), 0, []
    for index, count in enumerate(times.counts):
        if index % 2 == 0 and index:
            buckets.append((repr(bounds[index]), float(upto)))
        upto += count
    return [*buckets, ("+Inf", float(upto))]
