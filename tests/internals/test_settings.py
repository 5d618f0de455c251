"""`Settings`: one group has each argument of `ParallelEnv`, and all places that list the arguments agree."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from simulators.deterministic import Skirmish

from marl_parallel import AutoresetMode, ParallelEnv, RestartPolicy
from marl_parallel.settings import (
    NAMES,
    START_TIMEOUT_S,
    EpisodeSettings,
    FaultSettings,
    OutputSettings,
    ParallelEnvArguments,
    Settings,
    WorkerPoolSettings,
    is_default,
)

pytestmark = pytest.mark.release_independent

GROUPS = WorkerPoolSettings, FaultSettings, OutputSettings, EpisodeSettings
FIELDS = {field.name: field for group in GROUPS for field in dataclasses.fields(group)}
PARAMETERS = {
    name: one for name, one in inspect.signature(ParallelEnv).parameters.items() if name != "env_constructors"
}


def test_each_argument_has_one_group():
    assert sum(len(dataclasses.fields(group)) for group in GROUPS) == len(FIELDS)
    assert FIELDS.keys() == PARAMETERS.keys()


def test_order():
    """Of positional arguments it is part of the interface; the other arguments have one order everywhere."""
    first = [name for name, one in PARAMETERS.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert first == ["auto_reset", "seed"]
    assert [*NAMES] == [*ParallelEnvArguments.__annotations__] == [*PARAMETERS]
    section = inspect.cleandoc(ParallelEnv.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    described = re.findall(r"^    (\w+): \w", section, re.MULTILINE)
    assert described == ["env_constructors", *PARAMETERS]


@pytest.mark.parametrize("name", NAMES)
def test_types_and_defaults(name):
    field, parameter = FIELDS[name], PARAMETERS[name]
    in_typed_dict = ParallelEnvArguments.__annotations__[name].__forward_arg__
    assert field.type == parameter.annotation == in_typed_dict
    assert type(field.default) is type(parameter.default)
    assert field.default == parameter.default


def test_settings_are_keywords():
    passed = {"num_workers": 2, "on_error": "restart", "restart_policy": RestartPolicy(max_restarts=3), "copy": False}
    settings = Settings.of(passed)
    assert {**settings} == {name: passed.get(name, field.default) for name, field in FIELDS.items()}
    assert Settings.of({**settings}) == settings
    assert settings.changed(auto_reset="NEXT_STEP").episodes.mode is AutoresetMode.NEXT_STEP
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.faults.on_error = "raise"  # type: ignore[misc]
    with ParallelEnv([Skirmish] * 2, **settings.changed(backend="serial")) as env:
        assert env.stepper.restarts
        assert env.stepper.seeds == (42, 43)


@pytest.mark.parametrize("taker", ["ParallelEnv", "SubprocVecEnv"])
def test_unknown_arguments_are_named(taker):
    with pytest.raises(TypeError, match=f"{taker} takes no argument 'nun_workers'; it takes .*num_workers, .*log_dir"):
        Settings.of({"copy": True, "nun_workers": 2}, taker)


def test_defaults_differ_from_equal_numbers():
    """Also where a default is passed on."""
    defaults = Settings.of({})
    assert [name for name, value in {**defaults}.items() if is_default(value)] == ["seed", "start_timeout"]
    assert not is_default(Settings.of({"seed": 42}).episodes.seed)
    passed: list[tuple[object, list[str]]] = [
        (START_TIMEOUT_S, []), (60.0, ["start_timeout=60.0"]), (60, ["start_timeout=60"]), (None, []),
    ]  # fmt: skip
    for seconds, expected in passed:
        settings = Settings.of({"start_timeout": seconds}).changed(copy=False)
        assert settings.faults.passed_timeouts == expected
        assert settings.needs_processes == bool(expected)
