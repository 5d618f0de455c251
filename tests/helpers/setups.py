"""Setups: backend, shared memory and number of workers of a test, and the selection by `--setups`."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from helpers.start_methods import START_METHODS

BACKENDS = ("serial", "thread", "process", "hybrid", *(["ray"] if importlib.util.find_spec("ray") else []))
_HERE = ("serial", "thread")  # in the process of the test
REST_ONLY = "hybrid"  # what it does by itself has tests of its own


class Setup(NamedTuple):
    """Where environments run and how their values travel.

    Attributes:
        backend: The kind of worker; "portable" stands for an instance of `PortableProcessBackend`.
        shared_memory: Whether values travel through shared memory, or pickled.
        num_workers: 1, 2, or 4: one per environment of a batch of four.
    """

    backend: str
    shared_memory: bool
    num_workers: int

    def __str__(self) -> str:
        return f"{self.backend}-{'shared' if self.shared_memory else 'pickled'}-{self.num_workers}"


# How values travel and how many workers there are matters most to processes; a thread steps as serial does. Whatever
# travels to Ray's actors is pickled.
ALL_SETUPS = [
    Setup(backend, *how)
    for backend in BACKENDS
    for how in ((True, 1), (True, 2), (True, 4), (False, 2))
    if backend == "process" or how == (True, 2) or (backend == "serial" and how == (False, 2))
]
TWO_WORKERS = [one for one in ALL_SETUPS if one.num_workers == 2 and (one.shared_memory or one.backend == "process")]
BACKEND_SETUPS = [setup for setup in TWO_WORKERS if setup.shared_memory]
CONCURRENT_SETUPS = [Setup(backend, True, 2) for backend in BACKENDS[1:] if backend != "hybrid"]
CONCURRENT_OR_PORTABLE = [*CONCURRENT_SETUPS, Setup("portable", True, 2)]
PROCESS_SETUPS = [setup for setup in ALL_SETUPS if setup.backend == "process" and setup.shared_memory]
KILLABLE_SETUPS = [setup for setup in BACKEND_SETUPS if setup.backend in ("process", "ray")]


def rest(*values: Any) -> Any:
    """Parameters of a test that runs only with `--setups=rest` or `all`."""
    return pytest.param(*values, marks=pytest.mark.rest)


def in_turn(*values: Any) -> Any:
    """Parameters of a test that runs on all setups, but with these only on some, as tests marked `in_turn`."""
    return pytest.param(*values, marks=pytest.mark.in_turn)


def rest_in_turn(*values: Any) -> Any:
    """Both `rest` and `in_turn`."""
    return pytest.param(*values, marks=[pytest.mark.rest, pytest.mark.in_turn])


def left_out(items: Sequence[pytest.Item], choice: str) -> list[pytest.Item]:
    """The tests that a run with `--setups=choice` leaves out."""
    if choice == "all":
        return []
    if choice == "ray":
        on_ray = {item for item in items if (setup := _setup_of(item)) is not None and setup.backend == "ray"}
        chosen = on_ray - _out_of_turn(items)
    else:
        one = _on_one_setup(_once_per_backend(items))
        without = one | _out_of_turn(items)
        chosen = one if choice == "one" else _on_another_setup([item for item in items if item not in without], one)
    return [item for item in items if item not in chosen]


def _out_of_turn(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Tests marked `in_turn`, but for a diagonal of their cases and setups, which has each case and each setup.

    One diagonal for setups with shared memory and one for those without: each case runs on both kinds.
    """
    groups: dict[tuple[str, bool], list[tuple[str, Setup, pytest.Item]]] = {}
    for item in items:
        setup = _setup_of(item)
        if setup is not None and item.get_closest_marker("in_turn") is not None:
            group = groups.setdefault((item.nodeid.partition("[")[0], setup.shared_memory), [])
            group.append((item.nodeid.replace(str(setup), ""), setup, item))
    out = set()
    for group in groups.values():
        cases = {case: index for index, case in enumerate(dict.fromkeys(case for case, _, _ in group))}
        setups = {setup: index for index, setup in enumerate(dict.fromkeys(setup for _, setup, _ in group))}
        turns = min(len(cases), len(setups))
        for case, setup, item in group:
            # One further after each round, so that no parameter is always on the same setup.
            place = cases[case] + cases[case] // len(setups)
            if place % turns != setups[setup] % turns:
                out.add(item)
    return out


def _on_one_setup(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Each test on one setup, which depends on its name only, so that all backends have their share."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        setup = _setup_of(item)
        by_test.setdefault(item.nodeid if setup is None else item.nodeid.replace(str(setup), ""), []).append(item)
    return {same[zlib.crc32(test.encode()) % len(same)] for test, same in by_test.items()}


def _on_another_setup(items: Iterable[pytest.Item], before: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Each test on one more setup than `before`: in processes, if it was in this process then, and the other way round.

    Tests marked `rest`, and those marked `every_setup` that are not `in_turn`, keep all setups.
    """
    backends = {item.nodeid.replace(str(setup), ""): setup.backend for item in before if (setup := _setup_of(item))}
    chosen: set[pytest.Item] = set()
    others: dict[str, list[tuple[bool, pytest.Item]]] = {}
    for item in items:
        setup = _setup_of(item)
        test = item.nodeid.replace(str(setup), "")
        marks = {mark for mark in ("every_setup", "in_turn", "rest") if item.get_closest_marker(mark) is not None}
        if setup is None or test not in backends or "rest" in marks or marks == {"every_setup"}:
            chosen.add(item)
        else:
            changes = (setup.backend in _HERE) != (backends[test] in _HERE)
            others.setdefault(test, []).append((changes, item))
    for test, options in others.items():
        preferred = [item for changes, item in options if changes] or [item for _, item in options]
        chosen.add(preferred[zlib.crc32(test.encode()) % len(preferred)])
    return chosen


def _once_per_backend(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Each test once per backend: two workers from the fork server, shared memory.

    A test without such a setup keeps its first one. Those marked `rest` are left out.
    """
    chosen: dict[str, pytest.Item] = {}
    for item in items:
        setup = _setup_of(item)
        if item.get_closest_marker("rest") is not None or (setup is not None and setup.backend == REST_ONLY):
            continue
        name, _, parameters = item.nodeid.partition("[")
        if setup is not None:
            parameters = parameters.replace(str(setup), "process" if setup.backend == "portable" else setup.backend)
        words = parameters.rstrip("]").split("-")
        key = "-".join([name, *("forkserver" if word in START_METHODS else word for word in words)])
        in_once = setup in (None, *BACKEND_SETUPS, *CONCURRENT_OR_PORTABLE) and not {*START_METHODS[1:]} & {*words}
        if in_once or key not in chosen:
            chosen[key] = item
    return [*chosen.values()]


def _setup_of(item: pytest.Item) -> Setup | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return next((value for value in parameters.values() if isinstance(value, Setup)), None)
