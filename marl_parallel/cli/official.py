"""The tests that PettingZoo and Gymnasium have for environments of theirs, and what they have to say.

What this package looks at itself is in `probes.py`.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
from gymnasium.utils.env_checker import check_env
from pettingzoo import AECEnv, ParallelEnv  # type: ignore[import-untyped]

from marl_parallel.adapters import MultiAgentEnv
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.cli.findings import Question, Severity
from marl_parallel.cli.isolation import Notebook
from marl_parallel.cli.values import in_brief
from marl_parallel.core.reports import place


class Test(NamedTuple):
    """One that belongs to another project; `run` raises where it fails."""

    name: str
    question: Question
    run: Callable[[], object]


_GYMNASIUMS = "gymnasium.utils.env_checker.check_env"
OF_SEEDS = ("pettingzoo.test.seed_test", "pettingzoo.test.parallel_seed_test")
"""Tests that need two environments in one process."""


def names_of_tests(env: MultiAgentEnv) -> list[str]:
    """The tests that go with this kind of environment, none with dict environments."""
    source = env.source
    if isinstance(env, GymnasiumEnv) and isinstance(source, gymnasium.Env):
        return [_GYMNASIUMS]
    if isinstance(source, AECEnv):
        return ["pettingzoo.test.api_test", "pettingzoo.test.seed_test"]
    if isinstance(source, ParallelEnv):
        return ["pettingzoo.test.parallel_api_test", "pettingzoo.test.parallel_seed_test"]
    return []


def test_of(name: str, env: MultiAgentEnv, constructor: Callable[..., Any], cycles: int) -> Test:
    """The test of this name.

    Args:
        name: One of `names_of_tests`.
        env: An environment.
        constructor: Makes more of them.
        cycles: How many steps a test takes.

    Raises:
        ImportError: PettingZoo's tests need something that is not installed.
    """
    if name == _GYMNASIUMS:
        raw = env.source.unwrapped
        return Test(name, Question.API, lambda: check_env(raw, skip_render_check=True))
    from pettingzoo import test  # here: it imports pygame, which catches signals

    run = getattr(test, name.rpartition(".")[2])
    if name in OF_SEEDS:
        return Test(name, Question.DETERMINISM, lambda: run(constructor, cycles))
    return Test(name, Question.API, lambda: run(env.source, cycles))


def take(test: Test, notebook: Notebook, seconds: float) -> None:
    """Run a test, and note whether it fails or warns; it may take so many seconds more than a step."""
    name, question, run = test
    short = name.rpartition(".")[2]
    advice = f"nothing breaks here; other libraries may rely on what {name} asks for: run it by itself, with a debugger"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with notebook.watch(name, question, seconds, Severity.REMARK, advice):
            try:
                run()
            except (Exception, SystemExit) as error:
                where = place(traceback.format_exc()) if not isinstance(error, AssertionError) else ""
                at = f", at {where}" if where else ""
                notebook.find(question, Severity.REMARK, f"{short} fails{at}: {_reason(error)}", advice)
    texts = dict.fromkeys(_plain(str(one.message)) for one in warned if issubclass(one.category, UserWarning))
    if texts:
        notebook.find(question, Severity.REMARK, f"{short} warns: {'; '.join(texts)}", advice)


def _reason(error: BaseException) -> str:
    """What an error says; of an assertion without words, the assertion."""
    if isinstance(error, AssertionError) and not str(error):
        return str(traceback.extract_tb(error.__traceback__)[-1].line)
    return in_brief(error)


def _plain(warning: str) -> str:
    """Without Gymnasium's colours."""
    return warning.removeprefix("\x1b[33m").removesuffix("\x1b[0m").removeprefix("WARN: ")
