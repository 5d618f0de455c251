"""`ParallelEnv`: many copies of a multi-agent environment, stepped side by side; dicts in, dicts out.

Here live construction, `reset`, `step` and `close`, and the order of calls. Nothing here knows of processes, of
memory or of what a transition means. A step's way::

    ParallelEnv.step(actions)
      |  Batch.write_actions      refuses what is wrong, writes the rest into the block     core/batch.py
      |  Crew.run                                                                           core/crew.py
      |    Backend.post(STEP)     wakes the workers                                         backends/
      |      Worker.execute       each in its process or thread                             core/worker.py
      |        Episode.step       steps the simulator, resets where the episode is over     core/episode.py
      |        TransitionRecords.write    the transition into the block                     core/records.py
      |    Backend.wait           until the last worker is done
      |  Batch.read               dicts from the block
      v
    observations, rewards, terminateds, truncateds, infos

`send` and `recv` (`async_stepping.py`) go the same way in two halves: `Crew.send` posts, `Crew.receive` waits. Where
faults are to be survived, `step` is these two in a row. With a simulator that steps many copies by itself, others stand
in the place of `Crew` and `Batch` (`core/engine.py` says which), and there is nothing below them but the simulator.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import AgentID, MultiAgentEnv, adapter_function, check_agents
from marl_parallel.arguments import (
    at_least_one,
    autoreset_mode,
    base_seed,
    check_one_for_each,
    checked_constructors,
    checked_timeout,
    checked_trace,
    closing_time,
    pool_arguments,
    survives,
    workers_for,
)
from marl_parallel.async_stepping import AsyncStepping, Options
from marl_parallel.backends import open_backend
from marl_parallel.core.backend import Backend
from marl_parallel.core.batch import Batch, Dicts
from marl_parallel.core.construction import construct
from marl_parallel.core.crew import Crew
from marl_parallel.core.engine import Engine
from marl_parallel.core.exclusive import CALL, CallGuard
from marl_parallel.core.layout import Layout
from marl_parallel.core.limits import Limits
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.native import NativeSimulator
from marl_parallel.core.native_batch import NativeBatch
from marl_parallel.core.native_crew import NativeCrew
from marl_parallel.core.reports import logger
from marl_parallel.core.restarts import Restarts
from marl_parallel.core.schemas import common_schema
from marl_parallel.core.seed_check import SeedCheck
from marl_parallel.core.sharing import share_out
from marl_parallel.types import RestartPolicy

START_TIMEOUT_S = 60.0
_MORE_REQUESTS = 8  # before a worker, beyond two for each of its environments: such as the one to close

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child: what the parent made counts as closed, and nothing of it is touched."""
    for crew in _live:
        crew.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class ParallelEnv(AsyncStepping):
    """Many copies of a multi-agent environment, stepped side by side.

    Environments are dict environments (`reset` gives observations and infos, `step` five dicts with `__all__` in
    the flags), PettingZoo's `ParallelEnv` and `AECEnv`, RLlib's `MultiAgentEnv`, ML-Agents' `BaseEnv` and Gymnasium's
    `Env` (whose one agent is `agent_0`). What their dicts say arrives unchanged; see the README for what is added.

    Args:
        env_constructors: One callable for each environment, called inside its worker, with those of the keywords
            `seed`, `env_id` and `restarts` (how often it has been built anew) that its signature names. Lambdas,
            closures and functions of a script or notebook will do. `functools.partial(gymnasium.make, id)` gets the
            seed where the registered entry point names it; `docs/seeding.md` says which others do.
        auto_reset: What happens when an episode is over, that is when `terminateds["__all__"]` or
            `truncateds["__all__"]` is true: True or `AutoresetMode.SAME_STEP` begins the next one in the same step,
            `NEXT_STEP` with the next, False or `DISABLED` leaves it to you. Names of modes will do.
        seed: Environment i is seeded with `seed + i`; None draws a base seed.
        num_workers: How many workers share the environments evenly; at most one for each environment is used. None:
            one for each environment up to the number of CPUs that this process may use, or the cluster has.
        envs_per_worker: The most environments that a worker has, in place of `num_workers`; there are as many workers
            as that takes, also more than CPUs. 1 is for simulators that allow one simulation per process.
        backend: Where the workers live: `"process"`, `"thread"`, `"serial"`, `"ray"` for actors of a Ray cluster, or
            a `Backend`, such as a `RayBackend` that says which cluster and how much of it.
        adapter: How the simulator is understood where it is not recognised rightly: `"dict"`, `"pettingzoo"`,
            `"aec"`, `"gymnasium"`, `"rllib"`, `"mlagents"`, or what makes a `MultiAgentEnv` of it.
        shared_memory: False sends all values pickled.
        copy: False hands out observations that are views of the block: each is valid until its environment is
            next stepped or reset, and stays readable after `close`.
        context: How worker processes start: `"forkserver"` (the default where there is one), `"spawn"` or `"fork"`.
        check_actions: Check every action against its space.
        on_error: What happens when an environment raises, or its worker dies or hangs: `"raise"` raises here and
            closes everything; `"restart"` builds it anew and goes on. The step it interrupted says so: every agent is
            truncated and `infos[i]["__common__"]` is `{"restarted": True, "error": <report>}`. So does a `reset` that
            failed: what it returns is the fresh environment's, reset with the same options and a seed of its own.
        restart_policy: How often that may happen to one environment.
        step_timeout: Seconds that each step may take, and each call, frame and attribute; None for no limit.
        reset_timeout: Seconds that each reset may take, automatic ones too; None for no limit.
        start_timeout: Seconds that each constructor may take; None for no limit. For all three: time in which the
            whole program is frozen while it waits (a paused virtual machine or container) does not count. A step
            that is found past its limit is reported as interrupted, even if it finishes before its worker is ended.
        worker_threads: Threads of BLAS, OpenMP and torch in each worker process; None leaves them alone.
        trace: Path of a timeline that is written when all is closed, or by `stop_trace`; see `start_trace`.

    Raises:
        TypeError: Something is no callable or cannot be pickled, a constructor requires arguments that it is not
            called with, or a constructor returned no environment.
        ValueError: There are no constructors, their environments' spaces differ, or agents are named by one key, or by
            `"__all__"` or `"__common__"`.
        EnvError: A constructor raised.
        WorkerCrashed: A worker died while constructing.
        WorkerTimeout: A constructor took longer than `start_timeout`.

    One call at a time: a call in the middle of another one, from a second thread or a signal handler, raises
    `AlreadyPendingCallError` and does nothing; the call in progress goes on. `close` may be called at any time from any
    thread, as may `stats`, `pending` and the properties that never change. `docs/concurrency.md` has the whole list.

    With `on_error="restart"`, a constructor that fails here still raises, and so does an environment that fails more
    often than its policy allows: `RestartLimitExceeded`.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
        ...     observations, infos = env.reset()
        ...     actions = [{agent: 0 for agent in acting} for acting in env.acting]
        ...     observations, rewards, terminateds, truncateds, infos = env.step(actions)
        >>> len(observations), observations[0]["agent_0"].shape
        (4, (18,))
    """

    _stepped_by: weakref.ref[object] | None = None  # the facade that does, for facades to know

    def __init__(
        self,
        env_constructors: Sequence[Callable[..., Any]],
        auto_reset: bool | AutoresetMode | str = True,
        seed: int | None = 42,
        *,
        num_workers: int | None = None,
        envs_per_worker: int | None = None,
        backend: str | Backend = "process",
        adapter: str | Callable[[Any], MultiAgentEnv] | None = None,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        check_actions: bool = False,
        on_error: str = "raise",
        restart_policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # it is immutable
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        start_timeout: float | None = START_TIMEOUT_S,
        worker_threads: int | None = 1,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        constructors = checked_constructors(env_constructors)
        mode = autoreset_mode(auto_reset)
        limits = Limits(
            checked_timeout(step_timeout, "step_timeout"),
            checked_timeout(reset_timeout, "reset_timeout"),
            checked_timeout(start_timeout, "start_timeout"),
        )
        survive = survives(on_error, restart_policy)
        if worker_threads is not None:
            worker_threads = at_least_one(worker_threads, "worker_threads")
        if trace is not None:
            checked_trace(trace)
        adapter_function(adapter)
        self._num_envs = len(constructors)
        self._base_seed = base_seed(seed)
        seeds = [self._base_seed + env_id for env_id in range(self._num_envs)]
        hosts = open_backend(backend, context=context, worker_threads=worker_threads)
        passed = {"step_timeout": step_timeout, "reset_timeout": reset_timeout}
        if start_timeout != START_TIMEOUT_S:
            passed["start_timeout"] = start_timeout
        unenforced = [f"{name}={limit}" for name, limit in passed.items() if limit is not None]
        if unenforced and not hosts.enforces_timeouts:
            warnings.warn(
                f"{', '.join(unenforced)} cannot be enforced by backend={backend!r}", RuntimeWarning, stacklevel=2
            )
        shares = share_out(self._num_envs, workers_for(self._num_envs, num_workers, envs_per_worker, hosts))
        self._crew = crew = Crew(hosts, shares, limits)
        self._guard = CallGuard(crew.check_open)
        _live.add(crew)
        self._finalizer = weakref.finalize(self, crew.shut)
        self._plain_steps = {worker: Request(Message.STEP) for worker in range(len(shares))}
        started = False
        try:
            hosts.start(shares, 2 * len(shares[0]) + _MORE_REQUESTS)
            started = True
            only_here: list[ModuleType] = []
            self._only_here = only_here
            described, plan, built = construct(crew, constructors, seeds, mode, adapter, survive, only_here)
            schema = common_schema(described)
            layout = Layout(schema, self._num_envs, arrays=shared_memory)
            block = hosts.allocate(layout)
            attach = Request(Message.ATTACH, None, (self._num_envs, shared_memory))
            crew.run(dict.fromkeys(range(len(shares)), attach))
            self._batch = batch = Batch(
                layout,
                block,
                described[0].rules,
                mode,
                copy=copy,
                check_actions=check_actions,
                needs_all_actions=described[0].needs_all_actions,
                only_here=only_here,
            )
            if survive:
                crew.restarts = Restarts(
                    restart_policy, plan, attach.payload, batch, self._base_seed, described[0].options_last
                )
            self._all = batch.env_ids
            self._schema = schema
            self._reset_keywords = frozenset(described[0].reset_keywords)
            self._check_options = described[0].check_options
            self._seeded_when_made = described[0].seeded_when_made
            self._metadata = {**described[0].metadata, "autoreset_mode": mode}
            self._render_mode = described[0].render_mode
            self._seeds_used = tuple(seeds)
            self._begin_seed_check(SeedCheck(built, "seed" in self._reset_keywords))
            if trace is not None:
                self.start_trace(trace)
        except BaseException:
            # Whatever went wrong, Ctrl-C included, nothing may be left behind.
            self._finalizer.detach()
            crew.shut(ask=started)
            raise

    @classmethod
    def from_native(cls, simulator: NativeSimulator) -> ParallelEnv:
        """Put this interface in front of a simulator that steps many copies by itself; there are no workers then.

        Episodes begin anew with the next step (`NEXT_STEP`). What such a simulator cannot do is an error: `reset` with
        a seed or options, `recv` with a timeout or another `min_envs` than its `batch_size` or all in flight, traces.
        After a partial reset, facades hand out the other copies' observations as they lie in the arrays handed out
        last: with what has been written into those since.

        Args:
            simulator: Nobody else may use it; it is closed with this.
        """
        env = cls.__new__(cls)
        env._num_envs, env._base_seed = simulator.num_envs, simulator.seeds[0]
        check_agents(simulator.schema.possible_agents, simulator.name)
        env._crew = crew = NativeCrew(simulator)
        env._guard = CallGuard(crew.check_open)
        env._batch = NativeBatch(simulator.schema, crew.env_ids)
        _live.add(crew)
        env._finalizer = weakref.finalize(env, crew.shut)
        env._plain_steps = {}
        env._all, env._schema = crew.env_ids, simulator.schema
        env._reset_keywords = frozenset()
        env._only_here = []
        env._metadata = {**simulator.metadata, "autoreset_mode": env._batch.mode}
        env._render_mode, env._seeds_used = simulator.render_mode, tuple(simulator.seeds)
        return env

    @classmethod
    def from_envpool(
        cls,
        task: str,
        num_envs: int,
        batch_size: int | None = None,
        num_threads: int | None = None,
        seed: int | Sequence[int] | None = 42,
        **task_arguments: Any,
    ) -> ParallelEnv:
        """Step a task of EnvPool, whose copies run in threads of its own; as `from_native`.

        Args:
            task: Its name there. The agent of a single-player task is `agent_0`; players are `agent_0`, `agent_1`, ...
            num_envs: How many copies.
            batch_size: How many results `recv` returns at a time, the quickest first; None for all that were sent.
            num_threads: Of EnvPool; None leaves it to choose.
            seed: Copy i is seeded with `seed + i`; a sequence has one for each; None draws one.
            task_arguments: For EnvPool, such as `max_episode_steps`.

        Raises:
            ImportError: EnvPool is not there, or another version than this was written for.
            ValueError: There is no such task, or a number is out of range.
            TypeError: The task takes no such argument.
        """
        from marl_parallel.backends.envpool import open_pool

        numbers, seeds = pool_arguments(num_envs, batch_size, num_threads, seed)
        return cls.from_native(open_pool(task, seeds, {**numbers, **task_arguments}))

    # -- stepping --------------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> tuple[Dicts, Dicts]:
        """Begin new episodes.

        Args:
            seed: Environment i gets `seed + i`, also with `env_ids`, and `seed` becomes the base; a sequence has one
                for each of `env_ids`, where None stands for none given.
            options: For each environment's own `reset`. With `on_error="restart"`, what is built in the place of an
                environment whose reset fails is given them too.
            env_ids: Which environments, in any order; None for all of them.

        Returns:
            Observations and infos: two tuples of dicts by agent, in the order of `env_ids`. Views, with `copy=False`,
            are valid until that environment is next stepped or reset.

        Raises:
            ValueError: Unknown or doubled `env_ids`, a wrong number of seeds, or options that the environments'
                `reset` does not take. Nothing has been reset.
            TypeError: `seed`, `options` or `env_ids` are something else than they should be. Nothing has been reset.
            AlreadyPendingCallError: Something is in flight, or another call is in progress. Nothing has been reset.
            ClosedEnvironmentError: Everything has been closed.
            ParallelEnvError: A fault, as in `step`; everything has been closed.
        """
        guard, entry = self._guard, ("reset", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            ids, told = self._reset(seed, options, env_ids)
            observations, _, _, _, infos = self._batch.read(ids, told)
            return observations, infos
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    def step(
        self, actions: Sequence[Mapping[AgentID, Any]], env_ids: Sequence[int] | None = None
    ) -> tuple[Dicts, Dicts, Dicts, Dicts, Dicts]:
        """Step environments side by side, and begin new episodes where the auto-reset mode says so.

        Args:
            actions: One dict by agent for each environment, in the order of `env_ids`. An array is cast to its
                space's dtype. Agents who do not act may be left out, or are ignored, where PettingZoo's rules apply.
            env_ids: Which environments, in any order; None for all of them.

        Returns:
            Observations, rewards, terminateds, truncateds, infos: five tuples of dicts by agent, in the order of
            `env_ids`. The flags also have the key `"__all__"`. After an automatic reset in the same step, the last
            observation of the old episode is `infos[i][agent]["final_obs"]`. Views, with `copy=False`, are valid until
            that environment is next stepped or reset.

        Raises:
            ValueError: A wrong number of dicts, an action that is missing or of a wrong form, shape or dtype, or, with
                `check_actions`, outside its space; unknown or doubled `env_ids`. Nothing has been stepped.
            TypeError: Actions are no dicts, or `env_ids` no integers. Nothing has been stepped.
            ResetNeeded: An environment has never been reset. Nothing has been stepped.
            AlreadyPendingCallError: Something is in flight, or another call is in progress. Nothing has been stepped.
            ClosedEnvironmentError: Everything has been closed.
            EnvError: An environment raised; everything has been closed.
            WorkerCrashed: A worker process died; everything has been closed.
            WorkerTimeout: An environment took longer than it may; everything has been closed.
            RestartLimitExceeded: With `on_error="restart"` in place of these, where a policy is exhausted.
        """
        guard, entry = self._guard, ("step", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            self._check_idle("step")
            ids = self._checked_ids(env_ids)
            if type(actions) is not list or len(actions) != len(ids):  # the usual case first: it is quick to tell
                check_one_for_each(actions, ids)
            self._check_begun(ids, "step")
            written = self._batch.write_actions(ids, actions)
            return self._batch.read(ids, self._step(ids, written))
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, terminate: bool = False, timeout: float | None = 5.0) -> None:
        """Close all environments, end all workers and free everything. Idempotent.

        Args:
            terminate: Do not let the environments close themselves first.
            timeout: Seconds they are given for it; then workers are killed, where the backend can. None is no limit.

        Raises:
            TypeError: `timeout` is no number. Nothing has been closed.
            ValueError: It is negative. Likewise.
            EnvError: An environment raised in its own `close`; everything has been freed all the same.
        """
        patience = closing_time(timeout)
        self._finalizer.detach()
        error = self._crew.shut(ask=not terminate, timeout=patience)
        if error is not None:
            raise error

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ParallelEnv has workers of its own and can be neither pickled nor copied: make another one")

    def __enter__(self) -> ParallelEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._finalizer.detach()
        failed = self._crew.shut()
        if failed is not None:
            logger.warning("while closing after another error: %s", failed)

    # -- within ----------------------------------------------------------------------------------------------------

    def _reset(
        self, seed: int | Sequence[int | None] | None, options: Options, env_ids: Sequence[int] | None
    ) -> tuple[tuple[int, ...], Any]:
        """Begin new episodes; returns which, and what is told of them."""
        self._check_idle("reset")
        ids = self._checked_ids(env_ids)
        base, given, keywords = self._reset_keywords_for(ids, seed, options)
        self._rebase(base, given)  # first: what fails is built anew with a seed of the new base
        told = self._carry_out(Message.RESET, ids, keywords)
        self._batch.begin(ids)
        if self._seed_check is not None:
            self._check_seeds(ids, told, stacklevel=4)
        return ids, told

    def _step(self, ids: tuple[int, ...], written: Any) -> Any:
        """Have the actions carried out that have been written; returns what is told of it."""
        if ids is self._all and not written and self._crew.restarts is None:
            return self._crew.run(self._plain_steps)
        return self._carry_out(Message.STEP, ids, written or None)

    def _carry_out(self, message: Message, ids: Sequence[int], payload: Any) -> Any:
        """Have something done, and wait for it; returns what is told of it."""
        if self._crew.restarts is None:
            return self._crew.ask(message, ids, payload)
        self._crew.send(message, ids, payload, each=False)
        return self._receive(ids)

    def _send(self, ids: Sequence[int], written: Any) -> None:
        """Begin to carry out the actions that have been written; all of them are to be received at once."""
        self._crew.send(Message.STEP, ids, written or None, each=False)

    def _receive(self, ids: Sequence[int], timeout: float | None = None) -> Any:
        """Wait for all that has been sent; returns what is told of it."""
        return self._crew.receive(len(ids), timeout).told
