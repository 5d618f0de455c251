"""`Calls`: calls of the methods and attributes of environments, whose values are pickled on both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_parallel.core.messages import Answer, Message, Refusal
from marl_parallel.core.objects.pickling import add_missing_modules, dumps_for_workers, loads
from marl_parallel.core.reports.advice import summary
from marl_parallel.stepper.batch import Batch

_IN_PLACE_OF_CALL = {"reset": "reset(env_ids=[...])", "step": "step(actions, env_ids=[...])", "close": "close()"}


class Calls:
    """Calls of the methods and attributes of a batch's environments, one at a time.

    A `pickle` is a function that pickles what workers get: one value for all, or a dict by environment. It is called
    again if workers could not import a module, which then travels with the values.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._local_modules = [] if batch.workers is None else batch.workers.local_modules
        self._called: tuple[tuple[int, ...], Callable[[], Any]] = (), lambda: None  # what is in flight

    def pickled(
        self, name: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], bytes]:
        """The `pickle` of a call; raises if `name` is no method that may be called."""
        if not isinstance(name, str) and not callable(name):
            raise TypeError(f"name must be the name of a method or attribute, or a function; got {name!r}")
        if isinstance(name, str) and (instead := _IN_PLACE_OF_CALL.get(name)) is not None:
            raise ValueError(
                f"call({name!r}) would change environments without this ParallelEnv, whose next results would be "
                f"wrong: use env.{instead}"
            )
        modules = self._local_modules  # and not this object, which keeps the result
        return lambda: dumps_for_workers((name, args, kwargs), f"the arguments of {name!r}", modules)

    def call(self, env_ids: tuple[int, ...], pickle: Callable[[], Any]) -> tuple[Any, ...]:
        """Call methods, and wait; returns their results."""
        return self._unpickled(Message.CALL, env_ids, pickle, self._execute(Message.CALL, env_ids, pickle()))

    def begin(self, env_ids: tuple[int, ...], pickle: Callable[[], Any]) -> None:
        """Begin to call methods, and return; until `finish`, `Batch.check_idle` raises."""
        self._batch.begin_call(Message.CALL, env_ids, pickle())
        self._called = env_ids, pickle

    def finish(self, timeout: float | None) -> tuple[Any, ...]:
        """Wait for the results of `begin`; after a `TimeoutError`, it can be called again."""
        results = self._batch.finish_call(timeout)
        env_ids, pickle = self._called
        return self._unpickled(Message.CALL, env_ids, pickle, results)

    def assign(self, name: str, values: Mapping[int, Any]) -> None:
        """Set an attribute of environments, by env id."""

        def pickle() -> dict[int, bytes]:
            return {
                env_id: dumps_for_workers((name, value), f"the value for environment {env_id}", self._local_modules)
                for env_id, value in values.items()
            }

        env_ids = tuple(values)
        self._unpickled(Message.ASSIGN, env_ids, pickle, self._execute(Message.ASSIGN, env_ids, pickle()))

    def _execute(self, message: Message, env_ids: Sequence[int], payload: Any) -> dict[int, Any]:
        return self._batch.source.execute_in(message, env_ids, payload)

    def _unpickled(
        self, message: Message, env_ids: tuple[int, ...], pickle: Callable[[], Any], results: dict[int, Any]
    ) -> tuple[Any, ...]:
        """The results; requests of environments whose worker could not import a module are repeated first."""
        while again := add_missing_modules(self._local_modules, results, "what is sent to"):
            for env_id in again:
                del results[env_id]
            results.update(self._execute(message, again, pickle()))
        for env_id in sorted(results):
            result = results[env_id]
            if isinstance(result, Refusal):
                raise result.kind(f"environment {env_id}: {result.text}")
            if isinstance(result, Answer):
                try:
                    results[env_id] = loads(result.pickled)
                except Exception as error:
                    raise TypeError(
                        f"environment {env_id}: the result was pickled in the worker but cannot be unpickled here: "
                        f"{summary(error)}"
                    ) from error
        return tuple(results.get(env_id) for env_id in env_ids)
