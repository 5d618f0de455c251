"""Restarts at rare moments: each result belongs to one episode, is returned once, and is complete.

An observation is 100 per construction, plus 10 per episode, plus 1 per step.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.setups import Setup

from marl_parallel import EnvError, MultiAgentEnv, ParallelEnv, RestartPolicy, Rules, WorkerCrashed, WorkerTimeout
from marl_parallel.core.block import codec

pytestmark = pytest.mark.release_independent

SETUPS = [Setup("serial", True, 1), Setup("thread", True, 1), Setup("process", True, 1), Setup("process", False, 1)]
KILLABLE = [Setup("process", True, 1), Setup("process", False, 1), Setup("portable", True, 1)]
each_killable = pytest.mark.parametrize("setup", KILLABLE, ids=str)
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)
ACTIONS = {"a": 0, "b": 0}


class Clock:
    """Two agents in episodes of three steps; subclasses inject faults or unusual results in `at`."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict({agent: spaces.Box(-999, 999, (1,), np.float32) for agent in "ab"})
    action_space = spaces.Dict({agent: spaces.Discrete(2) for agent in "ab"})
    length = 3

    def __init__(self, restarts: int = 0) -> None:
        self.restarts, self.episode, self.time = restarts, 0, 0
        self.got: list[dict] = []

    def now(self) -> np.ndarray:
        return np.full(1, 100 * self.restarts + 10 * self.episode + self.time, np.float32)

    def seen(self) -> dict[str, Any]:
        return {"a": self.now(), "b": self.now()}

    def infos(self) -> dict[str, Any]:
        return {"a": {}, "b": {}}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.episode, self.time = self.episode + 1, 0
        return self.seen(), {"a": {}, "b": {}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.got.append(actions)
        self.time += 1
        over = {"__all__": self.time == self.length}
        return self.seen(), {"a": 1.0, "b": 1.0}, over, {"__all__": False}, self.infos()

    def state(self) -> np.ndarray:
        if not self.episode:
            raise RuntimeError("reset() needs to be called before state")
        return self.now()

    @property
    def state_space(self) -> spaces.Space:
        return spaces.Box(-999, 999, (1,), np.float32)

    def broken(self) -> None:
        raise RuntimeError("broken in a call")


def alone(build: Callable[..., ParallelEnv], make: type, setup: Setup, mode: Any = True) -> ParallelEnv:
    return build([make], setup, mode, on_error="restart")


def step(env: ParallelEnv) -> tuple[Any, ...]:
    return tuple(dicts[0] for dicts in env.step([ACTIONS]))


class FailsFirstReset(Clock):
    """The second environment fails in its first reset."""

    episodes = 0

    def reset(self, **keywords: Any) -> tuple[dict, dict]:
        if (self.restarts, self.episode) == (1, self.episodes):
            raise RuntimeError("broken in a reset")
        return super().reset(**keywords)


class FailsSecondReset(FailsFirstReset):
    """The second environment fails in its second reset."""

    episodes = 1


@each_setup
@pytest.mark.parametrize("mode", [True, "NEXT_STEP", False])
def test_restart_mark_ends_with_its_episode(mode, setup, build):
    """Faults while idle and in the caller's own reset: only the second one is reported, once."""
    # With SAME_STEP, a replacement is reset at once.
    env = alone(build, FailsSecondReset if mode is True else FailsFirstReset, setup, mode)
    env.reset()
    step(env)
    with pytest.raises(EnvError):
        env.call("broken")
    (observations,), (infos,) = env.reset()
    assert observations["a"] == 210
    assert infos["__common__"]["restarted"]
    for moment in (1, 2):
        observations, rewards, terminateds, truncateds, infos = step(env)
        assert observations["a"] == 210 + moment
        assert rewards == {"a": 1.0, "b": 1.0}
        assert not terminateds["__all__"]
        assert not truncateds["__all__"]
        assert "__common__" not in infos
    assert env.get_attr("got") == ([ACTIONS] * 2,)


class InfoAtEpisodeEnd(Clock):
    """The first episode ends with an info; the third reset fails."""

    length = 1

    def infos(self) -> dict[str, Any]:
        return {"a": {"winner": "red"} if self.episode == 1 else {}, "b": {}}

    def reset(self, **keywords: Any) -> tuple[dict, dict]:
        if (self.restarts, self.episode) == (0, 2):
            raise RuntimeError("broken in a reset")
        return super().reset(**keywords)


@each_setup
def test_last_step_keeps_its_own_infos(setup, build):
    env = alone(build, InfoAtEpisodeEnd, setup)
    env.reset()
    assert step(env)[4]["a"]["winner"] == "red"
    infos = step(env)[4]
    assert infos["__common__"]["restarted"]
    assert infos["a"].keys() == {"final_obs"}
    assert infos["a"]["final_obs"] == 21


class WrongShapeOnce(Clock):
    """The first environment's agent b has an observation of a wrong shape once."""

    at = (1, 2)

    def seen(self) -> dict[str, Any]:
        wrong = not self.restarts and (self.episode, self.time) == self.at
        return {"a": self.now(), "b": np.zeros(7, np.float32) if wrong else self.now()}


class WrongShapeInReset(WrongShapeOnce):
    at = (2, 0)


class UnpicklableLastInfo(Clock):
    """The first environment's last info cannot be pickled, and agent b terminates."""

    def step(self, actions: dict) -> tuple[dict, ...]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        if not self.restarts and self.time == 2:
            infos["a"]["generator"] = (number for number in range(3))
            terminateds["b"] = True
        return observations, rewards, terminateds, truncateds, infos


@each_setup
@pytest.mark.parametrize("make", [WrongShapeOnce, UnpicklableLastInfo])
def test_refused_step_is_reported_as_interrupted(make, setup, build):
    env = alone(build, make, setup)
    env.reset()
    step(env)
    observations, rewards, terminateds, truncateds, infos = step(env)
    assert observations == {"a": 110, "b": 110}
    assert rewards == {"a": 0.0, "b": 0.0}
    assert terminateds == {"a": False, "b": False, "__all__": False}
    assert truncateds == {"a": True, "b": True, "__all__": True}
    assert {agent: infos[agent]["final_obs"][0] for agent in "ab"} in ({"a": 0, "b": 0}, {"a": 11, "b": 11})


@each_setup
def test_refused_first_observation_keeps_final_obs(setup, build):
    env = alone(build, WrongShapeInReset, setup)
    env.reset()
    for _ in range(3):
        observations, rewards, terminateds, _, infos = step(env)
    assert observations == {"a": 110, "b": 110}
    assert rewards == {"a": 1.0, "b": 1.0}
    assert terminateds["__all__"]
    assert {agent: infos[agent]["final_obs"][0] for agent in "ab"} == {"a": 13, "b": 13}


class RaisesInStep(Clock):
    def step(self, actions: dict) -> tuple[dict, ...]:
        if not self.restarts:
            raise RuntimeError("broken in a step")
        return super().step(actions)


@each_setup
@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_state_before_the_pending_reset(mode, setup, build):
    """A fresh environment has a state before its pending reset."""
    env, other = (alone(build, RaisesInStep, setup, mode) for _ in range(2))
    for one in (env, other):
        one.reset()
        assert step(one)[3]["__all__"]
    assert env.state().tolist() == [[110]]
    assert env.state().tolist() == [[110]]
    if mode == "NEXT_STEP":
        assert step(env)[0] == step(other)[0] == {"a": 110, "b": 110}
    else:
        assert env.reset()[0][0]["a"] == 120  # it has been reset before
        other.reset()
    assert step(env)[2]["__all__"] is False
    assert env.stats().restarts == 1
    assert env.state()[0] == env.call("now")[0]


class ReusesArrays(Clock):
    """Writes into the arrays it has returned; its infos cannot be deep-copied."""

    def __init__(self, restarts: int = 0) -> None:
        super().__init__(restarts)
        self.array, self.near = np.zeros(1, np.float32), {"b": 1}

    def seen(self) -> dict[str, Any]:
        self.array[...] = self.now()
        return {"a": self.array, "b": self.array}

    def infos(self) -> dict[str, Any]:
        return {"a": {"near": self.near.keys()}, "b": {}}


@each_setup
def test_final_obs_is_kept_with_uncopiable_infos(setup, build):
    env = build([ReusesArrays], setup)
    env.reset()
    for _ in range(3):
        observations, *_, infos = step(env)
    assert observations["a"] == 20
    assert infos["a"]["final_obs"] == 13
    assert [*infos["a"]["near"]] == ["b"]


class OtherSpacesAfterRestart(Clock):
    """The first environment dies in its first step, and its first replacement has other spaces."""

    def __init__(self, env_id: int, restarts: int) -> None:
        super().__init__(restarts)
        self.dies = env_id == 0 and restarts == 0
        if env_id == 0 and restarts == 1:
            self.observation_space = spaces.Dict({agent: spaces.Box(-999, 999, (64,), np.float64) for agent in "ab"})

    def step(self, actions: dict) -> tuple[dict, ...]:
        if self.dies:
            os._exit(1)
        return super().step(actions)


@each_killable
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_replacement_with_other_spaces(mode, setup, build):
    """It is refused before it changes the layout of any record."""
    env = build([OtherSpacesAfterRestart] * 2, setup, mode, on_error="restart")
    env.reset()
    for _ in range(4):
        observations = env.step([ACTIONS] * 2)[0]
    assert env.stats().restarts == 3
    now = env.call("now")
    assert [seen["b"] for seen in observations] == list(now)
    assert [int(own[0]) // 100 for own in now] == [2, 1]


def test_replacement_with_other_spaces_counts_as_an_exception(build):
    """A policy that restarts after some types only does not restart after it."""
    policy = RestartPolicy(exceptions=(KeyError,))
    env = build([OtherSpacesAfterRestart] * 2, Setup("process", True, 2), on_error="restart", restart_policy=policy)
    env.reset()
    with pytest.raises(EnvError, match="the environment differs after its restart"):
        env.step([ACTIONS] * 2)


class HangsInFirstResetAfterRestart(Clock):
    """Fails in its first step; its replacement hangs in its first reset."""

    render_mode = "ansi"

    def reset(self, **keywords: Any) -> tuple[dict, dict]:
        if self.restarts == 1:
            time.sleep(600)
        return super().reset(**keywords)

    def step(self, actions: dict) -> tuple[dict, ...]:
        raise RuntimeError("broken")

    def render(self) -> str:
        return str(self.now())


@pytest.mark.parametrize("ask", [ParallelEnv.state, ParallelEnv.render], ids=lambda ask: ask.__name__)
def test_reset_timeout_of_a_pending_reset(ask, build):
    setup = Setup("process", True, 1)
    env = build([HangsInFirstResetAfterRestart], setup, "NEXT_STEP", on_error="restart", reset_timeout=0.5)
    env.reset()
    step(env)
    with pytest.raises(WorkerTimeout, match=r"has not finished its reset within 0\.5 s"):
        ask(env)


class Seeded(Clock):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seeds = [seed]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.seeds.append(seed)
        return super().reset()


def pid_of(_: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_seed_after_a_death_before_the_first_reset(mode, build):
    env = build([Seeded] * 2, Setup("process", True, 2), mode, seed=7, on_error="restart")
    os.kill(env.call(pid_of)[1], signal.SIGKILL)
    with pytest.raises(WorkerCrashed):
        env.call("seeds")
    env.reset()
    own = int(np.random.SeedSequence((7, 1, 1)).generate_state(1)[0] >> 1)
    assert env.seed() == (7, own)
    assert env.get_attr("seeds") == ([7, 7], [own, own])


class ComputedObservation:
    """An observation that is computed when it is read, as on a GPU, which may crash the process."""

    shape, dtype, ndim = (1,), np.dtype(np.float32), 1

    def __init__(self, value: np.ndarray, *, fatal: bool) -> None:
        self.value, self.fatal = value, fatal

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.fatal:
            os._exit(1)
        return self.value


class DiesWhileObservationIsRead(Clock):
    def seen(self) -> dict[str, Any]:
        fatal = self.restarts == 0 and self.episode == 2
        return {"a": ComputedObservation(self.now(), fatal=False), "b": ComputedObservation(self.now(), fatal=fatal)}


@each_killable
def test_death_while_the_first_observation_is_written(setup, build):
    """The partially written record is not used as the old episode's."""
    env = build([DiesWhileObservationIsRead], setup, on_error="restart")
    env.reset()
    for _ in range(Clock.length):
        _, rewards, terminateds, _, infos = step(env)
    assert (rewards["a"], terminateds["__all__"]) == (1.0, True)
    assert infos["__common__"]["restarted"] is True
    assert {agent: float(infos[agent]["final_obs"][0]) for agent in "ab"} in (
        {"a": 13.0, "b": 13.0},
        {"a": 0.0, "b": 0.0},
    )


class TakesTurns(MultiAgentEnv):
    """Its first process dies while the second observation is written."""

    rules, metadata, render_mode, state_space = Rules.PETTINGZOO, MappingProxyType({}), None, None
    possible_agents: ClassVar = ["a", "b"]
    observation_spaces = MappingProxyType(dict.fromkeys("ab", Clock.observation_space["a"]))
    action_spaces = MappingProxyType(dict.fromkeys("ab", spaces.Discrete(2)))
    reset_keywords = frozenset({"seed"})

    def __init__(self, restarts: int = 0) -> None:
        self.clock = Clock(restarts)

    def seen(self) -> dict[str, Any]:
        fatal = (self.clock.restarts, self.clock.time) == (0, 1)
        return {agent: ComputedObservation(self.clock.now(), fatal=fatal) for agent in "ab"}

    def reset(self, *, seed: int | None = None) -> tuple[dict, dict]:
        self.clock.reset()
        return self.seen(), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        dicts = self.clock.step(actions)
        return self.seen(), *dicts[1:]

    def turn(self) -> str:
        return "ab"[self.clock.time % 2]

    def render(self) -> None: ...
    def state(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_death_while_a_result_of_a_turn_based_environment_is_written(mode):
    """All agents that were alive are truncated, not only the one whose turn it was."""
    with ParallelEnv([TakesTurns], mode, num_workers=1, on_error="restart") as env:
        env.reset()
        observations, rewards, terminateds, truncateds, infos = (one[0] for one in env.step([ACTIONS]))
        assert rewards == {"a": 0.0, "b": 0.0}
        assert terminateds == {"a": False, "b": False, "__all__": False}
        assert truncateds == {"a": True, "b": True, "__all__": True}
        assert infos["__common__"]["restarted"] is True
        last = {agent: infos[agent]["final_obs"] for agent in "ab"} if mode == "SAME_STEP" else observations
        assert {agent: float(value[0]) for agent, value in last.items()} == {"a": 0.0, "b": 0.0}
        assert env.finished_episodes[0].lengths == {"a": 1, "b": 1}


class StopsOnce(Clock):
    """Stopped in the last step of its first episode; the request for its stack continues it."""

    def step(self, actions: dict) -> tuple[dict, ...]:
        if (self.restarts, self.episode, self.time) == (0, 1, 2):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(actions)


@each_killable
def test_worker_that_continues_at_its_timeout(setup, build):
    """Either its step counts and the next result has the mark, or it was interrupted."""
    env = build([StopsOnce], setup, on_error="restart", step_timeout=0.3)
    env.reset()
    for _ in range(Clock.length):
        _, rewards, _, truncateds, infos = step(env)
    final = float(infos["a"]["final_obs"][0])
    if "__common__" in infos:
        # In its step or in the reset after it; zeros if it was interrupted while it wrote the observation.
        cut_off, stepped = (0.0, True), (1.0, False)
        actual = rewards["a"], truncateds["__all__"]
        assert (actual, final) in ((cut_off, 12.0), (cut_off, 0.0), (stepped, 13.0), (stepped, 0.0))
    else:
        assert (rewards["a"], final) == (1.0, 13.0)
        assert step(env)[4]["__common__"]["restarted"] is True
    assert float(step(env)[0]["a"][0]) // 100 == 1


def refuse_to_be_unpickled() -> None:
    raise ValueError("not here")


class Refusing:
    """It can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return refuse_to_be_unpickled, ()


class RefusedTwice(Clock):
    """The first infos of the environment that replaces one that has failed cannot be unpickled."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = super().reset()
        return observations, {**infos, "a": {"value": Refusing()}} if self.restarts == 1 else infos

    def step(self, actions: dict) -> tuple[dict, ...]:
        if (self.restarts, self.time) == (0, 1):
            raise ValueError("broken")
        return super().step(actions)


@each_setup
def test_first_infos_after_a_restart_that_cannot_be_unpickled(setup, build):
    """The environment is constructed once more, and the first fault is reported."""
    env = build([RefusedTwice], setup, on_error="restart")
    env.reset()
    step(env)
    observations, _, _, truncateds, infos = step(env)
    assert (float(observations["a"][0]), truncateds["__all__"]) == (210.0, True)
    assert "broken" in infos["__common__"]["error"]
    assert env.stats().restarts == 2


class RefusedAtTheEnd(Clock):
    """The infos of an episode's last step cannot be unpickled, and the reset that follows fails."""

    def infos(self) -> dict[str, Any]:
        return {"a": {"value": Refusing()}} if (self.restarts, self.time) == (0, self.length) else super().infos()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if (self.restarts, self.episode) == (0, 1):
            raise ValueError("broken")
        return super().reset()


@each_setup
def test_last_infos_before_a_failing_reset_that_cannot_be_unpickled(setup, build):
    """The step keeps its rewards and flags where these are in the block; what cannot be unpickled is lost."""
    env = build([RefusedAtTheEnd], setup, on_error="restart")
    env.reset()
    for _ in range(Clock.length):
        observations, rewards, terminateds, truncateds, infos = step(env)
    assert float(observations["a"][0]) == 110.0
    outcome = rewards["a"], terminateds["__all__"], truncateds["__all__"], float(infos["a"]["final_obs"][0])
    in_block = setup.shared_memory and codec.Codec is not None
    assert outcome == ((1.0, True, False, 13.0) if in_block else (0.0, False, True, 12.0))
    assert "broken" in infos["__common__"]["error"]


class Texts(Clock):
    """Actions travel pickled; the environments have episodes of different lengths."""

    action_space = spaces.Dict({agent: spaces.Text(9) for agent in "ab"})
    state_space = spaces.Box(-999, 999, (1,), np.float32)

    def __init__(self, length: int, restarts: int = 0) -> None:
        super().__init__(restarts)
        self.length = length

    def state(self) -> np.ndarray:
        return self.now()


@each_setup
@pytest.mark.parametrize(
    ("latest", "mode", "lengths"),
    [
        ("a reset", "SAME_STEP", (2, 1)),
        ("a reset", "NEXT_STEP", (1, 9)),
        ("a step", "SAME_STEP", (9, 1)),
        ("a state", "SAME_STEP", (9, 1)),
        ("a state", "NEXT_STEP", (9, 9)),
    ],
)
def test_actions_that_the_worker_cannot_unpickle(latest, mode, lengths, setup, build):
    """It is the step that fails, whatever the environment before it in the same worker has done last."""
    env = build([functools.partial(Texts, length) for length in lengths], setup, mode, on_error="restart")
    if latest == "a state" and setup.shared_memory:
        env.stepper.batch.write_states()
    env.reset()
    usual = {"a": "go", "b": "go"}
    env.step([usual, usual])
    observations, rewards, terminateds, truncateds, infos = env.step([usual, {**usual, "b": Refusing()}])
    assert (rewards[1], terminateds[1]["__all__"], truncateds[1]["__all__"]) == ({"a": 0.0, "b": 0.0}, False, True)
    assert "raised in step" in infos[1]["__common__"]["error"]
    assert float(observations[1]["a"][0]) == (110.0 if mode == "SAME_STEP" else 11.0)
    assert "__common__" not in infos[0]


class Unstable(Clock):
    """Its global state fails once, at one moment; infos tell when they are of."""

    state_space = spaces.Box(-999, 999, (1,), np.float32)

    def __init__(self, fails_at: tuple[int, int], dies: bool, restarts: int = 0) -> None:
        super().__init__(restarts)
        self.fails_at, self.dies = fails_at, dies

    def infos(self) -> dict[str, Any]:
        return {"a": {"at": frozenset([self.time])}}

    def state(self) -> np.ndarray:
        if self.restarts == 0 and (self.episode, self.time) == self.fails_at:
            if self.dies:
                os._exit(3)
            raise ValueError("broken")
        return self.now()


@pytest.mark.parametrize(("fails_at", "final", "told"), [((1, 3), 12.0, None), ((2, 0), 13.0, 3)], ids=str)
@pytest.mark.parametrize(("setup", "dies"), [(SETUPS[0], False), (SETUPS[1], False), (SETUPS[2], True)], ids=str)
def test_states_of_a_last_step_that_fail(fails_at, final, told, setup, dies, build):
    """The last state belongs to the step, which it interrupts; the next one belongs to the reset."""
    env = build([functools.partial(Unstable, fails_at, dies)], setup, on_error="restart")
    env.stepper.batch.write_states()
    env.reset()
    for _ in range(Clock.length):
        observations, rewards, terminateds, truncateds, infos = step(env)
    assert "broken" in infos["__common__"]["error"] or dies
    is_whole = told is not None
    assert (rewards["a"], terminateds["__all__"], truncateds["__all__"]) == (float(is_whole), is_whole, not is_whole)
    assert (float(infos["a"]["final_obs"][0]), infos["a"].get("at")) == (final, frozenset([told]) if told else None)
    states, finals = env.stepper.batch.states_seen()
    assert (float(observations["a"][0]), *states[0], *finals[0]) == (110.0, 110.0, final)


class Unconvertible(ComputedObservation):
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.fatal:
            raise ValueError("broken")
        return self.value


class HalfWritten(Clock):
    """Environment 1 fails while its second observation is written; then environment 0 ends their worker."""

    def __init__(self, env_id: int, restarts: int = 0) -> None:
        super().__init__(restarts)
        self.env_id = env_id

    def seen(self) -> dict[str, Any]:
        fatal = (self.env_id, self.restarts, self.time) == (1, 0, 2)
        return {"a": self.now(), "b": Unconvertible(self.now(), fatal=fatal)}

    def step(self, actions: dict) -> tuple[dict, ...]:
        if (self.env_id, self.restarts, self.time) == (0, 0, 2):
            os._exit(1)
        return super().step(actions)


@each_killable
@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_second_fault_after_a_half_written_record(mode, setup, build):
    """The last known observations are those that the caller has received, not what the record holds."""
    env = build([HalfWritten] * 2, setup, mode, on_error="restart")
    env.reset()
    for _ in range(2):
        observations, _, _, truncateds, _ = env.step([ACTIONS] * 2)
    assert (truncateds[0]["__all__"], truncateds[1]["__all__"]) == (False, True)
    assert {agent: float(value[0]) for agent, value in observations[1].items()} == {"a": 0.0, "b": 0.0}
    observations[1]["a"][:] = 7.0  # they are the caller's
    env.step([ACTIONS], env_ids=[0])
    observations, rewards, _, truncateds, infos = env.step([ACTIONS], env_ids=[1])
    assert {agent: float(value[0]) for agent, value in observations[0].items()} == {"a": 0.0, "b": 0.0}
    assert (rewards, truncateds) == (({},), ({"__all__": True},))
    assert infos[0]["__common__"]["restarted"] is True
