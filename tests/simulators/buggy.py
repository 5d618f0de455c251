"""Simulators with one bug each, for `marl-parallel check`; `Healthy` has none.

The command line loads them as `path/to/buggy.py:Name`, so this file imports nothing of the tests.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces


class Healthy(pettingzoo.ParallelEnv):
    """Two agents observe random numbers for ten steps."""

    metadata = {"name": "healthy_v0", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords
        self.possible_agents = ["agent_0", "agent_1"]
        self.agents: list[str] = []
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(-1.0, 1.0, (4,), np.float32))
        self.action_spaces = {agent: spaces.Discrete(3) for agent in self.possible_agents}
        self.rng = np.random.default_rng()

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = self.possible_agents.copy()
        self.time = 0
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self):
        return {agent: self.number(self.rng.uniform(-1, 1, 4)).astype(np.float32) for agent in self.agents}

    def number(self, drawn):
        return drawn

    def step(self, actions):
        self.time += 1
        agents, over = self.agents, self.time == 10
        observations = self.observe()
        rewards = {agent: float(actions[agent]) for agent in agents}
        if over:
            self.agents = []
        return (
            observations,
            rewards,
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            {agent: {} for agent in agents},
        )


class WrongShape(Healthy):
    def observe(self):
        return {agent: observation[:3] for agent, observation in super().observe().items()}


class WrongDtype(Healthy):
    def observe(self):
        return {agent: observation.astype(np.float64) for agent, observation in super().observe().items()}


class OutOfBounds(Healthy):
    def number(self, drawn):
        return drawn + 5.0


class NotANumber(Healthy):
    def number(self, drawn):
        return drawn * np.nan


class RewardOfNone(Healthy):
    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards), *rest


class FlagsOfNone(Healthy):
    def step(self, actions):
        observations, rewards, terminations, *rest = super().step(actions)
        return observations, rewards, dict.fromkeys(terminations), *rest


class Unreadable:
    """As a value of another library; it cannot be read as a number, as a flag or as an array, and has no `repr`."""

    shape = ()

    def __float__(self):
        raise ValueError("it has no value")

    __index__ = __bool__ = __repr__ = __float__

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("call detach() first")


class Returns(Healthy):
    """All agents get the same `value` in one of the five dicts of a step."""

    place, value = 0, Unreadable()

    def step(self, actions):
        dicts = [*super().step(actions)]
        dicts[self.place] = dict.fromkeys(dicts[self.place], self.value)
        return tuple(dicts)


class UnreadableObservation(Returns):
    place = 0


class UnreadableReward(Returns):
    place = 1


class UnreadableFlag(Returns):
    place = 2


class SeveralFlags(Returns):
    place, value = 3, np.zeros(2, np.bool_)


class WrongShapeInDict(Healthy):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        eyes = spaces.Tuple((spaces.Discrete(2), self.observation_spaces["agent_0"]))
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Dict(eyes=eyes))

    def observe(self):
        return {agent: {"eyes": (1, observation[:3])} for agent, observation in super().observe().items()}


class UnpicklableInfo(Healthy):
    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {agent: {"lock": threading.Lock()} for agent in infos}


class ArrayAsInfo(Healthy):
    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {agent: np.ones(2) for agent in infos}


class CollisionError(Exception):
    """Fails to unpickle: its constructor has more arguments than its text."""

    def __init__(self, agent: str, speed: float) -> None:
        super().__init__(f"{agent} at {speed}")


class UnpicklableException(Healthy):
    """Raises only for invalid actions."""

    def step(self, actions):
        for agent, action in actions.items():
            if not self.action_spaces[agent].contains(action):
                raise CollisionError(agent, 3.0)
        return super().step(actions)


unpicklable_constructor = functools.partial(Healthy, lock=threading.Lock())


class NotDeterministic(Healthy):
    """Creates its generator from system entropy, also with a seed."""

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng()
        return super().reset()


class GlobalGenerator(Healthy):
    def number(self, drawn):
        return np.full(4, random.random())


class SeedsGlobalGenerator(Healthy):
    """Deterministic by itself; in one process with others, all draw from one stream."""

    def reset(self, seed=None, options=None):
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed)

    def number(self, drawn):
        return np.full(4, np.random.random())


class TuplesAndLists(Healthy):
    """Observations are tuples, masks lists, vector rewards lists; all are what the spaces say."""

    def __init__(self) -> None:
        super().__init__()
        self.reward_spaces = dict.fromkeys(self.possible_agents, spaces.Box(-1.0, 1.0, (2,), np.float32))

    def reward_space(self, agent):
        return self.reward_spaces[agent]

    def reset(self, seed=None, options=None):
        observations, _ = super().reset(seed)
        return observations, self.infos()

    def observe(self):
        return {agent: tuple(seen.tolist()) for agent, seen in super().observe().items()}

    def infos(self):
        return {agent: {"action_mask": [1, 1, 0]} for agent in self.agents}

    def step(self, actions):
        observations, rewards, *flags, _ = super().step(actions)
        return observations, {agent: [0.5, 0.5] for agent in rewards}, *flags, self.infos()


class SeedIgnored(Healthy):
    """All environments play the same episodes in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(0)
        return super().reset()


class NoSeed(Healthy):
    """The same, and `reset` takes no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def reset(self):
        return super().reset()


class SharedState(Healthy):
    """Environments of one process share a counter."""

    steps = 0

    def reset(self, seed=None, options=None):
        if seed is not None:
            SharedState.steps = 0
        return super().reset(seed)

    def step(self, actions):
        SharedState.steps += 1
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, float(SharedState.steps)), *rest


class LeavesAProcess(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(611)"])


class CrashesInReset(Healthy):
    def reset(self, seed=None, options=None):
        os.kill(os.getpid(), signal.SIGSEGV)


class ExitsInStep(Healthy):
    def step(self, actions):
        os._exit(0)


class AbortsAtNonsense(Healthy):
    def step(self, actions):
        if not all(self.action_spaces[agent].contains(action) for agent, action in actions.items()):
            os.abort()
        return super().step(actions)


class RaisesInStep(Healthy):
    def step(self, actions):
        raise CollisionError("agent_0", 7.0)


class HangsInStep(Healthy):
    def step(self, actions):
        while True:
            time.sleep(0.1)


class HangsInConstructor(Healthy):
    def __init__(self) -> None:
        time.sleep(600)


class FourValues(Healthy):
    """The old Gym API."""

    def step(self, actions):
        observations, rewards, terminations, _, infos = super().step(actions)
        return observations, rewards, terminations, infos


class DeadAgentsStay(Healthy):
    """Violates PettingZoo's rules: truncated agents stay in `agents`."""

    def step(self, actions):
        result = super().step(actions)
        self.agents = self.possible_agents.copy()
        return result


class NoLastObservation(Healthy):
    """An episode has one step, which truncates the agents and has no observation of them."""

    def step(self, actions):
        self.time = 9
        return {}, *super().step(actions)[1:]


class NoActionSpace(Healthy):
    def __init__(self) -> None:
        super().__init__()
        del self.action_spaces["agent_1"]


class PropertyRaises(Healthy):
    @property
    def state_space(self) -> Any:
        return self.mispelled


class NoObservationSpaces(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spaces = {}


class Slow(gymnasium.Env):
    """Dict rules, with `__all__` only at the end of an episode; waits a known time."""

    possible_agents = ["agent_0"]  # noqa: RUF012
    observation_space = spaces.Dict(agent_0=spaces.Discrete(2))
    action_space = spaces.Dict(agent_0=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        time.sleep(20e-3)
        self.time = 0
        return {"agent_0": 0}, {}

    def step(self, actions):
        time.sleep(2e-3)
        self.time += 1
        over = {"__all__": True} if self.time == 5 else {}
        return {"agent_0": 1}, {"agent_0": 0.0}, {"agent_0": False, **over}, {"agent_0": False}, {}


def nothing() -> None:
    """A constructor without `return`."""


class Single(gymnasium.Env):
    """A Gymnasium environment with observations outside their space."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(1, 2.0, np.float32), {}

    def step(self, action):
        return np.full(1, 2.0, np.float32), 0.0, False, True, {}


class Masked(Healthy):
    """Its infos have action masks, as bools and as integers."""

    def reset(self, seed=None, options=None):
        return super().reset(seed)[0], self.masks()

    def step(self, actions):
        assert all(action != 1 for action in actions.values())
        return *super().step(actions)[:4], self.masks()

    def masks(self):
        allowed = {"agent_0": np.array([True, False, True]), "agent_1": np.array([1, 0, 1])}
        return {agent: {"action_mask": allowed[agent]} for agent in self.agents or self.possible_agents}


class UnusualInfos(gymnasium.Env):
    """The info under a key that is not an agent is an array; another info contains itself."""

    possible_agents = ["a", "b"]  # noqa: RUF012
    observation_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    action_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return dict.fromkeys("ab", 0), {}

    def step(self, actions):
        self.time += 1
        itself: dict[str, Any] = {}
        itself["me"] = itself
        over = {"__all__": self.time == 5}
        return dict.fromkeys("ab", 0), dict.fromkeys("ab", 0.0), over, over, {"field": np.ones(2), "a": {}, "b": itself}


class StepTakesNothing(Healthy):
    def step(self):
        return super().step({})


class Counts(Healthy):
    """Its constructor has every supported argument."""

    def __init__(self, seed, *, env_id, restarts) -> None:
        super().__init__()


class Slowly(Healthy):
    """Each call takes a while, but less than the limit."""

    def __init__(self) -> None:
        time.sleep(0.05)
        super().__init__()

    def step(self, actions):
        time.sleep(0.05)
        return super().step(actions)


class Starts(Healthy):
    """Starts a process in another session, which outlives its parent; writes its id to a file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(613)"], start_new_session=True)
        with open(file, "w") as pid_file:
            pid_file.write(str(self.child.pid))

    def step(self, actions):
        time.sleep(0.01)
        return super().step(actions)

    def close(self):
        self.child.kill()
        self.child.wait()
