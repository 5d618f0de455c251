"""Imports: parts of the package import from lower ones only, and a bare import loads nothing heavy."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.release_independent

PACKAGE = ROOT / "marl_parallel"

LEVELS = [
    {"types", "action_masks"},
    {"adapters"},
    {"core"},
    {"backends", "sources", "arguments", "fingerprints"},
    {"settings"},
    {"planning", "stepper"},
    {"runner"},
    {"parallel_env"},
    {"monitoring", "recording", "vector", "wrappers"},
    {"rollouts", "making"},
    {"benchmarl"},
    {"marl_parallel"},
    {"cli"},
    {"__main__"},
]
"""From below; the package's own `__init__` has the package's name."""

LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}


def part_of(path: Path) -> str:
    """The folder or module directly below the package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "marl_parallel" if first == "__init__.py" else first.removesuffix(".py")


def imported_parts(path: Path) -> Iterator[str]:
    """The parts of this package that any import statement of a file uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative"
            # A name imported from the package itself may be a module.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for package, *below in (name.split(".") for name in names):
            if package == "marl_parallel":
                yield below[0] if below and below[0] in LEVEL_OF else "marl_parallel"


FILES = sorted(PACKAGE.rglob("*.py"))


CLOCKLESS = [path for path in FILES if path.parent.name == "pool" and path.name != "replay.py"]
"""A replay has the time at which it is written."""


@pytest.mark.parametrize("path", [*CLOCKLESS, PACKAGE / "core" / "worker" / "worker.py"], ids=lambda path: path.stem)
def test_the_pool_reads_no_clock_of_its_own(path):
    """The time comes from `Backend.clock`, and in workers from `WorkerStatus.clock`, so that a test can own it."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "time" not in {alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)}
    assert "time" not in {node.module for node in imports if isinstance(node, ast.ImportFrom)}


def test_every_part_has_a_level():
    assert {part_of(path) for path in FILES} == LEVEL_OF.keys()
    assert sum(len([*imported_parts(path)]) for path in FILES) > 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    """Never to a higher part or another one of the same level, except in the same folder."""
    own = part_of(path)
    upwards = {part for part in imported_parts(path) if part != own and LEVEL_OF[part] >= LEVEL_OF[own]}
    assert not upwards


HEAVY = {
    "torch", "ray", "matplotlib", "rich", "typer", "psutil", "stable_baselines3", "torchrl", "agilerl", "tianshou",
    "skrl", "mlagents_envs", "grpc", "envpool", "jax", "jaxmarl", "vmas", "benchmarl", "hydra", "omegaconf",
}  # fmt: skip


def test_everything_can_be_imported(tmp_path):
    """With the installed libraries; a folder with the name of one, such as Ray's `/tmp/ray`, does not count."""
    (tmp_path / "ray").mkdir()
    program = "from marl_parallel import *; from marl_parallel.vector import *; print(ParallelEnv, PettingZooVecEnv)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "PettingZooVecEnv" in done.stdout, done.stderr


def test_bare_import_is_light(tmp_path):
    """Libraries of the command line, the tests or simulators are not loaded, although they are installed."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").touch()
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    text = "import sys, marl_parallel; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", text]
    loaded = {*subprocess.check_output(command, text=True, timeout=60, cwd=ROOT, env=environ).split()}
    assert {"marl_parallel", "gymnasium"} <= loaded
    assert not loaded & HEAVY


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_time_imports(node: ast.AST) -> Iterator[str]:
    """The modules of this package that statements in and below a node import, also in functions; not for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in {*MODULES, *COMPILED} else str(child.module) for name in names)
        yield from run_time_imports(child)


MODULES = {module_of(path): path for path in FILES}
COMPILED = {module_of(path) for path in PACKAGE.rglob("*.c")}


def test_no_module_imports_itself_through_others():
    imported = {
        name: {*run_time_imports(ast.parse(path.read_text()))} & MODULES.keys() for name, path in MODULES.items()
    }
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
