"""Actions and transitions in and out of the records of the block; what does not fit there is pickled.

The parent writes actions and reads transitions, the worker reads actions and writes transitions::

    parent                                block                               worker
    ActionRecords.write       ->   header | actions                ->   ActionRecords.read
    TransitionRecords.read    <-   header | columns                <-   TransitionRecords.write

Columns are described in `columns.py`. The headers, in bytes, for the n agents that have a place there::

    of actions:        form 1 | present n
    of a transition:   code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n

The form tells whether every agent has an action; if not, `present` tells which have one. Actions out of arrays over
environments are what Gymnasium's vector environments pass: NumPy's scalars where an array would have no axis. The bytes
after the code tell
which agents are in which dicts, and the types of their numbers.

Most transitions are *plain*: every agent is in every dict and alive, all act or one does, all rewards have one type,
and no flag is set. There may be no infos at all, and no flags but `__all__`. Their code has the bit `PLAIN`, and all
but the observations and rewards follow from it. Compiled code (`codec.py`) reads and writes plain records and most
others, with the same bytes; this file takes records of any form, one at a time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.columns import TYPE_OF_TAG, Layout, number_of, over_records, span_of, tag_of
from marl_parallel.core.episode import with_final
from marl_parallel.core.messages import Message
from marl_parallel.core.pickling import Extras, in_order
from marl_parallel.core.spaces import as_scalars, check_reward, has_scalars, is_vector
from marl_parallel.core.transition import ALL, Transition, are_empty

SOME, ALL_IN_ORDER, STACKED = 0, 1, 2
"""The forms of actions: some or all agents have one; a bit if they come out of arrays over environments."""

_CODE_NBYTES = 8
_CACHED, _CACHED_AGENTS = 256, 100_000
"""How many values of `presence` are cached, and how many agents in them: dead agents stay dead for a while."""

_Rows: TypeAlias = tuple[dict[Any, Any], ...]
Columns: TypeAlias = tuple[_Rows, _Rows, _Rows, _Rows, _Rows]
"""Observations, rewards, terminateds, truncateds and infos of several records."""


class ActionRecords:
    """Actions, in the records of all environments, of a layout that is bound to the buffer."""

    def __init__(self, layout: Layout, buffer: Any) -> None:
        self._columns, self._possible_agents = layout.actions, layout.schema.possible_agents
        self._agents = self._columns.agents
        self._forms = over_records(buffer, layout.starts, layout.action_header, np.uint8, ())
        self._present = over_records(buffer, layout.starts, layout.action_header + 1, np.bool_, (len(self._agents),))
        declared = layout.schema.action_spaces
        self._with_scalars = {agent: space for agent, space in declared.items() if has_scalars(space)}

    def write(self, record: int, actions: Mapping[Any, Any]) -> Extras | None:
        """Write what fits, and return the rest, to be pickled; `Mismatch` if an action is not of its space."""
        written, extras = self._columns.write(record, actions, "action")
        if written == self._agents and not extras and written:
            self._forms[record] = ALL_IN_ORDER
            return None
        there = {*written}
        self._present[record] = [agent in there for agent in self._agents]
        self._forms[record] = SOME
        return extras or None

    def mark_present(self, present: NDArray[np.bool_] | None) -> None:
        """Set which actions count in records that were written by columns: `(records, agents)`; None for all."""
        if present is not None:
            self._present[...] = present
        self._forms[...] = STACKED | (ALL_IN_ORDER if present is None else SOME)

    def mark_stacked(self, records: Sequence[int]) -> None:
        """Set that the actions in these records come out of arrays over environments."""
        if self._with_scalars:
            self._forms[[*records]] |= STACKED

    def read(self, record: int, extras: Extras | None) -> dict[Any, Any]:
        """The actions of one record, arrays in memory of their own; `extras` is what `write` returned."""
        agents, form = self._agents, int(self._forms[record])
        if not form & ALL_IN_ORDER:
            agents = [agent for agent, there in zip(agents, self._present[record].tolist()) if there]
        actions = self._columns.read(record, agents, True)
        if extras:
            actions = in_order(actions | extras, self._possible_agents)
        if form & STACKED:
            for agent, space in self._with_scalars.items():
                if agent in actions:
                    actions[agent] = as_scalars(space, actions[agent])
        return actions


# -- codes -------------------------------------------------------------------------------------------------------------

PLAIN, INFOS, FINAL, INFOS_IN_BLOCK, NO_INFOS, ONLY_ALL = 1, 2, 4, 8, 16, 32
"""Bits of a code:

- `PLAIN`: the transition is plain. The tag of the rewards, the code of the flags, and the turn come above these bits: 0
  if all agents act next, else the place of the one that does plus one.
- `INFOS`: extras travel pickled; if it is plain, its infos.
- `FINAL`: final observations are in the block.
- `INFOS_IN_BLOCK`: infos are in the block, where compiled code writes and reads them; with final observations, a pair
  of them and those of the automatic reset.
- `NO_INFOS`, `ONLY_ALL`: plain, but the dict of infos is empty, or both dicts of flags have nothing but `__all__`.
"""
REWARD_SHIFT, FLAG_SHIFT, TURN_SHIFT = 8, 16, 24
_SHOWS_EXCEPTIONS = np.uint64(2**64 - (1 << TURN_SHIFT) | PLAIN | INFOS | INFOS_IN_BLOCK | ONLY_ALL)
"""The bits of a code that are `PLAIN` alone if all agents act and there are no infos."""

# The first of each is the most frequent; a reward is stored as a double, exactly, or travels pickled.
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


def reward_tag(reward: Any) -> int | None:
    """The tag of a number; None if a double would not hold it exactly."""
    tag = tag_of(_REWARD_TAGS, reward)
    if tag is None or tag & TYPE_OF_TAG < len(FLOATS):
        return tag
    return tag if -_LARGEST_EXACT <= reward <= _LARGEST_EXACT else None


_NAMES = "observations", "rewards", "terminateds", "truncateds", "infos", "alive", "acting", "final_observations"
BITS = {name: 1 << place for place, name in enumerate(_NAMES)}
"""Bits of an agent's presence: in which dicts it is, and whether it is alive and acts."""
FLAG_BITS = BITS["terminateds"] | BITS["truncateds"]
EVERYWHERE = sum(BITS.values()) - BITS["final_observations"]
"""The presence of every agent in a plain transition; without the bit of infos if these travel pickled."""


def _agents_in(agents: Sequence[AgentID], presence: bytes) -> dict[str, list[AgentID]]:
    """The agents that have each of the bits, by its name."""
    return {name: [a for a, bits in zip(agents, presence, strict=True) if bits & bit] for name, bit in BITS.items()}


# -- transitions -------------------------------------------------------------------------------------------------------


class TransitionRecords:
    """Transitions in the records of all environments; observations are read as copies, or as views of the block.

    Attributes:
        agents: The agents in the block; all possible ones, unless everything travels pickled.
        rewards, tags, presence: Views of all headers, `(records, agents)`.
        flags: The codes of the flags, `(records, 2, agents + 1)`, `__all__` last; odd if True.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True, codec: Any = None) -> None:
        self._layout, self._copy, self._buffer, self._codec = layout, copy, buffer, codec
        self.agents = agents = layout.agents
        self._n = n = len(agents)
        self._headers = [start + layout.transition_header for start in layout.starts]
        self._struct = struct.Struct(f"=Q{n}d{n}s{n + 1}s{n + 1}s{n}s")
        view, at = functools.partial(over_records, buffer, layout.starts), layout.transition_header + _CODE_NBYTES
        self._codes = view(at - _CODE_NBYTES, np.uint64, ())
        self._last_codes, self._are_plain = b"", False  # the codes when they were last looked at
        self.rewards = view(at, np.float64, (n,))
        self.tags = view(at + 8 * n, np.uint8, (n,))
        self.flags = view(at + 9 * n, np.uint8, (2, n + 1))
        self.presence = view(at + 11 * n + 2, np.uint8, (n,))
        self._flagged = [*agents, ALL]
        self._places = {key: place for place, key in enumerate(self._flagged)}
        cached = min(_CACHED, max(_CACHED_AGENTS // max(n, 1), 1))
        self._agents_in = functools.lru_cache(cached)(functools.partial(_agents_in, agents))

    def write(self, record: int, transition: Transition) -> Extras | None:
        """Write what fits, and return the rest, to be pickled; `Mismatch` if a value is not of its space."""
        observations, rewards, terminateds, truncateds, infos, alive, acting, final, reset_infos = transition
        n, places = self._n, self._places
        extras: Extras = {}
        common, presence = 0, [0] * (n + 1)  # the bits of all agents, and those of each agent; of `__all__`, any

        def add(name: str, agents: Sequence[AgentID], left: Mapping[Any, Any] | None = None) -> None:
            """Note the agents in a dict whose value is written, and the entries that do not fit."""
            nonlocal common
            bit = BITS[name]
            if agents in (self.agents, self._flagged):
                common |= bit
            else:
                for agent in agents:
                    presence[places[agent]] |= bit
            if left:
                extras.setdefault(name, {}).update(left)

        add("observations", *self._layout.observations.write(record, observations, "observation"))
        if final is not None:
            add("final_observations", *self._layout.final_observations.write(record, final, "last observation"))
        numbers, tags = [0.0] * n, bytearray(n)
        written: list[AgentID] = []
        left: dict[Any, Any] = {}
        if declared := self._layout.schema.reward_spaces:
            vectors = {agent: reward for agent, reward in rewards.items() if agent in declared and is_vector(reward)}
            rewards = {agent: reward for agent, reward in rewards.items() if agent not in vectors}
            written, left = self._layout.rewards.write(record, vectors, "reward")
            for agent in written:
                tags[places[agent]] = VECTOR_TAG
        for agent, reward in rewards.items():
            place, tag = places.get(agent, n), reward_tag(reward)
            if tag is None or place == n:
                check_reward(agent, reward)
                left[agent] = reward
            else:
                numbers[place], tags[place] = reward.item() if tag > TYPE_OF_TAG else reward, tag
                written.append(agent)
        add("rewards", written, left)
        codes = []
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            row, written, left = bytearray(n + 1), [], {}
            for key, flag in flags.items():
                if type(flag) in FALSE_CODES and key in places:
                    row[places[key]] = FALSE_CODES[type(flag)] + flag
                    written.append(key)
                else:
                    left[key] = flag
            add(name, written, left)
            codes.append(row)
        for name, agents in (("alive", alive), ("acting", acting)):
            known = [agent for agent in agents if agent in places]
            add(name, known)
            if len(known) < len(agents):
                extras[name] = [agent for agent in agents if agent not in places]
        code, everywhere, variant = FINAL if final is not None else 0, EVERYWHERE, 0 if infos else NO_INFOS
        if ALL not in infos and infos.keys() <= places.keys() and are_empty(infos.values()):
            add("infos", [*infos])
        else:
            extras["infos"] = infos
        if not infos or "infos" in extras:
            everywhere -= BITS["infos"]
        if reset_infos and not are_empty(reset_infos.values()):
            extras["reset_infos"] = reset_infos
        if self._codec is not None and not extras.keys().isdisjoint(("infos", "reset_infos")):
            value = infos if final is None else (infos, {**(reset_infos or {})})
            if self._codec.put_infos(record, value):
                code |= INFOS_IN_BLOCK
                extras = {name: left for name, left in extras.items() if name not in ("infos", "reset_infos")}
        bits = bytes([own | common for own in presence[:n]])
        code |= INFOS if extras else 0
        if terminateds.keys() == truncateds.keys() == {ALL}:
            everywhere -= FLAG_BITS
            variant |= ONLY_ALL
        expected, turn, flag = bytearray((everywhere,)) * n, 0, codes[0][0]
        if len(acting) == 1 < n and acting[0] in places:
            turn = places[acting[0]] + 1
            expected = bytearray((everywhere - BITS["acting"],)) * n
            expected[turn - 1] = everywhere
        if (
            code in (0, INFOS, INFOS_IN_BLOCK)
            and n
            and extras.keys() <= {"infos"}
            and bits == expected
            and tags == tags[:1] * n
            and flag in FALSE_CODES.values()
            and codes[0] == codes[1] == bytes((flag,)) * n + b"\0"
        ):
            code |= PLAIN | variant | tags[0] << REWARD_SHIFT | flag << FLAG_SHIFT | turn << TURN_SHIFT
        self._struct.pack_into(self._buffer, self._headers[record], code, *numbers, tags, *codes, bits)
        return extras or None

    def read(self, record: int, extras: Extras) -> tuple[Dicts, list[AgentID], list[AgentID], bool]:
        """Rebuild the five dicts of a record, with what an automatic reset adds to the infos.

        The infos of that reset are added to `extras` if they are in the block.

        Returns:
            The dicts; the agents that act next, and those that are alive, lists not to be changed; whether the episode
            is over.
        """
        header = self._struct.unpack_from(self._buffer, self._headers[record])
        code, *numbers, tags, terminated, truncated, presence = header
        agents_in = self._agents_in(presence)
        observations = self._layout.observations.read(record, agents_in["observations"], self._copy)
        rewards = {
            agent: None if tag == VECTOR_TAG else number_of(REWARD_TYPES, tag, number)
            for agent, tag, number, bits in zip(self.agents, tags, numbers, presence)
            if bits & BITS["rewards"]
        }
        if VECTOR_TAG in tags:
            vectors = [agent for agent, reward in rewards.items() if reward is None]
            rewards |= self._layout.rewards.read(record, vectors, True)
        flags = []
        for name, codes in (("terminateds", terminated), ("truncateds", truncated)):
            bit = BITS[name]
            of_agents = {agent: FLAGS[code] for agent, code, bits in zip(self.agents, codes, presence) if bits & bit}
            flags.append(self._merged(name, {**of_agents, ALL: FLAGS[codes[-1]]}, extras))
        dicts = (
            self._merged("observations", observations, extras),
            self._merged("rewards", rewards, extras),
            flags[0],
            flags[1],
            self._infos(record, code, agents_in, extras),
        )
        acting, alive = agents_in["acting"], agents_in["alive"]
        if extras:
            acting, alive = acting + extras.get("acting", []), alive + extras.get("alive", [])
        return dicts, acting, alive, bool(flags[0][ALL] or flags[1][ALL])

    def is_final(self, record: int) -> bool:
        """Whether a record has the end of an episode and the beginning of the next one."""
        return bool(int(self._codes[record]) & FINAL)

    def read_ended(self, record: int, extras: Extras) -> Dicts:
        """As `read`, of a record that `is_final`: the dicts of the step as they were before the automatic reset."""
        code, *_, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        agents_in = self._agents_in(presence)
        final = self._layout.final_observations.read(record, agents_in["final_observations"], self._copy)
        infos = {**self._infos_of_step(record, code, agents_in, extras)}  # `read` adds to them
        _, rewards, terminateds, truncateds, _ = self.read(record, {**extras})[0]
        return self._merged("final_observations", final, extras), rewards, terminateds, truncateds, infos

    def read_infos(self, record: int, extras: Extras) -> tuple[dict[Any, Any], list[AgentID], list[AgentID], bool]:
        """As `read`, with the infos in place of all dicts, if `extras` have nothing but infos."""
        code, *_, terminated, truncated, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        agents_in = self._agents_in(presence)
        over = bool((terminated[-1] | truncated[-1]) & 1)
        return self._infos(record, code, agents_in, extras), agents_in["acting"], agents_in["alive"], over

    def outcome(self, record: int) -> tuple[dict[AgentID, Any], dict[Any, bool], dict[Any, bool]]:
        """The rewards and the flags of a record of which nothing but infos is pickled."""
        _, *numbers, tags, terminated, truncated, presence = self._struct.unpack_from(
            self._buffer, self._headers[record]
        )
        rewards: dict[AgentID, Any] = {
            agent: number for agent, number, bits in zip(self.agents, numbers, presence) if bits & BITS["rewards"]
        }
        if VECTOR_TAG in tags:
            vectors = [agent for agent, tag in zip(self.agents, tags) if tag == VECTOR_TAG and agent in rewards]
            rewards |= self._layout.rewards.read(record, vectors, True)
        terminateds, truncateds = (
            {agent: bool(code & 1) for agent, code in zip(self._flagged, codes)} for codes in (terminated, truncated)
        )
        return rewards, terminateds, truncateds

    def last_known(self, record: int, extras: Extras | None) -> tuple[dict[Any, Any], list[AgentID]]:
        """The last observations, and the agents that are alive."""
        extras = extras or {}
        *_, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        agents_in = self._agents_in(presence)
        observations = self._layout.observations.read(record, agents_in["observations"], self._copy)
        return self._merged("observations", observations, extras), agents_in["alive"] + extras.get("alive", [])

    def observed(self, record: int) -> dict[AgentID, Any]:
        """The observations in a record, without those that are pickled; arrays are views."""
        *_, presence = self._struct.unpack_from(self._buffer, self._headers[record])
        return self._layout.observations.read(record, self._agents_in(presence)["observations"], False)

    def _infos_of_step(
        self, record: int, code: int, agents_in: Mapping[str, list[AgentID]], extras: Extras
    ) -> dict[Any, Any]:
        """The infos as the simulator returned them; those of an automatic reset are added to `extras`."""
        infos: dict[Any, Any]
        if code & INFOS_IN_BLOCK:
            infos = self._codec.infos(record)
            if code & FINAL:
                infos, extras["reset_infos"] = cast(tuple[Any, Any], infos)
        else:
            infos = extras["infos"] if "infos" in extras else {agent: {} for agent in agents_in["infos"]}
        return infos

    def _infos(self, record: int, code: int, agents_in: Mapping[str, list[AgentID]], extras: Extras) -> dict[Any, Any]:
        infos = self._infos_of_step(record, code, agents_in, extras)
        if code & FINAL:
            final = self._layout.final_observations.read(record, agents_in["final_observations"], self._copy)
            with_final(infos, self._merged("final_observations", final, extras), extras.get("reset_infos", {}))
        return infos

    def _merged(self, name: str, values: dict[Any, Any], extras: Extras) -> dict[Any, Any]:
        return in_order(values | extras[name], self._layout.schema.possible_agents) if name in extras else values


# -- slices of records, for workers that share no memory with the parent -----------------------------------------------

WITH_ACTIONS = frozenset({Message.STEP})
"""Requests that are sent with the actions that the parent has written."""
WITH_RESULTS = frozenset({Message.STEP, Message.RESET, Message.REBUILD, Message.ADOPT, Message.STATE})
"""Requests whose replies are sent with the results that the worker has written."""


class RecordPlaces(NamedTuple):
    """Where records and their parts are: the numbers of a `Layout` that `RecordSlices` needs."""

    num_records: int
    stride: int
    nbytes: int
    transition_header: int
    step_end: int

    @classmethod
    def of(cls, layout: Layout) -> RecordPlaces:
        return cls(*[getattr(layout, name) for name in cls._fields])


class RecordSlices:
    """The same part of several records as an array `(records, bytes)`, a copy.

    Each end has a block of its own; what one end has written, the other writes into its own.
    """

    def __init__(self, layout: Layout | RecordPlaces, buffer: Any) -> None:
        shape = layout.num_records, layout.stride
        self._records: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, layout.nbytes).reshape(shape)
        self._layout = layout

    def actions(self, env_ids: Sequence[int]) -> NDArray[np.uint8]:
        return np.array(self._records[_rows(env_ids), : self._layout.transition_header], order="C")

    def put_actions(self, env_ids: Sequence[int], slices: NDArray[np.uint8]) -> None:
        self._records[_rows(env_ids), : slices.shape[1]] = slices

    def results(self, env_ids: Sequence[int], message: Message, *, states: bool = False) -> NDArray[np.uint8]:
        """What a worker has written to carry out a request; `states` if each reset and step writes states."""
        rows, start = _rows(env_ids), self._layout.transition_header
        codes = np.ascontiguousarray(self._records[rows, start : start + _CODE_NBYTES]).view(np.uint64)
        whole = states or message is Message.STATE or bool((codes & np.uint64(FINAL)).any())
        return np.array(self._records[rows, start : None if whole else self._layout.step_end], order="C")

    def put_results(self, env_ids: Sequence[int], slices: NDArray[np.uint8]) -> None:
        start = self._layout.transition_header
        self._records[_rows(env_ids), start : start + slices.shape[1]] = slices

    def records(self, env_ids: Sequence[int]) -> bytes:
        """Whole records."""
        return self._records[_rows(env_ids)].tobytes()

    def put_records(self, env_ids: Sequence[int], records: bytes) -> None:
        """Write the results out of whole records."""
        whole = np.frombuffer(records, np.uint8).reshape(len(env_ids), self._layout.stride)
        self.put_results(env_ids, whole[:, self._layout.transition_header :])


def _rows(env_ids: Sequence[int]) -> slice | list[int]:
    span = span_of(env_ids)
    return [*env_ids] if span is None else slice(span.start, span.stop)
