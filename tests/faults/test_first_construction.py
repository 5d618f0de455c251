"""Faults in the first construction of environments, and in that of a restart, with `on_error="restart"`."""

from __future__ import annotations

import functools

import pytest
from helpers.processes import gone, workers
from helpers.start_methods import arguments
from simulators.failing import Fragile, SimulatorError, hang, hard_exit, raising

from marl_parallel import (
    EnvError,
    ParallelEnv,
    RestartEvent,
    RestartLimitExceeded,
    RestartPolicy,
    WorkerCrashed,
    WorkerTimeout,
)

pytestmark = pytest.mark.release_independent


FIRST_FAULTS = {
    "exception": (raising(SimulatorError, "no licence"), EnvError, "no licence"),
    "death": (hard_exit, WorkerCrashed, "exit code 7"),
    "hang": (hang, WorkerTimeout, "if it needs longer, raise start_timeout"),
}


@pytest.mark.parametrize("fault", FIRST_FAULTS)
def test_first_construction_raises_also_with_restarts(fault, start_method, tmp_path):
    """The error says so, and everything is closed; the same fault in a restart counts against the policy."""
    cause, kind, text = FIRST_FAULTS[fault]
    events: list[RestartEvent] = []
    with pytest.raises(kind) as caught:
        ParallelEnv(
            [functools.partial(Fragile, {}, tmp_path), functools.partial(Fragile, {"constructor": cause}, tmp_path)],
            num_workers=2,
            seed=1,
            on_error="restart",
            on_restart=events.append,
            start_timeout=3.0 if fault == "hang" else 60.0,
            **arguments(start_method),
        )
    assert caught.value.env_ids == (1,)
    assert text in str(caught.value)
    assert 'a fault in the first construction is always raised, also with on_error="restart".' in str(caught.value)
    assert events == []
    assert gone(workers(tmp_path))


def test_constructor_of_a_restart_counts_against_the_policy(backend_setup, build, tmp_path):
    def constructor(env_id, seed, restarts):
        faults = {"constructor" if restarts else "step": raising(SimulatorError, "no licence")}
        return Fragile(faults, tmp_path, env_id=env_id, seed=seed)

    policy = RestartPolicy(max_restarts=3)
    env = build([constructor], backend_setup, on_error="restart", restart_policy=policy)
    env.reset()
    with pytest.raises(RestartLimitExceeded) as caught:
        env.step([{"a": 0, "b": 0}])
    assert caught.value.__cause__.method == "constructor"
    assert "first construction" not in str(caught.value.__cause__)
