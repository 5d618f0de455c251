"""`replay=`: each failure has a file, from which it happens again at the same step."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.owners import give_away, has_owners
from helpers.setups import BACKEND_SETUPS, TWO_WORKERS, Setup, rest
from pettingzoo.utils import parallel_to_aec
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing, seed_of
from simulators.failing import Fragile, SimulatorError
from simulators.seeded_faults import Tank, TankDicts

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, RestartPolicy, WorkerCrashed, WorkerTimeout, make
from marl_parallel.cli.replay import Outcome, replay
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.replay_file import Crash, read_crash
from marl_parallel.vector import StackedVecEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

APART, PACKED = Setup("process", True, 2), Setup("process", True, 1)
SETUPS = [*TWO_WORKERS, PACKED]
RAY = [setup for setup in BACKEND_SETUPS if setup.backend == "ray"]
MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
COMBINATIONS = [
    pair if pair[0] is APART or pair[1] == "SAME_STEP" else rest(*pair) for pair in itertools.product(SETUPS, MODES)
]
REPLACED = [one for one in COMBINATIONS if getattr(one, "values", one)[0].backend in ("process", "portable", "ray")]
NO_LIMIT = RestartPolicy(rate_limit=None)
COMMAND = re.compile(r"Replay it with: marl-parallel replay (\S+)")


def turn_based() -> Any:
    return parallel_to_aec(Tank())


KINDS = {"parallel": (Tank, None), "dict": (TankDicts, None), "turns": (turn_based, "aec-turn-based")}


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.fixture
def again(capsys) -> Callable[[Path], tuple[Outcome, str]]:
    """Replays a file; returns the outcome and all that was printed."""

    def run(path: Path, **options: Any) -> tuple[Outcome, str]:
        capsys.readouterr()
        outcome = replay(path, **{"debugger": False, "until": None, "timeout": None, "in_process": True, **options})
        printed = capsys.readouterr()
        return outcome, printed.out + printed.err

    return run


def draw(rng: np.random.Generator, acting: Sequence[Sequence[Any]]) -> list[dict[Any, int]]:
    return [{agent: int(rng.integers(3)) for agent in agents} for agents in acting]


def play(env: ParallelEnv, steps: int, seed: int = 0) -> list[str]:
    """Random steps; episodes that are over begin again by `reset` where they do not by themselves. Returns reports."""
    rng, reports = np.random.default_rng(seed), []
    env.reset()
    for _ in range(steps):
        *_, terminated, truncated, infos = env.step(draw(rng, env.acting))
        reports += [info["__common__"]["error"] for info in infos if "error" in info.get("__common__", {})]
        over = [i for i in range(env.num_envs) if terminated[i]["__all__"] or truncated[i]["__all__"]]
        if env.stepper.transitions.mode is AutoresetMode.DISABLED and over:
            infos = env.reset(env_ids=over)[1]
            reports += [info["__common__"]["error"] for info in infos if "error" in info.get("__common__", {})]
    return reports


def file_of(report: str) -> Path:
    (path,) = COMMAND.findall(report)
    return Path(path)


def same(report: str, again: Callable[..., tuple[Outcome, str]]) -> Crash:
    """Check that the failure of a report happens again: the same error, with the same level, at the same step."""
    path = file_of(report)
    crash = read_crash(path)
    outcome, printed = again(path)
    (level,) = {*re.findall(r"overflow at [\d.]+", report)}
    assert outcome is Outcome.SAME_STEP, printed
    where = f"step {crash.step}" if crash.step else "the reset that begins the episode"
    assert f"failed with SimulatorError: {level} again at the same step: {where}\n" in printed
    return crash


@pytest.mark.in_turn
@pytest.mark.parametrize(("setup", "mode"), COMBINATIONS, ids=str)
def test_each_restart_has_a_file(setup, mode, build, again, tmp_path, caplog):
    how: dict[str, Any] = {
        "on_error": "restart",
        "restart_policy": NO_LIMIT,
        "replay": 50,
        "replay_dir": tmp_path / "new" / "folder",
    }
    env = build([Tank] * 4, setup, mode, **how)
    reports = play(env, 60)
    files = {file_of(report) for report in reports}
    assert len(files) == len(reports) == env.stats().faults >= 5
    assert {*(tmp_path / "new" / "folder").iterdir()} == files
    assert {*map(Path, COMMAND.findall(caplog.text))} == files
    crashes = [same(report, again) for report in reports]
    assert {crash.env_id for crash in crashes} > {0}
    assert any(crash.restarts for crash in crashes)
    assert any(crash.number for crash in crashes)
    assert not any(path.stat().st_mode & 0o077 for path in files)


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", [Setup("serial", True, 2), rest(APART), rest(Setup("process", False, 2))], ids=str)
def test_raised_error_names_a_file(setup, kind, mode, build, again, tmp_path):
    constructor, adapter = KINDS[kind]
    episodes = set()
    for seed in range(4):
        env = build([constructor] * 2, setup, mode, seed, adapter=adapter, replay=50, replay_dir=tmp_path)
        with pytest.raises(EnvError) as caught:
            play(env, 600, seed)
        crash = same(str(caught.value), again)
        episodes.add(crash.number)
        assert (crash.mode, crash.restarts) == (mode, 0)
    assert max(episodes) > 0  # also in a later episode
    assert len([*tmp_path.iterdir()]) == 4


@pytest.mark.in_turn
@pytest.mark.parametrize(("setup", "mode"), REPLACED, ids=str)
def test_recycled_environments(setup, mode, build, again, tmp_path):
    """A standby has its own seeds; the failures of one that is only a standby have no file."""
    how: dict[str, Any] = {"on_error": "restart", "restart_policy": NO_LIMIT, "replay": 50, "replay_dir": tmp_path}
    env = build([Tank] * 4, setup, mode, recycle=RecyclePolicy(max_episodes=2), **how)
    reports = play(env, 60)
    stats = env.stats()
    assert stats.recycled >= 10
    assert len(reports) == stats.faults >= 5
    crashes = [same(report, again) for report in reports]
    assert {crash.restarts for crash in crashes} > {0}
    assert {crash.number for crash in crashes} >= {0, 1}  # more beside neighbours with long episodes


@pytest.mark.parametrize("setup", [Setup("serial", True, 2), PACKED, *RAY], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_requested_restarts(setup, mode, build, again, tmp_path):
    env = build([Tank] * 4, setup, mode, replay=50, replay_dir=tmp_path)
    env.reset()
    env.step(draw(np.random.default_rng(0), env.acting))
    env.restart([1, 2])
    with pytest.raises(EnvError) as caught:
        play(env, 300)
    crash = same(str(caught.value), again)
    assert crash.restarts == (crash.env_id in (1, 2))


def test_python_codec(build, again, tmp_path, monkeypatch):
    monkeypatch.setattr("marl_parallel.core.worker.worker.open_codec", lambda *args, **kwargs: None)
    env = build([Tank] * 2, Setup("serial", True, 1), replay=50, replay_dir=tmp_path)
    with pytest.raises(EnvError) as caught:
        play(env, 300)
    same(str(caught.value), again)


@pytest.mark.parametrize("setup", [APART, Setup("thread", True, 2), *RAY], ids=str)
def test_send_and_recv(setup, build, again, tmp_path):
    how: dict[str, Any] = {"on_error": "restart", "restart_policy": NO_LIMIT, "replay": 50, "replay_dir": tmp_path}
    env = build([Tank] * 4, setup, **how)
    rng, reports = np.random.default_rng(0), []
    env.reset_async()
    for _ in range(120):
        batch = env.recv(min_envs=1)
        reports += [info["__common__"]["error"] for info in batch.infos if "error" in info.get("__common__", {})]
        acting = env.acting
        env.send(draw(rng, [acting[env_id] for env_id in batch.env_ids]), batch.env_ids)
    assert len(reports) >= 3
    assert any(crash.number for crash in [same(report, again) for report in reports])


def test_array_actions(build, again, tmp_path):
    env = build([Tank] * 2, APART, replay=50, replay_dir=tmp_path)
    stacked, rng = StackedVecEnv(env), np.random.default_rng(0)
    stacked.reset()
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        for _ in range(300):
            stacked.step(rng.integers(3, size=(2, 2)))
    same(str(caught.value), again)


def overdrawn(prices: np.ndarray, limits: np.ndarray, level: float) -> None:
    prices += 1
    assert not limits.flags.writeable
    raise SimulatorError(f"overflow at {float(level + prices.mean() + limits.mean())!r}")


@pytest.mark.parametrize("setup", [APART, Setup("serial", True, 2)], ids=str)
def test_large_arrays_of_constructors(setup, build, again, tmp_path):
    """They travel apart from the rest of a constructor, but the file has them, as they were then."""
    prices, limits = np.full(50_000, 1000.0), np.full(50_000, 2000.0)
    limits.flags.writeable = False
    constructors = [functools.partial(Tank, functools.partial(overdrawn, prices, limits))] * 2
    how: dict[str, Any] = {"replay": 50, "replay_dir": tmp_path}
    env = build(constructors, setup, on_error="restart", restart_policy=NO_LIMIT, **how)
    other = build(constructors, setup, **how)
    prices[:] = -5000
    reports = play(env, 60)
    with pytest.raises(EnvError) as caught:
        play(other, 60)
    env.close()
    reports.append(str(caught.value))
    assert len(reports) >= 3
    for report in reports:
        (level,) = {*re.findall(r"overflow at ([\d.]+)", report)}
        assert 3006 < float(level) < 3016
        same(report, again)


def test_seeds_and_options_of_resets(build, again, tmp_path):
    env = build([Tank] * 2, APART, "DISABLED", replay=50, replay_dir=tmp_path)
    env.reset()
    env.reset(seed=[7, None], options={"level": 2.5})
    env.reset(env_ids=[0], options={"level": 4.9})
    with pytest.raises(EnvError) as caught:
        env.step([dict.fromkeys(ACTIONS, 2)] * 2)
    crash = same(str(caught.value), again)
    assert (crash.env_id, crash.seed, crash.number, crash.step) == (0, 7, 1, 1)


@pytest.mark.parametrize(
    ("place", "step", "words"),
    [("step", 3, "step 3"), ("reset", 0, "the reset that begins the episode"), ("automatic", 2, "step 2")],
)
def test_place_of_the_failure(place, step, words, build, again, tmp_path):
    """A failure in an automatic reset counts for the step that ended the episode."""
    fate = Fate("raise", "step", 2) if place == "step" else Fate("raise", "reset", 1 if place == "automatic" else 0)
    constructor = crashing(lambda seed: Counting(2 if place == "automatic" else None, seed=seed), {(1, 0): fate})
    env = build([constructor] * 2, APART, replay=9, replay_dir=tmp_path)
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        env.reset()
        for _ in range(3):
            env.step([ACTIONS] * 2)
    outcome, printed = again(file_of(str(caught.value)))
    assert outcome is Outcome.SAME_STEP
    assert read_crash(file_of(str(caught.value))).step == step
    assert f"again at the same step: {words}\n" in printed


def test_render(build, again, tmp_path):
    env = build([Tank] * 2, APART, "DISABLED", replay=50, replay_dir=tmp_path)
    env.reset(options={"level": 5.0})
    with pytest.raises(EnvError, match="cannot draw 5") as caught:
        env.render()
    assert again(file_of(str(caught.value)))[0] is Outcome.SAME_STEP


@pytest.mark.parametrize("setup", [APART, PACKED, *RAY], ids=str)
@pytest.mark.parametrize("fault", ["os._exit", "SIGKILL", rest("SIGSEGV")])
def test_deaths_have_files(fault, setup, build, tmp_path):
    """The failed environment's only, with the step that ran; the replacement's death has another."""
    fates = {(1, 0): Fate(fault, "step", 2), (1, 1): Fate(fault, "step", 1)}
    how: dict[str, Any] = {"on_error": "restart", "replay": 9, "replay_dir": tmp_path}
    env = build([crashing(Counting, fates)] * 2, setup, **how)
    env.reset()
    infos = [env.step([ACTIONS] * 2)[4][1] for _ in range(5)]
    files = [file_of(info["__common__"]["error"]) for info in infos if "error" in info.get("__common__", {})]
    assert {*tmp_path.iterdir()} == {*files}
    found = [read_crash(path) for path in files]
    assert [(one.env_id, one.step, one.restarts, one.error) for one in found] == [
        (1, 3, 0, "WorkerCrashed"), (1, 2, 1, "WorkerCrashed"),
    ]  # fmt: skip


@pytest.mark.parametrize("setup", [APART, Setup("thread", True, 2), *RAY], ids=str)
def test_timeouts_have_files(setup, build, again, tmp_path):
    hangs = None if setup.backend == "thread" else Fate("loop", "step", 1)

    def overflow(level: float) -> None:
        import time

        time.sleep(1.5)

    constructor = crashing(Counting, {(1, 0): hangs}) if hangs else lambda: Tank(overflow)
    env = build([constructor] * 2, setup, step_timeout=0.3, replay=9, replay_dir=tmp_path)
    env.reset(options=None if hangs else [{}, {"level": 9.0}])
    with pytest.raises(WorkerTimeout) as caught:  # noqa: PT012
        for _ in range(2):
            env.step([ACTIONS] * 2)
    crash = read_crash(file_of(str(caught.value)))
    assert (crash.env_id, crash.error, crash.step) == (1, "WorkerTimeout", 2 if hangs else 1)


def test_fewer_steps_than_the_episode(build, again, tmp_path):
    """The state at the first kept step is unknown: the replay says so, and runs nothing."""
    env = build([crashing(Counting, {(1, 0): Fate("raise", "step", 9)})] * 2, APART, replay=4, replay_dir=tmp_path)
    env.reset()
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        for _ in range(10):
            env.step([ACTIONS] * 2)
    path = file_of(str(caught.value))
    crash = read_crash(path)
    assert (crash.step, crash.first_step, crash.complete) == (10, 7, False)
    outcome, printed = again(path)
    assert outcome is Outcome.UNREACHABLE
    assert "the file has only the last 4 of 10 steps" in printed
    assert "pass replay=10 or more" in printed
    assert "\nnext:" not in printed  # the line before each step


def test_not_more_than_these_steps_are_stored(build, tmp_path):
    failing = crashing(functools.partial(Counting, 20), {(1, 0): Fate("raise", "step", 8)})
    env = build([failing] * 2, APART, replay=4, replay_dir=tmp_path)
    env.reset()
    with pytest.raises(EnvError):  # noqa: PT012
        for _ in range(20):
            assert [*tmp_path.iterdir()] == []
            env.step([ACTIONS] * 2)
    crash = read_crash(next(tmp_path.iterdir()))
    assert crash.step - crash.first_step + 1 == 4 < crash.step


def test_off_by_default(build, tmp_path, monkeypatch):
    """No file is written, and resets without a seed get none."""
    monkeypatch.chdir(tmp_path)
    env = build([crashing(Counting, {(1, 0): Fate("raise", "step", 2)})] * 2, APART)
    env.reset()
    assert env.reset()[0][1]["long"][0] == 43
    env.step([ACTIONS] * 2)
    env.step([ACTIONS] * 2)
    with pytest.raises(EnvError) as caught:
        env.step([ACTIONS] * 2)
    assert "marl-parallel replay" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_derived_seeds(build, tmp_path):
    """Equal for equal seeds, different for each reset and each environment."""
    seeds = []
    for _ in range(2):
        env = build([Counting] * 2, APART, replay=4, replay_dir=tmp_path)
        seeds.append([[one["long"][0] for one in env.reset()[0]] for _ in range(3)])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == [42, 43]
    assert len({seed for pair in seeds[0] for seed in pair}) == 6


def test_file_that_cannot_be_written(build, tmp_path, caplog):
    """The error is the simulator's; the log says why there is no file."""
    env = build([crashing(Counting, {(1, 0): Fate("raise")})] * 2, APART, replay=4, replay_dir=tmp_path / "folder")
    env.reset()
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").touch()
    with pytest.raises(EnvError, match="bad terrain") as caught:
        env.step([ACTIONS] * 2)
    assert "marl-parallel replay" not in str(caught.value)
    assert "no replay of environment 1 could be written" in caplog.text


def foreign_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    give_away(folder, monkeypatch)
    return "the user with the number .* owns"


def foreign_sticky_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    folder.chmod(0o1777)
    give_away(folder, monkeypatch)
    return "the user with the number .* owns"


def folder_of_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "every user may replace files"


def foreign_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """To a folder of this user, in a place like /tmp."""
    (folder.parent / "own").mkdir()
    folder.parent.chmod(0o1777)
    folder.symlink_to("own")
    give_away(folder, monkeypatch)
    return "is a link of the user with the number"


TRAPS = [foreign_folder, foreign_sticky_folder, folder_of_everybody, foreign_link]


@has_owners
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", [None, "chosen"])
@pytest.mark.parametrize("backend", ["process", "serial", "thread", "hybrid"])
def test_folder_in_which_others_can_replace_files_is_refused(trap, name, backend, tmp_path, monkeypatch):
    """The error of a fault tells its reader to open a file there. The default folder is inside the current one."""
    monkeypatch.chdir(tmp_path)
    text = trap(tmp_path / (name or "marl_parallel-replays"), monkeypatch)
    with pytest.raises(ValueError, match=f"replay_dir='{name or 'marl_parallel-replays'}': .*{text}.*of your own"):
        ParallelEnv([Counting] * 2, backend=backend, replay=5, replay_dir=name)


@has_owners
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("setup", [Setup("serial", True, 2), APART], ids=str)
def test_folder_that_is_replaced_during_a_run_gets_no_files(trap, setup, build, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "folder"
    constructors = [crashing(Counting, {(1, 0): Fate("raise")})] * 2
    env = build(constructors, setup, on_error="restart", replay=4, replay_dir=folder)
    env.reset()
    folder.rmdir()
    text = trap(folder, monkeypatch)
    assert "Replay it" not in env.step([ACTIONS] * 2)[4][1]["__common__"]["error"]
    assert re.search(f"no replay of environment 1 could be written to .*{text}", caplog.text)
    assert not [*tmp_path.rglob("*.replay")]


@has_owners
def test_only_this_user_can_read_the_files(build, tmp_path):
    mask = os.umask(0)
    try:
        env = build([crashing(Counting, {(0, 0): Fate("raise")})], APART, replay=4, replay_dir=tmp_path / "folder")
        env.reset()
        with pytest.raises(EnvError) as caught:
            env.step([ACTIONS])
    finally:
        os.umask(mask)
    path = file_of(str(caught.value))
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_default_folder(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = build([crashing(Counting, {(0, 0): Fate("os._exit")})], APART, replay=4)
    env.reset()
    with pytest.raises(WorkerCrashed) as caught:
        env.step([ACTIONS])
    assert file_of(str(caught.value)).parent == tmp_path / "marl_parallel-replays"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"replay": 0}, ValueError, "replay"),
        ({"replay": -1}, ValueError, "replay"),
        ({"replay": True}, TypeError, "replay must be the number of steps"),
        ({"replay": "x"}, TypeError, "replay"),
        ({"replay": 1.5}, TypeError, "replay"),
        ({"replay_dir": "somewhere"}, ValueError, "needs replay="),
        ({"replay": 5, "replay_dir": "file"}, ValueError, "cannot create this folder"),
        ({"replay": 5, "replay_dir": "file/below"}, ValueError, "cannot create this folder"),
        ({"replay": 5, "replay_dir": "nul\0"}, ValueError, "cannot create this folder"),
        ({"replay": 5, "replay_dir": 3}, TypeError, "replay_dir must be the path"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "notes").mkdir()

    def constructor(env_id: int, seed: int) -> Fragile:
        return Fragile({}, tmp_path / "notes", env_id=env_id, seed=seed)

    with pytest.raises(error, match=text):
        ParallelEnv([constructor] * 2, **wrong)
    assert [*(tmp_path / "notes").iterdir()] == []
    assert not (tmp_path / "somewhere").exists()


def test_make_passes_it_on(tmp_path):
    failing = crashing(Counting, {(1, 0): Fate("raise", "step", 2)})
    with make(failing, 2, num_workers=1, replay=4, replay_dir=tmp_path) as env:
        env.reset()
        with pytest.raises(EnvError):  # noqa: PT012
            for _ in range(9):
                env.step([ACTIONS] * 2)
    assert read_crash(next(tmp_path.iterdir())).env_id == 1


@pytest.mark.parametrize(("name", "most"), [("mpe2.simple_spread_v3", 30.0), ("mpe2.simple_speaker_listener_v4", 8.0)])
def test_pettingzoo_environments(name, most, build, again, tmp_path):
    """The observations of the failing step, which are in the error, are the same."""
    make_env = importlib.import_module(name).parallel_env

    def constructor() -> Any:
        env = make_env(max_cycles=6)
        step = env.step

        def failing(actions: dict) -> Any:
            result = step(actions)
            total = float(sum(np.abs(one).sum() for one in result[0].values()))
            if total > most:
                raise RuntimeError(f"overflow at {total!r}")
            return result

        env.step = failing
        return env

    env = build([constructor] * 4, APART, on_error="restart", restart_policy=NO_LIMIT, replay=50, replay_dir=tmp_path)
    reports = play(env, 60)
    assert reports
    for report in reports:
        outcome, printed = again(file_of(report))
        assert outcome is Outcome.SAME_STEP, printed
        assert {*re.findall(r"overflow at [\d.]+", printed)} == {*re.findall(r"overflow at [\d.]+", report)}


# -- the file has the seed with which the episode began ----------------------------------------------------------------


class BadPainter(Tank):
    """Cannot be drawn, and has no global state."""

    state_space = spaces.Box(0.0, 1.0, (1,), np.float64)

    def render(self) -> Any:
        raise SimulatorError(f"overflow at {self.rng.random()!r}")

    state = render


def end_episode(env: ParallelEnv) -> None:
    """Step until the episode of environment 0 has ended; with "SAME_STEP", its next one has begun then."""
    over = False
    while not over:
        *_, terminated, truncated, _ = env.step([ACTIONS] * env.num_envs)
        over = terminated[0]["__all__"] or truncated[0]["__all__"]


def overflow(env: ParallelEnv) -> str:
    """Step until environment 0 fails; returns the report."""
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        for _ in range(300):
            env.step([dict.fromkeys(ACTIONS, 2), *[ACTIONS] * (env.num_envs - 1)])
    return str(caught.value)


@pytest.mark.parametrize("setup", [Setup("serial", True, 2), PACKED, *RAY], ids=str)
@pytest.mark.parametrize(
    ("mode", "options"),
    [("SAME_STEP", None), ("SAME_STEP", {"level": 9.0}), ("NEXT_STEP", None), ("DISABLED", {"level": 9.0})],
    ids=str,
)
def test_restart_after_the_end_of_an_episode(setup, mode, options, build, again, tmp_path):
    """With "SAME_STEP", the block still has the old environment's last step and final observations."""
    env = build([Tank] * 2, setup, mode, replay=50, replay_dir=tmp_path)
    env.reset()
    end_episode(env)
    env.restart([0])
    env.reset(env_ids=[0], options=options)
    crash = same(overflow(env), again)
    assert (crash.env_id, crash.restarts) == (0, 1)
    assert crash.seed == crash.constructor_seed == seed_of(42, 0, 1)
    assert options is None or (crash.number, crash.step) == (0, 1)


@pytest.mark.parametrize("setup", [Setup("serial", True, 2), PACKED, *RAY], ids=str)
def test_failed_reset_after_the_end_of_an_episode(setup, build, again, tmp_path):
    constructor = crashing(lambda seed: Counting(2, seed=seed), {(0, 1): Fate("raise", "reset", 0)})
    env = build([constructor] * 2, setup, replay=50, replay_dir=tmp_path)
    env.reset()
    end_episode(env)
    env.restart([0])
    with pytest.raises(EnvError) as caught:
        env.reset(env_ids=[0])
    path = file_of(str(caught.value))
    assert again(path)[0] is Outcome.SAME_STEP
    crash = read_crash(path)
    assert (crash.seed, crash.number, crash.step) == (seed_of(42, 0, 1), 0, 0)


@pytest.mark.parametrize("setup", [PACKED, *RAY], ids=str)
@pytest.mark.parametrize("options", [None, {"level": 9.0}], ids=str)
def test_recycled_after_the_end_of_an_episode(setup, options, build, again, tmp_path):
    """The caller's reset ends an episode right after its beginning, and is done by the standby."""
    how: dict[str, Any] = {"replay": 50, "replay_dir": tmp_path}
    env = build([Tank] * 2, setup, recycle=RecyclePolicy(max_episodes=2), **how)
    env.reset()
    end_episode(env)
    infos = env.reset(env_ids=[0], options=options)[1]
    assert infos[0]["__common__"] == {"recycled": True}
    crash = same(overflow(env), again)
    assert crash.restarts >= 1
    assert crash.seed == crash.constructor_seed == seed_of(42, 0, crash.restarts)
    assert options is None or (crash.restarts, crash.number, crash.step) == (1, 0, 1)


@pytest.mark.parametrize("message", [Message.RENDER, Message.STATE], ids=["render", "state"])
def test_failed_call_after_a_restart(message, build, again, tmp_path):
    """The call begins the episode of an environment that has not been reset since."""
    env = build([BadPainter] * 2, PACKED, replay=50, replay_dir=tmp_path)
    env.reset()
    end_episode(env)
    env.restart([0])
    with pytest.raises(EnvError) as caught:
        env.stepper.source.execute_in(message, [0])  # the methods of `ParallelEnv` want a reset first
    crash = same(str(caught.value), again)
    assert (crash.seed, crash.number, crash.step) == (seed_of(42, 0, 1), 0, 0)


@pytest.mark.parametrize("name", ["render", "state"])
def test_failed_call_after_the_end_of_an_episode(name, build, again, tmp_path):
    """The failure belongs to the episode that has begun, and has one file."""
    env = build([BadPainter] * 2, PACKED, replay=50, replay_dir=tmp_path)
    env.reset()
    end_episode(env)
    with pytest.raises(EnvError) as caught:
        getattr(env, name)(env_ids=[0])
    crash = same(str(caught.value), again)
    assert (crash.seed, crash.step) == (42, 0)
    assert crash.number > 0
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("message", [Message.RENDER, Message.STATE], ids=["render", "state"])
def test_each_failed_call_has_a_file(message, build, again, tmp_path):
    """Also those of an environment that has been restarted and waits for a reset."""
    env = build([BadPainter] * 2, PACKED, "DISABLED", on_error="restart", replay=50, replay_dir=tmp_path)
    env.reset()
    crashes = []
    for _ in range(3):
        with pytest.raises(EnvError) as caught:
            env.stepper.source.execute_in(message, [0])  # as above
        crashes.append(same(str(caught.value), again))
    assert [(crash.seed, crash.restarts) for crash in crashes] == [(42, 0), *((seed_of(42, 0, n), n) for n in (1, 2))]
    assert len([*tmp_path.iterdir()]) == 3


# -- process-wide generators -------------------------------------------------------------------------------------------


class Shared:
    """Draws from the process-wide generators."""

    def random(self) -> float:
        return (random.random() + np.random.random()) / 2

    def integers(self, low: int, high: int) -> int:
        return random.randrange(low, high)


class SharedTank(Tank):
    """Draws from process-wide generators alone, in its constructor too, and does not seed them."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = random.random()

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.rng = Shared()
        super().reset(None, options)
        self.level += self.offset + sum(random.random() for _ in range(9)) / 9
        return self._observed(), {agent: {} for agent in self.agents}

    def throw(self) -> float:
        return random.random()


class SeedlessTank(SharedTank):
    """The same; its `reset` takes no seed."""

    def reset(self, options: dict | None = None) -> tuple[dict, dict]:
        return super().reset(None, options)


ISOLATED = [
    pair if pair[0].backend == "process" or pair[1] == "SAME_STEP" else rest(*pair)
    for pair in itertools.product([Setup("serial", True, 2), PACKED, *RAY], MODES)
]


@pytest.mark.parametrize(("setup", "mode"), ISOLATED, ids=str)
@pytest.mark.parametrize("constructor", [SharedTank, SeedlessTank])
@pytest.mark.filterwarnings("ignore:.*seed:UserWarning")
def test_isolated_generators(constructor, setup, mode, build, again, tmp_path):
    """Neighbours in one process; restarted environments and episodes that begin without a seed, too."""
    how: dict[str, Any] = {"on_error": "restart", "restart_policy": NO_LIMIT, "replay": 50, "replay_dir": tmp_path}
    env = build([constructor] * 4, setup, mode, isolate_rng=True, **how)
    reports = play(env, 60)
    assert len(reports) == env.stats().faults >= 5
    crashes = [same(report, again) for report in reports]
    assert any(crash.restarts for crash in crashes)
    assert any(crash.number for crash in crashes)


@pytest.mark.parametrize("setup", [Setup("serial", True, 1), PACKED, *RAY], ids=str)
@pytest.mark.parametrize("constructor", [SharedTank, SeedlessTank])
@pytest.mark.filterwarnings("ignore:.*seed:UserWarning")
def test_isolated_generators_and_explicit_seeds(constructor, setup, build, again, tmp_path):
    env = build([constructor] * 2, setup, "DISABLED", isolate_rng=True, replay=50, replay_dir=tmp_path)
    env.reset()
    env.step([ACTIONS] * 2)
    env.reset(seed=[77, None], options={"level": 9.0})
    crash = same(overflow(env), again)
    assert (crash.seed, crash.number, crash.step) == (77, 0, 1)


@pytest.mark.parametrize("setup", [PACKED, *RAY], ids=str)
@pytest.mark.parametrize("options", [None, {"level": 9.0}], ids=str)
@pytest.mark.parametrize("constructor", [SharedTank, SeedlessTank])
@pytest.mark.filterwarnings("ignore:.*seed:UserWarning")
def test_isolated_generators_of_recycled_environments(constructor, options, setup, build, again, tmp_path):
    """A standby has drawn for its first episode already; the caller's reset begins another one with the same seed."""
    how: dict[str, Any] = {"isolate_rng": True, "replay": 50, "replay_dir": tmp_path}
    env = build([constructor] * 2, setup, recycle=RecyclePolicy(max_episodes=2), **how)
    env.reset()
    end_episode(env)
    env.reset(env_ids=[0], options=options)
    assert same(overflow(env), again).restarts >= 1


def test_draws_between_episodes(build, again, tmp_path):
    """What calls draw before an episode does not change it: each reset seeds the generators."""
    env = build([SharedTank] * 2, PACKED, isolate_rng=True, replay=50, replay_dir=tmp_path)
    env.reset()
    end_episode(env)
    env.call("throw")
    env.reset(env_ids=[0], options={"level": 9.0})
    crash = same(overflow(env), again)
    assert crash.number > 1


def test_generators_that_are_not_isolated(build, again, tmp_path):
    """Those of the only environment in a process continue after its constructor."""
    env = build([SharedTank] * 2, APART, replay=50, replay_dir=tmp_path)
    env.reset(options={"level": 9.0})
    assert not same(overflow(env), again).number
