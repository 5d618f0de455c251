"""AEC environments as Tianshou's multi-agent algorithms step them, and Tianshou's own wrapper of such environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from marl_parallel.adapters.attributes import AgentID, declared_or_none, find, is_a, method, type_name
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv
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
            raise NotAnEnvironment(
                'adapter="tianshou" needs an AEC environment, in which one agent acts at a time; in '
                f"{type_name(aec)}, the agents {agents} act at the same time. Return an AEC environment, such as `env` "
                "of the module instead of `parallel_env`, or convert this one with pettingzoo.utils.parallel_to_aec"
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

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        self._reset(keywords)
        observation, *_, info = self._simulator.last()
        agent = self._simulator.agent_selection
        return {agent: observation}, {agent: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        env = self._simulator
        env.step(actions[env.agent_selection])
        observation, _, terminated, truncated, info = env.last()
        agent = env.agent_selection
        terminateds, truncateds = {**env.terminations, ALL: terminated}, {**env.truncations, ALL: truncated}
        return {agent: observation}, {**env.rewards}, terminateds, truncateds, {agent: info}

    def turn(self) -> AgentID | None:
        return self._simulator.agent_selection if self.agents_left() else None

    def alive(self) -> Sequence[AgentID]:
        env = self._simulator
        ended = {agent for flags in (env.terminations, env.truncations) for agent, flag in flags.items() if flag}
        return [agent for agent in self.possible_agents if agent in env.agents and agent not in ended]

    def state(self) -> Any:
        return find(self._simulator, "state")()


def is_tianshous(source: Any) -> bool:
    """Whether an environment is Tianshou's wrapper: an `AECEnv` that returns other observations and rewards."""
    return is_a(source, "tianshou.env", "PettingZooEnv")
