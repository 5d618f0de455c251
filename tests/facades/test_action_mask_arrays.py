"""`ArrayStepper.action_masks`: the masks of several agents as one array, beside a plain loop.

Those of agents that do not act are also tested in `semantics/test_reported_masks`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.setups import Setup
from pettingzoo import ParallelEnv as PettingZooEnv
from pettingzoo.classic import connect_four_v3
from simulators.masked_actions import Formed, Turnstile
from simulators.native_arena import Arena
from simulators.pymarl_envs import AGENTS as TEAM
from simulators.pymarl_envs import Skirmish

from marl_parallel import ParallelEnv
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.columns import MaskColumns
from marl_parallel.sources.native import Received
from marl_parallel.vector.stepper import ArrayStepper

pytestmark = pytest.mark.in_turn

AGENTS = ["guest", "host"]  # not in the simulators' order
EVERYTHING = np.ones(5, np.bool_)


class Facade:
    def __init__(self, env: ParallelEnv) -> None:
        self.stepper = ArrayStepper(env, self)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("where", ["infos", "observations", "both"])
def test_masks_are_those_of_a_plain_loop(where, mode, backend_setup, build):
    """Across deaths and ends of episodes; the simulators refuse all other actions."""
    constructors = [functools.partial(Turnstile, where)] * 3
    env = build(constructors, backend_setup, mode)
    facade = Facade(env)
    loop = [Turnstile(where, env_id) for env_id in range(3)]
    facade.stepper.reset()
    for simulator in loop:
        simulator.reset()
    reported = [simulator.agents for simulator in loop]  # also in the step in which an agent dies
    for _ in range(11):
        due = np.array([
            [simulator.mask(a) if a in agents else EVERYTHING for a in AGENTS]
            for simulator, agents in zip(loop, reported)
        ])  # fmt: skip
        masks = facade.stepper.action_masks(AGENTS)
        assert masks.dtype == np.bool_
        np.testing.assert_array_equal(masks, due)
        masks[:] = False  # the arrays are the caller's own
        actions = {agent: due[:, place].argmax(axis=1) for place, agent in enumerate(AGENTS)}
        arrays = facade.stepper.step(actions)
        over = np.flatnonzero(arrays.terminated | arrays.truncated).tolist()
        if over and mode == "DISABLED":
            facade.stepper.reset(env_ids=over)
        for of_env, simulator in enumerate(loop):
            if simulator.agents:
                reported[of_env] = simulator.agents
                simulator.step({agent: int(actions[agent][of_env]) for agent in simulator.agents})
                if simulator.agents or mode == "NEXT_STEP":
                    continue
            simulator.reset()
            reported[of_env] = simulator.agents


@pytest.mark.parametrize("where", ["infos", "observations"])
def test_masks_of_environments_in_flight_are_all_true(where, parallel):
    facade = Facade(parallel(functools.partial(Turnstile, where), 3))
    facade.stepper.reset()
    right = facade.stepper.action_masks(AGENTS).argmax(axis=2)
    facade.stepper.send({agent: right[:, place] for place, agent in enumerate(AGENTS)})
    assert facade.stepper.action_masks(AGENTS).all()
    facade.stepper.receive()
    assert (facade.stepper.action_masks(AGENTS).sum(axis=2) == 1).all()


def test_masks_of_a_turn_based_game(parallel):
    facade, game = Facade(parallel(connect_four_v3.env, 2)), connect_four_v3.env()
    facade.stepper.reset()
    game.reset()
    agents = game.possible_agents
    for column in [3, 3, 3, 3, 3, 3, 0, 1, 0]:
        masks = facade.stepper.action_masks(agents)
        assert masks.shape == (2, 2, 7)
        place = agents.index(game.agent_selection)
        np.testing.assert_array_equal(masks[:, place], [game.last()[0]["action_mask"].astype(bool)] * 2)
        assert not masks[:, 1 - place].any()
        facade.stepper.step(dict.fromkeys(agents, np.full(2, column)))
        game.step(column)


CHOICES = spaces.MultiDiscrete([2, 3])
FORMS: dict[str, tuple[spaces.Space, Any, list[int] | None]] = {
    "zeros_and_ones": (spaces.Discrete(3), [0, 1, 1], [0, 1, 1]),
    "starts_elsewhere": (spaces.Discrete(3, start=5), np.array([1, 0, 0], np.float32), [1, 0, 0]),
    "allows_nothing": (spaces.Discrete(3), [0, 0, 0], [0, 0, 0]),
    "too_long": (spaces.Discrete(3), [0, 1, 1, 0], None),
    "no_numbers": (spaces.Discrete(3), "all", None),
    "flat": (CHOICES, np.array([1, 0, 0, 0, 1]), [1, 0, 0, 0, 1]),
    "by_part": (CHOICES, (np.array([1, 0], np.int8), np.array([0, 0, 1])), [1, 0, 0, 0, 1]),
    "one_part_allows_nothing": (CHOICES, np.array([0, 0, 0, 1, 1]), [0, 0, 0, 1, 1]),
}


class Observed(PettingZooEnv):
    """One agent whose observation has a mask of some form."""

    metadata = {"name": "observed"}  # noqa: RUF012

    def __init__(self, acts: spaces.Space, mask: Any) -> None:
        self.possible_agents, self.acts, self.mask = ["a"], acts, mask

    def observation_space(self, agent: str) -> spaces.Space:
        parts = self.mask if isinstance(self.mask, tuple) else (np.asarray(self.mask),)
        boxes = [spaces.Box(0, 1, part.shape, part.dtype) for part in parts]  # type: ignore[arg-type]
        return spaces.Dict(action_mask=spaces.Tuple(boxes) if isinstance(self.mask, tuple) else boxes[0])

    def action_space(self, agent: str) -> spaces.Space:
        return self.acts

    def observed(self) -> dict[str, Any]:
        mask = self.mask if isinstance(self.mask, tuple) else np.asarray(self.mask)
        return {"a": {"action_mask": mask}}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents = ["a"]
        return self.observed(), {"a": {}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        return self.observed(), {"a": 0.0}, {"a": False}, {"a": False}, {"a": {}}


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("form", FORMS)
def test_masks_of_every_form(form, shared_memory, parallel):
    acts, mask, due = FORMS[form]
    made = [functools.partial(Formed, acts, lambda: mask)]
    if form != "no_numbers":
        made.append(functools.partial(Observed, acts, mask))
    for constructor in made:
        stepper = Facade(parallel(constructor, 2, shared_memory=shared_memory)).stepper
        stepper.reset()
        masks = stepper.action_masks(stepper.view.agents)
        np.testing.assert_array_equal(masks, [[[1] * masks.shape[2] if due is None else due]] * 2)


def test_masks_after_a_restart(build):
    constructors = [functools.partial(Turnstile, "observations", crashes_at=3)] * 2
    stepper = Facade(build(constructors, Setup("process", True, 2), on_error="restart")).stepper
    stepper.reset()
    for _ in range(9):
        masks = stepper.action_masks(AGENTS)
        assert set(masks.sum(axis=2).ravel().tolist()) <= {1, 5}
        stepper.step({agent: masks[:, place].argmax(axis=1) for place, agent in enumerate(AGENTS)})


class MaskedTanks(Arena):
    """A native simulator: the infos of all agents have masks, which allow one action at a time."""

    def receive(self) -> Received:
        received = super().receive()
        allowed = np.eye(5, dtype=np.int8)[(received.env_ids + received.elapsed) % 5]
        return received._replace(infos={"action_mask": np.stack([allowed] * 3, axis=1)})


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_masks_that_are_one_array_are_copied_whole(mode, monkeypatch):
    """Those of PyMARL's simulators, in the worker and in the facade, also after the ends of episodes."""
    monkeypatch.delattr(MaskColumns, "write_all")
    monkeypatch.delattr(BlockTransitions, "stacked_masks")
    monkeypatch.delattr(BlockTransitions, "masks")
    facade = Facade(ParallelEnv([Skirmish] * 3, mode, 5, backend="serial"))
    stepper, env = facade.stepper, facade.stepper.env
    stepper.reset()
    ends = 0
    for _ in range(25):
        masks = stepper.action_masks(TEAM)
        np.testing.assert_array_equal(masks, np.array(env.call("get_avail_actions"), bool))
        arrays = stepper.step({agent: masks[:, place].argmax(axis=1) for place, agent in enumerate(TEAM)})
        over = np.flatnonzero(arrays.terminated | arrays.truncated).tolist()
        ends += len(over)
        if over and mode == "DISABLED":
            np.testing.assert_array_equal(stepper.action_masks(TEAM), np.array(env.call("get_avail_actions"), bool))
            stepper.reset(env_ids=over)
    assert ends > 3
    stepper.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_masks_that_are_one_array_in_other_orders_and_while_unknown(shared_memory, parallel):
    env = parallel(Skirmish, 3, "DISABLED", shared_memory=shared_memory)
    facade = Facade(env)
    assert facade.stepper.action_masks(TEAM).all()  # before the first reset
    facade.stepper.reset()
    due = np.array(env.call("get_avail_actions"), bool)
    assert not due.all()
    np.testing.assert_array_equal(facade.stepper.action_masks(TEAM), due)
    np.testing.assert_array_equal(facade.stepper.action_masks(TEAM[::-1]), due[:, ::-1])
    np.testing.assert_array_equal(facade.stepper.action_masks(TEAM[1:2]), due[:, 1:2])
    env.restart([1])
    due[1] = True
    np.testing.assert_array_equal(facade.stepper.action_masks(TEAM), due)


def test_masks_of_a_native_simulator():
    tanks = ["tank_1", "tank_0"]
    for simulator in (Arena(3), MaskedTanks(3)):
        with ParallelEnv.from_native(simulator) as env:
            stepper = Facade(env).stepper
            stepper.reset()
            for moment in range(1, 8):
                masks = stepper.action_masks(tanks)
                allowed = np.eye(5, dtype=np.bool_)[(np.arange(3) + (moment - 1) % 4) % 5]
                if type(simulator) is Arena:  # without masks
                    allowed[:] = True
                np.testing.assert_array_equal(masks, np.stack([allowed] * 2, axis=1))
                stepper.step({"tank_0": np.ones(3, np.int64), "tank_1": np.ones(3, np.int64),
                              "scout": {"go": np.ones(3, np.int64), "look": np.zeros((3, 2), np.float32)}})  # fmt: skip


def test_other_action_spaces_are_refused(parallel):
    with ParallelEnv.from_native(Arena(2)) as env:
        stepper = Facade(env).stepper
        with pytest.raises(ValueError, match=r"'tank_0' has .* and agent 'scout' has Dict"):
            stepper.action_masks(["tank_0", "scout"])
        with pytest.raises(ValueError, match="need agents with equal Discrete"):
            stepper.action_masks(["scout"])
        with pytest.raises(ValueError, match="no action masks of agent 'nobody': expected an agent of"):
            stepper.action_masks(["nobody"])
        with pytest.raises(ValueError, match="agents is empty"):
            stepper.action_masks([])
