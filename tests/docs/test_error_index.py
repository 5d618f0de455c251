"""`docs/errors.md` has a row for each error and each warning of the public modules, and quotes what they print."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

from marl_parallel.adapters.attributes import AttributeFailed, LookupFailed
from marl_parallel.core.reports import advice

pytestmark = pytest.mark.release_independent

PACKAGE = ROOT / "marl_parallel"
PAGE = (ROOT / "docs" / "errors.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| cause", "| text"))]
VALUE = "\0"  # stands for a value in a message

# Errors of wrong arguments and of missing libraries have too many causes for a row each.
MANY = {"AttributeError", "ImportError", "Mismatch", "ModuleNotFoundError", "TypeError", "ValueError"}
MANY |= {"ResultDoesNotFit"}  # a ValueError
MODULES = [
    *(PACKAGE / f"{name}.py" for name in ("making", "monitoring", "parallel_env", "recording")),
    *sorted((PACKAGE / "rollouts").glob("*.py")),
    *sorted((PACKAGE / "stepper").glob("*.py")),
    *sorted((PACKAGE / "vector").rglob("*.py")),
    *(PACKAGE / "backends" / f"{name}.py" for name in ("interpreter", "ray_backend", "ray_cluster", "ray_placement")),
]
# By file, function and class of the error, what its row says besides the class.
ERRORS = {
    ("parallel_env", "restart", "NotImplementedError"): "`restart`",
    ("stepper/stepper", "state", "NotImplementedError"): "`state()`",
    ("parallel_env", "set_parameters", "NotImplementedError"): "`set_parameters`",
    ("parallel_env", "timers", "NotImplementedError"): "`timers`",
    ("parallel_env", "start_trace", "NotImplementedError"): "`start_trace`",
    ("parallel_env", "start_trace", "RuntimeError"): "`start_trace` while",
    ("parallel_env", "stop_trace", "RuntimeError"): "`stop_trace` without",
    ("stepper/resets", "sample_actions", "NoSpaceDeclared"): "agents without spaces",
    ("stepper/stepper", "_received", "NoAsyncCallError"): "`recv`",
    ("stepper/batch", "finish_call", "NoAsyncCallError"): "`call_wait`",
    ("stepper/outputs", "write_states", "NotImplementedError"): "`with_state=True`",
    ("stepper/stepper", "_saved_states", "NotImplementedError"): "`save_state` and `load_state`",
    ("stepper/batch", "check_idle", "AlreadyPendingCallError"): "in flight",
    ("stepper/batch", "check_not_calling", "AlreadyPendingCallError"): "`call_async`",
    ("stepper/batch", "check_has_reset", "ResetNeeded"): "before the first `reset`",
    ("stepper/batch", "check_claim", "RuntimeError"): "a second facade",
    ("rollouts/ahead", "receive", "ClosedEnvironmentError"): "any call after `close`",
    ("rollouts/ahead", "__next__", "RuntimeError"): "raises `StopIteration`",
    ("rollouts/policies", "index", "KeyError"): "`Policies.index`",
    ("rollouts/policies", "_check_unlocked", "RuntimeError"): "`Policies` changed",
    ("rollouts/rollout", "_allocated", "MemoryError"): "a `Rollout`",
    ("rollouts/rollout", "_allocated", "RuntimeError"): "a `Rollout` of those that an evaluation steps",
    ("rollouts/rollout", "_check_not_ahead", "AlreadyPendingCallError"): "in a block of `Rollout.ahead`",
    ("rollouts/evaluation", "_claim", "RuntimeError"): "an `evaluate` of environments",
    ("rollouts/evaluation", "_check_own", "RuntimeError"): "something else steps",
    ("rollouts/rollout", "current", "ResetNeeded"): "before the first `reset`",
    ("rollouts/rollout", "_step", "ResetNeeded"): "before the first `reset`",
    ("monitoring", "serve", "RuntimeError"): "`Monitor.serve`",
    ("monitoring", "serve", "OSError"): "`Monitor.serve`",
    ("vector/stepper", "__init__", "NoSpaceDeclared"): "agents without spaces",
    ("vector/stepper", "_last_before_reset", "ResetNeeded"): "through a facade",
    ("vector/stepper", "receive", "NoAsyncCallError"): "`step_wait`",
    ("vector/stepper", "receive_reset", "NoAsyncCallError"): "`reset_wait`",
    ("vector/stepper", "_check_may_step", "AlreadyPendingCallError"): "in flight",
    ("vector/stepper", "_check_received", "AlreadyPendingCallError"): "`receive_some`",
    ("vector/pymarl", "get", "NoAsyncCallError"): "`recv` of a `PyMARLConnection`",
    ("vector/pymarl", "_check_open", "ClosedEnvironmentError"): "a `PyMARLConnection` that has been closed",
    ("vector/pymarl", "_check_may_step", "AlreadyPendingCallError"): "a second step of a `PyMARLConnection`",
    ("vector/pymarl", "_check_received", "AlreadyPendingCallError"): "`save_state` of `PyMARLConnections`",
    ("vector/pymarl", "_check_may_step", "ResetNeeded"): "a step of a `PyMARLConnection`",
    ("vector/sb3/vec_env", "_env_ids", "IndexError"): "`SB3VecEnv`",
    ("vector/share", "_write_states", "NotImplementedError"): "`ShareVecEnv`",
    ("vector/tianshou", "step", "ResetNeeded"): "or a `TianshouVecEnv` where an episode",
    ("vector/tianshou", "_received", "NoAsyncCallError"): "`TianshouVecEnv.step(None)`",
    ("vector/tianshou", "_ready", "AlreadyPendingCallError"): "of a `TianshouVecEnv` where an environment is being",
    ("vector/tensors", "page_lock", "RuntimeError"): "`torch(pin=True)`",
    ("vector/torchrl", "_indices", "AlreadyPendingCallError"): "in flight",
    ("vector/torchrl", "_indices", "NotImplementedError"): "`TorchRLEnv.async_step_send`",
    ("backends/interpreter", "executable", "RuntimeError"): "without a Python interpreter",
    ("backends/ray_backend", "__init__", "RuntimeError"): "`RayBackend` on macOS or Windows",
    ("backends/ray_backend", "_handle_lost", "ParallelEnvError"): "Ray cannot start a worker",
    ("backends/ray_backend", "_check_start", "ParallelEnvError"): "not ready within `placement_timeout`",
    ("backends/ray_backend", "allocate", "ParallelEnvError"): "not ready within `placement_timeout`",
    ("backends/ray_cluster", "connect", "ConnectionError"): "no Ray cluster",
    ("backends/ray_placement", "reserve", "ParallelEnvError"): "without room",
}
# Methods of the stand-in for one environment of RLlib, which no caller has; RLlib's own; those of a dict and a list.
INTERNAL = {
    ("vector/rllib", "reset", "RuntimeError"),
    ("vector/rllib", "step", "RuntimeError"),
    ("vector/rllib", "_creator", "EnvError"),
    ("vector/sb3/vec_env", "__missing__", "KeyError"),
    ("vector/share", "__getitem__", "IndexError"),
}
# Warnings whose text comes from elsewhere, by the expression: `SeedCheck` of `core/pool/construction.py` has both.
TEXTS = {"seed_check.first_warning": "declare the same seed", "text": "the first observations of all"}


def name_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").as_posix()


def raised(node: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """The function and the class of each error that is raised with a text, in and below a node."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = node.exc.func
        if isinstance(kind, ast.Name) and kind.id[0].isupper() and kind.id not in MANY:
            yield function, kind.id
    for child in ast.iter_child_nodes(node):
        yield from raised(child, function)


def message(node: ast.AST) -> str | None:
    """A literal text, with `VALUE` where values are filled in; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdrfg]", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join([message(part) or VALUE for part in node.values])
    return None


@functools.cache
def messages() -> list[str]:
    """All literal texts of the package."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return [text for node in nodes if (text := message(node)) is not None]


def found() -> set[tuple[str, str, str]]:
    return {(name_of(module), *error) for module in MODULES for error in raised(ast.parse(module.read_text()))}


def test_every_error_has_a_row():
    """A new error needs a row in `docs/errors.md`, and an entry in `ERRORS` that says which."""
    assert found() - INTERNAL == ERRORS.keys()
    for (module, function, kind), phrase in ERRORS.items():
        assert any(f"{kind}`" in row and phrase in row for row in ROWS), (module, function, kind)


def cells(heading: str, until: str | None = None) -> list[tuple[str, str]]:
    """The first cells of the rows from a heading on, and the rows."""
    section = PAGE[PAGE.index(f"## {heading}") : None if until is None else PAGE.index(f"## {until}")]
    return [(row.removeprefix("| ").split(" | ")[0], row) for row in ROWS if row in section]


def quoted() -> list[tuple[str, str]]:
    """The texts of warnings that the page quotes, and the rows that they are in."""
    return [(text, row) for cell, row in cells("Warnings") for text in cell.strip("`").split("`, `")]


def matches(text: str, printed: str) -> bool:
    """Whether a quoted text, in which `...` stands for anything, is the beginning of a printed one."""
    pattern = ".*".join(map(re.escape, text.split("...")))
    return re.match(pattern, printed, re.DOTALL) is not None


@pytest.mark.parametrize("text", [text for text, _ in quoted()])
def test_quoted_warnings_are_printed(text):
    assert any(matches(text, printed) for printed in messages())


def test_every_warning_has_a_row():
    expected = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warn":
                kinds = [argument.id for argument in node.args[1:] if isinstance(argument, ast.Name)]
                expected.append((node.args[0], (kinds or ["UserWarning"])[0]))
    assert len(expected) >= 9
    for argument, kind in expected:
        printed = message(argument)
        if printed is None:
            rows = [row for _, row in quoted() if TEXTS[ast.unparse(argument)] in row]
        else:
            rows = [row for text, row in quoted() if matches(text, printed)]
        assert any(f"`{kind}`" in row for row in rows), printed or ast.unparse(argument)


ADVICE = [cell.strip("`") for cell, _ in cells("Advice in errors", "Workers that cannot start")]


def test_every_advice_has_a_row():
    """And each row is the text of an advice."""
    limits = [advice.limit_advice(OSError(number, "")) for number in advice.LIMITS]
    failed = [LookupFailed("action_space('a')", KeyError("a")), AttributeFailed("metadata", KeyError("a"))]
    for one in failed:
        one.__cause__ = KeyError("a")
    declarations = [advice.advice(one, own_process=True) for one in failed]
    others = [advice.only_once(own_process=True), advice.FLAGS, advice.GYM_ID]
    printed = [advice.NO_TERMINAL, advice.OTHER_THREAD, *limits, *advice.OF_KINDS.values(), *declarations, *others]
    assert all(printed)
    assert len(ADVICE) == len(printed)
    for text in printed:
        assert any(matches(row, text) for row in ADVICE), text
