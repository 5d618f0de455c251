"""Files that repeat an environment's failure: a line with the version, a line of JSON, and pickles.

The pickles are those of the constructor, the adapter, the registered environments, the options of the reset, and the
actions. `pool/replay.py` writes them, `cli/replay.py` repeats them.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from marl_parallel.core.files import check_private, make_folder, read_file, replaced_file
from marl_parallel.core.reports.reports import escaped

FOLDER = "marl_parallel-replays"
"""The default folder, inside the current folder."""
VERSION = 3
_MAGIC = b"marl_parallel replay "


class BadReplay(ValueError):
    """Raised for a file that cannot be replayed."""


@dataclass(frozen=True)
class Crash:
    """The contents of a file. Step 0 is the reset that begins the episode."""

    env_id: int
    error: str  # the type of the error
    method: str  # the method that failed; empty if unknown
    step: int  # the number of steps in the episode, including the one that failed
    first_step: int  # the first step whose actions are in the file
    mode: str  # the auto-reset mode
    constructor_seed: int
    restarts: int  # how often the environment had been rebuilt
    seed: int  # the last seed that the caller passed to a reset, or that a rebuilt environment got
    number: int  # how many episodes have begun without a seed since then
    takes_seed: bool  # whether the simulator's `reset` takes a seed
    isolate_rng: bool  # whether derived seeds also seed the process-wide generators, not only those of the script
    seeds_generators: bool  # whether `seed` does so too, if `number` is zero: the caller passed it to this reset
    arrays: bool  # whether values travelled through shared memory
    report: str  # the text of the error
    written: str  # the time
    versions: dict[str, str]
    sys_path: list[str]
    folder: str  # the current one
    constructor: bytes
    adapter: bytes
    registrations: bytes
    options: bytes  # of the reset; pickled None if it had none
    actions: bytes  # of each step, from `first_step` on

    @property
    def complete(self) -> bool:
        """Whether the file has all steps of the episode."""
        return self.first_step <= 1


_PICKLED = [one.name for one in fields(Crash) if one.type == "bytes"]
_TYPES = {"int": int, "str": str, "bool": bool, "bytes": bytes, "dict[str, str]": dict, "list[str]": list}


def make_private(folder: Path) -> None:
    """Make the folder of files if it is missing; `OSError` if that fails, or if another user may replace files there.

    An error tells its reader to open such a file, which runs code.
    """
    make_folder(folder, 0o700)
    check_private(folder)


def write_crash(crash: Crash, path: Path) -> None:
    """Write a file that only this user can read, whole or not at all; `OSError` if that fails."""
    pickled = {name: getattr(crash, name) for name in _PICKLED}
    header = {one.name: getattr(crash, one.name) for one in fields(crash) if one.name not in pickled}
    header["nbytes"] = [len(part) for part in pickled.values()]
    checksum = 0
    for part in pickled.values():
        checksum = zlib.crc32(part, checksum)
    header["crc32"] = checksum
    make_private(path.parent)
    with replaced_file(path, "wb", 0o600) as file:
        file.write(b"%s%d\n%s\n" % (_MAGIC, VERSION, json.dumps(header).encode()))
        file.writelines(pickled.values())


def read_crash(path: Path) -> Crash:
    """Read a file without unpickling anything; `BadReplay` if it is not a whole replay file of this version."""
    return read_crash_and_owner(path)[0]


def read_crash_and_owner(path: Path) -> tuple[Crash, str]:
    """`read_crash`, and the name of the user who owns the file; "" for this user and root."""
    try:
        content, owner = read_file(path)
    except OSError as error:
        raise BadReplay(f"{escaped(str(path))} cannot be read: {error.strerror or error}") from error
    return _parsed(content, escaped(str(path))), owner


def _parsed(content: bytes, path: str) -> Crash:
    if not content.startswith(_MAGIC):
        raise BadReplay(f"{path} is not a replay file: ParallelEnv(replay=...) writes replay files, named env-*.replay")
    first, _, rest = content.partition(b"\n")
    written_as = escaped(first.removeprefix(_MAGIC).decode(errors="replace")[:20])
    if written_as != str(VERSION):
        raise BadReplay(
            f"{path} has version {written_as} of this format, but this marl_parallel reads version {VERSION}: use the "
            "release that wrote it"
        )
    line, _, body = rest.partition(b"\n")
    truncated = f"{path} is incomplete or was changed after it was written: copy the original file again"
    try:
        header = json.loads(line)
        sizes, checksum = header.pop("nbytes"), header.pop("crc32")
        parts: dict[str, Any] = {}
        at = 0
        for name, size in zip(_PICKLED, sizes, strict=True):
            parts[name], at = body[at : at + size], at + size
        crash = Crash(**header, **parts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadReplay(truncated) from error
    if at != len(body) or not _is_well_typed(crash):
        raise BadReplay(truncated)
    if zlib.crc32(body) != checksum:
        raise BadReplay(f"{path} is damaged: its checksum differs from the one that was written with it")
    return crash


def _is_well_typed(crash: Crash) -> bool:
    """Whether all values have the types that `write_crash` writes: the file may be made by hand."""
    texts = [*crash.versions, *crash.versions.values()] if type(crash.versions) is dict else []
    texts += crash.sys_path if type(crash.sys_path) is list else []
    return all(type(getattr(crash, one.name)) is _TYPES[str(one.type)] for one in fields(crash)) and all(
        type(text) is str for text in texts
    )
