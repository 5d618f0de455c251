"""What the outermost object says about itself counts: spaces, agents, state, metadata, rendering and `close`.

The wrappers are plain objects, Gymnasium's, PettingZoo's, and wrappers around wrappers; beneath is a simulator of each
kind that declares something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper
from pettingzoo.utils.conversions import parallel_to_aec

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import LookupFailed, NotAnEnvironment, Rules, adapt, attributes
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.vector.gymnasium import GymnasiumVectorEnv
from marl_parallel.vector.pettingzoo import PettingZooVecEnv
from marl_parallel.vector.share import ShareDummyVecEnv

AGENTS, INNER_AGENTS = ["a", "b"], ["a", "b", "c"]
SEEN, MOVES, STATE = spaces.Box(-9.0, 9.0, (2,), np.float64), spaces.Discrete(6), spaces.Box(-9.0, 9.0, (5,))
INNER_SEEN, INNER_MOVES = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)
METADATA, INNER_METADATA = {"name": "outer"}, {"name": "inner", "is_parallelizable": True}


def of(agents: list[str], space: spaces.Space[Any]) -> spaces.Dict:
    return spaces.Dict([(agent, space) for agent in agents])


# -- simulators --------------------------------------------------------------------------------------------------------


class Engine:
    """What all simulators have in common. Each `close` and `render` is counted."""

    metadata, render_mode = INNER_METADATA, "ansi"

    def __init__(self) -> None:
        self.closed = self.rendered = 0

    def close(self) -> None:
        self.closed += 1

    def render(self) -> str:
        self.rendered += 1
        return "inner"

    def state(self) -> Any:
        return np.zeros(7, np.float32)

    state_space = spaces.Box(-1.0, 1.0, (7,))


class Dicts(Engine, gymnasium.Env):
    possible_agents = INNER_AGENTS
    observation_space, action_space = of(INNER_AGENTS, INNER_SEEN), of(INNER_AGENTS, INNER_MOVES)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return dict.fromkeys(AGENTS, np.full(2, 1 / 3)), {}

    def step(self, actions: Any) -> Any:
        flags = {"__all__": False}
        return dict.fromkeys(AGENTS, np.full(2, 1 / 3)), dict.fromkeys(AGENTS, 1.0), flags, flags, {}


class PlainDicts(Engine):
    possible_agents, observation_space, action_space = INNER_AGENTS, Dicts.observation_space, Dicts.action_space
    reset, step = Dicts.reset, Dicts.step


class Tuples(Engine, gymnasium.Env):
    n_agents = 3
    observation_space, action_space = spaces.Tuple([INNER_SEEN] * 3), spaces.Tuple([INNER_MOVES] * 3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return (np.zeros(2),) * 2, {}

    def step(self, actions: Any) -> Any:
        return (np.zeros(2),) * 2, (0.0, 0.0), False, False, {}


class Lists(Engine):
    n_agents = 3
    observation_space, action_space = [INNER_SEEN] * 3, [INNER_MOVES] * 3
    share_observation_space = [INNER_SEEN] * 3

    def reset(self) -> Any:
        return [np.zeros(2)] * 2

    def step(self, actions: Any) -> Any:
        return [np.zeros(2)] * 2, [[0.0]] * 2, [False] * 2, [{}] * 2


class Single(Engine, gymnasium.Env):
    observation_space, action_space = INNER_SEEN, INNER_MOVES

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.full(2, 1 / 3), {}

    def step(self, action: Any) -> Any:
        return np.full(2, 1 / 3), 0.0, False, False, {}


class Parallel(Engine, pettingzoo.ParallelEnv):
    possible_agents = INNER_AGENTS
    agents = AGENTS

    def observation_space(self, agent: str) -> Any:
        return INNER_SEEN

    def action_space(self, agent: str) -> Any:
        return INNER_MOVES

    reset, step = Dicts.reset, Dicts.step  # type: ignore[assignment]


class Battle(Engine):
    """PyMARL's methods; its spaces come from `get_env_info`, so wrappers say theirs there."""

    def get_env_info(self) -> Any:
        return {"n_agents": 3, "n_actions": 3, "obs_shape": 2, "state_shape": 4, "episode_limit": 9}

    def get_obs(self) -> Any:
        return [np.zeros(2, np.float32)] * 3

    def get_state(self) -> Any:
        return np.zeros(4, np.float32)

    def get_avail_actions(self) -> Any:
        return [[1] * 3] * 3

    def reset(self) -> Any:
        return None

    def step(self, actions: Any) -> Any:
        return 0.0, False, {}


KINDS: dict[str, Callable[[], Any]] = {
    "dict": Dicts, "dict-plain": PlainDicts, "tuple": Tuples, "mappo": Lists, "gymnasium": Single,
    "pettingzoo": Parallel, "aec": lambda: parallel_to_aec(Parallel()), "pymarl": Battle,
}  # fmt: skip


# -- wrappers ----------------------------------------------------------------------------------------------------------


class Forwarding:
    """A plain wrapper with `env` and `__getattr__`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class Hiding:
    """The same, with a private name for what it wraps."""

    def __init__(self, env: Any) -> None:
        self._hidden = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_hidden"], name)


class Holding(gymnasium.Env):
    """A `gymnasium.Env` that holds another one; what it does not define, `gymnasium.Env` does."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, **keywords: Any) -> Any:  # type: ignore[override]
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


class HoldingAndForwarding(Holding):
    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class HoldingHidden(gymnasium.Env):
    def __init__(self, env: Any) -> None:
        self._hidden = env

    def reset(self, **keywords: Any) -> Any:  # type: ignore[override]
        return self._hidden.reset(**keywords)

    def step(self, action: Any) -> Any:
        return self._hidden.step(action)

    __getattr__ = Hiding.__getattr__


class Through(gymnasium.Wrapper):
    """Gymnasium's wrapper."""


WRAPPERS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "plain": (Forwarding, {*KINDS}),
    "plain-hidden": (Hiding, {*KINDS}),
    "plain-plain": (lambda env: Forwarding(Forwarding(env)), {*KINDS}),
    "hidden-plain": (lambda env: Hiding(Forwarding(env)), {*KINDS}),
    "plain-around-gymnasium": (lambda env: Forwarding(Through(env)), {"dict", "tuple", "gymnasium"}),
    "gymnasium": (Through, {"dict", "tuple", "gymnasium"}),
    "gymnasium-around-plain": (lambda env: Through(HoldingAndForwarding(env)), {"dict", "tuple", "gymnasium"}),
    "gymnasium-gymnasium": (lambda env: Through(Through(env)), {"dict", "tuple", "gymnasium"}),
    "env": (HoldingAndForwarding, {"dict", "dict-plain", "tuple", "gymnasium"}),
    "env-hidden": (HoldingHidden, {"dict", "dict-plain", "tuple", "gymnasium"}),
    "pettingzoo": (BaseParallelWrapper, {"pettingzoo"}),
    "pettingzoo-around-pettingzoo": (lambda env: BaseParallelWrapper(BaseParallelWrapper(env)), {"pettingzoo"}),
    "plain-around-pettingzoo": (lambda env: Forwarding(BaseParallelWrapper(env)), {"pettingzoo"}),
    "aec": (BaseWrapper, {"aec"}),
    "plain-around-aec": (lambda env: Forwarding(BaseWrapper(env)), {"aec"}),
}
CASES = [(wrapper, kind) for wrapper, (_, kinds) in WRAPPERS.items() for kind in KINDS if kind in kinds]
ADAPTERS = {"dict-plain": "dict"}


def own(kind: str) -> dict[str, Any]:
    """What the outermost wrapper of a kind says, as attributes of its class."""
    lists = {"tuple": spaces.Tuple([SEEN] * 2), "mappo": [SEEN] * 2}
    moves = {"tuple": spaces.Tuple([MOVES] * 2), "mappo": [MOVES] * 2}
    if kind in ("pettingzoo", "aec"):
        said: dict[str, Any] = {
            "observation_space": lambda self, agent: SEEN,
            "action_space": lambda self, agent: MOVES,
        }
    elif kind in ("dict", "dict-plain"):
        said = {"observation_space": of(AGENTS, SEEN), "action_space": of(AGENTS, MOVES)}
    elif kind == "pymarl":
        info = {"n_agents": 2, "n_actions": 6, "obs_shape": 2, "state_shape": 5, "episode_limit": 9}
        said = {"get_env_info": lambda self: info}
    else:
        said = {"observation_space": lists.get(kind, SEEN), "action_space": moves.get(kind, MOVES)}
    said |= {"share_observation_space": [STATE] * 2} if kind == "mappo" else {}
    said |= {"possible_agents": AGENTS, "n_agents": 2, "metadata": {**METADATA, "is_parallelizable": True}}
    said |= {"render_mode": "rgb_array", "render": lambda self: "outer", "state_space": STATE}
    return said | {"state": lambda self: np.ones(5, np.float32), "close": _close}


def _close(self: Any) -> None:
    self.__dict__["times_closed"] = self.__dict__.get("times_closed", 0) + 1
    self.unwrapped_engine().close()


def wrapped(wrapper: str, kind: str, said: dict[str, Any]) -> tuple[Any, Any]:
    """A wrapper that says this, and what is beneath all wrappers."""
    engine = KINDS[kind]()
    inner, env = WRAPPERS[wrapper][0](engine), engine
    base = type(inner)
    env = base.__new__(type("Outer", (base,), {**said, "unwrapped_engine": lambda self: engine}))
    env.__dict__.update(vars(inner))
    return env, engine.unwrapped if kind == "aec" else engine


def counted(engine: Any) -> Any:
    """The object that counts, beneath conversions."""
    return getattr(engine, "env", engine)


@pytest.mark.parametrize(("wrapper", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:The base environment:UserWarning")
def test_what_the_outermost_object_says_counts(wrapper, kind):
    env, engine = wrapped(wrapper, kind, own(kind))
    adapted = adapt(env, ADAPTERS.get(kind, kind))
    agents = {"gymnasium": ["agent_0"], "dict": AGENTS, "dict-plain": AGENTS, "pettingzoo": AGENTS, "aec": AGENTS}
    number = agents.get(kind, ["agent_0", "agent_1"])
    assert adapted.possible_agents == number
    if kind != "pymarl":
        seen = SEEN if kind != "mappo" else spaces.Box(-9.0, 9.0, (2,), np.float64)
        assert adapted.observation_spaces == dict.fromkeys(number, seen)
        assert [space.dtype for space in adapted.observation_spaces.values()] == [np.float64] * len(number)
    assert adapted.action_spaces == dict.fromkeys(number, MOVES)
    assert adapted.metadata["name"] == "outer"
    assert (adapted.render_mode, adapted.render()) == ("rgb_array", "outer")
    assert adapted.state_space is not None
    assert adapted.state_space.shape == {"mappo": (2, 5)}.get(kind, (5,))
    if kind not in ("mappo", "pymarl"):
        assert adapted.state().tolist() == [1.0] * 5
    adapted.close()
    assert (env.__dict__["times_closed"], counted(engine).closed) == (1, 1)
    assert counted(engine).rendered == 0


@pytest.mark.parametrize(("wrapper", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:The base environment:UserWarning")
def test_what_wrappers_do_not_say_is_forwarded(wrapper, kind):
    """Defaults of `gymnasium.Env` and of PettingZoo's base classes say nothing."""
    env, engine = wrapped(wrapper, kind, {})
    adapted = adapt(env, ADAPTERS.get(kind, kind))
    inner = adapt(KINDS[kind](), ADAPTERS.get(kind, kind))
    assert adapted.possible_agents == inner.possible_agents
    assert (adapted.observation_spaces, adapted.action_spaces) == (inner.observation_spaces, inner.action_spaces)
    assert (adapted.metadata["name"], adapted.render_mode) == ("inner", "ansi")
    assert adapted.state_space == inner.state_space is not None
    if kind == "aec":
        env.reset()
    assert adapted.render() == "inner"
    adapted.close()
    assert (counted(engine).closed, counted(engine).rendered) == (1, 1)


@pytest.mark.parametrize(("wrapper", "kind"), [case for case in CASES if case[1] not in ("mappo", "pymarl")])
@pytest.mark.filterwarnings("ignore:The base environment:UserWarning")
def test_the_global_state_is_of_the_present_simulator(wrapper, kind):
    """A wrapper may replace what it wraps in each episode, or within one."""
    env, _ = wrapped(wrapper, kind, {})
    adapted = adapt(env, ADAPTERS.get(kind, kind))
    env.reset()
    assert adapted.state().tolist() == [0.0] * 7
    attribute = "_hidden" if "_hidden" in vars(env) else "env"
    for number in (1.0, 2.0):
        replacement = KINDS[kind]()
        counted(replacement).state = lambda number=number: np.full(7, number, np.float32)
        setattr(env, attribute, replacement)
        env.reset()
        assert adapted.state().tolist() == [number] * 7


@pytest.mark.parametrize("between", [Holding, lambda env: Holding(Holding(env)), lambda env: Through(Holding(env))])
def test_defaults_of_gymnasium_say_nothing_without_getattr_either(between):
    """The engine beneath is closed and rendered; spaces are not taken from it, since they may not fit."""
    engine = Single()
    adapted = adapt(between(engine))
    assert (adapted.metadata, adapted.render_mode, adapted.render()) == (INNER_METADATA, "ansi", "inner")
    assert adapted.observation_spaces == {}
    assert attributes.find(adapted.source, "metadata") is INNER_METADATA
    assert attributes.find(adapted.source, "render_mode") == "ansi"
    adapted.close()
    assert engine.closed == 1


def test_a_plain_wrapper_without_close_closes_what_it_holds():
    class Plain:
        observation_space = action_space = of(AGENTS, INNER_MOVES)

        def __init__(self) -> None:
            self.env = Forwarding(Holding(Single()))

        reset, step = Dicts.reset, Dicts.step

    adapted = adapt(Plain())
    adapted.close()
    assert adapted.source.env.env.env.closed == 1
    assert adapted.metadata == {}


def test_what_a_wrapper_of_gymnasium_sets_on_itself():
    class Sets(gymnasium.Wrapper):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_space, self.action_space, self.metadata = of(AGENTS, SEEN), of(AGENTS, MOVES), METADATA
            self._render_mode, self._close = "human", "not for others"

    for env in (Sets(Dicts()), Through(Sets(Dicts())), Forwarding(Sets(Dicts())), Hiding(Through(Sets(Dicts())))):
        adapted = adapt(env, "dict")
        assert (adapted.possible_agents, adapted.metadata) == (INNER_AGENTS, METADATA)
        assert adapted.render_mode == "ansi"
        assert adapted.observation_spaces == dict.fromkeys(AGENTS, SEEN)
        assert adapted.action_spaces == dict.fromkeys(AGENTS, MOVES)
        assert attributes.find(env, "metadata") is METADATA


def test_values_that_are_none_are_said():
    class Silent(HoldingAndForwarding):
        def __init__(self) -> None:
            super().__init__(Dicts())
            self.render_mode, self.state_space = None, None

    adapted = adapt(Silent())
    assert (adapted.render_mode, adapted.state_space) == (None, None)
    assert adapted.metadata == INNER_METADATA


class Louder(Forwarding):
    """A plain wrapper that changes agents and spaces; notes each `close` in a file."""

    possible_agents = AGENTS
    observation_space, action_space = of(AGENTS, SEEN), of(AGENTS, MOVES)

    def __init__(self, path: Any) -> None:
        super().__init__(Dicts())
        self.path = path

    def close(self) -> None:
        self.env.close()
        with open(self.path, "a") as file:
            file.write(f"{self.env.closed}\n")


def test_a_plain_wrapper_on_every_backend(backend_setup, build, tmp_path):
    """Observations stay float64, actions are those of the wrapper's space, and each engine is closed once."""
    env = build([functools.partial(Louder, tmp_path / "closed")] * 2, backend_setup)
    observations, _ = env.reset()
    assert observations[0]["a"].dtype == np.float64
    assert observations[1]["b"].tolist() == [1 / 3] * 2
    assert env.action_space == of(AGENTS, MOVES)
    env.step([dict.fromkeys(AGENTS, 5)] * 2)
    assert env.get_attr("possible_agents") == (AGENTS,) * 2
    assert env.render_mode == "ansi"
    assert env.render() == ("inner",) * 2
    env.close()
    assert (tmp_path / "closed").read_text().split() == ["1", "1"]


class LouderLists(Forwarding):
    n_agents = 2
    observation_space, action_space, share_observation_space = [SEEN] * 2, [MOVES] * 2, [STATE] * 2

    def __init__(self) -> None:
        super().__init__(Lists())


def test_facades_have_the_wrappers_spaces(tmp_path):
    rows = GymnasiumVectorEnv(
        ParallelEnv([functools.partial(Louder, tmp_path / "closed")] * 2, "NEXT_STEP", backend="serial")
    )
    assert (rows.single_action_space, rows.single_observation_space.dtype) == (MOVES, np.float64)
    assert rows.reset(seed=1)[0].dtype == np.float64
    rows.close()
    parallel = PettingZooVecEnv(ParallelEnv([functools.partial(Louder, tmp_path / "closed")], backend="serial"))
    assert parallel.single_action_space("a") == MOVES
    parallel.close()
    assert (tmp_path / "closed").read_text().split() == ["1"] * 3
    share = ShareDummyVecEnv([LouderLists])
    assert (share.action_space[0], share.share_observation_space[0].shape) == (MOVES, (5,))
    share.close()


# -- proxies that answer every name ------------------------------------------------------------------------------------


class Remote:
    """A proxy whose `__getattr__` returns a method for every name, as for remote procedure calls."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self._server.__dict__.setdefault("calls", []).append(name)
            return getattr(self._server, name)(*args, **keywords)

        return call


class RemoteWithSpaces(Remote):
    possible_agents, observation_space, action_space = AGENTS, of(AGENTS, SEEN), of(AGENTS, MOVES)


class Values:
    """A proxy whose calls and values are all answered; unknown names raise an error of its own."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._server, name):
            raise ConnectionError(f"the server has no {name}")
        return getattr(self._server, name)


class Anything(dict):
    """Answers every name with a callable object, as `unittest.mock` does, and has methods of its own."""

    reset, step = Dicts.reset, Dicts.step

    def __getattr__(self, name: str) -> Any:
        return mock.MagicMock(name=name)


def remote(kind: type[Any] = Remote, server: type[Any] = Dicts) -> Any:
    return kind(server())


@pytest.mark.parametrize(
    ("make", "agents"),
    [
        (remote, []),
        (functools.partial(remote, RemoteWithSpaces), AGENTS),
        (functools.partial(remote, Values), INNER_AGENTS),
        (Anything, []),
        (lambda: Forwarding(remote()), []),
        (lambda: Forwarding(remote(RemoteWithSpaces)), AGENTS),
    ],
    ids=["calls", "calls-with-spaces", "values", "mock", "wrapped", "wrapped-with-spaces"],
)
@pytest.mark.parametrize("adapter", ["dict", None])
def test_proxies_are_dict_environments(make, agents, adapter):
    """With and without `adapter=`; a method that stands for every name declares nothing."""
    adapted = adapt(make(), adapter)
    assert type(adapted) is DictEnv
    assert (adapted.possible_agents, [*adapted.observation_spaces]) == (agents, agents)
    assert adapted.state_space is None or agents == INNER_AGENTS
    with ParallelEnv([make], adapter=adapter, backend="serial") as env:
        observations, _ = env.reset()
        assert observations[0]["a"] == pytest.approx([1 / 3] * 2)
        assert env.step([dict.fromkeys(AGENTS, 2)])[1] == (dict.fromkeys(AGENTS, 1.0),)


def test_a_proxy_in_a_process_is_closed_through_its_calls():
    with ParallelEnv([remote, functools.partial(remote, RemoteWithSpaces)][:1] * 2, adapter="dict") as env:
        env.reset()
        assert env.step([dict.fromkeys(AGENTS, 2)] * 2)[1] == (dict.fromkeys(AGENTS, 1.0),) * 2
    proxy = remote()
    adapt(proxy, "dict").close()
    assert proxy._server.closed == 1
    assert proxy._server.calls == ["close"]  # nothing has been called to find out what it is


def test_other_adapters_take_the_methods_of_proxies():
    adapted = adapt(remote(server=Battle), "pymarl")
    assert adapted.possible_agents == ["agent_0", "agent_1", "agent_2"]
    adapted.reset()
    for adapter, text in [("tuple", "one space per agent or an attribute `n_agents`"), ("mappo", "lists of spaces")]:
        with pytest.raises(NotAnEnvironment, match=text):
            adapt(remote(), adapter)


def test_an_object_without_reset_and_step_is_still_refused():
    with pytest.raises(NotAnEnvironment, match=r"got .*Values without `reset` and `step`"):
        adapt(Values(object()))
    with pytest.raises(NotAnEnvironment, match="A dict environment has no method `reset` and no method `step`"):
        adapt(Forwarding(object()), "dict")


# -- properties with mistakes ------------------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[Any], Any]] = {
    "another-name": lambda self: self.mispelled,
    "inner-name": lambda self: self.unwrapped_config.mispelled,
    "key": lambda self: {}["map"],
    "type": lambda self: len(3),  # type: ignore[arg-type]
    "runtime": lambda self: self.fail(),
}
NAMES = [
    "possible_agents",
    "observation_space",
    "action_space",
    "state_space",
    "reward_space",
    "metadata",
    "render_mode",
]


class Config:
    pass


def with_property(base: type[Any], name: str, getter: Callable[[Any], Any], kind: Any = property) -> type[Any]:
    def fail(self: Any) -> None:
        raise RuntimeError("no map has been loaded")

    members = {name: kind(getter), "fail": fail, "unwrapped_config": Config()}
    made = type("Mistaken", (base,), members)
    if kind is not property:
        members[name].__set_name__(made, name)
    return made


class Getattr(Dicts):
    """Python calls `__getattr__` when a property raises an AttributeError, and the wrapped one answers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Dicts()

    def __getattr__(self, name: str) -> Any:
        if name == "other":
            raise AttributeError(name)
        return getattr(self.other, name)


OVER: dict[str, Callable[[Any], Any]] = {
    "alone": lambda env: env, "plain": Forwarding, "hidden": Hiding, "gymnasium": Through,
    "two": lambda env: Forwarding(Through(env)), "env": HoldingAndForwarding,
}  # fmt: skip


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("base", [Dicts, Getattr])
@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_in_a_property_is_raised(name, base, over):
    for mistake, getter in MISTAKES.items():
        for kind in (property, functools.cached_property):
            env = OVER[over](with_property(base, name, getter, kind)())
            if over == "hidden" and base is Getattr and mistake.endswith("name"):
                continue  # what such a wrapper wraps cannot be found
            with pytest.raises(LookupFailed, match=f"^{name} raised") as caught:
                adapt(env)
            cause = caught.value.__cause__
            assert cause is not None
            frames = []
            trace = cause.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame.f_code)
                trace = trace.tb_next
            assert getter.__code__ in frames, mistake


@pytest.mark.parametrize(
    ("base", "adapter"),
    [(Dicts, "dict"), (Dicts, "rllib"), (Tuples, "tuple"), (Lists, "mappo"), (Single, "gymnasium"), (PlainDicts, None)],
)
def test_every_adapter_raises_mistakes(base, adapter):
    for name in ("observation_space", "action_space", "metadata", "render_mode", "reward_space"):
        made = with_property(base, name, MISTAKES["another-name"])
        with pytest.raises(LookupFailed, match=f"^{name} raised AttributeError: .*mispelled"):
            adapt(made(), adapter)


@pytest.mark.parametrize("adapter", [None, "pymarl"])
def test_pymarl_does_not_read_what_it_does_not_use(adapter):
    for name in ("observation_space", "action_space", "state_space", "possible_agents"):
        adapted = adapt(with_property(Battle, name, MISTAKES["key"])(), adapter)
        assert adapted.possible_agents == ["agent_0", "agent_1", "agent_2"]


def absent(self: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("over", ["alone", "plain", "gymnasium", "env"])
@pytest.mark.parametrize("name", ["state_space", "reward_space", "metadata", "render_mode"])
def test_properties_may_say_that_there_is_none(name, over):
    def forwards(self: Any) -> Any:
        return getattr(self.unwrapped_config, name)

    def says_so(self: Any) -> Any:
        raise AttributeError("none here", name=name, obj=self)

    for getter in (absent, forwards, says_so):
        adapted = adapt(OVER[over](with_property(Dicts, name, getter)()))
        found = {
            "state_space": adapted.state_space, "reward_space": adapted.reward_spaces or None,
            "metadata": adapted.metadata or None, "render_mode": adapted.render_mode,
        }  # fmt: skip
        if over == "env" and found["metadata"] == gymnasium.Env.metadata:  # which is no more than a default
            found["metadata"] = None
        assert found[name] is None
        assert (adapted.possible_agents, len(adapted.observation_spaces)) == (INNER_AGENTS, 3)


def test_spaces_that_are_not_implemented_are_none():
    adapted = adapt(with_property(Dicts, "observation_space", absent)())
    assert (adapted.observation_spaces, len(adapted.action_spaces)) == ({}, 3)
    assert adapted.rules is Rules.DICT


class NeverOpen(Dicts):
    """Its space needs what only `reset` makes."""

    @property
    def observation_space(self) -> Any:  # type: ignore[override]
        return of(INNER_AGENTS, self.board)


def test_the_error_names_environment_attribute_and_line(build, killable_setup):
    with pytest.raises(EnvError, match=r"environment 1 .*raised in observation_space, at line .*board") as caught:
        build([Dicts, NeverOpen], killable_setup)
    error = caught.value
    assert (error.method, error.env_ids) == ("observation_space", (1,))
    assert isinstance(error.__cause__, AttributeError)
    assert "return of(INNER_AGENTS, self.board)" in error.remote_traceback
    assert "raise NotImplementedError" in str(error)


class LateParallel(Parallel):
    """A PettingZoo simulator: what `reset` makes is read after a first reset."""

    late = ("observation_space",)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.board = {
            "possible_agents": AGENTS, "observation_space": lambda agent: SEEN, "action_space": lambda agent: MOVES,
            "state_space": STATE, "metadata": METADATA, "render_mode": "ansi", "reward_space": lambda agent: STATE,
        }  # fmt: skip
        return super().reset(seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_pettingzoo_simulators_are_read_again_after_their_first_reset(name):
    late = type("Late", (LateParallel,), {name: property(lambda self: self.board[name])})
    adapted = adapt(late())
    expected = dict.fromkeys(
        adapted.possible_agents, {"observation_space": SEEN, "action_space": MOVES}.get(name, STATE)
    )
    found = {
        "possible_agents": (adapted.possible_agents, AGENTS), "state_space": (adapted.state_space, STATE),
        "observation_space": (adapted.observation_spaces, expected), "action_space": (adapted.action_spaces, expected),
        "reward_space": (adapted.reward_spaces, expected), "metadata": (adapted.metadata, METADATA),
        "render_mode": (adapted.render_mode, "ansi"),
    }  # fmt: skip
    assert found[name][0] == found[name][1]
    never = type("Never", (LateParallel,), {name: property(lambda self: self.board["mispelled"])})
    with pytest.raises(LookupFailed, match=f"^{name} raised"):
        adapt(never())


def test_properties_of_pettingzoo_simulators_that_return_spaces():
    """As a function or as a dict, on the simulator or on a wrapper."""

    class Functions(Parallel):
        observation_space = property(lambda self: lambda agent: SEEN)  # type: ignore[assignment]
        action_space = property(lambda self: dict.fromkeys(INNER_AGENTS, MOVES))  # type: ignore[assignment]

    class Around(BaseParallelWrapper):
        action_space = property(lambda self: dict.fromkeys(INNER_AGENTS, MOVES))  # type: ignore[assignment]

    class WithoutSpaces(pettingzoo.ParallelEnv):
        """Holds a simulator; PettingZoo's own `observation_space` has nothing to return."""

        possible_agents, metadata = INNER_AGENTS, METADATA
        reset, step = Dicts.reset, Dicts.step  # type: ignore[assignment]

        def __init__(self) -> None:
            self.env = Functions()

    sources = [(Functions(), SEEN), (Around(Parallel()), INNER_SEEN), (Forwarding(Functions()), SEEN)]
    for env, seen in [*sources, (Hiding(Functions()), SEEN), (WithoutSpaces(), SEEN)]:
        adapted = adapt(env)
        assert adapted.observation_spaces == dict.fromkeys(INNER_AGENTS, seen)
        assert adapted.action_spaces == dict.fromkeys(INNER_AGENTS, MOVES)
