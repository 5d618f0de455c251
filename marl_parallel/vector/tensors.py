"""The arrays of a `StackedVecEnv` or a `Rollout` as torch tensors, and their transfer to another device."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from marl_parallel.core.block import stacking
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.spaces import tree_map
from marl_parallel.stepper import Options, Seeds

if TYPE_CHECKING:
    from marl_parallel.vector.stacked import Grouped, Infos, StackedVecEnv, StepReturn

__doctest_requires__ = ["torch"]

_TENSORS = frozenset({
    "acting", "action_masks", "begins", "done", "final_observations", "final_state", "observation_padding", "present",
    "present_final", "present_next", "state", "terminated", "truncated",
})  # fmt: skip


class StackedTensors:
    """A `StackedVecEnv` with torch tensors in place of arrays; made by `StackedVecEnv.torch`.

    All other attributes are the `StackedVecEnv`'s. On the CPU, tensors share the memory of its arrays, except
    masks that must not be changed.

    Args:
        env: The `StackedVecEnv`.
        device: The device of the tensors.
        pin: Whether observations are read into page-locked memory, from which CUDA copies while the CPU goes on. They
            are valid until the next reset or step.

    Attributes:
        env: The `StackedVecEnv`.

    Example:
        >>> from marl_parallel import make
        >>> env = make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, facade="stacked").torch()
        >>> observations, infos = env.reset(seed=1)
        >>> observations, rewards, *_ = env.step(torch.zeros(4, 3, dtype=torch.int64))
        >>> observations.shape, rewards.dtype, env.done
        (torch.Size([4, 3, 18]), torch.float64, tensor([False, False, False, False]))
        >>> env.close()
    """

    def __init__(self, env: StackedVecEnv, device: torch.device | str = "cpu", *, pin: bool = False) -> None:
        self.env, self._device = env, torch.device(device)
        self._pinned: list[Any] | None = None
        self._copied: Any = None  # an event after all copies from page-locked memory so far
        if pin and has_cuda():
            groups = env.stepper.view.groups
            self._pinned = [stacking.zeros(space, (env.num_envs, len(columns))) for space, columns in groups]
            tree_map(page_lock, self._pinned)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]

    def reset(
        self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None
    ) -> tuple[Grouped, Infos]:
        """Begin new episodes; returns tensors and infos. Arguments and errors are as in `StackedVecEnv.reset`."""
        with self._into_pinned():
            observations, infos = self.env.reset(seed, options, env_ids)
        return self._sent(observations), infos

    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> tuple[Grouped, Infos]:
        """Go on from what `save_state` has returned; returns what `reset` returns. Errors are as in `StackedVecEnv`."""
        with self._into_pinned():
            observations, infos = self.env.load_state(states, env_ids)
        return self._sent(observations), infos

    def step(self, actions: Grouped) -> StepReturn:
        """Step all environments; returns tensors and infos. Actions are tensors of any device, or arrays."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Grouped) -> None:
        """Begin to step all environments and return; `step_wait` returns the results. Actions are as in `step`."""
        self.env.step_async(tree_map(lambda part: part.cpu().numpy() if torch.is_tensor(part) else part, actions))

    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """The results of `step_async` as tensors; waits `timeout` seconds at most, with None as long as it takes."""
        with self._into_pinned():
            observations, rewards, terminations, truncations, infos = self.env.step_wait(timeout)
        rest = tuple(self.tensors(part) for part in (rewards, terminations, truncations))
        return (self._sent(observations), *rest, infos)

    def tensors(self, arrays: Any) -> Any:
        """Arrays, or trees of them, as tensors on the device; None stays None."""
        return tree_map(lambda array: tensor(array).to(self._device, non_blocking=True), arrays)

    @contextlib.contextmanager
    def _into_pinned(self) -> Iterator[None]:
        """Read observations into page-locked memory in this context, once earlier copies from it have ended."""
        if self._pinned is None:
            yield
            return
        self._copied.synchronize()
        view = self.env.stepper.view
        view.write_to(self._pinned)
        try:
            yield
        finally:  # also after a timeout: what `env` itself reads next has memory of its own
            view.write_to(None)

    def _sent(self, observations: Grouped) -> Grouped:
        sent = self.tensors(observations)
        if self._pinned is not None:
            self._copied.record()
        return sent

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.env, name)
        return self.tensors(value) if name in _TENSORS else value

    def __enter__(self) -> StackedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.env.close()


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor that shares its memory; a copy if the array must not be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@functools.cache
def has_cuda() -> bool:
    """Whether memory can be page-locked for CUDA; if not, the log says so, once."""
    available = bool(torch.cuda.is_available())
    if not available:
        logger.warning("pin=True has no effect: torch finds no CUDA device")
    return available


def page_lock(array: NDArray[Any]) -> None:
    """Register the memory of a contiguous array with CUDA, until the array is freed; `RuntimeError` if that fails."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call,unused-ignore]
    code = int(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    if code:
        raise RuntimeError(f"CUDA cannot page-lock {array.nbytes} bytes: error {code} of cudaHostRegister")
    weakref.finalize(array, cudart.cudaHostUnregister, array.ctypes.data)
