"""User-defined facades with `ArrayStepper`, and the public array interface."""

from __future__ import annotations

import ast
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from helpers import ROOT
from mpe2 import simple_spread_v3
from simulators.unfit_rewards import BAD, UnfitRewards

from marl_parallel import ParallelEnv
from marl_parallel.core.block.array_view import ResultDoesNotFit
from marl_parallel.vector import Arrays, ArrayStepper, Stacked

PACKAGE = ROOT / "marl_parallel"
NUM_ENVS = 3


class JointVecEnv:
    """One learner observes all agents; its reward is the sum of their rewards."""

    def __init__(self, env: ParallelEnv, *modes: AutoresetMode, **keywords: Any) -> None:
        self.stepper = ArrayStepper(env, self, *modes, **keywords)
        self.agents = tuple(self.stepper.view.agents)

    def reset(self, seed: int | None = None) -> Any:
        return self.joint(self.stepper.reset(seed))

    def step(self, actions: Any) -> Any:
        arrays = self.stepper.step([Stacked(self.agents, actions)])
        return self.joint(arrays), arrays.rewards.sum(axis=1), arrays.terminated | arrays.truncated

    def joint(self, arrays: Arrays) -> Any:
        (observations,) = arrays.observations
        return observations.reshape(len(observations), -1)


@pytest.fixture
def spread():
    envs = []

    def make(*args: Any, **keywords: Any) -> ParallelEnv:
        env = ParallelEnv([simple_spread_v3.parallel_env] * NUM_ENVS, *args, **keywords, backend="serial")
        envs.append(env)
        return env

    yield make
    for env in envs:
        env.close()


def test_send_and_receive(spread):
    stepper = JointVecEnv(spread()).stepper
    stepper.reset()
    with pytest.raises(NoAsyncCallError):
        stepper.receive()
    stepper.send_dicts([dict.fromkeys(stepper.view.agents, 1)] * NUM_ENVS)
    with pytest.raises(AlreadyPendingCallError):
        stepper.step({})
    for timeout, error in ((-1, ValueError), ("soon", TypeError)):  # the step can still be received
        with pytest.raises(error):
            stepper.receive(timeout)
    assert stepper.receive().rewards.shape == (NUM_ENVS, 3)


@pytest.mark.parametrize("path", sorted([*(PACKAGE / "vector").glob("*.py"), PACKAGE / "recording.py"]), ids=str)
def test_facades_use_no_private_attribute_of_another_object(path):
    """Private attributes of `self`, `super()` results and modules are allowed."""
    private = {
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value) not in ("self", "super()")
    }
    assert not private


# -- values that do not fit the arrays ---------------------------------------------------------------------------------


class Own:
    """A facade."""


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("failing", [[1], [0, 2], [3], [0, 1, 2, 3]])
def test_results_of_others_are_not_lost(failing, shared_memory):
    """After the error, `receive_some` returns the results of the other environments of the same call."""
    with ParallelEnv([UnfitRewards] * 4, False, backend="serial", shared_memory=shared_memory) as env:
        facade = Own()
        stepper = ArrayStepper(env, facade, partial_resets=True)
        stepper.reset()
        stepper.send_some([{"agent_0": BAD if env_id in failing else 1} for env_id in range(4)], range(4))
        text = f"environment {failing[0]}: the reward of agent 'agent_0' is 'many'"
        with pytest.raises(ResultDoesNotFit, match=text) as caught:
            stepper.receive_some(4)
        assert [*caught.value.env_ids] == failing
        good = [env_id for env_id in range(4) if env_id not in failing]
        assert not env.pending
        stepper.send_some([{"agent_0": 0}] * len(failing), failing)
        received: dict[int, tuple[float, float]] = {}
        while len(received) < 4:
            stepped, begun, arrays = stepper.receive_some(4 - len(received))
            assert not begun
            received |= {one: (arrays.observations[0][one, 0, 0], arrays.rewards[one, 0]) for one in stepped}
        assert received == {**dict.fromkeys(good, (1.0, 1.0)), **dict.fromkeys(failing, (2.0, 0.0))}
        with pytest.raises(NoAsyncCallError):
            stepper.receive_some(1)


def test_results_that_were_kept_go_with_later_ones():
    """Also resets; fewer than are asked for are returned only if nothing else is in flight."""
    with ParallelEnv([UnfitRewards] * 4, False, backend="serial") as env:
        facade = Own()
        stepper = ArrayStepper(env, facade, partial_resets=True)
        stepper.reset()
        stepper.send_some([{"agent_0": BAD}, {"agent_0": 1}], [0, 1])
        stepper.send_some_resets([3])
        with pytest.raises(ResultDoesNotFit):
            stepper.receive_some(3)
        stepper.send_some([{"agent_0": BAD}], [0])
        with pytest.raises(ResultDoesNotFit):
            stepper.receive_some(3)
        stepper.send_some([{"agent_0": 0}], [2])
        stepped, begun, arrays = stepper.receive_some(3)
        assert (stepped, begun) == ((1, 2), (3,))
        assert arrays.rewards[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0]
        assert arrays.observations[0][:, 0, 0].tolist()[1:] == [1.0, 1.0, 0.0]


def test_results_that_wait_are_of_this_episode():
    """They are gone after a reset, and an environment is not stepped before its result has been received."""
    with ParallelEnv([UnfitRewards] * 3, False, backend="serial") as env:
        facade = Own()
        stepper = ArrayStepper(env, facade, partial_resets=True)
        stepper.reset()

        def fail() -> ResultDoesNotFit:
            stepper.send_some([{"agent_0": BAD}, {"agent_0": 1}, {"agent_0": 1}], range(3))
            with pytest.raises(ResultDoesNotFit) as caught:
                stepper.receive_some(3)
            return caught.value

        error = pickle.loads(pickle.dumps(fail()))
        assert type(error) is ValueError
        assert "the reward of agent 'agent_0' is 'many'" in str(error)
        joint = [Stacked(("agent_0",), np.ones((3, 1)))]
        for step in [
            lambda: stepper.send_some([{"agent_0": 1}], [1]),
            lambda: stepper.send(joint),
            lambda: stepper.step(joint),
        ]:
            with pytest.raises(AlreadyPendingCallError, match=r"environments \[1(, 2)?\], whose results have not been"):
                step()
        stepper.reset(env_ids=[1])
        assert stepper.receive_some(1)[:2] == ((2,), ())
        fail()
        stepper.reset()
        stepper.send_some([{"agent_0": 0}], [2])
        assert stepper.receive_some(1)[:2] == ((2,), ())
        fail()
        stepper.send_some_resets([2])
        assert stepper.receive_some(2)[:2] == ((1,), (2,))
