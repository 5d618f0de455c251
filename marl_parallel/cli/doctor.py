"""`marl-parallel doctor`: what a bug report needs to say about a machine, and whether worker processes work on it."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeAlias

import psutil

import marl_parallel
from marl_parallel.backends import open_backend
from marl_parallel.cli.measure import in_size
from marl_parallel.cli.target import in_brief
from marl_parallel.core.backend import cpu_quota, usable_cpus

Facts: TypeAlias = dict[str, dict[str, Any]]

TURNS = 2
"""How often `examine` calls its `on_turn`."""

NO_LIMIT = "no limit"
# Distributions that this package works with; optional ones that are not installed are left out.
REQUIRED = ("cloudpickle", "gymnasium", "numpy", "pettingzoo", "threadpoolctl")
OPTIONAL = (
    "agilerl", "envpool", "imageio", "imageio-ffmpeg", "jax", "matplotlib", "mlagents-envs", "mpe2", "pillow",
    "prometheus-client", "protobuf", "psutil", "ray", "rich", "sb3-contrib", "shimmy", "skrl", "smarts",
    "stable-baselines3", "sumo-rl", "supersuit", "tensordict", "tianshou", "torch", "torchrl", "typer", "vmas",
)  # fmt: skip
# Environment variables that change what workers do. Others are not shown: they may contain passwords.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LIBSUMO_AS_TRACI", "MARL_PARALLEL_PORTABLE", "MARL_PARALLEL_PURE", "MKL_NUM_THREADS",
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONMALLOC", "RAY_ADDRESS", "SDL_VIDEODRIVER", "SUMO_HOME", "TMPDIR",
)  # fmt: skip
_LIMITS = {
    "open files": "NOFILE",
    "processes": "NPROC",
    "memory": "AS",
    "locked memory": "MEMLOCK",
    "core file": "CORE",
}
_SHARED_MEMORY = "/dev/shm"


def examine(on_turn: Callable[[str], None] = lambda text: None) -> tuple[Facts, bool]:
    """All facts by section, and whether environments can be stepped in worker processes here.

    `on_turn` gets a text before each of `TURNS` parts of the work.
    """
    on_turn("two worker processes")
    trial, works = _trial()
    on_turn("versions and limits")
    return {
        "marl_parallel": _package(),
        "Python": _python(),
        "libraries": _libraries(),
        "CPUs": _cpus(),
        "memory": _memory(),
        "limits": _limits(),
        "Ray": _ray(),
        "environment variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "trial": trial,
    }, works


def next_step(works: bool) -> str:
    """What to do next."""
    report = "paste all of this into your report of the problem"
    return report if works else f"read the error under 'trial' above: workers do not start here; or {report}"


def as_text(facts: Facts) -> str:
    """The facts as lines to paste."""
    lines = []
    for section, values in facts.items():
        lines.append(f"{section}:" if values else f"{section}: none")
        width = max(map(len, values), default=0)
        lines += [f"  {name.ljust(width)}  {_shown(value)}".rstrip() for name, value in values.items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return (
        {True: "yes", False: "no", None: "unknown"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _package() -> dict[str, Any]:
    process = type(open_backend("process", worker_threads=None)).__name__
    compiled = importlib.util.find_spec("marl_parallel.core._codec") is not None
    return {
        "version": marl_parallel.__version__,
        "folder": str(Path(marl_parallel.__file__).parent),
        "codec": marl_parallel.codec,
        "compiled code is installed": compiled,
        "worker processes": "from a fork server" if process == "ProcessBackend" else "spawned",
    }


def _python() -> dict[str, Any]:
    # Only Python 3.13 and later can be built without a global interpreter lock.
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return {
        "version": f"{platform.python_implementation()} {platform.python_version()}",
        "free-threaded": free_threaded,
        "program": sys.executable,
        "virtual environment": sys.prefix != sys.base_prefix,
        "system": platform.platform(),
        "C library": " ".join(filter(None, platform.libc_ver())) or None,
        "C compiler": shutil.which("cc") or shutil.which("cl") or "none",
    }


def _libraries() -> dict[str, Any]:
    versions = {}
    for name in (*REQUIRED, *OPTIONAL):
        version = next((one.version for one in distributions(name=name)), None)
        if version is not None or name in REQUIRED:
            versions[name] = version or "not installed"
    return versions


def _cpus() -> dict[str, Any]:
    quota = cpu_quota()
    return {
        "of the machine": os.cpu_count(),
        "of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota of its control group": NO_LIMIT if math.isinf(quota) else round(quota, 2),
        "used by default": usable_cpus(),
        "load": ", ".join(f"{load:.2f}" for load in psutil.getloadavg()),
    }


def _memory() -> dict[str, Any]:
    memory, values = psutil.virtual_memory(), {}
    values["total"], values["available"] = in_size(memory.total), in_size(memory.available)
    if Path(_SHARED_MEMORY).is_dir():
        disk = psutil.disk_usage(_SHARED_MEMORY)
        values[_SHARED_MEMORY] = f"{in_size(disk.total)}, {in_size(disk.free)} free"
    return values


def _limits() -> dict[str, Any]:
    if sys.platform == "win32":
        return {}
    import resource

    def shown(limit: int) -> str:
        return NO_LIMIT if limit == resource.RLIM_INFINITY else f"{limit:,}"

    values = {}
    for name, resource_name in _LIMITS.items():
        number = getattr(resource, f"RLIMIT_{resource_name}", None)
        if number is not None:
            soft, hard = map(shown, resource.getrlimit(number))
            values[name] = soft if soft == hard else f"{soft} (can be raised to {hard})"
    return values


def _ray() -> dict[str, Any]:
    version = next((one.version for one in distributions(name="ray")), None)
    if version is None:
        return {}
    address = os.environ.get("RAY_ADDRESS", "not set: a cluster of this machine, or a new one")
    return {"version": version, "RAY_ADDRESS": address}


def _trial() -> tuple[dict[str, Any], bool]:
    """Step CartPole-v1 in two worker processes."""
    began = time.perf_counter()
    try:
        with marl_parallel.make("CartPole-v1", num_envs=2, num_workers=2, start_timeout=60.0, step_timeout=60.0) as env:
            env.reset()
            started = time.perf_counter()
            for _ in range(100):
                env.step(env.sample_actions())
            ended = time.perf_counter()
    except Exception as error:  # any failure is what the report is about
        report = getattr(error, "remote_traceback", None) or traceback.format_exc()
        return {"two worker processes": f"fail: {in_brief(error)}", "report": report}, False
    return {
        "two worker processes": "work",
        "start and reset": f"{1000 * (started - began):.0f} ms",
        "batch of two steps": f"{10_000 * (ended - started):.0f} µs",
    }, True
