"""A transition as it is told: the dicts of one step of one environment, what is usual about them, and how to keep them.

What a transition means is decided in `episode.py`; how it travels is the business of `records.py`.
"""

from __future__ import annotations

import copy
import marshal
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_parallel.adapters.protocol import ALL as ALL
from marl_parallel.adapters.protocol import COMMON as COMMON
from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.pickling import dumps, loads

FINAL_OBS, RESET_INFO = "final_obs", "reset_info"
"""What an automatic reset adds to infos: the old episode's last observation, and what the reset itself has said."""

FLOATS: tuple[type, ...] = (float, np.float64, np.float32, np.float16)
"""The types of rewards that a double holds exactly, whatever the number."""

_NUMPY_SCALARS = (np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, *_NUMPY_SCALARS})
_WITHOUT_REFERENCES = 2  # a version of the format: what is equal always marshals alike


class Transition(NamedTuple):
    """What one reset or step of one environment has to say.

    Attributes:
        observations: What each agent sees now: after an automatic reset, of the new episode.
        rewards: Of the step.
        terminateds: Of the step, with `__all__`, which may be missing where the transition is a usual one.
        truncateds: Of the step, likewise.
        infos: Of the step, as the simulator gave them.
        alive: Agents seen in this episode and neither terminated nor truncated yet.
        acting: Those of them who should act next; in the order of `possible_agents`, then as they came.
        usual: Where it is a usual one, the type of all rewards; see `Usual`.
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
    usual: type | None = None
    final_observations: dict[AgentID, Any] | None = None
    reset_infos: dict[Any, Any] | None = None


class Usual:
    """What steps are like most of the time, told apart from all others with as little work as can be.

    Each dict has every possible agent and nothing else, in order (`__all__` may come last in the flags); every flag
    is Python's own False; every reward is a float of the same type; every info is `{}`.

    Args:
        agents: All that may appear.

    Example:
        >>> usual = Usual(["a"])
        >>> usual.reward_type({"a": 0}, {"a": 1.5}, {"a": False}, {"a": False}, {"a": {}})
        <class 'float'>
        >>> usual.reward_type({"a": 0}, {"a": 1.5}, {"a": True}, {"a": False}, {"a": {}}) is None
        True
    """

    def __init__(self, agents: Sequence[AgentID]) -> None:
        # By how many flags there are of a kind: all keys, and what the flags and infos marshal to.
        self._forms: dict[int, tuple[list[Any], bytes]] = {}
        for flagged in [[*agents], [*agents, ALL]] if agents else []:
            keys = [*agents, *agents, *flagged, *flagged, *agents]
            rest: tuple[Any, ...] = (*[False] * 2 * len(flagged), *[{}] * len(agents))
            self._forms[len(flagged)] = keys, marshal.dumps(rest, _WITHOUT_REFERENCES)
        self._kinds: dict[tuple[type, ...], type] = {(kind,) * len(agents): kind for kind in FLOATS}

    def reward_type(
        self,
        observations: dict[Any, Any],
        rewards: dict[Any, Any],
        terminateds: dict[Any, Any],
        truncateds: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> type | None:
        """The type of the rewards where everything is as usual, None where anything is not."""
        form = self._forms.get(len(terminateds))
        if form is None or len(truncateds) != len(terminateds):
            return None
        if [*observations, *rewards, *terminateds, *truncateds, *infos] != form[0]:
            return None
        try:
            # Marshalling is the quickest way to compare type and value of many things; what is large never gets there.
            as_usual = not any(infos.values()) and form[1] == marshal.dumps(
                (*terminateds.values(), *truncateds.values(), *infos.values()), _WITHOUT_REFERENCES
            )
        except Exception:  # arrays and the like: they do not marshal, or will not say whether they are true
            return None
        return self._kinds.get((*map(type, rewards.values()),)) if as_usual else None


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
        # Infos are the only part of which the type is told, too.
        return _copied(values, memo) if type(values) is dict else copy.deepcopy(values, memo)
    except Exception:
        try:
            return loads(dumps(values))
        except Exception:  # that is told when it is to be sent
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
