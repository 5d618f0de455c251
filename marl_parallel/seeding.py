"""Which seed each environment gets."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def base_seed(seed: Any) -> int:
    """The seed of environment 0; None draws one of 31 bits.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.

    Example:
        >>> base_seed(42)
        42
    """
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer or None, got {seed!r}") from None
    if number < 0:
        raise ValueError(f"seed must not be negative, got {number}")
    return number


def seeds_of(seeds: Sequence[Any], env_ids: Sequence[int]) -> list[int | None]:
    """One seed for each environment, as given; None leaves its generators as they are.

    Raises:
        ValueError: There is not one for each, or one is negative.
        TypeError: One is no integer.
    """
    if len(seeds) != len(env_ids):
        raise ValueError(f"expected one seed for each of {len(env_ids)} environments, got {len(seeds)}")
    return [None if seed is None else base_seed(seed) for seed in seeds]
