r"""`BatchRunner`: resets and steps a batch of environments, below the dicts of `ParallelEnv`.

It decides about env ids, about the seeds and options of resets, and about the order of calls. How actions and results
look is up to whoever stands on it::

    ParallelEnv (dicts)     vector.ArrayStepper (arrays)
                   \           /
                   BatchRunner           reset, step, send, recv
                    |        |
                  pool     batch                Pool and Batch, or NativePool for both
    carries out requests    actions in, transitions out
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import Schema
from marl_parallel.arguments import (
    base_seed,
    checked_ids,
    checked_minimum,
    checked_options,
    checked_patience,
    seeds_of,
)
from marl_parallel.core.batch import Batch
from marl_parallel.core.construction import SeedCheck
from marl_parallel.core.exclusive import CallGuard
from marl_parallel.core.messages import Message
from marl_parallel.core.native import NativePool
from marl_parallel.core.pickling import sendable
from marl_parallel.core.pool import Pool, Results
from marl_parallel.core.slots import Snapshot

Seeds = int | Sequence[int | None] | None
"""For a reset: the seed of environment 0, one seed for each environment, or None."""

Options = dict[str, Any] | list[dict[str, Any] | None] | None
"""For the resets of all environments, or one for each of them."""

_AUTO_RESET = {AutoresetMode.SAME_STEP: "True", AutoresetMode.DISABLED: "False", AutoresetMode.NEXT_STEP: '"NEXT_STEP"'}


class BatchRunner:
    """Resets and steps a batch of environments.

    A step is three calls: actions are written by the batch (as dicts, or as arrays by `batch.arrays()`), `step` carries
    them out, and the batch reads the results. All three belong under one entry of `guard`; `vector.ArrayStepper` does
    this for facades.

    Args:
        pool: Carries out requests.
        batch: Holds actions and transitions.
        schema: The agents and their spaces.
        seeds: The seed that each environment was constructed with.
        metadata: The metadata of environment 0.
        render_mode: The render mode of environment 0.
        reset_keywords: Which of `seed` and `options` the environments' `reset` takes.
        check_options: Raises where the environments do not take some options.
        seeded_when_made: Whether only constructors take a seed, so that a seed for `reset` is ignored with a warning.
        only_here: Modules that workers cannot import.

    Attributes:
        pool: As given.
        batch: As given. Its `acting`, `alive` and `over` say where each environment stands.
        schema: As given.
        metadata: As given, with the key `"autoreset_mode"`.
        render_mode: As given.
        num_envs: The number of environments.
        env_ids: All environments.
        mode: When episodes begin anew.
        seeds: The seed that each environment was given, or declared when it was asked last.
        takes_options: Whether `reset` takes options.
        restarts: Whether environments that fail are rebuilt (`on_error="restart"`).
        guard: The call in progress; one call at a time.
        only_here: As given.
    """

    def __init__(
        self,
        pool: Pool | NativePool,
        batch: Batch | NativePool,
        schema: Schema,
        seeds: Sequence[int],
        metadata: Mapping[str, Any],
        render_mode: str | None,
        *,
        reset_keywords: Collection[str] = (),
        check_options: Callable[[Any], None] | None = None,
        seeded_when_made: bool = False,
        only_here: list[ModuleType] | None = None,
    ) -> None:
        self.pool, self.batch, self.schema = pool, batch, schema
        self.mode, self.env_ids, self.num_envs = batch.mode, batch.env_ids, len(batch.env_ids)
        self.metadata, self.render_mode = {**metadata, "autoreset_mode": batch.mode}, render_mode
        self.seeds = tuple(seeds)
        self.takes_options = "options" in reset_keywords
        self.restarts = pool.recovery is not None
        self.guard = CallGuard(pool.check_open)
        self.only_here = [] if only_here is None else only_here
        self._base_seed = self.seeds[0]
        self._check_options, self._seeded_when_made = check_options, seeded_when_made
        self._all_have_reset = False  # whether every environment is known to have been reset
        self._seed_check: SeedCheck | None = None
        self._stepped_by: weakref.ref[object] | None = None

    # -- resets and steps ------------------------------------------------------------------------------------------

    def reset(
        self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], Any]:
        """Begin new episodes, and wait.

        Args:
            seed: The seed of environment 0, so that environment i gets `seed + i`; or one for each of `env_ids`.
            options: For the reset of every environment, or a list with one for each of `env_ids`.
            env_ids: Which environments; None for all.

        Returns:
            The env ids, and the extras of the results, which the batch needs to read them.

        Raises:
            ValueError: Unknown or doubled env ids, a wrong number of seeds, or options that are not taken. Nothing has
                been reset.
            AlreadyPendingCallError: Environments are in flight. Nothing has been reset.
            ClosedEnvironmentError: Everything has been closed.
            ParallelEnvError: A fault.
        """
        self.check_idle("reset")
        ids = self.checked_ids(env_ids)
        keywords = self._reset_keywords(ids, seed, options)
        extras = self.pool.run(Message.RESET, ids, keywords)
        self._note_resets(ids, extras)
        return ids, extras

    def send_reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        """Begin new episodes and return; `recv` has the results. Arguments and errors as of `reset`."""
        ids = self.checked_ids(env_ids)
        self.check_not_in_flight(ids, "reset_async")
        self.pool.send(Message.RESET, ids, self._reset_keywords(ids, seed, options))

    def ids_to_step(self, env_ids: Sequence[int] | None = None) -> tuple[int, ...]:
        """The env ids of a step that may be taken now.

        Raises:
            ValueError: Unknown or doubled env ids.
            ResetNeeded: An environment has never been reset.
            AlreadyPendingCallError: Environments are in flight.
            ClosedEnvironmentError: Everything has been closed.
        """
        if self.pool.closed or self.pool.in_flight:
            self.check_idle("step")
        ids = self.env_ids if env_ids is None else self.checked_ids(env_ids)
        if not self._all_have_reset:
            self.check_has_reset(ids, "step")
        return ids

    def step(self, env_ids: tuple[int, ...], written: Any) -> Any:
        """Carry out actions, and wait.

        Args:
            env_ids: As `ids_to_step` returned them.
            written: What the batch returned when the actions were written.

        Returns:
            The extras of the results, which the batch needs to read them.

        Raises:
            ParallelEnvError: A fault.
        """
        if written or env_ids is not self.env_ids:
            return self.pool.run(Message.STEP, env_ids, written or None)
        return self.pool.step_all()

    def send(self, env_ids: Sequence[int], written: Any, *, together: bool = False) -> None:
        """Begin to carry out actions, and return; arguments as of `step`.

        Args:
            env_ids: Which environments; none of them is in flight, and all have been reset.
            written: What the batch returned when the actions were written.
            together: Whether all are received at once, which is faster.
        """
        self.pool.send(Message.STEP, env_ids, written or None, together=together)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> Results:
        """Wait for results of `send` and `send_reset`, and take all that are here.

        Args:
            min_envs: The number of environments to wait for; None for all in flight.
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            NoAsyncCallError: Nothing is in flight.
            ValueError: `min_envs` is more than there are in flight.
            TimeoutError: There were fewer in time. Nothing is lost.
            ParallelEnvError: A fault.
        """
        self.pool.check_open()
        in_flight = self.pool.in_flight
        if not in_flight:
            raise NoAsyncCallError("nothing is in flight; send() or reset_async() before recv()", "recv")
        results = self.pool.recv(checked_minimum(min_envs, in_flight), checked_patience(timeout))
        self._note_resets(results.resets, results.extras)
        return results

    # -- checks ----------------------------------------------------------------------------------------------------

    def checked_ids(self, env_ids: Sequence[int] | None) -> tuple[int, ...]:
        """Env ids as a tuple; all of them for None. Raises `ValueError` or `TypeError` for anything else."""
        return self.env_ids if env_ids is None else checked_ids(env_ids, self.num_envs)

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` where everything has been closed."""
        self.pool.check_open()

    def check_idle(self, name: str) -> None:
        """Raise unless everything is open and nothing in flight."""
        self.pool.check_open()
        if self.pool.in_flight:
            raise AlreadyPendingCallError(
                f"{name}() while environments {[*self.pool.pending]} are in flight; recv() them first", name
            )

    def check_not_in_flight(self, env_ids: Sequence[int], name: str) -> None:
        """Raise unless everything is open and none of these environments in flight."""
        self.pool.check_open()
        if self.pool.in_flight and (busy := [env_id for env_id in env_ids if env_id in {*self.pool.pending}]):
            raise AlreadyPendingCallError(
                f"{name}() to environments {busy}, which are in flight; recv() them first", name
            )

    def check_has_reset(self, env_ids: Sequence[int], name: str) -> None:
        """Raise `ResetNeeded` where one of these environments has never been reset."""
        if not self._all_have_reset:
            begun = self.batch.begun
            self._all_have_reset = all(begun)
            never = [env_id for env_id in env_ids if not begun[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before {name}()")

    def check_seed(self, seed: Any) -> None:
        """Raise `ValueError` for a seed where `reset` can take none."""
        if seed is not None and self.pool.seeded_at_start:
            raise ValueError(f"seed={seed!r}, but these environments are seeded only once, where they are made")

    def check_mode(self, facade: str, modes: Collection[AutoresetMode]) -> None:
        """Raise `ValueError` unless the auto-reset mode is one that a facade serves.

        A simulator that has no mode but `NEXT_STEP` passes for `DISABLED`: a reset right after an episode's end cancels
        the one that it would do.
        """
        passes_for = {self.mode, AutoresetMode.DISABLED} if self.batch.mode_is_fixed else {self.mode}
        if passes_for.isdisjoint(modes):
            served = " or ".join(f"auto_reset={_AUTO_RESET[mode]}" for mode in modes)
            raise ValueError(f"{facade} wants a ParallelEnv with {served}, got auto_reset={_AUTO_RESET[self.mode]}")

    def check_comes_together(self, facade: str, *, partial_resets: bool = False) -> None:
        """Raise `ValueError` unless the results of all environments can be received at once.

        Args:
            facade: The name of the facade that receives them.
            partial_resets: Whether some environments must be able to be reset without the others, too.
        """
        batch_size = self.pool.batch_size
        if self.num_envs % batch_size:
            raise ValueError(
                f"{facade} steps all {self.num_envs} environments at a time, but these come {batch_size} at a "
                "time: make them with a batch_size of which num_envs is a multiple"
            )
        if partial_resets and not self.pool.partial:
            raise ValueError(
                f"{facade} steps all {self.num_envs} environments and resets some of them, but these come "
                f"{batch_size} at a time"
                + (f": make them with batch_size={self.num_envs}" if batch_size < self.num_envs else "")
            )

    # -- the one facade that steps ---------------------------------------------------------------------------------

    def claim(self, facade: weakref.ref[Any]) -> None:
        """Let one facade step, and no other one as long as it lives and has not called `release`.

        Raises:
            RuntimeError: Another facade steps already.
        """
        if self._stepped_by is facade:
            return
        other = None if self._stepped_by is None else self._stepped_by()
        if other is not None and other is not facade():
            raise RuntimeError(
                f"this ParallelEnv is stepped by a {type(other).__name__} already; make a ParallelEnv for each facade"
            )
        self._stepped_by = facade

    def release(self) -> None:
        """Let another facade step."""
        self._stepped_by = None

    # -- seeds and options of resets -------------------------------------------------------------------------------

    def begin_seed_check(self, check: SeedCheck) -> None:
        """Warn at once of equal seeds, or keep the check until all environments have been reset once."""
        if check.first_warning is not None:
            warnings.warn(check.first_warning, UserWarning, stacklevel=3)
        if not check.is_done:
            self._seed_check = check

    def _note_resets(self, env_ids: Sequence[int], extras: Any) -> None:
        """Note resets; warn, once all environments have been reset, where their first observations are equal."""
        self.batch.begin(env_ids)
        check = self._seed_check
        if check is None:
            return
        batch = cast(Batch, self.batch)  # native simulators have no check
        for env_id in env_ids:
            more = extras.get(env_id)
            snapshot = more if isinstance(more, Snapshot) else batch.snapshot(env_id, more)
            check.note(env_id, snapshot.dicts[0])
        if not all(self.batch.begun) or self.pool.in_flight:
            return
        self._seed_check = None
        declared = self.pool.execute_in(Message.SEED, self.env_ids) if check.asks_again else None
        text = check.warning(self.seeds, declared)
        if text is not None:
            warnings.warn(text, UserWarning, stacklevel=5)

    def _reset_keywords(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> dict[int, bytes]:
        """By environment, the pickled keywords of its reset; the seeds are noted."""
        if options is not None and not self.takes_options:
            raise ValueError(f"options={options!r}, but the reset of these environments takes no options")
        self.check_seed(seed)
        if self.pool.seeded_at_start:
            return {}
        if seed is not None and self._seeded_when_made:
            warnings.warn(
                f"seed={seed!r} is refused: these environments are seeded when they are made; give it to ParallelEnv, "
                "which gives it to their constructors",
                UserWarning,
                stacklevel=5,
            )
            seed = None
        base, seeds = self._seeds_for(seed, env_ids)
        recovery, begun = self.pool.recovery, self.batch.begun
        for_each = checked_options(options, len(env_ids))
        for own_options in for_each:
            if own_options is not None and self._check_options is not None:
                self._check_options(own_options)
        keywords: dict[int, bytes] = {}
        given: dict[int, int] = {}
        for env_id, own, own_options in zip(env_ids, seeds, for_each, strict=True):
            if own_options is not None and recovery is not None:
                own_options = recovery.reset_options(env_id, own_options)
            if own is None and not begun[env_id] and (recovery is None or not recovery.is_rebuilt(env_id)):
                own = base + env_id
            if own is not None:
                given[env_id] = own
            passed = {name: value for name, value in (("seed", own), ("options", own_options)) if value is not None}
            keywords[env_id] = sendable(passed, "options", self.only_here)
        # Before the reset: an environment that fails in it is rebuilt with a seed of the new base.
        self._base_seed, self.pool.seeds_stale = base, True
        self.seeds = tuple(given.get(env_id, own) for env_id, own in enumerate(self.seeds))
        if recovery is not None:
            recovery.base_seed = base
        return keywords

    def _seeds_for(self, seed: Seeds, env_ids: Sequence[int]) -> tuple[int, Sequence[int | None]]:
        """The base of seeds from now on, and the seed that each of these environments is explicitly given."""
        if seed is None:
            return self._base_seed, [None] * len(env_ids)
        one = isinstance(seed, str | bytes) or (isinstance(seed, np.ndarray) and seed.ndim == 0)
        if isinstance(seed, Sequence | np.ndarray) and not one:
            return self._base_seed, seeds_of(seed, env_ids)
        base = base_seed(seed)
        return base, [base + env_id for env_id in env_ids]
