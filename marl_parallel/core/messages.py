"""What parent and workers say to each other: the kinds of message, requests and what comes back.

Everything here pickles with plain `pickle`: whatever a simulator made (constructors, infos, results, exceptions)
travels inside as bytes, so that a backend never has to look. How messages travel is the business of `backends/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode


class Message(Enum):
    """The kinds of message; all but the last two are requests, those replies."""

    ACCESS = 1
    """Construct the environments and tell their spaces and other fixed attributes."""
    ATTACH = 2
    """There is a block of memory now that actions and transitions travel in, laid out for so many environments."""
    SEED = 3
    """Which seeds do the environments use?"""
    RESET = 4
    """Begin new episodes."""
    STEP = 5
    """Take the actions in the block, step, and reset where the episode is over and the mode says so."""
    STATE = 6
    """Write the global state into the block."""
    RENDER = 7
    """Render one frame of each."""
    CALL = 8
    """Call a method, or get an attribute, looked for through wrappers."""
    ASSIGN = 9
    """Set an attribute, looked for through wrappers."""
    CLOSE = 10
    """Close the environments; the last request a worker gets."""
    REBUILD = 11
    """Close the environment, if it is still there, and construct it anew."""
    TRACE = 12
    """Keep slices of time from now on, or keep no more and tell them."""
    RESULT = 13
    """The request was carried out in every environment it names."""
    EXCEPTION = 14
    """The request failed in at least one environment."""


class Request(NamedTuple):
    """Work for one worker.

    Attributes:
        message: What to do.
        env_ids: With which of the worker's environments, in this order; None for all of them.
        payload: By environment, or whatever the message needs; None for most steps.
        each: Whether each of `env_ids` is replied for as soon as it is done; else there is one reply for all.
        prompt: Whether what an environment has to say beyond the block is sent at once, ahead of the reply for all.
    """

    message: Message
    env_ids: Sequence[int] | None = None
    payload: Any = None
    each: bool = False
    prompt: bool = False


class Failure(NamedTuple):
    """What went wrong in one environment, told so that it survives any pickling.

    Attributes:
        method: What the environment was doing.
        summary: The exception in one line.
        traceback: The traceback, as text.
        exception: The exception, pickled; None where it does not pickle.
        torn: Whether its record does not hold any more what it has said last.
        to_do: What to do about it where a restart cannot help, as with a wrong `adapter=`; else empty.
    """

    method: str
    summary: str
    traceback: str
    exception: bytes | None
    torn: bool = False
    to_do: str = ""


class Reply(NamedTuple):
    """What became of a request.

    Attributes:
        message: `RESULT` or `EXCEPTION`.
        answers: The request's message.
        env_ids: The environments it was about; None for all of the worker's.
        results: By environment, for those that have something to say beyond what is in the block.
        failures: By environment, for those that failed.
        completed: When, in seconds of `time.monotonic`.
        last: Whether no other reply to the same request follows.
    """

    message: Message
    answers: Message
    env_ids: Sequence[int] | None
    results: Mapping[int, Any]
    failures: Mapping[int, Failure]
    completed: float
    last: bool = True


class Lost(NamedTuple):
    """In place of a reply: the worker is gone.

    Attributes:
        exitcode: Its exit code, minus the signal's number where a signal ended it; None where unknown.
        stack: The stack at a native crash, empty where there is none.
        reason: How it came to that where somebody knows better than the exit code tells, else empty.
    """

    exitcode: int | None
    stack: str
    reason: str = ""


STEP_ALL = Request(Message.STEP)
"""Step all environments of a worker with the actions in the block."""
STEP_ALL_PROMPTLY = Request(Message.STEP, prompt=True)
"""The same; what an environment has to say beyond the block is sent at once."""
STEPPED = Reply(Message.RESULT, Message.STEP, None, {}, {}, 0.0)
"""The reply to these two where everything is in the block."""


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
    """The reply to `REBUILD`; `told` is what does not fit the block, pickled."""

    told: bytes | None


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
