"""VMAS as a `NativeSimulator`: many environments of one scenario, stepped at once in tensors of torch.

On the CPU, arrays of observations, rewards and infos share the memory of VMAS's tensors, or of their stack. The
tensors of `StackedVecEnv.torch` share the memory of these arrays.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import tree_map
from marl_parallel.sources.native import EnvIds, NativeSimulator, Received
from marl_parallel.types import how_to_install

try:
    import torch
    import vmas
except ImportError as failed:
    raise ImportError(
        f"this simulator needs VMAS, which cannot be imported ({failed}): {how_to_install('vmas')}"
    ) from failed

__doctest_requires__ = ["vmas"]


def open_pool(scenario: str, num_envs: int, seeds: Sequence[int], arguments: Mapping[str, Any]) -> VmasPool:
    """Make the environments of a scenario; `arguments` are those of `vmas.make_env`, and `render_mode`.

    Raises:
        ValueError: VMAS has no such scenario.
        TypeError: `arguments` has an argument that is set here.
    """
    names = [*vmas.scenarios, *vmas.debug_scenarios, *vmas.mpe_scenarios]
    if scenario not in names:
        near = ", ".join(difflib.get_close_matches(scenario, names))
        hint = f"; similar scenarios are {near}" if near else ""
        raise ValueError(f"VMAS has no scenario {scenario!r}{hint}. It has {', '.join(sorted(names))}")
    fixed = {
        "num_envs": num_envs,
        "seed": seeds[0],
        "dict_spaces": False,
        "terminated_truncated": True,
        "wrapper": None,
    }
    for name in fixed:
        if name in arguments:
            raise TypeError(f"env_kwargs has {name!r}, which this package sets for VMAS: leave it out")
    keywords = dict(arguments)
    render_mode = keywords.pop("render_mode", None)
    return VmasPool(vmas.make_env(scenario, **keywords, **fixed), seeds, f"VMAS's {scenario}", render_mode)


class VmasPool(NativeSimulator):
    """The environments of one VMAS `Environment`.

    VMAS steps all environments at once, and begins new episodes one at a time, unless all begin together. One
    generator draws for all VMAS environments of the process: the seed of environment 0 seeds it.

    Args:
        env: Made by `vmas.make_env(..., terminated_truncated=True, dict_spaces=False)`. Nothing else may step it.
        seeds: The seed of each environment; the first one is VMAS's.
        name: The name in error messages.
        render_mode: `"rgb_array"`, or None for no frames.

    Example:
        >>> from marl_parallel import ParallelEnv
        >>> env = ParallelEnv.from_native(VmasPool(vmas.make_env("balance", num_envs=4, terminated_truncated=True)))
        >>> observations, _ = env.reset(seed=1)
        >>> len(observations), observations[0]["agent_0"].shape
        (4, (16,))
        >>> env.close()
    """

    steps_some = False
    reseeds = True

    def __init__(
        self, env: Any, seeds: Sequence[int] | None = None, name: str = "VMAS", render_mode: str | None = None
    ) -> None:
        if not env.terminated_truncated or env.dict_spaces:
            raise ValueError("the VMAS environment must be made with terminated_truncated=True and dict_spaces=False")
        self.name, self.num_envs, self.batch_size = name, env.num_envs, env.num_envs
        self.seeds = [0] * env.num_envs if seeds is None else seeds
        self.metadata, self.render_mode = {"render_modes": ["rgb_array"]}, render_mode
        self._env = env
        agents: list[AgentID] = [agent.name for agent in env.agents]
        observed, acted = (
            {agent: _space_of(space) for agent, space in zip(agents, of_all)}
            for of_all in (env.observation_space, env.action_space)
        )
        self.schema = Schema(agents, observed, acted, None)
        self._groups, self._action_groups = (
            [positions for _, positions in alike(declared, agents)] for declared in (observed, acted)
        )
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._received: Received | None = None

    def reset(self, env_ids: EnvIds) -> None:
        self._received = self._first(env_ids, self._reset(env_ids))

    def reseed(self, seeds: Sequence[int]) -> None:
        self._env.seed(seeds[0])
        self.seeds = seeds

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        begins = self._over
        if begins.all():
            self._received = self._first(self._all, self._reset(self._all))
            return
        by_agent: list[torch.Tensor] = [torch.empty(0)] * len(self.schema.possible_agents)
        for positions, stacked in zip(self._action_groups, actions):
            ordered = np.empty_like(stacked)  # a copy; rows of environments that begin are zeros, which VMAS accepts
            ordered[env_ids] = stacked
            ordered[begins] = 0
            for row, position in enumerate(positions):
                by_agent[position] = torch.from_numpy(ordered[:, row])
        observations, rewards, terminated, truncated, infos = self._env.step(by_agent)
        self._elapsed += 1
        paid = _array(torch.stack(rewards, dim=1))
        flags = _array(terminated), _array(truncated)
        informed = None
        if begins.any():
            first = self._reset(np.flatnonzero(begins).astype(np.int32))
            where = torch.from_numpy(begins).to(self._env.device)
            observations = [_chosen(where, new, old) for new, old in zip(first, observations)]
            paid[begins] = 0.0
            flags = flags[0] & ~begins, flags[1] & ~begins
            informed = ~begins
            infos = [tree_map(lambda tensor: _chosen(where, torch.zeros_like(tensor), tensor), info) for info in infos]
        self._received = self._of(self._all, observations, paid, *flags, _columns(infos), informed)

    def receive(self) -> Received:
        received, self._received = self._received, None
        assert received is not None
        return received

    def _reset(self, env_ids: EnvIds) -> list[Any]:
        """Begin new episodes; returns the observations of all environments."""
        self._elapsed[env_ids] = 0
        self._over = self._over.copy()
        self._over[env_ids] = False
        if len(env_ids) == self.num_envs:
            observations: list[Any] = self._env.reset()
            return observations
        for env_id in env_ids.tolist():
            self._env.reset_at(env_id, return_observations=False)
        kinds = {"get_rewards": False, "get_infos": False, "get_dones": False}
        return self._env.get_from_scenario(get_observations=True, **kinds)[0]  # type: ignore[no-any-return]

    def _first(self, env_ids: EnvIds, observations: list[Any]) -> Received:
        """The first observations of environments, without infos."""
        no, rewards = np.zeros(len(env_ids), np.bool_), np.zeros((len(env_ids), len(observations)), np.float32)
        if len(env_ids) < self.num_envs:
            rows = torch.from_numpy(env_ids).to(self._env.device, torch.int64)
            observations = [tree_map(lambda tensor: tensor[rows], of_agent) for of_agent in observations]
        return self._of(env_ids, observations, rewards, no, no.copy(), {}, None)

    def _of(
        self, env_ids: EnvIds, observations: list[Any], rewards: NDArray[Any], terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_], infos: Any, informed: NDArray[np.bool_] | None,
    ) -> Received:  # fmt: skip
        if len(env_ids) == self.num_envs:
            self._over = terminated | truncated
        stacks = [
            tree_map(lambda *tensors: _array(torch.stack(tensors, dim=1)), *[observations[at] for at in positions])
            for positions in self._groups
        ]
        terminations, truncations = (
            np.repeat(flags[:, None], len(observations), axis=1) for flags in (terminated, truncated)
        )
        return Received(
            env_ids, stacks, rewards, terminations, truncations, terminated, truncated, self._elapsed[env_ids], None,
            infos, {}, informed=informed,
        )  # fmt: skip

    def render(self) -> Sequence[Any]:
        if self.render_mode is None:
            return [None] * self.num_envs
        return [self._env.render(mode=self.render_mode, env_index=env_id) for env_id in range(self.num_envs)]

    def attribute(self, name: str) -> Any:
        return getattr(self._env, name)

    def close(self) -> None:
        self._env = None

    def abandon(self) -> None:
        pass


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array: on the CPU one that shares its memory."""
    array: NDArray[Any] = tensor.numpy(force=True)
    return array


def _columns(infos: list[dict[str, Any]]) -> Any:
    """Infos of all agents in arrays `(n, agents, ...)` by key, or a dict for each agent if they differ."""
    forms = [tree_map(lambda tensor: (tensor.shape, tensor.dtype), info) for info in infos]
    if all(form == forms[0] for form in forms):
        return tree_map(lambda *tensors: _array(torch.stack(tensors, dim=1)), *infos)
    return [tree_map(_array, info) for info in infos]


def _chosen(where: torch.Tensor, ours: Any, others: Any) -> Any:
    """Rows of one tree of tensors where a mask is True, else of another one."""

    def choose(ours: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(where.reshape(-1, *[1] * (ours.ndim - 1)), ours, other)

    return tree_map(choose, ours, others)


def _space_of(space: Any) -> Space[Any]:
    """Convert a space of gym, which VMAS uses, to Gymnasium's."""
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "Dict":
        return spaces.Dict([(key, _space_of(part)) for key, part in space.spaces.items()])
    raise ValueError(f"VMAS declares {space}, which cannot be converted to arrays of fixed size")
