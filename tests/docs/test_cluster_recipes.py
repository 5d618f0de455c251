"""The recipes for Slurm and Kubernetes, as far as possible without either: lint, schema, numbers that agree."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers import ROOT, TESTS

pytestmark = [pytest.mark.needs("jsonschema", "yaml"), pytest.mark.release_independent]

CLUSTERS = ROOT / "examples" / "clusters"
SCRIPT, RANKS, MANIFEST = CLUSTERS / "slurm.sh", CLUSTERS / "slurm_ranks.sh", CLUSTERS / "kubernetes.yaml"
GIB = 2**30


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "shellcheck"
    return subprocess.run([str(program), str(file)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", [SCRIPT, RANKS], ids=["ray", "ranks"])
def test_script_passes_shellcheck(script):
    done = lint(script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck_finds_missing_quotes(tmp_path):
    unquoted = tmp_path / "unquoted.sh"
    unquoted.write_text(SCRIPT.read_text().replace('mkdir -p "$logs"', "mkdir -p $logs"))
    assert "SC2086" in lint(unquoted).stdout


def test_options_of_sbatch():
    """They stand above the first command, where sbatch stops reading them."""
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert len(options) == text.count("\n#SBATCH") == text[: text.index("\nset ")].count("\n#SBATCH")
    assert options.keys() == {
        "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "mem-per-cpu", "time", "output", "signal",
    }  # fmt: skip
    assert options["ntasks-per-node"] == "1"


@pytest.fixture
def manifest():
    return yaml.safe_load(MANIFEST.read_text())


def problems(manifest) -> list[str]:
    schema = json.loads((TESTS / "helpers" / "rayjob_schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


def test_manifest_fits_the_schema_of_kuberay(manifest):
    assert problems(manifest) == []
    wrong = copy.deepcopy(manifest)
    (group,) = wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    group["replicas"] = "2"
    group["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert len(problems(wrong)) == 2


def test_commented_part_fits_the_schema_too():
    """That for preemptible nodes."""
    text = re.sub(r"^( +)# (nodeSelector|tolerations|  - \{key)", r"\1\2", MANIFEST.read_text(), flags=re.MULTILINE)
    manifest = yaml.safe_load(text)
    (group,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {"nodeSelector", "tolerations"} <= group["template"]["spec"].keys()
    assert problems(manifest) == []


def test_numbers_of_the_manifest_agree(manifest):
    """CPUs of Ray, of the pods and of the command; size of /dev/shm and of what Ray puts there."""
    program, file, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert program == "python"
    assert (ROOT / file).is_file()
    options = dict(zip(words[::2], words[1::2]))
    learners, nodes, workers, envs = (
        int(options[f"--{name}"]) for name in ("learners", "num-nodes", "workers-per-node", "num-envs")
    )
    assert envs % (learners * nodes * workers) == 0
    cluster = manifest["spec"]["rayClusterSpec"]
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == learners * nodes
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert int(group["rayStartParams"]["num-cpus"]) == workers
    for pod, cpus in ((head, learners + 1), (group, workers)):
        (container,) = pod["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert int(container["resources"]["limits"]["cpu"]) == cpus
        volumes = {volume["name"]: volume for volume in pod["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        shared = mounts["/dev/shm"]["emptyDir"]
        assert shared["medium"] == "Memory"
        size = int(shared["sizeLimit"].removesuffix("Gi")) * GIB
        assert int(pod["rayStartParams"]["object-store-memory"]) < size
        assert size < int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
