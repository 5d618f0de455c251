"""The header of a transition: which agents are in which of its dicts, and the types of rewards and flags.

In bytes, for n agents in the block::

    code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n

The code says how to read the rest. A transition of the *usual form* is by far the most frequent: every agent is in
every dict, alive and acting, and no flag is set. `UsualForm` recognises it in the worker. Its code has the bit `USUAL`,
and all other bytes but the rewards follow from the code. In any other transition, the bytes say for each agent in which
dicts it is, and of what types its numbers were.
"""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.pickling import Extras
from marl_parallel.core.spaces import is_vector
from marl_parallel.core.transition import ALL, check_infos, is_empty_info

USUAL, INFOS, FINAL, VECTORS = 1, 2, 4, 8
"""Bits of a code: the usual form; infos that are not empty travel pickled; final observations are in the block; rewards
of the usual form are vectors. The tag of the rewards and the code of the flags of the usual form come above these."""
REWARD_SHIFT, FLAG_SHIFT = 8, 16

# The first of each is what simulators give most; a reward is kept as a double, exactly, or travels pickled.
FLOATS: tuple[type, ...] = (float, np.float64, np.float32, np.float16)
"""The types of rewards that a double holds exactly, whatever the number."""
REWARD_TYPES: tuple[type, ...] = (
    *FLOATS, int, bool, np.bool_,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
VECTOR_TAG = len(REWARD_TYPES)
"""The tag of a reward that is a vector, in a column of its own."""
_REWARD_TAGS = {t: tag for tag, t in enumerate(REWARD_TYPES)}
_LARGEST_EXACT = 2**53

FLAGS: tuple[Any, ...] = (False, True, np.False_, np.True_)
"""By their codes; those that are true have odd ones."""
FALSE_CODES: dict[type, int] = {bool: 0, np.bool_: 2}
"""The codes of False, by type."""


class Presence(NamedTuple):
    """The agents in each dict, and those that are alive and act: a bit of each agent for each. Not to be changed."""

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
        """Read the bits of each of these agents."""
        return cls(*[[a for a, bits in zip(agents, presence, strict=True) if bits & bit] for bit in BITS.values()])


BITS = {name: 1 << place for place, name in enumerate(Presence._fields)}
EVERYWHERE = sum(BITS.values()) - BITS["final_observations"]
"""The bits of an agent that is in all of the five dicts, alive and acting."""


def reward_tag(rewards: Collection[Any]) -> int | None:
    """The tag of the one type that all these numbers have; None where a double would not hold them exactly."""
    kinds = {*map(type, rewards)}
    tag = _REWARD_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
    if tag is None or tag < len(FLOATS):
        return tag
    return tag if min(rewards) >= -_LARGEST_EXACT and max(rewards) <= _LARGEST_EXACT else None


_WITHOUT_REFERENCES = 2  # a version of the format: what is equal always marshals alike


class UsualForm:
    """Recognises the usual form of a step or reset, if all agents are alive and act.

    Each dict has every possible agent and nothing else, in order (`__all__` may come last in the flags, and infos may
    have anything); every flag is False, those of agents of one type; all rewards have one type, or all are vectors.

    Args:
        agents: All possible agents.
        vectors: Whether every agent declares a space of vector rewards.

    Example:
        >>> form = UsualForm(["a"])
        >>> form.code({"a": 0}, {"a": 1.5}, {"a": False}, {"a": False}, {"a": {}}) == USUAL
        True
        >>> form.code({"a": 0}, {"a": 1.5}, {"a": True}, {"a": False}, {"a": {}})
        0
    """

    def __init__(self, agents: Sequence[AgentID], *, vectors: bool = False) -> None:
        self._agents, self._vectors = [*agents], vectors
        # By how many flags there are of a kind: all keys, and what the flags and infos marshal to.
        self._forms: dict[int, tuple[list[Any], bytes]] = {}
        for flagged in [[*agents], [*agents, ALL]] if agents else []:
            keys = [*agents, *agents, *flagged, *flagged, *agents]
            rest: tuple[Any, ...] = (*[False] * 2 * len(flagged), *[{}] * len(agents))
            self._forms[len(flagged)] = keys, marshal.dumps(rest, _WITHOUT_REFERENCES)
        self._codes = {(t,) * len(agents): USUAL | _REWARD_TAGS[t] << REWARD_SHIFT for t in FLOATS}

    def code(
        self,
        observations: dict[Any, Any],
        rewards: dict[Any, Any],
        terminateds: dict[Any, Any],
        truncateds: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> int:
        """The code of the header where the form is usual, else 0.

        Raises:
            Misfit: All but the infos is usual, and an agent's info is a sequence.
        """
        form = self._forms.get(len(terminateds))
        if form is None or len(truncateds) != len(terminateds):
            return 0
        if [*observations, *rewards, *terminateds, *truncateds, *infos] == form[0]:
            try:
                # Marshalling is the quickest way to compare type and value of many things; what is large never gets
                # there.
                if not any(infos.values()) and form[1] == marshal.dumps(
                    (*terminateds.values(), *truncateds.values(), *infos.values()), _WITHOUT_REFERENCES
                ):
                    code = self._codes.get((*map(type, rewards.values()),))
                    if code is not None:
                        return code
            except Exception:  # arrays and the like: they do not marshal, or will not say whether they are true
                pass
        return self._less_frequent(observations, rewards, terminateds, truncateds, infos)

    def _less_frequent(
        self,
        observations: dict[Any, Any],
        rewards: dict[Any, Any],
        terminateds: dict[Any, Any],
        truncateds: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> int:
        """As `code`, with other types of numbers and flags, and infos."""
        agents = self._agents
        if [*observations] != agents or [*rewards] != agents:
            return 0
        flags: list[Any] = []
        for of_kind in (terminateds, truncateds):
            if [*of_kind][: len(agents)] != agents or of_kind.get(ALL, False) is not False:
                return 0
            if len(of_kind) > len(agents) and ALL not in of_kind:
                return 0
            flags += [*of_kind.values()][: len(agents)]
        kinds = {*map(type, flags)}
        flag_code = FALSE_CODES.get(kinds.pop()) if len(kinds) == 1 else None
        if flag_code is None or any(flags):
            return 0
        tag = reward_tag(rewards.values())
        code = USUAL | flag_code << FLAG_SHIFT
        if tag is None:
            if not self._vectors or not all(map(is_vector, rewards.values())):
                return 0
            code, tag = code | VECTORS, VECTOR_TAG
        check_infos(infos, observations)
        if [*infos] != agents or not all(map(is_empty_info, infos.values())):
            code |= INFOS
        return code | tag << REWARD_SHIFT


class HeaderBuilder:
    """Gathers the header of a transition of any form: what is of all agents in order is taken whole.

    Args:
        places: Of each agent in the block.

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

    def add(self, name: str, agents: Iterable[AgentID], others: Mapping[Any, Any] | None = None) -> None:
        """Add the agents in a dict or list, by its name in `Presence`, and entries that do not fit.

        Args:
            name: Of the dict or list.
            agents: Each must have a place.
            others: Entries of the dict that travel pickled.
        """
        bit, agents = BITS[name], [*agents]
        if agents == self._agents:
            self._everybody |= bit
        else:
            for agent in agents:
                self._each[self._places[agent]] |= bit
        if others:
            self.extras.setdefault(name, {}).update(others)

    def add_list(self, name: str, agents: Sequence[AgentID]) -> None:
        """Add a list of agents, known or not."""
        known = [agent for agent in agents if agent in self._places]
        self.add(name, known)
        if len(known) < len(agents):
            self.extras[name] = [agent for agent in agents if agent not in self._places]

    def add_infos(self, infos: dict[Any, Any]) -> None:
        """Add the infos, of which nothing but empty ones fits."""
        if infos.keys() <= self._places.keys() and all(map(is_empty_info, infos.values())):
            self.add("infos", infos)
        else:
            self.extras["infos"] = infos

    def add_rewards(self, rewards: Mapping[Any, Any], vectors: Sequence[AgentID]) -> tuple[Sequence[Any], bytes]:
        """Add the rewards.

        Args:
            rewards: Those that are not in columns.
            vectors: The agents whose reward is.

        Returns:
            The numbers of all agents, and the tags of their types.
        """
        size = len(self._agents)
        tag = reward_tag(rewards.values()) if [*rewards] == self._agents else None
        if tag is not None:
            self.add("rewards", rewards)
            return [*rewards.values()], bytes((tag,)) * size
        numbers: list[Any] = [0.0] * size
        tags, inside, others = bytearray(size), [*vectors], {}
        for agent in vectors:
            tags[self._places[agent]] = VECTOR_TAG
        for agent, reward in rewards.items():
            place, tag = self._places.get(agent), reward_tag([reward])
            if place is None or tag is None:
                others[agent] = reward
                continue
            numbers[place], tags[place] = reward, tag
            inside.append(agent)
        self.add("rewards", inside, others)
        return numbers, bytes(tags)

    def add_flags(self, name: str, flags: Mapping[Any, Any]) -> bytes:
        """Add the flags of one kind; returns the codes of all agents' and that of `__all__`."""
        size = len(self._agents)
        codes = [FALSE_CODES[type(flag)] + flag if type(flag) in FALSE_CODES else -1 for flag in flags.values()]
        if -1 not in codes and [*flags] == [*self._agents, ALL]:
            self.add(name, self._agents)
            return bytes(codes)
        row, inside, others = bytearray(size + 1), [], {}
        for (key, flag), code in zip(flags.items(), codes):
            place = size if key == ALL else self._places.get(key)
            if code < 0 or place is None:
                others[key] = flag
                continue
            row[place] = code
            if place < size:
                inside.append(key)
        self.add(name, inside, others)
        return bytes(row)
