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
        "pool/pool.py",
        "self.unfinished[env_id] = leftovers",
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
        "            if slot.state is State.DONE:\n                self._save_result(slot)\n            owed",
        "            owed",
    ),
    Mutation(
        "what was noted before the stack is taken is forgotten",
        "pool/restarts.py",
        "        if slot.owed_if_ended is not None:\n            return slot.owed_if_ended\n",
        "",
    ),
    Mutation(
        "results of an environment that is being ended count",
        "pool/slots.py",
        "        if self.owed_if_ended is not None:\n            return True\n",
        "",
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
        "if slot.env_id in env_ids], Event.CHANGES)",
        "if slot.env_id is None], Event.CHANGES)",
    ),
    Mutation(
        "a result is lost where the old environment goes on",
        "pool/recycling.py",
        "            self._pool.take_result(slot, *owed.result)\n            return",
        "            return",
    ),
    Mutation(
        "a fault while an environment moves interrupts nothing",
        "pool/restarts.py",
        "slot.present in (Present.WAITS, Present.MOVES)",
        "slot.present is None",
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
        ("                    failures.update(reply.failures)\n                    self.add_last_slices"),
        "                    self.add_last_slices",
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
        "                if one.sees_steps:\n                    by_worker = False\n",
        "                pass\n",
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
        "            self._records[slot.env_id].keywords,\n",
        "            None,\n",
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
        "pool/replacement.py",
        "(_P.REPORTS, _E.REPORTED): _P.GOES_ON",
        "(_P.REPORTS, _E.REPORTED): _P.REPORTS",
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
        "pool/slots.py",
        "not (self.present is Present.GOES_ON or self.present is Present.REPORTS)",
        "not (self.present is not Present.WAITS and self.present is not Present.MOVES)",
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
        "begins, keywords, self.outputs, record.options",
        "begins, keywords, Outputs(), record.options",
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
        "            for slot in late:\n                slot.owed_if_ended = None\n            return\n",
        "            return\n",
        blind=True,
    ),
    Mutation(
        "the old one's last episode counts again",
        "pool/recycling.py",
        "record.first_episode = self._ended[slot.env_id] + more",
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
        "pool/replacement.py",
        "(_S.OUTDATED, _E.BUILT): (_S.BEING_BUILT, _A.CONSTRUCT)",
        "(_S.OUTDATED, _E.BUILT): (_S.READY, _A.NOTHING)",
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
        "worker/worker.py",
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
        "worker/worker.py",
        "            self._saved[env_id] = leftovers\n            if self._own_process",
        "            if self._own_process",
        blind=True,
    ),
    Mutation(
        "leftovers of a last step stay in the worker",
        "worker/worker.py",
        "        self._output_state(env_id)\n        self._saved.pop(env_id, None)\n",
        "        self._output_state(env_id)\n",
        blind=True,
        survives="nothing is wrong: leftovers of an earlier step never go with a record that has none",
    ),
    Mutation(
        "leftovers of a last step stay after its result",
        "pool/pool.py",
        "            self.unfinished.pop(slot.env_id, None)\n",
        "            pass\n",
        blind=True,
        survives="nothing is wrong: a record without leftovers reads none",
    ),
    Mutation(
        "the last step's record stays overwritten by its reset",
        "worker/worker.py",
        "                self._transitions.write(env_id, last)\n            elif",
        "                pass\n            elif",
        blind=True,
    ),
    Mutation(
        "last steps are not sent before a deadly reset",
        "worker/worker.py",
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
        "block/block_transitions.py",
        "if slot.request is not None or slot.skips or not slot.has_reset:  # in",
        "if slot.request is not None or not slot.has_reset:  # in",
        blind=True,
        survives=("the simulation has no masks; test_action_masks_of_an_idle_environment_that_was_restarted fails"),
    ),
    Mutation(
        "an idle environment has masks in arrays after its restart",
        "block/block_transitions.py",
        "            or slot.skips\n",
        "",
        blind=True,
        survives=("the simulation has no masks; test_action_masks_of_an_idle_environment_that_was_restarted fails"),
    ),
    Mutation(
        "masks of the environment before a restart stay",
        "block/block_transitions.py",
        "            self._masks.pop(env_id, None)\n            self._set_latest(env_id, _UNKNOWN)",
        "            self._set_latest(env_id, _UNKNOWN)",
        blind=True,
        survives="nothing is wrong: before its first reset, none are returned; its result replaces them",
    ),
    Mutation(
        "stacked actions are not marked",
        "block/block_transitions.py",
        "        if stacked:\n            self.action_records.mark_stacked(env_ids)\n",
        "",
        blind=True,
        survives="simulated actions have no arrays; test_numbers_out_of_arrays_are_scalars fails",
    ),
    Mutation(
        "without compiled code, stacked actions are no scalars",
        "block/records.py",
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
        "worker/worker.py",
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
        "        self.called = self.clock()\n        try:",
        "        try:",
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
        "if isinstance(error, WorkerTimeout):\n                while_closing",
        "if False:\n                while_closing",
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
        "an environment that has moved waits again",
        "pool/replacement.py",
        "(_P.MOVES, _E.BEGAN): _P.GOES_ON",
        "(_P.MOVES, _E.BEGAN): _P.WAITS",
    ),
    Mutation(
        "a fault during a move loses the last step",
        "pool/restarts.py",
        "            return Owed(owed.message, owed.transition)\n",
        "            return Owed(Message.RESET, owed.transition)\n",
    ),
    Mutation(
        "an environment that waits for its successor goes on waiting after a fault",
        "pool/replacement.py",
        "(_P.WAITS, _E.FAILS): _P.RESTARTS",
        "(_P.WAITS, _E.FAILS): _P.WAITS",
    ),
    Mutation(
        "observations of before a reset are kept",
        "pool/restarts.py",
        "record.latest, record.keywords, record.needs_reset, record.reported = leftovers, None, False, None",
        "record.latest, record.keywords, record.needs_reset = leftovers, None, False",
    ),
    Mutation(
        "the keywords of a reset are kept",
        "pool/restarts.py",
        "record.latest, record.keywords, record.needs_reset, record.reported = leftovers, None, False, None",
        "record.latest, record.needs_reset, record.reported = leftovers, False, None",
    ),
    Mutation(
        "a slot skips for ever",
        "pool/replacement.py",
        "(_P.RESTARTS, _E.RESTARTED): _P.GOES_ON",
        "(_P.RESTARTS, _E.RESTARTED): _P.RESTARTS",
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
        "        self.sees_steps = True\n        if owed.message is None:",
        "        if owed.message is None:",
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
        "record.latest = record.reported = slot.owed_if_ended = None",
        "record.latest = record.reported = None",
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
        "return _SavedRecord(slot.owed, record.counted,",
        "return _SavedRecord(None, record.counted,",
    ),
    Mutation(
        "a loaded restart is not reported",
        "pool/restarts.py",
        "            slot.note(Event.LOADED, saved.fault)\n",
        "            pass\n",
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
        "worker/worker.py",
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
        "worker/worker.py",
        "with self._status.during(env_id, Activity.CLOSE):\n                close_quietly",
        "with contextlib.nullcontext():\n                close_quietly",
    ),
    Mutation(
        "standbys keep the seeds from before a load",
        "pool/saved_states.py",
        '        self._pool.in_call("", self.rebuilds.outdate, env_ids)',
        "        pass",
    ),
    Mutation(
        "a loaded environment counts no rebuilds",
        "pool/rebuilds.py",
        "_RebuildState(count, Counter(restarts), remembered, options)",
        "_RebuildState(0, Counter(restarts), remembered, options)",
    ),
    Mutation(
        "a loaded environment is recycled later",
        "pool/recycling.py",
        "_RecyclingState(now, ended - episodes, recycled_before)",
        "_RecyclingState(now, ended, recycled_before)",
    ),
    Mutation(
        "a loaded environment has the options of the present one",
        "worker/worker.py",
        "        runner.options = new.options\n",
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
        "block/statistics.py",
        "self.ended[env_id], self._loaded[env_id] = sums.ended, sums",
        "self.ended[env_id] = sums.ended",
    ),
    Mutation(
        "leftovers of the step before go with a newer record",
        "block/block_transitions.py",
        "possible = [one for one in (leftovers, None, no_infos) if self._own.goes_with(env_id, one)]",
        "possible = [leftovers]",
    ),
    Mutation(
        "infos that are lost take their transition along",
        "block/block_transitions.py",
        "possible = [one for one in (leftovers, None, no_infos) if",
        "possible = [one for one in (leftovers,) if",
    ),
    Mutation(
        "an episode that has ended keeps its beginning",
        "worker/env_runner.py",
        "if (last := bits & ~BEGAN)}",
        "if (last := bits)}",
    ),
    Mutation(
        "an automatic reset forgets the last observations",
        "worker/env_runner.py",
        "final_observations=last.observations, reset_infos=first.infos,",
        "final_observations={}, reset_infos=first.infos,",
    ),
    Mutation(
        "the last step before a move has the observations of the next episode",
        "worker/env_runner.py",
        "observations=transition.observations if observations is None else observations,",
        "observations=transition.observations,",
    ),
    Mutation(
        "a mark replaces the infos of the whole environment",
        "worker/env_runner.py",
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
        "block/records.py",
        "PICKLED | (FINAL if transition.final_observations is not None else 0)",
        "PICKLED",
    ),
    Mutation(
        "actions that are pickled are left in the block, too",
        "worker/worker.py",
        "loads(payload[env_id]) if payload and env_id in payload else self._actions.read(env_id)",
        "self._actions.read(env_id)",
    ),
    Mutation(
        "the result of a restart says that the episode is over",
        "pool/restarts.py",
        "result = Snapshot(transition, over=False, states=states, mark=Mark.RESTARTED)",
        "result = Snapshot(transition, over=True, states=states, mark=Mark.RESTARTED)",
    ),
    Mutation(
        "a successor that is missing counts as ready",
        "pool/recycling.py",
        "slot.successor in (Successor.NONE, Successor.MISSING)",
        "slot.successor is Successor.NONE",
    ),
    Mutation(
        "a dead successor counts as ready",
        "pool/replacement.py",
        "(_S.MISSING, _A.NOTHING) for one in Successor if one is not _S.NONE",
        "(_S.READY, _A.NOTHING) for one in Successor if one is not _S.NONE",
    ),
    Mutation(
        "a successor given up stays",
        "pool/replacement.py",
        "{(one, _E.GIVEN_UP): (_S.NONE, _A.NOTHING)",
        "{(one, _E.GIVEN_UP): (one, _A.NOTHING)",
    ),
    Mutation(
        "a successor that changes while it is built is not built again",
        "pool/replacement.py",
        "(_S.BEING_BUILT, _E.CHANGES): (_S.OUTDATED, _A.NOTHING)",
        "(_S.BEING_BUILT, _E.CHANGES): (_S.BEING_BUILT, _A.NOTHING)",
    ),
    Mutation(
        "a ready successor keeps the seed that has changed",
        "pool/replacement.py",
        "(_S.READY, _E.CHANGES): (_S.BEING_BUILT, _A.CONSTRUCT)",
        "(_S.READY, _E.CHANGES): (_S.READY, _A.NOTHING)",
    ),
    Mutation(
        "an environment restarted on request still reports its fault",
        "pool/replacement.py",
        "(_P.REPORTS, _E.REPLACED): _P.GOES_ON",
        "(_P.REPORTS, _E.REPLACED): _P.REPORTS",
    ),
    Mutation(
        "the second fault of a rebuild is lost",
        "pool/restarts.py",
        "        if owed is not None and (slot.present is Present.RESTARTS or idle):\n",
        "        if owed is not None and idle:\n",
    ),
    Mutation(
        "a reset while an environment is rebuilt is sent at once",
        "pool/restarts.py",
        "            return not is_rebuilding\n        if slot.present",
        "            return True\n        if slot.present",
    ),
    Mutation(
        "an environment waits for a standby that has been given up",
        "pool/recycling.py",
        "slot.note(Event.GIVEN_UP)\n            self._stay(slot)\n",
        "slot.note(Event.GIVEN_UP)\n",
    ),
    Mutation(
        "the first transition of a successor is taken twice",
        "pool/recycling.py",
        "if env_id not in reply.failures and slot.present is Present.MOVES:",
        "if env_id not in reply.failures:",
    ),
    Mutation(
        "an environment without all agents may have any after a restart",
        "pool/rebuilds.py",
        "            positions=of_this,\n",
        "            positions=None,\n",
    ),
    Mutation(
        "an environment knows only its own agents",
        "worker/worker.py",
        "self._runners[env_id].use_records_of(layout.schema.possible_agents)",
        "layout",
    ),
    Mutation(
        "a loaded environment knows only its own agents",
        "worker/worker.py",
        "            runner.use_records_of(self._layout.schema.possible_agents)",
        "            pass",
    ),
    Mutation(
        "agents act in the order of their own environment",
        "worker/env_runner.py",
        "rank = {agent: position for position, agent in enumerate(self.agents)}",
        "rank = {agent: position for position, agent in enumerate(self.env.possible_agents)}",
    ),
    Mutation(
        "environments must have all agents after a restart",
        "schema.py",
        "    if positions is not None:\n        expected",
        "    if False:\n        expected",
    ),
    Mutation(
        "the order of agents is that of the first environment that has them",
        "schema.py",
        "for position in sorted(own)]",
        "for position in own]",
    ),
    Mutation(
        "a fault during a move at the caller's reset loses the keywords of that reset",
        "pool/restarts.py",
        ("            record.keywords = owed.keywords\n            return Owed(owed.message, owed.transition)\n"),
        "            return Owed(owed.message, owed.transition)\n",
        blind=True,
    ),
    Mutation(
        "the report of an environment whose episode was over counts as another end",
        "pool/restarts.py",
        "        return ends + (slot.has_reset and not over)\n",
        "        return ends + slot.has_reset\n",
        blind=True,
    ),
    Mutation(
        "a fault in a reset that waited for a rebuild loses its keywords",
        "pool/restarts.py",
        (
            "                record.keywords, record.waiting_reset = record.waiting_reset, None\n"
            "                request = Request(Message.RESET, (env_id,), {env_id: record.keywords}, each=True)\n"
        ),
        (
            "                keywords, record.waiting_reset = record.waiting_reset, None\n"
            "                request = Request(Message.RESET, (env_id,), {env_id: keywords}, each=True)\n"
        ),
        blind=True,
    ),
    Mutation(
        "a first reset that is not received counts as none when its worker dies",
        "pool/restarts.py",
        (
            "        if slot.request is Message.RESET:\n"
            "            slot.has_reset = True\n"
            "        if type(slot.result) is not Snapshot:\n"
        ),
        "        if type(slot.result) is not Snapshot:\n",
        blind=True,
    ),
    Mutation(
        "an environment that fails before its first reset is reset at once",
        "pool/restarts.py",
        (
            "        if slot.owed.message is None and not slot.has_reset:\n"
            "            return False\n"
            "        return slot.owed.message is Message.RESET or self._same_step\n"
        ),
        "        return slot.owed.message is Message.RESET or self._same_step\n",
        blind=True,
    ),
    Mutation(
        "successors have the seed of the environment that was rebuilt",
        "pool/restarts.py",
        (
            "        payload = {slot.env_id: self._request(slot, fault.error) for slot in slots}\n"
            "        pool.post({worker: Request(Message.CONSTRUCT, tuple(payload), payload, each=True)}, "
            "self._on_rebuilt)\n"
            "        self._rebuilds.outdate([*payload])\n"
        ),
        (
            "        self._rebuilds.outdate([slot.env_id for slot in slots])\n"
            "        payload = {slot.env_id: self._request(slot, fault.error) for slot in slots}\n"
            "        pool.post({worker: Request(Message.CONSTRUCT, tuple(payload), payload, each=True)}, "
            "self._on_rebuilt)\n"
        ),
        blind=True,
    ),
    Mutation(
        "a failed replacement is counted as a rebuild also before the first reset",
        "pool/recycling.py",
        ("            if slot.has_reset:\n                self._rebuilds.add(slot.env_id)\n        if not self._pool"),
        "            self._rebuilds.add(slot.env_id)\n        if not self._pool",
        blind=True,
    ),
    Mutation(
        "the refusal of an outdated successor counts",
        "pool/recycling.py",
        "            if slot.env_id in failed and not was_outdated:\n",
        "            if slot.env_id in failed:\n",
        blind=True,
    ),
    Mutation(
        "the end of the episode at which an environment moves is counted for the new environment",
        "pool/recycling.py",
        "        self._pool.announce_rebuild([slot], [int(slot.owed.message is Message.STEP)])\n",
        "        self._pool.announce_rebuild([slot], [0])\n",
        blind=True,
    ),
    Mutation(
        "a reset that was held back for a move and then stays is posted past the later extensions",
        "pool/recycling.py",
        (
            "        if self._pool.pass_on(self, request.message, (slot.env_id,), request.payload):\n"
            "            self._pool.post({slot.worker: request})\n"
        ),
        "        self._pool.post({slot.worker: request})\n",
        blind=True,
    ),
    Mutation(
        "successors that are being built survive the death of their standby",
        "pool/recycling.py",
        (
            "                    for slot in standby.left:\n"
            "                        slot.note(Event.DIES)\n"
            "                    self._episodes_seen"
        ),
        (
            "                    for slot in standby.left:\n"
            "                        if slot.successor is Successor.READY:\n"
            "                            slot.note(Event.DIES)\n"
            "                    self._episodes_seen"
        ),
        blind=True,
    ),
    Mutation(
        "an environment past its limit again may move twice in one call",
        "pool/recycling.py",
        "        if standby is None and has_had_all and position not in self._split:\n",
        "        if standby is None and has_had_all:\n",
        blind=True,
    ),
    Mutation(
        "environments wait for ever if the next standby cannot be started",
        "pool/recycling.py",
        (
            "            self._warn(position, env_ids, str(error))\n"
            "            for slot in [self._pool.slots[env_id] for env_id in env_ids]:\n"
            "                self._stay(slot)\n"
            "            return\n"
        ),
        "            self._warn(position, env_ids, str(error))\n            return\n",
        blind=True,
    ),
    Mutation(
        "a successor that became outdated while it was constructed counts as ready",
        "pool/replacement.py",
        "    (_S.OUTDATED, _E.BUILT): (_S.BEING_BUILT, _A.CONSTRUCT),\n",
        "    (_S.OUTDATED, _E.BUILT): (_S.READY, _A.NOTHING),\n",
        blind=True,
    ),
    Mutation(
        "what a dead worker had not begun counts as finished by the batch before",
        "pool/pool.py",
        "        if not queue.one_reply or status.parts < queue.requests[0].number:  # it had not begun\n",
        "        if not queue.one_reply:\n",
        blind=True,
    ),
    Mutation(
        "the counts of a dead worker are read only after its successor has started",
        "pool/pool.py",
        (
            "            queue.past = self._done_by(worker)\n"
            "            self.backend.start_worker(worker, queue.built)\n"
        ),
        (
            "            self.backend.start_worker(worker, queue.built)\n"
            "            queue.past = self._done_by(worker)\n"
        ),
        blind=True,
    ),
    Mutation(
        "the first reset after a restart leaves out options of later resets",
        "pool/rebuilds.py",
        (
            "            options = record.remembered\n"
            "            if begins is Begins.AT_ONCE:\n"
            "                options = merged_options(options, _unpickled(record.options))\n"
            "            keywords"
        ),
        "            options = record.remembered\n            keywords",
        blind=True,
    ),
    Mutation(
        "a refused load drops only what was refused",
        "pool/saved_states.py",
        "        if refused:\n            pool.execute_in(Message.TAKE_OVER, states, False)\n",
        "        if refused:\n            pool.execute_in(Message.TAKE_OVER, refused, False)\n",
        blind=True,
    ),
    Mutation(
        "only the environment that fails in a load counts as rebuilt",
        "pool/saved_states.py",
        "if self.rebuilds.restarts(env_id) == before[env_id]}",
        "if fault is None or env_id not in fault.env_ids}",
        blind=True,
    ),
    Mutation(
        "a load forgets a restart that was saved before its report",
        "pool/saved_states.py",
        (
            "        slot.note(Event.REPLACED)\n"
            "        self._transitions.begin((env_id,))\n"
            "        self._transitions.statistics.load(env_id, state.statistics)\n"
            "        pool.load_extensions(slot, state.extensions)\n"
        ),
        (
            "        self._transitions.begin((env_id,))\n"
            "        self._transitions.statistics.load(env_id, state.statistics)\n"
            "        pool.load_extensions(slot, state.extensions)\n"
            "        slot.note(Event.REPLACED)\n"
        ),
        blind=True,
    ),
    Mutation(
        "a loaded environment is not closed by the next load",
        "worker/worker.py",
        "        self._closed.discard(env_id)\n",
        "",
        blind=True,
    ),
    Mutation(
        "the rebuild after a failed reset uses the caller's seed again",
        "worker/worker.py",
        '        keywords = {name: value for name, value in keywords.items() if name != "seed"}\n',
        "",
        blind=True,
    ),
    Mutation(
        "an environment that takes over has no timeout before it begins",
        "pool/timeouts.py",
        (
            "        if running is None and request is Message.TAKE_OVER and self.limits[activity] is None:\n"
            "            activity = next(one for one in LIMITED_BY[request] if self.limits[one] is not None)\n"
        ),
        "",
        blind=True,
    ),
    Mutation(
        "the late constructor of a successor holds the result of the present environment",
        "pool/timeouts.py",
        "            late = [slot for slot in [pool.slots[running.env_id]] if slot.worker == worker]\n",
        "            late = [pool.slots[running.env_id]]\n",
        blind=True,
    ),
    Mutation(
        "a reset of the present environment is one of its successor in a replay",
        "pool/replay.py",
        "                if (beside := self._beside.get(env_id)) is not None and beside[0] == worker:\n",
        "                if (beside := self._beside.get(env_id)) is not None:\n",
        blind=True,
    ),
]
