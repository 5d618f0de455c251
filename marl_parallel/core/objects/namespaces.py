"""Pickles the namespaces of the script and of other modules that workers cannot import: what code looks up by name.

Functions, classes and modules travel, and constants of types whose pickling has no effects and takes little time.
Everything else could be huge, open or bound to this process: it travels only with the code that names it as a global.
A function or class that uses such a value does not travel in the namespace either, as it would lack it.
"""

from __future__ import annotations

import enum
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, UnionType
from typing import Any, NamedTuple, cast

import cloudpickle
import gymnasium
import numpy as np

from marl_parallel.core.objects import script_names
from marl_parallel.core.objects.pickling import ByValuePickler, by_value, id_of, known_class
from marl_parallel.core.objects.reducers import can_be_imported
from marl_parallel.core.objects.script_generators import OfSpace, PlainGenerator
from marl_parallel.core.objects.script_names import Entry, Namespace
from marl_parallel.core.objects.sharing import is_shared

_LARGEST = 1 << 17
"""Bytes of one entry."""
_LARGEST_SUM = 1 << 22
"""Bytes of all entries of a module."""


def dump_namespaces(pickles: Sequence[bytes], local_modules: Sequence[ModuleType]) -> bytes:
    """Pickle the namespaces of the modules that pickles refer to, and that workers cannot import."""
    script = sys.modules.get("__mp_main__")
    with by_value([*local_modules, *([] if script is None else [script])]):
        names = {"__main__", *cloudpickle.list_registry_pickle_by_value()} - {"__mp_main__"}
        modules = {}
        for name, module in [*sys.modules.items()]:
            parents = [name[:index] for index, character in enumerate(name) if character == "."]
            if _is(module, ModuleType) and not names.isdisjoint([name, *parents]):
                used_as = b"main__" if name == "__main__" else name.encode()
                if any(used_as in one for one in pickles):
                    modules[name] = _namespace(name, module)
    return pickle.dumps(modules, pickle.HIGHEST_PROTOCOL) if modules else b""


def _namespace(module_name: str, module: ModuleType) -> Namespace:
    values = {name: value for name, value in [*vars(module).items()] if not name.startswith("__")}
    names = {id(value): name for name, value in values.items()}
    names |= {id(value): name for name, value in values.items() if _is_definition(value) and value.__qualname__ == name}

    @functools.cache
    def submodules(package: str) -> list[str]:
        """The submodules that are imported here, by their names inside the package."""
        return [one[len(package) + 1 :] for one in [*sys.modules] if one.startswith(f"{package}.")]

    entries, left_out, needed = dict[str, Entry](), dict[str, str](), dict[str, set[str]]()
    picklers = dict[str, _EntryPickler]()
    for name, value in values.items():
        file = _Limited()
        pickler = _EntryPickler(file, module_name, module, values, names, submodules, name)
        try:
            cloudpickle.Pickler.dump(pickler, value)
        except _Stays as error:
            left_out[name] = str(error)
            continue
        except Exception as error:  # pickle may raise anything
            left_out[name] = f"it cannot be pickled ({error})"
            continue
        needed[name], picklers[name] = pickler.needs | pickler.may_need, pickler
        look_ups = pickler.look_ups_of(module.__name__)
        uses = {*needed[name], *(one for one in look_ups.names if one in values)} - {name}
        in_signatures = {one for one in look_ups.in_signatures if one in values} - uses - {name}
        entries[name] = Entry(
            file.getvalue(), tuple(sorted(uses)), tuple(sorted(in_signatures)), look_ups.every,
            _is_definition(value) and can_be_imported(value), tuple(sorted(pickler.imports)),
        )  # fmt: skip
    size = 0
    for name in sorted(entries, key=lambda name: len(entries[name].pickled)):
        size += len(entries[name].pickled)
        if size > _LARGEST_SUM:
            del entries[name]
            left_out[name] = f"the names of the module are larger than {_LARGEST_SUM >> 20} MiB together"
    positions = {name: position for position, name in enumerate(values)}
    while lacking := [name for name in entries if not needed[name] <= entries.keys()]:
        for name in lacking:
            pickler = picklers[name]
            exactly = {
                one for code in pickler.codes for one in script_names.globals_in(code) if one in values
            }  # this is slow
            needed[name] = pickler.needs | exactly
            if missing := needed[name] - entries.keys():
                first = min(missing, key=positions.__getitem__)
                del entries[name]
                left_out[name] = f"it uses {first!r}, and {left_out[first]}"
    file_name = getattr(module, "__file__", None)
    file_name = os.path.abspath(file_name) if isinstance(file_name, str) else None
    return Namespace(entries, left_out, file_name, is_package="__path__" in vars(module))


def _is(value: Any, kinds: type | UnionType) -> bool:
    """`isinstance`, without reading `__class__`: attributes of proxies may raise, import, or connect to something."""
    return issubclass(type(value), kinds)


def _is_definition(value: Any) -> bool:
    return _is(value, type | FunctionType)


class _Stays(Exception):
    """The value does not travel; the text says why."""


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST:
            raise _Stays(f"it is larger than {_LARGEST >> 10} KiB")
        return super().write(data)


class _EntryPickler(ByValuePickler):
    """Pickles one value of a module; refers to the other values by their names.

    `module_name` is what workers call the module: the script is `__main__` there, also if it is `__mp_main__` here.

    Attributes:
        needs: The names of these values.
        may_need: Names of globals of functions; some are names of attributes only.
        codes: The code of the functions.
        imports: The modules of definitions that are pickled by name.
    """

    with_keys = False

    def __init__(
        self,
        file: io.BytesIO,
        module_name: str,
        module: ModuleType,
        values: Mapping[str, Any],
        names: Mapping[int, str],
        submodules: Callable[[str], Sequence[str]],
        name: str,
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._module_name, self._module, self._values, self._names = module_name, module, values, names
        self._name = name
        self._submodules = submodules
        self.needs: set[str] = set()
        self.may_need: set[str] = set()
        self.codes: list[CodeType] = []
        self.imports: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Globals:
            return script_names.globals_here, ()
        if type(obj) is PlainGenerator:
            return pickle.loads, (pickle.dumps(obj),)
        if type(obj) is OfSpace:
            return super().reducer_override(obj)
        if _is(obj, ModuleType):
            if obj.__name__ not in sys.modules:
                raise _Stays(f"workers cannot import the module {obj.__name__!r}")
            return script_names.module_on_demand, (obj.__name__,)
        is_definition = _is_definition(obj)
        name = self._names.get(id(obj), self._name)
        is_imported = (is_definition or _is(obj, BuiltinFunctionType)) and can_be_imported(obj)
        if is_imported:
            self.imports.add(obj.__module__)
        if name != self._name and not (is_definition and is_imported):
            self.needs.add(name)
            return _named, (self._module_name, name, id_of(obj) if isinstance(obj, type) else None)
        if not is_definition and not self._is_plain(obj):
            raise _Stays(f"a {type(obj).__module__}.{type(obj).__qualname__} travels only with code that names it")
        return super().reducer_override(obj)

    def _is_plain(self, value: Any) -> bool:
        """Whether pickling a value has no effects, takes little time and runs no method of the script."""
        if is_shared(value) or _is(value, io.IOBase):  # cloudpickle reads files
            return False
        if _is(value, np.ndarray) and value.nbytes > _LARGEST:
            return False
        kind = type(value)
        for base in kind.__mro__:
            for name in _PICKLING & vars(base).keys():
                method_of = getattr(vars(base)[name], "__module__", None) or base.__module__
                if not _is_of(method_of, _WITHOUT_EFFECTS):
                    return False
        script = self._module.__name__
        is_of_script = any(base.__module__ == script for base in kind.__mro__)
        return is_of_script or _is(value, gymnasium.Space | enum.Enum) or _is_of(kind.__module__, _PLAIN)

    def _dynamic_function_reduce(self, function: Any) -> Any:
        """As cloudpickle does, but without the globals, and faster: it searches all modules for each function."""
        if not script_names.is_in_globals_of(self._module, function):
            return super()._dynamic_function_reduce(function)
        create, _, (_, slots), items, pairs, set_state = super()._dynamic_function_reduce(
            cast("FunctionType", _empty_function)
        )
        used = [name for name in _names_of(function.__code__) if name in self._values]
        self.may_need.update(used)
        self.codes.append(function.__code__)
        attributes = {*function.__code__.co_names}
        submodules = [
            sys.modules[f"{package.__name__}.{more}"]
            for name in used
            if _is(package := self._values[name], ModuleType)
            for more in self._submodules(package.__name__)
            if attributes.issuperset(more.split("."))
        ]
        slots = {name: getattr(function, name, None) for name in slots}
        slots |= {"__globals__": {}, "_cloudpickle_submodules": submodules}
        cells = None if function.__closure__ is None else tuple([CellType() for _ in function.__closure__])
        arguments = (function.__code__, _Globals(), None, None, cells)
        return create, arguments, ({**vars(function)}, slots), items, pairs, set_state


def _names_of(code: CodeType) -> Iterator[str]:
    """The names of globals in code, and of attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _empty_function() -> None:
    pass


class _Globals(NamedTuple):
    """Stands for the globals of the module."""


def _is_of(module_name: str, packages: Collection[str]) -> bool:
    package = module_name.partition(".")[0]
    if package in packages or package.lstrip("_") in packages:  # `collections` has classes of `_collections`
        return True
    return module_name.startswith("gymnasium.spaces.")


_PICKLING = {
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__getattr__",
}  # fmt: skip
_WITHOUT_EFFECTS = {
    "abc", "array", "builtins", "collections", "copyreg", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "inspect", "ipaddress", "itertools", "numpy", "operator", "pathlib", "random", "re", "string", "types",
    "typing", "uuid", "weakref", "zoneinfo",
}  # fmt: skip
"""Packages whose own methods for pickling make no more than a value."""
_PLAIN = {*sys.stdlib_module_names, "numpy"}
"""Packages whose objects are plain if `object` pickles them, or cannot be pickled."""


def _named(module_name: str, name: str, known_as: str | None) -> Any:
    return script_names.named(module_name, name, known_class(known_as))
