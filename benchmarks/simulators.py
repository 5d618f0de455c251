"""Run third-party simulators in `ParallelEnv`, each in an environment with the releases that it needs.

    python benchmarks/simulators.py                all of them: some hours; writes results/simulators.*
    python benchmarks/simulators.py rware MPE2     those with one of these texts in their name; other results stay
    python benchmarks/simulators.py --markdown     print the saved results

`tests/simulators/real.py` is the table of simulators. Their environments are made in `--cache`, with pip, and kept
there. For each simulator, `tests/helpers/real_simulators.py` steps four environments with random legal actions and over
ends of episodes: in a plain loop, in two worker processes, in the caller's process, and through two facades. It kills a
worker under `on_error="restart"`, and measures the throughput of two workers relative to a plain loop. Simulators that
cannot be installed, or that fail in the plain loop, are listed with their own error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from frame import RESULTS, AsMarkdown, Block, Output, Repeats, Seconds, Table, markdown

from marl_parallel.cli.report import machine, progress

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # before this folder, where `simulators` is this file

from helpers import real_simulators as runs  # noqa: E402
from simulators import real  # noqa: E402

NAME = "simulators"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marl_parallel" / "simulators"
NOT_INSTALLED, FAILS_ALONE, FAILS, WORKS = "cannot be installed", "fails alone", "fails", "works"


@dataclass(frozen=True)
class Result:
    """What was found about one simulator.

    Attributes:
        name: Its name in the table.
        status: One of `WORKS`, `FAILS`, `FAILS_ALONE` and `NOT_INSTALLED`.
        errors: Errors by run, each in one line.
        kind: What the package recognises.
        agents: The number of agents.
        masks: Whether there are action masks.
        follows: What its results equal.
        why: The reason, where that is not a plain loop.
        batches: The number of steps of four environments.
        ends: The number of ends of episodes in them, in all environments.
        facades: The facades that step it.
        loop_us: Microseconds per environment step in a plain loop; None if it was not measured.
        speed_up: The throughput of two workers relative to that loop: the median of the ratios within each round.
        versions: Of what is installed, by distribution.
        machine: The machine, in one line.
        load: Its load average when the run began; None if that was not recorded.
    """

    name: str
    status: str
    errors: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    agents: int = 0
    masks: bool = False
    follows: str = ""
    why: str = ""
    batches: int = 0
    ends: int = 0
    facades: list[str] = field(default_factory=list)
    loop_us: float | None = None
    speed_up: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    load: float | None = None


class CannotInstall(Exception):
    """The message is pip's error, in one line."""


# -- environments ------------------------------------------------------------------------------------------------------


def interpreter(name: str, cache: Path) -> Path:
    """The Python of an environment of `real.INSTALLS`, which is made if it is missing or its requirements changed."""
    folder, lines = cache / name, [" ".join(own_requirements()), *real.INSTALLS[name].splitlines()]
    python, marker = folder / "bin" / "python", folder / "installed"
    if not (marker.is_file() and marker.read_text() == "\n".join(lines)):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # The first line goes with the first of the simulator's: pip then looks for releases that fit both.
        for words in ([*lines[0].split(), *lines[1].split()], *(line.split() for line in lines[2:])):
            command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CannotInstall(error_of_pip(done.stderr))
        # This checkout, with the compiled code that it has.
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(packages, "marl_parallel_checkout.pth").write_text(f"{ROOT}\n")
        marker.write_text("\n".join(lines))
    return python


def own_requirements() -> list[str]:
    """What this package and its commands depend on, without spaces."""
    every = [line.partition(";") for line in importlib.metadata.requires("marl-parallel") or []]
    return [name.replace(" ", "") for name, _, extra in every if not extra or extra.strip() == 'extra == "cli"']


VAGUE = ("ERROR: Failed", "ERROR: Could not build", "error: failed-", "error: subprocess-", "error: metadata-")
"""How errors begin that only say that a build failed."""


def error_of_pip(text: str) -> str:
    """The line that says most, without paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if re.search(r"(ERROR|[a-zA-Z]*[Ee]rror): ", line) and not line.startswith(VAGUE)]
    conflicts = [line for line in found if "conflicting dependencies" in line]
    return one_line((conflicts or found or lines or ["pip failed"])[-1])


def one_line(text: str) -> str:
    """The last line of a traceback or message, without paths of this machine."""
    last = [line.strip() for line in text.strip().splitlines() if line.strip()][-1:] or ["no message"]
    return re.sub(r"(/[\w.+~-]+){3,}", "...", last[0])[:300]


def versions(python: Path, requirements: str) -> dict[str, str]:
    """The versions of the requirements, and of what all simulators depend on."""
    program = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps({one.name: one.version for one in distributions()}))"
    )
    listed = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    installed = {normal(name): version for name, version in json.loads(listed.stdout).items()}
    names = [re.split(r"[=<>\[ ]", word)[0] for word in requirements.split() if not word.startswith("-")]
    wanted = dict.fromkeys(normal(name) for name in (*names, "numpy", "gymnasium", "pettingzoo"))
    return {name: installed[name] for name in wanted if name in installed}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- running -----------------------------------------------------------------------------------------------------------


def examine(name: str, cache: Path, seconds: float, repeats: int, timeout: float) -> Result:
    """Run one simulator and compare."""
    simulator = real.SIMULATORS[name]
    here = machine()
    described, load = "{cpu}, {cpus} CPUs; {system}; Python {python}; {date}".format(**here), here["load"]
    try:
        python = interpreter(simulator.install, cache)
    except CannotInstall as error:
        return Result(name, NOT_INSTALLED, {"install": str(error)}, machine=described, load=load)
    known = {
        "name": name,
        "versions": versions(python, real.INSTALLS[simulator.install]),
        "machine": described,
        "load": load,
        "follows": simulator.follows.value,
        "why": simulator.why,
        "batches": simulator.batches,
    }
    variables = simulator.variables_with(python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            runs.prepare(simulator, folder, variables, str(python))
        except subprocess.CalledProcessError as error:
            return Result(status=FAILS_ALONE, errors={"prepare": one_line(error.stderr)}, **known)
        others = ["about", *simulator.parallel_runs, *simulator.facades, "restart"]
        groups = [[run] for run in simulator.plain_runs] + [others]
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda group: runs.results(folder, group, variables, str(python), timeout), groups)
            by_run = {run: one for group in found for run, one in group.items()}
        alone = {run: one_line(error) for run, (_, error) in by_run.items() if error and run in simulator.plain_runs}
        if alone:
            return Result(status=FAILS_ALONE, errors=alone, **known)
        speed: Mapping[str, float] = {}
        errors = {run: error for run, (_, error) in by_run.items() if error}
        if simulator.measured:
            ((run, (measured, error)),) = runs.results(
                folder, [f"speed {seconds} {repeats}"], variables, str(python), timeout
            ).items()
            speed, errors = (measured or {}), errors | ({run: error} if error else {})
    errors |= failed_checks(simulator, {run: result for run, (result, error) in by_run.items() if not error})
    about = by_run["about"][0] or {}
    ends = sum(by_run[simulator.parallel_runs[0]][0][2]) if not by_run[simulator.parallel_runs[0]][1] else 0
    for run, error in errors.items():
        typer.echo(f"{name}: {run}: {error}", err=True)
    return Result(
        status=FAILS if errors else WORKS,
        errors={run: one_line(error) for run, error in errors.items()},
        **known,
        **about,
        ends=ends,
        facades=[*simulator.facades],
        **speed,
    )


def failed_checks(simulator: real.Simulator, by_run: Mapping[str, Any]) -> dict[str, str]:
    """The errors of all comparisons, by what was compared."""
    rollouts = {
        run: runs.Rollout(*by_run[run]) for run in (*simulator.plain_runs, *simulator.parallel_runs) if run in by_run
    }
    errors = {}

    def check(what: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except AssertionError as error:
            errors[what] = " ".join(str(error).split())

    if len(rollouts) == len(simulator.plain_runs) + len(simulator.parallel_runs):
        check("equality", runs.check_equality, simulator, rollouts)
    if "about" in by_run:
        check("recognised", runs.check_about, simulator, by_run["about"])
    if "restart" in by_run:
        check("restart", runs.check_restart, by_run["restart"])
    for facade in simulator.facades if simulator.follows is not real.Follows.IN_FORM else ():
        if facade in by_run and "process" in rollouts:
            check(facade, runs.check_facade, by_run[facade], rollouts["process"])
    return errors


# -- results -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Result]:
    saved = json.loads(path.read_text()) if path.is_file() else []
    return {one["name"]: Result(**one) for one in saved}


def save(results: Mapping[str, Result], folder: Path) -> None:
    """Write `simulators.json` and `simulators.md`, in the order of the table."""
    kept = [results[name] for name in real.SIMULATORS if name in results]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps([asdict(one) for one in kept], indent=1) + "\n")
    (folder / f"{NAME}.md").write_text(in_markdown(kept))


EQUALS = {
    real.Follows.PLAIN_LOOP.value: "plain loop",
    real.Follows.WITH_NEIGHBOURS.value: "plain loop over the same worker's",
    real.Follows.IN_FORM.value: "form only",
}


HEADINGS = (
    "simulator", "kind", "agents", "masks", "equals", "`PettingZooVecEnv`, `StackedVecEnv`", "killed worker",
    "plain loop", "2 workers",
)  # fmt: skip


def in_markdown(results: Sequence[Result]) -> str:
    """Tables of what works and of what does not, with notes."""
    rows = []
    marks: dict[str, int] = {}
    for one in results:
        if one.status not in (WORKS, FAILS):
            continue
        mark = f" [{marks.setdefault(one.why, len(marks) + 1)}]" if one.why else ""
        facades = ", ".join("yes" if name in one.facades and name not in one.errors else "no" for name in runs.FACADES)
        equal = EQUALS[one.follows] if "equality" not in one.errors else "no"
        cells = [
            one.name,
            one.kind,
            f"{one.agents}",
            "yes" if one.masks else "",
            f"{equal}{mark}",
            facades,
            "no" if "restart" in one.errors else "restarted",
            "" if one.loop_us is None else f"{one.loop_us:,.0f} µs",
            "" if one.speed_up is None else f"{one.speed_up:.2f}x",
        ]
        rows.append(cells)
    blocks: list[Block] = [Table(HEADINGS, rows, "llrllll"), *(f"[{number}] {why}" for why, number in marks.items())]
    broken = [one for one in results if one.status != WORKS]
    if broken:
        failures = [
            [one.name, one.status if one.status != FAILS else what, cell(error)]
            for one in broken
            for what, error in [*one.errors.items()][:1]
        ]
        blocks += ["Simulators that did not run:", Table(("simulator", "what fails", "error"), failures, "lll")]
    known = [one.name for one in results if one.name in real.SIMULATORS]
    made = [[name, real.SIMULATORS[name].install, cell(shortened(real.SIMULATORS[name].make))] for name in known]
    blocks += ["How they are constructed:", Table(("simulator", "environment", "constructor"), made, "lll")]
    installs = dict.fromkeys(real.SIMULATORS[name].install for name in known)
    blocks.append("The environments, beside this package:")
    blocks.append("\n".join(f"- {name}: `{real.INSTALLS[name]}`" for name in installs))
    absent = [name for name in real.SIMULATORS if name not in {one.name for one in results}]
    if absent:
        blocks.append(f"In the table, but not in these results: {', '.join(absent)}.")
    loads = [one.load for one in results if one.load is not None and one.speed_up is not None]
    used = ""
    if loads and max(loads) > 1:
        used = (
            f" Other programs used the CPUs as well: load averages were {min(loads):.0f} to {max(loads):.0f} before "
            "the runs, so that times are too long, and ratios are rough."
        )
    described = sorted({one.machine for one in results})
    blocks.append(
        "Equals: bit for bit. Plain loop: wall time of one environment step. 2 workers: throughput with four "
        f"environments in two worker processes, relative to it. Measured on {', and on '.join(described)}.{used}"
    )
    return markdown(blocks) + "\n"


def shortened(text: str, length: int = 110) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def cell(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def chosen(names: Iterable[str]) -> list[str]:
    """The simulators with one of these texts in their names; all if there are none."""
    texts = [*names]
    for text in texts:
        if not any(text.lower() in name.lower() for name in real.SIMULATORS):
            raise typer.BadParameter(f"no simulator has {text!r} in its name", param_hint="NAMES")
    return [name for name in real.SIMULATORS if not texts or any(text.lower() in name.lower() for text in texts)]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Texts in the names of simulators; none for all.")] = None,
    cache: Annotated[Path, typer.Option(help="The directory of the environments in which simulators run.")] = CACHE,
    seconds: Seconds = 0.5,
    repeats: Repeats = 5,
    timeout: Annotated[float, typer.Option(help="Seconds for all runs of one simulator.")] = 900.0,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Run simulators and merge the results with the saved ones."""
    folder = output or RESULTS
    path = folder / f"{NAME}.json"
    if as_markdown:
        saved = read(path)
        typer.echo(in_markdown([saved[name] for name in real.SIMULATORS if name in saved]), nl=False)
        return
    names = chosen(names or [])
    with progress(len(names), "running") as on_turn:
        for name in names:
            on_turn(name)
            result = examine(name, cache, seconds, repeats, timeout)
            save({**read(path), name: result}, folder)
            speed = "" if result.speed_up is None else f", {result.speed_up:.2f} times a plain loop"
            errors = "".join(f"; {what}: {error}" for what, error in result.errors.items())
            typer.echo(f"{name}: {result.status}{speed}{errors}")


if __name__ == "__main__":
    typer.run(main)
