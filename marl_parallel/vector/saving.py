"""Saved states of facades: those of the environments, with the facade's own values for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from marl_parallel.core.pool.saved_states import to_bytes
from marl_parallel.runner import BatchRunner

FACADES = frozenset({
    "GymnasiumVectorEnv", "PyMARLConnections", "RLlibVectorMultiAgentEnv", "SB3VecEnv", "ShareVecEnv", "StackedVecEnv",
    "SubprocVecEnv", "TianshouVecEnv", "TorchRLEnv",
})  # fmt: skip
"""`saved_as` of the facades of this package: the keys of their own values in saved states."""

_FORMER = {"ShareSubprocVecEnv": "ShareVecEnv", "ShareDummyVecEnv": "ShareVecEnv", "DummyVecEnv": "SubprocVecEnv"}
"""Keys in states that 0.2.0 saved before it was published, and what they are now."""


def key_of(facade: object) -> str:
    """The key of a facade's own values: `saved_as` of its class, or the name of its class."""
    key: str = getattr(type(facade), "saved_as", type(facade).__name__)
    return key


def saved_states(
    runner: BatchRunner, key: str, env_ids: Sequence[int] | None, own_state: Callable[[int], Any]
) -> list[bytes]:
    """The states of environments, with what `own_state` returns for each; see `ParallelEnv.save_state`."""
    saved = runner.save_state(env_ids)
    return [to_bytes(state.with_facade(key, own_state(env_id))) for env_id, state in saved.items()]


def load_states(
    runner: BatchRunner, key: str, states: Sequence[bytes], env_ids: Sequence[int] | None
) -> tuple[dict[int, Any], Any]:
    """Load environments; see `ParallelEnv.load_state`.

    Returns:
        By environment, the facade's own value, or None; and the leftovers, of which transitions are read.

    Raises:
        ValueError: A state has values of a facade that is not one of this package's, and has another key.
    """
    loaded, leftovers = runner.load_state(states, env_ids, {*FACADES, *_FORMER, key})
    own = {
        env_id: {_FORMER.get(former, former): value for former, value in state.facade.items()}.get(key)
        for env_id, state in loaded.items()
    }
    return own, leftovers
