"""`Rollout.ahead`: the data are those of a loop, whatever takes how long; and everything that ends its block."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from helpers.batches import grouped_actions, same
from helpers.processes import wait_for
from mpe2 import simple_tag_v3
from pettingzoo.classic import tictactoe_v3
from simulators.counting import Counting
from simulators.crashing import SEED, Fate, crashing
from simulators.masked_actions import Turnstile
from simulators.native_arena import Arena
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.rollouts import Scored, TruncatedUnseen
from simulators.teams import Team, names
from simulators.variable_agents import VariableAgents
from simulators.vector_rewards import Couriers

from marl_parallel import EnvError, Extra, ParallelEnv, Rollout, WorkerCrashed
from marl_parallel.core.block.columns import RolloutBuffer
from marl_parallel.core.spaces import tree_map
from marl_parallel.rollouts import ahead
from marl_parallel.rollouts import rollout as rollout_module
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

ENVS, STEPS, ROLLOUTS = 3, 13, 5


class Case(NamedTuple):
    """Environments, and how they are seen and stored."""

    makers: list[Callable[..., Any]]
    facade: dict[str, Any] | None = None
    rollout: dict[str, Any] | None = None


TEAMS = [
    functools.partial(Team, names(0, 1), 5, dies="agent_1"),
    functools.partial(Team, names(2, 1), 7, dies="agent_2", returns=True),
    functools.partial(Team, names(3), 4),
]
OF_INFOS = {"won": (), "place": (2,), "score": Extra((2,), per_agent=False), "length": Extra(per_agent=False)}
CASES = {
    "two groups": Case([functools.partial(simple_tag_v3.parallel_env, max_cycles=9)] * 3),
    "dies": Case([VariableAgents] * 3, {"with_state": True}),
    "comes back": Case([ReturningAgents] * 3),
    "comes back, PettingZoo": Case([ReturningPettingZooAgents] * 3, {"with_state": True}),
    "different agents": Case(TEAMS),
    "turns": Case([tictactoe_v3.env] * 3, {}, {"action_masks": True}),
    "masks": Case([Turnstile] * 3, {}, {"action_masks": True}),
    "infos": Case([Scored] * 3, {}, {"infos": OF_INFOS}),
    "states": Case([TruncatedUnseen] * 3, {"with_state": True}),
    "vector rewards": Case([Couriers] * 3, {"scalarize": (0.5, 2.0)}),
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "hybrid": {"num_workers": 2, "backend": "hybrid"},
    "pickled": {"num_workers": 2, "shared_memory": False},
    "halves": {"num_workers": 2, "halves": 2},
    "halves in line": {"backend": "serial", "halves": 2},
}
CHOICES = [
    *[("serial", name, mode) for name in CASES for mode in ("SAME_STEP", "NEXT_STEP")],
    *[("halves in line", name, "SAME_STEP") for name in CASES if name != "two groups"],
    *[(how, "comes back", "SAME_STEP") for how in ("thread", "process", "hybrid", "pickled", "halves")],
    ("halves", "dies", "NEXT_STEP"),
]


class Learner:
    """Counts how often it has trained. Its policy has the weights that were published, and a generator of its own."""

    def __init__(self, env: StackedVecEnv, halves: int = 1) -> None:
        self.env, self.halves, self.trained, self.weights, self.calls = env, halves, 0, 0, 0

    def act(self, current: Any) -> Any:
        step, rows, self.calls = self.calls // self.halves, [*current.env_ids], self.calls + 1
        rng = np.random.default_rng((step, self.weights))
        if current.action_masks is not None:
            allowed = current.action_masks
            actions = (rng.random((ENVS, *allowed.shape[1:]))[rows] * (1e-9 + allowed)).argmax(-1)
        else:
            actions = tree_map(lambda array: array[rows], grouped_actions(self.env, rng))
        score = tree_map(lambda acting: np.full(acting.shape, step + self.weights), current.acting)
        return actions, {"score": score, "total": np.full((len(rows), 2), step)}

    def publish(self) -> None:
        self.weights = self.trained


class Opened:
    """A `Rollout` of a case, and its learner."""

    def __init__(self, how: str, name: str, mode: str = "SAME_STEP", steps: int = STEPS) -> None:
        keywords, case = {**HOWS[how]}, CASES[name]
        halves = keywords.pop("halves", 1)
        self.env = StackedVecEnv(ParallelEnv(case.makers, mode, seed=5, **keywords), **(case.facade or {}))
        extras = {"score": (), "total": Extra((2,), np.float64, per_agent=False)}
        self.rollout = Rollout(self.env, steps, extras=extras, halves=halves, **(case.rollout or {}))
        self.learner = Learner(self.env, halves)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.env.close()

    def ahead(self, rollouts: int | None = None) -> Any:
        return self.rollout.ahead(self.learner.act, publish=self.learner.publish, rollouts=rollouts)


def copied(data: Any) -> dict[str, Any]:
    """A copy of the data of a rollout, without what is not valid."""
    found = {name: tree_map(np.array, value) for name, value in data._asdict().items()}
    for name in ("final_observations", "present_final", "final_states"):
        tree_map(lambda array: array.__setitem__(~found["done"], 0), found[name])
    return found


def episodes_of(episodes: list[Any]) -> list[Any]:
    return sorted((one.env_id, one.length, repr(one.returns)) for one in episodes)


@functools.cache
def expected(name: str, mode: str = "SAME_STEP", number: int = ROLLOUTS) -> list[tuple[dict[str, Any], list[Any]]]:
    """The data and episodes of each rollout, collected one after another with the weights that `ahead` promises."""
    found = []
    with Opened("serial", name, mode) as one:
        for rollout in range(number):
            one.learner.weights = max(rollout - 1, 0)
            found.append((copied(one.rollout.collect(one.learner.act)), episodes_of(one.rollout.finished_episodes)))
    return found


def assert_same_data(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for number, (data, of_loop) in enumerate(zip(found, wanted)):
        for name in of_loop[0]:
            assert same(data[0][name], of_loop[0][name]), (number, name)
        assert data[1] == of_loop[1], number


def collected(one: Opened, number: int = ROLLOUTS) -> tuple[list[Any], list[int]]:
    found, versions = [], []
    with one.ahead(number) as rollouts:
        for data in rollouts:
            one.learner.trained += 1
            found.append((copied(data), episodes_of(rollouts.finished_episodes)))
            versions.append(rollouts.version)
    return found, versions


def is_complete(rollouts: Any) -> bool:
    """Whether the rollout in progress is complete."""
    return rollouts._in_progress.result is not None


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for(lambda: not threads())


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "name", "mode"), CHOICES)
def test_data_are_those_of_collect(how, name, mode):
    with Opened(how, name, mode) as one:
        found, versions = collected(one)
        assert versions == [0, 0, 1, 2, 3]
        assert_same_data(found, expected(name, mode))
        assert any(data["done"].any() for data, _ in found)
        assert one.learner.calls == ROLLOUTS * STEPS * one.learner.halves  # no rollout more
        assert one.env.plain == one.rollout.env.plain
        one.learner.publish()
        one.rollout.collect(one.learner.act)  # the block is over


def test_data_are_those_of_a_loop_over_simulators():
    """Dict rules, agents that end and come back: compared with simulators that nobody else steps."""
    with Opened("process", "comes back") as one:
        found, _ = collected(one, 3)
    simulators = [ReturningAgents(5 + env_id) for env_id in range(ENVS)]
    seen = [simulator.reset(seed=5 + env_id)[0] for env_id, simulator in enumerate(simulators)]
    agents = simulators[0].possible_agents
    for t in range(3 * STEPS):
        data, row = found[t // STEPS][0], t % STEPS
        for env_id, simulator in enumerate(simulators):
            observed = data["observed"][row, env_id]
            assert [agent for agent, there in zip(agents, observed) if there] == [*seen[env_id]]
            assert same(data["observations"][row, env_id][observed], np.stack([*seen[env_id].values()]))
            acting = data["acting"][row, env_id]
            actions = {agents[k]: data["actions"][row, env_id, k] for k in np.flatnonzero(acting)}
            seen[env_id], rewards, terminateds, truncateds, _ = simulator.step(actions)
            paid = data["rewards"][row, env_id][data["present"][row, env_id]]
            assert same(paid, np.float32([*rewards.values()]))
            over = terminateds["__all__"] or truncateds["__all__"]
            assert data["done"][row, env_id] == over
            if over:
                seen[env_id] = simulator.reset()[0]


@pytest.mark.parametrize("slow", ["learner", "policy"])
def test_what_takes_how_long_changes_nothing(slow):
    with Opened("process", "dies") as one:
        ready, act = threading.Semaphore(0), one.learner.act

        def waits(current: Any) -> Any:
            if one.learner.calls % STEPS == 0 and slow == "policy":
                ready.acquire(timeout=60)  # the loop waits already
            return act(current)

        found = []
        with one.rollout.ahead(waits, publish=one.learner.publish, rollouts=ROLLOUTS) as rollouts:
            for _ in range(ROLLOUTS):
                if slow == "policy":
                    threading.Timer(0.05, ready.release).start()
                elif rollouts.stats().rollouts:
                    wait_for(lambda: is_complete(rollouts))
                    time.sleep(0.05)
                data = next(rollouts)
                one.learner.trained += 1
                found.append((copied(data), episodes_of(rollouts.finished_episodes)))
            stats = rollouts.stats()
        assert_same_data(found, expected("dies"))
        assert stats.rollouts == ROLLOUTS
        assert (stats.collector_waited_s if slow == "learner" else stats.learner_waited_s) >= 0.05 * (ROLLOUTS - 1)
        assert (stats.learner_waited_s if slow == "learner" else stats.collector_waited_s) < 0.05 * (ROLLOUTS - 1) + 1


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("how", ["serial", "process", "hybrid", "halves"])
def test_workers_write_observations_where_they_stay(how, monkeypatch):
    found: list[bool] = []
    is_written = RolloutBuffer.is_written
    monkeypatch.setattr(RolloutBuffer, "is_written", lambda *args: found.append(is_written(*args)) or found[-1])
    with Opened(how, "different agents" if how == "serial" else "comes back") as one:
        collected(one)
        assert found == [True] * (1 + ROLLOUTS * STEPS * one.learner.halves)
        one.rollout.collect(one.learner.act)
        assert all(found)


def test_a_rollout_stays_until_the_next_one_is_asked_for():
    with Opened("process", "comes back") as one, one.ahead(4) as rollouts:
        for number, data in enumerate(rollouts):
            before = copied(data)
            if number < 3:
                wait_for(lambda: is_complete(rollouts))
            assert same(copied(data), before)
            assert same(rollouts._latest.rewards, data.rewards)


def test_native_simulators():
    def made() -> StackedVecEnv:
        return StackedVecEnv(ParallelEnv.from_native(Arena(4)))

    def drawn(env: StackedVecEnv) -> Any:
        return grouped_actions(env, np.random.default_rng(0))

    with made() as env, made() as plain:
        rollout = Rollout(env, 6)
        with rollout.ahead(lambda current: drawn(env), publish=lambda: None, rollouts=3) as rollouts:
            found = [copied(data) for data in rollouts]
        other = Rollout(plain, 6)
        assert all(same(data, copied(other.collect(lambda current: drawn(plain)))) for data in found)
    with made() as env, pytest.raises(ValueError, match="native simulator"):
        Rollout(env, 6, halves=2)


@pytest.mark.parametrize("halves", [1, 2])
def test_environments_that_are_restarted(halves):
    fates = {(0, 0): Fate("SIGKILL", "step", 4), (2, 0): Fate("raise", "step", 9)}
    make = crashing(functools.partial(Counting, 6), fates)

    def made() -> StackedVecEnv:
        return StackedVecEnv(ParallelEnv([make] * ENVS, seed=SEED, num_workers=2, on_error="restart"))

    def act(current: Any) -> Any:
        return np.zeros(current.acting.shape, np.int64)

    with made() as env, made() as plain:
        rollout, other = Rollout(env, 10, halves=halves), Rollout(plain, 10)
        with rollout.ahead(act, publish=lambda: None, rollouts=3) as rollouts:
            found = [copied(data) for data in rollouts]
        assert all(same(data, copied(other.collect(act))) for data in found)
        assert env.parallel_env.stats().restarts == plain.parallel_env.stats().restarts >= 2


# -- while the block is open -------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Rollout, StackedVecEnv], Any]] = {
    "collect": lambda rollout, env: rollout.collect(lambda current: None),
    "step": lambda rollout, env: rollout.step(None),
    "reset": lambda rollout, env: rollout.reset(),
    "current": lambda rollout, env: rollout.current,
    "arrays": lambda rollout, env: rollout.arrays,
    "filled": lambda rollout, env: rollout.filled,
    "finished_episodes": lambda rollout, env: rollout.finished_episodes,
    "save_state": lambda rollout, env: rollout.save_state(),
    "load_state": lambda rollout, env: rollout.load_state([]),
    "torch": lambda rollout, env: rollout.torch(),
    "ahead": lambda rollout, env: rollout.ahead(lambda current: None, publish=lambda: None),
    "ahead of another Rollout": lambda rollout, env: (
        Rollout(env, 2).ahead(lambda current: None, publish=lambda: None).__enter__()
    ),
    "env.step": lambda rollout, env: env.step(np.zeros((ENVS, 3), np.int64)),
    "env.reset": lambda rollout, env: env.reset(),
    "env.step_async": lambda rollout, env: env.step_async(np.zeros((ENVS, 3), np.int64)),
    "env.save_state": lambda rollout, env: env.save_state(),
    "dicts": lambda rollout, env: env.parallel_env.step([{}] * ENVS),
    "call": lambda rollout, env: env.call("close"),
    "send": lambda rollout, env: env.parallel_env.send([{}] * ENVS),
}


@pytest.mark.parametrize("when", ["the thread collects", "the rollout is complete"])
def test_other_uses_are_refused_and_name_ahead(when):
    with Opened("serial", "comes back") as one:
        inside, goes_on = threading.Event(), threading.Event()

        def act(current: Any) -> Any:
            if one.learner.calls == STEPS + 3 and when == "the thread collects":
                inside.set()
                goes_on.wait(60)
                with pytest.raises(AlreadyPendingCallError, match=r"ahead\(\)"):
                    one.rollout.current  # also in the thread  # noqa: B018
            return one.learner.act(current)

        found = []
        with one.rollout.ahead(act, publish=one.learner.publish, rollouts=3) as rollouts:
            for data in rollouts:
                if not one.learner.trained:
                    assert inside.wait(60) if when == "the thread collects" else wait_for(lambda: is_complete(rollouts))
                    for name, use in USES.items():
                        with pytest.raises(AlreadyPendingCallError, match=r"ahead\(\)"):
                            use(one.rollout, one.env)
                        assert name
                    assert one.env.parallel_env.stats().steps > 0
                    goes_on.set()
                one.learner.trained += 1
                found.append((copied(data), episodes_of(rollouts.finished_episodes)))
        assert_same_data(found, expected("comes back")[:3])
        assert same(one.env.acting, one.rollout.current.acting)  # the facade has the attributes of the latest step
        assert one.rollout.collect(one.learner.act) is one.rollout.arrays  # and after the block, nothing is refused
        one.env.step(np.zeros((ENVS, 3), np.int64))


def test_a_call_in_flight_comes_first():
    with Opened("process", "comes back") as one:
        one.rollout.reset()
        one.env.call_async("seen")
        with pytest.raises(AlreadyPendingCallError, match="call_wait"), one.ahead():
            pass
        one.env.call_wait()
        one.env.parallel_env.reset_async()
        with pytest.raises(AlreadyPendingCallError, match="in flight"), one.ahead():
            pass
    with Opened("process", "comes back") as one:
        assert_same_data(collected(one, 2)[0], expected("comes back")[:2])


def test_bad_arguments_and_calls_out_of_order():
    with Opened("serial", "comes back") as one:
        act, publish = one.learner.act, one.learner.publish
        for arguments, kind, text in (
            ({"publish": None}, TypeError, "publish must be a function, got None"),
            ({"publish": publish, "rollouts": -1}, ValueError, "rollouts must not be negative"),
            ({"publish": publish, "rollouts": 1.5}, TypeError, "rollouts must be an integer or None"),
        ):
            with pytest.raises(kind, match=text):
                one.rollout.ahead(act, **arguments)
        with pytest.raises(TypeError, match="policy must be a function"):
            one.rollout.ahead(3, publish=publish)
        one.rollout.reset()
        actions, extras = one.learner.act(one.rollout.current)
        one.rollout.step(actions, **extras)
        with pytest.raises(ValueError, match=r"has 1 of 13 steps, which would be lost: call ahead"), one.ahead():
            pass
        assert one.learner.calls == 1
        one.rollout.reset()
        rollouts = one.ahead()
        for name in ("__next__", "save_state"):
            with pytest.raises(ValueError, match="outside the block: write `with"):
                getattr(rollouts, name)()
        with rollouts:
            for name in ("torch", "save_state"):
                with pytest.raises(ValueError, match="has not received a rollout"):
                    getattr(rollouts, name)()
            next(rollouts)
            with pytest.raises(ValueError, match="entered before"):
                rollouts.__enter__()
            next(rollouts)
        for name in ("__next__", "save_state"):
            with pytest.raises(ValueError, match="after the block of ahead"):
                getattr(rollouts, name)()
        assert rollouts.stats().rollouts == 2
    with pytest.raises(ClosedEnvironmentError):
        next(rollouts)
    with pytest.raises(ClosedEnvironmentError), one.ahead():
        pass


def test_a_block_of_no_rollouts_acts_on_nothing():
    with Opened("serial", "comes back") as one:
        with one.ahead(0) as rollouts:
            assert [*rollouts] == []
        assert one.learner.calls == 0


@pytest.mark.parametrize("who", ["policy", "publish"])
def test_stop_iteration_does_not_end_the_loop(who):
    with Opened("serial", "comes back") as one:
        left, received = iter(range(2 * STEPS + 3)), 0

        def act(current: Any) -> Any:
            if who == "policy":
                next(left)
            return one.learner.act(current)

        def publish() -> None:
            if who == "publish" and received == 2:
                next(iter(()))

        def train() -> None:
            nonlocal received
            with one.rollout.ahead(act, publish=publish) as rollouts:
                for _ in rollouts:
                    received += 1

        with pytest.raises(RuntimeError, match=r"the policy or publish of ahead\(\) raised StopIteration"):
            train()
        assert received == 2


def test_a_policy_that_waits_for_itself():
    with Opened("serial", "comes back") as one:
        calls = iter([lambda: None] * (STEPS + 2) + [lambda: rollouts.save_state()])

        def act(current: Any) -> Any:
            next(calls)()
            return one.learner.act(current)

        with (
            pytest.raises(ValueError, match=r"save_state\(\) was called by the policy of ahead\(\)"),
            one.rollout.ahead(act, publish=one.learner.publish) as rollouts,
        ):
            for _ in rollouts:
                pass


def test_a_publish_that_fails_may_be_called_again():
    with Opened("serial", "comes back") as one:
        failures = iter([True, False])

        def publish() -> None:
            if next(failures, False):
                raise Boom
            one.learner.publish()

        with one.rollout.ahead(one.learner.act, publish=publish) as rollouts:
            found = [copied(next(rollouts))]
            one.learner.trained += 1
            with pytest.raises(Boom):
                next(rollouts)
            for _ in range(2):
                found.append(copied(next(rollouts)))
                one.learner.trained += 1
        assert all(same(data, of_loop) for data, (of_loop, _) in zip(found, expected("comes back")))


# -- leaving the block -------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Walk:
    """A policy for `Counting` that checks: each environment goes on where it was, and nobody else acts meanwhile."""

    def __init__(self, num_envs: int = ENVS) -> None:
        self.latest, self.inside, self.calls = [-1] * num_envs, 0, 0

    def __call__(self, current: Any) -> Any:
        assert self.inside == 0
        self.inside, self.calls = 1, self.calls + 1
        for env_id, (_, resets, steps) in zip(current.env_ids, current.observations[:, 0].tolist()):
            time, before = 6 * resets + steps, self.latest[env_id]
            # The action of the last call is not used if the block is left in the middle of it.
            assert before == -1 or time in (before, before + 1), (env_id, before, time)
            self.latest[env_id] = time
        self.inside = 0
        return np.zeros(current.acting.shape, np.int64)


def counting(halves: int = 1, steps: int = 4, **keywords: Any) -> tuple[StackedVecEnv, Rollout]:
    makers = [functools.partial(Counting, 6)] * ENVS
    env = StackedVecEnv(ParallelEnv(makers, seed=SEED, **(keywords or {"backend": "serial"})))
    return env, Rollout(env, steps, halves=halves)


@pytest.mark.parametrize("how", ["serial", "halves"])
@pytest.mark.parametrize("reason", ["break", "exception", "Ctrl-C"])
def test_leaving_the_block_drops_the_rollout_in_progress(reason, how):
    keywords = {**HOWS[how]}
    halves = keywords.pop("halves", 1)
    env, rollout = counting(halves, STEPS, **keywords)
    walk, inside, goes_on = Walk(), threading.Event(), threading.Event()

    def act(current: Any) -> Any:
        if walk.calls == 2 * STEPS * halves + 5:
            inside.set()
            assert goes_on.wait(60)
        return walk(current)

    def block() -> None:
        with rollout.ahead(act, publish=lambda: None) as rollouts:
            for number, _ in enumerate(rollouts):
                if number == 1:
                    assert inside.wait(60)
                    threading.Timer(0.02, goes_on.set).start()
                    if reason == "break":
                        break
                    if reason == "exception":
                        raise Boom
                    signal.raise_signal(signal.SIGINT)

    with env:
        if reason == "break":
            block()
        else:
            with pytest.raises(Boom if reason == "exception" else KeyboardInterrupt):
                block()
        assert not threads()
        assert walk.calls == 2 * STEPS * halves + 6  # the step of the last call is not made
        assert rollout.filled == 0
        for env_id, (_, resets, steps) in zip(rollout.current.env_ids, rollout.current.observations[:, 0].tolist()):
            assert 6 * resets + steps == walk.latest[env_id] + (halves == 2)  # the step of the other half was in flight
        for _ in range(2):
            assert rollout.collect(walk).done.any()
        with rollout.ahead(walk, publish=lambda: None, rollouts=2) as rollouts:
            assert sum(data.done.any() for data in rollouts) == 2


@pytest.mark.parametrize("halves", [1, 2])
def test_an_exception_of_the_policy_is_raised_from_the_loop(halves, caplog):
    env, rollout = counting(halves, STEPS, num_workers=2)
    walk, versions = Walk(), list[int]()

    def act(current: Any) -> Any:
        if walk.calls == 2 * STEPS * halves - 3:
            raise Boom("no action")
        return walk(current)

    def block() -> None:
        with rollout.ahead(act, publish=lambda: None) as rollouts:
            for _ in rollouts:
                versions.append(rollouts.version)

    with env:
        with pytest.raises(Boom, match="no action"):
            block()
        assert versions == [0]
        rollout.collect(walk)
        with rollout.ahead(act, publish=lambda: None) as rollouts:
            walk.calls = STEPS * halves - 3
            next(rollouts)
            with pytest.raises(Boom, match="no action"):
                rollouts.save_state()
            with pytest.raises(ValueError, match="after the block of ahead"):
                next(rollouts)
    assert not caplog.records


def test_a_failure_in_a_rollout_that_is_dropped_is_logged(caplog):
    env, rollout = counting()
    walk = Walk()

    def act(current: Any) -> Any:
        if walk.calls == 10:
            raise Boom("no action")
        return walk(current)

    with env, caplog.at_level(logging.WARNING):
        with rollout.ahead(act, publish=lambda: None) as rollouts:
            next(rollouts)
            next(rollouts)
            wait_for(lambda: is_complete(rollouts))
        assert "it was dropped, because the block was left" in caplog.text
        assert "no action" in caplog.text


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_a_fault_is_raised_from_the_loop(fault, caplog):
    make = crashing(functools.partial(Counting, 6), {(1, 0): Fate(fault, "step", 10)})
    versions: list[int] = []

    def block() -> None:
        with rollout.ahead(Walk(), publish=lambda: None) as rollouts:
            for _ in rollouts:
                versions.append(rollouts.version)

    with StackedVecEnv(ParallelEnv([make] * ENVS, seed=SEED, num_workers=2)) as env:
        rollout = Rollout(env, 4)
        with pytest.raises((EnvError, WorkerCrashed), match=r"bad terrain|SIGKILL"):
            block()
        assert versions == [0, 0]
        with pytest.raises(ClosedEnvironmentError, match=r"in ahead\(\)"):
            rollout.collect(Walk())
    assert not caplog.records


class FailsLater(Counting):
    """The third environment fails in its sixth step, after a file exists."""

    def __init__(self, path: Path, *, seed: int, env_id: int) -> None:
        super().__init__(seed=seed)
        self.path, self.env_id = path, env_id

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.env_id == 2 and self.steps == 5:
            wait_for(self.path.exists, 60)
            raise Boom("bad terrain")
        return super().step(actions)


def test_a_fault_while_progress_is_dropped_is_logged(caplog, tmp_path):
    """The caller gets the exception with which the block is left."""
    inside, goes_on, policy_calls = threading.Event(), threading.Event(), [0]

    def act(current: Any) -> Any:
        policy_calls[0] += 1
        if policy_calls[0] == 13:  # the step of the second half, which fails, is in flight
            inside.set()
            assert goes_on.wait(60)
        return np.zeros(current.acting.shape, np.int64)

    def goes_on_later() -> None:
        goes_on.set()
        (tmp_path / "now").touch()

    def block() -> None:
        with rollout.ahead(act, publish=lambda: None) as rollouts:
            next(rollouts)
            assert inside.wait(60)
            threading.Timer(0.05, goes_on_later).start()
            raise Boom("of the loop")

    makers = [functools.partial(FailsLater, tmp_path / "now")] * ENVS
    with StackedVecEnv(ParallelEnv(makers, seed=SEED, num_workers=2)) as env, caplog.at_level(logging.WARNING):
        rollout = Rollout(env, 4, halves=2)
        with pytest.raises(Boom, match="of the loop"):
            block()
        with pytest.raises(ClosedEnvironmentError, match="bad terrain"):
            rollout.collect(act)
        assert [record.getMessage() for record in caplog.records] == [
            "the last step of a rollout that ahead() drops has failed"
        ]


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

FILES = (ahead.__file__, rollout_module.__file__)


def interrupting(place: int) -> Callable[[FrameType, str, Any], None]:
    """Ctrl-C at one place where Python handles signals, in the order of execution, for `sys.setprofile`.

    Places are where functions of the two files begin or return, or what they call returns.
    """
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code, caller = frame.f_code, frame.f_back
        inside = [code, *([] if event.startswith("c_") or caller is None else [caller.f_code])]
        if event != "c_call" and any(one.co_filename in FILES for one in inside):
            count += 1
            if count > place:
                raise KeyboardInterrupt  # which ends the profile

    return profile


def assert_goes_on(rollout: Rollout, walk: Walk) -> None:
    """Once the thread has ended, nothing is left of the block. Until then, calls are refused and name it."""
    deadline, refusal = time.monotonic() + 30, "ahead()"
    while True:
        try:
            data = rollout.collect(walk)
            break
        except AlreadyPendingCallError as error:
            refusal = str(error)
            assert time.monotonic() < deadline
            time.sleep(0.0005)
    assert "ahead()" in refusal
    assert len(data.rewards) == rollout.filled
    assert not rollout.env.stepper.in_flight
    wait_for(lambda: not threads())


def block(rollout: Rollout, walk: Walk) -> None:
    with rollout.ahead(walk, publish=lambda: None) as rollouts:
        next(rollouts)
        rollouts.save_state()
        next(rollouts)


# Python prints what is raised inside a finalizer, and drops it.
IN_FINALIZERS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@IN_FINALIZERS
@pytest.mark.parametrize("halves", [1, 2])
def test_ctrl_c_at_any_place(halves):
    env, rollout = counting(halves)
    walk, reached, late = Walk(), 0, list[int]()
    with env:
        for place in range(0, 1000, 2 * halves - 1):
            sys.setprofile(interrupting(place))
            try:
                block(rollout, walk)
                break
            except KeyboardInterrupt as error:
                reached += 1
                in_end = "__exit__" in {frame.name for frame in traceback.extract_tb(error.__traceback__)}
                if rollout._is_ahead and not in_end:  # while the traceback refers to the block
                    late.append(place)
            finally:
                sys.setprofile(None)
            assert_goes_on(rollout, walk)
        assert_goes_on(rollout, walk)
    assert reached > 50 / halves
    # The thread has ended when Ctrl-C arrives, unless that has interrupted the end of the block. Two more are where
    # `__enter__` has returned, and where `__exit__` is called: Python handles no signals there.
    assert len(late) <= 2, late


class SecondCtrlC:
    """The block of an `Ahead`, with Ctrl-C at a place in its end."""

    def __init__(self, rollouts: Any, place: int) -> None:
        self.rollouts, self.place = rollouts, place

    def __enter__(self) -> Any:
        return self.rollouts.__enter__()

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(interrupting(self.place))
        try:
            self.rollouts.__exit__(*error)
        finally:
            sys.setprofile(None)


def test_second_ctrl_c_at_any_place():
    """While the thread still collects, and no other thread does."""
    env, rollout = counting()
    walk, reached, slow = Walk(), 0, threading.Event()

    def act(current: Any) -> Any:
        if slow.is_set():
            time.sleep(0.002)
        return walk(current)

    with env:
        for place in range(1000):
            ended = False
            try:
                with SecondCtrlC(rollout.ahead(act, publish=lambda: None), place) as rollouts:
                    next(rollouts)
                    slow.set()
                    raise Boom
            except Boom:
                ended = True
            except KeyboardInterrupt:
                reached += 1
            slow.clear()
            del rollouts
            assert_goes_on(rollout, walk)
            if ended:
                break
    assert reached > 5


class Alarm:
    """Raises KeyboardInterrupt after some seconds, like Ctrl-C, and once more after others.

    Not in the test function itself, and not in finalizers or pytest's report of what they raise, which Python drops.
    The kernel may give a signal to any thread, so it may come after its timer has been stopped.
    """

    def __init__(self) -> None:
        self.is_on, self.later = False, list[float]()

    def set(self, first: float, second: float) -> None:
        self.is_on, self.later = True, [second]
        signal.setitimer(signal.ITIMER_REAL, first)

    def stop(self) -> None:
        self.is_on, self.later = False, []
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def interrupt(self, _: int, frame: FrameType | None) -> None:
        if self.later:
            signal.setitimer(signal.ITIMER_REAL, self.later.pop())
        if frame is not None and frame.f_code is Alarm.stop.__code__:
            return
        inside: list[str] = []
        while frame is not None and not frame.f_code.co_name.startswith("test_"):
            inside.append(frame.f_code.co_filename)
            frame = frame.f_back
        is_dropped = any(name.endswith(("weakref.py", "unraisableexception.py")) for name in inside)
        if self.is_on and inside and not is_dropped:
            raise KeyboardInterrupt


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    found = Alarm()
    before = signal.signal(signal.SIGALRM, found.interrupt)
    yield found
    found.stop()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops what is still on its way
    signal.signal(signal.SIGALRM, before)


@IN_FINALIZERS
@pytest.mark.parametrize("how", ["serial", "process"])
def test_ctrl_c_twice_at_random_times(how, alarm):
    env, rollout = counting(**HOWS[how])
    walk, rng, interrupts = Walk(), random.Random(1), 0
    with env:
        began = time.monotonic()
        block(rollout, walk)
        takes = time.monotonic() - began
        for _ in range(25):
            times = rng.uniform(1e-5, takes), rng.uniform(1e-5, takes / 4)
            try:
                alarm.set(*times)
                block(rollout, walk)
            except KeyboardInterrupt:
                interrupts += 1
            alarm.stop()
            assert_goes_on(rollout, walk)
    assert interrupts > 5


def test_a_block_that_is_forgotten_ends():
    env, rollout = counting()
    walk = Walk()
    with env:
        rollouts = rollout.ahead(walk, publish=lambda: None).__enter__()
        next(rollouts)
        assert threads()
        del rollouts
        assert_goes_on(rollout, walk)


@pytest.mark.parametrize("reason", ["end", "break", "exception", "policy", "close"])
def test_nothing_refers_to_a_rollout_after_its_block(reason):
    """Without the garbage collector."""
    env, rollout = counting()
    gone = weakref.ref(rollout)

    def act(current: Any) -> Any:
        if reason == "policy" and current.observations[0, 0, 2] == 2:
            raise Boom
        return np.zeros(current.acting.shape, np.int64)

    gc.collect()
    gc.disable()
    try:
        with (
            contextlib.suppress(Boom, ClosedEnvironmentError),
            rollout.ahead(act, publish=lambda: None, rollouts=3) as rollouts,
        ):
            for _ in rollouts:
                if reason == "break":
                    break
                if reason == "exception":
                    raise Boom
                if reason == "close":
                    env.close()
        del rollouts, rollout
        wait_for(lambda: gone() is None)  # the thread has left the environments, and ends
    finally:
        gc.enable()
        env.close()


# -- close, and processes that are forked ------------------------------------------------------------------------------


def closing(how: str) -> tuple[StackedVecEnv, Rollout]:
    if how != "native":
        return counting(**HOWS[how])
    env = StackedVecEnv(ParallelEnv.from_native(Arena(4)))
    return env, Rollout(env, 4)


@pytest.mark.parametrize("how", ["serial", "process", "native"])
@pytest.mark.parametrize("when", ["the thread collects", "the rollout is complete"])
@pytest.mark.parametrize("who", ["the loop", "another thread"])
def test_close_ends_the_block(who, when, how, caplog):
    env, rollout = closing(how)
    calls, inside, goes_on = [0], threading.Event(), threading.Event()

    def act(current: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6 and when == "the thread collects":
            inside.set()
            goes_on.wait(60)
        return grouped_actions(env, np.random.default_rng(0))

    def close() -> None:
        threading.Timer(0.1, goes_on.set).start()
        env.close(timeout=60.0)

    with rollout.ahead(act, publish=lambda: None) as rollouts:
        data = next(rollouts)
        rewards = copied(data)["rewards"]
        assert inside.wait(60) if when == "the thread collects" else wait_for(lambda: is_complete(rollouts))
        began = time.monotonic()
        if who == "the loop":
            close()
        else:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join(60)
        assert time.monotonic() - began < 30
        assert not threads()
        for use in (lambda: next(rollouts), rollouts.save_state, lambda: rollout.collect(act)):
            with pytest.raises(ClosedEnvironmentError):
                use()
        assert same(tree_map(np.array, data.rewards), rewards)
    assert not caplog.records
    if how == "process":
        assert env.stepper.source._memory_dropped  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("when", ["the thread collects", "the rollout is complete"])
def test_a_forked_child_waits_for_no_thread(when):
    env, rollout = counting(num_workers=2)
    walk, inside, goes_on = Walk(), threading.Event(), threading.Event()

    def act(current: Any) -> Any:
        if walk.calls == 6 and when == "the thread collects":
            inside.set()
            goes_on.wait(60)
        return walk(current)

    def ends_in_child() -> bool:
        """Whether everything counts as closed, and the end of the block returns at once."""
        errors = []
        for use in (lambda: next(rollouts), rollouts.save_state, lambda: rollout.collect(walk), lambda: rollout.arrays):
            try:
                use()
            except ClosedEnvironmentError as error:
                errors.append(str(error))
        rollouts.__exit__(None, None, None)
        return len(errors) == 4 and all("forked" in error for error in errors)

    with env, rollout.ahead(act, publish=lambda: None) as rollouts:
        next(rollouts)
        assert inside.wait(60) if when == "the thread collects" else wait_for(lambda: is_complete(rollouts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            pid = os.fork()
        if not pid:
            try:
                os._exit(0 if ends_in_child() else 3)
            finally:
                os._exit(4)
        try:
            ended = wait_for(
                lambda: next(iter([status for status in [os.waitpid(pid, os.WNOHANG)] if status[0]]), None), 30
            )
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        goes_on.set()
        assert len(next(rollouts).rewards) == 4


# -- a policy that does not return -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the loop", "the end"])
def test_a_policy_that_does_not_return_is_reported(where, monkeypatch, caplog):
    monkeypatch.setattr(ahead, "_REPORT_AFTER_S", 0.1)
    env, rollout = counting()
    walk, inside, goes_on = Walk(), threading.Event(), threading.Event()

    def thinks_for_long(current: Any) -> Any:
        if walk.calls == (1 if where == "the loop" else 5):
            inside.set()
            assert goes_on.wait(60)
        return walk(current)

    def reports() -> list[str]:
        return [text for record in caplog.records if "in thinks_for_long" in (text := record.getMessage())]

    def goes_on_later() -> None:
        wait_for(reports)
        time.sleep(0.3)  # no second one
        goes_on.set()

    with env, caplog.at_level(logging.WARNING):
        threading.Thread(target=goes_on_later).start()
        with rollout.ahead(thinks_for_long, publish=lambda: None) as rollouts:
            next(rollouts)
            assert inside.wait(60)
        assert [text for text in reports() if "the policy of Rollout.ahead has not returned after" in text] == reports()
        assert len(reports()) == 1


# -- saving ------------------------------------------------------------------------------------------------------------

SAVED = [
    *[("serial", name, 1) for name in ("dies", "infos", "masks", "states", "vector rewards")],
    *[("process", "comes back, PettingZoo", saved_in) for saved_in in (0, 1)],
    ("halves in line", "states", 2),
]


@pytest.mark.parametrize(("how", "name", "saved_in"), SAVED)
def test_a_run_goes_on_from_saved_states(how, name, saved_in):
    """Saved in the body of this rollout: the next one is complete, and is the first one of the run that goes on."""
    with Opened(how, name) as one, one.ahead() as rollouts:
        for number, _ in enumerate(rollouts):
            one.learner.trained += 1
            if number == saved_in:
                states = rollouts.save_state()
                assert rollouts.save_state() == states
                saved = one.learner.trained, one.learner.calls
                break
        rollouts.__exit__(None, None, None)
        final_state = one.env.final_state
    with Opened(how, name) as one:
        one.rollout.load_state(states)
        assert one.learner.halves == 2 or same(one.env.final_state, final_state)
        one.learner.trained, one.learner.calls = saved
        for use in (
            one.rollout.save_state,
            lambda: one.rollout.collect(one.learner.act),
            lambda: one.rollout.step(None),
        ):
            with pytest.raises(ValueError, match="go on with ahead"):
                use()
        with pytest.raises(Boom), one.rollout.ahead(one.learner.act, publish=fails) as rollouts:
            next(rollouts)  # it is not lost
        found, versions = collected(one, ROLLOUTS - 1 - saved_in)
        assert versions == [*range(saved_in, ROLLOUTS - 1)]
        assert_same_data(found, expected(name)[saved_in + 1 :])
        one.rollout.load_state(states)
        one.rollout.reset()  # drops it
        one.rollout.collect(one.learner.act)


def fails() -> None:
    raise Boom


@pytest.mark.parametrize("how", ["serial", "halves in line"])
def test_states_of_the_last_body_are_plain(how):
    with Opened(how, "states") as one:
        with one.ahead(2) as rollouts:
            for number, _ in enumerate(rollouts):
                one.learner.trained += 1
                if number == 1:
                    states, saved = rollouts.save_state(), (one.learner.trained, one.learner.calls)
        assert len(states) == ENVS
        one.learner.weights = 2
        wanted = copied(one.rollout.collect(one.learner.act))
    with Opened(how, "states") as one:
        one.rollout.load_state(states)
        one.learner.trained, one.learner.calls = saved
        one.learner.publish()
        found, versions = collected(one, 1)
        assert versions == [0]
        assert same(found[0][0], wanted)


def test_states_that_do_not_fit():
    with Opened("serial", "comes back") as one:
        with one.ahead() as rollouts:
            next(rollouts)
            states = rollouts.save_state()
        last = one.rollout.current.observations.copy()
        with (
            Opened("serial", "comes back", steps=STEPS + 1) as other,
            pytest.raises(
                ValueError, match=r"does not fit: expected observations to be float32 \(15, 3, 3, 2\), got float32 \(14"
            ),
        ):
            other.rollout.load_state(states)
        named = Rollout(one.env, STEPS, extras={"score": (), "sum": Extra((2,), np.float64, per_agent=False)})
        with pytest.raises(ValueError, match=r"expected extras to be \{'score': .*'sum'"):
            named.load_state(states)
        for wrong in (b"?", states[0]):
            with pytest.raises(ValueError, match=r"must be a rollout of Ahead.save_state"):
                one.rollout.load_state([*states[:-1], wrong])
        with pytest.raises(ValueError, match="expected states for each of 3"):
            one.rollout.load_state(states[1:-1])
        assert same(one.rollout.current.observations, last)
        one.rollout.collect(one.learner.act)


class Engine:
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle an engine")


class WithEngine(Counting):
    def __init__(self, *, seed: int) -> None:
        super().__init__(6, seed=seed)
        self.engine = Engine()


def test_states_that_cannot_be_saved():
    """The loop goes on."""
    env = StackedVecEnv(ParallelEnv([WithEngine] * 2, backend="serial"))
    rollout = Rollout(env, 4)

    def act(current: Any) -> Any:
        return np.zeros(current.acting.shape, np.int64)

    with env, rollout.ahead(act, publish=lambda: None, rollouts=3) as rollouts:
        for _ in rollouts:
            with pytest.raises(TypeError, match="cannot be saved"):
                rollouts.save_state()
        assert rollouts.stats().rollouts == 3


def test_memory_of_two_rollouts(monkeypatch):
    with Opened("serial", "comes back") as one:
        data = one.rollout.collect(one.learner.act)
        before = copied(data)
        with monkeypatch.context() as patch:
            patch.setattr(rollout_module, "free_memory", lambda: 3 * data.observations.nbytes)
            with pytest.raises(MemoryError, match="26 steps of 3 environments"), one.ahead():
                pass
        assert one.rollout.arrays is data
        found, _ = collected(one, 2)
        for name, value in copied(one.rollout._storage.sets[0].arrays).items():
            assert same(found[0][0][name], value), name
        assert same(copied(data), before)  # in memory of its own
