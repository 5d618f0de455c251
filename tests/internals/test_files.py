"""Files at known paths, in folders where other users may put links, pipes and files of their own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.owners import OTHER, give_away, has_owners

from marl_parallel.core.files import (
    ForeignFile,
    check_private,
    make_folder,
    open_log,
    read_file,
    replaced_file,
)

pytestmark = [pytest.mark.release_independent, has_owners]


@pytest.fixture
def given_away(monkeypatch) -> Callable[[Path], Path]:
    """Makes another user the owner of a path."""

    def give(path: Path) -> Path:
        give_away(path, monkeypatch)
        return path

    return give


@pytest.fixture
def shared(tmp_path) -> Path:
    """A folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file of this user, which nobody else should write to."""
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace(path: Path, permissions: int = 0o666) -> None:
    with replaced_file(path, permissions=permissions) as file:
        file.write("new")


def append(path: Path) -> None:
    fd = open_log(path)
    os.write(fd, b"new")
    os.close(fd)


@pytest.mark.parametrize("write", [replace, append])
class TestLinks:
    """Both ways to write follow links of this user, and no other."""

    def test_foreign_link(self, write, shared, victim, given_away):
        path = given_away(link(shared / "file", victim))
        with pytest.raises(ForeignFile, match=rf"file is a link of the user with the number {OTHER}"):
            write(path)
        assert victim.read_text() == "mine"

    def test_foreign_link_to_nothing(self, write, shared, tmp_path, given_away):
        path = given_away(link(shared / "file", tmp_path / "new"))
        with pytest.raises(ForeignFile):
            write(path)
        assert not (tmp_path / "new").exists()

    def test_foreign_link_behind_an_own_one(self, write, shared, victim, given_away):
        given_away(link(shared / "second", victim))
        with pytest.raises(ForeignFile, match="second is a link"):
            write(link(shared / "first", Path("second")))
        assert victim.read_text() == "mine"

    def test_foreign_link_in_a_folder_of_this_user(self, write, tmp_path, victim, given_away):
        with pytest.raises(ForeignFile):
            write(given_away(link(tmp_path / "file", victim)))
        assert victim.read_text() == "mine"

    def test_own_links(self, write, shared, victim):
        path = link(shared / "first", Path("second"))
        link(shared / "second", victim)
        write(path)
        assert path.is_symlink()
        assert victim.read_text() == {"replace": "new", "append": "minenew"}[write.__name__]

    def test_own_link_to_nothing(self, write, shared, tmp_path):
        write(link(shared / "file", tmp_path / "new"))
        assert (tmp_path / "new").read_text() == "new"

    def test_links_in_a_circle(self, write, shared):
        with pytest.raises(OSError, match="symbolic links"):
            write(link(shared / "file", shared / "file"))

    def test_link_that_changes_while_it_is_opened(self, write, shared, victim, monkeypatch, given_away):
        """Another user, who may do so without the sticky bit, puts a link into the place of this user's."""
        path, readlink = link(shared / "file", shared / "own"), os.readlink

        def swapped(one: Path) -> str:
            one.unlink()
            given_away(link(one, victim))
            return readlink(one)

        monkeypatch.setattr(os, "readlink", swapped)
        with pytest.raises(ForeignFile, match="changes while it is opened"):
            write(path)
        assert victim.read_text() == "mine"


# -- files that are replaced -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".file", ".file-{pid}", ".file-{pid}.part", "file.tmp"])
def test_names_that_can_be_guessed(name, shared, victim, given_away):
    given_away(link(shared / name.format(pid=os.getpid()), victim))
    replace(shared / "file")
    assert (shared / "file").read_text() == "new"
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("before", [0o666, 0o644, 0o600, 0o400])
@pytest.mark.parametrize("permissions", [0o666, 0o600])
def test_permissions_of_an_old_file_are_not_kept(before, permissions, shared):
    path = shared / "file"
    path.write_text("old")
    path.chmod(before)
    mask = os.umask(0o022)
    try:
        replace(path, permissions)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == permissions & ~0o022
    assert names(shared) == ["file"]


def test_foreign_file_is_replaced(shared, given_away):
    """Its reader does not get what is written."""
    shared.chmod(0o777)
    path = shared / "file"
    path.write_text("old")
    with open(given_away(path)) as reader:
        replace(path)
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_second_name_of_a_file(shared, victim):
    os.link(victim, shared / "file")
    replace(shared / "file")
    assert victim.read_text() == "mine"


def test_whole_or_not_at_all(shared):
    path = shared / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replaced_file(path) as file:  # noqa: PT012
        file.write("ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert names(shared) == ["file"]


def test_pipes_and_devices(shared, given_away):
    replace(Path(os.devnull))
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    os.mkfifo(shared / "own")
    reader = os.open(shared / "own", os.O_RDONLY | os.O_NONBLOCK)
    replace(shared / "own")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.mkfifo(shared / "foreign")
    with pytest.raises(ForeignFile, match="foreign is a pipe or device of"):
        replace(given_away(shared / "foreign"))


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_have_the_permissions_of_the_umask(shared):
    mask = os.umask(0o027)
    try:
        append(shared / "file")
        append(shared / "file")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((shared / "file").stat().st_mode) == 0o640
    assert (shared / "file").read_text() == "newnew"


def test_foreign_log(shared, given_away):
    """In a folder like /tmp, it is a trap; in a folder of a team, or of its owner, it is the log of a colleague."""
    path = shared / "file"
    path.write_text("old")
    with pytest.raises(ForeignFile, match="file is a file of the user"):
        append(given_away(path))
    given_away(shared)
    append(path)
    shared.chmod(0o775)
    append(path)
    assert path.read_text() == "oldnewnew"


def test_second_name_of_a_log(shared, victim):
    os.link(victim, shared / "file")
    with pytest.raises(ForeignFile, match="another name of a file"):
        append(shared / "file")
    assert victim.read_text() == "mine"
    shared.chmod(0o700)  # as backups make them
    append(shared / "file")
    assert victim.read_text() == "minenew"


def test_log_that_is_no_file(shared):
    os.mkfifo(shared / "pipe")
    with pytest.raises(OSError, match="pipe is not a file"):
        append(shared / "pipe")
    with pytest.raises(OSError, match="directory"):
        append(shared)


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "foreign", "error"),
    [
        (0o700, False, ""),
        (0o755, False, ""),
        (0o775, False, ""),  # the usual one where each user has a group of one
        (0o1777, False, ""),
        (0o777, False, "every user may replace files in .*, which has no sticky bit"),
        (0o703, False, "every user may replace files in"),
        (0o755, True, f"the user with the number {OTHER} owns .*, and may replace files there"),
        (0o700, True, "owns"),
        (0o1777, True, "owns"),
        (0o777, True, "owns"),
    ],
)
def test_private_folders(mode, foreign, error, tmp_path, given_away):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    if foreign:
        given_away(folder)
    if not error:
        check_private(folder)
    else:
        with pytest.raises(ForeignFile, match=error):
            check_private(folder)


def test_links_in_the_path_of_a_folder(shared, tmp_path, given_away):
    """Where every user may put one; who owns a folder decides about the links in it."""
    (tmp_path / "target").mkdir()
    path = given_away(link(shared / "link", tmp_path / "target"))
    for folder in (path, path / "below", path / "far" / "below"):
        with pytest.raises(ForeignFile, match="link is a link of the user"):
            make_folder(folder)
        with pytest.raises(ForeignFile, match="link is a link of the user"):
            replace(folder / "file")
    assert names(tmp_path / "target") == []
    shared.chmod(0o775)
    make_folder(path / "team")
    shared.chmod(0o777)
    given_away(shared)
    make_folder(path / "owner")
    assert names(tmp_path / "target") == ["owner", "team"]
    make_folder(link(tmp_path / "own", tmp_path / "target") / "self")
    assert names(tmp_path / "target") == ["owner", "self", "team"]


def test_owner_of_what_is_read(tmp_path, victim, given_away):
    assert read_file(victim) == (b"mine", "")
    assert read_file(given_away(link(tmp_path / "link", victim))) == (b"mine", "")
    assert read_file(given_away(victim)) == (b"mine", f"the user with the number {OTHER}")
