"""`record_video`: the frames in the file, wrong arguments, and that a failed run leaves no file."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import imageio.v3 as iio
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers.owners import give_away, has_owners
from helpers.processes import gone
from mpe2 import simple_spread_v3
from PIL import Image

from marl_parallel import AutoresetMode, EnvError, ParallelEnv, record_video, recording
from marl_parallel.recording import _LABEL_LEAST

HEIGHT, WIDTH = 40, 61
# What imageio leaves open is its own reader of mp4.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class Lamp(gymnasium.Env):
    """Gets brighter in each of its four steps; each reward is 2."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 5}
    observation_space = spaces.Box(0, 255, (1,))
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode: str | None = "rgb_array", dtype: type = np.uint8, breaks: bool = False) -> None:
        self.render_mode, self._dtype, self._breaks = render_mode, dtype, breaks
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self._breaks and self.steps == 2:
            raise ValueError("the bulb is gone")
        self.steps += 1
        return np.full(1, action, np.float32), 2.0, self.steps == 4, False, {}

    def render(self):
        return np.full((HEIGHT, WIDTH, 3), 50 * self.steps, self._dtype)


def lamps(mode: str = "NEXT_STEP", number: int = 1, **keywords) -> ParallelEnv:
    return ParallelEnv([functools.partial(Lamp, **keywords)] * number, mode, num_workers=1)


def brightness(path: Path) -> list[int]:
    """The brightness in the middle of each frame, over the steps of a `Lamp`."""
    return [round(float(frame.mean()) / 50) for frame in iio.imread(path, index=None)]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [("SAME_STEP", [0, 1, 2, 3, 0, 1, 2]), ("NEXT_STEP", [0, 1, 2, 3, 4, 0, 1]), ("DISABLED", [0, 1, 2, 3, 4, 1, 2])],
)
@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_frames_are_the_rendered_frames(mode, steps, suffix, tmp_path):
    with lamps(mode) as env:
        path = record_video(env, tmp_path / f"lamp{suffix}", 6, labels=False)
    assert path == tmp_path / f"lamp{suffix}"
    assert brightness(path) == steps
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_frame_rate_defaults_to_render_fps(tmp_path):
    with lamps() as env:
        record_video(env, tmp_path / "own.mp4", 4)
        record_video(env, tmp_path / "asked.mp4", 4, fps=20)
        record_video(env, tmp_path / "own.gif", 4)
    assert iio.immeta(tmp_path / "own.mp4")["fps"] == 5
    assert iio.immeta(tmp_path / "asked.mp4")["fps"] == 20
    assert iio.immeta(tmp_path / "own.gif")["duration"] == 200


@pytest.mark.parametrize(("tile_width", "size"), [(None, (HEIGHT, WIDTH)), (122, (80, 122)), (30, (20, 30))])
def test_environments_are_in_a_grid_with_labels(tile_width, size, tmp_path):
    with lamps(number=3) as env:
        record_video(env, tmp_path / "lamps.gif", 1, tile_width=tile_width)
    picture = iio.imread(tmp_path / "lamps.gif", index=1)
    height, width = size
    strip = max(height // 14, _LABEL_LEAST)
    assert 0 <= picture.shape[0] - 2 * (height + strip) <= 1
    assert 0 <= picture.shape[1] - 2 * width <= 1
    for left in (0, width):
        tile = picture[strip : strip + height, left : left + width]
        assert (tile[1:-1, 1:-1] == 50).all()
        assert (tile[[0, -1]] == 128).all()  # the border
        assert (tile[:, [0, -1]] == 128).all()
    labels = picture[:strip]
    assert (labels == 0).any()
    assert (labels > 200).any()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_labels_show_the_return_of_the_episode(mode, tmp_path, monkeypatch):
    drawn_labels = []
    monkeypatch.setattr("marl_parallel.recording._picture", lambda frame, *args: drawn_labels.append(args[:2]) or frame)
    with lamps(mode.name) as env:
        record_video(env, tmp_path / "lamp.gif", 6)
    after = {
        AutoresetMode.SAME_STEP: [0.0, 2.0, 4.0, 6.0, 0.0, 2.0, 4.0],
        AutoresetMode.NEXT_STEP: [0.0, 2.0, 4.0, 6.0, 8.0, 0.0, 2.0],
        AutoresetMode.DISABLED: [0.0, 2.0, 4.0, 6.0, 8.0, 2.0, 4.0],
    }
    assert drawn_labels == [(0, value) for value in after[mode]]


def test_returns_are_summed_over_agents_and_policy_is_called(tmp_path):
    seen = []

    def policy(observations):
        seen.append(observations)
        return [dict.fromkeys(one, 1) for one in observations]

    def rewards_of(labels):
        return [value for env_id, value in labels if env_id == 1]

    drawn_labels = []
    constructor = functools.partial(simple_spread_v3.parallel_env, render_mode="rgb_array")
    with ParallelEnv([constructor] * 2, num_workers=1) as env, pytest.MonkeyPatch.context() as patch:
        original = recording._picture

        def draw(frame, *args):
            drawn_labels.append(args[:2])
            return original(frame, *args)

        patch.setattr(recording, "_picture", draw)
        record_video(env, tmp_path / "spread.mp4", 3, policy, tile_width=64)
        assert [len(one) for one in seen] == [2] * 3
        first = env.reset(seed=42)[0]
        steps = [env.step(policy(first)) for _ in range(3)]
    assert np.array_equal(first[0]["agent_0"], seen[0][0]["agent_0"])
    expected = np.cumsum([0.0, *(sum(step[1][1].values()) for step in steps)])
    assert rewards_of(drawn_labels) == pytest.approx(expected)


def test_random_actions_are_reproducible(tmp_path):
    videos = []
    for name in ("one.gif", "two.gif"):
        with ParallelEnv([functools.partial(simple_spread_v3.parallel_env, render_mode="rgb_array")] * 2) as env:
            record_video(env, tmp_path / name, 4, tile_width=50)
        videos.append((tmp_path / name).read_bytes())
    assert videos[0] == videos[1]


class Masked(Lamp):
    """Allows action 2 at first, then action 1."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], {"action_mask": np.array([0, 0, 1], np.int8)}

    def step(self, action):
        self.calls.append(int(action))
        return *super().step(action)[:4], {"action_mask": np.array([0, 1, 0], np.int8)}


def test_random_actions_follow_action_masks(tmp_path):
    with ParallelEnv([Masked], "NEXT_STEP", backend="serial") as env:
        record_video(env, tmp_path / "masked.gif", 4)
        assert env.get_attr("calls") == ([2, 1, 1, 1],)


class MaskedInInfos(Lamp):
    """Its infos allow one action, which changes with each step and episode; actions have two parts."""

    action_space = spaces.MultiDiscrete([4, 3])
    episode = 0

    def mask(self) -> dict:
        self.allowed = (self.episode + self.steps) % 4
        return {"action_mask": (np.eye(4, dtype=np.int8)[self.allowed], np.array([0, 0, 1], np.int8))}

    def reset(self, **keywords: Any) -> tuple:
        self.episode += 1
        observation, _ = super().reset(**keywords)
        return observation, self.mask()

    def step(self, action: Any) -> tuple:
        assert [*action] == [self.allowed, 2]
        return *super().step(0)[:4], self.mask()


@pytest.mark.parametrize("mode", [True, "NEXT_STEP", False])
def test_masks_in_infos_belong_to_the_running_episode(mode, tmp_path):
    with ParallelEnv([MaskedInInfos] * 2, mode, backend="serial") as env:
        record_video(env, tmp_path / "masked.gif", 12)
        assert env.stats().resets > 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "lamp.avi"}, r"\.gif or \.mp4, got 'lamp\.avi'"),
        ({"path": "nowhere/lamp.gif"}, "the folder '.*nowhere' does not exist"),
        ({"steps": 0}, "steps"),
        ({"tile_width": 0}, "tile_width"),
        ({"fps": -1.0}, "fps must be a positive number"),
        ({"fps": 51}, r"fps must be at most 50 in a \.gif"),
    ],
)
def test_wrong_arguments_write_nothing(arguments, message, tmp_path):
    with lamps() as env:
        path = tmp_path / arguments.pop("path", "lamp.gif")
        with pytest.raises(ValueError, match=message):
            record_video(env, path, **{"steps": 2, **arguments})
        assert env.stats().resets == 0
    assert not [*tmp_path.iterdir()]


def test_wrong_types_of_env_and_policy(tmp_path):
    with pytest.raises(TypeError, match=r"env must be a ParallelEnv, got Lamp: make one .* without facade="):
        record_video(Lamp(), tmp_path / "lamp.gif", 2)
    with (
        lamps() as env,
        pytest.raises(TypeError, match=r"policy must take observations and return actions, .* got 3"),
    ):
        record_video(env, tmp_path / "lamp.gif", 2, policy=3)


def test_environment_without_frames_is_refused(tmp_path):
    with lamps(render_mode=None) as env, pytest.raises(ValueError, match='construct them with render_mode="rgb_array"'):
        record_video(env, tmp_path / "lamp.gif", 2)
    with (
        lamps(dtype=np.float32) as env,
        pytest.raises(ValueError, match=r"environment 0: .* uint8, got .*float32"),
    ):
        record_video(env, tmp_path / "lamp.gif", 2)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_fault_keeps_the_existing_file(suffix, tmp_path):
    path = tmp_path / f"lamp{suffix}"
    path.write_bytes(b"the last one")
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    with lamps(breaks=True) as env, pytest.raises(EnvError, match="the bulb is gone") as held:
        record_video(env, path, 5)
    assert held.tb is not None  # nothing is freed by chance
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"the last one"]
    assert gone({child.pid for child in psutil.Process().children(recursive=True)} - others)


class Resized(Lamp):
    """Its frames become smaller for a while, and larger at the end than at first."""

    def render(self):
        return super().render()[:: 1 + self.steps % 2].repeat(1 + self.steps // 4, axis=0)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_frames_of_different_sizes(suffix, tmp_path):
    path = tmp_path / f"lamp{suffix}"
    with ParallelEnv([Resized, Lamp], "NEXT_STEP", num_workers=1) as env:
        record_video(env, path, 3, labels=False)
        one, two = (iio.imread(path, index=index)[:, 3 : WIDTH - 3].mean(axis=(1, 2)) for index in (1, 2))
        inside = 1 if suffix == ".gif" else 4  # the codec of mp4 blurs the border
        assert one[inside:18] == pytest.approx(50, abs=3)
        assert one[24:] == pytest.approx(0, abs=3)
        assert two[inside:38] == pytest.approx(100, abs=3)
        with pytest.raises(ValueError, match=r"environment 0: .* in 61 x 40 pixels, got one of 61 x 80"):
            record_video(env, path, 4, labels=False)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_frame_rate_of_a_gif(tmp_path):
    """Although a GIF stores durations in hundredths of a second."""
    with lamps() as env:
        record_video(env, tmp_path / "lamp.gif", 29, fps=30)
    with Image.open(tmp_path / "lamp.gif") as video:
        lengths = [video.seek(index) or video.info["duration"] for index in range(video.n_frames)]
    assert sum(lengths) == 1000


@has_owners
@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_links_of_other_users_are_not_followed(suffix, tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / f"run{suffix}"
    victim.write_text("mine")
    for name in (path.name, f".{path.name}", f".run-{os.getpid()}{suffix}"):
        (tmp_path / name).symlink_to(victim)
        give_away(tmp_path / name, monkeypatch)
    with lamps() as env:
        record_video(env, path, 2)
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    assert path.stat().st_size > 100


def test_path_is_a_folder(tmp_path):
    (tmp_path / "lamp.gif").mkdir()
    with lamps() as env:
        with pytest.raises(ValueError, match="is a folder"):
            record_video(env, tmp_path / "lamp.gif", 2)
        assert env.stats().resets == 0


def test_agent_without_a_space_is_named(tmp_path):
    with ParallelEnv([Spaceless], backend="serial") as env, pytest.raises(ValueError, match=r"agent 'b' declares no"):
        record_video(env, tmp_path / "lamp.gif", 2)


class Spaceless(Lamp):
    """Two agents, one of them without an action space."""

    possible_agents: ClassVar[list[str]] = ["a", "b"]
    observation_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    action_space = spaces.Dict(a=spaces.Discrete(2))


@pytest.mark.parametrize("library", ["imageio", "PIL"])
def test_missing_library(library):
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "import marl_parallel\n"
        "env = marl_parallel.make('mpe2.simple_spread_v3', 1, env_kwargs={'render_mode': 'rgb_array'})\n"
        "marl_parallel.record_video(env, 'never.gif', 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert 'pip install "marl-parallel[video]", or in a checkout: pip install -e ".[video]"' in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError: videos need ")
