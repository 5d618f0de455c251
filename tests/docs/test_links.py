"""Links between pages lead to files and headings that exist, in the repository and on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.release_independent

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def without_code(text: str) -> str:
    return re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> list[str]:
    """As plain text: without code marks and links."""
    found = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in found]


def on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_site(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def targets(path: Path) -> list[str]:
    """The targets of links to other files of the repository."""
    text = re.sub(r"`[^`\n]*`", "", without_code(path.read_text()))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for target in targets(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in map(on_github, headings(path)), target
            assert anchor in map(on_site, headings(path)), target


def test_there_are_links():
    found = [target for page in PAGES for target in targets(page)]
    assert len([target for target in found if "#" in target]) > 60
