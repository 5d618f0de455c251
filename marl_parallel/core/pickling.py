"""Pickling for messages between processes: values, definitions that only the caller has, and registered environments.

Some modules exist in the caller's process only: a script, a notebook, a test that was loaded from its file. Their
definitions travel by value. A worker that cannot import a module names it in a `Refusal`, and the caller sends it by
value too. Constructors may use ids that only the caller's script registers, so the registries travel as well.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
import uuid
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import CodeType, ModuleType
from typing import Any, ClassVar, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle
import gymnasium
import numpy as np
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs.registration import EnvSpec, parse_env_id

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.messages import Refusal

Extras: TypeAlias = dict[str, Any]
"""Values that do not fit into a record, by the name of their dict."""


def dumps(value: Any) -> bytes:
    """Pickle any value that can be pickled, classes and functions of a script included."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Plain pickle is several times faster, but knows nothing that was defined in a script or a function.
        return dumps_by_value(value)


def dumps_by_value(value: Any, pickler: type[pickle.Pickler] | None = None) -> bytes:
    """Pickle with cloudpickle: by value, where no other process can import a definition."""
    with io.BytesIO() as file:
        (pickler or ByValuePickler)(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def loads(pickled: bytes) -> Any:
    """Unpickle the bytes of a function of this module."""
    return pickle.loads(pickled)


def same(one: Any, other: Any) -> bool:
    """Whether two values of the caller's are equal, with arrays in them too; values without a `==` by their pickles."""
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
    with contextlib.suppress(Exception):  # whatever `==` of tensors and tables raises
        if one == other:
            return True
    try:
        return dumps(one) == dumps(other)
    except Exception:  # whatever pickle raises
        return False


def _code_with_its_file(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but keep its file, so that stacks in workers name it and show its lines."""
    create, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return create, tuple([code.co_filename if one == "<dynamic-code>" else one for one in arguments])


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, except that code keeps its file, and that known classes keep their attributes."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or type(reduced) is not tuple or len(reduced) != 6:
            return reduced
        # A class by value: how to create it, its attributes, and how to set these (see `object.__reduce__`).
        create, arguments, state, items, pairs, set_state = reduced
        class_id = _ids.setdefault(obj, uuid.uuid4().hex)
        _classes[class_id] = obj
        return _known_or_new, (class_id, create, arguments), (set_state, state), items, pairs, _set_state_of_new


# Classes that have travelled by value, from here or to here.
_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
_ids: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_incomplete: WeakSet[type] = WeakSet()  # created, but without attributes so far


def _known_or_new(class_id: str, create: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    kind = _classes.get(class_id)
    if kind is None:
        kind = _classes[class_id] = create(*arguments)
        _ids[kind] = class_id
        _incomplete.add(kind)
    return kind


def _set_state_of_new(kind: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    if kind in _incomplete:
        set_state, attributes = state
        set_state(kind, attributes)
        _incomplete.discard(kind)


def dumps_for_workers(value: Any, what: str, local_modules: Sequence[ModuleType]) -> bytes:
    """Pickle a value of the caller's for workers that cannot import the modules `local_modules`; errors name `what`."""
    try:
        pickled = dumps(value)
        # Plain pickle refers to the caller's script, of which workers know only what came with the constructors.
        if any(name.encode() in pickled for name in ("__main__", *(module.__name__ for module in local_modules))):
            with by_value(local_modules):
                return dumps_by_value(value)
        return pickled
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled, so it cannot be sent to the workers: {error}") from error


@contextlib.contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Let cloudpickle send the definitions of these modules by value."""
    registered = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def add_missing_modules(local_modules: list[ModuleType], results: Mapping[int, Any], what: str) -> list[int]:
    """Add to `local_modules` the modules that workers could not import; returns the environments to try again.

    Raises `ModuleNotFoundError` for a module that is not here either, or has been sent without success.
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


def dump_extras(extras: Extras) -> bytes:
    """Pickle extras; the error names the entry that does not pickle."""
    try:
        return dumps(extras)
    except Exception as error:
        raise TypeError(f"{_not_picklable(extras)} cannot be pickled: {error}") from error


def _not_picklable(extras: Extras) -> str:
    for part, values in extras.items():
        for key, value in values.items() if isinstance(values, Mapping) else [(part, values)]:
            try:
                dumps(value)
            except Exception:
                return f"the {part} entry of {key!r} ({value!r})"
    return "what the simulator returned"


def in_order(values: dict[Any, Any], possible_agents: Sequence[AgentID]) -> dict[Any, Any]:
    """The same entries: agents in the order of `possible_agents` first, then the rest as they came."""
    first = {agent: values[agent] for agent in possible_agents if agent in values}
    return first | {key: value for key, value in values.items() if key not in first}


def dump_registrations() -> bytes:
    """Pickle the registries of Gymnasium and PettingZoo, without specs that cannot be pickled."""
    return pickle.dumps({name: dict(_pickled(specs)) for name, specs in _registries()}, pickle.HIGHEST_PROTOCOL)


def install_registrations(pickled: bytes) -> None:
    """Register in this process the specs that `dump_registrations` pickled in another."""
    # A simulator that is imported later registers its environments again, with a warning for each.
    warnings.filterwarnings("ignore", r".*Overriding environment .* in (the \w+ )?registry", UserWarning)
    received: Mapping[str, Mapping[str, bytes]] = pickle.loads(pickled)
    for name, registry in _registries():
        known = dict(_pickled(registry))
        for env_id, spec in received.get(name, {}).items():
            if known.get(env_id) == spec:
                continue
            with contextlib.suppress(Exception):  # the simulator of another constructor: pettingzoo.make names the id
                registry[env_id] = _PickledSpec(env_id, spec) if registry is gymnasium.registry else loads(spec)


def _registries() -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    yield "gymnasium", gymnasium.registry
    for name in ("aec_registry", "parallel_registry"):  # older releases of PettingZoo have none
        if isinstance(registry := getattr(pettingzoo, name, None), dict):
            yield name, registry


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
        if pickled and b"__main__" not in pickled:
            yield env_id, pickled
            continue
        modules = [sys.modules[module]] if here_only and module in sys.modules else []
        with by_value(modules), contextlib.suppress(Exception):
            yield env_id, dumps_by_value(spec)


def _is_importable(module: str) -> bool:
    """Whether another process with the same `sys.path` finds a module; not so a test that was loaded by file."""
    if module == "__main__":
        return True  # cloudpickle sends what a script defines by value
    top = module.partition(".")[0]
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a finder of another project may fail on names that are not its own
            if finder.find_spec(top, None) is not None:
                return True
    return False


class _PickledSpec(EnvSpec):
    """A spec that becomes a plain `EnvSpec` when more than its id is read: that may import its simulator."""

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
