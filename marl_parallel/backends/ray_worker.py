"""What runs in a Ray actor: takes requests as they are called, has its `Worker` carry them out, returns parcels.

What must outlive the actor's process lies in files without a name: the ledger, the block, what has been said so far,
and the stack of a crash. `ray_warden.py` on the same node opens them too. The driver's side is `ray_backend.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from marl_parallel.backends import descendants, interpreter
from marl_parallel.backends.memory import Block, anonymous_file
from marl_parallel.backends.stacks import report_to
from marl_parallel.core.layout import Layout
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Reply, Request
from marl_parallel.core.parcels import WITH_ACTIONS, WITH_RESULTS, Parcels
from marl_parallel.core.worker import Worker

_LARGE = 1 << 20


class Files(NamedTuple):
    """Descriptors, in the actor's process.

    Attributes:
        ledger: Its memory.
        block: That of the records.
        said: Replies to the request that is being carried out, pickled one after the other behind its number.
        crash: Where `faulthandler` writes.
    """

    ledger: int
    block: int
    said: int
    crash: int


class Greeting(NamedTuple):
    """What a worker tells of itself.

    Attributes:
        node: The id of the node it is on.
        now: That machine's clock, in seconds of `time.monotonic`.
        pid: Its process.
        marker: What that process, and what it starts, can be recognised by.
        files: What it shares with the warden.
    """

    node: str
    now: float
    pid: int
    marker: str
    files: Files


class Parcel(NamedTuple):
    """What comes back from a worker.

    Attributes:
        replies: In order; all but the last of the request have something to say beyond the block.
        ledger: The bytes of the worker's ledger.
        results: As of `Parcels.results`; None where nothing has been written.
    """

    replies: list[Reply]
    ledger: bytes
    results: NDArray[Any] | None


Packed: TypeAlias = bytes | tuple[bytes, NDArray[Any]]


def packed(parcel: Parcel) -> Packed:
    """A parcel as Ray carries it fastest: all in one string of bytes, or what is large beside it, without a copy."""
    if parcel.results is None or parcel.results.nbytes < _LARGE:
        return pickle.dumps(tuple(parcel), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((parcel.replies, parcel.ledger), pickle.HIGHEST_PROTOCOL), parcel.results


def unpacked(told: Packed) -> Parcel:
    """What was `packed`."""
    if isinstance(told, bytes):
        return Parcel(*pickle.loads(told))
    replies, ledger = pickle.loads(told[0])
    return Parcel(replies, ledger, told[1])


class RayWorker:
    """The actor.

    Args:
        share: Its environments.
        num_threads: BLAS, OpenMP and torch threads; None leaves them alone.
        token: Of whoever has started it, for the marker.
        path: Where modules are found by whoever has started it; what is here too is looked through last.
    """

    def __init__(self, share: range, num_threads: int | None, token: str, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path and os.path.exists(folder)]
        self._share = share
        self._files = Files(*(anonymous_file(f"marl_parallel-{name}") for name in Files._fields))
        os.ftruncate(self._files.ledger, Ledger.NBYTES)
        self._memory = Block(os.dup(self._files.ledger), Ledger.NBYTES)
        self._parcels: Parcels | None = None
        self._worker = Worker(Ledger(self._memory.buffer), self._attach, own_process=True)
        self._marker = descendants.marker_value(token, os.getpid())
        os.environ[descendants.MARKER] = self._marker
        report_to(self._files.crash)
        if num_threads is not None:
            os.environ.update(interpreter.thread_variables(num_threads))
            interpreter.limit_loaded_libraries(num_threads)

    def greet(self) -> Greeting:
        """Who it is; the first thing it is asked."""
        import ray

        return Greeting(
            ray.get_runtime_context().get_node_id(), time.monotonic(), os.getpid(), self._marker, self._files
        )

    def execute(self, order: bytes) -> Packed:
        """Carry out a request whose replies may come together.

        Args:
            order: The request's number among all that the worker has had, the request, and the actions, as of
                `Parcels.actions`, or None; pickled, since Ray itself would take several times as long over it.
        """
        number, request, actions = pickle.loads(order)
        replies: list[Reply] = []
        said = False

        def send(reply: Reply) -> None:
            nonlocal said
            replies.append(reply)
            if not reply.last:
                self._say([reply], number, begin=not said)
                said = True

        self._unpack(request, actions)
        self._worker.execute(request, send)
        return self._packed(request, replies)

    def each(self, order: bytes) -> Iterator[Packed]:
        """Carry out a request that each environment is to be replied for as soon as it is done; as `execute`."""
        number, request, actions = pickle.loads(order)
        self._unpack(request, actions)
        env_ids = self._of(request)
        for place, env_id in enumerate(env_ids):
            own = request._replace(env_ids=(env_id,))
            replies: list[Reply] = []
            self._worker.execute(own, replies.append)
            if not replies:
                return  # nobody waits for it any more
            if place + 1 < len(env_ids):
                replies[-1] = replies[-1]._replace(last=False)
            self._say(replies, number, begin=place == 0)
            yield self._packed(own, replies)

    def _attach(self, layout: Layout) -> Any:
        os.ftruncate(self._files.block, layout.nbytes)
        buffer = Block(os.dup(self._files.block), layout.nbytes).buffer
        self._parcels = Parcels(layout, buffer)
        return buffer

    def _of(self, request: Request) -> Any:
        return self._share if request.env_ids is None else request.env_ids

    def _unpack(self, request: Request, actions: NDArray[Any] | None) -> None:
        if actions is not None and self._parcels is not None and request.message in WITH_ACTIONS:
            self._parcels.put_actions(self._of(request), actions)

    def _packed(self, request: Request, replies: list[Reply]) -> Packed:
        results = None
        if self._parcels is not None and request.message in WITH_RESULTS:
            results = self._parcels.results(self._of(request), request.message)
        return packed(Parcel(replies, bytes(self._memory.buffer), results))

    def _say(self, replies: list[Reply], number: int, *, begin: bool) -> None:
        """Leave what is said where it is found if this process dies before it is heard."""
        if begin:
            os.ftruncate(self._files.said, 0)
            os.lseek(self._files.said, 0, os.SEEK_SET)
            os.write(self._files.said, pickle.dumps(number))
        for reply in replies:
            os.write(self._files.said, pickle.dumps(reply))


def what_was_said(said: bytes) -> tuple[int, list[Reply]]:
    """The number of the request, and the replies to it; what is torn at the end is left out."""
    heard: list[Any] = []
    file = io.BytesIO(said)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            heard.append(pickle.load(file))
    return (heard[0], heard[1:]) if heard else (-1, [])
