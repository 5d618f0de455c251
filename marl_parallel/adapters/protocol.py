"""The protocol that every kind of simulator is brought to, and what the adapters of all kinds share.

The modules beside this one each adapt one kind. What the results of a step mean is decided in
`marl_parallel.core.episode`.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeAlias

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import declared, is_wrapped

AgentID: TypeAlias = Hashable
Dicts: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]

ALL = "__all__"
"""The key of the flags of the whole episode."""

COMMON = "__common__"
"""The key of the infos of the environment rather than of an agent."""

FIVE_DICTS = [dict] * 5
_RESERVED = {
    ALL: "the key of the flags of the whole episode",
    COMMON: "the key of the infos of the whole environment",
}
_ABSENT = object()
_RESET_KEYWORDS = frozenset({"seed", "options"})
_MOST_TYPES_SHOWN = 5
_WRAPPER_MODULES = ("gymnasium.", "pettingzoo.", "shimmy.", "supersuit.")
_SCALARISING_WRAPPERS = (
    ("momaland.utils.parallel_wrappers", "LinearizeReward"),
    ("momaland.utils.aec_wrappers", "LinearizeReward"),
    ("mo_gymnasium.wrappers.wrappers", "LinearReward"),
)
"""Wrappers that turn vector rewards into numbers, and still pass on the `reward_space` of what they wrap."""

CHOICES = (
    'adapter="dict" (dicts keyed by agent), adapter="tuple" (sequences with one entry per agent), adapter="gymnasium" '
    '(one agent), adapter="pettingzoo", adapter="aec", or a function that makes a MultiAgentEnv of the simulator'
)


class NotAnEnvironment(TypeError):
    """A constructor returned something that cannot be reset and stepped, or not in the way asked for."""


class InvalidAgents(ValueError):
    """Agents that cannot be told apart from each other, or from the environment."""


class Misfit(TypeError):
    """The simulator cannot be called, or does not answer, as its adapter expects. A restart cannot change that."""


class LookupFailed(Exception):
    """A simulator's own method that gives a space raised; `__cause__` is its exception.

    Attributes:
        method: The simulator's method.
    """

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__(f"{method} raised {type(error).__name__}: {error}")
        self.method = method


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
        needs_all_actions: Whether every acting agent must be given an action though dict rules leave that to the
            caller. PettingZoo rules require it anyway.
        source: The simulator as its constructor returned it. Attributes and methods are looked up from here; in the
            `MultiAgentEnv` itself if it has none.
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
        """Start an episode; returns the simulator's observations and infos.

        Args:
            keywords: Some of `reset_keywords`; the caller leaves out what is not to be passed on.
        """

    @abstractmethod
    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step once; returns the simulator's five dicts, with `__all__` only if it knows itself when it is over."""

    @staticmethod  # noqa: B027  # most take any
    def check_options(options: Any) -> None:
        """Refuse options that `reset` cannot take; called before any environment is touched.

        Raises:
            ValueError: It cannot take these.
        """

    def agents_left(self) -> Sequence[AgentID] | None:
        """The agents that the simulator itself still counts; None if it keeps no such list."""
        return None

    def alive(self) -> Sequence[AgentID] | None:
        """Who is alive, if the adapter keeps count; None: all who have been seen and have not been flagged."""
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
    """The spaces of agents whose ids are not known beforehand: one for each group that an agent may belong to.

    Its keys are the groups, and the id of an agent is looked up as its group.

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
    """Refuse names of agents that an environment declares.

    Args:
        agents: All of them.
        kind: What declares them, for the error.

    Raises:
        InvalidAgents: Two are equal, one is a reserved key, or one cannot be the key of a dict.

    Example:
        >>> check_agents(["a", "b"], "A dict environment")
        >>> check_agents([True, 1], "A dict environment")
        Traceback (most recent call last):
        ...
        marl_parallel.adapters.protocol.InvalidAgents: A dict environment declares agents 0 and 1 as True and 1, which \
are the same key in a dict: every agent needs a name of its own in possible_agents
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
    """Refuse an agent that appears in an episode under a reserved key.

    Raises:
        InvalidAgents: In any case; the text says whether `method` returned it in `observations` or `rewards`.
    """
    key = next((key for key in _RESERVED if key in observations), ALL)
    what = "an observation" if key in observations else "a reward"
    raise InvalidAgents(
        f"`{method}` returned {what} of an agent named {key!r}, which is {_RESERVED[key]}: rename the agent, or leave "
        "the entry out"
    )


# -- what adapters share -----------------------------------------------------------------------------------------------


class Adapter(MultiAgentEnv):
    """A simulator with a `reset` and a `step` of its own.

    Subclasses set `possible_agents` and the spaces, and implement `reset` and `step`.

    Attributes:
        kind: What the simulator is called in error messages.
        methods: The methods that the simulator must have.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ("reset", "step")

    def __init__(self, source: Any) -> None:
        missing = [f"`{name}`" for name in self.methods if not callable(declared(source, name))]
        if missing:
            raise NotAnEnvironment(f"{self.kind} has no method {' and no method '.join(missing)}: {type_name(source)}")
        self.source = source
        metadata, render_mode = declared(source, "metadata"), declared(source, "render_mode")
        self.metadata = metadata if isinstance(metadata, Mapping) else {}
        self.render_mode = render_mode if isinstance(render_mode, str) else None
        self.state_space = _state_space(source)
        self.reset_keywords = _keywords_of(source.reset)

    def render(self) -> Any:
        return self.source.render()

    def state(self) -> Any:
        return declared(self.source, "state")()

    def close(self) -> None:
        close = declared(self.source, "close")
        if callable(close):
            close()

    def _reset(self, simulator: Any, keywords: Mapping[str, Any]) -> Any:
        """Call the simulator's `reset`.

        Raises:
            Misfit: It does not take these keywords.
        """
        try:
            return simulator.reset(**keywords)
        except TypeError as error:
            self._check_call(error, "reset", **keywords)
            raise

    def _check_call(self, error: TypeError, method: str, *args: Any, **keywords: Any) -> None:
        """Look at an error of a call of the simulator's `reset` or `step`.

        Raises:
            Misfit: The simulator does not take these arguments.
        """
        if _is_about_the_call(error, method):
            given = ", ".join([*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in keywords.items())])
            raise self._misfit(f"{type_name(self.source)} cannot be called as {method}({given}): {error}") from error

    def _reset_dicts(self, simulator: Any, keywords: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Call a multi-agent `reset`, as `_reset` does."""
        result = self._reset(simulator, keywords)
        if isinstance(result, tuple | list) and [isinstance(one, dict) for one in result] == [True] * 2:
            observations, infos = result
            return observations, infos
        raise self._wrong("reset", "two dicts keyed by agent, (observations, infos)", result)

    def _five_dicts(self, result: Any) -> Dicts:
        """The result of a multi-agent `step`.

        Raises:
            Misfit: It is not five dicts.
        """
        if isinstance(result, tuple | list) and [isinstance(one, dict) for one in result] == [True] * 5:
            observations, rewards, terminateds, truncateds, infos = result
            return observations, rewards, terminateds, truncateds, infos
        wanted = "five dicts keyed by agent, (observations, rewards, terminateds, truncateds, infos)"
        raise self._wrong("step", wanted, result)

    def _wrong(self, method: str, expected: str, got: Any) -> Misfit:
        """The error of a method that returned something of another form."""
        return self._misfit(
            f"`{method}` of {type_name(self.source)} must return {expected}; it returned {described(got)}"
        )

    def _misfit(self, text: str) -> Misfit:
        """The error of this simulator: what happened, what kind it was taken for, which `adapter=` to pass."""
        kind = self.kind[0].lower() + self.kind[1:]
        return Misfit(f"{text}. It was taken for {kind}; if it is of another kind, pass {CHOICES}.")


def declared_agents(source: Any) -> list[AgentID]:
    """The `possible_agents` of a simulator; none if it declares none."""
    agents = declared(source, "possible_agents")
    return [] if agents is None else list(agents)


def agent_names(source: Any) -> list[AgentID]:
    """The agents that a simulator names as `agent_ids` or `get_agent_ids()`; those of a set are sorted by name."""
    for name in ("agent_ids", "get_agent_ids"):
        names = called(declared(source, name))
        if isinstance(names, Iterable) and not isinstance(names, str | bytes):
            agents = sorted(names, key=str) if isinstance(names, Set) else [*names]
            if agents and all(isinstance(agent, Hashable) for agent in agents):
                return agents
    return []


def called(value: Any) -> Any:
    """The result of a method without arguments, None if it raises; anything else as it is."""
    if not callable(value):
        return value
    try:
        return value()
    except Exception:  # a simulator that is not ready may raise anything: it declares nothing then
        return None


def spaces_by_agent(declaration: Any) -> dict[AgentID, Space[Any]]:
    """The spaces in a `spaces.Dict` or mapping keyed by agent; none if it is neither."""
    if not isinstance(declaration, Mapping):
        return {}
    return {agent: space for agent, space in declaration.items() if isinstance(space, Space)}


def spaces_of(agents: Iterable[AgentID], lookup: Callable[[AgentID], Any]) -> dict[AgentID, Space[Any]]:
    """The spaces that a simulator's own method gives for these agents, without those who have none."""
    found = {}
    for agent in agents:
        try:
            space = lookup(agent)
        except (KeyError, NotImplementedError):  # of the base classes, for an agent they know no space of
            continue
        except Exception as error:
            raise LookupFailed(f"{getattr(lookup, '__name__', 'space')}({agent!r})", error) from error
        if isinstance(space, Space):
            found[agent] = space
    return found


def vector_reward_spaces(source: Any, agents: Sequence[AgentID]) -> dict[AgentID, Space[Any]]:
    """The reward spaces of the agents whose rewards are vectors.

    MOMAland and MO-Gymnasium declare them as `reward_space`: a method that takes an agent, a mapping by agent, or one
    space for all agents; else as a mapping `reward_spaces`. Both are seen through wrappers, and a wrapper that returns
    numbers declares `reward_space = None`. Only a `Box` with at least one axis counts as a vector.
    """
    if any(is_wrapped(source, wrapper) for wrapper in _SCALARISING_WRAPPERS):
        return {}
    declaration = declared(source, "reward_space", _ABSENT)
    if declaration is _ABSENT:
        declaration = declared(source, "reward_spaces")
    found: Mapping[AgentID, Space[Any]] = {}
    if isinstance(declaration, Mapping):
        found = spaces_by_agent(declaration)
    elif isinstance(declaration, Space):
        found = dict.fromkeys(agents, declaration)
    elif callable(declaration):
        found = spaces_of(agents, declaration)
    return {agent: found[agent] for agent in agents if type(found.get(agent)) is spaces.Box and found[agent].shape}


def type_name(source: Any) -> str:
    """The full name of an object's type, for messages."""
    return f"{type(source).__module__}.{type(source).__qualname__}"


def described(value: Any) -> str:
    """The form of a value in words, for messages.

    Example:
        >>> described((0.5, {})), described(True)
        ('2 values: (float, dict)', 'one value of type bool')
    """
    if isinstance(value, tuple | list):
        shown = [type(entry).__name__ for entry in value[:_MOST_TYPES_SHOWN]]
        names = ", ".join([*shown, *["..."] * (len(value) > len(shown))])
        is_old = len(value) == 4 and isinstance(value[-1], Mapping) and not isinstance(value[-2], Mapping)
        old = "; four values are the API of OpenAI's gym, which Shimmy converts" if is_old else ""
        return f"{len(value)} values: ({names}){old}"
    shape = getattr(value, "shape", None)
    of_shape = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"one value of type {type(value).__name__}{of_shape}"


def _is_about_the_call(error: TypeError, method: str) -> bool:
    """Whether the arguments did not fit the signature, of the simulator itself or beneath a library's wrappers."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    return module.startswith(_WRAPPER_MODULES) and bool(re.search(rf"\b{method}\(\) (got|missing|takes)\b", str(error)))


def _state_space(source: Any) -> Space[Any] | None:
    space = declared(source, "state_space")
    # States are stacked into one array, so a space of anything else is no use.
    is_array = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    return space if is_array and callable(declared(source, "state")) else None


def _keywords_of(reset: Callable[..., Any]) -> frozenset[str]:
    """Which keywords a `reset` takes."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # a method written in C may have no signature that can be read
        return _RESET_KEYWORDS
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _RESET_KEYWORDS
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _RESET_KEYWORDS & {parameter.name for parameter in parameters if parameter.kind in by_keyword}
