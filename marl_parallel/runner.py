r"""`BatchRunner`: resets and steps a batch of environments, below the dicts of `ParallelEnv`.

It decides about env ids, about the seeds and options of resets, and about the order of calls. How actions and results
look is up to its user::

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
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import Schema
from marl_parallel.arguments import base_seed, checked_ids, checked_minimum, checked_options, checked_timeout, seeds_of
from marl_parallel.core.batch import Batch
from marl_parallel.core.construction import SeedCheck
from marl_parallel.core.exclusive import CallGuard
from marl_parallel.core.messages import Message
from marl_parallel.core.native import NativePool
from marl_parallel.core.pickling import dumps_for_workers
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
    this for facades. All methods raise `ClosedEnvironmentError` after `close`, and `ParallelEnvError` for a fault.

    `docs/facades.md` lists its attributes for facades.
    """

    def __init__(
        self,
        pool: Pool | NativePool,
        batch: Batch | NativePool,
        schema: Schema,
        seeds: Sequence[int],
        local_modules: list[ModuleType] | None = None,
    ) -> None:
        self.pool, self.batch, self.schema = pool, batch, schema
        self.mode, self.env_ids, self.num_envs = batch.mode, batch.env_ids, len(batch.env_ids)
        self.metadata, self.render_mode = {**schema.metadata, "autoreset_mode": batch.mode}, schema.render_mode
        self.seeds = tuple(seeds)  # the seed that each environment was given, or declared last
        self.takes_options = "options" in schema.reset_keywords  # whether `reset` takes options
        self.restarts = pool.recovery is not None  # whether environments that fail are rebuilt
        self.guard = CallGuard(pool.check_open)  # the call in progress; one call at a time
        self.local_modules = [] if local_modules is None else local_modules  # modules that workers cannot import
        self._base_seed = self.seeds[0]
        self._all_have_reset = False  # whether every environment is known to have been reset
        self._seed_check: SeedCheck | None = None
        self._stepped_by: weakref.ref[object] | None = None

    # -- resets and steps ------------------------------------------------------------------------------------------

    def reset(
        self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], Any]:
        """Begin new episodes, and wait; arguments and errors as of `ParallelEnv.reset`, `options` also one for each.

        Returns:
            The env ids, and the extras of the results, which the batch needs to read them.
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
        """The env ids of a step that may be taken now; errors as of `reset`, or `ResetNeeded`."""
        if self.pool.closed or self.pool.in_flight:
            self.check_idle("step")
        ids = self.env_ids if env_ids is None else self.checked_ids(env_ids)
        if not self._all_have_reset:
            self.check_has_reset(ids, "step")
        return ids

    def step(self, env_ids: tuple[int, ...], written: Any) -> Any:
        """Carry out actions, and wait; returns the extras of the results, which the batch needs to read them.

        Args:
            env_ids: As `ids_to_step` returned them.
            written: What the batch returned when the actions were written.
        """
        if written or env_ids is not self.env_ids:
            return self.pool.run(Message.STEP, env_ids, written or None)
        return self.pool.step_all()

    def send(self, env_ids: Sequence[int], written: Any, *, together: bool = False) -> None:
        """Begin to carry out actions of environments that are not in flight, and return; arguments as of `step`.

        With `together`, all are received at once, which is faster.
        """
        self.pool.send(Message.STEP, env_ids, written or None, together=together)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> Results:
        """Wait for results of `send` and `send_reset`, and take all that are here; as `ParallelEnv.recv`."""
        self.pool.check_open()
        in_flight = self.pool.in_flight
        if not in_flight:
            raise NoAsyncCallError("nothing is in flight; send() or reset_async() before recv()", "recv")
        results = self.pool.recv(checked_minimum(min_envs, in_flight), checked_timeout(timeout, "timeout", zero=True))
        self._note_resets(results.resets, results.extras)
        return results

    # -- checks ----------------------------------------------------------------------------------------------------

    def checked_ids(self, env_ids: Sequence[int] | None) -> tuple[int, ...]:
        """Env ids as a tuple; all of them for None. Raises `ValueError` or `TypeError` for anything else."""
        return self.env_ids if env_ids is None else checked_ids(env_ids, self.num_envs)

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` if everything has been closed."""
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
        """Raise `ResetNeeded` if one of these environments has never been reset."""
        if not self._all_have_reset:
            has_reset = self.batch.has_reset
            self._all_have_reset = all(has_reset)
            never = [env_id for env_id in env_ids if not has_reset[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before {name}()")

    def check_seed(self, seed: Any) -> None:
        """Raise `ValueError` for a seed if `reset` can take none."""
        if seed is not None and self.pool.seeded_at_start:
            raise ValueError(f"seed={seed!r}, but these environments are seeded only once, where they are made")

    def check_mode(self, facade: str, modes: Collection[AutoresetMode]) -> None:
        """Raise `ValueError` unless a facade supports the auto-reset mode.

        A simulator that has no mode but `NEXT_STEP` passes for `DISABLED`: a reset right after an episode's end cancels
        the one that it would do.
        """
        passes_for = {self.mode, AutoresetMode.DISABLED} if self.batch.mode_is_fixed else {self.mode}
        if passes_for.isdisjoint(modes):
            served = " or ".join(f"auto_reset={_AUTO_RESET[mode]}" for mode in modes)
            raise ValueError(f"{facade} wants a ParallelEnv with {served}, got auto_reset={_AUTO_RESET[self.mode]}")

    def check_comes_together(self, facade: str, *, partial_resets: bool = False) -> None:
        """Raise `ValueError` unless a facade can receive all results at once, and reset some environments if needed."""
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
        """Let one facade step; `RuntimeError` if another one does that is alive and has not called `release`."""
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
        """Note resets; once all environments have been reset, warn if their first observations are equal."""
        self.batch.begin(env_ids)
        check = self._seed_check
        if check is None:
            return
        batch = cast(Batch, self.batch)  # native simulators have no check
        for env_id in env_ids:
            more = extras.get(env_id)
            snapshot = more if isinstance(more, Snapshot) else batch.snapshot(env_id, more)
            check.note(env_id, snapshot.dicts[0])
        if not all(self.batch.has_reset) or self.pool.in_flight:
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
        if seed is not None and self.schema.seeded_when_made:
            warnings.warn(
                f"seed={seed!r} is refused: these environments are seeded when they are made; give it to ParallelEnv, "
                "which gives it to their constructors",
                UserWarning,
                stacklevel=5,
            )
            seed = None
        base, seeds = self._seeds_for(seed, env_ids)
        recovery, has_reset = self.pool.recovery, self.batch.has_reset
        for_each = checked_options(options, env_ids)
        for own_options in for_each:
            if own_options is not None:
                self.schema.check_options(own_options)
        keywords: dict[int, bytes] = {}
        new_seeds = [*self.seeds]
        for env_id, own, own_options in zip(env_ids, seeds, for_each, strict=True):
            passed: dict[str, Any] = {}
            if own is None and not has_reset[env_id] and (recovery is None or not recovery.slots[env_id].restarts):
                own = base + env_id
            if own is not None:
                passed["seed"] = new_seeds[env_id] = own
            if own_options is not None:
                passed["options"] = recovery.reset_options(env_id, own_options) if recovery else own_options
            keywords[env_id] = dumps_for_workers(passed, "options", self.local_modules)
        # Before the reset: an environment that fails in it is rebuilt with a seed of the new base.
        self._base_seed, self.seeds, self.pool.seeds_stale = base, tuple(new_seeds), True
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
