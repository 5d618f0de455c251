"""Warnings about environments that were meant to differ by their seed but are alike.

Only environments whose constructors got no seed are looked at. There are two signs:

- Environments that declare their seed (`env.unwrapped.seed` is an integer) declare the same one. Where `reset` takes a
  seed, they must still do so after the first reset, or their first observations must be equal.
- The first observations of all environments are equal. This counts only where the seed reached nobody: the constructor
  has a bare `**kwargs`, so it could take a seed that it was not offered, and `reset` takes none. Games such as chess
  begin alike with any seed, and there `reset` takes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from marl_parallel.core.messages import Built
from marl_parallel.core.pickling import dumps

_WHAT_TO_DO = (
    "A constructor gets the seed only where its signature names it. What to do: name it and pass it on, such as "
    "`lambda seed: make_env(seed=seed)`."
)


class SeedCheck:
    """Looks at environments until it is known whether they are alike.

    Args:
        built: The replies of the workers, by environment.
        reset_takes_seed: Whether the environments' `reset` takes a seed.

    Attributes:
        declared: The seeds that environments without a seed of ours declared when they were built.
        asks_again: Whether to ask for the declared seeds after the first reset, which may have changed them.
        unreached: Whether the seed reached nobody, so that equal first observations are a sign by themselves.
    """

    def __init__(self, built: Mapping[int, Built], reset_takes_seed: bool) -> None:
        unseeded = [env_id for env_id, one in built.items() if not one.seeded]
        self.declared = {env_id: seed for env_id in unseeded if (seed := built[env_id].declared_seed) is not None}
        self._alike = alike = _alike(self.declared)
        self.asks_again = bool(alike) and reset_takes_seed
        self.unreached = (
            len(built) > 1 and not reset_takes_seed and all(one.open and not one.seeded for one in built.values())
        )
        self.first_warning = _same_seed(alike, self.declared) if alike and not reset_takes_seed else None
        self._num_envs = len(built)
        self._first: dict[int, bytes] = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to look at."""
        return not (self.asks_again or self.unreached) or self.first_warning is not None

    def note(self, env_id: int, observations: Mapping[Any, Any]) -> None:
        """Keep the first observations of an environment."""
        if env_id not in self._first:
            self._first[env_id] = dumps(observations) if observations else b""

    def warning(self, given: Sequence[int], declared: Mapping[int, int] | None) -> str | None:
        """The text of a warning when all environments have been reset once; None where they differ.

        Args:
            given: The seed that each environment was given.
            declared: The seeds that environments declare now, where they were asked.
        """
        if declared is not None:
            mine = {env_id: declared[env_id] for env_id in self.declared}
            alike = _alike(mine)
            if _differ(alike, given):
                return _same_seed(alike, mine)
            if _differ(self._alike, given) and self._begin_alike(self._alike):
                return _same_seed(self._alike, self.declared, " when they were made")
        everyone = range(self._num_envs)
        if self.unreached and _differ(everyone, given) and self._begin_alike(everyone):
            return (
                f"the first observations of all {self._num_envs} environments are equal, and their seeds reached "
                f"neither their constructors nor `reset`, which takes no seed. {_WHAT_TO_DO} If the simulator is "
                "deterministic, ignore this warning."
            )
        return None

    def _begin_alike(self, env_ids: Sequence[int]) -> bool:
        """Whether the first observations of these environments are equal, and there are any."""
        first = {self._first.get(env_id, b"") for env_id in env_ids}
        return len(first) == 1 and b"" not in first


def _differ(env_ids: Sequence[int], given: Sequence[int]) -> bool:
    """Whether these environments were given different seeds."""
    return len({given[env_id] for env_id in env_ids}) > 1


def _alike(declared: Mapping[int, int]) -> list[int]:
    """The environments that share the seed they declare with another one."""
    count = Counter(declared.values())
    return [env_id for env_id, seed in declared.items() if count[seed] > 1]


def _same_seed(alike: Sequence[int], declared: Mapping[int, int], when: str = "") -> str:
    seeds = sorted({declared[env_id] for env_id in alike})
    return (
        f"environments {[*alike]} declare the same seed{when}, {', '.join(map(str, seeds))}, although they were "
        f"given different ones; their constructors got none, so they may be identical. {_WHAT_TO_DO}"
    )
