"""`Neighbours`: the environments that live in one process, and what they have in common there without being meant to.

Two environments may be one object, if a constructor returns the same object in each call. And constructors may set what
belongs to the whole process, such as its working directory, each to another value.
"""

from __future__ import annotations

import locale
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from marl_parallel.adapters import MultiAgentEnv
from marl_parallel.adapters.attributes import layers, type_name
from marl_parallel.core.messages import InCommon, Refusal
from marl_parallel.core.reports.advice import a_process_each

ProcessSettings: TypeAlias = dict[str, str | None]
"""What simulators may set for a whole process: the variables in `os.environ`, and by `_NAMES` the rest."""

_NAMES = _DIRECTORY, _UMASK, _LOCALE = "the working directory", "the umask", "the locale"
_IN_STATUS = re.compile(r"^Umask:\s*(\d+)", re.MULTILINE)
_SEPARATOR = re.compile(rf"[{re.escape(os.pathsep)}\s]+")


class Neighbours:
    """The environments in a worker's own process, or those of all workers in the caller's process."""

    def __init__(self, *, own_process: bool = False) -> None:
        self._own_process, self._lock = own_process, threading.Lock()
        # By id, the environment and a reference to the object, which a wrapper may drop later.
        self._objects: dict[int, tuple[int, Callable[[], Any]]] = {}
        self._present: set[int] = set()  # the environments that live, or are being constructed
        self._settings: dict[int, ProcessSettings] = {}  # by environment, after its constructor

    def begin(self, env_id: int) -> ProcessSettings:
        """Note that an environment is going to be constructed; returns the settings before that, for `add`."""
        with self._lock:
            self._present.add(env_id)
        return process_settings()

    def others(self, env_id: int) -> bool:
        """Whether another environment is in this process."""
        with self._lock:
            return bool(self._present - {env_id})

    def forget(self, env_id: int) -> None:
        """Forget an environment that is constructed again, is refused, or whose constructor has raised."""
        with self._lock:
            self._present.discard(env_id)
            self._settings.pop(env_id, None)
            self._objects = {key: one for key, one in self._objects.items() if one[0] != env_id}

    def add(self, env_id: int, env: MultiAgentEnv, before: ProcessSettings) -> InCommon:
        """Add a new environment; `before` is the result of `begin`.

        Raises `Refusal` if it is the same object as another environment.
        """
        after = process_settings()
        with self._lock:
            outermost, *inner = layers(env.source)
            owners = {id(one): self._owner(one, env_id) for one in (env, outermost, *inner)}
            for one in (env, outermost):
                if owners[id(one)] != env_id:
                    raise Refusal(ValueError, self._same_object(owners[id(one)], outermost))
            shared = [(owners[id(one)], type_name(one)) for one in inner if owners[id(one)] != env_id]
            for one in (env, outermost, *inner):
                if owners[id(one)] == env_id:
                    self._objects[id(one)] = env_id, _reference(one)
            earlier = [one for other, one in self._settings.items() if other != env_id]
            overridden = [name for name in _changed(before, after) if any(_has(one, name, before) for one in earlier)]
            # Most constructors change nothing: then all environments have one dict.
            self._settings[env_id] = earlier[-1] if earlier and earlier[-1] == after else after
        labels = [name if name in _NAMES else f"os.environ[{name!r}]" for name in overridden]
        return InCommon(tuple(shared), tuple(labels))

    def replace(self, env_id: int, env: MultiAgentEnv) -> None:
        """Put a loaded environment in the place of an environment; what it has in common with others is not checked."""
        self.forget(env_id)
        settings = self.begin(env_id)
        with self._lock:
            self._settings[env_id] = settings
            for one in (env, *layers(env.source)):
                if self._owner(one, env_id) == env_id:
                    self._objects[id(one)] = env_id, _reference(one)

    def _owner(self, one: Any, env_id: int) -> int:
        """The environment that an object belongs to; `env_id` if it is new."""
        owner, present = self._objects.get(id(one), (env_id, lambda: one))
        return owner if present() is one else env_id  # another object had its id

    def _same_object(self, other: int, source: Any) -> str:
        return (
            f"its constructor returned the same object as the constructor of environment {other}, of type "
            f"{type_name(source)}, so each step would step it several times. Let each call of a constructor return a "
            "new environment, such as `lambda: Simulator()`, or, if there can be only one in a process, pass "
            f"{a_process_each(own_process=self._own_process)}"
        )


def _reference(one: Any) -> Callable[[], Any]:
    """A weak reference; a strong one to an object of a class with slots that allows no other."""
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one


def process_settings() -> ProcessSettings:
    """The present settings of this process; takes some hundred microseconds, most of them for the variables."""
    try:
        directory = os.getcwd()
    except OSError:  # it has been removed
        directory = None
    return {**os.environ, _DIRECTORY: directory, _UMASK: _umask(), _LOCALE: locale.setlocale(locale.LC_ALL)}


def _umask() -> str | None:
    """The umask of this process; None where it can only be read by setting it."""
    try:
        with open("/proc/self/status") as status:
            found = _IN_STATUS.search(status.read())
    except OSError:
        return None
    return found and found[1]


def _changed(before: ProcessSettings, after: ProcessSettings) -> list[str]:
    """The settings that have other values now; without variables that are new, or that only have more parts."""
    if before == after:
        return []
    return [
        name
        for name, old in before.items()
        if old != (new := after.get(name)) and (name in _NAMES or not _parts(old) <= _parts(new))
    ]


def _has(settings: ProcessSettings, name: str, before: ProcessSettings) -> bool:
    return name in settings and settings[name] == before[name]


def _parts(value: str | None) -> set[str]:
    """The parts of a list of paths or flags."""
    return {*_SEPARATOR.split(value or "")}
