"""`make` with SuperSuit's wrappers, against plain loops over environments that are wrapped the same way."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import play
from mpe2 import simple_spread_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from supersuit import black_death_v3, clip_reward_v0, frame_stack_v1, pad_action_space_v0, pad_observations_v0

from marl_parallel import make
from marl_parallel.wrappers import pad_spaces

pytestmark = pytest.mark.needs("supersuit")
SAME_STEP = AutoresetMode.SAME_STEP
AGENTS = ["speaker_0", "listener_0"]


@pytest.fixture
def how(backend_setup) -> dict[str, Any]:
    return {"backend": backend_setup.backend, "num_workers": 2, "seed": 8}


def test_wrappers_of_supersuit(how):
    def wrapped() -> Any:
        env = clip_reward_v0(simple_spread_v3.parallel_env(), lower_bound=-0.5, upper_bound=0.5)
        return frame_stack_v1(env, 3)

    wrappers = [
        functools.partial(clip_reward_v0, lower_bound=-0.5, upper_bound=0.5),
        functools.partial(frame_stack_v1, stack_size=3),
    ]
    with make("mpe2.simple_spread_v3", 2, wrappers=wrappers, **how) as env:
        assert env.observation_space["agent_0"].shape == (54,)
        play(env, Reference([wrapped] * 2, SAME_STEP, 8))


def test_padding_as_supersuit():
    """Where SuperSuit pads, observations and rewards are the same."""
    theirs = [pad_observations_v0, pad_action_space_v0]
    name, how = "mpe2.simple_speaker_listener_v4", {"backend": "serial", "seed": 3}
    with make(name, 2, wrappers=[pad_spaces], **how) as ours, make(name, 2, wrappers=theirs, **how) as other:
        assert_same(ours.reset()[0], other.reset()[0])
        for step in range(10):
            actions = [dict.fromkeys(AGENTS, (step + i) % 5) for i in range(2)]
            assert_same(ours.step(actions)[:2], other.step(actions)[:2])


def lengths(env: Any) -> tuple[int, float, set[tuple[bool, bool]]]:
    """The length of an episode of an environment that nobody plays well, its return, and the flags of its last step."""
    env.reset()
    steps, total, flags = 0, 0.0, set()
    while not flags:
        _, (rewards,), (terminateds,), (truncateds,), _ = env.step([dict.fromkeys(env.possible_agents, 0)])
        steps += 1
        total += sum(rewards.values())
        if terminateds["__all__"] or truncateds["__all__"]:
            flags = {(bool(terminateds[agent]), bool(truncateds[agent])) for agent in terminateds if agent != "__all__"}
    return steps, total, flags


@pytest.mark.parametrize(
    ("make_env", "keywords", "flags"),
    [
        (knights_archers_zombies.parallel_env, {"max_cycles": 900}, (True, False)),  # the agents lose
        (knights_archers_zombies.parallel_env, {"max_cycles": 5}, (False, True)),
        (simple_spread_v3.parallel_env, {"max_cycles": 5}, (False, True)),
    ],
)
def test_black_death_ends_one_step_later(make_env, keywords, flags):
    """It ends an episode once all are terminated and truncated, or no agent is left; `docs/migrating.md` says so."""
    how: dict[str, Any] = {"backend": "serial", "seed": 3, "auto_reset": False, "env_kwargs": keywords}
    with make(make_env, 1, **how) as ours, make(make_env, 1, wrappers=[black_death_v3], **how) as theirs:
        steps, total, ends = lengths(ours)
        later, same_total, other_ends = lengths(theirs)
    assert later == steps + 1
    assert same_total == pytest.approx(total)
    assert (ends, other_ends) == ({flags}, {(True, True)})
