"""What runs in a worker process: takes requests from its desk, has its `Worker` carry them out, says so.

The parent's side is `process.py`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

from marl_parallel.backends import control
from marl_parallel.backends.channel import Channel
from marl_parallel.backends.memory import Block
from marl_parallel.backends.semaphores import Semaphore
from marl_parallel.core.columns import span_of
from marl_parallel.core.messages import STEP_ALL, STEP_ALL_PROMPTLY, Message, Reply, Request
from marl_parallel.core.worker import Worker

_SPIN_S = 100e-6
"""How long to try before sleeping: waking an idle virtual CPU costs 20 to 50 us, as much as a step."""


def main(index: int, fds: Sequence[int]) -> None:
    """Serve until told to close.

    Args:
        index: Which desk is ours.
        fds: The channel's socket, the control block, the file that the block of records will be in.
    """
    connection, control_fd, records_fd = fds
    board = Block.attach(control_fd, os.fstat(control_fd).st_size)
    channel = Channel(socket.socket(fileno=connection))
    spin, capacity = channel.receive()
    desk, bell = control.Desk(board.buffer, index, capacity), control.Bell(board.buffer)
    worker = Worker(desk.ledger, lambda layout: Block.attach(records_fd, layout.nbytes).buffer, own_process=True)
    send, spin_s = _sender(desk, bell, channel), _SPIN_S if spin else 0.0
    while True:
        _take(desk.asked.signal, spin_s)
        request = _requested(desk.asked.taken(), channel)
        worker.execute(request, send)
        if request.message is Message.CLOSE:
            channel.close()
            return


def _sender(desk: control.Desk, bell: control.Bell, channel: Channel) -> Callable[[Reply], None]:
    def send(reply: Reply) -> None:
        _, answers, env_ids, results, failures, completed, last = reply
        more = control.LAST if last else 0
        if answers is not Message.STEP or results or failures:
            # The note comes after the message, so that the parent is not woken for one that is not complete. A message
            # that the socket has no room for is the exception: the parent must read so that the rest can be sent.
            channel.put(reply)
            desk.done.put(control.MAIL | more, completed)
            bell.arrive()
            channel.finish()
            return
        note = control.PLAIN | more
        desk.done.put(note if env_ids is None else control.note_of(note, span_of(env_ids)), completed)
        bell.arrive()

    return send


def _take(signal: Semaphore, spin_s: float) -> None:
    try_wait, spin_until = signal.try_wait, time.monotonic() + spin_s
    while time.monotonic() < spin_until:
        if not try_wait():
            return
        os.sched_yield()  # the parent may be waiting for this very CPU
    signal.take()


def _requested(note: int, channel: Channel) -> Request:
    if note == control.STEP:
        return STEP_ALL
    if note == control.STEP | control.PROMPT:
        return STEP_ALL_PROMPTLY
    if note & control.KIND == control.STEP:
        each, prompt = bool(note & control.EACH), bool(note & control.PROMPT)
        return Request(Message.STEP, control.env_ids_of(note), each=each, prompt=prompt)
    request: Request = channel.receive()
    return request
