"""`TupleVecEnv`: tuples by agent, as Gymnasium's `AsyncVectorEnv` over environments with `Tuple` spaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import choices_of, declares_mask
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked
from marl_parallel.core.schema import equal
from marl_parallel.core.transition import COMMON, FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import common_info, divided, inherited_flags, reset_mask, stacked, vector_infos
from marl_parallel.vector.scalarize import Scalarize

FirstReturn = tuple[tuple[Any, ...], dict[str, Any]]
StepReturn = tuple[tuple[Any, ...], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]


class TupleVecEnv(ArrayFacade[Any, StepReturn, FirstReturn], gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment whose spaces are `Tuple`s, with one part for each agent.

    It replaces `gymnasium.vector.AsyncVectorEnv` where environments return rewards as lists by agent. With N
    environments and k agents, observations are a tuple of k arrays `(N, ...)`, or dicts and tuples of arrays. Actions
    are k arrays or lists of N actions; whole numbers may be floats. Rewards are float64 `(N, k)`. Terminations and
    truncations are bool `(N,)`: those of environments; or `(N, k)`, with `flags_by_agent`: an agent without a flag of
    its own has the environment's at the end of an episode. Rows of absent agents are zeros.

    Infos are laid out as in Gymnasium: each key has an array over environments, and `_key` the mask of those that have
    it. Infos of an environment are at the top, those of an agent under its name. If agents have equal action spaces,
    `infos["action_mask"]`, bool `(N, k, num_choices)`, has the masks that they report in observations or infos, or as
    PyMARL's environments do.

    With `auto_reset=True` (SAME_STEP), the step that ends an episode returns the next one's first observations and
    infos. `infos["final_obs"]` and `infos["final_info"]` have the old one's last: arrays of objects `(N,)`, with a
    tuple by agent and a dict for each environment that is over, and None for the others.

    Args:
        env: No other facade may step it. With `copy=False`, observations are valid until the next step or reset.
        flags_by_agent: Whether terminations and truncations are `(N, k)`.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`; needed if agents declare a `reward_space`.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        agents: The agents, in the order of tuples and columns.
        num_agents: The number of agents.
        single_observation_space, single_action_space: `Tuple`s of the agents' spaces.
        observation_space, action_space: `Tuple`s of the agents' batched spaces.
        present: bool `(N, k)`: which agents were observed or rewarded at the last reset or step.
        acting: bool `(N, k)`: which agents act next; actions of the others are ignored.

    Raises:
        TypeError, ValueError: As `FacadeStepper`.

    Example:
        >>> from marl_parallel import make
        >>> env = make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, facade="tuple")
        >>> observations, infos = env.reset(seed=1)
        >>> for _ in range(25):
        ...     observations, rewards, terminations, truncations, infos = env.step([[0] * 4, [1] * 4, [2] * 4])
        >>> len(observations), observations[0].shape, rewards.shape, truncations.tolist()
        (3, (4, 18), (4, 3), [True, True, True, True])
        >>> infos["final_obs"][3][0].shape
        (18,)
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, *, flags_by_agent: bool = False, scalarize: Scalarize | None = None) -> None:
        super().__init__(env, scalarize=scalarize)
        schema, self.agents = self._stepper.schema, [*self._stepper.view.agents]
        self.num_agents, self.flags_by_agent = len(self.agents), flags_by_agent
        observed, acted = (
            [declared[agent] for agent in self.agents] for declared in (schema.observation_spaces, schema.action_spaces)
        )
        self.single_observation_space, self.single_action_space = spaces.Tuple(observed), spaces.Tuple(acted)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._may_have_masks = choices_of(acted[0]) is not None and all(equal(space, acted[0]) for space in acted)
        self._has_masks = {*self.agents} <= {*schema.mask_spaces} or all(map(declares_mask, observed, acted))
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP
        self.present = self.acting = np.zeros((self.num_envs, self.num_agents), np.bool_)

    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> FirstReturn:
        """Begin new episodes; returns observations and infos.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment that is reset.
            options: `"reset_mask"`, bool `(N,)`, selects the environments to reset; the rest is for each environment's
                own `reset`.

        Raises:
            TypeError, ValueError: The mask has another form.
        """
        options, mask = reset_mask(options, self.num_envs)
        return super().reset(seed, options, None if mask is None else np.flatnonzero(mask).tolist())

    def reset_async(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset and return; `reset_wait` returns the results. Arguments and errors are as in `reset`."""
        options, mask = reset_mask(options, self.num_envs)
        super().reset_async(seed, options, None if mask is None else np.flatnonzero(mask).tolist())

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each environment."""
        return tuple(self.env.seed())

    close = gymnasium.vector.VectorEnv.close  # sets the library's `closed`, and calls `close_extras` once

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; keywords are as in `ParallelEnv.close`."""
        self._stepper.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: the `ParallelEnv` may be used further, and closes when it is collected itself."""

    def _actions(self, actions: Any) -> list[Stacked]:
        is_sequence = isinstance(actions, Iterable) and not isinstance(actions, Mapping | str)
        by_agent = [*actions] if is_sequence else actions
        if not is_sequence or len(by_agent) != self.num_agents:
            got = f"{len(by_agent)} of them" if is_sequence else f"{type(actions).__name__} {actions!r:.200}"
            raise ValueError(
                f"expected the actions of {self.num_agents} agents, each for {self.num_envs} environments; got {got}"
            )
        of_agents: list[Stacked] = []
        for agent, rows in zip(self.agents, by_agent):
            try:
                values = stacked(self._stepper.schema.action_spaces[agent], rows, self.num_envs, 1)
                of_agents.append(Stacked((agent,), values))
            except (TypeError, ValueError) as error:
                kind = ValueError if isinstance(error, ValueError) else TypeError
                raise kind(f"the actions of agent {agent!r}: {error}") from None
        return of_agents

    def _results(self, arrays: Arrays) -> StepReturn:
        self.present, self.acting = arrays.present, arrays.acting
        flags = inherited_flags(arrays) if self.flags_by_agent else (arrays.terminated, arrays.truncated)
        return self._by_agent(arrays.observations), arrays.rewards, *flags, self._infos(arrays)

    def _by_agent(self, observations: Sequence[Any]) -> tuple[Any, ...]:
        by_agent = self._stepper.view.by_agent([*observations])
        return tuple(by_agent[agent] for agent in self.agents)

    def _infos(self, arrays: Arrays) -> dict[str, Any]:
        over = np.flatnonzero(arrays.terminated | arrays.truncated).tolist() if self._same_step else []
        of_envs, final_infos = dict(arrays.infos), dict[int, dict[Any, Any]]()
        for env_id in over:
            infos = of_envs.get(env_id, {})
            final_infos[env_id] = _merged({key: _last(info) for key, info in infos.items()})
            _, of_reset = divided({}, infos)
            marks = {"restarted": arrays.restarted[env_id], "recycled": arrays.recycled[env_id]}
            common = {**of_reset.get(COMMON, {}), **{key: True for key, is_set in marks.items() if is_set}}
            of_envs[env_id] = {**of_reset, COMMON: common}
        result = vector_infos([(env_id, _merged(of_envs[env_id])) for env_id in sorted(of_envs)], self.num_envs)
        if over:
            observations = stacking.one_by_one(self._by_agent(arrays.final_observations), self.num_envs)
            result |= self._objects(FINAL_OBS, {env_id: observations[env_id] for env_id in over})
            result |= self._objects("final_info", final_infos)
        if not self._has_masks:  # in infos
            of_agents = [result.get(agent) for agent in self.agents]
            self._has_masks = any(isinstance(infos, dict) and ACTION_MASK in infos for infos in of_agents)
        if self._has_masks and self._may_have_masks:
            masks = self._stepper.action_masks(self.agents)
            result[ACTION_MASK], result[f"_{ACTION_MASK}"] = masks, np.ones(self.num_envs, np.bool_)
        return result

    def _objects(self, key: str, values: Mapping[int, Any]) -> dict[str, NDArray[Any]]:
        """An array of objects with the values of some environments, and its mask."""
        objects, mask = np.full(self.num_envs, None, object), np.zeros(self.num_envs, np.bool_)
        for env_id, value in values.items():
            objects[env_id], mask[env_id] = value, True
        return {key: objects, f"_{key}": mask}


def _last(info: Any) -> Any:
    """An info without what comes from the end of an episode and the reset after it."""
    return divided(info, {})[0] if isinstance(info, Mapping) else info


def _merged(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    """The infos of one environment as one dict: its own ones, and those of each agent under its name."""
    return {**common_info(infos.get(COMMON)), **{key: info for key, info in infos.items() if info and key != COMMON}}
