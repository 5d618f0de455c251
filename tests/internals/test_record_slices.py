"""Record slices, for workers without shared memory: they arrive, and nothing else is written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from gymnasium import spaces

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import ActionRecords, RecordSlices, TransitionRecords
from marl_parallel.core.messages import Message
from marl_parallel.core.transition import Transition
from marl_parallel.core.worker_status import Activity, WorkerStatus

pytestmark = pytest.mark.release_independent

AGENTS = ["a", "b"]
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
SCHEMA = Schema(AGENTS, dict.fromkeys(AGENTS, BOX), dict.fromkeys(AGENTS, spaces.Discrete(9)), BOX)
ID_SETS = [range(4), (1, 2), (3, 0), (2,)]


class End:
    """A block with its readers and writers."""

    def __init__(self, *, compiled: bool = True) -> None:
        self.layout = Layout(SCHEMA, 4)
        self.buffer = bytearray(self.layout.nbytes)
        self.layout.bind(self.buffer)
        self.actions = ActionRecords(self.layout, self.buffer)
        codec = open_codec(self.layout, self.buffer, infos_in_block=False) if compiled else None
        self.transitions = TransitionRecords(self.layout, self.buffer, codec=codec)
        self.slices = RecordSlices(self.layout, self.buffer)

    def write_actions(self, of_agents: Mapping[str, list[int]]) -> None:
        """Write the actions of each agent in all records."""
        self.layout.actions.write_stacked({agent: np.array(actions) for agent, actions in of_agents.items()})
        self.actions.mark_present(None)


def results_of(number: int, *, last: bool = False) -> Transition:
    observations = {agent: np.full(3, number / 10 + place / 100, np.float32) for place, agent in enumerate(AGENTS)}
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    flags = {**dict.fromkeys(AGENTS, last), "__all__": last}
    final = {agent: -value for agent, value in observations.items()} if last else None
    rewards = dict.fromkeys(AGENTS, float(number))
    infos: dict = {agent: {} for agent in AGENTS}
    return Transition(observations, rewards, no, flags, infos, AGENTS, AGENTS, final, {} if last else None)


@pytest.mark.parametrize("env_ids", ID_SETS, ids=str)
def test_actions_arrive(env_ids):
    here, there = End(), End()
    here.write_actions({"a": [0, 1, 2, 3], "b": [1, 2, 3, 4]})
    before = bytes(there.buffer)
    there.slices.put_actions(env_ids, here.slices.actions(env_ids))
    for env_id in env_ids:
        assert there.actions.read(env_id) == {"a": env_id, "b": env_id + 1}
    untouched = [env_id for env_id in range(4) if env_id not in env_ids]
    stride = there.layout.stride
    for env_id in untouched:
        assert there.buffer[env_id * stride : (env_id + 1) * stride] == before[env_id * stride : (env_id + 1) * stride]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("env_ids", ID_SETS, ids=str)
def test_results_arrive(env_ids, last, compiled):
    """With last observations if there are any, and without their space if there are none."""
    here, there = End(compiled=compiled), End(compiled=compiled)
    leftovers = [here.transitions.write(env_id, results_of(env_id, last=last and env_id == 2)) for env_id in range(4)]
    slices = here.slices.results(env_ids, Message.STEP)
    head, step_end = here.layout.transition_header, here.layout.step_end
    whole = last and 2 in env_ids
    assert slices.shape == (len(env_ids), (here.layout.stride if whole else step_end) - head)
    assert slices.flags.c_contiguous
    there.slices.put_results(env_ids, slices)
    for env_id in env_ids:
        theirs = there.transitions.read(env_id, leftovers[env_id])
        np.testing.assert_equal(tuple(theirs), tuple(here.transitions.read(env_id, leftovers[env_id])))
        assert (theirs.final_observations is not None) == (last and env_id == 2)


def test_states_arrive():
    here, there = End(), End()
    assert here.layout.state is not None
    assert there.layout.state is not None
    here.layout.state.write(1, 0, np.array([0.1, 0.2, 0.3], np.float32))
    there.slices.put_results((1,), here.slices.results((1,), Message.STATE))
    np.testing.assert_array_equal(there.layout.state.array[1, 0], here.layout.state.array[1, 0])


def test_whole_records_arrive_without_actions():
    here, there = End(), End()
    leftovers = [here.transitions.write(env_id, results_of(env_id, last=env_id == 1)) for env_id in range(4)]
    for end, action in ((here, 7), (there, 5)):
        end.write_actions(dict.fromkeys(AGENTS, [action] * 4))
    there.slices.put_records((1, 2), here.slices.records((1, 2)))
    for env_id in (1, 2):
        ours, theirs = (end.transitions.read(env_id, leftovers[env_id]) for end in (here, there))
        np.testing.assert_equal(tuple(theirs), tuple(ours))
        assert there.actions.read(env_id) == dict.fromkeys(AGENTS, 5)
    assert not there.transitions.goes_with(3, None)  # nothing has ever been written there


def test_status_of_another_machine():
    """Complete, with times on this machine's clock; the parent's own fields are unchanged."""
    theirs, ours = WorkerStatus(bytearray(WorkerStatus.NBYTES)), WorkerStatus(bytearray(WorkerStatus.NBYTES))
    theirs.begin_request()
    theirs.enter(3, Activity.STEP)
    ours.discard()
    ours.copy_from(bytes(theirs._view), -100.0)
    assert ours.running == theirs.running._replace(since=theirs.running.since - 100.0)
    assert ours.discarded
    assert not theirs.discarded
    early = theirs.copy()
    theirs.leave()
    theirs.end_request()
    ours.copy_from(bytes(theirs._view), 100.0)
    assert (ours.stats.steps, ours.running, ours.settled) == (1, None, 3)
    ours.copy_from(early, 100.0)  # arrives late
    assert (ours.stats.steps, ours.running, ours.settled) == (1, None, 3)
    assert ours.stats.simulator_s == theirs.stats.simulator_s
