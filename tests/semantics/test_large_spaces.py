"""Spaces with large bounds: they travel compactly, arrive equal, and are compared by their bytes if possible."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from marl_parallel.core import schema
from marl_parallel.core.schema import dumps_compactly, equal
from marl_parallel.core.worker import worker

pytestmark = pytest.mark.in_turn

IMAGE = (160, 160, 3)
INTEGER_TYPES = [np.uint8, np.int16, np.int64]


class Image(spaces.Box):
    """A user-defined Box."""

    def __init__(self, height: int) -> None:
        super().__init__(0, 255, (height, *IMAGE[1:]), np.uint8)
        self.palette = np.full((256, 3), 7)


def gradient(dtype: Any = np.float32) -> spaces.Box:
    """Bounds that are not constant; they differ only at the end."""
    low, high = np.zeros(IMAGE, dtype), np.full(IMAGE, 100, dtype)
    low[-1, -1, -1], high[-1, -1, -1] = 1, 99
    return spaces.Box(low, high, dtype=dtype)


SPACES: dict[str, spaces.Space] = {
    **{f"whole numbers, {np.dtype(t).name}": spaces.Box(0, 100, IMAGE, t) for t in INTEGER_TYPES},
    "of truths": spaces.Box(0, 1, IMAGE, np.bool_),
    "floats": spaces.Box(-1.5, 2.5, IMAGE, np.float32),
    "doubles": spaces.Box(-1e300, 0.1, IMAGE, np.float64),
    "halves": spaces.Box(-1, 1, IMAGE, np.float16),
    "no bounds": spaces.Box(-np.inf, np.inf, IMAGE, np.float32),
    "half bounds": spaces.Box(0, np.inf, IMAGE, np.float64),
    "minus zero": spaces.Box(np.float32(-0.0), np.float32(1.0), IMAGE, np.float32),
    "no constants": gradient(),
    "no constants, whole numbers": gradient(np.uint8),
    "one constant of two": spaces.Box(np.zeros(IMAGE, np.float32), gradient().high),
    "in another order": spaces.Box(np.asfortranarray(gradient().low), np.asfortranarray(gradient().high)),
    "small": spaces.Box(0, 1, (3,)),
    "of no shape": spaces.Box(0, 1, ()),
    "empty": spaces.Box(0, 1, (0, 4)),
    "of many": spaces.Dict({"camera": spaces.Box(0, 255, IMAGE, np.uint8), "lidar": spaces.Box(0, 1, (9000,))}),
    "of several": spaces.Tuple([spaces.Box(0, 255, IMAGE, np.uint8), spaces.Discrete(3), gradient()]),
    "somebody's own": Image(160),
    "of bits": spaces.MultiBinary(5000),
    "of choices": spaces.MultiDiscrete(np.full(3000, 4)),
}


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Compare attribute by attribute: type, dtype, every bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, spaces.Space):
        mine, other = vars(ours), vars(theirs)
        assert mine.keys() == other.keys()
        for name in mine:
            assert_same_state(mine[name], other[name])
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
        assert ours.flags.writeable
    elif isinstance(ours, dict):
        assert [*ours] == [*theirs]
        for key in ours:
            assert_same_state(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_state(mine, other)
    elif not isinstance(ours, np.random.Generator):
        assert ours == theirs


@pytest.mark.parametrize("name", SPACES)
def test_spaces_round_trip(name):
    space = SPACES[name]
    rebuilt = pickle.loads(dumps_compactly(space))
    assert_same_state(rebuilt, space)
    assert rebuilt == space
    assert equal(rebuilt, space)
    rebuilt.seed(3)
    space.seed(3)
    for one, other in zip([rebuilt.sample()], [space.sample()], strict=True):
        np.testing.assert_equal(one, other)


def test_bounds_are_not_shared():
    """Writing to the bounds of one box leaves those of another unchanged."""
    first, second = pickle.loads(dumps_compactly([spaces.Box(0, 255, IMAGE, np.uint8) for _ in range(2)]))
    first.low[:], first.high[0, 0, 0] = 7, 9
    assert (second.low == 0).all()
    assert (second.high == 255).all()
    assert (first.high != 255).sum() == 1


def test_broadcast_bounds():
    """Read-only broadcast arrays of one element count as constants; they are writable after unpickling."""
    space = spaces.Box(0, 255, IMAGE, np.uint8)
    space.low = np.broadcast_to(np.uint8(3), IMAGE)
    pickled = dumps_compactly(space)
    assert len(pickled) < 2000
    rebuilt = pickle.loads(pickled)
    assert (rebuilt.low == 3).all()
    rebuilt.low[:] = 4


def test_constant_bounds_are_small():
    constants = {name: space for name, space in SPACES.items() if "constant" not in name and "order" not in name}
    del constants["of several"]
    assert all(len(dumps_compactly(space)) < 10_000 for space in constants.values())


@pytest.mark.parametrize("name", SPACES)
def test_equality_is_the_same_as_in_gymnasium(name):
    space = SPACES[name]
    for other in SPACES.values():
        assert equal(space, other) == (space == other)


def test_nearly_equal_bounds():
    """Gymnasium treats boxes as equal if their bounds differ by a rounding error."""
    one = spaces.Box(0.0, 1.0, IMAGE, np.float64)
    other = spaces.Box(0.0, 1.0 + 1e-12, IMAGE, np.float64)
    assert equal(one, other)
    assert not equal(one, spaces.Box(0.0, 1.1, IMAGE, np.float64))
    assert not equal(one, spaces.Box(0.0, 1.0, IMAGE, np.float32))


class Camera(gymnasium.Env):
    """A single agent that observes an image; its constructor can seed the space, and a step can fail."""

    def __init__(
        self, space: spaces.Space = SPACES["whole numbers, uint8"], seeded: bool = False, *, env_id: int
    ) -> None:
        self.observation_space = copy.deepcopy(space)
        if seeded:
            self.observation_space.seed(env_id)
        self.action_space = spaces.Discrete(2)
        self.seen = self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.seen, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action:
            raise RuntimeError("the camera is broken")
        return self.seen, 0.0, False, False, {}


@pytest.mark.parametrize("name", ["whole numbers, uint8", "no bounds", "no constants", "of many", "somebody's own"])
def test_public_spaces(name, backend_setup, build):
    env = build([functools.partial(Camera, SPACES[name])] * 2, backend_setup)
    assert env.observation_space["agent_0"] == SPACES[name]
    assert type(env.observation_space["agent_0"]) is type(SPACES[name])
    env.observation_space["agent_0"].sample()
    observations, _ = env.reset()
    assert all(SPACES[name].contains(one["agent_0"]) for one in observations)


@pytest.fixture
def watched(monkeypatch) -> dict[str, int]:
    """How often Gymnasium compares bounds, arrays are rebuilt, and schemas are compared."""
    counts = {"compared": 0, "made again": 0, "descriptions": 0}

    def counting(name: str, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return counted

    monkeypatch.setattr(spaces.Box, "__eq__", counting("compared", spaces.Box.__eq__))
    monkeypatch.setattr(schema.np, "full", counting("made again", np.full))
    monkeypatch.setattr(worker, "difference", counting("descriptions", worker.difference))
    return counts


def test_bounds_are_unpickled_once(watched, parallel):
    """For equal environments, the parent unpickles one set of spaces, and no worker compares bounds."""
    make = functools.partial(Camera, SPACES["whole numbers, uint8"])
    env = parallel(make, 4, True, on_error="restart")
    assert watched["compared"] == 0
    assert 0 < watched["made again"] <= 4
    env.reset()
    _, _, _, _, infos = env.step([{"agent_0": 1}] + [{"agent_0": 0}] * 3)
    assert infos[0]["__common__"]["restarted"]
    assert watched == {"compared": 0, "made again": watched["made again"], "descriptions": 0}
    assert watched["made again"] <= 4


def test_schemas_with_different_bytes(watched, build, backend_setup):
    """Spaces that differ only in the state of their generator count as equal, at start and after a restart."""
    env = build([functools.partial(Camera, seeded=True)] * 2, backend_setup, on_error="restart")
    env.reset()
    _, _, _, _, infos = env.step([{"agent_0": 0}, {"agent_0": 1}])
    assert infos[1]["__common__"]["restarted"]
    assert "__common__" not in infos[0]
    env.step([{"agent_0": 0}] * 2)
    if backend_setup.backend == "serial":
        assert watched["descriptions"] == 1


def test_different_bounds_of_one_element(backend_setup, build):
    """The declared space has the bounds of both environments."""
    constant = spaces.Box(0, 100, IMAGE, np.float64)
    for declared in (constant, gradient(np.float64)), (gradient(np.float64), constant):
        env = build([functools.partial(Camera, space) for space in declared], backend_setup)
        assert env.observation_space["agent_0"] == constant
        assert all(constant.contains(seen["agent_0"]) for seen in env.reset()[0])
