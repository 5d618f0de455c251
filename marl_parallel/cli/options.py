"""What all commands take: which environment, its keywords, and whether errors come with their traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from marl_parallel.backends import NAMES
from marl_parallel.cli.failures import CommandError

EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="module\\[:attribute] or path/to/file.py\\[:function]. Without an attribute: parallel_env, "
        "else env, else raw_env.",
        show_default=False,
    ),
]
EnvKwargs = Annotated[str, typer.Option(help="Keywords for the environment, as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def backend_names(backends: str, among: Sequence[str] = NAMES) -> list[str]:
    """The names in a list with commas between.

    Args:
        backends: The list.
        among: The backends that there are.

    Raises:
        CommandError: One of them is not among them.

    Example:
        >>> backend_names("serial, process")
        ['serial', 'process']
    """
    names = [name.strip() for name in backends.split(",")]
    for name in names:
        if name not in among:
            missing = f"backend {name!r} to choose here" if name in NAMES else f"backend {name!r}"
            raise CommandError(f"there is no {missing}", f"there are {', '.join(among)}")
    return list(dict.fromkeys(names))


def whole_numbers(option: str, text: str) -> list[int]:
    """The positive numbers in a list with commas between.

    Args:
        option: Whose list it is.
        text: The list.

    Raises:
        CommandError: It is no such list.

    Example:
        >>> whole_numbers("--workers", "1,2,4")
        [1, 2, 4]
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise CommandError(f"{option} {text} is no list of positive numbers", f"such as {option} 1,2,4")
    return numbers
