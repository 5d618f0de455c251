"""`docs/environments.md`: its code runs, and it names every adapter."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

from marl_parallel.adapters import ADAPTERS

PAGE = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=["first", "wrappers", "tuples", "pymarl", "mappo"])
def test_code_prints_the_commented_output(block, tmp_path):
    done = subprocess.run([sys.executable, "-"], input=block, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)


def test_every_adapter_is_named():
    assert set(re.findall(r'`"([a-z-]+)"`', PAGE)) >= set(ADAPTERS)
