"""`StackedVecEnv`: arrays over environments and agents, `(num_envs, num_agents, ...)`, for learners."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked
from marl_parallel.core.block.columns import evenly_spaced
from marl_parallel.core.block.joining import Parts, agents_alike, groups_by_space, padded_space
from marl_parallel.core.spaces import Mismatch, check_form, tree_map
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import AgentRows, inherited_flags
from marl_parallel.vector.scalarize import Scalarize

if TYPE_CHECKING:
    from marl_parallel.vector.tensors import StackedTensors

Grouped: TypeAlias = Any
"""The value of the only group; with several groups, a dict of values by group name."""

Infos: TypeAlias = Any
"""Infos by env id, only of environments that have any; with `infos="list"`, a list with a dict per environment."""

StepReturn = tuple[Grouped, Grouped, Grouped, Grouped, Infos]


class _Group(NamedTuple):
    """Agents whose values are stacked; agents with different spaces are several parts, which are padded."""

    columns: Any  # of the group's agents, among all agents: a slice or a list; None if these are all of them
    rows: list[AgentRows]  # of each part
    parts: Parts
    space: Space[Any]
    action_space: Space[Any]

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """The group's columns of an array `(num_envs, possible agents, ...)`."""
        return array if self.columns is None else array[:, self.columns]

    def observations(self, observations: Sequence[Any]) -> Any:
        values = [rows.observations(observations) for rows in self.rows]
        if len(values) == 1:
            return values[0]

        def joined(leaf: Space[Any], *arrays: NDArray[Any]) -> NDArray[Any]:
            return self.parts.padded(arrays, stacking.zeros(leaf, (len(arrays[0]), self.parts.size)))

        return tree_map(joined, self.space, *values)

    def padding(self) -> Any:
        """Which entries of observations are not padding: bool `(agents of the group, ...)`."""
        values = [stacking.zeros(rows.space, (1, len(rows.agents))) for rows in self.rows]

        def joined(*arrays: NDArray[Any]) -> NDArray[Any]:
            whole: NDArray[Any] = self.parts.padded([np.ones(array.shape, np.bool_) for array in arrays])[0]
            return whole

        return tree_map(joined, *values)

    def rewards(self, arrays: Arrays) -> NDArray[Any]:
        rows = self.rows[0]
        return self.of(arrays.rewards) if rows.reward_space is None else rows.rewards(arrays)

    def divided(self, actions: Any, env_ids: Sequence[int], acting: NDArray[np.bool_]) -> list[Stacked]:
        """The actions of each part, without padding; `Mismatch` if actions have another form or choose padding.

        `acting` is `(num_envs, agents of the group)`: the agents whose actions count.
        """

        def own(part: int, leaf: Space[Any], values: Any) -> Any:
            array, size = np.asarray(values), self.parts.size
            if array.shape[:2] != (len(env_ids), size):
                raise Mismatch(f"expected shape {(len(env_ids), size, *(leaf.shape or ()))}, got {array.shape}")
            if len(self.rows) == 1:
                return array
            array = self.parts.unpadded(part, array, leaf.shape or ())
            if isinstance(leaf, spaces.Discrete):
                outside = (array >= leaf.start + leaf.n) & acting[:, self.parts.columns[part]]
                for row, column in np.argwhere(outside)[:1].tolist():
                    raise Mismatch(
                        f"environment {env_ids[row]}: the action of agent {self.rows[part].agents[column]!r} is "
                        f"{array[row, column]}, which is padding: its space is {leaf}; see action_masks"
                    )
            return array

        return [
            Stacked(rows.agents, tree_map(functools.partial(own, part), rows.action_space, actions, form=check_form))
            for part, rows in enumerate(self.rows)
        ]

    def masks(self, masks_of: Callable[[Sequence[AgentID]], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        return self.parts.padded([masks_of(rows.agents) for rows in self.rows])


class StackedVecEnv(ArrayFacade[Grouped, StepReturn, tuple[Grouped, Infos]]):
    """Many environments as one, with arrays `(num_envs, num_agents, ...)` in place of dicts by agent.

    Agents with equal spaces are one group. If there is one group, every value below is an array, or a tree of arrays if
    the space is a `Dict` or `Tuple`. If there are several, it is a dict with one such value for each group, by its
    name. With k agents in a group, arrays have the shape `(num_envs, k, ...)`.

    Every auto-reset mode has the same attributes. In the step that ends an episode, `final_observations` and
    `final_state` are the last ones of that episode. With `auto_reset=True`, `observations` and `state` are then the
    first ones of the next episode.

    Args:
        env: No other facade may step it. With `copy=False`, observations are valid until the next reset or step.
        group_map: The agents of each group, by its name; every agent is in one. By default, agents with equal spaces
            are a group, named `name` if all are `name_0`, `name_1` and so on, else after its first agent.
        pad: Whether the agents of a group of `group_map` may have different spaces. Boxes, `Discrete` and `MultiBinary`
            spaces are padded to the largest, with zeros and with actions that `action_masks` forbid;
            `observation_padding` marks what is not padding.
        with_state: Whether each reset and step reads the global states, which takes as long as a call of the
            simulator's `state()`.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`. By default, vector rewards have the shape
            `(num_envs, k, num_objectives)`.
        infos: The form of infos. `"dict"`: by environment, without environments that have none, so read them with
            `infos.get(i, {})`. `"list"`: a list of `num_envs` dicts by agent, empty where there are none.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        stepper: The `FacadeStepper` below: its methods do not check that only one call runs at a time.
        num_envs: The number of environments.
        agents: The agents, in the order of groups and of the agents in them.
        num_agents: The number of agents.
        group_map: The agents of each group, by its name.
        single_observation_space, single_action_space: Grouped; the spaces of one agent.
        observation_padding: Grouped; bool `(k, *shape)`, or a tree: which entries of observations are not padding.
        state_space: The space of one environment's global state; None without `with_state`.
        present: Grouped; bool `(num_envs, k)`: which rows of the latest rewards are data.
        present_next: Grouped; bool `(num_envs, k)`: which rows of the latest observations are data.
        acting: Grouped; bool `(num_envs, k)`: which agents act next.
        begins: Grouped; bool `(num_envs, k)`: whose hidden state begins anew with the latest observation: after a reset
            or restart, and where an agent has joined or come back. Where others act first, it is set at the agent's
            first observation. A reset of some environments keeps the marks of the others, like their observations.
        plain: Whether in the latest reset or step all agents were present and act next, and no flag is set.
        terminated, truncated: bool `(num_envs,)`: the flags of environments.
        done: bool `(num_envs,)`: the environments whose episode has ended in the latest step.
        final_observations: Grouped; the last observations of the episodes that have ended. Valid where `done`.
        present_final: Grouped; bool `(num_envs, k)`: which rows of `final_observations` are data.
        state: The global states, `(num_envs, *state_space.shape)`; None without `with_state`.
        final_state: The last states of the episodes that have ended, in the form of `state`. Valid where `done`. After
            a restart, the last known state.

    Raises:
        TypeError, ValueError: As `FacadeStepper`; or `group_map` does not have every agent once, or a group's spaces
            differ.
        NotImplementedError: `with_state`, but the environments have no global state.

    Example:
        >>> from marl_parallel import make
        >>> env = StackedVecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2), with_state=True)
        >>> observations, infos = env.reset(seed=1)
        >>> for _ in range(25):
        ...     actions = np.zeros((4, 3), np.int64)
        ...     observations, rewards, terminations, truncations, infos = env.step(actions)
        >>> observations.shape, rewards.shape, env.done.tolist()
        ((4, 3, 18), (4, 3), [True, True, True, True])
        >>> env.final_observations.shape, env.final_state.shape
        ((4, 3, 18), (4, 54))
        >>> env.close()
    """

    saved_as = "StackedVecEnv"

    def __init__(
        self,
        env: ParallelEnv,
        *,
        group_map: Mapping[str, Sequence[AgentID]] | None = None,
        pad: bool = False,
        with_state: bool = False,
        scalarize: Scalarize | None = None,
        infos: Literal["dict", "list"] = "dict",
    ) -> None:
        if infos not in ("dict", "list"):
            raise ValueError(f'infos must be "dict" or "list", got {infos!r}')
        super().__init__(env, scalarize=scalarize, vectors=scalarize is None)
        self._lists_infos = infos == "list"
        self.stepper = self._stepper
        schema = self.stepper.schema
        agents = self.stepper.view.agents
        if group_map is None:
            self.group_map = groups_by_space(agents, schema.observation_spaces, schema.action_spaces)
        else:
            self.group_map = {name: [*members] for name, members in group_map.items()}
        self.agents = [agent for members in self.group_map.values() for agent in members]
        self.num_agents = len(self.agents)
        if sorted(map(repr, self.agents)) != sorted(map(repr, agents)):
            raise ValueError(f"group_map must have each of the agents {agents} once, got {self.group_map}")
        vectors_for = type(self).__name__ if scalarize is None else ""
        self._groups = {
            name: self._group(name, members, pad=pad, vectors_for=vectors_for)
            for name, members in self.group_map.items()
        }
        self._only = next(iter(self._groups.values())) if len(self._groups) == 1 else None
        # Whether the arrays of the stepper are the facade's own: all agents in order, with one array of observations.
        self._is_whole = (
            self._only is not None and len(self._only.rows) == 1 and self.agents == agents
            and self.stepper.view.is_one_stack and not schema.reward_spaces
        )  # fmt: skip
        takes_array = not any(isinstance(one.action_space, spaces.Dict | spaces.Tuple) for one in self._groups.values())
        self._takes_whole = self._is_whole and takes_array
        self._whole = tuple(agents)
        self.single_observation_space = self._grouped(lambda group: group.space)
        self.single_action_space = self._grouped(lambda group: group.action_space)
        self.observation_padding = self._grouped(_Group.padding)
        self._same_step = self.stepper.mode is AutoresetMode.SAME_STEP
        self.state_space: Any = None
        if with_state:
            self.stepper.batch.write_states()
            self.state_space = schema.state_space
        self._forget()

    def _forget(self) -> None:
        """Set the attributes that describe the latest step, before the first one."""
        n = self.num_envs
        self.plain = False
        self.terminated = self.truncated = self.done = np.zeros(n, np.bool_)
        nothing = self._of_groups(np.zeros((n, len(self.stepper.view.agents)), np.bool_))
        self.present = self.present_next = self.acting = self.present_final = nothing
        self.begins = self._nobody = tree_map(_read_only, nothing)
        self.final_observations = self._grouped(lambda group: stacking.zeros(group.space, (n, group.parts.size)))
        self.state: NDArray[Any] | None = None
        self.final_state: NDArray[Any] | None = None

    def narrow(self, env_ids: range) -> None:
        """From now on, step only a range of environments, while copies of this object step the others.

        Only `step_async` and `step_wait` may be called, after the `reset` of the original; errors are as in
        `FacadeStepper.narrow`.
        """
        self._stepper = self.stepper = copy.copy(self.stepper)
        self.stepper.narrow(env_ids)
        self.num_envs = len(env_ids)
        self._forget()

    def _group(self, name: str, agents: Sequence[AgentID], *, pad: bool, vectors_for: str) -> _Group:
        schema = self.stepper.schema
        observed, acted = schema.observation_spaces, schema.action_spaces
        lots = agents_alike(agents, observed, acted)
        if len(lots) > 1 and not pad:
            first, other = ((lot[0], spaces.Tuple((observed[lot[0]], acted[lot[0]]))) for lot in lots[:2])
            raise ValueError(
                f"group {name!r}: the spaces of {other[0]!r} are {other[1]}, but the spaces of {first[0]!r} are "
                f"{first[1]}; pass pad=True, or other groups"
            )
        rows = [AgentRows(self.stepper, lot, vectors_for=vectors_for) for lot in lots]
        for one in rows:
            if one.reward_space != rows[0].reward_space or (one.reward_space is not None and len(rows) > 1):
                raise ValueError(f"group {name!r} is padded, so that its rewards must be numbers; pass scalarize=")
        parts = Parts([agents.index(agent) for agent in lot] for lot in lots)
        columns = [self.stepper.view.agents.index(agent) for agent in agents]
        try:
            space, action_space = (
                padded_space([getattr(one, kind) for one in rows]) for kind in ("space", "action_space")
            )
        except ValueError as error:
            raise ValueError(f"group {name!r} cannot be padded: {error}") from None
        everyone = columns == [*range(len(self.stepper.view.agents))]
        selected = None if everyone else evenly_spaced(columns) or columns
        return _Group(selected, rows, parts, space, action_space)

    # -- stepping --------------------------------------------------------------------------------------------------

    def _actions(self, actions: Grouped) -> list[Stacked]:
        if self._takes_whole and type(actions) is np.ndarray and actions.shape[:2] == (self.num_envs, self.num_agents):
            whole: Stacked = tuple.__new__(Stacked, (self._whole, actions))
            return [whole]
        if self._only is None and not (isinstance(actions, Mapping) and actions.keys() == self._groups.keys()):
            got = f"the keys {[*actions]}" if isinstance(actions, Mapping) else type(actions).__name__
            raise ValueError(f"expected a dict of actions by group, with the keys {[*self._groups]}; got {got}")
        by_group, acting = self.by_group(actions), self.by_group(self.acting)
        stacked: list[Stacked] = []
        for name, group in self._groups.items():
            try:
                stacked += group.divided(by_group[name], self.stepper.env_ids, acting[name])
            except Mismatch as error:
                raise ValueError(f"the actions of group {name!r}{error.path}: {error}") from None
        return stacked

    def _results(self, arrays: Arrays) -> StepReturn:
        self.plain = arrays.plain
        self.terminated, self.truncated = arrays.terminated, arrays.truncated
        if arrays.none_over and self._is_whole and self.state_space is None and not self._lists_infos:
            self.done, self.acting = arrays.terminated, arrays.acting
            self.present, self.present_next, self.begins = arrays.rewarded, arrays.observed, arrays.began
            return arrays.observations[0], arrays.rewards, arrays.terminations, arrays.truncations, arrays.infos
        observations, ended = self.stacked(arrays.observations), []
        if arrays.plain:
            self.done = arrays.terminated
            self.present = self.present_next = self.acting = self._of_groups(arrays.acting)
            terminations, truncations = arrays.terminations, arrays.truncations
            self.begins = self._nobody
        else:
            self.done = arrays.terminated | arrays.truncated
            terminations, truncations = inherited_flags(arrays)
            self.present, self.present_next = self._of_groups(arrays.rewarded), self._of_groups(arrays.observed)
            self.acting, self.begins = self._of_groups(arrays.acting), self._of_groups(arrays.began)
            ended = np.flatnonzero(self.done).tolist()
        if ended:
            is_same = arrays.final_observations is arrays.observations
            self.final_observations = observations if is_same else self.stacked(arrays.final_observations)
            self.present_final = self._of_groups(arrays.finally_observed)
        if self.state_space is not None:
            self._copy_states(ended)
        rewards = self._grouped(lambda group: group.rewards(arrays))
        infos: Any = arrays.infos
        if self._lists_infos:
            infos = [infos.get(env_id, {}) for env_id in self.stepper.env_ids]
        return observations, rewards, self._of_groups(terminations), self._of_groups(truncations), infos

    def _first(self, arrays: Arrays) -> tuple[Grouped, Infos]:
        before, first = self.begins, super()._first(arrays)
        # Observations of environments that were neither reset nor loaded stay: nothing has happened to their agents.
        stays = arrays.observed & ~(arrays.began | arrays.took_part).any(axis=1, keepdims=True)
        if stays.any():
            kept = tree_map(np.logical_and, before, self._of_groups(stays))
            self.begins = tree_map(np.logical_or, self.begins, kept)
        return first

    def _copy_states(self, ended: Sequence[int]) -> None:
        env_ids = self.stepper.env_ids
        current, final = (states[env_ids[0] : env_ids[-1] + 1] for states in self.stepper.batch.states_seen())
        self.state = current.copy()
        if not self._same_step:
            self.final_state = self.state
        elif ended or self.final_state is None:
            self.final_state = final.copy()

    def _own_state(self, env_id: int) -> Any:
        return None if self.final_state is None else self.final_state[env_id]

    def _set_own_states(self, states: Mapping[int, Any]) -> None:
        if self.final_state is not None:
            final = self.final_state.copy()
            for env_id, state in states.items():
                if state is not None:
                    final[env_id] = state
            self.final_state = final

    # -- groups ----------------------------------------------------------------------------------------------------

    def by_group(self, values: Grouped) -> dict[str, Any]:
        """A grouped value as a dict by the names of groups, also if there is only one."""
        return dict(values) if len(self.group_map) > 1 else {next(iter(self.group_map)): values}

    def grouped(self, by_group: Mapping[str, Any]) -> Grouped:
        """The opposite of `by_group`."""
        return dict(by_group) if len(self.group_map) > 1 else next(iter(by_group.values()))

    def _grouped(self, function: Callable[[_Group], Any]) -> Grouped:
        if self._only is not None:
            return function(self._only)
        return self.grouped({name: function(group) for name, group in self._groups.items()})

    def _of_groups(self, array: NDArray[Any]) -> Grouped:
        """The columns of each group, of an array `(num_envs, possible agents, ...)`."""
        return self._only.of(array) if self._only is not None else self._grouped(lambda group: group.of(array))

    def stacked(self, observations: Sequence[Any]) -> Grouped:
        """Group observations of the `FacadeStepper`'s view, `(n, agents, ...)` by its groups; views if possible."""
        return self._grouped(lambda group: group.observations(observations))

    @property
    def action_masks(self) -> Grouped:
        """Grouped; bool `(num_envs, k, n)`: which actions are legal, of `Discrete` or `MultiDiscrete` actions.

        All actions are legal where an agent has no mask; padding never is. See `FacadeStepper.action_masks` for errors.
        """
        return self._grouped(lambda group: group.masks(self.stepper.action_masks))

    def torch(self, device: Any = "cpu", *, pin: bool = False) -> StackedTensors:
        """The same environment with torch tensors in place of arrays; arguments are as in `StackedTensors`."""
        from marl_parallel.vector.tensors import StackedTensors

        return StackedTensors(self, device, pin=pin)


def _read_only(array: NDArray[np.bool_]) -> NDArray[np.bool_]:
    view: NDArray[np.bool_] = array.view()
    view.flags.writeable = False
    return view
