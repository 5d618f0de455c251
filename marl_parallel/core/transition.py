"""A transition: the dicts of one step of one environment, checks of their form, and copies of them.

What a transition means is decided in `episode.py`; how it travels, in `records.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from marl_parallel.adapters import Misfit
from marl_parallel.adapters.protocol import ALL as ALL
from marl_parallel.adapters.protocol import COMMON as COMMON
from marl_parallel.adapters.protocol import AgentID, Dicts, described
from marl_parallel.core.pickling import dumps, loads

FINAL_OBS, RESET_INFO = "final_obs", "reset_info"
"""The keys that an automatic reset adds to infos: the old episode's last observation, and the infos of the reset."""

_NUMPY_SCALARS = (np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, *_NUMPY_SCALARS})


class Transition(NamedTuple):
    """The result of one reset or step of one environment.

    Attributes:
        observations: By agent: after an automatic reset, of the new episode.
        rewards: Of the step.
        terminateds: Of the step, with `__all__`, which may be missing where the transition is of the usual form.
        truncateds: Of the step, likewise.
        infos: Of the step, as the simulator gave them.
        alive: Agents seen in this episode and neither terminated nor truncated yet.
        acting: Those of them who should act next; in the order of `possible_agents`, then as they came.
        usual: Where it is of the usual form, the code of its header, else 0; see `header.UsualForm`.
        final_observations: The old episode's last observations, where the new one has begun in the same step.
        reset_infos: The infos of that reset.
    """

    observations: dict[AgentID, Any]
    rewards: dict[AgentID, Any]
    terminateds: dict[Any, Any]
    truncateds: dict[Any, Any]
    infos: dict[Any, Any]
    alive: Sequence[AgentID]
    acting: Sequence[AgentID]
    usual: int = 0
    final_observations: dict[AgentID, Any] | None = None
    reset_infos: dict[Any, Any] | None = None


def is_empty_info(info: Any) -> bool:
    """Whether an info is `{}` and nothing else; comparing would trip over arrays and take other empty things for it."""
    return type(info) is dict and not info


def kept(dicts: Dicts) -> Dicts:
    """The five dicts of a step in memory of our own, whatever the simulator does to its own afterwards.

    What is one object in several places is one in the copies, too; what can neither be copied nor pickled stays as it
    is.

    Example:
        >>> seen = np.zeros(2)
        >>> (ours, *_) = kept(({"a": seen, "b": seen}, {}, {}, {}, {}))
        >>> ours["a"] is seen, ours["a"] is ours["b"]
        (False, True)
    """
    *others, infos = dicts
    memo: dict[int, Any] = {}
    observations, rewards, terminateds, truncateds = [_own(part, memo) for part in others]
    return observations, rewards, terminateds, truncateds, _own(infos, memo)


def _own(values: Any, memo: dict[int, Any]) -> Any:
    try:
        # Infos are the only part whose type matters, too.
        return _copied(values, memo) if type(values) is dict else copy.deepcopy(values, memo)
    except Exception:
        try:
            return loads(dumps(values))
        except Exception:  # sending it raises an error that says what does not pickle
            return values


def _copied(values: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """What `copy.deepcopy` makes of a dict, at a third of its price where what is in it is plain."""
    kinds = {*map(type, values.values())}
    if kinds <= _IMMUTABLE:
        return {**values}
    if kinds == {np.ndarray}:
        return {key: memo.setdefault(id(array), array.__deepcopy__(memo)) for key, array in values.items()}
    if kinds == {dict} and not any(values.values()):
        return {key: memo.setdefault(id(empty), {}) for key, empty in values.items()}
    return copy.deepcopy(values, memo)


# -- checks, which run where the form is not the usual one: there, every flag is False ---------------------------------

_FLAG_TYPES = frozenset({bool, np.bool_, int, np.int8, np.int64, np.uint8, float, type(None)})
_SEVERAL = (list, tuple, set, frozenset, np.ndarray)


def checked_flags(flags: dict[Any, Any], what: str) -> dict[Any, Any]:
    """The flags of a step, where each is one value; arrays of one element become the NumPy scalar they hold.

    A list of flags is true whatever is in it, so that it would end the episode in every step.

    Args:
        flags: By agent.
        what: Their name in messages.

    Raises:
        Misfit: A flag is a list, tuple, dict, text or an array of several elements.
    """
    if _FLAG_TYPES.issuperset(map(type, flags.values())):
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
