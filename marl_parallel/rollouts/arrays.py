"""What a `Rollout` stores: `RolloutArrays`, and the `Current` observations that a policy acts on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from marl_parallel.core.spaces import tree_map
from marl_parallel.vector.stacked import Grouped


class Extra(NamedTuple):
    """Declares a value that is stored with each step: the learner's own, such as log-probabilities, or from infos.

    Attributes:
        shape: The shape of one agent's value, or of one environment's.
        dtype: The dtype of the value.
        per_agent: Whether each agent has a value, `(num_envs, k, *shape)`, grouped; if False, each environment has one,
            `(num_envs, *shape)`.
    """

    shape: tuple[int, ...] = ()
    dtype: Any = np.float32
    per_agent: bool = True


class Current(NamedTuple):
    """What a policy acts on, grouped as in `StackedVecEnv`. Valid until the rollout after next.

    Attributes:
        observations: Arrays or trees `(num_envs, k, ...)`.
        observed: bool `(num_envs, k)`: which rows of `observations` are data.
        acting: bool `(num_envs, k)`: which agents act. Actions of other agents are ignored.
        action_masks: bool `(num_envs, k, n)`; None without `action_masks=True`.
        state: The global states `(num_envs, *state_space.shape)`; None if the `StackedVecEnv` has none.
        env_ids: The environments that are stepped with these actions: all, or one half of them. `num_envs` above is
            their number.
        begins: bool `(num_envs, k)`: whose hidden state begins anew with this observation, as in `StackedVecEnv`.
        rngs: Only in `evaluate`: a `numpy.random.Generator` for each row, in an array of objects `(num_envs, k)`. They
            depend on the episode's seed and the agent alone, so a policy that draws from them plays the same episodes
            whatever the number of environments. None in a rollout.
    """

    observations: Grouped
    observed: Grouped
    acting: Grouped
    action_masks: Grouped | None
    state: Any
    env_ids: range
    begins: Grouped
    rngs: Grouped | None = None


class RolloutArrays(NamedTuple):
    """The data of T steps of N environments; k is the number of agents of a group. Grouped as in `StackedVecEnv`.

    Step t leads from observation t to observation t + 1. Where `done[t]` is set, with `auto_reset=True`, observation
    t + 1 is the first of the next episode.

    Attributes:
        observations: Grouped; arrays or trees `(T + 1, N, k, ...)`.
        observed: Grouped; bool `(T + 1, N, k)`: which rows of `observations` are data.
        acting: Grouped; bool `(T + 1, N, k)`: which agents act on `observations`. Train on `acting[:-1]`.
        action_masks: Grouped; bool `(T + 1, N, k, n)`; None without `action_masks=True`.
        actions: Grouped; arrays or trees `(T, N, k, ...)`.
        rewards: Grouped; float32 `(T, N, k)`.
        present: Grouped; bool `(T, N, k)`: which rows of `rewards` are data.
        terminations, truncations: Grouped; bool `(T, N, k)`: the flags of agents.
        terminated, truncated, done: bool `(T, N)`: the flags of environments, and whether one of them is set.
        final_observations: Grouped; `(T, N, k, ...)`: the last observations of episodes. Valid where `done`.
        present_final: Grouped; bool `(T, N, k)`: which rows of `final_observations` are data. Valid where `done`.
        states: `(T + 1, N, *state_space.shape)`; None without states, like `final_states`.
        final_states: `(T, N, *state_space.shape)`: the last states of episodes. Valid where `done`.
        extras: By name, the learner's own values: grouped `(T, N, k, ...)`, or `(T, N, ...)`.
        infos: By name, values from infos, in the same form; zeros where an info has no such value.
        informed: By name, bool: grouped `(T, N, k)`, or `(T, N)`: which entries of `infos` have a value.
        begins: Grouped; bool `(T + 1, N, k)`: whose hidden state begins anew with this observation, as in
            `StackedVecEnv`. `sequences` cuts there.
        policies: Grouped; int32 `(T, N, k)`: the `Policies.index` of the policy that has acted; -1 where no agent acts,
            and everywhere without `Policies`.
    """

    observations: Grouped
    observed: Grouped
    acting: Grouped
    action_masks: Grouped | None
    actions: Grouped
    rewards: Grouped
    present: Grouped
    terminations: Grouped
    truncations: Grouped
    terminated: Any
    truncated: Any
    done: Any
    final_observations: Grouped
    present_final: Grouped
    states: Any
    final_states: Any
    extras: dict[str, Any]
    infos: dict[str, Any]
    informed: dict[str, Any]
    begins: Grouped
    policies: Grouped = None

    def group(self, name: str) -> RolloutArrays:
        """The data of one of several groups."""
        fields = {
            field: value if field in _OF_ENVS else value and value[name] for field, value in self._asdict().items()
        }
        by_name = {
            field: {
                key: value[name] if isinstance(value, dict) else value for key, value in getattr(self, field).items()
            }
            for field in _BY_NAME
        }
        return RolloutArrays(**fields | by_name)


_BY_NAME = "extras", "infos", "informed"
_OF_ENVS = frozenset({"terminated", "truncated", "done", "states", "final_states", *_BY_NAME})

Policy: TypeAlias = Callable[[Current], Any]
"""Returns the actions for a `StackedVecEnv`; if extras were declared, a pair of actions and a dict of extras."""


def at(stacked: Any, index: Any) -> Any:
    """The values at an index of the first axis, or axes; None stays None."""
    if type(stacked) is np.ndarray:
        return stacked[index]
    return None if stacked is None else tree_map(lambda array: array[index], stacked)


def put(stacked: Any, index: Any, values: Any) -> None:
    """Write values to an index of the first axis, or axes; nothing into None."""
    if type(stacked) is np.ndarray:
        stacked[index] = values
    elif stacked is not None:
        tree_map(lambda array, part: array.__setitem__(index, part), stacked, values)
