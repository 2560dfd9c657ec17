"""Repeated spans against a brute-force reference that knows no hash and no suffix array."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DamagedFile
from ropewalk.prepare.config import Substring
from ropewalk.prepare.kernels import minimizers, suffix
from ropewalk.prepare.substring import copies, match, sift, spans
from ropewalk.prepare.substring.corpus import read_texts
from ropewalk.prepare.substring.find import find_repeats
from ropewalk.prepare.substring.spans import Repeats, join
from ropewalk.prepare.workers import Workers


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_synced() -> Iterator[None]:
    """The disk of the machine that tests is slow, and no power cut is part of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def find(texts: list[str], *, batches: int = 1, **changes: Any) -> Repeats:
    """The repeats of `texts`, handed over in `batches`."""
    cuts = [len(texts) * batch // batches for batch in range(batches + 1)]
    columns = [pa.array(texts[a:b], pa.large_string()) for a, b in itertools.pairwise(cuts)]
    with tempfile.TemporaryDirectory() as folder, Workers(1) as workers:
        return find_repeats(columns, settings=Substring(**changes), folder=Path(folder), workers=workers)


def byte_windows(text: str, length: int) -> list[tuple[int, int]]:
    """(start, stop) of the least run of whole characters with `length` bytes, from each character."""
    bounds = [0]
    for character in text:
        bounds.append(bounds[-1] + len(character.encode()))
    stops = ((start, next((stop for stop in bounds if stop >= start + length), None)) for start in bounds[:-1])
    return [(start, stop) for start, stop in stops if stop is not None]


def word_windows(text: str, length: int) -> list[tuple[int, int]]:
    """(start, stop) of `length` words, from each word: letters and digits with their marks; ideographs stand alone."""
    words: list[tuple[int, int]] = []
    place, open_word, alone = 0, False, False
    for character in text:
        size, kind = len(character.encode()), unicodedata.category(character)[0]
        single = "\u4e00" <= character <= "\u9fff"
        if open_word and (kind == "M" or (kind in "LN" and not single and not alone)):
            words[-1] = (words[-1][0], place + size)
        elif kind in "LN":
            words.append((place, place + size))
            open_word, alone = True, single
        else:
            open_word = False
        place += size
    return [(words[i][0], words[i + length - 1][1]) for i in range(len(words) - length + 1)]


def brute_force(texts: list[str], *, unit: str, length: int) -> list[set[int]]:
    """For each document the bytes in windows that occur earlier without overlap."""
    first: dict[bytes, tuple[int, int]] = {}
    repeated: list[set[int]] = []
    for document, text in enumerate(texts):
        data, found = text.encode(), set()
        for start, stop in (byte_windows if unit == "bytes" else word_windows)(text, length):
            source, place = first.setdefault(data[start:stop], (document, start))
            if source < document or place + stop - start <= start:
                found.update(range(start, stop))
        repeated.append(found)
    return repeated


def check_laws(texts: list[str], found: Repeats, *, unit: str, length: int) -> None:
    """The spans tile exactly what brute force finds, are text, and point to the same bytes in text that stays."""
    data = [text.encode() for text in texts]
    expected = brute_force(texts, unit=unit, length=length)
    tiled: list[list[int]] = [[] for _ in texts]
    for row in found.spans.to_pylist():
        size = row["stop"] - row["start"]
        piece = data[row["document"]][row["start"] : row["stop"]]
        assert size > 0
        piece.decode()
        assert data[row["kept_document"]][row["kept_start"] : row["kept_start"] + size] == piece
        kept = set(range(row["kept_start"], row["kept_start"] + size))
        assert not kept & expected[row["kept_document"]]
        assert (row["kept_document"], row["kept_start"]) < (row["document"], row["start"])
        tiled[row["document"]].extend(range(row["start"], row["stop"]))
    assert tiled == [sorted(places) for places in expected]
    assert found.documents["bytes"].to_pylist() == [len(text) for text in data]
    assert found.documents["repeated_bytes"].to_pylist() == [len(places) for places in expected]


UNITS = {"bytes": 16, "words": 6}
"""And a length for each at which the planted corpora repeat themselves."""
METHODS = ("windows", "suffix-array")
CORPORA = st.one_of(
    *(st.lists(st.text(alphabet, max_size=40), max_size=6) for alphabet in ("ab", "a b\0", "aé\u0301绳索,", "a绳𝔘 \0")),
    st.lists(st.text(max_size=30), max_size=4),
)
LENGTHS = st.sampled_from([2, 3, 5, 8])


@given(CORPORA, st.sampled_from(sorted(UNITS)), LENGTHS, st.sampled_from(METHODS))
@settings(max_examples=150, deadline=None)
def test_both_methods_find_what_brute_force_finds(texts: list[str], unit: str, length: int, method: str) -> None:
    check_laws(texts, find(texts, unit=unit, length=length, method=method), unit=unit, length=length)


def planted(seed: int, *, documents: int = 40) -> list[str]:
    """Random words, Chinese among them, in documents that repeat parts of each other."""
    dice = random.Random(seed)
    texts: list[str] = []
    for _ in range(documents):
        parts = ["".join(dice.choices(["rope ", "walk\n", "a", "绳索", "ü, "], k=dice.randrange(40))) for _ in range(3)]
        if texts:
            other = dice.choice(texts)
            start = dice.randrange(len(other) + 1)
            parts.insert(dice.randrange(4), other[start : start + dice.randrange(80)])
        texts.append("".join(parts) + "-" * dice.choice([0, 0, 70]))
    return texts


LAYOUTS: dict[str, list[tuple[ModuleType, str, int]]] = {
    "regions": [(sift, "REGION_BYTES", 37)],
    "parts": [(sift, "PART_BYTES", 50), (match, "PARTS_A_TASK", 3)],
    "steps": [(spans, "STEP_BYTES", 11), (spans, "ROOM", 1)],
    "runs": [(match, "SORTED_ROWS", 2), (copies, "BLOCK_ROWS", 3)],
    "everything": [
        (sift, "REGION_BYTES", 500),
        (sift, "PART_BYTES", 9),
        (spans, "STEP_BYTES", 100),
        (spans, "ROOM", 3),
    ],
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_spans_do_not_depend_on_parts(layout: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, length = planted(1), UNITS[unit]
    whole = find(texts, unit=unit, length=length)
    assert len(whole.spans) > 20
    check_laws(texts, whole, unit=unit, length=length)
    for module, name, value in LAYOUTS[layout]:
        monkeypatch.setattr(module, name, value)
    for method in METHODS:
        assert find(texts, unit=unit, length=length, method=method, batches=7) == whole


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("memory_bytes", [5000, 50_000])
def test_the_spans_do_not_depend_on_memory(memory_bytes: int, method: str, unit: str) -> None:
    texts, length = planted(2, documents=15), UNITS[unit]
    found = find(texts, unit=unit, length=length, method=method, memory_bytes=memory_bytes)
    assert found == find(texts, unit=unit, length=length)


def test_hashes_that_all_collide_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = planted(3)
    expected = find(texts, length=16)
    monkeypatch.setattr(minimizers, "byte_values", lambda: np.ones(256, np.uint64))
    assert find(texts, length=16) == expected


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sift, "REGION_BYTES", 3000)
    monkeypatch.setattr(sift, "PART_BYTES", 1000)
    monkeypatch.setattr(match, "PARTS_A_TASK", 2)
    texts = planted(4, documents=60)
    with Workers(2) as workers:
        found = find_repeats(
            [pa.array(texts, pa.large_string())], settings=Substring(length=16), folder=tmp_path, workers=workers
        )
    assert found == find(texts, length=16)


def test_a_search_killed_at_any_labelled_point_ends_with_the_same_bytes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_substring.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    points = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(points) == 2
    assert min(points) > 25


def test_what_was_gathered_is_not_read_again_and_a_result_is_kept(tmp_path: Path) -> None:
    def broken() -> Iterator[pa.LargeStringArray]:
        raise AssertionError("the texts are read again")
        yield

    with Workers(1) as workers:
        texts = [pa.array(planted(5), pa.large_string())]
        first = find_repeats(texts, settings=Substring(length=16), folder=tmp_path, workers=workers)
        assert find_repeats(broken(), settings=Substring(length=16), folder=tmp_path, workers=workers) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.parquet", "spans.parquet"]


@pytest.mark.parametrize("name", ["text.bin", "samples/000000000000000.bin", "copies/part-00000.bin"])
def test_a_folder_or_a_pipe_in_place_of_interrupted_work_is_named_and_stays(tmp_path: Path, name: str) -> None:
    texts = [pa.array(planted(3), pa.large_string())]
    for make in (os.mkdir, os.mkfifo):
        made = tmp_path / make.__name__ / "work" / name
        made.parent.mkdir(parents=True)
        make(made)
        with Workers(1) as workers, pytest.raises(DamagedFile, match=rf"{made.name}: not a regular file; move it away"):
            find_repeats(
                texts, settings=Substring(length=16), folder=made.parents[name.count("/") + 1], workers=workers
            )
        assert made.exists()


def test_parquet_parts_are_read_in_order(tmp_path: Path) -> None:
    texts = planted(6)
    paths = [tmp_path / name for name in ("b.parquet", "a.parquet")]
    for path, some in zip(paths, (texts[:13], texts[13:]), strict=True):
        pq.write_table(pa.table({"text": pa.array(some, pa.large_string())}), path, row_group_size=4)
    assert list(itertools.chain.from_iterable(column.to_pylist() for column in read_texts(paths))) == texts


def test_a_header_stays_in_the_first_document_that_has_it() -> None:
    header = "".join(random.Random(7).choices("abcdefgh ", k=300))
    found = find([header + "one", "xy" + header + "two", header[:199]])
    row = {"document": 1, "start": 2, "stop": 302, "kept_document": 0, "kept_start": 0}
    assert found.spans.to_pylist() == [row]


def test_a_pointer_leads_to_text_that_stays_even_where_the_first_occurrence_went() -> None:
    dice = random.Random(8)
    one, two = ("".join(dice.choices("abcdefgh ", k=50)) for _ in range(2))
    found = find([one, one + two, one + two], length=20)
    rows = [tuple(row.values()) for row in found.spans.to_pylist()]
    assert rows == [(1, 0, 50, 0, 0), (2, 0, 50, 0, 0), (2, 50, 100, 1, 50)]


def test_a_run_of_one_character_keeps_its_first_window() -> None:
    found = find(["-" * 1000], length=200)
    starts, stops = found.spans["start"].to_pylist(), found.spans["stop"].to_pylist()
    assert list(zip(starts, stops, strict=True)) == [(200, 400), (400, 600), (600, 800), (800, 1000)]


def test_a_mask_joins_spans_that_touch() -> None:
    table = pa.table([[0, 0, 0, 1], [0, 5, 9, 9], [5, 8, 12, 12], [0, 0, 0, 0], [50, 60, 70, 80]], schema=spans.SPANS)
    rows = [tuple(row.values()) for row in join(table).to_pylist()]
    assert rows == [(0, 0, 8), (0, 9, 12), (1, 9, 12)]
    assert len(join(table.slice(0, 0))) == 0


@given(st.lists(st.binary(max_size=40), max_size=60), st.sampled_from([b"", b"same", bytes(30)]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_suffixes_are_sorted_as_python_sorts_bytes(strings: list[bytes], prefix: bytes) -> None:
    strings = [prefix + string for string in strings]
    text = np.frombuffer(b"".join(strings) or b"-", np.uint8)
    bounds = np.cumsum([0, *map(len, strings)]).astype(np.int64)
    starts, stops = bounds[:-1].copy(), bounds[1:].copy()
    firsts = np.empty(len(strings), np.uint64)
    suffix.sort(text, starts, stops, firsts)
    found = [text[start:stop].tobytes() for start, stop in zip(starts, stops, strict=True)]
    assert found == sorted(strings)
    least = {string: min(b for s, b in zip(strings, bounds[:-1], strict=True) if s == string) for string in strings}
    assert firsts.tolist() == [least[string] for string in found]
