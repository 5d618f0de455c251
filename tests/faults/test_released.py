"""What `close` and `del` free at once. The garbage collector does not run here, so all is freed by reference count."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.leaks import open_descriptors
from helpers.setups import rest
from helpers.start_methods import arguments
from pettingzoo.classic import tictactoe_v3
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from simulators.deterministic import Hunt
from simulators.failing import Fragile, SimulatorError, raising
from simulators.native_arena import Arena
from simulators.pymarl_envs import Skirmish
from simulators.rollouts import TwoAgents
from simulators.tuple_envs import Foraging

from marl_parallel import EnvError, ParallelEnv, ParallelEnvError, RecyclePolicy, RestartEvent, Rollout, vector
from marl_parallel.core.block import stacking
from marl_parallel.monitoring import Monitor
from marl_parallel.types import installed

pytestmark = [pytest.mark.release_independent, pytest.mark.whole_machine]

BACKENDS = ["serial", "process", rest("thread"), rest("hybrid"), rest("portable")]


def on_backends(cases: Iterable[str], in_processes: Collection[str]) -> list[Any]:
    """Pairs of a backend and a case. A run with `--setups=one` has some; each case has one more backend in turn."""
    some = {("serial", case) for case in cases} | {("process", case) for case in in_processes}
    pairs = [
        *itertools.product(["serial", "process"], cases),
        *zip(itertools.cycle(["portable", "hybrid", "thread"]), cases),
    ]
    return [pair if pair in some else rest(*pair) for pair in pairs]


OURS = ("marl_parallel.", "simulators.")


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Also without all that exists before the test: to look at it takes most of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


class Held(NamedTuple):
    """What this process has."""

    descriptors: list[str]
    blocks: int
    threads: list[str]

    @classmethod
    def now(cls) -> Held:
        return cls(
            sorted(os.readlink(f"/proc/self/fd/{name}") for name in open_descriptors()),
            blocks(),
            sorted(thread.name for thread in threading.enumerate()),
        )


def blocks() -> int:
    """The number of mapped blocks."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:marl_parallel") + maps.count("/dev/zero")


def instances() -> Counter[str]:
    """The objects of this package and of simulators, by class."""
    kinds = Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()))
    return Counter({name: count for name, count in kinds.items() if name.startswith(OURS)})


def check(make: Callable[[], Any], use: Callable[[Any], object], collected: Callable[[], object] = int) -> None:
    """Descriptors, blocks and threads go with `close`; objects with the last reference, and everything without it.

    `collected` is called before the look at what has only been deleted.
    """
    for _ in range(2):  # what is made at first use may stay
        gc.collect()
        held, objects = Held.now(), instances()
        env = make()
        use(env)
        env.close()
        closed = now_or_soon(Held.now, held)
        del env
        left = now_or_soon(lambda objects=objects: instances() - objects, Counter())
    assert closed == held
    assert left == Counter()
    env = make()
    use(env)
    del env
    collected()
    assert now_or_soon(Held.now, held) == held
    assert now_or_soon(lambda: instances() - objects, Counter()) == Counter()


def now_or_soon(look: Callable[[], Any], expected: Any) -> Any:
    """What is seen once it is as expected, or after a second: a thread that has been joined may still end."""
    until = time.monotonic() + 1.0
    while (seen := look()) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return seen


def opened(make: Any, backend: str, **more: Any) -> ParallelEnv:
    where = arguments("portable") if backend == "portable" else {"backend": backend}
    return ParallelEnv([make] * 2, num_workers=2, **where, **more)


# -- dicts ---------------------------------------------------------------------------------------------------------


def steps(env: ParallelEnv) -> None:
    env.reset()
    for _ in range(9):  # past the ends of episodes
        env.step(env.sample_actions())


def asynchronous_steps(env: ParallelEnv) -> None:
    env.reset_async()
    while env.pending:
        env.recv(min_envs=1)
    env.send(env.sample_actions())
    env.recv()


def step_in_flight(env: ParallelEnv) -> None:
    env.reset()
    env.send(env.sample_actions())


def calls(env: ParallelEnv) -> None:
    env.reset()
    env.call("scale", 2.0)
    env.call_async("pid")
    env.call_wait()
    env.set_attr("gravity", 2.0)
    env.get_attr("gravity")
    env.state()
    env.render()
    env.set_reset_options({"start": 1})
    repr(env)


def saved_states(env: ParallelEnv) -> None:
    env.reset()
    states = env.save_state()
    env.step(env.sample_actions())
    env.load_state(states)
    env.step(env.sample_actions())


def requested_restart(env: ParallelEnv) -> None:
    env.reset()
    env.restart([1])
    env.reset(env_ids=[1])
    env.step(env.sample_actions())


def traces(env: ParallelEnv) -> None:
    env.start_trace("timeline.json")
    steps(env)
    env.stop_trace()
    env.start_trace("timeline.json")
    env.step(env.sample_actions())


def wrong_calls(env: ParallelEnv) -> None:
    """Their errors change nothing."""
    env.reset()
    for call in (
        lambda: env.step([{}] * 5), lambda: env.recv(), lambda: env.reset(env_ids=[7]), lambda: env.call("nothing"),
        lambda: env.set_attr("gravity", [1]), lambda: env.call("scale", Unreadable()),
        lambda: env.load_state([b"", b""]),
    ):  # fmt: skip
        with contextlib.suppress(Exception):
            call()
    env.step(env.sample_actions())


class Unreadable:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def monitored(env: ParallelEnv) -> None:
    monitor = Monitor(env)
    steps(env)
    monitor.log(1)


USES: dict[str, tuple[Callable[[ParallelEnv], None], dict[str, Any]]] = {
    "nothing": (lambda env: None, {}),
    "steps": (steps, {}),
    "views": (steps, {"copy": False}),
    "pickled": (steps, {"shared_memory": False}),
    "checked actions": (steps, {"check_actions": True}),
    "next step": (steps, {"auto_reset": "NEXT_STEP"}),
    "asynchronous": (asynchronous_steps, {}),
    "in flight": (step_in_flight, {}),
    "calls": (calls, {}),
    "saved states": (saved_states, {}),
    "restart": (requested_restart, {"on_error": "restart"}),
    "recycling": (steps, {"recycle": RecyclePolicy(max_episodes=1)}),
    "replay": (steps, {"replay": 5}),
    "trace": (traces, {}),
    "episode statistics": (steps, {"episode_stats": True}),
    "wrong calls": (wrong_calls, {}),
    "monitor": (monitored, {}),
}


@pytest.mark.filterwarnings("ignore:environments .* draw from:RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "use"),
    [
        *on_backends([use for use in USES if use != "recycling"], ["views", "in flight", "restart", "trace"]),
        *[("process", "recycling"), rest("portable", "recycling")],
    ],
)
def test_dicts(backend, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, more = USES[use]
    check(lambda: opened(Hunt, backend, **more), function)


@pytest.mark.parametrize("use", [steps, step_in_flight])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_works_after_close(backend, use):
    """It does not change; all other calls raise the same error as before."""
    env = opened(Hunt, backend)
    use(env)
    before = env.acting, env.action_masks, env.observation_space, env.plan, env.num_envs, env.num_workers
    env.close()
    assert before == (env.acting, env.action_masks, env.observation_space, env.plan, env.num_envs, env.num_workers)
    assert env.pending == ()
    stats = env.stats()
    assert use is step_in_flight or stats.steps == 2 * 9
    env.close()
    assert env.stats() == stats
    for call in (
        env.reset, env.sample_actions, env.seed, env.recv, env.save_state, env.render, env.state,
        lambda: env.step([{}] * 2), lambda: env.send([{}] * 2), lambda: env.call("pid"),
    ):  # fmt: skip
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_masks_after_close():
    env = ParallelEnv([Skirmish] * 2, adapter="pymarl", backend="serial", num_workers=2)
    env.reset()
    before = env.action_masks
    assert len(before[1]) == 3
    env.close()
    for _ in range(2):
        after = env.action_masks
        assert [{agent: mask.tolist() for agent, mask in of_env.items()} for of_env in after] == [
            {agent: mask.tolist() for agent, mask in of_env.items()} for of_env in before
        ]
        after[0]["agent_0"][:] = False  # a copy


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_views_keep_memory(backend):
    """They stay readable, and keep their block until the last one is gone."""
    opened(TwoAgents, backend).close()
    gc.collect()
    before = Held.now()
    for deleted in (False, True):
        env = opened(TwoAgents, backend, copy=False)
        observations, _ = env.reset()
        env.close()
        if deleted:
            del env
        assert blocks() == before.blocks + 1
        assert [array.tolist() for of_env in observations for array in of_env.values()] == [[0.0, 0.0]] * 4
        view = observations[1]["b"]
        del observations
        assert blocks() == before.blocks + 1
        assert view.tolist() == [0.0, 0.0]
        del view
        assert Held.now() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_inside_a_call(backend, tmp_path):
    """What the call still uses stays until the next `close`, or until the environments are deleted."""
    make = functools.partial(Fragile, {"step": raising(SimulatorError, "bad terrain")}, tmp_path, 1)

    def close(event: RestartEvent) -> None:
        envs[0].close()

    def use(env: ParallelEnv) -> None:
        envs[:] = [env]
        env.reset()
        with pytest.raises(ClosedEnvironmentError):  # noqa: PT012
            for _ in range(3):
                env.step([{"a": 0, "b": 0}] * 2)
        envs.clear()

    envs: list[ParallelEnv] = []
    check(lambda: opened(make, backend, on_error="restart", on_restart=close), use)


# -- faults --------------------------------------------------------------------------------------------------------


def until_fault(env: ParallelEnv) -> None:
    env.reset()
    for _ in range(3):
        env.step([{"a": 0, "b": 0}] * 2)
    env.reset_async()
    env.recv()
    env.render()
    env.call("act_up")
    env.load_state(env.save_state())
    env.close()


def until_faults(env: ParallelEnv) -> None:
    for _ in range(2):
        with contextlib.suppress(ParallelEnvError, ClosedEnvironmentError, KeyboardInterrupt):
            until_fault(env)


@pytest.mark.filterwarnings("ignore:environments .* draw from:RuntimeWarning")
@pytest.mark.parametrize("on_error", ["raise", "restart"])
@pytest.mark.parametrize(
    ("backend", "place"), on_backends(["reset", "step", "render", "call", "close"], ["step", "call"])
)
def test_exceptions(backend, place, on_error, tmp_path, caplog):
    """Once the exceptions are gone, with their tracebacks."""
    make = functools.partial(Fragile, {place: raising(SimulatorError, "bad terrain")}, tmp_path, 1)

    def close(env: ParallelEnv) -> None:
        until_faults(env)
        with contextlib.suppress(EnvError):
            env.close()

    check(lambda: opened(make, backend, on_error=on_error), close, caplog.clear)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exceptions_in_constructors(backend, tmp_path):
    make = functools.partial(Fragile, {"constructor": raising(SimulatorError, "bad terrain")}, tmp_path)
    for _ in range(2):
        gc.collect()
        held, objects = Held.now(), instances()
        with contextlib.suppress(EnvError):
            opened(make, backend)
    assert Held.now() == held
    assert instances() - objects == Counter()


def test_interrupts(tmp_path):
    make = functools.partial(Fragile, {"step": raising(KeyboardInterrupt)}, tmp_path)
    check(lambda: opened(make, "serial"), until_faults)


@pytest.mark.parametrize("on_error", ["raise", "restart"])
@pytest.mark.parametrize("fault", ["SIGKILL", rest("os._exit"), rest("SIGSTOP")])
@pytest.mark.parametrize("backend", ["process", rest("hybrid"), rest("portable")])
def test_lost_workers(backend, fault, on_error):
    """Workers that died, or were killed at a timeout."""
    make = crashing(Counting, {(1, 0): Fate(fault, "step", 1)})

    def use(env: ParallelEnv) -> None:
        env.reset()
        with contextlib.suppress(ParallelEnvError):
            for _ in range(3):
                env.step([ACTIONS] * 2)

    check(lambda: opened(make, backend, on_error=on_error, step_timeout=1.0 if fault == "SIGSTOP" else None), use)


# -- arrays --------------------------------------------------------------------------------------------------------


def array_steps(front: Any, actions: Any) -> None:
    front.reset()
    for _ in range(8):
        front.step(actions)


def sampled_steps(front: Any) -> None:
    front.reset(seed=1)
    for _ in range(8):
        front.step(front.action_space.sample())


def stacked_steps(front: Any) -> None:
    actions = np.zeros((2, 2), np.int64)
    array_steps(front, actions)
    front.load_state(front.save_state())
    with pytest.raises(ValueError, match="actions"):
        front.step(actions[:1])
    front.step_async(actions)


def rollouts(front: vector.StackedVecEnv) -> None:
    for halves in (1, 2):
        data = Rollout(front, 8, halves=halves)  # type: ignore[arg-type]
        for _ in range(2):
            data.collect(lambda current: np.zeros((len(current.env_ids), 2), np.int64))


def dict_steps(front: Any) -> None:
    array_steps(front, dict.fromkeys(TwoAgents.possible_agents, np.zeros(2, np.int64)))


ROWS = np.zeros((2, 2, 1), np.int64)
FACADES: dict[str, tuple[str, Callable[[Any], None], dict[str, Any]]] = {
    "gymnasium": ("GymnasiumVectorEnv", sampled_steps, {"auto_reset": "NEXT_STEP"}),
    "stacked": ("StackedVecEnv", stacked_steps, {}),
    "stacked views": ("StackedVecEnv", stacked_steps, {"copy": False}),
    "stacked, pickled": ("StackedVecEnv", stacked_steps, {"shared_memory": False}),
    "rollouts": ("StackedVecEnv", rollouts, {}),
    "pettingzoo": ("PettingZooVecEnv", dict_steps, {}),
    "share": ("ShareVecEnv", lambda front: array_steps(front, ROWS), {}),
}
OTHERS = {
    "stable_baselines3": ("SB3VecEnv", lambda front: array_steps(front, np.zeros(4, np.int64)), {}),
    "tianshou": (
        "TianshouVecEnv", lambda front: array_steps(front, np.zeros((2, 2), np.int64)), {"auto_reset": False},
    ),
    "torchrl": ("TorchRLEnv", lambda front: front.rollout(8, break_when_any_done=False), {"auto_reset": False}),
}  # fmt: skip
FACADES |= {name: facade for name, facade in OTHERS.items() if installed(name)}


@pytest.mark.parametrize(("backend", "facade"), on_backends(FACADES, ["stacked views", "rollouts", "pettingzoo"]))
def test_facades(backend, facade):
    name, use, more = FACADES[facade]
    kind = getattr(vector, name)
    # TorchRL's `EnvBase` refers to itself: without `close`, only the collector frees it.
    check(lambda: kind(opened(TwoAgents, backend, **more)), use, gc.collect if facade == "torchrl" else int)


@pytest.mark.parametrize("backend", BACKENDS)
def test_facades_whose_parallel_env_is_closed(backend):
    vector.StackedVecEnv(opened(TwoAgents, backend)).close()
    before = Held.now()
    front = vector.StackedVecEnv(opened(TwoAgents, backend, copy=False))
    array_steps(front, np.zeros((2, 2), np.int64))
    front.parallel_env.close()
    assert Held.now() == before
    for call in (front.reset, lambda: front.step(np.zeros((2, 2), np.int64)), front.save_state):
        with pytest.raises(ClosedEnvironmentError):
            call()


# -- simulators of other kinds -------------------------------------------------------------------------------------


def native_steps(front: vector.StackedVecEnv) -> None:
    declared = front.by_group(front.single_action_space)
    zeros = {name: stacking.zeros(space, (2, len(front.group_map[name]))) for name, space in declared.items()}
    array_steps(front, front.grouped(zeros))


@pytest.mark.parametrize(("kind", "use"), [(None, steps), (vector.StackedVecEnv, native_steps)])
def test_native_simulators(kind, use):
    check(lambda: (kind or (lambda env: env))(ParallelEnv.from_native(Arena(2))), use)


@pytest.mark.parametrize("kind", [Foraging, tictactoe_v3.env], ids=["tuples", "turns"])
@pytest.mark.parametrize("backend", ["serial", rest("thread"), rest("hybrid")])
def test_simulators_in_this_process(backend, kind):
    """Those of which the adapter has to be called after each step."""
    check(lambda: opened(kind, backend), steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pymarl(backend):
    class Connections(list[vector.PyMARLConnection]):
        def close(self) -> None:
            for connection in self:
                connection.close()

    class WithoutStats(Skirmish):
        get_stats = property()

    def use(connections: Connections) -> None:
        for _ in range(2):
            for connection in connections:
                connection.send(("reset", None))
            for connection in connections:
                connection.recv()
        for connection in connections:
            connection.send(("get_stats", None))
            with contextlib.suppress(AttributeError):
                connection.recv()

    def make() -> Connections:
        return Connections(vector.pymarl_connections([WithoutStats] * 2, backend=backend, num_workers=2))

    if backend != "portable":  # the same arguments for all
        check(make, use)


@pytest.mark.rest
def test_measured_settings():
    """`backend="auto"` opens other environments first."""
    check(lambda: ParallelEnv([TwoAgents] * 2, backend="auto"), steps)
