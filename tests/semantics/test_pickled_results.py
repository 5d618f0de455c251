"""Results and actions that travel pickled are like those that travel in the block, with and without compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel import ParallelEnv
from marl_parallel.core import codec

AGENTS = ["a", "b", "c"]
BOX = spaces.Box(-9, 9, (2,), np.float32)
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
