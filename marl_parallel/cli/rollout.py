"""Runs of a simulator with drawn actions, alone and as copies in a `ParallelEnv`, and where two of them part.

A run leaves a trace: of each reset and step, a fingerprint of everything each agent was told. Runs of the same seed
draw the same actions.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from gymnasium import Space

from marl_parallel.action_masks import for_sample, mask_of
from marl_parallel.adapters import AgentID, MultiAgentEnv, Rules
from marl_parallel.cli.values import fingerprint
from marl_parallel.core.transition import ALL
from marl_parallel.parallel_env import ParallelEnv

Trace: TypeAlias = list[dict[str, dict[str, str]]]
"""By reset or step, by part (`PARTS`), by agent: a fingerprint."""

Calling: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Entered around each call of the simulator, with the name of the method."""

Look: TypeAlias = Callable[[tuple[dict[Any, Any], ...]], None]
"""Is shown the five dicts of each step, and the two of each reset."""

AFTER = -1
"""In place of the number of an environment: what follows the run of the first one."""

PARTS = ("observation", "reward", "termination", "truncation", "info")


class Actor:
    """Draws the actions of one copy, heeding action masks.

    Args:
        action_spaces: By agent.
        seed: The same seed draws the same actions.
    """

    def __init__(self, action_spaces: Mapping[Any, Space[Any]], seed: int) -> None:
        self._spaces = copy.deepcopy(action_spaces)
        self._rank = {agent: place for place, agent in enumerate(self._spaces)}
        for place, space in enumerate(self._spaces.values()):
            space.seed(seed + place)

    def __call__(self, acting: Sequence[AgentID], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> Any:
        return self.draw(acting, {agent: mask_of(observations.get(agent), infos.get(agent)) for agent in acting})

    def draw(self, acting: Sequence[AgentID], masks: Mapping[Any, Any]) -> dict[AgentID, Any]:
        """Actions of those who act; masks that allow nothing, or have another form than the space, are left aside."""
        in_order = sorted(acting, key=lambda agent: self._rank.get(agent, len(self._rank)))
        return {
            agent: self._spaces[agent].sample(for_sample(self._spaces[agent], masks.get(agent)))
            for agent in in_order
            if agent in self._spaces
        }


class Solo:
    """One copy, by itself: no worker, no shared memory, nothing of what makes a `ParallelEnv`.

    Args:
        env: The simulator behind its adapter.
        calling: Entered around each call.
    """

    def __init__(self, env: MultiAgentEnv, calling: Calling) -> None:
        self.env, self._calling = env, calling
        self.acting: list[AgentID] = []
        self.over = True

    def reset(self, seed: int | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode; the seed is passed on where the simulator takes one."""
        keywords = {"seed": seed} if seed is not None and "seed" in self.env.reset_keywords else {}
        with self._calling("reset"):
            observations, infos = self.env.reset(**keywords)
        self.note(observations)
        return observations, infos

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step once."""
        with self._calling("step"):
            result = self.env.step(actions)
        self.note(result[0], result[2], result[3])
        return result

    def note(
        self,
        observations: Mapping[Any, Any],
        terminateds: Mapping[Any, Any] = MappingProxyType({}),
        truncateds: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        """Find out who acts next, and whether the episode is over."""
        self.acting = [a for a in observations if not (terminateds.get(a) or truncateds.get(a))]
        alive, left, turn = self.env.alive(), self.env.agents_left(), self.env.turn()
        if alive is not None:
            self.acting = [agent for agent in observations if agent in alive]
        if left is not None:
            self.acting = [agent for agent in self.acting if agent in left]
        if turn is not None:
            self.acting = [turn]
        said = bool(terminateds.get(ALL) or truncateds.get(ALL))
        self.over = said if self.env.rules is Rules.DICT or ALL in terminateds else not self.acting


class Run(NamedTuple):
    """A run of one environment.

    Attributes:
        trace: Of all its resets and steps.
        steps: The number of steps; another run with as many has the same resets.
        after: The trace of what follows it: a reset without a seed, and a step.
    """

    trace: Trace
    steps: int
    after: Trace


def run_alone(solo: Solo, seed: int, steps: int, seconds: float, look: Look = lambda told: None) -> Run:
    """Step one copy from a reset with this seed, through as many episodes as there are.

    Args:
        solo: The copy.
        seed: Of the first reset, and of the actions.
        steps: How many steps at most.
        seconds: How long at most; less than a step makes no sense, so one is taken.
        look: Is shown everything.
    """
    actor, space_of = Actor(solo.env.action_spaces, seed), solo.env.observation_spaces
    deadline = time.monotonic() + seconds
    observations, infos = solo.reset(seed)
    look((observations, infos))
    trace = [_entry(space_of, observations, infos=infos)]
    taken = 0
    while taken < steps:
        taken += 1
        told = solo.step(actor(solo.acting, observations, infos))
        look(told)
        observations, *_, infos = told
        trace.append(_entry(space_of, *told))
        if solo.over:
            observations, infos = solo.reset()
            look((observations, infos))
            trace.append(_entry(space_of, observations, infos=infos))
        if time.monotonic() > deadline:
            break
    # However slow the simulator is, one reset without a seed can be compared.
    observations, infos = solo.reset()
    after = [_entry(space_of, observations, infos=infos)]
    after.append(_entry(space_of, *solo.step(actor(solo.acting, observations, infos))))
    return Run(trace, taken, after)


def run_copies(
    env: ParallelEnv,
    seed: int,
    steps: int,
    seconds: float,
    calling: Calling = lambda method: contextlib.nullcontext(),
) -> list[Trace]:
    """Step copies side by side; they have been made with this seed, and with `auto_reset=False`.

    Args:
        env: The copies.
        seed: Of the actions.
        steps: How many steps at most.
        seconds: How long at most; one step is taken.
        calling: Entered around each call of `env`.
    """
    schema = env.runner.schema
    actors = [Actor(schema.action_spaces, seed + env_id) for env_id in range(env.num_envs)]
    space_of = schema.observation_spaces
    deadline = time.monotonic() + seconds
    with calling("reset"):
        first = env.reset()
    traces = [[_entry(space_of, seen, infos=told)] for seen, told in zip(*first)]
    for _ in range(steps):
        actions = [actor.draw(*known) for actor, known in zip(actors, zip(env.acting, env.action_masks))]
        with calling("step"):
            told = env.step(actions)
        for trace, own in zip(traces, zip(*told)):
            trace.append(_entry(space_of, *own))
        over = [env_id for env_id in range(env.num_envs) if told[2][env_id][ALL] or told[3][env_id][ALL]]
        if over:
            with calling("reset"):
                begun = env.reset(env_ids=over)
            for env_id, observations, own_infos in zip(over, *begun):
                traces[env_id].append(_entry(space_of, observations, infos=own_infos))
        if time.monotonic() > deadline:
            break
    return traces


def _entry(
    space_of: Mapping[Any, Space[Any]],
    observations: Mapping[Any, Any],
    rewards: Mapping[Any, Any] | None = None,
    terminateds: Mapping[Any, Any] | None = None,
    truncateds: Mapping[Any, Any] | None = None,
    infos: Mapping[Any, Any] | None = None,
) -> dict[str, dict[str, str]]:
    entry = {"observation": {str(key): fingerprint(value, space_of.get(key)) for key, value in observations.items()}}
    for part, values in zip(PARTS[1:], (rewards, terminateds, truncateds, infos)):
        entry[part] = {str(key): fingerprint(value) for key, value in (values or {}).items() if key != ALL}
    return entry


class Difference(NamedTuple):
    """The first difference of two runs.

    Attributes:
        part: One of `PARTS`.
        agent: Whose.
        step: The number of the step, counted from the first; 0 at a reset.
        reset: The number of the latest reset.
    """

    part: str
    agent: str
    step: int
    reset: int

    def __str__(self) -> str:
        return f"the {self.part} of {self.agent}, in {f'step {self.step}' if self.step else f'reset {self.reset}'}"


def first_episode(trace: Trace) -> Trace:
    """The part of a trace before its second reset."""
    resets = [place for place, entry in enumerate(trace) if not is_step(entry)]
    return trace[: resets[1]] if len(resets) > 1 else trace


def is_step(entry: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether an entry of a trace is a step, not a reset."""
    return bool(entry.get("termination") or entry.get("reward"))


def parting(one: Trace, other: Trace) -> Difference | None:
    """Where two runs of the same actions first differ; None where the shorter one agrees with the other.

    Example:
        >>> parting([{"reward": {"a": "0f"}}], [{"reward": {"a": "0f"}}, {}])
        >>> str(parting([{"reward": {"a": "0f"}}], [{"reward": {"a": "1e"}}]))
        'the reward of a, in step 1'
    """
    steps = resets = 0
    for mine, theirs in zip(one, other):
        stepped = is_step(mine)
        steps, resets = steps + stepped, resets + (not stepped)
        for part, told in mine.items():
            for agent in dict.fromkeys([*told, *theirs.get(part, {})]):
                if told.get(agent) != theirs.get(part, {}).get(agent):
                    return Difference(part, agent, steps if stepped else 0, resets)
    return None
