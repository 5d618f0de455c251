"""`marl-parallel tune`: it proposes the best setting within the memory limit."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys

import pytest
from helpers import SIMULATORS
from simulators.waiting import steps_per_second
from typer.testing import CliRunner

from marl_parallel.cli.app import app
from marl_parallel.cli.measure import (
    ASYNC,
    FINALISTS,
    PLAIN_LOOP,
    RUNGS,
    SERIAL,
    STEP,
    WORKERS,
    Setting,
    Trial,
    grid,
    max_turns,
    search,
)
from marl_parallel.cli.report import show_tune, tune_result
from marl_parallel.cli.target import CommandError

pytestmark = pytest.mark.release_independent

TUNABLE = SIMULATORS / "waiting.py"


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return lambda *arguments: runner.invoke(app, ["tune", *arguments])


def proposed(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["best"]


# -- the search, on landscapes that are known --------------------------------------------------------------------------


class Landscape:
    """Throughput and memory by formula; measurements vary by a few per cent, as on a real machine."""

    def __init__(self, seed: int, noise: float = 0.02) -> None:
        self.rng, self.noise = random.Random(seed), noise
        self.best_workers, self.best_envs = self.rng.choice([1, 2, 4, 8]), self.rng.choice([1, 2, 4, 8])
        self.slopes = [self.rng.uniform(0.1, 0.6) for _ in range(2)]
        self.gain = self.rng.choice([0.8, 1.2])
        self.measured: list[Setting] = []

    def rate(self, setting: Setting) -> float:
        away = abs(setting.num_workers - self.best_workers), abs(setting.envs_per_worker - self.best_envs)
        penalty = 1 + sum(slope * distance for slope, distance in zip(self.slopes, away))
        return 1000 / penalty * (self.gain if setting.way == ASYNC else 1)

    def __call__(self, settings):
        self.measured += settings
        rates = [self.rate(setting) * self.rng.gauss(1, self.noise) for setting in settings]
        return rates, settings[0].num_envs * 10


SETTINGS = grid((1, 2, 4, 8), (1, 2, 4, 8), 64)


@pytest.mark.parametrize("seed", range(100))
def test_close_to_the_best_of_an_exhaustive_sweep(seed):
    landscape = Landscape(seed)
    best, _ = search(SETTINGS, landscape)
    most = max(landscape.rate(setting) for setting in SETTINGS)
    assert landscape.rate(best.setting) >= 0.95 * most


def test_smallest_of_equally_fast_settings():
    def measure(settings):
        return [100.0 + setting.num_envs / 4 + (setting.way == ASYNC) / 4 for setting in settings], 0

    def best(envs, ways=(STEP,)):
        return search([one for one in grid((1,), envs, 64) if one.way in ways], measure)[0].setting

    assert best((1, 2, 4)) == Setting(1, 1, STEP)
    assert best((1, 20)) == Setting(1, 20, STEP)
    assert best((2,), (STEP, ASYNC)) == Setting(1, 2, STEP)


def test_settings_over_the_memory_limit_are_excluded():
    landscape = Landscape(0, noise=0.0)
    landscape.rate = lambda setting: float(setting.num_envs)
    best, trials = search(SETTINGS, landscape, limit=80)
    assert best.setting.num_envs == 8
    too_large = {trial.setting for trial in trials if not trial.fits}
    assert {setting[:2] for setting in too_large} == {(2, 8), (4, 4), (8, 2)}
    assert not any(setting.exceeds(large) for setting in landscape.measured for large in too_large)


def test_memory_limit_exceeded_in_the_last_round():
    """The fastest of the other settings is proposed."""
    settings = [Setting(workers, 1, STEP) for workers in (1, 2, 4)]
    count = {setting: itertools.count(1) for setting in settings}

    def measure(alike):
        (setting,) = alike
        grows = setting.num_workers == 4 and next(count[setting]) == 6
        return [float(setting.num_workers)], 100 if grows else 10

    best, trials = search(settings, measure, limit=50)
    assert [trial.fits for trial in trials] == [True, True, False]
    assert best.setting == settings[1]


def test_no_setting_within_the_memory_limit():
    with pytest.raises(CommandError, match="the smallest one that was measured uses 200 MB"):
        search(SETTINGS, lambda settings: ([1.0] * len(settings), 200_000_000), limit=5)


def test_no_settings():
    with pytest.raises(CommandError, match="every setting has more environments"):
        search(grid((4,), (4,), max_envs=8), Landscape(0))


def test_rounds_alternate_between_settings():
    """Each setting of a rung is measured once per round."""
    landscape = Landscape(3, noise=0.0)
    search(SETTINGS, landscape)
    rounds, left = [], landscape.measured
    for share, count in RUNGS:
        size = max(FINALISTS, math.ceil(share * len(SETTINGS)))
        for _ in range(count):
            rounds.append(left[:size])
            left = left[size:]
    assert not left
    assert all(len({*one}) == len(one) for one in rounds)
    assert [{*one} for one in rounds[1:3]] == [{*rounds[1]}] * 2
    assert [{*one} for one in rounds[3:]] == [{*rounds[3]}] * 3
    assert {*rounds[0]} > {*rounds[1]} > {*rounds[3]}
    assert len(landscape.measured) < 3 * len(SETTINGS)


@pytest.mark.parametrize("workers", [(1, 2, 4, 8), (1, 2), (1,)])
@pytest.mark.parametrize("seed", range(3))
def test_number_of_measurements_is_known(workers, seed):
    landscape = Landscape(seed)
    settings = grid(workers, (1, 2), 64)
    search(settings, landscape)
    assert len(landscape.measured) == max_turns(settings)


# -- the proposal, from figures that are known -------------------------------------------------------------------------


def result_of(search_rounds, loop, serial, workers, load=1.0, way=STEP):
    best = Trial(Setting(2, 4, way), [*search_rounds], memory=80_000_000)
    in_turns = {PLAIN_LOOP: loop, SERIAL: serial, WORKERS: workers}
    machine = {
        "load": load,
        "cpus": 2,
        "cpu": "a CPU",
        "system": "a system",
        "python": "3",
        "versions": {},
        "date": "today",
    }
    slower = Trial(Setting(1, 4), [50.0], memory=40_000_000)
    return tune_result("sim.py:make", {}, best, [slower, best], in_turns, machine)


STEADY = {"loop": [100.0, 102.0, 98.0], "serial": [90.0, 91.0, 89.0], "workers": [150.0, 155.0, 145.0]}


def test_text_and_table_of_tune_have_the_same_figures(capsys):
    """The search and the comparison in turns measure the fastest setting; each figure says which one it is."""
    result = result_of([160.0, 161.0, 159.0], **STEADY)
    show_tune(result)
    lines = capsys.readouterr().out.splitlines()
    rows = {(*line.split()[:5], "turns" in line): line for line in lines if "step " in line}
    assert "160" in rows["2", "4", "8", "step", "160", False]
    assert rows["2", "4", "8", "step", "160", False].split()[-1] == "proposed"
    assert rows["2", "4", "8", "step", "150", True].split()[-2:] == ["in", "turns"]
    for name, figure in (("serial", "90"), ("plain loop", "100")):
        (line,) = (line for line in lines if line.split()[1:2] == name.split()[:1])
        assert f"{name} " in line
        assert line.split()[-2:] == ["in", "turns"]
        assert figure in line.split()
    assert result["advice"] == (
        "1.50 times the speed of a plain loop. In rounds that took turns, a plain loop reaches 100 steps/s, "
        "backend='serial' 90 and the fastest setting 150 (in the search before: 160)."
    )
    assert result["code"] in lines


@pytest.mark.parametrize(
    ("search_rounds", "changes", "reason"),
    [
        ([160.0], {"load": 2.1}, "the load was 2.1 at the start, on 2 CPUs"),
        ([160.0, 100.0], {}, "differ by more than a third (the fastest setting in the search)"),
        ([160.0], {"workers": [150.0, 200.0, 120.0]}, "differ by more than a third (the fastest setting in turns)"),
        ([160.0], {"loop": [100.0, 60.0, 101.0]}, "differ by more than a third (plain loop)"),
        ([160.0], {"serial": [100.0, 60.0, 101.0]}, "differ by more than a third (serial)"),
        ([230.0], {}, "reached 230 steps/s in the search, but 150 when it took turns with a plain loop"),
        ([90.0], {}, "reached 90 steps/s in the search, but 150 when it took turns with a plain loop"),
    ],
)
def test_measurement_that_is_not_reliable_proposes_nothing(search_rounds, changes, reason, capsys):
    result = result_of(search_rounds, **{**STEADY, **changes})
    assert not result["reliable"]
    assert result["advice"].startswith("The measurement is not reliable, so nothing is proposed: ")
    assert reason in result["advice"]
    assert result["advice"].endswith("Measure again on an idle machine, with longer rounds, such as --seconds 5.")
    show_tune(result)
    shown = capsys.readouterr().out
    assert "env = marl_parallel.make" not in shown
    assert "Do not parallelise" not in shown
    assert "fastest in the search" in shown


def test_slower_workers_with_their_figures_in_the_search():
    result = result_of([120.0], loop=[100.0, 101.0, 99.0], serial=[95.0, 96.0, 94.0], workers=[90.0, 91.0, 89.0])
    assert result["reliable"]
    assert result["advice"] == (
        "Do not parallelise this simulator: a plain loop or backend='serial' is faster. In rounds that took turns, a "
        "plain loop reaches 100 steps/s, backend='serial' 95 and the fastest setting 90 (in the search before: 120)."
    )
    assert result["code"].endswith('backend="serial")')


# -- the command, on simulators that wait ------------------------------------------------------------------------------


@pytest.mark.rest
def test_known_best_setting(tune, tmp_path):
    """Three workers with four environments each, on any number of CPUs."""
    workers, envs = (1, 3, 6), (1, 4)
    arguments = ["--workers", ",".join(map(str, workers)), "--envs-per-worker", ",".join(map(str, envs))]
    kwargs = json.dumps({"folder": str(tmp_path)})
    result = tune(
        f"{TUNABLE}:Licensed", "--env-kwargs", kwargs, *arguments, "--max-envs", "48", "--seconds", "0.06", "--json"
    )
    best = proposed(result)
    most = max(itertools.starmap(steps_per_second, itertools.product(workers, envs)))
    assert steps_per_second(best["num_workers"], best["envs_per_worker"]) >= 0.95 * most
    report = json.loads(result.stdout)
    assert len(report["trials"]) == 2 * len(workers) * len(envs) - 1  # a single copy by `step` only
    assert len(best["rounds"]) == 6
    assert report["code"] == (
        f'env = marl_parallel.make("{TUNABLE}:Licensed", num_envs=12, '
        f"env_kwargs={{'folder': {str(tmp_path)!r}}}, num_workers=3)" + (report["code"].partition("num_workers=3)")[2])
    )


@pytest.mark.rest
def test_workers_are_proposed_if_they_are_faster(tune):
    result = tune(f"{TUNABLE}:Waiting", "--workers", "2", "--envs-per-worker", "2", "--seconds", "0.1", "--json")
    assert proposed(result)["num_workers"] == 2
    report = json.loads(result.stdout)
    assert report["pays_off"]
    assert "num_workers=2" in report["code"]
    assert "In rounds that took turns, a plain loop reaches " in report["advice"]
    # A step waits 5 ms, so a process that steps its environments one by one takes at most 200 a second.
    assert 0 < report["plain_loop"] <= 200
    assert 0 < report["serial"] <= 200


@pytest.mark.rest
def test_serial_is_proposed_for_fast_simulators(tune):
    arguments = ["--workers", "1,2", "--envs-per-worker", "2", "--seconds", "0.05"]
    result = tune(f"{TUNABLE}:Instant", *arguments, "--json")
    best = proposed(result)
    report = json.loads(result.stdout)
    assert not report["pays_off"]
    assert report["plain_loop"] > best["steps_per_second"]
    assert (
        report["code"]
        == f'env = marl_parallel.make("{TUNABLE}:Instant", num_envs={best["num_envs"]}, backend="serial")'
    )
    shown = tune(f"{TUNABLE}:Instant", *arguments).stdout
    assert ("Do not parallelise this simulator: a plain loop" in shown) != ("The measurement is not reliable" in shown)
    assert " proposed" not in shown.replace("nothing is proposed", "")
    assert {"plain", "serial"} <= {*shown.split()}


@pytest.mark.rest
def test_send_and_recv_for_uneven_steps(tune):
    result = tune(f"{TUNABLE}:Uneven", "--workers", "2", "--envs-per-worker", "1", "--seconds", "0.2", "--json")
    assert proposed(result)["way"] == ASYNC
    report = json.loads(result.stdout)
    code, *how = report["code"].splitlines()
    where = "num_workers=2" if report["pays_off"] else 'backend="serial"'  # on a busy machine, workers may be slower
    assert code == f'env = marl_parallel.make("{TUNABLE}:Uneven", num_envs=2, {where})'
    assert len(how) == report["pays_off"]


def test_code_for_send_and_recv():
    result = result_of([150.0], **STEADY, way=ASYNC)
    assert result["code"].splitlines()[1:] == [
        "env.reset_async()  # then repeat: batch = env.recv(4); env.send(actions, batch.env_ids)"
    ]
    slower = result_of([90.0], loop=[100.0] * 3, serial=[95.0] * 3, workers=[90.0] * 3, way=ASYNC)
    assert "reset_async" not in slower["code"]


@pytest.mark.rest
def test_memory_is_measured_and_limited(tune):
    arguments = ["--workers", "1,2", "--envs-per-worker", "1,2,4", "--seconds", "0.05", "--json"]
    result = tune(f"{TUNABLE}:Heavy", *arguments, "--memory", "190MB")
    best = proposed(result)
    assert best["num_workers"] == 2
    trials = json.loads(result.stdout)["trials"]
    for trial in trials:
        assert trial["memory"] >= 50_000_000 * trial["num_envs"]
        assert trial["fits"] == (trial["memory"] <= 190_000_000)
    assert best["memory"] <= 190_000_000 < max(trial["memory"] for trial in trials)
    assert 8 not in {trial["num_envs"] for trial in trials}


@pytest.mark.rest
def test_action_masks_and_turns(tune):
    """The simulator raises if an action is illegal."""
    arguments = ["--workers", "1,2", "--envs-per-worker", "1", "--seconds", "0.01", "--json"]
    assert proposed(tune("pettingzoo.classic.connect_four_v3:raw_env", *arguments))["num_workers"] in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mpe2.simple_spred_v3"], ["mpe2.simple_spred_v3"]),
        (["mpe2.simple_spread_v3", "--memory", "much"], ["'much'", "2GB"]),
        (["mpe2.simple_spread_v3", "--workers", "0"], ["--workers"]),
        (["mpe2.simple_spread_v3", "--envs-per-worker", "a"], ["--envs-per-worker"]),
        (["mpe2.simple_spread_v3", "--workers", "2", "--max-envs", "1"], ["every setting has more", "--max-envs"]),
        (["mpe2.simple_spread_v3", "--workers", "1", "--memory", "1MB", "--seconds", "0.01"], ["1 MB", "--workers"]),
    ],
    ids=lambda value: " ".join(value)[-20:] if isinstance(value, list) else None,
)
def test_errors_are_one_line_and_a_hint(tune, arguments, words):
    result = tune(*arguments)
    assert result.exit_code == 1
    error, hint = result.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert any(word in result.stderr for word in words)


def test_help_has_an_example(tune):
    assert "marl-parallel tune mpe2.simple_spread_v3" in tune("--help").stdout
