"""The `MultiAgentEnv` protocol that every kind of simulator is adapted to, and what all adapters share.

The other modules here each adapt one kind of simulator. What the results of a step mean is decided in
`marl_parallel.core.episode`.
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeAlias

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import AgentID as AgentID
from marl_parallel.adapters.attributes import declared, declared_state_space, reset_keywords, type_name

Dicts: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]
"""Observations, rewards, terminateds, truncateds, infos."""

ALL, COMMON = "__all__", "__common__"
"""The key of the flags of the whole episode, and that of the infos of the environment rather than of an agent."""

_FIVE_DICTS = [dict] * 5
_RESERVED = {
    ALL: "the key of the flags of the whole episode",
    COMMON: "the key of the infos of the whole environment",
}
_EXPECTED = {
    "reset": (2, "two dicts keyed by agent, (observations, infos)"),
    "step": (5, "five dicts keyed by agent, (observations, rewards, terminateds, truncateds, infos)"),
}
_WRAPPER_MODULES = ("gymnasium.", "pettingzoo.", "shimmy.", "supersuit.")
_MOST_TYPES_SHOWN = 5

CHOICES = (
    'adapter="dict" (dicts keyed by agent), adapter="tuple" (sequences with one entry per agent), adapter="gymnasium" '
    '(one agent), adapter="pettingzoo", adapter="aec", or a function that makes a MultiAgentEnv of the simulator'
)


class NotAnEnvironment(TypeError):
    """A constructor returned something that cannot be reset and stepped, or not in the way asked for."""


class InvalidAgents(ValueError):
    """Two agents have the same name, or one has the name of a reserved key."""


class Misfit(TypeError):
    """The simulator cannot be called, or does not answer, as its adapter expects. A restart cannot change that."""


# -- the protocol ------------------------------------------------------------------------------------------------------


class Rules(Enum):
    """Which convention an environment follows: who says that an episode is over, and who must act."""

    DICT = "dict"
    """The environment says `__all__` itself and is given the caller's actions unchanged."""
    PETTINGZOO = "pettingzoo"
    """The episode is over when no agent is left, unless the environment says `__all__`; every acting agent must act,
    nobody else may."""


class MultiAgentEnv(ABC):
    """One simulator behind the interface that workers step.

    Attributes:
        rules: The convention it follows.
        seeded_when_made: Whether only its constructor takes a seed, so that a seed for `reset` is an error.
        options_last: Whether the options of a reset hold for all later episodes; a restarted environment is given them
            again.
        needs_all_actions: Whether every acting agent must be given an action under dict rules too.
        source: The simulator as its constructor returned it, where attributes and methods are looked up; by default the
            `MultiAgentEnv` itself.
        possible_agents: All agents that may appear, in the simulator's own order; empty where open-ended.
        observation_spaces: Of the agents that declare one, in the order of `possible_agents`; where these are
            open-ended, `GroupSpaces`.
        action_spaces: Likewise.
        reward_spaces: Of the agents whose rewards are vectors; empty if all rewards are numbers.
        state_space: Of the global state, None if there is none.
        metadata: The simulator's metadata (not copied).
        render_mode: The simulator's render mode.
        reset_keywords: Which of `seed` and `options` the simulator's `reset` takes.
    """

    rules: ClassVar[Rules]
    seeded_when_made: ClassVar[bool] = False
    options_last: ClassVar[bool] = False
    needs_all_actions: ClassVar[bool] = False
    source: Any
    possible_agents: list[AgentID]
    observation_spaces: Mapping[AgentID, Space[Any]]
    action_spaces: Mapping[AgentID, Space[Any]]
    reward_spaces: Mapping[AgentID, Space[Any]] = MappingProxyType({})
    state_space: Space[Any] | None
    metadata: Mapping[str, Any]
    render_mode: str | None
    reset_keywords: frozenset[str]

    @abstractmethod
    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        """Start an episode, with some of `reset_keywords`; returns the simulator's observations and infos."""

    @abstractmethod
    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step once; returns the simulator's five dicts, with `__all__` only if it knows itself when it is over."""

    @staticmethod  # noqa: B027  # most take any
    def check_options(options: Any) -> None:
        """Raise `ValueError` for options that `reset` cannot take; called before any environment is reset."""

    def agents_left(self) -> Sequence[AgentID] | None:
        """The agents that the simulator itself still lists; None if it keeps no such list."""
        return None

    def alive(self) -> Sequence[AgentID] | None:
        """The agents alive, if the adapter keeps count; None: all that have been seen and have not been flagged."""
        return None

    def turn(self) -> AgentID | None:
        """The only agent who may act next; None if all in the latest observation may."""
        return None

    @abstractmethod
    def render(self) -> Any:
        """One frame, in the form of the simulator's render mode."""

    @abstractmethod
    def state(self) -> Any:
        """The global state; only called if `state_space` is not None."""

    @abstractmethod
    def close(self) -> None:
        """Let the simulator free what it holds."""


@dataclass(frozen=True)
class Schema:
    """The description of an environment: the attributes of its `MultiAgentEnv` that hold for its whole life.

    It is made in the worker, pickled once and passed whole. Schemas of equal environments mostly pickle to the same
    bytes, so that nothing else has to be compared. Sets, which pickle in any order, are sorted tuples here.
    """

    possible_agents: list[AgentID]
    observation_spaces: Mapping[AgentID, Space[Any]]
    action_spaces: Mapping[AgentID, Space[Any]]
    state_space: Space[Any] | None = None
    reward_spaces: Mapping[AgentID, Space[Any]] = field(default_factory=dict)
    rules: Rules = Rules.DICT
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    reset_keywords: tuple[str, ...] = ()
    check_options: Callable[[Any], None] = MultiAgentEnv.check_options
    seeded_when_made: bool = False
    options_last: bool = False
    needs_all_actions: bool = False

    @classmethod
    def of(cls, env: MultiAgentEnv) -> Schema:
        """The schema of an environment as it is now."""
        own = {attribute.name: getattr(env, attribute.name) for attribute in fields(cls)}
        own["possible_agents"] = list(env.possible_agents)
        own["metadata"], own["reward_spaces"] = dict(env.metadata), dict(env.reward_spaces)
        own["reset_keywords"] = tuple(sorted(env.reset_keywords))
        return cls(**own)


class GroupSpaces(Mapping[AgentID, Space[Any]]):
    """The spaces of agents whose ids are not known beforehand, by the group that an agent belongs to.

    Its keys are the groups; the id of an agent is looked up as its group.

    Args:
        by_group: The space that all agents of a group have.
        group_of: The group of an agent; it must pickle.

    Example:
        >>> declared = GroupSpaces({"wolf": spaces.Discrete(5)}, lambda agent: agent.partition("_")[0])
        >>> declared["wolf_7"], [*declared], "sheep_1" in declared
        (Discrete(5), ['wolf'], False)
    """

    def __init__(self, by_group: Mapping[AgentID, Space[Any]], group_of: Callable[[Any], AgentID]) -> None:
        self._by_group, self._group_of = dict(by_group), group_of

    def __getitem__(self, key: AgentID) -> Space[Any]:
        found = self._by_group.get(key)
        return self._by_group[self._group_of(key)] if found is None else found

    def __iter__(self) -> Iterator[AgentID]:
        return iter(self._by_group)

    def __len__(self) -> int:
        return len(self._by_group)

    def as_space(self) -> spaces.Dict:
        """A `Dict` keyed by group, in which an agent's id is looked up as here."""
        return _SpacesByGroup(self)


class _SpacesByGroup(spaces.Dict):
    def __init__(self, declared: GroupSpaces) -> None:
        super().__init__([*declared.items()])  # type: ignore[list-item]
        self._declared = declared

    def __getitem__(self, key: Any) -> Space[Any]:
        return self._declared[key]


# -- names of agents ---------------------------------------------------------------------------------------------------


def check_agents(agents: Iterable[Any], kind: str) -> None:
    """Raise `InvalidAgents` where two agents are equal, one is a reserved key, or one cannot be the key of a dict.

    `kind` is what declares the agents, for the error.
    """
    place_of: dict[Any, tuple[int, Any]] = {}
    for place, agent in enumerate(agents):
        try:
            first, earlier = place_of.setdefault(agent, (place, agent))
        except TypeError:
            raise InvalidAgents(
                f"{kind} declares agent {place} as {agent!r}, which cannot be the key of a dict: agents are named by "
                "strings, numbers or tuples of them"
            ) from None
        if first != place:
            raise InvalidAgents(
                f"{kind} declares agents {first} and {place} as {earlier!r} and {agent!r}, which are the same key in a "
                "dict: every agent needs a name of its own in possible_agents"
            )
    for key, meaning in _RESERVED.items():
        if key in place_of:
            raise InvalidAgents(f"{kind} declares an agent named {key!r}, which is {meaning}: rename the agent")


def refuse_reserved(method: str, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> NoReturn:
    """Raise `InvalidAgents` for an agent that `method` returned under a reserved key."""
    key = next((key for key in _RESERVED if key in observations), ALL)
    what = "an observation" if key in observations else "a reward"
    raise InvalidAgents(
        f"`{method}` returned {what} of an agent named {key!r}, which is {_RESERVED[key]}: rename the agent, or leave "
        "the entry out"
    )


# -- what adapters share -----------------------------------------------------------------------------------------------


class Adapter(MultiAgentEnv):
    """A simulator with a `reset` and a `step` of its own, which return dicts keyed by agent if not overridden here.

    Subclasses set `possible_agents` and the spaces, and `_simulator` where a conversion of `source` is what is stepped.
    `kind` is the simulator's name in error messages, `methods` are the methods that it must have.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ("reset", "step")

    def __init__(self, source: Any) -> None:
        missing = [f"`{name}`" for name in self.methods if not callable(declared(source, name))]
        if missing:
            raise NotAnEnvironment(f"{self.kind} has no method {' and no method '.join(missing)}: {type_name(source)}")
        self.source = self._simulator = source
        metadata, render_mode = declared(source, "metadata"), declared(source, "render_mode")
        self.metadata = metadata if isinstance(metadata, Mapping) else {}
        self.render_mode = render_mode if isinstance(render_mode, str) else None
        self.state_space = declared_state_space(source)
        self.reset_keywords = reset_keywords(source.reset)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        observations, infos = self._dicts("reset", self._reset(keywords))
        return observations, infos

    def step(self, actions: dict[Any, Any]) -> Dicts:
        try:
            result: Dicts = self._simulator.step(actions)
        except TypeError as error:
            self._check_call(error, "step", actions)
            raise
        if type(result) is not tuple or [*map(type, result)] != _FIVE_DICTS:
            result = self._dicts("step", self._by_agent(result))
        return result

    def _by_agent(self, result: Any) -> Any:
        """The result of a step that is not five dicts, with what is one for all agents given to each of them."""
        return result

    def render(self) -> Any:
        return self.source.render()

    def state(self) -> Any:
        return declared(self.source, "state")()

    def close(self) -> None:
        close = declared(self.source, "close")
        if callable(close):
            close()

    def _reset(self, keywords: Mapping[str, Any]) -> Any:
        try:
            return self._simulator.reset(**keywords)
        except TypeError as error:
            self._check_call(error, "reset", **keywords)
            raise

    def _check_call(self, error: TypeError, method: str, *args: Any, **keywords: Any) -> None:
        """Raise `Misfit` if an error of the simulator's `reset` or `step` says that it does not take these arguments.

        The error then comes from the call itself, or from beneath a library's wrappers.
        """
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            while trace.tb_next is not None:
                trace = trace.tb_next
            module = trace.tb_frame.f_globals.get("__name__", "")
            if not module.startswith(_WRAPPER_MODULES):
                return
            if not re.search(rf"\b{method}\(\) (got|missing|takes)\b", str(error)):
                return
        given = ", ".join([*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in keywords.items())])
        raise self._misfit(f"{type_name(self.source)} cannot be called as {method}({given}): {error}") from error

    def _dicts(self, method: str, result: Any) -> Any:
        """The dicts that a multi-agent `reset` or `step` returned, as a tuple; raises `Misfit` for anything else."""
        number, expected = _EXPECTED[method]
        if isinstance(result, tuple | list) and [isinstance(one, dict) for one in result] == [True] * number:
            return tuple(result)
        raise self._wrong(method, expected, result)

    def _wrong(self, method: str, expected: str, got: Any) -> Misfit:
        """The error of a method that returned something of another form."""
        who = f"`{method}` of {type_name(self.source)}"
        return self._misfit(f"{who} must return {expected}; it returned {described(got)}")

    def _misfit(self, text: str) -> Misfit:
        """An error that says what kind the simulator was taken for, and which `adapter=` to pass."""
        kind = self.kind[0].lower() + self.kind[1:]
        return Misfit(f"{text}. It was taken for {kind}; if it is of another kind, pass {CHOICES}.")


def described(value: Any) -> str:
    """The form of a value in words, for messages, such as "2 values: (float, dict)" or "one value of type bool"."""
    if isinstance(value, tuple | list):
        shown = [type(entry).__name__ for entry in value[:_MOST_TYPES_SHOWN]]
        names = ", ".join([*shown, *["..."] * (len(value) > len(shown))])
        is_old = len(value) == 4 and isinstance(value[-1], Mapping) and not isinstance(value[-2], Mapping)
        old = "; four values are the API of OpenAI's gym, which Shimmy converts" if is_old else ""
        return f"{len(value)} values: ({names}){old}"
    shape = getattr(value, "shape", None)
    of_shape = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"one value of type {type(value).__name__}{of_shape}"
