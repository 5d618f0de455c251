"""The resources that Ray sets aside for the workers of a `RayBackend`, and which workers move where.

Each worker has a bundle of a placement group, on the node of its actor. With `workers_per_node`, each actor has a
bundle. The bundles of the start are in one group, so that all or none have room. When a node is lost, Ray finds other
nodes for its bundles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from marl_parallel.backends.ray_cluster import SLOT
from marl_parallel.core.backend import share_out
from marl_parallel.core.reports.reports import logger
from marl_parallel.types import ParallelEnvError

__doctest_requires__ = ["ray"]

_WARN_AFTER_S = 3.0
_ANYWHERE = {"memory": 1}
"""What a worker without CPUs takes, since a placement group has to reserve something: a byte."""
_WITH_OPTIONS = frozenset({"CPU", "GPU", "memory"})


class Bundle(NamedTuple):
    """A bundle of a placement group: the resources of a worker, or of several workers of one actor."""

    group: PlacementGroup
    position: int  # in the group
    workers: int  # how many it is for


class Placement:
    """The resources that Ray sets aside for the workers of one `RayBackend`.

    Args:
        resources: The amounts for each worker, by name; the amount of CPUs may be 0.
        strategy: "PACK" for as few nodes as possible, "SPREAD" for as many.
        workers_per_node: The most workers of an actor; None for all of its node.
        timeout: Seconds to wait for room.

    Attributes:
        by_node: Whether all workers of a node share an actor. Otherwise workers with the same bundle share one. This
            includes workers with GPUs, since an actor sees only the GPUs of its own bundle.
    """

    def __init__(
        self, resources: Mapping[str, float], strategy: str, workers_per_node: int | None, timeout: float
    ) -> None:
        self._resources = {**({} if resources["CPU"] else _ANYWHERE), **resources}
        # Without CPUs, nothing says how many workers a node has room for: all would be on one.
        self._strategy = strategy if resources["CPU"] else "SPREAD"
        self._each, self.timeout = workers_per_node or 1, timeout
        self.by_node = workers_per_node is None and "GPU" not in resources
        self._groups: list[PlacementGroup] = []  # the first group is the group of the start

    def take_slots(self) -> None:
        """In a cluster started for this program alone, have workers take no CPUs: there may be more workers."""
        self._resources = {SLOT: 1, **{name: n for name, n in self._resources.items() if name != "CPU"}}

    # -- room ------------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """How many workers the nodes have room for if nobody else uses them; at least as many as an actor has."""
        each = {**self._resources, "CPU": self._resources.get("CPU", 1) or 1}  # in an own cluster, slots
        room = [_count(node["Resources"], each) for node in ray.nodes() if node["Alive"]]
        return max(sum(count // self._each * self._each for count in room), self._each)

    # -- setting aside ---------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> list[Bundle]:
        """Set aside what the first workers need, and wait until there is room; returns the bundle of each."""
        bundles = self.elsewhere(count)
        group, before_warning = bundles[0].group, min(_WARN_AFTER_S, self.timeout)
        if not group.wait(before_warning):
            logger.warning("waiting for room in the Ray cluster: %s", self._shortage(count))
            if not group.wait(self.timeout - before_warning):
                raise ParallelEnvError(
                    f"the Ray cluster has no room after {self.timeout:g} s: {self._shortage(count)}. Ask for fewer "
                    "workers (num_workers=) or less for each (RayBackend(num_cpus=, resources=)), or add nodes"
                )
        return bundles

    def elsewhere(self, count: int) -> list[Bundle]:
        """Bundles for some workers, on nodes that will not shut down; Ray waits for room."""
        sizes = [*map(len, share_out(count, -(-count // self._each)))]
        group = placement_group([self._amounts(size) for size in sizes], strategy=self._strategy)
        self._groups.append(group)
        return [Bundle(group, position, size) for position, size in enumerate(sizes) for _ in range(size)]

    def nodes_of(self, bundles: Iterable[Bundle]) -> dict[Bundle, str]:
        """By bundle, the id of its node; empty while Ray looks for one, as after a node is gone."""
        chosen = {*bundles}
        tables = {group: placement_group_table(group)["bundles_to_node_id"] for group in {one.group for one in chosen}}
        nodes = {bundle: tables[bundle.group].get(bundle.position) or "" for bundle in chosen}
        return {bundle: node if node.strip("f") else "" for bundle, node in nodes.items()}  # ff...f means no node

    def free_unused(self, used: Iterable[Bundle]) -> None:
        """Remove the groups that none of these bundles uses, except the group of the start."""
        groups = {bundle.group for bundle in used}
        for group in self._groups[1:]:
            if group not in groups:
                self._remove(group)

    def free_all(self) -> None:
        for group in [*self._groups]:
            self._remove(group)

    def _remove(self, group: PlacementGroup) -> None:
        self._groups.remove(group)
        remove_placement_group(group)

    def options(self, bundle: Bundle) -> dict[str, Any]:
        """The options of an actor with this bundle: for some resources, Ray has separate arguments."""
        resources = self._amounts(bundle.workers)
        strategy = PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.position)
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "memory": resources.get("memory"),
            "resources": {name: amount for name, amount in resources.items() if name not in _WITH_OPTIONS},
            "scheduling_strategy": strategy,
        }

    def _amounts(self, workers: int) -> dict[str, float]:
        """The resources of some workers; Ray requires whole numbers above 1, except for CPUs."""
        amounts = {name: round(workers * amount, 4) for name, amount in self._resources.items()}
        return {name: math.ceil(n) if n > 1 and name != "CPU" else n for name, n in amounts.items()}

    # -- messages --------------------------------------------------------------------------------------------------

    def why_not_started(self, bundle: Bundle, reason: str) -> str:
        """Why an actor did not start within the timeout (`reason`, if it is known), and what to do."""
        to_do = "Add nodes, or raise RayBackend(placement_timeout=)"
        if not reason and self.nodes_of([bundle])[bundle]:
            reason = "Ray has set aside what it needs, but its process is not ready yet"
            to_do = (
                "Raise RayBackend(placement_timeout=), as the node may be busy or install a runtime_env, or read Ray's "
                "logs on that node"
            )
        reason = reason or f"it wants {_listed(self._shown(bundle.workers))}{self._there()}"
        return f"within {self.timeout:g} s: {reason}. {to_do}"

    def _shortage(self, count: int) -> str:
        wants, each = ("it wants", "") if count == 1 else (f"{count} workers want", " each")
        together = f", with {self._each} in an actor" if self._each > 1 else ""
        return f"{wants} {_listed(self._shown(1))}{each}{together}{self._there()}"

    def _shown(self, workers: int) -> dict[str, float]:
        amounts = self._amounts(workers)
        return {name: amount for name, amount in amounts.items() if name != SLOT} or amounts

    def _there(self) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        amounts = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self._shown(1))
        nodes = sum(node["Alive"] for node in ray.nodes())
        return f", the {nodes} node{'s have' if nodes != 1 else ' has'} {amounts} together"


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _count(amounts: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many times there is what each worker needs."""
    return int(min(amounts.get(name, 0) / amount for name, amount in each.items() if amount) + 1e-6)
