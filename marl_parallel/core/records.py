"""Transitions in and out of an environment's record, with what does not fit in there pickled beside it.

Both sides use the same object: the worker writes, the parent reads. Two forms of a transition's head are written.
The *quiet* one is by far the most frequent: every agent is in every dict, nobody's flag is set, nothing has ended;
in a row of them only rewards are written. The *full* one says for each agent in which dicts it was, and of what type
its numbers were. What a transition means is known to `episode.py` alone.

The head, in bytes, for n agents in the block; its rows are valid in both forms::

    code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.builders import dict_of, dicts_of, empty_dicts_of
from marl_parallel.core.columns import Unfit, over_records
from marl_parallel.core.episode import with_final
from marl_parallel.core.heads import (
    BITS,
    EVERYWHERE,
    FALSE_CODES,
    FLAGS,
    REWARD_TAGS,
    REWARD_TYPES,
    VECTOR_TAG,
    Draft,
    Presence,
    quiet_code,
    reward_tag,
)
from marl_parallel.core.layout import AgentColumns, Layout, Whole
from marl_parallel.core.pickling import Extras, in_order
from marl_parallel.core.transition import ALL, FLOATS, Transition, is_empty_info
from marl_parallel.core.values import Mismatch, conform, is_vector, numbers_of

# What the code of a transition's head is made of; tags of quiet rewards and flags are shifted above these.
_QUIET, _EXTRAS, _FINAL = 1, 2, 4
_REWARD_SHIFT, _FLAG_SHIFT = 8, 16
_CODE = struct.Struct("=Q")
_USUAL_CODES = {t: _QUIET | REWARD_TAGS[t] << _REWARD_SHIFT for t in FLOATS}

_REMEMBERED, _REMEMBERED_AGENTS = 256, 100_000
"""How many ways in which agents can be present are remembered, at most, and how many agents in all of them: who has
died stays dead for a while."""

Columns: TypeAlias = tuple[
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
    tuple[dict[Any, Any], ...],
]
"""Observations, rewards, terminateds, truncateds and infos of several records."""


class TransitionRecords:
    """Transitions, in the records of all environments.

    Args:
        layout: Bound to the block.
        buffer: The block.
        copy: Whether observations are read as arrays of the reader's own rather than views of the block.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True) -> None:
        self._layout, self._copy = layout, copy
        self._buffer = memoryview(buffer)
        self._heads = [start + layout.transition_head for start in layout.starts]
        self.agents = agents = layout.agents
        n = len(agents)
        self._n = n
        self._dict_of, self._dicts_of, self._new_infos = dict_of(agents), dicts_of(agents), empty_dicts_of(agents)
        self._rewards = struct.Struct(f"={n}d")
        self._head = struct.Struct(f"=Q{n}d")
        self._full = struct.Struct(f"=Q{n}d{n}s{n + 1}s{n + 1}s{n}s")
        self._places = {agent: place for place, agent in enumerate(agents)}
        remembered = min(_REMEMBERED, max(_REMEMBERED_AGENTS // max(n, 1), 1))
        self._presence = functools.lru_cache(remembered)(functools.partial(Presence.of, agents))
        self._flag_keys = dict.fromkeys([*agents, ALL]).keys()
        self._dicts: list[type] = [dict] * n
        self._no_flags = {code: {**dict.fromkeys(agents, FLAGS[code]), ALL: False} for code in FALSE_CODES.values()}
        self._observations = layout.observations.whole
        # Whether everybody's observation has a place in the block.
        self._quiet_possible = bool(agents) and layout.observations.agents == agents
        self._vectors = layout.rewards
        self._reward_spaces = layout.schema.reward_spaces
        self._all_vectors = bool(agents) and layout.rewards.agents == agents
        self._no_numbers = [0.0] * n
        # The code that was written last into each head, where that was a quiet one.
        self._written = [0] * layout.num_records
        self._codes = over_records(buffer, layout.starts, layout.transition_head, np.uint64, ())
        head = layout.transition_head + _CODE.size
        self._reward_rows = over_records(buffer, layout.starts, head, np.float64, (n,))
        self._flag_rows = over_records(buffer, layout.starts, head + 9 * n, np.uint8, (2, n + 1))
        self._tag_rows = over_records(buffer, layout.starts, head + 8 * n, np.uint8, (n,))
        self._presence_rows = over_records(buffer, layout.starts, head + 11 * n + 2, np.uint8, (n,))

    # -- writing -------------------------------------------------------------------------------------------

    def write(self, record: int, transition: Transition) -> Extras | None:
        """Write what fits; returns the rest, to be pickled.

        Raises:
            Mismatch: An observation or a vector reward is not what its space declares; the text says whose.
        """
        if self._quiet_possible:
            if transition.usual is not None:
                if _write_whole(self._observations, record, transition.observations):
                    self._write_quiet_head(record, _USUAL_CODES[transition.usual], transition.rewards.values())
                    return None
            elif transition.acting == self.agents and transition.final_observations is None:
                written = self._write_quiet(record, transition)
                if written is not None:
                    return written or None
        return self._write_full(record, transition)

    def _write_quiet(self, record: int, transition: Transition) -> Extras | None:
        """Try the quiet form; returns None where it does not apply."""
        agents = self.agents
        observations, rewards, terminateds, truncateds, infos, alive, *_ = transition
        if (
            [*observations] != agents
            or [*rewards] != agents
            or terminateds.keys() != self._flag_keys
            or truncateds.keys() != self._flag_keys
            or len(alive) != self._n
        ):
            return None
        numbers = [*rewards.values()]
        flag_code, tag = quiet_code(terminateds, truncateds), reward_tag(numbers)
        if tag is None and self._all_vectors and _write_whole(self._vectors.whole, record, rewards):
            numbers, tag = self._no_numbers, VECTOR_TAG
        if flag_code is None or tag is None or not _write_whole(self._observations, record, observations):
            return None
        told = infos.values()
        # Looked at by type first, since arrays would not be compared; faster than `is_empty_info` for each.
        empty = [*infos] == agents and [*map(type, told)] == self._dicts and not any(told)
        code = _QUIET | tag << _REWARD_SHIFT | flag_code << _FLAG_SHIFT
        self._write_quiet_head(record, code if empty else code | _EXTRAS, numbers)
        return {} if empty else {"infos": infos}

    def _write_quiet_head(self, record: int, code: int, rewards: Iterable[Any]) -> None:
        head = self._heads[record]
        if self._written[record] == code:
            self._rewards.pack_into(self._buffer, head + _CODE.size, *rewards)
            return
        tags = bytes((code >> _REWARD_SHIFT & 0xFF,)) * self._n
        flags = bytes((code >> _FLAG_SHIFT,)) * self._n + b"\0"
        presence = bytes((EVERYWHERE,)) * self._n
        self._full.pack_into(self._buffer, head, code, *rewards, tags, flags, flags, presence)
        self._written[record] = code

    def _write_full(self, record: int, transition: Transition) -> Extras | None:
        draft = Draft(self._places)
        final, reset_infos = transition.final_observations, transition.reset_infos
        self._write_observations(record, transition.observations, draft, final=False)
        if final is not None:
            self._write_observations(record, final, draft, final=True)
        if self._reward_spaces:
            numbers, inside = self._write_vectors(record, transition.rewards, draft)
            rewards, tags = draft.rewards(numbers)
            tags = draft.note_vectors(tags, inside)
        else:
            rewards, tags = draft.rewards(transition.rewards)
        terminated = draft.flags("terminateds", transition.terminateds)
        truncated = draft.flags("truncateds", transition.truncateds)
        draft.agents("alive", transition.alive)
        draft.agents("acting", transition.acting)
        draft.infos(transition.infos)
        if reset_infos and not all(map(is_empty_info, reset_infos.values())):
            draft.extras["reset_infos"] = reset_infos
        code = (_EXTRAS if draft.extras else 0) | (_FINAL if final is not None else 0)
        head = self._heads[record]
        self._full.pack_into(self._buffer, head, code, *rewards, tags, terminated, truncated, draft.presence)
        self._written[record] = 0
        return draft.extras or None

    def _write_observations(
        self, record: int, observations: Mapping[AgentID, Any], draft: Draft, *, final: bool
    ) -> None:
        columns = self._layout.final_observations if final else self._layout.observations
        name = "final_observations" if final else "observations"
        what = "last observation" if final else "observation"
        everybody = self._quiet_possible and [*observations] == self.agents
        if everybody and _write_whole(columns.whole, record, observations):
            draft.note(name, observations)
            return
        for agent, observation in observations.items():
            try:
                if agent in columns:
                    columns.write(record, agent, observation)
                    draft.note(name, (agent,))
                    continue
            except Unfit:
                pass  # of the declared space, but of another form: pickled
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error
            space = self._layout.schema.observation_spaces.get(agent)
            try:
                draft.leave_out(name, agent, observation if space is None else conform(space, observation))
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error

    def _write_vectors(
        self, record: int, rewards: Mapping[AgentID, Any], draft: Draft
    ) -> tuple[dict[AgentID, Any], list[AgentID]]:
        """Write vector rewards; returns the other rewards, and the agents whose reward is in its column."""
        others, inside = {}, []
        for agent, reward in rewards.items():
            space = self._reward_spaces.get(agent)
            if space is None or not is_vector(reward):
                others[agent] = reward
                continue
            try:
                if agent in self._vectors:
                    self._vectors.write(record, agent, reward)
                    inside.append(agent)
                else:
                    draft.leave_out("rewards", agent, conform(space, reward))
            except Mismatch as error:
                raise Mismatch(f"the reward of agent {agent!r}: {error}") from error
        return others, inside

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, record: int, extras: Extras | None) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        """Rebuild the five dicts, exactly as they were, with what an automatic reset adds to the infos.

        Args:
            record: Which environment's.
            extras: What `write` returned.

        Returns:
            The dicts; the agents who should act next, and those who are alive, lists not to be changed; whether the
            episode is over.
        """
        code, *rewards = self._head.unpack_from(self._buffer, self._heads[record])
        if not code & _QUIET:
            return self._read_full(record, extras or {})
        flag_code = 0
        if code != _QUIET:  # something is less usual: infos, or another type than float and bool
            flag_code = code >> _FLAG_SHIFT
            tag = code >> _REWARD_SHIFT & 0xFF
            if tag == VECTOR_TAG:
                rewards = self._vectors.whole.read_all(record, True)
            else:
                rewards = [*map(REWARD_TYPES[tag], rewards)]
        flags = self._no_flags[flag_code]
        dicts = (
            self._dict_of(*self._observations.read_all(record, self._copy)),
            self._dict_of(*rewards),
            flags.copy(),
            flags.copy(),
            self._new_infos() if extras is None else extras["infos"],
        )
        return dicts, self.agents, self.agents, False

    def read_span(self, span: range) -> Columns | None:
        """The five dicts of neighbouring records, as `read`, where all of them are quiet and alike; None elsewhere."""
        code = self._common_code(span)
        if code is None:
            return None
        tag = code >> _REWARD_SHIFT & 0xFF
        if tag == VECTOR_TAG:
            rewards = self._vectors.whole.read_span(span, True)
        else:
            rewards = numbers_of(self._reward_rows[span.start : span.stop], REWARD_TYPES[tag])
        flags = self._no_flags[code >> _FLAG_SHIFT]
        return (
            (*self._dicts_of(zip(*[iter(self._observations.read_span(span, self._copy))] * self._n)),),
            (*self._dicts_of(zip(*[iter(rewards)] * self._n)),),
            (*[flags.copy() for _ in span],),
            (*[flags.copy() for _ in span],),
            (*[self._new_infos() for _ in span],),
        )

    def _common_code(self, span: range) -> int | None:
        """The code of neighbouring records where all of them are quiet and alike, with nothing pickled beside them."""
        codes = self._codes[span.start : span.stop].tobytes()
        (code,) = _CODE.unpack_from(codes)
        return code if code & _QUIET and not code & _EXTRAS and codes == codes[: _CODE.size] * len(span) else None

    def all_quiet(self) -> bool:
        """Whether all records are quiet and alike, with nothing pickled beside them."""
        return self._common_code(range(len(self._heads))) is not None

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
        for column, positions in self._vectors.groups:
            stacked = column.copied(None)
            for row, position in enumerate(positions):
                agent = self._vectors.agents[position]
                values[agent] = stacked[:, row]
                values[agent][~there[:, row_of[agent]]] = 0
        return values, there

    def all_flags(self) -> NDArray[np.bool_]:
        """Who has terminated, and who is truncated: `(records, 2, agents + 1)`, `__all__` last; a copy."""
        flags: NDArray[np.bool_] = (self._flag_rows & 1).view(np.bool_)
        return flags

    def all_presence(self, masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Who has any of the bits of each mask, in all records: `(masks, records, agents)`; for bits see `heads.py`."""
        presence: NDArray[np.bool_] = (self._presence_rows & masks[:, None, None]) != 0
        return presence

    def observed_part(self, record: int, agent: AgentID, key: str) -> Any:
        """The entry `key` of an agent's observation, copied; None if its observation in this record has no such key."""
        place = self._places.get(agent)
        if place is None or not self._presence_rows[record, place] & BITS["observations"]:
            return None
        return self._layout.observations.read_part(record, agent, key)

    def last_known(self, record: int, extras: Extras | None) -> tuple[dict[Any, Any], list[AgentID]]:
        """What was observed last, and who is alive."""
        (observations, _, _, _, _), _, alive, _ = self._read_full(record, extras or {})
        return observations, alive

    def read_rest(self, record: int, extras: Extras) -> tuple[dict[Any, Any], list[AgentID], list[AgentID], bool]:
        """As `read`, of a record with nothing but infos pickled beside it: only the infos, and where it stands."""
        code, *_, terminated, truncated, presence = self._full.unpack_from(self._buffer, self._heads[record])
        who = self._presence(presence)
        return self._infos(record, code, who, extras), who.acting, who.alive, bool((terminated[-1] | truncated[-1]) & 1)

    def _read_full(self, record: int, extras: Extras) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        code, *rewards, tags, terminated, truncated, presence = self._full.unpack_from(
            self._buffer, self._heads[record]
        )
        who, places = self._presence(presence), self._places
        observations = self._seen(record, self._layout.observations, who.observations)
        paid: dict[Any, Any]
        if self._reward_spaces:
            paid = {agent: self._paid(record, agent, tags[places[agent]], rewards) for agent in who.rewards}
        else:
            paid = {agent: REWARD_TYPES[tags[place := places[agent]]](rewards[place]) for agent in who.rewards}
        terminateds = self._flags("terminateds", who.terminateds, terminated, extras)
        truncateds = self._flags("truncateds", who.truncateds, truncated, extras)
        return (
            (
                self._merged("observations", observations, extras),
                self._merged("rewards", paid, extras),
                terminateds,
                truncateds,
                self._infos(record, code, who, extras),
            ),
            [*who.acting, *extras["acting"]] if "acting" in extras else who.acting,
            [*who.alive, *extras["alive"]] if "alive" in extras else who.alive,
            bool(terminateds[ALL] or truncateds[ALL]),
        )

    def _paid(self, record: int, agent: AgentID, tag: int, numbers: Sequence[float]) -> Any:
        if tag == VECTOR_TAG:
            return self._vectors.read(record, agent, True)
        return REWARD_TYPES[tag](numbers[self._places[agent]])

    def _flags(self, name: str, agents: list[AgentID], codes: bytes, extras: Extras) -> dict[Any, Any]:
        inside = {agent: FLAGS[codes[self._places[agent]]] for agent in agents}
        inside[ALL] = FLAGS[codes[-1]]
        return self._merged(name, inside, extras)

    def _infos(self, record: int, code: int, who: Presence, extras: Extras) -> dict[Any, Any]:
        infos: dict[Any, Any] = extras["infos"] if "infos" in extras else {agent: {} for agent in who.infos}
        if code & _FINAL:
            final = self._seen(record, self._layout.final_observations, who.final_observations)
            final = self._merged("final_observations", final, extras)
            with_final(infos, final, extras.get("reset_infos", {}))
        return infos

    def _seen(self, record: int, columns: AgentColumns, agents: list[AgentID]) -> dict[Any, Any]:
        return dict(zip(agents, columns.read_some(record, agents, self._copy)))

    def _merged(self, name: str, inside: dict[Any, Any], extras: Extras) -> dict[Any, Any]:
        return in_order(inside | extras[name], self._layout.schema.possible_agents) if name in extras else inside


def _write_whole(whole: Whole, record: int, observations: Mapping[AgentID, Any]) -> bool:
    """Write what all agents see; says whether it could."""
    try:
        whole.write_all(record, [*observations.values()])
        return True
    except (Unfit, Mismatch):
        return False  # one by one finds which


def with_finals(codes: NDArray[np.uint8]) -> bool:
    """Whether any of these heads has last observations beside it: `(records, 8)`, the bytes of their codes."""
    return bool((np.ascontiguousarray(codes).view(np.uint64) & np.uint64(_FINAL)).any())
