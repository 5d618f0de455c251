"""The two kinds of worker processes: from the fork server of Linux, and portable ones, as on macOS and Windows."""

from __future__ import annotations

from typing import Any

import pytest

START_METHODS = ["forkserver", "portable"]

also_portable = pytest.mark.usefixtures("start_method")
"""Runs a test with both kinds, if it makes its workers by a fixture that asks `chosen`."""


def chosen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of the `ParallelEnv` of a test: those of its start method, if it has one."""
    return arguments(request.getfixturevalue("start_method")) if "start_method" in request.fixturenames else {}


def arguments(start_method: str) -> dict[str, Any]:
    """The arguments of a `ParallelEnv` whose workers start in this way."""
    from marl_parallel.backends.spawn import PortableProcessBackend

    return {"backend": PortableProcessBackend()} if start_method == "portable" else {}
