"""Pickles classes by value, with the parts that cloudpickle leaves out.

These are entries that are equal to the base's, slots, and aliases and attributes of enum members. Cloudpickle makes an
empty class and fills it afterwards. So no code of a class statement runs on the empty class: what metaclasses of a
script and `__init_subclass__` did is among the attributes. An imported base may keep a register in its module, so its
`__init_subclass__` is called on the complete class. The keywords of the class statement are not known any more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from marl_parallel.adapters.attributes import signature
from marl_parallel.core.objects.reducers import Reduced, can_be_imported

_OF_MEMBERS = ("_value_", "_name_", "__objclass__", "_sort_order_")
"""Attributes that the creation of an enum sets."""


_Parts: TypeAlias = tuple[dict[str, Any], Mapping[str, Mapping[str, Any]], Any]
"""What an empty class gets: attributes, the attributes of enum members, a base whose `__init_subclass__` is called."""


def reduce_class(cls: Any, reduced: Reduced) -> tuple[Callable[..., Any], Reduced, _Parts, Callable[[Any, Any], None]]:
    """Complete cloudpickle's reduction: how to make the empty class, with which arguments, and how to fill it."""
    create, arguments, (attributes, _) = reduced[:3]
    if issubclass(cls, Enum):
        every = cls.__members__
        values = {name: member._value_ for name, member in every.items()}
        of_members = {
            name: {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS}
            for name, member in every.items()
        }
        attributes = {name: value for name, value in attributes.items() if name not in every}
        parts: _Parts = (attributes, {name: one for name, one in of_members.items() if one}, None)
        return create, (*arguments[:3], values, *arguments[4:]), parts, _fill
    metaclass, name, bases, namespace, *more = arguments
    for key, value in vars(cls).items():
        if key not in attributes and any(vars(base).get(key, _MISSING) is value for base in cls.__bases__):
            attributes[key] = value  # cloudpickle takes it for inherited
    slots = _slots(cls)
    if slots is not None:
        namespace = {**namespace, "__slots__": cls.__slots__}
        attributes = {key: value for key, value in attributes.items() if key not in ("__slots__", *slots)}
    if issubclass(cls, tuple) and "__orig_bases__" in vars(cls):  # `NamedTuple` would make another class
        bases, namespace = cls.__bases__, {**namespace, "__orig_bases__": cls.__orig_bases__}
    maker = next(one for one in metaclass.__mro__ if can_be_imported(one) and not _is_with_keywords(one))
    arguments = (create, maker, metaclass, name, bases, namespace, *more)
    return _new_class, arguments, (attributes, {}, _registering_base(cls)), _fill


_MISSING = object()


def _slots(cls: Any) -> list[str] | None:
    """The names of the entries for `__slots__`; None if it has none, or if it was set after the class was made."""
    declared = vars(cls).get("__slots__")
    if declared is None:
        return None
    names = [declared] if isinstance(declared, str) else [*declared]
    prefix = f"_{cls.__name__.lstrip('_')}"
    hidden = [name.startswith("__") and not name.endswith("__") for name in names]
    found = [f"{prefix}{name}" if is_hidden else name for name, is_hidden in zip(names, hidden)]
    found = [name for name in found if name not in ("__dict__", "__weakref__")]
    are_real = all(isinstance(vars(cls).get(name), MemberDescriptorType) for name in found)
    return found if are_real else None


_with_keywords: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # as reading signatures is slow


def _is_with_keywords(metaclass: Any) -> bool:
    found = _with_keywords.get(metaclass)
    if found is None:
        found = _with_keywords[metaclass] = _needs_keywords(metaclass)
    return found


def _needs_keywords(metaclass: Any) -> bool:
    for name in ("__prepare__", "__new__", "__init__"):
        if isinstance(function := vars(metaclass).get(name), staticmethod | classmethod | FunctionType):
            plain: Any = getattr(function, "__func__", function)
            parameters = _parameters(plain) or ()
            if any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters):
                return True
    return False


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None if they are unknown, as those of compiled functions may be."""
    try:
        return [*signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def _registering_base(cls: Any) -> Any:
    for base in cls.__mro__[1:]:
        if "__init_subclass__" in vars(base) and can_be_imported(base):
            return None if _is_standard(base) else base
    return None


def _is_standard(cls: Any) -> bool:
    return str(cls.__module__).partition(".")[0] in sys.stdlib_module_names


# -- in the process that gets the class --------------------------------------------------------------------------------


def _new_class(create: Callable[..., Any], maker: Any, metaclass: Any, *arguments: Any) -> Any:
    return create(functools.partial(_new_without_hooks, maker, metaclass), *arguments)


def _new_without_hooks(
    maker: Any, metaclass: Any, name: str, bases: tuple[type, ...], namespace: dict[str, Any]
) -> Any:
    """Make a class as `maker`, a base of its metaclass, does."""
    with _without_init_subclass(bases):
        prepared = maker.__prepare__(name, bases)  # which `types.new_class` calls for classes only
        prepared.update(namespace)
        new = maker.__new__(metaclass, name, bases, prepared)
        maker.__init__(new, name, bases, prepared)
        return new


@contextlib.contextmanager
def _without_init_subclass(bases: tuple[type, ...]) -> Iterator[None]:
    """Keep classes that are made here from calling `__init_subclass__` of their bases; Python has no switch for it."""
    mine = (base for one in bases for base in one.__mro__ if not _is_standard(base))
    with _making:
        found = {}
        try:
            for base in mine:
                if base not in found and (method := vars(base).get("__init_subclass__")) is not None:
                    with contextlib.suppress(TypeError):  # an immutable type of compiled code
                        type.__setattr__(base, "__init_subclass__", classmethod(_do_nothing))
                        found[base] = method
            yield
        finally:
            for base, method in found.items():
                type.__setattr__(base, "__init_subclass__", method)


_making = threading.RLock()


def _do_nothing(cls: type) -> None:
    pass


def _fill(cls: Any, parts: _Parts) -> None:
    attributes, members, registering = parts
    _set_attributes(cls, attributes)
    for name, of_member in members.items():
        vars(cls.__members__[name]).update(of_member)
    for subclass in attributes.get("_abc_impl", ()):
        cls.register(subclass)
    if registering is not None and _register(vars(registering)["__init_subclass__"].__get__(None, cls)):
        _set_attributes(cls, attributes)  # as they were in the end


def _set_attributes(cls: Any, attributes: Mapping[str, Any]) -> None:
    # Not with a `__setattr__` of a metaclass, which may forbid it.
    assign: Any = type.__setattr__ if isinstance(type(cls).__setattr__, FunctionType) else setattr
    for name, value in attributes.items():
        if name not in ("_abc_impl", "__firstlineno__"):
            assign(cls, name, value)
    if "__firstlineno__" in attributes:  # last, as Python 3.13 removes it when `__module__` is set
        assign(cls, "__firstlineno__", attributes["__firstlineno__"])


def _register(init_subclass: Any) -> bool:
    """Call `__init_subclass__` unless it needs keywords of the class statement; returns whether it was called."""
    parameters = _parameters(init_subclass)
    named = [one for one in parameters or () if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if any(one.default is one.empty for one in named):
        return False
    try:
        init_subclass()
    except Exception:
        if not named and parameters is not None:
            raise
        # It may have refused the defaults of its keywords. The statement in the caller's process did not fail.
    return True
