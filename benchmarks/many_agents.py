"""Measure the cost of a step per agent, from 10 to 10,000 agents. It must not grow with the number of agents.

    python benchmarks/many_agents.py              some minutes; writes results/many_agents.*
    python benchmarks/many_agents.py --quick      a few seconds, up to 100 agents; writes only where --output says so
    python benchmarks/many_agents.py --markdown   a table in Markdown, from the last run's JSON

There is one environment with `backend="serial"`, which runs every part of a step except waiting. The measure is the CPU
time of this thread, on which other programs have little effect. The time of the simulator alone, stepped with the same
actions by a plain loop, is subtracted. The first case is the fast path; each other case is a step that cannot use it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import frame
import numpy as np
import pettingzoo
import typer
from frame import AsMarkdown, Only, Output, Page, Quick, Repeats, Table
from gymnasium import spaces
from pettingzoo.utils import AgentSelector

from marl_parallel import ParallelEnv
from marl_parallel.cli.report import in_one_line, machine, progress
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

NAME = "many_agents"
NUMBERS = (10, 100, 1_000, 10_000)
AGENT_STEPS, QUICK_AGENT_STEPS = 40_000, 1_000
"""Steps times agents in one measurement."""
SPACE, ACTIONS = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(5)


# -- simulators --------------------------------------------------------------------------------------------------------


class Crowd:
    """Many agents that cost next to nothing.

    Args:
        count: Number of agents.
        profile: The kind of its steps, one of `PROFILES`.
        all_key: Whether flags have `__all__`, as in dict environments.
    """

    metadata = {"name": "crowd", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, count: int, profile: str, all_key: bool) -> None:
        self.possible_agents = [f"agent_{number}" for number in range(count)]
        self.profile, self.all_key = profile, all_key
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, ACTIONS)
        self.seen = np.zeros(4, np.float32)
        self.agents: list[str] = []

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.time, self.agents = 0, self.possible_agents.copy()
        return dict.fromkeys(self.agents, self.seen), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self.time += 1
        agents, dead, over = self.agents, set(), False
        if self.profile == "dying":
            dead = {*agents[: max(len(self.possible_agents) // 100, 1)]}
            self.agents = agents[len(dead) :]
            over = not self.agents
        elif self.profile == "ending":
            over = self.time % 2 == 0
        observed = agents[self.time % 2 :: 2] if self.profile == "half observed" else agents
        terminateds: dict[str, Any] = {agent: agent in dead for agent in agents}
        truncateds: dict[str, Any] = dict.fromkeys(agents, over)
        if over:
            self.agents = []
        if self.all_key:
            terminateds["__all__"], truncateds["__all__"] = False, over
        infos = {agent: {"health": 1.0} if self.profile == "infos" else {} for agent in agents}
        return dict.fromkeys(observed, self.seen), dict.fromkeys(agents, 1.0), terminateds, truncateds, infos


class DictCrowd(Crowd):
    """A dict environment."""

    def __init__(self, count: int, profile: str) -> None:
        super().__init__(count, profile, all_key=True)
        self.observation_space = spaces.Dict([*self.observation_spaces.items()])
        self.action_space = spaces.Dict([*self.action_spaces.items()])


class PettingZooCrowd(Crowd, pettingzoo.ParallelEnv):
    """A PettingZoo parallel environment."""

    def __init__(self, count: int, profile: str) -> None:
        super().__init__(count, profile, all_key=False)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]


class Queue(pettingzoo.AECEnv):
    """Agents act one after the other."""

    metadata = {"name": "queue", "render_modes": [], "is_parallelizable": False}  # noqa: RUF012
    render_mode = None

    def __init__(self, count: int, profile: str) -> None:
        super().__init__()
        self.possible_agents = [f"agent_{number}" for number in range(count)]
        self.seen = np.zeros(4, np.float32)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SPACE

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTIONS

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents.copy()
        self.rewards, self._cumulative_rewards = (dict.fromkeys(self.agents, 0.0) for _ in range(2))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos = {agent: {} for agent in self.agents}
        self._selector = AgentSelector(self.agents)
        self.agent_selection = self._selector.next()

    def observe(self, agent: str) -> Any:
        return self.seen

    def step(self, action: Any) -> None:
        self.agent_selection = self._selector.next()


PROFILES = ("everybody", "infos", "half observed", "dying", "ending")
MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")
RULES = {"dict": DictCrowd, "pettingzoo": PettingZooCrowd}


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One kind of step.

    Attributes:
        rules: Whose rules the environment follows, a key of `RULES`.
        profile: The kind of steps, one of `PROFILES` or "turns".
        mode: The auto-reset mode.
        how: "dicts" or the name of a facade.
    """

    rules: str
    profile: str
    mode: str
    how: str = "dicts"

    def __str__(self) -> str:
        return f"{self.rules}, {self.profile}, {self.mode}, {self.how}"

    def constructor(self, count: int) -> Callable[[], Any]:
        kind = Queue if self.profile == "turns" else RULES[self.rules]
        return functools.partial(kind, count, self.profile)


def cases() -> list[Case]:
    return [
        *(Case(rules, profile, mode) for rules in RULES for profile in PROFILES for mode in MODES),
        *(Case("pettingzoo", "turns", mode) for mode in MODES),
        *(Case("pettingzoo", profile, mode, how) for profile in PROFILES for mode, how in FACADES),
    ]


FACADES = (("SAME_STEP", "GymnasiumVectorEnv"), ("SAME_STEP", "PettingZooVecEnv"))


@dataclass(frozen=True)
class Result:
    """The cost of a case.

    Attributes:
        rules: As in `Case`.
        profile: As in `Case`.
        mode: As in `Case`.
        how: As in `Case`.
        agents: Number of agents.
        microseconds: CPU time per agent and step, without the simulator.
        simulator: Microseconds of CPU time per agent and step of the simulator alone.
    """

    rules: str
    profile: str
    mode: str
    how: str
    agents: int
    microseconds: float
    simulator: float


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(case: Case, count: int, repeats: int, agent_steps: int) -> Result:
    steps = max(agent_steps // count // (20 if case.profile == "turns" else 1), 4)
    alone, ours = [], []
    for _ in range(repeats):
        env = case.constructor(count)()
        alone.append(_alone(case, env, count, steps))
        with ParallelEnv([case.constructor(count)], case.mode, backend="serial") as parallel:
            ours.append(_by_dicts(parallel, steps) if case.how == "dicts" else _by_facade(case, parallel, steps))
    simulator = statistics.median(alone)
    return Result(
        **asdict(case),
        agents=count,
        microseconds=1e6 * max(statistics.median(ours) - simulator, 0.0) / count,
        simulator=1e6 * simulator / count,
    )


def _alone(case: Case, env: Any, count: int, steps: int) -> float:
    """Seconds per step of the bare simulator, or of PettingZoo's conversion of a turn-based one."""
    if case.profile == "turns":
        from pettingzoo.utils.conversions import turn_based_aec_to_parallel

        env = turn_based_aec_to_parallel(env)
    env.reset(seed=0)
    actions = dict.fromkeys(env.possible_agents, 0)
    started = time.thread_time()
    for _ in range(steps):
        _, _, _, truncateds, _ = env.step(actions)
        if not env.agents or (truncateds and next(iter(truncateds.values()))):
            env.reset()
    return (time.thread_time() - started) / steps


def _by_dicts(env: ParallelEnv, steps: int) -> float:
    env.reset()
    seconds = 0.0
    for _ in range(steps + 1):
        actions = [dict.fromkeys(acting, 0) for acting in env.acting]
        started = time.thread_time()
        _, _, terminateds, truncateds, _ = env.step(actions)
        if env.metadata["autoreset_mode"].name == "DISABLED" and (
            terminateds[0]["__all__"] or truncateds[0]["__all__"]
        ):
            env.reset()
        seconds += time.thread_time() - started
    return seconds / (steps + 1)


def _by_facade(case: Case, env: ParallelEnv, steps: int) -> float:
    vector: Any = {"GymnasiumVectorEnv": GymnasiumVectorEnv, "PettingZooVecEnv": PettingZooVecEnv}[case.how](env)
    vector.reset()
    zeros = np.zeros(len(env.possible_agents), np.int64)
    by_agent = dict.fromkeys(env.possible_agents, np.zeros(1, np.int64))
    actions: Any = zeros if case.how == "GymnasiumVectorEnv" else by_agent
    started = time.thread_time()
    for _ in range(steps):
        vector.step(actions)
    return (time.thread_time() - started) / steps


def run(chosen: Sequence[Case], numbers: Sequence[int], repeats: int, agent_steps: int) -> Report:
    described = machine(("pettingzoo",))
    results = []
    with progress(len(chosen) * len(numbers)) as on_turn:
        for case in chosen:
            for count in numbers:
                on_turn(f"{case}, {count}")
                results.append(measured(case, count, repeats, agent_steps))
    return Report(described, {"repeats": repeats, "numbers": [*numbers], "agent_steps": agent_steps}, results)


# -- showing -----------------------------------------------------------------------------------------------------------


def page(report: Report, mode: str = "") -> Page:
    """A table of one auto-reset mode, or of all."""
    by_case: dict[tuple[str, ...], dict[int, float]] = {}
    for one in report.results:
        if mode in one.mode:
            by_case.setdefault((one.rules, one.profile, one.mode, one.how), {})[one.agents] = one.microseconds
    numbers = report.settings["numbers"]
    headings = ["rules", "steps", "auto-reset", "stepped by", *(f"{count:,} agents" for count in numbers)]
    rows = [[*case, *(f"{costs[count]:.2f}" for count in sorted(costs))] for case, costs in by_case.items()]
    note = (
        "Microseconds per agent and step of one serial environment, without the simulator's own time; medians "
        f"of {report.settings['repeats']} rounds. {in_one_line(report.machine)}."
    )
    return Table(headings, rows, "llll"), note


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    repeats: Repeats = 3,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the cost of a step per agent, by the number of agents."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output), "SAME_STEP")))
        return
    chosen = frame.named(cases(), only)
    report = run(chosen, NUMBERS[:2], 1, QUICK_AGENT_STEPS) if quick else run(chosen, NUMBERS, repeats, AGENT_STEPS)
    frame.show(page(report))
    frame.save(NAME, report, frame.folder_for(output, whole=not (quick or only)), report.results)


if __name__ == "__main__":
    typer.run(main)
