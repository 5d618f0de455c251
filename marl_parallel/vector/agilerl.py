"""`AgileRLVecEnv`: dicts by agent of arrays, with NaN for absent agents, as AgileRL expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from agilerl.vector.pz_vec_env import PettingZooVecEnv
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import from_zero, starts_elsewhere, to_start, to_zero, tree_map
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import agent_infos, inherited_flags, vector_infos
from marl_parallel.vector.scalarize import Scalarize

__doctest_requires__ = ["agilerl"]

ByAgent = dict[Any, Any]
StepReturn = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]
_FORCED = "env_defined_actions"


class AgileRLVecEnv(ArrayFacade[Any, StepReturn, tuple[ByAgent, ByAgent]], PettingZooVecEnv):
    """A vector environment for AgileRL's multi-agent training functions.

    Everything is a dict by agent of arrays over all environments, always for all possible agents. Rewards are float64
    and flags bool, `(num_envs,)`. Missing values are NaN: rewards; flags of agents that take no part in an environment
    (the array is float64 then); observations of floats (integers have no NaN and are zeros). Observations that are
    single numbers have the shape `(num_envs, 1)`. Choices of `Discrete(n, start=s)` and of `MultiDiscrete` count
    from 0, in actions and observations; the simulator gets and returns s, s + 1, ... All arrays are the caller's own,
    also if `env` has `copy=False`.

    In the step that ends an episode, observations are the new episode's. Agents that were observed or rewarded in this
    step and have no flag of their own get the environment's. Infos are the reset's, with the old episode's last
    observations and infos as `final_obs` and `final_info`.
    `infos[agent]` has an array for each key, and a mask under `_key`, as in Gymnasium's vector infos.
    `env_defined_actions` is NaN in environments that define none. Infos of the environment, such as the mark of a
    restart, `infos[agent]["__common__"]`, are in every agent's infos.

    Args:
        env: Made with `auto_reset=True`. No other facade may step it. Training functions close it in the end.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`; needed if agents declare a `reward_space`.

    Attributes:
        agents: All possible agents, always.
        present: By agent, `(num_envs,)`, bool: where it was observed or rewarded at the last reset or step.
        acting: By agent, `(num_envs,)`, bool: where it acts next.

    Raises:
        TypeError, ValueError: As `FacadeStepper`, or agents are not strings, or actions are dicts or tuples.

    Example:
        >>> from agilerl.algorithms import IPPO
        >>> from marl_parallel import make
        >>> env = AgileRLVecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2))
        >>> observations, infos = env.reset(seed=1)
        >>> declared = [[of(agent) for agent in env.agents] for of in
        ...             (env.single_observation_space, env.single_action_space)]
        >>> actions, *_ = IPPO(*declared, agent_ids=env.agents).get_action(observations, infos)
        >>> observations, rewards, terminations, truncations, infos = env.step(actions)
        >>> observations["agent_0"].shape, truncations["agent_0"].tolist()
        ((4, 18), [False, False, False, False])
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        ArrayFacade.__init__(self, env, AutoresetMode.SAME_STEP, copy=True, scalarize=scalarize)
        schema, agents = self._stepper.schema, [str(agent) for agent in env.possible_agents]
        if agents != env.possible_agents:
            raise ValueError(f"AgileRL knows agents by strings, got {env.possible_agents}")
        for agent, space in schema.action_spaces.items():
            if isinstance(space, spaces.Dict | spaces.Tuple):
                raise ValueError(f"AgileRL's actions are arrays, but the action space of agent {agent!r} is {space}")
        PettingZooVecEnv.__init__(
            self,
            env.num_envs,
            {agent: from_zero(schema.observation_spaces[agent]) for agent in agents},
            {agent: from_zero(schema.action_spaces[agent]) for agent in agents},
            agents,
            metadata=env.metadata,
            render_mode=env.render_mode,
        )
        self.present = self.acting = self._by_agent(np.zeros((self.num_envs, len(agents)), np.bool_))

    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, ByAgent]:
        """Begin new episodes; returns observations and infos, by agent. Arguments are as in `ParallelEnv.reset`."""
        return super().reset(seed, options)

    def reset_async(  # type: ignore[override]
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin new episodes and return; `reset_wait` returns the results. Arguments and errors are as in `reset`."""
        super().reset_async(seed, options)

    @exclusive("step")
    def step(self, actions: Mapping[str, Any], *_: Any, **__: Any) -> StepReturn:
        """Step all environments; returns observations, rewards, terminations, truncations and infos, by agent.

        Args:
            actions: By agent, arrays or tensors `(num_envs, ...)`. Rows of agents that do not act are ignored, agents
                that act in no environment may be left out, and a row of NaN means no action. Errors are as in
                `FacadeStepper.step`.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for agent, values in actions.items():
            arrays[agent] = array = _array(values)
            if array.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"expected actions of agent {agent!r} for {self.num_envs} environments, got shape {array.shape}"
                )
        nan = {agent: rows for agent, array in arrays.items() if (rows := _nan_rows(array)) is not None}
        acting = self._stepper.transitions.acting if nan else []
        if any(agent in acting[env_id] for agent, rows in nan.items() for env_id in np.flatnonzero(rows).tolist()):
            of_envs = [{agent: array[env_id] for agent, array in arrays.items()} for env_id in range(self.num_envs)]
            self._stepper.send_dicts([self._of_env(of_env) for of_env in of_envs])
        else:
            for agent, rows in nan.items():
                arrays[agent] = stacking.placed(arrays[agent], rows, np.zeros((), arrays[agent].dtype))
            self._stepper.send(self._actions(arrays))
        return self._results(self._stepper.receive())

    def _actions(self, actions: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        declared = self._stepper.schema.action_spaces
        return {agent: _formed(declared.get(agent), array) for agent, array in actions.items()}

    @exclusive("step_async")
    def step_async(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Begin to step all environments and return; `actions` has a dict by agent for each.

        Errors are as in `step`.
        """
        if isinstance(actions, Mapping):
            raise TypeError("step_async takes a list with a dict of actions for each environment; step takes a dict")
        self._stepper.send_dicts([self._of_env(of_env) for of_env in actions])

    close = PettingZooVecEnv.close  # sets the library's `closed`, and calls `close_extras` once

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """Close the environment; arguments are as in `ParallelEnv.close`. Discards a step in flight."""
        self._stepper.close(terminate=terminate, **kwargs if timeout is None else {**kwargs, "timeout": timeout})

    def _of_env(self, actions: Mapping[str, Any]) -> ByAgent:
        """One environment's actions in the form of their spaces, without those that are NaN."""
        rows = {agent: _array(action)[None] for agent, action in actions.items()}
        declared = self._stepper.schema.action_spaces
        return {a: _formed(declared.get(a), row)[0] for a, row in rows.items() if _nan_rows(row) is None}

    def _results(self, arrays: Arrays) -> StepReturn:
        flagged, flags = arrays.flagged, (arrays.terminations, arrays.truncations)
        if not arrays.plain:
            flagged = flagged | arrays.took_part
            flags = inherited_flags(arrays, flagged)
        return (
            self._observations(arrays),
            self._by_agent(np.where(arrays.rewarded, arrays.rewards, np.nan)),
            self._flags_by_agent(flags[0], flagged),
            self._flags_by_agent(flags[1], flagged),
            self._infos(arrays, arrays.terminated | arrays.truncated),
        )

    def _by_agent(self, array: NDArray[Any]) -> ByAgent:
        return dict(zip(self.agents, array.T))

    def _flags_by_agent(self, flags: NDArray[np.bool_], flagged: NDArray[np.bool_]) -> ByAgent:
        """NaN where not `flagged`; bool for an agent that is flagged everywhere, as in AgileRL."""
        if flagged.all():
            return self._by_agent(flags)
        floats = np.where(flagged, flags, np.nan)
        return {agent: (flags if flagged[:, i].all() else floats)[:, i] for i, agent in enumerate(self.agents)}

    def _observations(self, arrays: Arrays) -> ByAgent:
        self.present, self.acting = self._by_agent(arrays.present), self._by_agent(arrays.acting)
        unobserved = None if arrays.observed.all() else ~arrays.observed

        def of_leaf(positions: list[int], values: NDArray[Any]) -> NDArray[Any]:
            if unobserved is not None and values.dtype.kind == "f":
                values[unobserved[:, positions]] = np.nan
            return values[..., None] if values.ndim == 2 and not values.dtype.hasobject else values

        def of_group(space: Space[Any], positions: list[int], values: Any) -> Any:
            if starts_elsewhere(space):
                values = to_zero(space, values)
                stacking.clear(values, np.nonzero(~arrays.observed[:, positions]))
                values = tree_map(lambda leaf, array: array.astype(leaf.dtype, copy=False), space, values)
            return tree_map(partial(of_leaf, positions), values)

        view = self._stepper.view
        groups = zip(arrays.observations, view.groups)
        return view.by_agent([of_group(space, positions, values) for values, (space, positions) in groups])

    def _infos(self, arrays: Arrays, over: NDArray[np.bool_] | None = None) -> ByAgent:
        by_env: dict[int, list[dict[Any, Any]]] = {}
        schema = self._stepper.schema
        for env_id, infos in arrays.infos.items():
            next_episode = over is not None and bool(over[env_id])
            by_env[env_id] = agent_infos(env_id, infos, self.agents, self.agents, next_episode=next_episode)
            for agent, info in zip(self.agents, by_env[env_id]):
                if FINAL_OBS in info:
                    info[FINAL_OBS] = to_zero(schema.observation_spaces[agent], self._stepper.own(info[FINAL_OBS]))
                if info.get(_FORCED) is not None:
                    info[_FORCED] = to_zero(schema.action_spaces[agent], info[_FORCED])
        result: ByAgent = {}
        for column, agent in enumerate(self.agents):
            info = vector_infos(((env_id, of_agents[column]) for env_id, of_agents in by_env.items()), self.num_envs)
            if _FORCED in info:
                info[_FORCED] = _forced(agent, info[_FORCED], info[f"_{_FORCED}"])
            if agent in schema.mask_spaces:  # not in infos, except at the end of an episode
                masks = self._stepper.action_masks([agent])[:, 0].astype(np.int8)
                info[ACTION_MASK], info[f"_{ACTION_MASK}"] = masks, np.ones(self.num_envs, np.bool_)
            result[agent], result[f"_{agent}"] = info, np.ones(self.num_envs, np.bool_)
        return result


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _nan_rows(array: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Which rows have only NaN; None if no row does."""
    if array.dtype.kind != "f" or not array.size:
        return None
    nan: NDArray[np.bool_] = np.isnan(array.reshape(len(array), -1)).all(axis=1)
    return nan if nan.any() else None


def _formed(space: Space[Any] | None, rows: NDArray[Any]) -> NDArray[Any]:
    """Convert rows to the shape of their space, if they are flat or differ in axes of length 1; floats to integers.

    AgileRL counts choices from 0; the result has the choices of the space.
    """
    if space is None or space.shape is None:
        return rows
    rows = stacking.whole(space, rows)
    flat = rows.shape == (len(rows), int(np.prod(space.shape)))
    same_lengths = [length for length in rows.shape[1:] if length != 1] == [
        length for length in space.shape if length != 1
    ]
    rows = rows.reshape(len(rows), *space.shape) if flat or same_lengths else rows
    if starts_elsewhere(space):
        rows = to_start(space, rows)
    return rows


def _forced(agent: str, actions: Any, defined: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Actions that environments define, NaN for those that define none; raises `ValueError` if shapes differ."""
    defining = [row for row in np.flatnonzero(defined).tolist() if actions[row] is not None]
    rows: dict[int, NDArray[np.float64]] = {}
    for row in defining:
        try:
            rows[row] = np.asarray(actions[row], np.float64)
        except Exception as error:  # whatever an object's `__array__` raises
            raise ValueError(
                f"environment {row}: the {_FORCED} of agent {agent!r} must be numbers, got "
                f"{actions[row]!r:.200} ({error})"
            ) from error
    shape = next((values.shape for values in rows.values()), ())
    forced = np.full((len(defined), *shape), np.nan)
    for row, values in rows.items():
        if values.shape != shape:
            raise ValueError(
                f"environment {row}: the {_FORCED} of agent {agent!r} have shape {values.shape}, others {shape}"
            )
        forced[row] = values
    return forced
