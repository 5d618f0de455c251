"""The command line `marl-parallel`: `main`, and one module for each command.

What the commands need beyond the package itself (typer, rich, matplotlib) comes with the extra `cli` and is imported
by their own modules only.
"""

from __future__ import annotations

import sys

from marl_parallel.cli.output import replace_unknown_letters

EXTRA = ("matplotlib", "rich", "typer")


def main() -> None:
    """Run the command that the arguments of this process name."""
    try:
        from marl_parallel.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        sys.exit(f'error: the command line needs {missing}: pip install "marl-parallel[cli]"')
    replace_unknown_letters()
    app()
