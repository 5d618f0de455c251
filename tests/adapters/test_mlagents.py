"""ML-Agents: a `BaseEnv` in Python compared with a plain loop over it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers import SIMULATORS
from helpers.comparison import assert_same
from helpers.setups import Setup
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from simulators.crashing import seed_of
from simulators.mlagents_arena import (
    ACTION_SPACES,
    CHASER,
    MAX_STEPS,
    MINER,
    OBSERVATION_SPACES,
    OTHER_TEAM,
    PILOT,
    Arena,
    BareCopy,
    BareReference,
    actions_for,
    arena,
    each_mode,
)

from marl_parallel.adapters import NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.mlagents import MLAgentsEnv, behavior_of
from marl_parallel.vector import GymnasiumVectorEnv

pytestmark = pytest.mark.needs("mlagents_envs")

# Results


def test_recognition_and_schema():
    """Recognised without `adapter=`; agents are open-ended; spaces are looked up by behaviour."""
    env = adapt(Arena())
    assert isinstance(env, MLAgentsEnv)
    assert env.rules is Rules.PETTINGZOO
    assert env.possible_agents == []
    assert {**env.observation_spaces} == OBSERVATION_SPACES
    assert {**env.action_spaces} == ACTION_SPACES
    assert env.action_spaces[f"{PILOT}?agent_id=123456789"] == ACTION_SPACES[PILOT]
    assert f"{OTHER_TEAM}?agent_id=0" in env.observation_spaces
    assert "Chaser?agent_id=0" not in env.observation_spaces
    assert env.reset_keywords == frozenset()
    assert env.render() is None


def test_adapter_by_name():
    assert isinstance(adapt(Arena(), "mlagents"), MLAgentsEnv)
    with pytest.raises(NotAnEnvironment, match=r"An ML-Agents environment has no method `reset` and no method `step`"):
        adapt(object(), "mlagents")


@pytest.mark.parametrize("max_steps", [0, -1])
def test_max_steps_must_be_positive(max_steps):
    with pytest.raises(ValueError, match="max_steps must be a positive number of steps or None"):
        MLAgentsEnv(Arena(), max_steps=max_steps)


# The same as in a plain loop


@each_mode
@pytest.mark.parametrize("same_id", [False, True], ids=["new ids", "same id"])
def test_results_equal_a_plain_loop(same_id, mode, two_worker_setup, build):
    env = build([functools.partial(arena, same_id=same_id)] * 4, two_worker_setup, mode)
    reference = BareReference(functools.partial(Arena, same_id=same_id), 4, mode, MAX_STEPS)
    rng = random.Random(5)
    assert_same(env.reset(), reference.reset())
    ended = asked_again = 0
    for time in range(3 * MAX_STEPS):
        assert [sorted(agents) for agents in env.acting] == [sorted(agents) for agents in reference.acting]
        actions = actions_for(reference.acting, rng)
        got, expected = env.step(actions), reference.step(actions)
        assert_same(got, expected, f"step {time}")
        over = [flags["__all__"] for flags in expected[3]]
        ended += sum(over)
        asked_again += sum(
            "reset_info" in info and not over[i] for i, one in enumerate(got[4]) for info in one.values()
        )
        if mode is AutoresetMode.DISABLED and over[2]:
            arguments = {"env_ids": [2], "options": {"wind": 0.5}}
            assert_same(env.reset(**arguments), reference.reset(**arguments))
    assert ended >= 4 * 2
    assert (asked_again > 20) is same_id


def test_views(build, two_worker_setup):
    env = build([arena] * 2, two_worker_setup, copy=False)
    reference = BareReference(Arena, 2, AutoresetMode.SAME_STEP, MAX_STEPS)
    rng = random.Random(1)
    assert_same(env.reset(), reference.reset())
    for _ in range(MAX_STEPS + 2):
        actions = actions_for(reference.acting, rng)
        assert_same(env.step(actions), reference.step(actions))


def test_episode_does_not_end_by_itself(backend_setup, build):
    """Not even if all agents have ended; agents that join later act."""
    env = build([functools.partial(arena, max_steps=None)] * 2, backend_setup)
    env.reset()
    rng, alone = random.Random(0), 0
    for time in range(1, 40):
        *_, terminateds, truncateds, _ = env.step(actions_for(env.acting, rng))
        assert not any(flags["__all__"] for flags in (*terminateds, *truncateds))
        if time == 13:
            assert len(terminateds[0]) > 1
            assert all(terminateds[0][a] or truncateds[0][a] for a in terminateds[0] if a != "__all__")
        alone += not any(env.acting)
    assert alone == 2
    assert any(env.acting)


def test_waiting_agents_are_alive_and_do_not_act(backend_setup, build):
    env = build([arena], backend_setup)
    env.reset()
    (pilot,) = env.get_attr("group_map")[0][PILOT]
    assert pilot in env.acting[0]
    observations, rewards, _, _, infos = env.step(actions_for(env.acting, random.Random(0)))
    assert pilot not in {**observations[0], **rewards[0], **infos[0]}
    assert pilot not in env.acting[0]
    assert env.get_attr("group_map")[0][PILOT] == [pilot]
    env.step(actions_for(env.acting, random.Random(0)))
    assert pilot in env.acting[0]


def test_max_steps_truncates_all_agents(backend_setup, build):
    """Also waiting ones; agents that ended by themselves are terminated."""
    env = build([functools.partial(arena, max_steps=3)], backend_setup, "DISABLED")
    env.reset()
    for _ in range(3):
        alive = {agent for agents in env.get_attr("group_map")[0].values() for agent in agents}
        observations, _, terminateds, truncateds, _ = env.step(actions_for(env.acting, random.Random(0)))
    assert truncateds[0] == {**dict.fromkeys(alive, True), "__all__": True}
    assert terminateds[0] == {**dict.fromkeys(alive, False), "__all__": False}
    assert observations[0].keys() < alive
    assert env.acting == ([],)
    assert not any(env.get_attr("group_map")[0].values())


def test_agents_by_behaviour(backend_setup, build):
    env = build([arena] * 2, backend_setup)
    observations, _ = env.reset()
    for group_map, seen in zip(env.get_attr("group_map"), observations, strict=True):
        assert [*group_map] == [CHASER, OTHER_TEAM, MINER, PILOT]
        assert sorted(agent for agents in group_map.values() for agent in agents) == sorted(seen)
        assert [*map(len, group_map.values())] == [2, 1, 2, 1]
        assert all(behavior_of(agent) == behavior for behavior, agents in group_map.items() for agent in agents)


def test_masks_for_sampling(backend_setup, build):
    """Unity's True means forbidden; sampling with the mask never draws a forbidden action."""
    env = build([arena], backend_setup)
    _, infos = env.reset()
    assert env.action_space is not None
    bare = Arena(42)
    bare.reset()  # it reports its behaviours
    bare.reset()
    for number, masks in zip(bare.get_steps(MINER)[0].agent_id, zip(*bare.get_steps(MINER)[0].action_mask)):
        agent = f"{MINER}?agent_id={number}"
        returned = infos[0][agent]["action_mask"]
        for arguments, mask in zip(returned, masks, strict=True):
            assert arguments.tolist() == [int(not unavailable) for unavailable in mask]
        for _ in range(30):
            action = env.action_space[agent].sample(mask=returned)
            assert not any(mask[drawn] for mask, drawn in zip(masks, action, strict=True))
    (pilot,) = env.get_attr("group_map")[0][PILOT]
    (mask,) = bare.get_steps(PILOT)[0].action_mask
    for _ in range(30):
        _, drawn = env.action_space[pilot].sample(mask=infos[0][pilot]["action_mask"])
        assert not mask[0][drawn]
    assert env.action_space[CHASER] == ACTION_SPACES[CHASER]
    assert env.observation_space == spaces.Dict([*OBSERVATION_SPACES.items()])


class LateBehavior(Arena):
    """One behaviour appears later than the others, as in Unity scenes that grow."""

    @property
    def behavior_specs(self):
        return {name: spec for name, spec in super().behavior_specs.items() if name != PILOT or self.time >= 4}


def test_late_behaviours(two_worker_setup, build):
    """They have no space, so their values travel pickled."""
    env = build([lambda seed: LateBehavior(seed)], two_worker_setup)
    env.reset()
    rng, pilots = random.Random(0), 0
    for time in range(1, 9):
        observations, *_ = env.step(actions_for(env.acting, rng))
        seen = [agent for agent in observations[0] if behavior_of(agent) == PILOT]
        assert time >= 4 or not seen
        assert (PILOT in env.get_attr("group_map")[0]) is (time >= 4)
        pilots += len(seen)
    assert pilots > 3
    assert PILOT not in {**env.action_space.spaces}


# Refused calls


@pytest.mark.parametrize(
    ("behavior", "action", "message"),
    [
        (CHASER, np.zeros(3, np.float32), "expected an array of shape (2,) and dtype float32, got shape (3,)"),
        (MINER, np.zeros(2), "expected an array of shape (2,) and dtype int64, got dtype float64"),
        (PILOT, (np.zeros(2), 0), "expected an array of shape (1,)"),
    ],
)
def test_actions_of_another_form(behavior, action, message, two_worker_setup, build):
    """Refused before anything is stepped."""
    env = build([arena] * 2, two_worker_setup)
    env.reset()
    actions = actions_for(env.acting, random.Random(0))
    agent = next(agent for agent in env.acting[1] if behavior_of(agent) == behavior)
    with pytest.raises(ValueError, match=r"environment 1: the action of agent") as caught:
        env.step([actions[0], {**actions[1], agent: action}])
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"environment 1: no action for agent"):
        env.step([actions[0], {a: action for a, action in actions[1].items() if a != agent}])
    reference = BareReference(Arena, 2, AutoresetMode.SAME_STEP, MAX_STEPS)
    reference.reset()
    assert_same(env.step(actions), reference.step(actions))


@pytest.mark.parametrize(
    ("behavior", "action"),
    [
        (CHASER, np.array([0.0, 1.5], np.float32)),
        (MINER, np.array([0, 2])),
        (PILOT, (np.zeros(1, np.float32), 4)),
    ],
)
def test_actions_outside_their_behaviours_space(behavior, action, backend_setup, build):
    env = build([arena], backend_setup, check_actions=True)
    env.reset()
    agent = next(agent for agent in env.acting[0] if behavior_of(agent) == behavior)
    with pytest.raises(ValueError, match="is outside its space: expected an element of"):
        env.step([{**actions_for(env.acting, random.Random(0))[0], agent: action}])


def test_non_integer_discrete_action():
    env = arena(0)
    observations, _ = env.reset()
    actions = {**actions_for([observations], random.Random(0))[0]}
    pilot = next(agent for agent in observations if behavior_of(agent) == PILOT)
    with pytest.raises(TypeError, match="Cannot cast"):
        env.step({**actions, pilot: (np.zeros(1), 1.5)})


def test_integer_types_of_actions():
    """NumPy turns mixed ones into floats."""
    env = arena(0)
    observations, _ = env.reset()
    actions = {**actions_for([observations], random.Random(0))[0]}
    kinds = itertools.cycle([np.uint64, np.int64])
    miners = [agent for agent in observations if behavior_of(agent) == MINER]
    assert len(miners) > 1
    returned = env.step(actions | {agent: actions[agent].astype(next(kinds)) for agent in miners})
    other = arena(0)
    other.reset()
    assert_same(returned, other.step(actions))


def test_seeds_of_resets_are_ignored(backend_setup, build):
    env = build([arena] * 2, backend_setup, seed=7)
    reference = BareReference(Arena, 2, AutoresetMode.SAME_STEP, MAX_STEPS, seed=7)
    with pytest.warns(UserWarning, match="seed=3 is ignored: these environments are seeded when they are made"):
        assert_same(env.reset(seed=3), reference.reset())
    assert env.seed() == (7, 8)
    with pytest.warns(UserWarning, match="ignored"):
        env.reset_async(seed=[1, 2])
    batch = env.recv()
    observations = tuple(batch.observations[batch.env_ids.index(env_id)] for env_id in (0, 1))
    assert_same(observations, reference.reset()[0])


def test_options_set_environment_parameters(backend_setup, build):
    env = build([arena] * 3, backend_setup)
    env.reset(options={"wind": 2, "gravity": np.float32(9.5)})
    env.reset(options={"wind": 0.25}, env_ids=[1])
    returned = env.get_attr("parameters")
    assert returned == ({"wind": 2.0, "gravity": 9.5}, {"wind": 0.25, "gravity": 9.5}, {"wind": 2.0, "gravity": 9.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wind": 1e39}, "options must fit into 32 bits, which is what Unity takes: 'wind' does not"),
        ({"wind": 10**400}, "options must fit into 32 bits"),
        ({"schnell_ö": 1.0}, "options must have names in ASCII, which is what Unity takes, got 'schnell_ö'"),
    ],
)
def test_options_of_unsupported_types(options, message, backend_setup, build):
    env = build([arena] * 2, backend_setup)
    env.reset(options={"wind": np.inf})
    with pytest.raises(ValueError, match=message):
        env.reset(options=options)
    assert env.get_attr("resets") == (2, 2)


@pytest.mark.parametrize("options", [{"wind": "strong"}, {"wind": 1.0, "map": None}, {3: 1.0}, {"on": True}], ids=str)
def test_unknown_options_are_refused(options, backend_setup, build):
    """Before anything is touched; nothing is closed."""
    env = build([arena] * 2, backend_setup)
    env.reset()
    for reset in (env.reset, env.reset_async):
        with pytest.raises(ValueError, match="options must be numbers by parameter name, got"):
            reset(options=options)
    assert env.pending == ()
    assert env.get_attr("resets") == (2, 2)
    assert env.get_attr("parameters") == ({}, {})
    with pytest.raises(ValueError, match="options must be numbers"):
        arena(0).reset(options=options)


def test_options_need_a_channel(backend_setup, build):
    env = build([lambda seed: Arena(seed)], backend_setup)
    with pytest.raises(ValueError, match="`reset` of these environments takes no options"):
        env.reset(options={"wind": 1.0})


def test_facades_refuse_open_ended_agents(backend_setup, build):
    env = build([arena], backend_setup, "NEXT_STEP")
    with pytest.raises(ValueError, match="needs to know all agents beforehand, but possible_agents is empty"):
        GymnasiumVectorEnv(env)


# Restarts


def crashing(seed: int, env_id: int, restarts: int, fault: str) -> MLAgentsEnv:
    breaks = 5 if env_id == 1 and restarts == 0 else None
    parameters = EnvironmentParametersChannel()
    return MLAgentsEnv(
        Arena(seed, [parameters], breaks=breaks, fault=fault), parameters=parameters, max_steps=MAX_STEPS
    )


def breaking(setup: Setup) -> list[str]:
    return ["raise", "exit"] if setup.backend in ("process", "ray") else ["raise"]


def test_refused_options_have_no_effect(backend_setup, build):
    env = build([arena] * 2, backend_setup, on_error="restart")
    env.reset()
    with pytest.raises(ValueError, match="options must be numbers"):
        env.reset(options=[{"wind": 1.0}, {"wind": "strong"}])
    env.reset(options={"gravity": 2.0})
    assert env.get_attr("parameters") == ({"gravity": 2.0},) * 2


@each_mode
def test_parameters_survive_a_restart(mode, backend_setup, build):
    """As in an environment without faults."""
    for fault in breaking(backend_setup):
        env = build([functools.partial(crashing, fault=fault)] * 2, backend_setup, mode, on_error="restart")
        env.reset(options={"wind": 2.0, "gravity": 9.5})
        env.reset(options={"wind": 0.5}, env_ids=[1])
        rng = random.Random(3)
        for _ in range(8):
            env.step(actions_for(env.acting, rng))
        assert env.stats().restarts == 1
        if mode is AutoresetMode.DISABLED:
            env.reset(env_ids=[1], options={"wind": 0.5})
        assert env.get_attr("parameters") == ({"wind": 2.0, "gravity": 9.5}, {"wind": 0.5, "gravity": 9.5})


@each_mode
def test_restarts(mode, two_worker_setup, build):
    """During an episode: living agents are truncated; then it equals a plain loop with the new seed."""
    for fault in breaking(two_worker_setup):
        env = build([functools.partial(crashing, fault=fault)] * 2, two_worker_setup, mode, on_error="restart")
        reference = BareReference(Arena, 2, mode, MAX_STEPS)
        rng = random.Random(3)
        known = reference.reset()[0][1]
        env.reset()
        for _ in range(5):
            actions = actions_for(reference.acting, rng)
            expected = reference.step(actions)
            assert_same(env.step(actions), expected)
            known = expected[0][1]
        alive = sorted(reference.copies[1].seen - reference.copies[1].dead)
        fresh = BareCopy(Arena, 1, seed_of(42, 1, 1), mode, MAX_STEPS)
        actions = actions_for(reference.acting, rng)
        got = [one[1] for one in env.step(actions)]
        assert {*got[4].pop("__common__")} == {"restarted", "error"}
        assert got[1] == dict.fromkeys(alive, 0.0)
        assert got[2] == {**dict.fromkeys(alive, False), "__all__": False}
        assert got[3] == {**dict.fromkeys(alive, True), "__all__": True}
        if mode is AutoresetMode.SAME_STEP:
            first = fresh.reset()
            assert_same(got[0], first[0])
            assert_same({a: got[4][a]["final_obs"] for a in known}, known)
        else:
            assert_same(got[0], known)
            assert env.acting[1] == []
            result = env.reset(env_ids=[1]) if mode is AutoresetMode.DISABLED else env.step([{}], env_ids=[1])
            first = fresh.reset()
            assert_same((result[0][0], result[-1][0]), first)
        for _ in range(MAX_STEPS - 2):
            (actions,) = actions_for([fresh.acting], rng)
            assert_same(tuple(one[0] for one in env.step([actions], env_ids=[1])), fresh.step(actions))
        env.close()


# Commands


def test_check_reports_no_findings():
    """`marl-parallel check` handles agents that join and leave."""
    where = SIMULATORS / "mlagents_arena.py"
    command = [sys.executable, "-m", "marl_parallel.cli", "check", f"{where}:Arena", "--json"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [finding for finding in json.loads(done.stdout)["findings"] if finding["severity"] == "problem"]
