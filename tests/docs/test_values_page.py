"""The examples of `docs/values.md` run by themselves."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "values.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, tmp_path):
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=EXAMPLES[number], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_each_section_has_an_example():
    assert len(EXAMPLES) == PAGE.count("\n## ")
