"""`Batch`: the environments of one `ParallelEnv`, which all its steppers share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from threading import get_ident
from typing import Any

from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import Schema
from marl_parallel.arguments import checked_ids, checked_timeout
from marl_parallel.core.block.array_view import ArrayView
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.exclusive import CALL, exclusive
from marl_parallel.core.messages import Message
from marl_parallel.core.source import Source, Transitions
from marl_parallel.stepper.outputs import NO_STATE, WorkerOutputs
from marl_parallel.stepper.resets import ResetArguments
from marl_parallel.stepper.workers import Workers
from marl_parallel.types import ParallelEnvError

_AUTO_RESET = {AutoresetMode.SAME_STEP: "True", AutoresetMode.DISABLED: "False", AutoresetMode.NEXT_STEP: '"NEXT_STEP"'}


class Batch:
    """The environments of one `ParallelEnv`: what all its steppers share, and the checks before each call.

    Args:
        source: Carries out requests.
        transitions: Where each environment stands.
        arrays: Makes an `ArrayView`, with the keywords `copy` and `env_ids`.
        schema: The agents and spaces.
        resets: The seeds and options of resets.
        workers: The worker pool and its helpers; None for a simulator that steps many environments by itself.
        restarts: Whether environments that fail are rebuilt.
        no_state: The error where there is no global state.

    Attributes:
        guard: One call at a time: of all methods of `ParallelEnv` and of its facades.
        stepped_by: Returns the one facade that steps, or None.
        calling: Whether a call is in flight, from `begin_call` until `finish_call`.
        all_have_reset: Whether every environment is known to have been reset.
        has_warned_of_draws: Whether `save_state` has warned that it cannot save process-wide generators.
    """

    def __init__(
        self,
        source: Source,
        transitions: Transitions,
        arrays: Callable[..., ArrayView],
        schema: Schema,
        resets: ResetArguments,
        workers: Workers | None = None,
        *,
        restarts: bool = False,
        no_state: str = NO_STATE,
    ) -> None:
        self.source, self.transitions, self.schema, self.workers = source, transitions, schema, workers
        self._new_arrays, self._arrays = arrays, weakref.WeakSet[ArrayView]()
        self.mode, self.env_ids, self.num_envs = transitions.mode, transitions.env_ids, len(transitions.env_ids)
        self.metadata, self.render_mode = {**schema.metadata, "autoreset_mode": transitions.mode}, schema.render_mode
        self.resets, self.restarts, self.outputs = resets, restarts, WorkerOutputs(workers, schema, no_state)
        self.no_state = no_state
        self.guard = self._guard = source.guard
        self.calling = self.all_have_reset = self.has_warned_of_draws = False
        self.stepped_by: Callable[[], object] = lambda: None

    def arrays(self, *, copy: bool, env_ids: range | None = None) -> ArrayView:
        """A view of all environments, or of a range, as arrays. With `copy`, observations belong to the caller."""
        view = self._new_arrays(copy=copy, env_ids=env_ids)
        self._arrays.add(view)
        return view

    def drop_memory(self) -> None:
        """Let go of all shared memory after `close`, unless a call is in progress: it may still use the memory.

        Views that the caller holds keep their memory.
        """
        entry = ("close", get_ident())
        if not self.source.freed or self.guard.setdefault(CALL, entry) is not entry:
            return
        try:
            self.transitions.drop_memory()
            for view in [*self._arrays]:
                view.drop_memory()
            self._arrays.clear()
            self.source.drop_memory()
        finally:
            del self.guard[CALL]

    def restarts_of(self, env_id: int) -> int:
        """How often an environment has been restarted."""
        return 0 if self.workers is None else self.workers.rebuilds.restarts(env_id)

    def reports_restart(self, env_id: int) -> bool:
        """Whether an environment that is not in flight has been rebuilt after a fault which its next result reports."""
        return self.workers is not None and self.workers.pool.slots[env_id].skips

    # -- what workers write besides transitions ------------------------------------------------------------------------

    @exclusive("write_states")
    def write_states(self) -> None:
        """Have each reset and step write the global states, for `states_seen`, from now on."""
        self.check_idle("write_states")
        self.outputs.write_states()

    def states_seen(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """After `write_states`: the current states, and the last states of finished episodes."""
        return self.outputs.states_seen()

    @exclusive("rollout_buffer")
    def rollout_buffer(self, num_times: int, more: int) -> RolloutBuffer | None:
        """Make workers write observations of `num_times` time steps into a new buffer; None if they cannot."""
        self.check_idle("rollout_buffer")
        return self.outputs.rollout_buffer(num_times, more)

    # -- the order of calls ----------------------------------------------------------------------------------------

    def checked_ids(self, env_ids: Sequence[int] | None) -> tuple[int, ...]:
        """Env ids as a tuple; all of them for None. Raises `ValueError` or `TypeError` for anything else."""
        return self.env_ids if env_ids is None else checked_ids(env_ids, self.num_envs)

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` if everything has been closed."""
        self.source.check_open()

    def check_idle(self, name: str, env_ids: Sequence[int] | None = None) -> None:
        """Raise if the environments are closed, a call is in flight, or any of these environments is; None for all."""
        self.source.check_open()
        self.check_not_calling(name)
        if not self.source.in_flight:
            return
        pending = dict.fromkeys(self.source.pending)
        busy = [*pending] if env_ids is None else [env_id for env_id in env_ids if env_id in pending]
        if busy:
            call = f"while environments {busy} are" if env_ids is None else f"for environments {busy} that are"
            raise AlreadyPendingCallError(f"{name}() was called {call} in flight: call recv() first", name)

    def check_not_calling(self, name: str) -> None:
        """Raise `AlreadyPendingCallError` between `begin_call` and `finish_call`."""
        if self.calling:
            raise AlreadyPendingCallError(
                f"{name}() was called while a call_async() is in flight: call call_wait() first", name
            )

    def check_has_reset(self, env_ids: Sequence[int], name: str) -> None:
        """Raise `ResetNeeded` if one of these environments has never been reset."""
        if not self.all_have_reset:
            has_reset = self.transitions.has_reset
            self.all_have_reset = all(has_reset)
            never = [env_id for env_id in env_ids if not has_reset[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before {name}()")

    def recheck_resets(self) -> None:
        """Make `check_has_reset` look at each environment again: some are new, and must be reset."""
        self.all_have_reset = False

    def begin_call(self, message: Message, env_ids: tuple[int, ...], payload: Any) -> None:
        """Begin a request other than a step or reset, and return; until `finish_call`, `check_idle` raises."""
        self.source.begin_in(message, env_ids, payload)
        self.calling = True

    def finish_call(self, timeout: float | None) -> dict[int, Any]:
        """Wait for the results of `begin_call`, by environment; after a `TimeoutError`, it can be called again."""
        self.source.check_open()
        if not self.calling:
            raise NoAsyncCallError(
                "call_wait() was called without a call_async() before it: call call_async() first", "call_wait"
            )
        seconds = checked_timeout(timeout, "timeout", zero=True)
        self.calling = False
        try:
            return self.source.finish_in(seconds)
        except TimeoutError as error:
            self.calling = not isinstance(error, ParallelEnvError)
            raise

    # -- what a facade needs ---------------------------------------------------------------------------------------

    def check_mode(self, facade: str, modes: Collection[AutoresetMode]) -> None:
        """Raise `ValueError` unless a facade supports the auto-reset mode."""
        as_disabled = self.source.reset_replaces_automatic_one and AutoresetMode.DISABLED in modes
        if self.mode not in modes and not as_disabled:
            supported = " or ".join(f"auto_reset={_AUTO_RESET[mode]}" for mode in modes)
            raise ValueError(f"{facade} needs a ParallelEnv with {supported}, got auto_reset={_AUTO_RESET[self.mode]}")

    def check_batch_size(self, facade: str, *, partial_resets: bool = False) -> None:
        """Raise `ValueError` unless a facade can receive all results at once, and reset some environments if needed."""
        batch_size, how, advice = self.source.batch_size, "at a time", ""
        if partial_resets and not self.source.partial:
            how = "and resets some of them"
            advice = f": make them with batch_size={self.num_envs}" if batch_size < self.num_envs else ""
        elif self.num_envs % batch_size:
            advice = ": make them with a batch_size that divides num_envs"
        else:
            return
        text = (
            f"{facade} steps all {self.num_envs} environments {how}, but this simulator returns {batch_size} at a time"
            f"{advice}"
        )
        raise ValueError(text)

    def claim(self, facade: weakref.ref[Any]) -> None:
        """Let one facade step; errors are as in `check_claim`."""
        if self.stepped_by is not facade:
            self.check_claim(facade)
            self.stepped_by = facade

    def check_claim(self, facade: weakref.ref[Any]) -> None:
        """Raise `RuntimeError` if another facade, which is alive and has not called `release`, steps."""
        other = self.stepped_by()
        if other is not None and other is not facade():
            raise RuntimeError(
                f"this ParallelEnv is stepped by a {type(other).__name__} already; make a ParallelEnv for each facade"
            )

    def release(self) -> None:
        """Let another facade step."""
        self.stepped_by = lambda: None
