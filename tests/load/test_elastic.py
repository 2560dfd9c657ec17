"""The law of load: whatever changes on the way, the run reads what the uninterrupted one reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.config import Packing
from ropewalk.load.loader import Loader
from ropewalk.load.mixture import Mixture
from tests.load.slowly import numbered, write

LENGTH = 8
PACKINGS: tuple[Packing, ...] = ("windows", "best-fit")
SIZES = {
    "a": [[3, 20, 1, 7, 11], [9, 2, 30, 5, 5, 16]],
    "b": [[12, 4, 4, 25], [8, 8, 17], [1, 6, 19, 2]],
}
WEIGHTS = ({"a": 0.7, "b": 0.3}, {"a": 0.1, "b": 0.9}, {"b": 1.0})

Row = tuple[int, ...]
"""The tokens of a row."""


@dataclass(frozen=True)
class Part:
    """Some steps of a run between two interruptions."""

    world: int
    threads: int
    per_reader: int
    """Rows of a batch, by reader."""
    steps: int
    weights: int
    skipped: int = 0
    """Rows left out before the first step."""

    @property
    def rows(self) -> int:
        return self.world * self.per_reader


PARTS = st.builds(
    Part,
    world=st.integers(1, 8),
    threads=st.integers(1, 3),
    per_reader=st.integers(1, 3),
    steps=st.integers(0, 6),
    weights=st.integers(0, len(WEIGHTS) - 1),
    skipped=st.sampled_from([0, 0, 0, 5]),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("elastic"), numbered(SIZES), a=1.0, b=1.0)


def read_part(folder: Path, part: Part, state: dict[str, Any] | None, packing: Packing) -> tuple[list[Row], Any]:
    """(the rows of all steps in global order, the state after) of a run that was stopped at `state`."""
    loaders = [
        Loader(
            folder,
            sequence_length=LENGTH,
            batch_size=part.rows,
            seed=5,
            mixture=WEIGHTS[part.weights],
            packing=packing,
            rank=rank,
            world=part.world,
            threads=part.threads,
            # A few batches: blocks are begun and ended within the test.
            prefetch_bytes=3 * part.per_reader * 32,
        )
        for rank in range(part.world)
    ]
    for loader in loaders:
        if state is not None:
            loader.seek(state)
        loader.skip(part.skipped)
    rows: list[Row] = []
    for _ in range(part.steps):
        by_reader = [loader.next().tokens.tolist() for loader in loaders]
        rows += [tuple(row) for together in zip(*by_reader, strict=True) for row in together]
    states = [loader.state() for loader in loaders]
    assert all(each == states[0] for each in states)
    for loader in loaders:
        loader.close()
    return rows, states[0]


def uninterrupted(folder: Path, parts: list[Part], packing: Packing) -> tuple[Loader, list[list[int]]]:
    """(a loader that knows all changes of the mixture, the row numbers of each part)."""
    row, numbers, mixture = 0, [], Mixture.constant(WEIGHTS[parts[0].weights])
    for part in parts:
        mixture = mixture.continued(row, Mixture.constant(WEIGHTS[part.weights]))
        row += part.skipped
        numbers.append(list(range(row, row + part.steps * part.rows)))
        row += part.steps * part.rows
    loader = Loader(folder, sequence_length=LENGTH, batch_size=1, seed=5, mixture=mixture, packing=packing)
    return loader, numbers


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(PARTS, min_size=2, max_size=4))
def test_any_change_of_readers_threads_batch_and_mixture_reads_what_the_uninterrupted_run_reads(
    corpus: Path, packing: Packing, parts: list[Part]
) -> None:
    straight, numbers = uninterrupted(corpus, parts, packing)
    state = None
    for part, wanted in zip(parts, numbers, strict=True):
        rows, state = read_part(corpus, part, state, packing)
        expected = straight.batch(wanted[0], len(wanted)).tokens.tolist() if wanted else []
        assert rows == [tuple(row) for row in expected]
    straight.close()


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(PARTS.filter(lambda part: not part.skipped), min_size=2, max_size=4))
def test_every_token_is_read_once_an_epoch_and_none_is_repeated_in_between(
    corpus: Path, packing: Packing, parts: list[Part]
) -> None:
    state, rows = None, []
    for part in parts:
        more, state = read_part(corpus, part, state, packing)
        rows += more
    first = 1
    for shards in SIZES.values():
        tokens = sum(map(sum, shards))
        mine = [row for row in rows if first <= row[0] < first + tokens]
        # Windows leave the end of the line that does not fill a row, and the last target.
        complete = tokens if packing == "best-fit" else (tokens - 1) // LENGTH * LENGTH
        whole = set(range(first, first + complete))
        seen: set[int] = set()
        for row in mine:
            real = {token for token in row if token}
            assert not real & seen, "a token came again before the epoch was over"
            seen |= real
            assert seen <= whole
            if seen == whole:
                seen = set()
        first += tokens


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_number_of_threads_makes_the_same_batches_bit_for_bit(corpus: Path, packing: Packing) -> None:
    def read(threads: int, prefetch_bytes: int) -> list[list[Any]]:
        loader = Loader(
            corpus,
            sequence_length=LENGTH,
            batch_size=3,
            seed=5,
            packing=packing,
            threads=threads,
            prefetch_bytes=prefetch_bytes,
        )
        batches = [loader.next() for _ in range(60)]
        loader.close()
        names = ("tokens", "targets", "weight", "positions", "documents")
        return [[getattr(batch, name).tolist() for name in names] for batch in batches]

    assert read(1, 1) == read(3, 1 << 12) == read(4, 1 << 20)
