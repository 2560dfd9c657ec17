"""Packed checkpoints come back bit for bit, in any part, and are chosen when they are durable sooner."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.checkpoint import shard_compression, shard_file
from ropewalk.checkpoint.commit import Attempt, commit
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.read.reshard import reshard
from ropewalk.checkpoint.run_state import groups_of, local_shards, manifest_of
from ropewalk.checkpoint.shard_compression import CompressionPolicy, compress, decompress
from ropewalk.checkpoint.shard_file import FileEntry, ShardFile
from ropewalk.checkpoint.write.save import write_tensor_files
from ropewalk.checkpoint.write.shard_writer import FileBlock, ShardWriter
from ropewalk.checkpoint.write.task_graph import TaskGraph, run_graph
from ropewalk.train.loop import train
from tests.checkpoint.test_checkpoint import identical, state
from tests.tiny import make_run
from tests.train.runs import final_files, quick, train_until


@given(st.binary(max_size=300), st.sampled_from([1, 2, 4, 8]))
def test_what_is_packed_is_unpacked(raw: bytes, item: int) -> None:
    assert decompress(memoryview(compress(raw, item=item))) == raw


def test_planes_hold_the_first_bytes_of_all_numbers_first() -> None:
    raw = bytes(range(8)) * 200
    frame = compress(raw, item=4)
    planes = pyarrow.decompress(frame[5:], decompressed_size=len(raw), codec="zstd", asbytes=True)
    assert planes == b"".join(raw[place::4] for place in range(4))


def test_what_does_not_get_smaller_is_left_as_it_is() -> None:
    noise = random.Random(0).randbytes(1000)
    assert compress(noise, item=4) == b"\0" + (1000).to_bytes(4, "little") + noise


@settings(deadline=None)  # each example syncs a file
@given(sizes=st.lists(st.integers(0, 90), max_size=8), seed=st.integers(0, 99), chunk=st.sampled_from([16, 64, 1000]))
def test_any_range_of_a_packed_file_is_that_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, chunk: int
) -> None:
    draw = random.Random(seed)
    blocks = [bytes(draw.choices(b"\0\0\0abc", k=size)) for size in sizes]
    raw = b"".join(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_compression, "FRAME_BYTES", 48)
        patch.setattr(shard_file, "CHUNK_BYTES", chunk)
        path = tmp_path_factory.mktemp("packed") / "file"
        file, graph = (
            ShardWriter(LocalDisk(), path, [FileBlock(data=memoryview(b)) for b in blocks], item=4),
            TaskGraph(),
        )
        with contextlib.ExitStack() as opened:
            file.add_to(graph, opened)
            run_graph(graph, threads=2, memory_bytes=200)
        entry = file.close()
    entry = FileEntry(bytes=entry.bytes, chunks=entry.chunks, chunk_bytes=chunk, frames=entry.frames, frame_bytes=48)
    opened = ShardFile(path, entry)
    for _ in range(10):
        begin, end = sorted(draw.choices(range(len(raw) + 1), k=2))
        assert bytes(opened.read_raw(begin, end)) == raw[begin:end]
    assert list(opened.problems()) == []


def packed_state(folder: Path) -> Path:
    what = state()
    parts = {group: list(local_shards(tensors)) for group, tensors in groups_of(what).items()}
    return commit(
        folder,
        manifest_of(what),
        write=lambda place: write_tensor_files(
            place, parts, tokenizer=what.tokenizer, disk=LocalDisk(), attempt=Attempt(), policy=CompressionPolicy("on")
        ),
        disk=LocalDisk(),
    )


def test_a_packed_checkpoint_is_loaded_and_resharded_bit_for_bit(tmp_path: Path) -> None:
    path = packed_state(tmp_path / "packed")
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.safetensors.planes",
        "optimizer.safetensors.planes",
        "tokenizer.json",
    ]
    assert verify_checkpoint(path) == []
    assert identical(load(path), state())
    plain = reshard(path, tmp_path / "plain", mesh=(2,))
    assert identical(load(plain), state())
    assert not any(entry.frames for entry in read_checkpoint_manifest(plain).files.values())


def test_every_flip_in_a_packed_file_is_found_and_its_tensors_named(tmp_path: Path) -> None:
    path = packed_state(tmp_path)
    draw = random.Random(3)
    for number in range(100):
        name = ("model", "optimizer")[number % 2]
        file = path / f"{name}.safetensors.planes"
        whole = file.read_bytes()
        position = draw.randrange(len(whole))
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << draw.randrange(8)]) + whole[position + 1 :])
        (wrong,) = verify_checkpoint(path)
        assert wrong.startswith(f"{file}: damaged")
        assert f"{name}/" in wrong
        with pytest.raises(DataError, match=file.name):
            load(path)
        file.write_bytes(whole)


def test_auto_packs_for_a_slow_disk_and_not_for_a_fast_one() -> None:
    sample = torch.randn(1 << 18).numpy().data.cast("B")
    policy = CompressionPolicy("auto")
    assert not policy.chooses(sample, item=4)  # the disk is not known yet
    policy.wrote(1 << 30, seconds=1000.0)
    assert policy.chooses(sample, item=4)
    policy.wrote(1 << 30, seconds=0.001)
    assert not policy.chooses(sample, item=4)
    policy.wrote(1 << 30, seconds=1000.0)
    noise = memoryview(random.Random(0).randbytes(1 << 20))
    assert not policy.chooses(noise, item=4)


def test_a_run_with_packing_ends_with_the_same_weights_and_may_change_it_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    plain, packed = make_run(tmp_path / "plain"), make_run(tmp_path / "packed", checkpoint__compression="on")
    train(plain)
    train_until(packed, 7)
    assert "model.safetensors.planes" in final_files(packed)
    make_run(tmp_path / "packed", checkpoint__compression="off")
    train(packed)
    assert final_files(packed)["model.safetensors"] == final_files(plain)["model.safetensors"]
