"""Warnings that name the user's line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1]) + os.sep  # the folder of this package, as its frames have it
_SKIPPED = PACKAGE, contextlib.__file__  # which calls decorated functions


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the first line outside of this package, whichever facade it came through."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame, level = frame.f_back, level + 1
    # `skip_file_prefixes` does the same from Python 3.12 on.
    warnings.warn(text, category, stacklevel=level)
