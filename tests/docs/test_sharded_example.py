"""The example with several learners, on a cluster on this machine: equal parameters, faults, and the Slurm script."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import ray
import torch
import tyro  # noqa: F401
from helpers import ROOT, TESTS
from helpers.processes import gone, wait_for

pytestmark = pytest.mark.needs("mpe2", "ray", "torch", "tyro")

EXAMPLE = ROOT / "examples" / "ray_sharded_ippo.py"


def started(*arguments: object, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, **more}, **pipes)


def output_of(process: subprocess.Popen[str]) -> str:
    with process:
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    return output


def digests(output: str) -> dict[str, str]:
    """The digest of each learner's parameters."""
    return dict(re.findall(r"learner (\d+): .*parameters (\w+)", output))


def test_number_of_learners_does_not_change_the_training(tmp_path, ray_clusters):
    """So gradients are averaged: each learner alone has half of the data of the one that has all environments."""
    ray_clusters.one_node()
    address = ray.get_runtime_context().gcs_address
    logs, parameters = [], []
    for learners, cluster in ((1, {"RAY_ADDRESS": address}), (2, {})):
        output = tmp_path / str(learners)
        local = [] if cluster else ["--local-nodes", 2]
        # Clipped, sums of gradients would train like means.
        unclipped = ["--smoke", "--max-grad-norm", 1e9]
        text = output_of(started(*unclipped, "--learners", learners, *local, "--output", output, **cluster))
        assert digests(text).keys() == {*map(str, range(learners))}
        assert len({*digests(text).values()}) == 1
        each = [float(rate.replace(",", "")) for rate in re.findall(r"learner \d+: ([\d,]+) steps/s", text)]
        total = float(re.findall(r"sum of \d learners: ([\d,]+) environment steps/s", text)[0].replace(",", ""))
        assert total == pytest.approx(sum(each), abs=learners)
        with (output / "seed_1.csv").open(newline="") as lines:
            logs.append([(int(row["steps"]), float(row["return"])) for row in csv.DictReader(lines)])
        parameters.append(torch.load(output / "seed_1.pt"))
    assert [steps for steps, _ in logs[0]] == [400, 800, 1200]
    assert logs[0] == [(steps, pytest.approx(mean)) for steps, mean in logs[1]]
    one, two = parameters
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-5)


def test_dead_worker_and_dead_learner(tmp_path):
    """A worker's environments are restarted, and the learners go on; the death of a learner ends everything."""
    process = started("--local-nodes", 1, "--num-envs", 8, "--total-steps", 10**8, "--output", tmp_path)
    launcher = psutil.Process(process.pid)
    with process:
        assert process.stdout is not None
        updates = (line for line in process.stdout if "restarts" in line and "steps/s" in line)
        assert next(updates).rstrip().endswith("0 restarts")
        descendants = launcher.children(recursive=True)
        workers = [each for each in descendants if re.match(r"marl_parallel worker \d", " ".join(each.cmdline()))]
        assert len(workers) == 4
        workers[0].kill()
        # Two environments were in it. Updates that were on their way when it died may be without restarts.
        line = next(line for line in updates if not line.rstrip().endswith("0 restarts"))
        assert line.rstrip().endswith("2 restarts")
        assert next(updates).rstrip().endswith("2 restarts")
        learners = [each for each in launcher.children() if "spawn_main" in " ".join(each.cmdline())]
        assert len(learners) == 2
        learners[1].kill()
        output = process.stdout.read()
        assert process.wait(60) == 1
    assert "process 1 terminated with signal SIGKILL" in output or "Connection closed by peer" in output
    assert gone([each.pid for each in (*descendants, *learners)], 30)


def test_learner_that_hangs(tmp_path, ray_clusters):
    """With learners started one by one, as by srun, the other one ends with an error after the timeout."""
    ray_clusters.one_node()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    arguments = ["--num-envs", 4, "--workers-per-node", 1, "--total-steps", 10**8, "--learner-timeout", 20]
    first, second = (
        started(*arguments, "--output", tmp_path, **common, RANK=str(rank), PYTHONUNBUFFERED="1") for rank in (0, 1)
    )
    with first, second:
        try:
            assert first.stdout is not None
            next(line for line in first.stdout if "restarts" in line)
            second.send_signal(signal.SIGSTOP)
            output = first.stdout.read()
            assert first.wait(60) == 1
            assert re.search(r"[Tt]imed out", output), output
        finally:
            first.kill()
            second.kill()


def test_slurm_script(tmp_path, monkeypatch):
    """With a local `srun` and `scontrol`: two nodes, each a `ray start` of this machine, and a learner on each."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = str(os.getpid())
    job_environ = {
        "PATH": f"{TESTS / 'helpers' / 'slurm'}:{os.environ['PATH']}",
        "VENV": sys.prefix,
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "node1,node2",
        "SLURM_CPUS_PER_TASK": "2",
    }
    environ = {**os.environ, **job_environ}
    command = shlex.split("bash examples/clusters/slurm.sh --smoke --output runs")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes with 2 CPUs for workers" in done.stdout
    assert digests(done.stdout).keys() == {"0", "1"}
    assert (tmp_path / "runs" / "seed_1.pt").is_file()
    logs = tmp_path / f"logs-{job}"
    assert {path.name for path in logs.iterdir()} == {"ray-node1.log", "ray-node2.log", "node1", "node2"}
    assert (logs / "node2" / "raylet.out").is_file()

    def left() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if f"/tmp/ray-{job}" in str(each.info["cmdline"])]

    assert wait_for(lambda: not left(), 30)
    assert not os.path.exists(f"/tmp/ray-{job}")
