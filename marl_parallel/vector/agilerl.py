"""`AgileRLVecEnv`: dicts by agent of arrays, with NaN for absent agents, as AgileRL has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.spaces import tree_map
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.infos import agent_infos, env_infos, next_episode_info, vector_infos
from marl_parallel.vector.rows import took_part, with_env_flags
from marl_parallel.vector.stepper import ArrayStepper, ForwardedCalls, Scalarize

try:
    from agilerl.vector.pz_vec_env import PettingZooVecEnv
except ImportError as error:
    raise ImportError(
        f'AgileRLVecEnv needs AgileRL: pip install "marl-parallel[agilerl]" ({error})', name=error.name
    ) from error

__doctest_requires__ = ["agilerl"]

ByAgent = dict[Any, Any]
_FORCED = "env_defined_actions"


class AgileRLVecEnv(ForwardedCalls, PettingZooVecEnv):
    """A vector environment for AgileRL's multi-agent training functions.

    Everything is a dict by agent of arrays over all environments, for all possible agents at all times. Rewards are
    float64 and flags bool, `(num_envs,)`. Missing values are NaN: rewards; flags of agents that take no part in an
    environment and have none (the array is float64 then); observations of floats (integers have no NaN and are zeros).
    Observations that are single numbers have the shape `(num_envs, 1)`. All arrays are the caller's own, also where
    `env` was made with `copy=False`.

    Episodes begin anew in the step in which they end. Then observations are the new episode's; agents without a flag of
    their own inherit the environment's; and infos are the reset's, with the old episode's last as `final_obs` and
    `final_info`.

    `infos[agent]` is laid out as AgileRL's and Gymnasium's vector infos: an array for each key, and a mask under
    `_key`. `env_defined_actions` is NaN where an environment defines none. Infos of the environment, such as the mark
    of a restart, `infos[agent]["__common__"]`, are in every agent's.

    Args:
        env: Made with `auto_reset=True`. Nobody else may step it. Training functions close it in the end.
        scalarize: Makes numbers of vector rewards, as of `ArrayStepper`; needed where agents declare a `reward_space`.

    Attributes:
        agents: All possible agents, always.
        present: By agent, `(num_envs,)`, bool: where it was observed or rewarded at the last reset or step.
        acting: Likewise: where its action counts next.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: Its auto-reset is another one, its agents are not known beforehand or no strings, one declares no
            space, or actions that are dicts or tuples; or `scalarize` is missing or does not fit the rewards.

    Example:
        >>> from agilerl.algorithms import IPPO
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> env = AgileRLVecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2))
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
        self._stepper = ArrayStepper(env, self, AutoresetMode.SAME_STEP, copy=True, scalarize=scalarize)
        self._guard = CallGuard(self._stepper.runner.check_open)
        self.env = env
        schema, agents = self._stepper.runner.schema, [str(agent) for agent in env.possible_agents]
        if agents != env.possible_agents:
            raise ValueError(f"AgileRL knows agents by strings, got {env.possible_agents}")
        for agent, space in schema.action_spaces.items():
            if isinstance(space, spaces.Dict | spaces.Tuple):
                raise ValueError(f"AgileRL's actions are arrays, but the action space of agent {agent!r} is {space}")
        super().__init__(
            env.num_envs,
            {agent: schema.observation_spaces[agent] for agent in agents},
            {agent: schema.action_spaces[agent] for agent in agents},
            agents,
            metadata=env.metadata,
            render_mode=env.render_mode,
        )
        shape = self.num_envs, len(self.agents)
        self.present: ByAgent = self._by_agent(np.zeros(shape, np.bool_))
        self.acting: ByAgent = self._by_agent(np.zeros(shape, np.bool_))

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, ByAgent]:
        """Begin new episodes; returns observations and infos, by agent.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment.
            options: For each environment's own `reset`.
        """
        arrays = self._stepper.reset(seed, options)
        return self._seen(arrays), self._infos(arrays)

    @exclusive("step")
    def step(
        self, actions: Mapping[str, Any], *_: Any, **__: Any
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Step all environments; returns observations, rewards, terminations, truncations and infos, by agent.

        Args:
            actions: By agent, arrays or tensors `(num_envs, ...)`. Rows of agents that do not act are ignored, agents
                that act in no environment may be left out, and a row that is NaN all over is no action. Errors are
                those of `ArrayStepper.step`.
        """
        self._send(actions)
        return self._receive(None)

    @exclusive("step_async")
    def step_async(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Begin to step all environments and return; `actions` has a dict by agent for each. Errors as of `step`."""
        if isinstance(actions, Mapping):
            raise TypeError("step_async takes a list with a dict of actions for each copy; step takes arrays by agent")
        self._stepper.send_dicts([self._of_one(given) for given in actions])

    @exclusive("step_wait")
    def step_wait(self, timeout: float | None = None) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """The results of `step_async`; arguments and errors as of `ArrayStepper.receive`."""
        return self._receive(timeout)

    def _receive(self, timeout: float | None) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        arrays = self._stepper.receive(timeout)
        flagged, flags = arrays.flagged, (arrays.terminations, arrays.truncations)
        if not arrays.plain:
            flagged = flagged | took_part(arrays, self.agents, same_step=True)
            flags = with_env_flags(arrays, flagged)
        return (
            self._seen(arrays),
            self._by_agent(np.where(arrays.rewarded, arrays.rewards, np.nan)),
            self._marked(flags[0], flagged),
            self._marked(flags[1], flagged),
            self._infos(arrays, arrays.terminated | arrays.truncated),
        )

    # -- the rest --------------------------------------------------------------------------------------------------

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """Close the environment; arguments as of `ParallelEnv.close`. A step in flight is dropped."""
        self._stepper.close(terminate=terminate, **kwargs if timeout is None else {**kwargs, "timeout": timeout})

    # -- arguments -------------------------------------------------------------------------------------------------

    def _send(self, actions: Mapping[str, Any]) -> None:
        stacked: ByAgent = {}
        absent: dict[str, NDArray[np.bool_]] = {}
        for agent, given in actions.items():
            array = _array(given)
            if array.shape[:1] != (self.num_envs,):
                raise ValueError(f"expected actions of agent {agent!r} for {self.num_envs} copies, got {array.shape}")
            if array.dtype.kind == "f" and array.size:
                nan = np.isnan(array.reshape(self.num_envs, -1)).all(axis=1)
                if nan.any():
                    absent[agent] = nan
                    array = stacking.placed(array, nan, np.zeros((), array.dtype))
            stacked[agent] = _formed(self._single_action_spaces.get(agent), array)
        acting = self._stepper.runner.batch.acting if absent else []
        if not any(agent in acting[env_id] for agent, rows in absent.items() for env_id in np.flatnonzero(rows)):
            self._stepper.send(stacked)
            return
        self._stepper.send_dicts(
            [
                {a: rows[env_id] for a, rows in stacked.items() if a not in absent or not absent[a][env_id]}
                for env_id in range(self.num_envs)
            ]
        )

    def _of_one(self, actions: Mapping[str, Any]) -> ByAgent:
        """One environment's actions in the form of their spaces, without those that are NaN."""
        arrays = {agent: _array(given) for agent, given in actions.items()}
        return {
            agent: _formed(self._single_action_spaces.get(agent), array[None])[0]
            for agent, array in arrays.items()
            if array.dtype.kind != "f" or not array.size or not np.isnan(array).all()
        }

    # -- results ---------------------------------------------------------------------------------------------------

    def _by_agent(self, array: NDArray[Any]) -> ByAgent:
        return dict(zip(self.agents, array.T))

    def _marked(self, flags: NDArray[np.bool_], flagged: NDArray[np.bool_]) -> ByAgent:
        """Flags by agent, NaN where not `flagged`; bool for an agent that is flagged everywhere, as AgileRL's own."""
        if flagged.all():
            return self._by_agent(flags)
        floats = np.where(flagged, flags, np.nan)
        return {agent: (flags if flagged[:, i].all() else floats)[:, i] for i, agent in enumerate(self.agents)}

    def _seen(self, arrays: Arrays) -> ByAgent:
        """Observations by agent, NaN where an agent was not observed, single numbers with an axis of their own."""
        self.present, self.acting = self._by_agent(arrays.present), self._by_agent(arrays.acting)
        unobserved = None if arrays.observed.all() else ~arrays.observed

        def shown(positions: list[int], values: NDArray[Any]) -> NDArray[Any]:
            if unobserved is not None and values.dtype.kind == "f":
                values[unobserved[:, positions]] = np.nan
            return values[..., None] if values.ndim == 2 and not values.dtype.hasobject else values

        view = self._stepper.view
        groups = zip(arrays.observations, view.groups)
        return view.by_agent([tree_map(partial(shown, at), seen) for seen, (_, at) in groups])

    def _infos(self, arrays: Arrays, over: NDArray[np.bool_] | None = None) -> ByAgent:
        by_env = {
            env_id: self._agent_infos(env_id, own, over is not None and bool(over[env_id]))
            for env_id, own in arrays.infos.items()
        }
        infos: ByAgent = {}
        for place, agent in enumerate(self.agents):
            own = vector_infos(((env_id, of_agents[place]) for env_id, of_agents in by_env.items()), self.num_envs)
            if _FORCED in own:
                own[_FORCED] = _forced(agent, own[_FORCED], own[f"_{_FORCED}"])
            infos[agent], infos[f"_{agent}"] = own, np.ones(self.num_envs, np.bool_)
        return infos

    def _agent_infos(self, env_id: int, infos: Mapping[Any, Any], over: bool) -> list[dict[Any, Any]]:
        """The infos of each agent of one environment, in another layout where its next episode has begun."""
        by_agent = agent_infos(env_id, infos, self.agents, self.agents)
        if not over:
            return by_agent
        of_env = env_infos(infos, self.agents)
        finals = [{FINAL_OBS: self._stepper.own(own[FINAL_OBS])} if FINAL_OBS in own else {} for own in by_agent]
        return [{**next_episode_info(own, of_env), **final} for own, final in zip(by_agent, finals)]


# -- values --------------------------------------------------------------------------------------------------------


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _formed(space: Space[Any] | None, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows in the shape of their space, where axes of length 1 differ or they are flat; whole floats as integers."""
    if space is None or space.shape is None:
        return rows
    rows = stacking.whole(space, rows)
    flat = rows.shape == (len(rows), int(np.prod(space.shape)))
    alike = [length for length in rows.shape[1:] if length != 1] == [length for length in space.shape if length != 1]
    return rows.reshape(len(rows), *space.shape) if flat or alike else rows


def _forced(agent: str, actions: Any, defined: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Actions that environments define, NaN where they define none; raises `ValueError` if shapes differ."""
    rows = {
        row: np.asarray(action, np.float64)
        for row, (action, there) in enumerate(zip(actions, defined))
        if there and action is not None
    }
    shape = next((values.shape for values in rows.values()), ())
    forced = np.full((len(defined), *shape), np.nan)
    for row, values in rows.items():
        if values.shape != shape:
            raise ValueError(
                f"environment {row}: the {_FORCED} of agent {agent!r} have shape {values.shape}, others {shape}"
            )
        forced[row] = values
    return forced
