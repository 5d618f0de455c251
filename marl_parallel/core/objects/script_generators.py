"""Random generators of the caller's script that several environments share, such as a global `rng`.

    caller    ScriptGenerators      records them while constructors are pickled; the pickle has a number for each
    worker    `_arrived`            in the caller's process: the generator itself
                                    in a worker process: the one copy of this process, in which `ScriptCopies` exchanges
                                    the states of the environments

A copy is seeded from the seed of its environment. So the environments of all workers differ, whatever worker they are
in. A generator that only one environment has keeps the state that it had when it was pickled, as in the caller's
process, until that environment is constructed again. The generator of a space is not exchanged, as spaces are often
class attributes that a script has sampled once: each copy is seeded when it arrives.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.random import mtrand

Reduced: TypeAlias = tuple[Any, ...]


# -- kinds of generators -----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What can be done with a generator."""

    state: Callable[[Any], Any]
    set_state: Callable[[Any, Any], object]
    seed: Callable[[Any, np.random.SeedSequence], object]


def _seed_generator(generator: np.random.Generator, sequence: np.random.SeedSequence) -> None:
    bits: Any = generator.bit_generator
    bits.__setstate__(type(bits)(sequence).__getstate__())


def _seed_random_state(generator: Any, sequence: np.random.SeedSequence) -> None:
    fresh = np.random.RandomState(type(generator._bit_generator)(sequence))
    generator.set_state(fresh.get_state(legacy=False))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


def _set_bits(generator: Any, state: Any) -> None:
    generator.bit_generator.__setstate__(state)


# With the seed sequence from NumPy 2 on, which counts the children of `spawn`.
_GENERATOR = _Kind(lambda one: one.bit_generator.__getstate__(), _set_bits, _seed_generator)
_RANDOM_STATE = _Kind(
    lambda one: one.get_state(legacy=False), lambda one, state: one.set_state(state), _seed_random_state
)
_PYTHON = _Kind(
    lambda one: one.getstate(),
    lambda one, state: one.setstate(state),
    lambda one, sequence: one.setstate(random.Random(_number(sequence)).getstate()),
)
_TORCH = _Kind(
    lambda one: one.get_state(),
    lambda one, state: one.set_state(state),
    lambda one, sequence: one.manual_seed(_number(sequence) >> 1),
)
_BITS = {
    getattr(np.random, name)
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # others may not take a seed sequence
}


def _kind_of(generator: Any) -> _Kind | None:
    """How to seed a generator; None for other objects, and for generators that are left as they are."""
    if isinstance(generator, np.random.Generator):
        return _GENERATOR if type(generator.bit_generator) in _BITS else None
    if isinstance(generator, np.random.RandomState):
        bits: Any = generator
        return _RANDOM_STATE if type(bits._bit_generator) in _BITS else None
    if isinstance(generator, random.Random):
        kind = type(generator)  # a derived class, such as `SystemRandom`, may have no state or another one
        own = all(getattr(kind, name) is getattr(random.Random, name) for name in ("getstate", "setstate", "random"))
        return _PYTHON if own else None
    torch = sys.modules.get("torch")
    return _TORCH if torch is not None and isinstance(generator, getattr(torch, "Generator", ())) else None


def may_hold_generators(pickled: bytes) -> bool:
    """Whether bytes of plain pickle may have a generator."""
    return b"andom" in pickled or b"Generator" in pickled


# -- generators of the process, such as `random.random.__self__` -------------------------------------------------------


def reduce_process_wide(value: Any) -> Reduced | None:
    """Reduce the generator behind `random.random` or `numpy.random.rand`; None for others.

    A script that has `from random import randint` refers to this generator. Each process has its own.
    """
    kind = type(value)
    if kind is random.Random:
        return (_inst_of_random, ()) if value is _inst_of_random() else None
    if kind is np.random.RandomState:
        return (_rand_of_numpy, ()) if value is _rand_of_numpy() else None
    if kind.__module__ == "torch._C" and kind.__name__ == "Generator":
        return (_default_of_torch, ()) if value is _default_of_torch() else None
    return None


def _inst_of_random() -> Any:
    bound: Any = random.random
    return bound.__self__


def _rand_of_numpy() -> Any:
    return mtrand._rand


def _default_of_torch() -> Any:
    import torch

    return torch.default_generator


# -- in the caller's process -------------------------------------------------------------------------------------------


class Kept(IntEnum):
    """What happens to the state of a generator in a worker process."""

    PRESENT = 0
    """It is kept: only one environment has the generator."""
    SEEDED = 1
    """Each copy is seeded once: the generator of a space."""
    SHARED = 2
    """Each environment has a state of its own."""


@dataclass
class _Found:
    """A generator that a pickle has reached."""

    generator: Any
    digest: bytes  # of its state
    value: Any  # what was pickled then
    env_ids: set[int] = field(default_factory=set)  # environments that have it
    in_space: bool = True  # whether it has been reached only as the generator of a space

    @property
    def kept(self) -> Kept:
        if len(self.env_ids) < 2:
            return Kept.PRESENT
        return Kept.SEEDED if self.in_space else Kept.SHARED

    @property
    def is_shared(self) -> bool:
        return self.kept is Kept.SHARED


class ScriptGenerators:
    """The generators that constructors hold: in arguments, and in functions and classes that are pickled by value."""

    def __init__(self) -> None:
        self._found: list[_Found] = []
        self._numbers: dict[int, int] = {}  # by the id of the generator

    @contextlib.contextmanager
    def recording(self, env_ids: Sequence[int], value: Any) -> Iterator[dict[int, Kept]]:
        """Within, this thread pickles a value that these environments have.

        `env_ids` is empty for values that environments look up by name: their generators count as shared in workers,
        but not for `warning`, since perhaps nobody looks them up.
        Gives a dict: by the number of each generator in the pickle, what the pickle says of its state.
        """
        before = getattr(_thread, "recording", None)
        marks: dict[int, Kept] = {}
        _thread.recording = self, env_ids, value, marks
        try:
            yield marks
        finally:
            _thread.recording = before

    def has(self, generator: Any) -> bool:
        """Whether a generator has been recorded."""
        return id(generator) in self._numbers

    def reduce(
        self, generator: Any, in_space: bool, env_ids: Sequence[int], value: Any, marks: dict[int, Kept]
    ) -> Reduced | None:
        kind = _kind_of(generator)
        if kind is None:
            return None
        number = self._numbers.setdefault(id(generator), len(self._found))
        if number == len(self._found):
            digest = hashlib.blake2b(_bytes_of(kind.state(generator)), digest_size=16).digest()
            self._found.append(_Found(generator, digest, value))
        found = self._found[number]
        if not found.env_ids:
            found.value = value
        found.env_ids.update(env_ids)
        found.in_space &= in_space
        by_name = Kept.SEEDED if found.in_space else Kept.SHARED
        marks[number] = found.kept if env_ids else by_name
        return _arrived, (number, int(marks[number]), found.digest, PlainGenerator(generator))

    def are_right(self, marks: dict[int, Kept]) -> bool:
        """Whether no generator of a pickle has been found in other environments, or outside of a space, since."""
        return all(marked >= self._found[number].kept for number, marked in marks.items())

    def originals(self) -> Originals | None:
        """For workers: the generators; None if there are none."""
        if not self._found:
            return None
        generators = [(one.generator, one.is_shared, one.digest) for one in self._found]
        return Originals(generators, any(one.is_shared for one in self._found))

    def warning(self, modules: Sequence[ModuleType], path_to: Callable[[Any, Any], str]) -> str:
        """The text about generators that environments share; empty if there are none.

        Args:
            modules: The script, and others that workers cannot import: their variables are named.
            path_to: Names the part of a value that is a generator; empty if it is not found.
        """
        names = [_name(one, modules, path_to) for one in self._found if one.is_shared]
        if not names:
            return ""
        what = "a random generator" if len(names) == 1 else "random generators"
        return (
            f"environments share {what} of your program: {'; '.join(names)}. In worker processes, each environment "
            'draws from a copy, which is seeded from the environment\'s seed. With backend="serial" and "thread", and '
            'in worker 0 of "hybrid", all draw from your generator in turn. So results depend on the backend and on '
            "the number of workers. What to do: create the generator in the environment, from the seed that its "
            "constructor or its `reset` gets; see docs/seeding.md (Random generators of the script)"
        )


_thread = threading.local()


class PlainGenerator:
    """Pickles as the generator that it holds does by itself."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._generator.__reduce_ex__(protocol)


class OfSpace(NamedTuple):
    """The generator of a space, in the state of the space."""

    generator: Any


def reduce_generator(value: Any) -> Reduced | None:
    """Reduce a generator, or a space with one, while constructors are pickled; None otherwise."""
    recording = getattr(_thread, "recording", None)
    if recording is None:
        return None
    if isinstance(value, Space):
        return _reduce_space(value)
    table, env_ids, pickled, marks = recording
    in_space = type(value) is OfSpace
    reduced: Reduced | None = table.reduce(value.generator if in_space else value, in_space, env_ids, pickled, marks)
    return reduced


def _reduce_space(space: Space[Any]) -> Reduced | None:
    """As the space reduces itself, with a mark at its generator; None for a space that has not been sampled."""
    reduced: Any = space.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(reduced) is not tuple or len(reduced) < 3 or type(reduced[2]) is not dict:
        return None
    state = reduced[2]
    if type(generator := state.get("_np_random")) is not np.random.Generator or _kind_of(generator) is None:
        return None
    return (*reduced[:2], {**state, "_np_random": OfSpace(generator)}, *reduced[3:])


def is_recording() -> bool:
    """Whether this thread pickles constructors."""
    return getattr(_thread, "recording", None) is not None


def reaches(generator: Any, dumps: Callable[[Any], object], part: Any) -> bool:
    """Whether the pickle of a part contains a generator, as far as the part can be pickled."""
    table = ScriptGenerators()
    with contextlib.suppress(Exception), table.recording((), None):
        dumps(part)
    return table.has(generator)


def _bytes_of(state: Any) -> bytes:
    return pickle.dumps(state if isinstance(state, tuple | dict) else np.asarray(state), 4)


def _name(found: _Found, modules: Sequence[ModuleType], path_to: Callable[[Any, Any], str]) -> str:
    for module in modules:
        for name, value in [*vars(module).items()]:
            if value is found.generator:
                where = "the script" if module.__name__ in ("__main__", "__mp_main__") else module.__name__
                return f"`{name}` of {where}"
    return path_to(found.value, found.generator) or f"a {type(found.generator).__name__}"


class Originals:
    """The generators in the caller's process, and whether any is shared; only the latter is pickled."""

    def __init__(self, generators: Sequence[tuple[Any, bool, bytes]], has_shared: bool) -> None:
        self.generators, self.has_shared = generators, has_shared

    def __reduce__(self) -> Reduced:
        return Originals, ((), self.has_shared)


# -- in workers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def receiving(originals: Originals | None) -> Iterator[None]:
    """Within, pickles of this thread refer to the generators themselves, if they are in this process."""
    before = getattr(_thread, "originals", None)
    _thread.originals = originals.generators if originals is not None and originals.generators else None
    try:
        yield
    finally:
        _thread.originals = before


_copies: ScriptCopies | None = None  # of this worker process


def receive_copies(copies: ScriptCopies) -> None:
    """Put the generators of constructors, and of environments that are registered, into `copies` from now on."""
    global _copies
    _copies = copies


def _arrived(number: int, kept: int, digest: bytes, generator: Any) -> Any:
    originals = getattr(_thread, "originals", None)
    if originals is not None:
        return originals[number][0]
    return generator if _copies is None else _copies.arrived(number, kept, digest, generator)


class SeedSource(NamedTuple):
    """Where the states of an environment's generators come from."""

    seed: int | None  # of the environment; None for the state of the script's generator
    env_id: int
    rebuilds: int  # how often the environment has been constructed again
    made: int  # the number of the `ParallelEnv`


class _Copy(NamedTuple):
    """A generator that the environments of a worker use in turn."""

    generator: Any
    kind: _Kind
    digest: bytes


class ScriptCopies:
    """The generators that environments share in a worker, each with a state for each environment.

    They have the state of the environment that `switch` chose last. Under None is the state of the program.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._present: int | None = None
        self._sources: dict[int | None, SeedSource] = {}
        self._states: dict[int | None, dict[int, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def adopt(self, originals: Originals) -> None:
        """Use the generators of this process themselves."""
        for number, (generator, is_shared, digest) in enumerate(originals.generators):
            if is_shared:
                self.arrived(number, Kept.SHARED, digest, generator)

    def begin(self, env_id: int, source: SeedSource) -> None:
        """Switch to a new environment, and seed the generators for it."""
        self.switch(env_id)
        self._sources[env_id] = source
        self._states.pop(env_id, None)
        for number, copy in self._copies.items():
            self._begin_one(number, copy)

    def arrived(self, number: int, kept: int, digest: bytes, generator: Any) -> Any:
        """The copy of a shared generator: `generator`, unless there is one already.

        The generator of a space is only seeded; that of one environment alone, if that has been constructed again.
        """
        kind = _kind_of(generator)
        if kind is None:
            return generator
        new = _Copy(generator, kind, digest)
        copy = self._copies.setdefault(number, new) if kept == Kept.SHARED else new
        source = self._sources.get(self._present)
        if copy is new and source is not None and (kept or source.rebuilds):
            self._begin_one(number, copy)
        return copy.generator

    def _begin_one(self, number: int, copy: _Copy) -> None:
        source = self._sources.get(self._present)
        if source is not None and source.seed is not None:
            _seed(number, copy, source.seed)
        elif source is not None:
            _seed(number, copy, [int.from_bytes(copy.digest, "little"), source.made, source.env_id, source.rebuilds])

    def seed(self, seed: int) -> None:
        """Seed the generators for the present environment."""
        for number, copy in self._copies.items():
            _seed(number, copy, seed)

    def switch(self, env_id: int | None) -> None:
        """Set the generators to the states of an environment."""
        if env_id == self._present:
            return
        if self._copies:
            self._states[self._present] = self.states()
        self._present = env_id
        states = self._states.get(env_id, {})
        for number, copy in self._copies.items():
            if number in states:
                copy.kind.set_state(copy.generator, states[number])
            else:
                self._begin_one(number, copy)

    def states(self) -> dict[int, Any]:
        """The states of the present environment."""
        return {number: copy.kind.state(copy.generator) for number, copy in self._copies.items()}

    def restore(self, states: dict[int, Any]) -> None:
        """Set the generators to what `states` has returned, here or in another program."""
        for number, state in states.items():
            if number in self._copies:
                copy = self._copies[number]
                copy.kind.set_state(copy.generator, state)


def _seed(number: int, copy: _Copy, entropy: int | list[int]) -> None:
    copy.kind.seed(copy.generator, np.random.SeedSequence(entropy, spawn_key=(_KEY, number)))


# -- in workers: generators of modules that are preloaded --------------------------------------------------------------


class ModuleGenerators:
    """The generators among the variables of modules. Workers that are forked with them would draw the same numbers."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, Any, _Kind]] = {}  # by the id of the generator, with its name

    def add(self, modules: Sequence[Any]) -> list[str]:
        """Add the generators of modules; returns the names of those that cannot be seeded."""
        unknown = []
        for module in modules:
            for name, value in [*vars(module).items()] if isinstance(module, ModuleType) else ():
                # The type alone: an object that imports something on its first use may do so when its class is asked.
                kind_of_value = type(value)
                if not issubclass(kind_of_value, _GENERATORS) and kind_of_value.__name__ != "Generator":
                    continue
                if issubclass(kind_of_value, random.SystemRandom) or reduce_process_wide(value) is not None:
                    continue
                label, kind = f"{module.__name__}.{name}", _kind_of(value)
                if kind is not None:
                    self._found.setdefault(id(value), (label, value, kind))
                elif issubclass(kind_of_value, _GENERATORS):
                    unknown.append(label)
        return unknown

    def seed(self, seed: int) -> None:
        """Seed all generators, each by its name, so that the order of imports does not matter."""
        for label, generator, kind in self._found.values():
            digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
            entropy = [seed, int.from_bytes(digest, "little")]
            kind.seed(generator, np.random.SeedSequence(entropy, spawn_key=(_KEY,)))


_GENERATORS = np.random.Generator, np.random.RandomState, random.Random
_KEY = 1_936_024_434  # else a generator that a simulator makes from the same seed would draw the same numbers
