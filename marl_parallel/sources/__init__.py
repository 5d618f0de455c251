"""Simulators that step many environments by themselves: `native.py` says what one has, the others wrap libraries."""
