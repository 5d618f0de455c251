"""BenchMARL's MAPPO and QMIX on tasks from yaml: with turns, agents that die, masks and a global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from benchmarl.algorithms import IppoConfig, MappoConfig, QmixConfig
from benchmarl.environments import task_config_registry
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.hydra_config import load_task_config_from_hydra
from benchmarl.models.mlp import MlpConfig
from gymnasium import spaces
from hydra import compose, initialize_config_module
from pettingzoo.classic import tictactoe_v3
from simulators.dying_agents import DyingAgents, TwoMaskedAgents
from simulators.masked_actions import refusing_multi_discrete
from simulators.skirmish import Skirmish
from simulators.vector_rewards import Couriers

from marl_parallel.benchmarl import BenchMARLTask, benchmarl_tasks

pytestmark = pytest.mark.needs("benchmarl")
SEED, ENVS, STEPS, EPISODES = 3, 4, 20, 3

SPREAD = """
name: mpe2.simple_spread_v3
max_steps: 25
env_kwargs: {max_cycles: 12, render_mode: rgb_array}
discrete_actions: true
continuous_actions: {continuous_actions: true}
num_workers: 2
"""
DYING = """
name: simulators.dying_agents:DyingAgents
max_steps: 12
num_workers: 2
facade_kwargs: {group_map: {all: [x, y, z]}}
"""
TICTACTOE = """
name: pettingzoo.classic.tictactoe_v3
max_steps: 9
num_workers: 2
facade_kwargs: {group_map: {crosses: [player_1], noughts: [player_2]}}
"""
SKIRMISH = """
name: simulators.skirmish:Skirmish
max_steps: 9
backend: serial
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Other tests have the other CPUs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- plain loops -------------------------------------------------------------------------------------------------------


class DyingLoop:
    """Values by agent, for agents that have one; `is_over` is whether the episode has ended."""

    agents = ("x", "y", "z")

    def __init__(self, seed: int) -> None:
        self.env = DyingAgents()
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        self.seen, _ = self.env.reset(seed=seed)
        self.acting, self.is_over = {*self.seen}, False

    def step(self, actions: dict[str, int]) -> None:
        self.seen, self.rewards, terminated, truncated, _ = self.env.step(actions)
        self.is_over = terminated["__all__"]
        self.ended = {agent for agent in self.seen if terminated[agent] or truncated[agent]}
        self.acting -= self.ended

    def masks(self) -> dict[str, Any]:
        return {}

    def state(self) -> Any:
        return None


class TictactoeLoop:
    agents = ("player_1", "player_2")

    def __init__(self, seed: int) -> None:
        self.env = tictactoe_v3.env()
        self.reset(seed)

    def observe(self) -> None:
        seen = {agent: self.env.observe(agent) for agent in self.agents}
        self.seen = {agent: one["observation"] for agent, one in seen.items()}
        self.mask = seen[self.env.agent_selection]["action_mask"]
        self.acting = set() if self.is_over else {self.env.agent_selection}

    def reset(self, seed: int | None = None) -> None:
        self.env.reset(seed=seed)
        self.is_over = False
        self.observe()

    def step(self, actions: dict[str, int]) -> None:
        (action,) = actions.values()
        assert self.mask[action], "an action that is not allowed"
        self.env.step(action)
        self.rewards = dict(self.env.rewards)
        self.ended = {agent for agent, ends in self.env.terminations.items() if ends}
        self.is_over = bool(self.ended)
        self.observe()

    def masks(self) -> dict[str, Any]:
        return dict.fromkeys(self.acting, self.mask)

    def state(self) -> Any:
        return None


class SkirmishLoop:
    def __init__(self, seed: int) -> None:
        self.env = Skirmish(seed)
        self.agents = tuple(f"agent_{i}" for i in range(self.env.n_agents))
        self.reset()

    def reset(self, seed: int | None = None) -> None:
        self.env.reset()
        self.is_over = False
        self.observe()

    def observe(self) -> None:
        self.seen = dict(zip(self.agents, self.env.get_obs()))
        self.acting = set() if self.is_over else {*self.agents}

    def step(self, actions: dict[str, int]) -> None:
        reward, self.is_over, _ = self.env.step([actions[agent] for agent in self.agents])
        self.rewards = dict.fromkeys(self.agents, reward)
        self.ended = {*self.agents} if self.is_over else set()
        self.observe()

    def masks(self) -> dict[str, Any]:
        return dict(zip(self.agents, self.env.get_avail_actions())) if not self.is_over else {}

    def state(self) -> Any:
        return self.env.get_state()


def compare(batch: Any, loop_of: Any, groups: dict[str, list[str]]) -> dict[str, int]:
    """Compare all values of a batch with loops that take its actions; returns what there was to see."""
    found = {"deaths": 0, "episodes": 0, "waits": 0}
    where = {agent: (group, row) for group, agents in groups.items() for row, agent in enumerate(agents)}
    assert {*where} == {*loop_of(0).agents}
    for env_id in range(ENVS):
        loop = loop_of(SEED + env_id)
        for step in batch[env_id].unbind(0):
            observed(step, loop, where)
            found["waits"] += len(where) - len(loop.acting)
            loop.step({agent: int(step[where[agent][0], "action"][where[agent][1]]) for agent in loop.acting})
            following = step["next"]
            for agent, (group, row) in where.items():
                assert following[group, "reward"][row].item() == pytest.approx(loop.rewards.get(agent, 0)), agent
                assert following[group, "done"][row].item() == (loop.is_over or agent in loop.ended), agent
            assert following["done"].item() == loop.is_over
            observed(following, loop, where)
            found["deaths"] += len(loop.ended) if not loop.is_over else 0
            found["episodes"] += loop.is_over
            if loop.is_over:
                loop.reset()
    return found


def observed(step: Any, loop: Any, where: dict[str, tuple[str, int]]) -> None:
    masks, state = loop.masks(), loop.state()
    for agent, (group, row) in where.items():
        seen = step[group, "observation"][row]
        seen = seen if isinstance(seen, torch.Tensor) else seen["observation"]  # of a dict
        assert seen.dtype is torch.float32
        assert np.array_equal(seen, np.asarray(loop.seen.get(agent, np.zeros(seen.shape)), np.float32)), agent
        assert step[group, "present"][row].item() == (agent in loop.seen), agent
        assert step[group, "mask"][row].item() == (agent in loop.acting), agent
        if agent in masks:
            assert step[group, "action_mask"][row].tolist() == [bool(one) for one in masks[agent]], agent
    if state is not None:
        assert np.array_equal(step["state"], state)


# -- training ----------------------------------------------------------------------------------------------------------


class Record(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []
        self.evaluations: list[list[Any]] = []
        self.ignored, self.unseen = 0, 0  # rows; unseen: of agents that act and have no next observation

    def on_batch_collected(self, batch: Any) -> None:
        self.batches.append(batch.clone())

    def on_train_step(self, batch: Any, group: str) -> None:
        of_group = batch[group]
        if of_group.get("advantage", None) is not None:
            ignored = ~of_group["mask"]
            is_own_value = (of_group["value_target"] == of_group["state_value"]).squeeze(-1)
            assert not of_group["advantage"][ignored].any()
            assert of_group["advantage"][~ignored].any()
            assert is_own_value[~of_group["present"]].all()
            assert is_own_value[ignored & ~batch["next", group, "present"]].all()
            assert not is_own_value[~ignored].any()
            self.ignored += int(ignored.sum())
            self.unseen += int((~ignored & ~batch["next", group, "present"]).sum())

    def on_evaluation_end(self, rollouts: list[Any]) -> None:
        self.evaluations.append(rollouts)


def experiment(
    task: BenchMARLTask, algorithm: Any, folder: Path, callback: Callback | None = None, **of_config: Any
) -> Experiment:
    config = ExperimentConfig.get_from_yaml()
    config.max_n_iters, config.max_n_frames = 2, None
    for kind in ("on_policy", "off_policy"):
        setattr(config, f"{kind}_n_envs_per_worker", ENVS)
        setattr(config, f"{kind}_collected_frames_per_batch", ENVS * STEPS)
    config.on_policy_minibatch_size, config.on_policy_n_minibatch_iters = ENVS * STEPS // 2, 2
    config.off_policy_train_batch_size, config.off_policy_n_optimizer_steps = ENVS * STEPS // 2, 4
    config.evaluation_interval, config.evaluation_episodes = ENVS * STEPS, EPISODES
    config.loggers, config.save_folder = [], str(folder)
    for key, value in of_config.items():
        setattr(config, key, value)
    model, critic = MlpConfig.get_from_yaml(), MlpConfig.get_from_yaml()
    # Observations of tictactoe are planes.
    model.num_feature_dims = critic.num_feature_dims = 3 if "tictactoe" in task.name else 1
    return Experiment(
        task=task,
        algorithm_config=algorithm.get_from_yaml(),
        model_config=model,
        critic_model_config=critic,
        seed=SEED,
        config=config,
        callbacks=[callback] if callback else [],
    )


CASES: dict[str, tuple[str, Any]] = {
    "spread": (SPREAD, None),
    "dying": (DYING, DyingLoop),
    "tictactoe": (TICTACTOE, TictactoeLoop),
    "skirmish": (SKIRMISH, SkirmishLoop),
}


@pytest.mark.parametrize("algorithm", [MappoConfig, QmixConfig])
@pytest.mark.parametrize("case", CASES)
def test_training(case, algorithm, tmp_path):
    """Two iterations, each with an evaluation; what BenchMARL collects equals a plain loop with the same actions."""
    text, loop_of = CASES[case]
    file = tmp_path / f"{case}.yaml"
    file.write_text(text)
    record = Record()
    trained = experiment(BenchMARLTask.from_yaml(file), algorithm, tmp_path, record)
    before = [parameter.detach().clone() for loss in trained.losses.values() for parameter in loss.parameters()]
    trained.run()
    after = [parameter for loss in trained.losses.values() for parameter in loss.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, after))
    assert all(parameter.isfinite().all() for parameter in after)
    assert [len(rollouts) for rollouts in record.evaluations] == [EPISODES, EPISODES]
    assert (trained.state_spec is not None) == (case in ("spread", "skirmish"))
    assert (trained.action_mask_spec is not None) == (case in ("tictactoe", "skirmish"))
    assert trained.continuous_actions == (case == "spread" and algorithm is MappoConfig)
    if loop_of is not None:
        batch = torch.cat(record.batches, 1)
        assert batch.shape == (ENVS, 2 * STEPS)
        found = compare(batch, loop_of, trained.group_map)
        assert found["episodes"] > ENVS
        assert (found["deaths"] > ENVS) == (case == "dying")
        assert (found["waits"] > ENVS) == (case in ("dying", "tictactoe"))
        assert (record.ignored > 0) == (algorithm is MappoConfig and case in ("dying", "tictactoe"))


class OnlyTurns(gymnasium.Env):
    """Only the agent whose turn it is gets an observation and a reward; 8 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["p_0", "p_1"]
        self.observation_spaces = dict.fromkeys(self.agents, spaces.Box(0, 10, (2,), np.float32))
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.agents}

    def observed(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.full(2, self.time + 1, np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observed(["p_0"]), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        seen = [self.agents[self.time % 2]] if self.time < 8 else self.agents
        return self.observed(seen), dict.fromkeys(seen, 1.0), {"__all__": self.time == 8}, {"__all__": False}, {}


class NoLastObservation(OnlyTurns):
    """Both agents act; `p_0` dies in step 3 of 6, and has no observation of that step."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observed(self.agents), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        seen = self.agents if self.time < 3 else ["p_1"]
        terminated = {**dict.fromkeys(seen, False), "p_0": self.time >= 3, "__all__": self.time == 6}
        return self.observed(seen), dict.fromkeys(seen, 1.0), terminated, {"__all__": False}, {}


@pytest.mark.parametrize("simulator", [OnlyTurns, NoLastObservation])
def test_critic_learns_from_actions_without_a_next_observation(simulator, tmp_path):
    task, record = BenchMARLTask("turns", {"name": simulator, "max_steps": 9, "backend": "serial"}), Record()
    experiment(task, IppoConfig, tmp_path, record).run()
    assert record.ignored
    assert record.unseen


def test_random_actions_follow_masks(tmp_path):
    """The initial random actions of algorithms with a replay buffer; `TictactoeLoop` checks each action."""
    file = tmp_path / "tictactoe.yaml"
    file.write_text(TICTACTOE)
    record = Record()
    trained = experiment(
        BenchMARLTask.from_yaml(file), QmixConfig, tmp_path, record, off_policy_init_random_frames=2 * ENVS * STEPS
    )
    trained.run()
    batch = torch.cat(record.batches, 1)
    assert compare(batch, TictactoeLoop, trained.group_map)["episodes"] > 2 * ENVS
    for group in trained.group_map:  # waiting agents draw from all actions
        assert {*batch[group, "action"][~batch[group, "mask"]].tolist()} == {*range(9)}
        assert len({*batch[group, "action"][batch[group, "mask"]].tolist()}) == 9
    for rollout in record.evaluations[0]:
        assert rollout["next", "done"][-1]


def test_restarts_are_logged(tmp_path):
    """Each environment raises once; its episode ends there, and training goes on."""
    config = {
        "name": "simulators.dying_agents:Interrupted",
        "max_steps": 9,
        "backend": "serial",
        "on_error": "restart",
        "restart_policy": {"max_restarts": 30},
        "facade_kwargs": {"group_map": {"all": ["x", "y", "z"]}},
    }
    task, record = BenchMARLTask("interrupted", config), Record()
    experiment(task, MappoConfig, tmp_path, record).run()
    assert [task.log_info(batch) for batch in record.batches] == [
        {"collection/restarts": ENVS},
        {"collection/restarts": 0},
    ]


def test_frames_of_evaluations():
    """A simulator renders if it was constructed to do so."""
    config = {"name": "mpe2.simple_spread_v3", "max_steps": 25, "backend": "serial"}
    for keywords, renders in (({}, False), ({"render_mode": "rgb_array"}, True)):
        task = BenchMARLTask("spread", {**config, "env_kwargs": keywords})
        env = task.get_env_fun(2, False, SEED, "cpu")()
        env.reset()
        assert task.has_render(env) == renders
        if renders:
            assert np.asarray(task.render_callback(None, env, None)).shape[2:] == (3,)
        env.close()


# -- configuration -----------------------------------------------------------------------------------------------------


def test_tasks_of_a_folder(tmp_path):
    """An enum of BenchMARL, which its command line knows by the names of the files."""
    folder = tmp_path / "task" / "marl_parallel"
    folder.mkdir(parents=True)
    (folder / "spread.yaml").write_text(SPREAD)
    (folder / "game.yaml").write_text(TICTACTOE)
    tasks = benchmarl_tasks(folder)
    assert [task.name for task in tasks] == ["GAME", "SPREAD"]
    assert task_config_registry["marl_parallel/spread"] is tasks.SPREAD
    task = tasks.SPREAD.get_task()
    assert task.config["env_kwargs"] == {"max_cycles": 12, "render_mode": "rgb_array"}
    assert task == tasks.SPREAD.get_from_yaml(str(folder / "spread.yaml"))
    assert tasks.GAME.get_task(config={"name": "other", "max_steps": 2}).config["name"] == "other"
    with initialize_config_module("benchmarl.conf", version_base=None):
        overrides = ["algorithm=qmix", "task=marl_parallel/spread", "task.env_kwargs.max_cycles=7"]
        config = compose("config", [*overrides, f"hydra.searchpath=[file://{tmp_path}]"])
    loaded = load_task_config_from_hydra(config.task, "marl_parallel/spread")
    assert loaded.name == "SPREAD"
    assert loaded.config == {**task.config, "env_kwargs": {"max_cycles": 7, "render_mode": "rgb_array"}}


def test_wrappers_and_chosen_actions():
    config = {
        "name": "mpe2.simple_speaker_listener_v4",
        "max_steps": 25,
        "backend": "serial",
        "wrappers": ["marl_parallel.wrappers:pad_spaces"],
        "facade_kwargs": {"return_state": False, "group_map": {"both": ["speaker_0", "listener_0"]}},
        "discrete_actions": {"max_cycles": 5},
        "continuous_actions": {"continuous_actions": True},
    }
    task = BenchMARLTask("talk", config)
    assert task.supports_continuous_actions()
    assert task.supports_discrete_actions()
    env = task.get_env_fun(2, False, SEED, "cpu")()
    assert task.group_map(env) == {"both": ["speaker_0", "listener_0"]}
    assert task.state_spec(env) is None
    assert task.observation_spec(env)["both", "observation"].shape == (2, 11)
    assert env.rollout(30, break_when_any_done=False)["next", "done"].sum() == 2 * 6
    env.close()
    without = BenchMARLTask("talk", {**config, "wrappers": None, "facade_kwargs": None})
    env = without.get_env_fun(2, False, SEED, "cpu")()
    assert without.group_map(env) == {"speaker": ["speaker_0"], "listener": ["listener_0"]}
    env.close()
    only = BenchMARLTask("talk", {key: value for key, value in config.items() if key != "discrete_actions"})
    assert not only.supports_discrete_actions()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "mpe2.simple_spread_v3"}, "no 'max_steps'"),
        ({"max_steps": 25}, "no 'name'"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": 25, "seed": 3}, "'seed', but BenchMARL sets it"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": 25, "auto_reset": True}, "'auto_reset'"),
        ({"name": ["mpe2.simple_spread_v3"], "max_steps": 25}, "a list as 'name'"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": None}, "max_steps of the task 'wrong' must be an integer"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": 0}, "max_steps of the task 'wrong' must be at least 1"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": 9, "discrete_actions": "yes"}, "true, false, or a dict"),
        ({"name": "mpe2.simple_spread_v3", "max_steps": 9, "continuous_actions": None}, "continuous_actions of the"),
        (
            {"name": "mpe2.simple_spread_v3", "max_steps": 9, "facade_kwargs": {"device": "cpu"}},
            "'device' in facade_kwargs, but BenchMARL sets it",
        ),
    ],
)
def test_wrong_configurations(config, words):
    with pytest.raises((TypeError, ValueError), match=words):
        BenchMARLTask("wrong", config)


class HalfMasked(TwoMaskedAgents):
    """One agent observes its mask, the other one has none."""

    def __init__(self) -> None:
        super().__init__(in_dicts=True)

    def observation_space(self, agent: str) -> Any:
        whole: Any = super().observation_space(agent)
        return whole if agent == "long" else whole["at"]

    def masked(self, seen: dict, infos: dict) -> tuple[dict, dict]:
        seen, infos = super().masked(seen, infos)
        return {agent: one if agent == "long" else one["at"] for agent, one in seen.items()}, infos


def test_errors_of_the_environments(tmp_path):
    spread = {"name": "mpe2.simple_spread_v3", "max_steps": 25, "backend": "serial"}
    with pytest.raises(ValueError, match=r"declares continuous actions, .* set discrete_actions: true"):
        BenchMARLTask("spread", {**spread, "continuous_actions": True}).get_env_fun(2, True, SEED, "cpu")()
    for name, words in (
        (lambda: refusing_multi_discrete((np.ones(3, np.int8), np.ones(2, np.int8))), "Discrete and Box actions only"),
        (Couriers, "get 2 rewards each"),
    ):
        unfit = {"name": name, "max_steps": 25, "backend": "serial"}
        with pytest.raises(ValueError, match=words):
            BenchMARLTask("unfit", unfit).get_env_fun(2, False, SEED, "cpu")()
    with pytest.raises(TypeError, match="num_wrkers"):
        BenchMARLTask("spread", {**spread, "num_wrkers": 2}).get_env_fun(2, False, SEED, "cpu")()
    mixed = {"name": HalfMasked, "max_steps": 25, "backend": "serial"}
    task = BenchMARLTask("mixed", mixed)
    env = task.get_env_fun(2, False, SEED, "cpu")()
    with pytest.raises(ValueError, match=r"groups \['long'\] have action masks, but groups \['short'\] have none"):
        task.action_mask_spec(env)
    env.close()
    task = BenchMARLTask("mixed", {**mixed, "facade_kwargs": {"info_masks": True}})
    env = task.get_env_fun(2, False, SEED, "cpu")()
    assert [*task.action_mask_spec(env)] == ["long", "short"]
    env.close()
    with pytest.raises(FileNotFoundError, match="no yaml files"):
        benchmarl_tasks(tmp_path)
    (tmp_path / "Spread.yaml").write_text(SPREAD)
    with pytest.raises(ValueError, match=r"rename Spread\.yaml"):
        benchmarl_tasks(tmp_path)
    (tmp_path / "Spread.yaml").write_text("- 1")
    with pytest.raises(TypeError, match="must have the keys of a task"):
        BenchMARLTask.from_yaml(tmp_path / "Spread.yaml")
