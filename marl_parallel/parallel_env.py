"""`ParallelEnv`: N environments stepped in parallel, dicts in and dicts out.

A step::

    ParallelEnv.step(actions)
      |  Stepper.step               the order of calls, env ids                      stepper/stepper.py
      |    Transitions.write        checks actions, writes them into shared memory   core/block/block_transitions.py
      |    Pool.run                 one slot per environment, one wait loop          core/pool/pool.py
      |      Backend.post           wakes the workers                                backends/
      |        Worker.execute       in each process or thread                        core/worker/worker.py
      |          Codec.run          steps simulators, writes numeric transitions     core/block/codec.py
      |          EnvRunner.interpret  what any other step means, and the next episode  core/worker/env_runner.py
      |          TransitionRecords.write    its transition into shared memory        core/block/records.py
      |      Backend.wait           until the last worker is done
      |    Transitions.read         dicts from shared memory
      v
    observations, rewards, terminateds, truncateds, infos

`send` and `recv` are its two halves. After a crash, `Backend.wait` returns `Lost` in place of a reply; then `Pool`
raises an error and closes everything, or rebuilds the environments in a new worker (`core/pool/restarts.py`). For
simulators that step many environments by themselves (`from_native`), `sources/native.py` replaces `Pool` and
`BlockTransitions`.
"""

from __future__ import annotations

import copy as copying
import functools
import math
import operator
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel import arguments, planning
from marl_parallel.adapters import AgentID, GroupSpaces, MultiAgentEnv
from marl_parallel.adapters.mlagents import merged_timers, timer_tree
from marl_parallel.backends import open_backend
from marl_parallel.core.backend import Backend, share_out
from marl_parallel.core.block.arrays import BlockArrays
from marl_parallel.core.block.block_transitions import BlockTransitions, DictPerEnv
from marl_parallel.core.block.codec import codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.exclusive import CALL, exclusive
from marl_parallel.core.messages import BlockSettings, Built, Construction, Message, Request
from marl_parallel.core.objects.pickling import by_value
from marl_parallel.core.objects.script_generators import ScriptGenerators
from marl_parallel.core.pool.construction import DefaultSeed, SeedCheck, construct, generators_warning
from marl_parallel.core.pool.long_calls import LongCalls
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds
from marl_parallel.core.pool.recycling import Recycling
from marl_parallel.core.pool.replay import Histories
from marl_parallel.core.pool.restarts import Restarts
from marl_parallel.core.pool.saved_states import to_bytes
from marl_parallel.core.pool.settings import SettingsAtResets
from marl_parallel.core.pool.timeouts import Timeouts
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.schema import Common, common_schema, dumps_compactly
from marl_parallel.core.source import Source
from marl_parallel.core.warn import warn
from marl_parallel.core.worker.caller_settings import CallerSettings
from marl_parallel.core.worker.constructors import Constructor
from marl_parallel.core.worker.generators import Origin, origin_of_program
from marl_parallel.core.worker_status import Tracer
from marl_parallel.runner import BatchRunner, deprecated_runner
from marl_parallel.settings import DEFAULT_SEED, NAMES, START_TIMEOUT_S, Settings, is_default
from marl_parallel.sources.native import NativeSimulator, SimulatorArrays, SimulatorSource, check_simulator
from marl_parallel.stepper import NO_STATE, Batch, Calls, DictStepper, ResetArguments, Workers
from marl_parallel.types import (
    AdapterName,
    AutoresetName,
    BackendName,
    EnvError,
    FinishedEpisode,
    OnError,
    OnRestart,
    ParallelEnvError,
    RecyclePolicy,
    RestartInfos,
    RestartPolicy,
    Seed,
    Stats,
    StepBatch,
    Wait,
)

_MORE_REQUESTS = 8  # queued at a worker besides three for each of its environments, such as the one to close

_live: weakref.WeakSet[Source] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child: mark every `ParallelEnv` of the parent as closed, without touching its resources."""
    for pool in _live:
        pool.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class ParallelEnv:
    """Many multi-agent environments, stepped in parallel.

    Environments are dict environments (`reset` returns observations and infos, `step` five dicts with `__all__` in
    the flags), PettingZoo's `ParallelEnv` and `AECEnv`, RLlib's `MultiAgentEnv`, ML-Agents' `BaseEnv` and Gymnasium's
    `Env` (whose one agent is `agent_0`). Their dicts arrive with equal values; `docs/steps.md` lists the added keys.

    Args:
        env_constructors: One callable per environment, called inside its worker. It may have the parameters `seed`,
            `env_id` and `restarts`, and gets the ones that it has; see `docs/seeding.md`. Lambdas are allowed. Large
            arrays in constructors are in memory only once; see `docs/recipes/large_tables.md`.
        auto_reset: When the next episode begins: True or `AutoresetMode.SAME_STEP` in the step that ends one,
            `NEXT_STEP` in the next step, False or `DISABLED` only by `reset`.
        seed: Environment i is seeded with `seed + i`; None draws a base seed. With the default of 42, two
            `ParallelEnv`, such as for training and testing, play the same episodes; a warning says so, once. With
            `"own"`, environments keep their own seeds and get none, also after a restart; see `docs/seeding.md`.
        num_workers: The number of workers, which share the environments evenly; None for one per environment, up to
            the number of CPUs that this process may use, or the cluster has.
        envs_per_worker: The most environments of one worker, instead of `num_workers`; see `docs/workers.md`.
        backend: Where the workers run: `"process"`, `"thread"`, `"serial"`, `"ray"` for the nodes of a Ray cluster, or
            a `Backend`, such as a `RayBackend` with the cluster's address and resources. `"hybrid"` is `"process"` with
            the first worker in the caller's own thread: faster, but a crash there ends the program, and timeouts do not
            apply there. `"auto"` steps the environments for about a second and chooses; `"auto-hybrid"` may choose
            `"hybrid"`, too; see `docs/workers.md`.
        adapter: The kind of simulator, if it is not recognised correctly: a name from `docs/environments.md`, such as
            `"dict"` or `"tuple"`, or a function that takes a simulator and returns a `MultiAgentEnv`.
        shared_memory: False sends all values pickled, except global states.
        copy: False returns observations that are views of shared memory: each is valid until its environment is next
            stepped, sent to or reset, and stays readable after `close`.
        check_actions: True checks every action against its space.
        on_error: What happens when an environment raises, or its worker dies or hangs: `"raise"` raises here and
            closes everything; `"restart"` rebuilds the environment. The interrupted step truncates its agents and is
            marked in `infos[i]["__common__"]`; see `docs/faults.md`. A fault in the first construction is raised in any
            case.
        restart_policy: How often one environment may be rebuilt; after that, `RestartLimitExceeded` is raised.
        step_timeout: The most seconds for each step, call, frame and attribute; None for no limit.
        reset_timeout: The most seconds for each reset, automatic ones too; None for no limit.
        start_timeout: The most seconds for each constructor; None for no limit. Past it, the first construction raises,
            also with `on_error="restart"`: pass more for nodes that are slow at the start. CPU time in which a worker
            process imports modules or unpickles does not count, up to ten times the limit. For all three, time in
            which the whole program is frozen (a paused virtual machine or container) does not count.
        worker_threads: Threads of BLAS, OpenMP and torch in each worker process; None leaves them alone.
        trace: Path of a timeline that is written by `close` or `stop_trace`; see `start_trace`.
        wait: How processes wait: `"block"` sleeps at once, `"spin"` polls for 2 ms first, `"adaptive"` first polls for
            about twice as long as the last waits took, if there is a CPU for each worker and these waits were short.
        episode_stats: True adds `infos[i][agent]["episode"]`, `{"r": return, "l": length}`, in the step that ends the
            agent's part of an episode (of each life, if it comes back), and `infos[i]["__common__"]["episode"]` where
            the episode ends. See `docs/learners.md`.
        on_restart: Called with a `RestartEvent` for each environment that is rebuilt, before the step returns. An
            exception that it raises is logged.
        restart_infos: The infos of agents in the step that a fault has interrupted. None: there are none. `"last"`:
            those of the step before, for code that reads a key in every step; keys of events then count twice. See
            `docs/faults.md`.
        warn_after: Seconds after which the logger `marl_parallel` warns of a call of an environment that still runs,
            again after twice as long, and so on. The warning names the environment, its worker and the call, with the
            Python stack; Ctrl-C logs the same report. None for no warnings. Environments in the caller's own thread
            (`"serial"`, and the first worker of `"hybrid"`) are left out: this thread runs them itself.
        log_dir: Folder of log files, `worker-0.log` and so on, made if it is missing. Each worker process appends its
            output, and the output of processes that its simulators start. None leaves both in the output of this
            program. Errors of a worker that dies or hangs quote the last lines of its log. See `docs/faults.md`.
        recycle: When environments are replaced by new ones, such as `RecyclePolicy(max_memory_mb=4000)` for simulators
            that leak memory. The first result of a new one has `infos[i]["__common__"]["recycled"]`. Needs other
            processes, so not with `"serial"` and `"thread"`. See `docs/recycling.md`.
        replay: The most steps of each environment's episode that are kept, so that a failure can be repeated: its
            error then names a file for `marl-parallel replay`. Resets without a seed get derived seeds. None for no
            files. See `docs/faults.md`.
        replay_dir: Folder of these files, made if it is missing; None for `marl_parallel-replays` in the current one. A
            folder in which other users may replace files is refused.
        isolate_rng: True for simulators that draw from `random`, `numpy.random` or torch's generator instead of a
            generator of their own: each environment gets its own states of these generators, so that results do not
            depend on the number of workers. Generators of your script that environments share, such as a global `rng`,
            also get such states, in worker processes even with False. Not with `backend="thread"`. See
            `docs/seeding.md`.
        forward_logs: Whether records of `logging` in worker processes reach the loggers of the same names in this
            process, in its next call, with the attributes `env_id` and `worker`. Workers get the levels of
            loggers in this process at construction and at each `reset`. False leaves records in the worker. See
            `docs/output.md`.
        preload: Names of modules that take long to import, such as `("torch",)`. On Linux, a server imports them once
            for all worker processes, which share their memory; elsewhere and with Ray, each worker process imports them
            before its first constructor. Ignored by other workers. See `docs/choosing.md`.

    Raises:
        TypeError: A constructor is not callable, cannot be pickled, requires other arguments or returns no environment.
        ValueError: There are no constructors, their environments' spaces differ, or agents' names cannot be used.
        EnvError, WorkerCrashed, WorkerTimeout: A constructor raised, its worker died, or it took longer than
            `start_timeout`; also with `on_error="restart"`.

    All methods: `env_ids` are environments in any order, None for all; unknown or repeated ids raise `ValueError`. A
    call with wrong arguments changes nothing. A call that needs environments in flight (between `send` or `reset_async`
    and `recv`) raises `AlreadyPendingCallError`; so does a call during another one, from a second thread or a signal
    handler (see `docs/concurrency.md`). Calls after `close` raise `ClosedEnvironmentError`.

    If an environment raises, its worker dies, or it takes longer than its timeout, methods raise `EnvError`,
    `WorkerCrashed` or `WorkerTimeout`, and everything is closed. With `on_error="restart"`, the environment is rebuilt.
    Then `step`, `reset` and `recv` raise only `RestartLimitExceeded`, an `EnvError` of an exception that the
    `RestartPolicy` excludes, `WorkerTimeout` with `backend="thread"`, and `ParallelEnvError` if Ray has no room for a
    worker.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
        ...     observations, infos = env.reset()
        ...     actions = [{agent: 0 for agent in acting} for acting in env.acting]
        ...     observations, rewards, terminateds, truncateds, infos = env.step(actions)
        >>> len(observations), observations[0]["agent_0"].shape
        (4, (18,))

    Attributes:
        stepper: The interface below, on which facades are built; see `DictStepper` and `docs/extending.md`.
        plan: The measurements and the choice of `backend="auto"`; None with other backends. Its `"arguments"`, or its
            `"proposal"` if there is one, can be passed in place of `backend="auto"`.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[..., Any]],
        auto_reset: bool | AutoresetMode | AutoresetName = True,
        seed: Seed = DEFAULT_SEED,
        *,
        num_workers: int | None = None,
        envs_per_worker: int | None = None,
        backend: BackendName | Backend = "process",
        adapter: AdapterName | Callable[[Any], MultiAgentEnv] | None = None,
        shared_memory: bool = True,
        copy: bool = True,
        check_actions: bool = False,
        on_error: OnError = "raise",
        restart_policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # it is immutable
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        start_timeout: float | None = START_TIMEOUT_S,
        worker_threads: int | None = 1,
        trace: str | os.PathLike[str] | None = None,
        wait: Wait = "adaptive",
        episode_stats: bool = False,
        on_restart: OnRestart | None = None,
        restart_infos: RestartInfos | None = None,
        warn_after: float | None = 60.0,
        log_dir: str | os.PathLike[str] | None = None,
        recycle: RecyclePolicy | None = None,
        replay: int | None = None,
        replay_dir: str | os.PathLike[str] | None = None,
        isolate_rng: bool = False,
        forward_logs: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        passed = locals()
        settings = Settings.of({name: passed[name] for name in NAMES})
        self.plan: dict[str, Any] | None = None
        if isinstance(env_constructors, SimulatorSource):  # of `from_native`
            source = env_constructors
            self._close_at_exit(source)
            resets = ResetArguments(source, source, source.schema, None, source.seeds)
            self._set_batch(Batch(source, source, lambda **_: SimulatorArrays(source), source.schema, resets))
            return
        constructors = arguments.checked_constructors(env_constructors, seed)
        seeds = arguments.first_seeds(seed, len(constructors))
        log_dir, kept_steps = settings.output.log_folder(), settings.faults.kept_steps()
        made = planning.count_made()
        origin = origin_of_program(made) if seeds[0] is None else None
        if settings.workers.is_automatic:
            with_seed = settings.changed(seed="own" if seeds[0] is None else seeds[0])
            self.plan = planning.plan(with_seed, len(seeds), lambda measured: ParallelEnv(constructors, **measured))
            settings = settings.changed(**self.plan["arguments"])
        faults = settings.faults
        backend = _open_backend(settings)
        shares = _shares(settings, len(seeds), backend, is_planned=self.plan is not None)
        backend.log_dir = log_dir if backend.capabilities.keeps_logs else None
        pool = Pool(backend, shares)
        deadlines = Timeouts(pool, faults.limits)
        pool.extend(deadlines, LongCalls(pool, faults.warn_after_s, deadlines.limits))
        self._close_at_exit(pool)
        started, pool.guard[CALL] = False, (type(self).__name__, get_ident())  # as in a call: see `Source.close`
        try:
            backend.start(pool.shares, 3 * len(max(pool.shares, key=len)) + _MORE_REQUESTS)
            started, began = True, backend.clock()
            envs = _construct(pool, constructors, seeds, settings, made, origin)
            transitions, block = _attach(pool, envs, settings)
            at_resets = SettingsAtResets(envs.caller_settings)
            rebuilds = Rebuilds(
                pool, transitions, envs.construction, block, seeds[0],
                options_last=envs.common.schema.options_last, settings=at_resets,
            )  # fmt: skip
            pool.extend(at_resets, rebuilds)
            if kept_steps is not None:
                pool.extend(Histories(pool, *kept_steps, transitions, envs.construction, envs.local_modules))
            if faults.recycle is not None or backend.capabilities.may_leave:
                policy = faults.recycle or RecyclePolicy(max_age_s=math.inf)  # only workers that leave
                pool.extend(Recycling(pool, rebuilds, transitions, policy, backend.clock() - began))
                _warn_of_unknown_memory(settings, backend, len(pool.shares) - 1)
            if faults.restarts:
                about = faults.restart_policy, faults.on_restart, faults.restart_infos
                deadlines.restarts = Restarts(pool, rebuilds, transitions, *about)
                pool.extend(deadlines.restarts)
            self._set_batch(_batch(pool, transitions, rebuilds, envs, seeds, settings))
            del pool.guard[CALL]
            if settings.output.trace is not None:
                self.start_trace(settings.output.trace)
        except BaseException:  # Ctrl-C included: nothing may be left behind
            pool.close(ask=started)
            self._finalizer.detach()
            raise
        finally:
            pool.guard.pop(CALL, None)

    def _set_batch(self, batch: Batch) -> None:
        self.stepper, self._calls, self._guard = DictStepper(batch), Calls(batch), batch.guard

    @property
    def runner(self) -> BatchRunner:
        """Deprecated: use `stepper`."""
        return deprecated_runner(self.stepper.batch, "env.runner", "env.stepper")

    def _close_at_exit(self, source: Source) -> None:
        """Close all when the interpreter exits or this object is collected, unless `close` has freed all."""
        _live.add(source)
        self._finalizer = weakref.finalize(self, source.close)

    @classmethod
    def from_native(cls, simulator: NativeSimulator) -> ParallelEnv:
        """Wrap a simulator that steps many environments by itself, without workers; `close` closes it.

        Episodes begin again with the next step (`NEXT_STEP`). A seed for `reset` seeds all environments again, if the
        simulator can do that. These calls raise an error: `reset` with options, `recv` with a timeout or a `min_envs`
        other than `batch_size` or all in flight, and `start_trace`. After a partial reset, facades return the other
        environments' observations from the arrays returned last. Nothing else may use the simulator. See
        `docs/simulators.md`. A subclass has to override this method if its constructor takes other arguments.
        """
        check_simulator(simulator)
        source: Any = SimulatorSource(simulator)  # which `__init__` takes in place of constructors
        return cls(source)

    @classmethod
    def from_envpool(
        cls,
        task: Any,
        num_envs: int | None = None,
        batch_size: int | None = None,
        num_threads: int | None = None,
        seed: int | Sequence[int] | None = DEFAULT_SEED,
        *,
        frame_skip: int | None = None,
        **task_arguments: Any,
    ) -> ParallelEnv:
        """Wrap a task of EnvPool, whose environments run in its own threads, with the restrictions of `from_native`.

        The agent of a single-player task is `agent_0`; players are `agent_0`, ... In turn-based games, such as PGX's,
        all players are observed; only the player whose turn it is acts, with the game's action mask.

        Args:
            task: Its name in EnvPool; Atari games also with Gymnasium's prefix `ALE/`. Or a pool from
                `envpool.make_gymnasium`: then pass no other arguments, and use the pool for nothing else.
            num_envs: The number of environments.
            batch_size: How many results `recv` returns at a time, the first that are ready; None for all in flight.
            num_threads: The number of EnvPool's threads; None lets EnvPool choose.
            seed: Environment i is seeded with `seed + i`; a sequence has one for each; None draws a base seed. A seed
                for `reset` makes the pool again; for a pool that was passed as `task`, it raises an error.
            frame_skip: How often each action is carried out, with the rewards added up. Tasks with an argument of this
                name do it themselves; others must have one player.
            task_arguments: For EnvPool, such as `max_episode_steps`.

        Raises:
            ImportError: EnvPool is not installed, or its release is not supported.
            TypeError, ValueError: There is no such task; or an argument is wrong, or unknown to EnvPool.
        """
        from marl_parallel.sources import envpool

        if not isinstance(task, str):
            others = num_envs, batch_size, num_threads, frame_skip
            if task_arguments or any(other is not None for other in others) or not is_default(seed):
                raise TypeError("task is a pool, which has its arguments already: pass it without other arguments")
            return cls.from_native(envpool.wrap_pool(task))
        if num_envs is None:
            raise TypeError(f"num_envs is missing: how many environments of {task!r}?")
        batch_size = num_envs if batch_size is None else batch_size
        numbers = arguments.pool_arguments(num_envs, batch_size=batch_size, num_threads=num_threads)
        times = None if frame_skip is None else arguments.checked_integer(frame_skip, "frame_skip")
        seeds = arguments.pool_seeds(seed, range(num_envs), "EnvPool")
        return cls.from_native(envpool.open_pool(task, seeds, {**numbers, **task_arguments}, times))

    # -- what the environments are ---------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return self.stepper.num_envs

    @property
    def batch_size(self) -> int:
        """How many results are ready at a time: `num_envs`, unless a native simulator has smaller batches."""
        return self.stepper.source.batch_size

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.stepper.source.shares)

    def __len__(self) -> int:
        return self.stepper.num_envs

    @property
    def possible_agents(self) -> list[AgentID]:
        """All agents that may appear, in the environments' own order; empty if they are not known beforehand.

        If environments differ in their agents, those of environment 0 come first, then the others of environment 1, ...
        """
        return list(self.stepper.schema.possible_agents)

    def possible_agents_of(self, env_id: int) -> list[AgentID]:
        """The agents that may appear in one environment, in the order of `possible_agents`.

        An agent that is not among them is not alive in this environment. See `docs/agents.md`.

        Example:
            >>> from functools import partial
            >>> from marl_parallel import make
            >>> from marl_parallel.wrappers import pad_spaces
            >>> sizes, padded = [{"N": 1}, {"N": 2}], [partial(pad_spaces, shape=(12,))]
            >>> with make("mpe2.simple_spread_v3", env_kwargs=sizes, wrappers=padded, num_workers=2) as env:
            ...     env.possible_agents, env.possible_agents_of(0)
            (['agent_0', 'agent_1'], ['agent_0'])
        """
        (env_id,) = self.stepper.batch.checked_ids([env_id])
        return [*self.stepper.transitions.possible_agents_of(env_id)]

    @property
    def acting(self) -> tuple[list[AgentID], ...]:
        """The agents that act next in each environment; none before its first reset and when its episode is over."""
        return tuple(map(list, self.stepper.transitions.acting))

    @property
    def finished_episodes(self) -> tuple[FinishedEpisode, ...]:
        """The episodes that ended in the last `step` or `recv`, also of a facade: returns and lengths of each agent."""
        return tuple(self.stepper.transitions.statistics.finished)

    @property
    def action_masks(self) -> tuple[dict[AgentID, Any], ...]:
        """A dict by agent for each environment, with the action masks that the simulator reports.

        Agents that do not act have masks, too; `acting` lists the agents that need an action. Arrays are copies; arrays
        of zeros and ones become bool, True for an allowed action. See `docs/values.md`.
        """
        return tuple(map(self.stepper.transitions.masks, self.stepper.env_ids))

    @exclusive("sample_actions")
    def sample_actions(self, env_ids: Sequence[int] | None = None) -> list[dict[AgentID, Any]]:
        """Draw random actions of the agents that act next, which their action masks allow, for `step` or `send`.

        Draws depend on the environment's seed, and begin again with `reset(seed=...)`. The generators of `action_space`
        are not used. A mask that allows nothing, or does not match its space, is ignored.

        Args:
            env_ids: Which environments; in an asynchronous loop, the ids that `recv` returned.

        Returns:
            One dict by agent for each of `env_ids`; empty before the first reset and after the end of an episode.

        Raises:
            NoSpaceDeclared: An agent declares no action space.

        Example:
            >>> from marl_parallel import make
            >>> with make("pettingzoo.classic.connect_four_v3:env", num_envs=4, num_workers=2) as env:
            ...     env.reset_async()
            ...     for _ in range(20):
            ...         ids = env.recv(min_envs=2).env_ids
            ...         env.send(env.sample_actions(ids), ids)
            ...     env.stats().steps >= 20 * 2 - 4  # the first results of the 4 environments are resets
            True
        """
        batch = self.stepper.batch
        ids = batch.checked_ids(env_ids)
        batch.check_idle("sample_actions", ids)
        return batch.resets.sample_actions(ids)

    @property
    def observation_space(self) -> spaces.Dict | Any:  # `| Any`: callers need not check for None
        """Spaces by agent, in the order of `possible_agents`; None if no agent declares one.

        Agents that declare none are left out, and their observations travel pickled. If agents are not known
        beforehand but have groups, the keys are groups, and an agent's id also finds the space of its group.
        """
        return _space_of(self.stepper.schema.observation_spaces)

    @property
    def action_space(self) -> spaces.Dict | Any:
        """Spaces by agent, as in `observation_space`; None if no agent declares one."""
        return _space_of(self.stepper.schema.action_spaces)

    @property
    def reward_space(self) -> spaces.Dict | None:
        """Spaces of the agents whose rewards are vectors (`docs/values.md`); None if there are none."""
        return _space_of(self.stepper.schema.reward_spaces)

    @property
    def state_space(self) -> Space[Any] | None:
        """The space of one environment's global state; None if it has none."""
        return self.stepper.schema.state_space

    @property
    def metadata(self) -> dict[str, Any]:
        """A copy of the metadata of environment 0, with the `"autoreset_mode"` of this object."""
        return copying.deepcopy(self.stepper.batch.metadata)

    @property
    def render_mode(self) -> str | None:
        """The render mode of environment 0."""
        return self.stepper.batch.render_mode

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
        drain: bool = False,
    ) -> tuple[DictPerEnv, DictPerEnv]:
        """Begin new episodes.

        Args:
            seed: Environment i gets `seed + i`, also with `env_ids`, and `seed` becomes the base. Or a sequence with
                one seed, or None for no seed, for each of `env_ids`.
            options: Passed to each environment's own `reset`.
            env_ids: Which environments.
            drain: True first waits for all environments in flight, and drops their results.

        Returns:
            Observations and infos: two tuples of dicts by agent, in the order of `env_ids`.

        Raises:
            ValueError: A wrong number of seeds, or options that the environments' `reset` does not take.
        """
        if drain:
            self.stepper.drain(seed, options, env_ids)
        observations, _, _, _, infos = self.stepper.reset(seed, options, env_ids)
        return observations, infos

    @exclusive("step")
    def step(
        self, actions: Sequence[Mapping[AgentID, Any]], env_ids: Sequence[int] | None = None
    ) -> tuple[DictPerEnv, DictPerEnv, DictPerEnv, DictPerEnv, DictPerEnv]:
        """Step environments in parallel, and begin new episodes as `auto_reset` says.

        Args:
            actions: One dict by agent for each environment, in the order of `env_ids`. An array is cast to its
                space's dtype. Under PettingZoo's rules, actions of agents that do not act are ignored.
            env_ids: Which environments.

        Returns:
            Observations, rewards, terminateds, truncateds, infos: five tuples of dicts by agent, in the order of
            `env_ids`. The flags also have the key `"__all__"`. After an automatic reset in the same step, the last
            observation of the old episode is `infos[i][agent]["final_obs"]`.

        Raises:
            ValueError: A wrong number of dicts, an action that is missing or of a wrong form, shape or dtype, or, with
                `check_actions`, outside its space.
            TypeError: Actions are not dicts.
            ResetNeeded: An environment has never been reset.
        """
        return self.stepper.step(actions, env_ids)

    @exclusive("restart")
    def restart(self, env_ids: Sequence[int] | None = None) -> None:
        """Close environments and construct them again, in the same workers, without a fault.

        Reset these environments next: they count as never reset. Without a seed, this reset uses the next derived seed,
        as after a fault, or no seed with `seed="own"` (`docs/seeding.md`). Running episodes are dropped.
        `stats().restarts` counts these environments.

        Args:
            env_ids: Which environments.

        Raises:
            EnvError, WorkerCrashed, WorkerTimeout: A constructor raised, its worker died, or it took longer than
                `start_timeout`.
            NotImplementedError: Native simulators cannot do that.

        Example:
            >>> from mpe2 import simple_spread_v3
            >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
            ...     observations, infos = env.reset()
            ...     env.restart([1, 3])
            ...     observations, infos = env.reset(env_ids=[1, 3])
            ...     env.stats().restarts
            2
        """
        batch = self.stepper.batch
        batch.check_idle("restart")
        if batch.workers is None:
            raise NotImplementedError(f"{batch.source.name} cannot construct some of its environments again")
        ids = batch.checked_ids(env_ids)
        try:
            batch.workers.rebuilds.rebuild(ids)
        finally:
            batch.recheck_resets()

    @exclusive("send")
    def send(
        self,
        actions: Sequence[Mapping[AgentID, Any]] | Mapping[int, Mapping[AgentID, Any]],
        env_ids: Sequence[int] | None = None,
    ) -> None:
        """Begin to step environments and return; `recv` returns each result as soon as it is ready.

        With `backend="serial"`, this call carries out the steps; with `"hybrid"`, `recv` carries out the steps of the
        first worker. Errors are as in `step`.

        Args:
            actions: As in `step`, or a mapping from env id to a dict by agent.
            env_ids: Which environments; None for all, or all keys of a mapping.
        """
        ids, rows = arguments.addressed(actions, env_ids, self.num_envs)
        self.stepper.send(rows, ids)

    @exclusive("reset_async")
    def reset_async(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> None:
        """Begin new episodes and return; `recv` returns the observations. Arguments and errors are as in `reset`."""
        self.stepper.send_reset(seed, options, env_ids)

    @exclusive("recv")
    def recv(
        self, min_envs: int | None = None, timeout: float | None = None, *, window: float | None = None
    ) -> StepBatch:
        """Return the results of all environments in flight that are ready, in order of completion.

        Args:
            min_envs: How many to wait for; None for all in flight, 0 for none.
            timeout: Seconds to wait at most; None for no limit.
            window: For this many seconds, wait for all in flight; after that, for `min_envs`. So `recv(1, window=0.2)`
                returns larger batches than `recv(1)`, and never later than `recv(1)` or 0.2 s, whichever is later.

        Raises:
            NoAsyncCallError: Nothing is in flight.
            ValueError: `min_envs` is more than the number in flight.
            TimeoutError: Fewer than `min_envs` were ready in time. Nothing is lost, and `recv` can be called again.

        Example:
            >>> from mpe2 import simple_spread_v3
            >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
            ...     env.reset_async()
            ...     while env.pending:
            ...         batch = env.recv(min_envs=1)
            ...     env.send({2: {agent: 0 for agent in env.acting[2]}})
            ...     env.recv().env_ids
            (2,)
        """
        ids, results = self.stepper.recv(min_envs, timeout, window)
        return StepBatch(ids, *results)

    # -- calls, attributes, frames, state ---------------------------------------------------------------------------

    @exclusive("state")
    def state(self, *, env_ids: Sequence[int] | None = None) -> NDArray[Any]:
        """The current global states, in a new array of shape `(num_envs, *state_space.shape)`; `step_timeout` applies.

        Raises `NotImplementedError` if the environments have none.
        """
        return self.stepper.state(env_ids)

    def seed(self) -> tuple[int | None, ...]:
        """The seed of each environment: its own `unwrapped.seed` if that is an int, else the one that it was passed.

        None for an environment that was passed none, with `seed="own"`. While environments are in flight, returns the
        last known seeds.
        """
        batch = self.stepper.batch
        batch.check_open()
        if batch.source.seeds_stale and not batch.source.in_flight and not batch.calling:
            self._update_seeds()
        return batch.resets.seeds

    @exclusive("seed")
    def _update_seeds(self) -> None:
        self.stepper.batch.resets.update_seeds()

    @exclusive("call")
    def call(
        self, name: str | Callable[..., Any], /, *args: Any, env_ids: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of each environment, looked up through wrappers and conversions.

        Args:
            name: The method's name; the value of an attribute that is not callable is returned as it is. Or a function,
                which is called in the worker with the environment as its first argument.
            args: Arguments of the method.
            env_ids: Which environments.
            kwargs: Keywords of the method.

        Returns:
            The results, one for each of `env_ids`, pickled in the worker and unpickled here.

        Raises:
            AttributeError: An environment has no such attribute.
            ValueError: `name` is "reset", "step" or "close".
            TypeError: The arguments or the result cannot be pickled or unpickled.
            ModuleNotFoundError: The arguments need a module that cannot be imported in the worker.
            EnvError: The method raised. Only this error closes everything, or rebuilds the environment (`"restart"`).
        """
        batch = self.stepper.batch
        batch.check_idle("call")
        return self._calls.call(batch.checked_ids(env_ids), self._calls.pickled(name, args, kwargs))

    @exclusive("call_async")
    def call_async(
        self, name: str | Callable[..., Any], /, *args: Any, env_ids: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Begin to call a method of each environment and return; `call_wait` returns the results.

        Arguments are as in `call`.

        Until `call_wait` returns, all other calls raise `AlreadyPendingCallError`, except `stats`, `seed` and `close`.
        """
        batch = self.stepper.batch
        batch.check_idle("call_async")
        self._calls.begin(batch.checked_ids(env_ids), self._calls.pickled(name, args, kwargs))

    @exclusive("call_wait")
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, in the form of `call`; errors are as in `call`.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            NoAsyncCallError: No call is in flight.
            TimeoutError: The calls have not ended in time. Nothing is lost, and this can be called again.

        Example:
            >>> from mpe2 import simple_spread_v3
            >>> with ParallelEnv([simple_spread_v3.parallel_env] * 2, num_workers=2) as env:
            ...     env.call_async("observation_space", "agent_0")
            ...     spaces = env.call_wait(timeout=10.0)
            >>> [space.shape for space in spaces]
            [(18,), (18,)]
        """
        return self._calls.finish(timeout)

    @exclusive("call_each")
    def call_each(
        self,
        name: str | Callable[..., Any],
        /,
        each: Sequence[Sequence[Any] | Mapping[str, Any]],
        *,
        env_ids: Sequence[int] | None = None,
        wait: bool = True,
    ) -> tuple[Any, ...] | None:
        """Call a method of each environment, as `call`, with other arguments in each environment.

        Args:
            name: As in `call`.
            each: One entry for each of `env_ids`: a tuple or list of arguments, or a dict of keywords.
            env_ids: Which environments.
            wait: Whether to wait for the results. If False, `call_wait` returns them, as after `call_async`.

        Returns:
            The results, one for each of `env_ids`; None without `wait`.

        Raises:
            ValueError: There is not one entry for each of `env_ids`. Other errors are as in `call`.
            TypeError: An entry is neither a tuple or list nor a dict with strings as keys.

        Example:
            >>> from mpe2 import simple_spread_v3
            >>> with ParallelEnv([simple_spread_v3.parallel_env] * 2, num_workers=2) as env:
            ...     spaces = env.call_each("observation_space", [("agent_0",), {"agent": "agent_1"}])
            >>> [space.shape for space in spaces]
            [(18,), (18,)]
        """
        batch = self.stepper.batch
        batch.check_idle("call_each")
        ids = batch.checked_ids(env_ids)
        arguments.one_for_each(each, ids, "a tuple or dict of arguments")
        pickles = {
            env_id: self._calls.pickled(name, *arguments.checked_arguments(env_id, of_env))
            for env_id, of_env in zip(ids, each)
        }

        def pickle() -> dict[int, bytes]:
            return {env_id: pickle_one() for env_id, pickle_one in pickles.items()}

        if wait:
            return self._calls.call(ids, pickle)
        self._calls.begin(ids, pickle)
        return None

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Get an attribute of each environment, as `call` does; a method is called without arguments."""
        return self.call(name)

    @exclusive("set_attr")
    def set_attr(self, name: str, values: Any, env_ids: Sequence[int] | None = None) -> None:
        """Set an attribute of each environment, on the outermost wrapper that has it.

        If none has it, it is set on the outermost one, as in Gymnasium. An environment that is constructed again has
        the attributes of its constructor.

        Args:
            name: The attribute's name.
            values: A list or tuple with one for each of `env_ids`; anything else is set in all of them.
            env_ids: Which environments.

        Raises:
            AttributeError: It can only be read, or the outermost object takes no new attributes (`__slots__`).
            TypeError: `name` is not a string, or a value cannot be pickled or unpickled.
            ModuleNotFoundError: A value needs a module that cannot be imported in the worker.
            EnvError: A property's setter raised. Only this error closes everything, or rebuilds the environment.
        """
        batch = self.stepper.batch
        if not isinstance(name, str):
            raise TypeError(f"name must be the name of an attribute, got {name!r}")
        batch.check_idle("set_attr")
        ids = batch.checked_ids(env_ids)
        if not isinstance(values, list | tuple):
            values = [values] * len(ids)
        arguments.one_for_each(values, ids, "one value")
        self._calls.assign(name, dict(zip(ids, values)))

    @exclusive("save_state")
    def save_state(self, env_ids: Sequence[int] | None = None) -> list[bytes]:
        """Save environments, so that `load_state` goes on from here, also in another process.

        A state has the pickled simulator, the agents that are alive and act, action masks, seeds, options of resets,
        statistics of the running episode and the count of restarts; with `isolate_rng`, also the states of process-wide
        generators. A simulator or wrapper that cannot be pickled is saved by its own pair of methods, such as
        `get_state()` and `set_state(state)`. Large arrays of the constructor that have not been written to are not in
        a state. See `docs/checkpoints.md`. `step_timeout` applies.

        Args:
            env_ids: Which environments.

        Returns:
            The state of each of `env_ids`.

        Raises:
            ResetNeeded: An environment has never been reset.
            TypeError: A simulator cannot be pickled; the error names the attribute. Nothing has changed.
            NotImplementedError: Native simulators cannot do that.

        Example:
            >>> from mpe2 import simple_spread_v3
            >>> constructors = [simple_spread_v3.parallel_env] * 4
            >>> actions = [{"agent_0": 1, "agent_1": 2, "agent_2": 3}] * 4
            >>> with ParallelEnv(constructors, num_workers=2) as env:
            ...     observations, infos = env.reset()
            ...     states = env.save_state()
            ...     expected = env.step(actions)
            >>> with ParallelEnv(constructors, num_workers=1) as env:
            ...     observations, infos = env.load_state(states)
            ...     results = env.step(actions)
            >>> results[1] == expected[1]
            True
        """
        return [to_bytes(state) for state in self.stepper.save(env_ids).values()]

    @exclusive("load_state")
    def load_state(
        self, states: Sequence[bytes], env_ids: Sequence[int] | None = None
    ) -> tuple[DictPerEnv, DictPerEnv]:
        """Continue from states that `save_state` returned: the next step is the same as it would have been then.

        The constructors and arguments must be the same as then; the number of workers and the backend may differ.
        No `reset` is needed before. If not all environments are loaded, the base seed stays as it is. States are
        pickles: load only those that you trust. `start_timeout` applies.

        Args:
            states: One for each of `env_ids`.
            env_ids: Which environments; the others go on.

        Returns:
            Observations and infos of the latest step or reset before the save, in the form of `reset`. Infos do not
            have the statistics of `episode_stats`.

        Raises:
            TypeError: A state cannot be unpickled, or is not a saved state.
            ValueError: A state has another format, or is from environments with other agents, spaces or another
                `auto_reset`; or there is not one state for each environment. After these errors, nothing has changed.
            NotImplementedError: Native simulators cannot do that.
        """
        _, (observations, _, _, _, infos) = self.stepper.load(states, env_ids)
        return observations, infos

    @exclusive("set_reset_options")
    def set_reset_options(self, options: dict[str, Any] | None, env_ids: Sequence[int] | None = None) -> None:
        """Set the options of every later `reset` of environments, until they are set again; for curricula.

        Automatic resets, restarts, replays and recycling use them, too. `reset(options=)` is merged over them by key,
        for that reset. Running episodes go on as they are. Environments that keep options themselves (ML-Agents) keep
        what a reset has passed, also after `set_reset_options(None)`.

        Args:
            options: Passed to each environment's own `reset`; None for no options. A list has one for each of
                `env_ids`.
            env_ids: Which environments.

        Raises:
            ValueError: The environments' `reset` takes no options, or not these.
            TypeError: `options` is not a dict, or cannot be pickled or unpickled.

        Example:
            >>> import numpy as np
            >>> from gymnasium import spaces
            >>> class Race:
            ...     possible_agents = ["car"]
            ...     observation_space = spaces.Dict(car=spaces.Box(0.0, 9.0, (), np.float64))
            ...     action_space = spaces.Dict(car=spaces.Discrete(2))
            ...     def reset(self, *, seed=None, options=None):
            ...         return {"car": (options or {}).get("length", 1.0)}, {}
            ...     def step(self, actions):
            ...         return {"car": 0.0}, {"car": 1.0}, {"__all__": True}, {"__all__": False}, {}
            >>> with ParallelEnv([Race] * 2, num_workers=2) as env:
            ...     observations, infos = env.reset()
            ...     env.set_reset_options({"length": 5.0}, env_ids=[1])
            ...     observations, *_ = env.step([{"car": 0}] * 2)  # ends both episodes, and begins the next ones
            >>> [float(of_env["car"]) for of_env in observations]
            [1.0, 5.0]
        """
        batch = self.stepper.batch
        batch.check_idle("set_reset_options")
        batch.resets.set_options(batch.checked_ids(env_ids), options)

    @exclusive("set_parameters")
    def set_parameters(self, parameters: Mapping[str, Any], env_ids: Sequence[int] | None = None) -> None:
        """Set parameters of environments that keep the options of `reset` (ML-Agents), without a reset.

        Parameters have the form of the options of `reset`. An environment that is constructed again gets them, too.
        `env.call("get_properties")` returns the parameters of each environment.

        Args:
            parameters: By name; Unity gets them with the next step.
            env_ids: Which environments.

        Raises:
            NotImplementedError: The environments keep no options.
            ValueError: `parameters` do not have the form of the options of `reset`.
        """
        batch = self.stepper.batch
        if not (batch.schema.options_last and batch.resets.takes_options):
            raise NotImplementedError(
                "these environments do not keep options of reset: pass reset(options=), or use call or set_attr"
            )
        batch.check_idle("set_parameters")
        ids = batch.checked_ids(env_ids)
        batch.schema.check_options(parameters)
        self._calls.call(ids, self._calls.pickled("set_parameters", [parameters], {}))
        batch.resets.remember_options(ids, parameters)

    def timers(self) -> dict[str, Any]:
        """The trees of ML-Agents' timers (`@timed`, `hierarchical_timer`) of all workers, merged.

        Simulators of any kind may use these timers. Workers that have been replaced are left out.

        Returns:
            A tree in the form of `mlagents_envs.timers.get_timer_tree`: `"total"` seconds, `"count"`, `"self"` and
            `"children"` by name. No children if no worker has loaded `mlagents_envs`.

        Raises:
            NotImplementedError: Native simulators have no workers with timers.
        """
        batch = self.stepper.batch
        if batch.workers is None:
            raise NotImplementedError(f"{batch.source.name} has no workers with timers")
        batch.check_open()
        first = [share[0] for share in batch.workers.pool.present_shares().values()]
        return {"name": "root", **merged_timers(self.call(timer_tree, env_ids=first))}

    @exclusive("render")
    def render(self, *, tile: bool = False, env_ids: Sequence[int] | None = None) -> Any:
        """Render one frame of each environment; `step_timeout` applies.

        Args:
            tile: Arrange the frames, which must be arrays, in a grid.
            env_ids: Which environments.

        Returns:
            A tuple of frames; with `tile`, one array of shape `(rows * height, columns * width, ...)`; None if
            `render_mode` is None.
        """
        batch = self.stepper.batch
        batch.check_idle("render")
        ids = batch.checked_ids(env_ids)
        if batch.render_mode is None:
            return None
        batch.check_has_reset(ids, "render")
        rendered = batch.source.execute_in(Message.RENDER, ids)
        frames = tuple(rendered[env_id] for env_id in ids)
        return tiled(frames) if tile else frames

    # -- traces and statistics ---------------------------------------------------------------------------------------

    @exclusive("start_trace")
    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Record a timeline of what workers and this process do, until `stop_trace` or `close`.

        The file is JSON that https://ui.perfetto.dev and `chrome://tracing` show. A step takes about a microsecond
        longer. At most a million time slices are recorded for each worker; the slices of a worker that dies are lost.

        Raises:
            ValueError: No file can be written there.
            RuntimeError: A trace is being recorded already.
            NotImplementedError: Native simulators have no workers to trace.
            ParallelEnvError: A worker has died; no trace is recorded.
        """
        self.stepper.batch.check_idle("start_trace")
        workers = self.stepper.workers
        if workers is None:
            raise NotImplementedError(f"{self.stepper.source.name} keeps no timeline: it has no workers")
        pool = workers.pool
        if pool.tracer is not None:
            raise RuntimeError(f"a trace is being recorded already, for {pool.tracer.path}: call stop_trace first")
        tracer = Tracer(arguments.checked_trace(path), pool.shares, pool.clock)
        faults = self._trace_workers(workers, True)
        if faults:
            self._trace_workers(workers, False)
            raise faults.pop()
        pool.tracer = workers.transitions.tracer = tracer

    @exclusive("stop_trace")
    def stop_trace(self) -> Path:
        """Write the trace that `start_trace` or the argument `trace` began; returns its path.

        Raises:
            RuntimeError: No trace is being recorded.
            OSError: The file cannot be written.
            ParallelEnvError: A worker has died; with `on_error="restart"`, call this again for the other slices.
        """
        self.stepper.batch.check_idle("stop_trace")
        workers = self.stepper.workers
        if workers is None or (tracer := workers.pool.tracer) is None:
            raise RuntimeError("no trace is being recorded: call start_trace first, or pass trace=")
        faults = self._trace_workers(workers, False)
        if faults:
            raise faults.pop()
        workers.pool.tracer = workers.transitions.tracer = None
        tracer.finish()
        return tracer.path

    def _trace_workers(self, workers: Workers, on: bool) -> list[ParallelEnvError]:
        """Begin or end traces in all workers, and add their slices; returns the first error of a replaced worker.

        It is in a list, so that the caller can raise it and hold it in no variable, as `Pool.fault` says.
        """
        pool, rebuilds = workers.pool, workers.rebuilds
        rebuilds.traced = on
        faults: list[ParallelEnvError] = []
        for worker, share in pool.present_shares().items():  # one by one: an error must not lose the others' slices
            try:
                results = pool.execute({worker: Request(Message.TRACE, (share[0],), on)})
            except ParallelEnvError as error:
                if pool.closed:
                    raise
                faults.append(error.with_traceback(None))  # which would refer to this frame
                continue
            for slices in results.values():
                pool.add_slices(worker, slices)
        pool.in_call("", rebuilds.outdate, range(self.num_envs))  # with tracing on or off
        return faults[:1]

    def stats(self) -> Stats:
        """Steps, resets and restarts so far, and seconds by kind of work; of each worker and in total."""
        return self.stepper.source.stats()

    @property
    def pending(self) -> tuple[int, ...]:
        """The env ids in flight: sent to, and not received yet."""
        pool = self.stepper.source
        return () if pool.closed else pool.pending

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, terminate: bool = False, timeout: float | None = 5.0) -> None:
        """Close all environments, end all workers and free everything, except the memory of views. Idempotent.

        Args:
            terminate: True skips the environments' own `close`.
            timeout: Seconds that closing may take; then workers are killed, if the backend can. None for no limit. The
                wait for another thread that is inside a call, such as `on_restart`, has this limit too, but at least
                half a second. While another thread closes, this call waits for it, at most this long, and returns.

        Raises:
            EnvError: An environment raised in its own `close`; everything has been freed nevertheless.
        """
        seconds = arguments.closing_time(timeout)
        pool = self.stepper.source
        error = pool.close(ask=not terminate, timeout=seconds)
        if pool.freed:  # else another call of `close` is in progress, which Ctrl-C may interrupt
            self._finalizer.detach()
            self.stepper.batch.drop_memory()
        try:
            if error is not None:
                raise error
        finally:
            del error  # else it and this frame would refer to each other, and keep all memory

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ParallelEnv has its own workers and cannot be pickled or copied: make another one")

    def __repr__(self) -> str:
        stepper = self.stepper
        if stepper.workers is None:
            return (
                f"{type(self).__name__}({stepper.source.name}, num_envs={self.num_envs}, batch_size={self.batch_size}, "
                f"agents={self.possible_agents}, auto_reset={stepper.mode.name}, closed={stepper.source.closed})"
            )
        backend = type(stepper.workers.pool.backend).__name__
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, agents={self.possible_agents}, "
            f"num_workers={self.num_workers}, backend={backend}, auto_reset={stepper.mode.name}, "
            f"closed={stepper.source.closed})"
        )

    def __enter__(self) -> ParallelEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EnvError as failed:
            if error is None:
                raise
            logger.warning("closing the environments after an error failed too: %s", failed)


# -- what the constructor builds ---------------------------------------------------------------------------------------


def _open_backend(settings: Settings) -> Backend:
    """The backend, not yet started; warns of settings that have no effect with it."""
    workers, timeouts = settings.workers, settings.faults.passed_timeouts
    threads = None if workers.worker_threads is None else operator.index(workers.worker_threads)
    opened = open_backend(
        workers.backend, worker_threads=threads, wait=workers.wait, preload=workers.preload,
        start_timeout=settings.faults.limits.start,
    )  # fmt: skip
    arguments.check_isolate_rng(settings.episodes.isolate_rng, opened)
    arguments.check_recycle(settings.faults.recycle, opened, workers.backend)
    if timeouts and not opened.capabilities.enforces_timeouts:
        warn(f"{', '.join(timeouts)} cannot be enforced by backend={workers.backend!r}", RuntimeWarning)
    opened.forward_logs = settings.output.forward_logs
    if settings.output.log_dir is not None and not opened.capabilities.keeps_logs:
        warn(
            f"log_dir={os.fspath(settings.output.log_dir)!r} has no effect with backend={workers.backend!r}: only "
            "worker processes have logs. Serial and thread workers write to the output of this program, Ray's to the "
            "logs of Ray",
            RuntimeWarning,
        )
    return opened


def _shares(settings: Settings, num_envs: int, backend: Backend, *, is_planned: bool) -> list[range]:
    """The environments of each worker; warns of too many workers, and of what the caller's own thread cannot do."""
    workers, faults = settings.workers, settings.faults
    number = workers.num_workers if is_planned else None
    if number is None:
        number = arguments.workers_for(num_envs, workers.num_workers, workers.envs_per_worker, backend)
    shares = share_out(num_envs, number, last_have_more=bool(backend.in_line))  # this thread reads all results
    arguments.warn_of_in_line(
        backend, shares, faults.passed_timeouts, settings.output.log_dir, faults.recycle, restarts=faults.restarts
    )
    return shares


class _Environments(NamedTuple):
    """All environments, constructed in their workers."""

    common: Common
    described: bytes  # the common schema, pickled, if their own ones differ
    construction: Construction
    built: Mapping[int, Built]
    local_modules: list[ModuleType]  # that workers cannot import
    caller_settings: CallerSettings


def _construct(
    pool: Pool,
    constructors: Sequence[Constructor],
    seeds: list[int] | list[None],
    settings: Settings,
    made: int,
    origin: Origin | None,
) -> _Environments:
    """Construct all environments, of the `ParallelEnv` with the number `made`; `origin` is the script's entropy."""
    faults, episodes = settings.faults, settings.episodes
    local_modules: list[ModuleType] = []
    caller_settings, generators = CallerSettings(settings.output.forward_logs, local_modules), ScriptGenerators()
    if faults.restarts:
        pool.advice = reports.FIRST_CONSTRUCTION
    described, construction, built = construct(
        pool, constructors, seeds, episodes.mode, episodes.adapter, faults.restarts, faults.replay is not None,
        episodes.isolate_rng, local_modules, caller_settings, generators, made, origin, settings.workers.preload,
    )  # fmt: skip
    if not planning.is_measuring() and (text := generators_warning(generators, local_modules)):
        warn(text)
    common, pickled = common_schema(described), b""
    if any(one is not common.schema for one in described):  # in agents, bounds, or the order of keys
        with by_value(local_modules):
            pickled = dumps_compactly(common.schema)
        construction = construction._replace(described=pickled, positions=common.positions or None)
    return _Environments(common, pickled, construction, built, local_modules, caller_settings)


def _attach(pool: Pool, envs: _Environments, settings: Settings) -> tuple[BlockTransitions, BlockSettings]:
    """Allocate the block of all transitions, and let the workers attach to it."""
    episodes, arrays = settings.episodes, settings.workers.shared_memory
    schema = envs.common.schema
    layout = Layout(schema, len(pool.slots), arrays=arrays)
    memory = pool.backend.allocate(layout.nbytes, layout)
    compiled = codec == "c"
    infos_in_block = compiled and pool.backend.capabilities.shares_memory
    block = BlockSettings(len(pool.slots), arrays, compiled, infos_in_block, envs.described)
    pool.execute(dict.fromkeys(range(len(pool.shares)), Request(Message.ATTACH, None, block)))
    transitions = BlockTransitions(
        pool.slots, layout, memory, schema.rules, episodes.mode,
        copy=episodes.copy, check_actions=episodes.check_actions, needs_all_actions=schema.needs_all_actions,
        local_modules=envs.local_modules, episode_stats=episodes.episode_stats, agents=envs.common.agents(),
    )  # fmt: skip
    return transitions, block


def _warn_of_unknown_memory(settings: Settings, backend: Backend, worker: int) -> None:
    """Warn of limits of `recycle` that are never reached, since the memory of workers is unknown."""
    recycle = settings.faults.recycle
    if recycle is None or (recycle.max_memory_mb is None and recycle.kill_above_mb is None):
        return
    if backend.memory(worker) is None and worker not in backend.in_line:
        warn(
            f"max_memory_mb and kill_above_mb of {recycle} have no effect with backend={settings.workers.backend!r}: "
            "the memory of its workers is unknown. It is known for worker processes, on Linux or if psutil is "
            "installed",
            RuntimeWarning,
        )


def _batch(
    pool: Pool,
    transitions: BlockTransitions,
    rebuilds: Rebuilds,
    envs: _Environments,
    seeds: list[int] | list[None],
    settings: Settings,
) -> Batch:
    """Environments in workers, with checks of their seeds."""
    schema, no_state, no_options = envs.common.schema, envs.common.no_state, envs.common.no_options
    workers, default_seed = Workers(pool, transitions, rebuilds, envs.local_modules), None
    check = None if seeds[0] is None else SeedCheck(envs.built, "seed" in schema.reset_keywords)
    if is_default(settings.episodes.seed) and DefaultSeed.reaches(envs.built[0], DEFAULT_SEED, schema.reset_keywords):
        default_seed = DefaultSeed(pool)
    resets = ResetArguments(pool, transitions, schema, workers, seeds, check, default_seed, no_options)
    arrays = functools.partial(BlockArrays, transitions)
    no_state = f"these environments have no common global state: {no_state}" if no_state else NO_STATE
    return Batch(
        pool, transitions, arrays, schema, resets, workers, restarts=settings.faults.restarts, no_state=no_state
    )


def _space_of(declared: Mapping[AgentID, Space[Any]]) -> spaces.Dict | None:
    if isinstance(declared, GroupSpaces):
        return declared.as_space()
    return spaces.Dict([*declared.items()]) if declared else None


def tiled(frames: Sequence[Any]) -> NDArray[Any]:
    """Arrange frames in a grid, row by row, as square as possible.

    Frames are arrays `(height, width, ...)` of one dtype; smaller ones are padded with zeros to the right and below.
    """
    arrays = [np.asarray(frame) for frame in frames]
    for env_id, (frame, array) in enumerate(zip(frames, arrays, strict=True)):
        if array.ndim < 2 or array.shape[2:] != arrays[0].shape[2:]:
            raise ValueError(
                f"environment {env_id}: expected a frame of shape (height, width, ...), "
                f"got {'None' if frame is None else f'{type(frame).__name__} of shape {array.shape}'}; "
                'frames can be tiled if render_mode is "rgb_array"'
            )
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    columns = math.ceil(math.sqrt(len(arrays)))
    rows = -(-len(arrays) // columns)
    picture: NDArray[Any] = np.zeros((rows, columns, height, width, *arrays[0].shape[2:]), arrays[0].dtype)
    for index, array in enumerate(arrays):
        picture[divmod(index, columns)][: array.shape[0], : array.shape[1]] = array
    return np.reshape(picture.swapaxes(1, 2), (rows * height, columns * width, *arrays[0].shape[2:]))
