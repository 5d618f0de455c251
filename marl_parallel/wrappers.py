"""Wrappers for `make(..., wrappers=[...])`, which are called with an environment and return one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.action_masks import KEY, mask_of
from marl_parallel.adapters import AgentID, Dicts, MultiAgentEnv, adapt
from marl_parallel.arguments import checked_integer
from marl_parallel.core.block.joining import padded_array, padded_space


def pad_spaces(
    env: Any, shape: Sequence[int] | Mapping[str, Sequence[int]] = (), num_actions: int = 0
) -> MultiAgentEnv:
    """Pad the agents' observations and actions, so that all have equal spaces.

    With `shape` and `num_actions`, agents of different environments get equal spaces, too, such as on maps of different
    sizes: `functools.partial(pad_spaces, shape=(80,), num_actions=12)`.

    Pass it as the last of the `wrappers`, since it returns a `MultiAgentEnv`.

    - `Box` observations of one dtype and number of axes are padded with zeros after their values, up to the longest
      agent's along each axis. The bounds of the padded space contain all agents' values, and 0. In `Dict`
      observations, each entry is padded; all agents need the same keys. Entries `"action_mask"` become as long as the
      largest action space. Other observation spaces must be equal.
    - `Discrete` actions get the largest agent's number of actions. An action that its agent does not have becomes its
      first action, as in SuperSuit's `pad_action_space`; other actions reach the environment as they are. Other action
      spaces must be equal.
    - If actions are padded, agents get masks: 0 for the actions that an agent does not have; for the others, the
      environment's own mask, or 1. The mask is the entry `"action_mask"` of observations if they are `Dict`s with such
      an entry, else `infos[i][agent]["action_mask"]`, int8, of each agent that is observed. Kinds of environments with
      masks of their own, such as PyMARL's, report them as before. So `env.action_masks` has these masks, and policies
      that follow masks never choose a padded action.

    Args:
        env: An environment of any kind that `ParallelEnv` recognises, whose agents all declare both spaces.
        shape: The least shape of `Box` observations; in `Dict` observations, of the entries with these keys.
        num_actions: The least number of `Discrete` actions.

    Raises:
        ValueError: Spaces differ in more than lengths or numbers of actions; an agent has no space; there is no `Box`
            for `shape`, or it has another number of axes; or there are no `Discrete` actions for `num_actions`.

    Example:
        >>> import gymnasium
        >>> from marl_parallel import make
        >>> class Tag(gymnasium.Env):
        ...     possible_agents = ["cat", "mouse"]
        ...     observation_space = spaces.Dict(cat=spaces.Box(0, 1, (3,)), mouse=spaces.Box(0, 1, (2,)))
        ...     action_space = spaces.Dict(cat=spaces.Discrete(2), mouse=spaces.Discrete(5))
        ...     def reset(self, *, seed=None, options=None):
        ...         return {"cat": np.ones(3, np.float32), "mouse": np.ones(2, np.float32)}, {}
        >>> with make(Tag, wrappers=[pad_spaces], backend="serial") as env:
        ...     observations, infos = env.reset()
        ...     observations[0]["mouse"], env.action_space["cat"], env.action_masks[0]["cat"].astype(int)
        (array([1., 1., 0.], dtype=float32), Discrete(5), array([1, 1, 0, 0, 0]))
    """
    return _Padded(adapt(env), shape, num_actions)


class _Padded(MultiAgentEnv):
    def __init__(
        self, env: MultiAgentEnv, shape: Sequence[int] | Mapping[str, Sequence[int]], num_actions: int
    ) -> None:
        self._env, self.source = env, env.source
        for name in (
            "rules", "seeded_when_made", "options_last", "needs_all_actions", "all_may_act", "observes_turn",
            "check_options", "possible_agents", "reward_spaces", "state_space", "state_per_agent", "metadata",
            "render_mode", "reset_keywords", "agents_left", "alive", "turn",
        ):  # fmt: skip
            setattr(self, name, getattr(env, name))
        agents = env.possible_agents
        for what, declared in (("observation", env.observation_spaces), ("action", env.action_spaces)):
            if not agents or not {*agents} <= {*declared}:
                raise ValueError(
                    f"pad_spaces needs an {what} space of each agent, but only {[*declared]} of {agents} have one"
                )
        self._own = {agent: env.action_spaces[agent] for agent in agents}
        own: list[Any] = [*self._own.values()]
        checked_integer(num_actions, "num_actions", 0)
        if num_actions and not isinstance(own[0], spaces.Discrete):
            raise ValueError(f"num_actions={num_actions!r} is for Discrete actions, but the action space is {own[0]}")
        least = [spaces.Discrete(num_actions, start=own[0].start)] if num_actions else []
        acts = _padded_space("Discrete actions with equal starts", [*own, *least], spaces.Discrete)
        is_padded = any(space != acts for space in self._own.values())
        self._num_actions = int(acts.n) if is_padded else 0
        self.mask_spaces = env.mask_spaces
        if is_padded:
            self.mask_spaces = dict.fromkeys(env.mask_spaces, spaces.MultiBinary(self._num_actions))
        masked = int(acts.n) if is_padded or num_actions else 0
        seen = [_with_masks_of(masked, space) for space in env.observation_spaces.values()]
        if len(shape := _checked_shape(shape)):
            seen.append(_at_least(seen[0], shape))
        sees = _padded_space("Box observations of one dtype and number of axes", seen, spaces.Box, spaces.Dict)
        self._masks_in_infos = is_padded and not (isinstance(sees, spaces.Dict) and KEY in sees.spaces)
        self._reports_masks = is_padded and bool(env.mask_spaces)
        self._sees = sees
        self.observation_spaces, self.action_spaces = dict.fromkeys(agents, sees), dict.fromkeys(agents, acts)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        return self._padded(*self._env.reset(**keywords))

    def step(self, actions: dict[Any, Any]) -> Dicts:
        if self._num_actions:
            actions = {agent: self._own_action(agent, action) for agent, action in actions.items()}
        observations, rewards, terminateds, truncateds, infos = self._env.step(actions)
        observations, infos = self._padded(observations, infos)
        return observations, rewards, terminateds, truncateds, infos

    def _own_action(self, agent: AgentID, action: Any) -> Any:
        space: Any = self._own.get(agent)
        return action if space is None or action is None or action < space.start + space.n else space.start

    def _padded(self, observations: Any, infos: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        if self._masks_in_infos:
            infos = {**infos}
            # Masks that the environment does not report in infos are in infos only at the end of an episode.
            for agent in infos if self._reports_masks else observations:
                info = infos.get(agent) or {}
                mask = mask_of(None, info)
                if mask is None and self._reports_masks:
                    continue
                mask = np.ones(self._own[agent].n, np.int8) if mask is None else mask.astype(np.int8)  # type: ignore[attr-defined]
                infos[agent] = {**info, KEY: padded_array(mask, (self._num_actions,))}
        return {agent: _padded_value(self._sees, seen) for agent, seen in observations.items()}, infos

    def masks(self) -> Mapping[AgentID, Any]:
        masks = self._env.masks()
        if not self._reports_masks:
            return masks
        return {agent: padded_array(np.asarray(mask, np.int8), (self._num_actions,)) for agent, mask in masks.items()}

    def render(self) -> Any:
        return self._env.render()

    def state(self) -> Any:
        return self._env.state()

    def close(self) -> None:
        self._env.close()


def _padded_space(what: str, parts: Sequence[Any], *kinds: type) -> Any:
    try:
        return padded_space(parts, kinds)
    except ValueError as error:
        raise ValueError(f"pad_spaces pads {what}, but {error}") from None


def _checked_shape(shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {key: _checked_shape(of_key) for key, of_key in shape.items()}
    if not isinstance(shape, Sequence | np.ndarray) or isinstance(shape, str):
        raise TypeError(f"shape must be a sequence of integers, or a dict of such sequences, got {shape!r}")
    return tuple([checked_integer(size, "each size of shape", 0) for size in shape])


def _at_least(space: Any, shape: Any) -> Any:
    """A space like this one, in which the `Box`, or each entry with a key of `shape`, has the least shape."""
    if isinstance(space, spaces.Dict) and isinstance(shape, Mapping) and {*shape} <= {*space}:
        return spaces.Dict(
            [(key, _at_least(part, shape[key]) if key in shape else part) for key, part in space.items()]
        )
    if not isinstance(space, spaces.Box) or isinstance(shape, Mapping) or len(shape) != len(space.shape):
        raise ValueError(
            f"shape={shape!r} does not fit the observation space {space}: pass one size for each axis of a Box, or a "
            "dict of such shapes for entries of a Dict"
        )
    return spaces.Box(0, 0, tuple(shape), space.dtype)


def _with_masks_of(size: int, space: Any) -> Any:
    """An observation space whose entries `"action_mask"` have this length; 0 leaves them as they are."""
    if not isinstance(space, spaces.Dict) or not size:
        return space
    parts = {key: _with_masks_of(size, part) for key, part in space.items()}
    if len(getattr(parts.get(KEY), "shape", None) or ()) == 1:
        parts[KEY] = spaces.Box(0, 1, (size,), parts[KEY].dtype)
    return spaces.Dict([*parts.items()])


def _padded_value(space: Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {key: _padded_value(space[key], part) if key in space.spaces else part for key, part in value.items()}
    return padded_array(np.asarray(value), space.shape) if isinstance(space, spaces.Box) else value
