"""Faults that `mutations.py` puts into the pool, one at a time."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: in a file of `marl_parallel/core`, one text in place of another that occurs there once."""

    name: str
    file: str
    before: str
    after: str
    blind: bool = False  # whether it was written without having read the simulation
    survives: str = ""  # why no history can find it, if so


MUTATIONS = [
    Mutation(
        "a saved result is lost",
        "pool/restarts.py",
        "self._records[slot.env_id].saved = leftovers",
        "pass",
    ),
    Mutation(
        "a reset that waits for a rebuild is dropped",
        "pool/restarts.py",
        ("                self._pool.post({slot.worker: request})\n            elif"),
        ("                pass\n            elif"),
    ),
    Mutation(
        "a reset after a fault has no report",
        "pool/restarts.py",
        "result = fresh._replace(transition=transition, mark=Mark.RESTARTED)",
        "result = fresh",
    ),
    Mutation(
        "results of neighbours that had finished are lost",
        "pool/restarts.py",
        "            if pool.expects_result(pool.slots[finished]):\n",
        "            if False:\n",
    ),
    Mutation(
        "a result that is here is overwritten by a rebuild",
        "pool/restarts.py",
        ("            if slot.state is State.DONE:\n                self._save_result(slot)\n            faults"),
        "            faults",
    ),
    Mutation(
        "what was noted before the stack is taken is forgotten",
        "pool/restarts.py",
        ("        if record.noted is not None:\n            return record.noted\n"),
        "",
    ),
    Mutation(
        "results of an environment that is being ended count",
        "pool/restarts.py",
        "return record.noted is not None or record.is_rebuilding",
        "return record.is_rebuilding",
    ),
    Mutation(
        "agents of an environment that needs a reset are alive",
        "pool/restarts.py",
        "alive, events = ([], {}) if record.needs_reset else (alive, events)",
        "alive, events = alive, events",
    ),
    Mutation(
        "the rate limit counts for twice as long",
        "pool/restarts.py",
        "now - record.recent[0] > policy.rate_period_s",
        "now - record.recent[0] > 2 * policy.rate_period_s",
    ),
    Mutation(
        "results that had come before a timeout are lost",
        "pool/timeouts.py",
        "        pool.apply(replies)\n",
        "        pool.apply([])\n",
    ),
    Mutation(
        "options of a reset are lost when an environment moves",
        "pool/recycling.py",
        "if keywords is None or _is_empty(keywords):",
        "if True:",
    ),
    Mutation(
        "standbys keep the seeds that have changed",
        "pool/recycling.py",
        (
            "        for standby in self._standbys.values():\n"
            "            self._prepare(standby, [env_id for env_id in env_ids if env_id in "
            "standby.environments])\n"
        ),
        "",
    ),
    Mutation(
        "a result is lost where the old environment goes on",
        "pool/recycling.py",
        (
            "            record.phase = Phase.GOES_ON\n"
            "            self._pool.take_result(slot, *record.result)\n"
            "            return"
        ),
        ("            record.phase = Phase.GOES_ON\n            return"),
    ),
    Mutation(
        "a fault while an environment moves interrupts nothing",
        "pool/recycling.py",
        ("        if record.phase is Phase.STAYS:\n            return None\n        if record.ending"),
        ("        if record.phase is not None:\n            return None\n        if record.ending"),
    ),
    Mutation(
        "old workers are freed late",
        "pool/recycling.py",
        "        if self._pool.remove(worker, kill=kill):",
        "        if kill and self._pool.remove(worker, kill=kill):",
        survives="nothing is wrong: they are freed at their deadline, five seconds later",
    ),
    Mutation(
        "requests of a worker that was replaced stay in its queue",
        "pool/pool.py",
        "        queue.requests.clear()\n        queue.posted = 0\n",
        "        queue.posted = 0\n",
    ),
    Mutation(
        "leftovers of an earlier result come once more",
        "pool/pool.py",
        "slot.request, slot.state, slot.result = None, State.IDLE, None",
        "slot.request, slot.state = None, State.IDLE",
        survives="nothing is wrong: each result is set before it is read",
    ),
    Mutation(
        "failures of close are not raised",
        "pool/pool.py",
        ("                    failures.update(reply.failures)\n                    self.note_closed"),
        "                    self.note_closed",
    ),
    Mutation(
        "a replay has the steps of the episode before",
        "pool/replay.py",
        "        history.steps.clear()\n        history.count, history.begun",
        "        history.count, history.begun",
    ),
    Mutation(
        "derived seeds are those of the next restart",
        "pool/rebuilds.py",
        "np.random.SeedSequence((self.base_seed, env_id, count))",
        "np.random.SeedSequence((self.base_seed, env_id, count + 1))",
    ),
    Mutation(
        "request numbers go on in a new worker",
        "pool/pool.py",
        ("        queue.requests.clear()\n        queue.posted = 0\n"),
        "        queue.requests.clear()\n",
        blind=True,
    ),
    Mutation(
        "quick steps skip what restarts must see",
        "pool/pool.py",
        "                    if one.sees_steps:\n                        by_worker = False\n",
        "                    pass\n",
        blind=True,
    ),
    Mutation(
        "last step's leftovers lost before a deadly reset",
        "pool/pool.py",
        "if env_id in reply.failures or reply.env_ids == ():",
        "if env_id in reply.failures:",
        blind=True,
    ),
    Mutation(
        "second removed worker's statistics replace the first's",
        "pool/pool.py",
        "self._past[queue.position] += done",
        "self._past[queue.position] = done",
        blind=True,
    ),
    Mutation(
        "a fault counts against the worker's neighbours too",
        "pool/restarts.py",
        ("        for env_id in error.env_ids:\n            record"),
        ("        for env_id in self._pool.queues[error.worker].share:\n            record"),
        blind=True,
    ),
    Mutation(
        "options of an interrupted reset are lost",
        "pool/restarts.py",
        "            keywords=self._records[slot.env_id].keywords,\n",
        "            keywords=None,\n",
        blind=True,
    ),
    Mutation(
        "a waiting reset is sent after later restarts",
        "pool/restarts.py",
        "record.keywords, record.waiting_reset = record.waiting_reset, None",
        "record.keywords = record.waiting_reset",
        blind=True,
    ),
    Mutation(
        "an idle environment's restart is reported twice",
        "pool/restarts.py",
        ("                result = record.fault.next_result\n                self._set_fault(slot, None)\n"),
        "                result = record.fault.next_result\n",
        blind=True,
    ),
    Mutation(
        "first reset not noted when a neighbour crashes",
        "pool/restarts.py",
        ("        if slot.request is Message.RESET:\n            slot.has_reset = True\n        if type(slot.result)"),
        "        if type(slot.result)",
        blind=True,
    ),
    Mutation(
        "a late result is taken after a timeout",
        "pool/restarts.py",
        "return record.noted is not None or record.is_rebuilding",
        "return record.is_rebuilding",
        blind=True,
    ),
    Mutation(
        "recycling does not change the derived seed",
        "pool/rebuilds.py",
        "np.random.SeedSequence((self.base_seed, env_id, count))",
        "np.random.SeedSequence((self.base_seed, env_id, self.restarts(env_id)))",
        blind=True,
    ),
    Mutation(
        "a rebuilt worker stops writing states and rollouts",
        "pool/rebuilds.py",
        "keywords=keywords, outputs=self.outputs, options=record.options",
        "keywords=keywords, options=record.options",
        blind=True,
        survives="the simulation has no states; test_a_restarted_environment_has_its_last_known_state fails",
    ),
    Mutation(
        "reset_timeout alone never ends hanging automatic resets",
        "pool/timeouts.py",
        "    Message.STEP: (Activity.STEP, Activity.RESET),",
        "    Message.STEP: (Activity.STEP,),",
        blind=True,
    ),
    Mutation(
        "timeout runs over all environments of a worker",
        "pool/timeouts.py",
        "started = max(queue.since, state[1], status.ready_since)",
        "started = max(queue.since, status.ready_since)",
        blind=True,
    ),
    Mutation(
        "finishing just before its end is waited forever",
        "pool/timeouts.py",
        ("            pool.call_off_end(late)\n            return\n"),
        "            return\n",
        blind=True,
    ),
    Mutation(
        "the old one's last episode counts again",
        "pool/recycling.py",
        "record.first_episode = self._ended[slot.env_id] + ends",
        "record.first_episode = self._ended[slot.env_id]",
        blind=True,
    ),
    Mutation(
        "a replaced environment ignores reset options",
        "pool/recycling.py",
        "if keywords is None or _is_empty(keywords):",
        'if keywords is None or "seed" not in loads(keywords):',
        blind=True,
    ),
    Mutation(
        "an outdated standby environment is used unchanged",
        "pool/recycling.py",
        ("                standby.environments[env_id] = Prepared.FAILED\n                outdated.append(env_id)\n"),
        "                standby.environments[env_id] = Prepared.READY\n",
        blind=True,
    ),
    Mutation(
        "memory fault always counts against the first environment",
        "pool/recycling.py",
        "env_id = counted if counted is not None and counted in share else share[0]",
        "env_id = share[0]",
        blind=True,
    ),
    Mutation(
        "replay misses the automatic reset before a reset",
        "pool/replay.py",
        "                self._catch_up(env_id, history)\n                self._begin(history, _keywords(",
        "                self._begin(history, _keywords(",
        blind=True,
    ),
    Mutation(
        "the step that resets counts in replays",
        "pool/replay.py",
        "            self._begin(history, {})\n            return False\n",
        "            self._begin(history, {})\n            return True\n",
        blind=True,
    ),
    Mutation(
        "next long call is warned of too late",
        "pool/long_calls.py",
        ("            if known != state:\n                after = self._after\n"),
        "",
        blind=True,
        survives="the simulation reads no warnings; test_warnings_begin_again_with_each_call fails",
    ),
    Mutation(
        "a failure is said of what the environment before did",
        "worker_status.py",
        "self.latest if abs(self._ints[_ENV]) == env_id + 1 else Activity.START",
        "self.latest",
        blind=True,
        survives="simulated workers unpickle all actions; test_actions_that_the_worker_cannot_unpickle fails",
    ),
    Mutation(
        "workers carry out what a close discards",
        "worker.py",
        "                    return  # everything is being closed",
        "                    pass  # everything is being closed",
        blind=True,
    ),
    Mutation(
        "a close discards nothing",
        "pool/pool.py",
        "                status.discard()",
        "                pass",
        blind=True,
    ),
    Mutation(
        "workers that are being ended go on",
        "worker_status.py",
        "return self._ints[_DISCARDED] in (1, 2)",
        "return self._ints[_DISCARDED] == 1",
        blind=True,
        survives="no simulated worker gets signals; test_only_the_numbers_of_the_parent_discard_requests fails",
    ),
    Mutation(
        "a last step's leftovers are not kept for its reset",
        "worker.py",
        "            self._saved[env_id] = leftovers\n            if self._own_process",
        "            if self._own_process",
        blind=True,
    ),
    Mutation(
        "leftovers of a last step stay in the worker",
        "worker.py",
        "        self._output_state(env_id)\n        self._saved.pop(env_id, None)\n",
        "        self._output_state(env_id)\n",
        blind=True,
        survives="nothing is wrong: leftovers of an earlier step never go with a record that has none",
    ),
    Mutation(
        "leftovers of a last step stay after its result",
        "pool/restarts.py",
        "record.latest, record.saved = leftovers, None",
        "record.latest = leftovers",
        blind=True,
        survives="nothing is wrong: a record without leftovers reads none",
    ),
    Mutation(
        "the last step's record stays overwritten by its reset",
        "worker.py",
        "                self._transitions.write(env_id, last)\n            elif",
        "                pass\n            elif",
        blind=True,
    ),
    Mutation(
        "last steps are not sent before a deadly reset",
        "worker.py",
        "            if self._own_process:  # the reset may",
        "            if False:  # the reset may",
        blind=True,
    ),
    Mutation(
        "a guard that has been closed is armed",
        "../backends/server.py",
        "    if poll.poll(0):  # the",
        "    if False:  # the",
        blind=True,
        survives="simulated workers have no guards; test_a_guard_that_closes fails",
    ),
    Mutation(
        "a failure before the first reset has no replay",
        "pool/replay.py",
        "history.saved = history.begun = False",
        "history.begun = False",
        blind=True,
        survives="it needs frames of an environment that was never reset; test_each_failed_call_has_a_file fails",
    ),
    Mutation(
        "an idle environment has masks after its restart",
        "block_transitions.py",
        "if slot.request is not None or slot.skips or not slot.has_reset:  # in",
        "if slot.request is not None or not slot.has_reset:  # in",
        blind=True,
        survives=("the simulation has no masks; test_action_masks_of_an_idle_environment_that_was_restarted fails"),
    ),
    Mutation(
        "an idle environment has masks in arrays after its restart",
        "block_transitions.py",
        "            or slot.skips\n",
        "",
        blind=True,
        survives=("the simulation has no masks; test_action_masks_of_an_idle_environment_that_was_restarted fails"),
    ),
    Mutation(
        "masks of the environment before a restart stay",
        "block_transitions.py",
        "            self._masks.pop(env_id, None)\n            self._note_latest(env_id, _UNKNOWN)",
        "            self._note_latest(env_id, _UNKNOWN)",
        blind=True,
        survives="nothing is wrong: before its first reset, none are returned; its result replaces them",
    ),
    Mutation(
        "stacked actions are not marked",
        "block_transitions.py",
        "        if stacked:\n            self.action_records.mark_stacked(env_ids)\n",
        "",
        blind=True,
        survives="simulated actions have no arrays; test_numbers_out_of_arrays_are_scalars fails",
    ),
    Mutation(
        "without compiled code, stacked actions are no scalars",
        "records.py",
        "return self.scalars(actions) if form & STACKED else actions",
        "return actions",
        blind=True,
        survives="simulated actions have no arrays; test_numbers_out_of_arrays_are_scalars fails",
    ),
    Mutation(
        "a request begins with the activity of the one before",
        "worker_status.py",
        "        ints[_ENV] = ints[_ACTIVITY] = 0\n        self._parts",
        "        ints[_ENV] = 0\n        self._parts",
        blind=True,
        survives="nothing is wrong: it is not that of an environment, so that nobody reads it",
    ),
    Mutation(
        "an activity that has ended is not the latest one",
        "worker_status.py",
        "return Activity(activity) if 0 <= activity < len(Activity) else Activity.START",
        "return Activity(activity) if 0 <= activity < len(Activity) and self._ints[_ENV] > 0 else Activity.START",
        blind=True,
    ),
    Mutation(
        "a last step is sent before its state is written",
        "worker.py",
        (
            "                if self.outputs.states:\n"
            "                    self._write_state(env_id, final=True)\n"
            "                if self._restarts:\n"
            "                    writes = True\n"
            "                    self._send_last_step(env_id, transition)\n"
            "                    last = transition\n"
        ),
        (
            "                if self._restarts:\n"
            "                    writes = True\n"
            "                    self._send_last_step(env_id, transition)\n"
            "                    last = transition\n"
            "                if self.outputs.states:\n"
            "                    self._write_state(env_id, final=True)\n"
        ),
        blind=True,
        survives="the simulation writes no states; test_states_of_a_last_step_that_fail fails",
    ),
    Mutation(
        "the state after a reset interrupts the step before it",
        "pool/restarts.py",
        "            not idle and activity is Activity.STATE and",
        "            False and activity is Activity.STATE and",
        blind=True,
        survives="the simulation writes no states; test_states_of_a_last_step_that_fail fails",
    ),
    Mutation(
        "only the first failure of an environment has a replay",
        "pool/replay.py",
        "            if history.saved:\n                continue\n",
        "            if history.restarts:\n                continue\n",
        blind=True,
    ),
    Mutation(
        "a worker that died while idle has finished the next step",
        "pool/pool.py",
        "if not queue.one_reply or status.parts < queue.requests[0].number:",
        "if not queue.one_reply:",
    ),
    Mutation(
        "a timeout begins before the request",
        "pool/timeouts.py",
        "started = max(queue.since, state[1], status.ready_since)",
        "started = max(state[1], status.ready_since)",
    ),
    Mutation(
        "a timeout begins with the latest request in the queue",
        "pool/pool.py",
        "            if not queue.requests:\n                queue.since = now\n",
        "            queue.since = now\n",
    ),
    Mutation(
        "a timeout begins with the first request ever",
        "pool/pool.py",
        "            if not queue.requests:\n                queue.since = now\n",
        "            if not queue.since:\n                queue.since = now\n",
    ),
    Mutation(
        "the second request in a queue has the timeout of the first",
        "pool/pool.py",
        "queue.since = max(reply.completed or self.clock(), queue.requests[0].posted)",
        "pass",
    ),
    Mutation(
        "a pause before a step of all counts for its timeout",
        "pool/pool.py",
        (
            "            queue.requests.append(Pending(request, queue.posted, self.called, None, True))\n"
            "            queue.since = self.called\n"
        ),
        "            queue.requests.append(Pending(request, queue.posted, self.called, None, True))\n",
    ),
    Mutation(
        "a step of all begins when the call before began",
        "pool/pool.py",
        "            self.called = self.clock()\n            try:",
        "            try:",
    ),
    Mutation(
        "time of the caller between two calls does not count",
        "pool/timeouts.py",
        "self._deadlines.looked = max(self._deadlines.looked, self._pool.called)",
        "pass",
    ),
    Mutation(
        "a worker is ended at the first look past its timeout",
        "pool/timeouts.py",
        "elif now - suspect[1] >= _UNCHANGED_S:\n                late.append(worker)",
        "if True:\n                late.append(worker)",
    ),
    Mutation(
        "a status that changes between two looks is late",
        "pool/timeouts.py",
        "if suspect is None or suspect[0] != state:",
        "if suspect is None:",
        survives="too rare; test_a_status_that_changes_between_two_looks_is_not_late fails",
    ),
    Mutation(
        "a worker that has just finished is ended",
        "pool/timeouts.py",
        "return suspect is None or self._backend.statuses[worker].state != suspect[0]",
        "return False",
    ),
    Mutation(
        "closing after a timeout takes as long as any other",
        "pool/pool.py",
        "if isinstance(error, WorkerTimeout):\n            while_closing",
        "if False:\n            while_closing",
    ),
    Mutation(
        "closing after a timeout asks all workers",
        "pool/pool.py",
        "self.close(ask=in_line, timeout=_CLOSE_IN_LINE_WITHIN_S if in_line else 0.0)",
        "self.close(timeout=1.0)",
    ),
    Mutation(
        "closing after a timeout waits for workers that cannot end",
        "pool/pool.py",
        "patience = max(deadline - self.clock(), 0.0) if ask is True else 0.0",
        "patience = max(deadline - self.clock(), 0.0)",
    ),
    Mutation(
        "a second request counts from when the first result is received",
        "pool/pool.py",
        "queue.since = max(reply.completed or self.clock(), queue.requests[0].posted)",
        "queue.since = self.clock()",
    ),
    Mutation(
        "a second request counts from when the first one ended",
        "pool/pool.py",
        "queue.since = max(reply.completed or self.clock(), queue.requests[0].posted)",
        "queue.since = reply.completed or self.clock()",
        survives="too rare; test_the_second_request_in_a_queue_counts_from_when_it_could_begin fails",
    ),
    Mutation(
        "a second request counts from its post",
        "pool/pool.py",
        "queue.since = max(reply.completed or self.clock(), queue.requests[0].posted)",
        "queue.since = queue.requests[0][2]",
    ),
    Mutation(
        "a worker that some environments have left steps all",
        "pool/pool.py",
        "step = STEP_ALL if tuple(share) == tuple(queue.built) else Request(Message.STEP, share)",
        "step = STEP_ALL",
    ),
    Mutation(
        "an environment that has moved keeps its request",
        "pool/recycling.py",
        "        ending, record.ending, record.request = record.ending, None, None\n",
        "        ending, record.ending = record.ending, None\n",
    ),
    Mutation(
        "a rebuild keeps the last step of a move",
        "pool/recycling.py",
        "            record.phase, record.ending, record.request = Phase.STAYS, None, None\n",
        "            record.phase = Phase.STAYS\n",
    ),
    Mutation(
        "a rebuild keeps a move",
        "pool/recycling.py",
        "            record.phase, record.ending, record.request = Phase.STAYS, None, None\n",
        "            pass\n",
    ),
    Mutation(
        "observations of before a reset are kept",
        "pool/restarts.py",
        "record.keywords, record.needs_reset, record.reported = None, False, None",
        "record.keywords, record.needs_reset = None, False",
    ),
    Mutation(
        "the keywords of a reset are kept",
        "pool/restarts.py",
        "record.keywords, record.needs_reset, record.reported = None, False, None",
        "record.needs_reset, record.reported = False, None",
    ),
    Mutation(
        "a slot skips for ever",
        "pool/restarts.py",
        "        slot.skips = fault is not None\n",
        "        slot.skips |= fault is not None\n",
    ),
    Mutation(
        "restarts do not see the step after a reset",
        "pool/restarts.py",
        "        self.sees_steps = True\n        return [env_id",
        "        return [env_id",
    ),
    Mutation(
        "restarts do not see the step after a fault",
        "pool/restarts.py",
        "        slot.skips = fault is not None\n        self.sees_steps = True\n",
        "        slot.skips = fault is not None\n",
    ),
    Mutation(
        "a step that is late begins when it is late",
        "pool/pool.py",
        "            queue.since = self.called\n        self._by_worker",
        "            queue.since = self.clock()\n        self._by_worker",
    ),
    Mutation(
        "the last episodes before a move are not seen",
        "pool/recycling.py",
        "        self.sees_steps = bool(too_large) or is_due or self._may_move\n",
        "        self.sees_steps = bool(too_large) or is_due\n",
    ),
    Mutation(
        "a result that was replaced once counts as replaced for ever",
        "pool/pool.py",
        "            self.replaced.pop(slot.env_id, None)\n        slot.state",
        "            pass\n        slot.state",
    ),
    Mutation(
        "a standby that all environments have reached stays one",
        "pool/recycling.py",
        "            del self._standbys[pool.position(old_worker)]\n",
        "",
    ),
    Mutation(
        "what was noted before a worker is ended stays",
        "pool/restarts.py",
        "record.latest = record.saved = record.reported = record.noted = None",
        "record.latest = record.saved = record.reported = None",
    ),
    Mutation(
        "nothing is in flight once some results have come",
        "pool/pool.py",
        "        self.in_flight -= len(done)\n",
        "        self.in_flight = 0\n",
    ),
    Mutation(
        "a slot keeps its result",
        "pool/pool.py",
        "slot.request, slot.state, slot.result = None, State.IDLE, None",
        "slot.request, slot.state = None, State.IDLE",
    ),
    Mutation(
        "a request of several parts counts as one",
        "pool/pool.py",
        "queue.posted += len(request.env_ids) if request.each and request.env_ids is not None else 1",
        "queue.posted += 1",
    ),
    Mutation(
        "extensions are called in another order",
        "pool/pool.py",
        "self._set_extensions([*self._extensions, *extensions])",
        "self._set_extensions([*extensions, *self._extensions])",
    ),
    Mutation(
        "the old worker keeps an environment that has moved",
        "pool/recycling.py",
        (
            "        pool.set_share(old_worker, tuple([env_id for env_id in pool.queues[old_worker].share "
            "if env_id != slot.env_id]))\n"
        ),
        "",
    ),
    Mutation(
        "a standby is started for no environments",
        "pool/pool.py",
        "self.queues[worker] = WorkerQueue((), self.queues[beside].position, env_ids)",
        "self.queues[worker] = WorkerQueue((), self.queues[beside].position)",
    ),
    Mutation(
        "a restart that is not reported is left out of states",
        "pool/restarts.py",
        "return _SavedRecord(record.fault, record.counted,",
        "return _SavedRecord(None, record.counted,",
    ),
    Mutation(
        "a loaded restart is not reported",
        "pool/restarts.py",
        "        self._set_fault(slot, saved.fault)\n",
        "        self._set_fault(slot, None)\n",
    ),
    Mutation(
        "the last step counts as the result after a restart that is not reported",
        "pool/saved_states.py",
        "        if unreported is not None:  # an",
        "        if False:  # an",
    ),
    Mutation(
        "a loaded environment that needs a reset has agents that are alive",
        "pool/restarts.py",
        "recent, saved.needs_reset, saved.reported, leftovers)",
        "recent, False, saved.reported, leftovers)",
        survives="nothing is wrong: the record of a loaded environment is written, and has no agent that is alive",
    ),
    Mutation(
        "a rate limit forgets the faults of a loaded environment",
        "pool/restarts.py",
        "recent = deque([now - age for age in saved.ages])",
        "recent = deque[float]()",
        survives="too rare; test_the_rate_limit_counts_faults_from_before_a_load fails",
    ),
    Mutation(
        "a second load leaves the first environments open",
        "worker.py",
        "        self._closed.discard(env_id)\n",
        "",
    ),
    Mutation(
        "environments that a refused load has made stay open",
        "pool/saved_states.py",
        "        if refused:\n            pool.execute_in(Message.TAKE_OVER, states, False)\n",
        "        if refused:\n",
    ),
    Mutation(
        "environments that a load has made before a fault stay open",
        "pool/saved_states.py",
        ("            if not pool.closed:\n                pool.execute_in(Message.TAKE_OVER, states, False)\n"),
        "",
    ),
    Mutation(
        "one state of two is loaded though the other is refused",
        "pool/saved_states.py",
        "        if refused:\n",
        "        if len(refused) == len(states):\n",
    ),
    Mutation(
        "an environment rebuilt in the middle of a load counts as loaded",
        "pool/saved_states.py",
        "if self.rebuilds.restarts(env_id) == before[env_id]}",
        "if True}",
    ),
    Mutation(
        "the fault of a dropped environment counts against its neighbours",
        "worker.py",
        "with self._status.during(env_id, Activity.CLOSE):\n                    close_quietly",
        "with contextlib.nullcontext():\n                    close_quietly",
    ),
    Mutation(
        "standbys keep the seeds from before a load",
        "pool/saved_states.py",
        '        self._pool.alone("", self._pool.note_outdated, env_ids)',
        "        pass",
    ),
    Mutation(
        "a loaded environment counts no rebuilds",
        "pool/rebuilds.py",
        "_Record(count, Counter(restarts), remembered, options)",
        "_Record(0, Counter(restarts), remembered, options)",
    ),
    Mutation(
        "a loaded environment is recycled later",
        "pool/recycling.py",
        "_Record(now, ended - episodes, recycled_before)",
        "_Record(now, ended, recycled_before)",
    ),
    Mutation(
        "a loaded environment has the options of the present one",
        "worker.py",
        "        episode.options = saved.options\n",
        "",
    ),
    Mutation(
        "the result of a restart from before a load is saved once more",
        "pool/saved_states.py",
        "        pool.replaced.pop(env_id, None)\n",
        "",
        survives="too rare; test_a_state_that_is_saved_right_after_a_load fails",
    ),
    Mutation(
        "a loaded running episode begins anew in statistics",
        "statistics.py",
        "self.ended[env_id], self._loaded[env_id] = sums.ended, sums",
        "self.ended[env_id] = sums.ended",
    ),
    Mutation(
        "leftovers of the step before go with a newer record",
        "block_transitions.py",
        "possible = [one for one in (leftovers, None, no_infos) if self._own.goes_with(env_id, one)]",
        "possible = [leftovers]",
    ),
    Mutation(
        "infos that are lost take their transition along",
        "block_transitions.py",
        "possible = [one for one in (leftovers, None, no_infos) if",
        "possible = [one for one in (leftovers,) if",
    ),
    Mutation(
        "an episode that has ended keeps its beginning",
        "episode.py",
        "if (last := bits & ~BEGAN)}",
        "if (last := bits)}",
    ),
    Mutation(
        "an automatic reset forgets the last observations",
        "episode.py",
        "final_observations=last.observations, reset_infos=first.infos,",
        "final_observations={}, reset_infos=first.infos,",
    ),
    Mutation(
        "the last step before a move has the observations of the next episode",
        "episode.py",
        "observations=transition.observations if observations is None else observations,",
        "observations=transition.observations,",
    ),
    Mutation(
        "a mark replaces the infos of the whole environment",
        "episode.py",
        "    values |= common if isinstance(common, dict) else {}\n",
        "",
    ),
    Mutation(
        "a last step that was not sent ahead counts as interrupted",
        "pool/restarts.py",
        "            auto_reset = known is not None  # else the step is lost\n",
        "            auto_reset = record.saved is not None and known is not None\n",
    ),
    Mutation(
        "a pickled record does not say that the next episode has begun",
        "records.py",
        "PICKLED | (FINAL if transition.final_observations is not None else 0)",
        "PICKLED",
    ),
    Mutation(
        "actions that are pickled are left in the block, too",
        "worker.py",
        "loads(payload[env_id]) if payload and env_id in payload else self._actions.read(env_id)",
        "self._actions.read(env_id)",
    ),
    Mutation(
        "the result of a restart says that the episode is over",
        "pool/restarts.py",
        "result = Snapshot(transition, over=False, states=states, mark=Mark.RESTARTED)",
        "result = Snapshot(transition, over=True, states=states, mark=Mark.RESTARTED)",
    ),
]
