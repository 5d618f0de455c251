"""Programs with workers in Ray: how they end, the examples of `docs/ray.md` and a benchmark."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
import ray
from helpers import ROOT, TESTS
from helpers.processes import gone, wait_for
from simulators.crashing import Children

pytestmark = pytest.mark.needs("ray")


SCRIPT = """
import os, subprocess, sys, time
sys.path.append({tests!r})
from simulators.deterministic import Hunt
from simulators.crashing import Children, crashing
from marl_parallel import ParallelEnv

def started(env_id):
    children = Children({tag})
    children(env_id)
    subprocess.Popen(["sh", "-c", f"setsid sleep {{children.argument}} & sleep {{children.argument}}"])

env = ParallelEnv([crashing(Hunt, {{}}, started=started)] * 2, backend="ray", num_workers=2)
env.reset()
print(*env.call(lambda _: os.environ["RAY_NODE_ID"])[:1], *env.call(lambda _: os.getpid()), flush=True)
{ending}
"""


def of_workers_on(node: str) -> list[int]:
    """The workers on a node, and the processes that start them and end what they leave."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get("RAY_NODE_ID") == node:
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("ending", "cluster"),
    [
        ("", "own"),
        ("raise SystemExit(3)", "own"),
        ("time.sleep(600)", "own"),
        ("time.sleep(600)", "another's"),
    ],
)
def test_end_of_a_script(ending, cluster, ray_clusters):
    """Without `close`, by an exception and killed: workers and their simulators' children end."""
    children = Children(os.getpid())
    ray_clusters.shut_down()
    if cluster != "own":
        ray_clusters.one_node()
    script = SCRIPT.format(ending=ending, tests=str(TESTS), tag=os.getpid())
    address = "local" if cluster == "own" else ray.get_runtime_context().gcs_address
    environ = {**os.environ, "RAY_ADDRESS": address}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ)
    with process:
        assert process.stdout is not None
        node, *numbers = next(line for line in process.stdout if re.match(r"[0-9a-f]{56} \d+ \d+$", line)).split()
        pids = [*map(int, numbers)]
        if "sleep" in ending:
            assert wait_for(lambda: len(children.running()) == 8)
            assert {*pids} < {*of_workers_on(node)}
            process.kill()
        assert process.wait(60) == {"raise SystemExit(3)": 3, "time.sleep(600)": -signal.SIGKILL}.get(ending, 0)
    assert gone(pids, 30)
    assert children.gone(30)
    assert wait_for(lambda: not of_workers_on(node))


def test_page_and_example(ray_clusters):
    ray_clusters.one_node()
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "RayBackend" in block and "workers_per_node" not in block)
    address = ray.get_runtime_context().gcs_address
    environ = {**os.environ, "RAY_ADDRESS": address}
    example = [str(ROOT / "examples" / "ray_cluster.py"), "--steps", "20", "--envs", "8", "--workers", "2"]
    for arguments in (["-c", block], example):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environ)
        assert done.returncode == 0, done.stderr
    assert "4 environments were interrupted" in done.stdout
    assert "4 restarts" in done.stdout
