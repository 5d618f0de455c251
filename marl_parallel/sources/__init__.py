"""Simulators that step many environments themselves: `native.py` has the base class, the others wrap libraries."""
