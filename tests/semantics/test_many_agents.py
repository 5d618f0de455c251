"""Many agents: the work of a step grows linearly with their number. The tests count operations, not seconds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

from marl_parallel import ParallelEnv
from marl_parallel.core.schema import alike
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

pytestmark = pytest.mark.release_independent

FEW, MANY = 30, 240


class CountedAgent:
    """An agent id that counts comparisons and hashes."""

    operations: ClassVar[int] = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        CountedAgent.operations += 1
        return isinstance(other, CountedAgent) and self.number == other.number

    def __hash__(self) -> int:
        CountedAgent.operations += 1
        return hash(self.number)

    def __repr__(self) -> str:
        return f"agent_{self.number}"


class Crowd:
    """Many agents under dict rules; some are not observed, die or have infos.

    Ids are new objects in each step, because equal ids that are the same object are found without a comparison.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, count: int, profile: str, all_key: bool = True) -> None:
        self.count, self.profile, self.all_key = count, profile, all_key
        self.possible_agents = self.ids(range(count))
        self.observation_spaces = dict.fromkeys(self.possible_agents, self.space)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self.agents: list[Any] = []

    @staticmethod
    def ids(numbers: Any) -> list[CountedAgent]:
        return [CountedAgent(number) for number in numbers]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        self.time, self.there = 0, [*range(self.count)]
        self.agents = self.ids(self.there)
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        self.time += 1
        there = self.ids(self.there)
        dying = len(self.there) // 10 if self.profile == "dying" else 0
        self.there = self.there[dying:]
        over = self.profile == "ending" and self.time % 2 == 0
        observed = there[self.time % 2 :: 2] if self.profile == "half observed" else there
        if self.profile == "one at a time":
            observed = [there[self.time % len(there)]]
        if self.profile == "reversed":
            observed = observed[::-1]
        self.agents = [] if over else self.ids(self.there)
        terminateds: dict[Any, Any] = {agent: place < dying for place, agent in enumerate(there)}
        truncateds: dict[Any, Any] = dict.fromkeys(there, over)
        if self.all_key:
            terminateds["__all__"], truncateds["__all__"] = False, over
        infos = {agent: {"health": 1.0} if self.profile == "infos" else {} for agent in there}
        rewards = dict.fromkeys(there, 1.0)
        return {agent: np.ones(2, np.float32) for agent in observed}, rewards, terminateds, truncateds, infos


class PettingZooCrowd(Crowd, pettingzoo.ParallelEnv):
    """PettingZoo rules."""

    def __init__(self, count: int, profile: str) -> None:
        super().__init__(count, profile, all_key=False)

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return self.action_spaces[agent]


class TurnBasedCrowd(pettingzoo.AECEnv):
    """Agents act in turn."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "is_parallelizable": False}
    render_mode = None

    def __init__(self, count: int, profile: str) -> None:
        super().__init__()
        self.possible_agents = Crowd.ids(range(count))

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return Crowd.space

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = Crowd.ids(range(len(self.possible_agents)))
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[Any, Any] = {agent: {} for agent in self.agents}
        self.turn = 0
        self.agent_selection = self.agents[0]

    def observe(self, agent: Any) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> None:
        self.turn = (self.turn + 1) % len(self.agents)
        self.agent_selection = self.agents[self.turn]


KINDS = {"dict": Crowd, "pettingzoo": PettingZooCrowd, "turns": TurnBasedCrowd}
CASES = [
    *((kind, profile) for kind in ("dict", "pettingzoo") for profile in ("infos", "half observed", "dying", "ending")),
    *((kind, profile) for kind in ("dict", "pettingzoo") for profile in ("one at a time", "reversed")),
    ("turns", "turns"),
]


def operations(rebuilt: Any, mode: str, stepped_by: Any, **arguments: Any) -> int:
    """How often ids are compared or hashed in some steps."""
    with ParallelEnv([rebuilt], mode, backend="serial", **arguments) as env:
        count = len(env.possible_agents)
        stepped: Any = env if stepped_by is None else stepped_by(env)
        by_agent = dict.fromkeys(env.possible_agents, np.zeros(1, np.int64))
        fixed: Any = by_agent if stepped_by is PettingZooVecEnv else np.zeros(count, np.int64)
        stepped.reset()
        total = 0
        for _ in range(6):
            actions = [dict.fromkeys(acting, 0) for acting in env.acting] if stepped_by is None else fixed
            before = CountedAgent.operations
            result = stepped.step(actions)
            total += CountedAgent.operations - before
            if mode == "DISABLED" and stepped_by is None and (result[2][0]["__all__"] or result[3][0]["__all__"]):
                before = CountedAgent.operations
                stepped.reset()
                total += CountedAgent.operations - before
        return total


def assert_linear(few: int, many: int) -> None:
    assert few > 0
    # Eight times as many agents: a step quadratic in their number would take 64 times as many.
    assert many < few * 12


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize(("kind", "profile"), CASES)
def test_operations_of_steps(kind, profile, mode):
    few, many = (operations(lambda n=n: KINDS[kind](n, profile), mode, None) for n in (FEW, MANY))
    assert_linear(few, many)


@pytest.mark.parametrize("profile", ["infos", "half observed", "dying", "ending"])
@pytest.mark.parametrize("kind", ["dict", "pettingzoo"])
def test_operations_of_pickled_steps(kind, profile):
    few, many = (
        operations(lambda n=n: KINDS[kind](n, profile), "SAME_STEP", None, shared_memory=False, check_actions=True)
        for n in (FEW, MANY)
    )
    assert_linear(few, many)


@pytest.mark.parametrize("arguments", [{}, {"check_actions": True}, {"on_error": "restart"}], ids=str)
@pytest.mark.parametrize("profile", ["infos", "half observed", "dying", "ending"])
@pytest.mark.parametrize("facade", [GymnasiumVectorEnv, PettingZooVecEnv])
def test_operations_of_facades(facade, profile, arguments):
    few, many = (
        operations(lambda n=n: PettingZooCrowd(n, profile), "SAME_STEP", facade, **arguments) for n in (FEW, MANY)
    )
    assert_linear(few, many)


class CountedSpace(spaces.Box):
    """A space that counts comparisons."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedSpace.comparisons += 1
        return super().__eq__(other)

    __hash__ = None


def test_space_shared_by_agents_is_compared_once():
    shared, other = CountedSpace(0.0, 1.0, (2,)), CountedSpace(0.0, 1.0, (3,))
    declared = {number: shared if number % 3 else other for number in range(300)}
    before = CountedSpace.comparisons
    (one, ones), (two, twos) = alike(declared, [*declared])
    assert CountedSpace.comparisons - before <= 2
    assert (one, two) == (other, shared)
    assert sorted([*ones, *twos]) == [*range(300)]
    assert ones == [*range(0, 300, 3)]


@pytest.mark.parametrize("count", [1, 6, 257, 5000])
def test_order_of_keys_for_any_number_of_agents(count, parallel):
    """The order of keys is the same for few and many agents, and every info is a new dict."""
    agents = [f"agent_{number}" for number in range(count)]

    class Crowd:
        possible_agents = agents
        observation_space = spaces.Dict([(agent, spaces.Discrete(9)) for agent in agents])
        action_space = observation_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return dict.fromkeys(agents, 1), {agent: {} for agent in agents}

        def step(self, actions: Any) -> Any:
            assert [*actions] == agents
            no = {**dict.fromkeys(agents, False), "__all__": False}
            return actions, dict.fromkeys(agents, 0.5), no, no, {agent: {} for agent in agents}

    env = parallel(Crowd, 2)
    env.reset()
    observations, rewards, terminateds, _, infos = env.step([dict(zip(agents, range(count)))] * 2)
    assert [[*of_env] for of_env in (*observations, *rewards, *infos)] == [agents] * 6
    assert [*terminateds[1]] == [*agents, "__all__"]
    assert [*observations[1].values()] == [*range(count)]
    assert len({id(info) for of_env in infos for info in of_env.values()}) == 2 * count
