"""Recognise the kind of a simulator, and adapt it to a `MultiAgentEnv`.

`protocol.py` has the `MultiAgentEnv` and what all adapters share, `attributes.py` looks up what simulators declare, and
each kind has a module of its own. `docs/environments.md` explains how a kind is recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv  # type: ignore[import-untyped]

from marl_parallel.adapters import attributes
from marl_parallel.adapters.attributes import AgentID, LookupFailed, declared, length_of, type_name
from marl_parallel.adapters.dict_env import DictEnv, ListActionsEnv, RLlibEnv
from marl_parallel.adapters.forms import mappo_way
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.mappo_env import MAPPOEnv, is_mappo
from marl_parallel.adapters.mlagents import MLAgentsEnv
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv, TurnBasedAECEnv, adapt_aec, is_tianshous
from marl_parallel.adapters.protocol import (
    AdapterMismatch,
    Dicts,
    GroupSpaces,
    InvalidAgents,
    MultiAgentEnv,
    NotAnEnvironment,
    Rules,
    Schema,
    check_agents,
    choices,
)
from marl_parallel.adapters.pymarl_env import PyMARLEnv, is_pymarl
from marl_parallel.adapters.tianshou_env import TianshouEnv
from marl_parallel.adapters.tuple_env import TupleEnv

__all__ = [
    "ADAPTERS", "AdapterMismatch", "AgentID", "Dicts", "GroupSpaces", "InvalidAgents", "LookupFailed", "MultiAgentEnv",
    "NotAnEnvironment", "Rules", "Schema", "adapt", "adapter_function", "attributes", "check_agents",
]  # fmt: skip

AdapterFunction: TypeAlias = Callable[[Any], MultiAgentEnv]

ADAPTERS: dict[str, AdapterFunction] = {
    "dict": DictEnv,
    "pettingzoo": PettingZooEnv,
    "aec": adapt_aec,
    "aec-turn-based": TurnBasedAECEnv,
    "gymnasium": GymnasiumEnv,
    "tuple": TupleEnv,
    "rllib": RLlibEnv,
    "mlagents": MLAgentsEnv,
    "pymarl": PyMARLEnv,
    "mappo": MAPPOEnv,
    "tianshou": TianshouEnv,
}


def adapt(env: Any, adapter: str | AdapterFunction | None = None) -> MultiAgentEnv:
    """Adapt a simulator to a `MultiAgentEnv`; a `MultiAgentEnv` is returned unchanged.

    Args:
        env: The simulator, as its constructor returned it.
        adapter: The name of the simulator's kind, or a class or function that adapts it; None recognises the kind.

    Raises:
        TypeError: The simulator is not of a known kind, lacks methods of the kind that `adapter` names, or the adapter
            did not return a `MultiAgentEnv`.
        ValueError: No adapter has the name `adapter`, or the names of agents cannot be used (`InvalidAgents`).

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
    """The adapter with this name, or the callable itself; for None, the function that recognises a simulator's kind."""
    if isinstance(adapter, str):
        if adapter not in ADAPTERS:
            raise ValueError(f"No adapter is named {adapter!r}; there are {', '.join(map(repr, ADAPTERS))}.")
        return ADAPTERS[adapter]
    if adapter is None or callable(adapter):
        return adapter or _recognise
    raise TypeError(f"`adapter` must be None, a name or a callable; it is of type {type_name(adapter)}.")


def _recognise(env: Any) -> MultiAgentEnv:
    if isinstance(env, MultiAgentEnv):
        return env
    if attributes.is_a(env, "ray.rllib", "MultiAgentEnv"):
        return RLlibEnv(env)
    if attributes.is_a(env, "mlagents_envs.base_env", "BaseEnv"):
        return MLAgentsEnv(env)
    if is_tianshous(env):
        return TianshouEnv(env)
    if isinstance(env, AECEnv):
        return adapt_aec(env)
    if isinstance(env, ParallelEnv):
        return PettingZooEnv(env)
    if is_mappo(env):  # some of these have PyMARL's methods, too
        return MAPPOEnv(env)
    if is_pymarl(env):
        return PyMARLEnv(env)
    if isinstance(env, gymnasium.Env):
        return _recognise_by_spaces(env) or GymnasiumEnv(env)
    if missing := [name for name in ("reset", "step") if attributes.method(env, name) is None]:
        hint = " It can be called: did a constructor return another constructor?" if callable(env) else ""
        raise NotAnEnvironment(
            "Looked for a PettingZoo ParallelEnv or AECEnv, a gymnasium.Env, an RLlib MultiAgentEnv, an ML-Agents "
            "BaseEnv, a PyMARL MultiAgentEnv, an environment of MAPPO or HARL, or any object with methods "
            f"`reset` and `step`; got {type_name(env)} without "
            f"`{'` and `'.join(missing)}`.{hint}"
        )
    if attributes.is_a(env, "gym", "Env"):
        if declared(env, "possible_agents") is not None or attributes.agent_names(env):
            return DictEnv(env)
        lists = all(length_of(declared(env, f"{what}_space")) for what in ("observation", "action"))
        listed = (
            f"It has lists of spaces, as simulators of MAPPO: {mappo_way(env)}. Else convert" if lists else "Convert"
        )
        raise NotAnEnvironment(
            f"{type_name(env)} is an environment of OpenAI's gym, whose API differs from Gymnasium's. {listed} it with "
            "Shimmy (shimmy.GymV26CompatibilityV0(env=env), or GymV21CompatibilityV0 for gym before 0.26), "
            f"or, if its `step` returns five values, pass {choices(env)}."
        )
    space = declared(env, "observation_space")
    if callable(space):  # a method that takes an agent, which only PettingZoo has
        return PettingZooEnv(env)
    if adapted := _recognise_by_spaces(env):
        return adapted
    if isinstance(space, spaces.Space) and not isinstance(space, spaces.Dict):
        raise NotAnEnvironment(
            f"{type_name(env)} looks like a single-agent environment: its observation_space, {space}, "
            "is not a Dict keyed by agent. Make it a subclass of gymnasium.Env, or let it declare "
            "`possible_agents` if there are several."
        )
    return DictEnv(env)


def _recognise_by_spaces(env: Any) -> MultiAgentEnv | None:
    """The adapter of an environment that declares several agents by their names or spaces; None for any other."""
    observation_space, action_space = declared(env, "observation_space"), declared(env, "action_space")
    keys, names = _keys_of(observation_space), attributes.agent_names(env)
    several = (
        declared(env, "possible_agents") is not None
        or (keys and keys == _keys_of(action_space))
        or (names and _may_be_of(names, observation_space) and _may_be_of(names, action_space))
    )
    if several or (keys and action_space is None):
        if attributes.is_wrapped(env, ("vmas.simulator.environment.gym.base", "BaseGymWrapper")):
            return ListActionsEnv(env)
        return DictEnv(env, certain=bool(several) or attributes.number_of_agents(env) == len(keys))
    return TupleEnv(env) if _is_of_tuples(env, observation_space, action_space) else None


def _keys_of(space: Any) -> set[Any]:
    return {*space.spaces} if isinstance(space, spaces.Dict) else set()


def _may_be_of(names: list[AgentID], space: Any) -> bool:
    """Whether a space is keyed by some of these agents; also True without a space, which rules nothing out."""
    return not isinstance(space, spaces.Space) or (bool(keys := _keys_of(space)) and keys <= {*names})


def _is_of_tuples(env: Any, observation_space: Any, action_space: Any) -> bool:
    """Whether spaces and number of agents fit a tuple environment; raises `NotAnEnvironment` if they contradict."""
    number = attributes.number_of_agents(env)
    observations, actions = length_of(observation_space), length_of(action_space)
    if observations is not None and observations == actions:
        if number not in (None, observations):
            raise NotAnEnvironment(
                f"{type_name(env)} declares {number} agents, but its spaces are Tuples of {observations}. "
                'Pass adapter="gymnasium" if these are the spaces of one agent, or adapter="tuple" if each agent has '
                "such a space."
            )
        return True
    one_each = isinstance(observation_space, spaces.Space) and isinstance(action_space, spaces.Space)
    if one_each and all((space.shape or ())[:1] == (number,) for space in (observation_space, action_space)):
        return False  # one array for all agents: a single agent controls them
    return (number is not None and number in (observations, actions)) or (one_each and (number or 1) > 1)
