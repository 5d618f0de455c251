"""Results and actions that travel pickled are like those that travel in the block, with and without compiled code."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.core.block import codec
from marl_parallel.vector import ArrayStepper

pytestmark = pytest.mark.release_independent

AGENTS = ["a", "b", "c"]
BOX, BOX_OF_ALL = spaces.Box(-9, 9, (2,), np.float32), spaces.Box(-99, 99, (2,), np.float32)
INFOS: dict[str, dict[Any, Any]] = {
    "no infos": {},
    "empty": {"c": {}, "a": {}, "b": {}},
    "simple": {"clock": {"s": 3}, "b": {"x": 1}, "c": {}, "a": {"y": 2.0}},
    "pickled": {"clock": {"s": 3}, "b": {"x": {1, 2}}, "c": {}, "a": {"y": 2.0}},
    "no dicts": {"steps": 3, "c": None, "a": {"y": 2.0}},
}


class Mixed:
    """Returns one read-only array for all agents, in dicts of another order; its last agent may see a text."""

    possible_agents = AGENTS

    def __init__(self, *, text: bool, infos: dict[Any, Any]) -> None:
        self.infos, self.text, self.count = infos, text, 0
        self.received: list[Any] = []
        last = spaces.Text(9) if text else BOX
        self.observation_space = spaces.Dict(a=BOX, b=BOX, c=last)
        self.action_space = spaces.Dict(a=BOX, b=BOX, c=spaces.Discrete(3))

    def observations(self) -> dict[str, Any]:
        one = np.full(2, self.count, np.float32)
        one.flags.writeable = False
        return {"c": "seen" if self.text else one, "b": one, "a": one}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.observations(), {agent: {} for agent in reversed(AGENTS)}

    def step(self, actions: dict[str, Any]) -> Any:
        self.received.append(actions)
        self.count += 1
        no = dict.fromkeys(reversed(AGENTS), False)
        rewards = dict.fromkeys(reversed(AGENTS), float(self.count))
        return self.observations(), rewards, {**no, "__all__": self.count == 3}, {"__all__": False, **no}, self.infos

    def close(self) -> None:
        pass


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.needs("_codec")), "python"])
def compiled(request, monkeypatch) -> bool:
    if request.param == "python":
        monkeypatch.setattr(codec, "Codec", None)
    return bool(request.param == "compiled")


@pytest.fixture(params=["numbers", "text"])
def text(request) -> bool:
    return bool(request.param == "text")


def opened(text: bool, infos: str, **keywords: Any) -> Iterator[ParallelEnv[Any, Any]]:
    with ParallelEnv([lambda: Mixed(text=text, infos=INFOS[infos])], backend="serial", **keywords) as env:
        env.reset(seed=1)
        yield env


ACTIONS = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32), "c": 1}


@pytest.mark.parametrize("infos", INFOS)
def test_order_of_keys(infos, text, compiled):
    """Agents in the order of `possible_agents`, then other keys as they came."""
    for env in opened(text, infos):
        for _ in range(3):
            observations, rewards, *flags, (info,) = env.step([ACTIONS])
            assert [*observations[0]] == [*rewards[0]] == AGENTS
            assert [[*of_env] for (of_env,) in flags] == [[*AGENTS, "__all__"]] * 2
            expected = [agent for agent in AGENTS if agent in INFOS[infos]]
            others = [key for key in INFOS[infos] if key not in AGENTS]
            if flags[0][0]["__all__"]:  # with the last observations
                assert sorted(info) == sorted([*AGENTS, *others])
            else:
                assert [*info] == expected + others


def test_each_agent_has_its_own_array(text, compiled):
    """Also if the simulator returns one array for all, which must not be written to."""
    for env in opened(text, "empty"):
        for step in range(1, 4):
            (seen,), *_, (info,) = env.step([ACTIONS])
            seen = {agent: of_agent["final_obs"] for agent, of_agent in info.items()} if step == 3 else seen
            arrays = [one for one in seen.values() if isinstance(one, np.ndarray)]
            assert len(arrays) == 2 + (not text)
            for array in arrays:
                array += 1
            assert_same(arrays, [np.full(2, step + 1, np.float32)] * len(arrays))


@pytest.mark.parametrize("last", [1, None], ids=["in the block", "pickled"])
def test_each_action_has_its_own_array(last, text, compiled):
    one = np.ones(2, np.float32)
    one.flags.writeable = False
    for env in opened(text, "empty"):
        env.step([{"c": last, "b": one, "a": one}])
        (received,) = env.get_attr("received")[0]
        assert [*received] == AGENTS
        for agent in "ab":
            received[agent] += 1
        assert_same(received, {"a": np.full(2, 2, np.float32), "b": np.full(2, 2, np.float32), "c": last})


def test_last_observations_of_agents_whose_info_is_none(text, compiled):
    for env in opened(text, "no dicts"):
        for _ in range(3):
            *_, (info,) = env.step([ACTIONS])
        for agent in AGENTS:
            expected = "seen" if text and agent == "c" else np.full(2, 3, np.float32)
            assert_same(info[agent]["final_obs"], expected)
        assert info["steps"] == 3


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("auto_reset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("infos", INFOS)
def test_equal_to_results_in_the_block(infos, auto_reset, monkeypatch):
    """Also where the actions of some steps are pickled."""
    results: list[Any] = []
    for reader in (codec.Codec, None):
        monkeypatch.setattr(codec, "Codec", reader)
        for env in opened(False, infos, auto_reset=auto_reset):
            for step in range(7):
                action = {**ACTIONS, "c": None if step % 3 == 1 else step % 2}
                results.append((env.step([action]), env.acting, env.action_masks))
                if auto_reset == "DISABLED" and step % 3 == 2:
                    results.append(env.reset())
    half = len(results) // 2
    assert_same(results[:half], results[half:])


# -- steps that travel pickled between others --------------------------------------------------------------------------


class Counting:
    """Everything counts: observations are the number of steps and resets so far. `big` and `bad` steps, by number."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict(a=BOX_OF_ALL, b=BOX_OF_ALL)
    action_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    state_space = spaces.Box(-99, 99, (1,), np.float32)

    def __init__(self, restarts: int = 0, **steps: int) -> None:
        self.restarts, self.steps, self.count = restarts, steps, 0
        self.ended = False

    def seen(self) -> dict[str, Any]:
        self.count += 1
        return {agent: np.full(2, self.count, np.float32) for agent in "ba"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.ended = False
        return self.seen(), {"b": {}, "a": {}}

    def step(self, actions: Any) -> Any:
        if self.restarts == 0 and self.count + 1 == self.steps.get("fails"):
            raise ValueError("broken")
        seen = self.seen()
        reward: Any = 2**60 if self.count >= self.steps.get("big", 99) else 1.0
        reward = None if self.count == self.steps.get("bad") else reward
        self.ended = self.count % self.steps.get("length", 99) == 0
        flags = {**dict.fromkeys("ba", self.ended), "__all__": self.ended}
        return (
            seen,
            dict.fromkeys("ba", reward),
            flags,
            {**dict.fromkeys("ba", False), "__all__": False},
            self.infos(),
        )

    def infos(self) -> dict[str, Any]:
        if self.restarts == 0 and self.count == self.steps.get("unpicklable"):
            return {"b": {"lock": threading.Lock()}, "a": {}}
        return {"b": {"odd": {1, 2}} if "unpicklable" in self.steps else {}, "a": {}}

    def state(self) -> Any:
        if self.restarts == 0 and self.count == self.steps.get("stateless"):
            raise ValueError("broken")
        return np.full(1, self.count, np.float32)

    def close(self) -> None:
        pass


class Facade:
    """What has the stepper."""


BOTH = {"a": 1, "b": 1}


@pytest.mark.parametrize("big", [99, 4, 1])
def test_states_that_fail_after_a_step(big, compiled):
    """The step is interrupted, and its observations are the last ones, in whatever form it travels."""
    constructor = functools.partial(Counting, big=big, stateless=4)
    with ParallelEnv([constructor], backend="serial", on_error="restart") as env:
        env.stepper.batch.write_states()
        env.reset()
        for _ in range(3):
            _, (rewards,), (terminateds,), (truncateds,), (infos,) = env.step([BOTH])
        assert (rewards["a"], terminateds["__all__"], truncateds["__all__"]) == (0.0, False, True)
        assert infos["a"]["final_obs"].tolist() == [4.0, 4.0]
        assert "broken" in infos["__common__"]["error"]


@pytest.mark.parametrize("big", [99, 1])
def test_last_states_that_fail_in_episodes_of_one_step(big, compiled):
    """The step is interrupted; the one before, which also ended an episode, is not returned once more."""
    constructor = functools.partial(Counting, big=big, length=2, stateless=6)
    with ParallelEnv([constructor], backend="serial", on_error="restart") as env:
        env.stepper.batch.write_states()
        env.reset()
        for step in range(3):
            _, (rewards,), (terminateds,), (truncateds,), (infos,) = env.step([BOTH])
            assert rewards["a"] == (2**60 if big == 1 else 1.0) * (step < 2)
        assert (terminateds["__all__"], truncateds["__all__"]) == (False, True)
        assert infos["a"]["final_obs"].tolist() == [5.0, 5.0]
        assert "broken" in infos["__common__"]["error"]


@pytest.mark.parametrize("big", [99, 1])
def test_infos_that_do_not_pickle(big, compiled):
    """Their step is interrupted after its record was written: nothing is known, and no older values are taken."""
    constructor = functools.partial(Counting, big=big, unpicklable=4)
    with ParallelEnv([constructor], backend="serial", on_error="restart") as env:
        env.reset()
        for _ in range(3):
            _, (rewards,), _, (truncateds,), (infos,) = env.step([BOTH])
        assert (rewards["a"], truncateds["__all__"]) == (0.0, True)
        assert infos["a"]["final_obs"].tolist() == [0.0, 0.0]
        assert "lock" in infos["__common__"]["error"]


def test_order_of_keys_after_a_restart(compiled):
    constructor = functools.partial(Counting, fails=3)
    with ParallelEnv([constructor], backend="serial", on_error="restart", restart_infos="last") as env:
        env.reset()
        for _ in range(2):
            observations, rewards, *flags, (infos,) = env.step([BOTH])
        assert [*observations[0]] == [*rewards[0]] == ["a", "b"]
        assert [[*of_env] for (of_env,) in flags] == [["a", "b", "__all__"]] * 2
        assert [*infos] == ["a", "b", "__common__"]


def test_no_last_observations_where_no_episode_has_ended(compiled):
    """The record of a pickled step still has those of an earlier one."""
    constructor = functools.partial(Counting, length=4, big=6)
    with ParallelEnv([constructor] * 2, backend="serial") as env:
        stepper = ArrayStepper(env, Facade())
        stepper.reset()
        for step in range(1, 7):
            arrays = stepper.step({agent: np.ones(2, np.int64) for agent in "ab"})
            ends = step in (3, 6)
            assert arrays.terminated.tolist() == [ends] * 2
            if len(arrays.final_observations):
                assert arrays.finally_observed.tolist() == [[ends] * 2] * 2
                assert (arrays.final_observations[0] != 0).all() == ends
        assert step == 6


def test_observations_after_a_reward_that_has_no_place(compiled):
    constructors = [Counting, functools.partial(Counting, bad=3)]
    with ParallelEnv(constructors, backend="serial") as env:
        stepper = ArrayStepper(env, Facade())
        stepper.reset()
        actions = {agent: np.ones(2, np.int64) for agent in "ab"}
        stepper.step(actions)
        with pytest.raises(ValueError, match="the reward of agent 'a' is None"):
            stepper.step(actions)
        arrays = stepper.step(actions, env_ids=(0,))
        assert arrays.observations[0][..., 0].tolist() == [[4.0, 4.0], [3.0, 3.0]]


class Masked(Counting):
    """Its masks have one entry too many."""

    mask_spaces = dict.fromkeys("ab", spaces.MultiBinary(2))

    def masks(self) -> dict[str, Any]:
        return dict.fromkeys("ab", np.ones(2 + (self.count > 2), np.int8))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_masks_of_another_shape(shared_memory, compiled):
    class Adapter(DictEnv):
        mask_spaces = Masked.mask_spaces

        def masks(self) -> Any:
            return self.source.masks()

    with ParallelEnv([Masked], backend="serial", adapter=Adapter, shared_memory=shared_memory) as env:
        env.reset()
        env.step([BOTH])
        with pytest.raises(EnvError, match=r"the action mask of agent '[ab]': expected an array of shape \(2,\)"):
            env.step([BOTH])
