"""Workers that move to other nodes of a Ray cluster: before their own goes, and to one that has room."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest
import ray
from gymnasium.vector import AutoresetMode
from helpers.processes import wait_for
from helpers.ray_clusters import CPUS_EACH, NODES, RayClusters
from ray._private import worker as ray_worker
from ray.core.generated import autoscaler_pb2
from simulators.counting import ACTIONS, Counting

from marl_parallel import ParallelEnv, RayBackend
from marl_parallel.backends.ray_backend import moves_between

pytestmark = [pytest.mark.needs("ray"), pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")]
LENGTH = 5
each_kind = pytest.mark.parametrize("kind", [{}, {"num_nodes": 1}], ids=["an actor per worker", "an actor per node"])


@pytest.fixture
def three_nodes(ray_clusters: RayClusters) -> Any:
    """A cluster of three nodes without actors."""
    cluster = ray_clusters.three_nodes()
    assert wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH, timeout=60)
    return cluster


class Slow(Counting):
    """Takes a moment for each step, so that a worker elsewhere is up after some episodes."""

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        time.sleep(0.02)
        return super().step(actions)


class Watched:
    """Steps environments, and checks that each episode has its full length, whatever moves meanwhile."""

    def __init__(self, env: ParallelEnv) -> None:
        self.env, self.steps = env, [0] * env.num_envs
        env.reset()

    def step(self) -> None:
        *_, truncateds, infos = self.env.step([ACTIONS] * self.env.num_envs)
        for env_id, flags in enumerate(truncateds):
            self.steps[env_id] += 1
            assert flags["__all__"] == (self.steps[env_id] == LENGTH), f"environment {env_id}"
            if flags["__all__"]:
                self.steps[env_id] = 0
            else:
                assert "recycled" not in infos[env_id].get("__common__", {})

    def step_until(self, nodes: Any) -> None:
        """Step until a condition on the set of nodes holds; not during the steps of a spare that is not up yet."""
        assert wait_for(lambda: self.step() or nodes({*workers_by_node(self.env)}), timeout=90)


def workers_by_node(env: ParallelEnv) -> list[str]:
    """The node of each worker that has environments."""
    backend = env.runner.pool.backend
    assert isinstance(backend, RayBackend)
    return [backend._node_id(worker) for worker in env.runner.pool.present_shares()]


def drain(node: str) -> None:
    """Announce that a node goes within ten minutes."""
    deadline = int((time.time() + 600) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = ray_worker.global_worker.gcs_client.drain_node(node, reason, "the machine is taken away", deadline)
    assert accepted, why


def test_as_few_moves_as_possible():
    assert moves_between({}, {"a": 3}) == {}
    assert moves_between({0: "a", 1: "a", 2: "a"}, {}) == {}
    assert moves_between({0: "a", 1: "b"}, {"a": 1, "c": 5}) == {}
    assert moves_between({0: "a", 1: "a", 2: "a", 3: "a"}, {"a": 0, "b": 8}) == {0: "b", 1: "b"}
    assert moves_between({0: "a", 1: "a", 2: "a", 3: "a"}, {"b": 1, "c": 0}) == {0: "b"}
    assert moves_between(dict.fromkeys(range(6), "a"), {"b": 9, "c": 9}) == {0: "b", 1: "c", 2: "b", 3: "c"}


@each_kind
@pytest.mark.parametrize("has_spares", [False, True], ids=["", "with spares there"])
def test_announced_end_of_a_node(has_spares, kind, three_nodes):
    """Its environments move where their episodes end; then the machine goes, and nobody notices."""
    constructors = [functools.partial(Slow, LENGTH)] * 4
    backend = RayBackend(placement="PACK", **kind)
    with ParallelEnv(constructors, "SAME_STEP", 1, backend=backend, num_workers=2, on_error="restart") as env:
        (node,) = {*workers_by_node(env)}
        watched = Watched(env)
        for _ in range(3):
            watched.step()
        if has_spares:  # on the same node, so that others are constructed elsewhere
            pool = env.runner.pool
            pool._add_spares(pool.recycler, 0, time.monotonic())
            assert wait_for(lambda: watched.step() or all(map(pool._is_prepared, pool._slots_of(0))), timeout=90)
        drain(node)
        watched.step_until(lambda nodes: node not in nodes)
        (doomed,) = (one for one in three_nodes.worker_nodes if one.node_id == node)
        three_nodes.remove_node(doomed, allow_graceful=False)
        for _ in range(3 * LENGTH):
            watched.step()
        stats = env.stats()
        assert (stats.recycled, stats.restarts, stats.faults) == (4, 0, 0)
        assert len({*env.seed()}) == 4


@each_kind
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_rebalance(mode, kind, three_nodes):
    """Workers of a crowded node move to others, and only those; a second call finds nothing to do."""
    constructors = [functools.partial(Slow, LENGTH)] * 4
    backend = RayBackend(placement="PACK", **kind)
    with ParallelEnv(constructors, mode, 1, backend=backend, num_workers=2, on_error="restart") as env:
        (node,) = {*workers_by_node(env)}
        assert env.rebalance() == 1
        assert env.rebalance() == 0
        if mode is AutoresetMode.SAME_STEP:
            Watched(env).step_until(lambda nodes: len(nodes) == 2)
        else:
            env.reset()

            def play() -> bool:
                for _ in range(LENGTH):
                    *_, truncateds, _ = env.step([ACTIONS] * 4)
                assert all(flags["__all__"] for flags in truncateds)
                env.reset()
                return len({*workers_by_node(env)}) == 2

            assert wait_for(play, timeout=90)
        assert node in workers_by_node(env)
        assert env.rebalance() == 0
        stats = env.stats()
        assert (stats.recycled, stats.faults) == (2, 0)
    assert wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH, timeout=60)


@each_kind
def test_node_that_joins_late(kind, three_nodes, caplog):
    """Environments of a lost node wait for room longer than `start_timeout`; they are restarted once, on a new node."""
    constructors = [functools.partial(Counting, LENGTH)] * 6
    nodes = dict.fromkeys(kind, NODES)
    backend = RayBackend(num_cpus=CPUS_EACH / 2, placement_timeout=120, **nodes)
    options = {"on_error": "restart", "start_timeout": 4.0, "warn_after": 2.0}
    with ParallelEnv(constructors, "SAME_STEP", 1, backend=backend, num_workers=6, **options) as env:
        before = workers_by_node(env)
        env.reset()
        (doomed,) = (one for one in three_nodes.worker_nodes if one.node_id == before[-1])
        three_nodes.remove_node(doomed, allow_graceful=False)
        lost, marks = [place == before[-1] for place in before], [0] * 6

        def step(timeout: float) -> None:
            env.send([ACTIONS] * 6)
            try:
                batch = env.recv(6, timeout)
            except TimeoutError:
                three_nodes.add_node(num_cpus=CPUS_EACH)
                batch = env.recv(6, 90)
            for env_id, info in zip(batch.env_ids, batch.infos, strict=True):
                marks[env_id] += "restarted" in info.get("__common__", {})

        assert wait_for(lambda: step(10.0) or any(marks), timeout=120)
        for _ in range(LENGTH):
            step(90.0)
        assert marks == [int(one) for one in lost]
        assert (env.stats().faults, env.stats().restarts) == (sum(lost), sum(lost))
        assert "It waits for room in the cluster" in caplog.text
        after = workers_by_node(env)
        assert [old != new for old, new in zip(before, after)] == lost
        assert {*after} - {*before} <= {one.node_id for one in three_nodes.worker_nodes}


@each_kind
def test_target_that_goes(kind, three_nodes, caplog):
    """A worker that cannot start where it is to move stays, and the batch goes on."""
    backend = RayBackend(placement="PACK", **kind)
    with ParallelEnv([functools.partial(Slow, LENGTH)] * 2, True, 1, backend=backend, num_workers=2) as env:
        nodes = workers_by_node(env)
        watched = Watched(env)
        backend._targets[1], backend._placement_timeout = "ff" * 28, 3.0
        env.runner.pool.recycler.next_look = 0.0
        assert wait_for(lambda: watched.step() or "could not be constructed in another" in caplog.text, timeout=60)
        assert workers_by_node(env) == nodes
        assert not backend.leaving()
        for _ in range(2 * LENGTH):
            watched.step()


@each_kind
def test_spares_that_are_dropped_before_there_is_room(kind, three_nodes):
    """No step waits for their machine, neither at once nor after `placement_timeout`."""
    backend = RayBackend(placement="PACK", **kind)
    with ParallelEnv([functools.partial(Slow, LENGTH)] * 2, True, 1, backend=backend, num_workers=2) as env:
        watched, pool = Watched(env), env.runner.pool
        backend._targets[1], backend._placement_timeout = "ff" * 28, 4.0
        pool.recycler.next_look = 0.0
        watched.step()
        (spare,) = {*pool._queues} - {0, 1}
        began = time.monotonic()
        pool._drop_spares(spare)
        assert time.monotonic() < began + 2
        for _ in range(5):
            pool.recycler.note_failed(pool.slots, began)  # so that no other one is tried for 16 s
        while time.monotonic() < began + 6:
            watched.step()
        assert {*pool._queues} == {0, 1}


class Hanging(Counting):
    """Hangs in its third step, unless it has been restarted."""

    def __init__(self, *, seed: int, restarts: int) -> None:
        super().__init__(40, seed=seed)
        self.hangs_at = 3 if restarts == 0 else None

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.steps + 1 == self.hangs_at:
            time.sleep(600)
        return super().step(actions)


@each_kind
def test_timeouts_while_another_node_does_not_answer(kind, three_nodes):
    """A machine that is stopped costs time, but what hangs elsewhere is ended."""
    nodes = dict.fromkeys(kind, 2)
    backend = RayBackend(num_cpus=CPUS_EACH, **nodes)
    options = {"on_error": "restart", "step_timeout": 2.0}
    with ParallelEnv([Hanging] * 2, True, 1, backend=backend, num_workers=2, **options) as env:
        env.reset()
        for _ in range(2):
            env.step([ACTIONS] * 2)
        stopped = backend._node_of[0].handle if kind else backend._actors[0].monitor
        pid = ray.get(stopped.__ray_call__.remote(lambda _: os.getpid()))
        env.send([ACTIONS] * 2)
        os.kill(pid, signal.SIGSTOP)
        try:
            batch = env.recv(1, timeout=120)
            assert batch.env_ids == (1,)
            assert "restarted" in batch.infos[0]["__common__"]
        finally:
            os.kill(pid, signal.SIGCONT)
        batch = env.recv(1, timeout=120)
        assert "restarted" in batch.infos[0]["__common__"]
        env.step([ACTIONS] * 2)


def test_other_backends_stay(parallel):
    assert parallel(functools.partial(Counting, LENGTH)).rebalance() == 0
