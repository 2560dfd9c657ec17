"""What is made ahead: bounded, in order, and errors come to the batch that has them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ropewalk.load.batch import Compact
from ropewalk.load.config import AHEAD_BATCHES
from ropewalk.load.gather import RowForm
from ropewalk.load.ring import BLOCK_BYTES, Block, Ring
from ropewalk.load.stalls import Times

FORM = RowForm(8, "uint16")
BATCH_BYTES = 4 * FORM.row_bytes


class Maker:
    """Makes batches that tell their first row, and remembers what was asked of it."""

    def __init__(self, check: Callable[[int], None] = lambda row: None) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.check = check

    def __call__(self, first: int, rows: int, count: int) -> Block:
        self.asked.append((first, rows, count))
        batches = []
        for row in range(first, first + rows * count, rows):
            self.check(row)
            memory = torch.zeros((rows, FORM.row_bytes), dtype=torch.uint8)
            batches.append(Compact(memory, FORM, restarts=False, filled=row))
        return Block(batches, Times(0.0, 0.0, 1.0), fetched_bytes=count)

    @property
    def made_bytes(self) -> int:
        return sum(rows * count * FORM.row_bytes for _, rows, count in self.asked)


def ring(maker: Maker, *, prefetch_bytes: int = 20 * BATCH_BYTES, threads: int = 1) -> Ring:
    return Ring(maker, row_bytes=FORM.row_bytes, prefetch_bytes=prefetch_bytes, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_order_for_sizes_that_change_and_rows_that_are_left_out(threads: int) -> None:
    taker = ring(Maker(), threads=threads)
    row = 0
    for rows, left_out in [(4, 0)] * 30 + [(8, 0)] * 9 + [(8, 8), (8, 0), (4, 3), (4, 0)]:
        row += left_out
        taken = taker.take(row, rows)
        assert (taken.batch.filled, len(taken.batch)) == (row, rows)
        row += rows
    taker.close()


def test_going_back_makes_the_same_batch_again() -> None:
    taker = ring(Maker())
    assert [taker.take(row, 4).batch.filled for row in (0, 4, 8, 4, 8, 0)] == [0, 4, 8, 4, 8, 0]
    taker.close()


@pytest.mark.parametrize("batches", [4, 20, AHEAD_BATCHES, 5000])
def test_no_more_is_made_ahead_than_the_bound(batches: int) -> None:
    maker = Maker()
    taker = ring(maker, prefetch_bytes=batches * BATCH_BYTES)
    for step in range(600):
        taker.take(4 * step, 4)
        assert maker.made_bytes - (step + 1) * BATCH_BYTES <= min(batches, AHEAD_BATCHES) * BATCH_BYTES
    taker.close()


def test_a_batch_larger_than_the_bound_still_has_one_made_ahead() -> None:
    maker = Maker()
    taker = ring(maker, prefetch_bytes=1)
    taker.take(0, 4)
    taker.take(4, 4)
    taker.close()
    assert maker.asked[:2] == [(0, 4, 1), (4, 4, 1)]


def test_blocks_grow_from_one_batch_to_the_size_of_a_block() -> None:
    maker = Maker()
    taker = ring(maker, prefetch_bytes=64 * BLOCK_BYTES)
    for step in range(6):
        taker.take(4 * step, 4)
    taker.close()
    counts = [count for _, _, count in maker.asked]
    assert counts[:4] == [1, 2, 4, 8]
    assert max(counts) * BATCH_BYTES <= BLOCK_BYTES


def test_an_error_comes_to_the_batch_that_has_it_and_not_to_those_before() -> None:
    def check(row: int) -> None:
        if row == 40:
            raise OSError("the disk went away")

    taker = ring(Maker(check))
    assert [taker.take(row, 4).batch.filled for row in range(0, 40, 4)] == list(range(0, 40, 4))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk went away"):
            taker.take(40, 4)
    assert taker.take(44, 4).batch.filled == 44
    taker.close()


def test_the_times_of_a_block_are_counted_once() -> None:
    maker = Maker()
    taker = ring(maker)
    taken = [taker.take(4 * step, 4) for step in range(15)]
    taker.close()
    begun = [first // 4 for first, _, _ in maker.asked]
    assert [step for step, each in enumerate(taken) if each.times.fetch_began == 0.0] == [s for s in begun if s < 15]
    assert sum(each.fetched_bytes for each in taken) == sum(count for f, _, count in maker.asked if f < 60)


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    taker = ring(Maker(), threads=3)
    taker.take(0, 4)
    taker.close()
    assert set(threading.enumerate()) <= before
