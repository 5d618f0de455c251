"""RLlib's env runner on the facade: episodes and training. Its environments are in `rllib_envs`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import ray
from gymnasium.error import ClosedEnvironmentError
from helpers import ROOT
from helpers.comparison import assert_same
from helpers.restart_comparison import OFTEN
from pettingzoo.classic import tictactoe_v3
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils.error import EnvError as RLlibEnvError
from ray.tune import register_env
from simulators import rllib_envs
from simulators.dying_agents import TwoAgents
from simulators.rllib_envs import (
    Duel,
    DyingRLlibAgents,
    Reborn,
    Relay,
    ReturningRLlibAgents,
    RewardsAreTexts,
    Spread,
    config_for,
    episode_contents,
    with_random_policies,
)

from marl_parallel import EnvError
from marl_parallel.vector import ParallelMultiAgentEnvRunner

pytestmark = pytest.mark.needs("ray", "tree", "torch")


@pytest.fixture
def runner_of():
    """Makes a runner of a config and stops it after the test."""
    made = []

    def make(config: Any, kind: type = ParallelMultiAgentEnvRunner, **keywords: Any) -> Any:
        made.append(kind(config=config, **keywords))
        return made[-1]

    yield make
    for runner in made:
        runner.stop()


def incremented_seeds(runner: Any) -> list[int]:
    """The seeds that RLlib's own runner uses."""
    return [runner._seed + env_id for env_id in range(runner.config.num_envs_per_env_runner)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DyingRLlibAgents, {"num_workers": 2}),
        (Reborn, {"backend": "serial"}),
        (Spread, {"backend": "serial"}),
    ],
    ids=["fading", "reborn", "spread"],
)
def test_episodes_equal_rllibs_own_runner(make, options, runner_of, monkeypatch):
    """With the same seeds, to the bit; additionally only what RLlib loses."""
    monkeypatch.setattr(ParallelMultiAgentEnvRunner, "_env_seeds", incremented_seeds)
    config = config_for(make, parallel_env=options)
    stories = []
    for kind in (MultiAgentEnvRunner, ParallelMultiAgentEnvRunner):
        runner = runner_of(config, kind)
        sampled = [runner.sample(num_timesteps=steps, explore=False) for steps in (30, 50)]
        sampled.append(runner.sample(num_episodes=3, explore=False))
        stories.append([episode_contents(episode) for episodes in sampled for episode in episodes])
    theirs, ours = stories
    assert len(theirs) > 12
    for results in ours:
        for info in (info for agent in results.values() if isinstance(agent, dict) for info in agent["infos"]):
            assert (make is DyingRLlibAgents and info.get("time", 0) % 3 == 0 and "time" in info) is (
                "__common__" in info
            )
            info.pop("__common__", None)
    assert_same(ours, theirs)


def test_dead_agents_in_results(runner_of):
    """RLlib's own runner raises; without their entries, all episodes end correctly."""
    config = with_random_policies(config_for(ReturningRLlibAgents), "xyz")
    with pytest.raises(Exception, match=r"already had its `SingleAgentEpisode.is_done`"):
        runner_of(config, MultiAgentEnvRunner).sample(num_episodes=4)
    for episode in runner_of(config).sample(num_episodes=8):
        lengths = {agent: len(one) for agent, one in episode.agent_episodes.items()}
        assert lengths["x"] <= 4 < lengths["z"] == 9
        assert all(one.is_done for one in episode.agent_episodes.values())
        assert episode.agent_episodes["z"].get_infos(3)["__common__"].keys() == {"total"}
        assert episode.agent_episodes["y"].get_observations(0).keys() == {"at", "kind"}


@pytest.mark.parametrize("episode_stats", [False, True])
def test_returns_where_agents_die(episode_stats, runner_of):
    """RLlib counts by itself, from the rewards of each agent until its death."""
    options = {"backend": "serial", "episode_stats": episode_stats}
    config = config_for(lambda context: TwoAgents(), num_envs=2, parallel_env=options)
    runner = runner_of(with_random_policies(config, ["long", "short"]))
    runner.sample(num_episodes=4)
    metrics = runner.get_metrics()
    assert metrics["agent_episode_returns_mean"].keys() == {"long", "short"}
    means = {name: value.peek() for name, value in metrics["agent_episode_returns_mean"].items()}
    assert means == {"long": 20.0, "short": 5.0}
    assert metrics["episode_return_mean"].peek() == 25.0


@pytest.mark.parametrize("kind", [DyingRLlibAgents, ReturningRLlibAgents])
def test_finished_episodes(kind, runner_of):
    """Equal to those that RLlib has counted; with `episode_stats`, they are in the last info of each agent."""
    options = {"backend": "serial", "episode_stats": True}
    runner = runner_of(with_random_policies(config_for(kind, num_envs=2, parallel_env=options), "xyz"))
    finished, step = [], runner.env.step

    def noted(actions: Any) -> Any:
        results = step(actions)
        finished.extend(runner.env.parallel_env.finished_episodes)
        return results

    runner.env.step = noted
    episodes = [*runner.sample(num_episodes=6)]
    counted = [{a: one.get_return() for a, one in episode.agent_episodes.items()} for episode in episodes]
    last = [{a: one.get_infos(-1)["episode"] for a, one in episode.agent_episodes.items()} for episode in episodes]
    assert len(counted) == 6
    for returns, parts, episode in zip(counted, last, episodes):
        assert {agent: part["r"] for agent, part in parts.items()} == returns
        assert {agent: part["l"] for agent, part in parts.items()} == {
            agent: len(one) for agent, one in episode.agent_episodes.items()
        }
    if kind is DyingRLlibAgents:  # the others go on to be rewarded after their death
        assert all(returns in [one.returns for one in finished] for returns in counted)


@pytest.mark.parametrize("random_actions", [True, False])
def test_turn_based_games(random_actions, runner_of):
    """PettingZoo's turn-based games: only the agent whose turn it is observes and acts."""
    config = with_random_policies(config_for(lambda context: tictactoe_v3.env()), ["player_1", "player_2"])
    for episode in runner_of(config).sample(num_episodes=12, random_actions=random_actions):
        one, two = (len(episode.agent_episodes.get(agent, ())) for agent in ("player_1", "player_2"))
        assert one + two == len(episode)
        assert one - two in (0, 1)


def test_action_masks_are_in_observations(runner_of):
    """RLlib's modules read `obs["action_mask"]`: here, the free squares of the observed board."""
    config = with_random_policies(config_for(lambda context: tictactoe_v3.env()), ["player_1", "player_2"])
    for episode in runner_of(config).sample(num_episodes=6, random_actions=True):
        for one in episode.agent_episodes.values():
            seen = one.get_observations(slice(0, len(one)))  # with which the agent acted
            free = 9 - seen["observation"].sum(axis=(1, 2, 3))
            np.testing.assert_array_equal(seen["action_mask"].sum(axis=1), free)
            assert seen["action_mask"].shape == (len(one), 9)


def test_episode_end_after_all_agents_died(runner_of):
    """RLlib's next episode must not start with the last observations of the environment's episode."""
    options = {"backend": "serial", "on_error": "restart", "restart_policy": OFTEN}
    config = with_random_policies(config_for(Relay, num_envs=1, parallel_env=options), "xy")
    for episode in runner_of(config.environment(disable_env_checking=True)).sample(num_timesteps=12):
        assert [*episode.agent_episodes] in ([], ["x"])


@pytest.mark.parametrize("make", [DyingRLlibAgents, ReturningRLlibAgents, Duel])
def test_restarts_in_episodes(make, runner_of):
    """Truncated with a last observation of every agent and the mark in each info; other episodes are unaffected."""

    def crashing_one(context: Any) -> Any:
        env = make(context)
        well = env.step

        def step(actions: dict) -> Any:
            if context.vector_index == 1 and env.time == 3:
                raise ValueError("bad terrain")
            return well(actions)

        env.step = step
        return env

    config = with_random_policies(
        config_for(crashing_one, parallel_env={"backend": "serial", "on_error": "restart", "restart_policy": OFTEN}),
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
    runner = runner_of(config_for(DyingRLlibAgents), worker_index=1)

    def seeds(seed: int | None = 5, worker_index: int = 1, in_evaluation: bool = False) -> list[int]:
        runner.worker_index, runner.config.seed, runner.config.in_evaluation = worker_index, seed, in_evaluation
        runner.make_env()
        runner.sample(num_timesteps=80)
        arguments = runner.env.get_attr("seeds")
        # The first is that of RLlib's check; later episodes go on with the same generator.
        assert all(own[0] == 42 and own[2:] == [None] * (len(own) - 2) and len(own) > 3 for own in arguments)
        return [own[1] for own in arguments]

    expected = [int(np.random.SeedSequence((5, 1, env_id)).generate_state(1)[0] >> 1) for env_id in range(4)]
    assert seeds() == seeds() == expected
    others = [seeds(worker_index=2), seeds(worker_index=0), seeds(seed=6), seeds(in_evaluation=True), seeds(seed=None)]
    assert len({*expected, *(seed for other in others for seed in other)}) == 24


def test_make_env(runner_of):
    """Closes the old environment, sets RLlib's attributes and calls the callback; options are for ParallelEnv only."""
    created = []
    config = config_for(DyingRLlibAgents, level=3).callbacks(
        on_environment_created=lambda **arguments: created.append(arguments)
    )
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
    assert [arguments["env"] for arguments in created] == [first, runner.env]
    assert created[1]["env_runner"] is runner
    assert isinstance(created[1]["env_context"], EnvContext)
    assert runner.sample(num_episodes=2)
    assert runner.config.env_config.keys() == {"level", "parallel_env"}


def test_options(runner_of):
    for name in ("auto_reset", "seed", "copy"):
        with pytest.raises(ValueError, match=rf"env_config\['parallel_env'\] may not have {name}"):
            ParallelMultiAgentEnvRunner(config=config_for(DyingRLlibAgents, parallel_env={name: False}))
    for name, message in (
        ("min_envs", "ParallelEnv does not know: min_envs"),
        ("on_eror", "ParallelEnv does not know: on_eror; did you mean on_error"),
        ("xyz", "ParallelEnv does not know: xyz; it takes .*num_workers, on_error.*scalarize"),
    ):
        with pytest.raises(TypeError, match=rf"env_config\['parallel_env'\] has arguments that {message}"):
            ParallelMultiAgentEnvRunner(config=config_for(DyingRLlibAgents, parallel_env={name: 3}))
    runner = runner_of(config_for(DyingRLlibAgents, parallel_env={"backend": "thread", "num_workers": 1}))
    assert runner.env.env.num_workers == 1


@pytest.mark.parametrize("cpus", [1, 8])
def test_default_number_of_workers(cpus, runner_of, monkeypatch):
    """All CPUs for a local runner; remote runners share them, or use their reservation."""
    monkeypatch.setattr("marl_parallel.vector.rllib.usable_cpus", lambda: cpus)
    config = config_for(DyingRLlibAgents, num_envs=6)
    runner = runner_of(config)
    numbers = []
    for index, runners, reserved in [(0, 0, 1), (1, 2, 1), (2, 20, 1), (1, 20, 3), (1, 1, 1), (1, 20, 0.5)]:
        runner.worker_index = index
        runner.config.env_runners(num_env_runners=runners, num_cpus_per_env_runner=reserved)
        numbers.append(runner._num_workers())
    assert numbers == ([1, 1, 1, 3, 1, 1] if cpus == 1 else [6, 4, 1, 3, 6, 1])


def test_forms_of_environment_names(runner_of):
    register_env("marl_parallel-fading", DyingRLlibAgents)
    for name, make in (
        ("Fading", DyingRLlibAgents),
        ("Wrapped", lambda config: rllib_envs.Wrapped(DyingRLlibAgents(config))),
    ):
        entry_point = functools.partial(lambda make, **config: make(config), make)
        gymnasium.register(f"marl_parallel/{name}-v0", entry_point=entry_point, disable_env_checker=True)
    serial, process = {"backend": "serial"}, {"num_workers": 1}
    named = [
        ("marl_parallel-fading", serial),
        (DyingRLlibAgents, serial),
        (lambda context: DyingRLlibAgents(context), serial),
    ]
    named += [("marl_parallel/Wrapped-v0", serial), ("marl_parallel/Fading-v0", process)]
    results = []
    for env, options in named:
        runner = runner_of(config_for(env, num_envs=2, parallel_env=options, level=4))
        assert runner.env.get_attr("config") == ({"level": 4},) * 2
        results.append([episode_contents(episode) for episode in runner.sample(num_timesteps=30, explore=False)])
    for other in results[1:]:
        assert_same(other, results[0])
    with pytest.raises(RLlibEnvError, match="nobody-v0"):
        ParallelMultiAgentEnvRunner(config=config_for("nobody-v0"))
    with pytest.raises(ValueError, match=r"config\.env is not set"):
        ParallelMultiAgentEnvRunner(config=config_for(None))


def test_rllibs_environment_check(runner_of):
    with pytest.raises(EnvError, match="rewards that are integer or float"):
        ParallelMultiAgentEnvRunner(config=config_for(RewardsAreTexts))
    runner = runner_of(config_for(RewardsAreTexts).environment(disable_env_checking=True))
    assert runner.env.get_attr("seeds") == ([], [], [], [])


@pytest.mark.parametrize("again", [True, False])
def test_raised_faults(again, runner_of, tmp_path):
    """RLlib rebuilds all environments if its config says so, and raises otherwise."""
    flag = tmp_path / "broken"

    def once(context: Any) -> Any:
        env = DyingRLlibAgents(context)
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
        errors = raised.value, raised.value.__cause__  # older releases do not wrap it
        assert any(isinstance(error, EnvError) for error in errors)
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
    """Only `env_runner_cls` is set; worker processes end with the algorithm."""
    config = (
        config_for(DyingRLlibAgents, num_envs=8, parallel_env={"num_workers": 2})
        .env_runners(num_env_runners=remote)
        .training(train_batch_size_per_learner=160, minibatch_size=80, num_epochs=1)
    )
    algorithm = config.build_algo()
    sampled = algorithm.train()["env_runners"]
    assert sampled["num_env_steps_sampled"] >= 160
    assert sampled["episode_len_max"] == 9
    (results,) = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: (os.getpid(), type(runner).__name__, runner.env.call("pid")), local_env_runner=not remote
    )
    runner_pid, name, pids = results
    assert name == "ParallelMultiAgentEnvRunner"
    assert (runner_pid == os.getpid()) is not bool(remote)
    assert len(pids) == 8
    assert len({*pids}) == 2
    workers = [psutil.Process(pid) for pid in {*pids}]
    assert runner_pid not in pids
    algorithm.stop()
    assert not psutil.wait_procs(workers, timeout=20)[1]


def test_example():
    output = subprocess.run(
        [sys.executable, "examples/rllib_ppo.py", "--smoke"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "return" in output.stdout, output.stderr
