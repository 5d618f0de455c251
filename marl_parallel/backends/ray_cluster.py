"""This process's connection to a Ray cluster, which all its `RayBackend`s share."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.state import state as global_state
from ray.exceptions import RayError

from marl_parallel.core.files import read_file
from marl_parallel.core.reports.reports import escaped, logger

__doctest_requires__ = ["ray"]

SLOT = "marl_parallel_worker"
"""In a cluster started for one program alone, each worker takes one of these resources instead of CPUs."""
_SLOTS = 10_000
_CONNECT_TIMEOUT_S = 10.0


@dataclass
class _Connection:
    """This process's connection, which all its backends share; the last one to disconnect ends what they started."""

    users: int = 0
    started_here: bool = False
    own_cluster: bool = False


_lock = threading.RLock()  # a finalizer may disconnect in the middle of anything
_connection = _Connection()


def connect(address: str | None, *, start: bool = False) -> bool:
    """Connect this process to a cluster, unless it is connected; call `disconnect` once for each True.

    With None or "auto", the cluster is the one at `RAY_ADDRESS` or on this machine. If there is none and the address is
    None, this starts a cluster if `start` is True, else returns False.
    """
    with _lock:
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", connected):
                raise ValueError(
                    f"RayBackend(address={address!r}): this process is connected to the Ray cluster at {connected} "
                    "already; call ray.shutdown() first, or leave the address out"
                )
        elif (found := _announced() if address in (None, "auto") else address) is not None:
            if found.startswith("ray://"):
                raise ValueError(
                    f"the address {found!r} belongs to a Ray Client, which cannot run these workers; run this program "
                    "on a node of the cluster, without an address"
                )
            try:
                _check_reachable(found)
                ray.init(address=found)
            except (OSError, RuntimeError, RayError) as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".")
                to_do = "Start one with `ray start --head`, or remove the address and unset RAY_ADDRESS"
                if type(error).__name__ == "AuthenticationError":  # older releases have none
                    to_do = "It requires a token: set RAY_AUTH_MODE=token, as docs/clusters.md says under Access"
                raise ConnectionError(f"no Ray cluster can be reached at {found}: {reason}. {to_do}") from error
            _connection.started_here, _connection.own_cluster = True, False
        elif address is not None:
            raise ConnectionError(
                "no Ray cluster runs on this machine, and RAY_ADDRESS names none: start one with `ray start --head`"
            )
        elif start:
            ray.init(address="local", resources={SLOT: _SLOTS}, include_dashboard=False)
            _connection.started_here = _connection.own_cluster = True
        else:
            return False
        _connection.users += 1
        return True


def disconnect() -> None:
    """Undo one `connect`."""
    global _connection
    with _lock:
        _connection.users -= 1
        if _connection.users:
            return
        old, _connection = _connection, _Connection()
        if old.started_here and ray.is_initialized():
            ray.shutdown()


def _announced() -> str | None:
    """The address in RAY_ADDRESS, else of a `ray start` cluster on this machine; not of another program's cluster."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        return None if address == "local" else address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        if not file.is_file():
            return None
        content, owner = read_file(file)
        address = content.decode(errors="replace").strip()
        if owner:
            logger.warning(
                "%s names the Ray cluster at %s, which is not used, since the file belongs to %s: the cluster could "
                "run code in this program. If you trust it, pass RayBackend(address=), or set RAY_ADDRESS",
                file,
                escaped(address),
                owner,
            )
            return None
        _check_reachable(address)
    except OSError:  # the cluster is gone
        return None
    return address or None


def _check_reachable(address: str) -> None:
    """Raise an `OSError` if nothing listens at an address: Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass


def has_own_cluster() -> bool:
    """Whether the cluster was started for this program alone."""
    return _connection.own_cluster


def draining_nodes() -> Collection[str]:
    """The ids of nodes that will shut down soon, such as preemptible machines that have received their notice."""
    nodes: Collection[str] = global_state.get_draining_nodes()  # Ray has no public function for it
    return nodes
