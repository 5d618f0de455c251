"""What MAPPO and HARL do, for comparisons: environments in processes of their own over pipes, and a small trainer.

`PipeVecEnv` has one process for each environment, which steps an object with HARL's interface (lists) and resets it in
the step that ends an episode. `train` is a trainer with their buffers, masks and returns, in NumPy.
"""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

Make = Callable[[int], Any]
"""Makes a simulator; the argument is how often it has been made before."""


def run_environment(pipe: Connection, pickled: bytes) -> None:
    """Step one environment, in a process of its own."""
    make: Make = cloudpickle.loads(pickled)
    lives = 0
    env = make(lives)
    last: tuple[Any, ...] = ()
    while (request := pipe.recv()) is not None:
        name, actions = request
        if name == "spaces":
            pipe.send((env.n_agents, env.observation_space, env.share_observation_space, env.action_space))
            continue
        if name == "reset":
            last = env.reset()
            pipe.send(last)
            continue
        try:
            obs, share_obs, rewards, dones, infos, available = env.step(actions)
        except Exception as error:  # what a restart makes of it: an end of the episode, with a fresh environment
            lives += 1
            env = make(lives)
            obs, share_obs, available = last
            rewards, dones = [[0.0]] * env.n_agents, [True] * env.n_agents
            infos = [{"bad_transition": True, "restarted": True, "fault": str(error)} for _ in range(env.n_agents)]
        if np.all(dones):
            infos[0]["original_obs"] = copy.deepcopy(obs)
            infos[0]["original_state"] = copy.deepcopy(share_obs)
            infos[0]["original_avail_actions"] = copy.deepcopy(available)
            obs, share_obs, available = env.reset()
        last = obs, share_obs, available
        pipe.send((obs, share_obs, rewards, dones, infos, available))


class PipeVecEnv:
    """One process for each environment."""

    def __init__(self, makers: Sequence[Make]) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
        self.pipes, self.processes = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks of a process with threads, in Python 3.12
            for make in makers:
                ours, theirs = context.Pipe()
                process = context.Process(target=run_environment, args=(theirs, cloudpickle.dumps(make)), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        self.pipes[0].send(("spaces", None))
        self.n_agents, self.observation_space, self.share_observation_space, self.action_space = self.pipes[0].recv()

    def reset(self) -> tuple[Any, ...]:
        for pipe in self.pipes:
            pipe.send(("reset", None))
        return tuple(np.stack(values) for values in zip(*[pipe.recv() for pipe in self.pipes]))

    def step(self, actions: Any) -> tuple[Any, ...]:
        for pipe, of_env in zip(self.pipes, actions):
            pipe.send(("step", of_env))
        obs, share_obs, rewards, dones, infos, available = zip(*[pipe.recv() for pipe in self.pipes])
        return (*map(np.stack, (obs, share_obs, rewards, dones)), infos, np.stack(available))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(10)


class Log(dict[str, list[Any]]):
    """Arrays by name, in order of time."""

    def note(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            self.setdefault(name, []).append(np.array(array))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Policy:
    """A linear policy that all agents share, and a linear critic of share observations."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        space = envs.action_space[0]
        self.discrete = hasattr(space, "n")
        size = space.n if self.discrete else space.shape[0]
        self.actor = 0.1 * self.rng.normal(size=(*envs.observation_space[0].shape, size))
        self.critic = 0.1 * self.rng.normal(size=envs.share_observation_space[0].shape)

    def probabilities(self, obs: np.ndarray, available: np.ndarray) -> np.ndarray:
        logits = np.asarray(obs, np.float64) @ self.actor
        logits[np.asarray(available) == 0] = -1e10
        return softmax(logits)

    def act(self, obs: np.ndarray, available: np.ndarray) -> np.ndarray:
        """`(num_envs, agents, 1)`, or `(num_envs, agents, d)`."""
        if not self.discrete:
            mean = np.tanh(np.asarray(obs, np.float64) @ self.actor) / 2 + 0.5
            return np.clip(mean + 0.1 * self.rng.normal(size=mean.shape), 0, 1)
        cumulated = self.probabilities(obs, available).cumsum(axis=-1)
        draws = self.rng.random((*cumulated.shape[:-1], 1)) * cumulated[..., -1:]
        return (draws > cumulated).sum(axis=-1, keepdims=True)

    def values(self, share_obs: np.ndarray) -> np.ndarray:
        return (np.asarray(share_obs, np.float64) @ self.critic)[..., None]


def train(envs: Any, *, rounds: int = 4, length: int = 20, seed: int = 0, gamma: float = 0.9) -> tuple[Log, Policy]:
    """Train for some rounds of `length` steps; returns all data, and the policy."""
    policy, log = Policy(envs, seed), Log()
    obs, share_obs, available = envs.reset()
    for _ in range(rounds):
        steps = []
        for _ in range(length):
            actions = policy.act(obs, available)
            seen = obs.copy(), share_obs.copy(), available.copy()
            obs, share_obs, rewards, dones, infos, available = envs.step(actions)
            dones_env = np.all(dones, axis=1)
            masks = np.ones((*dones.shape, 1))
            masks[dones_env] = 0.0
            active = np.ones((*dones.shape, 1))
            active[dones] = 0.0
            active[dones_env] = 1.0
            agents = range(envs.n_agents)
            bad = np.array([[[0.0] if info[agent]["bad_transition"] else [1.0] for agent in agents] for info in infos])
            next_obs, next_share = np.array(obs), np.array(share_obs)  # as of HARL's off-policy buffer
            next_available = [None if one is None else np.array(one) for one in available]
            for env_id in np.flatnonzero(dones_env):
                next_obs[env_id] = np.array(infos[env_id][0]["original_obs"])
                next_share[env_id] = np.array(infos[env_id][0]["original_state"])
                next_available[env_id] = infos[env_id][0]["original_avail_actions"]
            log.note(
                obs=seen[0], share_obs=seen[1], available=seen[2], actions=actions, rewards=rewards, dones=dones,
                masks=masks, active=active, bad=bad, next_obs=next_obs, next_share=next_share,
                next_available=np.zeros(0) if available[0] is None else np.array(next_available),
            )  # fmt: skip
            steps.append((*seen, actions, rewards, masks, active, bad, next_share))
        returns = policy.values(share_obs)
        for seen_obs, seen_share, allowed, actions, rewards, masks, active, bad, next_share in reversed(steps):
            # Where a limit or a restart has cut an episode off, the value of its last state counts.
            following = masks * returns + (1 - masks) * (1 - bad) * policy.values(next_share)
            returns = rewards + gamma * following
            advantages = (returns - policy.values(seen_share)) * active
            policy.critic += 1e-4 * np.tensordot(advantages[..., 0], seen_share, axes=2)
            if policy.discrete:
                chosen = np.eye(policy.actor.shape[1])[actions[..., 0]] - policy.probabilities(seen_obs, allowed)
                policy.actor += 1e-4 * np.einsum("nkd,nka->da", seen_obs, advantages * chosen)
        log.note(returns=returns)
    return log, policy


class Listed:
    """A PettingZoo environment with HARL's interface: zeros for agents that have left, `state()` for all agents.

    Args:
        env: Its spaces are equal for all agents; masks are in observations, or there are none.
        seed: Of the first reset.
    """

    def __init__(self, env: Any, seed: int | None = None) -> None:
        self.env, self.seed, self.agents = env, seed, env.possible_agents
        self.n_agents = len(self.agents)
        self.action_space = [env.action_space(agent) for agent in self.agents]
        space = env.observation_space(self.agents[0])
        self.observation_space = [getattr(space, "spaces", {"observation": space})["observation"]] * self.n_agents
        self.share_observation_space = [env.state_space] * self.n_agents

    def reset(self) -> tuple[Any, Any, Any]:
        seen, _ = self.env.reset(seed=self.seed)
        self.seed = None
        return self.lists(seen)

    def lists(self, seen: dict[str, Any]) -> tuple[Any, Any, Any]:
        plain = {a: one if isinstance(one, dict) else {"observation": one} for a, one in seen.items()}
        space = self.observation_space[0]
        none = {"observation": np.zeros(space.shape, space.dtype)}
        rows = [plain.get(agent, none) for agent in self.agents]
        masks = None
        if hasattr(self.action_space[0], "n"):
            masks = [[*row.get("action_mask", [1] * space.n)] for row, space in zip(rows, self.action_space)]
        return [row["observation"] for row in rows], [self.env.state()] * self.n_agents, masks

    def step(self, actions: Any) -> tuple[Any, ...]:
        own = actions[:, 0] if hasattr(self.action_space[0], "n") else actions.astype(np.float32)
        acting = {agent: own[place] for place, agent in enumerate(self.agents) if agent in self.env.agents}
        seen, paid, terminated, truncated, _ = self.env.step(acting)
        over, at_limit = not self.env.agents, not all(terminated.values())
        dones = [over or agent not in self.env.agents for agent in self.agents]
        # Those that have died earlier have no flag of their own.
        bad = [over and (truncated[a] and not terminated[a] if a in acting else at_limit) for a in self.agents]
        obs, share_obs, masks = self.lists(seen)
        rewards = [[paid.get(agent, 0.0)] for agent in self.agents]
        return obs, share_obs, rewards, dones, [{"bad_transition": flag} for flag in bad], masks


class SameShare:
    """A simulator with lists, whose share observations are those of the first agent, for all."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self) -> tuple[Any, Any, Any]:
        obs, share_obs, available = self.env.reset()
        return obs, [share_obs[0]] * self.env.n_agents, available

    def step(self, actions: Any) -> tuple[Any, ...]:
        obs, share_obs, *others = self.env.step(actions)
        return obs, [share_obs[0]] * self.env.n_agents, *others
