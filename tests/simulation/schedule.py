"""One history: the caller's calls, drawn from its number, and the checks of what they return.

Each call has draws of its own, so that the others stay what they are when it is left out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from marl_parallel import (
    EnvError,
    ParallelEnv,
    ParallelEnvError,
    RecyclePolicy,
    RestartLimitExceeded,
    RestartPolicy,
    WorkerCrashed,
    WorkerTimeout,
)
from marl_parallel.core.backend import share_out
from marl_parallel.core.block import codec
from marl_parallel.core.objects.pickling import loads
from marl_parallel.core.pool.replay_file import Crash, read_crash
from marl_parallel.types import RestartEvent
from marl_parallel.vector import Arrays, ArrayStepper
from simulation.backend import REFUSED, Fault, Rates, SimulatedBackend
from simulation.draws import draw
from simulation.model import COMMON, Model, SavedEnv, Wrong, fits
from simulation.seeds import Seeds
from simulation.simulator import AGENTS, KINDS, POINTS, THAT_SAVE_THEMSELVES, Life

MOST_CALLS = 30
_SEED = 7
_KEPT = 5  # steps of an episode, for replays
_STEP_FAILS = re.compile(r"environment \d+ \(worker \d+\) raised in step")
_REPLAY = re.compile(r"marl-parallel replay (\S+)")
_TRACE = "trace.json"
_NO_LIMITS = RestartPolicy(max_restarts=None, rate_limit=None)
_HANG_IN = {  # by timeouts, where they end what hangs
    (1.0, 1.0): (),
    (1.0, None): ("constructor", "step", "step-end", "call", "save", "load"),
    (None, 1.0): ("constructor", "reset", "reset-end", "load"),
}
_MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")


class Setup(NamedTuple):
    """What a history is made of, besides its calls."""

    num_envs: int
    num_workers: int
    mode: str
    on_error: str
    rates: Rates
    recycle: RecyclePolicy | None
    standbys: bool
    warn_after: float | None
    arrays: bool  # whether it is stepped by a facade
    callback: bool  # whether `on_restart` is passed
    replay: bool  # whether failures can be replayed
    policy: RestartPolicy
    begins_troubled: bool  # whether faults occur while all environments are constructed
    traced: bool
    kind: str  # of environments
    shares_memory: bool
    copies: bool  # whether observations are copies, no views
    timeouts: tuple[float | None, float | None]  # of steps and resets
    hybrid: bool  # whether worker 0 is the caller's own thread
    saves_itself: bool  # whether environments cannot be pickled, and save themselves
    differ: bool  # whether environments have different agents


class Call(NamedTuple):
    """One call of the caller, with the seed of its own draws."""

    name: str
    seed: int


@dataclass(eq=False)
class Result:
    """What has become of a history."""

    number: int
    setup: Setup
    calls: list[Call]
    error: str = ""  # why it fails; empty if it does not
    log: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    cause: Exception | None = None


def setup_of(number: int) -> Setup:
    rng = random.Random(number)
    num_envs = rng.choice([1, 2, 3, 4, 6])
    recycle = None
    on_error = "restart" if rng.random() < 0.9 else "raise"
    if on_error == "restart" and rng.random() < 0.4:
        limits = {
            "max_episodes": rng.choice([1, 2, 3, None]),
            "max_age_s": rng.choice([None, 0.5]),
            "max_memory_mb": rng.choice([None, 110]),
            "kill_above_mb": rng.choice([None, 115]),
        }
        recycle = RecyclePolicy(**limits) if any(limits.values()) else None
    policy = _policy_of(rng) if recycle is None else _NO_LIMITS
    timeouts = rng.choice([(1.0, 1.0)] * 6 + [(1.0, None), (None, 1.0)])
    arrays = rng.random() < 0.15
    kinds = ["pettingzoo", "pettingzoo", "pettingzoo", "turns", "pettingzoo" if arrays else "dict"]
    return Setup(
        num_envs,
        rng.randint(1, num_envs),
        rng.choice(_MODES),
        on_error,
        Rates(
            fails=rng.choice([0.0, 0.01, 0.03]),
            dies=rng.choice([0.0, 0.01, 0.03]),
            hangs=rng.choice([0.0, 0.0, 0.03]),
            late_values=rng.choice([0.0, 0.5]),
            infos=rng.choice([0.0, 0.5]),
            unreadable=rng.choice([0.0, 0.0, 0.01, 0.1]),
            differs=rng.choice([0.0, 0.0, 0.0, 0.03]),
            stopped=rng.choice([0.0, 0.8]) if recycle is None else 0.0,  # the model knows no late result of a move
            often_at=rng.choice(["", "", "", *POINTS]),
            slow=rng.choice([0.0, 0.0, 0.0, 0.1]),
            hang_in=_HANG_IN[timeouts],
            idle=0.2 if draw(number, 30) < 0.4 else 0.0,
            delayed=(0.4, 0.1, 0.1, 0.0, 0.0, 0.0)[int(6 * draw(number, 31))],
            finishes=0.1 if recycle is None and on_error == "restart" and draw(number, 32) < 0.5 else 0.0,
        ),
        recycle,
        rng.random() < 0.8 or recycle is not None,
        rng.choice([None, 2.0]),
        arrays,
        on_error == "restart" and rng.random() < 0.3,
        on_error == "restart" and rng.random() < 0.2,
        policy,
        rng.random() < 0.06,
        rng.random() < 0.03,
        rng.choice(kinds),
        rng.random() < 0.9,
        rng.random() < 0.8,
        timeouts,
        rng.random() < 0.2,
        rng.random() < 0.3,
        draw(number, 33) < 0.15,
    )


def _policy_of(rng: random.Random) -> RestartPolicy:
    if rng.random() < 0.08:
        return replace(_NO_LIMITS, max_restarts=rng.randint(0, 3))
    if rng.random() < 0.1:
        return replace(_NO_LIMITS, rate_limit=rng.randint(0, 3), rate_period_s=rng.choice([0.02, 0.1, 0.5]))
    return replace(_NO_LIMITS, exceptions=(KeyError,)) if rng.random() < 0.05 else _NO_LIMITS


def calls_of(number: int) -> list[Call]:
    rng = random.Random(-number - 1)
    names, weights = zip(*_CALLS.items(), strict=True)
    chosen = rng.choices(names, [weight for weight, _ in weights], k=MOST_CALLS)
    if rng.random() < 0.2:
        chosen += ["close_inside", rng.choice(names)]
    return [Call(name, rng.randrange(1 << 30)) for name in chosen]


class History:
    """A `ParallelEnv` on the simulated backend, and its model."""

    env: ParallelEnv

    def __init__(self, number: int, left_out: frozenset[Fault], folder: Path) -> None:
        self.setup = setup = setup_of(number)
        self.backend = SimulatedBackend(
            number, setup.rates, standbys=setup.standbys, hybrid=setup.hybrid, differ=setup.differ, left_out=left_out
        )
        most = None if setup.recycle is None else setup.recycle.max_episodes
        shares = share_out(setup.num_envs, setup.num_workers, last_have_more=setup.hybrid)
        self.model = self.backend.model = Model(
            shares,
            setup.mode,
            policy=setup.policy if setup.on_error == "restart" else None,
            most_episodes=most,
            only_episodes=most is not None and setup.recycle == RecyclePolicy(max_episodes=most),
            recycles=setup.recycle is not None,
            seeds=Seeds(setup.num_envs, _SEED, derives=setup.replay),
            clock=self.backend.clock,
            steps_on=setup.kind == "dict",
            in_block=setup.shares_memory and codec.Codec is not None,
        )
        self.actions = 0
        self.ids = range(setup.num_envs)
        self.number, self.events = number, 0
        self.closes = False  # whether `close` has been called in the middle of a call
        self.wrong: list[str] = []  # what callbacks have noticed
        self.call = ""  # that is carried out
        self.views: dict[int, tuple[Any, Any, Any]] = {}  # by environment, its latest observations, and copies
        self.folder = folder
        self.saved: list[tuple[int, bytes, SavedEnv]] = []  # the latest states, with their environments

    def open(self) -> None:
        """Construct all environments."""
        setup = self.setup
        self.backend.troubled = setup.begins_troubled
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", 'with backend="hybrid", this thread steps', RuntimeWarning)
            self.env = ParallelEnv(
                [(THAT_SAVE_THEMSELVES if setup.saves_itself else KINDS)[setup.kind]] * setup.num_envs,
                setup.mode,
                _SEED,
                num_workers=setup.num_workers,
                backend=self.backend,
                on_error=setup.on_error,
                restart_policy=setup.policy,
                step_timeout=setup.timeouts[0],
                reset_timeout=setup.timeouts[1],
                start_timeout=5.0,
                warn_after=setup.warn_after,
                recycle=setup.recycle,
                forward_logs=False,
                shared_memory=setup.shares_memory,
                copy=setup.copies,
                on_restart=self._on_restart if setup.callback else None,
                replay=_KEPT if setup.replay else None,
                replay_dir=self.folder if setup.replay else None,
                trace=self.folder / _TRACE if setup.traced else None,
            )
        self.stepper = ArrayStepper(self.env, self) if setup.arrays else None
        assert self.env.stepper.workers is not None
        self.backend.check = self.env.stepper.workers.pool.check

    def run(self, calls: Sequence[Call]) -> None:
        """Carry out calls and check what they return; raises `AssertionError` if something is wrong."""
        self.backend.troubled = True
        self._reset(self.ids)
        for call in calls:
            self.call = call.name
            _CALLS[call.name][1](self, random.Random(call.seed))
            if self.env.pending != tuple(self.model.in_flight):
                raise Wrong(f"pending is {self.env.pending} in place of {self.model.in_flight}")
            self.backend.check()
            self._check_acting()
            self._check_noticed()
        while self.model.in_flight:
            self._recv(1, None)
            self._check_noticed()
        self._check_stats()

    def note(self, text: str) -> None:
        self.backend.note(f"caller: {text}")

    def _received(self, env_ids: Sequence[int], batch: Any) -> None:
        """Check results, and the episodes that they have ended."""
        self.model.received(env_ids, batch)
        for env_id, infos in zip(env_ids, batch[4] or ()):
            report = str(infos.get(COMMON, {}).get("error", ""))
            if path := _REPLAY.search(report):
                self._check_replay(read_crash(Path(path[1])))
            elif self.setup.replay and _STEP_FAILS.match(report) and report.startswith(f"environment {env_id} "):
                failed = [life for life in self.backend.lives if life.env_id == env_id and life.raised][-1]
                if failed.loaded is not None and failed.loaded[0] == failed.episodes and failed.loaded[1] > 0:
                    continue  # the first steps of a loaded episode are not known
                raise Wrong(f"environment {env_id}: its failure has no replay")
        finished = sorted(map(tuple, self.env.finished_episodes))
        if finished != sorted(self.model.finished):
            raise Wrong(f"finished_episodes is {finished} in place of {self.model.finished}")
        if not self.setup.copies and self.stepper is None:
            for env_id, observations in zip(env_ids, batch[0], strict=True):
                self.views[env_id] = observations, copy.deepcopy(observations), self.model.envs[env_id].life

    def _check_views(self) -> None:
        """Check that observations are what they were until their environment is next used."""
        for env_id, (views, copies, life) in self.views.items():
            env = self.model.envs[env_id]
            if env.request or env.cuts or env.life is not life:
                continue
            if any(not np.array_equal(views[agent], copies[agent]) for agent in views):
                raise Wrong(f"environment {env_id}: the view {views} was {copies}")

    def _check_replay(self, crash: Crash) -> None:
        """Check the file of a fault: its episode and its actions are those that the simulator has received."""
        self.backend.kinds["replay"] += 1
        lives = [one for one in self.backend.lives if (one.env_id, one.seed) == (crash.env_id, crash.constructor_seed)]
        if any(life.worker.is_late for life in lives) or crash.method == "unpickle":
            return  # it may have gone on
        if not lives and self.model.seeds.was_requested(crash.env_id, crash.constructor_seed):
            return  # its worker has failed before it was constructed
        actions = [next(iter(of_step.values()), -1) for of_step in loads(crash.actions)]
        got = crash.step, crash.first_step, actions, crash.seed, crash.number, crash.restarts
        played = [
            (life, *of_episode)
            for life in lives
            for of_episode in [(life.actions, life.seeding), *([] if life.actions else [life.last_episode])]
        ]
        if not crash.method:  # its worker was in no simulator: it may not have begun what was requested
            played += [
                (life, [*actions, action], seeding)
                if action is not None
                else (life, [], (seed, 0) if seed is not None else (seeding[0], seeding[1] + 1))
                for life, actions, seeding in played
                for action, seed in self.model.envs[crash.env_id].requests
            ]
        allowed = [
            (len(actions), max(len(actions) - _KEPT, 0) + 1, actions[-_KEPT:], *seeding, life.restarts)
            for life, actions, seeding in played
        ]
        if got not in allowed:
            raise Wrong(f"environment {crash.env_id}: a replay of {got} in place of {allowed}")

    def check_trace(self) -> None:
        """Check the trace of workers that have been closed: a slice for each step."""
        slices = [one for one in json.loads((self.folder / _TRACE).read_text())["traceEvents"] if one["ph"] == "X"]
        steps = sum(one["name"] == "step" and one["cat"] == "simulator" for one in slices)
        expected = sum(worker.steps for worker in self.backend.all_workers if worker.is_closed)
        if steps != expected or any(one["dur"] < 0 for one in slices):
            raise Wrong(f"the trace has {steps} steps in place of {expected}")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _reset(self, env_ids: Sequence[int], options: Any = None, seed: int | None = None) -> None:
        self.note(f"reset(env_ids={[*env_ids]}, options={options}, seed={seed})")
        self.model.sends("reset", env_ids, None, (options or {}).get("option", 0), seed)
        if self.stepper is not None:
            some = None if len(env_ids) == len(self.ids) else env_ids
            arrays = self.stepper.reset(seed, options, some)
            self._received(env_ids, _as_dicts(arrays, env_ids))
            return
        observations, infos = self.env.reset(seed=seed, env_ids=env_ids, options=options)
        self._received(env_ids, (observations, None, None, None, infos))

    def _actions(self, env_ids: Sequence[int]) -> tuple[int, list[dict[str, int]]]:
        self.actions += 1
        return self.actions, [dict.fromkeys(AGENTS, self.actions) for _ in env_ids]

    def _reset_ended(self) -> None:
        """Reset the environments that the caller has to reset."""
        waiting = [env.env_id for env in self.model.envs if not env.request and self._must_reset(env)]
        if waiting and not self.model.in_flight:
            self._reset(waiting)

    def _must_reset(self, env: Any) -> bool:
        stays_over = self.setup.mode == "DISABLED" and env.state.over is not None
        return not env.has_reset or (stays_over and (self.setup.kind != "dict" or env.state.waits))

    def step(self, rng: random.Random) -> None:
        if self.model.in_flight:
            return
        if rng.random() < 0.9:
            self._reset_ended()
        if not all(env.has_reset for env in self.model.envs):
            return
        action, actions = self._actions(self.ids)
        self.note(f"step(action {action})")
        self.model.sends("step", self.ids, action)
        self._step(self.ids, action, actions, None)

    def _step(self, env_ids: Sequence[int], action: int, actions: Any, some: Sequence[int] | None) -> None:
        if self.stepper is not None:
            arrays = self.stepper.step(self._arrays(action), some)
            self._received(env_ids, _as_dicts(arrays, env_ids))
        else:
            self._received(env_ids, self.env.step(actions, some))

    def _arrays(self, action: int) -> dict[str, Any]:
        return {agent: np.full(len(self.ids), action) for agent in AGENTS}

    def step_some(self, rng: random.Random) -> None:
        if self.model.in_flight or not all(env.has_reset for env in self.model.envs):
            return
        ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
        action, actions = self._actions(ids)
        self.note(f"step(action {action}, env_ids={ids})")
        self.model.sends("step", ids, action)
        self._step(ids, action, actions, ids)

    def reset(self, rng: random.Random) -> None:
        if not self.model.in_flight:
            ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
            self._reset(ids, rng.choice([None, {"option": rng.randint(1, 9)}]), rng.choice([None, rng.randint(1, 999)]))

    def send(self, rng: random.Random) -> None:
        free = [env.env_id for env in self.model.envs if not env.request and not self._must_reset(env)]
        if not free or (self.stepper is not None and len(free) < len(self.ids)):
            return
        if self.stepper is not None:
            action, _ = self._actions(self.ids)
            self.note(f"stepper.send(action {action})")
            self.model.sends("step", self.ids, action)
            self.stepper.send(self._arrays(action))
            return
        ids = rng.sample(free, rng.randint(1, len(free)))
        action, actions = self._actions(ids)
        self.note(f"send(action {action}, env_ids={ids})")
        self.model.sends("step", ids, action)
        self.env.send(actions, ids)

    def send_reset(self, rng: random.Random) -> None:
        free = [env.env_id for env in self.model.envs if not env.request]
        ids = [env_id for env_id in free if self._must_reset(self.model.envs[env_id]) or rng.random() < 0.1]
        if ids and self.stepper is None:
            self.note(f"reset_async(env_ids={ids})")
            self.model.sends("reset", ids)
            self.env.reset_async(env_ids=ids)

    def recv(self, rng: random.Random) -> None:
        if in_flight := len(self.model.in_flight):
            self._recv(rng.randint(0, in_flight), rng.choice([None, None, 0.0, 0.001, 0.1]), rng.choice([None, 0.01]))

    def _recv(self, least: int, timeout: float | None, window: float | None = None) -> None:
        if self.stepper is not None:
            least, window = len(self.ids), None
        self.note(f"recv(min_envs={least}, timeout={timeout}, window={window})")
        began = self.backend.now
        try:
            if self.stepper is not None:
                self._received(self.ids, _as_dicts(self.stepper.receive(timeout), self.ids))
                return
            batch = self.env.recv(least, timeout, window=window)
        except ParallelEnvError:
            raise
        except TimeoutError:
            # A step of all environments also waits for the reply that follows results which were sent ahead.
            must_be_here = self.stepper is None or not any(one.expected for one in self.backend.workers.values())
            are_ready = must_be_here and len(self.model.surely_ready) >= least
            if timeout is None or self.backend.now - began < timeout - 1e-6 or are_ready:
                passed = self.backend.now - began
                raise Wrong(f"recv has timed out after {passed} s, with {self.model.ready}") from None
            return
        surely, possibly = {*self.model.surely_ready}, {*self.model.ready}
        if len(batch.env_ids) < least or not surely <= {*batch.env_ids} <= possibly:
            raise Wrong(f"recv returned environments {batch.env_ids} in place of {self.model.ready}")
        self._received(batch.env_ids, batch[1:])

    def wait(self, rng: random.Random) -> None:
        """The caller does something else; workers go on."""
        seconds = rng.choice([0.001, 0.1, 2.0])
        self.note(f"{seconds} s pass")
        self.backend.pass_time(seconds)

    def set_option(self, rng: random.Random) -> None:
        """The option of later resets of some environments."""
        if self.model.in_flight:
            return
        ids, option = rng.sample(self.ids, rng.randint(1, len(self.ids))), rng.choice([0, rng.randint(10, 19)])
        self.note(f"set_reset_options(option {option}, env_ids={ids})")
        self.model.stands(ids, option)
        try:
            self.env.set_reset_options({"option": option} if option else None, ids)
        except ParallelEnvError:
            if not self.model.fatal and self.model.restarts:
                self.model.check_errors(raised=True)
                return
            raise
        self.model.check_errors(raised=False)

    def call(self, rng: random.Random) -> None:
        """A method, an attribute, a frame or the global state of some environments."""
        if self.model.in_flight:
            return
        ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
        name = rng.choice(["where", "number", "mark", "set_attr", "render", "state", "seed", "seed"])
        if name in ("render", "state") and not all(self.model.envs[env_id].has_reset for env_id in ids):
            return
        ids = [*self.ids] if name == "seed" else ids
        self.note(f"call({name!r}, env_ids={ids})")
        self.model.calls(ids)
        value = rng.randint(1, 99)
        try:
            if name == "set_attr":
                self.env.set_attr("mark", value, ids)
                answers: Sequence[Any] = [value for _ in ids]
            elif name == "render":
                answers = self.env.render(env_ids=ids)
            elif name == "state":
                answers = [tuple(state.tolist()) for state in self.env.state(env_ids=ids)]
            elif name == "seed":
                answers = self.env.seed()
            else:
                answers = self.env.call(name, env_ids=ids)
        except ParallelEnvError:
            if not self.model.fatal and self.model.restarts:
                self.model.check_errors(raised=True)
                return
            raise
        self.model.check_errors(raised=False)
        lives = [self.model.envs[env_id].life for env_id in ids]
        expected = [_ANSWERS.get(name, _where)(life) for life in lives if life is not None]
        if [*answers] != expected:
            raise Wrong(f"call({name}) returned {answers} in place of {expected}")

    def restart(self, rng: random.Random) -> None:
        if self.model.in_flight:
            return
        ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
        # Those that are being rebuilt would be constructed twice, and a failure of the first one would count, too.
        ids = [env_id for env_id in ids if not self.model.envs[env_id].cuts or self.model.envs[env_id].ready]
        if not ids:
            return
        self.note(f"restart(env_ids={ids})")
        self.model.rebuilds(ids)
        try:
            self.env.restart(ids)
        except ParallelEnvError:
            if not self.model.fatal and self.model.restarts:
                self.model.check_errors(raised=True)
                return
            raise
        self.model.check_errors(raised=False)

    def save(self, rng: random.Random) -> None:
        """States of some environments, or of all."""
        self._receive_all()
        ids = [env.env_id for env in self.model.envs if env.has_reset]
        if not ids:
            return
        ids = ids if rng.random() < 0.5 else rng.sample(ids, rng.randint(1, len(ids)))
        self.note(f"save_state(env_ids={ids})")
        self.model.calls(ids)
        refused, raised = self.backend.kinds["fails in save"], None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* draw from process-wide generators", RuntimeWarning)
                states = self.env.save_state(ids) if self.stepper is None else self.stepper.save_state(ids)
        except TypeError as error:
            raised = error
        except ParallelEnvError:
            if not self.model.fatal and self.model.restarts:
                self.model.check_errors(raised=True)
                return
            raise
        self.model.check_errors(raised=False)
        if (self.backend.kinds["fails in save"] > refused) != (raised is not None):
            raise Wrong(f"save_state has raised {raised!r}")
        if raised is None:
            self.saved += zip(ids, states, self.model.saved(ids), strict=True)

    def load(self, rng: random.Random) -> None:
        """Latest states, or any ones, in place of some environments, or of all."""
        if not self.saved:
            return
        self._receive_all()
        everything = self.stepper is not None and not all(env.has_reset for env in self.model.envs)
        ids = [*self.ids] if everything or rng.random() < 0.5 else rng.sample(self.ids, rng.randint(1, len(self.ids)))
        own = rng.random() < 0.7 or self.setup.differ
        if self.setup.differ and not {*ids} <= {env_id for env_id, *_ in self.saved}:
            return
        chosen = [rng.choice([one for one in self.saved if one[0] == env_id and own] or self.saved) for env_id in ids]
        states = {env_id: state for env_id, (_, _, state) in zip(ids, chosen, strict=True)}
        self.note(f"load_state(states of {[number for number, *_ in chosen]}, env_ids={ids})")
        self.model.loads(states)
        made, before = len(self.backend.lives), [env.life for env in self.model.envs]
        refused, raised = self.backend.kinds[REFUSED], None
        try:
            arguments = [state for _, state, _ in chosen], ids
            if self.stepper is None:
                observations, infos = self.env.load_state(*arguments)
            else:
                observations, _, _, _, infos = _as_dicts(self.stepper.load_state(*arguments)[0], ids)
        except (TypeError, ValueError) as error:
            raised = error
        except ParallelEnvError:
            if self.model.fatal or not self.model.restarts:
                raise
            self._check_closed(self.model.loaded(), made, before)
            self.model.check_errors(raised=True)
            return
        self.model.check_errors(raised=False)
        are_readable = all(state.is_readable for state in states.values())
        refuses = self.backend.kinds[REFUSED] > refused or not are_readable
        if refuses != (raised is not None):
            raise Wrong(f"load_state has raised {raised!r}")
        if raised is not None:
            self._check_closed([], made, before)
            return
        placed = self.model.loaded()
        self._check_closed(placed, made, before)
        if placed != ids or [*self.env.finished_episodes]:
            raise Wrong(f"load_state has loaded {placed} in place of {ids}, with {self.env.finished_episodes}")
        for env_id, *got in zip(ids, observations, infos, strict=True):
            if not any(fits(tuple(got), expected) for expected in states[env_id].returned):
                raise Wrong(f"environment {env_id}: load_state returned {got} in place of {states[env_id].returned}")
            if not self.setup.copies and self.stepper is None:
                self.views[env_id] = got[0], copy.deepcopy(got[0]), self.model.envs[env_id].life

    def _receive_all(self) -> None:
        while in_flight := len(self.model.in_flight):
            self._recv(in_flight, None)

    def _check_closed(self, placed: Sequence[int], made: int, before: Sequence[Life | None]) -> None:
        """Check which environments are closed after a load: the old ones if it has succeeded, else the new ones."""
        present = [env.life for env in self.model.envs]
        new = [life for life in self.backend.lives[made:] if life.origin == "LOAD" and life.loaded is not None]
        for life in [*filter(None, before), *new]:
            worker = life.worker
            is_there = self.backend.workers.get(worker.number) is worker and worker.state != "dead"
            if is_there and life.closes != (life not in present):
                raise Wrong(f"environment {life.env_id} (life {life.number}) has been closed {life.closes} times")

    def close_inside(self, rng: random.Random) -> None:
        """From now on, `close` is called in the middle of a call: by a signal handler, or another thread."""
        how = rng.choice([self._close, self._close_in_thread])
        self.backend.interrupt_after = rng.choice([0, 0, 1, 2, 8]), how

    def _close(self) -> None:
        self.closes = True
        self.backend.kinds[f"close in {self.call}"] += 1
        self.note("close() by a signal handler")
        with contextlib.suppress(EnvError):  # of an environment's own close
            self.env.close(timeout=1.0)

    def _close_in_thread(self) -> None:
        self.closes = True
        self.backend.kinds[f"close by a thread in {self.call}"] += 1
        self.note("close() in another thread")

        def close() -> None:
            with contextlib.suppress(EnvError):
                self.env.close(timeout=1.0)

        self.backend.call_in_thread(close)

    def _on_restart(self, event: RestartEvent) -> None:
        self.events += 1
        env = self.model.envs[event.env_id]
        if event.seed not in self.model.seeds.latest[event.env_id]:
            self.wrong.append(f"{event} has another seed than {self.model.seeds.latest[event.env_id]}")
        if (event.kind, event.restarts) != (env.latest_fault, env.restarts.total()):
            self.wrong.append(f"{event} in place of {env.latest_fault}, {env.restarts.total()} restarts")
        chance = draw(self.number, self.events, 11)
        if chance < 0.2:
            raise ValueError("on_restart raises")
        if chance < 0.4:
            try:
                self.env.step([dict.fromkeys(AGENTS, 0) for _ in self.ids])
            except AlreadyPendingCallError:
                return
            self.wrong.append("step() in on_restart has not raised AlreadyPendingCallError")
        elif chance < 0.5:
            self.env.stats()
        elif chance < 0.505:
            self._close()

    # -- at the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all environments, which may fail in that."""
        self.backend.interrupt_after = None  # that was for a call
        before, raised = Counter(self.backend.kinds), False
        are_idle = all(worker.state == "idle" for worker in self.backend.workers.values())
        self.note("close()")
        try:
            self.env.close(timeout=1.0)
        except EnvError:
            raised = True
        new = Counter(self.backend.kinds) - before
        others = new["dies in close"] + new["hangs in close"]
        if raised and not new["fails in close"]:
            raise Wrong("close() has raised an error without a fault")
        if new["fails in close"] and not raised and are_idle and not others and self.setup.recycle is None:
            raise Wrong("close() has not raised the error of an environment")

    def _check_acting(self) -> None:
        for env, acting in zip(self.model.envs, self.env.acting, strict=True):
            alive, turn = sorted(env.state.alive), env.state.turn  # in the order of `possible_agents`
            expected = [agent for agent in alive if turn in ("", agent)]
            if not env.request and acting != expected:
                raise Wrong(f"environment {env.env_id}: {acting} act next in place of {expected}")

    def _check_stats(self) -> None:
        stats = self.env.stats()
        shares = share_out(self.setup.num_envs, self.setup.num_workers, last_have_more=self.setup.hybrid)
        for position, (own, share) in enumerate(zip(stats.workers, shares, strict=True)):
            expected = self._expected_stats(share)
            got = {name: getattr(own, name) for name in expected} | {"step_times": own.step_times.total}
            if got != expected:
                raise Wrong(f"stats() has {got} of worker {position} in place of {expected}")
        if self.setup.callback and self.events != self.model.faults:
            raise Wrong(f"on_restart was called {self.events} times in place of {self.model.faults}")

    def _expected_stats(self, share: Sequence[int]) -> dict[str, Any]:
        envs = [env for env in self.model.envs if env.env_id in share]
        workers = [worker for worker in self.backend.all_workers if worker.share[0] in share]
        counts = sum([worker.counts for worker in workers], Counter[str]())
        kinds = sum([env.restarts for env in envs], Counter[str]())
        return {
            "steps": counts["step"],
            "resets": counts["reset"],
            "step_times": sum(worker.steps for worker in workers),
            "restarts": kinds.total(),
            "restart_kinds": kinds,
            "faults": sum(len(env.faults) for env in envs),
            "recycled": sum(env.recycled for env in envs),
        }

    def _check_noticed(self) -> None:
        """Check what has been noticed in the middle of calls."""
        self._check_views()
        if wrong := [*self.wrong, *self.model.seeds.wrong]:
            raise Wrong(wrong[0])
        if self.model.fatal:
            raise Wrong(f"no error after {self.model.fatal}")


def _where(life: Life) -> Any:
    return *life.shown, life.episodes, life.steps


_ANSWERS: dict[str, Callable[[Life], Any]] = {
    "number": lambda life: life.shown[1],
    "mark": lambda life: life.mark,
    "set_attr": lambda life: life.mark,
    "seed": lambda life: life.current_seed,
}
_CALLS: dict[str, tuple[float, Callable[[History, random.Random], None]]] = {
    "step": (40, History.step),
    "step_some": (8, History.step_some),
    "reset": (7, History.reset),
    "send": (25, History.send),
    "send_reset": (8, History.send_reset),
    "recv": (30, History.recv),
    "wait": (4, History.wait),
    "call": (8, History.call),
    "restart": (2, History.restart),
    "set_option": (3, History.set_option),
    "save": (4, History.save),
    "load": (5, History.load),
    "close_inside": (0.5, History.close_inside),
}


def _as_dicts(arrays: Arrays, env_ids: Sequence[int]) -> list[list[dict[Any, Any]]]:
    """The dicts of some environments, from arrays over all."""
    (observations,) = arrays.observations  # all agents have the same space
    columns: list[list[dict[Any, Any]]] = [[], [], [], [], []]
    for row in env_ids:
        agents = [*enumerate(AGENTS)]
        columns[0].append({agent: observations[row, at].copy() for at, agent in agents if arrays.observed[row, at]})
        columns[1].append({agent: float(arrays.rewards[row, at]) for at, agent in agents if arrays.rewarded[row, at]})
        for place, flags, over in (
            (2, arrays.terminations, arrays.terminated),
            (3, arrays.truncations, arrays.truncated),
        ):
            own = {agent: bool(flags[row, at]) for at, agent in agents if arrays.flagged[row, at]}
            columns[place].append({**own, "__all__": bool(over[row])})
        columns[4].append(arrays.infos.get(row, {}))
    return columns


def run(number: int, calls: Sequence[Call] | None = None, left_out: frozenset[Fault] = frozenset()) -> Result:
    """Carry out one history; with other calls than its own, or without some of its faults."""
    chosen = [*(calls_of(number) if calls is None else calls)]
    result = Result(number, setup_of(number), chosen)
    generators = random.getstate(), np.random.get_state()  # workers seed those of their process
    needs_folder = result.setup.replay or result.setup.traced
    with tempfile.TemporaryDirectory() if needs_folder else contextlib.nullcontext("") as folder:
        _run(History(number, left_out, Path(folder)), result)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    return result


def _run(history: History, result: Result) -> None:
    try:
        try:
            if _open(history):
                history.run(result.calls)
                if not history.closes:
                    history.close()
        except ClosedEnvironmentError:
            if not history.closes:
                raise
            history.backend.serve()
            _check_closed(history)
        except ParallelEnvError as error:
            is_hung = any(worker.state == "hung" or worker.is_late for worker in history.backend.workers.values())
            if not history.model.fatal and not (isinstance(error, WorkerTimeout) and is_hung):
                raise Wrong(f"an error without a fault: {error!r}") from error
            closing = history.backend.now - history.backend.timed_out_at
            if isinstance(error, WorkerTimeout) and closing > (0.5 if history.setup.hybrid else 0.0):
                raise Wrong(f"closing after {error!r} has taken {closing} s") from error
            limits = history.model.limits
            if isinstance(error, RestartLimitExceeded) != bool(limits) or (limits and error.env_ids[0] not in limits):
                raise Wrong(f"{error!r} in place of RestartLimitExceeded of {limits}") from error
            history.backend.serve()
            _check_closed(history)
        else:
            if history.closes:
                raise Wrong("a call goes on after close()")
            if history.model.fatal:
                raise Wrong(f"no error after {history.model.fatal}")
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        result.cause = error
    finally:
        history.backend.troubled = False
        try:
            if hasattr(history, "env"):
                history.env.close(terminate=not result.setup.traced)
                if result.setup.traced and not result.error:
                    history.check_trace()
        except Exception as error:
            result.error = result.error or f"close() raised {error!r}"
        history.backend.drop()
        result.error = result.error or "".join(history.backend.wrong[:1])
    result.log, result.faults, result.kinds = history.backend.log, history.backend.faults, history.backend.kinds
    result.checked = history.model.checked


def _open(history: History) -> bool:
    """Construct all environments; returns False if that has failed, as it must then."""
    try:
        history.open()
    except (ParallelEnvError, ValueError) as error:
        failed = [kind for outcome, kind in _ERRORS.items() if history.backend.kinds[f"{outcome} in constructor"]]
        if not isinstance(error, tuple(failed)):
            raise Wrong(f"{error!r} in place of {failed}") from error
        if not history.backend.stopped:
            raise Wrong("an error has not freed everything") from error
        history.model.fatal.clear()
        return False
    if any(fault.life == 1 for fault in history.backend.faults):  # others are of environments that take their place
        raise Wrong(f"no error after {history.backend.kinds}")
    return True


_ERRORS = {"fails": EnvError, "dies": WorkerCrashed, "hangs": WorkerTimeout, "differs": ValueError}


def _check_closed(history: History) -> None:
    if not history.backend.stopped:
        raise Wrong("an error has not closed everything")
    try:
        history.env.reset()
    except ClosedEnvironmentError:
        return
    raise Wrong("reset() after an error has not raised ClosedEnvironmentError")
