"""`drop_in`: a facade in place of a trainer's own class or function, which takes constructors of environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.settings import Settings

FacadeT = TypeVar("FacadeT")


def drop_in(
    name: str,
    constructors: Sequence[Callable[..., Any]],
    options: Mapping[str, Any],
    build: Callable[[ParallelEnv], FacadeT],
    *,
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any] = MappingProxyType({}),
    reason: str = "",
) -> FacadeT:
    """Open a `ParallelEnv` and build its facade; if that raises, the `ParallelEnv` is closed.

    Args:
        name: What the caller has called, for errors.
        constructors: One for each environment.
        options: The arguments of `ParallelEnv` that the caller has passed.
        build: Makes the facade of the `ParallelEnv`.
        defaults: For arguments that the caller has not passed. With threads, the default of `isolate_rng` is False:
            they cannot have generators of their own.
        fixed: Arguments that the trainer requires; the caller may not pass them.
        reason: Why it requires them.

    Raises:
        TypeError: An option is one of `fixed`, or not an argument of `ParallelEnv`.
        TypeError, ValueError, ParallelEnvError: As in `ParallelEnv`, or in `build`.
    """
    for option in fixed:
        if option in options:
            raise TypeError(f"{name} takes no {option}=: {reason}")
    if options.get("backend") == "thread":
        defaults = {**defaults, "isolate_rng": False}
    return facade_of(ParallelEnv(constructors, **Settings.of({**defaults, **options, **fixed}, name)), build)


def facade_of(env: ParallelEnv, build: Callable[[ParallelEnv], FacadeT]) -> FacadeT:
    """The facade that `build` makes; if it raises, the environment is closed."""
    try:
        return build(env)
    except BaseException:
        env.close()
        raise
