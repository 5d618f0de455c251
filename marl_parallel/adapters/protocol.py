"""The `MultiAgentEnv` protocol that every kind of simulator is adapted to, and what all adapters share."""

from __future__ import annotations

import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, SupportsFloat, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import attributes
from marl_parallel.adapters.attributes import AgentID as AgentID
from marl_parallel.adapters.attributes import NotAnEnvironment as NotAnEnvironment
from marl_parallel.adapters.attributes import declared, declared_or_none, method, stored, type_name
from marl_parallel.adapters.forms import way_out

Dicts: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]
"""Observations, rewards, terminateds, truncateds, infos."""

ALL, COMMON = "__all__", "__common__"

JOINT = "__joint__"
"""The key of actions whose value is what the simulator's own `step` receives for all agents; see `joint_actions`."""

REWARD_TYPES = {float, int, np.float64, np.float32}
"""The most frequent types of rewards."""

_DICTS = {dict, defaultdict}  # PettingZoo's conversions return rewards in a defaultdict
_RESERVED = {ALL: "the key of the flags of the whole episode", COMMON: "the key of the infos of the whole environment"}
_EXPECTED = {
    "reset": (2, "two dicts keyed by agent, (observations, infos)"),
    "step": (5, "five dicts keyed by agent, (observations, rewards, terminateds, truncateds, infos)"),
}
_WRAPPER_MODULES = ("gymnasium.", "pettingzoo.", "shimmy.", "supersuit.")
_MOST_TYPES_SHOWN = 5

_MEANINGS = {
    "dict": " (dicts keyed by agent)", "tuple": " (sequences with one entry per agent)", "gymnasium": " (one agent)",
    "pettingzoo": "", "aec": "", "pymarl": " (PyMARL's methods)", "mappo": " (lists, with share observations)",
}  # fmt: skip
"""The adapters to choose from, and what they are for."""


def choices(source: Any, in_use: Container[str] = ()) -> str:
    """The values of `adapter=` that may fit a simulator, in words, without those `in_use`."""
    agents = declared_or_none(source, "possible_agents")
    several = isinstance(agents, Sized) and len(agents) > 1
    numbers = [attributes.length_of(declared_or_none(source, f"{what}_space")) for what in ("action", "observation")]
    fits = {
        "tuple": bool(attributes.number_of_agents(source) or any(numbers)),
        "gymnasium": not several,
        "pettingzoo": agents is not None,
        "aec": callable(declared_or_none(source, "observe")) and callable(declared_or_none(source, "last")),
        "pymarl": callable(declared_or_none(source, "get_avail_actions")),
        "mappo": declared_or_none(source, "share_observation_space") is not None,
    }
    named = [
        f'adapter="{name}"{meaning}'
        for name, meaning in _MEANINGS.items()
        if name not in in_use and fits.get(name, True)
    ]
    return ", ".join([*named, "or " * bool(named) + "a function that makes a MultiAgentEnv of the simulator"])


def check_spaces(source: Any) -> None:
    """Raise `NotAnEnvironment` for spaces of OpenAI's gym, which are not Gymnasium's spaces."""
    for what in ("observation", "action", "state", "reward"):
        # Properties are not read: PettingZoo's own `observation_spaces` warns that it is deprecated.
        one, several = f"{what}_space", f"{what}_spaces"
        for name, value in {one: declared_or_none(source, one), several: stored(source, several)}.items():
            space = attributes.old_space(value)
            if space is not None:
                raise NotAnEnvironment(f"the {name} of {type_name(source)} has {attributes.old_space_advice(space)}")


class InvalidAgents(ValueError):
    """Two agents have the same name, or a name is reserved or cannot be the key of a dict."""


class AdapterMismatch(TypeError):
    """The simulator's arguments or results do not match its adapter; a restart cannot change that."""


class Rules(Enum):
    """Which convention an environment follows: when its episode is over, and which agents must act."""

    DICT = "dict"
    """The environment returns `__all__` itself and receives the caller's actions unchanged."""
    PETTINGZOO = "pettingzoo"
    """The episode is over when no agent is left, unless the environment returns `__all__`. Each acting agent needs an
    action; actions of other agents are dropped."""


class MultiAgentEnv(ABC):
    """The interface of one simulator, which workers step.

    Attributes:
        rules: The convention that the environment follows.
        seeded_when_made: Whether only the constructor takes a seed. A seed for `reset` is then an error.
        options_last: Whether options of `reset` hold for all later episodes, also after a restart.
        needs_all_actions: Whether every acting agent needs an action under dict rules too.
        all_may_act: Whether facades that get an action for each agent also pass on actions of agents that have ended.
        observes_turn: Whether each reset and step observes one agent only: the one that acts next, or, at the end of an
            episode, the one that would.
        joint_actions: The projects, "mappo" or "pymarl", whose own vector environments send the simulator one value for
            all agents: their facades pass it on unchanged, under the key `JOINT`. "" for other simulators.
        source: The simulator as its constructor returned it. Attributes and methods are looked up there. By default the
            `MultiAgentEnv` itself.
        possible_agents: All agents that may appear, in the simulator's own order; empty if agents are open-ended.
        observation_spaces: The space of each agent, in the order of `possible_agents`, without agents that declare
            none; `GroupSpaces` if agents are open-ended.
        action_spaces: The action spaces, in the same form.
        reward_spaces: The spaces of agents whose rewards are vectors; empty if all rewards are numbers.
        mask_spaces: By agent, the `MultiBinary` space of the action mask that `masks` returns; empty if masks are only
            in observations or infos.
        state_space: The space of the global state; None if there is no global state.
        state_per_agent: Whether each agent has its own state: the first axis of the global state is then the agents.
        metadata: The simulator's metadata (not copied).
        render_mode: The simulator's render mode.
        reset_keywords: Which of `seed` and `options` the simulator's `reset` takes.
    """

    rules: ClassVar[Rules]
    seeded_when_made: ClassVar[bool] = False
    options_last: ClassVar[bool] = False
    needs_all_actions: ClassVar[bool] = False
    all_may_act: ClassVar[bool] = False
    observes_turn: ClassVar[bool] = False
    joint_actions: str = ""
    source: Any
    possible_agents: list[AgentID]
    observation_spaces: Mapping[AgentID, Space[Any]]
    action_spaces: Mapping[AgentID, Space[Any]]
    reward_spaces: Mapping[AgentID, Space[Any]] = MappingProxyType({})
    mask_spaces: Mapping[AgentID, Space[Any]] = MappingProxyType({})
    state_space: Space[Any] | None
    state_per_agent: bool = False
    metadata: Mapping[str, Any]
    render_mode: str | None
    reset_keywords: frozenset[str]

    @abstractmethod
    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        """Start an episode, with some of `reset_keywords`; returns observations and infos."""

    @abstractmethod
    def step(self, actions: dict[Any, Any]) -> Dicts:
        """Step once; returns five dicts, with `__all__` only if the simulator decides when the episode is over."""

    @staticmethod  # noqa: B027  # most take any
    def check_options(options: Any) -> None:
        """Raise `ValueError` for options that `reset` cannot take; called before any environment is reset."""

    def agents_left(self) -> Sequence[AgentID] | None:
        """The simulator's own list of the agents that have not ended; None if it has no such list."""
        return None

    def alive(self) -> Sequence[AgentID] | None:
        """The agents alive, if the adapter tracks them.

        None stands for all agents observed in this episode without a flag. An agent that has ended is alive again when
        it is observed without a flag; under PettingZoo's rules, `agents_left` must list it, too.
        """
        return None

    def turn(self) -> AgentID | None:
        """The only agent who may act next; None if all agents in the latest observation may."""
        return None

    def masks(self) -> Mapping[AgentID, Any]:
        """The action masks after the latest reset or step, by agent; only called if there are `mask_spaces`."""
        return {}

    def mask_array(self) -> NDArray[np.int8] | None:
        """The masks as one array of zeros and ones, one row per agent of `possible_agents`; None without such an array.

        The caller reads the array at once, so the simulator may change it later.
        """
        return None

    @abstractmethod
    def render(self) -> Any:
        """One frame, in the form of the simulator's render mode."""

    @abstractmethod
    def state(self) -> Any:
        """The global state; only called if `state_space` is not None."""

    @abstractmethod
    def close(self) -> None:
        """Close the simulator, which frees its resources."""


@dataclass(frozen=True)
class OfAdapter:
    """For `ParallelEnv.call`: an attribute of the `MultiAgentEnv`, not of its simulator; None if it is missing."""

    name: str

    def __call__(self, env: MultiAgentEnv) -> Any:
        return getattr(env, self.name, None)


@dataclass(frozen=True)
class Schema:
    """The description of an environment: the attributes of its `MultiAgentEnv` that do not change.

    Import it from `marl_parallel.adapters`. A `NativeSimulator` has one; the first three fields are enough for it.
    Sets pickle in any order, so they are sorted tuples here: comparing pickles is cheap.

    Example:
        >>> box = spaces.Box(0, 1, (4,))
        >>> agents = ["left", "right"]
        >>> Schema(agents, dict.fromkeys(agents, box), dict.fromkeys(agents, spaces.Discrete(3))).state_space is None
        True
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
    mask_spaces: Mapping[AgentID, Space[Any]] = field(default_factory=dict)
    state_per_agent: bool = False
    all_may_act: bool = False
    joint_actions: str = ""
    observes_turn: bool = False

    @classmethod
    def of(cls, env: MultiAgentEnv) -> Schema:
        values = {attribute.name: getattr(env, attribute.name) for attribute in fields(cls)}
        values["possible_agents"] = list(env.possible_agents)
        values["metadata"], values["reward_spaces"] = dict(env.metadata), dict(env.reward_spaces)
        values["mask_spaces"] = dict(env.mask_spaces)
        values["reset_keywords"] = tuple(sorted(env.reset_keywords))
        return cls(**values)


class GroupSpaces(Mapping[AgentID, Space[Any]]):
    """Spaces by group, for agents whose ids are not known beforehand; an agent's id also finds its group's space.

    Args:
        by_group: The space that all agents of a group have.
        group_of: Returns the group of an agent; it must pickle.

    Example:
        >>> declared = GroupSpaces({"wolf": spaces.Discrete(5)}, lambda agent: agent.partition("_")[0])
        >>> declared["wolf_7"], [*declared], "sheep_1" in declared
        (Discrete(5), ['wolf'], False)
    """

    def __init__(self, by_group: Mapping[AgentID, Space[Any]], group_of: Callable[[Any], AgentID]) -> None:
        self._by_group, self._group_of = dict(by_group), group_of

    def __getitem__(self, key: AgentID) -> Space[Any]:
        space = self._by_group.get(key)
        return self._by_group[self._group_of(key)] if space is None else space  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[AgentID]:
        return iter(self._by_group)

    def __len__(self) -> int:
        return len(self._by_group)

    def mapped(self, function: Callable[[Space[Any]], Space[Any]]) -> GroupSpaces:
        """The same groups, with a function applied to each space."""
        return self.of({group: function(space) for group, space in self._by_group.items()})

    def of(self, by_group: Mapping[AgentID, Space[Any]]) -> GroupSpaces:
        """The same groups with other spaces."""
        return GroupSpaces(by_group, self._group_of)

    def as_space(self) -> spaces.Dict:
        """A `Dict` keyed by group, in which an agent's id also finds its group's space."""
        return _SpacesByGroup(self)


class _SpacesByGroup(spaces.Dict):
    def __init__(self, declared: GroupSpaces) -> None:
        super().__init__([*declared.items()])
        self._declared = declared

    def __getitem__(self, key: Any) -> Space[Any]:
        return self._declared[key]


def check_agents(agents: Iterable[Any], kind: str) -> None:
    """Raise `InvalidAgents` if agents are equal, reserved or cannot be keys of a dict; `kind` names their simulator."""
    index_of: dict[Any, tuple[int, Any]] = {}
    for index, agent in enumerate(agents):
        try:
            first, earlier = index_of.setdefault(agent, (index, agent))
        except TypeError:
            raise InvalidAgents(
                f"{kind} declares agent {index} as {agent!r}, which cannot be the key of a dict: agents are named by "
                "strings, numbers or tuples of them"
            ) from None
        if first != index:
            raise InvalidAgents(
                f"{kind} declares agents {first} and {index} as {earlier!r} and {agent!r}, which are the same key in a "
                "dict: every agent in possible_agents needs a different name"
            )
    for key, meaning in _RESERVED.items():
        if key in index_of:
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
    """A simulator with its own `reset` and `step`; `_simulator`, which is stepped, may be a conversion of it."""

    kind: ClassVar[str]  # in error messages
    names: ClassVar[frozenset[str]] = frozenset()  # the values of `adapter=` for its kind
    methods: ClassVar[tuple[str, ...]] = ("reset", "step")  # that the simulator must have
    _has_own_state = False  # whether the outermost layer defines `state`; saved states of earlier builds lack it

    def __init__(self, source: Any) -> None:
        missing = [f"`{name}`" for name in self.methods if method(source, name) is None]
        if missing:
            raise NotAnEnvironment(f"{self.kind} has no method {' and no method '.join(missing)}: {type_name(source)}")
        self.source = self._simulator = source
        self._check_spaces()
        self.reset_keywords = attributes.reset_keywords(source.reset)
        self._set_required()
        metadata, render_mode = self._found(declared, source, "metadata"), self._found(declared, source, "render_mode")
        self.metadata = metadata if isinstance(metadata, Mapping) else {}
        self.render_mode = render_mode if isinstance(render_mode, str) else None
        self.possible_agents = self._found(self._agents)
        self.observation_spaces = self._found(self._spaces, "observation")
        self.action_spaces = self._found(self._spaces, "action")
        self.state_space = self._found(self._state_space)
        self.reward_spaces = self._found(attributes.vector_reward_spaces, source, self.possible_agents)
        self._has_own_state = attributes.defines(source, "state")

    def _found(self, look_up: Callable[..., Any], *args: Any) -> Any:
        """The result of a function that reads what the simulator declares."""
        return look_up(*args)

    def _check_spaces(self) -> None:
        """Raise `NotAnEnvironment` for declared spaces that cannot be used."""
        check_spaces(self.source)

    def _state_space(self) -> Space[Any] | None:
        return attributes.declared_state_space(self.source)

    def _set_required(self) -> None:
        """Set `_required`: the keywords that `_simulator.reset` requires, each with None as its default."""
        self._required = dict.fromkeys(sorted(attributes.required_reset_keywords(self._simulator)))

    def _agents(self) -> list[AgentID]:
        agents = declared(self.source, "possible_agents")
        return [] if agents is None else list(agents)

    @abstractmethod
    def _spaces(self, what: str) -> Mapping[AgentID, Space[Any]]:
        """The declared spaces by agent; `what` is "observation" or "action"."""

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        observations, infos = self._dicts("reset", self._reset(keywords))
        return observations, infos

    def step(self, actions: dict[Any, Any]) -> Dicts:
        try:
            result: Dicts = self._simulator.step(actions)
        except TypeError as error:
            self._check_call(error, "step", actions)
            raise
        if type(result) is not tuple or len(result) != 5 or not _DICTS.issuperset(map(type, result)):
            result = self._dicts("step", self._by_agent(result))
        return result

    def _by_agent(self, result: Any) -> Any:
        """Convert the result of a step to five dicts, if simulators of this kind may return another form."""
        return result

    def render(self) -> Any:
        return attributes.find(self.source, "render")()

    def state(self) -> Any:
        if self._has_own_state:
            return self.source.state()
        # Looked up in each call: a wrapper may have replaced what it wraps since the last one.
        return (method(self.source, "state") or attributes.find(self.source, "state"))()

    def close(self) -> None:
        attributes.close(self.source)

    def _reset(self, keywords: Mapping[str, Any]) -> Any:
        keywords = {**self._required, **keywords}
        try:
            return self._simulator.reset(**keywords)
        except TypeError as error:
            self._check_call(error, "reset", **keywords)
            raise

    def _check_call(self, error: TypeError, method: str, *args: Any, **keywords: Any) -> None:
        """Raise `AdapterMismatch` if an error means that the simulator's `reset` or `step` takes other arguments."""
        # Such an error comes from the call itself, or from within a library's wrappers.
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            while trace.tb_next is not None:
                trace = trace.tb_next
            module = trace.tb_frame.f_globals.get("__name__", "")
            if not module.startswith(_WRAPPER_MODULES):
                return
            if not re.search(rf"\b{method}\(\) (got|missing|takes)\b", str(error)):
                return
        passed = ", ".join([*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in keywords.items())])
        raise self._mismatch(f"{type_name(self.source)} cannot be called as {method}({passed}): {error}") from error

    def _dicts(self, method: str, result: Any) -> Any:
        """The dicts that a multi-agent `reset` or `step` returned, as a tuple; else raises `AdapterMismatch`."""
        number, expected = _EXPECTED[method]
        if isinstance(result, tuple | list) and [isinstance(one, dict) for one in result] == [True] * number:
            return tuple(result)
        raise self._wrong_result(method, expected, result)

    def _wrong_result(self, method: str, expected: str, got: Any, result: Any = None) -> AdapterMismatch:
        """The error of a wrong value; `result` is the whole result that the value is a part of."""
        text = f"`{method}` of {type_name(self.source)} must return {expected}; it returned {described(got)}"
        return self._mismatch(text, way_out(method, got if result is None else result, self.source, self.names))

    def _mismatch(self, text: str, way: str = "") -> AdapterMismatch:
        """The error of a simulator of another kind; `way` says what to do if that is known."""
        text = f"{text}. It was treated as {self.kind[0].lower()}{self.kind[1:]}"
        other = f"if it is of another kind, pass {choices(self.source, self.names)}"
        if not way:
            return AdapterMismatch(f"{text}; {other}.")
        # With one agent, a value may have the same form as those of several.
        return AdapterMismatch(f"{text}. {way}{f'; {other}' * ('gymnasium' in self.names)}.")


def number_in(value: Any) -> Any:
    """A number, or the only number in a list or array; None for anything else."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, np.ndarray):
        value = value.reshape(())[()] if value.size == 1 else None
    if isinstance(value, np.generic):
        return value if value.dtype.kind in "biuf" else None
    is_number = isinstance(value, SupportsFloat) and math.prod(getattr(value, "shape", ())) == 1
    return value if is_number else None


def described(value: Any) -> str:
    """The form of a value in words, for messages, such as "2 values: (float, dict)" or "one value of type bool"."""
    if isinstance(value, tuple | list):
        names = ", ".join([type(entry).__name__ for entry in value[:_MOST_TYPES_SHOWN]])
        names += ", ..." * (len(value) > _MOST_TYPES_SHOWN)
        old_types = len(value) == 4 and isinstance(value[-1], Mapping) and not isinstance(value[-2], Mapping)
        is_old = old_types and not isinstance(value[1], list | tuple)  # these are rewards of several agents
        old = "; four values are the API of OpenAI's gym, which Shimmy converts" if is_old else ""
        return f"{len(value)} values: ({names}){old}"
    shape = getattr(value, "shape", None)
    of_shape = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"one value of type {type(value).__name__}{of_shape}"
