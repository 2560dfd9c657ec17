"""Repeated lines and paragraphs against a plain walk over the documents."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.prepare import pieces
from ropewalk.prepare.cuts import CutTask, Spans, cut_texts
from ropewalk.prepare.pieces import PieceTask, list_pieces, repeated
from ropewalk.prepare.stages import batch_writer
from ropewalk.prepare.texts import Texts, read_texts

LINE = st.sampled_from(["", " ", "a", "bb", " bb ", "绳索", "\tccc", "ccc "])
DOCUMENTS = st.lists(st.lists(LINE, max_size=6).map("\n".join), min_size=1, max_size=6)


def reference(documents: list[str], wanted: list[bool], kind: str, least: int) -> list[str]:
    """Each wanted document without the pieces that occurred before."""
    seen: set[str] = set()
    cleaned = []
    for document, chosen in zip(documents, wanted, strict=True):
        if not chosen:
            cleaned.append(document)
            continue
        pattern = (
            r"[^\n]*\n|[^\n]+$"
            if kind == "lines"
            else r"(?:[ \t]*\n)*(?:[ \t]*[^\s][^\n]*(?:\n|$))+(?:[ \t]*(?:\n|$))*"
        )
        left = ""
        position = 0
        for found in re.finditer(pattern, document):
            left += document[position : found.start()]
            position = found.end()
            ink = found[0].strip(" \t\n")
            if len(ink.encode()) >= max(least, 1) and ink in seen:
                continue
            seen.add(ink)
            left += found[0]
        cleaned.append(left + document[position:])
    return cleaned


def cleaned(folder: Path, documents: list[str], wanted: list[bool], kind: str, least: int, chunks: int) -> list[str]:
    """The same by our kernels: documents in `chunks` chunks of small batches."""
    schema = pa.schema([("text", pa.large_string())])
    parts = np.array_split(np.arange(len(documents)), chunks)
    texts, files = [], []
    for number, rows in enumerate(parts):
        texts.append(Texts(folder / "read" / f"{number}.arrow"))
        with batch_writer(texts[-1].documents, schema) as writer:
            for row in rows:
                writer.write_batch(pa.record_batch([pa.array([documents[row]], pa.large_string())], schema=schema))
        mask = np.array([wanted[row] for row in rows], bool)
        files.append(folder / "pieces" / f"{number}.arrow")
        list_pieces(PieceTask(texts[-1], mask, 0, kind, least, files[-1]))
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    spans = repeated(files, starts=starts)
    found = []
    for number, (text, mine) in enumerate(zip(texts, spans.by_chunk(starts), strict=True)):
        layer = folder / "cut" / f"{number}.arrow"
        cut_texts(CutTask(text, mine, 0, layer))
        found += [text for batch in read_texts(text.under(layer)) for text in batch["text"].to_pylist()]
    return found


@pytest.mark.parametrize("kind", ["lines", "paragraphs"])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_what_occurred_before_is_cut_and_nothing_else(tmp_path_factory, data, kind) -> None:
    documents = data.draw(DOCUMENTS)
    wanted = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    least, chunks = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("pieces")
    expected = reference(documents, wanted, kind, least)
    assert cleaned(folder, documents, wanted, kind, least, chunks) == expected


def test_merging_by_ranges_gives_the_same_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["\n".join(f"line {n % 50}" for n in range(start, start + 90)) for start in range(12)]
    whole = cleaned(tmp_path / "a", documents, [True] * 12, "lines", 1, 3)
    monkeypatch.setattr(pieces, "MERGED", 7)
    assert cleaned(tmp_path / "b", documents, [True] * 12, "lines", 1, 3) == whole


def test_spans_add_up_by_document() -> None:
    spans = Spans(np.array([0, 0, 2]), np.array([1, 5, 0]), np.array([3, 6, 4]))
    assert spans.removed_bytes(4).tolist() == [3, 0, 4, 0]
