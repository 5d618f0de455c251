"""The package and its tests without what only Linux has: `other_system/sitecustomize.py` hides it.

`.ci/run` has the conformance tests with worker processes there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT, TESTS

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.skipif(sys.platform != "linux", reason="this is one of them"),
]

OTHER = TESTS / "helpers" / "other_system"

IMPORT_ALL = """
import importlib, pkgutil
import marl_parallel
assert eval("sys.platform", vars(marl_parallel.backends)) == {system!r}
for module in pkgutil.walk_packages(marl_parallel.__path__, "marl_parallel."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if "on this system" in str(error):
            raise
        print(module.name)  # it needs a library that is not installed
"""


def run(system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the project's folder, where it seems to be another system."""
    environ = {**os.environ, "OTHER_SYSTEM": system, "PYTHONPATH": os.pathsep.join([str(OTHER), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_module_is_imported(system):
    done = run(system, "-c", IMPORT_ALL.format(system=system))
    assert done.returncode == 0, done.stderr
    assert "backends" not in done.stdout.replace("backends.ray", "")


@pytest.mark.rest
def test_every_test_is_collected():
    """On Windows, which lacks more than macOS."""
    done = run("win32", "-m", "pytest", "-n", "0", "-q", "--collect-only", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests collected" in done.stdout
