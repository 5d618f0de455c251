"""`save_state` and `load_state`: another `ParallelEnv` goes on from a state as the first one does, bit for bit."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from helpers import ROOT
from helpers.comparison import assert_same
from helpers.scenarios import REAL, SYNTHETIC, Event, record, scenario
from helpers.setups import Setup, rest
from mpe2 import simple_reference_v3
from simulators.native_arena import Arena
from simulators.saved import (
    Easy,
    FailsToLoad,
    Global,
    SavesItself,
    SavesItselfAsAtari,
    Table,
    Voyage,
    WithEngine,
    wrapped_engine,
)

from marl_parallel import ParallelEnv, RecyclePolicy, RestartLimitExceeded, RestartPolicy
from marl_parallel.core.pool.extensions import Extension
from marl_parallel.core.pool.rebuilds import Rebuilds
from marl_parallel.core.pool.recycling import Recycling
from marl_parallel.core.pool.replay import Histories
from marl_parallel.core.pool.restarts import Restarts
from marl_parallel.core.pool.saved_states import from_bytes, to_bytes
from marl_parallel.core.worker.generators import GeneratorStates, current_states

pytestmark = [pytest.mark.in_turn, pytest.mark.release_independent]

MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
OTHERS = {
    "serial": Setup("process", True, 1),
    "thread": Setup("serial", True, 1),
    "process": Setup("process", True, 1),
    "hybrid": Setup("process", True, 2),
    "ray": Setup("process", True, 1),
}
"""Where the states of a backend are loaded."""


def play(env: Any, events: Sequence[Event], save_after: Sequence[int] = ()) -> dict[int, Any]:
    """Repeat recorded calls, whose results must be equal; returns what `save_state` has returned after some of them."""
    saved = {}
    for index, event in enumerate(events):
        result = getattr(env, event.method)(**copy.deepcopy(event.arguments))
        assert_same(result, event.result, f"event {index}, {event.method}")
        if index in save_after:
            saved[index] = env.save_state(), env.acting, env.action_masks, env.seed(), result
    return saved


def check_loads(name: str, mode: Any, setup: Setup, build: Any) -> None:
    constructors, events = scenario(name).constructors, record(name, AutoresetMode[mode])
    first = build(constructors, setup, mode)
    points = [0, len(events) // 2]
    saved = play(first, events, points)
    for point in points:
        states, acting, masks, seeds, result = saved[point]
        env = build(constructors, OTHERS[setup.backend], mode)
        observations, infos = env.load_state(states)
        whole = events[point].arguments.get("env_ids") is None
        if whole:
            assert_same(observations, result[0])
            assert_same(infos, result[-1])
        assert_same(env.acting, acting)
        assert_same(env.action_masks, masks)
        assert_same(env.seed(), seeds)
        again = env.save_state()
        play(env, events[point + 1 :])
        env.load_state(again)  # once more, in the middle of another episode
        play(env, events[point + 1 :])


# Of multiwalker, the engine is in C++.
KINDS = [*SYNTHETIC, "spread", "connect_four", *map(rest, sorted({*REAL} - {"spread", "connect_four", "multiwalker"}))]


@pytest.mark.parametrize("name", KINDS)
def test_another_number_of_workers(name, two_worker_setup, build):
    check_loads(name, "SAME_STEP", two_worker_setup, build)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", ["skirmish", "hunt", *map(rest, sorted({*SYNTHETIC} - {"skirmish", "hunt"}))])
def test_other_autoreset_modes(name, mode, two_worker_setup, build):
    check_loads(name, mode, two_worker_setup, build)


def test_worker_threads_share_pygame():
    """The close of an environment ends pygame in the whole process: not while another thread makes its objects."""
    import pygame.surfarray  # noqa: F401  # pygame imports it at the first use, also if two threads have theirs at once

    make = functools.partial(simple_reference_v3.parallel_env, render_mode="rgb_array")
    with ParallelEnv([make] * 4, seed=1, backend="thread", num_workers=2) as env:
        env.reset()
        env.step(env.sample_actions())
        states, frames = env.save_state(), copy.deepcopy(env.render())
        for _ in range(30):
            env.load_state(states)
        assert_same(env.render(), frames)  # with texts in fonts of pygame


# -- everything else that goes on --------------------------------------------------------------------------------------


def act(env: Any, *actions: int) -> Any:
    return env.step([dict.fromkeys(agents, action) for action, agents in zip(actions, env.acting, strict=True)])


def without_reports(results: Any) -> Any:
    """Copies of results without the texts of errors, which name workers."""
    if isinstance(results, dict):
        return {key: "a text" if key == "error" else without_reports(value) for key, value in results.items()}
    return type(results)(map(without_reports, results)) if type(results) in (tuple, list) else copy.deepcopy(results)


def observed_of(env: Any) -> tuple[Any, ...]:
    """What a caller can see between two steps."""
    return env.acting, env.action_masks, env.seed(), env.sample_actions(), env.stats().restarts


def check_goes_on(
    make: Any, other: Any, actions: Sequence[Sequence[int]], reset: Any = lambda env: env.reset()
) -> None:
    """Load each state on the way in another `ParallelEnv`, which must go on as the first one."""
    env = make()
    reset(env)
    states, results, seen = [], [], []
    for row in [*actions, None]:
        states.append(env.save_state())
        seen.append(observed_of(env))
        if row is not None:
            results.append((without_reports(act(env, *row)), sorted(map(tuple, env.finished_episodes))))
    for start, state in enumerate(states):
        loaded = other()
        loaded.load_state(state)
        for time in range(start, len(states)):
            assert_same(observed_of(loaded), seen[time], f"loaded at {start}, before step {time}")
            if time < len(actions):
                result = without_reports(act(loaded, *actions[time])), sorted(map(tuple, loaded.finished_episodes))
                assert_same(result, results[time], f"loaded at {start}, step {time}")
        loaded.close()


ENDS = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0)]
FAULTS = [(0, 0, 0), (2, 0, 0), (0, 0, 0), (0, 1, 0), (0, 2, 1), (0, 0, 0), (2, 2, 2), (0, 0, 0), (0, 0, 0)]


@pytest.mark.release_independent
@pytest.mark.parametrize(
    "more",
    [
        {"episode_stats": True}, {"copy": False}, {"shared_memory": False}, {"check_actions": True}, {"seed": "own"},
        {"isolate_rng": True}, {"replay": 20}, {"seed": None},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_arguments(mode, more, build, tmp_path):
    if "replay" in more:
        more = {**more, "replay_dir": tmp_path}

    def make(setup: Setup) -> Any:
        env = build([Global if "isolate_rng" in more else Voyage] * 3, setup, mode, **more)
        env.set_reset_options({"wind": 1}, env_ids=[0])
        return env

    def other() -> Any:
        return build([Global if "isolate_rng" in more else Voyage] * 3, Setup("serial", True, 1), mode, **more)

    check_goes_on(lambda: make(Setup("process", True, 2)), other, ENDS)


@pytest.mark.release_independent
@pytest.mark.parametrize("mode", MODES)
def test_restarts(mode, build):
    """Counts of restarts, and so their seeds; environments that wait for a reset; what is not reported yet."""

    def make(workers: int) -> Any:
        return build([Voyage] * 3, Setup("process", True, workers), mode, on_error="restart")

    check_goes_on(lambda: make(2), lambda: make(1), FAULTS)


@pytest.mark.release_independent
@pytest.mark.parametrize("mode", MODES)
def test_restart_that_is_not_reported(mode, build):
    """A worker dies with a neighbour that was idle: the neighbour's next result says so."""

    def make() -> Any:
        return build([Voyage] * 3, Setup("process", True, 1), mode, on_error="restart")

    env = make()
    before, _ = env.reset()
    env.step([{"boat": 3, "kite": 0}], env_ids=[0])
    state, actions = env.save_state(), [(0, 0, 0), (1, 0, 0), (0, 0, 0)]
    expected = [without_reports(act(env, *row)) for row in actions]
    assert expected[0][-1][1]["__common__"]["restarted"] is True
    loaded = make()
    observations, _ = loaded.load_state(state)
    assert_same(observations[1:], before[1:])
    assert_same([without_reports(act(loaded, *row)) for row in actions], expected)
    with pytest.raises(ValueError, match=r'environment 1: its state includes a restart.*needs on_error="restart"'):
        build([Voyage] * 3, Setup("serial", True, 1), mode).load_state(state)


@pytest.mark.release_independent
def test_recycling(build):
    def make(workers: int) -> Any:
        setup = Setup("process", True, workers)
        return build([Voyage] * 3, setup, True, recycle=RecyclePolicy(max_episodes=2), on_error="restart")

    check_goes_on(lambda: make(2), lambda: make(1), [*ENDS, *ENDS[:4]])


@pytest.mark.release_independent
def test_replacements_of_the_present_environment_have_other_seeds(build):
    """What `recycle=` has prepared before a load does not replace the loaded environment."""

    def make() -> Any:
        recycle = RecyclePolicy(max_episodes=1)
        return build([Voyage] * 2, Setup("process", True, 1), True, recycle=recycle, on_error="restart")

    def prepared() -> Any:
        env = make()
        env.reset()
        return env

    check_goes_on(make, prepared, [(1, 1), (0, 0), (1, 1), (1, 1)])


def failing(rate_limit: int | None = None, rate_period_s: float = 3600.0, mode: str = "NEXT_STEP") -> ParallelEnv:
    policy = RestartPolicy(max_restarts=None, rate_limit=rate_limit, rate_period_s=rate_period_s)
    return ParallelEnv([Voyage], mode, backend="serial", on_error="restart", restart_policy=policy)


@pytest.mark.release_independent
def test_the_rate_limit_counts_faults_from_before_a_load():
    with failing(1) as env:
        env.reset()
        act(env, 2)
        state = env.save_state()
    with failing(1) as env:
        env.load_state(state)
        act(env, 0)  # the reset
        with pytest.raises(RestartLimitExceeded, match="rate_limit=1 within 3600 s"):
            act(env, 2)


@pytest.mark.release_independent
def test_the_rate_limit_forgets_old_faults_from_before_a_load():
    with failing(1, 0.01) as env:
        env.reset()
        act(env, 2)
        sleep(0.1)
        state = env.save_state()
    with failing(1, 0.01) as env:
        env.load_state(state)
        act(env, 0)
        *_, infos = act(env, 2)
        assert infos[0]["__common__"]["restarted"] is True
        assert env.stats().faults == 2


@pytest.mark.release_independent
@pytest.mark.parametrize("mode", MODES)
def test_a_state_that_is_saved_right_after_a_load(mode):
    """It has nothing of the result, here of a restart, that the environment had before the load."""
    with failing(mode=mode) as env:
        first = env.reset()
        states = env.save_state()
        act(env, 2)
        assert_same(env.load_state(states), first)
        again = env.save_state()
        expected = act(env, 0)
    with failing(mode=mode) as env:
        assert_same(env.load_state(again), first)
        assert_same(act(env, 0), expected)


def test_states_of_the_simulator_and_final_observations_after_a_restart(build):
    """The record is whole: a later restart reads the last observations there."""
    env = build([Voyage] * 2, Setup("process", True, 2), "SAME_STEP", on_error="restart", copy=False)
    env.reset()
    act(env, 0, 0)
    observations, *_ = act(env, 0, 0)
    kept, states = copy.deepcopy(observations), env.save_state()
    loaded = build([Voyage] * 2, Setup("process", True, 1), "SAME_STEP", on_error="restart", copy=False)
    again, _ = loaded.load_state(states)
    assert_same(again, kept)
    assert_same(loaded.state(), env.state())
    *_, infos = act(loaded, 2, 0)
    assert_same(infos[0]["boat"]["final_obs"], kept[0]["boat"])
    assert_same(infos[0]["kite"]["final_obs"], kept[0]["kite"])


def test_some_environments(parallel):
    env = parallel(Voyage, 3, True)
    env.reset()
    act(env, 0, 0, 0)
    states = env.save_state(env_ids=[2, 0])
    expected = act(env, 0, 0, 0)
    _, infos = env.load_state(states, env_ids=[2, 0])
    assert [one["boat"]["t"] for one in infos] == [1, 1]
    results = act(env, 0, 0, 0)
    assert_same([part[2] for part in results], [part[2] for part in expected])
    assert_same([part[0] for part in results], [part[0] for part in expected])
    assert results[-1][1]["boat"]["t"] == 3  # it went on
    env.load_state([states[0]], env_ids=[1])  # environment 1 as a copy of environment 2
    results = act(env, 0, 0, 0)
    assert_same([part[1] for part in results], [part[2] for part in expected])


# -- what is in a state, and what is not -------------------------------------------------------------------------------


@pytest.mark.parametrize("constructor", [SavesItself, SavesItselfAsAtari, wrapped_engine, Easy])
def test_simulators_that_plain_pickle_does_not_save(constructor, build):
    def make(workers: int) -> Any:
        return build([constructor] * 3, Setup("process", True, workers), True, seed=7)

    env = make(2)
    env.reset()
    for _ in range(3):
        env.step([{agent: 2 if agent == "arm" else 0 for agent in agents} for agents in env.acting])
    states, results = env.save_state(), []
    loaded = make(1)
    loaded.load_state(states)
    for _ in range(12):
        actions = [{agent: 2 if agent == "arm" else 0 for agent in agents} for agents in env.acting]
        assert_same(loaded.step(actions), env.step(actions))
        results.append(loaded.acting)
    assert results


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_large_arrays_of_constructors(backend, build):
    """They are referred to until something is written to them."""
    table = np.random.default_rng(0).normal(size=(2000, 20))

    def make(workers: int) -> Any:
        return build([functools.partial(Table, table)] * 2, Setup(backend, True, workers))

    env = make(2)
    env.reset()
    states = env.save_state()
    assert max(map(len, states)) < 50_000 < table.nbytes
    env.call("write", 5.0, env_ids=[1])
    written = env.save_state()
    assert len(written[0]) < 50_000 < table.nbytes < len(written[1]) < table.nbytes + 50_000
    loaded = make(1)
    loaded.load_state(written)
    assert [one[0, 0] for one in loaded.get_attr("numbers")] == [table[0, 0], 5.0]
    assert [one[0] for one in loaded.get_attr("row")] == [table[3, 0], 5.0]
    loaded.call("write", 6.0, env_ids=[1])
    assert loaded.get_attr("row")[1][0] == 6.0  # still a part of the table
    assert len(loaded.save_state()[0]) < 50_000
    loaded.load_state(states)
    assert_same(act(loaded, 0, 0), act_from(make(2), states))
    other = build([functools.partial(Table, table + 1)] * 2, Setup(backend, True, 1))
    with pytest.raises(TypeError, match=r"environment 0 .*its constructor has other large arrays than"):
        other.load_state(states)


def act_from(env: Any, states: list[bytes]) -> Any:
    env.load_state(states)
    return act(env, 0, 0)


def test_process_wide_generators(build):
    for more, warns in ({}, True), ({"isolate_rng": True}, False):
        env = build([Voyage, Global], Setup("process", True, 2), **more)
        env.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env.save_state()
            env.save_state()
        assert [str(one.message)[:18] for one in caught if "generators" in str(one.message)] == [
            "environments [1], "
        ] * warns
    with pytest.raises(
        ValueError, match="environment 0: its state was saved with isolate_rng=True: pass isolate_rng=True"
    ):
        build([Voyage, Global], Setup("process", True, 2)).load_state(env.save_state())


@pytest.mark.parametrize("kinds", [[Global], [Voyage, Global], [Global] * 3])
def test_states_of_earlier_builds_with_process_wide_generators(kinds, build, monkeypatch):
    """They have the states of the process-wide generators in a plain tuple."""
    env, other = (build(kinds, Setup("serial", True, 1), isolate_rng=True, seed=seed) for seed in (6, 40))
    for one in (env, other):
        one.reset()
    act(env, *[1] * len(kinds))
    with monkeypatch.context() as patched:
        patched.setattr(GeneratorStates, "states", lambda self: current_states())
        states = env.save_state()
    other.load_state(states)
    for _ in range(3):
        assert_same(act(other, *[1] * len(kinds)), act(env, *[1] * len(kinds)))


# -- errors: nothing has changed ---------------------------------------------------------------------------------------


class WithGenerator(Voyage):
    """Environment 1 is in the middle of a generator."""

    def __init__(self, seed: int = 0, env_id: int = 0) -> None:
        super().__init__(seed, env_id)
        self.plan = {"moves": (move for move in range(9)) if env_id == 1 else None}


def test_what_cannot_be_pickled(backend_setup, build):
    env = build([WithGenerator] * 3, backend_setup)
    env.reset()
    expected = build([WithGenerator] * 3, backend_setup)
    expected.reset()
    text = (
        r"environment 1 \(worker \d\): .*WithGenerator cannot be saved: .*attribute 'plan', entry 'moves' \(generator\)"
    )
    with pytest.raises(TypeError, match=text):
        env.save_state()
    assert len(env.save_state([0, 2])) == 2
    assert_same(act(env, 0, 0, 0), act(expected, 0, 0, 0))


def test_engine_without_methods_to_save_it(parallel):
    env = parallel(WithEngine, 1)
    env.reset()
    with pytest.raises(TypeError, match=r"attribute 'engine' \(Engine\).*get_state\(\) and set_state\(state\)"):
        env.save_state()


class SavesItself(WithEngine):
    """Its engine cannot be pickled; `part` is where something else cannot be, either."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.saved = part, 0

    def get_state(self) -> Any:
        self.saved += 1
        return {"moves": (move for move in range(9))} if self.part == "state" else 0

    def set_state(self, state: Any) -> None: ...


class Around:
    """Keeps a part of a simulator that saves itself."""

    def __init__(self, part: str) -> None:
        self.env = SavesItself(part)
        self.possible_agents, self.parts = self.env.possible_agents, [self.env.engine] if part == "wrapper" else []
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self.reset, self.step = self.env.reset, self.env.step

    def __reduce__(self) -> Any:
        return Around, (self.env.part,), {"env": self.env, "parts": self.parts}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("state", r"in the result of get_state of .*SavesItself: entry 'moves' \(generator\)"),
        ("wrapper", r"attribute 'parts', item 0 \(Engine\)"),
    ],
)
def test_the_part_that_cannot_be_pickled_where_a_layer_saves_itself(part, text):
    with ParallelEnv([functools.partial(Around, part)], backend="serial") as env:
        env.reset()
        with pytest.raises(TypeError, match=text):
            env.save_state()
        assert env.call(lambda around: around.env.saved) == (1,)


FORMAT_1 = (Path(__file__).parent / "states" / "format_1.state").read_bytes()
"""Of an early build of 0.2.0."""


def damaged(states: list[bytes]) -> list[Any]:
    return [states[0], states[1], states[2][: len(states[2]) // 2]]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (damaged, ValueError, "environment 2: its state is damaged"),
        (lambda states: [*states[:2], b"hello"], ValueError, "environment 2: its state was not made by save_state"),
        (lambda states: [*states[:2], None], TypeError, "environment 2: its state must be bytes that save_state"),
        (lambda states: states[:2], ValueError, "states"),
        (lambda states: states[0], TypeError, "states must be a list"),
        (lambda states: [states[0], states[1].replace(b"state 3", b"state 9", 1), states[2]], ValueError, "format 9"),
        (
            lambda states: [*states[:2], FORMAT_1],
            ValueError,
            "environment 2: its state has format 1, but .* reads format 3",
        ),
    ],
)
def test_states_that_are_none(change, error, text, backend_setup, build):
    env, expected = (build([Voyage] * 3, backend_setup) for _ in range(2))
    for one in (env, expected):
        one.reset()
        act(one, 0, 0, 0)
    states = env.save_state()
    with pytest.raises(error, match=text):
        env.load_state(change(states))
    for _ in range(2):
        assert_same(act(env, 0, 1, 0), act(expected, 0, 1, 0))


def test_a_state_that_fails_to_load_changes_no_environment(backend_setup, build):
    env, other, expected = (build([FailsToLoad] * 3, backend_setup, seed=seed) for seed in (6, 40, 6))
    other.reset()
    states = other.save_state()  # the constructor of environment 1 gets an odd seed
    for one in (env, expected):
        one.reset()
    with pytest.raises(TypeError, match=r"environment 1 .*set_state of .*FailsToLoad raised ValueError: no such"):
        env.load_state(states)
    for _ in range(2):
        assert_same(env.step([{"arm": 1}] * 3), expected.step([{"arm": 1}] * 3))


class Wider(Voyage):
    observation_space = spaces.Dict(boat=spaces.Box(-9, 9, (4,), np.float64), kite=spaces.Text(20))

    def observed(self) -> dict[str, Any]:
        return {"boat": np.zeros(4)}


class Renamed(Voyage):
    possible_agents = ("boat",)
    observation_space = spaces.Dict(boat=Voyage.observation_space["boat"])
    action_space = spaces.Dict(boat=spaces.Discrete(4))


def test_states_of_other_environments(parallel):
    env = parallel(Voyage, 2, True)
    env.reset()
    states = env.save_state()
    for other, mode, text in (
        (Wider, True, "environment 0 .*the observation space of agent 'boat'"),
        (Renamed, True, "environment 0: its state has the agents"),
        (Voyage, False, "was saved with auto_reset='SAME_STEP', and cannot be loaded with auto_reset='DISABLED'"),
    ):
        with pytest.raises(ValueError, match=text):
            parallel(other, 2, mode).load_state(states)


def test_calls_out_of_order(parallel):
    env = parallel(Voyage, 2, backend="process")
    with pytest.raises(ResetNeeded, match="save_state"):
        env.save_state()
    env.reset()
    states = env.save_state()
    env.send([{"boat": 0, "kite": 0}] * 2)
    for call in (env.save_state, lambda: env.load_state(states)):
        with pytest.raises(AlreadyPendingCallError):
            call()
    env.recv()
    env.close()
    for call in (env.save_state, lambda: env.load_state(states)):
        with pytest.raises(ClosedEnvironmentError):
            call()
    with ParallelEnv.from_native(Arena(2)) as native:
        native.reset()
        for call in (native.save_state, lambda: native.load_state(states)):
            with pytest.raises(NotImplementedError, match="steps many environments by itself"):
                call()


SCRIPT = """
import pickle, sys
from pathlib import Path
import numpy as np
from gymnasium import spaces
from marl_parallel import ParallelEnv

class Hull:
    steps = 0

class Ship:
    possible_agents = ["ship"]
    observation_space = spaces.Dict(ship=spaces.Box(-99, 99, (), np.float64))
    action_space = spaces.Dict(ship=spaces.Discrete(3))

    def __init__(self):
        self.hull, self.doubled = Hull(), lambda number: 2 * number

    def reset(self, *, seed=None, options=None):
        self.place = 0.0
        return {"ship": self.place}, {}

    def step(self, actions):
        assert isinstance(self.hull, Hull)
        self.place += self.doubled(actions["ship"]) * SPEED
        return {"ship": self.place}, {"ship": 1.0}, {"__all__": False}, {"__all__": False}, {}

SPEED, file = float(sys.argv[1]), Path("states")
with ParallelEnv([Ship] * 2, backend=sys.argv[2], num_workers=1) as env:
    if file.exists():
        env.load_state(pickle.loads(file.read_bytes()))
    else:
        env.reset()
    print([float(one["ship"]) for one in env.step([{"ship": 1}, {"ship": 2}])[0]])
    file.write_bytes(pickle.dumps(env.save_state()))
"""


def test_simulators_of_a_script_that_has_changed(tmp_path):
    """Its classes are not in a state: the present ones go on."""
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = []
    for arguments in (("1", "process"), ("10", "process"), ("100", "serial")):
        command = [sys.executable, "-W", "ignore", "script.py", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip())
    assert printed == ["[2.0, 4.0]", "[22.0, 44.0]", "[222.0, 444.0]"]


# -- the keys of saved bytes -------------------------------------------------------------------------------------------


def with_everything(**more: Any) -> ParallelEnv:
    """With all extensions that save something."""
    return ParallelEnv(
        [Voyage] * 2, num_workers=1, on_error="restart", replay=9, recycle=RecyclePolicy(max_episodes=9), **more
    )


@pytest.fixture
def renamed_extensions() -> Iterator[Callable[[], None]]:
    """Renames the classes of extensions when it is called."""
    kinds = [Rebuilds, Restarts, Recycling, Histories]
    names = [kind.__name__ for kind in kinds]

    def rename() -> None:
        for kind in kinds:
            kind.__name__ = f"Renamed{kind.__name__}"

    yield rename
    for kind, name in zip(kinds, names):
        kind.__name__ = name


def test_keys_are_fixed_texts(renamed_extensions):
    """They are in the files of users: a class that is renamed keeps its key, and finds its values."""
    with with_everything() as env:
        env.reset()
        env.restart([0])
        env.reset()
        states = env.save_state()
        restarts = env.stats().restarts
    assert {*from_bytes(states[0], "").extensions} == {"Rebuilds", "Restarts", "Recycling", "Histories"}
    renamed_extensions()
    with with_everything() as env:
        env.load_state(states)
        assert env.stats().restarts == restarts == 1
        assert from_bytes(env.save_state()[1], "").extensions.keys() == from_bytes(states[1], "").extensions.keys()


def test_unknown_keys_are_refused():
    """A state that another release has saved with parts that this one does not know; nothing is lost in silence."""
    with with_everything() as env:
        env.reset()
        state = env.save_state(env_ids=[1])[0]
        known = from_bytes(state, "")
        newer = to_bytes(known._replace(extensions={**known.extensions, "Tides": (1, 2)}))
        with pytest.raises(ValueError, match="environment 1: its state has the part 'Tides', which this release"):
            env.load_state([state, newer])
        env.load_state([state], env_ids=[1])


def test_each_extension_with_a_state_has_a_key():
    saving = [kind for kind in Extension.__subclasses__() if kind.save is not Extension.save]
    keys = [kind.saved_as for kind in saving]
    assert sorted(keys) == ["Histories", "Rebuilds", "Recycling", "Restarts"]
    assert not any(kind.saved_as for kind in Extension.__subclasses__() if kind not in saving)
