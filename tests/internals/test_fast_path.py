"""Plain transitions: which ones have the code `PLAIN`. No step with empty infos sends anything beside the block."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from simulators.failing import Fragile

from marl_parallel.adapters import AdapterMismatch
from marl_parallel.adapters.protocol import Schema
from marl_parallel.backends.process import Channel
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import FLOATS, REWARD_TYPES, WRITTEN
from marl_parallel.core.transition import Transition, check_infos

pytestmark = pytest.mark.needs("_codec")

PLAIN, INFOS = 1, 2
REWARD_SHIFT, FLAG_SHIFT = 8, 16
OTHER = 0
"""The code of transitions that compiled code writes in its general form."""

AGENTS = ["a", "b"]
PARTS = ["observations", "rewards", "terminateds", "truncateds", "infos"]


class WithoutTruthValue:
    """Raises in `bool()`."""

    def __bool__(self) -> bool:
        raise RuntimeError("do not ask")


def dicts(kind: type = float) -> dict[str, dict[Any, Any]]:
    return {
        "observations": {"a": np.zeros(2), "b": np.ones(2)},
        "rewards": {"a": kind(1.5), "b": kind(0)},
        "terminateds": {"a": False, "b": False},
        "truncateds": {"a": False, "b": False},
        "infos": {"a": {}, "b": {}},
    }


def code(parts: dict[str, dict[Any, Any]], vectors: bool = False) -> int | None:
    """The code of a transition that compiled code has written, `OTHER` if it is not plain; None if Python writes it."""
    box = dict.fromkeys(AGENTS, spaces.Box(-9, 9, (2,)))
    layout = Layout(Schema(AGENTS, box, {}, None, box if vectors else {}), 1)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    for name in ("terminateds", "truncateds"):
        parts[name].setdefault("__all__", False)
    transition = Transition(*(parts[name] for name in PARTS), AGENTS, AGENTS)
    if open_codec(layout, block, infos_in_block=False).put(0, transition) == 0:
        return None
    written = int.from_bytes(block[layout.transition_header : layout.transition_header + 8], "little")
    assert written & WRITTEN
    written &= ~WRITTEN
    return written if written & PLAIN else OTHER


@pytest.mark.parametrize("kind", FLOATS)
def test_fast_path(kind):
    assert code(dicts(kind)) == PLAIN | REWARD_TYPES.index(kind) << REWARD_SHIFT


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", ["missing", "added", "reordered"])
def test_other_agents(part, change):
    parts = dicts()
    changed = parts[part]
    if change == "missing":
        del changed["b"]
    elif change == "added":
        changed["c"] = copy.copy(changed["b"])
    else:
        changed["a"] = changed.pop("a")
    if change == "reordered":
        assert code(parts) == PLAIN
    elif (change, part) == ("added", "infos"):
        assert code(parts) == PLAIN | INFOS
    else:
        assert code(parts) == (OTHER if change == "missing" else None)


@pytest.mark.parametrize(
    ("part", "value", "is_number"),
    [
        *[("rewards", value, True) for value in (1, True, np.int64(1), np.float32(1), np.ones(1))],
        *[("rewards", value, False) for value in (None, "1", 1j)],
        *[
            (part, value, is_number)
            for part in ("terminateds", "truncateds")
            for is_number, values in (
                (True, (True, np.False_, np.True_, np.zeros(1, bool))),
                (False, (0, 0.0, None, "", [], {}, WithoutTruthValue())),
            )
            for value in values
        ],
    ],
)
@pytest.mark.parametrize("agent", AGENTS)
def test_other_values(part, value, is_number, agent):
    parts = dicts()
    parts[part][agent] = value
    assert code(parts) == (OTHER if is_number else None)


@pytest.mark.parametrize("value", [{"x": 1}, {"x": np.zeros(3)}, None, False, 0, "", WithoutTruthValue()])
@pytest.mark.parametrize("agent", AGENTS)
def test_other_infos(value, agent):
    """They are pickled; everything else may take the fast path."""
    parts = dicts()
    parts["infos"][agent] = value
    assert code(parts) == PLAIN | INFOS


@pytest.mark.parametrize("value", [(), [], set(), np.zeros(2)])
@pytest.mark.parametrize("agent", AGENTS)
def test_sequences_of_infos_are_refused(value, agent):
    parts = dicts()
    parts["infos"][agent] = value
    with pytest.raises(AdapterMismatch, match=f"the info of agent '{agent}' must be a dict"):
        check_infos(parts["infos"], AGENTS)


@pytest.mark.parametrize("kind", [int, bool, np.int64, np.bool_])
def test_rewards_of_other_types(kind):
    assert code(dicts(kind)) == PLAIN | REWARD_TYPES.index(kind) << REWARD_SHIFT


def test_rewards_that_a_double_does_not_hold():
    parts = dicts(int)
    parts["rewards"]["a"] = 2**53 + 1
    assert code(parts) is None


def test_rewards_that_are_vectors():
    parts = dicts()
    parts["rewards"] = {"a": np.zeros(2), "b": np.ones(2, np.float32)}
    assert code(parts) is None
    assert code(parts, vectors=True) == OTHER
    parts["rewards"]["a"] = [1.0, 2.0]
    assert code(parts, vectors=True) is None


def test_flags_of_numpy():
    parts = dicts()
    for part in ("terminateds", "truncateds"):
        parts[part] = dict.fromkeys(AGENTS, np.False_)
    assert code(parts) == PLAIN | 2 << FLAG_SHIFT


@pytest.mark.parametrize("value", [True, 0, None, np.False_])
@pytest.mark.parametrize("part", ["terminateds", "truncateds"])
def test_other_values_for_all(part, value):
    parts = dicts()
    parts["terminateds"]["__all__"] = parts["truncateds"]["__all__"] = False
    parts[part]["__all__"] = value
    assert code(parts) == (OTHER if isinstance(value, bool | np.bool_) else None)


@pytest.mark.parametrize("part", ["observations", "rewards", "infos"])
def test_all_in_the_wrong_place(part):
    parts = dicts()
    parts[part] = {"__all__": parts[part]["a"], **parts[part]}
    assert code(parts) == (PLAIN | INFOS if part == "infos" else None)


# Sent messages


class RecordedMessages:
    """Records the messages between this process and its workers, apart from the block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("put", "receive", "receive_now"):
            monkeypatch.setattr(Channel, name, self.counted(getattr(Channel, name)))

    def counted(self, method: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            self.count += 1
            return method(*arguments)

        return counting


@pytest.mark.parametrize("env_ids", [None, [0, 1, 2, 3], [1, 2]], ids=str)
def test_nothing_is_sent_if_infos_are_empty(env_ids, process_setup, build, tmp_path, monkeypatch):
    """For every step of two episodes, resets included; infos that are no simple values are sent."""
    messages = RecordedMessages(monkeypatch)
    env = build([functools.partial(Fragile, {"step": lambda: {1}}, tmp_path, 6, length=3)] * 4, process_setup)
    env.reset()
    before = messages.count
    assert before > 0
    actions = [{"a": 0, "b": 1}] * len(env_ids or range(4))
    for step in range(1, 7):
        _, _, terminateds, _, infos = env.step(actions, env_ids)
        over = step % 3 == 0
        assert terminateds[0]["__all__"] is over
        assert infos[0]["a"].keys() == ({"final_obs"} if over else set())
        assert messages.count == before
    assert env.step(actions, env_ids)[4][0]["a"] == {"strange": {1}}
    assert messages.count > before
