"""EnvPool: many copies of a task in threads of its own, as a `NativeSimulator`.

Here it is known how EnvPool lays out what goes in and what comes out: flat lists of arrays, one row for each copy, or,
of tasks of several players, one for each player, with `players.env_id` to tell whose. They are taken from the three
methods of its C++ pools, beneath the ones for Gymnasium's users: those gather dicts anew for each batch, which costs a
tenth of a batch of small tasks, and none of them resets some copies without waiting for the results. EnvPool ends the
whole process where an array has another shape or dtype than it wants; so nothing unchecked gets there.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.native import EnvIds, NativeSimulator, Received
from marl_parallel.core.stacking import each

__doctest_requires__ = ["envpool", "torchrl"]

_INSTALL = 'pip install "marl-parallel[envpool]"'
_KNOWN = re.compile(r"1\.[01]\.")
_IDS = ("env_id", "players.env_id", "players.id")
"""Of what goes in: whose it is, rather than an action."""


def open_pool(task: str, seeds: Sequence[int], arguments: Mapping[str, Any]) -> EnvPool:
    """Make a pool of EnvPool's; errors as of `ParallelEnv.from_envpool`.

    Args:
        task: Its name.
        seeds: Of each copy.
        arguments: For `envpool.make`, checked as far as they are not the task's own.
    """
    if arguments.get("render_mode") == "human" and len(seeds) > 1:
        raise ValueError(f'render_mode="human" shows one copy, but num_envs={len(seeds)}: pass "rgb_array"')
    envpool = _library()
    if task not in envpool.list_all_envs():
        raise ValueError(f"EnvPool has no task {task!r}; envpool.list_all_envs() names those it has")
    try:
        pool = envpool.make_gymnasium(task, seed=seeds, **arguments)
    except TypeError as error:
        taken = ", ".join(envpool.make_spec(task).config._fields)
        reason = str(error).partition("\n")[0]
        raise TypeError(f"EnvPool's {task} does not take these arguments ({reason}); it takes {taken}") from error
    except AssertionError as error:  # an argument out of range; not all say which
        raise ValueError(f"EnvPool's {task} refuses one of {arguments}: {error}") from error
    return EnvPool(pool, seeds, f"EnvPool's {task}")


def _library() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f"from_envpool needs EnvPool, which cannot be imported ({error}): {_INSTALL}") from error
    if _KNOWN.match(envpool.__version__) is None:
        raise ImportError(f"from_envpool is written for EnvPool 1.0 and 1.1, found {envpool.__version__}: {_INSTALL}")
    return envpool


class EnvPool(NativeSimulator):
    """A pool of EnvPool's.

    Players are the agents `agent_0`, `agent_1` and so on: by `info:players.id` where a task tells that, else by their
    order within their copy. What is told of a player is in its infos, what is told of a copy with several in
    `__common__`; whose a row is, is not told again.

    Args:
        pool: As of `envpool.make_gymnasium`.
        seeds: Of each copy.
        name: What errors call it.

    Example:
        >>> from marl_parallel import ParallelEnv
        >>> with ParallelEnv.from_envpool("CartPole-v1", num_envs=64, batch_size=16, num_threads=2) as env:
        ...     env.reset_async()
        ...     for _ in range(100):
        ...         batch = env.recv(min_envs=env.batch_size)
        ...         env.send({env_id: {agent: 1 for agent in env.acting[env_id]} for env_id in batch.env_ids})
        >>> len(batch.env_ids), batch.observations[0]["agent_0"].shape
        (16, (4,))
    """

    def __init__(self, pool: Any, seeds: Sequence[int], name: str) -> None:
        config = pool.config
        self.name, self.seeds = name, seeds
        self.num_envs = config["num_envs"]
        self.batch_size = config["batch_size"] or self.num_envs
        self.metadata, self.render_mode = dict(pool.metadata), pool.render_mode
        self._pool = pool
        # dm_control's tasks tell how good the state is that an episode begins in; of no others is that known.
        self._rewards_firsts = type(pool).__name__.startswith("Dmc")
        self._players = config.get("max_num_players", 1)
        self.partial = self._players == 1  # with several, EnvPool waits for as many rows as there are copies
        self._seated = np.zeros((self.num_envs, self._players), np.bool_)  # who was there in each copy's last row
        self._learn_states(pool)
        self._learn_actions(pool)
        agents: list[AgentID] = [f"agent_{place}" for place in range(self._players)]
        space = _mended(pool.observation_space)
        self.schema = Schema(agents, dict.fromkeys(agents, space), dict.fromkeys(agents, self._action_space), None)

    def _learn_states(self, pool: Any) -> None:
        """Where in the list that comes out each thing is: numbers in the place of arrays."""
        self._at = {name: place for place, name in enumerate(pool._state_keys)}
        specs = pool.spec.state_array_spec
        self._of_players = {place for name, place in self._at.items() if specs[name].shape[:1] == [-1]}
        seen = {_key(name): place for name, place in self._at.items() if name.partition(":")[0] == "obs"}
        whole = isinstance(pool.observation_space, spaces.Dict)
        self._seen = _nested(seen) if whole else next(iter(seen.values()))
        told = {_key(name): place for name, place in self._at.items() if name.startswith("info:")}
        told = {name: place for name, place in told.items() if name not in ("env_id", "players.env_id")}
        told["elapsed_step"] = self._at["elapsed_step"]
        own = {name for name, place in told.items() if self._players == 1 or place in self._of_players}
        self._told = _nested({name: place for name, place in told.items() if name in own})
        self._told_in_common = _nested({name: place for name, place in told.items() if name not in own})

    def _learn_actions(self, pool: Any) -> None:
        """What is to go in, and which part of an action it is."""
        specs = pool.spec.action_array_spec
        self._action_keys = [*pool._action_keys]
        names = [name for name in self._action_keys if name not in _IDS]
        of_copies = [name for name in names if specs[name].shape[:1] != [-1]]
        if self._players > 1 and of_copies:
            raise ValueError(f"{self.name} has several players, but one action {of_copies[0]!r} for all of them")
        space = pool.action_space
        parts = {name: space if len(self._action_keys) == 3 else _within(space, name.split(".")) for name in names}
        self._action_space = parts[names[0]] if len(names) == 1 else _space_of(_nested(parts))
        paths = {name: [] if len(names) == 1 else name.split(".") for name in names}
        # Of each: the way to it, the dtype, and the shape of one.
        self._parts = {
            name: (paths[name], np.dtype(specs[name].dtype), tuple(size for size in specs[name].shape if size != -1))
            for name in names
        }

    # -- in --------------------------------------------------------------------------------------------------------

    def reset(self, env_ids: EnvIds) -> None:
        self._pool._reset(env_ids)

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        (action,) = actions
        if self._players == 1:
            given = {"env_id": env_ids, "players.env_id": env_ids}
            chosen: Any = (slice(None), 0)
        else:
            rows, seats = chosen = np.nonzero(self._seated[env_ids])
            given = {"env_id": env_ids, "players.env_id": env_ids[rows], "players.id": seats.astype(np.int32)}
        for name, (path, dtype, shape) in self._parts.items():
            # A copy in any case: the pool's threads read it when the caller may be writing into its own again.
            values = np.array(_within(action, path)[chosen], dtype, order="C")
            given[name] = values if values.shape[1:] == shape else values.reshape(len(values), *shape)
        self._pool._send([given[name] for name in self._action_keys])

    # -- out -------------------------------------------------------------------------------------------------------

    def receive(self) -> Received:
        states = self._pool._recv()
        at = self._at
        truncated = states[at["trunc"]]
        terminated = states[at["done"]] > truncated  # one and not the other
        if self._rewards_firsts or self._players > 1:
            self._take_back_first_rewards(states)
        if self._players > 1:
            return self._of_several(states, terminated, truncated)
        return Received(
            states[at["info:env_id"]],
            [_columns(states, self._seen)],
            states[at["reward"]][:, None],
            terminated[:, None],
            truncated[:, None],
            terminated,
            truncated,
            states[at["elapsed_step"]],
            None,
            _columns(states, self._told),
            {},
        )

    def _take_back_first_rewards(self, states: Sequence[NDArray[Any]]) -> None:
        """Nobody has acted for them."""
        at = self._at
        firsts = states[at["elapsed_step"]] == 0
        if self._players > 1:
            firsts = np.isin(states[at["info:players.env_id"]], states[at["info:env_id"]][firsts])
        states[at["reward"]][firsts] = 0.0

    def _of_several(
        self, states: Sequence[NDArray[Any]], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]
    ) -> Received:
        """Rows of players, laid out by copy and agent."""
        at = self._at
        env_ids, whose = states[at["info:env_id"]], states[at["info:players.env_id"]]
        row_of = np.zeros(self.num_envs, np.intp)
        row_of[env_ids] = np.arange(len(env_ids))
        rows = row_of[whose]
        seats = states[at["info:players.id"]] if "info:players.id" in at else _order_within(rows)

        def spread(place: int) -> NDArray[Any]:
            source = states[place] if place in self._of_players else states[place][rows]
            laid_out = np.zeros((len(env_ids), self._players, *source.shape[1:]), source.dtype)
            laid_out[rows, seats] = source
            return laid_out

        present = np.zeros((len(env_ids), self._players), np.bool_)
        present[rows, seats] = True
        self._seated[env_ids] = present
        gone = terminated[:, None]
        if "info:players.done" in at:
            gone = gone | (spread(at["info:players.done"]).astype(np.bool_) & ~truncated[:, None])
        return Received(
            env_ids,
            [each(spread, self._seen)],
            spread(at["reward"]),
            present & gone,
            present & truncated[:, None],
            terminated,
            truncated,
            states[at["elapsed_step"]],
            present,
            each(spread, self._told),
            each(lambda place: states[place], self._told_in_common),
        )

    # -- the rest --------------------------------------------------------------------------------------------------

    def render(self) -> Sequence[Any]:
        frames = self._pool.render(env_ids=[*range(self.num_envs)])
        return [None] * self.num_envs if frames is None else [*frames]

    def attribute(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        # Its threads end when nobody refers to it any more: not before another thread has returned from `receive`.
        self._pool = None

    def abandon(self) -> None:
        # Its threads are not in this process: to delete it would be to wait for them. So it is referred to for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))


def _key(name: str) -> str:
    """What users know it by.

    Example:
        >>> _key("obs:desired_goal:kettle")
        'desired_goal.kettle'
    """
    return name.partition(":")[2].replace(":", ".")


def _columns(states: Sequence[NDArray[Any]], places: Any) -> Any:
    """What is at these places, with an axis for the one agent."""
    if type(places) is int:
        return states[places][:, None]
    return {
        name: states[place][:, None] if type(place) is int else _columns(states, place)
        for name, place in places.items()
    }


def _order_within(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """The how-manieth of its row each entry is.

    Example:
        >>> _order_within(np.array([0, 0, 2, 0, 2]))
        array([0, 1, 0, 2, 1])
    """
    order = np.argsort(rows, kind="stable")
    places = np.empty_like(rows)
    places[order] = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
    return places


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of dicts, of names with dots.

    Example:
        >>> _nested({"a": 1, "b.c": 2})
        {'a': 1, 'b': {'c': 2}}
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split(".")
        within = nested
        for key in above:
            within = within.setdefault(key, {})
        within[last] = value
    return nested


def _within(nested: Any, path: Sequence[str]) -> Any:
    for key in path:
        nested = nested[key]
    return nested


def _space_of(nested: Mapping[str, Any]) -> spaces.Dict:
    return spaces.Dict({key: _space_of(part) if isinstance(part, dict) else part for key, part in nested.items()})


def _mended(space: Space[Any]) -> Space[Any]:
    """A space as it is meant: EnvPool has the smallest positive number where it means that there is no bound."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, _mended(child)) for key, child in space.spaces.items()])
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    return spaces.Box(low, np.where(space.high == limits.max, np.inf, space.high), dtype=space.dtype.type)
