"""`unity`: the arguments of `UnityEnvironment`, and a player in another process that speaks Unity's protocol.

What steps mean is tested in `test_mlagents`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import gone
from helpers.setups import Setup
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig, EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.raw_bytes_channel import RawBytesChannel
from simulators.crashing import seed_of
from simulators.mlagents_arena import MAX_STEPS, Arena, BareCopy, BareReference, actions_for, arena, each_mode
from simulators.unity_player import player_script

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import adapt
from marl_parallel.adapters.mlagents import unity

pytestmark = pytest.mark.needs("mlagents_envs")


@pytest.fixture
def base_port() -> int:
    """A port with a few free ports from there on, and from 1000 above it."""
    rng = random.Random()
    while True:
        base = rng.randrange(10_000, 30_000)
        if all(is_free(base + offset) for offset in (0, 1, 2, 1000, 1001, 1002)):
            return base


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind(("::", port))
        except OSError:
            return False
        return True


def test_player_in_another_process(backend_setup, build, tmp_path, base_port):
    """Equal to the arena in a plain loop; the player ends with the environment."""
    make = unity(
        player_script(tmp_path), base_port=base_port, engine={"time_scale": 20.0}, max_steps=MAX_STEPS, timeout_wait=30
    )
    reference = BareReference(Arena, 2, AutoresetMode.SAME_STEP, MAX_STEPS)
    for one in reference.copies:
        one.env.parameters["time_scale"] = 20.0
    rng, options = random.Random(2), {"wind": 0.5}
    # Close Unity after any failure: otherwise its library blocks the interpreter's exit.
    with build([make] * 2, backend_setup) as env:
        assert_same(env.reset(options=options), reference.reset(options=options))
        for _ in range(MAX_STEPS + 6):
            actions = actions_for(reference.acting, rng)
            assert_same(env.step(actions), reference.step(actions))
        players = {int(path.name): int(path.read_text()) for path in tmp_path.iterdir() if path.name.isdigit()}
        assert {*players} == {base_port, base_port + 1}
    assert gone(players.values())


@each_mode
def test_player_that_dies_is_replaced_on_another_port(mode, build, tmp_path, base_port):
    make = unity(
        player_script(tmp_path),
        base_port=base_port,
        max_steps=MAX_STEPS,
        timeout_wait=30,
        additional_args=["--breaks-at-port", str(base_port + 1)],
    )
    env = build([make] * 2, Setup("process", True, 2), mode, on_error="restart")
    reference = BareReference(Arena, 2, mode, MAX_STEPS)
    rng = random.Random(2)
    assert_same(env.reset(), reference.reset())
    for _ in range(3):
        actions = actions_for(reference.acting, rng)
        assert_same(env.step(actions), reference.step(actions))
    actions = actions_for(reference.acting, rng)
    got, expected = env.step(actions), reference.step(actions)
    assert_same([one[0] for one in got], [one[0] for one in expected])
    assert "Environment shut down with return code 9" in got[4][1]["__common__"]["error"]
    assert (tmp_path / str(base_port + 1001)).exists()
    fresh = BareCopy(Arena, 1, seed_of(42, 1, 1), mode, MAX_STEPS)
    if mode is AutoresetMode.SAME_STEP:
        assert_same(got[0][1], fresh.reset()[0])
    else:
        result = env.reset(env_ids=[1]) if mode is AutoresetMode.DISABLED else env.step([{}], env_ids=[1])
        assert_same((result[0][0], result[-1][0]), fresh.reset())
    for _ in range(5):
        (actions,) = actions_for([fresh.acting], rng)
        assert_same(tuple(one[0] for one in env.step([actions], env_ids=[1])), fresh.step(actions))
    assert env.stats().restarts == 1


def test_players_end_with_their_worker(build, tmp_path, base_port):
    """Their replacements use other ports; nothing of the old ones is left."""
    make = unity(player_script(tmp_path), base_port=base_port, max_steps=MAX_STEPS, timeout_wait=30)
    env = build([make] * 2, Setup("process", True, 1), on_error="restart")
    env.reset()
    old = [int((tmp_path / str(port)).read_text()) for port in (base_port, base_port + 1)]
    psutil.Process(old[0]).parent().kill()
    _, _, _, truncateds, infos = env.step(actions_for(env.acting, random.Random(0)))
    assert [flags["__all__"] for flags in truncateds] == [True, True]
    assert all(info["__common__"]["restarted"] for info in infos)
    assert gone(old)
    assert all((tmp_path / str(port)).exists() for port in (base_port + 1000, base_port + 1001))
    for _ in range(3):
        env.step(actions_for(env.acting, random.Random(0)))


class FakeUnityEnvironment(Exception):
    """Records its arguments in place of a `UnityEnvironment`."""


@pytest.fixture
def unity_arguments(monkeypatch) -> Callable[..., dict[str, Any]]:
    """The arguments that a constructor made by `unity` passes to `UnityEnvironment`."""
    import mlagents_envs.environment

    class Refusing(mlagents_envs.environment.UnityEnvironment):
        def __init__(self, file_name, **arguments):
            raise FakeUnityEnvironment({"file_name": file_name, **arguments})

    monkeypatch.setattr(mlagents_envs.environment, "UnityEnvironment", Refusing)

    def ask(make: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
        with pytest.raises(FakeUnityEnvironment) as caught:
            make(**keywords)
        return caught.value.args[0]

    return ask


def test_ports_of_restarts(unity_arguments):
    """Different from the previous life's and from other environments'."""
    make = unity("game", base_port=6000)
    seen: dict[int, list[int]] = {
        env_id: [unity_arguments(make, seed=0, env_id=env_id, restarts=n)["worker_id"] for n in range(200)]
        for env_id in (0, 1, 999)
    }
    assert [ids[0] for ids in seen.values()] == [0, 1, 999]
    for ids in seen.values():
        assert all(one != other for one, other in itertools.pairwise(ids))
        assert all(6000 + one < 2**16 for one in ids)
    assert len({*seen[0]} | {*seen[1]} | {*seen[999]}) == sum(len({*ids}) for ids in seen.values())


def test_arguments_passed_to_unity(unity_arguments):
    config = EngineConfig(80, 60, 1, 10.0, None, None)
    own = RawBytesChannel(uuid.uuid4())
    passed = unity_arguments(
        unity("game", engine=config, no_graphics=True, side_channels=[own]), seed=2**31 + 5, env_id=2, restarts=0
    )
    *others, engine, parameters = passed.pop("side_channels")
    assert passed == {"file_name": "game", "worker_id": 2, "base_port": None, "seed": 5, "no_graphics": True}
    assert others == [own]
    assert len(engine.message_queue) == 3
    assert parameters.message_queue == []
    assert unity_arguments(unity(None), seed=0, env_id=0, restarts=3)["worker_id"] == 0
    assert len(unity_arguments(unity("game", side_channels=None), seed=0, env_id=0)["side_channels"]) == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"seed": 3}, TypeError, r"takes no seed, as each environment has its own: pass ParallelEnv\(seed=...\)"),
        ({"worker_id": 3}, TypeError, "takes no worker_id, as each environment has its own: pass base_port"),
        ({"side_channels": [EnvironmentParametersChannel()]}, ValueError, r"own: pass reset\(options=...\)"),
        ({"side_channels": [EngineConfigurationChannel()]}, ValueError, "own: pass engine="),
    ],
)
def test_arguments_per_environment(arguments, kind, message):
    with pytest.raises(kind, match=message):
        unity("game", **arguments)


def test_player_that_exits_at_once_leaves_nothing(tmp_path, base_port):
    """Neither its port nor its threads: it can be started again in the same process."""
    player = tmp_path / "player"
    player.write_text("#!/bin/sh\nexit 3\n")
    player.chmod(0o755)
    threads = threading.active_count()
    for _ in range(2):
        with pytest.raises(EnvError, match="return code 3"):
            ParallelEnv([unity(str(player), base_port=base_port, timeout_wait=10)], backend="serial")
    assert is_free(base_port)
    deadline = time.monotonic() + 10.0
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)  # gRPC's end by and by
    assert threading.active_count() <= threads


def test_editor_supports_one_environment(build):
    with pytest.raises(EnvError, match=r"If the environment name is None, the worker-id must be 0"):
        ParallelEnv([lambda: None, unity(None)], backend="serial", adapter=lambda env: arena(0) if env is None else env)


# Missing files and libraries


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ModuleNotFoundError("No module named 'mlagents_envs'"), "No module named 'mlagents_envs'"),
        (
            TypeError("Descriptors cannot be created directly.\nIf this call came from"),
            "Descriptors cannot be created directly.",
        ),
        (AttributeError("module 'numpy' has no attribute 'bool'"), "module 'numpy' has no attribute 'bool'"),
    ],
    ids=["package", "protobuf", "numpy"],
)
def test_failures_are_reported_in_one_line(error, detail, monkeypatch):
    real = importlib.import_module

    def failing(name: str, package: str | None = None) -> Any:
        if name.startswith("mlagents_envs"):
            raise error
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", failing)
    for use in (lambda: unity("game"), lambda: adapt(Arena())):
        with pytest.raises(ImportError) as caught:
            use()
        assert str(caught.value) == (
            "ML-Agents needs mlagents-envs>=0.28 with protobuf<3.21 and numpy>=2: "
            f'pip install "marl-parallel[mlagents]", or in a checkout: pip install -e ".[mlagents]" ({detail})'
        )


def test_missing_file(build):
    with pytest.raises(EnvError, match="Couldn't launch the nowhere environment"):
        ParallelEnv([unity("nowhere", base_port=20_000 + os.getpid() % 10_000)], backend="serial")
