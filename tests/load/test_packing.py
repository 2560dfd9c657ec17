"""Best-fit-decreasing packing, and the file that keeps what came of it."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.layout import Layout, laid_out
from ropewalk.load.packing import BLOCK_DOCUMENTS, packed
from ropewalk.load.permutation import permuted

Row = list[tuple[int, int, int]]


def slow(lengths: list[int], length: int, *, order: list[int]) -> list[Row]:
    """Best-fit-decreasing as one says it: (first token, inputs, targets) of each piece of each row."""
    ends = np.cumsum(lengths).tolist()
    rows: list[Row] = []
    for block in range(0, len(order), BLOCK_DOCUMENTS):
        rests = []
        for document in order[block : block + BLOCK_DOCUMENTS]:
            begin, end = ends[document] - lengths[document], ends[document]
            while end - begin >= length:
                rows.append([(begin, length, length - (end - begin == length))])
                begin += length
            if begin < end:
                rests.append((begin, end - begin))
        opened: list[tuple[int, Row]] = []
        for begin, size in sorted(rests, key=lambda rest: -rest[1]):
            room, row = min(
                ((room, row) for room, row in reversed(opened) if room >= size),
                key=lambda one: one[0],
                default=(length, None),
            )
            if row is None:
                row = []
                rows.append(row)
            else:
                # By identity: it is filled now, so it becomes the one filled last.
                opened = [one for one in opened if one[1] is not row]
            row.append((begin, size, size - 1))
            opened.append((room - size, row))
    return rows


def rows_of(layout: Layout) -> list[Row]:
    inputs = layout.pieces >> np.uint64(1) & np.uint64(2**21 - 1)
    columns = (layout.pieces >> np.uint64(22), inputs, inputs - (layout.pieces & np.uint64(1)))
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    return [pieces[first:behind] for first, behind in zip(layout.starts, layout.starts[1:], strict=False)]


def in_memory(lengths: list[int], length: int, key: int | None) -> Layout:
    return laid_out(np.array(lengths, np.int64), length=length, key=key, folder=None, name="a")


@settings(max_examples=150, deadline=None)
@given(
    length=st.sampled_from([1, 2, 3, 7, 64, 100, 5000]),
    shares=st.lists(st.floats(0, 3), max_size=120),
    key=st.none() | st.integers(0, 2**63 - 1),
)
def test_packing_is_best_fit_decreasing(length: int, shares: list[float], key: int | None) -> None:
    lengths = [int(share * length) for share in shares]
    count = len(lengths)
    order = list(range(count)) if key is None else permuted(np.arange(count), count, key).tolist()
    assert rows_of(in_memory(lengths, length, key)) == slow(lengths, length, order=order)


def test_blocks_are_packed_by_themselves() -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 2 * BLOCK_DOCUMENTS + 100).tolist()
    layout = in_memory(lengths, 32, 5)
    order = permuted(np.arange(len(lengths)), len(lengths), 5).tolist()
    assert rows_of(layout) == slow(lengths, 32, order=order)
    assert len(layout.blocks) == 4
    assert layout.blocks[-1] == layout.rows


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 300), seed=st.integers(0, 99), key=st.none() | st.integers(0, 2**63 - 1))
def test_every_token_is_in_exactly_one_row_and_no_row_is_too_long(length: int, seed: int, key: int | None) -> None:
    lengths = np.random.default_rng(seed).integers(0, 3 * length + 2, 80)
    read = np.zeros(lengths.sum(), int)
    last = np.zeros(lengths.sum(), bool)
    last[np.cumsum(lengths)[lengths > 0] - 1] = True
    for row in rows_of(in_memory(lengths.tolist(), length, key)):
        assert 1 <= sum(inputs for _, inputs, _ in row) <= length
        for begin, inputs, targets in row:
            read[begin : begin + inputs] += 1
            assert inputs - targets == last[begin : begin + inputs].sum()
    assert (read == 1).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), key=st.none() | st.integers(0, 2**63 - 1))
def test_the_rows_of_a_document_are_found(seed: int, key: int | None) -> None:
    lengths = np.random.default_rng(seed).integers(0, 100, 50)
    layout = in_memory(lengths.tolist(), 32, key)
    rows = rows_of(layout)
    for document, end in enumerate(np.cumsum(lengths).tolist()):
        begin = end - int(lengths[document])
        holding = [n for n, row in enumerate(rows) if any(begin <= piece[0] < end for piece in row)]
        assert layout.rows_holding(document, begin, end).tolist() == holding


def test_hardly_any_place_is_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.9, 1.1, 10 * BLOCK_DOCUMENTS), 16, 60000).astype(np.int64)
    fill = {
        length: lengths.sum() / length / laid_out(lengths, length=length, key=1, folder=None, name="a").rows
        for length in (2048, 8192)
    }
    assert fill[2048] > 0.999
    assert fill[8192] > 0.998


LENGTHS = np.random.default_rng(1).integers(1, 90, 3000)


def kept(folder: Path) -> Layout:
    return laid_out(LENGTHS, length=64, key=9, folder=folder, name="a")


def same(one: Layout, other: Layout) -> bool:
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in ("starts", "pieces", "blocks"))


def file_in(folder: Path) -> Path:
    (path,) = folder.glob("*.bin")
    return path


def test_the_file_holds_what_was_made_and_is_not_made_twice(tmp_path: Path) -> None:
    made = laid_out(LENGTHS, length=64, key=9, folder=None, name="a")
    assert same(kept(tmp_path / "layouts"), made)
    path = file_in(tmp_path / "layouts")
    before = path.stat()
    assert same(kept(tmp_path / "layouts"), made)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage"])
def test_a_damaged_file_is_made_again_byte_for_byte(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = kept(tmp_path)
    path = file_in(tmp_path)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 4
    path.unlink()
    path.write_bytes({"flip": bytes(bad), "cut": good[:-100], "empty": b"", "garbage": b"layout" * 99}[damage])
    with caplog.at_level(logging.WARNING):
        assert same(kept(tmp_path), made)
    assert path.read_bytes() == good
    assert path.name in caplog.text


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    kept(tmp_path)
    path = file_in(tmp_path)
    good = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good), 40).tolist():
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(bad))
        kept(tmp_path)
        assert path.read_bytes() == good, place


def test_other_documents_rows_or_keys_have_other_files(tmp_path: Path) -> None:
    laid_out(LENGTHS, length=64, key=9, folder=tmp_path, name="a")
    laid_out(LENGTHS, length=65, key=9, folder=tmp_path, name="a")
    laid_out(LENGTHS, length=64, key=None, folder=tmp_path, name="a")
    laid_out(LENGTHS[::-1], length=64, key=9, folder=tmp_path, name="a")
    assert len(list(tmp_path.glob("*.bin"))) == 4


def test_where_nothing_can_be_written_it_is_made_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A file where the folder should be: the one refusal that root meets too.
    (tmp_path / "layouts").write_text("")
    with caplog.at_level(logging.WARNING):
        found = kept(tmp_path / "layouts")
    assert same(found, laid_out(LENGTHS, length=64, key=9, folder=None, name="a"))
    assert "in memory" in caplog.text


def _make(folder: Path) -> None:
    kept(folder)


def test_processes_that_start_together_make_one_file(tmp_path: Path) -> None:
    kept(tmp_path / "before")
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_make, args=(tmp_path / "layouts",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert file_in(tmp_path / "layouts").read_bytes() == file_in(tmp_path / "before").read_bytes()


def test_rows_too_long_for_the_table_are_refused() -> None:
    with pytest.raises(DataError, match="too many to pack"):
        in_memory([10], 1 << 21, None)


def test_groups_do_not_depend_on_each_other() -> None:
    lengths = np.random.default_rng(2).integers(1, 30, 70 * BLOCK_DOCUMENTS)
    groups = list(packed(lengths, length=64, key=None))
    assert len(groups) == 2
    assert sum(int(group.blocks.sum()) for group in groups) == sum(len(group.sizes) for group in groups)
    alone = next(packed(lengths[: 64 * BLOCK_DOCUMENTS], length=64, key=None))
    assert np.array_equal(alone.pieces, groups[0].pieces)
