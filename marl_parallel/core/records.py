"""Actions and transitions in and out of the records of the block, with what does not fit in there pickled beside it.

The parent writes actions and reads transitions, the worker reads actions and writes transitions::

    parent                                     block                                     worker
    ActionRecords.write_span      ->   header | actions               ->   ActionRecords.read_span
    TransitionRecords.read_span   <-   header | columns               <-   TransitionRecords.write

The header of a transition is described in `header.py`, columns in `columns.py`. The header of actions, in bytes, for
the n agents whose actions lie in the block: form 1 | present n. The form says whether the actions of all are there; if
not, `present` says which are.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.columns import AgentColumns, Group, Layout, over_records
from marl_parallel.core.episode import with_final
from marl_parallel.core.header import (
    BITS,
    EVERYWHERE,
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
    HeaderBuilder,
    Presence,
)
from marl_parallel.core.pickling import Extras, in_order
from marl_parallel.core.spaces import DoesNotFit, Mismatch, builder, is_vector, numbers_of, rows_builder
from marl_parallel.core.transition import ALL, Transition, is_empty_info

_ALL_IN_ORDER, _SOME = 1, 2
_ALL = bytes((_ALL_IN_ORDER,))

_CODE_NBYTES = 8
_REMEMBERED, _REMEMBERED_AGENTS = 256, 100_000
"""How many ways in which agents can be present are remembered, at most, and how many agents in all of them: agents that
have died stay dead for a while."""

Columns: TypeAlias = tuple[
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
]
"""Observations, rewards, terminateds, truncateds and infos of several records."""


class ActionRecords:
    """Actions, in the records of all environments.

    Args:
        layout: Bound to the block.
        buffer: The block.
    """

    def __init__(self, layout: Layout, buffer: Any) -> None:
        self._layout, self._columns = layout, layout.actions
        self._headers = [start + layout.action_header for start in layout.starts]
        self._agents = agents = self._columns.agents
        self._build, self._build_rows = builder(dict.fromkeys(agents, 0)), rows_builder(dict.fromkeys(agents, 0))
        self._complete = bool(agents) and agents == layout.agents
        self._places = {agent: place for place, agent in enumerate(agents)}
        self._buffer = memoryview(buffer)
        self._forms = over_records(buffer, layout.starts, layout.action_header, np.uint8, ())
        self._present = over_records(buffer, layout.starts, layout.action_header + 1, np.bool_, (len(agents),))

    def write_span(self, span: range, actions: Sequence[Mapping[Any, Any]]) -> bool:
        """Write the actions of neighbouring records at once, where that is possible.

        Args:
            span: The records.
            actions: Of each, the actions of all possible agents, in their order.

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
        header = self._headers[record]
        if inside == self._agents and not others and inside:
            self._buffer[header] = _ALL_IN_ORDER
            return None
        present = bytearray(len(self._agents))
        for agent in inside:
            present[self._places[agent]] = 1
        self._buffer[header : header + 1 + len(present)] = bytes((_SOME,)) + present
        return others or None

    def write_stacked(self, actions: Mapping[Any, Any], wanted: NDArray[np.bool_] | None) -> None:
        """Write the actions of all records at once; only where all agents have a column.

        Args:
            actions: By agent, of all records, stacked.
            wanted: `(records, agents)`: which of them count; None for all.

        Raises:
            Mismatch: Some are not what their agent's space declares; the text says whose. Nothing counts as written.
        """
        self._columns.write_stacked(actions)
        self._write_headers(wanted)

    def write_rows(
        self, rows: Iterable[tuple[Sequence[Any], Group, slice, Any]], wanted: NDArray[np.bool_] | None
    ) -> None:
        """As `write_stacked`, of several agents at a time.

        Args:
            rows: Agents, where they lie, and their actions of all records, stacked `(records, agents, ...)`.
            wanted: As there.
        """
        for agents, group, span, values in rows:
            try:
                group.write_stacked(span, values)
            except Mismatch as error:
                raise Mismatch(f"the actions of agents {[*agents]}: {error}") from error
        self._write_headers(wanted)

    def _write_headers(self, wanted: NDArray[np.bool_] | None) -> None:
        if wanted is None:
            self._forms[...] = _ALL_IN_ORDER
        else:
            self._present[...] = wanted
            self._forms[...] = _SOME

    def read_span(self, span: range) -> list[dict[Any, Any]]:
        """The actions of neighbouring records, of which none has anything pickled beside it; as `read`."""
        if not self._complete or self._forms[span.start : span.stop].tobytes() != _ALL * len(span):
            return [self.read(record, None) for record in span]
        values = self._columns.read_span(span.start, span.stop, True)
        return self._build_rows(zip(*[iter(values)] * len(self._agents)))

    def read(self, record: int, extras: Extras | None) -> dict[Any, Any]:
        """The actions of one record, arrays in memory of their own.

        Args:
            record: The record.
            extras: What `write` returned.
        """
        header = self._headers[record]
        if self._buffer[header] == _ALL_IN_ORDER:
            actions: dict[Any, Any] = self._build(*self._columns.read_span(record, record + 1, True))
            return actions
        present = self._buffer[header + 1 : header + 1 + len(self._agents)]
        agents = [agent for agent, there in zip(self._agents, present, strict=True) if there]
        actions = self._columns.read(record, agents, True)
        return in_order(actions | extras, self._layout.schema.possible_agents) if extras else actions


class TransitionRecords:
    """Transitions, in the records of all environments.

    Args:
        layout: Bound to the block.
        buffer: The block.
        copy: Whether observations are read as arrays of the reader's own rather than views of the block.

    Attributes:
        agents: The agents in the block; all possible ones, unless everything travels pickled.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True) -> None:
        self._layout, self._copy = layout, copy
        self._buffer = memoryview(buffer)
        self._words = self._buffer[: layout.nbytes].cast("B").cast("Q")
        header = layout.transition_header
        self._headers = [start + header for start in layout.starts]
        self._code_places = [start >> 3 for start in self._headers]  # among the words of the block
        self._reward_places = [start + _CODE_NBYTES for start in self._headers]
        self.agents = agents = layout.agents
        self._n = n = len(agents)
        self._rewards_struct = struct.Struct(f"={n}d")
        self._full_struct = struct.Struct(f"=Q{n}d{n}s{n + 1}s{n + 1}s{n}s")
        self._places = {agent: place for place, agent in enumerate(agents)}
        remembered = min(_REMEMBERED, max(_REMEMBERED_AGENTS // max(n, 1), 1))
        self._presence = functools.lru_cache(remembered)(functools.partial(Presence.of, agents))
        self._build, self._build_rows = builder(dict.fromkeys(agents, 0)), rows_builder(dict.fromkeys(agents, 0))
        self._empty_infos = builder({agent: {} for agent in agents})
        self._no_flags = {code: {**dict.fromkeys(agents, FLAGS[code]), ALL: False} for code in FALSE_CODES.values()}
        self._observations, self._vectors = layout.observations, layout.rewards
        # Whether every agent's observation has a place in the block, and every agent's reward as a vector.
        self._holds_usual = bool(agents) and layout.observations.agents == agents
        self._all_vectors = bool(agents) and layout.rewards.agents == agents
        self._no_numbers = [0.0] * n
        self._codes = over_records(buffer, layout.starts, header, np.uint64, ())
        header += _CODE_NBYTES
        self._reward_rows = over_records(buffer, layout.starts, header, np.float64, (n,))
        self._tag_rows = over_records(buffer, layout.starts, header + 8 * n, np.uint8, (n,))
        self._flag_rows = over_records(buffer, layout.starts, header + 9 * n, np.uint8, (2, n + 1))
        self._presence_rows = over_records(buffer, layout.starts, header + 11 * n + 2, np.uint8, (n,))

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
        # Where the record already has this code, all bytes of the header but the rewards follow from it.
        if self._words[self._code_places[record]] == code:
            self._rewards_struct.pack_into(self._buffer, self._reward_places[record], *rewards)
        else:
            n, header = self._n, self._headers[record]
            tags, flags = bytes((code >> REWARD_SHIFT & 0xFF,)) * n, bytes((code >> FLAG_SHIFT,)) * n + b"\0"
            presence = bytes((EVERYWHERE,)) * n
            # The code comes last: a worker that dies in between leaves none that its successor would trust.
            self._full_struct.pack_into(self._buffer, header, 0, *rewards, tags, flags, flags, presence)
            self._words[self._code_places[record]] = code
        return {"infos": transition.infos} if code & INFOS else None

    def _write_any(self, record: int, transition: Transition) -> Extras | None:
        """Write a transition of any form."""
        header, final = HeaderBuilder(self._places), transition.final_observations
        seen = self._observations.write(record, transition.observations, "observation")
        header.add("observations", *seen)
        if final is not None:
            seen = self._layout.final_observations.write(record, final, "last observation")
            header.add("final_observations", *seen)
        numbers: Mapping[AgentID, Any] = transition.rewards
        vectors: list[AgentID] = []
        if spaces := self._layout.schema.reward_spaces:
            paid = {a: reward for a, reward in numbers.items() if a in spaces and is_vector(reward)}
            vectors, others = self._vectors.write(record, paid, "reward")
            header.add("rewards", [], others)
            numbers = {agent: reward for agent, reward in numbers.items() if agent not in paid}
        rewards, tags = header.add_rewards(numbers, vectors)
        terminated = header.add_flags("terminateds", transition.terminateds)
        truncated = header.add_flags("truncateds", transition.truncateds)
        header.add_list("alive", transition.alive)
        header.add_list("acting", transition.acting)
        header.add_infos(transition.infos)
        reset_infos = transition.reset_infos
        if reset_infos and not all(map(is_empty_info, reset_infos.values())):
            header.extras["reset_infos"] = reset_infos
        code = (INFOS if header.extras else 0) | (FINAL if final is not None else 0)
        self._full_struct.pack_into(
            self._buffer, self._headers[record], code, *rewards, tags, terminated, truncated, header.presence
        )
        return header.extras or None

    # -- reading -------------------------------------------------------------------------------------------------------

    def runs(self, span: range, apart: Collection[int] = ()) -> list[tuple[range, int]]:
        """Cut neighbouring records into runs that `read_span` reads.

        Args:
            span: The records.
            apart: Records that are not to be read from the block.

        Returns:
            Runs of neighbours, with their common code where they are of the usual form, else 0.
        """
        codes = self._codes[span.start : span.stop].tobytes()
        first = self._words[self._code_places[span.start]]
        if first & USUAL and not apart and codes == codes[:_CODE_NBYTES] * len(span):
            return [(span, first)]
        usual = [
            code if code & USUAL and record not in apart else 0
            for record, code in zip(span, self._codes[span.start : span.stop].tolist())
        ]
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
        if code & VECTORS:
            rewards = self._vectors.read_span(start, stop, True)
        else:
            rewards = numbers_of(self._reward_rows[start:stop], REWARD_TYPES[code >> REWARD_SHIFT & 0xFF])
        flags = self._no_flags[code >> FLAG_SHIFT]
        if code & INFOS:
            infos = [extras[record]["infos"] if record in extras else self._empty_infos() for record in span]
        else:
            infos = [self._empty_infos() for _ in span]
        return (
            (*self._build_rows(zip(*[iter(self._observations.read_span(start, stop, self._copy))] * n)),),
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
        code = self._words[self._code_places[record]]
        if not code & USUAL:
            return self._read_any(record, extras or {})
        rewards: Sequence[Any]
        if code & VECTORS:
            rewards = self._vectors.read_span(record, record + 1, True)
        else:
            rewards = self._rewards_struct.unpack_from(self._buffer, self._reward_places[record])
            if code >> REWARD_SHIFT & 0xFF:  # another type than float
                rewards = [*map(REWARD_TYPES[code >> REWARD_SHIFT & 0xFF], rewards)]
        flags = self._no_flags[code >> FLAG_SHIFT]
        dicts = (
            self._build(*self._observations.read_span(record, record + 1, self._copy)),
            self._build(*rewards),
            flags.copy(),
            flags.copy(),
            self._empty_infos() if extras is None else extras["infos"],
        )
        return dicts, self.agents, self.agents, False

    def read_rest(self, record: int, extras: Extras) -> tuple[dict[Any, Any], list[AgentID], list[AgentID], bool]:
        """As `read`, of a record with nothing but infos pickled beside it: the infos in place of all dicts."""
        code, *_, terminated, truncated, presence = self._full_struct.unpack_from(self._buffer, self._headers[record])
        who = self._presence(presence)
        return self._infos(record, code, who, extras), who.acting, who.alive, bool((terminated[-1] | truncated[-1]) & 1)

    def last_known(self, record: int, extras: Extras | None) -> tuple[dict[Any, Any], list[AgentID]]:
        """The last observations, and the agents that are alive."""
        (observations, _, _, _, _), _, alive, _ = self._read_any(record, extras or {})
        return observations, alive

    def observed_part(self, record: int, agent: AgentID, key: str) -> Any:
        """The entry `key` of an agent's observation, copied; None if its observation in this record has no such key."""
        place = self._places.get(agent)
        if place is None or not self._presence_rows[record, place] & BITS["observations"]:
            return None
        return self._observations.read_part(record, agent, key)

    def _read_any(self, record: int, extras: Extras) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        """Read a transition of any form."""
        code, *rewards, tags, terminated, truncated, presence = self._full_struct.unpack_from(
            self._buffer, self._headers[record]
        )
        who, places = self._presence(presence), self._places
        vectors = [agent for agent in who.rewards if tags[places[agent]] == VECTOR_TAG] if VECTOR_TAG in tags else []
        of_vectors = self._vectors.read(record, vectors, True) if vectors else {}
        paid = {
            agent: of_vectors[agent]
            if agent in of_vectors
            else REWARD_TYPES[tags[place := places[agent]]](rewards[place])
            for agent in who.rewards
        }
        terminateds = self._flags("terminateds", who.terminateds, terminated, extras)
        truncateds = self._flags("truncateds", who.truncateds, truncated, extras)
        return (
            (
                self._seen(record, "observations", self._observations, who.observations, extras),
                self._merged("rewards", paid, extras),
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
            columns, name = self._layout.final_observations, "final_observations"
            final = self._seen(record, name, columns, who.final_observations, extras)
            with_final(infos, final, extras.get("reset_infos", {}))
        return infos

    def _seen(
        self, record: int, name: str, columns: AgentColumns, agents: list[AgentID], extras: Extras
    ) -> dict[Any, Any]:
        return self._merged(name, columns.read(record, agents, self._copy), extras)

    def _merged(self, name: str, inside: dict[Any, Any], extras: Extras) -> dict[Any, Any]:
        return in_order(inside | extras[name], self._layout.schema.possible_agents) if name in extras else inside

    # -- reading all records, as arrays --------------------------------------------------------------------------------

    def all_usual(self) -> bool:
        """Whether all records are of the usual form and alike, with nothing pickled beside them."""
        runs = self.runs(range(len(self._headers)))
        return len(runs) == 1 and bool(runs[0][1]) and not runs[0][1] & INFOS

    def all_rewards(self) -> NDArray[np.float64]:
        """Of all records: `(records, agents)`, a copy; zeros for agents without one, and for what is pickled."""
        rewards: NDArray[np.float64] = self._reward_rows.copy()
        return rewards

    def all_vectors(self, row_of: Mapping[AgentID, int]) -> tuple[dict[AgentID, NDArray[Any]], NDArray[np.bool_]]:
        """The vector rewards of all records.

        Args:
            row_of: The places of the agents among all.

        Returns:
            By agent, `(records, objectives)`, copies; and whose rewards of this record they are: `(records, agents)`.
        """
        there: NDArray[np.bool_] = self._tag_rows == VECTOR_TAG
        there &= (self._presence_rows & BITS["rewards"]) != 0
        values: dict[AgentID, NDArray[Any]] = {}
        for group in self._vectors.groups:
            stacked = group.copied(None)
            for row, position in enumerate(group.positions):
                agent = self._vectors.agents[position]
                values[agent] = stacked[:, row]
                values[agent][~there[:, row_of[agent]]] = 0
        return values, there

    def all_flags(self) -> NDArray[np.bool_]:
        """Terminated and truncated: `(records, 2, agents + 1)`, `__all__` last; a copy."""
        flags: NDArray[np.bool_] = (self._flag_rows & 1).view(np.bool_)
        return flags

    def all_presence(self, masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Agents with any of the bits of each mask, in all records: `(masks, records, agents)`; see `header.BITS`."""
        presence: NDArray[np.bool_] = (self._presence_rows & masks[:, None, None]) != 0
        return presence


def with_finals(codes: NDArray[np.uint8]) -> bool:
    """Whether any of these headers has final observations beside it: `(records, 8)`, the bytes of their codes."""
    return bool((np.ascontiguousarray(codes).view(np.uint64) & np.uint64(FINAL)).any())
