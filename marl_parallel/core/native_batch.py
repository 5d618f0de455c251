"""The batch of a native simulator as dicts, and where each of its environments stands.

As in `batch.py`, it is decided here what is taken from the caller's actions and what is refused, before the simulator
is touched. Arrays are made in `native_arrays.py`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import own_mask
from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core import stacking
from marl_parallel.core.batch import of_acting
from marl_parallel.core.native import Received, action_groups
from marl_parallel.core.native_arrays import InfoColumns, NativeArrays, by_row
from marl_parallel.core.records import Columns
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import Mismatch, zeros
from marl_parallel.core.transition import ALL


class NativeBatch:
    """All environments of a native simulator.

    Args:
        schema: Of the simulator.
        env_ids: All environments.

    Attributes:
        schema: As given.
        acting_now: `(num_envs, agents)`, bool: who should act next. Not to be changed.
        As of `BatchView`.
    """

    mode: ClassVar[AutoresetMode] = AutoresetMode.NEXT_STEP
    mode_is_fixed: ClassVar[bool] = True
    copies: ClassVar[bool] = True

    def __init__(self, schema: Schema, env_ids: tuple[int, ...]) -> None:
        self.schema, self._agents = schema, schema.possible_agents
        self.env_ids, num_envs = env_ids, len(env_ids)
        self.begun = [False] * num_envs
        self._all_bytes = np.arange(num_envs, dtype=np.int32).tobytes()
        # Arrays that nothing is written into: others take their place.
        self.acting_now = self._alive = self._flagged = np.zeros((num_envs, len(self._agents)), np.bool_)
        self._over = np.zeros(num_envs, np.bool_)
        self._action_groups = action_groups(schema)
        self._places = {
            place: (group, row)
            for group, (_, places) in enumerate(alike(schema.observation_spaces, self._agents))
            for row, place in enumerate(places)
        }
        self._lists: dict[str, list[Any]] = {}  # what somebody has asked for since the last transitions
        self._masked_groups = [
            group
            for group, (space, _) in enumerate(alike(schema.observation_spaces, self._agents))
            if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces
        ]
        # By environment, where its masks are: what was received last of it, and the row.
        self._masks_in: dict[int, tuple[Received, int]] = {}

    # -- where each stands -----------------------------------------------------------------------------------------

    @property
    def acting(self) -> list[list[AgentID]]:
        """Who should act next."""
        return self._listed("acting", self.acting_now)

    @property
    def alive(self) -> list[list[AgentID]]:
        """Who has been seen in this episode and is neither terminated nor truncated yet."""
        return self._listed("alive", self._alive)

    @property
    def over(self) -> list[bool]:
        """Whose episode has ended, with no reset since."""
        if "over" not in self._lists:
            self._lists["over"] = self._over.tolist()
        return self._lists["over"]

    def _listed(self, name: str, mask: NDArray[np.bool_]) -> list[list[AgentID]]:
        if name not in self._lists:
            self._lists[name] = [[a for a, there in zip(self._agents, row) if there] for row in mask.tolist()]
        return self._lists[name]

    def begin(self, env_ids: Iterable[int]) -> None:
        """Note that these environments have been reset."""
        for env_id in env_ids:
            self.begun[env_id] = True

    def note(self, received: Received) -> bool:
        """Note where these transitions leave their environments; says whether they are of all, in order."""
        ids = received.env_ids
        over = received.terminated | received.truncated
        if self._masked_groups or ACTION_MASK in received.infos:
            self._note_masks(received)
        if len(self._agents) == 1 and received.present is None:  # who lives as long as the episode
            flagged = over[:, None]
            alive = acting = ~flagged
        else:
            flagged, alive = self._flagged[ids], self._alive[ids]
            began = received.elapsed == 0
            flagged[began] = alive[began] = False
            flagged |= received.terminations | received.truncations
            seen = True if received.present is None else received.present
            alive = (alive | seen) & ~flagged
            acting = (alive & seen) & ~over[:, None]
        self._lists.clear()
        if ids.tobytes() == self._all_bytes:
            self._over, self.acting_now, self._alive, self._flagged = over, acting, alive, flagged
            return True
        self._over = stacking.placed(self._over, ids, over)
        self._alive = stacking.placed(self._alive, ids, alive)
        self._flagged = stacking.placed(self._flagged, ids, flagged)
        self.acting_now = stacking.placed(self.acting_now, ids, acting)
        return False

    def _note_masks(self, received: Received) -> None:
        """Copy what holds masks: the arrays belong to the caller."""
        groups = [
            stacking.copied(group[ACTION_MASK]) if place in self._masked_groups else None
            for place, group in enumerate(received.observations)
        ]
        infos = {ACTION_MASK: stacking.copied(received.infos[ACTION_MASK])} if ACTION_MASK in received.infos else {}
        own = received._replace(observations=groups, infos=infos)
        self._masks_in.update((env_id, (own, row)) for row, env_id in enumerate(received.env_ids.tolist()))

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        """By agent, the action masks of those who act next in one environment that is not in flight; new arrays."""
        if env_id not in self._masks_in:
            return {}
        received, row = self._masks_in[env_id]
        found = {}
        for agent in self.acting[env_id]:
            place = self._agents.index(agent)
            group, member = self._places[place]
            stacked, column = received.infos.get(ACTION_MASK), place
            if stacked is None:
                stacked, column = received.observations[group], member
            if stacked is not None:
                found[agent] = own_mask(stacking.each(operator.itemgetter((row, column)), stacked))
        return found

    # -- actions ---------------------------------------------------------------------------------------------------

    def write_actions(self, env_ids: Sequence[int], actions: Sequence[Mapping[Any, Any]]) -> list[Any]:
        """Lay out one dict of actions for each environment.

        Returns:
            For each group of agents with equal action spaces, their values, zeros for those who do not act.

        Raises:
            ValueError: An action is missing, or is not what its space declares; nothing has been stepped.
            TypeError: Something is not a dict; likewise.
        """
        over, acting = self.over, self.acting
        given = [
            own if type(own) is dict and [*own] == acting[env_id]  # as they mostly are
            else {} if over[env_id]
            else of_acting(env_id, own, acting[env_id])
            for env_id, own in zip(env_ids, actions, strict=True)
        ]  # fmt: skip
        return [self._stacked(space, places, env_ids, given) for space, places in self._action_groups]

    def _stacked(
        self, space: Space[Any], places: Sequence[int], env_ids: Sequence[int], given: Sequence[Mapping[Any, Any]]
    ) -> Any:
        agents, nothing = [self._agents[place] for place in places], zeros(space)
        values = [own.get(agent, nothing) for own in given for agent in agents]
        shape = len(env_ids), len(agents)
        try:
            joined = _joined(space, values)
        except Mismatch:
            joined = self._one_by_one(space, env_ids, agents, values)
        return stacking.each(lambda array: array.reshape(*shape, *array.shape[1:]), joined)

    @staticmethod
    def _one_by_one(space: Space[Any], env_ids: Sequence[int], agents: Sequence[AgentID], values: Sequence[Any]) -> Any:
        """As `_joined`, where each may be right, but NumPy makes something else of all of them together."""
        singles = []
        for (env_id, agent), value in zip(itertools.product(env_ids, agents), values):
            try:
                singles.append(_joined(space, [value]))
            except Mismatch as error:
                raise ValueError(f"environment {env_id}: the action of agent {agent!r}: {error}") from None
        return stacking.together(lambda *arrays: np.concatenate(arrays), *singles)

    # -- transitions -----------------------------------------------------------------------------------------------

    def read(self, env_ids: Sequence[int], told: Received) -> Columns:
        """The transitions that were received, in this order: five tuples of dicts."""
        self.note(told)
        agents, present, count = self._agents, told.present, len(told.env_ids)
        groups, places = told.observations, range(len(agents))
        seen = [
            stacking.one_by_one(stacking.column(groups[group], row), count)
            for group, row in (self._places[place] for place in places)
        ]
        return (
            (*by_row(agents, seen, present),),
            (*by_row(agents, [[*told.rewards[:, place]] for place in places], present),),
            (*self._flags(told.terminations, told.terminated, present),),
            (*self._flags(told.truncations, told.truncated, present),),
            (*InfoColumns(told, agents).rows(),),
        )

    def _flags(
        self, of_agents: NDArray[np.bool_], of_all: NDArray[np.bool_], present: NDArray[np.bool_] | None
    ) -> list[dict[Any, Any]]:
        rows = by_row(self._agents, [[*of_agents[:, place]] for place in range(len(self._agents))], present)
        for row, flag in zip(rows, of_all.tolist()):
            row[ALL] = flag
        return rows

    def arrays(self, *, copy: bool) -> NativeArrays:
        """The same as arrays, which are the caller's own, whatever `copy` says."""
        return NativeArrays(self)

    def states(self, env_ids: Sequence[int], outside: Mapping[int, Any]) -> NoReturn:
        """Refuse: native simulators tell none."""
        raise NotImplementedError("a native simulator tells no global state")


def _joined(space: Space[Any], values: Sequence[Any]) -> Any:
    """Values one after the other, as arrays in the form of their space; raises `Mismatch`."""
    form = zeros(space)
    if isinstance(form, dict):
        if any(not isinstance(value, Mapping) or value.keys() != form.keys() for value in values):
            raise Mismatch(f"expected a dict with the keys {[*form]}, got {values[0]!r}")
        return {key: _joined(child, [value[key] for value in values]) for key, child in space.spaces.items()}  # type: ignore[attr-defined]
    if isinstance(form, tuple):
        if any(not isinstance(value, tuple | list) or len(value) != len(form) for value in values):
            raise Mismatch(f"expected a tuple of {len(form)}, got {values[0]!r}")
        return tuple(_joined(child, [*column]) for child, column in zip(space.spaces, zip(*values)))  # type: ignore[attr-defined]
    if len(values) == 1:
        return stacking.each(lambda array: array[None], stacking.conform(space, values[0], ()))
    return stacking.conform(space, values, (len(values),))
