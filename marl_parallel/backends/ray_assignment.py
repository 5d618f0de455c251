"""The assignment of workers to the actors of a `RayBackend`: starts actors, and moves workers between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from marl_parallel.backends import interpreter
from marl_parallel.backends.ray_actor import CONCURRENCY_GROUPS, RayActor
from marl_parallel.backends.ray_cluster import draining_nodes
from marl_parallel.backends.ray_exchange import ActorState
from marl_parallel.backends.ray_placement import Bundle, Placement
from marl_parallel.core.block.records import RecordOffsets

__doctest_requires__ = ["ray"]


class Assignment:
    """The actors of a backend and their workers.

    Args:
        placement: The resources that Ray sets aside.
        runtime_env: Ray's `runtime_env` of the actors.
        num_threads: BLAS, OpenMP and torch threads in each worker; None leaves them alone.

    Attributes:
        shares: By worker, its environments.
        actors: The actors in use; some may be starting or gone.
        record_offsets: Where records are in the block; None before there is one.
    """

    def __init__(self, placement: Placement, runtime_env: Mapping[str, Any] | None, num_threads: int | None) -> None:
        self.placement = placement
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._num_threads = num_threads
        self.shares: dict[int, Sequence[int]] = {}
        self.actors: list[ActorState] = []
        self.record_offsets: RecordOffsets | None = None
        self._actor_of: dict[int, ActorState] = {}  # by worker
        self._beside: dict[int, int] = {}  # by added worker, the worker whose environments move there
        self._bundles: dict[int, Bundle] = {}  # by worker
        self._vacant: dict[ActorState, list[Bundle]] = {}  # for workers that leave an actor
        self._most = self._most_requests = 0

    def actor_of(self, worker: int) -> ActorState | None:
        """The actor that has a worker, or had it if it is lost; None if there is no such worker."""
        return self._actor_of.get(worker)

    def node_of(self, worker: int) -> str:
        """The id of the node of a worker; empty if it is not known yet."""
        actor = self._actor_of.get(worker)
        return "" if actor is None else actor.node

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, shares: Sequence[Sequence[int]], most: int, most_requests: int) -> None:
        """Wait for room and start all actors, each with at most `most` workers at a time."""
        self.shares, self._most, self._most_requests = dict(enumerate(shares)), most, most_requests
        self._bundles = dict(enumerate(self.placement.reserve(len(shares))))
        nodes, together = self.placement.nodes_of(self._bundles.values()), dict[Any, list[int]]()
        for worker, bundle in self._bundles.items():
            together.setdefault(nodes[bundle] if self.placement.by_node else bundle, []).append(worker)
        for workers in together.values():
            self._start_actor(self._bundles[workers[0]], workers)

    def _start_actor(self, bundle: Bundle, workers: Collection[int] = ()) -> ActorState:
        """Start an actor with some workers, or without any."""
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RayActor)
        options = {**self.placement.options(bundle), "runtime_env": self._runtime_env, "max_restarts": 0}
        path = [*map(os.path.abspath, sys.path)]
        handle = remote.options(**options).remote(self._num_threads, path, interpreter.next_identity())
        actor = ActorState(handle, bundle, workers)
        shares = {worker: self.shares[worker] for worker in workers}
        actor.starting = actor.control("start", shares, self._most, self._most_requests, self.record_offsets)
        self._actor_of.update(dict.fromkeys(workers, actor))
        self.actors.append(actor)
        return actor

    def start_again(self, old: ActorState, reason: str) -> None:
        """Start another actor with the same workers in the place of one that could not start."""
        self._end(old, reason)
        self._hand_over(old, self._start_actor(old.bundle), [*old.pending])

    def separate(self, actor: ActorState, node: str) -> None:
        """Once an actor has started on a node, hand its workers with bundles on other nodes to other actors.

        After a node is lost, Ray finds a new node for each of its workers.
        """
        if self.record_offsets is None or not self.placement.by_node:
            return
        nodes = self.placement.nodes_of(self._bundles[worker] for worker in actor.pending)
        others: dict[str, list[int]] = {}
        for worker in actor.pending:
            if (other := nodes[self._bundles[worker]]) != node and self._bundles[worker] != actor.bundle:
                others.setdefault(other, []).append(worker)
        for workers in others.values():
            new = self._start_actor(self._bundles[workers[0]])
            new.is_standby = actor.is_standby
            self._hand_over(actor, new, workers)

    def _hand_over(self, old: ActorState, new: ActorState, workers: Sequence[int]) -> None:
        old.hand_over(new, workers)
        self._actor_of.update(dict.fromkeys(workers, new))

    def _end(self, actor: ActorState, reason: str) -> None:
        self.actors.remove(actor)
        self._vacant.pop(actor, None)
        actor.lost, actor.starting = reason, None
        if ray.is_initialized():  # else Ray would start again
            ray.kill(actor.handle)

    # -- workers in the place of others, and more of them ----------------------------------------------------------

    def replace(self, worker: int) -> None:
        """Start a worker again: in its actor, or in another one if that is lost."""
        actor = self._actor_of[worker]
        if actor.lost is not None:
            if actor in self.actors:
                self._end(actor, actor.lost)
            actor = self._actor_at(self._bundles[worker], is_standby=False, since=actor.lost_at)
        self._start_worker(actor, worker)

    def add(self, worker: int, share: Sequence[int], beside: int) -> None:
        """Start one more worker: in the actor of the worker `beside`, or on another node if that worker leaves."""
        self.shares[worker], self._beside[worker] = share, beside
        actor, bundle = self._actor_of[beside], self._bundles[beside]
        if beside in self.leaving():
            bundle = self._bundle_elsewhere(actor)
            actor = self._actor_at(bundle, is_standby=True)
        elif actor.lost is not None:
            actor = self._actor_at(bundle, is_standby=False, since=actor.lost_at)
        self._bundles[worker] = bundle
        self._start_worker(actor, worker)

    def _actor_at(self, bundle: Bundle, *, is_standby: bool, since: float = 0.0) -> ActorState:
        """The usable actor of a bundle, or on its node; else a new actor.

        Args:
            bundle: The resources set aside for a worker.
            is_standby: Whether the batch can go on without the worker. An actor that is starting takes only such
                workers, or only others.
            since: An actor that is up counts only if it started after this moment, when its node was alive.
        """
        nodes = self.placement.nodes_of([bundle, *[one.bundle for one in self.actors]])
        for actor in self.actors:
            is_usable = actor.ready > since if actor.is_up else actor.lost is None and actor.is_standby == is_standby
            is_there = actor.bundle == bundle
            if self.placement.by_node and not is_there:
                node = actor.node or nodes[actor.bundle]
                is_there = node == nodes[bundle] and (node != "" or actor.bundle.group == bundle.group)
            if is_usable and is_there:
                return actor
        actor = self._start_actor(bundle)
        actor.is_standby = is_standby
        return actor

    def _start_worker(self, actor: ActorState, worker: int) -> None:
        actor.start_worker(worker, self.shares[worker])
        self._actor_of[worker] = actor

    def remove(self, worker: int, *, kill: bool) -> bool:
        """Free a worker and its number; returns False if it has not ended yet. An actor ends with its last worker."""
        actor = self._actor_of.get(worker)
        if actor is None:
            return True
        if actor.is_up and ray.is_initialized() and not actor.removed(worker, kill=kill):
            return False
        actor.forget(worker)
        self._forget(worker)
        if actor in self.actors and actor not in self._actor_of.values():  # all have moved
            self._end(actor, "its workers have moved")
        if ray.is_initialized():
            vacant = [bundle for bundles in self._vacant.values() for bundle in bundles]
            self.placement.free_unused([*self._bundles.values(), *[one.bundle for one in self.actors], *vacant])
        return True

    def _forget(self, worker: int) -> None:
        del self._actor_of[worker], self._bundles[worker], self.shares[worker]
        self._beside.pop(worker, None)
        self._beside = {added: old for added, old in self._beside.items() if old != worker}

    def end_all(self) -> None:
        """Kill all actors, and free their resources."""
        for actor in [*self.actors]:
            self._end(actor, "its environments are closed")
        self._actor_of.clear()
        if ray.is_initialized():
            self.placement.free_all()

    # -- nodes that will shut down ---------------------------------------------------------------------------------

    def leaving(self) -> Collection[int]:
        """Workers whose node will shut down."""
        draining = draining_nodes()
        return {worker for worker in self.shares if self.node_of(worker) in draining}

    def _bundle_elsewhere(self, old: ActorState) -> Bundle:
        """A bundle on another node for a worker of an actor; the first call sets bundles aside for all its workers."""
        vacant = self._vacant.setdefault(old, [])
        if not vacant:
            # A worker, and the one that its environments move to on the same node, need one bundle.
            staying = {self._beside.get(one, one) for one in old.pending if one not in old.closing}
            staying -= {one for added, one in self._beside.items() if self._actor_of.get(added, old) is not old}
            vacant += self.placement.elsewhere(max(len(staying), 1))
        return vacant.pop(0)
