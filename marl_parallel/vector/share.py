"""`ShareVecEnv`: the vector environment of MAPPO (on-policy) and HARL, and drop-ins for their own classes.

Everything is an array over environments and agents, `(num_envs, agents, ...)`, with a share observation for the critic
of each agent, and action masks. Infos are lists of dicts, which are made on first access.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast, overload

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import declares_mask, flat_mask, mask_of
from marl_parallel.adapters import AgentID, attributes
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Joint, Stacked
from marl_parallel.core.block.block_transitions import OF_ONE_STEP
from marl_parallel.core.block.columns import evenly_spaced
from marl_parallel.core.block.joining import Parts, flat_box, flat_values, padded_space
from marl_parallel.core.schema import alike
from marl_parallel.core.transition import COMMON, FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.drop_in import drop_in
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.forwarding import rendered, simulators
from marl_parallel.vector.rows import agent_info, common_info, env_infos
from marl_parallel.vector.scalarize import Scalarize

BAD_TRANSITION = "bad_transition"

_NOT_REPEATED = OF_ONE_STEP | {BAD_TRANSITION, "restarted", "recycled"}
"""The keys of infos that a restart does not repeat."""

Share: TypeAlias = Literal["auto", "state", "joined"]

ShareResults: TypeAlias = tuple[
    NDArray[Any], NDArray[Any], NDArray[np.float64], NDArray[np.bool_], "ShareInfos", NDArray[Any]
]
"""Observations, share observations, rewards, dones, infos, available actions."""

PlainResults: TypeAlias = tuple[NDArray[Any], NDArray[np.float64], NDArray[np.bool_], "ShareInfos"]
"""Observations, rewards, dones, infos."""

FirstT = TypeVar("FirstT")
ResultsT = TypeVar("ResultsT")


class _OfAgents(list[dict[Any, Any]]):
    """The infos of one environment's agents, as a list, which is also read as the dict of the first agent.

    on-policy's football environment has one info for all, which its runner reads as `infos[i]["score_reward"]`.
    """

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)[index] if isinstance(index, str) else super().__getitem__(index)

    def __contains__(self, key: object) -> bool:
        return key in super().__getitem__(0) if isinstance(key, str) else super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return super().__getitem__(0).get(key, default)

    def keys(self) -> KeysView[Any]:
        return super().__getitem__(0).keys()

    def items(self) -> ItemsView[Any, Any]:
        return super().__getitem__(0).items()


class ShareInfos(Sequence[list[dict[Any, Any]]]):
    """The infos of a step: for each environment a list with one dict for each agent, made on first access.

    An agent's dict has its own infos, its environment's (`__common__`, without the text of a restart's report), and
    `"bad_transition"`. In the step that ends an episode, the first agent's dict also has `"original_obs"`,
    `"original_state"` and `"original_avail_actions"`, for all agents. In a restart, missing keys have the values of the
    step before, or zeros in the first step of an episode: trainers read the simulator's counters at the end of each
    episode.
    """

    def __init__(
        self,
        infos: Mapping[int, Mapping[Any, Any]],
        agents: Sequence[AgentID],
        num_envs: int,
        bad: NDArray[np.bool_] | None,
        originals: Mapping[int, Callable[[], dict[str, Any]]],
        before: Mapping[int, Mapping[Any, Any]],
    ) -> None:
        self._infos, self._agents, self._bad, self._originals = infos, agents, bad, originals
        self._before = before  # of restarted environments, the infos of the step before
        self._made: list[list[dict[Any, Any]] | None] = [None] * num_envs

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> list[dict[Any, Any]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[dict[Any, Any]]]: ...
    def __getitem__(self, index: int | slice) -> list[dict[Any, Any]] | list[list[dict[Any, Any]]]:
        if isinstance(index, slice):
            return [self[env_id] for env_id in range(*index.indices(len(self)))]
        env_id = operator.index(index)
        if env_id < 0:
            env_id += len(self)
        if not 0 <= env_id < len(self):
            raise IndexError(f"there are no infos of environment {index}: there are {len(self)} environments")
        made = self._made[env_id]
        if made is None:
            made = self._made[env_id] = self._of_agents(env_id)
        return made

    def __reduce__(self) -> Any:
        return list, ([*self],)

    def __repr__(self) -> str:
        return repr([*self])

    def _of_agents(self, env_id: int) -> list[dict[Any, Any]]:
        infos = self._infos.get(env_id)
        bad = [False] * len(self._agents) if self._bad is None else self._bad[env_id].tolist()
        if infos is None:
            rows: list[dict[Any, Any]] = [{BAD_TRANSITION: flag} for flag in bad]
        else:
            rows = [{BAD_TRANSITION: flag, **row} for flag, row in zip(bad, self._flat(env_id, infos))]
            for row in rows:
                row.pop(FINAL_OBS, None)
            if env_id in self._before:
                for row, known in zip(rows, self._flat(env_id, self._before[env_id])):
                    for key, value in known.items():
                        if key not in _NOT_REPEATED:
                            row.setdefault(key, value)
        if env_id in self._originals:
            rows[0].update(self._originals[env_id]())
        return _OfAgents(rows)

    def _flat(self, env_id: int, infos: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """For each agent, its own infos and its environment's."""
        of_env = env_infos(infos, self._agents)
        if isinstance(of_env.get(COMMON), Mapping):
            of_env.update(common_info(of_env.pop(COMMON)))
        return [{**of_env, **agent_info(env_id, infos, agent)} for agent in self._agents]


def _blank(value: Any) -> Any:
    """The same value with zeros and False in place of numbers and flags, also in arrays."""
    if isinstance(value, Mapping):
        return {key: _blank(one) for key, one in value.items()}
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return type(value)(0)
    return np.zeros_like(value) if isinstance(value, np.ndarray) and value.dtype != object else value


class _Observed:
    """The observations of a group of agents as one array: a `Box`, or the Boxes of a `Dict` without its action mask.

    Attributes:
        space: The space of one agent's array.
    """

    def __init__(self, facade: str, agent: AgentID, space: Space[Any]) -> None:
        self._keys: list[str] | None = None
        boxes: list[Any] = [space]
        if isinstance(space, spaces.Dict):
            self._keys = [key for key in space.spaces if key != ACTION_MASK]
            boxes = [space.spaces[key] for key in self._keys]
        if not boxes or not all(isinstance(box, spaces.Box) for box in boxes):
            raise ValueError(
                f"{facade} takes observations that are arrays, but the observation space of agent {agent!r} is "
                f"{space}: wrap the environment so that it is a Box, or a Dict of Boxes and an action_mask"
            )
        if len(boxes) == 1:
            box = boxes[0]
            self.space = box if box.shape else spaces.Box(box.low.reshape(1), box.high.reshape(1), (1,), box.dtype)
        else:
            self.space = flat_box(boxes)

    def __call__(self, observations: Any) -> NDArray[Any]:
        """Stacked observations `(n, agents, ...)`, in the form of the group's space, as one array."""
        arrays = [observations] if self._keys is None else [observations[key] for key in self._keys]
        if len(arrays) > 1:
            return flat_values(arrays, 2)
        only: NDArray[Any] = arrays[0]
        return only[..., None] if only.ndim == 2 else only


class _Acted:
    """The actions of agents with equal action spaces.

    Attributes:
        agents: The agents.
        positions: Their positions among all agents.
        space: Their action space; a `Discrete` space begins at 0.

    With `any_space`, `stacked` may raise `ValueError` for all actions of a space of another kind.
    """

    def __init__(
        self, facade: str, agents: tuple[AgentID, ...], positions: list[int], space: Space[Any], *, any_space: bool
    ) -> None:
        self.agents, self.positions, self.declared = agents, positions, space
        self._columns = evenly_spaced(positions) or positions
        self._facade = facade
        self.space: Space[Any] = space
        self.sizes: list[int] = []  # of the choices of each part
        if isinstance(space, spaces.Discrete):
            self.space, self.sizes = spaces.Discrete(int(space.n)), [int(space.n)]
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self.sizes = [*map(int, space.nvec)]
        elif not any_space and not isinstance(space, spaces.Box | spaces.MultiBinary):
            raise ValueError(
                f"{facade} takes Discrete, MultiDiscrete with one axis, MultiBinary and Box actions; the action space "
                f"of agent {agents[0]!r} is {space}: wrap the environment"
            )

    def stacked(self, actions: Any, acting: NDArray[np.bool_]) -> Stacked:
        """Pick their actions, from `(num_envs, agents, d)` or lists of lists of arrays, for a `FacadeStepper`."""
        whole = len(self.positions) == acting.shape[1]
        if type(actions) is np.ndarray and not actions.dtype.hasobject:
            acted = actions if whole else actions[:, self._columns]
        else:
            try:
                acted = np.array([[np.asarray(of_env[position]) for position in self.positions] for of_env in actions])
            except (TypeError, ValueError, IndexError):
                raise ValueError(
                    f"{self._facade}: the actions of agents {[*self.agents]} do not have one shape in all environments"
                ) from None
        acting = acting if whole else acting[:, self._columns]
        return Stacked(self.agents, self._of_choices(acted, acting) if self.sizes else self._of_arrays(acted))

    def _wrong(self, got: NDArray[Any], expected: str) -> ValueError:
        return ValueError(
            f"{self._facade}: the actions of agents {[*self.agents]} must be {expected} for {self.declared}; got shape "
            f"{got.shape}"
        )

    def _of_arrays(self, acted: NDArray[Any]) -> NDArray[Any]:
        shape = self.declared.shape or ()
        size = int(np.prod(shape, dtype=int))
        if acted.shape[2:] == shape:
            return acted
        if acted.ndim != 3 or acted.shape[2] < size:
            raise self._wrong(acted, f"(num_envs, agents, {size})")
        return acted[:, :, :size].reshape(*acted.shape[:2], *shape)

    def _of_choices(self, acted: NDArray[Any], acting: NDArray[np.bool_]) -> NDArray[Any]:
        """Indices of choices, from indices or from one-hot vectors, one after the other."""
        parts, discrete = len(self.sizes), isinstance(self.declared, spaces.Discrete)
        if acted.ndim == 2 and discrete:
            acted = acted[..., None]
        if acted.ndim != 3 or acted.dtype.kind not in "biuf":
            raise self._wrong(acted, f"numbers (num_envs, agents, {parts}) or one-hot vectors ({sum(self.sizes)})")
        if acted.shape[2] == parts:
            indices = self._checked(acted, acting)
        elif acted.shape[2] >= sum(self.sizes):
            indices = self._of_one_hot(acted, acting)
        else:
            raise self._wrong(acted, f"indices (num_envs, agents, {parts}) or one-hot vectors ({sum(self.sizes)})")
        start = cast(spaces.Discrete | spaces.MultiDiscrete, self.declared).start
        indices = indices + start if np.any(start) else indices
        return indices[..., 0] if discrete else indices

    def _checked(self, acted: NDArray[Any], acting: NDArray[np.bool_]) -> NDArray[Any]:
        """Indices as whole numbers; `ValueError` if the index of an agent that acts is not a choice."""
        indices = acted
        if acted.dtype.kind not in "iu":
            with np.errstate(invalid="ignore"):
                indices = acted.astype(np.int64)
        wrong = (indices < 0) | (indices >= self.sizes)
        if indices is not acted:
            wrong |= indices != acted
        if wrong.any() and (wrong := wrong.any(axis=2) & acting).any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"environment {row}: the action of agent {self.agents[column]!r} is {acted[row, column].tolist()}; "
                f"expected the index of a choice of {self.declared}, from 0"
            )
        return indices

    def _of_one_hot(self, acted: NDArray[Any], acting: NDArray[np.bool_]) -> NDArray[np.int64]:
        indices, start = np.empty((*acted.shape[:2], len(self.sizes)), np.int64), 0
        for part, size in enumerate(self.sizes):
            one_hot = acted[:, :, start : start + size]
            indices[..., part] = one_hot.argmax(axis=2)
            wrong = ((np.count_nonzero(one_hot, axis=2) != 1) | (one_hot.max(axis=2) != 1)) & acting
            if wrong.any():
                row, column = np.argwhere(wrong)[0].tolist()
                raise ValueError(
                    f"environment {row}: the action of agent {self.agents[column]!r} must be an index or a one-hot "
                    f"vector for {self.declared}; got {acted[row, column].tolist()}"
                )
            start += size
        return indices


def _joiner(
    positions: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]], *, pad: bool
) -> Callable[[Sequence[NDArray[Any]]], NDArray[Any]]:
    """What joins arrays of parts of the agents: padded, or as objects where the shapes of values differ."""
    parts = Parts(positions)
    return parts.padded if pad or len({*shapes}) == 1 else parts.objects


def _lengths(actions: Any) -> tuple[int, ...]:
    """The number of environments in nested sequences, and the different numbers of agents."""
    if not isinstance(actions, Sized):
        return ()
    parts = [*actions] if isinstance(actions, Iterable) else []
    return len(actions), *dict.fromkeys(len(part) if isinstance(part, Sized) else 0 for part in parts)


def _together(actions: Any) -> tuple[Any, bool]:
    """Actions of all environments, as one array if possible; and whether each environment has a list of its rows."""
    if isinstance(actions, np.ndarray):
        return actions, False
    actions = [np.asarray(one) if hasattr(one, "__array__") else one for one in actions]  # tensors, too
    if stacking.are_equal_arrays(actions):
        return np.stack(actions), False
    if all(type(of_env) is list for of_env in actions) and stacking.are_equal_arrays([*itertools.chain(*actions)]):
        return np.array(actions), True
    return actions, False


class _VecEnv(ArrayFacade[Any, ResultsT, FirstT]):
    """Base of `ShareVecEnv`, and of the drop-ins whose `step` returns four values."""

    _has_share: ClassVar[bool]

    def __init__(
        self, env: ParallelEnv, *, share: Share = "auto", pad: bool = False, scalarize: Scalarize | None = None
    ) -> None:
        if share not in ("auto", "state", "joined"):
            raise ValueError(f'share must be "auto", "state" or "joined", got {share!r}')
        super().__init__(env, AutoresetMode.SAME_STEP, scalarize=scalarize)
        name, stepper, view = type(self).__name__, self._stepper, self._stepper.view
        schema = stepper.schema
        view.wants_info_arrays, view.writes_all = True, schema.all_may_act
        self.agents, self.n_agents = [*view.agents], len(view.agents)
        self._observed = [_Observed(name, view.agents[positions[0]], space) for space, positions in view.groups]
        shapes = [observed.space.shape for observed in self._observed]
        of_groups = [positions for _, positions in view.groups]
        if pad and len({*map(len, shapes)}) > 1:
            raise ValueError(f"{name}: pad=True needs observations with equal numbers of axes, got shapes {shapes}")
        self._join = _joiner(of_groups, shapes, pad=pad)
        by_space = alike(schema.action_spaces, view.agents)
        # The simulators of these projects get what the trainer sends, as from the projects' own workers.
        self._hands_on = schema.joint_actions == "mappo" and not (pad and len(by_space) > 1)
        self._acted = [
            _Acted(
                name, tuple(view.agents[position] for position in positions), positions, space, any_space=self._hands_on
            )
            for space, positions in by_space
        ]
        self._has_masks = all(isinstance(acted.declared, spaces.Discrete) for acted in self._acted)
        sizes = [(sum(acted.sizes),) for acted in self._acted]
        self._join_masks = _joiner([acted.positions for acted in self._acted], sizes, pad=pad)
        self._has_state = self._has_share and share != "joined" and (share == "state" or schema.state_space is not None)
        self._is_per_agent = False
        if self._has_state:
            self._write_states(name)
        self._set_spaces(pad=pad)
        declared_masks = schema.mask_spaces or any(
            declares_mask(schema.observation_spaces[agent], schema.action_spaces[agent]) for agent in self.agents
        )
        self._all_choices: NDArray[Any] | None = None  # of a step without infos, unless masks come in another way
        if self._has_masks and not declared_masks:
            with_sizes = zip(self._acted, sizes)
            free = [np.ones((self.num_envs, len(acted.agents), *size), np.bool_) for acted, size in with_sizes]
            every = self._choices(free)
            self._all_choices = None if every.dtype.hasobject else every
        self._keeps_masks = stepper.restarts and self._has_share  # for the next step, which may be a restart
        self._latest_infos: Mapping[int, Mapping[Any, Any]] = {}  # where restarts are possible
        self._at_begin = set(self._stepper.env_ids)  # the environments whose episode has had no step yet
        self._last_masks: NDArray[Any] | None = None

    def _write_states(self, name: str) -> None:
        space = self._stepper.schema.state_space
        if space is not None and not isinstance(space, spaces.Box):
            raise ValueError(
                f'{name} takes states that are arrays, but state_space is {space}; pass share="joined" to join '
                "observations in place of states"
            )
        try:
            self._stepper.batch.write_states()
        except NotImplementedError as error:
            raise NotImplementedError(f'{error}; or pass share="joined" to join observations') from None
        self._is_per_agent = self._stepper.schema.state_per_agent

    def _set_spaces(self, *, pad: bool) -> None:
        """Set the lists of spaces: the simulator's own if it has any, since its trainer may read more of these."""
        schema = self._stepper.schema
        by_group = zip(self._stepper.view.groups, self._observed)
        observed = {position: one.space for (_, positions), one in by_group for position in positions}
        acted = {position: one.space for one in self._acted for position in one.positions}
        agents = range(self.n_agents)
        joined = flat_box([observed[position] for position in agents])
        if pad:
            try:
                observed = dict.fromkeys(agents, padded_space([observed[position] for position in agents]))
                acted = dict.fromkeys(agents, padded_space([acted[position] for position in agents]))
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}: pad=True is impossible: {error}") from None
        state: Any = schema.state_space if self._has_state else joined
        if self._is_per_agent:
            state = spaces.Box(state.low[0], state.high[0], state.shape[1:], state.dtype)
        elif not state.shape:
            state = spaces.Box(state.low.reshape(1), state.high.reshape(1), (1,), state.dtype)
        self.observation_space: list[Any] = [observed[position] for position in agents]
        self.share_observation_space: list[Any] = [state] * self.n_agents
        self.action_space: list[Any] = [acted[position] for position in agents]
        declared = None if pad else self._own_spaces()
        if declared is not None:
            self.observation_space, share, self.action_space = declared
            is_padded = len({getattr(space, "shape", None) for space in share}) > 1
            if not is_padded and self._has_state >= self._has_share:
                self.share_observation_space = share

    def _own_spaces(self) -> tuple[list[Any], list[Any], list[Any]] | None:
        """The lists of spaces that the simulator itself has; None if it has none."""
        try:
            share = self.env.call("share_observation_space", env_ids=[0])[0]
        except AttributeError:
            return None
        shared = attributes.listed(share)
        if len(shared) != self.n_agents:
            return None  # in other simulators, the next two may be methods that take an agent
        observed, acted = (
            attributes.listed(self.env.call(name, env_ids=[0])[0]) for name in ("observation_space", "action_space")
        )
        return (observed, shared, acted) if len(observed) == len(acted) == self.n_agents else None

    # -- resets and steps ------------------------------------------------------------------------------------------

    def _own_state(self, env_id: int) -> Any:
        infos = self._latest_infos.get(env_id)
        return env_id in self._at_begin, None if infos is None else {**infos}

    def _begin_episodes(self, env_ids: Sequence[int] | None) -> None:
        self._at_begin = self._at_begin.union(self._stepper.env_ids if env_ids is None else env_ids)

    def _set_own_states(self, states: Mapping[int, Any]) -> None:
        latest_infos = {env_id: infos for env_id, infos in self._latest_infos.items() if env_id not in states}
        self._at_begin = self._at_begin | {*states}
        for env_id, known in states.items():
            if known is None:
                continue
            is_at_begin, infos = known[-2:]
            if not is_at_begin:
                self._at_begin.discard(env_id)
            if infos is not None:
                latest_infos[env_id] = infos
        self._latest_infos = latest_infos

    def _actions(self, actions: Any) -> list[Stacked] | Joint:
        expected = self.num_envs, self.n_agents
        if not isinstance(actions, np.ndarray | list | tuple) and hasattr(actions, "__array__"):
            actions = np.asarray(actions)
        if isinstance(actions, np.ndarray):
            got: tuple[int, ...] = actions.shape[:2]
        else:
            got = _lengths(actions)
        if got != expected:
            shape = actions.shape if isinstance(actions, np.ndarray) else got or type(actions).__name__
            which = ""
            if not isinstance(actions, np.ndarray) and got[:1] == expected[:1]:
                sizes = [len(of_env) if isinstance(of_env, Sized) else 0 for of_env in actions]
                env_id = next(env_id for env_id, size in enumerate(sizes) if size != self.n_agents)
                which = f": environment {env_id} has {sizes[env_id]} actions for {self.n_agents} agents"
            raise ValueError(
                f"{type(self).__name__} takes actions (num_envs, agents, ...), which begin with {expected}; got "
                f"{shape}{which}"
            )
        by_agent = functools.partial(self._by_agent, actions)
        if not self._hands_on:
            return by_agent()
        values, lists = _together(actions)
        return Joint(values, by_agent, lists)

    def _by_agent(self, actions: Any) -> list[Stacked]:
        """Actions in the form of the agents' spaces."""
        latest, expected = self._stepper.latest, (self.num_envs, self.n_agents)
        everyone = latest is None or self._stepper.view.writes_all
        acting = np.ones(expected, np.bool_) if everyone else cast(Arrays, latest).acting
        return [acted.stacked(actions, acting) for acted in self._acted]

    def _dones(self, arrays: Arrays) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None, list[int]]:
        """The agents that are done; those truncated, or None if no episode has ended; the environments that ended."""
        if arrays.plain:
            return arrays.terminations, None, []
        over = arrays.terminated | arrays.truncated
        ended, bad = np.flatnonzero(over).tolist(), None
        if ended:
            own = arrays.ended & (arrays.terminations | arrays.truncations)
            of_env = (arrays.truncated & ~arrays.terminated)[:, None]
            bad = over[:, None] & np.where(own, arrays.truncations & ~arrays.terminations, of_env)
        dones = ~arrays.alive | arrays.ended | over[:, None]
        # If all agents were done, trainers would take the episode for over.
        dones[dones.all(axis=1) & ~over] = False
        return dones, bad, ended

    def _observations(self, observations: Sequence[Any]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """The observations of all agents as one array, and of each group as an array."""
        groups = [observed(of_group) for observed, of_group in zip(self._observed, observations)]
        return self._join(groups), groups

    def _joined(self, groups: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The observations of all agents one after the other, `(n, size)`."""
        if len(groups) == 1:
            whole: NDArray[Any] = groups[0].reshape(len(groups[0]), -1)
            return whole
        group_rows = self._stepper.view.group_rows
        columns = [groups[group][:, row] for group, row in (group_rows[agent] for agent in self.agents)]
        return flat_values(columns)

    def _for_all(self, states: NDArray[Any]) -> NDArray[Any]:
        """One state for each environment as a new array of share observations."""
        if self._is_per_agent:
            return np.array(states)
        columns = states.reshape(len(states), 1, *(states.shape[1:] or (1,)))
        return np.repeat(columns, self.n_agents, axis=1)

    def _share(self, groups: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if not self._has_state:
            return self._for_all(self._joined(groups))
        return self._for_all(self._stepper.batch.states_seen()[0])

    def _available(self, arrays: Arrays) -> NDArray[Any]:
        if not self._has_masks:
            return np.full(self.num_envs, None, object)
        if arrays.plain and self._all_choices is not None:
            masks: NDArray[Any] = self._all_choices.copy()
        else:
            masks = self._choices([self._stepper.action_masks(acted.agents) for acted in self._acted])
        self._last_masks = masks.copy() if self._keeps_masks else None
        return masks

    def _choices(self, masks: Sequence[NDArray[np.bool_]]) -> NDArray[Any]:
        """Masks as integers; where nothing is allowed, everything is: these trainers need a choice to draw from."""
        drawable = [np.asarray(mask | ~mask.any(axis=2, keepdims=True), np.int64) for mask in masks]
        return self._join_masks(drawable)

    # -- the ends of episodes --------------------------------------------------------------------------------------

    def _originals(self, arrays: Arrays, ended: Sequence[int]) -> dict[int, Callable[[], dict[str, Any]]]:
        """For each environment whose episode has ended, a function that makes the `original_...` entries of infos."""
        states = self._stepper.batch.states_seen()[1][ended] if self._has_state and ended else None
        finals, last_masks = arrays.final_observations, self._last_masks

        def original(row: int, env_id: int) -> dict[str, Any]:
            infos = arrays.infos.get(env_id, {})
            observations, groups = self._observations([stacking.row(of_group, env_id) for of_group in finals])
            entries: dict[str, Any] = {"original_obs": observations[0]}
            if not self._has_share:
                return entries
            state = self._joined(groups) if states is None else states[row : row + 1]
            entries["original_state"] = self._for_all(state)[0]
            if not self._has_masks:
                entries["original_avail_actions"] = None
                return entries
            final = [self._final_masks(infos, acted) for acted in self._acted]
            if last_masks is not None and arrays.restarted[env_id] and not any(known for _, known in final):
                entries["original_avail_actions"] = last_masks[env_id].copy()  # the step was interrupted
            else:
                entries["original_avail_actions"] = self._choices([masks for masks, _ in final])[0]
            return entries

        return {env_id: functools.partial(original, row, env_id) for row, env_id in enumerate(ended)}

    def _final_masks(self, infos: Mapping[Any, Any], acted: _Acted) -> tuple[NDArray[np.bool_], bool]:
        """The last masks of an episode, and whether any agent has one."""
        known = False
        masks = np.ones((1, len(acted.agents), sum(acted.sizes)), np.bool_)
        for column, agent in enumerate(acted.agents):
            info = infos.get(agent)
            if isinstance(info, Mapping):
                space = cast(spaces.Discrete, acted.declared)
                mask = flat_mask(space, mask_of(info.get(FINAL_OBS), info))
                if mask is not None:
                    masks[0, column], known = mask, True
        return masks, known

    def _infos(self, arrays: Arrays, bad: NDArray[np.bool_] | None, ended: Sequence[int]) -> ShareInfos:
        originals = self._originals(arrays, ended) if ended else {}
        before = self._before_restarts(arrays, ended) if self._stepper.restarts else {}
        return ShareInfos(arrays.infos, self.agents, self.num_envs, bad, originals, before)

    def _before_restarts(self, arrays: Arrays, ended: Sequence[int]) -> dict[int, Mapping[Any, Any]]:
        """The infos of the step before, of the environments that have been restarted; saves the infos of this step.

        In the first step of an episode, they are blank: trainers have already counted the episode before.
        """
        restarted = np.flatnonzero(arrays.restarted).tolist()
        # The infos of a restart are not kept: the next step may be a restart, too.
        without = {env_id: infos for env_id, infos in arrays.infos.items() if env_id not in restarted}
        before, any_infos = {}, [*without.values(), *self._latest_infos.values()]
        for env_id in restarted:
            known = self._latest_infos.get(env_id)
            if env_id in self._at_begin:
                known = known or next(filter(None, any_infos), None)  # all have the same keys
                known = None if known is None else _blank(known)
            if known is not None:
                before[env_id] = known
        self._latest_infos, self._at_begin = {**without, **before} if restarted else arrays.infos, {*ended}
        return before

    # -- everything else -------------------------------------------------------------------------------------------

    def render(self, mode: str | None = None) -> Any:
        """The frames of all environments, `(num_envs, ...)`; None if the simulators show them themselves, or have none.

        `mode` is for the `render(mode)` of simulators without a `render_mode`; None for its default. The others ignore
        it.
        """
        frames = rendered(self.env, mode)
        if all(frame is None for frame in frames):
            return None
        return np.stack([np.asarray(frame) for frame in frames])

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._stepper.source.closed


class ShareVecEnv(_VecEnv[ShareResults, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]):
    """A `ParallelEnv` as the vector environment of MAPPO (on-policy) and HARL, with k agents.

    `step` returns six values: observations `(num_envs, k, d)`, share observations `(num_envs, k, s)`, rewards
    `(num_envs, k, 1)`, dones `(num_envs, k)`, infos and available actions `(num_envs, k, n)`. Share observations
    are the simulator's `state()`, one for all agents or one for each, or the observations of all agents, one after the
    other.

    An agent that has died is done until the episode ends, so that `np.all(dones, axis=1)` marks the ends of episodes.
    The observations are then the next episode's. Infos are a sequence of lists of dicts, `infos[i][j]`, made on first
    access. Each dict has `"bad_transition"`, True where an episode ends by truncation, also by a restart. At an end,
    `infos[i][0]` has `"original_obs"`, `"original_state"` and `"original_avail_actions"` of all agents.

    Available actions are int64, 1 = allowed, if all action spaces are `Discrete`; else an array `(num_envs,)` of None.
    All are 1 where the simulator reports no mask, or allows nothing.

    Simulators with lists of spaces, as these projects have, get `actions[i]` as it is. Other simulators get elements of
    their spaces; `Discrete` actions are indices or one-hot vectors.

    Agents may have different spaces. Then observations, and available actions if their number differs, are arrays
    `(num_envs, k)` of objects, as on-policy's separated runners index them; HARL needs `pad=True`.

    Args:
        env: With `auto_reset=True`. No other facade may step it. With `copy=False`, observations, also those in infos,
            are valid until the next step.
        share: `"state"`: share observations are the simulator's states. `"joined"`: they are the observations of all
            agents, one after the other. `"auto"`: `"state"` if the simulators have a common one; environments with
            different agents often have none, see `docs/agents.md`.
        pad: Whether observations and actions of different sizes are padded with zeros, and with actions that are not
            available. The lists of spaces have the padded ones.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        num_envs: The number of environments.
        n_agents: The number of agents.
        agents: The agents, in the order of arrays.
        observation_space, share_observation_space, action_space: Lists with a space for each agent; the simulator's own
            lists, if it has any.

    Raises:
        TypeError, ValueError: As `FacadeStepper`; or a space is of another kind, or cannot be padded.
        NotImplementedError: `share="state"` without a state.

    Example:
        >>> from marl_parallel import make
        >>> env = make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, facade="share")
        >>> obs, share_obs, available_actions = env.reset()
        >>> for _ in range(25):
        ...     actions = np.zeros((4, 3, 1), np.int64)
        ...     obs, share_obs, rewards, dones, infos, available_actions = env.step(actions)
        >>> obs.shape, share_obs.shape, rewards.shape, available_actions.shape
        ((4, 3, 18), (4, 3, 54), (4, 3, 1), (4, 3, 5))
        >>> np.all(dones, axis=1).tolist(), infos[0][0]["bad_transition"], infos[0][0]["original_obs"].shape
        ([True, True, True, True], True, (3, 18))
        >>> env.close()
    """

    _has_share = True
    saved_as = "ShareVecEnv"

    def __init__(
        self, env: ParallelEnv, *, share: Share = "auto", pad: bool = False, scalarize: Scalarize | None = None
    ) -> None:
        super().__init__(env, share=share, pad=pad, scalarize=scalarize)

    def _first(self, arrays: Arrays) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Observations, share observations and available actions."""
        observations, groups = self._observations(arrays.observations)
        return observations, self._share(groups), self._available(arrays)

    def _results(self, arrays: Arrays) -> ShareResults:
        dones, bad, ended = self._dones(arrays)
        infos = self._infos(arrays, bad, ended)  # before the states and masks of the old episodes are replaced
        observations, groups = self._observations(arrays.observations)
        return observations, self._share(groups), arrays.rewards[..., None], dones, infos, self._available(arrays)


class ShareSubprocVecEnv(ShareVecEnv):
    """A drop-in for `ShareSubprocVecEnv` of on-policy and HARL; only the import changes.

    The environments keep the seeds that their constructors give them (`seed="own"`), and generators of their own
    (`isolate_rng=True`), as in a process of their own. They share worker processes, at most one for each CPU.

    Args:
        env_fns: A constructor for each environment, called in its worker.
        spaces: Not used, as in the original.
        share: As in `ShareVecEnv`.
        pad: As in `ShareVecEnv`.
        scalarize: As in `ShareVecEnv`.
        options: Other arguments of `ParallelEnv`, such as `on_error="restart"` or `step_timeout=60.0`.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> envs = ShareSubprocVecEnv([simple_spread_v3.parallel_env] * 2, on_error="restart")
        >>> obs, share_obs, available_actions = envs.reset()
        >>> obs.shape, envs.n_agents
        ((2, 3, 18), 3)
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[..., Any]],
        spaces: Any = None,
        *,
        share: Share = "auto",
        pad: bool = False,
        scalarize: Scalarize | None = None,
        **options: Any,
    ) -> None:
        build = functools.partial(super().__init__, share=share, pad=pad, scalarize=scalarize)
        drop_in(type(self).__name__, env_fns, options, build, defaults=_IN_PROCESSES)


class ShareDummyVecEnv(ShareVecEnv):
    """A drop-in for `ShareDummyVecEnv` of on-policy and HARL, which steps environments in this process.

    Arguments are as in `ShareSubprocVecEnv`, without `spaces`. `on_error="restart"` restarts environments after
    exceptions, but a crash ends this program.

    Attributes:
        envs: The simulators, as `env_fns` have returned them. A restart replaces them.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> envs = ShareDummyVecEnv([simple_spread_v3.parallel_env])
        >>> [array.shape for array in envs.reset()]
        [(1, 3, 18), (1, 3, 54), (1, 3, 5)]
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[..., Any]],
        *,
        share: Share = "auto",
        pad: bool = False,
        scalarize: Scalarize | None = None,
        **options: Any,
    ) -> None:
        build = functools.partial(super().__init__, share=share, pad=pad, scalarize=scalarize)
        drop_in(type(self).__name__, env_fns, options, build, defaults=_IN_THIS_PROCESS)

    @property
    def envs(self) -> list[Any]:
        return simulators(self)


class SubprocVecEnv(_VecEnv[PlainResults, NDArray[Any]]):
    """A drop-in for on-policy's `SubprocVecEnv`, whose `step` returns four values; only the import changes.

    Like `ShareSubprocVecEnv`, without share observations and available actions: `reset` returns observations; `step`
    returns observations, rewards, dones and infos. Simulators with lists of spaces get the actions as they are sent.

    Args:
        env_fns: A constructor for each environment, called in its worker.
        spaces: Not used, as in the original.
        pad: As in `ShareVecEnv`.
        scalarize: As in `ShareVecEnv`.
        options: Other arguments of `ParallelEnv`, such as `on_error="restart"`.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> envs = SubprocVecEnv([simple_spread_v3.parallel_env] * 2)
        >>> envs.reset().shape
        (2, 3, 18)
        >>> obs, rewards, dones, infos = envs.step(np.eye(5)[[[0, 1, 2], [3, 4, 0]]])
        >>> rewards.shape, dones.shape, len(infos[1])
        ((2, 3, 1), (2, 3), 3)
        >>> envs.close()
    """

    _has_share = False
    saved_as = "SubprocVecEnv"

    def __init__(
        self,
        env_fns: Sequence[Callable[..., Any]],
        spaces: Any = None,
        *,
        pad: bool = False,
        scalarize: Scalarize | None = None,
        **options: Any,
    ) -> None:
        build = functools.partial(super().__init__, pad=pad, scalarize=scalarize)
        drop_in(type(self).__name__, env_fns, options, build, defaults=_IN_PROCESSES)

    def _first(self, arrays: Arrays) -> NDArray[Any]:
        """Observations."""
        return self._observations(arrays.observations)[0]

    def _results(self, arrays: Arrays) -> PlainResults:
        dones, bad, ended = self._dones(arrays)
        observations, _ = self._observations(arrays.observations)
        return observations, arrays.rewards[..., None], dones, self._infos(arrays, bad, ended)


class DummyVecEnv(SubprocVecEnv):
    """A drop-in for on-policy's `DummyVecEnv`: a `SubprocVecEnv` that steps environments in this process.

    Attributes:
        envs: The simulators, as `env_fns` have returned them. A restart replaces them.
    """

    def __init__(self, env_fns: Sequence[Callable[..., Any]], **options: Any) -> None:
        super().__init__(env_fns, **{**_IN_THIS_PROCESS, **options})

    @property
    def envs(self) -> list[Any]:
        return simulators(self)


_IN_PROCESSES: Mapping[str, Any] = {"seed": "own", "isolate_rng": True}
_IN_THIS_PROCESS: Mapping[str, Any] = {"seed": "own", "backend": "serial", "isolate_rng": False}
