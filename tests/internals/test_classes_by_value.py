"""Classes of a script in a process that gets them by value: all parts of them are there.

A script evaluates expressions with its classes. A process that has received the classes evaluates the same expressions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
import typing
import uuid

import pytest

from marl_parallel.core.objects import classes
from marl_parallel.core.objects.script_names import names_in_annotations

MODULE = """
# A module that both processes import.
class Registering:
    known = {}
    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        Registering.known[cls.__name__] = cls
        cls.twice = 2 * cls.size

class Optional:
    known = []
    def __init_subclass__(cls, limit=3, name=None):
        cls.limit, cls.name = limit, name
        if name == "none":
            raise TypeError("a name, please")
        Optional.known.append(cls)

class Required:
    known = []
    def __init_subclass__(cls, *, name):
        cls.name = name
        Required.known.append(cls)

class Refusing:
    def __init_subclass__(cls, name=None):
        if name is None:
            raise TypeError("a name, please")
        cls.name = name

class Tagging(type):
    def __new__(cls, name, bases, namespace, *, tag):
        return super().__new__(cls, name, bases, namespace)
    def __init__(cls, name, bases, namespace, *, tag):
        cls.tag = tag

class Ordered(dict):
    def __setitem__(self, key, value):
        self.order = [*getattr(self, "order", []), key]
        super().__setitem__(key, value)

class Ordering(type):
    @classmethod
    def __prepare__(metacls, name, bases, **keywords):
        return Ordered()
    def __new__(cls, name, bases, namespace, **keywords):
        if not isinstance(namespace, Ordered):
            raise TypeError("not its own namespace")
        new = super().__new__(cls, name, bases, dict(namespace))
        new.own = [one for one in getattr(namespace, "order", []) if not one.startswith("__")]
        return new

class Preparing(Ordering):
    @classmethod
    def __prepare__(metacls, name, bases, *, prefix):
        namespace = Ordered()
        namespace[prefix] = name
        return namespace
"""

CLASSES = """
import abc, dataclasses, enum, functools, inspect, pickle, sys, typing, weakref
import tagging

class Base:
    limit = 1
    names = ("a",)
    nothing = None
    def child(self):
        return Child
class Child(Base):
    limit = 1
    nothing = None
    names = Base.names
class Two:
    side = 2
class OfBoth(Base, Two):
    limit, side = Base.limit, Two.side

class Keywords:
    known, counted = {}, 0
    def __init_subclass__(cls, *, key, **more):
        super().__init_subclass__(**more)
        Keywords.known[key] = cls
        Keywords.counted += 1
class First(Keywords, key="first"): pass
class Second(First, key="second"): pass
class Reading:
    def __init_subclass__(cls):
        cls.twice = 2 * cls.size
class Read(Reading): size = 3
class Registered(tagging.Registering): size = 5
class Limited(tagging.Optional, limit=7): pass
class Named(tagging.Required, name="n"): pass
class Accepted(tagging.Refusing, name="n"): pass
class Through(tagging.Registering):
    size = 0
    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        cls.through = True
class Passed(Through): size = 9

class Meta(type):
    def __new__(cls, name, bases, namespace, *, tag):
        new = super().__new__(cls, name, bases, namespace)
        new.tag, new.of_body = tag, namespace["size"]
        return new
    def __init__(cls, name, bases, namespace, *, tag):
        super().__init__(name, bases, namespace)
    def __setattr__(cls, name, value):
        if "of_body" in vars(cls):
            raise AttributeError("frozen")
        super().__setattr__(name, value)
    def __prepare__(name, bases, *, tag):
        return {}
class Tagged(metaclass=Meta, tag="t"): size = 4
class TaggedElsewhere(metaclass=tagging.Tagging, tag="t"): pass
class InOrder(metaclass=tagging.Ordering):
    one, two = 1, 2
class AlsoInOrder(InOrder): three = 3
class OrderMeta(tagging.Ordering):
    @classmethod
    def __prepare__(metacls, name, bases, *, size=0):
        return super().__prepare__(name, bases)
class OfOrderMeta(metaclass=OrderMeta, size=1): four = 4
class Prepared(metaclass=tagging.Preparing, prefix="first"): last = 5
class AbstractMeta(abc.ABCMeta):
    def __new__(cls, name, bases, namespace, *, tag=None):
        return super().__new__(cls, name, bases, {**namespace, "tag": tag})
class Abstract(metaclass=AbstractMeta, tag="t"):
    @abc.abstractmethod
    def play(self): return 1
class Concrete(Abstract):
    def play(self): return super().play() + 1
class Virtual: pass
Abstract.register(Virtual)

class Slots:
    __slots__ = ("plain", "__hidden")
    def __init__(self): self.plain, self.__hidden = 1, 2
    def hidden(self): return self.__hidden
class OneSlot(Slots): __slots__ = "one"
class NoSlots(Slots): __slots__ = ()
class WeakSlots: __slots__ = ("__weakref__", "__dict__", "x")
@dataclasses.dataclass(slots=True, frozen=True)
class Sliced:
    x: int = 1
    def parent(self): return __class__.__name__
@dataclasses.dataclass(order=True)
class Data:
    x: int
    more: list = dataclasses.field(default_factory=list)

class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1
class Planet(enum.Enum):
    EARTH = (1, 2)
    MARS = (3, 4)
    def __init__(self, mass, radius): self.mass, self.radius = mass, radius
class Permission(enum.Flag):
    R = 1
    W = 2
    RW = 3
class Level(enum.IntEnum):
    LOW = enum.auto()
    HIGH = enum.auto()
class Pair(typing.NamedTuple):
    a: int
    b: str = "x"
    def both(self): return self.a, self.b
class Options(typing.TypedDict, total=False):
    a: int
T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def __init__(self, value: T): self.value = value
class IntBox(Box[int]): pass
@typing.runtime_checkable
class Plays(typing.Protocol):
    def play(self) -> int: ...

class Descriptor:
    calls = 0
    def __set_name__(self, owner, name):
        self.name = name
        Descriptor.calls += 1
        owner.described = getattr(owner, "described", ()) + (name,)
    def __get__(self, instance, owner): return self.name
class Described:
    one = Descriptor()
    two = Descriptor()
    @functools.cached_property
    def cached(self): return self.one
class Failure(Exception):
    def __init__(self, code, text): super().__init__(text); self.code = code
class Outer:
    class Inner:
        deep = 1
        def up(self): return Outer
    limit = Inner.deep
class ListLike(list):
    __slots__ = ("extra",)
"""

EXPRESSIONS = {
    "Child": "sorted({'limit', 'nothing', 'names'} & vars(c).keys()), c().child() is c, c.__mro__[1]().child() is c",
    "OfBoth": "sorted({'limit', 'side'} & vars(c).keys()), [one.__name__ for one in c.__mro__]",
    "Second": "c.counted, sorted(c.known), c.known['second'] is c, c.__mro__[1] is c.known['first']",
    "Read": "c.twice, c.size",
    "Registered": "c.twice, c.known['Registered'] is c, c in tagging.Registering.__subclasses__()",
    "Limited": "c.limit, tagging.Optional.known == [c]",
    "Named": "c.name",
    "Accepted": "c.name",
    "Passed": "c.through, c.twice, c.known['Passed'] is c",
    "Tagged": "c.tag, c.of_body, type(c).__name__, isinstance(type(c), type)",
    "TaggedElsewhere": "c.tag, type(c) is tagging.Tagging",
    "InOrder": "c.own, c.one + c.two, type(c) is tagging.Ordering",
    "AlsoInOrder": "c.own, c.one + c.three, type(c) is tagging.Ordering",
    "OfOrderMeta": "c.own, c.four, type(c).__name__",
    "Prepared": "c.own, c.first, c.last, type(c) is tagging.Preparing",
    "Concrete": "c.tag, c().play(), sorted(c.__abstractmethods__), sorted(c.__mro__[1].__abstractmethods__)",
    "Virtual": "c.__name__",
    "Abstract": "c.tag, inspect.isabstract(c), len(c._abc_impl.__class__.__name__) > 0",
    "Slots": "hasattr(c(), '__dict__'), c().plain, c().hidden(), c.__slots__, pickle.loads(pickle.dumps(c())).hidden()",
    "OneSlot": "hasattr(c(), '__dict__'), c().hidden(), c.__slots__, type(vars(c)['one']).__name__",
    "NoSlots": "hasattr(c(), '__dict__'), c().hidden(), c.__slots__",
    "WeakSlots": "hasattr(c(), '__dict__'), weakref.ref(c()) is not None, sorted(vars(c()))",
    "Sliced": "hasattr(c(), '__dict__'), c(), c().parent(), pickle.loads(pickle.dumps(c(3)))",
    "Data": "c(1) < c(2), c(1), [one.name for one in dataclasses.fields(c)]",
    "Colour": "c['CRIMSON'] is c.RED is c(1), list(c), [*c.__members__]",
    "Planet": "c.EARTH.mass, c.MARS.radius, c((1, 2)), [*c]",
    "Permission": "c['RW'], c.R | c.W, [*c.__members__]",
    "Level": "c.LOW < c.HIGH, [*c], pickle.loads(pickle.dumps(c.HIGH)) is c.HIGH",
    "Pair": "c(1), c(1).both(), c._fields, c._field_defaults, hasattr(c(1), '__dict__'), c.__bases__",
    "Options": "c(a=1), c.__total__, sorted(c.__optional_keys__)",
    "IntBox": "c(1).value, str(c.__orig_bases__), len(c.__mro__[1].__parameters__), c.__mro__[1][str]('a').value",
    "Plays": "isinstance(1, c), c._is_protocol",
    "Described": "c().one, c().two, c.described, type(vars(c)['one']).calls, c().cached",
    "Failure": "repr(c(1, 'x')), c(1, 'x').code",
    "Outer": "c.Inner().up() is c, c.Inner.__qualname__, c.limit, vars(c)['limit']",
    "ListLike": "c([1]), hasattr(c(), '__dict__'), c.__slots__",
}

SENDER = """
import json, subprocess
from marl_parallel.core.objects.pickling import dumps
text = json.load(open("expressions.json"))
classes = {name: globals()[name] for name in text}
pickled = [dumps(classes), *map(dumps, reversed(classes.values())), dumps(classes)]
names = {"tagging": tagging, "inspect": inspect, "pickle": pickle, "dataclasses": dataclasses, "weakref": weakref}
expected = [f"{name}: {eval(one, {**names, 'c': classes[name]})}" for name, one in text.items()]
for order in (pickled, pickled[1:]):
    done = subprocess.run([sys.executable, "receiver.py"], input=pickle.dumps(order), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    received = done.stdout.decode().splitlines()
    assert received == expected, [pair for pair in zip(received, expected) if pair[0] != pair[1]]
print("equal")
"""

RECEIVER = """
import dataclasses, inspect, json, pickle, sys, weakref
from marl_parallel.core.objects.pickling import loads
from marl_parallel.core.objects.script_names import open_script_of_worker
open_script_of_worker()
import tagging
for pickled in pickle.load(sys.stdin.buffer):
    received = loads(pickled)
    classes = received if isinstance(received, dict) else None
for name, one in json.load(open("expressions.json")).items():
    c = classes[name]
    print(f"{name}: {eval(one)}")
"""


def test_all_parts_of_classes_arrive(tmp_path):
    """In one pickle, and in one pickle for each, from derived classes on."""
    (tmp_path / "tagging.py").write_text(MODULE)
    (tmp_path / "sender.py").write_text(CLASSES + SENDER)
    (tmp_path / "receiver.py").write_text(RECEIVER)
    (tmp_path / "expressions.json").write_text(json.dumps(EXPRESSIONS))
    done = subprocess.run([sys.executable, "sender.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "equal\n", done.stdout + done.stderr


def test_bases_that_take_no_attributes(monkeypatch):
    """Compiled bases may have an `__init_subclass__` and be immutable, as `object` is."""

    class Registering:
        made: typing.ClassVar[list[str]] = []

        def __init_subclass__(cls):
            Registering.made.append(cls.__name__)

    monkeypatch.setattr(classes, "_is_standard", lambda cls: False)
    new = classes._new_without_hooks(type, type, "New", (Registering, uuid.UUID), {"size": 3})
    assert new.size == 3
    assert issubclass(new, Registering)
    assert Registering.made == []
    type("Later", (Registering,), {})
    assert Registering.made == ["Later"]


class _Reads:
    """A function or class whose annotations raise when they are read, as from Python 3.14 on."""

    def __init__(self, error):
        self._error = error

    @property
    def __annotations__(self):
        raise self._error


class _Proxy:
    def __getattr__(self, name):
        raise RuntimeError("not now")


@pytest.mark.parametrize("error", [NameError("Unknown"), TypeError("unsupported operand |"), ZeroDivisionError()])
def test_annotations_that_cannot_be_evaluated(error):
    assert [*names_in_annotations(_Reads(error))] == []


def test_annotations_whose_attributes_raise():
    definition = types.SimpleNamespace(__annotations__={"a": _Proxy(), "b": "list[Maze]", "c": _Proxy()})
    assert [*names_in_annotations(definition)] == ["list", "Maze"]


def test_init_subclass_without_a_signature():
    """Such as one of a compiled class."""
    called = []

    class Compiled:
        __signature__ = "text"  # `inspect.signature` refuses it

        def __call__(self):
            called.append(1)

    assert classes._register(Compiled())
    assert called == [1]
    Compiled.__call__ = lambda self: int("a number")
    assert classes._register(Compiled())
    broken = lambda cls, name, bases, namespace: None  # noqa: E731
    broken.__signature__ = "text"
    assert not classes._needs_keywords(type("Meta", (type,), {"__new__": broken}))
