"""Environments that share objects of `multiprocessing` with the program and with each other.

A `Kind` makes an object, says how an environment leaves its number in it, and how the program takes the numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Listener
from multiprocessing.managers import BaseManager, BaseProxy, SyncManager
from multiprocessing.sharedctypes import RawArray
from threading import Thread
from typing import Any, NamedTuple

from simulators.counting import Counting

KEY = b"a key of its own"
FORK, SPAWN, FORKSERVER = map(multiprocessing.get_context, ("fork", "spawn", "forkserver"))
ROOM = 128
WITHIN_S = 10.0


class Sharing(Counting):
    """Leaves its number in all shared objects in its constructor."""

    def __init__(self, shared: dict[str, Any], *, seed: int, env_id: int) -> None:
        super().__init__(4, seed=seed)
        self.shared, self.env_id = shared, env_id
        self.put()

    def put(self) -> None:
        for name, value in self.shared.items():
            KINDS[name].put(value, self.env_id)

    def put_in(self, name: str, value: Any) -> None:
        """Leave the number in an object that is handed over later."""
        KINDS[name].put(value, self.env_id)


class Kind(NamedTuple):
    make: Callable[[Shelf], Any]
    put: Callable[[Any, int], object]
    take: Callable[[Any, int], list[int]]  # at least so many; all that there are, if they do not go
    at_any_time: bool = True  # whether it can be handed over after the constructor


class Shelf(contextlib.ExitStack):
    """What has to be closed, and a manager with the program's key."""

    _manager: SyncManager | None = None

    @property
    def manager(self) -> SyncManager:
        if self._manager is None:
            self._manager = self.enter_context(multiprocessing.Manager())
        return self._manager

    def all(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """An object of each kind."""
        return {name: KINDS[name].make(self) for name in names or KINDS}


def numbers_in(shared: dict[str, Any], count: int) -> dict[str, list[int]]:
    """The numbers in each object, sorted."""
    return {name: sorted(KINDS[name].take(value, count)) for name, value in shared.items()}


# -- kinds -------------------------------------------------------------------------------------------------------------


class Board:
    """What a custom manager serves."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def write(self, number: int) -> None:
        self._numbers.append(number)

    def read(self) -> list[int]:
        return [*self._numbers]


class BoardProxy(BaseProxy):
    def write(self, number: int) -> None:
        self._callmethod("write", (number,))

    def read(self) -> Any:
        return self._callmethod("read")


class Boards(BaseManager):
    """A custom manager."""


Boards.register("Board", Board)
Boards.register("Other", Board, BoardProxy, ("write", "read"))


def in_list(make: Callable[[Any], Any], get: Callable[[Any], Any] = lambda value: value) -> Kind:
    """A list of a manager."""
    return Kind(
        lambda shelf: make(shelf.manager),
        lambda value, env_id: get(value).append(env_id),
        lambda value, _: [*get(value)],
    )


def in_queue(make: Callable[[Any], Any], *, at_any_time: bool = True) -> Kind:
    return Kind(make, lambda value, env_id: value.put(env_id), taken, at_any_time)


def taken(source: Any, count: int) -> list[int]:
    return [source.get(timeout=WITHIN_S) for _ in range(count)]


def under_lock(make: Callable[[Shelf], Any], *, at_any_time: bool = False) -> Kind:
    """A lock, and an array that has none: how many numbers there are, and the numbers."""

    def put(value: Any, env_id: int) -> None:
        lock, array = value
        with lock:
            array[0] += 1
            array[array[0]] = env_id

    return Kind(make, put, lambda value, _: value[1][1 : 1 + value[1][0]], at_any_time)


def synchronized(make: Callable[[], Any]) -> Kind:
    return under_lock(lambda _: (make(), RawArray("i", ROOM)))


def in_array(make: Callable[[], Any]) -> Kind:
    def put(array: Any, env_id: int) -> None:
        with array.get_lock():
            array[0] += 1
            array[array[0]] = env_id

    return Kind(lambda _: make(), put, lambda array, _: array[1 : 1 + array[0]], False)


def put_when_set(value: Any, env_id: int) -> None:
    event, array = value
    assert event.wait(WITHIN_S)
    KINDS["spawn Array"].put(array, env_id)


def set_event(context: Any) -> Any:
    event = context.Event()
    event.set()
    return event


def put_digit(value: Any, env_id: int) -> None:
    with value.get_lock():
        value.value += 10**env_id


def digits(value: Any, _: int) -> list[int]:
    return [env_id for env_id, digit in enumerate(reversed(str(value.value))) for _ in range(int(digit))]


class Numbers(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("numbers", ctypes.c_int * ROOM))


def put_in_structure(value: Any, env_id: int) -> None:
    with value.get_lock():
        value.numbers[value.count] = env_id
        value.count += 1


def put_alone(barrier: Any, array: Any, env_id: int) -> None:
    assert barrier.wait(WITHIN_S) == 0
    KINDS["spawn Array"].put(array, env_id)


def served(shelf: Shelf, authkey: bytes | None) -> Any:
    """The address of a listener with the program's key, and the numbers that it has received."""
    listener = shelf.enter_context(Listener(authkey=multiprocessing.current_process().authkey))
    numbers = shelf.manager.list()

    def serve() -> None:
        while True:
            with listener.accept() as connection:
                if (number := connection.recv()) is None:
                    return
                numbers.append(number)
                connection.send(True)

    def stop() -> None:
        with Client(listener.address, authkey=multiprocessing.current_process().authkey) as connection:
            connection.send(None)
        thread.join()

    thread = Thread(target=serve)
    thread.start()
    shelf.callback(stop)
    return listener.address, authkey, numbers


def put_by_client(value: Any, env_id: int) -> None:
    address, authkey, _ = value
    with Client(address, authkey=authkey or multiprocessing.current_process().authkey) as connection:
        connection.send(env_id)
        assert connection.recv()


def pipe(context: Any, *, duplex: bool) -> Kind:
    def take(ends: Any, count: int) -> list[int]:
        return [ends[0].recv() for _ in range(count) if ends[0].poll(WITHIN_S)]

    def make(shelf: Shelf) -> Any:
        return [shelf.enter_context(end) for end in context.Pipe(duplex)]

    return Kind(make, lambda ends, env_id: ends[1].send(env_id), take, False)


def simple_queue(make: Callable[[], Any]) -> Kind:
    def take(value: Any, count: int) -> list[int]:
        return [value.get() for _ in range(count)]

    return Kind(lambda _: make(), lambda value, env_id: value.put(env_id), take, False)


def socket_pair(shelf: Shelf) -> Any:
    return [shelf.enter_context(end) for end in socket.socketpair()]


def take_bytes(ends: Any, count: int) -> list[int]:
    ends[0].settimeout(WITHIN_S)
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += ends[0].recv(ROOM)
    return numbers


def board(make: Callable[[Any], Any], address: Any = None) -> Kind:
    """A custom manager with a key of its own."""

    def started(shelf: Shelf) -> Any:
        manager = Boards(address, KEY, ctx=FORK)
        manager.start()
        shelf.callback(manager.shutdown)
        return make(manager)

    return Kind(started, lambda value, env_id: value.write(env_id), lambda value, _: value.read())


KINDS = {
    "Manager Queue": in_queue(lambda shelf: shelf.manager.Queue()),
    "Manager JoinableQueue": in_queue(lambda shelf: shelf.manager.JoinableQueue()),
    "Manager list": in_list(lambda manager: manager.list()),
    "Manager dict": in_list(lambda manager: manager.dict(a=manager.list()), lambda value: value["a"]),
    "Manager nested": in_list(lambda manager: manager.list([manager.dict(a=manager.list())]), lambda one: one[0]["a"]),
    "Manager Namespace": in_list(
        lambda manager: manager.Namespace(numbers=manager.list()), lambda value: value.numbers
    ),
    "Manager Lock": under_lock(
        lambda shelf: (shelf.manager.Lock(), shelf.manager.Array("i", [0] * ROOM)), at_any_time=True
    ),
    "Manager Condition": under_lock(
        lambda shelf: (shelf.manager.Condition(), shelf.manager.Array("i", [0] * ROOM)), at_any_time=True
    ),
    "custom manager": board(lambda manager: manager.Board()),
    "custom manager and proxy": board(lambda manager: manager.Other()),
    "custom manager on a port": board(lambda manager: manager.Board(), ("127.0.0.1", 0)),
    "Client": Kind(lambda shelf: served(shelf, None), put_by_client, lambda value, _: [*value[2]]),
    "Client with the key": Kind(
        lambda shelf: served(shelf, multiprocessing.current_process().authkey),
        put_by_client,
        lambda value, _: [*value[2]],
        False,
    ),
    "spawn Lock": synchronized(SPAWN.Lock),
    "spawn RLock": synchronized(SPAWN.RLock),
    "spawn Semaphore": synchronized(SPAWN.Semaphore),
    "spawn BoundedSemaphore": synchronized(SPAWN.BoundedSemaphore),
    "spawn Condition": synchronized(SPAWN.Condition),
    "forkserver Lock": synchronized(FORKSERVER.Lock),
    "spawn Event": Kind(
        lambda _: (set_event(SPAWN), SPAWN.Array("i", ROOM)),
        put_when_set,
        lambda value, _: value[1][1 : 1 + value[1][0]],
        False,
    ),
    "spawn Barrier": Kind(
        lambda _: (SPAWN.Barrier(1), SPAWN.Array("i", ROOM)),
        lambda value, env_id: put_alone(*value, env_id),
        lambda value, _: value[1][1 : 1 + value[1][0]],
        False,
    ),
    "spawn Array": in_array(lambda: SPAWN.Array("i", ROOM)),
    "forkserver Array": in_array(lambda: FORKSERVER.Array("i", ROOM)),
    "spawn Value": Kind(lambda _: SPAWN.Value("q", 0), put_digit, digits, False),
    "spawn Value of a structure": Kind(
        lambda _: SPAWN.Value(Numbers), put_in_structure, lambda value, _: value.numbers[: value.count], False
    ),
    "spawn Queue": in_queue(lambda _: SPAWN.Queue(), at_any_time=False),
    "spawn JoinableQueue": in_queue(lambda _: SPAWN.JoinableQueue(), at_any_time=False),
    "forkserver Queue": in_queue(lambda _: FORKSERVER.Queue(), at_any_time=False),
    "spawn SimpleQueue": simple_queue(SPAWN.SimpleQueue),
    "Pipe": pipe(multiprocessing, duplex=False),
    "duplex Pipe": pipe(SPAWN, duplex=True),
    "socket": Kind(socket_pair, lambda ends, env_id: ends[1].sendall(bytes([env_id])), take_bytes, False),
}
