"""One worker in a Ray actor, as the driver knows it: what it was asked, what has come back, how it ended.

Which workers there are, and waiting for any of them, is the business of `ray_backend.py`.
"""

from __future__ import annotations

import pickle
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from marl_parallel.backends.ray_cluster import Connection
from marl_parallel.backends.ray_warden import Remains
from marl_parallel.backends.ray_worker import Greeting, Packed, Parcel, unpacked, what_was_said
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.parcels import WITH_ACTIONS, Parcels
from marl_parallel.core.reports import logger

_ANSWERED_WITHIN_S = 5.0  # by a warden, which has nothing else to do


@dataclass
class Asked:
    """A request on its way.

    Attributes:
        number: Of all that the worker was asked.
        request: What it was.
        answer: An `ObjectRef` of one `Parcel`, or a generator of several.
        heard: How many replies have come.
    """

    number: int
    request: Request
    answer: Any
    heard: int = 0


class RayHost:
    """One worker.

    Args:
        actor: Its handle.
        share: Its environments.
        connection: Where the wardens are.
        runtime_env: Of its warden, if there is none yet.

    Attributes:
        ledger: What it was doing when it was last heard of, or looked at.
        lost: How it ended, once it has.
        closed: Whether it has closed its environments.
        wanted_since: When it, or whoever was to come in its place before, was first asked of Ray.
        ahead: Seconds that this machine's clock is ahead of its own, at most.
    """

    def __init__(
        self, actor: Any, share: range, connection: Connection, runtime_env: dict[str, Any] | None = None
    ) -> None:
        self.actor, self._share = actor, share
        self._connection, self._runtime_env = connection, runtime_env
        self.ledger = Ledger(bytearray(Ledger.NBYTES))
        self.lost: Lost | None = None
        self.closed = False
        self.wanted_since = time.monotonic()
        self._key = secrets.randbits(48)
        self._warden: Any = None
        # What is to come before anything can be asked: a greeting, then that the warden holds it.
        self._arriving: Any = actor.greet.remote()
        self._waiting: list[Request] = []
        self._asked: deque[Asked] = deque()
        self._count = 0
        self.ahead = 0.0

    @property
    def next(self) -> Any:
        """What will come from it next, for `ray.wait`; None where nothing will."""
        if self._arriving is not None:
            return self._arriving
        return self._asked[0].answer if self._asked else None

    @property
    def is_here(self) -> bool:
        """Whether it can be asked."""
        return self._arriving is None

    @property
    def parcel_to_come(self) -> bool:
        """Whether what comes next is one `Parcel`, and nothing else."""
        return self._arriving is None and bool(self._asked) and not self._asked[0].request.each

    # -- there and back --------------------------------------------------------------------------------------------

    def ask(self, request: Request, parcels: Parcels | None) -> None:
        """Send a request, or keep it until the worker is there."""
        if self._arriving is not None:
            self._waiting.append(request)
            return
        if request.message is Message.CLOSE and self._warden is not None:
            self._warden.discard.remote(self._key)
        actions = None
        if parcels is not None and request.message in WITH_ACTIONS:
            actions = parcels.actions(self._of(request))
        self._count += 1
        method = self.actor.each.options(num_returns="streaming") if request.each else self.actor.execute
        order = pickle.dumps((self._count, request, actions), pickle.HIGHEST_PROTOCOL)
        self._asked.append(Asked(self._count, request, method.remote(order)))

    def take(self, parcels: Parcels | None, told: Packed | None = None) -> list[Reply | Lost]:
        """What it says, of which something is there.

        Args:
            parcels: This end's block; None where there is none yet.
            told: What `next` has turned out to be, where that is known.
        """
        try:
            if self._arriving is not None:
                self.arrive(parcels)
                return []
            asked = self._asked[0]
            if told is None:
                told = ray.get(next(asked.answer) if asked.request.each else asked.answer)
        except StopIteration:  # the rest is discarded
            self._asked.popleft()
            return []
        except ray.exceptions.RayTaskError:
            raise
        except RayError as error:
            return self._bury(error, parcels)
        return [*self._unpacked(asked, unpacked(told), parcels)]

    def arrive(self, parcels: Parcels | None) -> None:
        """Take the next of what must come before it can be asked.

        Raises:
            RayError: It could not be started.
        """
        if self._warden is None:
            greeting: Greeting = ray.get(self._arriving)
            self.ahead = time.monotonic() - greeting.now
            self._warden = self._connection.warden_of(greeting.node, self._runtime_env)
            self._arriving = self._warden.hold.remote(self._key, greeting)
            return
        try:
            ray.get(self._arriving)
        except RayError as error:  # then nobody holds it: little will be known of its death
            logger.warning("the warden of environments %s is gone: %s", [*self._share], _said_by(error))
            self._connection.forget(self._warden)
            self._warden = None
        self._arriving = None
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.ask(request, parcels)

    def _unpacked(self, asked: Asked, parcel: Parcel, parcels: Parcels | None) -> list[Reply]:
        replies = parcel.replies
        if parcel.results is not None and parcels is not None:
            about = replies[-1].env_ids if asked.request.each else asked.request.env_ids
            parcels.put_results(self._share if about is None else about, parcel.results)
        self.ahead = min(self.ahead, time.monotonic() - replies[-1].completed)
        self.ledger.mirror(parcel.ledger, self.ahead)
        asked.heard += len(replies)
        if replies[-1].last:
            self._asked.popleft()
            self.closed |= replies[-1].answers is Message.CLOSE
        return [self._here(reply) for reply in replies]

    def _of(self, request: Request) -> Sequence[int]:
        return self._share if request.env_ids is None else request.env_ids

    def _here(self, reply: Reply) -> Reply:
        """The same by this machine's clock."""
        return reply._replace(completed=reply.completed + self.ahead)

    # -- looking, and ending ---------------------------------------------------------------------------------------

    def stack(self) -> str:
        """The Python stack as it is right now, empty where it cannot be had."""
        return "" if self._warden is None else told_by_warden(self._warden.stack.remote(self._key)) or ""

    def salvage(self, parcels: Parcels | None, *, kill: bool = False) -> tuple[list[Reply], Remains | None]:
        """What it has said and not yet been heard to say, and all that it has left; what it has written is put in.

        Args:
            parcels: This end's block; None where there is none yet.
            kill: Whether it is to be ended; else it has died, or is just dying.
        """
        places = None if parcels is None else parcels.places(self._share)
        remains: Remains | None = None
        if self._warden is not None:
            remains = told_by_warden(self._warden.remains.remote(self._key, places, kill=kill))
        if remains is None:
            return [], None
        self.ledger.mirror(remains.ledger, self.ahead)
        if parcels is not None and remains.records:
            parcels.put_records(self._share, remains.records)
        number, said = what_was_said(remains.said)
        if not self._asked or self._asked[0].number != number:
            return [], remains
        unheard, self._asked[0].heard = said[self._asked[0].heard :], len(said)
        return [self._here(reply) for reply in unheard], remains

    def _bury(self, error: RayError, parcels: Parcels | None) -> list[Reply | Lost]:
        """What it has still said, and that it is gone."""
        replies, remains = self.salvage(parcels)
        reason = _said_by(error)
        exitcode, stack = (None, "") if remains is None else (remains.exitcode, remains.stack)
        self.lost = Lost(exitcode, stack, "" if reason == _PROCESS_DIED else reason)
        self._arriving = None
        self._asked.clear()
        self._waiting.clear()
        return [*replies, self.lost]


def look_at(hosts: Iterable[RayHost]) -> None:
    """Bring the ledgers of those that are busy up to date."""
    busy = {host._key: host for host in hosts if host._asked and host._warden is not None}
    looks = [
        warden.look.remote([key for key, host in busy.items() if host._warden is warden])
        for warden in {host._warden for host in busy.values()}
    ]
    for answer in looks:
        if (seen := told_by_warden(answer)) is not None:
            moment, ledgers = seen
            for key, ledger in ledgers.items():
                busy[key].ahead = min(busy[key].ahead, time.monotonic() - moment)
                busy[key].ledger.mirror(ledger, busy[key].ahead)


def end(hosts: Iterable[RayHost]) -> None:
    """End workers, whatever they are doing, with all that they have started."""
    keys: dict[Any, list[int]] = {}
    for host in (hosts := [*hosts]):
        if host._warden is not None:
            keys.setdefault(host._warden, []).append(host._key)
    ends = [warden.end.remote(own) for warden, own in keys.items()]
    for host in hosts:
        ray.kill(host.actor)
    for answer in ends:
        told_by_warden(answer)


def told_by_warden(answer: Any) -> Any:
    """What a warden says; None where it cannot be asked any more."""
    try:
        return ray.get(answer, timeout=_ANSWERED_WITHIN_S)
    except (RayError, GetTimeoutError):
        return None


_PROCESS_DIED = "its worker process has died"  # as Ray puts it where it knows nothing more
_BECAUSE = re.compile(r"\bbecause (.+?)[.](?:\s|$)")


def _said_by(error: RayError) -> str:
    """What Ray says of a death, in one line."""
    text = str(error).strip()
    because = _BECAUSE.search(text)
    return because[1] if because else text.partition("\n")[0].rstrip(".") or type(error).__name__
