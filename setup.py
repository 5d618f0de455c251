"""What pyproject.toml cannot say: NumPy's headers, the builds of Python that load compiled code, the repository."""

import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy
from setuptools import Extension, setup

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
# A pure-Python wheel is for machines that no compiled one fits. Free-threaded builds have no limited API: the compiler
# refuses it, and so does the command that makes wheels.
PURE = os.environ.get("MARL_PARALLEL_PURE") == "1" or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# GitHub's runners have these. Built elsewhere, a package does not know its home: it has no URLs, and relative links.
SERVER, NAME = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
REPOSITORY = f"{SERVER}/{NAME}" if SERVER and NAME else None


def compiled(name: str, sources: list[str], **arguments: Any) -> Extension:
    """Compiled code for all releases of Python from 3.10 on; without a compiler, the package does without it."""
    macros = [("Py_LIMITED_API", "0x030A0000")]
    return Extension(name, sources, define_macros=macros, py_limited_api=True, optional=True, **arguments)


CODEC = "marl_parallel/core/compiled"
EXTENSIONS = [
    compiled(
        "marl_parallel.core._codec",
        sorted(f"{CODEC}/{path.name}" for path in (HERE / CODEC).glob("*.c")),
        depends=[f"{CODEC}/codec.h"],
        include_dirs=[numpy.get_include()],
    )
]
if os.name == "posix":
    EXTENSIONS.append(compiled("marl_parallel.backends._signals", ["marl_parallel/backends/_signals.c"]))


def with_absolute_links(markdown: str) -> str:
    """Let links to files of the repository work on pages that show its README elsewhere."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({REPOSITORY}/{'raw' if picture else 'blob'}/main/{path})"

    return re.sub(r"(!?)\[([^]\n]*)\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, markdown)


URLS = {
    "Source": f"{REPOSITORY}",
    "Documentation": f"{REPOSITORY}/tree/main/docs",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    "Issues": f"{REPOSITORY}/issues",
}

setup(
    ext_modules=[] if PURE else EXTENSIONS,
    options={} if PURE else {"bdist_wheel": {"py_limited_api": "cp310"}},
    long_description=with_absolute_links(README) if REPOSITORY else README,
    long_description_content_type="text/markdown",
    project_urls=URLS if REPOSITORY else {},
)
