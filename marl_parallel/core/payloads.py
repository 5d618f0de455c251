"""What requests and replies carry where it is more than bytes: what is to be built, what it is, and what cannot be had.

When each of them is sent is said in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gymnasium.vector import AutoresetMode


class Plan(NamedTuple):
    """The payload of `ACCESS`: what a worker builds.

    Attributes:
        constructors: By environment, pickled by value.
        seeds: By environment.
        mode: When episodes begin anew.
        adapter: Pickled by value: None, a name, or what makes a `MultiAgentEnv` of a simulator.
        restarts: Whether what fails is built anew, so that what was said before it must not be lost.
        traced: Whether the worker is to keep a trace, where it does not do so yet.
        counts: By environment, how often it has been built anew; None for never.
        described: What all environments are like: a pickled `Schema`, for those that are built anew.
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
        keywords: Of the reset that failed where its caller had asked for one, pickled; its seed is not used again.
    """

    plan: Plan
    block: tuple[int, bool]
    reset: bool
    keywords: bytes | None = None


class Rebuilt(NamedTuple):
    """The reply to `REBUILD`.

    Attributes:
        told: What the reset has to say beyond the block, pickled; None for nothing.
    """

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
    """What a call has returned.

    Attributes:
        pickled: That.
    """

    pickled: bytes


class Refusal(NamedTuple):
    """In place of a result: what was asked cannot be had, and nothing has happened to the environment.

    Attributes:
        kind: What the caller's error is to be.
        text: What is missing, or in the way; of a missing module, its name.
    """

    kind: type[Exception]
    text: str
