"""The example with ranks: two ranks train like one batch, ranks that die, the Slurm script."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import tyro  # noqa: F401
from helpers import ROOT, TESTS
from helpers.processes import gone
from mpe2 import simple_spread_v3

pytestmark = pytest.mark.needs("mpe2", "torch", "tyro")

EXAMPLE = ROOT / "examples" / "torchrun_ippo.py"
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = ["--smoke", "--device", "cpu", "--num-workers", "1"]
GAMMA, LAMBDA = 0.95, 0.95


def started(*command: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def first_update(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The ranks, and all their descendants, when rank 0 has printed the line of the first update."""
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "steps/s" in line:
            break
    else:
        raise AssertionError("".join(printed))
    ranks = psutil.Process(process.pid).children()
    return ranks, [each for rank in ranks for each in rank.children(recursive=True)]


def workers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if re.match(r"marl_parallel worker \d", " ".join(each.cmdline()))]


def rows(file: Any) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def plain_advantages(rank: dict[str, Any], values: torch.Tensor, final_values: torch.Tensor) -> torch.Tensor:
    """Of one rank's first rollout, `(T, N, k)`: episodes end only by truncation, so the last value counts."""
    advantages = torch.zeros_like(rank["rewards"])
    following = torch.zeros_like(rank["rewards"][0])
    for step in reversed(range(len(advantages))):
        ended = rank["done"][step][:, None]
        next_values = torch.where(ended, final_values[step], values[step + 1])
        error = rank["rewards"][step] + GAMMA * next_values - values[step]
        following = error + GAMMA * LAMBDA * torch.where(ended, 0.0, following)
        advantages[step] = following
    return advantages


def gradient_of_joined_batch(ranks: Sequence[dict[str, Any]], minibatches: int) -> torch.Tensor:
    """Of the first minibatch, in one process, with plain torch: the ratio of probabilities is 1."""
    parameters = {name: value.clone().requires_grad_() for name, value in ranks[0]["before"].items()}

    def layers(name: str, inputs: torch.Tensor) -> torch.Tensor:
        for index in (0, 2, 4):
            inputs = torch.nn.functional.linear(
                inputs, parameters[f"{name}.{index}.weight"], parameters[f"{name}.{index}.bias"]
            )
            inputs = inputs.tanh() if index < 4 else inputs
        return inputs

    observations, actions, advantages, targets, parts = [], [], [], [], []
    for rank in ranks:
        with torch.no_grad():
            values = layers("critic", rank["observations"])[..., 0]
            estimates = plain_advantages(rank, values, layers("critic", rank["final_observations"])[..., 0])
        parts.append(rank["order"].chunk(minibatches)[0])
        observations.append(rank["observations"][:-1].flatten(0, 2)[parts[-1]])
        actions.append(rank["actions"].flatten()[parts[-1]])
        advantages.append(estimates.flatten())
        targets.append((estimates + values[:-1]).flatten()[parts[-1]])
    everyone = torch.cat(advantages)
    normal = torch.cat([each[part] for each, part in zip(advantages, parts)]) - everyone.mean()
    normal = normal / everyone.std(unbiased=False)
    log_probs = layers("actor", torch.cat(observations)).log_softmax(-1)
    chosen = log_probs.gather(1, torch.cat(actions)[:, None].long())[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    error = (layers("critic", torch.cat(observations))[:, 0] - torch.cat(targets)).square().mean()
    loss = -(normal * chosen).mean() + 0.5 * error - 0.01 * entropy
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(parameters.values()))])


def test_two_ranks_are_one_batch(tmp_path):
    """The first averaged gradient, seeds, equal parameters, and the log; nothing is left."""
    output = tmp_path / "runs"
    record = TESTS / "helpers" / "recorded_rank.py"
    with started(*TORCHRUN, record, tmp_path, *SMALL, "--output", output) as process:
        ranks, descendants = first_update(process)
        assert len(ranks) == len(workers(descendants)) == 2
        text, _ = process.communicate(timeout=110)
    assert process.returncode == 0, text
    assert "2 ranks have the same parameters" in text
    assert gone([each.pid for each in (*ranks, *descendants)], 30)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert not torch.equal(first["actions"], second["actions"])
    for index, rank in enumerate((first, second)):
        for number in range(4):
            agents, _ = simple_spread_v3.parallel_env(max_cycles=25).reset(seed=1_000_000 + 4 * index + number)
            np.testing.assert_array_equal(rank["observations"][0, number], np.stack([*agents.values()]))
    assert all(torch.equal(first["before"][name], second["before"][name]) for name in first["before"])
    assert torch.equal(first["gradient"], second["gradient"])
    assert not torch.allclose(first["own_gradient"], first["gradient"], rtol=0.1)
    torch.testing.assert_close(first["gradient"], gradient_of_joined_batch([first, second], 8), rtol=1e-3, atol=1e-6)
    assert torch.equal(first["after"], second["after"])
    saved = torch.load(output / "seed_1.pt")
    assert torch.equal(torch.cat([each.flatten() for each in saved.values()]), first["after"])
    assert [row["steps"] for row in rows(output / "seed_1.csv")] == ["400", "800", "1200"]


def test_rank_that_dies(tmp_path):
    """torchrun ends the other rank, and workers end with their ranks."""
    unending = ["--total-steps", 10**8, "--num-envs", 2, *SMALL[1:]]
    with started(*TORCHRUN, EXAMPLE, *unending, "--output", tmp_path) as process:
        ranks, descendants = first_update(process)
        assert len(workers(descendants)) == 2
        ranks[1].kill()
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Signal 9 (SIGKILL)" in text or "exitcode  : -9" in text, text
    assert gone([each.pid for each in (*ranks, *descendants)], 30)


def test_slurm_script(tmp_path):
    """With a local `srun` and `scontrol`: two tasks on one node, each of them a rank."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job_environ = {
        "PATH": f"{TESTS / 'helpers' / 'slurm'}:{os.environ['PATH']}",
        "VENV": sys.prefix,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    command = shlex.split("bash examples/clusters/slurm_ranks.sh --smoke --device cpu --output runs")
    environ |= job_environ
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0: 2 ranks have the same parameters" in done.stdout
    assert [row["steps"] for row in rows(tmp_path / "runs" / "seed_1.csv")] == ["400", "800", "1200"]


def test_one_rank(tmp_path):
    """Without a launcher; also in the batch script of a Slurm job, where only srun starts several tasks."""
    environ = {**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), *SMALL, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank has" in done.stdout
    assert [row["steps"] for row in rows(tmp_path / "seed_1.csv")] == [str(200 * (n + 1)) for n in range(6)]
