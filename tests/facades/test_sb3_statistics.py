"""Statistics of `SB3VecEnv` where agents die: returns, normalisers, evaluation, and rows that are left out."""

from __future__ import annotations

import copy
import csv
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.episodes import ENVS, SEED, PlainLoop, ended
from sb3_contrib import MaskablePPO
from simulators.dying_agents import (
    DyingAgents,
    Interrupted,
    LastStepWithoutZ,
    ReportsTheDead,
    TwoAgents,
    TwoMaskedAgents,
)
from simulators.returning_agents import ReturningAgents
from simulators.scored import Scored
from simulators.vector_rewards import Couriers
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from marl_parallel import EnvError, ParallelEnv, vector
from marl_parallel.vector import SB3RolloutBuffer, SB3VecEnv, SB3VecNormalize, evaluate_policy

pytestmark = pytest.mark.needs("stable_baselines3", "sb3_contrib")

IN_DICTS = functools.partial(TwoMaskedAgents, in_dicts=True)
TRAINED: dict[str, tuple[Any, Any, str]] = {
    "arrays": (PPO, TwoAgents, "MlpPolicy"),
    "dicts": (PPO, IN_DICTS, "MultiInputPolicy"),
    "masks": (MaskablePPO, TwoMaskedAgents, "MlpPolicy"),
    "masks and dicts": (MaskablePPO, IN_DICTS, "MultiInputPolicy"),
    "A2C": (A2C, IN_DICTS, "MultiInputPolicy"),
}


def opened(make: Any = TwoAgents, **keywords: Any) -> SB3VecEnv:
    return SB3VecEnv(ParallelEnv([make] * 2, num_workers=2, **keywords))


def zeros(env: Any) -> np.ndarray:
    return np.zeros(env.num_envs, np.int64)


@pytest.mark.parametrize("monitored", [False, True])
def test_mean_return_of_training(monitored):
    """Stable-Baselines3's own monitor takes the second end of a dead agent's row for an episode: 8.33."""
    env: Any = opened()
    if monitored:
        env = VecMonitor(env)
    model = PPO("MlpPolicy", env, n_steps=40, batch_size=20, n_epochs=1, device="cpu").learn(160)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    assert sorted(returns) == [5.0] * 4 + [20.0] * 4
    assert np.mean(returns) == 12.5
    assert [episode["l"] for episode in model.ep_info_buffer] == returns
    env.close()


def test_a_reset_begins_new_sums():
    env = opened()
    for steps in (3, 20):
        env.reset()
        for _ in range(steps):
            infos = env.step(zeros(env))[3]
    assert [info["episode"]["r"] for info in infos if "episode" in info] == [20.0, 20.0]
    env.close()


def test_finished_episodes():
    """Through wrappers, in halves of steps, and from a reset on."""
    parallel = ParallelEnv([DyingAgents] * ENVS, seed=SEED, num_workers=2, episode_stats=True)
    env: Any = VecMonitor(SB3VecEnv(parallel))
    loops = [PlainLoop(env_id, "SAME_STEP") for env_id in range(ENVS)]
    env.reset()
    for number in range(40):
        if number == 14:
            env.reset()
            for loop in loops:
                loop.reset()
            assert env.unwrapped.parallel_env.finished_episodes == ()
        if number % 2:
            infos = env.step(zeros(env) + 1)[3]
        else:
            env.step_async(zeros(env) + 1)
            infos = env.step_wait()[3]
        parts, episodes = ended(loops)
        assert [*env.unwrapped.parallel_env.finished_episodes] == episodes
        for row, info in enumerate(infos):
            part = parts[row // 3].get(env.agents[row % 3])
            assert part == ({key: info["episode"][key] for key in "rl"} if "episode" in info else None)
            assert part is None or info["episode"]["t"] > 0
    env.close()


def test_scalarized_returns():
    """`episode_stats` adds the sums of vectors; those of the facade are of the numbers that are trained on."""
    parallel = ParallelEnv([Couriers] * 2, seed=SEED, backend="serial", episode_stats=True)
    env = SB3VecEnv(parallel, scalarize=[1.0, 0.5])
    env.reset()
    totals, ends = np.zeros(env.num_envs), 0
    for _ in range(12):
        _, rewards, dones, infos = env.step(zeros(env))
        totals += rewards
        for row in np.flatnonzero(dones):
            assert ("episode" in infos[row]) == bool(totals[row])
            if "episode" in infos[row]:
                assert infos[row]["episode"]["r"] == pytest.approx(totals[row])
                ends += 1
        totals[dones] = 0.0
    assert ends > 6
    env.close()


@pytest.mark.parametrize(("kind", "mean"), [(SB3VecNormalize, 5.0), (VecNormalize, 3.15)])
def test_means_of_normalisers(kind, mean):
    """Each observation of a living agent is 5; from its death on, the row is zeros."""
    env = kind(opened(), clip_obs=1e9)
    env.obs_rms.count = 0.0
    env.reset()
    for _ in range(19):
        env.step(zeros(env))
    assert env.obs_rms.mean[0] == pytest.approx(mean, abs=0.03)
    env.close()


def test_a_normaliser_is_one_of_stable_baselines3(tmp_path):
    env = SB3VecNormalize(opened())
    plain = VecNormalize(opened())
    env.reset()
    plain.reset()
    for _ in range(4):  # all agents are alive
        for actual, expected in zip(env.step(zeros(env))[:3], plain.step(zeros(env))[:3]):
            assert np.array_equal(actual, expected)
    for _ in range(30):
        env.step(zeros(env))
    returns = env.ret_rms.mean
    env.save(tmp_path / "statistics.pkl")
    env.close()
    plain.close()
    again = SB3VecNormalize.load(tmp_path / "statistics.pkl", opened())
    assert isinstance(again, SB3VecNormalize)
    assert again.ret_rms.mean == returns
    again.training = False
    again.reset()
    again.step(zeros(again))
    assert again.ret_rms.mean == returns
    again.close()


@pytest.mark.parametrize("name", ["SB3VecNormalize", "SB3RolloutBuffer", "SB3VecEnv", "evaluate_policy", "_NotSaved"])
def test_names_in_saved_files_stay(name):
    """Files of models and statistics name classes by the module in which they were defined when they were saved."""
    found = pickle.loads(f"cmarl_parallel.vector.sb3\n{name}\n.".encode())
    assert pickle.loads(pickle.dumps(found)) is found
    assert found is getattr(vector, name, found)


def test_rewards_of_absent_agents_do_not_count():
    env = SB3VecNormalize(opened(), gamma=0.0)
    env.ret_rms.count = 0.0
    env.reset()
    for _ in range(20):
        env.step(zeros(env))
    assert env.ret_rms.mean == pytest.approx(1.0)
    assert env.ret_rms.count == 2 * (20 + 5)
    env.close()


def test_evaluation_counts_the_episodes_of_agents():
    env = opened()
    model = PPO("MlpPolicy", env, device="cpu")
    returns, lengths = evaluate_policy(model, env, 5, return_episode_rewards=True)
    assert sorted(returns) == [5.0] * 5 + [20.0] * 5
    assert returns == lengths
    assert evaluate_policy(model, VecMonitor(env), 2) == (12.5, 7.5)
    steps = []
    evaluate_policy(model, env, 2, callback=lambda names, _: steps.append(names["dones"]))
    assert len(steps) == 20
    with pytest.raises(AssertionError, match=r"mean return 12\.50 is not above reward_threshold=13\.00"):
        evaluate_policy(model, env, 2, reward_threshold=13.0)
    env.close()


def learner(case: str, env: Any, acting_in: Any) -> Any:
    algorithm, _, policy = TRAINED[case]
    batches: dict[str, Any] = {} if algorithm is A2C else {"batch_size": 16, "n_epochs": 2}
    return algorithm(
        policy, env, n_steps=40, device="cpu",
        rollout_buffer_class=SB3RolloutBuffer, rollout_buffer_kwargs={"acting_in": acting_in}, **batches,
    )  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_training_without_the_rows_of_absent_agents(case):
    algorithm, make, _ = TRAINED[case]
    env = opened(make)
    model = learner(case, env, env)
    seen = []
    samples = model.rollout_buffer._get_samples

    def recorded(rows: Any, *arguments: Any) -> Any:
        batch = samples(rows, *arguments)
        seen.append(batch)
        return batch

    model.rollout_buffer._get_samples = recorded
    model.learn(160)
    seen = [batch for batch in seen if len(batch.actions) > 1]
    trained = np.concatenate([batch.observations["at"] if make is IN_DICTS else batch.observations for batch in seen])
    assert (trained == 5).all()  # no row of zeros
    assert len(trained) == (1 if algorithm is A2C else 2) * 2 * 2 * (20 + 5)  # epochs, episodes, environments
    if algorithm is MaskablePPO:
        assert all((batch.action_masks.numpy() == [1, 0]).all() for batch in seen)
        assert all((batch.actions.numpy() == 0).all() for batch in seen)
    env.close()


def test_evaluation_with_action_masks():
    """The policy without masks takes actions that are not allowed."""
    env = opened(functools.partial(TwoMaskedAgents, strict=True))
    model = MaskablePPO("MlpPolicy", env, device="cpu", seed=0)
    assert evaluate_policy(model, env, 4, deterministic=False) == (12.5, 7.5)
    with pytest.raises(EnvError, match="action 1 is not allowed"):
        evaluate_policy(model, env, 4, deterministic=False, use_masking=False)


# -- saved models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("case", TRAINED)
def test_models_with_a_rollout_buffer_can_be_saved_and_loaded(case, normalised, tmp_path):
    algorithm, make, _ = TRAINED[case]
    env: Any = opened(make)
    if normalised:
        env = SB3VecNormalize(env, norm_obs_keys=["at"] if make is IN_DICTS else None)
    model = learner(case, env, env).learn(160)
    model.save(tmp_path / "model")
    observations = env.reset()
    actions = model.predict(observations, deterministic=True)[0]
    assert np.array_equal(algorithm.load(tmp_path / "model").predict(observations, deterministic=True)[0], actions)
    with pytest.raises(ValueError, match=r'pass rollout_buffer_kwargs=\{"acting_in": env\} to load'):
        algorithm.load(tmp_path / "model", env).learn(160)
    again = algorithm.load(tmp_path / "model", env, rollout_buffer_kwargs={"acting_in": env})
    assert again.learn(160, reset_num_timesteps=False).num_timesteps == 320
    env.close()


def test_another_environment_for_a_model():
    first, second = opened(seed=1), opened(seed=2)
    model = learner("arrays", first, first).learn(160)
    model.set_env(second)
    with pytest.raises(ValueError, match=r"does not step the acting_in .* set model\.rollout_buffer\.acting_in = env"):
        model.learn(160)
    model.rollout_buffer.acting_in = second
    assert model.learn(160)
    assert model.rollout_buffer.acting_in is second
    assert (model.rollout_buffer._acted.sum(axis=0) == [40, 10] * 2).all()
    first.close()
    second.close()


def test_an_environment_that_the_model_does_not_step():
    """It was never reset, was reset, or is closed."""
    stepped, other = opened(seed=1), opened(seed=2)
    for prepare in (lambda: None, other.reset, other.close):
        prepare()
        with pytest.raises(ValueError, match="the model does not step the acting_in of its SB3RolloutBuffer: pass the"):
            learner("arrays", stepped, other).learn(160)
    stepped.close()


def test_a_wrapper_that_cannot_be_saved_is_a_warning(tmp_path):
    """The environment inside it can be saved."""
    env = opened()
    monitored = VecMonitor(env, str(tmp_path / "monitor.csv"))
    keywords: Any = {"n_steps": 8, "batch_size": 8, "device": "cpu", "rollout_buffer_class": SB3RolloutBuffer}
    with pytest.warns(UserWarning, match="whose acting_in is a VecMonitor: pass the SB3VecEnv inside it"):
        PPO("MlpPolicy", monitored, rollout_buffer_kwargs={"acting_in": monitored}, **keywords)
    PPO("MlpPolicy", monitored, rollout_buffer_kwargs={"acting_in": env}, **keywords).save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", monitored, rollout_buffer_kwargs={"acting_in": env}).learn(32)
    monitored.close()


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy])
def test_an_environment_cannot_be_copied(function):
    env = opened()
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        function(env)
    env.close()


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (SB3VecNormalize, "SB3VecNormalize takes as venv an SB3VecEnv, .* got ParallelEnv: make it with make"),
        (lambda env: evaluate_policy(None, env), "evaluate_policy takes as env an SB3VecEnv, .* got ParallelEnv: "),
        (
            lambda env: SB3RolloutBuffer(8, spaces.Box(0, 1), spaces.Discrete(2), acting_in=env),
            "SB3RolloutBuffer takes as acting_in an SB3VecEnv, .* got ParallelEnv: make it with make",
        ),
    ],
)
def test_wrong_arguments(function, message):
    with ParallelEnv([TwoAgents], backend="serial") as env, pytest.raises(TypeError, match=message):
        function(env)


def test_no_environment_of_a_buffer():
    with pytest.raises(TypeError, match=r'needs the environment: pass rollout_buffer_kwargs=\{"acting_in": env\}'):
        SB3RolloutBuffer(8, spaces.Box(0, 1), spaces.Discrete(2))


def test_an_environment_of_another_size():
    env, smaller = opened(seed=1), SB3VecEnv(ParallelEnv([TwoAgents], backend="serial", seed=2))
    with pytest.raises(ValueError, match="that the model steps, with 4 rows; got one with 2"):
        learner("arrays", env, smaller)
    env.close()
    smaller.close()


@pytest.mark.parametrize("episode_stats", [False, True])
def test_info_keywords_of_one_agent(episode_stats, tmp_path):
    """As around Stable-Baselines3's own `DummyVecEnv`: `episode` and the rows of the file have them."""
    keywords = {"info_keywords": ("score", "won")}
    ours = VecMonitor(opened(Scored, episode_stats=episode_stats), str(tmp_path / "ours.monitor.csv"), **keywords)
    theirs = VecMonitor(DummyVecEnv([Scored] * 2), str(tmp_path / "theirs.monitor.csv"), **keywords)
    ours.reset(), theirs.reset()
    ends = 0
    for time in range(12):
        infos, expected = (env.step(np.array([time % 3, 1]))[3] for env in (ours, theirs))
        for info, other in zip(infos, expected, strict=True):
            assert ("episode" in info) == ("episode" in other)
            if "episode" in info:
                ends += 1
                assert {**info["episode"], "t": 0} == {**other["episode"], "t": 0}
    assert ends == 2 * 3
    ours.close(), theirs.close()
    files = [rows_of(tmp_path / f"{name}.monitor.csv") for name in ("ours", "theirs")]
    assert files[0] == files[1]
    assert len(files[0]) == 2 * 3


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a monitor's file without their times."""
    with path.open() as file:
        next(file)  # the comment
        return [{name: text for name, text in row.items() if name != "t"} for row in csv.DictReader(file)]


@pytest.mark.parametrize("episode_stats", [False, True])
def test_info_keywords_where_agents_die(episode_stats):
    """Each agent's own end has the values of its own info; the second end of a dead agent's row has no `episode`."""
    env = VecMonitor(opened(DyingAgents, episode_stats=episode_stats), info_keywords=("time",))
    env.reset()
    ends = seconds = 0
    for _ in range(20):
        _, _, dones, infos = env.step(zeros(env))
        for info in np.array(infos)[dones]:
            if "episode" in info:
                assert info["episode"]["time"] == info["time"] == info["episode"]["l"]
                ends += 1
            else:
                seconds += 1
    assert (ends, seconds) == (2 * 3 * 2, 2 * 2 * 2)
    env.close()


def test_info_keyword_that_an_agents_own_end_does_not_have():
    """As Stable-Baselines3's `Monitor` and `VecMonitor`: a `KeyError` with the name."""
    env = VecMonitor(opened(DyingAgents), info_keywords=("colour",))
    env.reset()
    with pytest.raises(KeyError, match="colour"):  # noqa: PT012
        for _ in range(9):
            env.step(zeros(env))
    env.close()


@pytest.mark.parametrize("make", [Interrupted, ReportsTheDead, LastStepWithoutZ])
@pytest.mark.parametrize("episode_stats", [False, True])
def test_info_keywords_are_blank_where_the_simulator_returned_nothing(make, episode_stats, tmp_path):
    """Training goes on: `info_keywords` are None in such rows, and empty in the file; in others they are values."""
    path = tmp_path / "of.monitor.csv"
    env = VecMonitor(opened(make, episode_stats=episode_stats, on_error="restart"), str(path), info_keywords=("time",))
    env.reset()
    has_value = []
    for _ in range(16):
        _, _, dones, infos = env.step(zeros(env))
        for info in np.array(infos)[dones]:
            has_value.append("time" in info)
            if "episode" in info and has_value[-1]:
                assert info["episode"]["time"] == info["time"]
            elif "episode" in info:
                assert info["episode"].get("time") is None
    env.close()
    assert {*has_value} == {False, True}
    assert [row["time"] != "" for row in rows_of(path)] == has_value


class AlwaysZero:
    """A model."""

    def predict(self, observations: Any, **_: Any) -> tuple[Any, None]:
        return np.zeros(len(observations), np.int64), None


def test_evaluation_counts_episodes_in_which_everybody_dies_and_comes_back():
    """An episode of 10 steps has three lives of each agent; between them, nobody is alive."""
    make = functools.partial(ReturningAgents, none_left=True)
    env = SB3VecEnv(ParallelEnv([make] * 2, seed=3, backend="serial"))
    _, lengths = evaluate_policy(AlwaysZero(), env, 4, return_episode_rewards=True)
    assert len(lengths) == 4 * 3 * 3
    env.close()
