"""The ways in which worker processes start."""

from __future__ import annotations

from typing import Any

CONTEXTS = ["forkserver", "spawn", "fork"]
WAYS = [*CONTEXTS, "portable"]


def arguments(way: str) -> dict[str, Any]:
    """What asks a `ParallelEnv` for workers that start in this way."""
    from marl_parallel.backends.spawn import PortableProcessBackend

    return {"backend": PortableProcessBackend()} if way == "portable" else {"context": way}
