"""The cluster: connecting to it, room in it, and who still needs the connection.

Actors and what they are asked are the business of `ray_backend.py`.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marl_parallel.backends.ray_warden import RayWarden
from marl_parallel.core.reports import logger
from marl_parallel.types import ParallelEnvError

# What workers take one of on a machine of their own, and how many of them there are.
_SEAT, _SEATS = "marl_parallel_worker", 10_000
_TOLD_AFTER_S = 3.0
_AT_HOME_WITHIN_S = 10.0


class NoCluster(ConnectionError):
    """There is none at the address asked for, or none at all."""


class NoneAnnounced(NoCluster):
    """Nobody has said where one is, and none has been started on this machine with `ray start`."""


class Connection:
    """To a cluster, shared by all of this process who use one; the last to let go of what they began ends it.

    They share the wardens of its nodes, too.

    Args:
        address: Of a cluster; None for the one that this machine or `RAY_ADDRESS` tells.
        alone: Start one on this machine instead, where nobody else wants anything of it.

    Raises:
        ValueError: This process is connected to another cluster, or the address is a Ray Client's.
        NoCluster: There is no cluster.
    """

    _lock = threading.RLock()  # a finalizer may release another one in the middle of anything
    _users = 0
    _begun_here = _alone = False
    _wardens: ClassVar[dict[tuple[str, str], Any]] = {}

    def __init__(self, address: str | None, *, alone: bool = False) -> None:
        cls, self._released = type(self), False
        with cls._lock:
            if ray.is_initialized():
                _check_same(address)
            else:
                _connect(address, alone)
                cls._begun_here, cls._alone = True, alone
            cls._users += 1

    def release(self) -> None:
        """Let go of it. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._released:
                return
            self._released = True
            cls._users -= 1
            if cls._users:
                return
            wardens, cls._wardens = cls._wardens, {}
            if ray.is_initialized():
                for warden in wardens.values():
                    ray.kill(warden)
                if cls._begun_here:
                    ray.shutdown()
            cls._begun_here = cls._alone = False

    def wanted(self, wanted: Mapping[str, float]) -> dict[str, float]:
        """What to ask Ray for, for each worker. On a machine of one's own, CPUs are not set aside for anybody."""
        if not type(self)._alone:
            return dict(wanted)
        return {_SEAT: 1, **{name: amount for name, amount in wanted.items() if name != "CPU"}}

    def room_for(self, wanted: Mapping[str, float]) -> int:
        """How many workers there would be room for, if there was nobody else; at least one."""
        has = ray.cluster_resources()
        return max(int(min(has.get(name, 0) / amount for name, amount in wanted.items())), 1)

    def warden_of(self, node: str, runtime_env: dict[str, Any] | None) -> Any:
        """The handle of the `RayWarden` on a node.

        Args:
            node: Its id.
            runtime_env: Where it is yet to be started.
        """
        cls, which = type(self), (node, repr(runtime_env))
        with cls._lock:
            if which not in cls._wardens:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(RayWarden)
                options = actor.options(num_cpus=0, scheduling_strategy=strategy, runtime_env=runtime_env)
                cls._wardens[which] = options.remote()
            return cls._wardens[which]

    def forget(self, warden: Any) -> None:
        """Start another one when its node is asked for again: this one is gone."""
        cls = type(self)
        with cls._lock:
            cls._wardens = {which: one for which, one in cls._wardens.items() if one is not warden}

    def abandon(self) -> None:
        """In a forked child of the owner: it is not the child's to let go of."""
        self._released = True


def _check_same(address: str | None) -> None:
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", connected):
        raise ValueError(
            f"RayBackend(address={address!r}): this process is connected to the Ray cluster at {connected} already; "
            "call ray.shutdown() first, or leave the address out"
        )


def _connect(address: str | None, alone: bool) -> None:
    if alone:
        ray.init(address="local", resources={_SEAT: _SEATS}, include_dashboard=False)
        return
    found = _announced() if address is None or address == "auto" else address
    if found is None:
        raise NoneAnnounced("no Ray cluster runs on this machine, and RAY_ADDRESS tells of none: `ray start --head`")
    if found.startswith("ray://"):
        raise ValueError(
            f"the address {found!r} is a Ray Client's: workers send more than one receives; run this program on a node "
            "of the cluster, and leave the address out"
        )
    try:
        _knock(found)
        ray.init(address=found)
    except (OSError, RuntimeError, RayError) as error:
        first = str(error).strip().partition("\n")[0]
        raise NoCluster(
            f"no Ray cluster can be reached at {found}: {first}. Start one with `ray start --head`, or leave the "
            "address, and RAY_ADDRESS, out"
        ) from error


def _announced() -> str | None:
    """The cluster that this machine's environment tells of: not just any that somebody else runs on it."""
    told = os.environ.get("RAY_ADDRESS", "")
    if told not in ("", "auto", "local"):
        return told
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None
    usual = tempfile.gettempdir() if sys.platform == "win32" else "/tmp"
    file = Path(os.environ.get("RAY_TMPDIR") or on_linux or usual, "ray", "ray_current_cluster")  # by `ray start`
    address = file.read_text().strip() if told != "local" and file.is_file() else ""
    try:
        _knock(address)
    except OSError:  # it was left behind by one that is not there any more
        return None
    return address or None


def _knock(address: str) -> None:
    """Raise an OSError where nobody is at home: Ray itself would try again for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_AT_HOME_WITHIN_S):
            pass


class Room:
    """A bundle of resources for each worker, held for as long as the workers are wanted.

    Args:
        wanted: What each worker wants.
        count: How many workers.
        placement: "SPREAD" or "PACK".
        timeout: Seconds to wait for it.

    Raises:
        ParallelEnvError: The cluster has not so much to give.
    """

    def __init__(self, wanted: Mapping[str, float], count: int, placement: str, timeout: float) -> None:
        self._wanted = dict(wanted)
        self.group: PlacementGroup = placement_group([self._wanted] * count, strategy=placement)
        try:
            told = min(_TOLD_AFTER_S, timeout)
            if not self.group.wait(told):
                logger.warning("waiting for room in the Ray cluster: %s", self.shortage(count))
                if not self.group.wait(timeout - told):
                    raise ParallelEnvError(
                        f"the Ray cluster has no room after {timeout:g} s: {self.shortage(count)}. Ask for fewer "
                        "workers (num_workers=) or less for each (RayBackend(num_cpus=, resources=)), or add nodes"
                    )
        except BaseException:
            self.free()
            raise

    def nodes(self) -> set[str]:
        """The ids of the nodes that the bundles lie on now."""
        return {node for node in placement_group_table(self.group)["bundles_to_node_id"].values() if node}

    def shortage(self, count: int) -> str:
        """What so many workers want, and what there is."""
        has, free = ray.cluster_resources(), ray.available_resources()
        each = ", ".join(f"{amount:g} {name}" for name, amount in self._wanted.items())
        there = ", ".join(f"{has.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self._wanted)
        want = "it wants" if count == 1 else f"{count} workers want"
        return f"{want} {each}{' each' * (count > 1)}, the {_alive()} nodes have {there} together"

    def free(self) -> None:
        remove_placement_group(self.group)


def _alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())
