"""`SkrlEnv` equals plain loops, and skrl's own algorithms, trainers and runner train with it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from simulators.choices import ELSEWHERE, choosers, last_actions
from simulators.dying_agents import DyingAgents
from simulators.native_arena import Arena
from simulators.returning_agents import ReturningAgents, ReturningPettingZooAgents
from simulators.turn_deaths import Elimination
from simulators.variable_agents import VariableAgents, VariableDictAgents
from skrl.envs.wrappers.torch import MultiAgentEnvWrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.multi_agents.torch.ippo import IPPO, IPPO_CFG
from skrl.multi_agents.torch.mappo import MAPPO, MAPPO_CFG
from skrl.trainers.torch import ParallelTrainer, SequentialTrainer
from skrl.utils.runner.torch import Runner
from skrl.utils.spaces.torch import compute_space_size

from marl_parallel import ParallelEnv, make
from marl_parallel.sources.native import Received
from marl_parallel.vector import SkrlEnv

pytestmark = pytest.mark.needs("skrl", "torch", "mpe2")

ENVS, SEED = 3, 5
spread = functools.partial(simple_spread_v3.parallel_env, max_cycles=6)
KINDS: dict[str, Any] = {
    "spread": spread,
    "tag": functools.partial(simple_tag_v3.parallel_env, max_cycles=7, continuous_actions=True),
    "agents die": functools.partial(VariableAgents, plain=True),
    "agents join": functools.partial(VariableDictAgents, plain=True),
    "agents return": ReturningPettingZooAgents,
    "agents return in dicts": ReturningAgents,
    "corpses": functools.partial(ReturningAgents, corpses=True),
}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "threads": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


class PlainLoop:
    """One simulator, which begins anew in the step that ends an episode; `last` is what that step led to."""

    def __init__(self, kind: Any, seed: int) -> None:
        self.env = kind()
        self.agents = [*self.env.possible_agents]
        self.begin(seed)

    def begin(self, seed: int | None = None) -> None:
        self.seen, _ = self.env.reset(seed=seed)
        self.dead: set[str] = set()
        self.returns = dict.fromkeys(self.agents, 0.0)
        self.length = 0

    def state(self) -> Any:
        return self.env.state() if hasattr(self.env, "state_space") else None

    @property
    def acting(self) -> set[str]:
        return {*self.seen} - self.dead

    def step(self, actions: dict[str, Any]) -> None:
        self.seen, self.rewards, *flags, _ = self.env.step({agent: actions[agent] for agent in self.acting})
        ends = [{agent for agent, flag in of_kind.items() if flag and agent != "__all__"} for of_kind in flags]
        now_dead = {agent for agent in self.dead if agent not in self.seen or agent in ends[0] | ends[1]}
        self.died = [of_kind - now_dead for of_kind in ends]
        self.dead = now_dead | ends[0] | ends[1]
        for agent, reward in self.rewards.items():
            self.returns[agent] += reward
        self.length += 1
        if "__all__" in flags[0]:
            self.over = [of_kind["__all__"] for of_kind in flags]
        else:
            self.over = [False, not self.env.agents]  # nobody is left: all have flags of their own, or have died before
        self.is_over = any(self.over)
        self.last = {agent: value for agent, value in self.seen.items() if agent not in now_dead}
        self.last_state = self.state()
        self.finished = (self.returns, self.length)
        if self.is_over:
            self.begin()

    @property
    def current(self) -> dict[str, Any]:
        """The observations of agents that are alive."""
        return {agent: value for agent, value in self.seen.items() if agent not in self.dead}

    def flags(self, agent: str, *, bootstraps: bool) -> tuple[bool, bool]:
        """Terminated and truncated, once in a life and at the end of the episode."""
        terminated, truncated = (agent in of_kind for of_kind in self.died)
        if not (terminated or truncated):
            terminated, truncated = self.over
        is_valued = bootstraps and agent in self.last
        return bool(terminated or (truncated and not is_valued)), bool(truncated and is_valued and not terminated)


def rows(loops: list[PlainLoop], name: str, agent: str, size: int) -> np.ndarray:
    """The observations of an agent in all loops; zeros where it is absent or dead."""
    values = [getattr(loop, name).get(agent, np.zeros(size)) for loop in loops]
    return np.array([np.asarray(value, np.float32).ravel() for value in values])


def states(loops: list[PlainLoop], values: list[Any]) -> np.ndarray | None:
    return None if loops[0].state() is None else np.array(values, np.float32)


def same(tensor: torch.Tensor | None, expected: np.ndarray | None) -> bool:
    return tensor is expected is None or np.array_equal(tensor, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "bootstraps"), [*((how, False) for how in HOWS), ("serial", True), ("process", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_loops(kind, how, bootstraps):
    """Observations, states, rewards, flags, masks and statistics, over ends of lives and of episodes."""
    core = ParallelEnv([KINDS[kind]] * ENVS, True, SEED, **HOWS[how])
    env = SkrlEnv(core, "cpu", bootstrap_truncated=bootstraps)
    loops = [PlainLoop(KINDS[kind], SEED + env_id) for env_id in range(ENVS)]
    assert isinstance(env, MultiAgentEnvWrapper)
    assert env.agents == env.possible_agents == loops[0].agents
    assert (env.num_envs, env.num_agents) == (ENVS, len(loops[0].agents))
    observations, _ = env.reset()
    ends = deaths = 0
    for space in env.action_spaces.values():
        space.seed(1)
    for _ in range(25):
        for agent in env.agents:
            size = spaces.flatdim(env.observation_space(agent))
            assert same(observations[agent], rows(loops, "current", agent, size))
            assert observations[agent].dtype == torch.float32
            assert same(env.state()[agent], states(loops, [loop.state() for loop in loops]))
            assert env.acting[agent].ravel().tolist() == [agent in loop.acting for loop in loops]
        actions = {agent: np.array([env.action_space(agent).sample() for _ in loops]) for agent in env.agents}
        tensors = {agent: torch.tensor(array.reshape(ENVS, -1)) for agent, array in actions.items()}
        observations, rewards, terminated, truncated, infos = env.step(tensors)
        for env_id, loop in enumerate(loops):
            loop.step({agent: array[env_id] for agent, array in actions.items()})
            ends += loop.is_over
            deaths += not loop.is_over and any(loop.died)
        for agent in env.agents:
            flags = [loop.flags(agent, bootstraps=bootstraps) for loop in loops]
            assert [*zip(terminated[agent].ravel().tolist(), truncated[agent].ravel().tolist())] == flags
            paid = np.array([[loop.rewards.get(agent, 0.0)] for loop in loops], np.float32)
            assert same(rewards[agent], paid)
            assert rewards[agent].dtype == torch.float32
            assert terminated[agent].shape == truncated[agent].shape == (ENVS, 1)
            size = spaces.flatdim(env.observation_space(agent))
            if bootstraps:
                transition = infos["transition"]
                assert same(transition["next_observations"][agent], rows(loops, "last", agent, size))
                assert same(transition["next_states"][agent], states(loops, [loop.last_state for loop in loops]))
        finished = [loop.finished for loop in loops if loop.is_over]
        assert ("episode" in infos) == bool(finished)
        if finished:
            means = {key: value.item() for key, value in infos["episode"].items()}
            assert means.pop("Episode / Length") == np.float32(np.mean([length for _, length in finished]))
            for agent in env.agents:
                mean = np.mean([returns[agent] for returns, _ in finished])
                assert means.pop(f"Episode / Return ({agent})") == pytest.approx(mean, rel=1e-5)
            assert not means
    env.close()
    assert ends >= 6
    assert deaths >= 4 or kind in ("spread", "tag")


@pytest.mark.parametrize("name", ["discrete", "below zero", "uint8", "multi-discrete", "in a dict"])
def test_choices_count_from_zero(name):
    """For skrl; simulators get those of their space. Rows of absent agents are zeros."""
    inner = ELSEWHERE["discrete" if name == "in a dict" else name]
    space = spaces.Dict(go=inner, at=spaces.Box(-1, 1, (2,), np.float32)) if name == "in a dict" else inner
    env = SkrlEnv(choosers(space, True), "cpu")
    observations, _ = env.reset()
    assert not observations["chief_1"].any()
    assert not env.present["chief_1"].any()
    width = observations["chief_0"].shape[1]
    actions = {agent: torch.ones(2, width) for agent in env.agents}
    observations, *_ = env.step(actions)
    assert torch.equal(observations["chief_0"].float(), actions["chief_0"])
    for action in last_actions(env, "chief_0"):
        assert np.array_equal(action["go"] if name == "in a dict" else action, inner.start + 1)
    assert last_actions(env, "chief_1") == [None, None]
    env.step(actions)
    observations, _, terminated, *_ = env.step(actions)
    assert not observations["chief_2"].any()  # dead
    assert not terminated["chief_2"].any()  # not again
    assert all(np.any(from_zero.start) == 0 for from_zero in env.action_spaces.values() if name != "in a dict")
    env.close()


# -- skrl's own algorithms ---------------------------------------------------------------------------------------------


class Policy(CategoricalMixin, Model):
    def __init__(self, **declared: Any) -> None:
        Model.__init__(self, **declared)
        CategoricalMixin.__init__(self)
        self.net = torch.nn.Linear(self.num_observations, self.num_actions)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Sum(DeterministicMixin, Model):
    """The value of a state, or of an observation where there is none: the sum of its numbers, at first."""

    def __init__(self, **declared: Any) -> None:
        Model.__init__(self, **declared)
        DeterministicMixin.__init__(self)
        self.weight = torch.nn.Parameter(torch.ones(1))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        of = inputs["observations"] if inputs["states"] is None else inputs["states"]
        return self.weight * of.sum(dim=1, keepdim=True), {}


class BootstrapsFromLast:
    """As on the page of skrl."""

    def record_transition(self, *, infos: Any, **values: Any) -> None:
        super().record_transition(infos=infos, **{**values, **infos["transition"]})  # type: ignore[misc]


ALGORITHMS: dict[str, Any] = {"ippo": (IPPO, IPPO_CFG), "mappo": (MAPPO, MAPPO_CFG)}
BY_AGENT = [
    f"{part}_kwargs"
    for part in ("learning_rate_scheduler", "observation_preprocessor", "state_preprocessor", "value_preprocessor")
]


def learner(env: SkrlEnv, algorithm: str, base: Any = None, **own: Any) -> Any:
    """The multi-agent of an algorithm; skrl 2.1.0 refuses some defaults of its own, which are empty dicts."""
    kind, config = ALGORITHMS[algorithm]
    models: dict[str, Any] = {}
    for agent in env.possible_agents:
        declared = {
            f"{part}_space": getattr(env, f"{part}_space")(agent) for part in ("observation", "state", "action")
        }
        models[agent] = {"policy": Policy(**declared, device="cpu"), "value": Sum(**declared, device="cpu")}
    empty = {name: {agent: {} for agent in env.agents} for name in BY_AGENT}
    defaults = {"learning_epochs": 1, "mini_batches": 1, "rollouts": 8}
    cfg = config(**empty, **{**defaults, **own})
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    memories = {
        agent: RandomMemory(memory_size=cfg.rollouts, num_envs=env.num_envs, device="cpu") for agent in env.agents
    }
    return (kind if base is None else type("Own", (base, kind), {}))(
        possible_agents=env.possible_agents,
        models=models,
        memories=memories,
        observation_spaces=env.observation_spaces,
        state_spaces=env.state_spaces,
        action_spaces=env.action_spaces,
        device="cpu",
        cfg=cfg,
    )


TRAINER = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_training(algorithm, num_envs):
    """skrl's trainers reset once, and rely on automatic resets, also of one environment."""
    env = make(spread, num_envs, facade="skrl", facade_kwargs={"device": "cpu"}, num_workers=min(num_envs, 2))
    agent = learner(env, algorithm)
    before = [parameter.clone() for model in agent.policies.values() for parameter in model.parameters()]
    trainer = SequentialTrainer(env=env, agents=agent, cfg={**TRAINER, "timesteps": 16})
    trainer.train()
    after = [parameter for model in agent.policies.values() for parameter in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after))
    assert agent.tracking_data["Episode / Length"] == [6.0, 6.0]
    assert env.stats().steps == 16 * num_envs
    trainer.eval()
    env.close()


def test_parallel_trainer_and_runner():
    """With one multi-agent, skrl's parallel trainer does not start processes."""
    env = make(spread, 2, facade="skrl", facade_kwargs={"device": "cpu"}, backend="serial")
    methods = torch.multiprocessing.get_start_method(allow_none=True)
    try:
        ParallelTrainer(env=env, agents=learner(env, "mappo"), cfg={**TRAINER, "timesteps": 8}).train()
    finally:
        torch.multiprocessing.set_start_method(methods, force=True)
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": [8], "activations": "tanh"}]
    of_states = [{**network[0], "input": "STATES"}]
    runner = Runner(
        env,
        {
            "seed": 1,
            "models": {
                "separate": True,
                "policy": {"class": "CategoricalMixin", "network": network, "output": "ACTIONS"},
                "value": {"class": "DeterministicMixin", "network": of_states, "output": "ONE"},
            },
            "memory": {"class": "RandomMemory", "memory_size": -1},
            "agent": {
                "class": "MAPPO",
                "rollouts": 8,
                "learning_rate_scheduler_kwargs": {agent: {} for agent in env.agents},
                "experiment": {"write_interval": 0, "checkpoint_interval": 0},
            },
            "trainer": {"class": "SequentialTrainer", "timesteps": 8, **TRAINER},
        },
    )
    runner.run("train")
    env.close()


class Recorded(PlainLoop):
    """Plays the actions of a memory: rewards, and the values of what truncated steps led to."""

    def play(self, algorithm: str, memories: dict[str, Any], env_id: int) -> dict[str, list[tuple[float, float]]]:
        played: dict[str, list[tuple[float, float]]] = {agent: [] for agent in self.agents}
        for time in range(8):
            self.step({a: int(memories[a].get_tensor_by_name("actions")[time, env_id]) for a in self.agents})
            for agent in self.agents:
                seen = self.last_state if algorithm == "mappo" else self.last[agent]
                value = float(seen.sum()) if self.is_over else 0.0
                played[agent].append((float(self.rewards[agent]), value))
        return played


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bootstraps", [False, True])
def test_what_skrl_trains_on_at_a_truncated_step(algorithm, bootstraps):
    """By default, its return is its reward; else, with the value of the episode's own last observation or state."""
    own = {"bootstrap_truncated": bootstraps, "with_state": algorithm == "mappo", "device": "cpu"}
    env = make(spread, 2, facade="skrl", facade_kwargs=own, backend="serial", seed=SEED)
    base = BootstrapsFromLast if bootstraps else None
    agent = learner(env, algorithm, base, learning_rate=0.0, time_limit_bootstrap=bootstraps)
    SequentialTrainer(env=env, agents=agent, cfg={**TRAINER, "timesteps": 8}).train()
    env.close()
    for env_id in range(2):
        played = Recorded(spread, SEED + env_id).play(algorithm, agent.memories, env_id)
        for name, memory in agent.memories.items():
            rewards, returns = (memory.get_tensor_by_name(key)[:, env_id, 0] for key in ("rewards", "returns"))
            paid = [reward + 0.99 * value * bootstraps for reward, value in played[name]]
            assert sum(value != 0.0 for _, value in played[name]) == 1
            assert rewards.tolist() == pytest.approx(paid, rel=1e-4)
            assert returns[5].item() == pytest.approx(paid[5], rel=1e-4)  # the last step: nothing comes from the next
            assert returns[4].item() != pytest.approx(paid[4], rel=1e-4)
            ends = [[False] * 5 + [True] + [False] * 2, [False] * 8]
            flags = [memory.get_tensor_by_name(key)[:, env_id, 0].tolist() for key in ("terminated", "truncated")]
            assert flags == (ends[::-1] if bootstraps else ends)


def recorded(memory: RandomMemory, env_id: int) -> dict[str, list[Any]]:
    """The rows of one environment in a memory of skrl."""
    names = "observations", "rewards", "terminated", "truncated", "values", "returns"
    return {name: memory.get_tensor_by_name(name)[:, env_id].squeeze(-1).tolist() for name in names}


@pytest.mark.parametrize("bootstraps", [False, True])
def test_what_skrl_trains_on_after_a_death(bootstraps):
    """Rows have observations of zeros; only the return of the last step has the value of the last observation."""
    own = {"bootstrap_truncated": bootstraps, "device": "cpu"}
    env = make(DyingAgents, 2, facade="skrl", backend="serial", seed=SEED, facade_kwargs=own)
    base = BootstrapsFromLast if bootstraps else None
    agent = learner(env, "ippo", base, learning_rate=0.0, time_limit_bootstrap=bootstraps, rollouts=9)
    SequentialTrainer(env=env, agents=agent, cfg={**TRAINER, "timesteps": 9}).train()
    env.close()
    actions = {name: memory.get_tensor_by_name("actions") for name, memory in agent.memories.items()}
    for env_id in range(2):
        simulator = DyingAgents()
        seen, _ = simulator.reset(seed=SEED + env_id)
        rows = {name: recorded(memory, env_id) for name, memory in agent.memories.items()}
        for time in range(9):  # one episode
            for name, of_agent in rows.items():
                lives = time < simulator.death[name]
                assert of_agent["observations"][time] == (seen[name].tolist() if lives else [0.0, 0.0])
            acting = {name: int(actions[name][time, env_id]) for name in rows if time < simulator.death[name]}
            seen, rewards, *_ = simulator.step(acting)
            for name in acting:
                value = float(seen[name].sum()) if bootstraps and (name, time + 1) == ("y", simulator.death["y"]) else 0
                assert rows[name]["rewards"][time] == pytest.approx(rewards[name] + 0.99 * value, abs=1e-4)
        for name, of_agent in rows.items():
            end = simulator.death[name] - 1
            assert of_agent["returns"][end] == pytest.approx(of_agent["rewards"][end], abs=1e-4)
            assert {*of_agent["rewards"][end + 1 :], *of_agent["returns"][end + 1 :]} <= {0.0}
            died = "truncated" if bootstraps and name == "y" else "terminated"
            assert next(time for time, flag in enumerate(of_agent[died]) if flag) == end


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_skrl_trains_on_with_next_step(algorithm):
    """The step that begins an episode is an end: no return of a new episode counts for what came before."""
    own = {"device": "cpu", "with_state": algorithm == "mappo"}
    env = make(spread, 2, facade="skrl", backend="serial", auto_reset="NEXT_STEP", facade_kwargs=own)
    agent = learner(env, algorithm, learning_rate=0.0, rollouts=16)
    SequentialTrainer(env=env, agents=agent, cfg={**TRAINER, "timesteps": 16}).train()
    env.close()
    for env_id in range(2):
        for memory in agent.memories.values():
            rows = recorded(memory, env_id)
            assert [time for time, flag in enumerate(rows["terminated"]) if flag] == [5, 6, 12, 13]
            assert not any(rows["truncated"])
            for begins in (6, 13):
                assert not any(rows["observations"][begins])
                assert any(rows["observations"][begins + 1])
                assert rows["rewards"][begins] == 0.0
                assert rows["returns"][begins] == pytest.approx(0.0, abs=1e-5)
                assert rows["returns"][begins - 1] == pytest.approx(rows["rewards"][begins - 1], rel=1e-4)


class FlatArena(Arena):
    """Steps all environments at once, with observation spaces for which skrl has tensors."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        flat = {agent: spaces.Box(-np.inf, np.inf, (1 + (agent == "scout"),)) for agent in self.schema.possible_agents}
        self.schema = dataclasses.replace(self.schema, observation_spaces=flat)

    def receive(self) -> Received:
        received = super().receive()
        (tanks,), scouts = received.observations
        both = np.stack([scouts["at"], scouts["seen"]], axis=-1).astype(np.float32)
        return received._replace(observations=[tanks[..., None], both])


@pytest.mark.parametrize("native", [False, True])
def test_steps_that_begin_episodes(native):
    """With NEXT_STEP, all agents are terminated in them, also in those after a load."""
    core = ParallelEnv.from_native(FlatArena(2)) if native else ParallelEnv([spread] * 2, "NEXT_STEP", backend="serial")
    env = SkrlEnv(core, "cpu")
    actions = {agent: torch.zeros(2, flat) for agent, flat in widths(env).items()}
    length = Arena.LENGTH if native else 6
    env.reset()
    for time in range(1, 3 * length):
        observations, rewards, terminated, *_ = env.step(actions)
        is_over, begins = time % (length + 1) == length, time % (length + 1) == 0
        for agent in env.agents:
            assert terminated[agent].all() == terminated[agent].any() == (is_over or begins)
            assert not (is_over and observations[agent].any())
            assert not (begins and rewards[agent].any())
        if is_over and not native:
            assert not any(tensor.any() for tensor in env.load_state(env.save_state())[0].values())
    env.close()


def widths(env: SkrlEnv) -> dict[str, int]:
    return {agent: compute_space_size(space, occupied_size=True) for agent, space in env.action_spaces.items()}


def test_turn_based_games():
    """A waiting agent is alive: its rows keep their observations, until it dies."""
    env = make(Elimination, 2, facade="skrl", backend="serial", facade_kwargs={"device": "cpu"}, seed=1)
    loop = turn_based_aec_to_parallel(Elimination())
    seen, _ = loop.reset(seed=1)
    observations, _ = env.reset()
    deaths = 0
    for action in (0, 1, 2, 0, 1):
        dead = {*env.agents} - {*loop.agents}
        deaths += len(dead)
        for agent in env.agents:
            expected = np.zeros(2, np.float32) if agent in dead else seen[agent]
            assert np.array_equal(observations[agent][0], expected)
        selected = loop.aec_env.agent_selection
        assert [bool(env.acting[agent][0]) for agent in env.agents] == [agent == selected for agent in env.agents]
        observations, *_ = env.step({agent: torch.full((2, 1), action) for agent in env.agents})
        seen, *_ = loop.step(dict.fromkeys(loop.agents, action))
    assert deaths
    env.close()


# -- saved states ------------------------------------------------------------------------------------------------------


def zeros(env: SkrlEnv) -> dict[str, torch.Tensor]:
    return {agent: torch.zeros(env.num_envs, 1, dtype=torch.int64) for agent in env.agents}


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[agent], other[agent]) for agent in one)


@pytest.mark.parametrize("how", ["serial", "process"])
def test_training_goes_on_from_a_loaded_episode(how):
    """The first reset of a trainer keeps it, with its states; the next one begins new episodes."""
    env = make(spread, 2, facade="skrl", facade_kwargs={"device": "cpu"}, seed=SEED, **HOWS[how])
    env.reset()
    for _ in range(4):
        observations, *_ = env.step(zeros(env))
    states, global_state = env.save_state(), env.state()["agent_0"]
    for _ in range(3):
        env.step(zeros(env))
    loaded, _ = env.load_state(states)
    loaded = {agent: tensor.clone() for agent, tensor in loaded.items()}
    agent = learner(env, "mappo", learning_rate=0.0)
    SequentialTrainer(env=env, agents=agent, cfg={**TRAINER, "timesteps": 8}).train()
    for name, memory in agent.memories.items():
        assert torch.equal(memory.get_tensor_by_name("observations")[0], observations[name])
        assert torch.equal(memory.get_tensor_by_name("states")[0], global_state)
        assert recorded(memory, 0)["terminated"] == [False, True] + [False] * 5 + [True]
    assert equal(loaded, observations)
    env.close()


def test_resets_after_a_load():
    """Those with a seed or options, and those after a step or a reset in flight, begin new episodes."""
    env = make(spread, 2, facade="skrl", facade_kwargs={"device": "cpu"}, backend="serial", seed=SEED)
    env.reset()
    for _ in range(2):
        env.step(zeros(env))
    states = env.save_state()
    changed, _ = env.load_state(states)
    loaded = {agent: tensor.clone() for agent, tensor in changed.items()}
    changed["agent_0"][:] = 7  # the caller's own
    for refused in ({}, dict.fromkeys(env.agents, torch.zeros(7))):
        with pytest.raises(ValueError, match="expected"):
            env.step(refused)
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=[1])
    assert equal(env.reset()[0], loaded)
    assert not equal(env.reset()[0], loaded)

    def by_async() -> Any:
        env.reset_async()
        return env.reset_wait()

    def after_a_step() -> Any:
        env.step(zeros(env))
        return env.reset()

    begins = [lambda: env.reset(seed=9), lambda: env.reset(options={}), by_async, after_a_step]
    for begin in begins:
        env.load_state(states)
        begin()
        env.step(zeros(env))
        for time in range(5):
            *_, infos = env.step(zeros(env))
            assert ("episode" in infos) == (time == 4)
    env.load_state(states)
    env.step_async(zeros(env))
    with pytest.raises(AlreadyPendingCallError):
        env.reset()
    env.step_wait()
    env.load_state(states)
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


class Reports(VariableDictAgents):
    """Infos have the time; with `pays_vectors`, the rewards of one step are vectors that no space declares."""

    pays_vectors = False

    def reset(self, **arguments: Any) -> Any:
        self.time = 0
        return super().reset(**arguments)[0], {"__common__": {"time": [0]}}

    def step(self, actions: Any) -> Any:
        self.time += 1
        observations, *rest, _ = super().step(actions)
        if self.pays_vectors:
            rest[0] = dict.fromkeys(observations, np.zeros(2))
            self.pays_vectors = False
        return observations, *rest, {"__common__": {"time": [self.time]}}


def test_infos_and_faults_after_a_load():
    """The reset returns the loaded infos; after a step whose result does not fit, it begins new episodes."""
    env = make(Reports, 2, {"plain": True}, facade="skrl", facade_kwargs={"device": "cpu"}, backend="serial")
    env.reset()
    env.step(zeros(env))
    states = env.save_state()
    _, changed = env.load_state(states)
    changed[1]["__common__"]["time"][0] = 9
    _, infos = env.reset(env_ids=[1])
    assert infos == {one: {"__common__": {"time": [1]}} for one in infos}
    assert 1 in infos
    env.load_state(states)
    env.set_attr("pays_vectors", [True, False])
    with pytest.raises(ValueError, match="reward"):
        env.step(zeros(env))
    assert env.reset()[1][0] == {"__common__": {"time": [0]}}
    env.close()


def test_reset_after_a_load_of_some():
    """It begins new episodes in the others, and where the loaded episode is over."""
    env = make(spread, 3, facade="skrl", facade_kwargs={"device": "cpu"}, backend="serial", auto_reset="NEXT_STEP")
    env.reset()
    saved = []
    for _ in range(6):
        env.step(zeros(env))
        saved.append(env.save_state())
    env.load_state(saved[1][:1], [0])
    loaded, _ = env.load_state(saved[5][2:], [2])  # over
    observations, _ = env.reset()
    for agent in env.agents:
        assert torch.equal(observations[agent][0], loaded[agent][0])
        assert not loaded[agent][1:].any()
        assert observations[agent][1:].any(dim=1).all()
    lengths = []
    for _ in range(6):
        *_, infos = env.step(zeros(env))
        lengths += [infos["episode"]["Episode / Length"].item()] if "episode" in infos else []
    assert lengths == [6.0, 6.0]  # of the loaded one, and of the two that begin
    env.close()


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_states():
    """Whether they are read is a choice, except where there are none."""
    env = make(VariableAgents, 2, {"plain": True}, facade="skrl", facade_kwargs={"with_state": False}, backend="serial")
    env.reset()
    assert {*env.state().values(), *env.state_spaces.values()} == {None}
    env.close()
    core = ParallelEnv([ReturningAgents] * 2, backend="serial")
    assert {*SkrlEnv(core).state_spaces.values()} == {None}
    with pytest.raises(NotImplementedError, match="no global state"):
        SkrlEnv(core, with_state=True)
    core.close()


def test_wrong_use():
    """Messages say what was expected; nothing has been stepped."""
    env = make(spread, ENVS, facade="skrl", backend="serial")
    env.reset()
    right = {agent: torch.zeros(ENVS, 1, dtype=torch.int64) for agent in env.agents}
    with pytest.raises(ValueError, match=r"a dict of actions by agent, with the keys \['agent_0'.*; got Tensor"):
        env.step(right["agent_0"])
    with pytest.raises(ValueError, match=r"got the keys \['agent_1'\]"):
        env.step({"agent_1": right["agent_1"]})
    with pytest.raises(ValueError, match=r"actions of agent 'agent_1' of shape \(3, 1\), got \(2, 1\)"):
        env.step({**right, "agent_1": torch.zeros(2, 1)})
    assert env.stats().steps == 0
    with pytest.raises(AttributeError, match="does not have attribute 'colour'"):
        _ = env.colour
    env.close()
    with pytest.raises(ValueError, match=r"SkrlEnv needs a ParallelEnv with auto_reset=.*, got auto_reset=False"):
        make(spread, ENVS, facade="skrl", backend="serial", auto_reset=False)
    for core, advice in (
        (ParallelEnv([spread], "NEXT_STEP", backend="serial"), ": pass auto_reset=True"),
        (ParallelEnv.from_native(FlatArena(2)), ", the only mode .* without workers"),
    ):
        with pytest.raises(ValueError, match=rf'auto_reset=True for bootstrap_.*="NEXT_STEP"{advice}'):
            SkrlEnv(core, bootstrap_truncated=True)
        core.close()
    with pytest.raises(TypeError, match=r"SkrlEnv takes no argument 'colour'; .*bootstrap_truncated"):
        make(spread, ENVS, facade="skrl", backend="serial", facade_kwargs={"colour": 1})


UNFIT: dict[str, Any] = {
    "multi-binary": spaces.MultiBinary(3),
    "in a dict": spaces.Dict(a=spaces.MultiBinary(3)),
    "text": spaces.Text(3),
    "box without axes": spaces.Box(0, 1, ()),
    "box without axes in a dict": spaces.Dict(a=spaces.Box(0, 1, ()), b=spaces.Box(0, 1, (2,))),
    "multi-discrete with two axes": spaces.MultiDiscrete([[2, 3], [4, 5]]),
}


@pytest.mark.parametrize("kind", ["observation", "action"])
@pytest.mark.parametrize("name", UNFIT)
def test_spaces_without_tensors(name, kind):
    """Also those of which skrl's functions make tensors of other shapes."""
    fitting = spaces.Discrete(2)
    core = choosers(*((fitting, True, UNFIT[name]) if kind == "observation" else (UNFIT[name], True, fitting)))
    with pytest.raises(ValueError, match=rf"skrl has no tensors for the {kind} space of agent 'chief_0', \w+\("):
        SkrlEnv(core)
    core.close()
