"""A power cut at any moment of a commit leaves each file of prepare whole, or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pyarrow as pa
import pytest
from every_stage import every_stage, write_corpus

from ropewalk.base.files import PARTIAL
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.stages import batch_writer, filled, read_artifact, read_table
from ropewalk.store.manifest import FILE as MANIFEST
from tests.checkpoint.power import Op, states
from tests.checkpoint.test_power import laid_out

SCHEMA = pa.schema([("text", pa.large_string())])


class Recorder:
    """Writes down what a process asks of the disk below `root`: creations, appended bytes, syncs, renames."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.ops: list[Op] = []
        self.committed: set[tuple[Path, bytes]] = set()
        """What has ever had a name of its own."""
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
        old, new = Path(old), Path(new)
        if self._below(old):
            if old.is_file():
                self._look(old)
            self.ops.append(Op("rename", old, new))
            self._seen = {new / p.relative_to(old) if p.is_relative_to(old) else p: d for p, d in self._seen.items()}
            self.committed |= {(path, data) for path, data in self._seen.items() if path.is_relative_to(new)}
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


def test_no_state_after_a_power_cut_of_a_whole_prepare_has_a_torn_file_or_a_manifest_of_missing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, documents=12)
    root = tmp_path / "disk"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        data = prepare(every_stage(folder=str(root)), seed=1).folder
    named = {path.relative_to(root) for path in data.rglob("*") if path.is_file() and path.name != ".lock"}
    whole = {(path.relative_to(root), bytes) for path, bytes in recorder.committed}
    assert {path.parts[1] for path, _ in whole} >= {"read", "measure", "encode", "sketch", "substring", "tokenizer"}
    cut_short = ended = 0
    for after in states(recorder.ops, root, subsets=3):
        files = {(path, data) for path, data in after.contents.items() if data is not None}
        torn = {path for path, data in files - whole if not any(part.endswith(PARTIAL) for part in path.parts)}
        assert not torn, f"after {after.after} requests"
        if data.relative_to(root) / MANIFEST in after.contents:
            assert named <= after.contents.keys(), f"after {after.after} requests"
            ended += 1
        else:
            cut_short += 1
    assert cut_short > 500
    assert ended > 5
