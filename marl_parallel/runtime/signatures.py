"""What a constructor is given: those keywords that its signature names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def construct_one(constructor: Callable[..., Any], *, seed: int, env_id: int, restarts: int = 0) -> Any:
    """Call a constructor with as much as it asks for.

    Args:
        constructor: Makes one environment.
        seed: Offered to it.
        env_id: Likewise.
        restarts: Likewise: how often this environment has been built anew.

    Example:
        >>> construct_one(lambda seed, *, restarts: (seed, restarts), seed=42, env_id=0)
        (42, 0)
    """
    offered = {"seed": seed, "env_id": env_id, "restarts": restarts}
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):
        return constructor()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    bound = constructor.keywords if isinstance(constructor, functools.partial) else {}  # stays as it is
    return constructor(**{name: value for name, value in offered.items() if name in named and name not in bound})
