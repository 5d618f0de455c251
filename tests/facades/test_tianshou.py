"""`TianshouVecEnv`: the same arrays, buffers and weights as Tianshou's own vector environments, and what it adds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from mpe2 import simple_adversary_v3, simple_spread_v3
from simulators.choices import Chooser
from simulators.corridors import Corridor
from simulators.drifting import Drift, Painter
from simulators.masked_actions import Gate
from simulators.painting import OldPainting, Painting
from simulators.skirmish import Skirmish
from simulators.unfit_rewards import BAD, UnfitRewards
from tianshou.algorithm import DQN
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv, VectorEnvNormObs
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step

from marl_parallel import EnvError, ParallelEnv, make
from marl_parallel.vector import TianshouVecEnv

pytestmark = pytest.mark.needs("tianshou")

ENVS = 4


class Joint(gymnasium.Env):
    """Several agents as one, in a plain environment; an agent that is gone is seen as zeros."""

    def __init__(self, maker: Callable[..., Any]) -> None:
        self.env = maker()
        self.agents = self.env.possible_agents
        self.sizes = [self.env.observation_space(agent).shape[0] for agent in self.agents]
        self.observation_space = spaces.Box(-np.inf, np.inf, (sum(self.sizes),), np.float32)
        self.action_space = spaces.MultiDiscrete([self.env.action_space(agent).n for agent in self.agents])

    def joined(self, seen: dict[str, Any]) -> Any:
        parts = [seen.get(agent, np.zeros(size, np.float32)) for agent, size in zip(self.agents, self.sizes)]
        return np.concatenate(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.joined(self.env.reset(seed=seed, options=options)[0]), {}

    def step(self, action: Any) -> Any:
        seen, rewards, terminations, *_ = self.env.step(dict(zip(self.agents, action)))
        over = not self.env.agents
        terminated = over and all(terminations.values())
        return self.joined(seen), sum(rewards.values()), terminated, over and not terminated, {}


class Listener(gymnasium.Env):
    """Observes a sample of any space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


class Listeners:
    """Two agents, the second of which observes a sample of any space."""

    possible_agents: ClassVar = ["deaf", "keen"]

    def __init__(self, space: Any) -> None:
        self.observation_spaces = {"deaf": spaces.Discrete(2), "keen": space}
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))

    def seen(self) -> dict[str, Any]:
        return {agent: space.sample() for agent, space in self.observation_spaces.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.seen(), {}

    def step(self, actions: Any) -> Any:
        flags = {"__all__": False}
        return self.seen(), dict.fromkeys(self.possible_agents, 1.0), flags, flags, {}


def facade(maker: Callable[..., Any], **keywords: Any) -> TianshouVecEnv:
    options = {"backend": "serial", **keywords}
    own = {name: options.pop(name) for name in ("wait_num", "timeout") if name in options}
    return make(maker, ENVS, facade="tianshou", facade_kwargs=own, seed="own", **options)


class ByPlace(Policy):
    """Chooses actions by what is observed."""

    def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
        seen = np.asarray(batch.obs).reshape(len(batch.obs), -1)
        nvec = getattr(self.action_space, "nvec", None)
        score = np.abs(np.floor(seen.sum(1) * 10)).astype(np.int64)
        act = score % 3 if nvec is None else (score[:, None] + np.arange(len(nvec))) % nvec
        # The asynchronous collector of Tianshou 2.0 wants a state and an entry for `policy`.
        return Batch(act=act, state=Batch(score=score), policy=Batch(score=score))


def collected(env: Any, **how: Any) -> Any:
    policy = ByPlace(action_space=env.action_space[0])
    collector = Collector(policy, env, VectorReplayBuffer(400, ENVS))
    env.seed(5)
    collector.reset()
    stats = [collector.collect(**how) for _ in range(3)]
    env.close()
    return collector.buffer, [[*one.returns] for one in stats], [[*one.lens] for one in stats]


def assert_same_buffers(got: Any, expected: Any) -> None:
    assert got[1:] == expected[1:]
    buffer, other = got[0], expected[0]
    assert len(buffer) == len(other) > 0
    for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
        assert np.array_equal(getattr(buffer, name), getattr(other, name)), name
    assert np.array_equal(buffer.info.env_id, other.info.env_id)


SPREAD = functools.partial(simple_spread_v3.parallel_env, max_cycles=7)
ADVERSARY = functools.partial(simple_adversary_v3.parallel_env, max_cycles=5)  # observations of different sizes


@pytest.mark.parametrize("how", [{"n_step": 60}, {"n_episode": 6}], ids=["steps", "episodes"])
@pytest.mark.parametrize(
    "backend", [{"backend": "serial"}, {"backend": "process", "num_workers": 2}], ids=["serial", "process"]
)
@pytest.mark.parametrize(
    ("maker", "plain"), [(Drift, Drift), (SPREAD, None), (ADVERSARY, None)], ids=["drift", "spread", "adversary"]
)
def test_collectors_have_the_same_data(maker, plain, backend, how):
    expected = collected(DummyVectorEnv([plain or (lambda: Joint(maker))] * ENVS), **how)
    got = collected(facade(maker, **backend), **how)
    assert_same_buffers(got, expected)
    assert len(np.unique(np.concatenate(got[2]))) > (3 if maker is Drift else 0)
    if maker is Drift:
        assert np.array_equal(got[0].info["at"], expected[0].info["at"])


def trained(env: Any) -> Any:
    torch.manual_seed(3)
    net = Net(state_shape=(3,), action_shape=3, hidden_sizes=[16])
    policy = DiscreteQLearningPolicy(model=net, action_space=env.action_space[0], eps_training=0.0)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-2))
    collector = Collector(algorithm, env, VectorReplayBuffer(400, ENVS))
    env.seed(11)
    collector.reset()
    np.random.seed(4)
    for _ in range(5):
        collector.collect(n_step=20)
        with policy_within_training_step(algorithm.policy):
            algorithm.update(buffer=collector.buffer, sample_size=32)
    env.close()
    return [weights.detach().numpy() for weights in net.parameters()]


def test_trained_weights_are_the_same():
    expected = trained(SubprocVectorEnv([Drift] * ENVS, context="fork"))
    got = trained(facade(Drift, backend="process", num_workers=2))
    assert all(np.array_equal(weights, other) for weights, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("form", ["array", "dict", "number"])
def test_some_environments(form):
    """Steps and resets of some environments, in any order, equal those of Tianshou's."""
    rng = np.random.default_rng(0)
    make_env = functools.partial(Drift, form)
    pair = [facade(make_env), DummyVectorEnv([make_env] * ENVS)]
    assert [env.seed([3, 1, 4, 1]) for env in pair] == [[[3], [1], [4], [1]]] * 2
    assert len(pair[0]) == ENVS
    first = [env.reset(seed=2, options={"place": 3}) for env in pair]
    assert_same_results(*first)
    over: list[int] = []
    for _ in range(60):
        if over:
            assert_same_results(*(env.reset(over) for env in pair))
        ids = rng.permutation(ENVS)[: rng.integers(1, ENVS + 1)]
        results = [env.step(actions, ids) for actions in [rng.integers(2, size=len(ids))] for env in pair]
        assert_same_results(*results)
        over = [int(env_id) for env_id, end in zip(ids, results[0][2] | results[0][3]) if end]
    one = [env.reset(2) for env in pair]
    assert_same_results(*one)
    for env in pair:
        env.close()


def assert_same_results(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for value, other in zip(got, expected):
        assert isinstance(value, np.ndarray)
        assert value.shape == other.shape
        if value.dtype == object:
            for one, plain in zip(value, other):
                assert one.keys() == plain.keys()
                assert all(np.array_equal(one[key], plain[key]) for key in one)
        else:
            assert value.dtype == other.dtype
            assert np.array_equal(value, other)


def test_attributes_and_frames():
    env, plain = facade(Drift), DummyVectorEnv([Drift] * ENVS)
    assert env.action_space == plain.action_space == [spaces.Discrete(3)] * ENVS
    assert env.observation_space == plain.observation_space
    assert env.action_space[0] is not env.action_space[1]
    env.seed(3)
    drawn = [space.sample() for space in env.action_space * 3]
    env.seed(3)
    assert drawn == [space.sample() for space in env.action_space * 3]
    env.set_env_attr("label", "marked", [0, 2])
    assert env.get_env_attr("label") == ["marked", "plain", "marked", "plain"]
    assert env.get_env_attr("label", 1) == ["plain"]
    assert [frame.max() for frame in env.render()] == [0] * ENVS
    assert not env.is_async
    assert env.ready_id == [0, 1, 2, 3]
    normalised = VectorEnvNormObs(env)
    assert normalised.action_space == env.action_space
    normalised.reset()
    normalised.step(np.zeros(ENVS, np.int64))
    assert normalised.get_obs_rms().count == 2 * ENVS
    normalised.close()
    plain.close()
    assert env.is_closed
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_restarts_truncate_and_training_goes_on():
    def constructor(env_id: int, restarts: int) -> Drift:
        return Drift(fails_at=13 if env_id == 1 else -1, restarts=restarts)

    env = facade(constructor, on_error="restart")
    collector = Collector(ByPlace(action_space=env.action_space[0]), env, VectorReplayBuffer(400, ENVS))
    collector.reset()
    collector.collect(n_step=120)
    buffer = collector.buffer
    (place,) = np.flatnonzero(buffer.info["restarted"] == True)  # noqa: E712  # None where there was no restart
    assert buffer.truncated[place]
    assert not buffer.terminated[place]
    assert buffer.rew[place] == 0
    assert np.array_equal(buffer.obs_next[place], buffer.obs[place])
    assert "error" not in buffer.info  # the text of the report
    assert buffer.info.env_id[place] == 1
    env.close()

    failing = facade(functools.partial(Drift, fails_at=1))
    failing.reset()
    failing.step(np.zeros(ENVS, np.int64))
    with pytest.raises(EnvError, match="the ground is missing"):
        failing.step(np.zeros(ENVS, np.int64))


def test_async_collector():
    env = facade(functools.partial(Drift, waits=0.001), backend="process", num_workers=2, wait_num=2)
    with pytest.warns(UserWarning, match="async"):
        collector = AsyncCollector(ByPlace(action_space=env.action_space[0]), env, VectorReplayBuffer(400, ENVS))
    collector.reset()
    stats = collector.collect(n_step=100)
    assert stats.n_collected_steps >= 100
    collector.reset()
    assert collector.collect(n_episode=8).n_collected_episodes >= 8
    with pytest.raises(ValueError, match="AsyncCollector"):
        Collector(ByPlace(action_space=env.action_space[0]), env, VectorReplayBuffer(400, ENVS)).collect(n_step=4)
    env.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # more workers than CPUs
@pytest.mark.parametrize(("how", "wanted"), [({"timeout": 0.2}, None), ({"wait_num": 2}, [3])], ids=str)
def test_some_are_ready_before_the_others(how, wanted):
    def constructor(env_id: int) -> Drift:
        return Drift(waits=[0.0, 0.0, 1.0, 1.5][env_id])

    env = facade(constructor, backend="thread", num_workers=ENVS, **how)
    assert env.is_async
    env.reset()
    infos = env.step(np.zeros(ENVS, np.int64))[-1]
    assert {info["env_id"] for info in infos} == {*env.ready_id} == {0, 1}
    assert {*env.waiting_id} == {2, 3}
    with pytest.raises(AlreadyPendingCallError, match="which are being stepped"):
        env.reset(env.waiting_id)
    with pytest.raises(NoAsyncCallError, match="are not all being stepped"):
        env.step(None, env.ready_id)
    infos = env.step(None, wanted)[-1]  # waits for these, or for the first one
    assert {*(wanted or [])} <= {info["env_id"] for info in infos} <= {2, 3}
    while env.waiting_id:
        env.step(None)
    with pytest.raises(NoAsyncCallError, match="no environment is being stepped"):
        env.step(None)
    env.close()


def test_spaces_of_dict_observations():
    env, agents = facade(functools.partial(Gate, "observations")), Gate("observations").possible_agents
    assert isinstance(env.observation_space[0], spaces.Dict)
    assert [*env.observation_space[0]] == [*env.reset()[0][0]] == agents
    assert env.action_space[0].shape == (len(agents),)
    env.close()


def test_masks_that_simulators_report_apart():
    env = facade(Skirmish)
    plain = Skirmish()
    plain.reset()
    _, infos = env.reset()
    for agent, mask in enumerate(plain.get_avail_actions()):
        assert infos[0][f"agent_{agent}"]["action_mask"].tolist() == mask
    plain.step([1, 1, 1])
    infos = env.step(np.ones((ENVS, 3), np.int64))[-1]
    assert [infos[3][f"agent_{agent}"]["action_mask"].tolist() for agent in range(3)] == plain.get_avail_actions()
    assert infos[3]["dead"] == 0
    assert infos[3]["env_id"] == 3
    env.close()


def test_wrong_use():
    env = facade(Drift)
    with pytest.raises(ResetNeeded):
        env.step(np.zeros(ENVS, np.int64))
    env.reset()
    for wrong in (np.zeros(3, np.int64), None, np.zeros((ENVS, 1), np.int64), [[0], [1, 2], 0, 0]):
        with pytest.raises(ValueError, match="expected an action for each of 4 environments"):
            env.step(wrong)
    for wrong_ids in ([4], [1, 1], [-1], []):
        with pytest.raises(ValueError, match="env"):
            env.step(np.zeros(len(wrong_ids), np.int64), wrong_ids)
    over = False
    while not over:
        *_, terminated, truncated, _ = env.step(np.ones(1, np.int64), [2])
        over = bool(terminated[0] or truncated[0])
    with pytest.raises(ResetNeeded, match=r"the episodes of environments \[2\] are over"):
        env.step(np.zeros(ENVS, np.int64))
    env.step(np.zeros(2, np.int64), [0, 1])
    env.close()
    core = ParallelEnv([Drift] * 2, auto_reset=False, backend="serial")
    for keywords, error in (
        ({"wait_num": 3}, "only 2 environments"),
        ({"wait_num": 0}, "wait_num"),
        ({"timeout": 0}, "timeout"),
    ):
        with pytest.raises(ValueError, match=error):
            TianshouVecEnv(core, **keywords)
    core.close()
    with pytest.raises(ValueError, match="needs a ParallelEnv with auto_reset=False"):
        make(Drift, 2, facade="tianshou", auto_reset=True, backend="serial")


WHOLE: dict[str, tuple[Any, Any]] = {
    "choices": (spaces.Discrete(3), np.array([0, 2])),
    "from 5": (spaces.Discrete(3, start=5), np.array([5, 7])),
    "many choices": (spaces.MultiDiscrete([3, 4]), np.array([[0, 3], [2, 1]])),
    "bits": (spaces.MultiBinary(2), np.array([[0, 1], [1, 1]])),
}


@pytest.mark.parametrize("wait_num", [None, 1])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_floats(name, wait_num):
    """Simulators get the numbers in the dtype of the space."""
    space, whole = WHOLE[name]
    made = [functools.partial(Chooser, space)] * 2
    env = TianshouVecEnv(ParallelEnv(made, auto_reset=False, backend="thread"), wait_num)
    env.reset()
    for floats in (whole.astype(np.float32), whole.astype(np.float64).tolist()):
        env.step(floats, [0, 1])
        while env.waiting_id:
            env.step(None)
        received = [received[-1] for received in env.get_env_attr("got")]
        np.testing.assert_array_equal(received, whole)
        assert all(np.asarray(one).dtype == space.dtype for one in received)
    for wrong in (whole + 0.5, whole * np.nan):
        with pytest.raises(ValueError, match="expected whole numbers as actions in"):
            env.step(wrong, [0, 1])
    env.close()


def test_whole_floats_of_several_agents():
    env = make("mpe2.simple_spread_v3", 2, facade="tianshou", backend="serial", seed=1)
    other = make("mpe2.simple_spread_v3", 2, facade="tianshou", backend="serial", seed=1)
    actions = np.array([[0, 1, 2], [3, 4, 0]])
    for one in (env, other):
        one.reset()
    assert_same_results(env.step(actions.astype(np.float32)), other.step(actions))
    for one in (env, other):
        one.close()


@pytest.mark.parametrize("dict_state", [False, True])
@pytest.mark.parametrize("how", [{"backend": "serial"}, {"num_workers": 2}], ids=str)
def test_environments_whose_observations_have_different_bounds(how, dict_state):
    """As in Tianshou's own tests, whose environments have different sizes."""
    made = [functools.partial(Corridor, length, dict_state=dict_state) for length in (2, 3, 5)]
    env, plain = TianshouVecEnv(ParallelEnv(made, auto_reset=False, **how)), DummyVectorEnv(made)
    assert env.observation_space == [plain.observation_space[2]] * 3
    assert_same_results(env.reset(), plain.reset())
    assert_same_results(env.step(np.ones(3, np.int64)), plain.step(np.ones(3, np.int64)))
    if not dict_state:
        assert_same_buffers(*[collected(one, n_step=30) for one in (env, plain)])
    env.close()


def test_frames_with_a_mode():
    for kind in (Painting, OldPainting):
        env = TianshouVecEnv(ParallelEnv([kind] * 2, auto_reset=False, backend="serial"))
        env.reset()
        assert [frame.max() for frame in env.render(mode="rgb_array")] == [0, 10]
        env.close()


def test_spaces_that_tianshou_does_not_know():
    with pytest.raises(ValueError, match="one array of numbers as the action"):
        facade(functools.partial(Painter, "action"))
    with pytest.raises(TypeError, match="does not support tuples"):
        facade(functools.partial(Painter, "observation"))


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(BOX), spaces.Sequence(BOX, stack=True), spaces.Graph(BOX, None), spaces.Text(5),
        spaces.OneOf([BOX, spaces.Discrete(2)]), spaces.Dict(heard=spaces.Sequence(spaces.Discrete(3)), seen=BOX),
    ],
    ids=lambda space: type(space).__name__,
)  # fmt: skip
@pytest.mark.parametrize("maker", [Listener, Listeners])
def test_observations_without_a_fixed_size_are_refused(maker, space):
    with pytest.raises(TypeError, match=r"agent .* observes .*, whose values have no fixed size: convert them"):
        facade(functools.partial(maker, space))


def test_observations_of_a_derived_box():
    class Lettered(spaces.Box):
        pass

    env = facade(functools.partial(Listener, Lettered(-1, 1, (2,))))
    assert env.reset()[0].shape == (ENVS, 2)
    env.close()


@pytest.mark.parametrize("failing", [[1], [0, 3]])
def test_value_that_does_not_fit_loses_no_results_of_others(failing):
    """The failed environments are ready; the next call returns what the others returned in the same one."""
    env = facade(UnfitRewards, backend="serial", wait_num=3)
    env.reset()
    with pytest.raises(ValueError, match=f"environment {failing[0]}: the reward .* is 'many'"):
        env.step(np.array([BAD if env_id in failing else 1 for env_id in range(ENVS)]))
    others = [env_id for env_id in range(ENVS) if env_id not in failing]
    assert sorted(env.ready_id) == failing
    assert sorted(env.waiting_id) == others
    observations, rewards, *_, infos = env.step(np.zeros(len(failing), np.int64), failing)
    by_env = {info["env_id"]: (seen[0], reward) for info, seen, reward in zip(infos, observations, rewards)}
    while env.waiting_id:
        observations, rewards, *_, infos = env.step(None)
        by_env |= {info["env_id"]: (seen[0], reward) for info, seen, reward in zip(infos, observations, rewards)}
    assert by_env == {**dict.fromkeys(others, (1.0, 1.0)), **dict.fromkeys(failing, (2.0, 0.0))}
    env.close()


def test_value_that_does_not_fit_while_another_environment_is_reset():
    """The reset returns; the error of the step, and the results of the others, come with the next `step`."""
    env = facade(UnfitRewards, backend="serial", wait_num=1)
    env.reset()
    env._stepper.send_some([{"agent_0": action} for action in (BAD, 1, 1)], [0, 1, 2])
    env.waiting_id, env.ready_id = [0, 1, 2], [3]
    observations, _ = env.reset([3])
    assert observations.tolist() == [[0.0]]
    assert sorted(env.waiting_id) in ([1, 2], [0, 1, 2])
    with pytest.raises(ValueError, match="environment 0: the reward"):
        env.step(None)
    assert sorted(env.ready_id) == [0, 3]
    infos = env.step(None, [1, 2])[-1]
    assert sorted(info["env_id"] for info in infos) == [1, 2]
    env.close()


@pytest.mark.parametrize("wait_num", [None, 1])
def test_a_step_that_cannot_be_returned_ends_what_a_reset_would_go_on_with(wait_num):
    """All environments have been stepped, so the state that was loaded is no longer theirs."""
    env = facade(UnfitRewards, backend="serial", wait_num=wait_num)
    env.reset()
    env.step(np.ones(ENVS, np.int64))
    while env.waiting_id:
        env.step(None)
    env.load_state(env.save_state())
    with pytest.raises(ValueError, match=r"the reward .* is 'many'"):
        env.step(np.full(ENVS, BAD))
    for env_id in env.ready_id:
        assert env.reset(env_id)[0].tolist() == [[0.0]]  # a new episode
    env.close()
