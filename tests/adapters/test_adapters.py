"""Every kind of simulator is recognised and becomes a `MultiAgentEnv`; errors say why one cannot."""

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from helpers.comparison import assert_same
from simulators.kinds import BOX, MOVES, Crossing, Declared, DictGym, FakeRLlib, OnlyDictsAEC, Open, real

from marl_parallel import ParallelEnv
from marl_parallel.adapters import ADAPTERS, MultiAgentEnv, Rules, Schema, adapt
from marl_parallel.adapters.dict_env import DictEnv, RLlibEnv
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.pettingzoo_env import ParallelizableAECEnv, PettingZooEnv, TurnBasedAECEnv

# Recognition


@pytest.mark.parametrize(
    ("make", "kind", "rules"),
    [
        (Crossing, DictEnv, Rules.DICT),
        (Declared, DictEnv, Rules.DICT),
        (DictGym, DictEnv, Rules.DICT),
        (lambda: TimeLimit(DictGym(), 10), DictEnv, Rules.DICT),
        (FakeRLlib, RLlibEnv, Rules.DICT),
        (Open, PettingZooEnv, Rules.PETTINGZOO),
        (OnlyDictsAEC, ParallelizableAECEnv, Rules.PETTINGZOO),
        (lambda: gymnasium.make("CartPole-v1"), GymnasiumEnv, Rules.PETTINGZOO),
        (lambda: real("mpe2.simple_spread_v3"), PettingZooEnv, Rules.PETTINGZOO),
        (lambda: real("mpe2.simple_spread_v3", maker="env"), ParallelizableAECEnv, Rules.PETTINGZOO),
        (lambda: real("pettingzoo.classic.connect_four_v3", maker="env"), TurnBasedAECEnv, Rules.PETTINGZOO),
        (lambda: real("pettingzoo.classic.tictactoe_v3", maker="raw_env"), TurnBasedAECEnv, Rules.PETTINGZOO),
    ],
)
def test_every_kind_is_recognised(make, kind, rules):
    source = make()
    adapted = adapt(source)
    assert type(adapted) is kind
    assert adapted.rules is rules
    assert adapted.source is source
    assert adapt(adapted) is adapted
    adapted.close()


@pytest.mark.parametrize("make", [Crossing, Declared, lambda: gymnasium.make("CartPole-v1")])
def test_schema(make):
    adapted = adapt(make())
    schema = Schema.of(adapted)
    for name in ("possible_agents", "observation_spaces", "action_spaces", "reward_spaces", "state_space", "metadata"):
        assert getattr(schema, name) == getattr(adapted, name)
    for name in (
        "rules",
        "render_mode",
        "check_options",
        "seeded_when_made",
        "options_last",
        "needs_all_actions",
        "all_may_act",
        "observes_turn",
        "joint_actions",
    ):
        assert getattr(schema, name) is getattr(adapted, name)
    assert schema.reset_keywords == tuple(sorted(adapted.reset_keywords))
    assert pickle.dumps(schema) == pickle.dumps(Schema.of(adapt(make())))
    assert pickle.loads(pickle.dumps(schema)) == schema


def test_gymnasium_env_with_equal_dict_spaces_is_multi_agent():
    class Equal(gymnasium.Env):
        observation_space = spaces.Dict({"a": BOX, "b": BOX})
        action_space = spaces.Dict({"a": MOVES, "b": MOVES})

    assert adapt(Equal()).possible_agents == ["a", "b"]
    assert isinstance(adapt(Equal(), "gymnasium"), GymnasiumEnv)
    Equal.action_space = spaces.Dict({"a": MOVES})
    assert isinstance(adapt(Equal()), GymnasiumEnv)


def test_adapter_by_name_and_by_callable():
    for name in ("dict", "pettingzoo", "rllib"):
        assert isinstance(adapt(Crossing(), name), MultiAgentEnv)
    assert adapt(Crossing(), "pettingzoo").rules is Rules.PETTINGZOO
    assert type(adapt(Open(), DictEnv)) is DictEnv
    assert type(adapt(Crossing(), lambda env: PettingZooEnv(env))) is PettingZooEnv


class CustomMultiAgentEnv(MultiAgentEnv):
    """Implements the protocol itself, without a wrapped simulator."""

    rules = Rules.DICT
    possible_agents = ["a"]  # noqa: RUF012
    observation_spaces = {"a": BOX}  # noqa: RUF012
    action_spaces = {"a": MOVES}  # noqa: RUF012
    state_space, render_mode = None, None
    metadata = {}  # noqa: RUF012
    reset_keywords = frozenset()

    def reset(self, **keywords):
        return {"a": BOX.low}, {}

    def step(self, actions):
        return {"a": BOX.low}, {"a": 1.0}, {}, {}, {}

    def render(self):
        return None

    def state(self):
        return None

    def close(self):
        pass

    def size(self):
        return 7


def test_multi_agent_env_is_used_unchanged():
    with ParallelEnv([CustomMultiAgentEnv] * 2, backend="serial", seed=5) as env:
        env.reset()
        assert env.step([{"a": 0}] * 2)[1] == ({"a": 1.0}, {"a": 1.0})
        assert (env.seed(), env.call("size")) == ((5, 6), (7, 7))


class Bare:
    pass


class OldGym(Crossing):
    observation_space = BOX


@pytest.mark.parametrize(
    ("env", "adapter", "error", "text"),
    [
        (
            Crossing(),
            "petting",
            ValueError,
            "'petting'; there are 'dict', 'pettingzoo', 'aec', 'aec-turn-based', 'gymnasium', 'tuple', 'rllib'",
        ),
        (Crossing(), 3, TypeError, "must be None, a name or a callable; it is of type builtins.int"),
        (Crossing(), lambda env: env, TypeError, r"must return a MultiAgentEnv; it returned .*Crossing"),
        (None, None, TypeError, "returned None; does it lack a `return`"),
        (None, "dict", TypeError, "returned None"),
        (Crossing, None, TypeError, "returned the class Crossing, not an instance"),
        (
            Bare(),
            None,
            TypeError,
            r"Looked for a PettingZoo .*got .*Bare without `reset` and `step`\.$",
        ),
        (lambda: 0, None, TypeError, "did a constructor return another constructor"),
        (OldGym(), None, TypeError, r"OldGym looks like a single-agent .*Box.*subclass of gymnasium\.Env"),
        (Bare(), "dict", TypeError, "A dict environment has no method `reset` and no method `step`: .*Bare"),
        (
            Open(),
            "aec",
            TypeError,
            "A PettingZoo AEC environment has no method `observe` and no method `last`",
        ),
    ],
)
def test_error_for_unknown_kinds(env, adapter, error, text):
    with pytest.raises(error, match=text):
        adapt(env, adapter)


# Dict environments


def test_dict_results_and_actions_pass_unchanged():
    adapted = adapt(Crossing())
    adapted.reset(seed=3)
    assert adapted.source.seed_given == 3
    sent = {"left": 1, "nobody": object()}
    observations, rewards, terminateds, truncateds, infos = adapted.step(sent)
    assert adapted.source.actions is sent
    assert list(observations) == ["left"]
    assert (rewards, terminateds) == ({"left": 0.5}, {"left": False, "__all__": False})
    assert (truncateds, infos) == ({"__all__": False}, {"note": 7})
    assert adapted.agents_left() is None
    assert adapted.turn() is None


def test_dict_spaces_and_agents():
    nothing = adapt(Crossing())
    assert (nothing.possible_agents, nothing.observation_spaces, nothing.action_spaces) == ([], {}, {})
    assert (nothing.metadata, nothing.render_mode, nothing.state_space) == ({}, None, None)
    nothing.close()

    declared = adapt(Declared())
    assert declared.possible_agents == ["right", "left"]
    assert list(declared.observation_spaces) == list(declared.action_spaces) == ["right", "left"]

    class Plural(Crossing):
        possible_agents = ("left", "right", "third")
        observation_space = spaces.Dict({"position": BOX, "speed": BOX})
        observation_spaces = spaces.Dict({"third": BOX, "left": BOX})
        action_spaces = {"left": MOVES, "other": MOVES, "right": None}  # noqa: RUF012

    plural = adapt(Plural())
    assert plural.possible_agents == ["left", "right", "third"]
    assert list(plural.observation_spaces) == ["left", "third"]
    assert plural.action_spaces == {"left": MOVES}


def test_dict_env_in_gymnasium_wrappers():
    class Full(DictGym):
        metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
        render_mode = "ansi"
        state_space = BOX
        observation_space = None
        action_space = None
        observation_spaces = {"left": BOX}  # noqa: RUF012

        def state(self):
            return np.full(3, 0.5, np.float32)

        def render(self):
            return "a frame"

    adapted = adapt(TimeLimit(TimeLimit(Full(), 50), 10))
    assert adapted.possible_agents == ["left", "right"]
    assert adapted.observation_spaces == {"left": BOX}
    assert (adapted.render_mode, adapted.render()) == ("ansi", "a frame")
    assert adapted.metadata is Full.metadata
    assert adapted.state_space is BOX
    assert adapted.state() in BOX
    assert adapted.reset_keywords == {"seed", "options"}
    adapted.close()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (np.zeros(3), "one value of type ndarray"),
        (({},), r"1 values: \(dict\)"),
        ((np.zeros(3), {}), r"2 values: \(ndarray, dict\)"),
        (None, "one value of type NoneType"),
    ],
)
def test_wrong_results(result, text):
    class Wrong:
        def reset(self):
            return result

        def step(self, actions):
            return result

    adapted = adapt(Wrong())
    with pytest.raises(TypeError, match=rf"`reset` of .*Wrong must return two dicts .*{text}"):
        adapted.reset()
    with pytest.raises(TypeError, match=rf"`step` of .*Wrong must return five dicts .*{text}"):
        adapted.step({})


def test_single_agent_result_of_a_dict_env():
    adapted = adapt(gymnasium.make("CartPole-v1"), "dict")
    with pytest.raises(TypeError, match=r"2 values: \(ndarray, dict\)"):
        adapted.reset()


# Which keywords `reset` takes


def _positional_only(seed, /):
    pass


@pytest.mark.parametrize(
    ("reset", "keywords"),
    [
        (lambda: None, set()),
        (lambda seed=None: None, {"seed"}),
        (lambda *, options=None, more=1: None, {"options"}),
        (lambda seed, options: None, {"seed", "options"}),
        (lambda **anything: None, {"seed", "options"}),
        (lambda seed, **anything: None, {"seed", "options"}),
        (lambda *anything: None, set()),
        (_positional_only, set()),
        (dict.update, {"seed", "options"}),  # no signature can be read
    ],
)
def test_reset_keywords_follow_the_signature(reset, keywords):
    env = Bare()
    env.reset, env.step = reset, lambda actions: None
    assert adapt(env).reset_keywords == keywords


# RLlib


def test_rllib_spaces_are_found_as_in_rllib():
    class Spaced(FakeRLlib):
        possible_agents = [1, 0, "ghost"]  # noqa: RUF012
        observation_spaces = {0: BOX, 1: MOVES}  # noqa: RUF012
        action_space = MOVES

    spaced = adapt(Spaced())
    assert type(spaced) is RLlibEnv
    assert spaced.observation_spaces == {1: MOVES, 0: BOX}
    assert spaced.action_spaces == {1: MOVES, 0: MOVES, "ghost": MOVES}

    class OldStack(FakeRLlib):
        observation_space = spaces.Dict({"b": BOX, "a": BOX})
        action_spaces = {"a": MOVES}  # noqa: RUF012

        def get_observation_space(self, agent):
            return self.observation_space[agent]

    old = adapt(OldStack())
    assert old.possible_agents == ["a", "b"]
    assert old.action_spaces == {"a": MOVES}
    assert adapt(FakeRLlib()).observation_spaces == {}


def test_multi_agent_env_of_another_library_is_not_rllibs():
    elsewhere = type("MultiAgentEnv", (Crossing,), {"__module__": "ray.rllibrary"})
    assert type(adapt(elsewhere())) is DictEnv


class Wrestlers(FakeRLlib):
    """Two wrestlers, each pushed by the other; the older is out after two steps, both after three."""

    possible_agents = [1, 0]  # noqa: RUF012
    observation_spaces = {0: BOX, 1: BOX}  # noqa: RUF012
    action_space = MOVES

    def reset(self, *, seed=None, options=None):
        self.rng, self.time = np.random.default_rng(seed), 0
        self.place = self.rng.uniform(-1, 1, (2, 3)).astype(np.float32)
        return {0: self.place[0].copy(), 1: self.place[1].copy()}, {0: {"seed": seed}}

    def step(self, action_dict):
        self.time += 1
        for agent, push in action_dict.items():
            self.place[1 - agent] += np.float32(push) + self.rng.random(3, np.float32)
        over = {0: self.time > 2, 1: self.time > 1, "__all__": self.time > 2}
        seen = {agent: self.place[agent].copy() for agent in (0, 1) if self.time < 3 or agent == 0}
        rewards = {agent: float(self.place[agent].sum()) for agent in seen}
        flags = {agent: over[agent] for agent in (*seen, "__all__")}
        return seen, rewards, flags, {"__all__": False}, {1: {"time": self.time}} if self.time == 2 else {}


def test_rllib_envs_equal_a_plain_loop(two_worker_setup, build):
    """Only the RLlib class finds one action space for all agents."""
    env, loop = build([Wrestlers] * 4, two_worker_setup, False, 3), [Wrestlers() for _ in range(4)]
    assert env.action_space == spaces.Dict([(1, MOVES), (0, MOVES)])
    for _ in range(2):
        assert_same(env.reset(seed=3), (*zip(*[one.reset(seed=3 + i) for i, one in enumerate(loop)]),))
        for time in range(3):
            actions = [{agent: (time + i + agent) % 2 for agent in acting} for i, acting in enumerate(env.acting)]
            assert_same(env.step(actions), (*zip(*[one.step(sent) for one, sent in zip(loop, actions)]),))
            assert env.acting == ({0: [1, 0], 1: [0], 2: []}[time],) * 4


# Gymnasium


def test_single_agent_env():
    source = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    adapted = adapt(source)
    assert adapted.possible_agents == ["agent_0"]
    assert adapted.observation_spaces == {"agent_0": source.observation_space}
    assert adapted.action_spaces == {"agent_0": source.action_space}
    assert adapted.render_mode == "rgb_array"
    assert adapted.agents_left() is None
    first, infos = adapted.reset(seed=7)
    assert infos == {"agent_0": {}}
    results = adapted.step({"agent_0": 1})

    reference = gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(first["agent_0"], reference.reset(seed=7)[0])
    for got, expected in zip(results, reference.step(1), strict=True):
        assert list(got) == ["agent_0"]
        assert type(got["agent_0"]) is type(expected)
        np.testing.assert_array_equal(got["agent_0"], expected)
    assert adapted.render().shape[-1] == 3
    adapted.close()


def test_single_agent_results_of_a_wrong_form():
    class Before(gymnasium.Env):
        observation_space, action_space = BOX, MOVES

        def reset(self):
            return np.zeros(2)

        def step(self, action):
            return np.zeros(2), 0.0, False, {}

    adapted = adapt(Before())
    with pytest.raises(TypeError, match=r"`reset` of .*Before must return a tuple \(observation, info\)"):
        adapted.reset()
    with pytest.raises(TypeError, match=r"`step` of .*Before must return a tuple \(observation, reward"):
        adapted.step({"agent_0": 0})


def test_every_adapter_name_is_tested():
    kinds = {
        "dict",
        "pettingzoo",
        "aec",
        "aec-turn-based",
        "gymnasium",
        "tuple",
        "rllib",
        "mlagents",
        "pymarl",
        "mappo",
        "tianshou",
    }
    assert set(ADAPTERS) == kinds
