"""Checks of arguments. Each function returns its argument in one form, or raises `TypeError` or `ValueError`.

Nothing here touches a simulator.
"""

from __future__ import annotations

import importlib
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.backend import Backend
from marl_parallel.core.construction import missing_arguments
from marl_parallel.types import RestartPolicy

ATTRIBUTES = ("parallel_env", "env", "raw_env")
"""The attributes of a module that may be constructors, in this order, if none is named."""

_POOL_SEEDS = 2**31  # they are 32-bit integers with a sign
_ELEVEN_DAYS_S = 1e6  # in milliseconds, the longest wait that all operating systems take


def checked_constructors(env_constructors: Any) -> list[Callable[..., Any]]:
    """The constructors as a list; each is callable, and requires nothing that it is not called with."""
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
    first_of = {id(constructor): env_id for env_id, constructor in reversed([*enumerate(constructors)])}
    for env_id in sorted(first_of.values()):  # n times one constructor is the usual case
        check_signature(constructors[env_id], f"env_constructors[{env_id}]")
    return constructors


def check_signature(
    constructor: Callable[..., Any], name: str, bind: str = "functools.partial(constructor, {})"
) -> None:
    """Refuse a constructor that requires more than it is called with.

    In the error, `name` is the constructor's, and `bind` says how a value can be bound to a parameter.
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
    """What to pass instead of something that makes no environment."""
    if hasattr(given, "reset") and hasattr(given, "step"):
        return "; that is one: pass what makes it, such as its class, or a function that returns a new one"
    if isinstance(given, ModuleType):
        found = [name for name in ("parallel_env", "env") if callable(getattr(given, name, None))]
        return f"; pass {given.__name__}.{found[0]}" if found else ""
    return f"; make({given!r}, num_envs=...) takes names" if isinstance(given, str) else ""


def find_constructor(name: str) -> Callable[..., Any]:
    """The constructor that `module[:attribute]` names.

    Example:
        >>> find_constructor("gymnasium:make").__name__
        'make'
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be 'module' or 'module:attribute', got {name!r}; ParallelEnv takes constructors")
    module_name, colon, attribute = name.partition(":")
    if not module_name:
        raise ValueError(f"name must be 'module' or 'module:attribute', got {name!r}")
    if "/" in module_name or os.sep in module_name or module_name.endswith(".py"):
        instead = f"{Path(module_name).stem}{colon}{attribute}"
        raise ModuleNotFoundError(
            f"{module_name!r} is a file, but modules are wanted: put its folder on sys.path and pass {instead!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that it imports
        raise ModuleNotFoundError(f"{error}{_meant(module_name)}", name=error.name) from None
    for candidate in [attribute] if attribute else ATTRIBUTES:
        found = getattr(module, candidate, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    looked_for = repr(attribute) if attribute else ", ".join(map(repr, ATTRIBUTES))
    raise AttributeError(f"module {module_name!r} has nothing to call by the name of {looked_for}")


def _meant(name: str) -> str:
    above, _, last = name.rpartition(".")
    if name in gymnasium.registry:
        return f"; for Gymnasium's {name}, pass 'gymnasium:make' with env_kwargs={{'id': {name!r}}}"
    return f"; a function of a module is named '{above}:{last}'" if above else ""


def autoreset_mode(auto_reset: bool | AutoresetMode | str) -> AutoresetMode:
    """The mode that True, False, a mode or its name stands for.

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
    """An integer that is positive."""
    return _integer(number, name, 1)


def _integer(given: Any, name: str, least: int, or_none: str = "") -> int:
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be an integer{or_none}, got {given!r}") from None
    if value < least:
        raise ValueError(f"{name} must {'be at least 1' if least else 'not be negative'}, got {value}")
    return value


def checked_minimum(min_envs: Any, in_flight: int) -> int:
    """How many environments `recv` waits for; None stands for all in flight."""
    if min_envs is None:
        return in_flight
    number = _integer(min_envs, "min_envs", 0, " or None")
    if number > in_flight:
        raise ValueError(f"min_envs={number}, but only {in_flight} environments are in flight")
    return number


def checked_timeout(seconds: Any, name: str, *, zero: bool = False) -> float | None:
    """A positive number of seconds, or None; with `zero`, also 0."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    value = float(seconds)
    if not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} must be positive, got {seconds}; None stands for no limit")
    return value


def checked_trace(path: Any) -> Path:
    """The absolute path of a trace; a file can be written there."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace must be the path of a file to be written, or None; got {path!r}")
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"trace={str(path)!r}: no file can be written there")
    return file.absolute()


def restarts(on_error: Any, restart_policy: Any) -> bool:
    """Whether environments that fail are rebuilt."""
    if on_error not in ("raise", "restart"):
        raise ValueError(f'on_error must be "raise" or "restart", got {on_error!r}')
    if not isinstance(restart_policy, RestartPolicy):
        raise TypeError(f"restart_policy must be a RestartPolicy(max_restarts=..., ...), got {restart_policy!r}")
    return bool(on_error == "restart")


def workers_for(num_envs: int, num_workers: int | None, envs_per_worker: int | None, backend: Backend) -> int:
    """How many workers there are: at most one for each environment, and by default one for each CPU.

    Warns:
        ResourceWarning: They are more than there are CPUs.
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
    """The seed of environment 0; None draws one of 31 bits."""
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    return _integer(seed, "seed", 0, " or None")


def seeds_of(seeds: Sequence[Any], env_ids: Sequence[int]) -> list[int | None]:
    """One seed for each environment; None leaves its generators as they are."""
    if len(seeds) != len(env_ids):
        raise ValueError(f"expected one seed for each of {len(env_ids)} environments, got {len(seeds)}")
    return [None if seed is None else base_seed(seed) for seed in seeds]


def pool_arguments(
    num_envs: Any, batch_size: Any, num_threads: Any, seed: int | Sequence[int] | None
) -> tuple[dict[str, int], list[int]]:
    """The numbers that a pool gets, and the seed of each of its environments.

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
    """Environment ids as a tuple, in the order given.

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
    reason = "" if ids else "that is nobody"
    if unknown := [env_id for env_id in ids if not 0 <= env_id < num_envs]:
        reason = f"there is no environment {unknown[0]}"
    elif len(set(ids)) != len(ids):
        reason = "one is named twice"
    if reason:
        raise ValueError(f"env_ids={[*ids]}: {reason}; there are environments 0 to {num_envs - 1}")
    return ids


def checked_options(options: Any, count: int) -> list[Any]:
    """A reset's options for each of `count` environments, from a dict or None for all, or a list with one for each."""
    for_each = options if isinstance(options, list) else [options] * count
    if len(for_each) != count:
        raise ValueError(f"expected options for each of {count} environments, got {len(for_each)}")
    for own in for_each:
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"options must be a dict or None, got {own!r}")
    return for_each


def closing_time(seconds: Any) -> float:
    """How long environments may take to close: a number of seconds that is not negative; None is no limit."""
    patience = checked_timeout(seconds, "timeout", zero=True)
    return _ELEVEN_DAYS_S if patience is None else min(patience, _ELEVEN_DAYS_S)


def addressed(actions: Any, env_ids: Sequence[int] | None, num_envs: int) -> tuple[tuple[int, ...], Sequence[Any]]:
    """Environments and their actions, from a sequence in the order of `env_ids` or from a mapping by env id."""
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
    """Refuse actions that are not a sequence with one dict for each environment."""
    if isinstance(actions, Mapping):
        got = "one dict"
    elif not hasattr(actions, "__len__"):
        got = f"{type(actions).__name__}, which has no length"
    elif len(actions) == len(ids):
        return
    else:
        got = str(len(actions))
    raise ValueError(f"expected a sequence of {len(ids)} action dicts, one for each environment, got {got}")
