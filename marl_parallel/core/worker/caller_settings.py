"""Settings that workers copy from the caller: levels of loggers, filters of warnings, `numpy.seterr`, recursion limit.

`CallerSettings` reads them at construction and at each reset, `WorkerSettings` applies them in a worker. What a
simulator sets in the worker stays until the caller changes the same setting. NumPy has a `seterr` for each thread, so
workers in threads of the caller's process copy this one, too; all other settings belong to a process.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from marl_parallel.core.objects import pickling


class LoggerState(NamedTuple):
    """The level and handlers of one of the caller's loggers; by default, those of a new logger."""

    level: int = logging.NOTSET
    has_handlers: bool = False  # handlers of its own, without null handlers
    propagates: bool = True


class Filter(NamedTuple):
    """An entry of `warnings.filters`."""

    pickled: bytes
    needs: str  # the module of its category: a worker without this module cannot get such warnings


class ProcessSettings(NamedTuple):
    """The settings of the caller's process, and of its thread."""

    disabled: int  # the level of `logging.disable`
    loggers: Mapping[str, LoggerState] | None  # see `_loggers`; None: levels are not taken over
    filters: Sequence[Filter]
    float_errors: Mapping[str, str]  # for `numpy.seterr`
    recursion_limit: int


_NEW, _NOTHING = LoggerState(), ProcessSettings(0, None, (), {}, 0)


class CallerSettings:
    """The settings of this process, pickled for workers.

    Args:
        takes_levels: Whether workers take over the levels of loggers.
        local_modules: Modules that workers cannot import; others may be added later.
    """

    def __init__(self, takes_levels: bool, local_modules: Sequence[ModuleType]) -> None:
        self._takes_levels, self._local_modules = takes_levels, local_modules
        self._seen: Any = None  # what `_pickled` was made from
        self._pickled = b""

    def pickled(self) -> bytes:
        """The present settings; the same object for as long as nothing changes."""
        loggers = _loggers() if self._takes_levels else None
        # Workers warn in place of calling the caller's function, which the modes "call" and "log" do.
        modes = cast("dict[str, str]", np.geterr())
        float_errors = {kind: "warn" if mode in ("call", "log") else mode for kind, mode in modes.items()}
        settings = ProcessSettings(logging.root.manager.disable, loggers, (), float_errors, sys.getrecursionlimit())
        seen = settings, [*warnings.filters], len(self._local_modules)
        if seen != self._seen:
            self._seen = seen
            self._pickled = pickle.dumps(settings._replace(filters=self._filters()), pickle.HIGHEST_PROTOCOL)
        return self._pickled

    def _filters(self) -> list[Filter]:
        local = {"__main__", "__mp_main__", *(module.__name__ for module in self._local_modules)}
        found = []
        for one in warnings.filters:
            module = one[2].__module__
            # A class that cannot be pickled cannot be the class of a warning in a worker.
            with contextlib.suppress(Exception), pickling.by_value(self._local_modules):
                found.append(Filter(pickling.dumps_by_value(one), "" if module in local else module))
        return found


def _loggers() -> dict[str, LoggerState]:
    """The loggers of this process that differ from a new one, by name; "" is the root logger."""
    return {
        name: LoggerState(one.level, any(type(h) is not logging.NullHandler for h in one.handlers), one.propagate)
        for name, one in [("", logging.root), *logging.root.manager.loggerDict.items()]  # other threads may add some
        if isinstance(one, logging.Logger) and (one.level or one.handlers or not one.propagate)
    }


class WorkerSettings:
    """The settings of the caller in a worker.

    Args:
        own_process: Whether the worker has its own process; if it is a thread, only NumPy's `seterr` is applied.

    Attributes:
        forwards: Whether log records go to the caller's process.
    """

    def __init__(self, own_process: bool = True) -> None:
        self.forwards = False
        self._own_process = own_process
        self._pickled, self._settings = b"", _NOTHING
        self._installed: list[Any] = []  # the caller's entries in `warnings.filters`
        self._placeholder = logging.NullHandler()  # of the root logger, for the caller's handlers
        self._waiting: set[str] = set()  # modules that are not imported yet, with categories of filters

    def apply(self, pickled: bytes) -> None:
        """Take over settings, unless they are the present ones."""
        if pickled == self._pickled:
            self.look_again()
            return
        settings: ProcessSettings = pickle.loads(pickled)
        before, self._pickled, self._settings = self._settings, pickled, settings
        modes = {kind: mode for kind, mode in settings.float_errors.items() if mode != before.float_errors.get(kind)}
        np.seterr(**cast("Any", modes))
        if not self._own_process:
            return
        if settings.recursion_limit != before.recursion_limit:
            with contextlib.suppress(RecursionError):  # too low for the calls that are running: it stays as it is
                sys.setrecursionlimit(settings.recursion_limit)
        if settings.loggers is not None:
            self._set_levels(before.loggers or {}, settings.loggers)
            if settings.disabled != before.disabled:
                logging.disable(settings.disabled)
        self._set_filters(keep_others=before is not _NOTHING)

    def look_again(self) -> None:
        """Add filters for categories of modules that have been imported meanwhile."""
        if any(module in sys.modules for module in self._waiting):
            self._set_filters(keep_others=True)

    def shows(self, name: str) -> bool:
        """Whether the caller's process has handlers for the records of a logger."""
        loggers = self._settings.loggers or {}
        state = loggers.get(name, _NEW)
        while name and state.propagates and not state.has_handlers:
            name = name.rpartition(".")[0]
            state = loggers.get(name, _NEW)
        return state.has_handlers

    def leave_handlers(self) -> None:
        """Have the root logger print records without a handler again, in a process that a simulator has forked."""
        logging.root.removeHandler(self._placeholder)

    def _set_levels(self, before: Mapping[str, LoggerState], loggers: Mapping[str, LoggerState]) -> None:
        """Set the levels that differ from those set before."""
        for name in {**before, **loggers}:
            level = loggers.get(name, _NEW).level
            if level != before.get(name, _NEW).level:
                logging.getLogger(name).setLevel(level)
        if self.forwards and self.shows("") and not logging.root.handlers:
            # As in the caller's process, `logging.basicConfig` does nothing then.
            logging.root.addHandler(self._placeholder)

    def _set_filters(self, *, keep_others: bool) -> None:
        mine = [one for one in warnings.filters if not any(one is old for old in self._installed)]
        self._installed, self._waiting = [], set()
        for pickled, needs in self._settings.filters:
            if needs and needs not in sys.modules:
                self._waiting.add(needs)
                continue
            with contextlib.suppress(Exception):  # a class that exists in the caller's process only
                self._installed.append(pickling.loads(pickled))
        warnings.resetwarnings()  # also clears the decisions that Python has cached for the old filters
        filters: Any = warnings.filters
        filters.extend([*(mine if keep_others else ()), *self._installed])
