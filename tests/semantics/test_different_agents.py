"""Environments of one pool with different agents: to each of them, the agents of others are never alive."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import Setup
from mpe2 import simple_spread_v3
from pettingzoo.utils import parallel_to_aec
from simulators.teams import Convoy, Foragers, Patrol, PettingZooTeam, Reporting, Team, names

from marl_parallel import EnvError, ParallelEnv, RestartLimitExceeded, Rollout, make
from marl_parallel.adapters import DictEnv, adapt
from marl_parallel.cli.replay import Outcome, replay
from marl_parallel.core.pool.replay_file import read_crash
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, PyMARLConnections, ShareVecEnv, StackedVecEnv
from marl_parallel.wrappers import pad_spaces

pytestmark = pytest.mark.release_independent

TEAMS = [names(0, 1), names(2, 1), names(3)]
EVERYONE = names(0, 1, 2, 3)
SERIAL = Setup("serial", True, 1)
OWN = [names(0, 1), names(1, 2), names(3)]  # in the order of all agents


def constructors(kind: Any = Team, **arguments: Any) -> list[Callable[..., Any]]:
    return [functools.partial(kind, team, 5 + place, **arguments) for place, team in enumerate(TEAMS)]


def test_agents(two_worker_setup, build):
    """In order of first appearance; an agent's space is that of an environment that has it."""
    env = build(constructors(), two_worker_setup)
    assert env.possible_agents == EVERYONE
    assert [env.possible_agents_of(env_id) for env_id in range(3)] == OWN
    assert [*env.observation_space] == [*env.action_space] == EVERYONE
    env.reset()
    assert [*env.acting] == OWN
    assert [[*of_env] for of_env in env.sample_actions()] == OWN
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=str(wrong)):
            env.possible_agents_of(wrong)
    env.possible_agents_of(0).clear()
    assert env.possible_agents_of(0) == names(0, 1)


def test_equal_agents_in_another_order(build):
    """The order is that of environment 0."""
    env = build([functools.partial(Team, team) for team in (names(0, 1), names(1, 0))], SERIAL)
    assert env.possible_agents == env.possible_agents_of(1) == names(0, 1)
    observations, _ = env.reset()
    assert [*observations[1]] == env.acting[1] == names(0, 1)


@pytest.mark.parametrize("kind", [Team, PettingZooTeam])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_arrays(kind, mode, two_worker_setup, build):
    """Rows of agents that an environment does not have are as those of agents that are not alive."""
    plain = ParallelEnv(constructors(kind, dies="agent_1"), mode, 3, backend="serial")
    facade = StackedVecEnv(build(constructors(kind, dies="agent_1"), two_worker_setup, mode, 3))
    stepper = facade.stepper
    has = np.array([[agent in own for agent in EVERYONE] for own in OWN])
    expected, _ = plain.reset()
    arrays = stepper.reset()
    rng = np.random.default_rng(0)
    for _ in range(20):
        seen = stepper.view.by_agent(arrays.observations)
        for column, agent in enumerate(EVERYONE):
            for row in range(3):
                assert arrays.observed[row, column] == (agent in expected[row])
                assert np.array_equal(seen[agent][row], expected[row].get(agent, np.zeros(3)))
        for field in (arrays.alive, arrays.acting, arrays.observed, arrays.took_part, arrays.began, arrays.ended):
            assert not field[~has].any()
        assert [[*acting] for acting in plain.acting] == [
            [agent for agent, acts in zip(EVERYONE, row) if acts] for row in arrays.acting
        ]
        over = [*np.flatnonzero(arrays.terminated | arrays.truncated)] if mode is AutoresetMode.DISABLED else []
        if over:
            expected = [*expected]
            new, _ = plain.reset(env_ids=over)
            for env_id, one in zip(over, new):
                expected[env_id] = one
            arrays = stepper.reset(env_ids=over)
            continue
        actions = {agent: rng.integers(4, size=3) for agent in EVERYONE}
        rows = [{agent: actions[agent][row] for agent in acting} for row, acting in enumerate(plain.acting)]
        expected, rewards, terminateds, truncateds, _ = plain.step(rows)
        arrays = stepper.step(actions)
        for row in range(3):
            assert arrays.terminated[row] == terminateds[row]["__all__"]
            assert arrays.truncated[row] == truncateds[row]["__all__"]
            for column, agent in enumerate(EVERYONE):
                assert arrays.rewards[row, column] == rewards[row].get(agent, 0.0)
    plain.close()


@pytest.mark.parametrize("facade", [GymnasiumVectorEnv, PettingZooVecEnv, ShareVecEnv])
def test_facades_step(facade, build):
    """With rows that are never data."""
    mode = AutoresetMode.DISABLED if facade is PettingZooVecEnv else AutoresetMode.SAME_STEP
    env = facade(build(constructors(PettingZooTeam), SERIAL, mode))
    env.reset()
    for _ in range(4):
        if facade is PettingZooVecEnv:
            results = env.step({agent: np.zeros(3, np.int64) for agent in EVERYONE})
            present = np.array([[bool(results[0][agent][row].any()) for agent in EVERYONE] for row in range(3)])
        elif facade is GymnasiumVectorEnv:
            results = env.step(np.zeros(12, np.int64))
            present = results[4]["present"].reshape(3, 4)
        else:
            results = env.step(np.zeros((3, 4, 1), np.int64))
            present = results[0].reshape(3, 4, -1).any(axis=2)
        assert present.tolist() == [[agent in own for agent in EVERYONE] for own in OWN]


def test_rollouts_and_statistics(build):
    env = StackedVecEnv(build(constructors(), SERIAL, episode_stats=True))
    env.reset()
    arrays = Rollout(env, 12).collect(lambda _: np.zeros((3, 4), np.int64))
    has = np.array([[agent in own for agent in EVERYONE] for own in OWN])
    assert (arrays.acting == has).all()
    assert not arrays.rewards[:, ~has].any()
    while not (finished := env.parallel_env.finished_episodes):
        env.step(np.zeros((3, 4), np.int64))
    assert all([*one.returns] == OWN[one.env_id] for one in finished)


def test_states_that_differ(build):
    env = build(constructors(), SERIAL)
    env.reset()
    assert env.state_space is None
    text = r"no common global state: environment 2 differs from the environments before it in the state space: got Box"
    with pytest.raises(NotImplementedError, match=text):
        env.state()
    with pytest.raises(NotImplementedError, match=text):
        StackedVecEnv(env, with_state=True)


def test_states_that_are_equal(build):
    """Different agents in the same number, so that states have one shape."""
    env = build([functools.partial(Team, team) for team in (names(0, 1), names(2, 3))], SERIAL)
    env.reset()
    env.step([dict.fromkeys(acting, 2) for acting in env.acting])
    assert env.state().tolist() == [[[1.0, 2.0]] * 2] * 2


@pytest.mark.parametrize("mode", AutoresetMode)
def test_saved_states(mode, two_worker_setup, build):
    """They load where the agents are equal, also beside other environments."""
    env = build(constructors(), two_worker_setup, mode, 5)
    env.reset()
    env.step(env.sample_actions())
    states = env.save_state()
    actions = env.sample_actions()
    expected = env.step(actions)
    again = build([*constructors()[2:], *constructors()[:2]], two_worker_setup, mode, 5)
    again.load_state([states[2], *states[:2]])
    results = again.step([actions[2], *actions[:2]])
    assert_same([(*of_envs[1:], of_envs[0]) for of_envs in results], [*map(tuple, expected)], "after load_state")
    with pytest.raises(ValueError, match=r"environment 0: its state has the agents \['agent_0', 'agent_1'\]"):
        again.load_state(states[:1], [0])


class OtherTeam(Team):
    """After a restart, it has one more agent; before, it fails."""

    def __init__(self, agents: list[str], gained: str, restarts: int = 0) -> None:
        super().__init__(agents if not restarts else [*agents, gained])

    def step(self, actions: dict) -> Any:
        raise RuntimeError("an accident")


class WithoutState(OtherTeam):
    def __init__(self, agents: list[str], gained: str = "", restarts: int = 0) -> None:
        super().__init__(agents, gained, restarts if gained else 0)
        del self.state_space


def test_all_agents_after_a_restart(build):
    """Also if its description is then that of the whole pool."""
    teams = [functools.partial(WithoutState, names(2, 0)), functools.partial(WithoutState, names(2), "agent_0")]
    env = build(teams, SERIAL, on_error="restart")
    env.reset()
    with pytest.raises(RestartLimitExceeded, match="differs after its restart in possible_agents"):
        env.step(env.sample_actions())


@pytest.mark.parametrize("gained", ["agent_9", "agent_0"])
def test_other_agents_after_a_restart(gained, two_worker_setup, build):
    """An agent that is new, or that another environment has."""
    other = functools.partial(OtherTeam, names(2), gained)
    env = build([*constructors()[:1], other], two_worker_setup, on_error="restart")
    env.reset()
    text = rf"differs after its restart in possible_agents: got .*'{gained}'\], expected \['agent_2'\]"
    with pytest.raises(RestartLimitExceeded, match=text):
        env.step(env.sample_actions())


class FailingTeam(Team):
    """It fails in the fourth step."""

    def step(self, actions: dict) -> Any:
        if self.time == 3:
            raise RuntimeError("an accident")
        return super().step(actions)


class DyingTeam(Team):
    """Its process ends in the third step of its first instance."""

    def __init__(self, agents: list[str], restarts: int = 0) -> None:
        super().__init__(agents)
        self.is_first = restarts == 0

    def step(self, actions: dict) -> Any:
        if self.is_first and self.time == 2:
            os._exit(3)
        return super().step(actions)


def test_restarts(killable_setup, build):
    """The truncated agents are the environment's own."""
    env = build([*constructors(), functools.partial(DyingTeam, names(1, 3))], killable_setup, on_error="restart")
    env.reset()
    for _ in range(3):
        *_, truncateds, infos = env.step(env.sample_actions())
    assert infos[3]["__common__"]["restarted"]
    assert truncateds[3] == {"agent_1": True, "agent_3": True, "__all__": True}
    assert env.acting[3] == names(1, 3)


class OtherSpace(Team):
    def __init__(self, agents: list[str], kind: str) -> None:
        super().__init__(agents)
        if kind == "observation":
            self.observation_space = spaces.Dict([(agent, spaces.Box(0, 1, (5,))) for agent in agents])
        else:
            self.action_space = spaces.Dict([(agent, spaces.Discrete(6)) for agent in agents])


@pytest.mark.parametrize("kind", ["observation", "action"])
def test_a_common_agent_needs_equal_spaces(kind, build):
    """The error names the environments, the agent, both spaces and the wrapper."""
    other = functools.partial(OtherSpace, names(4, 2), kind)
    text = (
        rf"environment 3 differs from environment 1 in the {kind} space of agent 'agent_2': got .*expected .*pad_spaces"
    )
    with pytest.raises(ValueError, match=text):
        build([*constructors(), other], SERIAL)
    padded = functools.partial(pad_spaces, shape=(7,), num_actions=9)
    env = build([lambda one=one: padded(one()) for one in [*constructors(), other]], SERIAL)
    observations, _ = env.reset()
    assert observations[3]["agent_2"].shape == observations[0]["agent_0"].shape == (7,)
    assert env.action_space["agent_2"] == env.action_space["agent_0"] == spaces.Discrete(9)
    assert env.action_masks[3]["agent_2"].sum() == (6 if kind == "action" else 4)


class Unknown(Team):
    """Its agents are not known beforehand."""

    def __init__(self) -> None:
        super().__init__(names(0))
        self.possible_agents = []
        del self.observation_space, self.action_space


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Unknown, r"environment 3 differs from the environments before it in possible_agents: got \[\], expected"),
        (functools.partial(PettingZooTeam, names(0)), "environment 3 differs .* in rules"),
    ],
)
def test_environments_that_do_not_fit(other, text, build):
    with pytest.raises(ValueError, match=text):
        build([*constructors(), other], SERIAL)


def test_make():
    """Names and keywords of different environments, in turn."""
    with make(Team, env_kwargs=[{"agents": team} for team in TEAMS], num_envs=2) as env:
        assert env.num_envs == 6
        assert [env.possible_agents_of(env_id) for env_id in range(6)] == OWN * 2
    kinds = [functools.partial(Team, names(0)), functools.partial(Team, names(1))]
    with make(kinds, backend="serial", facade="stacked") as env:
        assert env.parallel_env.possible_agents == names(0, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([],), "name is an empty list"),
        ((Team, 1, [{}, 3]), r"env_kwargs\[1\] must be a dict of keywords for each environment's constructor, got 3"),
        ((Team, 1, []), "env_kwargs is an empty list"),
        (([Team, Team], 1, [{}]), "expected one dict in env_kwargs for each of 2 names, got 1"),
        ((["vmas:balance", Team],), "vmas:balance steps its environments by itself"),
    ],
)
def test_make_with_wrong_lists(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(*arguments)


def padded_spread(number: int) -> Any:
    return pad_spaces(parallel_to_aec(simple_spread_v3.parallel_env(N=number, max_cycles=6)), shape=(18,))


ALIKE = {
    "dicts": (Team, TEAMS, {}),
    "dying": (functools.partial(Team, dies="agent_1", returns=True), TEAMS, {}),
    "pettingzoo": (functools.partial(PettingZooTeam, dies="agent_1"), TEAMS, {}),
    "masks": (functools.partial(Reporting, dies="agent_1"), TEAMS, {}),
    "aec": (padded_spread, (2, 1, 3), {}),
    "tuple": (Foragers, (2, 1, 3), {}),
    "pymarl": (Patrol, (2, 1, 3), {"adapter": "pymarl"}),
    "mappo": (Convoy, (2, 1, 3), {"adapter": "mappo"}),
}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", ALIKE)
def test_each_environment_is_as_in_a_pool_of_its_own(kind, mode, setup, build):
    """Of each kind: spaces, results, who acts, and masks."""
    make_one, teams, how = ALIKE[kind]
    made = [functools.partial(make_one, team) for team in teams]
    alone = [ParallelEnv([one], mode, 42 + env_id, backend="serial", **how) for env_id, one in enumerate(made)]
    env = build(made, setup, mode, 42, **how)
    assert [env.possible_agents_of(env_id) for env_id in range(3)] == [
        sorted(one.possible_agents, key=env.possible_agents.index) for one in alone
    ]
    results, expected = env.reset(), [one.reset() for one in alone]
    rng = np.random.default_rng(3)
    for step in range(20):
        for env_id, (one, of_one) in enumerate(zip(alone, expected)):
            assert_same(tuple(part[env_id] for part in results), tuple(part[0] for part in of_one), f"{step}: {env_id}")
            assert {*env.acting[env_id]} == {*one.acting[0]}
            assert_same(env.action_masks[env_id], one.action_masks[0], f"{step}: masks of {env_id}")
        if mode is AutoresetMode.DISABLED and (over := [e for e, one in enumerate(alone) if not one.acting[0]]):
            for env_id in over:
                results, expected[env_id] = env.reset(env_ids=[env_id]), alone[env_id].reset()
                assert_same(tuple(part[0] for part in results), tuple(part[0] for part in expected[env_id]))
        actions = [
            {a: _allowed(rng, masks.get(a)) for a in acting} for acting, masks in zip(env.acting, env.action_masks)
        ]
        results, expected = env.step(actions), [one.step([of_one]) for one, of_one in zip(alone, actions)]
    for one in alone:
        one.close()


def _allowed(rng: np.random.Generator, mask: Any) -> int:
    return int(rng.integers(4)) if mask is None else int(rng.choice(np.flatnonzero(mask)))


def test_joint_actions_are_not_handed_on(build):
    """What on-policy's simulators get from its runner has a row for each agent, which other environments lack."""
    facade = ShareVecEnv(build([functools.partial(Convoy, size) for size in (2, 3)], SERIAL, adapter="mappo"))
    assert facade.parallel_env.stepper.schema.joint_actions == ""
    facade.reset()
    one_hot = np.eye(4)[np.array([[1, 2, 3], [1, 2, 3]])]
    _, _, rewards, dones, _, _ = facade.step(one_hot)
    assert rewards[..., 0].tolist() == [[5, 5, 0], [14, 14, 14]]
    assert dones.tolist() == [[False, False, True], [False] * 3]


def test_pymarl_needs_the_same_agents(build):
    env = build([functools.partial(Patrol, size) for size in (3, 2)], SERIAL, False, "own", adapter="pymarl")
    with pytest.raises(ValueError, match=r"environment 1 has only \['agent_0', 'agent_1'\] of"):
        PyMARLConnections(env)


def per_agent(env: Any) -> Any:
    adapted = adapt(env)
    adapted.state_per_agent = True
    return adapted


def test_states_of_each_agent(build):
    """Equal shapes, but the rows belong to other agents, or to the same in another order."""
    for teams in ((names(0, 1), names(1, 2)), (names(0, 1), names(1, 0))):
        env = build([lambda team=team: per_agent(Team(team)) for team in teams], SERIAL)
        env.reset()
        with pytest.raises(NotImplementedError, match="its first axis is the agents, and environments do not have the"):
            env.state()
    env = build([lambda: per_agent(Team(names(0, 1)))] * 2, SERIAL)
    env.reset()
    assert env.state().shape == (2, 2, 2)


def test_states_of_some(build):
    """Of the same shape, but one has a row for each agent."""
    env = build([lambda: per_agent(Team(names(0, 1))), lambda: Team(names(0, 1))], SERIAL)
    env.reset()
    with pytest.raises(
        NotImplementedError, match=r"environment 1 differs .* in state_per_agent: got False, expected True"
    ):
        env.state()


class Reports(Team):
    """It reports the options of its reset."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = super().reset(seed=seed)
        return observations, {agent: {"options": options} for agent in infos}


class Plain:
    """Its reset takes no options."""

    def __init__(self, agents: list[str]) -> None:
        self.team = Team(agents)
        self.possible_agents = agents
        self.observation_space, self.action_space = self.team.observation_space, self.team.action_space

    def reset(self, seed: int | None = None) -> tuple[dict, dict]:
        return self.team.reset(seed=seed)

    def step(self, actions: dict) -> Any:
        return self.team.step(actions)


@pytest.mark.parametrize("first", [Reports, Plain])
def test_options(first, build):
    """Options for all are for those that take options; others are named if they have some in a list."""
    kinds = [first, Plain if first is Reports else Reports]
    env = build([functools.partial(kind, names(0, 1)) for kind in kinds], SERIAL, "DISABLED")
    without, options = kinds.index(Plain), {"map": 1}
    for call in (env.reset, env.set_reset_options):
        text = rf"environment {without}: options=.* takes no options: pass None for the environments \[{without}\]"
        with pytest.raises(ValueError, match=text):
            call(options=[options, options])
    for passed in (options, [None if kind is Plain else options for kind in kinds]):
        _, infos = env.reset(options=passed)
        assert infos[1 - without]["agent_0"]["options"] == options
    env.set_reset_options({"map": 2})
    assert env.reset()[1][1 - without]["agent_0"]["options"] == {"map": 2}
    for env_id in range(2):
        PettingZooVecEnv(env).single(env_id).reset(options=options)


class AllActions(DictEnv):
    needs_all_actions = True


def test_kinds_that_do_not_fit(build):
    with pytest.raises(ValueError, match=r"environment 1 differs .* in needs_all_actions: got True, .* for each kind"):
        build([lambda: Team(names(0)), lambda: AllActions(Team(names(0)))], SERIAL)


def test_actions_of_agents_that_an_environment_lacks(build):
    """PettingZoo's rules leave them out; with dict rules, they reach the simulator, as those of dead agents do."""
    plain = build(constructors(), SERIAL)
    plain.reset()
    with pytest.raises(EnvError, match="KeyError: 'agent_2'"):
        plain.step([dict.fromkeys(EVERYONE, 1)] * 3)
    env = build(constructors(PettingZooTeam), SERIAL)
    env.reset()
    env.step([dict.fromkeys(EVERYONE, 1)] * 3)
    env.reset()
    with pytest.raises(ValueError, match=r"environment 1.*agent_2"):
        env.step([dict.fromkeys(names(0, 1), 1), dict.fromkeys(names(1), 1), dict.fromkeys(names(3), 1)])


def test_masks_in_arrays(build):
    """Rows of agents that an environment lacks allow all, as those of dead agents; alive ones have their own mask."""
    facade = StackedVecEnv(build([functools.partial(Reporting, team) for team in TEAMS], SERIAL))
    facade.reset()
    masks = facade.stepper.action_masks(EVERYONE).reshape(3, 4, 4)
    for env_id, own in enumerate(OWN):
        reported = facade.parallel_env.action_masks[env_id]
        for place, agent in enumerate(EVERYONE):
            assert masks[env_id, place].tolist() == (reported[agent].tolist() if agent in own else [1] * 4)


def test_single(build):
    """One environment as a PettingZoo environment has its own agents and spaces."""
    env = PettingZooVecEnv(build(constructors(PettingZooTeam), SERIAL, "DISABLED"))
    for env_id, own in enumerate(OWN):
        single = env.single(env_id)
        assert single.possible_agents == [*single.observation_spaces] == [*single.action_spaces] == own
        observations, _ = single.reset()
        assert single.agents == [*observations] == own


class InOrder(Team):
    """What agents get depends on the order of their actions."""

    def step(self, actions: dict) -> Any:
        drawn = {agent: self.rng.random() for agent in actions}
        observations, _, *others = super().step(actions)
        return observations, {agent: drawn.get(agent, 0.0) for agent in observations}, *others


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
def test_agents_in_another_order(mode, setup, build):
    """A simulator gets actions in its own order, whatever the order of all agents is; states load where it differs."""
    alone = ParallelEnv([functools.partial(InOrder, names(2, 1), dies="agent_1")], mode, 43, backend="serial")
    made = [functools.partial(InOrder, team, dies="agent_1") for team in (names(0, 1), names(2, 1))]
    env = build(made, setup, mode)
    other = build(made[::-1], setup, mode)
    assert env.possible_agents_of(1) == other.possible_agents_of(0)[::-1] == names(1, 2)
    results, expected = env.reset(), alone.reset()
    for step in range(12):
        assert_same(tuple(part[1] for part in results), tuple(part[0] for part in expected), f"step {step}")
        if step in (1, 4):  # then one of two is dead
            other.load_state(env.save_state([1]), [0])
            assert other.acting[0] == (names(2, 1) if step == 1 else names(2))
        if mode == "DISABLED" and not env.acting[1]:
            results, expected = env.reset(), alone.reset()
            continue
        actions = [dict.fromkeys(acting, step % 4) for acting in env.acting]
        results, expected = env.step(actions), alone.step(actions[1:])
        if 1 <= step < 6:
            loaded = other.step(actions[1:], env_ids=[0])
            assert_same(tuple(part[0] for part in loaded), tuple(part[0] for part in expected), f"step {step}")
            assert [[*part[0]] for part in loaded[:2]] == [[*part[1]][::-1] for part in results[:2]]
    alone.close()


class Wider(Team):
    """After a restart, its states may be anything."""

    def __init__(self, agents: list[str], restarts: int = 0) -> None:
        super().__init__(agents)
        bound = 9000 if restarts else 1000
        self.state_space = spaces.Box(-bound, bound, (len(agents), 2), np.float64)

    def step(self, actions: dict) -> Any:
        raise RuntimeError("an accident")


def test_wider_states_after_a_restart(build):
    """The bounds of what is returned may be narrower only."""
    env = build([functools.partial(Wider, names(0, 1))] * 2, SERIAL, on_error="restart")
    env.reset()
    with pytest.raises(RestartLimitExceeded, match="differs after its restart in the state space"):
        env.step(env.sample_actions())


SCRIPT = """
import os
from gymnasium import spaces
from marl_parallel import ParallelEnv

class Named:
    def __init__(self, name):
        self.name = name
    def __eq__(self, other):
        return type(other) is Named and other.name == self.name
    def __hash__(self):
        return hash(self.name)

class Duel:
    def __init__(self, letters, restarts=0):
        self.possible_agents = [Named(letter) for letter in letters]
        self.is_first = restarts == 0
        of_each = spaces.Box(0, 9, (2,)), spaces.Discrete(3)
        self.observation_space, self.action_space = (dict.fromkeys(self.possible_agents, one) for one in of_each)
    def seen(self):
        return {agent: self.observation_space[agent].low for agent in self.possible_agents}
    def reset(self, seed=None, options=None):
        self.time = 0
        return self.seen(), {}
    def step(self, actions):
        self.time += 1
        if self.is_first and self.time == 2:
            os._exit(3)
        return self.seen(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": False}, {}

if __name__ == "__main__":
    duels = [lambda: Duel("ab", 1), lambda restarts: Duel("bc", restarts)]
    with ParallelEnv(duels, num_workers=2, on_error="restart") as env:
        env.reset()
        for _ in range(4):
            env.step(env.sample_actions())
        print([agent.name for agent in env.possible_agents_of(1)], env.stats().restarts)
"""


def test_agents_of_a_class_of_the_script(tmp_path):
    """A new worker knows the class only once it has received a constructor."""
    (tmp_path / "program.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "['b', 'c'] 1", done.stdout


def test_replay(tmp_path, build):
    """The file is of one environment, which has its own agents there."""
    how = {"replay": 20, "replay_dir": tmp_path}
    env = build([*constructors()[:1], functools.partial(FailingTeam, names(2, 1))], SERIAL, **how)
    env.reset()
    for _ in range(3):
        env.step([{agent: 1 + place for place, agent in enumerate(acting)} for acting in env.acting])
    with pytest.raises(EnvError, match="an accident"):
        env.step([dict.fromkeys(acting, 2) for acting in env.acting])
    (path,) = tmp_path.iterdir()
    crash = read_crash(path)
    assert (crash.env_id, crash.step) == (1, 4)
    assert replay(path, debugger=False, until=None, timeout=None, in_process=True) is Outcome.SAME_STEP


@pytest.mark.parametrize(
    ("one", "other", "padded"),
    [
        (spaces.Discrete(3), spaces.Discrete(5), True),
        (spaces.Discrete(3), spaces.Discrete(5, start=1), False),
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,)), False),
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 2, (2,)), False),
    ],
)
def test_advice_about_actions(one, other, padded, build):
    """It names `pad_spaces` only if that helps."""

    def team(space: Any) -> Any:
        made = Team(names(0))
        made.action_space = spaces.Dict(agent_0=space)
        return made

    with pytest.raises(ValueError, match="in the action space of agent 'agent_0'") as caught:
        build([lambda: team(one), lambda: team(other)], SERIAL)
    assert ("pad_spaces pads them, with num_actions=" in str(caught.value)) == padded


class Masked(Team):
    """Observations have masks."""

    def __init__(self, agents: list[str], size: int, choices: int) -> None:
        super().__init__(agents)
        seen = spaces.Dict(sees=spaces.Box(0, 9, (size,), np.float32), action_mask=spaces.MultiBinary(choices))
        self.observation_space = spaces.Dict(dict.fromkeys(agents, seen))
        self.action_space = spaces.Dict(dict.fromkeys(agents, spaces.Discrete(choices)))

    def seen(self) -> dict:
        of_agent = self.observation_space["agent_0"]
        return {
            agent: {key: np.ones(space.shape, space.dtype) for key, space in of_agent.items()} for agent in self.alive()
        }


def test_padded_masks_in_observations(build):
    """Also where an environment has the padded sizes by itself."""
    made = [functools.partial(Masked, names(0, 1), 2, 3), functools.partial(Masked, names(0, 1, 2), 4, 5)]
    with pytest.raises(ValueError, match=r"pad_spaces pads them, with shape= and num_actions="):
        build(made, SERIAL)
    pad = functools.partial(pad_spaces, shape={"sees": (4,)}, num_actions=5)
    env = build([lambda one=one: pad(one()) for one in made], SERIAL)
    observations, _ = env.reset()
    assert observations[0]["agent_0"]["action_mask"].tolist() == [1, 1, 1, 0, 0]
    assert observations[0]["agent_0"]["sees"].tolist() == [1, 1, 0, 0]
    assert env.action_masks[1]["agent_2"].tolist() == [True] * 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"shape": 5}, "shape must be a sequence of integers, or a dict of such sequences, got 5"),
        ({"shape": (-1,)}, "each size of shape must not be negative, got -1"),
        ({"shape": (4, 4)}, r"shape=\(4, 4\) does not fit the observation space Box"),
        ({"shape": {"seen": (4,)}}, "does not fit the observation space Box"),
        ({"num_actions": -1}, "num_actions must not be negative"),
    ],
)
def test_pad_spaces_with_wrong_sizes(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        pad_spaces(Team(names(0, 1)), **arguments)
