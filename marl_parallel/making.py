"""`make`: a batch of environments from names (module, file, registered id), on request with a facade.

`find_constructor` resolves all names of environments, here and on the command line. `_open_pool` resolves names of
simulators that step many environments by themselves, such as `vmas:balance`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import gymnasium
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.vector import AutoresetMode

from marl_parallel import arguments, vector
from marl_parallel.core.worker.constructors import Wrapped
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.settings import DEFAULT_SEED, ParallelEnvArguments, Settings
from marl_parallel.types import FacadeName
from marl_parallel.vector.drop_in import facade_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Name: TypeAlias = str | Callable[..., Any]
Names: TypeAlias = Name | Sequence[Name]
Keywords: TypeAlias = Mapping[str, Any] | None
OfEach: TypeAlias = Keywords | Sequence[Keywords]
Wrapper: TypeAlias = Callable[[Any], Any]

POOLS = ("envpool", "jaxmarl", "vmas")
"""Prefixes of names of native simulators."""
_CONSTRUCTOR_NAMES = ("parallel_env", "env", "raw_env")  # in a module, in this order
_FORMS = (
    "name must be 'module', 'module:attribute', 'path/to/file.py:function', 'envpool:task', 'jaxmarl:name', "
    "'vmas:scenario', an id of PettingZoo or Gymnasium, or a callable"
)
_FACADES = {
    "agilerl": ("AgileRLVecEnv", AutoresetMode.SAME_STEP),
    "gymnasium": ("GymnasiumVectorEnv", AutoresetMode.NEXT_STEP),
    "pettingzoo": ("PettingZooVecEnv", AutoresetMode.DISABLED),
    "pymarl": ("PyMARLConnections", AutoresetMode.DISABLED),
    "rllib": ("RLlibVectorMultiAgentEnv", AutoresetMode.NEXT_STEP),
    "sb3": ("SB3VecEnv", AutoresetMode.SAME_STEP),
    "share": ("ShareVecEnv", AutoresetMode.SAME_STEP),
    "skrl": ("SkrlEnv", AutoresetMode.SAME_STEP),
    "stacked": ("StackedVecEnv", AutoresetMode.SAME_STEP),
    "tianshou": ("TianshouVecEnv", AutoresetMode.DISABLED),
    "torchrl": ("TorchRLEnv", AutoresetMode.DISABLED),
    "tuple": ("TupleVecEnv", AutoresetMode.SAME_STEP),
}
"""By facade name: the class in `marl_parallel.vector`, and the auto-reset mode that its library expects."""


@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: None = None,
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> ParallelEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["agilerl"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.AgileRLVecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["gymnasium"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.GymnasiumVectorEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["pettingzoo"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.PettingZooVecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["pymarl"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.PyMARLConnections: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["rllib"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.RLlibVectorMultiAgentEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["sb3"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.SB3VecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["tianshou"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.TianshouVecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["share"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.ShareVecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["torchrl"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.TorchRLEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["stacked"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.StackedVecEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["skrl"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.SkrlEnv: ...  # fmt: skip
@overload
def make(
    name: Names, num_envs: int = 1, env_kwargs: OfEach = None, *, facade: Literal["tuple"],
    facade_kwargs: Keywords = None, wrappers: Sequence[Wrapper] = (), **arguments: Unpack[ParallelEnvArguments],
) -> vector.TupleVecEnv: ...  # fmt: skip
def make(
    name: Names,
    num_envs: int = 1,
    env_kwargs: OfEach = None,
    *,
    facade: FacadeName | None = None,
    facade_kwargs: Keywords = None,
    wrappers: Sequence[Wrapper] = (),
    **parallel_env_arguments: Any,
) -> Any:
    """Make a `ParallelEnv` of `num_envs` environments, or a facade of it.

    Args:
        name: What makes one environment: `module` or `module:attribute`; `path/to/file.py:function`, whose folder is
            added to `sys.path`; the id of a PettingZoo or Gymnasium environment; or a callable. See
            `docs/environments.md`. Or the name of a simulator that steps many environments by itself, without workers:
            `envpool:CartPole-v1`, `vmas:balance`, `jaxmarl:MPE_simple_spread_v3`; see `docs/simulators.md`. Or a list
            of the names of different environments, which may have different agents; see `docs/agents.md`.
        num_envs: How many environments; if `name` or `env_kwargs` is a list, how many of each. Environment i is number
            `i % k` of the k different ones.
        env_kwargs: Keywords for each environment's constructor; or for `ParallelEnv.from_envpool`, `vmas.make_env`,
            `jaxmarl.make`. Or a list of keywords for different environments, one for each name if there are several.
        facade: `"agilerl"`, `"gymnasium"`, `"pettingzoo"`, `"pymarl"`, `"rllib"`, `"sb3"`, `"share"`, `"skrl"`,
            `"stacked"`, `"tianshou"`, `"torchrl"` or `"tuple"`: returns that facade, made with the auto-reset mode of
            its library unless `auto_reset` is passed. None returns the `ParallelEnv`.
        facade_kwargs: Keywords of the facade, such as `scalarize`.
        wrappers: Called in the worker in this order, each with the environment, to return the wrapped one: wrapper
            classes and functions.
        parallel_env_arguments: For `ParallelEnv`. Simulators without workers take `seed` only.

    Raises:
        ModuleNotFoundError: There is no such module.
        FileNotFoundError: There is no such file.
        AttributeError: The module or file has no such attribute.
        gymnasium.error.UnregisteredEnv: No environment is registered under this id.
        ImportError: The facade's library is not installed; or the file has the name of a module that is imported.
        TypeError, ValueError: An argument is wrong, or the facade does not fit the environments.

    Example:
        >>> with make("mpe2.simple_spread_v3", num_envs=2, env_kwargs={"N": 4}) as env:
        ...     env.num_envs, env.possible_agents
        (2, ['agent_0', 'agent_1', 'agent_2', 'agent_3'])

        A facade, of wrapped environments:

        >>> from pettingzoo.utils import BaseParallelWrapper
        >>> env = make("mpe2.simple_spread_v3", 2, facade="gymnasium", wrappers=[BaseParallelWrapper])
        >>> env.num_envs, env.parallel_env.num_envs
        (6, 2)
        >>> env.close()
    """
    arguments.checked_integer(num_envs, "num_envs")
    different = _different(name, env_kwargs)
    in_facade = _facade(facade, facade_kwargs)
    for one, keywords in different:
        pool, _, task = one.partition(":") if isinstance(one, str) else ("", "", "")
        if pool in POOLS and task:
            if len(different) > 1:
                raise ValueError(f"{one} steps its environments by itself, so it cannot be one of several environments")
            opened = _open_pool(pool, task, num_envs, keywords, wrappers, parallel_env_arguments)
            return facade_of(opened, in_facade)
    if facade is not None:
        parallel_env_arguments = {"auto_reset": _FACADES[facade][1], **parallel_env_arguments}
    settings = Settings.of(parallel_env_arguments, hint="arguments of each environment go into env_kwargs")
    if isinstance(wrappers, str | Mapping) or not isinstance(wrappers, Sequence):
        raise TypeError(f"wrappers must be a list of callables that take an environment, got {wrappers!r}")
    for index, wrapper in enumerate(wrappers):
        if not callable(wrapper):
            raise TypeError(f"wrappers[{index}] must be a callable that takes an environment, got {wrapper!r}")
    constructors: list[Callable[..., Any]] = []
    for one, keywords in different:
        constructor: Callable[..., Any] = functools.partial(find_constructor(one), **keywords)
        seed = settings.episodes.seed
        arguments.check_signature(constructor, repr(one), "make(..., env_kwargs=dict({}))", seed=seed)
        constructors.append(Wrapped(constructor, tuple(wrappers)) if wrappers else constructor)
    return facade_of(ParallelEnv(constructors * num_envs, **settings), in_facade)


def _different(name: Any, env_kwargs: Any) -> list[tuple[Name, Mapping[str, Any]]]:
    """The different environments: their names, and the keywords of their constructors."""
    if isinstance(name, list | tuple) and not name:
        raise ValueError("name is an empty list: pass at least one name")
    names, each = ([*one] if isinstance(one, list | tuple) else None for one in (name, env_kwargs))
    if names is not None and each is not None and len(names) != len(each):
        raise ValueError(f"expected one dict in env_kwargs for each of {len(names)} names, got {len(each)}")
    if each is not None and not each:
        raise ValueError("env_kwargs is an empty list: pass at least one dict of keywords")
    keywords = [env_kwargs] * len(names or [name]) if each is None else each
    for index, one in enumerate(keywords):
        argument = "env_kwargs" if each is None else f"env_kwargs[{index}]"
        _check_keywords(argument, "each environment's constructor", one)
    return [*zip([name] * len(keywords) if names is None else names, [one or {} for one in keywords])]


def _open_pool(
    pool: str, task: str, num_envs: int, env_kwargs: Mapping[str, Any], wrappers: Any, passed: Mapping[str, Any]
) -> ParallelEnv:
    """A simulator that steps many environments by itself; `pool` is one of `POOLS`."""
    for key in passed:
        if key != "seed":
            raise TypeError(
                f"{pool}:{task} steps its environments by itself, without workers: of ParallelEnv's arguments it takes "
                f"only seed, not {key!r}; arguments of the simulator go into env_kwargs. After the end of an episode, "
                "the next step begins a new one"
            )
    if wrappers:
        raise TypeError(f"{pool}:{task} steps all its environments at once and cannot wrap them: leave wrappers= out")
    seed = passed.get("seed", DEFAULT_SEED)
    if pool == "envpool":
        return ParallelEnv.from_envpool(task, num_envs, seed=seed, **env_kwargs)
    module = importlib.import_module(f"marl_parallel.sources.{pool}")
    seeds = arguments.pool_seeds(seed, range(num_envs), f"{pool}:{task}")
    return ParallelEnv.from_native(module.open_pool(task, num_envs, seeds, env_kwargs))


def _facade(name: str | None, keywords: Mapping[str, Any] | None) -> Callable[[ParallelEnv], Any]:
    """A function that makes the facade, whose keywords have been checked."""
    _check_keywords("facade_kwargs", "the facade", keywords)
    if name is None:
        if keywords:
            raise TypeError(f"facade_kwargs={keywords!r} were passed without a facade: pass facade=, too")
        return lambda env: env
    if name not in _FACADES:
        raise ValueError(f"facade must be one of {', '.join(map(repr, _FACADES))} or None, got {name!r}")
    facade = getattr(vector, _FACADES[name][0])
    takes = [*inspect.signature(facade.__init__).parameters][2:]  # the signature of the class may be its metaclass's
    for key in keywords or {}:
        if key not in takes:
            raise TypeError(f"{facade.__name__} takes no argument {key!r}; facade_kwargs may have {takes}")
    return functools.partial(facade, **(keywords or {}))


def _check_keywords(argument: str, what: str, keywords: Any) -> None:
    if keywords is not None and not isinstance(keywords, Mapping):
        raise TypeError(f"{argument} must be a dict of keywords for {what}, got {keywords!r}")


# -- names of environments ---------------------------------------------------------------------------------------------


def find_constructor(name: str | Callable[..., Any], *, as_script: bool = False) -> Callable[..., Any]:
    """The constructor that a name stands for; a callable as it is.

    With `as_script`, a file is not imported as a module, but becomes the `__main__` of this process. Errors about the
    name itself have an attribute `wrong_name`; others come from the module or file that is imported.
    """
    if not isinstance(name, str) and callable(name):
        return name
    if isinstance(name, ModuleType):
        raise TypeError(f"{_FORMS}; got the module itself: pass its name, {name.__name__!r}")
    if not isinstance(name, str):
        raise TypeError(f"{_FORMS}; got {name!r}")
    in_file = re.fullmatch(r"(.+\.py)(?::(.+))?", name)
    if in_file is None and (registered := _registered(name)) is not None:
        return registered
    if in_file:
        module = (_run_script if as_script else _import_file)(Path(in_file[1]))
        module_name, attribute = module.__name__, in_file[2]
    else:
        module_name, _, attribute = name.partition(":")
        module = _imported(module_name)
    candidates = [attribute] if attribute else _CONSTRUCTOR_NAMES
    for candidate in candidates:
        constructor = getattr(module, candidate, None)
        if callable(constructor):
            return constructor  # type: ignore[no-any-return]
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    prefix = in_file[1] if in_file else module_name
    to_do = f": pass one of them, such as {f'{prefix}:{public[-1]}'!r}" if public else ""
    raise _about_name(
        AttributeError(
            f"module {module_name!r} has no callable named {' or '.join(map(repr, candidates))}; it has "
            f"{', '.join(public) or 'none'}{to_do}"
        )
    )


def _imported(module_name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise _about_name(ValueError(f"{_FORMS}; got the module {module_name!r}"))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports another one that does not
        top = module_name.partition(".")[0]
        parent, _, last = module_name.rpartition(".")
        if error.name == top:
            extra = " (the extra 'mpe' of marl-parallel does so)" if top == "mpe2" else ""
            hint = f": install the package that contains it{extra}, or pass 'path/to/file.py' for a file"
        else:
            hint = f"; a function of a module is named '{parent}:{last}'"
        raise _about_name(ModuleNotFoundError(f"{error}{hint}", name=error.name)) from None


def _about_name(error: Exception) -> Exception:
    vars(error)["wrong_name"] = True
    return error


def _registered(name: str) -> Callable[..., Any] | None:
    """The maker of a registered environment; None for a name in the form of a module name."""
    if name in gymnasium.registry:
        return functools.partial(gymnasium.make, name)
    has_ids = hasattr(pettingzoo, "parallel_registry")
    for kind in ("parallel", "aec") if has_ids else ():
        with contextlib.suppress(Exception):  # PettingZoo's errors have no common base that it exports
            pettingzoo.spec(kind, name)
            return functools.partial(pettingzoo.make, kind, name)
    module_name, _, env_id = name.rpartition(":")
    if not env_id or all(part.isidentifier() for part in env_id.split(".")):
        return None
    if module_name:
        _imported(module_name)
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        ids = [*gymnasium.registry, *({*pettingzoo.parallel_registry, *pettingzoo.aec_registry} if has_ids else ())]
        near = ", ".join(difflib.get_close_matches(env_id, ids))
        text = f"no environment is registered as {name!r}" + (f"; similar ids are {near}" if near else "")
        if not has_ids:
            text += f". PettingZoo {pettingzoo.__version__} registers no ids; 1.27 and later do"
        raise _about_name(gymnasium.error.UnregisteredEnv(f"{text}. Gymnasium says: {error}")) from None
    return functools.partial(gymnasium.make, name)


def _found(path: Path) -> Path:
    """The full path of a file. Its folder is added to `sys.path`, which workers get too: they can import from there."""
    path = path.resolve()
    if not path.is_file():
        raise _about_name(FileNotFoundError(f"there is no file {path}"))
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return path


def _run_script(path: Path) -> ModuleType:
    """Run a file as `multiprocessing` runs the script of the parent process: all but the code below its main guard.

    Workers then get its functions and classes pickled by value, as from a script.
    """
    path = _found(path)
    names = ("__main__", "__mp_main__")
    before = {name: sys.modules.get(name) for name in names}
    if getattr(before["__mp_main__"], "__file__", None) == str(path):
        return sys.modules["__mp_main__"]  # it has run already, for another function of the same file
    script = ModuleType("__mp_main__")
    script.__file__ = str(path)
    sys.modules.update(dict.fromkeys(names, script))
    try:
        code: Any = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        exec(code, vars(script))
    except BaseException:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        raise
    return script


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module."""
    path = _found(path)
    source = getattr(importlib.import_module(path.stem), "__file__", None)
    if source is None or Path(source).resolve() != path:
        raise _about_name(
            ImportError(
                f"{path.name} cannot be imported: another module is called {path.stem!r} ({source or 'built in'}); "
                "rename the file"
            )
        )
    return sys.modules[path.stem]
