"""`marl-parallel tune`: finds the number of workers and of environments in each, and whether they pay off at all.

Here live the command, the measurements and the report. `search.py` decides which settings are measured.
"""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.backends import descendants
from marl_parallel.cli.failures import CommandError, told_briefly
from marl_parallel.cli.isolation import ON_LINUX
from marl_parallel.cli.machine import in_one_line, machine
from marl_parallel.cli.measure import Traits, draw_actions, plain_loop, rate, spread, traits_of
from marl_parallel.cli.memory import available, in_size, parsed_size, used_by
from marl_parallel.cli.options import AsJson, Debug, EnvArgument, EnvKwargs, whole_numbers
from marl_parallel.cli.output import reserved
from marl_parallel.cli.report import progress
from marl_parallel.cli.search import Axes, Search, Shape, Trial, Turn
from marl_parallel.cli.target import constructor_of, distributions_of
from marl_parallel.cli.ways import ASYNC, STEP, Constructor, Run, closed_after, repeatedly, run_of, stepping
from marl_parallel.core.sharing import usable_cpus
from marl_parallel.core.signatures import construct_one
from marl_parallel.parallel_env import ParallelEnv

ENVS_PER_WORKER = (1, 2, 4, 8)
_ENVS_PER_CPU = 16


def tune(
    env: EnvArgument,
    env_kwargs: EnvKwargs = "{}",
    memory: Annotated[
        str, typer.Option(help="What all worker processes may use together, such as 2GB.", show_default="what is free")
    ] = "",
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers, with commas between.", show_default="up to twice the CPUs, or more"),
    ] = "",
    envs_per_worker: Annotated[
        str, typer.Option(help="Numbers of environments in each, with commas between.", show_default="1,2,4,8, or more")
    ] = "",
    max_envs: Annotated[
        int,
        typer.Option(
            min=0, help="How many environments there may be; 0: 16 for each CPU.", show_default="16 for each CPU"
        ),
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")] = 0.5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the number of workers and of environments in each that step ENV fastest, by measuring.

    Every setting is measured once, the better half of them twice more, the best quarter three times more. Of those
    within 2 % of the best, tune proposes the one with the fewest environments. It then compares that one with a plain
    loop and with backend="serial", and advises against workers where they do not pay off.

    [bold]Example[/bold]:  marl-parallel tune mpe2.simple_spread_v3 --memory 2GB
    """
    with told_briefly(debug):
        axes = _axes(workers, envs_per_worker, max_envs or _ENVS_PER_CPU * usable_cpus())
        limit = _limit(memory)
        with reserved(as_json):
            constructor = constructor_of(env, env_kwargs)
            traits = _traits(constructor)
            described = machine(distributions_of(env))
            with progress(0, "tuning") as on_turn:
                turns = Turns(constructor, traits, seconds, lambda turn: on_turn(turn, search.most_turns()))
                search = Search(axes, turns, limit)
                best = search.run()
                in_turns = compare(constructor, traits, seconds, best, turns)
        found = Tuning(env, json.loads(env_kwargs), described, limit, list(search.trials.values()), best, in_turns)
        if as_json:
            typer.echo(json.dumps(found.as_json(), indent=2))
        else:
            show(found)


def _axes(workers: str, envs_per_worker: str, most_envs: int) -> Axes:
    cpus = usable_cpus()
    usual = sorted({*(2**n for n in range(cpus.bit_length())), cpus, 2 * cpus})
    return Axes(
        sorted(whole_numbers("--workers", workers)) if workers else usual,
        sorted(whole_numbers("--envs-per-worker", envs_per_worker)) if envs_per_worker else ENVS_PER_WORKER,
        most_envs=most_envs,
        grow=not workers and not envs_per_worker,
    )


def _limit(memory: str) -> int | None:
    if not memory:
        return available()
    if not ON_LINUX:
        raise CommandError("--memory needs Linux, whose /proc tells what processes use", "leave it out")
    return parsed_size(memory)


def _traits(constructor: Constructor) -> Traits:
    with closed_after(construct_one(constructor, seed=42, env_id=0)) as env:
        return traits_of(env)


class Turns:
    """Measures shapes, each with processes of its own.

    Args:
        constructor: Makes one environment.
        traits: Those of the environment.
        seconds: How long each way is measured.
        on_turn: Told who is up.
    """

    def __init__(
        self, constructor: Constructor, traits: Traits, seconds: float, on_turn: Callable[[str], None]
    ) -> None:
        self._constructor, self._traits, self._seconds, self._on_turn = constructor, traits, seconds, on_turn

    def __call__(self, shape: Shape, ways: Sequence[str]) -> Turn:
        self._on_turn(f"{shape.workers} workers x {shape.envs_per_worker}")
        others = {*descendants.below(os.getpid())} if ON_LINUX else set()
        pool = draw_actions(self._traits.action_spaces, shape.num_envs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs may be what is best
            env = ParallelEnv([self._constructor] * shape.num_envs, num_workers=shape.workers)
        with closed_after(env):
            rates = {}
            for way in ways:
                run = run_of(env, pool, self._traits.rules, way)
                rates[way] = _rate_once_warm(run, self._seconds)
            memory = used_by({*descendants.below(os.getpid())} - others) if ON_LINUX else None
        return Turn(rates, memory)


PLAIN_LOOP, SERIAL, WORKERS = "plain loop", "serial", "workers"
_ROUNDS = 3


def compare(
    constructor: Constructor, traits: Traits, seconds: float, best: Trial, turns: Turns
) -> dict[str, list[float]]:
    """Measure a plain loop, `backend="serial"` and the best setting in turns.

    The first two step as many environments as one worker of the best setting has: so many are known to work in one
    process, and to fit into its memory.

    Returns:
        Environment steps per second in each round, by `PLAIN_LOOP`, `SERIAL` and `WORKERS`.
    """
    shape, way = best.setting
    num_envs = shape.envs_per_worker
    pool = draw_actions(traits.action_spaces, num_envs)
    rounds: dict[str, list[float]] = {PLAIN_LOOP: [], SERIAL: [], WORKERS: []}
    for _ in range(_ROUNDS):
        with ExitStack() as stack:
            envs = []
            for env_id in range(num_envs):
                envs.append(construct_one(constructor, seed=42 + env_id, env_id=env_id))
                stack.enter_context(closed_after(envs[-1]))
            rounds[PLAIN_LOOP].append(_rate_once_warm(repeatedly(plain_loop(envs, traits), pool, num_envs), seconds))
        with stepping([constructor] * num_envs, pool, traits.rules, STEP, backend="serial") as run:
            rounds[SERIAL].append(_rate_once_warm(run, seconds))
        rounds[WORKERS].append(turns(shape, [way]).rates[way])
    return rounds


def _rate_once_warm(run: Run, seconds: float) -> float:
    rate(run, seconds / 4)  # the first steps are slower than all others
    return rate(run, seconds)


# -- what is shown -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """What was measured, and what is proposed.

    Attributes:
        environment: As it was named.
        env_kwargs: Its keywords.
        machine: What it was measured on.
        limit: Bytes of memory for all processes; None for no limit.
        trials: All that was measured.
        best: The fastest setting within the limit.
        in_turns: Environment steps per second of the plain loop, `backend="serial"` and the best setting, measured in
            turns; see `compare`.
    """

    environment: str
    env_kwargs: dict[str, Any]
    machine: dict[str, Any]
    limit: int | None
    trials: list[Trial]
    best: Trial
    in_turns: dict[str, list[float]]

    @property
    def medians(self) -> dict[str, float]:
        """Environment steps per second of the plain loop, `backend="serial"` and the best setting."""
        return {name: statistics.median(rounds) for name, rounds in self.in_turns.items()}

    @property
    def pays_off(self) -> bool:
        """Whether the best setting is faster than a plain loop."""
        return self.medians[WORKERS] > self.medians[PLAIN_LOOP]

    @property
    def advice(self) -> str:
        """One sentence: whether to use workers."""
        rates = self.medians
        if self.pays_off:
            return f"{rates[WORKERS] / rates[PLAIN_LOOP]:.2f} times the speed of a plain loop."
        faster = "a plain loop or backend='serial' is" if rates[SERIAL] > rates[WORKERS] else "a plain loop is"
        return (
            f"Do not parallelise this simulator: {faster} faster. A plain loop takes {rates[PLAIN_LOOP]:,.0f} steps/s, "
            f"backend='serial' {rates[SERIAL]:,.0f}, the fastest number of workers {rates[WORKERS]:,.0f}."
        )

    @property
    def ranked(self) -> list[Trial]:
        """The fastest first, those that do not keep within the limit last."""
        return sorted(self.trials, key=lambda trial: (not trial.fits, -trial.steps_per_second))

    @property
    def code(self) -> str:
        """The line to paste, and how to step the environments it makes."""
        shape, way = self.best.setting
        how = f"num_workers={shape.workers}" if self.pays_off else 'backend="serial"'
        arguments = [f'"{_importable(self.environment)}"', f"num_envs={shape.num_envs}", how]
        if self.env_kwargs:
            arguments.insert(2, f"env_kwargs={self.env_kwargs!r}")
        line = f"env = marl_parallel.make({', '.join(arguments)})"
        if self.pays_off and way == ASYNC:
            some = max(1, shape.num_envs // 2)
            line += f"\n# env.reset_async(); then again and again env.recv(min_envs={some}), and env.send to who came"
        return line

    def as_json(self) -> dict[str, Any]:
        """Everything, in what JSON knows."""
        return {
            "environment": self.environment,
            "env_kwargs": self.env_kwargs,
            "machine": self.machine,
            "memory_limit": self.limit,
            "best": _as_json(self.best),
            "plain_loop": self.medians[PLAIN_LOOP],
            "serial": self.medians[SERIAL],
            "pays_off": self.pays_off,
            "advice": self.advice,
            "code": self.code,
            "trials": [_as_json(trial) for trial in self.ranked],
        }


def _as_json(trial: Trial) -> dict[str, Any]:
    shape, way = trial.setting
    return {
        "num_workers": shape.workers,
        "envs_per_worker": shape.envs_per_worker,
        "num_envs": shape.num_envs,
        "way": way,
        "steps_per_second": trial.steps_per_second,
        "memory": trial.memory,
        "fits": trial.fits,
        "rounds": trial.rounds,
    }


def _importable(target: str) -> str:
    """A file by its module's name: what is pasted is to run beside it.

    Example:
        >>> _importable("path/to/simulators.py:make_env"), _importable("mpe2.simple_spread_v3")
        ('simulators:make_env', 'mpe2.simple_spread_v3')
    """
    path, colon, attribute = target.partition(":")
    return f"{Path(path).stem}{colon}{attribute}" if path.endswith(".py") else target


def show(found: Tuning) -> None:
    """Print the settings, the fastest first, the advice and the line to paste."""
    console = Console()
    table = Table(
        title=escape(found.environment),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("workers", "in each", "envs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for heading in ("steps/s", "± %", "rounds", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for trial in found.ranked:
        shape, way = trial.setting
        table.add_row(
            f"{shape.workers}",
            f"{shape.envs_per_worker}",
            f"{shape.num_envs}",
            {STEP: "step", ASYNC: "send, recv"}[way],
            f"{trial.steps_per_second:,.0f}",
            f"{100 * spread(trial.rounds):.0f}" if len(trial.rounds) > 1 else "",
            f"{len(trial.rounds)}",
            "" if trial.memory is None else in_size(trial.memory),
            _remark(found, trial),
            style="bold green" if trial is found.best else None if trial.fits else "dim",
        )
    for name in (SERIAL, PLAIN_LOOP):
        rounds = found.in_turns[name]
        num_envs = f"{found.best.setting.shape.envs_per_worker}"
        speed = f"{found.medians[name]:,.0f}", f"{100 * spread(rounds):.0f}"
        table.add_row("", "", num_envs, name, *speed, f"{len(rounds)}", "", "")
    console.print(table)
    console.print(f"[dim]{escape(in_one_line(found.machine))}", highlight=False)
    console.print(f"\n{found.advice}", style=None if found.pays_off else "bold yellow", markup=False, highlight=False)
    console.print(f"{found.code}", markup=False, highlight=False, soft_wrap=True)


def _remark(found: Tuning, trial: Trial) -> str:
    if trial is found.best:
        return "proposed" if found.pays_off else "fastest"
    return "" if trial.fits else "too large"
