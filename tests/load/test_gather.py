"""Gathered rows are those that a slow loader reads token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.batch import Compact
from ropewalk.load.config import Packing
from ropewalk.load.gather import Lines, RowForm, gather
from ropewalk.load.loader import Loader
from ropewalk.load.order import Rows
from ropewalk.load.sources import Part
from tests.load.slowly import SlowRow, numbered, slow_rows, write

SIZES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=4).filter(
    lambda shards: sum(map(sum, shards)) > 40
)


def assert_equal(loader: Loader, slow: list[SlowRow], first: int) -> None:
    batch = loader.batch(first, len(slow))
    targets = torch.where(batch.weight > 0, batch.targets, -1).tolist()
    for number, row in enumerate(slow):
        assert batch.tokens[number].tolist() == row.tokens
        assert targets[number] == [-1 if target is None else target for target in row.targets]
        assert batch.positions[number].tolist() == row.positions
        assert batch.documents[number].tolist() == row.documents


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.dictionaries(st.sampled_from("abc"), SIZES, min_size=1),
    masked=st.booleans(),
    length=st.sampled_from([8, 11, 16]),
    first=st.integers(0, 10_000),
)
def test_batches_equal_those_of_a_slow_loader(
    tmp_path_factory: pytest.TempPathFactory,
    packing: Packing,
    sizes: dict[str, list[list[int]]],
    masked: bool,
    length: int,
    first: int,
) -> None:
    sources = numbered(sizes, masked=masked)
    folder = write(tmp_path_factory.mktemp("slow"), sources)
    loader = Loader(folder, sequence_length=length, batch_size=1, seed=1, packing=packing)
    shards = [sources[name] for name in loader.order.names]
    rows = loader.order.rows(first, 12)
    assert_equal(loader, slow_rows(rows, shards, length=length, packing=packing), first)
    loader.close()


def gathered(parts: list[Part], begin: int, *, length: int, dtype: str = "uint16") -> list[int]:
    """The tokens of one window."""
    form = RowForm(length, dtype)  # type: ignore[arg-type]
    whole = np.array([length], np.int32)
    rows = Rows(np.array([0, 1]), np.zeros(1, np.int32), np.array([begin]), whole, whole)
    memory = torch.empty((1, form.row_bytes), dtype=torch.uint8)
    gather(rows, Lines.of([parts]), form, whole=False, buffer=memory.numpy())
    batch = Compact(memory, form, restarts=False, filled=length).to(torch.device("cpu"))
    return [*batch.tokens[0].tolist(), batch.targets[0, -1].item()]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_the_largest_tokens_of_either_width_come_back(dtype: type) -> None:
    tokens = np.array([0, np.iinfo(dtype).max, 5, 1 << 15, 7, 8, 9, 10, 11], dtype)
    parts = [Part(tokens, np.array([0, 9]))]
    assert gathered(parts, 0, length=8, dtype=np.dtype(dtype).name) == tokens.tolist()


def test_narrow_and_wide_parts_join_in_one_row() -> None:
    narrow = Part(np.arange(5, dtype=np.uint16), np.array([0, 5]))
    wide = Part(np.arange(5, 20, dtype=np.uint32) + (1 << 20), np.array([0, 15]))
    expected = [*range(1, 5), *range(5 + (1 << 20), 10 + (1 << 20))]
    assert gathered([narrow, wide], 1, length=8, dtype="uint32") == expected


def test_parts_without_tokens_are_passed_over() -> None:
    empty = Part(np.zeros(0, np.uint16), np.array([0]))
    parts = [empty, Part(np.arange(4, dtype=np.uint16), np.array([0, 4])), empty, empty]
    parts.append(Part(np.arange(4, 12, dtype=np.uint16), np.array([0, 8])))
    assert gathered(parts, 2, length=8) == list(range(2, 11))


def test_rows_beyond_the_end_of_their_line_are_not_read() -> None:
    parts = [Part(np.arange(20, dtype=np.uint16), np.array([0, 20]))]
    assert gathered(parts, 11, length=8)[-1] == 19
    with pytest.raises(AssertionError, match="where their line ends"):
        gathered(parts, 12, length=8)


def test_a_row_takes_two_bytes_and_two_bits_a_token() -> None:
    assert RowForm(2048, "uint16").row_bytes == 4616  # 2 * 2049 + 2 * 256, in eighths
    assert RowForm(2048, "uint32").row_bytes == 8712


def test_the_corpus_may_be_read_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", numbered({"a": [[9, 30]]}))
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    loader = Loader(folder, sequence_length=8, batch_size=2, seed=1)
    assert len(loader.next()) == 2
    loader.close()
