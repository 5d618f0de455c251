"""Seeds for constructors that pass `**kwargs` on, and warnings if a seed reaches no simulator."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo.utils import aec_to_parallel, parallel_to_aec
from pettingzoo.utils.conversions import aec_wrapper_fn, parallel_wrapper_fn
from simulators.deterministic import Hunt
from simulators.registered import Scenario

from marl_parallel import ParallelEnv, make
from marl_parallel.adapters.attributes import reset_keywords, signature
from marl_parallel.core.worker.constructors import construct_one

pytestmark = pytest.mark.in_turn


def passes_on(**kwargs: Any) -> Scenario:
    return Scenario(**kwargs)


def named(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@named
def wrapped(seed: int, env_id: int, size: int = 2) -> Scenario:
    return Scenario(size, seed, env_id=env_id)


@functools.wraps(wrapped)
def fills_arguments() -> Scenario:
    """Has the signature of the wrapped function, but passes no arguments to it."""
    return Scenario(9)


make_scenario = functools.partial(gymnasium.make, disable_env_checker=True)
CONSTRUCTORS = [
    (functools.partial(make_scenario, "registered/Scenario-v1"), {"size": 7, "seed": 43}),
    (functools.partial(make_scenario, id="registered/Scenario-v1", size=3), {"size": 3, "seed": 43}),
    (functools.partial(make_scenario, "registered/Scenario"), {"size": 7, "seed": 43}),
    (functools.partial(make_scenario, "registered/Scenario-v1", seed=6), {"size": 7, "seed": 6}),
    (functools.partial(make_scenario, "registered/Fixed-v0"), {"size": 1, "seed": 5}),
    (functools.partial(make_scenario, "registered/WithoutSeed-v0"), {"size": 1, "seed": 42}),
    (functools.partial(make_scenario, gymnasium.spec("registered/Scenario-v1")), {"size": 7, "seed": 43}),
    (gymnasium.spec("registered/Scenario-v1").make, {"size": 7, "seed": 43}),
    (functools.partial(named(gymnasium.make), "registered/Scenario-v1"), {"size": 7, "seed": 43}),
    (wrapped, {"size": 2, "seed": 43, "env_id": 1}),
    (functools.partial(wrapped, size=4), {"size": 4, "seed": 43, "env_id": 1}),
    (fills_arguments, {"size": 9, "seed": 42}),
    (passes_on, {"size": 1, "seed": 42}),
    (lambda: gymnasium.make("registered/Scenario-v1"), {"size": 7, "seed": None}),
]  # fmt: skip


@pytest.mark.parametrize(("constructor", "received"), CONSTRUCTORS)
def test_seed_passes_through_known_makers(constructor, received):
    env = construct_one(constructor, seed=43, env_id=1)
    assert env.unwrapped.received == received


def test_gymnasium_make_with_module_and_id():
    """`module:id`, as SMARTS documents it."""
    constructor = functools.partial(make_scenario, "simulators.registered:registered/Scenario-v0")
    assert construct_one(constructor, seed=43, env_id=1).unwrapped.received["seed"] == 43


@pytest.mark.parametrize("name", ["nowhere:Scenario-v0", "registered/Nowhere-v0", "a b", None])
def test_unknown_ids_are_left_to_the_maker(name):
    with pytest.raises(Exception) as expected:  # noqa: PT011  # whatever Gymnasium raises
        gymnasium.make(name)
    with pytest.raises(type(expected.value)) as caught:
        construct_one(functools.partial(gymnasium.make, name), seed=1, env_id=0)
    assert str(caught.value) == str(expected.value)


class Seeded(Hunt):
    """A PettingZoo environment whose constructor takes a seed."""

    def __init__(self, seed: int = -1, env_id: str = "name of a map") -> None:
        super().__init__()
        self.received = seed, env_id


def seeded_aec(seed: int = -1, env_id: str = "name of a map") -> Any:
    return parallel_to_aec(Seeded(seed, env_id))


@pytest.mark.parametrize(
    "constructor",
    [parallel_wrapper_fn(seeded_aec), aec_wrapper_fn(Seeded), parallel_wrapper_fn(aec_wrapper_fn(Seeded))],
)
def test_seed_passes_through_pettingzoo_conversions(constructor):
    """`env_id` does not: in other projects' signatures it means something else."""
    env = construct_one(constructor, seed=43, env_id=1)
    parallel = env if hasattr(env, "step") and not hasattr(env, "last") else aec_to_parallel(env)
    inner = parallel
    while not isinstance(inner, Seeded):
        inner = getattr(inner, "aec_env", None) or inner.env
    assert inner.received == (43, "name of a map")


def test_gymnasium_make_gets_different_seeds(backend_setup, build):
    """On every backend, equal to a plain loop that passes the seed itself."""
    constructor = functools.partial(make_scenario, "registered/Scenario-v1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env = build([constructor] * 3, backend_setup, seed=11)
        observations, _ = env.reset()
    assert env.seed() == (11, 12, 13)
    for observed, seed in zip(observations, (11, 12, 13)):
        np.testing.assert_array_equal(observed["car"], np.random.default_rng(seed).random(2))


def test_make_passes_the_seed():
    kwargs = {"id": "registered/Scenario-v1", "disable_env_checker": True}
    with make("gymnasium:make", 2, env_kwargs=kwargs, seed=11, num_workers=1) as env:
        assert env.seed() == (11, 12)


# -- warnings ----------------------------------------------------------------------------------------------------------


def seed_warnings(constructors: list[Any], steps: Any = lambda env: env.reset(), **arguments: Any) -> list[str]:
    """The texts of the warnings of a start and a first reset."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ParallelEnv(constructors, **{"backend": "serial", **arguments}) as env:
            steps(env)
            env.reset()
    return [str(one.message) for one in caught if one.category is UserWarning]


def test_equal_declared_seeds_warn_once(backend_setup, build):
    """Whether they share a worker or not."""
    env = build([passes_on] * 3, backend_setup)
    with pytest.warns(UserWarning, match=r"environments \[0, 1, 2\] declare the same seed, 42") as caught:
        env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env.reset(seed=1)
    (warning,) = [one for one in caught if one.category is UserWarning]
    assert "`lambda seed: make_env(seed=seed)`" in str(warning.message)


def test_seed_warning_points_at_the_callers_reset():
    with ParallelEnv([passes_on] * 2, backend="serial") as env, pytest.warns(UserWarning, match="same seed") as caught:
        env.reset()
    assert [one.filename for one in caught] == [__file__]


def test_seed_warning_while_others_are_in_flight():
    def in_flight(env: ParallelEnv) -> None:
        env.reset_async()
        env.recv(min_envs=1)
        while env.pending:
            env.recv()

    assert len(seed_warnings([passes_on] * 2, in_flight, backend="thread")) == 1


class SeededAfterDrawing(Scenario):
    """Declares the seed of its latest reset, but draws its map in the constructor, as SMARTS does."""

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset()


def test_environments_seeded_after_drawing_warn():
    (text,) = seed_warnings([lambda: SeededAfterDrawing()] * 2)
    assert text.startswith("environments [0, 1] declare the same seed when they were constructed, 42, although")


class DrawsMapInReset(SeededAfterDrawing):
    """Draws its map again in `reset`."""

    def reset(self, *, seed=None, options=None):
        self.map = self.map if seed is None else np.random.default_rng(seed).random(2)
        return super().reset(seed=seed)


def test_no_warning_if_seeds_are_used():
    quiet = [
        [Scenario] * 2,
        [DrawsMapInReset] * 2,
        [lambda: DrawsMapInReset()] * 2,  # its seed is right after the reset
        [functools.partial(passes_on, seed=3)] * 2,  # bound by the caller
        [functools.partial(Scenario, 1, 3)] * 2,
        [passes_on],  # one alone
        [Hunt] * 2,
    ]
    for constructors in quiet:
        assert seed_warnings(constructors) == []
    assert seed_warnings([passes_on] * 2, lambda env: env.reset(seed=[8, 8])) == []  # meant to be alike


class Unseeded(Scenario):
    """Declares no seed, and its `reset` takes none."""

    def __init__(self, start: float = 0.5, **more: Any) -> None:
        self.start = start

    def reset(self):
        return {"car": np.full(2, self.start)}, {}


def unseeded(**kwargs: Any) -> Unseeded:
    return Unseeded(**kwargs)


def test_equal_first_observations_warn(backend_setup, build):
    env = build([unseeded] * 3, backend_setup)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env.reset(env_ids=[0])
    with pytest.warns(UserWarning, match="the first observations of all 3 environments are equal"):
        env.reset(env_ids=[2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        env.reset()


class BoardGame(Unseeded):
    """Starts with the same board; `reset` takes a seed, as PettingZoo's chess does."""

    def reset(self, *, seed=None, options=None):
        return super().reset()


def board_game(**kwargs: Any) -> BoardGame:
    return BoardGame(**kwargs)


def test_no_warning_for_board_games():
    assert seed_warnings([board_game] * 3) == []
    assert seed_warnings([lambda: Unseeded()] * 3) == []  # has no seed argument
    assert seed_warnings([functools.partial(unseeded, start=0.1), unseeded, unseeded]) == []
    assert seed_warnings([unseeded]) == []


# -- constructors that want something else -----------------------------------------------------------------------------


def of_config(config: dict[str, Any]) -> Hunt:
    return Hunt()


class OfMap(Hunt):
    def __init__(self, name: str, *, level: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("constructor", "says"),
    [
        (lambda i: Hunt(), r"it requires 'i'\. .*write `lambda env_id: ...`.*functools.partial\(constructor, i=...\)"),
        (lambda config, env_id: Hunt(), "it requires 'config'"),
        (of_config, r"it requires 'config'.*bind a value, functools.partial\(constructor, config=...\).*of_config"),
        (OfMap, "it requires 'name', 'level'"),
        (lambda seed, /: Hunt(), r"it requires 'seed'.*without positional arguments.*partial\(constructor, ...\)"),
        (functools.partial(OfMap, "big"), "it requires 'level'"),
    ],
    ids=["i", "config and env_id", "function", "class", "positional only", "partial"],
)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_unknown_required_argument_is_refused(backend, constructor, says):
    """For example RLlib's config: nothing starts, and the error shows the signature."""
    with pytest.raises(TypeError, match=rf"env_constructors\[1\] cannot be called: {says}"):
        ParallelEnv([Hunt, constructor], backend=backend)


def test_make_suggests_how_to_pass_the_argument():
    with pytest.raises(TypeError, match=r"requires 'name', 'level'.*env_kwargs=dict\(name=..., level=...\)"):
        make(f"{__name__}:OfMap", 2)


@pytest.mark.parametrize(
    "constructor",
    [
        lambda config=None: Hunt(),
        functools.partial(of_config, {}),
        functools.partial(OfMap, "big", level=2),
        fills_arguments,
    ],
    ids=["default", "bound", "bound by name", "filled in by a wrapper"],
)
@pytest.mark.filterwarnings("ignore:environments .* declare the same seed")
def test_bound_argument_is_accepted(constructor, backend_setup, build):
    build([constructor] * 2, backend_setup).reset()


UNDEFINED_ANNOTATIONS = """
class Annotated(Scenario):
    def __init__(self, size: Undefined = 2, seed: Undefined = None) -> Undefined:
        super().__init__(size, seed)

    def reset(self, seed: Undefined = None) -> Undefined:
        return super().reset(seed=seed)
"""
"""Annotations name what only type checkers import. From Python 3.14 on that needs no `from __future__`."""


def test_annotations_that_are_not_defined():
    first_line = "" if sys.version_info >= (3, 14) else "from __future__ import annotations"
    names: dict[str, Any] = {"Scenario": Scenario}
    exec(compile(first_line + UNDEFINED_ANNOTATIONS, "<string>", "exec", dont_inherit=True), names)
    env = construct_one(names["Annotated"], seed=7, env_id=0)
    assert env.seed == 7
    assert reset_keywords(env.reset) == {"seed"}


def test_signatures_of_wrapped_functions():
    def inner(seed: int) -> None: ...

    @functools.wraps(inner)
    def outer(*args: Any) -> None: ...

    assert [*signature(outer).parameters] == ["seed"]
    assert [*signature(outer, follow_wrapped=False).parameters] == ["args"]
    with pytest.raises(ValueError, match="signature"):
        signature(dict.update)
