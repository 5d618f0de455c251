"""Errors of simulators without `adapter=` whose results have a known form, such as that of an older API.

They name the form that fits, at construction or at the first reset or step, and following them helps.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import AdapterMismatch, NotAnEnvironment, adapt
from marl_parallel.adapters.mappo_env import MAPPOEnv

K, BOX, MOVES, WIDE = 3, spaces.Box(-9, 9, (4,)), spaces.Discrete(5), spaces.Box(-9, 9, (12,))
NAMES = ["a", "b"]


def rows(number: int = K, size: int = 4) -> list[np.ndarray]:
    return [np.full(size, place, np.float32) for place in range(number)]


def by_name(value: Any) -> dict[str, Any]:
    return {name: np.zeros(4, np.float32) if value is None else value for name in NAMES}


class Listed:
    """Returns lists: observations alone, and four values."""

    first: Any = rows()

    def reset(self) -> Any:
        return self.first

    def step(self, actions: Any) -> Any:
        return rows(), [0.0] * K, [False] * K, [{}] * K


class Mapped:
    """Returns dicts: observations alone, and four values."""

    first: Any = by_name(None)
    then: Any = by_name(None), by_name(0.0), by_name(False), by_name({})

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return self.first

    def step(self, actions: Any) -> Any:
        return self.then


def kind(*bases: type, **attributes: Any) -> type:
    return type("Simulator", bases, attributes)


def lists(number: int = K, **attributes: Any) -> dict[str, Any]:
    return {"observation_space": [BOX] * number, "action_space": [MOVES] * number, **attributes}


NAMED = {
    "possible_agents": NAMES, "agents": NAMES, "metadata": {},
    "observation_space": lambda self, agent: BOX, "action_space": lambda self, agent: MOVES,
}  # fmt: skip
OLD_GYM = type("Env", (), {"__module__": "gym.core"})
ALONE = r"in reset: .*\. It returned observations without infos, in a list, as simulators of MAPPO do: "
SHARES = (
    r"in reset: .*\. It returned observations, share observations and available actions, as simulators of MAPPO .*: "
)
SET_SHARE = (
    r"set `env\.share_observation_space = env\.observation_space` in the constructor, and pass adapter=\"mappo\""
)
DECLARE = r"let it declare `observation_space`, `action_space`, `share_observation_space`, lists .* adapter=\"mappo\""
DECLARE_SHARE = r"let it declare `share_observation_space`, a list with one space per agent, and pass adapter=\"mappo\""
WITHOUT_INFOS = r"in reset: .*\. It returned observations without infos: let `reset` return \(observations, \{\}\)"
FLAGS = r"let `step` return five values, with terminated and truncated flags in place of dones"
THREE = rows(), rows(size=12), np.ones((K, 5))

FORMS: dict[str, tuple[type, str]] = {
    # lists, and no infos
    "lists of spaces": (kind(Listed, **lists()), ALONE + SET_SHARE),
    "lists of spaces and a number": (kind(Listed, **lists(n_agents=K)), ALONE + SET_SHARE),
    "an array of observations": (kind(Listed, **lists(), first=np.stack(rows())), ALONE + SET_SHARE),
    "one space for all": (kind(Listed, observation_space=BOX, action_space=MOVES, n_agents=K), ALONE + SET_SHARE),
    "without spaces": (kind(Listed), ALONE + DECLARE),
    "without spaces, an array": (kind(Listed, first=np.stack(rows())), ALONE + DECLARE),
    "without spaces, with a number": (kind(Listed, num_agents=K), ALONE + DECLARE),
    "a gymnasium.Env with lists": (kind(Listed, gymnasium.Env, **lists()), ALONE + SET_SHARE),
    "Tuple spaces": (
        kind(Listed, observation_space=spaces.Tuple([BOX] * K), action_space=spaces.Tuple([MOVES] * K)),
        ALONE + SET_SHARE,
    ),
    "two agents, in a tuple": (kind(Listed, **lists(2), first=tuple(rows(2))), ALONE + SET_SHARE),
    "two agents, observations of two numbers": (
        kind(Listed, observation_space=[spaces.Box(-9, 9, (2,))] * 2, action_space=[MOVES] * 2,
             first=tuple(rows(2, 2))),
        ALONE + SET_SHARE,
    ),
    # share observations
    "three arrays": (kind(Listed, **lists(), first=THREE), SHARES + DECLARE_SHARE),
    "three arrays, as HARL without masks": (kind(Listed, **lists(n_agents=K), first=(*THREE[:2], None)),
                                            SHARES + DECLARE_SHARE),
    "three arrays of one shape": (kind(Listed, **lists(4), first=(rows(4), rows(4), np.ones((4, 4)))),
                                  SHARES + DECLARE_SHARE),
    "three arrays without spaces": (kind(Listed, first=THREE), SHARES + DECLARE),
    "three arrays with a share space": (
        kind(Listed, observation_space=BOX, action_space=MOVES, share_observation_space=WIDE, n_agents=K, first=THREE),
        SHARES + r'pass adapter="mappo"',
    ),
    "two arrays, as a fork of MAPPO": (
        kind(Listed, observation_space=BOX, action_space=MOVES, share_observation_space=WIDE, num_agents=K,
             first=THREE[:2]),
        r'in reset: .*\. It returned observations and share observations, as .* HARL do: pass adapter="mappo"',
    ),
    # dicts
    "a dict": (kind(Mapped, possible_agents=NAMES), WITHOUT_INFOS),
    "a dict without spaces and names": (kind(Mapped), WITHOUT_INFOS),
    "a dict of older PettingZoo": (kind(Mapped, pettingzoo.ParallelEnv, **NAMED), WITHOUT_INFOS),
    "a dict of older RLlib": (
        kind(Mapped, type("MultiAgentEnv", (), {"__module__": "ray.rllib.env.multi_agent_env"})), WITHOUT_INFOS,
    ),
    "four dicts": (
        kind(Mapped, first=(by_name(None), {}), possible_agents=NAMES),
        rf"in step: .*\. Four values are the API of older releases of PettingZoo and RLlib: {FLAGS}",
    ),
    "four dicts of older PettingZoo": (
        kind(Mapped, pettingzoo.ParallelEnv, **NAMED, first=(by_name(None), {})),
        rf"in step: .*\. Four values are the API of older releases of PettingZoo and RLlib: {FLAGS}",
    ),
    "four dicts, and no infos": (
        kind(Mapped, pettingzoo.ParallelEnv, **NAMED, first=(by_name(None), {}),
             then=(by_name(None), by_name(0.0), by_name(False), by_name(np.False_))),
        r"in step: .*\. The infos are missing: let `step` return them as a fifth dict",
    ),
    # four values after observations with infos, and one agent
    "lists with infos, four values": (
        kind(Listed, **lists(), first=(rows(), {})), rf"in step: .*\. Four values are an older API: {FLAGS}",
    ),
    "one agent": (
        kind(Mapped, gymnasium.Env, observation_space=BOX, action_space=MOVES, first=np.zeros(4, np.float32)),
        r"in reset: .*\. It returned an observation without an info, which is the API of OpenAI's gym before 0\.26: "
        r"convert it with Shimmy, or let `reset` return \(observation, \{\}\); if it is of another kind, pass adapter=",
    ),
    "one agent, four values": (
        kind(Mapped, gymnasium.Env, observation_space=BOX, action_space=MOVES, first=(np.zeros(4, np.float32), {}),
             then=(np.zeros(4, np.float32), 0.0, False, {})),
        "in step: .* it returned 4 values: .*; four values are the API of OpenAI's gym, which Shimmy converts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_error_names_the_form_that_fits(name):
    simulator, expected = FORMS[name]

    def reset_and_step(env: ParallelEnv) -> None:
        env.reset()
        env.step([dict.fromkeys(env.possible_agents or NAMES, 0)])

    with ParallelEnv([simulator], backend="serial") as env, pytest.raises(EnvError, match=expected) as caught:
        reset_and_step(env)
    text = str(caught.value).partition("\n\n")[0]
    assert re.search(
        r"AdapterMismatch: `(reset|step)` of .*Simulator must return .*; it returned .* treated as a", text
    )
    if not name.startswith("one agent"):
        assert 'adapter="dict"' not in text
        assert ('adapter="mappo"' in text) == ("MAPPO" in text)


def test_an_environment_of_gym_with_lists_is_told_at_construction():
    with pytest.raises(NotAnEnvironment, match=f"of OpenAI's gym, .*, as simulators of MAPPO: {SET_SHARE}. Else conv"):
        adapt(kind(Listed, OLD_GYM, **lists())())


@pytest.mark.parametrize("name", [name for name in FORMS if SET_SHARE in FORMS[name][1]])
def test_a_simulator_with_lists_works_after_that_advice(name):
    class Advised(FORMS[name][0]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.share_observation_space = self.observation_space

        def step(self, actions: Any) -> Any:
            number = len(actions)
            return self.first, [0.5] * number, [True] * number, [{}] * number

    env = adapt(Advised(), "mappo")
    assert type(env) is MAPPOEnv
    observations, _ = env.reset()
    np.testing.assert_array_equal([*observations.values()], Advised.first)
    assert env.step(dict.fromkeys(observations, 1))[2]["__all__"]


@pytest.mark.parametrize(
    "result", [None, "text", 3, (), [object()] * K, (rows(), "text"), ({}, {}, {}), np.zeros(()), [1, [2]], {1, 2}]
)
def test_other_results_name_the_adapters_that_may_fit(result):
    for attributes in ({}, lists(), {"n_agents": K}):
        env = adapt(kind(Listed, **attributes, first=result)())
        with pytest.raises(AdapterMismatch, match=r"treated as a (dict|tuple) environment; if it is of another kind, "):
            env.reset()
