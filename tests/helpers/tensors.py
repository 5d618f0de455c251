"""`TorchRLEnv` compared with the core: its tensors must equal the core's dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from helpers.comparison import assert_same
from marl_parallel import ParallelEnv
from marl_parallel.vector import TorchRLEnv


def same_value(actual: Any, space: spaces.Space, place: tuple[int, int], value: Any, path: str) -> None:
    """Check one place of a tensordict or tensor against the value of a dict; zeros for None."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, child in items:
            same_value(actual.get(str(key)), child, place, None if value is None else value[key], f"{path}[{key!r}]")
        return
    dtype = np.int64 if isinstance(space, spaces.Discrete) else space.dtype
    expected = np.zeros(space.shape or (), dtype) if value is None else np.asarray(value, dtype)
    assert_same(np.asarray(actual[place].numpy()), expected, path)


def core_action(space: spaces.Space, value: Any, place: tuple[int, int]) -> Any:
    """The core's form of an action in a tensordict."""
    if isinstance(space, spaces.Dict):
        return {key: core_action(child, value.get(str(key)), place) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(core_action(child, value.get(str(i)), place) for i, child in enumerate(space.spaces))
    number = value[place].numpy()
    if isinstance(space, spaces.Discrete):
        return np.int64(number + space.start)
    return number


class TorchRLComparison:
    """A `TorchRLEnv` and the core, stepped with the same actions.

    Attributes:
        data: The latest tensordict.
    """

    def __init__(self, env: TorchRLEnv, core: ParallelEnv) -> None:
        self.env, self.core = env, core
        self.places = {a: (group, k) for group, agents in env.group_map.items() for k, a in enumerate(agents)}
        self.ended: list[set[Any]] = [set() for _ in range(core.num_envs)]
        self.deaths = self.ends = 0

    def reset(self, **arguments: Any) -> None:
        torch.manual_seed(7)
        self.data = self.env.reset(**arguments)
        observations, infos = self.core.reset(**arguments)
        self.seen = [*observations]
        self.check_observations(self.data)
        self.check_infos(infos)

    def actions(self, env_ids: Sequence[int]) -> list[dict[Any, Any]]:
        chosen: list[dict[Any, Any]] = []
        for i in env_ids:
            chosen.append({})
            for agent in self.core.acting[i]:
                group, k = self.places[agent]
                chosen[-1][agent] = core_action(self.core.action_space[agent], self.data.get((group, "action")), (i, k))
        return chosen

    def step(self) -> None:
        everywhere = range(self.core.num_envs)
        self.data = self.env.rand_action(self.data)
        results = self.core.step(self.actions(everywhere))
        data, following = self.env.step_and_maybe_reset(self.data.clone())
        self.seen = [*results[0]]
        self.check_observations(data["next"])
        over = self.check_flags(data["next"], everywhere, results)
        infos = [*results[4]]
        if over:
            for i, seen, more in zip(over, *self.core.reset(env_ids=over), strict=True):
                self.seen[i], self.ended[i] = seen, set()
                infos[i] = {**saying(infos[i])}
                for key, info in more.items():
                    if info:
                        results = info if "restarted" in info else {"reset_info": info}
                        infos[i][key] = {**infos[i].get(key, {}), **results}
        self.check_infos(infos)
        self.check_observations(following)
        self.data = following

    def check_observations(self, data: Any) -> None:
        acting = self.core.acting
        for agent, (group, k) in self.places.items():
            of_group = data.get(group)
            for i, seen in enumerate(self.seen):
                space = self.core.observation_space[agent]
                same_value(of_group.get("observation"), space, (i, k), seen.get(agent), f"{agent} in {i}")
                assert of_group["mask"][i, k].item() is (agent in acting[i])
                assert of_group["present"][i, k].item() is (agent in seen)

    def check_flags(self, data: Any, env_ids: Sequence[int], results: Any) -> list[int]:
        """Check rewards and flags; returns the environments whose episode is over."""
        over = []
        for i, observations, rewards, terminateds, truncateds in zip(env_ids, *results[:4], strict=True):
            roots = terminateds["__all__"], truncateds["__all__"]
            self.flags_are(data, i, *roots)
            for agent, (group, k) in self.places.items():
                reward = data.get((group, "reward"))
                assert_same(reward[i, k].numpy(), np.array([rewards.get(agent, 0.0)], np.float32))
                own = terminateds.get(agent, False), truncateds.get(agent, False)
                self.ended[i] -= {agent} if agent in observations and not any(own) else set()  # it has come back
                died = any(own) and agent not in self.ended[i]
                self.flags_are(data.get(group), (i, k), *(own if died else roots))
                self.ended[i] |= {agent} if died else set()
                self.deaths += died and not any(roots)
            over += [i] if any(roots) else []
        self.ends += len(over)
        return over

    @staticmethod
    def flags_are(data: Any, place: Any, terminated: bool, truncated: bool) -> None:
        flags = [data[name][place].tolist() for name in ("terminated", "truncated", "done")]
        assert flags == [[bool(terminated)], [bool(truncated)], [bool(terminated or truncated)]]

    def check_infos(self, infos: Sequence[Any]) -> None:
        for i, expected in enumerate(infos):
            due = as_from_arrays(without_reports(saying(expected)))  # some have the actions that the simulator got
            assert_same(without_reports(self.env.infos.get(i, {})), due, f"infos of {i}")


def saying(infos: dict[Any, Any]) -> dict[Any, Any]:
    return {} if all(info == {} for info in infos.values()) else infos


def as_from_arrays(value: Any) -> Any:
    """Actions in dicts may be arrays without axes; those out of arrays are scalars of NumPy."""
    if isinstance(value, dict):
        return {key: as_from_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_from_arrays, value))
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def without_reports(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: {k: v for k, v in info.items() if k != "error"} for key, info in infos.items()}
