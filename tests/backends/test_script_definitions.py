"""Definitions of the caller's script, in workers: decorated functions, classes that simulators pickle, child processes.

One script is run as a file, in a process that `multiprocessing` has spawned, in a notebook and by pytest; in the
notebook also with portable workers.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.release_independent

HEAD = '''
import functools, itertools, multiprocessing, os, pickle, sys, threading, typing
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv
from marl_parallel import ParallelEnv

CALLS = 0

@functools.lru_cache(maxsize=7, typed=True)
def cached(x):
    return 2 * x

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.lru_cache(maxsize=None)
def table():
    """Slow, so it is cached."""
    return [0]

@functools.cache
@functools.wraps(cached)
def twice_decorated(x):
    return cached(x) + 1

table.unit = "m"
cached_pair = functools.lru_cache(maxsize=None)(functools.partial(pow, 2))

def renamed(function):
    """The cached function is not the one that `__wrapped__` names."""
    return functools.wraps(function)(functools.lru_cache(lambda x: (function(x), "renamed")))

@renamed
def pair(x):
    return x

@functools.singledispatch
def kind_of(value):
    return "any"

@kind_of.register
def _(value: int):
    return "int"

kind_of("warm")

@np.vectorize
def halves(x):
    return x / 2

doubles = np.vectorize(lambda x: 2.0 * x, otypes=[float])
doubles([1])  # keeps a ufunc
added = np.frompyfunc(lambda x, y: x + y, 2, 1)
by_last = functools.cmp_to_key(lambda one, other: one[-1] - other[-1])
AgentName = typing.NewType("AgentName", str)
Parameters = typing.ParamSpec("Parameters")

class Register(type):
    @functools.cache
    def registered(cls):
        return cls.__name__

class lazy(functools.cached_property):
    pass

class Rps(PettingZooEnv, metaclass=Register):
    """PettingZoo's template: rock, paper, scissors."""

    metadata = {"name": "rps"}

    def __init__(self, render_mode=None):
        self.possible_agents = ["player_0", "player_1"]
        self.render_mode = render_mode

    @functools.lru_cache(maxsize=None)
    def observation_space(self, agent: AgentName):
        return spaces.Discrete(4)

    @functools.lru_cache(maxsize=None)
    def action_space(self, agent: AgentName):
        return spaces.Discrete(3)

    @staticmethod
    @functools.cache
    def static(x):
        return x, "static"

    @functools.cache
    @staticmethod
    def cached_static(x):
        return x, "cached static"

    @classmethod
    @functools.cache
    def of_class(cls, x):
        return cls.__name__, x

    @property
    @functools.cache
    def prop(self):
        return "prop"

    @functools.cached_property
    def slow(self):
        return [1]

    @lazy
    def slower(self):
        return [2]

    @functools.singledispatchmethod
    def kind(self, value):
        return "any"

    @kind.register
    def _(self, value: int):
        return "int"

    def power(self, base, exponent):
        return base**exponent

    square = functools.partialmethod(power, exponent=2)

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents[:]
        return dict.fromkeys(self.agents, 3), {agent: {} for agent in self.agents}

    def step(self, actions):
        infos = {agent: {"state": State(7)} for agent in self.agents}
        agents, self.agents = self.agents, []
        rewards, ends, truncations = (dict.fromkeys(agents, value) for value in (0.0, True, False))
        return dict(actions), rewards, ends, truncations, infos

    def results(self):
        function, Local, method = nested()
        return [
            cached(2), cached.cache_parameters(), fibonacci(20), table(), table.__name__, table.__doc__, table.unit,
            twice_decorated(1), cached_pair(5), pair(2), kind_of(1), kind_of("a"), halves([1, 2]).tolist(),
            doubles([1, 2]).tolist(), added([1], [2]).tolist(), sorted([[2], [1]], key=by_last),
            AgentName("a"), type(self).registered(), self.static(1), Rps.cached_static(2), self.of_class(3), self.prop,
            self.slow, self.slow is self.slow, self.slower, self.kind(1), self.kind("a"), self.square(3),
            function(1), Local().method(2), Local().slow, method(3),
        ]

def nested():
    @functools.lru_cache
    def function(x):
        return x, "nested"

    class Local:
        @functools.cache
        def method(self, x):
            return x, "local"

        @functools.cached_property
        def slow(self):
            return "slow"

    return function, Local, Local().method

function_here, LocalHere, method_here = nested()

class State:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is State and self.value == other.value

    class Inner:
        pass

def doubled(x):
    return 2 * x * FACTOR

FACTOR = 10

def in_child(connection):
    connection.send((doubled(1), multiprocessing.parent_process().name))

class Pickling(Rps):
    """Does with classes and functions of the script what simulators do, in each process that runs it."""

    def __init__(self, given=None, state=None, env_id=0):
        super().__init__()
        self.given, self.state, self.late = given, state, None

    def works(self):
        states = [State(5), self.state, Pickling(), State.Inner(), State, cached, doubled, self.given, self.late, int]
        for state in states:
            again = pickle.loads(pickle.dumps(state))
            assert again is state or type(again) is type(state), state
        import __main__
        assert __main__.State is State and __main__.Pickling is type(self) and __main__.cached is cached
        assert __main__.FACTOR == 10 and __main__.doubled(1) == 20
        return True

    def in_worker(self):
        import __main__
        assert getattr(__main__, "__file__", None) is None and getattr(__main__, "__spec__", None) is None
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(doubled, [1, 2]) == [20, 40]
            assert [one.value for one in pool.map(State, [1, 2])] == [1, 2]
            assert pool.map(self.given, [1]) == [20]
            assert pool.map(cached, [3]) == [6]
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(theirs,))
        child.start()
        assert ours.recv() == (20, multiprocessing.current_process().name)
        child.join()
        # Without the script, which would start workers again.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(os.getpid) != os.getpid()
            assert pool.apply(eval, ("__import__('sys').modules['__main__'].__dict__.get('State')",)) is None
        return True

    def identity(self):
        process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        return os.getpid(), process.name, process._identity, parent.pid, parent.name, parent.is_alive(), process.daemon

    def infos(self):
        return table.cache_info().currsize, fibonacci.cache_info().currsize

    def add(self):
        table().append(0)
        return len(table())

    def fill(self, value):
        self.late = value

lock = threading.Lock()

class Locked(Rps):
    """It needs what cannot be pickled."""

    def use(self):
        with lock:
            return True
'''

CHECKS = """
def check():
    expected = Rps().results()
    fibonacci(30)
    extras = [function_here, LocalHere, method_here, cached, Parameters, Rps.static, Rps().observation_space]
    with ParallelEnv([lambda: Rps()] * 2 + [Rps] * 2, num_workers=2) as env:
        assert env.call("results") == (expected,) * 4, env.call("results")
        env.reset()
        state = env.step([{"player_0": 1, "player_1": 2}] * 4)[4][3]["player_1"]["state"]
        assert type(state) is State and state == State(7)
    # The caches of this process stay here, and each worker has one of each function.
    constructors = [functools.partial(Pickling, doubled, State(3), env_id) for env_id in range(4)]
    with ParallelEnv(constructors, num_workers=2, on_error="restart") as env:
        assert env.call("infos") == ((0, 0),) * 4
        assert env.call("add") == (2, 3, 2, 3)
        assert env.call("works") == (True,) * 4
        env.set_attr("late", [doubled] * 4)
        assert env.call("works") == (True,) * 4
        env.call("fill", State(9))
        assert env.call("works") == (True,) * 4
        assert env.call("in_worker", env_ids=[0, 3]) == (True,) * 2
        assert env.call(lambda sim: [function_here(1), LocalHere().slow, method_here(2)]) == (
            [(1, "nested"), "slow", (2, "local")],) * 4
        for one in extras:
            assert env.call(lambda _, one: one is not None, one) == (True,) * 4, one
        assert env.call(lambda _: cached)[0] is cached  # it comes back as the same
        assert env.call(lambda _: State)[0] is State
        identities = env.call("identity")
        parent = multiprocessing.current_process()
        for pid, name, numbers, *of_parent in identities:
            assert pid != os.getpid() and of_parent == [os.getpid(), parent.name, True, False], of_parent
            assert numbers[:-1] == parent._identity and name.rpartition("-")[2] == ":".join(map(str, numbers))
        assert identities[0][:3] == identities[1][:3] and identities[2][:3] == identities[3][:3]
        with ParallelEnv([Pickling], num_workers=1, seed=1) as other:
            names = {one[1] for one in (*identities, *other.call("identity"))}
            assert len(names) == 3 == len({one[2] for one in (*identities, *other.call("identity"))})
        env.reset()
        env.restart([0])
        assert env.call("works") == (True,) * 4
    for backend in ("serial", "thread"):
        with ParallelEnv([Locked, lambda: Locked()], num_workers=2, backend=backend) as env:
            assert env.call("use") == (True,) * 2
    try:
        ParallelEnv([lambda: Locked()], num_workers=1)
    except TypeError as error:
        text = str(error)
        assert "global 'lock' of use (lock)" in text and "inside the constructor" in text, text
    else:
        raise AssertionError("a lock was pickled")
    print("checked in", __name__, flush=True)
"""

END = """
if __name__ == "__main__":
    check()
    child = multiprocessing.get_context("spawn").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0
"""


def test_definitions_of_a_script(tmp_path):
    """Also where `multiprocessing` has spawned the process whose script it is."""
    (tmp_path / "program.py").write_text(HEAD + CHECKS + END)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:2] == ["checked in __main__", "checked in __mp_main__"], done.stdout
    assert not done.stderr


AS_TEST = """
def test_it():
    with ParallelEnv([lambda: Rps()] * 2 + [Rps] * 2, num_workers=2) as env:
        assert env.call("results") == (Rps().results(),) * 4
        assert env.call(lambda _: cached)[0] is cached
        assert env.call(lambda sim: function_here(1)) == ((1, "nested"),) * 4
"""


def test_definitions_of_a_test_that_workers_cannot_import(tmp_path):
    (tmp_path / "test_program.py").write_text(HEAD + AS_TEST)
    program = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "--import-mode=importlib", "test_program.py"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


REDEFINED = """
with ParallelEnv([functools.partial(Pickling, doubled, State(3))] * 2, num_workers=1) as env:
    before = State

    class State(before):
        "The class that has this name now."

    assert env.call("works") == (True,) * 2
    assert {type(one) for one in env.get_attr("state")} == {before}
"""


def test_definitions_of_a_notebook(tmp_path, monkeypatch):
    """With the usual and with portable workers; a class may be defined again while workers have it."""
    from jupyter_client import BlockingKernelClient
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    manager, client = start_new_kernel(startup_timeout=120, cwd=str(tmp_path))
    assert isinstance(client, BlockingKernelClient)
    try:
        portable = "os.environ['MARL_PARALLEL_PORTABLE'] = '1'; check()"
        for cell in (HEAD, CHECKS, "check()", portable, REDEFINED):
            reply = client.execute_interactive(cell, timeout=180, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
