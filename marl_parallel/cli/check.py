"""`marl-parallel check`: does an environment work with this package, and with others that speak its API?

Here live the command, the order in which probes run, and what follows from comparing their runs. What a probe looks at
is in `probes.py`, what may be found in `findings.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.cli.endings import closed_at_signals
from marl_parallel.cli.failures import told_briefly
from marl_parallel.cli.findings import BACKENDS, Examination, Finding, Question, Severity
from marl_parallel.cli.isolation import Job, Outcome, run_probes
from marl_parallel.cli.official import OF_SEEDS
from marl_parallel.cli.options import AsJson, Debug, EnvArgument, EnvKwargs, backend_names
from marl_parallel.cli.report import progress
from marl_parallel.cli.rollout import AFTER, Difference, Trace, first_episode, is_step, parting
from marl_parallel.core.sharing import usable_cpus

_OTHER_GENERATORS = 1_000_003
_EVERYTHING = ",".join(BACKENDS)


def check(
    env: EnvArgument,
    env_kwargs: EnvKwargs = "{}",
    backends: Annotated[str, typer.Option(help=f"Of {', '.join(BACKENDS)}; with commas between.")] = _EVERYTHING,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a constructor, step or reset may take.")] = 30.0,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each run lasts, at most.")] = 2.0,
    steps: Annotated[int, typer.Option(min=1, help="How many steps each run has, at most.")] = 200,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check ENV alone and with every backend: its API, spaces, determinism, pickling, processes, and what steps cost.

    Everything runs in processes of its own: a crash or a hang is a finding. The exit code is 1 if there is a problem,
    something that does not work here; 0 if there are remarks only, as where a test of PettingZoo fails, or nothing.

    [bold]Example[/bold]:  marl-parallel check mpe2.simple_spread_v3 --env-kwargs '{"N": 5}'
    """
    with told_briefly(debug):
        job = Job("alone", env, env_kwargs, timeout=timeout, seconds=seconds, steps=steps)
        names = backend_names(backends, BACKENDS)
        with closed_at_signals(), progress(4 + len(names), "checking") as on_start:
            found = examine(job, names, on_start)
        if as_json:
            typer.echo(json.dumps(found.as_json(), indent=2))
        else:
            show(found)
    raise typer.Exit(0 if found.healthy else 1)


def examine(job: Job, backends: list[str], on_start: Callable[[str], None] = lambda label: None) -> Examination:
    """Run all probes and put together what they have found.

    Args:
        job: What the first probe does; the others do the same in their ways.
        backends: Those to try.
        on_start: Told what begins.

    Raises:
        CommandError: There is no such environment.
    """

    def told(started: Job) -> None:
        on_start(started.backend if started.probe == "copies" else started.probe)

    found = Examination(job.environment)
    ((_, first),) = run_probes([job], 1, told)
    _take(first, found)
    if Question.RUNS not in found.checked:
        return found
    job = replace(job, shares_process=found.facts.get("shares_process", True))
    others = [_once_more(job, found.facts, global_seed=_OTHER_GENERATORS, hash_seed=1)]
    # Environments that need a process each can only live in workers that are processes.
    others += [
        replace(job, probe="copies", backend=backend)
        for backend in backends
        if job.shares_process or Question.of_backend(backend) is Question.PROCESS
    ]
    others += _official(job, found.facts)
    found.checked.add(Question.API)
    traces: dict[str, dict[int, Trace]] = {}
    for done, outcome in run_probes(others, usable_cpus(), told):
        _take(outcome, found)
        if outcome.traces:
            traces[done.backend if done.probe == "copies" else done.probe] = outcome.traces
    again = traces.pop("again", None)
    if again is not None:
        found.checked.add(Question.DETERMINISM)
        differ, reproducible = _about_determinism(job, first.traces, again, found.facts)
        if differ:  # then comparing more says nothing, nor does what was compared before
            found.drop(Question.DETERMINISM, Severity.REMARK)
            first.traces = {env_id: first_episode(trace) for env_id, trace in first.traces.items()}
            traces = traces if reproducible else {}
        found.add(differ)
    for backend, run in traces.items():
        found.add(_about_copies(backend, first.traces, run))
        found.checked.add(Question.of_backend(backend))
    found.add(_about_cost(found.facts))
    return found


def _take(outcome: Outcome, found: Examination) -> None:
    tests = [*found.facts.get("tests", []), *outcome.facts.get("tests", [])]
    found.facts |= outcome.facts
    if tests:
        found.facts["tests"] = sorted({*tests})
    found.checked |= outcome.checked
    found.add(outcome.findings)


def _once_more(job: Job, facts: dict[str, Any], **changes: Any) -> Job:
    """The first run again, with as many steps, however long they take."""
    return replace(job, probe="again", steps=facts["steps"], **changes)


def _official(job: Job, facts: dict[str, Any]) -> list[Job]:
    """The tests of other projects, each in a process of its own, so that others run where one hangs or crashes.

    They get so many steps that they last about as long as everything else, or as few as there are. Nothing is known of
    their single calls, so they are given up by what they should take altogether.
    """
    step_s, reset_s = (facts[what]["median_s"] for what in ("step", "reset"))
    cycles = int(min(max(job.seconds / step_s, 10), 500))
    seconds = max(job.seconds, cycles * step_s + 10 * reset_s + facts["construct_s"])
    names = [name for name in facts.pop("official") if job.shares_process or name not in OF_SEEDS]
    return [replace(job, probe="official", cycles=cycles, seconds=seconds, test=name) for name in names]


# -- what follows from comparing ---------------------------------------------------------------------------------------


def _about_determinism(
    job: Job, first: dict[int, Trace], again: dict[int, Trace], facts: dict[str, Any]
) -> tuple[list[Finding], bool]:
    """What differs in two runs, and whether the episodes that begin with a seed are the same all the same."""
    where = _difference(first, again)
    if where is None:
        return [], True
    advice = "draw from a generator that is made in `reset` from its seed (gymnasium.utils.seeding.np_random)"
    ((_, same),) = run_probes([_once_more(job, facts)], 1, lambda job: None)
    reproducible = where.reset > 1 and facts["takes_seed"]
    text = f"two runs with the same seed and actions differ: {where}"
    if same.traces and _difference(first, same.traces) is None:
        advice += ", not from `random` or `np.random`, which belong to the whole process, and sort what is a set"
    elif reproducible:
        text = (
            "an episode that begins with a seed can be repeated, but one that begins without, as after an automatic "
            f"reset, cannot: two runs with the same seed and actions differ from {where} on"
        )
        advice = (
            "in `reset`, make a new generator only if a seed is given, and else go on with the one that is there "
            "(`super().reset(seed=seed)` and `self.np_random` of gymnasium.Env do that)"
        )
    else:
        advice += "; look for default_rng() without a seed, for the time, for threads"
    if not facts["takes_seed"]:
        advice = f"let `reset` take a `seed`; {advice}"
    return [Finding(Question.DETERMINISM, Severity.PROBLEM, text, advice)], reproducible


def _difference(first: dict[int, Trace], again: dict[int, Trace]) -> Difference | None:
    """Where two runs with the same number of steps differ, or the reset without a seed that follows them."""
    found = parting(first[0], again[0])
    if found is not None or AFTER not in again:
        return found
    found = parting(first[AFTER], again[AFTER])
    resets = sum(not is_step(entry) for entry in first[0])
    steps = len(first[0]) - resets
    return found and found._replace(step=found.step and steps + found.step, reset=resets + found.reset)


def _about_copies(backend: str, first: dict[int, Trace], copies: dict[int, Trace]) -> list[Finding]:
    for env_id in first.keys() & copies.keys():
        where = parting(first[env_id], copies[env_id])
        if where is not None:
            return [
                Finding(
                    Question.of_backend(backend),
                    Severity.PROBLEM,
                    f"beside others, copy {env_id} does not do what it does alone: {where}",
                    "let environments share nothing: no globals, class attributes that change, files or ports of one "
                    "name; or pass envs_per_worker=1, where one process has to have one",
                )
            ]
    return []


def _about_cost(facts: dict[str, Any]) -> list[Finding]:
    if "step" not in facts:
        return []
    step, reset = facts["step"], facts["reset"]
    findings = []
    if step["p99_s"] > max(5 * step["median_s"], 1e-3):
        findings.append(
            Finding(
                Question.COST,
                Severity.REMARK,
                f"steps are uneven: 1 in 100 takes {step['p99_s'] / step['median_s']:.0f} times as long as usual",
                "with `step`, everyone waits for the slowest copy; send and recv(min_envs=...) go on with the others",
            )
        )
    if reset["median_s"] > max(20 * step["median_s"], 1e-2):
        findings.append(
            Finding(
                Question.COST,
                Severity.REMARK,
                f"a reset takes as long as {reset['median_s'] / step['median_s']:.0f} steps",
                "with `step`, everyone waits while a copy is reset; send and recv(min_envs=...) go on with the others",
            )
        )
    if step["median_s"] < 20e-6:
        findings.append(
            Finding(
                Question.COST,
                Severity.REMARK,
                f"a step takes {1e6 * step['median_s']:.0f} µs, about what it costs to hand it to a worker",
                "use many copies in each of a few workers; `marl-parallel tune` finds how many",
            )
        )
    return findings


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(found: Examination) -> None:
    """Print the answers, what steps cost, and each finding with what to do about it."""
    console = Console()
    table = Table(show_header=False)
    colours = {"yes": "green", "no": "red", "not checked": "dim"}
    for question, answer in found.answers().items():
        table.add_row(question.value, f"[{colours.get(answer, 'yellow')}]{answer}")
    console.print(f"[bold]{escape(_title(found))}", highlight=False)
    console.print(table)
    if "step" in found.facts:
        console.print(_costs(found.facts), highlight=False, soft_wrap=True)
    if "reward_types" in found.facts:
        rewards, flags = (", ".join(found.facts[f"{what}_types"]) for what in ("reward", "flag"))
        console.print(f"Types: rewards {rewards}; flags {flags}", highlight=False, soft_wrap=True)
    if found.facts.get("tests"):
        console.print(f"Tests run: {', '.join(found.facts['tests'])}", highlight=False, soft_wrap=True)
    for one, backends in found.merged():
        colour = "red" if one.severity is Severity.PROBLEM else "yellow"
        where = f" (backend: {', '.join(backends)})" if backends else ""
        console.print(
            f"\n[{colour}]{one.severity.value}[/]: {escape(one.what)}{where}", highlight=False, soft_wrap=True
        )
        console.print(f"  what to do: {escape(one.advice)}", highlight=False, soft_wrap=True)


def _title(found: Examination) -> str:
    agents = found.facts.get("agents")
    if agents is None:
        return found.environment
    kind = found.facts["kind"]
    named = f"{len(agents)} agent{'s' * (len(agents) != 1)}" if agents else "agents not known beforehand"
    return f"{found.environment}: {kind[0].lower()}{kind[1:]}, {named}"


def _costs(facts: dict[str, Any]) -> str:
    told = [
        f"{what} {_in_time(facts[what]['median_s'])} (median), {_in_time(facts[what]['p99_s'])} (p99)"
        for what in ("step", "reset")
    ]
    return f"It costs: {'; '.join([*told, 'constructor ' + _in_time(facts['construct_s'])])}"


def _in_time(seconds: float) -> str:
    """Seconds in a unit that fits.

    Example:
        >>> _in_time(0.0002134), _in_time(0.0213), _in_time(3.21)
        ('213 µs', '21.3 ms', '3.21 s')
    """
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
