"""Files of another user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from marl_parallel.core import files

has_owners = pytest.mark.skipif(sys.platform == "win32", reason="files have no owners of this kind")

OTHER = 54321
"""The number of a user who does not exist."""


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a file, link or folder; only root can, so for other users a patch pretends it."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1, follow_symlinks=False)
        return
    given, owner = os.lstat(path), files._owner

    def patched(info: os.stat_result) -> int:
        return OTHER if os.path.samestat(info, given) else owner(info)

    monkeypatch.setattr(files, "_owner", patched)
