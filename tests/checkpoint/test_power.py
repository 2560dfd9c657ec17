"""A power cut at any moment leaves the newest acknowledged checkpoint, or a newer one, whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.policy.retention import retain
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.newest import load_newest
from tests.checkpoint.power import RecordingDisk, states
from tests.checkpoint.power import State as After
from tests.tiny import small_spec


def state(step: int, *, tokens: int = 0) -> State:
    weight = torch.full((3, 5), float(step))
    return State(
        step=step,
        tokens=tokens,
        seed=0,
        spec=small_spec(),
        data={},
        model={"w": weight},
        optimizer={"exp_avg/w": weight},
        tokenizer=b"{}",
    )


def laid_out(after: After, folder: Path) -> Path:
    """The state as real files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, data in after.contents.items():
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


def check(disk: RecordingDisk, root: Path, scratch: Path) -> int:
    """Restores from every state; how many there were."""
    count = 0
    seen = set()
    for after in states(disk.ops, root):
        count += 1
        same = (after.acknowledged, frozenset(after.contents.items()))
        if same in seen:
            continue
        seen.add(same)
        folder = laid_out(after, scratch) / "checkpoints"
        try:
            found = load_newest(folder)[1] if folder.exists() else None
        except DataError:
            found = None
        reached = found.step if found else 0
        assert reached >= after.acknowledged, f"after {after.after} requests: {sorted(map(str, after.contents))}"
        if found:
            assert torch.equal(found.model["w"], state(found.step).model["w"])
    return count


def test_every_state_after_a_power_cut_restores_what_was_acknowledged(tmp_path: Path) -> None:
    root, disk = tmp_path / "disk", RecordingDisk()
    root.mkdir()
    for step in (1, 2, 3, 4):
        save(root / "checkpoints", state(step), disk=disk)
        disk.acknowledge(step)
        retain(root / "checkpoints", keep_last=2, disk=disk)
    assert check(disk, root, tmp_path / "scratch") > 1000


def test_replacing_a_step_never_leaves_nothing(tmp_path: Path) -> None:
    root, disk = tmp_path / "disk", RecordingDisk()
    root.mkdir()
    for tokens in (1, 2):
        save(root / "checkpoints", state(5, tokens=tokens), disk=disk)
        disk.acknowledge(5)
    assert check(disk, root, tmp_path / "scratch") > 300


def test_many_ranks_commit_as_one_does(tmp_path: Path) -> None:
    root, disk = tmp_path / "disk", RecordingDisk()
    root.mkdir()
    for step in (1, 2):
        for rank in (2, 1, 0):
            attempt = Attempt(rank=rank, world=3, name="a", timeout_s=1)
            save(root / "checkpoints", state(step), disk=disk, attempt=attempt)
        disk.acknowledge(step)
    assert check(disk, root, tmp_path / "scratch") > 500


class Lazy(RecordingDisk):
    """A disk on which a sync of folders does nothing: the test must see the difference."""

    def sync_folder(self, path: Path) -> None:
        LocalDisk.sync_folder(self, path)


def test_without_syncing_folders_checkpoints_are_lost(tmp_path: Path) -> None:
    root, disk = tmp_path / "disk", Lazy()
    root.mkdir()
    for step in (1, 2):
        save(root / "checkpoints", state(step), disk=disk)
        disk.acknowledge(step)
    lost = 0
    for after in states(disk.ops, root):
        folder = laid_out(after, tmp_path / "scratch") / "checkpoints"
        lost += after.acknowledged > 0 and not list_checkpoints(folder)
    assert lost > 0
