"""Action masks of agents that do not act: those that the simulator reports are returned, in dicts and arrays."""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same
from pettingzoo.classic import connect_four_v3
from simulators.reported_masks import AGENTS, NO_OP, DictSquad, OpenSquad, PettingZooSquad

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.vector import GymnasiumVectorEnv, StackedVecEnv
from marl_parallel.vector.stepper import ArrayStepper

pytestmark = [pytest.mark.in_turn, pytest.mark.release_independent]

MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
WHERE = ["infos", "observations", "both", "large infos"]
KINDS = [PettingZooSquad, DictSquad]


class Loop:
    """Plain simulators in the auto-reset mode, and the masks that each of them reported last."""

    def __init__(self, make: Any, count: int, mode: str) -> None:
        self.mode, self.simulators, self.over = mode, [make(env_id=env_id) for env_id in range(count)], [False] * count
        self.masks: list[dict[str, np.ndarray]] = [{}] * count
        for env_id in range(count):
            self.reset(env_id)

    def reset(self, env_id: int) -> None:
        self.over[env_id] = False
        self.note(env_id, *self.simulators[env_id].reset())

    def note(self, env_id: int, observations: dict, infos: dict) -> None:
        sources = (infos.get(agent, {}) for agent in AGENTS)
        seen = (observations.get(agent, {}) for agent in AGENTS)
        found = {
            agent: info.get("action_mask", one.get("action_mask") if isinstance(one, dict) else None)
            for agent, info, one in zip(AGENTS, sources, seen)
        }
        self.masks[env_id] = {agent: mask.astype(np.bool_) for agent, mask in found.items() if mask is not None}

    def actions(self) -> list[dict[str, int]]:
        """The first legal action of each agent in the simulators' lists."""
        return [
            {} if over else {agent: int(np.flatnonzero(masks[agent])[0]) for agent in simulator.agents}
            for simulator, masks, over in zip(self.simulators, self.masks, self.over)
        ]

    def step(self, actions: list[dict[str, int]]) -> None:
        for env_id, of_env in enumerate(actions):
            if self.over[env_id]:
                assert self.mode == "NEXT_STEP"
                self.reset(env_id)
                continue
            observations, *_, infos = self.simulators[env_id].step(of_env)
            self.note(env_id, observations, infos)
            if not self.simulators[env_id].agents:
                self.over[env_id] = True
                if self.mode == "SAME_STEP":
                    self.reset(env_id)

    def stacked(self, agents: Any = AGENTS) -> np.ndarray:
        everything = np.ones(4, np.bool_)
        return np.array([[masks.get(agent, everything) for agent in agents] for masks in self.masks])


def squads(kind: Any, where: str) -> list[Any]:
    return [functools.partial(kind, where)] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "where"), [*itertools.product(KINDS, WHERE), (OpenSquad, "infos")])
def test_masks_of_the_dead(kind, where, mode, two_worker_setup, build):
    """Also in the last step of an episode, and after it where nothing is reset automatically."""
    env = build(squads(kind, where), two_worker_setup, mode)
    loop = Loop(functools.partial(kind, where), 3, mode)
    assert env.action_masks == ({},) * 3
    env.reset()
    died = ended = 0
    for _ in range(13):
        assert_same(env.action_masks, tuple(loop.masks))
        actions = loop.actions()
        assert [{*acting} for acting in env.acting] == [{*of_env} for of_env in actions]
        died += any(np.array_equal(mask, NO_OP) for mask in env.action_masks[0].values())
        env.step(actions)
        loop.step(actions)
        if loop.over[0]:
            ended += 1
            assert_same(env.action_masks[0]["scout"], NO_OP.astype(np.bool_)) if where != "both" else None
        if loop.over[0] and mode == "DISABLED":
            assert_same(env.action_masks, tuple(loop.masks))
            env.reset(env_ids=[2, 0])
            for env_id in (2, 0):
                loop.reset(env_id)
            assert_same(env.action_masks, tuple(loop.masks))
            env.reset(env_ids=[1])
            loop.reset(1)
    assert died >= 6
    assert ended == (0 if mode == "SAME_STEP" else 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_masks_of_the_dead_in_arrays(where, mode, two_worker_setup, build):
    """All ones only where the simulator reports none."""
    kind = PettingZooSquad
    env = StackedVecEnv(build(squads(kind, where), two_worker_setup, mode))
    loop = Loop(functools.partial(kind, where), 3, mode)
    env.reset()
    for _ in range(13):
        np.testing.assert_array_equal(env.action_masks, loop.stacked())
        actions = loop.actions()
        env.step(np.array([[of_env.get(agent, 0) for agent in AGENTS] for of_env in actions]))
        loop.step(actions)
        np.testing.assert_array_equal(env.action_masks, loop.stacked())
        if loop.over[0] and mode == "DISABLED":
            env.reset(env_ids=[0, 1, 2])
            for env_id in range(3):
                loop.reset(env_id)


@pytest.mark.parametrize("where", ["infos", "observations"])
def test_masks_of_the_dead_in_flight_and_before_a_reset(where, backend_setup, build):
    env = build(squads(DictSquad, where), backend_setup, False)
    loop = Loop(functools.partial(DictSquad, where), 3, "DISABLED")
    env.reset()
    for _ in range(4):
        actions = loop.actions()
        env.step(actions)
        loop.step(actions)
    env.send({1: loop.actions()[1]})
    assert_same(env.action_masks, (loop.masks[0], {}, loop.masks[2]))
    env.recv()
    env.restart([2])
    assert [bool(masks) for masks in env.action_masks] == [True, True, False]
    env.reset(env_ids=[2])
    assert [*env.action_masks[2]] == [*AGENTS]


@pytest.mark.parametrize("mode", MODES)
def test_action_masks_of_an_environment_that_was_restarted(mode, backend_setup, build):
    """Where the report of a restart is the latest result, there is no simulator whose masks could be known."""

    class Fails(DictSquad):
        def step(self, actions: dict) -> Any:
            if self.shift == 0 and self.time == 3:
                raise RuntimeError
            return super().step(actions)

    for where in WHERE[:2]:
        env = build(squads(Fails, where), backend_setup, mode, on_error="restart")
        stepper = ArrayStepper(env, env)
        stepper.reset()
        for _ in range(4):
            env.step(
                [
                    {a: int(np.flatnonzero(masks[a])[0]) for a in acting}
                    for acting, masks in zip(env.acting, env.action_masks)
                ]
            )
        assert [*env.action_masks[0]] == ([*AGENTS] if mode == "SAME_STEP" else [])
        assert [*env.action_masks[1]] == [*AGENTS]
        masks = stepper.action_masks(AGENTS)
        assert masks[0].all() == (mode != "SAME_STEP")
        assert masks[1, 0].tolist() == NO_OP.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_action_masks_of_an_idle_environment_that_was_restarted(mode, backend_setup, build):
    """Until its next result, which reports the restart: neither those of the old one, nor those of the new one."""

    class Breaks(DictSquad):
        def explode(self) -> None:
            raise RuntimeError

    for where in WHERE:
        env = build(squads(Breaks, where), backend_setup, mode, on_error="restart")
        stepper = ArrayStepper(env, env)
        stepper.reset()
        with pytest.raises(EnvError):
            env.call("explode", env_ids=[0])
        assert [[*masks] for masks in env.action_masks] == [[], [*AGENTS], [*AGENTS]]
        assert [masks.all() for masks in stepper.action_masks(AGENTS)] == [True, False, False]
        env.step(env.sample_actions())
        assert [*env.action_masks[0]] == ([*AGENTS] if mode == "SAME_STEP" else [])


def test_masks_of_rows(parallel):
    """A facade with one row for each agent, some of whom are chosen."""
    env = GymnasiumVectorEnv(
        parallel(functools.partial(PettingZooSquad, "observations"), 2, "NEXT_STEP"),
        ["guard", "scout"],
        others=lambda agent, seen: seen["action_mask"].argmax(axis=1),
    )
    loop = Loop(functools.partial(PettingZooSquad, "observations"), 2, "NEXT_STEP")
    _, infos = env.reset()
    for _ in range(8):
        due = loop.stacked(("guard", "scout")).reshape(4, 4)
        np.testing.assert_array_equal(infos["action_mask"], due)
        *_, infos = env.step(due.argmax(axis=1))
        loop.step(loop.actions())


def test_masks_of_the_player_whose_turn_it_is_not(parallel):
    """PettingZoo's game reports one that allows nothing."""
    env, game = parallel(connect_four_v3.env, 2), connect_four_v3.env()
    env.reset()
    game.reset()
    stepper = ArrayStepper(env, game)
    for column in [3, 3, 4, 4]:
        due = {agent: game.observe(agent)["action_mask"].astype(np.bool_) for agent in game.possible_agents}
        assert_same(env.action_masks, (due,) * 2)
        assert sorted(mask.any() for mask in due.values()) == [False, True]
        np.testing.assert_array_equal(stepper.action_masks(env.possible_agents), [[*due.values()]] * 2)
        env.step([dict.fromkeys(acting, column) for acting in env.acting])
        game.step(column)


def test_random_actions_are_those_of_agents_that_act(parallel):
    env: ParallelEnv = parallel(functools.partial(DictSquad, "infos"), 3)
    env.reset()
    for _ in range(4):
        actions = env.sample_actions()
        assert [[*of_env] for of_env in actions] == [*env.acting]
        env.step(actions)


class Reporting(DictEnv):
    """Reports action masks apart from observations and infos."""

    mask_spaces: ClassVar[dict[str, spaces.Space]] = dict.fromkeys(AGENTS, spaces.MultiBinary(4))
    mask: Any = NO_OP

    def masks(self) -> dict[str, Any]:
        return dict.fromkeys(AGENTS, self.mask)


class NoInfos(DictSquad):
    def infos(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "mask", [NO_OP[None], NO_OP[:1], NO_OP[:, None], np.int8(1), np.array(1), np.full(4, 0.5)], ids=repr
)
def test_reported_masks_of_another_form_are_an_error(mask, two_worker_setup, build):
    """However they travel."""
    env = build([NoInfos] * 2, two_worker_setup, adapter=type("Wrong", (Reporting,), {"mask": mask}))
    with pytest.raises(EnvError, match=r"the action mask of agent 'scout': expected an array of shape \(4,\)"):
        env.reset()


@pytest.mark.parametrize("mask", [NO_OP.astype(np.int64), NO_OP.astype(bool), NO_OP.tolist()], ids=repr)
def test_reported_masks_of_another_dtype(mask, two_worker_setup, build):
    env = build([NoInfos] * 2, two_worker_setup, adapter=type("Cast", (Reporting,), {"mask": mask}))
    env.reset()
    assert_same(env.action_masks, (dict.fromkeys(AGENTS, NO_OP.astype(np.bool_)),) * 2)
