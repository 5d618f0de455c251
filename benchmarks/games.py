"""Games: of PettingZoo, whose agents take turns, with actions that are always legal; and MAgent2's battle.

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


def battle() -> Any:
    """162 agents, which observe 845 numbers each. With random moves, some 25 of them die in an episode."""
    from magent2.environments import battle_v4  # needs magent2

    return battle_v4.parallel_env(max_cycles=500)
