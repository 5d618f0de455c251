"""The two kinds of worker processes: from the fork server of Linux, and portable ones, as on macOS and Windows."""

from __future__ import annotations

import os
from typing import Any

START_METHODS = ["forkserver", "portable"]
PORTABLE = os.environ.get("MARL_PARALLEL_PORTABLE") == "1"
REFUSED = {"forkserver"} if PORTABLE else set()
"""The tests of these are left out."""


def arguments(start_method: str) -> dict[str, Any]:
    """The arguments of a `ParallelEnv` whose workers start in this way."""
    from marl_parallel.backends.spawn import PortableProcessBackend

    return {"backend": PortableProcessBackend()} if start_method == "portable" else {}
