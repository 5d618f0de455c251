"""What a request is for: one message constructs environments in four situations, and one lets them take over."""

from __future__ import annotations

from enum import Enum

from marl_parallel.core.messages import Begins, Message, Request


class Purpose(Enum):
    """What a `CONSTRUCT` or `TAKE_OVER` is for."""

    REBUILD = 1  # in the place of the present environment
    PREPARE = 2  # beside it, in another worker
    ADOPT = 3  # the first transition of that one
    LOAD = 4  # beside it, from saved bytes
    REPLACE = 5  # those take the places of the present ones
    DROP = 6  # they do not


def purpose_of(request: Request) -> Purpose | Message:
    """The purpose of a request that constructs environments or lets them take over; else its message."""
    if request.message is Message.CONSTRUCT:
        new = next(iter(request.payload.values()))
        if new.saved is not None:
            return Purpose.LOAD
        return Purpose.PREPARE if new.begins is Begins.BESIDE else Purpose.REBUILD
    if request.message is Message.TAKE_OVER:
        return {None: Purpose.ADOPT, True: Purpose.REPLACE, False: Purpose.DROP}[request.payload]
    return request.message
