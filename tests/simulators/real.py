"""The table of third-party simulators that this package is tested with: how to construct them, and what to expect.

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
        "box2d==2.3.10 gymnasium==1.4.0 highway-env==1.12.1 lbforaging==2.0.0 magent2==0.3.4 momaland==0.2.0 "
        "mpe2==1.1.1 numpy==1.26.4 open-spiel==2.0.2 pandas==3.0.6 pettingzoo==1.27.0 pymunk rware==2.0.0 "
        "shimmy[gym-v26]==2.0.1 torch==2.13.0 vmas==1.5.2"
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
    "smaclite": "smaclite",
    "overcooked": "overcooked-ai==1.1.0 scipy numpy<2",
    "flatland": "flatland-rl==4.3.0 dm-tree ray[tune] pandas requests pyarrow<20",
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


def is_absent(observation: Any) -> bool:
    """Whether it is what SMARTS fills in for an absent agent."""
    return "ego_vehicle_state" in observation and not observation["active"]


def without_absent_agents(value: Any) -> Any:
    """Without SMARTS's observations of absent agents: most of their values are random."""
    if isinstance(value, dict):
        return {} if is_absent(value) else {key: without_absent_agents(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(without_absent_agents, value))
    return type(value)(map(without_absent_agents, value)) if type(value) in (tuple, list) else value


# -- the table --------------------------------------------------------------------------------------------------------

SIMULATORS: dict[str, Simulator] = {}
AEC = "PettingZoo AEC"


def add(name: str, *arguments: Any, **more: Any) -> None:
    SIMULATORS[name] = Simulator(*arguments, **more)


for _name, _agents in {
    "simple_adversary_v3": 3, "simple_crypto_v3": 3, "simple_push_v3": 2, "simple_reference_v3": 2,
    "simple_speaker_listener_v4": 2, "simple_spread_v3": 3, "simple_tag_v3": 4, "simple_v3": 1,
    "simple_world_comm_v3": 6,
}.items():  # fmt: skip
    add(f"MPE2 {_name}", "simulators", f"{_name}.parallel_env()", _agents, f"from mpe2 import {_name}")

add(
    "LBF Foraging-8x8-2p-1f-v3",
    "simulators",
    "gym.make('Foraging-8x8-2p-1f-v3')",
    2,
    "import gymnasium as gym\nimport lbforaging",
    kind="tuple",
    batches=100,
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

# -- PettingZoo's own --
for _name, _arguments, _agents in (
    ("cooperative_pong_v6", "max_cycles=60", 2),
    ("knights_archers_zombies_v11", "max_cycles=60", 4),
    ("pistonball_v6", "max_cycles=30, n_pistons=6", 6),
):
    add(
        f"PettingZoo butterfly {_name}",
        "simulators",
        f"{_name}.parallel_env({_arguments})",
        _agents,
        f"from pettingzoo.butterfly import {_name}",
    )
for _name, _arguments, _agents in (
    ("multiwalker_v9", "max_cycles=60", 3),
    ("pursuit_v5", "max_cycles=60", 8),
):
    add(
        f"PettingZoo sisl {_name}",
        "simulators",
        f"{_name}.parallel_env({_arguments})",
        _agents,
        f"from pettingzoo.sisl import {_name}",
    )
for _name, _agents, _masks in (
    ("chess_v6", 2, True),
    ("connect_four_v3", 2, True),
    ("go_v5", 2, True),
    ("hanabi_v5", 2, True),
    ("leduc_holdem_v4", 2, True),
    ("rps_v2", 2, False),
    ("texas_holdem_no_limit_v6", 2, True),
    ("texas_holdem_v4", 2, True),
    ("tictactoe_v3", 2, True),
):
    add(
        f"PettingZoo classic {_name}",
        "classic",
        f"{_name}.env({'board_size=5' if _name == 'go_v5' else ''})",
        _agents,
        f"from pettingzoo.classic import {_name}",
        kind=AEC,
        masks=_masks,
        follows=Follows.IN_FORM if _name == "hanabi_v5" else Follows.PLAIN_LOOP,
        why="Its resets ignore the seed: two plain loops differ." if _name == "hanabi_v5" else "",
        batches=500 if _name == "chess_v6" else 200,  # random games are long
    )

# -- further ones that fit the same environment --
add(
    "MAgent2 battle_v4",
    "simulators",
    "battle_v4.parallel_env(map_size=14, max_cycles=60)",
    4,
    "from magent2.environments import battle_v4",
)
_WALKER = "from momaland.envs.multiwalker_stability import momultiwalker_stability_v0"
add("MOMAland walker", "simulators", "momultiwalker_stability_v0.env(max_cycles=60)", 3, _WALKER, kind=AEC)
add("MOMAland walker, parallel", "simulators", "momultiwalker_stability_v0.parallel_env(max_cycles=60)", 3, _WALKER)
add(
    "MOMAland connect4",
    "simulators",
    "moconnect4_v0.env()",
    2,
    "from momaland.envs.connect4 import moconnect4_v0",
    kind=AEC,
    masks=True,
)
_SHIMMY = "from shimmy import OpenSpielCompatibilityV0"
add(
    "OpenSpiel connect_four",
    "simulators",
    "OpenSpielCompatibilityV0(game_name='connect_four')",
    2,
    _SHIMMY,
    kind=AEC,
    masks=True,
)
add(
    "OpenSpiel backgammon",
    "simulators",
    "OpenSpielCompatibilityV0(game_name='backgammon')",
    2,
    _SHIMMY,
    kind=AEC,
    masks=True,
    follows=Follows.IN_FORM,
    why="No seed reaches the generator of its dice: two plain loops differ.",
)
_CROSSING = {
    "observation": {
        "type": "MultiAgentObservation",
        "observation_config": {"type": "Kinematics", "normalize": False},
    },
    "initial_vehicle_count": 1,
    "spawn_probability": 0.05,
    "simulation_frequency": 3,
    "duration": 8,
}
"""Little traffic, and observations without pandas' work: highway-env's steps are slow."""
for _version in ("v0", "v1"):
    add(
        f"highway-env intersection-multi-agent-{_version}",
        "simulators",
        f"gym.make('intersection-multi-agent-{_version}', config={_CROSSING})",
        2,
        "import gymnasium as gym\nimport highway_env",
        kind="tuple",
        batches=60,  # of slow steps; episodes have at most 8
        comparable=without_sampled_actions,
        why="Without the infos of resets that highway-env samples from an unseeded space.",
    )
_VMAS = "num_envs=1, wrapper='gymnasium', terminated_truncated=True, max_steps=60, seed=0"
for _name, _arguments, _kind in (("balance", "", "tuple"), ("balance, dict_spaces", "dict_spaces=True, ", "dict")):
    add(
        f"VMAS {_name}",
        "simulators",
        f"vmas.make_env('balance', {_arguments}{_VMAS})",
        3,
        "import vmas",
        kind=_kind,
        batches=80,
        follows=Follows.WITH_NEIGHBOURS,
        why="It draws from torch's generator, which environments of one process share.",
    )

# -- with pins of their own --
_SUMO = {"SUMO_HOME": "{site}/sumo", "PATH": "{path}" + os.pathsep + "{site}/sumo/bin"}
_NETS = "from pathlib import Path\n\nimport sumo_rl\n\nnets = Path(sumo_rl.__file__).parent / 'nets' / '2x2grid'"
_GRID = (
    "sumo_rl.parallel_env(net_file=str(nets / '2x2.net.xml'), route_file=str(nets / '2x2.rou.xml'), use_gui=False, "
    "num_seconds=300)"
)
add("SUMO-RL 2x2grid", "sumo", _GRID, 4, _NETS, batches=80, variables=_SUMO)
add(
    "SUMO-RL 2x2grid, libsumo",
    "sumo",
    _GRID,
    4,
    _NETS,
    batches=80,
    variables={**_SUMO, "LIBSUMO_AS_TRACI": "1"},
    options="envs_per_worker=1",
    measured=False,
)

SMARTS_GRID = """
# Makes the folder `grid`: a small grid of roads with light traffic, and two missions.
import subprocess
import sys
from pathlib import Path

import sumo

SCENARIO = '''
from pathlib import Path

from smarts.sstudio import gen_scenario
from smarts.sstudio import sstypes as t

traffic = t.Traffic(
    engine="SMARTS",
    flows=[t.Flow(route=t.RandomRoute(), rate=600, end=60, actors={t.TrafficActor("car"): 1})],
)
missions = [t.Mission(t.Route(begin=("A0B0", lane, 10), end=("B0C0", lane, "max"))) for lane in (0, 1)]
gen_scenario(t.Scenario(traffic={"basic": traffic}, ego_missions=missions), output_dir=Path(__file__).parent)
'''

folder = Path("grid")
folder.mkdir()
roads = ["--grid", "--grid.number", "3", "--grid.length", "50", "--default.lanenumber", "2"]
subprocess.run([Path(sumo.SUMO_HOME, "bin", "netgenerate"), *roads, "-o", folder / "map.net.xml"], check=True)
(folder / "scenario.py").write_text(SCENARIO)
subprocess.run([Path(sys.executable).with_name("scl"), "scenario", "build", folder], check=True, timeout=300)
"""
_SMARTS = """
from pathlib import Path

import gymnasium as gym
from smarts.core.agent_interface import AgentInterface
from smarts.core.controllers import ActionSpaceType

GRID = str(Path("grid").resolve())
agent_interfaces = {
    f"Agent_{i}": AgentInterface(
        waypoint_paths=True, action=ActionSpaceType.Lane, max_episode_steps=max_episode_steps
    )
    for i, max_episode_steps in enumerate((8, 12))
}
"""
add(
    "SMARTS hiway-v1",
    "smarts",
    "gym.make('smarts.env:hiway-v1', scenarios=[GRID], agent_interfaces=agent_interfaces, headless=True, seed=seed)",
    2,
    _SMARTS,
    kind="dict",
    follows=Follows.WITH_NEIGHBOURS,
    why="It draws from generators that environments of one process share; without observations of absent agents, most "
    "of whose values are random.",
    comparable=without_absent_agents,
    batches=30,
    variables={**_SUMO, "PYTHONHASHSEED": "0"},  # it iterates over sets of names
    prepare=SMARTS_GRID,
)

add(
    "CoGrid Overcooked cramped room",
    "cogrid",
    "CoGridEnv(config={**cramped_room_config, 'max_steps': 60}, agent_class=OvercookedAgent)",
    2,
    "from cogrid.cogrid_env import CoGridEnv\n"
    "from cogrid.envs import cramped_room_config\n"
    "from cogrid.envs.overcooked.agent import OvercookedAgent",
    facades=(),  # it declares no observation spaces
)
add(
    "MaMuJoCo Swimmer 2x1",
    "mamujoco",
    "mamujoco_v1.parallel_env(scenario='Swimmer', agent_conf='2x1', max_episode_steps=60)",
    2,
    "from gymnasium_robotics import mamujoco_v1",
)

add(
    "Generals",
    "generals",
    "PettingZooGenerals(agents={name: RandomAgent(id=name) for name in 'AB'}, grid_factory=GridFactory("
    "grid_dims=(4, 4), mountain_density=0, city_density=0, general_positions=[(0, 0), (0, 1)]))",
    2,
    "from generals import GridFactory, PettingZooGenerals\nfrom generals.agents import RandomAgent",
    masks=True,
    batches=500,  # games of random players are long
)
add(
    "PyFlyt quadx hover",
    "pyflyt",
    "MAQuadXHoverEnvV2(max_duration_seconds=1.0)",
    4,
    "from PyFlyt.pz_envs import MAQuadXHoverEnvV2",
    follows=Follows.IN_FORM,
    why="Only its first episode is seeded: two plain loops differ.",
)

add(
    "Flatland",
    "flatland",
    "PettingzooFlatland(env_generator(n_agents=3, x_dim=30, y_dim=30, seed=seed, obs_builder_object="
    "FlattenedNormalizedTreeObsForRailEnv(max_depth=1, predictor=ShortestPathPredictorForRailEnv(max_depth=20)))[0])"
    ".parallel_env()",
    3,
    "from flatland.env_generation.env_generator import env_generator\n"
    "from flatland.envs.predictions import ShortestPathPredictorForRailEnv\n"
    "from flatland.ml.observations.flatten_tree_observation_for_rail_env import FlattenedNormalizedTreeObsForRailEnv\n"
    "from flatland.ml.pettingzoo.wrappers import PettingzooFlatland",
    batches=600,  # episodes are long
)
add(
    "MetaDrive roundabout",
    "metadrive",
    "MultiAgentRoundaboutEnv({'num_agents': 4, 'horizon': 60})",
    4,
    "from metadrive.envs.marl_envs import MultiAgentRoundaboutEnv",
    kind="dict",
)
add(
    "POGEMA",
    "pogema",
    "pogema_v0(GridConfig(num_agents=3))",
    3,
    "from pogema import GridConfig, pogema_v0",
    kind="tuple",
)
add(
    "CityLearn",
    "citylearn",
    "CityLearnEnv('citylearn_challenge_2023_phase_1')",
    3,
    "from citylearn.citylearn import CityLearnEnv",
)
add("SMAClite", "smaclite", "gym.make('smaclite/2s3z-v0')", 5, "import gymnasium as gym\nimport smaclite", kind="tuple")
add("SMACv2", "smacv2", "StarCraft2Env(map_name='3m')", 3, "from smacv2.env import StarCraft2Env")
add(
    "Melting Pot clean_up",
    "meltingpot",
    "MeltingPotCompatibilityV0(substrate_name='clean_up', render_mode=None)",
    7,
    "from shimmy import MeltingPotCompatibilityV0",
)

# -- with an API of their own, through a wrapper --
_WRAPPERS = "from simulators import own_apis"
add("Laser Learning Environment level 4", "lle", "own_apis.Lasers(4)", 2, _WRAPPERS, kind="dict", masks=True)
add("RLCard limit-holdem", "rlcard", "own_apis.Cards('limit-holdem', seed)", 2, _WRAPPERS, kind="dict", masks=True)
add("JaxMARL MPE_simple_spread_v3", "jaxmarl", "own_apis.Jax('MPE_simple_spread_v3')", 3, _WRAPPERS, kind="dict")
add("Kaggle connectx", "kaggle", "own_apis.ConnectX()", 2, _WRAPPERS, kind="dict", masks=True)
add("Overcooked-AI cramped_room", "overcooked", "own_apis.Kitchen('cramped_room', 60)", 2, _WRAPPERS, kind="dict")


if __name__ == "__main__":
    print(INSTALLS[sys.argv[1]])
