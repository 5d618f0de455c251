"""RLlib's facade: what it says against the core's dicts, what RLlib's own episodes make of it, and the runner.

Sampling is by RLlib's own code throughout. The environments are in `tests/rllib.py`.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import ray
import rllib
from comparison import assert_same
from conftest import Setup
from environments import Hunt, Skirmish
from fading import POINT, Fades, Haunts
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from mortal import Fate, mortal
from mpe2 import simple_spread_v3
from pettingzoo.classic import tictactoe_v3
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.rllib.utils.error import EnvError as RLlibEnvError
from ray.tune import register_env
from rllib import Drawn, Duel, Fading, Haunted, Reborn, Silent, Spread, at_random, config_for, story
from survival import OFTEN
from zoo import draw

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.vector import ParallelMultiAgentEnvRunner, PettingZooVecEnv, RLlibVectorMultiAgentEnv

ROOT = Path(__file__).parents[2]
SETUPS = [Setup("serial", True, 2), Setup("process", True, 2), Setup("process", False, 2)]
SIMULATORS = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
    "hunt": Hunt,
    "skirmish": Skirmish,
    "fades": Fades,
    "haunts": Haunts,
}
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)
Five = tuple[list[dict], list[dict], list[dict], list[dict], list[dict]]


class Wanted:
    """What RLlib is to be told where the core says something: the dead left out, what is common in every info."""

    def __init__(self, count: int) -> None:
        self.over, self.dead = [False] * count, [set() for _ in range(count)]
        self.last: list[dict] = [{} for _ in range(count)]
        self.left_out = self.deaths = self.restarts = self.never_begun = 0

    def reset(self, told: tuple[Any, ...]) -> tuple[list[dict], list[dict]]:
        observations, infos = told
        pairs = [self.one(i, (observations[i], {}, {}, {}, infos[i])) for i in range(len(observations))]
        return [pair[0] for pair in pairs], [pair[4] for pair in pairs]

    def step(self, told: tuple[Any, ...]) -> Five:
        rows = [self.one(env_id, five) for env_id, five in enumerate(zip(*told, strict=True))]
        return tuple(map(list, zip(*rows, strict=True)))

    def one(self, env_id: int, told: tuple[dict, ...]) -> tuple[dict, ...]:
        if begins := self.over[env_id]:
            self.dead[env_id], self.last[env_id] = set(), {}
        dead, last = self.dead[env_id], self.last[env_id]
        five = [{agent: value for agent, value in dicts.items() if agent not in dead} for dicts in told]
        self.left_out += sum(map(len, told)) - sum(map(len, five))
        flags = [(agent, flag) for dicts in five[2:4] for agent, flag in dicts.items()]
        self.over[env_id] = any(flag for agent, flag in flags if agent == "__all__")
        common = five[4].get("__common__", {})
        if common.get("restarted"):
            self.restarts += 1
            self.never_begun += begins and self.over[env_id]
            if self.over[env_id]:  # what had begun is cut off, and what had not has nothing to say
                five[0] = {} if begins else {a: last[a] for a in last if a not in dead} | five[0]
        last.update(five[0])
        if "__common__" in five[4]:
            five[4] |= {agent: {"__common__": common} | five[4].get(agent, {}) for agent in five[0]}
        died = {agent for agent, flag in flags if flag} - {"__all__"}
        self.deaths += bool(died) and not self.over[env_id]
        dead |= died
        return tuple(five)


def actions_for(env: ParallelEnv, rng: np.random.Generator) -> list[dict]:
    spaces = env.action_space
    return [{a: draw(spaces[a], rng) for a in acting if a in spaces.spaces} for acting in env.acting]


def compared(env: RLlibVectorMultiAgentEnv, core: ParallelEnv, steps: int, seed: int | None = 3) -> Wanted:
    """Facade and core side by side, with the same seeds and actions."""
    rng, wanted = np.random.default_rng(8), Wanted(len(core))
    assert_alike(env.reset(seed=seed), wanted.reset(core.reset(seed=seed)))
    for _ in range(steps):
        actions = actions_for(core, rng)
        assert_alike(env.step(copy.deepcopy(actions)), wanted.step(core.step(copy.deepcopy(actions))))
    return wanted


def assert_alike(told: Any, expected: Any) -> None:
    """The same but for reports of faults, which name processes."""
    assert_same(without_reports(list(told)), without_reports(list(expected)))


def without_reports(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v.splitlines()[0][:15] if k == "error" else without_reports(v) for k, v in value.items()}
    return [without_reports(item) for item in value] if isinstance(value, list | tuple) else value


# -- the facade against the core ---------------------------------------------------------------------------------------


@each_setup
@pytest.mark.parametrize("name", SIMULATORS)
def test_what_the_core_says(name, setup, build):
    make = SIMULATORS[name]
    env = RLlibVectorMultiAgentEnv(build([make] * 4, setup, "NEXT_STEP"))
    wanted = compared(env, build([make] * 4, setup, "NEXT_STEP"), 40)
    assert (wanted.deaths > 0) is (name != "spread")
    assert (wanted.left_out > 0) is (name == "haunts")
    env.close()


@each_setup
@pytest.mark.parametrize("name", ["skirmish", "hunt", "haunts"])
def test_restarts(name, setup, build):
    """In a step, at a due reset, in the constructor; where processes die, those beside are idle or in flight."""
    ways = ("raise", "raise") if setup.backend == "serial" else ("os._exit", "raise")
    fates = {
        (1, 0): Fate(ways[0], "step", 5),
        (1, 1): Fate(ways[1], "constructor"),
        (1, 2): Fate(ways[0], "reset", 1),
        (2, 0): Fate(ways[0], "step", 2),
        (2, 1): Fate(ways[0], "reset"),
        (3, 0): Fate(ways[1], "step", 5),
        (3, 1): Fate(ways[0], "step", 0),
        (3, 2): Fate(ways[0], "reset"),
    }
    made = [
        build([mortal(SIMULATORS[name], fates)] * 4, setup, "NEXT_STEP", on_error="restart", restart_policy=OFTEN)
        for _ in range(2)
    ]
    wanted = compared(RLlibVectorMultiAgentEnv(made[0]), made[1], 40, seed=None)
    assert wanted.restarts >= 4
    assert (wanted.never_begun > 0) is (setup.backend == "process")
    assert made[0].stats().restarts == made[1].stats().restarts >= 6


def test_a_sequence_of_seeds(build):
    made = [build([Fading] * 3, SETUPS[0], "NEXT_STEP") for _ in range(2)]
    env = RLlibVectorMultiAgentEnv(made[0])
    assert_same(env.reset(seed=[7, 1, 7])[0], [*made[1].reset(seed=[7, 1, 7])[0]])
    assert env.get_attr("seeds") == ([7], [1], [7])


def test_what_rllib_asks_it_for(build):
    core = build([Drawn] * 2, SETUPS[0], "NEXT_STEP")
    env = RLlibVectorMultiAgentEnv(core)
    assert isinstance(env, VectorMultiAgentEnv)
    assert env.unwrapped is env
    assert (env.num_envs, env.render_mode, env.metadata["render_modes"]) == (2, "rgb_array", ["rgb_array"])
    assert env.single_observation_space == core.observation_space
    assert env.single_observation_spaces == dict(core.observation_space)
    assert env.single_action_space == core.action_space
    assert env.single_action_spaces == dict(core.action_space)
    env.reset()
    env.step([{"x": 0}, {"x": 0}])
    assert [int(frame[0, 0, 0]) for frame in env.render()] == [1, 1]
    env.set_attr("time", [0, 9])
    assert env.get_attr("time") == (0, 9)
    assert env.call("told") == (["x", "y", "z"], ["z"])
    stand_in = env.envs[1]
    assert len(env.envs) == 2
    assert isinstance(stand_in.unwrapped, MultiAgentEnv)
    assert stand_in.possible_agents == ["x", "y", "z"]
    assert stand_in.get_observation_space("z") == POINT
    assert stand_in.get_action_space("z") == gymnasium.spaces.Discrete(3)
    assert stand_in.get_action_space("nobody") is None
    assert int(stand_in.render()[0, 0, 0]) == 9
    with pytest.raises(AttributeError, match=r"get_attr\('time'\)"):
        stand_in.time  # noqa: B018
    with pytest.raises(RuntimeError, match="cannot be stepped"):
        stand_in.step({})
    with pytest.raises(RuntimeError, match="cannot be reset"):
        stand_in.reset(seed=1)


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_wrong_use(build):
    with pytest.raises(TypeError, match="made of a ParallelEnv, got Fading"):
        RLlibVectorMultiAgentEnv(Fading())
    for mode in (True, False):
        with pytest.raises(ValueError, match='wants a ParallelEnv with auto_reset="NEXT_STEP", got'):
            RLlibVectorMultiAgentEnv(build([Fading], SETUPS[0], mode))
    with pytest.raises(ValueError, match="copy=True"):
        RLlibVectorMultiAgentEnv(build([Fading], SETUPS[0], "NEXT_STEP", copy=False))
    core = build([Hunt] * 2, SETUPS[0], "NEXT_STEP")
    env, other = RLlibVectorMultiAgentEnv(core), PettingZooVecEnv(core)
    with pytest.raises(ResetNeeded):
        env.step([{}, {}])
    env.reset()
    with pytest.raises(RuntimeError, match="stepped by a RLlibVectorMultiAgentEnv already"):
        other.reset()
    with pytest.raises(ValueError, match="no action for agent 'wolf_0'"):
        env.step([{}, {}])
    with pytest.raises(ValueError, match="2 action dicts"):
        env.step([{}])
    env.close()
    assert env.closed
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.step([{}, {}])
    with pytest.raises(ClosedEnvironmentError):
        RLlibVectorMultiAgentEnv(core)


def test_what_is_dropped_closes_nothing(build):
    core = build([Fading], SETUPS[0], "NEXT_STEP")
    env = RLlibVectorMultiAgentEnv(core)
    env.reset()
    del env
    gc.collect()
    assert PettingZooVecEnv(build([Hunt], SETUPS[0], "NEXT_STEP")).num_envs == 1
    env, other = RLlibVectorMultiAgentEnv(core), RLlibVectorMultiAgentEnv(core)
    assert env.reset()[0][0].keys() == {"x", "y", "z"}
    for method in (other.reset, lambda: other.step([{}])):
        with pytest.raises(RuntimeError, match="stepped by a RLlibVectorMultiAgentEnv already"):
            method()


def test_without_rllib():
    program = """
import sys
import marl_parallel.vector
assert "ray" not in sys.modules
sys.modules["ray"] = None
try:
    marl_parallel.vector.RLlibVectorMultiAgentEnv
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 'pip install "marl-parallel[rllib]"' in said.stdout, said.stderr


# -- the runner --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runner_of():
    """Makes a runner of a config, and stops it after the test."""
    made = []

    def make(config: Any, kind: type = ParallelMultiAgentEnvRunner, **keywords: Any) -> Any:
        made.append(kind(config=config, **keywords))
        return made[-1]

    yield make
    for runner in made:
        runner.stop()


def one_more_each(runner: Any) -> list[int]:
    """The seeds that RLlib's own runner uses."""
    return [runner._seed + env_id for env_id in range(runner.config.num_envs_per_env_runner)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Fading, {"num_workers": 2}),
        (Reborn, {"backend": "serial"}),
        (Spread, {"backend": "serial"}),
    ],
    ids=["fading", "reborn", "spread"],
)
def test_the_episodes_of_rllibs_own_runner(make, options, runner_of, monkeypatch):
    """Seeded alike, both runners give the same episodes to the bit; only what RLlib loses is there in addition."""
    monkeypatch.setattr(ParallelMultiAgentEnvRunner, "_env_seeds", one_more_each)
    config = config_for(make, parallel_env=options)
    stories = []
    for kind in (MultiAgentEnvRunner, ParallelMultiAgentEnvRunner):
        runner = runner_of(config, kind)
        sampled = [runner.sample(num_timesteps=steps, explore=False) for steps in (30, 50)]
        sampled.append(runner.sample(num_episodes=3, explore=False))
        stories.append([story(episode) for episodes in sampled for episode in episodes])
    theirs, ours = stories
    assert len(theirs) > 12
    for told in ours:
        for info in (info for agent in told.values() if isinstance(agent, dict) for info in agent["infos"]):
            assert (make is Fading and info.get("time", 0) % 3 == 0 and "time" in info) is ("__common__" in info)
            info.pop("__common__", None)
    assert_same(ours, theirs)


def test_the_dead_that_are_mentioned(runner_of):
    """RLlib's own runner raises; with what is left out, all episodes end as they should."""
    config = at_random(config_for(Haunted), "xyz")
    with pytest.raises(Exception, match=r"already had its `SingleAgentEpisode.is_done`"):
        runner_of(config, MultiAgentEnvRunner).sample(num_episodes=4)
    for episode in runner_of(config).sample(num_episodes=8):
        lengths = {agent: len(one) for agent, one in episode.agent_episodes.items()}
        assert lengths["x"] <= 4 < lengths["z"] == 9
        assert all(one.is_done for one in episode.agent_episodes.values())
        assert episode.agent_episodes["z"].get_infos(3)["__common__"].keys() == {"total"}
        assert episode.agent_episodes["y"].get_observations(0).keys() == {"at", "kind"}


@pytest.mark.parametrize("random_actions", [True, False])
def test_turns(random_actions, runner_of):
    """PettingZoo's turn-based games as they are: only the one whose turn it is observes, and so acts."""
    config = at_random(config_for(lambda context: tictactoe_v3.env()), ["player_1", "player_2"])
    for episode in runner_of(config).sample(num_episodes=12, random_actions=random_actions):
        one, two = (len(episode.agent_episodes.get(agent, ())) for agent in ("player_1", "player_2"))
        assert one + two == len(episode)
        assert one - two in (0, 1)


@pytest.mark.parametrize("make", [Fading, Haunted, Duel])
def test_restarts_in_episodes(make, runner_of):
    """Cut off with a last observation of everyone, the mark in each info, and the others' episodes are not touched."""

    def mortal_one(context: Any) -> Any:
        env = make(context)
        well = env.step

        def step(actions: dict) -> Any:
            if context.vector_index == 1 and env.time == 3:
                raise ValueError("bad terrain")
            return well(actions)

        env.step = step
        return env

    config = at_random(
        config_for(mortal_one, parallel_env={"backend": "serial", "on_error": "restart", "restart_policy": OFTEN}),
        "xyz" if make is not Duel else "xy",
    )
    runner = runner_of(config)
    episodes = [e for e in runner.sample(num_timesteps=4 * 30) if e.is_done]
    cut_off = [episode for episode in episodes if episode.is_truncated]
    assert len(cut_off) >= 5
    assert {len(episode) for episode in cut_off} == {4}
    assert {len(episode) for episode in episodes if not episode.is_truncated} == {9}
    assert len(episodes) - len(cut_off) == 9
    for episode in cut_off:
        interrupted = [one for one in episode.agent_episodes.values() if "__common__" in one.get_infos(-1)]
        assert any(one.is_truncated and one.get_rewards(-1) == 0.0 for one in interrupted)
        marks = [one.get_infos(-1)["__common__"] for one in interrupted if one.is_truncated]
        assert all("bad terrain" in mark["error"] for mark in marks if mark.get("restarted"))
        assert any(mark.get("restarted") for mark in marks)
        assert all(one.is_done for one in episode.agent_episodes.values())
    assert runner.env.env.stats().restarts >= len(cut_off)


def test_seeds(runner_of):
    runner = runner_of(config_for(Fading), worker_index=1)

    def seeds(seed: int | None = 5, worker_index: int = 1, in_evaluation: bool = False) -> list[int]:
        runner.worker_index, runner.config.seed, runner.config.in_evaluation = worker_index, seed, in_evaluation
        runner.make_env()
        runner.sample(num_timesteps=80)
        given = runner.env.get_attr("seeds")
        # The first is that of RLlib's check; later episodes go on with the same generator.
        assert all(own[0] == 42 and own[2:] == [None] * (len(own) - 2) and len(own) > 3 for own in given)
        return [own[1] for own in given]

    expected = [int(np.random.SeedSequence((5, 1, env_id)).generate_state(1)[0] >> 1) for env_id in range(4)]
    assert seeds() == seeds() == expected
    others = [seeds(worker_index=2), seeds(worker_index=0), seeds(seed=6), seeds(in_evaluation=True), seeds(seed=None)]
    assert len({*expected, *(seed for other in others for seed in other)}) == 24


def test_make_env(runner_of):
    """It closes the old one, sets what RLlib looks at and tells the callback; the options are for ParallelEnv alone."""
    created = []
    config = config_for(Fading, level=3).callbacks(on_environment_created=lambda **given: created.append(given))
    runner = runner_of(config, worker_index=7)
    first = runner.env
    runner.sample(num_timesteps=8)
    assert runner._needs_initial_reset is False
    runner.config.env_runners(num_envs_per_env_runner=2)
    runner.make_env()
    assert first.closed
    assert first is not runner.env
    assert (runner.num_envs, runner.env.num_envs, runner._needs_initial_reset) == (2, 2, True)
    assert runner.env.get_attr("config") == ({"level": 3}, {"level": 3})
    assert runner.env.get_attr("context") == ((7, 0), (7, 1))
    assert [given["env"] for given in created] == [first, runner.env]
    assert created[1]["env_runner"] is runner
    assert isinstance(created[1]["env_context"], EnvContext)
    assert runner.sample(num_episodes=2)
    assert runner.config.env_config.keys() == {"level", "parallel_env"}


def test_options(runner_of):
    for name in ("auto_reset", "seed", "copy"):
        with pytest.raises(ValueError, match=rf"env_config\['parallel_env'\] may not have {name}"):
            ParallelMultiAgentEnvRunner(config=config_for(Fading, parallel_env={name: False}))
    with pytest.raises(TypeError, match="workers"):
        ParallelMultiAgentEnvRunner(config=config_for(Fading, parallel_env={"workers": 3}))
    runner = runner_of(config_for(Fading, parallel_env={"backend": "thread", "num_workers": 1}))
    assert runner.env.env.num_workers == 1


@pytest.mark.parametrize("cpus", [1, 8])
def test_workers_by_default(cpus, runner_of, monkeypatch):
    """All CPUs for a local runner; remote ones share them, or use what was reserved."""
    monkeypatch.setattr("marl_parallel.vector.rllib.usable_cpus", lambda: cpus)
    config = config_for(Fading, num_envs=6)
    runner = runner_of(config)
    numbers = []
    for index, runners, reserved in [(0, 0, 1), (1, 2, 1), (2, 20, 1), (1, 20, 3), (1, 1, 1), (1, 20, 0.5)]:
        runner.worker_index = index
        runner.config.env_runners(num_env_runners=runners, num_cpus_per_env_runner=reserved)
        numbers.append(runner._num_workers())
    assert numbers == ([1, 1, 1, 3, 1, 1] if cpus == 1 else [6, 4, 1, 3, 6, 1])


def test_however_the_environment_is_named(runner_of):
    register_env("marl_parallel-fading", Fading)
    for name, make in (("Fading", Fading), ("Wrapped", lambda config: rllib.Wrapped(Fading(config)))):
        entry_point = functools.partial(lambda make, **config: make(config), make)
        gymnasium.register(f"marl_parallel/{name}-v0", entry_point=entry_point, disable_env_checker=True)
    serial, process = {"backend": "serial"}, {"num_workers": 1}
    named = [("marl_parallel-fading", serial), (Fading, serial), (lambda context: Fading(context), serial)]
    named += [("marl_parallel/Wrapped-v0", serial), ("marl_parallel/Fading-v0", process)]
    told = []
    for env, options in named:
        runner = runner_of(config_for(env, num_envs=2, parallel_env=options, level=4))
        assert runner.env.get_attr("config") == ({"level": 4},) * 2
        told.append([story(episode) for episode in runner.sample(num_timesteps=30, explore=False)])
    for other in told[1:]:
        assert_same(other, told[0])
    with pytest.raises(RLlibEnvError, match="nobody-v0"):
        ParallelMultiAgentEnvRunner(config=config_for("nobody-v0"))
    with pytest.raises(ValueError, match=r"config\.env is not set"):
        ParallelMultiAgentEnvRunner(config=config_for(None))


def test_rllibs_check_of_each_environment(runner_of):
    with pytest.raises(EnvError, match="rewards that are integer or float"):
        ParallelMultiAgentEnvRunner(config=config_for(Silent))
    runner = runner_of(config_for(Silent).environment(disable_env_checking=True))
    assert runner.env.get_attr("seeds") == ([], [], [], [])


@pytest.mark.parametrize("again", [True, False])
def test_faults_that_are_raised(again, runner_of, tmp_path):
    """RLlib makes all environments anew where its config says so, and raises where it does not."""
    flag = tmp_path / "broken"

    def once(context: Any) -> Any:
        env = Fading(context)
        well = env.step

        def step(actions: dict) -> Any:
            if env.time == 4 and context.vector_index == 2 and not flag.exists():
                flag.touch()
                raise ValueError("bad terrain")
            return well(actions)

        env.step = step
        return env

    config = config_for(once).fault_tolerance(restart_failed_sub_environments=again)
    runner = runner_of(config)
    first = runner.env
    if again:
        assert len(runner.sample(num_episodes=4)) == 4
        assert first.closed
        assert runner.env is not first
    else:
        with pytest.raises(RuntimeError) as raised:
            runner.sample(num_episodes=4)
        assert EnvError in {type(raised.value), type(raised.value.__cause__)}  # older releases do not wrap it
    with pytest.raises(ClosedEnvironmentError):
        first.step([{}] * 4)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.mark.parametrize("remote", [0, 1])
def test_ppo(remote, cluster):
    """Unchanged but for `env_runner_cls`; environments are in processes of their own, and go with the algorithm."""
    config = (
        config_for(Fading, num_envs=8, parallel_env={"num_workers": 2})
        .env_runners(num_env_runners=remote)
        .training(train_batch_size_per_learner=160, minibatch_size=80, num_epochs=1)
    )
    algorithm = config.build_algo()
    sampled = algorithm.train()["env_runners"]
    assert sampled["num_env_steps_sampled"] >= 160
    assert sampled["episode_len_max"] == 9
    (told,) = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: (os.getpid(), type(runner).__name__, runner.env.call("pid")), local_env_runner=not remote
    )
    runner_pid, name, pids = told
    assert name == "ParallelMultiAgentEnvRunner"
    assert (runner_pid == os.getpid()) is not bool(remote)
    assert len(pids) == 8
    assert len({*pids}) == 2
    workers = [psutil.Process(pid) for pid in {*pids}]
    assert runner_pid not in pids
    algorithm.stop()
    assert not psutil.wait_procs(workers, timeout=20)[1]


def test_the_example():
    said = subprocess.run(
        [sys.executable, "examples/rllib_ppo.py", "--smoke"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "return" in said.stdout, said.stderr
