"""Gymnasium's video recorder on the rows of `GymnasiumVectorEnv`; it needs moviepy."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.wrappers import vector as wrappers
from simulators.variable_agents import LENGTH, VariableAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv

pytestmark = pytest.mark.needs("moviepy")


@pytest.mark.filterwarnings("ignore:.*Overwriting existing videos:UserWarning")
def test_videos(tmp_path):
    env = GymnasiumVectorEnv(ParallelEnv([Large] * 2, "NEXT_STEP", backend="serial"))
    video = wrappers.RecordVideo(env, str(tmp_path), video_aspect_ratio=(3, 2))
    video.reset(seed=1)
    for _ in range(2 * LENGTH + 2):
        video.step(video.action_space.sample())
    video.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rl-video-episode-0.mp4", "rl-video-episode-1.mp4"]


class Large(VariableAgents):
    """Its frames are large enough for a codec."""

    def render(self) -> np.ndarray:
        return super().render().repeat(8, axis=0).repeat(8, axis=1)
