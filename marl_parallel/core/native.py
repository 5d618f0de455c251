"""Simulators that step many copies of an environment by themselves, all at once: the protocol they are brought to.

`NativeSimulator` is what a module for one such simulator implements, `Received` what it hands out; the first one is
`backends/envpool.py`. Everything else follows: `native_crew.py` asks it, `native_batch.py` makes dicts of what comes,
`native_arrays.py` arrays for facades, and `ParallelEnv.from_native` puts the public interface in front.

A simulator that steps all copies with one call, such as VMAS, fits like this: `batch_size` is `num_envs`. `send` steps
with a tensor for each group, after `reset_at` for those that were over when they were stepped last, and keeps what is
returned; `reset` does the same by `reset_at` alone; `receive` lays out the rows of those that were sent to. Of the
others nothing is told, and what the simulator would do to them all the same, it must be kept from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.stacking import each, together

EnvIds = NDArray[np.int32]


class Received(NamedTuple):
    """Transitions of some copies, in rows: `n` of them, of `k` possible agents.

    All arrays are the receiver's own; the flags of a single agent may be its copy's. Agents that are absent have zeros,
    and flags that are False.

    Attributes:
        env_ids: `(n,)`: which copies.
        observations: For each group of agents with equal observation spaces, as `alike` parts them, what they see:
            arrays `(n, agents of the group, ...)` in the form of the space.
        rewards: `(n, k)`, in the simulator's own dtype; of an episode's first observation they are zeros.
        terminations: `(n, k)`, bool.
        truncations: `(n, k)`, bool.
        terminated: `(n,)`, bool: whether the episode has ended.
        truncated: `(n,)`, bool: whether it was cut off.
        elapsed: `(n,)`, whole numbers: steps since the episode began, or anything that is zero for its first
            observation only, whoever has asked for it.
        present: `(n, k)`, bool: who is observed and rewarded; None for everybody.
        infos: Of agents: dicts of arrays `(n, k, ...)`, and of dicts.
        common: Of copies, where they have several agents: dicts of arrays `(n, ...)`, and of dicts.
    """

    env_ids: EnvIds
    observations: list[Any]
    rewards: NDArray[Any]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    elapsed: NDArray[Any]
    present: NDArray[np.bool_] | None
    infos: dict[str, Any]
    common: dict[str, Any]

    def at(self, rows: NDArray[Any]) -> Received:
        """Some rows, in this order."""
        return Received(*each(lambda array: array[rows], tuple(self)))


def merged(parts: Sequence[Received]) -> Received:
    """The rows of several, one after the other."""
    if any(part.present is not None for part in parts):
        parts = [p if p.present is not None else p._replace(present=np.ones(p.rewards.shape, np.bool_)) for p in parts]
    return Received(*together(lambda *arrays: np.concatenate(arrays), *map(tuple, parts)))


class NativeSimulator(ABC):
    """Many copies of an environment in one simulator.

    PettingZoo's rules apply: actions are asked of agents that are alive and were observed last. An episode that is over
    begins anew when its copy is next sent to, whatever the actions; a reset in between cancels that.

    Attributes:
        name: What errors call it.
        schema: Its agents, and a space of a fixed size for each of them.
        num_envs: How many copies.
        batch_size: How many rows `receive` returns: of more it would have to be called again, for fewer it would wait
            for ever.
        partial: Whether, where `batch_size` is `num_envs`, some copies can be sent to alone: `receive` returns all that
            has been sent then, and nothing can be sent before.
        seeds: Of each copy.
        metadata: The simulator's.
        render_mode: The simulator's.
    """

    name: str
    schema: Schema
    num_envs: int
    batch_size: int
    partial: bool = True
    seeds: Sequence[int]
    metadata: Mapping[str, Any]
    render_mode: str | None

    @abstractmethod
    def reset(self, env_ids: EnvIds) -> None:
        """Begin to reset some copies."""

    @abstractmethod
    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        """Begin to step some copies.

        Args:
            actions: For each group of agents with equal action spaces, in the form of their space, arrays
                `(copies, agents of the group, ...)`, checked. Rows of those who do not act are not to be looked at.
                They may be the caller's own arrays: what is read after this returns is to be copied, and nothing
                written.
            env_ids: Which copies, in the order of the rows.
        """

    @abstractmethod
    def receive(self) -> Received:
        """Wait for results of what was begun."""

    @abstractmethod
    def render(self) -> Sequence[Any]:
        """A frame of each copy."""

    @abstractmethod
    def attribute(self, name: str) -> Any:
        """A value that holds for all copies; raises `AttributeError` where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent, also while another thread waits in `receive`."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child of the owner: forget everything, and touch nothing that the owner still uses."""


def action_groups(schema: Schema) -> list[tuple[Space[Any], list[int]]]:
    """Groups of agents with equal action spaces: the space, and their places among the possible agents."""
    return alike(schema.action_spaces, schema.possible_agents)
