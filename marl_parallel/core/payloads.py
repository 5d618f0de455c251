"""What requests and replies carry where it is more than bytes: what is to be built, what it is, and what cannot be had.

When each of them is sent is said in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gymnasium import Space
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import AgentID, Rules


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
        described: What all environments are like: a pickled `Description`, for those that are built anew.
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
        description: A `Description`, pickled.
        seeded: Whether its constructor got the seed, or had one bound.
        open: Whether its constructor has a bare `**kwargs`.
        declared_seed: The seed that the environment says it uses; None where it says none.
    """

    description: bytes
    seeded: bool = False
    open: bool = False
    declared_seed: int | None = None


class Description(NamedTuple):
    """What the parent must know of an environment; the fields are those of `MultiAgentEnv`.

    Descriptions of equal environments mostly pickle to the same bytes, so that nothing else has to be compared. Sets,
    which pickle in any order, are sorted tuples here.
    """

    rules: Rules
    possible_agents: list[AgentID]
    observation_spaces: Mapping[AgentID, Space[Any]]
    action_spaces: Mapping[AgentID, Space[Any]]
    state_space: Space[Any] | None
    metadata: dict[str, Any]
    render_mode: str | None
    reset_keywords: tuple[str, ...]
    check_options: Callable[[Any], None]
    seeded_when_made: bool
    options_last: bool
    needs_all_actions: bool
    reward_spaces: Mapping[AgentID, Space[Any]]


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
