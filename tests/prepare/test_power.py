"""A power cut at any moment of a commit leaves each stage file whole, or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pyarrow as pa
import pytest

from ropewalk.prepare.stages import batch_writer, filled, read_artifact, read_table
from tests.checkpoint.power import Op, states
from tests.checkpoint.test_power import laid_out

SCHEMA = pa.schema([("text", pa.large_string())])


class Recorder:
    """Writes down what a process asks of the disk below `root`: creations, appended bytes, syncs, renames."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.ops: list[Op] = []
        self._root, self._seen = root, dict[Path, bytes]()
        self._fsync, self._replace, self._mkdir = os.fsync, os.replace, os.mkdir
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "replace", self._rename)
        patch.setattr(os, "mkdir", self._make)

    def _below(self, path: Path) -> bool:
        return path.is_relative_to(self._root)

    def _look(self, path: Path) -> None:
        """What was appended to a file since the last look."""
        if path not in self._seen:
            self.ops.append(Op("create", path))
        data, before = path.read_bytes(), self._seen.get(path, b"")
        assert data.startswith(before), "files are only appended to"
        if len(data) > len(before):
            self.ops.append(Op("write", path, data=data[len(before) :]))
        self._seen[path] = data

    def _sync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self._below(path):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self.ops.append(Op("sync_folder", path))
            else:
                self._look(path)
                self.ops.append(Op("sync", path))
        self._fsync(descriptor)

    def _rename(self, old: Path, new: Path) -> None:
        if self._below(Path(old)):
            self._look(Path(old))
            self.ops.append(Op("rename", Path(old), Path(new)))
            self._seen[Path(new)] = self._seen.pop(Path(old))
        self._replace(old, new)

    def _make(self, path: Path, *arguments: object, **options: object) -> None:
        self._mkdir(path, *arguments, **options)
        if self._below(Path(path)):
            self.ops.append(Op("mkdir", Path(path)))


def test_every_state_after_a_power_cut_holds_stage_files_whole_or_not_at_all(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    (root / "stages").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        recorder.ops.append(Op("mkdir", root / "stages"))
        for name in ("one", "two"):
            with batch_writer(root / "stages" / "read" / f"{name}.arrow", SCHEMA) as writer:
                writer.write_batch(pa.record_batch([[name * 500]], schema=SCHEMA))
        with filled(root / "stages" / "tokenizer" / "t.json") as place:
            place.write_bytes(b"{}" * 100)
    count = whole = 0
    seen = set()
    for after in states(recorder.ops, root):
        count += 1
        same = frozenset(after.contents.items())
        if same in seen:
            continue
        seen.add(same)
        folder = laid_out(after, tmp_path / "scratch") / "stages"
        for path in folder.glob("read/*.arrow"):
            assert read_table(path)["text"].to_pylist() == [path.stem * 500]
            whole += 1
        for path in folder.glob("tokenizer/*.json"):
            assert read_artifact(path) == b"{}" * 100
            whole += 1
    assert count > 100
    assert whole > 5
