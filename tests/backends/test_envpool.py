"""`ParallelEnv` over EnvPool equals the bare pool: same seeds and actions, same results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import envpool
import gymnasium
import numpy as np
import optree
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from helpers import ROOT
from torchrl.envs.utils import check_env_specs

from marl_parallel import EnvError, ParallelEnv, Rollout, make
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv, TorchRLEnv

COPIES, SEED = 6, 7
BENCHMARKS = ROOT / "benchmarks"
TASKS = [
    "CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1", "FrozenLake-v1", "Blackjack-v1", "Catch-v0",
    "LunarLanderContinuous-v3", "MiniGrid-Empty-5x5-v0", "HalfCheetah-v4", "CheetahRun-v1",
]  # fmt: skip
"""Actions that are discrete, in a box or in several; observations that are numbers, arrays and dicts; with infos."""

pytestmark = [
    pytest.mark.needs("envpool", "torchrl"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # EnvPool's spaces lose precision


def bare(task: str, **arguments: Any) -> Any:
    return envpool.make_gymnasium(task, **{"num_envs": COPIES, "seed": SEED, **arguments})


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` over EnvPool."""
    made: list[ParallelEnv] = []

    def make(task: Any = "CartPole-v1", **arguments: Any) -> ParallelEnv:
        arguments = {"num_envs": COPIES, "seed": SEED, **arguments} if isinstance(task, str) else arguments
        made.append(ParallelEnv.from_envpool(task, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close()


def drawn(space: gymnasium.Space[Any], count: int = COPIES) -> np.ndarray:
    return np.array([space.sample() for _ in range(count)])


def actions_of(space: gymnasium.Space[Any], steps: int, count: int = COPIES) -> list[np.ndarray]:
    space.seed(0)
    return [drawn(space, count) for _ in range(steps)]


def same(ours: Any, its: Any, row: int) -> None:
    """Equal value and type of every entry, for one row of the pool."""
    expected = optree.tree_map(lambda array: array[row], its)
    assert optree.tree_structure(ours) == optree.tree_structure(expected)
    for one, other in zip(optree.tree_leaves(ours), optree.tree_leaves(expected)):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def info_of(info: dict[str, Any]) -> dict[str, Any]:
    """The info without the keys that identify the row."""
    return {key: value for key, value in info.items() if key not in ("env_id", "players")}


def without_first_rewards(its: tuple[Any, ...]) -> tuple[Any, ...]:
    """A step's arrays without rewards of first observations, which some tasks return."""
    its[1][its[-1]["elapsed_step"] == 0] = 0.0
    return its


def compare(results: tuple[Any, ...], its: tuple[Any, ...], rows: Any = None) -> None:
    """Compare the dicts of a step or reset with the pool's arrays."""
    for copy in range(len(results[0])):
        row = copy if rows is None else rows[copy]
        same(results[0][copy], {"agent_0": its[0]}, row)
        same(results[-1][copy], {"agent_0": info_of(its[-1])}, row)
        if len(its) == 5:
            same(results[1][copy], {"agent_0": its[1]}, row)
            for flags, of_pool in ((results[2], its[2]), (results[3], its[3])):
                assert flags[copy] == {"agent_0": of_pool[row], "__all__": of_pool[row]}
                assert type(flags[copy]["agent_0"]) is np.bool_
                assert type(flags[copy]["__all__"]) is bool


# -- compared with the bare pool ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_dicts(task, make_pool):
    env, pool = make_pool(task), bare(task)
    space = env.action_space["agent_0"]
    compare(env.reset(), pool.reset())
    ends = 0
    for actions in actions_of(space, 120):
        results = env.step([{"agent_0": action} for action in actions])
        compare(results, its := without_first_rewards(pool.step(actions)))
        ends += int((its[2] | its[3]).sum())
        assert env.acting == tuple([] if over else ["agent_0"] for over in its[2] | its[3])
        assert all(env.observation_space["agent_0"].contains(seen["agent_0"]) for seen in results[0])
    assert ends or task not in ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Catch-v0")
    stats = env.stats()
    assert (stats.resets >= COPIES, stats.steps + stats.resets) == (True, 121 * COPIES)


@pytest.mark.parametrize("task", TASKS)
def test_arrays(task, make_pool):
    env, pool = PettingZooVecEnv(make_pool(task)), bare(task)
    observations, infos = env.reset()
    its = pool.reset()
    for actions in actions_of(env.single_action_space("agent_0"), 120):
        for part, expected in zip((observations, infos), (its[0], info_of(its[-1]))):
            results = {key: value for key, value in part["agent_0"].items() if key[0] != "_"} if part is infos else None
            leaves = optree.tree_leaves(part["agent_0"] if results is None else results)
            for one, other in zip(leaves, optree.tree_leaves(expected), strict=True):
                np.testing.assert_array_equal(one, other)
        observations, rewards, terminations, truncations, infos = env.step({"agent_0": actions})
        its = without_first_rewards(pool.step(actions))
        for one, other in zip((rewards, terminations, truncations), its[1:4]):
            assert one["agent_0"].tolist() == other.tolist()
        assert rewards["agent_0"].dtype == np.float64
        assert env.over.tolist() == (its[2] | its[3]).tolist()
        assert env.acting["agent_0"].tolist() == (~(its[2] | its[3])).tolist()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_batches(task, make_pool):
    """The order of environments varies between runs; the trajectory of each does not."""
    env, pool = make_pool(task, batch_size=2), bare(task)
    actions = actions_of(env.action_space["agent_0"], 300)
    its = [pool.reset(), *(pool.step(batch) for batch in actions)]
    moments = [0] * COPIES
    env.reset_async()
    while min(moments) < 40:
        batch = env.recv(min_envs=env.batch_size)
        assert len(batch.env_ids) == 2
        for place, env_id in enumerate(batch.env_ids):
            results = tuple(part[place : place + 1] for part in batch[1:])
            expected = its[moments[env_id]]
            compare((results[0], results[-1]) if moments[env_id] == 0 else results, expected, [env_id])
            env.send({env_id: {"agent_0": actions[moments[env_id]][env_id]}})
            moments[env_id] += 1
    assert {*env.recv().env_ids} == {*range(COPIES)}


def test_all_of_several_batches(make_pool):
    env, pool = make_pool(batch_size=2), bare("CartPole-v1")
    vec, its = PettingZooVecEnv(make_pool(batch_size=3)), pool.reset()
    compare(env.reset(), its)
    np.testing.assert_array_equal(vec.reset()[0]["agent_0"], its[0])
    for actions in actions_of(env.action_space["agent_0"], 60):
        compare(env.step([{"agent_0": action} for action in actions]), its := pool.step(actions))
        np.testing.assert_array_equal(vec.step({"agent_0": actions})[0]["agent_0"], its[0])


def test_partial_reset_and_step(make_pool):
    """A reset right after an end replaces the pool's own; otherwise it cuts the episode short."""
    env, vec, pool = make_pool(), PettingZooVecEnv(make_pool()), bare("CartPole-v1")
    compare(env.reset(), pool.reset())
    vec.reset()
    cancelled = 0
    for moment, actions in enumerate(actions_of(env.action_space["agent_0"], 80)):
        results, its = env.step([{"agent_0": action} for action in actions]), pool.step(actions)
        compare(results, its)
        observations = vec.step({"agent_0": actions})[0]["agent_0"]
        ids = [*np.flatnonzero(its[2])] if moment % 3 else [4, 1]
        if ids:
            cancelled += moment % 3 > 0
            compare(env.reset(env_ids=ids), its := pool.reset(np.array(ids, np.int32)))
            observations = observations.copy()
            observations[ids] = its[0]
            np.testing.assert_array_equal(vec.reset(env_ids=ids)[0]["agent_0"], observations)
            assert [env.acting[env_id] for env_id in ids] == [["agent_0"]] * len(ids)
        some = np.array([5, 0, 2])
        compare(env.step([{"agent_0": 1}] * 3, env_ids=some), pool.step(np.ones(3, np.int32), some))
        vec._stepper.step({"agent_0": np.ones(COPIES, np.int64)}, [5, 0, 2])
    assert cancelled


class Counts:
    """Sums over the bare pool's arrays, of each environment."""

    def __init__(self) -> None:
        self.returns, self.lengths = np.zeros(COPIES), np.zeros(COPIES, int)

    def reset(self, rows: Any) -> None:
        self.returns[rows] = self.lengths[rows] = 0

    def step(self, its: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The episodes that have ended, as `FinishedEpisode`."""
        _, rewards, terminated, truncated, infos = its
        finished = []
        for row, env_id in enumerate(infos["env_id"]):
            if infos["elapsed_step"][row] == 0:
                self.reset(env_id)
                continue
            self.returns[env_id] += rewards[row]
            self.lengths[env_id] += 1
            if terminated[row] or truncated[row]:
                length = int(self.lengths[env_id])
                own = {"agent_0": float(self.returns[env_id])}, {"agent_0": length}, length
                finished.append((int(env_id), *own, bool(terminated[row]), bool(truncated[row])))
        return finished


@pytest.mark.parametrize("task", ["CartPole-v1", "FrozenLake-v1", "Catch-v0"])
def test_finished_episodes(task, make_pool):
    """Of dicts, arrays, and partial resets and steps."""
    env, vec, pool, counts, ended = make_pool(task), PettingZooVecEnv(make_pool(task)), bare(task), Counts(), 0
    for each in (env, vec, pool):
        each.reset()
    for moment, actions in enumerate(actions_of(env.action_space["agent_0"], 80)):
        ids = np.arange(COPIES, dtype=np.int32) if moment % 4 else np.array([0, 2, 5], np.int32)
        env.step([{"agent_0": action} for action in actions[ids]], ids.tolist())
        vec._stepper.step({"agent_0": actions}, ids.tolist())
        episodes = counts.step(pool.step(actions[ids], ids))
        ended += len(episodes)
        assert sorted(env.finished_episodes) == sorted(vec.parallel_env.finished_episodes) == sorted(episodes)
        if moment % 13 == 12:
            for each in (env, vec):
                each.reset(env_ids=[4, 1])
            assert env.finished_episodes == vec.parallel_env.finished_episodes == ()
            pool.reset(np.array([4, 1], np.int32))
            counts.reset([4, 1])
    assert ended > 5


def test_finished_episodes_of_batches(make_pool):
    env, pool = make_pool(batch_size=2), bare("CartPole-v1")
    counts, steps = Counts(), actions_of(env.action_space["agent_0"], 300)
    expected, found = ([[] for _ in range(COPIES)] for _ in range(2))
    pool.reset()
    for actions in steps:
        for episode in counts.step(pool.step(actions)):
            expected[episode[0]].append(episode)
    moments = [0] * COPIES
    env.reset_async()
    while min(moments) < 80:
        env_ids = env.recv(min_envs=2).env_ids
        for episode in env.finished_episodes:
            found[episode.env_id].append(episode)
        for env_id in env_ids:
            env.send({env_id: {"agent_0": steps[moments[env_id]][env_id]}})
            moments[env_id] += 1
    for own, others in zip(found, expected):
        assert len(own) > 1
        assert own == others[: len(own)]


def test_seeds(make_pool):
    """One seed for each environment: `seed + i`, or the sequence."""
    first, apart = make_pool(seed=3), make_pool(seed=[3, 4, 5, 6, 7, 8])
    assert first.seed() == apart.seed() == (3, 4, 5, 6, 7, 8)
    for one, other in zip(first.reset()[0], apart.reset()[0]):
        np.testing.assert_array_equal(one["agent_0"], other["agent_0"])
    drawn_seeds = [make_pool(seed=None).seed() for _ in range(2)]
    assert drawn_seeds[0] != drawn_seeds[1]


def test_frames(make_pool):
    env = make_pool(render_mode="rgb_array")
    env.reset()
    frames = env.render()
    assert (env.render_mode, len(frames), frames[0].ndim, frames[0].dtype) == ("rgb_array", COPIES, 3, np.uint8)
    assert env.render(tile=True).ndim == 3
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_render_error_closes_nothing(make_pool):
    env = make_pool("Blackjack-v1", render_mode="rgb_array")
    env.reset()
    with pytest.raises(EnvError, match="EnvPool's Blackjack-v1 raised in render"):
        env.render()
    env.step([{"agent_0": 1}] * COPIES)
    with pytest.raises(ValueError, match='render_mode="human" shows one environment, but num_envs=6: pass "rgb_array"'):
        make_pool("CartPole-v1", render_mode="human")


def test_nested_observations(make_pool):
    """Some tasks separate names with colons."""
    env = make_pool("FrankaKitchen-v1", num_envs=2)
    seen = env.reset()[0][0]["agent_0"]
    assert env.observation_space["agent_0"].contains(seen)
    assert isinstance(seen["desired_goal"], dict)


def test_actions_are_copied_at_send(make_pool):
    """Writing into the caller's array while EnvPool's threads run changes nothing."""
    actions = np.ones((256, 6))
    results = []
    for after in (1.0, -1.0):
        env = GymnasiumVectorEnv(make_pool("HalfCheetah-v4", num_envs=256, num_threads=1))
        env.reset()
        actions[...] = 1.0
        env.step_async(actions)
        actions[...] = after
        results.append(env.step_wait()[0])
    np.testing.assert_array_equal(*results)


def test_read_only_actions(make_pool):
    env, pool = GymnasiumVectorEnv(make_pool("Pendulum-v1")), bare("Pendulum-v1")
    env.reset()
    pool.reset()
    actions = np.ones((COPIES, 1), np.float32)
    actions.flags.writeable = False
    np.testing.assert_array_equal(env.step(actions)[0], pool.step(actions)[0])


def test_integer_types_of_actions(make_pool):
    env, other = make_pool(), make_pool()
    env.reset()
    other.reset()
    mixed = [np.uint64(1), 0, np.int8(1), True, np.uint8(0), np.int64(1)]
    one, two = (
        e.step([{"agent_0": a} for a in mixed_or_not]) for e, mixed_or_not in ((env, mixed), (other, map(int, mixed)))
    )
    for seen, expected in zip(one[0], two[0]):
        np.testing.assert_array_equal(seen["agent_0"], expected["agent_0"])


# -- through facades ---------------------------------------------------------------------------------------------------


def test_gymnasium(make_pool):
    env, pool = GymnasiumVectorEnv(make_pool()), bare("CartPole-v1")
    np.testing.assert_array_equal(env.reset()[0], pool.reset()[0])
    for actions in actions_of(env.single_action_space, 60):
        results, its = env.step(actions), pool.step(actions)
        for one, other in zip(results[:4], its[:4]):
            np.testing.assert_array_equal(one, other)
        assert results[4]["elapsed_step"].tolist() == its[4]["elapsed_step"].tolist()
        assert results[4]["_elapsed_step"].all()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "Catch-v0"])
def test_stacked_and_rollout(task, make_pool):
    """`StackedVecEnv` and what a rollout stores equal the pool's arrays."""
    vec, pool = StackedVecEnv(make_pool(task)), bare(task)
    rollout = Rollout(vec, 40)
    its = [pool.reset()]
    rollout.reset()
    for number, actions in enumerate(actions_of(vec.single_action_space, 80)):
        assert rollout.filled % 40 == number % 40
        rollout.step(actions[:, None])
        # EnvPool writes into its arrays again.
        its.append(tuple(np.array(part) for part in without_first_rewards(pool.step(actions))[:4]))
        np.testing.assert_array_equal(vec.done, its[-1][2] | its[-1][3])
        np.testing.assert_array_equal(vec.acting[:, 0], ~vec.done)
        assert vec.present_next.all()
        np.testing.assert_array_equal(rollout.arrays.actions[number % 40, :, 0], actions)
    data, (seen, paid, *flags) = rollout.arrays, (np.stack(parts) for parts in zip(*its[41:]))
    np.testing.assert_array_equal(data.observations[:, :, 0], np.concatenate([its[40][0][None], seen]))
    np.testing.assert_array_equal(data.rewards[:, :, 0], paid.astype(np.float32))
    for actual, of_agents, expected in zip(data[9:11], data[7:9], flags, strict=True):
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(of_agents[:, :, 0], expected)
    over = flags[0] | flags[1]
    np.testing.assert_array_equal(data.done, over)
    np.testing.assert_array_equal(data.final_observations[over][:, 0], seen[over])
    assert over.any() or task == "Pendulum-v1"


def test_gymnasium_wrappers(make_pool):
    env = RecordEpisodeStatistics(NormalizeObservation(GymnasiumVectorEnv(make_pool(max_episode_steps=8))))
    env.reset()
    lengths: list[int] = []
    for actions in actions_of(env.single_action_space, 30):
        *_, infos = env.step(actions)
        lengths += infos["episode"]["l"][infos["_episode"]].tolist() if "episode" in infos else []
    assert len(lengths) >= 3 * COPIES
    assert max(lengths) == 8


@pytest.mark.parametrize("task", TASKS)
def test_torchrl_specs(task, make_pool):
    check_env_specs(TorchRLEnv(make_pool(task)))


def test_torchrl_steps_all():
    with pytest.raises(ValueError, match="and resets some of them, but this simulator returns 3 at a time: make"):
        TorchRLEnv(ParallelEnv.from_envpool("CartPole-v1", 6, batch_size=3))


def test_torchrl_seeds(make_pool):
    """The seed makes the pool again; one that was made outside cannot be seeded."""
    env, expected = TorchRLEnv(make_pool()), bare("CartPole-v1", seed=0).reset()[0]
    env.rollout(5)
    env.set_seed(0)
    assert torch.equal(env.reset()["agent", "observation"][:, 0], torch.from_numpy(expected))
    assert env.env.seed() == (*range(COPIES),)
    data = env.rollout(10, break_when_any_done=False)
    env.set_seed(0)
    again = env.rollout(10, break_when_any_done=False)
    assert torch.equal(again["agent", "observation"][:, 0, 0], torch.from_numpy(expected))
    assert not torch.equal(again["agent", "observation"][:, 0], data["agent", "observation"][:, 0])
    env = TorchRLEnv(make_pool(bare("CartPole-v1")))
    with pytest.raises(ValueError, match="seed=0, but these environments are seeded only once"):
        env.set_seed(0)
    env.reset()


@pytest.mark.parametrize("task", [*TASKS, "Play2048-v1"])
def test_torchrl_flat_specs(task, make_pool):
    check_env_specs(TorchRLEnv(make_pool(task), flatten=True, info_masks=task == "Play2048-v1"))


@pytest.mark.parametrize("task", ["CartPole-v1", "Play2048-v1"])
def test_torchrl_flat(task, make_pool):
    """What `flatten=True` has at the root is what the group has, without its axis of agents."""
    masks = {"info_masks": task == "Play2048-v1"}
    env, other = TorchRLEnv(make_pool(task), **masks), TorchRLEnv(make_pool(task), flatten=True, **masks)
    ends = 0
    for each in (env, other):
        each.reset()
    torch.manual_seed(0)
    for _ in range(3):
        data = env.rollout(20, break_when_any_done=False, auto_reset=False, tensordict=env.reset())
        steps = iter(data["agent", "action"].unbind(1))
        flat = other.rollout(
            20, policy=lambda now: now.set("action", next(steps)[:, 0]), trust_policy=True,  # noqa: B023  # used at once
            break_when_any_done=False, auto_reset=False, tensordict=other.reset(),
        )  # fmt: skip
        for root, group in ((flat, data["agent"]), (flat["next"], data["next", "agent"])):
            keys = {"observation", "mask", "present"} | ({"action_mask"} if masks["info_masks"] else set())
            for key in keys | ({"reward"} if root is not flat else {"action"}):
                assert torch.equal(root[key], group[key][:, :, 0]), key
            assert {*root.keys()} - {"next", "done", "terminated", "truncated", "action", "reward"} == keys
        for key in ("done", "terminated", "truncated"):
            assert torch.equal(flat["next", key], data["next", key])
        ends += int(flat["next", "done"].sum())
    assert flat["next", "reward"].shape == (COPIES, 20, 1)
    assert ends > 0 or task == "Play2048-v1"
    with pytest.raises(ValueError, match="no actions: there is no 'action'"):
        other.step(other.reset())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("task", ["CartPole-v1", "Play2048-v1"])
def test_torchrl_one_hot_actions(task, flatten, make_pool):
    masks = {"info_masks": task == "Play2048-v1"}
    env = TorchRLEnv(make_pool(task), flatten=flatten, categorical_actions=False, **masks)
    check_env_specs(env)
    env.set_seed(SEED)
    pool, choices = bare(task), int(env.env.action_space["agent_0"].n)
    data, current = env.reset(), pool.reset()
    place = (lambda key: key) if flatten else (lambda key: ("agent", key))
    rng = np.random.default_rng(0)
    for _ in range(8):
        legal = current[-1].get("legal_action_mask", np.ones((COPIES, choices), np.bool_))
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in legal])
        one_hot = torch.nn.functional.one_hot(torch.from_numpy(actions), choices).bool()
        data = env.step(data.set(place("action"), one_hot if flatten else one_hot[:, None]))["next"]
        current = pool.step(actions.astype(np.int32))
        seen = data[place("observation")].reshape(COPIES, *current[0].shape[1:])
        np.testing.assert_array_equal(seen, current[0])
    assert env.rand_action(env.reset())[place("action")].reshape(COPIES, -1).sum(1).tolist() == [1] * COPIES


def test_torchrl_flat_is_for_one_agent():
    with (
        make("mpe2.simple_spread_v3", auto_reset=False, backend="serial") as env,
        pytest.raises(ValueError, match=r"flatten=True is for one agent, but the agents are \['agent_0', 'agent_1', "),
    ):
        TorchRLEnv(env, flatten=True)


def test_torchrl_resets_finished_environments(make_pool):
    """TorchRL's own resets replace the pool's: no step is lost to a reset, unlike with the bare pool."""
    env, pool = TorchRLEnv(make_pool()), bare("CartPole-v1")
    data = env.rollout(60, break_when_any_done=False)
    seen, after = data["agent", "observation"][:, :, 0], data["next", "agent", "observation"][:, :, 0]
    current = torch.from_numpy(pool.reset()[0])
    ends = 0
    for moment in range(60):
        assert torch.equal(seen[:, moment], current)
        observations, rewards, terminated, truncated, _ = pool.step(data["agent", "action"][:, moment, 0].numpy())
        assert torch.equal(after[:, moment], torch.from_numpy(observations))
        assert data["next", "agent", "reward"][:, moment, 0, 0].tolist() == rewards.tolist() == [1.0] * COPIES
        assert data["next", "terminated"][:, moment, 0].tolist() == terminated.tolist()
        assert data["next", "truncated"][:, moment, 0].tolist() == truncated.tolist()
        over = np.flatnonzero(terminated | truncated).astype(np.int32)
        current = torch.from_numpy(observations.copy())
        if len(over):
            current[over] = torch.from_numpy(pool.reset(over)[0])
            ends += len(over)
    assert ends > COPIES
    assert data["agent", "mask"].all()


# -- refused calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"task": "CartPole-v9"}, ValueError, "EnvPool has no task 'CartPole-v9'; envpool.list_all_envs"),
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1, got 0"),
        ({"num_envs": 2.0}, TypeError, "num_envs must be an integer"),
        ({"batch_size": 7}, ValueError, "batch_size=7 is more than num_envs=6"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"num_threads": -1}, ValueError, "num_threads must be at least 1"),
        ({"seed": [1, 2]}, ValueError, "expected one seed for each of 6 environments, got 2"),
        ({"seed": 2**31 - 3}, ValueError, "EnvPool needs a seed from 0 to 2"),
        ({"seed": [None] * 6}, ValueError, "EnvPool needs a seed from 0 to 2"),
        (
            {"on_error": "restart"},
            TypeError,
            "does not take these arguments .*'on_error'.*; it takes num_envs, batch_size",
        ),
        ({"max_num_players": 0}, ValueError, "EnvPool's CartPole-v1 refuses one of {.*'max_num_players': 0}"),
    ],
)
def test_arguments(arguments, kind, text, make_pool):
    with pytest.raises(kind, match=text):
        make_pool(**arguments)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ({"agent_0": 0.5}, "environment 0: the action of agent 'agent_0': expected an array of shape"),
        ({"agent_0": np.ones(1, int)}, r"environment 0: the action of agent 'agent_0': .* got shape \(1,\)"),
        ({"agent_0": None}, "environment 0: the action of agent 'agent_0'"),
        ({"agent_0": 2**70}, "environment 0: the action of agent 'agent_0'"),
        ({}, "environment 0: no action for agent 'agent_0'"),
    ],
)
def test_actions_that_would_end_the_process(actions, text, make_pool):
    """EnvPool aborts on a wrong array; such arrays are refused before."""
    env = make_pool()
    env.reset()
    with pytest.raises(ValueError, match=text):
        env.step([actions] * COPIES)
    assert len(env.step([{"agent_0": 1}] * COPIES)[0]) == COPIES


def test_arrays_that_would_end_the_process(make_pool):
    env = GymnasiumVectorEnv(make_pool("Pendulum-v1"))
    env.reset()
    for actions in (np.zeros(COPIES), np.zeros((COPIES, 2)), np.zeros((2, 1)), np.full((COPIES, 1), "x")):
        with pytest.raises(ValueError, match="expected"):
            env.step(actions)
    assert env.step(np.zeros((COPIES, 1)))[0].shape == (COPIES, 3)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("__version__ = '1.3.0'", "from_envpool is written for EnvPool 1.0 to 1.2, found 1.3.0: pip install"),
        ("import nothing_of_this_name", "from_envpool needs EnvPool, which cannot be imported"),
    ],
)
def test_missing_or_unsupported_version(source, text, tmp_path):
    (tmp_path / "envpool.py").write_text(source)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = "from marl_parallel import ParallelEnv; ParallelEnv.from_envpool('CartPole-v1', num_envs=2)"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    output = done.stderr.splitlines()[-1]
    assert output.startswith(f"ImportError: {text}")
    assert output.endswith('pip install "marl-parallel[envpool]", or in a checkout: pip install -e ".[envpool]"')


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_with_calls_in_flight(make_pool):
    env = make_pool(batch_size=2)
    env.reset_async()
    env.close()
    env.close()
    assert env.pending == ()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.recv()


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit()"])
def test_forked_child_does_not_delete_the_pool(leave):
    """The child has no pool threads: deleting the pool there waits for them, or crashes."""
    script = """
import os, sys, gc
from marl_parallel import ParallelEnv
env = ParallelEnv.from_envpool("CartPole-v1", num_envs=2)
env.reset()
child = os.fork()
if child == 0:
    env.close()
    del env
    gc.collect()
    LEAVE
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(env.reset()[0]) == 2
"""
    script = script.replace("LEAVE", leave)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_example_of_the_page():
    page = (BENCHMARKS.parent / "docs" / "simulators.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "from_envpool" in block)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
