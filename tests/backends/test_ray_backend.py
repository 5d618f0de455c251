"""Workers in Ray actors: placement, transfer, deaths, connecting to clusters and shutting down.

Equality with the other backends is tested with `pytest --setups=ray`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium.vector import AutoresetMode
from helpers.batches import grouped_actions, same
from helpers.comparison import assert_same
from helpers.processes import gone, wait_for
from helpers.ray_clusters import CPUS_EACH, NODES, RayClusters
from helpers.reference import Reference, ReferenceEnv
from helpers.restart_comparison import actions_for, many_fates, play
from helpers.setups import Setup
from mpe2 import simple_tag_v3
from simulators.crashing import Children, crashing
from simulators.deterministic import Hunt, Skirmish
from simulators.failing import Fragile, hard_exit, killed_by

from marl_parallel import ParallelEnv, ParallelEnvError, RayBackend, RecyclePolicy, Rollout, WorkerCrashed
from marl_parallel.backends import ray_backend
from marl_parallel.backends.ray_worker import Result, exitcode_of
from marl_parallel.vector import StackedVecEnv

pytestmark = [pytest.mark.needs("ray"), pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")]


@pytest.fixture
def single_node(ray_clusters: RayClusters) -> None:
    """A cluster of one node."""
    ray_clusters.one_node()


@pytest.fixture
def three_nodes(ray_clusters: RayClusters) -> Any:
    """A cluster of three nodes without actors."""
    cluster = ray_clusters.three_nodes()
    assert all_free()
    return cluster


def all_free() -> bool:
    return bool(wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH))


def node_of(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def pid_of(_: Any) -> int:
    return os.getpid()


def actor_of(env: ParallelEnv, worker: int) -> Any:
    """The handle of a worker's actor."""
    backend = env.runner.pool.backend
    assert isinstance(backend, RayBackend)
    return backend._actors[worker].handle


def actions_of(make: Callable[..., Any], count: int, time_: int = 0) -> list[dict[Any, Any]]:
    """Actions for every agent of every environment."""
    rng = np.random.default_rng(time_)
    return [actions_for(make, rng) for _ in range(count)]


# -- placement ---------------------------------------------------------------------------------------------------------


def test_spread_and_pack_placement(three_nodes):
    with ParallelEnv([Skirmish] * 6, backend="ray", num_workers=3) as env:
        nodes = env.call(node_of)
        assert nodes[0::2] == nodes[1::2]  # two environments to an actor
        assert {*nodes} == {node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")}
    assert all_free()
    with ParallelEnv([Skirmish] * 4, backend=RayBackend(placement="PACK"), num_workers=2) as env:
        assert len({*env.call(node_of)}) == 1
    assert all_free()
    with ParallelEnv([Skirmish] * 2, backend=RayBackend(num_cpus=2, placement="PACK"), num_workers=2) as env:
        assert len({*env.call(node_of)}) == 2  # there is no room for both on one


@pytest.mark.parametrize("nodes", [{}, {"num_nodes": 3}], ids=str)
def test_workers_that_take_no_cpus(nodes, three_nodes):
    """They start although all CPUs are set aside; also the spares of `recycle=` and the replacements of dead ones."""
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(num_cpus=2), num_workers=3):
        assert ray.available_resources().get("CPU", 0) == 0
        backend = RayBackend(num_cpus=0, **nodes)
        arguments = {"seed": 1, "on_error": "restart", "recycle": RecyclePolicy(max_episodes=1)}
        with ParallelEnv([Skirmish] * 3, backend=backend, num_workers=3, **arguments) as env:
            first = env.call(node_of) if not nodes else []
            assert len({*first}) == (0 if nodes else 3)
            env.reset()
            os.kill(env.call(pid_of)[1], signal.SIGKILL)
            assert wait_for(lambda: env.step(actions_of(Skirmish, 3)) and env.stats().restarts == 1, timeout=60)
            assert wait_for(lambda: env.step(actions_of(Skirmish, 3)) and env.stats().recycled >= 3, timeout=60)
    assert all_free()
    with ParallelEnv([Skirmish] * 9, backend=RayBackend(num_cpus=0)) as env:
        assert env.num_workers == 6


def identity(_: object) -> tuple[str, tuple[int, ...], bool]:
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    return process.name, process._identity, parent is not None and parent.is_alive()


@pytest.mark.parametrize("nodes", [{}, {"num_nodes": 3}], ids=str)
def test_identity_of_workers(nodes, three_nodes):
    """In `multiprocessing`; also on different nodes, no two have the same."""
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(**nodes), num_workers=3) as env:
        names, numbers, alive = zip(*env.call(identity), strict=True)
        assert len({*names}) == len({*numbers}) == 3
        assert all(alive)
        assert names[0] == f"ParallelEnvWorker-{':'.join(map(str, numbers[0]))}"


def test_default_number_of_workers_is_the_clusters_cpus(three_nodes):
    with ParallelEnv([Skirmish] * 8, backend="ray") as env:
        assert env.num_workers == 6
    with ParallelEnv([Skirmish] * 8, backend=RayBackend(num_cpus=2)) as env:
        assert env.num_workers == 3


def test_removed_node(three_nodes):
    """The batch continues on other nodes; other trajectories equal the reference before and after."""
    constructors = [Skirmish] * 3
    with ParallelEnv(constructors, "SAME_STEP", backend="ray", num_workers=3, on_error="restart") as env:
        nodes = env.call(node_of)
        alone = [ReferenceEnv(make, i, 42 + i, AutoresetMode.SAME_STEP) for i, make in enumerate(constructors)]
        assert_same(env.reset(), tuple(zip(*(one.reset() for one in alone), strict=True)))
        (doomed,) = (node for node in three_nodes.worker_nodes if node.node_id == nodes[1])
        three_nodes.remove_node(doomed, allow_graceful=False)
        marks, since, time_, deadline = 0, 0, 0, time.monotonic() + 60
        while since < 10:  # steps after the mark; the node's processes do not end at once
            assert time.monotonic() < deadline
            since += marks
            actions = actions_of(Skirmish, 3, time_)
            batch = env.step(actions)
            for i in (0, 2):
                expected = alone[i].step(actions[i])
                assert_same(tuple(dicts[i] for dicts in batch), expected, f"environment {i}, step {time_}")
            marks += "error" in batch[4][1].get("__common__", {})
            time_ += 1
        assert marks == 1
        fresh = env.call(node_of)
        assert fresh[0::2] == nodes[0::2]
        assert fresh[1] in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert (env.stats().restarts, env.stats().faults) == (1, 1)  # also if Ray tries that node again


def test_removed_node_with_on_error_raise(three_nodes):
    with ParallelEnv([Skirmish] * 3, backend="ray", num_workers=3) as env:
        env.reset()
        nodes = env.call(node_of)
        (doomed,) = (node for node in three_nodes.worker_nodes if node.node_id == nodes[2])
        three_nodes.remove_node(doomed, allow_graceful=False)
        with pytest.raises(WorkerCrashed, match=r"worker 2 \(environment 2\) died") as caught:
            wait_for(lambda: env.step(actions_of(Skirmish, 3)) and False, timeout=60)
        assert caught.value.env_ids == (2,)


# -- too few CPUs, and unreachable clusters ---------------------------------------------------------------------------


def test_too_little_room(single_node):
    backend = RayBackend(num_cpus=3, resources={"licence": 1}, placement_timeout=0.5)
    with pytest.raises(ParallelEnvError) as caught:
        ParallelEnv([Skirmish] * 4, backend=backend, num_workers=4)
    message = str(caught.value)
    assert "4 workers want 3 CPU, 1 licence each" in message
    assert "8 CPU (8 free), 0 licence (0 free)" in message
    with ParallelEnv([Skirmish] * 2, backend="ray", num_workers=2) as env:  # no resources are reserved
        env.reset()


@pytest.mark.parametrize("arguments", [{}, {"num_nodes": 1}])
def test_slow_start(arguments, single_node, monkeypatch):
    """There is room, so the error does not ask for more nodes."""
    backend = RayBackend(**arguments)
    reserve = backend._reserve

    def reserve_and_hurry(*reserved):
        reserve(*reserved)
        backend._placement_timeout = 0.01

    monkeypatch.setattr(backend, "_reserve", reserve_and_hurry)
    with pytest.raises(ParallelEnvError, match=r"within 0\.01 s: Ray has set aside what it needs") as caught:
        ParallelEnv([Skirmish], backend=backend, num_workers=1)
    assert "Raise RayBackend(placement_timeout=)" in str(caught.value)
    assert "Add nodes" not in str(caught.value)


def test_no_room_for_a_replacement(three_nodes):
    """Each node has room for one worker; when a node is removed, there is none left for the replacement."""
    backend = RayBackend(num_cpus=2, placement_timeout=60)
    with ParallelEnv([Skirmish] * 3, backend=backend, num_workers=3, on_error="restart") as env:
        env.reset()
        backend._placement_timeout = 5.0
        nodes = env.call(node_of)
        (doomed,) = (node for node in three_nodes.worker_nodes if node.node_id == nodes[1])
        three_nodes.remove_node(doomed, allow_graceful=False)
        with pytest.raises(
            ParallelEnvError, match=r"worker 1 could not be replaced within 5 s: it wants 2 CPU,"
        ) as caught:
            wait_for(lambda: env.step(actions_of(Skirmish, 3)) and False, timeout=60)
        assert "nodes have 4 CPU (0 free) together. Add nodes" in str(caught.value)
        assert (caught.value.worker, caught.value.env_ids) == (1, (1,))
    assert not ray.util.placement_group_table() or {
        one["state"] for one in ray.util.placement_group_table().values()
    } == {"REMOVED"}


def test_unreachable_address(ray_clusters):
    ray_clusters.shut_down()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    before = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"no Ray cluster can be reached at {address}"):
        ParallelEnv([Skirmish] * 2, backend=RayBackend(address))
    assert time.monotonic() - before < 60
    assert not ray.is_initialized()


def test_cluster_that_wants_a_token(ray_clusters, monkeypatch):
    ray_clusters.shut_down()

    def refused(**_: Any) -> None:
        raise ray.exceptions.AuthenticationError("the token is missing")

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ray, "init", refused)
        with pytest.raises(ConnectionError, match=r"the token is missing.*\. .*set RAY_AUTH_MODE=token"):
            ParallelEnv([Skirmish] * 2, backend=RayBackend(f"127.0.0.1:{server.getsockname()[1]}"))


def test_unreachable_address_in_the_environment(ray_clusters, monkeypatch):
    """An explicit cluster is never replaced by a local one."""
    ray_clusters.shut_down()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=rf"no Ray cluster can be reached at {address}"):
        ParallelEnv([Skirmish] * 2, backend="ray")
    assert not ray.is_initialized()


def test_stale_address_file(ray_clusters, monkeypatch, tmp_path):
    """Written by `ray start` of a cluster that has stopped: a new one is started."""
    ray_clusters.shut_down()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_backend._announced() is None


def test_second_cluster_is_refused(single_node):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1'.*is connected to the Ray cluster at .* already"):
        ParallelEnv([Skirmish] * 2, backend=RayBackend("127.0.0.1:1"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"placement": "NEAR"}, "SPREAD, PACK"),
        ({"num_cpus": -1}, "CPU"),
        ({"num_cpus": "two"}, "CPU"),
        ({"resources": {"GPU": -1}}, "GPU"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 1.5}, "num_threads"),
        ({"placement_timeout": "x"}, "placement_timeout"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, word):
    with pytest.raises(ValueError, match=word):
        RayBackend(**arguments)


def test_ray_client_is_refused(ray_clusters):
    ray_clusters.shut_down()
    with pytest.raises(ValueError, match="Ray Client"):
        ParallelEnv([Skirmish] * 2, backend=RayBackend("ray://127.0.0.1:10001"))


def test_failing_runtime_env(single_node):
    with pytest.raises(ParallelEnvError, match="worker 0 could not be started by Ray"):
        ParallelEnv([Skirmish], backend=RayBackend(runtime_env={"working_dir": "s3://nowhere/nothing.zip"}))


# -- who connects, and who ends what -----------------------------------------------------------------------------------


def test_own_cluster_is_stopped(ray_clusters):
    ray_clusters.shut_down()
    first = ParallelEnv([Skirmish] * 2, backend="ray", num_workers=2)
    assert ray.is_initialized()
    second = ParallelEnv([Skirmish] * 2, backend="ray", num_workers=1)
    first.close()
    second.reset()
    second.close()
    assert not ray.is_initialized()


def test_existing_cluster_keeps_running(three_nodes):
    ray.shutdown()
    with ParallelEnv([Skirmish] * 2, backend=RayBackend(three_nodes.address)) as env:
        env.reset()
    assert not ray.is_initialized()
    ray.init(address=three_nodes.address, log_to_driver=False)
    with ParallelEnv([Skirmish] * 2, backend="ray") as env:
        env.reset()
    assert ray.is_initialized()
    assert all_free()


def test_workers_that_need_more_cpus_than_the_machine_has(ray_clusters):
    ray_clusters.shut_down()
    count = (os.cpu_count() or 1) + 2
    with ParallelEnv([Skirmish] * count, backend="ray", num_workers=count) as env:
        assert len({*env.call(pid_of)}) == count


def test_runtime_env_reaches_the_workers(single_node):
    backend = RayBackend(runtime_env={"env_vars": {"TRACK": "sand"}})
    with ParallelEnv([Skirmish], backend=backend) as env:
        assert env.call(lambda _: os.environ["TRACK"]) == ("sand",)


def test_ray_shutdown_by_the_user(ray_clusters):
    ray_clusters.one_node()
    env = ParallelEnv([Skirmish] * 2, backend="ray", num_workers=2)
    env.reset()
    ray_clusters.shut_down()
    with pytest.raises(WorkerCrashed, match="Ray has been shut down"):
        env.step(actions_of(Skirmish, 2))
    env.close()
    assert not ray.is_initialized()


# -- what travels ------------------------------------------------------------------------------------------------------


class Counted:
    """Counts calls to workers and records the replies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        self.results: list[Result] = []
        send, unpack = RayBackend._send, ray_backend.unpack

        def counting(backend: RayBackend, *arguments: Any) -> None:
            self.sent += 1
            send(backend, *arguments)

        def keeping(packed: Any) -> Result:
            self.results.append(unpack(packed))
            return self.results[-1]

        monkeypatch.setattr(RayBackend, "_send", counting)
        monkeypatch.setattr(ray_backend, "unpack", keeping)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_stacked_arrays_and_rollouts_equal_serial_ones(mode, single_node):
    constructors = [functools.partial(simple_tag_v3.parallel_env, max_cycles=9)] * 3
    marks = ("present", "present_next", "acting", "terminated", "truncated", "done", "final_observations")
    with (
        StackedVecEnv(ParallelEnv(constructors, mode, 5, backend="ray", num_workers=2)) as env,
        StackedVecEnv(ParallelEnv(constructors, mode, 5, backend="serial")) as serial,
    ):
        assert same(env.reset()[0], serial.reset()[0])
        for step in range(20):
            actions = grouped_actions(env, np.random.default_rng(step))
            assert same(env.step(actions)[:4], serial.step(actions)[:4])
            assert all(same(getattr(env, mark), getattr(serial, mark)) for mark in marks)
        stored = []
        for one in (env, serial):
            rng = np.random.default_rng(1)
            stored.append(Rollout(one, 20).collect(lambda _, one=one, rng=rng: grouped_actions(one, rng)))
        assert stored[0].done.any()
        for field, actual, expected in zip(stored[0]._fields, *stored, strict=True):
            assert same(actual, expected), field


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_one_round_trip_per_actor_and_batch(on_error, single_node, monkeypatch, tmp_path):
    """One call and one array for all environments of an actor; nothing else if infos are empty."""
    constructors = [functools.partial(Fragile, {}, tmp_path, length=4)] * 8
    with ParallelEnv(constructors, backend="ray", num_workers=2, on_error=on_error) as env:
        env.reset()
        counted = Counted(monkeypatch)
        for _ in range(9):
            env.step([{"a": 0, "b": 0}] * 8)
        assert counted.sent == len(counted.results) == 2 * 9
        for result in counted.results:
            (reply,) = result.replies
            assert not reply.results
            assert result.records is not None
            assert result.records.dtype == np.uint8
            assert result.records.flags.c_contiguous
            assert len(result.records) == 4
        sizes = {result.records.nbytes for result in counted.results if result.records is not None}
        assert len(sizes) == 2  # last observations travel with the steps that end an episode, and with no others


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_killed_actor(single_node):
    with ParallelEnv([Skirmish] * 4, backend="ray", num_workers=2) as env:
        env.reset()
        ray.kill(actor_of(env, 1))
        with pytest.raises(WorkerCrashed, match=r"worker 1 \(environments 2 to 3\) died: .*ray\.kill") as caught:
            step_often(env)  # Ray does not kill at once
        assert caught.value.env_ids == (2, 3)


def step_often(env: ParallelEnv) -> None:
    for time_ in range(300):
        env.step(actions_of(Skirmish, 4, time_))


def test_killed_actor_with_restarts(single_node):
    reference = Reference([Skirmish] * 4, AutoresetMode.SAME_STEP, 42)
    with ParallelEnv([Skirmish] * 4, backend="ray", num_workers=2, on_error="restart") as env:
        assert_same(env.reset(), reference.reset())
        ray.kill(actor_of(env, 1))
        marks = []
        for time_ in range(300):  # Ray does not kill at once
            actions = actions_of(Skirmish, 4, time_)
            batch, expected = env.step(actions), reference.step(actions)
            for dicts, others in zip(batch, expected, strict=True):
                assert_same(dicts[:2], others[:2])
            marks.append(["restarted" in infos.get("__common__", {}) for infos in batch[4]])
            if [False, False, True, True] in marks[:-10]:
                break
        assert [mark for mark in marks if any(mark)] == [[False, False, True, True]]


@pytest.mark.parametrize(
    ("fault", "word"),
    [(hard_exit, "exit code 7"), (killed_by(signal.SIGKILL), "SIGKILL"), (killed_by(signal.SIGSEGV), "SIGSEGV")],
    ids=["exit", "SIGKILL", "SIGSEGV"],
)
def test_error_names_the_running_environment(fault, word, single_node, tmp_path):
    constructors = [functools.partial(Fragile, {"step": fault} if i == 2 else {}, tmp_path) for i in range(4)]
    with ParallelEnv(constructors, backend="ray", num_workers=2) as env:
        env.reset()
        with pytest.raises(WorkerCrashed, match=rf"died in step of environment 2.*{word}") as caught:
            env.step([{"a": 0, "b": 0}] * 4)
        assert caught.value.env_ids == (2,)
        assert ("test_ray_backend" in caught.value.stack or "failing.py" in caught.value.stack) == (word != "SIGKILL")


def test_exit_code_of_a_process_that_is_reaped_late():
    """Ray reaps workers, possibly late; until then the exit code is unknown."""
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(7)"])
    handle = os.pidfd_open(process.pid)
    wait([handle])
    threading.Timer(0.3, process.wait).start()
    assert exitcode_of(handle) == 7
    os.close(handle)


def test_results_before_a_death_are_returned(single_node, tmp_path):
    """Of an actor with four environments, the first two had stepped: their results arrive with infos."""

    class Talking(Fragile):
        def step(self, actions: dict) -> tuple:
            *dicts, infos = super().step(actions)
            return (*dicts, {**infos, "a": {"steps": self.steps, "env_id": self.env_id}})

    def constructor(fault: Callable[[], Any] | None, **given: Any) -> Any:
        return Talking({"step": fault} if fault else {}, tmp_path, 2, **given)

    constructors = [
        functools.partial(lambda seed, env_id, fault: constructor(fault, seed=seed, env_id=env_id), fault=fault)
        for fault in (None, None, hard_exit, None)
    ]
    with ParallelEnv(constructors, backend="ray", num_workers=1, on_error="restart") as env:
        env.reset()
        for _ in range(2):
            env.step([{"a": 0, "b": 0}] * 4)
        _, _, _, truncateds, infos = env.step([{"a": 0, "b": 0}] * 4)
        assert [one["__all__"] for one in truncateds] == [False, False, True, True]
        assert [one.get("a") for one in infos[:2]] == [{"steps": 3, "env_id": i} for i in range(2)]
        assert ["__common__" in one for one in infos] == [False, False, True, True]


@pytest.mark.parametrize("ways", [("SIGKILL", "os._exit"), ("raise", "SIGSEGV")], ids="-".join)
def test_restarts_equal_the_reference(ways, single_node):
    """For every fault in every method: dicts, marks, seeds and counts are the same as with processes."""

    def build(constructors: list[Any], setup: Setup, mode: AutoresetMode, **more: Any) -> ParallelEnv:
        return ParallelEnv(constructors, mode, **{**setup._asdict(), **more})

    play(build, Setup("ray", True, 2), "skirmish", AutoresetMode.SAME_STEP, many_fates(*ways))


def test_children_end_with_their_simulator(single_node):
    children = Children(os.getpid())
    constructors = [crashing(Hunt, {}, started=children)] * 2
    env = ParallelEnv(constructors, backend="ray", num_workers=2, on_error="restart")
    env.reset()
    assert wait_for(lambda: len(children.running()) == 4)
    os.kill(env.call(pid_of)[0], signal.SIGKILL)
    env.step(actions_of(Hunt, 2))
    assert wait_for(lambda: len(children.running()) == 4)  # the dead one's are gone, its successor's are there
    pids = env.call(pid_of)
    env.close()
    assert gone(pids)
    assert wait_for(lambda: not children.running())
