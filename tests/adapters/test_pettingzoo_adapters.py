"""PettingZoo's parallel, AEC and turn-based environments behind the `MultiAgentEnv` protocol."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper, OrderEnforcingWrapper
from pettingzoo.utils.conversions import aec_to_parallel, parallel_to_aec
from simulators.kinds import BOX, MOVES, OnlyDicts, OnlyDictsAEC, Open, real
from simulators.late_spaces import FailingReset, LateSpaces, NeverSpaces

from marl_parallel.adapters import LookupFailed, adapt
from marl_parallel.adapters.pettingzoo_env import ParallelizableAECEnv


def rollout(adapted, seed, steps):
    """Reset and step with sampled actions; yields each result and the remaining agents."""
    for agent, space in adapted.action_spaces.items():
        space.seed(seed + len(str(agent)))
    adapted.reset(seed=seed)
    for _ in range(steps):
        left = list(adapted.agents_left())
        if not left:
            return
        yield left, adapted.step({agent: adapted.action_spaces[agent].sample() for agent in left})


def test_parallel_env():
    source = real("mpe2.simple_spread_v3", max_cycles=4)
    adapted = adapt(source)
    assert adapted.possible_agents == source.possible_agents
    assert adapted.observation_spaces == {a: source.observation_space(a) for a in source.possible_agents}
    assert adapted.metadata is source.metadata
    assert adapted.reset_keywords == {"seed", "options"}
    results = [result for _, result in rollout(adapted, 3, 10)]
    assert len(results) == 4
    assert all(results[-1][3].values())
    assert not adapted.agents_left()
    assert adapted.state().shape == adapted.state_space.shape
    assert adapted.turn() is None
    adapted.close()


@pytest.mark.parametrize("maker", ["parallel_env", "env"])
def test_terminated_agents_leave_the_list(maker):
    adapted = adapt(real("pettingzoo.sisl.multiwalker_v9", maker=maker, terminate_on_fall=False, remove_on_fall=True))
    counts = [len(left) for left, _ in rollout(adapted, 1, 300)]
    assert counts[0] == 3
    assert min(counts) < 3
    adapted.close()


def test_knights_archers_zombies():
    versions = [f"pettingzoo.butterfly.knights_archers_zombies_v{number}" for number in (11, 10)]
    adapted = adapt(real(*versions, max_cycles=20))
    results = [result for _, result in rollout(adapted, 1, 30)]
    assert len(results) == 20
    assert all(list(result[0]) == adapted.possible_agents for result in results)
    assert all(observation in adapted.observation_spaces[a] for a, observation in results[-1][0].items())
    adapted.close()


def test_aec_in_cycles_equals_the_parallel_env():
    parallel = adapt(real("pettingzoo.sisl.multiwalker_v9"))
    cycles = adapt(real("pettingzoo.sisl.multiwalker_v9", maker="env"))
    assert type(cycles) is ParallelizableAECEnv
    for (left, expected), (left_too, got) in zip(rollout(parallel, 5, 3), rollout(cycles, 5, 3), strict=True):
        assert left == left_too
        assert expected[1:4] == got[1:4]
        for agent in left:
            np.testing.assert_array_equal(expected[0][agent], got[0][agent])


def test_open_ended_env():
    adapted = adapt(Open())
    assert (adapted.possible_agents, adapted.observation_spaces, adapted.agents_left()) == ([], {}, None)
    assert (adapted.metadata, adapted.render_mode, adapted.state_space) == ({}, None, None)
    adapted.reset(seed=1)
    assert adapted.agents_left() == ["late"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrapper", [lambda env: env, BaseParallelWrapper])
def test_spaces_in_dicts_are_read_silently(wrapper):
    adapted = adapt(wrapper(OnlyDicts()))
    assert adapted.observation_spaces == {"late": BOX}
    assert adapted.action_spaces == {"late": MOVES, "later": MOVES}


def test_state_space_that_raises_is_none():
    class Undecided(OnlyDicts):
        @property
        def state_space(self):
            raise NotImplementedError

    assert adapt(Undecided()).state_space is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "wrapper", [lambda env: env, BaseWrapper, lambda env: aec_to_parallel(OrderEnforcingWrapper(env))]
)
def test_aec_spaces_in_dicts_are_read_silently(wrapper):
    adapted = adapt(wrapper(OnlyDictsAEC()))
    assert (adapted.observation_spaces, adapted.action_spaces) == ({"one": BOX}, {"one": MOVES})


def test_spaces_changed_by_a_wrapper():
    class Halved(BaseParallelWrapper):
        def observation_space(self, agent):
            return spaces.Box(-0.5, 0.5, (3,), np.float32)

    assert adapt(BaseParallelWrapper(Halved(OnlyDicts()))).observation_spaces["late"].high[0] == 0.5


def test_aec_conversion_of_a_parallel_env_is_undone():
    parallel = OnlyDicts()
    adapted = adapt(parallel_to_aec(parallel))
    assert type(adapted) is ParallelizableAECEnv
    adapted.reset(seed=0)
    assert adapted.agents_left() is parallel.agents


@pytest.mark.parametrize("name", ["connect_four_v3", "tictactoe_v3"])
def test_turn_based(name):
    source = real(f"pettingzoo.classic.{name}", maker="env")
    adapted = adapt(source)
    observations, infos = adapted.reset(seed=0)
    first, second = adapted.possible_agents
    assert list(observations) == list(infos) == [first, second]
    assert infos[first] == infos[second] == {"active_agent": first}
    assert source.unwrapped.infos == {first: {}, second: {}}
    assert adapted.turn() == first

    turns = []
    while adapted.agents_left():
        turns.append(adapted.turn())
        move = int(np.flatnonzero(observations[adapted.turn()]["action_mask"])[0])
        observations, rewards, terminateds, truncateds, infos = adapted.step({adapted.turn(): move})
        for agent in adapted.agents_left():
            assert infos[agent]["active_agent"] == adapted.turn()
    assert turns[:4] == [first, second, first, second]
    assert all(terminateds.values())
    assert sorted(rewards.values()) == [-1, 1]
    assert not any(truncateds.values())
    assert adapted.turn() is None
    assert adapted.step({}) == ({}, {}, {}, {}, {})
    adapted.close()


def test_spaces_that_reset_makes(parallel):
    """They are known beforehand, so that facades can step the simulator; results are those of a plain loop."""
    adapted = adapt(LateSpaces())
    assert adapted.action_spaces == dict.fromkeys(["red", "blue"], spaces.Discrete(3))
    assert [*adapted.observation_spaces] == ["red", "blue"]
    env, reference = parallel(LateSpaces, auto_reset=True), Reference([LateSpaces] * 3, AutoresetMode.SAME_STEP, 42)
    assert_same(env.reset(), reference.reset())
    over = []
    for number in range(60):
        actions = [{"red": number % 3, "blue": 1}] * 3
        expected = reference.step(actions)
        assert_same(env.step(actions), expected)
        over += [flags["__all__"] for flags in expected[2]]
    assert True in over


@pytest.mark.parametrize("simulator", [NeverSpaces, FailingReset])
def test_spaces_that_raise(simulator):
    """The error is that of the simulator's `observation_space`."""
    with pytest.raises(LookupFailed, match="observation_space") as caught:
        adapt(simulator())
    assert isinstance(caught.value.__cause__, AttributeError)
