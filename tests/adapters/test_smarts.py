"""SMARTS: its own example with only the import changed, and equality to a plain loop."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, TESTS
from helpers.comparison import assert_same
from helpers.real_simulators import assert_equal, merged, report, rollouts, script
from simulators.real import SIMULATORS, is_absent, without_absent_agents

pytestmark = pytest.mark.needs("smarts", "sumo")

OPTIONS = ("multi_agent", "full", "unformatted")
SIMULATOR = SIMULATORS["SMARTS hiway-v1"]
VARIABLES = SIMULATOR.variables_with(Path(sys.executable))

SETUP = """
import gymnasium as gym

from smarts.core.agent_interface import AgentInterface
from smarts.core.controllers import ActionSpaceType

SCENARIO, ACTIONS, OBSERVATIONS = {scenario!r}, {actions!r}, {observations!r}

agent_interfaces = {{
    f"Agent_{{i}}": AgentInterface(
        waypoint_paths=True, action=ActionSpaceType.Lane, max_episode_steps=max_episode_steps
    )
    for i, max_episode_steps in enumerate((8, 12))
}}


def make_env(sim_name, seed, agent_interfaces=agent_interfaces):
    return gym.make(
        "smarts.env:hiway-v1",
        scenarios=[SCENARIO],
        agent_interfaces=agent_interfaces,
        sim_name=sim_name,
        headless=True,
        observation_options=OBSERVATIONS,
        action_options=ACTIONS,
        seed=seed,
    )


def choose(acting, rng):
    # All agents act at all times where the actions are to be complete.
    acting = sorted(agent_interfaces if ACTIONS == "full" else acting)
    actions = range(4)
    if ACTIONS == "unformatted":
        actions = ["keep_lane", "slow_down", "change_lane_left", "change_lane_right"]
    return {{agent: actions[rng.integers(4)] for agent in acting}}
"""

EXAMPLE = """
import pickle
import sys
from functools import partial

import numpy as np
from helpers.real_simulators import simplified

{import_line}

if __name__ == "__main__":
    returned = []
    made = make_env("alone", 42)
    made.close()
    for auto_reset in {modes}:
        env_constructors = [partial(make_env, sim_name=f"sim_{{ind}}") for ind in range(2)]
        env = ParallelEnv(env_constructors=env_constructors, auto_reset=auto_reset, seed=42)
        returned.append((env.batch_size, env.action_space == made.action_space))
        returned.append(env.observation_space == made.observation_space)
        observations, infos = env.reset()
        returned.append(simplified((observations, infos)))
        rng = np.random.default_rng(0)
        actives = [[*seen] for seen in observations]
        for _ in range(16):
            results = env.step([choose(active, rng) for active in actives])
            returned.append(simplified(results))
            observations, rewards, terminateds, truncateds, infos = results
            actives = [
                [agent for agent in seen if flags["__all__"] and auto_reset or not flags.get(agent, False)]
                for seen, flags in zip(observations, terminateds)
            ]
            if not auto_reset and all(flags["__all__"] for flags in terminateds):
                break
        env.close()
    with open(sys.argv[1], "wb") as file:
        pickle.dump(returned, file)
"""


CHECKS = """
import pickle
import sys
from functools import partial

from helpers.real_simulators import simplified

from marl_parallel import ParallelEnv

BATCHES = 10


def short(steps):
    # Both agents of an environment stop after so many steps.
    return {
        agent: AgentInterface(waypoint_paths=True, action=ActionSpaceType.Lane, max_episode_steps=steps)
        for agent in agent_interfaces
    }


def actions():
    return dict.fromkeys(agent_interfaces, 0)


def over_in_plain_loop(env, auto_reset):
    overs = []
    env.reset()
    for _ in range(BATCHES):
        over = env.step(actions())[2]["__all__"]
        overs.append(bool(over))
        if over and auto_reset:
            env.reset()
    return overs


found = {"expected": {}, "actual": {}}
lengths = (3, 5)
alone = [make_env(f"alone_{steps}", 42 + i, agent_interfaces=short(steps)) for i, steps in enumerate(lengths)]
reset, step = alone[0].reset(), alone[0].step(actions())
try:
    ParallelEnv(alone, auto_reset=True)
except TypeError as error:
    found["not callable"] = str(error)
for auto_reset in (True, False):
    found["expected"][auto_reset] = [over_in_plain_loop(env, auto_reset) for env in alone]
    constructors = [
        partial(make_env, sim_name=f"sim_{steps}", agent_interfaces=short(steps)) for steps in lengths
    ]
    env = ParallelEnv(env_constructors=constructors, auto_reset=auto_reset, seed=42)
    found["spaces"] = (
        env.observation_space == alone[0].observation_space, env.action_space == alone[0].action_space
    )
    found["batch size"], found["seeds"] = env.batch_size, tuple(env.seed())
    found["reset"] = simplified((reset, env.reset()))
    overs = []
    for number in range(BATCHES):
        results = env.step([actions(), actions()])
        if number == 0:
            found["step"] = simplified((step, results))
        overs.append([bool(terminateds["__all__"]) for terminateds in results[2]])
    found["actual"][auto_reset] = [list(of_one) for of_one in zip(*overs)]
    env.close()
for env in alone:
    env.close()
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """A folder with a small grid of roads, light traffic and two missions."""
    folder = tmp_path_factory.mktemp("smarts")
    variables = {**os.environ, **VARIABLES}
    subprocess.run([sys.executable, "-c", SIMULATOR.prepare], check=True, cwd=folder, env=variables, timeout=300)
    return folder / "grid"


def setup(scenario, actions, observations):
    return SETUP.format(scenario=str(scenario), actions=actions, observations=observations)


def example(scenario, folder, import_line, actions, observations, modes=(True, False)):
    """The results of `EXAMPLE` with one of the two `ParallelEnv`, with and without automatic resets."""
    program = setup(scenario, actions, observations) + EXAMPLE.format(import_line=import_line, modes=modes)
    return returned_by(folder, program)


def returned_by(folder, program):
    """What a program pickles into the file that it is started with."""
    file = folder / "example.py"
    file.write_text(program)
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, ROOT)))}
    command = [sys.executable, str(file), str(folder / "returned")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=variables)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "returned").read_bytes())


THEIRS = "from smarts.env.gymnasium.wrappers.parallel_env import ParallelEnv"
DIAGONAL = [(option, option) for option in OPTIONS]
OTHERS = [(actions, observations) for actions in OPTIONS for observations in OPTIONS if actions != observations]


@pytest.mark.parametrize(("actions", "observations"), DIAGONAL)
def test_example_with_only_the_import_changed(scenario, tmp_path, actions, observations):
    expected = example(scenario, tmp_path, THEIRS, actions, observations)
    actual = example(scenario, tmp_path, "from marl_parallel import ParallelEnv", actions, observations)
    assert len(actual) == len(expected) > 25
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(as_theirs(one), as_theirs(other), f"result {number}")


@pytest.mark.parametrize(("actions", "observations"), OTHERS)
def test_example_with_all_other_options(scenario, tmp_path, actions, observations):
    """Comparing with SMARTS's own takes long; agents of these episodes live at most 8 and 12 steps."""
    (num_envs, same_space), same_observation_space, (seen, infos), *steps = example(
        scenario, tmp_path, "from marl_parallel import ParallelEnv", actions, observations, modes=(True,)
    )
    assert (num_envs, same_space, same_observation_space) == (2, True, True)
    agents = {"Agent_0", "Agent_1"}
    assert all({*one} == agents for one in (*seen, *infos))
    for env_id in range(2):
        overs = [terminateds[env_id]["__all__"] for _, _, terminateds, _, _ in steps]
        assert 1 <= sum(overs) < 8
        for (observed, rewards, terminateds, truncateds, _), over in zip(steps, overs, strict=True):
            assert {*terminateds[env_id]} == {*truncateds[env_id]} >= {*rewards[env_id], "__all__"}
            if over or observations == "full":
                assert {*observed[env_id]} == agents
            for value in observed[env_id].values():
                assert (value[0] == "Observation") if observations == "unformatted" else "ego_vehicle_state" in value


@pytest.mark.parametrize("option", ["multi_agent", "full"])
def test_what_its_own_class_promises(scenario, tmp_path, option):
    """Spaces, seeds, batch size, outputs, and episodes that end independently of each other."""
    found = returned_by(tmp_path, setup(scenario, option, option) + CHECKS)
    assert "callable" in found["not callable"]
    assert found["spaces"] == (True, True)
    assert found["batch size"] == 2
    assert found["seeds"] == (42, 43)

    (seen, _), batch = found["reset"]
    assert [len(part) for part in batch] == [2, 2]
    assert all(form(one) == form(seen) for one in batch[0])

    alone, results = found["step"]
    assert [len(part) for part in results] == [2] * 5
    for env_id in range(2):
        observed, rewards, terminateds, truncateds, infos = (part[env_id] for part in results)
        assert form(observed) == form(alone[0])
        assert all(type(reward) in (float, np.float64) for reward in rewards.values())
        assert all(isinstance(flag, bool | np.bool_) for flags in (terminateds, truncateds) for flag in flags.values())
        assert [{*part} - {"__all__"} for part in (rewards, terminateds, infos)] == [{*alone[1]}] * 3

    assert found["actual"] == found["expected"]
    first, second = found["actual"][True]
    assert first != second
    assert True in first
    assert False in first[first.index(True) + 1 :]
    assert all(all(overs[overs.index(True) :]) for overs in found["actual"][False])


def form(value):
    """The keys, shapes and dtypes of an observation."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    return tuple(map(form, value)) if isinstance(value, tuple) else (np.shape(value), np.asarray(value).dtype)


OURS = {"final_obs", "reset_info"}


def as_theirs(results):
    """Without the last observation and the infos of an automatic reset, which SMARTS's own `ParallelEnv` drops.

    NumPy's scalars become arrays without dimensions on both sides: our observations are what their spaces say.
    """
    if isinstance(results, dict):
        if is_absent(results):
            return {}
        saved = {key: value for key, value in results.items() if not (isinstance(value, dict) and {*value} <= OURS)}
        return {key: as_theirs(value) for key, value in saved.items() if key not in OURS}
    if isinstance(results, np.generic):
        return np.asarray(results)
    return type(results)(map(as_theirs, results)) if isinstance(results, tuple | list) else results


@pytest.mark.parametrize(("actions", "observations"), DIAGONAL)
def test_equals_plain_loops_with_the_same_neighbours(scenario, tmp_path, actions, observations):
    text = script(
        setup(scenario, actions, observations), "make_env('simulation', seed)", "batches=30, choose=choose"
    ).replace("def make():", "def make(seed):")
    of = rollouts(text, tmp_path, ["process", "plain 0,1", "plain 2,3"], VARIABLES)
    report(f"SMARTS {actions} {observations}", of)
    expected = merged(of["plain 0,1"], of["plain 2,3"])
    assert all(ends > 0 for ends in expected.ends)
    assert_equal(*map(without_absent_agents, (of["process"], expected)), "process")
