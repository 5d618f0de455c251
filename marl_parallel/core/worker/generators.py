"""Process-wide random number generators: `random`, `numpy.random`, and torch's on the CPU if torch is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.random import mtrand

from marl_parallel.core.objects.script_generators import ScriptCopies, SeedSource

States = tuple[Any, ...]


class Seeds(NamedTuple):
    """A seed for each process-wide generator."""

    python: int
    numpy: int
    torch: int

    @classmethod
    def of(cls, seed: int) -> Seeds:
        return cls(seed, seed % 2**32, seed)


def seed_generators(seeds: int | Seeds) -> None:
    """Seed all process-wide generators."""
    python, numpy, torch = seeds if isinstance(seeds, Seeds) else Seeds.of(seeds)
    random.seed(python)
    np.random.seed(numpy)
    seed_torch(torch)


class Origin(NamedTuple):
    """Where the seeds of generators come from with `seed="own"`: digests of the program's generators."""

    python: bytes
    numpy: bytes
    torch: bytes
    made: int  # how many `ParallelEnv`s the program had made before

    def seeds(self, env_id: int, rebuilds: int) -> Seeds:
        """The seeds of an environment that has been constructed again `rebuilds` times."""
        more = f"{self.made} {env_id} {rebuilds}".encode()
        return Seeds(*[int.from_bytes(_digest(one + more)[:4], "little") for one in self[:3]])


def origin_of_program(made: int) -> Origin:
    """The `Origin` for this process as it is; draws nothing. Without torch, its digest is the one of NumPy's state."""
    python, numpy = repr(random.getstate()).encode(), pickle.dumps(np.random.get_state(legacy=False), 4)
    torch = _torch()
    of_torch = numpy if torch is None else np.asarray(torch.default_generator.get_state()).tobytes()
    return Origin(_digest(python), _digest(numpy), _digest(of_torch), made)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def seed_torch(seed: int) -> None:
    """Seed torch's generator, if torch is loaded."""
    if (torch := _torch()) is not None:
        torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def seeding_new_torch(seed: int | None) -> Iterator[None]:
    """Seed torch's generator as soon as this block imports torch; not if `seed` is None.

    So the code that imports torch may draw from the generator, or seed it again.
    """
    if seed is None or _torch() is not None:
        yield
        return
    finder = _TorchFinder(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TorchFinder(MetaPathFinder):
    """Finds torch with the other finders, and seeds its generator once the module has been executed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._seed)
        return spec


class _TorchLoader(Loader):
    def __init__(self, loader: Loader, seed: int) -> None:
        self._loader, self._seed = loader, seed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        seed_torch(self._seed)


def current_states() -> States:
    """The states of all process-wide generators."""
    torch = _torch()
    of_torch = None if torch is None else torch.default_generator.get_state()
    return random.getstate(), np.random.get_state(legacy=False), of_torch


def restore_states(states: States) -> None:
    """Set the generators to states that `current_states` has returned."""
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(numpy)
    if (torch := _torch()) is not None and of_torch is not None:
        torch.default_generator.set_state(of_torch)


def fingerprints() -> dict[str, int]:
    """By generator, under the name that users know, a number that changes with each draw and each seed."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}
    if (torch := _torch()) is not None:
        states["torch"] = pickle.dumps(np.asarray(torch.default_generator.get_state()))
    return {name: hash(state) for name, state in states.items()}


def _torch() -> Any:
    """Torch, if it has been imported completely; else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


class _NumpyState(NamedTuple):
    """A state of `numpy.random`: its bit generator, the memory of that, and whether a second normal number waits."""

    generator: Any
    memory: bytes
    has_gauss: bool
    whole: dict[str, Any]


class _NumpyStates:
    """Reads and writes states of `numpy.random` by copying its memory, 50 times as fast as NumPy's own functions.

    NumPy draws normal numbers in pairs. Its functions are used once a second one waits, which is outside this memory.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: memoryview | None = None  # the memory of its key and position; None for an unexpected layout
        self._may_wait = False  # whether simulators are known to draw normal numbers

    def present(self, last: _NumpyState | None) -> _NumpyState:
        """The present state; `last` is the state written or read before simulators could draw."""
        memory = self._of_generator()
        content = b"" if memory is None else bytes(memory)
        is_last = last is not None and last.generator is self._generator and last.memory == content
        if memory is not None and last is not None and is_last and not self._may_wait:
            return last
        whole: Any = np.random.get_state(legacy=False)
        self._may_wait |= bool(whole["has_gauss"])
        return _NumpyState(self._generator, content, bool(whole["has_gauss"]), whole)

    def write(self, state: _NumpyState, present: _NumpyState) -> None:
        if state.generator is not present.generator:  # a simulator has chosen another generator
            mtrand.set_bit_generator(state.generator)
        memory = self._of_generator()
        if memory is None or state.has_gauss or present.has_gauss or state.generator is not present.generator:
            np.random.set_state(state.whole)
        elif state.memory != present.memory:
            memory[:] = state.memory

    def _of_generator(self) -> memoryview | None:
        generator = mtrand.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._memory = generator, _memory_of(generator)
        return self._memory


def _memory_of(generator: Any) -> memoryview | None:
    """The memory of a Mersenne Twister: 624 numbers of 32 bits, and the position; None for anything else."""
    if not isinstance(generator, np.random.MT19937):
        return None
    memory = _memory_at(generator.ctypes.state_address, 4 * (624 + 1))
    state = generator.state["state"]
    expected = np.append(state["key"], state["pos"]).astype(np.uint32).tobytes()
    return memory if bytes(memory) == expected else None


def _memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class GeneratorStates:
    """States of generators for each environment of a worker, and under None for the rest of the process.

    The generators have the state of the environment that `switch` chose last.

    Args:
        isolated: Whether each environment has states of the process-wide generators. If not, each has states of the
            script's generators only.

    Attributes:
        copies: The script's generators.
    """

    def __init__(self, isolated: bool = True, copies: ScriptCopies | None = None) -> None:
        self.isolated, self.copies = isolated, ScriptCopies() if copies is None else copies
        self._present: int | None = None
        self._numpy = _NumpyStates()
        self._states: dict[int | None, tuple[Any, _NumpyState, Any]] = {}

    def switch(self, env_id: int | None) -> None:
        """Set the generators to the state of an environment; without a state, it goes on with the present one."""
        if env_id == self._present:
            return
        self.copies.switch(env_id)
        if not self.isolated:
            self._present = env_id
            return
        before = self._states.get(self._present)
        numpy, torch = self._numpy.present(None if before is None else before[1]), _torch()
        of_torch = None if torch is None else torch.default_generator.get_state()
        self._states[self._present] = random.getstate(), numpy, of_torch
        self._present = env_id
        if env_id in self._states:
            of_python, of_numpy, of_torch = self._states[env_id]
            random.setstate(of_python)
            self._numpy.write(of_numpy, numpy)
            if torch is not None and of_torch is not None:
                torch.default_generator.set_state(of_torch)

    def begin(self, env_id: int, source: SeedSource) -> None:
        """Switch to a new environment, and seed the script's generators for it."""
        self.switch(env_id)
        self.copies.begin(env_id, source)

    def seed(self, seed: int) -> None:
        """Seed the generators for the present environment."""
        if self.isolated:
            seed_generators(seed)
        self.copies.seed(seed)

    def states(self) -> EnvGenerators:
        """The states of the present environment."""
        return EnvGenerators(current_states() if self.isolated else None, self.copies.states())

    def restore(self, states: EnvGenerators | States) -> None:
        """Set the generators to what `states` has returned; earlier builds saved process-wide generators only."""
        if not isinstance(states, EnvGenerators):
            states = EnvGenerators(states, {})
        if self.isolated and states.of_process is not None:
            restore_states(states.of_process)
        self.copies.restore(states.of_copies)

    def of(self, env_id: int) -> EnvGenerators:
        """The states of an environment; switches the generators to them."""
        self.switch(env_id)
        return self.states()

    def put(self, env_id: int, states: EnvGenerators | States) -> None:
        """Give an environment other states, and switch the generators to them."""
        self.switch(env_id)
        self.restore(states)
        self._states.pop(env_id, None)  # the memory may be the same, but a normal number may wait now


class EnvGenerators(NamedTuple):
    """States of the generators of one environment."""

    of_process: States | None
    of_copies: dict[int, Any]
