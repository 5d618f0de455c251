"""A probe in a process of its own, so that a simulator which crashes or hangs takes nobody with it: both ends of it.

The child runs one function of `probes.py` and writes what it comes to know into a file, line by line; so what was
written before it died is known. The parent waits, kills what is left, and says how it ended. What is written of a crash
or a hang is what `faulthandler` writes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from marl_parallel.backends import descendants, interpreter
from marl_parallel.cli.endings import end_with_the_command
from marl_parallel.cli.failures import CommandError
from marl_parallel.cli.findings import Finding, Question, Severity
from marl_parallel.cli.rollout import Trace
from marl_parallel.cli.values import in_brief, pickling_error
from marl_parallel.core.forked import end_forked_copy
from marl_parallel.core.messages import Lost
from marl_parallel.core.reports import manner_of_death, place

ON_LINUX = sys.platform == "linux"
_EVENTS, _STACK, _OUTPUT = "events", "stack", "output"
_TICK_S = 0.02
_BEAT_S = 1.0
"""So often at most is said again what is being done: whoever says nothing is in the middle of one call."""
_PATIENCE_S = 120.0
"""Beyond what it may take, until a probe is given up that says nothing new: its own watch should have ended it."""


@dataclass(frozen=True)
class Job:
    """What a probe is to do.

    Attributes:
        probe: The name of a function in `probes.py`.
        environment: As named on the command line.
        env_kwargs: Likewise.
        timeout: Seconds that each call of the simulator may take.
        seconds: How long a run lasts, at most.
        steps: How many steps a run has, at most.
        seed: Of the first copy.
        global_seed: What the process-wide generators are seeded with.
        hash_seed: What the order of sets of strings follows from.
        backend: For the probe of copies.
        cycles: For the tests of other projects.
        test: The name of the one test of another project to run; empty for all.
        shares_process: Whether several environments can live in one process.
    """

    probe: str
    environment: str
    env_kwargs: str
    timeout: float
    seconds: float
    steps: int
    seed: int = 42
    global_seed: int = 42
    hash_seed: int = 0
    backend: str = "serial"
    cycles: int = 100
    test: str = ""
    shares_process: bool = True

    @property
    def severity(self) -> Severity:
        """How bad it is that it dies unexpectedly: the tests of other projects break nothing here."""
        return Severity.REMARK if self.probe == "official" else Severity.PROBLEM

    @property
    def question(self) -> Question:
        """What it is about, as far as it dies unexpectedly."""
        return {
            "official": Question.API,
            "again": Question.DETERMINISM,
            "copies": Question.of_backend(self.backend),
        }.get(self.probe, Question.RUNS)


@dataclass
class Outcome:
    """What a probe has found.

    Attributes:
        findings: In the order in which they were made.
        checked: The questions that were looked into to the end.
        facts: What was measured or read.
        traces: Of runs, by the number of the copy.
    """

    findings: list[Finding] = field(default_factory=list)
    checked: set[Question] = field(default_factory=set)
    facts: dict[str, Any] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)


# -- the child's end ---------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The probe cannot go on; a finding says why."""


class Notebook:
    """What a probe writes down, and the watch over the simulator's calls.

    Args:
        folder: Where.
        job: What is done.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self._file = (folder / _EVENTS).open("a", buffering=1)
        self._stack = (folder / _STACK).open("a")
        self._job = job
        self._doing: tuple[Any, ...] = ()
        self._said = 0.0
        self._found: set[Any] = set()
        self._pid = os.getpid()
        faulthandler.enable(self._stack)

    def find(self, question: Question, severity: Severity, what: str, advice: str, kind: str = "") -> None:
        """Note a finding; of a kind only the first."""
        if (kind or what) not in self._found:
            self._found.add(kind or what)
            self._write("finding", [question.name, severity.value, what, advice])

    def checked(self, *questions: Question) -> None:
        """Note that questions have been looked into to the end."""
        self._write("checked", [question.name for question in questions])

    def fact(self, **facts: Any) -> None:
        """Note what was measured or read."""
        self._write("facts", facts)

    def trace(self, env_id: int, trace: Trace) -> None:
        """Note a run."""
        self._write("trace", [env_id, trace])

    def refuse(self, error: BaseException) -> None:
        """Note that there is no such environment, or no way to import it."""
        hint = error.hint if isinstance(error, CommandError) else "--debug shows the whole traceback"
        text = str(error) if isinstance(error, CommandError) else in_brief(error)
        self._write("refused", [text, hint, traceback.format_exc()])

    def end(self) -> None:
        """Note that this is all; what ends without it has been ended."""
        self._write("end", None)

    @contextlib.contextmanager
    def watch(
        self,
        doing: str,
        question: Question | None = None,
        seconds: float = 0.0,
        severity: Severity | None = None,
        advice: str = "",
    ) -> Iterator[None]:
        """End this process, with the stack on file, where this takes longer than the timeout.

        Args:
            doing: What is done, for the finding.
            question: What a crash or a hang would be an answer to; None for the job's own.
            seconds: How much longer it may take.
            severity: How bad a crash or a hang would be; None for the job's own.
            advice: What to do about a crash or a hang, instead of what is usual.
        """
        limit, how_bad = self._job.timeout + seconds, severity or self._job.severity
        doing_now = (doing, (question or self._job.question).name, limit, how_bad.value, advice)
        if doing_now != self._doing or time.monotonic() - self._said > _BEAT_S:
            self._doing, self._said = doing_now, time.monotonic()
            self._write("doing", doing_now)
        faulthandler.dump_traceback_later(self._job.timeout + seconds, exit=True, file=self._stack)
        try:
            yield
        except BaseException as error:
            self._check_not_forked(error)
            raise
        finally:
            self._check_not_forked()
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def calling(self, doing: str, seconds: float = 0.0) -> Iterator[None]:
        """The same around calls of the simulator; what they raise is a finding, and the end of the probe.

        Args:
            doing: What is done.
            seconds: How much longer than the timeout it may take.

        Raises:
            Stopped: It raised.
        """
        with self.watch(doing, seconds=seconds):
            try:
                yield
            except (Exception, SystemExit, GeneratorExit) as error:
                self._find_raised(doing, error)
                raise Stopped from error

    def _find_raised(self, doing: str, error: BaseException) -> None:
        where = place(traceback.format_exc())
        if not where and isinstance(error, TypeError):
            last = traceback.extract_tb(error.__traceback__)[-1].line or ""
            # An adapter raises it because of what the simulator returned, or, with Python's own error as the cause,
            # because the simulator could not be called.
            returned = last.startswith("raise ") and not isinstance(error.__cause__, TypeError)
            to_do = f"let {doing} return that" if returned else f"let {doing} take what its API says"
            what, question = str(error), Question.API
        else:
            at = f", at {where}" if where else ""
            what, question, to_do = f"{doing} raises{at}: {in_brief(error)}", self._job.question, "mend that line"
            self.exception(error)
        self.find(question, Severity.PROBLEM, what, f"{to_do}; not everything can be checked before")

    def exception(self, error: BaseException) -> None:
        """See whether an exception of the simulator's pickles."""
        reason = pickling_error(error)
        if reason is not None:
            name = type(error).__name__
            self.find(
                Question.PICKLING,
                Severity.REMARK,
                f"its exception {name} cannot be pickled and made again ({reason})",
                f"let {name}.__init__ pass all of its arguments to super().__init__, and hold plain values only; "
                "else errors arrive as text, without the exception as their __cause__",
            )

    def _check_not_forked(self, error: BaseException | None = None) -> None:
        """End this process where it is a copy that the simulator has forked; only the probe itself goes on."""
        if os.getpid() != self._pid:
            end_forked_copy(error)

    def _write(self, event: str, value: Any) -> None:
        self._check_not_forked()
        self._file.write(json.dumps([event, value]) + "\n")


def child_main() -> NoReturn:
    """What runs in the process of a probe: its arguments are a `Job`, a folder and the end of a pipe."""
    from marl_parallel.cli import probes

    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    notebook = Notebook(folder, job)
    end_with_the_command(int(sys.argv[3]), sys.argv[2])
    if ON_LINUX:
        descendants.adopt_orphans()
    try:
        probes.PROBES[job.probe](job, notebook)
    except Stopped:
        pass  # a finding says why
    except Exception as error:
        traceback.print_exc()
        notebook.find(
            job.question,
            Severity.PROBLEM,
            f"what it returns cannot be looked at: {in_brief(error)}",
            "return what its spaces say, and plain numbers and dicts",
        )
    notebook.end()
    sys.stdout.flush()
    os._exit(0)  # whatever threads the simulator has left


# -- the parent's end --------------------------------------------------------------------------------------------------


class Probe:
    """A probe that has been started.

    Args:
        job: What it does.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._folder = tempfile.TemporaryDirectory(prefix="marl-parallel-check-")
        self._mark = f"check-{secrets.token_hex(8)}"
        environ = {**os.environ, "PYTHONHASHSEED": str(job.hash_seed), descendants.MARKER: self._mark}
        program = "from marl_parallel.cli.isolation import child_main\nchild_main()"
        heard, self._kept_open = os.pipe()
        with self._path(_OUTPUT).open("wb") as output, interpreter.started_with(program) as (command, file):
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(job)), self._folder.name, str(heard)],
                stdin=subprocess.DEVNULL,
                pass_fds=(heard, file),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        os.close(heard)
        self._news = (0, time.monotonic())
        self._limit = job.timeout
        self._silent = False

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _read(self, name: str) -> str:
        path = self._path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self) -> bool:
        """Whether it has; one that has long been silent is killed."""
        if self._process.poll() is not None:
            return True
        said = self._read(_EVENTS)
        if len(said) != self._news[0]:
            self._news = (len(said), time.monotonic())
            whole = said[: said.rfind("\n") + 1].splitlines()
            self._limit = max((json.loads(line)[1][2] for line in whole if line.startswith('["doing"')), default=0.0)
        self._silent = time.monotonic() - self._news[1] > max(self._limit, self.job.timeout) + _PATIENCE_S
        if self._silent:
            self._process.kill()
            self._process.wait()
        return self._silent

    def close(self) -> None:
        """Kill it and all that it has started, and remove its files."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if ON_LINUX:
            descendants.kill_marked(self._mark)
        os.close(self._kept_open)
        self._folder.cleanup()

    def outcome(self) -> Outcome:
        """What it found, and how it ended where that is a finding.

        Raises:
            CommandError: There is no such environment, or it cannot be imported.
        """
        result, complete = Outcome(), False
        doing = ("starting", self.job.question.name, self.job.timeout, self.job.severity.value, "")
        for event, value in map(json.loads, self._read(_EVENTS).splitlines()):
            if event == "finding":
                result.findings.append(Finding(Question[value[0]], Severity(value[1]), *value[2:]))
            elif event == "checked":
                result.checked |= {Question[name] for name in value}
            elif event == "facts":
                result.facts |= value
            elif event == "trace":
                result.traces[value[0]] = value[1]
            elif event == "doing":
                doing = value
            elif event == "refused":
                raise CommandError(value[0], value[1]) from RuntimeError(value[2])
            elif event == "end":
                complete = True
        if not complete:
            result.findings.append(self._end(*doing))
        return result

    def _end(self, doing: str, question: str, limit: float, severity: str, advice: str) -> Finding:
        stack = self._read(_STACK)
        where = place(stack)
        if self._silent or "Timeout (" in stack:
            return Finding(
                Question[question],
                Severity(severity),
                f"{doing} has not come to its end within {limit:g} s" + (f"; it is at {where}" if where else ""),
                advice or "if it needs longer, raise --timeout; else fix what hangs there",
            )
        manner, _ = manner_of_death(Lost(self._process.returncode, ""))
        return Finding(
            Question[question],
            Severity(severity),
            f"{doing} ends the process" + (f", at {where}" if where else "") + f": {manner}",
            advice
            or "find what ends it, native code or os._exit, and fix it; until then, workers in processes with "
            'on_error="restart" survive it',
        )


def run_probes(jobs: Iterable[Job], at_once: int, on_start: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
    """Run probes, so many side by side; gives what each has found, as they end.

    Raises:
        CommandError: As `Probe.outcome`.
    """
    waiting, running = list(jobs), list[Probe]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                on_start(waiting[0])
                running.append(Probe(waiting.pop(0)))
            done = [probe for probe in running if probe.ended()]
            for probe in done:
                yield probe.job, probe.outcome()
                running.remove(probe)
                probe.close()
            if not done:
                time.sleep(_TICK_S)
    finally:
        for probe in running:
            probe.close()
