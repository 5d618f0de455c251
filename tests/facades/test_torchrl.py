"""`TorchRLEnv`: its tensors equal the core's dicts, TorchRL's loops and checks run on it, wrong use is refused."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ROOT
from helpers.comparison import assert_same
from helpers.tensors import TorchRLComparison
from mpe2 import simple_spread_v3, simple_tag_v3
from simulators.crashing import FAULT_KINDS, Fate, crashing
from simulators.deterministic import Hunt, Relay
from simulators.dict_rules import DictRules
from simulators.every_space import EverySpace
from simulators.painting import Nothing, OldPainting, OnScreen, Painting
from simulators.returning_agents import ReturningPettingZooAgents
from simulators.stackable import NO_TENSORS, DeclaredSkirmish, EveryTensorSpace, StackableAgents, spread
from simulators.variable_agents import VariableAgents
from simulators.vector_rewards import Couriers
from torchrl.envs import PettingZooWrapper, TransformedEnv
from torchrl.envs.utils import MarlGroupMapType, check_env_specs
from torchrl.record import PixelRenderTransform, VideoRecorder
from torchrl.record.loggers import CSVLogger

from marl_parallel import ParallelEnv
from marl_parallel.core.block.columns import ArrayColumn, NumberColumn
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")

SETUPS = {
    "serial": {"backend": "serial", "num_workers": 2},
    "process": {"backend": "process", "num_workers": 2},
    "pickled": {"backend": "process", "num_workers": 2, "shared_memory": False},
    "checked": {"backend": "serial", "num_workers": 2, "check_actions": True},
}


SCENARIOS: dict[str, Callable[..., Any]] = {
    "spread": spread,
    "images and deaths": Hunt,
    "dicts, deaths and births": DeclaredSkirmish,
    "all spaces": EveryTensorSpace,
    "flags repeated": StackableAgents,
    "agents come back": ReturningPettingZooAgents,
}


# -- the core's dicts against tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_tensors_equal_the_dicts_of_the_core(name, setup, parallel):
    env, core = (parallel(SCENARIOS[name], **SETUPS[setup]) for _ in range(2))
    comparison = TorchRLComparison(TorchRLEnv(env), core)
    comparison.reset()
    for _ in range(14):
        comparison.step()
    assert comparison.ends >= 3
    assert bool(comparison.deaths) is (name not in ("spread", "all spaces"))


@pytest.mark.parametrize(
    "group_map",
    [
        MarlGroupMapType.ONE_GROUP_PER_AGENT,
        MarlGroupMapType.ALL_IN_ONE_GROUP,
        {"back": ["cow_4", "cow_2"], "even": ["cow_0", "cow_3", "cow_1"]},
        {"odd": ["cow_1", "cow_3"], "even": ["cow_0", "cow_2", "cow_4"]},
    ],
    ids=["each", "all", "disorderly", "evenly spaced"],
)
def test_tensors_with_different_groups(group_map, parallel):
    env, core = (parallel(lambda: StackableAgents(5)) for _ in range(2))
    comparison = TorchRLComparison(TorchRLEnv(env, group_map), core)
    comparison.reset()
    for _ in range(20):
        comparison.step()
    assert comparison.ends >= 3
    assert comparison.deaths


def test_observations_are_not_copied_again(parallel):
    env = TorchRLEnv(parallel(lambda: StackableAgents(4)), {"odd": ["cow_1", "cow_3"], "even": ["cow_0", "cow_2"]})
    data = env.step(env.rand_action(env.reset()))["next"]
    (array,) = env._stepper.latest.observations
    for group in env.group_map:
        assert np.shares_memory(data[group, "observation"].numpy(), array)


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("size", [3, 20])
def test_agents_are_written_together(size, parallel, monkeypatch):
    """By compiled code, not one by one."""
    env = TorchRLEnv(parallel(lambda: StackableAgents(size)))
    actions = env.rand_action(env.reset())
    for column in (ArrayColumn, NumberColumn):
        monkeypatch.setattr(column, "write_stacked", None)
    env.step(actions)


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setup", "fault"), [("serial", "raise"), ("process", "SIGKILL")])
def test_reports_of_restarts(setup, fault, parallel):
    """In steps and in resets, they are in the infos."""
    fates = {(0, 0): Fate(fault, after=3), (0, 1): Fate(fault, after=2), (1, 0): Fate(fault, "reset", 1)}
    envs = [parallel(crashing(DeclaredSkirmish, fates), 4, on_error="restart", **SETUPS[setup]) for _ in range(2)]
    comparison = TorchRLComparison(TorchRLEnv(envs[0]), envs[1])
    comparison.reset()
    reported = 0
    for _ in range(20):
        comparison.step()
        for infos in comparison.env.infos.values():
            if "__common__" in infos and "error" in infos["__common__"]:
                assert FAULT_KINDS[fault].word in infos["__common__"]["error"]
                reported += 1
    assert envs[0].stats().restarts == envs[1].stats().restarts == reported >= 3


def test_the_mark_of_a_restart(parallel):
    env = TorchRLEnv(parallel(crashing(StackableAgents, {(1, 0): Fate("raise", after=1)}), on_error="restart"))
    data = env.reset()
    for _ in range(30):
        data, following = env.step_and_maybe_reset(env.rand_action(data))
        if data["next", "restarted"].any():
            break
        data = following
    assert data["next", "restarted"].tolist() == [[False], [True], [False]]
    assert data["next", "truncated"][1].item()
    assert data["next", "cow", "truncated"][1].all()
    assert not data["next", "cow", "terminated"][1].any()
    assert not following["restarted"].any()
    assert following["cow", "mask"][1].all()
    assert "bad terrain" in env.infos[1]["__common__"]["error"]  # though it has been reset since then
    check_env_specs(env)


def test_state_of_a_step_that_a_restart_ended(parallel):
    """The last state before the fault, as observations are: not the first one of the new environment."""
    makers = crashing(VariableAgents, {(1, 0): Fate("raise", after=3)})
    env = TorchRLEnv(parallel(makers, on_error="restart"), return_state=True)
    following = env.reset()
    for _ in range(30):
        before = following["state"].clone()
        data, following = env.step_and_maybe_reset(env.rand_action(following))
        if data["next", "restarted"].any():
            break
    assert data["next", "restarted"][:, 0].tolist() == [False, True, False]
    assert torch.equal(data["next", "state"][1], before[1])
    assert not torch.equal(following["state"][1], before[1])
    assert not torch.equal(data["next", "state"][0], before[0])


def test_no_restart_mark_with_on_error_raise(parallel):
    assert "restarted" not in TorchRLEnv(parallel(StackableAgents)).reset()


@pytest.mark.parametrize("name", SCENARIOS)
def test_check_env_specs(name, parallel):
    env = TorchRLEnv(parallel(SCENARIOS[name]))
    check_env_specs(env, break_when_any_done="both")
    check_env_specs(env, seed=0)
    # Absent agents are within the specs, too.
    rollout = env.rollout(12, break_when_any_done=False)
    assert (~torch.cat([rollout["next", group, "present"].flatten() for group in env.group_map])).any() or (
        name == "spread"
    )
    for step in rollout["next"].unbind(1):
        assert env.observation_spec.contains(step.select(*env.observation_spec.keys(True, True)))


def test_resets_by_the_masks_of_groups(parallel):
    env = TorchRLEnv(parallel(StackableAgents))
    data = env.reset()
    data["cow", "_reset"] = torch.tensor([False, True, False])[:, None, None].expand(3, 3, 1)
    env.reset(data)
    assert env.env.stats().resets == 4


def test_infos_of_a_last_step_and_the_next_reset(parallel):
    class WithInfos(DictRules):
        def __init__(self) -> None:
            first = {"a": {"level": 7}, "b": {}}
            super().__init__(infos=lambda time: {"a": {"won": time}, "b": {"won": time}}, first=first, length=2)

    env = TorchRLEnv(parallel(WithInfos, 1))
    data = env.reset()
    assert env.infos == {0: {"a": {"level": 7}, "b": {}}}
    for _ in range(2):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
    assert env.infos == {0: {"a": {"won": 2, "reset_info": {"level": 7}}, "b": {"won": 2}}}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("start", [-3, 200])
def test_small_integer_actions_of_discrete_spaces_with_a_start(start, dtype, parallel):
    class DiscreteWithStart(StackableAgents):
        def action_space(self, agent: str) -> spaces.Space:
            return spaces.Discrete(3, start=start)

        def step(self, actions: dict) -> tuple[dict, ...]:
            self.got = [int(action) for action in actions.values()]
            return super().step(dict.fromkeys(actions, 5))

    env = TorchRLEnv(parallel(DiscreteWithStart, 2))
    data = env.reset()
    data["cow", "action"] = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    env.step(data)
    assert env.env.get_attr("got") == ([start, start + 1, start + 1], [start + 1, start, start + 1])


def test_empty_resets(parallel):
    env = TorchRLEnv(parallel(StackableAgents))
    data = env.reset()
    before = data.clone()
    data["_reset"] = torch.zeros(3, 1, dtype=torch.bool)
    assert (env.reset(data) == before).all()
    assert env.env.stats().resets == 3


def test_partial_steps(parallel):
    env, core = (parallel(Hunt) for _ in range(2))
    comparison = TorchRLComparison(TorchRLEnv(env), core)
    comparison.reset()
    comparison.step()
    data = comparison.env.rand_action(comparison.data)
    results = core.step(comparison.actions([0, 2]), env_ids=[0, 2])
    data["_step"] = torch.tensor([[True], [False], [True]])
    following = comparison.env.step(data)["next"]
    assert env.get_attr("steps_ever") == core.get_attr("steps_ever") == (2, 1, 2)
    comparison.seen = [results[0][0], comparison.seen[1], results[0][1]]
    comparison.check_observations(following)
    comparison.check_flags(following, [0, 2], results)
    assert not following["wolf_0", "reward"][1].any()
    assert not following["done"][1].any()


def test_rollouts_until_all_have_ended(parallel):
    env = TorchRLEnv(parallel(DeclaredSkirmish))
    rollout = env.rollout(40, break_when_any_done=False, break_when_all_done=True)
    done = rollout["next", "done"].squeeze(-1)
    lengths = (~done).sum(1) + 1
    assert tuple(lengths.tolist()) == env.env.get_attr("time")
    assert len({*lengths.tolist()}) > 1
    assert rollout.shape[1] == lengths.max()


def test_seeds(parallel):
    env, core = TorchRLEnv(parallel(StackableAgents)), parallel(StackableAgents)

    def seen_by_core(seed: int | None) -> np.ndarray:
        return np.stack([np.stack([*seen.values()]) for seen in core.reset(seed=seed)[0]])

    assert env.set_seed(11) != 11
    for seed in (11, None):
        assert_same(env.reset()["cow", "observation"].numpy(), seen_by_core(seed))
    assert_same(env.reset(seed=5)["cow", "observation"].numpy(), seen_by_core(5))
    assert env.set_seed(8, static_seed=True) == 8
    fresh = seen_by_core(8)
    data = env.reset(seed=5)  # the last one counts
    env.set_seed(8)
    for chosen in ([1], [0, 1, 2]):
        data["_reset"] = torch.tensor([[i in chosen] for i in range(3)])
        data = env.reset(data)
        assert_same(data["cow", "observation"][chosen[0]].numpy(), fresh[chosen[0]])
    assert_same(data["cow", "observation"][[0, 2]].numpy(), fresh[[0, 2]])
    assert not np.array_equal(data["cow", "observation"][1].numpy(), fresh[1])  # it has had its seed
    assert env.env.seed() == (8, 9, 10)


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.5, TypeError), ([1, 2], TypeError)])
def test_wrong_seeds_change_nothing(seed, error, parallel):
    env = TorchRLEnv(parallel(StackableAgents))
    with pytest.raises(error, match="seed must"):
        env.set_seed(seed)
    env.reset()


def test_options(parallel):
    env = TorchRLEnv(parallel(Hunt))
    env.reset(options={"map": 3})
    assert env.infos[0]["wolf_0"]["options"] == {"map": 3}


def test_rollout_twice(parallel):
    rollouts = []
    for _ in range(2):
        env = TorchRLEnv(parallel(StackableAgents, num_workers=1))
        torch.manual_seed(1)
        env.set_seed(4)
        rollouts.append(env.rollout(25, break_when_any_done=False))
    assert (rollouts[0] == rollouts[1]).all()
    assert rollouts[0]["next", "done"].any()


def test_device(parallel):
    """Torch's "meta" device stands for a GPU."""
    env = TorchRLEnv(parallel(Relay), device="meta")
    devices = {tensor.device.type for tensor in env._reset().values(True, True)}
    devices |= {spec.device.type for spec in env.specs.values(True, True)}
    other = TorchRLEnv(parallel(Relay))
    on_cpu = other.rand_action(other.reset())
    following = env._step(on_cpu)
    devices |= {tensor.device.type for tensor in following.values(True, True)}
    assert devices == {"meta"}
    assert following.device.type == following["mike"].device.type == "meta"
    env = env.to("cpu")
    assert env.device.type == "cpu"
    rollout = env.rollout(3)
    assert rollout.device.type == on_cpu.device.type == on_cpu["mike"].device.type == "cpu"
    assert {tensor.device.type for tensor in rollout.values(True, True)} == {"cpu"}


# -- groups ------------------------------------------------------------------------------------------------------------


def test_default_groups(parallel):
    cases = {
        Hunt: {"wolf_0": ["wolf_0", "wolf_1", "wolf_3"], "wolf_2": ["wolf_2"]},
        StackableAgents: {"cow": ["cow_0", "cow_1", "cow_2"]},
        DeclaredSkirmish: {name: [name] for name in ("tank", "scout", "medic", "sniper")},
    }
    for make, groups in cases.items():
        env = TorchRLEnv(parallel(make))
        assert env.group_map == groups
        for name, agents in groups.items():
            assert env.reset()[name].batch_size == (3, len(agents))


@pytest.mark.parametrize("task", [simple_spread_v3, simple_tag_v3])
def test_groups_equal_torchrls_own_wrapper(task, parallel):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about PettingZoo's version
        own = PettingZooWrapper(task.parallel_env())
    env = TorchRLEnv(parallel(task.parallel_env))
    assert env.group_map == own.group_map
    for key, spec in own.specs.items(True, True):
        if key[-1] != "action":
            assert env.specs[key].shape == (3, *spec.shape)
            assert env.specs[key].dtype == spec.dtype
    assert env.full_action_spec.rand().shape == (3,)
    assert {env.specs[key].dtype for key in own.specs.keys(True, True) if key[-1] == "action"} == {torch.int64}


def test_wrong_groups(parallel):
    env = parallel(Hunt)
    with pytest.raises(ValueError, match=r"'wolf_1', 'wolf_3'\] observe Box.*Discrete\(5\); \['wolf_2'\] .*Box\(-1\.0"):
        TorchRLEnv(env, MarlGroupMapType.ALL_IN_ONE_GROUP)
    with pytest.raises(ValueError, match="wolf_3 wasn't found in any group"):
        TorchRLEnv(env, {"some": ["wolf_0", "wolf_1"], "other": ["wolf_2"]})


@pytest.mark.parametrize("agent", NO_TENSORS)
def test_spaces_without_a_tensor_form(agent, parallel):
    with pytest.raises(ValueError, match=rf"'{agent}': the observation space .* cannot become tensors"):
        TorchRLEnv(parallel(one_space(agent)))


def one_space(agent: str) -> Callable[[int], EverySpace]:
    def make(seed: int) -> EverySpace:
        zoo = EverySpace(seed, "shared")
        zoo.possible_agents = [agent]
        zoo.observation_space = zoo.action_space = spaces.Dict([(agent, zoo.observation_space[agent])])  # type: ignore[index]
        return zoo

    return make


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_missing_actions(parallel):
    env = TorchRLEnv(parallel(StackableAgents))
    data = env.reset()
    with pytest.raises(
        ValueError, match=r"the group 'cow': there is no \('cow', 'action'\), only .*observation.*rand_action"
    ):
        env.step(data)
    data["cow", "action"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"agent 'cow_0': expected 3 integers, got .*float32"):
        env.step(data)
    data["cow", "action"] = torch.zeros(3, 3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected 3 integers, got shape \(3, 1\)"):
        env.step(data)


def test_missing_library():
    program = "import sys; sys.modules['torch'] = None; from marl_parallel.vector import TorchRLEnv"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 'ImportError: TorchRLEnv needs TorchRL: pip install "marl-parallel[torchrl]"' in done.stderr


def test_example():
    command = [sys.executable, "examples/torchrl_mappo.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "100 steps" in done.stdout


def test_vector_rewards_have_a_spec():
    group = {"all": ["van", "bike", "drone"]}
    env = TorchRLEnv(ParallelEnv([Couriers] * 3, False, backend="serial"), group)
    check_env_specs(env)
    assert env.reward_spec["all", "reward"].shape == (3, 3, 2)
    env.close()


def test_vector_rewards_of_a_group_must_be_alike():
    parallel = ParallelEnv([functools.partial(Couriers, one_by_one=True)], False, backend="serial")
    with pytest.raises(ValueError, match=r"the reward_space of 'bike' is .* and of 'van' it is"):
        TorchRLEnv(parallel, {"all": ["van", "bike", "drone"]})
    parallel.close()


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "setup"), [(TorchRLEnv, "serial"), (lambda env: TransformedEnv(TorchRLEnv(env)), "process")]
)
@pytest.mark.parametrize("kind", [Painting, OldPainting])
def test_frame_of_one_environment(kind, wrap, setup, parallel):
    env = wrap(parallel(kind, 3, **SETUPS[setup]))
    env.rand_step(env.reset())
    frame = env.render(mode="rgb_array")  # as BenchMARL calls it
    assert (frame.shape, frame.dtype, frame.max()) == ((4, 6, 3), np.uint8, 1)
    assert np.array_equal(env.render(), frame)
    assert [env.render("rgb_array", env_index=number).max() for number in range(3)] == [1, 11, 21]
    with pytest.raises(ValueError, match="3"):
        env.render(env_index=3)
    assert env.rollout(2).batch_size == (3, 2)  # nothing was closed


def test_keywords_of_the_simulators_own_render(parallel):
    env = TorchRLEnv(parallel(OldPainting, 2))
    env.reset()
    assert env.render(brightness=5, env_index=1).max() == 15
    assert env.render(mode=None) is None  # the simulator's default shows it on the screen


def test_without_a_frame(parallel):
    env = TorchRLEnv(parallel(OnScreen, 2))
    env.reset()
    assert env.render(mode="rgb_array") is None
    for call in ({}, {"mode": "rgb_array"}):
        env = TorchRLEnv(parallel(Nothing, 2))
        env.reset()
        with pytest.raises(ValueError, match=r'environment 0 renders nothing; .* with render_mode="rgb_array"'):
            env.render(**call)


@pytest.mark.parametrize("keywords", [{}, {"mode": "rgb_array"}, {"mode": "rgb_array", "env_index": 1}], ids=str)
@pytest.mark.parametrize("kind", [Painting, OldPainting])
def test_pixels_of_torchrls_transform(kind, keywords, parallel, tmp_path):
    """Through its checks, in a rollout over the ends of episodes, and as a video."""
    logger = CSVLogger("log", str(tmp_path), video_format="pt")
    env = TransformedEnv(TorchRLEnv(parallel(kind, 2)), PixelRenderTransform(**keywords))
    check_env_specs(env)
    env.append_transform(VideoRecorder(logger=logger, tag="frames"))
    env.rollout(7, break_when_any_done=False)
    env.transform[-1].dump()
    (video,) = tmp_path.rglob("*.pt")
    frames = torch.load(video).reshape(-1, 3, 4, 6)
    first = 10 * keywords.get("env_index", 0)
    shown = frames.amax((1, 2, 3)) - first
    assert shown.tolist()[-8:] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_refused_space_names_its_part():
    seen = spaces.Dict(image=spaces.Box(0, 1, (2,)), mission=spaces.Text(3))
    parallel = ParallelEnv([functools.partial(DictRules, seen)], False, backend="serial")
    with pytest.raises(ValueError, match=r"'a': the observation space Dict.* cannot become .* \['mission'\], Text"):
        TorchRLEnv(parallel)
    parallel.close()


class OneEnds:
    """Agent a ends in the first step, b goes on."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0, 9, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return dict.fromkeys("ab", np.zeros(1, np.float32)), {}

    def step(self, actions: Any) -> Any:
        no = {"a": False, "b": False, "__all__": False}
        return dict.fromkeys("ab", np.ones(1, np.float32)), dict.fromkeys("ab", 1.0), no, {**no, "a": True}, {}


def test_ends_of_environments_that_are_not_reset_are_saved():
    env = TorchRLEnv(ParallelEnv([OneEnds] * 2, False, backend="serial"), group_map={"both": ["a", "b"]})
    stepped = env.step(env.rand_action(env.reset()))["next"]
    assert stepped["both", "done"].flatten().tolist() == [True, False, True, False]
    env.reset(stepped.clone().set("_reset", torch.tensor([[False], [True]])))
    assert env.load_state(env.save_state())["both", "done"].flatten().tolist() == [True, False, False, False]
    env.close()
