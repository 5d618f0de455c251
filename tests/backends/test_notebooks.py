"""Notebooks: what workers print and log appears in the cell that runs, with a real kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import TESTS
from helpers.launching import linux_only
from helpers.processes import gone

pytestmark = [pytest.mark.release_independent, linux_only]

SETUP = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from helpers.start_methods import arguments
from marl_parallel import ParallelEnv
from simulators.counting import ACTIONS
from simulators.talking import Talking
import simulators.talking
"""


class Output(NamedTuple):
    stdout: str
    stderr: str
    error: str  # the traceback


class Kernel:
    """A kernel, as Jupyter starts it, and its client."""

    def __init__(self, *options: str) -> None:
        from jupyter_client.manager import KernelManager

        self.manager: Any = KernelManager(kernel_name="python3")
        # With these, a kernel watches no descriptors, and lines of two workers may mix.
        without = {"PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED"}
        environ = {name: value for name, value in os.environ.items() if name not in without}
        self.manager.start_kernel(extra_arguments=[*options], env=environ)
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, cell: str, watch: Callable[[str], object] = lambda _: None) -> Output:
        """Run a cell; the output that belongs to it and comes before its end. `watch` gets each part of stdout."""
        texts = {"stdout": "", "stderr": ""}
        errors = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                texts[content["name"]] += content["text"]
                watch(texts["stdout"])
            elif message["msg_type"] == "error":
                errors.append(content["evalue"])

        self.client.execute_interactive(cell, timeout=60, output_hook=note)
        return Output(**texts, error="".join(errors))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(params=[(), ("--IPKernelApp.capture_fd_output=False",)], ids=["watched", "unwatched"], scope="module")
def kernel(request) -> Iterator[Kernel]:
    """One that watches the descriptors 1 and 2 (as on Linux), and one that does not (as on Windows)."""
    kernel = Kernel(*request.param)
    try:
        assert kernel.run(SETUP) == ("", "", "")
        yield kernel
    finally:
        kernel.close()


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


@pytest.mark.parametrize("methods", ["forkserver portable", pytest.param("spawn fork", marks=pytest.mark.rest)])
def test_output_appears_in_the_cell(methods, kernel, tmp_path):
    for method in methods.split():
        assert kernel.run(f"env = ParallelEnv([Talking] * 3, num_workers=2, **arguments({method!r}))").error == ""
        kernel.run("env.reset()")
        for word in ("first", "näher→"):
            found = kernel.run(f"_ = env.call('say_in_all_ways', {word!r}, env_ids=[0, 2]); print('after')")
            assert lines(found.stdout) == sorted(
                ["after", *[f"{word} {way}" for way in ("child", "descriptor", "stdout")] * 2]
            )
            assert found.stdout.endswith("after\n")
            assert lines(found.stderr) == sorted([f"{word} stderr", f"{word} child-stderr"] * 2)
        kernel.run("def dots():\n    print('. ', end='', flush=True)\nenv.set_attr('fault', [dots] * 3)")
        assert kernel.run("for _ in range(3): _ = env.step([ACTIONS] * 3)").stdout == ". " * 9
        check_output_in_the_middle(kernel, tmp_path / method)
        check_crash(kernel)
    assert (
        kernel.run("import threading; print([one.name for one in threading.enumerate() if 'marl' in one.name])").stdout
        == "[]\n"
    )


def check_output_in_the_middle(kernel: Kernel, release: Path) -> None:
    """Output appears while a step goes on: this step waits until its output has been seen."""
    kernel.run(
        "def waits():\n"
        "    print('waiting')\n"
        f"    while not os.path.exists({str(release)!r}):\n"
        "        time.sleep(0.01)\n"
        "env.set_attr('fault', [waits, None, None])"
    )

    def watch(text: str) -> None:
        if "waiting" in text:
            release.touch()

    assert kernel.run("_ = env.step([ACTIONS] * 3)", watch).stdout == "waiting\n"


def check_crash(kernel: Kernel) -> None:
    kernel.run("def exits():\n    print('last words')\n    os._exit(3)\nenv.set_attr('fault', [exits, None, None])")
    died = kernel.run("_ = env.step([ACTIONS] * 3)")
    assert died.stdout == "last words\n"
    assert "exit code 3" in died.error
    assert re.search(r'File ".*", line 3,? in exits\n +os\._exit\(3\)\n', died.error)  # the code is in this cell only


def test_output_between_cells_and_restarts(kernel):
    """What is printed while no cell runs is not lost. New workers write into the same pipes."""
    kernel.run("env = ParallelEnv([Talking] * 2, on_error='restart'); _ = env.reset()")
    kernel.run("def exits(): os._exit(3)\nenv.set_attr('fault', [exits, None])")
    assert "died in step" in kernel.run("_ = env.step([ACTIONS] * 2)").stderr
    assert kernel.run("_ = env.call('say', 'back', env_ids=[0])").stdout == "back\n"
    (pid,) = map(int, kernel.run("print(env.call('pid')[0])").stdout.split())
    later = "import threading; threading.Timer(0.2, print, ['printed later']).start()"
    seen = kernel.run(f"def later(_):\n    {later}\nenv.call(later, env_ids=[0]); time.sleep(1.0)").stdout
    assert seen == "printed later\n"
    kernel.run("import logging; logging.getLogger('sim').setLevel('INFO'); env.reset()")
    log = "def log(_):\n    logger = logging.getLogger('sim')\n    logger.info('one')\n    logger.warning('two')\n"
    assert kernel.run(log + "_ = env.call(log, env_ids=[1])").stderr == "two\n"
    kernel.run("del env; import gc; gc.collect()")
    assert gone([pid], 10.0)


def test_log_dir_takes_the_place_of_the_cell(kernel, tmp_path):
    kernel.run(f"env = ParallelEnv([Talking], log_dir={str(tmp_path)!r})")
    assert kernel.run("_ = env.call('say', 'to the file')").stdout == ""
    assert (tmp_path / "worker-0.log").read_text().endswith("to the file\n")
