"""Saved states of facades: those of the environments, with the facade's own values for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marl_parallel.core.pool.saved_states import EnvState

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


def facades_with(key: str) -> set[str]:
    """The keys of values that a facade with this key may find in a state."""
    return {*FACADES, *_FORMER, key}


def own_values(loaded: Mapping[int, EnvState], key: str) -> dict[int, Any]:
    """By environment, the facade's own value in a state, or None."""
    return {
        env_id: {_FORMER.get(former, former): value for former, value in state.facade.items()}.get(key)
        for env_id, state in loaded.items()
    }
