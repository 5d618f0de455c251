"""`isolate_rng=True`: simulators that draw from process-wide generators do not depend on their neighbours."""

from __future__ import annotations

import functools
import importlib
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same
from helpers.setups import ALL_SETUPS, Setup
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.crashing import seed_of

from marl_parallel import ParallelEnv, RecyclePolicy
from marl_parallel.core.worker import generators
from marl_parallel.core.worker.generators import GeneratorStates, seed_generators
from marl_parallel.types import installed

HAS_TORCH = installed("torch")
ACTIONS = {"a": 0}
SPACE = spaces.Box(-np.inf, np.inf, (4,), np.float64)
SETUPS = [setup for setup in ALL_SETUPS if setup.backend != "thread"]


class Drawing(PettingZooEnv):
    """Episodes of a length drawn at their beginning; all draws are from process-wide generators."""

    metadata = {"name": "drawing", "render_modes": ["rgb_array"]}  # noqa: RUF012
    possible_agents = ["a"]  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self) -> None:
        if HAS_TORCH:
            import torch  # noqa: F401
        self.agents: list[str] = []
        self.offset = random.random()

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACE

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def _drawn(self) -> dict[str, np.ndarray]:
        torch = sys.modules["torch"].rand(()).item() if HAS_TORCH else 0.0
        return {"a": np.array([self.offset, random.random(), np.random.random(), torch])}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents, self.left = ["a"], random.randint(1, 4)
        return self._drawn(), {"a": {}}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.left -= 1
        over = self.left == 0
        self.agents = [] if over else ["a"]
        return self._drawn(), {"a": np.random.normal()}, {"a": over}, {"a": False}, {"a": {}}

    def render(self) -> np.ndarray:
        return np.full((1, 1, 3), random.randint(0, 255), np.uint8)

    def state(self) -> np.ndarray:
        return np.array([np.random.random()])

    @property
    def state_space(self) -> spaces.Space:
        return spaces.Box(0.0, 1.0, (1,), np.float64)

    def die(self) -> None:
        sys.exit(3)

    def throw(self) -> float:
        return random.random()


class Generators:
    """What `random`, `numpy.random` and torch draw, but of objects."""

    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.python, self.numpy = random.Random(seed), np.random.RandomState(seed % 2**32)
        if HAS_TORCH:
            import torch

            self.torch = torch.Generator().manual_seed(seed)

    def draw(self) -> list[float]:
        of_torch = 0.0
        if HAS_TORCH:
            import torch

            of_torch = torch.rand((), generator=self.torch).item()
        return [self.python.random(), self.numpy.random_sample(), of_torch]


class Reference:
    """One `Drawing` in a plain loop, with generators of its own."""

    def __init__(self, seed: int) -> None:
        self.generators = Generators(seed)
        self.offset = self.generators.python.random()

    def reset(self, seed: int | None = None) -> np.ndarray:
        if seed is not None:
            self.generators = Generators(seed)
        self.left = self.generators.python.randint(1, 4)
        return self._drawn()

    def _drawn(self) -> np.ndarray:
        return np.array([self.offset, *self.generators.draw()])

    def step(self) -> tuple[np.ndarray, float, bool]:
        """An episode that ends is followed by the next one, as of "SAME_STEP"."""
        self.left -= 1
        over = self.left == 0
        observed, reward = self._drawn(), self.generators.numpy.normal()
        return self.reset() if over else observed, reward, over


def compare(env: ParallelEnv, references: list[Reference], steps: int) -> None:
    for _ in range(steps):
        observations, rewards, terminateds, _, _ = env.step([ACTIONS] * len(references))
        expected = [one.step() for one in references]
        assert_same(observations, tuple({"a": observed} for observed, *_ in expected))
        assert [one["a"] for one in rewards] == [reward for _, reward, _ in expected]
        assert [one["__all__"] for one in terminateds] == [over for *_, over in expected]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_like_plain_loops(setup, build):
    """With any number of workers; of all resets, only one with a seed of the caller's seeds the generators."""
    env = build([Drawing] * 4, setup, isolate_rng=True)
    references = [Reference(42 + i) for i in range(4)]
    assert_same(env.reset()[0], tuple({"a": one.reset()} for one in references))
    compare(env, references, 20)
    assert_same(env.reset(env_ids=[2, 1])[0], tuple({"a": references[i].reset()} for i in (2, 1)))
    compare(env, references, 5)
    assert_same(
        env.reset(seed=[7, None, 7, 8])[0],
        tuple({"a": references[i].reset(seed)} for i, seed in enumerate([7, None, 7, 8])),
    )
    compare(env, references, 5)


@pytest.mark.parametrize(
    "setup", [Setup("process", True, 1), Setup("process", False, 2), Setup("serial", True, 1)], ids=str
)
def test_other_calls(setup, build):
    """`call`, `render` and `state` draw from the generators of their environment, too."""
    env = build([Drawing] * 3, setup, isolate_rng=True)
    references = [Reference(42 + i) for i in range(3)]
    env.reset()
    for one in references:
        one.reset()
    assert list(env.call("throw", env_ids=[1])) == [references[1].generators.python.random()]
    assert [frame[0, 0, 0] for frame in env.render(tile=False)] == [
        one.generators.python.randint(0, 255) for one in references
    ]
    assert [float(one[0]) for one in env.state()] == [one.generators.numpy.random_sample() for one in references]
    compare(env, references, 10)


def test_send_and_recv(build):
    env = build([Drawing] * 4, Setup("process", True, 2), isolate_rng=True)
    references = [Reference(42 + i) for i in range(4)]
    env.reset_async()
    first = set(range(4))
    for _ in range(60):
        batch = env.recv(min_envs=1)
        for env_id, observed in zip(batch.env_ids, batch.observations):
            one = references[env_id]
            expected = one.reset() if env_id in first else one.step()[0]
            first.discard(env_id)
            assert_same(observed, {"a": expected})
        env.send([ACTIONS] * len(batch.env_ids), batch.env_ids)


@pytest.mark.parametrize("setup", [Setup("process", True, 1), Setup("process", True, 2)], ids=str)
def test_recycled_and_restarted(setup, build):
    """New environments have generators with their own seeds, and change nothing for the others."""
    env = build([Drawing] * 2, setup, isolate_rng=True, recycle=RecyclePolicy(max_episodes=3))
    references, left = [Reference(42 + i) for i in range(2)], [3, 3]
    env.reset()
    for one in references:
        one.reset()
    rebuilds = [0, 0]
    for _ in range(60):
        observations, *_ = env.step([ACTIONS] * 2)
        for i, observed in enumerate(observations):
            expected, _, over = references[i].step()
            left[i] -= over
            if left[i] == 0:
                rebuilds[i] += 1
                references[i], left[i] = Reference(seed_of(42, i, rebuilds[i])), 3
                expected = references[i].reset()
            assert_same(observed, {"a": expected})
    assert sum(rebuilds) >= 6
    env.restart([1])
    again = Reference(seed_of(42, 1, rebuilds[1] + 1))
    assert_same(env.reset(env_ids=[1])[0], ({"a": again.reset()},))


def test_restarted_in_this_thread(build):
    env = build([Drawing] * 2, Setup("serial", True, 1), isolate_rng=True)
    env.reset()
    env.step([ACTIONS] * 2)
    env.restart([1])
    again, other = Reference(seed_of(42, 1, 1)), Reference(42)
    other.reset()
    other.step()
    assert_same(env.reset(env_ids=[1])[0], ({"a": again.reset()},))
    observations, *_ = env.step([ACTIONS] * 2)
    assert_same(observations, ({"a": other.step()[0]}, {"a": again.step()[0]}))


class SeedsInConstructor(Drawing):
    """Seeds the generators in its constructor, with a seed of its own, as many training repositories do."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        if HAS_TORCH:
            import torch

            torch.manual_seed(seed)
        super().__init__()

    def reset(self) -> tuple[dict, dict]:  # type: ignore[override]
        return super().reset()


class TakesSeedInReset(SeedsInConstructor):
    """Its `reset` takes a seed that it does not use."""

    def reset(self, seed: int | None = None) -> tuple[dict, dict]:  # type: ignore[override]
        return super().reset()


def of_own_seeds(first: int) -> list[Any]:
    """Constructors with seeds that are bound, and with others, of which only they know."""
    bound = [
        functools.partial(kind, first + 1000 * i)
        for i, kind in enumerate([SeedsInConstructor, TakesSeedInReset, SeedsInConstructor, TakesSeedInReset])
    ]
    return [*bound[:2], *(lambda make=make: make() for make in bound[2:])]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_constructors_that_seed(setup, build):
    """Their seeds decide what is played, with any number of workers, also after a restart and a fault."""
    played = []
    for first in (1, 2):
        env = build(of_own_seeds(first), setup, isolate_rng=True, on_error="restart")
        references = [Reference(first + 1000 * i) for i in range(4)]
        observations, _ = env.reset()
        assert_same(observations, tuple({"a": one.reset()} for one in references))
        compare(env, references, 10)
        played.append(np.array([one["a"][:3] for one in env.step([ACTIONS] * 4)[0]]))
        for one in references:
            one.step()
        env.restart([2])
        references[2] = Reference(first + 2000)
        assert_same(env.reset(env_ids=[2])[0], ({"a": references[2].reset()},))
        compare(env, references, 5)
        with pytest.raises(Exception, match="SystemExit"):
            env.call("die", env_ids=[0])
        references[0] = Reference(first)
        env.step([ACTIONS] * 4)  # reports the restart, with the first observation of the new environment
        references[0].reset()
        for one in references[1:]:
            one.step()
        compare(env, references, 5)
        assert_same(
            env.reset(seed=[7, None, None, None])[0],
            ({"a": references[0].reset(7)}, *({"a": one.reset()} for one in references[1:])),
        )
    assert not np.isin(*played).any()


# As much of torch as is used here, for environments that have none.
FAKE_TORCH = """
import numpy as np

class Generator:
    def __init__(self):
        self.drawn = np.random.default_rng()
    def manual_seed(self, seed):
        self.drawn = np.random.default_rng(seed)
    def get_state(self):
        return self.drawn.bit_generator.state
    def set_state(self, state):
        self.drawn.bit_generator.state = state

default_generator = Generator()
manual_seed = default_generator.manual_seed

def rand(_):
    return default_generator.drawn.random(1)[0]
"""


class ImportsTorch(Drawing):
    """The first in its process that imports torch, or what is called so; seeds its generator only with a seed."""

    def __init__(self, folder: str, seed: int | None = None) -> None:
        super().__init__()
        sys.path.insert(0, folder)
        import torch

        sys.path.remove(folder)
        self.offset = torch.rand(()).item()
        if seed is not None:
            torch.manual_seed(seed)

    def _drawn(self) -> dict[str, np.ndarray]:
        return {"a": np.array([self.offset, sys.modules["torch"].rand(()).item()])}

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0.0, 1.0, (2,), np.float64)


@pytest.mark.parametrize("isolate_rng", [False, True])
def test_constructors_that_import_torch(isolate_rng, build, tmp_path):
    """Its generator is seeded as soon as it is imported, and a seed of the constructor's stays."""
    if not HAS_TORCH:
        (tmp_path / "torch.py").write_text(FAKE_TORCH)

    def first(seed: int) -> np.ndarray:
        """By environment, what it draws in its constructor and in its first reset."""
        constructors = [functools.partial(ImportsTorch, str(tmp_path), own) for own in (5, None)]
        env = build(constructors, Setup("process", True, 2), seed=seed, isolate_rng=isolate_rng)
        return np.array([one["a"] for one in env.reset()[0]])

    one, other = first(1), first(2)
    assert np.array_equal(one, first(1))
    assert one[0, 1] == other[0, 1]
    assert one[1, 0] == other[0, 0]  # both have the seed 2
    assert len(np.unique([one, other])) == 6


def test_the_callers_generators_are_left_alone(build):
    """Also in line, where they are those of the simulators."""
    random.seed(1)
    np.random.seed(2)
    expected = random.Random(1).random(), np.random.RandomState(2).random_sample()
    env = build([Drawing] * 2, Setup("serial", True, 1), isolate_rng=True)
    env.reset()
    env.step([ACTIONS] * 2)
    with pytest.raises(Exception, match="SystemExit"):
        env.call("die", env_ids=[1])
    assert (random.random(), np.random.random()) == expected


def test_off_by_default(build):
    """Then neighbours in one process draw from one stream."""
    results = []
    for workers in (1, 2):
        env = build([Drawing] * 2, Setup("process", True, workers))
        results.append([one["a"][1] for one in env.reset()[0]])
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"isolate_rng": 1}, TypeError, "must be True or False"),
        ({"isolate_rng": None}, TypeError, "must be True or False"),
        ({"isolate_rng": True, "backend": "thread"}, ValueError, "impossible with threads"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong: dict[str, Any], error, text):
    with pytest.raises(error, match=text):
        ParallelEnv([Drawing], **wrong)


class OldFinder:
    """A finder of modules as until Python 3.3, which old releases of `six` still install."""

    def find_module(self, name: str, path: Any = None) -> None:
        return None


class LooksForTorch(Drawing):
    """Does without torch if it is not installed."""

    def __init__(self) -> None:
        super().__init__()
        finder = OldFinder()
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module("torch")
        except ImportError:
            pass
        finally:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]


def test_old_finders_of_modules(build):
    """They are left out where a worker waits for the import of torch."""
    env = build([LooksForTorch] * 2, Setup("process", True, 2))
    assert len(env.reset()[0]) == 2


def draw(kind: str) -> Any:
    """Draws of NumPy's process-wide generator that use up its state in different ways."""
    if kind == "other generator":
        np.random.set_bit_generator(np.random.PCG64(int(np.random.randint(9))))
        return np.random.random()
    if kind == "seed":
        np.random.seed(int(np.random.randint(99)))
        return np.random.random()
    draws: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "one number": np.random.random,
        "one normal number": np.random.randn,  # another one waits
        "many": lambda: np.random.random(700).sum(),
        "python": random.random,
        "python's normal": lambda: random.gauss(0.0, 1.0),
    }
    return draws[kind]()


KINDS = ["nothing", "one number", "many", "python", "python's normal", "seed", "one normal number"]


@pytest.mark.parametrize(
    "kinds", [KINDS, KINDS[:-1], [*KINDS, "other generator"]], ids=["normal numbers", "no normal ones", "replaced"]
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_states_of_environments_are_those_of_separate_processes(kinds, in_memory, monkeypatch):
    """In any order of environments and draws, the numbers of each are those it would draw by itself."""
    if not in_memory:  # as with another layout of the generators
        monkeypatch.setattr(generators, "_memory_at", lambda address, size: memoryview(bytes(size)))
    rng = np.random.default_rng(3)
    python, numpy, generator = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    plan = [(int(rng.integers(3)), str(rng.choice(kinds))) for _ in range(600)]
    try:
        states = GeneratorStates()
        drawn: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for env_id in drawn:
            states.switch(env_id)
            np.random.set_bit_generator(np.random.MT19937(env_id))
            seed_generators(env_id)
        for env_id, kind in plan:
            states.switch(env_id)
            drawn[env_id].append(draw(kind))
        for env_id, numbers in drawn.items():
            np.random.set_bit_generator(np.random.MT19937(env_id))
            seed_generators(env_id)
            assert [draw(kind) for one, kind in plan if one == env_id] == numbers
    finally:
        np.random.set_bit_generator(generator)
        np.random.set_state(numpy)
        random.setstate(python)


def test_states_that_are_put_back_have_the_normal_number_that_waits():
    """Beside the same memory: it had been drawn in the meantime."""
    numpy = np.random.get_state()
    try:
        states = GeneratorStates()
        states.switch(0)
        np.random.seed(5)
        np.random.randn()
        saved = states.of(0)
        expected = np.random.randn()
        states.switch(1)
        np.random.seed(6)
        states.put(0, saved)
        states.switch(1)
        states.switch(0)
        assert np.random.randn() == expected
    finally:
        np.random.set_state(numpy)
