"""Reserved and duplicate agent names: two agents with one key, and keys that stand for the whole environment."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from simulators.native_arena import Arena

from marl_parallel import EnvError, ParallelEnv, RestartLimitExceeded
from marl_parallel.adapters import MultiAgentEnv, Rules
from marl_parallel.adapters.protocol import Schema

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

SPACE, ACTIONS = spaces.Box(0.0, 1.0, (2,), np.float32), spaces.Discrete(3)


class DictRoom:
    """Dict rules, with configurable agents and dict entries."""

    def __init__(self, possible: Any, there: Any = ("a", "b"), **extra: Any) -> None:
        self.there, self.extra = there, extra
        if possible is not None:
            self.possible_agents = [*possible]

    def dicts(self, moment: str, *empty: str) -> tuple[dict[Any, Any], ...]:
        results: dict[str, dict[Any, Any]] = {
            "observations": {agent: np.zeros(2, np.float32) for agent in self.there},
            "rewards": dict.fromkeys(self.there, 1.0),
            "terminateds": {**dict.fromkeys(self.there, False), "__all__": False},
            "truncateds": {**dict.fromkeys(self.there, False), "__all__": False},
            "infos": {agent: {} for agent in self.there},
        }
        for where, entries in self.extra.items():
            at, _, name = where.partition("_")
            if at == moment:
                results[name] |= entries
        return tuple(results.values())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[Any, Any], ...]:
        observations, _, _, _, infos = self.dicts("reset")
        return observations, infos

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        return self.dicts("step")


class DictRoomWithSpaces(DictRoom):
    """Dict rules; its agents are those that have a space."""

    def __init__(self, possible: Any) -> None:
        super().__init__(None, possible)
        self.observation_spaces = dict.fromkeys(possible, SPACE)
        self.action_spaces = dict.fromkeys(possible, ACTIONS)


class PettingZooRoom(pettingzoo.ParallelEnv):
    """PettingZoo rules."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None

    def __init__(self, possible: Any) -> None:
        self.possible_agents = [*possible]

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return SPACE

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return ACTIONS


class TurnsRoom(pettingzoo.AECEnv):
    """Agents act in turn."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "is_parallelizable": False}
    render_mode = None

    def __init__(self, possible: Any) -> None:
        super().__init__()
        self.possible_agents = [*possible]

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return SPACE

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return ACTIONS

    def observe(self, agent: Any) -> Any:
        return np.zeros(2, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        raise NotImplementedError

    def step(self, action: Any) -> None:
        raise NotImplementedError


class CustomAdapter(MultiAgentEnv):
    """A user-defined `MultiAgentEnv`."""

    rules = Rules.DICT
    state_space = render_mode = None
    metadata: ClassVar[dict[str, Any]] = {}
    reset_keywords = frozenset()

    def __init__(self, possible: Any) -> None:
        self.possible_agents = [*possible]
        self.observation_spaces = dict.fromkeys(possible, SPACE)
        self.action_spaces = dict.fromkeys(possible, ACTIONS)

    def reset(self, **keywords: Any) -> Any:
        raise NotImplementedError

    step = render = state = close = reset


KINDS = [DictRoom, PettingZooRoom, TurnsRoom, CustomAdapter]
DECLARED = {
    "doubled": (["a", "b", "a"], r"agents 0 and 2 as 'a' and 'a', which are the same key"),
    "true and one": ([True, 2, 1], r"agents 0 and 2 as True and 1, which are the same key"),
    "equal numbers": ([1, 2, 2.0], r"agents 1 and 2 as 2 and 2\.0, which are the same key"),
    "equal strings": (["a", np.str_("a")], r"agents 0 and 1 as 'a' and .*'a'.*, which are the same key"),
    "all": (["a", "__all__"], r"an agent named '__all__', which is the key of the flags of the whole episode"),
    "common": (["a", "__common__"], r"an agent named '__common__', which is the key of the infos of the whole"),
}


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("kind", KINDS)
def test_reserved_names_in_possible_agents(kind, name, parallel):
    possible, text = DECLARED[name]
    with pytest.raises(ValueError, match=rf"^environment 1: .*{kind.__name__} declares {text}"):
        parallel_of(parallel, functools.partial(kind, ["a", "b"]), functools.partial(kind, possible))


def parallel_of(parallel: Any, *constructors: Any) -> Any:
    def chosen(env_id: int) -> Any:
        return constructors[env_id]()

    return parallel(chosen, len(constructors))


def test_reserved_names_in_spaces(parallel):
    with pytest.raises(ValueError, match=r"environment 0: .*DictRoomWithSpaces declares an agent named '__all__'"):
        parallel(functools.partial(DictRoomWithSpaces, ["a", "__all__"]))


def test_reserved_names_on_every_backend(two_worker_setup, build):
    """All environments that were built are closed."""
    with pytest.raises(ValueError, match=r"environment 0: .*PettingZooRoom declares agents 0 and 1 as True and 1"):
        build([functools.partial(PettingZooRoom, [True, 1])] * 2, two_worker_setup)
    with pytest.raises(ValueError, match=r"environment 0: .*DictRoom declares an agent named '__all__'"):
        build([functools.partial(DictRoom, ["a", "__all__"])] * 2, two_worker_setup)


def test_reserved_names_of_a_native_simulator():
    arena = Arena(2)
    declared = arena.schema
    arena.schema = Schema(["a", "a"], declared.observation_spaces, declared.action_spaces, None)
    with pytest.raises(ValueError, match=r"declares agents 0 and 1 as 'a' and 'a'"):
        ParallelEnv.from_native(arena)


def test_a_native_simulator_that_is_not_complete():
    arena = Arena(2)
    arena.seeds = [0]
    with pytest.raises(ValueError, match=r"the arena: seeds must have 2 entries, one for each environment; it has 1"):
        ParallelEnv.from_native(arena)
    del arena.seeds, arena.schema
    with pytest.raises(TypeError, match=r"Arena has no schema and no seeds; a NativeSimulator must set them"):
        ParallelEnv.from_native(arena)


@pytest.mark.parametrize("possible", [["a", "b"], None], ids=["declared", "open-ended"])
@pytest.mark.parametrize("on_error", ["raise", "restart"])
@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ("step_observations", {"__all__": np.zeros(2)}, "`step` returned an observation of an agent named '__all__'"),
        ("step_rewards", {"__all__": 2.0}, "`step` returned a reward of an agent named '__all__'"),
        ("step_observations", {"__common__": 1}, "`step` returned an observation of an agent named '__common__'"),
        ("reset_observations", {"__all__": np.zeros(2)}, "`reset` returned an observation of an agent named '__all__'"),
    ],
)  # fmt: skip
def test_reserved_names_that_appear_during_an_episode(where, value, text, on_error, possible, backend_setup, build):
    constructors = [functools.partial(DictRoom, possible), functools.partial(DictRoom, possible, **{where: value})]
    if possible:
        assert [*constructors[0]().possible_agents] == possible
    env = build(constructors, backend_setup, on_error=on_error)
    steps = where.startswith("step")
    if steps:
        env.reset()

    def call() -> Any:
        return env.step([{}, {}]) if steps else env.reset()

    if on_error == "raise" or not steps:
        error = EnvError if on_error == "raise" else RestartLimitExceeded  # the replacement does it again
        with pytest.raises(error, match=text) as caught:
            call()
        assert caught.value.env_ids == (1,)
    else:
        infos = call()[4]
        assert "__common__" not in infos[0]
        assert text in infos[1]["__common__"]["error"]


@pytest.mark.parametrize("possible", [["a", "b"], None], ids=["declared", "open-ended"])
def test_environment_level_infos_are_kept(possible, backend_setup, build):
    """Includes info keys that agents cannot have, and `__all__` in the flags."""
    common = {"weather": "rain"}
    extra = {
        "step_infos": {"__common__": common, "__all__": {"time": 3}, "crash": 1},
        "reset_infos": {"__common__": {}},
    }
    env = build([functools.partial(DictRoom, possible, **extra)] * 2, backend_setup)
    _, infos = env.reset()
    assert infos == ({"a": {}, "b": {}, "__common__": {}},) * 2
    _, rewards, terminateds, _, infos = env.step([{}, {}])
    assert infos == ({"a": {}, "b": {}, **extra["step_infos"]},) * 2
    assert rewards == ({"a": 1.0, "b": 1.0},) * 2
    assert terminateds == ({"a": False, "b": False, "__all__": False},) * 2
