"""Each example and each command is named together with the extras that it needs."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.release_independent

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = (ROOT / "pyproject.toml").read_text()


def listed(name: str) -> list[str]:
    """A list of texts in `pyproject.toml`, for which Python 3.10 has no parser."""
    found = re.search(rf"^{name} = (\[$.*?^\]|\[[^\n]*\])", PROJECT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    entries: list[str] = ast.literal_eval(found[1])
    return entries


# By package that is imported: what installs it. A library that another one requires comes with that one.
DISTRIBUTIONS = {
    "agilerl": ["agilerl"],
    "benchmarl": ["benchmarl"],
    "gymnasium": ["gymnasium"],
    "matplotlib": ["matplotlib"],
    "mpe2": ["mpe2"],
    "numpy": ["numpy"],
    "pettingzoo": ["pettingzoo"],
    "pettingzoo.butterfly": ["pettingzoo[butterfly]"],
    "prometheus_client": ["prometheus-client"],
    "ray": ["ray", "ray[rllib]"],
    "ray.rllib": ["ray[rllib]"],
    "ray.tune": ["ray[rllib]"],
    "rich": ["rich"],
    "skrl": ["skrl"],
    "stable_baselines3": ["stable-baselines3"],
    "tensordict": ["torchrl"],
    "tianshou": ["tianshou"],
    "torch": ["torch", "stable-baselines3", "torchrl", "agilerl", "tianshou", "skrl[torch]"],
    "torchrl": ["torchrl", "benchmarl"],
    "tyro": ["tyro"],
}
# By name of this package: what it imports when it is used.
OURS = {
    "AgileRLVecEnv": ["agilerl"],
    "BenchMARLTask": ["benchmarl"],
    "Monitor": ["prometheus-client"],
    "ParallelMultiAgentEnvRunner": ["ray[rllib]"],
    "RayBackend": ["ray", "ray[rllib]"],
    "SB3VecEnv": ["stable-baselines3"],
    "SkrlEnv": ["skrl"],
    "TianshouVecEnv": ["tianshou"],
    "TorchRLEnv": ["torchrl", "benchmarl"],
    "record_video": ["imageio"],
}
WORD = r"`(\w+)`"


def distribution(requirement: str) -> str:
    """`pettingzoo[butterfly]>=1.25` without its versions."""
    return re.split(r"[ ;<>=!~]", requirement, maxsplit=1)[0]


def installed_by(requirements: list[str]) -> set[str]:
    """The distributions of requirements, with those of this package's extras."""
    result: set[str] = set()
    for requirement in requirements:
        name = distribution(requirement)
        package, _, extras = name.rstrip("]").partition("[")
        if package in ("marl-parallel", "."):
            parts = ("dependencies", *filter(None, extras.split(",")))
            own = [one for part in parts for one in listed(part)]
            result |= installed_by(own)
        else:
            result |= {name, package}
    return result


def commands(text: str) -> list[str]:
    """What the `pip install` commands of a text install, and what it says in words: "the extra `video`"."""
    found: list[str] = []
    for command in re.findall(r"pip install ([^`\n&]+)", text):
        found += re.findall(r"[\w.-]+(?:\[[\w,]+\])?(?:==[\d.]+)?", command.replace("-e ", "").replace('"', " "))
    for words in re.findall(r"extras? ((?:`\w+`(?:, | and )?)+)", text):  # in words
        found.append(f".[{','.join(re.findall(WORD, words))}]")
    return found


def used(path: Path) -> Iterator[str]:
    """The modules that an example imports, or names in a text such as `"mpe2.simple_spread_v3"`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(?:mpe2|pettingzoo)\.[\w.]+", node.value)


def needed(path: Path) -> dict[str, list[str]]:
    """By what an example uses, the distributions of which one is enough."""
    needs: dict[str, list[str]] = {}
    for name in used(path):
        parts = name.split(".")
        if parts[0] == "marl_parallel":
            needs |= {part: OURS[part] for part in parts if part in OURS}
        elif parts[0] not in sys.stdlib_module_names:
            # The longest name that is listed: `ray.rllib` needs more than `ray`.
            kinds = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            kind = next((kind for kind in kinds if kind in DISTRIBUTIONS), None)
            assert kind is not None, f"{path.name} uses {name}: add what installs it to DISTRIBUTIONS"
            needs[kind] = DISTRIBUTIONS[kind]
    return needs


def missing(path: Path, text: str) -> list[str]:
    """What an example uses and a text does not install."""
    installed = installed_by([".", *commands(text)])
    return [name for name, kinds in needed(path).items() if not installed & {*kinds}]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_name_what_they_import(path):
    """The docstring's command installs all that the example imports."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None
    if "pip install matplotlib" in text:  # `draw_dashboard.py` does not use this package
        assert {*needed(path)} == {"matplotlib"}
        return
    assert any(command == "." or command.startswith(".[") for command in commands(text)), f"{path.name} names no extra"
    assert not missing(path, text)


def mentions() -> Iterator[tuple[Path, str, str]]:
    """Pages, the examples that they name, and their text up to the end of that paragraph."""
    for page in PAGES:
        text = page.read_text()
        if page.name == "performance.md":  # where an example is what a table has measured
            continue
        for match in re.finditer(r"examples/(\w+)\.py", text):
            end = text.find("\n\n", match.end())
            yield page, match[1], text[: None if end < 0 else end]


@pytest.mark.parametrize(
    ("page", "example", "text"),
    [pytest.param(*one, id=f"{one[0].relative_to(ROOT)}-{one[1]}") for one in mentions()],
)
def test_pages_name_what_their_examples_need(page, example, text):
    """Before the example, or in the same paragraph."""
    assert not missing(ROOT / "examples" / f"{example}.py", text)


def test_commands_name_their_extras():
    """A page that shows how to call `marl-parallel` says what installs it, or links to the page that does."""
    seen = 0
    for page in PAGES:
        for match in re.finditer(r"marl-parallel (check|tune|bench|record|replay|doctor) \S", page.read_text()):
            text = page.read_text()
            section = text[: text.find("\n## ", match.end()) % (len(text) + 1)]
            installed = installed_by(commands(section))
            assert "typer" in installed or "command_line.md" in text, f"{page}: {match[0]} needs the extra cli"
            if match[1] == "record":
                assert "imageio" in installed, f"{page}: {match[0]} needs the extra video"
            seen += 1
    assert seen > 10
