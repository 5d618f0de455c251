"""Whether environments are alike: their agents and spaces compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import Space, spaces

from marl_parallel.adapters import Schema
from marl_parallel.core.large_spaces import equal


def common_schema(described: Sequence[Schema]) -> Schema:
    """What all environments have in common.

    Raises:
        ValueError: They differ; the text says which, in what, for which agent.
    """
    first = described[0]
    for env_id, other in enumerate(described):
        if other is first:  # also where several environments gave the same description
            continue
        if other.rules is not first.rules:
            _differ(env_id, "rules", other.rules.value, first.rules.value)
        if other.possible_agents != first.possible_agents:
            _differ(env_id, "possible_agents", other.possible_agents, first.possible_agents)
        for kind in ("observation", "action", "reward"):
            ours, theirs = (getattr(d, f"{kind}_spaces") for d in (first, other))
            for agent in dict.fromkeys([*ours, *theirs]):
                if not _same(ours.get(agent), theirs.get(agent)):
                    what = f"the {kind} space of agent {agent!r}"
                    _differ(env_id, what, theirs.get(agent), ours.get(agent))
        if not _same(first.state_space, other.state_space):
            _differ(env_id, "the state space", other.state_space, first.state_space)
    return first


def _same(ours: Space[Any] | None, theirs: Space[Any] | None) -> bool:
    if ours is theirs:
        return True
    if _kind(ours) != _kind(theirs):
        return False  # values of equal spaces may travel in different ways: a derived class's are its own business
    if isinstance(ours, spaces.Dict) and isinstance(theirs, spaces.Dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, spaces.Tuple) and isinstance(theirs, spaces.Tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if type(ours).__eq__ is object.__eq__ and ours is not None:
        # Gymnasium leaves equality to each kind of space; of one that has none, only the kind can be compared.
        return True
    assert ours is not None
    assert theirs is not None
    return equal(ours, theirs)


def _kind(space: Any) -> tuple[str, str]:
    # By name: a class that is made in the constructor is another one in each environment.
    return type(space).__module__, type(space).__qualname__


def _differ(env_id: int, what: str, theirs: Any, ours: Any) -> None:
    if str(theirs) == str(ours):  # such as a class and what it is derived from
        ours = "what looks the same, but is of another class, or has one in it"
    raise ValueError(
        f"all environments must have the same agents and spaces, but environment {env_id} differs from "
        f"environment 0 in {what}: {theirs} against {ours}"
    )
