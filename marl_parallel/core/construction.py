"""From constructors to environments in their workers, and to the one description that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import Schema
from marl_parallel.core.messages import Built, Message, Plan, Refusal, Request
from marl_parallel.core.pickling import by_value, dumps_by_value, sendable, take_along
from marl_parallel.core.pool import Pool
from marl_parallel.core.registrations import dump_registrations

Constructor = Callable[..., Any]


def construct(
    pool: Pool,
    constructors: Sequence[Constructor],
    seeds: Sequence[int],
    mode: AutoresetMode,
    adapter: str | Callable[..., Any] | None,
    restarts: bool,
    only_here: list[ModuleType],
) -> tuple[list[Schema], Plan, dict[int, Built]]:
    """Build all environments, each in its worker, and ask what they are.

    Args:
        pool: The workers.
        constructors: One for each environment.
        seeds: Likewise.
        mode: When episodes begin anew.
        adapter: How simulators are understood.
        restarts: Whether what fails will be built anew.
        only_here: Modules that workers cannot import; those that constructors need are added.

    Returns:
        By environment, what they are; what all workers were told; and their replies.

    Raises:
        TypeError: A constructor or the adapter cannot be pickled, or what a constructor returns is no environment.
        ValueError: Agents have names that cannot be used.
        ModuleNotFoundError: A constructor needs a module that its worker can have in no way.
        ParallelEnvError: A constructor raised, crashed or took too long.
    """
    pickled = _pickle(constructors, range(len(constructors)), only_here)
    described: dict[int, Schema] = {}
    replies: dict[int, Built] = {}
    registrations = dump_registrations()
    first, first_id = b"", 0
    while len(described) < len(constructors):
        how = sendable(adapter, f"adapter={adapter!r}", only_here)
        requests = {}
        for worker, share in enumerate(pool.shares):
            waiting = {env_id: pickled[env_id] for env_id in share if env_id not in described}
            if waiting:
                plan = Plan(
                    waiting,
                    {env_id: seeds[env_id] for env_id in waiting},
                    mode,
                    how,
                    restarts,
                    registrations=registrations,
                )
                requests[worker] = Request(Message.ACCESS, tuple(waiting), plan)
        unknown: dict[int, str] = {}
        for env_id, result in sorted(pool.execute(requests).items(), key=itemgetter(0)):
            if isinstance(result, Refusal):
                if result.kind is TypeError or result.kind is ValueError:
                    raise result.kind(f"environment {env_id}: {result.text}")
                unknown[env_id] = result.text
            else:
                replies[env_id] = result
                if result.description == first:
                    described[env_id] = described[first_id]  # large spaces are neither made again nor compared
                    continue
                described[env_id] = pool.read(env_id, result.description)
                if not first:
                    first, first_id = result.description, env_id
        take_along(only_here, unknown, "the constructor of" if adapter is None else "the constructor or adapter of")
        pickled.update(_pickle(constructors, unknown, only_here))
    plan = Plan(pickled, dict(enumerate(seeds)), mode, how, restarts, described=first, registrations=registrations)
    return [described[env_id] for env_id in range(len(constructors))], plan, dict(sorted(replies.items()))


def _pickle(constructors: Sequence[Constructor], env_ids: Any, only_here: Sequence[ModuleType]) -> dict[int, bytes]:
    pickled: dict[int, bytes] = {}
    same: dict[int, bytes] = {}  # n times one constructor is the usual case
    with by_value(only_here):
        for env_id in env_ids:
            constructor = constructors[env_id]
            if id(constructor) not in same:
                try:
                    same[id(constructor)] = dumps_by_value(constructor)
                except Exception as error:
                    raise TypeError(
                        f"the constructor of environment {env_id} cannot be pickled, so it cannot be sent to a "
                        f"worker: {error}. Create what does not pickle inside it: {constructor!r}"
                    ) from error
            pickled[env_id] = same[id(constructor)]
    return pickled
