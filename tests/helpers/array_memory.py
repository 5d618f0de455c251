"""How NumPy takes memory for arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

_CORE: Any = np._core if hasattr(np, "_core") else np.core  # its name before NumPy 2


def handler_name() -> str:
    """The name of the functions that new arrays of this thread take memory from."""
    name: str = _CORE.multiarray.get_handler_name()
    return name
