"""The compiled code (`compiled/`): the fast path of records, for a layout, memory of large arrays, and waiting between
processes.

Without a compiler the package is built without this code, and `MARL_PARALLEL_PURE=1` turns it off. Then Python reads
and writes records one by one, and waits. Both ways pass the same tests; infos travel in the block only with compiled
code.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.core.block import records
from marl_parallel.core.block.columns import NUMBER_TYPES, AgentColumns, Layout
from marl_parallel.core.transition import ALL
from marl_parallel.core.worker_status import Activity

try:
    if os.environ.get("MARL_PARALLEL_PURE") == "1":
        raise ImportError
    from marl_parallel.core import _codec  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    _codec = None

Codec = getattr(_codec, "Codec", None)
try_for = getattr(_codec, "try_for", None)
"""`try_for(address, seconds)` tries to take a semaphore for some seconds; None without compiled code or Linux."""
exchange = getattr(_codec, "exchange", None)
"""Sends a code to each worker of `process.py` and waits for their codes; None if `try_for` is None."""

_keep = getattr(_codec, "keep", None)

codec = "python" if Codec is None else "c"
"""The language of the code in use: "c" or "python"."""


def open_codec(
    layout: Layout,
    buffer: Any,
    *,
    infos_in_block: bool,
    totals: Any = None,
    in_infos: bool = False,
    same_step: bool = False,
    moment: Any = None,
) -> Any:
    """The `Codec` of a layout that is bound to the buffer; None without compiled code or agents.

    It adds the transitions that it reads to `totals` of `EpisodeStatistics`. With `in_infos`, it leaves transitions in
    which agents end to Python. With `same_step`, the next episode begins in the step that ends one. It reads the time
    from `moment`, a float64 array of one number; for None, from the system's monotonic clock.
    """
    if Codec is None or not layout.agents:
        return None

    def forms(columns: AgentColumns) -> Any:
        return columns.forms if columns.agents == layout.agents else None

    block = np.frombuffer(buffer, np.uint8, layout.nbytes)
    headers = layout.action_header, layout.transition_header
    types = NUMBER_TYPES, records.REWARD_TYPES, len(records.FLOATS), np.False_, np.True_
    vectors = dict(zip(layout.rewards.agents, layout.rewards.forms))
    columns = (
        forms(layout.actions), forms(layout.observations), forms(layout.final_observations),
        tuple([vectors.get(agent) for agent in layout.agents]),
    )  # fmt: skip
    infos = layout.infos, layout.infos_nbytes if infos_in_block else 0
    agents, step = tuple(layout.agents), int(Activity.STEP)
    no_flags, no_np_flags = ({**dict.fromkeys(agents, false), ALL: False} for false in (False, np.False_))
    dicts = dict.fromkeys(agents), no_flags, no_np_flags, {ALL: False}  # copied for each environment
    return Codec(
        block, layout.stride, agents, ALL, headers, columns, types, dicts, step, infos, totals, in_infos, same_step,
        moment,
    )  # fmt: skip


class LargeArrays:
    """While this object lives, the memory of two unused copies of each large array is kept for reuse."""

    def add(self, array: NDArray[Any]) -> None:
        if _keep is not None and array.nbytes >= _codec.LARGE:
            _keep(array.nbytes, 2)
            weakref.finalize(self, _keep, array.nbytes, -2)
