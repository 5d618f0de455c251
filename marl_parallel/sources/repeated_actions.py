"""`RepeatedActions`: repeats each action, for native simulators without a `frame_skip` of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.core.block import stacking
from marl_parallel.core.spaces import tree_map
from marl_parallel.sources.native import EnvIds, NativeSimulator, Received


class RepeatedActions(NativeSimulator):
    """Steps another simulator several times with the same actions, and adds up the rewards.

    Observations, flags and infos come from the last step. An environment whose episode ends earlier is not stepped
    further. An environment whose episode begins is stepped once.

    Args:
        simulator: A simulator with one agent that is always present; it can step some environments without the others.
        times: How often each action is carried out.

    Raises:
        ValueError: The simulator is of another kind.
    """

    def __init__(self, simulator: NativeSimulator, times: int) -> None:
        if not simulator.partial or simulator.batch_size < simulator.num_envs:
            raise ValueError(
                f"frame_skip={times}, but actions of {simulator.name} can be repeated only if it has one player, and "
                "batch_size is num_envs: it has no frame_skip of its own"
            )
        self._simulator, self._times = simulator, times
        self.name, self.schema, self.num_envs = simulator.name, simulator.schema, simulator.num_envs
        self.batch_size, self.seeds, self.reseeds = simulator.batch_size, simulator.seeds, simulator.reseeds
        self.metadata, self.render_mode = simulator.metadata, simulator.render_mode
        self._sent: tuple[list[Any], EnvIds] | None = None

    def reset(self, env_ids: EnvIds) -> None:
        self._sent = None
        self._simulator.reset(env_ids)

    def reseed(self, seeds: Sequence[int]) -> None:
        self._simulator.reseed(seeds)
        self.seeds = seeds

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        # Copies for the further steps: the caller may write into its arrays again.
        self._sent = tree_map(np.copy, actions), env_ids
        self._simulator.send(self._sent[0], env_ids)

    def receive(self) -> Received:
        received = self._simulator.receive()
        if self._sent is None:
            return received
        actions, env_ids = self._sent
        self._sent = None
        sent_at, row_of = np.zeros((2, self.num_envs), np.intp)
        sent_at[env_ids] = np.arange(len(env_ids))
        row_of[received.env_ids] = rows = np.arange(len(received.env_ids))
        for _ in range(self._times - 1):
            goes_on = ~(received.terminated | received.truncated) & (received.elapsed != 0)
            rows = rows[goes_on[rows]]
            if not len(rows):
                break
            ids = received.env_ids[rows]
            self._simulator.send(_rows(actions, sent_at[ids]), ids)
            further = self._simulator.receive()
            rows = row_of[further.env_ids]
            rewards = received.rewards[rows] + further.rewards
            received = Received(*stacking.placed(tuple(received), rows, tuple(further)))
            received.rewards[rows] = rewards
        return received

    def render(self) -> Sequence[Any]:
        return self._simulator.render()

    def attribute(self, name: str) -> Any:
        return self._simulator.attribute(name)

    def close(self) -> None:
        self._simulator.close()

    def abandon(self) -> None:
        self._simulator.abandon()


def _rows(stacked: Any, rows: NDArray[np.intp]) -> Any:
    return tree_map(lambda array: array[rows], stacked)
