"""How much memory processes use, as measured; and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from marl_parallel.cli.failures import CommandError

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parsed_size(text: str) -> int:
    """Bytes.

    Raises:
        CommandError: It is no size.

    Example:
        >>> parsed_size("2GB"), parsed_size("1.5 GiB"), parsed_size("800M")
        (2000000000, 1610612736, 800000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise CommandError(f"{text!r} is no amount of memory", "such as 800MB, 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def in_size(nbytes: float) -> str:
    """Bytes in a unit that fits.

    Example:
        >>> in_size(83_400_000), in_size(2.25e9)
        ('83 MB', '2.2 GB')
    """
    return f"{nbytes / 1e6:,.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.1f} GB"


def used_by(pids: Iterable[int]) -> int:
    """Bytes of memory that these processes use together, pages that they share counted once; Linux only.

    Pages that they share with others as well count in proportion. Kernels that do not tell (before 4.14) count what
    is shared for each.

    Example:
        >>> import os
        >>> used_by([os.getpid()]) > 1_000_000
        True
    """
    return sum(map(_used_by, pids))


def available() -> int | None:
    """Bytes of memory that are free, or can be freed; None where the system does not tell."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _used_by(pid: int) -> int:
    process = Path("/proc") / str(pid)
    for name, field in (("smaps_rollup", "Pss"), ("status", "VmRSS")):
        found = _field(process / name, field)
        if found is not None:
            return found
    return 0  # it has ended


def _field(path: Path, name: str) -> int | None:
    """A line such as `Pss:  1234 kB`, in bytes; None where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
