"""`ArrayFacade`: the base of facades whose library leaves `reset` and `step` to them."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from gymnasium.vector import AutoresetMode

from marl_parallel.core.block.array_view import Actions, Arrays
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.stepper import Options, Seeds
from marl_parallel.vector.forwarding import OfParallelEnv
from marl_parallel.vector.scalarize import Scalarize
from marl_parallel.vector.stepper import FacadeStepper

__all__ = ["ArrayFacade"]

ActionsT = TypeVar("ActionsT")
FacadeT = TypeVar("FacadeT")
FirstT = TypeVar("FirstT")
ResultsT = TypeVar("ResultsT")


class ArrayFacade(OfParallelEnv, Generic[ActionsT, ResultsT, FirstT]):
    """A `ParallelEnv` with the interface of a training library: a base class for one's own.

    A subclass sets its spaces in `__init__`, and converts actions (`_actions`) and results (`_results`). Everything
    else is here: `reset`, `step`, their asynchronous halves, partial resets, saved states, calls of simulators, one
    call at a time, and `close`. `docs/extending.md` has an example.

    Args:
        env: The `ParallelEnv`. No other facade may step it.
        modes: The auto-reset modes that the facade supports; none for all.
        copy: Whether observations are arrays of the facade's own; None for the `copy` of `env`.
        scalarize: Turns vector rewards into numbers, see `Scalarize`.
        vectors: Whether the facade takes vector rewards as they are, in `Arrays.vectors`.
        partial_resets: Whether the facade resets or steps some environments without the others.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        num_envs: The number of environments.

    Raises:
        TypeError, ValueError, ClosedEnvironmentError: As `FacadeStepper`.
    """

    def __init__(
        self,
        env: ParallelEnv,
        *modes: AutoresetMode,
        copy: bool | None = None,
        scalarize: Scalarize | None = None,
        vectors: bool = False,
        partial_resets: bool = False,
    ) -> None:
        options: dict[str, Any] = {"scalarize": scalarize, "vectors": vectors, "partial_resets": partial_resets}
        self._stepper = FacadeStepper(env, self, *modes, copy=copy, **options)
        self._guard = self._stepper.batch.guard
        self.env = env
        self.num_envs: int = env.num_envs

    # -- what a subclass converts --------------------------------------------------------------------------------------

    @abstractmethod
    def _actions(self, actions: ActionsT) -> Actions:
        """The argument of `step` as actions of a `FacadeStepper`; raises `TypeError` or `ValueError` if it is wrong."""

    @abstractmethod
    def _results(self, arrays: Arrays) -> ResultsT:
        """What `step` returns: observations first, and infos last."""

    def _first(self, arrays: Arrays) -> FirstT:
        """What `reset` and `load_state` return: by default, the first and the last of `_results`."""
        observations, *_, infos = cast("tuple[Any, ...]", self._results(arrays))
        return cast(FirstT, (observations, infos))

    def _begin_episodes(self, env_ids: Sequence[int] | None) -> None:
        """Update the facade's own state for new episodes of environments, None for all; called before `_first`."""

    def _own_state(self, env_id: int) -> Any:
        """The facade's own state of an environment, besides the latest arrays; None if it has none."""
        return None

    def _set_own_states(self, states: Mapping[int, Any]) -> None:
        """Restore what `_own_state` has returned, by environment, after the latest arrays have become results again."""

    # -- stepping ------------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> FirstT:
        """Begin new episodes; returns observations and infos.

        Args:
            seed: Environment i gets `seed + i`; or a sequence with one seed for each of `env_ids`.
            options: For the reset of every environment, or a list with one for each of `env_ids`.
            env_ids: Which environments; None for all. The others' observations stay as they are.

        Raises:
            RuntimeError, ValueError, ResetNeeded: As in `FacadeStepper.reset`.
        """
        arrays = self._stepper.reset(seed, options, env_ids)
        self._begin_episodes(env_ids)
        return self._first(arrays)

    @exclusive("reset_async")
    def reset_async(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> None:
        """Begin new episodes and return; `reset_wait` returns the results. Arguments and errors are as in `reset`."""
        self._stepper.send_reset(seed, options, env_ids)
        self._reset_env_ids = env_ids

    @exclusive("reset_wait")
    def reset_wait(self, timeout: float | None = None) -> FirstT:
        """The results of `reset_async`, in the form of `reset`; arguments and errors are as in `step_wait`."""
        arrays = self._stepper.receive_reset(timeout)
        self._begin_episodes(self._reset_env_ids)
        return self._first(arrays)

    @exclusive("step")
    def step(self, actions: ActionsT) -> ResultsT:
        """Step all environments; returns observations, rewards, terminations, truncations and infos.

        Actions of agents that do not act are ignored. Errors are as in `FacadeStepper.step`.
        """
        return self._results(self._stepper.step(self._actions(actions)))

    @exclusive("step_async")
    def step_async(self, actions: ActionsT) -> None:
        """Begin to step all environments and return; `step_wait` returns the results.

        Arguments and errors are as in `step`.
        """
        self._stepper.send(self._actions(actions))

    @exclusive("step_wait")
    def step_wait(self, timeout: float | None = None) -> ResultsT:
        """The results of `step_async`; errors are as in `step`.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            NoAsyncCallError: No step is in flight.
            TimeoutError: The step has not ended in time. Nothing is lost, and this can be called again.
        """
        return self._results(self._stepper.receive(timeout))

    @exclusive("save_state")
    def save_state(self, env_ids: Sequence[int] | None = None) -> list[bytes]:
        """Save environments, with this facade's own state of them.

        Arguments, the result and errors are those of `ParallelEnv.save_state`.
        """
        return self._stepper.save_state(env_ids, self._own_state)

    @exclusive("load_state")
    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> FirstT:
        """Go on from what `save_state` has returned; arguments and errors are as in `ParallelEnv.load_state`.

        Returns what `reset` returns: of the latest step or reset at that time.
        """
        arrays, own_states = self._stepper.load_state(states, env_ids)
        first = self._first(arrays)
        self._set_own_states(own_states)
        return first

    @contextlib.contextmanager
    def unguarded(self: FacadeT) -> Iterator[FacadeT]:
        """Step inside a call that lasts: yields a copy of this facade whose methods do not check for other calls.

        Use it only in the thread of the call that the guard has. At the end, the attributes that the copy has changed,
        such as those of the latest step, are set here.
        """
        before, other = {**vars(self)}, copy.copy(self)
        attributes = vars(other)
        attributes["_guard"] = before["_guard"] = CallGuard(self._stepper.batch.check_open)  # type: ignore[attr-defined]
        try:
            yield other
        finally:
            missing = object()
            vars(self).update({
                name: value for name, value in attributes.items() if value is not before.get(name, missing)
            })  # fmt: skip

    def close(self, **keywords: Any) -> None:
        """Close the environments, with the keywords of `ParallelEnv.close`; idempotent."""
        self._stepper.close(**keywords)

    def __enter__(self: FacadeT) -> FacadeT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
