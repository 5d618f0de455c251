"""Native simulators: one simulator that steps many environments itself, such as EnvPool, behind `ParallelEnv`.

There are no workers and no shared memory: a step is one `send` with the actions of all environments, and one `receive`
with arrays of all results::

    Stepper  -->  SimulatorSource (dicts), SimulatorArrays (arrays)  -->  NativeSimulator: reset, send, receive
"""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import own_mask
from marl_parallel.adapters import AgentID, check_agents
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import EVENTS, Actions, Arrays, ArrayView, of_acting
from marl_parallel.core.block.info_columns import InfoArrays, InfoColumns, by_agent
from marl_parallel.core.block.records import Columns
from marl_parallel.core.block.statistics import EpisodeStatistics
from marl_parallel.core.messages import Message
from marl_parallel.core.objects.pickling import in_order, loads
from marl_parallel.core.pool.slots import Results
from marl_parallel.core.reports.reports import environments
from marl_parallel.core.schema import alike
from marl_parallel.core.source import Source, StackedMasks, Transitions
from marl_parallel.core.spaces import Mismatch, check_form, leaves, tree_map, zeros
from marl_parallel.core.transition import ALL
from marl_parallel.core.view import check_one_for_each
from marl_parallel.types import EnvError, Stats, WorkerStats

EnvIds = NDArray[np.int32]


class Received(NamedTuple):
    """Transitions of `n` environments with `k` possible agents, one row for each environment.

    The arrays belong to the receiver; the flags of a single agent may be a view of its environment's. Absent agents
    have zeros, and flags that are False. The fields up to `common` are required; the others are None by default.

    Attributes:
        env_ids: int32 `(n,)`: the environments.
        observations: For each group of agents with equal observation spaces, ordered by the first agent of each group:
            arrays `(n, agents of the group, ...)` in the form of the space.
        rewards: `(n, k)`, of any dtype; zeros for the first observation of an episode.
        terminations, truncations: bool `(n, k)`.
        terminated, truncated: bool `(n,)`: whether the episode ended, or was cut off.
        elapsed: Integers `(n,)`: steps since the episode began; zero for its first observation only.
        present: bool `(n, k)`: which agents were observed and rewarded; None, in each result, if all agents always are.
        infos: The agents' infos: arrays `(n, k, ...)` by key, or dicts of such arrays. The keys are always the same. If
            agents have different keys: a list with, for each agent, arrays `(n, ...)` by key.
        common: Infos of whole environments with several agents: arrays `(n, ...)` by key, or dicts of such arrays.
        turns: bool `(n, k)`: which agents may act next, as far as they are alive and present. None if all these may;
            turn-based games have one in each row.
        action_masks: For each group of agents with equal action spaces: zeros and ones or bool `(n, agents of the
            group, choices)`, one where a choice is allowed; or None. Rows of agents that do not act may hold
            anything. None if masks are only in observations or infos, under `action_mask`.
        informed: bool `(n,)`: which rows have infos, of agents or common; None if all have.
    """

    env_ids: EnvIds
    observations: list[Any]
    rewards: NDArray[Any]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    elapsed: NDArray[Any]
    present: NDArray[np.bool_] | None
    infos: dict[str, Any] | list[dict[str, Any]]
    common: dict[str, Any]
    turns: NDArray[np.bool_] | None = None
    action_masks: list[NDArray[Any] | None] | None = None
    informed: NDArray[np.bool_] | None = None

    def at(self, rows: NDArray[Any]) -> Received:
        return Received(*tree_map(lambda array: array[rows], tuple(self)))

    @property
    def info_arrays(self) -> InfoArrays:
        return InfoArrays(self.env_ids, self.infos, self.common, self.present, self.informed)


class NativeSimulator(ABC):
    """A simulator that steps many environments itself; `ParallelEnv.from_native` takes it.

    A subclass must have `name`, `schema`, `num_envs`, `batch_size` and `seeds`, as attributes of the class or of each
    object. The other attributes have defaults.

    PettingZoo's rules apply: agents that are alive and were observed last act. An environment whose episode is over
    starts the next one with the next `send`, whatever its actions. A `reset` in between cancels that. Environments that
    are not in the `env_ids` of a `send` stay unchanged.

    Attributes:
        name: The simulator's name in error messages.
        schema: The agents and the two spaces of each, of fixed size: a `marl_parallel.adapters.Schema`.
        num_envs: The number of environments.
        batch_size: The number of rows that one `receive` returns; `num_envs` if one call steps all, as in VMAS.
        seeds: The seed of each environment.
        partial: True (default) if `send` and `reset` accept a subset of the environments. It matters only if
            `batch_size == num_envs`. `receive` then returns all environments that were sent to, and is called before
            the next `send`.
        steps_some: False if only `reset` accepts a subset; True by default.
        reseeds: True if `reseed` is implemented. False (default): environments are seeded only when they are made.
        metadata, render_mode: As in a Gymnasium environment; `{}` and None by default.
    """

    name: str
    schema: Schema
    num_envs: int
    batch_size: int
    partial: bool = True
    steps_some: bool = True
    seeds: Sequence[int]
    reseeds: bool = False
    metadata: Mapping[str, Any] = {}
    render_mode: str | None = None

    @abstractmethod
    def reset(self, env_ids: EnvIds) -> None:
        """Start to reset some environments."""

    def reseed(self, seeds: Sequence[int]) -> None:
        """Seed all environments again, with one seed below 2**31 for each; a `reset` of all follows."""
        raise NotImplementedError

    @abstractmethod
    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        """Start to step some environments.

        Args:
            actions: For each group of agents with equal action spaces: arrays `(n, agents of the group, ...)` in the
                form and dtype of the space. Rows of agents that do not act hold any numbers.
                The arrays may belong to the caller: copy what you read after `send` returns, and never write into them.
            env_ids: int32 `(n,)`: the environment of each row.
        """

    @abstractmethod
    def receive(self) -> Received:
        """Wait for the results of `send` and `reset`."""

    @abstractmethod
    def render(self) -> Sequence[Any]:
        """One frame of each environment."""

    @abstractmethod
    def attribute(self, name: str) -> Any:
        """A value that holds for all environments; raises `AttributeError` if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent; another thread may be in `receive`, or with `Rollout.ahead` in any call."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child process: forget everything, and touch nothing that the parent uses."""


def check_simulator(simulator: NativeSimulator) -> None:
    """Raise an error if a simulator lacks a required attribute, or its attributes contradict each other."""
    required = ("name", "schema", "num_envs", "batch_size", "seeds")
    if missing := [name for name in required if not hasattr(simulator, name)]:
        raise TypeError(
            f"{type(simulator).__name__} has no {' and no '.join(missing)}; a NativeSimulator must set them"
        )
    check_agents(simulator.schema.possible_agents, simulator.name)
    if len(simulator.seeds) != simulator.num_envs:
        raise ValueError(
            f"{simulator.name}: seeds must have {simulator.num_envs} entries, one for each environment; it has "
            f"{len(simulator.seeds)}"
        )


class SimulatorSource(Source, Transitions):
    """A native simulator as both the `Source` and the `Transitions` of a `Batch`; it counts as one worker.

    The payload of a step is what `NativeSimulator.send` takes, and the leftovers of results are a `Received`. If the
    simulator raises, everything is closed.
    """

    seeds_stale = False
    reset_replaces_automatic_one = True
    mode = AutoresetMode.NEXT_STEP
    copies = True

    def __init__(self, simulator: NativeSimulator) -> None:
        super().__init__()
        self._simulator, self.name, self.seeds = simulator, simulator.name, simulator.seeds
        self.schema = replace(simulator.schema, metadata=simulator.metadata, render_mode=simulator.render_mode)
        self.batch_size = simulator.batch_size
        self.reseeds = simulator.reseeds  # all at once
        self.partial = simulator.partial and simulator.batch_size == simulator.num_envs
        self.shares = [range(simulator.num_envs)]
        self.env_ids = tuple(self.shares[0])
        self.closed = False
        self.freed = False  # whether the simulator has been closed, or is being closed
        self._has_reset = [False] * simulator.num_envs
        self._called: dict[int, Any] = {}  # the results of `begin_in`
        self._all = np.arange(simulator.num_envs, dtype=np.int32)
        self._pending: dict[int, Message] = {}
        self._steps = self._resets = 0
        self.statistics = EpisodeStatistics(simulator.num_envs, self.schema.possible_agents, self.mode)
        self._simulator_s = 0.0
        view = SimulatorArrays(self)
        self._agents, self._group_of = view.agents, view.group_rows
        groups = alike(self.schema.action_spaces, view.agents)
        self._action_groups = [(space, [view.agents[at] for at in positions]) for space, positions in groups]
        # Where each environment stands: (num_envs, agents), "over" (num_envs,). The arrays are never written into.
        none = np.zeros((simulator.num_envs, len(view.agents)), np.bool_)
        self.marks: dict[str, NDArray[np.bool_]] = dict.fromkeys(("acting", "alive", "flagged", *EVENTS), none)
        self.marks["over"] = np.zeros(len(none), np.bool_)
        self._agent_lists: dict[str, list[list[AgentID]]] = {}  # of `marks`
        self._masks: dict[AgentID, Any] = {}  # action masks: arrays (num_envs, ...)
        # By agent, the environments that have reported a mask, bool (num_envs,); None: those in which the agent acts.
        self._reported: dict[AgentID, NDArray[np.bool_] | None] = {}
        self._mask_columns = {
            view.agents[at]: (group, row) for group, (_, columns) in enumerate(groups) for row, at in enumerate(columns)
        }

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:  # type: ignore[override]
        return len(self._pending)

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(sorted(self._pending))

    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Received:
        self.check_open()
        self._check_whole(message, env_ids)
        self._check_steps_all(message, env_ids)
        with self._in_simulator(message, env_ids):
            ids = self._start(message, env_ids, payloads)
            received = self._receive(len(ids))
            if received.env_ids.tobytes() == ids.tobytes():
                return received
            _check_returned(received.env_ids, env_ids, len(ids))
        row_of = np.zeros(len(self._all), np.intp)
        row_of[received.env_ids] = np.arange(len(ids))
        return received.at(row_of[ids])

    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        self.check_open()
        if self._pending and self.partial:
            raise AlreadyPendingCallError(
                f"{self.name} has one batch in flight at a time, unless its batch_size is less than num_envs; "
                "recv() first",
                "send",
            )
        self._check_steps_all(message, env_ids)
        with self._in_simulator(message, env_ids):
            self._start(message, env_ids, payloads)
        self._pending.update(dict.fromkeys(env_ids, message))

    def recv(
        self,
        at_least: int,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        *,
        window: float | None = None,
    ) -> Results:
        self.check_open()
        if window is not None:
            raise ValueError(f"window={window!r}, but native simulators return whole batches: pass None")
        in_flight = len(self._pending)
        if timeout is not None:
            raise ValueError(f"timeout={timeout:g}, but {self.name} cannot stop waiting for results: pass None")
        if at_least != in_flight and self.partial:
            raise ValueError(
                f"min_envs={at_least}, but {self.name} with batch_size equal to num_envs returns all {in_flight} that "
                "are in flight: pass None"
            )
        if at_least not in (in_flight, self.batch_size):
            raise ValueError(
                f"min_envs={at_least}, but {self.name} returns {self.batch_size} at a time: pass "
                "min_envs=env.batch_size, or None for all in flight"
            )
        if not self.partial:
            self._check_whole_batches(at_least, f"recv of all {at_least} in flight")
        with self._in_simulator(Message.STEP, (*self._pending,)):
            received = self._receive(at_least)
            _check_returned(received.env_ids, self._pending, at_least)
        ids = tuple(received.env_ids.tolist())
        return Results(ids, [env_id for env_id in ids if self._pending.pop(env_id) is Message.RESET], received)

    def execute_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        self.check_open()
        env_ids = tuple(env_ids)
        if message is Message.STATE:
            raise NotImplementedError(f"{self.name} has no global state")
        if message is Message.RENDER:
            with self._in_simulator(message, env_ids):
                frames = self._simulator.render()
            return {env_id: frames[env_id] for env_id in env_ids}
        if message is Message.ASSIGN:
            raise AttributeError(f"the environments of {self.name} share all attributes, so none can be set")
        name = loads(next(iter(payload.values())) if isinstance(payload, dict) else payload)[0]
        if not isinstance(name, str):
            raise TypeError(
                f"the environments of {self.name} share one object, so no function can be called with each of them"
            )
        try:
            value = self._simulator.attribute(name)
        except AttributeError:
            raise AttributeError(f"{self.name} has no attribute {name!r}") from None
        if callable(value):
            raise AttributeError(
                f"environments of {self.name} have no methods of their own: {name!r} is a method for all of them"
            )
        return dict.fromkeys(env_ids, value)

    def begin_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> None:
        self._called = self.execute_in(message, env_ids, payload)

    def finish_in(self, timeout: float | None) -> dict[int, Any]:
        return self._called

    @contextlib.contextmanager
    def _in_simulator(self, message: Message, env_ids: Sequence[int]) -> Iterator[None]:
        """Measure the time in the simulator. If it raises, except in `render`, close: results may be missing."""
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.check_open("the environments were closed by another thread")
            failed = error
            if isinstance(error, Exception):
                method = message.name.lower()
                text = f"{self.name} raised in {method}: {type(error).__name__}: {error}"
                stack = "".join(traceback.format_exception(error))
                attributes: dict[str, Any] = {"original": error, "method": method, "remote_traceback": stack}
                failed = EnvError(text, env_ids=env_ids, worker=0, **attributes)
            try:
                if message is not Message.RENDER:
                    self.record_cause(failed)
                    self.close()
                if failed is error:
                    raise
                raise failed from error
            finally:
                del failed  # else it and this frame would refer to each other
        self._simulator_s += time.perf_counter() - started
        if self.closed:
            self.check_open("the environments were closed by another thread")

    def check_resets(self, env_ids: Sequence[int]) -> None:
        self._check_whole(Message.RESET, env_ids)

    def _check_whole(self, message: Message, env_ids: Sequence[int]) -> None:
        if not self.partial:
            self._check_whole_batches(len(env_ids), f"{message.name.lower()} of {len(env_ids)} environments")

    def _check_steps_all(self, message: Message, env_ids: Sequence[int]) -> None:
        if message is Message.STEP and not self._simulator.steps_some and len(env_ids) < len(self.env_ids):
            raise ValueError(
                f"step of {len(env_ids)} environments, but {self.name} steps all {len(self.env_ids)} at once; only "
                "resets take some of them"
            )

    def _check_whole_batches(self, count: int, what: str) -> None:
        if count % self.batch_size:
            raise ValueError(
                f"{what}, but {self.name} returns batch_size={self.batch_size} at a time: pass a multiple of "
                "batch_size environments, or use send() and recv(min_envs=env.batch_size)"
            )

    def _start(self, message: Message, env_ids: Sequence[int], payload: Any) -> EnvIds:
        ids = self._all if env_ids is self.env_ids else np.array(env_ids, np.int32)
        if message is Message.STEP:
            self._simulator.send(payload, ids)
        else:
            if payload is not None:
                self._simulator.reseed(payload)
            self._simulator.reset(ids)
        return ids

    def _receive(self, count: int) -> Received:
        parts = [_checked(self._simulator.receive())]
        while (rows := sum(len(part.env_ids) for part in parts)) < count:
            parts.append(_checked(self._simulator.receive()))
        received = parts[0]
        if len(parts) > 1:
            received = Received(*tree_map(lambda *arrays: np.concatenate(arrays), *map(tuple, parts)))
        steps = int(np.count_nonzero(received.elapsed))
        self._steps += steps
        self._resets += rows - steps
        return received

    # -- where each environment stands -----------------------------------------------------------------------------

    def possible_agents_of(self, env_id: int) -> Sequence[AgentID]:
        return self._agents

    @property
    def acting(self) -> list[list[AgentID]]:
        return self._agents_with("acting")

    @property
    def alive(self) -> list[list[AgentID]]:
        return self._agents_with("alive")

    @property
    def over(self) -> list[bool]:
        over: list[bool] = self.marks["over"].tolist()
        return over

    @property
    def has_reset(self) -> list[bool]:
        return self._has_reset

    def events_in(self, env_id: int) -> dict[AgentID, int]:
        marks = [(self.marks[name][env_id], bit) for name, bit in EVENTS.items()]
        bits = {agent: sum(bit for of_env, bit in marks if of_env[at]) for at, agent in enumerate(self._agents)}
        return {agent: of_agent for agent, of_agent in bits.items() if of_agent}

    def _agents_with(self, mark: str) -> list[list[AgentID]]:
        if mark not in self._agent_lists:
            rows = self.marks[mark].tolist()
            self._agent_lists[mark] = [[*itertools.compress(self._agents, row)] for row in rows]
        return self._agent_lists[mark]

    def begin(self, env_ids: Iterable[int]) -> None:
        for env_id in env_ids:
            self._has_reset[env_id] = True

    def update_marks(self, received: Received) -> bool:
        """Update `marks` by these transitions; returns whether they are of all environments, in order."""
        ids, old = received.env_ids, self.marks
        over = received.terminated | received.truncated
        in_order = ids.tobytes() == self._all.tobytes()
        self.statistics.add_arrays(received, over, in_order=in_order)
        self._copy_masks(received)
        if len(self._agents) == 1 and received.present is None and received.turns is None:  # it lives until the end
            flagged = ended = over[:, None]
            alive = acting = ~flagged
            were_alive = took_part = (received.elapsed != 0)[:, None]
            began, were_dead = ~were_alive, np.zeros_like(alive)
        else:
            continued = (received.elapsed != 0)[:, None]
            present = np.ones_like(received.terminations) if received.present is None else received.present
            ends = received.terminations | received.truncations
            had_ended, were_alive = old["flagged"][ids] & continued, old["alive"][ids] & continued
            flagged = (had_ended & ~present) | ends  # an agent may come back after its end
            alive = (were_alive | present) & ~flagged
            acting = alive & present & ~over[:, None]
            if received.turns is not None:
                acting &= received.turns
            were_dead, took_part = had_ended & ~(present & ~ends), continued & (present | ends)
            ended = ~were_dead & (ends | (alive & (over & ~(old["over"][ids] & continued[:, 0]))[:, None]))
            began = present & ~were_dead & ~were_alive
        new = {"acting": acting, "alive": alive, "flagged": flagged, "over": over}
        new |= dict(zip(EVENTS, (were_alive, took_part, ended, began, were_dead)))
        self.marks = new if in_order else stacking.placed(old, ids, new)
        for array in self.marks.values():
            array.flags.writeable = False  # `Arrays` have them, too
        self._agent_lists.clear()
        return in_order

    def _copy_masks(self, received: Received) -> None:
        """Copy the action masks: the received arrays belong to the caller."""
        for position, (agent, (group, row)) in enumerate(self._group_of.items()):
            observed = received.observations[group]
            of_choices, column = self._mask_columns[agent]
            reported: Any = True if received.present is None else received.present[:, position]
            if received.action_masks is not None and (allowed := received.action_masks[of_choices]) is not None:
                masks, reported = allowed[:, column], None
            elif ACTION_MASK in (infos := received.info_arrays.of_agent(position)):
                masks = infos[ACTION_MASK]
                reported = reported if received.informed is None else reported & received.informed
            elif isinstance(observed, dict) and ACTION_MASK in observed:
                masks = stacking.column(observed[ACTION_MASK], row)
            else:
                continue
            whole = self._masks.get(agent)
            if whole is None:
                whole = tree_map(lambda array: np.zeros((len(self._all), *array.shape[1:]), array.dtype), masks)
            self._masks[agent] = stacking.placed(whole, received.env_ids, masks)
            if reported is None:
                self._reported[agent] = None
                continue
            before = self._reported.get(agent)
            rows = np.zeros(len(self._all), np.bool_) if before is None else before.copy()
            rows[received.env_ids] = reported
            self._reported[agent] = rows

    def _have_reported(self, agent: AgentID) -> NDArray[np.bool_]:
        reported = self._reported[agent]
        return self.marks["acting"][:, self._agents.index(agent)] if reported is None else reported

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        agents = [] if env_id in self._pending else [a for a in self._masks if self._have_reported(a)[env_id]]
        masks: dict[AgentID, Any] = own_mask(tree_map(lambda array: array[env_id], {a: self._masks[a] for a in agents}))
        return in_order(masks, self._agents)

    def stacked_masks(self) -> tuple[StackedMasks, list[int]]:
        arrays: StackedMasks = {
            agent: (masks if type(masks) is np.ndarray else None, self._have_reported(agent))
            for agent, masks in self._masks.items()
        }
        return arrays, [*self._pending]

    # -- dicts -----------------------------------------------------------------------------------------------------

    def write(
        self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int], *, stacked: bool = False
    ) -> list[Any]:
        """What `NativeSimulator.send` takes; all actions become arrays, so `stacked` makes no difference."""
        check_one_for_each(actions, env_ids)
        over, acting = self.over, self.acting
        used = [
            of_env if type(of_env) is dict and [*of_env] == acting[env_id]  # the most frequent case
            else {} if over[env_id]
            else of_acting(env_id, of_env, acting[env_id])
            for env_id, of_env in zip(env_ids, actions, strict=True)
        ]  # fmt: skip

        def column(agent: AgentID, space: Space[Any]) -> Any:
            nothing = zeros(space)
            values = [of_env.get(agent, nothing) for of_env in used]
            try:
                return tree_map(
                    lambda leaf, *parts: stacking.conform(leaf, parts, (len(parts),)), space, *values, form=check_form
                )
            except Mismatch:
                return _one_by_one(env_ids, agent, space, values)

        return self.grouped(column)

    def grouped(self, column: Callable[[AgentID, Space[Any]], Any]) -> list[Any]:
        """What `NativeSimulator.send` takes, from the stacked actions of each agent."""

        def together(*arrays: NDArray[Any]) -> NDArray[Any]:
            return arrays[0][:, None] if len(arrays) == 1 else np.stack(arrays, axis=1)

        return [
            tree_map(together, *[column(agent, space) for agent in agents]) for space, agents in self._action_groups
        ]

    def read(self, env_ids: Sequence[int], received: Received, last: Any = None, /) -> Columns:
        self.update_marks(received)
        observations = [stacking.column(received.observations[group], row) for group, row in self._group_of.values()]
        columns = observations, received.rewards.T, received.terminations.T, received.truncations.T
        size, present = len(received.env_ids), received.present
        seen, rewards, terminateds, truncateds = (
            tuple(by_agent(self._agents, size, present, each)) for each in columns
        )  # fmt: skip
        for flags, of_envs in ((terminateds, received.terminated), (truncateds, received.truncated)):
            for row, flag in zip(flags, of_envs.tolist()):
                row[ALL] = flag
        return seen, rewards, terminateds, truncateds, (*InfoColumns(received.info_arrays, self._agents).rows(),)

    # -- statistics and the end ------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        return Stats.of([WorkerStats(steps=self._steps, resets=self._resets, simulator_s=self._simulator_s)])

    def _close(self, ask: bool | Collection[int], timeout: float) -> None:
        if self.freed:
            return
        self.closed = self.freed = True
        try:
            self._simulator.close()
            self._wait_for_call(timeout)  # another thread leaves its call soon
        except KeyboardInterrupt:
            self.freed = False  # the next call frees the rest
            raise

    def abandon(self) -> None:
        self.mark_forked()
        self.closed = self.freed = True
        self._simulator.abandon()


def _checked(received: Received) -> Received:
    """Transitions of some environments; raises an error if their ids are not integers, or if there are none."""
    ids = received.env_ids
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1:
        got = f"an array of {ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TypeError(f"env_ids of receive() must be an array of integers with one axis, got {got}")
    if not len(ids):  # else `_receive` would ask for ever
        raise ValueError("receive() returned no environment: it must wait for results")
    return received


def _check_returned(returned: EnvIds, expected: Collection[int], count: int) -> None:
    """Raise `ValueError` unless a simulator has returned `count` of the expected environments, each once."""
    ids = returned.tolist()
    once = {*ids}
    if wrong := once.difference(expected):
        raise ValueError(
            f"receive() returned results of environments {sorted(wrong)}, which are not in flight; expected results of "
            f"{environments(sorted(expected))}"
        )
    if len(once) < len(ids):
        twice = [env_id for env_id, times in Counter(ids).items() if times > 1]
        raise ValueError(f"receive() returned results of environments {twice} more than once, expected each once")
    if len(ids) > count:
        raise ValueError(f"receive() returned results of {len(ids)} environments, expected {count}")


def _one_by_one(env_ids: Sequence[int], agent: AgentID, space: Space[Any], values: Sequence[Any]) -> Any:
    """Stack actions one by one: one of them is wrong, or all are valid but NumPy finds no common dtype."""
    checked = []
    for env_id, value in zip(env_ids, values):
        try:
            checked.append(stacking.conform(space, value, ()))
        except Mismatch as error:
            raise ValueError(f"environment {env_id}: the action of agent {agent!r}: {error}") from None
    return tree_map(lambda *arrays: np.stack(arrays), *checked)


class SimulatorArrays(ArrayView):
    """The arrays that a `SimulatorSource` receives; they are not copied if all environments were stepped."""

    def __init__(self, pool: SimulatorSource) -> None:
        super().__init__(pool.schema)
        self._pool, self._num_envs = pool, len(pool.env_ids)
        self._latest: Arrays | None = None
        self._no_envs = np.zeros(self._num_envs, np.bool_)  # none is restarted or recycled
        self._no_envs.flags.writeable = False
        # Groups with `Discrete` values, which simulators may return in another dtype than the space's.
        self._to_cast = [
            any(isinstance(leaf, spaces.Discrete) for _, leaf in leaves(space)) for space, _ in self.groups
        ]

    def write(self, actions: Actions, env_ids: Sequence[int]) -> list[Any]:
        by_agent = self._checked(actions, self._pool, env_ids)

        def column(agent: AgentID, space: Space[Any]) -> Any:
            values = by_agent[agent] if agent in by_agent else stacking.zeros(space, (self._num_envs,))
            try:
                return stacking.conform(space, values, (self._num_envs,))
            except Mismatch as error:
                raise ValueError(f"the actions of agent {agent!r}: {error}") from None

        groups = self._pool.grouped(column)
        return groups if env_ids is self._pool.env_ids else tree_map(lambda array: array[[*env_ids]], groups)

    def read(self, env_ids: Sequence[int], received: Received, last: Arrays | None = None, /) -> Arrays:
        if last is not None:
            return self._read_some(received, last)
        if not self._pool.update_marks(received):
            received = received.at(np.argsort(received.env_ids))
        arrays = self._arrays(received)
        if self._target is not None:
            tree_map(np.copyto, self._target, arrays.observations)
            arrays = arrays._replace(observations=self._target)
        self._latest = arrays = self._with_finals(arrays)
        return arrays

    def last(self) -> Arrays:
        if self._latest is None:
            raise ResetNeeded("reset all environments before stepping or resetting some of them")
        return self._latest  # includes what the caller has written into it since: a copy in each step would take time

    def _read_some(self, received: Received, last: Arrays) -> Arrays:
        self._pool.update_marks(received)
        new = self._arrays(received)
        events: dict[str, Any] = {name: getattr(new, name)[received.env_ids] for name in EVENTS}
        new = new._replace(**events)
        fields: dict[str, Any] = {name: getattr(last, name) for name in ("observations", "present", "observed")}
        for name in ("rewards", "terminations", "truncations", "terminated", "truncated", "rewarded", "flagged"):
            fields[name] = np.zeros_like(getattr(last, name))
        fields |= {name: np.zeros_like(last.alive) for name in EVENTS}
        placed = {name: stacking.placed(whole, received.env_ids, getattr(new, name)) for name, whole in fields.items()}
        self._latest = arrays = self._with_finals(new._replace(**placed, shared_flags=False))
        return arrays

    def record_dicts(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        pass  # environments that reset by themselves are never stepped one at a time

    def _arrays(self, received: Received) -> Arrays:
        rows = len(received.env_ids)
        present = np.ones((rows, len(self.agents)), np.bool_) if received.present is None else received.present.copy()
        observations = [
            stacking.conform(space, values, (rows, len(positions))) if cast else values
            for (space, positions), values, cast in zip(self.groups, received.observations, self._to_cast)
        ]
        arrays = Arrays(
            observations, received.rewards.astype(np.float64), received.terminations, received.truncations,
            received.terminated, received.truncated, present, self._pool.marks["acting"].copy(),
            InfoColumns(received.info_arrays, self.agents), present,
            present, present, shared_flags=len(self.agents) == 1 and received.present is None,
        )  # fmt: skip
        marks: dict[str, Any] = {name: self._pool.marks[name] for name in ("alive", *EVENTS)}
        return arrays._replace(restarted=self._no_envs, recycled=self._no_envs, **marks)

    @staticmethod
    def _with_finals(arrays: Arrays) -> Arrays:
        """The same arrays; the observations are the last ones where an episode has ended, since resets follow."""
        if not (arrays.terminated | arrays.truncated).any():
            return arrays
        return arrays._replace(final_observations=arrays.observations, finally_observed=arrays.observed)
