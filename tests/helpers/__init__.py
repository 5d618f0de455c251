"""What tests share: references, comparisons, and where things lie."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SIMULATORS = TESTS / "simulators"
