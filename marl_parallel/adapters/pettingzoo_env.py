"""PettingZoo's environments: parallel ones, and AEC ones through PettingZoo's own conversions to parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from gymnasium import Space
from pettingzoo.utils import conversions  # type: ignore[import-untyped]

from marl_parallel.adapters.attributes import (
    AgentID,
    LookupFailed,
    NotAnEnvironment,
    declared,
    declared_or_none,
    defines,
    is_a,
    layers,
    owns,
    spaces_by_agent,
    spaces_of,
    type_name,
)
from marl_parallel.adapters.protocol import Adapter, Dicts, Rules


class PettingZooEnv(Adapter):
    """A PettingZoo environment in which all agents act at once."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A PettingZoo parallel environment"
    names: ClassVar[frozenset[str]] = frozenset({"pettingzoo"})

    def _found(self, look_up: Callable[..., Any], *args: Any) -> Any:
        try:
            return look_up(*args)
        except LookupFailed as failure:  # perhaps because `reset` makes what it needs
            try:
                self._reset({})
            except Exception:
                raise failure from failure.__cause__
            return look_up(*args)

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        agents, name = self.possible_agents, f"{what}_space"
        base = getattr(self.source, "unwrapped", None)
        for layer in layers(self.source):
            if defines(layer, name):  # PettingZoo's wrappers and base classes only forward
                declaration = declared(layer, name)
                if callable(declaration):
                    return spaces_of(agents, declaration, name)
            elif layer is base:  # whose method, from PettingZoo, would warn and return an entry of this dict
                declaration = declared(layer, f"{name}s")
            else:
                continue
            if by_agent := spaces_by_agent(declaration):
                return spaces_of(agents, by_agent.get)
        if all(layer is not base for layer in layers(self.source)):  # the source may forward to what is no layer
            declaration = declared(self.source, name)
            if callable(declaration):
                return spaces_of(agents, declaration, name)
            if by_agent := spaces_by_agent(declaration):
                return spaces_of(agents, by_agent.get)
        declaration = declared(self.source if base is None else base, f"{name}s")
        return spaces_of(agents, spaces_by_agent(declaration).get)

    def agents_left(self) -> Sequence[AgentID] | None:
        agents: Sequence[AgentID] | None = getattr(self._simulator, "agents", None)
        return agents


class ParallelizableAECEnv(PettingZooEnv):
    """An AEC environment whose agents act in a fixed cycle, so that one step is one cycle."""

    kind: ClassVar[str] = "A PettingZoo AEC environment"
    names: ClassVar[frozenset[str]] = frozenset({"aec"})
    methods: ClassVar[tuple[str, ...]] = ("reset", "step", "observe", "last")

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._simulator = conversions.aec_to_parallel(source)
        self._set_required()


class TurnBasedAECEnv(PettingZooEnv):
    """An AEC environment in which one step is the turn of one agent."""

    kind: ClassVar[str] = ParallelizableAECEnv.kind
    names: ClassVar[frozenset[str]] = ParallelizableAECEnv.names
    methods: ClassVar[tuple[str, ...]] = ParallelizableAECEnv.methods

    def __init__(self, source: Any) -> None:
        _check_not_tianshous(source)
        super().__init__(source)
        self._simulator = conversions.turn_based_aec_to_parallel(source)
        self._set_required()
        self._selects: Any = None  # the wrapper or simulator that tells whose turn it is; the others forward it slowly

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        observations, infos = super().reset(**keywords)
        if self._selects is None:
            self._selects = next((one for one in layers(self.source) if owns(one, "agent_selection")), self.source)
        # PettingZoo's conversion reports whose turn it is with every step, but not with the reset.
        turn, agents = {"active_agent": self.turn()}, {*self._simulator.agents}
        return observations, {key: {**info, **turn} if key in agents else info for key, info in infos.items()}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        # When no agent is left, PettingZoo's conversion returns four dicts.
        return super().step(actions) if self._simulator.agents else ({}, {}, {}, {}, {})

    def turn(self) -> AgentID | None:
        return self._selects.agent_selection if self.agents_left() else None


def is_tianshous(source: Any) -> bool:
    """Whether an environment is Tianshou's wrapper: an `AECEnv`, but its reset and step return values."""
    return is_a(source, "tianshou.env", "PettingZooEnv")


def _check_not_tianshous(source: Any) -> None:
    if is_tianshous(source):
        raise NotAnEnvironment(
            f"{type_name(source)} is Tianshou's wrapper of an AEC environment for its multi-agent algorithms, whose "
            "reset and step differ from PettingZoo's. For these algorithms, leave adapter= out; for everything else, "
            "return the environment without this wrapper"
        )


def adapt_aec(env: Any) -> PettingZooEnv:
    """Adapt an AEC environment: one step is a cycle if its metadata has `is_parallelizable`, else a turn."""
    _check_not_tianshous(env)
    metadata = declared_or_none(env, "metadata")
    parallelizable = isinstance(metadata, Mapping) and metadata.get("is_parallelizable", False)
    return ParallelizableAECEnv(env) if parallelizable else TurnBasedAECEnv(env)
