"""`ParallelEnv`: many copies of a multi-agent environment, stepped side by side; dicts in, dicts out.

Here live the public verbs and the order in which they may be called. Nothing here knows of processes, of memory or
of what a transition means. A step's way::

    ParallelEnv.step(actions)
      |  Batch.write_actions      refuses what is wrong, writes the rest into the block     runtime/batch.py
      |  Crew.run                                                                           runtime/supervision.py
      |    Backend.post(STEP)     wakes the workers                                         backends/
      |      Worker.execute       each in its process or thread                             runtime/worker.py
      |        Episode.step       steps the simulator, resets where the episode is over     runtime/episode.py
      |        TransitionRecords.write    the transition into the block                     runtime/records.py
      |    Backend.wait           until the last worker is done
      |  Batch.read               dicts from the block
      v
    observations, rewards, terminateds, truncateds, infos
"""

from __future__ import annotations

import copy as copying
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID, MultiAgentEnv
from marl_parallel.backends import open_backend
from marl_parallel.runtime.backend import Backend
from marl_parallel.runtime.batch import Batch
from marl_parallel.runtime.construction import checked_constructors, common_schema, construct
from marl_parallel.runtime.layout import Layout
from marl_parallel.runtime.messages import Message, Request
from marl_parallel.runtime.pickling import dumps
from marl_parallel.runtime.supervision import Crew, logger
from marl_parallel.runtime.worker import Missing, share_out
from marl_parallel.seeding import base_seed, seeds_of
from marl_parallel.stats import Stats, WorkerStats
from marl_parallel.tiling import tile

Dicts = tuple[dict[Any, Any], ...]

_live: weakref.WeakSet[Crew] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a forked child: what the parent made counts as closed, and nothing of it is touched."""
    for crew in _live:
        crew.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class ParallelEnv:
    """Many copies of a multi-agent environment, stepped side by side.

    Environments are dict environments (`reset` gives observations and infos, `step` five dicts with `__all__` in
    the flags), PettingZoo's `ParallelEnv` and `AECEnv`, RLlib's `MultiAgentEnv` and Gymnasium's `Env` (whose one
    agent is `agent_0`). What their dicts say arrives unchanged; see the README for what is added.

    Args:
        env_constructors: One callable for each environment, called inside its worker, with the keywords `seed` and
            `env_id` if its signature names them. Lambdas, closures and functions of a script or notebook will do.
        auto_reset: What happens when an episode is over, that is when `terminateds["__all__"]` or
            `truncateds["__all__"]` is true: True or `AutoresetMode.SAME_STEP` begins the next one in the same step,
            `NEXT_STEP` with the next, False or `DISABLED` leaves it to you. Names of modes will do.
        seed: Environment i is seeded with `seed + i`; None draws a base seed.
        num_workers: How many workers share the environments evenly; at most one for each environment is used. None:
            one for each environment up to the number of CPUs that this process may use.
        backend: Where the workers live: `"process"`, `"thread"`, `"serial"` or a `Backend`.
        adapter: How the simulator is understood where it is not recognised rightly: `"dict"`, `"pettingzoo"`,
            `"aec"`, `"gymnasium"`, `"rllib"`, or what makes a `MultiAgentEnv` of it.
        shared_memory: False sends all values pickled.
        copy: False hands out observations that are views of the block: each is valid until its environment is
            next stepped or reset, and stays readable after `close`.
        context: How worker processes start: `"forkserver"` (the default where there is one), `"spawn"` or `"fork"`.
        check_actions: Check every action against its space.
        start_timeout: Seconds that each constructor may take; None for no limit.
        worker_threads: Threads of BLAS, OpenMP and torch in each worker process; None leaves them alone.

    Raises:
        TypeError: Something is no callable, or cannot be pickled.
        ValueError: There are no constructors, or their environments' spaces differ.
        EnvError: A constructor raised.
        WorkerCrashed: A worker died while constructing.
        WorkerTimeout: A constructor took longer than `start_timeout`.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2) as env:
        ...     observations, infos = env.reset()
        ...     actions = [{agent: 0 for agent in acting} for acting in env.acting]
        ...     observations, rewards, terminateds, truncateds, infos = env.step(actions)
        >>> len(observations), observations[0]["agent_0"].shape
        (4, (18,))
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[..., Any]],
        auto_reset: bool | AutoresetMode | str = True,
        seed: int | None = 42,
        *,
        num_workers: int | None = None,
        backend: str | Backend = "process",
        adapter: str | Callable[[Any], MultiAgentEnv] | None = None,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        check_actions: bool = False,
        start_timeout: float | None = 60.0,
        worker_threads: int | None = 1,
    ) -> None:
        constructors = checked_constructors(env_constructors)
        self._mode = _autoreset_mode(auto_reset)
        self._num_envs = len(constructors)
        self._base_seed = base_seed(seed)
        seeds = [self._base_seed + env_id for env_id in range(self._num_envs)]
        shares = share_out(self._num_envs, _workers_for(self._num_envs, num_workers, backend))
        hosts = open_backend(backend, context=context, worker_threads=worker_threads)
        self._crew = Crew(hosts, shares)
        _live.add(self._crew)
        self._finalizer = weakref.finalize(self, self._crew.shut)
        self._worker_of = [worker for worker, share in enumerate(shares) for _ in share]
        self._all = tuple(range(self._num_envs))
        self._plain_steps = {worker: Request(Message.STEP) for worker in range(len(shares))}
        try:
            hosts.start(len(shares))
            described = construct(self._crew, constructors, seeds, self._mode, adapter, start_timeout)
            schema = common_schema(described)
            layout = Layout(schema, self._num_envs, arrays=shared_memory)
            block = hosts.allocate(layout.nbytes)
            attach = Request(Message.ATTACH, None, (cloudpickle.dumps(schema), self._num_envs, shared_memory))
            self._crew.run(dict.fromkeys(range(len(shares)), attach), limit=start_timeout)
        except BaseException:
            # Whatever went wrong, Ctrl-C included, nothing may be left behind.
            self._finalizer()
            raise
        self._batch = Batch(layout, block, described[0].rules, self._mode, copy=copy, check_actions=check_actions)
        self._schema = schema
        self._reset_keywords = described[0].reset_keywords
        self._metadata = {**described[0].metadata, "autoreset_mode": self._mode}
        self._render_mode = described[0].render_mode
        self._seeds_stale = True

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """How many environments there are."""
        return self._num_envs

    @property
    def batch_size(self) -> int:
        """The same as `num_envs`."""
        return self._num_envs

    @property
    def num_workers(self) -> int:
        """How many workers share them."""
        return len(self._plain_steps)

    def __len__(self) -> int:
        return self._num_envs

    @property
    def possible_agents(self) -> list[AgentID]:
        """All agents that may appear, in the environment's own order; empty where that is open-ended."""
        return list(self._schema.possible_agents)

    @property
    def acting(self) -> tuple[list[AgentID], ...]:
        """Who should act next in each environment; empty before its first reset and where its episode is over."""
        return tuple([*acting] for acting in self._batch.acting)

    @property
    def observation_space(self) -> spaces.Dict | None:
        """Spaces by agent, in the order of `possible_agents`; None where no agent declares one."""
        return _space_of(self._schema.observation_spaces)

    @property
    def action_space(self) -> spaces.Dict | None:
        """Spaces by agent, in the order of `possible_agents`; None where no agent declares one."""
        return _space_of(self._schema.action_spaces)

    @property
    def state_space(self) -> Space[Any] | None:
        """The space of one environment's global state; None where it has none."""
        return self._schema.state_space

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of environment 0, copied; `"autoreset_mode"` is ours."""
        return copying.deepcopy(self._metadata)

    @property
    def render_mode(self) -> str | None:
        """The render mode of environment 0."""
        return self._render_mode

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
                for each of `env_ids`, where None leaves the generators as they are.
            options: For each environment's own `reset`.
            env_ids: Which environments, in any order; None for all of them.

        Returns:
            Observations and infos: two tuples of dicts by agent, in the order of `env_ids`.

        Raises:
            ValueError: Unknown or doubled `env_ids`, a wrong number of seeds, or options for environments whose
                `reset` takes none.
            EnvError: An environment raised; everything has been closed.
        """
        ids = self._checked_ids(env_ids)
        base, seeds = self._seeds_for(seed, ids)
        if options is not None and "options" not in self._reset_keywords:
            raise ValueError(f"options={options!r}, but the reset of these environments takes no options")
        keywords: dict[int, bytes] = {}
        for env_id, own in zip(ids, seeds, strict=True):
            if own is None and not self._batch.begun[env_id]:
                own = base + env_id
            given = {"seed": own, "options": options}
            keywords[env_id] = _sendable({k: v for k, v in given.items() if v is not None}, "options")
        extras = self._unpickled(self._crew.run(self._requests(Message.RESET, ids, keywords)))
        self._base_seed, self._seeds_stale = base, True
        for env_id in ids:
            self._batch.begun[env_id] = True
        observations, _, _, _, infos = self._batch.read(ids, extras)
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
            observation of the old episode is `infos[i][agent]["final_obs"]`.

        Raises:
            ValueError: A wrong number of dicts, an action that is missing, of a wrong shape or outside its space,
                unknown or doubled `env_ids`. Nothing has been stepped.
            ResetNeeded: An environment has never been reset. Nothing has been stepped.
            EnvError: An environment raised; everything has been closed.
            WorkerCrashed: A worker process died; everything has been closed.
        """
        ids = self._checked_ids(env_ids)
        if isinstance(actions, Mapping) or not hasattr(actions, "__len__") or len(actions) != len(ids):
            got = "one dict" if isinstance(actions, Mapping) else getattr(actions, "__len__", lambda: "no sequence")()
            raise ValueError(f"expected a sequence of {len(ids)} action dicts, one for each environment, got {got}")
        if not all(self._batch.begun):
            never = [env_id for env_id in ids if not self._batch.begun[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before step()")
        outside = self._batch.write_actions(ids, actions)
        whole = ids is self._all and not outside
        requests = self._plain_steps if whole else self._requests(Message.STEP, ids, outside)
        extras = self._crew.run(requests)
        return self._batch.read(ids, self._unpickled(extras) if extras else extras)  # type: ignore[return-value]

    # -- asking and telling ----------------------------------------------------------------------------------------

    def state(self) -> NDArray[Any]:
        """The global states as they are now: an array `(num_envs, *state_space.shape)` of the caller's own.

        Raises:
            NotImplementedError: The environment has none.
            ResetNeeded: An environment has never been reset.
        """
        self._check_open()
        if self._schema.state_space is None:
            raise NotImplementedError("this environment has no global state: it lacks a state_space")
        if not all(self._batch.begun):
            raise ResetNeeded("the environments have no state yet; call reset() before state()")
        return self._batch.states(self._unpickled(self._ask(Message.STATE)))

    def seed(self) -> tuple[int, ...]:
        """The seed that each environment uses: its own `unwrapped.seed` where that is an int, else the one we gave."""
        self._check_open()
        if self._seeds_stale:
            declared = self._ask(Message.SEED)
            self._seeds_used = tuple(declared[env_id] for env_id in self._all)
            self._seeds_stale = False
        return self._seeds_used

    def call(self, name: str, *args: Any, env_ids: Sequence[int] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, looked for through wrappers and conversions.

        Args:
            name: Of the method; the value of what is not callable is returned as it is.
            args: For the method.
            env_ids: Which environments, in any order; None for all of them.
            kwargs: For the method.

        Returns:
            What it returned, for each of `env_ids`: copies, as everything crosses over to the caller by pickling.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
            EnvError: The method raised; everything has been closed.
        """
        ids = self._checked_ids(env_ids)
        payload = _sendable((name, args, kwargs), f"the arguments of {name!r}")
        results = self._crew.run(self._requests(Message.CALL, ids, payload))
        _refuse_missing(results)
        return tuple(pickle.loads(results[env_id]) for env_id in ids)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment, as `call` finds it; a method is returned called, without arguments.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
        """
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment, on whichever of its wrappers has it.

        Args:
            name: Of the attribute, which must exist.
            values: A list or tuple with one for each environment; anything else is given to all.

        Raises:
            AttributeError: An environment has no such attribute. Nothing is closed.
            ValueError: There is not one value for each environment.
        """
        self._check_open()
        if not isinstance(values, list | tuple):
            values = [values] * self._num_envs
        if len(values) != self._num_envs:
            raise ValueError(f"expected one value for each of {self._num_envs} environments, got {len(values)}")
        payload = {i: _sendable((name, values[i]), f"the value for environment {i}") for i in self._all}
        _refuse_missing(self._crew.run(self._requests(Message.ASSIGN, self._all, payload)))

    def render(self, *, tile: bool = False) -> Any:
        """Render one frame of each environment.

        Args:
            tile: Lay the frames out in a grid.

        Returns:
            A tuple of frames; with `tile`, one array of shape `(rows * height, columns * width, ...)`; None where
            `render_mode` is None.

        Raises:
            ValueError: `tile`, and the frames are no arrays.
        """
        self._check_open()
        if self._render_mode is None:
            return None
        rendered = self._unpickled(self._ask(Message.RENDER))
        frames = tuple(rendered[env_id] for env_id in self._all)
        return _tile(frames) if tile else frames

    def stats(self) -> Stats:
        """What has been done so far, and where the time went; of each worker and summed up."""
        return Stats.of(
            WorkerStats(
                steps=ledger.steps,
                resets=ledger.resets,
                simulator_s=ledger.simulator_s,
                transport_s=ledger.transport_s,
                waiting_s=ledger.waiting_s,
            )
            for ledger in self._crew.backend.ledgers
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, terminate: bool = False, timeout: float = 5.0) -> None:
        """Close all environments, end all workers and free everything. Idempotent.

        Args:
            terminate: Do not let the environments close themselves first.
            timeout: Seconds they are given for it; then workers are killed, where the backend can.

        Raises:
            EnvError: An environment raised in its own `close`; everything has been freed all the same.
        """
        self._finalizer.detach()
        error = self._crew.shut(ask=not terminate, timeout=timeout)
        if error is not None:
            raise error

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

    def _check_open(self) -> None:
        if self._crew.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def _checked_ids(self, env_ids: Sequence[int] | None) -> tuple[int, ...]:
        self._check_open()
        if env_ids is None:
            return self._all
        ids = tuple(int(env_id) for env_id in env_ids)
        unknown = [env_id for env_id in ids if not 0 <= env_id < self._num_envs]
        if unknown or len(set(ids)) != len(ids) or not ids:
            reason = f"there is no environment {unknown[0]}" if unknown else "one is named twice" if ids else "none"
            raise ValueError(f"env_ids={list(ids)}: {reason}; there are environments 0 to {self._num_envs - 1}")
        return ids

    def _seeds_for(
        self, seed: int | Sequence[int | None] | None, ids: Sequence[int]
    ) -> tuple[int, Sequence[int | None]]:
        """The base from now on, and the seed that each of these environments is explicitly given."""
        if seed is None:
            return self._base_seed, [None] * len(ids)
        if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str | bytes):
            return self._base_seed, seeds_of(seed, ids)
        base = base_seed(seed)
        return base, [base + env_id for env_id in ids]

    def _requests(self, message: Message, ids: Sequence[int], payload: Any = None) -> dict[int, Request]:
        """One request for each worker concerned; a payload by environment is shared out with them."""
        shares: dict[int, list[int]] = {}
        for env_id in ids:
            shares.setdefault(self._worker_of[env_id], []).append(env_id)
        if not isinstance(payload, dict):
            return {worker: Request(message, tuple(share), payload) for worker, share in shares.items()}
        return {
            worker: Request(message, tuple(share), {i: payload[i] for i in share if i in payload} or None)
            for worker, share in shares.items()
        }

    def _ask(self, message: Message) -> dict[int, Any]:
        return self._crew.run(self._requests(message, self._all))

    def _unpickled(self, results: Mapping[int, bytes]) -> dict[int, Any]:
        return {env_id: pickle.loads(result) for env_id, result in results.items()}


def _autoreset_mode(auto_reset: bool | AutoresetMode | str) -> AutoresetMode:
    if isinstance(auto_reset, AutoresetMode):
        return auto_reset
    if isinstance(auto_reset, bool):
        return AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED
    for mode in AutoresetMode:
        if auto_reset in (mode.name, mode.value, mode.name.lower()):
            return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ValueError(f"auto_reset must be True, False, an AutoresetMode or one of {names}; got {auto_reset!r}")


def _workers_for(num_envs: int, num_workers: int | None, backend: str | Backend) -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers is None:
        return min(num_envs, available)
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    workers = min(num_workers, num_envs)
    if workers > available and backend != "serial":
        warnings.warn(
            f"{workers} workers share {available} CPUs; more workers than CPUs slow each other down, "
            "unless their simulators mostly wait",
            ResourceWarning,
            stacklevel=3,
        )
    return workers


def _space_of(declared: Mapping[AgentID, Space[Any]]) -> spaces.Dict | None:
    return spaces.Dict([*declared.items()]) if declared else None  # type: ignore[list-item]


def _sendable(value: Any, what: str) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled, so the workers cannot be told: {error}") from error


def _refuse_missing(results: Mapping[int, Any]) -> None:
    for env_id in sorted(results):
        if isinstance(results[env_id], Missing):
            raise AttributeError(f"environment {env_id}: {results[env_id].text}")


_tile = tile
