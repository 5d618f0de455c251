"""The statistics of episodes, from the results that the caller has received. It shares no code with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ALL = "__all__"
Finished = tuple[int, dict[str, float], dict[str, int], int, bool, bool]


@dataclass(eq=False)
class Episodes:
    """The running episode of one environment."""

    env_id: int
    mode: str
    returns: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    over: bool = False  # whether it has ended, and the next one has not begun

    def add(self, request: str, dicts: Sequence[Any]) -> list[Finished]:
        """Add a result; returns the episode that it has ended, in the form of a `FinishedEpisode`."""
        if request == "reset":
            self._begin()
            return []
        _, rewards, terminateds, truncateds, _ = dicts
        terminated, truncated = terminateds[ALL], truncateds[ALL]
        was_over, is_over = self.over, terminated or truncated
        if was_over and is_over:
            return []
        if was_over:
            self._begin()
            if self.mode == "NEXT_STEP":  # a step that only resets
                return []
        self.steps += 1
        ended = [agent for flags in (terminateds, truncateds) for agent, flag in flags.items() if flag and agent != ALL]
        for agent in {**rewards, **dict.fromkeys(ended)}:
            self.returns[agent] += rewards.get(agent, 0.0)
            self.lengths[agent] += 1
        if not is_over:
            return []
        finished = self.env_id, dict(self.returns), dict(self.lengths), self.steps, bool(terminated), bool(truncated)
        self._begin()
        self.over = self.mode != "SAME_STEP"
        return [finished]

    def _begin(self) -> None:
        self.returns, self.lengths, self.steps, self.over = Counter(), Counter(), 0, False
