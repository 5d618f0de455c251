"""A long run with every kind of fault, and with a simulator that leaks 1 MB in each episode.

    python benchmarks/soak.py --hours 0.5           writes results/soak.json
    python benchmarks/soak.py --hours 0.01 --output /tmp
    python benchmarks/soak.py --markdown            the table for docs/faults.md, from the saved JSON

Two batches are stepped in turns, by `send` and `recv` or by `step`: one has the faults, the leak, restarts and
recycling, the other has none of these. Each observation tells the seed, the episode, the step and a checksum of all
actions. They are compared with those of a model here, which knows seeds, actions and the marks in infos only: each
difference is a mismatch. A call that takes longer than all timeouts together is a hang. After each turn, a method of
each environment is called, its state is read and it is rendered, where some fail, too; and now and then a keeper or the
fork server is killed.

At the end, programs that step or hang are interrupted and killed: a process that they leave is counted.

The memory is that of this process and all its descendants (PSS): its mean in the last quarter of the run, divided by
that in the second quarter. The throughput is compared with that of the faultless batch, for both without the time in
which environments were out of service, since a fault, a constructor or another program was waited for: whatever a step
takes longer than four times its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from frame import RESULTS, AsMarkdown, Output, Results, markdown
from gymnasium import spaces

from marl_parallel import EnvError, ParallelEnv, ParallelEnvError, RecyclePolicy, RestartPolicy
from marl_parallel.cli.report import in_one_line, machine

NUM_ENVS, WORKERS = 8, 2
EPISODE_STEPS, STEP_S, CONSTRUCTOR_S = 100, 500e-6, 0.1
FAULTS_PER_EPISODE = 0.03
LEAK_BYTES = 1_000_000
STEP_TIMEOUT_S, START_TIMEOUT_S = 1.0, 3.0
HANGS_AFTER_S = 60.0
TURN_S, REST_S = 20.0, 4.0
GONE_WITHIN_S = 10.0
SAMPLE_EVERY_S = 2.0
AGENTS = ["a", "b"]


def never_returns() -> None:
    while True:
        time.sleep(0.01)


def loops() -> None:
    while True:
        pass


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def raises() -> None:
    raise RuntimeError("the simulator has failed")


def raises_unpicklable() -> None:
    error = RuntimeError("it holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def crashes() -> None:
    ctypes.string_at(0)


def exits() -> None:
    raise SystemExit(3)


ANYWHERE: dict[str, Callable[[], None]] = {
    "exception": raises,
    "exception that does not pickle": raises_unpicklable,
    "sys.exit": exits,
    "os._exit": functools.partial(os._exit, 7),
    "SIGKILL": functools.partial(send, signal.SIGKILL),
    "SIGSEGV": crashes,
    "SIGSTOP": functools.partial(send, signal.SIGSTOP),
    "endless loop": loops,
}
IN_CONSTRUCTOR = {
    "exception in the constructor": raises,
    "sys.exit in the constructor": exits,
    "os._exit in the constructor": functools.partial(os._exit, 7),
    "SIGKILL in the constructor": functools.partial(send, signal.SIGKILL),
    "constructor that never returns": never_returns,
}
VALUES = ("info that does not pickle", "observation that does not pickle", "observation of a wrong shape")
IN_RESET = tuple(f"{name} in reset" for name in ANYWHERE)
PROBED = ("call", "state", "render")
IN_PROBES = tuple(f"{name} in {method}" for name in ANYWHERE for method in PROBED)
KINDS = (tuple(ANYWHERE), IN_RESET, IN_PROBES, tuple(IN_CONSTRUCTOR), VALUES)
CLOSES = [lambda: None, raises, never_returns]


class Leaking:
    """Two agents; it leaks in each episode, and fails once in its life, or not at all.

    Args:
        faulty: Whether it leaks and fails.
    """

    possible_agents = AGENTS
    render_mode = "rgb_array"
    state_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)

    def __init__(self, faulty: bool, *, seed: int, restarts: int) -> None:
        self.observation_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Box(-np.inf, np.inf, (4,), np.float64)))
        self.action_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(5)))
        random = np.random.default_rng(seed)
        self.seed, self.episode, self.time, self.checksum = seed, 0, 0, 0
        self.leaked: list[np.ndarray] = []
        self.faulty, self.fault, self.place = faulty, "", (0, 0)
        if faulty:
            self.fault = str(random.choice(KINDS[random.integers(len(KINDS))]))
            self.place = int(random.geometric(FAULTS_PER_EPISODE)), int(random.integers(1, EPISODE_STEPS))
            self.close = CLOSES[random.choice(len(CLOSES), p=[0.9, 0.05, 0.05])]
        time.sleep(CONSTRUCTOR_S)
        if restarts and self.fault in IN_CONSTRUCTOR and random.random() < FAULTS_PER_EPISODE * 10:
            IN_CONSTRUCTOR[self.fault]()

    def _observed(self) -> dict[str, Any]:
        return {agent: np.array([self.seed, self.episode, self.time, self.checksum], np.float64) for agent in AGENTS}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.episode, self.time = self.episode + 1, 0
        if self.faulty:
            self.leaked.append(np.ones(LEAK_BYTES // 8))
        if self.fault in IN_RESET and self.place[0] == self.episode:
            ANYWHERE[self.fault.removesuffix(" in reset")]()
        return self._observed(), {}

    def probe(self) -> int:
        """Called after each turn, as `state` and `render` are."""
        self._fail_in("call")
        return self.seed

    def state(self) -> np.ndarray:
        self._fail_in("state")
        return self._observed()["a"]  # type: ignore[no-any-return]

    def render(self) -> np.ndarray:
        self._fail_in("render")
        return np.full((2, 2, 3), self.seed % 256, np.uint8)

    def _fail_in(self, method: str) -> None:
        if self.fault in IN_PROBES and self.fault.endswith(f" in {method}"):
            ANYWHERE[self.fault.removesuffix(f" in {method}")]()

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            pass
        self.time += 1
        self.checksum = checksum(self.checksum, [int(actions[agent]) for agent in AGENTS])
        over = self.time == EPISODE_STEPS
        observations, infos = self._observed(), {}
        if self.place == (self.episode, self.time):
            if self.fault in ANYWHERE:
                ANYWHERE[self.fault]()
            elif self.fault == VALUES[0]:
                infos = {"a": {"lock": threading.Lock()}}
            elif self.fault == VALUES[1]:
                observations["a"] = threading.Lock()
            elif self.fault == VALUES[2]:
                observations["a"] = np.zeros(3)
        flags = {**dict.fromkeys(AGENTS, False), "__all__": over}
        return observations, dict.fromkeys(AGENTS, 1.0), flags, {"__all__": False}, infos


def checksum(before: int, actions: list[int]) -> int:
    return (before * 31 + 5 * actions[0] + actions[1] + 1) % 1_000_003


class Model:
    """What the observations of one environment must be."""

    def __init__(self, env_id: int) -> None:
        self.random = np.random.default_rng(env_id)
        self.env_id, self.rebuilds = env_id, 0
        self.renew(42 + env_id)
        self.sent = 0.0

    def renew(self, seed: int) -> None:
        self.seed, self.episode, self.time, self.checksum = seed, 1, 0, 0

    def act(self) -> dict[str, int]:
        actions = self.random.integers(0, 5, 2).tolist()
        self.next_checksum = checksum(self.checksum, actions)
        self.sent = time.perf_counter()
        return dict(zip(AGENTS, actions))

    def received(self, observations: dict[str, Any], infos: dict[str, Any]) -> bool:
        """Go on; returns whether the observations are as expected."""
        mark = infos.get("__common__", {})
        if "restarted" in mark or "recycled" in mark:
            seed = int(observations["a"][0])
            known = self.next_seeds()
            if seed not in known:
                return False
            self.rebuilds += known.index(seed) + 1  # one that fails in its constructor or first reset is never seen
            self.renew(seed)
        else:
            self.time, self.checksum = self.time + 1, self.next_checksum
            if self.time == EPISODE_STEPS:
                self.episode, self.time = self.episode + 1, 0
        expected = np.array([self.seed, self.episode, self.time, self.checksum], np.float64)
        return all(np.array_equal(observations.get(agent), expected) for agent in AGENTS)

    def next_seeds(self) -> list[int]:
        """The seeds after one more rebuild, after two, and so on."""
        counts = range(self.rebuilds + 1, self.rebuilds + 20)
        return [int(np.random.SeedSequence((42, self.env_id, n)).generate_state(1)[0] >> 1) for n in counts]


class Run:
    """A batch that is stepped in turns."""

    def __init__(self, faulty: bool, max_memory_mb: float) -> None:
        more: dict[str, Any] = {"seed": 42}
        if faulty:
            more |= {
                "on_error": "restart",
                "restart_policy": RestartPolicy(rate_limit=None),
                "recycle": RecyclePolicy(max_memory_mb=max_memory_mb),
                "step_timeout": STEP_TIMEOUT_S,
                "reset_timeout": STEP_TIMEOUT_S,
                "start_timeout": START_TIMEOUT_S,
            }
        make = functools.partial(Leaking, faulty)
        self.env = ParallelEnv([make] * NUM_ENVS, num_workers=WORKERS, **more)
        self.models = [Model(env_id) for env_id in range(NUM_ENVS)]
        self.steps = self.mismatches = self.hangs = 0
        self.seconds = self.out_of_service = 0.0
        self.marks: Counter[str] = Counter()
        self.usual = STEP_S * NUM_ENVS / WORKERS
        self.env.reset(seed=42)

    @property
    def in_service(self) -> float:
        """Seconds of stepping, without those in which environments were out of service."""
        return self.seconds - self.out_of_service / NUM_ENVS

    def turn(self, seconds: float, *, together: bool) -> None:
        """Step for so long, all environments at once or each by itself; nothing is in flight before and after."""
        env, models, began = self.env, self.models, time.perf_counter()
        while together and time.perf_counter() - began < seconds:
            entered = time.perf_counter()
            observations, *_, infos = env.step([model.act() for model in models])
            self._check(range(NUM_ENVS), observations, infos, entered)
        if not together:
            env.send([model.act() for model in models])
        while env.pending:
            entered = time.perf_counter()
            batch = env.recv(min_envs=1)
            self._check(batch.env_ids, batch.observations, batch.infos, entered)
            if time.perf_counter() - began < seconds:
                env.send([models[env_id].act() for env_id in batch.env_ids], batch.env_ids)
        self.seconds += time.perf_counter() - began

    def _check(self, env_ids: Sequence[int], observations: Any, infos: Any, entered: float) -> None:
        """Compare results with those of the models; the call that has returned them was entered then."""
        now = time.perf_counter()
        self.hangs += now - entered > HANGS_AFTER_S
        for env_id, observed, info in zip(env_ids, observations, infos):
            model = self.models[env_id]
            self.mismatches += not model.received(observed, info)
            self.steps += 1
            mark = info.get("__common__", {})
            for kind in ("restarted", "recycled"):
                self.marks[kind] += kind in mark
            # Neighbours in its worker wait as well, and with `step` all do.
            self.out_of_service += max(now - model.sent - 4 * self.usual, 0.0)

    def probe(self) -> None:
        """Call a method of each environment, read its state, render it; after a fault, the next result is marked."""
        env = self.env
        for env_id, model in enumerate(self.models):
            with contextlib.suppress(ParallelEnvError):
                (seed,) = env.call("probe", env_ids=[env_id])
                self.mismatches += seed not in (model.seed, *model.next_seeds())
            with contextlib.suppress(ParallelEnvError):
                seed = int(env.state(env_ids=[env_id])[0][0])
                self.mismatches += seed not in (model.seed, *model.next_seeds())
            with contextlib.suppress(ParallelEnvError):
                (frame,) = env.render(env_ids=[env_id])
                self.mismatches += frame[0, 0, 0] not in [seed % 256 for seed in (model.seed, *model.next_seeds())]

    def kill(self, turn: int) -> None:
        """Kill the keeper of the first worker after each eighth turn, and the fork server four turns later."""
        if turn % 4:
            return
        with contextlib.suppress(ParallelEnvError, psutil.NoSuchProcess):
            (pid,) = self.env.call(process_id, env_ids=[0])
            for process in psutil.Process(pid).parents():
                if ("keeper" if turn % 8 == 0 else "fork server") in " ".join(process.cmdline()):
                    process.kill()
                    break


def process_id(_: Any) -> int:
    return os.getpid()


def memory_of_tree() -> float:
    """PSS of this process and its descendants, in MB."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in programs in the background
from marl_parallel import ParallelEnv
from gymnasium import spaces

class Stepping:
    possible_agents = ["a"]
    observation_space = action_space = spaces.Dict({"a": spaces.Discrete(2)})
    def reset(self, seed=None, options=None):
        return {"a": 0}, {}
    def step(self, actions):
        while sys.argv[1] == "hangs":
            time.sleep(0.01)
        return {"a": 0}, {"a": 0.0}, {"__all__": False}, {"__all__": False}, {}

env = ParallelEnv([Stepping] * 4, num_workers=2)
env.reset()
print("reset", flush=True)
while True:
    env.step([{"a": 0}] * 4)
"""


def processes_left_by(state: str, number: int) -> int:
    """How many processes a program leaves that steps or hangs and gets this signal."""
    command = [sys.executable, "-c", PROGRAM, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None
        program.stdout.readline()
        time.sleep(0.1)
        below = psutil.Process(program.pid).children(recursive=True)
        assert len(below) >= WORKERS
        program.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is counted
            program.wait(GONE_WITHIN_S)
        remaining = len(psutil.wait_procs(below, GONE_WITHIN_S)[1]) + (program.poll() is None)
        program.kill()
    return remaining


def table(result: dict[str, Any]) -> Results:
    """What the run found."""
    quarters = result["memory in MB, by quarter"]
    rows = {
        "steps": f"{result['steps']:,}",
        "faults": f"{result['faults']:,}",
        "environments constructed again after faults": f"{result['restarts']:,}",
        "environments replaced because of the leak": f"{result['recycled']:,}",
        "results that differ from the model": str(result["mismatches"]),
        "calls that hang": str(result["hangs"]),
        "processes left": str(result["processes left"]),
        "memory of all processes, in the second and the last quarter": f"{quarters[1]:.0f} MB, {quarters[3]:.0f} MB",
        "speed, as a share of that without faults": f"{result['share of the faultless throughput, in service']:.0%}",
    }
    note = (
        f"{NUM_ENVS} environments in {WORKERS} workers, for {60 * result['hours']:.0f} minutes. Environments without "
        "faults took turns with them; the time in which environments were constructed again does not count."
    )
    return Results(result["machine"], ("", "found"), [*map(list, rows.items())], note)


def main(
    hours: Annotated[float, typer.Option(min=0.001, help="How long to run.")] = 0.5,
    memory_mb: Annotated[
        float, typer.Option(min=1, help="Memory of a worker after which its environments are replaced.")
    ] = 100,
    programs: Annotated[int, typer.Option(min=1, help="How many programs are ended in each way.")] = 5,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Run, print the figures, and write them to soak.json."""
    folder = output or RESULTS
    if as_markdown:
        print(markdown(table(json.loads((folder / "soak.json").read_text())).page))
        return
    logging.getLogger("marl_parallel").setLevel(logging.ERROR)  # no report for each restart
    resource_tracker.ensure_running()  # the first worker starts it, and it stays until this program ends
    before = len(psutil.Process().children(recursive=True))
    soak, faultless = Run(True, memory_mb), Run(False, memory_mb)
    memory: list[tuple[float, float]] = []
    began = time.perf_counter()
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(SAMPLE_EVERY_S):
            memory.append((time.perf_counter() - began, memory_of_tree()))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    with faultless.env, contextlib.suppress(EnvError), soak.env:  # some environments raise in their `close`
        turn = 0
        while (elapsed := time.perf_counter() - began) < 3600 * hours:
            for run, seconds in ((faultless, REST_S), (soak, TURN_S)):
                run.turn(min(seconds, 3600 * hours / 4), together=turn % 2 == 1)
            soak.probe()
            soak.kill(turn)
            turn += 1
            print(
                f"{elapsed / 60:6.1f} min: {soak.steps:,} steps, {soak.marks['restarted']} restarted, "
                f"{soak.marks['recycled']} recycled, {soak.mismatches} mismatches, {soak.hangs} hangs, "
                f"{memory[-1][1] if memory else 0:.0f} MB",
                flush=True,
            )
        stats = soak.env.stats()
        elapsed = time.perf_counter() - began
        stopped.set()
        sampler.join()
    leaked = len(psutil.Process().children(recursive=True)) - before
    for state in ("steps", "hangs"):
        for number in (signal.SIGINT, signal.SIGKILL):
            leaked += sum(processes_left_by(state, number) for _ in range(programs))
    quarters = [[mb for at, mb in memory if low <= 4 * at / elapsed < low + 1] for low in range(4)]
    means = [statistics.mean(quarter) if quarter else 0.0 for quarter in quarters]
    rate = faultless.steps / faultless.in_service
    result = {
        "machine": machine(),
        "hours": elapsed / 3600,
        "steps": soak.steps,
        "mismatches": soak.mismatches,
        "hangs": soak.hangs,
        "faults": stats.faults,
        "restarts": stats.restarts,
        "recycled": stats.recycled,
        "processes left": leaked,
        "memory in MB, by quarter": [round(mean, 1) for mean in means],
        "memory, last quarter / second": round(means[3] / means[1], 4) if means[1] else None,
        "faultless, steps per second": round(rate, 1),
        "steps per second": round(soak.steps / soak.seconds, 1),
        "steps per second in service": round(soak.steps / soak.in_service, 1),
        "share of the faultless throughput, in service": round(soak.steps / soak.in_service / rate, 4),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result.items():
        print(f"{name}: {in_one_line(value) if name == 'machine' else value}")
    if soak.mismatches or soak.hangs or leaked:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
