"""`AgileRLVecEnv`: the core's dicts in AgileRL's form. Training is tested in `test_agilerl_training`."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agilerl.vector import AsyncPettingZooVecEnv, PettingZooVecEnv
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector.utils import batch_space
from helpers import ROOT
from helpers.batches import as_dicts, assert_vector_info, at, same
from mpe2 import simple_spread_v3, simple_tag_v3
from simulators.array_agents import ArrayAgents, WaitsForFile
from simulators.dict_rules import DictRules
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.variable_agents import ACTION, AGENTS, LENGTH, SPACE, VariableAgents, VariableDictAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")

COPIES = 3

MAKERS: dict[str, Callable[..., Any]] = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=8),
    "tag": functools.partial(simple_tag_v3.parallel_env, max_cycles=8, continuous_actions=True),
    "arrays": ArrayAgents,
    "plain variable": functools.partial(VariableAgents, plain=True),
    "plain variable dicts": functools.partial(VariableDictAgents, plain=True),
    "returning": ReturningPettingZooAgents,
    "returning dicts": ReturningAgents,
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "process": {"num_workers": 2},
    "views": {"num_workers": 2, "copy": False},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


def build_facade(make: Callable[..., Any] = ArrayAgents, copies: int = COPIES, **how: Any) -> AgileRLVecEnv:
    return AgileRLVecEnv(ParallelEnv([make] * copies, **{"backend": "serial", **how}))


def drawn(env: AgileRLVecEnv) -> dict[str, Any]:
    return {agent: env.action_space(agent).sample() for agent in env.agents}


def blank(value: Any) -> bool:
    """NaN for floats, zeros otherwise."""
    if isinstance(value, dict | tuple):
        return all(map(blank, value.values() if isinstance(value, dict) else value))
    return bool(np.isnan(value).all()) if value.dtype.kind == "f" else not value.any()


def with_axis(value: Any) -> Any:
    """An observation in AgileRL's shape."""
    if isinstance(value, dict):
        return {key: with_axis(child) for key, child in value.items()}
    return np.atleast_1d(value)


class ExpectedByAgent:
    """The expected values by agent, computed from the core's dicts."""

    def __init__(self, facade: AgileRLVecEnv, plain: ParallelEnv) -> None:
        self.facade, self.plain, self.agents = facade, plain, plain.possible_agents
        self.absent = 0

    def assert_reset(self, returned: tuple[Any, Any], dicts: tuple[Any, Any]) -> None:
        for i, agent in self.places():
            self.assert_seen(returned[0][agent], i, dicts[0][i].get(agent))
            self.assert_infos(returned[1], agent, i, dicts[1][i], None)
        self.assert_who(dicts[0], dicts[0])

    def assert_step(self, returned: tuple[Any, ...], dicts: tuple[Any, ...]) -> None:
        observations, rewards, terminations, truncations, infos = returned
        assert [*observations] == [*rewards] == [*terminations] == [*truncations] == self.agents
        for i, agent in self.places():
            seen, paid, terminateds, truncateds, notes = (column[i] for column in dicts)
            over = terminateds["__all__"] or truncateds["__all__"]
            self.assert_seen(observations[agent], i, seen.get(agent))
            flags = terminateds.get(agent, False), truncateds.get(agent, False)
            passed = terminations[agent][i], truncations[agent][i]
            if agent in paid:
                assert rewards[agent][i] == paid[agent]
                assert passed == ((terminateds["__all__"], truncateds["__all__"]) if over and not any(flags) else flags)
            else:
                assert np.isnan([rewards[agent][i], *passed]).all()
                self.absent += 1
            self.assert_infos(infos, agent, i, notes, over)
        for agent in self.agents:
            everywhere = all(agent in paid for paid in dicts[1])
            assert rewards[agent].dtype == np.float64
            assert {terminations[agent].dtype, truncations[agent].dtype} == {np.dtype(bool if everywhere else float)}
        self.assert_who(dicts[0], dicts[1])

    def places(self) -> list[tuple[int, str]]:
        return [(i, agent) for i in range(self.plain.num_envs) for agent in self.agents]

    def assert_seen(self, stacked: Any, i: int, expected: Any) -> None:
        actual = at(stacked, i)
        assert blank(actual) if expected is None else same(actual, with_axis(expected))

    def assert_infos(self, infos: Any, agent: str, i: int, notes: dict[str, Any], over: bool | None) -> None:
        assert infos[f"_{agent}"][i]
        common = {key: note for key, note in notes.items() if key not in self.agents}
        note = dict(notes.get(agent, {}))
        if over:
            final = {"final_obs": note.pop("final_obs")} if "final_obs" in note else {}
            note = {**note.pop("reset_info", {}), **final, "final_info": {**common, **note}}
            common = {key: info.get("reset_info", info) for key, info in common.items()}
        assert_vector_info(infos[agent], {**common, **note}, i)

    def assert_who(self, seen: Any, paid: Any) -> None:
        for i, agent in self.places():
            assert self.facade.present[agent][i] == (agent in seen[i] or agent in paid[i])
            assert self.facade.acting[agent][i] == (agent in self.plain.acting[i])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", HOWS)
def test_rows_equal_the_dicts_of_the_core(how, name):
    facade = build_facade(MAKERS[name], **HOWS[how])
    with ParallelEnv([MAKERS[name]] * COPIES, backend="serial") as plain:
        story = ExpectedByAgent(facade, plain)
        story.assert_reset(facade.reset(seed=5), plain.reset(seed=5))
        for step in range(4 * LENGTH):
            actions = drawn(facade)
            passed = as_dicts(actions, plain.acting)
            if step % 3:
                returned = facade.step(actions)
            else:
                facade.step_async(passed)
                returned = facade.step_wait()
            story.assert_step(returned, plain.step(passed))
            if step == 2 * LENGTH + 6:
                story.assert_reset(facade.reset(), plain.reset())
        if "variable" in name or name == "arrays":
            assert story.absent > 20
        facade.close()


# AgileRL's own


@pytest.mark.parametrize("name", ["spread", "tag", "arrays", "plain variable"])
def test_results_equal_agilerls_own_vector_environment(name):
    """The same numbers in the same forms, also for dead agents."""
    facade = build_facade(MAKERS[name])
    own = AsyncPettingZooVecEnv([MAKERS[name]] * COPIES, context="fork")
    try:
        assert_alike(facade.reset(seed=5)[0], own.reset(seed=5)[0])
        for _ in range(3 * LENGTH):
            actions = drawn(facade)
            for agent, acting in facade.acting.items():
                if facade.action_space(agent).dtype.kind == "f":
                    actions[agent][~acting] = np.nan
                elif not acting.all():
                    actions[agent] = np.where(acting, actions[agent].astype(float), np.nan)
            mine, theirs = facade.step(actions), own.step(actions)
            for one, other in zip(mine[:4], theirs[:4], strict=True):
                assert_alike(one, other)
            assert mine[4].keys() == theirs[4].keys()
            for agent in facade.agents:
                assert {"final_obs", "final_info", *theirs[4][agent]} >= {
                    key.removeprefix("_") if "final" in key else key for key in mine[4][agent]
                }
    finally:
        own.close()
        facade.close()


def assert_alike(mine: Any, theirs: Any) -> None:
    assert [*mine] == [*theirs]
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_alike(mine[key], value)
            continue
        assert (mine[key].shape, mine[key].dtype) == (value.shape, value.dtype)
        if value.dtype == np.int64:
            value = np.where(value == np.iinfo(np.int64).min, 0, value)  # what NaN has become there
        assert np.array_equal(mine[key], value, equal_nan=value.dtype.kind == "f")


# Attributes


@pytest.fixture
def env():
    facade = build_facade()
    yield facade
    facade.close(terminate=True, timeout=1.0)


def test_spaces_and_names(env):
    assert isinstance(env, PettingZooVecEnv)
    assert (env.num_envs, env.num_agents, env.agents, env.possible_agents) == (COPIES, 3, AGENTS, AGENTS)
    assert env.single_observation_space("a") == ArrayAgents().observation_space("a")
    assert env.single_action_space("b") == ACTION["move"]
    assert env.action_space("b") == batch_space(ACTION["move"], COPIES)
    assert (env.render_mode, env.metadata["name"], env.unwrapped) == ("rgb_array", "variable", env)


def test_agents_are_constant(env):
    env.reset(seed=1)
    for _ in range(LENGTH - 1):
        env.step(drawn(env))
        assert env.agents == AGENTS
    assert not env.acting["a"].any()


def test_forms_of_discrete_actions(env):
    """AgileRL squeezes actions, and passes tensors and whole floats."""
    env.reset(seed=1)
    loose = {"a": torch.tensor([[1], [2], [0]]), "b": torch.zeros(3, 1, 2), "c": np.array([0.0, 1.0, 2.0])}
    rewards = env.step(loose)[1]
    env.reset(seed=1)
    strict = {"a": np.array([1, 2, 0]), "b": np.zeros((3, 2), np.float32), "c": np.array([0, 1, 2])}
    assert all(map(same, rewards.values(), env.step(strict)[1].values()))


def test_partly_nan_action_is_passed_on():
    env = build_facade(functools.partial(DictRules, acts=spaces.Box(-1, 1, (2,))), 2)
    env.reset()
    for second in ([0.5, 0.5], [np.nan, np.nan]):
        env.step({"a": np.array([[0.5, np.nan], second]), "b": np.zeros((2, 2))})
        first, other = env.get_attr("actions")
        assert np.array_equal(first["a"], [0.5, np.nan], equal_nan=True)
        assert ("a" in other) is not np.isnan(second).all()
    env.close()


def test_nan_actions_mean_no_action():
    """Under dict rules an agent may have no action; under PettingZoo rules it may not."""
    env, plain = build_facade(MAKERS["plain variable dicts"]), ParallelEnv([MAKERS["plain variable dicts"]] * COPIES)
    env.reset(seed=1)
    plain.reset(seed=1)
    actions = {"a": np.array([1.0, np.nan, 2.0]), "b": np.array([0, 1, 2])}
    rewards = env.step(actions)[1]
    _, paid, *_ = plain.step([{"a": 1, "b": 0}, {"b": 1}, {"a": 2, "b": 2}])
    assert [rewards["b"][i] for i in range(COPIES)] == [paid[i]["b"] for i in range(COPIES)]
    env.step_async([{"a": np.nan, "b": 1}] * COPIES)
    rewards = env.step_wait()[1]
    _, paid, *_ = plain.step([{"b": 1}] * COPIES)
    assert [rewards["b"][i] for i in range(COPIES)] == [paid[i]["b"] for i in range(COPIES)]
    env.close()
    plain.close()


# Wrong use


def test_missing_library():
    program = "import sys; sys.modules['agilerl'] = None; from marl_parallel import vector; vector.AgileRLVecEnv"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ImportError: AgileRLVecEnv needs" in done.stderr
    assert (
        'pip install "marl-parallel[agilerl]", or in a checkout: pip install -e ".[agilerl]" (No module named'
        in done.stderr
    )


class Numbered(VariableDictAgents):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = [0, 1, 2]  # type: ignore[list-item]
        self.observation_space = spaces.Dict(dict.fromkeys(range(3), SPACE))
        self.action_space = spaces.Dict(dict.fromkeys(range(3), ACTION))


def test_agent_ids_must_be_strings():
    with ParallelEnv([Numbered], backend="serial") as parallel, pytest.raises(ValueError, match=r"strings, got \[0, 1"):
        AgileRLVecEnv(parallel)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "copies": ({"a": np.zeros(2, int)}, "actions of agent 'a' for 3 environments"),
    "shape": ({"b": np.zeros((3, 3), np.float32)}, "agent 'b': expected"),
    "half": ({"a": np.full(3, 0.5)}, "agent 'a': expected 3 integers"),
    "nan": ({"a": np.full(3, np.nan)}, "no action for agent 'a'"),
    "unknown": ({"z": np.zeros(3, int)}, "'z', which is not one of the agents"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_actions(wrong, env):
    env.reset()
    with pytest.raises(ValueError, match=WRONG[wrong][1]):
        env.step({**drawn(env), **WRONG[wrong][0]})
    with pytest.raises(ValueError, match="no action for agent 'b'"):
        env.step({"a": np.zeros(3, int), "c": np.zeros(3, int)})
    with pytest.raises(ValueError, match="3"):
        env.step_async([{"a": 0, "b": np.zeros(2), "c": 0}] * 2)
    with pytest.raises(TypeError, match="list with a dict"):
        env.step_async(drawn(env))
    assert env.get_attr("time") == (0,) * COPIES


def test_timeout_loses_nothing(tmp_path):
    env = build_facade(functools.partial(WaitsForFile, plain=True), backend="process", num_workers=1)
    env.reset()
    env.set_attr("gate", str(tmp_path / "open"))
    env.step_async([dict.fromkeys(AGENTS, 0)] * COPIES)
    for timeout in (0.0, 0.05):
        with pytest.raises(TimeoutError):
            env.step_wait(timeout=timeout)
    (tmp_path / "open").touch()
    assert env.step_wait(timeout=60.0)[1]["a"].shape == (COPIES,)
    env.close()


@pytest.mark.parametrize("name", ["reset_async", "reset_wait", "step_wait", "call_async", "call_wait"])
def test_parameters_are_agilerls(name):
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (AgileRLVecEnv, AsyncPettingZooVecEnv))
    assert [(p.name, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.kind) for p in theirs.parameters.values()
    ]


IDLE = [{**dict.fromkeys(AGENTS, 0), "b": np.zeros(2)}] * COPIES


def test_calls_during_the_first_reset(env):
    """They are refused because it is in flight, not because nothing has been reset."""
    env.reset_async(seed=2)
    for call in (lambda: env.step_async(IDLE), lambda: env.step(drawn(env)), env.reset_async, env.reset):
        with pytest.raises(AlreadyPendingCallError, match="in flight"):
            call()
    assert env.reset_wait(timeout=60.0)[0].keys() == {*AGENTS}
