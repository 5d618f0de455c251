"""From constructors to environments in their workers, and to the one description that all of them share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

import cloudpickle
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from marl_parallel.runtime.layout import Schema
from marl_parallel.runtime.messages import Message, Request
from marl_parallel.runtime.supervision import Crew
from marl_parallel.runtime.worker import Description, Plan, Refusal

Constructor = Callable[..., Any]


def construct(
    crew: Crew,
    constructors: Sequence[Constructor],
    seeds: Sequence[int],
    mode: AutoresetMode,
    adapter: bytes,
    limit: float | None,
) -> list[Description]:
    """Build all environments, each in its worker, and ask what they are.

    Args:
        crew: The workers.
        constructors: One for each environment.
        seeds: Likewise.
        mode: When episodes begin anew.
        adapter: Pickled.
        limit: How long each constructor may take, in seconds.

    Raises:
        TypeError: A constructor cannot be pickled, or what it returns is no environment.
        ParallelEnvError: A constructor raised, crashed or took too long.
    """
    by_value: list[ModuleType] = []
    pickled = _pickle(constructors, range(len(constructors)), by_value)
    described: dict[int, Description] = {}
    while len(described) < len(constructors):
        requests = {}
        for worker, share in enumerate(crew.shares):
            waiting = {env_id: pickled[env_id] for env_id in share if env_id not in described}
            if waiting:
                plan = Plan(waiting, {env_id: seeds[env_id] for env_id in waiting}, mode, adapter)
                requests[worker] = Request(Message.ACCESS, tuple(waiting), plan)
        unknown: dict[int, str] = {}
        for env_id, result in sorted(crew.run(requests, limit=limit).items(), key=itemgetter(0)):
            if isinstance(result, Refusal):
                if result.kind is TypeError:
                    raise TypeError(f"environment {env_id}: {result.text}")
                unknown[env_id] = result.text
            else:
                described[env_id] = result
        # Some modules exist in this process only, such as a test's that was loaded from its file, or a notebook's.
        for env_id, name in unknown.items():
            if sys.modules.get(name) in by_value:
                continue
            if name not in sys.modules:
                raise ModuleNotFoundError(
                    f"the constructor of environment {env_id} needs the module {name!r}, "
                    "which cannot be imported in the worker",
                    name=name,
                )
            by_value.append(sys.modules[name])
        pickled.update(_pickle(constructors, unknown, by_value))
    return [described[env_id] for env_id in range(len(constructors))]


def _pickle(constructors: Sequence[Constructor], env_ids: Any, by_value: Sequence[ModuleType]) -> dict[int, bytes]:
    pickled: dict[int, bytes] = {}
    same: dict[int, bytes] = {}  # n times one constructor is the usual case
    registered = [m for m in by_value if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        for env_id in env_ids:
            constructor = constructors[env_id]
            if id(constructor) not in same:
                try:
                    same[id(constructor)] = cloudpickle.dumps(constructor)
                except Exception as error:
                    raise TypeError(
                        f"the constructor of environment {env_id} cannot be pickled, so it cannot be sent to a "
                        f"worker: {error}. Create what does not pickle inside it: {constructor!r}"
                    ) from error
            pickled[env_id] = same[id(constructor)]
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def common_schema(described: Sequence[Description]) -> Schema:
    """What all environments have in common.

    Raises:
        ValueError: They differ; the text says which, in what, for which agent.
    """
    first = described[0]
    for env_id, other in enumerate(described):
        if other.rules is not first.rules:
            _differ(env_id, "rules", other.rules.value, first.rules.value)
        if other.possible_agents != first.possible_agents:
            _differ(env_id, "possible_agents", other.possible_agents, first.possible_agents)
        for kind in ("observation", "action"):
            ours, theirs = (getattr(d, f"{kind}_spaces") for d in (first, other))
            for agent in dict.fromkeys([*ours, *theirs]):
                if not _same(ours.get(agent), theirs.get(agent)):
                    what = f"the {kind} space of agent {agent!r}"
                    _differ(env_id, what, theirs.get(agent), ours.get(agent))
        if not _same(first.state_space, other.state_space):
            _differ(env_id, "the state space", other.state_space, first.state_space)
    return Schema.of(first)


def _same(ours: Space[Any] | None, theirs: Space[Any] | None) -> bool:
    if _kind(ours) != _kind(theirs):
        return False  # values of equal spaces may travel in different ways: a derived class's are its own business
    if isinstance(ours, spaces.Dict) and isinstance(theirs, spaces.Dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, spaces.Tuple) and isinstance(theirs, spaces.Tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if type(ours).__eq__ is object.__eq__ and ours is not None:
        # Gymnasium leaves equality to each kind of space; of one that has none, only the kind can be compared.
        return True
    return bool(ours == theirs)


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
