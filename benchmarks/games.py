"""Games of PettingZoo whose agents take turns, with actions that are always legal.

Illegal moves end the game, and benchmarks draw their actions before they know which ones are legal.
"""

from __future__ import annotations

from typing import Any

from pettingzoo.utils import BaseWrapper


class LegalMoves(BaseWrapper):
    """Replaces each action by a legal one, which the action and the legal ones decide."""

    def step(self, action: Any) -> None:
        if action is not None:
            legal = self.observe(self.agent_selection)["action_mask"].nonzero()[0]
            action = legal[action % len(legal)]
        super().step(action)


def connect_four() -> LegalMoves:
    from pettingzoo.classic import connect_four_v3

    return LegalMoves(connect_four_v3.env())


def texas_holdem() -> LegalMoves:
    from pettingzoo.classic import texas_holdem_v4  # needs rlcard

    return LegalMoves(texas_holdem_v4.env())
