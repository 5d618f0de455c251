"""A plain loop over one game: what happened in each reset and step, by the rules that all facades share.

It shares no code with the package. The rules are those of `docs/semantics.md`, written for one environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gymnasium.vector import AutoresetMode
from pettingzoo.utils.conversions import turn_based_aec_to_parallel

from helpers.promises.games import ACTIONS, AGENTS, Broken, Fault, Script, make

ByAgent = dict[str, Any]
MARK, RECYCLED = {"restarted": True}, {"recycled": True}
"""Infos of the environment in the step of a restart; the text of its report is compared by no test."""


@dataclass
class Moment:
    """What happened in a reset or step of one environment.

    Attributes:
        kind: "reset", "step", or "begin" for a step that only begins an episode (NEXT_STEP).
        observed: The observations to act on; of the next episode after an end with SAME_STEP.
        rewards: Of the step.
        flags: Terminated and truncated, of agents that have a flag, True or False.
        over: Terminated and truncated, of the environment.
        died: The agents whose life ended by a flag of their own in this step: once for each life.
        were_dead: The agents that were dead before this step and after it.
        took_part: The agents that were observed, rewarded, or flagged True in this step.
        alive: The agents alive after this step, in the episode that the step belongs to.
        acting: The agents that act next.
        final: In a step that ends an episode, its last observations; else None.
        infos: By agent, and of the environment under "__common__"; without empty ones.
        reset_infos: Infos of the reset in the same step.
        masks: The action masks of all agents; of ones where the simulator shows none in this moment.
        state: The state of the simulator, if it has one; of the next episode after an end with SAME_STEP.
        final_state: In a step that ends an episode, its last state.
        returns: Of each agent whose life ended in this step, its return and the number of its steps.
        restarted: Whether a fault interrupted the step, or the reset after it.
        interrupted: Whether a fault interrupted the step itself.
        before: The moment before this one; None at the first reset.
        is_first: Whether this is the first step of an episode.
        mode: The mode of automatic resets.
        env_id: The number of the environment.
    """

    kind: str
    observed: ByAgent
    rewards: ByAgent = field(default_factory=dict)
    flags: tuple[ByAgent, ByAgent] = field(default_factory=lambda: ({}, {}))
    over: tuple[bool, bool] = (False, False)
    died: set[str] = field(default_factory=set)
    were_dead: set[str] = field(default_factory=set)
    took_part: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)
    acting: set[str] = field(default_factory=set)
    final: ByAgent | None = None
    infos: ByAgent = field(default_factory=dict)
    reset_infos: ByAgent = field(default_factory=dict)
    masks: ByAgent = field(default_factory=dict)
    state: Any = None
    final_state: Any = None
    returns: ByAgent = field(default_factory=dict)
    restarted: bool = False
    interrupted: bool = False
    before: Moment | None = None
    is_first: bool = False
    mode: AutoresetMode | None = None
    env_id: int = 0

    @property
    def is_over(self) -> bool:
        return any(self.over)

    def own(self, agent: str) -> tuple[bool, bool]:
        """The agent's own flags."""
        return self.flags[0].get(agent, False), self.flags[1].get(agent, False)

    def of_life(self, agent: str) -> tuple[bool, bool]:
        """The flags with which its life ends, once; at the end of an episode, the environment's for all others."""
        return self.own(agent) if agent in self.died else self.over

    def inherited(self, agent: str) -> tuple[bool, bool]:
        """Its own flags; at the end of an episode, the environment's for an agent that took part and has none."""
        return self.over if not any(self.own(agent)) and agent in self.took_part else self.own(agent)


class Loop:
    """One environment, in a mode of automatic resets; a fault restarts it, as `on_error="restart"`."""

    def __init__(self, script: Script, env_id: int, mode: AutoresetMode, fault: Fault | None = None) -> None:
        self.script, self.env_id, self.mode = script, env_id, mode
        self.fault = None if fault is None else fault._replace(how="raise")
        self.dict_rules = script.rules in ("dicts", "team")
        self.restarts = 0
        self.recycles = False  # whether each episode has a new simulator
        self.passes_on = False  # whether the simulator gets the actions of agents that do not act, too
        self.now: Moment | None = None
        self.unused = False  # rebuilt, but not reset
        self.make()

    def make(self) -> None:
        self.game = make(self.script, self.fault)(self.env_id, self.restarts)
        self.turns: Any = None
        if self.script.rules == "turns":
            self.turns = self.game
            self.game = turn_based_aec_to_parallel(self.game)
        elif self.script.rules == "team":
            self.game = TeamAsDicts(self.game)

    # -- the two calls ---------------------------------------------------------------------------------------------

    def reset(self) -> Moment:
        try:
            moment = self.begin()
        except Broken:
            moment = self.rebuilt()
        return self.note(moment)

    def step(self, actions: ByAgent) -> Moment:
        """One step; of the actions, those of agents that act count, unless the facade passes all on."""
        assert self.now is not None
        if self.now.is_over and self.mode is AutoresetMode.NEXT_STEP:
            try:
                moment = self.begin()
            except Broken:
                moment = self.rebuilt()
            moment.kind, moment.rewards = "begin", dict.fromkeys(moment.observed, 0.0)
            moment.flags = dict.fromkeys(moment.observed, False), dict.fromkeys(moment.observed, False)
            moment.took_part = {*moment.observed}
            return self.note(moment)
        if self.now.is_over and self.mode is AutoresetMode.DISABLED:
            assert not self.dict_rules or self.unused, "a game of dict rules goes on by itself: reset it at once"
            return self.note(Moment("over", {}, over=self.now.over, state=self.now.state))
        try:
            moment = self.native_step(actions if self.passes_on else {a: actions[a] for a in self.now.acting})
        except Broken:
            moment = self.cut_off()
        if moment.is_over:
            self.end(moment)
        return self.note(moment)

    # -- an episode ------------------------------------------------------------------------------------------------

    def begin(self) -> Moment:
        marks = {}
        if self.recycles and self.now is not None:
            self.rebuild()
            marks = {"__common__": RECYCLED}
        observed, infos = self.game.reset()
        self.unused, self.steps, self.dead = False, 0, set[str]()
        self.alive = {*observed}
        self.sums: dict[str, list[float]] = {}
        if self.turns is not None:
            infos = {agent: {**info, "active_agent": self.turns.agent_selection} for agent, info in infos.items()}
        infos = without_empty({**infos, **marks})
        return Moment(
            "reset", observed, infos=infos, acting=self.who_acts(observed), alive={*self.alive},
            state=self.state(),
        )  # fmt: skip

    def native_step(self, actions: ByAgent) -> Moment:
        observed, rewards, *flags, infos = self.game.step(actions)
        self.steps += 1
        env_flags = [of_kind.pop("__all__", False) for of_kind in flags]
        flagged = {agent for of_kind in flags for agent, flag in of_kind.items() if flag}
        dead_before, alive_before = self.dead, self.alive
        listed = {*observed} if self.dict_rules else {*self.game.agents}
        back = dead_before & {*observed} & listed - flagged
        self.dead = (dead_before - back) | flagged
        self.alive = (alive_before | {*observed}) - self.dead
        if not self.dict_rules and not self.game.agents:
            terminated = all(flags[0].get(agent, False) for agent in alive_before)
            env_flags = [terminated, not terminated]
        moment = Moment(
            "step", observed, rewards, (flags[0], flags[1]), (bool(env_flags[0]), bool(env_flags[1])),
            died=flagged - dead_before, were_dead=dead_before - back, took_part={*observed} | {*rewards} | flagged,
            alive={*self.alive}, acting=self.who_acts(observed), infos=without_empty(infos), state=self.state(),
            is_first=self.steps == 1,
        )  # fmt: skip
        self.count(moment)
        return moment

    def count(self, moment: Moment) -> None:
        """Add rewards to the returns of lives, and note those that end."""
        for agent in {*moment.rewards} | {a for of_kind in moment.flags for a, flag in of_kind.items() if flag}:
            if agent not in moment.were_dead:
                total = self.sums.setdefault(agent, [0.0, 0])
                total[0] += moment.rewards.get(agent, 0.0)
                total[1] += 1
        ended = {*self.sums} if moment.is_over else moment.died
        moment.returns = {agent: (self.sums[agent][0], int(self.sums[agent][1])) for agent in ended}
        for agent in ended:
            del self.sums[agent]

    def who_acts(self, observed: ByAgent) -> set[str]:
        if self.turns is not None:
            return {self.turns.agent_selection} if self.game.agents else set()
        return self.alive & {*observed}

    def end(self, moment: Moment) -> None:
        """What the mode does in the step that ends an episode."""
        moment.final, moment.final_state = moment.observed, moment.state
        if moment.interrupted:
            assert self.now is not None
            moment.final_state = self.now.state
        if self.mode is not AutoresetMode.SAME_STEP:
            # Under dict rules, a simulator may go on after its end.
            if not (self.dict_rules and self.mode is AutoresetMode.DISABLED and not self.unused):
                moment.acting = set()
            return
        try:
            first = self.begin()
        except Broken:
            first = self.rebuilt()
        moment.observed, moment.reset_infos, moment.acting = first.observed, first.infos, first.acting
        moment.state = first.state
        moment.restarted |= first.restarted
        if mark := moment.reset_infos.pop("__common__", None):
            moment.infos = {**moment.infos, "__common__": {**moment.infos.get("__common__", {}), **mark}}

    # -- restarts --------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        self.restarts += 1
        self.make()

    def rebuilt(self) -> Moment:
        """The reset of a new simulator, in place of a reset that failed."""
        self.rebuild()
        moment = self.begin()
        moment.restarted, moment.infos = True, {**moment.infos, "__common__": MARK}
        return moment

    def cut_off(self) -> Moment:
        """The step that a fault interrupted: it ends the episode."""
        assert self.now is not None
        alive, dead = {*self.alive}, self.dead
        self.rebuild()
        self.unused = True
        moment = Moment(
            "step", self.now.observed, dict.fromkeys(alive, 0.0),
            (dict.fromkeys(alive, False), dict.fromkeys(alive, True)), (False, True), died=alive, were_dead={*dead},
            took_part=alive, infos={"__common__": MARK}, restarted=True, interrupted=True, is_first=self.steps == 0,
            state=self.now.state,
        )  # fmt: skip
        self.count(moment)
        return moment

    def state(self) -> Any:
        return self.game.state() if hasattr(self.game, "state") and self.turns is None else None

    def note(self, moment: Moment) -> Moment:
        moment.before, moment.mode = self.now, self.mode
        infos = moment.reset_infos if moment.is_over and self.mode is AutoresetMode.SAME_STEP else moment.infos
        moment.masks = {agent: mask_of(moment.observed.get(agent), infos.get(agent, {})) for agent in AGENTS}
        self.now, moment.env_id = moment, self.env_id
        return moment


class TeamAsDicts:
    """Dicts of what a game with PyMARL's interface returns; masks are in infos."""

    def __init__(self, game: Any) -> None:
        self.game, self.state = game, game.get_state

    def seen(self, info: ByAgent) -> tuple[ByAgent, ByAgent]:
        masks = {agent: {"action_mask": mask} for agent, mask in zip(AGENTS, self.game.get_avail_actions())}
        return dict(zip(AGENTS, self.game.get_obs())), {**masks, "__common__": info}

    def reset(self) -> tuple[ByAgent, ByAgent]:
        self.game.reset()
        return self.seen({})

    def step(self, actions: ByAgent) -> tuple[ByAgent, ...]:
        reward, over, info = self.game.step([actions[agent] for agent in AGENTS])
        observations, infos = self.seen(info)
        is_limit = info.get("episode_limit", False)
        flags = (
            {**dict.fromkeys(AGENTS, flag), "__all__": flag} for flag in (over and not is_limit, over and is_limit)
        )
        return observations, dict.fromkeys(AGENTS, reward), *flags, infos


def mask_of(observation: Any, info: ByAgent) -> Any:
    """The mask in an observation or an info."""
    if isinstance(observation, dict):
        return observation["action_mask"]
    return info.get("action_mask", [1] * ACTIONS)


def without_empty(infos: ByAgent) -> ByAgent:
    return {key: info for key, info in infos.items() if info}
