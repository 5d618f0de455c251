"""Texts for people: advice, reports of faults, log records."""
