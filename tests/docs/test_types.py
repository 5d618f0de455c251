"""Type checkers: examples of the README, of `docs` and of `examples` pass mypy and pyright; editors find the package.

An example is checked where the libraries that it imports are installed. For pyright, those of AgileRL and of Ray are
apart, because other examples can be checked without these large libraries.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.setups import rest

pytestmark = pytest.mark.release_independent

APART = ("agilerl", "ray")
# Most examples need torch, and those that do not are checked with them.
EXAMPLES = ["examples"] * bool(importlib.util.find_spec("torch")) + [*filter(importlib.util.find_spec, APART)]


def imported(text: str) -> set[str]:
    """The packages that a program imports."""
    nodes = [*ast.walk(ast.parse(text))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def can_import(text: str) -> bool:
    """Whether the packages that a program imports are installed."""
    return all(map(importlib.util.find_spec, imported(text)))


def kind_of(text: str) -> str:
    """The value of `files` for an example."""
    return next((library for library in APART if library in imported(text)), "examples")


def page_examples() -> dict[str, str]:
    """The Python blocks of the README and of `docs`, each once, by page and line."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks: dict[str, str] = {}
    for page in pages:
        text = page.read_text()
        for found in re.finditer(r"(?sm)^```python\n(.*?)^```$", text):
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).lower()
            blocks.setdefault(found[1], f"{name}_{text[: found.start(1)].count(chr(10)) + 1}")
    return {name: block for block, name in blocks.items()}


# What libraries without types make of strict rules is no error of the examples; short examples have no annotations.
MYPY = [
    "--strict",
    "--ignore-missing-imports",
    "--allow-subclassing-any",
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-calls",
    "--allow-untyped-decorators",
    "--no-warn-return-any",
]

# mypy reads the modules of these for minutes, whatever an example uses of them. pyright reads what is used.
UNREAD = "agilerl", "ray", "torch"


def checked(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=560, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def texts_of(kind: str, unread: Sequence[str] = ()) -> dict[str, str]:
    """By name, the Python blocks of the README and of `docs`, or examples; with those that import unread libraries."""
    if kind == "pages":
        texts = {name: text for name, text in page_examples().items() if can_import(text)}
        assert len(texts) > 40
        assert any(name.startswith("readme_") for name in texts)
        return texts
    texts = {file.stem: file.read_text() for file in sorted((ROOT / "examples").rglob("*.py"))}
    if unread:
        texts = {name: text for name, text in texts.items() if can_import(text) or imported(text) & {*unread}}
    else:
        texts = {name: text for name, text in texts.items() if can_import(text) and kind == kind_of(text)}
    expected = {
        "examples": {"async_rollout", "crashing_simulator", "parallel_environments", "quickstart"},
        "agilerl": {"agilerl_train"},
        "ray": {"ray_cluster"},
    }
    for of_kind in expected if unread else [kind]:
        assert expected[of_kind] <= texts.keys()
    return texts


def written(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """The files of these texts, in a folder outside the checkout."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return [str(folder / f"{name}.py") for name in texts]


USE = """
from marl_parallel import make
reveal_type(make("CartPole-v1"))
reveal_type(make("CartPole-v1", facade="gymnasium", num_envs=2, on_error="restart"))
"""


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["pages", *[one for one in EXAMPLES if one not in APART]])
def test_mypy(kind, tmp_path):
    """It finds the package from outside of the checkout, in a project that uses it."""
    (tmp_path / "typed").mkdir()
    files = written(tmp_path / "typed", texts_of(kind, UNREAD))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n" + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in UNREAD))
    with_cache = ["mypy", *MYPY, "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    checked(*with_cache, *files, cwd=Path(files[0]).parent)
    (tmp_path / "use.py").write_text(USE)
    types = re.findall(r'Revealed type is "(.*)"', checked(*with_cache, "use.py", cwd=tmp_path))
    assert types == [
        "marl_parallel.parallel_env.ParallelEnv",
        "marl_parallel.vector.gymnasium.vector_env.GymnasiumVectorEnv",
    ]


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["pages", *map(rest, EXAMPLES)])
def test_pyright(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    written(folder, texts_of(kind))
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"reportMissingImports": False, "reportPossiblyUnboundVariable": False})
    )
    checked("pyright", "--pythonpath", sys.executable, cwd=folder)


@pytest.mark.rest
def test_pyright_resolves_an_editable_install(tmp_path):
    """From outside of the checkout, as an editor does it."""
    (tmp_path / "use.py").write_text(USE)
    output = checked("pyright", "--pythonpath", sys.executable, "use.py", cwd=tmp_path)
    assert re.findall(r'Type of "make.*" is "(\w+)"', output) == ["ParallelEnv", "GymnasiumVectorEnv"]
    (tmp_path / "use.py").write_text('from marl_parallel import make\nmake("CartPole-v1", on_error="retry")\n')
    with pytest.raises(AssertionError, match="retry"):
        checked("pyright", "--pythonpath", sys.executable, "use.py", cwd=tmp_path)
