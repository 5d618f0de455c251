"""From constructors to environments: the keywords of constructors, building in workers, and a check of equal seeds.

A constructor gets those of the keywords `seed`, `env_id` and `restarts` that its signature names. Known makers, such as
`gymnasium.make`, pass `**kwargs` on, so they get `seed` too if the function that they call names it; but no `env_id`
and `restarts`, since in other projects' signatures these names can mean something else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs import registration
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import Schema
from marl_parallel.adapters import attributes as lookup
from marl_parallel.core import pickling
from marl_parallel.core.array_file import LARGE, ArrayFileError, ArrayWriter
from marl_parallel.core.messages import Built, Message, Pickled, Plan, Request, Seeding

if TYPE_CHECKING:  # workers need no pool
    from marl_parallel.core.pool import Pool

Constructor = Callable[..., Any]
KEYWORDS = {"seed", "env_id", "restarts"}
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Wrapped:
    """A constructor whose environments are wrapped, in this order; it accepts the keywords of the inner one."""

    constructor: Constructor
    wrappers: tuple[Callable[[Any], Any], ...]

    def __call__(self, **keywords: Any) -> Any:
        env = self.constructor(**keywords)
        for place, wrapper in enumerate(self.wrappers):
            env = wrapper(env)
            if env is None:
                raise TypeError(f"wrappers[{place}], {wrapper!r}, returned None; does it lack a `return`?")
        return env


def construct_one(constructor: Constructor, *, seed: int | None, env_id: int) -> Any:
    """Call a constructor with the keywords that it accepts, and return the environment."""
    return call_constructor(constructor, {"seed": seed, "env_id": env_id, "restarts": 0})[0]


def call_constructor(constructor: Constructor, keywords: Mapping[str, int | None]) -> tuple[Any, Seeding]:
    """Like `construct_one`, without the keywords that are None; also returns how a seed reached the constructor."""
    call = _flattened(constructor)
    passed = {name: value for name, value in keywords.items() if value is not None}
    accepted = _accepted(call, KEYWORDS) & passed.keys()
    env = constructor(**{name: passed[name] for name in accepted})
    free, all_of_them = (_parameters(one, follow_wrapped=True) for one in (call, functools.partial(call.func)))
    bound = call.keywords.keys() | ({one.name for one in all_of_them} - {one.name for one in free})
    return env, Seeding("seed" in accepted, "seed" in bound, _is_open(free))


def missing_arguments(constructor: Constructor, passed: Collection[str] = KEYWORDS) -> list[Parameter]:
    """The required parameters for which a constructor gets no argument, if these keywords are `passed`."""
    call = _flattened(constructor)
    return [
        one
        for one in _parameters(call, follow_wrapped=False)  # a wrapper may fill in what it wraps
        if one.default is Parameter.empty
        and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and one.name not in call.keywords
        and not (one.kind in _BY_KEYWORD and one.name in passed)
    ]


def _flattened(constructor: Constructor) -> functools.partial[Any]:
    """A function without wrappers, with all that nested partials bind to it.

    `functools` leaves those nested that have attributes.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(constructor, functools.partial | Wrapped):
        if isinstance(constructor, Wrapped):
            constructor = constructor.constructor
            continue
        args, keywords = constructor.args + args, {**constructor.keywords, **keywords}
        constructor = constructor.func
    return functools.partial(constructor, *args, **keywords)


def _parameters(call: functools.partial[Any], *, follow_wrapped: bool) -> list[Parameter]:
    """The parameters that no positional argument fills; none if the signature cannot be read."""
    try:
        parameters = lookup.signature(call.func, follow_wrapped=follow_wrapped).parameters.values()
    except (TypeError, ValueError):
        return []
    filled = [one for one in parameters if one.kind in _POSITIONAL][: len(call.args)]
    return [one for one in parameters if one not in filled]


def _is_open(parameters: Iterable[Parameter]) -> bool:
    return any(one.kind is Parameter.VAR_KEYWORD for one in parameters)


def _accepted(call: functools.partial[Any], names: set[str]) -> set[str]:
    """The names that can be passed as keywords and are not bound."""
    parameters = _parameters(call, follow_wrapped=False)
    accepted: set[str] = set()
    if _is_open(parameters):
        wrapped = _parameters(call, follow_wrapped=True)
        parameters += wrapped
        if _is_open(wrapped) and (maker_calls := _called_by_maker(call)) is not None:
            accepted = _accepted(maker_calls, {"seed"})
    accepted |= {one.name for one in parameters if one.kind in _BY_KEYWORD}
    return (accepted & names) - call.keywords.keys()


def _called_by_maker(call: functools.partial[Any]) -> functools.partial[Any] | None:
    """The function that a known maker calls, with all keywords bound that it passes; None for other functions."""
    function = inspect.unwrap(call.func)
    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **call.keywords}
    if getattr(function, "__module__", None) == "pettingzoo.utils.conversions":
        # What `parallel_wrapper_fn` and `aec_wrapper_fn` return calls another function, which is only in its closure.
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        return _flattened(cells[0]) if len(cells) == 1 and callable(cells[0]) else None
    owner, spec = getattr(function, "__self__", None), None
    try:
        if function is gymnasium.make:
            spec = _gymnasium_spec(arguments.get(0, arguments.get("id")))
        elif isinstance(owner, registration.EnvSpec) and getattr(function, "__name__", "") == "make":
            spec = owner
        elif function is getattr(pettingzoo, "make", None):  # from 1.27 on
            kind, spec = arguments.get(0, arguments.get("env_type")), arguments.get(1, arguments.get("id"))
            spec = pettingzoo.spec(kind, spec) if isinstance(spec, str) else spec
        entry_point = getattr(spec, "entry_point", None)
        if isinstance(entry_point, str):
            entry_point = registration.load_env_creator(entry_point)
    except Exception:
        # An unknown id, or a module that cannot be imported: the maker raises the same when it is called.
        return None
    if not callable(entry_point):
        return None
    bound = {name: value for name, value in getattr(spec, "kwargs", {}).items() if name != "seed" or value is not None}
    return _flattened(functools.partial(entry_point, **{**bound, **call.keywords}))


def _gymnasium_spec(env_id: Any) -> Any:
    """The `EnvSpec` that `gymnasium.make` uses; None if there is none."""
    if not isinstance(env_id, str):
        return env_id
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, stem, version = registration.parse_env_id(name)
    latest = registration.find_highest_version(namespace, stem) if version is None else None
    return registration.registry.get(name if latest is None else registration.get_env_id(namespace, stem, latest))


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
) -> tuple[list[Schema], Plan, dict[int, Built]]:
    """Build all environments in their workers; returns their descriptions, the plan of all, and the results by env id.

    Modules that workers cannot import are added to `local_modules`, and the environments that need them built again.
    Workers in this process get what cannot be pickled as it is; but not with `derived_seeds`, when replays are kept.
    """
    pickled: dict[int, Any] = {}
    as_it_is: set[int] = set()
    can_share = not pool.backend.pickles and not derived_seeds
    writer = ArrayWriter(pool.backend.array_file())
    registrations = pickling.dump_registrations()
    schemas: dict[bytes, Schema] = {}  # equal descriptions are unpickled once: their spaces may be large
    built: dict[int, Built] = {}
    to_pickle: Collection[int] = range(len(constructors))
    what = "the constructor of" if adapter is None else "the constructor or adapter of"
    while to_pickle:
        pickled.update(_pickle(constructors, {*to_pickle} - as_it_is, local_modules, writer, can_share=can_share))
        pickled.update({env_id: constructors[env_id] for env_id in as_it_is})
        how_adapted = _adapter(adapter, local_modules, writer, can_share=can_share, as_it_is=bool(as_it_is))
        settings = b"" if pool.settings is None else pool.settings.pickled()
        plan = Plan(
            pickled, dict(enumerate(seeds)), mode, how_adapted, restarts,
            derived_seeds=derived_seeds, isolate_rng=isolate_rng, registrations=registrations, settings=settings,
        )  # fmt: skip
        requests = {}
        for worker, share in enumerate(pool.shares):
            ids = tuple([env_id for env_id in share if env_id not in built])
            if ids:
                part = {env_id: pickled[env_id] for env_id in ids}
                own = plan._replace(constructors=part, seeds={env_id: seeds[env_id] for env_id in ids})
                requests[worker] = Request(Message.ACCESS, ids, own)
        results = dict(sorted(pool.execute(requests).items()))
        for env_id, result in results.items():
            if isinstance(result, Built):
                built[env_id] = result
                if result.description not in schemas:
                    schemas[result.description] = pool.read(env_id, result.description)
            elif result.kind is UnpicklingError:
                if not can_share or env_id in as_it_is:
                    raise TypeError(f"environment {env_id}: {result.text}. {_WAY_OUT}: {constructors[env_id]!r}")
                as_it_is.add(env_id)
            elif result.kind is not ModuleNotFoundError:
                raise result.kind(f"environment {env_id}: {result.text}")
        to_pickle = [*pickling.add_missing_modules(local_modules, results, what), *(as_it_is - built.keys())]
    described = [schemas[built[env_id].description] for env_id in range(len(constructors))]
    return described, plan._replace(described=built[0].description), dict(sorted(built.items()))


_WAY_OUT = (
    "Create what does not pickle inside the constructor, or move the class or function that uses it into a module, "
    'which workers import; backend="serial" and "thread" need no pickle'
)


def _pickle(
    constructors: Sequence[Constructor],
    env_ids: Collection[int],
    local_modules: Sequence[ModuleType],
    writer: ArrayWriter,
    *,
    can_share: bool = False,
) -> dict[int, Any]:
    """The pickled constructors; with `can_share`, those that cannot be pickled as they are."""
    by_id: dict[int, Any] = {}  # most often, all environments have the same constructor
    with pickling.by_value(local_modules):
        for env_id in env_ids:
            constructor = constructors[env_id]
            try:
                by_id[id(constructor)] = by_id.get(id(constructor)) or writer.dumps(constructor)
            except ArrayFileError:
                raise
            except Exception as error:
                if can_share:
                    by_id[id(constructor)] = constructor
                    continue
                raise TypeError(
                    f"the constructor of environment {env_id} cannot be pickled, so it cannot be sent to a "
                    f"worker: {error}{pickling.where_unpicklable(constructor)}. {_WAY_OUT}: {constructor!r}"
                ) from error
    return {env_id: by_id[id(constructors[env_id])] for env_id in env_ids}


def _adapter(
    adapter: Any, local_modules: Sequence[ModuleType], writer: ArrayWriter, *, can_share: bool, as_it_is: bool
) -> Any:
    """The pickled adapter; with `can_share`, itself if it cannot be pickled or `as_it_is`."""
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


class SeedCheck:
    """Warns of environments that should differ by their seed and are alike; `docs/seeding.md` has the two signs of it.

    First observations that are equal count only if the seed reached no environment: chess begins alike with any seed.
    """

    def __init__(self, built: Mapping[int, Built], reset_takes_seed: bool) -> None:
        unseeded = [(env_id, one.declared_seed) for env_id, one in built.items() if not one.seeding.seeded]
        self._declared = {env_id: seed for env_id, seed in unseeded if seed is not None}
        self._alike = _alike(self._declared)
        open_and_unseeded = all(one.seeding.open and not one.seeding.seeded for one in built.values())
        self._unreached = open_and_unseeded and len(built) > 1 and not reset_takes_seed
        self._first_observations: dict[int, bytes] = {}
        self.asks_again = bool(self._alike) and reset_takes_seed  # whether `warning` needs the seeds declared then
        # The warning after construction, and whether there is no other one.
        self.first_warning = _same_seed(self._declared) if self._alike and not reset_takes_seed else None
        self.is_done = self.first_warning is not None or not (self.asks_again or self._unreached)

    def note(self, env_id: int, observations: Mapping[Any, Any]) -> None:
        if env_id not in self._first_observations:
            self._first_observations[env_id] = pickling.dumps(observations) if observations else b""

    def warning(self, seeds: Sequence[int | None], declared: Mapping[int, int] | None) -> str | None:
        """The warning after the first reset, from our seeds and, with `asks_again`, those declared now."""
        if declared is not None:
            now = {env_id: declared[env_id] for env_id in self._declared}
            if len({seeds[env_id] for env_id in _alike(now)}) > 1:
                return _same_seed(now)
            if self._begin_alike(self._alike, seeds):
                return _same_seed(self._declared, " when they were made")
        if self._unreached and self._begin_alike(range(len(seeds)), seeds):
            return (
                f"the first observations of all {len(seeds)} environments are equal, and their seeds reached "
                f"neither their constructors nor `reset`, which takes no seed. {_WHAT_TO_DO} If the simulator is "
                "deterministic, ignore this warning."
            )
        return None

    def _begin_alike(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> bool:
        """Whether these environments have different seeds and equal first observations."""
        first = {self._first_observations.get(env_id, b"") for env_id in env_ids}
        return len({seeds[env_id] for env_id in env_ids}) > 1 and len(first) == 1 and b"" not in first


class DefaultSeed:
    """Of a `ParallelEnv` that got no seed: finds another open one that plays the same episodes for this reason.

    They do if seeds reach the environments and the first observations of both environments 0 are equal.
    """

    _has_warned: ClassVar[bool] = False  # in this process
    _noted: ClassVar[weakref.WeakSet[DefaultSeed]] = weakref.WeakSet()

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._first: bytes | None = None

    @staticmethod
    def reaches(built: Built, seed: int, reset_keywords: Collection[str]) -> bool:
        """Whether this seed reaches an environment that has none of its own, as far as that is known."""
        has_own = built.seeding.bound or built.declared_seed not in (None, seed)
        return built.seeding.passed or ("seed" in reset_keywords and not has_own)

    def warning(self, observations: Mapping[Any, Any]) -> str | None:
        """The warning after the first reset of environment 0 without a seed of the caller's."""
        if DefaultSeed._has_warned or not observations:
            return None
        self._first = hashlib.blake2b(pickling.dumps(observations)).digest()
        others = [other for other in DefaultSeed._noted if other._is_open() and other._first == self._first]
        DefaultSeed._noted.add(self)
        if not others:
            return None
        DefaultSeed._has_warned = True
        return (
            "another ParallelEnv that is open has no seed= either, so that both have the default of 42 and play the "
            "same episodes: pass another seed= to one of them, or seed=None"
        )

    def forget(self) -> None:
        """Note that environment 0 gets another seed."""
        DefaultSeed._noted.discard(self)

    def _is_open(self) -> bool:
        pool = self._pool()
        return pool is not None and not pool.closed


_WHAT_TO_DO = (
    "A constructor gets the seed only if its signature names it. What to do: name it and pass it on, such as "
    "`lambda seed: make_env(seed=seed)`."
)


def _alike(declared: Mapping[int, int]) -> list[int]:
    """The environments that declare the same seed as another one."""
    count = Counter(declared.values())
    return [env_id for env_id, seed in declared.items() if count[seed] > 1]


def _same_seed(declared: Mapping[int, int], when: str = "") -> str:
    alike = _alike(declared)
    seeds = sorted({declared[env_id] for env_id in alike})
    return (
        f"environments {alike} declare the same seed{when}, {', '.join(map(str, seeds))}, although "
        f"ParallelEnv chose different ones; their constructors got none, so they may be identical. {_WHAT_TO_DO}"
    )
