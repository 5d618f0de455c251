"""MAPPO of BenchMARL on simple_spread, with environments that are stepped in worker processes.

    python examples/benchmarl_mappo.py              one to two minutes
    python examples/benchmarl_mappo.py --smoke      a few seconds

BenchMARL 1.5 needs TorchRL 0.10 or 0.11, so give it a virtual environment of its own:
`pip install -e ".[benchmarl,mpe]"`. Replace the name and the keywords in `TASK` by your own environment.
"""

from __future__ import annotations

import argparse
import tempfile

from benchmarl.algorithms import MappoConfig
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig

from marl_parallel.benchmarl import BenchMARLTask

TASK = {
    "name": "mpe2.simple_spread_v3",
    "env_kwargs": {"max_cycles": 25, "render_mode": "rgb_array"},
    "max_steps": 25,
}


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
    config.lr, config.gamma = 7e-4, 0.95
    config.render, config.loggers = True, []  # without a logger, videos are not kept
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder
        experiment = Experiment(
            task=BenchMARLTask("spread", TASK),
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
