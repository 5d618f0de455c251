"""Simulators that declare little: recognised by names, spaces and results, or refused with a hint at `adapter=`."""

import functools
import re
import sys
import types

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from helpers.comparison import assert_same
from mpe2 import simple_spread_v3
from simulators.kinds import BOX, MOVES, Crossing, DictGym, Open

from marl_parallel import EnvError, ParallelEnv, RestartLimitExceeded, RestartPolicy
from marl_parallel.adapters import AdapterMismatch, Rules, adapt
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.pettingzoo_env import TurnBasedAECEnv
from marl_parallel.cli.measure import plain_loop

# SMARTS

CARS = ["car_a", "car_b"]
SEEN = spaces.Dict(active=spaces.Discrete(2), speed=spaces.Box(-np.inf, np.inf, (2,), np.float32))
FORMS = ["multi_agent", "full", "unformatted"]


class HiWay(gymnasium.Env):
    """Like `smarts.env:hiway-v1`: unformatted spaces are None, agents are a set, one dict holds both flags."""

    def __init__(self, observations="multi_agent", actions="multi_agent", seed=None):
        self.forms = observations, actions
        self.observation_space = None if observations == "unformatted" else spaces.Dict(dict.fromkeys(CARS, SEEN))
        self.action_space = None if actions == "unformatted" else spaces.Dict(dict.fromkeys(CARS, spaces.Discrete(4)))
        self.rng = np.random.default_rng(seed)

    @property
    def agent_ids(self):
        return {*reversed(CARS)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look(CARS), {car: {"score": 0} for car in CARS}

    def look(self, present):
        if self.forms[0] == "unformatted":
            return {car: types.SimpleNamespace(speed=float(self.rng.normal())) for car in present}
        full = CARS if self.forms[0] == "full" else present
        return {
            car: {"active": np.int64(car in present), "speed": self.rng.normal(size=2).astype(np.float32)}
            for car in full
        }

    def step(self, actions):
        plain = {"keep_lane": 0, "slow_down": 1}
        assert isinstance(actions, dict)
        assert all((action in plain) == (self.forms[1] == "unformatted") for action in actions.values())
        assert self.forms[1] != "full" or actions.keys() == {*CARS}
        self.time += 1
        present = CARS if self.time < 4 else CARS[:1]
        observations = self.look(present)
        rewards = {car: np.float64(self.time) for car in present}
        dones = {car: self.time == {"car_a": 5, "car_b": 3}[car] for car in present}
        if self.forms[0] == "full":
            rewards = {**dict.fromkeys(observations, np.nan), **rewards}
            dones = {**dict.fromkeys(observations, False), **dones}
        dones["__all__"] = self.time >= 5
        return observations, rewards, dones, dones, {car: {"score": self.time} for car in present}


def speeds(observations):
    """Without the objects, of which two are never equal."""
    return {car: seen if isinstance(seen, dict) else seen.speed for car, seen in observations.items()}


@pytest.mark.parametrize("actions", FORMS)
@pytest.mark.parametrize("observations", FORMS)
@pytest.mark.parametrize("wrap", [lambda env: env, OrderEnforcing], ids=["bare", "wrapped"])
def test_every_form_of_smarts_is_a_dict_environment(observations, actions, wrap):
    def make(seed):
        return wrap(HiWay(observations, actions, seed))

    adapted = adapt(make(1))
    assert type(adapted) is DictEnv
    assert adapted.possible_agents == CARS
    assert [*adapted.observation_spaces] == ([] if observations == "unformatted" else CARS)
    assert [*adapted.action_spaces] == ([] if actions == "unformatted" else CARS)

    loop = make(3)
    with ParallelEnv([make], auto_reset=False, seed=3, backend="serial") as env:
        (seen,), infos = env.reset()
        first, info = loop.reset(seed=3)
        assert_same((speeds(seen), infos), (speeds(first), (info,)))
        for _ in range(5):
            agents = CARS if actions == "full" else env.acting[0]
            expected_actions = dict.fromkeys(agents, "slow_down" if actions == "unformatted" else 2)
            (seen,), rewards, terminateds, truncateds, infos = env.step([expected_actions])
            expected, reward, dones, _, info = loop.step(expected_actions)
            assert_same(speeds(seen), speeds(expected))
            assert_same((rewards, terminateds, truncateds, infos), ((reward,), (dones,), (dones,), (info,)))
        assert terminateds[0]["__all__"]


class OneCar(gymnasium.Wrapper):
    """Like SMARTS's wrapper for one agent: still has agent names, but the spaces of one agent."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = env.observation_space["car_a"]
        self.action_space = env.action_space["car_a"]


def test_single_agent_wrapper_of_smarts():
    assert type(adapt(OneCar(HiWay()))) is GymnasiumEnv


class Named(gymnasium.Env):
    """Its agent names come from a method, as in RLlib's older environments, in its own order."""

    observation_space = spaces.Dict({"b": BOX, "a": BOX})
    action_space = None

    def get_agent_ids(self):
        return ["b", "a", "late"]


def test_agent_names_keep_their_order():
    adapted = adapt(TimeLimit(Named(), 5))
    assert (type(adapted), adapted.rules, adapted.possible_agents) == (DictEnv, Rules.DICT, ["b", "a", "late"])

    class Elsewhere(Named):
        action_space = spaces.Dict({"b": MOVES, "c": MOVES})

    assert type(adapt(Elsewhere())) is GymnasiumEnv  # which has actions that no agent of this name takes


# Spaces that leave the kind open


class NoActionSpace(gymnasium.Env):
    """A Dict observation space and no action space: its keys are agents, or parts of one agent's observation."""

    observation_space = spaces.Dict({"left": BOX, "right": BOX})
    action_space = None

    def __init__(self, rewards, flags):
        self.rewards, self.flags = rewards, flags

    def reset(self, *, seed=None, options=None):
        return {"left": BOX.low, "right": BOX.high}, {}

    def step(self, actions):
        return {"left": BOX.low, "right": BOX.high}, self.rewards, self.flags, self.flags, {}


def stepped(make, adapter=None):
    with ParallelEnv([make], backend="serial", adapter=adapter) as env:
        env.reset()
        return env.step([{"left": 0, "right": 0, "agent_0": 0}])


def test_rewards_decide_if_spaces_are_ambiguous():
    make = functools.partial(NoActionSpace, {"left": 1.0, "right": 2.0}, {"__all__": False})
    assert stepped(make)[1] == ({"left": 1.0, "right": 2.0},)
    one = functools.partial(NoActionSpace, 1.0, False)
    with pytest.raises(EnvError, match=r'returned one reward or flag: pass adapter="gymnasium" if it has one agent'):
        stepped(one)
    assert stepped(one, "dict")[1] == ({"left": 1.0, "right": 1.0},)
    assert stepped(one, "gymnasium")[1] == ({"agent_0": 1.0},)

    class Counted(NoActionSpace):
        n_agents = 2

    assert stepped(functools.partial(Counted, 1.0, False))[1] == ({"left": 1.0, "right": 1.0},)


class Spaceless(NoActionSpace):
    observation_space = None


def test_several_rewards_of_a_single_agent_environment_are_refused():
    with pytest.raises(EnvError, match=r"reward of agent 'agent_0' .* with the keys \['a', 'b'\].*adapter=\"dict\""):
        stepped(functools.partial(Spaceless, {"a": 1.0, "b": 1.0}, False))
    with pytest.raises(
        EnvError, match=r"terminated flag of agent 'agent_0' .* one value of type dict.*adapter=\"dict\""
    ):
        stepped(functools.partial(Spaceless, 1.0, {"a": False}))

    class Boxed(NoActionSpace):
        observation_space = BOX

    with pytest.raises(
        EnvError, match=r"one observation of Box.*; it returned one value of type dict.*adapter=\"dict\""
    ):
        stepped(functools.partial(Boxed, 1.0, False))


# One reward and one flag for all agents


class SharedRewards(DictGym):
    """Like VMAS with dict spaces: one reward or flag for all agents."""

    def __init__(self, rewards=0.5, terminated=False, truncated=False):
        self.configured = rewards, terminated, truncated

    def step(self, actions):
        observations, *_ = super().step(actions)
        return observations | {"right": np.ones(3, np.float32)}, *self.configured, {"time": self.time}


BOTH = {"left": 0.5, "right": 0.5}
GOING = {"left": False, "right": False, "__all__": False}


@pytest.mark.parametrize(
    ("configured", "rewards", "terminateds"),
    [
        ((0.5, False, False), BOTH, GOING),
        ((np.float32(0.5), True, False), dict.fromkeys(BOTH, np.float32(0.5)), dict.fromkeys(GOING, True)),
        (
            (np.array([0.5]), np.array(False), False),
            dict.fromkeys(BOTH, np.float64(0.5)),
            dict.fromkeys(GOING, np.False_),
        ),
        (({"left": 1.0, "right": 2}, False, False), {"left": 1.0, "right": 2}, GOING),
        ((0.5, {"left": True, "__all__": False}, False), BOTH, {"left": True, "__all__": False}),
    ],
    ids=str,
)
def test_shared_reward_or_flag_applies_to_each_agent(configured, rewards, terminateds):
    with ParallelEnv([functools.partial(SharedRewards, *configured)], auto_reset=False, backend="serial") as env:
        env.reset()
        _, got, ended, truncated, infos = env.step([dict.fromkeys(BOTH, 0)])
    assert_same((got, ended, truncated, infos), ((rewards,), (terminateds,), (GOING,), ({"time": 1},)))


def test_shared_flag_ends_the_episode_on_every_backend(backend_setup, build):
    env = build([functools.partial(SharedRewards, np.float32(0.5), True)] * 4, backend_setup)
    env.reset()
    _, rewards, terminateds, _, infos = env.step([dict.fromkeys(BOTH, 0)] * 4)
    assert_same(rewards, (dict.fromkeys(BOTH, np.float32(0.5)),) * 4)
    assert terminateds == (dict.fromkeys(GOING, True),) * 4
    assert all("final_obs" in info[agent] for info in infos for agent in BOTH)


@pytest.mark.parametrize(
    "configured", [([1.0, 2.0], False, False), (1.0, (True, False), False), (1.0, None, False)], ids=str
)
def test_several_rewards_for_dict_observations_are_refused(configured):
    with pytest.raises(EnvError, match=r"must return five dicts keyed by agent.*was treated as a dict environment"):
        stepped(functools.partial(SharedRewards, *configured))


def test_vmas_with_dict_spaces_gets_a_list_of_actions():
    base = type("BaseGymWrapper", (), {"__module__": "vmas.simulator.environment.gym.base"})

    class Vmas(base, SharedRewards):
        def step(self, actions):
            assert actions == [2, 1]
            return super().step(actions)

    loop = plain_loop([Vmas(), Vmas()], adapt(Vmas()))  # as `marl-parallel bench` compares with
    loop([{"right": 1, "left": 2}] * 2)
    with ParallelEnv([lambda: TimeLimit(Vmas(), 9)], backend="serial") as env:
        env.reset()
        assert env.step([{"right": 1, "left": 2}])[1] == (BOTH,)
        with pytest.raises(ValueError, match="no action for agent 'left'"):
            env.step([{"right": 1}])


# Flags and infos that are sequences


class Flagged(gymnasium.Wrapper):
    def __init__(self, **configured):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.configured = configured

    def step(self, action):
        observation, reward, *rest = super().step(action)
        terminated, truncated, info = (
            self.configured.get(n, v) for n, v in zip(("terminated", "truncated", "info"), rest)
        )
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("configured", "text"),
    [
        (
            {"terminated": (False, False)},
            r"the terminated flag of agent 'agent_0' .* 2 values: \(bool, bool\).*\"tuple\"",
        ),
        ({"truncated": [False]}, r"the truncated flag of agent 'agent_0' .* got 1 values: \(bool\)"),
        ({"truncated": np.zeros(3, bool)}, r"flag of agent 'agent_0' .* of type ndarray and shape \(3,\)"),
        ({"terminated": "no"}, "flag of agent 'agent_0' .* one value of type str"),
        ({"info": [{}, {}]}, r"the info of agent 'agent_0' must be a dict, got 2 values: \(dict, dict\).*\"tuple\""),
    ],
    ids=str,
)
def test_flags_and_infos_that_are_sequences_are_refused(configured, text):
    with pytest.raises(EnvError, match=text) as caught:
        stepped(functools.partial(Flagged, **configured))
    assert isinstance(caught.value.__cause__, TypeError)
    assert "on_error" not in str(caught.value)


@pytest.mark.parametrize("flag", [np.array(False), np.array([False]), np.array([[0]]), np.bool_(False)], ids=repr)
def test_array_of_one_flag_is_a_scalar(flag):
    with ParallelEnv([functools.partial(Flagged, truncated=flag)], backend="serial") as env:
        env.reset()
        truncateds = env.step([{"agent_0": 0}])[3]
    assert_same(truncateds, ({"agent_0": flag.reshape(())[()], "__all__": False},))


class ConfigurableResults(Crossing):
    """Returns the values it was constructed with."""

    def __init__(self, flags, infos):
        self.configured = flags, infos

    def step(self, actions):
        observations, rewards, *_ = super().step(actions)
        return observations, rewards, self.configured[0], {"__all__": False}, self.configured[1]


def test_sequences_in_dicts_are_refused_by_agent():
    with pytest.raises(EnvError, match="the terminated flag of agent 'right' must be True or False, got 2 values"):
        stepped(functools.partial(ConfigurableResults, {"left": False, "right": [False, False]}, {}))
    with pytest.raises(EnvError, match="the terminated flag of agent '__all__' must be True or False"):
        stepped(functools.partial(ConfigurableResults, {"__all__": (False,)}, {}))
    with pytest.raises(EnvError, match="the info of agent 'left' must be a dict, got 1 values"):
        stepped(functools.partial(ConfigurableResults, {"__all__": False}, {"left": [{}]}))
    history = {"history": [1, 2], "left": {}}
    assert stepped(functools.partial(ConfigurableResults, {"__all__": False}, history))[4] == (history,)


# Advice


class OldApi(gymnasium.Env):
    observation_space, action_space = BOX, MOVES

    def reset(self):
        return BOX.low, {}

    def step(self, action):
        return BOX.low, 0.0, False, {}


class Functional:
    """Like JaxMARL: each call takes a key and a state."""

    num_agents = 2
    possible_agents = ("a", "b")

    def observation_space(self, agent):
        return BOX

    action_space = observation_space

    def reset(self, key):
        return {}, 0

    def step(self, key, state, actions):
        return {}


class Lle:
    """Like the Laser Learning Environment: lists of actions, objects as results."""

    n_agents = 2

    def reset(self):
        return types.SimpleNamespace(), types.SimpleNamespace()

    def step(self, actions):
        return types.SimpleNamespace()


class StepNeedsMore(DictGym):
    def step(self, actions, duration):
        return {}


@pytest.mark.parametrize(
    ("make", "text", "others"),
    [
        (
            OldApi,
            r"`step` of .*OldApi must return .*; it returned 4 values: .* OpenAI's gym, which Shimmy converts",
            ["dict"],
        ),
        (
            lambda: OrderEnforcing(OldApi()),
            r"OrderEnforcing cannot be called as reset\(seed=42\): .*argument 'seed'",
            ["dict"],
        ),
        (
            Functional,
            r"Functional cannot be called as reset\(\): .* missing 1 .*'key'",
            ["dict", "tuple"],
        ),
        (
            Lle,
            r"`reset` of .*Lle must return two dicts .* \(SimpleNamespace, SimpleNamespace\)",
            ["tuple", "gymnasium"],
        ),
        (
            StepNeedsMore,
            r"StepNeedsMore cannot be called as step\(\{.*\}\): .* missing 1 .*'duration'",
            ["pettingzoo"],
        ),
    ],
    ids=["old", "unseeded", "functional", "lle", "step"],
)
def test_error_of_a_wrong_signature_names_the_adapters(make, text, others):
    """Only those that may fit, without the one in use."""
    with pytest.raises(EnvError, match=text) as caught:
        stepped(make)
    assert re.findall('adapter="([a-z]+)"', str(caught.value).partition("Where it happened")[0]) == others
    assert "a restart would not help" in str(caught.value)
    assert "on_error" not in str(caught.value)


def test_restart_limit_includes_the_adapter_advice():
    policy = RestartPolicy(max_restarts=1)
    with ParallelEnv([OldApi], backend="serial", on_error="restart", restart_policy=policy) as env:
        env.reset()
        env.step([{"agent_0": 0}])
        with pytest.raises(RestartLimitExceeded, match="which Shimmy converts") as caught:
            env.step([{"agent_0": 0}])
    assert "a restart would not help" in str(caught.value.__cause__)


def test_type_error_inside_the_simulator_is_unchanged():
    class Broken(DictGym):
        def step(self, actions):
            return len(3)

    with pytest.raises(EnvError, match=r"object of type 'int' has no len\(\)") as caught:
        stepped(Broken)
    assert 'on_error="restart"' in str(caught.value)
    assert "adapter" not in str(caught.value).replace(__file__, "this file")


@pytest.fixture
def openai_gym(monkeypatch):
    """The class of OpenAI's gym that is recognised."""
    module = types.ModuleType("gym.core")
    module.Env = type("Env", (), {"__module__": "gym.core", "reset": lambda self: 0, "step": lambda self, action: 0})
    monkeypatch.setitem(sys.modules, "gym.core", module)
    return module.Env


def test_openai_gym_error_names_shimmy(openai_gym):
    class Older(openai_gym):
        observation_space = BOX

    with pytest.raises(
        TypeError, match=r"Older is an environment of OpenAI's gym.*shimmy\.GymV26Comp.*adapter=\"dict\""
    ):
        adapt(Older())
    assert type(adapt(Older(), "dict")) is DictEnv
    Older.possible_agents = ["a"]
    assert adapt(Older()).possible_agents == ["a"]


class Mapless(Open):
    possible_agents = ["late"]  # noqa: RUF012

    def observation_space(self, agent):
        raise ValueError("no map has been loaded")


def test_error_in_observation_space_is_reported_as_such(build, killable_setup):
    with pytest.raises(EnvError, match=r"raised in observation_space\('late'\), at line .*: no map has") as caught:
        build([Mapless] * 4, killable_setup)
    assert caught.value.method == "observation_space('late')"
    assert isinstance(caught.value.__cause__, ValueError)
    assert "constructor" not in str(caught.value)
    assert "on_error" not in str(caught.value)


def test_turn_based_adapter_by_name():
    make = functools.partial(simple_spread_v3.env, max_cycles=2)
    assert type(adapt(make(), "aec-turn-based")) is TurnBasedAECEnv
    with ParallelEnv([make], seed=1, auto_reset=False, backend="serial", adapter="aec-turn-based") as env:
        env.reset()
        turns = []
        while env.acting[0]:
            turns += env.acting[0]
            env.step([dict.fromkeys(env.acting[0], 1)])
    assert turns == ["agent_0", "agent_1", "agent_2"] * 2
    with pytest.raises(TypeError, match="A PettingZoo AEC environment has no method `observe`"):
        adapt(Crossing(), "aec-turn-based")


def test_misfits_are_type_errors():
    class Pair(pettingzoo.ParallelEnv):
        def reset(self, seed=None, options=None):
            return {}

    with pytest.raises(TypeError, match="was treated as a PettingZoo parallel environment") as caught:
        adapt(Pair()).reset()
    assert type(caught.value) is AdapterMismatch
