"""Saves a simulator as bytes, and loads it in another process: `save_state` and `load_state` in a worker.

The simulator is pickled with its adapter and wrappers. These objects are treated in another way::

    objects that pickle only the arguments of their constructor (EzPickle)    with all attributes
    views of arrays                                                          as views of the same memory
    unchanged large arrays of the constructor                                as a reference, without a copy
    fonts, clocks, surfaces of pygame; locks                                 made again
    classes of the caller's script                                           by name: the script may have changed

A layer that cannot be pickled (an engine in C++) may save itself, by a pair of methods such as `get_state` and
`set_state`. Then a new environment is constructed when it is loaded, and its layer gets the state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import attributes
from marl_parallel.adapters.protocol import MultiAgentEnv
from marl_parallel.core.objects.array_file import ConstructorArrays
from marl_parallel.core.objects.pickling import dumps_by_value, unpickle
from marl_parallel.core.objects.reducers import SCRIPTS
from marl_parallel.core.objects.unpicklable import path_to_unpicklable
from marl_parallel.core.schema import CompactPickler

PAIRS = (
    ("get_state", "set_state"),
    ("save_state", "load_state"),
    ("save_state", "restore_state"),
    ("save_state", "restore"),
    ("clone_state", "restore_state"),
)
"""Methods by which a layer of a simulator saves and loads its state; the first pair that a layer has is used."""

_ARRAY, _LAYER = "array", "layer"  # the kinds of references in a pickle


class SavedSimulator(NamedTuple):
    """A pickled simulator, with its adapter and wrappers."""

    pickled: bytes
    needs_constructor: bool  # whether loading needs a new environment
    needs_arrays: bool  # whether it refers to arrays of its constructor


class CannotBeSaved(Exception):
    """The simulator cannot be pickled; the text says which part, and where it is."""


class CannotBeLoaded(Exception):
    """The simulator cannot be loaded; the text says why."""


class Loaded(NamedTuple):
    """A loaded simulator."""

    env: MultiAgentEnv
    more: Any  # the value that was saved with it
    uses_pygame: bool  # whether it has objects of pygame, which pygame.quit() of another one makes invalid


Layers: TypeAlias = Mapping[int, tuple[Any, tuple[str, str]]]
"""The layers of a simulator that save themselves, by number, with their pair of methods."""


def dump_simulator(env: MultiAgentEnv, more: Any, arrays: ConstructorArrays) -> SavedSimulator:
    """Pickle an environment with its adapter, and `more`, which is pickled with it; raises `CannotBeSaved`."""
    try:
        return _dump(env, more, arrays, {}, {})
    except Exception as error:
        layers: dict[int, tuple[Any, tuple[str, str]]] = {}
        for number, layer in enumerate(attributes.layers(env.source)):
            if (pair := _pair_of(layer)) is not None and not _can_be_pickled(layer, arrays):
                layers[number] = layer, pair
        if not layers:
            raise CannotBeSaved(f"{error}{_where(env.source, arrays, layers, {})}") from error
    states = {number: _state_of(layer, pair) for number, (layer, pair) in layers.items()}
    try:
        return _dump(env, more, arrays, layers, states)
    except Exception as error:
        raise CannotBeSaved(f"{error}{_where(env.source, arrays, layers, states)}") from error


def _dump(
    env: MultiAgentEnv, more: Any, arrays: ConstructorArrays, layers: Layers, states: Mapping[int, Any]
) -> SavedSimulator:
    kinds = {number: (attributes.type_name(layer), pair) for number, (layer, pair) in layers.items()}
    references = _References(arrays, _numbers(layers))
    pickled = dumps_by_value((env, more, states, kinds), functools.partial(_Pickler, references))
    return SavedSimulator(pickled, bool(layers), references.has_arrays)


def load_simulator(
    saved: SavedSimulator,
    arrays: ConstructorArrays,
    construct: Callable[[], MultiAgentEnv],
    unpickling: AbstractContextManager[None],
) -> Loaded:
    """Load a simulator; `construct` makes and resets a new one, if needed. Raises `CannotBeLoaded`.

    The simulator is unpickled within `unpickling`.
    """
    layers: list[Any] = []
    fresh: MultiAgentEnv | None = None
    if saved.needs_constructor:
        fresh = construct()
        layers = [*attributes.layers(fresh.source)]
    try:
        return _load(saved, arrays, layers, unpickling)
    except BaseException:
        if fresh is not None:
            close_quietly(fresh)
        raise


def close_quietly(env: MultiAgentEnv) -> None:
    """Close an environment and ignore its errors, which would hide the reason for dropping it."""
    with contextlib.suppress(Exception):
        env.close()


def _load(
    saved: SavedSimulator, arrays: ConstructorArrays, layers: Sequence[Any], unpickling: AbstractContextManager[None]
) -> Loaded:
    try:
        with unpickling:
            pickled = saved.pickled
            env, more, states, kinds = unpickle(lambda pickle: _Unpickler(pickle, arrays, layers).load(), pickled)
    except CannotBeLoaded:
        raise
    except Exception as error:
        raise CannotBeLoaded(f"{type(error).__name__}: {error}") from error
    for number, state in states.items():
        kind, pair = kinds[number]
        if attributes.type_name(layers[number]) != kind:
            raise CannotBeLoaded(f"its constructor makes a {attributes.type_name(layers[number])} in place of a {kind}")
        try:
            getattr(layers[number], pair[1])(state)
        except Exception as error:
            raise CannotBeLoaded(f"{pair[1]} of {kind} raised {type(error).__name__}: {error}") from error
    return Loaded(env, more, b"_new_of_pygame" in saved.pickled or b"_new_surface" in saved.pickled)


# -- layers that save themselves ---------------------------------------------------------------------------------------


def _pair_of(layer: Any) -> tuple[str, str] | None:
    """The methods by which a layer saves itself, without methods that it forwards from another layer."""
    for pair in PAIRS:
        if all(callable(getattr(type(layer), name, None)) for name in pair):
            required = [_required(getattr(layer, name)) for name in pair]
            if required in ([0, 1], [0, 0]):
                return pair
    return None


def _required(method: Any) -> int | None:
    """How many arguments a method requires; None if unknown."""
    try:
        parameters = attributes.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


def _state_of(layer: Any, pair: tuple[str, str]) -> Any:
    method = getattr(layer, pair[0])
    # Atari's environments leave the generator of sticky actions out by default.
    keywords = {"include_rng": True} if "include_rng" in attributes.signature(method).parameters else {}
    try:
        return method(**keywords)
    except Exception as error:
        name = f"{pair[0]} of {attributes.type_name(layer)}"
        raise CannotBeSaved(f"{name} raised {type(error).__name__}: {error}") from error


def _numbers(layers: Layers) -> dict[int, int]:
    """By the id of a layer, its number."""
    return {id(layer): number for number, (layer, _) in layers.items()}


def _can_be_pickled(value: Any, arrays: ConstructorArrays, layers: Layers = MappingProxyType({})) -> bool:
    try:
        dumps_by_value(value, functools.partial(_Pickler, _References(arrays, _numbers(layers))))
    except Exception:
        return False
    return True


def _where(source: Any, arrays: ConstructorArrays, layers: Layers, states: Mapping[int, Any]) -> str:
    """A sentence that names what cannot be pickled."""
    for number, (layer, pair) in layers.items():
        state = states[number]
        if not _can_be_pickled(state, arrays):
            part = path_to_unpicklable(state, lambda part: _can_be_pickled(part, arrays)) or type(state).__name__
            name = f"{pair[0]} of {attributes.type_name(layer)}"
            return f". The part that cannot be pickled is in the result of {name}: {part}"
    path = path_to_unpicklable(
        source, lambda part: _can_be_pickled(part, arrays, layers), functools.partial(_attributes_of, layers)
    )
    return f". The part that cannot be pickled is {path}" if path else ""


def _attributes_of(layers: Layers, value: Any) -> Mapping[str, Any] | None:
    """The attributes that `path_to_unpicklable` searches: none for layers that save themselves."""
    return {} if id(value) in _numbers(layers) else _attributes_of_ez_pickle(value)


# -- pickles -----------------------------------------------------------------------------------------------------------


class _References:
    """Objects that a pickle refers to instead of containing them."""

    def __init__(self, arrays: ConstructorArrays, layers: Mapping[int, int]) -> None:
        self._arrays, self._layers, self.has_arrays = arrays, layers, False

    def of(self, value: Any) -> Any:
        """The reference to a value; None if it is pickled."""
        if type(value) is np.ndarray:
            if (reference := self._arrays.reference_to(value)) is not None:
                self.has_arrays = True
                return _ARRAY, reference, value.dtype, value.shape, value.strides, value.flags.writeable
            return None
        number = self._layers.get(id(value))
        return None if number is None else (_LAYER, number)


class _Pickler(CompactPickler):
    with_keys = False
    with_process_wide = False  # their states belong to the saved state

    def __init__(self, references: _References, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._references = references

    def persistent_id(self, obj: Any) -> Any:
        return self._references.of(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            if (reduced := _reduced_view(obj)) is not None:
                return reduced
            is_plain = obj.flags.c_contiguous and obj.flags.writeable
            return super().reducer_override(obj) if is_plain else NotImplemented
        if isinstance(obj, type | FunctionType):
            return NotImplemented if _is_found_by_name(obj) else super().reducer_override(obj)
        if (attributes_ := _attributes_of_ez_pickle(obj)) is not None:
            return _new, (kind,), attributes_, None, None, _set_attributes
        if (reduce := _RESOURCES.get((kind.__module__, kind.__name__))) is not None:
            return reduce(obj)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, arrays: ConstructorArrays, layers: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._arrays, self._layers = arrays, layers

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _LAYER:
            if pid[1] >= len(self._layers):
                raise CannotBeLoaded("its constructor makes fewer wrappers than when the state was saved")
            return self._layers[pid[1]]
        _, reference, dtype, shape, strides, writeable = pid
        array: NDArray[Any] = np.ndarray(shape, dtype, *self._arrays.at(reference), strides)
        array.flags.writeable = writeable
        return array


def _is_found_by_name(definition: Any) -> bool:
    """Whether this process's script, or the `__main__` of a worker, has a definition under its name."""
    module, path = getattr(definition, "__module__", None), definition.__qualname__
    if module not in SCRIPTS or "#" in path or "<" in path:
        return False
    found = sys.modules.get("__main__")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is definition


def _attributes_of_ez_pickle(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that would pickle only its constructor's arguments; None for other objects."""
    name = getattr(getattr(type(value), "__getstate__", None), "__qualname__", "")
    return vars(value) if name == "EzPickle.__getstate__" else None


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_attributes(value: Any, attributes_: Mapping[str, Any]) -> None:
    vars(value).update(attributes_)


def _reduced_view(array: NDArray[Any]) -> Any:
    """Reduce a view of another array to a view; None for an array with memory of its own."""
    whole = array.base
    if type(whole) is not np.ndarray or array.dtype.hasobject or whole.dtype.hasobject or not array.nbytes:
        return None
    if not whole.flags.forc:
        return None
    offset = _address(array) - _address(whole)
    return _view, (whole, offset, array.shape, array.strides, array.dtype, array.flags.writeable)


def _view(
    whole: NDArray[Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    writeable: bool,
) -> NDArray[Any]:
    flat = whole.reshape(-1, order="A").view(np.uint8)
    array: NDArray[Any] = np.ndarray(shape, dtype, flat, offset, strides)
    if not writeable:
        array.flags.writeable = False
    return array


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# -- objects that are made again ---------------------------------------------------------------------------------------


def _reduce_lock(lock: Any) -> Any:
    if not lock.acquire(blocking=False):
        raise TypeError(f"cannot pickle a {type(lock).__name__!r} object that is held")
    lock.release()
    return (threading.RLock if type(lock).__name__ == "RLock" else threading.Lock), ()


def _reduce_clock(clock: Any) -> Any:
    return _new_of_pygame, ("time", "Clock", ())


def _reduce_free_font(font: Any) -> Any:
    try:
        return _new_of_pygame, ("freetype", "Font", (font.path, font.size))
    except RuntimeError:  # the close of another environment has ended pygame, so this font is unusable
        return _new_of_pygame, ("freetype", "Font", (None, 24))


def _reduce_surface(surface: Any) -> Any:
    form = surface.get_size(), surface.get_flags() & _kept_flags(), surface.get_bitsize(), surface.get_masks()
    palette = surface.get_palette() if surface.get_bitsize() <= 8 else None
    how = surface.get_colorkey(), surface.get_alpha(), tuple(surface.get_clip()), palette
    pixels = zlib.compress(surface.get_buffer().raw, 1)  # most have one colour in most places
    return _new_surface, (*form, how, pixels)


def _kept_flags() -> int:
    import pygame  # type: ignore[import-not-found,unused-ignore]

    return int(pygame.SRCALPHA)


def _new_of_pygame(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    import importlib

    loaded = importlib.import_module(f"pygame.{module}")
    if hasattr(loaded, "init") and not loaded.get_init():
        loaded.init()
    return getattr(loaded, name)(*arguments)


def _new_surface(
    size: tuple[int, int], flags: int, depth: int, masks: Any, how: tuple[Any, Any, Any, Any], pixels: bytes
) -> Any:
    import pygame

    surface = pygame.Surface(size, flags, depth, masks if depth > 8 else None)
    colorkey, alpha, clip, palette = how
    if palette is not None:
        surface.set_palette(palette)
    surface.get_buffer().write(zlib.decompress(pixels), 0)
    surface.set_colorkey(colorkey)
    surface.set_alpha(alpha)
    surface.set_clip(clip)
    return surface


_RESOURCES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("_thread", "lock"): _reduce_lock,
    ("_thread", "RLock"): _reduce_lock,
    ("pygame.time", "Clock"): _reduce_clock,
    ("pygame.freetype", "Font"): _reduce_free_font,
    ("pygame.surface", "Surface"): _reduce_surface,
}
"""By the module and the name of a class, the function that reduces its objects."""
