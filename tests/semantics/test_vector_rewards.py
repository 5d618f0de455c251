"""Vector rewards: equal to a plain loop's, in shared memory, in dicts, in arrays and as numbers."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same, spoil
from helpers.setups import Setup
from simulators.vector_rewards import LENGTH, Couriers, ScriptedRewards, Summed, TreasureHunt

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import adapt
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block import codec
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import TransitionRecords
from marl_parallel.core.objects import pickling
from marl_parallel.core.transition import Transition
from marl_parallel.vector import ArrayStepper, GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv
from marl_parallel.vector.scalarize import as_number, reward_rules

pytestmark = [pytest.mark.in_turn, pytest.mark.release_independent]

MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]


def plain_rewards(constructor: Any, seed: int, steps: int, mode: str) -> list[dict]:
    """The rewards of a plain loop over one environment, cast to the declared dtype."""
    env = constructor(seed=seed)
    env.reset(seed=seed)
    due, rewards = False, []
    for _ in range(steps):
        if due:
            due = False
            observations, _ = env.reset()
            if mode == "NEXT_STEP":
                zeros = {agent: np.zeros(env.reward_space(agent).shape, np.float32) for agent in observations}
                rewards.append(zeros)
                continue
        _, paid, *_ = env.step(dict.fromkeys(env.agents, 1))
        rewards.append({agent: np.asarray(reward, np.float32) for agent, reward in paid.items()})
        due = not env.agents
    return rewards


@pytest.mark.parametrize("how", [{}, {"dtype": np.float64}, {"one_by_one": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_rewards_equal_a_plain_loop(mode, how, two_worker_setup, build):
    """Across deaths and episode ends, in the declared dtype; the arrays belong to the caller."""
    constructor = functools.partial(Couriers, **how)
    env = build([constructor] * 3, two_worker_setup, mode, 5, copy=False)
    due = [plain_rewards(constructor, 5 + env_id, 13, mode) for env_id in range(3)]
    env.reset()
    for step in range(13):
        _, rewards, terminateds, truncateds, _ = env.step([dict.fromkeys(acting, 1) for acting in env.acting])
        assert_same(rewards, tuple(of_env[step] for of_env in due))
        spoil(rewards)
        over = [i for i, flags in enumerate(zip(terminateds, truncateds)) if any(flag["__all__"] for flag in flags)]
        if over and mode == "DISABLED":
            env.reset(env_ids=over)


@pytest.mark.needs("_codec")
def test_nothing_is_pickled_in_a_step(monkeypatch, parallel):
    env = parallel(Couriers, 2, True)
    env.reset()
    pickled: list[Any] = []
    monkeypatch.setattr(
        "marl_parallel.core.worker.worker.dump_leftovers", lambda leftovers: pickled.append(leftovers) or b""
    )
    for _ in range(LENGTH - 1):
        env.step([dict.fromkeys(acting, 1) for acting in env.acting])
    assert pickled == []
    assert pickle.loads(pickling.dumps(env.reward_space)) == env.reward_space


@pytest.mark.needs("_codec")
def test_records_hold_reward_vectors():
    agents, seen = ["a", "b"], spaces.Box(-1, 1, (1,), np.float32)
    paid = spaces.Box(-9, 9, (3,), np.float32)
    layout = Layout(Schema(agents, dict.fromkeys(agents, seen), {}, None, dict.fromkeys(agents, paid)), 3)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    records = TransitionRecords(layout, block, codec=open_codec(layout, block, infos_in_block=False))
    due = []
    for record in range(3):
        rewards = {agent: np.arange(3, dtype=np.float32) + 10 * record for agent in agents}
        flags = {**dict.fromkeys(agents, False), "__all__": False}
        observations = dict.fromkeys(agents, np.ones(1, np.float32))
        dicts = observations, rewards, flags, flags, {agent: {} for agent in agents}
        assert records.write(record, Transition(*dicts, agents, agents)) is None
        due.append(rewards)
    assert_same([records.read(record, None).rewards for record in range(3)], due)


def test_reward_space_in_each_form_of_declaration(parallel):
    two = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    env = parallel(Couriers)
    assert env.reward_space is not None
    assert dict(env.reward_space.items()) == dict.fromkeys(["van", "bike", "drone"], two)
    assert [*parallel(functools.partial(ScriptedRewards, {})).reward_space] == ["a"]
    assert parallel(TreasureHunt).reward_space == spaces.Dict(agent_0=TreasureHunt.reward_space)
    assert parallel(lambda: Summed(TreasureHunt())).reward_space is None
    assert adapt(Couriers()).reward_spaces["bike"] == two


@pytest.mark.parametrize("declared", [spaces.Discrete(3), spaces.Box(-1, 1, ()), "cpu time", {"a": 1}], ids=str)
def test_reward_space_of_another_kind_is_none(declared, parallel):
    env = parallel(functools.partial(ScriptedRewards, {"a": 1.5, "b": 2}, declared))
    assert env.reward_space is None
    env.reset()
    assert_same(env.step([{}] * 3)[1], ({"a": 1.5, "b": 2},) * 3)


FORMS = [
    ([1, 2.5], np.array([1, 2.5], np.float32)),
    ((1, 2), np.array([1, 2], np.float32)),
    (np.array([1, 2]), np.array([1, 2], np.float32)),
    (np.array([0.1, np.nan]), np.array([0.1, np.nan], np.float32)),
    (1.5, 1.5),
    (np.float32(1.5), np.float32(1.5)),
    (np.array(1.5), np.array(1.5)),
    (None, None),
    ({"speed": 1.0}, {"speed": 1.0}),
]


@pytest.mark.parametrize(("returned", "due"), FORMS, ids=repr)
def test_only_declared_vectors_are_cast(returned, due, two_worker_setup, build):
    """Next to an agent without a reward space, and an unknown agent."""
    rewards = {"a": returned, "b": np.array([1.0, 2.0]), "unknown": [1, 2]}
    env = build([functools.partial(ScriptedRewards, rewards)] * 2, two_worker_setup)
    env.reset()
    for _ in range(2):
        assert_same(env.step([{}, {}])[1], ({**rewards, "a": due},) * 2)


@pytest.mark.parametrize(
    ("returned", "space", "words"),
    [
        (np.zeros(3), None, ["(2,)", "(3,)"]),
        (np.zeros((1, 2)), None, ["(2,)", "(1, 2)"]),
        ([[1], [1, 2]], None, ["(2,)"]),
        (np.array([0.5, 1.0]), spaces.Box(-9, 9, (2,), np.int64), ["int64", "float64"]),
    ],
    ids=str,
)
def test_reward_of_another_form_is_an_error(returned, space, words, two_worker_setup, build):
    declared = None if space is None else spaces.Dict(a=space)
    env = build([functools.partial(ScriptedRewards, {"a": returned, "b": 1.0}, declared)] * 2, two_worker_setup)
    env.reset()
    with pytest.raises(EnvError, match="the reward of agent 'a': expected an array of shape") as caught:
        env.step([{}, {}])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("codec_class", [codec.Codec, None], ids=["compiled", "pure"])
@pytest.mark.parametrize("infos", [{}, {"a": {"why": object}}], ids=["", "pickled infos"])
@pytest.mark.parametrize(
    "paid",
    [np.array([0.5]), np.array([0.5], np.float32), np.array([0.5], ">f8"), np.array([2]), np.ones(1, bool)],
    ids=repr,
)
def test_rewards_of_one_element(paid, infos, codec_class, parallel, monkeypatch):
    """A vector where one is declared, else the same array in dicts and its number in arrays."""
    monkeypatch.setattr(codec, "Codec", codec_class)
    declared = spaces.Dict(a=spaces.Box(-9, 9, (1,), np.float32))
    constructor = functools.partial(ScriptedRewards, {"a": paid, "b": paid}, declared, infos)
    env = parallel(constructor, 2, backend="serial")
    env.reset()
    assert_same(env.step([{}] * 2)[1], ({"a": paid.astype(np.float32), "b": paid},) * 2)
    by_agent = PettingZooVecEnv(parallel(constructor, 2, backend="serial"))
    by_agent.reset()
    arrays = by_agent.step(dict.fromkeys("ab", np.zeros(2, int)))[1]
    assert_same(arrays["a"], np.stack([paid.astype(np.float32)] * 2))
    assert_same(arrays["b"], np.concatenate([paid, paid]).astype(np.float64))
    of_two = functools.partial(ScriptedRewards, {"a": paid, "b": paid}, None, infos)
    env = parallel(of_two, 2, backend="serial")
    env.reset()
    with pytest.raises(
        EnvError, match=r"the reward of agent 'a': expected an array of shape \(2,\).* got shape \(1,\)"
    ):
        env.step([{}] * 2)


def test_environments_must_have_equal_reward_spaces(parallel, build):
    three = spaces.Dict(a=spaces.Box(-9, 9, (3,), np.float32))
    constructors = [functools.partial(ScriptedRewards, {}), functools.partial(ScriptedRewards, {}, three)]
    with pytest.raises(ValueError, match=r"environment 1 differs .* in the reward space of agent 'a'"):
        build(constructors, Setup("serial", True, 1))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_an_interrupted_step_are_zero(mode, shared_memory, build):
    constructors = [functools.partial(Couriers, crashes_at=3)] * 2
    env = build(constructors, Setup("process", shared_memory, 2), mode, on_error="restart")
    env.reset()
    for _ in range(3):
        _, rewards, _, _, infos = env.step([dict.fromkeys(acting, 1) for acting in env.acting])
    assert infos[0]["__common__"]["restarted"]
    assert_same(rewards[0], {agent: np.zeros(2, np.float32) for agent in ["van", "bike"]})
    assert rewards[1]["van"].any()
    assert rewards[0]["van"] is not rewards[0]["bike"]


# -- facades -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("mode", MODES)
def test_rewards_by_agent(mode, shared_memory, parallel):
    """Agents with different numbers of objectives; zeros for absent agents."""
    constructor = functools.partial(Couriers, one_by_one=True)
    due = [plain_rewards(constructor, 5 + env_id, 9, mode) for env_id in range(3)]
    env = PettingZooVecEnv(parallel(constructor, 3, mode, seed=5, shared_memory=shared_memory))
    env.reset()
    for step in range(9):
        ones = dict.fromkeys(env.possible_agents, np.ones(3, np.int64))
        _, rewards, *_ = env.step(ones)
        for agent in env.possible_agents:
            nothing = np.zeros(env.single_reward_space(agent).shape, np.float32)  # type: ignore[union-attr]
            assert_same(rewards[agent], np.stack([of_env[step].get(agent, nothing) for of_env in due]))
            assert rewards[agent] in env.reward_space(agent)  # type: ignore[operator]
        if env.over.all() and mode == "DISABLED":
            env.reset(env_ids=[0, 2])
            env.reset(env_ids=[1])


def test_rewards_in_rows_are_a_matrix(parallel):
    env = GymnasiumVectorEnv(parallel(Couriers, 3, "NEXT_STEP", seed=5))
    due = [plain_rewards(Couriers, 5 + env_id, 9, "NEXT_STEP") for env_id in range(3)]
    assert env.reward_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    env.reset()
    nothing = np.zeros(2, np.float32)
    for step in range(9):
        _, rewards, *_ = env.step(np.ones(9, np.int64))
        rows = [of_env[step].get(agent, nothing) for of_env in due for agent in ("van", "bike", "drone")]
        assert_same(rewards, np.stack(rows))


def test_rows_need_equal_reward_spaces(parallel):
    with pytest.raises(ValueError, match=r"the reward_space of 'bike' is .* and of 'van' it is"):
        GymnasiumVectorEnv(parallel(functools.partial(Couriers, one_by_one=True), 2, True))


def test_scalar_in_place_of_a_vector_is_refused_in_arrays(parallel):
    env = PettingZooVecEnv(parallel(functools.partial(ScriptedRewards, {"a": 1.5, "b": 1.0}), 2, True))
    env.reset()
    with pytest.raises(ValueError, match=r"environment 0: the reward of agent 'a' is .*1.5.*`reward_space = None`"):
        env.step(dict.fromkeys("ab", np.zeros(2, np.int64)))


RULES: list[Any] = [
    [0.25, 4.0],
    lambda vector: 0.25 * vector[0] + 4 * vector[1],
    {"van": [0.25, 4.0], "bike": lambda vector: vector @ [0.25, 4.0], "drone": np.array([0.25, 4.0])},
]


class ScalarFacade:
    """Stands for a facade of a library with scalar rewards."""


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("rule", RULES, ids=["weights", "function", "by agent"])
def test_scalarize(rule, shared_memory, parallel):
    due = [plain_rewards(Couriers, 5 + env_id, 9, "SAME_STEP") for env_id in range(3)]
    env = parallel(Couriers, 3, True, seed=5, shared_memory=shared_memory)
    facade = ScalarFacade()
    stepper = ArrayStepper(env, facade, env.metadata["autoreset_mode"], scalarize=rule)
    stepper.reset()
    for step in range(9):
        arrays = stepper.step(dict.fromkeys(env.possible_agents, np.ones(3, np.int64)))
        for place, agent in enumerate(env.possible_agents):
            paid = [of_env[step].get(agent, np.zeros(2)) @ np.array([0.25, 4.0]) for of_env in due]
            assert np.allclose(arrays.rewards[:, place], paid)


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (None, ValueError, "ScalarFacade takes rewards that are numbers, but agent 'van' declares vectors.*scalarize="),
        ([1.0], ValueError, r"have shape \(2,\), so scalarize= must be finite weights"),
        ([1.0, np.inf], ValueError, "must be finite weights"),
        ({"van": [1, 1]}, ValueError, "no entry for agent 'bike'"),
        ("sum", TypeError, "must be weights or a function"),
    ],
    ids=str,
)
def test_scalar_facade_refuses_vectors_without_scalarize(rule, error, words, parallel):
    facade, env = ScalarFacade(), parallel(Couriers, 2, True)
    with pytest.raises(error, match=words):
        ArrayStepper(env, facade, env.metadata["autoreset_mode"], scalarize=rule)


class CouriersOfDifferentSpaces(Couriers):
    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3 + self.possible_agents.index(agent))


@pytest.mark.parametrize(
    ("constructor", "how"),
    [
        (Couriers, {}),
        (Couriers, {"group_map": {"road": ["van", "bike"], "air": ["drone"]}}),
        (functools.partial(Couriers, one_by_one=True), {}),
        (CouriersOfDifferentSpaces, {"group_map": {"all": ["van", "bike", "drone"]}, "pad": True}),
    ],
    ids=["one group", "groups", "different vectors", "padded"],
)
def test_stacked_rewards_that_are_scalarized(constructor, how, parallel):
    env = StackedVecEnv(parallel(constructor, 2, True, seed=5), scalarize=np.sum, **how)
    due = [plain_rewards(constructor, 5 + env_id, 9, "SAME_STEP") for env_id in range(2)]
    env.reset()
    for step in range(9):
        actions = {name: np.ones((2, len(agents)), int) for name, agents in env.group_map.items()}
        rewards = env.step(actions if len(actions) > 1 else next(iter(actions.values())))[1]
        rewards = rewards if isinstance(rewards, dict) else {next(iter(env.group_map)): rewards}
        for name, agents in env.group_map.items():
            of_group = [[of_env[step].get(agent, np.zeros(1)).sum() for agent in agents] for of_env in due]
            np.testing.assert_allclose(rewards[name], of_group, rtol=1e-6)


def test_wrong_or_unused_scalarize(parallel):
    space = {"a": spaces.Box(-1, 1, (2,))}
    with pytest.raises(TypeError, match="scalarize must return a number for the reward of agent 'a'"):
        as_number(reward_rules("It", lambda vector: vector, space), "a", np.zeros(2))
    assert as_number(reward_rules("It", [1, 1], space), "a", 3.5) == 3.5
    with pytest.raises(ValueError, match="no agent declares a reward_space"):
        reward_rules("It", [1, 1], {})


def test_single_environment_with_vector_rewards():
    with ParallelEnv([Couriers] * 2, False, backend="serial") as parallel:
        env = PettingZooVecEnv(parallel).single(1)
        env.reset()
        rewards = env.step(dict.fromkeys(env.agents, 1))[1]
        assert rewards["van"] in env.reward_space("van")
