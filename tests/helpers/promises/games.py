"""Scripted games: a table says who lives when, and all numbers follow from the actions.

Three agents have equal spaces. An observation is `[agent, identity, episode, time, total]`: the agent's number from 1;
`100 * env_id + restarts`; the episode from 1; the time in it; and the sum of all actions so far, each times the number
of its agent. Rewards are `total + agent / 4`; as vectors, `[total / 2, agent]`, which `WEIGHTS` make the same number.
All of these are exact in float32.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo import ParallelEnv as PettingZooEnv

AGENTS = ["agent_0", "agent_1", "agent_2"]
ACTIONS = 3
VIEW = spaces.Box(-np.inf, np.inf, (5,), np.float32)
MASKED_VIEW = spaces.Dict(action_mask=spaces.Box(0, 1, (ACTIONS,), np.int8), observation=VIEW)
TERMINATED, TRUNCATED = "terminated", "truncated"
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)
WEIGHTS = (2.0, 0.25)


class Life(NamedTuple):
    """A life of an agent in an episode.

    Attributes:
        begins: The time of its first observation.
        ends: The time of its last one; None for the end of the episode.
        how: The flag that its end sets; None for a life that ends with the episode, without a flag of its own.
    """

    begins: int = 0
    ends: int | None = None
    how: str | None = None


class Script(NamedTuple):
    """A game. Every second episode is one step longer, and so is each life in it, so that environments differ.

    Attributes:
        rules: "pettingzoo", where an episode ends when no agent is left; "dicts", which have `__all__`; or "turns", a
            PettingZoo AEC game.
        length: The number of steps of the first episode of environment 0.
        end: The flag of the environment at its end, under the rules of dicts.
        lives: By agent; by default, one life, which lasts as long as the episode.
        corpses: Whether dead agents stay in the dicts, with their flag.
        one_observes: Whether only one agent observes at a time, in turn.
        infos: Whether there are infos: of some agents at some times, nested, of the environment, and of resets.
        masks: Where action masks are: "observations", "infos", or None.
        vectors: Whether rewards are vectors, as `reward_space` declares.
    """

    rules: str = "pettingzoo"
    length: int = 3
    end: str = TRUNCATED
    lives: dict[str, list[Life]] = {}  # noqa: RUF012
    corpses: bool = False
    one_observes: bool = False
    infos: bool = False
    masks: str | None = None
    vectors: bool = False


def team(how: str) -> list[Life]:
    """A life to the end of the episode, with a flag of its own there."""
    return [Life(0, None, how)]


GAMES: dict[str, Script] = {
    "all_live": Script(lives=dict.fromkeys(AGENTS, team(TRUNCATED)), infos=True),
    "all_win": Script(lives=dict.fromkeys(AGENTS, team(TERMINATED)), length=2),
    "agents_die": Script(
        lives={
            "agent_0": [Life(0, 1, TERMINATED)], "agent_1": [Life(0, 2, TRUNCATED)], "agent_2": team(TERMINATED),
        },
        length=4, infos=True,
    ),
    "dict_end": Script("dicts", end=TERMINATED, infos=True),
    "agents_join": Script(
        "dicts",
        lives={"agent_0": team(TERMINATED), "agent_1": [Life(1, 2, TRUNCATED)], "agent_2": [Life(2)]},
        length=4, infos=True,
    ),
    "corpses": Script(
        "dicts",
        lives={"agent_0": [Life(0, 1, TERMINATED)], "agent_1": [Life(0, 2, TRUNCATED)]},
        length=4, corpses=True,
    ),
    "agents_return": Script(
        "dicts",
        lives={
            "agent_0": [Life(0, 1, TERMINATED), Life(2, 3, TRUNCATED), Life(5)],
            "agent_1": [Life(0, 2, TRUNCATED), Life(5, None, TERMINATED)],
            "agent_2": [Life(0, 4, TERMINATED)],
        },
        length=6,
    ),
    "corpses_return": Script(
        "dicts",
        lives={
            "agent_0": [Life(0, 1, TERMINATED), Life(3)],
            "agent_1": [Life(0, 2, TRUNCATED), Life(3, 4, TERMINATED), Life(5)],
        },
        length=5, corpses=True,
    ),
    "nobody_for_a_step": Script(
        "dicts",
        lives={agent: [Life(0, 1, TERMINATED), Life(3, None, how)] for agent, how in
               zip(AGENTS, (TERMINATED, TRUNCATED, None))},
        length=4,
    ),
    "listed_again": Script(
        lives={
            "agent_0": [Life(0, 1, TERMINATED), Life(3, None, TRUNCATED)],
            "agent_1": [Life(0, 2, TRUNCATED)], "agent_2": team(TRUNCATED),
        },
        length=4,
    ),
    "one_observes": Script("dicts", length=5, one_observes=True),
    "turns": Script("turns", lives={**dict.fromkeys(AGENTS, team(TERMINATED))}, length=5),
    "masks": Script(lives=dict.fromkeys(AGENTS, team(TRUNCATED)), masks="observations"),
    "masks_in_infos": Script(lives=dict.fromkeys(AGENTS, team(TRUNCATED)), masks="infos"),
    "masks_of_the_dead": Script(
        lives={"agent_0": [Life(0, 1, TERMINATED)], "agent_1": team(TRUNCATED), "agent_2": team(TERMINATED)},
        masks="observations",
    ),
}  # fmt: skip
"""What can happen to agents, by name."""


OPEN = threading.Event()
"""Simulators wait until it is set, as it is unless a test says otherwise."""
OPEN.set()


class Broken(Exception):
    """The fault of a game."""


class Fault(NamedTuple):
    """When the first simulator of environment 1 breaks.

    Attributes:
        method: "step" or "reset".
        episode: In which episode, from 1.
        time: At which time, for a step.
        how: "raise", or the name of a signal that kills its process.
        twice: Whether the second simulator breaks, too, in its first step.
    """

    method: str = "step"
    episode: int = 1
    time: int = 2
    how: str = "raise"
    twice: bool = False


class Game:
    """The game of a script, without an interface: `begin` and `advance` return dicts by agent."""

    def __init__(self, script: Script, fault: Fault | None, env_id: int, restarts: int) -> None:
        self.script, self.env_id, self.restarts = script, env_id, restarts
        faults = {0: fault, 1: Fault(time=1) if fault and fault.twice else None}
        self.fault = faults.get(restarts) if env_id == 1 else None
        self.episode = self.time = self.total = 0

    @property
    def shift(self) -> int:
        return (self.env_id + self.episode + 1) % 2

    @property
    def length(self) -> int:
        return self.script.length + self.shift

    def lives(self, agent: str) -> list[tuple[int, int, str | None]]:
        """When each of its lives begins and ends in this episode, and how."""
        shift = self.shift
        return [
            (life.begins and life.begins + shift, self.length if life.ends is None else life.ends + shift, life.how)
            for life in self.script.lives.get(agent, [Life()])
        ]

    def is_alive(self, agent: str) -> bool:
        return any(begins <= self.time <= ends for begins, ends, _ in self.lives(agent))

    def was_alive(self, agent: str) -> bool:
        return any(begins <= self.time for begins, _, _ in self.lives(agent))

    def ending(self, agent: str) -> str | None:
        """The flag of a life that ends now."""
        return next((how for _, ends, how in self.lives(agent) if ends == self.time), None)

    def may_break(self, method: str) -> None:
        OPEN.wait()
        fault = self.fault
        if fault is None or (fault.method, fault.episode) != (method, self.episode):
            return
        if method == "reset" or fault.time == self.time:
            if fault.how != "raise":
                os.kill(os.getpid(), getattr(signal, fault.how))
            raise Broken("the game is broken")

    def begin(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.episode, self.time, self.total = self.episode + 1, 0, 0
        self.may_break("reset")
        infos: dict[str, Any] = self.masks_in_infos()
        if self.script.infos:
            infos["agent_0"] = {**infos.get("agent_0", {}), "episode": self.episode}
        return self.observations(), infos

    def advance(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self.time += 1
        self.may_break("step")
        self.total += sum((AGENTS.index(agent) + 1) * int(action) for agent, action in actions.items())
        observations = self.observations()
        flags: list[dict[str, bool]] = [{}, {}]
        for agent in observations if not self.script.one_observes else AGENTS:
            how = self.ending(agent)
            if not self.is_alive(agent):  # a corpse
                how = [how for _, ends, how in self.lives(agent) if ends < self.time][-1]
            for of_kind, kind in zip(flags, (TERMINATED, TRUNCATED)):
                of_kind[agent] = how == kind
        rewards = {agent: self.reward(AGENTS.index(agent) + 1) for agent in flags[0]}
        return observations, rewards, *flags, self.infos([*flags[0]])

    def reward(self, number: int) -> Any:
        return np.array([self.total / 2, number], np.float32) if self.script.vectors else self.total + number / 4

    def observations(self) -> dict[str, Any]:
        agents = [agent for agent in AGENTS if self.is_alive(agent) or (self.script.corpses and self.was_alive(agent))]
        if self.script.one_observes:
            agents = [AGENTS[self.time % 3]]
        return {agent: self.view(agent) for agent in agents}

    def view(self, agent: str) -> Any:
        identity = 100 * self.env_id + self.restarts
        seen = np.array([AGENTS.index(agent) + 1, identity, self.episode, self.time, self.total], np.float32)
        return {"observation": seen, "action_mask": self.mask(agent)} if self.script.masks == "observations" else seen

    def mask(self, agent: str) -> np.ndarray:
        place = AGENTS.index(agent)
        return np.array([self.time % 2, (self.time + place) % 2, 1], np.int8)

    def masks_in_infos(self) -> dict[str, Any]:
        if self.script.masks != "infos":
            return {}
        return {agent: {"action_mask": self.mask(agent)} for agent in AGENTS if self.is_alive(agent)}

    def infos(self, agents: list[str]) -> dict[str, Any]:
        infos = self.masks_in_infos()
        if not self.script.infos:
            return infos
        for place, agent in enumerate(agents):
            if (self.time + place) % 2:
                infos[agent] = {"time": self.time, "word": agent * self.time, "deep": {"total": float(self.total)}}
        if self.time % 2 and self.script.rules == "dicts":
            infos["__common__"] = {"weather": self.time}
        return infos

    def state(self) -> np.ndarray:
        return np.array([self.episode, self.time, self.total], np.float32)


VIEWS = {"observations": MASKED_VIEW}


class Watched:
    """What the simulators of all rules have beside their interface."""

    game: Game
    render_mode = "rgb_array"
    mark = 0.0
    latest: tuple[Any, Any] = (None, None)
    """The seed and the options of the latest reset."""

    def times(self, factor: float) -> float:
        OPEN.wait()
        return factor * self.mark

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), 10 * self.game.env_id + self.game.time, np.uint8)


class PettingZooGame(Watched, PettingZooEnv):
    """Under PettingZoo's rules; the game ends when no agent is left."""

    metadata = {"name": "game"}  # noqa: RUF012
    possible_agents = AGENTS
    state_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, script: Script, fault: Fault | None = None, env_id: int = 0, restarts: int = 0) -> None:
        self.game, self.agents = Game(script, fault, env_id, restarts), []
        self.seen = VIEWS.get(script.masks or "", VIEW)
        if script.vectors:
            self.reward_space = lambda agent: VECTOR

    def observation_space(self, agent: str) -> Any:
        return self.seen

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(ACTIONS)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.latest = seed, options
        observations, infos = self.game.begin()
        self.agents = [*observations]
        return observations, {agent: infos.get(agent, {}) for agent in observations}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert actions.keys() == {*self.agents}, f"{[*actions]} act, but {self.agents} are to act"
        observations, rewards, terminateds, truncateds, infos = self.game.advance(actions)
        self.agents = [a for a in observations if not (terminateds[a] or truncateds[a])]
        return observations, rewards, terminateds, truncateds, {agent: infos.get(agent, {}) for agent in observations}

    def state(self) -> np.ndarray:
        return self.game.state()


class DictGame(Watched, gymnasium.Env):
    """Under the rules of dicts, with `__all__`."""

    def __init__(self, script: Script, fault: Fault | None = None, env_id: int = 0, restarts: int = 0) -> None:
        self.game = Game(script, fault, env_id, restarts)
        self.possible_agents, self.agents = AGENTS[:], AGENTS[:]
        seen = VIEWS.get(script.masks or "", VIEW)
        self.observation_space = spaces.Dict(dict.fromkeys(AGENTS, seen))
        self.action_space = spaces.Dict({agent: spaces.Discrete(ACTIONS) for agent in AGENTS})
        if script.vectors:
            self.reward_space = spaces.Dict(dict.fromkeys(AGENTS, VECTOR))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.latest = seed, options
        return self.game.begin()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, truncateds, infos = self.game.advance(actions)
        is_over = self.game.time == self.game.length
        for flags, kind in ((terminateds, TERMINATED), (truncateds, TRUNCATED)):
            flags["__all__"] = is_over and self.game.script.end == kind
        return observations, rewards, terminateds, truncateds, infos


class TurnGame(Watched, AECEnv):
    """A turn-based game; all agents end with it."""

    metadata = {"name": "turns", "render_modes": []}  # noqa: RUF012
    possible_agents = AGENTS

    def __init__(self, script: Script, fault: Fault | None = None, env_id: int = 0, restarts: int = 0) -> None:
        super().__init__()
        self.game = Game(script, fault, env_id, restarts)
        self.agents, self.agent_selection = [], AGENTS[0]

    def observation_space(self, agent: str) -> Any:
        return VIEW

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(ACTIONS)

    def reset(self, seed: int | None = None, options: dict | None = None) -> None:
        self.game.begin()
        self.agents = AGENTS[:]
        self.agent_selection = AGENTS[0]
        self.rewards = dict.fromkeys(AGENTS, 0.0)
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.terminations, self.truncations = dict.fromkeys(AGENTS, False), dict.fromkeys(AGENTS, False)
        self.infos: dict[str, dict] = {agent: {} for agent in AGENTS}

    def observe(self, agent: str) -> Any:
        return self.game.view(agent)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        _, rewards, self.terminations, self.truncations, _ = self.game.advance({agent: action})
        self._cumulative_rewards[agent] = 0.0
        self.rewards = rewards
        self.agent_selection = AGENTS[self.game.time % 3]
        self._accumulate_rewards()


class TeamGame(Watched):
    """PyMARL's interface: one reward for all, masks, a state, and the flag `episode_limit` where it is truncated."""

    def __init__(self, script: Script, fault: Fault | None = None, env_id: int = 0, restarts: int = 0) -> None:
        self.game = Game(script, fault, env_id, restarts)
        self.n_agents, self.episode_limit = len(AGENTS), script.length + 1

    def reset(self) -> None:
        self.game.begin()

    def step(self, actions: Any) -> tuple[float, bool, dict[str, Any]]:
        game = self.game
        game.advance(dict(zip(AGENTS, actions)))
        info = {"episode_limit": True} if game.time == game.length and game.script.end == TRUNCATED else {}
        return float(game.total), game.time == game.length, {**info, "time": game.time} if game.time % 2 else info

    def get_obs(self) -> Any:
        return [self.game.view(agent) for agent in AGENTS]

    def get_state(self) -> Any:
        return self.game.state()

    def get_avail_actions(self) -> Any:
        return [self.game.mask(agent).tolist() for agent in AGENTS]

    def get_total_actions(self) -> int:
        return ACTIONS

    def get_env_info(self) -> dict[str, Any]:
        sizes = {"state_shape": 3, "obs_shape": 5, "n_actions": ACTIONS}
        return {**sizes, "n_agents": self.n_agents, "episode_limit": self.episode_limit}

    def close(self) -> None:
        """Frees nothing."""


KINDS: dict[str, Any] = {"pettingzoo": PettingZooGame, "dicts": DictGame, "turns": TurnGame, "team": TeamGame}


def make(script: Script, fault: Fault | None = None) -> Callable[..., Any]:
    """A constructor of the games of a script, for a `ParallelEnv`."""

    def constructor(env_id: int = 0, restarts: int = 0) -> Any:
        return KINDS[script.rules](script, fault, env_id, restarts)

    return constructor
