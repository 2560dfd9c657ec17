"""Damaged files of every format: no crash, no hang, and each of them in the ledger."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from format_samples import Sample, samples
from mutations import damaged
from planning import planned

from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.read import read_records

SAMPLES = samples()
HANG_S = 60
"""Far above the time that any of these small files takes."""


@contextlib.contextmanager
def no_hang(name: str, *, seconds: int = HANG_S) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError(f"{name} is read for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def inputs(count: int, *, seed: int) -> Iterator[tuple[str, Sample, bytes]]:
    """`count` damaged files, over all formats in turn: name, what it was, bytes."""
    others = [sample.data for sample in SAMPLES.values()]
    for number, (name, sample) in zip(range(count), itertools.cycle(SAMPLES.items()), strict=False):
        yield f"{number:05d}-{name}", sample, damaged(sample, others, random.Random(f"{seed} {number}"))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_whole_file_has_no_fault(read, name: str) -> None:
    records = read(name, SAMPLES[name].data, format=SAMPLES[name].format)
    assert {record.fault for record in records} <= {"", "passed_over"}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_cut_off_anywhere_gives_a_prefix_and_a_fault(read, name: str) -> None:
    data = SAMPLES[name].data
    whole = {record.id: record for record in read(name, data, format=SAMPLES[name].format)}
    for cut in range(0, len(data), 1 + len(data) // 40):
        records = read(name, data[:cut], format=SAMPLES[name].format)
        assert records
        # What is kept is what the whole file has, but for the one document that the cut goes through.
        changed = [record for record in records if not record.fault and record != whole.get(record.id)]
        assert len(changed) <= 1
        assert all(record.id in whole for record in changed)


def test_damaged_files_give_records_that_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sample, data in inputs(420, seed=1):
        Path(name).write_bytes(data)
        with no_hang(name):
            file = planned(name, format=sample.format)
            records = list(read_records(file))
        assert records, f"{name} has left no trace"
        assert len({record.id for record in records}) == len(records)
        assert all(record.id.startswith(f"s:{name}") for record in records)
        for record in records:
            assert all(text.encode() is not None for text in (record.id, record.fault, record.url, record.time))
        Path(name).unlink()


@pytest.mark.parametrize("count", [140, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_damaged_file_is_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {"auto": "files", "chat": "chats"}
    for folder in folders.values():
        Path(folder).mkdir()
    names = []
    for name, sample, data in inputs(count, seed=2):
        names.append(f"{folders[sample.format]}:{folders[sample.format]}/{name}")
        Path(folders[sample.format], name).write_bytes(data)
    Path("good").mkdir()
    for number in range(50):
        Path(f"good/{number}.txt").write_text(f"A good document with number {number}.\n" * 3)
    settings = Prepare(
        sources=(
            Source(name="good", paths=("good",)),
            Source(name="files", paths=("files",)),
            Source(name="chats", paths=("chats",), format="chat"),
        ),
        filter=Filter(min_characters=1),
        tokenizer=Tokenizer(vocab_size=300, train_bytes=5000),
        validation_share=0.2,
        workers=1,
        folder="prepared",
    )
    with no_hang("the folder", seconds=HANG_S + count // 5):
        result = prepare(settings, seed=1)
    rows = pq.read_table(result.folder / "ledger.parquet", columns=["id", "outcome", "rule"]).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    # `source:file`, then `:line`, `!member` or nothing.
    told = collections.Counter(":".join(re.split("[:!]", row["id"])[:2]) for row in rows)
    good = {f"good:good/{number}.txt": 1 for number in range(50)}
    assert set(told) == {*names, *good}
    assert good.items() <= told.items()
    assert all(row["rule"] for row in rows if row["outcome"] == "removed")
    assert {row["outcome"] for row in rows} <= {"kept", "edited", "removed"}
