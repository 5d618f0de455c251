"""The public interface, member by member, except stepping, resetting, seeds and faults."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import random_actions
from pettingzoo.utils import parallel_to_aec
from pettingzoo.utils.wrappers import BaseParallelWrapper
from simulators.deterministic import Hunt, Identified, Recycler, Relay, Skirmish

from marl_parallel import ParallelEnv, make

pytestmark = pytest.mark.in_turn

SAME_STEP = AutoresetMode.SAME_STEP


def play(env: ParallelEnv, reference: Reference, steps: int = 5) -> None:
    """Some steps in lockstep with the reference."""
    rng = np.random.default_rng(3)
    assert_same(env.reset(), reference.reset())
    for _ in range(steps):
        actions = [random_actions(one, rng) for one in reference.copies]
        assert_same(env.step(actions), reference.step(actions))


def test_counts(setup, build):
    env = build([Hunt] * 4, setup)
    assert env.num_envs == env.batch_size == len(env) == 4
    assert env.num_workers == setup.num_workers or setup.backend == "serial"
    build_three = build([Hunt] * 3, setup)
    assert build_three.num_envs == 3
    assert build_three.num_workers <= 3


def test_agent_order_is_the_environments(backend_setup, build):
    """Neither sorted nor shuffled, in all three places."""
    for constructor, agents in (
        (Skirmish, ["tank", "scout", "medic", "sniper"]),
        (Relay, ["zulu", "alpha", "mike"]),
    ):
        env = build([constructor] * 2, backend_setup)
        assert env.possible_agents == agents
        for space in (env.observation_space, env.action_space):
            assert type(space) is spaces.Dict
            assert list(space) == agents
    native = Skirmish()
    expected_env = build([Skirmish] * 2, backend_setup)
    assert (expected_env.observation_space, expected_env.action_space) == (
        native.observation_space,
        native.action_space,
    )


def test_possible_agents_is_a_copy(backend_setup, build):
    env = build([Skirmish] * 2, backend_setup)
    env.possible_agents.clear()
    assert len(env.possible_agents) in {0, 4}  # a copy each time, or the one and only that the caller spoilt
    play(env, Reference([Skirmish] * 2, SAME_STEP, 42))


MODES = [
    (True, AutoresetMode.SAME_STEP),
    (False, AutoresetMode.DISABLED),
    *((mode, mode) for mode in AutoresetMode),
    *((mode.name, mode) for mode in AutoresetMode),
]


@pytest.mark.parametrize(("passed", "mode"), MODES, ids=str)
def test_metadata_and_render_mode(passed, mode, backend_setup, build):
    env = build([Skirmish] * 2, backend_setup, passed)
    assert env.metadata == {**Skirmish.metadata, "autoreset_mode": mode}
    assert "autoreset_mode" not in Skirmish.metadata
    env.metadata["name"] = "other"
    assert Skirmish.metadata["name"] == "skirmish"


def test_the_default_mode_is_same_step():
    with ParallelEnv([Hunt], backend="serial") as env:
        assert env.metadata["autoreset_mode"] is SAME_STEP


@pytest.mark.parametrize("constructor", [Skirmish, Hunt])
def test_frames(constructor, two_worker_setup, build):
    makers = [functools.partial(constructor, render_mode="rgb_array")] * 4
    env = build(makers, two_worker_setup)
    assert env.render_mode == "rgb_array"
    env.reset()
    expected = tuple(np.full((4, 6, 3), 10 * index, np.uint8) for index in range(4))
    frames = env.render()
    assert_same(frames, expected)
    rows = [np.concatenate(expected[:2], axis=1), np.concatenate(expected[2:], axis=1)]
    assert_same(env.render(tile=True), np.concatenate(rows, axis=0))
    assert_same(frames, expected)
    assert_same(env.render(env_ids=[3, 1]), (expected[3], expected[1]))
    with pytest.raises(ValueError, match="4"):
        env.render(env_ids=[4])


def test_render_grid_of_three(backend_setup, build):
    """The grid has empty places, and each frame is at its position."""
    env = build([functools.partial(Hunt, render_mode="rgb_array")] * 3, backend_setup)
    env.reset()
    grid = env.render(tile=True)
    height, width = grid.shape[0] // 4, grid.shape[1] // 6
    assert grid.shape == (4 * height, 6 * width, 3)
    assert 3 <= height * width <= 4
    for index in range(3):
        row, column = divmod(index, width)
        assert (grid[4 * row : 4 * row + 4, 6 * column : 6 * column + 6] == 10 * index).all()


def test_no_render_mode(backend_setup, build):
    env = build([Hunt] * 2, backend_setup)
    env.reset()
    assert env.render_mode is None
    assert env.render() is None


def test_state(two_worker_setup, build):
    """Computed when called, from the current state of each environment."""
    reference = Reference([Hunt] * 4, SAME_STEP, 42)
    env = build([Hunt] * 4, two_worker_setup)
    assert env.state_space == Hunt().state_space
    play(env, reference, steps=3)
    state = env.state()
    expected = np.stack([one.env.state() for one in reference.copies])
    assert_same(state, expected)
    assert_same(env.state(env_ids=[3, 1]), expected[[3, 1]])
    with pytest.raises(ValueError, match="4"):
        env.state(env_ids=[4])
    env.step([{agent: FIXED.get(agent, 1) for agent in agents} for agents in env.acting])
    assert_same(state, expected)
    assert not np.array_equal(env.state(), expected)


class Weather(Hunt):
    """Its state has a configurable space."""

    def __init__(self, space: spaces.Space, states: list[Any], env_id: int) -> None:
        super().__init__()
        self.state_space, self.now = space, states[env_id]

    def state(self) -> Any:
        return self.now


STATES = [
    (spaces.Discrete(5), [3, np.int64(0), np.int32(4)], np.array([3, 0, 4])),
    (spaces.Discrete(5, start=-2), [-2, 2, 0], np.array([-2, 2, 0])),
    (spaces.MultiBinary(2), [[0, 1], np.array([True, True]), (1, 0)], np.array([[0, 1], [1, 1], [1, 0]], np.int8)),
    (spaces.MultiDiscrete([3, 4]), [[2, 3], [0, 0], np.array([1, 2], np.uint8)], np.array([[2, 3], [0, 0], [1, 2]])),
    (spaces.Box(-9, 9, (), np.float32), [1, 2.5, np.float64(-3)], np.array([1, 2.5, -3], np.float32)),
]


@pytest.mark.parametrize(("space", "states", "expected"), STATES, ids=[str(space) for space, *_ in STATES])
def test_states_of_other_spaces(space, states, expected, two_worker_setup, build):
    """One array with a row for each environment, in the dtype of the space."""
    env = build([functools.partial(Weather, space, states)] * 3, two_worker_setup)
    env.reset()
    assert env.state_space == space
    assert_same(env.state(), expected)


FIXED = {"wolf_2": np.array([0.5, 0.25, -1.0], np.float32)}


worded = functools.partial(Weather, spaces.Text(5), ["sunny", "rainy"])


@pytest.mark.parametrize("constructor", [Skirmish, Recycler, functools.partial(gymnasium.make, "CartPole-v1"), worded])
def test_no_state(constructor, backend_setup, build):
    env = build([constructor] * 2, backend_setup)
    env.reset()
    assert env.state_space is None
    with pytest.raises(NotImplementedError):
        env.state()
    env.reset()


def test_call(two_worker_setup, build):
    reference = Reference([Hunt] * 4, SAME_STEP, 42)
    env = build([Hunt] * 4, two_worker_setup)
    play(env, reference, steps=3)
    totals = [one.env.total for one in reference.copies]
    assert_same(env.call("scale", 2.0), tuple(2.0 * total for total in totals))
    assert_same(env.call("scale", 1.0, offset=3.0), tuple(total + 3.0 for total in totals))
    assert_same(env.call("scale", factor=1.0, env_ids=[3, 1]), (totals[3], totals[1]))
    assert_same(env.call("observation_space", "wolf_0"), (Hunt().observation_space("wolf_0"),) * 4)
    assert len(set(env.call("pid"))) == (
        two_worker_setup.num_workers if two_worker_setup.backend in ("process", "hybrid", "ray") else 1
    )


def test_attributes_reach_the_simulator(two_worker_setup, build):
    """Setting an attribute changes the simulator's behaviour."""
    reference = Reference([Hunt] * 4, SAME_STEP, 42)
    env = build([Hunt] * 4, two_worker_setup)
    assert_same(env.get_attr("gravity"), (1.0,) * 4)
    values = [0.5, 2.0, -1.0, 0.0]
    env.set_attr("gravity", values)
    for one, value in zip(reference.copies, values, strict=True):
        one.env.gravity = value
    assert_same(env.get_attr("gravity"), tuple(values))
    play(env, reference)
    assert_same(env.get_attr("received"), tuple({"seed": 42 + i, "env_id": i} for i in range(4)))


def test_attributes_by_env_ids(two_worker_setup, build):
    env = build([Hunt] * 4, two_worker_setup)
    env.set_attr("gravity", [3.0, 2.0], env_ids=[3, 1])
    assert_same(env.get_attr("gravity"), (1.0, 2.0, 1.0, 3.0))
    env.set_attr("gravity", 4.0, env_ids=[0])
    assert_same(env.get_attr("gravity"), (4.0, 2.0, 1.0, 3.0))
    for values, env_ids in [([1.0] * 4, [0, 1]), (1.0, [4]), (1.0, [2, 2])]:
        with pytest.raises(ValueError):  # noqa: PT011  # too many values; unknown; doubled
            env.set_attr("gravity", values, env_ids=env_ids)
    assert_same(env.get_attr("gravity"), (4.0, 2.0, 1.0, 3.0))


def test_attributes_are_copies(two_worker_setup, build):
    """Changes on either side do not reach the other."""
    env = build([Hunt] * 2, two_worker_setup)
    passed = {"deep": [1]}
    env.set_attr("received", [passed, passed])
    passed["deep"].append(2)
    env.get_attr("received")[0]["deep"].append(3)
    assert_same(env.get_attr("received"), ({"deep": [1]},) * 2)


def wrapped_gymnasium() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=9)


def wrapped_pettingzoo() -> Any:
    return BaseParallelWrapper(BaseParallelWrapper(Hunt()))


def converted() -> Any:
    return parallel_to_aec(Hunt())


def wrapped_by_hand() -> Any:
    return Identified(gymnasium.wrappers.OrderEnforcing(Skirmish()))


WRAPPED = [
    (wrapped_gymnasium, "gravity", 9.8),
    (wrapped_gymnasium, "_max_episode_steps", 9),
    (wrapped_pettingzoo, "gravity", 1.0),
    (converted, "gravity", 1.0),
    (wrapped_by_hand, "episode", 0),
]


@pytest.mark.parametrize(("constructor", "name", "value"), WRAPPED, ids=lambda part: getattr(part, "__name__", None))
def test_attributes_through_wrappers(constructor, name, value, two_worker_setup, build):
    """Found and set on the object that owns them; no wrapper shadows them."""
    env = build([constructor] * 2, two_worker_setup)
    assert_same(env.get_attr(name), (value, value))
    env.set_attr(name, [3, 4])
    assert_same(env.get_attr(name), (3, 4))
    if name == "gravity":
        assert [getattr(inner, name) for inner in env.get_attr("unwrapped")] == [3, 4]


class SlottedHunt:
    """Takes no new attributes; those that it forwards stay as they are."""

    __slots__ = ("env",)

    def __init__(self) -> None:
        self.env = Hunt()

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def legs(self) -> int:
        return 4


@pytest.mark.parametrize("constructor", [*dict.fromkeys(row[0] for row in WRAPPED)], ids=lambda made: made.__name__)
def test_new_attributes(constructor, two_worker_setup, build):
    """They are set on the outermost object, which has them from then on."""
    env = build([constructor] * 3, two_worker_setup)
    with pytest.raises(AttributeError, match=r"environment 0: .*wings"):
        env.get_attr("wings")
    env.set_attr("wings", 2)
    env.set_attr("wings", [3, (4, 5)], env_ids=[2, 1])
    assert_same(env.get_attr("wings"), (2, (4, 5), 3))
    own = env.call(lambda outermost: (type(outermost).__name__, "wings" in vars(outermost)))
    assert own == ((type(constructor()).__name__, True),) * 3
    env.reset()
    with pytest.raises(AttributeError, match=r"environment 0: .*feathers"):
        env.call("feathers")
    assert_same(env.get_attr("wings"), (2, (4, 5), 3))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("wings", AttributeError, r"environment 0: SlottedHunt has no attribute 'wings'.*it cannot be added"),
        ("legs", AttributeError, "environment 0: 'legs' of SlottedHunt is a property that can only be read"),
        (3, TypeError, "name must be the name of an attribute, got 3"),
        (lambda env: env, TypeError, "name must be the name of an attribute"),
    ],
    ids=["slots", "property", "number", "function"],
)
def test_refused_attributes_close_nothing(name, error, message, two_worker_setup, build):
    env = build([SlottedHunt] * 2, two_worker_setup)
    with pytest.raises(error, match=message):
        env.set_attr(name, 2)
    env.reset()
    env.set_attr("gravity", 2.0)
    assert_same(env.get_attr("gravity"), (2.0, 2.0))


def test_methods_through_wrappers(two_worker_setup, build):
    for constructor in (wrapped_pettingzoo, converted):
        env = build([constructor] * 2, two_worker_setup)
        env.reset()
        assert_same(env.call("scale", 2.0, offset=1.0), (1.0, 1.0))


def test_attributes_of_real_environments(backend_setup, build):
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    env = build([functools.partial(spread.parallel_env, max_cycles=7)] * 2, backend_setup)
    assert_same(env.get_attr("max_cycles"), (7, 7))
    env.set_attr("max_cycles", [2, 3])
    env.reset()
    idle = [dict.fromkeys(env.possible_agents, 0)] * 2
    assert [flags["__all__"] for flags in env.step(idle)[3]] == [False, False]
    assert [flags["__all__"] for flags in env.step(idle)[3]] == [True, False]


def test_stats(setup, build):
    """Counts are exact, seconds add up, each worker has its own values."""
    env = build([Relay] * 4, setup)
    assert (env.stats().steps, env.stats().resets) == (0, 0)
    env.reset()
    for _ in range(6):
        env.step([{}] * 4)
    env.step([{}] * 2, [3, 0])
    env.reset(env_ids=[1])
    stats = env.stats()
    assert (stats.steps, stats.resets, stats.restarts) == (26, 9, 0)
    assert len(stats.workers) == env.num_workers
    for name in ("steps", "resets", "restarts", "simulator_s", "transport_s", "waiting_s"):
        total = sum(getattr(worker, name) for worker in stats.workers)
        assert getattr(stats, name) == pytest.approx(total)
    assert stats.simulator_s > 0
    assert stats.transport_s >= 0
    assert stats.waiting_s >= 0


@pytest.mark.parametrize("name", ["mpe2.simple_spread_v3", "mpe2.simple_spread_v3:parallel_env"])
def test_make(name, backend_setup):
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    reference = Reference([functools.partial(spread.parallel_env, max_cycles=4)] * 3, SAME_STEP, 8)
    arguments = {"backend": backend_setup.backend, "num_workers": 2, "seed": 8}
    with make(name, num_envs=3, env_kwargs={"max_cycles": 4}, **arguments) as env:
        play(env, reference, steps=9)


@pytest.mark.parametrize("attribute", ["", ":env", ":raw_env"])
def test_make_default_attribute(attribute, backend_setup):
    """`parallel_env`, else `env`, else `raw_env`."""
    classic = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    reference = Reference([getattr(classic, attribute[1:] or "env")] * 2, SAME_STEP, 8)
    name = f"pettingzoo.classic.tictactoe_v3{attribute}"
    with make(name, num_envs=2, backend=backend_setup.backend, num_workers=2, seed=8) as env:
        assert_same(env.reset(), reference.reset())


def test_make_with_missing_names(backend_setup):
    with pytest.raises(ImportError, match="no_such_module"):
        make("no_such_module", num_envs=2, backend=backend_setup.backend)
    with pytest.raises(AttributeError, match="no_such_thing"):
        make("mpe2.simple_spread_v3:no_such_thing", num_envs=2, backend=backend_setup.backend)
    with pytest.raises(AttributeError, match="parallel_env"):
        make("json", num_envs=2, backend=backend_setup.backend)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env_kwargs": "N=5"}, TypeError, "env_kwargs must be a dict of keywords"),
        ({"N": 5}, TypeError, "ParallelEnv takes no argument 'N'; arguments of each environment go into env_kwargs"),
        ({"num_envs": "two"}, TypeError, "num_envs must be an integer"),
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1"),
    ],
    ids=str,
)
def test_make_with_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**{"name": "mpe2.simple_spread_v3", "num_envs": 2, **arguments})


def test_lambdas_and_closures(setup, build):
    """Workers need not import the module of a constructor."""
    agents = ["x", "y"]

    class Here(Hunt):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.possible_agents = agents

    constructors = [
        lambda seed: Here(seed),
        Here,
        functools.partial(Here),
        lambda seed, env_id: Here(seed + env_id),
    ]
    play(build(constructors, setup), Reference(constructors, SAME_STEP, 42))


def test_all_names_are_exported():
    import marl_parallel

    for name in ("ParallelEnv", "AutoresetMode", "make", "Stats", "Backend"):
        assert hasattr(marl_parallel, name)
    for name in ("ParallelEnvError", "EnvError", "WorkerCrashed"):
        assert issubclass(getattr(marl_parallel, name), RuntimeError)
    assert marl_parallel.AutoresetMode is AutoresetMode
