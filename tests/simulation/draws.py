"""Numbers that depend on nothing but their keys, so that a change in one place of a history changes no other draw."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def draw(*keys: int) -> float:
    """A number from 0 up to 1, the same for the same keys (the mixing function of SplitMix64)."""
    state = 0
    for key in keys:
        state = (state + key + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
