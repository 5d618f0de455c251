"""The environment that simulated workers step: its observations say who they are of, and it stops at points.

At a point, `SimulatedWorker.point` decides whether it goes on, raises, dies or hangs. What it has done is noted in its
`Life`, from which the model computes what the caller must receive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import greenlet
import numpy as np
from gymnasium import spaces

from marl_parallel import MultiAgentEnv, Rules

if TYPE_CHECKING:
    from simulation.backend import SimulatedWorker

AGENTS = ["a", "b"]
_SAVED = (
    "seed", "restarts", "shown", "episodes", "steps", "early", "mark", "begun", "current_seed", "seeding", "actions",
    "last_episode",
)  # fmt: skip
ALL = "__all__"
POINTS = (
    "constructor", "reset", "step", "reset-end", "step-end", "writing", "close", "call", "reply", "early", "sent",
    "save", "load",
)  # fmt: skip
"""Where an environment stops, or its worker afterwards.

The `-end` points are where its state has changed and it has not returned yet. A reply that is sent ahead of the one for
all environments stops before it ("early") and after it ("sent").
"""
AFTER_CALLS = frozenset({"writing", "reply", "early", "sent"})
"""The points at which the environment has returned."""


class SimulatedError(Exception):
    """What an environment raises."""


class Did(NamedTuple):
    """A reset or step from which an environment has returned."""

    what: str  # "reset" or "step"
    observations: dict[str, Any]
    rewards: dict[str, float]
    terminateds: dict[str, bool]
    truncateds: dict[str, bool]
    infos: dict[str, Any]
    action: int | None = None
    unreadable: bool = False  # whether its infos cannot be unpickled
    option: int = 0  # of a reset
    turn: str = ""  # the only agent who acts next; empty if all do

    @property
    def over(self) -> bool:
        return self.terminateds[ALL] or self.truncateds[ALL]

    @property
    def alive(self) -> list[str]:
        ended = {agent for flags in self[3:5] for agent, flag in flags.items() if flag}
        return [agent for agent in self.observations if agent not in ended]


@dataclass(eq=False)
class Life:
    """One environment from its constructor on, also if this has raised."""

    env_id: int
    number: int  # of those with this env id, from 1
    worker: SimulatedWorker
    origin: str  # the name of the request that has constructed it
    seed: int  # as the constructor got it, and how often it had been constructed again
    restarts: int
    episodes: int = 0
    steps: int = 0  # in the present episode
    did: list[Did] = field(default_factory=list)  # what no delivered result has reported
    early: list[Did] = field(default_factory=list)  # a reset that no caller has asked for
    mark: int = 0  # an attribute that callers set
    points: int = 0
    raised: str = ""  # the point at which it has raised last
    begun: bool = False  # whether it has an episode that its caller knows of, or will
    current_seed: int = 0  # the last one that its caller has passed, or that of the constructor
    seeding: tuple[int, int] = (0, 0)  # that of the last reset with a seed, and how many have followed without
    actions: list[int] = field(default_factory=list)  # of the present episode
    last_episode: tuple[list[int], tuple[int, int]] = ([], (0, 0))  # the actions and the `seeding` of the one before
    shown: tuple[int, int] = (0, 0)  # the env id and the number in its observations: those of the life that was saved
    closes: int = 0  # how often it has been closed
    loaded: tuple[int, int] | None = None  # the episode and its steps, as a saved one has been loaded into it

    def __post_init__(self) -> None:
        self.current_seed, self.seeding = self.seed, (self.seed, 0)
        self.shown = self.env_id, self.number

    def __reduce__(self) -> Any:
        raise TypeError("a life cannot be pickled")

    @property
    def saved(self) -> dict[str, Any]:
        """What belongs to a saved state, as a copy."""
        return _copied({name: getattr(self, name) for name in _SAVED})


class Saved(NamedTuple):
    """A saved environment; its pickle has only its number."""

    kind: type[SimulatedEnv]
    life: dict[str, Any]
    option: int
    length: int
    agents: list[str]


def _loaded(number: int) -> SimulatedEnv:
    """Make a saved environment again, where it is unpickled."""
    worker: SimulatedWorker = greenlet.getcurrent().worker  # type: ignore[attr-defined]
    saved, running = worker.backend.saved[number], worker.status.running
    assert running is not None
    env = saved.kind.__new__(saved.kind)
    env.source, env.life = env, worker.new_life(running.env_id, saved.life["seed"], saved.life["restarts"])
    env._set_agents(worker)
    worker.point("load", env.life)
    env.load(number)
    return env


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: [*value] if isinstance(value, list) else value for name, value in values.items()}


class LateValue:
    """An observation that is not an array yet: the conversion stops at a point, in the middle of writing a record."""

    def __init__(self, life: Life, values: Any) -> None:
        self._life, self._values = life, values
        self._error: Exception | None = None
        self._passed = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self._error is not None:  # compiled code has tried before
            raise self._error
        if not self._passed:
            try:
                self._life.worker.point("writing", self._life)
            except SimulatedError as error:
                self._error = error
                raise
            self._passed = True
        return self._values

    def __deepcopy__(self, memo: Any) -> LateValue:
        return self


@dataclass(frozen=True)
class Token:
    """A value in infos that only a pickle can have."""

    number: int


class Unreadable:
    """It can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _fail_to_unpickle, ()


def _is_unreadable(infos: dict[str, Any]) -> bool:
    return "value" in infos.get("a", {})


def _fail_to_unpickle() -> None:
    raise SimulatedError("a value that cannot be unpickled")


BOX = spaces.Box(-1e9, 1e9, (7,), np.float64)
DISCRETE = spaces.Discrete(10_000)


class SimulatedEnv(MultiAgentEnv):
    """Two agents, or with `differ` one or two; `b` ends before `a` in some episodes.

    An observation has the env id, the number of the life, of the episode and of the step, the agent's last action, the
    option of the reset, and the agent's place.
    """

    rules = Rules.PETTINGZOO
    possible_agents: ClassVar[list[Any]] = AGENTS
    observation_spaces: Any = MappingProxyType(dict.fromkeys(AGENTS, BOX))
    action_spaces: ClassVar[Any] = dict.fromkeys(AGENTS, DISCRETE)
    state_space = spaces.Box(-1e9, 1e9, (4,), np.float64)
    metadata: ClassVar[Any] = {}
    render_mode = "numbers"
    reset_keywords = frozenset({"seed", "options"})

    def __init__(self, env_id: int, seed: int, restarts: int) -> None:
        self.source = self
        worker: SimulatedWorker = greenlet.getcurrent().worker  # type: ignore[attr-defined]
        self.life = worker.new_life(env_id, seed, restarts)
        self._set_agents(worker)
        self.option, self.length, self.agents = 0, 0, list(self.possible_agents)
        worker.point("constructor", self.life)
        if worker.backend.differs(self.life):
            self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0.0, 1.0, (2,), np.float64))

    def _set_agents(self, worker: SimulatedWorker) -> None:
        place = self.life.env_id % 3 if worker.backend.differ else 0
        self.possible_agents = (AGENTS, ["a"], AGENTS[::-1])[place]  # type: ignore[misc]
        self.observation_spaces = dict.fromkeys(self.possible_agents, BOX)
        self.action_spaces = dict.fromkeys(self.possible_agents, DISCRETE)  # type: ignore[misc]

    @property
    def number(self) -> int:
        return self.life.shown[1]

    def __reduce__(self) -> Any:
        self.life.worker.point("save", self.life)
        return _loaded, (self.saved(),)

    def saved(self) -> int:
        """The number of its state in `SimulatedBackend.saved`."""
        states = self.life.worker.backend.saved
        states.append(Saved(type(self), self.life.saved, self.option, self.length, [*self.agents]))
        return len(states) - 1

    def load(self, number: int) -> None:
        saved = self.life.worker.backend.saved[number]
        vars(self.life).update(_copied(saved.life), did=[], loaded=(saved.life["episodes"], saved.life["steps"]))
        self.option, self.length, self.agents = saved.option, saved.length, [*saved.agents]

    def _observe(self, agents: list[str], actions: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Observations for the caller and for the model."""
        life = self.life
        known = {
            agent: np.array(
                [
                    *life.shown,
                    life.episodes,
                    life.steps,
                    actions.get(agent, -1),
                    self.option,
                    AGENTS.index(agent),
                ],
                np.float64,
            )
            for agent in agents
        }
        returned: dict[str, Any] = dict(known)
        if agents and life.worker.backend.writes_late(life):
            returned[agents[-1]] = LateValue(life, known[agents[-1]])
        return returned, known

    def _infos(self) -> dict[str, Any]:
        life = self.life
        kind = life.worker.backend.infos_of(life)
        if kind == "number":
            return {"a": {"steps": life.steps}}
        if kind == "text":
            return {"a": {"text": f"episode {life.episodes}", "list": [life.steps]}, "more": 1}
        if kind == "object":
            return {"a": {"object": Token(life.steps)}}
        if kind == "unreadable":
            return {"a": {"value": Unreadable()}}
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        try:
            return self._reset(seed, options)
        finally:
            self.life.worker.returns("reset")

    def _reset(self, seed: int | None, options: Any) -> Any:
        life = self.life
        life.worker.begins_reset(life, seed)
        life.worker.point("reset", life)
        self.option = (options or {}).get("option", 0)
        life.episodes, life.steps, self.agents = life.episodes + 1, 0, list(self.possible_agents)
        self.length = 2 + (life.shown[0] * 7 + life.episodes * 3 + life.shown[1]) % 4
        life.worker.point("reset-end", life)
        returned, known = self._observe(self.possible_agents, {})
        infos = self._infos()
        no = {**dict.fromkeys(self.possible_agents, False), ALL: False}
        did = Did("reset", known, dict.fromkeys(self.possible_agents, 0.0), no, no, infos, None, _is_unreadable(infos))
        life.did.append(did._replace(option=self.option, turn=self.turn() or ""))
        life.worker.phase = "returned"
        return returned, infos

    def step(self, actions: Any) -> Any:
        try:
            return self._step(actions)
        finally:
            self.life.worker.returns("step")

    def _step(self, actions: Any) -> Any:
        life = self.life
        life.begun = True
        life.actions.append(next((int(action) for action in actions.values()), -1))
        life.worker.point("step", life)
        life.steps += 1
        ends, leaves = self._ends(), life.episodes % 2 == 0 and life.steps == 2
        life.worker.point("step-end", life)
        agents = self._present(ends)
        returned, known = self._observe(agents, actions)
        is_cut = life.episodes % 3 == 0  # truncated, else terminated
        flags = {agent: ends or (leaves and agent == "b") for agent in agents} | {ALL: ends}
        no = dict.fromkeys(flags, False)
        terminateds, truncateds = (no, flags) if is_cut else (flags, no)
        rewards = {agent: life.steps + 10.0 * life.episodes + 0.5 * (agent == "b") for agent in agents}
        self.agents = [agent for agent in agents if not flags[agent]]
        infos = self._infos()
        action = next((int(action) for action in actions.values()), None)
        did = Did("step", known, rewards, terminateds, truncateds, infos, action, _is_unreadable(infos))
        life.did.append(did._replace(turn=self.turn() or ""))
        life.worker.phase = "returned"
        return returned, rewards, terminateds, truncateds, infos

    def where(self) -> tuple[int, int, int, int]:
        """The env id, the life, the episode and the step, for `call`."""
        life = self.life
        life.worker.point("call", life)
        return *life.shown, life.episodes, life.steps

    @property
    def mark(self) -> int:
        return self.life.mark

    @mark.setter
    def mark(self, value: int) -> None:
        self.life.worker.point("call", self.life)
        self.life.mark = value

    def agents_left(self) -> list[Any]:
        return self.agents

    def render(self) -> Any:
        return self.where()

    def state(self) -> Any:
        return np.array(self.where(), np.float64)

    def _ends(self) -> bool:
        return self.life.steps >= self.length

    def _present(self, ends: bool) -> list[str]:
        """The agents that a step returns."""
        return self.agents

    def close(self) -> None:
        self.life.closes += 1
        self.life.worker.point("close", self.life)


class SimulatedDictEnv(SimulatedEnv):
    """It is stepped on when its episode is over: two steps later, it begins another one by itself."""

    rules = Rules.DICT

    def _ends(self) -> bool:
        return self.life.steps >= self.length and (self.life.steps - self.length) % 5 < 2

    def _present(self, ends: bool) -> list[str]:
        if self.life.steps > self.length:
            self.agents = list(self.possible_agents)
        return self.agents


class SimulatedTurnEnv(SimulatedEnv):
    """One agent acts at a time."""

    def turn(self) -> Any:
        return self.agents[self.life.steps % len(self.agents)] if self.agents else None


class SavesItself(SimulatedEnv):
    """It cannot be pickled: a new one is constructed, and gets the state."""

    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")

    def get_state(self) -> int:
        self.life.worker.point("save", self.life)
        return self.saved()

    def set_state(self, number: int) -> None:
        life = self.life
        life.worker.point("load", life)
        constructed = {"seed": life.seed, "restarts": life.restarts}
        self.load(number)
        if constructed != {name: getattr(life, name) for name in constructed}:
            life.worker.backend.model.seeds.wrong.append(f"environment {life.env_id} is loaded with {constructed}")


KINDS = {"pettingzoo": SimulatedEnv, "dict": SimulatedDictEnv, "turns": SimulatedTurnEnv}
THAT_SAVE_THEMSELVES = {name: type(f"Saves{kind.__name__}", (SavesItself, kind), {}) for name, kind in KINDS.items()}
