"""Start methods of worker processes."""

from __future__ import annotations

import os
from typing import Any

CONTEXTS = ["forkserver", "spawn", "fork"]
START_METHODS = [*CONTEXTS, "portable"]
PORTABLE = os.environ.get("MARL_PARALLEL_PORTABLE") == "1"
REFUSED = {"forkserver", "fork"} if PORTABLE else set()
"""The contexts that the portable processes do not have: tests of these are left out."""


def arguments(start_method: str) -> dict[str, Any]:
    """The arguments of a `ParallelEnv` whose workers start in this way."""
    from marl_parallel.backends.spawn import PortableProcessBackend

    return {"backend": PortableProcessBackend()} if start_method == "portable" else {"context": start_method}
