"""EnvPool as a `NativeSimulator`: many environments of one task in EnvPool's own threads.

Its inputs and results are flat lists of arrays: one row for each environment or, in tasks with several players, one for
each player, with `players.env_id` for its environment. This module calls three private methods of EnvPool's C++
pools. The public ones make dicts, which takes a tenth of the time of a batch of a small task, and none of them resets
some environments without waiting. EnvPool aborts the process if an array has a wrong shape or dtype, so all arrays are
checked before.

Tasks with several players are of two kinds. In most, each player that is present acts. In turn-based games, such as
those of PGX, all players are observed and rewarded, and an environment takes one action: the action of the player whose
id is `info:current_player`. `info:legal_action_mask` is the mask of this player.
"""

from __future__ import annotations

import ctypes
import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.spaces import leaves, tree_map
from marl_parallel.sources.native import EnvIds, NativeSimulator, Received
from marl_parallel.sources.repeated_actions import RepeatedActions
from marl_parallel.types import how_to_install

_INSTALL = how_to_install("envpool")
_IDS = ("env_id", "players.env_id", "players.id")  # inputs that name the environment and player of a row
_TURN, _LEGAL = "info:current_player", "info:legal_action_mask"


def library() -> Any:
    """EnvPool's module; raises `ImportError` if it cannot be imported or its release is not supported."""
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f"from_envpool needs EnvPool, which cannot be imported ({error}): {_INSTALL}") from error
    if re.match(r"1\.[012]\.", envpool.__version__) is None:
        raise ImportError(f"from_envpool is written for EnvPool 1.0 to 1.2, found {envpool.__version__}: {_INSTALL}")
    return envpool


def task_name(name: str) -> str:
    """EnvPool's name of a task: without `ALE/`, which Gymnasium has before names of Atari games.

    Raises:
        ImportError: EnvPool cannot be imported, or its release is not supported.
        ValueError: EnvPool has no such task.
    """
    task, tasks = name.removeprefix("ALE/"), library().list_all_envs()
    if task not in tasks:
        near = ", ".join(difflib.get_close_matches(task, tasks))
        hint = f"; similar tasks are {near}" if near else ""
        raise ValueError(f"EnvPool has no task {name!r}; envpool.list_all_envs() names those it has{hint}")
    return task


def open_pool(
    name: str, seeds: Sequence[int], arguments: Mapping[str, Any], frame_skip: int | None = None
) -> NativeSimulator:
    """Make a pool, with the arguments and errors of `ParallelEnv.from_envpool`."""
    if arguments.get("render_mode") == "human" and len(seeds) > 1:
        raise ValueError(f'render_mode="human" shows one environment, but num_envs={len(seeds)}: pass "rgb_array"')
    envpool, task = library(), task_name(name)
    passed = dict(arguments)
    accepted = envpool.make_spec(task).config._fields
    if frame_skip is not None and "frame_skip" in accepted:
        passed["frame_skip"], frame_skip = frame_skip, None

    def make(seeds: Sequence[int]) -> Any:
        try:
            return envpool.make_gymnasium(task, seed=[*seeds], **passed)
        except TypeError as error:
            reason = str(error).partition("\n")[0]
            text = f"EnvPool's {task} does not take these arguments ({reason}); it takes {', '.join(accepted)}"
            raise TypeError(text) from error
        except AssertionError as error:  # an argument out of range; not all of them name it
            raise ValueError(f"EnvPool's {task} refuses one of {passed}: {error}") from error

    pool = EnvPool(make(seeds), seeds, f"EnvPool's {task}", make)
    return pool if frame_skip in (None, 1) else RepeatedActions(pool, frame_skip)


def wrap_pool(pool: Any) -> EnvPool:
    """Wrap a pool that `envpool.make_gymnasium` has made; `TypeError` for anything else."""
    library()
    if not all(hasattr(pool, name) for name in ("_state_keys", "_action_keys", "action_space", "config")):
        raise TypeError(f"expected the name of a task, or a pool made by envpool.make_gymnasium; got {type(pool)}")
    config = pool.config
    seeds = list(config.get("env_seed") or range(config["seed"], config["seed"] + config["num_envs"]))
    name = type(pool).__name__.removesuffix("GymnasiumEnvPool")
    return EnvPool(pool, seeds, f"EnvPool's {name}")


class EnvPool(NativeSimulator):
    """A pool of EnvPool.

    Players are the agents `agent_0`, `agent_1` and so on, by `info:players.id` if the task has it, else by their order.
    Infos of players become infos of agents; infos of an environment with several players become `__common__`.

    Args:
        pool: What `envpool.make_gymnasium` returns.
        seeds: The seed of each environment.
        name: The name of the task in error messages.
        make: Makes the same pool with other seeds; None if the arguments are unknown: the pool cannot be seeded again.
    """

    def __init__(
        self, pool: Any, seeds: Sequence[int], name: str, make: Callable[[Sequence[int]], Any] | None = None
    ) -> None:
        config = pool.config
        self.name, self.seeds = name, seeds
        self.reseeds, self._make = make is not None, make
        self.num_envs = config["num_envs"]
        self.batch_size = config["batch_size"] or self.num_envs
        self.metadata, self.render_mode = dict(pool.metadata), pool.render_mode
        self._pool = pool
        # Tasks of dm_control reward the first state of an episode, before any action.
        self._rewards_first_states = type(pool).__name__.startswith("Dmc")
        self._players = config.get("max_num_players", 1)
        self.partial = self._players == 1  # with several, EnvPool waits for as many rows as there are environments
        self._present = np.zeros((self.num_envs, self._players), np.bool_)  # in the last row of each environment
        self._turn_based = self._players > 1 and _TURN in pool._state_keys
        self._turn = np.zeros(self.num_envs, np.intp)  # the player who acts next in each environment
        # The positions of observations and infos in the list of results.
        self._at = at = {name: position for position, name in enumerate(pool._state_keys)}
        specs = pool.spec.state_array_spec
        self._of_players = {position for name, position in at.items() if specs[name].shape[:1] == [-1]}
        # The name "desired_goal.kettle" of the documentation is "obs:desired_goal:kettle" here.
        entries = [(*name.partition(":")[::2], position) for name, position in at.items()]
        observed = {key.replace(":", "."): position for kind, key, position in entries if kind == "obs"}
        infos = {key.replace(":", "."): position for kind, key, position in entries if kind == "info"}
        infos = {key: infos[key] for key in infos if key not in _IDS[:2]} | {"elapsed_step": at["elapsed_step"]}
        is_dict = isinstance(pool.observation_space, spaces.Dict)
        self._observed = _nested(observed) if is_dict else next(iter(observed.values()))
        of_agents = {key for key in infos if self._players == 1 or infos[key] in self._of_players}
        self._infos = _nested({key: infos[key] for key in infos if key in of_agents})
        self._common = _nested({key: infos[key] for key in infos if key not in of_agents})
        # The arrays to send: for each, its path in an action, and the dtype and shape of one player's part.
        specs = pool.spec.action_array_spec
        self._action_keys = [*pool._action_keys]
        names = sorted({*self._action_keys} - {*_IDS})
        shared = [name for name in names if specs[name].shape[:1] != [-1]]
        if self._players > 1 and shared:
            raise ValueError(f"{self.name} has several players, but one action {shared[0]!r} for all of them")
        self._parts = {}
        for name in names:
            shape = tuple(size for size in specs[name].shape if size != -1)
            self._parts[name] = [] if len(names) == 1 else name.split("."), np.dtype(specs[name].dtype), shape
        action_space: Space[Any] = pool.action_space
        if len(names) > 1:
            parts = {name: _part(action_space, path) for name, (path, _, _) in self._parts.items()}
            action_space = _space_of(_nested(parts))
        elif len(self._action_keys) != 3:
            action_space = _part(action_space, names[0].split("."))
        agents: list[AgentID] = [f"agent_{player}" for player in range(self._players)]
        observation_space = _space_of(tree_map(_unbounded, pool.observation_space))
        # EnvPool 1.2 declares values of bool as `MultiBinary`, whose dtype is int8.
        self._is_binary = tree_map(lambda leaf: isinstance(leaf, spaces.MultiBinary), observation_space)
        self._has_binary = any(isinstance(leaf, spaces.MultiBinary) for _, leaf in leaves(observation_space))
        self.schema = Schema(
            agents, dict.fromkeys(agents, observation_space), dict.fromkeys(agents, action_space), None
        )

    def reset(self, env_ids: EnvIds) -> None:
        self._pool._reset(env_ids)

    def reseed(self, seeds: Sequence[int]) -> None:
        assert self._make is not None
        self._pool = None  # first, so that there are never twice as many threads
        self._pool, self.seeds = self._make(seeds), seeds

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        (action,) = actions
        if self._players == 1:
            inputs = {"env_id": env_ids, "players.env_id": env_ids}
            chosen: Any = (slice(None), 0)
        elif self._turn_based:
            turn = self._turn[env_ids]
            inputs = {"env_id": env_ids, "players.env_id": env_ids, "players.id": turn.astype(np.int32)}
            chosen = np.arange(len(env_ids)), turn
        else:
            rows, players = chosen = np.nonzero(self._present[env_ids])
            inputs = {"env_id": env_ids, "players.env_id": env_ids[rows], "players.id": players.astype(np.int32)}
        for name, (path, dtype, shape) in self._parts.items():
            # Always a copy: EnvPool's threads read it while the caller may write into its own array again.
            values = np.array(_part(action, path)[chosen], dtype, order="C")
            inputs[name] = values if values.shape[1:] == shape else values.reshape(len(values), *shape)
        self._pool._send([inputs[name] for name in self._action_keys])

    def receive(self) -> Received:
        states: list[NDArray[Any]] = self._pool._recv()
        at, present, turns, masks = self._at, None, None, None
        env_ids, elapsed, truncated = states[at["info:env_id"]], states[at["elapsed_step"]], states[at["trunc"]]
        terminated = states[at["done"]] > truncated  # done, but not truncated
        terminations, truncations = terminated[:, None], truncated[:, None]
        index = self._player_index(states) if self._players > 1 else None

        def stacked(position: int) -> NDArray[Any]:
            """The values `(environments, players, ...)` at one position of the list."""
            if index is None:
                return states[position][:, None]
            rows = states[position] if position in self._of_players else states[position][index[0]]
            values = np.zeros((len(env_ids), self._players, *rows.shape[1:]), rows.dtype)
            values[index] = rows
            return values

        if index is not None:
            present = np.zeros((len(env_ids), self._players), np.bool_)
            present[index] = True
            self._present[env_ids] = present
            terminations, truncations = present & terminations, present & truncations
            if "info:players.done" in at:
                terminations |= stacked(at["info:players.done"]).astype(np.bool_) & ~truncated[:, None]
        if _LEGAL in at:
            masks = np.broadcast_to(
                states[at[_LEGAL]][:, None], (len(env_ids), self._players, *states[at[_LEGAL]].shape[1:])
            )
        if self._turn_based:
            self._turn[env_ids] = states[at[_TURN]]
            turns = self._turn[env_ids, None] == np.arange(self._players)
        rewards = stacked(at["reward"])
        if self._rewards_first_states or self._players > 1:
            rewards[elapsed == 0] = 0.0
        observations = tree_map(stacked, self._observed)
        if self._has_binary:
            observations = tree_map(_as_declared, self._is_binary, observations)
        return Received(
            env_ids, [observations], rewards, terminations, truncations, terminated, truncated, elapsed, present,
            tree_map(stacked, self._infos), tree_map(states.__getitem__, self._common), turns,
            None if masks is None else [masks],
        )  # fmt: skip

    def _player_index(self, states: Sequence[NDArray[Any]]) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """For each player's row, the row of its environment and the number of its agent."""
        at, row_of = self._at, np.zeros(self.num_envs, np.intp)
        env_ids = states[at["info:env_id"]]
        row_of[env_ids] = np.arange(len(env_ids))
        rows = row_of[states[at["info:players.env_id"]]]
        if "info:players.id" in at:
            return rows, states[at["info:players.id"]]
        order = np.argsort(rows, kind="stable")
        players = np.empty_like(rows)
        players[order] = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
        return rows, players

    def render(self) -> Sequence[Any]:
        frames = self._pool.render(env_ids=[*range(self.num_envs)])
        return [None] * self.num_envs if frames is None else [*frames]

    def attribute(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        # The pool's threads end with the last reference to it: not before another thread has returned from `receive`.
        self._pool = None

    def abandon(self) -> None:
        # The pool's threads are not in this process, and deleting the pool would wait for them: never delete it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))


def _as_declared(is_binary: bool, array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.int8) if is_binary and array.dtype == np.bool_ else array


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of dicts, from names with dots."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        reduce(lambda parent, key: parent.setdefault(key, {}), path, nested)[last] = value
    return nested


def _part(tree: Any, path: Sequence[str]) -> Any:
    return reduce(operator.getitem, path, tree)


def _space_of(tree: Any) -> Space[Any]:
    """A space from dicts of spaces."""
    space: Space[Any] = tree
    return spaces.Dict([(key, _space_of(part)) for key, part in tree.items()]) if isinstance(tree, dict) else space


def _unbounded(space: Space[Any]) -> Space[Any]:
    """A `Box` with the intended bounds: EnvPool writes the smallest positive number if there is no lower bound."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low)
    return spaces.Box(low, np.where(space.high == limits.max, np.inf, space.high), dtype=space.dtype.type)
