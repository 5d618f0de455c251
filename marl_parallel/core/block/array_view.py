"""`ArrayView`, the base class of all views of environments as arrays, and the types of its arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block import stacking
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.schema import alike
from marl_parallel.core.source import Transitions
from marl_parallel.core.spaces import tree_map
from marl_parallel.core.transition import BEGAN, ENDED, TOOK_PART, WAS_ALIVE, WAS_DEAD
from marl_parallel.core.view import View

# The defaults of fields that a view may leave out if no facade of this package reads its arrays.
_NOBODY: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)
_NO_ENVS: NDArray[np.bool_] = np.zeros(0, np.bool_)


EVENTS = {
    "were_alive": WAS_ALIVE, "took_part": TOOK_PART, "ended": ENDED, "began": BEGAN, "were_dead": WAS_DEAD
}  # fmt: skip
"""The fields of `Arrays` that show events, with the bits of these."""


class Arrays(NamedTuple):
    """One transition of every environment, for `n` possible agents.

    Attributes:
        observations: For each group, the observations of its agents: arrays `(num_envs, agents of the group, ...)`, in
            the form of the space (dicts and tuples of arrays). Values without a fixed form are in an array of objects.
            Rows of absent agents are zeros, or None.
        rewards: `(num_envs, n)`, float64; 0.0 for an agent without a reward.
        terminations: `(num_envs, n)`, bool; False for an agent without this flag.
        truncations: `(num_envs, n)`, bool; False for an agent without this flag.
        terminated: `(num_envs,)`, bool: `terminateds["__all__"]`.
        truncated: `(num_envs,)`, bool: `truncateds["__all__"]`.
        present: `(num_envs, n)`, bool: which agents were observed or rewarded.
        acting: `(num_envs, n)`, bool: which agents act next.
        infos: The infos of each environment by env id, without environments whose infos are all empty. Read-only.
        observed: `(num_envs, n)`, bool: which agents have an observation. Read-only.
        rewarded: `(num_envs, n)`, bool: which agents have a reward. Read-only.
        flagged: `(num_envs, n)`, bool: which agents have a flag, True or False. Read-only.
        plain: If True, all agents are present and act, no flag is set and all infos are empty, as in most steps.
        shared_flags: If True, each agent has the flags of its environment.
        vectors: By agent, rewards that are vectors: `(num_envs, *shape)` in the dtype of the agent's reward space,
            zeros without a reward. The agent's column in `rewards` is 0.0. Empty if no agent declares a reward space.
        vectored: `(num_envs, n)`, bool: which rewards are in `vectors`; None if `vectors` is empty.
        none_over: If True, `terminated` and `truncated` are False everywhere, as in most steps.
        alive: `(num_envs, n)`, bool: which agents are alive after the step. This field and the following ones are
            read-only; with SAME_STEP, `alive` and `began` are of the next episode where one has ended, and the others
            of the one that has ended.
        were_alive: `(num_envs, n)`, bool: which agents were alive before the step; none before a reset.
        took_part: `(num_envs, n)`, bool: which agents were observed, rewarded or flagged in the step; none in a reset.
        ended: `(num_envs, n)`, bool: whose life ended in the step, by its own flag or with the episode: once in a life.
        began: `(num_envs, n)`, bool: whose life began with its observation: in a reset or restart, for an agent that
            has joined or come back, and in turn-based games when the agent is first observed.
        were_dead: `(num_envs, n)`, bool: whose life had ended before the step, in an episode that went on, and which
            did not come back in it.
        restarted: `(num_envs,)`, bool: the environments that a fault has restarted; infos have the report.
        recycled: `(num_envs,)`, bool: the environments that a new one has replaced between two episodes.
        final_observations: In the form of `observations`: the last ones of the episodes that ended in the step. With
            SAME_STEP, arrays of their own, with zeros in all other rows; else `observations` themselves. Empty if no
            episode has ended.
        finally_observed: `(num_envs, n)`, bool: which agents have one of `final_observations`, where an episode ended.
    """

    observations: list[Any]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    present: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    infos: Mapping[int, dict[Any, Any]]
    observed: NDArray[np.bool_]
    rewarded: NDArray[np.bool_]
    flagged: NDArray[np.bool_]
    plain: bool = False
    shared_flags: bool = False
    vectors: Mapping[AgentID, NDArray[Any]] = MappingProxyType({})
    vectored: NDArray[np.bool_] | None = None
    none_over: bool = False
    alive: NDArray[np.bool_] = _NOBODY
    were_alive: NDArray[np.bool_] = _NOBODY
    took_part: NDArray[np.bool_] = _NOBODY
    ended: NDArray[np.bool_] = _NOBODY
    began: NDArray[np.bool_] = _NOBODY
    were_dead: NDArray[np.bool_] = _NOBODY
    restarted: NDArray[np.bool_] = _NO_ENVS
    recycled: NDArray[np.bool_] = _NO_ENVS
    final_observations: Sequence[Any] = ()
    finally_observed: NDArray[np.bool_] = _NOBODY

    def changed(self, **fields: Any) -> Arrays:
        """The same arrays with other values of some fields."""
        return self._replace(**fields)


class Stacked(NamedTuple):
    """Actions of several agents with equal action spaces.

    Attributes:
        agents: The agents.
        values: Their actions in the form of the space: arrays `(num_envs, agents, ...)`, or dicts and tuples of arrays.
    """

    agents: tuple[AgentID, ...]
    values: Any


class Joint(NamedTuple):
    """What the simulators' own `step` receives for all agents, if `Schema.joint_actions` says that it does.

    Attributes:
        values: An array, or a sequence, with a value for each environment that is stepped.
        by_agent: For `check_actions`: returns the actions in the form of the agents' spaces, or raises `ValueError`.
        lists: Whether each simulator gets a list of the rows of its array.
    """

    values: Any
    by_agent: Callable[[], list[Stacked]]
    lists: bool = False


Actions: TypeAlias = Mapping[Any, Any] | list[Stacked] | Joint
"""Actions by agent, stacked in the form of the agent's space: arrays `(num_envs, ...)`, dicts and tuples of arrays, or
one value for each environment; or `Stacked` actions of several agents. Simulators get them in the dtypes of their
spaces, as from Gymnasium's vector environments: numbers of a `Discrete` space or a `Box` of shape `()` are scalars.
`Joint` actions they get unchanged."""


def of_acting(env_id: int, actions: Any, acting: Sequence[AgentID]) -> dict[AgentID, Any]:
    """The actions of the agents that act; `TypeError` unless `actions` is a dict, `ValueError` if one is missing."""
    if not isinstance(actions, Mapping):
        kind = type(actions).__name__
        raise TypeError(f"environment {env_id}: expected a dict of actions keyed by agent, got {kind}")
    for agent in acting:
        if agent not in actions:
            raise ValueError(
                f"environment {env_id}: no action for agent {agent!r}; expected one for each of {[*acting]}, "
                f"got actions of {[*actions]}"
            )
    return {agent: actions[agent] for agent in acting}


def check_agents(agents: tuple[AgentID, ...], values: Any) -> None:
    """Raise `ValueError` unless stacked actions have a column for each of the agents."""
    shape = np.shape(values)
    if len(shape) < 2 or shape[1] != len(agents):
        raise ValueError(
            f"expected the actions of agents {[*agents]} in an array (num_envs, {len(agents)}, ...), got shape {shape}"
        )


class ResultDoesNotFit(ValueError):
    """Values of some environments do not fit arrays; all others have been read.

    A pickle of it is a `ValueError` with the same text.

    Attributes:
        env_ids: These environments.
        arrays: The arrays with the rows of the others.
    """

    def __init__(self, text: str, env_ids: Sequence[int], arrays: Arrays) -> None:
        super().__init__(text)
        self.env_ids, self.arrays = tuple(env_ids), arrays

    def __reduce__(self) -> Any:
        return ValueError, self.args


class ArrayView(View[Actions, Arrays]):
    """A view of environments whose actions and transitions are arrays; the schema names all agents and their spaces.

    Attributes:
        agents: The columns.
        groups: The agents with equal observation spaces, as `core.schema.alike` returns them.
        group_rows: By agent, its group, and its row there.
        is_one_stack: Whether the observations of all agents are one array, in order.
        writes_all: Whether `write` takes the actions of all agents, not only of those that act.
        wants_info_arrays: Whether infos become `InfoColumns` where possible: for facades that stack infos.
    """

    def __init__(self, schema: Schema) -> None:
        self.agents = list(schema.possible_agents)
        self.groups = alike(schema.observation_spaces, self.agents)
        self._column = {agent: column for column, agent in enumerate(self.agents)}
        rows = {at: (group, row) for group, (_, columns) in enumerate(self.groups) for row, at in enumerate(columns)}
        self.group_rows = {agent: rows[column] for agent, column in self._column.items()}
        self.is_one_stack = len(self.groups) == 1 and not isinstance(self.groups[0][0], spaces.Dict | spaces.Tuple)
        self.writes_all = self.wants_info_arrays = False
        self._target: list[Any] | None = None
        self._rollout: RolloutBuffer | None = None

    @abstractmethod
    def write(self, actions: Actions, env_ids: Sequence[int]) -> Any:
        """Write the actions of the agents that act, or of all agents if `writes_all`; returns the payload of the step.

        Raises `ValueError` if such an agent has no action, an agent is unknown, or an array does not match its space.
        """

    @abstractmethod
    def read(self, env_ids: Sequence[int], leftovers: Any, last: Arrays | None = None, /) -> Arrays:
        """The transitions of all environments of the view, in `env_ids`; or, with `last`, those of some.

        The other rows keep their observations in `last`.

        Raises `ValueError` if a value does not fit an array, such as an undeclared vector of rewards or an unknown
        agent.
        """

    @abstractmethod
    def last(self) -> Arrays:
        """The latest result of `read`, for the `read` of some environments; `ResetNeeded` if there is none."""

    @abstractmethod
    def record_dicts(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Record the observations and rewards of an environment that was stepped by dicts between two array steps."""

    def write_to(self, observations: list[Any] | None, rollout: RolloutBuffer | None = None) -> None:
        """Have the next `read`s write observations into these arrays, one tree for each group; None for new arrays.

        If the arrays belong to a rollout buffer, at the requested time, observations that workers wrote are not copied.
        """
        self._target, self._rollout = observations, rollout

    def drop_memory(self) -> None:
        """Let go of shared memory, as `Transitions.drop_memory` does."""
        self._target = self._rollout = None

    def by_agent(self, observations: list[Any]) -> dict[Any, Any]:
        """The observations of each agent, as views `(num_envs, ...)` of the arrays of all groups."""
        return {agent: stacking.column(observations[group], row) for agent, (group, row) in self.group_rows.items()}

    def _checked(self, actions: Actions, transitions: Transitions, env_ids: Sequence[int]) -> Mapping[AgentID, Any]:
        """Actions by agent; `ValueError` if an agent is unknown, or an agent that acts has no action."""
        assert not isinstance(actions, Joint)
        if isinstance(actions, list):
            for stack in actions:
                tree_map(partial(check_agents, stack.agents), stack.values)
            actions = {a: stacking.column(stack.values, row) for stack in actions for row, a in enumerate(stack.agents)}
        if actions.keys() != self._column.keys():
            for agent in actions:
                if agent not in self._column:
                    raise ValueError(f"got actions for {agent!r}, which is not one of the agents {self.agents}")
            acting = transitions.acting
            for env_id in env_ids:
                of_acting(env_id, actions, acting[env_id])
        return actions
