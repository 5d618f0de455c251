"""Workers that move to other nodes of a Ray cluster before their own goes."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest
import ray
from helpers.processes import wait_for
from helpers.ray_clusters import CPUS_EACH, NODES, RayClusters
from ray._private import worker as ray_worker
from ray.core.generated import autoscaler_pb2
from simulators.counting import ACTIONS, Counting

from marl_parallel import ParallelEnv, RayBackend, RecyclePolicy
from marl_parallel.backends import ray_backend
from marl_parallel.core.messages import Message, Request

pytestmark = [pytest.mark.needs("ray"), pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")]
LENGTH = 5


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
        """Step until a condition on the set of nodes holds; not during the steps of a standby that is not up yet."""
        assert wait_for(lambda: self.step() or nodes(nodes_of(self.env)), timeout=90)


def node_of(_: Any) -> str:
    return os.environ["RAY_NODE_ID"]


def nodes_of(env: ParallelEnv) -> set[str]:
    """The nodes that environments are on."""
    return {*env.call(node_of)}


def drain(node: str) -> None:
    """Announce that a node goes within ten minutes."""
    deadline = int((time.time() + 600) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = ray_worker.global_worker.gcs_client.drain_node(node, reason, "the machine is taken away", deadline)
    assert accepted, why


def remove(cluster: Any, node: str) -> None:
    """Remove a node that takes nothing any more."""
    (doomed,) = (one for one in cluster.worker_nodes if one.node_id == node)
    cluster.remove_node(doomed)


@pytest.mark.parametrize(("workers_per_node", "recycle"), [(None, 2), (1, None)])
def test_announced_end_of_a_node(workers_per_node, recycle, three_nodes):
    """Its environments move where their episodes end; then the machine goes, and nobody notices.

    With `recycle=`, others may be there already to take their places: on the same node, so that they are of no use.
    """
    backend = RayBackend(workers_per_node=workers_per_node)
    policy = recycle and RecyclePolicy(max_episodes=recycle)
    options = {"num_workers": 2, "on_error": "restart", "recycle": policy}
    with ParallelEnv([functools.partial(Slow, LENGTH)] * 4, "SAME_STEP", 1, backend=backend, **options) as env:
        (node,) = nodes_of(env)
        watched = Watched(env)
        for _ in range(3):
            watched.step()
        drain(node)
        watched.step_until(lambda nodes: node not in nodes)
        (doomed,) = (one for one in three_nodes.worker_nodes if one.node_id == node)
        three_nodes.remove_node(doomed, allow_graceful=False)
        for _ in range(3 * LENGTH):
            watched.step()
        stats = env.stats()
        assert (stats.restarts, stats.faults) == (0, 0)
        assert stats.recycled >= 4 if recycle else stats.recycled == 4
        assert len({*env.seed()}) == 4


def test_announced_end_if_no_node_has_room_for_all(three_nodes):
    """Two workers of an actor move to two nodes, with room for one each."""
    options = {"backend": RayBackend(placement="SPREAD"), "num_workers": 4, "on_error": "restart"}
    with ParallelEnv([functools.partial(Slow, LENGTH)] * 4, "SAME_STEP", 1, **options) as env:
        before = env.call(node_of)
        (fullest,) = (node for node, count in Counter(before).items() if count == 2)
        drain(fullest)
        Watched(env).step_until(lambda nodes: fullest not in nodes)
        after = env.call(node_of)
        assert sorted(Counter(after).values()) == [2, 2]
        assert [old == new for old, new in zip(before, after, strict=True)] == [node != fullest for node in before]
        assert (env.stats().recycled, env.stats().faults) == (2, 0)
    remove(three_nodes, fullest)


def test_node_that_joins_late(three_nodes, caplog):
    """Environments of a lost node wait for room longer than `start_timeout`; they are restarted once, on a new node."""
    constructors = [functools.partial(Counting, LENGTH)] * 6
    backend = RayBackend(placement_timeout=120)
    options = {"on_error": "restart", "start_timeout": 4.0, "warn_after": 2.0}
    with ParallelEnv(constructors, "SAME_STEP", 1, backend=backend, num_workers=6, **options) as env:
        before = env.call(node_of)
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
        assert "the cluster may lack free resources" in caplog.text
        after = env.call(node_of)
        assert [old != new for old, new in zip(before, after, strict=True)] == lost
        assert {*after} - {*before} <= {one.node_id for one in three_nodes.worker_nodes}


def test_no_room_elsewhere(three_nodes, caplog):
    """Environments stay on a node that will shut down until there is room on another one, and the batch goes on."""
    backend = RayBackend()
    with ParallelEnv([functools.partial(Slow, LENGTH)] * 2, True, 1, backend=backend, num_workers=2) as env:
        nodes = env.call(node_of)
        others = ray.util.placement_group([{"CPU": CPUS_EACH}] * (NODES - 1))
        assert others.wait(30)
        watched = Watched(env)
        backend._placement.timeout = 3.0
        drain(nodes[0])
        assert wait_for(lambda: watched.step() or "could not build replacements" in caplog.text, timeout=60)
        assert env.call(node_of) == nodes
        assert {record.levelname for record in caplog.records} == {"WARNING"}
        for _ in range(2 * LENGTH):
            watched.step()
        backend._placement.timeout = 60.0
        ray.util.remove_placement_group(others)
        watched.step_until(lambda present: nodes[0] not in present)
        assert env.stats().faults == 0
    remove(three_nodes, nodes[0])


def test_worker_that_is_dropped_before_there_is_room(three_nodes):
    """Nobody waits for its machine, neither at once nor after `placement_timeout`, and its resources are free."""
    backend = RayBackend(num_cpus=CPUS_EACH)
    backend.start([range(1)], 1)
    node = backend._workers.node_of(0)
    try:
        others = ray.util.placement_group([{"CPU": CPUS_EACH}] * (NODES - 1))
        assert others.wait(30)
        drain(node)
        backend._placement.timeout = 1.0
        backend.start_worker(1, (0,), 0)
        backend.post({1: Request(Message.CLOSE)})
        assert backend.wait(0.1) == []
        began = time.monotonic()
        assert backend.remove(1, kill=True)
        assert time.monotonic() < began + 2
        backend.post({0: Request(Message.CLOSE)})
        while time.monotonic() < began + 1.5:
            assert all(worker == 0 for worker, _ in backend.wait(0.1))
        states = [one["state"] for one in ray.util.placement_group_table().values()]
        assert states.count("CREATED") == 2
        assert "PENDING" not in states
        ray.util.remove_placement_group(others)
    finally:
        backend.stop(1.0)
        remove(three_nodes, node)


class Hanging(Counting):
    """Hangs in its third step, unless it has been restarted."""

    def __init__(self, *, seed: int, restarts: int) -> None:
        super().__init__(40, seed=seed)
        self.hangs_at = 3 if restarts == 0 else None

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.steps + 1 == self.hangs_at:
            time.sleep(600)
        return super().step(actions)


def test_timeouts_while_another_node_does_not_answer(three_nodes, monkeypatch):
    """A machine that is stopped costs time, but what hangs elsewhere is ended."""
    monkeypatch.setattr(ray_backend, "_ENDS_WITHIN_S", 5.0)
    backend = RayBackend(num_cpus=CPUS_EACH)
    options = {"on_error": "restart", "step_timeout": 2.0}
    with ParallelEnv([Hanging] * 2, True, 1, backend=backend, num_workers=2, **options) as env:
        env.reset()
        for _ in range(2):
            env.step([ACTIONS] * 2)
        actor = backend._workers.actor_of(0)
        assert actor is not None
        pid = ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()))
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
