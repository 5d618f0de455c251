"""The command line `marl-parallel`: `check`, `tune`, `bench`, `record`, `replay` and `doctor`.

The libraries that only the commands need (typer, rich, matplotlib, psutil) come with the extra `cli`.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

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
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            if name == "stdout":
                stream.reconfigure(errors="replace")  # a terminal that knows only ASCII shows `?` for other characters
            if not stream.isatty():
                setattr(sys, name, _ignoring_closed_pipes(stream))
    app()


class _Output(io.FileIO):
    """An output that turns into `/dev/null` when nobody reads it any more, as in `marl-parallel check ... | head`."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno(), inheritable=True)
            return super().write(data)


def _ignoring_closed_pipes(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same output, with which a command finishes its work even if the reader has ended."""
    stream.flush()
    output = io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(
        output, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )
