"""Names of the caller's script in workers: those that code looks up without naming them as a global.

    annotations    `typing.get_type_hints` evaluates their texts in the module of a class
    look-ups       `globals()[name]`, `eval(name)`, `getattr(sys.modules[__name__], name)`, `import __main__`

A worker has a stand-in for each module that it cannot import. The attributes of a stand-in are what has arrived with
constructors, and what its namespace has. A namespace travels once to each worker. Its entries are unpickled when they
are looked up, so that what no code looks up costs no time and imports no module.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import importlib.util
import inspect
import itertools
import pickle
import re
import sys
import threading
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from marl_parallel.core.objects.reducers import SCRIPTS

# -- in the process of the script --------------------------------------------------------------------------------------


def names_in_annotations(definition: Any) -> Iterator[str]:
    """What may be names in the annotations of a class or function, also in texts and in texts inside subscripts."""
    annotations: Any = None
    if isinstance(definition, type):
        annotations = vars(definition).get("__annotations__")
    if annotations is None and (sys.version_info >= (3, 14) or not isinstance(definition, type)):
        with contextlib.suppress(Exception):  # from Python 3.14 on, reading them evaluates them
            annotations = definition.__annotations__
        if annotations is None and sys.version_info >= (3, 14):
            import annotationlib

            with contextlib.suppress(Exception):
                annotations = annotationlib.get_annotations(definition, format=annotationlib.Format.STRING)
    if isinstance(annotations, Mapping):
        for annotation in annotations.values():
            yield from _names_in(annotation)


_WORD = re.compile(r"[^\W\d]\w*")


def _names_in(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        yield from _WORD.findall(annotation)
    else:
        try:
            arguments = getattr(annotation, "__args__", None)
        except Exception:  # a proxy, whose attributes may raise anything
            return
        for argument in arguments if isinstance(arguments, tuple) else ():
            yield from _names_in(argument)


_LOOK_UP = {"globals", "eval", "exec"}
_OF_MODULES = {"__main__", "modules", "import_module", "__import__", "getmodule"}


def looks_up_names(code: CodeType) -> bool:
    """Whether code may read any global of its module by its name, or find any class of it through its base."""
    names = {*code.co_names}
    if not names.isdisjoint(("__globals__", "__subclasses__")):
        return True
    if not names.isdisjoint(("__dict__", "vars")) and not names.isdisjoint(_OF_MODULES):
        return True
    if not names.isdisjoint(_LOOK_UP) and not _LOOK_UP.isdisjoint(_read_in(code)):  # else methods, as `model.eval()`
        return True
    return any(looks_up_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def globals_in(code: CodeType, *, in_classes: bool = False) -> Iterator[str]:
    """The globals that code reads, or only those in the bodies of classes within, which cloudpickle does not see."""
    if not in_classes or not code.co_flags & inspect.CO_OPTIMIZED:
        yield from _read_in(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_in(constant, in_classes=in_classes)


def _read_in(code: CodeType) -> Iterator[str]:
    return (one.argval for one in dis.get_instructions(code) if one.opname in _READ)


_READ = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")


def is_in_globals_of(module: ModuleType, function: FunctionType) -> bool:
    """Whether the globals of a function are those of a module.

    In a process that multiprocessing has spawned, functions of the script have other globals than its module. That
    module has a copy of them.
    """
    own = function.__globals__
    return own is vars(module) or (module.__name__ == "__mp_main__" and own.get("__name__") == "__mp_main__")


# -- in workers --------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A name of a module that travels in its namespace."""

    pickled: bytes
    needs: tuple[str, ...] = ()  # other names of the module: globals of its functions, names in annotations of classes
    in_signatures: tuple[str, ...] = ()  # names in the annotations of its functions
    looks_up: bool = False  # whether its functions look up names
    defined_elsewhere: bool = False  # in a module that unpickling imports
    imports: tuple[str, ...] = ()  # all modules that unpickling imports


class Namespace(NamedTuple):
    """The names of a module that workers cannot import."""

    entries: Mapping[str, Entry]
    left_out: dict[str, str]  # names that do not travel, and why
    file: str | None
    is_package: bool = False


class StandInModule(ModuleType):
    """A module of the caller that this worker process cannot import, such as its script.

    So simulators can find and pickle the classes of the script. The `__main__` of a worker has no file: a process that
    a simulator spawns must not run the caller's script.
    """

    def __getattr__(self, name: str) -> Any:
        if (function := namesakes.get(name)) is not None:
            return function
        namespace = _namespaces.get(self.__name__, _EMPTY)
        # For `inspect.getsource`, which finds the file of a class by its module.
        if name == "__file__" and sys._getframe(1).f_globals.get("__name__") == "inspect" and namespace.file:
            return namespace.file
        if name in namespace.entries:
            _load(self, namespace, [name], vars(self))
            if name in vars(self):
                return vars(self)[name]
        reason = namespace.left_out.get(name)
        why = f": the caller has it, but it does not travel to workers, as {reason}" if reason else ""
        raise AttributeError(f"module {self.__name__!r} of this worker has no attribute {name!r}{why}")

    def __dir__(self) -> Iterable[str]:
        return sorted({*vars(self), *_namespaces.get(self.__name__, _EMPTY).entries})


_EMPTY = Namespace({}, {}, None)
_namespaces: dict[str, Namespace] = {}
_loading = threading.RLock()
# The entries that are being unpickled, each with its module, and the globals of its functions.
_in_progress: list[tuple[str, str, dict[str, Any]]] = []

# Functions whose name is taken in a stand-in: each environment may have its own function of one name.
namesakes: WeakValueDictionary[str, Any] = WeakValueDictionary()
numbers = itertools.count(2)


def open_script_of_worker() -> None:
    """Give this worker process a `__main__` for the definitions of the caller's script."""
    sys.modules["__main__"] = sys.modules["__mp_main__"] = StandInModule("__main__")


def stand_in_of(module_name: str | None) -> StandInModule | None:
    """The stand-in for a module of the caller; None if this process has the module itself, or nothing."""
    module = sys.modules.get("__main__" if module_name in SCRIPTS else module_name or "")
    return module if isinstance(module, StandInModule) else None


def install_namespaces(pickled: bytes) -> None:
    """Take over the namespaces of modules that only the caller has; what has been looked up before stays."""
    received: Mapping[str, Namespace] = pickle.loads(pickled) if pickled else {}
    for name, namespace in sorted(received.items()):  # packages come before their modules
        if stand_in_of(name) is None:
            if name in SCRIPTS or _can_be_found(name):
                continue
            module = sys.modules[name] = StandInModule(name)
            if namespace.file is not None:
                module.__file__ = namespace.file
            if namespace.is_package:
                module.__path__ = []
            package, _, name_there = name.rpartition(".")
            if (around := stand_in_of(package)) is not None:
                setattr(around, name_there, module)
        _namespaces[name] = namespace


def _can_be_found(name: str) -> bool:
    """Whether this process can import a module, or at least the package around it."""
    top = name.partition(".")[0]
    if name in sys.modules or stand_in_of(top) is not None:
        return name in sys.modules
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):  # a module that a program has made
        return top in sys.modules


def complete(
    module_name: str,
    functions_globals: dict[str, Any] | None,
    names: Iterable[str] | None,
    in_signatures: Iterable[str] = (),
) -> None:
    """Add names that code looks up to the globals of its functions, and to the stand-in; with None, all names.

    Programs rarely evaluate the annotations of functions. So their names, `in_signatures`, import no library.
    """
    module = sys.modules.get("__main__" if module_name in SCRIPTS else module_name)
    if module is None:
        with contextlib.suppress(Exception):  # a module that this process can import, but that travels by value
            module = importlib.import_module(module_name)
    if isinstance(module, StandInModule):
        namespace = _namespaces.get(module.__name__, _EMPTY)
        into = vars(module) if functions_globals is None else functions_globals
        if names is None:
            names = [
                name
                for name, one in namespace.entries.items()
                if not one.defined_elsewhere or _are_imported(one.imports)
            ]
        _load(module, namespace, [*names, *_without_imports(namespace, in_signatures)], into)
    elif module is not None and functions_globals is not None:
        for name in [*vars(module)] if names is None else [*names, *in_signatures]:
            if not name.startswith("__") and name in vars(module):
                functions_globals.setdefault(name, vars(module)[name])


def _are_imported(modules: Iterable[str]) -> bool:
    return all(one in sys.modules for one in modules)


def _without_imports(namespace: Namespace, names: Iterable[str]) -> list[str]:
    """The names whose unpickling imports no module that this process has not imported yet."""

    def is_without(name: str) -> bool:
        pending, seen = [name], set[str]()
        while pending:
            one = pending.pop()
            entry = namespace.entries.get(one)
            if one not in seen and entry is not None:
                seen.add(one)
                pending += entry.needs
                if not _are_imported(entry.imports):
                    return False
        return True

    return [name for name in names if is_without(name)]


def _load(module: StandInModule, namespace: Namespace, names: Iterable[str], into: dict[str, Any]) -> None:
    own, pending = vars(module), [*names]
    with _loading:
        while pending:
            name = pending.pop()
            if name in into or name in own:
                value = into.setdefault(name, own.get(name)) if name in own else into[name]
                own.setdefault(name, value)
                continue
            if (entry := namespace.entries.get(name)) is None or name in namespace.left_out:
                continue
            _in_progress.append((module.__name__, name, into))
            try:
                value = pickle.loads(entry.pickled)
            except Exception as error:  # such as a missing library
                namespace.left_out[name] = f"it cannot be unpickled here ({type(error).__name__}: {error})"
                continue
            finally:
                _in_progress.pop()
            into.setdefault(name, value)
            own.setdefault(name, value)
            pending += [*entry.needs, *_without_imports(namespace, entry.in_signatures)]
            if entry.looks_up:
                complete(module.__name__, into, None)


def globals_here() -> dict[str, Any]:
    """The globals of the functions of the entry that is being unpickled."""
    return _in_progress[-1][2]


def named(module_name: str, name: str, known: Any) -> Any:
    """The value of another name, in the pickle of an entry.

    `known` is the class that the name stands for, if this process has it; it may lack its attributes so far.
    """
    if any(one[:2] == (module_name, name) for one in _in_progress):  # the two refer to each other
        if known is None:
            raise LookupError(f"{name!r} and what it refers to refer to each other")
        return known
    module = stand_in_of(module_name)
    assert module is not None
    into = globals_here()
    _load(module, _namespaces[module_name], [name], into)
    if name not in into:
        raise LookupError(_namespaces[module_name].left_out.get(name, f"{name!r} is missing"))
    return into[name]


class ModuleOnDemand(ModuleType):
    """A module that is imported once one of its attributes is read; so are its submodules."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        submodule = f"{self.__name__}.{name}"
        if not hasattr(module, name) and hasattr(module, "__path__") and importlib.util.find_spec(submodule):
            importlib.import_module(submodule)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def module_on_demand(name: str) -> ModuleType:
    """The module if this process has imported it, or the package around it."""
    if name.rpartition(".")[0] in sys.modules:
        return importlib.import_module(name)
    return sys.modules.get(name) or ModuleOnDemand(name)
