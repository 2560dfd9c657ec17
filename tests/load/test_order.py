"""The order of the data: a pure function of the row's number, and its inverse."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.history import History
from ropewalk.load.mixture import Mixture
from ropewalk.load.order import Order, Rows, SourceData

Packing = Literal["windows", "best-fit"]
Shuffle = Literal["all", "blocks"]
PACKINGS = st.sampled_from(["windows", "best-fit"])
SHUFFLES = st.sampled_from(["all", "blocks"])
LENGTH = 16


def documents(seed: int, count: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).integers(0, 3 * LENGTH, count)
    lengths[0] += LENGTH + 1
    return lengths


def order_of(
    lengths: dict[str, np.ndarray],
    *,
    packing: Packing = "windows",
    shuffle: Shuffle = "all",
    seed: int = 0,
    mixture: Mixture | None = None,
    length: int = LENGTH,
) -> Order:
    return Order(
        [SourceData(name, one) for name, one in lengths.items()],
        sequence_length=length,
        seed=seed,
        packing=packing,
        shuffle=shuffle,
        mixture=mixture or Mixture.constant(dict.fromkeys(lengths, 1.0)),
    )


Pieces = list[tuple[int, int, int, int]]


def listed(rows: Rows) -> list[Pieces]:
    """(source, begin, inputs, targets) of the pieces of each row."""
    columns = (rows.source, rows.begin, rows.length, rows.targets)
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    return [pieces[first:behind] for first, behind in zip(rows.starts, rows.starts[1:], strict=False)]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    packing=PACKINGS,
    shuffle=SHUFFLES,
)
def test_an_epoch_reads_every_token_of_a_source_once(
    counts: list[int], seed: int, packing: Packing, shuffle: Shuffle
) -> None:
    lengths = {name: documents(seed, count) for name, count in zip("abc", counts, strict=False)}
    order = order_of(lengths, packing=packing, shuffle=shuffle, seed=seed)
    rows = [row for row in listed(order.rows(0, 2000))]
    for source, (name, size) in enumerate(order.source_rows.items()):
        mine = [row for row in rows if row[0][0] == source]
        assert all(piece[0] == source for row in mine for piece in row)
        tokens = int(lengths[name].sum())
        for epoch in range(min(3, len(mine) // size)):
            read = np.zeros(tokens, int)
            for row in mine[epoch * size : (epoch + 1) * size]:
                for _, begin, inputs, _ in row:
                    read[begin : begin + inputs] += 1
            unread = order.unread[source]
            assert (read[: tokens - unread] == 1).all()
            assert (read[tokens - unread :] == 0).all()
            assert unread <= (LENGTH if packing == "windows" else 0)


@settings(max_examples=60, deadline=None)
@given(
    packing=PACKINGS,
    shuffle=SHUFFLES,
    per_rank=st.integers(1, 9),
    first=st.integers(0, 20_000),
    change=st.integers(0, 20_000),
)
def test_the_rows_of_all_ranks_interleaved_are_the_rows_of_one(
    packing: Packing, shuffle: Shuffle, per_rank: int, first: int, change: int
) -> None:
    lengths = {"a": documents(1, 60), "b": documents(2, 20), "c": documents(3, 5)}
    mixture = Mixture.linear({"a": 3, "b": 1}, {"a": 1, "b": 2}, 9000).changed(change + 1, {"a": 1.0, "c": 1.0})
    order = order_of(lengths, packing=packing, shuffle=shuffle, mixture=mixture)
    for world in range(1, 9):
        whole = listed(order.rows(first, world * per_rank))
        parts = [listed(order.rows(first + rank, per_rank, stride=world)) for rank in range(world)]
        assert [parts[row % world][row // world] for row in range(world * per_rank)] == whole


@settings(max_examples=30, deadline=None)
@given(packing=PACKINGS, shuffle=SHUFFLES, seed=st.integers(0, 99))
def test_a_row_depends_on_its_number_alone(packing: Packing, shuffle: Shuffle, seed: int) -> None:
    lengths = {"a": documents(seed, 40), "b": documents(seed + 1, 7)}
    forward = listed(order_of(lengths, packing=packing, shuffle=shuffle, seed=seed).rows(0, 500))
    order = order_of(lengths, packing=packing, shuffle=shuffle, seed=seed)
    for row in np.random.default_rng(seed).permutation(500)[:40].tolist():
        assert listed(order.rows(row, 1)) == [forward[row]]


@settings(max_examples=60, deadline=None)
@given(packing=PACKINGS, shuffle=SHUFFLES, seed=st.integers(0, 999), limited=st.booleans())
def test_the_rows_that_read_a_document_are_found(packing: Packing, shuffle: Shuffle, seed: int, limited: bool) -> None:
    lengths = {"a": documents(seed, 30), "b": documents(seed + 1, 9)}
    most = {"a": 2.0, "b": 3.5} if limited else {}
    mixture = Mixture.constant({"a": 2.0, "b": 1.0}, max_epochs=most).changed(41, {"a": 1.0, "b": 3.0}, max_epochs=most)
    order = order_of(lengths, packing=packing, shuffle=shuffle, seed=seed, mixture=mixture)
    count = 300 if order.total is None else min(300, order.total)
    rows = listed(order.rows(0, count))
    for source, (name, sizes) in enumerate(lengths.items()):
        for document, end in enumerate(np.cumsum(sizes).tolist()):
            begin = end - int(sizes[document])
            holding = [
                number
                for number, row in enumerate(rows)
                for at, first, inputs, targets in row
                # Inputs, and one token more where the last input has a target.
                if at == source and begin < end and first < end and begin < first + max(inputs, targets + 1)
            ]
            assert order.reads_of(name, document, rows=count) == holding


def test_the_steps_that_read_a_document_are_found_but_not_those_left_out() -> None:
    order = order_of({"a": documents(1, 30)}, packing="best-fit")
    history = History()
    for rows in (2, 2, 4, 4, 4):
        history.read(rows)
        history.skip(3 if rows == 2 else 0)
    for document in range(30):
        steps = {history.step_of(row) for row in order.reads_of("a", document, rows=history.row)} - {None}
        assert order.steps_of("a", document, history=history) == sorted(steps)
        for step in steps:
            read = history.rows_of(step)
            assert set(read) & set(order.reads_of("a", document, rows=history.row))


def test_epochs_differ_in_their_order_and_seeds_do() -> None:
    lengths = {"a": np.array([LENGTH * 100 + 1])}
    order = order_of(lengths)
    first, second = order.rows(0, 100).begin.tolist(), order.rows(100, 100).begin.tolist()
    assert sorted(first) == sorted(second)
    assert first != second
    assert len({tuple(order_of(lengths, seed=seed).rows(0, 50).begin) for seed in range(20)}) == 20


def test_a_source_keeps_its_order_when_others_join() -> None:
    lengths = {"a": documents(1, 50), "b": documents(2, 50)}
    alone = order_of({"b": lengths["b"]}).rows(0, 40).begin.tolist()
    both = order_of(lengths).rows(0, 80)
    assert both.begin[both.source == 1].tolist() == alone


def test_the_layout_is_the_same_in_every_epoch_but_not_the_order_of_rows() -> None:
    order = order_of({"a": documents(4, 50)}, packing="best-fit")
    size = order.source_rows["a"]
    first, second = listed(order.rows(0, size)), listed(order.rows(size, size))
    assert first != second
    assert sorted(first) == sorted(second)


def test_windows_have_a_target_for_every_input_and_pieces_end_with_their_documents() -> None:
    lengths = {"a": documents(5, 50)}
    assert all(row == [(0, row[0][1], LENGTH, LENGTH)] for row in listed(order_of(lengths).rows(0, 30)))
    ends = set(np.cumsum(lengths["a"]).tolist())
    pieces = [piece for row in listed(order_of(lengths, packing="best-fit").rows(0, 30)) for piece in row]
    assert all(inputs - targets == (begin + inputs in ends) for _, begin, inputs, targets in pieces)


def test_shuffled_blocks_read_neighbours_together() -> None:
    # Rows of 2**17 tokens: four of them are a block, 64 blocks a group.
    length, count = 1 << 17, 4000
    lengths = {"a": np.full(count, length)}

    def touched(shuffle: Shuffle) -> int:
        begin = order_of(lengths, shuffle=shuffle, length=length).rows(100, 512).begin
        return len(np.unique(begin // (4 * length)))

    assert touched("blocks") <= 4 * 64
    assert touched("all") > 350


def test_epochs_count_how_often_each_source_was_read() -> None:
    order = order_of({"a": np.array([64 * LENGTH + 1]), "b": np.array([512 * LENGTH + 1])})
    assert order.source_rows == {"a": 64, "b": 512}
    assert order.epochs(2048) == [16.0, 2.0]
    assert Counter(order.rows(0, 2048).source.tolist()) == {0: 1024, 1: 1024}
    assert order.counts(2048) == [1024, 1024]


def test_fill_is_the_share_of_places_that_hold_a_token() -> None:
    lengths = {"a": np.array([10, 10, 6, 20])}
    assert order_of(lengths).fill == [1.0]
    # 16 of the longest; 10 and 6; 10 and 4.
    assert order_of(lengths, packing="best-fit").fill == [46 / 48]


def test_when_all_sources_are_used_up_the_error_says_how_many_rows_there_are() -> None:
    mixture = Mixture.constant({"a": 1.0}, max_epochs={"a": 2})
    order = order_of({"a": np.array([50 * LENGTH + 1])}, mixture=mixture)
    assert order.total == 100
    assert len(order.rows(90, 10)) == 10
    with pytest.raises(DataError, match=r"row 100 is asked for, but the sources have only 100 rows.*max_epochs"):
        order.rows(91, 10)


def test_far_rows_are_found_at_once() -> None:
    lengths = {"a": documents(1, 500), "b": documents(2, 100)}
    for packing in ("windows", "best-fit"):
        order = order_of(lengths, packing=packing, mixture=Mixture.constant({"a": 0.7, "b": 0.3}))
        rows = order.rows(5 * 10**9, 512)
        assert len(rows) == 512
        assert (rows.begin >= 0).all()
        assert all(sum(piece[2] for piece in row) <= LENGTH for row in listed(rows))


def test_a_layout_kept_in_a_file_gives_the_same_rows(tmp_path: Path) -> None:
    lengths = documents(3, 200)

    def rows(layouts: Path | None) -> list[Pieces]:
        order = Order(
            [SourceData("a", lengths)],
            sequence_length=LENGTH,
            seed=1,
            packing="best-fit",
            mixture=Mixture.constant({"a": 1.0}),
            layouts=layouts,
        )
        return listed(order.rows(0, 100))

    assert rows(None) == rows(tmp_path / "layouts") == rows(tmp_path / "layouts")


def test_an_order_knows_its_own_state_and_names_what_differs() -> None:
    lengths = {"a": documents(1, 50), "seed": documents(2, 50)}
    saved = json.loads(json.dumps(order_of(lengths).identity()))
    order_of(lengths).check_identity(saved)
    order_of({**lengths, "c": documents(3, 9)}).check_identity(saved)
    with pytest.raises(DataError, match=r"seed was 0, now is 7; packing was windows, now is best-fit"):
        order_of(lengths, seed=7, packing="best-fit").check_identity(saved)
    with pytest.raises(DataError, match=r"source seed was \{'documents': 50.*now is \{'documents': 49"):
        order_of({"a": lengths["a"], "seed": documents(2, 49)}).check_identity(saved)
    with pytest.raises(DataError, match=r"source seed was .*now is absent"):
        order_of({"a": lengths["a"]}).check_identity(saved)


def test_a_source_too_short_for_a_row_is_named() -> None:
    with pytest.raises(DataError, match="one row of 16: b;"):
        order_of({"a": documents(1, 5), "b": np.array([LENGTH])})


def test_a_document_that_is_not_there_is_named() -> None:
    with pytest.raises(IndexError, match="a has 5 documents; there is no number 5"):
        order_of({"a": documents(1, 5)}).reads_of("a", 5, rows=10)
