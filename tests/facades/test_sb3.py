"""`SB3VecEnv`: one row per agent of every environment, a complete `VecEnv`; wrong use is refused."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from helpers.batches import all_zero, at, same, sample_rows
from mpe2 import simple_spread_v3, simple_tag_v3
from simulators.dict_rules import DictRules
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.variable_agents import ACTION, AGENTS, LENGTH, SPACE, VariableAgents, VariableDictAgents
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    VecEnv,
)

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3")

COPIES = 3
MAKERS: dict[str, Callable[..., Any]] = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=8),
    "variable": VariableAgents,
    "plain variable": functools.partial(VariableAgents, plain=True),
    "variable dicts": VariableDictAgents,
    "returning": ReturningPettingZooAgents,
    "returning dicts": ReturningAgents,
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "process": {"num_workers": 2},
    "views": {"num_workers": 2, "copy": False},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


def build_facade(make: Callable[..., Any] = VariableAgents, copies: int = COPIES, **how: Any) -> SB3VecEnv:
    return SB3VecEnv(ParallelEnv([make] * copies, **{"backend": "serial", **how}))


class ExpectedRows:
    """The expected rows, computed from the core's dicts."""

    def __init__(self, plain: ParallelEnv) -> None:
        self.plain, self.agents = plain, plain.possible_agents
        self.rows = [(i, agent) for i in range(plain.num_envs) for agent in self.agents]
        self.dead: set[tuple[int, str]] = set()
        self.reset_infos: list[dict[str, Any]] = [{} for _ in self.rows]
        self.rewards: list[list[float]] = [[] for _ in self.rows]  # of the running episode of each row
        self.deaths = self.zero_rows = self.lives = 0

    def of_copy(self, infos: dict[str, Any]) -> dict[str, Any]:
        return {key: info for key, info in infos.items() if key not in self.agents}

    def assert_reset(self, facade: SB3VecEnv, returned: Any, dicts: tuple[Any, Any]) -> None:
        self.dead.clear()
        self.rewards = [[] for _ in self.rows]
        for row, (i, agent) in enumerate(self.rows):
            self.assert_seen(at(returned, row), dicts[0][i].get(agent))
            self.reset_infos[row] = {**self.of_copy(dicts[1][i]), **dicts[1][i].get(agent, {})}
        assert facade.reset_infos == self.reset_infos
        self.assert_who(facade, dicts[0], [{}] * len(dicts[0]))

    def assert_step(self, facade: SB3VecEnv, returned: tuple[Any, ...], dicts: tuple[Any, ...]) -> None:
        observations, rewards, dones, infos = returned
        assert isinstance(infos, list)
        assert (rewards.dtype, dones.dtype, len(infos)) == (np.float64, np.bool_, len(self.rows))
        for row, (i, agent) in enumerate(self.rows):
            seen, paid, terminateds, truncateds, notes = (column[i] for column in dicts)
            over = terminateds["__all__"] or truncateds["__all__"]
            note = {**self.of_copy(notes), **notes.get(agent, {})}
            final = note.pop("final_obs", None) if over else seen.get(agent)
            flagged = terminateds.get(agent, False) or truncateds.get(agent, False)
            if final is not None and not flagged:  # it may have come back
                self.lives += (i, agent) in self.dead
                self.dead.discard((i, agent))
            was_dead = (i, agent) in self.dead
            died = not was_dead and flagged
            reset_info = note.pop("reset_info", {}) if over else None
            assert dones[row] == (died or over)
            assert rewards[row] == (0.0 if was_dead else paid.get(agent, 0.0))
            self.assert_seen(at(observations, row), None if (was_dead or died) and not over else seen.get(agent))
            by = agent if died else "__all__"
            cut_off = over | died and truncateds[by] and not terminateds[by] and not was_dead and final is not None
            assert infos[row].pop("TimeLimit.truncated") is bool(cut_off)
            if not was_dead and (agent in paid or died):
                self.rewards[row].append(paid.get(agent, 0.0))
            if died or over:
                self.assert_seen(infos[row].pop("terminal_observation"), None if was_dead else final)
                assert ("episode" in infos[row]) == bool(self.rewards[row])
                if self.rewards[row]:
                    episode = infos[row].pop("episode")
                    assert np.isclose(episode["r"], sum(self.rewards[row]))
                    assert episode["l"] == len(self.rewards[row])
                self.rewards[row] = []
            assert same_infos(infos[row], note)
            if over:
                self.reset_infos[row] = reset_info
                self.dead.discard((i, agent))
            elif died:
                self.dead.add((i, agent))
            self.deaths += bool(died and not over)
            self.zero_rows += bool(was_dead)
        assert all(map(same_infos, facade.reset_infos, self.reset_infos))
        self.assert_who(facade, dicts[0], dicts[1])

    def assert_seen(self, actual: Any, expected: Any) -> None:
        assert all_zero(actual) if expected is None else same(actual, expected)

    def assert_who(self, facade: SB3VecEnv, seen: Any, paid: Any) -> None:
        assert facade.present.tolist() == [agent in seen[i] or agent in paid[i] for i, agent in self.rows]
        assert facade.acting.tolist() == [agent in self.plain.acting[i] for i, agent in self.rows]

    def as_dicts(self, actions: Any) -> list[dict[str, Any]]:
        count = len(self.agents)
        return [
            {agent: at(actions, i * count + self.agents.index(agent)) for agent in acting}
            for i, acting in enumerate(self.plain.acting)
        ]


def same_infos(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same_infos(actual[key], expected[key]) for key in expected)
    return type(actual) is type(expected) and same(actual, expected)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", HOWS)
def test_rows_equal_the_dicts_of_the_core(how, name):
    facade = build_facade(MAKERS[name], **HOWS[how])
    facade.action_space.seed(7)
    with ParallelEnv([MAKERS[name]] * COPIES, backend="serial") as plain:
        story = ExpectedRows(plain)
        assert facade.seed(5) == [5, 5, 5, 6, 6, 6, 7, 7, 7]
        story.assert_reset(facade, facade.reset(), plain.reset(seed=5))
        for step in range(4 * LENGTH):
            actions = sample_rows(facade.action_space, facade.num_envs)
            story.assert_step(facade, facade.step(actions), plain.step(story.as_dicts(actions)))
            if step == 2 * LENGTH + 6:  # somebody is dead
                story.assert_reset(facade, facade.reset(), plain.reset())
        if name != "spread":
            assert story.deaths > 5
            assert story.zero_rows > 20
        assert (story.lives > 5) is ("returning" in name)
        facade.close()


def test_observations_are_copied_once():
    env = build_facade(simple_spread_v3.parallel_env)
    observations = env.reset()
    assert observations.base.shape == (COPIES, 3, 18)
    env.close()


# Attributes


@pytest.fixture
def env():
    facade = build_facade()
    yield facade
    facade.close()


def test_spaces_and_names(env):
    assert isinstance(env, VecEnv)
    assert (env.num_envs, env.observation_space, env.action_space) == (9, SPACE, ACTION)
    assert env.agents == AGENTS
    assert (env.render_mode, env.unwrapped) == ("rgb_array", env)


def test_attributes_and_methods_by_row(env):
    env.reset()
    env.set_attr("total", 4.0, indices=[0, 1, 8])
    assert env.get_attr("total") == [4.0] * 3 + [0.0] * 3 + [4.0] * 3
    assert env.get_attr("total", 4) == [0.0]
    assert env.get_attr("total", [5, -1]) == [0.0, 4.0]
    env.set_attr("options", [1, 2])
    assert env.get_attr("options", range(2)) == [[1, 2]] * 2
    assert env.env_method("scale", 2.0, indices=[7, 3]) == [8.0, 0.0]
    assert env.env_method("scale", factor=3.0) == [12.0] * 3 + [0.0] * 3 + [12.0] * 3
    with pytest.raises(IndexError, match="no row 9"):
        env.get_attr("total", 9)
    with pytest.raises(AttributeError, match="colour"):
        env.get_attr("colour")
    env.set_attr("colour", "red")  # a new one
    assert env.get_attr("colour") == ["red"] * 9


class Counting(VariableAgents):
    calls = 0

    def shout(self) -> int:
        self.calls += 1
        return self.calls


def test_method_is_called_once_per_environment():
    env = build_facade(Counting)
    assert env.env_method("shout", indices=[0, 1, 2, 3]) == [1, 1, 1, 1]
    assert env.get_attr("calls") == [1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert env.has_attr("shout")
    assert env.get_attr("calls")[0] == 1  # which is not to call it
    assert not env.has_attr("whisper")
    env.close()


def test_render_mode():
    env = build_facade(functools.partial(simple_spread_v3.parallel_env, render_mode="rgb_array"))
    assert env.get_attr("render_mode") == ["rgb_array"] * 9
    env.close()
    env = build_facade(VariableDictAgents)  # which declares none of its own
    assert env.get_attr("render_mode", [4, 5]) == [None, None]
    with pytest.warns(UserWarning, match="rgb_array"):
        assert env.get_images() == [None] * COPIES
    env.close()


def test_frames(env):
    env.reset()
    images = env.get_images()
    assert [image[0, 0, 0] for image in images] == [0, 10, 20]
    assert env.render().shape == (8, 12, 3)


class Padding(gymnasium.Wrapper):
    pass


class ThinPadding(Padding):
    pass


@pytest.mark.parametrize("how", ["serial", "process"])
def test_env_is_wrapped(how):
    constructors = [
        VariableDictAgents,
        lambda: ThinPadding(VariableDictAgents()),
        lambda: Padding(Padding(VariableDictAgents())),
    ]
    env = SB3VecEnv(ParallelEnv(constructors, **HOWS[how]))
    assert env.env_is_wrapped(Padding) == [False] * 3 + [True] * 6
    assert env.env_is_wrapped(ThinPadding, [3, 8]) == [True, False]
    assert env.env_is_wrapped(Monitor) == [False] * 9
    env.close()


def test_seeds_and_options_apply_to_the_next_reset_only(env):
    env.seed(3)
    env.set_options({"hill": 1})
    first = env.reset()
    assert env.get_attr("options") == [{"hill": 1}] * 9
    second = env.reset()
    assert env.get_attr("options") == [None] * 9
    assert not same(first, second)
    env.seed(3)
    assert same(env.reset(), first)
    drawn = env.seed()
    assert drawn[0] == drawn[2] == drawn[3] - 1
    assert env.env.seed()[0] == 3
    env.reset()
    assert list(env.env.seed()) == drawn[::3]


@pytest.mark.parametrize("per", [1, 3])
def test_options_by_environment_or_row(per, env):
    env.set_options([own for own in [{"hill": 1}, {}, {"hill": 2}] for _ in range(per)])
    env.reset()
    assert env.get_attr("options", [0, 3, 6]) == [{"hill": 1}, None, {"hill": 2}]


def test_random_seeds_follow_numpys_global_seed(env):
    drawn = []
    for _ in range(2):
        np.random.seed(5)
        drawn.append(env.seed())
    assert drawn[0] == drawn[1]


# Wrong use


def test_agents_with_different_spaces_are_named():
    parallel = ParallelEnv([simple_tag_v3.parallel_env] * 2, backend="serial")
    with (
        parallel,
        pytest.raises(ValueError, match=r"space of 'agent_0' is Box.*of 'adversary_0' it is Box.*PettingZooVecEnv"),
    ):
        SB3VecEnv(parallel)


class TextAgents(VariableAgents):
    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Text(5)

    def seen(self) -> str:
        return "hello"


def test_observations_must_be_arrays():
    with ParallelEnv([TextAgents], backend="serial") as parallel, pytest.raises(ValueError, match="'a' observes Text"):
        SB3VecEnv(parallel)


def test_missing_library():
    program = "import sys; sys.modules['stable_baselines3'] = None; from marl_parallel import vector; vector.SB3VecEnv"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ImportError: SB3VecEnv needs" in done.stderr
    assert 'pip install "marl-parallel[sb3]", or in a checkout: pip install -e ".[sb3]" (No module named' in done.stderr


@pytest.mark.parametrize(
    "options", [[{}], [{}] * 8, [{"hill": 1}] + [{}] * 8], ids=["one", "too few", "a copy taken apart"]
)
def test_wrong_options(options, env):
    with pytest.raises(ValueError, match=r"for 3 environments or for 9 rows|equal for all rows"):
        env.set_options(options)


def test_refused_observation_names_its_part():
    seen = spaces.Dict(image=spaces.Box(0, 1, (2,)), more=spaces.Tuple((spaces.Text(3), spaces.Discrete(2))))
    parallel = ParallelEnv([functools.partial(DictRules, seen)], backend="serial")
    with pytest.raises(ValueError, match=r"agent 'a' observes Dict.* has a part without .*: \['more'\]\[0\], Text"):
        SB3VecEnv(parallel)
    parallel.close()
