"""What a simulator declares: its attributes, agents and spaces, looked up through wrappers and conversions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, TypeAlias

import gymnasium
from gymnasium import Space, spaces

AgentID: TypeAlias = Any  # hashable; `Hashable` would not be accepted as a key of `spaces.Dict`

_LINKS = ("env", "aec_env", "par_env", "unwrapped")
_ABSENT, _REFUSED = object(), object()
_DEFAULTS = frozenset({"close", "metadata", "render", "render_mode", "state"})
"""Names that base classes of Gymnasium and PettingZoo define for simulators which do not: that says nothing."""
_PASSED_ON = frozenset({"action_space", "observation_space"})
"""Further names that only the base classes of wrappers define: they pass on what the wrapped environment has."""
_SET_ON_WRAPPERS = {name: f"_{name}" for name in ("action_space", "metadata", "observation_space")}
"""Where a `gymnasium.Wrapper` keeps what is set on it."""
_BASE_ENVS = frozenset({"pettingzoo.utils.env"})  # Gymnasium has its wrappers' base class in the same module
_BASE_MODULES = _BASE_ENVS | {
    "gymnasium.core", "pettingzoo.utils.conversions", "pettingzoo.utils.wrappers.base",
    "pettingzoo.utils.wrappers.base_parallel",
}  # fmt: skip
_UNKNOWN = "attribute_that_no_simulator_has"
_RESET_KEYWORDS = frozenset({"seed", "options"})
# These turn vector rewards into numbers, and still pass on the `reward_space` of what they wrap.
_SCALARISING_WRAPPERS = (
    ("momaland.utils.parallel_wrappers", "LinearizeReward"),
    ("momaland.utils.aec_wrappers", "LinearizeReward"),
    ("mo_gymnasium.wrappers.wrappers", "LinearReward"),
)


class NotAnEnvironment(TypeError):
    """A constructor returned an object that cannot be reset and stepped, or not as `adapter=` requires."""


class LookupFailed(Exception):
    """A method of the simulator that returns a space raised; `__cause__` is its exception, `method` names the call."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__(f"{method} raised {type(error).__name__}: {error}")
        self.method = method

    @property
    def to_do(self) -> str:
        """What to do about it, for messages."""
        return f"let {self.method} return a space as soon as the simulator is constructed"


class AttributeFailed(LookupFailed):
    """A property raised while the simulator was adapted; `__cause__` is its exception, `method` its name."""

    @property
    def to_do(self) -> str:
        return (
            f"fix {self.method}, which must have a value as soon as the simulator is constructed; if there is none, "
            "raise NotImplementedError"
        )


def layers(source: Any) -> Iterator[Any]:
    """Yield an object and the environments beneath it (objects with a `step`), outermost first and each once."""
    # Links that a wrapper only forwards are not followed, so that layers come in the order of wrapping.
    seen: dict[int, Any] = {}  # holds the objects, since an id is unique only while its object lives
    to_visit = [source]
    while to_visit:
        layer = to_visit.pop()
        if id(layer) not in seen:
            seen[id(layer)] = layer
            yield layer
            beneath = (_quietly(layer, link) for link in reversed(_LINKS) if owns(layer, link))
            to_visit.extend(inner for inner in beneath if callable(_quietly(inner, "step")))


def owns(layer: Any, name: str) -> bool:
    """Whether an object or its type defines the attribute, rather than forwards it to another object."""
    return name in _on_instance(layer) or _definer(layer, name) is not None


def defines(layer: Any, name: str) -> bool:
    """Whether an object defines the attribute, and not only a base class of Gymnasium or PettingZoo."""
    if name in _on_instance(layer):
        return True
    definer = _definer(layer, name)
    return definer is not None and definer.__module__ not in _BASE_MODULES


def _on_instance(layer: Any) -> Mapping[str, Any]:
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(layer, "__dict__")
    except AttributeError:  # a class with slots
        return {}
    return attributes


def _definer(layer: Any, name: str) -> type | None:
    """The class of an object that defines the attribute."""
    return next((base for base in type(layer).__mro__ if name in base.__dict__), None)


def _quietly(source: Any, name: str, default: Any = None) -> Any:
    """`getattr`, with the default for any error: the simulator may not be ready."""
    try:
        return getattr(source, name)
    except Exception:
        return default


def declared(source: Any, name: str, default: Any = None) -> Any:
    """The value of an optional attribute as the outermost layer says that has it; the default if there is none.

    `docs/environments.md` has the rule. A method that a proxy returns for every name does not count.

    Raises:
        AttributeFailed: The attribute is a property with a mistake, that is, it raised another error than
            `NotImplementedError` or an `AttributeError` about this attribute.
    """
    value = _decided(source, name)
    return default if value is _ABSENT else value


def declared_or_none(source: Any, name: str) -> Any:
    """The value of an attribute that may not be ready before a reset; None without it, or if reading it raises."""
    try:
        return declared(source, name)
    except LookupFailed:
        return None


def method(source: Any, name: str, *, through: bool = False) -> Callable[..., Any] | None:
    """A method of the outermost layer that has it; None without one.

    It may come from a proxy that returns a method for every name. With `through`, layers beneath a layer without it
    are searched, too.
    """
    try:
        value = _decided(source, name, of_proxies=True, through=through)
    except LookupFailed:
        return None
    return value if callable(value) else None


def close(source: Any) -> None:
    """Call the `close` of the outermost layer that has one: it closes the layers beneath."""
    if (function := method(source, "close", through=True)) is not None:
        function()


def _decided(source: Any, name: str, *, of_proxies: bool = False, through: bool = False) -> Any:
    """The value of an attribute, from the outermost layer that has it; `_ABSENT` if there is none."""
    default: Callable[[], Any] | None = None
    beneath = layers(source)
    for layer in beneath:
        definer = None if name in _on_instance(layer) else _definer(layer, name)
        is_default = definer is not None and _says_nothing(definer.__module__, name)
        forwarder = _definer(layer, "__getattr__")
        # A library's `__getattr__` is not called: what it forwards is read from the layers beneath.
        only_forwards = forwarder is not None and forwarder.__module__ in _BASE_MODULES
        value, is_own = _ABSENT, True
        if is_default:
            set_here = vars(layer).get(_SET_ON_WRAPPERS.get(name, "")) if isinstance(layer, gymnasium.Wrapper) else None
            if set_here is not None:
                return set_here
        elif definer is not None or name in _on_instance(layer):
            value = _read(layer, name, definer)
        if value is _ABSENT and not only_forwards:
            value, is_own = _forwarded(layer, name, of_proxies), False
        if value is _REFUSED:
            return _ABSENT
        if value is not _ABSENT:
            if is_own or name not in _DEFAULTS or not _is_default(value):
                if not is_own:
                    _check_beneath(beneath, name, is_hidden=True)
                return value
            default = default or functools.partial(_first, value)
        elif is_default:
            default = default or functools.partial(getattr, layer, name)
        elif not (through or only_forwards or isinstance(layer, gymnasium.Wrapper)):
            if forwarder is not None:
                # Gymnasium's wrappers do not forward by themselves: what forwards to one has what is beneath it.
                wrapper = getattr(_quietly(layer, "get_wrapper_attr"), "__self__", None)
                if isinstance(wrapper, gymnasium.Wrapper):
                    value = _decided(wrapper, name, of_proxies=of_proxies)
                    return value if value is not _ABSENT or default is None else default()
                _check_beneath(beneath, name, is_hidden=False)
            break
    try:
        return _ABSENT if default is None else default()
    except (AttributeError, NotImplementedError):
        return _ABSENT


def _first(value: Any) -> Any:
    return value


def _says_nothing(module: str, name: str) -> bool:
    """Whether the definition of an attribute by a class of this module counts as none."""
    if name in _DEFAULTS:
        return module in _BASE_MODULES
    return name in _PASSED_ON and module in _BASE_MODULES and module not in _BASE_ENVS


def _is_default(value: Any) -> bool:
    """Whether a forwarded value is what a base class of Gymnasium or PettingZoo has in place of a simulator's."""
    if inspect.ismethod(value):
        return value.__module__ in _BASE_MODULES
    return value is None or value is gymnasium.Env.metadata


def _read(layer: Any, name: str, definer: type | None) -> Any:
    """The value that a layer defines, read without its `__getattr__`, which would hide an error of a property.

    `_ABSENT` for an `AttributeError` about this name, as properties raise it that forward; `_REFUSED` for a
    `NotImplementedError`.
    """
    try:
        return type(layer).__getattribute__(layer, name)  # type: ignore[call-arg]
    except NotImplementedError:
        return _REFUSED
    except AttributeError as error:
        by_library = error.name is None and definer is not None and definer.__module__ in _BASE_MODULES
        if error.name == name or by_library:
            return _ABSENT
        raise AttributeFailed(name, error) from error
    except Exception as error:
        raise AttributeFailed(name, error) from error


def _forwarded(layer: Any, name: str, of_proxies: bool) -> Any:
    """The value that a layer gets from elsewhere with its `__getattr__` or `__getattribute__`; else as `_read`."""
    kind = type(layer)
    if _definer(layer, "__getattr__") is not None:
        ask = functools.partial(kind.__getattr__, layer)
    elif _definer(layer, "__getattribute__") is not object:
        ask = functools.partial(getattr, layer)
    else:
        return _ABSENT
    try:
        value = ask(name)
    except NotImplementedError:
        return _REFUSED
    except Exception as error:
        if isinstance(error, AttributeError) and error.name in (None, name):
            return _ABSENT
        try:
            ask(_UNKNOWN)
        except Exception as usual:  # what it raises for names that it does not have
            if type(usual) is type(error) and getattr(usual, "name", None) == getattr(error, "name", None):
                return _ABSENT
        raise AttributeFailed(name, error) from error
    if callable(value) and not of_proxies and callable(_quietly(layer, _UNKNOWN)):
        return _ABSENT
    return value


def _check_beneath(beneath: Iterable[Any], name: str, *, is_hidden: bool) -> None:
    """Raise `AttributeFailed` if the first layer that defines an attribute has a property with a mistake.

    A layer above has forwarded the name. With `is_hidden`, it got a value: then only the layer's own `__getattr__` can
    have hidden a mistake.
    """
    for layer in beneath:
        forwards = _definer(layer, "__getattr__") is not None
        if defines(layer, name):
            if name not in _on_instance(layer) and (forwards or not is_hidden):
                _read(layer, name, _definer(layer, name))
            return
        if not forwards and not isinstance(layer, gymnasium.Wrapper):
            return


def stored(source: Any, name: str) -> Any:
    """The value of an attribute of the outermost layer that stores it; properties do not count; None without one."""
    for layer in layers(source):
        value = inspect.getattr_static(layer, name, None)
        if value is not None and not hasattr(type(value), "__get__"):
            return value
    return None


def find(source: Any, name: str) -> Any:
    """The value of an attribute of the outermost layer that has it; `AttributeError` names all layers if none has."""
    failure: AttributeError | None = None
    if name in _DEFAULTS:
        with contextlib.suppress(LookupFailed):  # raised below
            if (value := _decided(source, name, of_proxies=True, through=True)) is not _ABSENT:
                return value
    for layer in layers(source):
        try:
            return getattr(layer, name)
        except AttributeError as error:
            failure = failure or error
    try:
        raise AttributeError(f"{_no_layer_has(source, name)}: {failure}") from failure
    finally:
        del failure  # else it and this frame, which has the simulator, would refer to each other


def peek(source: Any, name: str) -> tuple[str, Any]:
    """An attribute, without an error: `("method", None)`, `("value", its value)`, or `("missing", why)`."""
    try:
        value = find(source, name)
    except AttributeError as error:
        return "missing", str(error)
    return ("method", None) if callable(value) else ("value", value)


def has(source: Any, name: str) -> bool:
    """Whether any layer has the attribute."""
    return any(hasattr(layer, name) for layer in layers(source))


def assign(source: Any, name: str, value: Any) -> None:
    """Set an attribute on the outermost layer that owns it; a new attribute is set on the outermost layer.

    Raises `AttributeError` if the attribute is read-only, or is new and the outermost layer takes no new attributes.
    """
    owners = [layer for layer in layers(source) if owns(layer, name)]
    if not owners:
        try:
            setattr(source, name, value)
        except AttributeError as error:
            raise AttributeError(f"{_no_layer_has(source, name)}, and it cannot be added: {error}") from None
        return
    for layer in owners:
        definition = inspect.getattr_static(layer, name)
        if not isinstance(definition, property) or definition.fset is not None:
            setattr(layer, name, value)
            return
    raise AttributeError(f"{name!r} of {type(owners[0]).__name__} is a property that can only be read")


def _no_layer_has(source: Any, name: str) -> str:
    outermost, *inner = [type(layer).__name__ for layer in layers(source)]
    beneath = f", nor has anything beneath it ({', '.join(inner)})" if inner else ""
    return f"{outermost} has no attribute {name!r}{beneath}"


def is_a(source: Any, module: str, name: str) -> bool:
    """Whether an object is of a class that has this name in a module or package; does not import the module."""
    bases = type(source).__mro__
    return any(base.__name__ == name and f"{base.__module__}.".startswith(f"{module}.") for base in bases)


def is_wrapped(source: Any, kind: tuple[str, str]) -> bool:
    """Whether any layer is of a class, given by its exact module and name; does not import the module."""
    return any((base.__module__, base.__qualname__) == kind for layer in layers(source) for base in type(layer).__mro__)


def type_name(source: Any) -> str:
    """The full name of an object's type, for messages."""
    return f"{type(source).__module__}.{type(source).__qualname__}"


def declared_seed(source: Any) -> int | None:
    """The attribute `seed` of the innermost environment; None if it is absent or not an integer."""
    seed = declared_or_none(_quietly(source, "unwrapped", source), "seed")
    return int(seed) if isinstance(seed, Integral) and not isinstance(seed, bool) else None


def signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """`inspect.signature`; annotations may contain undefined names, such as imports for type checkers only."""
    if sys.version_info >= (3, 14):  # which evaluates annotations when they are read
        from annotationlib import Format

        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF)
    return inspect.signature(function, follow_wrapped=follow_wrapped)


def reset_keywords(reset: Callable[..., Any]) -> frozenset[str]:
    """Which of `seed` and `options` a simulator's `reset` takes; both if its signature cannot be read."""
    try:
        parameters = signature(reset).parameters.values()
    except (TypeError, ValueError):  # a method written in C
        return _RESET_KEYWORDS
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _RESET_KEYWORDS
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _RESET_KEYWORDS & {parameter.name for parameter in parameters if parameter.kind in by_keyword}


def required_reset_keywords(source: Any) -> frozenset[str]:
    """Which of `seed` and `options` have no default in a simulator's `reset`, or below wrappers that pass on all."""
    required: set[str] = set()
    for layer in layers(source):
        try:
            parameters = signature(layer.reset).parameters.values()
        except (AttributeError, TypeError, ValueError):
            break
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required |= {one.name for one in parameters if one.kind in by_keyword and one.default is one.empty}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return _RESET_KEYWORDS & required


def agent_names(source: Any) -> list[AgentID]:
    """The agents that a simulator names as `agent_ids` or `get_agent_ids()`; those of a set are sorted by name."""
    for name in ("agent_ids", "get_agent_ids"):
        names = _called(declared_or_none(source, name))
        if isinstance(names, Iterable) and not isinstance(names, str | bytes):
            agents = sorted(names, key=str) if isinstance(names, Set) else [*names]
            if agents and all(isinstance(agent, Hashable) for agent in agents):
                return agents
    return []


def number_of_agents(source: Any) -> int | None:
    """The number of agents that a simulator declares as `n_agents`, `num_agents` or `get_num_agents()`, or None."""
    for name in ("n_agents", "num_agents", "get_num_agents"):
        count = declared_or_none(source, name)
        count = _called(count) if name.startswith("get_") else count
        if isinstance(count, Integral) and not isinstance(count, bool) and int(count) > 0:
            return int(count)
    return None


def _called(value: Any) -> Any:
    """The result of a method without arguments, None if it raises; anything else as it is."""
    try:
        return value() if callable(value) else value
    except Exception:
        return None


def length_of(declaration: Any) -> int | None:
    """The number of spaces in a `Tuple` space, list or tuple; None for anything else, and for an empty one."""
    return (len(declaration) or None) if isinstance(declaration, spaces.Tuple | list | tuple) else None


def listed(declaration: Any) -> list[Any]:
    """The spaces in a list, tuple or `Tuple` space, of Gymnasium or gym; none in anything else."""
    if isinstance(declaration, spaces.Tuple) or is_a(declaration, "gym", "Tuple"):
        return [*declaration.spaces]
    return [*declaration] if isinstance(declaration, list | tuple) else []


def old_space(declaration: Any) -> Any:
    """A space of OpenAI's gym: the declaration itself or one of its entries; None if there is none."""
    entries = declaration.values() if isinstance(declaration, Mapping) else declaration
    several = entries if isinstance(declaration, Mapping | list | tuple) else ()
    return next((one for one in (declaration, *several) if is_a(one, "gym", "Space")), None)


def old_space_advice(space: Any) -> str:
    """The part of a message that describes a space of OpenAI's gym, and what to do."""
    return (
        f"{space!s:.200}, a space of OpenAI's gym ({type_name(space)}), and not of Gymnasium. "
        "Let the simulator import its spaces from there (from gymnasium import spaces), or convert them in its "
        "constructor, such as gymnasium.spaces.Box(old.low, old.high, old.shape, old.dtype)"
    )


def spaces_by_agent(declaration: Any) -> dict[AgentID, Space[Any]]:
    """The spaces in a `spaces.Dict` or mapping keyed by agent; empty for anything else."""
    entries = declaration.items() if isinstance(declaration, Mapping) else ()
    return {agent: space for agent, space in entries if isinstance(space, Space)}


def spaces_of(agents: Iterable[AgentID], lookup: Callable[[AgentID], Any], name: str = "") -> dict[AgentID, Space[Any]]:
    """The spaces that a simulator's own method returns for these agents, without agents that have none.

    `name` is the method's name in errors; by default the function's name.
    """
    of_agents = {}
    method = name or getattr(lookup, "__name__", "space")
    for agent in agents:
        try:
            space = lookup(agent)
        except (KeyError, NotImplementedError):  # raised by base classes for an agent without a space
            continue
        except Exception as error:
            raise LookupFailed(f"{method}({agent!r})", error) from error
        if isinstance(space, Space):
            of_agents[agent] = space
        elif old_space(space) is not None:
            raise NotAnEnvironment(f"{method}({agent!r}) returned {old_space_advice(old_space(space))}")
    return of_agents


def vector_reward_spaces(source: Any, agents: Sequence[AgentID]) -> dict[AgentID, Space[Any]]:
    """The reward spaces of the agents whose rewards are vectors; `docs/values.md` lists how simulators declare them."""
    if any(is_wrapped(source, wrapper) for wrapper in _SCALARISING_WRAPPERS):
        return {}
    declaration = declared(source, "reward_space", _ABSENT)
    if declaration is _ABSENT:  # not None, which a wrapper that returns numbers declares
        declaration = declared(source, "reward_spaces")
    of_agents: Mapping[AgentID, Any] = spaces_by_agent(declaration)
    if isinstance(declaration, Space) and not isinstance(declaration, Mapping):
        of_agents = dict.fromkeys(agents, declaration)
    elif callable(declaration):
        of_agents = spaces_of(agents, declaration)
    in_order = ((agent, of_agents.get(agent)) for agent in agents)
    return {agent: space for agent, space in in_order if type(space) is spaces.Box and space.shape}


def declared_state_space(source: Any) -> Space[Any] | None:
    """The space of the global state, if states are arrays or numbers, which can be stacked."""
    space = declared(source, "state_space")
    is_array = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    return space if is_array and method(source, "state") is not None else None
