"""A transition: the dicts of one step of one environment, their usual form, checks of their form, and copies of them.

By far the most frequent is the *usual form*: every agent is in every dict, alive and acting, and no flag is set.
`UsualForm` recognises it in the worker, and gives it a code from which all but the observations and rewards follow.
What a transition means is decided in `episode.py`; how it travels, in `records.py`.
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
        terminateds: Of the step, with `__all__`, which may be missing where the transition is of the usual form.
        truncateds: Of the step, likewise.
        infos: Of the step, as the simulator gave them.
        alive: Agents seen in this episode and neither terminated nor truncated yet.
        acting: Those of them who should act next; in the order of `possible_agents`, then as they came.
        usual: Where it is of the usual form, the code of its header, else 0; see `UsualForm`.
        final_observations: The old episode's last observations, where the new one has begun in the same step.
        reset_infos: The infos of that reset.
    """

    observations: dict[AgentID, Any]
    rewards: dict[AgentID, Any]
    terminateds: Values
    truncateds: Values
    infos: Values
    alive: Sequence[AgentID]
    acting: Sequence[AgentID]
    usual: int = 0
    final_observations: dict[AgentID, Any] | None = None
    reset_infos: Values | None = None


def is_empty_info(info: Any) -> bool:
    """Whether an info is `{}` and nothing else; comparing would trip over arrays and take other empty things for it."""
    return type(info) is dict and not info


# -- the usual form ----------------------------------------------------------------------------------------------------

USUAL, INFOS, FINAL, VECTORS = 1, 2, 4, 8
"""Bits of a code: the usual form; infos that are not empty travel pickled; final observations are in the block; rewards
of the usual form are vectors. The tag of the rewards and the code of the flags of the usual form come above these."""
REWARD_SHIFT, FLAG_SHIFT = 8, 16

# The first of each is what simulators give most; a reward is kept as a double, exactly, or travels pickled.
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
    """The tag of the one type that all these numbers have; None where a double would not hold them exactly."""
    kinds = {*map(type, rewards)}
    tag = _REWARD_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
    if tag is None or tag < len(FLOATS):
        return tag
    return tag if min(rewards) >= -_LARGEST_EXACT and max(rewards) <= _LARGEST_EXACT else None


class UsualForm:
    """Recognises the usual form of a step or reset, if all agents are alive and act.

    Each dict has every possible agent and nothing else, in order (`__all__` may come last in the flags, and infos may
    have anything); every flag is False, those of agents of one type; all rewards have one type, or all are vectors.

    Args:
        agents: All possible agents.
        vectors: Whether every agent declares a space of vector rewards.

    Example:
        >>> form = UsualForm(["a"])
        >>> form.code({"a": 0}, {"a": 1.5}, {"a": False}, {"a": False}, {"a": {}}) == USUAL
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
        self._codes = {(t,) * len(agents): USUAL | _REWARD_TAGS[t] << REWARD_SHIFT for t in FLOATS}

    def code(
        self, observations: Values, rewards: Values, terminateds: Values, truncateds: Values, infos: Values
    ) -> int:
        """The code of the header if the form is usual, else 0; `AdapterMismatch` if an agent's info is a sequence."""
        agents, count = self._agents, len(terminateds)
        keys, empty = self._forms.get(count, (None, b""))
        if [*observations, *rewards, *terminateds, *truncateds] != keys or count != len(truncateds):
            return 0
        try:
            # Marshalling is the quickest way to compare type and value of many things; nothing large gets there.
            if not any(infos.values()) and empty == marshal.dumps(
                (*terminateds.values(), *truncateds.values(), *infos.values()), _WITHOUT_REFERENCES
            ):
                known = self._codes.get((*map(type, rewards.values()),))
                if known is not None and [*infos] == agents:
                    return known
        except Exception:  # arrays and the like: they do not marshal, or will not say whether they are true
            pass
        flags = [*terminateds.values(), *truncateds.values()]
        if count > len(agents) and (flags.pop() is not False or flags.pop(count - 1) is not False):
            return 0
        kinds = {*map(type, flags)}
        flag_code = FALSE_CODES.get(kinds.pop()) if len(kinds) == 1 else None
        if flag_code is None or any(flags):
            return 0
        tag, code = reward_tag(rewards.values()), USUAL | flag_code << FLAG_SHIFT
        if tag is None:
            if not self._vectors or not all(map(is_vector, rewards.values())):
                return 0
            tag, code = VECTOR_TAG, code | VECTORS
        if [*infos] != agents or {*map(type, infos.values())} != {dict} or any(infos.values()):
            check_infos(infos, observations)
            code |= INFOS
        return code | tag << REWARD_SHIFT


# -- copies ------------------------------------------------------------------------------------------------------------

_NUMPY_SCALARS = (np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, *_NUMPY_SCALARS})


def kept(dicts: Dicts) -> Dicts:
    """The five dicts of a step in memory of our own, whatever the simulator does to its own afterwards.

    One object in several places is one in the copies, too; what can neither be copied nor pickled stays as it is.
    """
    memo: dict[int, Any] = {}
    observations, rewards, terminateds, truncateds, infos = [_own(part, memo) for part in dicts]
    return observations, rewards, terminateds, truncateds, infos


def _own(values: Any, memo: dict[int, Any]) -> Any:
    try:
        # Infos are the only part whose type matters, too.
        return _copied(values, memo) if type(values) is dict else copy.deepcopy(values, memo)
    except Exception:
        try:
            return loads(dumps(values))
        except Exception:  # sending it raises an error that says what does not pickle
            return values


def _copied(values: Values, memo: dict[int, Any]) -> Values:
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


def checked_flags(flags: Values, what: str) -> Values:
    """The flags of a step, where each is one value; arrays of one element become the NumPy scalar they hold.

    Several flags in place of one are an `AdapterMismatch`: a list is always true, and would end every episode.
    """
    if _FLAG_TYPES.issuperset(map(type, flags.values())):
        return flags
    return {agent: _one_flag(agent, flag, what) for agent, flag in flags.items()}


def _one_flag(agent: Any, flag: Any, what: str) -> Any:
    if isinstance(flag, np.ndarray) and flag.size == 1:
        return flag.reshape(())[()]
    shape = getattr(flag, "shape", None)
    if isinstance(flag, Sized) if shape is None else math.prod(shape) != 1:
        instead = 'adapter="dict"' if isinstance(flag, Mapping) else 'adapter="tuple"'
        raise AdapterMismatch(
            f"the {what} flag of agent {agent!r} must be True or False, got {described(flag)}; "
            f"if these are the flags of several agents, pass {instead}"
        )
    return flag


def check_infos(infos: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    """Raise `AdapterMismatch` if the info of an agent is a sequence. What is under other keys may be anything."""
    if any(isinstance(info, _SEVERAL) for info in infos.values()):
        for agent in agents:
            if isinstance(infos.get(agent), _SEVERAL):
                raise AdapterMismatch(
                    f"the info of agent {agent!r} must be a dict, got {described(infos[agent])}; "
                    'if these are the infos of several agents, pass adapter="tuple"'
                )
