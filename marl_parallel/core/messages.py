"""Requests of the parent, and replies of its workers.

Plain `pickle` can pickle all of them: values of simulators (constructors, infos, results, exceptions) travel inside as
bytes, and a backend never looks into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode

from marl_parallel.core.objects.script_generators import Originals
from marl_parallel.core.worker.generators import Origin
from marl_parallel.core.worker_status import Activity


class Message(Enum):
    """The kinds of messages: requests, and the two kinds of answers."""

    ACCESS = 1  # construct the environments, and describe them
    ATTACH = 2  # lay out the block, a `BlockSettings`
    SEED = 3  # return the seeds that the environments use
    RESET = 4  # begin new episodes
    STEP = 5  # read the actions in the block, step, and do the automatic resets of the mode
    STATE = 6  # write the global state into the block
    RENDER = 7  # render one frame of each environment
    CALL = 8  # call a method, or get an attribute, looked for through wrappers
    ASSIGN = 9  # set an attribute, looked for through wrappers
    CLOSE = 10  # close the environments; the last request a worker gets
    CONSTRUCT = 11  # construct an environment that replaces another one, or make it from bytes of `SAVE`
    TRACE = 12  # store slices of time from now on, or return them
    OUTPUTS = 13  # from now on, write more than the records with each reset and step
    # Let an environment that was constructed beside the present one take its place. The payload is None; for one from
    # saved bytes, it is True, or False to drop that one.
    TAKE_OVER = 14
    OPTIONS = 15  # from now on, begin episodes with these options of `reset`
    SAVE = 16  # return the environments as bytes
    RESULT = 17  # the reply to a request that was carried out
    EXCEPTION = 18  # the reply to a request in which environments raised exceptions

    __hash__ = object.__hash__  # faster than the hash of `Enum`, which is written in Python


class Request(NamedTuple):
    """Work for one worker."""

    message: Message
    env_ids: Sequence[int] | None = None  # which of its environments, in this order; None for all of them
    payload: Any = None  # a dict by environment, or another value that the message needs; None for most steps
    each: bool = False  # whether each environment replies as soon as it is done; else one reply for all
    settings: bytes | None = None  # of `CallerSettings`, to apply first; None if unchanged


class Failure(NamedTuple):
    """An exception in one environment, in a form that survives pickling."""

    method: str  # what the environment was doing
    summary: str  # the exception in one line
    traceback: str
    exception: bytes | None  # pickled; None if it does not pickle
    to_do: str = ""  # the advice if a restart cannot help, as with a wrong `adapter=`
    kinds: Sequence[str] = ()  # by `name_of`, the type of the exception and that type's bases
    or_else: str = ""  # advice for another cause that is possible, too
    activity: Activity = Activity.STEP  # what it was doing, if that was a part of a step or reset


def name_of(kind: type) -> str:
    """The name of a type with its module; equal in all processes, also for a type that travels by value.

    Such a type loses its `__qualname__`.
    """
    return f"{kind.__module__}.{kind.__name__}"


class Reply(NamedTuple):
    """The answer to a request."""

    message: Message  # RESULT, or EXCEPTION if there are `failures`
    request: Message  # what was requested
    # Its environments; None for all environments of the worker. Empty: the results are last steps of episodes whose
    # automatic resets still run, and another reply follows.
    env_ids: Sequence[int] | None
    results: Mapping[int, Any]  # by environment, for those with a result beyond what is in the block
    failures: Mapping[int, Failure]  # by environment, for those that failed
    completed: float  # when, in seconds of the worker's clock
    last: bool = True  # whether no other reply to the same request follows


def answer(
    request: Message,
    env_ids: Sequence[int] | None,
    results: Mapping[int, Any],
    failures: Mapping[int, Failure],
    completed: float,
    *,
    last: bool = True,
) -> Reply:
    """A `RESULT`, or an `EXCEPTION` if environments have failed."""
    message = Message.EXCEPTION if failures else Message.RESULT
    return Reply(message, request, env_ids, results, failures, completed, last)


class LostServer(NamedTuple):
    """A fork server that has ended, and all its workers with it."""

    pid: int
    exitcode: int | None  # minus the signal's number if a signal ended it; None if unknown


class Lost(NamedTuple):
    """Comes in place of a reply if the worker is gone."""

    exitcode: int | None  # minus the signal's number if a signal ended it; None if unknown
    stack: str  # of a native crash; empty without one
    reason: str = ""  # the cause, if more is known than the exit code
    server: LostServer | None = None  # the fork server, if the worker ended because of its end


STEP_ALL = Request(Message.STEP)
"""Step all environments of a worker with the actions in the block."""
STEPPED = Reply(Message.RESULT, Message.STEP, None, {}, {}, 0.0)
"""The reply when everything is in the block."""


# -- payloads and results that are more than bytes ---------------------------------------------------------------------


SEEDS_GENERATORS = "seeds_generators"
"""A key in the keywords of `RESET`: the caller passed the seed, which also seeds process-wide generators if each
environment has its own. A seed from `ParallelEnv(seed=)` does not: they keep their states after the constructor."""


class Pickled(NamedTuple):
    """A value that was pickled by value, without its large arrays: see `array_file.py`."""

    pickled: bytes
    spans: Sequence[tuple[int, int]] = ()  # offsets and sizes of its arrays in the file of `Backend.array_file`
    shared: Any = None  # a constructor's objects of multiprocessing: see `sharing.py`


class Construction(NamedTuple):
    """The payload of `ACCESS`: what a worker builds."""

    # By environment. Unpicklable constructors travel as they are, to workers in the caller's process.
    constructors: Mapping[int, Any]  # `Pickled`, or the constructor
    seeds: Mapping[int, int | None]  # by environment; None for an environment with a seed of its own
    mode: AutoresetMode
    adapter: Any  # like a constructor: None, a name, or a function that makes a `MultiAgentEnv` from a simulator
    restarts: bool = False  # whether failed environments are rebuilt, so earlier results must not be lost
    traced: bool = False  # whether the worker traces from now on
    rebuilds: int = 0  # how often these environments have been rebuilt
    described: bytes = b""  # the pickled `Schema` of all environments, for rebuilds
    positions: Mapping[int, Sequence[int]] | None = None  # by environment, as in `schema.Common`, for rebuilds
    isolate_rng: bool = False  # whether each environment has process-wide generators of its own
    derived_seeds: bool = False  # whether resets without a seed get a derived one, see `episode.derived_seed`
    registrations: bytes = b""  # of `dump_registrations` in the caller's process; workers in that process ignore it
    namespaces: bytes = b""  # of `dump_namespaces`; workers in the caller's process ignore them
    settings: bytes = b""  # of `CallerSettings`; workers in the caller's thread ignore them
    generators: Originals | None = None  # the script's generators that are in the pickles; None for none
    made: int = 0  # how many `ParallelEnv`s the program had made before
    origin: Origin | None = None  # of the seeds of process-wide generators; None if environments have seeds
    preload: Sequence[str] = ()  # modules that each worker process imports before its first constructor


class BlockSettings(NamedTuple):
    """The payload of `ATTACH`: how the block is laid out, and what is written there."""

    num_records: int  # the number of environments
    arrays: bool  # whether the block has values of agents; else they travel pickled
    compiled: bool  # whether the caller has compiled code, which reads what the worker's writes
    infos: bool  # whether the block has infos of simple values
    described: bytes = b""  # the pickled `Schema` of all environments, if their own ones are not all the same


class Outputs(NamedTuple):
    """The payload of `OUTPUTS`, to one environment of each worker: what workers write besides the transitions."""

    states: bool = False  # the global states
    rollout: tuple[int, int] | None = None  # a rollout buffer: its offset in the shared memory, the number of times


class Saved(NamedTuple):
    """The result of `SAVE`."""

    pickled: bytes
    needs_constructor: bool  # whether loading constructs a new environment first
    needs_arrays: bool  # whether it refers to large arrays of the constructor
    isolated: bool  # whether it has the states of process-wide generators
    draws: bool  # whether its worker has drawn from these, and their states are not in it
    built: tuple[int | None, int]  # the seed of the constructor, and how often the environment had been rebuilt


class Begins(Enum):
    """When the first episode of a new environment begins, and when it takes the place of the present one."""

    AT_ONCE = 1  # the result is that of a reset, and the present environment is closed first
    WITH_RESET = 2  # with the next reset or step; the present environment is closed first
    BESIDE = 3  # at once, or it goes on as it was saved; it takes over with `TAKE_OVER`


class Construct(NamedTuple):
    """The payload of `CONSTRUCT`, by environment; the result is a `Refusal` if the spaces differ."""

    construction: Construction  # for this environment
    block: BlockSettings  # for a new worker
    begins: Begins
    keywords: bytes | None = None  # pickled, of the caller's reset that failed, if any; its seed is not used again
    outputs: Outputs = Outputs()  # the last payload of `OUTPUTS`
    options: bytes | None = None  # the last payload of `OPTIONS` for this environment
    saved: Saved | None = None  # the environment is made from these bytes, beside the present one


class Seeding(NamedTuple):
    """How a seed reached a constructor."""

    passed: bool  # whether it got the seed
    bound: bool  # whether it had a seed bound, such as by `functools.partial`
    open: bool  # whether it has a bare `**kwargs`

    @property
    def seeded(self) -> bool:
        """Whether it got a seed in either way."""
        return self.passed or self.bound


class InCommon(NamedTuple):
    """What an environment has in common with those constructed before it in the same process."""

    shared: tuple[tuple[int, str], ...] = ()  # environments that wrap the same object, and its type
    overridden: tuple[str, ...] = ()  # settings of the process that its constructor has changed for them


class Built(NamedTuple):
    """The result of `ACCESS`."""

    description: bytes  # a `Schema`, pickled
    seeding: Seeding
    declared_seed: int | None = None  # the seed that the environment declares; None if it declares none
    in_common: InCommon = InCommon()


class Answer(NamedTuple):
    """The pickled result of a call."""

    pickled: bytes


class Refusal(Exception):
    """Raised in a worker, and sent in place of a result, if a request is impossible; it has changed nothing."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind  # of the error that the caller gets
        self.text = text  # the message, or the name of a missing module
