"""Workers that share the memory of their node of a Ray cluster: what travels, deaths, and what is left behind.

Equality with the other backends is tested with `pytest --setups=ray-nodes`.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import gone, wait_for
from helpers.ray_clusters import CPUS_EACH, NODES, RayClusters
from helpers.reference import Reference
from helpers.restart_comparison import actions_for, many_fates, play
from helpers.setups import Setup
from simulators.crashing import Children, crashing
from simulators.deterministic import Hunt, Skirmish
from simulators.failing import Fragile, hard_exit, killed_by

from marl_parallel import ParallelEnv, ParallelEnvError, RayBackend, WorkerCrashed
from marl_parallel.backends import ray_nodes
from marl_parallel.backends.ray_node import Results, pack
from marl_parallel.backends.ray_nodes import Node, RayNodesBackend
from marl_parallel.core.messages import Message, Reply, Request
from marl_parallel.core.records import RecordPlaces, RecordSlices

pytestmark = [pytest.mark.needs("ray"), pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")]


@pytest.fixture
def single_node(ray_clusters: RayClusters) -> None:
    """A cluster of one node."""
    ray_clusters.one_node()


@pytest.fixture
def three_nodes(ray_clusters: RayClusters) -> Any:
    """A cluster of three nodes without actors."""
    cluster = ray_clusters.three_nodes()
    assert wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH)
    return cluster


def pid_of(_: Any) -> int:
    return os.getpid()


def nodes_of(env: ParallelEnv) -> list[Node]:
    backend = env.runner.pool.backend
    assert isinstance(backend, RayNodesBackend)
    return [backend._node_of[worker] for worker in range(env.num_workers)]


def place_of(node: Node) -> str:
    """The id of a node in the cluster."""
    return ray.get(node.handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


def actions_of(make: Callable[..., Any], count: int, time_: int = 0) -> list[dict[Any, Any]]:
    """Actions for every agent of every environment."""
    rng = np.random.default_rng(time_)
    return [actions_for(make, rng) for _ in range(count)]


def marks_of(infos: tuple[dict, ...]) -> list[bool]:
    return ["restarted" in one.get("__common__", {}) for one in infos]


@pytest.mark.usefixtures("single_node")
def test_node_that_does_not_set_memory_aside_in_time(monkeypatch):
    """Construction ends with an error, not never, if a node is frozen then."""
    backend = RayBackend(num_cpus=0.5, num_nodes=1)
    control = Node.control

    def frozen(node: Node, method: str, *arguments: Any, **keywords: Any) -> Any:
        if method != "allocate":
            return control(node, method, *arguments, **keywords)
        backend._placement_timeout = 0.3
        return ray.remote(lambda: time.sleep(60)).options(num_cpus=0).remote()

    monkeypatch.setattr(Node, "control", frozen)
    with pytest.raises(ParallelEnvError, match=r"workers \[0, 1\], did not set memory aside within 0.3 s") as caught:
        ParallelEnv([Hunt] * 3, backend=backend, num_workers=2)
    assert caught.value.env_ids == (0, 1, 2)


# -- placement ---------------------------------------------------------------------------------------------------------


def test_workers_are_shared_out_to_nodes(three_nodes):
    with ParallelEnv([Skirmish] * 12, backend=RayBackend(num_nodes=3, workers_per_node=2)) as env:
        assert env.num_workers == 6
        nodes = nodes_of(env)
        assert nodes[0::2] == nodes[1::2]
        assert {place_of(node) for node in nodes[0::2]} == {
            node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")
        }
        assert len({*env.call(pid_of)}) == 6
        assert ray.available_resources().get("CPU", 0) == 0
    assert wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH)
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(workers_per_node=2), num_workers=3) as env:
        assert [node.bundle for node in nodes_of(env)] == [0, 0, 1]


def test_bad_numbers(single_node):
    for name in ("num_nodes", "workers_per_node"):
        with pytest.raises(ValueError, match=name):
            RayBackend(**{name: 0})
    with pytest.raises(ValueError, match=r"3 workers do not fit num_nodes=1 with workers_per_node=2"):
        ParallelEnv([Skirmish] * 3, backend=RayBackend(num_nodes=1, workers_per_node=2), num_workers=3)


def test_too_little_room(single_node):
    backend = RayBackend(num_cpus=3, num_nodes=2, workers_per_node=2, placement_timeout=0.5)
    with pytest.raises(ParallelEnvError, match=r"2 nodes want 6 CPU each, the 1 node has 8 CPU"):
        ParallelEnv([Skirmish] * 4, backend=backend)


def test_failing_runtime_env(single_node):
    backend = RayBackend(num_nodes=1, runtime_env={"working_dir": "s3://nowhere/nothing.zip"})
    with pytest.raises(ParallelEnvError, match="worker 0 could not be started by Ray"):
        ParallelEnv([Skirmish], backend=backend)


# -- what travels ------------------------------------------------------------------------------------------------------


def test_one_exchange_per_node_and_batch(single_node, monkeypatch, tmp_path):
    """One call and one array for all workers of a node; nothing pickled in a step without infos."""
    constructors = [functools.partial(Fragile, {}, tmp_path, length=4)] * 8
    with ParallelEnv(constructors, backend=RayBackend(num_cpus=0.5, num_nodes=2), num_workers=4) as env:
        env.reset()
        results: list[Results] = []
        unpack = ray_nodes.unpack

        def keeping(packed: Any) -> Results:
            results.append(unpack(packed))
            return results[-1]

        monkeypatch.setattr(ray_nodes, "unpack", keeping)
        orders = [node.orders for node in nodes_of(env)[0::2]]
        for _ in range(9):
            env.step([{"a": 0, "b": 0}] * 8)
        assert [node.orders - before for node, before in zip(nodes_of(env)[0::2], orders, strict=True)] == [9, 9]
        assert len(results) == 2 * 9
        for result in results:
            assert [reply for _, _, reply in result.replies] == [None, None]
            assert not result.statuses
            assert result.records is not None
            assert len(result.records) == 4
        sizes = {result.records.nbytes for result in results if result.records is not None}
        assert len(sizes) == 2  # last observations travel with the steps that end an episode, and with no others
        assert env.stats().steps == 8 * 9


def test_results_in_order_of_completion(single_node, tmp_path):
    """A slow worker delays neither the results of others on its node, nor what is sent to them meanwhile."""

    class Slow(Fragile):
        def step(self, actions: dict) -> tuple:
            time.sleep(0.5 if self.env_id == 1 else 0.0)
            return super().step(actions)

    def constructor(seed: int, env_id: int) -> Any:
        return Slow({}, tmp_path, 1000, seed=seed, env_id=env_id)

    with ParallelEnv([constructor] * 3, backend=RayBackend(num_cpus=0.5, num_nodes=1), num_workers=3) as env:
        env.reset()
        received: list[int] = []
        env.send([{"a": 0, "b": 0}] * 3)
        while 1 not in received:
            batch = env.recv(min_envs=1)
            received += batch.env_ids
            again = [env_id for env_id in batch.env_ids if env_id != 1]
            if again:
                env.send([{"a": 0, "b": 0}] * len(again), again)
        assert received.count(0) > 3
        assert received.count(2) > 3
        while env.pending:
            env.recv()


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "word"),
    [(hard_exit, "exit code 7"), (killed_by(signal.SIGSEGV), "SIGSEGV")],
    ids=["exit", "SIGSEGV"],
)
def test_error_names_the_running_environment(fault, word, single_node, tmp_path):
    constructors = [functools.partial(Fragile, {"step": fault} if i == 2 else {}, tmp_path) for i in range(4)]
    with ParallelEnv(constructors, backend=RayBackend(num_cpus=0.5, num_nodes=1), num_workers=2) as env:
        env.reset()
        with pytest.raises(WorkerCrashed, match=rf"died in step of environment 2.*{word}") as caught:
            env.step([{"a": 0, "b": 0}] * 4)
        assert (caught.value.env_ids, caught.value.worker) == ((2,), 1)
        assert caught.value.stack


def test_killed_worker(single_node):
    """Only its environments are restarted; the others, and those of other workers, equal the reference."""
    reference = Reference([Skirmish] * 4, AutoresetMode.SAME_STEP, 42)
    backend = RayBackend(num_cpus=0.5, num_nodes=1)
    with ParallelEnv([Skirmish] * 4, backend=backend, num_workers=2, on_error="restart") as env:
        assert_same(env.reset(), reference.reset())
        os.kill(env.call(pid_of)[2], signal.SIGKILL)
        marks = []
        for time_ in range(20):
            actions = actions_of(Skirmish, 4, time_)
            batch, expected = env.step(actions), reference.step(actions)
            for dicts, others in zip(batch, expected, strict=True):
                assert_same(dicts[:2], others[:2])
            marks.append(marks_of(batch[4]))
        assert [mark for mark in marks if any(mark)] == [[False, False, True, True]]


@pytest.mark.parametrize("end", ["node", "actor"])
def test_lost_node(end, three_nodes):
    """Its environments are restarted elsewhere, each counts once; the others equal the reference."""
    reference = Reference([Skirmish] * 6, AutoresetMode.SAME_STEP, 42)
    backend = RayBackend(num_cpus=0.5, num_nodes=3, workers_per_node=2, placement_timeout=300)
    with ParallelEnv([Skirmish] * 6, backend=backend, num_workers=6, on_error="restart") as env:
        assert_same(env.reset(), reference.reset())
        before, node = env.call(pid_of), nodes_of(env)[2]
        if end == "actor":
            ray.kill(node.handle)
        else:
            place = place_of(node)
            (doomed,) = (one for one in three_nodes.worker_nodes if one.node_id == place)
            three_nodes.remove_node(doomed, allow_graceful=False)
        marks, since, time_, deadline = [False] * 6, 0, 0, time.monotonic() + 300
        while since < 5:
            assert time.monotonic() < deadline
            actions = actions_of(Skirmish, 6, time_)
            batch, expected = env.step(actions), reference.step(actions)
            for dicts, others in zip(batch, expected, strict=True):
                assert_same([dicts[i] for i in (0, 1, 4, 5)], [others[i] for i in (0, 1, 4, 5)])
            new = marks_of(batch[4])
            assert not any(mark and known for mark, known in zip(new, marks, strict=True))
            marks = [mark or known for mark, known in zip(new, marks, strict=True)]
            since += any(marks)
            time_ += 1
        assert marks == [False, False, True, True, False, False]
        assert (env.stats().restarts, env.stats().faults) == (2, 2)
        after = env.call(pid_of)
        assert [old == new for old, new in zip(before, after, strict=True)] == [not mark for mark in marks]
    assert gone([*before, *after], 30)


def test_replies_of_a_replaced_process_keep_out_nothing_else():
    """Results that have travelled while another process got the number of their worker: only its own are left out."""
    backend = RayNodesBackend(num_nodes=1)
    block = bytearray(4 * 8)
    backend._slices = RecordSlices(
        RecordPlaces(num_records=4, stride=8, nbytes=32, transition_header=0, step_end=8), block
    )
    node = Node(MagicMock(), 0)
    node.started.update({0: 1, 2: 1})  # worker 0 has closed, and its number is that of other spares now
    node.pending = {0: deque(), 2: deque([Request(Message.ADOPT, (3,))])}
    backend._shares = {0: (2, 3), 2: (3,)}
    stepped, adopted = [Reply(message, (3,), {}, {}, 0.0) for message in (Message.STEP, Message.ADOPT)]
    records = np.repeat(np.array([[1], [2]], np.uint8), 8, axis=1)
    results = Results(
        1,
        0.0,
        [(0, 0, Reply(Message.CLOSE, None, {}, {}, 0.0)), (0, 0, stepped), (2, 1, adopted)],
        {},
        [(), (3,), (3,)],
        records,
        None,
    )
    replies = backend._receive_from(node, pack(results))
    assert [(worker, reply.message) for worker, reply in replies] == [(2, Message.ADOPT)]
    assert block == bytes(24) + bytes([2] * 8)


def test_order_of_replies_while_the_difference_of_clocks_becomes_known():
    """A slow result makes the difference seem larger; a later reply of the worker stays later."""
    backend, node = RayNodesBackend(num_nodes=1), Node(MagicMock(), 0)
    node.clock_offset, node.pending = 1000.0, {0: deque([Request(Message.STEP, (2, 0), each=True)])}
    backend._shares = {0: (0, 2)}
    moments = []
    for number, env_id in enumerate((2, 0), 1):
        reply = Reply(Message.STEP, (env_id,), {}, {}, 5.0 + number / 1000, last=env_id == 0)
        now = time.monotonic() - node.clock_offset + number
        packed = pack(Results(number, now, [(0, 0, reply)], {}, [()], None, None))
        ((_, received),) = backend._receive_from(node, packed)
        moments.append(received.completed)
    assert node.clock_offset < 999
    assert moments == sorted({*moments})


def test_restarts_equal_the_reference(single_node):
    """For every fault in every method: dicts, marks, seeds and counts are the same as with processes."""

    def build(constructors: list[Any], setup: Setup, mode: AutoresetMode, **more: Any) -> ParallelEnv:
        arguments = {**setup._asdict(), "backend": RayBackend(num_cpus=0.5, num_nodes=1), **more}
        return ParallelEnv(constructors, mode, **arguments)

    play(build, Setup("ray", True, 2), "skirmish", AutoresetMode.SAME_STEP, many_fates("SIGKILL", "os._exit"))


def test_children_end_with_their_simulator(single_node):
    children = Children(os.getpid())
    constructors = [crashing(Hunt, {}, started=children)] * 2
    backend = RayBackend(num_cpus=0.5, num_nodes=1)
    env = ParallelEnv(constructors, backend=backend, num_workers=2, on_error="restart")
    env.reset()
    assert wait_for(lambda: len(children.running()) == 4)
    os.kill(env.call(pid_of)[0], signal.SIGKILL)
    env.step(actions_of(Hunt, 2))
    assert wait_for(lambda: len(children.running()) == 4)  # the dead one's are gone, its successor's are there
    pids = env.call(pid_of)
    env.close()
    assert gone(pids)
    assert wait_for(lambda: not children.running())
