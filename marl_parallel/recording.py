"""`record_video`: step a `ParallelEnv` and write one video of all environments side by side.

imageio and Pillow are imported only here, when they are needed.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import for_sample
from marl_parallel.adapters import AgentID
from marl_parallel.arguments import at_least_one
from marl_parallel.core.batch import Dicts
from marl_parallel.parallel_env import ParallelEnv, tiled

Policy: TypeAlias = Callable[[Dicts], Sequence[Mapping[AgentID, Any]]]
"""Takes the observations of all environments, a tuple of dicts by agent, and returns what `step` takes."""

_MOST_FPS = {".gif": 50.0, ".mp4": float("inf")}
"""By suffix; viewers show a GIF's frames of less than two hundredths of a second for ten."""
_DEFAULT_FPS = 30.0
_LABEL_SHARE = 14  # a frame is that many times as high as its label
_LABEL_LEAST = 12


def record_video(
    env: ParallelEnv,
    path: str | os.PathLike[str],
    steps: int,
    policy: Policy | None = None,
    *,
    fps: float | None = None,
    tile_width: int | None = None,
    labels: bool = True,
) -> Path:
    """Reset all environments, step them, and write their frames as one video: a grid of all environments.

    Above each frame stands the environment's number and its return so far: the sum of all agents' rewards in the
    episode. With `auto_reset=True` the frame after an episode's last step is the next episode's first; with
    `"NEXT_STEP"` the last frame is shown too. Environments that are over and do not reset themselves are reset here.

    Args:
        env: Made of simulators whose `render_mode` is `"rgb_array"`. It stays open, in the middle of its episodes.
        path: A `.gif` or `.mp4`. An existing file is replaced once the new one is complete.
        steps: The number of steps; there is one frame more, the first after `reset`.
        policy: Returns the actions; None draws them at random, by action masks if there are any.
        fps: Frames per second; None takes `render_fps` of the simulators' metadata, else 30. A GIF has at most 50, and
            its frames are kept in memory until the end.
        tile_width: Pixels; frames are scaled to it. None leaves them as they are. Later frames must not be larger than
            the first ones.
        labels: False leaves out the text above the frames.

    Returns:
        The path of the file.

    Raises:
        ImportError: imageio or Pillow are missing: they come with the extra `video`.
        TypeError: `env` is no `ParallelEnv`, or `policy` cannot be called. Nothing has been reset or written.
        ValueError: A wrong suffix, folder or number, environments that do not render arrays, or agents without action
            spaces and no policy: nothing has been reset or written. Or frames that grow: nothing has been written.

    Example:
        >>> import tempfile
        >>> from marl_parallel import make
        >>> kwargs = {"render_mode": "rgb_array"}
        >>> with tempfile.TemporaryDirectory() as folder, make("mpe2.simple_spread_v3", 4, env_kwargs=kwargs) as env:
        ...     record_video(env, f"{folder}/random.gif", steps=5, tile_width=100).name
        'random.gif'
    """
    if not isinstance(env, ParallelEnv):
        raise TypeError(f"a video is recorded of a ParallelEnv, got {type(env).__name__}")
    if policy is not None and not callable(policy):
        raise TypeError(f"policy must take observations and give actions, or be None; got {policy!r}")
    path = _checked_path(path)
    at_least_one(steps, "steps")
    if tile_width is not None:
        at_least_one(tile_width, "tile_width")
    most = _MOST_FPS[path.suffix.lower()]
    if fps is None:
        fps = min(float(env.metadata.get("render_fps") or _DEFAULT_FPS), most)
    if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps < float("inf"):
        raise ValueError(f"fps must be a positive number of frames per second, got {fps!r}")
    if fps > most:
        raise ValueError(f"fps must be {most:g} at most in a {path.suffix}, whose frames last longer, got {fps!r}")
    if env.render_mode != "rgb_array":
        raise ValueError(
            f"a video wants simulators that render arrays; their render_mode is {env.render_mode!r}: "
            'construct them with render_mode="rgb_array"'
        )
    act = _RandomActions(env) if policy is None else policy
    picture, size = _Picture(tile_width, labels), None
    with _writer(path, float(fps)) as write:
        for frames, returns in _run(env, steps, act):
            pictures = [picture.of(frame, env_id, returns[env_id]) for env_id, frame in enumerate(frames)]
            size = size or tuple(max(one.shape[axis] for one in pictures) for axis in (0, 1))
            write(tiled([_padded(one, size, env_id) for env_id, one in enumerate(pictures)]))
    return path


def _checked_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix.lower() not in _MOST_FPS:
        raise ValueError(f"a video is written as {' or '.join(_MOST_FPS)}, got {path.name!r}")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, no place for a video: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"no folder {str(path.parent)!r} to write {path.name!r} into")
    return path


def _run(env: ParallelEnv, steps: int, policy: Policy) -> Iterator[tuple[tuple[Any, ...], list[float]]]:
    """The frames and the returns so far, after the first reset and after each step."""
    mode = env.metadata["autoreset_mode"]
    observations, _ = env.reset()
    returns, over = [0.0] * env.num_envs, [False] * env.num_envs
    yield env.render(), returns
    for _ in range(steps):
        due = [env_id for env_id, is_over in enumerate(over) if is_over]
        if due and mode is AutoresetMode.DISABLED:
            fresh = dict(zip(due, env.reset(env_ids=due)[0]))
            observations = tuple(fresh.get(env_id, old) for env_id, old in enumerate(observations))
        observations, rewards, terminateds, truncateds, _ = env.step([*policy(observations)])
        for env_id, one in enumerate(rewards):
            returns[env_id] = (0.0 if over[env_id] else returns[env_id]) + float(sum(map(np.sum, one.values())))
        over = [a["__all__"] or b["__all__"] for a, b in zip(terminateds, truncateds)]
        if mode is AutoresetMode.SAME_STEP:  # the frame is the new episode's
            returns = [0.0 if is_over else value for is_over, value in zip(over, returns)]
        yield env.render(), returns


class _RandomActions:
    """Draws from copies of the action spaces, which leaves the generators of the environment's own alone."""

    def __init__(self, env: ParallelEnv) -> None:
        declared: Any = env.action_space  # agents need not be strings, as a Dict's keys are declared
        if declared is None:
            raise ValueError("these simulators declare no action spaces to draw random actions from: pass a policy")
        for agent in env.possible_agents:
            try:
                declared[agent]
            except KeyError:
                raise ValueError(
                    f"agent {agent!r} declares no action space to draw random actions from: pass a policy"
                ) from None
        self._env, self._spaces = env, copy.deepcopy(declared)
        self._spaces.seed(0)

    def __call__(self, _: Dicts) -> list[dict[AgentID, Any]]:
        of = self._spaces
        return [
            {agent: of[agent].sample(for_sample(of[agent], masks.get(agent))) for agent in acting}
            for acting, masks in zip(self._env.acting, self._env.action_masks)
        ]


class _Picture:
    """Makes pictures of frames: scaled and labelled."""

    def __init__(self, width: int | None, labels: bool) -> None:
        self._width, self._labels = width, labels
        _, self._image, self._draw, self._font = _libraries()

    def of(self, frame: Any, env_id: int, value: float) -> NDArray[np.uint8]:
        array = np.asarray(frame)
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
            raise ValueError(
                f"environment {env_id}: expected a frame of shape (height, width, 3) and dtype uint8, got "
                f"{'None' if frame is None else f'shape {array.shape} and dtype {array.dtype}'}"
            )
        image = self._image.fromarray(array)
        if self._width is not None:
            height = max(round(image.height * self._width / image.width), 1)
            image = image.resize((self._width, height), self._image.Resampling.LANCZOS)
        if not self._labels:
            return np.asarray(image)
        strip = max(image.height // _LABEL_SHARE, _LABEL_LEAST)
        whole = self._image.new("RGB", (image.width, image.height + strip), "black")
        whole.paste(image, (0, strip))
        text = f"env {env_id}   return {value:.1f}"
        font = self._font.load_default(strip * 0.75)
        self._draw.Draw(whole).text((strip // 3, strip // 2), text, fill="white", font=font, anchor="lm")
        return np.asarray(whole)


def _padded(picture: NDArray[np.uint8], size: tuple[int, ...], env_id: int) -> NDArray[np.uint8]:
    """Pad with black to the right and below: all frames of a video have one size."""
    (height, width), (shown_height, shown_width) = size, picture.shape[:2]
    if shown_height > height or shown_width > width:
        raise ValueError(
            f"environment {env_id}: expected frames no larger than the first ones, which are shown in "
            f"{width} x {height} pixels, got one of {shown_width} x {shown_height}"
        )
    return np.pad(picture, ((0, height - shown_height), (0, width - shown_width), (0, 0)))


@contextlib.contextmanager
def _writer(path: Path, fps: float) -> Iterator[Callable[[NDArray[np.uint8]], None]]:
    """A function that takes frames; the file is there after the last one, or not at all."""
    imageio, image, *_ = _libraries()
    part = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        if path.suffix.lower() == ".gif":
            frames: list[NDArray[np.uint8]] = []
            yield lambda frame: frames.append(_even(frame))
            # Frames last whole hundredths of a second, some one more than others, so that the speed is right.
            ends = [round(100 * count / fps) for count in range(len(frames) + 1)]
            lengths = [10 * (end - begin) for begin, end in pairwise(ends)]
            first, *others = map(image.fromarray, frames)
            first.save(part, save_all=True, append_images=others, duration=lengths, loop=0)
        else:
            writer = imageio.get_writer(part, fps=fps, macro_block_size=2)
            with contextlib.closing(writer):  # imageio's own `with` leaves it open after an error
                yield lambda frame: writer.append_data(_even(frame))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Add a row or column of black if their number is odd, which the codec of mp4 does not take."""
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)))


def _libraries() -> tuple[Any, ...]:
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError(f'videos need imageio and Pillow: pip install "marl-parallel[video]" ({error})') from error
    return imageio.v2, Image, ImageDraw, ImageFont
