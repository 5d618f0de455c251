"""Finds the part of a value that cannot be pickled: the globals, attributes and arguments that lead to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from marl_parallel.core.objects.reducers import CachedFunction, parts_of_cached

_LONGEST_PATH = 8


def path_to_unpicklable(
    value: Any,
    pickles: Callable[[Any], bool],
    attributes_of: Callable[[Any], Mapping[str, Any] | None] = lambda _: None,
) -> str:
    """The path to the innermost part that cannot be pickled, for an error message: "global 'config', attribute 'lock'".

    Empty if that part is the value itself, or too deep inside. `attributes_of` returns the attributes of an object
    whose attributes are all pickled, even if its class pickles only some.
    """
    path: list[str] = []
    seen = [value]  # which keeps their ids
    while len(path) <= _LONGEST_PATH:
        known = attributes_of(value)
        for label, part in _parts(value) if known is None else _attributes(known):
            if all(part is not one for one in seen):
                seen.append(part)
                if not pickles(part):
                    path.append(label)
                    value = part
                    break
        else:
            kind = type(value).__name__
            return f"{', '.join(path)} ({kind})" if path else ""
    return ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts that are pickled together with a value, each with a name."""
    if isinstance(value, FunctionType):
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield f"global {name!r} of {value.__name__}", value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield from ((f"variable {name!r} of {value.__name__}", one) for one in _content(cell))
        defaults, code = value.__defaults__ or (), value.__code__
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, default in {**dict(zip(names, defaults)), **(value.__kwdefaults__ or {})}.items():
            yield f"default argument {name!r} of {value.__name__}", default
        yield from _attributes(vars(value))
    elif isinstance(value, MethodType):
        yield f"the object of its method {value.__name__}", value.__self__
        yield f"method {value.__name__!r}", value.__func__
    elif isinstance(value, functools.partial):
        yield from _labelled("argument", dict(enumerate(value.args)))
        yield from _labelled("argument", value.keywords)
        yield "its function", value.func
    elif isinstance(value, CachedFunction):
        yield "its function", parts_of_cached(value)[0]
    elif isinstance(value, staticmethod | classmethod):
        yield "its function", value.__func__
    elif isinstance(value, property):
        for function in (value.fget, value.fset, value.fdel):
            yield "its function", function
    elif isinstance(value, type):
        yield from _attributes(vars(value), suffix=f" of class {value.__name__}")
        for base in value.__bases__:
            yield f"base class {base.__name__}", base
    elif isinstance(value, dict):
        yield from _labelled("entry", value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _labelled("item", dict(enumerate(value)))
    else:
        yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # this object cannot be pickled
        return
    if not isinstance(reduced, tuple):
        return
    states = reduced[2] if len(reduced) > 2 else None
    for state in states if isinstance(states, tuple) else (states,):  # attributes, those in `__slots__`
        if isinstance(state, Mapping):
            yield from _attributes(state)
        elif state is not None:
            yield "its state", state
    for part in reduced[1]:
        yield f"class {part.__name__}" if isinstance(part, type) else "its state", part


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function within
            yield from _names(constant)


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _attributes(attributes: Mapping[Any, Any], suffix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if name not in ("__dict__", "__weakref__"):  # which are not pickled
            yield f"attribute {name!r}{suffix}", value


def _labelled(kind: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{kind} {key!r}", value
