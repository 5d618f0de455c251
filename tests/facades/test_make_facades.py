"""`make(..., facade=...)`: a few steps of every facade whose library is installed equal the core's dicts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from helpers import ROOT
from mpe2 import simple_spread_v3

from marl_parallel import make, vector
from marl_parallel.types import FacadeName

ENVS, AGENTS = 2, ["agent_0", "agent_1", "agent_2"]
CLASSES = {
    "agilerl": "AgileRLVecEnv",
    "gymnasium": "GymnasiumVectorEnv",
    "pettingzoo": "PettingZooVecEnv",
    "rllib": "RLlibVectorMultiAgentEnv",
    "sb3": "SB3VecEnv",
    "share": "ShareVecEnv",
    "skrl": "SkrlEnv",
    "stacked": "StackedVecEnv",
    "torchrl": "TorchRLEnv",
    "tuple": "TupleVecEnv",
}
# Others have tests of `make` of their own: PyMARL's simulators are of one kind, and Tianshou's agents act as one.


def of_agents(values: dict[str, Any]) -> np.ndarray:
    return np.stack([values[agent] for agent in AGENTS], 1)


def of_dicts(values: Any) -> np.ndarray:
    return np.array([[own[agent] for agent in AGENTS] for own in values])


def of_rows(values: Any) -> np.ndarray:
    return np.asarray(values).reshape(ENVS, len(AGENTS), *values.shape[1:])


def in_tensors(actions: np.ndarray) -> dict[str, Any]:
    import torch

    return {agent: torch.from_numpy(row[:, None]) for agent, row in zip(AGENTS, actions.T)}


def of_tensors(values: dict[str, Any]) -> np.ndarray:
    """Observations `(num_envs, agents, size)`, or rewards `(num_envs, agents)`."""
    array = of_agents({agent: value.numpy() for agent, value in values.items()})
    return array[..., 0] if array.shape[-1] == 1 else array


def in_dicts(actions: np.ndarray) -> list[dict[str, int]]:
    return [dict(zip(AGENTS, row)) for row in actions.tolist()]


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gymnasium": (np.ravel, of_rows),
    "sb3": (np.ravel, of_rows),
    "rllib": (in_dicts, of_dicts),
    "share": (lambda actions: actions[..., None], lambda values: np.reshape(values, (ENVS, len(AGENTS), -1)).squeeze()),
    "skrl": (in_tensors, of_tensors),
    "stacked": (np.asarray, np.asarray),
    "tuple": (np.transpose, lambda values: np.stack(values, 1) if isinstance(values, tuple) else values),
    **dict.fromkeys(["agilerl", "pettingzoo"], (lambda actions: dict(zip(AGENTS, actions.T)), of_agents)),
}
"""How a facade takes actions `(num_envs, agents)`, and how to read its values in that form."""


def stepped(facade: str, env: Any, steps: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Observations and rewards `(num_envs, agents, ...)` of a reset and of each step."""
    if facade == "torchrl":
        import torch

        data = env.reset()
        results = [(data["agent", "observation"].numpy(), None)]
        for actions in steps:
            data["agent", "action"] = torch.from_numpy(actions)
            data = env.step(data)["next"]
            results.append((data["agent", "observation"].numpy(), data["agent", "reward"].numpy()[..., 0]))
        return results
    given, read = FORMS[facade]
    first = env.reset()
    results = [(read(first if facade == "sb3" else first[0]), None)]
    for actions in steps:
        observations, *others = env.step(given(actions))
        rewards = others[facade == "share"]  # after the share observations
        results.append((read(observations), read(rewards)))
    return results


def test_all_facades_have_tests():
    assert {*get_args(FacadeName)} - {*CLASSES} == {"pymarl", "tianshou"}


@pytest.mark.parametrize("facade", [name for name in CLASSES if CLASSES[name] in vector.__all__])
@pytest.mark.parametrize("how", [{"backend": "serial"}, {"num_workers": 2}], ids=["serial", "process"])
def test_steps_equal_the_dicts(facade, how):
    rng = np.random.default_rng(1)
    steps = [rng.integers(5, size=(ENVS, len(AGENTS))) for _ in range(6)]
    with make(simple_spread_v3.parallel_env, ENVS, backend="serial", seed=6) as core:
        expected = [(of_dicts(core.reset()[0]), None)]
        expected += [tuple(map(of_dicts, core.step(in_dicts(actions))[:2])) for actions in steps]
    env = make(simple_spread_v3.parallel_env, ENVS, facade=facade, seed=6, **how)
    assert type(env) is getattr(vector, CLASSES[facade])
    results = stepped(facade, env, steps)
    env.close()
    for (observations, rewards), (seen, paid) in zip(results, expected, strict=True):
        assert observations.shape == (ENVS, len(AGENTS), 18)
        assert np.array_equal(observations, seen)
        assert rewards is paid is None or np.allclose(rewards, paid)


KEYWORDS: dict[str, dict[str, Any]] = {
    "gymnasium": {"agents": AGENTS},
    "skrl": {"with_state": False},
    "stacked": {"with_state": False},
    "torchrl": {"return_state": False},
    "tuple": {"flags_by_agent": True},
}


@pytest.mark.parametrize("facade", [name for name in KEYWORDS if CLASSES[name] in vector.__all__])
def test_keywords_of_the_facade(facade):
    """Also where the signature of the class is that of its metaclass."""
    build = {"num_envs": ENVS, "facade": facade, "backend": "serial"}
    make(simple_spread_v3.parallel_env, facade_kwargs=KEYWORDS[facade], **build).close()
    (own,) = KEYWORDS[facade]
    with pytest.raises(TypeError, match=f"{CLASSES[facade]} takes no argument 'colour'; .*{own}"):
        make(simple_spread_v3.parallel_env, facade_kwargs={"colour": 1}, **build)


@pytest.mark.parametrize("facade", ["gymnasium", "pettingzoo", "share", "stacked", "tuple"])
def test_the_page_names_the_facades_without_masks_of_rows(facade):
    page = (ROOT / "docs" / "frameworks" / "index.md").read_text()
    exceptions = re.search(r"All facades except (.+?) have two masks", page, re.DOTALL)
    assert exceptions is not None
    env: Any = make("mpe2.simple_spread_v3", num_envs=2, backend="serial", facade=facade)
    env.reset()
    has_masks = hasattr(env, "present")
    env.close()
    assert has_masks == (CLASSES[facade] not in exceptions[1])
