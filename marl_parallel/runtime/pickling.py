"""What travels pickled: the one way it is pickled, and the order in which it joins what lay in the block."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import cloudpickle

from marl_parallel.adapters.protocol import AgentID

Extras: TypeAlias = dict[str, Any]
"""What does not fit into a record, by the name of the dict it belongs to."""


def dumps(value: Any) -> bytes:
    """Pickle anything that pickles at all, classes and functions of a script included."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Plain pickle is several times faster, but knows nothing that was defined in a script or a function.
        return bytes(cloudpickle.dumps(value))


def sendable(value: Any, what: str) -> bytes:
    """Pickle something that the caller wants the workers to have.

    Raises:
        TypeError: It does not pickle; the text says what it is.
    """
    try:
        pickled = dumps(value)
        # Plain pickle refers to the caller's script, of which workers know only what came with the constructors.
        return bytes(cloudpickle.dumps(value)) if b"__main__" in pickled else pickled
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled, so the workers cannot be told: {error}") from error


def dump_extras(extras: Extras) -> bytes:
    """Pickle what did not fit into the block.

    Raises:
        TypeError: Something in it does not pickle; the text says what.
    """
    try:
        return dumps(extras)
    except Exception as error:
        raise TypeError(f"{_culprit(extras)} cannot be pickled: {error}") from error


def _culprit(extras: Extras) -> str:
    for part, values in extras.items():
        for key, value in values.items() if isinstance(values, Mapping) else [(part, values)]:
            try:
                dumps(value)
            except Exception:
                return f"the {part} entry of {key!r} ({value!r})"
    return "what the simulator returned"


def in_order(values: dict[Any, Any], possible_agents: Sequence[AgentID]) -> dict[Any, Any]:
    """The same entries: agents in the order of `possible_agents` first, then the rest as they came."""
    first = {agent: values[agent] for agent in possible_agents if agent in values}
    return first | {key: value for key, value in values.items() if key not in first}
