"""Any simulator becomes a `MultiAgentEnv`: here it is recognised and handed to the adapter of its kind.

What a `MultiAgentEnv` is, is written in `protocol.py`; how one kind becomes one, in the module of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv  # type: ignore[import-untyped]

from marl_parallel.adapters import attributes
from marl_parallel.adapters.agents import InvalidAgents, check_agents
from marl_parallel.adapters.base import NotAnEnvironment, type_name
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.mlagents import MLAgentsEnv, is_mlagents_env
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv, adapt_aec
from marl_parallel.adapters.protocol import AgentID, Dicts, MultiAgentEnv, Rules
from marl_parallel.adapters.rllib import RLlibEnv, is_rllib_env

__all__ = [
    "ADAPTERS",
    "AgentID",
    "Dicts",
    "InvalidAgents",
    "MultiAgentEnv",
    "NotAnEnvironment",
    "Rules",
    "adapt",
    "adapter_function",
    "attributes",
]

AdapterFunction: TypeAlias = Callable[[Any], MultiAgentEnv]

ADAPTERS: dict[str, AdapterFunction] = {
    "dict": DictEnv,
    "pettingzoo": PettingZooEnv,
    "aec": adapt_aec,
    "gymnasium": GymnasiumEnv,
    "rllib": RLlibEnv,
    "mlagents": MLAgentsEnv,
}


def adapt(env: Any, adapter: str | AdapterFunction | None = None) -> MultiAgentEnv:
    """Bring a simulator behind the interface that the runtime is written against.

    Args:
        env: The simulator, as its constructor returned it.
        adapter: None to recognise its kind, the name of a kind, or a class or function that makes a
            `MultiAgentEnv` of the simulator.

    Returns:
        The adapted simulator; itself where it is a `MultiAgentEnv` and no adapter was asked for.

    Raises:
        TypeError: It is no environment of a known kind, or lacks the methods of the kind that was named, or
            the adapter made something other than a `MultiAgentEnv` of it.
        ValueError: No adapter has that name, or agents have names that cannot be used (`InvalidAgents`).

    Example:
        >>> adapted = adapt(gymnasium.make("CartPole-v1"))
        >>> adapted.possible_agents, adapted.rules
        (['agent_0'], <Rules.PETTINGZOO: 'pettingzoo'>)
    """
    make = adapter_function(adapter)
    if env is None:
        raise NotAnEnvironment("The environment constructor returned None; does it lack a `return`?")
    if isinstance(env, type):
        raise NotAnEnvironment(
            f"The environment constructor returned the class {env.__qualname__}, not an instance of it."
        )
    adapted = make(env)
    if not isinstance(adapted, MultiAgentEnv):
        raise NotAnEnvironment(f"The adapter {make!r} must return a MultiAgentEnv; it returned {type_name(adapted)}.")
    check_agents(adapted.possible_agents or adapted.observation_spaces, type_name(env))
    if not hasattr(adapted, "source"):
        adapted.source = adapted
    return adapted


def adapter_function(adapter: str | AdapterFunction | None) -> AdapterFunction:
    """What makes a `MultiAgentEnv` of a simulator: found by name, or as it was given; None recognises its kind.

    Raises:
        ValueError: No adapter has that name.
        TypeError: It is neither a name nor a callable.
    """
    if adapter is None:
        return _recognise
    if isinstance(adapter, str):
        if adapter not in ADAPTERS:
            raise ValueError(f"No adapter is named {adapter!r}; there are {', '.join(map(repr, ADAPTERS))}.")
        return ADAPTERS[adapter]
    if callable(adapter):
        return adapter
    raise TypeError(f"`adapter` must be None, a name or a callable; it is of type {type_name(adapter)}.")


def _recognise(env: Any) -> MultiAgentEnv:
    if isinstance(env, MultiAgentEnv):
        return env
    if is_rllib_env(env):
        return RLlibEnv(env)
    if is_mlagents_env(env):
        return MLAgentsEnv(env)
    if isinstance(env, AECEnv):
        return adapt_aec(env)
    if isinstance(env, ParallelEnv):
        return PettingZooEnv(env)
    if isinstance(env, gymnasium.Env):
        return DictEnv(env) if _hosts_several_agents(env) else GymnasiumEnv(env)
    return _recognise_by_methods(env)


def _hosts_several_agents(env: gymnasium.Env[Any, Any]) -> bool:
    if attributes.declared(env, "possible_agents") is not None:
        return True
    observation_space = attributes.declared(env, "observation_space")
    action_space = attributes.declared(env, "action_space")
    return (
        isinstance(observation_space, spaces.Dict)
        and isinstance(action_space, spaces.Dict)
        and observation_space.keys() == action_space.keys()
    )


def _recognise_by_methods(env: Any) -> MultiAgentEnv:
    missing = [name for name in ("reset", "step") if not callable(attributes.declared(env, name))]
    if missing:
        hint = " It can be called: did a constructor return another constructor?" if callable(env) else ""
        raise NotAnEnvironment(
            "Looked for a PettingZoo ParallelEnv or AECEnv, a gymnasium.Env, an RLlib MultiAgentEnv, an ML-Agents "
            f"BaseEnv, or any object with methods `reset` and `step`; came upon {type_name(env)} without "
            f"`{'` and `'.join(missing)}`.{hint}"
        )
    space = attributes.declared(env, "observation_space")
    if callable(space):  # a method that is asked for each agent's, as only PettingZoo has it
        return PettingZooEnv(env)
    is_of_one_agent = isinstance(space, spaces.Space) and not isinstance(space, spaces.Dict)
    if is_of_one_agent and attributes.declared(env, "possible_agents") is None:
        raise NotAnEnvironment(
            f"{type_name(env)} looks like a single-agent environment: its observation_space, {space}, "
            "is no Dict keyed by agent. Make it a subclass of gymnasium.Env, or let it declare "
            "`possible_agents` if there are several."
        )
    return DictEnv(env)
