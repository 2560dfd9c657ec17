"""What the rule keeps stays, and never do fewer stay than have been read and found whole."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.files import PARTIAL
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import list_checkpoints, step_of
from ropewalk.checkpoint.policy import retention
from ropewalk.checkpoint.policy.retention import VerifiedCheckpoints, retain
from ropewalk.checkpoint.write.save import save
from ropewalk.train.checkpointer import Checkpointer
from tests.checkpoint.newest import continued
from tests.checkpoint.test_checkpoint import state
from tests.checkpoint.test_prune import damage


def steps(folder: Path) -> set[int]:
    return {step_of(path) for path in list_checkpoints(folder)}


@settings(max_examples=30, deadline=None)
@given(
    damaged=st.sets(st.integers(1, 6)),
    keep_last=st.integers(1, 7),
    keep_every=st.integers(0, 4),
    keep_verified=st.integers(0, 7),
)
def test_what_stays_is_the_rule_and_the_newest_whole_ones(
    damaged: set[int], keep_last: int, keep_every: int, keep_verified: int
) -> None:
    made = range(1, 7)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in made:
            save(folder, state(step))
        for step in damaged:
            damage(folder, step)
        gone = retain(folder, keep_last=keep_last, keep_every=keep_every, keep_verified=keep_verified)
        ruled = set(list(made)[-keep_last:]) | {step for step in made if keep_every and step % keep_every == 0}
        whole = sorted(set(made) - damaged, reverse=True)
        assert steps(folder) == ruled | set(whole[:keep_verified])
        assert {step_of(path) for path in gone} == set(made) - steps(folder)


def test_the_last_whole_one_outlives_any_number_of_damaged_ones(tmp_path: Path) -> None:
    verified = VerifiedCheckpoints()
    for step in range(1, 8):
        save(tmp_path, state(step))
        if step > 2:
            damage(tmp_path, step)
        retain(tmp_path, keep_last=2, keep_verified=1, verified=verified)
    assert steps(tmp_path) == {2, 6, 7}


def test_each_checkpoint_is_read_once_and_only_before_another_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(retention, "verify_checkpoint", lambda path: read.append(step_of(path)) or [])
    verified = VerifiedCheckpoints()
    for step in (1, 2, 3, 4):
        save(tmp_path, state(step))
        retain(tmp_path, keep_last=2, keep_verified=2, verified=verified)
    # Nothing went after steps 1 and 2.
    assert sorted(read) == [2, 3, 4]


def test_a_step_that_is_saved_again_is_read_again(tmp_path: Path) -> None:
    told: list[str] = []
    verified = VerifiedCheckpoints(report=told.append)
    path = save(tmp_path, state(1))
    assert verified.holds(path)
    damage(tmp_path, 1)
    assert verified.holds(path), "known to be whole, and not read again"
    save(tmp_path, dataclasses.replace(state(1), parent="another"))
    damage(tmp_path, 1)
    assert not verified.holds(path)
    assert "model.safetensors: damaged" in told[0]


class Rotting(LocalDisk):
    """Flips a bit in every checkpoint from some moment on."""

    rots = False

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if self.rots and new.name.startswith("step-") and old.name.endswith(PARTIAL):
            damage(new.parent, step_of(new))


@pytest.mark.parametrize(("keep_verified", "kept"), [(0, {4, 5}), (1, {2, 4, 5}), (2, {1, 2, 4, 5})])
def test_a_run_on_a_rotting_disk_keeps_its_last_whole_checkpoints_and_says_why(
    tmp_path: Path, keep_verified: int, kept: set[int]
) -> None:
    told: list[str] = []
    disk = Rotting()
    checkpointer = Checkpointer(
        tmp_path, Checkpoints(keep_last=2, keep_verified=keep_verified), warn=told.append, disk=disk
    )
    for step in (1, 2, 3, 4, 5):
        disk.rots = step > 2
        checkpointer.save(state(step))
        checkpointer.settle()
    assert all(saved.error is None for saved in checkpointer.finished())
    assert steps(tmp_path / "checkpoints") == kept
    if keep_verified:
        assert [Path(message.partition(":")[0]).parent.name for message in told] == [
            "step-00000003",
            "step-00000004",
            "step-00000005",
        ]
        found = continued(checkpointer)
        assert found is not None
        assert found.step == 2
    checkpointer.close()
