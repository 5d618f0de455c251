"""`marl-parallel record`: videos with random actions and with those of a policy, and what it refuses."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from marl_parallel.cli.app import app

FILE = """
    import gymnasium
    import numpy as np


    class Lamp(gymnasium.Env):
        '''Its frames are as bright as the latest action.'''

        observation_space = gymnasium.spaces.Box(0, 1, (1,))
        action_space = gymnasium.spaces.Discrete(2)
        metadata = {"render_fps": 10}

        def __init__(self, size=20, render_mode=None):
            self.size, self.render_mode = size, render_mode

        def reset(self, *, seed=None, options=None):
            self.lit = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.lit = int(action)
            return np.zeros(1, np.float32), 1.0, False, False, {}

        def render(self):
            return np.full((self.size, self.size, 3), 255 * self.lit, np.uint8)


    def dark():
        return Lamp(render_mode=None)


    def always_bright():
        return Lamp(30, "rgb_array")


    def switch_on(observations):
        return [{"agent_0": 1} for _ in observations]
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Runs `marl-parallel record` in a folder with a user's file."""
    (tmp_path / "lamps.py").write_text(textwrap.dedent(FILE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield lambda *arguments: CliRunner().invoke(app, ["record", *arguments])
    sys.modules.pop("lamps", None)


TILE = 20


def brightness(path):
    """Of each frame: the largest value of a pixel in its lower half, where no label is, without the tiles' borders."""
    frames = []
    with Image.open(path) as video:
        for index in range(video.n_frames):
            video.seek(index)
            frame = np.asarray(video.convert("L"))
            inside = [column for column in range(frame.shape[1]) if 0 < column % TILE < TILE - 1]
            frames.append(int(frame[len(frame) // 2 : -1, inside].max()))
        return frames, video.size


def test_actions_of_a_policy(record, tmp_path):
    path = tmp_path / "new" / "lamps.gif"
    arguments = ("--policy", "lamps.py:switch_on", "--num-envs", "2", "--steps", "3", "--workers", "1", "--no-labels")
    result = record("lamps.py:Lamp", "--output", str(path), *arguments)
    assert result.exit_code == 0, result.output
    assert str(path) in result.stderr
    frames, size = brightness(path)
    assert frames[0] == 0
    assert frames[-1] == 255
    assert size == (40, 20)


def test_random_actions_repeat_with_the_seed(record, tmp_path):
    for name in ("a.gif", "b.gif"):
        result = record("lamps.py:Lamp", "--output", name, "--num-envs", "1", "--steps", "12", "--seed", "7")
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    assert {*brightness("a.gif")[0]} == {0, 255}


def test_own_seeds(record, tmp_path):
    (tmp_path / "own.py").write_text(
        "from lamps import Lamp\n"
        "class Own(Lamp):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        assert seed is None\n"
        "        return super().reset()\n"
    )
    common = ("own.py:Own", "--output", "a.gif", "--num-envs", "1", "--steps", "1")
    assert record(*common, "--seed", "own").exit_code == 0
    assert record(*common).exit_code == 1
    result = record(*common, "--seed", "mine")
    assert result.exit_code == 1
    assert "--seed must be an integer or own, got 'mine'" in result.output


def test_constructors_that_take_no_render_mode(record):
    result = record(
        "lamps.py:always_bright", "--output", "a.gif", "--num-envs", "1", "--steps", "1", "--tile-width", "60"
    )
    assert result.exit_code == 0, result.output
    assert brightness("a.gif")[1][0] == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lamps.py:dark", "--output", "a.gif"], ["does not render arrays", "render_mode"]),
        (["lamps.py:Lamp", "--output", "a.txt"], ["ValueError", ".gif or .mp4"]),
        (["lamps.py:Lamp", "--output", "."], ["directory"]),
        (["lamps.py:Lamp", "--output", "a.gif", "--policy", "lamps.py:act"], ["'act'", "switch_on"]),
    ],
    ids=["mode", "suffix", "folder", "policy"],
)
def test_errors_are_one_line_and_a_hint(record, arguments, words, tmp_path):
    result = record(*arguments, "--num-envs", "1", "--steps", "1")
    assert result.exit_code == 1
    error, hint = result.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert all(word in result.stderr for word in words)
    assert [*tmp_path.glob("*.gif")] == []
