"""`AgileRLVecEnv`: the batch by agent, with NaN for absent agents, as AgileRL has it."""

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
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.infos import agent_infos, env_infos, next_episode_info, vector_infos
from marl_parallel.vector.rows import handed_down, took_part
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
    """A vector environment that AgileRL's multi-agent training functions take as it is.

    Everything is a dict by agent of arrays over all environments, for all possible agents at all times. Rewards are
    float64 and flags bool, `(num_envs,)`. Where an agent has no reward, it is NaN; so are its flags where it takes no
    part in an environment and has none (they are float64 then), and its observation where that is of floats; integers
    have no NaN and are zeros. Observations that are single numbers have the shape `(num_envs, 1)`. All arrays are the
    caller's own, also where `env` was made with `copy=False`.

    Episodes begin anew in the step in which they end. Then observations are the new episode's; an agent's flags are
    its own, or those of its environment where it has none; and infos are the reset's, with the old episode's last as
    `final_obs` and `final_info`.

    `infos[agent]` is laid out as AgileRL's and Gymnasium's vector infos: an array for each key, and a mask under
    `_key`. `env_defined_actions` is NaN where an environment defines none. What is about an environment rather than an
    agent, such as the mark of a restart, `infos[agent]["__common__"]`, is in every agent's.

    Args:
        env: Made with `auto_reset=True`. Nobody else may step it. Training functions close it in the end.
        scalarize: What makes numbers of rewards that are vectors: a weight for each objective, or a function that takes
            one vector and returns a number; or a dict of these by agent. Needed where agents declare a `reward_space`.

    Attributes:
        env: As given.
        agents: All possible agents, always.
        present: By agent, `(num_envs,)`, bool: where it was observed or rewarded at the last reset or step.
        acting: Likewise: where its action counts next.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: Its auto-reset is another one, its agents are not known beforehand or no strings, or one declares no
            space, or actions that are dicts or tuples; or rewards are vectors and there is no `scalarize`, or it does
            not fit them.

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
        nobody = np.zeros((self.num_envs, len(self.agents)), np.bool_)
        self.present: ByAgent = self._by_agent(nobody)
        self.acting: ByAgent = self._by_agent(nobody.copy())

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, ByAgent]:
        """Begin new episodes.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment.
            options: For each environment's own `reset`.

        Returns:
            Observations and infos, by agent.
        """
        arrays = self._stepper.reset(seed, options)
        return self._seen(arrays), self._infos(arrays)

    @exclusive("step")
    def step(
        self, actions: Mapping[str, Any], *_: Any, **__: Any
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Step all environments.

        Args:
            actions: By agent, arrays or tensors `(num_envs, ...)`. Rows of those who do not act are not looked at,
                whoever acts in no environment may be left out, and a row that is NaN all over is no action.

        Returns:
            Observations, rewards, terminations, truncations and infos, by agent.

        Raises:
            ValueError: Actions of another shape or dtype; by PettingZoo's rules, also none for an agent that acts.
                Nothing has been stepped. Or as of `step_wait`.
            ResetNeeded: `reset` has not been called. Nothing has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        self._send(actions)
        return self._receive(None)

    @exclusive("step_async")
    def step_async(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Begin to step all environments and return.

        Args:
            actions: For each environment, a dict by agent. Errors are as of `step`.
        """
        if isinstance(actions, Mapping):
            raise TypeError("step_async takes a list with a dict of actions for each copy; step takes arrays by agent")
        self._stepper.send_dicts([self._formed(given) for given in actions])

    @exclusive("step_wait")
    def step_wait(self, timeout: float | None = None) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """The results of `step_async`.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            NoAsyncCallError: Nothing is on its way.
            TimeoutError: They were not there in time. Nothing is lost, and this can be called again.
            ValueError: What came of it has no place in arrays, as a reward that is no number. All has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        return self._receive(timeout)

    def _receive(self, timeout: float | None) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        arrays = self._stepper.receive(timeout)
        whom, flags = arrays.flagged, (arrays.terminations, arrays.truncations)
        if not arrays.quiet:
            whom = whom | took_part(arrays, self.agents, same_step=True)
            flags = handed_down(arrays, whom)
        terminations, truncations = flags
        return (
            self._seen(arrays),
            self._by_agent(np.where(arrays.rewarded, arrays.rewards, np.nan)),
            self._marked(terminations, whom),
            self._marked(truncations, whom),
            self._infos(arrays, arrays.terminated | arrays.truncated),
        )

    # -- the rest --------------------------------------------------------------------------------------------------

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """Close the environment; arguments as of `ParallelEnv.close`. What is on its way is dropped."""
        self._stepper.close(terminate=terminate, **kwargs if timeout is None else {**kwargs, "timeout": timeout})

    # -- into the core ---------------------------------------------------------------------------------------------

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
                    array = array.copy()
                    array[nan] = 0
            stacked[agent] = _formed(self._single_action_spaces.get(agent), array, self.num_envs)
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

    def _formed(self, actions: Mapping[str, Any]) -> ByAgent:
        """One environment's actions in the form of their spaces, as AgileRL's own squeezes them into."""
        formed: ByAgent = {}
        for agent, given in actions.items():
            array = _array(given)
            if array.dtype.kind == "f" and array.size and np.isnan(array).all():
                continue
            formed[agent] = _formed(self._single_action_spaces.get(agent), array[None], 1)[0]
        return formed

    # -- out of the core -------------------------------------------------------------------------------------------

    def _by_agent(self, array: NDArray[Any]) -> ByAgent:
        return dict(zip(self.agents, array.T))

    def _marked(self, flags: NDArray[np.bool_], whom: NDArray[np.bool_]) -> ByAgent:
        """Flags by agent; NaN but for these, as AgileRL's own, which has bool for an agent that is everywhere."""
        if whom.all():
            return self._by_agent(flags)
        floats = np.where(whom, flags, np.nan)
        return {agent: (flags if whom[:, place].all() else floats)[:, place] for place, agent in enumerate(self.agents)}

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
        return view.by_agent([stacking.each(partial(shown, at), seen) for seen, (_, at) in groups])

    def _infos(self, arrays: Arrays, over: NDArray[np.bool_] | None = None) -> ByAgent:
        infos: ByAgent = {}
        by_env = {
            env_id: self._agent_infos(env_id, own, over is not None and bool(over[env_id]))
            for env_id, own in arrays.infos.items()
        }
        for place, agent in enumerate(self.agents):
            rows = ((env_id, of_agents[place]) for env_id, of_agents in by_env.items())
            infos[agent] = vector_infos(rows, self.num_envs)
            if _FORCED in infos[agent]:
                infos[agent][_FORCED] = _forced(agent, infos[agent][_FORCED], infos[agent][f"_{_FORCED}"])
            infos[f"_{agent}"] = np.ones(self.num_envs, np.bool_)
        return infos

    def _agent_infos(self, env_id: int, infos: Mapping[Any, Any], over: bool) -> list[dict[Any, Any]]:
        """The infos of each agent of one environment, laid out anew where its next episode has begun."""
        by_agent = agent_infos(env_id, infos, self.agents, self.agents)
        if not over:
            return by_agent
        of_env = env_infos(infos, self.agents)
        finals = [{FINAL_OBS: self._stepper.own(own[FINAL_OBS])} if FINAL_OBS in own else {} for own in by_agent]
        return [{**next_episode_info(own, of_env), **final} for own, final in zip(by_agent, finals)]


# -- values --------------------------------------------------------------------------------------------------------


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _formed(space: Space[Any] | None, array: NDArray[Any], count: int) -> NDArray[Any]:
    """Rows in the shape of their space, where axes of length 1 differ or they are flat; whole floats as integers."""
    if space is None or space.shape is None:
        return array
    array = stacking.whole(space, array)
    flat = array.shape == (count, int(np.prod(space.shape)))
    alike = [length for length in array.shape[1:] if length != 1] == [length for length in space.shape if length != 1]
    return array.reshape(count, *space.shape) if flat or alike else array


def _forced(agent: str, actions: Any, said: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Actions that simulators have chosen themselves; NaN where they have not, or only say None.

    Raises:
        ValueError: They are of several shapes.
    """
    rows = {
        row: np.asarray(action, np.float64)
        for row, (action, there) in enumerate(zip(actions, said))
        if there and action is not None
    }
    shape = next((values.shape for values in rows.values()), ())
    forced = np.full((len(said), *shape), np.nan)
    for row, values in rows.items():
        if values.shape != shape:
            raise ValueError(
                f"environment {row}: the {_FORCED} of agent {agent!r} have shape {values.shape}, others {shape}"
            )
        forced[row] = values
    return forced
