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
from marl_parallel.backends.ray_exchange import Actor
from marl_parallel.backends.ray_placement import Place, Placement
from marl_parallel.core.records import RecordPlaces

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
        record_places: Where records are in the block; None before there is one.
    """

    def __init__(self, placement: Placement, runtime_env: Mapping[str, Any] | None, num_threads: int | None) -> None:
        self.placement = placement
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._num_threads = num_threads
        self.shares: dict[int, Sequence[int]] = {}
        self.actors: list[Actor] = []
        self.record_places: RecordPlaces | None = None
        self._actor_of: dict[int, Actor] = {}  # by worker
        self._beside: dict[int, int] = {}  # by added worker, the worker whose environments move there
        self._places: dict[int, Place] = {}  # by worker
        self._vacant: dict[Actor, list[Place]] = {}  # for workers that leave an actor
        self._most = self._most_requests = 0

    def actor_of(self, worker: int) -> Actor | None:
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
        self._places = dict(enumerate(self.placement.reserve(len(shares))))
        nodes, together = self.placement.nodes_of(self._places.values()), dict[Any, list[int]]()
        for worker, place in self._places.items():
            together.setdefault(nodes[place] if self.placement.by_node else place, []).append(worker)
        for workers in together.values():
            self._start_actor(self._places[workers[0]], workers)

    def _start_actor(self, place: Place, workers: Collection[int] = ()) -> Actor:
        """Start an actor with some workers, or without any."""
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RayActor)
        options = {**self.placement.options(place), "runtime_env": self._runtime_env, "max_restarts": 0}
        path = [*map(os.path.abspath, sys.path)]
        handle = remote.options(**options).remote(self._num_threads, path, interpreter.next_identity())
        actor = Actor(handle, place, workers)
        shares = {worker: self.shares[worker] for worker in workers}
        actor.starting = actor.control("start", shares, self._most, self._most_requests, self.record_places)
        self._actor_of.update(dict.fromkeys(workers, actor))
        self.actors.append(actor)
        return actor

    def start_again(self, old: Actor, reason: str) -> None:
        """Start another actor with the same workers in the place of one that could not start."""
        self._end(old, reason)
        self._hand_over(old, self._start_actor(old.place), [*old.pending])

    def separate(self, actor: Actor, node: str) -> None:
        """Once an actor has started on a node, hand its workers with places on other nodes to other actors.

        After a node is lost, Ray finds a new place for each of its workers.
        """
        if self.record_places is None or not self.placement.by_node:
            return
        nodes = self.placement.nodes_of(self._places[worker] for worker in actor.pending)
        others: dict[str, list[int]] = {}
        for worker in actor.pending:
            if (other := nodes[self._places[worker]]) != node and self._places[worker] != actor.place:
                others.setdefault(other, []).append(worker)
        for workers in others.values():
            new = self._start_actor(self._places[workers[0]])
            new.is_standby = actor.is_standby
            self._hand_over(actor, new, workers)

    def _hand_over(self, old: Actor, new: Actor, workers: Sequence[int]) -> None:
        old.hand_over(new, workers)
        self._actor_of.update(dict.fromkeys(workers, new))

    def _end(self, actor: Actor, reason: str) -> None:
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
            actor = self._actor_at(self._places[worker], is_standby=False, since=actor.lost_at)
        self._start_worker(actor, worker)

    def add(self, worker: int, share: Sequence[int], beside: int) -> None:
        """Start one more worker: in the actor of the worker `beside`, or on another node if that worker leaves."""
        self.shares[worker], self._beside[worker] = share, beside
        actor, place = self._actor_of[beside], self._places[beside]
        if beside in self.leaving():
            place = self._place_elsewhere(actor)
            actor = self._actor_at(place, is_standby=True)
        elif actor.lost is not None:
            actor = self._actor_at(place, is_standby=False, since=actor.lost_at)
        self._places[worker] = place
        self._start_worker(actor, worker)

    def _actor_at(self, place: Place, *, is_standby: bool, since: float = 0.0) -> Actor:
        """The usable actor at a place, or on its node; else a new actor.

        Args:
            place: The resources set aside for a worker.
            is_standby: Whether the batch can go on without the worker. An actor that is starting takes only such
                workers, or only others.
            since: An actor that is up counts only if it started after this moment, when its node was alive.
        """
        nodes = self.placement.nodes_of([place, *[one.place for one in self.actors]])
        for actor in self.actors:
            is_usable = actor.ready > since if actor.is_up else actor.lost is None and actor.is_standby == is_standby
            is_there = actor.place == place
            if self.placement.by_node and not is_there:
                node = actor.node or nodes[actor.place]
                is_there = node == nodes[place] and (node != "" or actor.place.group == place.group)
            if is_usable and is_there:
                return actor
        actor = self._start_actor(place)
        actor.is_standby = is_standby
        return actor

    def _start_worker(self, actor: Actor, worker: int) -> None:
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
            vacant = [place for places in self._vacant.values() for place in places]
            self.placement.free_unused([*self._places.values(), *[one.place for one in self.actors], *vacant])
        return True

    def _forget(self, worker: int) -> None:
        del self._actor_of[worker], self._places[worker], self.shares[worker]
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

    def _place_elsewhere(self, old: Actor) -> Place:
        """A place on another node for a worker of an actor; the first call sets places aside for all its workers."""
        vacant = self._vacant.setdefault(old, [])
        if not vacant:
            # A worker, and the one that its environments move to on the same node, need one place.
            staying = {self._beside.get(one, one) for one in old.pending if one not in old.closing}
            staying -= {one for added, one in self._beside.items() if self._actor_of.get(added, old) is not old}
            vacant += self.placement.elsewhere(max(len(staying), 1))
        return vacant.pop(0)
