"""An index of earlier documents: new ones learn the id of the one they copy, and the index survives being killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Near
from ropewalk.prepare.near.index import Index, Known
from ropewalk.prepare.near.match import canonical_ranks, match
from ropewalk.prepare.near.propose import propose
from ropewalk.prepare.near.sketch import bands, sets, sketch
from tests.prepare.near_corpora import HAN, column, with_copies
from tests.prepare.near_reference import jaccard, shingles

NEAR = Near(bands=64)
"""Bands enough to find every pair of similarity 0.8."""


def against(index: Index, texts: list[str], near: Near = NEAR) -> tuple[dict[int, tuple[str | int, float]], Known]:
    """New document that goes -> (id of the document of the index or number of the new one that stays, similarity)."""
    text = column(texts)
    new = sketch(text, near)
    known = index.known([new])
    proposed = propose([known.sketch, new], bands=bands(near), memory_bytes=near.memory_bytes)
    ours = sets(text, proposed.by_chunk()[1], near)
    fixed = len(known.ids)
    sizes = np.array([*(0 for _ in range(fixed)), *(len(each.encode()) for each in texts)])
    matches = match(proposed, [known.sets, ours], canonical_ranks(-sizes), near, fixed=fixed)
    rows = zip(matches.document.tolist(), matches.partner.tolist(), matches.similarity.tolist(), strict=True)
    return {
        document - fixed: (known.ids[partner].as_py() if partner < fixed else partner - fixed, similarity)
        for document, partner, similarity in rows
    }, known


def batches(texts: list[str], name: str, size: int) -> list[tuple[pa.Array, pa.LargeStringArray]]:
    ids = [f"{name}:{number}" for number in range(len(texts))]
    return [(pa.array(ids[at : at + size]), column(texts[at : at + size])) for at in range(0, len(texts), size)]


@pytest.mark.parametrize("joint", [" ", ""])
def test_a_new_crawl_learns_the_ids_of_the_documents_it_copies(tmp_path: Path, joint: str) -> None:
    kind = {} if joint else {"vocabulary": HAN, "joint": ""}
    texts = with_copies(5, originals=60, copies=120, **kind)
    old, new = texts[:90], texts[90:]
    index = Index.open(tmp_path / "index", NEAR)
    index.append("first", batches(old[:50], "a", 20))
    index.append("second", batches(old[50:], "b", 100))
    gone, _ = against(Index.open(tmp_path / "index", NEAR), new)

    ids = [f"a:{number}" for number in range(50)] + [f"b:{number}" for number in range(40)]
    each_old, each_new = [shingles(text, 5) for text in old], [shingles(text, 5) for text in new]
    staying: list[int] = []
    for row in sorted(range(len(new)), key=lambda row: (-len(new[row].encode()), row)):
        there = max(jaccard(each_new[row], other) for other in each_old)
        here = max((jaccard(each_new[row], each_new[other]) for other in staying), default=0.0)
        if max(there, here) < 0.8:
            staying.append(row)
            assert row not in gone
            continue
        partner, similarity = gone[row]
        assert similarity == max(there, here)
        shown = each_old[ids.index(partner)] if isinstance(partner, str) else each_new[partner]
        assert jaccard(each_new[row], shown) == similarity
        # Of equally close documents the older one is the partner.
        assert isinstance(partner, str) == (there >= here)
    assert any(isinstance(partner, str) for partner, _ in gone.values())


def test_an_empty_index_knows_nothing(tmp_path: Path) -> None:
    index = Index.open(tmp_path, NEAR)
    assert index.documents == 0
    gone, known = against(index, ["one two three four five six", "one two three four five six"])
    assert len(known.ids) == 0
    assert gone == {1: (0, 1.0)}


def test_only_documents_that_share_a_key_are_read(tmp_path: Path) -> None:
    old = with_copies(2, originals=30, copies=0)
    index = Index.open(tmp_path, NEAR)
    index.append("all", batches(old, "a", 7))
    _, known = against(index, [old[3] + " more", "nothing that anybody has ever written before"])
    assert known.ids.to_pylist() == ["a:3"]


def test_an_addition_is_made_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    old = with_copies(2, originals=5, copies=0)
    Index.open(tmp_path, NEAR).append("day-1", batches(old, "a", 2))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    again = Index.open(tmp_path, NEAR)
    again.append("day-1", batches(old, "a", 2))
    assert again.documents == 5
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_an_addition_that_breaks_off_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    old = with_copies(2, originals=6, copies=0)
    Index.open(tmp_path, NEAR).append("day-1", batches(old[:3], "a", 2))

    def broken() -> object:
        yield from batches(old[3:], "b", 1)[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Index.open(tmp_path, NEAR).append("day-2", broken())  # type: ignore[arg-type]
    index = Index.open(tmp_path, NEAR)
    assert index.documents == 3
    assert against(index, [old[4]])[0] == {}
    index.append("day-2", batches(old[3:], "b", 2))
    assert Index.open(tmp_path, NEAR).documents == 6
    assert against(index, [old[4]])[0] == {0: ("b:1", 1.0)}


def test_an_index_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    Index.open(tmp_path, NEAR).append("day-1", batches(["a b c d e f"], "a", 1))
    with pytest.raises(
        DataError, match=r"index.json: this index was made by .*shingle_words=5.*need .*shingle_words=3"
    ):
        Index.open(tmp_path, Near(bands=64, shingle_words=3))
