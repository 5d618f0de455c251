"""Actions and transitions in and out of the records of the block, with what does not fit in there pickled beside it.

The parent writes actions and reads transitions, the worker reads actions and writes transitions::

    parent                                     block                                     worker
    ActionRecords.write_span      ->   header | actions               ->   ActionRecords.read_span
    TransitionRecords.read_span   <-   header | columns               <-   TransitionRecords.write

Columns are described in `columns.py`. The headers, in bytes, for the n agents that have a place there::

    of actions:        form 1 | present n
    of a transition:   code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n

The form says whether the actions of all are there; if not, `present` says which are. A code with the bit `USUAL` says
all but the observations and rewards (see `transition.py`); any other, what else there is, and the bytes after it say
which agents are in which dicts, and of what types their numbers were.

The four methods above are the fast path: spans of neighbouring records, in the usual form only. The others (`write`,
`read`) take one record of any form. Compiled code may replace the four; it reads and writes the same bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.columns import Layout, over_records, span_of
from marl_parallel.core.episode import with_final
from marl_parallel.core.messages import Message
from marl_parallel.core.pickling import Extras, in_order
from marl_parallel.core.spaces import DoesNotFit, Mismatch, builder, is_vector, numbers_of, rows_builder
from marl_parallel.core.transition import (
    ALL,
    FALSE_CODES,
    FINAL,
    FLAG_SHIFT,
    FLAGS,
    INFOS,
    REWARD_SHIFT,
    REWARD_TYPES,
    USUAL,
    VECTOR_TAG,
    VECTORS,
    Transition,
    is_empty_info,
    reward_tag,
)

_ALL_IN_ORDER, _SOME = 1, 2
_ALL = bytes((_ALL_IN_ORDER,))

_CODE_NBYTES = 8
_REMEMBERED, _REMEMBERED_AGENTS = 256, 100_000
"""How many ways in which agents can be present are remembered, at most, and how many agents in all of them: agents that
have died stay dead for a while."""

_Rows: TypeAlias = tuple[dict[Any, Any], ...]
Columns: TypeAlias = tuple[_Rows, _Rows, _Rows, _Rows, _Rows]
"""Observations, rewards, terminateds, truncateds and infos of several records."""


class ActionRecords:
    """Actions, in the records of all environments, of a layout that is bound to the buffer."""

    def __init__(self, layout: Layout, buffer: Any) -> None:
        self._columns, self._possible_agents = layout.actions, layout.schema.possible_agents
        self._agents = agents = self._columns.agents
        self._build_rows = rows_builder(dict.fromkeys(agents, 0))
        self._complete = bool(agents) and agents == layout.agents
        self._forms = over_records(buffer, layout.starts, layout.action_header, np.uint8, ())
        self._present = over_records(buffer, layout.starts, layout.action_header + 1, np.bool_, (len(agents),))

    def write_span(self, span: range, actions: Sequence[Mapping[Any, Any]]) -> bool:
        """Write the actions of all possible agents, in their order, into neighbouring records at once.

        Returns:
            Whether it was possible; else `write` each record.
        """
        if not self._complete:
            return False
        values = [*chain.from_iterable([given.values() for given in actions])]
        try:
            self._columns.write_span(span.start, span.stop, values)
        except (DoesNotFit, Mismatch):
            return False  # one by one finds which
        self._forms[span.start : span.stop] = _ALL_IN_ORDER
        return True

    def write(self, record: int, actions: Mapping[Any, Any]) -> Extras | None:
        """Write what fits; returns the rest, to be pickled.

        Raises:
            Mismatch: An action is not what its space declares; the text says whose. The worker reads the record only
                once it is told to step, so that nothing is lost.
        """
        inside, others = self._columns.write(record, actions, "action")
        if inside == self._agents and not others and inside:
            self._forms[record] = _ALL_IN_ORDER
            return None
        there = {*inside}
        self._present[record] = [agent in there for agent in self._agents]
        self._forms[record] = _SOME
        return others or None

    def mark_all(self, wanted: NDArray[np.bool_] | None) -> None:
        """Say which actions count in records that were written by columns: `(records, agents)`; None for all."""
        if wanted is not None:
            self._present[...] = wanted
        self._forms[...] = _ALL_IN_ORDER if wanted is None else _SOME

    def read_span(self, span: range) -> list[dict[Any, Any]]:
        """The actions of neighbouring records, of which none has anything pickled beside it; as `read`."""
        if not self._complete or self._forms[span.start : span.stop].tobytes() != _ALL * len(span):
            return [self.read(record, None) for record in span]
        values = self._columns.read_span(span.start, span.stop, True)
        return self._build_rows(zip(*[iter(values)] * len(self._agents)))

    def read(self, record: int, extras: Extras | None) -> dict[Any, Any]:
        """The actions of one record, arrays in memory of their own; `extras` is what `write` returned."""
        agents = self._agents
        if self._forms[record] != _ALL_IN_ORDER:
            agents = [agent for agent, there in zip(agents, self._present[record].tolist()) if there]
        actions = self._columns.read(record, agents, True)
        return in_order(actions | extras, self._possible_agents) if extras else actions


# -- transitions -------------------------------------------------------------------------------------------------------


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
_EVERYWHERE = sum(BITS.values()) - BITS["final_observations"]


class _HeaderBuilder:
    """Gathers which agents are in which dict, and the entries that do not fit, by the name of the dict."""

    def __init__(self, agents: list[AgentID], places: Mapping[AgentID, int]) -> None:
        self._agents, self._places = agents, places
        self._everybody, self._each = 0, bytearray(len(agents))
        self.extras: Extras = {}

    @property
    def presence(self) -> bytes:
        return bytes([bits | self._everybody for bits in self._each])

    def add(self, name: str, agents: list[AgentID], others: Mapping[Any, Any] | None = None) -> None:
        """Add the agents of a dict or list that have a place, and entries of other keys or values."""
        if agents == self._agents:
            self._everybody |= BITS[name]
        else:
            for agent in agents:
                self._each[self._places[agent]] |= BITS[name]
        if others:
            self.extras.setdefault(name, {}).update(others)

    def add_list(self, name: str, agents: Sequence[AgentID]) -> None:
        self.add(name, [agent for agent in agents if agent in self._places])
        if unknown := [agent for agent in agents if agent not in self._places]:
            self.extras[name] = unknown

    def add_infos(self, infos: dict[Any, Any]) -> None:
        """Add the infos, of which nothing but empty ones fits."""
        if infos.keys() <= self._places.keys() and all(map(is_empty_info, infos.values())):
            self.add("infos", [*infos])
        else:
            self.extras["infos"] = infos

    def add_rewards(self, rewards: Mapping[Any, Any], vectors: list[AgentID]) -> tuple[list[Any], bytes]:
        """Add those that are numbers, and the agents whose rewards are in columns; returns all numbers and tags."""
        numbers, tags, inside, others = [0.0] * len(self._agents), bytearray(len(self._agents)), [*vectors], {}
        for agent in vectors:
            tags[self._places[agent]] = VECTOR_TAG
        for agent, reward in rewards.items():
            place, tag = self._places.get(agent), reward_tag((reward,))
            if place is None or tag is None:
                others[agent] = reward
            else:
                numbers[place], tags[place] = reward, tag
                inside.append(agent)
        self.add("rewards", inside, others)
        return numbers, bytes(tags)

    def add_flags(self, name: str, flags: Mapping[Any, Any]) -> bytes:
        """Add the flags of one kind; returns the codes of all agents' and that of `__all__`."""
        codes, inside, others = bytearray(len(self._agents) + 1), [], {}
        for key, flag in flags.items():
            place = -1 if key == ALL else self._places.get(key)
            code = FALSE_CODES.get(type(flag))
            if place is None or code is None:
                others[key] = flag
                continue
            codes[place] = code + flag
            if place >= 0:
                inside.append(key)
        self.add(name, inside, others)
        return bytes(codes)


class TransitionRecords:
    """Transitions, in the records of all environments.

    Args:
        layout: Bound to the block.
        buffer: The block.
        copy: Whether observations are read as arrays of the reader's own rather than views of the block.

    Attributes:
        agents: The agents in the block; all possible ones, unless everything travels pickled.
        rewards: The numbers in all headers, `(records, agents)`: a view.
        tags: The tags of their types, likewise.
        flags: The codes of the flags, `(records, 2, agents + 1)`, `__all__` last; odd where True.
        presence: The bits of each agent, `(records, agents)`; see `BITS`.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True) -> None:
        self._layout, self._copy, self._buffer = layout, copy, memoryview(buffer)
        self.agents = agents = layout.agents
        self._n = n = len(agents)
        self._places = {agent: place for place, agent in enumerate(agents)}
        self._observations, self._vectors = layout.observations, layout.rewards
        # Whether every agent's observation has a place in the block, and every agent's reward as a vector.
        self._holds_usual = bool(agents) and layout.observations.agents == agents
        self._all_vectors = bool(agents) and layout.rewards.agents == agents
        # The headers, by record and as arrays of all records.
        self._headers = [start + layout.transition_header for start in layout.starts]
        self._words = self._buffer[: layout.nbytes].cast("B").cast("Q")
        self._rewards_struct, self._struct = struct.Struct(f"={n}d"), struct.Struct(f"=Q{n}d{n}s{n + 1}s{n + 1}s{n}s")
        view, at = functools.partial(over_records, buffer, layout.starts), layout.transition_header + _CODE_NBYTES
        self._codes = view(at - _CODE_NBYTES, np.uint64, ())
        self.rewards = view(at, np.float64, (n,))
        self.tags = view(at + 8 * n, np.uint8, (n,))
        self.flags = view(at + 9 * n, np.uint8, (2, n + 1))
        self.presence = view(at + 11 * n + 2, np.uint8, (n,))
        # What records of the usual form consist of.
        self._build_rows = rows_builder(dict.fromkeys(agents, 0))
        self._empty_infos = builder({agent: {} for agent in agents})
        self._no_flags = {code: {**dict.fromkeys(agents, FLAGS[code]), ALL: False} for code in FALSE_CODES.values()}
        self._no_numbers = [0.0] * n
        remembered = min(_REMEMBERED, max(_REMEMBERED_AGENTS // max(n, 1), 1))
        self._who = functools.lru_cache(remembered)(functools.partial(Presence.of, agents))

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, record: int, transition: Transition) -> Extras | None:
        """Write what fits; returns the rest, to be pickled.

        Raises:
            Mismatch: An observation or a vector reward is not what its space declares; the text says whose.
        """
        code = transition.usual
        if not code or not self._holds_usual:
            return self._write_any(record, transition)
        try:
            self._observations.write_span(record, record + 1, [*transition.observations.values()])
            rewards: Iterable[Any] = transition.rewards.values()
            if code & VECTORS:
                if not self._all_vectors:
                    return self._write_any(record, transition)
                self._vectors.write_span(record, record + 1, [*rewards])
                rewards = self._no_numbers
        except (DoesNotFit, Mismatch):
            return self._write_any(record, transition)  # one by one finds which
        header = self._headers[record]
        # Where the record already has this code, all bytes of the header but the rewards follow from it.
        if self._words[header >> 3] == code:
            self._rewards_struct.pack_into(self._buffer, header + _CODE_NBYTES, *rewards)
        else:
            n = self._n
            tags, flags = bytes((code >> REWARD_SHIFT & 0xFF,)) * n, bytes((code >> FLAG_SHIFT,)) * n + b"\0"
            # The code comes last: a worker that dies in between leaves none that its successor would trust.
            self._struct.pack_into(self._buffer, header, 0, *rewards, tags, flags, flags, bytes((_EVERYWHERE,)) * n)
            self._words[header >> 3] = code
        return {"infos": transition.infos} if code & INFOS else None

    def _write_any(self, record: int, transition: Transition) -> Extras | None:
        """Write a transition of any form."""
        header, final = _HeaderBuilder(self.agents, self._places), transition.final_observations
        header.add("observations", *self._observations.write(record, transition.observations, "observation"))
        if final is not None:
            seen = self._layout.final_observations.write(record, final, "last observation")
            header.add("final_observations", *seen)
        numbers, declared = transition.rewards, self._layout.schema.reward_spaces
        vectors: list[AgentID] = []
        if declared:
            paid = {agent: reward for agent, reward in numbers.items() if agent in declared and is_vector(reward)}
            vectors, others = self._vectors.write(record, paid, "reward")
            header.add("rewards", [], others)
            numbers = {agent: reward for agent, reward in numbers.items() if agent not in paid}
        rewards, tags = header.add_rewards(numbers, vectors)
        terminated = header.add_flags("terminateds", transition.terminateds)
        truncated = header.add_flags("truncateds", transition.truncateds)
        header.add_list("alive", transition.alive)
        header.add_list("acting", transition.acting)
        header.add_infos(transition.infos)
        if transition.reset_infos and not all(map(is_empty_info, transition.reset_infos.values())):
            header.extras["reset_infos"] = transition.reset_infos
        code = (INFOS if header.extras else 0) | (FINAL if final is not None else 0)
        rest = code, *rewards, tags, terminated, truncated, header.presence
        self._struct.pack_into(self._buffer, self._headers[record], *rest)
        return header.extras or None

    # -- reading -------------------------------------------------------------------------------------------------------

    def runs(self, span: range, apart: Collection[int] = ()) -> list[tuple[range, int]]:
        """Cut neighbouring records into runs that `read_span` reads; `apart` are not to be read from the block.

        Returns:
            Runs of neighbours, with their common code where they are of the usual form, else 0.
        """
        codes = self._codes[span.start : span.stop]
        first, raw = self._words[self._headers[span.start] >> 3], codes.tobytes()
        if first & USUAL and not apart and raw == raw[:_CODE_NBYTES] * len(span):
            return [(span, first)]
        usual = [code if code & USUAL and record not in apart else 0 for record, code in zip(span, codes.tolist())]
        found, start = [], span.start
        for code, run in groupby(usual):
            stop = start + len([*run])
            found.append((range(start, stop), code))
            start = stop
        return found

    def read_span(self, span: range, code: int, extras: Mapping[int, Extras]) -> Columns:
        """The five dicts of a run of neighbouring records of the usual form; as `read`.

        Args:
            span: The records.
            code: Their common code, of `runs`.
            extras: By record, what `write` returned.
        """
        start, stop, n = span.start, span.stop, self._n
        observations = self._observations.read_span(start, stop, self._copy)
        if code & VECTORS:
            rewards = self._vectors.read_span(start, stop, True)
        else:
            rewards = numbers_of(self.rewards[start:stop], REWARD_TYPES[code >> REWARD_SHIFT & 0xFF])
        flags = self._no_flags[code >> FLAG_SHIFT]
        if code & INFOS:
            infos = [extras[record]["infos"] if record in extras else self._empty_infos() for record in span]
        else:
            infos = [self._empty_infos() for _ in span]
        return (
            (*self._build_rows(zip(*[iter(observations)] * n)),),
            (*self._build_rows(zip(*[iter(rewards)] * n)),),
            (*[flags.copy() for _ in span],),
            (*[flags.copy() for _ in span],),
            (*infos,),
        )

    def read(self, record: int, extras: Extras | None) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        """Rebuild the five dicts, exactly as they were, with what an automatic reset adds to the infos.

        Args:
            record: The record.
            extras: What `write` returned.

        Returns:
            The dicts; the agents who should act next, and those who are alive, lists not to be changed; whether the
            episode is over.
        """
        code = self._words[self._headers[record] >> 3]
        if not code & USUAL:
            return self._read_any(record, extras or {})
        rows = self.read_span(range(record, record + 1), code, {} if extras is None else {record: extras})
        (observations,), (rewards,), (terminateds,), (truncateds,), (infos,) = rows
        return (observations, rewards, terminateds, truncateds, infos), self.agents, self.agents, False

    def read_rest(self, record: int, extras: Extras) -> tuple[dict[Any, Any], list[AgentID], list[AgentID], bool]:
        """As `read`, of a record with nothing but infos pickled beside it: the infos in place of all dicts."""
        code, *_, terminated, truncated, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        who = self._who(presence)
        return self._infos(record, code, who, extras), who.acting, who.alive, bool((terminated[-1] | truncated[-1]) & 1)

    def last_known(self, record: int, extras: Extras | None) -> tuple[dict[Any, Any], list[AgentID]]:
        """The last observations, and the agents that are alive."""
        (observations, *_), _, alive, _ = self._read_any(record, extras or {})
        return observations, alive

    def observed(self, record: int) -> dict[AgentID, Any]:
        """The observations in a record, without those that are pickled; arrays are views."""
        *_, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        return self._observations.read(record, self._who(presence).observations, False)

    def _read_any(self, record: int, extras: Extras) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        """Read a transition of any form."""
        code, *numbers, tags, terminated, truncated, presence = self._struct.unpack_from(
            self._buffer, self._headers[record]
        )
        who, places = self._who(presence), self._places
        vectors = [agent for agent in who.rewards if tags[places[agent]] == VECTOR_TAG] if VECTOR_TAG in tags else []
        of_vectors = self._vectors.read(record, vectors, True) if vectors else {}
        rewards = {}
        for agent in who.rewards:
            place = places[agent]
            rewards[agent] = of_vectors[agent] if agent in of_vectors else REWARD_TYPES[tags[place]](numbers[place])
        terminateds = self._flags("terminateds", who.terminateds, terminated, extras)
        truncateds = self._flags("truncateds", who.truncateds, truncated, extras)
        observations = self._observations.read(record, who.observations, self._copy)
        return (
            (
                self._merged("observations", observations, extras),
                self._merged("rewards", rewards, extras),
                terminateds,
                truncateds,
                self._infos(record, code, who, extras),
            ),
            [*who.acting, *extras["acting"]] if "acting" in extras else who.acting,
            [*who.alive, *extras["alive"]] if "alive" in extras else who.alive,
            bool(terminateds[ALL] or truncateds[ALL]),
        )

    def _flags(self, name: str, agents: list[AgentID], codes: bytes, extras: Extras) -> dict[Any, Any]:
        inside = {agent: FLAGS[codes[self._places[agent]]] for agent in agents}
        inside[ALL] = FLAGS[codes[-1]]
        return self._merged(name, inside, extras)

    def _infos(self, record: int, code: int, who: Presence, extras: Extras) -> dict[Any, Any]:
        infos: dict[Any, Any] = extras["infos"] if "infos" in extras else {agent: {} for agent in who.infos}
        if code & FINAL:
            final = self._layout.final_observations.read(record, who.final_observations, self._copy)
            with_final(infos, self._merged("final_observations", final, extras), extras.get("reset_infos", {}))
        return infos

    def _merged(self, name: str, inside: dict[Any, Any], extras: Extras) -> dict[Any, Any]:
        return in_order(inside | extras[name], self._layout.schema.possible_agents) if name in extras else inside


# -- slices of records, for workers that share no memory with the parent -----------------------------------------------

WITH_ACTIONS = frozenset({Message.STEP})
"""Requests that are sent with the actions that the parent has written."""
WITH_RESULTS = frozenset({Message.STEP, Message.RESET, Message.REBUILD, Message.STATE})
"""Requests whose replies are sent with the results that the worker has written."""


class Parcels:
    """Slices of records as arrays: actions one way, results the other.

    Each end has a block of its own, laid out alike; what one end has written, the other writes into its own block. An
    array has the same part of several records, `(records, bytes)`, and is a copy.
    """

    def __init__(self, layout: Layout, buffer: Any) -> None:
        shape = layout.num_records, layout.stride
        self._records: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, layout.nbytes).reshape(shape)
        self._layout = layout

    def actions(self, env_ids: Sequence[int]) -> NDArray[np.uint8]:
        return np.array(self._records[_rows(env_ids), : self._layout.transition_header], order="C")

    def put_actions(self, env_ids: Sequence[int], parcel: NDArray[np.uint8]) -> None:
        self._records[_rows(env_ids), : parcel.shape[1]] = parcel

    def results(self, env_ids: Sequence[int], message: Message) -> NDArray[np.uint8]:
        """What a worker has written to carry out a request, without the room for final observations if it has none."""
        rows, head = _rows(env_ids), self._layout.transition_header
        codes = np.ascontiguousarray(self._records[rows, head : head + _CODE_NBYTES]).view(np.uint64)
        rare = message is Message.STATE or bool((codes & np.uint64(FINAL)).any())
        return np.array(self._records[rows, head : self._layout.stride if rare else self._layout.rare], order="C")

    def put_results(self, env_ids: Sequence[int], parcel: NDArray[np.uint8]) -> None:
        head = self._layout.transition_header
        self._records[_rows(env_ids), head : head + parcel.shape[1]] = parcel

    def places(self, env_ids: range) -> tuple[int, int]:
        """Where the whole records of neighbours begin and end in a block, in bytes."""
        return env_ids.start * self._layout.stride, env_ids.stop * self._layout.stride

    def put_records(self, env_ids: Sequence[int], records: bytes) -> None:
        """Write the results in whole records of a worker's block."""
        whole = np.frombuffer(records, np.uint8).reshape(len(env_ids), self._layout.stride)
        self.put_results(env_ids, whole[:, self._layout.transition_header :])


def _rows(env_ids: Sequence[int]) -> slice | list[int]:
    span = span_of(env_ids)
    return [*env_ids] if span is None else slice(span.start, span.stop)
