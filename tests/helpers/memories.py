"""Whose hidden state begins anew, from the dicts of a plain loop alone; it shares no code with the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from helpers.reference import Reference


class Memory:
    """Whose hidden state begins anew in one environment, from dicts alone: an agent remembers since its first sight.

    Args:
        mode: The auto-reset mode.
        left: With PettingZoo's rules, returns the agents that the simulator lists; an agent that is observed after its
            end has come back only if it is one of them.
    """

    def __init__(self, mode: str, left: Callable[[], Iterable[str]] | None = None) -> None:
        self.mode, self.left, self.over = mode, left, False

    def reset(self, observations: Mapping[str, Any]) -> set[str]:
        self.remember, self.ended, self.over = {*observations}, set[str](), False
        return {*observations}

    def step(
        self,
        observations: Mapping[str, Any],
        terminateds: Mapping[str, Any],
        truncateds: Mapping[str, Any],
        infos: Mapping[str, Any],
    ) -> set[str]:
        if self.over and self.mode == "NEXT_STEP":
            return self.reset(observations)
        self.over = bool(terminateds["__all__"] or truncateds["__all__"])
        if self.over and self.mode == "SAME_STEP":
            return self.reset(observations)
        if self.over and infos.get("__common__", {}).get("restarted"):  # the last observations once more
            return set()
        begins = set()
        for agent in observations:
            flagged = bool(terminateds.get(agent) or truncateds.get(agent))
            if agent in self.remember:
                continue
            if agent in self.ended and (flagged or (self.left is not None and agent not in self.left())):
                continue
            begins.add(agent)
            self.ended.discard(agent)
        self.remember |= begins
        for flags in (terminateds, truncateds):
            ended = {agent for agent, flag in flags.items() if flag and agent != "__all__"}
            self.ended |= ended
            self.remember -= ended
        return begins


def memories(loop: Any, mode: str) -> list[Memory]:
    if not isinstance(loop, Reference):
        return [Memory(mode) for _ in range(loop.num_envs)]
    return [
        Memory(mode, None if one.dict_rules else functools.partial(getattr, one.env, "agents")) for one in loop.copies
    ]
