"""`Policies`: several policies, of which each agent gets one for each episode."""

from __future__ import annotations

import contextlib
import pickle
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import ArrayLike, NDArray

from marl_parallel.adapters.protocol import AgentID, described
from marl_parallel.arguments import checked_integer
from marl_parallel.core.block import stacking
from marl_parallel.core.spaces import Mismatch, check_form, tree_map
from marl_parallel.rollouts.arrays import Current, Extra, at
from marl_parallel.rollouts.infos import shaped
from marl_parallel.types import FinishedEpisode
from marl_parallel.vector.stacked import Grouped, StackedVecEnv

_STREAM = 0x706F6C  # of the generators of `choose`, so that they differ from those of simulators with the same seed
_FORMAT = "marl_parallel policies 1"


class Rows(NamedTuple):
    """What one of several policies acts on: r agents, which all act. Grouped as in `StackedVecEnv`.

    If there are several groups, every field is a dict by group, and some groups may have no rows.

    Attributes:
        observations: Arrays or trees `(r, ...)`.
        observed: bool `(r,)`, all True unless an agent acts without an observation.
        acting: bool `(r,)`, all True.
        action_masks: bool `(r, n)`; None without `action_masks=True`.
        state: The global state of each row's environment, `(r, *state_space.shape)`; None without states.
        env_ids: int64 `(r,)`: the environment of each row.
        begins: bool `(r,)`: whose hidden state begins anew with this row: the first one of a life of the agent, and of
            an episode. The agent may have been observed before, while others acted.
        rngs: Only in `evaluate`: a `numpy.random.Generator` for each row, objects `(r,)`, as in `Current`.
        agents: The agent of each row, objects `(r,)`.
    """

    observations: Grouped
    observed: Grouped
    acting: Grouped
    action_masks: Grouped | None
    state: Any
    env_ids: Any
    begins: Grouped
    rngs: Grouped | None
    agents: Any

    def group(self, name: str) -> Rows:
        """The rows of one of several groups."""
        return Rows(*(None if value is None else value[name] for value in self))


class StartedEpisode(NamedTuple):
    """An episode for which `choose` names policies.

    Attributes:
        env_id: The environment.
        number: How many episodes of this environment have ended before, also before a reset; one that a reset has cut
            short does not count. In `evaluate`, the index of the episode's seed.
        agents: All agents that may appear in this environment, also those that join later.
    """

    env_id: int
    number: int
    agents: tuple[AgentID, ...]


class Pairing(NamedTuple):
    """How well one policy does together with, or against, certain others.

    Attributes:
        policy: The policy.
        others: The other policies that took part in these episodes, in the order of their names; empty if all agents
            that took part had this policy.
        episodes: How many episodes have ended, also by a restart.
        mean_return: The mean over these episodes of the mean return of the policy's agents; an array for vector
            rewards, NaN if their lengths differ.
    """

    policy: str
    others: tuple[str, ...]
    episodes: int
    mean_return: Any


RowPolicy: TypeAlias = Callable[[Rows], Any]
"""Returns the actions of its rows, arrays or trees `(r, ...)`, grouped; or a pair of actions and a dict of extras."""

Choose: TypeAlias = Callable[[StartedEpisode, np.random.Generator], Mapping[AgentID, str]]
"""Returns the name of a policy for each of `episode.agents`."""


class Policies(MutableMapping[str, RowPolicy]):
    """Several policies by name. When an episode begins, `choose` names one for each agent, which acts until it ends.

    For `Rollout.collect`, `Rollout.ahead` and `evaluate`, in place of a policy. In each step (with `halves=2`, for each
    half of the environments), each policy is called once with the `Rows` of its agents that act, or not at all if there
    are none; in the order of `index`. `RolloutArrays.policies` says who acted. For an `evaluate` in the background, let
    `snapshot` return `Policies` of its own.

    It is a dict of policies. They can be added, replaced and removed between two rollouts; with `ahead`, in `publish`.
    A new function under an old name acts at once. A removed policy still acts in the running episodes for which it was
    chosen. If it is added again, it has the same `index`.

    Args:
        policies: The functions by name. Each takes `Rows` and returns actions, or a pair of actions and a dict of
            extras; extras that it leaves out are zeros. With several groups, these are dicts by group, and groups
            without rows may be left out.
        choose: Called as `choose(episode, rng)` before the first step of each episode, and when these policies take
            over a running episode. Returns the name of a policy for each of `episode.agents`. If it depends on its
            arguments only, choices do not depend on the number of workers. In environments with equal seeds, `rng`
            draws the same.
        seed: Seeds `rng` in environments that got no seed, as with `seed="own"` of `ParallelEnv`. In other
            environments, `rng` depends on the environment's seed and the number of the episode.

    Raises:
        TypeError: A policy or `choose` is not a function, or a name not a string.
        ValueError: There are no policies, or `seed` is negative.

    Example:
        >>> from marl_parallel import Policies, Rollout, make
        >>> def first_legal(rows):
        ...     return rows.action_masks.argmax(axis=-1)
        >>> def random(rows):
        ...     draws = rng.random(rows.action_masks.shape)
        ...     return np.where(rows.action_masks, draws, -1.0).argmax(axis=-1)
        >>> rng = np.random.default_rng(1)
        >>> def choose(episode, rng):
        ...     learner = rng.integers(2)  # which side it plays
        ...     return {agent: "learner" if side == learner else "random" for side, agent in enumerate(episode.agents)}
        >>> policies = Policies({"learner": first_legal, "random": random}, choose=choose)
        >>> env = make("pettingzoo.classic.tictactoe_v3", 4, facade="stacked", seed=1)
        >>> rollout = Rollout(env, num_steps=50, action_masks=True)
        >>> data = rollout.collect(policies)
        >>> train_on = data.acting[:-1] & (data.policies == policies.index("learner"))
        >>> train_on.shape, bool((train_on.sum(axis=-1) <= 1).all())
        ((50, 4, 2), True)
        >>> [(pairing.policy, pairing.others) for pairing in policies.table()]
        [('learner', ('random',)), ('random', ('learner',))]
        >>> env.close()
    """

    def __init__(self, policies: Mapping[str, RowPolicy], *, choose: Choose, seed: int = 0) -> None:
        if not isinstance(policies, Mapping):
            raise TypeError(f"policies must be a dict of functions by name, got {described(policies)}")
        if not policies:
            raise ValueError("policies must have at least one policy, got {}")
        if not callable(choose):
            raise TypeError(f"choose must be a function of an episode and a generator, got {choose!r:.80}")
        self.choose, self._seed = choose, checked_integer(seed, "seed", 0)
        self._names: list[str] = []  # by index, also of policies that have been removed
        self._indices: dict[str, int] = {}
        self._functions: dict[str, RowPolicy] = {}
        self._removed: dict[str, RowPolicy] = {}  # those that running episodes use
        self._blocks = 0  # how many threads of `ahead` collect with them
        self._sums: dict[tuple[str, tuple[str, ...]], tuple[int, Any]] = {}  # number and sum of returns by pairing
        # An evaluation in the background chooses and counts, too. Reentrant, for the finalizers of `Choices`.
        self._lock = threading.RLock()
        self._uses: weakref.WeakSet[Choices] = weakref.WeakSet()
        self._latest: weakref.ref[Choices] | None = None  # of the rollout that has collected last
        self._loaded: dict[int, _Saved] = {}  # running episodes by environment
        for name, policy in policies.items():
            self[name] = policy

    # -- a dict of policies ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> RowPolicy:
        return self._functions[name]

    def __setitem__(self, name: str, policy: RowPolicy) -> None:
        self._check_unlocked()
        if not isinstance(name, str):
            raise TypeError(f"the name of a policy must be a string, got {name!r:.80}")
        if not callable(policy):
            raise TypeError(f"policy {name!r} must be a function of rows, got {policy!r:.80}")
        with self._lock:
            if name not in self._indices:
                self._indices[name] = len(self._names)
                self._names.append(name)
            self._functions = {**self._functions, name: policy}  # not in place, since another thread may iterate
            self._removed.pop(name, None)

    def __delitem__(self, name: str) -> None:
        self._check_unlocked()
        with self._lock:
            self._removed[name] = self._functions[name]
            self._functions = {other: policy for other, policy in self._functions.items() if other != name}
            self._drop_unused()

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __hash__(self) -> int:  # two of them with the same functions are not the same
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"Policies({[*self._functions]})"

    def index(self, name: str) -> int:
        """The number that `RolloutArrays.policies` has for a policy; `KeyError` if there was none of this name."""
        if name not in self._indices:
            raise KeyError(f"there is no policy {name!r}; the policies are {self.names}")
        return self._indices[name]

    @property
    def names(self) -> list[str]:
        """The names by `index`, also of policies that have been removed."""
        return [*self._names]

    def _function(self, name: str) -> RowPolicy:
        """The function of a policy; also of one that has been removed, while running episodes use it."""
        with self._lock:
            return self._functions[name] if name in self._functions else self._removed[name]

    def _drop_unused(self) -> None:
        """Let go of removed policies that are not needed any more."""
        if self._removed:
            with self._lock:
                used = {name for choices in [*self._uses] for name in choices.used()}
                used |= {name for saved in self._loaded.values() for name in saved.names.values()}
                for name in self._removed.keys() - used:
                    self._removed.pop(name, None)  # what is freed here may call this, too

    # -- while a thread collects -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, blocks: int = 1) -> Iterator[None]:
        """Refuse changes while a thread of `ahead` collects: when they take effect would depend on its speed.

        `blocks` is the number of blocks that begin; -1 while one of them calls `publish`.
        """
        with self._lock:
            self._blocks += blocks
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= blocks

    def _unlocked(self, publish: Callable[[], object]) -> Callable[[], None]:
        """A function that may change policies while one block has `_locked` them."""

        def call() -> None:
            with self._locked(-1):
                publish()

        return call

    def _check_unlocked(self) -> None:
        if self._blocks > 0:
            raise RuntimeError(
                "policies were changed while ahead() collects with them: change them in publish, and give each block "
                "of ahead() Policies of its own"
            )

    # -- choices -----------------------------------------------------------------------------------------------------

    def _drawn(self, episode: StartedEpisode, seed: int | None) -> Any:
        """What `choose` returns for an episode."""
        own = () if seed is not None else (episode.env_id,)
        sequence = np.random.SeedSequence(
            self._seed if seed is None else seed, spawn_key=(_STREAM, *own, episode.number)
        )
        return self.choose(episode, np.random.default_rng(sequence))

    def _checked(self, episode: StartedEpisode, names: Any) -> dict[AgentID, str]:
        """The names in the order of the episode's agents; raises if this is no choice."""
        where = f"environment {episode.env_id}"
        if not isinstance(names, Mapping):
            raise TypeError(f"{where}: choose must return a dict of names by agent, got {described(names)}")
        if {*names} != {*episode.agents}:
            raise ValueError(
                f"{where}: choose must name a policy for each of the agents {[*episode.agents]}, got {dict(names)}"
            )
        for agent, name in names.items():
            if not isinstance(name, str) or name not in self._functions:
                raise ValueError(
                    f"{where}: choose named the policy {name!r} for agent {agent!r}, but the policies are "
                    f"{[*self._functions]}"
                )
        return {agent: str(names[agent]) for agent in episode.agents}  # also of NumPy's strings

    # -- the table ---------------------------------------------------------------------------------------------------

    def _count(self, names: Mapping[AgentID, str], finished: FinishedEpisode) -> None:
        """Count an episode that has ended, in which these policies have acted from its beginning."""
        returns: dict[str, list[Any]] = {}
        for agent, of_agent in finished.returns.items():
            if agent in names:
                returns.setdefault(names[agent], []).append(of_agent)
        with self._lock:
            for name, of_policy in returns.items():
                key = name, tuple(sorted(returns.keys() - {name}))
                mean = np.mean(of_policy, axis=0) if _are_alike(of_policy) else np.nan
                episodes, total = self._sums.get(key, (0, np.zeros_like(mean)))
                self._sums[key] = episodes + 1, total + mean if _are_alike([total, mean]) else np.nan

    def table(self) -> list[Pairing]:
        """All pairings of policies in episodes that have ended, for `print` or `pandas.DataFrame(policies.table())`.

        Episodes count in rollouts and in `evaluate`, if these policies have acted from their beginning.
        """
        with self._lock:
            sums = sorted(self._sums.items(), key=lambda item: (self._indices[item[0][0]], item[0][1]))
        return [Pairing(*key, episodes, _number(total / episodes)) for key, (episodes, total) in sums]

    def mean_return(self, policy: str, *others: str) -> Any:
        """The mean return of a policy in its episodes with exactly these others, as in `table`; NaN without any."""
        with self._lock:
            episodes, total = self._sums.get((policy, tuple(sorted({*others} - {policy}))), (0, np.nan))
        return _number(total / max(episodes, 1))

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_state(self) -> bytes:
        """Save the table, the indices, and the choices for running episodes, without the functions.

        Call it after `Rollout.save_state`, or `Ahead.save_state`. Call `load_state` before `Rollout.load_state`.
        The choices are those of the rollout that has collected last. If several rollouts are saved, give each of them
        `Policies` of its own.
        """
        with self._lock:
            latest = None if self._latest is None else self._latest()
            running = {**self._loaded, **({} if latest is None else latest.saved())}
            return pickle.dumps((_FORMAT, self.names, [*self._functions], self._sums, running))

    def load_state(self, state: bytes) -> None:
        """Go on with what `save_state` has returned.

        All policies of the state must be here, also those that had been removed and act until running episodes end:
        they are removed again. The order is that of the state; policies that are not in it come last.

        Raises:
            ValueError: `state` is something else; or it has policies that are missing here. Nothing has changed.
        """
        self._check_unlocked()
        try:
            kind, names, present, sums, running = pickle.loads(state)
        except Exception as error:
            raise ValueError(f"state must be what Policies.save_state returned; reading it raised {error!r}") from error
        if kind != _FORMAT:
            raise ValueError(f"state must be what Policies.save_state returned, got {kind!r:.80}")
        needed = {*present, *(name for saved in running.values() for name in saved.names.values())}
        known = {**self._removed, **self._functions}
        if missing := [name for name in names if name in needed and name not in known]:
            raise ValueError(f"the state has the policies {missing}, which are missing here: add them before")
        added = [name for name in self._functions if name not in names]
        with self._lock:
            self._functions = {name: known[name] for name in (*present, *added)}
            self._removed = {name: function for name, function in known.items() if name not in self._functions}
            self._names = [*dict.fromkeys([*names, *known])]
            self._indices = {name: index for index, name in enumerate(self._names)}
            self._sums, self._loaded = sums, running
            for choices in [*self._uses]:
                choices.follow_loaded()
            self._drop_unused()

    def _use(self, choices: Choices) -> None:
        """Register choices, whose policies are kept after their removal."""
        with self._lock:
            self._uses.add(choices)
        weakref.finalize(choices, self._drop_unused).atexit = False

    def _set_latest(self, choices: Choices) -> None:
        """Set the choices of a rollout that `save_state` saves."""
        self._latest = weakref.ref(choices)


class _Saved(NamedTuple):
    """The choice for a running episode.

    Attributes:
        number: The number of the episode.
        steps: Its steps so far.
        names: The policies by agent.
        counts: Whether it has an entry in the table.
        fresh: The agents that have not had a row of their present life.
    """

    number: int
    steps: int
    names: dict[AgentID, str]
    counts: bool
    fresh: list[AgentID]


class Choices:
    """The policies chosen for the running episode of each environment; calls them.

    Args:
        policies: The policies.
        env: All environments.
        extras: What is declared by name, each for agents; None to ignore extras.

    Raises:
        ValueError: An extra belongs to environments.
    """

    def __init__(self, policies: Policies, env: StackedVecEnv, extras: Mapping[str, Extra] | None) -> None:
        check_extras(extras)
        self.policies, self._env, self._extras = policies, env, extras
        self._statistics = env.stepper.transitions.statistics
        self._agents = {name: _objects(agents) for name, agents in env.group_map.items()}
        self._spaces = env.by_group(env.single_action_space)
        self._columns = {
            agent: (group, column) for group, agents in env.group_map.items() for column, agent in enumerate(agents)
        }
        n = env.num_envs
        self._numbers: list[int | None] = [None] * n
        self._names: list[dict[AgentID, str]] = [{} for _ in range(n)]
        self._counts = [False] * n
        self._indices = {name: np.full((n, len(agents)), -1, np.int32) for name, agents in env.group_map.items()}
        # Whose next row begins a life, or the first one of an episode.
        self._fresh = {name: np.ones((n, len(agents)), np.bool_) for name, agents in env.group_map.items()}
        self.kept: set[str] = set()  # policies that are needed again after their episode has ended
        policies._use(self)

    def follow_loaded(self) -> None:
        """Renumber the policies after `load_state`; a rollout then takes the loaded choices, or chooses anew."""
        self._numbers = [None] * self._env.num_envs
        for env_id in range(self._env.num_envs):
            self._write_indices(env_id)

    def used(self) -> set[str]:
        """The policies that were chosen for the latest episodes."""
        return {name for names in self._names for name in names.values()} | self.kept

    def saved(self) -> dict[int, _Saved]:
        """The choices for running episodes, by environment."""
        saved: dict[int, _Saved] = {}
        for env_id, (number, ended) in enumerate(zip(self._numbers, self._statistics.ended)):
            if number is not None and number == ended:
                names = self._names[env_id]
                columns = {agent: self._columns[agent] for agent in names}
                fresh = [agent for agent, (group, column) in columns.items() if self._fresh[group][env_id, column]]
                saved[env_id] = _Saved(number, self._steps(env_id), names, self._counts[env_id], fresh)
        return saved

    def _steps(self, env_id: int) -> int:
        return int(self._statistics.totals[env_id, -1])

    # -- episodes ----------------------------------------------------------------------------------------------------

    def begin_due(self, env_ids: range) -> None:
        """Choose for the episodes of a rollout that have begun since the last call."""
        self.policies._set_latest(self)
        seeds = self._env.stepper.batch.resets.passed_seeds
        for env_id, ended in zip(env_ids, self._statistics.ended[env_ids.start : env_ids.stop]):
            if self._numbers[env_id] != ended and not self._take_loaded(env_id, ended):
                self.choose(env_id, ended, seeds[env_id], counts=self._steps(env_id) <= 0)

    def _take_loaded(self, env_id: int, number: int) -> bool:
        """Go on with the choice that `load_state` has read for the running episode, if there is one that fits."""
        policies, of_episode = self.policies, (number, self._steps(env_id))
        with policies._lock:
            saved = policies._loaded.pop(env_id, None)
            for other in [other for other in policies._loaded if other >= self._env.num_envs]:
                del policies._loaded[other]
            agents = self._started(env_id, number).agents
            if saved is None or (saved.number, saved.steps) != of_episode or saved.names.keys() != {*agents}:
                return False
            self.begin(env_id, number, saved.names, counts=saved.counts, fresh=saved.fresh)
            return True

    def _started(self, env_id: int, number: int) -> StartedEpisode:
        agents = self._env.stepper.transitions.possible_agents_of(env_id)
        return StartedEpisode(env_id, number, tuple(agent for agent in agents if agent in self._columns))

    def choose(self, env_id: int, number: int, seed: int | None, *, counts: bool = True) -> dict[AgentID, str]:
        """Let `choose` name the policies of an episode, and begin it."""
        episode = self._started(env_id, number)
        drawn = self.policies._drawn(episode, seed)
        with self.policies._lock:  # a policy that is removed now acts in this episode, or cannot be chosen
            names = self.policies._checked(episode, drawn)
            self.begin(env_id, number, names, counts=counts)
        return names

    def begin(
        self, env_id: int, number: int, names: dict[AgentID, str], *, counts: bool = True,
        fresh: Collection[AgentID] | None = None,
    ) -> None:  # fmt: skip
        """Begin an episode with these policies.

        `counts` says whether it has an entry in the table. `fresh` are the agents that have not had a row of it, by
        default all.
        """
        with self.policies._lock:
            self._names[env_id], self._counts[env_id] = names, counts
            self._write_indices(env_id)
            for agent in names:
                group, column = self._columns[agent]
                self._fresh[group][env_id, column] = fresh is None or agent in fresh
            self._numbers[env_id] = number  # last: if Ctrl-C comes before, this is done again
            self.policies._drop_unused()

    def _write_indices(self, env_id: int) -> None:
        for agent, name in self._names[env_id].items():
            group, column = self._columns[agent]
            self._indices[group][env_id, column] = self.policies.index(name)

    def end(self, finished: Sequence[FinishedEpisode]) -> None:
        """Count episodes that have ended."""
        for episode in finished:
            if self._counts[episode.env_id]:
                self.policies._count(self._names[episode.env_id], episode)

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, current: Current) -> tuple[Grouped, dict[str, Grouped], Grouped]:
        """The actions and extras of all agents, zeros where none acts; and the index of the policy of each, or -1."""
        env, of_envs = self._env, slice(current.env_ids.start, current.env_ids.stop)
        acting = env.by_group(current.acting)
        with self.policies._lock:
            names = self.policies._names  # replaced by `load_state`, and else only longer
            chosen = {group: np.where(acts, self._indices[group][of_envs], -1) for group, acts in acting.items()}
        fresh = {group: of_group[of_envs] for group, of_group in self._fresh.items()}
        for group, begins in env.by_group(current.begins).items():
            fresh[group] |= begins
        actions = {group: stacking.zeros(self._spaces[group], acts.shape) for group, acts in acting.items()}
        extras = {
            name: {group: np.zeros((*acts.shape, *extra.shape), extra.dtype) for group, acts in acting.items()}
            for name, extra in (self._extras or {}).items()
        }
        for index in sorted({index for of_group in chosen.values() for index in of_group.ravel().tolist()} - {-1}):
            places = {group: np.nonzero(of_group == index) for group, of_group in chosen.items()}
            rows = self._rows(current, places, fresh)
            for group, of_group in places.items():
                fresh[group][of_group] = False
            answer = self.policies._function(names[index])(rows)
            self._put(names[index], answer, places, actions, extras)
        return env.grouped(actions), {name: env.grouped(values) for name, values in extras.items()}, env.grouped(chosen)

    def _rows(
        self, current: Current, places: Mapping[str, tuple[NDArray[np.intp], ...]], fresh: Mapping[str, Any]
    ) -> Rows:
        env = self._env

        def of_rows(values: Grouped) -> Grouped:
            if values is None:
                return None
            return env.grouped({group: at(of_group, places[group]) for group, of_group in env.by_group(values).items()})

        state = current.state
        return Rows(
            observations=of_rows(current.observations),
            observed=of_rows(current.observed),
            acting=of_rows(current.acting),
            action_masks=of_rows(current.action_masks),
            state=None if state is None else env.grouped({group: state[rows] for group, (rows, _) in places.items()}),
            env_ids=env.grouped({group: rows + current.env_ids.start for group, (rows, _) in places.items()}),
            begins=of_rows(env.grouped(fresh)),
            rngs=of_rows(current.rngs),
            agents=env.grouped({group: self._agents[group][columns] for group, (_, columns) in places.items()}),
        )

    def _put(
        self,
        name: str,
        answer: Any,
        places: Mapping[str, tuple[NDArray[np.intp], ...]],
        actions: Mapping[str, Any],
        extras: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Write what a policy has returned to the places of its rows."""
        of_policy = f"policy {name!r}"
        chosen, own = actions_and_extras(answer, [*self._spaces.values()], [*extras])
        if self._extras is not None and (unknown := [*(own or {}).keys() - extras.keys()]):
            raise TypeError(
                f"{of_policy} returned the extras {unknown}, which are not declared: pass extras={{...}} to the "
                f"Rollout; declared are {[*extras]}"
            )

        def put(what: str, place: Any, whole: NDArray[Any], values: Any) -> None:
            expected = len(place[0]), *whole.shape[2:]
            whole[place] = shaped(what, values, expected, whole.dtype)

        for group, values in self._by_group(f"{of_policy}: the actions", chosen, places).items():
            what, place = self._what(of_policy, "the actions", group), places[group]
            try:
                tree_map(
                    lambda whole, part, what=what, place=place: put(what, place, whole, part),
                    actions[group], values, form=check_form,
                )  # fmt: skip
            except Mismatch as error:
                raise ValueError(f"{what}{error.path}: {error}") from None
        for extra, values in (own or {}).items() if self._extras is not None else ():
            for group, of_group in self._by_group(f"{of_policy}: the extra {extra!r}", values, places).items():
                put(self._what(of_policy, f"the extra {extra!r}", group), places[group], extras[extra][group], of_group)

    def _what(self, of_policy: str, what: str, group: str) -> str:
        return f"{of_policy}: {what}" + (f" of group {group!r}" if len(self._spaces) > 1 else "")

    def _by_group(self, what: str, values: Any, places: Mapping[str, Any]) -> dict[str, Any]:
        """The values of each group that has rows; of the others, they may be missing, and are ignored."""
        if len(places) == 1:
            return self._env.by_group(values)
        needed = [group for group, (rows, _) in places.items() if len(rows)]
        if not isinstance(values, Mapping) or not {*needed} <= values.keys() <= {*places}:
            got = f"the keys {[*values]}" if isinstance(values, Mapping) else described(values)
            raise ValueError(f"{what} must be a dict by group, with the keys {needed}; got {got}")
        return {group: values[group] for group in needed}


def check_extras(extras: Mapping[str, Extra] | None) -> None:
    """`ValueError` for an extra of environments: several policies may act in one."""
    if of_envs := [name for name, extra in (extras or {}).items() if not extra.per_agent]:
        raise ValueError(
            f"the extras {of_envs} belong to environments, but with Policies several policies may act in one: declare "
            "Extra(..., per_agent=True)"
        )


def actions_and_extras(
    chosen: Any, action_spaces: Sequence[Space[Any]], declared: Sequence[str]
) -> tuple[Any, Mapping[str, Any] | None]:
    """What a policy has returned: actions alone, or a pair of actions and a dict of extras."""
    if not (isinstance(chosen, tuple | list) and len(chosen) == 2 and isinstance(chosen[1], Mapping)):
        return chosen, None
    for space in action_spaces:
        second = space[1] if isinstance(space, spaces.Tuple) and len(space) == 2 else None
        may_be_action = isinstance(second, spaces.Dict) and chosen[1].keys() == second.spaces.keys()
        if may_be_action and not chosen[1].keys() <= {*declared}:
            return chosen, None
    actions, extras = chosen
    return actions, extras


def pfsp_weights(
    win_rates: ArrayLike, weighting: Literal["hard", "variance"] = "hard", *, power: float = 2.0
) -> NDArray[np.float64]:
    """The probabilities with which prioritised fictitious self-play draws each of n opponents.

    Args:
        win_rates: `(n,)`: the learner's rate of wins against each opponent, from 0 to 1.
        weighting: `"hard"`: opponents that win often, in proportion to `(1 - win_rate) ** power`. `"variance"`:
            opponents that are as good as the learner, in proportion to `win_rate * (1 - win_rate)`.
        power: Of `"hard"`: the larger, the more often the hardest opponents are drawn.

    Returns:
        float64 `(n,)`, which add up to 1; all equal if the learner always wins, or with `"variance"` always loses.

    Raises:
        ValueError: A rate is not between 0 and 1, there are none, or `weighting` or `power` is out of range.

    Reference: Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning (2019),
    https://doi.org/10.1038/s41586-019-1724-z, Methods, "Prioritized fictitious self-play".

    Example:
        >>> pfsp_weights([0.9, 0.5, 0.5]).round(2).tolist()
        [0.02, 0.49, 0.49]
        >>> pfsp_weights([1.0, 0.5, 0.0], "variance").tolist()
        [0.0, 1.0, 0.0]
    """
    rates = np.asarray(win_rates, np.float64)
    if rates.ndim != 1 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"win_rates must be a list of numbers from 0 to 1, got {win_rates!r:.200}")
    if weighting not in ("hard", "variance"):
        raise ValueError(f'weighting must be "hard" or "variance", got {weighting!r}')
    if not (np.isfinite(power) and power >= 0):
        raise ValueError(f"power must be a number from 0, got {power!r}")
    losses = (1 - rates) / max((1 - rates).max(), np.finfo(np.float64).tiny)  # so that high powers do not become 0
    weights = losses**power if weighting == "hard" else rates * (1 - rates)
    return weights / weights.sum() if weights.sum() > 0 else np.full(rates.size, 1 / rates.size)


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    for place, value in enumerate(values):  # all at once, tuples would be taken for rows
        array[place] = value
    return array


def _are_alike(values: Sequence[Any]) -> bool:
    return len({np.shape(value) for value in values}) == 1


def _number(value: Any) -> Any:
    """A float; an array for vector rewards."""
    return value if np.ndim(value) else float(value)
