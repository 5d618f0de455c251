"""Transitions in and out of an environment's record, with what does not fit in there pickled beside it.

Both sides use the same object: the worker writes, the parent reads. Two forms of a transition's head are written.
The *quiet* one is by far the most frequent: every agent is in every dict, nobody's flag is set, nothing has ended;
in a row of them only rewards are written. The *full* one says for each agent in which dicts it was, and of what type
its numbers were. What a transition means is known to `episode.py` alone.

The head, in bytes, for n agents in the block; its rows are valid in both forms::

    code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.runtime.builders import dict_of, dicts_of, empty_dicts_of
from marl_parallel.runtime.columns import Mismatch, Unfit, conform, numbers_of, over_records
from marl_parallel.runtime.episode import with_final
from marl_parallel.runtime.layout import AgentColumns, Layout
from marl_parallel.runtime.pickling import Extras, in_order
from marl_parallel.runtime.transition import ALL, FLOATS, Transition, is_empty_info

OBSERVATION, REWARD, TERMINATED, TRUNCATED, INFO, ALIVE, ACTING, FINAL = (1 << bit for bit in range(8))
_EVERYWHERE = OBSERVATION | REWARD | TERMINATED | TRUNCATED | INFO | ALIVE | ACTING

# The first of each is what simulators give most; a reward is kept as a double, exactly, or travels pickled.
REWARD_TYPES: tuple[type, ...] = (
    *FLOATS, int, bool, np.bool_,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
_REWARD_TAGS = {t: tag for tag, t in enumerate(REWARD_TYPES)}
_LARGEST_EXACT = 2**53

FLAGS: tuple[Any, ...] = (False, True, np.False_, np.True_)
_FLAG_CODES: dict[tuple[type, Any], int] = {
    (bool, False): 0,
    (bool, True): 1,
    (np.bool_, False): 2,
    (np.bool_, True): 3,
}
_QUIET_CODES = {bool: 0, np.bool_: 2}

# What the code of a transition's head is made of; tags of quiet rewards and flags are shifted above these.
_QUIET, _EXTRAS, _FINAL = 1, 2, 4
_REWARD_SHIFT, _FLAG_SHIFT = 8, 16
_PLAIN_MASK = np.uint64(_QUIET | _EXTRAS)
_CODE = struct.Struct("=Q")
_USUAL_CODES = {t: _QUIET | _REWARD_TAGS[t] << _REWARD_SHIFT for t in FLOATS}


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
        self._full = struct.Struct(f"=Q{n}d{n}B{n + 1}B{n + 1}B{n}B")
        self._flag_order = [*agents, ALL]
        self._flag_keys = dict.fromkeys(self._flag_order).keys()
        self._dicts: list[type] = [dict] * n
        self._no_flags = {code: {**dict.fromkeys(agents, FLAGS[code]), ALL: False} for code in _QUIET_CODES.values()}
        self._observations = layout.observations.whole
        self._quiet_possible = bool(agents) and layout.observations.agents == agents
        # The code that was written last into each head, where that was a quiet one.
        self._written = [0] * layout.num_records
        self._codes = over_records(buffer, layout.starts, layout.transition_head, np.uint64, ())
        self._reward_rows = over_records(buffer, layout.starts, layout.transition_head + _CODE.size, np.float64, (n,))

    # -- writing -------------------------------------------------------------------------------------------

    def write(self, record: int, transition: Transition) -> Extras | None:
        """Write what fits; returns the rest, to be pickled.

        Raises:
            Mismatch: An observation is not what its space declares; the text says whose.
        """
        if self._quiet_possible:
            if transition.usual is not None:
                if self._write_observations_whole(record, transition):
                    self._write_quiet_head(record, _USUAL_CODES[transition.usual], transition.rewards.values())
                    return None
            elif transition.acting == self.agents and transition.final_observations is None:
                written = self._write_quiet(record, transition)
                if written is not None:
                    return written or None
        return self._write_full(record, transition)

    def _write_observations_whole(self, record: int, transition: Transition) -> bool:
        """Write what all agents see; says whether it could."""
        try:
            self._observations.write_all(record, [*transition.observations.values()])
            return True
        except (Unfit, Mismatch):
            return False  # one by one finds which

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
        flag_code, reward_tag = _quiet_code(terminateds, truncateds), _reward_tag(numbers)
        if flag_code is None or reward_tag is None or not self._write_observations_whole(record, transition):
            return None
        told = infos.values()
        # Looked at by type first, since arrays would not be compared; faster than `is_empty_info` for each.
        empty = [*infos] == agents and [*map(type, told)] == self._dicts and not any(told)
        code = _QUIET | reward_tag << _REWARD_SHIFT | flag_code << _FLAG_SHIFT
        self._write_quiet_head(record, code if empty else code | _EXTRAS, numbers)
        return {} if empty else {"infos": infos}

    def _write_quiet_head(self, record: int, code: int, rewards: Iterable[Any]) -> None:
        head = self._heads[record]
        if self._written[record] == code:
            self._rewards.pack_into(self._buffer, head + _CODE.size, *rewards)
            return
        n, reward_tag, flag_code = self._n, code >> _REWARD_SHIFT & 0xFF, code >> _FLAG_SHIFT
        tags, flags = (reward_tag,) * n, (flag_code,) * n
        self._full.pack_into(self._buffer, head, code, *rewards, *tags, *flags, 0, *flags, 0, *(_EVERYWHERE,) * n)
        self._written[record] = code

    def _write_full(self, record: int, transition: Transition) -> Extras | None:
        n, index = self._n, {agent: place for place, agent in enumerate(self.agents)}
        presence = [0] * n
        extras: Extras = {}

        def outside(name: str, key: Any, value: Any) -> None:
            extras.setdefault(name, {})[key] = value

        final = transition.final_observations
        self._write_observations(record, transition.observations, False, index, presence, outside)
        if final is not None:
            self._write_observations(record, final, True, index, presence, outside)
        rewards, reward_tags = [0.0] * n, [0] * n
        for agent, reward in transition.rewards.items():
            tag = _reward_tag([reward])
            if agent in index and tag is not None:
                place = index[agent]
                rewards[place], reward_tags[place] = reward, tag
                presence[place] |= REWARD
            else:
                outside("rewards", agent, reward)
        flags = {}
        for name, bit in (("terminateds", TERMINATED), ("truncateds", TRUNCATED)):
            codes = flags[name] = [0] * (n + 1)
            for key, flag in getattr(transition, name).items():
                code = _FLAG_CODES.get((type(flag), flag)) if isinstance(flag, bool | np.bool_) else None
                place = n if key == ALL else index.get(key, -1)
                if code is None or place < 0:
                    outside(name, key, flag)
                    continue
                codes[place] = code
                if place < n:
                    presence[place] |= bit
        for name, who, bit in (("alive", transition.alive, ALIVE), ("acting", transition.acting, ACTING)):
            for agent in who:
                if agent in index:
                    presence[index[agent]] |= bit
                else:
                    extras.setdefault(name, []).append(agent)
        self._note_infos(transition.infos, index, presence, extras)
        if transition.reset_infos and not all(map(is_empty_info, transition.reset_infos.values())):
            extras["reset_infos"] = transition.reset_infos
        code = (_EXTRAS if extras else 0) | (_FINAL if final is not None else 0)
        rows = (*rewards, *reward_tags, *flags["terminateds"], *flags["truncateds"], *presence)
        self._full.pack_into(self._buffer, self._heads[record], code, *rows)
        self._written[record] = 0
        return extras or None

    def _write_observations(
        self,
        record: int,
        observations: Mapping[AgentID, Any],
        final: bool,
        index: Mapping[AgentID, int],
        presence: list[int],
        outside: Any,
    ) -> None:
        columns = self._layout.final_observations if final else self._layout.observations
        bit, name = (FINAL, "final_observations") if final else (OBSERVATION, "observations")
        what = "last observation" if final else "observation"
        for agent, observation in observations.items():
            try:
                if agent in columns:
                    columns.write(record, agent, observation)
                    presence[index[agent]] |= bit
                    continue
            except Unfit:
                pass  # of the declared space, but of another form: pickled
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error
            space = self._layout.schema.observation_spaces.get(agent)
            try:
                outside(name, agent, observation if space is None else conform(space, observation))
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error

    @staticmethod
    def _note_infos(infos: dict[Any, Any], index: Mapping[AgentID, int], presence: list[int], extras: Extras) -> None:
        if all(key in index and is_empty_info(info) for key, info in infos.items()):
            for key in infos:
                presence[index[key]] |= INFO
        else:
            extras["infos"] = infos

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
            rewards = [*map(REWARD_TYPES[code >> _REWARD_SHIFT & 0xFF], rewards)]
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
        codes = self._codes[span.start : span.stop].tobytes()
        (code,) = _CODE.unpack_from(codes)
        if not code & _QUIET or code & _EXTRAS or codes != codes[: _CODE.size] * len(span):
            return None
        rewards = numbers_of(self._reward_rows[span.start : span.stop], REWARD_TYPES[code >> _REWARD_SHIFT & 0xFF])
        flags = self._no_flags[code >> _FLAG_SHIFT]
        return (
            (*self._dicts_of(zip(*[iter(self._observations.read_span(span, self._copy))] * self._n)),),
            (*self._dicts_of(zip(*[iter(rewards)] * self._n)),),
            (*[flags.copy() for _ in span],),
            (*[flags.copy() for _ in span],),
            (*[self._new_infos() for _ in span],),
        )

    def plain(self) -> NDArray[np.bool_]:
        """Which records are quiet, with no flag set and nothing pickled beside them: `(records,)`."""
        plain: NDArray[np.bool_] = (self._codes & _PLAIN_MASK) == _QUIET
        return plain

    def all_rewards(self) -> NDArray[np.float64]:
        """Of all records: `(records, agents)`, a copy; zeros for agents without one, and for what is pickled."""
        rewards: NDArray[np.float64] = self._reward_rows.copy()
        return rewards

    def last_known(self, record: int, extras: Extras | None) -> tuple[dict[Any, Any], list[AgentID]]:
        """What was observed last, and who is alive."""
        (observations, _, _, _, _), _, alive, _ = self._read_full(record, extras or {})
        return observations, alive

    def _read_full(self, record: int, extras: Extras) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        n, agents = self._n, self.agents
        code, *rows = self._full.unpack_from(self._buffer, self._heads[record])
        rewards, tags = rows[:n], rows[n : 2 * n]
        terminated, truncated = rows[2 * n : 3 * n + 1], rows[3 * n + 1 : 4 * n + 2]
        presence = rows[4 * n + 2 :]

        def merged(name: str, inside: dict[Any, Any]) -> dict[Any, Any]:
            return in_order(inside | extras[name], self._layout.schema.possible_agents) if name in extras else inside

        def flags(name: str, codes: Sequence[int], bit: int) -> dict[Any, Any]:
            there = {a: FLAGS[c] for a, c, p in zip(agents, codes, presence) if p & bit}
            return merged(name, there | {ALL: FLAGS[codes[n]]})

        def seen(name: str, columns: AgentColumns, bit: int) -> dict[Any, Any]:
            present = [agent for agent, p in zip(agents, presence, strict=True) if p & bit]
            return merged(name, {agent: columns.read(record, agent, self._copy) for agent in present})

        observations = seen("observations", self._layout.observations, OBSERVATION)
        paid = zip(agents, rewards, tags, presence, strict=True)
        reward_dict = merged("rewards", {a: REWARD_TYPES[t](r) for a, r, t, p in paid if p & REWARD})
        terminateds = flags("terminateds", terminated, TERMINATED)
        truncateds = flags("truncateds", truncated, TRUNCATED)
        quiet_infos: dict[Any, Any] = {a: {} for a, p in zip(agents, presence, strict=True) if p & INFO}
        infos = extras.get("infos", quiet_infos)
        if code & _FINAL:
            final = seen("final_observations", self._layout.final_observations, FINAL)
            with_final(infos, final, extras.get("reset_infos", {}))
        return (
            (observations, reward_dict, terminateds, truncateds, infos),
            [a for a, p in zip(agents, presence, strict=True) if p & ACTING] + extras.get("acting", []),
            [a for a, p in zip(agents, presence, strict=True) if p & ALIVE] + extras.get("alive", []),
            bool(terminateds[ALL] or truncateds[ALL]),
        )


def with_finals(codes: NDArray[np.uint8]) -> bool:
    """Whether any of these heads has last observations beside it: `(records, 8)`, the bytes of their codes."""
    return bool((np.ascontiguousarray(codes).view(np.uint64) & np.uint64(_FINAL)).any())


def _reward_tag(rewards: Sequence[Any]) -> int | None:
    """The tag of the one type that all these numbers have; None where a double would not hold them exactly."""
    kinds = {*map(type, rewards)}
    tag = _REWARD_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
    if tag is None or tag < len(FLOATS):
        return tag
    exact = min(rewards) >= -_LARGEST_EXACT and max(rewards) <= _LARGEST_EXACT
    return tag if exact else None


def _quiet_code(terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> int | None:
    """The code of the one type of False that all agents' flags are; None where one is set, or of another type.

    The flags of `__all__` must be Python's own False, as they are where we add them.
    """
    if terminateds[ALL] is not False or truncateds[ALL] is not False:
        return None
    if any(terminateds.values()) or any(truncateds.values()):
        return None
    kinds = [*map(type, terminateds.values()), *map(type, truncateds.values())]
    if kinds.count(bool) == len(kinds):
        return _QUIET_CODES[bool]
    return _QUIET_CODES[np.bool_] if kinds.count(np.bool_) == len(kinds) - 2 else None
