"""Unusual declarations: spaces on the instance, `reset` without defaults, spaces of OpenAI's gym."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from helpers.setups import Setup
from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper, conversions
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from marl_parallel import ParallelEnv
from marl_parallel.adapters import NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv

AGENTS = ["a", "b"]
SEEN = {"a": spaces.Box(0.0, 1.0, (2,)), "b": spaces.Box(0.0, 1.0, (3,))}
MOVES = {"a": spaces.Discrete(2), "b": spaces.Discrete(3)}


class Simulator:
    """Plays for three steps; its spaces are set in the constructor, in one of several forms."""

    metadata = {"name": "declared"}  # noqa: RUF012

    def __init__(self, form: str = "lambda") -> None:
        self.possible_agents = AGENTS
        self.agents: list[str] = []
        if form == "lambda":
            self.observation_space = lambda agent: SEEN[agent]
            self.action_space = lambda agent: MOVES[agent]
        elif form == "partial":
            self.observation_space, self.action_space = (functools.partial(dict.get, of) for of in (SEEN, MOVES))
        elif form == "dicts":
            self.observation_spaces, self.action_spaces = SEEN, MOVES
        else:
            kind = spaces.Dict if form == "Dict" else dict
            self.observation_space, self.action_space = kind(SEEN), kind(MOVES)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents, self.time = AGENTS[:], 0
        return self.seen(), {agent: {} for agent in AGENTS}

    def seen(self) -> dict[str, Any]:
        return {agent: space.low + 0.25 for agent, space in SEEN.items()}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert all(MOVES[agent].contains(action) for agent, action in actions.items())
        self.time += 1
        over = dict.fromkeys(AGENTS, self.time == 3)
        self.agents = [] if self.time == 3 else self.agents
        return self.seen(), dict.fromkeys(AGENTS, 1.0), over, dict.fromkeys(AGENTS, False), {a: {} for a in AGENTS}


class Parallel(Simulator, pettingzoo.ParallelEnv):
    pass


class Forwards(BaseParallelWrapper):
    """A wrapper without spaces of its own."""


class Narrow(BaseParallelWrapper):
    """A wrapper that sets a space on itself."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = lambda agent: spaces.Box(0.0, 0.5, SEEN[agent].shape)


class Group(gymnasium.Env):
    """A `gymnasium.Env` of several agents, with methods in the place of spaces."""

    def __init__(self) -> None:
        self.simulator, self.possible_agents = Simulator(), AGENTS
        self.observation_space, self.action_space = self.simulator.observation_space, self.simulator.action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self.simulator.reset()

    def step(self, actions: dict) -> Any:
        observations, rewards, ended, truncated, infos = self.simulator.step(actions)
        return observations, rewards, {**ended, "__all__": all(ended.values())}, {**truncated, "__all__": False}, infos


FORMS: dict[str, Callable[[], Any]] = {
    **{
        f"pettingzoo-{form}": functools.partial(Parallel, form)
        for form in ("lambda", "partial", "dicts", "Dict", "dict")
    },
    **{f"plain-{form}": functools.partial(Simulator, form) for form in ("lambda", "partial", "dicts", "Dict", "dict")},
    "wrapped": lambda: Forwards(Parallel()),
    "wrapped-dicts": lambda: Forwards(Parallel("dicts")),
    "aec": lambda: conversions.parallel_to_aec(Parallel()),
    "aec-dicts": lambda: conversions.parallel_to_aec(Parallel("dicts")),
    "aec-wrapped": lambda: OrderEnforcingWrapper(conversions.parallel_to_aec(Parallel())),
    "aec-and-back": lambda: conversions.aec_to_parallel(conversions.parallel_to_aec(Parallel())),
    "gymnasium": Group,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*observation_space:UserWarning", "ignore:.*deprecated:UserWarning")
def test_spaces_of_the_instance(form):
    adapted = adapt(FORMS[form]())
    assert (adapted.possible_agents, adapted.observation_spaces, adapted.action_spaces) == (AGENTS, SEEN, MOVES)
    if "Dict" not in form and "dict" not in form and form != "gymnasium":
        assert adapted.rules is Rules.PETTINGZOO


def test_a_wrapper_with_spaces_of_its_own():
    adapted = adapt(Narrow(Parallel()))
    assert [space.high.max() for space in adapted.observation_spaces.values()] == [0.5, 0.5]
    assert adapted.action_spaces == MOVES


def test_other_adapters_take_methods_too():
    assert adapt(Simulator(), "dict").action_spaces == MOVES
    assert type(adapt(Simulator(), "dict")) is DictEnv
    assert type(adapt(Simulator(), "pettingzoo")) is PettingZooEnv


def test_spaces_of_the_instance_are_played(backend_setup, build):
    """Observations travel as arrays of these spaces, and random actions are drawn from them."""
    env = build([FORMS[form] for form in ("pettingzoo-lambda", "plain-lambda", "wrapped")], backend_setup, False)
    observations, _ = env.reset()
    assert observations[1]["b"].tolist() == [0.25] * 3
    assert (*env.observation_space.items(),) == (*SEEN.items(),)
    for _ in range(3):
        truncateds = env.step(env.sample_actions())[2]
    assert all(one["__all__"] for one in truncateds)


# -- reset without defaults --------------------------------------------------------------------------------------------


class Strict:
    """`reset` needs both; notes what it gets."""

    def reset(self, seed: Any, options: Any) -> Any:
        self.__dict__.setdefault("received", []).append((seed, options))
        return self.first()

    def first(self) -> Any:
        raise NotImplementedError


class StrictDict(Strict):
    observation_space = action_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(2)))

    def first(self) -> Any:
        return dict.fromkeys(AGENTS, 0), {}

    def step(self, actions: Any) -> Any:
        over = {**dict.fromkeys(AGENTS, True), "__all__": True}
        return dict.fromkeys(AGENTS, 0), dict.fromkeys(AGENTS, 0.0), over, dict.fromkeys(over, False), {}


class StrictPettingZoo(StrictDict, pettingzoo.ParallelEnv):
    possible_agents = AGENTS
    metadata: Any = {"name": "strict"}  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:  # type: ignore[override]
        return spaces.Discrete(2)

    action_space = observation_space  # type: ignore[assignment]

    def first(self) -> Any:
        self.agents = AGENTS[:]
        return dict.fromkeys(AGENTS, 0), {agent: {} for agent in AGENTS}

    def step(self, actions: Any) -> Any:
        self.agents = []
        over = dict.fromkeys(AGENTS, True)
        return dict.fromkeys(AGENTS, 0), dict.fromkeys(AGENTS, 0.0), over, dict.fromkeys(AGENTS, False), {}


class LateSpaces(StrictPettingZoo):
    """Makes its spaces in `reset`."""

    def observation_space(self, agent: str) -> Any:  # type: ignore[override]
        return {0: spaces.Discrete(2)}[len(self.received) - 1] if hasattr(self, "received") else self.missing

    action_space = observation_space  # type: ignore[assignment]


class StrictTuple(Strict):
    n_agents = 2
    observation_space = action_space = spaces.Tuple([spaces.Discrete(2)] * 2)

    def first(self) -> Any:
        return (0, 0), {}

    def step(self, actions: Any) -> Any:
        return (0, 0), (0.0, 0.0), True, False, {}


class StrictGymnasium(Strict, gymnasium.Env):
    observation_space = action_space = spaces.Discrete(2)

    def first(self) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, True, False, {}


class KeywordsOnly(StrictDict):
    def reset(self, *, seed: Any, options: Any) -> Any:
        return super().reset(seed, options)


class StrictTurns(Strict, pettingzoo.AECEnv):
    """One agent, which has one turn."""

    metadata: Any = {"name": "strict", "is_parallelizable": True}  # noqa: RUF012
    possible_agents = AGENTS[:1]

    def observation_space(self, agent: str) -> Any:  # type: ignore[override]
        return spaces.Discrete(2)

    action_space = observation_space  # type: ignore[assignment]

    def first(self) -> Any:
        self.agents, self.agent_selection = AGENTS[:1], "a"
        self.rewards, self._cumulative_rewards = {"a": 0.0}, {"a": 0.0}
        self.terminations, self.truncations, self.infos = {"a": False}, {"a": False}, {"a": {}}

    def observe(self, agent: str) -> Any:
        return 0

    def step(self, action: Any) -> None:
        if self.terminations["a"]:
            self._was_dead_step(action)
        else:
            self.terminations = {"a": True}


class PassesOn(gymnasium.Wrapper):
    def reset(self, **keywords: Any) -> Any:
        return self.env.reset(**keywords)


STRICT: list[tuple[Callable[[], Any], str | None]] = [
    (StrictDict, None), (StrictPettingZoo, None), (StrictTuple, None), (StrictGymnasium, None), (KeywordsOnly, None),
    (StrictDict, "rllib"), (StrictDict, "dict"), (lambda: PassesOn(StrictGymnasium()), None),
    (StrictTurns, None), (lambda: OrderEnforcingWrapper(StrictTurns()), "aec"), (StrictTurns, "aec-turn-based"),
    (lambda: Forwards(StrictPettingZoo()), None), (lambda: conversions.parallel_to_aec(StrictPettingZoo()), None),
]  # fmt: skip


@pytest.mark.parametrize(("make", "adapter"), STRICT)
@pytest.mark.parametrize("seed", [5, "own"])
def test_reset_without_defaults_gets_both(make, adapter, seed):
    with ParallelEnv([make], "SAME_STEP", seed, adapter=adapter, backend="serial") as env:
        env.reset()
        env.step(env.sample_actions())
        env.reset(seed=7, options={"level": 1})
        env.reset(options={"level": 2})
        expected = [(None if seed == "own" else 5, None), (None, None), (7, {"level": 1}), (None, {"level": 2})]
        assert env.get_attr("received") == (expected,)


def test_only_what_has_no_default_is_added():
    class OnlySeed(StrictDict):
        def reset(self, seed: Any) -> Any:  # type: ignore[override]
            return super().reset(seed, "no options")

    with ParallelEnv([OnlySeed], backend="serial") as env:
        env.reset()
        env.reset()
        assert env.get_attr("received") == ([(42, "no options"), (None, "no options")],)
        with pytest.raises(ValueError, match="takes no options"):
            env.reset(options={})


def test_spaces_that_such_a_reset_makes():
    assert adapt(LateSpaces()).observation_spaces == dict.fromkeys(AGENTS, spaces.Discrete(2))


# -- spaces of OpenAI's gym --------------------------------------------------------------------------------------------


class OldSpace:
    """Stands for `gym.spaces.Space`."""

    def __repr__(self) -> str:
        return "Box(4,)"


OldSpace.__module__, OldSpace.__qualname__, OldSpace.__name__ = "gym.spaces.space", "Space", "Space"


class OldDeclarations:
    """Has spaces of OpenAI's gym in a form that an adapter looks for."""

    n_agents = 2

    def __init__(self, declaration: Any, name: str = "observation_space") -> None:
        self.possible_agents, self.observation_space, self.action_space = AGENTS, None, None
        setattr(self, name, declaration)

    def reset(self, seed: Any = None) -> Any:
        raise AssertionError("never reset")

    step = reset


OLD = OldSpace()


OLD_FORMS: dict[str, Any] = {
    "one": OLD, "list": [OLD, OLD], "tuple": (OLD, OLD), "dict": {"a": OLD, "b": OLD}, "method": lambda agent: OLD
}  # fmt: skip


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize(
    ("adapter", "form"),
    [
        (adapter, form)
        for adapter in (None, "dict", "tuple", "gymnasium", "pettingzoo", "rllib")
        for form in OLD_FORMS
        if form != "method" or adapter not in ("tuple", "gymnasium")  # which take no methods
    ],
)
def test_spaces_of_openai_gym_are_named(adapter, form, name):
    with pytest.raises(NotAnEnvironment) as caught:
        adapt(OldDeclarations(OLD_FORMS[form], name), adapter)
    text = str(caught.value)
    assert name in text
    assert "Box(4,), a space of OpenAI's gym (gym.spaces.space.Space), and not of Gymnasium" in text
    assert "from gymnasium import spaces" in text


def test_spaces_of_openai_gym_with_workers(build):
    constructor = functools.partial(OldDeclarations, [OLD, OLD], "action_space")
    with pytest.raises(TypeError, match=r"environment 0: the action_space of .*OldDeclarations has Box\(4,\), a space"):
        build([constructor] * 2, Setup("process", True, 2), adapter="tuple")


def test_errors_never_list_the_adapter_in_use(monkeypatch):
    """Nor those that cannot be used for such a simulator."""
    kind = type("Env", (), {"__module__": "gym.core", "reset": lambda self: 0, "step": lambda self, action: 0})
    monkeypatch.setitem(sys.modules, "gym.core", types.ModuleType("gym.core"))

    def listed(error: Any) -> list[str]:
        return re.findall('adapter="([a-z]+)"', str(error.value))

    with pytest.raises(NotAnEnvironment) as caught:
        adapt(kind())
    assert listed(caught) == ["dict", "gymnasium"]
    monkeypatch.setattr(kind, "n_agents", 2, raising=False)
    with pytest.raises(NotAnEnvironment) as caught:
        adapt(kind())
    assert listed(caught) == ["dict", "tuple", "gymnasium"]
    wrong: dict[str, Any] = {"dict": StrictTuple, "tuple": StrictTuple, "gymnasium": StrictGymnasium}
    for adapter, make in wrong.items():
        with (
            pytest.raises(Exception, match="It was treated as") as caught,
            ParallelEnv([lambda make=make: _Wrong(make())], adapter=adapter, backend="serial") as env,
        ):
            env.reset()
        assert listed(caught)
        assert adapter not in listed(caught)


class _Wrong:
    """Another result of `reset` than any adapter takes."""

    def __init__(self, env: Any) -> None:
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.n_agents = getattr(env, "n_agents", 1)

    def reset(self) -> Any:
        return np.zeros(3)

    def step(self, action: Any) -> Any:
        raise AssertionError("never stepped")


def test_conversions_of_pettingzoo_warn_of_nothing(recwarn):
    """Their `observation_spaces` warns that it is deprecated; nobody has used it."""
    adapt(conversions.aec_to_parallel(conversions.parallel_to_aec(simple_spread_v3.parallel_env())))
    adapt(simple_spread_v3.parallel_env())
    assert [str(warning.message) for warning in recwarn] == []
