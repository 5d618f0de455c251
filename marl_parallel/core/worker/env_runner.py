"""`EnvRunner`: one environment, from a reset through the end of an episode to the next one.

Only this file decides which agents are alive and act, when an episode is over, what an automatic reset returns and
which keys are added to the infos of the simulator. The worker holds an `EnvRunner` for each of its environments::

    reset(keywords) -> Transition
    step(actions)   -> Transition         and with SAME_STEP, when the episode has ended (`ended_for_now`):
                       begin_next(last)   -> Transition: the last step's rewards, the new episode's first observations

The functions at the end apply the same rules in the parent. `records.py` transports the transitions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters.protocol import JOINT, AgentID, Dicts, MultiAgentEnv, Rules, refuse_reserved
from marl_parallel.core.objects.pickling import in_order, loads
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.spaces import zeros
from marl_parallel.core.transition import (
    ALL,
    BEGAN,
    COMMON,
    ENDED,
    FINAL_OBS,
    RESET_INFO,
    TOOK_PART,
    WAS_ALIVE,
    WAS_DEAD,
    Transition,
    check_infos,
    checked_flags,
    copied_dicts,
    is_empty_info,
)
from marl_parallel.core.worker.generators import EnvGenerators, GeneratorStates
from marl_parallel.core.worker_status import Activity, WorkerStatus

_RESET, _STEP = int(Activity.RESET), int(Activity.STEP)  # quicker than a member of an Enum
_NOT_ENDED = (False, False)
_ALIVE, _ENDED = 32, 1  # of `Codec.lives`


class Standing(NamedTuple):
    """The attributes of an `EnvRunner` that change."""

    alive: list[AgentID]
    acting: list[AgentID]
    flagged: list[AgentID]
    takes_turns: bool
    over: tuple[Any, Any] | None
    postponed: Mapping[str, Any] | None
    early: Transition | None
    before_early: EnvGenerators | None
    seeding: tuple[int, int] | None
    unseen: Sequence[AgentID] = ()
    past: Sequence[AgentID] = ()


class EnvRunner:
    """One environment and its state.

    Attributes:
        agents: The agents with an entry in records, in this order: those of all environments of the batch.
        ended_for_now: Whether the last step ended an episode and `begin_next` is due.
        fast: For compiled code, a tuple of four: the simulator's `step`; None, or a function whose result is false if
            Python has to interpret the step; whether this result tells whose turn is next; and None, or a pair:
            `agents_left` under PettingZoo's rules, else None, and the lives of all agents (`Codec.lives`). Without the
            pair, all agents are alive, and a plain transition changes nothing here. With it, `take_lives` has to be
            called before this object is used again. `fast` is None if compiled code cannot go on.
        seeding: The last seed that was passed to `reset`, and how many episodes have begun without one since: these get
            a derived seed. None if episodes get no seed.
        generators: The states that derived seeds also seed, so that each episode can be repeated by itself; None for
            none. Needs `seeding`; `reset` then takes a seed in any case.
        options: The pickled options of every reset that passes none, so that each reset gets its own copy; None for no
            options.

    `after_step` is called after each step that compiled code carries out, before the transition is written. `joint`
    returns the `JOINT` actions for such a step, or None.
    """

    def __init__(
        self,
        env: MultiAgentEnv,
        env_id: int,
        mode: AutoresetMode,
        status: WorkerStatus,
        seeding: tuple[int, int] | None = None,
        *,
        generators: GeneratorStates | None = None,
        after_step: Callable[[], None] | None = None,
        joint: Callable[[], Any] | None = None,
    ) -> None:
        self.env, self.env_id, self.seeding, self.generators = env, env_id, seeding, generators
        self.agents: Sequence[AgentID] = env.possible_agents
        self._mode, self._status = mode, status
        self._dict_rules = env.rules is Rules.DICT
        self._alive: list[AgentID] = []
        self._acting: list[AgentID] = []
        self._flagged: set[AgentID] = set()
        self._unseen: set[AgentID] = set()  # agents alive that have not been observed since their life began
        # Agents alive whose life has ended with their episode: a dict environment may be stepped on after its end.
        self._past: set[AgentID] = set()
        # If the adapter overrides `turn` or `alive`, it has to be called after each step.
        methods = [getattr(method, "__func__", None) for method in (env.turn, env.alive)]
        self._asked = methods != [MultiAgentEnv.turn, MultiAgentEnv.alive]
        self.fast: tuple[Callable[..., Any], Callable[[], Any] | None, bool, tuple[Any, bytes] | None] | None = None
        self._step: Callable[..., Any] = env.step
        self._fast_step: Callable[..., Any] = env.step if joint is None else with_joint(env.step, joint)
        if after_step is not None:
            self._fast_step = followed_by(self._fast_step, after_step)
        self._takes_turns = False
        self._over: tuple[Any, Any] | None = None
        self._postponed: Mapping[str, Any] | None = None
        self._early: Transition | None = None
        self._before_early: EnvGenerators | None = None
        self.ended_for_now = False
        self.options: bytes | None = None

    def use_records_of(self, agents: Sequence[AgentID]) -> None:
        """Set `agents`. If the environment has its agents in another order, it gets actions in its own order."""
        own = self.env.possible_agents
        if self.agents is own and [agent for agent in agents if agent in {*own}] != own:
            self._step, self._fast_step = (in_own_order(step, own) for step in (self._step, self._fast_step))
        self.agents = agents

    def reset(self, keywords: Mapping[str, Any]) -> Transition:
        """Begin a new episode, with keywords for the simulator's `reset`; rewards are zero, and flags False."""
        passed = keywords.get("options") is not None
        if self._postponed is not None:
            if self.generators is not None and self._before_early is not None and keywords.get("seed") is None:
                self.generators.restore(self._before_early)  # as if the early reset had not been done
            keywords = {**self._postponed, **keywords}
            self._postponed = self._early = self._before_early = None
        if self.options is not None and not passed and "options" in self.env.reset_keywords:
            keywords = {**keywords, "options": merged_options(keywords.get("options"), loads(self.options))}
        if self.seeding is not None:
            keywords = self._seeded(keywords, *self.seeding)
        self._status.enter(self.env_id, _RESET)
        try:
            observations, infos = self.env.reset(**keywords)
        finally:
            self._status.leave()
        if ALL in observations or COMMON in observations:
            refuse_reserved("reset", observations, {})
        check_infos(infos, observations)
        self._flagged.clear()
        self._unseen.clear()
        self._past.clear()
        self._over, self.ended_for_now = None, False
        self._set_alive(observations, observations)
        rewards = no_rewards(observations, self.env.reward_spaces)
        terminateds = {**dict.fromkeys(observations, False), ALL: False}
        truncateds = {**terminateds}
        events = dict.fromkeys(observations, BEGAN)
        return Transition(
            observations, rewards, terminateds, truncateds, infos, self._alive, self._acting, events=events
        )

    def _seeded(self, keywords: Mapping[str, Any], seed: int, number: int) -> Mapping[str, Any]:
        """Keywords for the simulator's `reset`: a missing seed is derived; it is left out if `reset` takes none."""
        if keywords.get("seed") is not None:
            self.seeding = keywords["seed"], 0
        else:
            self.seeding = seed, number + 1
            keywords = {**keywords, "seed": derived_seed(seed, number + 1)}
            if self.generators is not None:
                self.generators.seed(keywords["seed"])
        if "seed" in self.env.reset_keywords:
            return keywords
        return {name: value for name, value in keywords.items() if name != "seed"}

    def set_options(self, options: bytes | None) -> None:
        """Set the `options`, and drop an episode that `reset_early` has begun: the caller has not seen it."""
        if self._early is not None and options != self.options:
            if self.generators is not None and self._before_early is not None:
                self.generators.restore(self._before_early)
            self._early = self._before_early = None
        self.options = options

    def step(self, actions: dict[Any, Any]) -> Transition:
        """Step once, or begin the next episode if that is due; if `ended_for_now`, `begin_next` needs the transition.

        `actions` are for the simulator, without those of agents that do not act.
        """
        if self._over is not None:
            if self._mode is AutoresetMode.NEXT_STEP:
                return self.reset({}) if self._early is None else self.begin_early()
            if not self._dict_rules or self._postponed is not None:
                terminated, truncated = self._over
                return Transition({}, {}, {ALL: terminated}, {ALL: truncated}, {}, (), (), events={})
        self._status.enter(self.env_id, _STEP)
        try:
            dicts = self._step(actions)
        finally:
            self._status.leave()
        return self.interpret(dicts)

    def interpret(self, dicts: Dicts) -> Transition:
        """Interpret the dicts of a step: which agents are alive and act now, and whether the episode is over."""
        observations, rewards, terminateds, truncateds, infos = dicts
        if ALL in observations or ALL in rewards or COMMON in observations:
            refuse_reserved("step", observations, rewards)
        terminateds, truncateds = checked_flags(terminateds, "terminated"), checked_flags(truncateds, "truncated")
        check_infos(infos, observations)
        before, were_dead, alive = self._alive, {*self._flagged}, self.env.alive()
        ended = {agent for flags in (terminateds, truncateds) for agent, flag in flags.items() if flag and agent != ALL}
        if alive is None:
            alive = self._seen_and_not_ended(observations, ended)
        else:
            self._flagged = (self._flagged | ended).intersection(self.agents).difference(alive)
        events = self._events(before, were_dead, alive, observations, rewards, ended)
        self._set_alive(alive, observations)
        if ALL not in terminateds or ALL not in truncateds:
            no_agent_left = _NOT_ENDED if self._dict_rules else self._left_or_ended(before, terminateds)
            terminateds, truncateds = {**terminateds}, {**truncateds}  # the simulator may reuse its dicts
            # If the simulator sets `__all__` in one dict only, the other one is set such that an ended episode is over.
            if self._dict_rules and ALL not in terminateds and not before and not self._alive and self._flagged:
                self._warn_of_no_end()
            terminateds.setdefault(ALL, no_agent_left[0] or (any(no_agent_left) and not truncateds.get(ALL, True)))
            truncateds.setdefault(ALL, any(no_agent_left) and not terminateds[ALL])
        over = terminateds[ALL], truncateds[ALL]
        if not (over[0] or over[1]):
            self._over = None
            return Transition(
                observations, rewards, terminateds, truncateds, infos, self._alive, self._acting, events=events
            )
        for agent in self._alive:
            if agent not in self._past:
                events[agent] = events.get(agent, 0) | ENDED
        self._past.update(self._alive)
        if self._mode is not AutoresetMode.SAME_STEP:
            self._over, self.fast = over, None
            acting = self._acting if needs_actions(self.env.rules, self._mode, over=True) else []
            return Transition(observations, rewards, terminateds, truncateds, infos, self._alive, acting, events=events)
        self.ended_for_now, self.fast = True, None
        # Simulators that reuse their arrays and dicts would overwrite them in the next episode.
        dicts = copied_dicts((observations, rewards, terminateds, truncateds, infos))
        return Transition(*dicts, self._alive, (), events=events)

    def _events(
        self,
        before: Sequence[AgentID],
        were_dead: set[AgentID],
        after: Sequence[AgentID],
        observations: Mapping[AgentID, Any],
        rewards: Mapping[AgentID, Any],
        ended: set[AgentID],
    ) -> dict[AgentID, int]:
        """What a step means in the life of each agent, while its episode goes on; `ended` have a flag of their own.

        `before` and `after` are the agents that are alive before and after the step, `were_dead` those that had ended.
        """
        alive, were_alive = {*after}, {*before}
        unseen, self._unseen = self._unseen, set()
        events = {}
        # Agents without an entry in records may come without end.
        known_dead = were_dead.intersection(self.agents) if were_dead else ()
        for agent in {**dict.fromkeys([*before, *known_dead, *after, *ended]), **observations, **rewards}:
            observed, ends = agent in observations, agent in ended
            was_dead = agent in were_dead and (ends or agent not in alive)
            begins = not was_dead and (agent not in were_alive or agent in unseen or (ends and agent in alive))
            events[agent] = (
                (WAS_ALIVE if agent in were_alive else 0)
                | (WAS_DEAD if was_dead else ENDED if ends and agent not in self._past else 0)
                | (TOOK_PART if observed or ends or agent in rewards else 0)
                | (BEGAN if begins and observed else 0)
            )
            if begins:
                self._past.discard(agent)
                if not observed and agent in alive:
                    self._unseen.add(agent)
        return {agent: bits for agent, bits in events.items() if bits}

    def _warn_of_no_end(self) -> None:
        """Warn once that all agents have ended before this step, in which none has come back."""
        logger.warning(
            "environment %d: all its agents have ended, but its `step` returns no `__all__`, so the episode goes on "
            'without agents. Let `step` return terminateds["__all__"] = True at the end of an episode, or pass '
            'adapter="pettingzoo" if an episode ends with its last agent. If agents come back later, ignore this.',
            self.env_id,
            extra={"once": f"no end of {type(getattr(self.env, 'source', self.env))}"},
        )

    def begin_next(self, last: Transition) -> Transition:
        """Begin the next episode in a step: the first observations, with the rewards, flags and infos of `last`."""
        return joined(last, self.reset({}))

    def postpone_reset(self, keywords: Mapping[str, Any]) -> None:
        """Postpone the reset of a new simulator, with these keywords; until then, the episode counts as truncated."""
        self._postponed, self._over, self.fast = keywords, (False, True), None

    @property
    def awaits_reset(self) -> bool:
        """Whether a postponed reset is still due: the simulator has not begun an episode."""
        return self._postponed is not None and self._early is None

    def reset_early(self) -> None:
        """Do a postponed reset before the simulator is called or rendered.

        The step that begins the episode returns its transition; a reset by the caller replaces it.
        """
        if self.awaits_reset:
            keywords, over = self._postponed, self._over
            before = None if self.generators is None else self.generators.states()
            self._early = self.reset({})
            self._postponed, self._over, self.fast, self._before_early = keywords, over, None, before

    def begin_early(self) -> Transition:
        """Begin the episode of `reset_early`."""
        early = self._early
        assert early is not None
        self._over = self._postponed = self._early = self._before_early = None
        return early

    def _seen_and_not_ended(self, observations: Iterable[AgentID], ended: set[AgentID]) -> list[AgentID]:
        """The agents alive after a step; records agents that have ended, and agents that have come back since."""
        seen = [*dict.fromkeys([*self._alive, *observations])]
        if self._flagged:
            back = self._flagged.intersection(observations) - ended
            if back and not self._dict_rules:  # under PettingZoo's API, the simulator lists such agents again
                back.intersection_update(self.env.agents_left() or ())
            if back:
                self._flagged -= back
                seen = self._ranked(seen)  # for compiled code, in the order as if they had never left
        self._flagged |= ended
        return [agent for agent in seen if agent not in self._flagged]

    def _ranked(self, agents: list[AgentID]) -> list[AgentID]:
        """Sort agents, in place: the order of `possible_agents`, then as they came."""
        rank = {agent: position for position, agent in enumerate(self.agents)}
        agents.sort(key=lambda agent: rank.get(agent, len(rank)))
        return agents

    def _set_alive(self, alive: Iterable[AgentID], observations: dict[AgentID, Any]) -> None:
        """Update alive and acting, as new lists: transitions hold the old ones."""
        self._alive = [*alive]
        self._acting = self._who_acts(observations)
        self._set_fast()

    def _set_fast(self) -> None:
        """Set `fast` for an episode that goes on."""
        self.fast = None
        if self._past:
            return
        if not self._asked:
            agents_left = None if self._dict_rules else self.env.agents_left
            if (lives := self._lives()) is not None:
                self.fast = self._fast_step, None, False, (agents_left, lives)
        elif self._flagged or self._unseen or self._alive != self.agents:
            return
        elif self._takes_turns and len(self._acting) == 1 < len(self._alive):
            self._acting = [*self._acting]  # `_next_turn` writes into it
            after = partial(_next_turn, self.env, self._alive, self._acting, self._dict_rules)
            self.fast = self._fast_step, after, True, None
        elif self._acting == self._alive:
            self.fast = self._fast_step, partial(_all_go_on, self.env, self._alive, self._dict_rules), False, None

    def standing(self) -> Standing:
        """The state of this object between two steps, without the environment; call `take_lives` first."""
        return Standing(
            [*self._alive], [*self._acting], [*self._flagged], self._takes_turns, self._over, self._postponed,
            self._early, self._before_early, self.seeding, [*self._unseen], [*self._past],
        )  # fmt: skip

    def stand(self, standing: Standing) -> None:
        """Restore a result of `standing`; `env` is the environment of that time."""
        alive, acting, flagged, self._takes_turns, self._over, self._postponed = standing[:6]
        self._alive, self._acting, self._flagged = self._ranked([*alive]), self._ranked([*acting]), {*flagged}
        self._early, self._before_early = standing.early, standing.before_early
        self._unseen, self._past = {*standing.unseen}, {*standing.past}
        if (
            self.seeding is not None and standing.seeding is not None
        ):  # else episodes have no derived seeds now, or had none then
            self.seeding = standing.seeding
        self.fast = None
        if self._over is None:
            self._set_fast()

    def _lives(self) -> bytes | None:
        """A byte for each possible agent, as in `Codec.lives`, and one more; None if other agents have appeared."""
        possible = self.agents
        lives = dict.fromkeys(possible, 0)
        for agents, bit in ((self._alive, _ALIVE), (self._flagged, _ENDED)):
            for agent in agents:
                if agent not in lives:
                    return None
                lives[agent] |= bit
        return bytes([*lives.values(), 0])

    def take_lives(self, lives: bytes) -> None:
        """Note which agents are alive after steps that compiled code has carried out."""
        pairs = [*zip(self.agents, lives, strict=True)]
        self._alive = [agent for agent, bits in pairs if bits & _ALIVE]
        self._flagged = {agent for agent, bits in pairs if bits & _ENDED}

    def _who_acts(self, observations: dict[AgentID, Any]) -> list[AgentID]:
        turn = self.env.turn()
        self._takes_turns = turn is not None
        if turn is not None:
            return [turn] if turn in self._alive else []
        acting, possible = [*observations], self.agents
        if acting != self._alive:
            alive = {*self._alive}
            acting = [agent for agent in acting if agent in alive]
        return acting if acting == possible else self._ranked(acting)

    def _left_or_ended(self, before: list[AgentID], terminateds: Mapping[Any, Any]) -> tuple[bool, bool]:
        """PettingZoo's end of an episode: no agent is left. Returns the two flags of `__all__`."""
        still_in = self.env.agents_left()
        remaining = self._alive if still_in is None else still_in
        if remaining and (not self._flagged or any(agent not in self._flagged for agent in remaining)):
            return _NOT_ENDED
        # If no agent had been seen before, the agents that have flags now count.
        agents = before or [agent for agent in terminateds if agent != ALL]
        terminated = all(terminateds.get(agent, False) for agent in agents)
        return terminated, not terminated


# Functions for `fast`: methods of the episode, which has `fast`, would keep it and its simulator from being freed.


def _all_go_on(env: MultiAgentEnv, were_alive: Sequence[AgentID], dict_rules: bool) -> bool:
    """Whether all agents are still alive and act after a step, by the adapter's methods."""
    alive, remaining = env.alive(), None if dict_rules else env.agents_left()
    return env.turn() is None and (alive is None or [*alive] == were_alive) and (remaining is None or bool(remaining))


def _next_turn(env: MultiAgentEnv, were_alive: Sequence[AgentID], acting: list[AgentID], dict_rules: bool) -> int:
    """After a step, the index plus one of the agent that acts next, which becomes the only one in `acting`.

    Returns 0 if not all agents are still alive.
    """
    turn, alive = env.turn(), env.alive()
    if turn is None or turn not in were_alive or not (alive is None or [*alive] == were_alive):
        return 0
    if not dict_rules and (remaining := env.agents_left()) is not None and not remaining:
        return 0
    acting[:] = [turn]
    return were_alive.index(turn) + 1


def derived_seed(seed: int, number: int) -> int:
    """The seed of the `number`-th episode that began without a seed since `seed` was passed."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0] >> 1)


def with_joint(step: Callable[..., Any], joint: Callable[[], Any]) -> Callable[..., Any]:
    """A simulator's step, with the `JOINT` actions that `joint` returns in place of its argument, unless it is None."""

    def stepped(actions: dict[Any, Any]) -> Any:
        value = joint()
        return step(actions if value is None else {JOINT: value})

    return stepped


def in_own_order(step: Callable[..., Any], agents: Sequence[AgentID]) -> Callable[..., Any]:
    """A simulator's step, with actions in the order of `agents`."""

    def stepped(actions: dict[Any, Any]) -> Any:
        return step(in_order(actions, agents))

    return stepped


def followed_by(step: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    """A simulator's step, followed by a call of `after`."""

    def stepped(actions: dict[Any, Any]) -> Any:
        result = step(actions)
        after()
        return result

    return stepped


def merged_options(earlier: Any, later: Any) -> Any:
    """Options of a reset: later options override earlier ones, by key; None if both are None."""
    if not earlier or later is None:
        return earlier if later is None else later
    return {**earlier, **later}


def needs_actions(rules: Rules, mode: AutoresetMode, over: bool) -> bool:
    """Whether the next step uses the caller's actions, for an environment whose episode is `over` or not."""
    return not over or (mode is AutoresetMode.DISABLED and rules is Rules.DICT)


def dicts_of(transition: Transition) -> Dicts:
    """The five dicts of a transition, with the additions of an automatic reset to infos; other dicts are not copied."""
    infos = {**transition.infos}
    if transition.final_observations is not None:
        with_final(infos, transition.final_observations, transition.reset_infos or {})
    return transition.observations, transition.rewards, transition.terminateds, transition.truncateds, infos


def is_over(transition: Transition) -> bool:
    """Whether a transition ends an episode."""
    return bool(transition.terminateds[ALL] or transition.truncateds[ALL])


def with_final(
    infos: dict[Any, Any], final_observations: Mapping[AgentID, Any], reset_infos: Mapping[Any, Any]
) -> None:
    """Add the final observations and the infos of an automatic reset to the infos of the step before it, in place.

    `infos` belong to the parent; mappings of other classes become dicts. Empty `reset_infos` are left out.
    """
    not_empty = {key: info for key, info in reset_infos.items() if info is not None and not is_empty_info(info)}
    add_to_infos(infos, FINAL_OBS, final_observations)
    add_to_infos(infos, RESET_INFO, not_empty)


def add_to_infos(infos: dict[Any, Any], name: str, additions: Mapping[Any, Any]) -> None:
    """Add a value to the info of each key, in place, under a name that the info does not have yet."""
    for key, value in additions.items():
        info = infos.get(key)
        if info is None or isinstance(info, Mapping):
            # Simulators may return one dict for several agents.
            infos[key] = copy.copy(info) if isinstance(info, dict) else dict(info or {})
            infos[key].setdefault(name, value)


def no_rewards(agents: Iterable[AgentID], reward_spaces: Mapping[AgentID, Space[Any]]) -> dict[AgentID, Any]:
    """Rewards of zero: 0.0 for each agent, or an array of zeros if the agent's rewards are vectors."""
    if not reward_spaces:
        return dict.fromkeys(agents, 0.0)
    return {agent: zeros(reward_spaces[agent]) if agent in reward_spaces else 0.0 for agent in agents}


def interrupted(
    observations: dict[AgentID, Any],
    alive: Iterable[AgentID],
    reward_spaces: Mapping[AgentID, Space[Any]],
    events: dict[AgentID, int],
) -> Transition:
    """A step that a fault has interrupted or prevented: all agents that were alive are truncated."""
    alive = list(alive)
    terminateds, truncateds = ({**dict.fromkeys(alive, flag), ALL: flag} for flag in (False, True))
    rewards = no_rewards(alive, reward_spaces)
    return Transition(observations, rewards, terminateds, truncateds, {}, [], [], events=events, masks={})


def joined(last: Transition, first: Transition) -> Transition:
    """The last step of an episode, in which the next one begins, with its `first` transition."""
    ends, begins = events_of_last(last.events), first.events or {}
    return Transition(
        first.observations, last.rewards, last.terminateds, last.truncateds, last.infos, first.alive, first.acting,
        final_observations=last.observations, reset_infos=first.infos,
        events={agent: ends.get(agent, 0) | begins.get(agent, 0) for agent in {**ends, **begins}}, masks=first.masks,
    )  # fmt: skip


def last_of(transition: Transition) -> Transition:
    """The last step of an episode, without the beginning of the next one."""
    observations = transition.final_observations
    return transition._replace(
        observations=transition.observations if observations is None else observations,
        infos={**transition.infos}, alive=[], acting=[], final_observations=None, reset_infos=None,
        events=events_of_last(transition.events), masks={},
    )  # fmt: skip


def events_of_last(events: Mapping[AgentID, int] | None) -> dict[AgentID, int]:
    """The events of a last step that belong to the episode that has ended."""
    return {agent: last for agent, bits in (events or {}).items() if (last := bits & ~BEGAN)}


def interrupted_events(alive: Iterable[AgentID], dead: Iterable[AgentID]) -> dict[AgentID, int]:
    """The events of `interrupted`: the lives of all agents alive end; `dead` had ended before."""
    return {**dict.fromkeys(dead, WAS_DEAD), **dict.fromkeys(alive, WAS_ALIVE | TOOK_PART | ENDED)}


def dead_after(events: Mapping[AgentID, int] | None, alive: Iterable[AgentID]) -> list[AgentID]:
    """The agents that have ended in a running episode and not come back, by the events of its latest step."""
    going_on = {*alive}
    return [agent for agent, bits in (events or {}).items() if bits & (WAS_DEAD | ENDED) and agent not in going_on]


def with_common(transition: Transition, **values: Any) -> Transition:
    """The same transition with values in the infos of the whole environment, where these have no such names."""
    common = transition.infos.get(COMMON)
    values |= common if isinstance(common, dict) else {}
    return transition._replace(infos={**transition.infos, COMMON: values})
