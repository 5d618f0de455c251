"""Arguments of the command line (environments, lists and sizes), and how a command reports an error."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from marl_parallel.backends import NAMES
from marl_parallel.making import find_constructor

FORMS = "ENV is module[:attribute], path/to/file.py[:function], or an id of PettingZoo or Gymnasium"
_JSON_HINT = "single quotes around it, double quotes within: --env-kwargs '{\"N\": 5}'"
_EXITS = "the simulator, or a module it imports, calls sys.exit"
DEBUG_HINT = "--debug shows the whole traceback"
MEASURING_HINT = f"speed is measured without faults, so no step may raise; {DEBUG_HINT}"


class CommandError(Exception):
    """A command cannot run: has a message, and a hint what to try instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)

    def __str__(self) -> str:
        return str(self.args[0])


def in_brief(error: BaseException) -> str:
    """The type of an error and the first line of its text; of a `CommandError`, the text only."""
    text = next(filter(None, map(str.strip, str(error).splitlines())), "")
    if isinstance(error, CommandError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def short_errors(debug: bool, status: int = 1, hint: str = DEBUG_HINT) -> Iterator[None]:
    """Report an exception of the block in two lines on standard error, and exit with this status.

    With `debug`, exceptions pass through with their traceback.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        exits = isinstance(error, SystemExit)
        if debug and exits:
            raise RuntimeError(f"{in_brief(error)}: {_EXITS}") from error
        if debug:
            raise
        if isinstance(error, CommandError):
            hint = error.args[1]
        elif exits:
            hint = f"{_EXITS}; {hint}"
        print(f"error: {in_brief(error)}\nhint: {hint}", file=sys.stderr)
        raise SystemExit(status) from None


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, in this process and in those it starts."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.platform != "win32":
            ctypes.CDLL(None).fflush(None)  # native code prints into C's own buffer
        os.dup2(stdout, 1)
        os.close(stdout)


# -- lists and sizes: text of another form raises a CommandError -------------------------------------------------------


def names_in(text: str, known: Sequence[str] = NAMES, kind: str = "backend") -> list[str]:
    """The names in a comma-separated list, each once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            here = " to choose here" if name in NAMES else ""
            raise CommandError(f"there is no {kind} {name!r}{here}", f"there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def positive_numbers(option: str, text: str) -> list[int]:
    """The numbers in the comma-separated list of an option."""
    if not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", text):
        raise CommandError(f"{option} {text} is not a list of positive numbers", f"such as {option} 1,2,4")
    return [int(number) for number in text.split(",")]


def parsed_size(text: str) -> int:
    """An amount of memory in bytes.

    Example:
        >>> parsed_size("2GB"), parsed_size("1.5 GiB"), parsed_size("800M")
        (2000000000, 1610612736, 800000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise CommandError(f"{text!r} is not an amount of memory", "such as 800MB, 2GB or 1.5GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


# -- environments ------------------------------------------------------------------------------------------------------


def constructor_of(target: str, env_kwargs: str = "{}") -> functools.partial[Any]:
    """The constructor of an environment that is named as `ENV`, with keywords from a JSON object.

    A file becomes the `__main__` of this process, so that workers get its definitions as they get those of a script.
    """
    try:
        keywords = json.loads(env_kwargs)
    except json.JSONDecodeError as error:
        raise CommandError(f"--env-kwargs is not valid JSON: {error}", _JSON_HINT) from error
    if not isinstance(keywords, dict):
        raise CommandError(f"--env-kwargs must be a JSON object, got {env_kwargs}", _JSON_HINT)
    if not re.match(r".+\.py(:|$)", target):
        sys.path.insert(0, str(Path.cwd()))  # the path of a console script begins with the script's directory instead
    try:
        return functools.partial(find_constructor(target, as_script=True), **keywords)
    except Exception as error:
        if hasattr(error, "wrong_name"):
            raise CommandError(str(error), FORMS) from error
        raise


def distributions_of(target: str) -> tuple[str, ...]:
    """The installed distributions that the target's module comes from; none for a file."""
    package = target.partition(":")[0].partition(".")[0]
    return tuple(dict.fromkeys(packages_distributions().get(package, [])))
