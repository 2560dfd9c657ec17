"""The compact form of a batch says the same as the batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.batch import Batch, Compact, Courier
from ropewalk.load.gather import RowForm

CPU = torch.device("cpu")


def compact(tokens: np.ndarray, starts: np.ndarray, counts: np.ndarray, *, restarts: bool) -> Compact:
    """Rows written as the form says, by numpy alone."""
    rows, length = starts.shape
    form = RowForm(length, "uint16" if tokens.dtype == np.uint16 else "uint32")
    parts = [tokens.view(np.uint8), *(np.packbits(bits, axis=1, bitorder="little") for bits in (starts, counts))]
    joined = np.concatenate(parts, axis=1)
    memory = np.zeros((rows, form.row_bytes), np.uint8)
    memory[:, : joined.shape[1]] = joined
    return Compact(torch.from_numpy(memory), form, restarts=restarts, filled=rows * length)


def test_plain_rows_are_one_document_each_that_counts_everywhere() -> None:
    tokens = np.random.default_rng(0).integers(0, 99, (3, 9), dtype=np.uint16)
    starts, counts = np.zeros((3, 8), bool), np.ones((3, 8), bool)
    starts[:, 0] = True
    expected = compact(tokens, starts, counts, restarts=True).to(CPU)
    found = Batch.of_rows(torch.from_numpy(tokens.astype(np.int64)))
    for field in dataclasses.fields(Batch):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), field.name


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(8, 40), st.sampled_from([np.uint16, np.uint32]), st.integers(0, 2**32 - 1))
def test_what_was_packed_is_unpacked(rows: int, length: int, dtype: type, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, np.iinfo(dtype).max, (rows, length + 1), endpoint=True, dtype=dtype)
    starts, counts = draw.random((2, rows, length)) < 0.3
    starts[:, 0] = True
    batch = compact(tokens, starts, counts, restarts=True).to(CPU)
    assert batch.tokens.tolist() == tokens[:, :-1].tolist()
    assert batch.targets.tolist() == tokens[:, 1:].tolist()
    assert batch.weight.tolist() == counts.astype(float).tolist()
    for row in range(rows):
        position = document = -1
        for place in range(length):
            position, document = (0, document + 1) if starts[row, place] else (position + 1, document)
            assert (batch.positions[row, place], batch.documents[row, place]) == (position, document)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(8, 40), st.sampled_from([np.uint16, np.uint32]), st.booleans())
def test_a_device_makes_of_it_what_the_host_makes(rows: int, length: int, dtype: type, restarts: bool) -> None:
    draw = np.random.default_rng(length)
    tokens = draw.integers(0, np.iinfo(dtype).max, (rows, length + 1), endpoint=True, dtype=dtype)
    starts, counts = draw.random((2, rows, length)) < 0.3
    starts[:, 0] = True
    packed = compact(tokens, starts, counts, restarts=restarts)
    here, there = packed.to(CPU), packed.expanded(packed.rows)
    for field in dataclasses.fields(Batch):
        one, other = getattr(here, field.name), getattr(there, field.name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_from_page_locked_memory_arrives_whole_while_its_memory_is_used_again() -> None:
    draw = np.random.default_rng(0)
    batches, expected = [], []
    for _ in range(50):
        tokens = draw.integers(0, 1 << 16, (64, 1025)).astype(np.uint16)
        starts, counts = draw.random((2, 64, 1024)) < 0.3
        starts[:, 0] = True
        packed = compact(tokens, starts, counts, restarts=True)
        pinned = dataclasses.replace(packed, rows=packed.rows.pin_memory())
        batches.append(pinned.to(torch.device("cuda")))
        del pinned  # its memory may be given out again
        expected.append(packed.to(CPU))
    for one, other in zip(batches, expected, strict=True):
        for field in dataclasses.fields(Batch):
            assert torch.equal(getattr(one, field.name).cpu(), getattr(other, field.name))


def rising(first: int) -> Compact:
    """64 rows of 1024 tokens from `first` on, in page-locked memory."""
    tokens, starts = np.arange(first, first + 64 * 1025).reshape(64, 1025), np.ones((64, 1024), bool)
    packed = compact(tokens.astype(np.uint16), starts, starts, restarts=True)
    return dataclasses.replace(packed, rows=packed.rows.pin_memory())


A_WHILE = 1_000_000_000
"""Cycles of a GPU: about half a second."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_arrives_while_the_device_computes() -> None:
    courier, packed = Courier(torch.device("cuda")), rising(0)
    courier.bring(packed)  # loads the kernels, and takes the memory
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * A_WHILE)
    computed = torch.cuda.current_stream().record_event()
    # What is asked for from here on waits for no more than the copy.
    batches = [courier.bring(packed) for _ in range(100)]
    assert courier._stream is not None
    courier._stream.synchronize()
    assert not computed.query()
    for field in dataclasses.fields(Batch):
        expected = getattr(packed.to(CPU), field.name)
        assert all(torch.equal(getattr(batch, field.name).cpu(), expected) for batch in batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_waits_for_its_batch_and_keeps_it() -> None:
    courier = Courier(torch.device("cuda"))
    courier.bring(rising(0))
    assert courier._stream is not None
    with torch.cuda.stream(courier._stream):
        torch.cuda._sleep(A_WHILE)  # slow to arrive
    read = [courier.bring(rising(7)).tokens.clone()]
    for first in range(5):
        batch = courier.bring(rising(first))
        torch.cuda._sleep(A_WHILE // 10)  # slow to be read, when the next ones are there already
        read.append(batch.tokens.clone())
        del batch
    for tokens, first in zip(read, [7, *range(5)], strict=True):
        assert torch.equal(tokens.cpu(), rising(first).to(CPU).tokens)


def test_windows_count_positions_from_the_beginning_of_the_row() -> None:
    starts = np.array([[1, 0, 0, 1, 0, 0, 1, 0]], bool)
    batch = compact(np.zeros((1, 9), np.uint16), starts, starts, restarts=False).to(CPU)
    assert batch.positions.tolist() == [list(range(8))]
    assert [t.dtype for t in (batch.tokens, batch.targets, batch.positions)] == [torch.int64] * 3
    assert (batch.weight.dtype, batch.documents.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("restarts", [False, True])
def test_rows_cut_short_count_positions_from_their_own_beginning(restarts: bool) -> None:
    starts = np.array([[1, 0, 0, 0, 0, 1, 0, 0]], bool)
    batch = compact(np.arange(9, dtype=np.uint16)[None], starts, starts, restarts=restarts).to(CPU).cut(4)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2] if restarts else [0, 1, 2, 3]]
