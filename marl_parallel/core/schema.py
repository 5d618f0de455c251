"""The common agents and spaces of the environments in a batch: compares and pickles them.

A `Box` keeps four arrays of its shape. In most boxes, the elements of an array are equal; one element travels for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, InvalidAgents, Schema
from marl_parallel.core.pickling import ByValuePickler, dumps_by_value, loads


def common_schema(described: Sequence[Schema]) -> Schema:
    """The description of all environments; raises `ValueError` if they differ in rules, agents or spaces."""
    first = described[0]
    for env_id, other in enumerate(described):
        if other is not first and (text := difference(first, other)):  # several environments may share one description
            raise ValueError(
                "all environments must have the same agents and spaces, but environment "
                f"{env_id} differs from environment 0 in {text}"
            )
    return first


def difference(first: Schema, other: Schema) -> str | None:
    """How another description differs from the first one: "the action space of agent ...: got ..., expected ..."."""
    if other.rules is not first.rules:
        return _against("rules", other.rules.value, first.rules.value)
    if other.possible_agents != first.possible_agents:
        return _against("possible_agents", other.possible_agents, first.possible_agents)
    if not equal(first.state_space, other.state_space, classes=True):
        return _against("the state space", other.state_space, first.state_space)
    for kind in ("observation", "action", "reward", "mask"):
        ours, theirs = (getattr(schema, f"{kind}_spaces") for schema in (first, other))
        for agent in {**ours, **theirs}:
            if not equal(ours.get(agent), theirs.get(agent), classes=True):
                what = f"the {'space of the action mask' if kind == 'mask' else f'{kind} space'} of agent {agent!r}"
                return _against(what, theirs.get(agent), ours.get(agent))
    return None


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
    """Like `ours == theirs`, but fast for large boxes that are bitwise equal.

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
