"""Pickles by value some objects that Python pickles by name or cannot pickle, such as those of `functools.lru_cache`.

The definitions of a script travel by value. A decorated function that is an object implemented in C would travel as a
name, which no other process can look up in its own `__main__`. So it is taken apart: the function that it wraps, and
the parameters. Its cached results stay here.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

Reduced: TypeAlias = tuple[Any, ...]

SCRIPTS = ("__main__", "__mp_main__")
"""The names of the module of a script: `__mp_main__` in processes that multiprocessing's spawn has started."""

CachedFunction: type = type(functools.lru_cache(maxsize=1)(lambda: None))


def can_be_imported(definition: Any) -> bool:
    """Whether another process finds a definition by module and name; False for one that travels by value."""
    module_name, path = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(path, str) or is_by_value(module_name):
        return False
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is definition


def is_by_value(module_name: str) -> bool:
    """Whether the definitions of a module travel by value."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    parts = module_name.split(".")
    return module_name in SCRIPTS or any(".".join(parts[: count + 1]) in by_value for count in range(len(parts)))


def parts_of_cached(cached: Any) -> tuple[Callable[..., Any], Mapping[str, Any], dict[str, Any]]:
    """The function that `functools.lru_cache` wraps, its parameters, and the attributes of the wrapper."""
    attributes = {name: value for name, value in vars(cached).items() if name != "cache_parameters"}
    # `functools.update_wrapper` may have replaced `__wrapped__`; then only the garbage collector finds the function.
    referents = [one for one in gc.get_referents(cached) if callable(one)]
    function = next((one for one in referents if one is attributes.get("__wrapped__")), None)
    if function is None:
        function = [one for one in referents if not isinstance(one, type)][-1]
    return function, cached.cache_parameters(), attributes


def new_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """An empty `functools.lru_cache` around a function."""
    return functools.lru_cache(**parameters)(function)


def reduce_cached_property(value: functools.cached_property[Any]) -> Reduced:
    """Reduce a cached property, which has a lock until Python 3.11."""
    attributes = {name: one for name, one in vars(value).items() if name != "lock"}
    return _new_cached_property, (type(value), attributes, "lock" in vars(value))


def _new_cached_property(kind: Any, attributes: Mapping[str, Any], has_lock: bool) -> Any:
    new = kind.__new__(kind)
    vars(new).update(attributes, **({"lock": threading.RLock()} if has_lock else {}))
    return new


def _reduce_ufunc(ufunc: np.ufunc) -> Any:
    """Reduce ufuncs of `numpy.frompyfunc` (and `numpy.vectorize`), whose names no module has."""
    function = next((one for one in gc.get_referents(ufunc) if callable(one)), None)
    if not ufunc.__name__.endswith(" (vectorized)") or function is None:
        return copyreg.dispatch_table[np.ufunc](ufunc)  # NumPy's ufuncs: by name
    return _new_ufunc, (function, ufunc.nin, ufunc.nout, ufunc.identity)


def _new_ufunc(function: Callable[..., Any], nin: int, nout: int, identity: Any) -> Any:
    return np.frompyfunc(function, nin, nout, **({} if identity is None else {"identity": identity}))


def _reduce_key(key: Any) -> Reduced:
    """Reduce a result of `functools.cmp_to_key`, or the key that such a result makes of one object."""
    compare = next(one for one in gc.get_referents(key) if callable(one) and not isinstance(one, type))
    return _new_key, (compare, *([key.obj] if hasattr(key, "obj") else []))


def _new_key(compare: Callable[[Any, Any], int], *compared: Any) -> Any:
    key: Any = functools.cmp_to_key(compare)
    return key(*compared) if compared else key


def _reduce_weak_dict(weak: Any) -> Reduced:
    return type(weak), (dict(weak),)


def _reduce_new_type(new_type: Any) -> Any:
    """Reduce a `typing.NewType`, which annotations refer to."""
    if can_be_imported(new_type):
        return new_type.__qualname__
    return _new_type, (new_type.__name__, new_type.__supertype__, new_type.__module__)


def _new_type(name: str, supertype: Any, module: str) -> Any:
    create: Any = typing.NewType
    new = create(name, supertype)
    new.__module__ = module
    return new


def _reduce_type_parameter(parameter: Any) -> Any:
    """Reduce a `typing.ParamSpec` or `TypeVarTuple`; cloudpickle knows only `TypeVar`."""
    return parameter.__name__ if _is_in_module(parameter) else (type(parameter), (parameter.__name__,))


def _reduce_alias(alias: Any) -> Any:
    """Reduce a `type Name = ...` of Python 3.12."""
    return alias.__name__ if _is_in_module(alias) else (type(alias), (alias.__name__, alias.__value__))


def _is_in_module(definition: Any) -> bool:
    """Whether another process finds a definition without a `__qualname__` by module and name."""
    module = sys.modules.get(definition.__module__)
    return definition.__module__ not in SCRIPTS and getattr(module, definition.__name__, None) is definition


REDUCERS: dict[type, Callable[[Any], Any]] = {
    functools.cached_property: reduce_cached_property,
    np.ufunc: _reduce_ufunc,
    type(functools.cmp_to_key(lambda one, other: 0)): _reduce_key,
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
}
"""By type, for a pickler's `dispatch_table`."""
for _name, _reduce in (("TypeVarTuple", _reduce_type_parameter), ("TypeAliasType", _reduce_alias)):
    if hasattr(typing, _name):  # from Python 3.11 and 3.12 on
        REDUCERS[getattr(typing, _name)] = _reduce
