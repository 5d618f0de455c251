"""An environment as PettingZoo's template has it, in the script that trains it, with each facade.

Its spaces are methods behind `functools.lru_cache`, and nothing is in a module that workers could import.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TEMPLATE = """
import functools

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from pettingzoo import ParallelEnv
from pettingzoo.utils import parallel_to_aec, wrappers

MOVES = ["rock", "paper", "scissors", "none"]
NUM_ROUNDS = 25


def env(render_mode=None):
    env = wrappers.AssertOutOfBoundsWrapper(raw_env(render_mode=render_mode))
    return wrappers.OrderEnforcingWrapper(env)


def raw_env(render_mode=None):
    return parallel_to_aec(parallel_env(render_mode=render_mode))


class parallel_env(ParallelEnv):
    metadata = {"render_modes": ["human"], "name": "rock_paper_scissors_v0"}

    def __init__(self, render_mode=None):
        self.possible_agents = ["player_" + str(number) for number in range(2)]
        self.agent_name_mapping = dict(zip(self.possible_agents, range(len(self.possible_agents))))
        self.render_mode = render_mode

    # The same space each time, so that seeding it has an effect.
    @functools.lru_cache(maxsize=None)
    def observation_space(self, agent):
        return Discrete(4)

    @functools.lru_cache(maxsize=None)
    def action_space(self, agent):
        return Discrete(3)

    def render(self):
        if self.render_mode is None:
            gymnasium.logger.warn("You are calling render method without specifying any render mode.")
            return
        print("moves:", *[MOVES[self.state[agent]] for agent in self.agents] or ["game over"])

    def close(self):
        pass

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents[:]
        self.num_moves = 0
        observations = {agent: MOVES.index("none") for agent in self.agents}
        infos = {agent: {} for agent in self.agents}
        self.state = observations
        return observations, infos

    def step(self, actions):
        if not actions:
            self.agents = []
            return {}, {}, {}, {}, {}
        first, second = self.agents
        won = (int(actions[first]) - int(actions[second])) % 3
        rewards = {first: (0, 1, -1)[won], second: (0, -1, 1)[won]}
        terminations = {agent: False for agent in self.agents}
        self.num_moves += 1
        truncations = {agent: self.num_moves >= NUM_ROUNDS for agent in self.agents}
        observations = {self.agents[i]: int(actions[self.agents[1 - i]]) for i in range(len(self.agents))}
        self.state = observations
        infos = {agent: {} for agent in self.agents}
        if self.num_moves >= NUM_ROUNDS:
            self.agents = []
        if self.render_mode == "human":
            self.render()
        return observations, rewards, terminations, truncations, infos


import marl_parallel

"""

LOOP = '''
def best_reply(observations):
    """A policy that learns nothing: what beats the move that was seen last."""
    return (np.asarray(observations) + 1) % 3

'''

TRAINING = {
    "dicts": '''
with marl_parallel.ParallelEnv([parallel_env] * 4, num_workers=2) as envs:
    observations, infos = envs.reset()
    for _ in range(NUM_ROUNDS + 5):
        actions = [{agent: int(best_reply(seen)) for agent, seen in one.items()} for one in observations]
        observations, rewards, terminations, truncations, infos = envs.step(actions)
    assert envs.stats().resets == 8
with marl_parallel.ParallelEnv([env] * 2, num_workers=2) as envs:  # as AEC, with wrappers
    observations, infos = envs.reset()
    for _ in range(NUM_ROUNDS + 5):
        actions = [
            {agent: int(best_reply(one[agent])) for agent in acting} for one, acting in zip(observations, envs.acting)
        ]
        observations, rewards, terminations, truncations, infos = envs.step(actions)
    assert envs.stats().resets == 4
''',
    "stacked": '''
with marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="stacked") as envs:
    observations, infos = envs.reset()
    for _ in range(NUM_ROUNDS + 5):
        observations, rewards, terminations, truncations, infos = envs.step(best_reply(observations))
''',
    "gymnasium": '''
envs = marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="gymnasium")
observations, infos = envs.reset()
for _ in range(NUM_ROUNDS + 5):
    observations, rewards, terminations, truncations, infos = envs.step(best_reply(observations))
envs.close()
''',
    "pettingzoo": '''
envs = marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="pettingzoo")
observations, infos = envs.reset()
for _ in range(NUM_ROUNDS + 5):
    actions = {agent: best_reply(seen) for agent, seen in observations.items()}
    observations, rewards, terminations, truncations, infos = envs.step(actions)
envs.close()
''',
    "sb3": '''
from stable_baselines3 import PPO

envs = marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="sb3")
PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=1, seed=1).learn(512)
envs.close()
''',
    "torchrl": '''
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss

envs = marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="torchrl")
group = next(iter(envs.group_map))
inputs = envs.observation_spec[group, "observation"].shape[-1]
outputs = envs.full_action_spec[group, "action"].space.n


class Net(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table = torch.nn.Linear(1, outputs)

    def forward(self, observation):
        return self.table(observation.reshape(*observation.shape[:3], -1)[..., :1].float())


actor = ProbabilisticActor(
    TensorDictModule(Net(outputs), [(group, "observation")], [(group, "logits")]),
    in_keys=[(group, "logits")],
    out_keys=[(group, "action")],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
    log_prob_key=(group, "log_prob"),
)
critic = TensorDictModule(Net(1), [(group, "observation")], [(group, "state_value")])
loss = ClipPPOLoss(actor, critic)
loss.set_keys(
    action=(group, "action"), sample_log_prob=(group, "log_prob"), value=(group, "state_value"),
    reward=(group, "reward"), done=(group, "done"), terminated=(group, "terminated"),
)
optimiser = torch.optim.Adam(loss.parameters())
for data in Collector(envs, actor, frames_per_batch=64, total_frames=256):
    for key in ("done", "terminated"):
        data["next", group, key] = data["next", key].unsqueeze(-1).expand(data["next", group, "reward"].shape)
    with torch.no_grad():
        loss.make_value_estimator()
        loss.value_estimator(data)
    losses = loss(data)
    sum(value for key, value in losses.items() if key.startswith("loss")).backward()
    optimiser.step()
''',
    "rllib": '''
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.tune import register_env

from marl_parallel.vector import ParallelMultiAgentEnvRunner

ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
register_env("template", lambda context: parallel_env())
config = (
    PPOConfig()
    .environment("template")
    .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **_: "shared")
    .env_runners(
        env_runner_cls=ParallelMultiAgentEnvRunner,
        num_envs_per_env_runner=4,
        num_env_runners=0,
        # RLlib's networks take no numbers: one-hot vectors.
        env_to_module_connector=lambda *_, **__: FlattenObservations(multi_agent=True),
    )
    .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
    .debugging(log_level="ERROR")
)
algorithm = config.build_algo()
algorithm.train()
algorithm.stop()
ray.shutdown()
''',
    "agilerl": '''
from agilerl.algorithms import IPPO
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy

envs = marl_parallel.make(parallel_env, num_envs=4, num_workers=2, facade="agilerl")
algorithm = IPPO(
    observation_spaces=[envs.single_observation_space(agent) for agent in envs.agents],
    action_spaces=[envs.single_action_space(agent) for agent in envs.agents],
    agent_ids=envs.agents,
    learn_step=64,
    batch_size=32,
    update_epochs=1,
)
train_multi_agent_on_policy(
    envs, "template", "IPPO", [algorithm], max_steps=256, evo_steps=128, eval_loop=1, verbose=False
)
envs.close()
''',
}  # fmt: skip
LIBRARIES = {"sb3": "stable_baselines3", "torchrl": "torchrl", "rllib": "ray.rllib", "agilerl": "agilerl"}


def is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of the package that would contain it
        return False


FACADES = [name for name in TRAINING if is_installed(LIBRARIES.get(name, "numpy"))]


def run(folder: Path, facade: str, **variables: str) -> None:
    """Run a script in which everything is defined, and which anybody would write with a guard."""
    body = textwrap.indent(LOOP + TRAINING[facade] + 'print("trained")\n', "    ")
    script = folder / "train.py"
    script.write_text(f'{TEMPLATE}\n\nif __name__ == "__main__":{body}')
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script.name],
        cwd=folder, capture_output=True, text=True, timeout=100, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


@pytest.mark.parametrize("facade", FACADES)
def test_training(facade, tmp_path):
    run(tmp_path, facade)


@pytest.mark.release_independent
def test_portable_workers(tmp_path):
    run(tmp_path, "stacked", MARL_PARALLEL_PORTABLE="1")
