"""Reads and writes actions and transitions in the records of the block; values that do not fit are pickled.

The parent writes actions and reads transitions, the worker reads actions and writes transitions::

    parent                                block                               worker
    ActionRecords.write       ->   header | actions                ->   ActionRecords.read
    TransitionRecords.read    <-   header | columns                <-   TransitionRecords.write

Columns are described in `columns.py`. The headers, in bytes, for the n agents that have a place there::

    of actions:        form 1 | present n, and the header of a `JointColumn` if there is one
    of a transition:   code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n | events n

The form tells whether every agent has an action; if not, `present` tells which agents have one. Actions from arrays
over environments are like the actions of Gymnasium's vector environments: NumPy scalars replace arrays without axes.
The presence of an agent has bits for the dicts that contain it, and for whether it is alive and acts; its events are
those of `Transition`.

Compiled code (`codec.py`, with the other bits of codes) writes and reads numeric records. This file handles the other
records, and all records without compiled code: arrays are in the block, all else is pickled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import JOINT, AgentID
from marl_parallel.core.columns import AgentColumns, Layout, damaged, over_records, span_of
from marl_parallel.core.messages import Message
from marl_parallel.core.pickling import Leftovers, in_order
from marl_parallel.core.spaces import DoesNotFit, Mismatch, as_scalars, check_reward, conform, has_scalars, is_vector
from marl_parallel.core.transition import TOOK_PART, WAS_ALIVE, Transition, are_empty

SOME, ALL_IN_ORDER, STACKED = 0, 1, 2
"""The forms of actions: some or all agents have one; a bit for actions from arrays over environments."""

_CODE_NBYTES = 8

_Rows: TypeAlias = tuple[dict[Any, Any], ...]
Columns: TypeAlias = tuple[_Rows, _Rows, _Rows, _Rows, _Rows]
"""Observations, rewards, terminateds, truncateds and infos of several records."""


class ActionRecords:
    """Actions, in the records of all environments, of a layout that is bound to the buffer."""

    def __init__(self, layout: Layout, buffer: Any) -> None:
        self._columns, self._possible_agents = layout.actions, layout.schema.possible_agents
        self._joint = layout.joint
        self._agents = self._columns.agents
        self._forms = over_records(buffer, layout.starts, layout.action_header, np.uint8, ())
        self._present = over_records(buffer, layout.starts, layout.action_header + 1, np.bool_, (len(self._agents),))
        declared = layout.schema.action_spaces
        self._with_scalars = {agent: space for agent, space in declared.items() if has_scalars(space)}

    def write(self, record: int, actions: Mapping[Any, Any]) -> Leftovers | None:
        """Write the actions that fit, and return the others to be pickled; `Mismatch` if a space does not match."""
        written, leftovers = self._columns.write(record, actions, "action")
        if written == self._agents and not leftovers and written:
            self._forms[record] = ALL_IN_ORDER
            return None
        with_action = {*written}
        self._present[record] = [agent in with_action for agent in self._agents]
        self._forms[record] = SOME
        return leftovers or None

    def mark_present(self, present: NDArray[np.bool_] | None) -> None:
        """Set which actions count, `(records, agents)`, in records written by columns; None for all."""
        if present is not None:
            self._present[...] = present
        self._forms[...] = STACKED | (ALL_IN_ORDER if present is None else SOME)

    def write_joint(self, records: slice | list[int], values: Any, *, lists: bool) -> bool:
        """Write the `JOINT` actions of some records; returns False, and writes nothing, if there is no room for them.

        Compiled code reads the actions of agents, too, whatever they are.
        """
        if self._joint is None or not isinstance(values, np.ndarray):
            return False
        if not self._joint.write(records, values, lists=lists):
            return False
        self._forms[records] = STACKED | ALL_IN_ORDER
        return True

    def clear_joint(self, records: list[int]) -> None:
        """Note that these records have no `JOINT` actions."""
        if self._joint is not None:
            self._joint.clear(records)

    def mark_stacked(self, records: Sequence[int]) -> None:
        """Mark that the actions in these records come from arrays over environments."""
        if self._with_scalars:
            self._forms[[*records]] |= STACKED

    def read(self, record: int, leftovers: Leftovers | None) -> dict[Any, Any]:
        """The actions of one record, with copies of arrays; `leftovers` is the result of `write`."""
        if self._joint is not None and (joint := self._joint.read(record)) is not None:
            return {JOINT: joint}
        agents, form = self._agents, int(self._forms[record])
        if form & ~(ALL_IN_ORDER | STACKED):
            raise damaged(record)
        if not form & ALL_IN_ORDER:
            agents = [agent for agent, is_present in zip(agents, self._present[record].tolist()) if is_present]
        actions = self._columns.read(record, agents, True)
        if leftovers:
            actions = in_order(actions | leftovers, self._possible_agents)
        if form & STACKED:
            for agent, space in self._with_scalars.items():
                if agent in actions:
                    actions[agent] = as_scalars(space, actions[agent])
        return actions


# -- transitions -------------------------------------------------------------------------------------------------------

PICKLED, FINAL, INFOS = 64, 4, 2
"""Bits of a code: all values except arrays are pickled, and `presence` tells which observations are in the block; final
observations are in the block; infos are pickled. The other bits belong to compiled code."""

# The most frequent type comes first. A reward that a double does not hold exactly travels pickled.
FLOATS: tuple[type, ...] = (float, np.float64, np.float32, np.float16)
"""The types of rewards of which a double holds each number exactly."""
REWARD_TYPES: tuple[type, ...] = (
    *FLOATS, int, bool, np.bool_,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
VECTOR_TAG = len(REWARD_TYPES)
"""The tag of a reward that is a vector, and lies in a column of vectors."""

_NAMES = "observations", "rewards", "terminateds", "truncateds", "infos", "alive", "acting", "final_observations"
BITS = {name: 1 << place for place, name in enumerate(_NAMES)}
"""Bits of an agent's presence: which dicts contain it, and whether it is alive and acts."""


class TransitionRecords:
    """Transitions in the records of all environments; observations are read as copies, or as views of the block.

    Compiled code writes and reads numeric transitions of known agents. This class writes the other transitions, and all
    transitions without compiled code: arrays into the block, all else pickled.

    Attributes:
        tags, presence, events: Views of all headers, `(records, agents)`.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True, codec: Any = None) -> None:
        self._layout, self._copy, self._codec = layout, copy, codec
        self._n = n = len(layout.agents)
        self._places = {agent: place for place, agent in enumerate(layout.agents)}
        view, at = functools.partial(over_records, buffer, layout.starts), layout.transition_header + _CODE_NBYTES
        self._codes = view(at - _CODE_NBYTES, np.uint64, ())
        self.tags = view(at + 8 * n, np.uint8, (n,))
        self.presence = view(at + 11 * n + 2, np.uint8, (n,))
        self.events = view(at + 12 * n + 2, np.uint8, (n,))

    def write(self, record: int, transition: Transition) -> Leftovers | None:
        """Write the values that fit, and return the others to be pickled; `Mismatch` if a space does not match."""
        written = 0 if self._codec is None else self._codec.put(record, transition)
        if written == 0 and self._codec is not None:
            written = self._codec.put(record, self._conformed(transition))
        if written == 1:
            return None
        observations, rewards, terminateds, truncateds, infos, alive, acting, final, reset_infos, events = transition
        leftovers: Leftovers = {"infos": infos}
        if reset_infos and not are_empty(reset_infos.values()):
            leftovers["reset_infos"] = reset_infos
        if written:
            return leftovers
        presence = bytearray(self._n)
        for name, columns, values, what in (
            ("observations", self._layout.observations, observations, "observation"),
            ("final_observations", self._layout.final_observations, final, "last observation"),
        ):
            agents, unwritten = columns.write(record, values or {}, what)
            for agent in agents:
                presence[self._places[agent]] |= BITS[name]
            if unwritten:
                leftovers[name] = unwritten
        declared = self._layout.schema.reward_spaces
        for agent, reward in rewards.items():
            check_reward(agent, reward)
            if agent in declared and is_vector(reward):
                try:
                    rewards = {**rewards, agent: conform(declared[agent], reward)}
                except Mismatch as error:
                    raise Mismatch(f"the reward of agent {agent!r}: {error}") from error
        leftovers |= {"rewards": {**rewards}, "terminateds": {**terminateds}, "truncateds": {**truncateds}}
        for name, those in (("alive", alive), ("acting", acting)):  # in the block, as leftovers may stay pickled
            for agent in those:
                if agent in self._places:
                    presence[self._places[agent]] |= BITS[name]
                else:
                    leftovers.setdefault(name, []).append(agent)
        self.presence[record] = np.frombuffer(presence, np.uint8)
        events = dict.fromkeys({**observations, **rewards}, TOOK_PART | WAS_ALIVE) if events is None else events
        self.events[record] = [events.get(agent, 0) for agent in self._layout.agents]
        if others := {agent: bits for agent, bits in events.items() if agent not in self._places}:
            leftovers["events"] = others
        self._codes[record] = PICKLED | (FINAL if final is not None else 0)
        return leftovers

    def _conformed(self, transition: Transition) -> Transition:
        """A transition with observations cast to their spaces, as far as possible."""

        def cast(values: dict[Any, Any] | None) -> dict[Any, Any] | None:
            declared = self._layout.schema.observation_spaces
            with contextlib.suppress(Mismatch, DoesNotFit):  # `write` raises it again
                return values and {a: conform(declared[a], one) if a in declared else one for a, one in values.items()}
            return values

        observations = cast(transition.observations) or {}
        return transition._replace(observations=observations, final_observations=cast(transition.final_observations))

    def is_whole(self, record: int) -> bool:
        """Whether at most infos are pickled."""
        return not int(self._codes[record]) & PICKLED

    def has_leftovers(self, record: int) -> bool:
        """Whether anything is pickled."""
        return bool(int(self._codes[record]) & (PICKLED | INFOS))

    def goes_with(self, record: int, leftovers: Leftovers | None) -> bool:
        """Whether `write` has returned these leftovers for this record, as far as its code tells."""
        pickles_all = leftovers is not None and "rewards" in leftovers
        return self.has_leftovers(record) == (leftovers is not None) and self.is_whole(record) != pickles_all

    def read(self, record: int, leftovers: Leftovers | None) -> Transition:
        """The transition in a record, as this file or compiled code wrote it, with `leftovers`. Lists are read-only.

        A header or a number that no writer writes is a `ValueError`, see `damaged`.
        """
        leftovers, code = leftovers or {}, int(self._codes[record])
        if code & ~(PICKLED | FINAL) and (code & PICKLED or self._codec is None):
            raise damaged(record)
        if not code & PICKLED and self._codec is not None:
            parts = Transition(*self._codec.parts(record, self._copy))
            infos = leftovers.get("infos", {}) if parts.infos is None else parts.infos
            reset = leftovers.get("reset_infos", {}) if parts.reset_infos is None else parts.reset_infos
            return parts._replace(infos=infos, reset_infos=reset)
        return Transition(
            self._merged(record, "observations", self._layout.observations, leftovers),
            rewards=leftovers.get("rewards", {}),
            terminateds=leftovers.get("terminateds", {}),
            truncateds=leftovers.get("truncateds", {}),
            infos=leftovers.get("infos", {}),
            alive=self._agents_with(record, "alive") + leftovers.get("alive", []),
            acting=self._agents_with(record, "acting") + leftovers.get("acting", []),
            final_observations=(
                self._merged(record, "final_observations", self._layout.final_observations, leftovers)
                if code & FINAL else None
            ),
            reset_infos=leftovers.get("reset_infos", {}),
            events=self.events_in(record) | leftovers.get("events", {}),
        )  # fmt: skip

    def _merged(self, record: int, name: str, columns: AgentColumns, leftovers: Leftovers) -> dict[Any, Any]:
        values = columns.read(record, self._agents_with(record, name), self._copy)
        return in_order(values | leftovers[name], self._layout.schema.possible_agents) if name in leftovers else values

    def is_final(self, record: int) -> bool:
        """Whether a record has the end of one episode and the beginning of the next one."""
        return bool(int(self._codes[record]) & FINAL)

    def events_in(self, record: int) -> dict[AgentID, int]:
        """The events of the agents that have a place and some events."""
        bits = self.events[record].tolist()
        return {agent: of_agent for agent, of_agent in zip(self._layout.agents, bits) if of_agent}

    def observed(self, record: int) -> dict[AgentID, Any]:
        """The observations in a record, without pickled ones; arrays are views."""
        return self._layout.observations.read(record, self._agents_with(record, "observations"), False)

    def _agents_with(self, record: int, name: str) -> list[AgentID]:
        is_set = (self.presence[record] & BITS[name]).tolist()
        return [agent for agent, is_there in zip(self._layout.agents, is_set) if is_there]


# -- slices of records, for workers that share no memory with the parent -----------------------------------------------

WITH_ACTIONS = frozenset({Message.STEP})
"""Requests that are sent with the actions that the parent has written."""
WITH_RESULTS = frozenset({Message.STEP, Message.RESET, Message.REBUILD, Message.ADOPT, Message.STATE, Message.REPLACE})
"""Requests whose replies are sent with the results that the worker has written."""


class RecordPlaces(NamedTuple):
    """The offsets of records and their parts: the numbers of a `Layout` that `RecordSlices` needs."""

    num_records: int
    stride: int
    nbytes: int
    transition_header: int
    step_end: int

    @classmethod
    def of(cls, layout: Layout) -> RecordPlaces:
        return cls(*[getattr(layout, name) for name in cls._fields])


class RecordSlices:
    """Copies of the same part of several records, as arrays `(records, bytes)`.

    Parent and worker each have a block. One side sends slices of its block; the other writes them into its own block.
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
        """The parts that a worker writes for a request; with `states`, also the states of each reset and step."""
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
        """Write the results that whole records contain."""
        whole = np.frombuffer(records, np.uint8).reshape(len(env_ids), self._layout.stride)
        self.put_results(env_ids, whole[:, self._layout.transition_header :])


def _rows(env_ids: Sequence[int]) -> slice | list[int]:
    span = span_of(env_ids)
    return [*env_ids] if span is None else slice(span.start, span.stop)
