"""Random simulators, spaces and values, drawn by hypothesis, arrive unchanged."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.setups import rest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulators.deterministic import Scripted
from simulators.every_space import FLOATS, INTEGERS, Colour

from marl_parallel import ParallelEnv

AGENTS = ["zulu", "alpha", ("team", 1), 7]
STRANGERS = ["stranger", 8]

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
sizes = st.integers(1, 4)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = draw(st.sampled_from([*INTEGERS, *FLOATS]))
    low, high = (0, 100) if np.dtype(dtype).kind == "u" else (-100, 100)
    return spaces.Box(low, high, draw(shapes), dtype)


leaves = st.one_of(
    boxes(),
    st.builds(spaces.Discrete, sizes, start=st.integers(-5, 5)),
    st.lists(sizes, min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.lists(sizes, min_size=1, max_size=2).map(spaces.MultiBinary),
)
shared_spaces = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.text("abz", max_size=2), inner, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)
pickled_spaces = st.sampled_from(
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.OneOf((spaces.Discrete(2), spaces.Text(2))),
        Colour(),
    ]
)
any_space = st.one_of(shared_spaces, shared_spaces, shared_spaces, pickled_spaces)

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.floats(),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.lists(st.floats(), max_size=3).map(np.array),
)
flags = st.one_of(st.booleans(), st.booleans().map(np.bool_), st.integers(0, 1))
info = st.one_of(
    st.just({}),
    st.just({}),
    st.dictionaries(
        st.text(max_size=3), st.one_of(st.none(), st.floats(), st.text(), st.lists(st.integers())), max_size=3
    ),
)


def sample(draw: st.DrawFn, space: spaces.Space | None) -> Any:
    """A member of the space; any value for agents without a space."""
    if space is None:
        return draw(st.one_of(st.integers(), st.lists(st.text()), st.none()))
    space.seed(draw(st.integers(0, 2**31 - 1)))
    return space.sample()


def some_of(draw: st.DrawFn, keys: list[Any]) -> list[Any]:
    """Most often all agents in order; otherwise any of them in any order."""
    return keys if draw(st.booleans()) else draw(st.lists(st.sampled_from(keys), unique=True))


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Any, list[list[dict]]]:
    """The constructor of a scripted environment, and actions for each step of two environments."""
    declared = AGENTS[: draw(st.integers(0, len(AGENTS)))]
    observed = {agent: draw(any_space) for agent in declared}
    acted = {agent: draw(any_space) for agent in declared}
    keys = [*declared, *STRANGERS]

    def observe() -> dict[Any, Any]:
        return {agent: sample(draw, observed.get(agent)) for agent in some_of(draw, keys)}

    def infos() -> dict[Any, Any]:
        return {agent: draw(info) for agent in some_of(draw, [*keys, "__common__"])}

    def transition() -> tuple[dict, dict, dict, dict, dict]:
        ends = [*keys, "__all__"]
        rewards = {agent: draw(numbers) for agent in some_of(draw, keys)}
        terminateds, truncateds = ({agent: draw(flags) for agent in some_of(draw, ends)} for _ in range(2))
        return observe(), rewards, terminateds, truncateds, infos()

    steps = [transition() for _ in range(draw(st.integers(1, 4)))]
    constructor = functools.partial(
        Scripted,
        spaces.Dict(list(observed.items())) if declared else None,
        spaces.Dict(list(acted.items())) if declared else None,
        (observe(), infos()),
        steps,
        declared,
    )
    actions = [
        [{agent: sample(draw, acted.get(agent)) for agent in some_of(draw, keys)} for _ in range(2)]
        for _ in range(len(steps) + 2)
    ]
    return constructor, actions


def check(script: tuple[Any, list[list[dict]]], mode: AutoresetMode, copy: bool, **arguments: Any) -> None:
    constructor, batches = script
    reference = Reference([constructor] * 2, mode, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        env = ParallelEnv([constructor] * 2, mode, 1, copy=copy, **arguments)
    with env:
        assert_same(env.reset(), reference.reset(), "reset")
        for number, actions in enumerate(batches):
            assert_same(env.step(actions), reference.step(actions), f"step {number}")
        expected = tuple(one.env.actions for one in reference.copies)
        assert_same(env.get_attr("actions"), expected, "the actions that arrived")


modes = st.sampled_from(list(AutoresetMode))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize("shared_memory", [True, rest(False)])
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(script=scripts(), mode=modes, copy=st.booleans())
def test_serial(shared_memory, script, mode, copy):
    check(script, mode, copy, backend="serial", shared_memory=shared_memory)


@pytest.mark.parametrize("shared_memory", [True, rest(False)])
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=SLOW,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take a minute of starting processes
)
@given(script=scripts(), mode=modes, copy=st.booleans())
def test_process(shared_memory, script, mode, copy):
    check(script, mode, copy, backend="process", num_workers=2, shared_memory=shared_memory)
