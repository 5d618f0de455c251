"""The CPUs that control groups leave a process, from files as the kernel shows them."""

from __future__ import annotations

import math
import os

import pytest

from marl_parallel.core import backend

pytestmark = pytest.mark.release_independent

V2, V1 = "0::{}\n", "9:name=systemd:{0}\n4:memory:{0}\n2:cpu,cpuacct:{0}\n0::/\n"


def v1(quota: int) -> dict[str, str]:
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "group", "files", "expected"),
    [
        (V2, "/", {}, math.inf),
        (V2, "/job/step", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n"}, 1.5),
        (V2, "/job/step", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "200000 100000\n"}, 2.0),
        (V2, "/docker/0123", {"cpu.max": "50000 100000\n"}, 0.5),  # the host's path is not there in a container
        (V2, "/other", {"job/cpu.max": "100000 100000\n"}, math.inf),
        (V2, "/", {"cpu.max": "damaged\n"}, math.inf),
        (V1, "/", {f"cpu,cpuacct/{name}": text for name, text in v1(-1).items()}, math.inf),
        (V1, "/job", {f"cpu,cpuacct/job/{name}": text for name, text in v1(300_000).items()}, 3.0),
        (V1, "/job", {f"memory/job/{name}": text for name, text in v1(100_000).items()}, math.inf),
    ],
)
def test_quota_of_control_groups(own, group, files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    (tmp_path / "own").write_text(own.format(group))
    assert backend._quota(tmp_path / "own", tmp_path / "mounted") == expected


def test_quota_without_control_groups(tmp_path):
    assert backend._quota(tmp_path / "missing", tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "expected"), [(0.25, 1), (1.0, 1), (1.5, 2), (math.inf, None)])
def test_quota_limits_usable_cpus(quota, expected, monkeypatch):
    monkeypatch.setattr(backend, "_quota", lambda *_: quota)
    cpus = len(os.sched_getaffinity(0))
    assert backend.usable_cpus() == (cpus if expected is None else min(expected, cpus))
