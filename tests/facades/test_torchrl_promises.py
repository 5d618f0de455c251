"""`TorchRLEnv` in the table of promises: one group of agents, as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.promises.driver import DISABLED, Driver, Read, by_agent, observations, of_all, plain, stacked
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import ENVS, Promises
from tensordict import TensorDict

from marl_parallel import ParallelEnv
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")


class TorchRLDriver(Driver):
    modes = (DISABLED,)
    masked_games = ("masks", "masks_of_the_dead")
    """Masks in infos need `info_masks=True`: `test_torchrl_masks`."""
    sends = waits = forwards = takes_options = False
    """An `EnvBase` has `step` and `reset` of tensordicts, `set_seed`, and simulators' attributes as its own."""
    copies = True
    loads_some = False
    """TorchRL's loops go on from one tensordict of all environments."""

    shows_vectors = True

    def make(self, env: ParallelEnv) -> TorchRLEnv:
        return TorchRLEnv(env)

    def reset(self, facade: TorchRLEnv, env_ids: list[int] | None = None) -> Any:
        if env_ids is None:
            return facade.reset()
        mask = torch.tensor([[env_id in env_ids] for env_id in range(ENVS)])
        return facade.reset(TensorDict({"_reset": mask}, [ENVS]))

    def load(self, facade: TorchRLEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        return facade.load_state(states)

    def actions(self, facade: TorchRLEnv, actions: list[ByAgent]) -> Any:
        return stacked(actions)

    def tensors(self, actions: Any) -> TensorDict:
        return TensorDict({("agent", "action"): torch.from_numpy(actions)}, [len(actions)])

    def step_with(self, facade: TorchRLEnv, actions: Any) -> Any:
        return facade.step(self.tensors(actions))["next"]

    def wrong_actions(self, facade: TorchRLEnv) -> list[Any]:
        return [np.zeros((3, 2), np.int64), np.full((3, 3), 0.5)]

    def close(self, facade: TorchRLEnv) -> None:
        facade.close()
        assert facade.is_closed

    def parts(self, results: Any) -> Iterator[np.ndarray]:
        for value in results.values(True, True):
            yield value.numpy()

    def masks(self, facade: TorchRLEnv, results: Any, env_id: int) -> ByAgent:
        return dict(zip(AGENTS, results["agent", "action_mask"][env_id].tolist()))

    def read(self, facade: TorchRLEnv, results: Any, env_id: int) -> Read:
        group = {key: value.numpy() for key, value in results["agent"].items(True) if isinstance(value, torch.Tensor)}
        shown = {
            "observations": by_agent(group[("observation", "observation")] if ("observation", "observation") in group
                                     else group["observation"], env_id),
            "acting": by_agent(group["mask"], env_id),
            "present": by_agent(group["present"], env_id),
        }  # fmt: skip
        shown["restarted"] = bool(results.get("restarted", torch.zeros(ENVS))[env_id])
        if "reward" not in group:
            return shown
        rewards = group["reward"]
        return {
            **shown,
            "rewards": by_agent(rewards[..., 0] if rewards.shape[-1] == 1 else rewards, env_id),
            "terminations": by_agent(group["terminated"][..., 0], env_id),
            "truncations": by_agent(group["truncated"][..., 0], env_id),
            "dones": by_agent(group["done"][..., 0], env_id),
            "over": (bool(results["terminated"][env_id]), bool(results["truncated"][env_id])),
            "infos": {key: info for key, info in plain(facade.infos.get(env_id, {})).items() if info},
        }

    def expected(self, moment: Moment) -> Read:
        """Flags of dead agents are the environment's; each life has its own once."""
        seen = observations(moment.observed, moment)
        rewards = dict.fromkeys(moment.observed, 0.0) if moment.kind == "reset" else moment.rewards
        return {
            "observations": {
                a: value["observation"] if isinstance(value, dict) else value for a, value in seen.items()
            },
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "present": {agent: agent in moment.observed or agent in rewards for agent in AGENTS},
            "restarted": moment.restarted,
            "rewards": of_all(moment.rewards, 0.0),
            "terminations": {agent: moment.of_life(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.of_life(agent)[1] for agent in AGENTS},
            "dones": {agent: any(moment.of_life(agent)) for agent in AGENTS},
            "over": moment.over,
            "infos": moment.infos,
        }


class AsyncTorchRLDriver(TorchRLDriver):
    """Steps and resets by `async_..._send` and `async_..._recv`."""

    resets_some_first = True
    saves = False  # the row above has it

    def reset(self, facade: TorchRLEnv, env_ids: list[int] | None = None) -> Any:
        ids = [*range(ENVS)] if env_ids is None else env_ids
        facade.async_reset_send(env_index=ids)
        return self.of_all(facade.async_reset_recv(env_index=ids))

    def step_with(self, facade: TorchRLEnv, actions: Any) -> Any:
        facade.async_step_send(self.tensors(actions), env_index=[*range(ENVS)])
        parts = [facade.async_step_recv(1, max_get=1) for _ in range(ENVS)]
        return self.of_all(torch.cat(parts))["next"]

    steps_some = True

    def step_some(self, facade: TorchRLEnv, actions: dict[int, ByAgent]) -> tuple[Any, list[int]]:
        facade.async_step_send(self.tensors(stacked([*actions.values()])), env_index=[*actions])
        results = facade.async_step_recv(1, max_get=1)
        return self.of_all(results)["next"], results["env_index"].tolist()

    def expected(self, moment: Moment) -> Read:
        """An exception: infos of a step stay in `infos` until a later step or reset has some."""
        last: Moment | None = moment
        while last is not None and not last.infos:
            last = last.before
        return {**super().expected(moment), "infos": {} if last is None else last.infos}

    def of_all(self, results: Any) -> Any:
        """Rows by environment; those that are missing repeat another."""
        places = results["env_index"].tolist()
        return torch.stack([results[places.index(env_id) if env_id in places else 0] for env_id in range(ENVS)])


class TestTorchRLEnv(Promises):
    driver = TorchRLDriver()


class TestAsyncTorchRLEnv(Promises):
    driver = AsyncTorchRLDriver()
