"""What facades forward to their `ParallelEnv`, and what they read from the simulators themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from marl_parallel.adapters import attributes
from marl_parallel.backends.local import SerialBackend
from marl_parallel.parallel_env import ParallelEnv


class OfParallelEnv:
    """Base of all facades: what they forward to their `ParallelEnv`.

    Results have one entry for each environment.
    """

    env: ParallelEnv

    @property
    def parallel_env(self) -> ParallelEnv:
        """The `ParallelEnv` that this facade steps."""
        return self.env

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r})"

    def render(self) -> Any:
        """A frame of each environment; None if `render_mode` is None."""
        return self.env.render()

    def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment; arguments and errors are as in `ParallelEnv.call`."""
        return self.env.call(name, *args, **kwargs)

    def call_async(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin to call a method of each environment and return; `call_wait` returns the results."""
        self.env.call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of `call_async`, one for each environment; errors are as in `ParallelEnv.call_wait`."""
        return self.env.call_wait(timeout)

    def call_each(self, name: str | Callable[..., Any], each: Sequence[Any], *, wait: bool = True) -> Any:
        """Call a method with other arguments in each environment; arguments are as in `ParallelEnv.call_each`."""
        return self.env.call_each(name, each, wait=wait)

    def get_attr(self, name: str) -> Any:
        """An attribute of each environment; a method is called. Errors are as in `ParallelEnv.get_attr`."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: to one value, or to a list or tuple of one for each. Errors: see `ParallelEnv.set_attr`."""
        self.env.set_attr(name, values)


def simulators(facade: OfParallelEnv) -> list[Any]:
    """The simulators, one for each environment; `AttributeError` if they run in other processes or threads."""
    stepper = facade.env.stepper
    stepper.batch.check_open()
    backend = None if stepper.workers is None else stepper.workers.pool.backend
    if not isinstance(backend, SerialBackend):
        raise AttributeError(
            f"envs is available only with backend='serial', but this {type(facade).__name__} has "
            f"{stepper.source.name}, whose simulators cannot be accessed: use get_attr, set_attr or call"
        )
    return [simulator for _, simulator in sorted(backend.simulators().items())]


def rendered(env: ParallelEnv, mode: str | None, env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
    """A frame of each environment; None from simulators that show it themselves, or have none.

    `mode` is for the `render(mode)` of simulators without a `render_mode`; None for its default. The others ignore it.
    """
    if env.render_mode is None:
        return env.call(functools.partial(_rendered, mode), env_ids=env_ids)
    frames: tuple[Any, ...] = env.render(env_ids=env_ids)
    return frames


def _rendered(mode: str | None, simulator: Any) -> Any:
    """What a simulator's own `render(mode)` returns, in a worker.

    If `render` takes no mode, its `render()`, or None if it has a `render_mode`, which says that nothing is rendered.
    """
    render = attributes.method(simulator, "render", through=True)
    if render is None:
        return None
    try:
        takes = inspect.signature(render).parameters
    except ValueError:  # compiled code may have no signature
        return None
    if "mode" not in takes and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return None if attributes.has(simulator, "render_mode") else render()
    frame = render() if mode is None else render(mode=mode)
    shown = takes["mode"].default if mode is None and "mode" in takes else mode
    return None if shown == "human" else frame
