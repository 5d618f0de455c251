"""The parts of the programs in `benchmarks/`, and the synthetic environment, whose costs are as declared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pettingzoo
import psutil
import pytest
import typer
from helpers import ROOT
from pettingzoo.test import parallel_api_test, parallel_seed_test

pytestmark = pytest.mark.release_independent

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def synthetic():
    import synthetic

    return synthetic


@pytest.fixture
def compare_workers():
    import compare_workers

    return compare_workers


@pytest.fixture
def compare_facades():
    import compare_facades

    return compare_facades


# -- the frame ---------------------------------------------------------------------------------------------------------


def test_rounds_in_turn():
    import frame

    calls, labels = [], []
    turns = {name: functools.partial(lambda name: calls.append(name) or len(calls), name) for name in "ab"}
    assert frame.rounds(turns, 2, labels.append, lambda name: f"case: {name}") == {"a": [1, 3], "b": [2, 4]}
    assert calls == [*"abab"]
    assert labels == [f"case: {name}" for name in "abab"]
    assert frame.ratio([2.0, 9.0, 8.0], [1.0, 1.0, 2.0]) == 4.0


def test_pages(capsys):
    import frame

    page = [
        frame.Picture("Speed", "speed"),
        frame.Table(("name", "µs", "by"), [["a [b]", "1", "c"]], "lrl", "T"),
        "Note [x].",
    ]
    picture = "../benchmarks/results/speed.png"
    assert frame.markdown(page) == (
        f"[![Speed]({picture})]({picture})\n\n| name | µs | by |\n|---|---:|---|\n| a [b] | 1 | c |\n\nNote [x]."
    )
    frame.show(page)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("T", "a [b]", "Note [x]."))
    assert "speed" not in shown


@dataclasses.dataclass(frozen=True)
class Round:
    took: float


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    rounds: list[Round]


def test_saved_reports_are_read_again(tmp_path, monkeypatch):
    """Also dataclasses in lists and dicts."""
    import frame
    import merged

    results = frame.Results({"cpu": "any"}, ["", "µs"], [["a", "1"]], "Note.", labels=2)
    result = merged.Result("part", "any", 2, "ours", "other", 1.0, 2.0, 0.0, 0.0, 1.0, 0.5, 0.5, "a", [[1.0], [2.0]])
    report = merged.Report({"a": merged.Run({"cpu": "any"}, 1.0, 2)}, [result], {"other": "missing"})
    drawn = []
    frame.save("one", results, tmp_path)
    frame.save("two", report, tmp_path, report.results, lambda *arguments: drawn.append(arguments))
    frame.save("three", report, None)
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "two.json", "two.csv"}
    assert drawn == [(report, tmp_path / "two.png")]
    assert frame.read("one", frame.Results, tmp_path) == results
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    assert frame.read("two", merged.Report) == report
    assert frame.folder_for(None, whole=True) == frame.folder_for(tmp_path, whole=False) == tmp_path
    assert frame.folder_for(None, whole=False) is None


def test_partial_results_do_not_replace_complete_ones(compare_workers, monkeypatch, tmp_path):
    import frame

    folders = []
    monkeypatch.setattr(compare_workers, "run", lambda *_: compare_workers.Report({}, {}, []))
    monkeypatch.setattr(frame, "show", lambda _: None)
    monkeypatch.setattr(compare_workers, "details", lambda _: [])
    monkeypatch.setattr(frame, "save", lambda name, report, folder, *_: folders.append(folder))
    for part in ({"only": "0 µs"}, {"workers": "2"}, {"backends": "thread"}, {"quick": True}):
        compare_workers.main(**part)
    assert folders == [None] * 4
    compare_workers.main(only="0 µs", output=tmp_path)
    compare_workers.main()
    assert folders[4:] == [tmp_path, frame.RESULTS]


# -- workers and plain loops -------------------------------------------------------------------------------------------


def test_contenders_of_a_case(compare_workers, monkeypatch):
    """One limit for all, of as many workers as have a CPU each; arrays with that number of workers."""
    import frame

    monkeypatch.setattr(frame, "NAMES", ("process", "hybrid", "serial", "thread", "ray"))
    monkeypatch.setattr(compare_workers, "usable_cpus", lambda: 2)
    assert frame.default_backends() == "serial,thread,process,hybrid"
    case = compare_workers.Case("any", None, 8, arrays=True)
    opened = compare_workers.everyone(case, frame.default_backends().split(","), [1, 2, 4])
    assert [*map(compare_workers.label, map(named, opened))] == [
        "plain loop", "plain loops side by side x 2", "plain loops with a barrier x 2", "serial",
        "thread x 1", "thread x 2", "thread x 4", "process x 1", "process x 2", "process x 4", "hybrid x 2",
        "hybrid x 4", "process x 2, PettingZooVecEnv", "process x 2, StackedVecEnv",
        "hybrid x 2, PettingZooVecEnv", "hybrid x 2, StackedVecEnv",
    ]  # fmt: skip
    without = compare_workers.everyone(dataclasses.replace(case, arrays=False), ["process"], [1])
    assert [*map(compare_workers.label, map(named, without))] == [
        "plain loop", "plain loops side by side x 1", "plain loops with a barrier x 1", "process x 1"
    ]  # fmt: skip


def named(contender):
    return SimpleNamespace(**contender._asdict())


def test_environments_that_are_not_installed_are_left_out(compare_workers, monkeypatch, tmp_path, capsys):
    """Shares of the limit are the medians of those within each round."""
    import frame

    monkeypatch.setattr(compare_workers, "find_spec", lambda name: None if name == "magent2" else name)
    case = compare_workers.Case("small", functools.partial(compare_workers.Synthetic, num_agents=2))
    monkeypatch.setattr(
        compare_workers, "cases", lambda: [case, dataclasses.replace(case, name="battle", needs="magent2")]
    )
    compare_workers.main(backends="serial", workers="1", seconds=0.001, repeats=3, output=tmp_path)
    assert "left out: battle (needs magent2, which is not installed)" in capsys.readouterr().err
    report = frame.read("compare_workers", compare_workers.Rows, tmp_path)
    assert {one.environment for one in report.measurements} == {"small"}
    (limit,) = (one for one in report.measurements if one.backend == "plain loops with a barrier")
    for one in report.measurements:
        assert one.of_limit == pytest.approx(np.median([a / b for a, b in zip(one.rounds, limit.rounds, strict=True)]))
    shown = frame.markdown(compare_workers.page(report))
    assert "Not measured: battle (needs magent2, which is not installed)." in shown
    with pytest.raises(typer.BadParameter, match="nothing is left to measure: battle"):
        compare_workers.main(only="battle")


class Diary(pettingzoo.ParallelEnv):
    """Writes the times of its steps into a file for each environment; those of the first one take 10 ms."""

    def __init__(self, synthetic, folder, *, fails=False):
        self.env, self.folder, self.fails = synthetic.Synthetic(dying=1, episode_steps=7), folder, fails
        self.possible_agents = self.env.possible_agents
        self.action_space = self.env.action_space

    @property
    def agents(self):
        return self.env.agents

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.path = self.folder / str(seed)
        return self.env.reset(seed, options)

    def step(self, actions):
        assert [*actions] == self.env.agents
        began = time.monotonic()
        if self.path.name == "42":
            if self.fails:
                raise RuntimeError("a step that fails")
            time.sleep(0.01)
        with self.path.open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return self.env.step(actions)


def test_plain_loops_with_a_barrier(synthetic, tmp_path):
    """No process begins a batch before all have ended the one before."""
    from plain_loops import Loops

    with contextlib.closing(Loops(functools.partial(Diary, synthetic, tmp_path), 3, 2, barrier=True)) as loops:
        assert loops.step(2) > 0
        assert loops.step(8) > 0.08
    times = [np.loadtxt(tmp_path / str(seed)) for seed in (42, 43, 44)]
    assert [one.shape for one in times] == [(10, 2)] * 3
    assert all(times[1][2 + k, 0] >= times[0][1 + k, 1] for k in range(1, 8))


def test_failing_plain_loop_is_reported(synthetic, tmp_path):
    """The other process waits at the barrier; it ends as well."""
    from plain_loops import Loops

    loops = Loops(functools.partial(Diary, synthetic, tmp_path, fails=True), 2, 2, barrier=True)
    before = {*multiprocessing.active_children()}
    assert len(before) >= 2
    try:
        with pytest.raises(RuntimeError, match="a process with a plain loop ended with an error"):
            loops.step(2)
    finally:
        loops.close()
    assert len({*multiprocessing.active_children()}) <= len(before) - 2


@pytest.mark.rest
def test_plain_loops_end_with_their_parent(tmp_path):
    """Also while they wait at the barrier."""
    script = f"""
import functools, sys, time
sys.path[:0] = [{str(BENCHMARKS)!r}]
from plain_loops import Loops
from synthetic import Synthetic

loops = Loops(functools.partial(Synthetic, 1e6, rounds_per_us=100.0), 2, 2, barrier=True)
print(*(process.pid for process in loops.processes), flush=True)
loops.step(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    for child in alive:
        child.kill()
    assert len(children) == 2
    assert not alive


# -- two versions ------------------------------------------------------------------------------------------------------


def checkout(folder, *, step_s=None):
    """A copy of the package whose `ParallelEnv.step` is slower by a given time."""
    package = BENCHMARKS.parent / "marl_parallel"
    shutil.copytree(package, folder / "marl_parallel", ignore=shutil.ignore_patterns("__pycache__"))
    if step_s is not None:
        slow = f"""
import time
original_step = ParallelEnv.step
def step(self, *args, **kwargs):
    time.sleep({step_s})
    return original_step(self, *args, **kwargs)
ParallelEnv.step = step
"""
        with (folder / "marl_parallel" / "__init__.py").open("a") as file:
            file.write(slow)
    return folder


@pytest.mark.rest
def test_slower_version_is_detected(compare_workers, monkeypatch, tmp_path, capsys):
    import versions

    fast, slow = checkout(tmp_path / "fast"), checkout(tmp_path / "slow", step_s=0.005)
    options = {"backends": "serial", "only": "0 µs, 20", "seconds": 0.05, "repeats": 3, "output": tmp_path}
    for this, baseline in ((slow, fast), (fast, slow)):
        monkeypatch.setattr(versions, "HERE", this)
        with pytest.raises(typer.Exit) as raised:
            compare_workers.main(baseline=baseline, **options)
        assert raised.value.exit_code == int(this is slow)
        shown = capsys.readouterr().out
        assert ("not slower" in shown) == (this is fast)
        assert ("1 of 1 rows" in shown) == (this is slow)
        (saved,) = json.loads((tmp_path / "compare_workers_baseline.json").read_text())["comparisons"]
        assert saved["slower"] == (this is slow)
        assert saved["low"] <= saved["ratio"] <= saved["high"]
        assert all(saved[name] > 0 for name in ("baseline_us", "this_us", "loop_us", "loops_us", "barrier_us"))


def test_interval_of_a_ratio():
    import versions

    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0.0, 0.02, (8, 9)))
    ratio, low, high = versions.interval(1.1 * noise)
    assert 1.05 < low < ratio < high < 1.15
    assert low <= 1.1 <= high
    between_launches = np.exp(rng.normal(0.0, 0.1, (8, 1)))
    _, wider_low, wider_high = versions.interval(1.1 * noise * between_launches)
    assert wider_high - wider_low > 3 * (high - low)


def test_baseline_must_be_a_checkout(compare_workers, tmp_path):
    with pytest.raises(typer.BadParameter, match="is not a checkout: it has no marl_parallel"):
        compare_workers.main(quick=True, baseline=tmp_path)


def test_failing_baseline_is_reported(compare_workers, tmp_path, capfd):
    (tmp_path / "marl_parallel").mkdir()
    (tmp_path / "marl_parallel" / "__init__.py").write_text("raise ImportError('broken checkout')")
    with pytest.raises(RuntimeError, match="or the other version's ended with an error; its traceback is above"):
        compare_workers.main(quick=True, only="0 µs, 20", baseline=tmp_path)
    traceback = capfd.readouterr().err
    assert "broken checkout" in traceback
    assert str(tmp_path) in traceback


# -- contenders of several libraries -----------------------------------------------------------------------------------


def test_results_of_several_environments(compare_facades, tmp_path):
    """New measurements replace old ones; the others stay with their own run."""
    import merged

    everything = compare_facades.pairs()
    comparisons = {(pair.ours.name, pair.against.name): pair for pair in everything}

    def measured(*names, rate, missing=()):
        results = [merged.result(comparisons[both], [rate, rate], [100.0, 100.0]) for both in names]
        run = merged.Run({"day": rate}, 1.0, 2)
        return merged.Report({"a": run}, results, dict.fromkeys(missing, "not installed"))

    def result_of(report):
        return {(one.ours, one.against): (one.gain, report.runs[one.run].machine["day"]) for one in report.results}

    loop, agile = ("PettingZooVecEnv", "plain loop"), ("AgileRLVecEnv", "AgileRL AsyncPettingZooVecEnv")
    first = merged.Report().updated(measured(loop, rate=200.0, missing=agile), everything)
    assert result_of(first) == {loop: (2.0, 200.0)}
    assert first.missing == dict.fromkeys(agile, "not installed")
    second = first.updated(measured(agile, rate=300.0, missing=["SB3VecEnv"]), everything)
    assert result_of(second) == {loop: (2.0, 200.0), agile: (3.0, 300.0)}
    assert [*second.missing] == ["SB3VecEnv"]
    third = second.updated(measured(loop, rate=400.0, missing=agile), everything)
    assert result_of(third) == {loop: (4.0, 400.0), agile: (3.0, 300.0)}
    assert len(third.runs) == 2
    compare_facades.frame.save("saved", third, tmp_path)
    assert merged.read("saved", tmp_path) == third
    assert merged.read("nothing", tmp_path) == merged.Report()


def test_calls_that_reset_are_not_steps(compare_facades):
    """With NEXT_STEP resets; in other modes each call is a step."""
    pair = next(pair for pair in compare_facades.pairs() if "GymnasiumVectorEnv / Gymnasium" in str(pair))
    assert pair.case.episode_steps == 25
    assert pair.ours.counted(pair.case) == pair.against.counted(pair.case) == pytest.approx(8 * 25 / 26)
    assert compare_facades.peers.SUPERSUIT.counted(pair.case) == 8


def test_contender_that_cannot_start_is_listed_with_the_reason(compare_facades):
    def fails(case):
        raise TypeError("no such argument\nand more")

    import contest

    case = compare_facades.synthetic(2, 3)
    contenders = [compare_facades.peers.LOOP, contest.Contender("stranger", fails)]
    rounds, missing = contest.measure(case, contenders, 0.001, 3, lambda text: None)
    assert [*rounds] == ["plain loop"]
    assert len(rounds["plain loop"]) == 3
    assert missing == {"stranger": "TypeError: no such argument"}
    gone = ImportError("cannot import name 'Env' from 'library' (/home/me/lib/library.py)")
    assert contest.reason(gone) == "cannot import name 'Env' from 'library'"
    with pytest.raises(TypeError, match="no such argument"):
        contest.measure(case, [contest.Contender("ours", fails, ours=True)], 0.001, 1, lambda text: None)


def test_next_turn_starts_when_workers_have_stopped_polling(compare_facades, monkeypatch):
    import contest

    case, loop = compare_facades.synthetic(2, 3), compare_facades.peers.LOOP
    polling = contest.Contender("polling", loop.start, polls_s=0.25)
    events = []
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds and events.append(seconds))
    contest.measure(case, [polling, loop], 0.001, 2, lambda text: events.append(text.removeprefix(f"{case.name}: ")))
    assert events == ["polling starts", 0.25, "plain loop starts", *["polling", 0.25, "plain loop"] * 2]


def test_failure_on_one_simulator_is_listed(compare_facades):
    import contest
    import merged

    def fails(case):
        if "2 x" in case.name:
            raise TypeError("no such space")
        return compare_facades.peers.plain_loop(case)

    ours, moody = compare_facades.peers.LOOP, contest.Contender("moody", fails)
    chosen = [merged.Pair("part", compare_facades.synthetic(n, 3), ours, moody) for n in (2, 3)]
    report = merged.Report().updated(merged.run(chosen, 0.001, 2), chosen)
    assert report.missing == {"moody on synthetic 0 µs, 2 x 3": "TypeError: no such space"}
    assert [one.environment for one in report.results] == ["synthetic 0 µs, 3 x 3"]


def test_contender_with_several_batches_in_a_call(compare_facades, monkeypatch):
    """Each of them counts."""
    import contest

    clock = [0.0]
    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=lambda _: None))

    def step(batches):
        clock[0] += batches / 4

    @contextlib.contextmanager
    def start(_):
        yield contest.Batches(step, 5)

    case = compare_facades.synthetic(2, 3)
    rounds, _ = contest.measure(case, [contest.Contender("several", start)], 3.0, 2, lambda text: None)
    assert rounds["several"] == [4.0 * case.num_envs] * 2


def test_peers_with_agents_that_die(compare_facades, synthetic):
    """Dead agents send no actions to the simulator, and observe zeros where all agents are one."""
    import compare_peers
    import peers

    case = next(one for one in compare_peers.cases() if one.deaths)
    assert case.name == "synthetic 0 µs, 1 of 3 dead"

    class Checked(synthetic.Synthetic):
        def step(self, actions):
            assert [*actions] == self.agents
            return super().step(actions)

    def constructor():
        return Checked(dying=1, episode_steps=3)

    env = peers.Joint(constructor)
    env.reset(seed=1)
    for dead in (0, 1, 1):
        observations, _, terminated, truncated, _ = env.step([0, 1, 2])
        assert observations.shape == (3, 18)
        assert (~observations.any(axis=1)).sum() == dead
    assert (terminated, truncated) == (False, True)
    actions = dict.fromkeys(constructor().possible_agents, 0)
    env = peers.WithAll(constructor)
    env.reset(seed=1)
    assert [len(env.step(actions)[0]) for _ in range(3)] == [3, 2, 2]
    actor = peers.PlainActor(constructor)
    actor.reset(1)
    assert [len(actor.step(actions)[0]) for _ in range(4)] == [3, 2, 3, 3]
    with peers.plain_loop(dataclasses.replace(case, constructor=constructor, num_envs=2)) as step:
        for _ in range(7):
            step()


def test_settings_for_agents_that_die_are_listed(compare_facades):
    """Only where such a case has been measured."""
    import compare_peers
    import merged
    import peers

    def notes(**options):
        cases = [one for one in compare_peers.cases() if one.deaths == options["deaths"]]
        pairs = [merged.Pair("peers", cases[0], compare_peers.OURS[0], one) for one in (peers.SUPERSUIT, peers.TORCHRL)]
        results = [merged.result(pair, [1.0, 1.0], [1.0, 1.0]) for pair in pairs]
        return " ".join(compare_peers.notes(merged.Report({}, results, {})))

    assert "black_death_v3" in notes(deaths=True)
    assert "TorchRL ParallelEnv: `use_mask=True, done_on_any=False`." in notes(deaths=True)
    assert "black_death_v3" not in notes(deaths=False)


# -- other programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computes", "workers", "cpus", "limit"),
    [
        (True, 1, 2, 2.0),
        (True, 2, 2, 4 / 3),
        (True, 4, 2, 4 / 3),
        (True, 1, 1, 1.0),
        (False, 2, 2, 2.0),
        (True, 3, 4, 2.0),
    ],
)
def test_limit_of_the_cpus(computes, workers, cpus, limit):
    import async_stepping

    case = async_stepping.Case(async_stepping.OVERLAP, "", {}, 4, computes)
    assert case.limit(workers, cpus) == pytest.approx(limit)


def test_summary():
    """Of saved results; what more CPUs would give follows from two points of the CPU times."""
    import summary

    assert summary.Costs((10.0, 1.0), (20.0, 2.0)).speed_up(100.0, 4) == 32 * 100 / (10 + 32 + 20 + 8 * 102)
    found = summary.costs()
    by_way = [one for one in summary.read("cpu_times")["results"] if one["environment"] == "3 x 18"]
    many = next(one for one in by_way if (one["num_envs"], one["way"]) == (64, "step"))
    assert found.caller[0] + 64 * found.caller[1] == pytest.approx(many["caller_us"])
    added = many["workers_us"] - many["simulator_us"]
    assert found.worker[0] + 32 * found.worker[1] == pytest.approx(32 * added)
    assert set(summary.speed_ups()) == set(summary.SHOWN)
    assert all(one.limit > 1 for one in summary.speed_ups().values())


@pytest.fixture
def simulators(monkeypatch):
    """`simulators.py`, whose own name is that of a package of the tests."""
    spec = importlib.util.spec_from_file_location("run_simulators", BENCHMARKS / "simulators.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    spec.loader.exec_module(module)
    return module


@pytest.mark.rest
def test_simulator_that_works(simulators, monkeypatch, tmp_path, capsys):
    """With this environment in place of one of its own."""
    monkeypatch.setattr(simulators, "interpreter", lambda *_: Path(sys.executable))
    name = "MPE2 simple_spread_v3"
    result = simulators.examine(name, tmp_path, seconds=0.05, repeats=1, timeout=100)
    assert (result.status, result.errors) == (simulators.WORKS, {})
    assert (result.kind, result.agents, result.masks) == ("PettingZoo parallel", 3, False)
    assert result.ends == 4 * 200 // 25
    assert result.speed_up > 0
    assert result.versions["mpe2"]
    simulators.save({name: result}, tmp_path)
    assert simulators.read(tmp_path / "simulators.json") == {name: result}
    table = (tmp_path / "simulators.md").read_text()
    assert f"| {name} | PettingZoo parallel | 3 |  | plain loop | yes, yes | restarted |" in table
    capsys.readouterr()
    simulators.main(output=tmp_path, as_markdown=True)
    assert capsys.readouterr().out == table


@pytest.mark.rest
def test_simulators_that_do_not_work(simulators, monkeypatch, tmp_path):
    """Each is listed with its own error."""
    broken = simulators.real.Simulator("simulators", "no_such_module.make()", 2, "import no_such_module")
    misread = dataclasses.replace(simulators.real.SIMULATORS["MPE2 simple_v3"], agents=7, facades=())
    monkeypatch.setattr(simulators.real, "SIMULATORS", {"broken": broken, "misread": misread, "missing": broken})
    monkeypatch.setattr(simulators, "interpreter", lambda *_: Path(sys.executable))
    results = {
        name: simulators.examine(name, tmp_path, seconds=0.05, repeats=1, timeout=100) for name in ("broken", "misread")
    }
    assert results["broken"].status == simulators.FAILS_ALONE
    assert results["broken"].errors == {"plain 0,1,2,3": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert results["misread"].status == simulators.FAILS
    assert [*results["misread"].errors] == ["recognised"]

    def cannot_install(*_):
        raise simulators.CannotInstall("no matching distribution")

    monkeypatch.setattr(simulators, "interpreter", cannot_install)
    results["missing"] = simulators.examine("missing", tmp_path, seconds=0.05, repeats=1, timeout=100)
    assert results["missing"].status == simulators.NOT_INSTALLED
    simulators.save(results, tmp_path)
    table = (tmp_path / "simulators.md").read_text()
    assert "| missing | cannot be installed | `no matching distribution` |" in table
    assert "| broken | fails alone | `ModuleNotFoundError: No module named 'no_such_module'` |" in table
    assert "| misread | recognised |" in table


def test_names_of_simulators(simulators):
    assert simulators.chosen([]) == [*simulators.real.SIMULATORS]
    assert simulators.chosen(["rware-tiny", "libsumo"]) == [
        name for name in simulators.real.SIMULATORS if "rware-tiny" in name or "libsumo" in name
    ]
    with pytest.raises(typer.BadParameter, match="no simulator has 'no such' in its name"):
        simulators.main(["no such"])
    assert {one.install for one in simulators.real.SIMULATORS.values()} <= {*simulators.real.INSTALLS}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "ERROR: Could not find a version that satisfies it\nERROR: No matching distribution found for x",
            "ERROR: No matching distribution found for x",
        ),
        (
            "ERROR: Cannot install a and b because these package versions have conflicting dependencies.\n"
            "ERROR: ResolutionImpossible: for help visit x",
            "ERROR: Cannot install a and b because these package versions have conflicting dependencies.",
        ),
        (
            "  OSError: no file here\n  error: <urlopen error>\nERROR: Failed building wheel for x\n"
            "error: failed-wheel-build-for-install",
            "error: <urlopen error>",
        ),
        ('  File "/usr/lib/python3/a.py"\nOSError: no /usr/lib/python3/b.so here\n', "OSError: no ... here"),
    ],
)
def test_errors_of_pip_in_one_line(simulators, text, shown):
    assert simulators.error_of_pip(text) == shown


# -- the synthetic environment -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_synthetic_is_a_pettingzoo_environment(synthetic):
    parallel_api_test(synthetic.Synthetic(num_agents=4, observation_size=7, episode_steps=30), num_cycles=100)
    parallel_seed_test(functools.partial(synthetic.Synthetic, episode_steps=10))
    parallel_api_test(synthetic.Synthetic(num_agents=4, dying=2, masks=True, episode_steps=30), num_cycles=100)
    parallel_seed_test(functools.partial(synthetic.Synthetic, dying=1, masks=True, episode_steps=10))


def test_synthetic_agents_that_die(synthetic):
    """In the first step of each episode; the seed decides who."""
    who = set()
    for seed in range(10):
        env = synthetic.Synthetic(dying=1, episode_steps=4)
        env.reset(seed=seed)
        for episode in range(2):
            observations, rewards, terminations, truncations, infos = env.step({})
            (dead,) = (agent for agent, over in terminations.items() if over)
            assert not any(truncations.values())
            assert len(observations) == len(rewards) == len(infos) == 3
            remaining = [agent for agent in env.possible_agents if agent != dead]
            for left in (remaining, remaining, []):
                results = env.step({})
                assert [[*one] for one in results] == [remaining] * 5
                assert not any(results[2].values())
                assert all(over == (not left) for over in results[3].values())
                assert env.agents == left
            assert env.step({}) == ({},) * 5
            assert [*env.reset()[0]] == env.possible_agents, episode
        who.add(dead)
    assert len(who) == 3


def test_synthetic_action_masks(synthetic):
    env = synthetic.Synthetic(masks=True)
    seen = [env.reset(seed=3)[0], env.step({})[0]]
    masks = [one["action_mask"] for observations in seen for one in observations.values()]
    assert all(mask.dtype == np.int8 and mask[0] == 1 for mask in masks)
    assert len({mask.tobytes() for mask in masks}) > 1
    assert all(env.observation_space(agent).contains(one) for agent, one in seen[1].items())


def test_synthetic_values(synthetic):
    env = synthetic.parallel_env(num_agents=2, observation_size=5, episode_steps=3)
    observations, infos = env.reset(seed=1)
    assert infos == {"agent_0": {}, "agent_1": {}}
    for _ in range(3):
        assert env.agents == ["agent_0", "agent_1"]
        observations, rewards, _, truncations, infos = env.step({})
        for agent in env.possible_agents:
            assert env.observation_space(agent).contains(observations[agent])
            assert observations[agent].dtype == np.float32
            assert type(rewards[agent]) is float
            assert type(truncations[agent]) is bool
        observations.clear()  # the dicts are the caller's own
    assert truncations == {"agent_0": True, "agent_1": True}
    assert env.agents == []
    assert len(env.reset()[0]) == 2


def test_synthetic_work_has_the_chosen_length(synthetic):
    """The number of rounds is fixed, and the average stays the same with uneven steps."""
    env = synthetic.Synthetic(step_us=100, rounds_per_us=10.0)
    costs = [next(env._costs) for _ in range(1000)]
    assert costs == [1000] * 1000
    env = synthetic.Synthetic(step_us=100, rounds_per_us=10.0, tail=(0.1, 20.0))
    costs = [next(env._costs) for _ in range(1000)]
    assert len(set(costs)) == 2
    assert max(costs) / min(costs) == pytest.approx(20, rel=0.01)
    assert np.mean(costs) == pytest.approx(1000, rel=0.25)


def test_synthetic_resets_of_a_chosen_length(synthetic, monkeypatch):
    spent = []
    monkeypatch.setattr(synthetic, "work", spent.append)
    env = synthetic.Synthetic(reset_us=50, rounds_per_us=10.0)
    env.reset()
    env.step({})
    assert spent == [500, 0]


def test_synthetic_episodes_of_uneven_length(synthetic):
    env = synthetic.Synthetic(episode_steps=(3, 6))
    env.reset(seed=1)
    lengths = []
    for _ in range(synthetic.PREPARED):
        lengths.append(0)
        while env.agents:
            env.step({})
            lengths[-1] += 1
        env.reset()
    assert set(lengths) == {3, 4, 5, 6}


def test_synthetic_that_waits(synthetic, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    env = synthetic.Synthetic(step_us=300, reset_us=2000, waits=True)
    env.reset()
    env.step({})
    assert slept == [0.002, 0.0003]
