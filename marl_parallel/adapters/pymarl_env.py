"""PyMARL's `MultiAgentEnv`: SMAC, SMACv2, SMAClite and the wrappers of EPyMARL."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Mapping, Sized
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.adapters.attributes import AgentID, declared_or_none, method, number_of_agents, type_name
from marl_parallel.adapters.protocol import (
    ALL,
    COMMON,
    JOINT,
    REWARD_TYPES,
    Adapter,
    Dicts,
    NotAnEnvironment,
    Rules,
    described,
    number_in,
)

METHODS = ("get_env_info", "get_obs", "get_state", "get_avail_actions", "reset", "step")
"""The methods by which a simulator is recognised."""

EPISODE_LIMIT = "episode_limit"
"""The key of infos which says that a step limit has ended the episode, not the simulator."""

_SIZES = {
    "n_agents": "", "n_actions": "get_total_actions", "obs_shape": "get_obs_size", "state_shape": "get_state_size",
}  # fmt: skip
"""Entries of `get_env_info()`, and the methods that return the same."""


class PyMARLEnv(Adapter):
    """A simulator with the methods of PyMARL's `MultiAgentEnv`; `docs/environments.md` describes its steps and masks.

    Attributes:
        common_reward: Whether the simulator returns one reward for all agents, not a list; None before the first step.

    Raises:
        NotAnEnvironment: The simulator lacks methods, or `get_env_info` lacks sizes.

    Example:
        >>> class Duel:
        ...     def get_env_info(self):
        ...         return {"n_agents": 2, "n_actions": 3, "obs_shape": 4, "state_shape": 5, "episode_limit": 9}
        ...     def reset(self):
        ...         self.time = 0
        ...     def step(self, actions):
        ...         self.time += 1
        ...         return float(actions.sum()), self.time == 9, {}
        ...     def get_obs(self):
        ...         return [np.full(4, self.time, np.float32)] * 2
        ...     def get_state(self):
        ...         return np.full(5, self.time, np.float32)
        ...     def get_avail_actions(self):
        ...         return [[1, 0, 0], [0, 1, 1]]
        >>> from marl_parallel import ParallelEnv
        >>> with ParallelEnv([Duel] * 2, backend="serial") as env:
        ...     observations, infos = env.reset()
        ...     _, rewards, *_ = env.step([{"agent_1": 2}] * 2)
        ...     rewards[0], env.action_masks[1]["agent_0"], env.state().shape
        ({'agent_0': 2.0, 'agent_1': 2.0}, array([ True, False, False]), (2, 5))
    """

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A PyMARL environment"
    names: ClassVar[frozenset[str]] = frozenset({"pymarl"})
    joint_actions: str = "pymarl"
    methods: ClassVar[tuple[str, ...]] = METHODS

    def __init__(self, source: Any) -> None:
        self._sizes: dict[str, Any] = {}
        super().__init__(source)
        agents, actions = self.possible_agents, self._sizes["n_actions"]
        self._get_obs: Any = method(source, "get_obs")
        self._get_state: Any = method(source, "get_state")
        self._get_avail_actions: Any = method(source, "get_avail_actions")
        self.mask_spaces = dict.fromkeys(agents, spaces.MultiBinary(actions))
        state_shape = self._sizes["state_shape"]
        self.state_space = spaces.Box(-np.inf, np.inf, state_shape, np.float32) if state_shape else None
        self.common_reward: bool | None = None
        self._masks: NDArray[np.int8] = np.zeros((0, actions), np.int8)  # no rows before the first reset
        self._over: tuple[bool, bool] | None = None  # the flags of an episode that is over
        self._last_state: Any = None  # of an episode that is over, once it has been requested

    def _check_spaces(self) -> None:
        """Spaces come from `get_env_info()`; spaces that the simulator declares are ignored."""

    def _state_space(self) -> Space[Any] | None:
        return None  # it comes from `get_env_info()`, too

    def _agents(self) -> list[AgentID]:
        self._sizes = _sizes(self.source)
        return [f"agent_{index}" for index in range(self._sizes["n_agents"])]

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        space: Space[Any]
        if what == "action":
            space = spaces.Discrete(self._sizes["n_actions"])
        else:
            space = spaces.Box(-np.inf, np.inf, self._sizes["obs_shape"], np.float32)
        return dict.fromkeys(self.possible_agents, space)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self._reset(keywords)
        if result is None:
            info: Any = {}
        elif isinstance(result, tuple | list) and len(result) == 2:
            info = result[1] if isinstance(result[1], Mapping) else {}
        else:
            raise self._wrong_result("reset", "nothing, (observations, state) or (observations, info)", result)
        self._over, self._last_state = None, None
        observations = self._observations()
        self._masks = self._allowed()
        return observations, self._infos(info)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        if self._over is not None:  # steps do nothing until the caller resets
            terminated, truncated = self._over
            return {}, {}, {ALL: terminated}, {ALL: truncated}, {}
        agents = self.possible_agents
        if JOINT in actions:
            joint = actions[JOINT]
        else:
            in_order = [*actions.values()] if [*actions] == agents else self._completed(actions)
            joint = np.array(in_order).reshape(-1)  # PyMARL's runners pass an array, too
        try:
            result = self.source.step(joint)
        except TypeError as error:
            self._check_call(error, "step", joint)
            raise
        reward, terminated, truncated, info = self._parts(result)
        observations = self._observations()
        self._masks = self._allowed()
        infos = self._infos(info)
        if terminated or truncated:
            self._over = terminated, truncated
            for agent, mask in self.masks().items():  # an automatic reset replaces the result of `masks`
                infos[agent] = {ACTION_MASK: mask}
        return (
            observations,
            self._rewards(reward),
            dict.fromkeys([*agents, ALL], terminated),
            dict.fromkeys([*agents, ALL], truncated),
            infos,
        )

    def masks(self) -> Mapping[AgentID, Any]:
        return dict(zip(self.possible_agents, self._masks))

    def mask_array(self) -> NDArray[np.int8]:
        return self._masks

    def state(self) -> Any:
        if self._over is None:
            return self._get_state()
        if self._last_state is None:  # the simulator changes nothing until it is reset
            self._last_state = copy.deepcopy(self._get_state())
        return self._last_state

    def _completed(self, actions: Mapping[Any, Any]) -> list[Any]:
        """The action of each agent; a missing one becomes the first allowed action, or 0 if none is allowed."""
        return [
            actions[agent] if agent in actions else int(mask.argmax())  # 0 if nothing is allowed
            for agent, mask in zip(self.possible_agents, self._masks)
        ]

    def _parts(self, result: Any) -> tuple[Any, bool, bool, Mapping[Any, Any]]:
        """Reward, two flags and info of a step."""
        number = len(result) if isinstance(result, tuple | list) else 0
        if number == 3:
            (reward, terminated, info), truncated = result, False
        elif number == 5:
            _, reward, terminated, truncated, info = result
        else:
            raise self._wrong_result(
                "step", "(reward, terminated, info) or (observations, reward, terminated, truncated, info)", result
            )
        info = {} if info is None else info
        if not isinstance(info, Mapping):
            raise self._wrong_result("step", "a dict of infos", info)
        terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if terminated and info.get(EPISODE_LIMIT):
            terminated, truncated = False, True
        return reward, terminated, truncated, info

    def _flag(self, what: str, flag: Any) -> bool:
        if isinstance(flag, bool | np.bool_ | Integral) or getattr(flag, "size", None) == 1:
            return bool(flag)
        raise self._wrong_result("step", f"one {what} flag for all agents", flag)

    def _rewards(self, reward: Any) -> dict[AgentID, Any]:
        agents = self.possible_agents
        if type(reward) in REWARD_TYPES:
            self.common_reward = True
            return dict.fromkeys(agents, reward)
        if isinstance(reward, list | tuple):
            several = [*reward] if {*map(type, reward)} <= REWARD_TYPES else [*map(number_in, reward)]
        elif math.prod(getattr(reward, "shape", ())) == 1:
            several = [number_in(reward)]
            self.common_reward = several != [None]
            if self.common_reward:
                return dict.fromkeys(agents, several[0])
        else:
            several = [*reward.reshape(-1)] if hasattr(reward, "reshape") else []
            if not {*map(type, several)} <= REWARD_TYPES:
                several = [*map(number_in, several)]
        if len(several) != len(agents) or any(one is None for one in several):
            form = f"a number as the reward, or a list or array of {len(agents)} numbers, one per agent"
            raise self._mismatch(
                f"`step` of {type_name(self.source)} must return {form}; the reward that it returned is "
                f"{reprlib.repr(reward)} ({described(reward)})"
            )
        self.common_reward = False
        return dict(zip(agents, several))

    def _observations(self) -> dict[AgentID, Any]:
        agents, seen = self.possible_agents, self._get_obs()
        if not isinstance(seen, list | tuple | np.ndarray) or len(seen) != len(agents):
            raise self._wrong_result("get_obs", f"{len(agents)} observations, one per agent", seen)
        try:
            return {agent: _as_float32(one) for agent, one in zip(agents, seen)}
        except (TypeError, ValueError) as error:
            raise self._wrong_result("get_obs", f"{len(agents)} arrays of numbers ({error})", seen) from error

    def _allowed(self) -> NDArray[np.int8]:
        """The action masks of all agents, one row for each: 1 for an action that is allowed."""
        masks, shape = self._get_avail_actions(), (len(self.possible_agents), self._sizes["n_actions"])
        try:
            array = np.asarray(masks)
        except ValueError:  # rows of different lengths
            array = np.zeros(0)
        if array.shape != shape or array.dtype.kind not in "biuf":
            rows = [*masks] if isinstance(masks, list | tuple | np.ndarray) else []
            lengths = ", ".join(str(len(row)) if isinstance(row, Sized) else type(row).__name__ for row in rows)
            got = f"{len(rows)} rows of lengths {lengths}" if rows else described(masks)
            expected = f"{shape[0]} rows, one per agent, of {shape[1]} zeros and ones, as `get_env_info` says"
            raise self._mismatch(
                f"`get_avail_actions` of {type_name(self.source)} must return {expected}; it returned {got}"
            )
        allowed: NDArray[np.int8] = (array != 0).astype(np.int8)
        return allowed

    def _infos(self, info: Mapping[Any, Any]) -> dict[Any, Any]:
        infos: dict[Any, Any] = {agent: {} for agent in self.possible_agents}
        if info:
            infos[COMMON] = info
        return infos


def is_pymarl(source: Any) -> bool:
    """Whether a simulator has the methods of PyMARL's `MultiAgentEnv`."""
    return all(callable(declared_or_none(source, name)) for name in METHODS)


def _sizes(source: Any) -> dict[str, Any]:
    """The number of agents and actions, and the shapes of observations and of the state, which is None without one."""
    get_env_info: Any = method(source, "get_env_info")
    info = get_env_info()
    sizes: dict[str, Any] = {}
    for name, instead in _SIZES.items():
        value = info.get(name) if isinstance(info, Mapping) else None
        if value is None and callable(ask := declared_or_none(source, instead)):
            value = ask()
        sizes[name] = value if value is not None or name != "n_agents" else number_of_agents(source)
    for name in ("n_agents", "n_actions"):
        if not _is_positive(sizes[name]):
            raise _wrong_size(source, name, "a positive number", sizes[name])
        sizes[name] = int(sizes[name])
    for name in ("obs_shape", "state_shape"):
        shape = sizes[name]
        several = tuple(shape) if isinstance(shape, list | tuple | np.ndarray) else (shape,)
        if name == "state_shape" and (shape is None or several == (0,)):
            sizes[name] = None
        elif not several or not all(map(_is_positive, several)):
            raise _wrong_size(source, name, "a positive number, or several for arrays of more axes", shape)
        else:
            sizes[name] = tuple(map(int, several))
    return sizes


def _is_positive(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _wrong_size(source: Any, name: str, expected: str, got: Any) -> NotAnEnvironment:
    return NotAnEnvironment(
        f"`get_env_info` of {type_name(source)} must return a dict with {name!r}, {expected}; it has {got!r}"
    )


def _as_float32(observation: Any) -> Any:
    if type(observation) is np.ndarray and observation.dtype == np.float32:
        return observation
    return np.asarray(observation, np.float32)
