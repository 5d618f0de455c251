"""Pickling for messages between processes: values, definitions that only the caller has, and registered environments.

Some modules exist in the caller's process only: a script, a notebook, a test that was loaded from its file. Their
definitions travel by value. A worker that cannot import a module names it in a `Refusal`, and the caller then sends
it by value too. Constructors may use ids that only the caller's script registers, so the registries travel as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import time
import uuid
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from queue import Empty, SimpleQueue
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle
import gymnasium
import numpy as np
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs.registration import EnvSpec, parse_env_id

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.messages import Refusal
from marl_parallel.core.objects.classes import reduce_class
from marl_parallel.core.objects.reducers import (
    REDUCERS,
    SCRIPTS,
    CachedFunction,
    can_be_imported,
    is_by_value,
    new_cached,
    parts_of_cached,
    reduce_cached_property,
)
from marl_parallel.core.objects.script_generators import (
    is_recording,
    may_hold_generators,
    reaches,
    reduce_generator,
    reduce_process_wide,
)
from marl_parallel.core.objects.script_names import (
    complete,
    globals_in,
    is_in_globals_of,
    looks_up_names,
    names_in_annotations,
    namesakes,
    numbers,
    stand_in_of,
)
from marl_parallel.core.objects.sharing import is_shared, reduce_for_worker, reduce_in_message
from marl_parallel.core.objects.unpicklable import path_to_unpicklable
from marl_parallel.core.reports.advice import summary


def dumps(value: Any, *, with_keys: bool = True) -> bytes:
    """Pickle a value; classes and functions of a script are pickled by value.

    With `with_keys=False`, raises for proxies of `multiprocessing` that need a key.
    """
    try:
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Plain pickle is several times faster, but cannot pickle definitions of a script or inside a function.
        return dumps_by_value(value, None if with_keys else WithoutKeys)
    # Plain pickle refers to the script by name: another process may have another script, or another version of it.
    # It leaves out the keys of proxies, and takes the descriptors of connections for plain numbers.
    of_script = b"main__" in pickled and any(name.encode() in pickled for name in SCRIPTS)
    if of_script or b"multiprocessing." in pickled:
        return dumps_by_value(value, None if with_keys else WithoutKeys)
    return pickled


def dumps_by_value(value: Any, pickler: Callable[[io.BytesIO, int], pickle.Pickler] | None = None) -> bytes:
    """Pickle with cloudpickle: definitions that no other process can import are pickled by value.

    `pickler` makes a `ByValuePickler` of another class, from a file and the protocol.
    """
    # Cloudpickle would treat the script of a process spawned by multiprocessing as an importable module.
    script = sys.modules.get("__mp_main__")
    with io.BytesIO() as file, by_value([] if script is None else [script]):
        (pickler or ByValuePickler)(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def loads(pickled: bytes) -> Any:
    """Unpickle bytes that a function of this module has pickled.

    What a value raises is an `Exception`, and never ends the program: see `unpickle`.
    """
    try:  # as in `unpickle`, but without another call, since most steps with infos come here
        return pickle.loads(pickled)
    except Exception:
        raise
    except BaseException as error:
        _raise_if_of_the_value(pickle.loads, pickled, error)
        raise


T = TypeVar("T")
R = TypeVar("R")


def unpickle(load: Callable[[T], R], pickled: T) -> R:
    """Call a function that unpickles a value of a simulator.

    If the value raises a `SystemExit` or the like, this raises an `EndsTheProgram`. What a signal handler of the
    program raises meanwhile, as at Ctrl-C, is raised unchanged.
    """
    try:
        return load(pickled)
    except Exception:
        raise
    except BaseException as error:
        _raise_if_of_the_value(load, pickled, error)
        raise


def _raise_if_of_the_value(load: Callable[[T], R], pickled: T, error: BaseException) -> None:
    """Raise `EndsTheProgram` if a value raises this `BaseException`; else a signal handler has raised it."""
    if threading.current_thread() is threading.main_thread():  # in other threads, no signal handler runs
        try:
            apart(load, pickled, _ANSWERS_WITHIN_S)
            return
        except EndsTheProgram as again:
            if type(again.__cause__) is not type(error):
                return
        except Exception:  # no answer, or no thread: it may have been a signal
            return
    raise EndsTheProgram(f"it raised {summary(error)}") from error


class EndsTheProgram(pickle.UnpicklingError):
    """Raised in place of a `SystemExit` and the like, which is its cause."""


RETURNS_WITHIN_S = 30.0
"""For `apart`; a value may import a large library."""
_ANSWERS_WITHIN_S = 1.0  # after a Ctrl-C
_LONGEST_WAIT_S = 0.5


def apart(function: Callable[[T], R], argument: T, within_s: float | None = None) -> R:
    """Call a function that pickles or unpickles a value of a simulator, in a thread of its own.

    No signal handler of the program runs in that thread, so whatever is raised there comes from the value.

    Args:
        function: The function.
        argument: Its argument.
        within_s: How long to wait, in seconds; None for `RETURNS_WITHIN_S`.

    Raises:
        EndsTheProgram: The function has raised a `SystemExit` or the like.
        TimeoutError: It has not returned in time. Its thread is left behind.
        RuntimeError: No thread can be started.
        Exception: Any other exception of the function.
    """
    within_s = RETURNS_WITHIN_S if within_s is None else within_s
    outcome: SimpleQueue[tuple[R | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(argument), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="marl_parallel-pickle", daemon=True).start()
    deadline = time.monotonic() + within_s
    while True:
        try:
            # A signal just before the call into C does not interrupt it: Ctrl-C is late by this much.
            result, error = outcome.get(timeout=max(min(deadline - time.monotonic(), _LONGEST_WAIT_S), 0.0))
            break
        except Empty:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"it has not returned within {within_s:g} s") from None
    if error is None:
        return cast("R", result)
    try:
        if isinstance(error, Exception):
            raise error
        raise EndsTheProgram(f"it raised {summary(error)}") from error
    finally:
        del error  # its traceback refers to this frame


def same(one: Any, other: Any) -> bool:
    """Whether two values of the caller are equal, also with arrays inside; without a `==`, compares their pickles."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        if not one.dtype.hasobject:
            return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        return all(map(same, one.ravel().tolist(), other.ravel().tolist()))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return (
            isinstance(one, list) == isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
        )
    with contextlib.suppress(Exception):  # `==` of tensors and tables may raise anything
        if one == other:
            return True
    try:
        return dumps(one) == dumps(other)
    except Exception:  # pickle may raise anything
        return False


def _code_with_its_file(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but keep its file, so that stacks in workers name it and show its lines."""
    create, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return create, tuple([code.co_filename if one == "<dynamic-code>" else one for one in arguments])


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, except that code keeps its file, and that known classes keep their attributes.

    It also uses `reducers.py`, and marks definitions that are attributes of the script's `__main__`. `with_keys` says
    whether proxies of `multiprocessing` may carry the keys of their managers; `with_process_wide` says whether the
    generators behind `random.random` and `numpy.random.rand` become those of the process that unpickles.
    """

    with_keys: ClassVar[bool] = True
    with_process_wide: ClassVar[bool] = True

    def __init__(self, file: io.BytesIO, protocol: int, buffer_callback: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file, protocol, buffer_callback)
        self._looked_up: dict[str, LookedUp] = {}  # by module
        self._own_globals: dict[str, int] = {}  # by module: the id of the globals of its functions

    def dump(self, value: Any) -> None:
        super().dump(_Whole(value))

    def _dynamic_function_reduce(self, function: FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(function)
        own, used = function.__globals__, reduced[2][1]["__globals__"]
        used.update({name: own[name] for name in globals_in(function.__code__, in_classes=True) if name in own})
        return reduced

    def looked_up(self) -> list[tuple[str, dict[str, Any] | None, list[str] | None, list[str]]]:
        """What definitions of each module look up: the arguments of `complete`."""
        found = []
        for module_name, (names, in_signatures, every) in self._looked_up.items():
            if isinstance(module := sys.modules.get(module_name), ModuleType):
                used = [name for name in names if name in vars(module)]
                of_functions = [name for name in in_signatures if name in vars(module) and name not in names]
                if used or of_functions or every:
                    own_globals = self.globals_ref.get(self._own_globals.get(module_name))
                    found.append((module_name, own_globals, None if every else used, of_functions))
        return found

    def look_ups_of(self, module_name: str) -> LookedUp:
        """What definitions of a module look up."""
        return self._looked_up.get(module_name, LookedUp({}, {}, False))

    def _add_names(self, definition: Any) -> None:
        module_name = definition.__module__
        if not isinstance(module_name, str):
            return
        if module_name not in self._own_globals and isinstance(definition, FunctionType):
            module = sys.modules.get(module_name)
            if isinstance(module, ModuleType) and is_in_globals_of(module, definition):
                self._own_globals[module_name] = id(definition.__globals__)
        names, in_signatures, every = self.look_ups_of(module_name)
        every = every or (isinstance(definition, FunctionType) and _looks_up(definition))
        if is_by_value(module_name):  # others are local to a function: rarely are their annotations evaluated
            into = in_signatures if isinstance(definition, FunctionType) else names
            if (in_annotations := _in_annotations.get(definition)) is None:
                in_annotations = _in_annotations[definition] = [*dict.fromkeys(names_in_annotations(definition))]
            into |= dict.fromkeys(in_annotations)
        self._looked_up[module_name] = LookedUp(names, in_signatures, every)

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _code_with_its_file}, REDUCERS, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Whole:
            return _completed, (obj.value, _LookedUpByIt())
        if type(obj) is _LookedUpByIt:
            return list, (self.looked_up(),)
        if type(obj) is CachedFunction:
            return _reduce_cached(obj)
        if isinstance(obj, functools.cached_property):  # derived types, too
            return reduce_cached_property(obj)
        if isinstance(obj, ModuleType) and obj.__name__ in SCRIPTS:
            return importlib.import_module, (obj.__name__,)  # each process imports its own module
        if self.with_process_wide and (of_process := reduce_process_wide(obj)) is not None:
            return of_process
        if (generator := reduce_generator(obj)) is not None:
            return generator
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and is_shared(obj):
            return reduce_in_message(obj, with_key=self.with_keys)
        if type(reduced) is not tuple or len(reduced) != 6:
            return reduced
        create, arguments, state, items, pairs, set_state = reduced
        self._add_names(obj)
        if isinstance(obj, FunctionType):
            name = obj.__qualname__ if _found_through(obj) is obj else None
            return create, arguments, (set_state, state, name), items, pairs, _set_state_of_function
        # A class by value: a function to create it, its attributes, and a function to set them (`object.__reduce__`).
        create, arguments, state, set_state = reduce_class(obj, reduced)
        state = (set_state, state, obj.__qualname__, _found_through(obj))
        return _known_or_new, (id_of(obj), create, arguments), state, items, pairs, _set_state_of_new


# What reading a definition takes long to find; values of a script's classes may travel in each step.
_in_annotations: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
_look_ups: WeakKeyDictionary[FunctionType, tuple[CodeType, bool]] = WeakKeyDictionary()


def _looks_up(function: FunctionType) -> bool:
    code, looks_up = _look_ups.get(function, (None, False))
    if code is not function.__code__:
        code, looks_up = _look_ups[function] = function.__code__, looks_up_names(function.__code__)
    return looks_up


class LookedUp(NamedTuple):
    """The names that definitions of one module look up, apart from globals of functions."""

    names: dict[str, None]  # in annotations of classes; some may be other words
    in_signatures: dict[str, None]  # in annotations of functions
    every: bool


class _Whole(NamedTuple):
    """The value that a pickler pickles: once it is unpickled, the names that its definitions look up are added."""

    value: Any


class _LookedUpByIt(NamedTuple):
    """Pickled after the value: the names that its pickler has recorded until then."""


def _completed(value: T, looked_up: Sequence[tuple[str, dict[str, Any] | None, list[str] | None, list[str]]]) -> T:
    for one in looked_up:
        complete(*one)
    return value


class WithoutKeys(ByValuePickler):
    """For what may get into files."""

    with_keys = False


class _ForWorker(ByValuePickler):
    """For the shared objects of constructors."""

    def reducer_override(self, obj: Any) -> Any:
        return reduce_for_worker(obj) if is_shared(obj) else super().reducer_override(obj)


def dumps_shared(local_modules: Sequence[ModuleType], objects: Sequence[Any]) -> bytes:
    """Pickle the objects of a `Shared`, for workers that cannot import `local_modules`."""
    with by_value(local_modules):
        return dumps_by_value(objects, _ForWorker)


# Classes and cached functions that this process has sent or received by value.
_known: WeakValueDictionary[str, Any] = WeakValueDictionary()
_ids: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_incomplete: WeakSet[Any] = WeakSet()  # created, but without attributes so far


def id_of(definition: Any) -> str:
    """The id under which a definition travels by value."""
    known_as = _ids.setdefault(definition, uuid.uuid4().hex)
    _known[known_as] = definition
    return known_as


def known_class(known_as: str | None) -> Any:
    """The class that this process has sent or received under an id, perhaps without its attributes so far; or None."""
    return None if known_as is None else _known.get(known_as)


def _known_or_new(known_as: str, create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    definition = _known.get(known_as)
    if definition is None:
        definition = _known[known_as] = create(*arguments)
        _ids[definition] = known_as
        _incomplete.add(definition)
    return definition


def _set_state_of_new(definition: Any, state: tuple[Callable[[Any, Any], object], Any, str, Any]) -> None:
    if definition in _incomplete:
        set_state, attributes, name, found_through = state
        set_state(definition, attributes)
        _incomplete.discard(definition)
        if isinstance(definition, type):
            type.__setattr__(definition, "__qualname__", name)  # which cloudpickle drops
        if found_through is definition and (module := stand_in_of(definition.__module__)) is not None:
            setattr(module, name, definition)


def _reduce_cached(cached: Any) -> Any:
    """Reduce what `functools.lru_cache` returns to its function, which is pickled by name or by value."""
    if can_be_imported(cached):
        return cached.__qualname__
    function, parameters, attributes = parts_of_cached(cached)
    state = (_set_attributes, attributes, getattr(cached, "__qualname__", ""), _found_through(cached))
    return _known_or_new, (id_of(cached), new_cached, (function, parameters)), state, None, None, _set_state_of_new


def _set_attributes(definition: Any, attributes: Mapping[str, Any]) -> None:
    vars(definition).update(attributes)


# -- stand-ins for the script in workers -------------------------------------------------------------------------------


def _found_through(definition: Any) -> Any:
    """The attribute of this process's script by which plain pickle finds a definition; None if it cannot.

    The attribute is the definition itself, or the class around it.
    """
    path, module_name = getattr(definition, "__qualname__", None), getattr(definition, "__module__", None)
    module = sys.modules.get("__main__" if module_name in SCRIPTS else module_name or "")
    if not isinstance(path, str) or not isinstance(module, ModuleType):
        return None
    name, *more = path.split(".")
    first = found = vars(module).get(name)
    try:
        for part in more:
            found = getattr(found, part, None)
    except Exception:  # a proxy has the name now, and its attributes may raise anything
        return None
    return first if found is definition else None


def _set_state_of_function(
    function: FunctionType, state: tuple[Callable[[Any, Any], object], tuple[Any, Any], str | None]
) -> None:
    set_state, (attributes, slots), name = state
    used = dict(slots["__globals__"])
    set_state(function, (attributes, slots))
    module = stand_in_of(function.__module__)
    if module is None:
        return
    for key, value in used.items():  # constants and modules: simulators may look for them in `__main__`
        if not key.startswith("__"):  # `__file__`, for instance
            vars(module).setdefault(key, value)
    if name is not None and vars(module).setdefault(name, function) is not function:
        function.__qualname__ = f"{name}#{next(numbers)}"  # else plain pickle would refuse it
        namesakes[function.__qualname__] = function


def where_unpicklable(value: Any, pickle_part: Callable[[Any], object] = dumps_by_value) -> str:
    """A sentence that names the part of a value that cannot be pickled; empty if the part is unknown."""

    def pickles(part: Any) -> bool:
        try:
            pickle_part(part)
        except Exception:
            return False
        return True

    path = path_to_unpicklable(value, pickles)
    return f". The part that cannot be pickled is {path}" if path else ""


def path_to_generator(value: Any, generator: Any) -> str:
    """The path from a value to a generator that is pickled with it, for a message; empty if there is none."""
    return path_to_unpicklable(value, lambda part: not reaches(generator, dumps_by_value, part))


def dumps_for_workers(value: Any, what: str, local_modules: Sequence[ModuleType], *, with_keys: bool = True) -> bytes:
    """Pickle a value of the caller for workers that cannot import `local_modules`; errors name `what`.

    Files may have what is pickled `with_keys=False`.
    """
    pickler = None if with_keys else WithoutKeys
    try:
        pickled = dumps(value, with_keys=with_keys)
        by_name = any(module.__name__.encode() in pickled for module in local_modules)
        if by_name or (is_recording() and may_hold_generators(pickled)):
            with by_value(local_modules):
                return dumps_by_value(value, pickler)
        return pickled
    except Exception as error:
        where = where_unpicklable(value, functools.partial(dumps_by_value, pickler=pickler))
        text = f"{what} cannot be pickled, so it cannot be sent to the workers: {error}{where}"
        raise TypeError(text) from error


@contextlib.contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Let cloudpickle send the definitions of these modules by value; several threads may use this at a time."""
    with _registering:
        registered = cloudpickle.list_registry_pickle_by_value()
        ours = [module for module in modules if _uses[module.__name__] or module.__name__ not in registered]
        for module in ours:
            cloudpickle.register_pickle_by_value(module)
            _uses[module.__name__] += 1
    try:
        yield
    finally:
        with _registering:
            for module in ours:
                _uses[module.__name__] -= 1
                if not _uses[module.__name__]:
                    cloudpickle.unregister_pickle_by_value(module)


_registering = threading.Lock()
_uses: Counter[str] = Counter()  # of modules that are registered at present


def add_missing_modules(local_modules: list[ModuleType], results: Mapping[int, Any], what: str) -> list[int]:
    """Add to `local_modules` the modules that workers could not import; returns the environments to try again.

    Raises `ModuleNotFoundError` for a module that this process lacks too, or has sent without success.
    """
    tried, again = [*local_modules], []
    for env_id, result in results.items():
        if isinstance(result, Refusal) and result.kind is ModuleNotFoundError:
            name = result.text
            module = sys.modules.get(name)
            if module is None or module in tried:
                text = f"{what} environment {env_id} needs the module {name!r}, which cannot be imported in the worker"
                raise ModuleNotFoundError(text, name=name)
            if module not in local_modules:
                local_modules.append(module)
            again.append(env_id)
    return again


def dump_parts(value: Any, parts: Mapping[str, Any]) -> bytes:
    """Pickle a value that consists of these parts; the error names the entry that does not pickle."""
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"{_not_picklable(parts)} cannot be pickled: {error}") from error


def _not_picklable(parts: Mapping[str, Any]) -> str:
    for part, values in parts.items():
        for key, value in values.items() if isinstance(values, Mapping) else [(part, values)]:
            try:
                dumps(value)
            except Exception:
                return f"the {part} entry of {key!r} ({value!r})"
    return "what the simulator returned"


def in_order(values: dict[Any, Any], possible_agents: Sequence[AgentID]) -> dict[Any, Any]:
    """A copy with agents in the order of `possible_agents` first, then the rest as they came."""
    first = [agent for agent in possible_agents if agent in values]
    if [*values][: len(first)] == first:
        return {**values}
    return {**{agent: values[agent] for agent in first}, **values}


_GYM = "gym.envs.registration"  # OpenAI's; only a program that imports it has its registry


def dump_registrations() -> bytes:
    """Pickle the registries of Gymnasium, PettingZoo and OpenAI's gym, without specs that cannot be pickled."""
    registries = dict(_registries())
    if "gym" in registries:  # workers import gym only for ids that it does not register itself
        of_gym = registries["gym"].items()
        registries["gym"] = {env_id: spec for env_id, spec in of_gym if not _is_of_gym_itself(env_id, spec)}
    return pickle.dumps({name: dict(_pickled(specs)) for name, specs in registries.items()}, pickle.HIGHEST_PROTOCOL)


def install_registrations(pickled: bytes) -> None:
    """Register in this process the specs that `dump_registrations` has pickled in another process."""
    # A simulator that is imported later registers its environments again, each with a warning.
    warnings.filterwarnings("ignore", r".*Overriding environment ", UserWarning)
    received: Mapping[str, Mapping[str, bytes]] = pickle.loads(pickled)
    if received.get("gym"):
        with contextlib.suppress(Exception):  # this machine lacks it: a constructor that needs it names it
            importlib.import_module(_GYM)
    for name, registry in _registries():
        known = dict(_pickled(registry))
        for env_id, spec in received.get(name, {}).items():
            if known.get(env_id) == spec:
                continue
            with contextlib.suppress(Exception):  # another constructor's simulator; pettingzoo.make names a missing id
                registry[env_id] = _PickledSpec(env_id, spec) if registry is gymnasium.registry else loads(spec)


def entry_points() -> dict[str, Any]:
    """What registered environments are made by, where that is not a text."""
    found = {
        env_id: getattr(spec, "entry_point", None)
        for _, specs in _registries()
        for env_id, spec in specs.items()
        if type(spec) is not _PickledSpec
    }
    return {env_id: one for env_id, one in found.items() if callable(one)}


def _registries() -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    yield "gymnasium", gymnasium.registry
    for name in ("aec_registry", "parallel_registry"):  # older releases of PettingZoo have none
        if isinstance(registry := getattr(pettingzoo, name, None), dict):
            yield name, registry
    registry = getattr(sys.modules.get(_GYM), "registry", None)
    if isinstance(registry, dict):  # before 0.24 it is not, and a module could not register its ids once more
        yield "gym", registry


def _is_of_gym_itself(env_id: str, spec: Any) -> bool:
    """Whether OpenAI's gym registers this id when it is imported."""
    return str(spec.entry_point).startswith("gym.envs.") and f'"{env_id}"' in _ids_of_gym()


@functools.cache
def _ids_of_gym() -> str:
    """The source of the module in which OpenAI's gym registers its own ids."""
    try:
        return inspect.getsource(sys.modules["gym.envs"])
    except (OSError, TypeError):  # it comes without a source: all ids travel
        return ""


def _pickled(registry: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Each spec by its id. Definitions that no other process can import travel by value."""
    importable = functools.cache(_is_importable)
    for env_id, spec in registry.items():
        if type(spec) is _PickledSpec:
            yield env_id, spec.pickled
            continue
        module = getattr(spec.entry_point, "__module__", None) if callable(spec.entry_point) else None
        here_only = isinstance(module, str) and not importable(module)
        try:
            pickled = b"" if here_only else pickle.dumps(spec, pickle.HIGHEST_PROTOCOL)
        except Exception:  # plain pickle knows no lambdas
            pickled = b""
        if pickled and not any(name.encode() in pickled for name in SCRIPTS) and not may_hold_generators(pickled):
            yield env_id, pickled
            continue
        modules = [sys.modules[module]] if here_only and module in sys.modules else []
        with by_value(modules), contextlib.suppress(Exception):
            yield env_id, dumps_by_value(spec)


def _is_importable(module: str) -> bool:
    """Whether another process with the same `sys.path` finds a module; False for a test that was loaded by file."""
    if module in SCRIPTS:
        return True  # `dumps_by_value` sends what a script defines by value
    top = module.partition(".")[0]
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # another project's finder may fail on unknown names
            if finder.find_spec(top, None) is not None:
                return True
    return False


class _PickledSpec(EnvSpec):
    """A spec that becomes a plain `EnvSpec` once more than its id is read: unpickling may import its simulator."""

    pickled: bytes

    def __init__(self, env_id: str, pickled: bytes) -> None:
        namespace, name, version = parse_env_id(env_id)
        vars(self).update(id=env_id, namespace=namespace, name=name, version=version, pickled=pickled)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "__dict__", "id", "namespace", "name", "version", "pickled"):
            attributes = object.__getattribute__(self, "__dict__")
            spec = loads(attributes["pickled"])
            object.__setattr__(self, "__class__", EnvSpec)
            attributes.clear()
            attributes.update(vars(spec))
        return object.__getattribute__(self, name)
