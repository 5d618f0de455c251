"""Who steps environments over many calls: a `Rollout`, or an evaluation. Guards of calls are free between two steps."""

from __future__ import annotations

import threading
import weakref

from marl_parallel.stepper import Batch

_owners: weakref.WeakKeyDictionary[Batch, weakref.ref[object]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def claim(batch: Batch, owner: object, *replaceable: type) -> object:
    """Make `owner` the one that steps, for as long as it lives or until `release`.

    Returns None; or the present owner, which stays unless it is of one of the `replaceable` types.
    """
    with _lock:
        present = _owners[batch]() if batch in _owners else None
        if present is not None and not isinstance(present, replaceable):
            return present
        _owners[batch] = weakref.ref(owner)
        return None


def release(batch: Batch, owner: object) -> None:
    """Let others step, if `owner` is the one that steps."""
    with _lock:
        if batch in _owners and _owners[batch]() is owner:
            del _owners[batch]
