"""`SkrlEnv`: dicts by agent of torch tensors, in place of skrl's own multi-agent wrappers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from skrl.envs.wrappers.torch import MultiAgentEnvWrapper
from skrl.utils.spaces.torch import (
    compute_space_size,
    flatten_tensorized_space,
    tensorize_space,
    unflatten_tensorized_space,
)

from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, ResultDoesNotFit, Stacked
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import from_zero, starts_elsewhere, to_start, to_zero, tree_map
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.stepper import Options, Seeds
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import Flags, inherited_flags, stacked
from marl_parallel.vector.scalarize import Scalarize

__doctest_requires__ = ["skrl", "torch"]

Tensors = dict[Any, torch.Tensor]
"""By agent, a tensor `(num_envs, size)`."""

FirstReturn = tuple[Tensors, dict[Any, Any]]
StepReturn = tuple[Tensors, Tensors, Tensors, Tensors, dict[Any, Any]]


class SkrlEnv(ArrayFacade[Any, StepReturn, FirstReturn], MultiAgentEnvWrapper):  # pyright: ignore  # see num_envs
    """Many environments for skrl's multi-agent algorithms (IPPO, MAPPO) and trainers.

    Results are dicts by agent, always of all possible agents. Observations are tensors `(num_envs, size)`, flattened as
    skrl's own wrappers do: a `Box` becomes float32, choices become int32 and count from 0. Rewards are float32
    `(num_envs, 1)`; `terminated` and `truncated` are bool `(num_envs, 1)`. Tensors are the caller's own. Actions are
    tensors `(num_envs, size)` as skrl's policies return them; those of agents that do not act are ignored.

    Infos are by environment, as in `ParallelEnv.step`, without environments that have none. In a step that ends
    episodes, `infos["episode"]` has the means of their returns and lengths, which skrl's trainers log.

    **Agents that come and go.** skrl has no masks: it trains on every row. Observations of absent agents are zeros;
    so are those of agents whose life has ended, from the step of their death on. Rewards of absent agents are 0.0. An
    agent is terminated at its death, and once more where the episode ends; in between, its rows have no flag. So its
    return stops at its death, and no return goes on into the next episode. `present` and `acting` say which rows are
    data.

    **Truncated episodes.** The step that ends an episode returns the first observations of the next one. skrl takes
    them for the next observations of the old episode: with `time_limit_bootstrap=True`, `record_transition` adds their
    value to the reward; with False, `compute_gae` does not cut returns at truncated steps at all (both are in
    `skrl/multi_agents/torch/ippo/ippo.py`, and in `mappo.py`). So by default, every end is reported as `terminated`:
    nothing is added to the return of a truncated episode. With `bootstrap_truncated`, ends keep their flags, and
    `infos["transition"]` has the `"next_observations"` and `"next_states"` that `record_transition` needs, with the
    last observations of agents whose life has ended in the step: see `docs/frameworks/skrl.md`.

    **`"NEXT_STEP"`.** The step that ends an episode has zeros as observations, since no agent is alive. The next step
    begins an episode. It ignores actions, its rewards are 0.0, and all agents are `terminated` in it: so nothing of
    the new episode counts for its actions.

    Args:
        env: Made with `auto_reset=True` or `"NEXT_STEP"`. No other facade may step it. skrl's trainers need two
            environments if there is only one agent.
        device: The device of all tensors; None for skrl's default, which is CUDA's if there is one.
        with_state: Whether each reset and step reads the global states, for `state()`; None if the environments have a
            `state_space`.
        bootstrap_truncated: Whether truncated agents are reported as `truncated`, with `infos["transition"]`. If an
            agent has no last observation, it is terminated. Needs `auto_reset=True`.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`; needed if agents declare a `reward_space`.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`. Its other attributes, such as `stats`, are available
            here, too, as in skrl's wrappers.
        num_envs: The number of environments.
        agents, possible_agents: All agents, always.
        observation_spaces, action_spaces: By agent, the spaces of one environment; choices count from 0.
        state_spaces: By agent, the space of one environment's global state; None without states.

    Raises:
        TypeError, ValueError: As `FacadeStepper`; or skrl has no tensors for a space; or `bootstrap_truncated` with
            `"NEXT_STEP"`.
        NotImplementedError: `with_state=True`, but the environments have no global state.

    Example:
        >>> from marl_parallel import make
        >>> env = SkrlEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2), device="cpu")
        >>> observations, infos = env.reset(seed=1)
        >>> for _ in range(25):
        ...     actions = {agent: torch.zeros(4, 1, dtype=torch.int64) for agent in env.agents}
        ...     observations, rewards, terminated, truncated, infos = env.step(actions)
        >>> observations["agent_0"].shape, env.state()["agent_0"].shape, terminated["agent_0"].all()
        (torch.Size([4, 18]), torch.Size([4, 54]), tensor(True))
        >>> env.close()
    """

    num_envs = 0  # pyright: ignore  # `ArrayFacade` sets it; skrl's is a property, which cannot be set

    def __init__(
        self,
        env: ParallelEnv,
        device: torch.device | str | None = None,
        *,
        with_state: bool | None = None,
        bootstrap_truncated: bool = False,
        scalarize: Scalarize | None = None,
    ) -> None:
        # Tensors are copies, so observations need not be.
        ArrayFacade.__init__(
            self, env, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, copy=False, scalarize=scalarize
        )
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP
        if bootstrap_truncated and not self._same_step:
            advice = ": pass auto_reset=True, or leave bootstrap_truncated=False"
            if self._stepper.workers is None:
                advice = ", the only mode of a simulator without workers: leave bootstrap_truncated=False"
            raise ValueError(
                "SkrlEnv needs a ParallelEnv with auto_reset=True for bootstrap_truncated=True, got "
                f'auto_reset="NEXT_STEP"{advice}'
            )
        schema, agents = self._stepper.schema, [*self._stepper.view.agents]
        if with_state is None:
            with_state = schema.state_space is not None
        if with_state:
            self._stepper.batch.write_states()
        self._state_space: Any = schema.state_space if with_state else None
        MultiAgentEnvWrapper.__init__(
            self,
            SimpleNamespace(
                num_envs=env.num_envs,
                num_agents=len(agents),
                agents=agents,
                possible_agents=agents,
                observation_spaces={agent: from_zero(schema.observation_spaces[agent]) for agent in agents},
                action_spaces={agent: from_zero(schema.action_spaces[agent]) for agent in agents},
                state_space=from_zero(self._state_space) if with_state else None,
                device=device,
            ),
        )
        self._env = env
        self._bootstraps = bootstrap_truncated
        declared = schema.observation_spaces
        self._moved = {agent: declared[agent] for agent in agents if starts_elsewhere(declared[agent])}
        for kind, spaces in (("observation", self.observation_spaces), ("action", self.action_spaces)):
            for agent in agents:
                _check_space(f"the {kind} space of agent {agent!r}", spaces[agent])
        if with_state:
            _check_space("the state_space", self.state_spaces[agents[0]])
        self._state: torch.Tensor | None = None
        self._present = self._acting = np.zeros((self.num_envs, len(agents)), np.bool_)
        self._were_over = np.zeros(self.num_envs, np.bool_)  # before the latest step
        # The arrays of the latest `load_state`, and infos by environment: the next `reset` begins no episode there.
        self._loaded: Arrays | None = None
        self._resumed: dict[int, Any] = {}

    @property
    def present(self) -> Tensors:
        """By agent, bool `(num_envs, 1)`: where it was observed or rewarded at the latest reset or step."""
        return self._by_agent(self._present)

    @property
    def acting(self) -> Tensors:
        """By agent, bool `(num_envs, 1)`: where it acts next; its other actions are ignored."""
        return self._by_agent(self._acting)

    def state(self) -> dict[Any, torch.Tensor | None]:
        """By agent, the global state after the latest reset or step: one tensor `(num_envs, size)` for all of them.

        In the step that ends an episode, it is the first state of the next one. None without states.
        """
        return dict.fromkeys(self.agents, self._state)

    def __getattr__(self, key: str) -> Any:
        if key in ("_env", "_unwrapped"):  # not set yet, in a copy of this object
            raise AttributeError(key)
        return MultiAgentEnvWrapper.__getattr__(self, key)

    # -- resets and loads ----------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> FirstReturn:
        """Begin new episodes; returns observations and infos.

        The first reset after `load_state`, before any step, begins none in the loaded environments: see there.
        Arguments and errors are as in `ArrayFacade.reset`.
        """
        arrays, ids = self._loaded, self._stepper.batch.checked_ids(env_ids)
        resumed: dict[int, Any] = {}
        if seed is None and options is None and self._resumed:
            self._stepper.batch.check_idle("reset")
            resumed = {one: infos for one, infos in self._still_loaded().items() if one in ids}
        try:
            if not resumed or arrays is None:
                arrays = self._stepper.reset(seed, options, env_ids)
            elif others := [one for one in ids if one not in resumed]:
                arrays = self._stepper.reset(None, None, others)
        except ResultDoesNotFit:  # all have been reset
            self._resumed = {}
            raise
        self._loaded, self._resumed = None, {}
        observations, infos = self._first(arrays)
        return observations, infos | {one: of_env for one, of_env in resumed.items() if of_env}

    def reset_async(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> None:
        """Begin new episodes, also right after `load_state`, and return; see `ArrayFacade.reset_async`."""
        super().reset_async(seed, options, env_ids)
        self._loaded, self._resumed = None, {}

    @exclusive("load_state")
    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> FirstReturn:
        """Go on from what `save_state` has returned; arguments and errors are as in `ParallelEnv.load_state`.

        Trainers begin with a reset. So the next `reset` without a seed and options, before any step, begins no new
        episode in these environments: it returns what this method returns. An episode that is over is reset.

        Returns what `reset` returns: of the latest step or reset at that time.
        """
        earlier = self._still_loaded()
        arrays, loaded = self._stepper.load_state(states, env_ids)
        observations, infos = self._first(arrays)
        over = self._stepper.transitions.over
        going_on = {one: copy.deepcopy(infos.get(one)) for one in loaded if not over[one]}  # the caller may change them
        others = {one: of_env for one, of_env in earlier.items() if one not in loaded}
        self._loaded, self._resumed = arrays, others | going_on
        return observations, infos

    def _still_loaded(self) -> dict[int, Any]:
        """The infos of environments that have been loaded, if no step or reset has followed."""
        return self._resumed if self._stepper.latest is self._loaded else {}

    # -- actions -------------------------------------------------------------------------------------------------------

    def _actions(self, actions: Any) -> list[Stacked]:
        if not isinstance(actions, Mapping) or actions.keys() != {*self.agents}:
            got = f"the keys {[*actions]}" if isinstance(actions, Mapping) else type(actions).__name__
            raise ValueError(f"expected a dict of actions by agent, with the keys {self.agents}; got {got}")
        stacks = [Stacked((agent,), self._actions_of(agent, actions[agent])) for agent in self.agents]
        if not self._stepper.in_flight:  # else this step is refused
            self._resumed = {}
            if not self._same_step:
                self._were_over = self._are_over()
        return stacks

    def _actions_of(self, agent: Any, values: Any) -> Any:
        space, num_envs = self.action_spaces[agent], self.num_envs
        shape = num_envs, compute_space_size(space, occupied_size=True)
        flat = torch.as_tensor(values).detach().cpu()
        if flat.shape[:1] != (num_envs,) or flat.numel() != shape[0] * shape[1]:
            raise ValueError(f"expected actions of agent {agent!r} of shape {shape}, got {tuple(flat.shape)}")
        flat = flat.reshape(shape)
        if flat.dtype == torch.bfloat16:  # which NumPy does not have
            flat = flat.float()

        def of_leaf(leaf: Space[Any], part: torch.Tensor) -> Any:
            return stacking.whole(leaf, part.numpy().reshape(num_envs, *(leaf.shape or ())))

        parts = tree_map(of_leaf, space, unflatten_tensorized_space(space, flat))
        return to_start(self._stepper.schema.action_spaces[agent], stacked(space, parts, num_envs, 1))

    # -- results -------------------------------------------------------------------------------------------------------

    def _first(self, arrays: Arrays) -> FirstReturn:
        return self._latest(arrays), dict(arrays.infos)

    def _results(self, arrays: Arrays) -> StepReturn:
        observations, infos = self._latest(arrays), dict[Any, Any](arrays.infos)
        terminated, truncated = map(self._by_agent, self._flags(arrays))
        over = arrays.terminated | arrays.truncated
        if over.any():
            infos["episode"] = self._episode()
        if self._bootstraps:
            infos["transition"] = self._transition(arrays, over, observations)
        return observations, self._by_agent(arrays.rewards, torch.float32), terminated, truncated, infos

    def _latest(self, arrays: Arrays) -> Tensors:
        """The latest observations; sets the attributes that describe the latest reset or step."""
        self._present, self._acting = arrays.present, arrays.acting
        if self._state_space is not None:
            self._state = self._of_states(self._stepper.batch.states_seen()[0])
        shown = arrays.observed & arrays.alive
        return self._observations(arrays.observations, shown if self._same_step else shown & ~self._are_over()[:, None])

    def _are_over(self) -> NDArray[np.bool_]:
        """The environments whose next step begins an episode, with NEXT_STEP."""
        return np.array(self._stepper.transitions.over, np.bool_)

    def _transition(self, arrays: Arrays, over: NDArray[np.bool_], observations: Tensors) -> dict[str, Any]:
        """What the step led to before resets, under the names of arguments of `record_transition`."""
        state, lived = self._state, ~arrays.were_dead
        if arrays.ended.any():
            observations = self._observations(arrays.observations, arrays.observed & lived)
        if over.any():
            is_over = torch.tensor(over[:, None], device=self.device)
            finals = self._observations(arrays.final_observations, arrays.finally_observed & lived)
            observations = {agent: torch.where(is_over, finals[agent], observations[agent]) for agent in self.agents}
            if state is not None:
                state = torch.where(is_over, self._of_states(self._stepper.batch.states_seen()[1]), state)
        return {"next_observations": observations, "next_states": dict.fromkeys(self.agents, state)}

    def _observations(self, groups: Sequence[Any], shown: NDArray[np.bool_]) -> Tensors:
        """Observations by agent; zeros except for the agents that are `shown`, `(num_envs, agents)`."""
        by_agent, spaces, device = self._stepper.view.by_agent([*groups]), self.observation_spaces, self.device
        for agent, space in self._moved.items():
            by_agent[agent] = to_zero(space, by_agent[agent])
        tensors = {agent: _tensor(spaces[agent], by_agent[agent], device) for agent in self.agents}
        for column in np.flatnonzero(~shown.all(axis=0)).tolist():
            tensors[self.agents[column]][torch.tensor(~shown[:, column], device=device)] = 0
        return tensors

    def _of_states(self, states: NDArray[Any]) -> torch.Tensor:
        return _tensor(self.state_spaces[self.agents[0]], to_zero(self._state_space, states), self.device)

    def _by_agent(self, array: NDArray[Any], dtype: torch.dtype = torch.bool) -> Tensors:
        """The columns of an array `(num_envs, agents)`, each as a new tensor `(num_envs, 1)`."""
        columns = torch.tensor(array.T[..., None], dtype=dtype, device=self.device)
        return dict(zip(self.agents, columns.unbind()))

    def _flags(self, arrays: Arrays) -> Flags:
        """What skrl gets as terminated and truncated, `(num_envs, agents)`."""
        if not arrays.plain:  # a flag of an agent that was dead before is that of an earlier step
            kept = {name: getattr(arrays, name) & ~arrays.were_dead for name in ("terminations", "truncations")}
            arrays = arrays.changed(**kept)
        terminated, truncated = inherited_flags(arrays, np.ones_like(arrays.terminations))
        if not self._bootstraps:
            begins = not self._same_step and self._were_over[:, None]  # no action counted in this step
            return terminated | truncated | begins, np.zeros_like(truncated)
        if truncated.any():
            over, has_last = arrays.terminated | arrays.truncated, arrays.observed
            if over.any():
                has_last = np.where(over[:, None], arrays.finally_observed, has_last)
            terminated = terminated | (truncated & ~(has_last & ~arrays.were_dead))
        return terminated, truncated & ~terminated

    def _episode(self) -> dict[str, torch.Tensor]:
        """The means over the episodes that have ended, by the names under which skrl logs them."""
        finished = self._stepper.transitions.statistics.finished
        values: dict[str, list[Any]] = {"Episode / Length": [one.length for one in finished]}
        for agent in self.agents:
            returns = [one.returns[agent] for one in finished if agent in one.returns]
            if returns and not np.ndim(returns[0]):
                values[f"Episode / Return ({agent})"] = returns
        return {name: torch.tensor(np.mean(numbers), dtype=torch.float32) for name, numbers in values.items()}


def _tensor(space: Any, values: Any, device: torch.device | str) -> torch.Tensor:
    """Stacked values of a space as a new tensor `(number of values, size)`."""
    tensor: Any = flatten_tensorized_space(tensorize_space(space, values, device=device))
    return tensor  # type: ignore[no-any-return,unused-ignore]


def _check_space(whose: str, space: Any) -> None:
    """Raise `ValueError` if skrl has no tensors for a space, or makes two values of it a tensor of another shape."""
    try:
        shape = 2, compute_space_size(space, occupied_size=True)
        made = _tensor(space, stacking.zeros(space, (2,)), "cpu")
        made_again: Any = flatten_tensorized_space(unflatten_tensorized_space(space, torch.zeros(shape)))
        if not made.shape == made_again.shape == shape:
            raise ValueError(f"two values become shape {tuple(made.shape)}, not {shape}")
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"skrl has no tensors for {whose}, {space}: {error}") from None
