"""A small runner that works as PyMARL's `ParallelRunner`, and the processes and pipes that it uses there.

It fills arrays of whole episodes, as an `EpisodeBatch`. What the runner does with its connections, and when, is the
same as in PyMARL: it sends to all, then receives from all; steps only environments whose episode is running; asks for
statistics at the end.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def serve(pipe: Any, make: Callable[..., Any], max_episodes: int) -> None:
    """One environment's process. An environment that fails is made again, and its episode ends at the limit.

    It is also made again after so many episodes.
    """
    env, restarts, episodes, last = make(), 0, 0, {}
    is_new = False  # whether it has been made again because it failed, and not been reset since

    def seen() -> dict[str, Any]:
        return {"state": env.get_state(), "avail_actions": env.get_avail_actions(), "obs": env.get_obs()}

    while True:
        command, data = pipe.recv()
        if command == "step":
            try:
                result = env.step(data)
            except Exception:
                restarts, episodes, is_new = restarts + 1, 0, True
                env = make(restarts=restarts)
                reward = 0.0 if getattr(env, "common_reward", True) else [0.0] * env.n_agents
                pipe.send(
                    {**last, "reward": reward, "terminated": True, "info": {"episode_limit": True, "restarted": True}}
                )
                continue
            reward, over, info = result if len(result) == 3 else (result[1], result[2] or result[3], result[4])
            last = seen()
            pipe.send({**last, "reward": reward, "terminated": over, "info": info})
        elif command == "reset":
            if episodes == max_episodes:
                restarts, episodes = restarts + 1, 0
                env = make(restarts=restarts)
            env.reset()
            episodes, is_new = episodes + 1, False
            last = seen()
            pipe.send(last)
        elif command == "close":
            env.close()
            return
        elif command == "get_stats" and is_new:
            pipe.send({})
        elif command in ("get_env_info", "get_stats"):
            pipe.send(getattr(env, command)())
        else:
            getattr(env, command)()


def process_connections(makers: Sequence[Callable[..., Any]], max_episodes: int = -1) -> list[Any]:
    """A process for each environment, which is made again after so many episodes."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in makers]
    for (_, pipe), make in zip(pipes, makers):
        context.Process(target=serve, args=(pipe, make, max_episodes), daemon=True).start()
    return [pipe for pipe, _ in pipes]


class Runner:
    """Runs one episode of each environment at a time.

    Args:
        connections: One for each environment.
        team: Whether agents share a reward.
        render: Whether environment 0 is rendered in test mode.
    """

    def __init__(self, connections: Sequence[Any], *, team: bool = True, render: bool = False) -> None:
        self.connections, self.team, self.render = connections, team, render
        connections[0].send(("get_env_info", None))
        self.env_info = connections[0].recv()
        self.rng = np.random.default_rng(7)
        self.returns: list[Any] = []
        self.infos: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        self.total_steps = 0

    def new_batch(self) -> dict[str, Any]:
        info, times = self.env_info, self.env_info["episode_limit"] + 1
        envs, agents = len(self.connections), info["n_agents"]
        shapes = {
            "state": (info["state_shape"],), "obs": (agents, info["obs_shape"]),
            "avail_actions": (agents, info["n_actions"]), "actions": (agents,),
            "reward": (1,) if self.team else (agents,), "terminated": (1,), "filled": (1,),
        }  # fmt: skip
        return {name: np.zeros((envs, times, *shape)) for name, shape in shapes.items()}

    def choose(self, batch: dict[str, Any], running: list[int], time: int) -> Any:
        """Allowed actions, which depend on what the agents see."""
        seen, masks = batch["obs"][running, time], batch["avail_actions"][running, time]
        scores = np.where(masks > 0, self.rng.random(masks.shape) + seen[..., :1] / 10, -1)
        return scores.argmax(-1)

    def run(self, test_mode: bool = False) -> dict[str, Any]:
        connections, batch, time = self.connections, self.new_batch(), 0
        for connection in connections:
            connection.send(("reset", None))
        self.insert(batch, [connection.recv() for connection in connections], range(len(connections)), 0)
        over = [False] * len(connections)
        running = [*range(len(connections))]
        returns: list[Any] = [0.0 if self.team else np.zeros(self.env_info["n_agents"]) for _ in connections]
        infos: list[dict[str, Any]] = []
        while running:
            actions = self.choose(batch, running, time)
            batch["actions"][running, time] = actions
            for place, env_id in enumerate(running):
                connections[env_id].send(("step", actions[place]))
                if env_id == 0 and test_mode and self.render:
                    connections[0].send(("render", None))
            replies = [connections[env_id].recv() for env_id in running]
            for env_id, reply in zip(running, replies):
                returns[env_id] += reply["reward"]
                self.total_steps += not test_mode
                if reply["terminated"]:
                    infos.append(reply["info"])
                batch["reward"][env_id, time] = reply["reward"]
                ended = reply["terminated"] and not reply["info"].get("episode_limit", False)
                batch["terminated"][env_id, time] = ended
                over[env_id] = reply["terminated"]
            time += 1
            self.insert(batch, replies, running, time)
            running = [env_id for env_id in running if not over[env_id]]
        for connection in connections:
            connection.send(("get_stats", None))
        self.stats += [connection.recv() for connection in connections]
        self.returns += returns
        # As the runner adds up what infos have: all values must be numbers.
        self.infos += [{key: value + 0 for key, value in info.items()} for info in infos]
        return batch

    @staticmethod
    def insert(batch: dict[str, Any], replies: Sequence[dict[str, Any]], env_ids: Sequence[int], time: int) -> None:
        for env_id, reply in zip(env_ids, replies):
            for name in ("state", "obs", "avail_actions"):
                batch[name][env_id, time] = reply[name]
            batch["filled"][env_id, time] = 1

    def save_replay(self) -> None:
        self.connections[0].send(("save_replay", None))

    def close(self) -> None:
        for connection in self.connections:
            connection.send(("close", None))
