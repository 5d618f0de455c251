"""`make`: names of environments, facades and wrappers, against plain loops over the same environments."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any, get_args

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import play
from helpers.start_methods import arguments
from mpe2 import simple_speaker_listener_v4, simple_spread_v3
from pettingzoo.utils.wrappers import BaseParallelWrapper
from simulators.deterministic import Hunt
from simulators.skirmish import Skirmish

from marl_parallel import EnvError, make
from marl_parallel.adapters import ADAPTERS
from marl_parallel.backends import AUTOMATIC, NAMES, WAITS
from marl_parallel.types import AdapterName, AutoresetName, BackendName, FacadeName, Wait
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv
from marl_parallel.wrappers import pad_spaces

pytestmark = pytest.mark.in_turn

SAME_STEP = AutoresetMode.SAME_STEP
HAS_IDS = hasattr(pettingzoo, "parallel_registry")
needs_ids = pytest.mark.release_independent  # older releases of PettingZoo have no ids

FILE = """
import gymnasium
import neighbour_of_runners

class Runner(gymnasium.Env):
    possible_agents = ["runner"]
    observation_space = gymnasium.spaces.Dict(runner=gymnasium.spaces.Box(0, 99, (1,)))
    action_space = gymnasium.spaces.Dict(runner=gymnasium.spaces.Discrete(3))

    def __init__(self, pace=1):
        self.pace = pace * neighbour_of_runners.FACTOR

    def reset(self, *, seed=None, options=None):
        self.place = 0.0
        return {"runner": [self.place]}, {}

    def step(self, actions):
        self.place += self.pace * actions["runner"]
        flags = {"runner": self.place > 50, "__all__": self.place > 50}
        return {"runner": [self.place]}, {"runner": 1.0}, flags, {"runner": False, "__all__": False}, {}
"""


@pytest.fixture
def how(backend_setup) -> dict[str, Any]:
    return {"backend": backend_setup.backend, "num_workers": 2, "seed": 8}


@pytest.fixture
def runners(tmp_path, monkeypatch) -> Path:
    """A file with an environment, which imports a module beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / f"runners_{tmp_path.name}.py".replace("-", "_")
    file.write_text(FILE)
    (tmp_path / "neighbour_of_runners.py").write_text("FACTOR = 2\n")
    yield file
    sys.modules.pop("neighbour_of_runners", None)
    sys.modules.pop(file.stem, None)


# -- names -------------------------------------------------------------------------------------------------------------


@needs_ids
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("butterfly/knights_archers_zombies-v11", "parallel"),
        ("butterfly/knights_archers_zombies", "parallel"),
        ("classic/tictactoe-v3", "aec"),
    ],
)
def test_id_of_pettingzoo(name, kind, how):
    reference = Reference([functools.partial(pettingzoo.make, kind, name)] * 2, SAME_STEP, 8)
    with make(name, 2, **how) as env:
        play(env, reference)


@needs_ids
def test_env_kwargs_of_an_id(how):
    knights = functools.partial(pettingzoo.make, "parallel", "butterfly/knights_archers_zombies-v11", num_knights=1)
    reference = Reference([knights] * 2, SAME_STEP, 8)
    with make("butterfly/knights_archers_zombies-v11", 2, {"num_knights": 1}, **how) as env:
        play(env, reference)


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnasium.envs.classic_control:CartPole-v1"])
def test_id_of_gymnasium(name, how):
    reference = Reference([functools.partial(gymnasium.make, name, max_episode_steps=6)] * 2, SAME_STEP, 8)
    with make(name, 2, {"max_episode_steps": 6}, **how) as env:
        play(env, reference)


@pytest.mark.parametrize("constructor", [simple_spread_v3.parallel_env, Hunt, lambda seed: Hunt(seed)])
def test_callable(constructor, how):
    with make(constructor, 2, **how) as env:
        play(env, Reference([constructor] * 2, SAME_STEP, 8))


def test_function_of_a_file(runners, how):
    with make(f"{runners}:Runner", 2, {"pace": 3}, **how) as env:
        env.reset()
        for step in range(1, 4):
            observations = env.step([{"runner": 1}, {"runner": 2}])[0]
            assert [own["runner"].tolist() for own in observations] == [[6.0 * step], [12.0 * step]]


def test_function_of_a_file_in_new_processes(runners, start_method):
    with make(f"{runners}:Runner", 2, num_workers=2, **arguments(start_method)) as env:
        env.reset()
        assert env.step([{"runner": 2}] * 2)[0][1]["runner"].tolist() == [4.0]


def test_error_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken_simulators.py"
    file.write_text("import json\nenv = json.no_such_function\n")
    with pytest.raises(AttributeError, match="no_such_function") as caught:
        make(f"{file}:env")
    assert str(caught.traceback[-1].path) == str(file)
    file.write_text("def env(:\n")
    with pytest.raises(SyntaxError, match=r"broken_simulators\.py, line 1"):
        make(f"{file}:env")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (7, TypeError, "name must be 'module', .* or a callable; got 7"),
        ("", ValueError, "name must be 'module', .*; got the module ''"),
        (":env", ValueError, "name must be 'module', .*; got the module ''"),
        (
            "CartPole-v999",
            gymnasium.error.Error,
            "no environment is registered as 'CartPole-v999'; similar .* CartPole-v1",
        ),
        ("no_such_module:Here-v0", ImportError, "no_such_module"),
        (
            "mpe_not_installed.simple_v1",
            ImportError,
            "'mpe_not_installed': install the package that contains it, or pass",
        ),
        (json, TypeError, "got the module itself: pass its name, 'json'"),
        ("json.loads", ImportError, "a function of a module is named 'json:loads'"),
        ("no/such/file.py:env", FileNotFoundError, "there is no file .*no/such/file.py"),
    ],
)
def test_wrong_names(name, error, message):
    with pytest.raises(error, match=message):
        make(name)


def test_missing_library_of_the_examples(monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "mpe2"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:2])  # only modules that are part of the interpreter
    with pytest.raises(ImportError, match=r"'mpe2': install .* \(the extra 'mpe' of marl-parallel does so\)"):
        make("mpe2.simple_spread_v3")


@pytest.mark.parametrize("named", [True, False])
def test_unknown_id_of_pettingzoo(named, monkeypatch):
    if not named and HAS_IDS:
        monkeypatch.delattr(pettingzoo, "parallel_registry")
    message = "similar ids are butterfly/pistonball-v6" if named and HAS_IDS else "1.27 and later do"
    with pytest.raises(gymnasium.error.UnregisteredEnv, match=message):
        make("butterfly/pistonball-v999")


# -- facades -----------------------------------------------------------------------------------------------------------


def test_facades_with_the_modes_of_their_libraries():
    with make(Hunt, 2, backend="serial", facade="pettingzoo") as env:
        assert type(env) is PettingZooVecEnv
        assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    rows = make(simple_spread_v3.parallel_env, 2, facade="gymnasium", backend="serial", seed=3)
    assert type(rows) is GymnasiumVectorEnv
    assert rows.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    expected = [simple_spread_v3.parallel_env().reset(seed=seed)[0] for seed in (3, 4)]
    assert_same(rows.reset()[0], np.stack([own[agent] for own in expected for agent in own]))
    rows.close()


def test_facade_keywords_and_mode():
    how = {"backend": "serial", "facade": "gymnasium", "facade_kwargs": {"agents": ["agent_2"]}, "auto_reset": True}
    env = make("mpe2.simple_spread_v3", 2, **how)
    assert env.num_envs == 2
    assert env.metadata["autoreset_mode"] is SAME_STEP
    env.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"facade": "sb4"}, ValueError, "facade must be one of 'agilerl', .* or None, got 'sb4'"),
        (
            {"facade": "pettingzoo", "facade_kwargs": {"agents": []}},
            TypeError,
            "PettingZooVecEnv takes no argument 'ag",
        ),
        ({"facade_kwargs": {"agents": []}}, TypeError, "without a facade"),
        ({"facade": "gymnasium", "facade_kwargs": [1]}, TypeError, "facade_kwargs must be a dict"),
        ({"wrappers": BaseParallelWrapper}, TypeError, "wrappers must be a list"),
        ({"wrappers": ["pad"]}, TypeError, r"wrappers\[0\] must be a callable .* got 'pad'"),
    ],
)
def test_wrong_arguments_touch_no_simulator(arguments, error, message, tmp_path):
    def constructor() -> Hunt:
        (tmp_path / "touched").touch()
        return Hunt(1)

    with pytest.raises(error, match=message):
        make(constructor, backend="serial", **arguments)
    assert not (tmp_path / "touched").exists()


def test_a_facade_that_does_not_fit_closes_everything():
    closed = []

    class Closing(BaseParallelWrapper):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ValueError, match="rows need equal spaces"):
        make(Hunt, 2, facade="gymnasium", backend="serial", wrappers=[Closing])
    assert len(closed) == 2


# -- wrappers ----------------------------------------------------------------------------------------------------------


class Scaled(BaseParallelWrapper):
    """Multiplies observations, and adds to them what it gets."""

    def __init__(self, env: Any, factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reset(self, seed=None, options=None):
        observations, infos = self.env.reset(seed=seed, options=options)
        return {agent: self.factor * value for agent, value in observations.items()}, infos

    def step(self, actions):
        observations, *rest = self.env.step(actions)
        return {agent: self.factor * value for agent, value in observations.items()}, *rest


def plus_one(env: Any) -> Any:
    class PlusOne(BaseParallelWrapper):
        def reset(self, seed=None, options=None):
            observations, infos = self.env.reset(seed=seed, options=options)
            return {agent: value + 1 for agent, value in observations.items()}, infos

        def step(self, actions):
            observations, *rest = self.env.step(actions)
            return {agent: value + 1 for agent, value in observations.items()}, *rest

    return PlusOne(env)


def test_wrappers_in_their_order(how):
    def wrapped() -> Any:
        return plus_one(Scaled(Scaled(simple_spread_v3.parallel_env(max_cycles=4)), 3.0))

    wrappers = [Scaled, functools.partial(Scaled, factor=3.0), plus_one]
    with make("mpe2.simple_spread_v3", 2, {"max_cycles": 4}, wrappers=wrappers, **how) as env:
        play(env, Reference([wrapped] * 2, SAME_STEP, 8))


def test_wrappers_of_gymnasium(how):
    def wrapped() -> Any:
        return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), -1, 1), 5)

    wrappers = [
        functools.partial(gymnasium.wrappers.RescaleAction, min_action=-1, max_action=1),
        functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=5),
    ]
    with make("Pendulum-v1", 2, wrappers=wrappers, **how) as env:
        play(env, Reference([wrapped] * 2, SAME_STEP, 8))


def test_wrapped_constructors_get_their_keywords(how):
    """Those that the inner signature names, as without wrappers."""
    with make(Hunt, 2, wrappers=[BaseParallelWrapper], **how) as env:
        play(env, Reference([Hunt] * 2, SAME_STEP, 8))
    with pytest.raises(TypeError, match="it requires 'size'"):
        make(lambda size: Hunt(size), 2, wrappers=[BaseParallelWrapper], **how)


def test_wrapper_that_returns_nothing(how):
    with pytest.raises(Exception, match=r"wrappers\[1\], .* returned None; does it lack a `return`\?"):
        make(Hunt, 2, wrappers=[BaseParallelWrapper, lambda env: None], **how)


# -- padding -----------------------------------------------------------------------------------------------------------

AGENTS, SIZES, ACTIONS = (
    ["speaker_0", "listener_0"],
    {"speaker_0": 3, "listener_0": 11},
    {"speaker_0": 3, "listener_0": 5},
)


def pad(agent: str, observation: np.ndarray) -> np.ndarray:
    return np.concatenate([observation, np.zeros(11 - SIZES[agent], np.float32)])


def test_padding_beside_a_plain_loop(how):
    """Two agents of mpe2 whose observations and actions differ."""
    plain = [simple_speaker_listener_v4.parallel_env(max_cycles=5) for _ in range(2)]
    rng = np.random.default_rng(1)
    with make("mpe2.simple_speaker_listener_v4", 2, {"max_cycles": 5}, wrappers=[pad_spaces], **how) as env:
        for agent in AGENTS:
            assert env.observation_space[agent].shape == (11,)
            assert env.action_space[agent] == spaces.Discrete(5)
        for episode in range(2):
            expected = [one.reset(seed=8 + i if episode == 0 else None)[0] for i, one in enumerate(plain)]
            if episode == 0:
                observations, infos = env.reset()
            for seen, own, info, masks in zip(observations, expected, infos, env.action_masks):
                assert_same(seen, {agent: pad(agent, own[agent]) for agent in AGENTS})
                assert info.keys() == {*AGENTS}
                assert_same(masks, {agent: np.arange(5) < ACTIONS[agent] for agent in AGENTS})
            for _ in range(5):
                actions = [{agent: int(rng.integers(5)) for agent in AGENTS} for _ in plain]
                observations, rewards, _, truncateds, infos = env.step(actions)
                for i, one in enumerate(plain):
                    valid = {agent: action if action < ACTIONS[agent] else 0 for agent, action in actions[i].items()}
                    own, own_rewards, _, own_truncated, _ = one.step(valid)
                    assert_same(rewards[i], dict(own_rewards))
                    seen = observations[i]
                    if truncateds[i]["__all__"]:
                        seen = {agent: infos[i][agent]["final_obs"] for agent in AGENTS}
                    assert_same(seen, {agent: pad(agent, own[agent]) for agent in AGENTS})
                    assert truncateds[i]["__all__"] == all(own_truncated.values())


def test_padded_agents_as_rows():
    env = make("mpe2.simple_speaker_listener_v4", 3, facade="gymnasium", wrappers=[pad_spaces], backend="serial")
    observations, infos = env.reset(seed=1)
    assert observations.shape == (6, 11)
    assert infos["action_mask"].tolist()[:2] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    env.close()


class Toll(gymnasium.Env):
    """Observations in dicts with masks of unequal lengths."""

    possible_agents = ("car", "bus")
    observation_space = spaces.Dict(
        {
            agent: spaces.Dict(view=spaces.Box(-2, high, (n, 2)), action_mask=spaces.Box(0, 1, (n,), np.int8))
            for agent, high, n in (("car", 1.0, 2), ("bus", 5.0, 3))
        }
    )
    action_space = spaces.Dict(car=spaces.Discrete(2), bus=spaces.Discrete(3))

    def seen(self) -> dict[str, Any]:
        return {
            "car": {"view": np.full((2, 2), 0.5, np.float32), "action_mask": np.array([0, 1], np.int8)},
            "bus": {"view": np.full((3, 2), 4.0, np.float32), "action_mask": np.array([1, 0, 1], np.int8)},
        }

    def reset(self, *, seed=None, options=None):
        return self.seen(), {}

    def step(self, actions):
        self.actions = actions
        return self.seen(), {"car": 1.0}, {"__all__": False}, {"__all__": False}, {"bus": {"late": 1}}


def test_padding_of_dicts_with_masks(how):
    with make(Toll, 2, wrappers=[pad_spaces], **how) as env:
        for agent in Toll.possible_agents:
            view = env.observation_space[agent]["view"]
            assert (view.shape, view.low.min(), view.high.max()) == ((3, 2), -2.0, 5.0)
            assert env.action_space[agent] == spaces.Discrete(3)
        observations, infos = env.reset()
        assert infos == ({}, {})
        car = {"view": np.array([[0.5] * 2] * 2 + [[0.0] * 2], np.float32), "action_mask": np.array([0, 1, 0], np.int8)}
        assert_same(observations[1], {"car": car, "bus": Toll().seen()["bus"]})
        assert [masks["car"].tolist() for masks in env.action_masks] == [[False, True, False]] * 2
        infos = env.step([{"car": 2, "bus": 2}, {"car": 1}])[4]
        assert infos[0] == {"bus": {"late": 1}}
        assert env.get_attr("actions") == ({"car": 0, "bus": 2}, {"car": 1})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"action_space": spaces.Dict(car=spaces.Discrete(2), bus=spaces.Box(0, 1))}, "pads Discrete actions"),
        ({"action_space": spaces.Dict(car=spaces.Discrete(2, start=1), bus=spaces.Discrete(3))}, "equal starts"),
        (
            {"observation_space": spaces.Dict(car=spaces.Box(0, 1, (2,)), bus=spaces.Discrete(3))},
            "pads Box observations",
        ),
        ({"action_space": None}, "needs an action space of each agent"),
    ],
)
def test_spaces_that_cannot_be_padded(changed, message):
    with pytest.raises(EnvError, match=message) as caught:
        make(type("Changed", (Toll,), changed), wrappers=[pad_spaces], backend="serial")
    assert caught.value.method == "constructor"


# -- types and descriptions --------------------------------------------------------------------------------------------


def test_types_name_all_values():
    """The types of the string options list what there is; `test_settings.py` compares the arguments."""
    assert {*get_args(AdapterName)} == {*ADAPTERS}
    assert {*get_args(BackendName)} == {*NAMES, *AUTOMATIC}
    assert get_args(Wait) == WAITS
    assert {*get_args(AutoresetName)} == {
        form for mode in AutoresetMode for form in (mode.name, mode.value, mode.name.lower())
    }
    for name in get_args(FacadeName):
        if name != "stacked":
            with contextlib.suppress(ImportError):
                maker = Skirmish if name == "pymarl" else "mpe2.simple_spread_v3"
                assert make(maker, facade=name, backend="serial").parallel_env.close() is None


@pytest.mark.parametrize("facade", ["pettingzoo", "gymnasium"])
def test_descriptions(facade):
    env = make("mpe2.simple_spread_v3", 2, facade=facade, num_workers=2)
    parallel = env.parallel_env
    assert parallel is env.env
    mode = parallel.metadata["autoreset_mode"].name
    backend = type(parallel.stepper.source.backend).__name__  # of the system's kind
    inner = (
        f"ParallelEnv(num_envs=2, agents=['agent_0', 'agent_1', 'agent_2'], num_workers=2, backend={backend}, "
        f"auto_reset={mode}, closed="
    )
    assert repr(parallel) == f"{inner}False)"
    assert repr(env) == f"{type(env).__name__}({inner}False))"
    env.close()
    assert repr(env) == f"{type(env).__name__}({inner}True))"
