"""The command line `marl-parallel`: `check`, `tune`, `bench`, `record`, `replay` and `doctor`.

The libraries that only the commands need (typer, rich, matplotlib, psutil) come with the extra `cli`.
"""

from __future__ import annotations

import io
import sys

from marl_parallel.types import how_to_install

EXTRA = ("matplotlib", "psutil", "rich", "typer")


def main() -> None:
    """Run the command that this process's arguments name."""
    try:
        from marl_parallel.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        sys.exit(f"error: the command line needs {missing}: {how_to_install('cli')}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII shows `?` for other characters
    app()
