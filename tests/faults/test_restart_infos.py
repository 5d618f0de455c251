"""`restart_infos="last"`: the infos of the step that a fault interrupts, under dicts and facades."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv

CASES = [("SAME_STEP", steps) for steps in range(4)] + [
    (mode, steps) for mode in ("NEXT_STEP", "DISABLED") for steps in (0, 2)
]
each_case = pytest.mark.parametrize(("mode", "steps"), CASES)
ACTIONS = {"a": 0, "b": 0}


class Informing:
    """Infos of each step; `step` raises at action 9, and its process ends at action 8."""

    possible_agents: ClassVar = ["a", "b"]
    observation_spaces: ClassVar = dict.fromkeys("ab", spaces.Box(-99, 99, (1,), np.float32))
    action_spaces: ClassVar = dict.fromkeys("ab", spaces.Discrete(10))

    def __init__(self, keyed: object) -> None:
        self.keyed, self.time = keyed, 0

    def results(self, over: bool) -> Any:
        seen = {agent: np.full(1, self.time, np.float32) for agent in "ab"}
        infos = {agent: {"state": np.full(2, self.time), "by": agent, **self.more()} for agent in "ab"}
        return seen, dict.fromkeys("ab", 1.0), {"__all__": False}, {"__all__": over}, infos

    def more(self) -> dict[str, Any]:
        return {} if self.keyed is None else {"any": self.keyed}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        observations, _, _, _, infos = self.results(False)
        return observations, infos

    def step(self, actions: Any) -> Any:
        if actions["a"] == 9:
            raise ConnectionError("lost")
        if actions["a"] == 8:
            os._exit(3)
        self.time += 1
        return self.results(self.time == 3)


def start(mode: str, keyed: object = None, **keywords: Any) -> ParallelEnv:
    keywords = {"num_workers": 2, "on_error": "restart", "restart_infos": "last", **keywords}
    return ParallelEnv([lambda: Informing(keyed)] * 2, mode, **keywords)


def before(steps: int) -> dict[str, Any]:
    """The infos of an agent after this many steps; an episode has three, and an automatic reset comes after them."""
    return {"state": [steps % 3] * 2}


def plain(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in info.items()}


@pytest.mark.parametrize("keyed", [None, object], ids=["numbers", "pickled"])
@pytest.mark.parametrize("fault", [9, 8], ids=["raise", "exit"])
@each_case
def test_agents_have_their_infos_of_the_step_before(mode, steps, fault, keyed):
    with start(mode, keyed) as env:
        env.reset()
        for _ in range(steps):
            env.step([ACTIONS] * 2)
        *_, infos = env.step([ACTIONS, {**ACTIONS, "a": fault}])
        assert infos[1]["__common__"].keys() == {"restarted", "error"}
        for agent in "ab":
            info, more = plain(infos[1][agent]), {} if keyed is None else {"any": keyed}
            final, reset = info.pop("final_obs", None), info.pop("reset_info", None)
            assert info == {**before(steps), "by": agent, **more}
            assert (final is None) == (reset is None) == (mode != "SAME_STEP")
        *_, infos = env.step([ACTIONS] * 2) if mode != "DISABLED" else env.reset()
        assert "restarted" not in infos[1].get("__common__", {})  # nothing comes twice


def test_agents_that_have_died_have_none():
    class Dying(Informing):
        def results(self, over: bool) -> Any:
            seen, rewards, terminateds, truncateds, infos = super().results(over)
            if self.time:
                terminateds["b"] = True
            return seen, rewards, terminateds, truncateds, infos

    with ParallelEnv(
        [lambda: Dying(None)], "NEXT_STEP", backend="serial", on_error="restart", restart_infos="last"
    ) as env:
        env.reset()
        env.step([ACTIONS])
        *_, (infos,) = env.step([{"a": 9}])
        assert infos.keys() == {"a", "__common__"}


def test_facades_have_them_too():
    read = {
        GymnasiumVectorEnv: lambda infos: infos["state"][2:].tolist(),
        PettingZooVecEnv: lambda infos: [infos[agent]["state"][1].tolist() for agent in "ab"],
        StackedVecEnv: lambda infos: [infos[1][agent]["state"].tolist() for agent in "ab"],
    }
    sent = {
        GymnasiumVectorEnv: np.array([0, 0, 9, 0]),
        PettingZooVecEnv: {"a": np.array([0, 9]), "b": np.zeros(2, np.int64)},
        StackedVecEnv: np.array([[0, 0], [9, 0]]),
    }
    for facade, state_of in read.items():
        env = facade(start("NEXT_STEP", backend="serial", num_workers=None))
        env.reset()
        nothing: Any = sent[facade]
        nothing = {a: np.zeros(2, np.int64) for a in "ab"} if isinstance(nothing, dict) else np.zeros_like(nothing)
        env.step(nothing)
        *_, infos = env.step(sent[facade])
        assert state_of(infos) == [[1, 1], [1, 1]], facade
        env.close()


def test_it_needs_restarts():
    with pytest.raises(ValueError, match='on_error="restart"'):
        ParallelEnv([lambda: Informing(None)], restart_infos="last")
    with pytest.raises(ValueError, match="\"last\" or None, got 'first'"):
        start("SAME_STEP", restart_infos="first")
