"""`Monitor` and the numbers of `stats` that it adds: against plain loops, and what Prometheus reads."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from helpers import ROOT
from helpers.setups import BACKEND_SETUPS, Setup
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from simulators.counting import ACTIONS, AGENTS, Counting
from simulators.crashing import Fate, crashing

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, RestartPolicy, StepTimes, make
from marl_parallel.core.worker_status import duration_index
from marl_parallel.monitoring import Monitor

pytestmark = pytest.mark.release_independent

APART, PACKED = Setup("process", True, 2), Setup("process", True, 1)
RAY = [setup for setup in BACKEND_SETUPS if setup.backend == "ray"]
each_process_setup = pytest.mark.parametrize("setup", [APART, *RAY], ids=str)


class Rewarding(Counting):
    """Episodes of 3 steps, with rewards drawn from a generator that a seed sets once; steps take 2 ms on request."""

    def __init__(self, seed: int, env_id: int = 0, pause: float = 0.0) -> None:
        super().__init__(3, seed=seed)
        self.env_id, self.pause = env_id, pause
        self.rng = np.random.default_rng(env_id)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        time.sleep(self.pause)
        observations, rewards, *flags, infos = super().step(actions)
        return observations, {agent: float(self.rng.normal()) for agent in rewards}, *flags, infos


def play(env: ParallelEnv, steps: int) -> None:
    for _ in range(steps):
        env.step(env.sample_actions())


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples that Prometheus would read, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(samples: dict, name: str, **labels: Any) -> float:
    wanted = frozenset({"name": "env", **{key: str(label) for key, label in labels.items()}}.items())
    return samples[f"marl_parallel_{name}", wanted]


# -- step times and kinds of restarts ----------------------------------------------------------------------------------


@given(st.floats(0.0, 1e6))
def test_place_of_a_duration(seconds):
    bounds = [0.0, *StepTimes.bounds()[1:], math.inf]
    place = duration_index(seconds)
    assert bounds[place] <= seconds < bounds[place + 1]


@given(st.lists(st.floats(1e-6, 200.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantiles(durations, fraction):
    """Within the range of counting, a fourth of an octave: at most 25 % above the shortest duration in it."""
    counts = Counter(map(duration_index, durations))
    times = StepTimes(tuple(counts[place] for place in range(StepTimes.SIZE)))
    assert times.total == len(durations)
    exact = float(np.quantile(durations, fraction, method="inverted_cdf"))
    assert exact / 1.2501 <= times.quantile(fraction) <= exact * 1.2501


def test_quantile_of_no_steps():
    assert math.isnan(StepTimes().quantile(0.5))


def test_step_times(setup, build):
    check_step_times(build, setup)


def test_step_times_in_python(build, monkeypatch):
    monkeypatch.setattr("marl_parallel.core.worker.worker.open_codec", lambda *args, **kwargs: None)
    check_step_times(build, Setup("serial", True, 2))


def check_step_times(build: Callable[..., ParallelEnv], setup: Setup) -> None:
    env = build([lambda seed, env_id: Rewarding(seed, env_id, 2e-3)] * 4, setup, "DISABLED")
    env.reset()
    for _ in range(6):
        env.step([ACTIONS] * 4)
        if env.finished_episodes:
            env.reset()
    times = env.stats().step_times
    assert times.total == env.stats().steps == 24
    assert 2e-3 / 1.25 <= times.quantile(0.01) <= times.quantile(0.5) <= times.quantile(0.99)
    assert times.quantile(0.5) <= env.stats().simulator_s
    assert sum(worker.step_times.total for worker in env.stats().workers) == 24
    assert (times - times).total == 0


@pytest.mark.parametrize("setup", [PACKED, *(Setup("ray", True, 1) for _ in RAY)], ids=str)
def test_kinds_of_restarts(setup, build):
    fates = {
        (0, 0): Fate("raise", "step", 1),
        (1, 0): Fate("os._exit", "step", 2),
        (1, 1): Fate("loop", "step", 2),
    }
    env = build([crashing(Counting, fates)] * 3, setup, on_error="restart", step_timeout=0.5)
    env.reset()
    for _ in range(12):
        env.step([ACTIONS] * 3)
    env.restart([2])
    stats = env.stats()
    assert stats.faults == 3
    assert stats.restart_kinds == {"exception": 1, "death": 1, "timeout": 1, "neighbour": 4, "request": 1}
    assert stats.restarts == sum(stats.restart_kinds.values())


# -- episodes ----------------------------------------------------------------------------------------------------------


def plain_means(steps: int, window: int) -> tuple[dict[str, float], int]:
    """What `log` says of returns and lengths of four `Rewarding`, from a plain loop; and the number of episodes."""
    of: dict[str, list[float]] = defaultdict(list)
    episodes = []
    for env_id in range(4):
        rng = np.random.default_rng(env_id)
        for number in range(steps // 3):
            (long, short), (more, other), last = rng.normal(size=2), rng.normal(size=2), rng.normal()
            episodes.append((number, env_id, long + more + last, short + other))
    for _, env_id, long, short in sorted(episodes):
        of[f"return/env_{env_id}"].append(long + short)
        of[f"length/env_{env_id}"].append(3)
        of["return/long"].append(long)
        of["return/short"].append(short)
        of["length/long"].append(3)
        of["length/short"].append(2)
    return {f"env/{name}": float(np.mean(values[-window:])) for name, values in of.items()}, len(episodes)


@pytest.mark.parametrize("window", [2, 100])
def test_returns_and_lengths(backend_setup, window, build):
    env = build([Rewarding] * 4, backend_setup)
    with Monitor(env, window=window) as monitor:
        env.reset()
        play(env, 16)
        values = monitor.log(64)
    expected, episodes = plain_means(16, window)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert (values["env/episodes"], values["env/steps"], values["env/resets"]) == (episodes, 64, 24)
    play(env, 3)
    assert monitor.log(76)["env/episodes"] == episodes  # it is closed


class Vectors(Rewarding):
    """The second agent's rewards have two components."""

    def __init__(self, seed: int, env_id: int = 0, all_agents: bool = False) -> None:
        super().__init__(seed, env_id)
        self.all_agents = all_agents

    def reward_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (2,) if self.all_agents or agent == AGENTS[1] else ())

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, *rest = Counting.step(self, actions)
        vector = np.array([1.0, 2.0])
        rewards = {agent: vector if self.all_agents or agent == AGENTS[1] else 1.0 for agent in rewards}
        return observations, rewards, *rest


@pytest.mark.parametrize("all_agents", [False, True])
def test_vector_rewards(all_agents, build):
    env = build([lambda seed, env_id: Vectors(seed, env_id, all_agents)] * 2, APART)
    with Monitor(env) as monitor:
        env.reset()
        play(env, 3)
        values = monitor.log(0)
    names = {name.removeprefix("env/return/"): one for name, one in values.items() if "/return/" in name}
    short = {"short[0]": 2.0, "short[1]": 4.0}
    if all_agents:
        envs = {"env_0[0]": 5.0, "env_0[1]": 10.0, "env_1[0]": 5.0, "env_1[1]": 10.0}
        assert names == {"long[0]": 3.0, "long[1]": 6.0, **short, **envs}
    else:  # there is no sum of a number and a vector
        assert names == {"long": 3.0, **short}


def test_facades(build):
    """The monitor takes a facade as well, and listens to what it finishes."""
    env = make(Rewarding, 4, num_workers=2, facade="stacked")
    with env, Monitor(env) as monitor:
        env.reset()
        for _ in range(9):
            env.step(np.zeros((4, 2), np.int64))
        assert monitor.log(0)["env/episodes"] == 12


# -- writers -----------------------------------------------------------------------------------------------------------


class TensorBoard:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


class Wandb:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))


def test_writers(build):
    env, first, second = build([Rewarding] * 2, APART), TensorBoard(), Wandb()
    with Monitor(env, first, name="train") as one, Monitor(env, second) as other:
        env.reset()
        play(env, 4)
        values, others = one.log(8), other.log(np.int64(9))
    assert {tag: number for tag, number, _ in first.scalars} == values
    assert {step for *_, step in first.scalars} == {8}
    assert second.logged == [(others, 9)]
    assert {name.removeprefix("train/") for name in values} == {name.removeprefix("env/") for name in others}
    assert all(type(number) is float for number in values.values())


@each_process_setup
def test_times_are_those_since_the_last_call(setup, build):
    env = build([lambda seed, env_id: Rewarding(seed, env_id, 3e-3)] * 2, setup)
    with Monitor(env) as monitor:
        env.reset()
        monitor.log(0)
        play(env, 5)
        values = monitor.log(1)
        assert 2.4 <= values["env/step_ms_p50/worker_0"] <= values["env/step_ms_p99/worker_0"]
        assert all(0.0 <= values[f"env/waiting_share/worker_{worker}"] <= 1.0 for worker in range(2))
        assert 0 < values["env/steps_per_second"] <= 2 / 3e-3
        assert values["env/memory_mb/worker_0"] > 10
        assert not any("step_ms" in name for name in monitor.log(2))
        assert monitor.log(3)["env/steps_per_second"] == 0


def test_calls_within_a_tick_of_the_clock(build, monkeypatch):
    """No time has passed, so there is no rate."""
    monkeypatch.setattr("marl_parallel.monitoring.time", SimpleNamespace(monotonic=lambda: 1.0))
    env = build([Rewarding] * 2, Setup("serial", True, 1))
    with Monitor(env) as monitor:
        env.reset()
        play(env, 2)
        values = monitor.log(0)
        assert values["env/steps"] == 4
        assert "env/steps_per_second" not in values
        assert "env/steps_per_second" not in monitor.log(1)


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_no_memory_without_processes(backend, build):
    env = build([Rewarding] * 2, Setup(backend, True, 2))
    with Monitor(env) as monitor:
        env.reset()
        assert not any("memory" in name for name in monitor.log(0))


# -- Prometheus --------------------------------------------------------------------------------------------------------


@each_process_setup
def test_endpoint(setup, build):
    env = build([crashing(Rewarding, {(3, 0): Fate("raise", "step", 2)})] * 4, setup, on_error="restart")
    with Monitor(env) as monitor:
        port = monitor.serve(port=0)
        env.reset()
        play(env, 16)
        samples, stats, values = scraped(port), env.stats(), monitor.log(0)
        for worker, own in enumerate(stats.workers):
            for name in ("steps", "resets", "faults", "recycled"):
                assert value(samples, f"{name}_total", worker=worker) == getattr(own, name)
            for work in ("simulator", "transport", "waiting"):
                assert 0 <= value(samples, "seconds_total", worker=worker, work=work) <= getattr(own, f"{work}_s")
            assert value(samples, "step_seconds_bucket", worker=worker, le="+Inf") == own.steps
            assert value(samples, "memory_bytes", worker=worker) > 1e7
        assert value(samples, "restarts_total", worker=1, kind="exception") == 1
        assert sum(number for (name, _), number in samples.items() if name.endswith("restarts_total")) == 1
        for env_id in range(4):
            assert value(samples, "episode_return", env=env_id) == pytest.approx(values[f"env/return/env_{env_id}"])
            assert value(samples, "episode_length", env=env_id) == values[f"env/length/env_{env_id}"]
        for agent in AGENTS:
            assert value(samples, "agent_return", agent=agent) == pytest.approx(values[f"env/return/{agent}"])
            assert value(samples, "agent_length", agent=agent) == values[f"env/length/{agent}"]
        total = sum(number for (name, _), number in samples.items() if name == "marl_parallel_episodes_total")
        assert total == values["env/episodes"]


def test_buckets_are_those_of_the_step_times(build):
    env = build([lambda seed, env_id: Rewarding(seed, env_id, 2e-3)] * 2, PACKED)
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        env.reset()
        play(env, 10)
        buckets = {
            float(dict(labels)["le"]): number
            for (name, labels), number in scraped(port).items()
            if name == "marl_parallel_step_seconds_bucket"
        }
    times = env.stats().step_times
    for bound, number in buckets.items():
        upto = [count for start, count in zip(times.bounds(), times.counts) if start < bound]
        assert number == sum(upto)


def test_only_this_machine_is_answered(build):
    env = build([Rewarding], PACKED)
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))  # so the endpoint is not bound to all addresses
        with socket.socket() as same, pytest.raises(OSError, match="in use"):
            same.bind(("127.0.0.1", port))


def test_endpoint_ends(build):
    env = build([Rewarding], PACKED)
    before = threading.active_count()
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        with pytest.raises(RuntimeError, match=f"served already, at port {port}"):
            monitor.serve(0)
        with Monitor(env) as other, pytest.raises(OSError, match=f"cannot be served at 127.0.0.1:{port}"):
            other.serve(port)
    monitor.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert threading.active_count() == before
    assert env.stepper.transitions.statistics.listeners == []
    with Monitor(env) as again:
        assert again.serve(port) == port


def test_metrics_after_the_environments_have_closed(build):
    env = build([Rewarding] * 2, APART)
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        env.reset()
        play(env, 3)
        env.close()
        samples = scraped(port)
        assert value(samples, "steps_total", worker=0) == 3
        assert not any(name == "marl_parallel_memory_bytes" for name, _ in samples)
        assert monitor.log(0)["env/steps"] == 6


@each_process_setup
def test_metrics_while_a_step_hangs(setup, build):
    """The thread of the endpoint waits for no worker."""
    env = build([crashing(Rewarding, {(1, 0): Fate("loop", "step", 1)})] * 2, setup, step_timeout=30.0)
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        env.reset()
        env.step([ACTIONS] * 2)
        env.send([ACTIONS] * 2)

        def wait() -> None:
            with contextlib.suppress(ClosedEnvironmentError):
                env.recv(2)

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            while value(scraped(port), "steps_total", worker=0) < 2:
                assert waiting.is_alive()
            assert value(scraped(port), "steps_total", worker=1) == 1
        finally:
            env.close(terminate=True)
            waiting.join()


@pytest.mark.rest
@each_process_setup
def test_counts_never_decrease(setup, build):
    """While workers die and are recycled, another thread reads."""
    fates = {(i, n): Fate("os._exit", "step", 5 + 3 * i + n) for i in range(4) for n in range(2)}
    env = build(
        [crashing(Rewarding, fates)] * 4, setup, on_error="restart",
        restart_policy=RestartPolicy(rate_limit=None), recycle=RecyclePolicy(max_episodes=3),
    )  # fmt: skip
    readings: list[dict[Any, float]] = []
    errors: list[BaseException] = []
    with Monitor(env) as monitor:
        over = threading.Event()

        def read() -> None:
            try:
                while not over.is_set():
                    families: Iterator[Any] = iter(monitor.collect())
                    readings.append({
                        (sample.name, *sample.labels.values()): sample.value
                        for family in families if family.type == "counter" for sample in family.samples
                    })  # fmt: skip
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        env.reset()
        play(env, 50 if setup.backend == "ray" else 120)  # an actor needs a second to start
        over.set()
        reader.join()
    assert not errors
    assert env.stats().recycled > 10
    assert env.stats().restart_kinds["death"] >= 2
    assert len(readings) > 20
    for earlier, later in itertools.pairwise(readings):
        assert not {key: (number, later[key]) for key, number in earlier.items() if later[key] < number}


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"env": "Pong"}, TypeError, "must be a ParallelEnv or a facade"),
        ({"writer": 3}, TypeError, "must have a method add_scalar"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"name": ""}, ValueError, "name is empty"),
        ({"window": 0}, ValueError, "at least 1, got 0"),
        ({"window": 1.5}, TypeError, "number of episodes"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong, error, text, build):
    env = build([Rewarding], PACKED)
    with pytest.raises(error, match=text):
        Monitor(**{"env": env, **wrong})
    assert env.stepper.transitions.statistics.listeners == []


@pytest.mark.parametrize("step", [1.5, None, True, "3"])
def test_wrong_step(step, build):
    with Monitor(build([Rewarding], PACKED)) as monitor, pytest.raises(TypeError, match="step must be an integer"):
        monitor.log(step)


def test_without_prometheus(build, monkeypatch):
    monkeypatch.setattr("marl_parallel.monitoring.installed", lambda library: False)
    with Monitor(build([Rewarding], PACKED)) as monitor:
        with pytest.raises(ModuleNotFoundError, match=r'pip install "marl-parallel\[monitoring\]", or in'):
            monitor.serve(0)
        assert monitor.log(0)["env/steps"] == 0


def test_errors_of_environments_are_raised_as_before(build):
    env = build([crashing(Counting, {(0, 0): Fate("raise", "step", 1)})], PACKED)
    with Monitor(env):
        env.reset()
        env.step([ACTIONS])
        with pytest.raises(EnvError):
            env.step([ACTIONS])


# -- the documentation -------------------------------------------------------------------------------------------------


def test_dashboard_and_table_name_all_metrics(build):
    env = build([Rewarding] * 2, APART)
    with Monitor(env) as monitor:
        port = monitor.serve(0)
        env.reset()
        play(env, 4)
        served = {name for name, _ in scraped(port)}
        logged = {name.removeprefix("env/") for name in monitor.log(0)}
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert {*re.findall(r"marl_parallel_\w+", queries)} == served
    page = (ROOT / "docs" / "monitoring.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    first = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert {name.replace("agent_0", "long") for name in first} == {
        name for name in logged if not name.endswith(("env_1", "worker_1", "/short"))
    }
    second = {name for line in table.splitlines() for name in re.findall(r"`(\w+){", line.split("|")[2])}
    assert {f"marl_parallel_{name}" for name in second} == served


def test_monitored_run():
    command = [sys.executable, "examples/monitored_run.py", "--seconds", "4", "--port", "0", "--fault-every", "400"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("http://127.0.0.1:")
    assert re.search(r"^all +[\d,]+", done.stdout, re.MULTILINE)
    assert "it is restarted" in done.stderr or "restarted: environments" in done.stderr


def test_drawn_dashboard(tmp_path):
    """Each panel asks a server; this one has two points for every query."""
    queries = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)["query"][0]
            queries.append(query)
            labels = {"worker": "0", "kind": "death", "agent": "a", "env": "1"}
            series = {"metric": labels, "values": [[1.0, "2.5"], [2.0, "NaN"]]}
            body = json.dumps({"data": {"result": [series]}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        picture, address = tmp_path / "picture.png", f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "examples/draw_dashboard.py", "--server", address, "--output", str(picture)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    panels = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
    assert len(queries) == sum(len(panel["targets"]) for panel in panels)
    assert not any("$" in query for query in queries)
