"""Calls constructors in workers: which keywords they get, and whether these seed their environments.

A constructor gets each of the keywords `seed`, `env_id` and `restarts` that is one of its parameters. Known makers,
such as `gymnasium.make`, pass `**kwargs` on, so they get `seed` too if the function that they call has that parameter.
They do not get `env_id` and `restarts`, since these names can mean something else in other projects' functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import gymnasium
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs import registration

from marl_parallel.adapters import attributes as lookup
from marl_parallel.core.messages import Seeding

Constructor = Callable[..., Any]
KEYWORDS = {"seed", "env_id", "restarts"}
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Wrapped:
    """A constructor whose environments are wrapped, in this order; it accepts the keywords of the inner one."""

    constructor: Constructor
    wrappers: tuple[Callable[[Any], Any], ...]

    def __call__(self, **keywords: Any) -> Any:
        env = self.constructor(**keywords)
        for index, wrapper in enumerate(self.wrappers):
            env = wrapper(env)
            if env is None:
                raise TypeError(f"wrappers[{index}], {wrapper!r}, returned None; does it lack a `return`?")
        return env


def construct_one(constructor: Constructor, *, seed: int | None, env_id: int) -> Any:
    """Call a constructor with the keywords that it accepts, and return the environment."""
    return call_constructor(constructor, {"seed": seed, "env_id": env_id, "restarts": 0})[0]


def call_constructor(constructor: Constructor, keywords: Mapping[str, int | None]) -> tuple[Any, Seeding]:
    """Call a constructor with the keywords that it accepts and that are not None.

    Returns the environment, and how a seed reached the constructor.
    """
    call = _flattened(constructor)
    passed = {name: value for name, value in keywords.items() if value is not None}
    accepted = _accepted(call, KEYWORDS) & passed.keys()
    env = constructor(**{name: passed[name] for name in accepted})
    free, all_of_them = (_parameters(one, follow_wrapped=True) for one in (call, functools.partial(call.func)))
    bound = call.keywords.keys() | ({one.name for one in all_of_them} - {one.name for one in free})
    return env, Seeding("seed" in accepted, "seed" in bound, _is_open(free))


def missing_arguments(constructor: Constructor, passed: Collection[str] = KEYWORDS) -> list[Parameter]:
    """The required parameters of a constructor that stay without an argument if these keywords are `passed`."""
    call = _flattened(constructor)
    return [
        one
        for one in _parameters(call, follow_wrapped=False)  # a wrapper may fill in parameters itself
        if one.default is Parameter.empty
        and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and one.name not in call.keywords
        and not (one.kind in _BY_KEYWORD and one.name in passed)
    ]


def _flattened(constructor: Constructor) -> functools.partial[Any]:
    """One partial with all arguments that nested partials bind to a function.

    `functools` does not flatten nested partials that have attributes.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(constructor, functools.partial | Wrapped):
        if isinstance(constructor, Wrapped):
            constructor = constructor.constructor
            continue
        args, keywords = constructor.args + args, {**constructor.keywords, **keywords}
        constructor = constructor.func
    return functools.partial(constructor, *args, **keywords)


def _parameters(call: functools.partial[Any], *, follow_wrapped: bool) -> list[Parameter]:
    """The parameters that no positional argument fills; none if the signature cannot be read."""
    try:
        parameters = lookup.signature(call.func, follow_wrapped=follow_wrapped).parameters.values()
    except (TypeError, ValueError):
        return []
    filled = [one for one in parameters if one.kind in _POSITIONAL][: len(call.args)]
    return [one for one in parameters if one not in filled]


def _is_open(parameters: Iterable[Parameter]) -> bool:
    return any(one.kind is Parameter.VAR_KEYWORD for one in parameters)


def _accepted(call: functools.partial[Any], names: set[str]) -> set[str]:
    """The names that can be passed as keywords and are not bound."""
    parameters = _parameters(call, follow_wrapped=False)
    accepted: set[str] = set()
    if _is_open(parameters):
        wrapped = _parameters(call, follow_wrapped=True)
        parameters += wrapped
        if _is_open(wrapped) and (maker_calls := _called_by_maker(call)) is not None:
            accepted = _accepted(maker_calls, {"seed"})
    accepted |= {one.name for one in parameters if one.kind in _BY_KEYWORD}
    return (accepted & names) - call.keywords.keys()


def _called_by_maker(call: functools.partial[Any]) -> functools.partial[Any] | None:
    """The function that a known maker calls, with all keywords bound that it passes; None for other functions."""
    function = inspect.unwrap(call.func)
    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **call.keywords}
    if getattr(function, "__module__", None) == "pettingzoo.utils.conversions":
        # The results of `parallel_wrapper_fn` and `aec_wrapper_fn` call another function, found only in their closure.
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        return _flattened(cells[0]) if len(cells) == 1 and callable(cells[0]) else None
    owner, spec = getattr(function, "__self__", None), None
    try:
        if function is gymnasium.make:
            spec = _gymnasium_spec(arguments.get(0, arguments.get("id")))
        elif isinstance(owner, registration.EnvSpec) and getattr(function, "__name__", "") == "make":
            spec = owner
        elif function is getattr(pettingzoo, "make", None):  # from 1.27 on
            kind, spec = arguments.get(0, arguments.get("env_type")), arguments.get(1, arguments.get("id"))
            spec = pettingzoo.spec(kind, spec) if isinstance(spec, str) else spec
        entry_point = getattr(spec, "entry_point", None)
        if isinstance(entry_point, str):
            entry_point = registration.load_env_creator(entry_point)
    except Exception:
        # An unknown id, or a module that cannot be imported: the call of the maker raises the same error.
        return None
    if not callable(entry_point):
        return None
    bound = {name: value for name, value in getattr(spec, "kwargs", {}).items() if name != "seed" or value is not None}
    return _flattened(functools.partial(entry_point, **{**bound, **call.keywords}))


def _gymnasium_spec(env_id: Any) -> Any:
    """The `EnvSpec` that `gymnasium.make` uses; None if it finds none."""
    if not isinstance(env_id, str):
        return env_id
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, stem, version = registration.parse_env_id(name)
    latest = registration.find_highest_version(namespace, stem) if version is None else None
    return registration.registry.get(name if latest is None else registration.get_env_id(namespace, stem, latest))
