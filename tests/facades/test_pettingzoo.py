"""`PettingZooVecEnv`: its arrays equal the core's dicts row by row, in the form that PettingZoo users expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from helpers.batches import all_zero, as_dicts, assert_vector_info, at, same
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from simulators.deterministic import Scripted
from simulators.variable_agents import AGENTS, LENGTH, VariableAgents, VariableDictAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import PettingZooVecEnv

COPIES = 3
MAKERS: dict[str, Callable[..., Any]] = {
    "spread": simple_spread_v3.parallel_env,
    "tag": simple_tag_v3.parallel_env,
    "knights": knights_archers_zombies.parallel_env,
    "variable": VariableAgents,
    "variable dicts": VariableDictAgents,
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "process": {"num_workers": 2},
    "pickled": {"num_workers": 2, "shared_memory": False},
    "checked": {"backend": "serial", "check_actions": True},
    "views": {"num_workers": 2, "copy": False},
}


def facade_and_core(make: Callable[..., Any], mode: str, **how: Any) -> tuple[PettingZooVecEnv, ParallelEnv]:
    """The facade, and a `ParallelEnv` of the same environments."""
    facade = PettingZooVecEnv(ParallelEnv([make] * COPIES, mode, **how))
    return facade, ParallelEnv([make] * COPIES, mode, backend="serial")


def assert_rows(
    returned: tuple[Any, ...], dicts: tuple[Any, ...], facade: PettingZooVecEnv, plain: ParallelEnv
) -> None:
    """The facade's five dicts hold exactly what the core's do."""
    observations, rewards, terminations, truncations, infos = returned
    for env_id in range(COPIES):
        seen, paid, terminated, truncated, notes = (column[env_id] for column in dicts)
        for agent in facade.possible_agents:
            if agent in seen:
                assert same(at(observations[agent], env_id), seen[agent])
            else:
                assert all_zero(at(observations[agent], env_id))
            assert rewards[agent][env_id] == paid.get(agent, 0.0)
            flags = terminated.get(agent, False), truncated.get(agent, False)
            began = plain.metadata["autoreset_mode"].name == "SAME_STEP" and (
                terminated["__all__"] or truncated["__all__"]
            )
            took_part = agent in paid or "final_obs" in notes.get(agent, {}) or (agent in seen and not began)
            if took_part and not any(flags):
                flags = terminated["__all__"], truncated["__all__"]
            assert (terminations[agent][env_id], truncations[agent][env_id]) == flags
            assert facade.present[agent][env_id] == (agent in seen or agent in paid)
            assert facade.acting[agent][env_id] == (agent in plain.acting[env_id])
        assert facade.over[env_id] == (
            plain.metadata["autoreset_mode"].name != "SAME_STEP" and (terminated["__all__"] or truncated["__all__"])
        )
        for key in {*infos, *notes}:
            assert_vector_info(infos.get(key, {}), notes.get(key, {}), env_id)
    for array in rewards.values():
        assert array.dtype == np.float64
    for array in [*terminations.values(), *truncations.values()]:
        assert (array.dtype, array.shape) == (np.bool_, (COPIES,))


FLAGS = [{"__all__": False}] * COPIES


def as_of_a_step(observations: Any, infos: Any, agents: list[str]) -> tuple[Any, ...]:
    rewards = {agent: np.zeros(COPIES) for agent in agents}
    flags = {agent: np.zeros(COPIES, np.bool_) for agent in agents}
    return observations, rewards, flags, flags, infos


def drawn(facade: PettingZooVecEnv, agents: list[str]) -> dict[str, Any]:
    return {agent: facade.action_space(agent).sample() for agent in agents}


# Every kind of environment in one process, and one kind in every other way.
CASES = [
    *[("serial", name, mode) for name in MAKERS for mode in ("SAME_STEP", "NEXT_STEP", "DISABLED")],
    *[(how, "variable", mode) for how in ("process", "views") for mode in ("SAME_STEP", "NEXT_STEP", "DISABLED")],
    *[("pickled", "variable dicts", "SAME_STEP"), ("pickled", "knights", "DISABLED"), ("checked", "tag", "SAME_STEP")],
]


@pytest.mark.parametrize(("how", "name", "mode"), CASES)
def test_rows_equal_the_dicts_of_the_core(how, name, mode):
    facade, plain = facade_and_core(MAKERS[name], mode, **HOWS[how])
    for agent in facade.possible_agents:
        facade.action_space(agent).seed(hash(agent) % 1000)
    steps = 2 * LENGTH + 10
    with facade, plain:
        returned = as_of_a_step(*facade.reset(seed=5), facade.possible_agents)
        seen, notes = plain.reset(seed=5)
        assert_rows(returned, (seen, [{}] * COPIES, FLAGS, FLAGS, notes), facade, plain)
        for step in range(steps):
            actions = drawn(facade, facade.possible_agents if step % 2 else facade.agents)
            if step % 3:
                facade.step_async(actions)
                returned = facade.step_wait()
            else:
                returned = facade.step(actions)
            dicts = plain.step(as_dicts(actions, plain.acting))
            assert_rows(returned, dicts, facade, plain)
            if mode == "DISABLED" and facade.over.any():
                env_ids = np.flatnonzero(facade.over).tolist()[:1]
                before = facade.present
                observations, _ = facade.reset(env_ids=env_ids)
                plain.reset(env_ids=env_ids)
                for env_id in range(COPIES):
                    if env_id not in env_ids:
                        assert all(facade.present[a][env_id] == before[a][env_id] for a in before)
                        assert all(same(at(observations[a], env_id), at(returned[0][a], env_id)) for a in before)


SEEN = {agent: np.array([place, -place], np.float32) for place, agent in enumerate(AGENTS, 1)}
PAID = {"a": 1.0, "b": 0.5, "c": 0.0}
STAY, LEAVE = ({**dict.fromkeys(AGENTS, flag), "__all__": flag} for flag in (False, True))
NO_NEWS: dict[str, dict[str, Any]] = {agent: {} for agent in AGENTS}
ENDS: list[tuple[dict, ...]] = [
    (SEEN, PAID, STAY, LEAVE, NO_NEWS),
    (SEEN, PAID, LEAVE, STAY, NO_NEWS),
    ({"a": SEEN["a"]}, PAID, STAY, LEAVE, NO_NEWS),
    ({}, {}, LEAVE, STAY, {}),
    (SEEN, {"c": 2}, STAY, LEAVE, NO_NEWS),
    (SEEN, PAID, {"b": True, "__all__": True}, {"__all__": False}, {"b": {}}),
    (SEEN, PAID, STAY, {**LEAVE, "a": np.True_, "b": 1}, {"b": {"last": 1}}),
    (SEEN, {**PAID, "b": 2**60}, LEAVE, STAY, {**NO_NEWS, "c": {"last": np.arange(3)}, "__common__": {"x": "y"}}),
    ({agent: SEEN[agent] for agent in "cab"}, {agent: PAID[agent] for agent in "bca"}, LEAVE, LEAVE, NO_NEWS),
]


def ending(env_id: int) -> Any:
    """Ends with every other step in each of these ways; each environment starts with another."""
    views = spaces.Dict({agent: spaces.Box(-9, 9, (2,), np.float32) for agent in AGENTS})
    acts = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(2)))
    stay = dict.fromkeys(STAY, np.False_) if env_id == 0 else STAY
    between = ({"b": SEEN["b"]} if env_id == 1 else SEEN, PAID, stay, stay, NO_NEWS)
    steps = [step for end in [*ENDS[env_id:], *ENDS[:env_id]] for step in (between, end)]
    return Scripted(views, acts, (SEEN, {"a": {"first": env_id}} if env_id == 2 else NO_NEWS), steps, AGENTS)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        *[(how, "SAME_STEP") for how in HOWS],
        *[(how, mode) for how in ("serial", "process") for mode in ("NEXT_STEP", "DISABLED")],
    ],
)
def test_ends_of_every_kind(how, mode):
    facade, plain = facade_and_core(ending, mode, **HOWS[how])
    with facade, plain:
        facade.reset()
        plain.reset()
        for _ in range(4 * len(ENDS)):
            actions = drawn(facade, facade.possible_agents)
            dicts = plain.step(as_dicts(actions, plain.acting))
            assert_rows(facade.step(actions), dicts, facade, plain)


# Attributes


def test_spaces_and_names():
    parallel = ParallelEnv([simple_tag_v3.parallel_env] * COPIES, "DISABLED", backend="serial")
    with PettingZooVecEnv(parallel) as env:
        assert env.possible_agents == parallel.possible_agents
        assert env.num_envs == COPIES
        assert env.agents == []
        for agent in env.possible_agents:
            assert env.single_observation_space(agent) == parallel.observation_space[agent]
            assert env.observation_space(agent) == batch_space(parallel.observation_space[agent], COPIES)
            assert env.observation_space(agent) is env.observation_space(agent)
            assert env.single_action_space(agent) == spaces.Discrete(5)
            assert env.action_space(agent) == spaces.MultiDiscrete([5] * COPIES)
        observations, _ = env.reset()
        assert env.agents == env.possible_agents
        assert env.num_agents == env.max_num_agents == len(env.possible_agents)
        assert all(env.observation_space(agent).contains(seen) for agent, seen in observations.items())


def test_documented_loop():
    """As documented, with an episode end, agents that die, and a custom policy."""
    parallel_env = PettingZooVecEnv(ParallelEnv([VariableAgents] * COPIES, False, num_workers=2))
    observations, _ = parallel_env.reset(seed=42)
    cycles, counted = 0, []
    while parallel_env.agents:
        actions = {agent: parallel_env.action_space(agent).sample() for agent in parallel_env.agents}
        counted.append(len(actions))
        observations, rewards, terminations, truncations, infos = parallel_env.step(actions)
        cycles += 1
    parallel_env.close()
    assert cycles == LENGTH
    assert counted[0] == 3 > counted[-1]
    assert observations.keys() == rewards.keys() == terminations.keys() == truncations.keys() == infos.keys()


@pytest.mark.needs("_codec")
def test_views_are_overwritten():
    with PettingZooVecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 2, copy=False, backend="serial")) as env:
        first, _ = env.reset()
        saved = first["agent_0"].copy()
        second = env.step(drawn(env, env.agents))[0]
        assert np.shares_memory(first["agent_0"], second["agent_0"])
        assert not np.array_equal(saved, first["agent_0"])


def test_states():
    with PettingZooVecEnv(ParallelEnv([VariableAgents] * COPIES, num_workers=2)) as env:
        env.reset()
        env.set_attr("total", [1.0, 2.0, 4.0])
        assert env.state().tolist() == [[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]
        assert env.render_mode == "rgb_array"


@pytest.mark.parametrize("how", [{}, {"shared_memory": False}, {"check_actions": True}])
def test_discrete_actions_have_one_type(how):
    """Whatever type the caller passes: `action - 1` in a simulator must not wrap around."""
    with PettingZooVecEnv(
        ParallelEnv([functools.partial(VariableAgents, plain=True)] * 2, backend="serial", **how)
    ) as env:
        for kinds in (np.int32, np.longlong, np.uint8), (np.bool_, np.int64, np.uint64):
            env.reset()
            env.step({agent: np.ones(2, kind) for agent, kind in zip("abc", kinds)})
            for received in env.get_attr("received"):
                assert [type(action) for action in received.values()] == [np.int64] * 3
        env.reset()
        with pytest.raises(ValueError, match=r"agent 'a': expected .* int64, got uint64 values that int64 cannot hold"):
            env.step({"a": np.full(2, 2**63, np.uint64), "b": np.ones(2, int), "c": np.ones(2, int)})


def test_infos_are_vectors():
    with PettingZooVecEnv(ParallelEnv([VariableAgents] * COPIES, backend="serial")) as env:
        env.reset()
        for _ in range(3):
            infos = env.step(drawn(env, env.possible_agents))[4]
        assert infos["c"]["time"].tolist() == [3] * COPIES
        assert infos["c"]["time"].dtype == np.int64
        assert infos["c"]["word"].tolist() == ["ccc"] * COPIES
        assert infos["c"]["deep"]["total"].shape == (COPIES,)
        assert infos["c"]["_deep"].tolist() == [True] * COPIES


# Wrong use


@pytest.fixture
def env():
    with PettingZooVecEnv(ParallelEnv([VariableAgents] * 2, False, backend="serial")) as made:
        yield made


def test_missing_action(env):
    env.reset()
    with pytest.raises(ValueError, match="environment 0: no action for agent 'b'"):
        env.step(drawn(env, ["a", "c"]))
    assert env.get_attr("time") == (0, 0)


def test_action_of_an_unknown_agent(env):
    env.reset()
    with pytest.raises(ValueError, match="'z', which is not one of the agents"):
        env.step({**drawn(env, AGENTS), "z": 1})
    assert env.get_attr("time") == (0, 0)


@pytest.mark.parametrize("actions", [[np.zeros(2)] * 3, np.zeros((2, 3)), None], ids=["list", "array", "nothing"])
def test_actions_that_are_not_a_dict(actions, env):
    env.reset()
    for step in (env.step, env.step_async):
        with pytest.raises(TypeError, match=f"expected a dict of actions by agent, got {type(actions).__name__}"):
            step(actions)
    assert env.get_attr("time") == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"move": np.zeros((3, 2), np.float32), "jump": np.zeros(2, np.int64)},
        {"move": np.zeros((2, 2), np.complex64), "jump": np.zeros(2, np.int64)},
        {"move": np.zeros((2, 2), np.float32), "jump": np.zeros(2)},
        {"move": np.zeros((2, 2), np.float32)},
        np.zeros(2),
    ],
    ids=["rows", "dtype", "floats", "key", "form"],
)
def test_actions_of_another_form(wrong, env):
    env.reset()
    with pytest.raises(ValueError, match="agent 'b'"):
        env.step({**drawn(env, AGENTS), "b": wrong})
    assert env.get_attr("time") == (0, 0)


class OpenEnded(gymnasium.Env):
    """Its agents are not known in advance."""

    possible_agents: list[str] = []  # noqa: RUF012
    observation_space = action_space = None  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return {"car": 0}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        return {"car": 0}, {"car": 0.0}, {"__all__": False}, {"__all__": False}, {}


class Spaceless(OpenEnded):
    possible_agents = ["car"]  # noqa: RUF012


@pytest.mark.parametrize(("make", "word"), [(OpenEnded, "possible_agents is empty"), (Spaceless, "'car' declares no")])
def test_agents_and_spaces_must_be_known(make, word):
    parallel = ParallelEnv([make], backend="serial", adapter="dict")
    with parallel, pytest.raises(ValueError, match=word):
        PettingZooVecEnv(parallel)


class VectorRewards(VariableDictAgents):
    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, *rest = super().step(actions)
        return observations, {**rewards, "a": [1.0, 2.0]}, *rest


class UnknownAgent(VariableDictAgents):
    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, *rest = super().step(actions)
        return {**observations, "z": 1}, *rest


class NoAgents(VariableDictAgents):
    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, *rest = super().step(actions)
        return {**observations, "a": None}, *rest


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (VectorRewards, "the reward of agent 'a' is"),
        (UnknownAgent, "agent 'z' is not one of"),
        (NoAgents, "the observation of agent 'a': expected a dict with the keys .*, got None"),
    ],
)
def test_values_that_do_not_fit_arrays(make, word):
    with PettingZooVecEnv(ParallelEnv([make], backend="serial")) as env:
        env.reset()
        with pytest.raises(ValueError, match=rf"environment 0: {word}"):
            env.step(drawn(env, AGENTS))
