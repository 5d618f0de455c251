"""The package and the reference compared in `send` and `recv`, in any order of results.

`turns` lets the reference play each environment once; `Tandem` runs the same turns in the package in any order. The
simulators and their policies are in `scenarios`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from helpers.comparison import assert_same, spoil
from helpers.reference import ReferenceEnv
from helpers.scenarios import SEED, scenario
from marl_parallel import ParallelEnv, StepBatch

FORMS = ("sequence", "mapping", "mapping and env_ids")


class Turn(NamedTuple):
    """A reset or step of one environment with the reference's result.

    Attributes:
        actions: None for a reset.
        seed: The seed of a reset.
        result: Five dicts, also for a reset.
        acting: The agents that act next; None if the design does not define them.
    """

    actions: dict[Any, Any] | None
    seed: int | None
    result: tuple[dict[Any, Any], ...]
    acting: list[Any] | None


@functools.cache
def turns(name: str, mode: AutoresetMode) -> tuple[tuple[Turn, ...], ...]:
    """The turns of each environment of a scenario: steps, with a reset at first and now and then."""
    chosen = scenario(name)
    played = []
    for index, make in enumerate(chosen.constructors):
        one, rng = ReferenceEnv(make, index, SEED + index, mode), np.random.default_rng(index)
        played.append(tuple(_turn(one, chosen.policy, rng, first=time == 0) for time in range(chosen.steps + 1)))
        one.env.close()
    return tuple(played)


def _turn(one: ReferenceEnv, policy: Any, rng: np.random.Generator, *, first: bool) -> Turn:
    waits_for_reset = one.over and one.mode is AutoresetMode.DISABLED
    actions = seed = None
    if first or rng.random() < (0.4 if waits_for_reset else 0.06):
        seed = None if first or rng.random() < 0.5 else int(rng.integers(1000))
        result = _as_of_a_step(*one.reset(seed))
    else:
        actions = policy(one, rng)
        result = one.step(copy.deepcopy(actions))
    return Turn(actions, seed, result, None if one.dict_rules and one.over else one.acting)


def _as_of_a_step(observations: dict[Any, Any], infos: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
    unfinished = {**dict.fromkeys(observations, False), "__all__": False}
    return observations, dict.fromkeys(observations, 0.0), unfinished, dict(unfinished), infos


class Tandem:
    """A `ParallelEnv` that runs the turns of a scenario.

    Attributes:
        due: The turns in flight, by environment.
        latest: The last result and turn of each environment that is not in flight.
    """

    def __init__(self, env: ParallelEnv, name: str, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> None:
        self.env = env
        self._left = [list(reversed(own)) for own in turns(name, mode)]
        self.due: dict[int, Turn] = {}
        self.latest: dict[int, tuple[tuple[Any, ...], Turn]] = {}

    @property
    def idle(self) -> list[int]:
        """The environments that are not in flight and have turns left."""
        return [env_id for env_id, left in enumerate(self._left) if left and env_id not in self.due]

    def go(self, env_ids: Sequence[int], form: str = "sequence") -> None:
        """Send these environments their next turns, with at most one `send` and one `reset_async`."""
        steps, resets = self._taken(env_ids)
        for env_id in env_ids:
            self.latest.pop(env_id, None)
        if steps:
            sent = copy.deepcopy({env_id: turn.actions for env_id, turn in steps.items()})
            self._send(sent, form)
            spoil(sent)  # callers may modify them
        if resets:
            self.env.reset_async(**_reset_arguments(resets))
        self.due.update(steps | resets)

    def _send(self, sent: dict[int, Any], form: str) -> None:
        if form == "sequence":
            self.env.send([*sent.values()], env_ids=[*sent])
        elif form == "mapping":
            self.env.send(sent)
        else:
            self.env.send(sent, env_ids=[*sent][::-1])

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> StepBatch:
        """Receive and compare; returns the package's results."""
        at_least = len(self.due) if min_envs is None else min_envs
        batch = self.env.recv(min_envs, timeout)
        assert type(batch) is StepBatch
        assert len(batch.env_ids) >= at_least
        self._compare(batch.env_ids, batch[1:], {env_id: self.due.pop(env_id) for env_id in batch.env_ids})
        assert sorted(self.env.pending) == sorted(self.due)
        return batch

    def wait(self, env_ids: Sequence[int]) -> None:
        """Run the next turns of these environments with `step` and `reset`."""
        steps, resets = self._taken(env_ids)
        if steps:
            actions = copy.deepcopy([turn.actions for turn in steps.values()])
            self._compare([*steps], self.env.step(actions, env_ids=[*steps]), steps)
        if resets:
            observations, infos = self.env.reset(**_reset_arguments(resets))
            self._compare([*resets], tuple(zip(*map(_as_of_a_step, observations, infos))), resets)

    def check_latest(self) -> None:
        """Check that the last result of each environment is unchanged."""
        for env_id, (result, turn) in self.latest.items():
            assert_same(result, turn.result, f"environment {env_id}, looked at later")

    def _taken(self, env_ids: Sequence[int]) -> tuple[dict[int, Turn], dict[int, Turn]]:
        turns_taken = {env_id: self._left[env_id].pop() for env_id in env_ids}
        steps = {env_id: turn for env_id, turn in turns_taken.items() if turn.actions is not None}
        return steps, {env_id: turn for env_id, turn in turns_taken.items() if turn.actions is None}

    def _compare(self, env_ids: Sequence[int], results: Sequence[Any], expected: dict[int, Turn]) -> None:
        for env_id, *result in zip(env_ids, *results, strict=True):
            turn = expected[env_id]
            assert_same(tuple(result), turn.result, f"environment {env_id}, {len(self._left[env_id])} turns to come")
            acting = self.env.acting[env_id]
            assert turn.acting is None or sorted(map(str, acting)) == sorted(map(str, turn.acting))
            self.latest[env_id] = tuple(result), turn


def _reset_arguments(resets: dict[int, Turn]) -> dict[str, Any]:
    seeds = [turn.seed for turn in resets.values()]
    return {"env_ids": [*resets], "seed": seeds if any(seed is not None for seed in seeds) else None}


def some_of(env_ids: Sequence[int], rng: np.random.Generator) -> list[int]:
    """Some environments, possibly none, in any order."""
    return [int(env_id) for env_id in rng.permutation(env_ids)[: rng.integers(len(env_ids) + 1)]]


def play(tandem: Tandem, seed: int, *, views: bool = False, spoiled: bool = False) -> None:
    """Run all turns in random order.

    Args:
        tandem: At its start.
        seed: The seed of the order.
        views: Check again and again that the last results are unchanged.
        spoiled: Overwrite every result after its comparison.
    """
    rng = np.random.default_rng(seed)
    while tandem.idle or tandem.due:
        if chosen := some_of(tandem.idle, rng):
            tandem.go(chosen, FORMS[rng.integers(len(FORMS))])
        if tandem.due and rng.random() < 0.8:
            batch = tandem.recv(_any_minimum(len(tandem.due), rng))
            if spoiled:
                spoil(batch)
        if views:
            tandem.check_latest()


def _any_minimum(in_flight: int, rng: np.random.Generator) -> int | None:
    return None if rng.random() < 0.2 else int(rng.integers(in_flight + 1))
