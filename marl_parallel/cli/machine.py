"""On what was measured: the machine, the versions, the day."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marl_parallel.core.sharing import usable_cpus

ALWAYS = ("marl-parallel", "numpy", "gymnasium", "pettingzoo")


def machine(distributions: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe this machine, as far as it matters to a measurement.

    Args:
        distributions: Installed distributions whose versions matter too, such as the environment's.

    Example:
        >>> sorted(machine())
        ['cpu', 'cpus', 'date', 'load', 'python', 'system', 'versions']
    """
    return {
        "cpu": _cpu_model(),
        "cpus": usable_cpus(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in dict.fromkeys((*ALWAYS, *distributions))},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def in_one_line(described: dict[str, Any]) -> str:
    """A machine's description as a line of text."""
    versions = ", ".join(f"{name} {number}" for name, number in described["versions"].items() if number)
    return (
        f"{described['cpu']}, {described['cpus']} CPUs; {described['system']}; "
        f"Python {described['python']}, {versions}; {described['date']}"
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
