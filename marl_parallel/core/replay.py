"""Replays: what repeats an environment's failure, kept by the parent and written to a file when it fails.

`Pool` notes each request here before it posts it, when the action records in the block are complete::

    STEP               the bytes of the action record, and the pickled extras
    RESET, REBUILD     a new episode: its seed and options; the steps before it are dropped
    ADOPT              likewise, in a spare: `note_built` has been called with it
    a fault            a file for each environment that failed; the report names it

Episodes that begin without a seed of the caller's have a derived one (`episode.derived_seed`), so that each episode can
be repeated by itself. A file is a line with its version, a line of JSON, and pickles: those of the constructor, the
adapter, the registered environments, the options of the reset, and the actions. `cli/replay.py` repeats them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import shlex
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.array_file import self_contained
from marl_parallel.core.backend import Backend
from marl_parallel.core.columns import Layout
from marl_parallel.core.episode import needs_actions
from marl_parallel.core.messages import SEEDS_GENERATORS, Message, Plan, Rebuild, Request
from marl_parallel.core.pickling import dumps_for_workers, loads
from marl_parallel.core.records import FINAL, ActionRecords
from marl_parallel.core.reports import first_line, logger
from marl_parallel.core.slots import Slot
from marl_parallel.core.worker_status import Running
from marl_parallel.types import ParallelEnvError

FOLDER = "marl_parallel-replays"
"""The default folder, in the current one."""
VERSION = 3
_MAGIC = b"marl_parallel replay "
_REPLAYED = {"reset", "step", "state", "render", "call", "unpickle", ""}
"""The methods whose failures have a file; no name where it is not known what was running."""
_numbers = itertools.count()  # of the files of this process


class BadReplay(ValueError):
    """A file cannot be replayed."""


@dataclass(frozen=True)
class Crash:
    """The contents of a file. Step 0 is the reset that begins the episode."""

    env_id: int
    error: str  # the type of the error
    method: str  # that failed; empty if it is not known
    step: int  # the number of steps in the episode, with the one that failed
    first_step: int  # the first step whose actions are in the file
    mode: str  # the auto-reset mode
    constructor_seed: int
    restarts: int  # how often the environment had been rebuilt
    seed: int  # the last one passed to a reset by the caller, or to a rebuilt environment
    number: int  # how many episodes have begun since without a seed
    takes_seed: bool  # whether the simulator's `reset` takes one
    isolate_rng: bool  # whether derived seeds are also those of the process-wide generators
    seeds_generators: bool  # whether `seed` is, too, if `number` is zero: the caller passed it to this reset
    arrays: bool  # whether values travelled through shared memory
    report: str  # the text of the error
    written: str  # when
    versions: dict[str, str]
    sys_path: list[str]
    folder: str  # the current one
    constructor: bytes
    adapter: bytes
    registrations: bytes
    options: bytes  # of the reset; pickled None if it had none
    actions: bytes  # of each step, from `first_step` on

    @property
    def complete(self) -> bool:
        """Whether the file has all steps of the episode."""
        return self.first_step <= 1


_PICKLED = [one.name for one in fields(Crash) if one.type == "bytes"]


def write_crash(crash: Crash, path: Path) -> None:
    """Write a file, whole or not at all, and only for this user; `OSError` if that is impossible."""
    pickled = {name: getattr(crash, name) for name in _PICKLED}
    header = {one.name: getattr(crash, one.name) for one in fields(crash) if one.name not in pickled}
    header["nbytes"] = [len(part) for part in pickled.values()]
    checksum = 0
    for part in pickled.values():
        checksum = zlib.crc32(part, checksum)
    header["crc32"] = checksum
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"%s%d\n%s\n" % (_MAGIC, VERSION, json.dumps(header).encode()))
            file.writelines(pickled.values())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_crash(path: Path) -> Crash:
    """Read a file without unpickling anything; `BadReplay` if it is none, or not whole, or of another version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadReplay(f"{path} cannot be read: {error.strerror or error}") from error
    if not content.startswith(_MAGIC):
        raise BadReplay(f"{path} is no replay: marl_parallel writes them, as env-*.replay, if replay= is passed")
    first, _, rest = content.partition(b"\n")
    written_as = first.removeprefix(_MAGIC).decode(errors="replace")
    if written_as != str(VERSION):
        raise BadReplay(
            f"{path} has version {written_as} of this format, but this marl_parallel reads version {VERSION}: use the "
            "release that wrote it"
        )
    line, _, body = rest.partition(b"\n")
    truncated = f"{path} is not whole: it was copied or written only partly"
    try:
        header = json.loads(line)
        sizes, checksum = header.pop("nbytes"), header.pop("crc32")
        parts: dict[str, Any] = {}
        at = 0
        for name, size in zip(_PICKLED, sizes, strict=True):
            parts[name], at = body[at : at + size], at + size
        crash = Crash(**header, **parts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadReplay(truncated) from error
    if at != len(body):
        raise BadReplay(truncated)
    if zlib.crc32(body) != checksum:
        raise BadReplay(f"{path} is damaged: its checksum differs from the one that was written with it")
    return crash


@dataclass(slots=True, eq=False)
class History:
    """One environment since its last reset."""

    constructor_seed: int
    steps: deque[tuple[bytes, bytes | None]]  # action records and extras, at most so many
    restarts: int = 0
    seed: int = 0  # as of `Crash`
    number: int = 0  # likewise
    seeds_generators: bool = False  # as of `Crash`
    options: Any = None
    count: int = 0  # the steps of the episode
    begun: bool = False  # whether there is an episode
    postponed: dict[str, Any] | None = None  # keywords of the reset of an environment that has been rebuilt
    saved: bool = False  # whether the failure has been written: an error may be seen twice


@dataclass(eq=False)
class Histories:
    """What `replay=` adds to a pool.

    Args:
        most_steps: How many steps are kept for each environment.
        folder: Where files are written; created when it is needed.
        slots: The environments.
        layout: Of the block.
        buffer: The block.
        plan: How the environments are constructed.
        local_modules: Modules that other processes cannot import.
        backend: Has the file with the arrays of constructors.
    """

    most_steps: int
    folder: Path
    slots: Sequence[Slot]
    layout: Layout
    buffer: Any
    plan: Plan
    local_modules: Sequence[ModuleType]
    backend: Backend
    _histories: list[History] = field(init=False)

    def __post_init__(self) -> None:
        seeds = [self._seed(self.plan, slot.env_id) for slot in self.slots]
        self._histories = [History(seed, deque(maxlen=self.most_steps), seed=seed) for seed in seeds]
        self._view, self._code = memoryview(self.buffer).cast("B"), struct.Struct("=Q")
        nbytes = self.layout.transition_header  # of an action record, which comes first
        self._places = [(start, start + nbytes) for start in self.layout.starts]
        self._next_step = self.plan.mode is AutoresetMode.NEXT_STEP

    # -- what is sent --------------------------------------------------------------------------------------------------

    def note(self, worker: int, request: Request) -> None:
        """Note a request that is about to be posted to a worker."""
        message, env_ids, payload, *_ = request
        if message is Message.STEP:
            assert env_ids is not None
            self.note_steps(env_ids, payload)
        elif message is Message.RESET:
            for env_id, pickled in payload.items():
                history = self._histories[env_id]
                self._catch_up(env_id, history)
                self._begin(history, {**(history.postponed or {}), **_keywords(pickled)})
        elif message is Message.REBUILD or message is Message.PREPARE:
            for env_id, rebuild in payload.items():
                if message is Message.REBUILD or self.slots[env_id].worker == worker:  # else a spare of another worker
                    self.note_built(env_id, rebuild)
        elif message is Message.ADOPT:
            assert env_ids is not None
            for env_id in env_ids:
                history = self._histories[env_id]
                self._begin(history, history.postponed or {})

    def note_built(self, env_id: int, rebuild: Rebuild) -> None:
        """Note that an environment is constructed again, or that its spare takes its place."""
        history = self._histories[env_id]
        history.constructor_seed = seed = self._seed(rebuild.plan, env_id)
        history.restarts = rebuild.plan.rebuilds
        history.saved = history.begun = False
        history.postponed = keywords = {**_keywords(rebuild.keywords), "seed": seed, SEEDS_GENERATORS: False}
        if rebuild.reset:
            self._begin(history, keywords)

    def note_steps(self, env_ids: Sequence[int], pickled: Mapping[int, bytes] | None) -> None:
        """Note the steps of environments, with the actions in the block and what does not fit there."""
        view, code, slots, places = self._view, self._code.unpack_from, self.slots, self._places
        for env_id in env_ids:
            start, stop = places[env_id]
            history = self._histories[env_id]
            if code(view, stop)[0] & FINAL:
                self._catch_up(env_id, history)
            if (slots[env_id].over or history.postponed is not None) and not self._is_stepped(env_id, history):
                continue
            history.steps.append((view[start:stop].tobytes(), None if pickled is None else pickled.get(env_id)))
            history.count += 1

    def _is_stepped(self, env_id: int, history: History) -> bool:
        """Whether a step reaches the simulator of an environment whose episode is over, or begins the next one."""
        if self._next_step:
            self._begin(history, history.postponed or {})
            return False
        rules = self.layout.schema.rules
        return history.postponed is None and needs_actions(rules, self.plan.mode, self.slots[env_id].over)

    def _catch_up(self, env_id: int, history: History) -> None:
        """Begin the episode that the latest step has begun: its record has final observations.

        The record of an environment that has been rebuilt and not been reset since is that of the old one.
        """
        if history.postponed is None and self._code.unpack_from(self._view, self._places[env_id][1])[0] & FINAL:
            self._begin(history, {})

    @staticmethod
    def _seed(plan: Plan, env_id: int) -> int:
        seed = plan.seeds[env_id]
        assert seed is not None  # `replay=` is refused with seed="own"
        return seed

    def _begin(self, history: History, keywords: Mapping[str, Any]) -> None:
        seed, options = keywords.get("seed"), keywords.get("options")
        if seed is None:
            history.number += 1
        else:
            history.seed, history.number = seed, 0
            history.seeds_generators = self.plan.isolate_rng and bool(keywords.get(SEEDS_GENERATORS))
        if options is not None or not self.layout.schema.options_last:
            history.options = options
        history.steps.clear()
        history.count, history.begun, history.postponed, history.saved = 0, True, None, False

    # -- faults --------------------------------------------------------------------------------------------------------

    def save(self, error: ParallelEnvError, running: Running | None) -> None:
        """Write a file for each environment that failed, once, and name it in the text of the error.

        `running` is what the worker was doing. What cannot be written is logged.
        """
        method: str = getattr(error, "method", "") or ("" if running is None else running.activity.method)
        if method not in _REPLAYED:
            return
        commands = []
        for env_id in error.env_ids:
            history, slot = self._histories[env_id], self.slots[env_id]
            if history.saved:
                continue
            if history.postponed is not None:
                if method in ("reset", "state", "render"):
                    self._begin(history, history.postponed)
            elif method != "unpickle" and (slot.request is None or slot.done) and not slot.rebuilding:
                self._catch_up(env_id, history)
            if not history.begun:
                continue
            history.saved = True
            moment = time.strftime("%Y%m%d-%H%M%S")
            path = self.folder / f"env-{env_id}-{moment}-{os.getpid()}-{next(_numbers)}.replay"
            try:
                write_crash(self._crash(env_id, history, error, method), path)
            except Exception as reason:
                # Such as a full disk; actions of the caller's may not unpickle. The fault itself is what counts.
                logger.warning("no replay of environment %d could be written to %s: %s", env_id, path, reason)
            else:
                commands.append(f"Replay it with: marl-parallel replay {shlex.quote(str(path))}")
        if commands:
            error.args = ("\n\n".join([str(error).rstrip(), "\n".join(commands)]), *error.args[1:])

    def _crash(self, env_id: int, history: History, error: ParallelEnvError, method: str) -> Crash:
        options, actions = history.options, self._actions(history)
        folder = ""
        with contextlib.suppress(OSError):  # it has been removed
            folder = str(Path.cwd())
        versions = {"Python": platform.python_version(), "numpy": np.__version__}
        with contextlib.suppress(PackageNotFoundError):  # it is a folder on the path, not installed
            versions["marl_parallel"] = version("marl-parallel")
        schema = self.layout.schema
        return Crash(
            env_id=env_id,
            error=type(error).__name__,
            method=method,
            step=history.count,
            first_step=history.count - len(actions) + 1,
            mode=self.plan.mode.name,
            constructor_seed=history.constructor_seed,
            restarts=history.restarts,
            seed=history.seed,
            number=history.number,
            takes_seed="seed" in schema.reset_keywords,
            isolate_rng=self.plan.isolate_rng,
            seeds_generators=history.seeds_generators,
            arrays=bool(self.layout.agents),
            report=str(error),
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            versions=versions,
            sys_path=[folder for folder in sys.path if isinstance(folder, str)],
            folder=folder,
            constructor=self_contained(self.plan.constructors[env_id], self.backend.array_file()),
            adapter=self_contained(self.plan.adapter, self.backend.array_file()),
            registrations=self.plan.registrations,
            options=dumps_for_workers(options, "options", self.local_modules),
            actions=dumps_for_workers(actions, "actions", self.local_modules),
        )

    def _actions(self, history: History) -> list[dict[Any, Any]]:
        """The actions of each step that is kept, as the worker reads them."""
        layout = Layout(self.layout.schema, 1, arrays=bool(self.layout.agents))
        buffer = bytearray(layout.nbytes)
        layout.bind(buffer)
        records, start = ActionRecords(layout, buffer), layout.starts[0]
        actions = []
        for record, extras in history.steps:
            buffer[start : start + len(record)] = record
            actions.append(records.read(0, None if extras is None else loads(extras)))
        return actions


def _keywords(pickled: bytes | None) -> dict[str, Any]:
    """The keywords of a reset; none if they do not unpickle, which the worker will report."""
    if pickled is None:
        return {}
    try:
        keywords: dict[str, Any] = loads(pickled)
    except Exception as error:
        logger.debug("the options of a reset do not unpickle: %s", first_line(error))
        return {}
    return keywords
