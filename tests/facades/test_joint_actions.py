"""Drop-ins of on-policy, HARL and PyMARL: simulators get the actions that runners send, as from the originals."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import Schema, adapt
from marl_parallel.adapters.mappo_env import MAPPOEnv
from marl_parallel.adapters.protocol import JOINT
from marl_parallel.core.block.array_view import Joint
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import ActionRecords, RecordSlices
from marl_parallel.core.objects.pickling import loads
from marl_parallel.core.pool.replay_file import read_crash
from marl_parallel.vector import (
    DummyVecEnv,
    ShareDummyVecEnv,
    ShareSubprocVecEnv,
    ShareVecEnv,
    SubprocVecEnv,
    pymarl_connections,
)

pytestmark = pytest.mark.release_independent

N, K = 3, 3
SPACES: dict[str, Any] = {
    "discrete": spaces.Discrete(4),
    "parts": spaces.MultiDiscrete([3, 2]),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),  # moves and speaks
}

TAKES: dict[str, Callable[[Any], float]] = {
    "argmax": lambda action: float(np.argmax(action)),
    "index": lambda action: float(range(9)[action]),  # a number, no array of one
    "first": lambda action: float(int(action[0])),
    "parts": lambda action: float(np.argmax(action[:3]) + 10 * np.argmax(action[3:])),
    "sum": lambda action: float(np.sum(action)),
}
"""What a simulator does with the action of one agent."""


def plain(value: Any) -> Any:
    """A value that tells its own type, dtype, shape and elements, and those of what is in it."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return type(value).__name__, [plain(one) for one in value] if isinstance(value, list | tuple) else value


class Field:
    """Four values, as on-policy's and light_mappo's; `takes` is a key of `TAKES`."""

    takes, received = "", None
    observation_space: ClassVar = [spaces.Box(-99, 99, (2,), np.float64)] * K
    share_observation_space: ClassVar = [spaces.Box(-99, 99, (2,), np.float64)] * K

    def __init__(self, kind: str) -> None:
        self.action_space = [SPACES[kind]] * K

    def reset(self) -> Any:
        self.time = 0
        return np.zeros((K, 2))

    def play(self, actions: Any) -> Any:
        self.received = plain(actions)
        self.time += 1
        return [[TAKES[self.takes](actions[place])] for place in range(K)], [self.time == 4] * K

    def step(self, actions: Any) -> Any:
        rewards, dones = self.play(actions)
        return np.full((K, 2), self.time), rewards, dones, [{}] * K


class Ground(Field):
    """Six values, as HARL's."""

    n_agents = K

    def reset(self) -> Any:
        return super().reset(), np.zeros((K, 2)), None

    def step(self, actions: Any) -> Any:
        obs, rewards, dones, infos = super().step(actions)
        return obs, obs, rewards, dones, infos, None


class Camp(Field):
    """PyMARL's methods."""

    def reset(self) -> None:
        self.time = 0

    def step(self, actions: Any) -> Any:
        rewards, dones = self.play(actions)
        return float(sum(reward for (reward,) in rewards)), dones[0], {}

    def get_obs(self) -> Any:
        return [[self.time]] * K

    def get_state(self) -> Any:
        return [self.time]

    def get_avail_actions(self) -> Any:
        return [[1] * 4] * K

    def get_env_info(self) -> Any:
        return {"n_agents": K, "n_actions": 4, "obs_shape": 1, "state_shape": 1, "episode_limit": 4}


class Original:
    """What the original classes do with actions, without processes: environment i gets `actions[i]`."""

    def __init__(self, makers: Sequence[Any]) -> None:
        self.envs = [make() for make in makers]
        for env in self.envs:
            env.reset()

    def step(self, takes: str, actions: Any) -> tuple[list[Any], list[Any]]:
        """The rewards, and what each environment has received."""
        rewards = []
        for env, of_env in zip(self.envs, actions, strict=True):
            env.takes = takes
            rewards.append(env.step(of_env)[{Field: 1, Ground: 2, Camp: 0}[type(env)]])
            if env.time == 4:
                env.reset()
        return rewards, [env.received for env in self.envs]


RNG = np.random.default_rng(0)
CHOSEN = RNG.integers(4, size=(N, K))
PARTS = np.stack([RNG.integers(3, size=(N, K)), RNG.integers(2, size=(N, K))], axis=2)
BOTH = np.concatenate([np.eye(3)[PARTS[..., 0]], np.eye(2)[PARTS[..., 1]]], axis=2)
REAL = RNG.normal(size=(N, K, 2)) * 3  # also outside the bounds, as from a Gaussian policy

FORMS: dict[str, list[tuple[str, Any]]] = {
    "discrete": [
        ("argmax", np.eye(4)[CHOSEN]),  # on-policy's particle runner, light_mappo
        ("argmax", np.eye(4, dtype=np.float32)[CHOSEN]),
        ("argmax", np.eye(4, dtype=np.int64)[CHOSEN]),
        ("argmax", np.eye(4, dtype=bool)[CHOSEN]),
        ("argmax", RNG.normal(size=(N, K, 4)).astype(np.float32)),  # relaxed one-hot vectors
        ("argmax", [[np.eye(4)[action] for action in of_env] for of_env in CHOSEN]),  # separated runners
        ("argmax", [[tuple(np.eye(4)[action]) for action in of_env] for of_env in CHOSEN]),
        ("argmax", np.asfortranarray(np.eye(4)[CHOSEN])),
        ("argmax", np.eye(4, dtype=">f4")[CHOSEN]),
        ("index", CHOSEN),
        ("index", CHOSEN.astype(np.int32)),
        ("index", CHOSEN.tolist()),
        ("index", [CHOSEN[env_id] for env_id in range(N)]),  # on-policy's football runner
        ("first", CHOSEN[..., None]),  # SMAC's runners
        ("first", CHOSEN[..., None].astype(np.uint8)),
        ("first", CHOSEN[..., None].astype(np.float32)),  # HARL's buffers
        ("first", CHOSEN[..., None] - 1),  # also numbers that are no choice
        ("first", CHOSEN[..., None].astype(object)),
    ],
    "parts": [("parts", BOTH), ("parts", BOTH.astype(np.float32)), ("sum", PARTS), ("sum", PARTS.astype(np.float32))],
    "box": [
        ("sum", REAL.astype(np.float32)),
        ("sum", REAL),
        ("sum", REAL[:, :, :1]),
        ("sum", np.repeat(REAL, 5000, axis=2)),  # more than there is room for in shared memory
        ("sum", REAL.astype(np.float32)),
    ],
    "tuple": [("sum", np.concatenate([REAL, BOTH[..., :3]], axis=2))],
}  # fmt: skip
"""By action space: what the simulator takes, and what the runner sends."""

FOUR = [
    (SubprocVecEnv, {"num_workers": 2}),
    (SubprocVecEnv, {"num_workers": 1, "isolate_rng": False, "shared_memory": False}),
    (SubprocVecEnv, {"num_workers": 2, "backend": "hybrid"}),
    (SubprocVecEnv, {"num_workers": 2, "backend": "thread"}),
    (DummyVecEnv, {}),
]
SIX = [
    (ShareSubprocVecEnv, {"num_workers": 2, "on_error": "restart"}),
    (ShareSubprocVecEnv, {"num_workers": 1, "pad": True}),
    (ShareDummyVecEnv, {}),
]
SETUPS = [(Field, *setup) for setup in FOUR] + [(Ground, *setup) for setup in SIX]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("make", "drop_in", "options"), SETUPS)
def test_simulators_get_what_the_original_classes_send(make, drop_in, options, kind):
    makers = [functools.partial(make, kind)] * N
    original, envs = Original(makers), drop_in(makers, **options)
    envs.reset()
    for takes, actions in FORMS[kind]:
        envs.set_attr("takes", takes)
        _, *others = envs.step(actions)
        rewards, received = original.step(takes, actions)
        np.testing.assert_array_equal(others[make is Ground], rewards)
        assert [*envs.get_attr("received")] == received
    envs.close()


def test_without_compiled_code_they_get_the_same(monkeypatch):
    monkeypatch.setattr("marl_parallel.core.block.codec.Codec", None)
    for make, drop_in in ((Field, DummyVecEnv), (Ground, ShareDummyVecEnv)):
        test_simulators_get_what_the_original_classes_send(make, drop_in, {}, "discrete")


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}, {"backend": "thread"}])
def test_simulators_of_pymarl_get_what_the_original_runner_sends(options):
    makers = [functools.partial(Camp, "discrete")] * N
    original, connections = Original(makers), pymarl_connections(makers, **options)
    env = connections[0].connections.parallel_env
    for connection in connections:
        connection.send(("reset", None))
    assert {connection.recv()["obs"].shape for connection in connections} == {(K, 1)}
    for takes, actions in [*FORMS["discrete"], *FORMS["box"]]:
        if not isinstance(actions, np.ndarray) or actions.dtype.hasobject:
            continue  # its runner sends arrays
        env.set_attr("takes", takes)
        for connection, of_env in zip(connections, actions):
            connection.send(("step", of_env))
        replies = [connection.recv() for connection in connections]
        rewards, received = original.step(takes, actions)
        assert [reply["reward"] for reply in replies] == rewards
        assert [*env.get_attr("received")] == received
        if replies[0]["terminated"]:
            for connection in connections:
                connection.send(("reset", None))
                connection.recv()
    # Several forms in one step, and environments that wait.
    env.set_attr("takes", "argmax")
    for connection, of_env in zip(connections[:2], (np.eye(4)[CHOSEN[0]], np.eye(4, dtype=np.float32)[CHOSEN[1]])):
        connection.send(("step", of_env))
    assert [connection.recv()["reward"] for connection in connections[:2]] == CHOSEN[:2].sum(axis=1).tolist()
    connections[2].send(("step", np.eye(4)[CHOSEN[2]]))
    assert connections[2].recv()["reward"] == CHOSEN[2].sum()
    env.close()


@pytest.mark.parametrize("kind", ["discrete", "parts"])
def test_simulators_that_say_so_get_indices(kind):
    """One-hot vectors become indices; other forms are handed on."""

    class Numbered(Field):
        discrete_action_input = True

    envs = DummyVecEnv([lambda: Numbered(kind)] * N)
    envs.reset()
    envs.set_attr("takes", "sum")
    one_hot, indices = (np.eye(4)[CHOSEN], CHOSEN) if kind == "discrete" else (BOTH, PARTS)
    for sent in (one_hot, one_hot.astype(np.float32), [[*of_env] for of_env in one_hot], one_hot.tolist()):
        envs.step(sent)
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in indices]
    for handed_on in (indices, CHOSEN[..., None]):
        envs.step(handed_on)
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in handed_on]
    envs.close()


def test_one_hot_rows_of_agents_with_different_spaces_become_indices():
    class Uneven(Ground):
        discrete_action_input = True

        def __init__(self) -> None:
            self.action_space = [spaces.Discrete(size) for size in (2, 4, 3)]

    chosen = CHOSEN % [2, 4, 3]
    envs = ShareDummyVecEnv([Uneven] * N)
    envs.reset()
    envs.set_attr("takes", "sum")
    envs.step([[np.eye(size)[choice] for size, choice in zip((2, 4, 3), of_env)] for of_env in chosen])
    assert [*envs.get_attr("received")] == [plain(of_env) for of_env in chosen]
    envs.close()


@pytest.mark.parametrize(
    ("form", "expected"), [("one-hot", np.eye(4)[CHOSEN]), ("column", CHOSEN[..., None]), ("index", CHOSEN)]
)
def test_a_chosen_form_counts_for_all_that_is_sent(form, expected):
    envs = SubprocVecEnv(
        [lambda: Field("discrete")] * N, adapter=functools.partial(MAPPOEnv, actions=form), backend="serial"
    )
    envs.reset()
    envs.set_attr("takes", "sum")
    for sent in (np.eye(4)[CHOSEN], CHOSEN, CHOSEN[..., None].astype(np.float32)):
        envs.step(sent)
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in expected]
    envs.close()


def test_different_spaces_are_padded_only_on_request():
    """With `pad=True`, padding is removed: actions become elements of each agent's space. Else they are handed on."""

    class Uneven(Ground):
        def __init__(self) -> None:
            self.action_space = [spaces.Discrete(size) for size in (2, 4, 3)]

    chosen = CHOSEN % [2, 4, 3]
    rows = [[np.eye(size)[choice] for size, choice in zip((2, 4, 3), of_env)] for of_env in chosen]
    for pad, takes, sent, expected in (
        (True, "first", np.eye(4)[chosen], chosen[..., None]),
        (True, "first", chosen[..., None].astype(np.float32), chosen[..., None]),
        (False, "argmax", rows, rows),
        (False, "first", chosen[..., None], chosen[..., None]),
    ):
        envs = ShareDummyVecEnv([Uneven] * N, pad=pad)
        envs.reset()
        envs.set_attr("takes", takes)
        rewards = envs.step(sent)[2]
        assert rewards[..., 0].tolist() == chosen.tolist()
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in expected]
        if pad:
            with pytest.raises(ValueError, match=r"environment 0: the action of agent 'agent_0' is \[3\]"):
                envs.step(chosen[..., None] * 0 + 3)
        envs.close()


def test_dicts_of_actions_are_unchanged_and_come_after_arrays():
    """Actions of `ParallelEnv` are of the declared spaces, also after a facade's."""
    env = ParallelEnv([lambda: Ground("discrete")] * N, num_workers=2, seed="own")
    facade: Any = ShareVecEnv(env)
    facade.reset()
    env.set_attr("takes", "argmax")
    facade.step(np.eye(4)[CHOSEN])
    assert env.get_attr("received")[0] == plain(np.eye(4)[CHOSEN[0]])
    del facade
    gc.collect()
    env.set_attr("takes", "first")
    env.step([{f"agent_{place}": action for place, action in enumerate(of_env)} for of_env in CHOSEN.tolist()])
    assert [*env.get_attr("received")] == [plain(of_env[:, None]) for of_env in CHOSEN]
    env.close()


@pytest.mark.parametrize("env_ids", [[0, 1, 2], [2, 0, 1], [1, 0], [2]])
@pytest.mark.parametrize("fits", [True, False], ids=["in the block", "pickled"])
def test_actions_belong_to_the_environments_in_their_order(env_ids, fits):
    envs: Any = DummyVecEnv([lambda: Field("discrete")] * N)
    envs.reset()
    envs.set_attr("takes", "argmax")
    sent = np.eye(4)[CHOSEN[env_ids]]
    values: Any = sent if fits else [*map(list, sent)]
    envs._stepper.step(Joint(values, list, lists=False), env_ids)
    received = envs.get_attr("received")
    for env_id, of_env in zip(env_ids, sent):
        assert received[env_id] == plain(of_env if fits else [*of_env])
    envs.close()


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}])
@pytest.mark.parametrize("in_parts", [False, True])
def test_steps_with_dicts_after_those_with_arrays_clear_nothing(options, in_parts):
    """Only the first ones do, until there is no record left that has joint actions."""
    env = ParallelEnv([lambda: Ground("discrete")] * N, **options)
    facade: Any = ShareVecEnv(env)
    facade.reset()
    env.set_attr("takes", "argmax")
    facade.step(np.eye(4)[CHOSEN])
    transitions = facade._stepper.transitions
    assert transitions.with_joint
    del facade
    gc.collect()
    env.set_attr("takes", "first")
    dicts = [{f"agent_{place}": action for place, action in enumerate(of_env)} for of_env in CHOSEN.tolist()]
    for env_ids in [[2], [0, 1]] if in_parts else [[0, 1, 2]]:
        assert transitions.with_joint
        env.send([dicts[env_id] for env_id in env_ids], env_ids)
        env.recv(len(env_ids))
    assert not transitions.with_joint
    assert [*env.get_attr("received")] == [plain(of_env[:, None]) for of_env in CHOSEN]
    env.close()


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        (np.zeros((N, K - 1, 4)), r"begin with \(3, 3\); got \(3, 2, 4\)"),
        (np.zeros((N + 1, K, 4)), r"begin with \(3, 3\); got \(4, 3, 4\)"),
        ([[0] * K, [0] * K, [0]], r"begin with \(3, 3\); got \(3, 3, 1\): environment 2 has 1 actions for 3 agents"),
        (None, r"begin with \(3, 3\); got NoneType"),
    ],
)
def test_other_numbers_of_actions_are_refused_before_a_step(actions, error):
    envs = DummyVecEnv([lambda: Field("discrete")] * N)
    envs.reset()
    with pytest.raises(ValueError, match=error):
        envs.step(actions)
    assert envs.parallel_env.stats().steps == 0
    envs.close()


def test_check_actions_checks_what_is_handed_on():
    envs = DummyVecEnv([lambda: Field("discrete")] * N, check_actions=True)
    envs.reset()
    envs.set_attr("takes", "sum")
    for sent in (np.eye(4)[CHOSEN], CHOSEN[..., None].astype(np.float32)):
        envs.step(sent)
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in sent]
    for wrong in (CHOSEN[..., None] * 0 + 4, np.full((N, K, 4), 0.25)):
        with pytest.raises(ValueError, match="environment 0: the action of agent 'agent_0'"):
            envs.step(wrong)
    assert envs.parallel_env.stats().steps == 2 * N
    envs.close()


def test_simulators_may_write_into_their_actions():
    """The runner's array, and the next step's actions, stay as they are."""

    class Writer(Field):
        def play(self, actions: Any) -> Any:
            result = super().play(actions)
            actions[:] = 7
            return result

    envs = DummyVecEnv([lambda: Writer("box")] * N)
    envs.reset()
    envs.set_attr("takes", "sum")
    sent = REAL.copy()
    for _ in range(2):
        envs.step(sent)
        assert [*envs.get_attr("received")] == [plain(of_env) for of_env in REAL]
    assert np.array_equal(sent, REAL)
    envs.close()


class Mine(Field):
    """Fails once enough has been dug, which depends on the form of the actions."""

    total = 0.0

    def step(self, actions: Any) -> Any:
        obs, rewards, _, infos = super().step(actions)
        self.total += sum(reward for (reward,) in rewards)
        if self.total > 30:
            raise RuntimeError(f"collapsed after {self.total}")
        return obs, rewards, [False] * K, infos


@pytest.mark.release_independent
@pytest.mark.parametrize("fits", [True, False], ids=["in the block", "pickled"])
def test_a_replay_has_the_actions_that_were_sent(fits, tmp_path):
    envs = SubprocVecEnv([lambda: Mine("discrete")], seed=1, num_workers=1, replay=50, replay_dir=tmp_path)
    envs.set_attr("takes", "argmax")
    envs.reset()
    sent = [np.eye(4)[CHOSEN[:1] * 0 + step % 4] for step in range(40)]
    with pytest.raises(EnvError, match=r"collapsed after \d+") as caught:  # noqa: PT012
        for actions in sent:
            envs.step(actions if fits else [[*map(tuple, of_env)] for of_env in actions])
    (path,) = tmp_path.glob("**/*.replay")
    steps = loads(read_crash(path).actions)
    assert str(path) in str(caught.value)
    assert len(steps) > 5
    for step, actions in zip(steps, sent):
        assert plain(step[JOINT]) == plain(actions[0] if fits else [*map(tuple, actions[0])])


def test_workers_without_shared_memory_receive_them_in_slices():
    schema, blocks = Schema.of(adapt(Field("discrete"))), []
    for _ in range(2):
        layout = Layout(schema, N)
        buffer = bytearray(layout.nbytes)
        layout.bind(buffer)
        blocks.append((ActionRecords(layout, buffer), RecordSlices(layout, buffer)))
    (ours, our_slices), (theirs, their_slices) = blocks
    for env_ids, lists in (([0, 1, 2], False), ([2, 0], True)):
        assert ours.write_joint(env_ids, np.eye(4)[CHOSEN[env_ids]], lists=lists)
        their_slices.put_actions(env_ids, our_slices.actions(env_ids))
        for env_id in env_ids:
            expected = np.eye(4)[CHOSEN[env_id]]
            assert plain(theirs.read(env_id)) == plain({JOINT: [*expected] if lists else expected})
    damaged = np.frombuffer(buffer, np.int64)
    damaged[damaged == 4] = -4
    with pytest.raises(ValueError, match="the record of environment 0 is damaged"):
        theirs.read(0)


@pytest.mark.parametrize("sent", [np.full(K, 4), np.eye(4)[CHOSEN[0]] * 2, REAL[0], np.zeros(K)], ids=repr)
def test_check_actions_refuses_what_a_connection_sends(sent):
    """Before the actions of other connections are carried out."""
    connections = pymarl_connections([functools.partial(Camp, "discrete")] * N, backend="serial", check_actions=True)
    env = connections[0].connections.parallel_env
    for connection in connections:
        connection.send(("reset", None))
    for connection in connections:
        connection.recv()
    env.set_attr("takes", "argmax")
    connections[0].send(("step", np.eye(4)[CHOSEN[0]]))
    if sent.dtype.kind == "i":  # a number that is no choice of its space
        connections[1].send(("step", sent))
        with pytest.raises(ValueError, match="environment 1: the action of agent 'agent_0'"):
            connections[1].recv()
    else:
        with pytest.raises(ValueError, match=r"environment 1: its agents' space .* needs one integer or one-hot row"):
            connections[1].send(("step", sent))
        assert connections[0].recv()["reward"] == CHOSEN[0].sum()
    env.close()
