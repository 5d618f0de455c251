"""Files that one process writes and another reads meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that is not there until it is complete; an old one is replaced."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(text)
    unfinished.replace(path)
