"""EnvPool's games with several players, new seeds, repeated actions and existing pools, against the bare pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import envpool
import gymnasium
import numpy as np
import pytest

from marl_parallel import ParallelEnv, make
from marl_parallel.vector import PettingZooVecEnv, StackedVecEnv

NUM_ENVS, SEED = 5, 7
GAMES = ["TicTacToe-v1", "ConnectFour-v1", "KuhnPoker-v1", "LeducHoldem-v1", "Backgammon-v1", "SparrowMahjong-v1"]
"""Of two and three players; with chance, and where one player acts several times in a row."""

pytestmark = [pytest.mark.needs("envpool"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` over EnvPool."""
    made: list[ParallelEnv] = []

    def new(task: Any = "CartPole-v1", **arguments: Any) -> ParallelEnv:
        arguments = {"num_envs": NUM_ENVS, "seed": SEED, **arguments} if isinstance(task, str) else arguments
        made.append(ParallelEnv.from_envpool(task, **arguments))
        return made[-1]

    yield new
    for env in made:
        env.close()


class BareGame:
    """A bare pool of a game, with its results sorted by environment and player."""

    def __init__(self, task: str, seed: int = SEED) -> None:
        self.pool = envpool.make_gymnasium(task, num_envs=NUM_ENVS, seed=seed)

    def reset(self) -> None:
        observations, info = self.pool.reset()
        nothing = np.zeros(NUM_ENVS, np.bool_)
        self._note(observations, np.zeros(len(observations)), nothing, nothing, info)

    def step(self, actions: Any) -> None:
        self._note(*self.pool.step(actions))

    def _note(self, observations: Any, rewards: Any, terminated: Any, truncated: Any, info: Any) -> None:
        row = {int(env_id): place for place, env_id in enumerate(info["env_id"])}
        of_player = {*info["players"]} - {"env_id"}
        whose = info["players"]["env_id"]
        self.rows = []
        for env_id in range(NUM_ENVS):
            players = np.flatnonzero(whose == env_id)
            if "id" in of_player:
                players = players[np.argsort(info["players"]["id"][players])]
            common = {key: value[row[env_id]] for key, value in info.items() if key not in ("env_id", "players")}
            infos = [{key: info["players"][key][player] for key in of_player} for player in players]
            own = {"terminated": bool(terminated[row[env_id]]), "truncated": bool(truncated[row[env_id]])}
            self.rows.append({
                "observations": observations[players], "rewards": rewards[players], "common": common, "infos": infos,
                **own,
            })  # fmt: skip

    def turn(self, env_id: int) -> str:
        return f"agent_{self.rows[env_id]['common']['current_player']}"

    def over(self, env_id: int) -> bool:
        return self.rows[env_id]["terminated"] or self.rows[env_id]["truncated"]

    def legal_actions(self, rng: np.random.Generator) -> list[int]:
        return [int(rng.choice(np.flatnonzero(row["common"]["legal_action_mask"]))) for row in self.rows]


def assert_equal(results: tuple[Any, ...], game: BareGame) -> None:
    """Compare the dicts of a step with the rows of a game."""
    for env_id, (seen, paid, terminateds, truncateds, infos) in enumerate(zip(*results)):
        row = game.rows[env_id]
        agents = [f"agent_{player}" for player in range(len(row["rewards"]))]
        assert [*seen] == [*paid] == agents
        for player, agent in enumerate(agents):
            np.testing.assert_array_equal(seen[agent], row["observations"][player])
            assert paid[agent] == row["rewards"][player]
            assert {**infos[agent].get("players", {})}.keys() == row["infos"][player].keys()
            for key, value in row["infos"][player].items():
                np.testing.assert_array_equal(infos[agent]["players"][key], value)
        for flags, name in ((terminateds, "terminated"), (truncateds, "truncated")):
            assert flags == dict.fromkeys([*agents, "__all__"], row[name])
        assert infos["__common__"].keys() == row["common"].keys()
        for key, value in row["common"].items():
            np.testing.assert_array_equal(infos["__common__"][key], value)


@pytest.mark.parametrize("task", GAMES)
def test_one_player_acts(task, make_pool):
    """All players are observed and rewarded; the one whose turn it is acts, by the mask of the game."""
    env, game, rng = make_pool(task), BareGame(task), np.random.default_rng(0)
    env.reset()
    game.reset()
    ends, turns = 0, set[tuple[str, ...]]()
    for _ in range(150):
        for env_id, (acting, masks) in enumerate(zip(env.acting, env.action_masks)):
            assert acting == ([] if game.over(env_id) else [game.turn(env_id)])
            assert [*masks] == acting
            for agent in acting:
                np.testing.assert_array_equal(masks[agent], game.rows[env_id]["common"]["legal_action_mask"])
                assert masks[agent].dtype == np.bool_
            turns.add(tuple(acting))
        actions = game.legal_actions(rng)
        # Actions of players who do not act are ignored, as are all where an episode begins.
        acting = env.acting
        given = [{a: actions[i] if a in acting[i] else 0 for a in env.possible_agents} for i in range(NUM_ENVS)]
        results = env.step(given)
        game.step(np.array(actions, np.int32))
        assert_equal(results, game)
        space = env.observation_space["agent_0"]
        assert all(space.contains(seen["agent_0"]) and seen["agent_0"].dtype == space.dtype for seen in results[0])
        ends += sum(map(game.over, range(NUM_ENVS)))
    assert ends > 0 or task == "Backgammon-v1"  # which takes longer
    assert turns - {()} == {(agent,) for agent in env.possible_agents}


@pytest.mark.parametrize("task", ["TicTacToe-v1", "SparrowMahjong-v1"])
def test_turns_as_arrays(task, make_pool):
    vec, game, rng = StackedVecEnv(make_pool(task)), BareGame(task), np.random.default_rng(0)
    observations, _ = vec.reset()
    game.reset()
    ends = 0
    for _ in range(60):
        over = np.array([*map(game.over, range(NUM_ENVS))])
        expected = np.array([[game.turn(i) == agent for agent in vec.agents] for i in range(NUM_ENVS)]) & ~over[:, None]
        np.testing.assert_array_equal(vec.acting, expected)
        np.testing.assert_array_equal(observations, np.stack([row["observations"] for row in game.rows]))
        for env_id, player in np.argwhere(vec.acting):
            mask = game.rows[env_id]["common"]["legal_action_mask"]
            np.testing.assert_array_equal(vec.action_masks[env_id, player], mask)
        assert vec.action_masks[~vec.acting].all()
        actions = game.legal_actions(rng)
        observations, rewards, *_ = vec.step(np.where(vec.acting, np.array(actions)[:, None], 0))
        game.step(np.array(actions, np.int32))
        np.testing.assert_array_equal(rewards, np.stack([row["rewards"] for row in game.rows]))
        over = np.array([*map(game.over, range(NUM_ENVS))])
        np.testing.assert_array_equal(vec.done, over)
        for env_id in np.flatnonzero(over):
            np.testing.assert_array_equal(vec.final_observations[env_id], game.rows[env_id]["observations"])
        ends += over.sum()
    assert ends > 0


def test_random_actions_are_legal(make_pool):
    """An illegal move would end a game before the fifth."""
    env = make_pool("TicTacToe-v1")
    env.reset()
    lengths = []
    for _ in range(100):
        env.step(env.sample_actions())
        lengths += [episode.length for episode in env.finished_episodes]
    assert min(lengths) >= 5
    assert max(lengths) <= 9


def test_one_player_with_a_mask(make_pool):
    env, game = make_pool("Play2048-v1"), envpool.make_gymnasium("Play2048-v1", num_envs=NUM_ENVS, seed=SEED)
    env.reset()
    _, info = game.reset()
    forbidden = 0
    for _ in range(100):
        actions = np.argmax(info["legal_action_mask"], axis=1).astype(np.int32)
        observations, _, _, _, infos = env.step([{"agent_0": action} for action in actions])
        seen, _, terminated, _, info = game.step(actions)
        for env_id, masks in enumerate(env.action_masks):
            np.testing.assert_array_equal(observations[env_id]["agent_0"], seen[env_id])
            legal = info["legal_action_mask"][env_id]
            np.testing.assert_array_equal(infos[env_id]["agent_0"]["legal_action_mask"], legal)
            if not terminated[env_id]:
                np.testing.assert_array_equal(masks["agent_0"], legal)
        forbidden += (~info["legal_action_mask"]).sum()
    assert forbidden > 0


def test_two_players_act_at_once(make_pool):
    task = "IntersectionMultiAgent-v1"
    env, game, rng = make_pool(task), BareGame(task), np.random.default_rng(0)
    env.reset()
    game.reset()
    ends = 0
    for _ in range(40):
        over = [*map(game.over, range(NUM_ENVS))]
        assert [*env.acting] == [[] if ended else ["agent_0", "agent_1"] for ended in over]
        actions = rng.integers(3, size=(NUM_ENVS, 2)).astype(np.int32)
        results = env.step([dict(zip(env.possible_agents, of_env)) for of_env in actions])
        env_ids = np.arange(NUM_ENVS, dtype=np.int32)
        game.step({"env_id": env_ids, "players": {"env_id": np.repeat(env_ids, 2), "action": actions.reshape(-1)}})
        for row in game.rows:
            if row["common"]["elapsed_step"] == 0:
                row["rewards"][:] = 0.0  # of a first observation
        assert_equal(results, game)
        ends += sum(map(game.over, range(NUM_ENVS)))
    assert ends > NUM_ENVS


def test_football(make_pool):
    task = "gfootball/academy_empty_goal_close-v1"
    env, pool = make_pool(task, num_envs=2, max_episode_steps=15), envpool.make_gymnasium(
        task, num_envs=2, seed=SEED, max_episode_steps=15
    )  # fmt: skip
    env.reset()
    pool.reset()
    ends = 0
    for _ in range(40):
        results, its = env.step([{"agent_0": 5}] * 2), pool.step(np.full(2, 5, np.int32))
        for env_id in range(2):
            np.testing.assert_array_equal(results[0][env_id]["agent_0"], its[0][env_id])
            assert results[1][env_id]["agent_0"] == its[1][env_id]
            flags = results[2][env_id]["__all__"], results[3][env_id]["__all__"]
            assert flags == (its[2][env_id], its[3][env_id])
            np.testing.assert_array_equal(results[4][env_id]["agent_0"]["score"], its[4]["score"][env_id])
        ends += (its[2] | its[3]).sum()
    assert ends >= 2


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1])
def test_new_seeds(batch_size, make_pool):
    """A seed for `reset` makes the pool again: what follows is what a new pool does."""
    env = make_pool(seed=1, batch_size=batch_size)
    env.reset()
    env.step([{"agent_0": 1}] * NUM_ENVS)
    for seed, expected in ((20, range(20, 25)), ([4, 9, 4, 2, 2**31 - 1], [4, 9, 4, 2, 2**31 - 1])):
        pool = envpool.make_gymnasium("CartPole-v1", num_envs=NUM_ENVS, seed=[*expected])
        observations, _ = env.reset(seed=seed)
        assert env.seed() == (*expected,)
        np.testing.assert_array_equal([seen["agent_0"] for seen in observations], pool.reset()[0])
        observations = env.step([{"agent_0": 1}] * NUM_ENVS)[0]
        its = pool.step(np.ones(NUM_ENVS, np.int32))
        np.testing.assert_array_equal([seen["agent_0"] for seen in observations], its[0])
    draws = env.sample_actions()
    env.reset(seed=20)
    env.reset(seed=[4, 9, 4, 2, 2**31 - 1])
    assert env.sample_actions() == draws


def test_new_seeds_through_a_facade(make_pool):
    vec = StackedVecEnv(make_pool())
    first, _ = vec.reset(seed=3)
    vec.step(np.ones((NUM_ENVS, 1), int))
    again, _ = vec.reset(seed=3)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(vec.reset(seed=4)[0][:-1], first[1:])


def test_refused_seeds(make_pool):
    env = make_pool()
    env.reset()
    texts = "EnvPool's CartPole-v1 needs a seed from 0 to 2", "expected one seed for each of 5"
    for seed, text in zip((2**31 - 3, [1]), texts):
        with pytest.raises(ValueError, match=text):
            env.reset(seed=seed)
    with pytest.raises(ValueError, match=r"seed=3 for environments \[1\], but these .* seeded all at once: reset all"):
        env.reset(seed=3, env_ids=[1])
    assert env.seed() == (*range(SEED, SEED + NUM_ENVS),)


# -- existing pools, names, repeated actions ---------------------------------------------------------------------------


def test_existing_pool(make_pool):
    pools = [envpool.make_gymnasium("Pendulum-v1", num_envs=3, seed=[5, 1, 8]) for _ in range(2)]
    env = make_pool(pools[0])
    assert (env.num_envs, env.seed()) == (3, (5, 1, 8))
    assert repr(env).startswith("ParallelEnv(EnvPool's Pendulum, num_envs=3, batch_size=3, agents=['agent_0']")
    np.testing.assert_array_equal([seen["agent_0"] for seen in env.reset()[0]], pools[1].reset()[0])
    actions = np.ones((3, 1), np.float32)
    results, its = env.step([{"agent_0": action} for action in actions]), pools[1].step(actions)
    np.testing.assert_array_equal([seen["agent_0"] for seen in results[0]], its[0])
    with pytest.raises(ValueError, match="seed=1, but these environments are seeded only once"):
        env.reset(seed=1)
    assert make_pool(envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=6)).seed() == (6, 7, 8)


def test_what_is_no_pool():
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=2)
    for argument in (
        {"num_envs": 2},
        {"seed": 7},
        {"seed": 42},
        {"seed": None},
        {"frame_skip": 2},
        {"max_episode_steps": 9},
    ):
        with pytest.raises(TypeError, match="task is a pool, which has its arguments already: pass it"):
            ParallelEnv.from_envpool(pool, **argument)
    for other in (gymnasium.make("CartPole-v1"), envpool.make_dm("CartPole-v1", num_envs=2), 3):
        with pytest.raises(TypeError, match=r"expected the name of a task, or a pool made by envpool.make_gymnasium"):
            ParallelEnv.from_envpool(other)
    with pytest.raises(TypeError, match="num_envs is missing: how many environments of 'CartPole-v1'"):
        ParallelEnv.from_envpool("CartPole-v1")


def test_names_of_atari_games(make_pool):
    env, pool = make_pool("ALE/Pong-v5", num_envs=2), envpool.make_gymnasium("Pong-v5", num_envs=2, seed=SEED)
    np.testing.assert_array_equal([seen["agent_0"] for seen in env.reset()[0]], pool.reset()[0])


def test_similar_names():
    with pytest.raises(ValueError, match=r"EnvPool has no task 'TicTacTo-v1'; .*; similar tasks are TicTacToe-v1"):
        ParallelEnv.from_envpool("TicTacTo-v1", 2)
    with pytest.raises(ValueError, match=r"EnvPool has no task 'ALE/Pongg-v5'; .*; similar tasks are Pong-v5"):
        make("envpool:ALE/Pongg-v5")


@pytest.mark.parametrize("times", [1, 3])
def test_repeated_actions(times, make_pool):
    """As loops over single environments of the bare pool, whose ends cut repetitions short."""
    env, vec = make_pool(frame_skip=times), PettingZooVecEnv(make_pool(frame_skip=times))
    pools = [envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=SEED + i) for i in range(NUM_ENVS)]
    for each in (env, vec, *pools):
        each.reset()
    rng, over, ends = np.random.default_rng(0), [False] * NUM_ENVS, 0
    for moment in range(40):
        actions = rng.integers(2, size=NUM_ENVS)
        ids = [*range(NUM_ENVS)] if moment % 5 else [3, 0]
        results = env.step([{"agent_0": action} for action in actions[ids]], ids)
        arrays = vec._stepper.step({"agent_0": actions}, ids)
        for place, env_id in enumerate(ids):
            total, began = 0.0, over[env_id]
            for _ in range(1 if began else times):
                seen, paid, terminated, truncated, _ = pools[env_id].step(actions[[env_id]].astype(np.int32))
                total += paid[0]
                over[env_id] = bool(terminated[0] | truncated[0])
                if over[env_id]:
                    break
            ends += over[env_id]
            np.testing.assert_array_equal(results[0][place]["agent_0"], seen[0])
            assert results[1][place]["agent_0"] == arrays.rewards[env_id, 0] == total
            assert (results[2][place]["__all__"], results[3][place]["__all__"]) == (terminated[0], truncated[0])
            np.testing.assert_array_equal(arrays.observations[0][env_id, 0], seen[0])
            assert env.acting[env_id] == ([] if over[env_id] else ["agent_0"])
    assert ends > NUM_ENVS


def test_frame_skip_of_the_task(make_pool):
    env = make_pool("Pong-v5", num_envs=2, frame_skip=2)
    assert env.get_attr("config")[0]["frame_skip"] == 2


def test_actions_that_cannot_be_repeated(make_pool):
    for task, arguments in (("TicTacToe-v1", {}), ("CartPole-v1", {"batch_size": 2})):
        with pytest.raises(ValueError, match=r"frame_skip=2, but actions of EnvPool's .* repeated only if it has one"):
            make_pool(task, frame_skip=2, **arguments)
    with pytest.raises(ValueError, match="frame_skip must be at least 1"):
        make_pool(frame_skip=0)
