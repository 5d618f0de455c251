"""`View`: how the actions and results of many environments look to a caller: dicts, or arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

ActionsT = TypeVar("ActionsT")
ResultT = TypeVar("ResultT")


class View(ABC, Generic[ActionsT, ResultT]):
    """Writes the actions and reads the results of a `Stepper`: `Transitions` as dicts, an `ArrayView` as arrays."""

    @abstractmethod
    def write(self, actions: ActionsT, env_ids: Sequence[int]) -> Any:
        """Write the actions of environments; returns the payload of the step.

        Raises `ValueError` or `TypeError` for wrong actions; nothing has been stepped.
        """

    def last(self) -> Any:
        """What `read` needs of the time before a step of some environments, to keep the results of the others."""
        return None

    @abstractmethod
    def read(self, env_ids: Sequence[int], leftovers: Any, last: Any = None, /) -> ResultT:
        """The results of environments, with their leftovers.

        By then, all of them have been stepped or reset, and their state is known, also if this raises.
        """


def check_one_for_each(actions: Any, ids: Sequence[int]) -> None:
    """Raise `ValueError` for actions that are not a sequence with one dict for each environment."""
    if isinstance(actions, Mapping):
        got = "one dict"
    elif not hasattr(actions, "__len__"):
        got = f"{type(actions).__name__}, which has no length"
    elif len(actions) == len(ids):
        return
    else:
        got = str(len(actions))
    raise ValueError(f"expected a sequence of {len(ids)} action dicts, one for each environment, got {got}")
