"""Modules of `preload=`, which each process imports once.

    fork server      `import_modules`; the workers that it forks have the modules
    all workers      `import_modules` before their first constructor

A forked worker makes the changes again that the imports made to the state of the process, which it has copied from the
caller since. It raises the exception of the fork server if a module cannot be imported there. It does not run the exit
handlers of the modules: the fork server does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing.util  # which registers an exit handler of its own, as `logging` does
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from marl_parallel.core.objects.script_generators import ModuleGenerators
from marl_parallel.core.warn import warn
from marl_parallel.core.worker.process_state import Changes

_GPU = "/dev/nvidia"
_THREADS_END_WITHIN_S = 0.05


class Preloaded(NamedTuple):
    """What is wrong with a module in a process that forks workers, and which of its generators cannot be seeded."""

    name: str
    threads: int  # how many threads its import has left running
    devices: tuple[str, ...]  # the GPUs that its import has opened
    unseeded: tuple[str, ...]  # names of generators


class PreloadFailed(Exception):
    """A module cannot be imported; its exception is the `__cause__`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.to_do = f"fix the import of {name!r}, or leave it out of preload="


class _Imports:
    """What this process has imported, or the process that it was forked from."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.failed: PreloadFailed | None = None
        self.findings: list[Preloaded] = []
        self.generators = ModuleGenerators()
        self.are_seeded = False
        self.changes: Changes | None = None  # which workers that are forked from here have to make
        self.exit_handlers: list[Callable[..., object]] = []


_imports = _Imports()


def import_modules(names: Sequence[str], *, forks: bool = False) -> None:
    """Import modules that have not been imported yet; `PreloadFailed` if one of them cannot be imported.

    With `forks`, this process forks workers later: what the import leaves behind is recorded.
    """
    if forks:
        changes = Changes()
        with _recording_exit_handlers():
            _import(names, forks=True)
        changes.end()
        _imports.changes = changes
        return
    if _imports.changes is not None:
        _imports.changes.make()
        _imports.changes = None
    _import(names)


def _import(names: Sequence[str], *, forks: bool = False) -> None:
    for name in names:
        if _imports.failed is not None:
            raise _imports.failed
        if name in _imports.done:
            continue
        threads, devices, modules = _threads(), _open_gpus(), {*sys.modules}
        try:
            importlib.import_module(name)
        except BaseException as error:  # also the `SystemExit` of a module
            _imports.failed = PreloadFailed(name)
            raise _imports.failed from error.with_traceback(_in_modules(error.__traceback__))
        _imports.done.add(name)
        new = [module for key, module in [*sys.modules.items()] if key not in modules]
        unseeded = tuple(_imports.generators.add(new))
        if not forks:
            continue
        left, opened = len(_threads_left(threads)), tuple(sorted(_open_gpus() - devices))
        if left or opened or unseeded:
            _imports.findings.append(Preloaded(name, left, opened, unseeded))


def _in_modules(stack: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the first module on; None if none has been executed."""
    while stack is not None and stack.tb_frame.f_code.co_filename.startswith((__file__, importlib.__file__, "<frozen")):
        stack = stack.tb_next
    return stack


@contextlib.contextmanager
def _recording_exit_handlers() -> Iterator[None]:
    """Within, exit handlers that are registered are recorded."""
    weakref.finalize(_Imports(), int)  # the first one registers a handler for all
    register = atexit.register

    def recording(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        _imports.exit_handlers.append(function)
        return register(function, *args, **kwargs)

    atexit.register = recording
    try:
        yield
    finally:
        atexit.register = register


def leave_exit_handlers() -> None:
    """Have the modules' exit handlers and finalizers run at the end of the fork server only; called in its workers.

    A module's temporary folder, for instance, belongs to all of them.
    """
    for function in _imports.exit_handlers:
        atexit.unregister(function)
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:  # no public function lists them
        finalizer.atexit = False
    getattr(multiprocessing.process, "_children", set()).clear()  # else they are ended and joined


def findings() -> tuple[Preloaded, ...]:
    """What users need to know of the modules that this process has imported, and that workers cannot share."""
    return tuple(_imports.findings)


def warn_of(found: Sequence[Preloaded]) -> None:
    """Warn of what `findings` has returned in the fork server."""
    for name, threads, devices, unseeded in found:
        if threads:
            warn(
                f"the import of {name!r}, a module of preload=, starts threads in the fork server ({threads}). Workers "
                "are forked without these threads, and may wait for them for ever. Leave it out of preload=, or "
                "start its threads when an environment is constructed"
            )
        if devices:
            warn(
                f"the import of {name!r}, a module of preload=, opens {', '.join(devices)} in the fork server. A GPU "
                "does not work in processes that are forked after that. Leave the module out of preload=, or open the "
                "GPU when an environment is constructed"
            )
        if unseeded:
            warn(
                f"the import of {name!r}, a module of preload=, creates random generators that cannot be seeded: "
                f"{', '.join(unseeded)}. All workers draw the same numbers from them. Leave the module out of "
                "preload=, or create generators in the environment, from its seed"
            )


def seed_generators_once(seed: int) -> None:
    """Seed the generators of the modules, unless this process has done so."""
    if not _imports.are_seeded:
        _imports.are_seeded = True
        _imports.generators.seed(seed)


def _threads() -> set[str]:
    with contextlib.suppress(OSError):
        return {*os.listdir("/proc/self/task")}
    return set()


def _threads_left(before: set[str]) -> set[str]:
    """Threads that have been started since; the kernel lists a thread a little longer than `join` waits for it."""
    deadline = time.monotonic() + _THREADS_END_WITHIN_S
    while (left := _threads() - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    return left


def _open_gpus() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {path for path in found if path.startswith(_GPU)}
