"""Helpers of the tests: references, comparisons, and paths."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SIMULATORS = TESTS / "simulators"
