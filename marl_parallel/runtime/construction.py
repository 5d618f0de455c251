"""From constructors to environments in their workers, and to the one description that all of them share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

import cloudpickle
from gymnasium.vector import AutoresetMode

from marl_parallel.runtime.crew import Crew
from marl_parallel.runtime.messages import Message, Request
from marl_parallel.runtime.payloads import Description, Plan, Refusal

Constructor = Callable[..., Any]


def construct(
    crew: Crew,
    constructors: Sequence[Constructor],
    seeds: Sequence[int],
    mode: AutoresetMode,
    adapter: bytes,
    restarts: bool,
) -> tuple[list[Description], Plan]:
    """Build all environments, each in its worker, and ask what they are.

    Args:
        crew: The workers.
        constructors: One for each environment.
        seeds: Likewise.
        mode: When episodes begin anew.
        adapter: Pickled.
        restarts: Whether what fails will be built anew.

    Returns:
        By environment, what they are; and what all workers were told.

    Raises:
        TypeError: A constructor cannot be pickled, or what it returns is no environment.
        ParallelEnvError: A constructor raised, crashed or took too long.
    """
    by_value: list[ModuleType] = []
    pickled = _pickle(constructors, range(len(constructors)), by_value)
    described: dict[int, Description] = {}
    first = b""
    while len(described) < len(constructors):
        requests = {}
        for worker, share in enumerate(crew.shares):
            waiting = {env_id: pickled[env_id] for env_id in share if env_id not in described}
            if waiting:
                plan = Plan(waiting, {env_id: seeds[env_id] for env_id in waiting}, mode, adapter, restarts)
                requests[worker] = Request(Message.ACCESS, tuple(waiting), plan)
        unknown: dict[int, str] = {}
        for env_id, result in sorted(crew.run(requests).items(), key=itemgetter(0)):
            if isinstance(result, Refusal):
                if result.kind is TypeError:
                    raise TypeError(f"environment {env_id}: {result.text}")
                unknown[env_id] = result.text
            else:
                described[env_id] = crew.read(env_id, result.description)
                first = first or result.description
        # Some modules exist in this process only, such as a test's that was loaded from its file, or a notebook's.
        tried = [*by_value]
        for env_id, name in unknown.items():
            module = sys.modules.get(name)
            if module is None or module in tried:  # or what it has would not be found there by value either
                raise ModuleNotFoundError(
                    f"the constructor of environment {env_id} needs the module {name!r}, "
                    "which cannot be imported in the worker",
                    name=name,
                )
            if module not in by_value:
                by_value.append(module)
        pickled.update(_pickle(constructors, unknown, by_value))
    plan = Plan(pickled, dict(enumerate(seeds)), mode, adapter, restarts, described=first)
    return [described[env_id] for env_id in range(len(constructors))], plan


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
