"""Start methods of worker processes."""

from __future__ import annotations

from typing import Any

CONTEXTS = ["forkserver", "spawn", "fork"]
START_METHODS = [*CONTEXTS, "portable"]


def arguments(start_method: str) -> dict[str, Any]:
    """The arguments of a `ParallelEnv` whose workers start in this way."""
    from marl_parallel.backends.spawn import PortableProcessBackend

    return {"backend": PortableProcessBackend()} if start_method == "portable" else {"context": start_method}
