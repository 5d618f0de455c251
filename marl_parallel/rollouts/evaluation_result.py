"""`EvaluationResult`: what `evaluate` returns, with statistics over its episodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.spaces import tree_map

_RESAMPLES, _BOOTSTRAP_SEED, _CONFIDENCE = 2000, 0, 0.95
_TRIMMED = 0.25  # the share of the lowest, and of the highest values, that an interquartile mean leaves out
_PER_EPISODE = frozenset({
    "team_returns", "returns", "lengths", "policies", "infos", "informed", "retries", "finished", "failed",
    "constructors"
})  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class EvaluationResult:
    """The episodes of an `evaluate`, E in all, and statistics of those that were played to their end.

    Statistics are of `team_returns`, where `finished`. They are NaN without such episodes. For vector rewards,
    `team_returns` is `(E, num_objectives)`, and each statistic has one value for each objective.

    Attributes:
        seeds: The seed of each episode.
        team_returns: float64 `(E,)`: the sums of the returns of all agents. NaN for episodes that are not `finished`,
            and where agents have vectors of different lengths.
        returns: By agent, float64 `(E,)`: the sum of its rewards, over all its lives. NaN if the episode is not
            `finished`, or the agent took no part in it.
        lengths: int64 `(E,)`: steps; of the last try of an episode that is not `finished`.
        infos: By name, the last value of the episode, as declared: `(E, *shape)` with `per_agent=False`, else a dict by
            agent of such arrays. Zeros where there is no value, as in episodes that have `failed`.
        informed: By name, in the form of `infos`, bool `(E,)`: which entries of `infos` have a value.
        retries: int64 `(E,)`: how often the episode was played again after a restart of its environment.
        finished: bool `(E,)`: the episodes that were played to their end.
        failed: bool `(E,)`: the episodes in which an environment was restarted in each try.
        constructors: int64 `(E,)`: for which of the different constructors the episode was played; all 0 if there is
            only one.
        env_ids: By constructor, its environments.
        repeats: Whether the simulator repeated its first episode. None if that is unknown: the episode failed.
        policies: By agent, the names of the `Policies` that acted for it, strings `(E,)`; None where the environment
            has no such agent. None as a whole if one policy was evaluated.

    Example:
        >>> import numpy as np
        >>> from marl_parallel import evaluate, make
        >>> env = make("mpe2.simple_spread_v3", 4, env_kwargs={"max_cycles": 5}, facade="stacked")
        >>> result = evaluate(env, lambda current: np.zeros(current.acting.shape, np.int64), episodes=6, seed=7)
        >>> env.close()
        >>> result.seeds, result.lengths.tolist(), result.returns["agent_0"].shape
        ((7, 8, 9, 10, 11, 12), [5, 5, 5, 5, 5, 5], (6,))
        >>> low, high = result.interval
        >>> bool(low < result.mean < high)
        True
        >>> sorted(result.rows()[0])[:4]
        ['constructor', 'failed', 'finished', 'length']
    """

    seeds: tuple[int, ...]
    team_returns: NDArray[np.float64]
    returns: Mapping[AgentID, NDArray[np.float64]]
    lengths: NDArray[np.int64]
    infos: Mapping[str, Any]
    informed: Mapping[str, Any]
    retries: NDArray[np.int64]
    finished: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    constructors: NDArray[np.int64]
    env_ids: tuple[tuple[int, ...], ...]
    repeats: bool | None
    policies: Mapping[AgentID, NDArray[Any]] | None = None

    @property
    def unfinished(self) -> NDArray[np.bool_]:
        """The episodes that `max_steps` has ended, bool `(E,)`."""
        return ~(self.finished | self.failed)

    @property
    def mean(self) -> Any:
        """The mean of the team returns: a number, or one for each objective."""
        return _number(_mean(self._counted))

    @property
    def std(self) -> Any:
        """The standard deviation of the team returns, divided by their number as `numpy.std` does."""
        return _number(np.sqrt(_mean((self._counted - _mean(self._counted)) ** 2)))

    @property
    def interquartile_mean(self) -> Any:
        """The mean of the team returns without the lowest and the highest quarter."""
        cut = int(_TRIMMED * len(self._counted))
        return _number(_mean(np.sort(self._counted, axis=0)[cut : len(self._counted) - cut]))

    @functools.cached_property
    def interval(self) -> tuple[Any, Any]:
        """The bounds of the 95 % interval of `mean`, by a percentile bootstrap over episodes with a fixed seed.

        The interval is about other episodes of the same policy. It does not say how other runs of the training vary.

        Reference: Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (2021),
        https://arxiv.org/abs/2108.13264.
        """
        values, n, rng = self._counted, len(self._counted), np.random.default_rng(_BOOTSTRAP_SEED)
        drawn = [_mean(values)[None]]
        if n:  # a part at a time, so that many episodes need little memory
            drawn = [values[rng.integers(n, size=(_RESAMPLES // 20, n))].mean(axis=1) for _ in range(20)]
        low, high = np.quantile(np.concatenate(drawn), [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2], axis=0)
        return _number(low), _number(high)

    @property
    def _counted(self) -> NDArray[np.float64]:
        return self.team_returns[self.finished]

    def of_constructor(self, number: int) -> EvaluationResult:
        """The result of the episodes of one constructor, see `constructors`."""
        if not 0 <= number < len(self.env_ids):
            raise ValueError(f"number must be from 0 to {len(self.env_ids) - 1}, got {number}")
        rows = np.flatnonzero(self.constructors == number)
        per_episode = {name: value for name, value in vars(self).items() if name in _PER_EPISODE}
        seeds = tuple(self.seeds[row] for row in rows.tolist())
        return replace(self, seeds=seeds, **tree_map(lambda array: array[rows], per_episode))

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each episode, for `pandas.DataFrame(result.rows())`.

        Keys are `"seed"`, `"constructor"`, `"finished"`, `"failed"`, `"retries"`, `"length"`, `"return"`, and
        `"return/agent_0"` for each agent; with `Policies`, also `"policy/agent_0"`. Values of infos have their names as
        keys, with the agent behind a slash, and are None where there is none. Vectors are lists.
        """
        rows: list[dict[str, Any]] = []
        for index, seed in enumerate(self.seeds):
            row: dict[str, Any] = {"seed": seed, "constructor": int(self.constructors[index])}
            row |= {name: getattr(self, name)[index].item() for name in ("finished", "failed", "retries")}
            row |= {"length": int(self.lengths[index]), "return": self.team_returns[index].tolist()}
            row |= {f"return/{agent}": of_agent[index].tolist() for agent, of_agent in self.returns.items()}
            row |= {f"policy/{agent}": names[index] for agent, names in (self.policies or {}).items()}
            for name, values in self.infos.items():
                of_agents = isinstance(values, Mapping)
                for agent, of_agent in values.items() if of_agents else [(None, values)]:
                    informed = self.informed[name][agent] if of_agents else self.informed[name]
                    key = f"{name}/{agent}" if of_agents else name
                    row[key] = of_agent[index].tolist() if informed[index] else None
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        left_out = {"unfinished": int(self.unfinished.sum()), "failed": int(self.failed.sum())}
        more = "".join(f", {number} {what}" for what, number in left_out.items() if number)
        return f"EvaluationResult({len(self.seeds)} episodes{more}, mean {self.mean}, 95 % interval {self.interval})"


def _number(value: Any) -> Any:
    """A float; an array for several objectives."""
    return value if np.ndim(value) else float(value)


def _mean(values: NDArray[np.float64]) -> Any:
    return values.mean(axis=0) if len(values) else np.full(values.shape[1:], np.nan)
