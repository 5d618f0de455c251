"""Names of the caller's script that code looks up in workers: in annotations, by `globals()`, `eval` and `__main__`.

One script is run as a file, by IPython, by pytest as a test that workers cannot import, and as a module that travels by
value. It compares what workers find with what it finds itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.setups import rest

pytestmark = pytest.mark.release_independent

SCRIPT = '''
from __future__ import annotations
import concurrent.futures, dataclasses, functools, inspect, json, os, pickle, socket, sys, threading, typing
import numpy as np
import wave  # which workers have no other reason to import
from typing import Optional
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv
from marl_parallel import ParallelEnv

SIZE, TABLE = 3, {"a": 1}
lock = threading.Lock()
listening = socket.socket()
opened = open(os.devnull)
thread = threading.Thread()
large = np.zeros(1 << 24)
long = list(range(1 << 20))

class Refusing:
    def __reduce__(self):
        raise SystemExit("it is never pickled")

refusing = Refusing()

@dataclasses.dataclass
class Deep:
    size: int = 0

@dataclasses.dataclass
class Inner:
    number: int
    deep: "Optional['Deep']" = None
    waves: Optional["wave.Wave_read"] = None

@dataclasses.dataclass
class Outer:
    inner: list[Inner]
    other: "typing.Union[Optional['Inner'], Left]" = None
    more: Optional["Unknown"] = None

@dataclasses.dataclass
class Left:
    up: Optional[Outer] = None
Unknown = typing.Union[int, "Deep"]

class ByName:
    size = SIZE
    def value(self):
        return 5 * SIZE + len(TABLE) + helper() + (Derived().value() if type(self) is ByName else 0)

class Derived(ByName):
    def value(self):
        return super().value() + 1

class Both(Derived, dict):
    pass

def helper():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(int, np.ones(1)[0]).result()

@functools.lru_cache
def cached(x):
    return x + SIZE

class Plugin:
    pass

class One(Plugin):
    pass

class Two(One):
    pass

class UsesLock:
    def use(self):
        return lock

def uses_refusing():
    return refusing, UsesLock

class Calls:
    lock = "an attribute"
    def use(self):
        return self.lock

LEVEL = 1
made = []

def annotated(x: Deep, *, y: "list[Inner]" = ()) -> ByName:
    pass

def hints_of(kind):
    found = typing.get_type_hints(kind)
    return {name: str(value) for name, value in found.items()}

class Reader(PettingZooEnv):
    metadata = {"name": "reader"}
    possible_agents = ["a"]
    def observation_space(self, agent): return spaces.Box(-9, 9, (1,), np.float32)
    def action_space(self, agent): return spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        self.agents = ["a"]
        return {"a": np.zeros(1, np.float32)}, {"a": {}}
    def step(self, actions):
        return {"a": np.zeros(1, np.float32)}, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {}}
    def annotations(self):
        inner = typing.get_args(typing.get_type_hints(Outer)["inner"])[0]
        return hints_of(Outer), hints_of(inner), str(inspect.signature(annotated, eval_str=True)), hints_of(annotated)

def by_globals():
    return globals()["Derived"]().value(), globals().get("cached")(1), globals()["Both"](a=1), "ByName" in globals()

def by_eval():
    return eval("Derived().value() + cached(2) + helper()"), eval("SIZE + np.ones(1)[0]"), eval("Calls().use()")

def by_module():
    module = sys.modules[__name__]
    names = sorted(name for name, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == __name__)
    return getattr(module, "".join(["Der", "ived"]))().value(), hasattr(module, "nothing"), "Both" in names

def by_dict():
    return vars(sys.modules[__name__])["Derived"]().value(), sys.modules[__name__].__dict__["cached"](3)

def by_base():
    return [one.__name__ for one in Plugin.__subclasses__()], [one.__name__ for one in One.__subclasses__()]

def by_pickle():
    again = [pickle.loads(pickle.dumps(one)) for one in (Outer([]), Deep, Derived)]
    by_file = pickle.loads(b"\\x80\\x04c" + __name__.encode() + b"\\nDerived\\n)\\x81.")
    return [type(one).__name__ for one in again], again[1] is Deep, by_file.value()

def by_source():
    return inspect.getsource(Reader)[:20], inspect.getsource(Outer), os.path.basename(inspect.getfile(Deep)), (
        inspect.getsource(by_base))

def set_first():
    """What a function sets as a global is what a class reads that it finds by name, as long as it is the first."""
    return globals()["Levelled"]().level()

class Levelled:
    def level(self):
        return LEVEL

def nested():
    class Local(ByName):
        size = SIZE + 1
        kind: Deep
    return Local.size, Local().value()

def raised():
    raise globals()["Failure"](3)

class Failure(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code

def make(fails=False):
    return globals()["Reader"]()

def missing(name):
    try:
        return str(getattr(sys.modules[__name__], name))
    except AttributeError as error:
        return str(error)

def in_globals(*names):
    return [name in globals() for name in names]

FOUND = [by_globals, by_eval, by_dict, by_base, by_pickle, set_first, nested]

def check():
    asked = [by_module, *FOUND, *([by_source] if "__file__" in globals() else [])]
    annotations, expected = Reader().annotations(), {function.__name__: function() for function in asked}
    for backend in BACKENDS:
        with ParallelEnv([make, Reader, lambda: make(), Reader], num_workers=2, backend=backend) as env:
            env.reset()
            if backend == "process":
                assert env.call(lambda _: "wave" in sys.modules) == (False,) * 4
            assert env.call("annotations") == (annotations,) * 4, (backend, env.call("annotations"), annotations)
            for function in asked:
                found = env.call(lambda _, function: function(), function)
                assert found == (expected[function.__name__],) * 4, (backend, function.__name__, found)
            if backend == "process":
                assert env.call(lambda _: "wave" in sys.modules) == (True,) * 4  # in an annotation
                for name, why in (
                    ("lock", "cannot pickle '_thread.lock' object"), ("large", "numpy.ndarray"), ("long", "larger"),
                    ("UsesLock", "it uses 'lock'"), ("refusing", "travels only"), ("opened", "TextIOWrapper"),
                ):
                    for text in env.call(lambda _, name: missing(name), name):
                        assert "has no attribute '" + name + "': the caller has it" in text and why in text, text
                assert env.call(lambda _: missing("nothing"))[0].endswith("of this worker has no attribute 'nothing'")
                assert env.call(lambda _: in_globals("Both", "large", "UsesLock")) == ([True, False, False],) * 4
            value = env.call(lambda _: globals()["Derived"]())[3]
            assert type(value) is Derived and value.value() == Derived().value()
            try:
                env.call(lambda _: raised())
            except Exception as error:
                cause = error.__cause__
                assert type(cause) is Failure and cause.code == 3, repr(cause)
    print("checked", flush=True)
'''

END = """
if __name__ == "__main__":
    check()
"""

IPYTHON = ["-m", "IPython", "--no-banner", "--colors=NoColor", "program.py"]
_CONSOLE_SCRIPT = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = ["-c", _CONSOLE_SCRIPT, "-q", "-s", "-p", "no:cacheprovider", "--rootdir=.", "--import-mode=importlib"]


REGISTERED = """
import cloudpickle, program
cloudpickle.register_pickle_by_value(program)
for function in (program.by_base, program.by_pickle):  # workers import the module, whose classes are others
    program.FOUND.remove(function)
program.check()
"""


@pytest.mark.parametrize(
    ("command", "backends", "portable"),
    [
        (["program.py"], ("serial", "thread", "process", "hybrid"), False),
        (["program.py"], ("process",), True),
        rest(IPYTHON, ("process",), False),
        ([*PYTEST, "test_program.py"], ("serial", "process"), False),
        (["-c", REGISTERED], ("hybrid",), False),
    ],
    ids=["script", "portable", "ipython", "pytest importlib", "registered"],
)
def test_names_of_a_script(command, backends, portable, tmp_path):
    text = SCRIPT.replace("BACKENDS", repr(backends))
    (tmp_path / "program.py").write_text(text + END)
    (tmp_path / "test_program.py").write_text(text + "def test_it():\n    check()\n")
    environ = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    if portable:
        environ["MARL_PARALLEL_PORTABLE"] = "1"
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked" in done.stdout, done.stdout + done.stderr


# -- a script and a process that gets its names, without workers -------------------------------------------------------

SEND = """
def asked():
    globals()
    return answers()

def send(value):
    import pickle, subprocess, sys
    from marl_parallel.core.objects.namespaces import dump_namespaces
    from marl_parallel.core.objects.pickling import dumps
    pickled = dumps(value)
    sent = pickle.dumps((dump_namespaces([pickled], []), pickled))
    done = subprocess.run([sys.executable, "../receiver.py"], input=sent, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()
"""

RECEIVER = """
import pickle, sys
from marl_parallel.core.objects.script_names import install_namespaces, open_script_of_worker
namespaces, pickled = pickle.load(sys.stdin.buffer)
open_script_of_worker()
install_namespaces(namespaces)
print(pickle.loads(pickled)())
"""

CHECK = """
if __name__ == "__main__":
    found, expected = send(asked), EXPECTED or str(asked())
    assert found == expected, (found, expected)
    print("checked")
"""


def sent(tmp_path, script, expected=None, check=CHECK, command=("program.py",)):
    """Run a script that sends `asked` to another process and compares what this returns."""
    where = tmp_path / "script"
    where.mkdir(exist_ok=True)
    (tmp_path / "receiver.py").write_text(RECEIVER)
    (where / "program.py").write_text(script + SEND + f"EXPECTED = {expected!r}\n" + check)
    done = subprocess.run([sys.executable, *command], cwd=where, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "checked\n", done.stdout + done.stderr


PROXIES = """
class Missing:
    def __getattr__(self, name):
        raise ImportError("install it first")

class Local:
    @property
    def __class__(self):
        raise RuntimeError("outside of a request")
    def __getattribute__(self, name):
        raise RuntimeError("outside of a request")

class Remote:
    def __getattr__(self, name):
        raise ConnectionError("it connects when an attribute is read")

library, request, remote = Missing(), Local(), Remote()

class Outer:
    class Inner:
        size = 2
Inner, Outer = Outer.Inner, Missing()

class Maze:
    def use(self):
        return 5
class Playing(Maze):
    def use(self):
        return library.use()

def answers():
    return globals()["Maze"]().use(), Inner.size, [name in globals() for name in ("library", "request", "Playing")]
"""


def test_objects_that_raise_when_attributes_are_read(tmp_path):
    sent(tmp_path, PROXIES, "(5, 2, [False, False, False])")


BY_OTHER_NAME = """
import enum, functools, sys, typing
LEVEL = 3
class Base:
    def value(self):
        return LEVEL + helper(1)
class Derived(Base):
    other: "typing.Optional[Pair]" = None
    def value(self):
        return super().value() + 1
class Pair(typing.NamedTuple):
    a: int = 1
class Colour(enum.Enum):
    RED = 1
STARTS = {"colour": Colour.RED, "maze": Derived}
@functools.lru_cache
def helper(x):
    return LEVEL * x + Pair().a
def answers():
    module = sys.modules[__name__]
    hints = typing.get_type_hints(globals()["Derived"])
    return (
        globals()["Derived"]().value(), eval("helper(2)"), getattr(module, "STARTS")["maze"]().value(),
        str(globals()["STARTS"]["colour"]), sorted(hints), vars(module)["Colour"](1).name,
        [one.__name__ for one in Base.__subclasses__()],
    )
"""

SPAWNED = """
def check():
    found, expected = send(asked), str(asked())
    assert found == expected, (found, expected)
    print("checked", flush=True)
if __name__ == "__main__":
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0
"""

BY_COMMAND = """
from pathlib import Path
from marl_parallel import making
script = making._run_script(Path("program.py").resolve())
found, expected = script.send(script.asked), str(script.asked())
assert found == expected, (found, expected)
print("checked")
"""


@pytest.mark.parametrize(
    ("check", "command"),
    [(CHECK, ["program.py"]), (SPAWNED, ["program.py"]), ("", ["-c", BY_COMMAND])],
    ids=["script", "spawned", "command line"],
)
def test_names_of_a_script_with_another_name(check, command, tmp_path):
    """`__mp_main__` is the name of the script in a process of multiprocessing, and for `marl-parallel check`."""
    sent(tmp_path, BY_OTHER_NAME, check=check, command=command)


PACKAGE = """
import sys
sys.path.insert(0, "elsewhere")
import cloudpickle, maps.rooms.large, maps.tools
cloudpickle.register_pickle_by_value(maps)
def answers():
    return maps.rooms.large.asked()
def asked():
    return maps.rooms.large.asked()
"""

LARGE = """
import maps.rooms
from maps.tools import twice
class Large:
    def size(self):
        return twice(globals()["SIZE"])
class Larger(Large):
    pass
SIZE = 4
def missing():
    try:
        import maps.nothing
    except ModuleNotFoundError as error:
        return str(error)
def asked():
    import maps.rooms.large as module
    from maps.rooms import large
    return globals()["Larger"]().size(), module.SIZE, large is module, maps.rooms.large is module, missing()
"""


def test_package_that_the_other_process_cannot_import(tmp_path):
    rooms = tmp_path / "script" / "elsewhere" / "maps" / "rooms"
    rooms.mkdir(parents=True)
    (rooms.parent / "__init__.py").write_text("")
    (rooms.parent / "tools.py").write_text("def twice(x):\n    return 2 * x\n")
    (rooms / "__init__.py").write_text("")
    (rooms / "large.py").write_text(LARGE)
    script = PACKAGE
    check = CHECK.replace("send(asked)", "send(maps.rooms.large.asked)").replace("str(asked())", "str(answers())")
    sent(tmp_path, script, check=check)


LIBRARY = """
class Tensor:
    pass
class Module:
    pass
"""

ANNOTATED = """
from __future__ import annotations
import dataclasses, inspect, sys, typing
from library import Module, Tensor
class Agent(Module):
    def act(self) -> Tensor:
        return Tensor()
Weights = typing.Union[int, Agent]
@dataclasses.dataclass
class Level:
    size: int = 1
    def play(self, agent: Agent) -> Tensor:
        return 3
class Maze:
    level: Level
    def step(self, x: Tensor, y: "list[Agent]", z: Weights = 0) -> Level:
        return 5
    def level_size(self) -> Level:
        return 6
def answers():
    hints = str(typing.get_type_hints(Maze)), str(inspect.signature(Maze.level_size, eval_str=True))
    found = Maze().step(1, 2), Level().play(0), hints, "library" in sys.modules
    module = sys.modules[__name__]
    agent = getattr(module, "".join(["Age", "nt"]))()
    return found, type(agent.act()).__name__, "library" in sys.modules
"""


def test_annotations_of_functions_import_no_library(tmp_path):
    """Code that looks a name up imports the library."""
    (tmp_path / "script").mkdir()
    for where in (tmp_path, tmp_path / "script"):
        (where / "library.py").write_text(LIBRARY)
    check = CHECK.replace("send(asked)", "send(answers)")
    check = check.replace("str(asked())", 'str(answers()).replace("True), ", "False), ")')
    sent(tmp_path, ANNOTATED, check=check)


CONSTANTS = """
import collections, dataclasses, datetime, decimal, enum, fractions, pathlib, re, types, typing, uuid
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle
from multiprocessing import shared_memory
made = []
class Env(EzPickle):
    def __init__(self, size=3):
        super().__init__(size)
        made.append(size)
class Reduced:
    def __reduce__(self):
        return Env, ()
class Point(typing.NamedTuple):
    x: int = 1
@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    width: int = 3
class Table(dict):
    pass
class Colour(enum.Enum):
    RED = 1
class Plain:
    def __init__(self):
        self.size = Size(2)
env, reduced, holds = Env(), Reduced(), [Env()]
memory = shared_memory.SharedMemory(create=True, size=1)
point, size, table, colour, plain = Point(), Size(), Table(a=Point(2)), Colour.RED, Plain()
ordered, day, third = collections.OrderedDict(a=1), datetime.date(2020, 1, 1), fractions.Fraction(1, 3)
precise, path, pattern = decimal.Decimal("1.5"), pathlib.PurePosixPath("a/b"), re.compile("a+")
key, simple = uuid.UUID(int=3), types.SimpleNamespace(a=1)
array, kind, number, box = np.arange(3), np.dtype("f4"), np.float32(2), spaces.Dict(a=spaces.Box(0, 1, (2,)))
counter, queue, defaults = collections.Counter("aab"), collections.deque([1]), collections.defaultdict(list, a=[1])
STAY = ("env", "reduced", "holds", "memory")
TRAVEL = [
    "point", "size", "table", "colour", "ordered", "day", "third", "precise", "path", "pattern", "key", "simple",
    "array", "kind", "number", "box", "counter", "queue", "defaults",
]
def answers():
    return [name in globals() for name in STAY], [repr(globals().get(name)) for name in TRAVEL], plain.size, len(made)
"""


def test_objects_whose_pickling_may_have_effects_stay(tmp_path):
    check = """
if __name__ == "__main__":
    found, expected = send(asked), str(answers()).replace("[True, True, True, True]", "[False, False, False, False]")
    assert found == expected, (found, expected)
    memory.close()
    memory.unlink()
    print("checked")
"""
    sent(tmp_path, CONSTANTS, check=check)


MANY = """
import typing
parts = {f"part{number:03}": bytes(100 << 10) for number in range(200)}
globals().update(parts)
class Uses:
    def use(self):
        return part000, part199
class Small:
    def use(self):
        return LEVEL
LEVEL = 3
def answers():
    return globals()["Small"]().use(), "Uses" in globals(), "part000" in globals(), "part199" in globals(), reason()
def reason():
    import __main__
    try:
        return __main__.Uses
    except AttributeError as error:
        return str(error)
"""


def test_namespaces_have_a_limit(tmp_path):
    """The smallest values travel first."""
    check = """
if __name__ == "__main__":
    from marl_parallel.core.objects.namespaces import dump_namespaces
    assert len(dump_namespaces([b"__main__"], [])) < 5 << 20
    found = send(asked)
    assert found.startswith("(3, False, True, False, ")
    assert "it uses 'part199', and the names of the module" in found
    print("checked")
"""
    sent(tmp_path, MANY, check=check)
