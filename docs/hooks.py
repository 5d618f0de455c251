"""What the site has from outside of `docs`: the changelog, the page of examples, and pictures.

Links that leave `docs`, such as `../examples/images/dashboard.png`, work in the repository and on the site. Examples in
docstrings are shown as code.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "examples/README.md": "examples/README.md"}
PICTURES = ("benchmarks/results/*.png", "examples/images/*")
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for pattern in PICTURES:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave `docs` work, and leave out the list of pages where a tab has only one."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
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
