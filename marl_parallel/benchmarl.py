"""`BenchMARLTask`: a task of BenchMARL for any environment that `make` takes, and tasks from yaml files.

BenchMARL steps a `TorchRLEnv` like a simulator with a batch of its own. The task says which of its values BenchMARL's
algorithms read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from gymnasium import spaces

from marl_parallel.arguments import checked_integer
from marl_parallel.making import POOLS, find_constructor, make
from marl_parallel.types import RecyclePolicy, RestartPolicy, how_to_install
from marl_parallel.vector.drop_in import facade_of

try:
    from benchmarl.environments import task_config_registry
    from benchmarl.environments.common import Task, TaskClass
    from omegaconf import OmegaConf
    from tensordict import TensorDictBase
    from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
    from torchrl.envs import ActionMask, DTypeCastTransform, EnvBase, Transform

    from marl_parallel.vector.torchrl import TorchRLEnv
except ImportError as error:
    raise ImportError(
        f"marl_parallel.benchmarl needs BenchMARL: {how_to_install('benchmarl')} ({error})", name=error.name
    ) from error

__doctest_requires__ = ["benchmarl"]

ENV_NAME = "marl_parallel"
_POLICIES = {"restart_policy": RestartPolicy, "recycle": RecyclePolicy}
_SET_BY_BENCHMARL = ("num_envs", "facade", "seed", "auto_reset")


class BenchMARLTask(TaskClass):
    """A task of BenchMARL: environments in worker processes, with turns and agents that die.

    BenchMARL's evaluation plays its `evaluation_episodes` as one batch. Its environments and workers are separate and
    stay open during the whole training.

    Groups of agents, masks and the global state are those of `TorchRLEnv`. The state is used if the simulator has one
    whose space is a `Box`, unless `facade_kwargs` has `return_state: false`. Observations and states become float32,
    except images: `uint8` arrays of three dimensions, as BenchMARL's `Cnn` takes them.

    BenchMARL trains on all rows. Rows of agents that do not act, since they are dead, absent or wait for their turn,
    get the advantage 0 in PPO's batches. Ignored actions then do not change the policy, except through the entropy if
    `entropy_coef` is above 0. Rows without an observation get their own value as the critic's target, also if the agent
    is alive. So does the row with the last observation of an agent that has died. Algorithms without advantages, such
    as QMIX, learn from these rows: zeros as observation and reward for agents that are absent.

    Random actions, such as those of `off_policy_init_random_frames`, are legal in groups with action masks.

    Args:
        name: The name of the task in BenchMARL's logs and reports.
        config: The keywords of `marl_parallel.make`, such as `name`, `env_kwargs`, `facade_kwargs`, `num_workers` and
            `on_error`, besides `num_envs`, `facade`, `seed` and `auto_reset`, which BenchMARL's configuration replaces.
            All values may be written in yaml: `restart_policy` and `recycle` may be dicts of their arguments, and
            `wrappers` names, such as `"marl_parallel.wrappers:pad_spaces"`. Further keys:

            - `max_steps`: The number of steps of an evaluation, at least 1. Longer episodes are cut there.
            - `discrete_actions`, `continuous_actions`: Whether the simulator has such actions, or the keywords in
              `env_kwargs` that choose them, if it has both. With none of the two keys, actions are discrete.

    Raises:
        TypeError, ValueError: A key is missing, or not for the task to decide; or a value is wrong.

    Example:
        >>> task = BenchMARLTask("spread", {"name": "mpe2.simple_spread_v3", "max_steps": 25, "num_workers": 2})
        >>> env = task.get_env_fun(num_envs=4, continuous_actions=False, seed=0, device="cpu")()
        >>> env.batch_size, task.group_map(env), task.state_spec(env)["state"].shape
        (torch.Size([4]), {'agent': ['agent_0', 'agent_1', 'agent_2']}, torch.Size([54]))
        >>> env.close()
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        super().__init__(name, dict(config))
        for key in ("name", "max_steps"):
            if key not in self.config:
                raise ValueError(f"the task {name!r} has no {key!r}; its keys are {[*self.config]}")
        for key in ("name", "env_kwargs"):
            if isinstance(self.config.get(key), list | tuple):
                raise TypeError(f"the task {name!r} has a list as {key!r}: its environments must all be the same")
        set_twice = [repr(key) for key in _SET_BY_BENCHMARL if key in self.config]
        if "device" in (self.config.get("facade_kwargs") or {}):
            set_twice.append("'device' in facade_kwargs")
        if set_twice:
            raise TypeError(
                f"the task {name!r} has a key {' and a key '.join(set_twice)}, but BenchMARL sets it: change "
                "BenchMARL's configuration of the experiment instead"
            )
        checked_integer(self.config["max_steps"], f"max_steps of the task {name!r}")
        for key in _ACTIONS:
            value = self.config.get(key, False)
            if not isinstance(value, bool | Mapping):
                raise TypeError(
                    f"{key} of the task {name!r} must be true, false, or a dict of keywords for env_kwargs, "
                    f"got {value!r}"
                )

    @classmethod
    def from_yaml(cls, path: str | Path) -> BenchMARLTask:
        """The task that a yaml file configures, with the name of the file.

        Args:
            path: The file. Its keys are those of `config`.

        Raises:
            FileNotFoundError: There is no such file.
            TypeError, ValueError: As in the constructor.
        """
        return cls(Path(path).stem, _read(path))

    # -- called by BenchMARL ---------------------------------------------------------------------------------------

    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any
    ) -> Callable[[], EnvBase]:
        """A function that makes the environments; see `TaskClass`."""
        config = {key: value for key, value in self.config.items() if key not in ("max_steps", *_ACTIONS)}
        chosen = self._actions["continuous_actions" if continuous_actions else "discrete_actions"]
        if isinstance(chosen, Mapping):
            config["env_kwargs"] = {**(config.get("env_kwargs") or {}), **chosen}
        for key, policy in _POLICIES.items():
            if isinstance(config.get(key), Mapping):
                config[key] = policy(**config[key])
        if wrappers := config.pop("wrappers", None):
            config["wrappers"] = [find_constructor(wrapper) for wrapper in wrappers]
        return partial(_open, self.name, num_envs, continuous_actions, config, seed, device)

    def supports_continuous_actions(self) -> bool:
        return self._actions["continuous_actions"] is not False

    def supports_discrete_actions(self) -> bool:
        return self._actions["discrete_actions"] is not False

    def max_steps(self, env: EnvBase) -> int:
        return int(self.config["max_steps"])

    def has_render(self, env: EnvBase) -> bool:
        """Whether simulators were constructed with `render_mode="rgb_array"`."""
        return bool(env.parallel_env.render_mode == "rgb_array")

    def group_map(self, env: EnvBase) -> dict[str, list[str]]:
        return dict(env.group_map)

    def observation_spec(self, env: EnvBase) -> Composite:
        return _part(env, "observation")

    def action_spec(self, env: EnvBase) -> Composite:
        return env.full_action_spec_unbatched

    def state_spec(self, env: EnvBase) -> Composite | None:
        spec = env.full_observation_spec_unbatched
        return Composite(state=spec["state"].clone()) if "state" in spec.keys() else None  # noqa: SIM118

    def action_mask_spec(self, env: EnvBase) -> Composite | None:
        """The masks of groups with discrete actions; None if they have none."""
        masked = _groups_with_masks(env)
        unmasked = [
            group for group in env.group_map if group not in masked and _kind_of_actions(env, group) == "discrete"
        ]
        if masked and unmasked:
            raise ValueError(
                f"groups {masked} have action masks, but groups {unmasked} have none, and BenchMARL's algorithms read "
                "masks of all groups or of none: pass facade_kwargs={'info_masks': True}, so that all groups have masks"
            )
        return _part(env, "action_mask", masked) if masked else None

    def info_spec(self, env: EnvBase) -> None:
        return None

    @staticmethod
    def env_name() -> str:
        return ENV_NAME

    @staticmethod
    def log_info(batch: TensorDictBase) -> dict[str, float]:
        """With `on_error="restart"`, the number of restarted environments in the batch."""
        restarted = batch.get(("next", "restarted"), None)
        return {} if restarted is None else {"collection/restarts": float(restarted.sum())}

    def get_env_transforms(self, env: EnvBase) -> list[Transform]:
        """Casts to float32, the dtype of BenchMARL's networks; and masks for random actions."""
        keys = defaultdict(list)
        spec = env.full_observation_spec_unbatched
        for key, leaf in spec.items(True, True):
            path = key if isinstance(key, tuple) else (key,)
            is_read = path[0] == "state" or path[1:2] == ("observation",)
            num_dims = len(leaf.shape) - (path[0] != "state")
            is_image = leaf.dtype is torch.uint8 and num_dims == 3
            if is_read and not is_image and leaf.dtype is not torch.float32:
                keys[leaf.dtype].append(key)
        casts = [DTypeCastTransform(dtype, torch.float32, in_keys=of_dtype) for dtype, of_dtype in keys.items()]
        # BenchMARL's `TransformedEnv` has a clone of the action spec, which the masks of `TorchRLEnv` do not reach.
        return [*casts, *(ActionMask((group, "action"), (group, "action_mask")) for group in _groups_with_masks(env))]

    def get_replay_buffer_transforms(self, env: EnvBase, group: str) -> list[Transform]:
        """Advantages of 0 for rows of agents that do not act; see the class."""
        return [_OnlyActingRows(group)]

    @property
    def _actions(self) -> dict[str, Any]:
        if not any(key in self.config for key in _ACTIONS):
            return {"discrete_actions": True, "continuous_actions": False}
        return {key: self.config.get(key, False) for key in _ACTIONS}


_ACTIONS = ("discrete_actions", "continuous_actions")


class _YamlTask(Task):
    """The base of the enums of `benchmarl_tasks`."""

    path: Path

    @staticmethod
    def associated_class() -> type[BenchMARLTask]:
        return BenchMARLTask

    def get_from_yaml(self, path: str | None = None) -> BenchMARLTask:
        return self.associated_class()(self.name, _read(path or self.path))


def benchmarl_tasks(folder: str | Path) -> type[Task]:
    """Make a `Task` enum of BenchMARL from yaml files, and register it with BenchMARL.

    Args:
        folder: Each of its yaml files is a task: `spread.yaml` becomes the member `SPREAD`. The file's keys are those
            of `BenchMARLTask`'s `config`. For BenchMARL's command line, the folder is `task/marl_parallel` below
            the folder of `--config-dir`, and a task is named `task=marl_parallel/spread`.

    Returns:
        The enum. `SPREAD.get_task()` reads the file; `SPREAD.get_task(config={...})` does not.

    Raises:
        FileNotFoundError: The folder has no yaml files.
        ValueError: The name of a file has capital letters, which BenchMARL would not find.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "spread.yaml").write_text("{name: mpe2.simple_spread_v3, max_steps: 25}")
        ...     benchmarl_tasks(folder).SPREAD.get_task()
        BenchMARLTask.SPREAD: (config={'name': 'mpe2.simple_spread_v3', 'max_steps': 25})
    """
    paths = sorted(Path(folder).resolve().glob("*.yaml"))
    if not paths:
        raise FileNotFoundError(f"the folder {folder} has no yaml files: write one for each task")
    if wrong := [path.name for path in paths if path.stem != path.stem.lower()]:
        raise ValueError(f"BenchMARL looks for files in lower case: rename {', '.join(wrong)}")
    tasks: Any = _YamlTask("MarlParallelTask", [path.stem.upper() for path in paths])  # type: ignore[call-arg, arg-type, unused-ignore]
    for task, path in zip(tasks, paths):
        task.path = path
        task_config_registry[f"{ENV_NAME}/{path.stem}"] = task
    return tasks  # type: ignore[no-any-return]


def _read(path: str | Path) -> dict[str, Any]:
    config: Any = OmegaConf.to_object(OmegaConf.load(path))
    if not isinstance(config, dict):
        raise TypeError(f"{path} must have the keys of a task, got {config!r}")
    config.pop("defaults", None)  # Hydra's
    return config


def _open(
    task: str, num_envs: int, continuous: bool, config: Mapping[str, Any], seed: int | None, device: Any
) -> TorchRLEnv:
    """The environments of a task."""
    arguments = {key: value for key, value in config.items() if key not in ("name", "facade_kwargs")}
    name = config["name"]
    if not (isinstance(name, str) and name.partition(":")[0] in POOLS):
        arguments["auto_reset"] = False
    if seed is not None:
        arguments["seed"] = seed

    def build(env: Any) -> TorchRLEnv:
        has_state = isinstance(env.state_space, spaces.Box)
        facade = TorchRLEnv(env, **{"return_state": has_state, **(config.get("facade_kwargs") or {}), "device": device})
        actual = {_kind_of_actions(facade, group) for group in facade.group_map}
        declared, other = ("continuous", "discrete") if continuous else ("discrete", "continuous")
        if declared not in actual:
            raise ValueError(
                f"the task {task!r} declares {declared} actions, but its actions are {other}: set "
                f"{other}_actions: true and {declared}_actions: false in its configuration"
            )
        return facade

    return facade_of(make(name, num_envs, **arguments), build)


def _kind_of_actions(env: EnvBase, group: str) -> Literal["discrete", "continuous"]:
    """Which of BenchMARL's policies the group gets; raises `ValueError` if none fits."""
    actions, rewards = env.full_action_spec_unbatched[group, "action"], env.full_reward_spec_unbatched[group, "reward"]
    if rewards.shape[-1] != 1:
        raise ValueError(f"the agents of the group {group!r} get {rewards.shape[-1]} rewards each; BenchMARL takes one")
    if type(actions) in (Categorical, OneHot):  # `MultiCategorical` and `Binary` are subclasses
        return "discrete"
    if isinstance(actions, Bounded | Unbounded) and actions.dtype.is_floating_point:
        return "continuous"
    raise ValueError(
        f"BenchMARL has policies for Discrete and Box actions only, but the group {group!r} has the actions {actions}"
    )


def _groups_with_masks(env: EnvBase) -> list[str]:
    spec = env.full_observation_spec_unbatched
    return [group for group in env.group_map if "action_mask" in spec[group].keys()]  # noqa: SIM118


def _part(env: EnvBase, key: str, groups: Any = None) -> Composite:
    """The spec of one value of each group."""
    spec = env.full_observation_spec_unbatched
    return Composite(
        {
            group: Composite({key: spec[group, key].clone()}, shape=spec[group].shape)
            for group in groups or env.group_map
        }
    )


class _OnlyActingRows(Transform):
    """Advantages of 0 for ignored actions; the critic's own value as its target for rows without data."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        group = tensordict.get(self.group)
        if group.get("advantage", None) is not None:
            acts, present = group.get("mask"), group.get("present")
            # After its end, an agent is present once more, with its last observation; after the next step, it is not.
            # An agent that acts may have no next observation: in turn-based games, or if it dies without a last one.
            is_there = present & (acts | tensordict.get(("next", self.group, "present")))
            group.set("advantage", group.get("advantage") * acts.unsqueeze(-1))
            targets, values = group.get("value_target"), group.get("state_value")
            group.set("value_target", torch.where(is_there.unsqueeze(-1), targets, values))
        return tensordict
