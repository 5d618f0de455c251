"""Any allocation of compiled code may fail: the call raises `MemoryError`, or leaves the rest to Python.

Then it can be repeated, and everything is as before: what was noted, shared memory, counts of references.

CPython's own test module, `_testcapi`, makes allocations of objects and of `PyMem_...` fail, so these tests run only
with Pythons that have this module. `malloc` has the content of large arrays, see the last test but one.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.array_memory import handler_name
from helpers.comparison import assert_same
from helpers.exchange import Exchange

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block import codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.spaces import tree_map
from marl_parallel.core.transition import Transition

pytestmark = [pytest.mark.needs("_codec", "_testcapi"), pytest.mark.release_independent]

RECORDS = 3
AGENTS = ["a", "b", 1000]
BOX = spaces.Box(-9, 9, (2, 2), np.float32)
TREE = spaces.Dict(x=BOX, d=spaces.Discrete(3), t=spaces.Tuple((BOX, spaces.Discrete(2))))
NO = {**dict.fromkeys(AGENTS, False), "__all__": False}
INFO: dict[str, Any] = {
    "x": 1.5, "n": np.int64(3), "s": "é", "l": [1, (2, None)], "a": np.ones(2), "d": {"big": 2**40},
}  # fmt: skip
NOTHING = np.zeros((RECORDS, len(AGENTS)), np.bool_), np.zeros(RECORDS, np.bool_)
SHARED = [
    *AGENTS, "__all__", None, False, True, np.False_, np.True_, np.dtype("f4"), np.dtype("f8"), np.dtype("i8"),
    np.float64, *NOTHING,
]  # fmt: skip
ATTEMPTS, MEASUREMENTS = 4, 5
"""A leak shows in each measurement of so many calls; other threads may allocate memory during one."""
LAST = 5
"""So many calls in turn in which nothing fails show that there are no more allocations."""


class Records:
    """A codec with its block, and values that fit."""

    def __init__(
        self, observed: spaces.Space[Any] = TREE, acted: spaces.Space[Any] = TREE, *, vectors: bool = False
    ) -> None:
        paid = {"a": spaces.Box(-9, 9, (3,), np.float64)} if vectors else {}
        of_agents = dict.fromkeys(AGENTS, observed), dict.fromkeys(AGENTS, acted)
        self.layout = Layout(Schema(AGENTS, *of_agents, None, paid), RECORDS)
        self.block = bytearray(self.layout.nbytes)
        self.layout.bind(self.block)
        self.totals = np.zeros((RECORDS, 2 * len(AGENTS) + 1))
        self.observations = {agent: observed.sample() for agent in AGENTS}
        self.actions = [{agent: acted.sample() for agent in AGENTS} for _ in range(RECORDS)]
        self.env_ids = tuple(range(RECORDS))
        self.codec = codec.Codec(*self.arguments)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of a `Codec`."""
        made: list[tuple[Any, ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "Codec", lambda *arguments: made.append(arguments))
            codec.open_codec(self.layout, self.block, infos_in_block=True, totals=self.totals)
        return made[0]

    def put(self, *transitions: Transition) -> None:
        for env_id, transition in enumerate(transitions):
            assert self.codec.put(env_id, transition)

    def clear(self) -> None:
        self.block[:] = bytes(len(self.block))

    def forget(self) -> None:
        self.totals[...] = 0
        for env_id in self.env_ids:
            self.codec.forget(env_id, False)

    def noted(self) -> tuple[Any, ...]:
        """The block, the totals, and what the codec has noted of agents."""
        lists = [self.codec.agents_of(0, RECORDS, bit) for bit in (64, 32, 1)]
        over = [self.codec.is_over(env_id) for env_id in self.env_ids]
        return bytes(self.block), self.totals.copy(), lists, over, self.codec.acting(0, RECORDS)

    def transition(self, kind: str) -> Transition:
        observations, infos = self.observations, {agent: {} for agent in AGENTS}
        rewards: dict[Any, Any] = dict.fromkeys(AGENTS, 0.5)
        plain = Transition(observations, rewards, NO, NO, infos, AGENTS, AGENTS)
        some = {agent: observations[agent] for agent in AGENTS[:2]}
        ended = {**NO, "a": True, 1000: np.True_, "__all__": True}
        return {
            "plain": plain,
            "numbers of NumPy": plain._replace(rewards=dict.fromkeys(AGENTS, np.float32(0.5))),
            "arrays of one number": plain._replace(rewards=dict.fromkeys(AGENTS, np.array([7]))),
            "integers": plain._replace(rewards=dict.fromkeys(AGENTS, 2**40)),
            "no infos": plain._replace(infos={}),
            "infos": plain._replace(infos={agent: dict(INFO) for agent in AGENTS}),
            "numeric infos": plain._replace(infos={agent: {"x": 0.5, "n": np.int64(2)} for agent in AGENTS}),
            "infos in another order": plain._replace(infos={"clock": {"s": 3}, "b": {"x": 1}, "a": {"y": 2.5}}),
            "vectors": plain._replace(rewards={**rewards, "a": np.arange(3.0)}),
            "some agents": Transition(
                some, {"a": 1.0, "b": np.float32(2)}, {**NO, 1000: True}, NO, {"a": {}}, AGENTS[:2], ["a"]
            ),
            "end": Transition(
                observations, rewards, ended, NO, {"a": {"x": 1}}, AGENTS, AGENTS, some, {"b": {"y": 2.5}},
                {"a": 7, "b": 18, 1000: 19},
            ),
            "end without infos": Transition(observations, rewards, ended, NO, {}, AGENTS, AGENTS, some),
        }[kind]  # fmt: skip


KINDS = [
    "plain", "numbers of NumPy", "arrays of one number", "integers", "no infos", "infos", "numeric infos",
    "infos in another order", "vectors", "some agents", "end", "end without infos",
]  # fmt: skip


@pytest.fixture(autouse=True)
def only_new_garbage() -> Iterator[None]:
    """A collection of garbage, which also empties CPython's lists of free objects, looks at new objects only."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def with_failing(call: Callable[[], Any], first: int, last: int) -> Any:
    """The result of a call whose allocations after the `first` fail, until the `last`, with 0 all; or `MemoryError`."""
    import _testcapi

    gc.collect()  # what is free now would need no allocation
    _testcapi.set_nomemory(first, last)
    try:
        return call()
    except MemoryError:
        return MemoryError
    finally:
        _testcapi.remove_mem_hooks()


def fail_everywhere(
    call: Callable[[], Any],
    check: Callable[[Any], bool],
    *,
    before: Callable[[], object] = int,
    shared: Sequence[Any] = (),
    modes: Sequence[bool] = (True, False),
) -> None:
    """Let each allocation of a call fail, alone and with all that follow.

    Args:
        call: What is called.
        check: Gets each result, or `MemoryError`; asserts what holds then, and returns whether nothing has failed.
        before: Runs before each call.
        shared: Objects whose reference counts must stay the same, besides those that all calls share.
        modes: True lets one allocation fail at a time, False also all that follow.
    """
    shared = [one for one in [*SHARED, *shared] if type(one) is not int or one > 256]  # anyone may use smaller ones
    for alone in modes:
        complete, first = 0, 0
        while complete < LAST:
            whole, leaked, counts, blocks = False, "", [0], 0
            for _ in range(MEASUREMENTS):
                for attempt in range(ATTEMPTS):
                    before()
                    whole = check(with_failing(call, first, first + 1 if alone else 0))
                    gc.collect()
                    if attempt == 0:
                        counts, blocks = [sys.getrefcount(one) for one in shared], sys.getallocatedblocks()
                growth = sys.getallocatedblocks() - blocks  # 0 with PYTHONMALLOC=malloc
                now = [sys.getrefcount(one) for one in shared]
                leaked = "" if now == counts and growth < ATTEMPTS - 1 else f"{growth} blocks, {counts} -> {now}"
                if not leaked:
                    break
            assert not leaked, f"allocation {first} failed, {alone=}: {leaked}"
            complete, first = complete + 1 if whole else 0, first + 1


def test_construction():
    arguments = Records().arguments
    shared = [one for one in arguments if not isinstance(one, int)]
    fail_everywhere(lambda: codec.Codec(*arguments), lambda made: made is not MemoryError, shared=shared)


@pytest.mark.parametrize("way", ["dicts", "views", "arrays", "arrays of infos"])
@pytest.mark.parametrize("kind", KINDS)
def test_reading(kind, way):
    """A call that raises has noted nothing."""
    records = Records(vectors=kind == "vectors")
    records.put(*[records.transition(one) for one in (kind, kind if way == "arrays of infos" else "plain", kind)])
    leaves: list[Any] = []
    for column, positions in records.layout.observations.groups:
        tree_map(lambda view, positions=tuple(positions): leaves.append((view, positions)), column.array)
    arguments = 0, RECORDS, tuple(leaves), None, False, {}, True, way == "arrays of infos", True, *NOTHING

    def read() -> Any:
        if way in ("dicts", "views"):
            return records.codec.read(records.env_ids, {}, way == "dicts")
        return records.codec.read_arrays(*arguments)

    before, expected, after = records.noted(), read(), records.noted()

    def check(result: Any) -> bool:
        assert_same(records.noted(), before if result is MemoryError else after)
        if result is not MemoryError:
            assert_same(result, expected)
        return result is not MemoryError

    fail_everywhere(read, check, before=records.forget, shared=[*records.observations.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_parts(kind):
    records = Records(vectors=kind == "vectors")
    records.put(records.transition(kind))
    expected = records.codec.parts(0, True)

    def check(result: Any) -> bool:
        if result is not MemoryError:
            assert_same(result, expected)
        return result is not MemoryError

    fail_everywhere(lambda: records.codec.parts(0, True), check)


@pytest.mark.parametrize("kind", KINDS)
def test_put(kind):
    """Returns 0 where Python has to write the transition, 2 where it has to pickle the infos."""
    records = Records(vectors=kind == "vectors")
    transition = records.transition(kind)

    def put() -> Any:
        return records.codec.put(0, transition)

    records.clear()
    expected, block = put(), bytes(records.block)

    def check(result: Any) -> bool:
        whole = result == expected and bytes(records.block) == block
        assert whole or result in (0, 2, MemoryError)
        assert put() == expected
        assert bytes(records.block) == block
        return bool(whole)

    values = [value for part in transition if isinstance(part, dict) for value in part.values()]
    fail_everywhere(put, check, before=records.clear, shared=[*transition, *values])


@pytest.mark.parametrize("agents", [AGENTS, AGENTS[:2], [*reversed(AGENTS)]], ids=str)
def test_put_actions(agents):
    """Returns False if Python has to pickle the actions."""
    records = Records()
    actions = {agent: records.actions[0][agent] for agent in agents}

    def put() -> Any:
        return records.codec.put_actions(0, actions)

    records.clear()
    assert put()
    block = bytes(records.block)

    def check(result: Any) -> bool:
        assert result in (True, False, MemoryError)
        whole = result is True
        assert whole or put()
        assert bytes(records.block) == block
        return whole

    fail_everywhere(put, check, shared=[*actions.values()])


@pytest.mark.parametrize("all_count", [True, False])
@pytest.mark.parametrize("agents", [AGENTS, AGENTS[:2], [*reversed(AGENTS)]], ids=str)
def test_write(agents, all_count):
    """Returns the first environment whose actions Python has to write."""
    records = Records()
    records.put(*[records.transition("some agents")] * RECORDS)
    records.codec.read(records.env_ids, {}, True)
    actions = [{agent: of_env[agent] for agent in agents} for of_env in records.actions]

    def write() -> Any:
        return records.codec.write(records.env_ids, actions, 0, all_count, False)

    records.clear()
    assert write() == RECORDS
    block = bytes(records.block)

    def check(result: Any) -> bool:
        assert result is MemoryError or 0 <= result <= RECORDS
        assert result != RECORDS or bytes(records.block) == block
        whole = result == RECORDS
        assert write() == RECORDS
        assert bytes(records.block) == block
        return bool(whole)

    values = [value for of_env in actions for value in of_env.values()]
    fail_everywhere(write, check, before=records.clear, shared=[*actions, *values])


def test_write_arrays():
    records = Records(acted=spaces.Discrete(9))
    columns = records.layout.actions.targets_of([AGENTS])
    values = [np.arange(RECORDS * len(AGENTS), dtype=np.int32).reshape(RECORDS, len(AGENTS))]

    def write() -> Any:
        return records.codec.write_arrays(0, RECORDS, columns, values, None)

    records.clear()
    assert write()
    block = bytes(records.block)

    def check(result: Any) -> bool:
        assert result in (True, MemoryError)
        assert result is MemoryError or bytes(records.block) == block
        whole = result is not MemoryError
        assert write()
        assert bytes(records.block) == block
        return whole

    fail_everywhere(write, check, before=records.clear, shared=values)


def all_alive() -> bytes:
    """New bytes: `run` begins with these lives."""
    return bytes([32] * len(AGENTS) + [0])


RULES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "no rules": lambda: (None, False, None),
    "goes on": lambda: (lambda: True, False, None),
    "turn": lambda: (lambda: 2, True, None),
    "lives": lambda: (None, False, (None, all_alive())),
    "agents left": lambda: (None, False, (lambda: ["b"], all_alive())),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", ["plain", "numbers of NumPy", "integers", "infos", "some agents"])
def test_run(kind, rules):
    """Returns the environment whose step Python has to complete, and what the simulator returned."""
    records = Records()
    records.put(*[records.transition("plain")] * RECORDS)
    records.codec.read(records.env_ids, {}, True)
    assert records.codec.write(records.env_ids, records.actions, 0, True, False) == RECORDS
    empty = bytes(records.block)
    dicts = (*records.transition(kind)[:5],)
    received: list[Any] = []

    def step(actions: Any) -> Any:
        received.append(actions)
        return dicts

    episode = SimpleNamespace()
    episodes = dict.fromkeys(records.env_ids, episode)
    arguments = episodes, np.zeros(10, np.int64), np.zeros(112, np.int64), bytearray(1), None

    def run() -> Any:
        return records.codec.run(records.env_ids, 0, *arguments)

    def restart() -> None:
        received.clear()
        records.block[:] = empty
        episode.fast = step, *RULES[rules]()

    restart()
    expected = run()
    block = bytes(records.block)

    def check(result: Any) -> bool:
        if result is not MemoryError and result is not None:
            env_id, letter, value = result
            assert env_id == records.codec.place
            assert letter == "c" or value in (dicts, dicts[4])
        whole = result == expected and bytes(records.block) == block
        for actions, given in zip(received, records.actions):
            assert_same(actions, given)
        restart()
        assert run() == expected
        assert bytes(records.block) == block
        received.clear()
        return bool(whole)

    values = [value for part in dicts for value in part.values()]
    fail_everywhere(run, check, before=restart, shared=[*dicts, *values, step])


@pytest.mark.parametrize("name", ["agents_of", "acting", "lives", "sums"])
def test_other_calls(name):
    records = Records()
    records.put(*[records.transition("some agents")] * RECORDS)
    records.codec.read(records.env_ids, {}, True)
    records.codec.write(records.env_ids, records.actions, 0, True, False)
    dicts, alive = (*records.transition("plain")[:5],), all_alive()
    state = np.zeros(10, np.int64), np.zeros(112, np.int64), bytearray(1), None
    episodes = dict.fromkeys(records.env_ids, SimpleNamespace(fast=(lambda actions: dicts, None, False, (None, alive))))

    def run() -> None:
        assert records.codec.run((0,), 0, episodes, *state) is None

    arguments = {"agents_of": (0, RECORDS, 64), "acting": (0, RECORDS), "lives": (0, alive), "sums": ()}[name]
    run()
    expected = getattr(records.codec, name)(*arguments)
    steps = 0

    def before() -> None:
        nonlocal steps
        run()
        steps += 1

    def check(result: Any) -> bool:
        nonlocal steps
        if name == "sums":  # a call that raises forgets nothing
            assert result is MemoryError or result[1] == steps
            steps = steps if result is MemoryError else 0
        elif result is not MemoryError:
            assert_same(result, expected)
        return result is not MemoryError

    fail_everywhere(lambda: getattr(records.codec, name)(*arguments), check, before=before)


def test_exchange():
    """A call that raises has sent nothing; -1.0 means that no reply has been taken."""
    exchange = Exchange()

    def check_sent(result: Any) -> bool:
        sent = [pair.requests.ready.try_take() for pair in exchange.pairs]
        assert sent == [result is not MemoryError] * 2
        for pair in exchange.pairs if all(sent) else ():
            assert pair.requests.take() == 7
        return result is not MemoryError

    def check_waited(result: Any) -> bool:
        whole = result is not MemoryError and result >= 0
        if not whole:
            assert exchange.wait(0.0) >= 0
        assert not any(pair.replies.ready.try_take() for pair in exchange.pairs)
        return bool(whole)

    def reply() -> None:
        exchange.send()
        for worker, pair in enumerate(exchange.pairs):
            assert pair.requests.ready.try_take()
            assert pair.requests.take() == 7
            exchange.reply(worker, 9)

    fail_everywhere(exchange.send, check_sent)
    fail_everywhere(exchange.wait, check_waited, before=reply)


def test_large_arrays():
    """NumPy's setting for memory is restored, at the latest by the next call.

    It is a context variable. CPython crashes if two allocations fail while one is set, so they fail one at a time.
    """
    records = Records(spaces.Box(0, 255, (300, 301), np.uint8))
    records.put(*[records.transition("plain")] * RECORDS)
    usual = handler_name()
    expected = records.codec.read(records.env_ids, {}, True)

    def check(result: Any) -> bool:
        if result is not MemoryError:
            assert_same(result, expected)
        whole = result is not MemoryError and handler_name() == usual
        del result
        records.codec.read(records.env_ids, {}, True)
        assert handler_name() == usual
        return whole

    fail_everywhere(lambda: records.codec.read(records.env_ids, {}, True), check, before=records.forget, modes=[True])


def test_content_of_large_arrays():
    """The system has no memory for 256 TB."""
    records = Records(spaces.Box(0, 255, (300, 301), np.uint8))
    records.put(records.transition("plain"))
    *first, forms, types, dicts, activity, infos, totals, in_infos, same_step, moment = records.arguments
    actions, ((kind, offset, dtype, *_), *others), *more = forms
    forms = actions, ((kind, offset, dtype, (2**48,), 2**48), *others), *more
    compiled = codec.Codec(*first, forms, types, dicts, activity, infos, totals, in_infos, same_step, moment)
    usual = handler_name()
    for _ in range(3):
        with pytest.raises(MemoryError):
            compiled.read((0,), {}, True)
        assert handler_name() == usual
        assert records.totals[0, -1] == 0


IMPORTS = """
import _imp, _testcapi, importlib.util, sys
import numpy  # else it would be imported without memory
spec = importlib.util.spec_from_file_location("marl_parallel.core._codec", sys.argv[1])
for first in range(10_000):
    _testcapi.set_nomemory(first, first + 1)
    try:
        module = _imp.create_dynamic(spec)
    except (ImportError, MemoryError):
        module = None
    finally:
        _testcapi.remove_mem_hooks()
    if module is not None:
        print(first, module.Codec.__name__, module.LARGE)
        break
"""


def test_import():
    assert codec._codec is not None
    command = [sys.executable, "-c", IMPORTS, codec._codec.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.split()
    assert int(first) > 5
    assert rest == ["Codec", "65536"]
