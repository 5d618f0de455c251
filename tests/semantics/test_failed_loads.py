"""`load_state` where something fails: what is loaded, what is closed, and what stays as it was."""

from __future__ import annotations

import functools
import os
import random
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel import ParallelEnv, RecyclePolicy, WorkerCrashed, WorkerTimeout
from marl_parallel.core.pool.saved_states import from_bytes, to_bytes

ACTIONS = {"a": 0}


class Count:
    """Observes how many steps there were; an episode has three, with a reward of 1 each."""

    possible_agents: ClassVar[list[str]] = ["a"]
    observation_space = spaces.Dict(a=spaces.Box(-99.0, 99.0, (), np.float64))
    action_space = spaces.Dict(a=spaces.Discrete(3))
    length = 3

    def __init__(self) -> None:
        self.time = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        return {"a": 0.0}, {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        return {"a": float(self.time)}, {"a": 1.0}, {"__all__": self.time >= self.length}, {"__all__": False}, {}

    def close(self) -> None:
        pass


class DiesInClose(Count):
    length = 99

    def __init__(self, env_id: int) -> None:
        super().__init__()
        self.env_id = env_id

    def close(self) -> None:
        if self.env_id == 0 and self.time == 5:
            os._exit(3)


class Tracked(Count):
    """Notes how many were made and closed."""

    length = 99
    made: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        self.number = len(self.made)
        self.made.append(self.number)

    def close(self) -> None:
        self.closed.append(self.number)


class MadeAgain(Tracked):
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.make()


class SavesItself(Tracked):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    def get_state(self) -> int:
        return self.time

    def set_state(self, state: int) -> None:
        if state == 2:
            raise RuntimeError("two")
        self.time = state


class NeedsOptions(SavesItself):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = options["start"]
        return {"a": float(self.time)}, {}


class WithState(Count):
    length = 99
    state_space = spaces.Box(-99.0, 99.0, (1,), np.float64)
    world: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.world = [0.0]
        return super().reset()

    def state(self) -> Any:
        return np.array([self.world[0]])


class Wide(Count):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(a=spaces.Box(-99.0, 99.0, (size,), np.float64))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return {"a": np.zeros(self.observation_space["a"].shape)}, {}  # type: ignore[arg-type]


def broken(state: bytes) -> bytes:
    """A state whose simulator cannot be unpickled."""
    whole = from_bytes(state, "a state")
    return to_bytes(whole._replace(saved=whole.saved._replace(pickled=whole.saved.pickled[:-20])))


def test_a_worker_that_dies_as_environments_change_places():
    """Its environment is rebuilt; the other one has been loaded, and nothing of both is mixed."""
    with ParallelEnv([DiesInClose] * 2, num_workers=2, on_error="restart") as env:
        env.reset()
        for _ in range(2):
            env.step([ACTIONS] * 2)
        states = env.save_state()
        for _ in range(3):
            env.step([ACTIONS] * 2)
        with pytest.raises(WorkerCrashed) as caught:
            env.load_state(states)
        assert caught.value.env_ids == (0,)
        observations, _, _, truncateds, _ = env.step([ACTIONS] * 2)
        assert [of_env["a"] for of_env in observations] == [0.0, 3.0]
        assert [of_env["__all__"] for of_env in truncateds] == [True, False]
        assert env.stats().restarts == 1


class Leaving(Count):
    """PettingZoo's rules, where each agent that acts needs an action; it dies in `close` after two more steps."""

    length = 4
    possible_agents: ClassVar[list[str]] = ["a", "b"]
    observation_space = spaces.Dict(dict.fromkeys("ab", spaces.Box(-99.0, 99.0, (), np.float64)))  # type: ignore[arg-type]
    action_space = spaces.Dict(dict.fromkeys("ab", spaces.Discrete(3)))  # type: ignore[arg-type]

    def __init__(self, env_id: int) -> None:
        super().__init__()
        self.env_id, self.agents, self.dies = env_id, ["a", "b"], False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time, self.agents = 0, ["a", "b"]
        return dict.fromkeys(self.agents, 0.0), {}

    def step(self, actions: Any) -> Any:
        assert [*actions] == self.agents, "an agent has no action"
        self.time += 1
        ends, agents = self.time == self.length, self.agents
        flags = {agent: ends or (agent == "b" and self.time == 2) for agent in agents}
        self.agents = [agent for agent in agents if not flags[agent]]
        return (
            dict.fromkeys(agents, float(self.time)),
            dict.fromkeys(agents, 1.0),
            flags,
            dict.fromkeys(agents, False),
            {},
        )

    def close(self) -> None:
        if self.dies:
            os._exit(3)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_who_acts_in_what_was_loaded_before_a_worker_died(mode, shared_memory):
    """What has been loaded beside the fault goes on as after any load: who acts, and the episode's statistics."""

    def act(env: ParallelEnv) -> Any:
        acting = env.acting[1]
        resets = not acting and mode == "DISABLED"
        results = env.reset(env_ids=[1]) if resets else env.step([dict.fromkeys(acting, 0)], [1])
        return acting, [of_envs[0] for of_envs in results], [one[1:] for one in env.finished_episodes]

    more: Any = {"num_workers": 2, "on_error": "restart", "shared_memory": shared_memory}
    with ParallelEnv([Leaving] * 2, mode, **more) as env, ParallelEnv([Leaving] * 2, mode, backend="serial") as plain:
        env.reset()
        for _ in range(2):
            states = env.save_state()
            env.set_attr("dies", True, env_ids=[0])
            with pytest.raises(WorkerCrashed):
                env.load_state(states)
            plain.load_state(states)
            for _ in range(5):
                assert_same(act(env), act(plain))
            env.reset(env_ids=[0])
            env.load_state(states)
            act(env)


@pytest.mark.parametrize(("kind", "steps"), [(MadeAgain, 0), (SavesItself, 2)])
def test_what_a_failed_load_has_made_is_closed(kind, steps):
    kind.made.clear()
    kind.closed.clear()
    with ParallelEnv([kind] * 2, backend="serial") as env:
        env.reset()
        for _ in range(steps):
            env.step([ACTIONS] * 2)
        states = env.save_state()
        with pytest.raises(TypeError, match=r"environment [01] \(worker [01]\): its state cannot be loaded"):
            env.load_state([states[0], states[1] if steps else broken(states[1])])
        assert len(kind.made) > 2
        assert len(kind.closed) == len(kind.made) - 2
        assert env.step([ACTIONS] * 2)[0][0]["a"] == steps + 1.0
    assert sorted(kind.closed) == kind.made


class HasBadReplacements(Count):
    """Its close in the middle of a load lets the constructor of its replacement fail, and waits for that."""

    def __init__(self, folder: Path, restarts: int) -> None:
        super().__init__()
        self.folder = folder
        if restarts:
            self.wait_for("closing")
            (folder / "failed").touch()
            raise RuntimeError("no replacement")

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + 20.0
        while not (self.folder / name).exists() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        (self.folder / "closing").touch()
        self.wait_for("failed")
        time.sleep(0.3)


def test_a_replacement_that_fails_in_the_middle_of_a_load_changes_nothing(tmp_path):
    """It is no fault of the loaded environment, which takes the place of the present one."""
    constructor = functools.partial(HasBadReplacements, tmp_path)
    recycle = RecyclePolicy(max_episodes=1)
    with ParallelEnv([constructor] * 2, num_workers=2, on_error="restart", recycle=recycle) as env:
        env.reset()
        env.step([ACTIONS] * 2)
        states = env.save_state()
        env.step([ACTIONS] * 2)
        observations, _ = env.load_state(states)
        assert [of_env["a"] for of_env in observations] == [1.0, 1.0]
        assert [of_env["a"] for of_env in env.step([ACTIONS] * 2)[0]] == [2.0, 2.0]
        assert [*env.acting] == [["a"], ["a"]]


class DiesUnused(SavesItself):
    """Of the environments that a failed load has made, the first one ends its worker in `close`."""

    def __init__(self, env_id: int) -> None:
        super().__init__()
        self.env_id, self.state = env_id, -1

    def set_state(self, state: int) -> None:
        if self.env_id == 1:
            raise RuntimeError("one")
        self.state = state

    def close(self) -> None:
        if self.env_id == 0 and self.state == 1:
            os._exit(3)
        if self.env_id == 0 and self.state == 2:
            time.sleep(60)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_dropped_environment_that_fails_in_close_is_named(steps):
    """The fault counts against it alone, and `start_timeout` ends it if it hangs."""
    with ParallelEnv([DiesUnused] * 2, num_workers=1, on_error="restart", start_timeout=2.0) as env:
        env.reset()
        for _ in range(steps):
            env.step([ACTIONS] * 2)
        states = env.save_state()
        with pytest.raises((WorkerCrashed, WorkerTimeout), match=" close ") as caught:
            env.load_state(states)
        assert caught.value.env_ids == (0,)
        env.step([ACTIONS] * 2)
        assert env.stats().restart_kinds == {"death" if steps == 1 else "timeout": 1, "neighbour": 1}


def test_a_new_environment_is_reset_with_the_options_of_later_resets():
    with ParallelEnv([NeedsOptions] * 2, num_workers=1) as env:
        env.set_reset_options({"start": 4})
        env.reset()
        states = env.save_state()
        env.step([ACTIONS] * 2)
        assert [of_env["a"] for of_env in env.load_state(states)[0]] == [4.0, 4.0]
        assert env.step([ACTIONS] * 2)[0][1]["a"] == 5.0
        whole = from_bytes(states[1], "a state")
        extensions = {**whole.extensions, "Rebuilds": (*whole.extensions["Rebuilds"][:3], None)}
        with pytest.raises(TypeError, match="the reset of its new environment raised TypeError"):
            env.load_state([states[0], to_bytes(whole._replace(extensions=extensions))])
        assert env.step([ACTIONS] * 2)[0][1]["a"] == 6.0


def test_a_failed_load_before_the_first_reset_reads_no_state():
    with ParallelEnv([WithState] * 2, num_workers=1) as env:
        env.reset()
        states = env.save_state()
    with ParallelEnv([WithState] * 2, num_workers=1) as env:
        env.stepper.batch.write_states()
        with pytest.raises(TypeError, match="environment 1"):
            env.load_state([states[0], broken(states[1])])
        env.load_state(states)
        assert env.step([ACTIONS] * 2)[0][1]["a"] == 1.0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_environment_that_is_over_replaces_one_that_is_over(shared_memory):
    """The next episode has all of its steps in the statistics."""
    with ParallelEnv([Count], auto_reset="NEXT_STEP", backend="serial", shared_memory=shared_memory) as env:
        env.reset()
        for _ in range(3):
            env.step([ACTIONS])
        env.load_state(env.save_state())
        for _ in range(4):
            env.step([ACTIONS])
        assert [(one.returns, one.length) for one in env.finished_episodes] == [({"a": 3.0}, 3)]


def test_random_actions_go_on_in_another_environment():
    with ParallelEnv([Count] * 2, backend="serial") as env:
        env.reset()
        states = env.save_state()
        expected = [env.sample_actions([1]) for _ in range(12)]
        env.load_state([states[1]], [0])
        assert [env.sample_actions([0]) for _ in range(12)] == expected


def test_states_with_and_without_replay(tmp_path):
    with ParallelEnv([Count], backend="serial") as env:
        env.reset()
        states = env.save_state()
    with ParallelEnv([Count], backend="serial", replay=5, replay_dir=tmp_path) as env:
        env.reset()
        with pytest.raises(ValueError, match="its state was saved without replay="):
            env.load_state(states)
        states = env.save_state()
    with ParallelEnv([Count], backend="serial") as env, pytest.raises(ValueError, match="was saved with replay="):
        env.load_state(states)


def test_damaged_states_are_refused():
    rng = random.Random(0)
    with ParallelEnv([Count], backend="serial") as env:
        env.reset()
        (state,) = env.save_state()
        for _ in range(200):
            damaged, place = bytearray(state), rng.randrange(len(state))
            damaged[place] ^= 1 << rng.randrange(8)
            with pytest.raises(ValueError, match="environment 0: its state"):
                env.load_state([bytes(damaged)])
        assert env.step([ACTIONS])[0][0]["a"] == 1.0


def test_other_spaces_are_named():
    with ParallelEnv([lambda: Wide(2)] * 2, backend="serial") as env:
        env.reset()
        states = env.save_state()
    with (
        ParallelEnv([lambda: Wide(3)] * 2, num_workers=1) as env,
        pytest.raises(ValueError, match=r"state differs") as caught,
    ):
        env.load_state(states)
    text = "environment 0 (worker 0): its state cannot be loaded: the state differs from the environments here in the "
    assert str(caught.value).startswith(
        text + "observation space of agent 'a': got Box(-99.0, 99.0, (2,), float64), expected"
    )


class Dice(Count):
    """Draws from process-wide generators; saves itself, and the second one cannot be loaded."""

    def __init__(self, env_id: int) -> None:
        super().__init__()
        self.env_id, self.engine = env_id, (one for one in [])  # a generator cannot be pickled

    def step(self, actions: Any) -> Any:
        self.time += 1
        return {"a": float(np.random.random() + random.random())}, *super().step(actions)[1:]

    def get_state(self) -> int:
        return self.time

    def set_state(self, time: int) -> None:
        if self.env_id == 1:
            raise RuntimeError("there is no state for me")
        self.time = time


@pytest.mark.parametrize("arguments", [{"num_workers": 1}, {"num_workers": 2}, {"backend": "serial"}], ids=str)
def test_a_failed_load_leaves_process_wide_generators_as_they_were(arguments):
    drawn = []
    for fails in (False, True):
        random.seed(0)
        np.random.seed(0)
        with ParallelEnv([Dice] * 2, seed=5, **arguments) as env:
            env.reset()
            env.step([ACTIONS] * 2)
            if fails:
                with pytest.raises(TypeError, match="there is no state for me"):
                    env.load_state(env.save_state())
            drawn.append(env.step([ACTIONS] * 2)[0])
    assert drawn[0] == drawn[1]
