"""JaxMARL as a `NativeSimulator`: many environments of one kind, stepped at once by compiled functions of JAX.

Keys of JAX's generators: environment i begins with `jax.random.PRNGKey(seed)` of its seed. Each reset and each step
takes `key, own = jax.random.split(key)`, and passes `own` to the environment's `reset` or `step_env`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.transition import ALL
from marl_parallel.sources.native import EnvIds, NativeSimulator, Received
from marl_parallel.types import how_to_install

try:
    import jax
    import jaxmarl
    from jax import numpy as jnp
except ImportError as failed:
    raise ImportError(
        f"this simulator needs JaxMARL, which cannot be imported ({failed}): {how_to_install('jaxmarl')}"
    ) from failed

__doctest_requires__ = ["jaxmarl"]


def open_pool(name: str, num_envs: int, seeds: Sequence[int], arguments: Mapping[str, Any]) -> JaxMarlPool:
    """Make environments; `arguments` are those of `jaxmarl.make`.

    Raises:
        ValueError: JaxMARL has no environment of this name.
    """
    names = jaxmarl.registered_envs
    if name not in names:
        near = ", ".join(difflib.get_close_matches(name, names))
        hint = f"; similar names are {near}" if near else ""
        raise ValueError(f"JaxMARL has no environment {name!r}{hint}. It has {', '.join(names)}")
    return JaxMarlPool(jaxmarl.make(name, **arguments), num_envs, seeds, f"JaxMARL's {name}")


class JaxMarlPool(NativeSimulator):
    """Environments of a JaxMARL `MultiAgentEnv`.

    An episode ends where `dones["__all__"]` is True, which counts as a termination: JaxMARL reports no truncations.
    The environment's infos are under `__common__`. So are observations whose keys are not agents, such as the
    `world_state` of SMAX (infos of first observations are then zeros). `get_avail_actions` and `get_legal_moves` are
    action masks. Where returned observations do not match a declared space, the space gets their dtype and shape.

    Args:
        env: Made by `jaxmarl.make`.
        num_envs: The number of environments.
        seeds: The seed of each environment; None for 0, 1, ...
        name: The name in error messages.

    Example:
        >>> from marl_parallel import ParallelEnv
        >>> env = ParallelEnv.from_native(JaxMarlPool(jaxmarl.make("MPE_simple_spread_v3"), num_envs=4))
        >>> observations, _ = env.reset()
        >>> len(observations), observations[0]["agent_0"].shape
        (4, (18,))
        >>> env.close()
    """

    reseeds = True
    metadata: Mapping[str, Any] = MappingProxyType({})
    render_mode = None

    def __init__(self, env: Any, num_envs: int, seeds: Sequence[int] | None = None, name: str = "JaxMARL") -> None:
        self.name, self.num_envs, self.batch_size, self._env = name, num_envs, num_envs, env
        agents: list[AgentID] = [*env.agents]
        seen, state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        observed = {agent: _observed_space(env.observation_space(agent), seen[agent]) for agent in agents}
        acted = {agent: _action_space(env.action_space(agent)) for agent in agents}
        self.schema = Schema(agents, observed, acted, None)
        self._extras = [key for key in seen if key not in observed]
        self._groups, self._action_groups = (
            [[agents[at] for at in positions] for _, positions in alike(declared, agents)]
            for declared in (observed, acted)
        )
        self._no_actions = [_zeros(acted[members[0]], (num_envs, len(members))) for members in self._action_groups]
        self._masks_of = _masks_function(env, state, acted)
        self._all = np.arange(num_envs, dtype=np.int32)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, np.bool_)
        self._reset_all, self._step_all, self._change_some = (
            jax.jit(jax.vmap(one)) for one in (self._reset_one, self._step_one, self._change_one)
        )
        self._states: Any = None
        self._pending: tuple[EnvIds, Any] | None = None
        self.reseed([*range(num_envs)] if seeds is None else seeds)

    # -- one environment, for JAX to compile -----------------------------------------------------------------------

    def _reset_one(self, key: Any) -> tuple[Any, Any, dict[str, Any]]:
        key, subkey = jax.random.split(key)
        observations, state = self._env.reset(subkey)
        return key, state, self._seen(observations, state)

    def _step_one(self, key: Any, state: Any, actions: list[Any]) -> tuple[Any, Any, dict[str, Any]]:
        key, subkey = jax.random.split(key)
        by_agent = {
            agent: stacked[row]
            for members, stacked in zip(self._action_groups, actions)
            for row, agent in enumerate(members)
        }
        observations, state, rewards, dones, infos = self._env.step_env(subkey, state, by_agent)
        agents = self.schema.possible_agents
        results = self._seen(observations, state)
        results["rewards"] = jnp.stack([jnp.asarray(rewards[agent], jnp.float32).reshape(()) for agent in agents])
        results["dones"] = jnp.stack([jnp.asarray(dones[agent], bool).reshape(()) for agent in agents])
        results["over"] = jnp.asarray(dones[ALL], bool).reshape(())
        results["infos"] = infos
        return key, state, results

    def _change_one(
        self, key: Any, state: Any, actions: list[Any], steps: Any, begins: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Step an environment, or begin its next episode, or leave it as it is."""
        new_key, stepped, results = self._step_one(key, state, actions)
        _, begun, first = self._reset_one(key)
        first = {name: first.get(name, jax.tree.map(jnp.zeros_like, values)) for name, values in results.items()}

        def chosen(mask: Any, ours: Any, others: Any) -> Any:
            return jax.tree.map(lambda one, other: jnp.where(mask, one, other), ours, others)

        changes = steps | begins
        new_state = chosen(changes, chosen(begins, begun, stepped), state)
        return chosen(changes, new_key, key), new_state, chosen(begins, first, results)

    def _seen(self, observations: Mapping[str, Any], state: Any) -> dict[str, Any]:
        seen = {
            "observations": [
                jax.tree.map(lambda *values: _number(jnp.stack(values)), *[observations[agent] for agent in members])
                for members in self._groups
            ],
            "extras": {key: observations[key] for key in self._extras},
        }
        if self._masks_of is not None:
            masks = self._masks_of(state)
            seen["masks"] = [jnp.stack([masks[agent] for agent in members]) for members in self._action_groups]
        return seen

    # -- all environments ------------------------------------------------------------------------------------------

    def reset(self, env_ids: EnvIds) -> None:
        self._start(self._no_actions, env_ids, np.ones(len(env_ids), np.bool_))

    def reseed(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self._keys = jax.vmap(jax.random.PRNGKey)(np.array(seeds, np.int32))

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        # Copies: JAX reads them while the caller may write into its arrays again.
        by_number = [nothing.copy() for nothing in self._no_actions]
        for ordered, stacked in zip(by_number, actions):
            ordered[env_ids] = stacked
        self._start(by_number, env_ids, self._over[env_ids])

    def _start(self, actions: list[Any], env_ids: EnvIds, begins: NDArray[np.bool_]) -> None:
        """Begin to step environments, or their next episodes."""
        everyone = len(env_ids) == self.num_envs
        if self._states is None or (everyone and begins.all()):
            self._keys, self._states, results = self._reset_all(self._keys)
        elif everyone and not begins.any():
            self._keys, self._states, results = self._step_all(self._keys, self._states, actions)
        else:
            of_all = np.zeros((2, self.num_envs), np.bool_)
            of_all[0, env_ids], of_all[1, env_ids] = ~begins, begins
            self._keys, self._states, results = self._change_some(self._keys, self._states, actions, *of_all)
        self._elapsed[env_ids] = np.where(begins, 0, self._elapsed[env_ids] + 1)
        self._pending = env_ids, results

    def receive(self) -> Received:
        assert self._pending is not None
        (env_ids, results), self._pending = self._pending, None
        in_order = env_ids.tobytes() == self._all.tobytes()

        def array(values: Any) -> NDArray[Any]:
            return np.array(values) if in_order else np.asarray(values)[env_ids]

        got = jax.tree.map(array, results)
        count, elapsed = len(env_ids), self._elapsed[env_ids]
        if "over" in got:
            rewards, dones, over = got["rewards"], got["dones"], got["over"]
        else:
            dones = np.zeros((count, len(self.schema.possible_agents)), np.bool_)
            rewards, over = dones.astype(np.float32), np.zeros(count, np.bool_)
        self._over[env_ids] = over
        common = {**got["extras"], **got.get("infos", {})}
        informed = None if self._extras else elapsed != 0
        return Received(
            env_ids, got["observations"], rewards, dones, np.zeros_like(dones), over, np.zeros_like(over), elapsed,
            None, {}, common, action_masks=got.get("masks"), informed=informed,
        )  # fmt: skip

    def render(self) -> Sequence[Any]:
        return [None] * self.num_envs

    def attribute(self, name: str) -> Any:
        return getattr(self._env, name)

    def close(self) -> None:
        self._keys = self._states = self._pending = None

    def abandon(self) -> None:
        pass


def _masks_function(env: Any, state: Any, acted: Mapping[AgentID, Space[Any]]) -> Any:
    """The function of a state that returns the action mask of each agent; None if there is none."""
    for name in ("get_avail_actions", "get_legal_moves"):
        try:
            masks = jax.eval_shape(getattr(env, name), state)
        except (AttributeError, NotImplementedError):
            continue
        if all(agent in masks and masks[agent].shape == (getattr(acted[agent], "n", None),) for agent in acted):
            return getattr(env, name)
    return None


def _number(values: Any) -> Any:
    return values.astype(jnp.uint8) if values.dtype == bool else values


def _zeros(space: Space[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Actions of zeros, in JAX's dtype."""
    dtype = np.dtype(np.int32 if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else space.dtype)
    return np.zeros((*shape, *(space.shape or ())), dtype)


def _observed_space(declared: Any, seen: Any) -> Space[Any]:
    """The space with the shape and dtype of the observations `seen`, and the declared bounds if they fit."""
    if isinstance(seen, Mapping):
        parts = getattr(declared, "spaces", declared)
        return spaces.Dict([(key, _observed_space(parts[key], part)) for key, part in seen.items()])
    dtype, kind = np.dtype(np.uint8 if seen.dtype == bool else seen.dtype), type(declared).__name__
    if kind == "Discrete" and seen.shape == ():
        return spaces.Discrete(int(declared.n))
    if kind == "MultiDiscrete" and seen.shape == declared.shape:
        return spaces.MultiDiscrete(np.array(declared.num_categories), dtype=dtype.type)
    limits: Any = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low, high = (np.full(seen.shape, limit, dtype) for limit in limits)
    if kind == "Box" and np.dtype(declared.dtype) == dtype:
        bounds = np.asarray(declared.low), np.asarray(declared.high)
        if all(bound.shape in ((), seen.shape) for bound in bounds):
            low, high = (np.broadcast_to(bound, seen.shape).astype(dtype) for bound in bounds)
    return spaces.Box(low, high, seen.shape, dtype.type)


def _action_space(declared: Any) -> Space[Any]:
    kind = type(declared).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(declared.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(declared.num_categories))
    if kind == "Box":
        low, high = (np.broadcast_to(bound, declared.shape) for bound in (declared.low, declared.high))
        return spaces.Box(low, high, declared.shape, np.dtype(declared.dtype).type)
    raise ValueError(f"JaxMARL declares the action space {declared}, which cannot be converted to arrays")
