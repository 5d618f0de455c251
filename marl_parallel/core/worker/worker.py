"""`Worker`: carries out requests on its environments, in a process, in a thread, or in the caller's thread.

How a step goes::

    Request(STEP) -> execute -> _carry_out -> send(STEPPED), or a Reply with pickled leftovers and failures
                                  |
                                  | Codec.run: reads actions, steps, writes numeric transitions
                                  v  for each environment where it stops, and for all if there is no compiled code:
                                _step         EnvRunner.step
                                _go_on        or EnvRunner.interpret, if the simulator has been stepped already
                                _advance      begin_next if the episode has ended, TransitionRecords.write;
                                              returns leftovers, pickled

`_carry_out` catches all exceptions of a simulator and sends them as a `Failure`; the other environments go on. A crash
ends the process: the `WorkerStatus`, which `EnvRunner` writes, shows the parent what was running. The backend
transports requests and replies; `env_runner.py` decides what a transition means.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import (
    InvalidAgents,
    LookupFailed,
    MultiAgentEnv,
    NotAnEnvironment,
    Schema,
    adapt,
)
from marl_parallel.adapters import attributes as lookup
from marl_parallel.adapters.protocol import OfAdapter
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import JointColumn, Layout, MaskColumns, RolloutBuffer
from marl_parallel.core.block.records import ActionRecords, TransitionRecords, conformed, dump_leftovers, infos_alone
from marl_parallel.core.messages import (
    SEEDS_GENERATORS,
    STEPPED,
    Answer,
    Begins,
    BlockSettings,
    Built,
    Construct,
    Construction,
    Failure,
    Message,
    Outputs,
    Pickled,
    Refusal,
    Reply,
    Request,
    Saved,
    Seeding,
    answer,
    name_of,
)
from marl_parallel.core.objects import array_file
from marl_parallel.core.objects.array_file import ConstructorArrays
from marl_parallel.core.objects.pickling import apart, dumps, install_registrations, loads
from marl_parallel.core.objects.script_generators import ScriptCopies, SeedSource, receive_copies, receiving
from marl_parallel.core.objects.script_names import install_namespaces
from marl_parallel.core.objects.sharing import CannotBeShared
from marl_parallel.core.reports.advice import advice, only_once, summary
from marl_parallel.core.schema import check_pickled_agents, difference, dumps_compactly
from marl_parallel.core.transition import Transition
from marl_parallel.core.worker import preloading
from marl_parallel.core.worker.caller_settings import WorkerSettings
from marl_parallel.core.worker.constructors import call_constructor
from marl_parallel.core.worker.env_runner import EnvRunner
from marl_parallel.core.worker.forks import end_forked_copy
from marl_parallel.core.worker.generators import (
    GeneratorStates,
    Seeds,
    current_states,
    fingerprints,
    restore_states,
    seed_generators,
    seeding_new_torch,
)
from marl_parallel.core.worker.loading import Loading
from marl_parallel.core.worker.neighbours import Neighbours
from marl_parallel.core.worker.saved_simulator import (
    CannotBeLoaded,
    CannotBeSaved,
    Loaded,
    SavedSimulator,
    close_quietly,
    dump_simulator,
    load_simulator,
)
from marl_parallel.core.worker_status import SLICES, Activity, WorkerStatus, is_traced, trace

_AS_SAVED = (
    " What to do: construct the ParallelEnv as when the state was saved, with the same releases of the simulator's "
    "libraries"
)


class Worker:
    """Carries out requests one after another.

    Args:
        status: The status that the worker writes.
        attach: Returns the memory of the block for a layout.
        own_process: Whether the worker has its own process, and so seeds process-wide generators for each constructor.
        in_line: Whether the worker runs in the caller's own thread, where a KeyboardInterrupt belongs to the caller.
        arrays: Returns the descriptor of `Backend.array_file`, if the backend has one.
        moment: The time for compiled code, a float64 array of one number; None for `time.monotonic`. Required if the
            status has another clock.
        neighbours: The environments of all workers in this process; None if there is only this worker.
    """

    def __init__(
        self,
        status: WorkerStatus,
        attach: Callable[[Layout], Any],
        *,
        own_process: bool = False,
        in_line: bool = False,
        arrays: Callable[[], int] = lambda: -1,
        moment: NDArray[np.float64] | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._neighbours = neighbours or Neighbours(own_process=own_process)
        self._status, self._open_block, self._arrays = status, attach, arrays
        self._own_process, self._in_line, self._moment = own_process, in_line, moment
        self._loading = Loading(status, own_process)
        self._pid = os.getpid()
        self._runners: dict[int, EnvRunner] = {}
        self._seeds: dict[int, int | None] = {}
        self._all: tuple[int, ...] = ()  # all environments of the worker
        self._layout: Layout | None = None
        self._restarts = False
        self._generators: GeneratorStates | None = None  # if each environment has states of its own
        self._copies = ScriptCopies()  # of the script's generators, which each environment has states of
        self._has_generators = False  # whether the process-wide generators have been seeded here
        self._registrations = b""  # the installed ones
        self._namespaces = hash(b"")  # of what has been installed, which may be large
        self._fingerprints: dict[str, int] = {}  # of generators that environments share, after the last constructor
        self._draws = False  # whether environments have drawn from shared generators since
        self._built: dict[int, tuple[int | None, int]] = {}  # as of `Saved`
        self._arrays_of: dict[int, ConstructorArrays] = {}
        self._checksums: dict[tuple[int, int], int] = {}  # of `ConstructorArrays`
        self._loaded: dict[int, _Beside] = {}  # environments that were made from bytes, and have not taken over
        self._closed: set[int] = set()  # present environments that are closed already, before loaded ones replace them
        self._saved: dict[int, bytes] = {}  # leftovers of steps whose automatic reset or state has not ended yet
        self.outputs = Outputs()  # what each reset and step writes besides the transitions
        self.settings = WorkerSettings(own_process)
        self._rollout: RolloutBuffer | None = None
        self._mask_columns: list[MaskColumns] = []  # of the block, if it has masks
        self._joint_columns: list[JointColumn] = []  # of the block, if it has `JOINT` actions
        self._send: Callable[[Reply], None]
        self._codec: Any = None
        self._actions: ActionRecords
        self._transitions: TransitionRecords

    def simulators(self) -> dict[int, Any]:
        """By environment, the object that its constructor has returned."""
        return {env_id: runner.env.source for env_id, runner in self._runners.items()}

    def execute(self, request: Request, send: Callable[[Reply], None]) -> None:
        """Carry out a request in its environments, and `send` one reply, or one for each environment."""
        self._send, env_ids = send, request.env_ids
        parts = [(env_id,) for env_id in env_ids] if request.each and env_ids is not None else (env_ids,)
        try:
            for number, ids in enumerate(parts, 1):
                if request.message is not Message.CLOSE and self._status.discarded:
                    return  # everything is being closed: no caller receives the results
                self._carry_out(request, ids, last=number == len(parts))
        finally:
            if self._in_line and self._generators is not None:
                self._generators.switch(None)

    def _carry_out(self, request: Request, env_ids: Sequence[int] | None, *, last: bool) -> None:
        message, _, payload, each, settings = request
        self._status.begin_request()
        self._exchange_new_copies()
        if settings is not None and not self._in_line:
            self.settings.apply(settings)
        elif message is not Message.STEP:
            self.settings.look_again()
        # Leftovers and failures are sent before the one reply for all, so that a crash does not lose them.
        prompt = self._restarts and not each and (message is Message.STEP or message is Message.RESET)
        ids = self._all if env_ids is None else tuple(env_ids)
        handler: Callable[[int, Any], Any] = getattr(self, f"_{message.name.lower()}")
        # All actions are in the block. A trace stores each step, which compiled code does not.
        codec = self._codec if message is Message.STEP and payload is None and not is_traced(self._status) else None
        after = self._output_state if self.outputs.states else None
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        index = 0
        while index < len(ids):
            try:
                if self._generators is not None:
                    self._generators.switch(ids[index])
                if codec is None:
                    result = handler(ids[index], payload)
                else:
                    # Environments with their own generators are stepped one by one.
                    until = len(ids) if self._generators is None else index + 1
                    rest = codec.run(ids[:until], index, self._runners, *self._status.for_codec, after)
                    if rest is None:
                        index = until
                        continue
                    self._check_not_forked()
                    index, where, value = rest
                    result = self._go_on(ids[index], where, value)
                if result is not None:
                    results[ids[index]] = result
            except Refusal as refusal:
                # A new one: this one refers to the frames of this call, which refer to the results.
                results[ids[index]] = Refusal(refusal.kind, refusal.text)
            except BaseException as error:  # SystemExit is a simulator's failure too, not the worker's end
                self._check_not_forked(error)
                if self._in_line and isinstance(error, KeyboardInterrupt):
                    if codec is not None:
                        self._status.add_steps(*codec.sums())
                    raise
                index = index if codec is None else codec.place
                env_id = ids[index]
                begins = message is Message.TAKE_OVER and payload is None
                doing = self._status.latest_of(env_id) or (Activity.RESET if begins else message)
                failure = _failure(error, doing, self._own_process)
                if doing is Activity.CONSTRUCTOR:
                    if self._neighbours.others(env_id):
                        failure = failure._replace(or_else=only_once(own_process=self._own_process))
                    self._neighbours.forget(env_id)
                failures[env_id] = failure
                if env_id in self._saved:
                    results[env_id] = self._saved.pop(env_id)
            if prompt and (results or failures):
                self._check_not_forked()
                self._send(answer(message, (ids[index],), results, failures, self._status.clock(), last=False))
                results, failures = {}, {}
            index += 1
        if codec is not None:
            self._status.add_steps(*codec.sums())
        if self._rollout is not None and (message is Message.STEP or message is Message.RESET):
            self._rollout.write(ids)
        moment = self._status.end_request()
        self._check_not_forked()
        if message is Message.CLOSE and (slices := trace(self._status, on=False)) is not None:
            results[SLICES] = slices
        if env_ids is None and message is Message.STEP and not results and not failures:
            self._send(STEPPED)
        else:
            self._send(answer(message, env_ids, results, failures, moment, last=last))

    def _check_not_forked(self, error: BaseException | None = None) -> None:
        """End this process if it was forked from the worker while values were pickled, or by native code."""
        if os.getpid() != self._pid:
            end_forked_copy(error)

    # -- a handler for each `Message`, by its name: environment id and payload in, result out ------------------------

    def _access(self, env_id: int, construction: Construction) -> Built:
        seed = self._seeds[env_id] = construction.seeds[env_id]
        if self._generators is None:
            self._generators = self._new_generators(construction)
        before = self._neighbours.begin(env_id)
        try:
            env, seeding, self._arrays_of[env_id] = self._new_env(env_id, construction)
            self._exchange_new_copies()
            in_common = self._neighbours.add(env_id, env, before)
        except Refusal:
            self._neighbours.forget(env_id)
            raise
        if self._own_process:
            self.settings.look_again()
        if construction.traced != is_traced(self._status):  # in a standby, a trace may have begun or ended
            trace(self._status, construction.traced)
        self._built[env_id] = seed, construction.rebuilds
        self._runners[env_id] = self._new_runner(env_id, env, construction)
        self._all = tuple(sorted(self._seeds))  # sorted, in whatever order they were constructed
        self._restarts = construction.restarts
        description, declared = dumps_compactly(Schema.of(env)), lookup.declared_seed(env.source)
        return Built(description, seeding, declared, in_common)

    def _new_generators(self, construction: Construction) -> GeneratorStates | None:
        """Generators that each environment has states of; None if there are none."""
        originals = construction.generators
        has_shared = self._own_process and originals is not None and originals.has_shared
        if not construction.isolate_rng and not has_shared:
            return None
        if not self._own_process and originals is not None:
            self._copies.adopt(originals)
        return GeneratorStates(construction.isolate_rng, self._copies)

    def _exchange_new_copies(self) -> None:
        """Give each environment states of the script's generators, once one has looked up a generator by its name."""
        if self._generators is None and self._copies:
            self._generators = GeneratorStates(False, self._copies)

    def _new_runner(self, env_id: int, env: MultiAgentEnv, construction: Construction) -> EnvRunner:
        seed = construction.seeds[env_id]
        derives_from = (seed, 0) if construction.derived_seeds and seed is not None else None
        runner = EnvRunner(
            env, env_id, construction.mode, self._status, derives_from,
            generators=self._generators if construction.derived_seeds else None,
            # Without this worker: it has the episode, and only the garbage collector would free both.
            after_step=functools.partial(_write_masks, self._mask_columns, env_id, env) if env.mask_spaces else None,
            joint=functools.partial(_read_joint, self._joint_columns, env_id) if env.joint_actions else None,
        )  # fmt: skip
        if self._layout is not None:
            runner.use_records_of(self._layout.schema.possible_agents)
        return runner

    def _new_env(self, env_id: int, construction: Construction) -> tuple[MultiAgentEnv, Seeding, ConstructorArrays]:
        """A new environment, how its seed reached it, and the large arrays of its constructor."""
        seed = construction.seeds[env_id]
        arrays = self._new_arrays(construction.constructors[env_id])
        if self._own_process and construction.generators is not None:
            receive_copies(self._copies)
        (self._generators or self._copies).begin(
            env_id, SeedSource(seed, env_id, construction.rebuilds, construction.made)
        )
        seeds = self._generators_seeds(env_id, construction)
        self._update_draws()
        self._loading.restart()
        with (
            self._status.during(env_id, Activity.CONSTRUCTOR),
            self._loading.watching(),
            seeding_new_torch(None if seeds is None else seeds.torch),
        ):
            if seeds is not None:
                seed_generators(seeds)  # modules imported now may also draw
            with self._loading.loading():
                # First, as all other pickles may look up names of the script.
                if self._own_process and hash(construction.namespaces) != self._namespaces:
                    self._namespaces = hash(construction.namespaces)
                    install_namespaces(construction.namespaces)
                if construction.settings and not self._in_line:
                    self.settings.apply(construction.settings)
                if self._own_process and construction.preload:  # what the modules set stays
                    preloading.import_modules(construction.preload)
                    if seeds is not None:
                        preloading.seed_generators_once(seeds.python)
                        seed_generators(seeds)  # a forked worker did not draw in the import
                if self._own_process and construction.registrations != self._registrations:
                    self._registrations = construction.registrations
                    install_registrations(construction.registrations)
                with receiving(construction.generators):
                    constructor = _received(construction.constructors[env_id], self._arrays(), "constructor", arrays)
                    how_adapted = _received(construction.adapter, self._arrays(), "adapter")
            if seeds is not None and (seed is not None or construction.isolate_rng):
                seed_generators(seeds)
            keywords = {"seed": seed, "env_id": env_id, "restarts": construction.rebuilds}
            simulator, seeding = call_constructor(constructor, keywords)
            try:
                env = adapt(simulator, how_adapted)
                check_pickled_agents(env.possible_agents or env.observation_spaces, lookup.type_name(simulator))
            except BaseException as error:
                if not isinstance(simulator, type):
                    with contextlib.suppress(Exception):  # its error would hide why the adapter failed
                        lookup.close(simulator)
                if isinstance(error, NotAnEnvironment | InvalidAgents):
                    raise Refusal(TypeError if isinstance(error, TypeError) else ValueError, str(error)) from None
                raise
        if self._own_process and not construction.isolate_rng:
            self._fingerprints = fingerprints()
        return env, seeding, arrays

    def _new_arrays(self, constructor: Any) -> ConstructorArrays:
        spans = constructor.spans if isinstance(constructor, Pickled) else ()
        return ConstructorArrays(self._arrays, spans, self._checksums)

    def _update_draws(self) -> None:
        """Find out whether the process-wide generators have been drawn from since the last constructor."""
        if not self._draws and self._fingerprints:
            now = fingerprints()
            self._draws = any(now[name] != before for name, before in self._fingerprints.items())

    def _generators_seeds(self, env_id: int, construction: Construction) -> Seeds | None:
        """The seeds of the process-wide generators for a constructor; None to leave them as they are.

        With `seed="own"`, environments that share generators get them as the first one in the worker leaves them.
        """
        seed, origin, isolate_rng = construction.seeds[env_id], construction.origin, construction.isolate_rng
        if not (self._own_process or isolate_rng):
            return None
        if seed is not None:
            return Seeds.of(seed)
        if origin is None or (self._has_generators and not isolate_rng):
            return None
        self._has_generators = True
        return origin.seeds(env_id, construction.rebuilds)

    def _attach(self, env_id: int, payload: BlockSettings) -> None:
        layout = self._layout or self._laid_out(env_id, payload)  # one block for all environments
        self._runners[env_id].use_records_of(layout.schema.possible_agents)

    def _laid_out(self, env_id: int, payload: BlockSettings) -> Layout:
        """Open the block."""
        num_records, arrays, compiled, infos_in_block, described = payload
        # Agents whose spaces are equal here may have different ones in other environments, and lie apart in the block.
        schema = loads(described) if described else Schema.of(self._runners[env_id].env)
        layout = Layout(schema, num_records, arrays=arrays)
        buffer = self._open_block(layout)
        layout.bind(buffer)
        self._actions = ActionRecords(layout, buffer)
        if compiled:  # else the caller cannot read records of compiled code
            self._codec = open_codec(layout, buffer, infos_in_block=infos_in_block, moment=self._moment)
        self._transitions = TransitionRecords(layout, buffer, codec=self._codec)
        self._layout = layout
        if layout.masks.agents and self._codec is not None:  # else masks travel in transitions
            self._mask_columns.append(layout.masks)
        if layout.joint is not None:
            self._joint_columns.append(layout.joint)
        return layout

    def _construct(self, env_id: int, payload: Mapping[int, Construct]) -> bytes | None:
        construction, block, begins, pickled, outputs, options, saved = payload[env_id]
        if saved is not None:
            self._load(env_id, payload[env_id], saved)
            return None
        try:
            self._close(env_id, None)
        except BaseException as error:  # errors of a broken simulator's close() would hide the cause
            if self._in_line and isinstance(error, KeyboardInterrupt):
                raise
        self._runners.pop(env_id, None)
        self._neighbours.forget(env_id)
        built = self._access(env_id, construction)
        # Before the block is laid out for this environment: the records of the others are in the block, too.
        text = _difference(env_id, construction, built.description)
        if text is not None:
            raise Refusal(ValueError, f"the environment differs after its restart in {text}")
        self._attach(env_id, block)
        self._outputs(env_id, outputs)
        keywords = {} if pickled is None else loads(pickled)
        keywords = {name: value for name, value in keywords.items() if name != "seed"}
        if construction.seeds[env_id] is not None:
            keywords["seed"] = construction.seeds[env_id]
        keywords, runner = self._accepted(env_id, keywords), self._runners[env_id]
        runner.set_options(options)
        if begins is Begins.AT_ONCE:
            return self._write_all(env_id, runner.reset(keywords))
        runner.postpone_reset(keywords)
        if begins is Begins.BESIDE:
            runner.reset_early()
        return None

    def _take_over(self, env_id: int, loaded: bool | None) -> bytes | None:
        """`loaded` is None if the environment was constructed; True for one from bytes, False to drop that one."""
        if loaded is None:
            return self._write_all(env_id, self._runners[env_id].begin_early())
        if loaded:
            self._replace(env_id)
        else:
            self._drop(env_id)
        return None

    def _seed(self, env_id: int, _: Any) -> int | None:
        declared = lookup.declared_seed(self._runners[env_id].env.source)
        return self._seeds[env_id] if declared is None else declared

    def _reset(self, env_id: int, payload: Mapping[int, bytes]) -> bytes | None:
        keywords = loads(payload[env_id])
        if keywords.get("seed") is not None:
            self._seeds[env_id] = keywords["seed"]
            if self._generators is not None and keywords.get(SEEDS_GENERATORS):
                self._generators.seed(keywords["seed"])
        env, transition = self._runners[env_id].env, self._runners[env_id].reset(self._accepted(env_id, keywords))
        if not env.possible_agents:  # else the agents have been checked
            check_pickled_agents(transition.observations, lookup.type_name(env.source))
        return self._write_all(env_id, transition)

    def _write_all(self, env_id: int, transition: Transition) -> bytes | None:
        """`_write`, and the global state if workers write it, before the next environment begins.

        So if the next environment ends the process, the result of this one is complete, and is used.
        """
        return self._with_state(env_id, self._write(env_id, transition))

    def _with_state(self, env_id: int, leftovers: bytes | None) -> bytes | None:
        """Write the global state if workers write it; if that fails, the leftovers come with the failure."""
        if leftovers is not None:
            self._saved[env_id] = leftovers
        self._output_state(env_id)
        self._saved.pop(env_id, None)
        return leftovers

    def _output_state(self, env_id: int) -> None:
        if self.outputs.states and not self._runners[env_id].awaits_reset:
            self._write_state(env_id)

    def _write(self, env_id: int, transition: Transition) -> bytes | None:
        """Write a transition into the block; returns leftovers, pickled."""
        env = self._runners[env_id].env
        _write_masks(self._mask_columns, env_id, env)
        leftovers = self._transitions.write(env_id, transition)
        if isinstance(leftovers, Transition) and env.mask_spaces:
            reported = [columns.reported(env_id) for columns in self._mask_columns]
            masks = reported[0] if reported else conformed(env.mask_spaces, env.masks(), "action mask")
            leftovers = leftovers._replace(masks=masks)
        return None if leftovers is None else dump_leftovers(leftovers)

    def _accepted(self, env_id: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a reset that the simulator accepts, and the seed if the episode needs it."""
        runner = self._runners[env_id]
        accepted = runner.env.reset_keywords | (frozenset() if runner.generators is None else {"seed"})
        return {name: value for name, value in keywords.items() if name in accepted}

    def _step(self, env_id: int, payload: Mapping[int, bytes] | None) -> bytes | None:
        actions = loads(payload[env_id]) if payload and env_id in payload else self._actions.read(env_id)
        self._take_lives(env_id)
        return self._advance(env_id, self._runners[env_id].step(actions))

    def _go_on(self, env_id: int, where: str, value: Any) -> bytes | None:
        """Complete a step at which compiled code has stopped; see `run` in `compiled/steps.c`."""
        if where == "c":
            return self._step(env_id, None)
        if where == "r":
            self._take_lives(env_id)
            return self._advance(env_id, self._runners[env_id].interpret(value))
        try:
            return dump_leftovers(infos_alone(value, None, self._transitions.agents))
        except BaseException:
            self._transitions.clear(env_id)
            raise

    def _take_lives(self, env_id: int) -> None:
        """Tell an episode which agents are alive after steps that compiled code has carried out."""
        runner = self._runners[env_id]
        if self._codec is None or runner.fast is None or (rules := runner.fast[3]) is None:
            return
        lives = self._codec.lives(env_id, rules[1])
        if lives is not None:
            runner.take_lives(lives)

    def _advance(self, env_id: int, transition: Transition) -> bytes | None:
        """Write the transition of a step, or begin the next episode before that; returns leftovers, pickled."""
        runner, last, writes = self._runners[env_id], None, False
        try:
            if runner.ended_for_now:
                if self.outputs.states:
                    self._write_state(env_id, final=True)
                if self._restarts:
                    writes = True
                    self._send_last_step(env_id, transition)
                    last = transition
                transition = runner.begin_next(transition)
            writes = True
            leftovers = self._write(env_id, transition)
        except BaseException:
            if last is not None:
                self._transitions.write(env_id, last)
            elif writes:
                self._transitions.clear(env_id)
            raise
        return self._with_state(env_id, leftovers)

    def _send_last_step(self, env_id: int, transition: Transition) -> None:
        """Send the last step of an episode, in case the automatic reset that follows fails."""
        if (leftovers := self._write(env_id, transition)) is not None:
            self._saved[env_id] = leftovers
            if self._own_process:  # the reset may crash it; the reply names no environment, since none is done
                self._send(answer(Message.STEP, (), {env_id: leftovers}, {}, self._status.clock(), last=False))

    def _state(self, env_id: int, _: Any) -> None:
        self._runners[env_id].reset_early()
        self._write_state(env_id)

    def _write_state(self, env_id: int, *, final: bool = False) -> None:
        with self._status.during(env_id, Activity.LAST_STATE if final else Activity.STATE):
            state = self._runners[env_id].env.state()
        if state is None:
            raise TypeError("state() must return a value of state_space, got None")
        layout: Any = self._layout
        (layout.final_state if final else layout.state).write(env_id, 0, state)

    def _render(self, env_id: int, _: Any) -> bytes:
        self._runners[env_id].reset_early()
        with self._status.during(env_id, Activity.RENDER):
            return dumps(self._runners[env_id].env.render())

    def _call(self, env_id: int, payload: bytes | Mapping[int, bytes]) -> Answer:
        pickled_call = payload if isinstance(payload, bytes) else payload[env_id]
        name, args, kwargs = _unpickled(lambda: loads(pickled_call))
        env = self._runners[env_id].env
        source: Any = env if isinstance(name, OfAdapter) else env.source
        with self._status.during(env_id, Activity.CALL):
            try:
                member = functools.partial(name, source) if callable(name) else lookup.find(source, name)
            except AttributeError as error:
                raise Refusal(AttributeError, str(error)) from None
            if callable(member):
                result = member(*args, **kwargs)
            elif args or kwargs:
                kind = type(member).__name__
                raise Refusal(TypeError, f"{name!r} takes no arguments: it is not a method, its type is {kind}")
            else:
                result = member
        try:
            pickled = dumps(result)
            loads(pickled)  # some values pickle, but do not unpickle
        except Exception as error:
            raise Refusal(TypeError, f"the result of {name!r} cannot be pickled: {summary(error)}") from None
        return Answer(pickled)

    def _assign(self, env_id: int, payload: Mapping[int, bytes]) -> None:
        name_and_value = _unpickled(lambda: loads(payload[env_id]))
        with self._status.during(env_id, Activity.CALL):
            try:
                lookup.assign(self._runners[env_id].env.source, *name_and_value)
            except AttributeError as error:
                raise Refusal(AttributeError, str(error)) from None

    def _options(self, env_id: int, payload: Mapping[int, bytes | None]) -> None:
        pickled = payload[env_id]
        if pickled is not None:
            _unpickled(lambda: loads(pickled), "options")  # a check; each reset unpickles them again
        self._runners[env_id].set_options(pickled)

    def _save(self, env_id: int, _: Any) -> Saved:
        self._take_lives(env_id)
        self._update_draws()
        runner, generators = self._runners[env_id], self._generators
        states = None if generators is None else generators.of(env_id)
        more = runner.standing(), self._seeds[env_id], states
        with self._status.during(env_id, Activity.CALL):
            try:
                saved = dump_simulator(runner.env, more, self._arrays_of[env_id])
            except CannotBeSaved as error:
                raise Refusal(TypeError, f"{lookup.type_name(runner.env.source)} cannot be saved: {error}") from None
        isolated = generators is not None and generators.isolated
        return Saved(*saved, isolated, self._draws, self._built[env_id])

    def _load(self, env_id: int, new: Construct, saved: Saved) -> None:
        construction = new.construction
        # The present environments go on with these states if the load fails. Other threads may draw meanwhile.
        has_own = self._generators is not None or self._own_process or self._in_line
        before, fingerprints_before = current_states() if has_own else None, self._fingerprints
        copies_before = None if self._generators is None else self._generators.copies.states()
        try:
            self._loaded[env_id] = beside = self._made_beside(env_id, new, saved)
            if text := _difference(env_id, construction, dumps_compactly(Schema.of(beside.loaded.env))):
                text = f"the state differs from the environments here in {text}"
                raise Refusal(ValueError, f"its state cannot be loaded: {text}.{_AS_SAVED}")
        except Refusal:
            raise
        except CannotBeLoaded as error:
            raise Refusal(TypeError, f"its state cannot be loaded: {error}.{_AS_SAVED}") from None
        except BaseException as error:  # a simulator's `SystemExit` too
            self._check_not_forked(error)
            if self._in_line and isinstance(error, KeyboardInterrupt):
                raise
            raise Refusal(TypeError, f"its state cannot be loaded: {summary(error)}.{_AS_SAVED}") from None
        finally:
            if before is not None:
                restore_states(before)
                self._fingerprints = fingerprints_before
            if self._generators is not None and copies_before is not None:
                self._generators.copies.restore(copies_before)

    def _made_beside(self, env_id: int, new: Construct, saved: Saved) -> _Beside:
        construction = new.construction
        arrays = (
            self._new_arrays(construction.constructors[env_id])
            if construction.constructors
            else self._arrays_of[env_id]
        )

        def construct() -> MultiAgentEnv:
            nonlocal arrays
            try:
                env, _, arrays = self._new_env(env_id, construction)
                self._loading.restart()
            except Refusal:
                raise
            except Exception as error:
                raise CannotBeLoaded(f"its constructor raised {type(error).__name__}: {error}") from error
            keywords = {
                "seed": construction.seeds[env_id],
                "options": None if new.options is None else loads(new.options),
            }
            passed = {key: one for key, one in keywords.items() if one is not None and key in env.reset_keywords}
            try:
                env.reset(**passed)
            except Exception as error:
                close_quietly(env)
                raise CannotBeLoaded(
                    f"the reset of its new environment raised {type(error).__name__}: {error}"
                ) from error
            return env

        simulator = SavedSimulator(saved.pickled, saved.needs_constructor, saved.needs_arrays)
        self._loading.restart()
        with self._status.during(env_id, Activity.CONSTRUCTOR):
            loaded = load_simulator(simulator, arrays, construct, self._loading.loading())
        return _Beside(new, saved, loaded, arrays)

    def _drop(self, env_id: int) -> None:
        """Close the loaded environment, if there is one."""
        if (beside := self._loaded.pop(env_id, None)) is not None and not beside.loaded.uses_pygame:
            with self._status.during(env_id, Activity.CLOSE):
                close_quietly(beside.loaded.env)  # with pygame, its close would end pygame for the present ones

    def _replace(self, env_id: int) -> None:
        """Replace the present environment by the loaded one.

        All present ones are closed first: a close may shut down a library, such as pygame, that loaded ones use.
        Among worker threads, those with pygame are dropped without a close, which would shut it down for other workers.
        """
        in_thread = not (self._own_process or self._in_line)
        for other in [one for one in self._loaded if one not in self._closed]:
            self._closed.add(other)
            if in_thread and self._loaded[other].loaded.uses_pygame:
                continue
            try:
                self._close(other, None)
            except BaseException as error:  # as in a rebuild
                if self._in_line and isinstance(error, KeyboardInterrupt):
                    raise
        new, saved, loaded, arrays = self._loaded.pop(env_id)
        self._closed.discard(env_id)
        if loaded.uses_pygame and not in_thread:
            if saved.needs_constructor:
                close_quietly(loaded.env)
            *_, loaded, arrays = self._made_beside(env_id, new, saved)
        self._neighbours.replace(env_id, loaded.env)
        standing, seed, states = loaded.more
        runner = self._runners[env_id] = self._new_runner(env_id, loaded.env, new.construction)
        runner.stand(standing)
        runner.options = new.options
        self._seeds[env_id], self._built[env_id], self._arrays_of[env_id] = seed, saved.built, arrays
        if self._generators is not None and states is not None:
            self._generators.put(env_id, states)
        if not runner.awaits_reset:
            _write_masks(self._mask_columns, env_id, loaded.env)
        self._output_state(env_id)

    def _outputs(self, _: int, outputs: Outputs) -> None:
        if outputs.rollout is not None:
            assert self._layout is not None
            start, num_times = outputs.rollout
            self._rollout = RolloutBuffer(self._layout, num_times, start)
            self._rollout.bind(self._open_block(self._layout))
        self.outputs = outputs

    def _trace(self, _: int, on: bool) -> Any:
        return trace(self._status, on)

    def _close(self, env_id: int, _: Any) -> None:
        if (runner := self._runners.get(env_id)) is not None:
            with self._status.during(env_id, Activity.CLOSE):
                runner.env.close()


def _difference(env_id: int, construction: Construction, description: bytes) -> str | None:
    """How the pickled description of an environment differs from what it must be; None if it does not."""
    positions = None if construction.positions is None else construction.positions.get(env_id)
    if positions is None and description == construction.described:
        return None
    return difference(loads(construction.described), loads(description), positions)


class _Beside(NamedTuple):
    """An environment that has been loaded beside the present one."""

    new: Construct
    saved: Saved
    loaded: Loaded
    arrays: ConstructorArrays


def _write_masks(mask_columns: Iterable[MaskColumns], env_id: int, env: MultiAgentEnv) -> None:
    """Write the action masks of an environment into the block, where they have columns: before the transition."""
    for columns in mask_columns:
        together = env.mask_array()
        if together is None or not columns.write_array(env_id, env.possible_agents, together):
            columns.write_all(env_id, env.masks())


def _read_joint(joint_columns: Iterable[JointColumn], env_id: int) -> Any:
    """The `JOINT` actions in the record of an environment; None if it has none."""
    for column in joint_columns:
        return column.read(env_id)
    return None


def _received(payload: Any, arrays_fd: int, what: str, arrays: ConstructorArrays | None = None) -> Any:
    """Unpickle a constructor or an adapter, unless it came as it is; `arrays` records where its large arrays are."""
    if not isinstance(payload, Pickled):
        return payload
    return _unpickled(lambda: array_file.loads(payload, arrays_fd, arrays), what, UnpicklingError)


def _unpickled(load: Callable[[], Any], what: str = "arguments", kind: type[Exception] = TypeError) -> Any:
    """Return the value that `load` unpickles; raises `Refusal` if that fails here."""
    try:
        return load()
    except ModuleNotFoundError as error:
        raise Refusal(ModuleNotFoundError, error.name or str(error)) from None
    except array_file.ArrayFileError:
        raise
    except CannotBeShared as error:
        raise Refusal(TypeError, str(error)) from None
    except Exception as error:
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if kind is UnpicklingError and any("importlib._bootstrap" in file for file in frames):
            raise  # the import of a module failed: the traceback says where
        raise Refusal(kind, f"the {what} can be pickled but not unpickled: {summary(error)}") from None


def _failure(error: BaseException, doing: Activity | Message, own_process: bool) -> Failure:
    method = doing.method if isinstance(doing, Activity) else doing.name.lower()
    activity = doing if doing in (Activity.RESET, Activity.STATE, Activity.LAST_STATE) else Activity.STEP
    to_do = advice(error, own_process=own_process)
    if isinstance(error, LookupFailed) and error.__cause__ is not None:
        method, error = error.method, error.__cause__
    elif isinstance(error, preloading.PreloadFailed) and error.__cause__ is not None:
        method, to_do, error = "preload", error.to_do, error.__cause__
    # Frames of this package above the simulator's frames are left out, unless there are no others.
    below = error.__traceback__
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith("marl_parallel."):
        below = below.tb_next
    error = error.with_traceback(below or error.__traceback__)  # a class may refuse new attributes
    lines = traceback.format_exception(error)
    try:
        exception = apart(_pickled_exception, error)
    except Exception:
        exception = None
    kinds = [name_of(kind) for kind in type(error).__mro__]
    text = "".join(lines)
    return Failure(method, summary(error), text, exception, to_do, kinds, activity=activity)


def _pickled_exception(error: BaseException) -> bytes | None:
    """An exception, pickled; None if something else is unpickled. Raises if it cannot be unpickled."""
    pickled = dumps(error)
    return pickled if isinstance(loads(pickled), BaseException) else None
