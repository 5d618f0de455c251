"""Pickling: one way for all messages, and the order in which pickled entries join those that lay in the block.

Some modules exist in the caller's process only, such as a script, a notebook, or a test that was loaded from its file.
Their definitions travel by value. A worker that cannot import a module says so and names it. A class that
travels by value is created where it is not known yet, and left alone where it is: later changes to its attributes, and
what its methods see, are not undone.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle

from marl_parallel.adapters.protocol import AgentID

Extras: TypeAlias = dict[str, Any]
"""What does not fit into a record, by the name of the dict it belongs to."""


def dumps(value: Any) -> bytes:
    """Pickle anything that pickles at all, classes and functions of a script included."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Plain pickle is several times faster, but knows nothing that was defined in a script or a function.
        return dumps_by_value(value)


def dumps_by_value(value: Any) -> bytes:
    """Pickle with cloudpickle, which sends definitions by value that no other process can import."""
    with io.BytesIO() as file:
        ByValuePickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def loads(pickled: bytes) -> Any:
    """Unpickle what a function of this module has pickled."""
    return pickle.loads(pickled)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with one difference: classes that the reader knows stay as they are there.

    cloudpickle alone would set their attributes back to what they were when they were pickled.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or type(reduced) is not tuple or len(reduced) != 6:
            return reduced
        # A class by value: how to create it, its attributes, and how to set these (see `object.__reduce__`).
        create, arguments, state, items, pairs, set_state = reduced
        return _known_or_new, (_id_of(obj), create, arguments), (set_state, state), items, pairs, _set_state_of_new


_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
"""Classes that have travelled by value, from here or to here."""
_ids: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_incomplete: WeakSet[type] = WeakSet()
"""Classes that have been created, but have no attributes yet; still so where that has failed."""


def _id_of(kind: type) -> str:
    if kind not in _ids:
        _ids[kind] = uuid.uuid4().hex
        _classes[_ids[kind]] = kind
    return _ids[kind]


def _known_or_new(class_id: str, create: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    kind = _classes.get(class_id)
    if kind is None:
        kind = create(*arguments)
        _classes[class_id] = kind
        _ids[kind] = class_id
        _incomplete.add(kind)
    return kind


def _set_state_of_new(kind: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    if kind in _incomplete:
        set_state, attributes = state
        set_state(kind, attributes)
        _incomplete.discard(kind)


def sendable(value: Any, what: str, only_here: Sequence[ModuleType]) -> bytes:
    """Pickle something that the caller wants the workers to have.

    Args:
        value: What they are to have.
        what: That is, for the error.
        only_here: Modules that they cannot import.

    Raises:
        TypeError: It does not pickle; the text says what it is.
    """
    try:
        pickled = dumps(value)
        # Plain pickle refers to the caller's script, of which workers know only what came with the constructors.
        if any(name.encode() in pickled for name in ("__main__", *(module.__name__ for module in only_here))):
            with by_value(only_here):
                return dumps_by_value(value)
        return pickled
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled, so the workers cannot be told: {error}") from error


@contextlib.contextmanager
def by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Have cloudpickle send along, for now, what these modules define."""
    registered = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def take_along(only_here: list[ModuleType], missing: Mapping[int, str], what: str) -> None:
    """Add the modules that workers were missing to those whose definitions travel by value.

    Args:
        only_here: Those that have been so far.
        missing: By environment, the name of the module that its worker could not import.
        what: Needs it, for the error.

    Raises:
        ModuleNotFoundError: There is no such module here, or what needs it does so by value, too.
    """
    tried = [*only_here]
    for env_id, name in missing.items():
        module = sys.modules.get(name)
        if module is None or module in tried:
            raise ModuleNotFoundError(
                f"{what} environment {env_id} needs the module {name!r}, which cannot be imported in the worker",
                name=name,
            )
        if module not in only_here:
            only_here.append(module)


def dump_extras(extras: Extras) -> bytes:
    """Pickle what did not fit into the block.

    Raises:
        TypeError: Something in it does not pickle; the text says what.
    """
    try:
        return dumps(extras)
    except Exception as error:
        raise TypeError(f"{_culprit(extras)} cannot be pickled: {error}") from error


def _culprit(extras: Extras) -> str:
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
