"""What the parent and its workers send each other: kinds of messages, requests, replies.

Everything here pickles with plain `pickle`: what comes from a simulator (constructors, infos, results, exceptions)
travels inside as bytes, so that a backend never has to look into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode


class Message(Enum):
    """The kinds of messages: requests, and the last two, replies."""

    ACCESS = 1  # construct the environments, and describe them
    ATTACH = 2  # lay out the block of shared memory in which actions and transitions travel
    SEED = 3  # which seeds do the environments use?
    RESET = 4  # begin new episodes
    STEP = 5  # read the actions in the block, step, and reset where the episode is over and the mode says so
    STATE = 6  # write the global state into the block
    RENDER = 7  # render one frame of each
    CALL = 8  # call a method, or get an attribute, looked for through wrappers
    ASSIGN = 9  # set an attribute, looked for through wrappers
    CLOSE = 10  # close the environments; the last request a worker gets
    REBUILD = 11  # close the environment, if it is still there, and construct it again
    TRACE = 12  # keep slices of time from now on, or return them
    RESULT = 13  # the request was carried out in every environment it names
    EXCEPTION = 14  # the request failed in at least one environment


class Request(NamedTuple):
    """Work for one worker."""

    message: Message
    env_ids: Sequence[int] | None = None  # which of its environments, in this order; None for all of them
    payload: Any = None  # by environment, or whatever the message needs; None for most steps
    each: bool = False  # whether each environment gets a reply of its own as soon as it is done; else one for all
    prompt: bool = False  # whether extras and failures are sent at once, ahead of the reply for all


class Failure(NamedTuple):
    """What went wrong in one environment, in a form that survives pickling."""

    method: str  # what the environment was doing
    summary: str  # the exception in one line
    traceback: str
    exception: bytes | None  # pickled; None if it does not pickle
    partially_written: bool = False  # whether its record may be partially written
    to_do: str = ""  # what to do about it where a restart cannot help, as with a wrong `adapter=`


class Reply(NamedTuple):
    """The outcome of a request."""

    message: Message  # RESULT or EXCEPTION
    answers: Message  # the request's message
    env_ids: Sequence[int] | None  # the environments it was about; None for all of the worker's
    results: Mapping[int, Any]  # by environment, for those with a result beyond what is in the block
    failures: Mapping[int, Failure]  # by environment, for those that failed
    completed: float  # when, in seconds of `time.monotonic`
    last: bool = True  # whether no other reply to the same request follows


class Lost(NamedTuple):
    """In place of a reply: the worker is gone."""

    exitcode: int | None  # minus the signal's number where a signal ended it; None where unknown
    stack: str  # at a native crash; empty if there is none
    reason: str = ""  # why it is gone, where that is known better than by the exit code


STEP_ALL = Request(Message.STEP)
"""Step all environments of a worker with the actions in the block."""
STEP_ALL_PROMPTLY = Request(Message.STEP, prompt=True)
"""The same; extras and failures are sent at once."""
STEPPED = Reply(Message.RESULT, Message.STEP, None, {}, {}, 0.0)
"""The reply to these two when everything is in the block."""


# -- payloads and results that are more than bytes ---------------------------------------------------------------------


class Plan(NamedTuple):
    """The payload of `ACCESS`: what a worker builds.

    Attributes:
        constructors: By environment, pickled by value.
        seeds: By environment.
        mode: When episodes begin anew.
        adapter: Pickled by value: None, a name, or what makes a `MultiAgentEnv` of a simulator.
        restarts: Whether failed environments are rebuilt, so that what they said before must not be lost.
        traced: Whether the worker is to keep a trace, where it does not do so yet.
        counts: By environment, how often it has been rebuilt; None for never.
        described: The pickled `Schema` of all environments, for those that are rebuilt.
        registrations: What is registered with Gymnasium and PettingZoo in the caller's process, as of
            `dump_registrations`; workers in that process ignore it.
    """

    constructors: Mapping[int, bytes]
    seeds: Mapping[int, int]
    mode: AutoresetMode
    adapter: bytes
    restarts: bool = False
    traced: bool = False
    counts: Mapping[int, int] | None = None
    described: bytes = b""
    registrations: bytes = b""


class Rebuild(NamedTuple):
    """The payload of `REBUILD`, by environment; the reply is `Rebuilt`, or a `Refusal` where it has become another.

    Attributes:
        plan: For this environment.
        block: The payload of `ATTACH`, for a worker that is new itself.
        reset: Whether its first episode is to begin at once; else with whatever resets it next.
        keywords: Pickled keywords of the caller's reset that failed, if one did; its seed is not used again.
    """

    plan: Plan
    block: tuple[int, bool]
    reset: bool
    keywords: bytes | None = None


class Rebuilt(NamedTuple):
    """The reply to `REBUILD`; `extras` is what does not fit the block, pickled."""

    extras: bytes | None


class Built(NamedTuple):
    """The reply to `ACCESS`.

    Attributes:
        description: A `Schema`, pickled.
        seeded: Whether its constructor got the seed, or had one bound.
        open: Whether its constructor has a bare `**kwargs`.
        declared_seed: The seed that the environment says it uses; None where it says none.
    """

    description: bytes
    seeded: bool = False
    open: bool = False
    declared_seed: int | None = None


class Answer(NamedTuple):
    """The pickled result of a call."""

    pickled: bytes


class Refusal(NamedTuple):
    """In place of a result: the request is impossible, and nothing has happened to the environment.

    Attributes:
        kind: The type of the error that the caller gets.
        text: What is missing, or in the way; of a missing module, its name.
    """

    kind: type[Exception]
    text: str
