"""Tuple environments: actions, observations, rewards and flags come as sequences with one entry per agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import AgentID, declared, length_of, number_of_agents, type_name
from marl_parallel.adapters.protocol import ALL, COMMON, Adapter, Dicts, NotAnEnvironment, Rules, described


class TupleEnv(Adapter):
    """A simulator whose `step` takes one action per agent, in order, and returns sequences in the same order."""

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A tuple environment"
    names: ClassVar[frozenset[str]] = frozenset({"tuple"})
    needs_all_actions: ClassVar[bool] = True
    sequence: type[tuple[Any, ...]] | type[list[Any]]  # of the actions that the simulator's `step` takes

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        observation_space, action_space = declared(source, "observation_space"), declared(source, "action_space")
        self.sequence = tuple if isinstance(action_space, spaces.Tuple) else list
        self._shared_shape = None if length_of(observation_space) else getattr(observation_space, "shape", None)
        self._no_flags = dict.fromkeys([*self.possible_agents, ALL], False)
        self._alive: list[AgentID] = []
        self._over: tuple[bool, bool] | None = None  # the flags `__all__` of an episode that is over

    def _agents(self) -> list[AgentID]:
        observation_space, action_space = (declared(self.source, f"{what}_space") for what in ("observation", "action"))
        number = number_of_agents(self.source) or length_of(action_space) or length_of(observation_space)
        if not number:
            raise NotAnEnvironment(
                f"{self.kind} has one space per agent or an attribute `n_agents`, but {type_name(self.source)} has "
                f"neither: its observation space is {observation_space}, its action space is {action_space}"
            )
        return [f"agent_{index}" for index in range(number)]

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        agents, declaration = self.possible_agents, declared(self.source, f"{what}_space")
        if length_of(declaration) == len(agents):
            return {agent: space for agent, space in zip(agents, declaration) if isinstance(space, Space)}
        if declaration is None or isinstance(declaration, Space):
            return {} if declaration is None else dict.fromkeys(agents, declaration)
        raise NotAnEnvironment(
            f"{type_name(self.source)} has {len(agents)} agents, but its {what}_space is {described(declaration)}; "
            "expected one space per agent, or one space that all share"
        )

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self._reset(keywords)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._wrong_result("reset", "(observations, info)", result)
        observations, info = result
        if self._shared_shape and getattr(observations, "shape", None) == self._shared_shape:
            raise self._wrong_result("reset", "one observation per agent", observations, result)
        self._alive, self._over = self.possible_agents, None
        of_agents = self._for_each("reset", "observations", observations, result)
        return of_agents, self._infos("reset", info, result)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        if self._over is not None:  # steps do nothing until the caller resets, as in single-agent environments
            terminated, truncated = self._over
            return {}, {}, {ALL: terminated}, {ALL: truncated}, {}
        agents = self.possible_agents
        in_order = [*actions.values()] if [*actions] == agents else [self._action(agent, actions) for agent in agents]
        sequence = self.sequence(in_order)
        try:
            result = self.source.step(sequence)
        except TypeError as error:
            self._check_call(error, "step", sequence)
            raise
        if not isinstance(result, tuple | list) or len(result) != 5:
            raise self._wrong_result("step", "(observations, rewards, terminated, truncated, info)", result)
        observations, rewards, terminated, truncated, info = result
        if terminated is False and truncated is False:
            self._alive = agents
            terminateds, truncateds = self._no_flags.copy(), self._no_flags.copy()
        else:
            terminateds = self._of_each_or_all(terminated, "terminated flags")
            truncateds = self._of_each_or_all(truncated, "truncated flags")
            ends = [(is_true(terminateds[agent]), is_true(truncateds[agent])) for agent in agents]
            self._alive = [agent for agent, flags in zip(agents, ends) if not any(flags)]
            terminateds[ALL] = truncateds[ALL] = False
            if not self._alive:
                all_terminated, all_truncated = map(all, zip(*ends))
                self._over = all_terminated, all_truncated or not all_terminated
                terminateds[ALL], truncateds[ALL] = self._over
        return (
            self._for_each("step", "observations", observations),
            self._of_each_or_all(rewards, "rewards"),
            terminateds,
            truncateds,
            self._infos("step", info, result),
        )

    def alive(self) -> Sequence[AgentID]:
        return self._alive

    def _action(self, agent: AgentID, actions: Mapping[Any, Any]) -> Any:
        if agent in actions:
            return actions[agent]
        if agent in self._alive:
            raise ValueError(f"no action for agent {agent!r}: a tuple environment needs one for each of {self._alive}")
        return idle_action(self.action_spaces.get(agent))

    def _for_each(self, method: str, what: str, values: Any, result: Any = None) -> dict[AgentID, Any]:
        agents = self.possible_agents
        if not _is_sequence(values) or len(values) != len(agents):
            raise self._wrong_result(method, f"{len(agents)} {what}, one per agent", values, result)
        return dict(zip(agents, values))

    def _of_each_or_all(self, values: Any, what: str) -> dict[AgentID, Any]:
        if isinstance(values, np.ndarray) and values.size == 1 and (not values.ndim or len(self.possible_agents) > 1):
            values = values.reshape(())[()]
        if _is_sequence(values):
            return self._for_each("step", what, values)
        if values is None or (isinstance(values, Iterable) and not hasattr(values, "shape")):
            raise self._wrong_result("step", f"{what}, one per agent or one for all", values)
        return dict.fromkeys(self.possible_agents, values)

    def _infos(self, method: str, info: Any, result: Any) -> dict[Any, Any]:
        agents = self.possible_agents
        if isinstance(info, Mapping):
            if any(agent in info for agent in agents):
                return dict(info)
            return {agent: {} for agent in agents} | ({COMMON: info} if info else {})
        if not _is_sequence(info) or not all(isinstance(entry, Mapping) for entry in info):
            raise self._wrong_result(method, "one dict of infos, or one per agent", info, result)
        return self._for_each(method, "infos", info, result)


def _is_sequence(values: Any) -> bool:
    if isinstance(values, list | tuple | np.ndarray):  # decided without the slower checks below
        return not isinstance(values, np.ndarray) or values.ndim > 0
    if isinstance(values, str | bytes | Mapping | set | frozenset) or not hasattr(values, "__len__"):
        return False
    return getattr(values, "shape", True) != () and isinstance(values, Iterable)  # other libraries' arrays


def is_true(flag: Any) -> bool:
    """Whether a flag is true; False for several flags."""
    try:
        return bool(flag)
    except Exception:  # several flags in one: `core/transition.py` raises, for every kind of environment
        return False


def idle_action(space: Space[Any] | None) -> Any:
    """The action for an agent that has ended, if the caller passes none: zeros or the nearest value in the space."""
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(getattr(space, "start", np.zeros(space.shape)), space.dtype)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.Tuple):
        return tuple(map(idle_action, space.spaces))
    if isinstance(space, spaces.Dict):
        return {key: idle_action(child) for key, child in space.spaces.items()}
    return np.zeros(space.shape, space.dtype) if isinstance(space, spaces.MultiBinary) else None
