"""Saves environments as bytes and loads them: the caller's side of `save_state` and `load_state`.

A state has values from the worker (`SAVE`), and values of the same environment from the caller's side::

    simulator, who is alive and acts, seeds, generators        worker.py, saved_simulator.py
    the latest transition, from the record                     it is written into the block again
    the latest result, if it was another one                   after a restart or a move
    action masks, statistics                                   block_transitions.py, statistics.py
    rebuilds, options, restarts, recycling, replays            `Extension.save`

States are loaded in two steps, so that nothing changes if one of them cannot be loaded: `CONSTRUCT` makes all
environments beside the present ones, and `TAKE_OVER` puts them in their places.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.records import dump_leftovers
from marl_parallel.core.block.statistics import Sums
from marl_parallel.core.messages import Begins, Construct, Message, Refusal, Saved
from marl_parallel.core.objects.pickling import dumps, loads
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds
from marl_parallel.core.pool.recycling import Recycling
from marl_parallel.core.pool.replacement import Event
from marl_parallel.core.pool.replay import Histories
from marl_parallel.core.pool.restarts import Restarts
from marl_parallel.core.pool.slots import Slot, Snapshot
from marl_parallel.core.transition import ALL, Transition, ordered
from marl_parallel.core.worker.env_runner import dicts_of
from marl_parallel.types import ParallelEnvError

VERSION = 3
_EXTENSIONS = frozenset(one.saved_as for one in (Rebuilds, Restarts, Recycling, Histories))
_MAGIC = b"marl_parallel state %d %08x\n"  # the format, and the checksum of the bytes that follow


class EnvState(NamedTuple):
    """The saved state of one environment."""

    mode: str
    agents: list[Any]
    saved: Saved
    transition: Transition  # in the record
    result: Snapshot  # as its caller has received it
    is_replaced: bool  # whether `result` differs from `transition`
    statistics: Sums
    extensions: dict[str, Any]  # by `Extension.saved_as`
    base_seed: int | None
    seed: int | None
    sampler: tuple[int | None, Any]  # the seed of random actions, and their sampler, if it has been used
    facade: dict[str, Any]  # values that facades have added, by the key of the facade

    def with_facade(self, key: str, value: Any) -> EnvState:
        """The same state, with a value that a facade adds."""
        return self._replace(facade={**self.facade, key: value})


def to_bytes(state: EnvState) -> bytes:
    """Convert a state to bytes: a line with the format and a checksum, and a pickle."""
    pickled = dumps(tuple(state))
    return _MAGIC % (VERSION, zlib.crc32(pickled)) + pickled


def from_bytes(state: Any, whose: str) -> EnvState:
    """Convert bytes of `to_bytes` to a state; raises `TypeError` or `ValueError` for other values."""
    if not isinstance(state, bytes | bytearray | memoryview):
        raise TypeError(f"{whose}: its state must be bytes that save_state returned, got {type(state).__name__}")
    state = bytes(state)
    first, newline, rest = state.partition(b"\n")
    if first + newline != _MAGIC % (VERSION, zlib.crc32(rest)):
        words = first.split()
        if words[:2] != _MAGIC.split()[:2] or len(words) < 3:
            raise ValueError(f"{whose}: its state was not made by save_state, it begins with {state[:20]!r}")
        if words[2] != b"%d" % VERSION:
            number = words[2].decode(errors="replace")
            raise ValueError(
                f"{whose}: its state has format {number}, but this release of marl_parallel reads format {VERSION}: "
                "load it with the release that saved it"
            )
        raise ValueError(
            f"{whose}: its state is damaged: the checksum in its first line does not match the {len(rest)} bytes after "
            "it. Check that the whole state was written, and that it was read as bytes"
        )
    try:
        return EnvState(*loads(rest))
    except Exception as error:
        raise TypeError(f"{whose}: its state cannot be loaded: {type(error).__name__}: {error}") from error


class SavedStates:
    """Saves and loads environments that are not in flight.

    Args:
        pool: The pool.
        transitions: The environments' records.
        rebuilds: Makes the requests to construct environments.
    """

    def __init__(self, pool: Pool, transitions: BlockTransitions, rebuilds: Rebuilds) -> None:
        self._pool, self._transitions, self.rebuilds = pool, transitions, rebuilds
        self.drawing: list[int] = []  # environments whose workers draw from unsaved generators

    def save(self, env_ids: Sequence[int]) -> dict[int, EnvState]:
        """The states of environments; raises `TypeError` if one of them cannot be pickled."""
        results = self._pool.execute_in(Message.SAVE, env_ids)
        for env_id in env_ids:
            if isinstance(results[env_id], Refusal):
                raise TypeError(
                    f"environment {env_id} (worker {self._pool.slots[env_id].worker}): {results[env_id].text}. What to "
                    "do: leave that out in __getstate__ and make it again in __setstate__, or give the simulator "
                    "methods get_state() and set_state(state) that save and load everything"
                )
        self.drawing = [env_id for env_id in env_ids if results[env_id].draws]
        return {env_id: self._state(self._pool.slots[env_id], results[env_id]) for env_id in env_ids}

    def _state(self, slot: Slot, saved: Saved) -> EnvState:
        env_id, transitions = slot.env_id, self._transitions
        extensions = self._pool.saved_by_extensions(slot)
        acting, alive, over = (
            [*transitions.acting_in(env_id)],
            [*transitions.alive_in(env_id)],
            transitions.is_over(env_id),
        )
        masks, unreported = transitions.masks(env_id), _unreported(extensions)
        pickled = self._pool.replaced.get(env_id)
        if unreported is not None:  # an unreported restart: the record may belong to the new environment
            observations, flags = unreported.transition.observations, {ALL: False}
            before = Transition(observations, {}, flags, {**flags}, {}, alive, acting, events={}, masks=masks)
            result = Snapshot(before, over)
            transition = _in_record(unreported.next_result or result)
        elif pickled is not None:  # the record may be partially written
            result = loads(pickled)
            received = result.transition._replace(acting=acting, alive=alive, masks=masks)
            result = result._replace(transition=received, over=over)
            transition = _in_record(result)
        else:
            leftovers = self._pool.latest.get(env_id) if transitions.records.has_leftovers(env_id) else None
            transition = transitions.transition(env_id, None if leftovers is None else loads(leftovers))
            result = Snapshot(transition._replace(acting=acting, alive=alive, masks=masks), over)
        is_replaced = unreported is not None or pickled is not None
        sums = transitions.statistics.save(env_id)
        return EnvState(
            transitions.mode.name, [*transitions.possible_agents_of(env_id)],
            saved, transition, result, is_replaced, sums, extensions,
            self.rebuilds.base_seed, None, (None, None), {},
        )  # fmt: skip

    def check(self, states: Mapping[int, EnvState], facades: Collection[str] | None = None) -> None:
        """Raise `ValueError` for states of environments with other settings or agents, or with unknown parts.

        `facades` are the keys of all facades that may have added values; None if these values are not needed.
        """
        construction = self.rebuilds.construction
        for env_id, state in states.items():
            if unknown := sorted(state.extensions.keys() - _EXTENSIONS):
                raise ValueError(
                    f"environment {env_id}: its state has the part {unknown[0]!r}, which this release of marl_parallel "
                    "does not know: load it with the release that saved it"
                )
            added = [key for key, value in state.facade.items() if value is not None]
            if facades is not None and (unknown := [key for key in added if key not in facades]):
                raise ValueError(
                    f"environment {env_id}: its state has values of the facade {unknown[0]!r}, which is unknown here: "
                    f"set saved_as = {unknown[0]!r} in the class of that facade if it has been renamed, or load the "
                    "state with ParallelEnv.load_state, which leaves these values out"
                )
            mode = self._transitions.mode.name
            if state.mode != mode:
                raise ValueError(
                    f"environment {env_id}: its state was saved with auto_reset={state.mode!r}, and cannot be loaded "
                    f"with auto_reset={mode!r}"
                )
            agents = [*self._transitions.possible_agents_of(env_id)]
            if {*state.agents} != {*agents}:
                raise ValueError(
                    f"environment {env_id}: its state has the agents {state.agents}, but the environment here has "
                    f"{agents}"
                )
            if state.saved.isolated and not construction.isolate_rng:
                raise ValueError(
                    f"environment {env_id}: its state was saved with isolate_rng=True: pass isolate_rng=True here, too"
                )
            if _unreported(state.extensions) is not None and not construction.restarts:
                raise ValueError(
                    f"environment {env_id}: its state includes a restart that has not been reported yet, which needs "
                    'on_error="restart": pass it here, too'
                )
            has_derived_seeds = Histories.saved_as in state.extensions
            if has_derived_seeds != construction.derived_seeds:
                how = "with" if has_derived_seeds else "without"
                raise ValueError(
                    f"environment {env_id}: its state was saved {how} replay=, which decides about the seeds of later "
                    f"episodes: construct this ParallelEnv {how} it, too"
                )

    def load(self, states: Mapping[int, EnvState]) -> tuple[dict[int, Snapshot], ParallelEnvError | None]:
        """Replace the present environments by saved ones.

        Returns:
            By environment, the result that its caller had received; and the error of a fault in the replacement: its
            environments have been rebuilt, and are missing in the results.

        Raises:
            TypeError, ValueError: A state cannot be loaded; nothing has changed.
            ParallelEnvError: A fault before the replacement.
        """
        pool = self._pool
        states = {env_id: self._in_order(env_id, state) for env_id, state in states.items()}
        payload = {env_id: self._payload(env_id, state) for env_id, state in states.items()}
        try:
            refused = pool.execute_in(Message.CONSTRUCT, states, payload)
        except ParallelEnvError:
            if not pool.closed:
                pool.execute_in(Message.TAKE_OVER, states, False)
            raise
        if refused:
            pool.execute_in(Message.TAKE_OVER, states, False)
            env_id, refusal = next(iter(refused.items()))
            kind = TypeError if refusal.kind is ModuleNotFoundError else refusal.kind
            raise kind(f"environment {env_id} (worker {pool.slots[env_id].worker}): {refusal.text}")
        placed: tuple[dict[int, Snapshot], ParallelEnvError | None] = pool.in_call("", self._put_in_place, states)
        return placed

    def _in_order(self, env_id: int, state: EnvState) -> EnvState:
        """The state with agents in the order that they have here."""
        agents = [*self._transitions.possible_agents_of(env_id)]
        if state.agents == agents:
            return state
        result = state.result._replace(transition=ordered(state.result.transition, agents))
        return state._replace(transition=ordered(state.transition, agents), result=result)

    def _put_in_place(self, states: Mapping[int, EnvState]) -> tuple[dict[int, Snapshot], ParallelEnvError | None]:
        """The last part of `load`; if it is interrupted, everything is closed."""
        before, fault = {env_id: self.rebuilds.restarts(env_id) for env_id in states}, None
        try:
            self._pool.execute_in(Message.TAKE_OVER, states, True)
        except ParallelEnvError as error:
            if self._pool.closed:
                raise
            fault = error
        placed = {env_id: state for env_id, state in states.items() if self.rebuilds.restarts(env_id) == before[env_id]}
        for env_id, state in placed.items():
            self._take_over(self._pool.slots[env_id], state)
        try:
            return {env_id: state.result for env_id, state in placed.items()}, fault
        finally:
            del fault  # as `Pool.fault` says

    def outdate(self, env_ids: Sequence[int]) -> None:
        """Let environments that will replace others be constructed anew."""
        self._pool.in_call("", self.rebuilds.outdate, env_ids)

    def _payload(self, env_id: int, state: EnvState) -> Construct:
        seed, rebuilds = state.saved.built
        new = self.rebuilds.request(env_id, rebuilds, Begins.BESIDE)
        construction = new.construction._replace(seeds={env_id: seed})
        if not (state.saved.needs_constructor or state.saved.needs_arrays):
            construction = construction._replace(constructors={}, adapter=None)
        options = state.extensions[Rebuilds.saved_as][3]
        return new._replace(construction=construction, keywords=None, options=options, saved=state.saved)

    def _take_over(self, slot: Slot, state: EnvState) -> None:
        env_id, pool = slot.env_id, self._pool
        self._transitions.mark_constructed((env_id,))  # the state of the present one does not count
        leftovers = self._transitions.put(env_id, state.transition)
        pool.latest.pop(env_id, None)
        pool.replaced.pop(env_id, None)
        if leftovers is not None:
            pool.latest[env_id] = dump_leftovers(leftovers)
        if state.is_replaced:
            pool.replaced[env_id] = dumps(state.result)
        slot.note(Event.REPLACED)
        self._transitions.begin((env_id,))
        self._transitions.statistics.load(env_id, state.statistics)
        pool.load_extensions(slot, state.extensions)


def _unreported(extensions: Mapping[str, Any]) -> Any:
    """The restart that has not been reported to the caller yet; None without one."""
    return getattr(extensions.get(Restarts.saved_as), "fault", None)


def _in_record(result: Snapshot) -> Transition:
    """The transition of a result as the record has it, which may belong to a new environment."""
    transition = result.transition
    return Transition(*dicts_of(transition), transition.alive, transition.acting, events={**(transition.events or {})})
