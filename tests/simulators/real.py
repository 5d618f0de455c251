"""The table of third-party simulators that this package is tested with: how to install and construct them, what to expect.

`helpers/real_simulators.py` runs an entry, `tests/adapters/test_real_simulators.py` those that CI installs, and
`benchmarks/simulators.py` all of them, each in the environment that it needs. Nothing is imported here but the standard
library: `python tests/simulators/real.py NAME` prints the requirements of an environment, for pip.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

INSTALLS = {
    "simulators": (
        "box2d==2.3.10 gymnasium==1.4.0 highway-env==1.12.1 lbforaging==2.0.0 magent2==0.3.4 momaland==0.2.0 mpe2==1.1.1 "
        "numpy==1.26.4 open-spiel==2.0.2 pandas==3.0.6 pettingzoo==1.27.0 pymunk rware==2.0.0 shimmy[gym-v26]==2.0.1 "
        "torch==2.13.0 vmas==1.5.2"
    ),
    "classic": "pettingzoo[classic]==1.27.0",
    "mamujoco": "gymnasium-robotics==1.4.2",
    "pyflyt": "PyFlyt==0.29.0",
    # Written before PettingZoo renamed `agent_selector`.
    "sumo": (
        "eclipse-sumo==1.28.0 gymnasium==1.4.0 libsumo==1.28.0 numpy==2.4.6 pettingzoo==1.24.3 sumo-rl==1.4.5 "
        "sumolib==1.28.0 traci==1.28.0"
    ),
    # It imports `pkg_resources`, which setuptools must still have.
    "smarts": (
        "eclipse-sumo==1.28.0 gymnasium==1.4.0 libsumo==1.28.0 numpy==2.4.6 pettingzoo==1.27.0 rtree==1.4.1 "
        "setuptools<70 smarts==2.0.1 sumolib==1.28.0 traci==1.28.0"
    ),
    "pogema": "pogema==1.4.0",
    "generals": "generals==1.0.0",
    "cogrid": "cogrid==0.3.2",
    "lle": "laser-learning-environment==2.13.0",
    "rlcard": "rlcard==1.2.0",
    "grid2op": "grid2op==1.12.6 lightsim2grid",
    "smaclite": "smaclite",
    "overcooked": "overcooked-ai==1.1.0 scipy numpy<2",
    "flatland": "flatland-rl==4.3.0 ray[tune] pandas requests pyarrow",
    "jaxmarl": "jaxmarl==0.2.0",
    "meltingpot": "dm-meltingpot==2.4.1 shimmy==2.0.1",
    "smacv2": "smacv2",
    "metadrive": "metadrive-simulator==0.4.3",
    "citylearn": "citylearn==3.0.2",
    "kaggle": "kaggle-environments==1.33.2",
}
"""Requirements, for pip, of the environments into which simulators are installed beside this package."""


class Follows(Enum):
    """What the results of `ParallelEnv` equal, bit for bit."""

    PLAIN_LOOP = "a plain loop"
    WITH_NEIGHBOURS = "a plain loop over the environments of one worker"
    IN_FORM = "a plain loop in keys, types and shapes"


@dataclass(frozen=True)
class Simulator:
    """One simulator: how to install and construct it, and what to expect.

    Attributes:
        install: The environment of `INSTALLS` in which it runs.
        make: The expression that makes an environment, as in its own documentation; it may use `seed`.
        agents: The number of agents.
        setup: The lines before, such as imports.
        kind: The kind of environment that the package must recognise.
        masks: Whether there are action masks after the first reset.
        follows: What its results equal.
        why: The reason, where that is not a plain loop; or what is left out of the comparison.
        comparable: Returns a rollout without what differs between two plain loops.
        batches: The number of steps.
        options: Further arguments of `real_simulators.main`.
        variables: Environment variables; in `prepare`, too.
        prepare: A program that is run once before, in the folder in which the simulator is run.
        facades: The facades that step it; the others raise, because agents have no spaces, for instance.
        measured: Whether its speed is measured, with several environments in one process.
    """

    install: str
    make: str
    agents: int
    setup: str = ""
    kind: str = "PettingZoo parallel"
    masks: bool = False
    follows: Follows = Follows.PLAIN_LOOP
    why: str = ""
    comparable: Callable[[Any], Any] = lambda rollout: rollout
    batches: int = 200
    options: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    prepare: str = ""
    facades: tuple[str, ...] = ("PettingZooVecEnv", "StackedVecEnv")
    measured: bool = True

    @property
    def one_per_worker(self) -> bool:
        return "envs_per_worker=1" in self.options

    @property
    def plain_runs(self) -> list[str]:
        """The plain loops to compare with, each in a process of its own."""
        if self.one_per_worker:
            return ["plain 0", "plain 1", "plain 2", "plain 3"]
        everyone = ["plain 0,1,2,3"]
        if self.follows is Follows.WITH_NEIGHBOURS:
            return [*everyone, "plain 0,1", "plain 2,3"]
        return [*everyone, "plain 0,1,2,3 again"] if self.follows is Follows.IN_FORM else everyone

    @property
    def parallel_runs(self) -> list[str]:
        """The runs of `ParallelEnv` that are compared."""
        return ["process"] if self.one_per_worker else ["process", "serial"]

    def variables_with(self, python: Path) -> dict[str, str]:
        """The environment variables for this interpreter; those with `{site}` name what is installed there."""
        site = next(iter(sorted(python.parents[1].glob("lib/python*/site-packages"))), python.parents[1])
        return {name: value.format(site=site, path=os.environ["PATH"]) for name, value in self.variables.items()}


# -- what is left out of comparisons ----------------------------------------------------------------------------------


def without_sampled_actions(rollout: Any) -> Any:
    """Without the info "action" of highway-env's resets: it is sampled from an unseeded space."""
    rollout = copy.deepcopy(rollout)
    for _, infos in rollout.resets:
        infos["__common__"].pop("action", None)
    for steps in rollout.steps:
        for *_, infos in steps:
            infos["__common__"].get("reset_info", {}).pop("action", None)
    return rollout


# -- the table --------------------------------------------------------------------------------------------------------

SIMULATORS: dict[str, Simulator] = {}


def add(name: str, *arguments: Any, **more: Any) -> None:
    SIMULATORS[name] = Simulator(*arguments, **more)


for _name, _agents in {
    "simple_adversary_v3": 3, "simple_crypto_v3": 3, "simple_push_v3": 2, "simple_reference_v3": 2,
    "simple_speaker_listener_v4": 2, "simple_spread_v3": 3, "simple_tag_v3": 4, "simple_v3": 1, "simple_world_comm_v3": 6,
}.items():  # fmt: skip
    add(f"MPE2 {_name}", "simulators", f"{_name}.parallel_env()", _agents, f"from mpe2 import {_name}")

add(
    "LBF Foraging-8x8-2p-1f-v3",
    "simulators",
    "gym.make('Foraging-8x8-2p-1f-v3')",
    2,
    "import gymnasium as gym\nimport lbforaging",
    kind="tuple",
)
add(
    "LBF, by class",
    "simulators",
    "ForagingEnv(players=3, min_player_level=1, max_player_level=2, min_food_level=1, max_food_level=None, "
    "field_size=(8, 8), max_num_food=2, sight=8, max_episode_steps=50, force_coop=False)",
    3,
    "from lbforaging.foraging import ForagingEnv",
    kind="tuple",
)
for _name, _setup in {"rware-tiny-2ag-v2": "\nimport rware", "rware:rware-tiny-2ag-v2": ""}.items():
    add(
        f"RWARE {_name}",
        "simulators",
        f"gym.make('{_name}', max_steps=80)",
        2,
        f"import gymnasium as gym{_setup}",
        kind="tuple",
    )
