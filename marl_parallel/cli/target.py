"""Which environment a command is about: `module[:attribute]` or `path/to/file.py[:function]`, found and imported."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from marl_parallel.cli.failures import CommandError
from marl_parallel.making import find_constructor

FORMS = "ENV is module[:attribute] or path/to/file.py[:function]"


def constructor_of(target: str, env_kwargs: str = "{}") -> Callable[..., Any]:
    """What makes one copy of the environment that was named on the command line.

    Args:
        target: `module[:attribute]` or `path/to/file.py[:function]`.
        env_kwargs: A JSON object with keywords for it.

    Raises:
        CommandError: There is no such module, file or attribute, or the keywords are no JSON object.

    Example:
        >>> constructor_of("mpe2.simple_spread_v3", '{"N": 5}')().possible_agents
        ['agent_0', 'agent_1', 'agent_2', 'agent_3', 'agent_4']
    """
    keywords = _keywords(env_kwargs)
    in_file = re.fullmatch(r"(?P<path>.+\.py)(?P<attribute>:.*)?", target)
    if in_file:
        name = _import_file(Path(in_file["path"])) + (in_file["attribute"] or "")
    else:
        name = target
        sys.path.insert(0, str(Path.cwd()))  # a console script's path begins with its own directory instead
    return functools.partial(_find(name), **keywords)


def distributions_of(target: str) -> tuple[str, ...]:
    """The installed distributions that the target's module comes from; none where it is a file or not installed.

    Example:
        >>> distributions_of("mpe2.simple_spread_v3:parallel_env")
        ('mpe2',)
    """
    package = target.partition(":")[0].partition(".")[0]
    return tuple(dict.fromkeys(packages_distributions().get(package, [])))


def _keywords(env_kwargs: str) -> Mapping[str, Any]:
    try:
        keywords = json.loads(env_kwargs)
    except json.JSONDecodeError as error:
        raise CommandError(f"--env-kwargs is no JSON: {error}", _JSON_HINT) from error
    if not isinstance(keywords, dict):
        raise CommandError(f"--env-kwargs must be a JSON object, got {env_kwargs}", _JSON_HINT)
    return keywords


_JSON_HINT = "single quotes around it, double quotes within: --env-kwargs '{\"N\": 5}'"


def _import_file(path: Path) -> str:
    """Import a file as Python runs a script, its directory on the path; returns the module's name.

    So its neighbours can be imported, by the workers as well: they are given this process's `sys.path`.
    """
    path = path.resolve()
    if not path.is_file():
        raise CommandError(f"there is no file {path}", FORMS)
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    source = getattr(module, "__file__", None)
    if source is None or Path(source).resolve() != path:
        raise CommandError(
            f"{path.name} cannot be imported: another module is called {path.stem!r} ({source or 'built in'})",
            "rename the file",
        )
    return path.stem


def _find(name: str) -> Callable[..., Any]:
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An import inside the module that fails is the module's own trouble, and told as it is.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise CommandError(f"there is no module {error.name!r}", f"is it installed? {FORMS}") from error
        raise
    except (TypeError, ValueError) as error:
        raise CommandError(f"{module!r} is no module's name: {error}", FORMS) from error
    try:
        return find_constructor(name)
    except AttributeError as error:
        public = [k for k, v in vars(sys.modules[module]).items() if callable(v) and not k.startswith("_")]
        raise CommandError(str(error), f"what can be called there: {', '.join(public) or 'nothing'}") from error
