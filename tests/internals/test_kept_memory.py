"""Memory of large observations is used again once nothing refers to it, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.array_memory import handler_name

from marl_parallel import ParallelEnv, vector
from marl_parallel.core.block import codec

pytestmark = [pytest.mark.needs("_codec"), pytest.mark.release_independent]

SHAPE = (300, 301)
BOX = spaces.Box(-1e9, 1e9, SHAPE, np.float64)
AGENTS = ["a", "b"]
NBYTES = 8 * SHAPE[0] * SHAPE[1]


def kept(nbytes: int) -> int:
    """How many pieces of memory of this size nothing refers to."""
    assert codec._codec is not None
    count: int = codec._codec.keep(nbytes, 0)
    return count


class Images:
    """Large observations, full of the number of the step."""

    possible_agents = AGENTS
    observation_space = spaces.Dict(dict.fromkeys(AGENTS, BOX))
    action_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(2)))

    def __init__(self) -> None:
        self.steps = 0

    def _observe(self) -> dict[str, Any]:
        return {agent: np.full(SHAPE, self.steps, np.float64) for agent in AGENTS}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        flags = {**dict.fromkeys(AGENTS, False), "__all__": False}
        return self._observe(), dict.fromkeys(AGENTS, 0.0), flags, flags, {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_memory_is_used_again(backend):
    actions = [dict.fromkeys(AGENTS, 0)] * 2
    with ParallelEnv([Images] * 2, backend=backend, num_workers=1) as env:
        env.reset()
        batches = [env.step(actions)[0] for _ in range(5)]
        for step, batch in enumerate(batches, 1):  # nothing that is referred to has been used again
            assert all((observation == step).all() for of_env in batch for observation in of_env.values())
        places = {observation.ctypes.data for batch in batches for of_env in batch for observation in of_env.values()}
        assert len(places) == 5 * 2 * 2
        del batches, batch
        gc.collect()
        assert kept(NBYTES) == 2 * 2 * 2, "two batches are kept"
        again = [observation for of_env in env.step(actions)[0] for observation in of_env.values()]
        assert {observation.ctypes.data for observation in again} <= places
        assert all((observation == 6).all() for observation in again)
    assert kept(NBYTES) == 0, "nothing after `close`"
    del env
    assert all((observation == 6).all() for observation in again), "they outlive the environments"
    del again
    assert kept(NBYTES) == 0


def test_arrays_over_environments():
    with ParallelEnv([Images] * 2, backend="serial") as env:
        front = vector.StackedVecEnv(env)
        front.reset()
        actions = np.zeros((2, 2), np.int64)
        batches = [front.step(actions)[0] for _ in range(4)]
        for step, batch in enumerate(batches, 1):
            assert (batch == step).all()
        places = {batch.ctypes.data for batch in batches}
        del batches, batch
        gc.collect()
        assert kept(4 * NBYTES) == 2
        assert front.step(actions)[0].ctypes.data in places
    assert kept(4 * NBYTES) == 0, "nothing after `close`"


@pytest.mark.parametrize("shape", [(400, 400), (10, 3), (0,)])
def test_arrays_that_are_resized(shape):
    with ParallelEnv([Images], backend="serial") as env:
        env.reset()
        array = env.step([dict.fromkeys(AGENTS, 0)])[0][0]["a"]
        array.resize(shape, refcheck=False)
        assert array.sum() == min(SHAPE[0] * SHAPE[1], array.size)
        del array


def test_freed_in_another_thread():
    with ParallelEnv([Images], backend="serial") as env:
        env.reset()
        batches = [env.step([dict.fromkeys(AGENTS, 0)]) for _ in range(4)]
        assert kept(NBYTES) == 0
        thread = threading.Thread(target=batches.clear)
        thread.start()
        thread.join()
        assert kept(NBYTES) == 2 * 2, "two batches"
        del env
    gc.collect()
    assert kept(NBYTES) == 0


def test_other_arrays_come_from_numpy():
    """Only while observations are read, and only in that thread."""
    with ParallelEnv([Images], backend="serial") as env:
        env.reset()
        before = handler_name()
        env.step([dict.fromkeys(AGENTS, 0)])
        assert handler_name() == before != "marl_parallel"


def pieces(sizes: Sequence[int], more: int) -> None:
    assert codec._codec is not None
    for nbytes in sizes:
        codec._codec.keep(nbytes, more)


def reused(nbytes: int) -> bool:
    """Whether memory of a size is used again: whether an array that has been freed is kept."""

    class Large(Images):
        observation_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Box(0, 255, (nbytes,), np.uint8)))

        def _observe(self) -> dict[str, Any]:
            return {agent: np.full(nbytes, self.steps, np.uint8) for agent in AGENTS}

    with ParallelEnv([Large], backend="serial") as env:
        env.reset()
        env.step([dict.fromkeys(AGENTS, 0)])
        return kept(nbytes) > 0


def test_any_number_of_sizes_one_after_the_other():
    """A program that makes many environments, such as a search over resolutions."""
    for round_ in range(200):
        pieces([codec._codec.LARGE + round_], 2)
        pieces([codec._codec.LARGE + round_], -2)
    assert reused(codec._codec.LARGE + 1000)
    assert kept(codec._codec.LARGE + 1000) == 0, "nothing after `close`"


@pytest.mark.parametrize("order", ["first", "last", "middle"])
def test_many_sizes_at_a_time(order):
    sizes = [codec._codec.LARGE + 8 * number for number in range(150)]
    pieces(sizes, 2)
    try:
        assert reused(codec._codec.LARGE + 2000)
    finally:
        gone = {"first": sizes, "last": sizes[::-1], "middle": sizes[75:] + sizes[:75]}[order]
        pieces(gone[:100], -2)
        assert reused(gone[120])
        assert reused(gone[3])
        pieces(gone[100:], -2)
    assert reused(codec._codec.LARGE + 2000)
    assert not any(map(kept, [*sizes, codec._codec.LARGE + 2000]))


def test_fewer_pieces_of_an_unknown_size():
    pieces([codec._codec.LARGE + 77], -5)
    assert reused(codec._codec.LARGE + 77)
    assert kept(codec._codec.LARGE + 77) == 0


def test_two_environments_with_one_size():
    with ParallelEnv([Images], seed=1, backend="serial") as env:
        env.reset()
        env.step([dict.fromkeys(AGENTS, 0)])
        with ParallelEnv([Images], seed=2, backend="serial") as other:
            other.reset()
            batch = other.step([dict.fromkeys(AGENTS, 0)])
        del other
        env.step([dict.fromkeys(AGENTS, 0)])
        assert kept(NBYTES) > 0
        del batch
        assert kept(NBYTES) <= 2 * 2, "two batches of one environment"
    del env
    gc.collect()
    assert kept(NBYTES) == 0
