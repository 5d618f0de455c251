"""`Rollout`: data of many steps in preallocated arrays `(num_steps, num_envs, agents, ...)`."""

from __future__ import annotations

import contextlib
import copy
import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import described
from marl_parallel.arguments import checked_integer
from marl_parallel.core.block import stacking
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.spaces import copied, tree_map
from marl_parallel.core.transition import COMMON
from marl_parallel.rollouts.ahead import Ahead, Finished, check_alike, unpacked
from marl_parallel.rollouts.arrays import Current, Extra, Policy, RolloutArrays, at, put
from marl_parallel.rollouts.claims import claim
from marl_parallel.rollouts.infos import declared, named_in, shaped
from marl_parallel.rollouts.policies import Choices, Policies, check_extras
from marl_parallel.stepper import Options, Seeds
from marl_parallel.types import FinishedEpisode
from marl_parallel.vector.stacked import Grouped, StackedVecEnv, StepReturn

_ALIGNMENT = 64  # bytes


@dataclass
class _Part:
    """Environments that are stepped together."""

    env: StackedVecEnv  # of these environments only
    env_ids: range
    time: int = 0  # how many steps of the present rollout are stored

    def __post_init__(self) -> None:
        self.rows = slice(self.env_ids.start, self.env_ids.stop)


class _Set(NamedTuple):
    """The arrays of one rollout."""

    arrays: RolloutArrays
    observations: list[Any]  # its observations by group
    first: int  # the time step of the rollout buffer at which it begins


@dataclass
class _Storage:
    """The memory of one or two rollouts."""

    sets: list[_Set]
    buffer: RolloutBuffer | None  # None if workers write no observations where they stay
    block: NDArray[np.uint8]
    is_pinned: bool = False


def _with_last_time(arrays: RolloutArrays) -> tuple[Any, ...]:
    """The arrays `(T + 1, N, ...)` of what a policy acts on."""
    return (*arrays[:4], arrays.states, arrays.begins)


def _halves(env: StackedVecEnv) -> tuple[range, range]:
    """Two ranges of environments, each of half of the workers; with one worker, each half of the environments."""
    middle = env.num_envs / 2
    borders = [share.start for share in env.stepper.source.shares[1:]] or [env.num_envs // 2]
    border = min(borders, key=lambda first: abs(first - middle))
    return range(border), range(border, env.num_envs)


class Rollout:
    """Collects `num_steps` steps of a `StackedVecEnv` at a time, in arrays that are written once.

    The constructor allocates all arrays. Each rollout overwrites the last one, and begins where that ended.

    Args:
        env: Resets by itself (`auto_reset=True` or `"NEXT_STEP"`). Nothing else may step it meanwhile.
        num_steps: T, the number of steps of each environment in a rollout.
        extras: By name, the learner's own values that come with each step: an `Extra`, or a shape for float32 values of
            each agent.
        infos: Values of infos to keep, by name, in the form of `extras`. `"won"` is a key of an agent's info, or with
            `per_agent=False` of `infos[i]["__common__"]` or `infos[i]` itself; `"episode/r"` is the key `"r"` in the
            dict `"episode"`.
        action_masks: Whether action masks are stored, for `Discrete` and `MultiDiscrete` actions.
        halves: 2 to act for one half of the environments while the other half is stepped; the arrays are the same. A
            half has the environments of half of the workers, or nearly half if their number is odd; with one worker,
            half of its environments. The policy gets rows of these environments only, `Current.env_ids`.

    Attributes:
        env: The `StackedVecEnv`. With `halves=2`, only its `reset` sets its attributes.
        num_steps: T.

    Raises:
        TypeError: `env` is not a `StackedVecEnv`, or an extra or info is not a shape or an `Extra`.
        ValueError: `num_steps` or `halves` is out of range; the environments have `auto_reset=False`; or they cannot be
            stepped in halves, because there is only one or they are native simulators.
        MemoryError: The arrays need more memory than is free.
        RuntimeError: An `evaluate` in the background steps these environments.

    Example:
        >>> from marl_parallel import make
        >>> from marl_parallel.vector import StackedVecEnv
        >>> env = StackedVecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2))
        >>> rollout = Rollout(env, num_steps=50, extras={"log_probs": ()})
        >>> def policy(current):
        ...     return np.zeros((4, 3), np.int64), {"log_probs": np.zeros((4, 3))}
        >>> data = rollout.collect(policy)
        >>> data.observations.shape, data.rewards.shape, int(data.done.sum())
        ((51, 4, 3, 18), (50, 4, 3), 8)
        >>> values = np.zeros((51, 4, 3), np.float32)  # of a critic on data.observations
        >>> final_values = np.zeros((8, 3), np.float32)  # critic(data.final_observations)[data.done]
        >>> from marl_parallel import gae
        >>> advantages, returns = gae(data, values, final_values, gamma=0.99, lam=0.95)
        >>> advantages.shape
        (50, 4, 3)
        >>> env.close()
    """

    def __init__(
        self,
        env: StackedVecEnv,
        num_steps: int,
        *,
        extras: Mapping[str, Extra | tuple[int, ...]] | None = None,
        infos: Mapping[str, Extra | tuple[int, ...]] | None = None,
        action_masks: bool = False,
        halves: Literal[1, 2] = 1,
    ) -> None:
        if not isinstance(env, StackedVecEnv):
            raise TypeError(f"a Rollout needs a StackedVecEnv, got {type(env).__name__}")
        self.env, self.num_steps = env, checked_integer(num_steps, "num_steps")
        if halves not in (1, 2):
            raise ValueError(f"halves must be 1 or 2, got {halves!r}")
        if env.num_envs < halves:
            raise ValueError(f"halves=2 needs at least two environments, got {env.num_envs}")
        if env.stepper.mode is AutoresetMode.DISABLED:
            raise ValueError(
                "a Rollout goes on when an episode ends, so it needs a ParallelEnv that resets by itself: pass "
                'auto_reset=True or auto_reset="NEXT_STEP", got auto_reset=False'
            )
        self._guard = env.stepper.batch.guard
        self._is_ahead = False  # while the thread of `ahead` collects
        self._loaded: list[Finished] = []  # the complete rollout that `load_state` has read, until `ahead` returns it
        self._filled = 0
        self._episodes: list[FinishedEpisode] = []
        self._choices: Choices | None = None  # of the `Policies` that have made the latest step
        self._acted: Any = None  # for the next step, if `Policies` make it: which of them has acted
        self._unfit: list[str] = []  # the error of a value from infos that does not fit
        self._has_reset = False
        self._parts = [_Part(env, range(env.num_envs))]
        if halves == 2:
            self._parts = [_Part(copy.copy(env), env_ids) for env_ids in _halves(env)]
            for part in self._parts:
                part.env.narrow(part.env_ids)
        self._next = 0  # the part that acts next
        self._extras, self._infos = declared("extras", extras), declared("infos", infos)
        self._has_masks = action_masks
        # Observations are written where they stay if the stepper's view has the same groups, in the same order.
        view = env.stepper.view
        of_view = [[view.agents[position] for position in positions] for _, positions in view.groups]
        self._in_place = of_view == [*env.group_map.values()]
        self._storage = self._allocated(1)
        self._set = self._storage.sets[0]

    def _allocated(self, count: int) -> _Storage:
        """Memory for `count` rollouts, in one block."""
        env, num_steps = self.env, self.num_steps
        shapes = self._shapes(action_masks=self._has_masks)
        nbytes = count * _nbytes(tuple(shapes))
        free = free_memory()
        if free is not None and nbytes > free:
            raise MemoryError(
                f"{count * num_steps} steps of {env.num_envs} environments with {env.num_agents} agents need "
                f"{nbytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: collect fewer steps at a time"
            )
        if claim(env.stepper.batch, self, Rollout) is not None:
            raise RuntimeError("an evaluation steps these environments: wait for it, or make others for the Rollout")
        buffer: RolloutBuffer | None = None
        if self._in_place:
            more = nbytes - count * _nbytes(shapes.observations)
            buffer = env.stepper.batch.rollout_buffer(count * (num_steps + 1), more)
        if buffer is None:
            block: Any = mmap.mmap(-1, max(nbytes, 1))
            start = used = 0
        else:
            block, start, used = buffer.memory, buffer.start, buffer.more
            shapes = shapes._replace(observations=None)

        def allocated(empty: NDArray[Any]) -> NDArray[Any]:
            nonlocal used
            if empty.dtype.hasobject:
                return np.full(empty.shape, None, empty.dtype)
            array: NDArray[Any] = np.ndarray(empty.shape, empty.dtype, block, used)
            used += _aligned(array.nbytes)
            return array

        sets = []
        for first in range(0, count * (num_steps + 1), num_steps + 1):
            arrays = RolloutArrays(*tree_map(allocated, tuple(shapes)))
            if buffer is not None:
                times = slice(first, first + num_steps + 1)
                written = [at(of_group, times) for of_group in buffer.observations]
                arrays = arrays._replace(observations=env.grouped(dict(zip(env.group_map, written))))
            sets.append(_Set(arrays, [*env.by_group(arrays.observations).values()], first))
        return _Storage(sets, buffer, np.frombuffer(block, np.uint8)[start:])

    @property
    def arrays(self) -> RolloutArrays:
        """The data: views of the memory that is written."""
        self._check_not_ahead("arrays")
        return self._set.arrays

    @property
    def filled(self) -> int:
        """How many steps of the present rollout have been stored, of all environments."""
        self._check_not_ahead("filled")
        return self._filled

    @property
    def finished_episodes(self) -> list[FinishedEpisode]:
        """The returns and lengths of the episodes that ended in the present rollout."""
        self._check_not_ahead("finished_episodes")
        return self._episodes

    def _shapes(self, *, action_masks: bool) -> RolloutArrays:
        """Arrays of the shapes and dtypes for `num_steps` steps, without memory."""
        env, steps, n = self.env, self.num_steps, self.env.num_envs

        def new(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            return np.broadcast_to(np.zeros((), dtype), shape)

        def of_agents(steps: int, dtype: Any = np.bool_, shape: tuple[int, ...] = ()) -> Grouped:
            return env.grouped({g: new((steps, n, len(agents), *shape), dtype) for g, agents in env.group_map.items()})

        def in_form(spaces: Grouped, steps: int) -> Grouped:
            """Stacked values of a space for each group."""
            values = {}
            for name, space in env.by_group(spaces).items():
                one = stacking.zeros(space, (1, len(env.group_map[name])))
                values[name] = tree_map(lambda leaf: new((steps, n, *leaf.shape[1:]), leaf.dtype), one)
            return env.grouped(values)

        def states(steps: int) -> Any:
            space = env.state_space
            return None if space is None or space.shape is None else new((steps, n, *space.shape), space.dtype)

        masks = env.action_masks if action_masks else None

        def named(extra: Extra, dtype: Any, shape: tuple[int, ...]) -> Any:
            return of_agents(steps, dtype, shape) if extra.per_agent else new((steps, n, *shape), dtype)

        return RolloutArrays(
            observations=in_form(env.single_observation_space, steps + 1),
            observed=of_agents(steps + 1),
            acting=of_agents(steps + 1),
            action_masks=tree_map(lambda mask: new((steps + 1, *mask.shape), np.bool_), masks),
            actions=in_form(env.single_action_space, steps),
            rewards=of_agents(steps, np.float32),
            present=of_agents(steps),
            terminations=of_agents(steps),
            truncations=of_agents(steps),
            terminated=new((steps, n), np.bool_),
            truncated=new((steps, n), np.bool_),
            done=new((steps, n), np.bool_),
            final_observations=in_form(env.single_observation_space, steps),
            present_final=of_agents(steps),
            states=states(steps + 1),
            final_states=states(steps),
            extras={name: named(extra, extra.dtype, extra.shape) for name, extra in self._extras.items()},
            infos={name: named(extra, extra.dtype, extra.shape) for name, extra in self._infos.items()},
            informed={name: named(extra, np.bool_, ()) for name, extra in self._infos.items()},
            begins=of_agents(steps + 1),
            policies=of_agents(steps, np.int32),
        )

    # -- collecting ------------------------------------------------------------------------------------------------

    def reset(self, seed: Seeds = None, options: Options = None) -> Current:
        """Begin new episodes and an empty rollout; arguments are as in `StackedVecEnv.reset`.

        `collect` does this, too, if it has not been done before.
        """
        self._check_not_ahead("reset")
        if any(part.env.stepper.in_flight for part in self._parts):  # they are dropped, so errors come first
            self.env.stepper.batch.resets.check(range(self.env.num_envs), seed, options)
        return self._begin(lambda env: env.reset(seed, options))

    def _begin(self, begin: Callable[[StackedVecEnv], tuple[Grouped, Any]]) -> Current:
        """Begin an empty rollout with the observations that a function returns for all environments."""
        for part in self._parts:
            if part.env.stepper.in_flight:
                part.env.step_wait()
        env, whole = self.env, _Part(self.env, range(self.env.num_envs))
        self._write_to(whole, 0)
        try:
            observations, _ = begin(env)
        finally:
            env.stepper.view.write_to(None)
        self._loaded.clear()
        self._clear()
        self._choices = None
        self._store_current(whole, observations)
        self._next = 0
        for part in self._parts:
            if part.env is not env:
                part.env.acting, part.env.state = (at(of_all, part.rows) for of_all in (env.acting, env.state))
        self._has_reset = True
        return self._current

    def save_state(self) -> list[bytes]:
        """Save the environments between two rollouts: after `collect`, or `reset`; as `ParallelEnv.save_state`.

        The data of the rollout are not saved, only what the next one begins with.

        Raises:
            ValueError: The rollout has some of its steps, but not all; or `load_state` has loaded a complete rollout
                that `ahead` has not returned yet.
            AlreadyPendingCallError: In a block of `ahead`: call `Ahead.save_state`.
            ResetNeeded, TypeError: As `ParallelEnv.save_state`.
        """
        self._check_not_ahead("save_state")
        self._check_nothing_loaded()
        self._check_between_rollouts("save_state")
        return self._saved(self.env)

    def _saved(self, env: StackedVecEnv) -> list[bytes]:
        """The states of all environments, by the facade of all of them."""
        final = [state for part in self._parts if (state := part.env.final_state) is not None]
        if len(final) == len(self._parts) > 1:
            env.final_state = np.concatenate(final)
        return env.save_state()

    def load_state(self, states: Sequence[bytes]) -> Current:
        """Go on from what `save_state` has returned, with an empty rollout; no `reset` is needed before.

        The states of `Ahead.save_state` also have a complete rollout: call `ahead` next, which returns it first.

        Errors are as in `ParallelEnv.load_state`; or `ValueError` if the complete rollout does not fit this object.
        """
        self._check_not_ahead("load_state")
        if not isinstance(states, list | tuple) or len(states) != self.env.num_envs + 1:
            return self._begin(lambda env: env.load_state(states))
        loaded = unpacked(states[-1])
        check_alike(loaded.arrays, self._set.arrays)
        current = self._begin(lambda env: env.load_state(states[:-1]))
        self._loaded.append(loaded)
        return current

    def _check_between_rollouts(self, name: str) -> None:
        times = {part.time for part in self._parts}
        if not (times <= {0} or times == {self.num_steps}):
            raise ValueError(
                f"the rollout has {self._filled} of {self.num_steps} steps, which would be lost: call {name} after "
                "collect(), or when filled is num_steps"
            )

    def _check_nothing_loaded(self) -> None:
        if self._loaded:
            raise ValueError(
                "the loaded states have a complete rollout, which would be lost: go on with ahead(), or call reset()"
            )

    def _check_not_ahead(self, name: str) -> None:
        if self._is_ahead:
            self.env.stepper.batch.check_open()
            raise AlreadyPendingCallError(
                f"{name} of a Rollout was used in the block of ahead(), whose thread collects: use what the loop "
                "returns, or leave the block first",
                name,
            )

    @property
    def current(self) -> Current:
        """What the policy acts on next; raises `ResetNeeded` before the first `reset`."""
        self._check_not_ahead("current")
        if not self._has_reset:
            raise ResetNeeded("the environments have never been reset; call reset(), or collect()")
        return self._current

    @property
    def _current(self) -> Current:
        part = self._parts[self._next]
        *seen, begins = self._current_of(part)
        return Current._make([*seen, part.env_ids, begins, None])

    def step(self, actions: Grouped, **extras: Any) -> Current:
        """Step all environments and store the step; after a full rollout, it is the first step of the next one.

        With `halves=2`, begin to step the half of `current`, and store the step of the other half.

        Args:
            actions: As in `StackedVecEnv.step`, for the environments of `current`.
            extras: All declared extras.

        Returns:
            What the policy acts on next, as `current`.

        Raises:
            TypeError: Extras are missing, or were not declared; nothing has been stepped.
            ValueError: As in `StackedVecEnv.step`, or an extra has another shape than declared, or a number that its
                dtype cannot hold; nothing has been stepped. Or a value from infos does not fit in this way; the step
                has been stored without that value.
        """
        self._check_not_ahead("step")
        self._check_nothing_loaded()
        self._acted = None
        return self._step(actions, extras)

    def _step(self, actions: Grouped, extras: Mapping[str, Any]) -> Current:
        if extras.keys() != self._extras.keys():
            raise TypeError(f"expected the extras {[*self._extras]}, got {[*extras]}")
        if not self._has_reset:
            raise ResetNeeded("the environments have never been reset; call reset(), or collect()")
        checked = self._checked_extras(extras, len(self._parts[self._next].env_ids))
        acted, self._acted = self._acted, None
        if acted is None:
            self._choices = None
        self._begin_next()
        arrays, part = self._set.arrays, self._parts[self._next]
        index = part.time, part.rows
        for name, value in checked.items():
            put(arrays.extras[name], index, value)
        self._write_to(part, part.time + 1)
        if len(self._parts) == 1:
            try:
                results = part.env.step(actions)
            finally:
                part.env.stepper.view.write_to(None)
            put(arrays.actions, index, actions)
            if acted is not None:
                put(arrays.policies, index, acted)
            self._store(part, results)
        else:
            part.env.step_async(actions)
            put(arrays.actions, index, actions)
            if acted is not None:
                put(arrays.policies, index, acted)
            self._next = 1 - self._next
            other = self._parts[self._next]
            if other.env.stepper.in_flight:
                self._store(other, other.env.step_wait())
            if other.time == self.num_steps:
                self._store(part, part.env.step_wait())
        self._filled = min(part.time for part in self._parts)
        if self._unfit:
            raise ValueError(self._unfit.pop())
        return self._current

    def _checked_extras(self, extras: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
        """The extras of `num_envs` environments as arrays of the declared shapes; `ValueError` for any other shape."""
        checked: dict[str, Any] = {}
        for name, value in extras.items():
            extra, groups = self._extras[name], self.env.group_map
            if not extra.per_agent:
                checked[name] = shaped(f"the extra {name!r}", value, (num_envs, *extra.shape), extra.dtype)
                continue
            if len(groups) > 1 and not (isinstance(value, Mapping) and value.keys() == groups.keys()):
                got = f"the keys {[*value]}" if isinstance(value, Mapping) else type(value).__name__
                raise ValueError(
                    f"the extra {name!r} must be a dict by group, with the keys {[*groups]}; got {got}. If it is a "
                    "value of environments, declare Extra(..., per_agent=False)"
                )
            checked[name] = self.env.grouped({
                group: shaped(
                    f"the extra {name!r}" + (f" of group {group!r}" if len(groups) > 1 else ""),
                    of_group, (num_envs, len(groups[group]), *extra.shape), extra.dtype,
                )
                for group, of_group in self.env.by_group(value).items()
            })  # fmt: skip
        return checked

    def _store_infos(self, part: _Part, infos: Mapping[int, Mapping[Any, Any]]) -> None:
        """Store the declared values from infos; `step` later raises the error of a value that does not fit."""
        groups = self.env.group_map
        for name, extra in self._infos.items():
            stored, informed = self._set.arrays.infos[name], self._set.arrays.informed[name]
            for env_id, of_env in infos.items():
                if not extra.per_agent:
                    whose = f"environment {env_id}"
                    for infos_by_agent in (of_env.get(COMMON), of_env):
                        if self._put_info(name, extra, stored, informed, (part.time, env_id), infos_by_agent, whose):
                            break
                    continue
                values, masks = self.env.by_group(stored), self.env.by_group(informed)
                for group, agents in groups.items():
                    for column, agent in enumerate(agents):
                        whose, at = f"environment {env_id}, agent {agent!r}", (part.time, env_id, column)
                        self._put_info(name, extra, values[group], masks[group], at, of_env.get(agent), whose)

    def _put_info(
        self, name: str, extra: Extra, stored: Any, informed: Any, at: tuple[int, ...], info: Any, whose: str
    ) -> bool:
        """Store one value of an info, if there is one; returns whether there is."""
        value = named_in(info, name)
        if value is None:
            return False
        try:
            stored[at] = shaped(f"{whose}: the info {name!r}", value, extra.shape, extra.dtype)
            informed[at] = True
        except ValueError as error:
            self._unfit = self._unfit or [str(error)]
        return True

    def _store(self, part: _Part, results: StepReturn) -> None:
        """Store a step of some environments."""
        arrays, env, index = self._set.arrays, part.env, (part.time, part.rows)
        observations, rewards, terminations, truncations, infos = results
        put(arrays.rewards, index, rewards)
        if self._infos and infos:
            self._store_infos(part, dict(zip(part.env_ids, infos)) if isinstance(infos, list) else infos)
        if not env.plain:
            put(arrays.present, index, env.present)
            put(arrays.terminations, index, terminations)
            put(arrays.truncations, index, truncations)
            arrays.terminated[index], arrays.truncated[index], arrays.done[index] = (
                env.terminated, env.truncated, env.done
            )  # fmt: skip
            finished = env.parallel_env.finished_episodes
            self._episodes += finished
            if self._choices is not None:
                self._choices.end(finished)
            if env.done.any():
                ended = np.flatnonzero(env.done)
                of_ended = part.time, part.env_ids.start + ended
                put(arrays.final_observations, of_ended, at(env.final_observations, ended))
                put(arrays.present_final, of_ended, at(env.present_final, ended))
                put(arrays.final_states, of_ended, at(env.final_state, ended))
        part.time += 1
        self._store_current(part, observations)

    def collect(self, policy: Policy | Policies) -> RolloutArrays:
        """Step until the rollout is full; if it is full already, collect a new one. Returns `arrays`.

        Args:
            policy: Takes a `Current`; returns actions, or if extras were declared, a pair of actions and a dict of
                extras. Or `Policies`: each of them acts for its agents.
        """
        self._check_not_ahead("collect")
        self._check_nothing_loaded()
        policy = self._function(policy)
        if not self._has_reset:
            self.reset()
        self._begin_next()
        self._fill(policy)
        return self._set.arrays

    def _function(self, policy: Policy | Policies) -> Policy:
        """A policy as a function of a `Current`."""
        if isinstance(policy, Policies):
            check_extras(self._extras)
            return functools.partial(self._act, policy)
        if not callable(policy):
            raise TypeError(f"policy must be a function, got {policy!r:.80}")
        return policy

    def _act(self, policies: Policies, current: Current) -> Any:
        """What several policies choose, each for its agents."""
        if self._choices is None or self._choices.policies is not policies:
            self._choices = Choices(policies, self.env, self._extras)
        self._choices.begin_due(current.env_ids)
        actions, extras, self._acted = self._choices.act(current)
        return (actions, extras) if extras else actions

    def _fill(self, policy: Policy) -> None:
        """Step until the rollout is full."""
        current, self._acted = self._current, None
        while self._filled < self.num_steps:
            actions, extras = self._chosen(policy(current))
            current = self._step(actions, {**extras})

    # -- collecting while the caller trains --------------------------------------------------------------------------

    def ahead(self, policy: Policy | Policies, *, publish: Callable[[], object], rollouts: int | None = None) -> Ahead:
        """Collect each rollout while the caller trains on the one before: a loop over rollouts, in a `with` block.

        A thread collects. Rollouts 0 and 1 are collected with the first weights. When the loop asks for a rollout and
        that one is complete, `publish` is called while nobody acts, and then the next rollout begins. So rollout k is
        collected with the weights after training on the first k - 1 rollouts, however long each part takes. If the
        policy draws from a generator of its own, the same seed gives the same data.

        While the block is open, the thread makes all calls of the environments. All other calls are refused, except for
        `close`, and so are `collect`, `step`, `arrays`, `current` and the other methods of this object. `env` has the
        attributes of the latest step only after the block. The end of the block, also by an exception or Ctrl-C, waits
        for the step in progress and drops the rollout in progress. The next `collect` begins with the current
        observations.

        The memory of two rollouts is kept from the first block on. If `collect` was called before, its memory is kept,
        too: three in all.

        Args:
            policy: As in `collect`. The thread calls it, so it needs a copy of the learner's network; with torch, it
                needs its own `torch.no_grad()`, which counts for one thread. `Policies` can be changed in `publish`
                only.
            publish: Copies the learner's weights into the policy; called in the caller's thread. A second block begins
                without it: call it before the block if the learner has trained since.
            rollouts: How many rollouts the loop gets; None for no end.

        Returns:
            A context manager, and in its block an iterator of `RolloutArrays`, each valid until the next one is asked
            for: see `Ahead`. The loop raises what the policy raises in the thread, and faults.

        Raises:
            ValueError: The rollout has some of its steps, but not all; or `rollouts` is out of range.
            TypeError: `policy` or `publish` cannot be called.
            AlreadyPendingCallError: A block of `ahead` is open; or at the beginning of the block, another call is in
                progress.
            MemoryError: At the beginning of the block: two rollouts need more memory than is free.

        Example:
            >>> from marl_parallel import make
            >>> env = make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, facade="stacked")
            >>> rollout, learner, actor = Rollout(env, num_steps=25), {"action": 0}, {"action": 0}
            >>> def act(current):
            ...     return np.full(current.acting.shape, actor["action"])
            >>> with rollout.ahead(act, publish=lambda: actor.update(learner), rollouts=4) as rollouts:
            ...     for data in rollouts:
            ...         learner["action"] += 1
            ...         print(rollouts.version, data.actions.min(), data.actions.max())
            0 0 0
            0 0 0
            1 1 1
            2 2 2
            >>> env.close()
        """
        self._check_not_ahead("ahead")
        function = self._function(policy)
        if not callable(publish):
            raise TypeError(f"publish must be a function, got {publish!r:.80}")
        policies = policy if isinstance(policy, Policies) else None
        most = None if rollouts is None else checked_integer(rollouts, "rollouts", 0, " or None")
        return Ahead(
            function, publish if policies is None else policies._unlocked(publish), most,
            loaded=self._loaded, hold=functools.partial(self._be_ahead, policies), collect=self._collected_ahead,
            save=self._saved_ahead, as_torch=self._as_torch, source=self.env.stepper.source,
        )  # fmt: skip

    # The thread of `Ahead` calls the following methods, and no signal interrupts them.

    def _be_ahead(self, policies: Policies | None, serve: Callable[[], None]) -> None:
        """Call a function that collects ahead, while all other uses of this object and its environments are refused."""
        self._check_not_ahead("ahead")
        self.env.stepper.batch.check_idle("ahead")
        self._check_between_rollouts("ahead")
        self._is_ahead = True
        try:
            if not self._has_reset:
                self._begin(lambda env: env.reset())
            if len(self._storage.sets) == 1:
                storage = self._allocated(2)
                self._begin_in(storage.sets[0])
                self._storage = storage
            with contextlib.nullcontext() if policies is None else policies._locked():
                self._hold_guard(serve)
        finally:
            self._is_ahead = False
            self.env.stepper.batch.drop_memory()  # if `close` has not waited for this call

    @exclusive("ahead")
    def _hold_guard(self, serve: Callable[[], None]) -> None:
        self.env.stepper.batch.check_idle("ahead")
        guarded = [part.env for part in self._parts]
        with contextlib.ExitStack() as stack:
            try:
                for part in self._parts:
                    part.env = stack.enter_context(part.env.unguarded())
                serve()
                self._drop_progress()
            finally:
                for part, env in zip(self._parts, guarded):
                    part.env = env

    def _collected_ahead(self, policy: Policy) -> tuple[RolloutArrays, list[FinishedEpisode]]:
        """Collect a rollout, in the other set of arrays if the present one is full."""
        if self._filled == self.num_steps:
            first, second = self._storage.sets
            self._begin_in(second if self._set is first else first)
        self._fill(policy)
        return self._set.arrays, self._episodes

    def _saved_ahead(self) -> list[bytes]:
        if len(self._parts) == 1:
            return self._saved(self._parts[0].env)
        with self.env.unguarded() as env:
            return self._saved(env)

    def _drop_progress(self) -> None:
        """Drop a rollout that is not full: the next one begins with the current observations."""
        for part in self._parts:
            if part.env.stepper.in_flight:
                try:
                    self._store(part, part.env.step_wait())
                except ClosedEnvironmentError:
                    return
                except Exception:  # the caller has an exception already, or has left the block
                    logger.warning("the last step of a rollout that ahead() drops has failed", exc_info=True)
        if self._filled < self.num_steps:
            self._begin_in(self._set)
            self._next = 0

    def _chosen(self, chosen: Any) -> tuple[Any, Mapping[str, Any]]:
        """The actions and the extras that a policy returned; `TypeError` if it returned another form."""
        is_pair = isinstance(chosen, tuple | list) and len(chosen) == 2 and isinstance(chosen[1], Mapping)
        names = [*self._extras]
        if names:
            if not is_pair:
                raise TypeError(
                    f"the policy must return a pair of actions and a dict of the extras {names}, got "
                    f"{described(chosen)}"
                )
            actions, extras = chosen
            return actions, extras
        if is_pair and not any(isinstance(space, spaces.Tuple) for space in self._action_spaces()):
            raise TypeError(
                "the policy returned a pair of actions and a dict, but no extras are declared: pass "
                f"extras={{...}} to the Rollout for {[*chosen[1]]}, or return the actions only"
            )
        return chosen, {}

    def _action_spaces(self) -> list[Any]:
        return [*self.env.by_group(self.env.single_action_space).values()]

    def torch(self, device: Any = "cpu", *, pin: bool = False) -> RolloutArrays:
        """The arrays as torch tensors. On the CPU they share the memory of `arrays`.

        Args:
            device: The device of the tensors.
            pin: Whether CUDA copies data while the CPU goes on, from memory that is page-locked the first time. Call
                `torch.cuda.synchronize()` before the next step is collected.
        """
        self._check_not_ahead("torch")
        return self._as_torch(self._set.arrays, device, pin)

    def _as_torch(self, arrays: RolloutArrays, device: Any, pin: bool) -> RolloutArrays:
        from marl_parallel.vector.tensors import has_cuda, page_lock, tensor

        pin = pin and has_cuda()
        if pin and not self._storage.is_pinned:
            page_lock(self._storage.block)
            self._storage.is_pinned = True
        return RolloutArrays(*tree_map(lambda array: tensor(array).to(device, non_blocking=pin), tuple(arrays)))

    def _begin_next(self) -> None:
        """After a full rollout, begin the next one where it has ended."""
        if self._filled == self.num_steps:
            self._begin_in(self._set)

    def _begin_in(self, target: _Set) -> None:
        """Begin an empty rollout in a set of arrays, with what is current."""
        carried = [(part.rows, [*map(copied, self._current_of(part))]) for part in self._parts]
        self._set = target
        self._clear()
        for rows, values in carried:
            for array, of_part in zip(_with_last_time(target.arrays), values):
                put(array, (0, rows), of_part)

    def _current_of(self, part: _Part) -> list[Any]:
        """What is current in some environments, in the order of `_with_last_time`; views."""
        return [at(array, (part.time, part.rows)) for array in _with_last_time(self._set.arrays)]

    def _clear(self) -> None:
        """Set all marks to the values of plain steps, so that plain steps need not write them."""
        arrays, self._filled, self._episodes, self._unfit = self._set.arrays, 0, [], []
        for part in self._parts:
            part.time = 0
        tree_map(lambda marks: marks.fill(True), (arrays.observed, arrays.acting, arrays.present))
        of_envs = arrays.terminated, arrays.truncated, arrays.done
        tree_map(lambda indices: indices.fill(-1), arrays.policies)
        for flags in (arrays.terminations, arrays.truncations, *of_envs, arrays.begins):
            tree_map(lambda array: array.fill(False), flags)
        for array in (*arrays.infos.values(), *arrays.informed.values()):
            tree_map(lambda values: values.fill(values.dtype.type()), array)

    def _write_to(self, part: _Part, time: int) -> None:
        """Make the next results of a part write their observations to this time step."""
        if self._in_place:
            targets = [at(of_group, (time, part.rows)) for of_group in self._set.observations]
            part.env.stepper.view.write_to(targets, self._storage.buffer)
            if self._storage.buffer is not None:
                self._storage.buffer.request(part.env_ids, self._set.first + time)

    def _store_current(self, part: _Part, observations: Grouped) -> None:
        arrays, env, index = self._set.arrays, part.env, (part.time, part.rows)
        if not self._in_place:
            put(arrays.observations, index, observations)
        if not env.plain:
            put(arrays.observed, index, env.present_next)
            put(arrays.acting, index, env.acting)
            put(arrays.begins, index, env.begins)
        if arrays.action_masks is not None:
            put(arrays.action_masks, index, env.action_masks)
        put(arrays.states, index, env.state)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _nbytes(tree: Any) -> int:
    """Bytes of memory for all arrays of a tree."""
    sizes: list[int] = []
    tree_map(lambda array: sizes.append(_aligned(array.nbytes)), tree)
    return sum(sizes)


def free_memory() -> int | None:
    """Bytes that can be allocated without swapping; None if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return None
