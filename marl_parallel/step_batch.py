"""`StepBatch`: what `ParallelEnv.recv` returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepBatch(NamedTuple):
    """Results of some environments, in the order in which they were completed.

    Steps and resets may be in the same batch: a reset's rewards are 0.0 and its flags False, with the same agents.

    Attributes:
        env_ids: Whose they are; the others have one dict for each of these.
        observations: By agent.
        rewards: By agent.
        terminateds: By agent and for `"__all__"`.
        truncateds: By agent and for `"__all__"`.
        infos: By agent.
    """

    env_ids: tuple[int, ...]
    observations: tuple[dict[Any, Any], ...]
    rewards: tuple[dict[Any, Any], ...]
    terminateds: tuple[dict[Any, Any], ...]
    truncateds: tuple[dict[Any, Any], ...]
    infos: tuple[dict[Any, Any], ...]
