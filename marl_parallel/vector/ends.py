"""Whom facades with a place for everybody tell of an end: what the core says of agents and of copies, brought together.

Whether an episode is over is decided in the core. Here is known only that an end of a copy is the end of those in it
who were not told of one of their own, and that nobody has two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.arrays import Arrays
from marl_parallel.core.transition import FINAL_OBS

Flags: TypeAlias = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Terminations and truncations, `(copies, agents)`."""


class Deaths:
    """Who has died in the present episode of its copy, where every agent of every copy has a row.

    A row is told of an end when its agent dies, and once more when its copy's episode ends, whatever a simulator says
    of the dead in between.

    Args:
        copies: How many.
        agents: How many have rows.

    Attributes:
        dead: `(copies, agents)`, bool.
        any: Whether anybody has.
    """

    def __init__(self, copies: int, agents: int) -> None:
        self.dead = np.zeros((copies, agents), np.bool_)
        self.any = False

    def forget(self, env_ids: Sequence[int] | None = None) -> None:
        """Note that these copies have been reset; None for all."""
        self.dead[slice(None) if env_ids is None else [*env_ids]] = False
        self.any = bool(self.dead.any())

    def told(self, flags: Flags, arrays: Arrays) -> Flags:
        """The flags that rows are told, and note who has died.

        Args:
            flags: Of those who have rows, as the core has them.
            arrays: What else it says.
        """
        terminations, truncations = flags
        over = (arrays.terminated | arrays.truncated)[:, None]
        flagged = terminations | truncations
        if not self.any and not np.count_nonzero(flagged != over):
            return flags  # each ends with its copy, or nobody does
        died = flagged & ~self.dead
        with_copy = over & ~died
        self.dead = (self.dead | died) & ~over
        self.any = bool(self.dead.any())
        return (
            (terminations & died) | (with_copy & arrays.terminated[:, None]),
            (truncations & died) | (with_copy & arrays.truncated[:, None]),
        )


def took_part(arrays: Arrays, agents: Sequence[AgentID], *, same_step: bool) -> NDArray[np.bool_]:
    """Who took part in a step: `(copies, agents)`.

    Args:
        arrays: What came of it.
        agents: All.
        same_step: Whether what is observed of a copy whose episode is over is the next one's.
    """
    there = arrays.rewarded | arrays.terminations | arrays.truncations
    if not same_step:
        return there | arrays.observed
    over = arrays.terminated | arrays.truncated
    there |= arrays.observed & ~over[:, None]
    for env_id in np.flatnonzero(over).tolist():
        infos = arrays.infos.get(env_id, {})
        for place, agent in enumerate(agents):
            own = infos.get(agent)
            there[env_id, place] |= isinstance(own, Mapping) and FINAL_OBS in own
    return there


def handed_down(arrays: Arrays, whom: NDArray[np.bool_]) -> Flags:
    """The agents' flags; where these have none of their own, their copy's."""
    unflagged = whom & ~(arrays.terminations | arrays.truncations)
    return (
        arrays.terminations | (unflagged & arrays.terminated[:, None]),
        arrays.truncations | (unflagged & arrays.truncated[:, None]),
    )
