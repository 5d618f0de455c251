"""`BatchRunner`: the former interface below `ParallelEnv`, deprecated; `Stepper` and `Batch` replace it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from marl_parallel.core.block.array_view import Actions, Arrays, ArrayView
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.saved_states import EnvState
from marl_parallel.core.pool.slots import Results
from marl_parallel.core.source import Transitions
from marl_parallel.core.warn import warn
from marl_parallel.stepper import NO_STATE, Batch, DictStepper, Options, Seeds, Workers

__all__ = ["NO_STATE", "BatchRunner", "Options", "Seeds", "Workers"]


class _Transitions:
    """`Transitions` with the method that wrote actions."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    def __getattr__(self, name: str) -> Any:
        if name == "_transitions":  # a copy has none yet
            raise AttributeError(name)
        return getattr(self._transitions, name)

    def write_actions(
        self, env_ids: Sequence[int], actions: Sequence[Mapping[Any, Any]], *, stacked: bool = False
    ) -> Any:
        return self._transitions.write(actions, tuple(env_ids), stacked=stacked)


class _ArrayView:
    """An `ArrayView` with its former methods."""

    _view: ArrayView
    _env_ids: tuple[int, ...]

    def __init__(self, view: ArrayView, env_ids: tuple[int, ...]) -> None:
        self.__dict__.update(_view=view, _env_ids=env_ids)

    def __getattr__(self, name: str) -> Any:
        if name == "_view":  # a copy has none yet
            raise AttributeError(name)
        return getattr(self._view, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._view, name, value)

    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Any:
        return self._view.write(actions, self._env_ids if env_ids is None else env_ids)

    def read(self, leftovers: Any) -> Arrays:
        return self._view.read(self._env_ids, leftovers)

    def read_some(self, env_ids: Sequence[int], leftovers: Any, last: Arrays) -> Arrays:
        return self._view.read(env_ids, leftovers, last)


class _Halves(DictStepper):
    """A stepper whose results are received before they are read."""

    def reset_unread(self, *arguments: Any) -> tuple[tuple[int, ...], Any]:
        return self._reset(*arguments)

    def received(self, *arguments: Any) -> Results:
        return self._received(*arguments)

    def load_unread(self, *arguments: Any) -> tuple[dict[int, EnvState], Any]:
        return self._load(*arguments)


class BatchRunner:
    """Deprecated: what `env.runner` was. Use `env.stepper`, whose `batch` has the checks.

    A step is three calls: `transitions` writes actions (dicts, or arrays with a `view`), `step` carries them out, and
    `transitions` reads the results. All three belong under one entry of `guard`. All other attributes are those of
    `DictStepper`, `Batch` and `ResetArguments`.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch, self._stepper, self._statistics = batch, _Halves(batch), batch.transitions.statistics
        self.transitions = _Transitions(batch.transitions)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for owner in (self._batch, self._stepper, self._batch.resets):
                if hasattr(owner, name):
                    return getattr(owner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def local_modules(self) -> list[ModuleType]:
        return [] if self._batch.workers is None else self._batch.workers.local_modules

    @property
    def stepped_by(self) -> Callable[[], object]:
        return self._batch.stepped_by

    @stepped_by.setter
    def stepped_by(self, owner: Callable[[], object]) -> None:
        self._batch.stepped_by = owner

    def write_states(self) -> None:
        self._batch.outputs.write_states()

    def rollout_buffer(self, num_times: int, more: int) -> RolloutBuffer | None:
        return self._batch.outputs.rollout_buffer(num_times, more)

    def view(self, *, copy: bool, env_ids: range | None = None) -> Any:
        ids = self._batch.env_ids if env_ids is None else tuple(env_ids)
        return _ArrayView(self._batch.arrays(copy=copy, env_ids=env_ids), ids)

    def check_reset(self, seed: Seeds, options: Options, env_ids: Sequence[int] | None) -> None:
        self._batch.resets.check(self._batch.checked_ids(env_ids), seed, options)

    def reset(
        self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], Any]:
        return self._stepper.reset_unread(seed, options, env_ids)

    def set_reset_options(self, options: Options, env_ids: Sequence[int] | None) -> None:
        self._batch.check_idle("set_reset_options")
        self._batch.resets.set_options(self._batch.checked_ids(env_ids), options)

    def ids_to_step(self, env_ids: Sequence[int] | None = None) -> tuple[int, ...]:
        self._batch.check_idle("step")
        ids = self._batch.checked_ids(env_ids)
        self._batch.check_has_reset(ids, "step")
        return ids

    def step(self, env_ids: tuple[int, ...], written: Any) -> Any:
        leftovers = self._batch.source.run(Message.STEP, env_ids, written or None)
        self._statistics.finished = []
        return leftovers

    def send(self, env_ids: Sequence[int], written: Any, *, together: bool = False) -> None:
        self._batch.source.send(Message.STEP, env_ids, written or None, together=together)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        window: float | None = None,
    ) -> Results:
        return self._stepper.received(min_envs, timeout, env_ids, window)

    def save_state(self, env_ids: Sequence[int] | None) -> dict[int, EnvState]:
        return self._stepper.save(env_ids)

    def load_state(
        self, states: Sequence[Any], env_ids: Sequence[int] | None, facades: Collection[str] | None = None
    ) -> tuple[dict[int, EnvState], Any]:
        return self._stepper.load_unread(states, env_ids, facades)

    def sample_actions(self, env_ids: Sequence[int] | None) -> list[dict[Any, Any]]:
        ids = self._batch.checked_ids(env_ids)
        self._batch.check_idle("sample_actions", ids)
        return self._batch.resets.sample_actions(ids)


def deprecated_runner(batch: Batch, name: str, instead: str) -> BatchRunner:
    """The `BatchRunner` of a batch, with a warning for the caller of the attribute `name`."""
    warn(f"{name} is deprecated and goes with the next release: use {instead}", DeprecationWarning)
    return BatchRunner(batch)
