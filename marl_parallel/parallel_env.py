"""`ParallelEnv`: N environments stepped side by side; dicts in, dicts out.

Construction, `close` and the view of the batch as dicts are here. A step::

    ParallelEnv.step(actions)
      |  Batch.write_actions      checks actions, writes them into shared memory                core/batch.py
      |  BatchRunner.step         one call at a time, env ids, seeds and options of resets      runner.py
      |    Pool.step_all          one slot per environment, one wait loop                       core/pool.py
      |      Backend.post         wakes the workers                                             backends/
      |        Worker.execute     in each process or thread                                     core/worker.py
      |          Episode.step     steps the simulator, resets where the episode is over         core/episode.py
      |          TransitionRecords.write    the transition into shared memory                   core/records.py
      |      Backend.wait         until the last worker is done
      |  Batch.read               dicts from shared memory
      v
    observations, rewards, terminateds, truncateds, infos

`send` and `recv` are the two halves of it. A crash goes this way: `Backend.wait` returns `Lost` in place of a reply;
`Pool` raises it as an error and closes everything, or has `core/recovery.py` rebuild the environments in a new worker.
With a simulator that steps many environments itself, `NativePool` (`core/native.py`) takes the place of `Pool` and
`Batch`, with nothing below it but the simulator.
"""

from __future__ import annotations

import copy as copying
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID, GroupSpaces, MultiAgentEnv, adapter_function, check_agents
from marl_parallel.arguments import (
    addressed,
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
from marl_parallel.backends import open_backend
from marl_parallel.core.backend import Backend
from marl_parallel.core.batch import Batch, Dicts
from marl_parallel.core.columns import Layout
from marl_parallel.core.construction import SeedCheck, construct
from marl_parallel.core.deadlines import Limits
from marl_parallel.core.exclusive import CALL, CallGuard, exclusive
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.native import NativePool, NativeSimulator
from marl_parallel.core.payloads import Answer, Refusal
from marl_parallel.core.pickling import loads, sendable, take_along
from marl_parallel.core.pool import Pool
from marl_parallel.core.recovery import Recovery
from marl_parallel.core.reports import logger
from marl_parallel.core.schema import common_schema
from marl_parallel.core.sharing import share_out
from marl_parallel.core.tracing import Tracer
from marl_parallel.runner import BatchRunner
from marl_parallel.tiling import tile as tiled
from marl_parallel.types import ParallelEnvError, RestartPolicy, Stats, StepBatch

START_TIMEOUT_S = 60.0
_MORE_REQUESTS = 8  # before a worker, beyond two for each of its environments: such as the one to close

_live: weakref.WeakSet[Pool | NativePool] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child: what the parent made counts as closed, and nothing of it is touched."""
    for pool in _live:
        pool.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class ParallelEnv:
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

    Attributes:
        runner: The interface below dicts, on which facades stand; see `BatchRunner` and `docs/facades.md`.
    """

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
        base = base_seed(seed)
        seeds = [base + env_id for env_id in range(len(constructors))]
        hosts = open_backend(backend, context=context, worker_threads=worker_threads)
        passed = {"step_timeout": step_timeout, "reset_timeout": reset_timeout}
        if start_timeout != START_TIMEOUT_S:
            passed["start_timeout"] = start_timeout
        unenforced = [f"{name}={limit}" for name, limit in passed.items() if limit is not None]
        if unenforced and not hosts.enforces_timeouts:
            warnings.warn(
                f"{', '.join(unenforced)} cannot be enforced by backend={backend!r}", RuntimeWarning, stacklevel=2
            )
        shares = share_out(len(seeds), workers_for(len(seeds), num_workers, envs_per_worker, hosts))
        pool = Pool(hosts, shares, limits)
        self._own(pool)
        started = False
        try:
            hosts.start(shares, 2 * len(shares[0]) + _MORE_REQUESTS)
            started = True
            only_here: list[ModuleType] = []
            described, plan, built = construct(pool, constructors, seeds, mode, adapter, survive, only_here)
            schema = common_schema(described)
            layout = Layout(schema, len(seeds), arrays=shared_memory)
            block = hosts.allocate(layout)
            attach = Request(Message.ATTACH, None, (len(seeds), shared_memory))
            pool.execute(dict.fromkeys(range(len(shares)), attach))
            batch = Batch(
                pool.slots,
                layout,
                block,
                described[0].rules,
                mode,
                copy=copy,
                check_actions=check_actions,
                needs_all_actions=described[0].needs_all_actions,
                only_here=only_here,
            )
            one = described[0]
            if survive:
                pool.survive(Recovery(pool.slots, restart_policy, plan, attach.payload, batch, base, one.options_last))
            self.runner = runner = BatchRunner(
                pool,
                batch,
                schema,
                seeds,
                one.metadata,
                one.render_mode,
                reset_keywords=one.reset_keywords,
                check_options=one.check_options,
                seeded_when_made=one.seeded_when_made,
                only_here=only_here,
            )
            runner.begin_seed_check(SeedCheck(built, "seed" in one.reset_keywords))
            if trace is not None:
                self.start_trace(trace)
        except BaseException:
            # Whatever went wrong, Ctrl-C included, nothing may be left behind.
            self._finalizer.detach()
            pool.close(ask=started)
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
        check_agents(simulator.schema.possible_agents, simulator.name)
        env = cls.__new__(cls)
        pool = NativePool(simulator)
        env._own(pool)
        env.runner = BatchRunner(
            pool, pool, simulator.schema, simulator.seeds, simulator.metadata, simulator.render_mode
        )
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

    def _own(self, pool: Pool | NativePool) -> None:
        """Close the pool when this object is collected or the interpreter exits."""
        _live.add(pool)
        self._finalizer = weakref.finalize(self, pool.close)

    @property
    def _guard(self) -> CallGuard:
        return self.runner.guard

    # -- what the environments are ---------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """How many environments there are."""
        return self.runner.num_envs

    @property
    def batch_size(self) -> int:
        """How many results come together at the least: `num_envs`, but where a simulator has batches of its own."""
        return self.runner.pool.batch_size

    @property
    def num_workers(self) -> int:
        """How many workers share them."""
        return len(self.runner.pool.shares)

    def __len__(self) -> int:
        return self.runner.num_envs

    @property
    def possible_agents(self) -> list[AgentID]:
        """All agents that may appear, in the environment's own order; empty where that is open-ended."""
        return list(self.runner.schema.possible_agents)

    @property
    def acting(self) -> tuple[list[AgentID], ...]:
        """Who should act next in each environment; empty before its first reset and where its episode is over."""
        return tuple([*acting] for acting in self.runner.batch.acting)

    @property
    def action_masks(self) -> tuple[dict[AgentID, Any], ...]:
        """The action masks of those who act next: for each environment a dict by agent, without agents that have none.

        A mask is the entry `"action_mask"` of the agent's info or, if that has none, of its observation. It is always
        the running episode's: after a reset in the same step, `infos[i][agent]["action_mask"]` is the finished
        episode's, and this is the one in `reset_info`. Arrays of zeros and ones come back as bool, True for an action
        that is allowed; dicts and tuples stay what they are, as Gymnasium's `sample(mask)` takes them. `sample` itself
        wants int8: `space.sample(mask.astype("int8"))`.

        All arrays are the caller's own, with `copy=False` too. The dict is empty for an environment that is in flight,
        whose episode is over, that has never been reset, or whose next action is ignored because it was restarted.

        Example:
            >>> import numpy as np
            >>> from gymnasium import spaces
            >>> from marl_parallel import ParallelEnv
            >>> class Elevator:
            ...     possible_agents = ["cabin"]
            ...     observation_space = spaces.Dict({"cabin": spaces.Discrete(3)})
            ...     action_space = spaces.Dict({"cabin": spaces.Discrete(2)})  # down, up
            ...     def reset(self):
            ...         self.floor = 0
            ...         return {"cabin": 0}, self.infos()
            ...     def step(self, actions):
            ...         self.floor += 2 * int(actions["cabin"]) - 1
            ...         ended = {"__all__": self.floor == 2}
            ...         return {"cabin": self.floor}, {"cabin": 0.0}, ended, {"__all__": False}, self.infos()
            ...     def infos(self):
            ...         return {"cabin": {"action_mask": np.array([self.floor > 0, self.floor < 2])}}
            >>> with ParallelEnv([Elevator] * 2, backend="serial") as env:
            ...     observations, infos = env.reset()
            ...     *_, infos = env.step([{"cabin": 1}, {"cabin": 1}])
            ...     *_, infos = env.step([{"cabin": 1}, {"cabin": 0}])  # environment 0 ends and is reset
            ...     infos[0]["cabin"]["action_mask"], env.action_masks[0]["cabin"]
            (array([ True, False]), array([False,  True]))
        """
        return tuple(
            self.runner.batch.masks(env_id) if self.runner.pool.acts_next(env_id) else {}
            for env_id in self.runner.env_ids
        )

    @property
    def observation_space(self) -> spaces.Dict | None:
        """Spaces by agent, in the order of `possible_agents`; None where no agent declares one.

        Where agents are open-ended and belong to groups, it has the groups' spaces, and finds an agent's by its id.
        """
        return _space_of(self.runner.schema.observation_spaces)

    @property
    def action_space(self) -> spaces.Dict | None:
        """Spaces by agent, as those of `observation_space`."""
        return _space_of(self.runner.schema.action_spaces)

    @property
    def reward_space(self) -> spaces.Dict | None:
        """Spaces by agent of those whose rewards are vectors of several objectives; None where no agent declares one.

        An environment declares them as MOMAland and MO-Gymnasium do: a method `reward_space(agent)`, or an attribute
        `reward_space` that is a `Box` or a mapping by agent. Then rewards are arrays of the space's dtype and shape in
        every dict, the caller's own, and they travel in shared memory. They are cast as observations are: a cast from
        float to integer or another shape is an `EnvError`. Where a number is 0.0, as in the step that begins a new
        episode (`NEXT_STEP`) and after a restart, an array is zeros. A reward that comes as a number stays one.

        Example:
            >>> import numpy as np
            >>> from gymnasium import spaces
            >>> from marl_parallel import ParallelEnv
            >>> class Courier:
            ...     possible_agents = ["van"]
            ...     observation_space = spaces.Dict({"van": spaces.Discrete(9)})
            ...     action_space = spaces.Dict({"van": spaces.Discrete(2)})
            ...     reward_space = spaces.Dict({"van": spaces.Box(-1, 1, (2,), np.float32)})  # parcels, fuel
            ...     def reset(self):
            ...         return {"van": 0}, {}
            ...     def step(self, actions):
            ...         return {"van": 1}, {"van": np.array([1.0, -0.5])}, {"__all__": False}, {"__all__": False}, {}
            >>> with ParallelEnv([Courier] * 2, backend="serial") as env:
            ...     observations, infos = env.reset()
            ...     observations, rewards, *_ = env.step([{"van": 1}] * 2)
            ...     env.reward_space["van"].shape, rewards[0]["van"]
            ((2,), array([ 1. , -0.5], dtype=float32))
        """
        return _space_of(self.runner.schema.reward_spaces)

    @property
    def state_space(self) -> Space[Any] | None:
        """The space of one environment's global state; None where it has none."""
        return self.runner.schema.state_space

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of environment 0, copied; `"autoreset_mode"` is ours."""
        return copying.deepcopy(self.runner.metadata)

    @property
    def render_mode(self) -> str | None:
        """The render mode of environment 0."""
        return self.runner.render_mode

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
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
        runner = self.runner
        ids, extras = runner.reset(seed, options, env_ids)
        observations, _, _, _, infos = runner.batch.read(ids, extras)
        return observations, infos

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
        runner = self.runner
        guard, entry = runner.guard, ("step", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            ids, batch = runner.ids_to_step(env_ids), runner.batch
            if type(actions) is not list or len(actions) != len(ids):  # the usual case first: it is quick to tell
                check_one_for_each(actions, ids)
            return batch.read(ids, runner.step(ids, batch.write_actions(ids, actions)))
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    @exclusive("send")
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
        runner = self.runner
        ids, rows = addressed(actions, env_ids, runner.num_envs)
        runner.check_not_in_flight(ids, "send")
        runner.check_has_reset(ids, "send")
        runner.send(ids, runner.batch.write_actions(ids, rows))

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
        runner = self.runner
        runner.send_reset(seed, options, env_ids)

    @exclusive("recv")
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
        runner = self.runner
        ids, _, extras = runner.recv(min_envs, timeout)
        return StepBatch(ids, *runner.batch.read(ids, extras))

    # -- calls, attributes, frames, state ---------------------------------------------------------------------------

    @exclusive("state")
    def state(self, *, env_ids: Sequence[int] | None = None) -> NDArray[Any]:
        """The global states as they are now: an array `(num_envs, *state_space.shape)` of the caller's own.

        Args:
            env_ids: Which environments, in any order; None for all of them.

        Raises:
            NotImplementedError: The environment has none.
            ValueError: Unknown or doubled `env_ids`.
            ResetNeeded: An environment has never been reset.
            ParallelEnvError: A fault, as in `call`; `step_timeout` applies.
        """
        runner = self.runner
        runner.check_idle("state")
        if runner.schema.state_space is None:
            raise NotImplementedError(
                "this environment has no global state: it has no state() with a state_space of arrays or numbers"
            )
        ids = runner.checked_ids(env_ids)
        runner.check_has_reset(ids, "state")
        return runner.batch.states(ids, runner.pool.execute_in(Message.STATE, ids))

    def seed(self) -> tuple[int, ...]:
        """The seed that each environment uses: its own `unwrapped.seed` where that is an int, else the one we gave.

        While environments are in flight, it is what they were given, or had said when they were asked last.
        """
        runner = self.runner
        runner.check_open()
        if runner.pool.seeds_stale and not runner.pool.in_flight:
            self._ask_for_seeds()
        return runner.seeds

    @exclusive("seed")
    def _ask_for_seeds(self) -> None:
        runner = self.runner
        declared = runner.pool.execute_in(Message.SEED, runner.env_ids)
        runner.seeds, runner.pool.seeds_stale = tuple(declared[env_id] for env_id in runner.env_ids), False

    @exclusive("call")
    def call(
        self, name: str | Callable[..., Any], /, *args: Any, env_ids: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of each environment, looked for through wrappers and conversions.

        Args:
            name: Of the method; the value of what is not callable is returned as it is. Or a function, which is called
                where each environment is, with it as the first argument.
            args: For the method.
            env_ids: Which environments, in any order; None for all of them.
            kwargs: For the method.

        Returns:
            What it returned, for each of `env_ids`: copies, as everything crosses over to the caller by pickling.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
            TypeError: `name` is something else, or the arguments or the result cannot be pickled, or not be made again
                from that. Nothing is closed.
            ModuleNotFoundError: They need a module that a worker can have in no way. Nothing is closed.
            EnvError: The method raised; everything has been closed, or, with `on_error="restart"`, the environment is
                built anew.
        """
        runner = self.runner
        runner.check_idle("call")
        if not isinstance(name, str) and not callable(name):
            raise TypeError(f"name must be that of a method or attribute, or a function, got {name!r}")
        ids = runner.checked_ids(env_ids)
        results = self._told(
            Message.CALL, ids, lambda: sendable((name, args, kwargs), f"the arguments of {name!r}", runner.only_here)
        )
        return tuple(results[env_id] for env_id in ids)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment, as `call` finds it; a method is returned called, without arguments.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
            TypeError: It cannot be pickled. Nothing is closed.
            EnvError: A property or method raised, as in `call`.
        """
        return self.call(name)

    @exclusive("set_attr")
    def set_attr(self, name: str, values: Any, env_ids: Sequence[int] | None = None) -> None:
        """Set an attribute of each environment, on whichever of its wrappers has it.

        Args:
            name: Of the attribute, which must exist.
            values: A list or tuple with one for each of `env_ids`; anything else is given to all of them.
            env_ids: Which environments, in any order; None for all of them.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
            ValueError: There is not one value for each environment.
            TypeError: A value cannot be pickled. Nothing is closed.
            ModuleNotFoundError: It needs a module that a worker can have in no way. Nothing is closed.
            EnvError: A property raised, as in `call`.
        """
        runner = self.runner
        runner.check_idle("set_attr")
        ids = runner.checked_ids(env_ids)
        if not isinstance(values, list | tuple):
            values = [values] * len(ids)
        if len(values) != len(ids):
            raise ValueError(f"expected one value for each of {len(ids)} environments, got {len(values)}")
        self._told(
            Message.ASSIGN,
            ids,
            lambda: {
                env_id: sendable((name, value), f"the value for environment {env_id}", runner.only_here)
                for env_id, value in zip(ids, values)
            },
        )

    def _told(self, message: Message, env_ids: tuple[int, ...], pickled: Callable[[], Any]) -> dict[int, Any]:
        """What each environment says to something of the caller's, which workers may not be able to import."""
        results: dict[int, Any] = self.runner.pool.execute_in(message, env_ids, pickled())
        while missing := _missing(results):
            take_along(self.runner.only_here, missing, "what is sent to")
            answered = {env_id: result for env_id, result in results.items() if env_id not in missing}
            results = answered | self.runner.pool.execute_in(message, tuple(missing), pickled())
        for env_id in sorted(results):
            result = results[env_id]
            if isinstance(result, Refusal):
                raise result.kind(f"environment {env_id}: {result.text}")
            if isinstance(result, Answer):
                results[env_id] = _made_again(env_id, result)
        return results

    @exclusive("render")
    def render(self, *, tile: bool = False, env_ids: Sequence[int] | None = None) -> Any:
        """Render one frame of each environment.

        Args:
            tile: Lay the frames out in a grid.
            env_ids: Which environments, in any order; None for all of them.

        Returns:
            A tuple of frames; with `tile`, one array of shape `(rows * height, columns * width, ...)`; None where
            `render_mode` is None.

        Raises:
            ValueError: `tile`, and the frames are no arrays; or unknown or doubled `env_ids`.
            ResetNeeded: An environment has never been reset.
            ParallelEnvError: A fault, as in `call`; `step_timeout` applies.
        """
        runner = self.runner
        runner.check_idle("render")
        ids = runner.checked_ids(env_ids)
        if runner.render_mode is None:
            return None
        runner.check_has_reset(ids, "render")
        rendered = runner.pool.execute_in(Message.RENDER, ids)
        frames = tuple(rendered[env_id] for env_id in ids)
        return tiled(frames) if tile else frames

    @exclusive("start_trace")
    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Keep a timeline of what workers and this process do, until `stop_trace` or `close`.

        While one is kept, a step takes a microsecond or so longer, and each lane keeps up to a million slices of time.
        What a worker had kept when it died is lost.

        Args:
            path: Of the file: JSON that https://ui.perfetto.dev and `chrome://tracing` show.

        Raises:
            ValueError: No file can be written there.
            RuntimeError: One is being kept already.
            ParallelEnvError: A worker has died meanwhile. Where it is there again (`on_error="restart"`), none is kept.
        """
        self.runner.check_idle("start_trace")
        pool = self.runner.pool
        if pool.tracer is not None:
            raise RuntimeError(f"a trace is being kept already, for {pool.tracer.path}: call stop_trace first")
        tracer = Tracer(checked_trace(path), pool.shares)
        _, fault = self._tell_workers_to_trace(True)
        if fault is not None:
            self._tell_workers_to_trace(False)
            raise fault
        pool.tracer = tracer
        tracer.watch(pool, "step_all", lambda: "wait for step")
        tracer.watch(pool, "run", lambda message, *_: f"wait for {message.name.lower()}")
        tracer.watch(pool, "execute", lambda requests: f"wait for {_kind_of(requests)}")
        tracer.watch(pool, "send", lambda message, *_: f"send {message.name.lower()}")
        tracer.watch(pool, "recv", lambda *_: "wait")
        tracer.watch_batch(self.runner.batch)

    @exclusive("stop_trace")
    def stop_trace(self) -> Path:
        """Write the trace that `start_trace` began, or the argument `trace`.

        Returns:
            Where it is.

        Raises:
            RuntimeError: None is being kept.
            OSError: The file cannot be written.
            ParallelEnvError: A worker has died meanwhile. Where it is there again (`on_error="restart"`), the others'
                lanes are not lost: call this once more.
        """
        self.runner.check_idle("stop_trace")
        pool = self.runner.pool
        if pool.tracer is None:
            raise RuntimeError("no trace is being kept: call start_trace first, or pass trace=")
        tracer = pool.tracer
        kept, fault = self._tell_workers_to_trace(False)
        for worker, slices in kept.items():
            tracer.add(worker, slices, pool.ahead(worker))
        if fault is not None:
            raise fault
        pool.tracer = None
        tracer.finish()
        return tracer.path

    def _tell_workers_to_trace(self, on: bool) -> tuple[dict[int, Any], ParallelEnvError | None]:
        """By worker, what it has kept, and the first error of one that failed and is there again."""
        pool = self.runner.pool
        if pool.recovery is not None:
            pool.recovery.traced = on
        kept: dict[int, Any] = {}
        fault = None
        for worker, share in enumerate(pool.shares):  # one by one: what some answer is not lost with others
            try:
                told = pool.execute({worker: Request(Message.TRACE, (share[0],), on)})
            except ParallelEnvError as error:
                if pool.closed:
                    raise
                fault = fault or error
            else:
                kept.update((worker, slices) for slices in told.values())
        return kept, fault

    def stats(self) -> Stats:
        """What has been done so far, and where the time went; of each worker and summed up."""
        return self.runner.pool.stats()

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments that something has been sent to and that have not been received yet."""
        pool = self.runner.pool
        return () if pool.closed else pool.pending

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
        error = self.runner.pool.close(ask=not terminate, timeout=patience)
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
        failed = self.runner.pool.close()
        if failed is not None:
            logger.warning("while closing after another error: %s", failed)


def _space_of(declared: Mapping[AgentID, Space[Any]]) -> spaces.Dict | None:
    if isinstance(declared, GroupSpaces):
        return declared.as_space()
    return spaces.Dict([*declared.items()]) if declared else None  # type: ignore[list-item]


def _missing(results: Mapping[int, Any]) -> dict[int, str]:
    """By environment, the module that its worker could not import."""
    refused = {env_id: result for env_id, result in results.items() if isinstance(result, Refusal)}
    return {env_id: refusal.text for env_id, refusal in refused.items() if refusal.kind is ModuleNotFoundError}


def _made_again(env_id: int, answer: Answer) -> Any:
    try:
        return loads(answer.pickled)
    except Exception as error:
        raise TypeError(
            f"environment {env_id}: the result pickles there, but cannot be made again here: "
            f"{type(error).__name__}: {error}"
        ) from error


def _kind_of(requests: Mapping[int, Request]) -> str:
    return next(iter(requests.values())).message.name.lower()
