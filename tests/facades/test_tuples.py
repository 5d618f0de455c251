"""`TupleVecEnv` equals Gymnasium's `AsyncVectorEnv` and plain loops, and loops as in other repositories run with it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from helpers.promises.driver import assert_equal, plain, row_info
from simulators.tuple_envs import Foraging, Intersection, Pathfinding

from marl_parallel import ParallelEnv, make
from marl_parallel.vector import TupleVecEnv

ENVS, AGENTS = 3, 3
SEED = 5


class Warehouse(Foraging):
    """Flags of the environment, and infos: numbers, arrays, a mask, the returns of an episode in its last step."""

    metadata: Any = {"render_modes": []}  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, Any]:
        seen, _ = super().reset(seed=seed)
        self.returns = np.zeros(AGENTS)
        return seen, {"shelf": 7, "action_mask": self.mask(), "metrics": {"return": 0.0, "length": 0.0}}

    def mask(self) -> np.ndarray:
        mask = np.ones((AGENTS, 4), np.int8)
        mask[self.time % AGENTS, self.total % 4] = 0
        return mask

    def step(self, actions: Any) -> tuple[Any, ...]:
        seen, rewards, over, *_ = super().step(actions)
        self.returns = self.returns + rewards
        info: dict[str, Any] = {"place": np.array([self.total, 1.0]), "action_mask": self.mask()}
        info["metrics"] = {"return": float(self.returns.sum()), "length": float(self.time)}
        is_cut_off = over and bool(self.total % 2)
        return seen, rewards, over and not is_cut_off, is_cut_off, info | ({"returns": self.returns} if over else {})


def actions_of(rng: np.random.Generator) -> list[list[int]]:
    """Actions by agent, as lists of `ENVS` numbers."""
    actions: list[list[int]] = rng.integers(0, 4, (AGENTS, ENVS)).tolist()
    return actions


def of_env(infos: dict[str, Any], env_id: int) -> dict[str, Any]:
    """The infos of one environment; Gymnasium has nested arrays where the facade has one dict for each environment."""
    info = row_info({key: value for key, value in infos.items() if "final_info" not in key}, env_id)
    if infos.get("_final_info", np.zeros(ENVS, bool))[env_id]:
        last = infos["final_info"]
        info["final_info"] = plain(row_info(last, env_id) if isinstance(last, dict) else last[env_id])
    return {key: [*map(plain, value)] if key == "final_obs" else value for key, value in info.items()}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_equals_gymnasium(mode):
    """Observations, rewards, flags, spaces and infos of Gymnasium's own class, over ends of episodes.

    With NEXT_STEP, it cannot join rewards that are lists with the single 0 of an environment that it resets.
    """
    rng, ends = np.random.default_rng(1), 0
    theirs = AsyncVectorEnv([Warehouse] * ENVS, autoreset_mode=mode, shared_memory=False)
    with make(Warehouse, ENVS, facade="tuple", auto_reset=mode, seed=SEED, num_workers=2) as ours:
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            assert getattr(ours, name) == getattr(theirs, name)
        results: list[Any] = [env.reset(seed=SEED) for env in (ours, theirs)]
        for _ in range(20):
            (observations, *rest, infos), (their_observations, *their_rest, their_infos) = results
            assert_equal([*observations], [*their_observations], "observations")
            assert_equal(rest, their_rest, "rewards and flags")
            for env_id in range(ENVS):
                assert_equal(of_env(infos, env_id), of_env(their_infos, env_id), f"infos of {env_id}")
            over = rest[1] | rest[2] if rest else np.zeros(ENVS, bool)
            ends += over.sum()
            if mode is AutoresetMode.DISABLED and over.any():
                results = [env.reset(options={"reset_mask": over}) for env in (ours, theirs)]
            else:
                actions = actions_of(rng)
                results = [env.step(actions) for env in (ours, theirs)]
    theirs.close()
    assert ends >= 4


class PlainLoop:
    """One simulator, which begins anew in the step that ends an episode; a finished agent gets action 0."""

    def __init__(self, kind: Any, seed: int) -> None:
        self.env = kind()
        self.seen, _ = self.env.reset(seed=seed)
        self.done = [False] * AGENTS

    def step(self, actions: list[int]) -> tuple[Any, ...]:
        allowed = [0 if done else action for done, action in zip(self.done, actions)]
        sequence = tuple(allowed) if isinstance(self.env.action_space, spaces.Tuple) else allowed
        self.seen, rewards, *flags, _ = self.env.step(sequence)
        ended, cut_off = ([*f] if isinstance(f, list | tuple) else [f] * AGENTS for f in flags)
        self.done = [bool(one or other) for one, other in zip(ended, cut_off)]
        last = self.seen
        if all(self.done):
            self.seen, _ = self.env.reset()
        return rewards, ended, cut_off, last


@pytest.mark.parametrize("flags_by_agent", [False, True])
@pytest.mark.parametrize("kind", [Intersection, Pathfinding])
def test_agents_that_die(kind, flags_by_agent):
    """An episode ends when all agents have; flags of environments are all False before that."""
    rng, ends, deaths = np.random.default_rng(2), 0, 0
    loops = [PlainLoop(kind, SEED + env_id) for env_id in range(ENVS)]
    env = TupleVecEnv(ParallelEnv([kind] * ENVS, True, SEED, backend="serial"), flags_by_agent=flags_by_agent)
    env.reset()
    for _ in range(30):
        actions = actions_of(rng)
        observations, rewards, terminations, truncations, infos = env.step(np.array(actions))
        for env_id, (loop, own) in enumerate(zip(loops, zip(*actions))):
            expected, ended, cut_off, last = loop.step(list(own))
            over = all(loop.done)
            if over:
                loop.done = [False] * AGENTS
                assert_equal([*infos["final_obs"][env_id]], [*last], "final_obs")
            elif any(loop.done):
                deaths += 1
            assert rewards[env_id].tolist() == [*expected]
            assert_equal([of_agent[env_id] for of_agent in observations], [*loop.seen], "observations")
            assert env.acting[env_id].tolist() == [not done for done in loop.done]
            if flags_by_agent:
                assert (terminations[env_id].tolist(), truncations[env_id].tolist()) == (ended, cut_off)
            else:
                assert terminations[env_id] == all(ended)
                assert truncations[env_id] == (over and (all(cut_off) or not all(ended)))
            ends += over
    env.close()
    assert ends >= 4
    assert deaths >= 4


# -- loops with the calls of other repositories ------------------------------------------------------------------------


def expected_returns(actions: list[list[list[int]]]) -> list[np.ndarray]:
    """The returns of the first episode of each environment, by a plain loop."""
    returns = []
    for env_id in range(ENVS):
        loop, total = PlainLoop(Warehouse, SEED + env_id), np.zeros(AGENTS)
        for of_step in actions:
            total += loop.step([of_agent[env_id] for of_agent in of_step])[0]
            if all(loop.done):
                break
        returns.append(total)
    return returns


def batches(steps: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(3)
    return [actions_of(rng) for _ in range(steps)]


def test_episodes_by_final_info():
    """As the MARL book's code: until each environment has ended once; it reads `final_info` by environment."""
    envs = make([Warehouse] * ENVS, facade="tuple", seed=SEED, backend="serial")
    obss, info = envs.reset()
    num_envs, width = envs.observation_space[0].shape[0], spaces.flatdim(envs.single_observation_space)
    assert max(space.n for space in envs.single_action_space) == 4
    running, masks, rewards = np.ones(num_envs, bool), [np.stack(info["action_mask"])], []
    returns: dict[int, np.ndarray] = {}
    actions = batches(10)
    for of_step in actions:
        assert np.concatenate(obss, axis=-1).shape == (num_envs, width)
        obss, reward, done, truncated, info = envs.step(of_step)
        masks.append(np.stack(info["action_mask"]))
        rewards.append(reward * running[:, None])
        for env_id in np.flatnonzero(running & (done | truncated)).tolist():
            assert "final_info" in info
            returns[env_id] = info["final_info"][env_id]["returns"]
            running[env_id] = False
    envs.close()
    assert not running.any()
    assert {mask.shape for mask in masks} == {(num_envs, AGENTS, 4)}
    for env_id, expected in enumerate(expected_returns(actions)):
        assert np.array_equal(returns[env_id], expected)
        assert np.array_equal(np.sum(rewards, axis=0)[env_id], expected)


class FourValues:
    """What SEAC's `VecPyTorch` becomes: lists by agent, one `done`, a list of infos with those of ended episodes."""

    def __init__(self, venv: Any) -> None:
        self.venv = venv
        self.observation_space, self.action_space = venv.single_observation_space, venv.single_action_space

    def reset(self) -> Any:
        return [*self.venv.reset()[0]]

    def step(self, actions: Any) -> Any:
        self.venv.step_async([np.squeeze(of_agent, axis=-1) for of_agent in actions])
        obs, rewards, terminated, truncated, infos = self.venv.step_wait()
        return [*obs], rewards, terminated | truncated, [i or {} for i in infos.get("final_info", [None] * ENVS)]


def test_four_values():
    envs = FourValues(make(Warehouse, ENVS, facade="tuple", seed=SEED, num_workers=2))
    assert [space.n for space in envs.action_space] == [4] * AGENTS
    assert [obs.shape for obs in envs.reset()] == [(ENVS, 3)] * AGENTS
    actions, returns, of_infos = batches(10), np.zeros((ENVS, AGENTS)), dict[int, np.ndarray]()
    first = np.zeros((ENVS, AGENTS))
    for of_step in actions:
        _, rewards, done, infos = envs.step(np.array(of_step)[..., None])
        returns += rewards
        assert [bool(info) for info in infos] == done.tolist()
        for env_id in np.flatnonzero(done).tolist():
            if env_id not in of_infos:
                of_infos[env_id], first[env_id] = infos[env_id]["returns"], returns[env_id]
    envs.venv.close()
    for env_id, expected in enumerate(expected_returns(actions)):
        assert np.array_equal(of_infos[env_id], expected)
        assert np.array_equal(first[env_id], expected)


def test_agents_stacked():
    """As Mava and OG-MARL: arrays `(N, k, ...)`, the mask of the episode that has begun, metrics of the one before."""
    env = make(Warehouse, ENVS, facade="tuple", seed=SEED, backend="serial")
    assert (env.unwrapped, len(env.single_action_space), env.num_envs) == (env, AGENTS, ENVS)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    loops = [PlainLoop(Warehouse, SEED + env_id) for env_id in range(ENVS)]
    lengths, sums = [0] * ENVS, [0.0] * ENVS
    obs, info = env.reset(seed=[SEED + env_id for env_id in range(ENVS)], options=None)
    for of_step in batches(10):
        assert np.array_equal(np.stack(obs, axis=1), np.stack([loop.seen for loop in loops]))
        assert np.array_equal(np.stack(info["action_mask"]), np.stack([loop.env.mask() for loop in loops]))
        action = np.array(of_step).T
        obs, rewards, terminated, truncated, info = env.step(np.swapaxes(action, 0, 1))
        expected = [loop.step(own) for loop, own in zip(loops, action.tolist())]
        assert rewards.tolist() == [[float(one) for one in of_loop[0]] for of_loop in expected]
        ep_done = np.logical_or(terminated, truncated)
        assert ep_done.tolist() == [all(loop.done) for loop in loops]
        for i in np.flatnonzero(ep_done):
            for key, value in info["final_info"][i]["metrics"].items():
                info["metrics"][key][i] = value
        for i, loop in enumerate(loops):
            length, returns = lengths[i] + 1, sums[i] + sum(expected[i][0])
            assert (info["metrics"]["length"][i], info["metrics"]["return"][i]) == (length, returns)
            lengths[i], sums[i] = (0, 0.0) if ep_done[i] else (length, returns)
            loop.done = [False] * AGENTS
    env.close()


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_wrong_use():
    """Messages say what was expected; nothing has been stepped."""
    env = make(Warehouse, ENVS, facade="tuple", backend="serial")
    env.reset()
    with pytest.raises(ValueError, match=r"expected the actions of 3 agents, each for 3 environments; got 2 of them"):
        env.step([[0] * ENVS] * 2)
    with pytest.raises(ValueError, match=r"each for 3 environments; got dict \{'agent_0': 0\}"):
        env.step({"agent_0": 0})
    with pytest.raises(ValueError, match=r"the actions of agent 'agent_1': expected actions for 3 rows, got shape \(2"):
        env.step([[0] * ENVS, [0] * 2, [0] * ENVS])
    with pytest.raises(TypeError, match=r"the actions of agent 'agent_0': expected actions for 3 rows, got 0"):
        env.step([0, 0, 0])  # one environment's actions
    with pytest.raises(ValueError, match=r"reset_mask'\] must have shape \(3,\)"):
        env.reset(options={"reset_mask": np.ones(ENVS * AGENTS, bool)})
    with pytest.raises(TypeError, match=r"reset_mask'\] must be a numpy array of bool"):
        env.reset(options={"reset_mask": [True] * ENVS})
    assert env.parallel_env.stats().steps == 0
    env.close()
    with pytest.raises(TypeError, match=r"TupleVecEnv takes no argument 'colour'; .*flags_by_agent"):
        make(Warehouse, ENVS, facade="tuple", facade_kwargs={"colour": 1}, backend="serial")
