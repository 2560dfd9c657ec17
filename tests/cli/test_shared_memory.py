"""`train` in a folder where strangers make names, as `/dev/shm` is one: it neither writes nor deletes through them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from .conftest import Call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with work of three days ago."""
    home = tmp_path / "home"
    (home / "thesis/chapters").mkdir(parents=True)
    (home / "thesis/chapters/one.txt").write_text("years of work")
    old = time.time() - 3 * 86400
    for path in (*home.rglob("*"), home):
        os.utime(path, (old, old))
    return home


def shared_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_strangers_link_does_not_make_train_delete_a_users_folder(trained: Path, home: Path, call: Call) -> None:
    shutil.rmtree("runs")
    shm = shared_folder(trained)
    link = shm / f"ropewalk-{os.getuid()}"
    link.symlink_to(home)
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
    settings = ["checkpoint.tiers.memory=on", f"checkpoint.tiers.folder={shm}", "train.steps=4"]
    ended = call("train", "tiny.toml", *settings)
    assert (home / "thesis/chapters/one.txt").read_text() == "years of work"
    assert ended.status == 2
    assert f"{link}: a symbolic link to {home}" in ended.err
    assert "`checkpoint.tiers.folder`" in ended.err
    assert "Traceback" not in ended.err
    # Without the link the same command trains, and what is older than a day and not ours stays.
    link.unlink()
    link.mkdir(mode=0o700)
    os.rename(home / "thesis", link / "thesis")
    assert call("train", "tiny.toml", *settings).status == 0
    assert (link / "thesis/chapters/one.txt").read_text() == "years of work"
    assert [path.name for path in link.iterdir()] == ["thesis"]
