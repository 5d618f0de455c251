"""Actions in and out of an environment's record, with what does not fit in there pickled beside it.

The parent writes, the worker reads. Whose actions are taken is decided in `batch.py`.

The head, in bytes, for n agents whose actions lie in the block: form 1 | present n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.core.builders import dict_of, dicts_of
from marl_parallel.core.columns import Column, Unfit, over_records
from marl_parallel.core.layout import Layout
from marl_parallel.core.pickling import Extras, in_order
from marl_parallel.core.values import Mismatch, conform_action

_ALL_IN_ORDER, _SOME = 1, 2
_ALL = bytes((_ALL_IN_ORDER,))


class ActionRecords:
    """Actions, in the records of all environments.

    Args:
        layout: Bound to the block.
        buffer: The block.
    """

    def __init__(self, layout: Layout, buffer: Any) -> None:
        self._layout, self._columns = layout, layout.actions
        self._heads = [start + layout.action_head for start in layout.starts]
        self._agents, self._whole = self._columns.agents, self._columns.whole
        self._dict_of, self._dicts_of = dict_of(self._agents), dicts_of(self._agents)
        self._complete = bool(self._agents) and self._agents == layout.agents
        self._position = {agent: place for place, agent in enumerate(self._agents)}
        self._buffer = memoryview(buffer)
        self._forms = over_records(buffer, layout.starts, layout.action_head, np.uint8, ())
        self._present = over_records(buffer, layout.starts, layout.action_head + 1, np.bool_, (len(self._agents),))

    def write_span(self, span: range, actions: Sequence[Mapping[Any, Any]]) -> bool:
        """Write the actions of neighbouring records at once; says whether it could, else each wants a `write`.

        Args:
            span: The records.
            actions: Of each, the actions of all possible agents, in their order.
        """
        if not self._complete:
            return False
        try:
            self._whole.write_span(span, [*chain.from_iterable([given.values() for given in actions])])
        except (Unfit, Mismatch):
            return False  # at least one is special: one by one finds which
        self._forms[span.start : span.stop] = _ALL_IN_ORDER
        return True

    def write_stacked(self, actions: Mapping[Any, Any], wanted: NDArray[np.bool_] | None) -> None:
        """Write the actions of all records at once; only where all agents have a column.

        Args:
            actions: By agent, of all records, stacked.
            wanted: `(records, agents)`: which of them count; None for all.

        Raises:
            Mismatch: Some are not what their agent's space declares; the text says whose. Nothing counts as written.
        """
        self._columns.write_stacked(actions)
        self._note_stacked(wanted)

    def write_rows(
        self, rows: Iterable[tuple[Sequence[Any], Column, slice, Any]], wanted: NDArray[np.bool_] | None
    ) -> None:
        """As `write_stacked`, of several agents at a time.

        Args:
            rows: Agents, where they lie, and their actions of all records, stacked `(records, agents, ...)`.
            wanted: As there.
        """
        for agents, column, span, values in rows:
            try:
                column.write_stacked(span, values)
            except Mismatch as error:
                raise Mismatch(f"the actions of agents {[*agents]}: {error}") from error
        self._note_stacked(wanted)

    def _note_stacked(self, wanted: NDArray[np.bool_] | None) -> None:
        if wanted is None:
            self._forms[...] = _ALL_IN_ORDER
        else:
            self._present[...] = wanted
            self._forms[...] = _SOME

    def write(self, record: int, actions: Mapping[Any, Any]) -> Extras | None:
        """Write what fits; returns the rest, to be pickled.

        Raises:
            Mismatch: An action is not what its space declares; the text says whose. Nothing that matters was
                overwritten: the record counts only once the worker is told to step.
        """
        head, buffer = self._heads[record], self._buffer
        if self._agents and [*actions] == self._agents:
            try:
                self._whole.write_all(record, [*actions.values()])
                buffer[head] = _ALL_IN_ORDER
                return None
            except (Unfit, Mismatch):
                pass  # at least one is special: one by one finds which
        extras: Extras = {}
        present = bytearray(len(self._agents))
        for agent, action in actions.items():
            try:
                if not self._write_one(record, agent, action):
                    space = self._layout.schema.action_spaces.get(agent)
                    extras[agent] = action if space is None else conform_action(space, action)
                    continue
                present[self._position[agent]] = 1
            except Mismatch as error:
                raise Mismatch(f"the action of agent {agent!r}: {error}") from error
        buffer[head : head + 1 + len(present)] = bytes((_SOME,)) + present
        return extras or None

    def _write_one(self, record: int, agent: Any, action: Any) -> bool:
        """Write one agent's action; says whether it fits."""
        try:
            if agent in self._columns:
                self._columns.write(record, agent, action)
                return True
        except Unfit:
            pass  # of the declared space, but of another form: pickled
        return False

    def read_span(self, span: range) -> list[dict[Any, Any]]:
        """The actions of neighbouring records, of which none has anything pickled beside it; as `read`."""
        if not self._complete or self._forms[span.start : span.stop].tobytes() != _ALL * len(span):
            return [self.read(record, None) for record in span]
        return self._dicts_of(zip(*[iter(self._whole.read_span(span, True))] * len(self._agents)))

    def read(self, record: int, extras: Extras | None) -> dict[Any, Any]:
        """The actions, arrays in memory of their own."""
        head = self._heads[record]
        if self._buffer[head] == _ALL_IN_ORDER:
            return self._dict_of(*self._whole.read_all(record, True))
        present = self._buffer[head + 1 : head + 1 + len(self._agents)]
        actions: dict[Any, Any] = {
            agent: self._columns.read(record, agent, True)
            for agent, there in zip(self._agents, present, strict=True)
            if there
        }
        return in_order(actions | extras, self._layout.schema.possible_agents) if extras else actions
