"""The common agents and spaces of the environments in a batch: compares and pickles them.

A `Box` keeps four arrays of its shape. In most boxes, the elements of an array are equal; one element travels for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.adapters.protocol import AgentID, GroupSpaces, InvalidAgents, Schema
from marl_parallel.core.objects.pickling import ByValuePickler, dumps_by_value, loads


class Common(NamedTuple):
    """The description of all environments of a batch.

    Attributes:
        schema: Its agents are those of all environments, in order of first appearance.
        positions: By environment, the positions of its own agents among these, in its own order; only of environments
            that do not have all of them in the same order.
        no_state: Why there is no global state although environments have one; "" if that is not so.
        no_options: The environments whose `reset` takes no options, if others take some.
    """

    schema: Schema
    positions: dict[int, list[int]]
    no_state: str
    no_options: frozenset[int]

    def agents(self) -> dict[int, list[AgentID]]:
        """By environment, its own agents in the order of all; only of environments that do not have all agents."""
        everyone = self.schema.possible_agents
        return {
            env_id: [everyone[position] for position in sorted(own)]
            for env_id, own in self.positions.items()
            if len(own) < len(everyone)
        }


def common_schema(described: Sequence[Schema]) -> Common:
    """The description of all environments, which may differ in their agents and in their global states.

    Spaces of what environments return may differ in their bounds: the description has the bounds of all.

    Raises:
        ValueError: Environments differ in rules, or in a space of an agent; or only some know their agents beforehand.
    """
    common = first = described[0]
    no_state = ""
    for env_id, other in enumerate(described):
        if other is first:  # several environments may share one description
            continue
        if not no_state and (text := _difference_in_state(common, other)):
            no_state = f"environment {env_id} differs from the environments before it in {text}"
        if no_state:
            common, other = (replace(one, state_space=None) for one in (common, other))
        common = _widened(common, other)
        if text := _difference_in_kind(common, other):
            raise ValueError(
                f"environment {env_id} differs from the environments before it in {text}. Use a ParallelEnv for each "
                "kind of environment"
            )
        if text := _difference_in_spaces(common, other):
            same = [one for one in range(env_id) if _difference_in_spaces(described[one], other) == text]
            others = f"environment {same[0]}" if same else "the environments before it"
            raise ValueError(
                f"environment {env_id} differs from {others} in {text}. An agent needs equal spaces in all "
                "environments that have it"
            )
        common = _with_agents_of(common, other)
    position = {agent: index for index, agent in enumerate(common.possible_agents)}
    positions = {
        env_id: [position[agent] for agent in one.possible_agents]
        for env_id, one in enumerate(described)
        if one.possible_agents != common.possible_agents
    }
    if positions and common.state_space is not None and common.state_per_agent:
        no_state = "its first axis is the agents, and environments do not have the same agents in the same order"
        common = replace(common, state_space=None)
    if positions:  # what a simulator gets for all of its agents is not what facades send for all agents of the batch
        common = replace(common, joint_actions="", all_may_act=False)
    takes_options = ["options" in one.reset_keywords for one in described]
    no_options = [env_id for env_id, takes in enumerate(takes_options) if not takes]
    return Common(common, positions, no_state, frozenset(no_options if any(takes_options) else ()))


def _with_agents_of(ours: Schema, theirs: Schema) -> Schema:
    """The first description with the agents of both, and with what is true of both."""
    changed: dict[str, Any] = {}
    if keywords := {*theirs.reset_keywords}.difference(ours.reset_keywords):
        changed["reset_keywords"] = tuple(sorted(keywords.union(ours.reset_keywords)))
    if theirs.joint_actions != ours.joint_actions:
        changed["joint_actions"] = ""
    if ours.all_may_act and not theirs.all_may_act:
        changed["all_may_act"] = False
    known = {*ours.possible_agents}
    if new := [agent for agent in theirs.possible_agents if agent not in known]:
        changed["possible_agents"] = [*ours.possible_agents, *new]
        for name in _OF_AGENTS:
            declared, others = getattr(ours, name), getattr(theirs, name)
            changed[name] = {**declared, **{agent: others[agent] for agent in new if agent in others}}
    return replace(ours, **changed) if changed else ours


def difference(first: Schema, other: Schema, positions: Sequence[int] | None = None) -> str | None:
    """How the description of an environment differs from the common one: "the action space of agent ...: got ...".

    `positions` are those of the agents that it must have; None for all. None also if what the environment returns has
    narrower bounds.
    """
    if text := _difference_in_kind(first, other):
        return text
    expected = first.possible_agents
    if positions is not None:
        expected = [expected[position] for position in positions]
    if other.possible_agents != expected:
        return _against("possible_agents", other.possible_agents, expected)
    if first.state_space is not None:
        if not _includes(first.state_space, other.state_space):
            return _against("the state space", other.state_space, first.state_space)
        if other.state_per_agent != first.state_per_agent:
            return _against("state_per_agent", other.state_per_agent, first.state_per_agent)
    return _difference_in_spaces(first, other)


def _difference_in_kind(first: Schema, other: Schema) -> str | None:
    """The first difference in what simulators expect, or in whether agents are known beforehand; None without one."""
    if other.rules is not first.rules:
        return _against("rules", other.rules.value, first.rules.value)
    for name in ("seeded_when_made", "options_last", "needs_all_actions", "observes_turn"):
        ours, theirs = getattr(first, name), getattr(other, name)
        if theirs != ours:
            return _against(name, theirs, ours)
    if bool(other.possible_agents) != bool(first.possible_agents):
        return _against("possible_agents", other.possible_agents, first.possible_agents)
    return None


def _difference_in_state(first: Schema, other: Schema) -> str | None:
    """The difference in global states, except their bounds; None without one."""
    one, another = first.state_space, other.state_space
    if one is not another and (one is None or another is None or union(one, another) is None):
        return _against("the state space", another, one)
    if one is not None and other.state_per_agent != first.state_per_agent:
        return _against("state_per_agent", other.state_per_agent, first.state_per_agent)
    return None


def _difference_in_spaces(first: Schema, other: Schema) -> str | None:
    """The first difference in the spaces of agents that both have; None without one."""
    of_one = {*first.possible_agents} ^ {*other.possible_agents}
    for kind in ("observation", "action", "reward", "mask"):
        ours, theirs = (getattr(schema, f"{kind}_spaces") for schema in (first, other))
        same = _includes if f"{kind}_spaces" in _RETURNED else partial(equal, classes=True)
        for agent in {**ours, **theirs}:
            one, another = ours.get(agent), theirs.get(agent)
            if agent not in of_one and not same(one, another):
                what = f"the {'space of the action mask' if kind == 'mask' else f'{kind} space'} of agent {agent!r}"
                text = _against(what, another, one)
                if kind == "action" and one is not None and another is not None and union(one, another) is not None:
                    text += (
                        ". Only what environments return may differ in bounds: each action must fit all environments"
                    )
                if kind in ("observation", "action") and _can_be_padded(kind, one, another):
                    arguments = "num_actions=" if kind == "action" else "shape= and num_actions="
                    text += f". The wrapper marl_parallel.wrappers.pad_spaces pads them, with {arguments}"
                return text
    return None


def _can_be_padded(kind: str, one: Any, another: Any) -> bool:
    """Whether two spaces that differ can be padded to the same sizes."""
    if type(one) is not type(another):
        return False
    if kind == "action":
        return isinstance(one, spaces.Discrete) and bool(one.start == another.start)
    if isinstance(one, spaces.Dict):
        return one.keys() == another.keys() and all(
            equal(one[key], another[key]) or key == ACTION_MASK or _can_be_padded(kind, one[key], another[key])
            for key in one
        )
    same_axes = isinstance(one, spaces.Box) and one.dtype == another.dtype and len(one.shape) == len(another.shape)
    return same_axes and one.shape != another.shape


_OF_AGENTS = ("observation_spaces", "action_spaces", "reward_spaces", "mask_spaces")
"""The spaces of agents."""

_RETURNED = ("observation_spaces", "reward_spaces")
"""The spaces of agents that may differ in their bounds, as `state_space` may."""


def _widened(ours: Schema, theirs: Schema) -> Schema:
    """The first description with the bounds of both; spaces that differ in something else stay as they are."""
    found: dict[tuple[int, int], Any] = {}  # by the ids of two spaces: most agents share one object

    def widened(one: Any, another: Any) -> Any:
        if one is None or another is None:
            return one
        pair = id(one), id(another)
        if pair not in found:
            wider = union(one, another)
            found[pair] = one if wider is None else wider
        return found[pair]

    changed: dict[str, Any] = {}
    if (state_space := widened(ours.state_space, theirs.state_space)) is not ours.state_space:
        changed["state_space"] = state_space
    for name in _RETURNED:
        declared, others = getattr(ours, name), getattr(theirs, name)
        of_agents = {agent: widened(space, others.get(agent)) for agent, space in declared.items()}
        if any(of_agents[agent] is not space for agent, space in declared.items()):
            changed[name] = declared.of(of_agents) if isinstance(declared, GroupSpaces) else of_agents
    return replace(ours, **changed) if changed else ours


def _includes(ours: Space[Any] | None, theirs: Space[Any] | None) -> bool:
    """Whether a space is equal to ours, or has narrower bounds."""
    if ours is None or theirs is None:
        return ours is theirs
    return union(ours, theirs) is ours


def union(ours: Space[Any], theirs: Space[Any]) -> Space[Any] | None:
    """The space with the bounds of both; None if they differ in something else; `ours` if it has these bounds.

    The bounds of a `Box` are `low` and `high`, of a `Discrete` `start` and `n`, of a `MultiDiscrete` `start` and
    `nvec`. Spaces of derived classes must be equal.

    Example:
        >>> union(spaces.Box(0, 1, (2,)), spaces.Box(-1, 0, (2,)))
        Box(-1.0, 1.0, (2,), float32)
        >>> union(spaces.Discrete(3), spaces.Discrete(3, start=5))
        Discrete(8)
        >>> union(spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,)))
    """
    one: Any = ours
    another: Any = theirs
    kind = type(one)
    if equal(one, another, classes=True):
        return ours
    if kind is not type(another):
        return None
    if kind is spaces.Dict or kind is spaces.Tuple:
        is_dict = kind is spaces.Dict
        keys = [*one] if is_dict else range(len(one))
        if (one.keys() != another.keys()) if is_dict else (len(one) != len(another)):
            return None
        parts: list[Any] = [union(one[key], another[key]) for key in keys]
        if any(part is None for part in parts):
            return None
        if all(part is one[key] for key, part in zip(keys, parts)):
            return ours
        return spaces.Dict([*zip(keys, parts)]) if is_dict else spaces.Tuple(parts)
    if kind not in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete) or (
        (one.dtype, one.shape) != (another.dtype, another.shape)
    ):
        return None
    if kind is spaces.Box:
        low, high = np.minimum(one.low, another.low), np.maximum(one.high, another.high)
        same = np.array_equal(low, one.low) and np.array_equal(high, one.high)
        return ours if same else spaces.Box(low, high, one.shape, one.dtype)
    size = "n" if kind is spaces.Discrete else "nvec"
    (start, count), (other_start, other_count) = (
        (np.asarray(space.start, np.int64), np.asarray(getattr(space, size), np.int64)) for space in (one, another)
    )
    least = np.minimum(start, other_start)
    most = np.maximum(start + count, other_start + other_count) - least
    if np.array_equal(least, start) and np.array_equal(most, count):
        return ours
    wider = copy.deepcopy(one)  # older releases of Gymnasium take no dtype for a `Discrete`
    wider.start = least.astype(one.dtype)[()]
    setattr(wider, size, most.astype(one.dtype)[()])
    return wider  # type: ignore[no-any-return]


def _against(what: str, theirs: Any, ours: Any) -> str:
    if str(theirs) == str(ours):  # such as a class and its base class
        ours = "something that looks the same, but is of another class or contains another class"
    return f"{what}: got {theirs}, expected {ours}"


def alike(declared: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID]) -> list[tuple[Space[Any], list[int]]]:
    """Groups of agents whose spaces are equal: the space, and their positions among `agents`."""
    groups: list[tuple[Space[Any], list[int]]] = []
    group_of: dict[int, list[int]] = {}  # by the id of a space that has been compared: most agents share one object
    for position, agent in enumerate(agents):
        space = declared[agent]
        if id(space) not in group_of:
            group = next((positions for other, positions in groups if equal(other, space)), None)
            if group is None:
                groups.append((space, group := []))
            group_of[id(space)] = group
        group_of[id(space)].append(position)
    return groups


def equal(ours: Space[Any] | None, theirs: Space[Any] | None, *, classes: bool = False) -> bool:
    """Whether two spaces are equal; fast for large boxes that are bitwise equal.

    With `classes`, all parts must have the same classes, too: values of a derived class may travel in another way.
    """
    kind, other = type(ours), type(theirs)
    if ours is theirs:
        return True
    # By name: a class that is defined in the constructor is a new class in each environment.
    if classes and (kind.__module__, kind.__qualname__) != (other.__module__, other.__qualname__):
        return False
    if classes or (kind is other and kind in (spaces.Dict, spaces.Tuple)):
        if isinstance(ours, spaces.Dict) and isinstance(theirs, spaces.Dict):
            return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key], classes=classes) for key in ours)
        if isinstance(ours, spaces.Tuple) and isinstance(theirs, spaces.Tuple):
            pairs = zip(ours, theirs)
            return len(ours) == len(theirs) and all(equal(one, another, classes=classes) for one, another in pairs)
    # Gymnasium leaves `==` to each class of spaces; without it, only the classes can be compared.
    if classes and kind.__eq__ is object.__eq__:
        return True
    return (kind is other is spaces.Box and _same_box(ours, theirs)) or bool(ours == theirs)


def check_pickled_agents(agents: Iterable[AgentID], kind: str) -> None:
    """Raise `InvalidAgents` for agents that are another key of a dict after they have been pickled.

    `kind` names the class that declares them. Agents travel pickled to the caller, and to simulators in actions.
    """
    for agent in agents:
        if type(agent) in (str, int):
            continue
        try:
            is_same = loads(dumps_compactly(agent)) in {agent}
            reason = "it is not equal to its copy"
        except Exception as error:
            is_same, reason = False, f"{type(error).__name__}: {error}"
        if not is_same:
            raise InvalidAgents(
                f"{kind} declares the agent {agent!r}, which does not survive pickling ({reason}): the ids of agents "
                "travel between workers and your program. Name agents by strings, numbers, tuples of them or enums, or "
                "by objects that are equal if their values are equal, such as objects of a frozen dataclass"
            )


_LARGE = 1024
"""Bytes; smaller arrays are pickled as they are."""
_CHUNK = 1 << 16
"""Elements to compare at a time: temporary arrays stay in the cache, and the first difference ends the comparison."""


def _same_box(ours: Any, theirs: Any) -> bool:
    return (
        math.prod(ours.shape) > _LARGE
        and ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and _same_elements(ours.low.reshape(-1), theirs.low.reshape(-1))
        and _same_elements(ours.high.reshape(-1), theirs.high.reshape(-1))
    )


def _same_elements(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    chunks = range(0, ours.size, _CHUNK)
    return not any((ours[start : start + _CHUNK] != theirs[start : start + _CHUNK]).any() for start in chunks)


def dumps_compactly(value: Any) -> bytes:
    """Pickle a value with cloudpickle; a large array of equal elements is pickled as one element.

    `pickle.loads` makes all arrays in full: writable, contiguous and with memory of their own.
    """
    return dumps_by_value(value, CompactPickler)


class CompactPickler(ByValuePickler):
    """Pickles a large, writable, contiguous array of equal elements as one element."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not np.ndarray or obj.nbytes < _LARGE:
            return super().reducer_override(obj)
        if obj.dtype.kind not in "biuf" or obj.dtype.itemsize not in (1, 2, 4, 8):
            return NotImplemented
        first = obj[(slice(0, 1),) * obj.ndim].tobytes()
        if any(obj.strides):  # else the array is one element, broadcast
            # Compared as integers: positive and negative zeros, and different NaNs, differ only in their bits.
            bits = obj.ravel("K").view(f"u{obj.dtype.itemsize}")
            if not _same_elements(bits, np.broadcast_to(np.frombuffer(first, bits.dtype), bits.shape)):
                return NotImplemented
        return _filled, (obj.shape, obj.dtype, first)


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], constant: bytes) -> NDArray[Any]:
    if not any(constant):
        return np.zeros(shape, dtype)  # takes no time, and memory only when it is written to
    return np.full(shape, np.frombuffer(constant, dtype)[0], dtype)
