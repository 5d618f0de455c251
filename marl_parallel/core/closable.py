"""Whether all has been closed, and what is said to whoever goes on all the same.

What closing does is its owners' matter.
"""

from __future__ import annotations

from gymnasium.error import ClosedEnvironmentError


class Closable:
    """Can be closed once.

    Attributes:
        closed: Whether everything has been freed, or is just being freed.
    """

    closed = False

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` where everything has been closed."""
        if self.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def _check_still_open(self) -> None:
        """The same in the middle of something, which was begun while all was open."""
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")
