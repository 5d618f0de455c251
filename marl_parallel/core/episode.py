"""What a transition means: one environment's life, from reset to the end of an episode and on to the next.

This is the only place that knows who is alive and who acts, when an episode is over, what auto-reset returns and
which keys we add to the simulator's. The worker holds an `Episode` for each of its environments; the parent
uses the functions at the end, on the same facts. How transitions travel is the business of `records.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from gymnasium import Space
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters.protocol import AgentID, Dicts, MultiAgentEnv, Rules, refuse_reserved
from marl_parallel.core.ledger import Activity, Ledger
from marl_parallel.core.spaces import zeros
from marl_parallel.core.transition import (
    ALL,
    COMMON,
    FINAL_OBS,
    RESET_INFO,
    Transition,
    UsualForm,
    check_infos,
    checked_flags,
    is_empty_info,
    kept,
)

_RESET, _STEP = int(Activity.RESET), int(Activity.STEP)  # a member of an Enum costs a look-up each time
_NOT_ENDED = (False, False)


class Episode:
    """One environment and where it stands.

    Args:
        env: The environment.
        env_id: Its number in the batch.
        mode: What happens when an episode is over.
        ledger: Where the worker notes what its environments are doing.

    Attributes:
        ended_for_now: Whether the last step ended an episode and `begin_anew` is due.
    """

    def __init__(self, env: MultiAgentEnv, env_id: int, mode: AutoresetMode, ledger: Ledger) -> None:
        self.env, self.env_id = env, env_id
        self._mode, self._ledger = mode, ledger
        self._dict_rules = env.rules is Rules.DICT
        self._alive: list[AgentID] = []
        self._acting: list[AgentID] = []
        self._flagged: set[AgentID] = set()
        vectors = all(agent in env.reward_spaces for agent in env.possible_agents)
        self._usual = UsualForm(env.possible_agents, vectors=vectors)
        self._all_act = False  # whether every possible agent is alive and acting, and nobody has been flagged
        self._over: tuple[Any, Any] | None = None
        self._put_off: Mapping[str, Any] | None = None
        self._ahead: Transition | None = None
        self.ended_for_now = False

    def reset(self, keywords: Mapping[str, Any]) -> Transition:
        """Begin a new episode.

        Args:
            keywords: For the simulator's `reset`.

        Returns:
            The first observations and infos; the agents in them have flags that are False, and reward 0.0, or zeros
            where rewards are vectors.
        """
        if self._put_off is not None:
            keywords, self._put_off, self._ahead = {**self._put_off, **keywords}, None, None
        self._ledger.enter(self.env_id, _RESET)
        try:
            observations, infos = self.env.reset(**keywords)
        finally:
            self._ledger.leave()
        if ALL in observations or COMMON in observations:
            refuse_reserved("reset", observations, {})
        check_infos(infos, observations)
        self._flagged.clear()
        self._over, self.ended_for_now = None, False
        self._alive = list(observations)
        self._acting = self._who_acts(observations)
        self._all_act = self._do_all_act()
        rewards = no_rewards(observations, self.env.reward_spaces)
        terminateds = {**dict.fromkeys(observations, False), ALL: False}
        truncateds = {**terminateds}
        usual = self._usual.code(observations, rewards, terminateds, truncateds, infos) if self._all_act else 0
        return Transition(observations, rewards, terminateds, truncateds, infos, self._alive, self._acting, usual)

    def step(self, actions: dict[Any, Any]) -> Transition:
        """Step once, or begin the next episode where that is due.

        Args:
            actions: For the simulator, those of agents who do not act already left out.

        Returns:
            The transition; where `ended_for_now`, it is to be handed to `begin_anew`.
        """
        if self._over is not None:
            if self._mode is AutoresetMode.NEXT_STEP:
                ahead = self._ahead
                if ahead is None:
                    return self.reset({})
                self._over = self._put_off = self._ahead = None
                return ahead
            if not self._dict_rules or self._put_off is not None:
                terminated, truncated = self._over
                return Transition({}, {}, {ALL: terminated}, {ALL: truncated}, {}, (), ())
        self._ledger.enter(self.env_id, _STEP)
        try:
            observations, rewards, terminateds, truncateds, infos = self.env.step(actions)
        finally:
            self._ledger.leave()
        if self._all_act:
            usual = self._usual.code(observations, rewards, terminateds, truncateds, infos)
            # Nobody's state changes, and it is over only where the simulator says that nobody is left.
            if usual and (self._dict_rules or (left := self.env.agents_left()) is None or left):
                self._over = None
                agents = self._acting
                return Transition(observations, rewards, terminateds, truncateds, infos, agents, agents, usual)
        return self._interpret(observations, rewards, terminateds, truncateds, infos)

    def _interpret(
        self,
        observations: dict[AgentID, Any],
        rewards: dict[AgentID, Any],
        terminateds: dict[Any, Any],
        truncateds: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> Transition:
        """Decide what a step of any form means: who is alive and acts now, and whether the episode is over."""
        if ALL in observations or ALL in rewards or COMMON in observations:
            refuse_reserved("step", observations, rewards)
        terminateds, truncateds = checked_flags(terminateds, "terminated"), checked_flags(truncateds, "truncated")
        check_infos(infos, observations)
        before = self._alive
        self._note(observations, terminateds, truncateds)
        if ALL not in terminateds or ALL not in truncateds:  # in dicts of our own: the simulator may keep its
            ended = _NOT_ENDED if self._dict_rules else self._left_or_ended(before, terminateds)
            terminateds, truncateds = {**terminateds}, {**truncateds}
            # What the simulator says of one kind stays, and the other is what makes it true that the episode is over.
            terminateds.setdefault(ALL, ended[0] or (any(ended) and not truncateds.get(ALL, True)))
            truncateds.setdefault(ALL, any(ended) and not terminateds[ALL])
        over = terminateds[ALL], truncateds[ALL]
        if not (over[0] or over[1]):
            self._over = None
            return Transition(observations, rewards, terminateds, truncateds, infos, self._alive, self._acting)
        if self._mode is not AutoresetMode.SAME_STEP:
            self._over = over
            acting = self._acting if needs_actions(self.env.rules, self._mode, over=True) else []
            return Transition(observations, rewards, terminateds, truncateds, infos, self._alive, acting)
        self.ended_for_now = True
        # Simulators that use the same arrays and dicts again would overwrite them with the next episode's.
        observations, rewards, terminateds, truncateds, infos = kept(
            (observations, rewards, terminateds, truncateds, infos)
        )
        return Transition(observations, rewards, terminateds, truncateds, infos, self._alive, ())

    def begin_anew(self, last: Transition) -> Transition:
        """Begin the next episode in the same step as the last one ended in.

        Args:
            last: That step's transition.

        Returns:
            The old episode's last rewards, flags and infos with the new one's first observations.
        """
        first = self.reset({})
        return Transition(
            first.observations, last.rewards, last.terminateds, last.truncateds, last.infos, first.alive, first.acting,
            final_observations=last.observations, reset_infos=first.infos,
        )  # fmt: skip

    def put_off(self, keywords: Mapping[str, Any]) -> None:
        """The simulator is new and has not been reset, though its episode counts as over, being truncated.

        Args:
            keywords: For the reset that will come.
        """
        self._put_off, self._over = keywords, (False, True)

    def begin_early(self) -> None:
        """Reset a simulator whose first reset was put off, for whoever wants to look at it before.

        What it says is kept for the step that is to begin the episode; a reset by the caller goes before it.
        """
        if self._put_off is not None and self._ahead is None:
            keywords, over = self._put_off, self._over
            self._ahead = self.reset({})
            self._put_off, self._over = keywords, over

    def _note(
        self, observations: dict[AgentID, Any], terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]
    ) -> None:
        """Bring alive and acting up to date: new lists, never the old ones changed, as transitions hold them."""
        alive = self.env.alive()
        if alive is None:
            for flags in (terminateds, truncateds):
                self._flagged.update(agent for agent, flag in flags.items() if flag and agent != ALL)
            seen = dict.fromkeys([*self._alive, *observations])
            alive = [agent for agent in seen if agent not in self._flagged]
        self._alive = [*alive]
        self._acting = self._who_acts(observations)
        self._all_act = self._do_all_act()

    def _do_all_act(self) -> bool:
        return self._acting == self._alive == self.env.possible_agents and not self._flagged

    def _who_acts(self, observations: dict[AgentID, Any]) -> list[AgentID]:
        turn = self.env.turn()
        if turn is not None:
            return [turn] if turn in self._alive else []
        acting = [*observations]
        if acting != self._alive:
            alive = {*self._alive}  # a set: looking each agent up in a list takes time quadratic in their number
            acting = [agent for agent in acting if agent in alive]
        possible = self.env.possible_agents
        if acting != possible:
            rank = {agent: place for place, agent in enumerate(possible)}
            acting.sort(key=lambda agent: rank.get(agent, len(rank)))
        return acting

    def _left_or_ended(self, before: list[AgentID], terminateds: Mapping[Any, Any]) -> tuple[bool, bool]:
        """PettingZoo's end: nobody is left. Returns the two flags of `__all__`."""
        left = self.env.agents_left()
        remaining = self._alive if left is None else left
        if remaining and (not self._flagged or any(agent not in self._flagged for agent in remaining)):
            return _NOT_ENDED
        # Who was alive; if nobody had been seen yet, whoever is told of now.
        judged = before or [agent for agent in terminateds if agent != ALL]
        terminated = all(terminateds.get(agent, False) for agent in judged)
        return terminated, not terminated


def needs_actions(rules: Rules, mode: AutoresetMode, over: bool) -> bool:
    """Whether the caller's actions will be looked at in the next step of an environment.

    Args:
        rules: The environment's.
        mode: The batch's.
        over: Whether its last transition ended an episode that no reset has followed yet.
    """
    return not over or (mode is AutoresetMode.DISABLED and rules is Rules.DICT)


def with_final(
    infos: dict[Any, Any], final_observations: Mapping[AgentID, Any], reset_infos: Mapping[Any, Any]
) -> None:
    """Add the results of an automatic reset to the infos of the step before it, in place.

    Args:
        infos: The parent's own copy of the step's infos; mappings that are no dicts become dicts.
        final_observations: Go under `final_obs` of each agent.
        reset_infos: Those that are not empty go under `reset_info` of each key.
    """
    told = {key: info for key, info in reset_infos.items() if info is not None and not is_empty_info(info)}
    for name, additions in ((FINAL_OBS, final_observations), (RESET_INFO, told)):
        for key, value in additions.items():
            info = infos.get(key)
            if info is None or isinstance(info, Mapping):
                # Simulators give one dict to several agents.
                infos[key] = copy.copy(info) if isinstance(info, dict) else dict(info or {})
                infos[key].setdefault(name, value)


def no_rewards(agents: Iterable[AgentID], reward_spaces: Mapping[AgentID, Space[Any]]) -> dict[AgentID, Any]:
    """Rewards of zero: 0.0, or an array of zeros for each agent whose rewards are vectors."""
    if not reward_spaces:
        return dict.fromkeys(agents, 0.0)
    return {agent: zeros(reward_spaces[agent]) if agent in reward_spaces else 0.0 for agent in agents}


def interrupted(
    observations: dict[AgentID, Any], alive: Iterable[AgentID], reward_spaces: Mapping[AgentID, Space[Any]]
) -> Dicts:
    """What a step says that the end of its simulator has interrupted, or prevented: the old episode is cut off.

    Args:
        observations: The last ones known.
        alive: Who was, before.
        reward_spaces: Of the agents whose rewards are vectors.
    """
    alive = list(alive)
    return (
        observations,
        no_rewards(alive, reward_spaces),
        {**dict.fromkeys(alive, False), ALL: False},
        {**dict.fromkeys(alive, True), ALL: True},
        {},
    )


def marked(dicts: Dicts, report: str) -> Dicts:
    """The same with a word in its infos that the environment has been restarted."""
    *others, infos = dicts
    common = infos.get(COMMON)
    own = common if isinstance(common, dict) else {}
    observations, rewards, terminateds, truncateds = others
    mark = {"restarted": True, "error": report, **own}
    return observations, rewards, terminateds, truncateds, {**infos, COMMON: mark}


def renewed(told: Dicts, fresh: Dicts) -> Dicts:
    """What a step says whose environment was restarted in it, where the mode is `SAME_STEP`.

    Args:
        told: What is told of the old episode.
        fresh: The fresh environment's reset.
    """
    observations, rewards, terminateds, truncateds, infos = told
    infos = dict(infos)
    with_final(infos, observations, fresh[4])
    return fresh[0], rewards, terminateds, truncateds, infos
