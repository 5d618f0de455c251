"""Faults that `mutations.py` puts into the pool, one at a time."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: in a file of `marl_parallel/core`, one text in place of another that occurs there once."""

    name: str
    file: str
    before: str
    after: str
    blind: bool = False  # whether it was written without having read the simulation
    survives: str = ""  # why no history can find it, if so


MUTATIONS = [
    Mutation("a saved result is lost", "pool/restarts.py", "self._records[slot.env_id].saved = extras", "pass"),
]
