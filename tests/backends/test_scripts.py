"""Scripts, notebooks, `python -c` and other ways to run the caller's code: no guard, no importable module.

How scripts end by themselves is tested in `test_closing`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, TESTS
from helpers.setups import rest

pytestmark = pytest.mark.release_independent


PROGRAM = '''
    """Everything is defined where it is used; imported a second time, it would start workers again."""
    import os
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import ParallelEnv as PettingZooEnv
    from marl_parallel import ParallelEnv

    class Mine(PettingZooEnv):
        metadata = {"name": "mine"}
        possible_agents = ["a"]

        def __init__(self, env_id):
            self.env_id = env_id

        def observation_space(self, agent):
            return spaces.Box(-9, 9, (1,), np.float32)

        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = ["a"]
            return {"a": np.full(1, self.env_id, np.float32)}, {"a": {}}

        def step(self, actions):
            values = {"a": np.full(1, self.env_id + actions["a"], np.float32)}
            return values, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {"pid": os.getpid()}}

    offset = 3

    with ParallelEnv([lambda env_id: Mine(env_id + offset)] * 3, num_workers=2) as env:
        env.reset()
        observations, rewards, _, _, infos = env.step([{"a": 1}] * 3)
    assert [float(one["a"][0]) for one in observations] == [4.0, 5.0, 6.0]
    assert len({one["a"]["pid"] for one in infos} - {os.getpid()}) == 2
    print("stepped")
'''


def as_test(program: str) -> str:
    return "def test_it():\n" + textwrap.indent(program, "    ").replace("__main__", "__name__")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    text = textwrap.dedent(PROGRAM)
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "test_program.py").write_text(as_test(text))
    return tmp_path


# As the console script does it: without the current folder on `sys.path`, where workers would find the test.
_CONSOLE_SCRIPT = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = ["-c", _CONSOLE_SCRIPT, "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_program.py"]
BY_FILE = [*PYTEST, "--import-mode=importlib"]


@pytest.mark.parametrize(
    ("command", "from_stdin"),
    [
        (["program.py"], False),
        rest(["-m", "program"], False),
        (["-"], True),
        (["-c", textwrap.dedent(PROGRAM)], False),
        rest(["-i", "program.py"], False),
        rest(["-I", "program.py"], False),
        (["-m", "IPython", "--no-banner", "--colors=NoColor", "program.py"], False),
        rest(["-m", "IPython", "--no-banner", "--colors=NoColor", "-c", "%run program.py"], False),
        rest(["-m", "IPython", "--no-banner", "--colors=NoColor", "-c", textwrap.dedent(PROGRAM)], False),
        (BY_FILE, False),  # no worker can import the test then
        rest([*PYTEST, "--import-mode=prepend"], False),
    ],
    ids=[
        *("script", "-m", "stdin", "-c", "-i", "-I", "ipython script", "ipython %run", "ipython -c"),
        *("pytest importlib", "pytest prepend"),
    ],
)
def test_every_way_to_run_code(command, from_stdin, program):
    text = textwrap.dedent(PROGRAM) if from_stdin else ""
    environ = {**os.environ, "IPYTHONDIR": str(program / "ipython")}
    done = subprocess.run(
        [sys.executable, *command], cwd=program, input=text, env=environ, capture_output=True, text=True, timeout=60
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "1 passed" in output if _CONSOLE_SCRIPT in command else output.count("stepped") == 1, output
    assert "Traceback" not in output


HANDING_OVER = """
    import dataclasses, enum, functools, sys
    sys.path.insert(0, {tests!r})
    from simulators.deterministic import Scripted
    from marl_parallel import ParallelEnv

    class Colour(enum.Enum):
        RED = 1

    @dataclasses.dataclass
    class Task:
        level: int

    class Obliging(Scripted):
        task = given = None

        def reset(self, *, seed=None, options=None):
            self.given = options
            return super().reset()

        def is_red(self, colour):
            return colour is Colour.RED

    def level_of(simulator):
        return simulator.task.level

    script = [({{}}, {{}}, {{}}, {{}}, {{}})]
    with ParallelEnv([lambda: Obliging(None, None, ({{}}, {{}}), script)] * 2, num_workers=2) as env:
        assert env.call("is_red", Colour.RED) == (True, True)
        env.set_attr("task", Task(3))
        assert env.get_attr("task") == (Task(3),) * 2
        assert env.call(level_of) == (3, 3)
        env.reset(options={{"colour": Colour.RED}})
        assert env.get_attr("given") == ({{"colour": Colour.RED}},) * 2
        env.step([{{"x": Colour.RED}}] * 2)
        assert env.get_attr("actions") == ([{{"x": Colour.RED}}],) * 2
    # Workers that have heard nothing of this module before:
    with ParallelEnv([functools.partial(Scripted, None, None, ({{}}, {{}}), script)] * 2, num_workers=2) as env:
        env.set_attr("first", [Colour.RED] * 2)
        assert env.call(lambda simulator: simulator.first is Colour.RED) == (True, True)
    with ParallelEnv([functools.partial(Scripted, None, None, ({{}}, {{}}), script)] * 2, num_workers=2) as env:
        assert env.call(lambda _: Colour.RED) == (Colour.RED,) * 2
    print("handed over")
"""


@pytest.mark.parametrize("command", [["test_program.py"], BY_FILE], ids=["script", "pytest importlib"])
def test_workers_get_definitions_of_the_script(command, tmp_path):
    text = textwrap.dedent(HANDING_OVER.format(tests=str(TESTS)))
    own, used = text.split("script = ")
    (tmp_path / "test_program.py").write_text(
        text if command is not BY_FILE else f"{own}\ndef test_it():\n{textwrap.indent('script = ' + used, '    ')}"
    )
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


DOOMED = """
    import functools, os, sys, time
    sys.path.insert(0, {tests!r})
    from simulators.failing import Fragile
    from marl_parallel import ParallelEnv

    def busy():
        os.write(1, b"busy\\n")
        while True:
            pass

    faults = {{"step": {fault}}}
    env = ParallelEnv([functools.partial(Fragile, faults, {notes!r})] * 2, num_workers=2)
    env.reset()
    print("ready", flush=True)
    {then}
"""


@pytest.mark.whole_machine
@pytest.mark.parametrize(
    ("fault", "then"),
    [
        ("None", "time.sleep(60)"),
        ("busy", "env.step([dict(a=0, b=0)] * 2)"),
        ("functools.partial(time.sleep, 60)", "env.step([dict(a=0, b=0)] * 2)"),
    ],
    ids=["idle", "busy", "asleep"],
)
def test_killed_parent_leaves_nothing(fault, then, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    text = textwrap.dedent(DOOMED).format(tests=str(TESTS), notes=str(tmp_path), fault=fault, then=then)
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout.readline() == "ready\n"
        if fault == "busy":
            assert parent.stdout.readline() == "busy\n"
        descendants = psutil.Process(parent.pid).children(recursive=True)
        workers = {int(path.read_text()) for path in tmp_path.glob("started-*")}
        assert len(workers) == 2
        assert workers <= {one.pid for one in descendants}
    finally:
        parent.kill()
        parent.stdout.close()
        parent.wait()
    _, alive = psutil.wait_procs(descendants, timeout=5.0)
    assert not alive
    assert set(os.listdir("/dev/shm")) <= shared


FORKING = """
    import os, sys
    sys.path.insert(0, {tests!r})
    from simulators.deterministic import Relay
    from gymnasium.error import ClosedEnvironmentError
    from marl_parallel import ParallelEnv
    env = ParallelEnv([Relay] * 2, num_workers=2, backend={backend!r})
    env.reset()
    if (child := os.fork()) == 0:
        try:
            env.step([{{}}] * 2)
        except ClosedEnvironmentError:
            env.close()
            del env
            os._exit(5)
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    env.step([{{}}] * 2)
    env.close()
"""


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_forked_child_cleans_up_nothing(backend):
    """In a forked child the object counts as closed; the caller is not affected."""
    program = textwrap.dedent(FORKING).format(tests=str(TESTS), backend=backend)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
