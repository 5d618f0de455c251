"""`forward_logs=`: records of `logging` in worker processes reach the loggers of the caller's process."""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, TESTS
from helpers.interruptions import calling_at
from helpers.launching import linux_only
from helpers.processes import wait_for
from helpers.setups import Setup
from helpers.start_methods import also_portable, chosen
from simulators.counting import ACTIONS
from simulators.logging_envs import (
    ExitsThere,
    Logging,
    RaisesThere,
    exits,
    is_killed,
    logs_and,
    put,
    raises,
    standard_handler,
    write_bytes,
)

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, WorkerCrashed, WorkerTimeout, make
from marl_parallel.core.reports import log_records
from marl_parallel.core.reports.log_records import RING_NBYTES, RecordRings, Ring

pytestmark = pytest.mark.release_independent


@pytest.fixture(autouse=True)
def same_loggers_afterwards() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)
    for name in ("sim", "sim.life", "sim.loud", "sim.silent", "sim.death", "new"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.propagate, logger.disabled, logger.handlers = True, False, []


@pytest.fixture
def records(caplog) -> Callable[[], list[logging.LogRecord]]:
    """The records of simulators since the last call."""
    caplog.set_level(logging.INFO)
    caplog.handler.setLevel(logging.NOTSET)

    def take() -> list[logging.LogRecord]:
        found = [record for record in caplog.records if record.name.startswith("sim")]
        caplog.clear()
        return found

    return take


@pytest.fixture
def logs(build, request) -> Callable[..., ParallelEnv]:
    """Two workers, the first of which has two environments."""

    def create(num_envs: int = 3, **more: Any) -> ParallelEnv:
        return build([Logging] * num_envs, Setup("process", True, 2), **chosen(request), **more)

    return create


def texts(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


def worker_log(env_id: int, env: ParallelEnv, *args: Any, **how: Any) -> None:
    env.call("log", *args, env_ids=[env_id], **how)


@also_portable
def test_records_have_environment_and_worker(logs, records):
    env = logs()
    born = sorted((one.env_id, one.worker, one.name, one.getMessage()) for one in records())
    assert born == [(env_id, worker, "sim.life", "constructed") for env_id, worker in ((0, 0), (1, 0), (2, 1))]
    env.reset()
    thread = threading.get_ident()
    delivered: list[int] = []
    handler = logging.Handler()
    handler.emit = lambda _: delivered.append(threading.get_ident())  # type: ignore[method-assign]
    logging.getLogger("sim").addHandler(handler)
    pids = env.call("pid")
    env.set_attr("at_step", [functools.partial(logging.getLogger("sim.x").info, "a %s of %d", "step", 5)] * 3)
    env.step([ACTIONS] * 3)
    found = sorted(records(), key=lambda one: one.env_id)
    assert [(one.env_id, one.worker, one.process) for one in found] == [
        (0, 0, pids[0]),
        (1, 0, pids[1]),
        (2, 1, pids[2]),
    ]
    assert {(one.name, one.levelno, one.msg, one.args) for one in found} == {
        ("sim.x", logging.INFO, "a %s of %d", ("step", 5))
    }
    assert {*delivered} == {thread}
    assert len(delivered) == 3


def test_levels_are_those_of_the_caller(logs, records):
    logging.getLogger("sim.loud").setLevel(logging.DEBUG)
    logging.getLogger("sim.silent").setLevel(logging.ERROR)
    env = logs()
    names = ("sim.loud", "sim.loud.below", "sim.silent", "sim.silent.below", "sim.other", "other")
    expected = [logging.getLogger(name).getEffectiveLevel() for name in names]
    assert [effective for _, effective in env.call("levels", *names)[2]] == expected
    records()
    for name in names:
        for level in (logging.DEBUG, logging.INFO, logging.ERROR):
            worker_log(2, env, name, level, "%s at %s", name, level)
    passed = [f"{name} at {level}" for name, least in zip(names, expected) for level in (10, 20, 40) if level >= least]
    assert texts(records()) == [text for text in passed if text.startswith("sim")]


def test_levels_are_refreshed_at_each_reset(logs, records):
    env = logs()
    assert not any(env.call("enabled", "sim.loud", logging.DEBUG))
    logging.getLogger("sim.loud").setLevel(logging.DEBUG)
    logging.disable(logging.INFO)
    assert not any(env.call("enabled", "sim.loud", logging.DEBUG))
    assert all(env.call("enabled", "sim.loud", logging.INFO))
    env.reset()
    assert not any(env.call("enabled", "sim.loud", logging.INFO))
    logging.disable(logging.NOTSET)
    env.reset_async()
    env.recv()
    assert all(env.call("enabled", "sim.loud", logging.DEBUG))
    logging.getLogger("sim.loud").setLevel(logging.NOTSET)
    root = logging.root.level
    try:
        logging.root.setLevel(logging.ERROR)
        env.reset(env_ids=[2])  # only this worker learns of it
        assert [effective for ((_, effective),) in env.call("levels", "sim.loud")] == [logging.DEBUG] * 2 + [
            logging.ERROR
        ]
    finally:
        logging.root.setLevel(root)


def test_new_workers_get_the_present_levels(build, records):
    """After a crash, and standby workers, which are constructed while others go on."""
    env = build(
        [functools.partial(Logging, 2)] * 2,
        Setup("process", True, 2),
        on_error="restart",
        recycle=RecyclePolicy(max_episodes=2),
    )
    logging.getLogger("sim.loud").setLevel(logging.DEBUG)
    env.reset()
    env.set_attr("at_step", [exits, None])
    env.step([ACTIONS] * 2)
    assert all(env.call("enabled", "sim.loud", logging.DEBUG))
    pids = {*env.call("pid")}
    while env.stats().recycled < 2:
        env.step([ACTIONS] * 2)
    assert pids.isdisjoint(env.call("pid"))
    assert all(env.call("enabled", "sim.loud", logging.DEBUG))


def test_standby_workers_get_the_levels_of_the_reset_that_begins_their_episode(build):
    """They were constructed before it."""
    env = build([functools.partial(Logging, 2)] * 2, Setup("process", True, 2), recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    logger = logging.getLogger("sim.loud")
    for level in (logging.DEBUG, logging.ERROR, logging.INFO, logging.WARNING):
        for _ in range(2):
            env.step([ACTIONS] * 2)
        logger.setLevel(level)
        env.reset()
        assert [of_env for (of_env,) in env.call("levels", "sim.loud")] == [(level, level)] * 2
    assert env.stats().recycled >= 8


def test_what_a_simulator_sets_stays_until_the_caller_changes_it(logs, records):
    env = logs()
    env.call("configure", functools.partial(logging.getLogger("sim.loud").setLevel, logging.DEBUG))
    env.reset()
    assert all(env.call("enabled", "sim.loud", logging.DEBUG))
    logging.getLogger("sim.loud").setLevel(logging.ERROR)
    env.reset()
    assert not any(env.call("enabled", "sim.loud", logging.INFO))
    env.call("configure", functools.partial(logging.disable, logging.WARNING))
    logging.getLogger("sim.silent").setLevel(logging.INFO)  # another setting
    env.reset()
    assert not any(env.call("enabled", "sim.silent", logging.WARNING))
    logging.disable(logging.DEBUG)
    env.reset()
    assert all(env.call("enabled", "sim.silent", logging.WARNING))


def test_unusual_values(logs, records, capfd):
    env = logs()
    records()
    env.call("log_unusual_values", env_ids=[2])
    one, two, three, four, five, six = records()
    assert (one.getMessage(), one.args, one.size) == ("one <only here>", (), 3)
    assert one.lock.startswith("<unlocked _thread.lock")
    assert (two.getMessage(), two.more) == ("two <fails there>", "<fails there>")
    assert (repr(three.msg), three.getMessage()) == ("ValueError('three')", "three")
    assert (four.getMessage(), four.args) == ("[4]", {"four": [4]})
    assert (five.msg, five.args) == ("%d", ("not a number",))  # a handler reports this mistake as everywhere
    assert six.getMessage() == "six"
    worker_log(0, env, "sim", logging.INFO, "%s", np.arange(3))
    (array,) = records()
    assert array.getMessage() == "[0 1 2]"
    assert array.args[0].tolist() == [0, 1, 2]


def test_what_only_a_worker_can_read(logs, records):
    """No record closes the environments, whatever is in it."""
    env = logs()
    records()
    env.call("log_what_only_a_worker_can_read", env_ids=[2])
    found = {record.getMessage(): record for record in records()}
    assert {*found} == {"1", "two", "3", "four", "five"}
    assert found["four"].size == 4
    assert len(env.reset()[0]) == 3


def test_exceptions_are_text(logs, records):
    env = logs()
    records()
    env.call("log_exception", env_ids=[2])
    (record,) = records()
    assert record.exc_info is None
    assert record.exc_text.endswith("IndexError: pop from empty list")
    assert "in log_exception" in record.exc_text
    assert "log_exception" in record.stack_info
    assert logging.Formatter().format(record).startswith("caught\nTraceback (most recent call last):")


@also_portable
@pytest.mark.parametrize("fault", [exits, is_killed, raises])
def test_records_before_a_failure_come_before_its_error(fault, logs, records):
    env = logs()
    env.reset()
    records()
    env.set_attr("at_step", [None, None, logs_and(fault)])
    with pytest.raises(EnvError if fault is raises else WorkerCrashed):
        env.step([ACTIONS] * 3)
    assert next((one.getMessage(), one.env_id) for one in records()) == ("last words", 2)


@also_portable
def test_records_before_a_restart_come_before_its_report(logs, caplog):
    env = logs(on_error="restart")
    env.reset()
    caplog.clear()
    env.set_attr("at_step", [None, None, logs_and(is_killed)])
    env.step([ACTIONS] * 3)
    own = [one.name for one in caplog.records if one.name in ("sim.death", "marl_parallel")]
    assert own == ["sim.death", "marl_parallel"]


@also_portable
def test_records_before_a_timeout_come_before_its_error(logs, records):
    env = logs(step_timeout=1.0)
    env.reset()
    records()
    env.set_attr("at_step", [None, None, logs_and(functools.partial(time.sleep, 60))])
    with pytest.raises(WorkerTimeout):
        env.step([ACTIONS] * 3)
    assert texts(records())[0] == "last words"


@also_portable
def test_records_come_while_a_call_goes_on(logs, tmp_path):
    """A constructor or reset that takes minutes can be watched."""
    env = logs()
    env.reset()
    came = tmp_path / "came"
    handler = logging.Handler()
    handler.emit = lambda _: came.touch()  # type: ignore[method-assign]
    logging.getLogger("sim.death").addHandler(handler)
    env.set_attr("at_step", [logs_and(functools.partial(wait_for, came.exists)), None, None])
    env.step([ACTIONS] * 3)


@also_portable
def test_full_queues_drop_records_and_say_so_once(logs, caplog, records):
    """The worker does not wait, although nobody takes the records of the first two calls."""
    env = logs()
    env.reset()
    counts = []
    for _ in range(3):
        records()
        env.set_attr("at_step", [None, None, functools.partial(Logging.log_many, None, 3000, 100)])
        status = env.stepper.source.backend.statuses[1]
        steps = status.stats.steps
        env.send([ACTIONS], [2])
        wait_for(lambda: status.stats.steps > steps and status.settled is not None)  # noqa: B023
        caplog.clear()
        env.recv()
        counts.append(sum(one.name == "sim" for one in caplog.records))
        (*warned,) = [one for one in caplog.records if one.name == "marl_parallel"]
        if len(counts) == 1:
            (warning,) = warned
            assert warning.levelno == logging.WARNING
            assert warning.getMessage().startswith(f"{3000 - counts[0]} log records of simulators were dropped so far")
        else:
            assert not warned
        assert texts([one for one in caplog.records if one.name == "sim"])[:2] == [f"{n} {100 * 'x'}" for n in (0, 1)]
    assert min(counts) >= 300
    assert max(counts) < 3000
    caplog.clear()
    env.close()
    (total,) = [one for one in caplog.records if one.name == "marl_parallel"]
    assert total.getMessage() == f"{9000 - sum(counts)} log records of simulators were dropped in total"
    assert total.levelno == logging.INFO


def test_long_records_are_shortened(logs, records):
    env = logs()
    records()
    worker_log(2, env, "sim", logging.INFO, "%s", "y" * RING_NBYTES, extra={"more": 1})
    worker_log(2, env, "sim", logging.INFO, "%s", "y" * 9000)
    long, whole = records()
    assert long.getMessage() == 4096 * "y" + f"... ({RING_NBYTES} characters)"
    assert (long.env_id, long.worker) == (2, 1)
    assert whole.getMessage() == 9000 * "y"


def test_many_rounds_through_the_queue(logs, records):
    """Records of all sizes, so that they lie across its end."""
    env = logs(1)
    records()
    for size in range(60):
        env.call("log_many", 20, 37 * size)
        assert texts(records()) == [f"{number} {37 * size * 'x'}" for number in range(20)]


def test_threads_of_simulators(logs, records):
    env = logs()
    records()
    env.call("log_in_threads", 4, 25, env_ids=[1])
    found = records()
    assert sorted(texts(found)) == sorted(f"{number} {place}" for number in range(4) for place in range(25))
    assert {(one.env_id, one.worker) for one in found} == {(1, 0)}
    env.call("log_later", "nobody runs", env_ids=[0])
    env.call("pid")
    env.call("configure", time.time)  # a request of which nothing remains
    env.call(lambda simulator: simulator._release.set(), env_ids=[0])
    wait_for(lambda: not env.call(lambda simulator: simulator._thread.is_alive(), env_ids=[0])[0])
    (late,) = records()
    assert late.getMessage() == "nobody runs"


@linux_only
def test_forked_processes_of_simulators_do_not_take_part(logs, records, capfd):
    """They log as they did without workers: by their own handlers."""
    env = logs()
    records()
    assert env.call("log_in_children", env_ids=[2]) == (["0"],)
    assert texts(records()) == ["in the worker"]
    worker_log(2, env, "sim", logging.INFO, "goes on")
    assert texts(records()) == ["goes on"]
    assert capfd.readouterr().err == "in a fork\nin a child\n"


@also_portable
def test_records_of_close(logs, records):
    env = logs()
    records()
    env.close()
    assert sorted((one.getMessage(), one.env_id) for one in records()) == [("closed", env_id) for env_id in range(3)]


def test_handlers_that_raise_change_nothing(logs, records, capfd):
    env = logs()
    env.reset()

    def emit(_: logging.LogRecord) -> None:
        raise RuntimeError("a bad handler")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("sim").addHandler(handler)
    env.set_attr("at_step", [functools.partial(logging.getLogger("sim").warning, "text")] * 3)
    assert len(env.step([ACTIONS] * 3)[0]) == 3
    assert capfd.readouterr().err.count("RuntimeError: a bad handler") == 3


@also_portable
def test_a_handler_that_closes(logs, records):
    env = logs()
    env.reset()
    handler = logging.Handler()
    handler.emit = lambda _: env.close()  # type: ignore[method-assign]
    logging.getLogger("sim.death").addHandler(handler)
    env.set_attr("at_step", [logs_and(time.time)] * 3)
    with pytest.raises(Exception, match="closed"):
        env.step([ACTIONS] * 3)
    assert "last words" in texts(records())


# -- records that cannot be read ---------------------------------------------------------------------------------------


def framed(record: bytes) -> bytes:
    """A record as it stands in a queue."""
    return struct.pack("=2I", len(record), zlib.crc32(record)) + record


def pickled(value: Any) -> bytes:
    return framed(pickle.dumps(value))


ATTRIBUTES: dict[str, Any] = {"name": "sim", "msg": "bad", "args": (), "levelno": 30, "created": 1.0}

UNREADABLE = {
    "zeros": bytes(64),
    "part of a frame": bytes(3),
    "torn": framed(200 * b"x")[:100] + bytes(108),
    "wrong checksum": struct.pack("=2I", 5, 1) + b"abcde",
    "too large a size": struct.pack("=2I", 0xFFFFFFFF, 1) + bytes(20),
    "no pickle": framed(b"no pickle"),
    "cut pickle": framed(pickle.dumps((ATTRIBUTES, {}, False))[:-9]),
    "unknown class": framed(b"cnowhere\nNothing\n."),
    "exits when it is unpickled": pickled(ExitsThere()),
    "raises an error without a text": pickled(RaisesThere()),
    "another value": pickled(3),
    "no attributes": pickled((None, {}, False)),
    "no values": pickled((ATTRIBUTES, 5, False)),
    "a time that cannot be read": pickled(({**ATTRIBUTES, "msg": "no time"}, {}, False)),
}
"""What stands in a queue in place of a record, by its cause."""
FEW = ["zeros", "torn", "no pickle", "exits when it is unpickled", "a time that cannot be read"]


class Timeless(logging.LogRecord):
    """A program's own class of records, which fails for some."""

    def __getattribute__(self, name: str) -> Any:
        if name == "created" and self.msg == "no time":
            raise RuntimeError("no time")
        return super().__getattribute__(name)


@pytest.fixture
def record_factory() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Sets the class of records of this program until the end of the test; its workers make plain ones."""
    before = logging.getLogRecordFactory()
    yield logging.setLogRecordFactory
    logging.setLogRecordFactory(before)


@pytest.fixture
def timeless(record_factory) -> None:
    record_factory(Timeless)


@pytest.mark.parametrize("backend", ["process", "portable", "hybrid"])
def test_records_that_cannot_be_read_are_dropped(backend, build, records, timeless, caplog):
    """A bad record does not end the run; it is counted, and later records come."""
    env = build([Logging] * 2, Setup(backend, True, 2))
    env.reset()
    for number, data in enumerate(UNREADABLE.values()):
        caplog.clear()
        env.set_attr("at_step", [None, functools.partial(write_bytes, data)])
        env.step([ACTIONS] * 2)
        env.set_attr("at_step", [None, functools.partial(logging.getLogger("sim").warning, "after %d", number)])
        env.step([ACTIONS] * 2)
        assert {*texts(records())} == {f"after {number}"}
    assert env.call("pid", env_ids=[1])
    env.close()
    (total,) = [one for one in caplog.records if "in total" in one.getMessage()]
    assert total.getMessage() == f"{len(UNREADABLE)} log records of simulators were dropped in total"


@pytest.mark.parametrize("cause", FEW)
def test_the_first_record_that_cannot_be_read_is_reported(cause, logs, records, timeless, caplog):
    env = logs(1)
    env.reset()
    env.call("configure", functools.partial(write_bytes, UNREADABLE[cause]))
    env.call("pid")
    (warning,) = [one for one in caplog.records if one.name == "marl_parallel"]
    assert warning.levelno == logging.WARNING
    assert re.match("1 log records of simulators were dropped so far: 1 could not be read", warning.getMessage())
    assert "faster" not in warning.getMessage()


@pytest.mark.parametrize("cause", FEW)
def test_a_worker_that_dies_after_a_bad_record_is_replaced(cause, logs, records, timeless):
    def break_all() -> None:
        write_bytes(UNREADABLE[cause])
        is_killed()

    env = logs(1, on_error="restart")
    env.reset()
    env.set_attr("at_step", [break_all])
    assert env.step([ACTIONS])[4][0]["__common__"]["restarted"]
    records()
    worker_log(0, env, "sim", logging.WARNING, "after")
    assert texts(records()) == ["after"]


def test_records_whose_bytes_come_late_are_read(records, caplog, monkeypatch):
    """Some processors show another process a count before the bytes that it counts."""
    buffer = mmap.mmap(-1, RecordRings.nbytes(1))
    rings, ring = RecordRings(buffer, 0, 1), Ring(buffer, 0, 1, 0)
    late = b""
    monkeypatch.setattr(time, "sleep", lambda _: put(ring, late, again=True))
    for _ in range(2000):  # several times around the ring: what was there before is an older record
        late = b"".join(pickled(({**ATTRIBUTES, "msg": f"late {number}"}, {}, False)) for number in range(2))
        put(ring, bytes(len(late)))
        rings.deliver()
        assert texts(records()) == ["late 0", "late 1"]
    rings.finish()
    assert not caplog.records


def test_a_damaged_record_takes_no_other_with_it(records):
    buffer = mmap.mmap(-1, RecordRings.nbytes(1))
    rings, ring = RecordRings(buffer, 0, 1), Ring(buffer, 0, 1, 0)
    before, after = (pickled(({**ATTRIBUTES, "msg": text}, {}, False)) for text in ("before", "after"))
    put(ring, before + UNREADABLE["wrong checksum"] + after)
    rings.deliver()
    assert texts(records()) == ["before", "after"]


@pytest.mark.parametrize("number", [2**64 - 1, 2**63, 2**64 - 10])
def test_numbers_that_a_simulator_has_overwritten_never_fail_a_record(number):
    """Neither in this worker, nor in the next one, which goes on with the ring."""
    buffer = mmap.mmap(-1, RecordRings.nbytes(1))
    rings, ring = RecordRings(buffer, 0, 1), Ring(buffer, 0, 1, 0)
    ring.numbers[0:3] = memoryview(struct.pack("=3Q", number, 0, number)).cast("B").cast("Q")
    for _ in range(2):
        ring.write(b"record")
        rings.deliver()
        ring = Ring(buffer, 0, 1, 0)
    ring.write(b"record")


def test_closing_in_the_middle_of_a_call_that_brings_records(records):
    """As a signal handler may do: each record comes once."""
    closed_in = set[str]()
    for number in itertools.count(1):
        buffer = mmap.mmap(-1, RecordRings.nbytes(2))
        rings = RecordRings(buffer, 0, 2)
        for worker in range(2):
            ring = Ring(buffer, 0, 2, worker)
            for place in range(2):
                values = {("msg", "args"): pickle.dumps(("%d %d", (place, np.int8(worker))))}  # unpickled by itself
                ring.write(pickle.dumps(({**ATTRIBUTES, "created": place + worker / 2}, values, False)))
        with calling_at(number, log_records, rings.finish) as functions:
            rings.deliver()
        came = texts(records())
        assert sorted(came) == ["0 0", "0 1", "1 0", "1 1"], functions
        closed_in.update(functions)
        if not functions:
            break
    assert closed_in >= {"deliver", "take", "_record_at", "_unpickled"}
    assert came == ["0 0", "0 1", "1 0", "1 1"]  # oldest first, where nothing closes


def test_values_that_end_the_process_stay_text(logs, records):
    env = logs(1)
    records()
    env.call("log_values_that_exit")
    (one,) = records()
    assert (one.getMessage(), one.more) == ("one <exits there>", "<exits there>")


def test_record_factory_that_raises(logs, records, record_factory, caplog):
    """`logging.makeLogRecord` passes no name to the factory, which many do not expect."""

    def factory(name: str, *args: Any, **how: Any) -> logging.LogRecord:
        return logging.LogRecord(name.lower(), *args, **how)

    env = logs(1)
    record_factory(factory)
    env.reset()
    records()
    worker_log(0, env, "sim", logging.WARNING, "lost")
    assert not records()
    record_factory(logging.LogRecord)
    worker_log(0, env, "sim", logging.WARNING, "found")
    assert texts(records()) == ["found"]


# -- handlers of simulators --------------------------------------------------------------------------------------------


def basic_config() -> None:
    logging.basicConfig(level=logging.DEBUG, format="own: %(message)s")


class ConsoleHandler(logging.Handler):
    """Like rich's, which has no stream, but a console with a file."""

    def __init__(self) -> None:
        super().__init__()
        self.console = types.SimpleNamespace(file=sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=self.console.file)


def console_handler() -> None:
    logging.getLogger("sim").addHandler(ConsoleHandler())


def forced_config() -> None:
    logging.basicConfig(level=logging.DEBUG, format="own: %(message)s", force=True)


@also_portable
@pytest.mark.parametrize(
    "how",
    [basic_config, forced_config, functools.partial(standard_handler, "sim.loud"), console_handler],
    ids=["basic", "forced", "own", "console"],
)
def test_lines_are_not_doubled(how, logs, records, capfd):
    """A handler in the worker that prints is left out where the caller's process has handlers."""
    env = logs()
    env.call("configure", how)
    records()
    worker_log(2, env, "sim.loud", logging.INFO, "once")
    assert texts(records()) == ["once"]
    assert capfd.readouterr() == ("", "")


def test_files_of_simulators_get_their_records(logs, records, tmp_path):
    env = logs()
    records()

    def configure() -> None:
        logging.getLogger("sim").addHandler(logging.FileHandler(tmp_path / "own.log"))

    env.call("configure", configure, env_ids=[2])
    worker_log(2, env, "sim", logging.INFO, "both")
    assert texts(records()) == ["both"]
    assert (tmp_path / "own.log").read_text() == "both\n"


PLAIN = """
import logging, sys
sys.path.insert(0, {tests!r})
from helpers.start_methods import arguments
from simulators.logging_envs import Logging, standard_handler
from marl_parallel import ParallelEnv

def configured():
    logging.basicConfig(level=logging.INFO, format="own %(message)s")

with ParallelEnv([Logging], **arguments({start_method!r})) as env:
    env.call("log", "sim", logging.WARNING, "warning")  # Python prints it, with no handler anywhere
    env.call("log", "sim", logging.INFO, "below")
    env.call("configure", configured)  # now the worker prints
    env.call("log", "sim", logging.WARNING, "warning")
    env.call("log", "sim", logging.INFO, "info")
    logging.basicConfig(format="caller %(message)s")  # now this process prints
    env.reset()
    env.call("log", "sim", logging.WARNING, "warning")
    env.call("log", "sim", logging.INFO, "info")
with ParallelEnv([Logging], forward_logs=False, **arguments({start_method!r})) as env:
    env.call("log", "sim", logging.WARNING, "left in the worker")
"""


@linux_only
def test_programs_without_handlers(start_method):
    text = PLAIN.format(tests=str(TESTS), start_method=start_method)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stderr.splitlines()
    printed = ["warning", "own warning", "own info", "caller warning", "caller info", "caller closed"]
    assert lines == [*printed, "left in the worker"]


# -- files, other backends, arguments ----------------------------------------------------------------------------------


@also_portable
def test_files_of_log_dir_have_the_records_too(logs, records, tmp_path, capfd):
    env = logs(log_dir=tmp_path)
    records()
    worker_log(2, env, "sim", logging.WARNING, "to %s", "both")
    assert texts(records()) == ["to both"]
    lines = (tmp_path / "worker-1.log").read_text().splitlines()
    assert re.fullmatch(r"[-\d]+ [:,\d]+ WARNING sim \(env 2\): to both", lines[-1])
    env.call("configure", functools.partial(standard_handler, "sim.loud"), env_ids=[2])
    worker_log(2, env, "sim.loud", logging.INFO, "in its own form")
    assert texts(records()) == ["in its own form"]
    assert (tmp_path / "worker-1.log").read_text().splitlines()[len(lines) :] == ["in its own form"]
    assert capfd.readouterr() == ("", "")


@also_portable
def test_false_leaves_records_in_the_worker(logs, records, capfd):
    logging.getLogger("sim.loud").setLevel(logging.DEBUG)
    env = logs(forward_logs=False)
    env.reset()
    worker_log(2, env, "sim", logging.WARNING, "stays")
    assert not env.call("enabled", "sim.loud", logging.INFO)[0]
    assert records() == []
    assert capfd.readouterr().err == "stays\n"


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_workers_in_this_process_use_its_loggers(backend, records):
    with ParallelEnv([Logging] * 2, backend=backend) as env:
        records()
        worker_log(1, env, "sim", logging.INFO, "here")
        (record,) = records()
        assert record.process == os.getpid()


@pytest.mark.parametrize("value", [1, None, "yes"])
@pytest.mark.parametrize("backend", ["process", "serial"])
def test_wrong_values_are_refused(value, backend):
    with pytest.raises(TypeError, match="forward_logs must be True or False"):
        ParallelEnv([Logging], backend=backend, forward_logs=value)


def test_make_passes_it_on(records):
    with make(Logging, 2, num_workers=2, forward_logs=False):
        assert records() == []


def test_a_script_of_the_callers(tmp_path):
    """Loggers and values of `__main__`, with the default arguments."""
    script = Path(tmp_path / "train.py")
    script.write_text(SCRIPT.format(tests=str(TESTS)))
    for portable in "01":
        environ = {**os.environ, "MARL_PARALLEL_PORTABLE": portable}
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT, env=environ
        )
        assert done.stderr == ""
        assert done.stdout.splitlines() == ["INFO __main__ env 0 worker 0: a Position of 3", "done"]


SCRIPT = """
import logging, sys
from dataclasses import dataclass
sys.path.insert(0, {tests!r})
from simulators.counting import ACTIONS, Counting
from marl_parallel import ParallelEnv

log = logging.getLogger(__name__)

@dataclass
class Position:
    x: int

    def __str__(self):
        return f"a Position of {{self.x}}"

class Env(Counting):
    def step(self, actions):
        log.info("%s", Position(3))
        return super().step(actions)

form = "%(levelname)s %(name)s env %(env_id)s worker %(worker)s: %(message)s"
logging.basicConfig(level=logging.INFO, format=form, stream=sys.stdout)
with ParallelEnv([Env]) as env:
    env.reset()
    env.step([ACTIONS])
print("done")
"""
