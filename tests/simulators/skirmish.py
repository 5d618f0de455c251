"""Simulators with the interface of PyMARL's `MultiAgentEnv`: a team fights an enemy, and its members die."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulators.crashing import FAULT_KINDS

NOTHING, REST, STRIKE, SHELTER = range(4)


class Skirmish:
    """Like SMAC: the dead may only do nothing, the others must do something; one reward; `step` returns three values.

    Args:
        seed: Of all its episodes.
        fault: A key of `FAULT_KINDS`: what happens in the step number `fault_at`, counted over all episodes.
        fault_at: See `fault`.
        restarts: How often it has been constructed again: the fault happens in the first life only.
        call_fault: A method that raises at its second call in the first life.
    """

    n_agents, episode_limit = 3, 9

    def __init__(
        self, seed: int = 0, fault: str | None = None, fault_at: int = -1, restarts: int = 0, call_fault: str = ""
    ) -> None:
        self.rng: Any = np.random.default_rng(seed)
        self.steps, self.episodes, self.won = 0, 0, 0
        self.fault, self.fault_at = (fault if restarts == 0 else None), fault_at
        self.call_fault, self.calls = (call_fault if restarts == 0 else ""), dict[str, int]()
        self.saved: list[int] = []

    def called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.call_fault and self.calls[name] == 2:
            raise RuntimeError(f"{name} is out of order")

    def get_env_info(self) -> dict[str, int]:
        sizes = {"state_shape": 5, "obs_shape": 4, "n_actions": 4}
        return {**sizes, "n_agents": self.n_agents, "episode_limit": self.episode_limit}

    def get_total_actions(self) -> int:
        return 4

    def reset(self) -> Any:
        self.called("reset")
        self.time, self.enemy, self.episodes = 0, int(self.rng.integers(3, 12)), self.episodes + 1
        self.health = self.rng.integers(1, 5, self.n_agents)

    def get_obs(self) -> list[NDArray[np.float32]]:
        return [
            np.array(
                [self.health[agent], self.enemy, self.time, agent] if self.health[agent] > 0 else [0] * 4, np.float32
            )
            for agent in range(self.n_agents)
        ]

    def get_state(self) -> NDArray[np.float32]:
        return np.array([*self.health, self.enemy / 3, self.time], np.float32)

    def get_avail_actions(self) -> list[list[int]]:
        return [self.get_avail_agent_actions(agent) for agent in range(self.n_agents)]

    def get_avail_agent_actions(self, agent: int) -> list[int]:
        return [0, 1, 1, int(self.time % 2 == 0)] if self.health[agent] > 0 else [1, 0, 0, 0]

    def fight(self, actions: Any) -> tuple[list[float], bool, bool]:
        if self.steps == self.fault_at and self.fault is not None:
            FAULT_KINDS[self.fault].cause()
        assert len(actions) == self.n_agents
        for agent, action in enumerate(actions):
            assert self.get_avail_agent_actions(agent)[int(action)] == 1, "an action that is not allowed"
        self.steps, self.time = self.steps + 1, self.time + 1
        strikes = [float(action == STRIKE) for action in actions]
        self.enemy -= int(sum(strikes))
        victim = int(self.rng.integers(self.n_agents))
        if actions[victim] != SHELTER:
            self.health[victim] = max(0, self.health[victim] - 1)
        over = bool(self.enemy <= 0 or (self.health == 0).all())
        self.won += self.enemy <= 0
        return [strike * 1.1 - 0.1 for strike in strikes], over, not over and self.time == self.episode_limit

    def info(self, over: bool, limit: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"dead": int((self.health == 0).sum())}
        if over or limit:
            info |= {"battle_won": bool(self.enemy <= 0), "restarted": True}  # its own key of this name
        return {**info, "episode_limit": True} if limit else info

    def step(self, actions: Any) -> Any:
        rewards, over, limit = self.fight(actions)
        return sum(rewards), over or limit, self.info(over, limit)

    def get_stats(self) -> dict[str, Any]:
        self.called("get_stats")
        return {"won": self.won, "episodes": self.episodes, **self.calls}

    def render(self) -> None:
        self.called("render")

    def save_replay(self) -> None:
        self.called("save_replay")
        self.saved.append(self.episodes)

    def close(self) -> None:
        pass


class Dice:
    """Draws from NumPy's process-wide generator."""

    def __init__(self, seed: int) -> None:
        np.random.seed(seed)

    def integers(self, *args: Any) -> Any:
        return np.random.randint(*args)


class GlobalSkirmish(Skirmish):
    """Seeds the generator of its process, and draws from it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rng = Dice(seed)


class ModernSkirmish(Skirmish):
    """Like the wrappers of EPyMARL: `reset` and `step` of Gymnasium's form, one reward for the team or one for each."""

    def __init__(self, common_reward: bool = True, restarts: int = 0, **keywords: Any) -> None:
        super().__init__(restarts=restarts, **keywords)
        self.common_reward = common_reward

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset()
        return self.get_obs(), {}

    def step(self, actions: Any) -> Any:
        rewards, over, limit = self.fight(actions)
        reward: Any = sum(rewards) if self.common_reward else rewards
        return self.get_obs(), reward, over, limit, self.info(over, limit=False)


class CountingSkirmish(ModernSkirmish):
    """Like SMAC, whose statistics are a ratio: there are none before the end of the first episode."""

    fought = 0

    def fight(self, actions: Any) -> tuple[list[float], bool, bool]:
        rewards, over, limit = super().fight(actions)
        self.fought += over or limit
        return rewards, over, limit

    def get_stats(self) -> dict[str, Any]:
        return {**super().get_stats(), "won_mean": self.won / self.fought}

    def save_replay(self) -> None:
        super().save_replay()
        assert self.episodes, "no game has been launched"


class TallyingSkirmish(Skirmish):
    """Its statistics have the number of calls of each method of the interface."""

    def step(self, actions: Any) -> Any:
        self.called("step")
        return super().step(actions)

    def get_obs(self) -> Any:
        self.called("get_obs")
        return super().get_obs()

    def get_state(self) -> Any:
        self.called("get_state")
        return super().get_state()

    def get_avail_actions(self) -> Any:
        self.called("get_avail_actions")
        return super().get_avail_actions()
