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

from marl_parallel.core import pickling

ROOT = "root"


class LoggerState(NamedTuple):
    """The level and handlers of one of the caller's loggers."""

    level: int = logging.NOTSET
    has_handlers: bool = False  # handlers of its own, without null handlers
    propagates: bool = True


class Filter(NamedTuple):
    """An entry of `warnings.filters`; its category, which is a class, is pickled by itself."""

    action: str
    message: Any
    category: bytes
    module: Any
    line: int
    needs: str  # the module of the category: a worker without this module cannot get such warnings


class Settings(NamedTuple):
    """The settings of the caller's process, and of its thread."""

    disabled: int  # the level of `logging.disable`
    loggers: Mapping[str, LoggerState] | None  # those that differ from a new one; None: levels are not taken over
    filters: Sequence[Filter]
    float_errors: Mapping[str, str]  # for `numpy.seterr`
    recursion_limit: int


_NEW = LoggerState()


def all_loggers() -> dict[str, logging.Logger]:
    """The loggers of this process by name."""
    named = [*logging.root.manager.loggerDict.items()]  # other threads may add some
    return {ROOT: logging.root, **{name: one for name, one in named if isinstance(one, logging.Logger)}}


def has_handlers(logger: logging.Logger) -> bool:
    """Whether any handler, except null handlers, gets the records of a logger."""
    current: logging.Logger | None = logger
    while current is not None:
        if _own_handlers(current):
            return True
        current = current.parent if current.propagate else None
    return False


def _own_handlers(logger: logging.Logger) -> bool:
    return any(type(handler) is not logging.NullHandler for handler in logger.handlers)


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
        loggers: dict[str, LoggerState] | None = None
        if self._takes_levels:
            loggers = {
                name: LoggerState(one.level, bool(one.handlers) and _own_handlers(one), one.propagate)
                for name, one in all_loggers().items()
                if one.level or one.handlers or not one.propagate
            }
        disabled = logging.root.manager.disable if self._takes_levels else logging.NOTSET
        of_thread = _float_errors(), sys.getrecursionlimit()
        seen = disabled, loggers, [*warnings.filters], len(self._local_modules), of_thread
        if seen != self._seen:
            self._seen = seen
            settings = Settings(disabled, loggers, self._filters(), *of_thread)
            self._pickled = pickle.dumps(settings, pickle.HIGHEST_PROTOCOL)
        return self._pickled

    def _filters(self) -> list[Filter]:
        local = {"__main__", "__mp_main__", *(module.__name__ for module in self._local_modules)}
        found = []
        for action, message, category, module, line in warnings.filters:
            needs = "" if category.__module__ in local else category.__module__
            # A class that cannot be pickled cannot be the class of a warning in a worker.
            with contextlib.suppress(Exception), pickling.by_value(self._local_modules):
                found.append(Filter(action, message, pickling.dumps_by_value(category), module, line, needs))
        return found


def _float_errors() -> dict[str, str]:
    """NumPy's handling of floating-point errors in this thread.

    The function of the modes "call" and "log" belongs to the caller: workers warn in place of calling it.
    """
    modes = cast("dict[str, str]", np.geterr())
    return {kind: "warn" if mode in ("call", "log") else mode for kind, mode in modes.items()}


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
        self._float_errors: Mapping[str, str] = {}
        self._recursion_limit = 0
        self._pickled = b""
        self._loggers: Mapping[str, LoggerState] = {}
        self._filters: Sequence[Filter] = ()
        self._installed: list[Any] = []  # the caller's entries in `warnings.filters`
        self._placeholder = logging.NullHandler()  # of the root logger, for the caller's handlers
        self._waiting: set[str] = set()  # modules that are not imported yet, with categories of filters

    def apply(self, pickled: bytes) -> None:
        """Take over settings, unless they are the present ones."""
        if pickled == self._pickled:
            self.look_again()
            return
        first, self._pickled = not self._pickled, pickled
        settings: Settings = pickle.loads(pickled)
        before, self._float_errors = self._float_errors, settings.float_errors
        np.seterr(**cast("Any", {kind: how for kind, how in self._float_errors.items() if how != before.get(kind)}))
        if not self._own_process:
            return
        if settings.recursion_limit != self._recursion_limit:
            self._recursion_limit = settings.recursion_limit
            with contextlib.suppress(RecursionError):  # too low for the calls that are running: it stays as it is
                sys.setrecursionlimit(settings.recursion_limit)
        if settings.loggers is not None:
            self._set_levels(settings.loggers)
            if logging.root.manager.disable != settings.disabled:
                logging.disable(settings.disabled)
        self._filters = settings.filters
        self._set_filters(keep_others=not first)

    def look_again(self) -> None:
        """Add filters for categories of modules that have been imported meanwhile."""
        if any(module in sys.modules for module in self._waiting):
            self._set_filters(keep_others=True)

    def shows(self, name: str) -> bool:
        """Whether the caller's process has handlers for the records of a logger."""
        while True:
            state = self._loggers.get(name, _NEW)
            if state.has_handlers or name == ROOT or not state.propagates:
                return state.has_handlers
            name = name.rpartition(".")[0] or ROOT

    def leave_handlers(self) -> None:
        """Have the root logger print records without a handler again, in a process that a simulator has forked."""
        logging.root.removeHandler(self._placeholder)

    def _set_levels(self, loggers: Mapping[str, LoggerState]) -> None:
        """Set the levels that differ from those set before."""
        before, self._loggers = self._loggers, loggers
        for name in {**before, **loggers}:
            level = loggers.get(name, _NEW).level
            if level != before.get(name, _NEW).level:
                logging.getLogger(None if name == ROOT else name).setLevel(level)
        if self.forwards and self.shows(ROOT) and not logging.root.handlers:
            # As in the caller's process, `logging.basicConfig` does nothing then.
            logging.root.addHandler(self._placeholder)

    def _set_filters(self, *, keep_others: bool) -> None:
        mine = [one for one in warnings.filters if not any(one is old for old in self._installed)]
        self._installed, self._waiting = [], set()
        for one in self._filters:
            if one.needs and one.needs not in sys.modules:
                self._waiting.add(one.needs)
                continue
            with contextlib.suppress(Exception):  # a class that exists in the caller's process only
                self._installed.append((one.action, one.message, pickling.loads(one.category), one.module, one.line))
        warnings.resetwarnings()  # also clears the decisions that Python has cached for the old filters
        filters: Any = warnings.filters
        filters.extend([*(mine if keep_others else ()), *self._installed])
