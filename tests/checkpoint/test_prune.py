"""Old checkpoints go only when one that stays has been read and found whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.policy.retention import prune
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.test_checkpoint import state


def steps(paths: object) -> list[int]:
    return [int(path.name[5:]) for path in paths]  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 15, 20, 25, 30):
        save(tmp_path, state(step))
    return tmp_path


def damage(folder: Path, step: int) -> None:
    path = folder / f"step-{step:08d}" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [30]), (2, 0, [25, 30]), (1, 20, [20, 30]), (9, 0, [10, 15, 20, 25, 30])],
)
def test_the_newest_and_every_kth_stay(folder: Path, keep_last: int, keep_every: int, kept: list[int]) -> None:
    tried = prune(folder, keep_last=keep_last, keep_every=keep_every, dry_run=True)
    assert len(list_checkpoints(folder)) == 5
    done = prune(folder, keep_last=keep_last, keep_every=keep_every)
    assert tried == done
    assert steps(done.kept) == kept == steps(list_checkpoints(folder))
    assert steps(done.gone) == sorted({10, 15, 20, 25, 30} - set(kept))


def test_a_damaged_one_does_not_count_and_stays_to_be_looked_at(folder: Path) -> None:
    damage(folder, 30)
    damage(folder, 25)
    done = prune(folder, keep_last=1)
    assert steps(done.kept) == [20]
    assert steps(done.gone) == [10, 15]
    assert all("model.safetensors: damaged" in wrong for (wrong,) in done.damaged.values())
    assert steps(list_checkpoints(folder)) == [20, 25, 30]


def test_nothing_goes_when_none_is_whole(folder: Path) -> None:
    for step in (10, 15, 20, 25, 30):
        damage(folder, step)
    with pytest.raises(DataError, match="no checkpoint is whole; nothing was deleted"):
        prune(folder, keep_last=1)
    assert len(list_checkpoints(folder)) == 5
