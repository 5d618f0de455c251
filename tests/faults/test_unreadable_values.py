"""Values that raise when they are read: an `EnvError` names environment, agent and value; others lose nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import BACKEND_SETUPS, Setup
from simulators.unreadable_values import WHEN, WHERE, Ambiguous, Broken, Gradient, UnreadableValues

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.core.block import codec
from marl_parallel.core.block.statistics import EpisodeStatistics
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv

pytestmark = pytest.mark.release_independent

ENVS = 3
CASES = {
    "reward with a gradient": ("reward", Gradient, "the reward of agent 'b' must be a number, got Gradient"),
    "reward": ("reward", Broken, "the reward of agent 'b' must be a number, got <Broken instance"),
    "terminated": ("terminated", Ambiguous, "the terminated flag of agent 'b' must be True or False, got Ambiguous"),
    "truncated": ("truncated", Broken, "the truncated flag of agent 'b' must be True or False, got <Broken instance"),
    "all": ("all", Ambiguous, "the terminated flag of agent '__all__' must be True or False, got Ambiguous"),
    "observation": ("observation", Gradient, "the observation of agent 'b': expected an array of shape (2,)"),
    "part of an observation": ("part", Broken, "the observation of agent 'b': expected an array of shape (2,)"),
}
EACH = pytest.mark.parametrize("name", CASES)
STEP = [{"a": 0, "b": 1}] * ENVS


@pytest.fixture(params=["compiled", "python"])
def any_codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With compiled code, and without, in the caller's process."""
    if request.param == "python":
        monkeypatch.setattr(codec, "Codec", None)
    return request.param


def made(name: str, env_id: int | None = None) -> Any:
    place, value, _ = CASES[name]
    make = functools.partial(UnreadableValues, place, value)
    return make if env_id is None else make(env_id=env_id, restarts=0)


def assert_named(text: str, name: str) -> None:
    assert f"environment {WHERE}" in text
    assert CASES[name][2] in text
    assert CASES[name][1].__name__ in text


def check_raises(env: ParallelEnv, name: str) -> None:
    env.reset()
    for _ in range(WHEN - 1):
        env.step(STEP)
    with pytest.raises(EnvError) as raised:
        env.step(STEP)
    assert_named(str(raised.value), name)
    assert (raised.value.env_ids, raised.value.method) == ((WHERE,), "step")
    with pytest.raises(ClosedEnvironmentError):
        env.step(STEP)


@EACH
def test_the_error_names_environment_agent_and_value(name, any_codec):
    check_raises(ParallelEnv([made(name)] * ENVS, backend="serial"), name)


@pytest.mark.parametrize("setup", [*BACKEND_SETUPS, Setup("process", False, 2)], ids=str)
def test_the_error_on_every_backend(setup, build):
    check_raises(build([made("reward with a gradient")] * ENVS, setup), "reward with a gradient")


def check_restarts(env: ParallelEnv, name: str) -> None:
    """The environment is restarted; the results of its neighbours equal those of a plain loop."""
    loops = {env_id: made(name, env_id) for env_id in range(ENVS) if env_id != WHERE}
    first, _ = env.reset()
    for env_id, loop in loops.items():
        assert_same(first[env_id], loop.reset()[0])
    for number in range(1, WHEN + 3):
        results = env.step(STEP)
        common = results[4][WHERE].get("__common__")
        assert bool(common) is (number == WHEN)
        if common:
            assert_named(common["error"], name)
            assert results[3][WHERE] == {"a": True, "b": True, "__all__": True}
        for env_id, loop in loops.items():
            assert_same(tuple(column[env_id] for column in results), loop.step(STEP[env_id]))
    assert env.stats().restarts == 1


@EACH
def test_neighbours_lose_nothing(name, any_codec):
    with ParallelEnv([made(name)] * ENVS, backend="serial", on_error="restart", episode_stats=True) as env:
        check_restarts(env, name)


class CannotBeRead:
    """It can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class EndsUnread:
    """Its last step has infos that cannot be unpickled, and the reset that follows raises."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict(dict.fromkeys("ab", spaces.Box(-9.0, 9.0, (), np.float64)))  # type: ignore[arg-type]
    action_space = spaces.Dict(dict.fromkeys("ab", spaces.Discrete(2)))  # type: ignore[arg-type]

    def __init__(self, restarts: int) -> None:
        self.time, self.episodes, self.restarts = 0, 0, restarts

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.episodes and not self.restarts:
            raise RuntimeError("no second episode")
        self.time, self.episodes = 0, self.episodes + 1
        return dict.fromkeys("ab", 0.0), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        ends = self.time == 2
        seen, flags = dict.fromkeys("ab", float(self.time)), dict.fromkeys(("a", "b", "__all__"), ends)
        infos = {"a": {"value": CannotBeRead()}} if ends and not self.restarts else {}
        return seen, dict.fromkeys("ab", 1.0), flags, dict.fromkeys(flags, False), infos


@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_agents_end_if_the_last_step_is_lost(shared_memory, any_codec):
    env = ParallelEnv([EndsUnread], backend="serial", on_error="restart", shared_memory=shared_memory)
    env.reset()
    env.step([{"a": 0, "b": 0}])
    observations, rewards, terminateds, truncateds, infos = (of_envs[0] for of_envs in env.step([{"a": 0, "b": 0}]))
    assert infos["__common__"]["restarted"] is True
    assert (observations, [*rewards]) == ({"a": 0.0, "b": 0.0}, ["a", "b"])
    everybody = dict.fromkeys(("a", "b", "__all__"), True)
    assert everybody in (terminateds, truncateds)
    env.close()


def test_neighbours_in_other_processes_lose_nothing(build, two_worker_setup):
    check_restarts(build([made("reward")] * ENVS, two_worker_setup, on_error="restart"), "reward")


@pytest.mark.parametrize("facade", [StackedVecEnv, PettingZooVecEnv, GymnasiumVectorEnv])
@pytest.mark.parametrize("name", ["reward with a gradient", "terminated", "observation"])
def test_facades(facade, name):
    """Rows of the neighbours are theirs."""
    ones = np.ones((ENVS, 2), np.int64)
    actions: Any = {StackedVecEnv: ones, PettingZooVecEnv: dict(zip("ab", ones.T)), GymnasiumVectorEnv: ones.ravel()}
    with ParallelEnv([made(name)] * ENVS, "NEXT_STEP", backend="serial", on_error="restart") as parallel:
        env = facade(parallel)
        env.reset()
        for number in range(1, WHEN + 1):
            observations, rewards, _, truncations, _ = env.step(actions[facade])
            if facade is PettingZooVecEnv:
                observations, rewards, truncations = observations["b"], rewards["b"], truncations["b"]
            rows = {StackedVecEnv: [1, 3, 5], GymnasiumVectorEnv: [1, 3, 5], PettingZooVecEnv: [0, 1, 2]}[facade]
            seen, paid, ended = (
                np.reshape(v, (-1, *shape))[rows]
                for v, shape in zip((observations, rewards, truncations), [(2,), (), ()])
            )
            assert seen[[0, 2]].tolist() == [[number] * 2] * 2
            assert paid.tolist() == [number, 0 if number == WHEN else number, number]
            assert ended.tolist() == [False, number == WHEN, False]


def test_statistics_read_what_they_can():
    """A value that can be read in the worker only must not lose the results of a step."""
    statistics = EpisodeStatistics(1, ["a"], AutoresetMode.SAME_STEP)
    flags = {"a": True, "__all__": True}
    statistics.add(0, {"a": Gradient()}, flags, flags, [])
    (episode,) = statistics.finished
    assert np.isnan(episode.returns["a"])
