"""`finished_episodes` and `episode_stats` of facades equal those of plain loops."""

from __future__ import annotations

import functools
from inspect import getsource
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers.episodes import ENVS, SEED, PlainLoop, ended
from mpe2 import simple_spread_v3
from simulators.dying_agents import DyingAgents, TwoAgents
from simulators.vector_rewards import Couriers

from marl_parallel import ParallelEnv
from marl_parallel.vector import ArrayStepper, GymnasiumVectorEnv, PettingZooVecEnv, Stacked, StackedVecEnv

AGENTS = ("x", "y", "z")
SPREAD = functools.partial(simple_spread_v3.parallel_env, max_cycles=7)


class OwnFacade:
    """Steps an `ArrayStepper` with arrays."""

    def __init__(self, env: ParallelEnv) -> None:
        self.stepper = ArrayStepper(env, self)
        self.parallel_env, self.reset = self.stepper.parallel_env, self.stepper.reset
        self.step, self.step_async, self.step_wait = self.stepper.step, self.stepper.send, self.stepper.receive


ONES = np.ones((ENVS, 3), np.int64)
FACADES: dict[str, tuple[Any, Any]] = {
    "stepper": (OwnFacade, [Stacked(AGENTS, ONES)]),
    "pettingzoo": (PettingZooVecEnv, dict(zip(AGENTS, ONES.T))),
    "stacked": (StackedVecEnv, ONES),
    "gymnasium": (GymnasiumVectorEnv, ONES.ravel()),
}


def made(mode: str, **keywords: Any) -> ParallelEnv:
    return ParallelEnv([DyingAgents] * ENVS, mode, seed=SEED, num_workers=2, **keywords)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("name", FACADES)
def test_finished_episodes(name, mode):
    """With whole steps and halves of steps, and resets of some environments in between."""
    if (name, mode) == ("gymnasium", "DISABLED"):
        return
    facade, actions = FACADES[name]
    with made(mode) as parallel:
        env, loops = facade(parallel), [PlainLoop(env_id, mode) for env_id in range(ENVS)]
        env.reset()
        assert parallel.finished_episodes == ()
        for number in range(40):
            again = [env_id for env_id in range(ENVS) if mode == "DISABLED" and loops[env_id].over]
            again += [1] if number == 14 and 1 not in again else []
            if again and name == "gymnasium":
                env.reset(options={"reset_mask": np.repeat(np.isin(range(ENVS), again), 3)})
            elif again:
                env.reset(env_ids=again)
            for env_id in again:
                assert env.parallel_env.finished_episodes == ()
                loops[env_id].reset()
            if number % 2:
                env.step(actions)
            else:
                env.step_async(actions)
                env.step_wait()
            _, episodes = ended(loops)
            assert sorted(env.parallel_env.finished_episodes) == episodes


def test_finished_episodes_of_single_environments():
    with made("DISABLED") as parallel:
        env = PettingZooVecEnv(parallel)
        for env_id in (0, 2, 0):
            single, loop = env.single(env_id), PlainLoop(env_id, "DISABLED", seed=30 + env_id)
            single.reset(seed=30 + env_id)
            while single.agents:
                single.step(dict.fromkeys(single.agents, 1))
                _, episodes = ended([loop])
                assert [*parallel.finished_episodes] == episodes
            assert loop.over


def test_finished_episodes_of_steps_of_some_environments():
    with made("NEXT_STEP") as parallel:
        facade, loops = OwnFacade(parallel), [PlainLoop(env_id, "NEXT_STEP") for env_id in range(ENVS)]
        facade.reset()
        rng = np.random.default_rng(0)
        for _ in range(40):
            ids = sorted(rng.choice(ENVS, 2, replace=False).tolist())
            facade.step([Stacked(AGENTS, ONES)], ids)
            _, episodes = ended([loops[env_id] for env_id in ids])
            assert sorted(parallel.finished_episodes) == episodes


# -- statistics in infos -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_rows_of_gymnasium(mode):
    """As Gymnasium's own wrapper has them, but at an agent's own end only."""
    with made(mode, episode_stats=True) as parallel:
        env, loops = GymnasiumVectorEnv(parallel), [PlainLoop(env_id, mode) for env_id in range(ENVS)]
        env.reset()
        counts = []
        for _ in range(25):
            *_, infos = env.step(ONES.ravel())
            parts, episodes = ended(loops)
            expected = {3 * i + AGENTS.index(agent): part for i, of in enumerate(parts) for agent, part in of.items()}
            counts.append(len(expected))
            assert ("episode" in infos) == bool(expected)
            if not expected:
                continue
            episode, mask = infos["episode"], np.isin(range(3 * ENVS), [*expected])
            for key, values in (("r", episode["r"]), ("l", episode["l"])):
                assert values.tolist() == [expected[row][key] if row in expected else 0 for row in range(3 * ENVS)]
                assert episode[f"_{key}"].tolist() == infos["_episode"].tolist() == mask.tolist()
            assert (episode["r"].dtype, episode["l"].dtype) == (np.float64, np.int64)
            for one in episodes:
                total = {"r": sum(one[1].values()), "l": one[3]}
                common = infos["final_info" if mode == "SAME_STEP" else "__common__"]
                common = common["__common__"]["episode"] if mode == "SAME_STEP" else common["episode"]
                assert {key: common[key][3 * one[0]] for key in total} == total
        assert sum(counts) > 12


# In older releases, the wrapper counts as if every environment were of the mode NEXT_STEP.
KNOWN_MODES = [mode for mode in ("NEXT_STEP", "SAME_STEP") if mode in f"NEXT_STEP {getsource(RecordEpisodeStatistics)}"]


@pytest.mark.parametrize("mode", KNOWN_MODES)
def test_equal_to_the_wrapper_of_gymnasium(mode):
    """Where no agent dies before the others, all but the times are equal."""
    results = []
    for ours in (True, False):
        env = GymnasiumVectorEnv(ParallelEnv([SPREAD] * ENVS, mode, seed=SEED, episode_stats=ours, num_workers=2))
        wrapped = env if ours else RecordEpisodeStatistics(env)
        wrapped.reset()
        wrapped.action_space.seed(1)
        steps = []
        for _ in range(40):
            *_, infos = wrapped.step(wrapped.action_space.sample())
            own = [infos["_episode"], infos["episode"]["r"], infos["episode"]["l"]] if "episode" in infos else []
            steps.append(own)
        results.append(steps)
        env.close()
    assert any(results[0])
    for own, its in zip(*results):
        assert len(own) == len(its)
        for one, other in zip(own, its):
            np.testing.assert_allclose(one, other)
            assert one.dtype == other.dtype


def test_vector_rewards_of_gymnasium():
    with ParallelEnv([Couriers] * 2, "NEXT_STEP", seed=SEED, backend="serial", episode_stats=True) as parallel:
        env = GymnasiumVectorEnv(parallel, agents=parallel.possible_agents[:1])
        env.reset()
        totals = 0.0
        for _ in range(100):
            _, rewards, _, _, infos = env.step(np.zeros_like(env.action_space.sample()))
            totals = totals + rewards
            if "episode" in infos:
                break
        rows = infos["_episode"]
        np.testing.assert_allclose(infos["episode"]["r"][rows], totals[rows], atol=1e-5)
        assert infos["episode"]["r"].shape == rewards.shape


def test_columns_of_pettingzoo_and_dicts_of_stacked():
    for facade, actions in (FACADES["pettingzoo"], FACADES["stacked"]):
        with made("SAME_STEP", episode_stats=True) as parallel:
            env, loops = facade(parallel), [PlainLoop(env_id, "SAME_STEP") for env_id in range(ENVS)]
            env.reset()
            for _ in range(20):
                *_, infos = env.step(actions)
                parts, _ = ended(loops)
                for env_id, agent in np.ndindex(ENVS, 3):
                    name = AGENTS[agent]
                    if facade is StackedVecEnv:
                        found = infos.get(env_id, {}).get(name, {}).get("episode")
                    else:
                        info = infos.get(name, {})
                        has = "episode" in info and info["_episode"][env_id]
                        found = {key: info["episode"][key][env_id] for key in "rl"} if has else None
                    assert found == parts[env_id].get(name)


def test_rows_of_dead_agents_have_no_second_episode():
    with ParallelEnv([TwoAgents] * 2, "NEXT_STEP", num_workers=2, episode_stats=True) as parallel:
        env = GymnasiumVectorEnv(parallel)
        env.reset()
        returns = []
        for _ in range(20):
            *_, terminations, _, infos = env.step(np.zeros(4, np.int64))
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
        assert terminations.all()
        assert np.mean(returns) == 12.5
