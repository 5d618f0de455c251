"""Which keywords a constructor is called with: those of `seed`, `env_id` and `restarts` that it takes.

A constructor takes a keyword that its signature names. Makers that are known (`gymnasium.make`, `pettingzoo.make`,
PettingZoo's `parallel_wrapper_fn` and `aec_wrapper_fn`) pass their `**kwargs` on, so they also take `seed` where the
signature of what they call names it. `env_id` and `restarts` are ours and are not passed through makers: in other
projects' signatures these names can mean something else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs import registration

KEYWORDS = ("seed", "env_id", "restarts")
"""What constructors are offered."""

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NEVER_REQUIRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Construction(NamedTuple):
    """An environment that was made.

    Attributes:
        env: What the constructor returned.
        seeded: Whether the constructor got the seed, or had one bound by its caller.
        open: Whether the constructor has a bare `**kwargs`, so that it may take more than its signature names.
    """

    env: Any
    seeded: bool
    open: bool


def construct_one(constructor: Callable[..., Any], *, seed: int, env_id: int, restarts: int = 0) -> Any:
    """Call a constructor with those keywords that it takes, and return the environment.

    Args:
        constructor: Makes one environment.
        seed: The seed of this environment.
        env_id: The number of this environment.
        restarts: How often this environment has been restarted.

    Example:
        >>> construct_one(lambda seed, *, restarts: (seed, restarts), seed=42, env_id=0)
        (42, 0)
    """
    return call_constructor(constructor, seed=seed, env_id=env_id, restarts=restarts).env


def call_constructor(constructor: Callable[..., Any], *, seed: int, env_id: int, restarts: int = 0) -> Construction:
    """Call a constructor as `construct_one` does, and tell whether it was seeded."""
    call = _without_partials(constructor)
    taken = _taken(call, frozenset(KEYWORDS))
    offered = {"seed": seed, "env_id": env_id, "restarts": restarts}
    env = constructor(**{name: value for name, value in offered.items() if name in taken})
    parameters = _parameters(call.function, follow_wrapped=True)
    return Construction(env, "seed" in taken or _binds(call, "seed"), _passes_keywords_on(parameters))


def missing_arguments(constructor: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a constructor requires and that it is not called with.

    Example:
        >>> missing_arguments(lambda config, seed: None)
        [<Parameter "config">]
        >>> missing_arguments(functools.partial(lambda config, seed: None, {}))
        []
    """
    call = _without_partials(constructor)
    # A wrapper may fill in what it wraps, so its own signature counts.
    parameters = _parameters(call.function, follow_wrapped=False)
    return [
        parameter
        for parameter in _unfilled(parameters, call.args)
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in _NEVER_REQUIRED
        and parameter.name not in call.keywords
        and not (parameter.kind in _BY_KEYWORD and parameter.name in KEYWORDS)
    ]


class _Call(NamedTuple):
    """A function, and what is bound to its parameters."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


def _without_partials(constructor: Callable[..., Any]) -> _Call:
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(constructor, functools.partial):
        args, keywords = constructor.args + args, {**constructor.keywords, **keywords}
        constructor = constructor.func
    return _Call(constructor, args, keywords)


def _taken(call: _Call, names: frozenset[str]) -> frozenset[str]:
    """Those of the names that can be passed as keywords: what is bound stays as it is."""
    own = _parameters(call.function, follow_wrapped=False)
    taken = _named(own, call)
    if _passes_keywords_on(own):
        wrapped = _parameters(call.function, follow_wrapped=True)
        taken |= _named(wrapped, call)
        if _passes_keywords_on(wrapped) and (inner := _called_by_maker(call)) is not None:
            taken |= _taken(inner, names & {"seed"})
    return (taken & names) - call.keywords.keys()


def _named(parameters: Sequence[inspect.Parameter], call: _Call) -> frozenset[str]:
    return frozenset(one.name for one in _unfilled(parameters, call.args) if one.kind in _BY_KEYWORD)


def _binds(call: _Call, name: str) -> bool:
    """Whether the caller has bound a parameter of this name."""
    positional = [one for one in _parameters(call.function, follow_wrapped=True) if one.kind in _POSITIONAL]
    return name in call.keywords or name in [one.name for one in positional[: len(call.args)]]


def _parameters(function: Callable[..., Any], *, follow_wrapped: bool) -> list[inspect.Parameter]:
    """The parameters of a function; none where its signature cannot be read."""
    try:
        return [*inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values()]
    except (TypeError, ValueError):
        return []


def _unfilled(parameters: Sequence[inspect.Parameter], args: tuple[Any, ...]) -> list[inspect.Parameter]:
    """The parameters that positional arguments leave free."""
    positional = [one for one in parameters if one.kind in _POSITIONAL]
    return [*positional[len(args) :], *(one for one in parameters if one.kind not in _POSITIONAL)]


def _passes_keywords_on(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


# -- makers that are known ---------------------------------------------------------------------------------------------


def _called_by_maker(call: _Call) -> _Call | None:
    """What a known maker calls with its keywords; None for other functions."""
    function = inspect.unwrap(call.function)
    owner = getattr(function, "__self__", None)
    if getattr(function, "__module__", None) == "pettingzoo.utils.conversions":
        return _called_by_conversion(function)
    try:
        if function is gymnasium.make:
            return _entry_point(_gymnasium_spec(_argument(call, 0, "id")), call)
        if isinstance(owner, registration.EnvSpec) and getattr(function, "__name__", "") == "make":
            return _entry_point(owner, call)
        if function is getattr(pettingzoo, "make", None):  # from 1.26 on
            spec = _argument(call, 1, "id")
            return _entry_point(
                pettingzoo.spec(_argument(call, 0, "env_type"), spec) if isinstance(spec, str) else spec, call
            )
    except Exception:
        # An unknown id, or a module that cannot be imported: the maker raises the same when it is called.
        return None
    return None


def _called_by_conversion(function: Callable[..., Any]) -> _Call | None:
    """What the products of `parallel_wrapper_fn` and `aec_wrapper_fn` call, which only their closure holds."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return _without_partials(held[0]) if len(held) == 1 and callable(held[0]) else None


def _gymnasium_spec(env_id: Any) -> Any:
    """The `EnvSpec` that `gymnasium.make` uses; None if there is none."""
    if not isinstance(env_id, str):
        return env_id
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, stem, version = registration.parse_env_id(name)
    latest = registration.find_highest_version(namespace, stem) if version is None else None
    return registration.registry.get(name if latest is None else registration.get_env_id(namespace, stem, latest))


def _entry_point(spec: Any, call: _Call) -> _Call | None:
    """The entry point of a spec, with the keywords of the spec and of the call bound."""
    entry_point = getattr(spec, "entry_point", None)
    if isinstance(entry_point, str):
        entry_point = registration.load_env_creator(entry_point)
    if not callable(entry_point):
        return None
    bound = {name: value for name, value in spec.kwargs.items() if (name, value) != ("seed", None)}
    inner = _without_partials(entry_point)
    return inner._replace(keywords={**inner.keywords, **bound, **call.keywords})


def _argument(call: _Call, place: int, name: str) -> Any:
    return call.args[place] if len(call.args) > place else call.keywords.get(name)
