"""MAPPO of BenchMARL on simple_spread, with environments that are stepped in worker processes.

    python examples/benchmarl_mappo.py              a minute
    python examples/benchmarl_mappo.py --smoke      a few seconds

BenchMARL 1.5 needs TorchRL 0.11, so give it a virtual environment of its own:
`pip install -e ".[mpe]" benchmarl==1.5.2 torch`. BenchMARL steps a `TorchRLEnv` like a simulator with a batch of its
own, such as VMAS. Replace `make` and the names below by your own environment.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarl.algorithms import MappoConfig
from benchmarl.environments.common import TaskClass
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from torchrl.data import Composite
from torchrl.envs import EnvBase

from marl_parallel import make


class SpreadTask(TaskClass):
    """simple_spread; the keys of `config` are keywords of its constructor."""

    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any
    ) -> Callable[[], EnvBase]:
        env_kwargs = {**self.config, "continuous_actions": continuous_actions, "render_mode": "rgb_array"}
        facade_kwargs = {"device": device, "return_state": True}
        return partial(
            make, "mpe2.simple_spread_v3", num_envs, env_kwargs,
            facade="torchrl", facade_kwargs=facade_kwargs, seed=seed,
        )  # fmt: skip

    def supports_continuous_actions(self) -> bool:
        return True

    def supports_discrete_actions(self) -> bool:
        return True

    def max_steps(self, env: EnvBase) -> int:
        return int(self.config["max_cycles"])

    def has_render(self, env: EnvBase) -> bool:
        return True  # evaluations call `env.render`, whose frames become a video of environment 0

    def group_map(self, env: EnvBase) -> dict[str, list[str]]:
        return dict(env.group_map)

    def observation_spec(self, env: EnvBase) -> Composite:
        return self._part(env, "observation")

    def action_spec(self, env: EnvBase) -> Composite:
        return env.full_action_spec_unbatched

    def state_spec(self, env: EnvBase) -> Composite:
        return Composite(state=env.full_observation_spec_unbatched["state"].clone())

    def info_spec(self, env: EnvBase) -> None:
        return None

    def action_mask_spec(self, env: EnvBase) -> None:
        return None  # for environments with masks: self._part(env, "action_mask")

    @staticmethod
    def env_name() -> str:
        return "marl_parallel"

    def _part(self, env: EnvBase, key: str) -> Composite:
        spec = env.full_observation_spec_unbatched
        return Composite(
            {group: Composite({key: spec[group, key].clone()}, shape=spec[group].shape) for group in env.group_map}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="train for a few seconds only")
    smoke = parser.parse_args().smoke
    num_envs, steps = (4, 25) if smoke else (16, 100)
    config = ExperimentConfig.get_from_yaml()
    config.max_n_iters, config.max_n_frames = (2 if smoke else 30), None
    config.on_policy_n_envs_per_worker = num_envs
    config.on_policy_collected_frames_per_batch = num_envs * steps
    config.on_policy_minibatch_size, config.on_policy_n_minibatch_iters = num_envs * steps // 4, 10
    config.evaluation_interval, config.evaluation_episodes = num_envs * steps, 4
    config.lr, config.create_json = 5e-4, False
    config.render, config.loggers = True, []  # with a logger, such as "csv", videos are kept
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder
        experiment = Experiment(
            task=SpreadTask("spread", {"max_cycles": 25}),
            algorithm_config=MappoConfig.get_from_yaml(),
            model_config=MlpConfig.get_from_yaml(),
            critic_model_config=MlpConfig.get_from_yaml(),
            seed=0,
            config=config,
        )
        experiment.run()
    print(f"mean return of the last iteration: {experiment.mean_return:.1f}")


if __name__ == "__main__":
    main()
