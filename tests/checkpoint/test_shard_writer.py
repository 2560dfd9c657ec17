"""Saves are the same files for any number of threads, are cancelled by any error, and bear a power cut all the same."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from ropewalk.checkpoint import shard_compression, shard_file
from ropewalk.checkpoint.commit import Attempt, commit
from ropewalk.checkpoint.disk import Disk, LocalDisk
from ropewalk.checkpoint.faulty import Fault, FaultyDisk
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State, groups_of, local_shards, manifest_of
from ropewalk.checkpoint.shard_compression import CompressionPolicy
from ropewalk.checkpoint.write import snapshot
from ropewalk.checkpoint.write.persist import Persister
from ropewalk.checkpoint.write.save import write_tensor_files
from ropewalk.checkpoint.write.snapshot import Stager
from tests.checkpoint.power import RecordingDisk
from tests.checkpoint.test_checkpoint import identical
from tests.checkpoint.test_power import check
from tests.checkpoint.test_power import state as power_state
from tests.tiny import small_spec


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(shard_compression, "FRAME_BYTES", 700)


def state(step: int = 1) -> State:
    draw = torch.Generator().manual_seed(step)
    weights = {f"layer.{n}.weight": torch.randn(40 + n, 16, generator=draw) for n in range(6)}
    moments = {f"exp_avg/{name}": tensor.bfloat16() for name, tensor in weights.items()} | {"step": torch.tensor(3.0)}
    return State(
        step=step,
        tokens=0,
        seed=0,
        spec=small_spec(),
        data={},
        model=weights,
        optimizer=moments,
        tokenizer=b'{"a": 1}' * 300,
    )


def saved(
    folder: Path, what: State, *, threads: int, policy: CompressionPolicy | None = None, disk: Disk | None = None
) -> Path:
    parts = {group: list(local_shards(tensors)) for group, tensors in groups_of(what).items()}
    disk = disk or LocalDisk()
    return commit(
        folder,
        manifest_of(what),
        write=lambda place: write_tensor_files(
            place,
            parts,
            tokenizer=what.tokenizer,
            disk=disk,
            attempt=Attempt(),
            threads=threads,
            policy=policy,
        ),
        disk=disk,
    )


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("mode", ["off", "on"])
def test_files_are_the_same_for_any_number_of_threads(tmp_path: Path, mode: shard_compression.Mode) -> None:
    alone = files(saved(tmp_path / "1", state(), threads=1, policy=CompressionPolicy(mode)))
    for threads in (2, 3, 8):
        path = saved(tmp_path / str(threads), state(), threads=threads, policy=CompressionPolicy(mode))
        assert files(path) == alone
    if mode == "off":  # with chunks of the usual size packed files are read back too, in test_packing.py
        assert verify_checkpoint(path) == []
        assert identical(load(path), state())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("call", "after"), [("create", 1), ("write", 0), ("write", 9), ("sync", 0), ("sync", 2)])
def test_an_error_of_any_task_cancels_the_save_and_leaves_older_ones(
    tmp_path: Path, threads: int, call: str, after: int
) -> None:
    older = files(saved(tmp_path, state(1), threads=threads))
    fault = Fault(kind="error", code=errno.ENOSPC, on=(call,), after=after)
    stager, persister = Stager(), Persister(FaultyDisk(fault), threads=threads)
    for _ in range(3):  # buffers come back: a third snapshot finds one
        taken = stager.take({group: list(local_shards(tensors)) for group, tensors in groups_of(state(2)).items()})
        assert taken
        persister.submit(tmp_path, manifest_of(state(2)), taken, tokenizer=b"{}")
    persister.close()
    stager.close()
    outcomes = persister.finished()
    assert len(outcomes) == 3
    assert all("No space left" in str(outcome.error) for outcome in outcomes)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]
    assert files(list_checkpoints(tmp_path)[0]) == older


def test_a_power_cut_is_borne_with_many_threads(tmp_path: Path) -> None:
    root, disk = tmp_path / "disk", RecordingDisk()
    root.mkdir()
    for step in (1, 2):
        saved(root / "checkpoints", power_state(step), threads=3, disk=disk)
        disk.acknowledge(step)
    assert check(disk, root, tmp_path / "scratch") > 300


def test_writing_begins_before_the_copy_has_ended(tmp_path: Path) -> None:
    """The first file is durable while a part of the second is still to come."""
    what, came = state(), Future[None]()
    parts = {group: list(local_shards(tensors)) for group, tensors in groups_of(what).items()}
    synced = threading.Event()

    class Tells(LocalDisk):
        def create(self, path: Path):
            if path.name == "optimizer.safetensors":
                synced.set()
            return super().create(path)

    def arrive() -> None:
        assert synced.wait(10)
        came.set_result(None)

    thread = threading.Thread(target=arrive)
    thread.start()
    path = tmp_path / "place"
    path.mkdir()
    write_tensor_files(
        path,
        parts,
        tokenizer=what.tokenizer,
        disk=Tells(),
        attempt=Attempt(),
        arrivals={"optimizer": {"step": came}},
    )
    thread.join()
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
    ]


def test_a_snapshot_in_many_batches_is_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 3000)
    stager, persister = Stager(), Persister(LocalDisk(), threads=2)
    taken = stager.take({group: list(local_shards(tensors)) for group, tensors in groups_of(state()).items()})
    assert taken
    assert len({id(arrival) for group in taken.arrivals.values() for arrival in group.values()}) > 4
    persister.submit(tmp_path, manifest_of(state()), taken, tokenizer=state().tokenizer)
    persister.close()
    stager.close()
    (outcome,) = persister.finished()
    assert outcome.error is None
    assert outcome.tasks_s.keys() == {"copy", "hash", "write", "sync"}
    assert identical(load(outcome.path), state())
