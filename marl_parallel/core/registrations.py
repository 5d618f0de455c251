"""Environments that the caller has registered with Gymnasium and PettingZoo, for workers in other processes.

A constructor may call `gymnasium.make` or `pettingzoo.make` with an id that was registered by an `import` or by
`register` in the caller's script, neither of which a worker process has executed.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import gymnasium
import pettingzoo  # type: ignore[import-untyped]
from gymnasium.envs.registration import EnvSpec

from marl_parallel.core.pickling import by_value, dumps_by_value, loads

_PETTINGZOO = ("aec_registry", "parallel_registry")  # older releases have none


def dump_registrations() -> bytes:
    """Pickle what is registered in this process; a spec that does not pickle is left out."""
    return pickle.dumps({name: dict(_pickled(specs)) for name, specs in _registries()}, pickle.HIGHEST_PROTOCOL)


def install_registrations(pickled: bytes) -> None:
    """Register in this process what was registered where this was pickled.

    A spec of Gymnasium is unpickled when it is first used: it may import its simulator. A simulator that is imported
    here registers its environments once more. That would be a warning for each of them.
    """
    warnings.filterwarnings("ignore", r".*Overriding environment .* in (the \w+ )?registry", UserWarning)
    received: Mapping[str, Mapping[str, bytes]] = pickle.loads(pickled)
    for name, registry in _registries():
        known = dict(_pickled(registry))
        for env_id, spec in received.get(name, {}).items():
            if known.get(env_id) == spec:
                continue
            if registry is gymnasium.registry:
                registry[env_id] = _PickledSpec(env_id, spec)
                continue
            with contextlib.suppress(Exception):  # the simulator of another constructor: pettingzoo.make names the id
                registry[env_id] = loads(spec)


def _registries() -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    yield "gymnasium", gymnasium.registry
    for name in _PETTINGZOO:
        registry = getattr(pettingzoo, name, None)
        if isinstance(registry, dict):
            yield name, registry


def _pickled(registry: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Each spec by its id; definitions that no other process can import travel by value."""
    importable: dict[str, bool] = {}
    for env_id, spec in registry.items():
        if type(spec) is _PickledSpec:
            yield env_id, spec.pickled
            continue
        module = getattr(spec.entry_point, "__module__", None) if callable(spec.entry_point) else None
        if isinstance(module, str) and module not in importable:
            importable[module] = _is_importable(module)
        here_only = isinstance(module, str) and not importable[module]
        try:
            pickled = b"__main__" if here_only else pickle.dumps(spec, pickle.HIGHEST_PROTOCOL)
        except Exception:  # plain pickle knows no lambdas
            pickled = b"__main__"
        if b"__main__" in pickled:
            with (
                by_value([sys.modules[module]] if here_only and module in sys.modules else []),
                contextlib.suppress(Exception),
            ):
                yield env_id, dumps_by_value(spec)
            continue
        yield env_id, pickled


def _is_importable(module: str) -> bool:
    """Whether another process with the same `sys.path` finds a module, which a test that was loaded by file is not."""
    if module == "__main__":
        return True  # cloudpickle sends what a script defines by value
    top = module.partition(".")[0]
    for finder in sys.meta_path:
        # A finder of another project may fail on names that are not its own; the next one is asked then.
        with contextlib.suppress(Exception):
            if finder.find_spec(top, None) is not None:
                return True
    return False


class _PickledSpec(EnvSpec):
    """A spec that becomes a plain `EnvSpec` when more than its id is asked for."""

    def __init__(self, env_id: str, pickled: bytes) -> None:
        namespace, name, version = gymnasium.envs.registration.parse_env_id(env_id)
        vars(self).update(id=env_id, namespace=namespace, name=name, version=version, pickled=pickled)

    pickled: bytes

    def __getattribute__(self, name: str) -> Any:
        if name not in _BEFORE_UNPICKLING:
            attributes = object.__getattribute__(self, "__dict__")
            spec = loads(attributes["pickled"])
            object.__setattr__(self, "__class__", EnvSpec)
            attributes.clear()
            attributes.update(vars(spec))
        return object.__getattribute__(self, name)


_BEFORE_UNPICKLING = frozenset({"__class__", "__dict__", "id", "namespace", "name", "version", "pickled"})
