"""Records of transitions: several writers, and records that are not plain between others."""

from __future__ import annotations

import mmap
import os
import re
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.launching import linux_only

from marl_parallel import Rules
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block import codec
from marl_parallel.core.block.arrays import BlockArrays
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.columns import Layout, damaged
from marl_parallel.core.block.records import WRITTEN, TransitionRecords, dump_leftovers
from marl_parallel.core.pool.slots import Slot
from marl_parallel.core.spaces import Mismatch
from marl_parallel.core.transition import Transition
from marl_parallel.types import StepTimes

AGENTS = ["a", "b"]
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
RECORDS = 32


def block_of(records: int) -> tuple[Layout, bytearray]:
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), records)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    return layout, block


def transition(number: int, *, kind: type = float, over: bool = False, infos: Any = None) -> Transition:
    """A transition with distinct numbers."""
    observations = {agent: np.full(3, number / 100, np.float32) for agent in AGENTS}
    rewards = {agent: kind(number) for agent in AGENTS}
    flags = {**dict.fromkeys(AGENTS, over), "__all__": over}
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    dicts = observations, rewards, flags, no, infos or {agent: {} for agent in AGENTS}
    alive = [] if over else AGENTS
    return Transition(*dicts, alive, alive)


def test_several_writers():
    """A record that another writer wrote in another form is written completely again, also without compiled code."""
    layout, block = block_of(1)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    pure, theirs = TransitionRecords(layout, block), TransitionRecords(layout, block, codec=compiled)
    for number, (writer, value) in enumerate(
        [
            (pure, {}),
            (theirs, {"over": True}),
            (pure, {}),
            (theirs, {"kind": int}),
            (theirs, {}),
            (pure, {"over": True}),
        ]
    ):
        expected = transition(number, **value)
        leftovers = writer.write(0, expected)
        assert (leftovers is None) == (writer is theirs and compiled is not None)
        read = theirs.read(0, leftovers)
        assert_same(read[:5], expected[:5])
        assert read.acting == read.alive == expected.alive


@pytest.mark.parametrize("place", [0, 7, RECORDS - 1])
@pytest.mark.parametrize("value", [{"over": True}, {"kind": int}, {"infos": {"a": {"x": 1}, "b": {}}}], ids=str)
def test_one_record_of_another_form(place, value):
    """Its neighbours are read as they were written."""
    layout, block = block_of(RECORDS)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    records = TransitionRecords(layout, block, codec=compiled)
    written = [transition(number, **(value if number == place else {})) for number in range(RECORDS)]
    leftovers = {record: more for record, one in enumerate(written) if (more := records.write(record, one))}
    if compiled is not None:
        assert leftovers.keys() == ({place} if "infos" in value else set())
        columns, others = compiled.read(tuple(range(RECORDS)), leftovers, True)
        assert others is None or others[0] == []
        for record, dicts in enumerate(zip(*columns)):
            assert_same(dicts, written[record][:5])
    for record in range(RECORDS):
        assert_same(records.read(record, leftovers.get(record))[:5], written[record][:5])


# -- damage ------------------------------------------------------------------------------------------------------------

READERS = pytest.mark.parametrize("reader", [codec.Codec, None], ids=["compiled", "pure"])
DIE, SIDE = spaces.Discrete(9), spaces.Discrete(3)
SEEN = {"a": DIE, "b": spaces.Dict(eyes=BOX, way=spaces.Tuple((SIDE,)))}
SMALL_NUMBERS = {"a": 3, "b": {"eyes": np.ones(3, np.float32), "way": (np.int8(2),)}}
FALSE = {"a": False, "b": False, "__all__": False}
VECTOR = spaces.Box(-9, 9, (2,), np.float32)
FORMS: dict[str, Any] = {
    "plain": {"rewards": {"a": 1, "b": 2}},
    "infos": {"infos": {"a": {"speed": 1.5, "names": ["x", {"y": np.ones(2)}]}, "b": {}}},
    "over": {"terminateds": {"a": True, "b": np.True_, "__all__": True}, "rewards": {"a": 2, "b": np.float32(1)}},
    "arrays": {"rewards": {"a": np.array([2]), "b": np.array(1.5)}},
    "vector": {"rewards": {"a": np.ones(2, np.float32), "b": np.int8(1)}},
    "final": {"final_observations": SMALL_NUMBERS, "reset_infos": {"a": {"level": 2}, "b": {}}},
    "pickled infos": {"infos": {"a": {"why": int}, "b": {}}},
    "pickled": {"infos": {"a": {"why": int}, "b": {}}, "rewards": {"a": 2**60, "b": 1.0}},
}


class OneRecord:
    """A block of one record that may be overwritten, its reader for the caller, and what travels pickled."""

    def __init__(self, form: str, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(codec, "Codec", reader)
        rewards = {"a": VECTOR} if form == "vector" else {}
        schema = Schema(AGENTS, SEEN, dict.fromkeys(AGENTS, DIE), None, rewards)
        self.layout = layout = Layout(schema, 1)
        self.block = bytearray(layout.nbytes)
        slots, modes = [Slot(0, 0, has_reset=True)], dict.fromkeys(["final"], AutoresetMode.SAME_STEP)
        self.transitions = BlockTransitions(
            slots, layout, self.block, Rules.DICT, modes.get(form, AutoresetMode.DISABLED), copy=True,
            check_actions=False, needs_all_actions=False, local_modules=(), episode_stats=False,
        )  # fmt: skip
        parts = {"observations": SMALL_NUMBERS, "rewards": {"a": 1.0, "b": 1.0}, "terminateds": FALSE}
        parts |= {"truncateds": FALSE, "infos": {"a": {}, "b": {}}, "alive": AGENTS, "acting": AGENTS}
        leftovers = self.transitions.put(0, Transition(**{**parts, **FORMS[form]}))
        self.leftovers = {} if leftovers is None else {0: leftovers}
        self.arrays = BlockArrays(self.transitions, copy=True)
        n, start = len(AGENTS), layout.transition_header
        self.places = {"code": start, "rewards": start + 8, "tags": start + 8 + 8 * n, "terminated": start + 8 + 9 * n}
        self.places |= {"truncated": start + 9 + 10 * n, "presence": start + 10 + 11 * n, "infos": layout.infos}
        self.places |= {"events": start + 10 + 12 * n}
        tags = [("way", layout.observations.forms[1][2][1][2][0][2]), ("die", layout.observations.forms[0][2])]
        self.places |= {**dict(tags), "action": layout.actions.forms[0][2], "form": layout.action_header}

    def results(self) -> list[Any]:
        """What dicts, arrays and copies for restarts say: values, or the text of the error."""
        found: list[Any] = []
        for read in (
            lambda: self.transitions.read((0,), self.leftovers),
            lambda: self.arrays.read((0,), self.leftovers),
            lambda: self.transitions.snapshot(0, self.leftovers.get(0)),
        ):
            try:
                found.append(read())
            except ValueError as error:
                found.append(str(error))
        return found


@READERS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_any_damaged_byte_gives_values_or_the_error_for_damage(form, reader, monkeypatch):
    """Each byte of the header, of tags, and of the first infos."""
    one = OneRecord(form, reader, monkeypatch)
    start = one.layout.transition_header
    places = [*range(start, start + 8 + 13 * len(AGENTS) + 2), one.places["way"], one.places["die"]]
    infos = one.places["infos"]
    for place in (*places, *range(infos, infos + 80)):
        before = one.block[place]
        for value in {0, 1, 2, 3, 4, 5, 9, 10, 15, 16, 31, 32, 48, 63, 64, 68, 128, 192, 255, before ^ 1, before ^ 64}:
            one.block[place] = value
            assert {text for text in one.results() if isinstance(text, str)} <= {str(damaged(0))}
        one.block[place] = before
    assert not any(isinstance(result, str) for result in one.results())


def overwrite(one: OneRecord, field: str, content: bytes) -> None:
    one.block[one.places[field] : one.places[field] + len(content)] = content


@pytest.mark.needs("_codec")
@pytest.mark.parametrize(
    ("form", "field", "content"),
    [
        *(("plain", "code", struct.pack("=Q", code)) for code in (0xF01, 0x3001, 0x8001, 0x10001, 0x40001, 0x3000001)),
        *(("plain", "code", bytes([code])) for code in (1 | 4, 1 | 64, 1 | 64 | 128, 1 | 2 | 8)),
        *(("over", "code", struct.pack("=Q", 1 << bit)) for bit in (1, 6, 7, 8, 24)),
        ("over", "code", bytes(8)),  # nothing is written
        *(("pickled infos", "code", struct.pack("=Q", code)) for code in (0, 4, 8, 64, 1 << 40)),
        *(("plain", "rewards", struct.pack("=d", number)) for number in (np.nan, np.inf, 0.5, 1e300, 2.0**60)),
        *(("over", "rewards", struct.pack("=d", number)) for number in (np.nan, -np.inf, 0.5)),
        *(("arrays", "rewards", struct.pack("=d", number)) for number in (np.nan, 0.5)),
        *(("over", "tags", bytes([tag])) for tag in (15, 31, 47, 48, 64, 128, 255)),
        ("vector", "tags", b"\x3f"),
        *(("over", name, bytes([flag])) for name in ("terminated", "truncated") for flag in (4, 128, 255)),
        ("over", "presence", b"\xff"),
        *(("over", "events", bytes([bits])) for bits in (32, 64, 128, 255)),
        *(("infos", "infos", struct.pack("=q", used)) for used in (-1, 3, 1 << 40)),
        *(("infos", "infos", struct.pack("=q", 200) + bytes([kind])) for kind in b"xa\0s"),
        ("final", "infos", struct.pack("=q", 200) + b"l"),
    ],
    ids=repr,
)  # fmt: skip
def test_damaged_headers_and_infos(form, field, content, monkeypatch):
    one = OneRecord(form, codec.Codec, monkeypatch)
    overwrite(one, field, content)
    dicts, arrays, snapshot = one.results()
    assert dicts == str(damaged(0))
    assert (arrays == str(damaged(0))) == (field != "rewards")  # arrays have the number, of any type
    if field != "code":  # else other leftovers may be the reason, which snapshots allow
        assert snapshot == str(damaged(0))


@READERS
@pytest.mark.parametrize("code", [0, 1, 2, 4, 8, 16, 64 | 1, 64 | 2, 64 | 8, 64 | 128, 1 << 40 | 64, 2**64 - 1])
def test_damaged_codes_of_pickled_records(code, reader, monkeypatch):
    one = OneRecord("pickled", reader, monkeypatch)
    overwrite(one, "code", struct.pack("=Q", code))
    assert one.results()[:2] == [str(damaged(0))] * 2


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("field", ["die", "way"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "pickled"])
def test_damaged_tags_of_numbers(form, field, monkeypatch):
    """Arrays that compiled code reads have the number, whatever its type."""
    one = OneRecord(form, codec.Codec, monkeypatch)
    for tag in (10, 15, 26, 32, 33, 48, 64, 128, 255):
        overwrite(one, field, bytes([tag]))
        dicts, arrays, snapshot = one.results()
        assert dicts == snapshot == str(damaged(0))
        assert isinstance(arrays, tuple) == (form != "vector")


@pytest.mark.needs("_codec")
def test_numbers_that_their_type_does_not_hold(monkeypatch):
    """Such as -1 with the tag of uint8."""
    one = OneRecord("plain", codec.Codec, monkeypatch)
    one.layout.observations.groups[0][0].array[0, 0] = 300
    for tag in (5, 6):  # int8, uint8
        overwrite(one, "die", bytes([tag]))
        dicts, _, snapshot = one.results()
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, NumPy wraps
            assert dicts == snapshot == str(damaged(0))


@READERS
@pytest.mark.parametrize(("field", "bad"), [("form", (4, 8, 128, 255)), ("action", (10, 15, 48, 64, 128, 255))])
def test_damaged_actions(field, bad, reader, monkeypatch):
    """Both readers of the worker."""
    one = OneRecord("plain", reader, monkeypatch)
    actions = {"a": np.array([3]), "b": np.array([2])}
    one.arrays.read((0,), one.leftovers)
    assert one.arrays.write(actions, (0,)) == {}
    assert_same(one.transitions.action_records.read(0), {"a": np.int64(3), "b": np.int64(2)})
    for value in bad:
        overwrite(one, field, bytes([value]))
        with pytest.raises(ValueError, match=re.escape(str(damaged(0)))):
            one.transitions.action_records.read(0)
        if one.transitions.codec is not None:
            episodes = {0: SimpleNamespace(fast=(lambda actions: None, None, False, None))}
            numbers = np.zeros(10, np.int64), np.zeros(StepTimes.SIZE, np.int64), bytearray(1)
            with pytest.raises(ValueError, match=re.escape(str(damaged(0)))):
                one.transitions.codec.run((0,), 0, episodes, *numbers, None)


@READERS
@pytest.mark.parametrize("form", FORMS)
def test_what_is_known_after_a_fault(form, reader, monkeypatch):
    """Leftovers that do not go with the record are left out; nothing is known of a damaged or lost transition."""
    one = OneRecord(form, reader, monkeypatch)
    leftovers = one.leftovers.get(0)
    pickled = None if leftovers is None else dump_leftovers(leftovers)
    known = one.transitions.known(0, pickled)
    assert known is not None
    assert_same(known, one.transitions.transition(0, leftovers))
    is_pickled = isinstance(leftovers, Transition)
    without = one.transitions.known(0, None)
    assert (without is None) == is_pickled
    if without is not None:
        assert_same(without[:5], (*known[:4], {} if form == "pickled infos" else known.infos))
        older = one.transitions.known(0, dump_leftovers(Transition({}, {}, {}, {}, {}, [], [])))
        assert_same(older, without)
    overwrite(one, "code", struct.pack("=Q", 1 << 40))
    assert one.transitions.known(0, pickled) is None
    overwrite(one, "code", struct.pack("=Q", WRITTEN | 64))
    assert (one.transitions.known(0, pickled) is None) == (not is_pickled)
    one.transitions.records.clear(0)
    assert one.transitions.known(0, pickled) is None


@READERS
@pytest.mark.parametrize("form", FORMS)
def test_a_record_whose_write_has_ended_in_the_middle_is_not_written(form, reader, monkeypatch):
    """Nothing is known of it, whatever it was before: the values of the first agent are written already."""
    one = OneRecord(form, reader, monkeypatch)
    wrong = {"a": 5, "b": {**SMALL_NUMBERS["b"], "eyes": np.ones(4, np.float32)}}
    flags = {**dict.fromkeys(AGENTS, False), "__all__": False}
    with pytest.raises(Mismatch, match="agent 'b'"):
        one.transitions.put(0, Transition(wrong, {"a": 1, "b": 2}, flags, flags, {"a": {}, "b": {}}, AGENTS, AGENTS))
    leftovers = one.leftovers.get(0)
    assert one.transitions.known(0, None if leftovers is None else dump_leftovers(leftovers)) is None
    assert {*map(str, one.results())} == {str(damaged(0))}


@linux_only
@pytest.mark.needs("_codec")
def test_a_process_that_ends_while_compiled_code_writes():
    """Casting the second value ends it: the new value of the first agent is not taken for an old one."""
    layout, _ = block_of(1)
    block = mmap.mmap(-1, layout.nbytes)
    layout.bind(block)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    records = TransitionRecords(layout, block, codec=compiled)
    assert records.write(0, transition(1)) is None
    assert records.goes_with(0, None)
    observations = {"a": np.full(3, 0.5), "b": np.full(3, 1e300)}
    if (pid := os.fork()) == 0:
        np.seterr(over="call")
        np.seterrcall(lambda *_: os._exit(3))
        compiled.put(0, transition(2)._replace(observations=observations))
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert layout.observations.read(0, ["a"], True)["a"].tolist() == [0.5] * 3
    assert not records.goes_with(0, None)
    assert compiled.read((0,), {}, True)[1][0] == [0]  # left to Python


@READERS
def test_a_last_step_stays_known_while_the_next_episode_is_written_over_it(reader, monkeypatch):
    """Its rewards and flags: a worker that dies then has sent what is pickled of it."""
    one = OneRecord("plain", reader, monkeypatch)
    none, over = {**dict.fromkeys(AGENTS, False), "__all__": False}, {**dict.fromkeys(AGENTS, True), "__all__": True}
    last = Transition(SMALL_NUMBERS, {"a": 3.0, "b": 4.0}, over, none, {"a": {}, "b": {}}, [], [])
    leftovers = one.transitions.put(0, last)
    wrong = {"a": 5, "b": {**SMALL_NUMBERS["b"], "eyes": np.ones(4, np.float32)}}
    with pytest.raises(Mismatch, match="agent 'b'"):
        one.transitions.put(0, last._replace(observations=wrong, final_observations=SMALL_NUMBERS))
    known = one.transitions.known(0, None if leftovers is None else dump_leftovers(leftovers))
    assert known is not None
    assert (known.rewards, known.terminateds) == (last.rewards, last.terminateds)
