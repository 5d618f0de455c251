"""`evaluate`: episodes with given seeds, each played to its end, by a policy that is not trained meanwhile."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, described
from marl_parallel.arguments import base_seed, checked_integer, is_sequence_of_seeds
from marl_parallel.core.messages import Pickled
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.spaces import copied, tree_map
from marl_parallel.core.transition import COMMON
from marl_parallel.core.warn import warn
from marl_parallel.fingerprints import fingerprint
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.recording import EpisodeVideo, checked_video
from marl_parallel.rollouts.arrays import Current, Extra, Policy, at, put
from marl_parallel.rollouts.claims import claim, release
from marl_parallel.rollouts.evaluation_result import EvaluationResult
from marl_parallel.rollouts.infos import declared, named_in, shaped
from marl_parallel.rollouts.policies import Choices, Policies, actions_and_extras
from marl_parallel.types import FinishedEpisode
from marl_parallel.vector.stacked import Grouped, StackedVecEnv

DictPolicy: TypeAlias = Callable[..., Sequence[Mapping[AgentID, Any]]]
"""Takes the observations of all environments, a tuple of dicts by agent, and returns a dict of actions for each. If it
has a parameter `rngs`, it gets a tuple of mappings from agents to their generators by this keyword."""

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of episodes that are done, and of all."""

_DEFAULT_EPISODES = 100


# -- policies and results in arrays or in dicts ------------------------------------------------------------------------


class _Generators(dict[AgentID, np.random.Generator]):
    """The generators of the agents of one episode: each depends on the episode's seed and the agent alone."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._seed = seed or 0

    def __missing__(self, agent: AgentID) -> np.random.Generator:
        own = int.from_bytes(blake2b(repr(agent).encode(), digest_size=8).digest(), "little")
        self[agent] = np.random.default_rng((self._seed, own))
        return self[agent]


class _ArraySide:
    """A `StackedVecEnv` and a policy that takes a `Current`.

    Attributes:
        parallel_env: The `ParallelEnv`.
        choices: Which of several policies acts for each agent; None for one policy.
        infos: By environment, the infos of the latest `reset` or `step`.
    """

    def __init__(self, env: StackedVecEnv, policy: Policy | Policies, action_masks: bool) -> None:
        self.parallel_env, self._env, self._policy, self._masks = env.parallel_env, env, policy, action_masks
        self.choices = Choices(policy, env, None) if isinstance(policy, Policies) else None
        self._rngs = env.grouped({
            group: np.empty((env.num_envs, len(agents)), object) for group, agents in env.group_map.items()
        })  # fmt: skip

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        self._observations, infos = self._env.reset(_passed(self.parallel_env, seeds), env_ids=[*seeds])
        self._outcome: list[Any] = []
        self._take(infos)
        for env_id, seed in seeds.items():
            rngs = _Generators(seed)
            for group, of_group in self._env.by_group(self._rngs).items():
                of_group[env_id] = [rngs[agent] for agent in self._env.group_map[group]]

    def step(self, actions: Grouped) -> None:
        self._observations, *self._outcome, infos = self._env.step(actions)
        self._take(infos)

    def _take(self, infos: Any) -> None:
        self.infos: Mapping[int, Mapping[Any, Any]] = dict(enumerate(infos)) if isinstance(infos, list) else infos

    def actions(self) -> Grouped:
        """What the policy chooses, without extras."""
        env = self._env
        current = Current(
            observations=self._observations,
            observed=env.present_next,
            acting=env.acting,
            action_masks=env.action_masks if self._masks else None,
            state=env.state,
            env_ids=range(env.num_envs),
            begins=env.begins,
            rngs=self._rngs,
        )
        if isinstance(self._policy, Policies):
            assert self.choices is not None
            return self.choices.act(current)[0]
        spaces_of = env.by_group(env.single_action_space)
        return actions_and_extras(self._policy(current), [*spaces_of.values()], [])[0]

    def row(self, actions: Grouped, env_id: int) -> Grouped:
        """A copy of the actions of one environment; they have been stepped, so their form is right."""
        return at(self._owned(actions), env_id)

    def with_row(self, actions: Grouped, env_id: int, row: Grouped) -> Grouped:
        """The actions with those of one environment replaced."""
        actions = self._owned(actions)
        put(actions, env_id, row)
        return actions

    def _owned(self, actions: Grouped) -> Grouped:
        spaces_of = self._env.by_group(self._env.single_action_space)
        return self._env.grouped({
            group: tree_map(lambda _, values: np.array(values), spaces_of[group], of_group)
            for group, of_group in self._env.by_group(actions).items()
        })  # fmt: skip

    def seen(self, env_id: int, *, over: bool) -> dict[str, Any]:
        """What the simulator has returned in the latest step, or reset; without observations if its episode is over."""
        rewards_and_flags = {"rewards": self._outcome[:1], "flags": self._outcome[1:]}
        seen = {} if over else {"observations": self._observations, "agents that act": self._env.acting}
        return {name: at(values, env_id) for name, values in {**seen, **rewards_and_flags}.items()}


class _DictSide:
    """A `ParallelEnv` and a policy that takes dicts; attributes and methods are those of `_ArraySide`."""

    choices = None

    def __init__(self, env: ParallelEnv, policy: DictPolicy) -> None:
        self.parallel_env, self._policy, self._takes_rngs = env, policy, _takes(policy, "rngs")
        self._observations: dict[int, Mapping[AgentID, Any]] = {i: {} for i in range(env.num_envs)}
        self._rngs = [_Generators(None) for _ in range(env.num_envs)]

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        observations, infos = self.parallel_env.reset(seed=_passed(self.parallel_env, seeds), env_ids=[*seeds])
        self._observations |= zip(seeds, observations)
        self._outcome: list[Any] = []
        self.infos: Mapping[int, Mapping[Any, Any]] = dict(zip(seeds, infos))
        for env_id, seed in seeds.items():
            self._rngs[env_id] = _Generators(seed)

    def step(self, actions: list[Any]) -> None:
        observations, *self._outcome, infos = self.parallel_env.step(actions)
        self._observations, self.infos = dict(enumerate(observations)), dict(enumerate(infos))

    def actions(self) -> list[Any]:
        seen = tuple(self._observations.values())
        chosen = self._policy(seen, rngs=tuple(self._rngs)) if self._takes_rngs else self._policy(seen)
        if isinstance(chosen, Mapping | str) or not isinstance(chosen, Sequence) or len(chosen) != len(seen):
            raise ValueError(
                f"the policy must return a list with a dict of actions for each of {len(seen)} environments, got "
                f"{described(chosen)}"
            )
        return [*chosen]

    def row(self, actions: list[Any], env_id: int) -> Any:
        return copied(dict(actions[env_id]))

    def with_row(self, actions: list[Any], env_id: int, row: Any) -> list[Any]:
        return [*actions[:env_id], row, *actions[env_id + 1 :]]

    def seen(self, env_id: int, *, over: bool) -> dict[str, Any]:
        rewards, *flags = [of_all[env_id] for of_all in self._outcome] or [None]
        seen = {"observations": self._observations[env_id], "agents that act": self.parallel_env.acting[env_id]}
        return {**({} if over else seen), "rewards": rewards, "flags": flags}


def _passed(env: ParallelEnv, seeds: Mapping[int, int | None]) -> list[int | None] | None:
    """The seeds of a reset; None if the simulators are seeded only when they are made (PyMARL's)."""
    return None if env.stepper.schema.seeded_when_made else [*seeds.values()]


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # compiled code may have no signature
        return False


# -- the episodes ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Episode:
    """One episode of the evaluation; or, with `first`, the first one once more, to see whether it is the same.

    The actions, and what was seen after the reset and each step, are kept of the first episode only.
    """

    seed: int
    constructor: int
    number: int
    first: _Episode | None = None
    names: dict[AgentID, str] | None = None  # of several policies, those that act for its agents
    retries: int = 0
    result: FinishedEpisode | None = None  # once it has been played to its end
    failed: bool = False
    repeats: bool | None = None  # of the first episode
    # Of the present try.
    env_id: int = -1
    length: int = 0
    infos: dict[tuple[str, Any], Any] = field(default_factory=dict)  # by name and agent, or None
    actions: list[Any] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)


class _Evaluation:
    """The state of one evaluation; `play` plays all episodes.

    Attributes:
        in_background: The future and the thread of an evaluation in the background.
    """

    in_background: tuple[Future[EvaluationResult], threading.Thread] | None = None

    def __init__(
        self,
        side: _ArraySide | _DictSide,
        seeds: Sequence[int],
        retries: int,
        max_steps: int | None,
        infos: Mapping[str, Extra],
        progress: Progress | None,
        video: EpisodeVideo | None,
    ) -> None:
        self._side, self._retries, self._max_steps, self._infos = side, retries, max_steps, infos
        self._progress, self._video, self._done = progress, video, 0
        env = side.parallel_env
        self._num_envs, self._mode = env.num_envs, env.stepper.mode
        self._all_at_once = env.stepper.workers is None  # native simulators are seeded all at once
        self._env_ids = _equal_environments(env)
        self._constructor_of = {env_id: number for number, ids in enumerate(self._env_ids) for env_id in ids}
        by_constructor = [
            [_Episode(seed, constructor, number) for number, seed in enumerate(seeds)]
            for constructor in range(len(self._env_ids))
        ]
        self._episodes = [episode for of_one in by_constructor for episode in of_one]
        self._firsts, self._left = [of_one[0] for of_one in by_constructor], [*map(deque, by_constructor)]
        self._playing: dict[int, _Episode] = {}
        self._idle = {*range(self._num_envs)}  # to be reset if there is no episode left for them

    def play(self, stops: Callable[[], bool]) -> None:
        """Play all episodes, or until `stops` returns True."""
        side = self._side
        try:
            while (self._playing or any(self._left)) and not stops():
                self._begin()
                actions = side.actions()
                self._check_own()
                for env_id, episode in self._playing.items():
                    if episode.first is not None:
                        actions = side.with_row(actions, env_id, episode.first.actions[episode.length])
                side.step(actions)
                finished = {one.env_id: one for one in side.parallel_env.finished_episodes}
                for env_id in [*self._playing]:
                    self._after_step(env_id, actions, finished.get(env_id))
                if self._mode is AutoresetMode.DISABLED:
                    self._idle |= finished.keys() - self._playing.keys()
        finally:
            if self._video is not None:
                self._video.discard()

    def _check_own(self) -> None:
        """Raise `RuntimeError` if something else has stepped or reset an environment."""
        steps = self._side.parallel_env.stepper.transitions.statistics.totals[:, -1].tolist()
        for env_id, episode in self._playing.items():
            if steps[env_id] != episode.length:
                raise RuntimeError(
                    f"environment {env_id} was stepped or reset by something else during the evaluation, after "
                    f"{episode.length} steps of its episode: make environments of its own for the evaluation"
                )

    # -- beginning of episodes -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin episodes in free environments, again where an environment was restarted in its reset."""
        while due := self._due():
            for env_id, episode in due.items():
                if episode is not None:
                    self._playing[env_id] = episode
                    episode.env_id, episode.length, episode.infos, episode.actions, episode.seen = env_id, 0, {}, [], []
            none = 0 if self._all_at_once else None
            self._side.reset({env_id: none if episode is None else episode.seed for env_id, episode in due.items()})
            for env_id, episode in due.items():
                self._choose(env_id, episode or self._firsts[self._constructor_of[env_id]])
                if episode is None:
                    continue
                if _was_restarted(self._side.infos.get(env_id)):
                    self._play_again(episode)
                    continue
                self._compare(episode, over=False)
                if (video := self._video_of(episode)) is not None:
                    video.begin(env_id)

    def _choose(self, env_id: int, episode: _Episode) -> None:
        """Let one of several policies act for each agent of an episode, for the same ones in each try."""
        choices, original = self._side.choices, episode.first or episode
        if choices is None:
            return
        if original.names is None:
            original.names = choices.choose(env_id, original.number, original.seed)
            choices.kept |= {*original.names.values()}
        else:
            choices.begin(env_id, original.number, original.names)

    def _due(self) -> dict[int, _Episode | None]:
        """The environments to be reset, with the episodes that they begin; None for no episode."""
        if self._all_at_once and self._playing:
            return {}
        free = [env_id for env_id in range(self._num_envs) if env_id not in self._playing]
        due = {env_id: self._next(env_id) for env_id in free}
        if not (self._all_at_once and any(due.values())):
            due = {env_id: episode for env_id, episode in due.items() if episode is not None or env_id in self._idle}
        self._idle -= due.keys()
        return due

    def _next(self, env_id: int) -> _Episode | None:
        """The episode that a free environment plays next; the repeated one goes to another one than the first."""
        constructor = self._constructor_of[env_id]
        left = self._left[constructor]
        for place, episode in enumerate(left):
            if episode.first is None or episode.first.env_id != env_id or len(self._env_ids[constructor]) == 1:
                del left[place]
                return episode
        return None

    # -- steps and ends of episodes ------------------------------------------------------------------------------------

    def _after_step(self, env_id: int, actions: Any, finished: FinishedEpisode | None) -> None:
        episode, infos, over = self._playing[env_id], self._side.infos.get(env_id, {}), finished is not None
        if _was_restarted(infos):
            self._play_again(episode)
            return
        episode.length += 1
        is_last = over or episode.length == self._max_steps
        if episode.first is None:
            self._take_infos(episode, infos)
        if episode is self._firsts[episode.constructor]:
            episode.actions.append(self._side.row(actions, env_id))
        self._compare(episode, over=over)
        if (video := self._video_of(episode)) is not None:
            if not (over and self._mode is AutoresetMode.SAME_STEP):  # else the frame is the next episode's
                video.add(env_id)
            if is_last:
                video.finish()
        if is_last and episode.first is None:
            episode.result = finished
            if self._side.choices is not None and finished is not None:
                self._side.choices.end([finished])
            self._end(episode)
            if episode is self._firsts[episode.constructor]:
                repeated = _Episode(episode.seed, episode.constructor, episode.number, first=episode)
                self._left[episode.constructor].appendleft(repeated)

    def _play_again(self, episode: _Episode) -> None:
        """After a restart of an environment, let its episode be played once more, or count it as failed."""
        if (video := self._video_of(episode)) is not None:
            video.discard()
        if episode.retries < self._retries:
            del self._playing[episode.env_id]
            episode.retries += 1
            self._left[episode.constructor].appendleft(episode)
        else:
            episode.failed, episode.infos = True, {}
            self._end(episode)

    def _end(self, episode: _Episode) -> None:
        del self._playing[episode.env_id]
        if episode.first is None:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, len(self._episodes))

    def _video_of(self, episode: _Episode) -> EpisodeVideo | None:
        return self._video if episode is self._episodes[0] else None

    def _take_infos(self, episode: _Episode, infos: Mapping[Any, Any]) -> None:
        """Keep the declared values of infos; later ones replace earlier ones."""
        for name, extra in self._infos.items() if infos else ():
            if extra.per_agent:
                found = {agent: named_in(info, name) for agent, info in infos.items() if agent != COMMON}
            else:
                common = named_in(infos.get(COMMON), name)
                found = {None: named_in(infos, name) if common is None else common}
            for agent, value in found.items():
                if value is not None:
                    whose = f"environment {episode.env_id}" + (f", agent {agent!r}" if extra.per_agent else "")
                    what = f"{whose}, seed {episode.seed}: the info {name!r}"
                    episode.infos[name, agent] = shaped(what, value, extra.shape, extra.dtype)

    def _compare(self, episode: _Episode, *, over: bool) -> None:
        """Keep what the first episode shows; compare it with what it shows when it is played once more."""
        first, env_id = episode.first or self._firsts[episode.constructor], episode.env_id
        if episode.first is None and episode is not first:
            return
        seen = {name: fingerprint(value) for name, value in self._side.seen(env_id, over=over).items()}
        seen["ends of episodes"] = str(over)
        if episode is first:
            first.seen.append(seen)
            return
        before = first.seen[episode.length]
        wrong = [name for name in before if before[name] != seen.get(name, before[name])]
        if not wrong and episode.length < len(first.actions):
            return
        first.repeats = not wrong
        self._end(episode)
        if wrong:
            when = f"after {episode.length} steps" if episode.length else "after reset"
            where = f"in environments {first.env_id} and {env_id}"
            where = where if env_id != first.env_id else f"twice in environment {env_id}"
            warn(
                f"the simulator does not repeat its episodes: the episode with the seed {episode.seed} was played "
                f"{where} with the same actions, and {when}, {wrong[0]} differ. Results then depend on the number of "
                "environments and workers: let reset(seed=...) seed all that the simulator draws from, or pass "
                "isolate_rng=True"
            )

    # -- the result ----------------------------------------------------------------------------------------------------

    def result(self) -> EvaluationResult:
        episodes = self._episodes
        returns = [{} if one.result is None else one.result.returns for one in episodes]
        agents = [*dict.fromkeys(agent for of_episode in returns for agent in of_episode)]
        order = {agent: place for place, agent in enumerate(self._side.parallel_env.possible_agents)}
        agents.sort(key=lambda agent: order.get(agent, len(order)))  # others stay in order of appearance
        infos: dict[str, Any] = {}
        informed: dict[str, Any] = {}
        for name, extra in self._infos.items():
            values, known = {}, {}
            for agent in agents if extra.per_agent else [None]:
                of_agent = [one.infos.get((name, agent)) for one in episodes]
                known[agent] = np.array([value is not None for value in of_agent], np.bool_)
                values[agent] = np.zeros((len(episodes), *extra.shape), extra.dtype)
                for index in np.flatnonzero(known[agent]).tolist():
                    values[agent][index] = of_agent[index]
            infos[name], informed[name] = (values, known) if extra.per_agent else (values[None], known[None])
        repeats = {first.repeats for first in self._firsts}
        return EvaluationResult(
            seeds=tuple(one.seed for one in episodes),
            team_returns=_joined([_sum(of_episode.values()) for of_episode in returns]),
            returns={agent: _joined([of_episode.get(agent) for of_episode in returns]) for agent in agents},
            lengths=np.array([one.length for one in episodes], np.int64),
            policies=None
            if self._side.choices is None
            else {agent: np.array([(one.names or {}).get(agent) for one in episodes], object) for agent in agents},
            infos=infos,
            informed=informed,
            retries=np.array([one.retries for one in episodes], np.int64),
            finished=np.array([one.result is not None for one in episodes], np.bool_),
            failed=np.array([one.failed for one in episodes], np.bool_),
            constructors=np.array([one.constructor for one in episodes], np.int64),
            env_ids=tuple(map(tuple, self._env_ids)),
            repeats=False if False in repeats else None if None in repeats else True,
        )


def _equal_environments(env: ParallelEnv) -> list[list[int]]:
    """The environments with equal constructors, agents and options of resets, in order of first appearance.

    Constructors are equal if they are one object, or their pickles are equal. A constructor that makes something else
    for each `env_id` is unknown, as is what `set_attr` has changed.
    """
    workers = env.stepper.workers
    if workers is None:
        return [[*range(env.num_envs)]]
    kinds: dict[Any, list[int]] = {}
    for env_id in range(env.num_envs):
        constructor = workers.rebuilds.construction.constructors[env_id]
        own = (constructor.pickled, *constructor.spans) if isinstance(constructor, Pickled) else id(constructor)
        agents = tuple(map(repr, env.possible_agents_of(env_id)))
        kinds.setdefault((own, agents, workers.rebuilds.options(env_id)), []).append(env_id)
    return [*kinds.values()]


def _was_restarted(infos: Any) -> bool:
    common = (infos or {}).get(COMMON)
    return isinstance(common, Mapping) and bool(common.get("restarted"))


def _sum(returns: Iterable[Any]) -> Any:
    """The sum of all agents' returns; None of none, NaN of vectors of different lengths."""
    values = [*returns]
    if len({np.shape(value) for value in values}) > 1:
        return np.nan
    return sum(values[1:], values[0]) if values else None


def _joined(values: Sequence[Any]) -> NDArray[np.float64]:
    """Values by episode as one array, with NaN for None, and where vectors are expected, for a number."""
    shape = max((np.shape(value) for value in values if value is not None), key=len, default=())
    joined = np.full((len(values), *shape), np.nan)
    for index, value in enumerate(values):
        if value is not None and np.shape(value) in ((), shape):
            joined[index] = value
    return joined


# -- evaluate ----------------------------------------------------------------------------------------------------------


@overload
def evaluate(
    env: StackedVecEnv | ParallelEnv, policy: Policy | Policies | DictPolicy, episodes: int | None = None,
    seed: int = 0, *, seeds: Sequence[int] | None = None, retries: int = 2, max_steps: int | None = None,
    infos: Mapping[str, Extra | tuple[int, ...]] | None = None, action_masks: bool = False,
    progress: Progress | None = None, video: str | os.PathLike[str] | None = None,
    background: Literal[False] = False, snapshot: None = None,
) -> EvaluationResult: ...  # fmt: skip
@overload
def evaluate(
    env: StackedVecEnv | ParallelEnv, policy: None = None, episodes: int | None = None, seed: int = 0, *,
    seeds: Sequence[int] | None = None, retries: int = 2, max_steps: int | None = None,
    infos: Mapping[str, Extra | tuple[int, ...]] | None = None, action_masks: bool = False,
    progress: Progress | None = None, video: str | os.PathLike[str] | None = None,
    background: Literal[True], snapshot: Callable[[], Policy | Policies | DictPolicy],
) -> Future[EvaluationResult]: ...  # fmt: skip
def evaluate(
    env: StackedVecEnv | ParallelEnv,
    policy: Policy | Policies | DictPolicy | None = None,
    episodes: int | None = None,
    seed: int = 0,
    *,
    seeds: Sequence[int] | None = None,
    retries: int = 2,
    max_steps: int | None = None,
    infos: Mapping[str, Extra | tuple[int, ...]] | None = None,
    action_masks: bool = False,
    progress: Progress | None = None,
    video: str | os.PathLike[str] | None = None,
    background: bool = False,
    snapshot: Callable[[], Policy | Policies | DictPolicy] | None = None,
) -> EvaluationResult | Future[EvaluationResult]:
    """Play episodes with given seeds, each to its end, and return their returns and lengths.

    The episodes are the same with every number of environments, workers and backends. If the policy depends on its rows
    alone, or draws from `current.rngs`, their course is the same, too. The first episode is played once more with the
    same actions, in another environment if there is one; a warning says so if the simulator does not repeat it.

    Environments must be equal. If constructors, agents or options of resets differ, each of the different ones plays
    all the episodes; the result has them one after the other. See `docs/recipes/evaluation.md`.

    Args:
        env: The environments, in any auto-reset mode; nothing else may use them meanwhile. Their running episodes are
            dropped, and they are to be reset afterwards: pass other ones than those of the training.
        policy: For a `StackedVecEnv`, takes a `Current` with rows of all environments, as in `Rollout.collect`; if it
            returns a pair of actions and a dict of extras, the extras are ignored. Or `Policies`, which choose for
            each episode, once for all its tries. For a `ParallelEnv`, takes the
            observations of all environments, a tuple of dicts by agent, and returns a list of dicts of actions; if it
            has a parameter `rngs`, it gets a tuple with the generators of each environment's agents by this keyword.
            Environments without an episode left are stepped, too; their results do not count.
        episodes: E, the number of episodes; None for the number of `seeds`, or 100.
        seed: Episode j is seeded with `seed + j`.
        seeds: The seeds of the episodes, in place of `seed`.
        retries: How often an episode is played again after a restart of its environment, with the same seed. After
            that, it counts as failed.
        max_steps: The most steps of an episode, which then counts as unfinished; None for no limit.
        infos: Values of infos to keep, by name, as in `Rollout`: the last value of each episode.
        action_masks: Whether `Current.action_masks` is set; for a `StackedVecEnv` only.
        progress: Called with the number of episodes that are done, and the number of all, after each of them.
        video: Path of a `.gif` or `.mp4` of the first episode; the simulators' `render_mode` is `"rgb_array"`.
        background: True returns a `concurrent.futures.Future` of the result at once, while a thread evaluates. `cancel`
            ends the evaluation after its present step. If it fails, `result` raises the exception, and the logger
            `marl_parallel` has a warning. `progress` is called in that thread, which ends with the program.
        snapshot: With `background`, in place of `policy`: called at once, in the caller's thread, and returns the
            policy. Let it copy the network, so that training can continue.

    Returns:
        An `EvaluationResult`; with `background`, its future.

    Raises:
        TypeError: `env` is not a `StackedVecEnv` or a `ParallelEnv`, or another argument has a wrong type.
        ValueError: An argument is out of range, or the environments cannot be seeded; nothing has been stepped. Or a
            value of infos does not fit what was declared, or the policy returns wrong actions.
        RuntimeError: A `Rollout` or another evaluation uses the environments; nothing has been stepped. Or something
            else has stepped or reset them meanwhile.
        AlreadyPendingCallError, ClosedEnvironmentError: A call is in flight, or `env` is closed.
        ParallelEnvError: A fault, with `on_error="raise"`.

    Example:
        >>> from marl_parallel import make
        >>> def act(current):
        ...     drawn = np.vectorize(lambda rng: rng.random(), otypes=[float])(current.rngs)
        ...     return (5 * drawn).astype(np.int64)
        >>> env = make("mpe2.simple_spread_v3", 2, facade="stacked", auto_reset=False, num_workers=2)
        >>> result = evaluate(env, act, episodes=3, seed=7)
        >>> result.team_returns.shape, result.lengths.tolist(), result.repeats
        ((3,), [25, 25, 25], True)
        >>> one_env = make("mpe2.simple_spread_v3", facade="stacked", backend="serial")
        >>> bool((evaluate(one_env, act, episodes=3, seed=7).team_returns == result.team_returns).all())
        True
        >>> env.close(), one_env.close()
        (None, None)
    """
    parallel_env = _checked_env(env)
    seeds = _checked_seeds(episodes, seed, seeds)
    checked_integer(retries, "retries", 0)
    if max_steps is not None:
        checked_integer(max_steps, "max_steps", or_none=" or None")
    extras = declared("infos", infos)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of two numbers, or None; got {progress!r}")
    _check_policy(policy, background, snapshot)
    batch = parallel_env.stepper.batch
    batch.check_idle("evaluate")
    batch.resets.check_seed(seeds[0])
    if isinstance(env, StackedVecEnv):
        if action_masks:
            _ = env.action_masks  # raises if there are none
    elif action_masks:
        raise TypeError("action_masks=True is for a StackedVecEnv; with a ParallelEnv, let the policy read its masks")
    film = None if video is None else EpisodeVideo(parallel_env, *checked_video(parallel_env, video))
    if snapshot is not None:
        policy = snapshot()
        _check_policy(policy, False, None)
    assert policy is not None
    side = _side(env, policy, action_masks)
    evaluation = _Evaluation(side, seeds, retries, max_steps, extras, progress, film)
    if not background:
        _claim(parallel_env, evaluation)
        try:
            evaluation.play(lambda: False)
        finally:
            release(batch, evaluation)
        return evaluation.result()
    return _in_background(parallel_env, evaluation)


def _side(env: StackedVecEnv | ParallelEnv, policy: Any, action_masks: bool) -> _ArraySide | _DictSide:
    if isinstance(env, StackedVecEnv):
        return _ArraySide(env, policy, action_masks)
    if isinstance(policy, Policies):
        raise TypeError('Policies act on arrays: make the environments with make(..., facade="stacked")')
    return _DictSide(env, policy)


def _checked_env(env: Any) -> ParallelEnv:
    if isinstance(env, StackedVecEnv):
        return env.parallel_env
    if not isinstance(env, ParallelEnv):
        raise TypeError(
            f"evaluate takes a StackedVecEnv or a ParallelEnv, got {type(env).__name__}: make it with "
            'make(..., facade="stacked"), or without facade='
        )
    return env


def _checked_seeds(episodes: Any, seed: Any, seeds: Any) -> list[int]:
    if episodes is not None:
        checked_integer(episodes, "episodes", or_none=" or None")
    if seeds is None:
        if seed is None:
            raise TypeError("seed must be an integer, got None: evaluate plays episodes that can be repeated")
        first = base_seed(seed)
        return [first + index for index in range(_DEFAULT_EPISODES if episodes is None else episodes)]
    if not is_sequence_of_seeds(seeds):
        raise TypeError(f"seeds must be a sequence of integers, one for each episode, got {seeds!r}")
    checked = [checked_integer(one, "each of seeds", 0) for one in seeds]
    if not checked or (episodes is not None and episodes != len(checked)):
        expected = "at least one seed" if episodes is None else f"{episodes} seeds, one for each of episodes"
        raise ValueError(f"seeds must have {expected}, got {len(checked)}")
    return checked


def _check_policy(policy: Any, background: bool, snapshot: Any) -> None:
    if not background and snapshot is not None:
        raise TypeError("snapshot= is for background=True: pass the policy itself")
    if background and (policy is not None or not callable(snapshot)):
        raise TypeError(
            "background=True needs snapshot=, a function that returns a copy of the policy, in place of the policy: "
            f"training may change it meanwhile; got policy={policy!r}, snapshot={snapshot!r}"
        )
    if not background and not callable(policy) and not isinstance(policy, Policies):
        raise TypeError(f"policy must be a function that returns actions, got {policy!r}")


# -- in the background -------------------------------------------------------------------------------------------------


def _claim(env: ParallelEnv, evaluation: _Evaluation) -> None:
    """Make an evaluation the one that steps; `RuntimeError` if a `Rollout` or another evaluation does."""
    batch = env.stepper.batch
    other = claim(batch, evaluation)
    if isinstance(other, _Evaluation) and other.in_background is not None:
        future, thread = other.in_background
        if future.cancelled():
            thread.join()  # it ends after its present step
            other = claim(batch, evaluation)
    if other is not None:
        what = "another evaluation" if isinstance(other, _Evaluation) else f"a {type(other).__name__}"
        raise RuntimeError(
            f"{what} steps these environments, whose episodes would be dropped: make a {type(env).__name__} of its own "
            "for the evaluation"
        )


def _in_background(env: ParallelEnv, evaluation: _Evaluation) -> Future[EvaluationResult]:
    """Evaluate in a thread; the future stays pending until the end, so that it can be cancelled at any time."""
    future: Future[EvaluationResult] = Future()

    def run() -> None:
        try:
            evaluation.play(future.cancelled)
            settle = functools.partial(future.set_result, evaluation.result())
        except BaseException as error:
            logger.warning("an evaluation in the background failed: %r", error, exc_info=error)
            settle = functools.partial(future.set_exception, error)
        release(env.stepper.batch, evaluation)
        if future.set_running_or_notify_cancel():
            settle()

    thread = threading.Thread(target=run, name="marl_parallel evaluation", daemon=True)
    evaluation.in_background = future, thread
    _claim(env, evaluation)
    thread.start()
    return future
