"""Runs a third-party simulator in `ParallelEnv` and in a plain loop, and saves the results.

A script begins with the simulator's own lines, defines `make` and ends with `real_simulators.main(make)`; see `script`.
Run as `script.py OUT plain 0,1` it steps environments 0 and 1 in a plain loop (`reference.ReferenceEnv`, sharing no
code with the package) and pickles the results into OUT; `script.py OUT process` and `script.py OUT serial` do the same
with `ParallelEnv`. Both choose actions with `Actor`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from helpers import TESTS, reference
from helpers.comparison import assert_same

SEED = 42
NUM_ENVS = 4
GROUPS = ("0,1", "2,3")
"""The environments that share a worker, where two workers share four."""

Choose = Callable[[Sequence[Any], np.random.Generator], Mapping[Any, Any]]
"""Chooses the actions of one environment for its acting agents."""


class Rollout(NamedTuple):
    """The results of environments.

    Attributes:
        resets: (observations, infos) of the first reset, by environment.
        steps: (observations, rewards, terminateds, truncateds, infos) of each step, by environment.
        ends: The number of steps in which each environment's episode was over.
        seconds: The time of all steps.
    """

    resets: list[tuple[Any, ...]]
    steps: list[list[tuple[Any, ...]]]
    ends: list[int]
    seconds: float


class Actor:
    """Draws legal random actions for one environment: the same ones for the same observations.

    Args:
        env_id: The environment; each one gets different actions.
        space_of: Returns the action space of an agent, or None.
        choose: Chooses the actions; None for random ones from the action spaces.
    """

    def __init__(self, env_id: int, space_of: Callable[[Any], Any], choose: Choose | None) -> None:
        self.env_id, self.space_of, self.choose = env_id, space_of, choose
        self.spaces: dict[Any, Any] = {}
        self.rng = np.random.default_rng(1000 + env_id)

    def act(self, acting: Sequence[Any], masks: Mapping[Any, Any]) -> dict[Any, Any]:
        if self.choose is not None:
            return dict(self.choose(acting, self.rng))
        return {agent: self._action(agent, masks.get(agent)) for agent in acting}

    def _action(self, agent: Any, mask: Any) -> Any:
        if agent not in self.spaces:
            self.spaces[agent] = copy.deepcopy(self.space_of(agent))
            self.spaces[agent].seed(100 * self.env_id + len(self.spaces))
        return self.spaces[agent].sample() if mask is None else self.spaces[agent].sample(np.asarray(mask, np.int8))


def masks_of(observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> dict[Any, Any]:
    """The action masks in the results of a plain loop, by agent."""
    masks = {}
    for agent, observation in observations.items():
        info = infos.get(agent, {})
        in_info = info.get("reset_info") or info
        if isinstance(observation, Mapping) and "action_mask" in observation:
            masks[agent] = observation["action_mask"]
        elif "action_mask" in in_info:
            masks[agent] = in_info["action_mask"]
    return masks


class TupleAsDict(gymnasium.Env):
    """A simulator whose spaces, observations and actions are tuples, with the agents' ids as keys."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = [f"agent_{i}" for i in range(len(env.action_space.spaces))]
        self.observation_space = spaces.Dict(self._by_agent(env.observation_space.spaces))
        self.action_space = spaces.Dict(self._by_agent(env.action_space.spaces))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, info = self.env.reset(seed=seed)
        return self._by_agent(observations), self._infos(info)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        # Agents whose part of the episode is over get the first action.
        inputs = tuple(actions.get(agent, 0) for agent in self.possible_agents)
        observations, rewards, terminateds, truncateds, info = self.env.step(inputs)
        terminateds, truncateds = self._shared_or_not(terminateds), self._shared_or_not(truncateds)
        over = all(terminateds[agent] or truncateds[agent] for agent in self.possible_agents)
        all_terminated, all_truncated = all(terminateds.values()), all(truncateds.values())
        terminateds["__all__"] = all_terminated
        truncateds["__all__"] = over and (all_truncated or not all_terminated)
        return self._by_agent(observations), self._shared_or_not(rewards), terminateds, truncateds, self._infos(info)

    def close(self) -> None:
        self.env.close()

    def _by_agent(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def _shared_or_not(self, value: Any) -> dict[str, Any]:
        several = isinstance(value, list | tuple | np.ndarray)
        return self._by_agent(value) if several else dict.fromkeys(self.possible_agents, value)

    def _infos(self, info: dict) -> dict[str, Any]:
        if any(agent in info for agent in self.possible_agents):
            return info
        infos: dict[str, Any] = {agent: {} for agent in self.possible_agents}
        return {**infos, "__common__": info} if info else infos


class SharedFlags(gymnasium.Env):
    """Converts a simulator with dict spaces, one flag for all agents and lists of actions, such as VMAS."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = list(env.action_space.spaces)
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.env.reset(seed=seed)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        results = self.env.step([actions[agent] for agent in self.possible_agents])
        observations, rewards, terminated, truncated, infos = results
        keys = [*self.possible_agents, "__all__"]
        return observations, rewards, dict.fromkeys(keys, terminated), dict.fromkeys(keys, truncated), infos

    def close(self) -> None:
        self.env.close()


def plain(env: Any) -> Any:
    """Convert a simulator to a form that `reference` supports."""
    if isinstance(getattr(env, "action_space", None), spaces.Tuple):
        return TupleAsDict(env)
    if type(env).__module__.startswith("vmas."):
        return SharedFlags(env)
    if type(env.unwrapped).__module__.startswith("smarts."):
        env.possible_agents = sorted(env.unwrapped.agent_ids)
    return env


def plain_rollout(make: Callable[..., Any], env_ids: Sequence[int], batches: int, choose: Choose | None) -> Rollout:
    """Step environments in a plain loop, one after the other."""
    copies = [reference.ReferenceEnv(PlainConstructor(make), i, SEED + i, AutoresetMode.SAME_STEP) for i in env_ids]
    actors = [
        Actor(i, lambda agent, one=one: one.space("action_space", agent), choose)
        for i, one in zip(env_ids, copies, strict=True)
    ]
    resets = [one.reset() for one in copies]
    last = list(resets)
    steps: list[list[tuple[Any, ...]]] = [[] for _ in copies]
    begun = time.perf_counter()
    for _ in range(batches):
        for place, (one, actor) in enumerate(zip(copies, actors, strict=True)):
            observations, infos = last[place][0], last[place][-1]
            actions = actor.act(one.acting, masks_of(observations, infos))
            last[place] = one.step(actions)
            steps[place].append(last[place])
    seconds = time.perf_counter() - begun
    for one in copies:
        one.env.close()
    return Rollout(resets, steps, [ends(of_one) for of_one in steps], seconds)


class PlainConstructor:
    """The constructor of a simulator for `reference`, with the original's signature."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = self.__wrapped__ = make

    def __call__(self, **keywords: Any) -> Any:
        return plain(self.make(**keywords))


def parallel_rollout(
    make: Callable[..., Any],
    backend: str,
    num_envs: int,
    batches: int,
    choose: Choose | None,
    arguments: dict[str, Any],
) -> Rollout:
    """Step environments with `ParallelEnv`."""
    from marl_parallel import ParallelEnv

    if not arguments:
        arguments = {"num_workers": 2 if backend == "process" else 1}
    with ParallelEnv([make] * num_envs, seed=SEED, backend=backend, start_timeout=300, **arguments) as env:
        declared = getattr(env, "action_space", {})  # `NoSpaceDeclared` is an `AttributeError`
        actors = [Actor(i, declared.__getitem__, choose) for i in range(num_envs)]
        last = env.reset()
        resets = list(zip(*last, strict=True))
        steps: list[list[tuple[Any, ...]]] = [[] for _ in actors]
        begun = time.perf_counter()
        for _ in range(batches):
            inputs = zip(actors, env.acting, env.action_masks, strict=True)
            last = env.step([actor.act(acting, masks) for actor, acting, masks in inputs])
            for of_one, transition in zip(steps, zip(*last, strict=True), strict=True):
                of_one.append(transition)
        seconds = time.perf_counter() - begun
    return Rollout(resets, steps, [ends(of_one) for of_one in steps], seconds)


def ends(steps: Sequence[tuple[Any, ...]]) -> int:
    return sum(bool(terminateds["__all__"] or truncateds["__all__"]) for _, _, terminateds, truncateds, _ in steps)


def main(
    make: Callable[..., Any],
    batches: int = 200,
    choose: Choose | None = None,
    num_envs: int = NUM_ENVS,
    **arguments: Any,
) -> None:
    """Run as the command line says.

    Args:
        make: Makes an environment; it may take a seed.
        batches: The number of steps of all environments.
        choose: Chooses the actions; None for random ones from the action spaces.
        num_envs: The number of environments of `ParallelEnv`.
        arguments: Further arguments of `ParallelEnv`.
    """
    out, backend, *env_ids = sys.argv[1:]
    if backend == "plain":
        rollout = plain_rollout(make, [int(text) for text in env_ids[0].split(",")], batches, choose)
    else:
        rollout = parallel_rollout(make, backend, num_envs, batches, choose, arguments)
    Path(out).write_bytes(pickle.dumps(simplified(tuple(rollout))))


def simplified(value: Any) -> Any:
    """The same with only dicts, tuples, lists, arrays, numbers and text, and the names of other types."""
    if isinstance(value, dict):
        return {key: simplified(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(simplified, value))
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return (type(value).__qualname__, simplified(fields))
    if isinstance(value, tuple):
        return (type(value).__qualname__, *map(simplified, value))
    if value is None or isinstance(value, np.generic | bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return value if type(value) is np.ndarray else (type(value).__qualname__, np.asarray(value))
    return (type(value).__qualname__, repr(value))


# -- scripts and their results ----------------------------------------------------------------------------------------


def script(setup: str, make: str, options: str = "") -> str:
    """The text of a script for a simulator.

    Args:
        setup: The first lines of its README's example.
        make: The README's expression that makes an environment.
        options: Further arguments of `main`.
    """
    call = f"from helpers import real_simulators\nreal_simulators.main(make, {options})"
    return f"{setup}\n\ndef make():\n    return {make}\n\n{call}\n"


def rollouts(
    text: str, folder: Path, runs: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, Rollout]:
    """Run a script once for each of `runs` (such as "process" or "plain 0,1"), two at a time.

    Args:
        text: The script.
        folder: The working directory.
        runs: Its arguments; text after a second space only distinguishes equal runs.
        variables: Environment variables.
    """
    file = folder / "script.py"
    file.write_text(text)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(lambda run: _rollout(file, run, variables or {}), runs), strict=True))


def _rollout(file: Path, run: str, variables: Mapping[str, str]) -> Rollout:
    out = file.with_name(run.replace(" ", "_").replace(",", "_") + ".pickle")
    always = {"PYTHONPATH": str(TESTS), "SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(file), str(out), *run.split(" ")[:2]]
    everything = {**os.environ, **always, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=file.parent, env=everything)
    assert done.returncode == 0, f"{run}: {done.stderr}"
    return Rollout(*pickle.loads(out.read_bytes()))


def merged(*groups: Rollout) -> Rollout:
    """Merge rollouts of some environments each into one of all."""
    resets, steps, ends = ([item for group in groups for item in group[part]] for part in range(3))
    return Rollout(resets, steps, ends, sum(group.seconds for group in groups))


def assert_equal(actual: Rollout, expected: Rollout, name: str) -> None:
    """Fail with the path of the first difference."""
    for env_id, (one, other) in enumerate(zip(actual.resets, expected.resets, strict=True)):
        assert_same(one, other, f"{name}: reset of environment {env_id}")
    for number in range(len(expected.steps[0])):
        for env_id, (one, other) in enumerate(zip(actual.steps, expected.steps, strict=True)):
            assert_same(one[number], other[number], f"{name}: step {number} of environment {env_id}")


def structure(value: Any) -> Any:
    """The keys, types and shapes of a value."""
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(structure, value))
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return type(value)


def report(name: str, of: Mapping[str, Rollout]) -> None:
    """Print the times; `pytest -rP` shows them."""
    seconds = ", ".join(f"{run} {rollout.seconds:.1f} s" for run, rollout in of.items())
    first = next(iter(of.values()))
    print(f"{name}: {len(first.steps[0])} batches, episode ends {first.ends}; {seconds}")
