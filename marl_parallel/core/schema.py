"""What the environments of a batch have in common: agents and spaces, compared and pickled.

A `Box` keeps four arrays of its shape. In most boxes each of them is one constant and travels as that constant. Boxes
whose bounds are bit for bit the same are equal without Gymnasium's comparison, which takes several passes over them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Schema
from marl_parallel.core.pickling import ByValuePickler


def common_schema(described: Sequence[Schema]) -> Schema:
    """What all environments have in common.

    Raises:
        ValueError: They differ; the text says which, in what, for which agent.
    """
    first = described[0]
    for env_id, other in enumerate(described):
        if other is first:  # also where several environments gave the same description
            continue
        if other.rules is not first.rules:
            _differ(env_id, "rules", other.rules.value, first.rules.value)
        if other.possible_agents != first.possible_agents:
            _differ(env_id, "possible_agents", other.possible_agents, first.possible_agents)
        for kind in ("observation", "action", "reward"):
            ours, theirs = (getattr(d, f"{kind}_spaces") for d in (first, other))
            for agent in dict.fromkeys([*ours, *theirs]):
                if not _travel_alike(ours.get(agent), theirs.get(agent)):
                    what = f"the {kind} space of agent {agent!r}"
                    _differ(env_id, what, theirs.get(agent), ours.get(agent))
        if not _travel_alike(first.state_space, other.state_space):
            _differ(env_id, "the state space", other.state_space, first.state_space)
    return first


def _differ(env_id: int, what: str, theirs: Any, ours: Any) -> None:
    if str(theirs) == str(ours):  # such as a class and what it is derived from
        ours = "what looks the same, but is of another class, or has one in it"
    raise ValueError(
        f"all environments must have the same agents and spaces, but environment {env_id} differs from "
        f"environment 0 in {what}: {theirs} against {ours}"
    )


# -- equality of spaces ------------------------------------------------------------------------------------------------


def alike(declared: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID]) -> list[tuple[Space[Any], list[int]]]:
    """Groups of agents whose spaces are equal: the space, and their positions among `agents`."""
    groups: list[tuple[Space[Any], list[int]]] = []
    group_of: dict[int, list[int]] = {}  # by the id of a space that has been looked at: most agents share one object
    for position, agent in enumerate(agents):
        own = declared[agent]
        if id(own) not in group_of:
            for space, positions in groups:
                if equal(space, own):
                    group_of[id(own)] = positions
                    break
            else:
                groups.append((own, positions := []))
                group_of[id(own)] = positions
        group_of[id(own)].append(position)
    return groups


def equal(ours: Space[Any], theirs: Space[Any]) -> bool:
    """Whether two spaces are equal; as `ours == theirs`, but quick for large boxes that are bit for bit the same.

    Example:
        >>> equal(spaces.Box(0, 1, (3,)), spaces.Box(0, 1, (3,))), equal(spaces.Box(0, 1, (3,)), spaces.Box(0, 2, (3,)))
        (True, False)
    """
    if ours is theirs:
        return True
    if type(ours) is type(theirs):
        if type(ours) is spaces.Box and _same_box(ours, theirs):
            return True
        if type(ours) is spaces.Dict and [*ours.spaces] == [*theirs.spaces]:  # type: ignore[attr-defined]
            return all(map(equal, ours.spaces.values(), theirs.spaces.values()))  # type: ignore[attr-defined]
        if type(ours) is spaces.Tuple and len(ours.spaces) == len(theirs.spaces):  # type: ignore[attr-defined]
            return all(map(equal, ours.spaces, theirs.spaces))  # type: ignore[attr-defined]
    return bool(ours == theirs)


def _travel_alike(ours: Space[Any] | None, theirs: Space[Any] | None) -> bool:
    """Whether two spaces are equal, and of the same classes: values of a derived class may travel in another way."""
    if ours is theirs:
        return True
    # By name: a class that is made in the constructor is another one in each environment.
    if (type(ours).__module__, type(ours).__qualname__) != (type(theirs).__module__, type(theirs).__qualname__):
        return False
    if isinstance(ours, spaces.Dict) and isinstance(theirs, spaces.Dict):
        return ours.keys() == theirs.keys() and all(_travel_alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, spaces.Tuple) and isinstance(theirs, spaces.Tuple):
        return len(ours) == len(theirs) and all(map(_travel_alike, ours, theirs))
    assert ours is not None
    assert theirs is not None
    # Gymnasium leaves equality to each kind of space; of one that has none, only the kind can be compared.
    return type(ours).__eq__ is object.__eq__ or equal(ours, theirs)


_LARGE = 1024
"""Bytes; smaller arrays are pickled as they are."""
_CHUNK = 1 << 16
"""Elements that are compared at a time, so that temporary arrays stay in the cache and differences end it early."""


def _same_box(ours: Any, theirs: Any) -> bool:
    return (
        math.prod(ours.shape) > _LARGE
        and ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and _same_elements(ours.low, theirs.low)
        and _same_elements(ours.high, theirs.high)
    )


def _same_elements(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    if not ours.flags.c_contiguous or not theirs.flags.c_contiguous:
        return bool(np.array_equal(ours, theirs))
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    chunks = range(0, ours.size, _CHUNK)
    return not any((ours[start : start + _CHUNK] != theirs[start : start + _CHUNK]).any() for start in chunks)


# -- pickling ----------------------------------------------------------------------------------------------------------


def dumps_compactly(value: Any) -> bytes:
    """Pickle something with cloudpickle, each large array of one constant as that constant.

    `pickle.loads` makes all arrays again in full: writable, contiguous and with memory of their own.

    Example:
        >>> space = spaces.Box(0, 255, (1080, 1920, 3), np.uint8)
        >>> pickled = dumps_compactly(space)
        >>> len(pickled) < 1000, pickle.loads(pickled) == space
        (True, True)
    """
    with io.BytesIO() as file:
        _CompactPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


class _CompactPickler(ByValuePickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and (pattern := _constant(obj)) is not None:
            return _filled, (obj.shape, obj.dtype, pattern)
        return super().reducer_override(obj)


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], pattern: bytes) -> NDArray[Any]:
    if not any(pattern):
        return np.zeros(shape, dtype)  # takes no time, and memory only once it is written to
    return np.full(shape, np.frombuffer(pattern, dtype)[0], dtype)


_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _constant(array: NDArray[Any]) -> bytes | None:
    """The bytes of the value that all elements of a large array have; None for other arrays."""
    unsigned = _UNSIGNED.get(array.dtype.itemsize)
    if array.nbytes < _LARGE or array.dtype.kind not in "biuf" or unsigned is None:
        return None
    first = array[(slice(0, 1),) * array.ndim].tobytes()
    if not any(array.strides):  # one element, broadcast
        return first
    bits = array.ravel("K").view(unsigned)
    value = np.frombuffer(first, unsigned)[0]
    for start in range(0, bits.size, _CHUNK):
        if (bits[start : start + _CHUNK] != value).any():
            return None
    return first
