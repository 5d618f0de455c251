"""Random generators of the caller's script that several environments share, such as a global `rng`."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from helpers.setups import Setup

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy
from marl_parallel.adapters import adapt
from marl_parallel.cli.replay import Outcome
from marl_parallel.cli.replay import replay as replay_file
from marl_parallel.core.pool.replay_file import read_crash
from marl_parallel.types import installed

pytestmark = pytest.mark.release_independent

SERIAL = Setup("serial", True, 1)
IN_TURN = [SERIAL, Setup("thread", True, 1)]
ELSEWHERE = [Setup("process", True, 2), Setup("portable", True, 2)]
if installed("ray"):
    ELSEWHERE = [*ELSEWHERE, Setup("ray", True, 2)]
DIFFERENT_WORKERS = [Setup("process", True, workers) for workers in (1, 5)]


class Drawing(gymnasium.Env):
    """All values are from `draw`."""

    observation_space = spaces.Box(0.0, 1.0, (), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.draw = self.draw if draw is None else draw
        self.offset = self.draw()

    def draw(self) -> float:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self.draw(), {}

    def step(self, action: int) -> Any:
        assert action < 2
        drawn = self.draw()
        return (self.offset + drawn) % 1.0, drawn, drawn < 0.3, False, {}


WAYS = {
    "global": ("Env", "class Env(Drawing):\n    def draw(self): return rng.random()", "global 'rng' of draw"),
    "bound": ("make", "def make(): return Drawing(rng.random)", "global 'rng' of make"),
    "method": ("make", "draw = rng.random\ndef make(): return Drawing(draw)", "global 'draw' of make"),
    "class attribute": (
        "Env", "class Env(Drawing):\n    rng = rng\n    def draw(self): return self.rng.random()",
        "attribute 'rng' of class Env",
    ),
    "default of a class": (
        "Env", "class Env(Drawing):\n    def __init__(self, r=rng): super().__init__(r.random)",
        "default argument 'r' of __init__",
    ),
    "default of a function": ("make", "def make(*, r=rng): return Drawing(r.random)", "default argument 'r' of make"),
    "closure": (
        "make", "def outer(inner):\n    return lambda: Drawing(inner.random)\nmake = outer(rng)",
        "variable 'inner' of <lambda>",
    ),
    "argument": ("make", "make = partial(lambda r: Drawing(r.random), r=rng)", "argument 'r'"),
    "attribute": ("make", "config = Config(rng=rng)\ndef make(): return Drawing(config.rng.random)", "attribute 'rng'"),
    "entry": ("make", "make = partial(lambda rngs: Drawing(rngs['x'][0].random), {'x': [rng]})", "entry 'x', item 0"),
    "RandomState": (
        "make", "state = RandomState(rng.integers(99))\ndef make(): return Drawing(state.random_sample)",
        "global 'state' of make",
    ),
    "random.Random": (
        "make", "python = Random(int(rng.integers(99)))\ndef make(): return Drawing(python.random)",
        "global 'python' of make",
    ),
    "MT19937": (
        "make", "mt = Generator(MT19937(rng.integers(99)))\ndef make(): return Drawing(mt.random)",
        "global 'mt' of make",
    ),
}  # fmt: skip
"""By name: the variable that is the constructor, the code of a script, and how the warning names the generator."""


class Config(SimpleNamespace):
    """Holds values."""


class Program:
    """A script that has one of the `WAYS`, with a generator that begins with this seed."""

    def __init__(self, way: str, seed: int = 3) -> None:
        name, code, self.named = WAYS[way]
        self.rng = np.random.default_rng(seed)
        names = {
            "__name__": "__main__", "Drawing": Drawing, "rng": self.rng, "Config": Config, "partial": functools.partial,
            "RandomState": np.random.RandomState, "Random": random.Random, "Generator": np.random.Generator,
            "MT19937": np.random.MT19937,
        }  # fmt: skip
        exec(code, names)
        self.make: Callable[[], Any] = names[name]
        self.generators: list[Any] = [self.rng, *(names[one] for one in ("state", "python", "mt") if one in names)]

    def states(self) -> list[str]:
        return [str(_state(one)) for one in self.generators]


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def programs(seed: int = 3) -> list[Program]:
    return [Program(way, seed) for way in WAYS]


def constructors_of(of_programs: list[Program]) -> list[Any]:
    """Two environments for each program."""
    return [program.make for program in of_programs for _ in range(2)]


ACTIONS = {"agent_0": 0}


def played(env: Any, steps: int = 6) -> list[list[float]]:
    """By time, the observation and reward of each environment."""
    seen = [[float(one["agent_0"]) for one in env.reset()[0]]]
    for _ in range(steps):
        observations, rewards, *_ = env.step([ACTIONS] * env.num_envs)
        seen.append([float(one["agent_0"]) for one in observations])
        seen.append([float(one["agent_0"]) for one in rewards])
    return seen


def in_a_loop(constructors: list[Callable[[], Any]], steps: int = 6) -> list[list[float]]:
    """`played`, in a plain loop."""
    envs = [make() for make in constructors]
    seen = [[float(env.reset()[0]) for env in envs]]
    for _ in range(steps):
        observations, rewards = [], []
        for env in envs:
            observation, reward, terminated, _, _ = env.step(0)
            observations.append(env.reset()[0] if terminated else observation)
            rewards.append(reward)
        seen += [observations, rewards]
    return seen


def about_generators(caught: Any) -> list[Any]:
    return [one for one in caught if "random generator" in str(one.message)]


@pytest.mark.parametrize("setup", IN_TURN, ids=str)
def test_this_process_uses_the_scripts_own(setup, build):
    """As in a plain loop, whose generators have the same states in the end."""
    ours, loop = programs(), programs()
    with pytest.warns(UserWarning, match="environments share random generators of your program") as caught:
        env = build(constructors_of(ours), setup)
    assert played(env) == in_a_loop(constructors_of(loop))
    assert [one.states() for one in ours] == [one.states() for one in loop]
    (warning,) = about_generators(caught)
    assert all(program.named in str(warning.message) for program in ours)


@pytest.mark.parametrize("setup", ELSEWHERE, ids=str)
def test_each_environment_has_its_own_in_workers(setup, build):
    """Its draws depend on its seed only, not on the worker, nor on the script's generator, which is left alone."""
    ours = programs()
    before = [one.states() for one in ours]
    with pytest.warns(UserWarning, match="environments share random generators of your program") as caught:
        env = build(constructors_of(ours), setup)
    seen = played(env)
    assert [one.states() for one in ours] == before
    assert len(about_generators(caught)) == 1
    assert all(program.named in str(caught[0].message) for program in ours)
    # The offset and the first two draws of the environments of each program differ.
    assert all(
        len({one[place] for one in seen[:3] for place in (at, at + 1)}) == 6 for at in range(0, 2 * len(WAYS), 2)
    )
    others = DIFFERENT_WORKERS if setup.backend == "process" else [ELSEWHERE[0]]
    for other in others:
        with pytest.warns(UserWarning, match="environments share random generators"):
            again = build(constructors_of(programs(seed=4)), other)
        assert played(again) == seen
        again.close()
    first = env.reset(seed=20)[0]
    env.step([ACTIONS] * env.num_envs)
    env.reset(seed=7)
    assert env.reset(seed=20)[0] == first


@pytest.mark.parametrize("way", ["global", "argument", "RandomState"])
def test_hybrid_has_both(way, build):
    """Worker 0, in this process, uses the script's own generator, and the others have copies."""
    ours, loop = Program(way), Program(way)
    with pytest.warns(UserWarning, match="environments share a random generator") as caught:
        env = build([ours.make] * 4, Setup("hybrid", True, 2))
    assert len(about_generators(caught)) == 1
    with pytest.warns(UserWarning, match="environments share a random generator"):
        workers = build([ours.make] * 4, ELSEWHERE[0])
    seen, of_workers = np.array(played(env)), np.array(played(workers))
    assert np.array_equal(seen[:, :2], in_a_loop([loop.make] * 2))
    assert np.array_equal(seen[:, 2:], of_workers[:, 2:])


def test_isolated_generators_are_the_same_in_all_backends(build):
    """Also in this process, which then leaves the script's generators alone."""
    seen = []
    for setup in (SERIAL, Setup("hybrid", True, 3), *ELSEWHERE[:1]):
        ours = programs()
        before = [one.states() for one in ours]
        with pytest.warns(UserWarning, match="environments share random generators"):
            env = build(constructors_of(ours), setup, isolate_rng=True)
        seen.append(played(env))
        assert [one.states() for one in ours] == before
    assert seen[0] == seen[1] == seen[2]


def test_restarts_and_recycling(build):
    """A new environment has another seed, and its neighbours draw on."""
    ways = ["global", "argument", "random.Random"]

    def results(workers: int, **how: Any) -> list[Any]:
        constructors = constructors_of([Program(way) for way in ways])
        with pytest.warns(UserWarning, match="environments share random generators"):
            env = build(constructors, Setup("process", True, workers), **how)
        seen = played(env, 3)
        if "recycle" not in how:
            env.step([{"agent_0": 2} if env_id % 3 == 0 else ACTIONS for env_id in range(6)])
        offsets = env.get_attr("offset")
        assert len({*offsets, *seen[0]}) == 12
        return [seen, offsets, [played(env, 2) for _ in range(2)], env.get_attr("offset")]

    first = results(1, on_error="restart")
    assert results(3, on_error="restart") == first
    # When environments are recycled depends on the others of their worker.
    recycled = results(2, recycle=RecyclePolicy(max_episodes=1))
    assert results(2, recycle=RecyclePolicy(max_episodes=1)) == recycled
    assert not {*recycled[-1]} & {*recycled[1]}


def test_own_seeds_derive_from_the_scripts_generator(build, monkeypatch):
    """So a script that seeds it has the same results again, and another `ParallelEnv` has others."""
    numbers = iter([0, 0, 0, 1])
    monkeypatch.setattr("marl_parallel.planning.count_made", lambda: next(numbers))

    def results(seed: int, workers: int) -> list[Any]:
        with pytest.warns(UserWarning, match="environments share random generators"):
            env = build(constructors_of(programs(seed)), Setup("process", True, workers), seed="own")
        return played(env)

    first, again, other, next_one = results(3, 1), results(3, 4), results(4, 1), results(3, 1)
    assert first == again
    assert all(len({*one}) == 2 * len(WAYS) for one in (first[0], other[0], next_one[0]))
    assert len({*first[0], *other[0], *next_one[0]}) == 6 * len(WAYS)


class Failing(Drawing):
    def step(self, action: int) -> Any:
        observation, reward, *flags = super().step(action)
        if self.draw() > 0.97:
            raise ArithmeticError(f"{observation} is too much")
        return observation, reward, *flags


@pytest.mark.parametrize("how", ["shared", "own"])
def test_replays(how, build, tmp_path, capsys):
    """An episode after the first one draws the same numbers again, also after a restart."""
    rng = np.random.default_rng(3)
    names = {"__name__": "__main__", "Failing": Failing, "rng": rng}
    exec("def make(r=rng): return Failing(r.random)", names)
    constructors: list[Any] = [names["make"]] * 2
    if how == "own":
        constructors = [functools.partial(names["make"], r=np.random.default_rng(seed)) for seed in (5, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        env = build(constructors, ELSEWHERE[0]._replace(num_workers=1), replay=50, replay_dir=tmp_path)
    with pytest.raises(EnvError, match="too much") as caught:
        played(env, 200)
    (path,) = tmp_path.glob("*.replay")
    if how == "shared":
        outcome = replay_file(path, debugger=False, until=None, timeout=None, in_process=True)
        assert outcome is Outcome.SAME_STEP
        assert read_crash(path).number > 0
        (text,) = [line for line in str(caught.value).splitlines() if "is too much" in line][:1]
        assert text.split(" is too much")[0].split()[-1] in capsys.readouterr().out


def test_saved_states(build):
    """They have the states of the generators, also of those that the simulator's pickle does not reach."""
    of_programs = [Program(way) for way in ("global", "argument", "RandomState", "random.Random")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        env = build(constructors_of(of_programs), Setup("process", True, 2))
        played(env, 3)
        saved = env.save_state()
        expected = [env.step([ACTIONS] * 8)[:2] for _ in range(5)]
        other = build(constructors_of(of_programs), Setup("process", True, 3))
        for one in (env, other):
            one.load_state(saved)
            assert [one.step([ACTIONS] * 8)[:2] for _ in range(5)] == expected


# -- no warning --------------------------------------------------------------------------------------------------------


def draws_of(rng: np.random.Generator) -> Callable[[], Any]:
    return functools.partial(Drawing, rng.random)


@pytest.mark.parametrize("setup", [*IN_TURN, *ELSEWHERE, Setup("hybrid", True, 2)], ids=str)
def test_generators_of_one_environment_keep_their_states(setup, build):
    """Environments that do not share a generator play as in a plain loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env = build([draws_of(np.random.default_rng(seed)) for seed in range(4)], setup)
        alone = build([draws_of(np.random.default_rng(9))], setup._replace(backend="process"))
    assert played(env) == in_a_loop([draws_of(np.random.default_rng(seed)) for seed in range(4)])
    assert played(alone) == in_a_loop([draws_of(np.random.default_rng(9))])


class Unpickled(Drawing):
    """Its `hidden` generator is not pickled."""

    hidden: Any = None

    def __init__(self) -> None:
        super().__init__(self.draw)

    def draw(self) -> float:
        return 0.5

    def __reduce__(self) -> Any:
        return Unpickled, ()


def test_generators_that_no_pickle_reaches(build):
    holder = Unpickled()
    holder.hidden = np.random.default_rng()
    unused = np.random.default_rng()
    names = {"__name__": "__main__", "holder": holder, "unused": unused}
    exec("def make(): return type(holder)()", names)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for setup in (SERIAL, ELSEWHERE[0], Setup("hybrid", True, 2)):
            played(build([names["make"]] * 2, setup))


@pytest.mark.parametrize("setup", [SERIAL, ELSEWHERE[0]], ids=str)
def test_functions_of_process_wide_generators(setup, build):
    """`from random import random` in a script draws from the generator of the process, like the module's function."""
    names = {"__name__": "__main__", "Drawing": Drawing, "of_python": random.random, "of_numpy": np.random.rand}
    exec("def make(): return Drawing(lambda: (of_python() + of_numpy()) % 1)", names)
    by_module = {"__name__": "__main__", "Drawing": Drawing, "random": random, "np": np}
    exec("def make(): return Drawing(lambda: (random.random() + np.random.rand()) % 1)", by_module)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for make in (names["make"], by_module["make"]):
            seen.append(played(build([make] * 3, setup, isolate_rng=True)))
    assert seen[0] == seen[1]
    assert len({*seen[0][0]}) == 3


# -- where generators are ----------------------------------------------------------------------------------------------


def test_measurements_for_auto(build):
    """They leave the generator alone, and do not warn."""
    program = Program("global")
    before = program.states()
    with pytest.warns(UserWarning, match="environments share a random generator") as caught:
        env = ParallelEnv([program.make] * 2, backend="auto-hybrid")
    with env:
        chosen = env.plan["arguments"]["backend"]
        assert len(env.plan["batch_ms"]) > 1 or chosen == "process"
        assert (program.states() == before) is (chosen == "process")  # constructors draw, too
    assert len(about_generators(caught)) == 1


def test_adapters_and_registered_environments(build):
    names = {
        "__name__": "__main__",
        "Drawing": Drawing,
        "rng": np.random.default_rng(3),
        "gymnasium": gymnasium,
        "adapt": adapt,
    }
    code = """
class Shifted(gymnasium.Wrapper):
    def reset(self, **more): return rng.random(), {}
class Registered(Drawing):
    state = rng
    def draw(self): return self.state.random()
adapter = lambda env: adapt(Shifted(env))
"""
    exec(code, names)
    gymnasium.register("OfScript-v0", entry_point=names["Registered"])
    try:
        registered = functools.partial(gymnasium.make, "OfScript-v0")
        check("entry 'OfScript-v0', attribute 'state' of class Registered", build, registered)
    finally:
        del gymnasium.registry["OfScript-v0"]
    check(
        "global 'Shifted' of <lambda>, attribute 'reset' of class Shifted, global 'rng' of reset",
        build,
        constant,
        names["adapter"],
    )


def check(named: str, build: Any, constructor: Any, adapter: Any = None) -> None:
    seen = []
    for workers in (1, 2):
        with pytest.warns(UserWarning, match="environments share a random generator") as caught:
            env = build([constructor] * 4, Setup("process", True, workers), adapter=adapter)
        seen.append(played(env))
        assert named in str(caught[0].message)
    assert seen[0] == seen[1]
    assert len({*seen[0][0]}) == 4


def constant() -> Drawing:
    return Drawing(lambda: 0.5)


SCRIPT = """
import json, sys, warnings
import numpy as np, gymnasium
from gymnasium import spaces
from marl_parallel import ParallelEnv

rng = np.random.default_rng()

class Dice(gymnasium.Env):
    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0.0, 1.0, (), np.float64)

    def reset(self, *, seed=None, options=None):
        return rng.random(), {}

    def step(self, action):
        return rng.random(), 0.0, False, False, {}

found = {}
for backend, workers in json.loads(sys.argv[1]):
    before = str(rng.bit_generator.state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = ParallelEnv([Dice] * 4, backend=backend, num_workers=workers)
    about = [(str(one.message), one.filename) for one in caught if "random generator" in str(one.message)]
    untouched = str(rng.bit_generator.state) == before
    with env:
        found[f"{backend} {workers}"] = [float(one["agent_0"]) for one in env.reset()[0]], about, untouched
print(json.dumps(found))
"""


def test_a_script(tmp_path):
    """The warning comes once, names the variable and points to the line of the script."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    runs = []
    for backends in ([("serial", 1), ("thread", 2), ("process", 2), ("hybrid", 2)], [("process", 4), ("serial", 1)]):
        done = subprocess.run(
            [sys.executable, str(path), json.dumps(backends)], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert not done.returncode, done.stderr
        runs.append(json.loads(done.stdout))
    for drawn, about, untouched in (run for one in runs for run in one.values()):
        assert len({*drawn}) == 4
        ((text, file),) = about
        assert "environments share a random generator of your program: `rng` of the script." in text
        assert Path(file) == path
        assert untouched
    assert runs[0]["process 2"][0] == runs[1]["process 4"][0]
    assert runs[0]["serial 1"][0] != runs[1]["serial 1"][0]


LOOKS_UP = """
import json, random, sys, warnings
import numpy as np, gymnasium
from gymnasium import spaces
from marl_parallel import ParallelEnv

rng, state, python = np.random.default_rng(), np.random.RandomState(3), random.Random()
several, draw = [np.random.default_rng()], random.Random().random

class Hidden(gymnasium.Env):
    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0.0, 1.0, (6,), np.float64)
    own = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        drawn = rng.random(), state.random_sample(), python.random(), several[0].random(), draw(), self.own.random()
        return np.array(drawn), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}

class Late(Hidden):
    def reset(self, *, seed=None, options=None):
        if not hasattr(self, "late"):
            self.late = getattr(sys.modules[__name__], "later")
        return np.full(6, self.late.random()), {}

def of_name(): return globals()["Hidden"]()
def late(): return eval("Late")()

warnings.simplefilter("error")
later = np.random.default_rng()
found = []
for make in (of_name, late):
    for workers in (1, 2):
        with ParallelEnv([make] * 4, backend="process", num_workers=workers) as env:
            seen = [[[*one["agent_0"]] for one in env.reset()[0]]]
            for _ in range(2):
                seen.append([[*one["agent_0"]] for one in env.step([{"agent_0": 0}] * 4)[0]])
            found.append(seen)
print(json.dumps(found))
"""


def test_generators_that_are_looked_up_by_name(tmp_path):
    """Each environment has states of its own, in any number of workers; nobody may look them up, so nothing warns."""
    path = tmp_path / "script.py"
    path.write_text(LOOKS_UP)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    found = [np.array(seen) for seen in json.loads(done.stdout)]  # by constructor and workers, time, environment
    for one_worker, two_workers in zip(found[::2], found[1::2]):
        assert np.array_equal(one_worker, two_workers)
        for column in range(6):
            assert len({*one_worker[..., column].ravel()}) == 12


SPACES: dict[str, Callable[[], spaces.Space[Any]]] = {
    "Discrete": lambda: spaces.Discrete(1 << 40),
    "Box": lambda: spaces.Box(0.0, 1.0, (), np.float64),
    "Dict": lambda: spaces.Dict(a=spaces.Tuple([spaces.Discrete(1 << 40)])),
}


def _drawn(space: spaces.Space[Any]) -> float:
    sample: Any = space.sample()
    number = float(sample["a"][0] if isinstance(sample, dict) else sample)
    return number / (1 << 40) if number > 1 else number


@pytest.mark.parametrize("kind", SPACES)
def test_generators_of_spaces_are_not_exchanged(kind, build):
    """No warning, and in no two environments the same draws, where a simulator samples from a space of the script."""
    space = SPACES[kind]()
    space.seed(5)
    names = {"__name__": "__main__", "Drawing": Drawing, "space": space, "drawn": _drawn}
    exec("class Env(Drawing):\n    sampled = space\n    def draw(self): return drawn(self.sampled)", names)
    of_argument = [functools.partial(Drawing, functools.partial(_drawn, space)) for _ in range(2)]
    for constructors in ([names["Env"]] * 2, of_argument):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for setup in (SERIAL, ELSEWHERE[0]):
                seen = [played(build(constructors, setup), 3) for _ in range(2)]
                assert len({*np.ravel(seen[0])}) == np.size(seen[0])
                assert (seen[0] == seen[1]) is (setup is not SERIAL)  # there, the space of the script is sampled
    alone = [functools.partial(Drawing, functools.partial(_drawn, one)) for one in _seeded(kind)]
    played_alone = played(build(alone, ELSEWHERE[0]), 3)
    assert played_alone == in_a_loop(
        [functools.partial(Drawing, functools.partial(_drawn, one)) for one in _seeded(kind)], 3
    )
    with pytest.warns(UserWarning, match="environments share a random generator") as caught:
        build([functools.partial(_with_both, space, space.np_random)] * 2, ELSEWHERE[0])
    assert len(about_generators(caught)) == 1


def _seeded(kind: str) -> list[spaces.Space[Any]]:
    of_kind = [SPACES[kind]() for _ in range(2)]
    for seed, space in enumerate(of_kind):
        space.seed(seed)
    return of_kind


def _with_both(space: spaces.Space[Any], rng: np.random.Generator) -> Drawing:
    return Drawing(lambda: rng.random())


def test_restarts_of_environments_with_their_own(build):
    """They do not repeat their episodes, and their neighbours draw on."""
    constructors = [draws_of(np.random.default_rng(seed)) for seed in range(4)]
    found = []
    for workers in (1, 2):
        env = build(constructors, Setup("process", True, workers))
        seen = played(env, 2)
        env.restart([1])
        after = played(env, 2)
        assert not {one[1] for one in after} & {one[1] for one in seen}
        found.append((seen, after))
    assert found[0] == found[1]
    alone = in_a_loop([draws_of(np.random.default_rng(seed)) for seed in range(4)], 2)
    assert found[0][0] == alone
