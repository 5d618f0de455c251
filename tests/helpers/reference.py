"""The reference: a plain loop with the results that the package must have; it shares no code with the package.

Section 2 of the design in straightforward code on native environments: no workers, no memory, no speed. The
environments are in `deterministic`, the comparison in `comparison`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from pettingzoo import AECEnv
from pettingzoo import ParallelEnv as PettingZooEnv
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
from simulators.tuple_envs import Foraging

Constructor = Callable[..., Any]
TUPLE_AGENTS = ["agent_0", "agent_1", "agent_2"]


def cast(space: gymnasium.Space[Any] | None, value: Any) -> Any:
    """A deep copy of `value` whose arrays have the dtypes of `space`."""
    if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete) and value is not None:
        return np.array(value, dtype=space.dtype)
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {key: cast(space[key], item) for key, item in value.items()}
    if isinstance(space, spaces.Tuple) and isinstance(value, tuple):
        return tuple(cast(one, item) for one, item in zip(space.spaces, value, strict=True))
    return copy.deepcopy(value)


def keywords_of(function: Constructor, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The `offered` arguments that the signature of `function` names."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: offered[p.name] for p in parameters if p.name in offered and p.kind in by_keyword}


class ReferenceEnv:
    """One environment with the design's semantics of a step."""

    def __init__(self, constructor: Constructor, index: int, seed: int, mode: AutoresetMode) -> None:
        self.mode = mode
        self.first_seed: int | None = seed
        self.env = constructor(**keywords_of(constructor, {"seed": seed, "env_id": index}))
        self.turn_based = False
        if isinstance(self.env, AECEnv):
            self.turn_based = not self.env.metadata.get("is_parallelizable", False)
            self.env = (turn_based_aec_to_parallel if self.turn_based else aec_to_parallel)(self.env)
        is_dict = isinstance(getattr(self.env, "observation_space", None), spaces.Dict)
        declares = hasattr(self.env, "possible_agents") or is_dict
        self.tuples = isinstance(self.env, Foraging)
        self.single = isinstance(self.env, gymnasium.Env) and not declares and not self.tuples
        self.dict_rules = not self.single and not isinstance(self.env, PettingZooEnv)
        self.observations: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        self.dead: set[Any] = set()
        self.flags = (False, False)

    def space(self, which: str, agent: Any) -> gymnasium.Space[Any] | None:
        """The observation or action space of an agent; None if it declares none."""
        declared = getattr(self.env, which)
        if self.tuples:
            return declared[TUPLE_AGENTS.index(agent)] if isinstance(declared, spaces.Tuple) else declared
        if self.single:
            return declared
        if self.dict_rules:
            return declared[agent] if declared is not None and agent in declared.keys() else None  # noqa: SIM118
        return declared(agent)

    @property
    def over(self) -> bool:
        return any(self.flags)

    @property
    def acting(self) -> list[Any]:
        """The agents that act next."""
        if self.turn_based:
            return [self.env.aec_env.agent_selection] if self.env.agents else []
        return [agent for agent in self.observations if agent in self.seen - self.dead]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Start an episode; the first one uses the environment's own seed unless another is passed."""
        offered = {"seed": self.first_seed if seed is None else seed, "options": copy.deepcopy(options)}
        self.first_seed = None
        passed = {key: value for key, value in offered.items() if value is not None}
        observations, infos = self.env.reset(**keywords_of(self.env.reset, passed))
        if self.single:
            observations, infos = {"agent_0": observations}, {"agent_0": infos}
        if self.tuples:
            observations, infos = dict(zip(TUPLE_AGENTS, observations, strict=True)), tuple_infos(infos)
        if self.turn_based:
            turn = self.env.aec_env.agent_selection
            infos = {agent: {**info, "active_agent": turn} for agent, info in infos.items()}
        self.flags, self.dead = (False, False), set()
        self.observations = self.observed(observations)
        self.seen = set(observations)
        return copy.deepcopy(self.observations), copy.deepcopy(infos)

    def observed(self, observations: Mapping[Any, Any]) -> dict[Any, Any]:
        return {a: cast(self.space("observation_space", a), value) for a, value in observations.items()}

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """One step, with the mode's handling of episode ends."""
        if self.over and self.mode is AutoresetMode.NEXT_STEP:
            observations, infos = self.reset()
            unfinished = {**dict.fromkeys(observations, False), "__all__": False}
            return observations, dict.fromkeys(observations, 0.0), unfinished, dict(unfinished), infos
        if self.over and self.mode is AutoresetMode.DISABLED and (self.tuples or not self.dict_rules):
            self.observations = {}
            return {}, {}, {"__all__": self.flags[0]}, {"__all__": self.flags[1]}, {}
        observations, rewards, terminateds, truncateds, infos = self.native_step(actions)
        if self.over and self.mode is AutoresetMode.SAME_STEP:
            final_observations = observations
            observations, reset_infos = self.reset()
            for agent, value in final_observations.items():
                infos.setdefault(agent, {}).setdefault("final_obs", value)
            for agent, info in reset_infos.items():
                if info:
                    infos.setdefault(agent, {}).setdefault("reset_info", info)
        return observations, rewards, terminateds, truncateds, infos

    def cast_vector(self, agent: Any, reward: Any) -> Any:
        """A vector reward gets the declared dtype."""
        space_of = getattr(getattr(self.env, "aec_env", self.env), "reward_space", None)
        if isinstance(reward, np.ndarray) and reward.ndim and callable(space_of):
            return reward.astype(space_of(agent).dtype)
        return reward

    def native_step(self, actions: Mapping[Any, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """One step of the environment itself, with `__all__` by its rules."""
        passed = actions if self.dict_rules else {agent: actions[agent] for agent in self.acting}
        passed = {agent: cast(self.space("action_space", agent), action) for agent, action in passed.items()}
        alive_before = self.seen - self.dead
        results = (
            self.tuple_step(passed) if self.tuples else self.env.step(passed["agent_0"] if self.single else passed)
        )
        if self.single:
            results = tuple({"agent_0": result} for result in results)
        if len(results) == 4:
            results = (*results, {})
        observations, *others = results
        rewards, terminateds, truncateds, infos = (
            {agent: copy.deepcopy(value) for agent, value in result.items()} for result in others
        )
        rewards = {agent: self.cast_vector(agent, reward) for agent, reward in rewards.items()}
        self.observations = self.observed(observations)
        self.seen |= {*observations, *rewards, *terminateds, *truncateds} - {"__all__"}
        flagged = {agent for flags in (terminateds, truncateds) for agent in flags if flags[agent]}
        there = self.observations.keys() if self.single or self.dict_rules else self.env.agents
        self.dead -= self.observations.keys() & {*there} - flagged  # those that have come back
        self.dead |= flagged
        if self.tuples:
            ended, cut_off = ([bool(flag) for flag in flags.values()] for flags in (terminateds, truncateds))
            over = all(one or other for one, other in zip(ended, cut_off, strict=True))
            terminateds["__all__"] = over and all(ended)
            truncateds["__all__"] = over and (all(cut_off) or not all(ended))
        elif self.dict_rules:
            terminateds.setdefault("__all__", False)
            truncateds.setdefault("__all__", False)
        else:
            over = not (self.seen - self.dead) if self.single else not self.env.agents
            terminated = over and all(terminateds.get(agent, False) for agent in alive_before)
            terminateds["__all__"], truncateds["__all__"] = bool(terminated), bool(over and not terminated)
        self.flags = bool(terminateds["__all__"]), bool(truncateds["__all__"])
        return copy.deepcopy(self.observations), rewards, terminateds, truncateds, infos

    def tuple_step(self, passed: Mapping[Any, Any]) -> tuple[dict, ...]:
        """One step of a tuple environment: a finished agent without an action gets 0, which does nothing."""
        actions = [passed.get(agent, 0) for agent in TUPLE_AGENTS]
        sequence = tuple if isinstance(self.env.action_space, spaces.Tuple) else list
        *results, infos = self.env.step(sequence(actions))
        shared = [None if isinstance(result, list | tuple | np.ndarray) else [result] * 3 for result in results]
        each = [dict(zip(TUPLE_AGENTS, result if one is None else one)) for result, one in zip(results, shared)]
        return (*each, tuple_infos(infos))


def tuple_infos(infos: Any) -> dict[str, Any]:
    """Infos of a tuple environment: one for each agent, or one for all."""
    if isinstance(infos, list):
        return dict(zip(TUPLE_AGENTS, infos, strict=True))
    return {**{agent: {} for agent in TUPLE_AGENTS}, **({"__common__": infos} if infos else {})}


class Reference:
    """The reference of `ParallelEnv(constructors, mode, seed)`."""

    def __init__(self, constructors: Sequence[Constructor], mode: AutoresetMode, seed: int) -> None:
        self.copies = [ReferenceEnv(make, index, seed + index, mode) for index, make in enumerate(constructors)]

    @property
    def acting(self) -> tuple[list[Any], ...]:
        return tuple(one.acting for one in self.copies)

    def chosen(self, env_ids: Sequence[int] | None) -> list[ReferenceEnv]:
        return self.copies if env_ids is None else [self.copies[index] for index in env_ids]

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> tuple[tuple[Any, ...], ...]:
        chosen = self.chosen(env_ids)
        if seed is None or isinstance(seed, int):
            places = range(len(self.copies)) if env_ids is None else env_ids
            seeds = [None if seed is None else seed + index for index in places]
        else:
            seeds = list(seed)
        return tuple(zip(*(one.reset(s, options) for one, s in zip(chosen, seeds, strict=True)), strict=True))

    def step(
        self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int] | None = None
    ) -> tuple[tuple[Any, ...], ...]:
        chosen = self.chosen(env_ids)
        return tuple(zip(*(one.step(a) for one, a in zip(chosen, actions, strict=True)), strict=True))

    def close(self) -> None:
        for one in self.copies:
            one.env.close()
