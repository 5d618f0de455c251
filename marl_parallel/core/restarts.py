"""What is built anew after a fault: how often that may be, with which seed, and what its caller is told.

Here live the policy, its bookkeeping, and for each environment that failed what it was doing and had said last. Who
posts the requests is `supervision.py`; what the dicts of an interrupted step say, `episode.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters.protocol import Dicts
from marl_parallel.core.batch import Batch, Made
from marl_parallel.core.episode import interrupted, marked, renewed
from marl_parallel.core.payloads import Plan, Rebuild
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.reports import first_line
from marl_parallel.types import ParallelEnvError, RestartLimitExceeded, RestartPolicy


class Kind(Enum):
    """What a fault met with."""

    STEP = "step"
    """A step, which it interrupted, or prevented."""
    AUTO_RESET = "auto-reset"
    """The reset within a step that had ended an episode."""
    RESET = "reset"
    """A reset that was asked for, or due."""
    IDLE = "idle"
    """Nothing: the next result gets the mark."""


class Fault(NamedTuple):
    """An environment that failed and is being restarted.

    Attributes:
        kind: What was interrupted.
        told: The five dicts that its caller is told, but for what the fresh environment has to say.
        report: The error's text.
    """

    kind: Kind
    told: Dicts
    report: str


class Restarts:
    """The bookkeeping.

    Args:
        policy: How often.
        plan: Constructors and all else that workers were told, of all environments.
        block: The payload of `ATTACH`.
        batch: The parent's side of the block.
        base_seed: What seeds are drawn from.
        options_last: Whether environments keep the options of a reset.

    Attributes:
        base_seed: What seeds are drawn from; changes with `reset(seed=)`.
        counts: How often each environment has been restarted.
        faults: Of the environments that are being restarted.
        marks: Of idle ones that have been, what their next result will be.
        latest: By environment, what travelled with its last result, still pickled, as what has been handed out is not
            ours any more.
        kept: Likewise of a last step whose automatic reset has not ended yet.
        resets: By environment, the keywords of a reset that was asked for and has not ended yet, pickled.
        awaited: Likewise of one that is to begin when the environment has been restarted.
        traced: Whether workers keep a trace.
        unborn: Those that have been built anew and have said nothing since: nobody is alive in them.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        plan: Plan,
        block: tuple[int, bool],
        batch: Batch,
        base_seed: int,
        options_last: bool,
    ) -> None:
        self._policy, self._plan, self._block, self._batch = policy, plan, block, batch
        self.base_seed = base_seed
        self.faults: dict[int, Fault] = {}
        self.marks: dict[int, tuple[Fault, Made]] = {}
        self.latest: dict[int, bytes | None] = {}
        self.resets: dict[int, bytes] = {}
        self.awaited: dict[int, bytes] = {}
        self.unborn: set[int] = set()
        self.kept: dict[int, bytes] = {}
        self.traced = False
        self.counts = [0] * len(plan.constructors)
        self._blamed = [0] * len(plan.constructors)
        self._lasting: list[dict[Any, Any]] | None = [{} for _ in plan.constructors] if options_last else None
        self._lately: list[deque[float]] = [deque() for _ in plan.constructors]

    def blame(self, env_ids: Iterable[int], error: ParallelEnvError) -> None:
        """Count a fault against environments.

        Raises:
            RestartLimitExceeded: One has failed more often than it may.
        """
        now, policy = time.monotonic(), self._policy
        for env_id in env_ids:
            lately = self._lately[env_id]
            while lately and now - lately[0] > policy.rate_period_s:
                lately.popleft()
            limit = None
            if policy.max_restarts is not None and self._blamed[env_id] >= policy.max_restarts:
                limit = f"max_restarts={policy.max_restarts}"
            elif policy.rate_limit is not None and len(lately) >= policy.rate_limit:
                limit = f"rate_limit={policy.rate_limit} within {policy.rate_period_s:g} s"
            if limit is not None:
                raise RestartLimitExceeded(
                    f"environment {env_id} has failed once more than its RestartPolicy allows ({limit}): "
                    f"{first_line(error)}\n\nWhat to do: mend the simulator, or pass a RestartPolicy with higher "
                    "limits. The error of the last failure is the cause of this one.",
                    env_ids=(env_id,),
                    worker=error.worker,
                ) from error
            self._blamed[env_id] += 1
            lately.append(now)

    def begin(self, env_id: int, kind: Kind, error: ParallelEnvError, torn: bool, cut_off: Dicts | None = None) -> None:
        """Note what an environment was doing when it failed, before anything of it is overwritten.

        Args:
            env_id: Which.
            kind: What the fault met with.
            error: What happened.
            torn: As of `cut_off`.
            cut_off: What `cut_off` has returned, where the record may have changed since; None to read it now.
        """
        if env_id in self.faults:
            return  # a restart that failed: what it had interrupted stays the same
        if env_id in self.marks and kind is Kind.IDLE:
            self.faults[env_id] = self.marks.pop(env_id)[0]
            return
        if kind is Kind.RESET:
            self.marks.pop(env_id, None)  # the episode that it would have ended is gone
        told = self.cut_off(env_id, kind, torn=torn) if cut_off is None else cut_off
        if kind is not Kind.RESET:
            told = marked(told, str(error))
        self.faults[env_id] = Fault(kind, told, str(error))

    def cut_off(self, env_id: int, kind: Kind, *, torn: bool = False) -> Dicts:
        """The five dicts that an interrupted environment returns, without the mark that says why.

        Args:
            env_id: Which.
            kind: What is interrupted.
            torn: Whether its record may be partially written.
        """
        if kind is Kind.RESET:
            return {}, {}, {}, {}, {}
        extras = self._extras(env_id)
        if kind is Kind.AUTO_RESET:
            told = self._batch.peek(env_id, extras).dicts
            return (self._batch.last_known(env_id, extras, torn=True)[0], *told[1:]) if torn else told
        observations, alive = self._batch.last_known(env_id, extras, torn=torn)
        spaces = self._batch.layout.schema.reward_spaces
        return interrupted(observations, [] if env_id in self.unborn else alive, spaces)

    def request(self, env_id: int) -> Rebuild:
        """What the worker is to do about it."""
        self.counts[env_id] += 1
        source = np.random.SeedSequence((self.base_seed, env_id, self.counts[env_id]))
        seed = int(source.generate_state(1)[0] >> 1)
        plan = self._plan._replace(
            traced=self.traced,
            constructors={env_id: self._plan.constructors[env_id]},
            seeds={env_id: seed},
            counts={env_id: self.counts[env_id]},
        )
        keywords = self.resets.get(env_id)
        if self._lasting is not None and self._lasting[env_id]:
            asked = {} if keywords is None else loads(keywords)
            keywords = dumps({**asked, "options": self._lasting[env_id]})
        return Rebuild(plan, self._block, reset=self._at_once(env_id), keywords=keywords)

    def with_lasting(self, env_id: int, options: dict[Any, Any]) -> dict[Any, Any]:
        """The options of a reset, with earlier ones where the environment keeps them: it may have been built anew."""
        if self._lasting is None:
            return options
        self._lasting[env_id].update(options)
        return self._lasting[env_id]

    def _at_once(self, env_id: int) -> bool:
        """Whether the fresh environment's first observation is part of what is told."""
        fault = self.faults[env_id]
        if not self._batch.begun[env_id] and fault.kind is Kind.IDLE:
            return False
        return fault.kind is Kind.RESET or self._plan.mode is AutoresetMode.SAME_STEP

    @property
    def kind_of_reset(self) -> Kind:
        """What has been interrupted where a step was in the middle of a reset."""
        return Kind.AUTO_RESET if self._plan.mode is AutoresetMode.SAME_STEP else Kind.RESET

    def note_begun(self, env_id: int) -> None:
        """Its reset has been carried out, though the caller has not been told yet."""
        self._batch.begin([env_id])

    def peek(self, env_id: int, extras: Any) -> Made:
        """A transition that lies in the block, in memory of its own."""
        return self._batch.peek(env_id, extras)

    def _extras(self, env_id: int) -> Any:
        latest = self.latest.get(env_id)
        return None if latest is None else loads(latest)

    def finish(self, env_id: int, latest: bytes | None) -> Made | None:
        """The environment is there again: what its caller is told, None where it was idle.

        Args:
            env_id: Which.
            latest: What travelled with the reset.
        """
        at_once = self._at_once(env_id)
        fault = self.faults.pop(env_id)
        if at_once:
            self.told(env_id, latest)
            fresh = self._batch.peek(env_id, self._extras(env_id))
            if fault.kind is Kind.RESET:
                made = fresh._replace(dicts=marked(fresh.dicts, fault.report))
            else:
                made = fresh._replace(dicts=renewed(fault.told, fresh.dicts), over=False)
        else:
            made = Made(fault.told, [], [], over=True)
            self.unborn.add(env_id)
        if fault.kind is Kind.IDLE:
            self.marks[env_id] = fault, made
            return None
        return made

    def told(self, env_id: int, latest: bytes | None) -> None:
        """Note what travelled with an environment's result."""
        self.latest[env_id] = latest
        self.resets.pop(env_id, None)
        self.unborn.discard(env_id)
        self.kept.pop(env_id, None)

    def take_mark(self, env_id: int) -> Made:
        """What an environment that was idle when it was restarted has to say next, once."""
        return self.marks.pop(env_id)[1]

    def result_of_reset(self, env_id: int, extras: Any) -> Any:
        """What a reset has to say, with the mark of an environment that had been restarted while it was idle."""
        mark = self.marks.pop(env_id, None)
        if mark is None:
            return extras
        made = self._batch.peek(env_id, extras)
        return made._replace(dicts=marked(made.dicts, mark[0].report))
