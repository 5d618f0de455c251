"""`Engine` and `BatchView`: what `BatchRunner` stands on.

There are two of each. `Pool` and `Batch` have workers step one environment after the other, through a block of shared
memory. `NativeCrew` and `NativeBatch` have one simulator step all environments at once, through its own arrays. Written
actions and the extras of results go from one half to the other; nobody else looks into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.arrays import ArrayView
from marl_parallel.core.ledger import Tracer
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.pool import Results
from marl_parallel.core.records import Columns
from marl_parallel.core.recovery import Recovery
from marl_parallel.types import EnvError, Stats


class Engine(Protocol):
    """Carries out requests to environments.

    Attributes:
        shares: The environments of each worker.
        closed: Whether everything has been freed, or is just being freed.
        tracer: Of the trace that is being kept, if one is.
        in_flight: How many environments have been sent to and not received.
        recovery: Set where faults are survived; None where they are raised.
        seeds_stale: Whether environments may use other seeds than when they were asked last.
        batch_size: How many results come together at the least.
        partial: Whether some environments can be stepped or reset without the others.
        seeded_at_start: Whether `reset` can take no seed.
    """

    closed: bool
    tracer: Tracer | None
    seeds_stale: bool

    @property
    def shares(self) -> Sequence[range]: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def pending(self) -> tuple[int, ...]: ...

    @property
    def recovery(self) -> Recovery | None: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def seeded_at_start(self) -> bool: ...

    @property
    def partial(self) -> bool: ...

    def step_all(self) -> Any:
        """Step every environment with the actions in the block, and wait; returns the extras of the results."""

    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Any:
        """Send a step or a reset, and wait; returns the extras of the results."""

    def execute(self, requests: Mapping[int, Request]) -> Any:
        """Carry out requests that are neither steps nor resets."""

    def execute_in(self, message: Message, env_ids: Sequence[int], payload: Any = None) -> Any:
        """Carry out one such request in some environments."""

    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        """Send a step or a reset to environments, and return."""

    def recv(self, at_least: int, timeout: float | None = None) -> Results:
        """Wait for results, and take all that are here."""

    def acts_next(self, env_id: int) -> bool:
        """Whether the next action of an environment counts."""

    def stats(self) -> Stats:
        """What has been done so far."""

    def ahead(self, worker: int) -> float:
        """Seconds that this clock is ahead of a worker's."""

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` where everything has been closed."""

    def close(self, *, ask: bool = True, timeout: float = 5.0) -> EnvError | None:
        """Close everything, once; returns the error of an environment that failed to close."""

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""


class BatchView(Protocol):
    """Actions in, transitions out, and where each environment stands.

    Attributes:
        mode: When episodes begin anew.
        mode_is_fixed: Whether the simulator knows no other mode.
        copies: Whether observations are handed out as arrays of the caller's own.
        env_ids: All environments.
        begun: For each environment, whether it has been reset at least once.
        acting: For each environment, the agents that act next; lists that nobody may change.
        alive: Likewise, the agents seen in this episode and neither terminated nor truncated yet.
        over: For each environment, whether its episode has ended and no reset has followed.
    """

    @property
    def mode(self) -> AutoresetMode: ...

    @property
    def mode_is_fixed(self) -> bool: ...

    @property
    def copies(self) -> bool: ...

    @property
    def env_ids(self) -> tuple[int, ...]: ...

    @property
    def begun(self) -> list[bool]: ...

    @property
    def acting(self) -> list[list[AgentID]]: ...

    @property
    def alive(self) -> list[list[AgentID]]: ...

    @property
    def over(self) -> list[bool]: ...

    @property
    def write_actions(self) -> Callable[[Sequence[int], Sequence[Mapping[Any, Any]]], Any]:
        """Writes one dict of actions for each environment; returns what the engine needs to carry them out."""

    @property
    def read(self) -> Callable[[Sequence[int], Any], Columns]:
        """Reads the transitions of some environments, given the extras of their results: five tuples of dicts."""

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        """By agent, the action masks of those who act next in one environment that is not in flight; new arrays."""

    def arrays(self, *, copy: bool) -> ArrayView:
        """Writes and reads the same as arrays; `copy` says whether observations are arrays of the caller's own."""

    def begin(self, env_ids: Iterable[int]) -> None:
        """Note that these environments have been reset."""

    def states(self, env_ids: Sequence[int], outside: Mapping[int, Any]) -> NDArray[Any]:
        """Global states, stacked."""
