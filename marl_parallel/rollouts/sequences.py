"""`sequences`: the steps of a rollout as padded sequences of single agents, for recurrent policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marl_parallel.arguments import checked_integer
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts.arrays import RolloutArrays


class Sequences(NamedTuple):
    """Where each of S sequences is in the arrays of a rollout.

    A sequence has observations of one agent in one life, in the order of time, without those steps at which the agent
    has no observation. It is padded by repeating its last step, so that padding has legal actions and finite numbers.

    Attributes:
        times: int64 `(S, length)`: the time of each step, from 0 to T - 1.
        env_ids: int64 `(S,)`: the environment of each sequence.
        agents: int64 `(S,)`: its agent's place in the group.
        mask: bool `(S, length)`: which entries are steps, not padding.
        acting: bool `(S, length)`: the steps at which the agent acts. Use these in the loss.
        fresh: bool `(S,)`: whether a hidden state begins anew with the first step, as after a reset.
        shape: `(T, N, k)`: the shape of the rollout.
    """

    times: NDArray[np.int64]
    env_ids: NDArray[np.int64]
    agents: NDArray[np.int64]
    mask: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    fresh: NDArray[np.bool_]
    shape: tuple[int, int, int]

    @property
    def first(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The index of the first step of each sequence: `extras["hidden"][first]` has hidden states `(S, ...)`."""
        return self.times[:, 0], self.env_ids, self.agents

    def cut(self, values: Any) -> Any:
        """The values of each sequence, with padding.

        Args:
            values: An array or tensor `(T, N, k, ...)` or `(T + 1, N, k, ...)`, or a tree of them.

        Returns:
            Copies `(S, length, ...)`, in the same form.

        Raises:
            ValueError: Values have another shape.
        """
        steps, *rest = self.shape
        for_all_steps = (steps, *rest), (steps + 1, *rest)

        def cut_one(array: Any) -> Any:
            if tuple(array.shape[:3]) not in for_all_steps:
                raise ValueError(
                    f"expected values of shape {self.shape} or {for_all_steps[1]} and more axes, got "
                    f"{tuple(array.shape)}"
                )
            return array[self.times, self.env_ids[:, None], self.agents[:, None]]

        return tree_map(cut_one, values)

    def put_back(self, values: Any) -> Any:
        """The opposite of `cut`: the values of steps in their places; padding is left out.

        Args:
            values: An array `(S, length, ...)`, or a tree of arrays.

        Returns:
            New arrays `(T, N, k, ...)`, in the same form; zeros at all other steps.

        Raises:
            ValueError: Values have another shape.
        """
        env_ids, agents = (np.broadcast_to(each[:, None], self.mask.shape)[self.mask] for each in self[1:3])

        def put_back_one(array: Any) -> Any:
            array = np.asarray(array)
            if array.shape[:2] != self.mask.shape:
                raise ValueError(f"expected values of shape {self.mask.shape} and more axes, got {array.shape}")
            whole = np.zeros((*self.shape, *array.shape[2:]), array.dtype)
            whole[self.times[self.mask], env_ids, agents] = array[self.mask]
            return whole

        return tree_map(put_back_one, values)


def sequences(data: RolloutArrays, length: int) -> Sequences:
    """Cut the steps of a rollout into sequences of single agents, for truncated backpropagation through time.

    The observations of each agent in each environment are cut before every step at which `data.begins` is set, and the
    parts into pieces of `length` steps, of which the last one may be shorter. So no sequence has two lives of an agent
    or two episodes. Every step at which an agent acts is in one sequence. Sequences in which the agent never acts are
    left out.

    A sequence may begin in the middle of a life: store the hidden states with which each step begins as an extra of the
    rollout, and begin there.

    Args:
        data: The data of a rollout; with several groups, of one `group`.
        length: The number of steps of the longest sequence.

    Raises:
        TypeError: `length` is not an integer, or `data` has several groups.
        ValueError: `length` is less than 1.

    Example:
        >>> from marl_parallel import Rollout, make
        >>> env = make("mpe2.simple_spread_v3", num_envs=2, facade="stacked", env_kwargs={"max_cycles": 6}, seed=1)
        >>> rollout = Rollout(env, num_steps=8, extras={"hidden": (32,)})
        >>> def act(current):
        ...     return np.zeros((2, 3), np.int64), {"hidden": np.zeros((2, 3, 32))}
        >>> data = rollout.collect(act)
        >>> cut = sequences(data, length=4)  # 4 and 2 steps of an episode, and 2 of the next one
        >>> cut.times[:3].tolist(), cut.fresh[:3].tolist()
        ([[0, 1, 2, 3], [4, 5, 5, 5], [6, 7, 7, 7]], [True, False, True])
        >>> cut.mask[1].tolist(), cut.cut(data.observations).shape, data.extras["hidden"][cut.first].shape
        ([True, True, False, False], (18, 4, 18), (18, 32))
        >>> rewards = cut.put_back(cut.cut(data.rewards))
        >>> bool((rewards == data.rewards).all())
        True
        >>> env.close()
    """
    length = checked_integer(length, "length")
    if isinstance(data.acting, Mapping):
        raise TypeError(f"the rollout has the groups {[*data.acting]}: pass data.group(name), one group at a time")
    steps, num_envs, num_agents = np.shape(data.rewards)[:3]
    # By row, one agent of one environment: the times at which it has an observation, and those at which a part begins.
    observed, begins, acting = (
        np.asarray(marks)[:steps].transpose(1, 2, 0).reshape(num_envs * num_agents, steps)
        for marks in (data.observed, data.begins, data.acting)
    )
    rows, times = np.nonzero(observed)
    begins_part = begins[rows, times]
    begins_part[1:] |= rows[1:] != rows[:-1]
    begins_part[:1] = True
    places = np.arange(len(rows))
    places -= np.maximum.accumulate(np.where(begins_part, places, 0))
    is_first = places % length == 0
    numbers = np.cumsum(is_first) - 1
    index = numbers, places % length
    mask = np.zeros((int(is_first.sum()), length), np.bool_)
    mask[index] = True
    padded = np.zeros(mask.shape, np.int64)
    padded[index] = times
    np.maximum.accumulate(padded, axis=1, out=padded)
    of_rows = rows[is_first]
    acts = acting[of_rows[:, None], padded] & mask
    used = acts.any(axis=1)
    env_ids, agents = np.divmod(of_rows, num_agents)
    fresh = begins[of_rows, times[is_first]]
    return Sequences(
        padded[used], env_ids[used], agents[used], mask[used], acts[used], fresh[used], (steps, num_envs, num_agents)
    )
