"""Runs a third-party simulator in `ParallelEnv` and in a plain loop, and compares the results.

A script begins with the simulator's own lines, defines `make` and ends with `real_simulators.main(make)`; see `script`.
Run as `script.py OUT RUN`, it pickles the results of a run into OUT:

plain 0,1           steps environments 0 and 1 in a plain loop (`reference.ReferenceEnv`, without the package's code)
process, serial     steps `ParallelEnv` with this backend, with the same actions, which `Actor` chooses
PettingZooVecEnv    the same through a facade; the rewards
StackedVecEnv       likewise
about               the kind that the package recognises, the agents, and whether there are action masks
restart             kills a worker under `on_error="restart"`; what was restarted, and which processes are left
speed               throughput relative to a plain loop, as measured by `marl-parallel bench`

`examine` runs all of them for an entry of the table in `simulators/real.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.real import Follows, Simulator

from helpers import TESTS, reference
from helpers.comparison import assert_same

SEED = 42
NUM_ENVS = 4
GROUPS = ("0,1", "2,3")
"""The environments that share a worker, where two workers share four."""

FACADES = ("PettingZooVecEnv", "StackedVecEnv")
WAITING = ("fork server", "resource_tracker")
"""In the command lines of processes that stay until the program ends."""

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
        if mask is None or not isinstance(self.spaces[agent], spaces.Discrete):  # Generals masks the cells of a map
            return self.spaces[agent].sample()
        return self.spaces[agent].sample(np.asarray(mask, np.int8))


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


class LeavingAgents(PettingZooEnv):
    """Lets agents that have ended leave a PettingZoo environment that keeps them in `agents`, such as Flatland's."""

    def __init__(self, env: Any) -> None:
        self.env, self.metadata, self.possible_agents = env, env.metadata, [*env.possible_agents]
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents = [*self.possible_agents]
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        results = self.env.step(actions)
        self.agents = [agent for agent in self.agents if not (results[2][agent] or results[3][agent])]
        return results

    def close(self) -> None:
        self.env.close()


def plain(env: Any) -> Any:
    """Convert a simulator to a form that `reference` supports."""
    if isinstance(getattr(env, "action_space", None), spaces.Tuple):
        return TupleAsDict(env)
    if type(env).__module__.startswith("vmas."):
        return SharedFlags(env)
    if type(env).__module__.startswith("flatland."):
        return LeavingAgents(env)
    if isinstance(env, PettingZooEnv) and type(env).observation_space is PettingZooEnv.observation_space:
        env.observation_spaces = dict.fromkeys(env.possible_agents)  # it declares none
    if type(getattr(env, "unwrapped", env)).__module__.startswith("smarts."):
        env.possible_agents = sorted(env.unwrapped.agent_ids)
    return env


def plain_rollout(make: Callable[..., Any], env_ids: Sequence[int], batches: int, choose: Choose | None) -> Rollout:
    """Step environments in a plain loop, one after the other."""
    copies = [
        reference.ReferenceEnv(PlainConstructor(make, SEED + i), i, SEED + i, AutoresetMode.SAME_STEP) for i in env_ids
    ]
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
    """The constructor of a simulator for `reference`, with the original's signature.

    It seeds process-wide generators, as workers do before each constructor.
    """

    def __init__(self, make: Callable[..., Any], seed: int) -> None:
        self.make = self.__wrapped__ = make
        self.seed = seed

    def __call__(self, **keywords: Any) -> Any:
        random.seed(self.seed)
        np.random.seed(self.seed)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(self.seed)
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
        declared = env.action_space
        actors = [
            Actor(i, {}.__getitem__ if declared is None else declared.__getitem__, choose) for i in range(num_envs)
        ]
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


def facade_rollout(
    make: Callable[..., Any],
    facade: str,
    num_envs: int,
    batches: int,
    choose: Choose | None,
    arguments: dict[str, Any],
) -> list[dict[Any, list[Any]]]:
    """Step a facade with the actions of `parallel_rollout`; the rewards of each step, by agent and environment."""
    from marl_parallel import ParallelEnv, vector

    options = {"start_timeout": 300, **(arguments or {"num_workers": 2})}
    with getattr(vector, facade)(ParallelEnv([make] * num_envs, seed=SEED, **options)) as env:
        parallel, rewards = env.parallel_env, []
        declared = parallel.action_space
        actors = [Actor(i, declared.__getitem__, choose) for i in range(num_envs)]
        fillers = {agent: zeros(declared[agent]) for agent in parallel.possible_agents}
        env.reset()
        for _ in range(batches):
            inputs = zip(actors, parallel.acting, parallel.action_masks, strict=True)
            rows = [{**fillers, **actor.act(acting, masks)} for actor, acting, masks in inputs]
            if facade == "PettingZooVecEnv":
                returned = env.step(
                    {agent: stack(declared[agent], [row[agent] for row in rows]) for agent in parallel.possible_agents}
                )[1]
            else:
                groups = {
                    name: stack(
                        batch_space(declared[agents[0]], len(agents)),
                        [stack(declared[agents[0]], [row[agent] for agent in agents]) for row in rows],
                    )
                    for name, agents in env.group_map.items()
                }
                only = len(groups) == 1
                grouped = env.step(next(iter(groups.values())) if only else groups)[1]
                returned = {
                    agent: (grouped if only else grouped[name])[:, place]
                    for name, agents in env.group_map.items()
                    for place, agent in enumerate(agents)
                }
            rewards.append({agent: [np.array(value) for value in column] for agent, column in returned.items()})
    return rewards


def stack(space: gymnasium.Space[Any], items: Sequence[Any]) -> Any:
    return concatenate(space, items, create_empty_array(space, len(items)))


def zeros(space: gymnasium.Space[Any]) -> Any:
    """A value of this form, for agents that do not act."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(one) for key, one in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(zeros, space.spaces))
    return space.start if isinstance(space, spaces.Discrete) else np.zeros(space.shape, space.dtype)


def about(make: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What the package recognises: kind, number of agents, action masks."""
    from marl_parallel import ParallelEnv
    from marl_parallel.adapters import adapt

    adapted = adapt(make(**reference.keywords_of(make, {"seed": SEED, "env_id": 0})))
    kind = adapted.kind.removeprefix("A ").removeprefix("An ").removesuffix(" environment")
    adapted.source.close()
    with ParallelEnv([make], seed=SEED, start_timeout=300, **arguments) as env:
        observations, _ = env.reset()
        agents = env.possible_agents or [*observations[0]]
        return {"kind": kind, "agents": len(agents), "masks": any(map(bool, env.action_masks))}


def restart(
    make: Callable[..., Any], num_envs: int, choose: Choose | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Kill a worker in the middle of an episode and step on.

    Returns:
        The environments of the worker that was killed, those that `__common__` reports as restarted, whether the former
        were truncated, how many restarts the statistics count, whether all go on, the names of programs that ran, and
        the command lines of processes left after `close`.
    """
    from marl_parallel import ParallelEnv

    options = {"start_timeout": 300, **(arguments or {"num_workers": 2})}
    with ParallelEnv([make] * num_envs, seed=SEED, on_error="restart", **options) as env:
        declared = getattr(env, "action_space", {})
        actors = [Actor(i, declared.__getitem__, choose) for i in range(num_envs)]

        def step() -> tuple[Any, ...]:
            inputs = zip(actors, env.acting, env.action_masks, strict=True)
            return env.step([actor.act(acting, masks) for actor, acting, masks in inputs])

        env.reset()
        for _ in range(3):
            step()
        pids = env.call(lambda _: os.getpid())
        started = descendants()
        os.kill(pids[-1], signal.SIGKILL)
        results = step()
        restarted = [i for i, infos in enumerate(results[-1]) if infos.get("__common__", {}).get("restarted")]
        truncated = [i for i, truncateds in enumerate(results[3]) if truncateds["__all__"]]
        for _ in range(10):
            results = step()
        started |= descendants()
        counted = env.stats().restarts
    deadline = time.monotonic() + 20
    while (left := started & descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    lost = [i for i, pid in enumerate(pids) if pid == pids[-1]]
    return {
        "lost": lost,
        "restarted": restarted,
        "truncated": {*lost} <= {*truncated},
        "counted": counted,
        "goes on": all(results[0]),
        "started": sorted({Path(command.split(" ")[0]).name for _, command in started}),
        "left": sorted(command for _, command in left),
    }


def descendants() -> set[tuple[int, str]]:
    """Processes below this one, without those of Python and of this package that wait for the next start."""
    import psutil

    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in WAITING):
                found.add((child.pid, command))
    return found


def speed(make: Callable[..., Any], num_envs: int, seconds: float, repeats: int) -> dict[str, float]:
    """Microseconds per environment step of a plain loop, and the throughput of two workers relative to it."""
    from marl_parallel.cli.measure import Contender, measure

    loop, workers = measure("", make, num_envs, [Contender("process", 2)], seconds=seconds, repeats=repeats)
    return {"loop_us": loop.microseconds_per_step, "speed_up": workers.speedup}


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
    results: dict[str, tuple[Any, str]] = {}
    out, *runs = sys.argv[1:]
    for run in runs:
        word, *more = run.split(" ")
        try:
            if word == "plain":
                env_ids = [int(text) for text in more[0].split(",")]
                result: Any = tuple(plain_rollout(make, env_ids, batches, choose))
            elif word in FACADES:
                result = facade_rollout(make, word, num_envs, min(batches, 50), choose, arguments)
            elif word == "about":
                result = about(make, arguments)
            elif word == "restart":
                result = restart(make, num_envs, choose, arguments)
            elif word == "speed":
                result = speed(make, num_envs, float(more[0]), int(more[1]))
            else:
                result = tuple(parallel_rollout(make, word, num_envs, batches, choose, arguments))
            results[run] = simplified(result), ""
        except Exception:
            results[run] = None, traceback.format_exc()
    Path(out).write_bytes(pickle.dumps(results))


def simplified(value: Any) -> Any:
    """The same with only dicts, tuples, lists, arrays, numbers and text, and the names of other types."""
    if isinstance(value, dict):
        return {simplified(key): simplified(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(simplified, value))
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return (type(value).__qualname__, simplified(fields))
    if isinstance(value, tuple):
        return (type(value).__qualname__, *map(simplified, value))
    if value is None or isinstance(value, np.generic) or type(value) in (bool, int, float, str, bytes):
        return value  # not enumerations, whose module may be missing where results are compared
    if isinstance(value, np.ndarray):
        return value if type(value) is np.ndarray else (type(value).__qualname__, np.asarray(value))
    return (type(value).__qualname__, repr(value))


# -- scripts and their results ----------------------------------------------------------------------------------------


def script(setup: str, make: str, options: str = "") -> str:
    """The text of a script for a simulator.

    Args:
        setup: The first lines of its README's example.
        make: The README's expression that makes an environment; it may use `seed`.
        options: Further arguments of `main`.
    """
    call = f"from helpers import real_simulators\nreal_simulators.main(make, {options})"
    seed = "seed" if re.search(r"\bseed\b(?!=)", make) else ""
    return f"{setup}\n\ndef make({seed}):\n    return {make}\n\n{call}\n"


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
    (folder / "script.py").write_text(text)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(lambda run: Rollout(*_only(folder, run, variables)), runs), strict=True))


def _only(folder: Path, run: str, variables: Mapping[str, str] | None) -> Any:
    result, error = results(folder, [run], variables)[run]
    assert not error, f"{run}: {error}"
    return result


def results(
    folder: Path,
    runs: Sequence[str],
    variables: Mapping[str, str] | None = None,
    python: str = sys.executable,
    timeout: float = 540,
) -> dict[str, tuple[Any, str]]:
    """Runs of the script in `folder`, one after the other in one process: by run, its result and its error, if any."""
    out = folder / f"{'+'.join(runs)[:100].replace(' ', '_')}.pickle"
    always = {"PYTHONPATH": str(TESTS), "SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
    # A session of its own, so that nothing is left of runs that take too long.
    started = subprocess.Popen(
        [python, "script.py", str(out), *runs],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **always, **(variables or {})},
        start_new_session=True,
    )
    try:
        _, errors = started.communicate(timeout=timeout)
        failed = f"exit code {started.returncode}: {errors[-2000:]}" if started.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        failed = f"no result after {timeout:g} s"
    return dict.fromkeys(runs, (None, failed)) if failed else pickle.loads(out.read_bytes())


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


def report(name: str, of: Mapping[str, Any]) -> None:
    """Print the times of rollouts; `pytest -rP` shows them."""
    of = {run: rollout for run, rollout in of.items() if isinstance(rollout, Rollout)}
    seconds = ", ".join(f"{run} {rollout.seconds:.1f} s" for run, rollout in of.items())
    first = next(iter(of.values()))
    print(f"{name}: {len(first.steps[0])} batches, episode ends {first.ends}; {seconds}")


# -- entries of the table ---------------------------------------------------------------------------------------------


def runs_of(simulator: Simulator, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """The results of an entry's runs and of `more` ones, with this interpreter; fails at the first error."""
    variables = simulator.variables_with(Path(sys.executable))
    prepare(simulator, folder, variables)
    groups = [[run] for run in simulator.plain_runs] + [["about", *simulator.parallel_runs, *more]]
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        for of in pool.map(lambda group: results(folder, group, variables), groups):
            for run, (result, error) in of.items():
                assert not error, f"{run}: {error}"
                is_rollout = run in simulator.plain_runs or run in simulator.parallel_runs
                found[run] = Rollout(*result) if is_rollout else result
    return found


def prepare(simulator: Simulator, folder: Path, variables: Mapping[str, str], python: str = sys.executable) -> None:
    """Write the script of an entry, after running its `prepare`; `CalledProcessError` with what that printed."""
    (folder / "script.py").write_text(
        script(simulator.setup, simulator.make, f"batches={simulator.batches}, {simulator.options}")
    )
    if simulator.prepare:
        (folder / "prepare.py").write_text(simulator.prepare)
        everything = {**os.environ, **variables}
        subprocess.run([python, "prepare.py"], check=True, cwd=folder, env=everything, capture_output=True, text=True)


def check_equality(simulator: Simulator, of: Mapping[str, Rollout]) -> None:
    """Fail unless a simulator follows plain loops as its entry says.

    Args:
        simulator: The entry.
        of: The rollouts of its `plain_runs` and `parallel_runs`.
    """
    for name, rollout in of.items():
        assert all(ends > 0 for ends in rollout.ends), f"{name}: episode ends {rollout.ends}"
    clean = {name: simulator.comparable(rollout) for name, rollout in of.items()}
    everyone, process = clean.get("plain 0,1,2,3"), clean["process"]
    if simulator.follows is Follows.IN_FORM:
        assert differ(clean["plain 0,1,2,3 again"], everyone), "two plain loops are equal"
        for name in simulator.parallel_runs:
            for one, other in zip(clean[name].resets, everyone.resets, strict=True):
                assert structure(one) == structure(other), name
        return
    if everyone is not None:
        assert_equal(clean["serial"], everyone, "serial")
    if simulator.one_per_worker:
        everyone = merged(*(clean[name] for name in simulator.plain_runs))
    elif simulator.follows is Follows.WITH_NEIGHBOURS:
        everyone = merged(clean["plain 0,1"], clean["plain 2,3"])
    assert_equal(process, everyone, "process")


def differ(one: Rollout, other: Rollout) -> bool:
    try:
        assert_equal(one, other, "plain")
    except AssertionError:
        return True
    return False


def check_facade(rewards: Sequence[Mapping[Any, Sequence[Any]]], expected: Rollout) -> None:
    """Fail unless the rewards of a facade are those of `ParallelEnv`."""
    for number, by_agent in enumerate(rewards):
        for env_id, steps in enumerate(expected.steps):
            for agent, reward in steps[number][1].items():
                place = f"reward of {agent!r} in step {number} of environment {env_id}"
                np.testing.assert_array_equal(by_agent[agent][env_id], reward, err_msg=place)


def check_restart(found: Mapping[str, Any]) -> None:
    """Fail unless exactly the environments of the killed worker were restarted and nothing is left."""
    assert found["restarted"] == found["lost"], found
    assert found["counted"] == len(found["lost"]), found
    assert found["truncated"], found
    assert found["goes on"], found
    assert not found["left"], found


def check_about(simulator: Simulator, found: Mapping[str, Any]) -> None:
    """Fail unless the package recognises what the entry says."""
    expected = {"kind": simulator.kind, "agents": simulator.agents, "masks": simulator.masks}
    assert found == expected, f"{found}, expected {expected}"
