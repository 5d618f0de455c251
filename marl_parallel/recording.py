"""`record_video`: step a `ParallelEnv` and write one video of all environments in a grid."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.arguments import checked_integer
from marl_parallel.core.block.block_transitions import DictPerEnv
from marl_parallel.core.block.joining import padded_array
from marl_parallel.parallel_env import ParallelEnv, tiled
from marl_parallel.types import how_to_install

Policy: TypeAlias = Callable[[DictPerEnv], Sequence[Mapping[AgentID, Any]]]
"""Takes the observations of all environments, a tuple of dicts by agent, and returns what `step` takes."""

_PALETTE_FRAMES = 16
"""The number of frames from which a `.gif` takes its colours."""
_MOST_FPS = {".gif": 50.0, ".mp4": float("inf")}
"""By suffix. Viewers show a GIF's frames of less than 0.02 s for 0.1 s."""
_DEFAULT_FPS = 30.0
_LABEL_SHARE = 14  # a frame is that many times as high as its label
_LABEL_LEAST = 12  # pixels


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

    Above each frame are the environment's number and its return so far: the sum of all agents' rewards in the episode.
    If there are several environments, each frame has a grey border, in place of its outermost pixels.
    With `auto_reset=True` the frame after an episode's last step is the next episode's first; with `"NEXT_STEP"` the
    last frame is shown too. Environments that do not reset themselves are reset here.

    Args:
        env: Simulators whose `render_mode` is `"rgb_array"`. It stays open, in the middle of its episodes.
        path: A `.gif` or `.mp4`. An existing file is replaced once the new one is complete.
        steps: The number of steps; the video has one frame more, the first after `reset`.
        policy: Returns the actions; None draws them at random, by action masks if there are any.
        fps: Frames per second; None for `render_fps` of the simulators' metadata, else 30. A GIF has at most 50, and
            its frames stay in memory until the end.
        tile_width: Width of each frame in pixels; None leaves frames as they are. Later frames must not be larger than
            the first ones.
        labels: False leaves out the text above the frames.

    Returns:
        The path of the file.

    Raises:
        ImportError: imageio or Pillow are missing; the extra `video` installs them.
        TypeError: `env` is not a `ParallelEnv`, or `policy` cannot be called.
        ValueError: A wrong suffix, folder or number, environments that do not render arrays, agents without action
            spaces and no policy, or frames that grow. Only frames that grow are found after the first reset. No file is
            written.

    Example:
        >>> import tempfile
        >>> from marl_parallel import make
        >>> kwargs = {"render_mode": "rgb_array"}
        >>> with tempfile.TemporaryDirectory() as folder, make("mpe2.simple_spread_v3", 4, env_kwargs=kwargs) as env:
        ...     record_video(env, f"{folder}/random.gif", steps=5, tile_width=100).name
        'random.gif'
    """
    if not isinstance(env, ParallelEnv):
        raise TypeError(
            f"env must be a ParallelEnv, got {type(env).__name__}: make one for the video, without facade=; its policy "
            "takes observations as dicts"
        )
    if policy is not None and not callable(policy):
        raise TypeError(f"policy must take observations and return actions, or be None; got {policy!r}")
    checked_integer(steps, "steps")
    if tile_width is not None:
        checked_integer(tile_width, "tile_width")
    path, fps = checked_video(env, path, fps)
    if policy is None:
        try:
            env.sample_actions()  # raises before the reset if there are no action spaces
        except ValueError as error:
            raise ValueError(f"{error}: pass a policy") from None

        def policy(_: DictPerEnv) -> list[dict[AgentID, Any]]:
            return env.sample_actions()

    bordered = env.num_envs > 1
    with _writer(path, fps) as write:
        for frames, returns in _run(env, steps, policy):
            write({i: _picture(frame, i, returns[i], tile_width, labels, bordered) for i, frame in enumerate(frames)})
    return path


def checked_video(env: ParallelEnv, path: str | os.PathLike[str], fps: float | None = None) -> tuple[Path, float]:
    """The path of a video and its frames per second; errors are as in `record_video`, before anything is stepped."""
    path = Path(path)
    if path.suffix.lower() not in _MOST_FPS:
        raise ValueError(f"path must end in {' or '.join(_MOST_FPS)}, got {path.name!r}")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: pass the path of a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path.name!r}: the folder {str(path.parent)!r} does not exist")
    most = _MOST_FPS[path.suffix.lower()]
    if fps is None:
        fps = min(float(env.metadata.get("render_fps") or _DEFAULT_FPS), most)
    if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps < float("inf"):
        raise ValueError(f"fps must be a positive number of frames per second, got {fps!r}")
    if fps > most:
        raise ValueError(f"fps must be at most {most:g} in a {path.suffix}, since viewers show no more; got {fps!r}")
    if env.render_mode != "rgb_array":
        raise ValueError(
            f"a video needs simulators that render arrays; their render_mode is {env.render_mode!r}: "
            'construct them with render_mode="rgb_array"'
        )
    _libraries()
    return path, float(fps)


class _Discarded(Exception):
    """The video is not to be written."""


class EpisodeVideo:
    """The frames of one environment's episode, without labels, as a video.

    Args:
        env: The environments.
        path, fps: As from `checked_video`.
    """

    def __init__(self, env: ParallelEnv, path: Path, fps: float) -> None:
        self._env, self._path, self._fps, self._open = env, path, fps, contextlib.ExitStack()

    def begin(self, env_id: int) -> None:
        """Drop all frames, and write the first frame of an episode."""
        self.discard()
        self._write = self._open.enter_context(_writer(self._path, self._fps))
        self.add(env_id)

    def add(self, env_id: int) -> None:
        """Write the present frame of an environment."""
        (frame,) = self._env.render(env_ids=[env_id])
        self._write({env_id: _picture(frame, env_id, 0.0, None, labels=False, bordered=False)})

    def finish(self) -> None:
        """Complete the file."""
        self._open.close()

    def discard(self) -> None:
        """Drop all frames since `begin`; an earlier file stays. Does nothing after `finish`."""
        with contextlib.suppress(_Discarded), self._open.pop_all():
            raise _Discarded


def _run(env: ParallelEnv, steps: int, policy: Policy) -> Iterator[tuple[tuple[Any, ...], list[float]]]:
    """The frames and the returns so far, after the first reset and after each step."""
    mode = env.metadata["autoreset_mode"]
    observations, _ = env.reset()
    returns, over = [0.0] * env.num_envs, [False] * env.num_envs
    yield env.render(), returns
    for _ in range(steps):
        if any(over) and mode is AutoresetMode.DISABLED:
            due = [env_id for env_id, is_over in enumerate(over) if is_over]
            first = dict(zip(due, env.reset(env_ids=due)[0]))
            observations = tuple(first.get(env_id, last) for env_id, last in enumerate(observations))
        observations, rewards, terminateds, truncateds, _ = env.step([*policy(observations)])
        for env_id, one in enumerate(rewards):
            returns[env_id] = (0.0 if over[env_id] else returns[env_id]) + float(sum(map(np.sum, one.values())))
        over = [a["__all__"] or b["__all__"] for a, b in zip(terminateds, truncateds)]
        if mode is AutoresetMode.SAME_STEP:  # the frame is the new episode's
            returns = [0.0 if is_over else value for is_over, value in zip(over, returns)]
        yield env.render(), returns


def _picture(
    frame: Any, env_id: int, value: float, width: int | None, labels: bool, bordered: bool
) -> NDArray[np.uint8]:
    """A frame, scaled to a width, with a border, and labelled with a return."""
    array = np.asarray(frame)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise ValueError(
            f"environment {env_id}: expected a frame of shape (height, width, 3) and dtype uint8, got "
            f"{'None' if frame is None else f'shape {array.shape} and dtype {array.dtype}'}"
        )
    _, images, draw, fonts = _libraries()
    image = images.fromarray(array)
    if width is not None:
        height = max(round(image.height * width / image.width), 1)
        image = image.resize((width, height), images.Resampling.LANCZOS)
    if bordered:
        draw.Draw(image).rectangle((0, 0, image.width - 1, image.height - 1), outline="gray")
    if labels:
        strip = max(image.height // _LABEL_SHARE, _LABEL_LEAST)
        labelled = images.new("RGB", (image.width, image.height + strip), "black")
        labelled.paste(image, (0, strip))
        text, font = f"env {env_id}   return {value:.1f}", fonts.load_default(strip * 0.75)
        draw.Draw(labelled).text((strip // 3, strip // 2), text, fill="white", font=font, anchor="lm")
        image = labelled
    return np.asarray(image)


def _indexed(frames: list[Any]) -> list[Any]:
    """Frames with one palette, without dithering: a pixel that stays the same takes no room in a file."""
    _, images, *_ = _libraries()
    some = np.concatenate([np.asarray(frame) for frame in frames[:: -(-len(frames) // _PALETTE_FRAMES)]])
    palette = images.fromarray(some).quantize(255, dither=images.Dither.NONE)
    return [frame.quantize(palette=palette, dither=images.Dither.NONE) for frame in frames]


@contextlib.contextmanager
def _writer(path: Path, fps: float) -> Iterator[Callable[[Mapping[int, NDArray[np.uint8]]], None]]:
    """A function that writes pictures by environment as a frame, in tiles that hold the first ones.

    The file exists after the last frame, and not if anything raises.
    """
    imageio, images, *_ = _libraries()
    size: list[int] = []  # height and width of each environment's part of the first frame

    def tiles(pictures: Mapping[int, NDArray[np.uint8]]) -> NDArray[np.uint8]:
        if not size:
            size.extend(max(picture.shape[axis] for picture in pictures.values()) for axis in (0, 1))
        height, width = size
        for env_id, picture in pictures.items():
            if picture.shape[0] > height or picture.shape[1] > width:
                raise ValueError(
                    f"environment {env_id}: expected frames no larger than the first ones, which are shown in "
                    f"{width} x {height} pixels, got one of {picture.shape[1]} x {picture.shape[0]}"
                )
        frame = tiled([padded_array(picture, (height, width, 3)) for picture in pictures.values()])
        even = [length + length % 2 for length in frame.shape[:2]]  # the codec of mp4 wants even numbers
        padded: NDArray[np.uint8] = padded_array(frame, (*even, 3))
        return padded

    # ffmpeg opens the file by its name, so the file is in a folder where no other user can put a link.
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        part = Path(folder, path.name)
        if path.suffix.lower() == ".gif":
            frames: list[NDArray[np.uint8]] = []
            yield lambda pictures: frames.append(tiles(pictures))
            # A frame's time is whole hundredths of a second; some last one more, so that the speed is right.
            ends = [round(100 * count / fps) for count in range(len(frames) + 1)]
            lengths = [10 * (end - begin) for begin, end in pairwise(ends)]
            first, *others = _indexed([*map(images.fromarray, frames)])
            first.save(part, save_all=True, append_images=others, duration=lengths, loop=0)
        else:
            writer = imageio.get_writer(part, fps=fps, macro_block_size=2)
            with contextlib.closing(writer):  # imageio's own `with` leaves it open after an error
                yield lambda pictures: writer.append_data(tiles(pictures))
        part.replace(path)


def _libraries() -> tuple[Any, ...]:
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError(f"videos need imageio and Pillow: {how_to_install('video')} ({error})") from error
    return imageio.v2, Image, ImageDraw, ImageFont
