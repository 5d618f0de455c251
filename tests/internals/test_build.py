"""What `setup.py` builds, with every kind of Python, and what the package says about itself."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from helpers import ROOT

import marl_parallel

COMPILED = ["marl_parallel.core._codec", *(["marl_parallel.backends._signals"] if os.name == "posix" else [])]
VARIABLES = ("MARL_PARALLEL_PURE", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY")


@pytest.fixture
def run_setup(monkeypatch):
    """Runs `setup.py` with environment variables; returns the arguments that it passes to setuptools."""

    def run(**environ: str) -> dict[str, Any]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        built = dict[str, Any]()

        def extension(name: str, sources: list[str], **arguments: Any) -> SimpleNamespace:
            return SimpleNamespace(name=name, sources=sources, **arguments)

        # The real one need not be installed where the tests run.
        setuptools = SimpleNamespace(Extension=extension, setup=lambda **arguments: built.update(arguments))
        monkeypatch.setitem(sys.modules, "setuptools", setuptools)
        runpy.run_path(str(ROOT / "setup.py"))
        return built

    return run


@pytest.mark.parametrize(
    ("free_threaded", "environ", "modules", "wheel"),
    [
        (None, {}, COMPILED, {"bdist_wheel": {"py_limited_api": "cp310"}}),  # on Windows
        (0, {}, COMPILED, {"bdist_wheel": {"py_limited_api": "cp310"}}),
        (0, {"MARL_PARALLEL_PURE": "1"}, [], {}),
        (1, {}, [], {}),
    ],
)
def test_compiled_code_and_wheels(free_threaded, environ, modules, wheel, monkeypatch, run_setup):
    """Free-threaded builds have no limited API: they get no compiled code, and wheels without its tag."""
    variable = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda n: free_threaded if n == "Py_GIL_DISABLED" else variable(n))
    built = run_setup(**environ)
    assert [module.name for module in built["ext_modules"]] == modules
    assert all(module.optional and module.py_limited_api for module in built["ext_modules"])
    assert built["options"] == wheel


RAISES = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("marl_parallel.core._codec", sys.argv[1])
spec = importlib.util.spec_from_loader(loader.name, loader)
sys.modules[loader.name] = importlib.util.module_from_spec(spec)
from gymnasium import spaces
from marl_parallel import EnvError, ParallelEnv, codec

class Raises:
    possible_agents = ["a"]
    observation_space = action_space = spaces.Dict(a=spaces.Discrete(9))
    time = 0

    def reset(self):
        return {"a": 1}, {"a": {}}

    def step(self, actions):
        self.time += 1
        flags = {"a": False, "__all__": False}
        return {"a": self.time}, {"a": 1.0 / (2 - self.time)}, flags, flags, {"a": {}}

with ParallelEnv([Raises] * 2, backend="serial") as env:
    env.reset()
    env.step([{"a": 0}] * 2)
    try:
        env.step([{"a": 0}] * 2)
    except EnvError as error:
        print(codec, sys.modules[loader.name].__file__ == sys.argv[1], error.method, repr(error.original))
"""


@pytest.mark.release_independent  # the code is built with the headers of NumPy 2 only
@pytest.mark.needs("_codec")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has another way to take the time")
def test_compiled_code_of_other_systems_raises_the_exception_of_a_simulator(tmp_path):
    """They take the time from Python, while the exception of the step is set."""
    library = tmp_path / "_codec.so"
    headers = [f"-I{numpy.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    options = ["-shared", "-fPIC", "-O0", "-U__linux__", "-DPy_LIMITED_API=0x030A0000", *headers]
    sources = sorted((ROOT / "marl_parallel/core/compiled").glob("*.c"))
    compiler = [shutil.which("cc") or "gcc", *options, *sources, "-o", library]
    subprocess.run(compiler, check=True, timeout=120)
    printed = subprocess.run([sys.executable, "-c", RAISES, library], capture_output=True, text=True, timeout=60)
    assert printed.stdout.split(maxsplit=3) == ["c", "True", "step", "ZeroDivisionError('float division by zero')\n"]


def anchors(page: str) -> list[str]:
    """Those that a repository's web page has, one for each heading."""
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_of_a_package_lead_to_the_repository_that_built_it(run_setup):
    readme = (ROOT / "README.md").read_text()
    assert run_setup()["long_description"] == readme
    built = run_setup(GITHUB_SERVER_URL="https://example.org", GITHUB_REPOSITORY="owner/name")
    home = "https://example.org/owner/name"
    assert built["project_urls"]["Source"] == home
    assert all(url.startswith(home) for url in built["project_urls"].values())
    text = built["long_description"]
    targets = re.findall(r"(!?)\[[^]\n]*\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    for picture, target in targets:
        assert target.startswith(("https://", "#"))
        kind = f"{home}/{'raw' if picture else 'blob'}/main/"
        if target.startswith(home):
            assert target.startswith(kind)
            path, _, anchor = target.removeprefix(kind).partition("#")
            assert (ROOT / path).is_file()
            assert not anchor or anchor in anchors((ROOT / path).read_text())
        elif target.startswith("#"):
            assert target.removeprefix("#") in anchors(readme)
    # Nothing else has changed.
    assert re.sub(rf"{home}/(raw|blob)/main/", "", text) == readme


def test_one_version():
    assert version("marl-parallel") == marl_parallel.__version__
    assert not re.search(r"^version\s*= *[\"\d]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    changelog = re.escape(f"## [{marl_parallel.__version__}] - ") + r"(unreleased|\d{4}-\d\d-\d\d)$"
    (date,) = re.findall(changelog, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert citation["version"] == marl_parallel.__version__
    assert citation.get("date-released", "unreleased") == date
