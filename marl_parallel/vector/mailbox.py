"""`Mailbox`: requests to some environments, and results that come before the caller asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from marl_parallel.core.block.array_view import Arrays, ResultDoesNotFit
from marl_parallel.stepper import Options, Seeds
from marl_parallel.vector.stepper import FacadeStepper

ResultT = TypeVar("ResultT")


class Mailbox(Generic[ResultT]):
    """Sends requests to some environments at a time, and keeps results until the caller takes them out.

    Args:
        stepper: The `FacadeStepper` of the facade.
        results: Makes the results of some environments, in order, from arrays; the last argument says whether they
            were reset. They must be copies.

    Attributes:
        stepping, resetting: The environments whose step or reset is in flight, in the order of requests.
        stepped, begun: By environment, the results of steps and of resets, in the order in which they came.
    """

    def __init__(
        self, stepper: FacadeStepper, results: Callable[[Arrays, Sequence[int], bool], Iterable[ResultT]]
    ) -> None:
        self._stepper, self._results = stepper, results
        self.stepping: dict[int, None] = {}
        self.resetting: dict[int, None] = {}
        self.stepped: dict[int, ResultT] = {}
        self.begun: dict[int, ResultT] = {}

    def send(self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int]) -> None:
        """Begin to step environments; arguments and errors are as in `FacadeStepper.send_some`."""
        self._stepper.send_some(actions, env_ids)
        self.stepping.update(dict.fromkeys(env_ids))

    def send_resets(self, env_ids: Sequence[int], seed: Seeds = None, options: Options = None) -> None:
        """Begin to reset environments; arguments and errors are as in `FacadeStepper.send_some_resets`."""
        self._stepper.send_some_resets(env_ids, seed, options)
        self.resetting.update(dict.fromkeys(env_ids))

    def receive(self, at_least: int = 1, timeout: float | None = None) -> None:
        """Wait for some results of any kind, and keep all that have come.

        Arguments and errors are as in `FacadeStepper.receive_some`. After a `ResultDoesNotFit`, its environments are no
        longer in flight.
        """
        try:
            stepped, begun, arrays = self._stepper.receive_some(at_least, timeout)
        except ResultDoesNotFit as error:
            for env_id in error.env_ids:
                self.stepping.pop(env_id, None)
                self.resetting.pop(env_id, None)
            raise
        if stepped:
            self.stepped.update(zip(stepped, self._results(arrays, stepped, False)))
        if begun:
            self.begun.update(zip(begun, self._results(arrays, begun, True)))
        for env_id in (*stepped, *begun):
            self.stepping.pop(env_id, None)
            self.resetting.pop(env_id, None)

    def receive_until(self, is_enough: Callable[[], bool], timeout: float | None = None) -> None:
        """Receive until there is enough, `timeout` seconds at most; errors are as in `receive`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_enough():
            self.receive(1, None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def forget(self, env_ids: Iterable[int]) -> None:
        """Drop the results of environments that have been reset or loaded since."""
        for env_id in env_ids:
            self.stepped.pop(env_id, None)
            self.begun.pop(env_id, None)
