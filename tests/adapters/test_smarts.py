"""SMARTS: its own example with only the import changed, and equality to a plain loop."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import TESTS
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


def make_env(sim_name, seed):
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
    for auto_reset in (True, False):
        env_constructors = [partial(make_env, sim_name=f"sim_{{ind}}") for ind in range(2)]
        env = ParallelEnv(env_constructors=env_constructors, auto_reset=auto_reset, seed=42)
        returned.append((env.batch_size, getattr(env, "action_space", None) == made.action_space))
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


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """A folder with a small grid of roads, light traffic and two missions."""
    folder = tmp_path_factory.mktemp("smarts")
    variables = {**os.environ, **VARIABLES}
    subprocess.run([sys.executable, "-c", SIMULATOR.prepare], check=True, cwd=folder, env=variables, timeout=300)
    return folder / "grid"


def setup(scenario, actions, observations):
    return SETUP.format(scenario=str(scenario), actions=actions, observations=observations)


def example(scenario, folder, import_line, actions, observations):
    """The results of `EXAMPLE` with one of the two `ParallelEnv`."""
    file = folder / "example.py"
    file.write_text(setup(scenario, actions, observations) + EXAMPLE.format(import_line=import_line))
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": str(TESTS)}
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
    (num_envs, same_space), (seen, infos), *steps = example(
        scenario, tmp_path, "from marl_parallel import ParallelEnv", actions, observations
    )
    assert (num_envs, same_space) == (2, True)
    agents = {"Agent_0", "Agent_1"}
    assert all({*one} == agents for one in (*seen, *infos))
    automatic = steps[:16]
    for env_id in range(2):
        overs = [terminateds[env_id]["__all__"] for _, _, terminateds, _, _ in automatic]
        assert 1 <= sum(overs) < 8
        for (observed, rewards, terminateds, truncateds, _), over in zip(automatic, overs, strict=True):
            assert {*terminateds[env_id]} == {*truncateds[env_id]} >= {*rewards[env_id], "__all__"}
            if over or observations == "full":
                assert {*observed[env_id]} == agents
            for value in observed[env_id].values():
                assert (value[0] == "Observation") if observations == "unformatted" else "ego_vehicle_state" in value


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
