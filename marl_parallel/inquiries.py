"""What a `ParallelEnv` can be asked and told apart from being stepped: what it is, attributes, frames, state, counts.

`ParallelEnv` builds on this; nothing here starts, steps or ends anything.
"""

from __future__ import annotations

import copy as copying
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gymnasium import Space, spaces
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID, GroupSpaces
from marl_parallel.arguments import checked_ids, checked_trace
from marl_parallel.core.engine import BatchView, Engine
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.layout import Schema
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.payloads import Answer, Refusal
from marl_parallel.core.pickling import loads, sendable, take_along
from marl_parallel.core.tracing import Tracer
from marl_parallel.tiling import tile as tiled
from marl_parallel.types import ParallelEnvError, Stats


class Inquiries:
    """The part of `ParallelEnv` that leaves the episodes alone."""

    _num_envs: int
    _crew: Engine
    _guard: CallGuard
    _batch: BatchView
    _schema: Schema
    _metadata: dict[str, Any]
    _render_mode: str | None
    _all: tuple[int, ...]
    _seeds_used: tuple[int, ...]
    _only_here: list[ModuleType]

    @property
    def num_envs(self) -> int:
        """How many environments there are."""
        return self._num_envs

    @property
    def batch_size(self) -> int:
        """How many results come together at the least: `num_envs`, but where a simulator has batches of its own."""
        return self._crew.batch_size

    @property
    def num_workers(self) -> int:
        """How many workers share them."""
        return len(self._crew.shares)

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
        ignored = {*self._crew.in_flight}
        if self._crew.restarts is not None:
            ignored.update(self._crew.restarts.faults, self._crew.restarts.marks)
        return tuple({} if env_id in ignored else self._batch.masks(env_id) for env_id in self._all)

    @property
    def observation_space(self) -> spaces.Dict | None:
        """Spaces by agent, in the order of `possible_agents`; None where no agent declares one.

        Where agents are open-ended and belong to groups, it has the groups' spaces, and finds an agent's by its id.
        """
        return _space_of(self._schema.observation_spaces)

    @property
    def action_space(self) -> spaces.Dict | None:
        """Spaces by agent, as those of `observation_space`."""
        return _space_of(self._schema.action_spaces)

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
        return _space_of(self._schema.reward_spaces)

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

    def state(self) -> NDArray[Any]:
        """The global states as they are now: an array `(num_envs, *state_space.shape)` of the caller's own.

        Raises:
            NotImplementedError: The environment has none.
            ResetNeeded: An environment has never been reset.
            ParallelEnvError: A fault, as in `call`; `step_timeout` applies.
        """
        return self._states(self._all)

    @exclusive("state")
    def _states(self, env_ids: Sequence[int]) -> NDArray[Any]:
        self._check_idle("state")
        if self._schema.state_space is None:
            raise NotImplementedError(
                "this environment has no global state: it has no state() with a state_space of arrays or numbers"
            )
        self._check_begun(env_ids, "state")
        return self._batch.states(env_ids, self._crew.ask(Message.STATE, env_ids))

    def seed(self) -> tuple[int, ...]:
        """The seed that each environment uses: its own `unwrapped.seed` where that is an int, else the one we gave.

        While environments are in flight, it is what they were given, or had said when they were asked last.
        """
        self._crew.check_open()
        if self._crew.seeds_stale and not self._crew.in_flight:
            self._ask_for_seeds()
        return self._seeds_used

    @exclusive("seed")
    def _ask_for_seeds(self) -> None:
        declared = self._crew.ask(Message.SEED, self._all)
        self._seeds_used, self._crew.seeds_stale = tuple(declared[env_id] for env_id in self._all), False

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
        self._check_idle("call")
        if not isinstance(name, str) and not callable(name):
            raise TypeError(f"name must be that of a method or attribute, or a function, got {name!r}")
        ids = self._checked_ids(env_ids)
        results = self._told(
            Message.CALL, ids, lambda: sendable((name, args, kwargs), f"the arguments of {name!r}", self._only_here)
        )
        return tuple(results[env_id] for env_id in ids)

    @exclusive("call")
    def _find_out(self, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """What a function of this package finds out about each simulator, given as its first argument."""
        self._check_idle("call")
        told = self._told(Message.CALL, self._all, lambda: sendable((function, args, {}), "a function", ()))
        return tuple(told[env_id] for env_id in self._all)

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
        self._check_idle("set_attr")
        ids = self._checked_ids(env_ids)
        if not isinstance(values, list | tuple):
            values = [values] * len(ids)
        if len(values) != len(ids):
            raise ValueError(f"expected one value for each of {len(ids)} environments, got {len(values)}")
        self._told(
            Message.ASSIGN,
            ids,
            lambda: {
                env_id: sendable((name, value), f"the value for environment {env_id}", self._only_here)
                for env_id, value in zip(ids, values)
            },
        )

    def _told(self, message: Message, env_ids: tuple[int, ...], pickled: Callable[[], Any]) -> dict[int, Any]:
        """What each environment says to something of the caller's, which workers may not be able to import."""
        results: dict[int, Any] = self._crew.ask(message, env_ids, pickled())
        while missing := _missing(results):
            take_along(self._only_here, missing, "what is sent to")
            answered = {env_id: result for env_id, result in results.items() if env_id not in missing}
            results = answered | self._crew.ask(message, tuple(missing), pickled())
        for env_id in sorted(results):
            result = results[env_id]
            if isinstance(result, Refusal):
                raise result.kind(f"environment {env_id}: {result.text}")
            if isinstance(result, Answer):
                results[env_id] = _made_again(env_id, result)
        return results

    def render(self, *, tile: bool = False) -> Any:
        """Render one frame of each environment.

        Args:
            tile: Lay the frames out in a grid.

        Returns:
            A tuple of frames; with `tile`, one array of shape `(rows * height, columns * width, ...)`; None where
            `render_mode` is None.

        Raises:
            ValueError: `tile`, and the frames are no arrays.
            ResetNeeded: An environment has never been reset.
            ParallelEnvError: A fault, as in `call`; `step_timeout` applies.
        """
        frames = self._frames(self._all)
        return tiled(frames) if tile and frames is not None else frames

    @exclusive("render")
    def _frames(self, env_ids: Sequence[int]) -> tuple[Any, ...] | None:
        self._check_idle("render")
        if self._render_mode is None:
            return None
        self._check_begun(env_ids, "render")
        rendered = self._crew.ask(Message.RENDER, env_ids)
        return tuple(rendered[env_id] for env_id in env_ids)

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
        self._check_idle("start_trace")
        if self._crew.tracer is not None:
            raise RuntimeError(f"a trace is being kept already, for {self._crew.tracer.path}: call stop_trace first")
        tracer = Tracer(checked_trace(path), self._crew.shares)
        _, fault = self._tell_workers_to_trace(True)
        if fault is not None:
            self._tell_workers_to_trace(False)
            raise fault
        self._crew.tracer = tracer
        tracer.watch(self._crew, "run", lambda requests: f"wait for {_kind_of(requests)}")
        tracer.watch(self._crew, "send", lambda message, *_: f"send {message.name.lower()}")
        tracer.watch(self._crew, "receive", lambda *_: "wait")
        tracer.watch_batch(self._batch)

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
        self._check_idle("stop_trace")
        if self._crew.tracer is None:
            raise RuntimeError("no trace is being kept: call start_trace first, or pass trace=")
        tracer = self._crew.tracer
        kept, fault = self._tell_workers_to_trace(False)
        for worker, slices in kept.items():
            tracer.add(worker, slices, self._crew.ahead(worker))
        if fault is not None:
            raise fault
        self._crew.tracer = None
        tracer.finish()
        return tracer.path

    def _tell_workers_to_trace(self, on: bool) -> tuple[dict[int, Any], ParallelEnvError | None]:
        """By worker, what it has kept, and the first error of one that failed and is there again."""
        if self._crew.restarts is not None:
            self._crew.restarts.traced = on
        kept: dict[int, Any] = {}
        fault = None
        for worker, share in enumerate(self._crew.shares):  # one by one: what some answer is not lost with others
            try:
                told = self._crew.run({worker: Request(Message.TRACE, (share[0],), on)})
            except ParallelEnvError as error:
                if self._crew.closed:
                    raise
                fault = fault or error
            else:
                kept.update((worker, slices) for slices in told.values())
        return kept, fault

    def stats(self) -> Stats:
        """What has been done so far, and where the time went; of each worker and summed up."""
        return self._crew.stats()

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments that something has been sent to and that have not been received yet."""
        return () if self._crew.closed else tuple(sorted(self._crew.in_flight))

    def _check_idle(self, name: str) -> None:
        """Raise unless everything is open and nothing in flight."""
        self._crew.check_open()
        if self._crew.in_flight:
            raise AlreadyPendingCallError(
                f"{name}() while environments {[*self.pending]} are in flight; recv() them first", name
            )

    def _check_begun(self, ids: Sequence[int], name: str) -> None:
        if not all(self._batch.begun):
            never = [env_id for env_id in ids if not self._batch.begun[env_id]]
            if never:
                raise ResetNeeded(f"environments {never} have never been reset; call reset() before {name}()")

    def _checked_ids(self, env_ids: Sequence[int] | None) -> tuple[int, ...]:
        if env_ids is None:
            return self._all
        return checked_ids(env_ids, self._num_envs)


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
