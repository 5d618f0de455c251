"""The part of `ParallelEnv` that steps without waiting: `send`, `reset_async` and `recv`.

Also what resets and steps have in common, whether somebody waits for them or not: seeds, and who has been begun.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, cast

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from marl_parallel.adapters import AgentID
from marl_parallel.arguments import (
    addressed,
    base_seed,
    checked_minimum,
    checked_options,
    checked_patience,
    seeds_of,
)
from marl_parallel.core.batch import Batch, Made
from marl_parallel.core.exclusive import CALL, exclusive
from marl_parallel.core.messages import Message
from marl_parallel.core.pickling import sendable
from marl_parallel.core.seed_check import SeedCheck
from marl_parallel.inquiries import Inquiries
from marl_parallel.types import StepBatch

Options = dict[str, Any] | list[dict[str, Any] | None] | None
"""For the resets of all environments, or one for each of them."""


class AsyncStepping(Inquiries):
    """Builds on what can be asked; `ParallelEnv` builds on this."""

    _base_seed: int
    _reset_keywords: frozenset[str]
    _check_options: Callable[[Any], None]
    _seeded_when_made: bool
    _seed_check: SeedCheck | None = None

    def send(
        self,
        actions: Sequence[Mapping[AgentID, Any]] | Mapping[int, Mapping[AgentID, Any]],
        env_ids: Sequence[int] | None = None,
    ) -> None:
        """Begin to step environments and return; `recv` has the results, each as soon as it is there.

        With `backend="serial"`, the steps are taken here.

        Args:
            actions: One dict by agent for each environment, in the order of `env_ids`; or a mapping from env id to
                such a dict.
            env_ids: Which environments, in any order; None for all of them, or for all that a mapping names.

        Raises:
            AlreadyPendingCallError: One of them is in flight already, or another call is in progress. Nothing
                has been stepped.
            ValueError: As of `step`, or no environment is named, as where `recv(min_envs=0)` has returned none. Nothing
                has been stepped.
            ResetNeeded: An environment has never been reset. Nothing has been stepped.
        """
        guard, entry = self._guard, ("send", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            ids, rows = addressed(actions, env_ids, self._num_envs)
            self._check_not_in_flight(ids, "send")
            self._check_begun(ids, "send")
            self._crew.send(Message.STEP, ids, self._batch.write_actions(ids, rows) or None)
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    @exclusive("reset_async")
    def reset_async(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> None:
        """Begin new episodes and return; `recv` has the first observations, each as soon as it is there.

        Args:
            seed: As of `reset`.
            options: As of `reset`.
            env_ids: Which environments, in any order; None for all of them.

        Raises:
            AlreadyPendingCallError: One of them is in flight already, or another call is in progress. Nothing
                has been reset.
            ValueError: As of `reset`. Nothing has been reset.
        """
        ids = self._checked_ids(env_ids)
        self._check_not_in_flight(ids, "reset_async")
        base, given, keywords = self._reset_keywords_for(ids, seed, options)
        self._rebase(base, given)
        self._crew.send(Message.RESET, ids, keywords)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> StepBatch:
        """Take the results of all environments in flight that are ready, waiting for some of them.

        Args:
            min_envs: How many to wait for; None for all in flight, 0 for none.
            timeout: Seconds to wait at most; None for as long as it takes.

        Returns:
            What is ready, in the order in which it was completed; at least `min_envs`. With `copy=False`, the views of
            an environment are valid until it is sent to again.

        Raises:
            NoAsyncCallError: Nothing is in flight.
            ValueError: `min_envs` is more than there are in flight.
            TimeoutError: There were fewer than `min_envs` in time. Nothing is lost, and `recv` can be called again.
            ParallelEnvError: A fault, as in `step`; everything has been closed.

        Example:
            >>> from marl_parallel import ParallelEnv
            >>> from mpe2 import simple_spread_v3
            >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
            ...     env.reset_async()
            ...     batch = env.recv(min_envs=1)
            ...     while env.pending:
            ...         batch = env.recv(min_envs=1)
            ...     env.send({2: {agent: 0 for agent in env.acting[2]}})
            ...     env.recv().env_ids
            (2,)
        """
        guard, entry = self._guard, ("recv", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            self._crew.check_open()
            in_flight = len(self._crew.in_flight)
            if not in_flight:
                raise NoAsyncCallError("nothing is in flight; send() or reset_async() before recv()", "recv")
            ids, resets, told = self._crew.receive(checked_minimum(min_envs, in_flight), checked_patience(timeout))
            self._batch.begin(resets)
            if self._seed_check is not None:
                self._check_seeds(resets, told, stacklevel=3)
            return StepBatch(ids, *self._batch.read(ids, told))
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    # -- within ----------------------------------------------------------------------------------------------------

    def _begin_seed_check(self, check: SeedCheck) -> None:
        """Warn at once, or keep the check until all environments have been reset once."""
        if check.first_warning is not None:
            warnings.warn(check.first_warning, UserWarning, stacklevel=3)
        if not check.is_done:
            self._seed_check = check

    def _check_seeds(self, resets: Sequence[int], told: Mapping[int, Any], stacklevel: int) -> None:
        """Look at first observations; warn, once all environments have been reset, where they are alike.

        Args:
            resets: The environments that have just been reset.
            told: What travelled pickled.
            stacklevel: As of `warnings.warn`, from here.
        """
        check, crew = self._seed_check, self._crew
        assert check is not None
        batch = cast(Batch, self._batch)  # simulators that step many environments by themselves have no check
        for env_id in resets:
            more = told.get(env_id)
            made = more if isinstance(more, Made) else batch.peek(env_id, more)
            check.note(env_id, made.dicts[0])
        if not all(self._batch.begun) or crew.in_flight:
            return
        self._seed_check = None
        declared = crew.ask(Message.SEED, self._all) if check.asks_again else None
        text = check.warning(self._seeds_used, declared)
        if text is not None:
            warnings.warn(text, UserWarning, stacklevel=stacklevel)

    def _rebase(self, base: int, given: Mapping[int, int]) -> None:
        """Note what seeds are drawn from now on, and those that environments have just been given."""
        self._base_seed, self._crew.seeds_stale = base, True
        self._seeds_used = tuple(given.get(env_id, seed) for env_id, seed in enumerate(self._seeds_used))
        if self._crew.restarts is not None:
            self._crew.restarts.base_seed = base

    def _check_not_in_flight(self, ids: Sequence[int], name: str) -> None:
        self._crew.check_open()
        busy = [env_id for env_id in ids if env_id in self._crew.in_flight]
        if busy:
            raise AlreadyPendingCallError(
                f"{name}() to environments {busy}, which are in flight; recv() them first", name
            )

    def _check_seed(self, seed: Any) -> None:
        if seed is not None and self._crew.seeded_at_start:
            raise ValueError(f"seed={seed!r}, but these environments are seeded only once, where they are made")

    def _reset_keywords_for(
        self, ids: Sequence[int], seed: int | Sequence[int | None] | None, options: Options
    ) -> tuple[int, dict[int, int], dict[int, bytes]]:
        """The base of seeds from now on, and by environment the seed it is given and its keywords, pickled."""
        if options is not None and "options" not in self._reset_keywords:
            raise ValueError(f"options={options!r}, but the reset of these environments takes no options")
        self._check_seed(seed)
        if self._crew.seeded_at_start:
            return self._base_seed, {}, {}
        if seed is not None and self._seeded_when_made:
            warnings.warn(
                f"seed={seed!r} is refused: these environments are seeded when they are made; give it to ParallelEnv, "
                "which gives it to their constructors",
                UserWarning,
                stacklevel=4,
            )
            seed = None
        base, seeds = self._seeds_for(seed, ids)
        for_each = checked_options(options, len(ids))
        keywords: dict[int, bytes] = {}
        told: dict[int, int] = {}
        for own_options in for_each:
            if own_options is not None:
                self._check_options(own_options)
        for env_id, own, own_options in zip(ids, seeds, for_each, strict=True):
            if own_options is not None and self._crew.restarts is not None:
                own_options = self._crew.restarts.with_lasting(env_id, own_options)
            if own is None and not self._batch.begun[env_id] and not self._restarted(env_id):
                own = base + env_id
            if own is not None:
                told[env_id] = own
            given = {"seed": own, "options": own_options}
            keywords[env_id] = sendable({k: v for k, v in given.items() if v is not None}, "options", self._only_here)
        return base, told, keywords

    def _restarted(self, env_id: int) -> bool:
        """Whether it has been built anew, with a seed of its own."""
        return self._crew.restarts is not None and self._crew.restarts.counts[env_id] > 0

    def _seeds_for(
        self, seed: int | Sequence[int | None] | None, ids: Sequence[int]
    ) -> tuple[int, Sequence[int | None]]:
        """The base from now on, and the seed that each of these environments is explicitly given."""
        if seed is None:
            return self._base_seed, [None] * len(ids)
        one = isinstance(seed, str | bytes) or (isinstance(seed, np.ndarray) and seed.ndim == 0)
        if isinstance(seed, Sequence | np.ndarray) and not one:
            return self._base_seed, seeds_of(seed, ids)
        base = base_seed(seed)
        return base, [base + env_id for env_id in ids]
