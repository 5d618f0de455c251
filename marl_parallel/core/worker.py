"""A worker: executes requests on its environments. The same object in a process, in a thread, or in line.

It knows nothing of how requests come and replies go, nor what a transition means; it holds one `Episode` for each
environment, catches whatever a simulator throws, and says so in its reply.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from types import TracebackType
from typing import Any

import numpy as np

from marl_parallel.adapters import InvalidAgents, LookupFailed, Misfit, NotAnEnvironment, Schema, adapt
from marl_parallel.adapters import attributes as lookup
from marl_parallel.core import tracing
from marl_parallel.core.columns import Layout
from marl_parallel.core.construction import call_constructor
from marl_parallel.core.episode import Episode
from marl_parallel.core.exclusive import end_forked_copy
from marl_parallel.core.ledger import Activity, Ledger
from marl_parallel.core.messages import STEPPED, Failure, Message, Reply, Request
from marl_parallel.core.payloads import Answer, Built, Plan, Rebuild, Rebuilt, Refusal
from marl_parallel.core.pickling import dump_extras, dumps, install_registrations, loads
from marl_parallel.core.records import ActionRecords, TransitionRecords
from marl_parallel.core.schema import common_schema, dumps_compactly
from marl_parallel.core.sharing import span_of
from marl_parallel.core.spaces import DoesNotFit, as_array
from marl_parallel.core.transition import Transition


class Worker:
    """Executes requests, one after the other.

    Args:
        ledger: Where it notes what it is doing.
        attach: Gives the memory of the block once it is told that there is one, and what lies in it.
        own_process: Whether it may seed the process-wide generators before each constructor.
        in_line: Whether it runs in the caller's own thread, where a KeyboardInterrupt is the caller's.
    """

    def __init__(
        self,
        ledger: Ledger,
        attach: Callable[[Layout], Any],
        *,
        own_process: bool = False,
        in_line: bool = False,
    ) -> None:
        self._ledger, self._attach = ledger, attach
        self._own_process, self._in_line = own_process, in_line
        self._pid = os.getpid()
        self._episodes: dict[int, Episode] = {}
        self._seeds: dict[int, int] = {}
        self._share: range | None = None
        self._layout: Layout | None = None
        self._restarts = False
        self._registrations = b""  # those that have been installed
        self._kept: dict[int, bytes] = {}
        self._torn: set[int] = set()  # whose record does not hold what they said last
        self._send: Callable[[Reply], None]
        self._actions: ActionRecords
        self._transitions: TransitionRecords

    def execute(self, request: Request, send: Callable[[Reply], None]) -> None:
        """Carry out a request in each environment it names; what one of them raises does not stop the others.

        Args:
            request: What to do.
            send: Gets the reply, or the replies as they come where each environment is to have its own.
        """
        message, env_ids, payload, each, prompt = request
        self._send = send
        in_turn = [(env_id,) for env_id in env_ids] if each and env_ids is not None else (env_ids,)
        for place, ids in enumerate(in_turn, 1):
            if message is not Message.CLOSE and self._ledger.discarded:
                return  # nobody waits for it any more
            self._execute(message, ids, payload, send, place == len(in_turn), prompt)

    def _execute(
        self,
        message: Message,
        env_ids: Sequence[int] | None,
        payload: Any,
        send: Callable[[Reply], None],
        last: bool,
        prompt: bool,
    ) -> None:
        self._ledger.take_up()
        handler: Callable[[Worker, int, Any], Any] = _HANDLERS[message]
        payloads: Iterable[Any] = repeat(payload)
        if message is Message.STEP and payload is None:  # nothing but what is in the block
            handler, payloads = Worker._advance, self._all_actions(env_ids)
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        for env_id, own in zip(self._seeds if env_ids is None else env_ids, payloads):
            try:
                result = handler(self, env_id, own)
                if result is not None:
                    results[env_id] = result
            except BaseException as error:  # SystemExit is a simulator's failure too, not the worker's end
                self._check_not_forked(error)
                if self._in_line and isinstance(error, KeyboardInterrupt):
                    raise
                failures[env_id] = _failure(error, self._ledger.latest or message, torn=env_id in self._torn)
                self._torn.discard(env_id)
                if (kept := self._kept.pop(env_id, None)) is not None:
                    results[env_id] = kept
            if prompt and (results or failures):
                self._check_not_forked()
                send(Reply(_kind(failures), message, (env_id,), results, failures, time.monotonic(), last=False))
                results, failures = {}, {}
        moment = self._ledger.lay_down()
        self._check_not_forked()
        if message is Message.CLOSE and (slices := tracing.end(self._ledger)) is not None:
            results[tracing.LAST_WORDS] = slices
        if env_ids is None and message is Message.STEP and not results and not failures:
            send(STEPPED)
        else:
            send(Reply(_kind(failures), message, env_ids, results, failures, moment, last))

    def _check_not_forked(self, error: BaseException | None = None) -> None:
        """End this process where it is a forked copy of the worker that the ledger has not caught.

        That is one forked while values of the simulator were pickled or converted, or forked by native code.
        """
        if os.getpid() != self._pid:
            end_forked_copy(error)

    # -- one handler for each request; each takes an environment's id and the payload ----------------------------------

    def _build(self, env_id: int, plan: Plan) -> Built | Refusal:
        seed = self._seeds[env_id] = plan.seeds[env_id]
        with self._ledger.during(env_id, Activity.CONSTRUCTOR):
            if self._own_process:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                if plan.registrations != self._registrations:
                    self._registrations = plan.registrations
                    install_registrations(plan.registrations)
            try:
                constructor, how_adapted = loads(plan.constructors[env_id]), loads(plan.adapter)
            except ModuleNotFoundError as error:
                return Refusal(ModuleNotFoundError, error.name or str(error))
            restarts = (plan.counts or {}).get(env_id, 0)
            simulator, seeded, is_open = call_constructor(constructor, seed=seed, env_id=env_id, restarts=restarts)
            try:
                env = adapt(simulator, how_adapted)
            except BaseException as error:
                _try_to_close(simulator)
                if isinstance(error, NotAnEnvironment):
                    return Refusal(TypeError, str(error))
                if isinstance(error, InvalidAgents):
                    return Refusal(ValueError, str(error))
                raise
        if plan.traced:
            tracing.begin(self._ledger)
        self._episodes[env_id] = Episode(env, env_id, plan.mode, self._ledger)
        self._share = span_of([*self._seeds])
        self._restarts = plan.restarts
        return Built(dumps_compactly(Schema.of(env)), seeded, is_open, lookup.declared_seed(env.source))

    def _lay_out(self, env_id: int, payload: tuple[int, bool]) -> None:
        if self._layout is not None:
            return  # one block for all environments
        num_records, arrays = payload
        layout = Layout(Schema.of(self._episodes[env_id].env), num_records, arrays=arrays)
        buffer = self._attach(layout)
        layout.bind(buffer)
        self._actions = ActionRecords(layout, buffer)
        self._transitions = TransitionRecords(layout, buffer)
        self._layout = layout

    def _rebuild(self, env_id: int, payload: Mapping[int, Rebuild]) -> Rebuilt | Refusal:
        plan, block, reset, asked = payload[env_id]
        old = self._episodes.pop(env_id, None)
        if old is not None:
            # What a broken simulator raises when it is closed would only hide what broke it.
            with contextlib.suppress(BaseException), self._ledger.during(env_id, Activity.CLOSE):
                old.env.close()
        built = self._build(env_id, plan)
        if isinstance(built, Refusal):
            return built
        try:  # before the block is laid out as this one would have it: the others' records are there, too
            if built.description != plan.described:  # else the same bytes: nothing has to be compared
                common_schema([loads(plan.described), loads(built.description)])
        except ValueError as error:
            return Refusal(ValueError, f"the environment that was built anew is another: {error}")
        self._lay_out(env_id, block)
        episode = self._episodes[env_id]
        keywords = {} if asked is None else loads(asked)
        keywords = self._passed(env_id, {**keywords, "seed": plan.seeds[env_id]})
        if not reset:
            episode.put_off(keywords)
            return Rebuilt(None)
        more = self._transitions.write(env_id, episode.reset(keywords))
        return Rebuilt(None if more is None else dump_extras(more))

    def _seed(self, env_id: int, _: Any) -> int:
        declared = lookup.declared_seed(self._episodes[env_id].env.source)
        return self._seeds[env_id] if declared is None else declared

    def _reset(self, env_id: int, payload: Mapping[int, bytes]) -> bytes | None:
        keywords = loads(payload[env_id])
        if keywords.get("seed") is not None:
            self._seeds[env_id] = keywords["seed"]
        more = self._transitions.write(env_id, self._episodes[env_id].reset(self._passed(env_id, keywords)))
        return None if more is None else dump_extras(more)

    def _passed(self, env_id: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a reset's keywords that the simulator takes."""
        taken = self._episodes[env_id].env.reset_keywords
        return {name: value for name, value in keywords.items() if name in taken}

    def _step(self, env_id: int, payload: Mapping[int, bytes]) -> bytes | None:
        extras = loads(payload[env_id]) if env_id in payload else None
        return self._advance(env_id, self._actions.read(env_id, extras))

    def _advance(self, env_id: int, actions: dict[Any, Any]) -> bytes | None:
        episode = self._episodes[env_id]
        transition, last = episode.step(actions), None
        try:
            if episode.ended_for_now:
                if self._restarts:
                    self._keep(env_id, transition)
                    last = transition
                transition = episode.begin_anew(transition)
            more = self._transitions.write(env_id, transition)
            return None if more is None else dump_extras(more)
        except BaseException:
            # The record may be half written.
            if last is None:
                self._torn.add(env_id)
            else:
                self._transitions.write(env_id, last)
            raise

    def _keep(self, env_id: int, transition: Transition) -> None:
        """Tell what the last step of an episode was, should the reset that follows it fail."""
        self._kept.pop(env_id, None)
        more = self._transitions.write(env_id, transition)
        if more is not None:
            kept = self._kept[env_id] = dump_extras(more)
            if self._own_process:  # which may die of it; of no environment: it is not done yet
                self._send(Reply(Message.RESULT, Message.STEP, (), {env_id: kept}, {}, time.monotonic(), last=False))

    def _all_actions(self, env_ids: Sequence[int] | None) -> list[dict[Any, Any]]:
        span = self._share if env_ids is None else span_of(env_ids)
        if span is not None and len(span) > 1:
            return self._actions.read_span(span)
        return [self._actions.read(env_id, None) for env_id in (self._seeds if env_ids is None else env_ids)]

    def _state(self, env_id: int, _: Any) -> bytes | None:
        self._episodes[env_id].begin_early()
        with self._ledger.during(env_id, Activity.STATE):
            state = self._episodes[env_id].env.state()
        assert self._layout is not None
        column, space = self._layout.state, self._layout.schema.state_space
        try:
            if column is not None:
                column.write(env_id, 0, state)
                return None
        except DoesNotFit as error:
            raise TypeError(f"state() returned {state!r}") from error
        assert space is not None
        assert space.shape is not None
        return dumps(as_array(state, np.dtype(space.dtype), space.shape))

    def _render(self, env_id: int, _: Any) -> bytes:
        self._episodes[env_id].begin_early()
        with self._ledger.during(env_id, Activity.RENDER):
            return dumps(self._episodes[env_id].env.render())

    def _call(self, env_id: int, payload: bytes) -> Answer | Refusal:
        given = _sent(payload)
        if isinstance(given, Refusal):
            return given
        name, args, kwargs = given
        source = self._episodes[env_id].env.source
        with self._ledger.during(env_id, Activity.CALL):
            try:
                member = functools.partial(name, source) if callable(name) else lookup.find(source, name)
            except AttributeError as error:
                return Refusal(AttributeError, str(error))
            if (args or kwargs) and not callable(member):
                kind = type(member).__name__
                return Refusal(TypeError, f"{name!r} takes no arguments: it is no method, its type is {kind}")
            result = member(*args, **kwargs) if callable(member) else member
        try:
            pickled = dumps(result)
            loads(pickled)  # some things pickle, but cannot be made again from it
        except Exception as error:
            return Refusal(TypeError, f"the result of {name!r} cannot be pickled: {error}")
        return Answer(pickled)

    def _assign(self, env_id: int, payload: Mapping[int, bytes]) -> Refusal | None:
        given = _sent(payload[env_id])
        if isinstance(given, Refusal):
            return given
        name, value = given
        with self._ledger.during(env_id, Activity.CALL):
            try:
                lookup.assign(self._episodes[env_id].env.source, name, value)
            except AttributeError as error:
                return Refusal(AttributeError, str(error))
        return None

    def _trace(self, env_id: int, on: bool) -> Any:
        """Of the whole worker, whichever environment is named."""
        return tracing.begin(self._ledger) if on else tracing.end(self._ledger)

    def _close(self, env_id: int, _: Any) -> None:
        episode = self._episodes.get(env_id)
        if episode is not None:
            with self._ledger.during(env_id, Activity.CLOSE):
                episode.env.close()


_HANDLERS: dict[Message, Callable[[Worker, int, Any], Any]] = {
    Message.ACCESS: Worker._build,
    Message.ATTACH: Worker._lay_out,
    Message.SEED: Worker._seed,
    Message.RESET: Worker._reset,
    Message.STEP: Worker._step,
    Message.STATE: Worker._state,
    Message.RENDER: Worker._render,
    Message.CALL: Worker._call,
    Message.ASSIGN: Worker._assign,
    Message.CLOSE: Worker._close,
    Message.REBUILD: Worker._rebuild,
    Message.TRACE: Worker._trace,
}


def _kind(failures: Mapping[int, Failure]) -> Message:
    return Message.EXCEPTION if failures else Message.RESULT


def _sent(payload: bytes) -> Any:
    """What the caller wants an environment to have; a refusal where it cannot be made again from its pickle."""
    try:
        return loads(payload)
    except ModuleNotFoundError as error:
        return Refusal(ModuleNotFoundError, error.name or str(error))
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        return Refusal(TypeError, f"what was sent pickles, but cannot be made again from that: {text}")


def _try_to_close(thing: Any) -> None:
    """Let go of what could not be adapted, whatever it is; its own errors would hide why it could not."""
    if not isinstance(thing, type):
        with contextlib.suppress(Exception):
            thing.close()


def _failure(error: BaseException, doing: Activity | Message, *, torn: bool) -> Failure:
    method, to_do = doing.name.lower(), ""
    if isinstance(error, Misfit):
        to_do = "see which adapter= fits the simulator, or change the simulator; a restart would not help"
    if isinstance(error, LookupFailed) and error.__cause__ is not None:
        method, error = error.method, error.__cause__
        to_do = f"let {method} give a space as soon as the simulator is constructed"
    error.__traceback__ = _below_this_package(error.__traceback__)
    lines = traceback.format_exception(error)
    try:
        exception = dumps(error)
        loads(exception)  # some exceptions pickle, but cannot be made again from it
    except Exception:
        exception = None
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failure(method, summary, "".join(lines), exception, torn, to_do)


def _below_this_package(trace: TracebackType | None) -> TracebackType | None:
    """Leave out our own frames above the simulator's; all of them stay where there are no others."""
    below = trace
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith("marl_parallel."):
        below = below.tb_next
    return below or trace
