"""The caller's filters of warnings hold in worker processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import ROOT, TESTS
from helpers.setups import Setup
from helpers.start_methods import also_portable, chosen
from simulators.logging_envs import Logging

from marl_parallel import EnvError, ParallelEnv

pytestmark = pytest.mark.release_independent


class OwnWarning(UserWarning):
    pass


@pytest.fixture(autouse=True)
def own_filters() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


@pytest.fixture
def warns(build, request) -> Callable[..., ParallelEnv]:
    def create(**more: Any) -> ParallelEnv:
        return build([Logging] * 3, Setup("process", True, 2), **chosen(request), **more)

    return create


def shown(env: ParallelEnv, capfd: Any, *args: Any) -> bool:
    env.call("warn", *args, env_ids=[2])
    return str(args[0]) in capfd.readouterr().err


@also_portable
def test_actions_messages_modules_and_categories(warns, capfd):
    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", "be quiet", RuntimeWarning)
    warnings.filterwarnings("ignore", module=r"simulators\.logging")
    warnings.filterwarnings("always", "loud", DeprecationWarning)
    warnings.filterwarnings("error", category=BytesWarning)
    warnings.filterwarnings("ignore", category=OwnWarning)
    warnings.filterwarnings("always", "own", OwnWarning)
    env = warns()
    assert not shown(env, capfd, "be quiet", RuntimeWarning)
    assert not shown(env, capfd, "in a module that is ignored", RuntimeWarning)
    assert shown(env, capfd, "loud", DeprecationWarning)
    env.call("warn", "of a module that this call imports", OwnWarning, env_ids=[2])
    capfd.readouterr()
    assert shown(env, capfd, "own", OwnWarning)
    assert not shown(env, capfd, "another", OwnWarning)
    with pytest.raises(EnvError, match="BytesWarning: too bad") as caught:
        env.call("warn", "too bad", BytesWarning, env_ids=[2])
    assert isinstance(caught.value.__cause__, BytesWarning)


def test_refreshed_at_resets(warns, capfd):
    warnings.simplefilter("always")
    env = warns()
    assert shown(env, capfd, "first")
    warnings.simplefilter("ignore")
    env.reset()
    assert not shown(env, capfd, "second")
    warnings.simplefilter("always")
    env.reset(env_ids=[2])
    assert shown(env, capfd, "third")


def test_what_a_simulator_sets_stays(warns, capfd):
    warnings.simplefilter("always")
    env = warns()
    env.call("configure", functools.partial(warnings.filterwarnings, "ignore", "own"))
    warnings.filterwarnings("ignore", "other")
    env.reset()
    assert not shown(env, capfd, "own")
    assert not shown(env, capfd, "other")
    assert shown(env, capfd, "more")


def test_also_without_log_records(warns, capfd):
    warnings.simplefilter("ignore")
    assert not shown(warns(forward_logs=False), capfd, "quiet")


PROGRAM = """
import sys, warnings
sys.path.insert(0, {tests!r})
import wave  # stands for a large library with warnings of its own
from simulators.logging_envs import Logging
from marl_parallel import ParallelEnv

class Ours(UserWarning):
    pass

class Theirs(UserWarning):
    pass

Theirs.__module__ = "wave"
wave.Theirs = Theirs
warnings.filterwarnings("error", category=Theirs)
warnings.filterwarnings("ignore", category=Ours)
warnings.filterwarnings("ignore", "deprecated here", DeprecationWarning)

class Gone(UserWarning):
    __module__ = "module.that.exists.nowhere"

warnings.filterwarnings("ignore", category=Gone)

def imported(_):
    return "wave" in sys.modules

def import_and_define(_):
    import wave
    wave.Theirs = type("Theirs", (UserWarning,), {{"__module__": "wave"}})

def warn_theirs(_):
    try:
        warnings.warn("theirs", sys.modules["wave"].Theirs)
    except UserWarning as error:
        return type(error).__name__

with ParallelEnv([Logging] * 2, num_workers=2) as env:
    env.call("warn", "ours", Ours)
    env.call("warn", "deprecated here", DeprecationWarning)
    print(*env.call(imported))  # nothing is imported for a filter
    env.call(import_and_define)
    env.reset()
    print(*env.call(warn_theirs))
    env.call(lambda simulator: simulator.warn("shown"), env_ids=[0])
"""


def test_categories_of_scripts_and_of_modules_that_are_imported_later():
    text = PROGRAM.format(tests=str(TESTS))
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["False False", "Theirs Theirs"]
    assert "UserWarning: shown" in done.stderr
    assert "ours" not in done.stderr
    assert "deprecated here" not in done.stderr
