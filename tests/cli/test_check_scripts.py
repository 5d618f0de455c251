"""`check FILE.py:NAME` sees what the script FILE.py sees: its definitions travel to workers by value."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from marl_parallel.cli.check import Job, examine, run_probes
from marl_parallel.cli.check_texts import Question, Severity

pytestmark = pytest.mark.release_independent

SCRIPT = """
    import functools, pickle, sys, threading
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import ParallelEnv

    assert sys.modules["__main__"].__file__ == __file__, "a simulator that imports __main__ finds this file"
    lock = threading.Lock()

    class State:
        value = 1

    class Game(ParallelEnv):
        metadata = {"name": "game"}
        possible_agents = ["a", "b"]

        @functools.lru_cache(maxsize=None)
        def observation_space(self, agent):
            return spaces.Box(-9, 9, (1,), np.float32)

        @functools.lru_cache(maxsize=None)
        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            import __main__

            assert __main__.State is State
            self.state_ = pickle.loads(pickle.dumps(State()))
            assert type(self.state_) is State
            self.agents = ["a", "b"]
            return self.of_all(np.zeros(1, np.float32)), self.of_all({})

        def of_all(self, value):
            return dict.fromkeys(self.agents, value)

        def step(self, actions):
            seen = self.of_all(np.ones(1, np.float32))
            return seen, self.of_all(0.0), self.of_all(False), self.of_all(False), self.of_all({})

    class Locked(Game):
        def step(self, actions):
            with lock:
                return super().step(actions)

    if __name__ == "__main__":
        raise SystemExit("the part for the main process must not run")
"""


def test_script_with_a_lock_among_its_globals(tmp_path):
    """Imported as a module, it would seem to be right."""
    (tmp_path / "game.py").write_text(textwrap.dedent(SCRIPT))
    brief = {"timeout": 20.0, "seconds": 0.05, "steps": 5}
    jobs = [
        Job("alone", f"{tmp_path}/game.py:Game", "{}", **brief),
        Job("alone", f"{tmp_path}/game.py:Locked", "{}", **brief),
    ]
    outcomes = {job.environment.rpartition(":")[2]: outcome for job, outcome in run_probes(jobs, 2, lambda job: None)}
    assert not [one for one in outcomes["Game"].findings if one.severity is Severity.PROBLEM]
    (problem,) = [one for one in outcomes["Locked"].findings if one.severity is Severity.PROBLEM]
    assert problem.question is Question.PICKLING
    assert "attribute 'step' of class Locked, global 'lock' of step (lock)" in problem.what
    assert "into a module" in problem.advice


def test_script_in_all_backends(tmp_path):
    (tmp_path / "game.py").write_text(textwrap.dedent(SCRIPT))
    command = ["check", "game.py:Game", "--seconds", "0.02", "--steps", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "marl_parallel", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


GAME = """
    import {module}
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import ParallelEnv

    {module}.{name} = 7  # as a script or a notebook does, before it makes its environments

    class Game(ParallelEnv):
        metadata = {{"name": "game"}}
        possible_agents = ["a"]

        def observation_space(self, agent):
            return spaces.Box(-9, 9, (1,), np.float32)

        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = ["a"]
            return {{"a": np.full(1, {read}, np.float32)}}, {{"a": {{}}}}

        def step(self, actions):
            return {{"a": np.full(1, {read}, np.float32)}}, {{"a": 0.0}}, {{"a": False}}, {{"a": False}}, {{"a": {{}}}}
"""


@pytest.mark.parametrize(
    ("module", "name", "read", "what"),
    [
        ("simulation_config", "number", "simulation_config.number", "in a worker process, environment 0 gives other"),
        ("simulation_config", "cell", "getattr(simulation_config, 'cell', 3)", "in a worker process, environment 0"),
        ("calendar", "own_number", "calendar.own_number", "has no attribute 'own_number'"),
    ],
)
def test_what_the_script_has_set_in_modules_is_named_as_a_reason(tmp_path, monkeypatch, module, name, read, what):
    (tmp_path / "simulation_config.py").write_text("number = 1\n")
    (tmp_path / "game.py").write_text(textwrap.dedent(GAME.format(module=module, name=name, read=read)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = Job("alone", f"{tmp_path}/game.py:Game", "{}", timeout=20.0, seconds=0.02, steps=5)
    found = examine(job, ["serial", "process"])
    (problem,) = [one for one in found.findings if one.severity is Severity.PROBLEM]
    assert problem.question is Question.PROCESS
    assert what in problem.what
    assert "his may come from what the script did before, which workers do not know" in problem.advice
    assert "docs/script_state.md" in problem.advice
