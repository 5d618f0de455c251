"""What each result must be, computed from what the environments have done. It shares no code with the package.

`Model` sees the interface between pool and workers, in the order in which the pool sees it: the requests that it posts,
the replies and losses that it gets. From these, from the caller's calls, and from the resets and steps that simulators
have noted in their `Life`, it computes the one result, or the few, that the design allows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from marl_parallel.core.messages import Message, Refusal, Reply, Request
from marl_parallel.types import RestartPolicy
from simulation.episodes import Episodes, Finished
from simulation.requests import Purpose, purpose_of
from simulation.seeds import Seeds
from simulation.simulator import ALL, BOX, Did, Life

if TYPE_CHECKING:
    from simulation.backend import SimulatedWorker

COMMON = "__common__"
ANY_TEXT = object()
Dicts = tuple[dict[Any, Any], ...]
_CALLS = (Message.CALL, Message.ASSIGN, Message.RENDER, Message.STATE, Message.SEED)
_NOT_OF_RESULTS = (*_CALLS, Message.OPTIONS, Message.SAVE, Purpose.LOAD)
_RESULTS = (Message.STEP, Message.RESET, Purpose.ADOPT, Purpose.REBUILD)


class Wrong(AssertionError):
    """A result is not what it must be."""


class After(NamedTuple):
    """The state in which a result leaves an environment."""

    last: dict[str, Any]  # the observations in the record
    alive: list[str]
    over: tuple[bool, bool] | None  # the flags of `__all__`; None if the episode goes on
    unused: bool = False  # whether it has been rebuilt and waits for a reset
    waits: bool = False  # likewise, also if a step has returned nothing since
    turn: str = ""  # the only agent who acts next; empty if all do


class Cut(NamedTuple):
    """What a fault has interrupted: "step", "reset", or "" for an idle environment, with the dicts of a step."""

    kind: str
    dicts: Dicts = ({}, {}, {}, {}, {})


@dataclass(eq=False)
class EnvModel:
    """One environment as its caller must see it."""

    env_id: int
    host: int  # the number of the worker that has it
    life: Life | None = None
    request: str = ""  # "step" or "reset", from when it is sent until its result has been received
    action: int | None = None
    requests: list[tuple[int | None, int | None]] = field(
        default_factory=list
    )  # all: actions of steps, seeds of resets
    awaiting: Request | None = None  # that the worker carries out for it
    done: list[Dicts] | None = None  # the results that are allowed, once the pool must have one
    state: After = field(default_factory=lambda: After({}, [], None))
    has_reset: bool = False
    cuts: list[Cut] = field(default_factory=list)  # of a fault that is not reported yet: what it may have interrupted
    rebuilt: Did | None = None  # the reset of the environment that has been rebuilt
    ready: bool = False  # whether it has been rebuilt
    must_be_rebuilt: bool = False  # whether that has not been requested yet, after a fault
    renewing: bool = False  # whether the next episode begins in another environment
    ending: Did | None = None  # with SAME_STEP, the last step: until its result is received, another one may go on
    held: tuple[Dicts, After] | None = None  # the result if that was interrupted, and the state after it
    after_held: list[Cut] = field(default_factory=list)  # of a fault that came then
    excused: bool = False  # whether it need not be replaced now
    moved: bool = False
    option: int = 0  # of the reset that is requested; 0 if it has none
    standing: int = 0  # of resets that have none
    changed: bool = False  # whether that is about to be another one
    before: frozenset[int] = frozenset()  # those before, which may count for the reset of a rebuild
    seed: int | None = None  # of that reset
    ended: int = 0  # how many episodes of the present environment its caller has seen end
    restarts: Counter[str] = field(default_factory=Counter)  # by kind
    latest_fault: str = ""  # the kind of its `RestartEvent`
    recycled: int = 0
    faults: list[float] = field(default_factory=list)  # when those were that count against it
    returned: tuple[Any, Any] = ({}, {})  # the observations and infos of its latest result


class SavedEnv(NamedTuple):
    """A saved environment."""

    env: EnvModel
    life: dict[str, Any]
    episodes: Episodes
    seeds: Any
    base: int
    moment: float
    returned: list[Any]  # the observations and infos that `load_state` may return
    is_readable: bool


class Model:
    """All environments.

    Args:
        shares: The environments of each worker.
        mode: The name of the auto-reset mode.
        policy: How often environments that fail are rebuilt; None if they are not.
        most_episodes: After so many episodes, an environment is replaced; None for no limit.
        only_episodes: Whether that is the only limit.
        recycles: Whether environments are replaced.
        seeds: The seeds of all environments.
        clock: Returns the time.
        steps_on: Whether a step reaches environments whose episode is over.
        in_block: Whether numbers are in shared memory, and known if a worker fails before it can send the rest, or if
            the rest cannot be unpickled.

    Attributes:
        finished: The episodes that the results of the latest call have ended.
        fatal: Faults after which everything must be closed.
        limits: The environments that have failed once more than the policy allows.
        faults: How many rebuilds faults have led to.
        errors: How many of these since the present `call` or `restart` began.
        errors_before: How many of these had occurred when its requests were posted.
    """

    def __init__(
        self,
        shares: list[range],
        mode: str,
        *,
        policy: RestartPolicy | None,
        most_episodes: int | None,
        only_episodes: bool,
        recycles: bool,
        seeds: Seeds,
        clock: Callable[[], float],
        steps_on: bool,
        in_block: bool,
    ) -> None:
        self.envs = [EnvModel(env_id, number) for number, share in enumerate(shares) for env_id in share]
        self.episodes = [Episodes(env.env_id, mode) for env in self.envs]
        self.finished: list[Finished] = []
        self.mode, self.restarts, self.seeds = mode, policy is not None, seeds
        self._steps_on, self._in_block = steps_on, in_block
        self._policy, self._clock = policy or RestartPolicy(), clock
        self.fatal: list[str] = []
        self.limits: list[int] = []
        self.errors = self.errors_before = self.faults = 0
        self.most_episodes, self.only_episodes = most_episodes, only_episodes
        self.recycles, self.standbys_fail = recycles, False
        self._called: set[int] = set()
        self.checked = 0

    # -- the caller ----------------------------------------------------------------------------------------------------

    def sends(
        self, kind: str, env_ids: Iterable[int], action: int | None = None, option: int = 0, seed: int | None = None
    ) -> None:
        """The caller begins a step or reset."""
        if seed is not None:
            self.seeds.base = seed
        for env in [self.envs[env_id] for env_id in env_ids]:
            env.option, env.seed = option, None if seed is None else seed + env.env_id
            if kind == "reset" and env.has_reset and env.state.over is None and not env.cuts:
                env.ended += 1
            env.request, env.action, env.done = kind, action, None
            env.requests.append((action, env.seed))
            env.excused = env.life is not None and self._is_split(env.life.worker, env)
            if not env.cuts:
                env.renewing = True  # unless it is posted to the same environment
            elif kind == "step" and env.ready:
                self._report(env)

    def stands(self, env_ids: Iterable[int], option: int) -> None:
        """The caller sets the option of every later reset that has none."""
        self.calls(env_ids)
        for env in [self.envs[env_id] for env_id in env_ids]:
            if env.cuts:
                env.before |= {env.standing}
            env.changed, env.standing = option != env.standing, option

    def rebuilds(self, env_ids: Iterable[int]) -> None:
        """The caller has environments constructed again."""
        self.calls(env_ids)
        if any(env.cuts and not env.ready for env in self.envs):
            self.seeds.reserve(env_ids)
        for env in [self.envs[env_id] for env_id in env_ids]:
            env.cuts, env.rebuilt, env.ready, env.state = [], None, False, After({}, [], None)
            env.has_reset, env.ended = False, 0
            env.restarts["request"] += 1

    def calls(self, env_ids: Iterable[int]) -> None:
        """The caller calls something else than a step or reset."""
        self.errors = self.errors_before = 0
        self._called = {*env_ids}

    def saved(self, env_ids: Iterable[int]) -> list[SavedEnv]:
        """The caller has saved environments."""
        return [self._saved(self.envs[env_id]) for env_id in env_ids]

    def _saved(self, env: EnvModel) -> SavedEnv:
        assert env.life is not None
        if env.cuts and not env.ready:
            raise Wrong(f"environment {env.env_id}: saved before it has been rebuilt")
        returned: list[Any] = [(cut.dicts[0], {}) for cut in env.cuts] or [env.returned]
        return SavedEnv(
            replace(env, restarts=Counter(env.restarts), faults=[*env.faults]),
            env.life.saved,
            copy.deepcopy(self.episodes[env.env_id]),
            self.seeds.saved(env.env_id),
            self.seeds.base,
            self._clock(),
            returned,
            not any(did.unreadable for did in env.life.early),
        )

    def loads(self, states: Mapping[int, SavedEnv]) -> None:
        """The caller begins to load environments, which must replace the present ones, all or none."""
        self.calls(states)
        self._loading = states
        self._restarts_before: list[int] | None = None  # when the replacement began

    def loaded(self) -> list[int]:
        """Environments have been loaded, except those that have failed in the replacement; returns the loaded ones."""
        before, now = self._restarts_before, [env.restarts.total() for env in self.envs]
        placed = [] if before is None else [env_id for env_id in self._loading if before[env_id] == now[env_id]]
        bases = {state.base for state in self._loading.values()}
        for env_id in placed:
            self._load(self.envs[env_id], self._loading[env_id])
        if len(placed) == len(self.envs) and len(bases) == 1:
            self.seeds.base = bases.pop()
        return placed

    def _load(self, env: EnvModel, saved: SavedEnv) -> None:
        worker = next(one for one in env.life.worker.backend.workers.values() if one.number == env.host)
        life = worker.loaded[env.env_id]
        if life.saved != saved.life:
            raise Wrong(f"environment {env.env_id}: {life.saved} is loaded in place of {saved.life}")
        worker.lives[env.env_id] = env.life = life
        then, late = saved.env, self._clock() - saved.moment
        for name in ("state", "cuts", "rebuilt", "ready", "standing", "before", "ended", "recycled"):
            setattr(env, name, getattr(then, name))
        env.has_reset, env.must_be_rebuilt, env.changed, env.option, env.seed = True, False, False, 0, None
        env.renewing, env.ending, env.moved, env.held, env.after_held = False, None, False, None, []
        env.restarts, env.faults = Counter(then.restarts), [moment + late for moment in then.faults]
        env.returned = saved.returned[0]
        self.episodes[env.env_id] = replace(copy.deepcopy(saved.episodes), env_id=env.env_id)
        self.seeds.load(env.env_id, saved.seeds)

    def check_errors(self, *, raised: bool) -> None:
        """Check whether a call or restart must have raised the error of a fault."""
        if raised and not self.errors:
            raise Wrong("an error without a fault")
        if not raised and self.errors > self.errors_before:
            raise Wrong("no error after a fault")
        self._called = set()
        self.seeds.free()

    def received(self, env_ids: Iterable[int], batch: Any) -> None:
        """Check results, in the order of env ids: five sequences of dicts, of which some may be None."""
        self.finished = []
        for place, env_id in enumerate(env_ids):
            env = self.envs[env_id]
            got = tuple(None if part is None else part[place] for part in batch)
            if not env.request:
                raise Wrong(f"environment {env_id}: a result without a request: {got}")
            if env.done is None:
                raise Wrong(f"environment {env_id}: a result that no worker has sent: {got}")
            if env.held is not None and fits(got, env.held[0]):
                env.state, env.cuts = env.held[1], env.after_held
            elif not any(fits(got, dicts) for dicts in env.done):
                allowed = "\n  or ".join(map(_shown, env.done))
                returned = f"environment {env_id}: its {env.request} returned\n     {_shown(got)}"
                raise Wrong(f"{returned}\n  in place of\n     {allowed}")
            elif env.ending is not None:
                self._check_recycling(env)
            self.finished += self.episodes[env_id].add(env.request, got)
            observations = {agent: observation.copy() for agent, observation in got[0].items()}
            env.returned = observations, copy.deepcopy(got[4]) if got[4] else {}
            env.request, env.done, env.action = "", None, None
            env.ending, env.held, env.after_held = None, None, []
            self.checked += 1

    @property
    def in_flight(self) -> list[int]:
        return [env.env_id for env in self.envs if env.request]

    @property
    def ready(self) -> list[int]:
        """The environments whose results may be here."""
        return [env.env_id for env in self.envs if env.done is not None]

    @property
    def surely_ready(self) -> list[int]:
        """The environments whose results must be here: they do not wait for a new environment."""
        return [env.env_id for env in self.envs if env.done is not None and env.ending is None]

    # -- the interface between pool and workers ------------------------------------------------------------------------

    def posted(self, worker: SimulatedWorker, request: Request) -> None:
        """The pool has sent a request."""
        purpose = purpose_of(request)
        if purpose is Purpose.REPLACE and self._restarts_before is None:
            self._restarts_before = [env.restarts.total() for env in self.envs]
        is_call = purpose in _NOT_OF_RESULTS
        if self._called and (is_call or (purpose is Purpose.REBUILD and self._is_called(request))):
            self.errors_before, self._called = self.errors, set()
        if purpose not in _RESULTS:
            return
        for env_id in worker.share if request.env_ids is None else request.env_ids:
            env = self.envs[env_id]
            if purpose is Purpose.REBUILD:
                env.must_be_rebuilt = False
                self.seeds.note_rebuild(env_id, request)
            if purpose is Message.STEP:
                env.renewing = False
            elif purpose is not Purpose.REBUILD:
                life = worker.lives[env_id]
                if life is not env.life and env.life is not None and env.awaiting is not None:
                    env.awaiting = None  # its worker has died, but has carried out the step before
                    self._completed(env, env.life.worker, Message.STEP)
                if life is not env.life and (env.renewing or env.ending is not None):
                    env.renewing, env.done = True, None
                    env.life, env.host, env.moved = life, worker.number, True
                    env.recycled += 1
                    if self.only_episodes and env.ended < (self.most_episodes or 0):
                        raise Wrong(f"environment {env_id}: replaced after {env.ended} episodes")
                    env.ended = 0
                    self.seeds.check_moved(life)
                elif env.request == "reset":
                    env.renewing = False
            env.awaiting = request
            env.excused |= self._is_split(worker, env)

    def _is_called(self, request: Request) -> bool:
        """Whether a rebuild is the caller's, and does not follow a fault."""
        return request.env_ids is not None and not any(self.envs[env_id].must_be_rebuilt for env_id in request.env_ids)

    def delivered(self, worker: SimulatedWorker, request: Request, reply: Reply) -> None:
        """The pool has received a reply."""
        if reply.request is Message.ACCESS:
            for env_id in reply.results:
                self.envs[env_id].life = worker.lives[env_id]
        refused = [env_id for env_id, result in reply.results.items() if isinstance(result, Refusal)]
        failed = [*reply.failures, *refused]
        worker.is_closed |= reply.request is Message.CLOSE
        purpose = purpose_of(request)
        if purpose is Purpose.PREPARE:
            self.standbys_fail |= bool(failed)
            self.seeds.note_used_up(failed)
            return
        if reply.request is Message.OPTIONS:
            for env_id in request.env_ids or ():
                env = self.envs[env_id]
                if env.changed and env.life is not None:
                    env.life.early = []  # it is reset once more, with the other option
                env.changed = False
        if reply.request in _CALLS:
            if worker.is_late:  # the call raises that, and all are rebuilt
                return
            for env_id in {*(request.env_ids or ())} - reply.failures.keys():
                life = self.envs[env_id].life
                if life is not None and life.did:  # reset, so that it could be called
                    life.early, life.did = life.did, []
            for env_id in reply.failures:
                self._fails(self.envs[env_id], self._cut(self.envs[env_id], "", ""), "exception")
            return
        if purpose not in _RESULTS or reply.env_ids == ():
            return
        ids = request.env_ids if reply.env_ids is None else reply.env_ids
        for env_id in worker.share if ids is None else ids:
            env = self.envs[env_id]
            if env.awaiting is not request:
                continue
            env.awaiting = None
            if env_id in worker.late:
                continue
            if env_id in failed:
                raised = worker.lives[env_id].raised
                stage = "returned" if raised == "writing" else "inside"
                self._fails(env, self._cut(env, stage, raised.removesuffix("-end")), "exception")
            else:
                self._completed(env, worker, purpose)

    def check_reset(self, life: Life, request: Request, seed: int | None) -> None:
        """An environment begins a reset."""
        env = self.envs[life.env_id]
        self.seeds.check_reset(life, request, seed, env.seed if env.request == "reset" else None)

    def reported(self, worker: SimulatedWorker) -> None:
        """The pool knows that a worker is gone."""
        if not self.restarts:
            self.fatal.append(f"worker {worker.number} is gone")
        self.ended(worker, worker.why)

    def timed_out(self, worker: SimulatedWorker) -> None:
        """A worker is past its timeout. What it may finish while its stack is taken is late all the same."""
        worker.culprits, request = self._culprits(worker, "hangs"), worker.request
        if worker.phase == "replying" and request is not None and not request.each:
            # All of them have been carried out in time, and only their reply is missing. The pool does not know that of
            # those after the last one whose simulator was called.
            worker.late.update({env.env_id: self._cut(env, "", "") for env in self._untouched(worker)})
            return
        for env in worker.culprits:
            if env.done is None and env.awaiting is not None:
                is_running = env.env_id == worker.running and env.awaiting is request
                worker.late[env.env_id] = self._cut(env, *((worker.phase, worker.activity) if is_running else ("", "")))

    def ended(self, worker: SimulatedWorker, why: str) -> None:
        """A worker is gone, or the pool ends it, since it is past a timeout or has too much memory."""
        for env in self._culprits(worker, why):
            self._count(env)

    def _culprits(self, worker: SimulatedWorker, why: str) -> list[EnvModel]:
        """The environments that fail if a worker dies, hangs, or is killed for its memory: all, if it is not known."""
        if worker.is_late and worker.culprits is not None:
            return worker.culprits
        hosted = [env for env in self.envs if env.host == worker.number]
        running = worker.running if worker.phase != "replying" else None
        if why == "is killed":
            one = worker.settled if running is None else running
            return [env for env in hosted if env.env_id == one] or hosted[:1]
        if running is None or not hosted:
            return hosted
        return [self.envs[running]]  # or the one that was to take its place

    def _count(self, env: EnvModel) -> None:
        """Count a fault against an environment, and note whether the policy allows it."""
        policy, now = self._policy, self._clock()
        recent = [moment for moment in env.faults if not now - moment > policy.rate_period_s]
        if not self.restarts:
            return
        if (policy.max_restarts is not None and len(env.faults) >= policy.max_restarts) or (
            policy.rate_limit is not None and len(recent) >= policy.rate_limit
        ):
            self.fatal.append(f"environment {env.env_id} has failed once more than the policy allows")
            self.limits.append(env.env_id)
        env.faults.append(now)

    def lost(self, worker: SimulatedWorker, why: str) -> None:
        """The pool replaces a worker that is gone."""
        current, running = worker.request, worker.running
        ids: list[int] = []
        if current is not None and not current.each and current.message in (Message.STEP, Message.RESET):
            ids = [*(worker.share if current.env_ids is None else current.env_ids)]
        if running in ids:
            finished = ids[: ids.index(running) + (worker.phase == "replying")]
            if worker.phase == "replying":
                self._untouched(worker)
            for env in [self.envs[env_id] for env_id in finished]:
                if env.awaiting is current and env.env_id not in worker.late:
                    env.awaiting = None
                    self._completed(env, worker, current.message)  # type: ignore[union-attr]
        self.standbys_fail |= bool(_before(worker))
        culprits = self._culprits(worker, why)
        # Of one that was to take the place of another in another worker.
        self.seeds.note_used_up([env.env_id for env in culprits if env.host != worker.number])
        kind = "timeout" if why == "hangs" else "death"
        for env in self.envs:
            if env.host != worker.number:
                continue
            stage, activity = "", ""
            if env.env_id == running and env.awaiting is current:
                stage, activity = worker.phase, worker.activity
            cuts = worker.late.get(env.env_id) or self._cut(env, stage, activity)
            self._fails(env, cuts, kind if env in culprits else "neighbour")

    def _untouched(self, worker: SimulatedWorker) -> list[EnvModel]:
        """Of a request with one reply, the environments after the last one whose simulator was called.

        They are over and stay it, so that their records are empty now, or they have been reset before.
        """
        request = worker.request
        assert request is not None
        ids = [*(worker.share if request.env_ids is None else request.env_ids)]
        if worker.running not in ids:
            return []
        after = [self.envs[env_id] for env_id in ids[ids.index(worker.running) + 1 :]]
        untouched = [env for env in after if env.awaiting is request]
        for env in untouched:
            if not env.state.unused and not (env.life and env.life.early):
                env.state = env.state._replace(last={})
        return untouched

    # -- what the design says ------------------------------------------------------------------------------------------

    def _completed(self, env: EnvModel, worker: SimulatedWorker, purpose: Purpose | Message) -> None:
        """A worker has carried out what was requested of an environment."""
        if purpose is Purpose.REBUILD:
            env.life = worker.lives[env.env_id]
            resets = [did for did in env.life.did if did.what == "reset"]
            env.life.did = []
            if not env.cuts:
                return
            env.rebuilt, env.ready = (resets[-1] if resets else None), True
            if env.rebuilt is not None and env.rebuilt.unreadable:
                self._fails(env, env.cuts, "exception")
            elif env.request and env.done is None and (env.request == "step" or env.cuts[0].kind == "reset"):
                self._report(env)
            elif env.ending is not None and env.held is None and (first := env.rebuilt) is not None:
                dicts = _marked(_renewed(env.ending[1:6], first), {"restarted": True, "error": ANY_TEXT})
                env.held = dicts, _state(first)
            return
        assert env.life is not None
        env.excused |= self._is_split(worker, env)
        did, env.life.did = env.life.did, []
        if self.mode == "NEXT_STEP" and env.request == "step" and env.life.early:
            if did:
                raise Wrong(f"environment {env.env_id}: it was reset to be called, and again by a step")
            did = env.life.early
        if did:
            env.life.early = []
        env.life.begun |= bool(did)
        steps, resets = [one for one in did if one.what == "step"], [one for one in did if one.what == "reset"]
        if any(one.unreadable for one in (resets[-1:] if env.request == "reset" or env.renewing else did)):
            env.life.did = did
            cuts = self._cut(env, "replying", "")
            env.life.did = []
            self._fails(env, cuts, "exception")
            return
        if env.request == "reset" or env.renewing:
            first = resets[-1]
            self._check_reset(env, first)
            if not env.moved:
                self._check_recycling(env)
            dicts = first[1:6] if env.ending is None else _renewed(env.ending[1:6], first)
            if env.moved:
                dicts = _marked(dicts, {"recycled": True})
            if env.cuts:
                dicts = _marked(dicts, {"restarted": True, "error": ANY_TEXT})
            self._finish(env, [dicts], _state(first))
        elif steps and steps[0].over and self.mode == "SAME_STEP":
            if len(steps) > 1:
                raise Wrong(f"environment {env.env_id}: one request has stepped it twice")
            self._check_action(env, steps[0])
            env.ended += 1
            self._finish(env, [_renewed(steps[0][1:6], resets[0])], _state(resets[0]))
            if self.recycles:
                env.ending = steps[0]
        elif steps:
            if len(steps) + len(resets) > 1:
                raise Wrong(f"environment {env.env_id}: one request has led to {did}")
            self._check_action(env, steps[0])
            env.ended += steps[0].over and env.state.over is None
            flags = (steps[0].terminateds[ALL], steps[0].truncateds[ALL]) if steps[0].over else None
            self._finish(env, [steps[0][1:6]], _state(steps[0], flags))
        elif resets:
            if env.state.over is None or self.mode == "DISABLED":
                raise Wrong(f"environment {env.env_id}: a step has reset it")
            self._check_recycling(env)
            self._finish(env, [resets[-1][1:6]], _state(resets[-1]))
        else:
            must_be_stepped = self._steps_on and not env.state.waits
            if env.state.over is None or self.mode != "DISABLED" or must_be_stepped:
                raise Wrong(f"environment {env.env_id}: its simulator has not been stepped")
            terminated, truncated = env.state.over
            self._finish(
                env,
                [({}, {}, {ALL: terminated}, {ALL: truncated}, {})],
                env.state._replace(last={}, alive=[], unused=False),
            )

    def _check_reset(self, env: EnvModel, first: Did) -> None:
        """Check the options that a reset has received."""
        option = (env.option if env.request == "reset" else 0) or env.standing
        before, env.before = env.before, frozenset()
        if first.option != option and first.option not in before:
            raise Wrong(f"environment {env.env_id}: reset with option {first.option} in place of {option}")

    def _check_recycling(self, env: EnvModel) -> None:
        """An episode begins in the same environment."""
        limit = self.most_episodes
        has_no_standby = env.life is not None and env.life.worker.in_line
        may_stay = env.cuts or env.excused or self.standbys_fail or not env.has_reset or has_no_standby
        if limit is not None and env.ended >= limit and not may_stay:
            raise Wrong(f"environment {env.env_id}: not replaced after {env.ended} episodes, with max_episodes={limit}")

    def _is_split(self, worker: SimulatedWorker, env: EnvModel) -> bool:
        """Whether others are in the worker from which an environment has moved to this one: it does not move again."""
        return any(other.host == one.number for one in _before(worker) for other in self.envs)

    def _check_action(self, env: EnvModel, step: Did) -> None:
        if step.action != env.action:
            raise Wrong(f"environment {env.env_id}: stepped with action {step.action} in place of {env.action}")

    def _finish(self, env: EnvModel, allowed: list[Dicts], state: After) -> None:
        if env.done is not None:
            raise Wrong(f"environment {env.env_id}: a second result of one request")
        env.done, env.state, env.cuts, env.rebuilt, env.ready = allowed, state, [], None, False
        env.renewing, env.ending, env.moved = False, None, False
        env.has_reset = True

    def _report(self, env: EnvModel) -> None:
        """The result of a step or reset that a fault has interrupted, or prevented."""
        allowed: list[Dicts] = []
        first, state = env.rebuilt, env.state
        for kind, dicts in env.cuts:
            if kind == "reset" and first is not None:
                dicts = first[1:6]
            elif kind != "reset" and first is not None and self.mode == "SAME_STEP":
                dicts = _renewed(dicts, first)
            elif kind == "reset" or first is not None:
                continue
            else:
                state = After(dicts[0], [], (False, True), unused=True, waits=True)
            allowed.append(_marked(dicts, {"restarted": True, "error": ANY_TEXT}))
        if first is not None:
            self._check_reset(env, first)
            state = _state(first)
        self._finish(env, allowed, state)

    def _fails(self, env: EnvModel, cuts: list[Cut], kind: str) -> None:
        """An environment has failed, or its worker is gone."""
        if not self.restarts:
            self.fatal.append(f"environment {env.env_id}: {kind}")
            return
        if not (env.cuts and (not env.ready or not env.request or env.done is not None)):
            env.cuts = cuts
        if env.held is not None:
            env.after_held = env.after_held or [Cut("", _interrupted(env.held[1].last, env.held[1].alive))]
        env.ready, env.rebuilt, env.awaiting, env.must_be_rebuilt = False, None, None, True
        env.renewing, env.moved = False, False
        if env.done is None:
            env.ending = None
        env.restarts[kind] += 1
        env.ended = 0
        env.latest_fault = "neighbour" if kind == "neighbour" else "fault"
        if kind == "exception":
            self._count(env)
            if self._policy.exceptions is not None:  # no exception of an environment is of these types
                self.fatal.append(f"environment {env.env_id}: an exception that the policy excludes")
        self.errors += 1
        self.faults += 1

    def _cut(self, env: EnvModel, stage: str, activity: str) -> list[Cut]:
        """What a fault interrupts: the simulator was "inside" a call, had "returned", or the worker was "replying"."""
        last, alive = env.state.last, env.state.alive
        if env.renewing and env.done is None:
            return [Cut("reset")] if env.ending is None else [Cut("step", env.ending[1:6])]
        if not env.request or env.done is not None:
            return [Cut("", _interrupted(last, alive) if env.has_reset else _interrupted({}, []))]
        if env.request == "reset":
            return [Cut("reset")]
        if stage == "failed":  # before its failure could be sent: it is not known whether its record is whole
            cuts = self._cut(env, "inside", activity)
            return [*cuts, *[cut._replace(dicts=_torn(cut.dicts)) for cut in cuts]]
        if stage == "written":  # its infos, which could not be sent, may have been in the record before
            cuts = self._cut(env, "returned", activity)
            return [*cuts, *[cut._replace(dicts=(*cut.dicts[:4], {})) for cut in cuts]]
        did = [] if env.life is None else env.life.did
        steps, resets = [one for one in did if one.what == "step"], [one for one in did if one.what == "reset"]
        zeros = {agent: np.zeros(BOX.shape) for agent in alive}
        if (
            stage == "replying" and not env.state.unused and self._in_block
        ):  # the record has been written, its result is lost
            written = [*steps, *resets][-1]
            return [Cut("step", _interrupted(written.observations, [] if written.over else written.alive))]
        if stage == "replying":  # the caller has seen nothing of the new environment
            return [Cut("step", _interrupted(last, alive))]
        is_lost = bool(steps) and steps[0].unreadable and not self._in_block
        if steps and steps[0].over and self.mode == "SAME_STEP" and not is_lost:
            if resets and stage == "returned":
                step = _ended(steps[0])
                return [Cut("step", step), Cut("step", _torn(step))]
            if activity == "reset":
                return [Cut("step", _ended(steps[0]))]
        if steps:
            is_inside = is_lost and activity == "reset" and not resets and not self._in_block
            return [Cut("step", _interrupted(last if is_inside else zeros, alive))]
        if resets or activity == "reset":
            return [Cut("reset")]
        return [Cut("step", _interrupted(last, alive))]


def _state(did: Did, over: tuple[bool, bool] | None = None) -> After:
    return After(did.observations, did.alive, over, turn=did.turn)


def _before(worker: SimulatedWorker) -> list[SimulatedWorker]:
    """The worker from which environments move to this one."""
    others = [one for one in worker.backend.workers.values() if one.place < worker.place]
    return [one for one in others if worker.share[0] in one.share]


# -- dicts -------------------------------------------------------------------------------------------------------------


def _ended(step: Did) -> Dicts:
    """The last step of an episode, if the reset that follows it fails: what cannot be unpickled is lost."""
    return (*step[1:5], {} if step.unreadable else step.infos)


def _torn(dicts: Dicts) -> Dicts:
    return ({agent: np.zeros(BOX.shape) for agent in dicts[1]}, *dicts[1:])


def _interrupted(observations: dict[str, Any], alive: list[str]) -> Dicts:
    no, yes = {**dict.fromkeys(alive, False), ALL: False}, {**dict.fromkeys(alive, True), ALL: True}
    return observations, dict.fromkeys(alive, 0.0), no, yes, {}


def _renewed(ended: Dicts, first: Did) -> Dicts:
    """The last step of an episode with the first observations of the next one."""
    infos = {key: dict(info) if isinstance(info, dict) else info for key, info in ended[4].items()}
    for agent, observation in ended[0].items():
        infos.setdefault(agent, {}).setdefault("final_obs", observation)
    for key, info in first.infos.items():
        if info is not None and info != {} and isinstance(infos.get(key, {}), dict):
            infos.setdefault(key, {}).setdefault("reset_info", info)
    return (first.observations, *ended[1:4], infos)


def _marked(dicts: Dicts, mark: dict[str, Any]) -> Dicts:
    return (*dicts[:4], {**dicts[4], COMMON: {**mark, **dicts[4].get(COMMON, {})}})


def fits(got: Any, expected: Any) -> bool:
    if expected is ANY_TEXT:
        return isinstance(got, str) and bool(got)
    if isinstance(expected, np.ndarray):
        return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, dict):
        return isinstance(got, dict) and got.keys() == expected.keys() and all(fits(got[k], expected[k]) for k in got)
    if isinstance(expected, tuple) and isinstance(got, tuple):
        return all(one is None or fits(one, other) for one, other in zip(got, expected, strict=True))
    return bool(got == expected)


def _shown(dicts: Any) -> str:
    """Dicts in one line; arrays as lists, texts cut off."""
    if isinstance(dicts, np.ndarray):
        return str(dicts.tolist())
    if isinstance(dicts, dict):
        return "{" + ", ".join(f"{key}: {_shown(value)}" for key, value in dicts.items()) + "}"
    if isinstance(dicts, tuple):
        return "(" + ", ".join(map(_shown, dicts)) + ")"
    return "a text" if dicts is ANY_TEXT else repr(dicts)[:60]
