"""What `marl-parallel check` finds in the values that a simulator returns, and in the runs of several."""

from __future__ import annotations

import functools
import math
import operator
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.action_masks import KEY, allows_nothing, for_sample, mask_of
from marl_parallel.adapters import MultiAgentEnv, Rules
from marl_parallel.cli.check_texts import PROBLEM, REMARK, Finding, Question, Severity, Trace, make_finding
from marl_parallel.cli.target import in_brief
from marl_parallel.core.objects.pickling import dumps, loads, where_unpicklable
from marl_parallel.core.reports.advice import OF_KINDS
from marl_parallel.core.spaces import (
    ARRAY_SPACES,
    Mismatch,
    Unreadable,
    as_array,
    check_form,
    check_reward,
    conform,
    is_vector,
    leaves,
    tree_map,
)
from marl_parallel.core.transition import ALL, checked_flags, is_empty_info
from marl_parallel.vector.rows import bounds


@dataclass
class Traits:
    """Traits of the agents that were seen in a run."""

    masked: set[str] = field(default_factory=set)  # have action masks
    late: set[str] = field(default_factory=set)  # join an episode after its reset
    early: set[str] = field(default_factory=set)  # end while others go on
    unseen: set[str] = field(default_factory=set)  # have no observation in the step that truncates them
    lists: dict[str, set[str]] = field(default_factory=dict)  # by part: types of values in place of arrays
    takes_turns: bool = False
    _agents: set[Any] = field(default_factory=set)  # the agents of the present episode
    _ended: set[Any] = field(default_factory=set)
    _latest: set[Any] = field(default_factory=set)  # observed in the step before

    def add(self, env: MultiAgentEnv, dicts: Sequence[dict[Any, Any]]) -> None:
        """Add the traits seen in the two dicts of a reset or the five of a step."""
        observations, *results, infos = dicts
        if not results:
            self._agents, self._ended = {*observations}, set()
        self.late |= {str(agent) for agent in observations.keys() - self._agents}
        self._agents |= observations.keys()
        if results:
            flagged = [{agent for agent, flag in flags.items() if is_flag(flag) and flag} for flags in results[1:]]
            cut_off = flagged[1] | (self._latest - flagged[0] if ALL in flagged[1] else set())
            seen = {agent for agent, observation in observations.items() if observation is not None}
            self.unseen |= {str(agent) for agent in cut_off - self._ended - seen - {ALL}}
            self._ended |= (flagged[0] | flagged[1]) - {ALL}
            if self._agents - self._ended:
                self.early |= {str(agent) for agent in self._ended}
        self._latest = {*observations}
        self.masked |= {
            str(agent) for agent in observations if mask_of(observations[agent], infos.get(agent)) is not None
        }
        self.takes_turns |= env.turn() is not None
        self._add_lists(env, observations, results[0] if results else {}, infos)

    def _add_lists(
        self, env: MultiAgentEnv, observations: Mapping[Any, Any], rewards: Mapping[Any, Any], infos: Mapping[Any, Any]
    ) -> None:
        found: list[tuple[str, Iterator[str]]] = []
        for agent, seen in observations.items():
            acts = env.action_spaces.get(agent)
            if acts is not None and for_sample(acts, mask_of(seen, infos.get(agent))) is not None:
                sources = [source for source in (seen, infos.get(agent)) if isinstance(source, Mapping)]
                found += [("masks", _lists_in(source.get(KEY))) for source in sources]
            if isinstance(seen, Mapping):
                seen = {key: value for key, value in seen.items() if key != KEY}
            found.append(("observations", _lists_of(seen, env.observation_spaces.get(agent))))
        found += [("rewards", _lists_of(reward, env.reward_spaces.get(agent))) for agent, reward in rewards.items()]
        for part, kinds in found:
            for kind in kinds:
                self.lists.setdefault(part, set()).add(kind)

    def in_place_of_arrays(self) -> dict[str, str]:
        """The fields of the finding "lists"."""
        kinds = sorted(set[str]().union(*self.lists.values()), reverse=True)
        parts = [part for part in ("observations", "masks", "rewards") if part in self.lists]
        return {"parts": " and ".join(", ".join(parts).rsplit(", ", 1)), "kinds": " and ".join(f"{k}s" for k in kinds)}

    def facts(self) -> dict[str, Any]:
        """For `Examination.facts`."""
        agents = {"masked_agents": self.masked, "late_agents": self.late, "early_agents": self.early}
        return {**{name: sorted(found) for name, found in agents.items()}, "takes_turns": self.takes_turns}


def _lists_of(value: Any, space: Space[Any] | None) -> Iterator[str]:
    """The types of tuples and lists in a value at places where its space expects an array."""
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items() if isinstance(value, Mapping) else ():
            yield from _lists_of(value.get(key), child)
    elif not isinstance(value, tuple | list):
        return
    elif isinstance(space, ARRAY_SPACES):
        yield "tuple" if isinstance(value, tuple) else "list"
    elif isinstance(space, spaces.Tuple):
        for part, child in zip(value, space.spaces):
            yield from _lists_of(part, child)


def _lists_in(mask: Any) -> Iterator[str]:
    """The types of tuples and lists of numbers in a mask; a tuple of arrays is a form of masks."""
    if isinstance(mask, Mapping):
        for part in mask.values():
            yield from _lists_in(part)
    elif isinstance(mask, tuple | list):
        if any(isinstance(part, Mapping | tuple | list | np.ndarray) for part in mask):
            for part in mask:
                yield from _lists_in(part)
        elif any(part is not None for part in mask):
            yield "tuple" if isinstance(mask, tuple) else "list"


def findings_in(env: MultiAgentEnv, dicts: Sequence[dict[Any, Any]], types: dict[str, set[str]]) -> Iterator[Finding]:
    """Findings about the two dicts of a reset or the five of a step; adds names of types to `types`."""
    observations, *results, infos = dicts
    for agent, observation in observations.items():
        space = env.observation_spaces.get(agent)
        if env.possible_agents and agent not in env.possible_agents:
            yield make_finding("unknown agent", agent=agent)
        elif space is None:
            yield make_finding("no observation space", agent=agent)
        elif (finding := mismatch(observation, space, f"the observation of {agent}")) is not None:
            yield finding
    for agent, space in env.action_spaces.items():
        mask = mask_of(observations.get(agent), infos.get(agent))
        if not allows_nothing(mask) and for_sample(space, mask) is None:
            yield make_finding("mask of another form", agent=agent, space=space)
    for key, info in infos.items():
        if not is_empty_info(info) and (reason := pickling_error(info)) is not None:
            yield make_finding("unpicklable info", key=key, reason=reason)
    if results:
        rewards, terminateds, truncateds = results
        types["reward"] |= {type(reward).__name__ for reward in rewards.values()}
        types["flag"] |= {type(flag).__name__ for flags in results[1:] for flag in flags.values()}
        for agent, reward in rewards.items():
            if (finding := _of_reward(agent, reward, env.reward_spaces.get(agent))) is not None:
                yield finding
        if env.rules is Rules.DICT and ALL not in terminateds:
            yield make_finding("no __all__")
        for name, what, flags in (("termination", "terminated", terminateds), ("truncation", "truncated", truncateds)):
            checked_flags(flags, what)  # after all else, as its error ends the run
            for agent, flag in flags.items():
                if not is_flag(flag):
                    finding = make_finding("flag", name=name, agent=agent, kind=type(flag).__name__)
                    yield finding._replace(severity=REMARK if isinstance(flag, int) else PROBLEM)


def mismatch(value: Any, space: Space[Any], name: str = "") -> Finding | None:
    """The finding that a value does not fit a space: a problem if it stops a `ParallelEnv` or ruins training.

    It is about one part only: the first with a problem, else the first with a remark.
    """
    try:
        tree_map(lambda *_: None, space, value, form=check_form)
    except Mismatch as error:
        what = f"{name}{error.path}: {error}".lstrip(": ")
        return Finding(Question.SPACES, PROBLEM, what, "return what the space says, or declare what is returned")
    found = []
    for path, leaf in leaves(space):
        part, keys = functools.reduce(operator.getitem, path, value), "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, spaces.Dict | spaces.Tuple) and not leaf.contains(part):  # of a class of its own
            plain = spaces.Dict({**leaf.spaces}) if isinstance(leaf, spaces.Dict) else spaces.Tuple(leaf.spaces)
            if (inside := mismatch(part, plain, f"{name}{keys}")) is not None:
                found.append(inside)
                continue
        if parts := _leaf_mismatch(part, leaf):
            what, advice, severity = parts
            found.append(Finding(Question.SPACES, severity, f"{name}{keys}{what}".lstrip(": "), advice))
    return min(found, key=lambda one: one.severity is not PROBLEM, default=None)


def _leaf_mismatch(value: Any, space: Any) -> tuple[str, str, Severity] | None:
    """How a value does not fit a space without parts: the end of a sentence, the advice, and the severity."""
    own_class = type(space) not in (spaces.Discrete, *ARRAY_SPACES)
    if own_class and space.contains(value):
        return None
    try:
        if isinstance(space, ARRAY_SPACES):
            as_array(value, np.dtype(space.dtype), space.shape)
            return _array_remark(value, space)
        conform(space, value)
    except Mismatch as error:
        form = f"arrays of shape {space.shape} and dtype {space.dtype}"
        return f": {error}", f"return {form}, or declare what is returned", PROBLEM
    if own_class or not space.contains(value):
        advice = "return what is in the space, or declare another one"
        return f" is {_brief(value)}, which is not in {space}", advice, PROBLEM
    return None


def _array_remark(value: Any, space: Any) -> tuple[str, str, Severity] | None:
    """What is wrong with a value that its space casts: the end of a sentence, the advice, and the severity."""
    array = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) and not np.can_cast(array.dtype, space.dtype):
        advice = f"return arrays of this dtype, as with .astype(np.{space.dtype}), or declare dtype=np.{array.dtype}"
        return f" has dtype {array.dtype}, but its space says {space.dtype}", advice, REMARK
    if array.dtype.kind == "f" and np.isnan(array).any():
        return " contains NaN", "find where it comes from, such as a division by zero", PROBLEM
    low, high = (np.broadcast_to(bound, array.shape) for bound in bounds(space))
    outside = np.argwhere((array < low) | (array > high))
    if not len(outside):
        return None
    first = tuple(map(int, outside[0]))
    what = (
        f" is {array[first]}{f' at {list(first)}' if first else ''}, but its space says {low[first]} to {high[first]}"
    )
    return what, "widen the space's bounds, or clip what is returned", REMARK


def _of_reward(agent: Any, reward: Any, space: Space[Any] | None) -> Finding | None:
    name = f"the reward of {agent}"
    try:
        check_reward(agent, reward)
    except Unreadable as error:
        return Finding(Question.API, PROBLEM, str(error), OF_KINDS[Unreadable])
    if (wrong := reward_error(reward)) is not None:
        return Finding(Question.API, PROBLEM, f"{name} {wrong[0]}", wrong[1])
    if space is None:
        kind = type(reward).__name__
        return make_finding("undeclared vector", agent=agent, kind=kind) if is_vector(reward) else None
    finding = mismatch(reward, space, name)
    if finding is None or finding.severity is REMARK:
        return None
    return finding._replace(advice=f"{finding.advice} (reward_space)")


def reward_error(reward: Any) -> tuple[str, str] | None:
    """What is wrong with a reward, and the advice; None if it is a finite number, or an array of several."""
    if isinstance(reward, Real | np.bool_):
        advice = "find where it comes from: one such number ruins what is trained with it"
        return None if math.isfinite(reward) else (f"is {reward}", advice)
    if isinstance(reward, np.ndarray | list | tuple) and np.asarray(reward).dtype.kind in "biuf":
        return None
    return f"is {_brief(reward)}, which is not a number", "return a float for each agent"


def is_flag(flag: Any) -> bool:
    """Whether it is a bool, Python's or NumPy's."""
    return isinstance(flag, bool | np.bool_)


def pickling_error(value: Any) -> str | None:
    """Why a value cannot be pickled and unpickled; None if it can."""
    try:
        pickled = dumps(value)
    except Exception as error:  # a simulator's class may raise anything
        return in_brief(error) + where_unpicklable(value)
    try:
        loads(pickled)
    except Exception as error:
        return in_brief(error)
    return None


def _brief(value: Any) -> str:
    text, kind = reprlib.repr(value), type(value).__name__  # also of an object whose own `repr` raises
    return f"{text} ({kind})" if len(text) <= 40 and text[:1] != "<" else f"of type {kind}"


# -- runs --------------------------------------------------------------------------------------------------------------


def first_difference(one: Trace, other: Trace) -> tuple[int, str] | None:
    """The index and text of the first difference of two runs with the same actions, as far as the shorter one goes."""
    for index, ((is_step, mine), (_, theirs)) in enumerate(zip(one, other)):
        for what in {**mine, **theirs}:
            if mine.get(what) != theirs.get(what):
                steps = sum(is_step for is_step, _ in one[: index + 1])
                return index, f"the {what}, in {f'step {steps}' if is_step else f'reset {index + 1 - steps}'}"
    return None
