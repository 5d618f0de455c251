"""Workers on the nodes of a Ray cluster: placement, transfer, deaths, connecting to clusters and shutting down.

Equality with the other backends is tested with `pytest --setups=ray`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from helpers.batches import grouped_actions, same
from helpers.comparison import assert_same
from helpers.owners import give_away, has_owners
from helpers.processes import gone, wait_for
from helpers.ray_clusters import CPUS_EACH, NODES, RayClusters
from helpers.reference import Reference
from helpers.restart_comparison import actions_for, many_fates, play
from helpers.setups import Setup
from helpers.signals import SIGKILL
from mpe2 import simple_tag_v3
from simulators.crashing import Children, crashing
from simulators.deterministic import Hunt, Skirmish
from simulators.failing import Fragile, hang, hard_exit, killed_by

from marl_parallel import EnvError, ParallelEnv, ParallelEnvError, RayBackend, RecyclePolicy, Rollout, WorkerCrashed
from marl_parallel.backends import ray_cluster, ray_exchange
from marl_parallel.backends.ray_actor import ActorResults
from marl_parallel.backends.ray_exchange import ActorState
from marl_parallel.backends.ray_placement import Placement
from marl_parallel.core.spaces import tree_map
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
    return bool(wait_for(lambda: ray.available_resources().get("CPU") == NODES * CPUS_EACH, timeout=60))


def node_of(_: Any) -> str:
    return os.environ["RAY_NODE_ID"]


def pid_of(_: Any) -> int:
    return os.getpid()


def actors_of(env: ParallelEnv) -> list[ActorState]:
    """The actor of each worker."""
    backend = env.stepper.source.backend
    assert isinstance(backend, RayBackend)
    actors = [backend._workers.actor_of(worker) for worker in range(env.num_workers)]
    return [actor for actor in actors if actor is not None]


def actions_of(make: Callable[..., Any], count: int, time_: int = 0) -> list[dict[Any, Any]]:
    """Actions for every agent of every environment."""
    rng = np.random.default_rng(time_)
    return [actions_for(make, rng) for _ in range(count)]


def marks_of(infos: tuple[dict, ...]) -> list[bool]:
    return ["restarted" in one.get("__common__", {}) for one in infos]


# -- placement ---------------------------------------------------------------------------------------------------------


def test_placement(three_nodes):
    """An actor has all workers of its node, unless there is a limit; workers know their node."""
    nodes = {node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")}
    with ParallelEnv([Skirmish] * 12, backend="ray") as env:
        assert env.num_workers == NODES * CPUS_EACH
        places = env.call(node_of)
        assert places[0::2] == places[1::2]  # two environments in a worker
        assert len({*zip(places[0::2], actors_of(env), strict=True)}) == len(nodes) == len({*actors_of(env)})
        assert {*places} == nodes
        assert len({*env.call(pid_of)}) == 6
        assert ray.available_resources().get("CPU", 0) == 0
    assert all_free()
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(), num_workers=3) as env:
        assert [len({*env.call(node_of)}), len({*actors_of(env)})] == [2, 2]
    assert all_free()
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(placement="SPREAD"), num_workers=3) as env:
        assert {*env.call(node_of)} == nodes
    assert all_free()
    with ParallelEnv([Skirmish] * 2, backend=RayBackend(workers_per_node=1), num_workers=2) as env:
        assert [len({*env.call(node_of)}), len({*actors_of(env)})] == [1, 2]
    assert all_free()
    with ParallelEnv([Skirmish] * 4, backend=RayBackend(num_cpus=2)) as env:
        assert len({*env.call(node_of)}) == env.num_workers == 3


def test_workers_that_take_no_cpus(three_nodes):
    """They start although all CPUs are set aside; also those of `recycle=` and the replacements of dead ones."""
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(num_cpus=2), num_workers=3):
        assert ray.available_resources().get("CPU", 0) == 0
        backend = RayBackend(num_cpus=0, placement="SPREAD")
        arguments = {"seed": 1, "on_error": "restart", "recycle": RecyclePolicy(max_episodes=1)}
        with ParallelEnv([Skirmish] * 3, backend=backend, num_workers=3, **arguments) as env:
            assert len({*env.call(node_of)}) == 3
            env.reset()
            os.kill(env.call(pid_of)[1], signal.SIGKILL)
            assert wait_for(lambda: env.step(actions_of(Skirmish, 3)) and env.stats().restarts == 1, timeout=60)
            assert wait_for(lambda: env.step(actions_of(Skirmish, 3)) and env.stats().recycled >= 3, timeout=60)
    assert all_free()
    with ParallelEnv([Skirmish] * 9, backend=RayBackend(num_cpus=0)) as env:
        assert env.num_workers == 6
    with ParallelEnv([Skirmish] * 9, backend=RayBackend(num_cpus=0), num_workers=9) as env:
        assert len({*actors_of(env)}) == len({*env.call(node_of)}) >= 3


def test_gpus_of_workers(single_node):
    """Each worker sees its own; those of an actor see all of the actor."""

    def seen(workers_per_node: int | None) -> set[str]:
        backend = RayBackend(resources={"GPU": 1}, workers_per_node=workers_per_node)
        with ParallelEnv([Skirmish] * 2, backend=backend) as env:
            return {*env.call(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])}

    assert seen(None) == {"0", "1"}
    assert seen(2) == {"0,1"}


def identity(_: object) -> tuple[str, tuple[int, ...], bool]:
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    return process.name, process._identity, parent is not None and parent.is_alive()


def test_identity_of_workers(three_nodes):
    """In `multiprocessing`; also on different nodes, no two have the same."""
    with ParallelEnv([Skirmish] * 4, backend=RayBackend(placement="SPREAD"), num_workers=4) as env:
        names, numbers, alive = zip(*env.call(identity), strict=True)
        assert len({*names}) == len({*numbers}) == 4
        assert all(alive)
        assert names[0] == f"ParallelEnvWorker-{':'.join(map(str, numbers[0]))}"


# -- too few CPUs, and unreachable clusters ---------------------------------------------------------------------------


def test_too_little_room(single_node):
    backend = RayBackend(num_cpus=3, resources={"licence": 1}, placement_timeout=0.5)
    with pytest.raises(ParallelEnvError) as caught:
        ParallelEnv([Skirmish] * 4, backend=backend, num_workers=4)
    message = str(caught.value)
    assert "4 workers want 3 CPU, 1 licence each, the 1 node has 8 CPU (8 free), 0 licence (0 free)" in message
    with pytest.raises(ParallelEnvError, match="3 workers want 3 CPU each, with 3 in an actor, the 1 node has 8 CPU"):
        ParallelEnv([Skirmish] * 3, backend=RayBackend(num_cpus=3, workers_per_node=3, placement_timeout=0.5))
    with ParallelEnv([Skirmish] * 2, backend="ray", num_workers=2) as env:  # no resources are reserved
        env.reset()


def test_slow_start(single_node, monkeypatch):
    """There is room, so the error does not ask for more nodes."""
    reserve = Placement.reserve

    def reserve_and_hurry(placement, count):
        places = reserve(placement, count)
        placement.timeout = 0.01
        return places

    monkeypatch.setattr(Placement, "reserve", reserve_and_hurry)
    with pytest.raises(ParallelEnvError, match=r"within 0\.01 s: Ray has set aside what it needs") as caught:
        ParallelEnv([Skirmish], backend="ray", num_workers=1)
    assert "Raise RayBackend(placement_timeout=)" in str(caught.value)
    assert "Add nodes" not in str(caught.value)


def test_actor_that_does_not_set_memory_aside_in_time(single_node, monkeypatch):
    """Construction ends with an error, not never, if a node is frozen then."""
    backend = RayBackend()
    control = ActorState.control

    def frozen(actor: ActorState, method: str, *arguments: Any, **keywords: Any) -> Any:
        if method != "allocate":
            return control(actor, method, *arguments, **keywords)
        backend._placement.timeout = 0.3
        return ray.remote(lambda: time.sleep(60)).options(num_cpus=0).remote()

    monkeypatch.setattr(ActorState, "control", frozen)
    with pytest.raises(ParallelEnvError, match=r"workers \[0, 1\], did not allocate memory within 0.3 s") as caught:
        ParallelEnv([Hunt] * 3, backend=backend, num_workers=2)
    assert caught.value.env_ids == (0, 1, 2)


def test_no_room_for_a_replacement(three_nodes):
    """Each node has room for one worker; when a node is removed, there is none left for the replacement."""
    backend = RayBackend(num_cpus=2, placement_timeout=60)
    with ParallelEnv([Skirmish] * 3, backend=backend, num_workers=3, on_error="restart") as env:
        env.reset()
        backend._placement.timeout = 5.0
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
    assert ray_cluster._announced() is None


@has_owners
@pytest.mark.parametrize("listens", [True, False])
def test_address_file_of_another_user(listens, ray_clusters, monkeypatch, tmp_path, caplog):
    """Its cluster is not used, since everybody can make that file in /tmp, and a cluster runs code in its programs."""
    ray_clusters.shut_down()
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray" / "ray_current_cluster"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if listens else 1}"
        file.write_text(f"{address}\n")
        assert ray_cluster._announced() == (address if listens else None)
        give_away(file, monkeypatch)
        assert ray_cluster._announced() is None
        (warning,) = caplog.messages
        assert f"names the Ray cluster at {address}, which is not used, since the file belongs to the user" in warning
        with pytest.raises(ConnectionError, match="no Ray cluster runs on this machine"):
            ray_cluster.connect("auto")
        file.write_text("\x1b[2J")
        assert ray_cluster._announced() is None
        assert "\x1b" not in caplog.text
    file.unlink()
    os.mkfifo(file)
    assert ray_cluster._announced() is None


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
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"num_threads": 1.5}, "num_threads"),
        ({"placement_timeout": "x"}, "placement_timeout"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, word):
    with pytest.raises(ValueError, match=word):
        RayBackend(**arguments)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="needs Linux on this machine and on all nodes, and this is darwin"):
        RayBackend()


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


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_stacked_arrays_and_rollouts_equal_serial_ones(mode, single_node):
    constructors = [functools.partial(simple_tag_v3.parallel_env, max_cycles=9)] * 3
    marks = ("present", "present_next", "acting", "terminated", "truncated", "done", "final_observations")
    with (
        StackedVecEnv(ParallelEnv(constructors, mode, 5, backend=RayBackend(workers_per_node=1), num_workers=2)) as env,
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


@pytest.mark.usefixtures("single_node")
def test_rollouts_collected_ahead():
    """The data are those of "serial", a run goes on from saved states, and the thread ends when all is closed."""

    def opened(backend: Any) -> StackedVecEnv:
        makers = [functools.partial(simple_tag_v3.parallel_env, max_cycles=9)] * 3
        return StackedVecEnv(ParallelEnv(makers, seed=5, backend=backend, num_workers=2))

    class Policy:
        calls = 0

        def __call__(self, current: Any) -> Any:
            self.calls += 1
            return grouped_actions(env, np.random.default_rng(self.calls))

    policy = Policy()
    with opened("serial") as env:
        rollout = Rollout(env, 10)
        wanted = [tree_map(np.array, tuple(rollout.collect(policy))[:6]) for _ in range(4)]
    policy = Policy()
    with opened(RayBackend(workers_per_node=1)) as env:
        with Rollout(env, 10).ahead(policy, publish=int) as rollouts:
            found = [tree_map(np.array, tuple(next(rollouts))[:6]) for _ in range(2)]
            states, policy.calls = rollouts.save_state(), 30
            env.close()
            with pytest.raises(ClosedEnvironmentError):
                next(rollouts)
        assert not [thread for thread in threading.enumerate() if thread.name == "ahead"]
    with opened(RayBackend(workers_per_node=1)) as env:
        rollout = Rollout(env, 10)
        rollout.load_state(states)
        with rollout.ahead(policy, publish=int, rollouts=2) as rollouts:
            found += [tree_map(np.array, tuple(data)[:6]) for data in rollouts]
    assert same(tuple(found), tuple(wanted))


@pytest.mark.parametrize(("workers_per_node", "on_error"), [(None, "raise"), (1, "restart")])
def test_one_exchange_per_actor_and_batch(workers_per_node, on_error, single_node, monkeypatch, tmp_path):
    """One call and one array for all workers of an actor; nothing pickled in a step without infos."""
    constructors = [functools.partial(Fragile, {}, tmp_path, length=4)] * 8
    backend = RayBackend(workers_per_node=workers_per_node)
    with ParallelEnv(constructors, backend=backend, num_workers=4, on_error=on_error) as env:
        env.reset()
        results: list[ActorResults] = []
        unpack = ray_exchange.unpack

        def keeping(packed: Any) -> ActorResults:
            results.append(unpack(packed))
            return results[-1]

        monkeypatch.setattr(ray_exchange, "unpack", keeping)
        actors = [*dict.fromkeys(actors_of(env))]
        each = 4 // len(actors)
        assert len(actors) == (1 if workers_per_node is None else 4)
        orders = [actor.orders for actor in actors]
        for _ in range(9):
            env.step([{"a": 0, "b": 0}] * 8)
        assert [actor.orders - before for actor, before in zip(actors, orders, strict=True)] == [9] * len(actors)
        assert len(results) == 9 * len(actors)
        for result in results:
            assert [None if reply is None else reply.results or None for _, _, reply in result.replies] == [None] * each
            assert not result.statuses
            assert result.records is not None
            assert result.records.dtype == np.uint8
            assert result.records.flags.c_contiguous
            assert len(result.records) == 2 * each
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

    with ParallelEnv([constructor] * 3, backend="ray", num_workers=3) as env:
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


def test_killed_actor(single_node):
    with ParallelEnv([Skirmish] * 4, backend=RayBackend(workers_per_node=1), num_workers=2) as env:
        env.reset()
        ray.kill(actors_of(env)[1].handle)
        with pytest.raises(WorkerCrashed, match=r"worker 1 \(environments 2 to 3\) died: .*ray\.kill") as caught:
            wait_for(lambda: env.step(actions_of(Skirmish, 4)) and False, timeout=60)  # Ray does not kill at once
        assert caught.value.env_ids == (2, 3)


def test_removed_node_with_on_error_raise(three_nodes):
    with ParallelEnv([Skirmish] * 3, backend=RayBackend(placement="SPREAD"), num_workers=3) as env:
        env.reset()
        nodes = env.call(node_of)
        (doomed,) = (node for node in three_nodes.worker_nodes if node.node_id == nodes[2])
        three_nodes.remove_node(doomed, allow_graceful=False)
        with pytest.raises(WorkerCrashed, match=r"worker 2 \(environment 2\) died") as caught:
            wait_for(lambda: env.step(actions_of(Skirmish, 3)) and False, timeout=60)
        assert caught.value.env_ids == (2,)


@pytest.mark.parametrize(("end", "num_cpus"), [("node", 1), ("actor", 0.5)])
def test_lost_actor(end, num_cpus, three_nodes):
    """Its environments are restarted, each counts once; the others equal the reference.

    Of the lost node, two workers go to different nodes, since each has room for one more.
    """
    reference = Reference([Skirmish] * 4, AutoresetMode.SAME_STEP, 42)
    backend = RayBackend(num_cpus=num_cpus, placement="SPREAD", placement_timeout=300)
    with ParallelEnv([Skirmish] * 4, backend=backend, num_workers=4, on_error="restart") as env:
        assert_same(env.reset(), reference.reset())
        before, nodes, actors = env.call(pid_of), env.call(node_of), actors_of(env)
        assert len({*nodes}) == len({*actors}) == 3
        (fullest,) = (node for node, count in Counter(nodes).items() if count == 2)
        doomed_ids = [env_id for env_id in range(4) if nodes[env_id] == fullest]
        others = [env_id for env_id in range(4) if nodes[env_id] != fullest]
        if end == "actor":
            ray.kill(actors[doomed_ids[0]].handle)
        else:
            (doomed,) = (one for one in three_nodes.worker_nodes if one.node_id == fullest)
            three_nodes.remove_node(doomed, allow_graceful=False)
        marks, since, time_, deadline = [False] * 4, 0, 0, time.monotonic() + 300
        while since < 5:
            assert time.monotonic() < deadline
            actions = actions_of(Skirmish, 4, time_)
            batch, expected = env.step(actions), reference.step(actions)
            for dicts, references in zip(batch, expected, strict=True):
                assert_same([dicts[i] for i in others], [references[i] for i in others])
            new = marks_of(batch[4])
            assert not any(mark and known for mark, known in zip(new, marks, strict=True))
            marks = [mark or known for mark, known in zip(new, marks, strict=True)]
            since += any(marks)
            time_ += 1
        assert [env_id for env_id, mark in enumerate(marks) if mark] == doomed_ids
        assert (env.stats().restarts, env.stats().faults) == (2, 2)
        after = env.call(pid_of)
        assert [old == new for old, new in zip(before, after, strict=True)] == [not mark for mark in marks]
        places = env.call(node_of)
        assert [places[i] for i in others] == [nodes[i] for i in others]
        assert {places[i] for i in doomed_ids} == ({fullest} if end == "actor" else {nodes[i] for i in others})
        assert len({*actors_of(env)}) == (3 if end == "actor" else 4)
    assert gone([*before, *after], 30)


@pytest.mark.parametrize(
    ("fault", "word"),
    [(hard_exit, "exit code 7"), (killed_by(SIGKILL), "SIGKILL"), (killed_by(signal.SIGSEGV), "SIGSEGV")],
    ids=["exit", "SIGKILL", "SIGSEGV"],
)
def test_error_names_the_running_environment(fault, word, single_node, tmp_path):
    constructors = [functools.partial(Fragile, {"step": fault} if i == 2 else {}, tmp_path) for i in range(4)]
    with ParallelEnv(constructors, backend="ray", num_workers=2) as env:
        env.reset()
        with pytest.raises(WorkerCrashed, match=rf"died in step of environment 2.*{word}") as caught:
            env.step([{"a": 0, "b": 0}] * 4)
        assert (caught.value.env_ids, caught.value.worker) == ((2,), 1)
        assert ("test_ray_backend" in caught.value.stack or "failing.py" in caught.value.stack) == (word != "SIGKILL")


def test_killed_worker(single_node):
    """Only its environments are restarted; the others, and those of other workers, equal the reference."""
    reference = Reference([Skirmish] * 4, AutoresetMode.SAME_STEP, 42)
    with ParallelEnv([Skirmish] * 4, backend="ray", num_workers=2, on_error="restart") as env:
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


def test_results_before_a_death_are_returned(single_node, tmp_path):
    """Of a worker with four environments, the first two had stepped: their results arrive with infos."""

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


@pytest.mark.parametrize("end", ["timeout", "actor"])
def test_results_that_have_not_arrived(end, single_node, tmp_path):
    """Environment 1 hangs in the automatic reset. The caller's side still has the results of the step before."""
    ids, actions = [0, 1], [{"a": 0, "b": 0}] * 2
    constructors = [functools.partial(Fragile, {"reset": hang} if i else {}, tmp_path, 1, 3) for i in ids]
    limit = 2.0 if end == "timeout" else None
    with ParallelEnv(constructors, backend="ray", num_workers=1, on_error="restart", reset_timeout=limit) as env:
        env.reset()
        for _ in range(2):
            env.step(actions)
        env.send(actions, ids)
        results = [*zip(*env.recv(1, timeout=60), strict=True)]
        if end == "actor":
            with pytest.raises(TimeoutError):
                env.recv(1, timeout=2.0)  # it learns what the worker is doing
            ray.kill(actors_of(env)[0].handle)
        if len(results) == 1:
            results += zip(*env.recv(1, timeout=60), strict=True)
        assert sorted(env_id for env_id, *_ in results) == ids
        for env_id, _, rewards, terminateds, truncateds, infos in results:
            agents, was_lost = ["a", "b", "__all__"], env_id == 1
            assert ("__common__" in infos) == was_lost
            assert rewards == dict.fromkeys("ab", 0.0 if was_lost else 1.0)
            assert terminateds == dict.fromkeys(agents, not was_lost)
            assert truncateds == dict.fromkeys(agents, True) | ({} if was_lost else {"__all__": False})
            assert_same(infos["a"]["final_obs"], np.full(3, 2 if was_lost else 3, np.float32))
        env.step(actions)
        assert (env.stats().restarts, env.stats().faults) == (2, 1 if end == "timeout" else 2)


@pytest.mark.parametrize(("ways", "workers_per_node"), [(("SIGKILL", "os._exit"), None), (("raise", "SIGSEGV"), 1)])
def test_restarts_equal_the_reference(ways, workers_per_node, single_node):
    """For every fault in every method: dicts, marks, seeds and counts are the same as with processes."""

    def build(constructors: list[Any], setup: Setup, mode: AutoresetMode, **more: Any) -> ParallelEnv:
        backend = RayBackend(workers_per_node=workers_per_node)
        return ParallelEnv(constructors, mode, **{**setup._asdict(), "backend": backend, **more})

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


class Preloaded(Skirmish):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.pids = os.getpid(), getattr(sys.modules.get(name), "PID", None)


def test_each_worker_imports_the_modules_of_preload(
    ray_clusters: RayClusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first constructor; a module that fails is an error with its traceback."""
    ray_clusters.one_node()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "preloaded_by_ray.py").write_text("import os\nPID = os.getpid()")
    (tmp_path / "fails_in_ray.py").write_text("raise ValueError('no licence')")
    constructors = [functools.partial(Preloaded, "preloaded_by_ray")] * 2
    with ParallelEnv(constructors, backend="ray", num_workers=2, preload=["preloaded_by_ray"]) as env:
        pids = env.get_attr("pids")
    assert [imported_by for _, imported_by in pids] == [pid for pid, _ in pids]
    with pytest.raises(EnvError, match=r"raised in preload, at line 1 of .*fails_in_ray\.py: ValueError: no licence"):
        ParallelEnv(constructors, backend="ray", num_workers=2, preload=["fails_in_ray"])
