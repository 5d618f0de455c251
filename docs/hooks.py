"""What the site has from outside of `docs`: the changelog, the page of examples, pictures, and tables of the README.

Links that leave `docs`, such as `../examples/images/dashboard.png`, work in the repository and on the site. Examples in
docstrings are shown as code.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "examples/README.md": "examples/README.md"}
PICTURES = ("benchmarks/results/*.png", "examples/images/*")
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
_TABLE = re.compile(r"^<!-- README: (.+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for pattern in PICTURES:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the README's tables where `<!-- README: speed table -->` stands, and let links that leave `docs` work."""
    markdown = _TABLE.sub(lambda found: _table(found[1], page), markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, found[2]))
        if target.startswith("docs/"):
            return found[0]
        return found[1] + posixpath.relpath(target, folder or ".")

    return _LINK.sub(inside, markdown)


class Examples(griffe.Extension):
    """Griffe shows a section as code if its title is `Examples`; ours is `Example`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def _table(name: str, page: Page) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^<!-- {re.escape(name)}: .*? -->$(.*?)^<!-- end -->$", readme, re.DOTALL | re.MULTILINE)
    if found is None:
        raise PluginError(f"{page.file.src_uri}: the README has no table {name!r}")
    above = "../" * (page.file.src_uri.count("/") + 1)
    # A click on a picture shows it in full size: its text is too small for phones.
    return re.sub(r"(!\[[^]]*\])\((?![a-z]+:)([^)]+)\)", rf"[\1({above}\2)]({above}\2)", found[1].strip())
