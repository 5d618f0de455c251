"""`marl-parallel tune`: the number of workers, and of environments in each, that is fastest; and whether it pays off.

A grid of settings is searched by successive halving: every setting is measured once, the better half twice more, the
best quarter three times more, in rounds in each of which all of them have their turn. The best one then takes turns
with a plain loop and with `backend="serial"`.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.cli.measure import (
    ASYNC,
    STEP,
    Constructor,
    Run,
    Traits,
    draw_actions,
    made,
    opened,
    plain_loop,
    rate,
    repeatedly,
    run_of,
    spread,
    stepping,
)
from marl_parallel.cli.report import in_one_line
from marl_parallel.cli.target import CommandError

RUNGS = ((1.0, 1), (0.5, 2), (0.25, 3))
"""For each rung, the share of all settings that is measured, and in how many rounds."""
FINALISTS = 3
"""The least number of settings in the last rungs."""
AS_GOOD = 0.02
"""A finalist that is slower than the fastest by at most this share is as good; the smallest of these is taken."""
PLAIN_LOOP, SERIAL, WORKERS = "plain loop", "serial", "workers"
ROUNDS = 3


class Setting(NamedTuple):
    """A number of workers, of environments in each, and the way they are stepped: `STEP` or `ASYNC`."""

    num_workers: int
    envs_per_worker: int
    way: str = STEP

    @property
    def num_envs(self) -> int:
        """All environments."""
        return self.num_workers * self.envs_per_worker

    def exceeds(self, other: Setting) -> bool:
        """Whether it has as many workers and as many environments in each, and more of one."""
        return self[:2] != other[:2] and self[0] >= other[0] and self[1] >= other[1]


Measure: TypeAlias = Callable[[Sequence[Setting]], tuple[list[float], int]]
"""Measures settings: environment steps per second of each, and bytes of memory that all workers use."""


@dataclass
class Trial:
    """What a setting achieved: environment steps per second in each round; the most memory in any; whether it fits."""

    setting: Setting
    rounds: list[float] = field(default_factory=list)
    memory: int = 0
    fits: bool = True

    @property
    def steps_per_second(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def grid(workers: Sequence[int], envs_per_worker: Sequence[int], max_envs: int) -> list[Setting]:
    """All settings with at most `max_envs` environments; a single environment is only stepped by `step`."""
    settings = {Setting(*one) for one in itertools.product(workers, envs_per_worker, (STEP, ASYNC))}
    return sorted(one for one in settings if one.num_envs <= max_envs and (one.way == STEP or one.num_envs > 1))


def search(settings: Sequence[Setting], measure: Measure, limit: float = math.inf) -> tuple[Trial, list[Trial]]:
    """Find the fastest setting within a limit of memory by successive halving.

    Args:
        settings: What to try.
        measure: Measures settings that differ in the way only, which share worker processes.
        limit: Bytes of memory that all workers may use.

    Returns:
        The best trial, and all of them.

    Raises:
        CommandError: Nothing keeps within the limit, or there is nothing to try.
    """
    if not settings:
        raise CommandError("there is nothing to try", "allow more with --max-envs")
    trials: dict[Setting, Trial] = {}
    kept = list(settings)
    for share, rounds in RUNGS:
        kept = sorted(kept[: _survivors(share, settings)], key=lambda one: (one.num_envs, one))
        groups = [[*group] for _, group in itertools.groupby(kept, key=operator.itemgetter(0, 1))]
        for group in groups * rounds:
            if any(group[0].exceeds(one.setting) for one in trials.values() if not one.fits):
                continue
            rates, memory = measure(group)
            for setting, steps_per_second in zip(group, rates):
                trial = trials.setdefault(setting, Trial(setting))
                trial.rounds.append(steps_per_second)
                trial.memory = max(trial.memory, memory)
                trial.fits = trial.memory <= limit
        fitting = sorted((one for one in trials.values() if one.fits), key=lambda one: -one.steps_per_second)
        if not fitting:
            least = min(trial.memory for trial in trials.values())
            raise CommandError(
                f"nothing keeps within --memory: the least that was tried uses {in_size(least)}",
                "allow more, or try fewer environments with --workers and --envs-per-worker",
            )
        kept = [trial.setting for trial in fitting if trial.setting in kept] or [trial.setting for trial in fitting]
    finalists = [trials[setting] for setting in kept]
    enough = (1 - AS_GOOD) * max(trial.steps_per_second for trial in finalists)
    as_good = [trial for trial in finalists if trial.steps_per_second >= enough]
    best = min(as_good, key=lambda one: (one.setting.num_envs, one.setting[:2], one.setting.way != STEP))
    return best, list(trials.values())


def most_turns(settings: Sequence[Setting]) -> int:
    """The most turns that `search` gives to settings."""
    return sum(rounds * _survivors(share, settings) for share, rounds in RUNGS)


def _survivors(share: float, settings: Sequence[Setting]) -> int:
    return min(max(FINALISTS, math.ceil(share * len(settings))), len(settings))


def in_size(nbytes: float) -> str:
    """Bytes in a unit that fits.

    Example:
        >>> in_size(83_400_000), in_size(2.25e9)
        ('83 MB', '2.2 GB')
    """
    return f"{nbytes / 1e6:,.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.1f} GB"


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(
    constructor: Constructor, traits: Traits, seconds: float, settings: Sequence[Setting]
) -> tuple[list[float], int]:
    """Measure settings that differ in the way only, with worker processes of their own; results as of `Measure`."""
    num_workers, num_envs = settings[0].num_workers, settings[0].num_envs
    before = {*psutil.Process().children(recursive=True)}
    batches = draw_actions(traits.action_spaces, num_envs)
    with opened([constructor] * num_envs, num_workers=num_workers) as env:
        rates = [_rate_once_warm(run_of(env, batches, traits.rules, one.way), seconds) for one in settings]
        return rates, memory_of({*psutil.Process().children(recursive=True)} - before)


def memory_of(processes: set[psutil.Process]) -> int:
    """Bytes of memory that processes use together; pages that they share are counted once where the system can tell."""
    used = 0
    for process in processes:
        try:
            memory = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        used += getattr(memory, "pss", memory.rss)
    return used


def compare(
    constructor: Constructor,
    traits: Traits,
    seconds: float,
    best: Trial,
    measure: Measure,
) -> dict[str, list[float]]:
    """Measure a plain loop, `backend="serial"` and the best setting in turns.

    The first two step as many environments as one worker of the best setting has: so many are known to work in one
    process, and to fit into its memory.

    Returns:
        Environment steps per second in each round, by `PLAIN_LOOP`, `SERIAL` and `WORKERS`.
    """
    num_envs = best.setting.envs_per_worker
    batches = draw_actions(traits.action_spaces, num_envs)
    rounds: dict[str, list[float]] = {PLAIN_LOOP: [], SERIAL: [], WORKERS: []}
    for _ in range(ROUNDS):
        with made(constructor, num_envs) as envs:
            run = repeatedly(plain_loop(envs, traits), batches, num_envs)
            rounds[PLAIN_LOOP].append(_rate_once_warm(run, seconds))
        with stepping([constructor] * num_envs, batches, traits.rules, STEP, backend="serial") as run:
            rounds[SERIAL].append(_rate_once_warm(run, seconds))
        rounds[WORKERS].append(measure([best.setting])[0][0])
    return rounds


def _rate_once_warm(run: Run, seconds: float) -> float:
    rate(run, seconds / 4)  # the first steps are slower than all others
    return rate(run, seconds)


# -- what is shown -----------------------------------------------------------------------------------------------------


def conclusion(
    environment: str, env_kwargs: dict[str, Any], best: Trial, trials: Sequence[Trial], in_turns: dict[str, list[float]]
) -> dict[str, Any]:
    """What was measured and what is proposed, in values that JSON knows; the fastest trials come first."""
    loop, serial, workers = (statistics.median(in_turns[name]) for name in (PLAIN_LOOP, SERIAL, WORKERS))
    pays_off, setting = workers > loop, best.setting
    advice = f"{workers / loop:.2f} times the speed of a plain loop."
    if not pays_off:
        faster = "a plain loop or backend='serial' is" if serial > workers else "a plain loop is"
        advice = (
            f"Do not parallelise this simulator: {faster} faster. A plain loop takes {loop:,.0f} steps/s, "
            f"backend='serial' {serial:,.0f}, the fastest number of workers {workers:,.0f}."
        )
    path, colon, attribute = environment.partition(":")
    # A file by its module's name: what is pasted is to run beside it.
    name = f"{Path(path).stem}{colon}{attribute}" if path.endswith(".py") else environment
    arguments = [f'"{name}"', f"num_envs={setting.num_envs}", *([f"env_kwargs={env_kwargs!r}"] if env_kwargs else [])]
    how = f"num_workers={setting.num_workers}" if pays_off else 'backend="serial"'
    code = f"env = marl_parallel.make({', '.join([*arguments, how])})"
    if pays_off and setting.way == ASYNC:
        half = max(1, setting.num_envs // 2)
        code += f"\n# env.reset_async(); then repeat: env.recv(min_envs={half}), env.send actions to those it returned"
    return {
        "environment": environment,
        "env_kwargs": env_kwargs,
        "best": _as_json(best),
        "plain_loop": loop,
        "serial": serial,
        "pays_off": pays_off,
        "advice": advice,
        "code": code,
        "trials": [*map(_as_json, sorted(trials, key=lambda one: (not one.fits, -one.steps_per_second)))],
        "in_turns": in_turns,
    }


def _as_json(trial: Trial) -> dict[str, Any]:
    facts = {"num_envs": trial.setting.num_envs, "steps_per_second": trial.steps_per_second, **vars(trial)}
    return {**trial.setting._asdict(), **{name: fact for name, fact in facts.items() if name != "setting"}}


def show(found: dict[str, Any]) -> None:
    """Print the settings, the fastest first, the advice and the line to paste."""
    console, best, pays_off = Console(), found["best"], found["pays_off"]
    title = escape(found["environment"])
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for heading in ("workers", "in each", "envs", "by", "steps/s", "± %", "rounds", "memory", ""):
        table.add_column(heading, justify="left" if heading in ("by", "") else "right", no_wrap=True)
    for trial in found["trials"]:
        remark, style = ("", None) if trial["fits"] else ("too large", "dim")
        if trial == best:
            remark, style = "proposed" if pays_off else "fastest", "bold green"
        counts = [str(trial[name]) for name in ("num_workers", "envs_per_worker", "num_envs")]
        way = {STEP: "step", ASYNC: "send, recv"}[trial["way"]]
        table.add_row(*counts, way, *_speed(trial["rounds"]), in_size(trial["memory"]), remark, style=style)
    for name in (SERIAL, PLAIN_LOOP):
        table.add_row("", "", str(best["envs_per_worker"]), name, *_speed(found["in_turns"][name]), "", "")
    console.print(table)
    console.print(f"[dim]{escape(in_one_line(found['machine']))}", highlight=False)
    console.print(f"\n{found['advice']}", style=None if pays_off else "bold yellow", markup=False, highlight=False)
    console.print(found["code"], markup=False, highlight=False, soft_wrap=True)


def _speed(rounds: Sequence[float]) -> tuple[str, str, str]:
    deviation = f"{100 * spread(rounds):.0f}" if len(rounds) > 1 else ""
    return f"{statistics.median(rounds):,.0f}", deviation, f"{len(rounds)}"
