"""Collectors of rollouts: this package's and those of other libraries. `collect_rollouts.py` measures them.

With each call, a collector steps all environments `Rollouts.num_steps` times with the policy of
`examples/ippo_simple_spread.py`, and stores observations, actions, rewards, flags, log-probabilities and values.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from contest import Case, Contender
from facades import parallel_env
from peers import PUFFERLIB_POLLS_S, pufferlib_envs, torchrl_envs
from plain_loops import SEED, Loops

from marl_parallel import Current, Rollout
from marl_parallel.vector import GymnasiumVectorEnv, StackedVecEnv

EXAMPLES = Path(__file__).parents[1] / "examples"
OBSERVATION_SIZE, NUM_ACTIONS, HIDDEN = 18, 5, 128


@dataclass(frozen=True)
class Rollouts(Case):
    """A case whose environments are stepped `num_steps` times with each call."""

    num_steps: int = field(kw_only=True)


class Batch(NamedTuple):
    """A rollout of all environments: NumPy arrays or tensors whose first axes are the same, in any layout."""

    observations: Any
    actions: Any
    rewards: Any
    terminations: Any
    truncations: Any
    log_probs: Any
    values: Any


Collect = Callable[[], Batch]


class Policy:
    """Draws actions; returns them with their log-probabilities and the values of the observations."""

    cpu_s = 0.0
    """CPU seconds of all calls."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def __call__(self, observations: Any) -> tuple[Any, Any, Any]:
        began = time.process_time()
        chosen = self.agent.policy(observations)
        actions = chosen.sample()
        result = actions, chosen.log_prob(actions), self.agent.value(observations)
        Policy.cpu_s += time.process_time() - began
        return result


@functools.cache
def policy() -> Policy:
    """The policy of all collectors."""
    import torch

    sys.path.append(str(EXAMPLES))
    from ippo_simple_spread import Agent

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return Policy(Agent(OBSERVATION_SIZE, NUM_ACTIONS, HIDDEN).requires_grad_(False))


def check(case: Rollouts, batch: Batch) -> None:
    """Check that a first rollout has all values of all steps, and that actions are those for its observations."""
    import torch

    rows = case.num_envs * len(case.agents)
    observations, *others = (torch.as_tensor(array) for array in batch)
    observations, others = observations.reshape(-1, OBSERVATION_SIZE), [each.flatten() for each in others]
    sizes = {len(each) for each in (observations, *others)}
    assert sizes == {case.num_steps * rows}, f"expected {case.num_steps * rows} values of each kind, got {sizes}"
    actions, rewards, terminations, truncations, log_probs, values = others
    agent = policy().agent
    torch.testing.assert_close(agent.policy(observations).log_prob(actions), log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(agent.value(observations), values, rtol=1e-4, atol=1e-5)
    assert len(observations.unique(dim=0)) > 0.9 * len(observations), "observations are stored more than once"
    assert rewards.mean() < -0.1, "rewards are missing"  # they are negative distances
    ends = (terminations.bool() | truncations.bool()).sum() / rows
    least, most = case.num_steps // (case.episode_steps + 1), math.ceil(case.num_steps / case.episode_steps)
    assert least <= ends <= most, f"expected {least} to {most} ends of episodes, got {ends}"


# -- this package ------------------------------------------------------------------------------------------------------


@contextmanager
def rollout(case: Rollouts, **options: Any) -> Iterator[Collect]:
    act = policy()
    import torch

    def choose(current: Current) -> tuple[Any, dict[str, Any]]:
        actions, log_probs, values = act(torch.from_numpy(current.observations))
        return actions.numpy(), {"log_probs": log_probs.numpy(), "values": values.numpy()}

    with StackedVecEnv(parallel_env(case)) as env:
        collector = Rollout(env, case.num_steps, extras={"log_probs": (), "values": ()}, **options)

        def collect() -> Batch:
            data = collector.collect(choose)
            flags = data.terminations, data.truncations
            return Batch(data.observations[:-1], data.actions, data.rewards, *flags, **data.extras)

        yield collect


@contextmanager
def glue(case: Rollouts) -> Iterator[Collect]:
    """The loop that the example had before there was `Rollout`."""
    act = policy()
    import torch

    with parallel_env(case) as parallel:
        env = GymnasiumVectorEnv(parallel)
        latest, _ = env.reset()
        running = np.zeros(env.num_envs)
        shape = case.num_steps, env.num_envs
        seen, following = torch.zeros(2, *shape, OBSERVATION_SIZE)
        actions, (rewards, log_probs, values) = torch.zeros(shape, dtype=torch.int64), torch.zeros(3, *shape)
        terminated, truncated = torch.zeros(2, *shape, dtype=torch.bool)

        def collect() -> Batch:
            nonlocal latest
            finished = []
            for step in range(case.num_steps):
                seen[step] = torch.as_tensor(latest)
                actions[step], log_probs[step], values[step] = chosen = act(seen[step])
                latest, reward, terminations, truncations, infos = env.step(chosen[0].numpy())
                after, over = latest, terminations | truncations
                if over.any():
                    after = after.copy()
                    after[over] = np.stack(infos["final_obs"][over])
                following[step], rewards[step] = torch.as_tensor(after), torch.as_tensor(reward)
                terminated[step], truncated[step] = map(torch.as_tensor, (terminations, truncations))
                running[:] += reward
                finished += running[over].tolist()
                running[over] = 0.0
            return Batch(seen, actions, rewards, terminated, truncated, log_probs, values)

        yield collect


@contextmanager
def facade_torchrl(case: Rollouts) -> Iterator[Collect]:
    from marl_parallel.vector import TorchRLEnv

    with parallel_env(case, auto_reset=False) as parallel:
        yield from torchrl_collector(case, TorchRLEnv(parallel))


# -- other libraries ---------------------------------------------------------------------------------------------------


@contextmanager
def torchrl(case: Rollouts) -> Iterator[Collect]:
    from torchrl.envs import ParallelEnv

    policy()  # if it raises, then before there are workers, which would keep the script from exiting
    make = functools.partial(torchrl_envs, case.constructor, case.num_envs // case.workers)
    env = ParallelEnv(case.workers, make)
    env.set_seed(SEED)
    yield from torchrl_collector(case, env)


def torchrl_collector(case: Rollouts, env: Any) -> Iterator[Collect]:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector

    outputs = [("agent", name) for name in ("action", "log_probs", "values")]
    module = TensorDictModule(policy(), in_keys=[("agent", "observation")], out_keys=outputs)
    frames = case.num_steps * case.num_envs
    settings = {"track_traj_ids": False, "return_same_td": True, "auto_register_policy_transforms": False}
    collector = Collector(env, module, frames_per_batch=frames, total_frames=-1, **settings)
    batches = iter(collector)

    def collect() -> Batch:
        data = next(batches)
        now, after = data["agent"], data["next", "agent"]
        flags = after["terminated"], after["truncated"]
        return Batch(now["observation"], now["action"], after["reward"], *flags, now["log_probs"], now["values"])

    try:
        yield collect
    finally:
        collector.shutdown()


@contextmanager
def pufferlib(case: Rollouts, batches: int) -> Iterator[Collect]:
    """The loop of its trainer: what `recv` returned is stored and acted on; each batch has a share of the workers."""
    act = policy()
    import torch

    shape = case.num_steps, case.num_envs * len(case.agents)
    seen, actions = torch.zeros(*shape, OBSERVATION_SIZE), torch.zeros(shape, dtype=torch.int64)
    rewards, log_probs, values = torch.zeros(3, *shape)
    terminated, truncated = torch.zeros(2, *shape, dtype=torch.bool)
    with pufferlib_envs(case, batch_size=case.num_envs // batches) as env:
        env.async_reset(SEED)

        def collect() -> Batch:
            for number in range(case.num_steps * batches):
                observations, reward, terminations, truncations, _, _, rows, _ = env.recv()
                at = number // batches, slice(rows[0], rows[-1] + 1)
                seen[at] = torch.as_tensor(observations)
                rewards[at] = torch.as_tensor(reward)
                terminated[at], truncated[at] = map(torch.as_tensor, (terminations, truncations))
                actions[at], log_probs[at], values[at] = chosen = act(seen[at])
                env.send(chosen[0].numpy())
            return Batch(seen, actions, rewards, terminated, truncated, log_probs, values)

        yield collect


# -- limits ------------------------------------------------------------------------------------------------------------


@contextmanager
def loops(case: Rollouts) -> Iterator[Callable[[], object]]:
    with closing(Loops(case.constructor, case.num_envs, case.workers, barrier=False)) as env:
        yield functools.partial(env.step, case.num_steps)


@contextmanager
def policy_alone(case: Rollouts) -> Iterator[Callable[[], object]]:
    act = policy()
    import torch

    observations = torch.randn(case.num_envs, len(case.agents), OBSERVATION_SIZE)
    yield lambda: [act(observations) for _ in range(case.num_steps)]


GLUE = Contender("GymnasiumVectorEnv and a loop of your own", glue, ours=True)
ROLLOUT = Contender("Rollout", rollout, ours=True)
CONTENDERS = [
    Contender("plain loops side by side", loops, "{workers} processes, without a policy; actions drawn beforehand"),
    Contender("the policy alone", policy_alone, "without environments"),
    Contender(
        "PufferLib Multiprocessing, one batch",
        functools.partial(pufferlib, batches=1),
        "`PettingZooPufferEnv` of its `MeanOverAgents`, `num_workers={workers}`, and the loop of its trainer; "
        "PufferLib 3 from the distribution `pufferlib-core`",
        next_step=True,
        polls_s=PUFFERLIB_POLLS_S,
    ),
    Contender(
        "PufferLib Multiprocessing, two batches",
        functools.partial(pufferlib, batches=2),
        "the same, with `batch_size` half of the environments: one half simulates while the policy acts for the other",
        next_step=True,
        polls_s=PUFFERLIB_POLLS_S,
    ),
    Contender(
        "TorchRL Collector",
        torchrl,
        "over `ParallelEnv` of {workers} `SerialEnv`s of `PettingZooWrapper`s; `track_traj_ids=False`, "
        "`return_same_td=True`",
    ),
    Contender(
        "TorchRL Collector over TorchRLEnv", facade_torchrl, "over this package's facade, same settings", ours=True
    ),
    GLUE,
    ROLLOUT,
    Contender("Rollout, halves=2", functools.partial(rollout, halves=2), ours=True),
]
"""In the order in which they start: those that fork come first, and hold nothing of the others."""
