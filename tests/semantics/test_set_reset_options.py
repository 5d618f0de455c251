"""`set_reset_options`: every later reset has the options, also automatic ones, until they are set again."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from simulators.native_arena import Arena

from marl_parallel import ParallelEnv, RecyclePolicy
from marl_parallel.adapters import DictEnv
from marl_parallel.vector import StackedVecEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

HARD, HARDER = {"speed": 3, "map": "hills"}, {"speed": 9}
ANY_MODE = pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])


class Course:
    """Reports the options and the seed of its reset; action 1 ends the episode, 2 raises, 3 raises in the next reset.

    It changes the options that it gets.
    """

    possible_agents = ("boat", "kite")
    observation_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Box(-100, 100, (), np.float64)))
    action_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Discrete(4)))
    fails = False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if self.fails:
            raise RuntimeError("aground")
        self.options = None if options is None else dict(options)
        if options is not None:
            options["speed"] = -1
        return self.observed(), {"__common__": {"options": self.options, "seed": seed}}

    def observed(self) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, float((self.options or {}).get("speed", 0)))

    def step(self, actions: dict) -> tuple[dict, ...]:
        action = actions.get("boat", 0)
        if action == 2:
            raise RuntimeError("capsized")
        self.fails = action == 3
        return self.observed(), {}, {"__all__": action in (1, 3)}, {"__all__": False}, {}


class Remembering(DictEnv):
    """The options of a reset hold for all later episodes, also after a restart."""

    options_last = True


def act(env: Any, *actions: int) -> Any:
    return env.step([{"boat": action, "kite": 0} for action in actions])


def next_options(env: Any, mode: str, *actions: int) -> list[Any]:
    """The options of the episodes that begin after these actions, which end all episodes."""
    *_, infos = act(env, *actions)
    key = "reset_info"
    if mode == "NEXT_STEP":
        *_, infos = act(env, *[0] * len(actions))
    elif mode == "DISABLED":
        _, infos = env.reset()
    if mode == "SAME_STEP":
        return [of_env["__common__"].get(key, of_env["__common__"])["options"] for of_env in infos]
    return [of_env["__common__"]["options"] for of_env in infos]


@ANY_MODE
def test_automatic_resets_and_those_of_the_caller(mode, setup, build):
    env = build([Course] * 4, setup, mode)
    env.set_reset_options(HARD)  # before the first reset, too
    _, infos = env.reset()
    assert [of_env["__common__"]["options"] for of_env in infos] == [HARD] * 4
    assert next_options(env, mode, 1, 1, 1, 1) == [HARD] * 4
    env.set_reset_options(HARDER, env_ids=[2, 0])
    assert act(env, 0, 0, 0, 0)[0][0]["boat"] == 3  # the running episode goes on
    for _ in range(2):
        assert next_options(env, mode, 1, 1, 1, 1) == [HARDER, HARD, HARDER, HARD]
    _, infos = env.reset(options={"map": "sea", "wind": 1}, env_ids=[1, 2], seed=5)
    assert [of_env["__common__"]["options"] for of_env in infos] == [
        {"speed": 3, "map": "sea", "wind": 1}, {"speed": 9, "map": "sea", "wind": 1}
    ]  # fmt: skip
    assert [of_env["__common__"]["seed"] for of_env in infos] == [6, 7]
    assert next_options(env, mode, 1, 1, 1, 1) == [HARDER, HARD, HARDER, HARD]  # for one reset
    env.set_reset_options([None, HARDER], env_ids=[2, 3])
    assert next_options(env, mode, 1, 1, 1, 1) == [HARDER, HARD, None, HARDER]
    env.set_reset_options(None)
    assert next_options(env, mode, 1, 1, 1, 1) == [None] * 4


@ANY_MODE
def test_restarts(mode, backend_setup, build):
    env = build([Course] * 3, backend_setup, mode, on_error="restart")
    env.reset()
    env.set_reset_options(HARD)
    assert next_options(env, mode, 2, 1, 1) == [HARD] * 3  # environment 0 is constructed again
    assert next_options(env, mode, 1, 1, 3) == [HARD] * 3  # environment 2 fails in its reset
    act(env, 0, 2, 0)
    env.set_reset_options(HARDER)  # an environment that waits for its reset has them, too
    if mode == "NEXT_STEP":
        assert act(env, 0, 0, 0)[-1][1]["__common__"]["options"] == HARDER
    elif mode == "DISABLED":
        assert env.reset(env_ids=[1])[1][0]["__common__"]["options"] == HARDER
    env.restart([0])
    observations, infos = env.reset(env_ids=[0, 2])
    assert [of_env["__common__"]["options"] for of_env in infos] == [HARDER] * 2
    assert observations[0]["boat"] == 9
    env.set_reset_options(None)
    env.restart([1])
    _, infos = env.reset(env_ids=[1])
    assert infos[0]["__common__"]["options"] is None


def test_death_of_a_worker(killable_setup, build):
    env = build([Course] * 2, killable_setup, on_error="restart")
    env.set_reset_options(HARD, env_ids=[1])
    env.reset()
    env.call(lambda course: setattr(type(course), "step", lambda *_: __import__("os")._exit(3)), env_ids=[1])
    observations, *_, infos = act(env, 0, 0)
    assert infos[1]["__common__"]["restarted"]
    assert [of_env["boat"] for of_env in observations] == [0, 3]


def test_recycling(parallel):
    """Environments that have been prepared with other options are prepared again."""
    env = parallel(Course, 2, True, backend="process", recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    act(env, 1, 1)  # from now on, new environments are being prepared
    env.set_reset_options(HARD, env_ids=[1])
    *_, infos = act(env, 1, 1)
    assert [of_env["__common__"]["recycled"] for of_env in infos] == [True, True]
    assert [of_env["__common__"]["reset_info"]["options"] for of_env in infos] == [None, HARD]
    env.set_reset_options(HARDER)
    env.reset(options={"wind": 1})
    act(env, 1, 1)
    _, infos = env.reset(env_ids=[0])
    assert infos[0]["__common__"]["options"] == HARDER


def test_environments_that_remember_options(backend_setup, build):
    env = build([Course] * 2, backend_setup, False, on_error="restart", adapter=Remembering)
    env.reset(options={"a": 1, "speed": 1})
    env.set_reset_options({"speed": 2})
    _, infos = env.reset()
    assert infos[0]["__common__"]["options"] == {"speed": 2}  # it remembers the rest itself
    env.restart([0])
    _, infos = env.reset()
    assert infos[0]["__common__"]["options"] == {"a": 1, "speed": 2}
    env.set_reset_options(None)
    env.restart([0])
    _, infos = env.reset(env_ids=[0])
    assert infos[0]["__common__"]["options"] == {"a": 1, "speed": 2}


@ANY_MODE
def test_replay_repeats_the_options_of_the_episode(mode, parallel, tmp_path):
    """Also if they were set after the episode had begun."""
    import marl_parallel.core.pool.replay_file as files
    from marl_parallel.core.objects.pickling import loads

    env = parallel(Course, 2, mode, on_error="restart", replay=10, replay_dir=tmp_path)
    env.set_reset_options(HARD)
    env.reset()
    next_options(env, mode, 1, 1)
    env.set_reset_options(HARDER)
    act(env, 0, 0)
    act(env, 2, 1)
    if mode == "DISABLED":
        env.reset()
    elif mode == "NEXT_STEP":
        act(env, 0, 0)
    act(env, 2, 2)
    kept = [files.read_crash(path) for path in sorted(tmp_path.iterdir())]
    by_env = [(one.env_id, loads(one.options)) for one in kept]
    assert by_env == [(0, HARD), (0, HARDER), (1, HARDER)]


class Lock:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def not_here() -> None:
    raise RuntimeError("only in the caller's process")


class UnpicklableThere:
    """It can be pickled, and not be made again in a worker."""

    def __reduce__(self) -> Any:
        return not_here, ()


@pytest.mark.parametrize(
    ("options", "env_ids", "error", "text"),
    [
        (Lock(), None, TypeError, "options must be a dict or None"),
        ({"lock": Lock()}, None, TypeError, "options cannot be pickled.*attribute 'lock'"),
        (
            [HARDER, {"there": UnpicklableThere()}],
            [0, 1],
            TypeError,
            "environment 1: the options can be pickled but not unpickled",
        ),
        ([HARDER], [0, 1], ValueError, "options"),
        (HARDER, [7], ValueError, "7"),
        (HARDER, [0, 0], ValueError, "0"),
    ],
)
def test_what_is_refused_changes_nothing(options, env_ids, error, text, backend_setup, build):
    env = build([Course] * 2, backend_setup)
    env.set_reset_options(HARD)
    env.reset()
    with pytest.raises(error, match=text):
        env.set_reset_options(options, env_ids)
    assert next_options(env, "SAME_STEP", 1, 1) == [HARD] * 2


class WithoutOptions(Course):
    def reset(self, *, seed: int | None = None) -> tuple[dict, dict]:
        return super().reset(seed=seed)


def test_environments_without_options(parallel):
    env = parallel(WithoutOptions, 2)
    with pytest.raises(ValueError, match="`reset` of these environments takes no options"):
        env.set_reset_options(HARD)
    env.set_reset_options(None)
    with ParallelEnv.from_native(Arena(2)) as native, pytest.raises(ValueError, match="takes no options"):
        native.set_reset_options(HARD)


def test_calls_in_flight_and_closed_environments(parallel):
    env = parallel(Course, 2, backend="process")
    env.reset_async()
    with pytest.raises(AlreadyPendingCallError, match="set_reset_options"):
        env.set_reset_options(HARD)
    env.recv()
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.set_reset_options(HARD)


def test_values_of_a_module_that_workers_cannot_import(parallel):
    module = types.ModuleType("only_in_this_process")
    exec("class Level:\n    number = 7\n", vars(module))
    sys.modules[module.__name__] = module
    module.Level.__module__ = module.__name__
    try:
        env = parallel(Course, 2, True, backend="process")
        env.set_reset_options({"level": module.Level()})
        env.reset()
        (first, second) = env.call(lambda course: course.options["level"].number)
    finally:
        del sys.modules[module.__name__]
    assert (first, second) == (7, 7)


def test_through_a_facade(parallel):
    env = StackedVecEnv(parallel(Course, 2, True))
    env.parallel_env.set_reset_options(HARD)
    assert env.reset()[0].tolist() == [[3, 3], [3, 3]]
    env.parallel_env.set_reset_options(HARDER)
    observations, *_ = env.step(np.ones((2, 2), np.int64))
    assert observations.tolist() == [[9, 9], [9, 9]]
