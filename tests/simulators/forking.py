"""Simulators that fork, and whose child returns to the caller of the method.

This file imports nothing of the tests, because `marl-parallel check` loads it as `path/to/forking.py:Name`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv


class Walk(PettingZooEnv):
    """Two agents on random walks; does not fork. Every number follows from the seed and the actions."""

    metadata = {"name": "walk_v0", "render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, length: int = 5, *, seed: int = 0) -> None:
        self.length, self.rng = length, np.random.default_rng(seed)
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        self.spaces = {agent: spaces.Box(-1e6, 1e6, (3,), np.float64) for agent in self.possible_agents}
        self.moves = {agent: spaces.Discrete(3) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space:
        return self.spaces[agent]

    def action_space(self, agent: str) -> spaces.Space:
        return self.moves[agent]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.agents = 0, self.possible_agents[:]
        self.places = {agent: self.rng.uniform(-1, 1, 3) for agent in self.agents}
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: self.places[agent].copy() for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        for agent in self.agents:
            self.places[agent] += self.rng.normal(float(actions[agent]), 1.0, 3)
        observations, acted = self.observe(), self.agents
        over = self.time == self.length
        self.agents = [] if over else acted
        rewards = {agent: float(self.places[agent].sum()) for agent in acted}
        flags = dict.fromkeys(acted, False), dict.fromkeys(acted, over)
        return observations, rewards, *flags, {agent: {} for agent in acted}

    def render(self) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)


def exec_missing() -> None:
    """Execute a program that is not installed."""
    os.execvp("no-such-physics-server", ["no-such-physics-server"])


def exit_with_three() -> None:
    sys.exit(3)


def raise_error() -> None:
    raise RuntimeError("lost in the child")


def come_back() -> None:
    """Continue as if the child were the simulator."""


ENDINGS = {"exec": exec_missing, "exit": exit_with_three, "raise": raise_error, "return": come_back}


class Forking(Walk):
    """Forks at one place; the parent continues at once.

    Args:
        place: "constructor", "reset", "step", "render", "call" or "close".
        ending: What the child does, one of `ENDINGS`.
        file: A file to which `close` writes the exit codes of the children, one per line.
    """

    def __init__(self, place: str, ending: str, file: str = "", *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.place, self.ending, self.file = place, ending, file
        self.children: list[int] = []
        self.come_to("constructor")

    def come_to(self, place: str) -> None:
        if place != self.place:
            return
        child = os.fork()
        if child == 0:
            ENDINGS[self.ending]()
        else:
            self.children.append(child)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.come_to("reset")
        return super().reset(seed)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.come_to("step")
        return super().step(actions)

    def render(self) -> np.ndarray:
        self.come_to("render")
        return super().render()

    def act(self) -> str:
        self.come_to("call")
        return "acted"

    def exit_codes(self) -> list[int]:
        """Wait for the children."""
        waited = [os.waitpid(child, 0)[1] for child in self.children]
        self.children.clear()
        return [os.waitstatus_to_exitcode(status) for status in waited]

    def close(self) -> None:
        self.come_to("close")
        if self.children and self.file:
            with open(self.file, "a") as file:
                file.writelines(f"{code}\n" for code in self.exit_codes())


class ExecsMissing(Forking):
    """Forks in each step to execute a program that is not installed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("step", "exec", seed=seed)


class ExecsMissingInReset(Forking):
    """Forks in each reset to execute a program that is not installed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("reset", "exec", seed=seed)


def _square(number: int, answer: Any) -> None:
    answer.put(number**2)


_one_at_a_time = threading.Lock()


class Helped(Walk):
    """Computes a part of each step in a forked process of `multiprocessing`.

    Of two threads of one process, one at a time: `Process.start` reaps the children that other threads wait for, whose
    exit codes are then None for a moment.
    """

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        context = multiprocessing.get_context("fork")
        answer = context.SimpleQueue()
        helper = context.Process(target=_square, args=(self.time, answer))
        with _one_at_a_time:
            helper.start()
            squared = answer.get()
            helper.join()
        observations, rewards, terminations, truncations, infos = super().step(actions)
        infos["a"] = {"squared": squared, "exit code": helper.exitcode}
        return observations, rewards, terminations, truncations, infos
