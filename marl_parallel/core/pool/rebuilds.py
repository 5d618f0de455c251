"""Constructs environments again: with which seeds and options, and how often so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.messages import (
    Begins,
    BlockSettings,
    Construct,
    Construction,
    Failure,
    Message,
    Outputs,
    Refusal,
    Reply,
)
from marl_parallel.core.objects.pickling import dumps, loads
from marl_parallel.core.pool.extensions import Extension
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.replacement import Event
from marl_parallel.core.pool.settings import SettingsAtResets
from marl_parallel.core.pool.slots import Slot
from marl_parallel.core.worker.env_runner import merged_options
from marl_parallel.types import WorkerStats


@dataclass(slots=True, eq=False)
class _RebuildState:
    """The rebuilds and options of one environment."""

    count: int = 0  # how often it has been constructed again, for whatever reason
    restarts: Counter[str] = field(default_factory=Counter)  # after faults and on request, by `restart_kinds`
    remembered: dict[Any, Any] = field(default_factory=dict)  # options of resets, if the environment remembers them
    options: bytes | None = None  # pickled, from `set_options`: for every reset that passes none


class Rebuilds(Extension):
    """Makes the requests that construct environments again, and counts them.

    Args:
        pool: The pool.
        transitions: The environments' records.
        construction: How all environments were constructed, and other values that workers need.
        block: The payload of ATTACH.
        base_seed: Seeds are derived from it; None for no seeds.
        options_last: Whether environments remember the options of a reset.
        settings: The settings of the caller's process.

    Attributes:
        traced: Whether workers trace.
        outputs: The outputs of workers besides transitions.
        renewal: Returns a function that constructs successors of environments anew; None without recycling.
    """

    saved_as = "Rebuilds"

    def __init__(
        self,
        pool: Pool,
        transitions: BlockTransitions,
        construction: Construction,
        block: BlockSettings,
        base_seed: int | None,
        *,
        options_last: bool,
        settings: SettingsAtResets,
    ) -> None:
        self._pool, self._transitions, self._block, self._settings = pool, transitions, block, settings
        self.construction, self.base_seed, self._options_last = construction, base_seed, options_last
        self.traced, self.outputs = False, Outputs()
        self.renewal: Callable[[], Callable[[Sequence[int]], None] | None] = lambda: None
        self._records = [_RebuildState() for _ in pool.slots]

    def options(self, env_id: int) -> bytes | None:
        """The options of every reset of an environment that passes none, pickled; None if there are none."""
        return self._records[env_id].options

    def set_options(self, options: Mapping[int, bytes | None]) -> None:
        """Set the options of later resets, by environment."""
        for env_id, pickled in options.items():
            self._records[env_id].options = pickled

    def remember_replaced(self, options: Mapping[int, bytes | None]) -> None:
        """Note options that `set_options` has replaced: environments that remember options still have them."""
        for env_id, pickled in options.items() if self._options_last else ():
            record = self._records[env_id]
            record.remembered = merged_options(record.remembered, _unpickled(pickled))

    def merged_options(self, env_id: int, options: Mapping[Any, Any]) -> Any:
        """The options of a reset that passes these, merged over those of `set_options`.

        If the environment remembers options, earlier ones are merged, too: it may have been rebuilt.
        """
        record = self._records[env_id]
        earlier = record.remembered if self._options_last else None
        return merged_options(merged_options(earlier, _unpickled(record.options)), options)

    def remember_options(self, env_id: int, options: dict[Any, Any]) -> bool:
        """Store merged options, if the environment remembers them; returns whether they have changed."""
        if not self._options_last:
            return False
        record = self._records[env_id]
        before, record.remembered = record.remembered, options
        return dumps(options) != dumps(before)

    def count(self, env_id: int) -> int:
        """How often an environment has been constructed again, for whatever reason."""
        return self._records[env_id].count

    def add(self, env_id: int, kind: str | None = None) -> None:
        """Count a construction; `kind` is the kind of a restart, see `WorkerStats.restart_kinds`."""
        self._records[env_id].count += 1
        if kind is not None:
            self._records[env_id].restarts[kind] += 1

    def restarts(self, env_id: int) -> int:
        """How often an environment has been restarted."""
        return self._records[env_id].restarts.total()

    def request(self, env_id: int, count: int, begins: Begins, keywords: bytes | None = None) -> Construct:
        """The request to construct an environment again, for the `count`-th time.

        The pickled `keywords` are those of a reset of the caller's that was interrupted.
        """
        seed = None
        if self.base_seed is not None:
            source = np.random.SeedSequence((self.base_seed, env_id, count))
            seed = int(source.generate_state(1)[0] >> 1)
        positions = self.construction.positions or {}
        of_this = {env_id: positions[env_id]} if env_id in positions else None
        construction = self.construction._replace(
            traced=self.traced,
            constructors={env_id: self.construction.constructors[env_id]},
            seeds={env_id: seed},
            rebuilds=count,
            positions=of_this,
            settings=self._settings.present or self.construction.settings,
        )
        record = self._records[env_id]
        passed = {} if keywords is None else loads(keywords)
        if record.remembered and passed.get("options") is None:  # else they have been merged
            # If it resets at once, these count as passed; later, the `set_options` of that time is merged over them.
            options = record.remembered
            if begins is Begins.AT_ONCE:
                options = merged_options(options, _unpickled(record.options))
            keywords = dumps({**passed, "options": options})
        return Construct(construction, self._block, begins, keywords, self.outputs, record.options)

    def outdate(self, env_ids: Sequence[int]) -> None:
        """Let successors be constructed anew: the arguments of constructions have changed, such as the seeds."""
        renew = self.renewal()
        if renew is not None:
            renew(env_ids)

    def rebuild(self, env_ids: Sequence[int]) -> None:
        """Construct environments that are not in flight again, and count them as never reset."""
        payload = {}
        for env_id in env_ids:
            self._pool.slots[env_id].note(Event.REPLACED)
            self.add(env_id, "request")
            payload[env_id] = self.request(env_id, self.count(env_id), Begins.WITH_RESET)
        self._pool.announce_rebuild([self._pool.slots[env_id] for env_id in env_ids], [0] * len(payload))
        self._transitions.mark_constructed(env_ids)
        try:
            self._pool.execute(self._pool.requests(Message.CONSTRUCT, env_ids, payload, each=True), self._on_rebuilt)
        finally:
            if not self._pool.closed:
                self.outdate(env_ids)

    def _on_rebuilt(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        failures.update(refusals(reply))

    def save(self, slot: Slot) -> Any:
        record = self._records[slot.env_id]
        return record.count, dict(record.restarts), record.remembered, record.options

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        count, restarts, remembered, options = saved
        self._records[slot.env_id] = _RebuildState(count, Counter(restarts), remembered, options)

    def stats(self, env_ids: Sequence[int]) -> WorkerStats:
        kinds = sum([self._records[env_id].restarts for env_id in env_ids], Counter[str]())
        return WorkerStats(restarts=kinds.total(), restart_kinds=kinds)


def _unpickled(options: bytes | None) -> Any:
    return None if options is None else loads(options)


def refusals(reply: Reply) -> dict[int, Failure]:
    """The failures in the reply to a `CONSTRUCT`; an environment with other spaces counts as one."""
    refused = {
        env_id: Failure("constructor", result.text, result.text, None)
        for env_id, result in reply.results.items()
        if isinstance(result, Refusal)
    }
    return {**reply.failures, **refused}
