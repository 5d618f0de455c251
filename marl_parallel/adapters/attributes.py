"""Looking attributes up on a simulator, through its wrappers and conversions: functions on an arbitrary object."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from numbers import Integral
from typing import Any

LINKS = ("env", "aec_env", "par_env", "unwrapped")
_ABSENT = object()


def layers(source: Any) -> Iterator[Any]:
    """Yield an object and the environments beneath it, outermost first and each once.

    Only links that an object holds itself are followed, not those that a wrapper forwards, so that the order
    is that of the wrapping. What has no `step` is not an environment and is left out.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make("CartPole-v1", disable_env_checker=True)
        >>> [type(layer).__name__ for layer in layers(env)]
        ['TimeLimit', 'OrderEnforcing', 'CartPoleEnv']
    """
    # The objects themselves are kept: an id is unique only while its object lives.
    seen: dict[int, Any] = {}
    waiting = [source]
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen[id(layer)] = layer
        yield layer
        beneath = (declared(layer, link) for link in reversed(LINKS) if owns(layer, link))
        waiting.extend(inner for inner in beneath if callable(declared(inner, "step")))


def owns(layer: Any, name: str) -> bool:
    """Whether an object or its type defines the attribute, rather than forwards it to another object."""
    return inspect.getattr_static(layer, name, _ABSENT) is not _ABSENT


def declared(source: Any, name: str, default: Any = None) -> Any:
    """The value of an optional attribute, seen through Gymnasium's wrappers; the default if there is none."""
    try:
        through_wrappers = getattr(source, "get_wrapper_attr", None)
        return getattr(source, name) if through_wrappers is None else through_wrappers(name)
    except Exception:  # a property may raise anything while its simulator is not ready: it is as good as absent
        return default


def find(source: Any, name: str) -> Any:
    """The value of an attribute of the outermost layer that has it.

    Raises:
        AttributeError: No layer has it. The text names all layers.
    """
    failure: AttributeError | None = None
    for layer in layers(source):
        try:
            return getattr(layer, name)
        except AttributeError as error:
            failure = failure or error
    raise AttributeError(f"{_nobody_has(source, name)}: {failure}") from failure


def has(source: Any, name: str) -> bool:
    """Whether any layer has the attribute, which is not called."""
    try:
        find(source, name)
    except AttributeError:
        return False
    return True


def is_a(source: Any, module: str, name: str) -> bool:
    """Whether an object is of a class, given by its name and its module or package, so that neither is imported."""
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{module}.") for base in type(source).__mro__
    )


def is_wrapped(source: Any, kind: tuple[str, str]) -> bool:
    """Whether any layer is of a class, given by module and name, so that nobody has to import it for this."""
    return any((base.__module__, base.__qualname__) == kind for layer in layers(source) for base in type(layer).__mro__)


def assign(source: Any, name: str, value: Any) -> None:
    """Set an attribute on the outermost layer that owns it; a wrapper that merely forwards it is passed by.

    Raises:
        AttributeError: No layer owns it, or those that do let it be read only.
    """
    owners = [layer for layer in layers(source) if owns(layer, name)]
    if not owners:
        raise AttributeError(f"{_nobody_has(source, name)}, so it cannot be set")
    for layer in owners:
        definition = inspect.getattr_static(layer, name)
        if not isinstance(definition, property) or definition.fset is not None:
            setattr(layer, name, value)
            return
    raise AttributeError(f"{name!r} of {type(owners[0]).__name__} is a property that can only be read")


def declared_seed(source: Any) -> int | None:
    """The seed that the innermost environment says it uses; None if its `seed` is a method or absent."""
    seed = declared(declared(source, "unwrapped", source), "seed")
    return int(seed) if isinstance(seed, Integral) and not isinstance(seed, bool) else None


def _nobody_has(source: Any, name: str) -> str:
    outermost, *inner = [type(layer).__name__ for layer in layers(source)]
    beneath = f", nor has anything beneath it ({', '.join(inner)})" if inner else ""
    return f"{outermost} has no attribute {name!r}{beneath}"
