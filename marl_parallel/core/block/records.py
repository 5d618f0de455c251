"""Reads and writes actions and transitions in the records of the block; what does not fit there is pickled.

The parent writes actions and reads transitions, the worker reads actions and writes transitions::

    parent                                block                               worker
    Codec.write, BlockArrays.write  ->   header | actions    ->   Codec.run, ActionRecords.read
    TransitionRecords.read          <-   header | columns    <-   Codec.run, TransitionRecords.write

Compiled code (`codec.py`) writes and reads records: numbers and arrays that fit their spaces, of the agents that have
an entry in the headers. There are three forms of a transition:

- all of it is in the record;
- all but infos, which are pickled;
- the record has only a code, and the whole `Transition` is pickled.

Without compiled code, it is always the third. The actions of an environment are all in the record, or all pickled.
Those that come as arrays over environments are like the actions of Gymnasium's vector environments: NumPy scalars
replace arrays without axes. Without compiled code, they alone are in records.

Columns are described in `columns.py`. The headers, in bytes, for the n agents that have an entry there::

    of actions:        form 1 | present n, and the header of a `JointColumn` if there is one
    of a transition:   code 8 | rewards 8n | types of rewards n | terminated n+1 | truncated n+1 | presence n | events n

The form tells whether every agent has an action; if not, `present` tells which agents have one. The presence of an
agent has bits for the dicts that contain it, and for whether it is alive and acts; its events are those of
`Transition`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import JOINT, AgentID
from marl_parallel.core.block.columns import Layout, damaged, over_records, span_of
from marl_parallel.core.messages import Message
from marl_parallel.core.objects.pickling import dump_parts, in_order
from marl_parallel.core.spaces import Mismatch, as_scalars, check_reward, conform, has_scalars, is_vector
from marl_parallel.core.transition import TOOK_PART, WAS_ALIVE, Leftovers, Transition, are_empty

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
        self._declared = declared = layout.schema.action_spaces
        self._with_scalars = {agent: space for agent, space in declared.items() if has_scalars(space)}

    def fitting(self, actions: Mapping[Any, Any]) -> dict[Any, Any]:
        """Actions to be pickled, cast to their spaces, with copies of arrays; `Mismatch` names the agent."""
        return in_order(conformed(self._declared, actions, "action", strict=True), self._possible_agents)

    def write_none(self, record: int) -> None:
        """Write that no agent has an action."""
        self._forms[record], self._present[record] = SOME, False

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

    def scalars(self, actions: dict[Any, Any]) -> dict[Any, Any]:
        """Actions from arrays over environments, with NumPy scalars in place of arrays without axes."""
        replaced = {
            agent: as_scalars(space, actions[agent]) for agent, space in self._with_scalars.items() if agent in actions
        }
        return {**actions, **replaced}

    def read(self, record: int) -> dict[Any, Any]:
        """The actions of one record, with copies of arrays."""
        if self._joint is not None and (joint := self._joint.read(record)) is not None:
            return {JOINT: joint}
        agents, form = self._agents, int(self._forms[record])
        if form & ~(ALL_IN_ORDER | STACKED):
            raise damaged(record)
        if not form & ALL_IN_ORDER:
            agents = [agent for agent, is_present in zip(agents, self._present[record].tolist()) if is_present]
        actions = self._columns.read(record, agents, True)
        return self.scalars(actions) if form & STACKED else actions


# -- transitions -------------------------------------------------------------------------------------------------------

WRITTEN, PICKLED, FINAL, INFOS = 1 << 63, 64, 4, 2
"""Bits of a code: the record is complete; the whole transition is pickled; the next episode has begun in the same step;
infos are pickled. The other bits belong to compiled code. While a transition is being written, the code is zero; while
the next episode is written over the last step of an episode, the code is still that of the step."""

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
BITS = {name: 1 << index for index, name in enumerate(_NAMES)}
"""Bits of an agent's presence: which dicts contain it, and whether it is alive and acts."""


class TransitionRecords:
    """Transitions in the records of all environments; observations are read as copies, or as views of the block.

    Attributes:
        agents: The agents with an entry in the headers.
        tags, presence, events: Views of all headers, `(records, agents)`.
    """

    def __init__(self, layout: Layout, buffer: Any, *, copy: bool = True, codec: Any = None) -> None:
        self._layout, self._copy, self._codec = layout, copy, codec
        self.agents, n = layout.agents, len(layout.agents)
        view, at = functools.partial(over_records, buffer, layout.starts), layout.transition_header + _CODE_NBYTES
        self._codes = view(at - _CODE_NBYTES, np.uint64, ())
        self.tags = view(at + 8 * n, np.uint8, (n,))
        self.presence = view(at + 11 * n + 2, np.uint8, (n,))
        self.events = view(at + 12 * n + 2, np.uint8, (n,))

    def write(self, record: int, transition: Transition) -> Leftovers | None:
        """Write a transition; returns what has to be pickled, None if nothing has.

        Raises:
            Mismatch: A value does not match its space; the text names the agent.
        """
        if transition.final_observations is None:  # else the record has the last step, which a death does not lose
            self.clear(record)
        codec, written = self._codec, 0
        if codec is not None:
            written = codec.put(record, transition)
        if not written:
            transition = self._fitting(transition)
            if codec is not None:
                written = codec.put(record, transition)
        if written == 1:
            return None
        if written:
            return infos_alone(transition.infos, transition.reset_infos, self.agents)
        self._codes[record] = WRITTEN | PICKLED | (FINAL if transition.final_observations is not None else 0)
        return transition

    def _fitting(self, transition: Transition) -> Transition:
        """The same transition, to be pickled: values cast to their spaces, copies of arrays, agents in one order."""
        schema = self._layout.schema
        ordered = functools.partial(in_order, possible_agents=schema.possible_agents)
        observations, rewards, final, events = (
            transition.observations, transition.rewards, transition.final_observations, transition.events
        )  # fmt: skip
        for agent, reward in rewards.items():
            check_reward(agent, reward)
        if schema.reward_spaces:
            vectors = {agent: reward for agent, reward in rewards.items() if is_vector(reward)}
            rewards = {**rewards, **conformed(schema.reward_spaces, vectors, "reward")}
        if events is None:
            events = dict.fromkeys({**observations, **rewards}, TOOK_PART | WAS_ALIVE)
        return Transition(
            ordered(conformed(schema.observation_spaces, observations, "observation")),
            ordered(rewards),
            ordered(transition.terminateds),
            ordered(transition.truncateds),
            ordered(transition.infos),
            [*ordered(dict.fromkeys(transition.alive))],
            [*transition.acting],
            final and ordered(conformed(schema.observation_spaces, final, "last observation")),
            transition.reset_infos and ordered(transition.reset_infos),
            ordered(events),
            transition.masks,
        )

    def clear(self, record: int) -> None:
        """Note that nothing is written in a record."""
        self._codes[record] = 0

    def goes_with(self, record: int, leftovers: Any) -> bool:
        """Whether `write` has returned these leftovers for this record, as far as its code tells."""
        code = int(self._codes[record])
        if code & PICKLED:
            return code & ~FINAL == WRITTEN | PICKLED and type(leftovers) is Transition
        return bool(code & WRITTEN) and type(leftovers) is (dict if code & INFOS else NoneType)

    def has_leftovers(self, record: int) -> bool:
        """Whether anything is pickled."""
        return bool(int(self._codes[record]) & (PICKLED | INFOS))

    def read(self, record: int, leftovers: Leftovers | None) -> Transition:
        """The transition in a record, with `leftovers`, or the one that is all pickled. Lists are read-only.

        A header or a number that no writer writes is a `ValueError`, see `damaged`; so are leftovers that do not go
        with the record.
        """
        if not self.goes_with(record, leftovers):
            raise damaged(record)
        if isinstance(leftovers, Transition):
            return leftovers
        if self._codec is None:
            raise damaged(record)
        found = Transition(*self._codec.parts(record, self._copy))
        of_infos = leftovers or {"infos": found.infos, "reset_infos": found.reset_infos}
        return found._replace(infos=of_infos["infos"], reset_infos=of_infos.get("reset_infos") or {})

    def is_final(self, record: int) -> bool:
        """Whether a record has the end of one episode and the beginning of the next one."""
        return bool(int(self._codes[record]) & FINAL)

    def events_in(self, record: int) -> dict[AgentID, int]:
        """The events of the agents that have some, in a record that is not pickled."""
        bits = self.events[record].tolist()
        return {agent: of_agent for agent, of_agent in zip(self.agents, bits) if of_agent}

    def observed(self, record: int) -> dict[AgentID, Any]:
        """The observations in a record that is not pickled; arrays are views."""
        is_set = (self.presence[record] & BITS["observations"]).tolist()
        agents = [agent for agent, is_there in zip(self.agents, is_set) if is_there]
        return self._layout.observations.read(record, agents, False)


def dump_leftovers(leftovers: Leftovers) -> bytes:
    """Pickle leftovers; the error names the entry that does not pickle."""
    return dump_parts(leftovers, leftovers._asdict() if isinstance(leftovers, Transition) else leftovers)


def infos_alone(infos: dict[Any, Any], reset_infos: dict[Any, Any] | None, agents: Sequence[AgentID]) -> Leftovers:
    """The leftovers of a transition of which only infos are pickled."""
    leftovers = {"infos": in_order(infos, agents)}
    if reset_infos and not are_empty(reset_infos.values()):
        leftovers["reset_infos"] = in_order(reset_infos, agents)
    return leftovers


def conformed(
    declared: Mapping[AgentID, Space[Any]], values: Mapping[Any, Any], what: str, *, strict: bool = False
) -> dict[Any, Any]:
    """Values by agent, cast to their spaces, with copies of arrays; `what` they are is in the text of a `Mismatch`."""
    cast = {}
    for agent, value in values.items():
        try:
            cast[agent] = conform(declared[agent], value, strict=strict, copy=True) if agent in declared else value
        except Mismatch as error:
            raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error
    return cast


# -- slices of records, for workers that share no memory with the parent -----------------------------------------------

WITH_ACTIONS = frozenset({Message.STEP})
"""Requests that are sent with the actions that the parent has written."""
WITH_RESULTS = frozenset({Message.STEP, Message.RESET, Message.CONSTRUCT, Message.TAKE_OVER, Message.STATE})
"""Requests whose replies are sent with the results that the worker has written."""


class RecordOffsets(NamedTuple):
    """The offsets of records and their parts: the numbers of a `Layout` that `RecordSlices` needs."""

    num_records: int
    stride: int
    nbytes: int
    transition_header: int
    step_end: int

    @classmethod
    def of(cls, layout: Layout) -> RecordOffsets:
        return cls(*[getattr(layout, name) for name in cls._fields])


class RecordSlices:
    """Copies of the same part of several records, as arrays `(records, bytes)`.

    Parent and worker each have a block. One side sends slices of its block; the other writes them into its own block.
    """

    def __init__(self, layout: Layout | RecordOffsets, buffer: Any) -> None:
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
