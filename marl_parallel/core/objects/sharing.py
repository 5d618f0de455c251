"""Objects of `multiprocessing` that environments share: proxies of managers, locks, queues, values, connections.

    caller    Shared            the objects that a constructor holds; its pickle has their numbers
    backend   dumps_request     pickles a request with them, as `multiprocessing` does when it starts a process
    worker    loads_request     makes `Shared` again; `objects` unpickles them for one environment

A constructor is sent again with each restart, and descriptors with it: they are duplicated for each message, and the
program keeps the objects. Workers in the caller's process get the very objects. Replay files have the numbers only.

Outside constructors, proxies alone travel, as between processes of `multiprocessing` that run already.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import context, process, reduction
from typing import Any, TypeAlias

from marl_parallel.core.messages import Message, Request

Reduced: TypeAlias = tuple[Any, ...]

_KINDS = {
    ("multiprocessing.managers", "BaseProxy"),
    ("multiprocessing.synchronize", "SemLock"),
    ("multiprocessing.synchronize", "Condition"),
    ("multiprocessing.synchronize", "Event"),
    ("multiprocessing.synchronize", "Barrier"),
    ("multiprocessing.queues", "Queue"),
    ("multiprocessing.queues", "SimpleQueue"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.sharedctypes", "SynchronizedBase"),
    ("multiprocessing.heap", "Arena"),
    ("multiprocessing.process", "AuthenticationString"),
    ("socket", "socket"),
}
_PROXY = {("multiprocessing.managers", "BaseProxy")}
_SEMAPHORE = {("multiprocessing.synchronize", "SemLock")}
_ARENA = {("multiprocessing.heap", "Arena")}
CONSTRUCTING = frozenset({Message.ACCESS, Message.CONSTRUCT})
"""The requests that have constructors."""


class CannotBeShared(TypeError):
    """An object of multiprocessing cannot reach a worker; the text says why, and what to use."""


def is_shared(value: Any) -> bool:
    """Whether environments that hold a value share it with others, as processes of multiprocessing do."""
    return _is_a(value, _KINDS) or _is_raw(value)


def _is_a(value: Any, names: Collection[tuple[str, str]]) -> bool:
    """Whether a value is an instance of one of these classes, by module and name, without importing the modules."""
    return any((base.__module__, base.__name__) in names for base in type(value).__mro__)


def _is_raw(value: Any) -> bool:
    """Whether a value is a `RawValue` or `RawArray`. Their types, which are those of ctypes, have a reducer."""
    reduce = _reducers.get(type(value))
    return getattr(reduce, "__module__", None) == "multiprocessing.sharedctypes" and hasattr(value, "_wrapper")


# Of multiprocessing, and of packages that add to it, such as PyTorch.
_reducers: dict[type, Callable[[Any], Any]] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


# -- in messages -------------------------------------------------------------------------------------------------------


def reduce_in_message(value: Any, *, with_key: bool) -> Any:
    """Reduce a shared object that is not in a constructor; raises `CannotBeShared` unless it is a proxy.

    If its manager's key is not that of the program, which all workers have, the proxy carries the key; without
    `with_key`, it cannot be pickled.
    """
    kind = type(value)
    if not _is_a(value, _PROXY):
        raise CannotBeShared(
            f"a {kind.__name__} of multiprocessing reaches an environment only in the arguments of its constructor; "
            f"objects of a multiprocessing.Manager() can be handed over at any time{_SEE}"
        )
    with _spawning(_NoDescriptors()):
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    try:
        rebuild, (*arguments, keywords) = reduced
        key = keywords.pop("authkey")
    except (AttributeError, KeyError, TypeError, ValueError):  # a proxy class with a `__reduce__` of its own
        return reduced
    if key != process.current_process().authkey:
        if not with_key:
            raise CannotBeShared(
                f"a {kind.__name__} of multiprocessing whose manager has an authkey of its own can be neither in the "
                f"options of a reset nor in files, which must not have keys; hand it to the constructor{_SEE}"
            )
        keywords["authkey"] = bytes(key)
    return rebuild, (*arguments, keywords)


@contextlib.contextmanager
def _spawning(popen: Any) -> Iterator[None]:
    """Have this thread pickle as while multiprocessing starts a process."""
    before = context.get_spawning_popen()
    context.set_spawning_popen(popen)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


# -- in constructors ---------------------------------------------------------------------------------------------------


class Shared:
    """The shared objects of one constructor. Plain `pickle` takes only those that work on any machine.

    Args:
        dumps: Pickles a value by value with the reducers of `reduce_for_worker`.
    """

    def __init__(self, dumps: Callable[[Any], bytes]) -> None:
        self._dumps = dumps
        self._objects: list[Any] = []

    def reduce(self, value: Any) -> Reduced:
        """Reduce an object in the pickle of the constructor to its number."""
        self._objects.append(value)  # once: picklers remember what they have reduced
        return _numbered, (len(self._objects) - 1,)

    def __bool__(self) -> bool:
        return bool(self._objects)

    def copy(self) -> Shared:
        """The same objects, pickled anew: what is pickled once can be unpickled once only on Windows."""
        new = Shared(self._dumps)
        new._objects = self._objects
        return new

    def check(self, *, same_machine: bool) -> None:
        """Raise `CannotBeShared` if the objects cannot reach workers."""
        if sys.platform != "win32":  # where everything can, and each pickle duplicates handles
            self._pickled(_Trial() if same_machine else _NoDescriptors())

    def objects(self) -> Sequence[Any]:
        return self._objects

    def _pickled(self, popen: _NoDescriptors) -> bytes:
        with _spawning(popen):
            return self._dumps(self._objects)

    def __reduce__(self) -> Reduced:
        popen: Any = context.get_spawning_popen()
        try:
            return _Received, (self._pickled(popen if isinstance(popen, _NoDescriptors) else _NoDescriptors()), "")
        except Exception as error:  # an object that has been closed since the first construction; the worker reports it
            return _Received, (b"", _line(error))


class _Received:
    """The shared objects in a worker, or on the way to one."""

    def __init__(self, pickled: bytes, error: str) -> None:
        self._pickled, self._error = pickled, error
        self._descriptors: _Descriptors | None = getattr(_arriving, "descriptors", None)

    def objects(self) -> Sequence[Any]:
        error = self._error
        if not error:
            try:
                with _arriving_with(self._descriptors):
                    objects: Sequence[Any] = pickle.loads(self._pickled)
                    return objects
            except ModuleNotFoundError:
                raise  # the program sends the module
            except Exception as reason:
                error = _line(reason)
        raise CannotBeShared(
            f"the objects of multiprocessing in its constructor have not reached the worker: {error}. A Manager must "
            f"still run, and connections and queues must be open{_SEE}"
        )

    def __reduce__(self) -> Reduced:
        return _Received, (self._pickled, self._error)


@contextlib.contextmanager
def available(shared: Shared | _Received | None) -> Iterator[None]:
    """Within, this thread can unpickle a constructor that holds shared objects."""
    before = getattr(_available, "objects", None)
    _available.objects = None if shared is None else shared.objects()
    try:
        yield
    finally:
        _available.objects = before


def _numbered(number: int) -> Any:
    if (objects := getattr(_available, "objects", None)) is None:
        raise pickle.UnpicklingError(
            "it holds objects of multiprocessing (such as a lock, a queue, or a proxy of a Manager) of a program that "
            "is not this one"
        )
    return objects[number]


_available, _arriving = threading.local(), threading.local()


def reduce_for_worker(value: Any) -> Any:
    """Reduce a shared object as while multiprocessing starts a process; `NotImplemented` if it reduces itself.

    Raises `CannotBeShared` for those of the fork context, which only forked processes can use.
    """
    kind = type(value)
    if _is_a(value, _SEMAPHORE):
        if sys.platform != "win32" and value._semlock.name is None:
            raise CannotBeShared(
                f"a {kind.__name__} of multiprocessing's fork context, the default before Python 3.14, works in forked "
                f'processes only; use one of multiprocessing.Manager() or of multiprocessing.get_context("spawn"){_SEE}'
            )
        popen: Any = context.get_spawning_popen()
        popen.check_machine()
    elif _is_a(value, _ARENA) and hasattr(value, "fd"):
        return _new_arena, (kind, value.size, reduction.DupFd(value.fd))
    elif (reduce := _reducers.get(kind)) is not None:
        return reduce(value)
    return NotImplemented


def _new_arena(kind: Any, size: int, descriptor: _Sent) -> Any:
    """Make the memory of a `Value` or `Array`; multiprocessing's own function keeps the descriptor for ever."""
    fd = descriptor.detach()
    arena = kind(size, fd)
    weakref.finalize(arena, os.close, fd).atexit = False
    return arena


def _line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


_SEE = " (see docs/workers.md, Share data among environments)"


# -- descriptors -------------------------------------------------------------------------------------------------------


class _Sent:
    """A descriptor in a pickle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """A descriptor of this process's own."""
        descriptors: _Descriptors = _arriving.descriptors
        return os.dup(descriptors.fds[self._number])


class _NoDescriptors:
    """Stands for the `Popen` of multiprocessing while objects are pickled for a worker on any machine."""

    DupFd = _Sent

    def check_machine(self) -> None:
        raise CannotBeShared(
            'an object of multiprocessing that works on this machine only; with backend="ray", workers may be on '
            f"others, so use one of a manager, such as multiprocessing.Manager(){_SEE}"
        )

    def duplicate_for_child(self, handle: int) -> int:
        self.check_machine()
        return 0


class _Trial(_NoDescriptors):
    """For a worker on this machine, without sending anything."""

    def check_machine(self) -> None:
        """Anything works there."""


class _Outgoing(_Trial):
    """For a worker process on this machine.

    Args:
        process_handle: The handle of its process on Windows.
    """

    def __init__(self, process_handle: int | None) -> None:
        self._process_handle = process_handle
        self._numbers: dict[int, int] = {}  # by descriptor of the program
        self.fds: list[int] = []  # copies, which outlive the objects until they have been sent

    def duplicate_for_child(self, handle: int) -> int:
        """The number of a descriptor among those sent along; on Windows, the handle in the worker's process."""
        if self._process_handle is not None:
            handle_there: int = reduction.duplicate(handle, self._process_handle)  # type: ignore[attr-defined]
            return handle_there
        if handle not in self._numbers:
            self._numbers[handle] = len(self.fds)
            self.fds.append(os.dup(handle))
        return self._numbers[handle]


class _Descriptors:
    """The descriptors that came with a message, open as long as anything needs them."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = fds
        weakref.finalize(self, close_all, fds).atexit = False


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def _arriving_with(descriptors: _Descriptors | None) -> Iterator[None]:
    _arriving.descriptors = descriptors
    try:
        yield
    finally:
        _arriving.descriptors = None


def dumps_request(request: Request, process_handle: int | None = None) -> tuple[bytes, list[int]]:
    """Pickle a request for a worker process on this machine; also returns descriptors that must be sent along."""
    outgoing = _Outgoing(process_handle)
    try:
        with _spawning(outgoing):
            return pickle.dumps(request, pickle.HIGHEST_PROTOCOL), outgoing.fds
    except BaseException:
        close_all(outgoing.fds)
        raise


def loads_request(pickled: Any, fds: Sequence[int]) -> Any:
    """Unpickle a request of `dumps_request`, which takes over the descriptors that came with it."""
    with _arriving_with(_Descriptors(fds)):
        return pickle.loads(pickled)
