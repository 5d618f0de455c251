"""`save_state` and `load_state` of facades and `Rollout`: another one goes on with the same arrays, bit for bit."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from helpers.batches import grouped_actions
from helpers.comparison import assert_same
from helpers.setups import rest
from mpe2 import simple_spread_v3, simple_tag_v3
from simulators.mappo_envs import Squad
from simulators.pymarl_envs import Skirmish
from simulators.rollouts import TruncatedUnseen
from simulators.team_battles import TeamBattle
from simulators.variable_agents import VariableAgents, VariableDictAgents

from marl_parallel import ParallelEnv, Rollout, gae, vector
from marl_parallel.core.pool.saved_states import from_bytes
from marl_parallel.core.spaces import tree_map
from marl_parallel.vector import (
    ArrayStepper,
    GymnasiumVectorEnv,
    ShareVecEnv,
    StackedVecEnv,
    saving,
)

MAKERS: dict[str, Callable[..., Any]] = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=5),
    "variable": VariableAgents,
    "variable dicts": VariableDictAgents,
}


def opened(name: str, mode: Any, workers: int, **more: Any) -> ParallelEnv:
    backend = {"backend": "serial"} if workers == 1 else {"num_workers": workers}
    return ParallelEnv([MAKERS[name]] * 3, mode, **{**backend, **more})


def copied(value: Any) -> Any:
    """A copy in which infos that were made when they were asked for are plain dicts."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if hasattr(value, "items"):
        return {key: copied(one) for key, one in value.items()}
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


class OwnFacade:
    """A facade that keeps the number of its steps in saved states."""

    def __init__(self, env: ParallelEnv) -> None:
        self.stepper, self.steps = ArrayStepper(env, self), 0

    def save_state(self) -> list[bytes]:
        return self.stepper.save_state(None, lambda _: self.steps)

    def load_state(self, states: Sequence[bytes]) -> None:
        self.steps = self.stepper.load_state(states)[1][0]


class RenamedFacade(OwnFacade):
    pass


class RenamedWithKey(OwnFacade):
    saved_as = "OwnFacade"


def test_facade_that_has_been_renamed(parallel):
    """Its own values are not lost in silence; `saved_as` finds them."""
    facade = OwnFacade(parallel(VariableAgents, 2))
    facade.stepper.reset()
    facade.steps = 7
    states = facade.save_state()
    for other in (RenamedFacade, StackedVecEnv):
        env = parallel(VariableAgents, 2)
        with pytest.raises(ValueError, match="environment 0: its state has values of the facade 'OwnFacade'"):
            other(env).load_state(states)
    renamed = RenamedWithKey(parallel(VariableAgents, 2))
    renamed.load_state(states)
    assert renamed.steps == 7
    parallel(VariableAgents, 2).load_state(states)


@pytest.mark.parametrize("kind", [GymnasiumVectorEnv, ShareVecEnv])
def test_subclass_of_a_facade(kind, parallel):
    """It loads what its base has saved, with the base's own values."""

    class Derived(kind):  # type: ignore[misc]
        pass

    mode = "NEXT_STEP" if kind is GymnasiumVectorEnv else "SAME_STEP"
    first, other = kind(opened("spread", mode, 1)), Derived(opened("spread", mode, 1))
    first.reset()
    saved = first.save_state()
    other.load_state(saved)
    assert from_bytes(other.save_state()[0], "").facade == from_bytes(saved[0], "").facade
    first.close()
    other.close()


def test_keys_of_facades():
    """All that add values are known to each other."""
    keys = {cls.saved_as for name in vector.__all__ if hasattr(cls := getattr(vector, name), "saved_as")}
    assert {"GymnasiumVectorEnv", "ShareVecEnv", "StackedVecEnv", "SubprocVecEnv"} <= keys <= saving.FACADES


def test_keys_of_drop_ins_before_they_had_one(monkeypatch):
    """Their values came under the names of their classes."""
    first, other = (vector.ShareSubprocVecEnv([Squad] * 2) for _ in range(2))
    first.reset()
    with monkeypatch.context() as patch:
        patch.setattr(first._stepper, "_saved_as", "ShareSubprocVecEnv")
        saved = first.save_state()
    other.load_state(saved)
    expected = {"ShareVecEnv": from_bytes(saved[0], "").facade["ShareSubprocVecEnv"]}
    assert from_bytes(other.save_state()[0], "").facade == expected
    first.close()
    other.close()


def test_global_states(parallel):
    def make() -> StackedVecEnv:
        return StackedVecEnv(parallel(TruncatedUnseen, 2, True, backend="process"), with_state=True)

    first, other = make(), make()
    first.reset()
    for _ in range(6):
        first.step(np.zeros((2, 2), np.int64))
    assert first.final_state is not None
    assert first.final_state[0, 0] == 6
    other.load_state(first.save_state())
    assert_same(other.state, first.state)
    assert_same(other.final_state, first.final_state)


# -- rollouts ----------------------------------------------------------------------------------------------------------

HOWS: dict[str, Any] = {
    "serial": ({"backend": "serial"}, {}),
    "process": ({"num_workers": 2}, {}),
    "halves": ({"num_workers": 2}, {"halves": 2}),
    "views": ({"num_workers": 2, "copy": False}, {}),
    "pickled": ({"num_workers": 1, "backend": "process", "shared_memory": False}, {}),
}


def plain(data: Any) -> Any:
    """Copies of what is data."""
    fields = data._asdict()
    for name in ("final_observations", "present_final"):
        fields[name] = tree_map(lambda array: array[data.done], fields[name])
    return copied([fields[name] for name in sorted(fields) if name not in ("action_masks", "states", "final_states")])


SOME = [*[("variable dicts", "SAME_STEP", how) for how in HOWS], ("spread", "NEXT_STEP", "halves")]
NAMES, BOTH = ("spread", "tag", "variable"), ("SAME_STEP", "NEXT_STEP")
MORE = [(name, mode, how) for name in NAMES for mode in BOTH for how in HOWS]


@pytest.mark.parametrize(("name", "mode", "how"), [*SOME, *[rest(*one) for one in MORE if one not in SOME]])
def test_rollout(name, mode, how):
    """The next rollout begins with what the last one ended with."""
    (arguments, options), makers = (
        HOWS[how],
        {**MAKERS, "tag": functools.partial(simple_tag_v3.parallel_env, max_cycles=4)},
    )

    def make(**more: Any) -> Rollout:
        env = ParallelEnv([makers[name]] * 4, mode, **{**arguments, **more})
        return Rollout(StackedVecEnv(env, pad=True), 7, **options)

    def policy(current: Any) -> Any:
        """Actions that depend on the observations."""
        sums: list[int] = []
        tree_map(lambda array: sums.append(zlib.crc32(np.ascontiguousarray(array))), current.observations)
        actions = grouped_actions(first.env, np.random.default_rng(sums))
        return tree_map(lambda array: array[current.env_ids.start : current.env_ids.stop], actions)

    first = make()
    empty = first.reset()
    at_the_beginning = first.save_state()
    expected = [plain(first.collect(policy))]
    state, current = first.save_state(), copied(tuple(first.current)[:5])
    expected.append(plain(first.collect(policy)))
    second = make()
    assert_same(copied(tuple(second.load_state(state))[:5]), current)
    assert_same(plain(second.collect(policy)), expected[1])
    second.load_state(at_the_beginning)
    assert_same(plain(second.collect(policy)), expected[0])
    assert_same(plain(second.collect(policy)), expected[1])
    assert empty is not None
    for one in (first, second):
        one.env.close()


def test_rollout_in_the_middle():
    rollout = Rollout(StackedVecEnv(opened("spread", True, 1)), 4)
    with pytest.raises(ResetNeeded):
        rollout.save_state()
    rollout.reset()
    states = rollout.save_state()
    rollout.step(np.zeros((3, 3), np.int64))
    with pytest.raises(ValueError, match=r"the rollout has 1 of 4 steps, which would be lost"):
        rollout.save_state()
    rewards = rollout.arrays.rewards[0].copy()
    with pytest.raises(ValueError, match="was not made by save_state"):
        rollout.load_state([b"nothing"] * 3)
    assert rollout.filled == 1
    assert_same(rollout.arrays.rewards[0], rewards)
    rollout.load_state(states)
    assert rollout.filled == 0
    data = rollout.collect(lambda _: np.zeros((3, 3), np.int64))
    assert_same(data.rewards[0], rewards)
    advantages, _ = gae(data, np.zeros((5, 3, 3)), np.zeros((int(data.done.sum()), 3)), 0.9, 0.9)
    assert advantages.shape == (4, 3, 3)
    rollout.env.close()


# -- the interfaces of PyMARL and MAPPO --------------------------------------------------------------------------------


def allowed(masks: Any, rng: np.random.Generator) -> Any:
    """Random actions `(num_envs, agents, 1)` that masks `(num_envs, agents, n)` allow."""
    return (masks * rng.random(masks.shape)).argmax(-1)[..., None]


@pytest.mark.parametrize("make", [TeamBattle, Skirmish, Squad])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_share(make, shared_memory):
    """Deaths, masks and states, of an environment that is stepped behind it."""

    def opened_share(workers: int) -> ShareVecEnv:
        backend = {"backend": "serial"} if workers == 1 else {"num_workers": workers}
        return ShareVecEnv(ParallelEnv([make] * 3, shared_memory=shared_memory or workers == 1, **backend), share=share)

    share = "state" if shared_memory else "joined"
    first, other, rng = opened_share(2), opened_share(1), np.random.default_rng(4)
    current = first.reset()
    for _ in range(14):
        assert_same(copied(other.load_state(first.save_state())), copied(current))
        for _ in range(2):
            actions = allowed(current[2], rng)
            assert_same(other.parallel_env.action_masks, first.parallel_env.action_masks)
            results, again = first.step(actions), other.step(actions)
            assert_same([copied([*one]) for one in again[4]], [copied([*one]) for one in results[4]])
            assert_same(copied((*again[:4], again[5])), copied((*results[:4], results[5])))
            current = results[0], results[1], results[5]
    first.close()
    other.close()
