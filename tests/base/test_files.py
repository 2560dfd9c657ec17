"""Files and folders exist whole or not at all, whatever happens at whatever moment."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.base import files
from ropewalk.base.errors import DamagedFile, DataError, RunConflict, StorageError
from ropewalk.base.files import (
    committed_file,
    committed_folder,
    lock_owner,
    locked,
    read_json,
    upgraded,
    write_json,
)

FILE_POINTS = ("file.begin", "file.written", "file.synced", "file.committed")
FOLDER_POINTS = ("folder.begin", "folder.synced", "folder.committed")


class Crash(BaseException):
    """Stands for anything that can end a process."""


def write_file(path: Path, content: str) -> None:
    with committed_file(path, "w") as file:
        file.write(content)


def write_folder(path: Path, content: str) -> None:
    with committed_folder(path) as folder:
        (folder / "a").write_text(content)
        (folder / "b").write_text(content)


def content_of(path: Path) -> str:
    """What a reader finds; a folder must be of one piece."""
    if path.is_dir():
        (content,) = {child.read_text() for child in (path / "a", path / "b")}
        return content
    return path.read_text()


CASES = [(write_file, point) for point in FILE_POINTS] + [(write_folder, point) for point in FOLDER_POINTS]


@pytest.mark.parametrize(("write", "point"), CASES)
def test_an_exception_at_any_point_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], None], point: str
) -> None:
    def announce(label: str) -> None:
        if label == f"{point}:thing":
            raise Crash

    write(tmp_path / "thing", "old")
    monkeypatch.setattr(files, "point", announce)
    with pytest.raises(Crash):
        write(tmp_path / "thing", "new")

    assert content_of(tmp_path / "thing") == ("new" if point.endswith("committed") else "old")
    monkeypatch.undo()
    write(tmp_path / "thing", "after")
    assert content_of(tmp_path / "thing") == "after"
    assert [child.name for child in tmp_path.iterdir()] == ["thing"]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from test_files import write_file, write_folder

def hook(event, arguments):
    if event == "ropewalk.point" and arguments == (sys.argv[2] + ":thing",):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
{"write_file": write_file, "write_folder": write_folder}[sys.argv[1]](Path(sys.argv[3]), "new")
"""


def test_sigkill_at_any_point_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    started = []
    for write, point in CASES:
        path = tmp_path / point / "thing"
        write(path, "old")
        arguments = [write.__name__, point, str(path), str(Path(__file__).parent)]
        started.append((path, point, subprocess.Popen([sys.executable, "-c", KILLED, *arguments])))
        if len(started) % 2 == 0:
            started[-2][2].wait()
    for path, point, process in started:
        assert process.wait() == -signal.SIGKILL
        assert content_of(path) == ("new" if point.endswith("committed") else "old")


def test_leftovers_of_either_kind_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_text("longer than what follows")
    (tmp_path / "folder.partial" / "deep").mkdir(parents=True)
    (tmp_path / "folder.old.partial").mkdir()
    (tmp_path / "other.partial").write_text("a file where a folder will be")

    write_file(tmp_path / "file", "new")
    write_folder(tmp_path / "folder", "new")
    write_folder(tmp_path / "other", "new")

    assert {content_of(path) for path in tmp_path.iterdir()} == {"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "other"]


def test_a_folder_is_never_seen_half_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "thing", "old")
    seen = []
    remove = files.shutil.rmtree
    monkeypatch.setattr(
        files.shutil, "rmtree", lambda path: (seen.append(content_of(tmp_path / "thing")), remove(path))
    )
    write_folder(tmp_path / "thing", "new")
    assert seen == ["new"]


def test_a_failing_block_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError), committed_file(tmp_path / "file"):
        raise ValueError
    with pytest.raises(UnicodeEncodeError):
        write_folder(tmp_path / "folder", "\ud800")
    with pytest.raises(ValueError):
        write_json(tmp_path / "json", {"not": float("nan")})
    assert list(tmp_path.iterdir()) == []


REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "permissions",
    errno.EIO: "check the disk",
}


@pytest.mark.parametrize("number", REMEDIES, ids=errno.errorcode.get)
def test_a_refusing_disk_is_named_with_path_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_file(tmp_path / "thing", "old")

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=REMEDIES[number]) as caught:
        write_file(tmp_path / "thing", "new")
    assert str(tmp_path / "thing") in str(caught.value)
    assert content_of(tmp_path / "thing") == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_device_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "thing.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="thing: No space left on device: the disk is full"):
        write_file(tmp_path / "thing", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_a_storage_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(StorageError, match="ulimit"):
            write_file(tmp_path / "thing", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_forbidden_folder_is_a_storage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        for write in (write_file, write_folder):
            with pytest.raises(StorageError, match="permission"):
                write(tmp_path / "thing", "new")
        with pytest.raises(StorageError, match="permission"), locked(tmp_path):
            pass
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_a_file_where_a_folder_is_needed_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for write in (write_file, write_folder, lambda path, _: locked(path).__enter__()):
        with pytest.raises(StorageError, match="a file stands where a folder is needed"):
            write(tmp_path / "runs" / "a", "new")


def test_an_input_that_cannot_be_read_inside_a_block_is_named(tmp_path: Path) -> None:
    fault = r"writing .*shard: input\.txt: Permission denied"
    with pytest.raises(StorageError, match=fault), committed_file(tmp_path / "shard"):
        raise PermissionError(errno.EACCES, "Permission denied", "input.txt")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), committed_file(tmp_path / "thing"):
        (tmp_path / "missing").read_bytes()


def test_json_is_read_back_and_damage_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "folders" / "x.json", {"ä": [1, None]})
    assert read_json(tmp_path / "new" / "folders" / "x.json", what="plan") == {"ä": [1, None]}
    with pytest.raises(DataError, match="no such plan"):
        read_json(tmp_path / "y.json", what="plan")
    for damage in (b'{"a": ', b"\xff\xfe\x00", b""):
        (tmp_path / "y.json").write_bytes(damage)
        with pytest.raises(DataError, match=r"y\.json: this plan is damaged"):
            read_json(tmp_path / "y.json", what="plan")


HOLDER = """
import sys, time
from pathlib import Path
from ropewalk.base.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_refuses_a_second_process_and_is_freed_by_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunConflict, match=f"process {holder.pid} is writing here"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())
            with pytest.raises(RunConflict), locked(tmp_path):
                pass
        with locked(tmp_path):
            pass


def test_who_waited_for_a_lock_is_named_as_its_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with locked(tmp_path, wait=lambda _: holder.kill()):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_old_formats_are_upgraded_one_version_at_a_time() -> None:
    upgrades = {1: lambda v: {**v, "two": True}, 2: lambda v: {**v, "three": v["two"]}}
    for value in ({"format": 1}, {"format": 2, "two": True}, {"format": 3, "two": True, "three": True}):
        result = upgraded(value, path=Path("x"), what="plan", current=3, upgrades=upgrades)
        assert result == {"format": 3, "two": True, "three": True}


@pytest.mark.parametrize("value", [{}, {"format": 0}, {"format": "1"}, {"format": True}, {"format": None}, [], 3])
def test_what_carries_no_format_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(DataError, match="x: not a ropewalk plan"):
        upgraded(value, path=Path("x"), what="plan", current=1, upgrades={})


def test_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="x: this plan has format 3, this ropewalk reads up to 2; upgrade"):
        upgraded({"format": 3}, path=Path("x"), what="plan", current=2, upgrades={})


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir], ids=["pipe", "device", "folder"]
)
def test_what_stands_in_place_of_a_lock_is_named_and_never_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / ".lock")
    with pytest.raises((DamagedFile, StorageError), match=r"\.lock: (not a regular file|Is a directory).*move it away"):
        locked(tmp_path).__enter__()
    assert lock_owner(tmp_path) is None
    assert os.path.lexists(tmp_path / ".lock")
