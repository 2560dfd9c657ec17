"""Folders of this user alone, made where anybody may make names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ropewalk.base.errors import StorageError
from ropewalk.base.private import open_file, open_private, remove_below

SETTING = "some.folder"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_folder_is_made_for_this_user_alone_and_found_again(shared: Path) -> None:
    for _ in range(2):
        os.close(open_private(shared / "deep" / "own", setting=SETTING))
    assert (shared / "deep" / "own").stat().st_mode & 0o777 == 0o700
    (shared / "own").mkdir(mode=0o755)
    os.close(open_private(shared / "own", setting=SETTING))
    assert (shared / "own").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("target", ["there", "missing"])
def test_a_link_is_refused_whatever_it_leads_to(shared: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "there").mkdir()
    (shared / "own").symlink_to(tmp_path / target)
    with pytest.raises(StorageError, match=r"own: a symbolic link to .*, made by user \d+.*`some.folder`"):
        open_private(shared / "own", setting=SETTING)
    assert not (tmp_path / "missing").exists()


def test_what_others_can_write_is_refused(shared: Path) -> None:
    (shared / "own").mkdir()
    (shared / "own").chmod(0o770)
    with pytest.raises(StorageError, match=r"mode 0770.*`chmod 700 .*own`"):
        open_private(shared / "own", setting=SETTING)
    (shared / "file").write_text("")
    with pytest.raises(StorageError, match=r"file: not a folder"):
        open_private(shared / "file", setting=SETTING)
    shared.chmod(0o777)
    with pytest.raises(StorageError, match=r"`chmod \+t .*shm`"):
        open_private(shared / "other", setting=SETTING)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(shared: Path) -> None:
    (shared / "own").mkdir(mode=0o700)
    os.chown(shared / "own", 65534, 65534)
    with pytest.raises(StorageError, match=r"belongs to user 65534"):
        open_private(shared / "own", setting=SETTING)


def test_files_are_opened_below_a_descriptor_and_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("outside")
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "folder/file").write_text("inside")
    (root / "folder/link").symlink_to(tmp_path / "outside")
    (root / "way").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    descriptor = os.open(root, os.O_RDONLY)
    with open(open_file(descriptor, "folder/file")) as file:
        assert file.read() == "inside"
    for path in ("folder/link", "way/outside", "../outside", "/etc/passwd", "", "folder", "fifo", "folder/./file"):
        with pytest.raises(OSError):
            open_file(descriptor, path)
    remove_below(descriptor, "way")
    remove_below(descriptor, "folder")
    remove_below(descriptor, "nothing")
    assert (tmp_path / "outside").read_text() == "outside"
    assert [path.name for path in root.iterdir()] == ["fifo"]
    os.close(descriptor)
