"""What all adapters share: the simulator is held, described, rendered and closed in the same way.

How agents, spaces and steps are found differs from kind to kind; that lives in the module of the kind.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from typing import Any, ClassVar

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.protocol import AgentID, Dicts, MultiAgentEnv

RESET_KEYWORDS = frozenset({"seed", "options"})
FIVE_DICTS = [dict] * 5
_SHOWN = 5
_WRAPPERS = ("gymnasium.", "pettingzoo.", "shimmy.", "supersuit.")

CHOICES = (
    'adapter="dict" (dicts keyed by agent), adapter="tuple" (sequences with one entry per agent), adapter="gymnasium" '
    '(one agent), adapter="pettingzoo", adapter="aec", or a function that makes a MultiAgentEnv of the simulator'
)


class NotAnEnvironment(TypeError):
    """What a constructor returned is nothing that can be reset and stepped, or not in the way asked for."""


class Misfit(TypeError):
    """The simulator cannot be called, or does not answer, as its adapter expects. A restart cannot change that."""

    @classmethod
    def of(cls, env: Adapter, text: str) -> Misfit:
        """The error of one adapted simulator: what happened, what it was taken for, which `adapter=` to pass."""
        kind = env.kind[0].lower() + env.kind[1:]
        return cls(f"{text}. It was taken for {kind}; if it is of another kind, pass {CHOICES}.")


class LookupFailed(Exception):
    """A simulator's own method that gives a space raised; `__cause__` is its exception.

    Attributes:
        method: The simulator's method.
    """

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__(f"{method} raised {type(error).__name__}: {error}")
        self.method = method


class Adapter(MultiAgentEnv):
    """A simulator with a `reset` and a `step` of its own.

    Subclasses set `possible_agents` and the spaces, and implement `reset` and `step`.

    Attributes:
        kind: What the simulator is called in error messages.
        methods: What the simulator must be able to do.
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
        self.reset_keywords = _reset_keywords(source.reset)

    def _check_call(self, error: TypeError, method: str, *args: Any, **keywords: Any) -> None:
        """Look at what a call of the simulator's `reset` or `step` raised.

        Raises:
            Misfit: The simulator does not take these arguments.
        """
        if _is_about_the_call(error, method):
            given = ", ".join([*map(reprlib.repr, args), *(f"{k}={reprlib.repr(v)}" for k, v in keywords.items())])
            text = f"{type_name(self.source)} cannot be called as {method}({given}): {error}"
            raise Misfit.of(self, text) from error

    def render(self) -> Any:
        return self.source.render()

    def state(self) -> Any:
        return declared(self.source, "state")()

    def close(self) -> None:
        close = declared(self.source, "close")
        if callable(close):
            close()


def declared_agents(source: Any) -> list[AgentID]:
    """The agents that a simulator says may appear; none where it does not say."""
    agents = declared(source, "possible_agents")
    return [] if agents is None else list(agents)


def agent_names(source: Any) -> list[AgentID]:
    """The agents that a simulator names as `agent_ids` or `get_agent_ids()`; those of a set are sorted by name."""
    for name in ("agent_ids", "get_agent_ids"):
        names = declared(source, name)
        if callable(names):
            try:
                names = names()
            except Exception:  # as of a property that is not ready
                continue
        if isinstance(names, Iterable) and not isinstance(names, str | bytes):
            agents = sorted(names, key=str) if isinstance(names, Set) else [*names]
            if agents and all(isinstance(agent, Hashable) for agent in agents):
                return agents
    return []


def spaces_by_agent(declaration: Any) -> dict[AgentID, Space[Any]]:
    """The spaces in a `spaces.Dict` or mapping keyed by agent; none where it is neither."""
    if not isinstance(declaration, Mapping):
        return {}
    return {agent: space for agent, space in declaration.items() if isinstance(space, Space)}


def spaces_of(agents: Iterable[AgentID], lookup: Callable[[AgentID], Any]) -> dict[AgentID, Space[Any]]:
    """The spaces that a simulator's own method gives for these agents, without those who have none."""
    found = {}
    for agent in agents:
        try:
            space = lookup(agent)
        # What the base classes raise for an agent they know no space of.
        except (KeyError, NotImplementedError):
            continue
        except Exception as error:
            raise LookupFailed(f"{getattr(lookup, '__name__', 'space')}({agent!r})", error) from error
        if isinstance(space, Space):
            found[agent] = space
    return found


def checked_reset(result: Any, env: Adapter) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The result of a multi-agent `reset`.

    Raises:
        Misfit: It is not a pair of dicts.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        observations, infos = result
        if isinstance(observations, dict) and isinstance(infos, dict):
            return observations, infos
    raise Misfit.of(
        env,
        f"`reset` of {type_name(env.source)} must return two dicts keyed by agent, (observations, infos); "
        f"it returned {described(result)}",
    )


def checked_step(result: Any, env: Adapter) -> Dicts:
    """The result of a multi-agent `step`.

    Raises:
        Misfit: It is not five dicts.
    """
    if type(result) is tuple and [*map(type, result)] == FIVE_DICTS:  # the usual case first: it is quick to tell
        return result
    if isinstance(result, tuple | list) and len(result) == 5:
        observations, rewards, terminateds, truncateds, infos = result
        if (
            isinstance(observations, dict)
            and isinstance(rewards, dict)
            and isinstance(terminateds, dict)
            and isinstance(truncateds, dict)
            and isinstance(infos, dict)
        ):
            return observations, rewards, terminateds, truncateds, infos
    raise Misfit.of(
        env,
        f"`step` of {type_name(env.source)} must return five dicts keyed by agent, "
        f"(observations, rewards, terminateds, truncateds, infos); it returned {described(result)}",
    )


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
        names = [type(entry).__name__ for entry in value[:_SHOWN]] + ["..."] * (len(value) > _SHOWN)
        old = "; four values are the API of OpenAI's gym, which Shimmy converts" if _is_old_step(value) else ""
        return f"{len(value)} values: ({', '.join(names)}){old}"
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
    return module.startswith(_WRAPPERS) and bool(re.search(rf"\b{method}\(\) (got|missing|takes)\b", str(error)))


def _is_old_step(value: Any) -> bool:
    return len(value) == 4 and isinstance(value[-1], Mapping) and not isinstance(value[-2], Mapping)


def _state_space(source: Any) -> Space[Any] | None:
    space = declared(source, "state_space")
    # States are stacked into one array, so a space of anything else is no use.
    is_array = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    return space if is_array and callable(declared(source, "state")) else None


def _reset_keywords(reset: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(reset).parameters.values()
    # Methods written in C may have no signature that can be read.
    except (TypeError, ValueError):
        return RESET_KEYWORDS
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return RESET_KEYWORDS
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return RESET_KEYWORDS & {parameter.name for parameter in parameters if parameter.kind in by_keyword}
