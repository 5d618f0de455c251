"""What a simulator returns, dict by dict: whether observations, rewards, flags and infos are what they should be.

What single values should be is in `values.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marl_parallel.action_masks import allows_nothing, for_sample, mask_of
from marl_parallel.adapters import MultiAgentEnv, Rules
from marl_parallel.cli.findings import Question, Severity
from marl_parallel.cli.isolation import Notebook
from marl_parallel.cli.values import is_flag, misfit, odd_reward, pickling_error
from marl_parallel.core.spaces import is_vector
from marl_parallel.core.transition import ALL, is_empty_info

_WHAT_REMAINS = "it then works, but travels pickled, which is slower"


class Inspector:
    """Is shown every reset and step of one copy, and notes what is odd.

    Args:
        env: The copy.
        notebook: Where.

    Attributes:
        reward_types: The names of the types that rewards were of.
        flag_types: Likewise, of both flags.
    """

    def __init__(self, env: MultiAgentEnv, notebook: Notebook) -> None:
        self._env, self._notebook = env, notebook
        self._steps = 0
        self.reward_types: set[str] = set()
        self.flag_types: set[str] = set()

    def __call__(self, told: tuple[dict[Any, Any], ...]) -> None:
        observations, *rest, infos = told
        self._steps += bool(rest)
        self._look_at_observations(observations)
        self._look_at_masks(observations, infos)
        if rest:
            self._look_at_rewards(rest[0])
            self._look_at_flags("termination", rest[1])
            self._look_at_flags("truncation", rest[2])
            if self._env.rules is Rules.DICT and ALL not in rest[1]:
                self._remark(
                    "no __all__",
                    f"terminateds lacks the key {ALL!r}, which says when the episode is over",
                    f"set {ALL!r} in every step; without it, the episode counts as going on",
                )
        for key, info in infos.items():
            self._look_at_info(key, info)

    def _look_at_observations(self, observations: Mapping[Any, Any]) -> None:
        known = self._env.possible_agents
        for agent, observation in observations.items():
            space = self._env.observation_spaces.get(agent)
            if known and agent not in known:
                self._remark(
                    "unknown agent",
                    f"agent {agent!r} is not among possible_agents",
                    f"add it there, with its spaces; {_WHAT_REMAINS}",
                )
            elif space is None:
                self._remark(
                    "no space", f"agent {agent!r} declares no observation space", f"declare one; {_WHAT_REMAINS}"
                )
            elif (found := misfit(observation, space)) is not None:
                self._note(
                    Question.SPACES,
                    Severity.PROBLEM if found.breaks else Severity.REMARK,
                    f"the observation of {agent}{'' if found.what.startswith('[') else ' '}{found.what}",
                    found.advice,
                )

    def _look_at_rewards(self, rewards: Mapping[Any, Any]) -> None:
        for agent, reward in rewards.items():
            self.reward_types.add(type(reward).__name__)
            found = odd_reward(reward)
            if found is not None:
                self._note(Question.API, Severity.PROBLEM, f"the reward of {agent} {found.what}", found.advice)
            elif agent in self._env.reward_spaces:
                self._look_at_vector(agent, reward)
            elif is_vector(reward):
                self._remark(
                    "vector reward",
                    f"the reward of {agent} is of type {type(reward).__name__}, not one number",
                    f"return a float, or declare `reward_space` if vectors are meant; {_WHAT_REMAINS}",
                )

    def _look_at_vector(self, agent: Any, reward: Any) -> None:
        found = misfit(reward, self._env.reward_spaces[agent])
        if found is not None and found.breaks:
            self._note(
                Question.SPACES,
                Severity.PROBLEM,
                f"the reward of {agent} {found.what}",
                f"{found.advice} (reward_space)",
            )

    def _look_at_masks(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        for agent, space in self._env.action_spaces.items():
            mask = mask_of(observations.get(agent), infos.get(agent))
            if not allows_nothing(mask) and for_sample(space, mask) is None:
                self._remark(
                    "action mask",
                    f"the action mask of {agent} has another form than its action space, {space}, so that actions are "
                    "drawn without it",
                    "report masks in the form that the space's `sample` takes, or under another key",
                )

    def _look_at_flags(self, name: str, flags: Mapping[Any, Any]) -> None:
        for agent, flag in flags.items():
            self.flag_types.add(type(flag).__name__)
            if not is_flag(flag):
                self._note(
                    Question.API,
                    Severity.REMARK if isinstance(flag, int) else Severity.PROBLEM,
                    f"the {name} of {agent} is of type {type(flag).__name__}, not bool",
                    "return True or False",
                )

    def _look_at_info(self, key: Any, info: Any) -> None:
        reason = None if is_empty_info(info) else pickling_error(info)
        if reason is not None:
            self._note(
                Question.PICKLING,
                Severity.PROBLEM,
                f"the info of {key} cannot be pickled ({reason})",
                "put plain numbers, texts and arrays into infos, no objects of the simulator's",
            )

    def _remark(self, kind: str, what: str, advice: str) -> None:
        self._notebook.find(Question.API, Severity.REMARK, what, advice, kind)

    def _note(self, question: Question, severity: Severity, what: str, advice: str) -> None:
        """One of each kind will do, and each advice is one."""
        when = f"in step {self._steps}" if self._steps else "at the first reset"
        self._notebook.find(question, severity, f"{what} ({when})", advice, f"{question} {advice}")
