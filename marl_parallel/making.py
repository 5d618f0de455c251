"""`make`: a batch of environments from the name of a module."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium

from marl_parallel.arguments import at_least_one, check_signature
from marl_parallel.parallel_env import ParallelEnv

ATTRIBUTES = ("parallel_env", "env", "raw_env")
"""What is looked for in a module, in this order, where no attribute is named."""


def make(
    name: str, num_envs: int = 1, env_kwargs: Mapping[str, Any] | None = None, **parallel_env_arguments: Any
) -> ParallelEnv:
    """Make `num_envs` copies of an environment, stepped side by side.

    Args:
        name: `module` or `module:attribute`; the attribute makes an environment when called.
        num_envs: How many copies.
        env_kwargs: Keywords for each copy's constructor.
        parallel_env_arguments: For `ParallelEnv`.

    Raises:
        ModuleNotFoundError: There is no such module, or `name` is that of a file.
        AttributeError: The module has no such attribute.
        TypeError: `name` is no text, `env_kwargs` is no mapping, or `ParallelEnv` takes no such argument.
        ValueError: `num_envs` is less than 1, or `name` is empty.

    Example:
        >>> with make("mpe2.simple_spread_v3", num_envs=2, env_kwargs={"N": 4}) as env:
        ...     env.num_envs, env.possible_agents
        (2, ['agent_0', 'agent_1', 'agent_2', 'agent_3'])
    """
    at_least_one(num_envs, "num_envs")
    if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
        raise TypeError(f"env_kwargs must be a dict of keywords for each copy's constructor, got {env_kwargs!r}")
    unknown = [key for key in parallel_env_arguments if key not in inspect.signature(ParallelEnv).parameters]
    if unknown:
        raise TypeError(f"ParallelEnv takes no argument {unknown[0]!r}; what is for each copy goes into env_kwargs")
    constructor = functools.partial(find_constructor(name), **(env_kwargs or {}))
    check_signature(constructor, name, "make(..., env_kwargs=dict({}))")
    return ParallelEnv([constructor] * num_envs, **parallel_env_arguments)


def find_constructor(name: str) -> Callable[..., Any]:
    """What `module[:attribute]` stands for.

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
        raise ModuleNotFoundError(f"{error}{_instead(module_name)}", name=error.name) from None
    for candidate in [attribute] if attribute else ATTRIBUTES:
        found = getattr(module, candidate, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    looked_for = repr(attribute) if attribute else ", ".join(map(repr, ATTRIBUTES))
    raise AttributeError(f"module {module_name!r} has nothing to call by the name of {looked_for}")


def _instead(name: str) -> str:
    """What may have been meant by the name of a module that is not there."""
    above, _, last = name.rpartition(".")
    if name in gymnasium.registry:
        return f"; for Gymnasium's {name}, pass 'gymnasium:make' with env_kwargs={{'id': {name!r}}}"
    return f"; a function of a module is named '{above}:{last}'" if above else ""
