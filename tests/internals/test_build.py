"""What `setup.py` builds, with every kind of Python."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    ("free_threaded", "modules", "wheel"),
    [
        (None, ["marl_parallel.core._codec"], {"bdist_wheel": {"py_limited_api": "cp310"}}),  # on Windows
        (0, ["marl_parallel.core._codec"], {"bdist_wheel": {"py_limited_api": "cp310"}}),
        (1, [], {}),
    ],
)
def test_compiled_code_and_wheels(free_threaded, modules, wheel, monkeypatch):
    """Free-threaded builds have no limited API: they get no compiled code, and wheels without its tag."""
    variable, built = sysconfig.get_config_var, dict[str, Any]()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda n: free_threaded if n == "Py_GIL_DISABLED" else variable(n))

    def extension(name: str, sources: list[str], **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(name=name, sources=sources, **arguments)

    # The real one need not be installed where the tests run.
    setuptools = SimpleNamespace(Extension=extension, setup=lambda **arguments: built.update(arguments))
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    runpy.run_path(str(ROOT / "setup.py"))
    assert [module.name for module in built["ext_modules"]] == modules
    assert all(module.optional and module.py_limited_api for module in built["ext_modules"])
    assert built["options"] == wheel
