"""What travels pickled: the one way it is pickled, and the order in which it joins what lay in the block.

Some modules exist in the caller's process only, such as a script, a notebook, or a test that was loaded from its file.
What they define travels by value. That a worker cannot import one is found out by trying: it refuses, and names it.
Such a class is made where it is not known yet, and left alone where it is: what its attributes are by now, and what
its methods see, is the matter of those who use it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakSet

import cloudpickle
from cloudpickle import cloudpickle as internals

from marl_parallel.adapters.protocol import AgentID

Extras: TypeAlias = dict[str, Any]
"""What does not fit into a record, by the name of the dict it belongs to."""


def dumps(value: Any) -> bytes:
    """Pickle anything that pickles at all, classes and functions of a script included."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Plain pickle is several times faster, but knows nothing that was defined in a script or a function.
        return bytes(cloudpickle.dumps(value))


def loads(pickled: bytes) -> Any:
    """Make again what `dumps` or `sendable` has pickled."""
    if len(pickled) < _SHORT and _BY_VALUE not in pickled:
        return pickle.loads(pickled)
    return _Unpickler(io.BytesIO(pickled)).load()


_BY_VALUE = internals.__name__.encode()
_SHORT = 4000  # to look through more takes longer than to do without


class _Unpickler(pickle.Unpickler):
    """Leaves classes that travelled by value as they are where they are known: cloudpickle would set them back."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module != internals.__name__:
            return found
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return _noting_new_ones(found)
        return _filling_new_ones(found) if name == "_class_setstate" else found


_unfilled: WeakSet[type] = WeakSet()
"""Classes that have been made, but have no attributes yet; still so after a failure half-way."""


def _noting_new_ones(make: Callable[..., type]) -> Callable[..., type]:
    def made(*given: Any) -> type:
        *_, tracked_as, _ = given
        known = tracked_as in internals._DYNAMIC_CLASS_TRACKER_BY_ID
        kind = make(*given)
        if not known:
            _unfilled.add(kind)
        return kind

    return made


def _filling_new_ones(fill: Callable[[type, Any], type]) -> Callable[[type, Any], type]:
    def filled(kind: type, state: Any) -> type:
        if kind in _unfilled:
            fill(kind, state)
            _unfilled.discard(kind)
        return kind

    return filled


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
                return bytes(cloudpickle.dumps(value))
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
