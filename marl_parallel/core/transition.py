"""A transition: the dicts of one step of one environment, with copies and checks of them.

Most transitions are *plain*: every agent is in every dict, alive and acting, and no flag is set. `PlainForm` recognises
them in the worker, and gives them a code from which all but the observations and rewards follow. What a transition
means is decided in `episode.py`; how it travels, in `records.py`.
"""

from __future__ import annotations

import copy
import marshal
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from marl_parallel.adapters import AdapterMismatch
from marl_parallel.adapters.protocol import ALL as ALL
from marl_parallel.adapters.protocol import COMMON as COMMON
from marl_parallel.adapters.protocol import AgentID, Dicts, described
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.spaces import is_vector

FINAL_OBS, RESET_INFO = "final_obs", "reset_info"
"""The keys that an automatic reset adds to infos: the old episode's last observation, and the infos of the reset."""

Values: TypeAlias = dict[Any, Any]
"""One of the five dicts."""


class Transition(NamedTuple):
    """The result of one reset or step of one environment.

    Attributes:
        observations: By agent: after an automatic reset, of the new episode.
        rewards: Of the step.
        terminateds: Of the step, with `__all__`, which may be missing if the transition is plain.
        truncateds: Of the step, likewise.
        infos: Of the step, as the simulator returned them.
        alive: Agents seen in this episode and neither terminated nor truncated yet.
        acting: The agents that act next; in the order of `possible_agents`, then as they came.
        code: The code of its header if it is plain, else 0; see `PlainForm`.
        final_observations: The old episode's last observations, if the new one has begun in the same step.
        reset_infos: The infos of that reset.
    """

    observations: dict[AgentID, Any]
    rewards: dict[AgentID, Any]
    terminateds: Values
    truncateds: Values
    infos: Values
    alive: Sequence[AgentID]
    acting: Sequence[AgentID]
    code: int = 0
    final_observations: dict[AgentID, Any] | None = None
    reset_infos: Values | None = None


def is_empty_info(info: Any) -> bool:
    """Whether an info is `{}`; `info == {}` fails for arrays, and is true for empty dicts of other types."""
    return type(info) is dict and not info


def are_empty(infos: Collection[Any]) -> bool:
    """Whether each of these infos is `{}`."""
    return all([type(info) is dict and not info for info in infos])  # noqa: C419  # half the price of a generator


# -- plain transitions -------------------------------------------------------------------------------------------------

PLAIN, INFOS, FINAL, VECTORS = 1, 2, 4, 8
"""Bits of a code: the transition is plain; extras travel pickled; final observations are in the block; plain rewards
are vectors. In plain transitions, the tag of the rewards and the code of the flags come above these."""
REWARD_SHIFT, FLAG_SHIFT = 8, 16

# The first of each is the most frequent; a reward is stored as a double, exactly, or travels pickled.
FLOATS: tuple[type, ...] = (float, np.float64, np.float32, np.float16)
"""The types of rewards that a double holds exactly, whatever the number."""
REWARD_TYPES: tuple[type, ...] = (
    *FLOATS, int, bool, np.bool_,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
VECTOR_TAG = len(REWARD_TYPES)
"""The tag of a reward that is a vector, in a column of its own."""
_REWARD_TAGS = {t: tag for tag, t in enumerate(REWARD_TYPES)}
_LARGEST_EXACT = 2**53

FLAGS: tuple[Any, ...] = (False, True, np.False_, np.True_)
"""By their codes; those that are true have odd ones."""
FALSE_CODES: dict[type, int] = {bool: 0, np.bool_: 2}
"""The codes of False, by type."""

_WITHOUT_REFERENCES = 2  # a version of the format: what is equal always marshals alike


def reward_tag(rewards: Collection[Any]) -> int | None:
    """The tag of the one type that all these numbers have; None if a double would not hold them exactly."""
    kinds = {*map(type, rewards)}
    tag = _REWARD_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
    if tag is None or tag < len(FLOATS):
        return tag
    return tag if min(rewards) >= -_LARGEST_EXACT and max(rewards) <= _LARGEST_EXACT else None


class PlainForm:
    """Recognises plain steps and resets, if all agents are alive and act.

    Each dict has every possible agent and nothing else, in order (`__all__` may come last in the flags, and infos may
    have anything); every flag is False, those of agents of one type; all rewards have one type, or all are vectors.

    Args:
        agents: All possible agents.
        vectors: Whether every agent declares a space of vector rewards.

    Example:
        >>> form = PlainForm(["a"])
        >>> form.code({"a": 0}, {"a": 1.5}, {"a": False}, {"a": False}, {"a": {}}) == PLAIN
        True
        >>> form.code({"a": 0}, {"a": 1.5}, {"a": True}, {"a": False}, {"a": {}})
        0
    """

    def __init__(self, agents: Sequence[AgentID], *, vectors: bool = False) -> None:
        self._agents, self._vectors = [*agents], vectors
        # By how many flags there are of a kind: the keys of all dicts but the infos; what flags and infos marshal to.
        self._forms: dict[int, tuple[list[Any], bytes]] = {}
        for flagged in [[*agents], [*agents, ALL]] if agents else []:
            empty: tuple[Any, ...] = (*[False] * 2 * len(flagged), *[{}] * len(agents))
            keys = [*agents, *agents, *flagged, *flagged]
            self._forms[len(flagged)] = keys, marshal.dumps(empty, _WITHOUT_REFERENCES)
        self._codes = {(t,) * len(agents): PLAIN | _REWARD_TAGS[t] << REWARD_SHIFT for t in FLOATS}

    def code(
        self, observations: Values, rewards: Values, terminateds: Values, truncateds: Values, infos: Values
    ) -> int:
        """The code of the header if the dicts are plain, else 0; `AdapterMismatch` if an agent's info is a sequence."""
        agents, count = self._agents, len(terminateds)
        keys, empty = self._forms.get(count, (None, b""))
        if [*observations, *rewards, *terminateds, *truncateds] != keys or count != len(truncateds):
            return 0
        try:
            # Marshalling is the quickest way to compare type and value of many things; nothing large gets there.
            if not any(infos.values()) and empty == marshal.dumps(
                (*terminateds.values(), *truncateds.values(), *infos.values()), _WITHOUT_REFERENCES
            ):
                code = self._codes.get((*map(type, rewards.values()),))
                if code is not None and [*infos] == agents:
                    return code
        except Exception:  # arrays and the like: they do not marshal, or have no truth value
            pass
        flags = [*terminateds.values(), *truncateds.values()]
        if count > len(agents) and (flags.pop() is not False or flags.pop(count - 1) is not False):
            return 0
        kinds = {*map(type, flags)}
        flag_code = FALSE_CODES.get(kinds.pop()) if len(kinds) == 1 else None
        if flag_code is None or any(flags):
            return 0
        tag, code = reward_tag(rewards.values()), PLAIN | flag_code << FLAG_SHIFT
        if tag is None:
            if not self._vectors or not all(map(is_vector, rewards.values())):
                return 0
            tag, code = VECTOR_TAG, code | VECTORS
        if [*infos] != agents or not are_empty(infos.values()):
            check_infos(infos, observations)
            code |= INFOS
        return code | tag << REWARD_SHIFT


# -- copies ------------------------------------------------------------------------------------------------------------

_NUMPY_SCALARS = (np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, *_NUMPY_SCALARS})


def copied_dicts(dicts: Dicts) -> Dicts:
    """The five dicts of a step in memory of their own, whatever the simulator does to its own afterwards.

    One object in several places is one in the copies, too; what can neither be copied nor pickled stays as it is.
    """
    memo: dict[int, Any] = {}
    observations, rewards, terminateds, truncateds, infos = [_copied(part, memo) for part in dicts]
    return observations, rewards, terminateds, truncateds, infos


def _copied(values: Values, memo: dict[int, Any]) -> Values:
    try:
        # As `copy.deepcopy`, which takes three times as long for simple values. A derived class matters in infos only.
        kinds = {*map(type, values.values())} if type(values) is dict else set()
        if kinds and kinds <= _IMMUTABLE:
            return {**values}
        if kinds == {np.ndarray}:
            return {key: memo.setdefault(id(array), array.__deepcopy__(memo)) for key, array in values.items()}
        if kinds == {dict} and not any(values.values()):
            return {key: memo.setdefault(id(empty), {}) for key, empty in values.items()}
        return copy.deepcopy(values, memo)
    except Exception:
        try:
            copied: Values = loads(dumps(values))
            return copied
        except Exception:  # sending it raises an error that names what does not pickle
            return values


# -- checks of transitions that are not plain --------------------------------------------------------------------------

_FLAG_TYPES = frozenset({bool, np.bool_, int, np.int8, np.int64, np.uint8, float, type(None)})
_SEVERAL = (list, tuple, set, frozenset, np.ndarray)


def checked_flags(flags: Values, what: str) -> Values:
    """The flags of a step, one value each; arrays of one element become the NumPy scalar they hold.

    Raises:
        AdapterMismatch: Several flags in place of one: a list is true whatever is in it, and would end every episode.
    """
    if _FLAG_TYPES.issuperset(map(type, flags.values())):
        return flags
    checked = {}
    for agent, flag in flags.items():
        shape = getattr(flag, "shape", None)
        if isinstance(flag, Sized) if shape is None else math.prod(shape) != 1:
            instead = 'adapter="dict"' if isinstance(flag, Mapping) else 'adapter="tuple"'
            raise AdapterMismatch(
                f"the {what} flag of agent {agent!r} must be True or False, got {described(flag)}; "
                f"if these are the flags of several agents, pass {instead}"
            )
        checked[agent] = flag.reshape(())[()] if isinstance(flag, np.ndarray) else flag
    return checked


def check_infos(infos: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    """Raise `AdapterMismatch` if the info of an agent is a sequence. Other keys may have any value."""
    if any(isinstance(info, _SEVERAL) for info in infos.values()):
        for agent in agents:
            if isinstance(infos.get(agent), _SEVERAL):
                raise AdapterMismatch(
                    f"the info of agent {agent!r} must be a dict, got {described(infos[agent])}; "
                    'if these are the infos of several agents, pass adapter="tuple"'
                )
