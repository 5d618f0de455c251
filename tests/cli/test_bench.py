"""`marl-parallel bench`: what it prints, saves and refuses, and that its rates count environment steps."""

from __future__ import annotations

import csv
import functools
import json
import subprocess
import sys
import textwrap
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SIMULATORS
from simulators.buggy import Healthy
from simulators.deterministic import Hunt, Relay, Skirmish
from typer.testing import CliRunner

from marl_parallel import __version__
from marl_parallel.adapters import Rules
from marl_parallel.cli.app import app
from marl_parallel.cli.measure import Contender, contenders, draw_actions, measure, num_turns, stepping
from marl_parallel.cli.report import read_json
from marl_parallel.cli.target import constructor_of
from marl_parallel.core.backend import usable_cpus

pytestmark = pytest.mark.release_independent

MASKED = SIMULATORS / "masked_actions.py"
SPREAD = "mpe2.simple_spread_v3"
BRIEF = ["--num-envs", "2", "--workers", "1,2", "--seconds", "0.01", "--repeats", "2"]
MIXED = f"{SIMULATORS / 'deterministic.py'}:Hunt"
FILE = """
    from mpe2 import simple_spread_v3
    import helper

    def crowd(agents=helper.AGENTS):
        return simple_spread_v3.parallel_env(N=agents)

    def broken():
        raise OSError("no licence found\\nand much more to say about it")

    NUMBER = 3
"""


@pytest.fixture
def restored_sys_path(monkeypatch):
    """Restores `sys.path`, to which the command adds the current folder."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.fixture
def bench(restored_sys_path):
    """Runs `marl-parallel bench` in a terminal wide enough for unbroken lines."""
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return lambda *arguments: runner.invoke(app, ["bench", *arguments])


@pytest.fixture
def file(tmp_path):
    """A user's file that imports a neighbouring one."""
    (tmp_path / "helper.py").write_text("AGENTS = 4\n")
    path = tmp_path / "simulators_of_mine.py"
    path.write_text(textwrap.dedent(FILE))
    yield str(path)
    for name in ("helper", path.stem):
        sys.modules.pop(name, None)


def python(*arguments, **more):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **more)


def assert_refused(result, *words):
    """Exit status 1, with one line and a hint."""
    assert result.exit_code == 1, result.output
    error, hint, *rest = result.stderr.strip().splitlines()
    assert not rest
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in result.stderr


def test_bench_shows_a_table(bench):
    result = bench(SPREAD, *BRIEF)
    assert result.exit_code == 0, result.output
    for text in ("plain loop", "process x 1", "process x 2", "efficiency", f"marl-parallel {__version__}"):
        assert text in result.stdout


def test_bench_saves_its_measurements(bench, tmp_path):
    files = {suffix.lower(): tmp_path / "new" / f"result.{suffix}" for suffix in ("json", "csv", "PNG")}
    result = bench(
        SPREAD,
        *BRIEF,
        *("--backends", "serial,thread", "--env-kwargs", '{"N": 2}'),
        *("--output", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"])),
    )
    assert result.exit_code == 0, result.output
    who = [Contender("loop"), Contender("serial"), Contender("thread", 1), Contender("thread", 2)]
    report = read_json(files["json"])
    assert [one.contender for one in report.measurements] == who
    assert all(len(one.rounds) == 2 and min(one.rounds) > 0 for one in report.measurements)
    assert report.settings["env_kwargs"] == {"N": 2}
    assert report.machine["versions"]["mpe2"]
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [Contender(row["backend"], int(row["workers"]), row["way"]) for row in rows] == who
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_bench_of_every_way_to_step(bench, tmp_path):
    path = tmp_path / "result.json"
    plot = tmp_path / "result.svg"
    more = ("--async", "--facade", "pettingzoo,gymnasium", "--backends", "thread")
    result = bench(SPREAD, *BRIEF, *more, "--output", str(path), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    ways = ("step", "async", "pettingzoo", "gymnasium")
    who = [Contender("loop"), *(Contender("thread", workers, way) for workers in (1, 2) for way in ways)]
    assert [one.contender for one in read_json(path).measurements] == who
    for name in ("thread x 2, async", "thread x 1, gymnasium"):
        assert name in result.stdout
    assert "thread, pettingzoo" in plot.read_text()


def test_bench_of_a_function_in_a_file(bench, file):
    result = bench(f"{file}:crowd", *BRIEF)
    assert result.exit_code == 0, result.output


def test_working_directory_is_on_the_path(file, tmp_path):
    """As with `python -m`, in place of the console script's own directory."""
    arguments = [*BRIEF, "--backends", "serial"]
    result = python(
        "-P" if sys.version_info >= (3, 11) else "-B",
        "-c",
        "from marl_parallel.cli import main; main()",
        "bench",
        "simulators_of_mine:crowd",
        *arguments,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mpe2.simple_spred_v3"], ["mpe2.simple_spred_v3", "module[:attribute]"]),
        (["no_such_package.at_all"], ["no_such_package"]),
        ([":parallel_env"], ["module[:attribute]"]),
        (["no/such/file.py:env"], ["no/such/file.py"]),
        ([f"{SPREAD}:parallel_envs"], ["parallel_envs", "raw_env"]),
        ([SPREAD, "--env-kwargs", "{N: 5}"], ["--env-kwargs", '{"N": 5}']),
        ([SPREAD, "--env-kwargs", "[5]"], ["--env-kwargs", "JSON object"]),
        ([SPREAD, "--env-kwargs", '{"agents": 5}'], ["TypeError", "agents", "without faults", "--debug"]),
        ([SPREAD, "--workers", "1,two"], ["--workers"]),
        ([SPREAD, "--workers", "0"], ["--workers"]),
        ([SPREAD, "--backends", "process,greenlet"], ["greenlet", "thread"]),
        ([SPREAD, "--facade", "sb3"], ["sb3", "gymnasium"]),
        ([MIXED, *BRIEF, "--facade", "gymnasium"], ["rows need equal spaces", "--facade pettingzoo"]),
        ([SPREAD, "--plot", "plot.docx"], ["docx", ".png"]),
        ([SPREAD, "--output", "."], ["directory"]),
        ([SPREAD, "--csv", f"{__file__}/new/a.csv"], [f"{__file__} is not a directory"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_errors_are_one_line_and_a_hint(bench, arguments, words):
    assert_refused(bench(*arguments), *words)


def test_missing_function_of_a_file(bench, file):
    assert_refused(bench(f"{file}:NUMBER"), "NUMBER", "crowd")
    assert_refused(bench(file), "'parallel_env' or 'env' or 'raw_env'", "crowd")


def test_failing_import_inside_the_file(bench, tmp_path):
    path = tmp_path / "needs_more.py"
    path.write_text("import a_package_that_is_not_there\n")
    assert_refused(bench(f"{path}:env"), "ModuleNotFoundError", "a_package_that_is_not_there")


def test_simulator_that_raises(bench, file):
    result = bench(f"{file}:broken")
    assert_refused(result, "OSError: no licence found")
    assert "much more" not in result.stderr
    assert isinstance(bench(f"{file}:broken", "--debug").exception, OSError)


def test_help_has_an_example(bench):
    assert "marl-parallel bench mpe2.simple_spread_v3" in bench("--help").stdout


@pytest.mark.parametrize("module", ["typer", "rich", "psutil"])
def test_missing_extra(module):
    code = f"import sys; sys.modules[{module!r}] = None; from marl_parallel.cli import main; main()"
    result = python("-c", code)
    assert result.returncode == 1
    install = 'pip install "marl-parallel[cli]", or in a checkout: pip install -e ".[cli]"'
    assert result.stderr.strip() == f"error: the command line needs {module}: {install}"


def test_missing_internal_module_is_not_reported_as_missing_extra():
    code = "import sys; sys.modules['cloudpickle'] = None; from marl_parallel.cli import main; main()"
    assert "cloudpickle" in python("-c", code).stderr.splitlines()[-1]


def test_python_m_marl_parallel():
    for module in ("marl_parallel", "marl_parallel.cli"):
        result = python("-m", module, "--help")
        assert result.returncode == 0
        assert "bench" in result.stdout
    assert python("-m", "marl_parallel", "--version").stdout == f"marl-parallel {__version__}\n"


# -- the measuring itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constructor",
    [Hunt, Skirmish, Relay, functools.partial(gymnasium.make, "CartPole-v1")],
    ids=["Hunt", "Skirmish", "Relay", "CartPole"],
)
def test_bench_of_every_kind_of_environment(constructor):
    """Long enough for many episodes, with agents that join and leave."""
    messages = []
    against = [Contender("serial"), Contender("thread", 2)]
    found = measure("it", constructor, 2, against, seconds=0.05, repeats=2, on_turn=messages.append)
    assert [one.contender for one in found] == [Contender("loop"), *against]
    assert len(messages) == num_turns(len(against), repeats=2)
    assert found[0].speedup == found[0].efficiency == 1.0
    for one in found:
        assert one.microseconds_per_step == pytest.approx(1e6 / one.steps_per_second)
        assert one.efficiency == pytest.approx(one.speedup / min(one.workers, usable_cpus()))


class RaisesInClose(Hunt):
    """Its `close` raises."""

    def close(self):
        raise RuntimeError("it is stuck")


def test_failing_close_does_not_fail_the_bench():
    with pytest.warns(RuntimeWarning, match="it is stuck") as warned:
        found = measure("it", RaisesInClose, 1, [Contender("serial")], seconds=1e-3, repeats=1)
    assert len(found) == len(warned) == 2


class Counted(Hunt):
    """Counts its steps and its instances."""

    steps = 0

    def step(self, actions):
        Counted.steps += 1
        return super().step(actions)


def test_rates_count_steps_of_every_environment():
    """Exactly as many steps as the environments have counted."""
    Counted.steps = 0
    loop, serial = measure("it", Counted, 3, [Contender("serial")], seconds=0.2, repeats=1)
    took = 0.2 * (1 + 1 / 4)  # one round and its quarter of a round to warm up
    expected = took * (loop.steps_per_second + serial.steps_per_second)
    assert Counted.steps == pytest.approx(expected, rel=0.3)


class Logged(Hunt):
    """Logs the calls that its instances receive."""

    log: ClassVar[list[str]] = []

    def reset(self, seed=None, options=None):
        self.log.append(f"reset {seed}")
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        self.log.append(str({agent: actions[agent] for agent in sorted(actions)}))
        return super().step(actions)


class RecordsActions(Healthy):
    """Records the actions that its instances receive."""

    seen: ClassVar[list[dict]] = []

    def step(self, actions):
        self.seen.append(actions)
        return super().step(actions)


@pytest.mark.parametrize(
    "env",
    [
        "pettingzoo.classic.connect_four_v3:raw_env",
        "pettingzoo.classic.rps_v2:env",
        f"{MASKED}:by_observations",
        f"{MASKED}:by_infos",
        f"{MASKED}:mask_of_another_form",
        f"{SIMULATORS / 'pymarl_envs.py'}:Wrapped",
        f"{SIMULATORS / 'mappo_envs.py'}:Squad",
    ],
)
def test_action_masks_and_turns(bench, env):
    """The simulators raise if an action is illegal, in the plain loop, too."""
    more = ("--async", "--facade", "pettingzoo,gymnasium", "--backends", "serial,thread")
    result = bench(env, *BRIEF, *more)
    assert result.exit_code == 0, result.stderr
    assert "plain loop" in result.stdout


class LegalTuples(gymnasium.Env):
    """Observations are tuples with masks; one action is illegal, another one in each step."""

    n_agents = 2
    observation_space = spaces.Tuple([spaces.Dict(action_mask=spaces.MultiBinary(3))] * 2)
    action_space = spaces.Tuple([spaces.Discrete(3)] * 2)

    def observed(self):
        self.masks = tuple({"action_mask": (np.arange(3) != (self.time + i) % 3).astype(np.int8)} for i in range(2))
        return self.masks

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observed(), {}

    def step(self, actions):
        assert all(seen["action_mask"][action] for seen, action in zip(self.masks, actions, strict=True))
        self.time += 1
        return self.observed(), [0.0, 0.0], False, self.time == 7, {}


def test_action_masks_of_a_tuple_environment():
    """In the plain loop, too."""
    loop, serial = measure("it", LegalTuples, 2, [Contender("serial")], seconds=0.02, repeats=1)
    assert min(*loop.rounds, *serial.rounds) > 0


def test_mappo_environments_without_masks(bench):
    """They assert that they get one-hot rows."""
    result = bench(f"{SIMULATORS / 'mappo_envs.py'}:Particles", *BRIEF, "--backends", "serial")
    assert result.exit_code == 0, result.stderr
    assert "plain loop" in result.stdout


@pytest.mark.parametrize("way", ["step", "async", "pettingzoo", "gymnasium"])
def test_run_counts_its_steps(way):
    """For each way to step, the reported number equals the environments' own count; everything sent is received."""
    pool = draw_actions(RecordsActions().action_spaces, 3)
    going = iter([True] * 20 + [False])
    with stepping([RecordsActions] * 3, pool, Rules.PETTINGZOO, [way], backend="thread") as (run,):
        RecordsActions.seen.clear()
        assert run(lambda: next(going)) == len(RecordsActions.seen) >= 21
    assert all(
        RecordsActions().action_space(agent).contains(own)
        for acts in RecordsActions.seen
        for agent, own in acts.items()
    )


def test_all_contenders_use_the_same_seeds_and_actions():
    """One warm-up step and one measured step, here and in the plain loop."""
    Logged.log.clear()
    measure("it", Logged, 2, [Contender("serial")], seconds=1e-9, repeats=1)
    assert len(Logged.log) == 2 * (2 + 2 * 2)
    assert {Logged.log.count(entry) for entry in ("reset 42", "reset 43")} == {2}
    assert {Logged.log.count(entry) for entry in Logged.log if "wolf_0" in entry} == {4}


def test_equal_contenders_are_measured_once():
    assert contenders(["process", "process"], [4, 1, 8], num_envs=2) == [
        Contender("process", 1),
        Contender("process", 2),
    ]


def test_keywords_of_the_command_line_reach_the_constructor(restored_sys_path):
    assert len(constructor_of(SPREAD, json.dumps({"N": 6}))().possible_agents) == 6


class Keeping(Healthy):
    """Keeps agents in `agents` that have ended, as Flatland's wrapper does; no step is allowed after the end."""

    def reset(self, seed=None, options=None):
        self.left = 3
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        assert self.left > 0, "the episode is over"
        self.left -= 1
        observations, rewards, _, truncations, infos = super().step(actions)
        self.agents = self.possible_agents[:]
        return observations, rewards, dict.fromkeys(self.agents, self.left == 0), truncations, infos


def test_agents_that_stay_after_their_end():
    """The plain loop resets the environment when all have ended, as `ParallelEnv` does."""
    loop, serial = measure("it", Keeping, 2, [Contender("serial")], seconds=0.02, repeats=1)
    assert min(*loop.rounds, *serial.rounds) > 0
