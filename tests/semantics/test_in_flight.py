"""Calls between `send` and the last `recv`: which are allowed, which are refused without effect, and closing.

What results mean is tested in `test_async_stepping`, when they arrive in `test_readiness`, faults in
`test_async_faults`.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import gone, wait_for, workers
from helpers.reference import Reference
from helpers.scenarios import random_actions
from simulators.deterministic import Hunt
from simulators.failing import dozing
from simulators.paced import acts, fleet, hold, release, seen, trace

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

NOOP = {"a": 0, "b": 1}


class Pair:
    """Four hunts in the package and in the reference, which must stay equal."""

    def __init__(self, env: ParallelEnv) -> None:
        self.env, self.reference = env, Reference([Hunt] * 4, AutoresetMode.SAME_STEP, 42)
        self.rng = np.random.default_rng(1)
        self.due: dict[int, Any] = {}
        assert_same(env.reset(), self.reference.reset())
        self.step()

    def actions(self, env_ids: Sequence[int] = range(4)) -> list[dict[Any, Any]]:
        return [random_actions(one, self.rng) for one in self.reference.chosen(env_ids)]

    def send(self, *env_ids: int) -> None:
        actions = self.actions(env_ids)
        results = zip(*self.reference.step(copy.deepcopy(actions), env_ids), strict=True)
        self.due.update(zip(env_ids, results, strict=True))
        self.env.send(actions, env_ids)

    def recv(self) -> None:
        for env_id, *result in zip(*self.env.recv(), strict=True):
            assert_same(tuple(result), self.due.pop(env_id), f"environment {env_id}")
        assert not self.due

    def step(self) -> None:
        actions = self.actions()
        expected = self.reference.step(copy.deepcopy(actions))
        assert_same(self.env.step(actions), expected)

    def assert_refused(self, error: Any, call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """The call fails with and without calls in flight and has no effect."""
        in_flight = tuple(sorted(self.due))
        with pytest.raises(error) as caught:
            call(*args, **keywords)
        assert isinstance(caught.value, error)
        assert self.env.pending == in_flight
        if self.due:
            self.recv()
        self.step()
        self.send(3, 1)
        self.recv()


@pytest.fixture
def pair(backend_setup, build) -> Pair:
    return Pair(build([functools.partial(Hunt, render_mode="rgb_array")] * 4, backend_setup))


# Refused calls


def test_blocking_calls_are_refused(pair):
    """Whether the environments they concern are in flight or not."""
    env = pair.env
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("step", lambda: env.step(pair.actions())),
        ("step", lambda: env.step(pair.actions([3]), env_ids=[3])),
        ("reset", lambda: env.reset(seed=7)),
        ("reset", lambda: env.reset(env_ids=[3])),
        ("call", lambda: env.call("reset")),
        ("call", lambda: env.call("reset", env_ids=[3])),
        ("call", lambda: env.get_attr("gravity")),
        ("set_attr", lambda: env.set_attr("gravity", 3.0)),
        ("state", lambda: env.state()),
        ("render", lambda: env.render()),
        ("render", lambda: env.render(tile=True)),
    ]
    for name, call in calls:
        pair.send(1, 0)
        with pytest.raises(AlreadyPendingCallError, match=name):
            call()
        pair.send(2)
        pair.assert_refused(AlreadyPendingCallError, call)
    assert env.seed() == (42, 43, 44, 45)
    assert env.get_attr("gravity") == (1.0,) * 4


@pytest.mark.in_turn
@pytest.mark.parametrize("env_ids", [(1,), (0, 1), (1, 2, 3), None], ids=str)
def test_sending_to_an_environment_in_flight_is_refused(env_ids, pair):
    """Nothing is sent, not even to the other environments of the call."""
    ids = env_ids or range(4)
    pair.send(1)
    pair.assert_refused(AlreadyPendingCallError, pair.env.send, pair.actions(ids), env_ids)
    pair.send(1)
    pair.assert_refused(AlreadyPendingCallError, pair.env.send, dict(zip(ids, pair.actions(ids), strict=True)))
    pair.send(1)
    pair.assert_refused(AlreadyPendingCallError, pair.env.reset_async, seed=7, env_ids=env_ids)


@pytest.mark.in_turn
@pytest.mark.parametrize("in_flight", [[], [3]], ids=["idle", "occupied"])
@pytest.mark.parametrize(
    ("error", "env_ids"),
    [
        (ValueError, [[4], [-1], [2, 2], [1, 0, 1], []]),
        (TypeError, [[2.0], ["2"], [None]]),
    ],
)
def test_unknown_env_ids(error, env_ids, in_flight, pair):
    for ids in env_ids:
        for call in (functools.partial(pair.env.send, pair.actions()[: len(ids)]), pair.env.reset_async):
            if in_flight:
                pair.send(*in_flight)
            pair.assert_refused(error, call, env_ids=ids)


EVERYONE = {"wolf_0": 1, "wolf_1": 1, "wolf_2": np.zeros(3, np.float32), "wolf_3": 1}
MISSHAPEN = {**EVERYONE, "wolf_2": np.zeros(2, np.float32)}


def test_refused_actions_send_nothing(pair):
    """Not to any environment, and the call leaves no state behind."""
    for actions, env_ids in [
        ([EVERYONE, MISSHAPEN], [0, 2]),
        ({0: EVERYONE, 2: MISSHAPEN}, None),
        ([EVERYONE, None], [0, 2]),
        ([EVERYONE], [0, 2]),
        ([EVERYONE] * 3, [0, 2]),
        ([EVERYONE] * 3, None),
        (None, [0]),
        (iter([EVERYONE]), [0]),
    ]:
        pair.assert_refused((ValueError, TypeError), pair.env.send, actions, env_ids)
        pair.send(1)
        pair.assert_refused((ValueError, TypeError), pair.env.send, actions, env_ids)


def test_missing_action(pair):
    """Of the last environment: nothing must have been sent to the environments before it."""
    while len(pair.reference.acting[2]) < 2:
        pair.step()
    _, first, last = pair.actions(range(3))
    del last[pair.reference.acting[2][0]]
    pair.assert_refused(ValueError, pair.env.send, {1: first, 2: last})


def test_mappings_without_env_ids_as_keys(pair):
    mappings = [EVERYONE, {"0": EVERYONE}, {None: EVERYONE}, {4: EVERYONE}, {-1: EVERYONE}, {0.0: EVERYONE}, {}]
    for mapping in mappings:
        pair.assert_refused(ValueError, pair.env.send, mapping)
    for env_ids in ([0, 3], [0], [0, 1, 2], [2, 2]):
        pair.assert_refused(ValueError, pair.env.send, {0: EVERYONE, 2: EVERYONE}, env_ids)


def test_actions_outside_their_space(backend_setup, build):
    pair = Pair(build([Hunt] * 4, backend_setup, check_actions=True))
    pair.send(3)
    pair.assert_refused(ValueError, pair.env.send, {0: EVERYONE, 2: {**EVERYONE, "wolf_0": 77}})


def test_send_before_the_first_reset(backend_setup, build, tmp_path):
    """Per environment: also while others are in flight, and until the result of its reset has been received."""
    env = build(fleet(tmp_path, 3), backend_setup)
    (one,) = acts(1)
    with pytest.raises(ResetNeeded):
        env.send([one] * 3)
    env.reset_async(env_ids=[0])
    for actions in ({1: one}, {1: one, 2: one}):
        with pytest.raises(ResetNeeded, match="1"):
            env.send(actions)
    assert env.recv().env_ids == (0,)
    with pytest.raises(ResetNeeded, match="2"):
        env.send({0: one, 2: one})
    env.send({0: one})
    assert seen(env.recv().observations) == [1.0]
    assert trace(tmp_path) == ["reset 0", "step 0"]


# Allowed calls


def test_allowed_calls(pair):
    env = pair.env
    acting, stats = env.acting, env.stats()
    pair.send(2)
    assert env.acting[0] == acting[0]
    pair.send(0, 3)
    assert env.pending == (0, 2, 3)
    assert env.seed() == (42, 43, 44, 45)
    assert env.stats().steps >= stats.steps
    assert (len(env), env.num_envs, env.batch_size, env.num_workers) == (4, 4, 4, 2)
    assert env.possible_agents == [*EVERYONE] == [*env.action_space] == [*env.observation_space]
    assert env.state_space.shape == (2, 3)
    assert (env.render_mode, env.metadata["name"]) == ("rgb_array", "hunt")
    pair.send(1)
    assert env.pending == (0, 1, 2, 3)
    pair.recv()
    assert env.pending == ()
    assert env.stats().steps == stats.steps + 4
    assert env.state().shape == (4, 2, 3)
    assert len(env.render()) == 4


def test_seeds_while_environments_are_in_flight(backend_setup, build):
    """`seed()` includes seeds of resets in flight."""
    env = build([Hunt] * 4, backend_setup, seed=5)
    env.reset_async(env_ids=[0, 1])
    assert env.seed() == (5, 6, 7, 8)
    env.reset_async(seed=50, env_ids=[3])
    assert env.seed() == (5, 6, 7, 53)
    env.recv()
    assert env.seed() == (5, 6, 7, 53)
    env.reset_async(env_ids=[2])  # its first: by the new base
    assert env.seed() == (5, 6, 52, 53)
    env.recv()
    assert env.seed() == (5, 6, 52, 53)


# Closing


@pytest.mark.parametrize("terminate", [False, True], ids=["asked", "terminated"])
def test_close_discards_calls_in_flight(terminate, concurrent_or_portable, build, tmp_path):
    """Queued calls never start; the environments are still closed."""
    env = build(fleet(tmp_path, 50), concurrent_or_portable, num_workers=1)
    env.reset()
    hold(tmp_path, 0)
    env.send(acts(*range(50)))
    wait_for(lambda: trace(tmp_path)[-1] == "step 0")
    letting_go = threading.Timer(0.5, release, (tmp_path, 0))
    letting_go.start()
    env.close(terminate=terminate)
    assert (tmp_path / "hold-0").exists() == terminate
    letting_go.join()
    time.sleep(0.2)  # in which something could be stepped all the same
    closings = [] if terminate else [f"close {env_id}" for env_id in range(50)]
    assert trace(tmp_path)[50:] == ["step 0", *closings]


@pytest.mark.parametrize("received", [False, True], ids=["in flight", "received"])
def test_calls_after_close(received, backend_setup, build, tmp_path):
    env = build(fleet(tmp_path, 4), backend_setup)
    env.reset()
    env.send(acts(1, 2, 3, 4))
    if received:
        env.recv()
    env.close()
    for use in (env.recv, functools.partial(env.recv, 0), env.reset_async, lambda: env.send(acts(1, 2, 3, 4))):
        with pytest.raises(ClosedEnvironmentError):
            use()
    assert sorted(trace(tmp_path)[-4:]) == [f"close {env_id}" for env_id in range(4)]
    env.close()


def test_nothing_is_in_flight_after_close(backend_setup, build, tmp_path):
    env = build(fleet(tmp_path, 2), backend_setup)
    env.reset_async()
    env.close()
    assert env.pending == ()


def test_leaving_the_context(concurrent_setup, build, tmp_path):
    with build(dozing(tmp_path, 0.3), concurrent_setup) as env:
        env.reset()
        env.send([NOOP] * 4)
    assert gone(workers(tmp_path))


def test_leaving_the_context_by_an_exception(concurrent_setup, build, tmp_path):
    with pytest.raises(KeyError, match="mine"), build(dozing(tmp_path, 0.3), concurrent_setup) as env:  # noqa: PT012
        env.reset()
        env.send([NOOP] * 4)
        raise KeyError("mine")
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_garbage_collection(backend, tmp_path):
    env = ParallelEnv(dozing(tmp_path, 0.3), backend=backend, num_workers=2)
    env.reset()
    env.send([NOOP] * 4)
    del env
    gc.collect()
    assert gone(workers(tmp_path))
    assert len([*tmp_path.glob("closed-*")]) == 4


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_close_from_another_thread(timeout, concurrent_or_portable, build, tmp_path):
    """The blocked `recv` raises; a running thread cannot be ended, but `close` does not wait for it."""
    env = build(dozing(tmp_path, 2.0), concurrent_or_portable)
    env.reset()
    env.send([NOOP] * 4)
    time.sleep(0.1)
    closing = threading.Timer(0.3, env.close, (True,))
    closing.start()
    with pytest.raises(ClosedEnvironmentError):
        env.recv(timeout=timeout)
    closing.join()
    assert gone(workers(tmp_path))
