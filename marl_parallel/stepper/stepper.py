"""`Stepper`: resets and steps the environments of a `Batch`, with actions and results in one form, such as dicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic

from gymnasium.error import NoAsyncCallError
from numpy.typing import NDArray

from marl_parallel.arguments import checked_integer, checked_timeout, one_for_each
from marl_parallel.core.block.records import Columns
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.saved_states import EnvState, SavedStates, from_bytes
from marl_parallel.core.pool.slots import Results
from marl_parallel.core.view import ActionsT, ResultT, View
from marl_parallel.core.warn import warn
from marl_parallel.stepper.batch import Batch
from marl_parallel.stepper.resets import Options, Seeds


class Stepper(Generic[ActionsT, ResultT]):
    """Resets and steps the environments of a `Batch`; its `View` says how actions and results look.

    A step is: write the actions, carry them out, read the results. No method may be called during another call of the
    same `ParallelEnv`: callers guard theirs with `batch.guard`. All methods raise `ClosedEnvironmentError` after
    `close`, and `ParallelEnvError` for a fault.

    Args:
        batch: The environments.
        view: The form of actions and results.

    Attributes:
        batch: The environments, with checks.
        env_ids: The environments that it steps.
        num_envs: The number of all environments.
        schema: The agents and spaces, a `Schema`: `possible_agents`, `observation_spaces`, `action_spaces`, ...
        mode: The auto-reset mode.
        restarts: Whether environments that fail are rebuilt.
        takes_options: Whether the environments' `reset` takes options.
        transitions: `acting` and `alive` have a list of agents for each environment: the agents that act next, and the
            agents that are alive. `over` says for each environment whether its episode is over.
        workers: The worker pool and its helpers; None for a simulator that steps many environments by itself.
    """

    def __init__(self, batch: Batch, view: View[ActionsT, ResultT]) -> None:
        self.batch, self.view = batch, view
        self.source, self.transitions, self.workers = batch.source, batch.transitions, batch.workers
        self.schema, self.mode, self.env_ids, self.num_envs = batch.schema, batch.mode, batch.env_ids, batch.num_envs
        self.restarts, self.takes_options = batch.restarts, batch.resets.takes_options
        self._statistics = batch.transitions.statistics

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """The seed of each environment; None with `seed="own"`, if the environment declares none."""
        return self.batch.resets.seeds

    # -- resets and steps ------------------------------------------------------------------------------------------

    def _reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> tuple[tuple[int, ...], Any]:
        """Begin new episodes, and wait; returns the environments and their leftovers, which are to be read.

        Arguments and errors are as in `ParallelEnv.reset`; `options` may also be a list with one for each environment.
        """
        self.batch.check_idle("reset")
        ids = self.batch.checked_ids(env_ids)
        self.source.check_resets(ids)
        leftovers = self.source.run(Message.RESET, ids, self.batch.resets.keywords(ids, seed, options))
        self._statistics.finished = []
        self._finish_resets(ids, leftovers)
        return ids, leftovers

    def _finish_resets(self, env_ids: Sequence[int], leftovers: Any) -> None:
        self.transitions.begin(env_ids)
        self.batch.resets.warn_of_equal_observations(env_ids, leftovers)

    def step(self, actions: ActionsT, env_ids: Sequence[int] | None = None) -> ResultT:
        """Step environments, and wait; arguments and errors are as in `ParallelEnv.step`."""
        batch, source, ids = self.batch, self.source, self.env_ids
        if source.closed or source.in_flight or batch.calling:
            batch.check_idle("step")
        if env_ids is not None:
            ids = batch.checked_ids(env_ids)
        if not batch.all_have_reset:
            batch.check_has_reset(ids, "step")
        payload = self.view.write(actions, ids)
        last = None if len(ids) == len(self.env_ids) else self.view.last()
        leftovers = source.run(Message.STEP, ids, payload or None)
        if self._statistics.any_finished:
            self._statistics.finished = []
        return self.view.read(ids, leftovers, last)

    def _send_reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        """Begin new episodes and return; arguments and errors are as in `_reset`."""
        ids = self.batch.checked_ids(env_ids)
        self.batch.check_idle("reset_async", ids)
        self.source.send(Message.RESET, ids, self.batch.resets.keywords(ids, seed, options))

    def _received(
        self,
        min_envs: int | None,
        timeout: float | None,
        env_ids: Sequence[int] | None = None,
        window: float | None = None,
    ) -> Results:
        """Wait for results in flight, which are to be read; arguments and errors are as in `ParallelEnv.recv`.

        With `env_ids`, which must be in flight, wait for all of these and no others.
        """
        self.source.check_open()
        in_flight = self.source.in_flight
        if not in_flight:
            self.batch.check_not_calling("recv")
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
        self._statistics.finished = []
        self._finish_resets(results.resets, results.leftovers)
        return results

    def state(self, env_ids: Sequence[int] | None = None) -> NDArray[Any]:
        """The current global states of environments, in a new array; errors are as in `ParallelEnv.state`."""
        self.batch.check_idle("state")
        if self.schema.state_space is None or self.workers is None:
            raise NotImplementedError(self.batch.no_state)
        ids = self.batch.checked_ids(env_ids)
        self.batch.check_has_reset(ids, "state")
        self.source.execute_in(Message.STATE, ids)
        return self.workers.transitions.states(ids)

    # -- saved states ----------------------------------------------------------------------------------------------

    def _save(self, env_ids: Sequence[int] | None) -> dict[int, EnvState]:
        """The states of environments, by env id; errors are as in `ParallelEnv.save_state`."""
        self.batch.check_idle("save_state")
        ids = self.batch.checked_ids(env_ids)
        states = self._saved_states("save_state")
        self.batch.check_has_reset(ids, "save_state")
        saved = states.save(ids)
        if states.drawing and not self.batch.has_warned_of_draws:
            self.batch.has_warned_of_draws = True
            warn(
                f"environments {states.drawing}, or others in their workers, draw from process-wide generators, whose "
                "states are not saved (random, numpy.random, torch): pass isolate_rng=True to save them, too",
                RuntimeWarning,
            )
        return {env_id: self.batch.resets.saved(env_id, state) for env_id, state in saved.items()}

    def _load(
        self, states: Sequence[Any], env_ids: Sequence[int] | None, facades: Collection[str] | None
    ) -> tuple[dict[int, EnvState], Any]:
        """Load states; returns them by env id, and the leftovers of the results, which are to be read.

        Arguments and errors are as in `ParallelEnv.load_state`; `facades` are as in `SavedStates.check`.
        """
        self.batch.check_idle("load_state")
        ids = self.batch.checked_ids(env_ids)
        saved_states = self._saved_states("load_state")
        if isinstance(states, bytes | bytearray | str) or not isinstance(states, Sequence):
            raise TypeError(f"states must be a list with the bytes of each environment, got {type(states).__name__}")
        one_for_each(states, ids, "states")
        loaded = {env_id: from_bytes(state, f"environment {env_id}") for env_id, state in zip(ids, states)}
        saved_states.check(loaded, facades)
        leftovers, fault = saved_states.load(loaded)
        self.batch.resets.load({env_id: loaded[env_id] for env_id in leftovers})
        if fault is not None:  # no caller reads the results of those that have been loaded
            self.transitions.read(tuple(leftovers), leftovers)
        self._statistics.finished = []
        saved_states.outdate([*leftovers])
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


class DictStepper(Stepper[Sequence[Mapping[Any, Any]], Columns]):
    """The `Stepper` of `ParallelEnv`: actions are one dict by agent for each environment, results five such tuples."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch, batch.transitions)

    def reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> Columns:
        """Begin new episodes, and wait; arguments and errors are as in `ParallelEnv.reset`."""
        return self.view.read(*self._reset(seed, options, env_ids))

    def drain(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        """Before a reset with these arguments: wait for all environments in flight, and drop their results.

        Wrong arguments raise the errors of `reset`, and drop nothing.
        """
        self.batch.resets.check(self.batch.checked_ids(env_ids), seed, options)
        if self.source.in_flight:
            self.recv()

    def send_reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> None:
        """Begin new episodes and return; `recv` returns the results. Arguments and errors are as in `reset`."""
        self._send_reset(seed, options, env_ids)

    def send(self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int]) -> None:
        """Begin to step environments and return; `recv` returns the results. Arguments and errors are as in `step`."""
        ids = self.batch.checked_ids(env_ids)
        self.batch.check_idle("send", ids)
        self.batch.check_has_reset(ids, "send")
        self.source.send(Message.STEP, ids, self.view.write(actions, ids) or None)

    def recv(
        self, min_envs: int | None = None, timeout: float | None = None, window: float | None = None
    ) -> tuple[tuple[int, ...], Columns]:
        """Wait for results of `send` and `send_reset`; returns env ids, in order of completion, and the results.

        Arguments and errors are as in `ParallelEnv.recv`.
        """
        results = self._received(min_envs, timeout, window=window)
        return results.env_ids, self.view.read(results.env_ids, results.leftovers)

    def save(self, env_ids: Sequence[int] | None = None) -> dict[int, EnvState]:
        """The states of environments, by env id; errors are as in `ParallelEnv.save_state`."""
        return self._save(env_ids)

    def load(
        self, states: Sequence[Any], env_ids: Sequence[int] | None = None, facades: Collection[str] | None = None
    ) -> tuple[dict[int, EnvState], Columns]:
        """Load states; returns them by env id, and the results of their latest step or reset.

        Arguments and errors are as in `ParallelEnv.load_state`; `facades` are as in `SavedStates.check`.
        """
        loaded, leftovers = self._load(states, env_ids, facades)
        return loaded, self.view.read(tuple(loaded), leftovers)
