r"""`BatchRunner`: resets and steps a batch of environments, below the dicts of `ParallelEnv`.

It checks env ids and the order of calls, and decides about the seeds and options of resets::

    ParallelEnv (dicts)     vector.ArrayStepper (arrays)
                   \           /
                   BatchRunner           reset, step, send, recv
                    |        |
                source   transitions            a `Source`, and its `Transitions`
    carries out requests   actions in, results out
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import ActionSampler
from marl_parallel.adapters import AgentID, Schema
from marl_parallel.arguments import (
    base_seed,
    checked_ids,
    checked_integer,
    checked_options,
    checked_timeout,
    is_sequence_of_seeds,
    one_for_each,
    pool_seeds,
    seeds_of,
)
from marl_parallel.core.array_view import ArrayView
from marl_parallel.core.block_transitions import BlockTransitions
from marl_parallel.core.columns import RolloutBuffer
from marl_parallel.core.construction import DefaultSeed, SeedCheck
from marl_parallel.core.exclusive import CALL, CallGuard
from marl_parallel.core.messages import SEEDS_GENERATORS, Message, Outputs
from marl_parallel.core.pickling import add_missing_modules, dumps_for_workers
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds
from marl_parallel.core.pool.saved_states import EnvState, SavedStates, from_bytes
from marl_parallel.core.pool.slots import Results, Snapshot
from marl_parallel.core.source import Source, Transitions
from marl_parallel.core.warn import warn
from marl_parallel.types import NoSpaceDeclared, ParallelEnvError

Seeds = int | Sequence[int | None] | None
"""For a reset: the seed of environment 0, one seed for each environment, or None."""

Options = dict[str, Any] | list[dict[str, Any] | None] | None
"""For the resets of all environments, or one for each of them."""

_AUTO_RESET = {AutoresetMode.SAME_STEP: "True", AutoresetMode.DISABLED: "False", AutoresetMode.NEXT_STEP: '"NEXT_STEP"'}


class Workers(NamedTuple):
    """The worker pool and its helpers; only environments in workers have these."""

    pool: Pool
    transitions: BlockTransitions
    rebuilds: Rebuilds
    local_modules: list[ModuleType]  # that workers cannot import


NO_STATE = "these environments have no global state: give them a method state() and a state_space of arrays or numbers"


class BatchRunner:
    """Resets and steps a batch of environments, for `ParallelEnv` and for facades.

    A step is three calls: `transitions` writes actions (dicts, or arrays with a `view`), `step` carries them out, and
    `transitions` reads the results. All three belong under one entry of `guard`; `vector.ArrayStepper` does this for
    facades, which need only the attributes below. All methods raise `ClosedEnvironmentError` after `close`, and
    `ParallelEnvError` for a fault.

    Attributes:
        stepped_by: Returns the one facade that steps, or None.
        schema: The agents and spaces, a `Schema`.
        mode: The auto-reset mode.
        num_envs: The number of environments.
        env_ids: The ids of all environments.
        seeds: The seed of each environment; None with `seed="own"`, if the environment declares none.
        restarts: Whether environments that fail are rebuilt.
        takes_options: Whether the environments' `reset` takes options.
        workers: The worker pool and its helpers; None for a simulator that steps many environments by itself.
        transitions: `acting` and `alive` have a list of agents for each environment: the agents that act next, and the
            agents that are alive. `over` says for each environment whether its episode is over.
    """

    def __init__(
        self,
        source: Source,
        transitions: Transitions,
        view: Callable[..., ArrayView],
        schema: Schema,
        seeds: Sequence[int | None],
        workers: Workers | None = None,
        seed_check: SeedCheck | None = None,
        *,
        restarts: bool = False,
    ) -> None:
        self.source, self.transitions, self.schema, self.workers = source, transitions, schema, workers
        self._new_view, self._views = view, weakref.WeakSet[ArrayView]()
        self.mode, self.env_ids, self.num_envs = transitions.mode, transitions.env_ids, len(transitions.env_ids)
        self.metadata, self.render_mode = {**schema.metadata, "autoreset_mode": transitions.mode}, schema.render_mode
        self.seeds: tuple[int | None, ...] = tuple(seeds)  # the seed that each environment got, or declared last
        self.takes_options = "options" in schema.reset_keywords
        self.restarts = restarts  # whether failed environments are rebuilt
        self.guard = CallGuard(source.check_open)  # one call at a time
        source.guard = weakref.ref(self.guard)
        self.local_modules = [] if workers is None else workers.local_modules
        self._base_seed = self.seeds[0]  # None with seed="own": environments keep theirs
        self._sampler_seeds: list[int | None] = [*self.seeds]
        self._samplers: dict[int, ActionSampler] = {}  # by environment, those that have been used since its last seed
        self._outputs = Outputs()  # what workers write besides the transitions
        self._memory: list[tuple[weakref.ref[Any], int, int]] = []  # of rollout buffers, from where to where
        self._all_have_reset = False  # whether every environment is known to have been reset
        self.calling = False  # whether a call is in flight, from `begin_call` until `finish_call`
        self.default_seed: DefaultSeed | None = None  # until environment 0 gets another seed
        self._default_seed_noted = False
        self._has_warned_of_draws = False  # that `save_state` cannot save process-wide generators
        self.stepped_by: Callable[[], object] = lambda: None
        # Until all environments have been reset once: the check whether their seeds make a difference.
        self._seed_check = None if seed_check is None or seed_check.is_done else seed_check
        if seed_check is not None and seed_check.first_warning is not None:
            warn(seed_check.first_warning, UserWarning)

    def view(self, *, copy: bool, env_ids: range | None = None) -> ArrayView:
        """An `ArrayView` of all environments, or of a range. With `copy`, observations belong to the caller."""
        view = self._new_view(copy=copy, env_ids=env_ids)
        self._views.add(view)
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
            for view in [*self._views]:
                view.drop_memory()
            self._views.clear()
            self.source.drop_memory()
        finally:
            del self.guard[CALL]

    # -- resets and steps ------------------------------------------------------------------------------------------

    def reset(
        self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], Any]:
        """Begin new episodes, and wait.

        Arguments and errors are as in `ParallelEnv.reset`; `options` may also be a list with one for each
        environment. Returns the env ids, and the leftovers of the results, which `transitions` needs to read them.
        """
        self.check_idle("reset")
        ids = self.checked_ids(env_ids)
        self.source.check_resets(ids)
        leftovers = self.source.run(Message.RESET, ids, self._reset_keywords(ids, seed, options))
        self.transitions.statistics.finished = []
        self._note_resets(ids, leftovers)
        return ids, leftovers

    def check_reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        """Raise the errors of `reset` that are about its arguments."""
        ids = self.checked_ids(env_ids)
        self._check_takes(options)
        self.check_seed(seed)
        for env_options in checked_options(options, ids):
            if env_options is not None:
                self.schema.check_options(env_options)
                dumps_for_workers(env_options, "options", self.local_modules, with_keys=False)
        if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str | bytes):
            seeds_of(seed, ids)
        elif seed is not None:
            base_seed(seed)

    def note_options(self, env_ids: Sequence[int], options: Mapping[str, Any]) -> None:
        """Note the current options of environments that keep them, for environments that are constructed again."""
        assert self.workers is not None
        pool, rebuilds = self.workers.pool, self.workers.rebuilds
        for env_id in env_ids:
            rebuilds.remember_options(env_id, rebuilds.merged_options(env_id, options))
        pool.alone("", pool.note_outdated, env_ids)

    def set_reset_options(self, options: Options, env_ids: Sequence[int] | None) -> None:
        """Set the options of every later reset of environments; as `ParallelEnv.set_reset_options`."""
        self.check_idle("set_reset_options")
        ids = self.checked_ids(env_ids)
        options_of = dict(zip(ids, checked_options(options, ids), strict=True))
        if self.workers is None or not self.takes_options:
            self._check_takes(options)
            return
        rebuilds, pool = self.workers.rebuilds, self.workers.pool
        for env_options in options_of.values():
            if env_options is not None:
                self.schema.check_options(env_options)

        def pickled() -> dict[int, bytes | None]:
            return {
                env_id: None if one is None else dumps_for_workers(one, "options", self.local_modules, with_keys=False)
                for env_id, one in options_of.items()
            }

        before, now = {env_id: rebuilds.options(env_id) for env_id in ids}, pickled()
        while now != before:
            rebuilds.set_options(now)  # first: an environment that is rebuilt meanwhile gets them, too
            try:
                results = pool.execute_in(Message.OPTIONS, ids, now)
            except ParallelEnvError:  # of a worker that has been replaced, if anything is open
                if not pool.closed:
                    rebuilds.remember_replaced(before)
                    pool.alone("", pool.note_outdated, ids)
                raise
            if not results:
                rebuilds.remember_replaced(before)
                pool.alone("", pool.note_outdated, ids)
                return
            rebuilds.set_options(before)
            pool.execute_in(Message.OPTIONS, ids, before)
            if not add_missing_modules(self.local_modules, results, "options of"):
                env_id, refusal = next(iter(results.items()))
                raise refusal.kind(f"environment {env_id}: {refusal.text}")
            now = pickled()

    def save_state(self, env_ids: Sequence[int] | None) -> dict[int, EnvState]:
        """The states of environments, by env id; errors are as in `ParallelEnv.save_state`."""
        self.check_idle("save_state")
        ids = self.checked_ids(env_ids)
        states = self._saved_states("save_state")
        self.check_has_reset(ids, "save_state")
        saved = states.save(ids)
        if states.drawing and not self._has_warned_of_draws:
            self._has_warned_of_draws = True
            warn(
                f"environments {states.drawing}, or others in their workers, draw from process-wide generators, whose "
                "states are not saved (random, numpy.random, torch): pass isolate_rng=True to save them, too",
                RuntimeWarning,
            )
        for env_id, state in saved.items():
            if env_id not in self._samplers and self.schema.action_spaces:  # it depends on the environment's number
                self._note_sampler(env_id)
            sampler = self._sampler_seeds[env_id], self._samplers.get(env_id)
            saved[env_id] = state._replace(base_seed=self._base_seed, seed=self.seeds[env_id], sampler=sampler)
        return saved

    def load_state(
        self, states: Sequence[Any], env_ids: Sequence[int] | None, facades: Collection[str] | None = None
    ) -> tuple[dict[int, EnvState], Any]:
        """Load states; returns them by env id, and the leftovers that `transitions` needs to read their results.

        Arguments and errors are as in `ParallelEnv.load_state`; `facades` are as in `SavedStates.check`.
        """
        self.check_idle("load_state")
        ids = self.checked_ids(env_ids)
        saved_states = self._saved_states("load_state")
        if isinstance(states, bytes | bytearray | str) or not isinstance(states, Sequence):
            raise TypeError(f"states must be a list with the bytes of each environment, got {type(states).__name__}")
        one_for_each(states, ids, "states")
        loaded = {env_id: from_bytes(state, f"environment {env_id}") for env_id, state in zip(ids, states)}
        saved_states.check(loaded, facades)
        leftovers, fault = saved_states.load(loaded)
        seeds, bases = [*self.seeds], {state.base_seed for state in loaded.values()}
        for env_id in leftovers:
            state = loaded[env_id]
            seeds[env_id] = state.seed
            self._sampler_seeds[env_id], sampler = state.sampler
            self._samplers.pop(env_id, None)
            if sampler is not None:
                self._samplers[env_id] = sampler
        self.seeds = tuple(seeds)
        if len(bases) == 1 and len(leftovers) == self.num_envs:
            self._base_seed = bases.pop()
            saved_states.rebuilds.base_seed = self._base_seed
        if fault is not None:  # no caller reads the results of those that have been loaded
            self.transitions.read(tuple(leftovers), leftovers)
        self.transitions.statistics.finished = []
        saved_states.note_outdated([*leftovers])
        try:
            if fault is not None:
                raise fault  # its environments have been rebuilt, the others have been loaded
        finally:
            del fault  # else it and this frame would refer to each other
        return loaded, leftovers

    def _saved_states(self, name: str) -> SavedStates:
        if self.workers is None:
            raise NotImplementedError(
                f"{name}() is impossible with {self.source.name}: a simulator that steps many environments by itself "
                "has no state of each environment"
            )
        pool, transitions, rebuilds, _ = self.workers
        return SavedStates(pool, transitions, rebuilds)

    def send_reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        """Begin new episodes and return; `recv` returns the results. Arguments and errors are as in `reset`."""
        ids = self.checked_ids(env_ids)
        self.check_idle("reset_async", ids)
        self.source.send(Message.RESET, ids, self._reset_keywords(ids, seed, options))

    def ids_to_step(self, env_ids: Sequence[int] | None = None) -> tuple[int, ...]:
        """The env ids of a step that is allowed now; errors are as in `reset`, and `ResetNeeded`."""
        if self.source.closed or self.source.in_flight or self.calling:
            self.check_idle("step")
        ids = self.env_ids if env_ids is None else self.checked_ids(env_ids)
        if not self._all_have_reset:
            self.check_has_reset(ids, "step")
        return ids

    def step(self, env_ids: tuple[int, ...], written: Any) -> Any:
        """Carry out the actions that `transitions` has `written` for the env ids of `ids_to_step`, and wait.

        Returns the leftovers of the results, which `transitions` needs to read them.
        """
        leftovers = self.source.run(Message.STEP, env_ids, written or None)
        if self.transitions.statistics.any_finished:
            self.transitions.statistics.finished = []
        return leftovers

    def send(self, env_ids: Sequence[int], written: Any, *, together: bool = False) -> None:
        """Begin to carry out actions of environments that are not in flight, and return; arguments are as in `step`.

        With `together`, all are received at once, which is faster.
        """
        self.source.send(Message.STEP, env_ids, written or None, together=together)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        window: float | None = None,
    ) -> Results:
        """Wait for results of `send` and `send_reset`, and return all that are ready; as `ParallelEnv.recv`.

        With `env_ids`, which must be in flight, wait for all of these environments, and return no others.
        """
        self.source.check_open()
        in_flight = self.source.in_flight
        if not in_flight:
            self.check_not_calling("recv")
            raise NoAsyncCallError("nothing is in flight: call send() or reset_async() before recv()", "recv")
        if env_ids is not None:
            min_envs = len(env_ids)
        number = in_flight if min_envs is None else checked_integer(min_envs, "min_envs", 0, " or None")
        if number > in_flight:
            raise ValueError(f"min_envs={number}, but only {in_flight} environments are in flight")
        if window is not None:
            window = checked_timeout(window, "window", zero=True)
        seconds = checked_timeout(timeout, "timeout", zero=True)
        results = self.source.recv(number, seconds, env_ids, window=window)
        self.transitions.statistics.finished = []
        self._note_resets(results.resets, results.leftovers)
        return results

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

    def write_states(self) -> None:
        """Have each reset and step write the global states, for `states_seen`, from now on.

        Raises `NotImplementedError` if the environments have no state.
        """
        self.check_idle("write_states")
        workers = self.workers
        if workers is None or self.schema.state_space is None:
            raise NotImplementedError(NO_STATE)
        self._have_written(workers, self._outputs._replace(states=True))

    def rollout_buffer(self, num_times: int, more: int) -> RolloutBuffer | None:
        """Make workers write observations of `num_times` time steps into a new buffer, no longer into earlier ones.

        The buffer has `more` bytes for the caller. Memory of earlier buffers is used again once no array refers to it.
        Returns None if workers share no memory, if not all observations are arrays in the block, or without the
        compiled codec.
        """
        self.check_idle("rollout_buffer")
        workers = self.workers
        if workers is None or not workers.pool.backend.capabilities.shares_memory:
            return None
        layout, codec = workers.transitions.layout, workers.transitions.codec
        if codec is None or not layout.agents or layout.observations.agents != self.schema.possible_agents:
            return None
        self._memory = [used for used in self._memory if used[0]() is not None]
        buffer = RolloutBuffer(layout, num_times, layout.nbytes, more)
        for _, start, stop in sorted(self._memory, key=lambda used: used[1]):
            if buffer.nbytes > start:
                buffer = RolloutBuffer(layout, num_times, max(stop, buffer.start), more)
        nbytes = max([buffer.nbytes, *[stop for *_, stop in self._memory]])
        memory = (ctypes.c_char * nbytes).from_buffer(workers.pool.backend.allocate(nbytes))  # only arrays refer to it
        buffer.bind(memory)
        self._memory.append((weakref.ref(memory), buffer.start, buffer.nbytes))
        self._have_written(workers, self._outputs._replace(rollout=(buffer.start, num_times)))
        return buffer

    def _have_written(self, workers: Workers, outputs: Outputs) -> None:
        self._outputs = workers.rebuilds.outputs = outputs
        workers.pool.execute_in_each_worker(Message.OUTPUTS, outputs)
        workers.pool.alone("", workers.pool.note_outdated, self.env_ids)

    def states_seen(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """After `write_states`: the current states, and the last states of finished episodes.

        The last reset or step of each environment has written both, the last state before an automatic reset or a
        restart. Shapes are `(num_envs, *state_space.shape)`. Both are valid until the next step or reset.
        """
        assert self.workers is not None
        return self.workers.transitions.states_seen()

    def restarts_of(self, env_id: int) -> int:
        """How often an environment has been restarted."""
        return 0 if self.workers is None else self.workers.rebuilds.restarts(env_id)

    def reports_restart(self, env_id: int) -> bool:
        """Whether an environment that is not in flight has been rebuilt after a fault which its next result reports."""
        return self.workers is not None and self.workers.pool.slots[env_id].skips

    def sample_actions(self, env_ids: Sequence[int] | None) -> list[dict[AgentID, Any]]:
        """As `ParallelEnv.sample_actions`."""
        ids = self.checked_ids(env_ids)
        self.check_idle("sample_actions", ids)
        declared, acting = self.schema.action_spaces, self.transitions.acting
        if not declared:
            raise NoSpaceDeclared("these environments declare no action spaces to draw random actions from", "action")
        for agent in self.schema.possible_agents:
            if agent not in declared:
                raise NoSpaceDeclared(f"agent {agent!r} declares no action space to draw random actions from", "action")
        result = []
        for env_id in ids:
            self._note_sampler(env_id)
            for agent in acting[env_id]:
                if agent not in declared:
                    raise NoSpaceDeclared(
                        f"environment {env_id}: agent {agent!r} declares no action space to draw random actions from",
                        "action",
                    )
            result.append(self._samplers[env_id].sample(acting[env_id], self.transitions.masks(env_id)))
        return result

    def _note_sampler(self, env_id: int) -> None:
        """Make the sampler of an environment's random actions, unless there is one."""
        if env_id not in self._samplers:
            seed = self._sampler_seeds[env_id]
            self._samplers[env_id] = ActionSampler(self.schema.action_spaces, (base_seed(seed), env_id))

    # -- checks ----------------------------------------------------------------------------------------------------

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
        if not self._all_have_reset:
            has_reset = self.transitions.has_reset
            self._all_have_reset = all(has_reset)
            never = [env_id for env_id in env_ids if not has_reset[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before {name}()")

    def note_rebuilt(self) -> None:
        """Note that environments have been constructed again, which must be reset now."""
        self._all_have_reset = False

    def check_seed(self, seed: Any) -> None:
        """Raise `ValueError` for a seed if `reset` accepts none."""
        if seed is not None and not self.source.reseeds:
            raise ValueError(
                f"seed={seed!r}, but these environments are seeded only once, when they are made: pass the seed there, "
                "and reset without one"
            )

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

    # -- the one facade that steps ---------------------------------------------------------------------------------

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

    # -- seeds and options of resets -------------------------------------------------------------------------------

    def _note_resets(self, env_ids: Sequence[int], leftovers: Any) -> None:
        """Note resets; once all environments have been reset, warn if their first observations are equal."""
        self.transitions.begin(env_ids)
        if self.default_seed is not None and not self._default_seed_noted and 0 in env_ids:
            self._default_seed_noted = True
            text = self.default_seed.warning(self._first_observations(0, leftovers))
            if text is not None:
                warn(text, UserWarning)
        check = self._seed_check
        if check is None:
            return
        for env_id in env_ids:
            check.note(env_id, self._first_observations(env_id, leftovers))
        if not all(self.transitions.has_reset) or self.source.in_flight:
            return
        self._seed_check = None
        declared = self.source.execute_in(Message.SEED, self.env_ids) if check.asks_again else None
        text = check.warning(self.seeds, declared)
        if text is not None:
            warn(text, UserWarning)

    def _first_observations(self, env_id: int, leftovers: Any) -> dict[AgentID, Any]:
        """The observations that a reset has returned, from the leftovers of its result."""
        assert self.workers is not None
        result = leftovers.get(env_id)
        if not isinstance(result, Snapshot):
            result = self.workers.transitions.snapshot(env_id, result)
        return result.transition.observations

    def _check_takes(self, options: Options) -> None:
        if options is not None and not self.takes_options:
            raise ValueError(f"options={options!r}, but `reset` of these environments takes no options: leave them out")

    def _reset_keywords(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> Any:
        """The pickled keywords of each environment's reset, by env id; for native simulators, seeds. Notes seeds."""
        self._check_takes(options)
        self.check_seed(seed)
        if self.workers is None:
            return None if seed is None else self._seeds_of_all(env_ids, seed)
        pool, rebuilds = self.workers.pool, self.workers.rebuilds
        if seed is not None and self.schema.seeded_when_made:
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
        options_of = checked_options(options, env_ids)
        for env_options in options_of:
            if env_options is not None:
                self.schema.check_options(env_options)
        # Everything that may raise comes first, so that an error changes nothing.
        keywords: dict[int, bytes] = {}
        new_seeds, sampler_seeds, merged = [*self.seeds], dict[int, int](), dict[int, dict[Any, Any]]()
        for env_id, env_seed, env_options in zip(env_ids, seeds, options_of, strict=True):
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
            keywords[env_id] = dumps_for_workers(passed, "options", self.local_modules, with_keys=False)
        if self.default_seed is not None and (0, None) not in zip(env_ids, seeds) and 0 in env_ids:
            self.default_seed.forget()
            self.default_seed = None
        remembered = [env_id for env_id, of_env in merged.items() if rebuilds.remember_options(env_id, of_env)]
        # Before the reset: an environment that fails in it is rebuilt with a seed of the new base.
        self._base_seed, self.seeds, pool.seeds_stale = base, tuple(new_seeds), True
        for env_id, env_seed in sampler_seeds.items():
            self._sampler_seeds[env_id] = env_seed
            self._samplers.pop(env_id, None)
        if rebuilds.base_seed != base:
            rebuilds.base_seed = base
            pool.alone("", pool.note_outdated, self.env_ids)
        elif remembered:
            pool.alone("", pool.note_outdated, remembered)
        return keywords

    def _seeds_of_all(self, env_ids: Sequence[int], seed: Seeds) -> list[int]:
        """The new seeds of a native simulator; notes them."""
        if len(env_ids) < self.num_envs:
            raise ValueError(
                f"seed={seed!r} for environments {[*env_ids]}, but these environments are seeded all at once: reset all"
            )
        by_env = dict(zip(env_ids, pool_seeds(seed, env_ids, self.source.name)))
        seeds = [by_env[env_id] for env_id in self.env_ids]
        self._base_seed, self.seeds = seeds[0], tuple(seeds)
        self._sampler_seeds = [*self.seeds]
        self._samplers.clear()
        return seeds
