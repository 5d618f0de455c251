"""Checks of arguments. Each function returns its argument in one form, or raises `TypeError` or `ValueError`."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.backend import Backend
from marl_parallel.core.files import ForeignFile, check_log, check_replaceable, make_folder
from marl_parallel.core.view import check_one_for_each
from marl_parallel.core.warn import warn
from marl_parallel.core.worker.constructors import KEYWORDS, missing_arguments
from marl_parallel.types import RecyclePolicy

_POOL_SEEDS = 2**31  # limit of native simulators' seeds: EnvPool takes signed 32-bit integers
_ELEVEN_DAYS_S = 1e6  # a wait that all operating systems accept, also in milliseconds


def checked_constructors(env_constructors: Any, seed: Any = None) -> list[Callable[..., Any]]:
    """The constructors as a list; each is callable and requires only arguments that it gets."""
    is_one = callable(env_constructors) or isinstance(env_constructors, str | bytes | Mapping)
    if is_one or not isinstance(env_constructors, Iterable):
        raise TypeError(
            "env_constructors must be a sequence of callables, one per environment; "
            f"got {env_constructors!r}. For n equal environments, pass [constructor] * n"
        )
    constructors = list(env_constructors)
    if not constructors:
        raise ValueError("env_constructors is empty: at least one environment is needed")
    checked: set[int] = set()  # often all constructors are one object, whose signature is read once
    for env_id, constructor in enumerate(constructors):
        name = f"env_constructors[{env_id}]"
        if not callable(constructor):
            instead = _instead(constructor)
            raise TypeError(f"{name} must be a callable that returns an environment, got {constructor!r}{instead}")
        if id(constructor) not in checked:
            checked.add(id(constructor))
            check_base_class(constructor, name)
            check_signature(constructor, name, seed=seed)
    return constructors


def check_base_class(constructor: Callable[..., Any], name: str) -> None:
    """Raise `TypeError` for a class of environments that derives from this package's `ParallelEnv`."""
    bases = [(base.__module__, base.__qualname__) for base in getattr(constructor, "__mro__", ())]
    if ("marl_parallel.parallel_env", "ParallelEnv") in bases:
        raise TypeError(
            f"{name} is the class {constructor.__qualname__}, which derives from marl_parallel.ParallelEnv. "
            "What to do: derive it from pettingzoo.ParallelEnv, and import one of the two under another name"
        )


def check_signature(
    constructor: Callable[..., Any], name: str, bind: str = "functools.partial(constructor, {})", *, seed: Any = None
) -> None:
    """Raise `TypeError` for a constructor that requires more arguments than it gets; `bind` shows how to bind them.

    `seed` is the argument of `ParallelEnv`.
    """
    missing = missing_arguments(constructor)
    if not missing:
        if is_own(seed) and missing_arguments(constructor, KEYWORDS - {"seed"}):
            raise TypeError(
                f'{name} cannot be called: it requires `seed`, but with seed="own" constructors get none. What to do: '
                f"bind one, {bind.format('seed=...')}, give it a default, or pass a number as seed. Got {constructor!r}"
            )
        return
    names = ", ".join(repr(parameter.name) for parameter in missing)
    by_name = missing[0].kind is not missing[0].POSITIONAL_ONLY
    bound = bind.format(", ".join(f"{parameter.name}=..." for parameter in missing) if by_name else "...")
    raise TypeError(
        f"{name} cannot be called: it requires {names}. Constructors are called without positional arguments, and with "
        "the keywords seed, env_id and restarts where they have a parameter of that name. What to do: write "
        f"`lambda env_id: ...`, `lambda seed: ...` or `lambda: ...`, or bind a value, {bound}. Got {constructor!r}"
    )


def _instead(value: Any) -> str:
    """What to pass instead of a value that is not callable."""
    if hasattr(value, "reset") and hasattr(value, "step"):
        return ", which is an environment: pass its class, or a function that returns a new environment"
    if isinstance(value, ModuleType):
        names = [name for name in ("parallel_env", "env") if callable(getattr(value, name, None))]
        return f"; pass {value.__name__}.{names[0]}" if names else ""
    return f"; make({value!r}, num_envs=...) takes names" if isinstance(value, str) else ""


def autoreset_mode(auto_reset: bool | AutoresetMode | str) -> AutoresetMode:
    """The auto-reset mode for True, False, a mode or its name."""
    if isinstance(auto_reset, AutoresetMode):
        return auto_reset
    if isinstance(auto_reset, bool):
        return AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED
    for mode in AutoresetMode:
        if auto_reset in (mode.name, mode.value, mode.name.lower()):
            return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ValueError(f"auto_reset must be True, False, an AutoresetMode or one of {names}; got {auto_reset!r}")


def checked_integer(number: Any, name: str, least: int = 1, or_none: str = "") -> int:
    """An integer of at least 0 or 1; `name` is the argument's, for the error."""
    try:
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be an integer{or_none}, got {number!r}") from None
    if value < least:
        raise ValueError(f"{name} must {'be at least 1' if least else 'not be negative'}, got {value}")
    return value


def checked_modules(names: Any) -> tuple[str, ...]:
    """The names of modules of `preload`."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'preload must be a sequence of names of modules, such as ("torch",), got {names!r}')
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name == "__main__":
            raise ValueError(f'preload must have names of modules, such as "torch", got {name!r}')
    return tuple(names)


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


def closing_time(seconds: Any) -> float:
    """How long environments may take to close: a number of seconds that is not negative; None for no limit."""
    value = checked_timeout(seconds, "timeout", zero=True)
    return _ELEVEN_DAYS_S if value is None else min(value, _ELEVEN_DAYS_S)


def checked_trace(path: Any) -> Path:
    """The absolute path of a trace, where a file can be written."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace must be the path of a file to be written, or None; got {path!r}")
    file = Path(path)
    try:
        check_replaceable(file)
    except ForeignFile as error:
        raise ValueError(f"trace={str(path)!r}: cannot write a file there: {error}") from error
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"trace={str(path)!r}: cannot write a file there; pass a path in a writable folder")
    return file.absolute()


def check_path(path: Any, name: str) -> None:
    """Raise `TypeError` for anything but the path of a folder."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{name} must be the path of a folder, or None; got {path!r}")


def made_folder(path: str | os.PathLike[str], name: str, make: Callable[[Path], None] = make_folder) -> Path:
    """The absolute path of a folder for files, which is made if it is missing."""
    try:
        folder = Path(path).absolute()
        make(folder)
    except ForeignFile as error:
        raise ValueError(f"{name}={os.fspath(path)!r}: {error}; pass a folder of your own") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={os.fspath(path)!r}: cannot create this folder: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={os.fspath(path)!r}: cannot write files there; pass a writable folder")
    return folder


def made_log_dir(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder for logs, which is made if it is missing."""
    folder = made_folder(path, "log_dir")
    for log in folder.glob("worker-*.log"):
        if not log.is_file() or not os.access(log, os.W_OK):
            raise ValueError(f"log_dir={os.fspath(path)!r}: cannot append to {log}; remove it, or pass another folder")
        try:
            check_log(log)
        except OSError as error:
            raise ValueError(f"log_dir={os.fspath(path)!r}: {error}; remove it, or pass another folder") from error
    return folder


def check_isolate_rng(isolate_rng: bool, backend: Backend) -> None:
    """Raise `ValueError` for True if workers use the same generators at the same time."""
    if isolate_rng and not backend.capabilities.can_isolate_rng:
        raise ValueError(
            "isolate_rng=True is impossible with threads, which use the generators of this process at the same time: "
            'pass backend="process" or "serial"'
        )


def check_recycle(recycle: RecyclePolicy | None, backend: Backend, name: Any) -> None:
    """Raise `ValueError` if environments cannot be constructed in another worker."""
    if recycle is not None and not backend.capabilities.has_standbys:
        raise ValueError(
            f"recycle= constructs new environments in another process, and backend={name!r} has none: pass "
            'backend="process", or call env.restart(), which constructs them again in their place'
        )


def warn_of_in_line(
    backend: Backend,
    shares: Sequence[Sequence[int]],
    unenforced: Sequence[str],
    log_dir: str | os.PathLike[str] | None,
    recycle: RecyclePolicy | None,
    *,
    restarts: bool,
) -> None:
    """Warn of arguments that need worker processes, if the caller's own thread steps some environments."""
    if not backend.capabilities.can_kill or not backend.in_line:
        return
    lacking = [*unenforced]
    if recycle is not None:
        lacking.append("recycle=")
    if log_dir is not None:
        lacking.append(f"log_dir={os.fspath(log_dir)!r}")
    if not lacking and not restarts:
        return
    env_ids = [env_id for worker in backend.in_line for env_id in shares[worker]]
    what = [f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no effect"] if lacking else []
    if restarts:
        what.append('on_error="restart" covers exceptions only: a crash ends this program')
    warn(
        f'with backend="hybrid", this thread steps environments {env_ids}; for them, {" and ".join(what)}. With '
        'backend="process", no environment runs in this process',
        RuntimeWarning,
    )


def workers_for(num_envs: int, num_workers: int | None, envs_per_worker: int | None, backend: Backend) -> int:
    """The number of workers: at most one for each environment, and by default one for each CPU."""
    workers = None if num_workers is None else min(operator.index(num_workers), num_envs)
    if envs_per_worker is not None:
        needed = -(-num_envs // operator.index(envs_per_worker))
        if workers not in (None, needed):
            raise ValueError(
                f"num_workers={num_workers} and envs_per_worker={envs_per_worker} do not agree: {num_envs} environments"
                f" with at most {envs_per_worker} in each worker take {needed} workers. Pass one of the two."
            )
        workers = needed
    available = backend.capacity()
    if workers is None:
        return min(num_envs, available)
    if workers > available and backend.capabilities.side_by_side:
        warn(
            f"{workers} workers share {available} CPUs and slow each other down: pass num_workers={available}, or "
            "ignore this if the simulators mostly wait",
            ResourceWarning,
        )
    return workers


def one_for_each(values: Any, env_ids: Sequence[int], what: str) -> Any:
    """Check that there is one value for each environment; `what` names a value in the error."""
    if len(values) != len(env_ids):
        raise ValueError(f"expected {what} for each of {len(env_ids)} environments, got {len(values)}")
    return values


def checked_arguments(env_id: int, of_env: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments and keywords of one environment's call; `TypeError` unless they are a tuple, a list or a dict."""
    if isinstance(of_env, Mapping) and all(isinstance(name, str) for name in of_env):
        return (), dict(of_env)
    if isinstance(of_env, tuple | list):
        return tuple(of_env), {}
    raise TypeError(
        f"environment {env_id}: expected a tuple or list of arguments, or a dict of keywords, got {of_env!r:.200}"
    )


def is_own(seed: Any) -> bool:
    """Whether `seed` is `"own"`: environments keep their own seeds."""
    return isinstance(seed, str) and seed == "own"


def first_seeds(seed: Any, num_envs: int) -> list[int] | list[None]:
    """The seed of each environment, from the argument `seed` of `ParallelEnv`; None if they keep their own."""
    if is_own(seed):
        return [None] * num_envs
    if isinstance(seed, str):
        raise TypeError(f'seed must be an integer, None or "own", got {seed!r}')
    base = base_seed(seed)
    return [base + env_id for env_id in range(num_envs)]


def base_seed(seed: Any) -> int:
    """The seed of environment 0; None draws one of 31 bits."""
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    return checked_integer(seed, "seed", 0, " or None")


def seeds_of(seeds: Sequence[Any], env_ids: Sequence[int]) -> list[int | None]:
    """One seed for each environment; None leaves its generators as they are."""
    return [None if seed is None else base_seed(seed) for seed in one_for_each(seeds, env_ids, "one seed")]


def pool_arguments(num_envs: Any, **numbers: Any) -> dict[str, int]:
    """The numbers for a native simulator by argument, without those that are None."""
    passed = {"num_envs": num_envs, **numbers}
    checked = {name: checked_integer(number, name) for name, number in passed.items() if number is not None}
    if checked.get("batch_size", 0) > checked["num_envs"]:
        raise ValueError(f"batch_size={checked['batch_size']} is more than num_envs={num_envs}")
    return checked


def pool_seeds(seed: Any, env_ids: Sequence[int], name: str) -> list[int]:
    """The seed of each environment of a native simulator: `seed + i`, or one from a sequence; None draws a base."""
    if is_own(seed):
        raise ValueError(
            f'seed="own" is impossible with {name}, whose environments have no seeds of their own: pass a number, or '
            "None to draw one"
        )
    if is_sequence_of_seeds(seed):
        seeds = [_POOL_SEEDS if number is None else number for number in seeds_of(seed, env_ids)]
    else:
        base = base_seed(seed)
        base = min(base, _POOL_SEEDS - 1 - max(env_ids)) if seed is None else base
        seeds = [base + env_id for env_id in env_ids]
    if max(seeds) >= _POOL_SEEDS:
        raise ValueError(f"seed={seed!r}: {name} needs a seed from 0 to 2**31 - 1 for each environment")
    return seeds


def is_sequence_of_seeds(seed: Any) -> bool:
    """Whether there is one seed for each environment, and not one for all."""
    is_one = isinstance(seed, str | bytes) or (isinstance(seed, np.ndarray) and seed.ndim == 0)
    return isinstance(seed, Sequence | np.ndarray) and not is_one


def checked_ids(env_ids: Sequence[int], num_envs: int) -> tuple[int, ...]:
    """Environment ids as a tuple, in the same order."""
    try:
        values = [*env_ids]
        is_mask = any(isinstance(env_id, bool | np.bool_) for env_id in values)
        ids = () if is_mask else tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"env_ids must be a sequence of integers or None, got {env_ids!r}") from None
    if is_mask:
        raise TypeError(f"env_ids must be integers, got a boolean mask, {env_ids!r}: pass np.flatnonzero(mask)")
    reason = "" if ids else "pass at least one environment id, or None for all"
    if unknown := [env_id for env_id in ids if not 0 <= env_id < num_envs]:
        reason = f"there is no environment {unknown[0]}"
    elif len(set(ids)) != len(ids):
        reason = "an id is repeated"
    if reason:
        raise ValueError(f"env_ids={[*ids]}: {reason}; there are environments 0 to {num_envs - 1}")
    return ids


def checked_options(options: Any, env_ids: Sequence[int]) -> list[Any]:
    """The options of each environment's reset, from a dict or None for all, or a list with one for each."""
    if not isinstance(options, list):
        options = [options] * len(env_ids)
    for entry in one_for_each(options, env_ids, "options"):
        if entry is not None and not isinstance(entry, Mapping):
            raise TypeError(f"options must be a dict or None, got {entry!r}")
    return options  # type: ignore[no-any-return]


def addressed(actions: Any, env_ids: Sequence[int] | None, num_envs: int) -> tuple[tuple[int, ...], Sequence[Any]]:
    """Environments and their actions, from a sequence in the order of `env_ids` or from a mapping by env id."""
    if not isinstance(actions, Mapping):
        ids = tuple(range(num_envs)) if env_ids is None else checked_ids(env_ids, num_envs)
        check_one_for_each(actions, ids)
        return ids, actions
    if not all(hasattr(env_id, "__index__") for env_id in actions):
        raise ValueError(f"expected a mapping of actions from env id to a dict by agent, got the keys {[*actions]}")
    ids = checked_ids([*actions] if env_ids is None else env_ids, num_envs)
    if actions.keys() != {*ids}:
        raise ValueError(f"env_ids={list(ids)}, but the actions are for environments {[*actions]}")
    return ids, [actions[env_id] for env_id in ids]
