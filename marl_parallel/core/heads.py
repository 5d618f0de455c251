"""The head of a transition's record: in which of its dicts each agent is, and of what type numbers and flags are.

Here is what bits, tags and codes stand for, how a head is gathered from the dicts, and who is where by what it says.
Where it lies, and what is written beside it, is the business of `records.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.pickling import Extras
from marl_parallel.core.transition import ALL, FLOATS, is_empty_info

# The first of each is what simulators give most; a reward is kept as a double, exactly, or travels pickled.
REWARD_TYPES: tuple[type, ...] = (
    *FLOATS, int, bool, np.bool_,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
VECTOR_TAG = len(REWARD_TYPES)
"""The tag of a reward that is a vector, in a column of its own."""
REWARD_TAGS = {t: tag for tag, t in enumerate(REWARD_TYPES)}
_LARGEST_EXACT = 2**53

FLAGS: tuple[Any, ...] = (False, True, np.False_, np.True_)
"""By their codes; those that are true have odd ones."""
FALSE_CODES: dict[type, int] = {bool: 0, np.bool_: 2}
"""The codes of what is false, by type."""


class Presence(NamedTuple):
    """Who is in which dict, who is alive and who acts: a bit of an agent's for each of these. Not to be changed."""

    observations: list[AgentID]
    rewards: list[AgentID]
    terminateds: list[AgentID]
    truncateds: list[AgentID]
    infos: list[AgentID]
    alive: list[AgentID]
    acting: list[AgentID]
    final_observations: list[AgentID]

    @classmethod
    def of(cls, agents: Sequence[AgentID], presence: bytes) -> Presence:
        """What the bits of each of these agents say."""
        return cls(*[[a for a, bits in zip(agents, presence, strict=True) if bits & bit] for bit in BITS.values()])


BITS = {name: 1 << place for place, name in enumerate(Presence._fields)}
EVERYWHERE = sum(BITS.values()) - BITS["final_observations"]
"""The bits of an agent that is in all of the five dicts, alive and acting."""


class Draft:
    """A head as it is gathered: what is of all agents in their order is taken whole, all else agent by agent.

    Args:
        places: Of each agent with a row in the block.

    Attributes:
        extras: What does not fit, by the name of the dict it belongs to.
    """

    def __init__(self, places: Mapping[AgentID, int]) -> None:
        self._places, self._agents = places, [*places]
        self._everybody, self._each = 0, [0] * len(places)
        self.extras: Extras = {}

    @property
    def presence(self) -> bytes:
        """The bits of each agent."""
        return bytes([bits | self._everybody for bits in self._each])

    def note(self, name: str, agents: Iterable[AgentID]) -> None:
        """Note who is in a dict or list, by its name in `Presence`; each agent must have a place."""
        bit, agents = BITS[name], [*agents]
        if agents == self._agents:
            self._everybody |= bit
            return
        for agent in agents:
            self._each[self._places[agent]] |= bit

    def leave_out(self, name: str, key: Any, value: Any) -> None:
        """Note an entry of a dict that does not fit."""
        self.extras.setdefault(name, {})[key] = value

    def rewards(self, rewards: Mapping[Any, Any]) -> tuple[Sequence[Any], bytes]:
        """Take the rewards; returns the numbers of all agents, and the tags of their types."""
        size, numbers = len(self._agents), [*rewards.values()]
        tag = reward_tag(numbers)
        if tag is not None and [*rewards] == self._agents:
            self._everybody |= BITS["rewards"]
            return numbers, bytes((tag,)) * size
        numbers, tags = [0.0] * size, bytearray(size)
        for agent, reward in rewards.items():
            place, tag = self._places.get(agent), reward_tag([reward])
            if place is None or tag is None:
                self.leave_out("rewards", agent, reward)
                continue
            numbers[place], tags[place] = reward, tag
            self._each[place] |= BITS["rewards"]
        return numbers, bytes(tags)

    def note_vectors(self, tags: bytes, agents: Iterable[AgentID]) -> bytes:
        """Note agents whose rewards are in their column; returns the tags of all rewards with theirs among them."""
        everyone = bytearray(tags)
        for agent in agents:
            everyone[self._places[agent]] = VECTOR_TAG
        self.note("rewards", agents)
        return bytes(everyone)

    def flags(self, name: str, flags: Mapping[Any, Any]) -> bytes:
        """Take flags of one kind; returns the codes of all agents' and that of `__all__`."""
        size, bit = len(self._agents), BITS[name]
        codes = [FALSE_CODES[type(flag)] + flag if type(flag) in FALSE_CODES else -1 for flag in flags.values()]
        if -1 not in codes and [*flags] == [*self._agents, ALL]:
            self._everybody |= bit
            return bytes(codes)
        row = bytearray(size + 1)
        for (key, flag), code in zip(flags.items(), codes):
            place = size if key == ALL else self._places.get(key)
            if code < 0 or place is None:
                self.leave_out(name, key, flag)
                continue
            row[place] = code
            if place < size:
                self._each[place] |= bit
        return bytes(row)

    def agents(self, name: str, agents: Sequence[AgentID]) -> None:
        """Take a list of agents."""
        known = [agent for agent in agents if agent in self._places]
        self.note(name, known)
        if len(known) < len(agents):
            self.extras[name] = [agent for agent in agents if agent not in self._places]

    def infos(self, infos: dict[Any, Any]) -> None:
        """Take the infos, of which nothing but empty ones fits."""
        if infos.keys() <= self._places.keys() and all(map(is_empty_info, infos.values())):
            self.note("infos", infos)
        else:
            self.extras["infos"] = infos


def reward_tag(rewards: Sequence[Any]) -> int | None:
    """The tag of the one type that all these numbers have; None where a double would not hold them exactly."""
    kinds = {*map(type, rewards)}
    tag = REWARD_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
    if tag is None or tag < len(FLOATS):
        return tag
    exact = min(rewards) >= -_LARGEST_EXACT and max(rewards) <= _LARGEST_EXACT
    return tag if exact else None


def quiet_code(terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> int | None:
    """The code of the one type of False that all agents' flags are; None where one is set, or of another type.

    The flags of `__all__` must be Python's own False, as they are where we add them.
    """
    if terminateds[ALL] is not False or truncateds[ALL] is not False:
        return None
    if any(terminateds.values()) or any(truncateds.values()):
        return None
    kinds = [*map(type, terminateds.values()), *map(type, truncateds.values())]
    if kinds.count(bool) == len(kinds):
        return FALSE_CODES[bool]
    return FALSE_CODES[np.bool_] if kinds.count(np.bool_) == len(kinds) - 2 else None
