"""`Arena`, an ML-Agents `BaseEnv` in Python, and its steps in plain dicts.

Its agents join and leave like Unity's: each of four behaviours requests decisions at its own pace, ends, and starts
again with another id, with the same id, or not at all. The Unity side of the protocol is in `unity_player`.
"""

from __future__ import annotations

import os
import random
import struct
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.reference import Constructor, Reference, ReferenceEnv
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel

from marl_parallel.adapters.mlagents import MLAgentsEnv, behavior_of

CHASER, OTHER_TEAM, MINER, PILOT = "Chaser?team=0", "Chaser?team=1", "Miner?team=0", "Pilot"
PARAMETERS, ENGINE = "534c891e-810f-11ea-a9d0-822485860400", "e951342c-4f7e-11ea-b238-784f4387d1f7"
TIME_SCALE = 2


def observation(*shape: int) -> ObservationSpec:
    properties = (DimensionProperty.UNSPECIFIED,) * len(shape)
    return ObservationSpec(shape, properties, ObservationType.DEFAULT, "sensor")


SPECS = {
    CHASER: BehaviorSpec([observation(4)], ActionSpec(2, ())),
    OTHER_TEAM: BehaviorSpec([observation(4)], ActionSpec(2, ())),
    MINER: BehaviorSpec([observation(2, 3, 3), observation(2)], ActionSpec(0, (3, 2))),
    PILOT: BehaviorSpec([observation(3)], ActionSpec(1, (4,))),
}
_MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
each_mode = pytest.mark.parametrize("mode", _MODES, ids=lambda mode: mode.name)
MAX_STEPS = 20
FIRST = (CHASER, CHASER, OTHER_TEAM, MINER, MINER, PILOT)

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
ACTION_SPACES = {
    CHASER: BOX,
    OTHER_TEAM: BOX,
    MINER: spaces.MultiDiscrete([3, 2]),
    PILOT: spaces.Tuple([spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Discrete(4)]),
}
OBSERVATION_SPACES = {
    CHASER: spaces.Box(-np.inf, np.inf, (4,), np.float32),
    OTHER_TEAM: spaces.Box(-np.inf, np.inf, (4,), np.float32),
    MINER: spaces.Tuple([spaces.Box(-np.inf, np.inf, shape, np.float32) for shape in ((2, 3, 3), (2,))]),
    PILOT: spaces.Box(-np.inf, np.inf, (3,), np.float32),
}


def told_through(channels: bytes) -> dict[str, float]:
    """The values set by side channel messages: environment parameters by name, and `time_scale`."""
    results, place = {}, 0
    while place < len(channels):
        channel = str(uuid.UUID(bytes_le=channels[place : place + 16]))
        (length,) = struct.unpack_from("<i", channels, place + 16)
        message = channels[place + 20 : place + 20 + length]
        place += 20 + length
        if channel == PARAMETERS:
            (size,) = struct.unpack_from("<i", message)
            kind, value = struct.unpack_from("<if", message, 4 + size)
            assert kind == 0, "a float"
            results[message[4 : 4 + size].decode()] = value
        elif channel == ENGINE and struct.unpack_from("<i", message) == (TIME_SCALE,):
            (results["time_scale"],) = struct.unpack_from("<f", message, 4)
    return results


class Arena(BaseEnv):
    """A `BaseEnv` whose every number depends on its seed, its parameters and its actions.

    Args:
        seed: The seed of its generator.
        channels: Side channels; like Unity, it reads them in its next reset or step.
        same_id: Whether agents that start again at once keep their id.
        breaks: The number of steps before it fails; None for never.
        fault: "raise" or "exit".

    Attributes:
        parameters: The values set through side channels.
        last_actions: The actions of the last step, by behaviour.
    """

    def __init__(
        self,
        seed: int = 0,
        channels: Sequence[Any] = (),
        same_id: bool = False,
        breaks: int | None = None,
        fault: str = "raise",
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._channels, self._same_id, self._breaks, self._fault = channels, same_id, breaks, fault
        self._steps_left = breaks
        self._ids = 0
        self._behaviors: dict[int, str] = {}
        self._ages: dict[int, int] = {}
        self._places: dict[int, float] = {}
        self._told: dict[str, tuple[DecisionSteps, TerminalSteps]] = {}
        self.parameters: dict[str, float] = {}
        self.last_actions: dict[str, ActionTuple] = {}
        self.time, self.resets = 0, 0

    @property
    def behavior_specs(self) -> dict[str, BehaviorSpec]:
        return SPECS if self.resets else {}

    def reset(self) -> None:
        self._read_channels()
        self.resets += 1
        self.time = 0
        self._behaviors, self._ages, self._places, self.last_actions = {}, {}, {}, {}
        for behavior in FIRST:
            self._join(behavior)
        self._tell({}, [*self._behaviors])

    def step(self) -> None:
        self._read_channels()
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                if self._fault == "exit":
                    os._exit(9)
                raise ArithmeticError("the arena breaks")
        self._act()
        self.time += 1
        ended: dict[int, tuple[str, bool]] = {}
        asking = []
        for agent in [*self._behaviors]:
            behavior = self._behaviors[agent]
            self._ages[agent] += 1
            lasting = 5 if behavior == MINER else 7 + agent % 3
            if self._ages[agent] >= lasting or self.time == 13:  # at 13, all agents end and none requests a decision
                ended[agent] = behavior, bool(self._rng.random() < 0.4)
                if self.time != 13:
                    asking += self._succeed(agent)
            elif self._ages[agent] % (2 if behavior == PILOT else 1) == 0 and self.time != 13:
                asking.append(agent)
        if self.time in (4, 15):
            asking += [self._join(CHASER), self._join(MINER), self._join(PILOT)]
        self._tell(ended, asking)
        for agent in ended:
            if agent not in asking:
                del self._behaviors[agent], self._ages[agent], self._places[agent]

    def _succeed(self, agent: int) -> list[int]:
        """The agent that requests a decision at once in place of an agent that ends."""
        if self._behaviors[agent] == OTHER_TEAM:
            return []
        if not self._same_id:
            return [self._join(self._behaviors[agent])]
        self._ages[agent] = 0
        return [agent]

    def _join(self, behavior: str) -> int:
        agent = self._ids
        self._ids += 1
        self._behaviors[agent], self._ages[agent], self._places[agent] = behavior, 0, float(self._rng.random())
        return agent

    def _act(self) -> None:
        wind = self.parameters.get("wind", 0.0) * self.parameters.get("time_scale", 1.0)
        for behavior, action in self.last_actions.items():
            requesting = self._told[behavior][0].agent_id
            assert action.continuous.shape == (len(requesting), SPECS[behavior].action_spec.continuous_size)
            assert action.discrete.shape == (len(requesting), SPECS[behavior].action_spec.discrete_size)
            for row, agent in enumerate(requesting):
                weights = [*action.continuous[row].tolist(), *action.discrete[row].tolist()]
                push = sum((place + 1) * weight for place, weight in enumerate(weights))
                self._places[int(agent)] += push + wind
        self.last_actions = {}

    def _tell(self, ended: dict[int, tuple[str, bool]], asking: Sequence[int]) -> None:
        self._told = {}
        for behavior, spec in SPECS.items():
            over = [agent for agent, (its, _) in ended.items() if its == behavior]
            # Unity promises no order.
            ask = [int(a) for a in self._rng.permutation([a for a in asking if self._behaviors[a] == behavior])]
            branches = spec.action_spec.discrete_branches
            masks = [self._rng.random((len(ask), n)) < 0.3 for n in branches] if branches else None
            for mask in masks or []:
                mask[:, 0] = False
            decisions = DecisionSteps(
                self._seen(spec, ask), self._paid(ask), np.array(ask, np.int32), masks, *self._groups(ask)
            )
            terminals = TerminalSteps(
                self._seen(spec, over, 100.0),
                self._paid(over) - 1,
                np.array([ended[agent][1] for agent in over], bool),
                np.array(over, np.int32),
                *self._groups(over),
            )
            self._told[behavior] = decisions, terminals

    def _seen(self, spec: BehaviorSpec, agents: Sequence[int], offset: float = 0.0) -> list[np.ndarray]:
        batches = [np.zeros((len(agents), *one.shape), np.float32) for one in spec.observation_specs]
        for batch in batches:
            for row, agent in enumerate(agents):
                batch[row] = np.arange(batch[row].size).reshape(batch[row].shape) + self._places[agent] + offset
        return batches

    def _paid(self, agents: Sequence[int]) -> np.ndarray:
        return np.array([self._places[agent] + self.time for agent in agents], np.float32)

    def _groups(self, agents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([agent % 3 for agent in agents], np.int32), np.full(len(agents), self.time / 4, np.float32)

    def _read_channels(self) -> None:
        for channel in self._channels:
            for message in channel.message_queue:
                self.hear(channel.channel_id.bytes_le + struct.pack("<i", len(message)) + bytes(message))
            channel.message_queue = []

    def hear(self, messages: bytes) -> None:
        self.parameters.update(told_through(messages))

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        self.last_actions[behavior_name] = action

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        raise NotImplementedError

    def get_steps(self, behavior_name: str) -> tuple[DecisionSteps, TerminalSteps]:
        return self._told[behavior_name]

    def close(self) -> None:
        self._told = {}


class BareCopy(ReferenceEnv):
    """The bare `BaseEnv` in the reference's loop: one agent at a time, as in ML-Agents' documentation."""

    def __init__(self, constructor: Constructor, index: int, seed: int, mode: AutoresetMode, max_steps: int) -> None:
        self.mode = mode
        self.turn_based = self.dict_rules = self.single = self.tuples = False
        self.env, self.max_steps = constructor(seed), max_steps
        self.env.reset()
        self.observations: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        self.dead: set[Any] = set()
        self.flags = (False, False)

    def reset(self, seed: int | None = None, options: dict[str, float] | None = None) -> tuple[dict, dict]:
        self.env.parameters.update(options or {})
        self.env.reset()
        observations, infos = {}, {}
        for behavior in SPECS:
            decisions, _ = self.env.get_steps(behavior)
            for number in decisions:
                agent = f"{behavior}?agent_id={number}"
                observations[agent], infos[agent] = seen(decisions[number]), info_of(behavior, decisions[number])
        self.flags, self.seen, self.dead = (False, False), {*observations}, set()
        self.observations = observations
        return dict(observations), infos

    def native_step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        for behavior, spec in SPECS.items():
            numbers = [*self.env.get_steps(behavior)[0]]
            continuous = np.zeros((len(numbers), spec.action_spec.continuous_size), np.float32)
            discrete = np.zeros((len(numbers), len(spec.action_spec.discrete_branches)), np.int32)
            for row, number in enumerate(numbers):
                action = actions[f"{behavior}?agent_id={number}"]
                if behavior == PILOT:
                    continuous[row], discrete[row] = action[0], action[1]
                else:
                    (discrete if behavior == MINER else continuous)[row] = action
            if numbers:
                self.env.set_actions(behavior, ActionTuple(continuous, discrete))
        self.env.step()
        results: tuple[dict, dict, dict, dict, dict] = ({}, {}, {}, {}, {})
        observations, rewards, terminateds, truncateds, infos = results
        over = self.env.time == self.max_steps
        for behavior in SPECS:
            decisions, terminals = self.env.get_steps(behavior)
            for number in terminals:
                agent, step = f"{behavior}?agent_id={number}", terminals[number]
                observations[agent], rewards[agent] = seen(step), step.reward
                terminateds[agent], truncateds[agent] = not step.interrupted, bool(step.interrupted)
                infos[agent] = info_of(behavior, step)
                self.dead.add(agent)
            for number in decisions:
                agent, step = f"{behavior}?agent_id={number}", decisions[number]
                if agent in terminateds and over:
                    continue  # it will not act in its new life
                if agent in terminateds:
                    infos[agent]["final_obs"] = observations[agent]
                    infos[agent]["reset_info"] = info_of(behavior, step)
                else:
                    rewards[agent], terminateds[agent], truncateds[agent] = step.reward, False, False
                    infos[agent] = info_of(behavior, step)
                observations[agent] = seen(step)
                self.seen.add(agent)
                self.dead.discard(agent)
        if over:
            for agent in self.seen - self.dead:
                if not (terminateds.get(agent) or truncateds.get(agent)):
                    terminateds[agent], truncateds[agent] = False, True
            self.dead |= self.seen
        self.flags = False, over
        terminateds["__all__"], truncateds["__all__"] = self.flags
        self.observations = observations
        return dict(observations), rewards, terminateds, truncateds, infos


def seen(step: Any) -> Any:
    return step.obs[0] if len(step.obs) == 1 else tuple(step.obs)


def info_of(behavior: str, step: Any) -> dict[str, Any]:
    info = {"group_id": int(step.group_id), "group_reward": step.group_reward}
    if getattr(step, "action_mask", None) is not None:
        allowed = [(~mask).astype(np.int8) for mask in step.action_mask]
        info["action_mask"] = (None, allowed[0]) if behavior == PILOT else tuple(allowed)
    return info


class BareReference(Reference):
    """As `Reference`, for `BaseEnv`s made by `constructor(seed)`."""

    def __init__(self, constructor: Constructor, count: int, mode: AutoresetMode, max_steps: int, seed: int = 42):
        self.copies = [BareCopy(constructor, index, seed + index, mode, max_steps) for index in range(count)]


def arena(seed: int, same_id: bool = False, max_steps: int | None = MAX_STEPS) -> MLAgentsEnv:
    parameters = EnvironmentParametersChannel()
    return MLAgentsEnv(Arena(seed, [parameters], same_id), parameters=parameters, max_steps=max_steps)


def action_for(agent: str, rng: random.Random) -> Any:
    behavior = behavior_of(agent)
    if behavior == MINER:
        return np.array([rng.randrange(3), rng.randrange(2)])
    if behavior == PILOT:
        return np.array([rng.uniform(-1, 1)]), rng.randrange(4)
    return np.array([rng.uniform(-1, 1), rng.uniform(-1, 1)], np.float32)


def actions_for(acting: Any, rng: random.Random) -> list[dict[str, Any]]:
    return [{agent: action_for(agent, rng) for agent in agents} for agents in acting]
