"""`action_masks`: the masks of the running episode, in every auto-reset mode and from every source.

Those of agents that do not act are tested in `test_reported_masks`.
"""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from helpers.comparison import assert_same, spoil
from helpers.setups import Setup
from mpe2 import simple_spread_v3
from pettingzoo.classic import connect_four_v3
from simulators.buggy import NoActionSpace
from simulators.masked_actions import BoxWithMask, Formed, Turnstile
from simulators.native_arena import Arena
from simulators.variable_agents import VariableAgents

from marl_parallel import ParallelEnv
from marl_parallel.action_masks import ActionSampler, for_sample, mask_of
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.cli.check import RandomActions
from marl_parallel.cli.measure import adapted_for_loop
from marl_parallel.sources.native import Received
from marl_parallel.vector import PettingZooVecEnv

pytestmark = pytest.mark.in_turn

MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
WHERE = ["infos", "observations", "both"]


def allowed_actions(env: ParallelEnv) -> list[dict]:
    """The only allowed actions by the masks; the simulators refuse all others."""
    return [
        {agent: int(np.flatnonzero(masks[agent])[0]) for agent in acting if agent in masks}
        for acting, masks in zip(env.acting, env.action_masks)
    ]


def turnstiles(where: str, count: int = 4, **more: Any) -> list[Any]:
    return [functools.partial(Turnstile, where, **more)] * count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_masks_belong_to_the_running_episode(where, mode, backend_setup, build):
    """Across episode ends, deaths and resets, on every backend. If both places have a mask, the info's mask counts."""
    follow_masks(build(turnstiles(where), backend_setup, mode), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_pickled_masks(where, mode, parallel):
    follow_masks(parallel(turnstiles(where)[0], 4, mode, shared_memory=False), mode)


def follow_masks(env: ParallelEnv, mode: str) -> None:
    """Follow the masks through several episodes."""
    assert env.action_masks == ({},) * 4
    env.reset()
    for _ in range(14):
        masks = env.action_masks
        of_acting = [of_env[agent] for of_env, acting in zip(masks, env.acting) for agent in acting]
        assert all(mask.dtype == np.bool_ and mask.sum() == 1 for mask in of_acting)
        assert all(mask.dtype == np.bool_ for of_env in masks for mask in of_env.values())
        *_, terminateds, _, _ = env.step(allowed_actions(env))
        over = [env_id for env_id, flags in enumerate(terminateds) if flags["__all__"]]
        if over and mode != "SAME_STEP":  # in the last step, masks allow nothing
            assert not any(mask.any() for env_id in over for mask in env.action_masks[env_id].values())
        if over and mode == "DISABLED":
            env.reset(env_ids=over)
    assert env.stats().resets >= 12


def test_mask_after_a_same_step_reset_belongs_to_the_new_episode(backend_setup, build):
    env = build(turnstiles("infos"), backend_setup)
    env.reset()
    for _ in range(4):
        *_, infos = env.step(allowed_actions(env))
    assert not infos[0]["host"]["action_mask"].any()
    fresh = infos[0]["host"]["reset_info"]["action_mask"]
    assert_same(env.action_masks[0]["host"], fresh.astype(np.bool_))
    assert infos[0].get("guest") == {"reset_info": infos[0]["guest"]["reset_info"]}
    assert [*env.action_masks[0]] == ["host", "guest"]


@pytest.mark.parametrize("where", WHERE)
def test_partial_reset_changes_only_masks_of_reset_environments(where, backend_setup, build):
    env = build(turnstiles(where), backend_setup)
    env.reset()
    env.step(allowed_actions(env))
    before = env.action_masks
    env.reset(env_ids=[2, 0])
    after = env.action_masks
    assert_same((after[1], after[3]), (before[1], before[3]))
    env.step([allowed_actions(env)[env_id] for env_id in (0, 2)], env_ids=[0, 2])
    env.step(allowed_actions(env))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", [True, "NEXT_STEP"])
def test_environment_in_flight_has_no_mask(mode, where, backend_setup, build):
    env = build(turnstiles(where), backend_setup, mode)
    env.reset_async()
    assert env.action_masks == ({},) * 4
    env.recv()
    for _ in range(7):
        actions, before = allowed_actions(env), env.action_masks
        env.send({1: actions[1], 3: actions[3]})
        assert_same(env.action_masks, (before[0], {}, before[2], {}))
        env.send({0: actions[0], 2: actions[2]})
        while env.pending:
            ids = env.recv(min_envs=1).env_ids
            assert all({*env.action_masks[env_id]} >= {*env.acting[env_id]} for env_id in ids)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
def test_modifying_returned_infos_and_masks_changes_nothing(shared_memory, parallel):
    for where in WHERE:
        env = parallel(turnstiles(where)[0], 4, True, shared_memory=shared_memory)
        _, infos = env.reset()
        for _ in range(9):
            spoil(infos)
            spoil(env.action_masks)
            *_, infos = env.step(allowed_actions(env))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", MODES)
def test_masks_after_a_restart(mode, where, build):
    """Environments in the same worker lose only the interrupted step."""
    constructors = turnstiles(where, crashes_at=3)
    env = build(constructors, Setup("process", True, 2), mode, on_error="restart")
    env.reset()
    marks = 0
    for _ in range(12):
        *_, terminateds, truncateds, infos = env.step(allowed_actions(env))
        marks += sum("__common__" in info for info in infos)
        over = [i for i, flags in enumerate(zip(terminateds, truncateds)) if any(flag["__all__"] for flag in flags)]
        if over and mode == "DISABLED":
            env.reset(env_ids=over)
    assert marks >= 1


@pytest.mark.parametrize("where", WHERE)
def test_masks_follow_steps_of_a_facade(where, parallel):
    for shared_memory in (True, False):
        env = parallel(turnstiles(where)[0], 4, True, shared_memory=shared_memory)
        facade = PettingZooVecEnv(env)
        facade.reset()
        for _ in range(9):
            right = allowed_actions(env)
            facade.step({agent: np.array([one.get(agent, 0) for one in right]) for agent in env.possible_agents})
        facade.close()


FORMS: list[tuple[spaces.Space, Any, Any]] = [
    (spaces.Discrete(3), [0, 1, 1], np.array([False, True, True])),
    (spaces.Discrete(3), (0, True, 1), np.array([False, True, True])),
    (spaces.Discrete(3), np.array([0, 1, 1], np.float32), np.array([False, True, True])),
    (
        spaces.MultiDiscrete([2, 3]),
        (np.array([1, 0], np.int8), np.array([0, 0, 1])),
        (np.array([True, False]), np.array([False, False, True])),
    ),
    (spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 0, 1]], (np.array([True, False]), np.array([False, False, True]))),
    (spaces.MultiDiscrete([2, 3]), np.array([1, 0, 0, 0, 1]), np.array([True, False, False, False, True])),
    (spaces.MultiBinary(3), np.array([0, 2, 1], np.int8), np.array([0, 2, 1], np.int8)),
    (
        spaces.Dict(go=spaces.Discrete(2), aim=spaces.Box(0, 1)),
        {"go": np.array([0, 1], np.int8)},
        {"go": np.array([False, True])},
    ),
    (
        spaces.Tuple((spaces.Box(0, 1), spaces.Discrete(2))),
        (None, np.array([0, 1], np.int8)),
        (None, np.array([False, True])),
    ),
]


@pytest.mark.parametrize(("acts", "returned", "due"), FORMS, ids=lambda part: type(part).__name__)
def test_mask_keeps_its_form_and_limits_sampled_actions(acts, returned, due, parallel):
    env = parallel(functools.partial(Formed, acts, lambda: returned), 2)
    env.reset()
    assert_same(env.action_masks, ({"agent_0": due},) * 2)
    mask = for_sample(acts, env.action_masks[0]["agent_0"])
    acts.seed(0)
    drawn = [acts.sample(mask) for _ in range(40)]
    allowed = {
        "Discrete": lambda action: action > 0,
        "MultiDiscrete": lambda action: [*action] == [0, 2],
        "MultiBinary": lambda action: action[0] == 0 and action[2] == 1,
        "Dict": lambda action: action["go"] == 1,
        "Tuple": lambda action: action[1] == 1,
    }[type(acts).__name__]
    assert all(map(allowed, drawn))


@pytest.mark.parametrize(("acts", "returned", "due"), FORMS, ids=lambda part: type(part).__name__)
def test_draws_are_those_of_the_spaces_own_sample(acts, returned, due):
    """The same seed draws what Gymnasium draws with the mask."""
    plain = copy.deepcopy(acts)
    plain.seed(int(np.random.SeedSequence((7, 0)).generate_state(1)[0]))
    sampler = ActionSampler({"a": acts}, (7, 0))
    for _ in range(40):
        assert_same(sampler.sample(["a"], {"a": mask_of({"action_mask": returned}, None)})["a"], drawn_by(plain, due))


def drawn_by(space: spaces.Space, mask: Any) -> Any:
    """What the space itself draws, with the mask in the form that Gymnasium takes."""
    if isinstance(space, spaces.MultiDiscrete) and isinstance(mask, np.ndarray):
        mask = tuple(np.split(mask, np.cumsum(space.nvec)[:-1]))
    return space.sample(as_int8(mask))


def as_int8(mask: Any) -> Any:
    if isinstance(mask, tuple):
        return tuple(map(as_int8, mask))
    if isinstance(mask, dict):
        return {"aim": None} | {key: as_int8(part) for key, part in mask.items()}
    return None if mask is None else mask.astype(np.int8)


ODD = [
    (spaces.Discrete(3), [1, 1]),
    (spaces.Discrete(3), np.ones((3, 1))),
    (spaces.Discrete(3), "all"),
    (spaces.Discrete(3), [0.5, 0.5, 0]),
    pytest.param(spaces.Discrete(3), object(), id="Discrete(3)-object"),
    (spaces.MultiDiscrete([2, 3]), [1, 1, 1]),
    (spaces.Box(0, 1, (2,)), [1, 1]),
    (spaces.Tuple((spaces.Discrete(2),)), [1, 1]),
    (spaces.Dict(go=spaces.Discrete(2)), [1, 1]),
]


@pytest.mark.parametrize(("acts", "mask"), ODD, ids=str)
def test_actor_ignores_masks_of_another_form(acts, mask):
    found = mask_of(None, {"action_mask": mask})
    assert acts.contains(acts.sample(for_sample(acts, found)))
    assert {*RandomActions({"a": acts}, 0)(["a"], {}, {"a": {"action_mask": mask}})} == {"a"}


def test_mask_that_allows_nothing_does_not_select_action_zero():
    actor = RandomActions({"a": spaces.Discrete(5)}, 0)
    nothing = {"a": {"action_mask": np.zeros(5, np.int8)}}
    assert {int(actor(["a"], {}, nothing)["a"]) for _ in range(50)} == {0, 1, 2, 3, 4}


def test_plain_loop_of_continuous_actions_with_a_mask():
    adapted = adapted_for_loop(BoxWithMask())
    assert adapted.action_spaces
    assert not isinstance(adapted, GymnasiumEnv)


class MaskedArena(Arena):
    """A native simulator with masks: in the infos of tanks, in the observation of the scout."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        seen = self.schema.observation_spaces["scout"]
        assert isinstance(seen, spaces.Dict)
        self.schema.observation_spaces["scout"] = spaces.Dict(  # type: ignore[index]
            {**seen.spaces, "action_mask": spaces.MultiBinary(3)}
        )

    def receive(self) -> Received:
        received = super().receive()
        tanks, scouts = received.observations
        allowed = np.eye(3, dtype=np.int8)[received.elapsed % 3]
        return received._replace(observations=[tanks, {**scouts, "action_mask": allowed[:, None]}])


def test_masks_of_a_native_simulator():
    with ParallelEnv.from_native(Arena(3)) as env:
        env.reset()
        assert env.action_masks == ({},) * 3
    with ParallelEnv.from_native(MaskedArena(3)) as env:
        observations, _ = env.reset()
        spoil(observations)
        for moment in range(1, 7):
            masks = env.action_masks
            assert_same(masks, ({"scout": np.eye(3, dtype=np.bool_)[(moment - 1) % 4 % 3]},) * 3)
            actions = {"tank_0": 1, "scout": {"go": 1, "look": np.zeros(2, np.float32)}, "tank_1": 1}
            observations, *_ = env.step([actions] * 3)
            spoil(observations)


# -- random legal actions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_sampled_actions_are_legal(where, mode, backend_setup, build):
    """The simulators refuse all other actions."""
    env = build(turnstiles(where), backend_setup, mode)
    assert env.sample_actions() == [{}] * 4
    env.reset()
    for _ in range(14):
        actions = env.sample_actions()
        assert [[*of_env] for of_env in actions] == [*env.acting]
        *_, terminateds, _, _ = env.step(actions)
        over = [env_id for env_id, flags in enumerate(terminateds) if flags["__all__"]]
        if over and mode == "DISABLED":
            env.reset(env_ids=over)
    assert env.stats().resets >= 12


@pytest.mark.parametrize("mode", [True, "NEXT_STEP"])
def test_sampled_actions_in_an_asynchronous_loop(mode, backend_setup, build):
    env = build([connect_four_v3.env] * 4, backend_setup, mode)
    env.reset_async()
    for _ in range(60):
        ids = env.recv(min_envs=2).env_ids
        env.send(env.sample_actions(ids), ids)
    with pytest.raises(AlreadyPendingCallError, match="sample_actions"):
        env.sample_actions()


def sampled(env: ParallelEnv, steps: int = 12) -> list[Any]:
    actions = []
    for _ in range(steps):
        actions.append(env.sample_actions())
        env.step(actions[-1])
    return actions


def test_sampled_actions_repeat_with_the_seed(parallel):
    env, other, third = (parallel(VariableAgents, 3, seed=seed) for seed in (7, 7, 8))
    for one in (env, other, third):
        one.reset()
    first = sampled(env)
    assert_same(sampled(other), first)
    with pytest.raises(AssertionError):
        assert_same(sampled(third), first)
    env.reset()
    with pytest.raises(AssertionError):
        assert_same(sampled(env), first)
    env.reset(seed=7)
    assert_same(sampled(env), first)
    env.reset(seed=8, env_ids=[1])  # gets the seed 9, and the others go on
    assert sampled(env)[0] != first[0]


def test_environments_and_agents_draw_different_actions(parallel):
    env = parallel(simple_spread_v3.parallel_env, 3)
    env.reset()
    drawn = sampled(env, 25)
    series = {tuple(step[i][agent] for step in drawn) for i in range(3) for agent in env.possible_agents}
    assert len(series) == 9


def test_sampling_does_not_use_the_generators_of_the_spaces(parallel):
    env = parallel(simple_spread_v3.parallel_env, 2)
    env.reset()
    env.action_space.seed(3)
    due = [env.action_space.sample() for _ in range(3)]
    env.action_space.seed(3)
    sampled(env)
    assert [env.action_space.sample() for _ in range(3)] == due


def test_refused_reset_does_not_change_sampled_actions(parallel):
    env, other = parallel(VariableAgents, 2), parallel(VariableAgents, 2)
    for one in (env, other):
        one.reset()
        one.sample_actions()
    with pytest.raises(TypeError, match="options"):
        env.reset(seed=42, options={"cannot be pickled": threading.Lock()})
    assert_same(env.sample_actions(), other.sample_actions())


def test_sampling_without_an_action_space_is_refused(parallel):
    env = parallel(NoActionSpace, 2)
    env.reset()
    with pytest.raises(ValueError, match=r"agent 'agent_1' declares no action space to draw random actions from"):
        env.sample_actions()
