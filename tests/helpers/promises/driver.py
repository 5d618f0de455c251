"""How a test talks to a facade, and how the facade shows what happened: `Driver`, the base of all drivers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from helpers.promises.games import AGENTS, GAMES, Script
from helpers.promises.loop import ByAgent, Moment
from marl_parallel import ParallelEnv

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
Read = dict[str, Any]
"""What a facade shows of one environment, or should show: names and plain values."""


class Driver:
    """One facade; `read` and `expected` have the same keys.

    A driver says what the facade is by these attributes. Each exception from a promise is one of them, or a method that
    a driver overrides, with the reason beside it.

    Attributes:
        modes: The modes of automatic resets that the facade takes; others are refused.
        games: The games that it plays, by name.
        restarted_games: The games in which a simulator breaks.
        pickled_games: The games that are also played without shared memory, and in processes.
        saved_games: The games whose states are saved and loaded.
        masked_games: The games whose masks it shows, in `masks`.
        vector_games: The games that are also played with vector rewards.
        shows_vectors: Whether it shows vector rewards as they are; otherwise it refuses them.
        scalarizes: Whether it takes `scalarize`.
        is_drop_in: Whether it makes its own `ParallelEnv`, so that no other facade can step it.
        sends: Whether it has `step_async` and `step_wait`, or a pair of another name.
        refuses_reset_in_flight: Whether a reset raises while a step is in flight.
        resets_some: Whether the caller can reset some environments.
        keeps_rows: Whether a reset or load of some environments also returns the `observations` of the others.
        resets_at_once: Whether environments that are over must be reset before the next step.
        resets_some_first: Whether the first reset may be of some environments.
        passes_on: Whether games of dict rules get the actions of agents that do not act, too.
        refusals: The errors of wrong actions.
        copies: Whether observations are the caller's own, also if the `ParallelEnv` has `copy=False`.
        takes_views: Whether it takes a `ParallelEnv` with `copy=False`.
        steps_some: Whether it can step and reset some environments while others are in flight.
        saves: Whether it has `save_state` and `load_state`.
        loads_some: Whether it can load some environments.
        loads_some_first: Whether it can load some before a reset of all.
        waits: Whether it has `reset_async`, `step_async` and `call_async`, each with a `..._wait(timeout)`.
        forwards: Whether its `set_attr`, `get_attr` and `call` have a value for each environment.
        takes_options: Whether its `reset` takes `seed` and `options`.
    """

    modes: Sequence[AutoresetMode] = (SAME_STEP, NEXT_STEP, DISABLED)
    games: Sequence[str] = tuple(GAMES)
    restarted_games: Sequence[str] = ("all_live", "agents_die", "agents_join")
    pickled_games: Sequence[str] = ("agents_join", "agents_return", "corpses_return")
    saved_games: Sequence[str] = ("agents_die", "agents_return", "corpses_return", "masks_of_the_dead")
    masked_games: Sequence[str] = ("masks", "masks_in_infos", "masks_of_the_dead")
    vector_games: Sequence[str] = ("agents_join",)
    shows_vectors = False
    scalarizes = False
    is_drop_in = False
    sends = True
    refuses_reset_in_flight = True
    resets_some = True
    keeps_rows = False
    resets_at_once = False
    resets_some_first = False
    passes_on = False
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError)
    copies = False
    takes_views = True
    steps_some = False
    saves = True
    loads_some = True
    loads_some_first = False
    waits = True
    forwards = True
    takes_options = True

    def script(self, game: str) -> Script:
        return GAMES[game]

    def open(self, constructors: Sequence[Any], mode: AutoresetMode, **arguments: Any) -> Any:
        """The facade of a new `ParallelEnv` of these games."""
        own = {name: arguments.pop(name) for name in ("scalarize",) if name in arguments}
        return self.make(ParallelEnv(constructors, mode, **arguments), **own)

    def drawn(self, rng: np.random.Generator, now: Moment | None) -> ByAgent:
        """A random action for every agent."""
        return {agent: int(rng.integers(3)) for agent in AGENTS}

    def make(self, env: ParallelEnv) -> Any:
        """The facade; if it `scalarizes`, with that keyword."""
        raise NotImplementedError

    def reset(self, facade: Any, env_ids: list[int] | None = None) -> Any:
        """Reset all environments, or some; returns results for `read`."""
        raise NotImplementedError

    def step(self, facade: Any, actions: list[ByAgent]) -> Any:
        """Step all; `actions` has a dict with an action of every agent, also of those that do not act."""
        return self.step_with(facade, self.actions(facade, actions))

    def step_with(self, facade: Any, actions: Any) -> Any:
        """Step with actions in the facade's own form."""
        return facade.step(actions)

    def env_of(self, facade: Any) -> ParallelEnv:
        env: ParallelEnv = facade.parallel_env
        return env

    def send(self, facade: Any, actions: list[ByAgent]) -> None:
        facade.step_async(self.actions(facade, actions))

    def receive(self, facade: Any) -> Any:
        return facade.step_wait()

    def step_some(self, facade: Any, actions: dict[int, ByAgent]) -> tuple[Any, list[int]]:
        """Begin to step some environments, then wait for some result of those in flight; also returns their ids."""
        raise NotImplementedError

    def save(self, facade: Any) -> list[bytes]:
        states: list[bytes] = facade.save_state()
        return states

    def load(self, facade: Any, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        """Load; returns results for `read`."""
        raise NotImplementedError

    def close(self, facade: Any) -> None:
        facade.close()

    def actions(self, facade: Any, actions: list[ByAgent]) -> Any:
        """The actions in the form that the facade takes."""
        raise NotImplementedError

    def masks(self, facade: Any, results: Any, env_id: int) -> ByAgent:
        """The action masks of all agents, as lists of bool."""
        raise NotImplementedError

    def expected_masks(self, moment: Moment) -> ByAgent:
        return {agent: [bool(one) for one in moment.masks[agent]] for agent in AGENTS}

    def parts(self, results: Any) -> Iterator[np.ndarray]:
        """All arrays in results."""
        return arrays_in(results)

    def wrong_actions(self, facade: Any) -> list[Any]:
        """Actions that the facade refuses, in its own form."""
        raise NotImplementedError

    def read(self, facade: Any, results: Any, env_id: int) -> Read:
        """What the facade shows of one environment after a reset or step."""
        raise NotImplementedError

    def expected(self, moment: Moment) -> Read:
        """What it should show of this moment; for a reset, the keys that `read` does not have are ignored."""
        raise NotImplementedError


class InHalves:
    """A facade whose `reset` is its `reset_async` and `reset_wait`; only the latter once a reset `has_begun`."""

    def __init__(self, facade: Any, *, has_begun: bool = False) -> None:
        self.facade, self.has_begun = facade, has_begun

    def reset(self, *arguments: Any, **keywords: Any) -> Any:
        if not self.has_begun:
            self.facade.reset_async(*arguments, **keywords)
        return self.facade.reset_wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.facade, name)


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """All arrays of numbers in nested dicts and sequences."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield value
    elif isinstance(value, np.ndarray | list | tuple):
        for part in value:
            yield from arrays_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from arrays_in(part)


def stacked(actions: list[ByAgent]) -> Any:
    """Actions as an array `(num_envs, agents)`."""
    return np.array([[of_env[agent] for agent in AGENTS] for of_env in actions])


def at(tree: Any, *index: int) -> Any:
    """The values at an index in all arrays of a tree."""
    if isinstance(tree, dict):
        return {key: at(part, *index) for key, part in tree.items()}
    return tree[index]


def by_agent(value: Any, *index: int) -> ByAgent:
    """By agent, the values at an index, of arrays whose next axis is the agents'."""
    return {agent: plain(at(value, *index, place)) for place, agent in enumerate(AGENTS)}


def plain(value: Any) -> Any:
    """Copies of arrays, numbers as numbers of Python, and infos without the text of reports."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in ("error", "_error")}
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim else value.item()
    return value.item() if isinstance(value, np.generic) else value


def without_finals(infos: Any) -> Any:
    """Infos of one environment, without what comes from the end of an episode and the next reset."""
    rest = {
        key: {name: value for name, value in info.items() if name not in ("final_obs", "reset_info")}
        for key, info in infos.items()
    }
    return {key: plain(info) for key, info in rest.items() if info}


def zeros_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros_like(part) for key, part in value.items()}
    return np.zeros_like(value)


def of_all(values: ByAgent, absent: Any) -> ByAgent:
    """A value for each agent: `absent` for those that have none."""
    return {agent: values.get(agent, absent) for agent in AGENTS}


def observations(observed: ByAgent, moment: Moment) -> ByAgent:
    """Observations of all agents; zeros for absent ones."""
    return of_all(observed, zeros_like(any_observation(moment)))


def any_observation(moment: Moment) -> Any:
    """An observation, for its form."""
    now: Moment | None = moment
    while now is not None:
        for observed in (now.observed, now.final or {}):
            if observed:
                return next(iter(observed.values()))
        now = now.before
    raise AssertionError("a game without observations")


def row_info(vector: dict[str, Any], row: int) -> dict[str, Any]:
    """The info of one row, from infos laid out as in Gymnasium's vector environments."""
    info: dict[str, Any] = {}
    for key, values in vector.items():
        if f"_{key}" in vector and vector[f"_{key}"][row]:
            info[key] = row_info(values, row) if isinstance(values, dict) else plain(values[row])
    return plain(info)


def with_common(infos: ByAgent, agent: str) -> dict[str, Any]:
    """The info of an agent, with the environment's under its own key."""
    common = {"__common__": infos["__common__"]} if "__common__" in infos else {}
    return {**common, **infos.get(agent, {})}


def assert_equal(actual: Any, expected: Any, path: str) -> None:
    """Fail with the path of the first difference; arrays need equal dtypes; NaN equals NaN."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), f"{path}: {actual!r} instead of {expected!r}"
        assert actual.keys() == expected.keys(), f"{path}: keys {[*actual]} instead of {[*expected]}"
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{path}, {key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), f"{path}: {actual!r} instead of {expected!r}"
        assert len(actual) == len(expected), f"{path}: {actual!r} instead of {expected!r}"
        for index, (one, other) in enumerate(zip(actual, expected)):
            assert_equal(one, other, f"{path}, {index}")
    elif isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray), f"{path}: {actual!r} instead of {expected!r}"
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} instead of {expected.dtype}"
        equal = np.array_equal(actual, expected, equal_nan=expected.dtype.kind == "f")
        assert equal, f"{path}: {actual.tolist()} instead of {expected.tolist()}"
    else:
        is_nan = isinstance(expected, float) and expected != expected
        assert (actual != actual) if is_nan else (actual == expected), f"{path}: {actual!r} instead of {expected!r}"
