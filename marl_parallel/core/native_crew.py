"""`NativeCrew`: carries out requests in a native simulator, in the place of a `Pool`; there are no workers.

Here is what is in flight, what the simulator cannot be asked, and what it has done; not what its answers mean.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from marl_parallel.core.ledger import Tracer
from marl_parallel.core.messages import Message, Refusal, Request
from marl_parallel.core.native import EnvIds, NativeSimulator, Received, merged
from marl_parallel.core.pickling import loads
from marl_parallel.core.pool import Results
from marl_parallel.types import EnvError, Stats, WorkerStats


class NativeCrew:
    """In the place of the workers of one `ParallelEnv`; counts as one.

    Args:
        simulator: Nobody else may use it.

    Attributes:
        env_ids: All environments.
        As of `Engine`.
    """

    recovery: ClassVar[None] = None
    seeded_at_start: ClassVar[bool] = True

    def __init__(self, simulator: NativeSimulator) -> None:
        self._simulator = simulator
        self.batch_size = simulator.batch_size
        self.partial = simulator.partial and simulator.batch_size == simulator.num_envs
        self.shares = [range(simulator.num_envs)]
        self.seeds_stale = False
        self.tracer: Tracer | None = None
        self._in_flight: dict[int, Message] = {}
        self.env_ids = tuple(self.shares[0])
        self._all = np.arange(simulator.num_envs, dtype=np.int32)
        self._all_bytes = self._all.tobytes()
        self._stepped = self._reset = 0
        self._inside = 0.0
        self.closed = False

    @property
    def in_flight(self) -> int:
        """How many environments have been sent to and not received."""
        return len(self._in_flight)

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments in flight."""
        return tuple(sorted(self._in_flight))

    def acts_next(self, env_id: int) -> bool:
        """Whether the next action of an environment counts."""
        return env_id not in self._in_flight

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` where everything has been closed."""
        if self.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def _check_still_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")

    # -- asking ----------------------------------------------------------------------------------------------------

    def execute(self, requests: Mapping[int, Request]) -> NoReturn:
        """Refuse: all that would come here is to keep a trace."""
        raise NotImplementedError(f"{self._simulator.name} keeps no timeline: it has no workers")

    def step_all(self) -> NoReturn:
        """Never called: actions are always handed over."""
        raise NotImplementedError

    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Received:
        """Step or reset some environments, and wait.

        Returns:
            Their rows, in the order of `env_ids`.

        Raises:
            ValueError: So many results do not come together.
            EnvError: The simulator raised; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        self.check_open()
        return self._carry_out(message, env_ids, payloads)

    def execute_in(self, message: Message, env_ids: Sequence[int], payload: Any = None) -> Any:
        """Have one thing done in some environments; returns, by environment, what was asked."""
        self.check_open()
        if message is Message.CALL or message is Message.ASSIGN:
            return dict.fromkeys(env_ids, self._looked_up(message, payload))
        told = self._simulator.seeds if message is Message.SEED else self._rendered(env_ids)
        return {env_id: told[env_id] for env_id in env_ids}

    def _rendered(self, env_ids: Sequence[int]) -> Sequence[Any]:
        try:
            return self._simulator.render()
        except Exception as error:  # the copies are where they were
            raise self._error(Message.RENDER, env_ids, error) from error

    def _carry_out(self, message: Message, env_ids: Sequence[int], payload: Any) -> Received:
        if not self.partial:
            self._check_comes_together(len(env_ids), f"{message.name.lower()} of {len(env_ids)} environments")
        ids = self._ids(env_ids)
        try:
            self._begin(message, ids, payload)
            received = self._take(len(ids))
        except BaseException as error:
            self._fail(message, env_ids, error)
        self._check_still_open()
        return self._in_order(received, ids)

    def _looked_up(self, message: Message, payload: Any) -> Any:
        name = self._simulator.name
        if message is Message.ASSIGN:
            return Refusal(AttributeError, f"copies in {name} have no attributes of their own that could be set")
        attribute = loads(payload)[0]
        if not isinstance(attribute, str):
            return Refusal(TypeError, f"copies in {name} are no objects that a function could be called with")
        try:
            value = self._simulator.attribute(attribute)
        except AttributeError:
            return Refusal(AttributeError, f"{name} has no attribute {attribute!r}")
        if callable(value):
            return Refusal(
                AttributeError, f"copies in {name} have no methods of their own: {attribute!r} is all of theirs"
            )
        return value

    # -- sending and receiving -------------------------------------------------------------------------------------

    def send(self, message: Message, env_ids: Sequence[int], payload: Any = None, *, together: bool = False) -> None:
        """Begin to have steps or resets done.

        Raises:
            AlreadyPendingCallError: Something is in flight, and only one batch can be.
        """
        self.check_open()
        if self._in_flight and self.partial:
            raise AlreadyPendingCallError(
                f"{self._simulator.name} has one batch in flight at a time, unless its batch_size is less than "
                "num_envs; recv() first",
                "send",
            )
        try:
            self._begin(message, self._ids(env_ids), payload)
        except BaseException as error:
            self._fail(message, env_ids, error)
        self._in_flight.update(dict.fromkeys(env_ids, message))

    def recv(self, at_least: int, timeout: float | None = None) -> Results:
        """Take so many results.

        Raises:
            ValueError: They do not come together, or there is a limit to waiting.
            EnvError: The simulator raised; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        self.check_open()
        if timeout is not None:
            raise ValueError(
                f"timeout={timeout:g}, but {self._simulator.name} waits for as long as it takes: pass None"
            )
        if self.partial:
            if at_least != len(self._in_flight):
                raise ValueError(
                    f"min_envs={at_least}, but {self._simulator.name} with batch_size equal to num_envs returns all "
                    f"{len(self._in_flight)} that are in flight: pass None"
                )
        elif at_least != self.batch_size:
            if at_least != len(self._in_flight):
                raise ValueError(
                    f"min_envs={at_least}, but {self._simulator.name} returns {self.batch_size} at a time: pass "
                    "min_envs=env.batch_size, or None for all in flight"
                )
            self._check_comes_together(at_least, f"recv of all {at_least} in flight")
        try:
            received = self._take(at_least)
        except BaseException as error:
            self._fail(Message.STEP, (*self._in_flight,), error)
        self._check_still_open()
        ids = tuple(received.env_ids.tolist())
        return Results(ids, [env_id for env_id in ids if self._in_flight.pop(env_id) is Message.RESET], received)

    def _check_comes_together(self, count: int, what: str) -> None:
        if count % self.batch_size:
            raise ValueError(
                f"{what}, but {self._simulator.name} returns batch_size={self.batch_size} at a time: their number must "
                "be a multiple of that, or send() and recv(min_envs=env.batch_size)"
            )

    def _ids(self, env_ids: Sequence[int]) -> EnvIds:
        return self._all if env_ids is self.env_ids else np.array(env_ids, np.int32)

    def _begin(self, message: Message, ids: EnvIds, payload: Any) -> None:
        begun = time.perf_counter()
        if message is Message.STEP:
            self._simulator.send(payload, ids)
        else:
            self._simulator.reset(ids)
        self._inside += time.perf_counter() - begun

    def _take(self, count: int) -> Received:
        begun = time.perf_counter()
        received = self._simulator.receive()
        if (rows := len(received.env_ids)) < count:
            parts = [received]
            while rows < count:
                parts.append(self._simulator.receive())
                rows += len(parts[-1].env_ids)
            received = merged(parts)
        self._inside += time.perf_counter() - begun
        steps = int(np.count_nonzero(received.elapsed))
        self._stepped += steps
        self._reset += rows - steps
        return received

    def _in_order(self, received: Received, ids: EnvIds) -> Received:
        wanted = self._all_bytes if ids is self._all else ids.tobytes()
        if received.env_ids.tobytes() == wanted:
            return received
        places = np.zeros(len(self._all), np.intp)
        places[received.env_ids] = np.arange(len(ids))
        return received.at(places[ids])

    # -- the rest --------------------------------------------------------------------------------------------------

    def _fail(self, message: Message, env_ids: Sequence[int], error: BaseException) -> NoReturn:
        """Close everything: what is still to come is not known any more."""
        self._check_still_open()
        self.close()
        if not isinstance(error, Exception):
            raise error
        raise self._error(message, env_ids, error) from error

    def _error(self, message: Message, env_ids: Sequence[int], error: Exception) -> EnvError:
        method = message.name.lower()
        return EnvError(
            f"{self._simulator.name} raised in {method}: {type(error).__name__}: {error}",
            env_ids=env_ids,
            worker=0,
            method=method,
            remote_traceback="".join(traceback.format_exception(error)),
        )

    def stats(self) -> Stats:
        """What has been done so far; all time that is not spent in the simulator is the caller's."""
        return Stats.of([WorkerStats(steps=self._stepped, resets=self._reset, simulator_s=self._inside)])

    def ahead(self, worker: int) -> float:
        """Nothing: there is one clock."""
        return 0.0

    def close(self, *, ask: bool = True, timeout: float = 5.0) -> None:
        """Close the simulator. Idempotent."""
        if not self.closed:
            self.closed = True
            self._simulator.close()

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""
        self.closed = True
        self._simulator.abandon()
