"""`make`: a batch of environments from the name of a module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

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
        ModuleNotFoundError: There is no such module.
        AttributeError: The module has no such attribute.
        ValueError: `num_envs` is less than 1.

    Example:
        >>> with make("mpe2.simple_spread_v3", num_envs=2, env_kwargs={"N": 4}) as env:
        ...     env.num_envs, env.possible_agents
        (2, ['agent_0', 'agent_1', 'agent_2', 'agent_3'])
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    constructor = functools.partial(find_constructor(name), **(env_kwargs or {}))
    return ParallelEnv([constructor] * num_envs, **parallel_env_arguments)


def find_constructor(name: str) -> Callable[..., Any]:
    """What `module[:attribute]` stands for.

    Example:
        >>> find_constructor("gymnasium:make").__name__
        'make'
    """
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    for candidate in [attribute] if attribute else ATTRIBUTES:
        found = getattr(module, candidate, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    looked_for = repr(attribute) if attribute else ", ".join(map(repr, ATTRIBUTES))
    raise AttributeError(f"module {module_name!r} has nothing to call by the name of {looked_for}")
