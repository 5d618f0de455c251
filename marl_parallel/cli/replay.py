"""`marl-parallel replay`: repeat the failure in a file (`core/pool/replay_file.py`), with one environment here.

The environment is constructed, reset and stepped as in its worker: by `EnvRunner`, whose transitions are written into a
record and pickled, since that may be what failed. A failure that ended a worker process would also end this one
before it reports anything. Such a replay runs in a child process, unless a debugger is used.
"""

from __future__ import annotations

import bdb
import contextlib
import faulthandler
import multiprocessing
import os
import pdb
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import MultiAgentEnv, Schema, adapt
from marl_parallel.cli.output import say_next
from marl_parallel.cli.target import CommandError, in_brief, short_errors
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import TransitionRecords, dump_leftovers
from marl_parallel.core.messages import Lost
from marl_parallel.core.objects.pickling import install_registrations, loads
from marl_parallel.core.objects.script_generators import SeedSource, receive_copies
from marl_parallel.core.pool.replay_file import BadReplay, Crash, read_crash_and_owner
from marl_parallel.core.reports.reports import escaped, manner_of_death
from marl_parallel.core.transition import Transition
from marl_parallel.core.worker.constructors import call_constructor
from marl_parallel.core.worker.env_runner import EnvRunner, derived_seed
from marl_parallel.core.worker.generators import GeneratorStates, seed_generators, seeding_new_torch
from marl_parallel.core.worker_status import WorkerStatus

_NOT_BEGUN, _ENDED = -1, -2  # in place of the step that runs; after the last one, `_ENDED` minus the outcome
_GIL_HELD_S = 1.0
"""After a timeout, how long a Python thread has to report it before a native one does."""


class Outcome(IntEnum):
    """The exit status."""

    SAME_STEP = 0  # it failed again, at the same step
    DIFFERENT = 1  # it failed at another step or not at all, or `--until` or the debugger ended it
    UNUSABLE = 2  # the file cannot be read, or the environment cannot be constructed here
    UNREACHABLE = 3  # the file lacks the steps or the call that lead to the failure
    INTERRUPTED = 130  # by Ctrl-C


def replay(
    path: Path, *, debugger: bool, until: int | None, timeout: float | None, in_process: bool, assume_yes: bool = False
) -> Outcome:
    """Repeat the failure in a file, and print how it ends; `CommandError` if the file cannot be replayed here.

    If another user owns the file, ask before anything in it runs, unless `assume_yes`.
    """
    try:
        crash, owner = read_crash_and_owner(path)
    except BadReplay as error:
        raise CommandError(str(error), "docs/faults.md says how these files are written") from error
    print(_summary(crash))
    if not crash.complete:
        lost = crash.first_step - 1
        return _conclude(
            f"cannot be replayed: the file has only the last {crash.step - lost} of {crash.step} steps, so that the "
            f"state before step {crash.first_step} is unknown",
            Outcome.UNREACHABLE,
            f"pass replay={crash.step} or more to ParallelEnv, and run until it fails again",
        )
    print("warning: this runs code of whoever wrote the file; open only files of people you trust", flush=True)
    if owner and not assume_yes:
        _ask(path, owner)
    if crash.error == "WorkerCrashed" and not (debugger or in_process):
        return _in_child(crash, until, timeout)
    return _here(_Run(crash, debugger, until, timeout))


def _ask(path: Path, owner: str) -> None:
    """Ask whether to run the code of a file that another user owns; `CommandError` if the answer is not yes."""
    belongs = f"{escaped(str(path))} belongs to {owner}, not to you"
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError(
            f"{belongs}, and there is no terminal to ask whether you trust its code",
            "if you trust it, pass --yes; if not, delete the file",
        )
    try:
        trusts = typer.confirm(f"{belongs}. Run its code?")
    except typer.Abort:
        trusts = False
    if not trusts:
        raise CommandError(f"{belongs}, and was not replayed", "if you do not trust its code, delete the file")


def _here(run: _Run) -> Outcome:
    if not faulthandler.is_enabled():
        faulthandler.enable()
    outcome = Outcome.UNUSABLE
    try:
        outcome = run.outcome()
    finally:
        run.end(outcome)
    return outcome


def _in_child(crash: Crash, until: int | None, timeout: float | None) -> Outcome:
    """Replay in a child process, and report its death; another user may have replaced the file meanwhile."""
    spawning = multiprocessing.get_context("spawn")
    progress = spawning.RawValue("q", _NOT_BEGUN)
    child = spawning.Process(target=_child, args=(crash, until, timeout, progress))
    child.start()
    try:
        child.join()
    except KeyboardInterrupt:
        child.join(0.25)
        child.kill()
        return Outcome.INTERRUPTED
    how = f"the process died ({manner_of_death(Lost(child.exitcode, ''))[0]})"
    if progress.value <= _ENDED:
        outcome = Outcome(_ENDED - progress.value)
        if child.exitcode != outcome:
            print(f"warning: after the replay, {how} in close() or when it exited", file=sys.stderr)
        return outcome
    if progress.value == _NOT_BEGUN:
        died = f"{how} before the first reset"
        return _conclude(
            died, Outcome.UNUSABLE, "find what ends the process in the constructor; --in-process lets gdb see it"
        )
    return _compared(how, progress.value, crash)


def _child(crash: Crash, until: int | None, timeout: float | None, progress: Any) -> None:
    """The main function of the child process; `progress` has the step that runs, then the outcome."""
    run = _Run(crash, False, until, timeout, progress)
    with short_errors(False, Outcome.UNUSABLE):
        outcome = _here(run)
    sys.exit(outcome)


def _conclude(result: str, outcome: Outcome, to_do: str) -> Outcome:
    """Print the last two lines: how the replay ended, and what to do next."""
    print(result)
    say_next(to_do)
    sys.stdout.flush()
    return outcome


def _compared(how: str, step: int, crash: Crash, debugger: bool = False) -> Outcome:
    """Print whether this is the step that failed."""
    if step != crash.step:
        at = f"{_at(step)} instead of {_at(crash.step)}"
        return _conclude(f"{how} at another step: {at}", Outcome.DIFFERENT, _OTHER_STATE)
    to_do = "run this command with --pdb to look at the simulator in the debugger"
    if debugger:
        to_do = (
            "fix the simulator, then run this command again: the exit code is 1 when this step does not fail any more"
        )
    return _conclude(f"{how} again at the same step: {_at(step)}", Outcome.SAME_STEP, to_do)


def _summary(crash: Crash) -> str:
    began = f"seed {crash.seed}"
    if crash.number and (crash.takes_seed or crash.isolate_rng):
        began = f"seed {derived_seed(crash.seed, crash.number)}, reset {crash.number} after seed {crash.seed}"
    lines = [
        f"environment {crash.env_id}: {_what_failed(crash)}, {crash.written}",
        f"  {next(iter(crash.report.splitlines()), '')}",
        f"  episode: {began}; constructor: seed {crash.constructor_seed}, {crash.restarts} restarts; {crash.mode}",
        f"  written with {', '.join(f'{name} {version}' for name, version in crash.versions.items())}",
    ]
    if crash.number and not (crash.takes_seed or crash.isolate_rng):
        lines.append("note: its reset takes no seed, and this was not its first episode: the replay may differ")
    return "\n".join(map(escaped, lines))


def _what_failed(crash: Crash) -> str:
    if crash.method in ("render", "call", "state"):
        return f"{crash.error} in {crash.method} after {_at(crash.step)}"
    if crash.method == "reset" and crash.step:
        return f"{crash.error} in the automatic reset of step {crash.step}"
    return f"{crash.error} in {_at(crash.step)}"


def _at(step: int) -> str:
    return f"step {step}" if step else "the reset that begins the episode"


class _Run:
    """One replay; `step` is the one that runs."""

    def __init__(
        self, crash: Crash, debugger: bool, until: int | None, timeout: float | None, progress: Any = None
    ) -> None:
        self.crash, self.debugger, self.until = crash, debugger, until
        self.timeout = None if debugger else timeout
        self._progress = progress
        self._env: MultiAgentEnv | None = None
        self._generators = GeneratorStates(crash.isolate_rng)
        self.step = 0
        # An exception is looked at where it was raised; what kills or stops the process, before that.
        self.stops_at = until if until is not None or crash.error == "EnvError" else crash.step

    def outcome(self) -> Outcome:
        crash = self.crash
        try:
            runner, actions, options, transitions = self._made()
        except CommandError:
            raise
        except KeyboardInterrupt:
            print("interrupted in the constructor")
            return Outcome.INTERRUPTED
        except BaseException as error:
            self._show(error)
            raise CommandError(f"the environment cannot be constructed here: {in_brief(error)}", _HINT) from error
        try:
            ended = self._play(runner, actions, options, transitions)
        except bdb.BdbQuit:
            stopped = f"stopped in the debugger, in {_at(self.step)}"
            return _conclude(stopped, Outcome.DIFFERENT, "run this command again to look at another step, with --until")
        except KeyboardInterrupt as error:
            self._show(error)
            print(f"interrupted in {_at(self.step)}")
            return Outcome.INTERRUPTED
        except BaseException as error:
            self._show(error)
            return _compared(f"failed with {in_brief(error)}", self.step, self.crash, self.debugger)
        self._end_line()
        if not ended:
            stopped = f"stopped before {_at(self.step + 1)}"
            return _conclude(stopped, Outcome.DIFFERENT, "run this command without --until to reach the failure")
        if crash.method == "call":
            failed = f"cannot be replayed: call() failed after {_at(crash.step)}, and the file lacks its arguments"
            return _conclude(
                failed, Outcome.UNREACHABLE, "call that method of one environment in a program of your own"
            )
        well = (
            f"did not fail: {_at(crash.step)} went well. The failure may depend on earlier episodes, on calls and "
            "attributes that were set, on time, or on generators that no seed reaches"
        )
        return _conclude(well, Outcome.DIFFERENT, _OTHER_STATE)

    def end(self, outcome: Outcome) -> None:
        """Close the environment; a failure here, or when this process exits, does not change the outcome."""
        sys.stdout.flush()  # the simulator may end this process
        self._report_step(_ENDED - outcome)

        def late() -> Outcome:
            what = "close() or the exit of this process did not finish"
            print(f"warning: after the replay, {what} within {self.timeout:g} s", file=sys.stderr)
            return outcome

        if self._env is not None:
            with contextlib.suppress(Exception, SystemExit), self._limited(late):
                self._env.close()
        if self.timeout is not None:
            threading.Thread(target=self._end_at_exit, args=(self.timeout, late), daemon=True).start()

    def _end_at_exit(self, timeout: float, late: Callable[[], Outcome]) -> None:
        """End this process if it does not exit by itself in time: threads and processes of the simulator may go on."""
        if self._progress is None:  # else it exits now
            threading.main_thread().join()
        time.sleep(timeout)
        self._end_now(late)

    def _report_step(self, step: int) -> None:
        """Report the step that runs, or the outcome, to the process that waits for this one, if there is one."""
        if self._progress is not None:
            self._progress.value = step

    def _made(self) -> tuple[EnvRunner, list[dict[Any, Any]], Any, TransitionRecords]:
        """The environment, and what is unpickled from the file, as `Worker` does it."""
        crash = self.crash
        sys.path += [folder for folder in (crash.folder, *crash.sys_path) if folder not in sys.path]
        with seeding_new_torch(crash.constructor_seed):
            env, actions, options = self._constructed(crash)
        seeding = crash.seed, crash.number - 1
        status = WorkerStatus(bytearray(WorkerStatus.NBYTES))
        mode = AutoresetMode[crash.mode]
        generators = self._generators if crash.isolate_rng or self._generators.copies else None
        runner = EnvRunner(env, crash.env_id, mode, status, seeding, generators=generators)
        layout = Layout(Schema.of(env), 1, arrays=crash.arrays)
        block = bytearray(layout.nbytes)
        layout.bind(block)
        return runner, actions, options, TransitionRecords(layout, block)

    def _constructed(self, crash: Crash) -> tuple[MultiAgentEnv, list[dict[Any, Any]], Any]:
        """The environment, the actions and the options of the reset."""
        seed_generators(crash.constructor_seed)
        receive_copies(self._generators.copies)
        self._generators.begin(crash.env_id, SeedSource(crash.constructor_seed, crash.env_id, crash.restarts, 0))
        try:
            install_registrations(crash.registrations)
            constructor, adapter = loads(crash.constructor), loads(crash.adapter)
            actions, options = loads(crash.actions), loads(crash.options)
        except ModuleNotFoundError as error:
            where = (
                f"start from {escaped(crash.folder)}, with the packages that wrote it" if crash.folder else "install it"
            )
            raise CommandError(f"the file needs the module {error.name!r}, which is not found here", where) from error
        except Exception as error:
            written, here = escaped(crash.versions.get("Python", "")), sys.version.split()[0]
            hint = f"it was written with Python {written}, this is {here}; {_HINT}"
            raise CommandError(f"the file cannot be unpickled here: {in_brief(error)}", hint) from error
        keywords = {"seed": crash.constructor_seed, "env_id": crash.env_id, "restarts": crash.restarts}
        with self._limited(self._late_constructor):
            seed_generators(crash.constructor_seed)  # again, since imported modules may have drawn numbers
            self._env = adapt(call_constructor(constructor, keywords)[0], adapter)
        return self._env, actions, options

    def _play(
        self, runner: EnvRunner, actions: list[dict[Any, Any]], options: Any, transitions: TransitionRecords
    ) -> bool:
        """Reset and step the environment, and repeat what followed the last step if that failed.

        Returns False if it stopped before the end.
        """
        crash, env = self.crash, runner.env
        keywords: dict[str, Any] = {} if crash.number else {"seed": crash.seed}
        if crash.seeds_generators and not crash.number:
            self._generators.seed(crash.seed)
        if options is not None:
            keywords["options"] = options
        accepted = env.reset_keywords | (frozenset() if runner.generators is None else {"seed"})
        keywords = {name: value for name, value in keywords.items() if name in accepted}
        calls: list[tuple[Callable[[Any], Transition], Any]] = [(runner.reset, keywords)]
        calls += [(runner.step, of_step) for of_step in actions]
        for step, (call, argument) in enumerate(calls):
            if step == self.until and not self.debugger:
                self.step = step - 1
                return False
            self._announce(step)
            with self._limited(self._late_step):
                if self.debugger and step == self.stops_at:
                    transition = pdb.runcall(call, argument)
                    if transition is None:
                        raise bdb.BdbQuit
                else:
                    transition = call(argument)
                if crash.method == "state" and step == crash.step:
                    env.state()
                if runner.ended_for_now:
                    transition = runner.begin_next(transition)
                leftovers = transitions.write(0, transition)
                if leftovers is not None:
                    loads(dump_leftovers(leftovers))
        with self._limited(self._late_step):
            if crash.method == "render":
                env.render()
            elif crash.method == "state":
                env.state()
        return True

    def _announce(self, step: int) -> None:
        """Print which step comes next: the last line that a crash leaves."""
        self.step = step
        self._report_step(step)
        if step == self.crash.step:
            self._end_line()
            failed = "" if self.crash.method in ("render", "call", "state") else ", in which it failed"
            print(f"next: {_at(step)}{failed}", flush=True)
        elif sys.stdout.isatty():
            print(f"\rnext: {_at(step)}", end="", flush=True)
        else:
            print(f"next: {_at(step)}", flush=True)

    def _end_line(self) -> None:
        if sys.stdout.isatty():
            print(flush=True)

    def _show(self, error: BaseException) -> None:
        self._end_line()
        sys.stdout.flush()
        traceback.print_exception(error)
        sys.stderr.flush()
        if self.debugger and error.__traceback__ is not None:
            pdb.post_mortem(error.__traceback__)

    def _late_constructor(self) -> Outcome:
        late = f"the constructor did not finish within {self.timeout:g} s"
        return _conclude(late, Outcome.UNUSABLE, "run this command with a longer --timeout, or fix what hangs there")

    def _late_step(self) -> Outcome:
        return _compared(f"did not finish within {self.timeout:g} s", self.step, self.crash)

    @contextlib.contextmanager
    def _limited(self, late: Callable[[], Outcome]) -> Iterator[None]:
        """End this process if a block takes longer than the timeout; `late` prints that, and returns the outcome."""
        if self.timeout is None:
            yield
            return
        timer = threading.Timer(self.timeout, self._end_now, [late])
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(self.timeout + _GIL_HELD_S, exit=True)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _end_now(self, late: Callable[[], Outcome]) -> None:
        """End this process with the stacks of all threads."""
        faulthandler.dump_traceback(all_threads=True)
        outcome = late()
        sys.stdout.flush()
        sys.stderr.flush()
        self._report_step(_ENDED - outcome)
        os._exit(outcome)


_OTHER_STATE = (
    "if the simulator draws from random, numpy.random or torch, pass isolate_rng=True to ParallelEnv, and run until it "
    "fails again"
)
_HINT = "it needs the same versions of the simulator and its libraries, and may need the same files"
