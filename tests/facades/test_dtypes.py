"""Arrays have the dtypes of the spaces, and simulators get actions that are in their spaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from helpers.comparison import assert_same
from helpers.setups import Setup
from simulators.choices import SPACES, Chooser, Choosers, Wide, discrete
from simulators.native_arena import Arena

from marl_parallel import ParallelEnv
from marl_parallel.core.block import codec
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts import Rollout
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv
from marl_parallel.vector.stepper import ArrayStepper

pytestmark = pytest.mark.in_turn

TWO = 2


def samples(space: spaces.Space, count: int, seed: int = 1) -> Any:
    batched = batch_space(space, count)
    batched.seed(seed)
    return batched.sample()


def by_agents(space: spaces.Space, rows: Any) -> Any:
    """Values of three agents in two environments, out of those of six rows."""
    return tree_map(lambda leaf, array: array.reshape(TWO, 3, *array.shape[1:]), space, rows)


def assert_of_space(space: spaces.Space, arrays: Any) -> None:
    tree_map(lambda leaf, array: np.testing.assert_equal(array.dtype, leaf.dtype), space, arrays)


def types_of(value: Any) -> Any:
    """The types of all parts, with dtypes and shapes."""
    if isinstance(value, dict | tuple | list):
        parts = sorted(value.items()) if isinstance(value, dict) else enumerate(value)
        return type(value), [(key, types_of(part)) for key, part in parts]
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None)


@pytest.mark.parametrize("name", SPACES)
def test_actions_and_observations_are_those_of_gymnasium(name, two_worker_setup, build):
    """As with `SyncVectorEnv`: of numbers, simulators get scalars of NumPy in the dtype of the space."""
    space = SPACES[name]
    made = [functools.partial(Chooser, space)] * TWO
    env = GymnasiumVectorEnv(build(made, two_worker_setup, "NEXT_STEP", adapter="gymnasium"))
    own = SyncVectorEnv(made, autoreset_mode=AutoresetMode.NEXT_STEP)
    assert_same(env.reset(seed=1)[0], own.reset(seed=1)[0])
    for number in range(3):
        actions = samples(space, TWO, number)
        seen, due = env.step(actions)[0], own.step(actions)[0]
        assert_same(seen, due)
        assert_of_space(space, seen)
    expected = [one.got for one in own.envs]
    got = env.get_attr("got")
    assert_same([*got], expected)
    assert types_of([*got]) == types_of(expected)


@pytest.mark.parametrize("checks", [False, True], ids=["", "check_actions"])
@pytest.mark.parametrize("name", SPACES)
def test_agents_that_join_and_die(name, checks, two_worker_setup, build):
    """Not all agents act, so that actions are written one by one; rows of the others hold anything."""
    space = SPACES[name]
    env = StackedVecEnv(
        build([functools.partial(Choosers, space)] * TWO, two_worker_setup, False, check_actions=checks)
    )
    assert_of_space(space, env.reset()[0])
    for number in range(4):
        actions = by_agents(space, samples(space, 3 * TWO, number))
        if isinstance(space, spaces.Discrete) and space.dtype != np.uint64:
            actions = np.where(env.acting, actions.astype(np.int64), -(10**6))
        observations, *_ = env.step(actions)
        assert_of_space(space, observations)
        first = [tree_map(lambda leaf, array: array[:, 0], space, values) for values in (observations, actions)]
        tree_map(np.testing.assert_array_equal, *first)
    for of_env in env.get_attr("got"):
        types = types_of(of_env[0]["chief_0"])
        assert {str(types_of(action)) for of_step in of_env for action in of_step.values()} == {str(types)}


@pytest.mark.parametrize("name", SPACES)
def test_dicts_by_agent_and_rollouts(name, parallel):
    space = SPACES[name]
    env = PettingZooVecEnv(parallel(functools.partial(Choosers, space), TWO))
    observations, _ = env.reset()
    for number in range(3):
        actions = {agent: samples(space, TWO, number) for agent in env.agents}
        observations, *_ = env.step(actions)
        for agent in env.possible_agents:
            assert_of_space(space, observations[agent])
    env = StackedVecEnv(parallel(functools.partial(Choosers, space), TWO, True))
    rollout = Rollout(env, 3)

    def policy(current: Any) -> Any:
        return by_agents(space, samples(space, 3 * TWO))

    assert_of_space(space, rollout.collect(policy).observations)


def test_number_that_the_dtype_does_not_hold(two_worker_setup, build):
    """In dicts it arrives unchanged; in arrays it is an error that loses nothing of the other environments."""
    space = discrete(3, dtype=np.uint8)
    made = [functools.partial(Wide, space), functools.partial(Chooser, space)]
    env = build(made, two_worker_setup, False)
    env.reset()
    observations, *_ = env.step([{"agent_0": np.uint8(1)}] * TWO)
    assert [one["agent_0"] for one in observations] == [300, 1]
    env.step([{"agent_0": 2}] * TWO)
    assert [types_of(of_env) for of_env in env.get_attr("got")] == [types_of([np.uint8(1), 2])] * TWO
    facade = StackedVecEnv(env)
    facade.reset()
    with pytest.raises(ValueError, match=r"environment 0: the observation of agent 'agent_0'.* uint8.* cannot hold"):
        facade.step(np.ones((TWO, 1), int))
    with pytest.raises(ValueError, match="uint8"):
        facade.step(np.full((TWO, 1), 300))
    assert env.get_attr("got") == ([1], [1])


WAYS: dict[str, Callable[[ArrayStepper, Any], Any]] = {
    "arrays": lambda stepper, stack: stepper.step({"agent_0": stack}),
    "dicts": lambda stepper, stack: (stepper.send_dicts([{"agent_0": one} for one in stack]), stepper.receive()),
    "some": lambda stepper, stack: (stepper.send_some([{"agent_0": stack[1]}], [1]), stepper.receive_some()),
}


@pytest.mark.parametrize("checks", [False, True], ids=["", "check_actions"])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_out_of_arrays_are_scalars(way, compiled, shared_memory, checks, monkeypatch):
    if not compiled:
        monkeypatch.setattr(codec, "Codec", None)
    for space in (SPACES["box without axes"], SPACES["box of integers without axes"]):
        made = [functools.partial(Chooser, space)] * TWO
        with ParallelEnv(made, "DISABLED", backend="serial", check_actions=checks, shared_memory=shared_memory) as env:
            stepper = ArrayStepper(env, env)
            stepper.reset()
            WAYS[way](stepper, np.ones(TWO, space.dtype))
            (action,) = env.get_attr("got")[1]
        assert types_of(action) == types_of(space.dtype.type(1))


def test_actions_in_dicts_are_passed_on_as_before(two_worker_setup, build):
    """After steps with arrays, too, which leave marks in the records."""
    space = SPACES["box without axes"]
    env = build([functools.partial(Chooser, space)] * TWO, two_worker_setup, False)
    facade = StackedVecEnv(env)
    facade.reset()
    facade.step(np.zeros((TWO, 1), np.float32))
    env.step([{"agent_0": 0.5}] * TWO)
    first, second = env.get_attr("got")[0]
    assert type(first) is np.float32
    assert types_of(second) == types_of(np.zeros((), np.float32))


class TypedArena(Arena):
    """A native simulator whose choices are int32."""

    sent: Any = None

    def __init__(self) -> None:
        super().__init__(TWO)
        for declared in (self.schema.action_spaces, self.schema.observation_spaces):
            for agent, space in declared.items():
                declared[agent] = _typed(space)  # type: ignore[index]

    def send(self, actions: list[Any], env_ids: Any) -> None:
        TypedArena.sent = actions
        super().send(actions, env_ids)


def _typed(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, _typed(part)) for key, part in space.items()])
    return discrete(int(space.n), int(space.start), np.int32) if isinstance(space, spaces.Discrete) else space


def test_native_simulators():
    with ParallelEnv.from_native(TypedArena()) as env:
        facade = PettingZooVecEnv(env)
        observations, _ = facade.reset()
        actions = {agent: facade.action_space(agent).sample() for agent in facade.possible_agents}
        for _ in range(2):
            observations, *_ = facade.step(actions)
            for agent in facade.possible_agents:
                assert_of_space(facade.single_observation_space(agent), observations[agent])
            for (space, _), sent in zip(env.stepper.source._action_groups, TypedArena.sent):
                assert_of_space(space, sent)
        env.step([{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting])


WHOLE = {
    "choices": spaces.Discrete(3),
    "from 5": spaces.Discrete(3, start=5),
    "many choices": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary(4),
    "whole numbers": spaces.Box(0, 9, (2,), np.int16),
    "parts": spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.MultiDiscrete([2, 2]), spaces.Box(0, 1, (2,))])),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_floats_as_rows(name, build):
    """Simulators get the numbers in the dtype of the space, as `SyncVectorEnv` passes integers on."""
    space, serial = WHOLE[name], Setup("serial", True, 2)
    made = [functools.partial(Chooser, space)] * TWO
    env = GymnasiumVectorEnv(build(made, serial, "NEXT_STEP", adapter="gymnasium"))
    own = SyncVectorEnv(made)
    for one in (env, own):
        one.reset(seed=1)
    for dtype in (np.float16, np.float32, np.float64):
        actions = samples(space, TWO, dtype().itemsize)
        assert_same(env.step(as_floats(space, actions, dtype))[0], own.step(actions)[0])
        assert types_of(env.get_attr("got")[0][-1]) == types_of(own.get_attr("got")[0][-1])
    for wrong in (0.5, np.nan):
        with pytest.raises(ValueError, match="expected"):
            env.step(tree_map(functools.partial(np.full_like, fill_value=wrong, dtype=np.float64), actions))
    own.close()


def as_floats(space: spaces.Space, actions: Any, dtype: Any) -> Any:
    """Whole numbers as floats of a dtype."""
    return tree_map(lambda leaf, array: array.astype(dtype if leaf.dtype.kind in "iu" else leaf.dtype), space, actions)
