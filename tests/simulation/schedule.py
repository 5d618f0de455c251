"""One history: the caller's calls, drawn from its number, and the checks of what they return.

Each call has draws of its own, so that the others stay what they are when it is left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import ClosedEnvironmentError

from marl_parallel import ParallelEnv, ParallelEnvError, RecyclePolicy, RestartPolicy, WorkerTimeout
from marl_parallel.core.backend import share_out
from simulation.backend import Fault, Rates, SimulatedBackend
from simulation.model import Model, Wrong
from simulation.simulator import AGENTS, SimulatedEnv

MOST_CALLS = 30
_MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")


class Setup(NamedTuple):
    """What a history is made of, besides its calls."""

    num_envs: int
    num_workers: int
    mode: str
    on_error: str
    rates: Rates
    recycle: RecyclePolicy | None
    spares: bool
    warn_after: float | None


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
            "max_memory_mb": rng.choice([None, 150]),
            "kill_above_mb": rng.choice([None, None, 400]),
        }
        recycle = RecyclePolicy(**limits) if any(limits.values()) else None
    return Setup(
        num_envs,
        rng.randint(1, num_envs),
        rng.choice(_MODES),
        on_error,
        Rates(
            fails=rng.choice([0.0, 0.01, 0.03]),
            dies=rng.choice([0.0, 0.01, 0.03]),
            hangs=rng.choice([0.0, 0.0, 0.02]),
            late_values=rng.choice([0.0, 0.5]),
            infos=rng.choice([0.0, 0.5]),
            unreadable=rng.choice([0.0, 0.0, 0.01, 0.1]),
        ),
        recycle,
        rng.random() < 0.8,
        rng.choice([None, 2.0]),
    )


def calls_of(number: int) -> list[Call]:
    rng = random.Random(-number - 1)
    names, weights = zip(*_CALLS.items(), strict=True)
    chosen = rng.choices(names, [weight for weight, _ in weights], k=MOST_CALLS)
    return [Call(name, rng.randrange(1 << 30)) for name in chosen]


class History:
    """A `ParallelEnv` on the simulated backend, and its model."""

    def __init__(self, number: int, left_out: frozenset[Fault] = frozenset()) -> None:
        self.setup = setup = setup_of(number)
        self.backend = SimulatedBackend(number, setup.rates, spares=setup.spares, left_out=left_out)
        shares = share_out(setup.num_envs, setup.num_workers)
        self.model = self.backend.model = Model(shares, setup.mode, restarts=setup.on_error == "restart")
        self.actions = 0
        self.ids = range(setup.num_envs)
        self.env = ParallelEnv(
            [SimulatedEnv] * setup.num_envs,
            setup.mode,
            num_workers=setup.num_workers,
            backend=self.backend,
            on_error=setup.on_error,
            restart_policy=RestartPolicy(max_restarts=None, rate_limit=None),
            step_timeout=1.0,
            reset_timeout=1.0,
            start_timeout=5.0,
            warn_after=setup.warn_after,
            recycle=setup.recycle,
            forward_logs=False,
        )

    def run(self, calls: Sequence[Call]) -> None:
        """Carry out calls and check what they return; raises `AssertionError` if something is wrong."""
        self.backend.troubled = True
        self._reset(self.ids)
        for call in calls:
            _CALLS[call.name][1](self, random.Random(call.seed))
            if self.env.pending != tuple(self.model.in_flight):
                raise Wrong(f"pending is {self.env.pending} in place of {self.model.in_flight}")
        while self.model.in_flight:
            self._recv(1, None)
        self._check_stats()

    def note(self, text: str) -> None:
        self.backend.note(f"caller: {text}")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _reset(self, env_ids: Sequence[int], options: Any = None) -> None:
        self.note(f"reset(env_ids={[*env_ids]}, options={options})")
        self.model.sends("reset", env_ids)
        observations, infos = self.env.reset(env_ids=env_ids, options=options)
        self.model.received(env_ids, (observations, None, None, None, infos))

    def _actions(self, env_ids: Sequence[int]) -> tuple[int, list[dict[str, int]]]:
        self.actions += 1
        return self.actions, [dict.fromkeys(AGENTS, self.actions) for _ in env_ids]

    def _reset_ended(self) -> None:
        """Reset the environments that the caller has to reset."""
        waiting = [env.env_id for env in self.model.envs if not env.request and self._must_reset(env)]
        if waiting and not self.model.in_flight:
            self._reset(waiting)

    def _must_reset(self, env: Any) -> bool:
        return not env.has_reset or (self.setup.mode == "DISABLED" and env.state.over is not None)

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
        self.model.received(self.ids, self.env.step(actions))

    def step_some(self, rng: random.Random) -> None:
        if self.model.in_flight or not all(env.has_reset for env in self.model.envs):
            return
        ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
        action, actions = self._actions(ids)
        self.note(f"step(action {action}, env_ids={ids})")
        self.model.sends("step", ids, action)
        self.model.received(ids, self.env.step(actions, ids))

    def reset(self, rng: random.Random) -> None:
        if not self.model.in_flight:
            ids = rng.sample(self.ids, rng.randint(1, len(self.ids)))
            self._reset(ids, rng.choice([None, {"option": rng.randint(1, 9)}]))

    def send(self, rng: random.Random) -> None:
        free = [env.env_id for env in self.model.envs if not env.request and not self._must_reset(env)]
        if not free:
            return
        ids = rng.sample(free, rng.randint(1, len(free)))
        action, actions = self._actions(ids)
        self.note(f"send(action {action}, env_ids={ids})")
        self.model.sends("step", ids, action)
        self.env.send(actions, ids)

    def send_reset(self, rng: random.Random) -> None:
        free = [env.env_id for env in self.model.envs if not env.request]
        ids = [env_id for env_id in free if self._must_reset(self.model.envs[env_id]) or rng.random() < 0.1]
        if ids:
            self.note(f"reset_async(env_ids={ids})")
            self.model.sends("reset", ids)
            self.env.reset_async(env_ids=ids)

    def recv(self, rng: random.Random) -> None:
        if in_flight := len(self.model.in_flight):
            self._recv(rng.randint(0, in_flight), rng.choice([None, None, 0.0, 0.001, 0.1]), rng.choice([None, 0.01]))

    def _recv(self, least: int, timeout: float | None, window: float | None = None) -> None:
        self.note(f"recv(min_envs={least}, timeout={timeout}, window={window})")
        began = self.backend.now
        try:
            batch = self.env.recv(least, timeout, window=window)
        except ParallelEnvError:
            raise
        except TimeoutError:
            if timeout is None or self.backend.now - began < timeout - 1e-6 or len(self.model.ready) >= least:
                raise Wrong("recv has timed out too early") from None
            return
        if len(batch.env_ids) < least or sorted(batch.env_ids) != self.model.ready:
            raise Wrong(f"recv returned environments {batch.env_ids} in place of {self.model.ready}")
        self.model.received(batch.env_ids, batch[1:])

    def wait(self, rng: random.Random) -> None:
        """The caller does something else; workers go on."""
        seconds = rng.choice([0.001, 0.1, 2.0])
        self.note(f"{seconds} s pass")
        self.backend.pass_time(seconds)

    # -- at the end ----------------------------------------------------------------------------------------------------

    def _check_stats(self) -> None:
        stats = self.env.stats()
        restarts, recycled = (sum(getattr(env, name) for env in self.model.envs) for name in ("restarts", "recycled"))
        if (stats.restarts, stats.recycled) != (restarts, recycled):
            got = f"{stats.restarts} restarts, {stats.recycled} recycled"
            raise Wrong(f"stats() has {got} in place of {restarts}, {recycled}")


_CALLS: dict[str, tuple[int, Callable[[History, random.Random], None]]] = {
    "step": (40, History.step),
    "step_some": (8, History.step_some),
    "reset": (4, History.reset),
    "send": (25, History.send),
    "send_reset": (8, History.send_reset),
    "recv": (30, History.recv),
    "wait": (4, History.wait),
}


def run(number: int, calls: Sequence[Call] | None = None, left_out: frozenset[Fault] = frozenset()) -> Result:
    """Carry out one history; with other calls than its own, or without some of its faults."""
    chosen = [*(calls_of(number) if calls is None else calls)]
    result = Result(number, setup_of(number), chosen)
    generators = random.getstate(), np.random.get_state()  # workers seed those of their process
    history = History(number, left_out)
    try:
        try:
            history.run(chosen)
        except ParallelEnvError as error:
            is_hung = any(worker.state == "hung" for worker in history.backend.workers.values())
            if not history.model.fatal and not (isinstance(error, WorkerTimeout) and is_hung):
                raise Wrong(f"an error without a fault: {error!r}") from error
            _check_closed(history)
        else:
            if history.model.fatal:
                raise Wrong(f"no error after {history.model.fatal}")
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        result.cause = error
    finally:
        history.backend.troubled = False
        try:
            history.env.close(terminate=True)
        except Exception as error:
            result.error = result.error or f"close() raised {error!r}"
        history.backend.drop()
        random.setstate(generators[0])
        np.random.set_state(generators[1])
    result.log, result.faults, result.kinds = history.backend.log, history.backend.faults, history.backend.kinds
    result.checked = history.model.checked
    return result


def _check_closed(history: History) -> None:
    if not history.backend.stopped:
        raise Wrong("an error has not closed everything")
    try:
        history.env.reset()
    except ClosedEnvironmentError:
        return
    raise Wrong("reset() after an error has not raised ClosedEnvironmentError")
