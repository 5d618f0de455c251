"""Action masks, by PettingZoo's convention: where they are told, and in which form Gymnasium's spaces take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def mask_among(*told: Any) -> Any:
    """What an observation or an info of one agent has as `action_mask`; None where none of them has one.

    Args:
        told: The observation and the info, whatever they are.

    Example:
        >>> mask_among({"observation": 3, "action_mask": [True, False]}, {})
        array([1, 0], dtype=int8)
    """
    for value in told:
        if isinstance(value, Mapping) and "final_obs" in value:  # all but this is of the episode that is over
            value = value.get("reset_info")
        if isinstance(value, Mapping) and "action_mask" in value:
            return _as_spaces_take_it(value["action_mask"])
    return None


def _as_spaces_take_it(allowed: Any) -> Any:
    if isinstance(allowed, Mapping):
        return {key: _as_spaces_take_it(part) for key, part in allowed.items()}
    if isinstance(allowed, tuple):
        return tuple(map(_as_spaces_take_it, allowed))
    return None if allowed is None else np.asarray(allowed, np.int8)
