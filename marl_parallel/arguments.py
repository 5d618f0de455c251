"""What a caller has passed, checked and brought to one form; nothing here touches a simulator."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.backend import Backend
from marl_parallel.core.construction import missing_arguments
from marl_parallel.types import RestartPolicy

_POOL_SEEDS = 2**31  # they are 32-bit integers with a sign
_ELEVEN_DAYS_S = 1e6  # in milliseconds this still fits where operating systems are told to wait


def checked_constructors(env_constructors: Any) -> list[Callable[..., Any]]:
    """The constructors as a list.

    Raises:
        ValueError: There are none.
        TypeError: It is no sequence, or something in it cannot be called, or requires more than it is called with.
    """
    one_thing = callable(env_constructors) or isinstance(env_constructors, str | bytes | Mapping)
    if one_thing or not isinstance(env_constructors, Iterable):
        raise TypeError(
            "env_constructors must be a sequence of callables, one per environment; "
            f"got {env_constructors!r}. For n equal environments, pass [constructor] * n"
        )
    constructors = list(env_constructors)
    if not constructors:
        raise ValueError("env_constructors is empty: at least one environment is needed")
    for env_id, constructor in enumerate(constructors):
        if not callable(constructor):
            raise TypeError(
                f"env_constructors[{env_id}] must be a callable that returns an environment, got {constructor!r}"
                f"{_instead(constructor)}"
            )
    checked: set[int] = set()  # n times one constructor is the usual case
    for env_id, constructor in enumerate(constructors):
        if id(constructor) not in checked:
            checked.add(id(constructor))
            check_signature(constructor, f"env_constructors[{env_id}]")
    return constructors


def check_signature(
    constructor: Callable[..., Any], name: str, bind: str = "functools.partial(constructor, {})"
) -> None:
    """Refuse a constructor that requires more than it is called with.

    Args:
        constructor: Makes one environment.
        name: What the error calls it.
        bind: How a value can be bound to a parameter, for the error.

    Raises:
        TypeError: A parameter without a default is none of ours.
    """
    missing = missing_arguments(constructor)
    if not missing:
        return
    names = ", ".join(repr(one.name) for one in missing)
    by_name = missing[0].kind is not missing[0].POSITIONAL_ONLY
    bound = bind.format(", ".join(f"{one.name}=..." for one in missing) if by_name else "...")
    raise TypeError(
        f"{name} cannot be called: it requires {names}. Constructors are called with the keywords seed, env_id and "
        "restarts, each only where their signature names it, and without positional arguments. What to do: write "
        f"`lambda env_id: ...`, `lambda seed: ...` or `lambda: ...`, or bind a value, {bound}. Got {constructor!r}"
    )


def _instead(given: Any) -> str:
    """What to pass in the place of something that makes no environment."""
    if hasattr(given, "reset") and hasattr(given, "step"):
        return "; that is one: pass what makes it, such as its class, or a function that returns a new one"
    if isinstance(given, ModuleType):
        found = [name for name in ("parallel_env", "env") if callable(getattr(given, name, None))]
        return f"; pass {given.__name__}.{found[0]}" if found else ""
    return f"; make({given!r}, num_envs=...) takes names" if isinstance(given, str) else ""


def autoreset_mode(auto_reset: bool | AutoresetMode | str) -> AutoresetMode:
    """The mode that True, False, a mode or its name stands for.

    Raises:
        ValueError: It stands for none.

    Example:
        >>> autoreset_mode("NEXT_STEP"), autoreset_mode(False)
        (<AutoresetMode.NEXT_STEP: 'NextStep'>, <AutoresetMode.DISABLED: 'Disabled'>)
    """
    if isinstance(auto_reset, AutoresetMode):
        return auto_reset
    if isinstance(auto_reset, bool):
        return AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED
    for mode in AutoresetMode:
        if auto_reset in (mode.name, mode.value, mode.name.lower()):
            return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ValueError(f"auto_reset must be True, False, an AutoresetMode or one of {names}; got {auto_reset!r}")


def at_least_one(number: Any, name: str) -> int:
    """A positive integer.

    Raises:
        TypeError: It is no integer.
        ValueError: It is less than 1.
    """
    value = _integer(number, f"{name} must be an integer")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _integer(given: Any, wanted: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{wanted}, got {given!r}") from None


def checked_patience(seconds: Any) -> float | None:
    """For how long `recv` may wait: a number of seconds that is not negative, or None.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative.
    """
    if seconds == 0 and not isinstance(seconds, bool):
        return 0.0
    return checked_timeout(seconds, "timeout")


def checked_minimum(min_envs: Any, in_flight: int) -> int:
    """How many environments `recv` waits for; None stands for all.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative, or more than there are in flight.
    """
    if min_envs is None:
        return in_flight
    number = _integer(min_envs, "min_envs must be an integer or None")
    if number < 0:
        raise ValueError(f"min_envs must not be negative, got {number}")
    if number > in_flight:
        raise ValueError(f"min_envs={number}, but only {in_flight} environments are in flight")
    return number


def checked_timeout(seconds: Any, name: str) -> float | None:
    """A positive number of seconds, or None.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    value = float(seconds)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {seconds}; None stands for no limit")
    return value


def checked_trace(path: Any) -> Path:
    """Where a trace is to be written, wherever this process will work by then.

    Raises:
        TypeError: It is no path.
        ValueError: There can be no file there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace must be the path of a file to be written, or None; got {path!r}")
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"trace={str(path)!r}: no file can be written there")
    return file.absolute()


def survives(on_error: Any, restart_policy: Any) -> bool:
    """Whether faults are to be survived.

    Raises:
        ValueError: `on_error` is neither "raise" nor "restart".
        TypeError: The policy is none.
    """
    if on_error not in ("raise", "restart"):
        raise ValueError(f'on_error must be "raise" or "restart", got {on_error!r}')
    if not isinstance(restart_policy, RestartPolicy):
        raise TypeError(f"restart_policy must be a RestartPolicy(max_restarts=..., ...), got {restart_policy!r}")
    return bool(on_error == "restart")


def workers_for(num_envs: int, num_workers: int | None, envs_per_worker: int | None, backend: Backend) -> int:
    """How many workers there will be: at most one for each environment.

    Args:
        num_envs: The number of environments.
        num_workers: The number of workers; None for one for each CPU.
        envs_per_worker: The most environments that a worker may have; it sets the number of workers.
        backend: Where the workers live.

    Warns:
        ResourceWarning: They are more than there are CPUs.

    Raises:
        TypeError: A number is no integer.
        ValueError: A number is less than 1, or the two numbers do not agree.
    """
    workers = None if num_workers is None else min(at_least_one(num_workers, "num_workers"), num_envs)
    if envs_per_worker is not None:
        wanted = -(-num_envs // at_least_one(envs_per_worker, "envs_per_worker"))
        if workers not in (None, wanted):
            raise ValueError(
                f"num_workers={num_workers} and envs_per_worker={envs_per_worker} do not agree: {num_envs} environments"
                f" with at most {envs_per_worker} in each worker take {wanted} workers. Pass one of the two."
            )
        workers = wanted
    available = backend.capacity()
    if workers is None:
        return min(num_envs, available)
    if workers > available and backend.side_by_side:
        warnings.warn(
            f"{workers} workers share {available} CPUs; more workers than CPUs slow each other down, "
            "unless their simulators mostly wait",
            ResourceWarning,
            stacklevel=3,
        )
    return workers


def base_seed(seed: Any) -> int:
    """The seed of environment 0; None draws one of 31 bits.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.

    Example:
        >>> base_seed(42)
        42
    """
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    number = _integer(seed, "seed must be an integer or None")
    if number < 0:
        raise ValueError(f"seed must not be negative, got {number}")
    return number


def seeds_of(seeds: Sequence[Any], env_ids: Sequence[int]) -> list[int | None]:
    """One seed for each environment, as given; None leaves its generators as they are.

    Raises:
        ValueError: There is not one for each, or one is negative.
        TypeError: One is no integer.
    """
    if len(seeds) != len(env_ids):
        raise ValueError(f"expected one seed for each of {len(env_ids)} environments, got {len(seeds)}")
    return [None if seed is None else base_seed(seed) for seed in seeds]


def pool_arguments(
    num_envs: Any, batch_size: Any, num_threads: Any, seed: int | Sequence[int] | None
) -> tuple[dict[str, int], list[int]]:
    """Those numbers of a pool that were given, and the seed of each copy.

    Raises:
        TypeError: Something is no integer.
        ValueError: A number is out of range, or there is not one seed for each copy.

    Example:
        >>> pool_arguments(2, None, None, seed=3)
        ({'num_envs': 2, 'batch_size': 2}, [3, 4])
    """
    numbers = {"num_envs": at_least_one(num_envs, "num_envs")}
    numbers["batch_size"] = numbers["num_envs"] if batch_size is None else at_least_one(batch_size, "batch_size")
    if numbers["batch_size"] > num_envs:
        raise ValueError(f"batch_size={batch_size} is more than num_envs={num_envs}")
    if num_threads is not None:
        numbers["num_threads"] = at_least_one(num_threads, "num_threads")
    if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str | bytes):
        seeds = [_POOL_SEEDS if own is None else own for own in seeds_of(seed, range(num_envs))]
    else:
        base = base_seed(seed)
        first = min(base, _POOL_SEEDS - num_envs) if seed is None else base
        seeds = [*range(first, first + num_envs)]
    if max(seeds) >= _POOL_SEEDS:
        raise ValueError(f"seed={seed!r}: a pool wants a seed from 0 to 2**31 - 1 for each copy")
    return numbers, seeds


def checked_ids(env_ids: Sequence[int], num_envs: int) -> tuple[int, ...]:
    """Some environments' ids, in the order given.

    Raises:
        ValueError: There is none, one is unknown, or one is named twice.

    Example:
        >>> checked_ids([2, 0], 4)
        (2, 0)
    """
    try:
        given = [*env_ids]
        mask = any(isinstance(env_id, bool | np.bool_) for env_id in given)
        ids = () if mask else tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"env_ids must be a sequence of integers or None, got {env_ids!r}") from None
    if mask:
        raise TypeError(f"env_ids must be numbers of environments, got a mask, {env_ids!r}: pass np.flatnonzero of it")
    unknown = [env_id for env_id in ids if not 0 <= env_id < num_envs]
    if unknown or len(set(ids)) != len(ids) or not ids:
        reason = (
            f"there is no environment {unknown[0]}" if unknown else "one is named twice" if ids else "that is nobody"
        )
        raise ValueError(f"env_ids={[*ids]}: {reason}; there are environments 0 to {num_envs - 1}")
    return ids


def checked_options(options: Any, count: int) -> list[Any]:
    """A reset's options for each environment.

    Args:
        options: A dict or None for all, or a list with one for each.
        count: How many there are.

    Raises:
        TypeError: They are something else.
        ValueError: They are not so many.
    """
    for_each = options if isinstance(options, list) else [options] * count
    if len(for_each) != count:
        raise ValueError(f"expected options for each of {count} environments, got {len(for_each)}")
    for own in for_each:
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"options must be a dict or None, got {own!r}")
    return for_each


def closing_time(seconds: Any) -> float:
    """For how long environments may close: a number of seconds that is not negative; None is no limit.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative.
    """
    patience = checked_patience(seconds)
    return _ELEVEN_DAYS_S if patience is None else min(patience, _ELEVEN_DAYS_S)


def addressed(actions: Any, env_ids: Sequence[int] | None, num_envs: int) -> tuple[tuple[int, ...], Sequence[Any]]:
    """Environments and the actions for each, from a sequence in the order of `env_ids` or from a mapping by env id.

    Raises:
        ValueError: There is not one dict for each, or an environment is unknown or named twice.
        TypeError: An env id is no integer.
    """
    if not isinstance(actions, Mapping):
        ids = tuple(range(num_envs)) if env_ids is None else checked_ids(env_ids, num_envs)
        check_one_for_each(actions, ids)
        return ids, actions
    if not all(hasattr(env_id, "__index__") for env_id in actions):
        raise ValueError(f"a mapping of actions is keyed by env id, each with a dict by agent; got keys {[*actions]}")
    ids = checked_ids([*actions] if env_ids is None else env_ids, num_envs)
    if actions.keys() != {*ids}:
        raise ValueError(f"env_ids={list(ids)}, but the actions are for environments {[*actions]}")
    return ids, [actions[env_id] for env_id in ids]


def check_one_for_each(actions: Any, ids: Sequence[int]) -> None:
    """Refuse what is not a sequence with one dict of actions for each environment.

    Raises:
        ValueError: It has another length, or none.
    """
    if isinstance(actions, Mapping):
        got = "one dict"
    elif not hasattr(actions, "__len__"):
        got = f"{type(actions).__name__}, which has no length"
    elif len(actions) != len(ids):
        got = str(len(actions))
    else:
        return
    raise ValueError(f"expected a sequence of {len(ids)} action dicts, one for each environment, got {got}")
