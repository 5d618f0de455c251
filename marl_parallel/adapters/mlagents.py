"""Unity's ML-Agents: any `BaseEnv` as a multi-agent environment, and constructors of Unity environments.

Agents are named as in Unity's own PettingZoo wrapper, `"<behaviour>?agent_id=<id>"`. Their ids have no bound, so
`possible_agents` is empty and spaces are those of their behaviours. Agents act in steps in which they request a
decision, and are in the observations then. Unity has no end of an episode for all agents: only `max_steps` sets
`__all__`. `mlagents_envs` (0.28 to 1.1) is imported when the first environment is made.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import struct
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import DTypeLike, NDArray

from marl_parallel.adapters.attributes import AgentID
from marl_parallel.adapters.protocol import ALL, Adapter, Dicts, GroupSpaces, Rules

__doctest_requires__ = ["mlagents_envs"]

_SEPARATOR = "?agent_id="
_RESTART_PORTS, _PORTS = 1000, 2**16
_SERVER_ENDS_WITHIN = 5.0  # seconds


class MLAgentsEnv(Adapter):
    """A `BaseEnv` of ML-Agents.

    **Steps.** A step lasts until some agent ends or requests a decision. An agent that requests one is in all five
    dicts, with flags that are False, and acts next. Agents that are neither in them nor have ended are alive and wait.
    An agent that ends has its last reward and observation, and `truncateds` if Unity says `interrupted`, else
    `terminateds`. If it requests a decision under the same id in the same step, the observation is the first of its new
    life; in its info, `final_obs` is the last one of the old life and `reset_info` the info of the new one. If
    `max_steps` ends that step, the new life is left out.

    **Infos.** Each agent's has `group_id` and `group_reward`, and if Unity masks actions, `action_mask`, in the form
    that `sample` of its action space takes: 1 is an allowed action.

    **Spaces.** Several observations are a `Tuple`. Actions are a `Box` from -1 to 1, a `Discrete`, a `MultiDiscrete`
    for several branches, or a `Tuple` of the first and one of the others.

    Args:
        source: The environment, also available as `env`. It is reset here if it has no behaviours yet, which Unity
            sends with its first agents.
        parameters: The `EnvironmentParametersChannel` it was made with, to which `reset` writes its options: numbers by
            name, which Unity keeps until they are written again, also over restarts. None: `reset` takes no options.
        max_steps: Steps after which all agents alive are truncated and the episode is over; None for never.

    Raises:
        NotAnEnvironment: It lacks methods of a `BaseEnv`.
        ImportError: `mlagents_envs` is missing, or does not work with another installed package.
        ValueError: `max_steps` is not positive.
    """

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    seeded_when_made: ClassVar[bool] = True
    options_last: ClassVar[bool] = True
    kind: ClassVar[str] = "An ML-Agents environment"
    methods: ClassVar[tuple[str, ...]] = ("reset", "step", "get_steps", "set_actions", "close")

    def __init__(self, source: Any, *, parameters: Any = None, max_steps: int | None = None) -> None:
        super().__init__(source)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be a positive number of steps or None, got {max_steps!r}")
        self._action_tuple = _imported("base_env").ActionTuple
        self.env, self.source = source, self  # attributes are looked for here first, then in what `env` is
        self._parameters, self._max_steps, self._time = parameters, max_steps, 0
        self.reset_keywords = frozenset() if parameters is None else frozenset({"options"})
        if not source.behavior_specs:
            source.reset()
        self._alive: dict[str, list[AgentID]] = {}
        self._asking: dict[str, list[AgentID]] = {}
        specs = source.behavior_specs.items()
        self.possible_agents = []
        self.observation_spaces = GroupSpaces({name: _observation_space(spec) for name, spec in specs}, behavior_of)
        self.action_spaces = GroupSpaces({name: _action_space(spec.action_spec) for name, spec in specs}, behavior_of)

    @property
    def group_map(self) -> dict[str, list[AgentID]]:
        """By behaviour, the agents that are alive; `ParallelEnv.get_attr("group_map")` has it of each environment."""
        return {behavior: [*self._alive.get(behavior, [])] for behavior in self.env.behavior_specs}

    @staticmethod
    def check_options(options: Any) -> None:
        """Raise `ValueError` for options that are no numbers of 32 bits by names in ASCII, as Unity takes them."""
        if not isinstance(options, Mapping):
            raise ValueError(f"options must be a dict of numbers by parameter name, got {options!r}")
        for name, value in options.items():
            if not isinstance(name, str) or not isinstance(value, Real) or isinstance(value, bool):
                raise ValueError(f"options must be numbers by parameter name, got {name!r}: {value!r}")
            if not name.isascii():
                raise ValueError(f"options must have names in ASCII, which is what Unity takes, got {name!r}")
            try:
                struct.pack("<f", float(value))
            except OverflowError as error:
                message = f"options must fit into 32 bits, which is what Unity takes: {name!r} does not"
                raise ValueError(message) from error

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        options = keywords.get("options")
        if options is not None:
            self.check_options(options)
            for name, value in options.items():
                self._parameters.set_float_parameter(name, float(value))
        self.env.reset()
        self._time, self._alive, self._asking = 0, {}, {}
        observations, _, _, _, infos = self._results()
        return observations, infos

    def step(self, actions: dict[Any, Any]) -> Dicts:
        for behavior, asking in self._asking.items():
            if asking:
                self.env.set_actions(behavior, self._action_arrays(behavior, [actions[agent] for agent in asking]))
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
        """The dicts of the agents that request a decision, and of those that have ended."""
        result: Dicts = ({}, {}, {}, {}, {})
        observations, rewards, terminateds, truncateds, infos = result
        for behavior in self.env.behavior_specs:
            decisions, terminals = self.env.get_steps(behavior)
            asking = self._asking[behavior] = _agents(behavior, decisions)
            ended = _agents(behavior, terminals) if with_ended else []
            observations.update(zip(asking, _observations(decisions)))
            rewards.update(zip(asking, decisions.reward))
            infos.update(zip(asking, self._infos(behavior, decisions)))
            for flags in (terminateds, truncateds):
                flags.update(dict.fromkeys(asking, False))
            gone, lasts, own_infos = {*ended}, _observations(terminals), _group_infos(terminals)
            for row, (agent, last, info) in enumerate(zip(ended, lasts, own_infos)):
                if agent in observations:  # it has a new life
                    info |= {"final_obs": last, "reset_info": infos[agent]}
                else:
                    observations[agent] = last
                rewards[agent], infos[agent] = terminals.reward[row], info
                truncateds[agent] = bool(terminals.interrupted[row])
                terminateds[agent] = not truncateds[agent]
            staying = [agent for agent in self._alive.get(behavior, []) if agent not in gone]
            self._alive[behavior] = [*dict.fromkeys([*staying, *asking])]
        return result

    def alive(self) -> Sequence[AgentID]:
        return [agent for agents in self._alive.values() for agent in agents]

    def render(self) -> None:
        """Unity draws in a window of its own, or not at all."""

    def close(self) -> None:
        self.env.close()

    def _infos(self, behavior: str, decisions: Any) -> list[dict[str, Any]]:
        infos = _group_infos(decisions)
        if decisions.action_mask is not None:
            spec = self.env.behavior_specs[behavior].action_spec
            for row, info in enumerate(infos):
                info["action_mask"] = _mask(spec, [branch[row] for branch in decisions.action_mask])
        return infos

    def _action_arrays(self, behavior: str, actions: Sequence[Any]) -> Any:
        spec = self.env.behavior_specs[behavior].action_spec
        continuous = discrete = actions
        if spec.continuous_size and spec.discrete_size:
            continuous, discrete = zip(*actions)
        return self._action_tuple(
            _matrix(continuous, spec.continuous_size, np.float32), _matrix(discrete, spec.discrete_size, np.int32)
        )


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
    """A constructor of Unity environments for `ParallelEnv`; one serves for all of them.

    Environment i talks to its Unity through port `base_port + i`; with each restart the port is 1000 higher, so that
    nothing that is left of the old Unity is in its way. Its seed is Unity's.

    Use workers in processes, or be sure to `close`: an interpreter does not end while a Unity environment is open.

    Args:
        file_name: Path of the executable. None connects to the Unity Editor, of which there is one.
        base_port: The port of environment 0, one for each `ParallelEnv`; None for ML-Agents' own default.
        engine: An `EngineConfig`, or a mapping with some of its fields, such as `{"time_scale": 20.0}`.
        max_steps: Steps after which an episode is truncated; None for never.
        arguments: For `UnityEnvironment`, such as `no_graphics=True`; also further `side_channels`.

    Raises:
        ImportError: `mlagents_envs` is missing, or does not work with another installed package.
        TypeError: `arguments` has a seed or a worker id, of which each environment has its own.
        ValueError: `side_channels` has one that each environment is given here, for `engine` or `reset(options=)`.

    Example:
        >>> make_env = unity("builds/Soccer", engine={"time_scale": 20.0}, no_graphics=True)
        >>> constructors = [make_env] * 8  # for ParallelEnv
    """
    _imported("environment")
    for name, instead in {"seed": "ParallelEnv(seed=...)", "worker_id": "base_port"}.items():
        if name in arguments:
            raise TypeError(f"unity() takes no {name}, as each copy has its own: pass {instead}")
    for instead, channel in _own_channels().items():
        if any(isinstance(given, channel) for given in arguments.get("side_channels") or ()):
            raise ValueError(f"side_channels has an {channel.__name__}, but each copy has its own: pass {instead}")
    return functools.partial(_connected, file_name, base_port, engine, max_steps, arguments)


def _connected(
    file_name: str | None, base_port: int | None, engine: Any, max_steps: int | None, arguments: Mapping[str, Any],
    seed: int, env_id: int, restarts: int = 0,
) -> MLAgentsEnv:  # fmt: skip
    library = _imported("environment").UnityEnvironment
    configuration, parameters = (channel() for channel in _own_channels().values())
    if engine is not None:
        configuration.set_configuration_parameters(**(engine if isinstance(engine, Mapping) else engine._asdict()))
    worker_id = env_id
    if file_name is not None:  # another port with each restart; ports repeat only when all have been used
        first_port = (library.BASE_ENVIRONMENT_PORT if base_port is None else base_port) + env_id
        worker_id += _RESTART_PORTS * (restarts % max(1, (_PORTS - first_port) // _RESTART_PORTS))
    channels = [*(arguments.get("side_channels") or ()), configuration, parameters]
    own = {"base_port": base_port, "worker_id": worker_id, "seed": seed % 2**31, "side_channels": channels}
    env = library.__new__(library)
    try:
        env.__init__(file_name, **{**arguments, **own})
        return MLAgentsEnv(env, parameters=parameters, max_steps=max_steps)
    except BaseException:
        _give_up(env)
        raise


def _own_channels() -> dict[str, Any]:
    """The side channels that each environment is given, by what uses them."""
    return {
        "engine=": _imported("side_channel.engine_configuration_channel").EngineConfigurationChannel,
        "reset(options=...)": _imported("side_channel.environment_parameters_channel").EnvironmentParametersChannel,
    }


def _give_up(env: Any) -> None:
    """Stop what a `UnityEnvironment` whose constructor failed has started and left running."""
    atexit.unregister(env._close)
    if hasattr(env, "_communicator"):
        env._close(0)
        # `_close` does not wait until the server has left the port, so a second try at once could find it in use.
        env._communicator.server.stop(None).wait(_SERVER_ENDS_WITHIN)


def _imported(module: str) -> Any:
    """A module of `mlagents_envs`; `ImportError` if it is missing or does not work with another installed package."""
    try:
        base = importlib.import_module("mlagents_envs.base_env")
        base.TerminalSteps.empty(base.BehaviorSpec([], base.ActionSpec(0, ())))  # 0.28 asks NumPy for `np.bool`
        return importlib.import_module(f"mlagents_envs.{module}")
    # A protobuf that is too new answers the generated code with a TypeError of several lines.
    except (ImportError, AttributeError, TypeError) as error:
        raise ImportError(
            "ML-Agents needs mlagents-envs>=0.28 with protobuf<3.21 and numpy>=2: "
            f'pip install "marl-parallel[mlagents]" ({str(error).splitlines()[0]})'
        ) from error


def _agents(behavior: str, steps: Any) -> list[AgentID]:
    return [f"{behavior}{_SEPARATOR}{number}" for number in steps.agent_id]


def _observations(steps: Any) -> list[Any]:
    """The observation of each agent; a tuple of all of them unless there is just one."""
    if len(steps.obs) == 1:
        return [*steps.obs[0]]
    return [tuple(one[row] for one in steps.obs) for row in range(len(steps))]


def _group_infos(steps: Any) -> list[dict[str, Any]]:
    return [{"group_id": int(own), "group_reward": reward} for own, reward in zip(steps.group_id, steps.group_reward)]


def _observation_space(spec: Any) -> Space[Any]:
    boxes = [spaces.Box(-np.inf, np.inf, tuple(one.shape), np.float32) for one in spec.observation_specs]
    return boxes[0] if len(boxes) == 1 else spaces.Tuple(boxes)


def _action_space(spec: Any) -> Space[Any]:
    continuous = spaces.Box(-1.0, 1.0, (spec.continuous_size,), np.float32)
    if not spec.discrete_size:
        return continuous
    branches = spec.discrete_branches
    discrete = spaces.Discrete(branches[0]) if len(branches) == 1 else spaces.MultiDiscrete(branches)
    return spaces.Tuple([continuous, discrete]) if spec.continuous_size else discrete


def _mask(spec: Any, unavailable: Sequence[NDArray[np.bool_]]) -> Any:
    """As `sample` of the action space takes it; in Unity's, True is an action that may not be taken."""
    branches = tuple(np.logical_not(branch).astype(np.int8) for branch in unavailable)
    discrete = branches[0] if len(branches) == 1 else branches
    return (None, discrete) if spec.continuous_size else discrete


def _matrix(values: Sequence[Any], width: int, dtype: DTypeLike) -> NDArray[Any]:
    """One row for each agent; a cast from float to integer is an error."""
    if not width:
        return np.zeros((len(values), 0), dtype)
    array = np.asarray(values)
    if array.dtype.kind == "f" and np.dtype(dtype).kind == "i":  # NumPy makes floats of signed beside unsigned ones
        array = np.stack([np.asarray(value).astype(dtype, casting="same_kind") for value in values])
    return array.reshape(len(values), width).astype(dtype, casting="same_kind")
