"""`--json` and `--output`, which mean the same in every command that prints results: print or save them as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from marl_parallel.cli.target import CommandError
from marl_parallel.core.files import ForeignFile, check_replaceable, replaced_file


def check_writable(*paths: Path | None) -> None:
    """Raise a `CommandError` if no file can be created at a path; called before a command does its work."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise CommandError(f"{path} is a directory", "name a file")
        try:
            check_replaceable(path)
        except ForeignFile as error:
            raise CommandError(str(error), "name another file, in a folder of your own") from error
        above = next(folder for folder in path.absolute().parents if folder.exists())  # the others will be created
        if not above.is_dir():
            raise CommandError(f"{path}: {above} is not a directory", "name a file in a directory")


def deliver(values: dict[str, Any], as_json: bool, output: Path | None) -> None:
    """Print results as JSON if `as_json`, and save the same in a file if there is a path."""
    text = json.dumps(values, indent=2)
    if as_json:
        typer.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(output) as file:
            file.write(text + "\n")
        report_written(output)


def say_next(text: str, as_json: bool = False) -> None:
    """Print the last line of a command: what to do next; nothing if it prints JSON."""
    if not as_json:
        typer.echo(f"what to do next: {text}")


def report_written(path: Path) -> None:
    """Print on standard error that a file was written."""
    typer.echo(f"wrote {path}", err=True)
