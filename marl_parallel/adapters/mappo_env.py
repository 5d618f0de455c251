"""Environments of the MAPPO and HARL projects: lists with one entry per agent, and share observations beside them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import choices_of
from marl_parallel.adapters import attributes
from marl_parallel.adapters.attributes import (
    AgentID,
    declared,
    declared_or_none,
    number_of_agents,
    type_name,
)
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
from marl_parallel.adapters.tuple_env import idle_action

BAD_TRANSITION = "bad_transition"
"""The key of infos which says that a step limit has ended the episode, not the simulator."""

_SPACES = "observation_space", "share_observation_space", "action_space"
_FORMS = "one-hot", "column", "index"
_OF_RESET = {
    4: "a list of observations",
    5: "(observations, share_observations)",
    6: "(observations, share_observations, available_actions)",
}
_OF_STEP = {
    4: "(observations, rewards, dones, infos)",
    5: "(observations, share_observations, rewards, dones, infos)",
    6: "(observations, share_observations, rewards, dones, infos, available_actions)",
}
_AFTER = {
    4: "as `reset` returned observations",
    5: "as `reset` returned share observations without available actions",
    6: "as `reset` returned share observations",
}
"""By the number of values of `step`: what `reset` and `step` return, and why `step` must return that many."""


class MAPPOEnv(Adapter):
    """A simulator with lists of spaces, `share_observation_space` among them; see `docs/environments.md`.

    Args:
        source: The simulator.
        actions: How `Discrete` and `MultiDiscrete` actions reach it: "one-hot" rows, "column" for integers in an array
            `(agents, 1)`, or "index" for integers `(agents,)`. None chooses what the projects' own runners send.

    Raises:
        NotAnEnvironment: A list of spaces is missing, or one of them cannot be converted.
        ValueError: `actions` has another value.

    Example:
        >>> class Swarm:
        ...     observation_space = [spaces.Box(-9, 9, (4,))] * 2
        ...     share_observation_space = [spaces.Box(-9, 9, (8,))] * 2
        ...     action_space = [spaces.Discrete(3)] * 2
        ...     def reset(self):
        ...         self.time = 0
        ...         return [np.zeros(4, np.float32)] * 2
        ...     def step(self, actions):
        ...         self.time += 1
        ...         observations = [np.full(4, self.time, np.float32)] * 2
        ...         return observations, [[float(actions.sum())]] * 2, [self.time == 9] * 2, [{}, {}]
        >>> from marl_parallel import ParallelEnv
        >>> with ParallelEnv([Swarm] * 2, backend="serial") as env:
        ...     observations, infos = env.reset()
        ...     _, rewards, *_ = env.step([{"agent_0": 2, "agent_1": 1}] * 2)
        ...     rewards[0], env.state().shape
        ({'agent_0': 3.0, 'agent_1': 3.0}, (2, 2, 8))
    """

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A MAPPO environment"
    all_may_act: ClassVar[bool] = True
    names: ClassVar[frozenset[str]] = frozenset({"mappo"})

    def __init__(self, source: Any, *, actions: Literal["one-hot", "column", "index"] | None = None) -> None:
        if actions not in (None, *_FORMS):
            raise ValueError(f"actions must be None or one of {', '.join(map(repr, _FORMS))}; got {actions!r}")
        self.joint_actions = "" if actions else "mappo"
        # As in OpenAI's particle environments, and those derived from them.
        takes_indices = declared_or_none(source, "discrete_action_input")
        self._takes_indices = takes_indices is True
        if actions is None and takes_indices is False:
            actions = "one-hot"
        self._actions = actions
        super().__init__(source)
        share = self._listed("share_observation_space")
        self._share_shapes = [space.shape or () for space in share]
        self._equal_shares = len({*self._share_shapes}) == 1
        self.state_space, self.state_per_agent = _stacked_space(share), True
        counts = {agent: choices_of(space) for agent, space in self.action_spaces.items()}
        self.mask_spaces = {
            agent: spaces.MultiBinary(sum(choices)) for agent, choices in counts.items() if choices is not None
        }
        # For results of all agents at once: the number of actions if all have the same Discrete space, else 0.
        first = self.action_spaces[self.possible_agents[0]]
        are_equal = all(space is first or space == first for space in self.action_spaces.values())
        self._choices = int(first.n) if are_equal and isinstance(first, spaces.Discrete) and first.start == 0 else 0
        self._no_flags = dict.fromkeys([*self.possible_agents, ALL], False)
        self._masks: dict[AgentID, NDArray[np.int8]] = {}
        self._share: Any = None  # the latest share observations, as the simulator returned them
        self._shares = False  # whether it returns share observations
        self._num_values = 4  # that `step` returns, as the form of what `reset` has returned says
        self._seen: dict[AgentID, Any] = {}
        self._ended: set[AgentID] = set()  # the agents that have terminated before the end of the episode
        self._over: tuple[bool, bool] | None = None  # the flags `__all__` of an episode that is over

    # -- spaces --------------------------------------------------------------------------------------------------------

    def _check_spaces(self) -> None:
        """Spaces are converted one by one."""

    def _state_space(self) -> Space[Any] | None:
        return None  # it is made of the share observations

    def _agents(self) -> list[AgentID]:
        lengths = {name: _length(declared(self.source, name)) for name in _SPACES}
        number = number_of_agents(self.source) or lengths["action_space"]
        wrong = [name for name, length in lengths.items() if length not in (None, number)]
        if number is None or wrong:
            has = ", ".join(f"`{name}` of {length}" for name, length in lengths.items())
            raise NotAnEnvironment(
                f"{self.kind} has lists of spaces with one entry per agent; {type_name(self.source)} declares "
                f"{number_of_agents(self.source) or 'no number of'} agents, {has}"
            )
        return [f"agent_{index}" for index in range(number)]

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        return dict(zip(self.possible_agents, self._listed(f"{what}_space")))

    def _listed(self, name: str) -> list[Space[Any]]:
        """The spaces of all agents, converted to Gymnasium's."""
        declaration, number = declared(self.source, name), len(self.possible_agents)
        if declaration is None:
            raise NotAnEnvironment(
                f"{self.kind} has a list `{name}` with one space per agent; {type_name(self.source)} has none. "
                "If its `seed` makes the spaces, call it in the constructor"
            )
        one_each = attributes.listed(declaration) or [declaration] * number
        converted: dict[int, Space[Any]] = {}  # most agents share one object
        for index, space in enumerate(one_each):
            if id(space) not in converted:
                where = f"{name}[{index}] of {type_name(self.source)}"
                converted[id(space)] = _converted(space, where, sizes=name != "action_space")
        return [converted[id(space)] for space in one_each]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self._reset(keywords)
        self._num_values = self._number_of_values(result)
        self._shares = self._num_values > 4
        seen, share, available = (*result, None)[:3] if self._shares else (result, None, None)
        self._over, self._share = None, share
        self._ended.clear()
        self._seen = self._observations("reset", seen)
        self._masks = self._allowed("reset", available)
        return self._seen, {agent: {} for agent in self.possible_agents}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        if self._over is not None:  # steps do nothing until the caller resets
            terminated, truncated = self._over
            return {}, {}, {ALL: terminated}, {ALL: truncated}, {}
        joint = self._as_sent(actions[JOINT]) if JOINT in actions else self._joint(actions)
        try:
            result = self.source.step(joint)
        except TypeError as error:
            self._check_call(error, "step", joint)
            raise
        number = self._num_values
        if not isinstance(result, tuple | list) or len(result) != number:
            raise self._wrong_result("step", f"{_OF_STEP[number]}; {number} values, {_AFTER[number]}", result)
        seen, share, rewards, dones, infos, available = result if number == 6 else _with_gaps(result)
        observations = self._observations("step", seen)
        self._masks = self._allowed("step", available)
        self._seen, self._share = observations, share
        of_agents = self._infos(infos)
        numbers, done = self._rewards(rewards), self._dones(dones)
        terminateds, truncateds = self._no_flags.copy(), self._no_flags.copy()
        if any(done):
            self._set_end_flags(done, of_agents, terminateds, truncateds)
        elif self._ended:
            self._ended.clear()
        return observations, numbers, terminateds, truncateds, of_agents

    def _set_end_flags(
        self, done: list[bool], infos: dict[Any, Any], terminateds: dict[Any, bool], truncateds: dict[Any, bool]
    ) -> None:
        """Set the flags of agents that have ended, and add the last masks to the infos if the episode has ended."""
        agents = self.possible_agents
        common = bool(infos.get(COMMON, {}).get(BAD_TRANSITION))
        for agent, is_done in zip(agents, done):
            bad = is_done and agent not in self._ended and (common or bool(infos[agent].get(BAD_TRANSITION)))
            terminateds[agent], truncateds[agent] = is_done and not bad, bad
        self._ended = {agent for agent in agents if terminateds[agent]}
        if all(done):
            self._over = terminateds[ALL], truncateds[ALL] = len(self._ended) == len(agents), any(truncateds.values())
            for agent, mask in self._masks.items():  # an automatic reset replaces the result of `masks`
                infos[agent] = {ACTION_MASK: mask, **infos[agent]}

    def masks(self) -> Mapping[AgentID, Any]:
        return self._masks

    def state(self) -> Any:
        """The share observations of all agents, one row each; shorter ones are padded with zeros."""
        space: Any = self.state_space
        rows = self._share_rows()
        if self._equal_shares:
            try:
                together = np.array(rows, space.dtype)
            except (OverflowError, TypeError, ValueError):  # of other shapes or types: one by one, as below
                together = np.empty(0)
            if together.shape == space.shape:
                return together
        state = np.zeros(space.shape, space.dtype)
        for index, (row, shape) in enumerate(zip(rows, self._share_shapes)):
            array = np.asarray(row)
            if array.shape != shape:
                raise self._mismatch(
                    f"the share observation of agent {self.possible_agents[index]!r} of {type_name(self.source)} must "
                    f"have the shape {shape}, as `share_observation_space` says; it has {array.shape}"
                )
            state[index][tuple(map(slice, shape))] = array
        return state

    def _share_rows(self) -> Sequence[Any]:
        number = len(self.possible_agents)
        if not self._shares:
            joined = np.concatenate([np.ravel(seen) for seen in self._seen.values()])
            rows = [*self._seen.values()]
            return [joined if joined.shape == shape else one for one, shape in zip(rows, self._share_shapes)]
        share = self._share
        if isinstance(share, np.ndarray) and share.shape == self._share_shapes[0] != (number,):
            return [share] * number  # one for all
        if not isinstance(share, list | tuple | np.ndarray) or len(share) != number:
            raise self._mismatch(
                f"{type_name(self.source)} must return {number} share observations, one per agent; it returned "
                f"{described(share)}"
            )
        return [*share]

    def _number_of_values(self, result: Any) -> int:
        """The number of values that `step` returns, which the form of the result of `reset` says."""
        number = len(self.possible_agents)
        if type(result) is not tuple or len(result) not in (2, 3) or not _is_list(result[0]):
            return 4
        first = result[0]
        if len(first) != number:
            return 4
        if len(result) == number and np.shape(first[0]) != self.observation_spaces[self.possible_agents[0]].shape:
            return 4  # a tuple with the observation of each agent
        if len(result) == 3:
            return 6 if result[2] is None or _is_list(result[2]) else 4
        return 5 if self._are_shares(result[1]) else 4

    def _are_shares(self, share: Any) -> bool:
        """Whether a value beside the observations is a share observation for each agent, or one for all."""
        number, shape = len(self.possible_agents), self._share_shapes[0]
        if isinstance(share, np.ndarray) and share.shape == shape != (number,):
            return True
        return _is_list(share) and len(share) == number and np.shape(share[0]) == shape

    def _joint(self, actions: Mapping[Any, Any]) -> Any:
        """What the simulator's `step` takes: an array with one row per agent, or a list if the rows' shapes differ."""
        form = self._actions or ("column" if self._shares else "index")
        if self._choices:
            agents = self.possible_agents
            is_whole = [*actions] == agents
            given = actions.values() if is_whole else [actions[a] if a in actions else self._idle(a) for a in agents]
            numbers = np.array([*given]).reshape(-1)
            if form == "one-hot":
                return np.eye(self._choices)[numbers]
            return numbers[:, None] if form == "column" else numbers
        rows = [
            _row(actions[agent] if agent in actions else self._idle(agent), space, form)
            for agent, space in self.action_spaces.items()
        ]
        first = rows[0].shape
        return np.array(rows) if all(row.shape == first for row in rows) else rows

    def _as_sent(self, joint: Any) -> Any:
        """The actions that a runner has sent; one-hot rows as indices for a simulator that says it takes indices."""
        if not self._takes_indices:
            return joint
        indices = []
        for row, space in zip(joint, self.action_spaces.values()):
            sizes = choices_of(space) or []
            if np.ndim(row) != 1 or len(sizes) in (0, len(row)) or len(row) != sum(sizes):
                return joint
            parts = np.split(np.asarray(row), np.cumsum(sizes)[:-1])
            indices.append(np.array([part.argmax() for part in parts]))
        if all(len(row) == 1 for row in indices):
            return np.concatenate(indices)
        return np.stack(indices) if len({len(row) for row in indices}) == 1 else indices

    def _idle(self, agent: AgentID) -> Any:
        """The action of an agent for which none was passed: the first one allowed, else 0 or the value nearest to 0."""
        mask, space = self._masks.get(agent), self.action_spaces[agent]
        if mask is not None and isinstance(space, spaces.Discrete):
            return int(space.start) + int(mask.argmax())
        if mask is not None and isinstance(space, spaces.MultiDiscrete):
            parts = np.split(mask, np.cumsum(space.nvec)[:-1])
            return np.array([int(part.argmax()) for part in parts], space.dtype)
        return idle_action(space)

    def _observations(self, method: str, seen: Any) -> dict[AgentID, Any]:
        agents = self.possible_agents
        if not _is_list(seen) or len(seen) != len(agents):
            expected = ", or ".join(_OF_RESET.values()) if method == "reset" else _OF_STEP[self._num_values]
            raise self._wrong_result(method, f"{expected}, with {len(agents)} observations, one per agent", seen)
        return {agent: _cast(one, self.observation_spaces[agent]) for agent, one in zip(agents, seen)}

    def _allowed(self, method: str, available: Any) -> dict[AgentID, NDArray[np.int8]]:
        """The action masks of the agents that have one: 1 for an action that is allowed."""
        agents = self.possible_agents
        if available is None:
            return {}
        if not _is_list(available) or len(available) != len(agents):
            raise self._wrong_result(method, f"{len(agents)} available actions, one row per agent, or None", available)
        masks: dict[AgentID, NDArray[np.int8]] = {}
        if self._choices:
            together = _array_of(available)
            if together.shape == (len(agents), self._choices) and together.dtype.kind in "biuf":
                return dict(zip(agents, (together != 0).astype(np.int8)))
        for agent, row in zip(agents, available):
            space = self.mask_spaces.get(agent)
            if row is None or space is None:
                continue
            array = np.asarray(row)
            if array.shape != space.shape or array.dtype.kind not in "biuf":
                raise self._mismatch(
                    f"`{method}` of {type_name(self.source)} must return {math.prod(space.shape or ())} zeros and ones "
                    f"as the available actions of agent {agent!r}; it returned {described(row)}"
                )
            masks[agent] = (array != 0).astype(np.int8)
        return masks

    def _rewards(self, rewards: Any) -> dict[AgentID, Any]:
        agents = self.possible_agents
        if not _is_list(rewards) or len(rewards) != len(agents):
            raise self._wrong_result("step", f"{len(agents)} rewards, one per agent", rewards)
        if isinstance(rewards, np.ndarray) and rewards.size == len(agents) and rewards.dtype.kind in "biuf":
            return dict(zip(agents, rewards.reshape(-1)))
        numbers = [reward[0] if type(reward) is list and len(reward) == 1 else _alone(reward) for reward in rewards]
        if not {*map(type, numbers)} <= REWARD_TYPES:
            for agent, reward in zip(agents, numbers):
                if number_in(reward) is None:
                    raise self._mismatch(
                        f"`step` of {type_name(self.source)} must return {len(agents)} rewards, one number per agent; "
                        f"the reward of agent {agent!r} is {reprlib.repr(reward)} ({described(reward)})"
                    )
        return dict(zip(agents, numbers))

    def _dones(self, dones: Any) -> list[bool]:
        number = len(self.possible_agents)
        flags: Any = dones
        if isinstance(dones, np.ndarray) and dones.size in (1, number):
            flags = dones.reshape(-1).tolist()
        elif not _is_list(dones):
            flags = [dones]
        if len(flags) == 1:  # one flag for all
            flags = [flags[0]] * number
        if {*map(type, flags)} != {bool}:
            flags = [_alone(flag) for flag in flags]
            if not all(isinstance(flag, bool | np.bool_ | Integral | float | np.floating) for flag in flags):
                flags = []
        if len(flags) != number:
            raise self._wrong_result("step", f"{number} dones, one flag per agent, or one flag", dones)
        return [*map(bool, flags)]

    def _infos(self, infos: Any) -> dict[Any, Any]:
        agents = self.possible_agents
        if infos is None or isinstance(infos, Mapping):
            return {agent: {} for agent in agents} | ({COMMON: infos} if infos else {})
        kinds = {*map(type, infos)} if _is_list(infos) and len(infos) == len(agents) else {type(None)}
        if kinds != {dict} and not all(issubclass(kind, Mapping) for kind in kinds):
            raise self._wrong_result("step", f"{len(agents)} infos, one dict per agent, or one dict", infos)
        return dict(zip(agents, infos))


def is_mappo(source: Any) -> bool:
    """Whether a simulator declares lists of spaces with one entry per agent, share observations among them."""
    number = _length(declared(source, "share_observation_space"))
    return number is not None and all(_length(declared(source, name)) == number for name in _SPACES)


def _length(declaration: Any) -> int | None:
    """The number of spaces in a list, tuple or `Tuple` space, of Gymnasium or gym."""
    return len(attributes.listed(declaration)) or None


def _converted(space: Any, where: str, *, sizes: bool) -> Space[Any]:
    """Convert a space of OpenAI's gym or, with `sizes`, a plain size to Gymnasium's; Gymnasium's stay as they are.

    A plain size is a number or a shape. SMAC's lists begin with the whole size; the lists after it are ignored.
    """
    if isinstance(space, Space):
        return space
    if sizes and (shape := _plain_shape(space)):
        return spaces.Box(-np.inf, np.inf, shape, np.float32)
    name = type(space).__name__
    try:
        if name == "Box":
            return spaces.Box(space.low, space.high, tuple(space.shape), np.dtype(space.dtype).type)
        if name == "Discrete":
            return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
        if name == "MultiDiscrete":  # the particle environments have one of their own, with bounds
            of_bounds = getattr(space, "nvec", None) is None
            counts = np.asarray(space.high) - np.asarray(space.low) + 1 if of_bounds else np.asarray(space.nvec)
            return spaces.MultiDiscrete(counts)
        if name == "MultiBinary":
            return spaces.MultiBinary(space.n)
        if name == "Tuple":
            return spaces.Tuple([_converted(part, where, sizes=False) for part in space.spaces])
    except (AttributeError, TypeError, ValueError) as error:
        raise NotAnEnvironment(f"{where} is {space!s:.200}, which cannot be converted: {error}") from error
    kinds = "a Box, Discrete, MultiDiscrete, MultiBinary or Tuple of Gymnasium or gym"
    raise NotAnEnvironment(
        f"{where} is {space!s:.200}, of type {type_name(space)}; expected {kinds}"
        + (", a size, or a list [size, ...]" * sizes)
        + ". Let the simulator declare one of these, such as gymnasium.spaces.Box(old.low, old.high, old.shape, "
        "old.dtype)"
    )


def _plain_shape(space: Any) -> tuple[int, ...] | None:
    several = [*space] if isinstance(space, list | tuple | np.ndarray) else [space]
    if len(several) > 1 and any(isinstance(part, list | tuple) for part in several[1:]):
        del several[1:]
    are_sizes = all(isinstance(part, Integral) and not isinstance(part, bool) and int(part) > 0 for part in several)
    return tuple(map(int, several)) if are_sizes and several else None


def _stacked_space(share: Sequence[Space[Any]]) -> Space[Any] | None:
    """The space of all share observations, `(agents, ...)`; None unless all are arrays with the same number of axes."""
    shapes = [space.shape for space in share]
    if not all(isinstance(space, spaces.Box) for space in share) or len({len(shape or ()) for shape in shapes}) != 1:
        return None
    boxes: list[Any] = [*share]
    dtype = np.result_type(*[box.dtype for box in boxes])
    if len({*shapes}) == 1:
        lows, highs = (np.stack([getattr(box, name) for box in boxes]).astype(dtype) for name in ("low", "high"))
        return spaces.Box(lows, highs, dtype=dtype.type)
    shape = tuple(map(max, zip(*[box.shape for box in boxes])))
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, (len(share), *shape), dtype.type)


def _row(action: Any, space: Any, form: str) -> NDArray[Any]:
    """The action of one agent as the simulator takes it."""
    if isinstance(space, spaces.Discrete):
        number = int(np.asarray(action).reshape(()))
        if form == "one-hot":
            row: NDArray[Any] = np.eye(int(space.n))[number - int(space.start)]
            return row
        return np.array([number] if form == "column" else number)
    if isinstance(space, spaces.MultiDiscrete) and form == "one-hot":
        return np.concatenate([np.eye(int(count))[part] for count, part in zip(space.nvec, action)])
    if isinstance(space, spaces.Tuple):
        return np.concatenate([np.ravel(part) for part in action])
    return np.asarray(action)


def _cast(observation: Any, space: Space[Any]) -> Any:
    """Cast an observation to the dtype of its space if NumPy's rule "same_kind" allows it; else return it unchanged."""
    if not isinstance(space, spaces.Box) or (type(observation) is np.ndarray and observation.dtype == space.dtype):
        return observation
    try:
        array = np.asarray(observation)
    except ValueError:  # rows of different lengths: a later error names the agent
        return observation
    return array.astype(space.dtype) if np.can_cast(array.dtype, space.dtype, "same_kind") else observation


def _array_of(rows: Any) -> NDArray[Any]:
    """Rows of numbers as one array; an empty one if they have different lengths."""
    try:
        return np.asarray(rows)
    except ValueError:
        return np.zeros(0)


def _with_gaps(result: Sequence[Any]) -> tuple[Any, ...]:
    """Four or five values of a step as six, with None for those that are missing."""
    observations, *share, rewards, dones, infos = result
    return observations, share[0] if share else None, rewards, dones, infos, None


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim > 0)


def _alone(value: Any) -> Any:
    """The only element of a list or array of one; anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.reshape(())[()] if value.size == 1 else value
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
