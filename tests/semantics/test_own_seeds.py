"""`seed="own"`: environments keep the seeds that they have, and get none."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from helpers.comparison import assert_same
from helpers.setups import BACKENDS, Setup
from helpers.start_methods import arguments as started
from simulators.pymarl_envs import Skirmish

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, arguments, make, planning
from marl_parallel.vector import (
    DummyVecEnv,
    GymnasiumVectorEnv,
    ShareDummyVecEnv,
    ShareSubprocVecEnv,
    SubprocVecEnv,
    pymarl_connections,
)

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

ACTIONS = {"a": 0}
PACKED = Setup("process", True, 1)


class Traffic:
    """Has a seed of its own, such as `sumo_seed` of SUMO-RL; one that is passed replaces it."""

    possible_agents = ("a",)
    observation_space = spaces.Dict(a=spaces.Box(0.0, 1.0, (), np.float64))
    action_space = spaces.Dict(a=spaces.Discrete(2))

    def __init__(self, sumo_seed: int = 7, seed: int | None = None, restarts: int = 0) -> None:
        self.seed = sumo_seed if seed is None else seed
        self.received: list[Any] = [("constructor", seed, restarts)]
        self.rng = np.random.default_rng(self.seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.received.append(("reset", seed))
        if seed is not None:
            self.seed, self.rng = seed, np.random.default_rng(seed)
        self.time = 0
        return {"a": self.rng.random()}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        over = self.time == 3
        return {"a": self.rng.random()}, {"a": 0.0}, {"a": over, "__all__": over}, {"a": False, "__all__": False}, {}

    def fail(self) -> None:
        raise ArithmeticError("no such luck")


class Undeclared(Traffic):
    """Does not declare its seed."""

    def __init__(self, sumo_seed: int = 7) -> None:
        super().__init__(sumo_seed)
        self.seed = None  # type: ignore[assignment]


def play(env: ParallelEnv, steps: int) -> list[Any]:
    return [[one["a"] for one in env.step([ACTIONS] * env.num_envs)[0]] for _ in range(steps)]


def test_like_environments_alone(setup, build):
    """The first episode and those after it are those of a plain loop that passes no seed."""
    constructors = [functools.partial(Traffic, sumo_seed=number) for number in (7, 3, 7, 9)]
    env = build(constructors, setup, seed="own")
    assert env.seed() == (7, 3, 7, 9)
    rngs = [np.random.default_rng(number) for number in (7, 3, 7, 9)]
    assert_same([one["a"] for one in env.reset()[0]], [np.array(rng.random()) for rng in rngs])
    for step in range(1, 8):
        drawn = [rng.random() for rng in rngs]
        if step % 3 == 0:
            drawn = [rng.random() for rng in rngs]
        assert_same(play(env, 1), [[*map(np.array, drawn)]])
    resets = [("reset", None)] * 3
    assert env.get_attr("received") == ([("constructor", None, 0), *resets],) * 4
    assert env.seed() == (7, 3, 7, 9)


def test_undeclared_seeds_are_none(backend_setup, build):
    env = build([Undeclared] * 2, backend_setup, seed="own")
    assert env.seed() == (None, None)
    env.reset()
    assert env.seed() == (None, None)
    assert all(action in (0, 1) for one in env.sample_actions() for action in one.values())
    env.reset(seed=[5, None])
    assert env.seed() == (5, None)


def test_a_seed_of_the_callers_is_passed_on(backend_setup, build):
    """It counts for that reset only: restarts construct and reset without one again."""
    events: list[Any] = []
    env = build([Traffic] * 2, backend_setup, seed="own", on_error="restart", on_restart=events.append)
    env.reset(seed=20)
    assert env.seed() == (20, 21)
    sampled = [env.sample_actions() for _ in range(20)]
    env.reset(seed=20)
    assert [env.sample_actions() for _ in range(20)] == sampled
    with pytest.raises(EnvError, match="no such luck"):
        env.call("fail", env_ids=[1])
    env.reset()
    assert env.seed() == (20, 7)
    assert env.get_attr("received")[1] == [("constructor", None, 1), ("reset", None), ("reset", None)]
    assert [event.seed for event in events] == [None]
    env.restart([0])
    env.reset(env_ids=[0])
    assert env.get_attr("received")[0] == [("constructor", None, 1), ("reset", None)]


def test_recycled_environments_get_no_seed(build):
    env = build([Traffic] * 2, PACKED, seed="own", recycle=RecyclePolicy(max_episodes=1))
    env.reset(seed=20)
    play(env, 7)
    assert all(
        received[0][:2] == ("constructor", None) and {*received[1:]} == {("reset", None)} and received[0][2] >= 1
        for received in env.get_attr("received")
    )
    assert env.seed() == (7, 7)


def needs_seed(seed: int) -> Traffic:
    return Traffic(seed)


class FromGymnasium:
    """A constructor that is a class, with a seed that has no default."""

    def __init__(self, env_id: int, *, seed: int) -> None:
        raise AssertionError("nothing is constructed")


@pytest.mark.parametrize("constructor", [needs_seed, FromGymnasium, lambda seed, **more: Traffic(seed)])
def test_constructors_that_need_a_seed_are_refused(constructor):
    text = r'it requires `seed`, but with seed="own" constructors get none. What to do: bind one'
    with pytest.raises(TypeError, match=rf"env_constructors\[1\] cannot be called: {text}"):
        ParallelEnv([Traffic, constructor], seed="own")
    with pytest.raises(TypeError, match=text):
        make(constructor, 2, seed="own")


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r'replay=5 is impossible with seed="own": .* leave replay out'):
        ParallelEnv([Traffic], seed="own", replay=5)
    with pytest.raises(TypeError, match="seed must be an integer, None or \"own\", got 'Own'"):
        ParallelEnv([Traffic], seed="Own")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'seed="own" is impossible with VMAS'):
        arguments.pool_seeds("own", range(2), "VMAS")
    with ParallelEnv([Traffic], seed="own", backend="serial") as env, pytest.raises(TypeError, match="got 'own'"):
        env.reset(seed="own")  # type: ignore[arg-type]


def test_facades_and_auto():
    with ParallelEnv([Traffic] * 2, "NEXT_STEP", "own", backend="auto") as env:
        assert env.plan is not None
        facade = GymnasiumVectorEnv(env)
        assert facade.np_random_seed == (7, 7)
        facade.reset()
        assert env.get_attr("received") == ([("constructor", None, 0), ("reset", None)],) * 2
        facade.reset(seed=3)
        assert facade.np_random_seed == (3, 4)


# -- process-wide generators -------------------------------------------------------------------------------------------


class Shared(Traffic):
    """Draws from process-wide generators, which its constructor seeds if it is passed a seed."""

    def __init__(self, sumo_seed: int | None = None) -> None:
        super().__init__()
        if sumo_seed is not None:
            random.seed(sumo_seed)
            np.random.seed(sumo_seed)

    def draw(self) -> tuple[float, float]:
        return random.random(), np.random.random()


def drawn_from(seed: int) -> list[tuple[float, float]]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    return [(python.random(), numpy.random_sample()) for _ in range(2)]


def test_no_two_workers_share_an_inherited_state(start_method):
    """Nor that of this process, from which they may have been forked."""
    random.seed(1)
    np.random.seed(1)
    state = random.getstate(), np.random.get_state()[1].tobytes()
    with ParallelEnv([Shared] * 2, seed="own", num_workers=2, **started(start_method)) as env:
        drawn = [*env.call("draw"), *env.call("draw"), *drawn_from(1)]
    assert len({*drawn}) == len({python for python, _ in drawn}) == len({numpy for _, numpy in drawn}) == 6
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == state


def test_what_a_constructor_seeds_stays(build):
    """Also for the next environment of that worker, as in a plain loop, and after a restart."""
    env = build([functools.partial(Shared, 5), Shared], PACKED, seed="own")
    assert [*env.call("draw")] == drawn_from(5)
    env.restart([1])
    assert [*env.call("draw", env_ids=[0])] != drawn_from(5)[:1]
    env.restart([0])
    assert [*env.call("draw")] == drawn_from(5)


def test_a_serial_backend_leaves_the_callers_generators_alone(build):
    random.seed(5)
    np.random.seed(5)
    env = build([Shared] * 2, Setup("serial", True, 1), seed="own")
    env.reset()
    assert [*env.call("draw")] == drawn_from(5)


@pytest.mark.parametrize("setup", [PACKED, Setup("serial", True, 1)], ids=str)
def test_isolated_generators(setup, build):
    """Each environment has those that its constructor has seeded, or its own ones."""
    random.seed(1)
    np.random.seed(1)
    constructors = [functools.partial(Shared, 5), Shared, functools.partial(Shared, 5), Shared]
    env = build(constructors, setup, seed="own", isolate_rng=True)
    env.reset()
    drawn = [*zip(*(env.call("draw") for _ in range(2)))]
    assert [*drawn[0]] == [*drawn[2]] == drawn_from(5)
    assert len({*drawn[1], *drawn[3], *drawn_from(5), *drawn_from(1)}) == 8


ISOLATED = [Setup("process", True, workers) for workers in (1, 2, 4)] + [
    Setup(backend, True, 2) for backend in (*BACKENDS, "portable") if backend not in ("thread", "process")
]


def flat(drawn: list[list[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(drawn)]


def draws_after(seeds: tuple[int, int], opened: Callable[[], Any]) -> list[list[tuple[float, float]]]:
    """Twice, what each of four environments draws, of a program that has seeded its generators."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    state = random.getstate(), np.random.get_state()[1].tobytes()
    env = opened()
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == state
    return [[*env.call("draw")] for _ in range(2)]


@pytest.fixture
def numbered(monkeypatch) -> Callable[[int], None]:
    """Sets how many `ParallelEnv`s the program has made."""
    return lambda made: monkeypatch.setattr(planning, "_made", itertools.count(made))


@pytest.mark.parametrize("setup", ISOLATED, ids=str)
def test_isolated_generators_derive_from_the_programs(setup, build, numbered):
    """From its seeds, the number of the `ParallelEnv` and of the environment; the same in all backends."""

    def draws(made: int, *seeds: int, on: Setup = setup) -> Any:
        numbered(made)
        return draws_after(seeds, lambda: build([Shared] * 4, on, seed="own", isolate_rng=True))  # type: ignore[arg-type]

    first = draws(0, 1, 2)
    assert draws(0, 1, 2, on=PACKED) == first
    assert len({*flat(first), *flat(draws(1, 1, 2))}) == 16
    if setup is not ISOLATED[0]:
        return
    for place, seeds in enumerate([(1, 3), (4, 2)]):  # each generator has its own seed
        other = draws(0, *seeds)
        assert [one[place] for one in other[0]] == [one[place] for one in first[0]]
        assert not {one[1 - place] for one in other[0]} & {one[1 - place] for one in first[0]}


@pytest.mark.parametrize("isolate_rng", [True, False])
def test_restarts_derive_other_states(isolate_rng, build, numbered):
    found = []
    for _ in range(2):
        numbered(0)
        random.seed(1)
        np.random.seed(2)
        env = build([Shared] * 2, Setup("process", True, 2), seed="own", isolate_rng=isolate_rng)
        drawn = [*env.call("draw")]
        for _ in range(2):
            env.restart([1])
            drawn += env.call("draw", env_ids=[1])
        found.append([*drawn, *env.call("draw")])
        assert len({*found[-1]}) == 6
    assert found[0] == found[1]


@pytest.mark.parametrize("setup", [PACKED, Setup("process", True, 2), Setup("portable", True, 2)], ids=str)
def test_shared_generators_derive_from_the_programs(setup, build, numbered):
    """With the same number of workers; and another `ParallelEnv` has other states."""
    found = []
    for made in (0, 0, 1):
        numbered(made)
        found.append(draws_after((1, 2), lambda: build([Shared] * 4, setup, seed="own")))
    assert found[0] == found[1]
    assert len({*flat(found[0]), *flat(found[2])}) == 16


def test_drop_ins_and_make(numbered):
    """Two vector environments of a program differ, and the program has the same ones when it runs again."""

    def opened() -> list[Any]:
        numbered(0)
        random.seed(1)
        np.random.seed(2)
        constructors = [Shared] * 3
        with contextlib.ExitStack() as stack:
            envs = [
                stack.enter_context(contextlib.closing(make_envs()))
                for make_envs in (
                    lambda: ShareSubprocVecEnv(constructors, num_workers=2),
                    lambda: SubprocVecEnv(constructors, num_workers=2),
                    lambda: make(Shared, 3, seed="own", isolate_rng=True, facade="share", num_workers=2),
                    lambda: pymarl_connections([Drawn] * 3, num_workers=2)[0].connections.parallel_env,
                    lambda: ShareDummyVecEnv(constructors, isolate_rng=True),
                    lambda: ShareDummyVecEnv(constructors),
                    lambda: DummyVecEnv(constructors),
                )
            ]
            return [[*env.call("draw")] for env in envs]

    first = opened()
    assert opened() == first
    assert len({*flat(first)}) == 21
    assert flat(first[-2:]) == _six_of_the_program()  # they use the generators of the program


class Drawn(Skirmish):
    """Draws from process-wide generators."""

    draw = Shared.draw


def _six_of_the_program() -> list[tuple[float, float]]:
    python, numpy = random.Random(1), np.random.RandomState(2)
    return [(python.random(), numpy.random_sample()) for _ in range(6)]


PROGRAM = """
import json, random
import numpy as np
from gymnasium import spaces
from marl_parallel.vector import SubprocVecEnv

class Drawing:
    possible_agents = ["a"]
    observation_space = spaces.Dict(a=spaces.Box(0.0, 1.0, (1,)))
    action_space = spaces.Dict(a=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(1, np.float32)}, {}

    def step(self, actions):
        raise NotImplementedError

    def draw(self):
        return random.random(), np.random.random()

np.random.seed(7)
drawn = []
for _ in range(2):
    envs = SubprocVecEnv([Drawing] * 3, num_workers=2)
    envs.reset()
    drawn.append([envs.call("draw"), envs.call("draw")])
    envs.close()
print(json.dumps(drawn))
"""


def test_a_program_that_seeds_numpy_alone():
    """What it did not seed is fresh in each run."""

    def run() -> Any:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert not done.returncode, done.stderr
        return np.array(json.loads(done.stdout)).reshape(12, 2)

    first, again = run(), run()
    assert np.array_equal(first[:, 1], again[:, 1])
    assert len(np.unique(first)) == len(np.unique([first[:, 0], again[:, 0]])) == 24
