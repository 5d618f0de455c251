"""How environments are replaced: the states of one, and the table of what follows when.

There are two states. `Present` says who brings the result that the caller waits for, `Successor` how far the
environment is that is constructed beside the present one, in a standby worker. Each event has an entry in one or both
tables; what has none cannot happen, and raises. `load_state` and `env.restart` replace environments that are not in
flight, while the caller waits: these have no state of their own::

                 DUE               TAKES_OVER             BEGAN
    GOES_ON ------------> WAITS ----------------> MOVES ---------> GOES_ON
       ^ ^                  | STAYS
       | +------------------+                          from each: FAILS ------> RESTARTS
       |                                      RESTARTED                            | |
       +---------------------------------------------------------------------------+ | RESTARTED_IDLE
       |                                      REPORTED                               v
       +------------------------------------------------------------------------- REPORTS

                BEGINS               BUILT
    NONE ----------------> BEING_BUILT ------> READY       CHANGES: it is built again, with other arguments,
      ^                    REFUSED |             |         once what has been requested has ended (OUTDATED);
      |                            v             |         DIES: MISSING
      +-------------------- MISSING    <---------+
        GIVEN_UP, TAKES_OVER
"""

from __future__ import annotations

from enum import Enum


class Present(Enum):
    """Who brings the result of an environment's step or reset."""

    GOES_ON = 1  # its worker
    WAITS = 2  # its successor, which is not ready: the next episode must begin there
    MOVES = 3  # its successor, whose first transition has been requested
    RESTARTS = 4  # the pool: it has failed, or its worker, which constructs it again
    REPORTS = 5  # the pool: it has failed while no result was due; it is there again, and its next result says so

    __hash__ = object.__hash__  # faster, as in `Message`


class Successor(Enum):
    """The state of the environment that is constructed beside the present one, in a standby worker."""

    NONE = 1
    BEING_BUILT = 2  # the request is in flight
    OUTDATED = 3  # the request is in flight, and must be repeated afterwards
    READY = 4
    MISSING = 5  # it could not be constructed, or its worker has died

    __hash__ = object.__hash__


class Event(Enum):
    """What happens to an environment, or to its successor."""

    DUE = 1  # its next episode must begin in its successor
    STAYS = 2  # it does not: there is no successor
    TAKES_OVER = 3  # its successor gets its place
    BEGAN = 4  # the first transition of its successor has come
    FAILS = 5  # it, or its worker, has failed
    RESTARTED = 6  # it has been constructed again, and its caller waits
    RESTARTED_IDLE = 7  # it has been constructed again, and no result was due when it failed
    REPORTED = 8  # the caller's next result is the report of that
    REPLACED = 9  # another one has been put in its place: `env.restart`, `load_state`
    BEGINS = 10  # its successor is to be constructed
    BUILT = 11  # its successor has been constructed
    REFUSED = 12  # its successor could not be constructed
    CHANGES = 13  # the arguments of its successor have changed, such as the seed
    DIES = 14  # the worker of its successor has died
    GIVEN_UP = 15  # the standby worker is removed
    LOADED = 16  # it is one that was saved before its report

    __hash__ = object.__hash__


class Action(Enum):
    """What is to be done after an event of a successor."""

    NOTHING = 1
    CONSTRUCT = 2  # request it from its worker


_P, _S, _E, _A = Present, Successor, Event, Action

PRESENT: dict[tuple[Present, Event], Present] = {
    (_P.GOES_ON, _E.DUE): _P.WAITS,
    (_P.WAITS, _E.STAYS): _P.GOES_ON,
    (_P.WAITS, _E.TAKES_OVER): _P.MOVES,
    (_P.MOVES, _E.BEGAN): _P.GOES_ON,
    (_P.GOES_ON, _E.FAILS): _P.RESTARTS,
    (_P.WAITS, _E.FAILS): _P.RESTARTS,
    (_P.MOVES, _E.FAILS): _P.RESTARTS,
    (_P.RESTARTS, _E.FAILS): _P.RESTARTS,
    (_P.REPORTS, _E.FAILS): _P.RESTARTS,
    (_P.RESTARTS, _E.RESTARTED): _P.GOES_ON,
    (_P.RESTARTS, _E.RESTARTED_IDLE): _P.REPORTS,
    (_P.REPORTS, _E.REPORTED): _P.GOES_ON,
    (_P.GOES_ON, _E.LOADED): _P.REPORTS,
    (_P.GOES_ON, _E.REPLACED): _P.GOES_ON,
    (_P.RESTARTS, _E.REPLACED): _P.GOES_ON,
    (_P.REPORTS, _E.REPLACED): _P.GOES_ON,
}
"""By state and event, the next state. The extension that notes the event hands over results and sends requests."""

SUCCESSOR: dict[tuple[Successor, Event], tuple[Successor, Action]] = {
    (_S.NONE, _E.BEGINS): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.MISSING, _E.BEGINS): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.BEING_BUILT, _E.BUILT): (_S.READY, _A.NOTHING),
    (_S.OUTDATED, _E.BUILT): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.BEING_BUILT, _E.REFUSED): (_S.MISSING, _A.NOTHING),
    (_S.OUTDATED, _E.REFUSED): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.BEING_BUILT, _E.CHANGES): (_S.OUTDATED, _A.NOTHING),
    (_S.OUTDATED, _E.CHANGES): (_S.OUTDATED, _A.NOTHING),
    (_S.READY, _E.CHANGES): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.MISSING, _E.CHANGES): (_S.BEING_BUILT, _A.CONSTRUCT),
    (_S.READY, _E.TAKES_OVER): (_S.NONE, _A.NOTHING),
    **{(one, _E.DIES): (_S.MISSING, _A.NOTHING) for one in Successor if one is not _S.NONE},
    **{(one, _E.GIVEN_UP): (_S.NONE, _A.NOTHING) for one in Successor if one is not _S.NONE},
}
"""The same for successors, and what is to be done."""

_OF_PRESENT = frozenset([event for _, event in PRESENT])
CHANGES_OWED = _OF_PRESENT - {Event.TAKES_OVER}
"""These events replace `Slot.owed` by the argument of `Slot.note`; `TAKES_OVER` keeps it."""
_OF_SUCCESSOR = frozenset([event for _, event in SUCCESSOR])


def after(present: Present, successor: Successor, event: Event) -> tuple[Present, Successor, Action]:
    """The states of an environment after an event, and what is to be done for its successor.

    Raises:
        RuntimeError: The event has no entry: it cannot happen in these states.
    """
    next_present, next_successor = present, (successor, Action.NOTHING)
    try:
        if event in _OF_PRESENT:
            next_present = PRESENT[present, event]
        if event in _OF_SUCCESSOR:
            next_successor = SUCCESSOR[successor, event]
    except KeyError:
        raise RuntimeError(f"{event} cannot happen in the states {present} and {successor}") from None
    return next_present, *next_successor
