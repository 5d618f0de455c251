"""`WorkerOutputs`: what workers write besides transitions: global states, and observations of rollouts."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from numpy.typing import NDArray

from marl_parallel.adapters import Schema
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.messages import Message, Outputs
from marl_parallel.stepper.workers import Workers

NO_STATE = "these environments have no global state: give them a method state() and a state_space of arrays or numbers"


class WorkerOutputs:
    """What the workers of a batch write besides transitions, from one call of these methods on."""

    def __init__(self, workers: Workers | None, schema: Schema, no_state: str) -> None:
        self._workers, self._schema, self._no_state = workers, schema, no_state
        self._outputs = Outputs()
        self._memory: list[tuple[weakref.ref[Any], int, int]] = []  # of rollout buffers, from where to where

    def write_states(self) -> None:
        """Have each reset and step write the global states, for `states_seen`, from now on.

        Raises `NotImplementedError` if the environments have no state.
        """
        if self._workers is None or self._schema.state_space is None:
            raise NotImplementedError(self._no_state)
        self._have_written(self._workers, self._outputs._replace(states=True))

    def states_seen(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """After `write_states`: the current states, and the last states of finished episodes.

        The last reset or step of each environment has written both, the last state before an automatic reset or a
        restart. Shapes are `(num_envs, *state_space.shape)`. Both are valid until the next step or reset.
        """
        assert self._workers is not None
        return self._workers.transitions.states_seen()

    def rollout_buffer(self, num_times: int, more: int) -> RolloutBuffer | None:
        """Make workers write observations of `num_times` time steps into a new buffer, no longer into earlier ones.

        The buffer has `more` bytes for the caller. Memory of earlier buffers is used again once no array refers to it.
        Returns None if workers share no memory, if not all observations are arrays in the block, or without the
        compiled codec.
        """
        workers = self._workers
        if workers is None or not workers.pool.backend.capabilities.shares_memory:
            return None
        layout, codec = workers.transitions.layout, workers.transitions.codec
        if codec is None or not layout.agents or layout.observations.agents != self._schema.possible_agents:
            return None
        self._memory = [used for used in self._memory if used[0]() is not None]
        buffer = RolloutBuffer(layout, num_times, layout.nbytes, more)
        for _, start, stop in sorted(self._memory, key=lambda used: used[1]):
            if buffer.nbytes > start:
                buffer = RolloutBuffer(layout, num_times, max(stop, buffer.start), more)
        nbytes = max([buffer.nbytes, *[stop for *_, stop in self._memory]])
        memory = (ctypes.c_char * nbytes).from_buffer(workers.pool.backend.allocate(nbytes))  # only arrays refer to it
        buffer.bind(memory)
        self._memory.append((weakref.ref(memory), buffer.start, buffer.nbytes))
        self._have_written(workers, self._outputs._replace(rollout=(buffer.start, num_times)))
        return buffer

    def _have_written(self, workers: Workers, outputs: Outputs) -> None:
        self._outputs = workers.rebuilds.outputs = outputs
        workers.pool.execute_in_each_worker(Message.OUTPUTS, outputs)
        workers.pool.in_call("", workers.rebuilds.outdate, workers.transitions.env_ids)
