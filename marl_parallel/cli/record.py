"""`marl-parallel record`: record a video of environments that are named on the command line."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_parallel.cli.target import CommandError, constructor_of
from marl_parallel.core.block.block_transitions import DictPerEnv
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.recording import record_video
from marl_parallel.types import Seed

_MODE = "render_mode"


def record(
    environment: str,
    path: Path,
    num_envs: int,
    steps: int,
    policy: str,
    env_kwargs: str,
    seed: Seed,
    num_workers: int | None,
    on_turn: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> None:
    """Step environments with a policy, named in the same form, and write a video; `options` are `record_video`'s.

    `on_turn` gets a text before each of `num_turns(steps)` parts of the work.
    """
    act = constructor_of(policy) if policy else None
    on_turn("start")
    constructor = _rendering(constructor_of(environment, env_kwargs))
    path.parent.mkdir(parents=True, exist_ok=True)
    with ParallelEnv([constructor] * num_envs, "NEXT_STEP", seed, num_workers=num_workers) as env:
        if env.render_mode != "rgb_array":
            raise CommandError(
                f"{environment} does not render arrays: its render_mode is {env.render_mode!r}",
                'let its constructor take render_mode="rgb_array", and have the attribute `render_mode`',
            )
        if act is None:
            try:
                env.sample_actions()
            except ValueError as error:
                raise CommandError(str(error), "name a policy with --policy") from error
        done = itertools.count(1)

        def next_actions(observations: DictPerEnv) -> Sequence[Mapping[Any, Any]]:
            on_turn(f"step {next(done)} of {steps}")
            return env.sample_actions() if act is None else act(observations)

        record_video(env, path, steps, next_actions, **options)


def num_turns(steps: int) -> int:
    """How often `record` calls `on_turn`: once for the start, once for each step."""
    return 1 + steps


def _rendering(constructor: functools.partial[Any]) -> Callable[..., Any]:
    """The constructor with `render_mode="rgb_array"`, if it takes a render mode and none is set."""
    try:
        parameters = inspect.signature(constructor.func).parameters
    except (TypeError, ValueError):  # no readable signature
        return constructor
    takes = _MODE in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if not takes or _MODE in constructor.keywords:
        return constructor
    return functools.partial(constructor, render_mode="rgb_array")
