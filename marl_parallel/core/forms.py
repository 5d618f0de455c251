"""Refuse flags and infos of a form that a transition does not have.

A list of flags is true whatever is in it, so it would end the episode in every step. These
checks run on the slow path only: on the fast path every flag is Python's own False.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np

from marl_parallel.adapters.protocol import Misfit, described

_FLAGS = frozenset({bool, np.bool_, int, np.int8, np.int64, np.uint8, float, type(None)})
_SEVERAL = (list, tuple, set, frozenset, np.ndarray)


def checked_flags(flags: dict[Any, Any], what: str) -> dict[Any, Any]:
    """The flags of a step, where each is one value; arrays of one element become the NumPy scalar they hold.

    Args:
        flags: By agent.
        what: Their name in messages.

    Raises:
        Misfit: A flag is a list, tuple, dict, text or an array of several elements.
    """
    if _FLAGS.issuperset(map(type, flags.values())):
        return flags
    return {agent: _one_flag(agent, flag, what) for agent, flag in flags.items()}


def check_infos(infos: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    """Refuse infos of agents that are sequences. What is under other keys may be anything.

    Raises:
        Misfit: There is one.
    """
    if any(isinstance(info, _SEVERAL) for info in infos.values()):
        for agent in agents:
            if isinstance(infos.get(agent), _SEVERAL):
                raise Misfit(
                    f"the info of agent {agent!r} must be a dict, got {described(infos[agent])}; "
                    'if these are the infos of several agents, pass adapter="tuple"'
                )


def _one_flag(agent: Any, flag: Any, what: str) -> Any:
    if isinstance(flag, np.ndarray) and flag.size == 1:
        return flag.reshape(())[()]
    shape = getattr(flag, "shape", None)
    if isinstance(flag, Sized) if shape is None else math.prod(shape) != 1:
        instead = 'adapter="dict"' if isinstance(flag, Mapping) else 'adapter="tuple"'
        raise Misfit(
            f"the {what} flag of agent {agent!r} must be True or False, got {described(flag)}; "
            f"if these are the flags of several agents, pass {instead}"
        )
    return flag
