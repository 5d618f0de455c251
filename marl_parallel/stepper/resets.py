"""`ResetArguments`: the seeds and options of resets, and the seeds of random actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from marl_parallel.action_masks import ActionSampler
from marl_parallel.adapters import AgentID, Schema
from marl_parallel.arguments import (
    base_seed,
    checked_options,
    is_sequence_of_seeds,
    pool_seeds,
    seeds_of,
)
from marl_parallel.core.messages import SEEDS_GENERATORS, Message
from marl_parallel.core.objects.pickling import add_missing_modules, dumps_for_workers
from marl_parallel.core.pool.construction import DefaultSeed, SeedCheck
from marl_parallel.core.pool.saved_states import EnvState
from marl_parallel.core.pool.slots import Snapshot
from marl_parallel.core.source import Source, Transitions
from marl_parallel.core.warn import warn
from marl_parallel.stepper.workers import Workers
from marl_parallel.types import NoSpaceDeclared, ParallelEnvError

Seeds = int | Sequence[int | None] | None
"""For a reset: the seed of environment 0, one seed for each environment, or None."""

Options = dict[str, Any] | list[dict[str, Any] | None] | None
"""For the resets of all environments, or one for each of them."""


class ResetArguments:
    """What resets of a batch get: seeds and options; and the random actions, which depend on the seeds.

    Args:
        source: Carries out requests.
        transitions: Where each environment stands.
        schema: The agents and spaces.
        workers: The worker pool and its helpers, if there is one.
        seeds: The seed that each environment got, or None with `seed="own"`.
        seed_check: Whether the seeds of environments make a difference, until all have been reset once; None for no
            check.
        default_seed: A check of the default seed, until environment 0 gets another one.
        no_options: See below.

    Attributes:
        seeds: The seed that each environment got, or declared last.
        passed_seeds: The seed that each environment got last; None if it got none.
        takes_options: Whether `reset` of an environment takes options.
        no_options: The environments whose `reset` takes none, if others do. Options for all leave them out.
    """

    def __init__(
        self,
        source: Source,
        transitions: Transitions,
        schema: Schema,
        workers: Workers | None,
        seeds: Sequence[int | None],
        seed_check: SeedCheck | None = None,
        default_seed: DefaultSeed | None = None,
        no_options: Collection[int] = (),
    ) -> None:
        self._source, self._transitions, self._schema, self._workers = source, transitions, schema, workers
        self._env_ids, self._local_modules = transitions.env_ids, [] if workers is None else workers.local_modules
        self.takes_options, self.no_options = "options" in schema.reset_keywords, no_options
        self.seeds: tuple[int | None, ...] = tuple(seeds)
        self._base_seed = self.seeds[0]  # None with seed="own": environments keep theirs
        self.passed_seeds: list[int | None] = [*self.seeds]
        self._samplers: dict[int, ActionSampler] = {}  # by environment, those that have been used since its last seed
        self._default_seed, self._default_seed_checked = default_seed, False
        self._seed_check = None if seed_check is None or seed_check.is_done else seed_check
        if seed_check is not None and seed_check.first_warning is not None:
            warn(seed_check.first_warning, UserWarning)

    # -- of one reset ----------------------------------------------------------------------------------------------

    def check(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> None:
        """Raise the errors of `keywords`, and change nothing."""
        self._check_takes(options)
        self.check_seed(seed)
        for env_options in self._checked_options(options, env_ids):
            if env_options is not None:
                dumps_for_workers(env_options, "options", self._local_modules, with_keys=False)
        if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str | bytes):
            seeds_of(seed, env_ids)
        elif seed is not None:
            base_seed(seed)

    def check_seed(self, seed: Any) -> None:
        """Raise `ValueError` for a seed if `reset` accepts none."""
        if seed is not None and not self._source.reseeds:
            raise ValueError(
                f"seed={seed!r}, but these environments are seeded only once, when they are made: pass the seed there, "
                "and reset without one"
            )

    def keywords(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> Any:
        """The pickled keywords of each environment's reset, by env id; for native simulators, seeds. Saves seeds."""
        self._check_takes(options)
        self.check_seed(seed)
        if self._workers is None:
            return None if seed is None else self._seeds_of_all(env_ids, seed)
        pool, rebuilds = self._workers.pool, self._workers.rebuilds
        if seed is not None and self._schema.seeded_when_made:
            warn(
                f"seed={seed!r} is ignored: these environments are seeded when they are made. Pass the seed to "
                "ParallelEnv",
                UserWarning,
            )
            seed = None
        base = self._base_seed
        seeds: list[int | None] = [None] * len(env_ids)
        if is_sequence_of_seeds(seed):
            seeds = seeds_of(cast(Sequence[int | None], seed), env_ids)
        elif seed is not None:
            first = base_seed(seed)
            base = None if base is None else first
            seeds = [first + env_id for env_id in env_ids]
        # Everything that may raise comes first, so that an error changes nothing.
        keywords: dict[int, bytes] = {}
        new_seeds, sampler_seeds, merged = [*self.seeds], dict[int, int](), dict[int, dict[Any, Any]]()
        for env_id, env_seed, env_options in zip(env_ids, seeds, self._checked_options(options, env_ids), strict=True):
            passed: dict[str, Any] = {}
            slot = pool.slots[env_id]
            if env_seed is not None:
                passed[SEEDS_GENERATORS] = True
            elif base is not None and not slot.has_reset and not rebuilds.count(env_id):
                env_seed = base + env_id
            if env_seed is not None:
                passed["seed"] = new_seeds[env_id] = sampler_seeds[env_id] = env_seed
            if env_options is not None:
                passed["options"] = merged[env_id] = rebuilds.merged_options(env_id, env_options)
            keywords[env_id] = dumps_for_workers(passed, "options", self._local_modules, with_keys=False)
        if self._default_seed is not None and (0, None) not in zip(env_ids, seeds) and 0 in env_ids:
            self._default_seed.forget()
            self._default_seed = None
        remembered = [env_id for env_id, of_env in merged.items() if rebuilds.remember_options(env_id, of_env)]
        # Before the reset: an environment that fails in it is rebuilt with a seed of the new base.
        self._base_seed, self.seeds, pool.seeds_stale = base, tuple(new_seeds), True
        for env_id, env_seed in sampler_seeds.items():
            self.passed_seeds[env_id] = env_seed
            self._samplers.pop(env_id, None)
        if rebuilds.base_seed != base:
            rebuilds.base_seed = base
            pool.in_call("", rebuilds.outdate, self._env_ids)
        elif remembered:
            pool.in_call("", rebuilds.outdate, remembered)
        return keywords

    def _seeds_of_all(self, env_ids: Sequence[int], seed: Seeds) -> list[int]:
        """The new seeds of a native simulator; saves them."""
        if len(env_ids) < len(self._env_ids):
            raise ValueError(
                f"seed={seed!r} for environments {[*env_ids]}, but these environments are seeded all at once: reset all"
            )
        by_env = dict(zip(env_ids, pool_seeds(seed, env_ids, self._source.name)))
        seeds = [by_env[env_id] for env_id in self._env_ids]
        self._base_seed, self.seeds = seeds[0], tuple(seeds)
        self.passed_seeds = [*self.seeds]
        self._samplers.clear()
        return seeds

    def warn_of_equal_observations(self, env_ids: Sequence[int], leftovers: Any) -> None:
        """Once all environments have been reset, warn if their first observations are equal."""
        if self._default_seed is not None and not self._default_seed_checked and 0 in env_ids:
            self._default_seed_checked = True
            text = self._default_seed.warning(self._first_observations(0, leftovers))
            if text is not None:
                warn(text, UserWarning)
        check = self._seed_check
        if check is None:
            return
        for env_id in env_ids:
            check.record_first(env_id, self._first_observations(env_id, leftovers))
        if not all(self._transitions.has_reset) or self._source.in_flight:
            return
        self._seed_check = None
        declared = self._source.execute_in(Message.SEED, self._env_ids) if check.asks_again else None
        text = check.warning(self.seeds, declared)
        if text is not None:
            warn(text, UserWarning)

    def _first_observations(self, env_id: int, leftovers: Any) -> dict[AgentID, Any]:
        """The observations that a reset has returned, from the leftovers of its result."""
        assert self._workers is not None
        result = leftovers.get(env_id)
        if not isinstance(result, Snapshot):
            result = self._workers.transitions.snapshot(env_id, result)
        return result.transition.observations

    # -- options of later resets -----------------------------------------------------------------------------------

    def set_options(self, env_ids: Sequence[int], options: Options) -> None:
        """Set the options of every later reset of environments; as `ParallelEnv.set_reset_options`."""
        if self._workers is None or not self.takes_options:
            checked_options(options, env_ids)
            self._check_takes(options)
            return
        options_of = dict(zip(env_ids, self._checked_options(options, env_ids), strict=True))
        rebuilds, pool = self._workers.rebuilds, self._workers.pool

        def pickled() -> dict[int, bytes | None]:
            return {
                env_id: None if one is None else dumps_for_workers(one, "options", self._local_modules, with_keys=False)
                for env_id, one in options_of.items()
            }

        before, now = {env_id: rebuilds.options(env_id) for env_id in env_ids}, pickled()
        while now != before:
            rebuilds.set_options(now)  # first: an environment that is rebuilt meanwhile gets them, too
            try:
                results = pool.execute_in(Message.OPTIONS, env_ids, now)
            except ParallelEnvError:  # of a worker that has been replaced, if anything is open
                if not pool.closed:
                    rebuilds.remember_replaced(before)
                    pool.in_call("", rebuilds.outdate, env_ids)
                raise
            if not results:
                rebuilds.remember_replaced(before)
                pool.in_call("", rebuilds.outdate, env_ids)
                return
            rebuilds.set_options(before)
            pool.execute_in(Message.OPTIONS, env_ids, before)
            if not add_missing_modules(self._local_modules, results, "options of"):
                env_id, refusal = next(iter(results.items()))
                raise refusal.kind(f"environment {env_id}: {refusal.text}")
            now = pickled()

    def remember_options(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> None:
        """Save the current options of environments that keep them, for environments that are constructed again."""
        assert self._workers is not None
        pool, rebuilds = self._workers.pool, self._workers.rebuilds
        for env_id in env_ids:
            rebuilds.remember_options(env_id, rebuilds.merged_options(env_id, options))
        pool.in_call("", rebuilds.outdate, env_ids)

    def _check_takes(self, options: Options) -> None:
        if options is not None and not self.takes_options:
            raise ValueError(f"options={options!r}, but `reset` of these environments takes no options: leave them out")

    def _checked_options(self, options: Options, env_ids: Sequence[int]) -> Sequence[dict[str, Any] | None]:
        options_of = checked_options(options, env_ids)
        for index, env_id in enumerate(env_ids):
            if options_of[index] is None:
                continue
            if env_id not in self.no_options:
                self._schema.check_options(options_of[index])
            elif isinstance(options, list):
                raise ValueError(
                    f"environment {env_id}: options={options_of[index]!r}, but its `reset` takes no options: pass None "
                    f"for the environments {sorted(self.no_options)}"
                )
            else:  # one dict is for those that take options
                options_of[index] = None
        return options_of

    # -- seeds -----------------------------------------------------------------------------------------------------

    def update_seeds(self) -> None:
        """Ask the environments for their seeds."""
        declared = self._source.execute_in(Message.SEED, self._env_ids)
        self.seeds, self._source.seeds_stale = tuple(map(declared.get, self._env_ids)), False

    def saved(self, env_id: int, state: EnvState) -> EnvState:
        """The state of an environment, with its seeds and the generators of its random actions."""
        if env_id not in self._samplers and self._schema.action_spaces:  # it depends on the environment's number
            self._ensure_sampler(env_id)
        sampler = self.passed_seeds[env_id], self._samplers.get(env_id)
        return state._replace(base_seed=self._base_seed, seed=self.seeds[env_id], sampler=sampler)

    def load(self, loaded: Mapping[int, EnvState]) -> None:
        """Go on with the seeds of loaded states; if all environments are loaded, with their base seed, too."""
        seeds, bases = [*self.seeds], {state.base_seed for state in loaded.values()}
        for env_id, state in loaded.items():
            seeds[env_id] = state.seed
            self.passed_seeds[env_id], sampler = state.sampler
            self._samplers.pop(env_id, None)
            if sampler is not None:
                self._samplers[env_id] = sampler
        self.seeds = tuple(seeds)
        if len(bases) == 1 and len(loaded) == len(self._env_ids):
            assert self._workers is not None
            self._base_seed = self._workers.rebuilds.base_seed = bases.pop()

    # -- random actions --------------------------------------------------------------------------------------------

    def sample_actions(self, env_ids: Sequence[int]) -> list[dict[AgentID, Any]]:
        """Random actions that masks allow, for the agents that act: one dict by agent for each environment."""
        declared, acting = self._schema.action_spaces, self._transitions.acting
        if not declared:
            raise NoSpaceDeclared("these environments declare no action spaces to draw random actions from", "action")
        for agent in self._schema.possible_agents:
            if agent not in declared:
                raise NoSpaceDeclared(f"agent {agent!r} declares no action space to draw random actions from", "action")
        result = []
        for env_id in env_ids:
            self._ensure_sampler(env_id)
            for agent in acting[env_id]:
                if agent not in declared:
                    raise NoSpaceDeclared(
                        f"environment {env_id}: agent {agent!r} declares no action space to draw random actions from",
                        "action",
                    )
            result.append(self._samplers[env_id].sample(acting[env_id], self._transitions.masks(env_id)))
        return result

    def _ensure_sampler(self, env_id: int) -> None:
        """Make the sampler of an environment's random actions, unless there is one."""
        if env_id not in self._samplers:
            seed = self.passed_seeds[env_id]
            self._samplers[env_id] = ActionSampler(self._schema.action_spaces, (base_seed(seed), env_id))
