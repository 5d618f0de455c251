"""Files that one process writes and another reads meanwhile, and files of another user."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from marl_parallel.core import files

has_owners = pytest.mark.skipif(sys.platform == "win32", reason="files have no owners of this kind")

OTHER = 54321
"""The number of a user who does not exist."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that is not there until it is complete; an old one is replaced."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a file, link or folder; only root can, so for other users a patch pretends it."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1, follow_symlinks=False)
        return
    given, owner = os.lstat(path), files._owner

    def patched(info: os.stat_result) -> int:
        return OTHER if os.path.samestat(info, given) else owner(info)

    monkeypatch.setattr(files, "_owner", patched)
