"""The README and the pages in `docs`: code runs, tables are the measured ones, arguments are the real ones.

Code runs where the libraries that it imports are installed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

README = (ROOT / "README.md").read_text()
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FRAMEWORKS = "docs/frameworks/"
LIBRARIES = {"agilerl", "ray", "rl_games", "skrl", "stable_baselines3", "tianshou", "torchrl", "xuance"}
# Pages that explain what other pages and tests cover as well, or that need libraries of `.ci/run`.
REST = (
    *(f"docs/recipes/{name}.md" for name in ("gae", "heterogeneous_teams", "mappo", "self_play")),
    *(
        f"{FRAMEWORKS}{name}.md"
        for name in ("agilerl", "cleanrl", "rl_games", "rllib", "sb3", "skrl", "tianshou", "torchrl", "xuance")
    ),
    "docs/agents.md",
    "docs/index.md",
    "docs/recipes/video.md",
)
RESULTS = ROOT / "benchmarks" / "results"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def needed(block: str) -> set[str]:
    """The libraries that it imports."""
    nodes = [*ast.walk(ast.parse(block))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    facades = {"AgileRLVecEnv": "agilerl", "SB3VecEnv": "stable_baselines3", "TorchRLEnv": "torchrl"}
    facades |= {"SkrlEnv": "skrl", "TianshouVecEnv": "tianshou"}
    names |= {library for facade, library in facades.items() if facade in block}
    made = {
        "agilerl": "agilerl",
        "rllib": "ray",
        "sb3": "stable_baselines3",
        "skrl": "skrl",
        "tianshou": "tianshou",
        "torchrl": "torchrl",
    }
    names |= {library for facade, library in made.items() if f'facade="{facade}"' in block}
    return {name.partition(".")[0] for name in names}


def python_blocks(*, of_frameworks: bool = False) -> list[object]:
    """Every Python block about frameworks, or every other one, once, named by page and line.

    Blocks about frameworks are those of their pages, and those that need one of their libraries.
    """
    unique = {}
    for name, text in PAGES.items():
        for block in blocks("python", text):
            if (name.startswith(FRAMEWORKS) or bool(needed(block) & LIBRARIES)) != of_frameworks:
                continue
            line = text[: text.index(block)].count("\n") + 1
            marks = [pytest.mark.rest] if name in REST else []
            unique.setdefault(block, pytest.param(block, id=f"{name} line {line}", marks=marks))
    return [parameters for block, parameters in unique.items() if all(map(importlib.util.find_spec, needed(block)))]


def run(*command: str, text: str = "", cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=400, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("block", python_blocks())
def test_python_blocks_run_by_themselves(block, tmp_path):
    run("-", text=block, cwd=tmp_path)


@pytest.mark.parametrize("block", python_blocks(of_frameworks=True))
def test_blocks_about_frameworks(block, tmp_path):
    """The same; `.ci/run` has environments with these libraries."""
    run("-", text=block, cwd=tmp_path)


IN_DICTS = """
from gymnasium.spaces import Dict, MultiBinary
from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

class InDicts(BaseParallelWrapper):
    def observation_space(self, agent):
        return Dict(observation=super().observation_space(agent), action_mask=MultiBinary(5))

    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed, options)
        return self.in_dicts(observations), infos

    def step(self, actions):
        observations, *others = super().step(actions)
        return self.in_dicts(observations), *others

    def in_dicts(self, observations):
        return {agent: {"observation": one, "action_mask": [1] * 5} for agent, one in observations.items()}
"""


def test_first_example_of_learners_with_dict_observations(tmp_path):
    """It runs unchanged but for the simulator, with the same results."""
    block = blocks("python", PAGES["docs/learners.md"])[0]
    name = '"mpe2.simple_spread_v3"'
    assert name in block
    print_values = "print(values.sum(), final_values.sum(), advantages.sum())\n"
    with_arrays = run("-", text=block + print_values, cwd=tmp_path)
    in_dicts = block.replace(name, "lambda: InDicts(simple_spread_v3.parallel_env())")
    is_dict = "assert isinstance(data.observations, dict)\n"
    assert run("-", text=IN_DICTS + in_dicts + is_dict + print_values, cwd=tmp_path) == with_arrays


def test_pages_exist():
    assert set(REST) <= PAGES.keys()


def test_own_simulator_passes_check(tmp_path):
    (block,) = (
        block for block in blocks("python", PAGES["docs/recipes/own_simulator.md"]) if "class Foragers" in block
    )
    (tmp_path / "foragers.py").write_text(block[: block.index("with ParallelEnv(")])
    report = json.loads(
        run("-m", "marl_parallel", "check", "foragers.py:Foragers", "--seconds", "0.2", "--json", cwd=tmp_path)
    )
    assert [one for one in report["findings"] if one["question"] != "cost"] == []


def test_quickstart_example():
    output = run("examples/quickstart.py", "--steps", "60")
    assert "8 environments on" in output
    assert "16 episodes" in output
    assert len(re.findall(r"[1-9][\d,]* environment steps per second", output)) == 2


def test_async_rollout_example():
    output = run("examples/async_rollout.py", "--num-envs", "4", "--steps", "10")
    assert len(re.findall(r"[1-9][\d,]* environment steps per second", output)) == 2
    assert re.search(r"\d\.\d\d times as many", output)


def test_gymnasium_evolution_example():
    output = run("examples/gymnasium_evolution.py", "--generations", "2", "--num-envs", "4")
    assert "200 environment steps" in output
    assert re.search(r"generation 2: mean return -\d+", output)


def test_pettingzoo_episodes_example():
    output = run("examples/pettingzoo_episodes.py", "--episodes", "1", "--num-envs", "2")
    assert len(re.findall(r"episode 0 (archer|knight)_[01]: return \d+\.\d+, lived [1-9]\d* to", output)) == 4


def test_crashing_simulator_example():
    output = run("examples/crashing_simulator.py", "--steps", "460")
    for word in ("RuntimeError", "SIGSEGV", "has not finished its step within 1 s"):
        assert len(re.findall(rf"WARNING .*{word}", output)) == 1
    assert "9 restarts, [5, 4] by worker" in output
    assert "closed: 0 processes are left" in output


def test_two_commands_set_everything_up():
    commands = blocks("bash")
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") and command.count("\n") == 1 for command in commands)


def between_markers(name: str) -> str:
    """What the one page with the table of a benchmark shows; `--markdown` prints it."""
    marked = rf"^<!-- [a-z ]+: benchmarks/{name}\.py --markdown -->$(.*?)^<!-- end -->$"
    (shown,) = (table for text in PAGES.values() for table in re.findall(marked, text, re.S | re.M))
    return shown.strip()


TABLES = [
    "collect_rollouts",
    "compare_workers",
    "cpu_times",
    "compare_peers",
    "compare_facades",
    "async_stepping",
    "recovery",
    "ray_scaling",
    "time_to_return",
    "envpool_overhead",
    "isolated_generators",
    "many_agents",
    "pools_overhead",
    "ray_calls",
    "recycling",
    "simulators",
    "soak",
]
PRINT_TABLES = """
import contextlib, io, json, os, runpy, sys
tables = {}
for name in sys.argv[1:]:
    sys.argv[:] = [name, "--markdown"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_path(os.path.abspath(f"{name}.py"), run_name="__main__")
    tables[name] = printed.getvalue()
print(json.dumps(tables))
"""


@pytest.fixture(scope="module")
def printed_tables() -> dict[str, str]:
    """What each benchmark prints with `--markdown`."""
    tables: dict[str, str] = json.loads(run("-c", PRINT_TABLES, *TABLES, cwd=ROOT / "benchmarks"))
    return tables


@pytest.mark.parametrize("name", TABLES)
def test_tables_equal_the_measured_ones(name, printed_tables):
    assert (RESULTS / f"{name}.json").exists()
    assert between_markers(name) == printed_tables[name].strip()


@pytest.mark.parametrize("page", PAGES)
def test_pictures_exist(page):
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGES[page])
    assert all(((ROOT / page).parent / picture).is_file() for picture in pictures)
    assert pictures or page not in ("README.md", "docs/performance.md")


def test_arguments_equal_the_signature():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGES["docs/reference/parallel_env.md"], re.MULTILINE)
    parameters = inspect.signature(ParallelEnv).parameters
    shown = dict(rows)
    assert list(shown) == list(parameters)
    for name, default in shown.items():
        if parameters[name].default is not inspect.Parameter.empty and parameters[name].default is not None:
            assert default == f"`{parameters[name].default!r}`".replace("'", '"'), name


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_no_file_has_marks_of_a_merge_conflict():
    """Without git, which source distributions and the copies of `.ci/run` lack."""
    folders = (".ci", ".github", "benchmarks", "docs", "examples", "marl_parallel", "tests")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = {".c", ".cff", ".css", ".h", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
    checked = [path for path in paths if path.suffix in texts and path.is_file()]
    assert {ROOT / "CHANGELOG.md", ROOT / "README.md"} <= {*checked}
    mark = re.compile(rb"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [str(path) for path in checked if mark.search(path.read_bytes())] == []


def test_rule_and_number_of_the_readme_follow_from_the_measurements():
    """The best number of workers is faster than a plain loop from about that time of a step on, and slower below."""
    measured = json.loads((RESULTS / "compare_workers.json").read_text())["measurements"]
    measured = [one for one in measured if one["num_envs"] == 8]  # with dicts or arrays
    loops = {one["environment"]: one["microseconds_per_step"] for one in measured if one["backend"] == "loop"}
    best = {
        name: max(one["speedup"] for one in measured if one["environment"] == name and one["backend"] == "process")
        for name in loops
    }
    (microseconds,) = map(int, re.findall(r"It helps from about (\d+) µs a step", README))
    assert {name for name in loops if best[name] > 1} == {name for name in loops if loops[name] > 0.8 * microseconds}
    assert 0 < sum(best[name] > 1 for name in loops) < len(loops)
    assert f"[{best['simple_spread_v3']:.2f} times](docs/performance.md#by-number-of-workers)" in README
    for page in (PAGES["docs/performance.md"], (ROOT / "pyproject.toml").read_text()):
        assert f"about {microseconds} µs a step" in page


def test_ratios_in_the_text_are_those_of_the_measurements():
    page = PAGES["docs/performance.md"]
    table = re.compile(r"^<!-- [^>]+ -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
    measured = [float(ratio) for part in table.findall(page) for ratio in re.findall(r"(\d+\.\d\d)x", part)]
    for name in ("compare_peers", "compare_facades"):
        results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
        measured += [one["gain"] for one in results if one["against"] == "plain loop"]
    written = [
        found for text in (README, table.sub("", page)) for found in re.findall(r"(\d+\.(\d+))(?:x| times)", text)
    ]
    assert len(written) >= 5
    for ratio, decimals in written:
        assert any(f"{one:.{len(decimals)}f}" == ratio for one in measured), ratio
