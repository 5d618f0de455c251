"""Which names agents may have: all different, and none of the keys that stand for the whole environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from marl_parallel.adapters.protocol import ALL, COMMON

_RESERVED = {
    ALL: "the key of the flags of the whole episode",
    COMMON: "the key of the infos of the whole environment",
}


class InvalidAgents(ValueError):
    """Agents that cannot be told apart from each other, or from the environment."""


def check_agents(agents: Iterable[Any], kind: str) -> None:
    """Refuse names of agents that an environment declares.

    Args:
        agents: All of them.
        kind: What declares them, for the error.

    Raises:
        InvalidAgents: Two are equal, one is a reserved key, or one cannot be the key of a dict.

    Example:
        >>> check_agents(["a", "b"], "A dict environment")
        >>> check_agents([True, 1], "A dict environment")
        Traceback (most recent call last):
        ...
        marl_parallel.adapters.agents.InvalidAgents: A dict environment declares agents 0 and 1 as True and 1, which \
are the same key in a dict: every agent needs a name of its own in possible_agents
    """
    place_of: dict[Any, tuple[int, Any]] = {}
    for place, agent in enumerate(agents):
        try:
            first, earlier = place_of.setdefault(agent, (place, agent))
        except TypeError:
            raise InvalidAgents(
                f"{kind} declares agent {place} as {agent!r}, which cannot be the key of a dict: agents are named by "
                "strings, numbers or tuples of them"
            ) from None
        if first != place:
            raise InvalidAgents(
                f"{kind} declares agents {first} and {place} as {earlier!r} and {agent!r}, which are the same key in a "
                "dict: every agent needs a name of its own in possible_agents"
            )
    for key, meaning in _RESERVED.items():
        if key in place_of:
            raise InvalidAgents(f"{kind} declares an agent named {key!r}, which is {meaning}: rename the agent")


def refuse_reserved(method: str, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> NoReturn:
    """Refuse an agent that appears in an episode under a reserved key.

    Args:
        method: What returned it.
        observations: What it returned.
        rewards: Likewise.

    Raises:
        InvalidAgents: In any case; the text says where the key is.
    """
    key = next((key for key in _RESERVED if key in observations), ALL)
    what = "an observation" if key in observations else "a reward"
    raise InvalidAgents(
        f"`{method}` returned {what} of an agent named {key!r}, which is {_RESERVED[key]}: rename the agent, or leave "
        "the entry out"
    )
