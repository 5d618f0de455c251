"""Files that this package writes and reads at known paths, perhaps in a folder that other users may write to.

In a folder such as /tmp, another user can put a link, a pipe or a file where this program will write or read. So:

- A new file is created under a random name (`O_EXCL`), and renamed when it is complete.
- Links of this user and root are followed, and those of others are errors.
- `foreign_owner` returns the owner of a file, before something in it is trusted.

This user is the effective one. Windows has no such owners: there, each file counts as this user's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_MOST_LINKS = 40  # in a row, as in Linux
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_CREAT | os.O_EXCL
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # for a pipe that nobody reads


class ForeignFile(PermissionError):
    """Another user could choose what is written or read there."""


# -- owners ------------------------------------------------------------------------------------------------------------


def foreign_owner(info: os.stat_result) -> str:
    """The name of the user who owns a file; "" for this user and root, who are trusted."""
    uid = _owner(info)
    if not hasattr(os, "geteuid") or uid in (os.geteuid(), 0):
        return ""
    import pwd  # not on Windows

    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"the user with the number {uid}"


def _owner(info: os.stat_result) -> int:
    return info.st_uid


def _is_open_to_all(folder: os.stat_result) -> bool:
    """Whether every user may create files in a folder."""
    return hasattr(os, "geteuid") and bool(folder.st_mode & stat.S_IWOTH)


def check_private(folder: Path) -> None:
    """Raise `ForeignFile` if another user may replace this user's files in a folder.

    The sticky bit, as in /tmp, forbids that to all but the owner of the folder. Members of the folder's group count as
    trusted: many systems give each user a group of one.
    """
    info = os.stat(folder)
    if owner := foreign_owner(info):
        raise ForeignFile(f"{owner} owns {folder}, and may replace files there")
    if _is_open_to_all(info) and not info.st_mode & stat.S_ISVTX:
        raise ForeignFile(f"every user may replace files in {folder}, which has no sticky bit")


def _check_link(path: Path, link: os.stat_result) -> None:
    if owner := foreign_owner(link):
        raise ForeignFile(f"{path} is a link of {owner}; pass the path that it should lead to")


def make_folder(folder: Path, permissions: int = 0o777) -> None:
    """Make a folder, if it is missing, with those above it.

    Raises:
        ForeignFile: Another user has put a link into the path, in a folder where every user may do so.
        OSError: The folder cannot be created.
    """
    _check_folder(folder)
    folder.mkdir(permissions, parents=True, exist_ok=True)


def _check_folder(folder: Path) -> None:
    """Raise `ForeignFile` if another user has put a link into the path, in a folder where every user may do so."""
    for part in [*reversed(folder.parents), folder] if hasattr(os, "geteuid") else []:
        try:
            info = os.lstat(part)
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(info.st_mode):
            parent = os.stat(part.parent)
            if _is_open_to_all(parent) and _owner(info) != _owner(parent):
                _check_link(part, info)


def followed(path: Path) -> Path:
    """The path behind links; `ForeignFile` for a link of another user."""
    for _ in range(_MOST_LINKS):
        try:
            before = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return path
        if not stat.S_ISLNK(before.st_mode):
            return path
        _check_link(path, before)
        target = os.readlink(path)
        after = os.lstat(path)
        if (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns):
            raise ForeignFile(f"{path} changes while it is opened")  # it may have been another's link meanwhile
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


# -- opening -----------------------------------------------------------------------------------------------------------


def check_replaceable(path: Path) -> None:
    """Raise `ForeignFile` if `replaced_file` would refuse this path: another user's link, pipe or device."""
    _check_folder(path.absolute().parent)
    if not _is_special(path):
        followed(path)
    elif owner := foreign_owner(os.stat(path)):
        raise ForeignFile(f"{path} is a pipe or device of {owner}")


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder, such as a pipe or /dev/null."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def replaced_file(path: Path, mode: str = "w", permissions: int = 0o666, **how: Any) -> Iterator[IO[Any]]:
    """Write a file, whole or not at all: a new one takes the place of an old one when the block has ended.

    An old file's permissions are not kept. A link of this user stays, and what it leads to is replaced. A pipe or a
    device is written to, and so is a file in a folder where this user may not create one.

    Args:
        path: The file.
        mode: As of `open`: "w" or "wb".
        permissions: Of the file, before the umask takes its part.
        how: More arguments of `open`.

    Raises:
        ForeignFile: See `check_replaceable`.
        OSError: The file cannot be written.
    """
    check_replaceable(path)
    if _is_special(path):
        with open(path, mode, **how) as file:
            yield file
        return
    target = followed(path)
    if target.exists() and not os.access(target.parent, os.W_OK):
        with open(os.open(target, os.O_WRONLY | os.O_TRUNC | _FLAGS), mode, **how) as file:
            yield file
        return
    partial = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | _NEW | _FLAGS, permissions), mode, **how) as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def open_log(path: Path) -> int:
    """Open a file for reading and appending, and create it if it is missing, as the umask says.

    Raises:
        ForeignFile: It is another user's link; or, in a folder where every user may create files, another user's
            file or a second name of a file.
        OSError: It cannot be opened.
    """
    target, flags = followed(path), os.O_RDWR | os.O_APPEND | _FLAGS
    try:
        fd = os.open(target, flags | _NONBLOCK)
    except FileNotFoundError:
        try:
            return os.open(target, flags | _NEW, 0o666)
        except FileExistsError:  # another program has just created it
            fd = os.open(target, flags | _NONBLOCK)
    try:
        _check_log(target, os.fstat(fd))
        if _NONBLOCK:
            os.set_blocking(fd, True)  # processes that inherit it see the flag
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_log(path: Path) -> None:
    """Raise `OSError` if `open_log` would refuse an existing file at this path."""
    target = followed(path)
    _check_log(target, os.stat(target))


def _check_log(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path} is not a file")
    folder = os.stat(path.parent)
    if not _is_open_to_all(folder):
        return
    if _owner(info) != _owner(folder) and (owner := foreign_owner(info)):
        raise ForeignFile(f"{path} is a file of {owner}")
    if info.st_nlink > 1:
        raise ForeignFile(f"{path} is another name of a file, which another user may have given to it")


def read_file(path: Path) -> tuple[bytes, str]:
    """The content of a file, and its `foreign_owner`: another user may have put it there."""
    with path.open("rb") as file:
        return file.read(), foreign_owner(os.fstat(file.fileno()))
