"""Parts of records as arrays, for workers that share no memory with the parent: actions one way, results the other.

Each end has a block of its own, laid out alike. A parcel has the same part of several records in one contiguous array.
The layout of a record is in `columns.py`; the backend sends the parcels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Message
from marl_parallel.core.records import with_finals
from marl_parallel.core.sharing import span_of

WITH_ACTIONS = frozenset({Message.STEP})
"""Requests that are sent with the actions that the parent has written."""

WITH_RESULTS = frozenset({Message.STEP, Message.RESET, Message.REBUILD, Message.STATE})
"""Requests whose replies are sent with the results that the worker has written."""


class Parcels:
    """Copies parts of one end's block to parcels, and parcels to the block.

    Args:
        layout: Bound to the block or not.
        buffer: The block.
    """

    def __init__(self, layout: Layout, buffer: Any) -> None:
        shape = layout.num_records, layout.stride
        self._records: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, layout.nbytes).reshape(shape)
        self._layout = layout

    def actions(self, env_ids: Sequence[int]) -> NDArray[np.uint8]:
        """The actions of some records: `(records, bytes)`, a copy."""
        return self._taken(env_ids, 0, self._layout.transition_header)

    def put_actions(self, env_ids: Sequence[int], parcel: NDArray[np.uint8]) -> None:
        """Write what `actions` of the other end gave, for the same records."""
        self._put(env_ids, 0, parcel)

    def results(self, env_ids: Sequence[int], message: Message) -> NDArray[np.uint8]:
        """What a worker has written into some records: `(records, bytes)`, a copy.

        Args:
            env_ids: The records.
            message: What it was asked for.
        """
        head = self._layout.transition_header
        rows = _rows(env_ids)
        rare = message is Message.STATE or with_finals(self._records[rows, head : head + 8])
        return self._taken(env_ids, head, self._layout.stride if rare else self._layout.rare)

    def put_results(self, env_ids: Sequence[int], parcel: NDArray[np.uint8]) -> None:
        """Write what `results` of the other end gave, for the same records."""
        self._put(env_ids, self._layout.transition_header, parcel)

    def places(self, env_ids: range) -> tuple[int, int]:
        """Where the whole records of neighbours begin and end in a block, in bytes."""
        return env_ids.start * self._layout.stride, env_ids.stop * self._layout.stride

    def put_records(self, env_ids: Sequence[int], records: bytes) -> None:
        """Write what a worker has written into some records, from these whole records of its block."""
        whole = np.frombuffer(records, np.uint8).reshape(len(env_ids), self._layout.stride)
        self.put_results(env_ids, whole[:, self._layout.transition_header :])

    def _taken(self, env_ids: Sequence[int], start: int, stop: int) -> NDArray[np.uint8]:
        return np.array(self._records[_rows(env_ids), start:stop], order="C")

    def _put(self, env_ids: Sequence[int], start: int, parcel: NDArray[np.uint8]) -> None:
        self._records[_rows(env_ids), start : start + parcel.shape[1]] = parcel


def _rows(env_ids: Sequence[int]) -> slice | list[int]:
    span = span_of(env_ids)
    return [*env_ids] if span is None else slice(span.start, span.stop)
