"""`sequences` cuts rollouts like a loop in plain Python over each agent's observations, and puts values back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.batches import grouped_actions
from hypothesis import given, settings
from hypothesis import strategies as st
from mpe2 import simple_tag_v3
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.variable_agents import VariableAgents

from marl_parallel import ParallelEnv, Rollout, RolloutArrays, Sequences, sequences
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

Step = tuple[int, int, int]


def reference(observed: Any, begins: Any, acting: Any, length: int) -> list[tuple[list[Step], list[bool], bool]]:
    """The steps of each sequence, at which of them the agent acts, and whether it is fresh, by a plain loop."""
    steps, num_envs, num_agents = observed.shape[0] - 1, *observed.shape[1:]
    found = []
    for env_id in range(num_envs):
        for agent in range(num_agents):
            lives: list[list[int]] = []
            for t in range(steps):
                if observed[t, env_id, agent]:
                    if begins[t, env_id, agent] or not lives:
                        lives.append([])
                    lives[-1].append(t)
            for life in lives:
                while life:
                    piece, life = life[:length], life[length:]
                    acts = [bool(acting[t, env_id, agent]) for t in piece]
                    if any(acts):
                        fresh = bool(begins[piece[0], env_id, agent])
                        found.append(([(t, env_id, agent) for t in piece], acts, fresh))
    return found


def check(cut: Sequences, data: RolloutArrays, length: int) -> None:
    """Compare with the plain loop, also what `cut` and `put_back` return."""
    expected = reference(data.observed, data.begins, data.acting, length)
    steps, num_envs, num_agents = data.rewards.shape
    assert cut.times.shape == cut.mask.shape == cut.acting.shape == (len(expected), length)
    numbered = np.arange(data.observed.size).reshape(data.observed.shape)
    entries, short = cut.cut(numbered), cut.cut({"a": (numbered[:-1],)})["a"][0]
    assert np.array_equal(entries, short)
    firsts = numbered[cut.first]
    back = np.full((steps, num_envs, num_agents), -1)
    for row, (places, acts, fresh) in enumerate(expected):
        size = len(places)
        assert entries[row, :size].tolist() == [numbered[place] for place in places]
        assert (entries[row, size:] == entries[row, size - 1]).all()
        assert cut.mask[row].tolist() == [True] * size + [False] * (length - size)
        assert cut.acting[row].tolist() == acts + [False] * (length - size)
        assert bool(cut.fresh[row]) == fresh
        assert firsts[row] == numbered[places[0]]
        for place in places:
            assert back[place] == -1
            back[place] = numbered[place]
    assert np.array_equal(cut.put_back(entries + 1), back + 1)
    # Every action is trained on once.
    acting = data.acting[:-1] & data.observed[:-1]
    assert np.array_equal(cut.put_back(cut.acting), acting)


NOTHING = dict.fromkeys(RolloutArrays._fields)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 9), sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
       length=st.integers(1, 12), chances=st.tuples(*[st.sampled_from([0.0, 0.2, 0.7, 1.0])] * 3))  # fmt: skip
def test_any_marks(seed, steps, sizes, length, chances):
    rng = np.random.default_rng(seed)
    observed, begins, acts = (rng.random((steps + 1, *sizes)) < chance for chance in chances)
    marks = {"observed": observed, "begins": begins & observed, "acting": acts & observed}
    data = RolloutArrays(**NOTHING | marks | {"rewards": rng.random((steps, *sizes))})
    check(sequences(data, length), data, length)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("kind", [ReturningAgents, ReturningPettingZooAgents, VariableAgents])
@pytest.mark.parametrize("length", [1, 4, 100])
def test_rollouts(kind, mode, length):
    """The second rollout begins in the middle of lives. Observations may be trees."""
    with StackedVecEnv(ParallelEnv([kind] * 2, mode, seed=3, backend="serial")) as env:
        rollout, rng = Rollout(env, 25), np.random.default_rng(1)
        for _ in range(2):
            data = rollout.collect(lambda _: grouped_actions(env, rng))
            cut = sequences(data, length)
            check(cut, data, length)
            lives = data.begins[cut.times, cut.env_ids[:, None], cut.agents[:, None]] & cut.mask
            assert not lives[:, 1:].any()
            assert cut.fresh.any()
            if kind is VariableAgents:
                views = cut.cut(data.observations)["view"]
                assert np.array_equal(views[cut.mask], cut.cut(data.observations["view"])[cut.mask])
        assert not cut.fresh.all()


def test_a_recurrent_policy_computes_the_same_again():
    """From the stored hidden states, sequences lead through the hidden states that the policy had at each step."""
    with StackedVecEnv(ParallelEnv([ReturningAgents] * 2, seed=3, num_workers=2)) as env:
        rollout = Rollout(env, 40, extras={"hidden": (3,)}, halves=2)
        hidden = np.zeros((2, 3, 3), np.float32)
        rng = np.random.default_rng(1)

        def after(before: np.ndarray, observations: np.ndarray) -> np.ndarray:
            return np.tanh(0.5 * before + observations[..., :1] / 9)

        def act(current: Any) -> Any:
            of_part = hidden[current.env_ids.start : current.env_ids.stop]
            of_part[current.begins] = 0
            before = of_part.copy()
            of_part[current.observed] = after(before, current.observations)[current.observed]
            return rng.integers(3, size=current.acting.shape), {"hidden": before}

        for _ in range(2):
            data = rollout.collect(act)
            cut = sequences(data, 5)
            stored, observations = cut.cut(data.extras["hidden"]), cut.cut(data.observations)
            assert not stored[cut.fresh, 0].any()
            state = data.extras["hidden"][cut.first]
            for step in range(5):
                assert np.array_equal(state[cut.mask[:, step]], stored[cut.mask[:, step], step])
                state = after(state, observations[:, step])
            assert stored[:, 0].any()


def test_groups():
    with StackedVecEnv(ParallelEnv([simple_tag_v3.parallel_env] * 2, seed=3, backend="serial")) as env:
        data = Rollout(env, 6).collect(lambda _: grouped_actions(env, np.random.default_rng(1)))
        with pytest.raises(TypeError, match=r"has the groups \['adversary', 'agent'\]: pass data.group\(name\)"):
            sequences(data, 3)
        group = data.group("adversary")
        cut = sequences(group, 3)
        assert cut.shape == (6, 2, 3)
        assert cut.cut(group.observations).shape == (12, 3, *group.observations.shape[3:])
        assert np.array_equal(cut.put_back(cut.cut(group.rewards)), group.rewards)


def test_no_steps():
    """Nobody is observed, or nobody acts."""
    for observed in (False, True):
        marks = {name: np.full((5, 2, 3), observed) for name in ("observed", "begins")}
        data = RolloutArrays(**NOTHING | marks | {"acting": np.zeros((5, 2, 3), bool), "rewards": np.zeros((4, 2, 3))})
        cut = sequences(data, 6)
        assert cut.cut(np.zeros((4, 2, 3, 7))).shape == (0, 6, 7)
        assert cut.put_back(np.ones((0, 6, 7))).shape == (4, 2, 3, 7)
        assert not cut.put_back(np.ones((0, 6))).any()


def test_bad_input():
    marks = {name: np.ones((5, 2, 3), bool) for name in ("observed", "begins", "acting")}
    data = RolloutArrays(**NOTHING | marks | {"rewards": np.zeros((4, 2, 3))})
    for length, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match="length must be"):
            sequences(data, length)
    cut = sequences(data, 3)
    for shape in ((4, 2), (3, 2, 3), (6, 2, 3), (4, 3, 2), (4, 6)):
        with pytest.raises(ValueError, match=r"expected values of shape \(4, 2, 3\) or \(5, 2, 3\) and more axes, got"):
            cut.cut(np.zeros(shape))
    with pytest.raises(ValueError, match=r"expected values of shape \(24, 3\) and more axes, got \(24, 2\)"):
        cut.put_back(np.zeros((24, 2)))


@pytest.mark.needs("torch")
def test_tensors():
    import torch

    with StackedVecEnv(ParallelEnv([ReturningAgents] * 2, seed=3, backend="serial")) as env:
        rollout = Rollout(env, 12, extras={"hidden": (3,)})
        data = rollout.collect(lambda current: (np.ones((2, 3), np.int64), {"hidden": np.zeros((2, 3, 3))}))
        tensors, cut = rollout.torch(), sequences(data, 5)
        assert all(map(np.array_equal, sequences(tensors, 5)[:-1], cut[:-1]))
        observations = cut.cut(tensors.observations)
        assert torch.is_tensor(observations)
        assert np.array_equal(observations.numpy(), cut.cut(data.observations))
        assert tensors.extras["hidden"][cut.first].shape == (len(cut.fresh), 3)
