"""Memory that processes share and that no file name leads to: it is gone with the last of them.

Here live `Block` and `anonymous_file`. What is written where in a block is decided in
`marl_parallel.core.columns`.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from marl_parallel.backends import descriptors


def anonymous_file(name: str) -> int:
    """Open a new, empty file that nothing is left of once its last descriptor is closed.

    Args:
        name: What `/proc` shows it as.

    Returns:
        A descriptor of the caller's own, not inherited by other programs.
    """
    if hasattr(os, "memfd_create"):
        return descriptors.lifted(os.memfd_create(name, os.MFD_CLOEXEC))
    with tempfile.TemporaryFile(prefix=name) as file:
        return descriptors.duplicate(file.fileno())


class Block:
    """A piece of shared memory and, until `close_fd`, the descriptor by which other processes get at it.

    The mapping itself is never closed here: views of it (arrays, semaphores) stay readable, and it goes when
    the last of them does. Nor does it need the descriptor to stay open.

    Attributes:
        fd: The descriptor, owned by this object; -1 once closed.
        nbytes: Size in bytes.
        buffer: The memory, shared by all who attached.
    """

    __slots__ = ("buffer", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        descriptors.fill_standard()  # the mapping keeps a descriptor of its own, which nobody could move
        try:
            self.buffer = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except BaseException:
            self.close_fd()
            raise

    @classmethod
    def create(cls, nbytes: int) -> Block:
        """Make a new block, filled with zeros.

        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a block has at least one byte, not {nbytes}")
        fd = anonymous_file("marl_parallel")
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Block:
        """Map a block that another process made; takes over the descriptor.

        Raises:
            ValueError: The file behind `fd` is smaller than `nbytes`.
        """
        return cls(fd, nbytes)

    def close_fd(self) -> None:
        """Close the descriptor, if it is still open; the memory stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close_fd()
