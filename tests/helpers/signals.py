"""Signals that not every system has."""

from __future__ import annotations

import signal


def number_of(name: str) -> int:
    """The number of a signal, or that of SIGTERM where the system has no such signal."""
    return getattr(signal, name, signal.SIGTERM)


SIGKILL = number_of("SIGKILL")
