"""Tuple environments: recognition, actions, results, and what is refused."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import TUPLE_AGENTS, random_actions
from simulators.tuple_envs import VIEW, Cooperative, Foraging, Intersection, Pathfinding

from marl_parallel import ParallelEnv
from marl_parallel.adapters import AdapterMismatch, Rules, adapt
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.tuple_env import TupleEnv
from marl_parallel.cli.measure import adapted_for_loop, draw_actions, plain_loop

KINDS = [Foraging, Intersection, Cooperative, Pathfinding]


@pytest.mark.parametrize("make", [*KINDS, lambda: TimeLimit(Foraging(), 5), lambda: TimeLimit(Pathfinding(), 5)])
def test_tuple_environments_are_recognised(make):
    adapted = adapt(make())
    assert type(adapted) is TupleEnv
    assert adapted.rules is Rules.DICT
    assert adapted.possible_agents == TUPLE_AGENTS
    assert adapted.observation_spaces == dict.fromkeys(TUPLE_AGENTS, VIEW)
    assert adapted.action_spaces == dict.fromkeys(TUPLE_AGENTS, spaces.Discrete(4))


class Declared(gymnasium.Env):
    """Declares spaces and a number of agents, and cannot be stepped."""

    def __init__(self, seen, acts, number=None):
        self.observation_space, self.action_space = seen, acts
        if number is not None:
            self.num_agents = number


def several(space, number=2):
    return spaces.Tuple([space] * number)


MOVES = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("seen", "acts", "number", "kind"),
    [
        (several(VIEW), several(MOVES), None, TupleEnv),
        (several(VIEW), several(MOVES), 2, TupleEnv),
        ([VIEW] * 2, [MOVES] * 2, None, TupleEnv),
        ((VIEW,) * 2, MOVES, 2, TupleEnv),
        (VIEW, several(MOVES), 2, TupleEnv),
        (VIEW, MOVES, 2, TupleEnv),
        (VIEW, MOVES, np.int64(2), TupleEnv),
        (VIEW, MOVES, 1, GymnasiumEnv),
        (VIEW, MOVES, None, GymnasiumEnv),
        (several(VIEW, 3), several(MOVES), None, GymnasiumEnv),
        (several(VIEW), MOVES, None, GymnasiumEnv),
        # Arrays with a row for each agent are for one agent that controls them all.
        (spaces.Box(0, 1, (2, 3)), spaces.MultiDiscrete([5, 5]), 2, GymnasiumEnv),
    ],
)
def test_recognition_by_spaces_and_number_of_agents(seen, acts, number, kind):
    assert type(adapt(Declared(seen, acts, number))) is kind
    assert type(adapt(Declared(seen, acts, number), "gymnasium")) is GymnasiumEnv


def test_spaces_that_contradict_the_number_of_agents_are_refused():
    with pytest.raises(TypeError, match=r'declares 3 agents, but its spaces are Tuples of 2. Pass adapter="gymnasium"'):
        adapt(Declared(several(VIEW), several(MOVES), 3))
    assert adapt(Declared(several(VIEW), several(MOVES), 3), "tuple").action_spaces["agent_2"] == several(MOVES)
    with pytest.raises(TypeError, match=r"has one space per agent or an attribute `n_agents`, but .* has neither"):
        adapt(Declared(VIEW, MOVES), "tuple")
    with pytest.raises(TypeError, match=r"has 3 agents, but its observation_space is 2 values: \(Box, Box\)"):
        adapt(Declared([VIEW] * 2, MOVES, 3), "tuple")


@pytest.mark.parametrize("mode", [*AutoresetMode], ids=lambda mode: mode.name)
@pytest.mark.parametrize("make", KINDS)
def test_two_hundred_steps_equal_a_plain_loop(make, mode):
    reference, rng = Reference([make] * 2, mode, 5), np.random.default_rng(3)
    with ParallelEnv([make] * 2, mode, 5, backend="serial") as env:
        assert_same(env.reset(), reference.reset())
        for _ in range(200):
            actions = [random_actions(one, rng) for one in reference.copies]
            assert_same(env.step(actions), reference.step(actions))
            over = [index for index, one in enumerate(reference.copies) if one.over]
            if over and mode is AutoresetMode.DISABLED and rng.random() < 0.5:
                assert_same(env.reset(env_ids=over), reference.reset(env_ids=over))


def test_finished_agents_need_no_action():
    with ParallelEnv([Intersection], seed=3, backend="serial") as env:
        env.reset()
        while len(env.acting[0]) == 3:
            _, _, terminateds, _, _ = env.step([dict.fromkeys(TUPLE_AGENTS, 1)])
        assert env.acting[0] == [agent for agent in TUPLE_AGENTS if not terminateds[0][agent]]
        assert not terminateds[0]["__all__"]
        first, *rest = env.acting[0]
        steps = env.stats().steps
        with pytest.raises(ValueError, match=f"environment 0: no action for agent '{first}'"):
            env.step([dict.fromkeys(rest, 0)])
        assert env.stats().steps == steps
        env.step([dict.fromkeys(env.acting[0], 0)])


class RecordsActions(Foraging):
    """Records its actions; the second agent is finished from the first step on."""

    action_space = spaces.Tuple(
        [
            spaces.Discrete(4),
            spaces.Dict(
                go=spaces.Discrete(3, start=2),
                push=spaces.Box(np.float32(0.5), np.float32(1.0), (2,)),
                many=spaces.Tuple([spaces.MultiDiscrete([3, 3], start=[1, 1]), spaces.MultiBinary(2)]),
            ),
            spaces.Text(3),
        ]
    )

    def step(self, actions):
        self.received = actions
        return self.look(), 0.0, [False, True, True], False, {}


def test_finished_agents_get_a_default_action():
    adapted = adapt(RecordsActions())
    adapted.reset(seed=1)
    first = {"agent_0": 3, "agent_1": "one", "agent_2": "other"}
    adapted.step(first)
    assert adapted.source.received == (3, "one", "other")
    adapted.step({"agent_0": 2})
    saved, idle, text = adapted.source.received
    assert (saved, text) == (2, None)
    assert_same(
        idle,
        {
            "go": 2,
            "push": np.full(2, 0.5, np.float32),
            "many": (np.array([1, 1]), np.zeros(2, np.int8)),
        },
    )


class ConfigurableResults(Foraging):
    """Returns the rewards, flags and info it was constructed with, in every step."""

    def __init__(self, rewards=0.0, terminated=False, truncated=False, info=None):
        self.configured = rewards, terminated, truncated, {} if info is None else info

    def step(self, actions):
        self.move(actions)
        return (self.look(), *self.configured)


def first_step(**configured):
    adapted = adapt(ConfigurableResults(**configured))
    adapted.reset(seed=1)
    return adapted.step(dict.fromkeys(TUPLE_AGENTS, 0))


def each(*values, **more):
    return {**dict(zip(TUPLE_AGENTS, values, strict=True)), **more}


ARRAY = np.array([0.5, 1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 2.0, None], each(1, 2.0, None)),
        ((1, 2, 3), each(1, 2, 3)),
        (ARRAY, each(*ARRAY)),
        (range(3), each(0, 1, 2)),
        (2, each(2, 2, 2)),
        (np.float32(2), each(*[np.float32(2)] * 3)),
        (np.array(2.5), each(*[np.float64(2.5)] * 3)),
        (np.array([[2.5]]), each(*[np.float64(2.5)] * 3)),
        (np.eye(3), each(*np.eye(3))),
    ],
    ids=str,
)
def test_rewards_in_sequences_or_shared(rewards, expected):
    assert_same(first_step(rewards=rewards)[1], expected)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (False, False, (False, False)),
        (True, False, (True, False)),
        (False, True, (False, True)),
        (True, True, (True, True)),
        ([True, True, False], False, (False, False)),
        ([True, True, False], (False, False, True), (False, True)),
        ([True] * 3, np.zeros(3, bool), (True, False)),
        ((False, True, True), True, (False, True)),
        (np.bool_(True), np.array([False]), (True, False)),
    ],
)
def test_an_episode_is_over_when_every_agent_is(terminated, truncated, expected):
    _, _, terminateds, truncateds, _ = first_step(terminated=terminated, truncated=truncated)
    assert (terminateds["__all__"], truncateds["__all__"]) == expected
    assert [*terminateds] == [*truncateds] == [*TUPLE_AGENTS, "__all__"]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, each({}, {}, {})),
        ([{"a": 1}, {}, {}], each({"a": 1}, {}, {})),
        (({"a": 1}, {}, {}), each({"a": 1}, {}, {})),
        ({"speed": 1}, each({}, {}, {}, __common__={"speed": 1})),
        ({"agent_1": {"a": 1}, "time": 3}, {"agent_1": {"a": 1}, "time": 3}),
    ],
    ids=str,
)
def test_infos_by_agent_or_common(info, expected):
    assert_same(first_step(info=info)[4], expected)


@pytest.mark.parametrize(
    ("configured", "text"),
    [
        (
            {"rewards": [1.0, 2.0]},
            r"`step` of .*ConfigurableResults must return 3 rewards, one per agent; it returned 2 values",
        ),
        ({"rewards": {"a": 1}}, "rewards, one per agent or one for all; it returned one value of type dict"),
        ({"terminated": np.zeros(2, bool)}, r"3 terminated flags.* of type ndarray and shape \(2,\)"),
        ({"truncated": None}, "truncated flags, one per agent or one for all; it returned one value of type NoneType"),
        ({"info": [{}, {}]}, "3 infos, one per agent; it returned 2 values"),
        ({"info": [1, 2, 3]}, "one dict of infos, or one per agent; it returned 3 values"),
    ],
)
def test_results_of_another_form_are_refused(configured, text):
    with pytest.raises(AdapterMismatch, match=rf'{text}.*was treated as a tuple environment; .*pass adapter="dict"'):
        first_step(**configured)


def test_shared_observation_is_refused():
    class OneForAll(Pathfinding):
        def look(self):
            return self.np_random.normal(size=3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.look(), {}

    with pytest.raises(AdapterMismatch, match=r'one observation per agent; .*shape \(3,\).*adapter="gymnasium"'):
        adapt(OneForAll()).reset(seed=1)


def test_interrupted_step_does_not_modify_the_common_info():
    class Failing(Cooperative):
        def step(self, actions):
            if self.time == 2:
                raise ValueError("flat tyre")
            return super().step(actions)

    with ParallelEnv([Failing], seed=1, backend="serial", on_error="restart") as env:
        env.reset()
        for _ in range(3):
            _, rewards, _, truncateds, infos = env.step([dict.fromkeys(TUPLE_AGENTS, 0)])
        assert rewards[0] == each(0.0, 0.0, 0.0)
        assert truncateds[0] == each(True, True, True, __all__=True)
        assert infos[0]["__common__"]["restarted"]


@pytest.mark.parametrize("make", KINDS)
def test_plain_loop_of_the_command_line(make):
    class Counting(make):
        moves = resets = 0

        def reset(self, **keywords):
            self.resets += 1
            return super().reset(**keywords)

        def move(self, actions):
            self.moves += 1
            super().move(actions)

    envs, adapted = [Counting(), Counting()], adapted_for_loop(make())
    step = plain_loop(envs, adapted)
    batches = draw_actions(adapted.action_spaces, 2)[:20]
    for batch in batches:
        step(batch)
    assert [env.moves for env in envs] == [len(batches)] * 2
    assert all(env.resets > len(batches) // 8 for env in envs)
