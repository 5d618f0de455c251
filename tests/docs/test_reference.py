"""The reference (`docs/reference`) has an entry for each public name, and each entry names something that exists."""

from __future__ import annotations

import ast
import functools
import inspect
import multiprocessing
import re
from importlib import import_module
from pathlib import Path

import pytest
from helpers import ROOT

import marl_parallel
from marl_parallel import vector
from marl_parallel.sources.native import NativeSimulator

pytestmark = pytest.mark.release_independent

PACKAGE = ROOT / "marl_parallel"
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))}
ENTRIES = [
    entry
    for name, text in PAGES.items()
    if name.startswith("docs/reference/")
    for entry in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
]
NAMES = {entry.rpartition(".")[2] for entry in ENTRIES}

# Gymnasium's own class, and a text that docs/workers.md describes.
NO_ENTRIES = {"AutoresetMode", "codec"}
# These pages describe the inside of the package, or what Ray calls its actors.
INSIDE = ("docs/architecture.md", "docs/clusters.md")
# Constants that examples import; the docstrings of `Monitor.serve` have this one.
CONSTANTS = {"PORT"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defined(path: Path) -> set[str]:
    """The names of a module: classes, functions, constants and what it imports."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_all_names_of_the_package_have_entries():
    assert {*marl_parallel.__all__, "RayBackend"} - NO_ENTRIES - NAMES == set()
    assert not NO_ENTRIES & NAMES


def test_all_facades_have_entries():
    """Also those whose libraries are not installed."""
    assert {*dir(vector), *vector.__all__} - NAMES == set()


def test_what_examples_import_has_entries():
    """From every module of the package, in the README, the pages and the examples."""
    pages = [(ROOT / "README.md").read_text(), *PAGES.values()]
    programs = [block for page in pages for block in re.findall(r"(?ms)^```py(?:thon)?\n(.*?)^```$", page)]
    programs += [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    nodes = [node for program in programs for node in ast.walk(ast.parse(program))]
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "marl_parallel"
        for alias in node.names
    }
    assert {"Arrays", "Stacked", "from_factory", "pad_spaces"} <= imported
    assert imported - NAMES - CONSTANTS == set()


def test_classes_that_pages_name_have_entries():
    classes = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    named = {
        word
        for name, text in PAGES.items()
        if name not in INSIDE
        for span in re.findall(r"`([^`\n]+)`", text)
        for word in re.findall(r"\w+", span)
    }
    assert {"FacadeStepper", "PortableProcessBackend", "Schema"} <= classes & named
    # Queues and semaphores, a manager's, Tianshou's, RLlib's.
    of_others = {*multiprocessing.__all__, "Namespace", "PettingZooEnv", "EnvRunner"}
    assert classes & named - NAMES - of_others == set()


@pytest.mark.parametrize("base", [marl_parallel.MultiAgentEnv, NativeSimulator])
def test_classes_that_are_needed_to_implement_one_have_entries(base):
    """Those of attributes, arguments and results."""
    functions = [one for one in vars(base).values() if inspect.isfunction(one)]
    annotations = [*inspect.get_annotations(base).values()]
    annotations += [kind for one in functions for kind in inspect.get_annotations(one).values()]
    words = {word for annotation in annotations for word in re.findall(r"\w+", str(annotation))}
    module = vars(import_module(base.__module__))
    needed = {
        word for word in words if inspect.isclass(module.get(word)) and "marl_parallel" in module[word].__module__
    }
    assert needed
    assert needed - NAMES == set()


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_exist(entry):
    """Without importing them: not every library is installed."""
    module, _, name = entry.rpartition(".")
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert name in defined(path)


def test_no_entry_twice():
    assert len(ENTRIES) == len(set(ENTRIES))
