"""Replays: the caller keeps the requests of each environment, and writes them to a file when the environment fails.

Each request is recorded before it is posted, when the action records in the block are complete::

    STEP               the bytes of the action record, and the pickled leftovers
    RESET              a new episode: its seed and options; the steps before it are dropped
    CONSTRUCT          a new environment: its seed; one beside the present environment counts from its first request
    TAKE_OVER          the first episode of that one
    OPTIONS            the options of later episodes
    a fault            a file for each environment that failed; the report names it

Episodes that begin without a seed from the caller get a derived seed (`episode.derived_seed`), so that each episode can
be repeated by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shlex
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import FINAL, ActionRecords
from marl_parallel.core.messages import SEEDS_GENERATORS, Begins, Construct, Construction, Message, Request
from marl_parallel.core.objects.array_file import self_contained
from marl_parallel.core.objects.pickling import dumps_for_workers, in_order, loads
from marl_parallel.core.pool.extensions import Extension, Fault
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.replay_file import Crash, write_crash
from marl_parallel.core.pool.slots import Slot, State
from marl_parallel.core.reports.reports import first_line, logger
from marl_parallel.core.worker.env_runner import merged_options, needs_actions
from marl_parallel.core.worker_status import Running
from marl_parallel.types import EnvError, ParallelEnvError

_REPLAYED = {"reset", "step", "state", "render", "call", "unpickle", ""}
"""The methods whose failures have a file; the empty name if it is unknown what was running."""
_numbers = itertools.count()  # in the names of this process's files


@dataclass(slots=True, eq=False)
class History:
    """The requests to one environment since its last reset."""

    constructor_seed: int
    steps: deque[tuple[bytes, bytes | None]]  # action records and leftovers, at most `most_steps`
    restarts: int = 0
    seed: int = 0  # see `Crash`
    number: int = 0  # see `Crash`
    seeds_generators: bool = False  # see `Crash`
    options: Any = None
    standing: bytes | None = None  # the options of every reset that passes none, pickled
    # The options of an episode that the latest step has begun, if `standing` has changed since, before `_catch_up`.
    begun_with: tuple[bytes | None] | None = None
    count: int = 0  # the steps of the episode
    begun: bool = False  # whether an episode has begun
    postponed: dict[str, Any] | None = None  # keywords of the reset of an environment that has been rebuilt
    saved: bool = False  # whether the failure has been written: an error may be seen twice


class Histories(Extension):
    """Records the requests to each environment, and writes a file when one fails.

    Args:
        pool: The pool.
        most_steps: How many steps are kept for each environment.
        folder: Where files are written; created when it is needed.
        transitions: The environments' records.
        construction: How the environments are constructed.
        local_modules: Modules that other processes cannot import.
    """

    saved_as = "Histories"

    def __init__(
        self,
        pool: Pool,
        most_steps: int,
        folder: Path,
        transitions: BlockTransitions,
        construction: Construction,
        local_modules: Sequence[ModuleType],
    ) -> None:
        self._pool, self._slots, self._folder = pool, pool.slots, folder
        self._transitions, self._layout, self._construction, self._local_modules = (
            transitions,
            transitions.layout,
            construction,
            local_modules,
        )
        seeds = [self._seed(construction, slot.env_id) for slot in pool.slots]
        self._histories = [History(seed, deque(maxlen=most_steps), seed=seed) for seed in seeds]
        self._view, self._code = memoryview(transitions.buffer).cast("B"), struct.Struct("=Q")
        nbytes = transitions.layout.transition_header  # the size of an action record, which comes first
        self._action_spans = [(start, start + nbytes) for start in transitions.layout.starts]
        self._beside: dict[int, tuple[int, Construct]] = {}  # by environment: the worker of its successor, its request
        self._next_step = construction.mode is AutoresetMode.NEXT_STEP

    # -- what is sent --------------------------------------------------------------------------------------------------

    def before_post(self, worker: int, request: Request) -> Request:
        message, env_ids, payload, *_ = request
        if self._beside and (message is Message.RESET or message is Message.TAKE_OVER):
            for env_id in env_ids or ():
                if (beside := self._beside.get(env_id)) is not None and beside[0] == worker:
                    self._record_new(env_id, self._beside.pop(env_id)[1])
        if message is Message.STEP:
            self._record_steps(self._pool.queues[worker].share if env_ids is None else env_ids, payload)
        elif message is Message.RESET:
            for env_id, pickled in payload.items():
                history = self._histories[env_id]
                self._catch_up(env_id, history)
                self._begin(history, _keywords(pickled))
        elif message is Message.CONSTRUCT:
            for env_id, new in payload.items():
                if new.begins is not Begins.BESIDE:
                    self._record_new(env_id, new)
                elif new.saved is None:  # it takes over with its first request
                    self._beside[env_id] = worker, new
        elif message is Message.OPTIONS:
            for env_id, pickled in payload.items():
                history = self._histories[env_id]
                if history.begun_with is None and self._has_begun(env_id, history):
                    history.begun_with = (history.standing,)
                history.standing = pickled
        elif message is Message.TAKE_OVER and payload is None:  # one that was loaded goes on as saved
            assert env_ids is not None
            for env_id in env_ids:
                history = self._histories[env_id]
                self._begin(history, {})
        return request

    def _record_new(self, env_id: int, new: Construct) -> None:
        """Record that an environment is a new one."""
        history = self._histories[env_id]
        history.constructor_seed = seed = self._seed(new.construction, env_id)
        history.restarts = new.construction.rebuilds
        history.saved = history.begun = False
        history.postponed = keywords = {**_keywords(new.keywords), "seed": seed, SEEDS_GENERATORS: False}
        if new.begins is Begins.AT_ONCE:
            self._begin(history, keywords)

    def _record_steps(self, env_ids: Sequence[int], pickled: Mapping[int, bytes] | None) -> None:
        """Record the steps of environments: the actions in the block, and the pickled leftovers."""
        view, code, spans = self._view, self._code.unpack_from, self._action_spans
        for env_id in env_ids:
            start, stop = spans[env_id]
            history = self._histories[env_id]
            if code(view, stop)[0] & FINAL:
                self._catch_up(env_id, history)
            if (self._transitions.is_over(env_id) or history.postponed is not None) and not self._is_stepped(
                env_id, history
            ):
                continue
            history.steps.append((view[start:stop].tobytes(), None if pickled is None else pickled.get(env_id)))
            history.count += 1

    def _is_stepped(self, env_id: int, history: History) -> bool:
        """Whether a step reaches the simulator of an environment whose episode is over, or begins the next one."""
        if self._next_step:
            self._begin(history, {})
            return False
        rules = self._layout.schema.rules
        return history.postponed is None and needs_actions(
            rules, self._construction.mode, self._transitions.is_over(env_id)
        )

    def _catch_up(self, env_id: int, history: History) -> None:
        """Begin the episode that the latest step has begun: its record has final observations.

        If an environment was rebuilt and has not been reset since, its record still belongs to the old one.
        """
        if self._has_begun(env_id, history):
            self._begin(history, {})

    def _has_begun(self, env_id: int, history: History) -> bool:
        """Whether the latest step has begun an episode."""
        return history.postponed is None and bool(
            self._code.unpack_from(self._view, self._action_spans[env_id][1])[0] & FINAL
        )

    @staticmethod
    def _seed(construction: Construction, env_id: int) -> int:
        seed = construction.seeds[env_id]
        assert seed is not None  # `replay=` is refused with seed="own"
        return seed

    def _begin(self, history: History, passed: Mapping[str, Any]) -> None:
        """Note that an episode begins, with keywords that its reset has been passed; see `EnvRunner.reset`."""
        keywords = {**(history.postponed or {}), **passed}
        seed, options = keywords.get("seed"), keywords.get("options")
        if passed.get("options") is None:
            standing = history.standing if history.begun_with is None else history.begun_with[0]
            options = merged_options(options, None if standing is None else loads(standing))
            if self._layout.schema.options_last:
                options = merged_options(history.options, options)
        if seed is None:
            history.number += 1
        else:
            history.seed, history.number = seed, 0
            history.seeds_generators = bool(keywords.get(SEEDS_GENERATORS))
        history.options, history.begun_with = options, None
        history.steps.clear()
        history.count, history.begun, history.postponed, history.saved = 0, True, None, False

    def save(self, slot: Slot) -> Any:
        return replace(self._histories[slot.env_id], steps=deque())

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        history = self._histories[slot.env_id]
        if saved is not None:
            saved.steps = history.steps
            self._histories[slot.env_id] = history = saved
        history.steps.clear()
        history.begun &= history.count == 0  # else the first steps of the episode are missing, and no file is written

    # -- faults --------------------------------------------------------------------------------------------------------

    def on_fault(self, fault: Fault) -> bool:
        if self._pool.queues[fault.worker].share:  # else its environments have not moved in yet, or have left
            self._save(fault.error, fault.running)
        return False

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, EnvError):
            self._save(error, None)  # also for a result that cannot be unpickled

    def _save(self, error: ParallelEnvError, running: Running | None) -> None:
        """Write a file for each environment that failed, once, and name it in the text of the error.

        `running` is the activity of the worker. A file that cannot be written is logged.
        """
        method: str = getattr(error, "method", "") or ("" if running is None else running.activity.method)
        if method not in _REPLAYED:
            return
        commands = []
        for env_id in error.env_ids:
            history, slot = self._histories[env_id], self._slots[env_id]
            if history.saved:
                continue
            if history.postponed is not None:
                if method in ("reset", "state", "render"):
                    self._begin(history, {})
            elif method != "unpickle" and slot.state is not State.BUSY and not slot.skips:
                self._catch_up(env_id, history)
            if not history.begun:
                continue
            history.saved = True
            moment = time.strftime("%Y%m%d-%H%M%S")
            path = self._folder / f"env-{env_id}-{moment}-{os.getpid()}-{next(_numbers):06}.replay"
            try:
                write_crash(self._crash(env_id, history, error, method), path)
            except Exception as reason:
                # Such as a full disk, or actions that do not unpickle. The fault itself is more important.
                logger.warning("no replay of environment %d could be written to %s: %s", env_id, path, reason)
            else:
                commands.append(f"Replay it with: marl-parallel replay {shlex.quote(str(path))}")
        if commands:
            error.args = ("\n\n".join([str(error).rstrip(), "\n".join(commands)]), *error.args[1:])

    def _crash(self, env_id: int, history: History, error: ParallelEnvError, method: str) -> Crash:
        options, actions = history.options, self._actions(env_id, history)
        folder = ""
        with contextlib.suppress(OSError):  # the folder has been removed
            folder = str(Path.cwd())
        versions = {"Python": platform.python_version(), "numpy": np.__version__}
        with contextlib.suppress(PackageNotFoundError):  # a folder on the path is not installed
            versions["marl_parallel"] = version("marl-parallel")
        schema = self._layout.schema
        return Crash(
            env_id=env_id,
            error=type(error).__name__,
            method=method,
            step=history.count,
            first_step=history.count - len(actions) + 1,
            mode=self._construction.mode.name,
            constructor_seed=history.constructor_seed,
            restarts=history.restarts,
            seed=history.seed,
            number=history.number,
            takes_seed="seed" in schema.reset_keywords,
            isolate_rng=self._construction.isolate_rng,
            seeds_generators=history.seeds_generators,
            arrays=bool(self._layout.agents),
            report=str(error),
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            versions=versions,
            sys_path=[folder for folder in sys.path if isinstance(folder, str)],
            folder=folder,
            constructor=self_contained(self._construction.constructors[env_id], self._pool.backend.array_file),
            adapter=self_contained(self._construction.adapter, self._pool.backend.array_file),
            registrations=self._construction.registrations,
            options=dumps_for_workers(options, "options", self._local_modules, with_keys=False),
            actions=dumps_for_workers(actions, "actions", self._local_modules, with_keys=False),
        )

    def _actions(self, env_id: int, history: History) -> list[dict[Any, Any]]:
        """The actions of each step that is kept, as the worker reads them."""
        layout = Layout(self._layout.schema, 1, arrays=bool(self._layout.agents))
        buffer = bytearray(layout.nbytes)
        layout.bind(buffer)
        records, start = ActionRecords(layout, buffer), layout.starts[0]
        actions = []
        for record, leftovers in history.steps:
            buffer[start : start + len(record)] = record
            actions.append(records.read(0) if leftovers is None else loads(leftovers))
        positions = (self._construction.positions or {}).get(env_id)
        if positions is None:
            return actions
        own = [self._layout.schema.possible_agents[position] for position in positions]
        return [in_order(of_step, own) for of_step in actions]


def _keywords(pickled: bytes | None) -> dict[str, Any]:
    """The keywords of a reset; empty if they do not unpickle, which the worker will report."""
    if pickled is None:
        return {}
    try:
        keywords: dict[str, Any] = loads(pickled)
    except Exception as error:
        logger.debug("the options of a reset do not unpickle: %s", first_line(error))
        return {}
    return keywords
