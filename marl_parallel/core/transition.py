"""A transition: the dicts of one step of one environment, with copies and checks of them.

`env_runner.py` decides what a transition means; `records.py` transports it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from marl_parallel.adapters import AdapterMismatch
from marl_parallel.adapters.protocol import ALL as ALL
from marl_parallel.adapters.protocol import COMMON as COMMON
from marl_parallel.adapters.protocol import AgentID, Dicts, described
from marl_parallel.core.objects.pickling import dumps, in_order, loads
from marl_parallel.core.spaces import unreadable

FINAL_OBS, RESET_INFO = "final_obs", "reset_info"
"""The keys that an automatic reset adds to infos: the old episode's last observation, and the infos of the reset."""

EPISODE = "episode"
"""The key of episode statistics in infos, with `episode_stats`."""

ENDED, TOOK_PART, BEGAN, WAS_DEAD, WAS_ALIVE = 1, 2, 4, 8, 16
"""Events: bits that say what a transition means in the life of an agent. A life ends with the agent's own flag or with
the episode, and begins with an observation; with SAME_STEP, one life may end and the next one begin in one step."""

Values: TypeAlias = dict[Any, Any]
"""One of the five dicts."""


class Transition(NamedTuple):
    """The result of one reset or step of one environment.

    Attributes:
        observations: Observations by agent; after an automatic reset, those of the new episode.
        rewards: Rewards of the step, by agent.
        terminateds: Flags of the step, by agent and for `__all__`.
        truncateds: Flags of the step, by agent and for `__all__`.
        infos: Infos of the step, as the simulator returned them.
        alive: Agents seen in this episode that have not terminated or truncated, or have come back since.
        acting: The agents that act next; in the order of `possible_agents`, then as they came.
        final_observations: The old episode's last observations, if the new one has begun in the same step.
        reset_infos: The infos of that reset.
        events: The events of each agent that has some; None if all agents that are observed or rewarded go on.
        masks: The action masks that `MultiAgentEnv.masks` returns; None if they are in the block, or there are none.
    """

    observations: dict[AgentID, Any]
    rewards: dict[AgentID, Any]
    terminateds: Values
    truncateds: Values
    infos: Values
    alive: Sequence[AgentID]
    acting: Sequence[AgentID]
    final_observations: dict[AgentID, Any] | None = None
    reset_infos: Values | None = None
    events: dict[AgentID, int] | None = None
    masks: Mapping[AgentID, Any] | None = None


NOTHING = Transition({}, {}, {}, {}, {}, (), (), events={}, masks={})
"""Of an environment that has neither been reset nor stepped."""

Leftovers: TypeAlias = Transition | dict[str, Any]
"""What of a transition is pickled: all of it, or the dicts `infos` and `reset_infos` if the rest is in a record."""


def is_empty_info(info: Any) -> bool:
    """Whether an info is `{}`; `info == {}` fails for arrays, and is true for empty dicts of other types."""
    return type(info) is dict and not info


def are_empty(infos: Collection[Any]) -> bool:
    """Whether each of these infos is `{}`."""
    return all([type(info) is dict and not info for info in infos])  # noqa: C419  # half the price of a generator


def ordered(transition: Transition, agents: Sequence[AgentID]) -> Transition:
    """The same transition, with these agents first, in this order, in all dicts and lists."""
    return Transition(*[_ordered(values, agents) for values in transition])


def _ordered(values: Any, agents: Sequence[AgentID]) -> Any:
    if values is None:
        return None
    if isinstance(values, Mapping):
        return in_order(dict(values), agents)
    return [*in_order(dict.fromkeys(values), agents)]


# -- copies ------------------------------------------------------------------------------------------------------------

_NUMPY_SCALARS = (np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, *_NUMPY_SCALARS})


def copied_dicts(dicts: Dicts) -> Dicts:
    """Copies of the five dicts of a step, safe from later writes of the simulator.

    An object in several places has one copy. An object that cannot be copied or pickled stays as it is.
    """
    memo: dict[int, Any] = {}
    observations, rewards, terminateds, truncateds, infos = [_copied(part, memo) for part in dicts]
    return observations, rewards, terminateds, truncateds, infos


def _copied(values: Values, memo: dict[int, Any]) -> Values:
    try:
        # Like `copy.deepcopy`, which takes three times as long for simple values. Derived classes matter only in infos.
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
        AdapterMismatch: A flag is a sequence of flags, which would be true even if all of them are False.
        Unreadable: A flag cannot be read as true or false.
    """
    if _FLAG_TYPES.issuperset(map(type, flags.values())):
        return flags
    checked = {}
    for agent, flag in flags.items():
        try:
            shape = getattr(flag, "shape", None)
            are_several = isinstance(flag, Sized) if shape is None else math.prod(shape) != 1
            if not are_several:
                bool(flag)
        except Exception as error:
            raise unreadable(f"the {what} flag of agent {agent!r}", "True or False", flag, error) from error
        if are_several:
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
