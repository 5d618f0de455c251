"""Scenarios: simulators with their policies, recorded with the reference.

A `Scenario` has constructors and a policy; `record` plays it once with `reference.Reference` and records calls and
results, so that every setup of the package can repeat them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from simulators.deterministic import Hunt, Recycler, Relay, Skirmish
from simulators.every_space import EverySpace, draw
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.teams import PettingZooTeam, Team, names
from simulators.tuple_envs import Cooperative, Foraging, Intersection, Pathfinding

from helpers.comparison import assert_same
from helpers.reference import TUPLE_AGENTS, Reference, ReferenceEnv

NUM_ENVS = 4
SEED = 42
Policy = Callable[[ReferenceEnv, np.random.Generator], dict[Any, Any]]


class Scenario(NamedTuple):
    """Four environments of a simulator, and their policy.

    Attributes:
        name: The name in test ids.
        constructors: One per environment.
        policy: Returns the actions of one environment.
        steps: The number of steps.
    """

    name: str
    constructors: list[Callable[..., Any]]
    policy: Policy
    steps: int


class Event(NamedTuple):
    """One recorded call with the reference's result.

    Attributes:
        method: "reset" or "step".
        arguments: The keywords of the call.
        result: The result.
        acting: The agents that act next; None in place of a list if the design does not define them.
    """

    method: str
    arguments: dict[str, Any]
    result: tuple[tuple[Any, ...], ...]
    acting: tuple[list[Any] | None, ...]


def random_actions(copy: ReferenceEnv, rng: np.random.Generator) -> dict[Any, Any]:
    """An action for every acting agent, sometimes also for others."""
    agents = list(copy.acting)
    if copy.tuples and rng.random() < 0.3:
        agents = list(TUPLE_AGENTS)
    elif not copy.single and not copy.dict_rules and rng.random() < 0.3:
        agents = list(copy.env.possible_agents)
    actions = {}
    for agent in agents:
        space = copy.space("action_space", agent)
        actions[agent] = draw(space, rng) if space is not None else ["north", None, 3][int(rng.integers(3))]
    return actions


def legal_actions(copy: ReferenceEnv, rng: np.random.Generator) -> dict[Any, Any]:
    """Actions that the mask allows; nonsense for the agent whose turn it is not."""
    actions = dict.fromkeys(copy.env.possible_agents, 0)
    for agent in copy.acting:
        allowed = np.flatnonzero(copy.observations[agent]["action_mask"])
        actions[agent] = int(rng.choice(allowed))
    return actions


def walk_into_borders(copy: ReferenceEnv, rng: np.random.Generator) -> dict[Any, Any]:
    """Knights and archers walk into the border one after the other."""
    return {agent: int(rng.choice(6, p=[0.05, 0.9, 0.03, 0.02, 0.0, 0.0])) for agent in copy.acting}


def imported(name: str, **keywords: Any) -> list[Callable[..., Any]]:
    """Constructors of an environment named as `module:attribute`."""
    module, _, attribute = name.partition(":")
    make = getattr(importlib.import_module(module), attribute or "parallel_env")
    return [functools.partial(make, **keywords)] * NUM_ENVS


TUPLES = ["intersection", "pathfinding"]
RETURNING = ["returning", "returning_corpses", "returning_zoo", "returning_ghosts"]
TEAMS = ["teams", "teams_zoo"]
SYNTHETIC = ["skirmish", "relay", "hunt", "recycler", "zoo", *RETURNING, *TUPLES, *TEAMS]


def teams(kind: Callable[..., Any], **arguments: Any) -> list[Callable[..., Any]]:
    """Environments with different agents: some have no common one, and one names them in another order."""
    return [
        functools.partial(kind, names(0, 1, 2), 9, dies="agent_1", **arguments),
        functools.partial(kind, names(1, 0), 5, **arguments),
        functools.partial(kind, names(3), 7, **arguments),
        functools.partial(kind, names(2, 4, 1), 8, dies="agent_4", **arguments),
    ]


@functools.cache
def scenario(name: str) -> Scenario:
    """The scenario of that name: one of `SYNTHETIC` or `REAL`."""
    knights = "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies"
    makers: dict[str, Callable[[], list[Callable[..., Any]]]] = {
        "skirmish": lambda: [Skirmish] * NUM_ENVS,
        "relay": lambda: [Relay] * NUM_ENVS,
        "hunt": lambda: [Hunt] * NUM_ENVS,
        "recycler": lambda: [Recycler] * NUM_ENVS,
        "foraging": lambda: [Foraging] * NUM_ENVS,
        "intersection": lambda: [Intersection] * NUM_ENVS,
        "cooperative": lambda: [Cooperative] * NUM_ENVS,
        "pathfinding": lambda: [Pathfinding] * NUM_ENVS,
        "zoo": lambda: [EverySpace] * NUM_ENVS,
        "returning": lambda: [ReturningAgents] * NUM_ENVS,
        "returning_corpses": lambda: [functools.partial(ReturningAgents, corpses=True)] * NUM_ENVS,
        "returning_zoo": lambda: [ReturningPettingZooAgents] * NUM_ENVS,
        "returning_ghosts": lambda: [functools.partial(ReturningPettingZooAgents, ghosts=True)] * NUM_ENVS,
        "teams": lambda: teams(Team, returns=True),
        "teams_zoo": lambda: teams(PettingZooTeam),
        "spread": lambda: imported("mpe2.simple_spread_v3", max_cycles=9),
        "spread_continuous": lambda: imported("mpe2.simple_spread_v3", max_cycles=9, continuous_actions=True),
        "adversary": lambda: imported("mpe2.simple_adversary_v3", max_cycles=7),
        "speaker_listener": lambda: imported("mpe2.simple_speaker_listener_v4", max_cycles=7),
        "multiwalker": lambda: imported("pettingzoo.sisl.multiwalker_v9", max_cycles=25),
        "pistonball": lambda: imported("pettingzoo.butterfly.pistonball_v6", max_cycles=3),
        "knights": lambda: imported(knights, line_death=True, max_cycles=150),
        "connect_four": lambda: imported("pettingzoo.classic.connect_four_v3:env"),
        "tictactoe": lambda: imported("pettingzoo.classic.tictactoe_v3:env"),
        "cartpole": lambda: [functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=30)] * NUM_ENVS,
    }
    policies = {"connect_four": legal_actions, "tictactoe": legal_actions, "knights": walk_into_borders}
    steps = {"pistonball": 4, "knights": 90, "zoo": 12, "recycler": 20, "relay": 20, **dict.fromkeys(TUPLES, 20)}
    return Scenario(name, makers[name](), policies.get(name, random_actions), steps.get(name, 50))


REAL = [
    *("spread", "spread_continuous", "adversary", "speaker_listener", "multiwalker", "pistonball", "knights"),
    *("connect_four", "tictactoe", "cartpole"),
]


@functools.cache
def record(name: str, mode: AutoresetMode) -> tuple[Event, ...]:
    """Play a scenario with the reference: whole batches, parts of batches in any order, resets in between."""
    chosen = scenario(name)
    rng = np.random.default_rng(7)
    reference = Reference(chosen.constructors, mode, SEED)
    events: list[Event] = []

    def call(method: str, **arguments: Any) -> None:
        result = getattr(reference, method)(**arguments)
        acting = tuple(None if one.dict_rules and one.over else one.acting for one in reference.copies)
        events.append(Event(method, arguments, result, acting))

    call("reset")
    for time in range(chosen.steps):
        env_ids = [2, 0] if time % 5 == 3 else None
        actions = [chosen.policy(one, rng) for one in reference.chosen(env_ids)]
        call("step", actions=actions, env_ids=env_ids)
        over = [index for index, one in enumerate(reference.copies) if one.over]
        if mode is AutoresetMode.DISABLED and over and time % 3 == 2:
            call("reset", env_ids=over[::-1])
        elif mode is AutoresetMode.NEXT_STEP and 3 in over and time % 2:
            call("reset", env_ids=[3])
    call("reset", seed=1000, env_ids=[3, 1])
    actions = [chosen.policy(one, rng) for one in reference.copies]
    call("step", actions=actions)
    reference.close()
    return tuple(events)


def play(env: Any, reference: Reference, steps: int = 9) -> None:
    """Step both with the same random actions, and compare what they return."""
    rng = np.random.default_rng(3)
    assert_same(env.reset(), reference.reset())
    for _ in range(steps):
        actions = [random_actions(one, rng) for one in reference.copies]
        assert_same(env.step(actions), reference.step(actions))
