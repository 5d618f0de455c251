"""AEC environments as Tianshou's multi-agent algorithms step them, and Tianshou's own wrapper of such environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from marl_parallel.adapters.attributes import AgentID, declared_or_none, find, layers, method, owns, type_name
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv, is_tianshous
from marl_parallel.adapters.protocol import ALL, Dicts, NotAnEnvironment


class TianshouEnv(PettingZooEnv):
    """An AEC environment, stepped as by Tianshou's `PettingZooEnv`: one step is one turn.

    Each reset and step observes one agent: the one whose turn it is. The episode is over when it is the turn of an
    agent that has ended, even if others have not: Tianshou's collectors then reset the environment.

    Args:
        source: An AEC environment, or a `tianshou.env.PettingZooEnv` of one, which is only unwrapped.

    Raises:
        NotAnEnvironment: The environment is not an AEC environment, or its class changes how `PettingZooEnv` steps.
    """

    kind: ClassVar[str] = "A PettingZoo AEC environment"
    names: ClassVar[frozenset[str]] = frozenset({"tianshou"})
    observes_turn: ClassVar[bool] = True

    def __init__(self, source: Any) -> None:
        aec = source.env if is_tianshous(source) else source
        if method(aec, "last") is None or method(aec, "observe") is None:
            agents = declared_or_none(aec, "possible_agents")
            whose = f", whose agents {agents} act at the same time" if agents else ""
            raise NotAnEnvironment(
                'adapter="tianshou" needs an AEC environment, in which one agent acts at a time, with the methods '
                f"`observe` and `last`; got {type_name(aec)}{whose}. Return an AEC environment, such as `env` of the "
                "module instead of `parallel_env`, or convert this one with pettingzoo.utils.parallel_to_aec"
            )
        for name in ("reset", "step") if is_tianshous(source) else ():
            definer = next(base for base in type(source).__mro__ if name in vars(base))
            if not definer.__module__.startswith("tianshou."):
                raise NotAnEnvironment(
                    f"{type_name(source)} overrides `{name}` of Tianshou's PettingZooEnv, which is not called here: do "
                    "so in a wrapper of the environment beneath, such as a pettingzoo.utils.BaseWrapper"
                )
        super().__init__(aec)
        self.source = source
        self._layers = [*layers(self._simulator)]

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        self._reset(keywords)
        observation, *_, info = self._simulator.last()
        agent = self._read("agent_selection")
        return {agent: observation}, {agent: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        self._simulator.step(actions[self._read("agent_selection")])
        observation, _, terminated, truncated, info = self._simulator.last()
        agent, rewards = self._read("agent_selection"), {**self._read("rewards")}
        terminateds, truncateds = {**self._read("terminations")}, {**self._read("truncations")}
        terminateds[ALL], truncateds[ALL] = terminated, truncated
        return {agent: observation}, rewards, terminateds, truncateds, {agent: info}

    def agents_left(self) -> Sequence[AgentID]:
        agents: Sequence[AgentID] = self._read("agents")
        return agents

    def turn(self) -> AgentID | None:
        return self._read("agent_selection") if self.agents_left() else None

    def alive(self) -> Sequence[AgentID]:
        left, flags = self.agents_left(), (self._read("terminations"), self._read("truncations"))
        ended = {agent for by_agent in flags for agent, flag in by_agent.items() if flag}
        return [agent for agent in self.possible_agents if agent in left and agent not in ended]

    def _read(self, name: str) -> Any:
        """An attribute of the outermost layer that has it now: wrappers forward it slowly, and may set it later."""
        return getattr(next((layer for layer in self._layers if owns(layer, name)), self._simulator), name)

    def state(self) -> Any:
        return find(self._simulator, "state")()
