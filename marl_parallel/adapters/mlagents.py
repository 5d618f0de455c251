"""Unity's ML-Agents: any `BaseEnv` as a multi-agent environment, and constructors of Unity environments.

Agents are named as in Unity's own PettingZoo wrapper. `mlagents_envs` is imported when the first environment is made.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, cast

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import DTypeLike, NDArray

from marl_parallel.adapters.attributes import AgentID
from marl_parallel.adapters.protocol import ALL, Adapter, Dicts, GroupSpaces, Rules
from marl_parallel.types import how_to_install

__doctest_requires__ = ["mlagents_envs"]

_SEPARATOR = "?agent_id="
_RESTART_PORTS, _PORTS = 1000, 2**16
_SERVER_ENDS_WITHIN = 5.0  # seconds


class MLAgentsEnv(Adapter):
    """A `BaseEnv` of ML-Agents; `docs/environments.md` describes its steps, infos and spaces.

    Args:
        source: The environment, also available as `env`. The constructor resets it if it has no behaviours yet.
        parameters: Its `EnvironmentParametersChannel`. The options of `reset` are numbers by name, written to this
            channel; Unity keeps them until they are written again, also after a restart. An option may also be an
            object with a method `apply(name, channel)`, such as the `ParameterRandomizationSettings` of ML-Agents'
            trainers. None: `reset` takes no options.
        max_steps: Steps after which all agents alive are truncated and the episode is over; None for never.

    Raises:
        NotAnEnvironment: `source` lacks methods of a `BaseEnv`.
        ImportError: `mlagents_envs` is missing, or does not work with another installed package.
        ValueError: `max_steps` is not positive.
    """

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    seeded_when_made: ClassVar[bool] = True
    options_last: ClassVar[bool] = True
    kind: ClassVar[str] = "An ML-Agents environment"
    methods: ClassVar[tuple[str, ...]] = ("reset", "step", "get_steps", "set_actions", "close")

    def __init__(self, source: Any, *, parameters: Any = None, max_steps: int | None = None) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be a positive number of steps or None, got {max_steps!r}")
        super().__init__(source)
        self.env, self.source = source, self  # attributes are looked up here first, then in `env`
        self.reset_keywords = frozenset() if parameters is None else frozenset({"options"})
        self._parameters, self._max_steps, self._time = parameters, max_steps, 0
        self._written: dict[str, Any] = {}
        self._alive: dict[str, list[AgentID]] = {}
        self._acting: dict[str, list[AgentID]] = {}  # the agents that request a decision, by behaviour

    def _agents(self) -> list[AgentID]:
        return []

    def _spaces(self, what: str) -> GroupSpaces:
        _import("base_env")  # raises if the library cannot be used
        if not self.source.behavior_specs:
            self.source.reset()
        space_of = _observation_space if what == "observation" else _action_space
        return GroupSpaces({name: space_of(spec) for name, spec in self.source.behavior_specs.items()}, behavior_of)

    @property
    def group_map(self) -> dict[str, list[AgentID]]:
        """The agents that are alive, by behaviour; `ParallelEnv.get_attr("group_map")` returns it."""
        return {behavior: [*self._alive.get(behavior, [])] for behavior in self.env.behavior_specs}

    @staticmethod
    def check_options(options: Any) -> None:
        """Raise `ValueError` unless options are numbers of 32 bits by names in ASCII, which is what Unity takes."""
        if not isinstance(options, Mapping):
            raise ValueError(f"options must be a dict of numbers by parameter name, got {options!r}")
        for name, value in options.items():
            applies = callable(getattr(value, "apply", None))
            if not isinstance(name, str) or not (applies or isinstance(value, Real)) or isinstance(value, bool):
                raise ValueError(f"options must be numbers by parameter name, got {name!r}: {value!r}")
            if not name.isascii():
                raise ValueError(f"options must have names in ASCII, which is what Unity takes, got {name!r}")
            if applies:
                continue
            try:
                struct.pack("<f", float(value))
            except OverflowError as error:
                message = f"options must fit into 32 bits, which is what Unity takes: {name!r} does not"
                raise ValueError(message) from error

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        if keywords.get("options") is not None:
            self.set_parameters(keywords["options"])
        self.env.reset()
        self._time, self._alive, self._acting = 0, {}, {}
        observations, _, _, _, infos = self._results()
        return observations, infos

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Write parameters, in the form of the options of `reset`; Unity gets them with the next step or reset."""
        if self._parameters is None:
            raise TypeError("this environment was made without parameters=, its EnvironmentParametersChannel")
        self.check_options(parameters)
        for name, value in parameters.items():
            if hasattr(value, "apply"):
                value.apply(name, self._parameters)
            else:
                self._parameters.set_float_parameter(name, float(value))
        self._written |= parameters

    def get_properties(self) -> dict[str, Any]:
        """The parameters that have been written, by name; `ParallelEnv.call("get_properties")` returns them."""
        return dict(self._written)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        for behavior, agents in self._acting.items():
            if agents:
                spec = self.env.behavior_specs[behavior].action_spec
                self.env.set_actions(behavior, _action_tuple(spec, [actions[agent] for agent in agents]))
        self.env.step()
        self._time += 1
        observations, rewards, terminateds, truncateds, infos = self._results(with_ended=True)
        over = self._time == self._max_steps
        if over:
            for agent, info in infos.items():
                if "final_obs" in info:  # its new life will not act
                    observations[agent] = info.pop("final_obs")
                    del info["reset_info"]
            for agent in self.alive():
                truncateds[agent] = not terminateds.setdefault(agent, False)
            self._alive = {}
        terminateds[ALL], truncateds[ALL] = False, over
        return observations, rewards, terminateds, truncateds, infos

    def _results(self, *, with_ended: bool = False) -> Dicts:
        """The dicts of the agents that request a decision and, `with_ended`, of those that have ended."""
        result: Dicts = ({}, {}, {}, {}, {})
        observations, rewards, terminateds, truncateds, infos = result
        for behavior, spec in self.env.behavior_specs.items():
            decisions, terminals = self.env.get_steps(behavior)
            acting: list[AgentID] = [f"{behavior}{_SEPARATOR}{number}" for number in decisions.agent_id]
            ended = [f"{behavior}{_SEPARATOR}{number}" for number in terminals.agent_id]
            self._acting[behavior] = acting
            observations.update(zip(acting, _observations(decisions)))
            rewards.update(zip(acting, decisions.reward))
            infos.update(zip(acting, _infos(decisions, spec.action_spec)))
            for flags in (terminateds, truncateds):
                flags.update(dict.fromkeys(acting, False))
            last = zip(ended, _observations(terminals), terminals.reward, terminals.interrupted, _infos(terminals))
            for agent, observation, reward, interrupted, info in last if with_ended else ():
                if agent in observations:  # it has a new life
                    info |= {"final_obs": observation, "reset_info": infos[agent]}
                else:
                    observations[agent] = observation
                rewards[agent], infos[agent] = reward, info
                terminateds[agent], truncateds[agent] = not interrupted, bool(interrupted)
            alive = [agent for agent in self._alive.get(behavior, []) if agent not in {*ended}]
            self._alive[behavior] = [*dict.fromkeys([*alive, *acting])]
        return result

    def alive(self) -> Sequence[AgentID]:
        return [agent for agents in self._alive.values() for agent in agents]

    def render(self) -> None:
        """Unity draws in a window of its own, or not at all."""

    def close(self) -> None:
        self.env.close()


def behavior_of(agent: str) -> str:
    """The behaviour in an agent's id, such as "Striker?team=1" in "Striker?team=1?agent_id=7"."""
    return agent.rpartition(_SEPARATOR)[0]


def unity(
    file_name: str | None,
    *,
    base_port: int | None = None,
    engine: Any = None,
    max_steps: int | None = None,
    **arguments: Any,
) -> Callable[..., MLAgentsEnv]:
    """A constructor of Unity environments; `ParallelEnv` can use the same one for all environments.

    Environment i connects to its Unity on port `base_port + i`. Each restart adds 1000, so that a Unity that has not
    ended yet does not block the port. Unity is seeded with the environment's seed.

    Use worker processes, or always call `close`: the interpreter does not exit while a Unity environment is open.

    Args:
        file_name: Path of the executable. None connects to the Unity Editor, of which only one can run.
        base_port: The port of environment 0, a different one for each `ParallelEnv`; None for ML-Agents' own default.
        engine: An `EngineConfig`, or a mapping with some of its fields, such as `{"time_scale": 20.0}`.
        max_steps: Steps after which an episode is truncated; None for never.
        arguments: For `UnityEnvironment`, such as `no_graphics=True`; also further `side_channels`.

    Raises:
        ImportError: `mlagents_envs` is missing, or does not work with another installed package.
        TypeError: `arguments` has a seed or a worker id, which differ between environments.
        ValueError: `side_channels` has a channel that this function adds, for `engine` or `reset(options=)`.

    Example:
        >>> make_env = unity("builds/Soccer", engine={"time_scale": 20.0}, no_graphics=True)
        >>> constructors = [make_env] * 8  # for ParallelEnv
    """
    _import("environment")
    for name, instead in {"seed": "ParallelEnv(seed=...)", "worker_id": "base_port"}.items():
        if name in arguments:
            raise TypeError(f"unity() takes no {name}, as each environment has its own: pass {instead}")
    for instead, kind in _channel_types().items():
        if any(isinstance(channel, kind) for channel in arguments.get("side_channels") or ()):
            raise ValueError(f"side_channels has an {kind.__name__}, but each environment has its own: pass {instead}")
    return functools.partial(_connect, file_name, base_port, engine, max_steps, arguments)


def _connect(
    file_name: str | None, base_port: int | None, engine: Any, max_steps: int | None, arguments: Mapping[str, Any],
    seed: int, env_id: int, restarts: int = 0,
) -> MLAgentsEnv:  # fmt: skip
    library = _import("environment").UnityEnvironment
    configuration, parameters = _channels(engine)
    worker_id = env_id
    if file_name is not None:  # another port with each restart; ports repeat only when all have been used
        first_port = (library.BASE_ENVIRONMENT_PORT if base_port is None else base_port) + env_id
        worker_id += _RESTART_PORTS * (restarts % max(1, (_PORTS - first_port) // _RESTART_PORTS))
    channels = [*(arguments.get("side_channels") or ()), configuration, parameters]
    fixed = {"base_port": base_port, "worker_id": worker_id, "seed": seed % 2**31, "side_channels": channels}
    env = library.__new__(library)
    try:
        env.__init__(file_name, **{**arguments, **fixed})
        return MLAgentsEnv(env, parameters=parameters, max_steps=max_steps)
    except BaseException:  # stop what a constructor that failed has started and left running
        atexit.unregister(env._close)
        if hasattr(env, "_communicator"):
            env._close(0)
            # `_close` does not wait until the server has left the port, so a second try at once could find it in use.
            env._communicator.server.stop(None).wait(_SERVER_ENDS_WITHIN)
        raise


def from_factory(
    env_factory: Callable[[int, list[Any]], Any],
    *,
    engine: Any = None,
    parameters: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
) -> Callable[..., MLAgentsEnv]:
    """A constructor from a factory of ML-Agents' `SubprocessEnvManager`; `ParallelEnv` can use it for all environments.

    The worker id of environment i is i, and 1000 more after each restart, so that a Unity that has not ended yet does
    not block the port. The factory has to seed the environment, for instance with its worker id.

    Args:
        env_factory: Called in the worker as `env_factory(worker_id, side_channels)`; returns a `BaseEnv` that has these
            channels.
        engine: An `EngineConfig`, or a mapping with some of its fields, such as `{"time_scale": 20.0}`.
        parameters: Environment parameters by name, like the options of `reset`, written before the first reset.
        max_steps: Steps after which an episode is truncated; None for never.

    Raises:
        TypeError: `env_factory` is not callable.
        ValueError: `parameters` are not numbers by name.
        ImportError: `mlagents_envs` is missing, or does not work with another installed package.

    Example:
        >>> def env_factory(worker_id, side_channels):
        ...     from mlagents_envs.environment import UnityEnvironment
        ...     return UnityEnvironment("builds/Soccer", worker_id, seed=worker_id, side_channels=side_channels)
        >>> constructors = [from_factory(env_factory, engine={"time_scale": 20.0})] * 8  # for ParallelEnv
    """
    if not callable(env_factory):
        raise TypeError(
            f"env_factory must be a function of a worker id and a list of side channels, got {env_factory!r}"
        )
    if parameters is not None:
        MLAgentsEnv.check_options(parameters)
    _channel_types()
    return functools.partial(_from_factory, env_factory, engine, parameters, max_steps)


def _from_factory(
    env_factory: Callable[[int, list[Any]], Any], engine: Any, parameters: Mapping[str, Any] | None,
    max_steps: int | None, env_id: int, restarts: int = 0,
) -> MLAgentsEnv:  # fmt: skip
    configuration, channel = _channels(engine)
    worker_id = env_id + _RESTART_PORTS * (restarts % (_PORTS // _RESTART_PORTS // 2))
    env = env_factory(worker_id, [configuration, channel])
    try:
        adapted = MLAgentsEnv(env, parameters=channel, max_steps=max_steps)
        adapted.set_parameters(parameters or {})
    except BaseException:
        if hasattr(env, "close"):
            env.close()
        raise
    return adapted


def _channels(engine: Any) -> tuple[Any, Any]:
    """The side channels of one environment: for the engine, which is configured, and for parameters."""
    configuration, parameters = (channel_type() for channel_type in _channel_types().values())
    if engine is not None:
        configuration.set_configuration_parameters(**(engine if isinstance(engine, Mapping) else engine._asdict()))
    return configuration, parameters


def _channel_types() -> dict[str, Any]:
    """The side channels of each environment, by the argument that they are for."""
    return {
        "engine=": _import("side_channel.engine_configuration_channel").EngineConfigurationChannel,
        "reset(options=...)": _import("side_channel.environment_parameters_channel").EnvironmentParametersChannel,
    }


def _import(module: str) -> Any:
    """A module of `mlagents_envs`; `ImportError` if it is missing or does not work with another installed package."""
    try:
        base = importlib.import_module("mlagents_envs.base_env")
        base.TerminalSteps.empty(base.BehaviorSpec([], base.ActionSpec(0, ())))  # 0.28 uses `np.bool`
        return importlib.import_module(f"mlagents_envs.{module}")
    # With a protobuf that is too new, the generated code raises a TypeError of several lines.
    except (ImportError, AttributeError, TypeError) as error:
        raise ImportError(
            "ML-Agents needs mlagents-envs>=0.28 with protobuf<3.21 and numpy>=2: "
            f"{how_to_install('mlagents')} ({str(error).splitlines()[0]})"
        ) from error


# -- timers ------------------------------------------------------------------------------------------------------------


def timer_tree(_: Any = None) -> dict[str, Any]:
    """This thread's timers in the form of ML-Agents' `get_timer_tree`; empty if `mlagents_envs` is not loaded."""
    timers = sys.modules.get("mlagents_envs.timers")
    return {} if timers is None else cast("dict[str, Any]", timers.get_timer_tree())


def merged_timers(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the trees of several threads: seconds and counts of blocks with the same path are added up."""
    total, count = sum(tree.get("total", 0.0) for tree in trees), sum(tree.get("count", 0) for tree in trees)
    names = dict.fromkeys(name for tree in trees for name in tree.get("children", {}))
    inner = [[tree["children"][name] for tree in trees if name in tree.get("children", {})] for name in names]
    children = dict(zip(names, map(merged_timers, inner)))
    self_seconds = max(0.0, total - sum(child["total"] for child in children.values()))
    merged = {"total": total, "count": count, "is_parallel": True, "self": self_seconds}
    return {**merged, "children": children} if children else merged


def _observations(steps: Any) -> list[Any]:
    """The observation of each agent; a tuple unless it has just one part."""
    if len(steps.obs) == 1:
        return [*steps.obs[0]]
    return [tuple(part[row] for part in steps.obs) for row in range(len(steps))]


def _infos(steps: Any, spec: Any = None) -> list[dict[str, Any]]:
    """The info of each agent, with its action mask if it requests a decision and Unity masks actions."""
    groups = zip(steps.group_id, steps.group_reward)
    infos: list[dict[str, Any]] = [{"group_id": int(group), "group_reward": reward} for group, reward in groups]
    if spec is not None and steps.action_mask is not None:
        for row, info in enumerate(infos):
            # Unity's mask is True for an action that is not allowed; in Gymnasium's masks, 1 is allowed.
            branches = tuple(np.logical_not(branch[row]).astype(np.int8) for branch in steps.action_mask)
            discrete = branches[0] if len(branches) == 1 else branches
            info["action_mask"] = (None, discrete) if spec.continuous_size else discrete
    return infos


def _observation_space(spec: Any) -> Space[Any]:
    boxes = [spaces.Box(-np.inf, np.inf, tuple(part.shape), np.float32) for part in spec.observation_specs]
    return boxes[0] if len(boxes) == 1 else spaces.Tuple(boxes)


def _action_space(spec: Any) -> Space[Any]:
    size, branches = spec.action_spec.continuous_size, spec.action_spec.discrete_branches
    continuous = spaces.Box(-1.0, 1.0, (size,), np.float32)
    if not branches:
        return continuous
    discrete = spaces.Discrete(branches[0]) if len(branches) == 1 else spaces.MultiDiscrete(branches)
    return spaces.Tuple([continuous, discrete]) if size else discrete


def _action_tuple(spec: Any, actions: Sequence[Any]) -> Any:
    continuous = discrete = actions
    if spec.continuous_size and spec.discrete_size:
        continuous, discrete = zip(*actions)
    result = spec.empty_action(len(actions))
    if spec.continuous_size:
        result.add_continuous(_matrix(continuous, spec.continuous_size, np.float32))
    if spec.discrete_size:
        result.add_discrete(_matrix(discrete, spec.discrete_size, np.int32))
    return result


def _matrix(values: Sequence[Any], width: int, dtype: DTypeLike) -> NDArray[Any]:
    """One row for each agent; a cast from float to integer is an error."""
    array = np.asarray(values)
    if array.dtype.kind == "f" and np.dtype(dtype).kind == "i":  # NumPy turns mixed signed and unsigned into floats
        array = np.stack([np.asarray(value).astype(dtype, casting="same_kind") for value in values])
    return array.reshape(len(values), width).astype(dtype, casting="same_kind")
