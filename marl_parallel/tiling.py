"""Frames of many environments in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def tile(frames: Sequence[Any]) -> NDArray[Any]:
    """Lay frames out in a grid, row by row, as square as can be.

    Args:
        frames: Arrays of shape `(height, width, ...)` and one dtype; smaller ones are filled up with zeros, to
            the right and below.

    Returns:
        One array of shape `(rows * height, columns * width, ...)`; places without a frame are zeros.

    Raises:
        ValueError: There is a frame that is not such an array.

    Example:
        >>> tile([np.ones((4, 6, 3), np.uint8)] * 5).shape
        (8, 18, 3)
    """
    arrays = [np.asarray(frame) for frame in frames]
    for env_id, (frame, array) in enumerate(zip(frames, arrays, strict=True)):
        if array.ndim < 2 or array.shape[2:] != arrays[0].shape[2:]:
            raise ValueError(
                f"environment {env_id}: expected a frame of shape (height, width, ...), "
                f"got {'None' if frame is None else f'{type(frame).__name__} of shape {array.shape}'}; "
                'frames can be tiled where render_mode is "rgb_array"'
            )
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    columns = math.ceil(math.sqrt(len(arrays)))
    rows = math.ceil(len(arrays) / columns)
    picture = np.zeros((rows * height, columns * width, *arrays[0].shape[2:]), arrays[0].dtype)
    for place, array in enumerate(arrays):
        top, left = place // columns * height, place % columns * width
        picture[top : top + array.shape[0], left : left + array.shape[1]] = array
    return picture
