"""Builds all environments in their workers, and warns if they have equal seeds."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, ClassVar

from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import Schema
from marl_parallel.core.messages import Built, Construction, Message, Pickled, Request
from marl_parallel.core.objects import pickling
from marl_parallel.core.objects.array_file import LARGE, ArrayFileError, ArrayWriter
from marl_parallel.core.objects.namespaces import dump_namespaces
from marl_parallel.core.objects.reducers import SCRIPTS
from marl_parallel.core.objects.script_generators import Kept, ScriptGenerators
from marl_parallel.core.objects.sharing import CannotBeShared
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.reports.advice import FLAGS, a_process_each, is_of_flags
from marl_parallel.core.warn import warn
from marl_parallel.core.worker.caller_settings import CallerSettings
from marl_parallel.core.worker.constructors import Constructor
from marl_parallel.core.worker.generators import Origin


def construct(
    pool: Pool,
    constructors: Sequence[Constructor],
    seeds: Sequence[int | None],
    mode: AutoresetMode,
    adapter: str | Constructor | None,
    restarts: bool,
    derived_seeds: bool,
    isolate_rng: bool,
    local_modules: list[ModuleType],
    caller_settings: CallerSettings,
    generators: ScriptGenerators,
    made: int,
    origin: Origin | None,
    preload: Sequence[str],
) -> tuple[list[Schema], Construction, dict[int, Built]]:
    """Build all environments in their workers; returns their descriptions, a `Construction`, and the results by env id.

    Modules that workers cannot import are added to `local_modules`, and environments that need them are built again.
    The random generators that constructors hold are added to `generators`.
    Workers in this process get unpicklable constructors as they are, except with `derived_seeds`, for replays.
    """
    pickled: dict[int, Any] = {}
    as_it_is: set[int] = set()
    backend = pool.backend
    can_share = not backend.capabilities.pickles and not derived_seeds
    writer = ArrayWriter(
        backend.array_file, local_modules, backend.capabilities.same_machine if backend.capabilities.pickles else None
    )
    everyone = range(len(constructors))
    with generators.recording(everyone, pickling.entry_points()):
        registrations = pickling.dump_registrations()
    schemas: dict[bytes, Schema] = {}  # equal descriptions are unpickled once: their spaces may be large
    built: dict[int, Built] = {}
    to_pickle: Collection[int] = everyone
    what = "the constructor of" if adapter is None else "the constructor or adapter of"
    while to_pickle:
        env_ids = {*to_pickle} - as_it_is
        pickled.update(_pickle(constructors, env_ids, local_modules, writer, generators, can_share=can_share))
        pickled.update({env_id: constructors[env_id] for env_id in as_it_is})
        with generators.recording(everyone, adapter):
            how_adapted = _adapter(adapter, local_modules, writer, can_share=can_share, as_it_is=bool(as_it_is))
        with generators.recording((), None):  # of environments that look them up by their names, which are not known
            namespaces = (
                _namespaces(pickled, how_adapted, registrations, local_modules) if backend.capabilities.pickles else b""
            )
        construction = Construction(
            pickled, dict(enumerate(seeds)), mode, how_adapted, restarts,
            derived_seeds=derived_seeds, isolate_rng=isolate_rng, registrations=registrations,
            namespaces=namespaces,
            settings=caller_settings.pickled(), generators=generators.originals(), made=made, origin=origin,
            preload=preload,
        )  # fmt: skip
        requests = {}
        for worker, share in enumerate(pool.shares):
            ids = tuple([env_id for env_id in share if env_id not in built])
            if ids:
                part = {env_id: pickled[env_id] for env_id in ids}
                of_worker = construction._replace(constructors=part, seeds={env_id: seeds[env_id] for env_id in ids})
                requests[worker] = Request(Message.ACCESS, ids, of_worker)
        results = dict(sorted(pool.execute(requests).items()))
        for env_id, result in results.items():
            if isinstance(result, Built):
                built[env_id] = result
                if result.description not in schemas:
                    schemas[result.description] = pool.read(env_id, result.description, Message.ACCESS)
            elif result.kind is UnpicklingError:
                if not can_share or env_id in as_it_is:
                    raise TypeError(f"environment {env_id}: {result.text}. {_WAY_OUT}: {constructors[env_id]!r}")
                as_it_is.add(env_id)
            elif result.kind is not ModuleNotFoundError:
                raise result.kind(f"environment {env_id}: {result.text}")
        to_pickle = [*pickling.add_missing_modules(local_modules, results, what), *(as_it_is - built.keys())]
    _warn_of_neighbours(pool, built)
    described = [schemas[built[env_id].description] for env_id in range(len(constructors))]
    return described, construction._replace(described=built[0].description), dict(sorted(built.items()))


def _warn_of_neighbours(pool: Pool, built: Mapping[int, Built]) -> None:
    """Warn of what environments in one process have in common without being meant to."""
    wrapping: dict[str, set[int]] = {}
    for env_id, one in sorted(built.items()):
        for other, kind in one.in_common.shared:
            wrapping.setdefault(kind, set()).update((other, env_id))
    for kind, env_ids in wrapping.items():
        warn(
            f"environments {sorted(env_ids)} wrap the same object of type {kind} as others in their process, so a step "
            "of one of them also steps the others. Let each call of a constructor make a new one. If the object is "
            "meant for several environments, ignore this"
        )
    overriding = {env_id: one.in_common.overridden for env_id, one in sorted(built.items()) if one.in_common.overridden}
    if not overriding:
        return
    names = dict.fromkeys(name for names in overriding.values() for name in names)
    backend = pool.backend
    in_workers = backend.capabilities.pickles and not any(
        overriding.keys() & {*pool.shares[worker]} for worker in backend.in_line
    )
    warn(
        f"the constructors of environments {[*overriding]} changed {' and '.join(names)}, which belongs to the whole "
        "process: environments that were constructed before them in the same process now have the new value, too. "
        f"Pass {a_process_each(own_process=in_workers)} if each environment needs its own"
    )


_NEED_NO_PICKLE = 'backend="serial" and "thread" need no pickle'
_WAY_OUT = (
    "Create what does not pickle inside the constructor, or move the class or function that uses it into a module, "
    f"which workers import; {_NEED_NO_PICKLE}"
)


def _pickle(
    constructors: Sequence[Constructor],
    env_ids: Collection[int],
    local_modules: Sequence[ModuleType],
    writer: ArrayWriter,
    generators: ScriptGenerators,
    *,
    can_share: bool = False,
) -> dict[int, Any]:
    """The pickled constructors; with `can_share`, unpicklable constructors stay as they are."""
    by_id: dict[int, Any] = {}
    marks: dict[int, dict[int, Kept]] = {}
    having: dict[int, list[int]] = {}  # most often, all environments have the same constructor
    for env_id in env_ids:
        having.setdefault(id(constructors[env_id]), []).append(env_id)
    with pickling.by_value(local_modules):
        for same in having.values():
            env_id, constructor = same[0], constructors[same[0]]
            try:
                with generators.recording(same, constructor) as marks[id(constructor)]:
                    by_id[id(constructor)] = writer.dumps(constructor)
            except ArrayFileError:
                raise
            except CannotBeShared as error:
                where = pickling.where_unpicklable(constructor, writer.dumps)
                raise TypeError(
                    f"the constructor of environment {env_id} holds {error}{where}: {constructor!r}"
                ) from error
            except Exception as error:
                if can_share:
                    by_id[id(constructor)] = constructor
                    continue
                where = pickling.where_unpicklable(constructor, writer.dumps)
                way_out = f"What to do: {FLAGS}; {_NEED_NO_PICKLE}" if is_of_flags(error) else _WAY_OUT
                raise TypeError(
                    f"the constructor of environment {env_id} cannot be pickled, so it cannot be sent to a "
                    f"worker: {error}{where}. {way_out}: {constructor!r}"
                ) from error
        for key, same in having.items():  # another constructor that has the same generator may have come later
            if isinstance(by_id[key], Pickled) and not generators.are_right(marks[key]):
                with generators.recording(same, constructors[same[0]]):
                    by_id[key] = writer.dumps(constructors[same[0]])
    return {env_id: _of_one(by_id[id(constructors[env_id])]) for env_id in env_ids}


def _namespaces(
    constructors: Mapping[int, Any], adapter: Any, registrations: bytes, local_modules: Sequence[ModuleType]
) -> bytes:
    pickles = {id(one): one.pickled for one in (*constructors.values(), adapter) if isinstance(one, Pickled)}
    return dump_namespaces([*pickles.values(), registrations], local_modules)


def _of_one(constructor: Any) -> Any:
    """A constructor for one environment; its shared objects are unpickled for each."""
    if isinstance(constructor, Pickled) and constructor.shared is not None:
        return constructor._replace(shared=constructor.shared.copy())
    return constructor


def _adapter(
    adapter: Any, local_modules: Sequence[ModuleType], writer: ArrayWriter, *, can_share: bool, as_it_is: bool
) -> Any:
    """The pickled adapter; with `can_share`, the adapter itself if it cannot be pickled, or `as_it_is`."""
    if can_share and as_it_is:
        return adapter
    try:
        pickled = Pickled(pickling.dumps_for_workers(adapter, f"adapter={adapter!r}", local_modules))
        if len(pickled.pickled) < LARGE:
            return pickled
        with pickling.by_value(local_modules):
            return writer.dumps(adapter)
    except TypeError:
        if can_share:
            return adapter
        raise


def generators_warning(generators: ScriptGenerators, local_modules: Sequence[ModuleType]) -> str:
    """The text about random generators that environments share; empty if there are none."""
    scripts = [sys.modules[name] for name in SCRIPTS if name in sys.modules]
    with pickling.by_value(local_modules):
        return generators.warning([*scripts, *local_modules], pickling.path_to_generator)


class SeedCheck:
    """Warns if environments that should differ by their seeds are equal; see `docs/seeding.md` for the two signs.

    Equal first observations count only if the seed reached no environment: chess begins alike with any seed.
    """

    def __init__(self, built: Mapping[int, Built], reset_takes_seed: bool) -> None:
        unseeded = [(env_id, one.declared_seed) for env_id, one in built.items() if not one.seeding.seeded]
        self._declared = {env_id: seed for env_id, seed in unseeded if seed is not None}
        self._alike = _alike(self._declared)
        open_and_unseeded = all(one.seeding.open and not one.seeding.seeded for one in built.values())
        self._unreached = open_and_unseeded and len(built) > 1 and not reset_takes_seed
        self._first_observations: dict[int, bytes] = {}
        self.asks_again = bool(self._alike) and reset_takes_seed  # whether `warning` needs the seeds declared then
        # The warning after construction; and whether no warning can follow it.
        self.first_warning = _same_seed(self._declared) if self._alike and not reset_takes_seed else None
        self.is_done = self.first_warning is not None or not (self.asks_again or self._unreached)

    def record_first(self, env_id: int, observations: Mapping[Any, Any]) -> None:
        if env_id not in self._first_observations:
            self._first_observations[env_id] = pickling.dumps(observations) if observations else b""

    def warning(self, seeds: Sequence[int | None], declared: Mapping[int, int] | None) -> str | None:
        """The warning after the first reset, from our seeds and, with `asks_again`, those declared now."""
        if declared is not None:
            now = {env_id: declared[env_id] for env_id in self._declared}
            if len({seeds[env_id] for env_id in _alike(now)}) > 1:
                return _same_seed(now)
            if self._begin_alike(self._alike, seeds):
                return _same_seed(self._declared, " when they were constructed")
        if self._unreached and self._begin_alike(range(len(seeds)), seeds):
            return (
                f"the first observations of all {len(seeds)} environments are equal. Their constructors did "
                f"not get the seeds, and `reset` does not take a seed. {_WHAT_TO_DO} If the simulator is "
                "deterministic, ignore this warning."
            )
        return None

    def _begin_alike(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> bool:
        """Whether these environments have different seeds and equal first observations."""
        first = {self._first_observations.get(env_id, b"") for env_id in env_ids}
        return len({seeds[env_id] for env_id in env_ids}) > 1 and len(first) == 1 and b"" not in first


class DefaultSeed:
    """Finds another open `ParallelEnv` that also got no seed, and therefore plays the same episodes as this one.

    Two play the same episodes if seeds reach the environments and the first observations of environment 0 are equal.
    """

    _has_warned: ClassVar[bool] = False  # in this process
    _recorded: ClassVar[weakref.WeakSet[DefaultSeed]] = weakref.WeakSet()

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._first: bytes | None = None

    @staticmethod
    def reaches(built: Built, seed: int, reset_keywords: Collection[str]) -> bool:
        """Whether this seed reaches an environment without a seed of its own, as far as is known."""
        has_own = built.seeding.bound or built.declared_seed not in (None, seed)
        return built.seeding.passed or ("seed" in reset_keywords and not has_own)

    def warning(self, observations: Mapping[Any, Any]) -> str | None:
        """The warning after the first reset of environment 0 to which the caller passed no seed."""
        if DefaultSeed._has_warned or not observations:
            return None
        self._first = hashlib.blake2b(pickling.dumps(observations)).digest()
        others = [other for other in DefaultSeed._recorded if other._is_open() and other._first == self._first]
        DefaultSeed._recorded.add(self)
        if not others:
            return None
        DefaultSeed._has_warned = True
        return (
            "this ParallelEnv and another open one both use the default seed=42 and play the same episodes: pass a "
            "different seed= to one of them, or seed=None"
        )

    def forget(self) -> None:
        """Leave the comparison: environment 0 gets another seed."""
        DefaultSeed._recorded.discard(self)

    def _is_open(self) -> bool:
        pool = self._pool()
        return pool is not None and not pool.closed


_WHAT_TO_DO = (
    "A constructor gets the seed only if it has the parameter `seed`. What to do: add it and pass it on, such as "
    "`lambda seed: make_env(seed=seed)`."
)


def _alike(declared: Mapping[int, int]) -> list[int]:
    """The environments that declare the same seed as another one."""
    count = Counter(declared.values())
    return [env_id for env_id, seed in declared.items() if count[seed] > 1]


def _same_seed(declared: Mapping[int, int], when: str = "") -> str:
    same = _alike(declared)
    seeds = sorted({declared[env_id] for env_id in same})
    return (
        f"environments {same} declare the same seed{when}, {', '.join(map(str, seeds))}, although "
        "ParallelEnv chose different seeds. Their constructors did not get a seed, so the environments may play the "
        f"same episodes. {_WHAT_TO_DO}"
    )
