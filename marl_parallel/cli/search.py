"""The search for the fastest way to step copies: which settings are measured, how often, and which is taken.

Successive halving: every setting is measured once, the better half twice more, the best quarter three times more, in
rounds in each of which all of them have their turn. Where the best lies at the edge of what was looked at, more is
looked at. What is measured, and how, comes from outside.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from marl_parallel.cli.failures import CommandError
from marl_parallel.cli.memory import in_size
from marl_parallel.cli.ways import ASYNC, STEP

RUNGS = ((1.0, 1), (0.5, 2), (0.25, 3))
"""Of each rung, which share of all settings is measured, and in how many rounds."""

FINALISTS = 3
"""So many settings are measured in the last rung, or more."""

AS_GOOD = 0.02
"""Of the finalists, who is slower by this share or less is as good: then the smallest is taken."""

_WORTH_MORE = 1.05
"""How many times better than all others the settings at an edge must be, for more to be looked at."""


class Shape(NamedTuple):
    """How many workers, and how many copies in each."""

    workers: int
    envs_per_worker: int

    @property
    def num_envs(self) -> int:
        """All copies."""
        return self.workers * self.envs_per_worker

    def exceeds(self, other: Shape) -> bool:
        """Whether it has as many of both, and more of one."""
        return self != other and self.workers >= other.workers and self.envs_per_worker >= other.envs_per_worker


class Setting(NamedTuple):
    """A shape, and whether it is stepped by `step` or by `send` and `recv`."""

    shape: Shape
    way: str


class Turn(NamedTuple):
    """What was measured in a turn.

    Attributes:
        rates: Environment steps per second, by way.
        memory: Bytes that all of its processes used; None where that cannot be told.
    """

    rates: Mapping[str, float]
    memory: int | None


@dataclass
class Trial:
    """What a setting achieved.

    Attributes:
        setting: Which.
        rounds: Environment steps per second in each round.
        memory: The most bytes that all of its processes used in any round; None where that cannot be told.
        fits: Whether that is within the limit.
    """

    setting: Setting
    rounds: list[float] = field(default_factory=list)
    memory: int | None = None
    fits: bool = True

    @property
    def steps_per_second(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


class Axes(NamedTuple):
    """What is tried.

    Attributes:
        workers: Numbers of workers.
        envs_per_worker: Numbers of copies in each.
        ways: `STEP`, `ASYNC`.
        most_envs: How many copies there may be at most; shapes with more are left out.
        grow: Whether more than the most is tried where the most is best.
    """

    workers: Sequence[int]
    envs_per_worker: Sequence[int]
    ways: Sequence[str] = (STEP, ASYNC)
    most_envs: int = 2**31
    grow: bool = False

    def shapes(self) -> list[Shape]:
        """All of them."""
        every = (Shape(*numbers) for numbers in itertools.product(self.workers, self.envs_per_worker))
        return sorted({one for one in every if one.num_envs <= self.most_envs})


class Search:
    """Looks for the fastest setting that keeps within a limit of memory.

    Args:
        axes: What to try.
        measure: Measures a shape in some ways.
        limit: Bytes that all processes may use; None for no limit.

    Attributes:
        trials: What has been measured, by setting.
    """

    def __init__(self, axes: Axes, measure: Callable[[Shape, Sequence[str]], Turn], limit: int | None = None) -> None:
        self._axes, self._measure, self._limit = axes, measure, limit
        self.trials: dict[Setting, Trial] = {}

    def most_turns(self) -> int:
        """How often shapes are measured at most, as far as is known: more axes may come to be looked at."""
        settings = self._settings(self._axes)
        shapes = len({setting.shape for setting in settings})
        later = sum(rounds * min(self._kept_of(share, len(settings)), shapes) for share, rounds in RUNGS[1:])
        return RUNGS[0][1] * shapes + later

    @staticmethod
    def _kept_of(share: float, settings: int) -> int:
        """How many settings are kept for a rung."""
        return min(max(FINALISTS, math.ceil(share * settings)), settings)

    @staticmethod
    def _settings(axes: Axes) -> list[Setting]:
        every = [Setting(shape, way) for shape in axes.shapes() for way in axes.ways]
        return [one for one in every if one.way == STEP or one.shape.num_envs > 1]

    def run(self) -> Trial:
        """Measure, and return the best.

        Raises:
            CommandError: Nothing keeps within the limit, or there is nothing to try.
        """
        self._explore()
        kept = everything = self._fitting()
        for share, rounds in RUNGS[1:]:
            most = self._kept_of(share, len(everything))
            kept = sorted(kept, key=lambda trial: -trial.steps_per_second)[:most]
            for _ in range(rounds):
                self._round(trial.setting for trial in kept)
        # Memory may have been exceeded in a later round only.
        return self._smallest([trial for trial in kept if trial.fits] or self._fitting())

    @staticmethod
    def _smallest(trials: Sequence[Trial]) -> Trial:
        enough = (1 - AS_GOOD) * max(trial.steps_per_second for trial in trials)
        as_good = [trial for trial in trials if trial.steps_per_second >= enough]
        return min(
            as_good, key=lambda trial: (trial.setting.shape.num_envs, trial.setting.shape, trial.setting.way != STEP)
        )

    def _fitting(self) -> list[Trial]:
        fitting = [trial for trial in self.trials.values() if trial.fits]
        if not fitting:
            if not self.trials:
                raise CommandError("there is nothing to try", "allow more with --max-envs")
            least = min(trial.memory or 0 for trial in self.trials.values())
            raise CommandError(
                f"nothing keeps within --memory: the least that was tried uses {in_size(least)}",
                "allow more, or try fewer copies with --workers and --envs-per-worker",
            )
        return fitting

    def _explore(self) -> None:
        """Measure everything once, and what lies beyond an edge while that is where the best is."""
        axes: Axes | None = self._axes
        while axes is not None:
            self._axes = axes
            self._round(one for one in self._settings(axes) if one not in self.trials)
            axes = self._grown(axes)

    def _grown(self, axes: Axes) -> Axes | None:
        """The axes with one of them longer, if that may be worth it."""
        if not axes.grow:
            return None
        longer = [
            axes._replace(workers=[*axes.workers, 2 * max(axes.workers)]),
            axes._replace(envs_per_worker=[*axes.envs_per_worker, 2 * max(axes.envs_per_worker)]),
        ]
        for place, grown in enumerate(longer):
            edge = max(shape[place] for shape in axes.shapes())
            inside, outside = (
                max(
                    (t.steps_per_second for t in self._fitting() if (t.setting.shape[place] == edge) is at_edge),
                    default=0,
                )
                for at_edge in (False, True)
            )
            if outside > _WORTH_MORE * inside and grown.shapes() != axes.shapes():
                return grown
        return None

    def _round(self, settings: Iterable[Setting]) -> None:
        """Measure each once, the smallest first; ways of the same shape with the same processes."""
        in_order = sorted(settings, key=lambda setting: (setting.shape.num_envs, setting))
        for shape, group in itertools.groupby(in_order, key=lambda setting: setting.shape):
            if any(shape.exceeds(trial.setting.shape) for trial in self.trials.values() if not trial.fits):
                continue
            ways = [setting.way for setting in group]
            rates, memory = self._measure(shape, ways)
            for way in ways:
                trial = self.trials.setdefault(Setting(shape, way), Trial(Setting(shape, way)))
                trial.rounds.append(rates[way])
                if memory is not None:
                    trial.memory = max(memory, trial.memory or 0)
                    trial.fits = trial.fits and (self._limit is None or memory <= self._limit)
