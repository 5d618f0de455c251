"""Native simulators that step many environments: a game in EnvPool's layout, and an arena in arrays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from simulators.envpool_players import ACTIONS, PLAYERS, Game, Pool
from simulators.native_arena import Arena

from marl_parallel import EnvError, ParallelEnv, Rollout
from marl_parallel.sources.envpool import EnvPool
from marl_parallel.sources.native import Received
from marl_parallel.vector import ArrayStepper, GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv

COPIES = 4


@pytest.fixture
def make_game() -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a game."""
    envs: list[ParallelEnv] = []

    def make(num_envs: int = COPIES, batch_size: int | None = None, named: bool = True) -> ParallelEnv:
        simulator = EnvPool(Pool(num_envs, batch_size, named), [*range(num_envs)], "a pool")
        envs.append(ParallelEnv.from_native(simulator))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


class ExpectedDicts:
    """The expected dicts of one environment, computed from the game alone."""

    def __init__(self, env_id: int, named: bool) -> None:
        self.copy, self.named = Game(env_id), named
        self.flagged: set[str] = set()

    def names(self) -> dict[str, int]:
        there = self.copy.players()
        return {f"agent_{player if self.named else place}": player for place, player in enumerate(there)}

    def acting(self) -> list[str]:
        return [] if self.copy.over else [agent for agent in self.names() if agent not in self.flagged]

    def reset(self) -> tuple[dict[Any, Any], ...]:
        self.copy.reset()
        self.flagged = set()
        return self.dicts()

    def step(self, actions: dict[str, int]) -> tuple[dict[Any, Any], ...]:
        if self.copy.over:
            return self.reset()
        self.copy.step({player: actions.get(agent, 0) for agent, player in self.names().items()})
        return self.dicts()

    def dicts(self) -> tuple[dict[Any, Any], ...]:
        copy, names, rows = self.copy, self.names(), self.copy.players()
        ended = copy.over and not copy.truncated
        terminateds = {a: ended or (self.named and rows[p].leaves and not copy.truncated) for a, p in names.items()}
        self.flagged |= {agent for agent, flag in terminateds.items() if flag}
        infos: dict[Any, Any] = {agent: {} for agent in names}
        if self.named:
            infos = {agent: {"players": {"id": p, "done": rows[p].leaves}} for agent, p in names.items()}
        return (
            {agent: rows[player].seen.tolist() for agent, player in names.items()},
            {agent: rows[player].reward if copy.moment else 0.0 for agent, player in names.items()},
            {**terminateds, "__all__": ended},
            {**dict.fromkeys(names, copy.truncated), "__all__": copy.truncated},
            {**infos, "__common__": {"score": 10 * copy.moment, "elapsed_step": copy.moment}},
        )


def plain(dicts: tuple[dict[Any, Any], ...]) -> tuple[dict[Any, Any], ...]:
    """With lists in place of arrays; values are compared as numbers."""
    return ({agent: seen.tolist() for agent, seen in dicts[0].items()}, *dicts[1:])


def drawn(rng: np.random.Generator, env: ParallelEnv) -> list[dict[Any, int]]:
    return [{agent: int(rng.integers(ACTIONS)) for agent in acting} for acting in env.acting]


@pytest.mark.parametrize("named", [True, False])
def test_players_come_and_go(named, make_game):
    env, rng = make_game(named=named), np.random.default_rng(0)
    expected_dicts = [ExpectedDicts(env_id, named) for env_id in range(COPIES)]
    observations, infos = env.reset()
    for own, seen, info in zip(expected_dicts, observations, infos):
        first = own.reset()
        assert (plain((seen,))[0], info) == (first[0], first[4])
    sizes = set()
    for _ in range(30):
        assert [*env.acting] == [own.acting() for own in expected_dicts]
        actions = drawn(rng, env)
        for own, dicts, acts in zip(expected_dicts, zip(*env.step(actions)), actions):
            assert plain(dicts) == own.step(acts)
            sizes.add(len(dicts[0]))
    assert sizes == {0, 1, 2, 3}
    assert env.stats().resets > COPIES
    assert env.stats().steps + env.stats().resets == 31 * COPIES


def test_finished_episodes_of_players(make_game):
    """Sums over the expected dicts; the same with arrays."""
    env, vec, rng = make_game(), PettingZooVecEnv(make_game()), np.random.default_rng(0)
    games = [ExpectedDicts(env_id, True) for env_id in range(COPIES)]
    env.reset()
    vec.reset()
    sums = []
    for game in games:
        game.reset()
        sums.append((dict[str, float](), dict[str, int]()))
    ended = 0
    for _ in range(40):
        actions = drawn(rng, env)
        env.step(actions)
        vec.step({agent: np.array([own.get(agent, 0) for own in actions]) for agent in vec.possible_agents})
        expected = []
        for env_id, (game, (returns, lengths)) in enumerate(zip(games, sums)):
            _, rewards, terminateds, truncateds, _ = game.step(actions[env_id])
            if game.copy.moment == 0:
                returns.clear()
                lengths.clear()
                continue
            for agent, reward in rewards.items():
                returns[agent] = returns.get(agent, 0.0) + reward
                lengths[agent] = lengths.get(agent, 0) + 1
            flags = terminateds["__all__"], truncateds["__all__"]
            if any(flags):
                expected.append((env_id, {**returns}, {**lengths}, game.copy.moment, *flags))
        ended += len(expected)
        assert [*env.finished_episodes] == [*vec.parallel_env.finished_episodes] == expected
    assert ended > COPIES


def test_players_in_batches(make_game):
    env, rng = make_game(6, batch_size=2), np.random.default_rng(0)
    expected_dicts = [ExpectedDicts(env_id, True) for env_id in range(6)]
    env.reset_async()
    expected = {own.copy.env_id: own.reset() for own in expected_dicts}
    for _ in range(60):
        batch = env.recv(min_envs=env.batch_size)
        assert len(batch.env_ids) == 2
        for env_id, *dicts in zip(*batch):
            assert plain(tuple(dicts)) == expected[env_id]
        actions = drawn(rng, env)
        env.send({env_id: actions[env_id] for env_id in batch.env_ids})
        expected |= {env_id: expected_dicts[env_id].step(actions[env_id]) for env_id in batch.env_ids}
        assert len(env.pending) == 6
    assert {*env.recv().env_ids} == {*range(6)}
    assert env.pending == ()


def test_players_as_arrays(make_game):
    """The arrays equal the dicts."""
    env, vec, rng = make_game(), PettingZooVecEnv(make_game()), np.random.default_rng(0)
    env.reset()
    arrays = vec.reset()
    assert arrays[1]["__common__"]["elapsed_step"].tolist() == [0] * COPIES
    for _ in range(30):
        assert vec.agents == [a for a in vec.possible_agents if any(a in own for own in env.stepper.transitions.alive)]
        actions = drawn(rng, env)
        stacked = {a: np.array([own.get(a, 0) for own in actions]) for a in vec.possible_agents}
        dicts, arrays = env.step(actions), vec.step(stacked)
        assert vec.over.tolist() == [own["__all__"] or also["__all__"] for own, also in zip(dicts[2], dicts[3])]
        for agent in vec.possible_agents:
            there = vec.present[agent]
            assert there.tolist() == [agent in seen for seen in dicts[0]]
            assert vec.acting[agent].tolist() == [agent in acting for acting in env.acting]
            for values, of_agent in zip(dicts[1:4], (part[agent] for part in arrays[1:4])):
                assert of_agent.tolist() == [own.get(agent, 0) for own in values]
            for env_id, seen in enumerate(dicts[0]):
                assert np.array_equal(arrays[0][agent][env_id], seen.get(agent, np.zeros(4)))
            expected_dicts = arrays[4][agent]["players"]
            assert expected_dicts["_id"].tolist() == there.tolist()
            assert expected_dicts["id"][there].tolist() == [
                own[agent]["players"]["id"] for own in dicts[4] if agent in own
            ]


def test_players_as_rows(make_game):
    env = GymnasiumVectorEnv(make_game())
    observations, infos = env.reset()
    assert (observations.shape, env.num_envs) == ((COPIES * PLAYERS, 4), COPIES * PLAYERS)
    assert infos["present"].tolist() == [True, False, True] * COPIES
    assert infos["players"]["id"][infos["_players"]].tolist() == [0, 2] * COPIES
    for moment in range(1, 4):
        observations, _, _, _, infos = env.step(np.full(COPIES * PLAYERS, moment))
        assert infos["__common__"]["score"].tolist() == [10 * moment] * (COPIES * PLAYERS)
        assert (observations[:, 2] == moment * infos["present"]).all()


def test_stacked_players_and_their_rollout(make_game):
    """What a rollout stores, and the marks of `StackedVecEnv`, equal the dicts."""
    env, vec, rng = make_game(), StackedVecEnv(make_game()), np.random.default_rng(0)
    rollout = Rollout(vec, 10)
    env.reset()
    rollout.reset()
    ends = 0
    for step in range(30):
        actions = drawn(rng, env)
        dicts = env.step(actions)
        rollout.step(np.array([[own.get(agent, 0) for agent in vec.agents] for own in actions]))
        data, now = rollout.arrays, step % 10
        for env_id, (seen, paid, terminateds, truncateds, _) in enumerate(zip(*dicts)):
            of_all = terminateds["__all__"], truncateds["__all__"]
            assert (data.terminated[now, env_id], data.truncated[now, env_id]) == of_all
            assert data.done[now, env_id] == vec.done[env_id] == any(of_all)
            ends += any(of_all)
            for place, agent in enumerate(vec.agents):
                of_agent, following = (now, env_id, place), (now + 1, env_id, place)
                assert data.present[of_agent] == (agent in paid)
                assert data.rewards[of_agent] == paid.get(agent, 0.0)
                assert data.terminations[of_agent] == terminateds.get(agent, False)
                assert data.truncations[of_agent] == truncateds.get(agent, False)
                assert data.observed[following] == vec.present_next[env_id, place] == (agent in seen)
                assert data.acting[following] == vec.acting[env_id, place] == (agent in env.acting[env_id])
                assert data.observations[following].tolist() == [*seen.get(agent, np.zeros(4))]
                if any(of_all) and agent in seen:
                    assert data.final_observations[of_agent].tolist() == [*seen[agent]]
    assert ends > COPIES


# -- all in arrays -----------------------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[ParallelEnv]:
    with ParallelEnv.from_native(Arena(3)) as env:
        yield env


class Counted(ParallelEnv):
    """Adds an attribute to each object."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.steps_seen = 0


def test_from_native_makes_objects_of_subclasses_as_any_other():
    with Counted.from_native(Arena(3)) as env:
        env.reset()
        assert (env.steps_seen, env.plan) == (0, None)


def test_groups_and_forms(arena):
    """Agents with different spaces and spaces of several parts; some environments stepped, some not."""
    observations, _ = arena.reset()
    assert observations[1] == {"scout": {"at": 1, "seen": 0}, "tank_0": (1.0,), "tank_1": (1.0,)}
    actions = {"scout": {"go": 2, "look": np.ones(2)}, "tank_0": 1, "tank_1": 3}
    expected_dicts = arena.step([actions] * 2, env_ids=[2, 0])
    assert expected_dicts[0] == tuple(
        {"scout": {"at": n, "seen": 2}, "tank_0": (n + 1,), "tank_1": (n + 3,)} for n in (2, 0)
    )
    assert expected_dicts[1][0] == {"scout": 4.0, "tank_0": 1.0, "tank_1": 3.0}
    assert arena.step([actions], env_ids=[1])[0][0]["tank_1"] == (4.0,)
    assert arena.stepper.transitions.over == [False] * 3


def test_groups_and_forms_as_arrays(arena):
    env = PettingZooVecEnv(arena)
    env.reset()
    actions = {
        "scout": {"go": np.array([0, 1, 2]), "look": np.ones((3, 2))},
        "tank_0": np.array([1, 1, 1]),
        "tank_1": np.array([2, 2, 2]),
    }
    observations, rewards, *_ = env.step(actions)
    assert observations["scout"]["at"].tolist() == [0, 1, 2]
    assert observations["scout"]["at"].dtype == env.observation_space("scout")["at"].dtype
    assert observations["tank_1"][0].tolist() == [2, 3, 4]
    assert rewards["scout"].tolist() == [2, 3, 4]
    observations, _ = env.reset(env_ids=[1])
    assert observations["tank_1"][0].tolist() == [2, 1, 4]
    (tanks, _), rewards, *_ = env._stepper.step(actions | {"tank_1": np.array([0, 1, 3])}, [2, 0, 1])
    assert tanks[0][:, 1].tolist() == [2, 2, 7]
    assert rewards[:, env.possible_agents.index("tank_1")].tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match=r"actions of agent 'scout': expected a dict with the keys \['go', 'look'\]"):
        env.step(actions | {"scout": np.zeros(3)})
    with pytest.raises(ValueError, match=r"actions of agent 'tank_0': expected an array of shape \(3,\)"):
        env.step(actions | {"tank_0": np.zeros((3, 1), int)})


def test_end_of_an_episode_and_next_step(arena):
    arena.reset()
    actions = [{"scout": {"go": 0, "look": np.zeros(2)}, "tank_0": 1, "tank_1": 1}] * 3
    for _ in range(Arena.LENGTH):
        _, _, terminateds, *_ = arena.step(actions)
    assert [own["__all__"] for own in terminateds] == [True] * 3
    assert arena.acting == ([], [], [])
    seen, _ = arena.reset(env_ids=[1])
    assert seen[0]["tank_0"] == (1.0,)
    observations, rewards, terminateds, *_ = arena.step([{}, actions[1], "nobody looks at it"])
    assert [own["tank_0"][0] for own in observations] == [0.0, 2.0, 2.0]
    assert [own["tank_0"] for own in rewards] == [0.0, 1.0, 0.0]
    assert not any(own["__all__"] for own in terminateds)


# -- unsupported calls -------------------------------------------------------------------------------------------------


def test_public_members(make_game):
    env = make_game(6, batch_size=2)
    assert isinstance(env, ParallelEnv)
    assert (len(env), env.num_envs, env.batch_size, env.num_workers) == (6, 6, 2, 1)
    assert env.metadata == {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
    assert (env.possible_agents, env.seed(), env.pending) == (["agent_0", "agent_1", "agent_2"], (*range(6),), ())
    assert (env.render_mode, env.render(), env.state_space) == (None, None, None)
    assert env.get_attr("named") == (True,) * 6
    env.reset()
    assert env.seed() == (*range(6),)


@pytest.mark.parametrize(
    ("ask", "kind", "text"),
    [
        (lambda env: env.reset(seed=1), ValueError, "seed=1, but these environments are seeded only once"),
        (lambda env: env.reset_async(seed=[1] * 6), ValueError, "are seeded only once, when they are made"),
        (lambda env: env.reset(options={"a": 1}), ValueError, "takes no options"),
        (
            lambda env: env.step([{"agent_0": 1, "agent_2": 1}] * 3, [0, 1, 2]),
            ValueError,
            "step of 3 environments, but a pool returns",
        ),
        (lambda env: env.reset(env_ids=[1]), ValueError, "reset of 1 environments, but a pool returns batch_size=2"),
        (lambda env: env.step([{}] * 6), ValueError, "environment 0: no action for agent 'agent_0'"),
        (lambda env: env.step([3] * 6), TypeError, "environment 0: expected a dict of actions"),
        (lambda env: env.step([{"agent_0": 0.5, "agent_2": 1}] * 6), ValueError, "environment 0: the action of agent"),
        (
            lambda env: env.call(len),
            TypeError,
            "the environments of a pool share one object, so no function can be called with each of them",
        ),
        (lambda env: env.call("_recv"), AttributeError, "have no methods of their own"),
        (lambda env: env.get_attr("nothing"), AttributeError, "a pool has no attribute 'nothing'"),
        (lambda env: env.set_attr("named", False), AttributeError, "share all attributes, so none can be set"),
        (lambda env: env.state(), NotImplementedError, "no global state"),
        (lambda env: env.start_trace("trace.json"), NotImplementedError, "a pool keeps no timeline"),
        (lambda env: env.recv(), NoAsyncCallError, "nothing is in flight"),
    ],
)
def test_clear_error_that_closes_nothing(ask, kind, text, make_game):
    env = make_game(6, batch_size=2)
    env.reset()
    with pytest.raises(kind, match=text):
        ask(env)
    assert len(env.step([dict.fromkeys(acting, 1) for acting in env.acting])[0]) == 6


def test_recv_returns_batches_of_the_simulator(make_game):
    env = make_game(6, batch_size=4)
    env.reset_async()
    for number in (1, 5, 6, 0, None):
        with pytest.raises(ValueError, match=r"a pool returns (4|batch_size=4) at a time"):
            env.recv(min_envs=number)
    with pytest.raises(ValueError, match="timeout=2, but a pool cannot stop waiting for results"):
        env.recv(min_envs=4, timeout=2.0)
    first = env.recv(min_envs=4)
    with pytest.raises(ValueError, match="recv of all 2 in flight, but a pool returns batch_size=4"):
        env.recv()
    again = first.env_ids[:2]
    env.send([dict.fromkeys(env.acting[env_id], 1) for env_id in again], env_ids=again)
    assert {*env.recv().env_ids} == {*range(6)} - {*first.env_ids[2:]}


@pytest.mark.parametrize(
    "ask", [lambda env: env.reset(env_ids=[1]), lambda env: env.step([dict.fromkeys(env.acting[1], 1)], [1])]
)
def test_batch_size_with_several_players(ask, make_game):
    """EnvPool waits for whole batches if environments have any number of players."""
    env = make_game()
    env.reset()
    env.send([dict.fromkeys(acting, 1) for acting in env.acting[:2]], [0, 1])
    env.send([dict.fromkeys(acting, 1) for acting in env.acting[2:]], [2, 3])
    assert env.recv().env_ids == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="of 1 environments, but a pool returns batch_size=4 at a time"):
        ask(env)
    assert len(env.step([dict.fromkeys(acting, 1) for acting in env.acting])[0]) == COPIES


def test_facade_needs_full_batches(make_game):
    with pytest.raises(ValueError, match="steps all 6 environments at a time, but this simulator returns 4 at a time"):
        PettingZooVecEnv(make_game(6, batch_size=4))
    PettingZooVecEnv(make_game(6, batch_size=3)).reset()


def test_one_batch_in_flight():
    env = ParallelEnv.from_native(Arena(COPIES))
    with pytest.raises(ResetNeeded):
        env.step([{}] * COPIES)
    env.reset_async(env_ids=[2, 0])
    with pytest.raises(AlreadyPendingCallError, match="one batch in flight at a time"):
        env.reset_async(env_ids=[1])
    with pytest.raises(AlreadyPendingCallError, match=r"environments \[0, 2\] are in flight"):
        env.reset()
    with pytest.raises(ValueError, match="returns all 2 that are in flight"):
        env.recv(min_envs=1)
    assert env.recv().env_ids == (2, 0)
    assert len(env.reset()[0]) == COPIES


class Failing(Arena):
    """Raises or blocks when results are read."""

    def __init__(self) -> None:
        super().__init__(2)
        self.closed = 0
        self.waits, self.may_go = threading.Event(), threading.Event()
        self.act: Callable[[], None] = lambda: None

    def receive(self) -> Any:
        self.act()
        return super().receive()

    def close(self) -> None:
        self.closed += 1

    def wait(self) -> None:
        self.waits.set()
        assert self.may_go.wait(30)


def test_simulator_that_raises():
    simulator = Failing()
    env = ParallelEnv.from_native(simulator)
    env.reset()
    simulator.act = lambda: {}["lost"]
    with pytest.raises(EnvError, match="the arena raised in reset: KeyError: 'lost'") as caught:
        env.reset()
    assert (caught.value.env_ids, caught.value.method, simulator.closed) == ((0, 1), "reset", 1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.original is caught.value.__cause__
    with pytest.raises(ClosedEnvironmentError):
        env.reset()
    env.close()
    assert simulator.closed == 1


def test_ctrl_c_closes():
    simulator = Failing()
    env = ParallelEnv.from_native(simulator)

    def interrupted() -> None:
        raise KeyboardInterrupt

    simulator.act = interrupted
    with pytest.raises(KeyboardInterrupt):
        env.reset()
    assert simulator.closed == 1


def test_ctrl_c_while_the_simulator_closes(monkeypatch):
    """The next call of `close` closes it; one that has ended is not repeated."""
    simulator = Failing()
    env = ParallelEnv.from_native(simulator)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(simulator, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()
    for _ in range(2):
        env.close()
    assert simulator.closed == 1


def test_closing_from_another_thread():
    simulator = Failing()
    env = ParallelEnv.from_native(simulator)
    simulator.act = simulator.wait

    def close() -> None:
        assert simulator.waits.wait(30)
        env.close()
        simulator.may_go.set()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedEnvironmentError, match="closed by another thread"):
        env.reset()
    closing.join()


def test_garbage_collection_closes():
    simulator = Failing()
    ParallelEnv.from_native(simulator)
    assert simulator.closed == 1


def test_closed_in_a_forked_child():
    simulator = Failing()
    with ParallelEnv.from_native(simulator) as env:
        child = os.fork()
        if child == 0:
            env.close()
            as_it_should = simulator.abandoned and not simulator.closed and env.pending == ()
            os._exit(0 if as_it_should else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(env.reset()[0]) == 2


class Respawning(Arena):
    """`tank_0` ends in the first step of an episode, and is observed again in the second, unlike `tank_1`."""

    def receive(self) -> Received:
        received = super().receive()
        present = np.ones_like(received.terminations)
        present[:, 2] = received.elapsed < 2
        ended = received.terminations | (received.elapsed == 1)[:, None] & np.array([True, False, True])
        return received._replace(present=present, terminations=ended & present)


def test_agents_that_come_back():
    with ParallelEnv.from_native(Respawning(2)) as env:
        env.reset()
        assert env.acting == (["tank_0", "scout", "tank_1"],) * 2
        actions = {"tank_0": 1, "scout": {"go": 0, "look": np.zeros(2, np.float32)}, "tank_1": 1}
        for acting in (["scout"], ["tank_0", "scout"]):
            env.step([{agent: actions[agent] for agent in of_env} for of_env in env.acting])
            assert env.acting == (acting,) * 2
            assert env.stepper.transitions.alive == [acting] * 2


# -- wrong answers of a simulator --------------------------------------------------------------------------------------


class Answers(Arena):
    """Returns other environments than those that were sent to, from the second `receive` on."""

    partial = True

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(3)
        self._change, self._answers = change, 0

    def receive(self) -> Received:
        received = super().receive()
        self._answers += 1
        return received if self._answers == 1 else received._replace(env_ids=self._change(received.env_ids))


WRONG_ANSWERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not asked": (lambda ids: np.int32([0, 2]), r"results of environments \[2\], which are not in flight"),
    "twice": (lambda ids: np.int32([0, 0]), r"results of environments \[0\] more than once"),
    "out of range": (lambda ids: np.int32([0, 7]), r"results of environments \[7\], which are not in flight"),
    "negative": (lambda ids: np.int32([-3, 1]), r"results of environments \[-3\], which are not in flight"),
    "none": (lambda ids: np.int32([]), "returned no environment"),
    "too many": (lambda ids: np.int32([0, 1, 1]), r"results of environments \[1\] more than once"),
    "floats": (lambda ids: np.float32([0, 1]), "must be an array of integers with one axis, got an array of float32"),
    "list": (lambda ids: [0, 1], "must be an array of integers with one axis, got list"),
    "two axes": (
        lambda ids: ids[None],
        r"must be an array of integers with one axis, got an array of int32 of shape \(1, 2\)",
    ),
}


class Facade:
    pass


@pytest.mark.parametrize("way", ["dicts", "arrays", "async"])
@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_simulator_that_returns_other_environments(answer, way):
    """The error names the simulator, the call and what is wrong, and everything is closed."""
    change, text = WRONG_ANSWERS[answer]
    env = ParallelEnv.from_native(Answers(change))
    action = {"scout": {"go": 2, "look": np.ones(2)}, "tank_0": 1, "tank_1": 3}
    facade = Facade()
    stepper = ArrayStepper(env, facade, partial_resets=True)
    stepper.reset()

    def asynchronously() -> None:
        env.send([action] * 2, env_ids=[0, 1])
        env.recv()

    call = {
        "dicts": lambda: env.step([action] * 2, env_ids=[0, 1]),
        "arrays": lambda: stepper.reset(env_ids=[0, 1]),
        "async": asynchronously,
    }[way]
    with pytest.raises(EnvError, match=f"the arena raised in (step|reset): .*{text}") as caught:
        call()
    assert caught.value.method in ("step", "reset")
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_ids_of_another_width():
    """Only their values matter."""
    with ParallelEnv.from_native(Answers(lambda ids: ids.astype(np.int64))) as env:
        action = {"scout": {"go": 2, "look": np.ones(2)}, "tank_0": 1, "tank_1": 3}
        env.reset()
        env.step([action] * 3)
        assert [seen["tank_0"] for seen in env.step([action] * 2, env_ids=[2, 0])[0]] == [(4.0,), (2.0,)]
