"""The index of n-grams: every place of a span is found, and no other, as a search through all texts finds them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prose import prose

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import read_json
from ropewalk.base.seal import write_sealed
from ropewalk.prepare import ngrams
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.config import Filter, Ngrams, Prepare, Source, Tokenizer
from ropewalk.prepare.kernels import ngrams as kernel
from ropewalk.prepare.kernels.words import hashes_of
from ropewalk.prepare.lookup import NgramIndex
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.spelling import Speller, fold, words_of
from ropewalk.prepare.trace import Tracer
from ropewalk.store.manifest import read_manifest
from ropewalk.store.shards import Shard


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4), st.integers(1, 8), st.data())
def test_every_n_gram_holds_a_chosen_part_that_depends_on_it_alone(
    documents: list[list[int]], length: int, data: st.DataObject
) -> None:
    part = data.draw(st.integers(1, length))
    values = np.array([value for document in documents for value in document], np.uint64)
    stops = np.cumsum([len(document) for document in documents])
    starts = stops - [len(document) for document in documents]
    hashes, places = kernel.choose_parts(values, starts, stops, length, part)
    assert np.all(np.diff(places) > 0)
    chosen = dict(zip(places.tolist(), hashes.tolist(), strict=True))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        for first in range(start, stop - length + 1):
            # By hand: the first least hash of the n-gram's parts, from a column of the n-gram alone.
            alone = values[first : first + length]
            compared = [int(kernel.part_hash(alone, place, part)) for place in range(length - part + 1)]
            place = compared.index(min(compared))
            assert chosen[first + place] == int(kernel.mixed(np.uint64(min(compared))))


@pytest.fixture(scope="module", params=["words", "tokens"])
def indexed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Prepared data with an index of 5-grams; passages stand in several documents."""
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "texts").mkdir()
    passages = [prose(1000 + number, words=12) for number in range(4)]
    draw = random.Random(0)
    for number in range(40):
        parts = [prose(number, words=30), draw.choice(passages), prose(number + 500, words=20), draw.choice(passages)]
        (folder / "texts" / f"{number:02d}.txt").write_text("".join(parts).replace("rope", "Rope"), "utf-8")
    made = prepare(
        Prepare(
            sources=(Source(name="texts", paths=(str(folder / "texts"),)),),
            filter=Filter(),
            tokenizer=Tokenizer(vocab_size=320, train_bytes=5000),
            validation_share=0.2,
            shard_tokens=1500,
            workers=1,
            folder=str(folder / "prepared"),
            ngrams=Ngrams(unit=request.param, length=5),
        ),
        seed=1,
    )
    return made.folder, request.param


def units(folder: Path, unit: str) -> dict[str, list[Any]]:
    """The words (as Python finds them) or tokens of every document, by id."""
    tokenizer = tokenizers.load(folder / "tokenizer.json")
    tracer, found = Tracer(folder), {}
    for entry in read_manifest(folder).shards:
        shard = Shard(folder / entry.file)
        for number in range(len(shard)):
            tokens = shard.document(number)[:-1].tolist()
            text = tokenizer.decode(tokens, skip_special_tokens=False).lower().replace("绳索", " 绳 索 ")
            found[tracer.origin(entry, number).id] = text.split() if unit == "words" else tokens
    return found


def places_of(span: list[Any], documents: dict[str, list[Any]]) -> list[tuple[str, int]]:
    """(document, first unit) of every place, by brute force."""
    return [
        (name, first)
        for name, document in documents.items()
        for first in range(len(document) - len(span) + 1)
        if document[first : first + len(span)] == span
    ]


def asked(span: list[Any], unit: str) -> Any:
    return ", ".join(span).upper().replace("Ü", "ü").replace("Ï", "ï") if unit == "words" else span


def test_every_place_of_a_span_is_found_and_no_other(indexed: tuple[Path, str]) -> None:
    folder, unit = indexed
    index, documents = NgramIndex(folder / f"ngrams-{unit}-5"), units(folder, unit)
    draw = random.Random(1)
    several = 0
    for _ in range(150):
        document = documents[draw.choice(list(documents))]
        length = draw.choice((5, 6, 9, 14))
        first = draw.randrange(len(document) - length + 1)
        span = document[first : first + length]
        found = index.find(asked(span, unit))
        expected = places_of(span, documents)
        assert sorted(occurrence.origin.id for occurrence in found) == sorted(name for name, _ in expected)
        several += len(expected) > 1
        for occurrence in found:
            tokens = Shard(folder / occurrence.origin.shard).tokens[occurrence.start : occurrence.stop].tolist()
            if unit == "tokens":
                assert tokens == span
            else:
                text = tokenizers.load(folder / "tokenizer.json").decode(tokens).lower().replace("绳索", " 绳 索 ")
                assert " ".join(span) in " ".join(text.split())
    assert several > 10


def test_a_span_that_stands_nowhere_is_not_found(indexed: tuple[Path, str]) -> None:
    folder, unit = indexed
    index, documents = NgramIndex(folder / f"ngrams-{unit}-5"), units(folder, unit)
    draw = random.Random(2)
    for _ in range(100):
        document = list(documents[draw.choice(list(documents))])
        span = document[:8]
        draw.shuffle(span)
        assert bool(index.find(asked(span, unit))) == bool(places_of(span, documents))


def test_overlaps_are_the_n_grams_that_stand_in_the_corpus(indexed: tuple[Path, str]) -> None:
    folder, unit = indexed
    index, documents = NgramIndex(folder / f"ngrams-{unit}-5"), units(folder, unit)
    one, other = list(documents.values())[:2]
    span = [*one[3:11], *other[20:27], *reversed(one[:9])]
    found = index.overlaps(asked(span, unit), most=3)
    expected = [first for first in range(len(span) - 4) if places_of(span[first : first + 5], documents)]
    assert [overlap.first for overlap in found] == expected
    assert all(1 <= len(overlap.occurrences) <= 3 for overlap in found)
    assert expected[:4] == [0, 1, 2, 3]


def test_questions_that_the_index_cannot_answer_are_refused(indexed: tuple[Path, str]) -> None:
    folder, unit = indexed
    index = NgramIndex(folder / f"ngrams-{unit}-5")
    with pytest.raises(UserError, match=f"4 {unit}: n-grams of 5 are indexed"):
        index.find("a b c d" if unit == "words" else [1, 2, 3, 4])
    with pytest.raises(UserError, match=f"this index is of {unit}"):
        index.find([1] * 9 if unit == "words" else "a b c d e f")
    tree = read_json(folder / f"ngrams-{unit}-5" / "index.json", what="index")
    del tree["seal"]
    write_sealed(folder / "other" / "index.json", tree | {"algorithm": ["ngrams-0"]})
    with pytest.raises(DataError, match="move it away and make it again"):
        NgramIndex(folder / "other")


def index_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(next(folder.glob("ngrams-*")).iterdir())}


def test_the_index_does_not_depend_on_blocks_workers_or_interruption(
    settings: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dataclasses.replace(settings, ngrams=Ngrams(unit="words", length=4))
    plain = prepare(wanted, seed=1)
    monkeypatch.setattr(ngrams, "BLOCK_TOKENS", 50)
    blocks = prepare(dataclasses.replace(wanted, folder="blocks"), seed=1)
    assert index_bytes(blocks.folder) == index_bytes(plain.folder)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ngrams, "_merge", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(dataclasses.replace(wanted, folder="stopped"), seed=1)
    assert list(Path("stopped").rglob("*.entries"))
    again = prepare(dataclasses.replace(wanted, folder="stopped"), seed=1)
    assert index_bytes(again.folder) == index_bytes(plain.folder)
    assert not list(Path("stopped").rglob("*.entries"))
    with monkeypatch.context() as patch:
        patch.setattr(ngrams.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(dataclasses.replace(wanted, folder="last"), seed=1)
    last = prepare(dataclasses.replace(wanted, folder="last"), seed=1)
    assert sorted(path.name for path in last.folder.iterdir()) == sorted(path.name for path in plain.folder.iterdir())


def test_a_damaged_index_is_made_again(settings: Prepare) -> None:
    wanted = dataclasses.replace(settings, ngrams=Ngrams(unit="words", length=4))
    first = prepare(wanted, seed=1)
    assert first.manifest.ngrams == "ngrams-words-4"
    before = index_bytes(first.folder)
    (first.folder / first.manifest.ngrams / "00000.places").write_bytes(b"short")
    again = prepare(wanted, seed=1)
    assert not again.reused
    assert index_bytes(again.folder) == before


def test_ranges_of_hashes_together_hold_what_one_would(settings: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataclasses.replace(settings, ngrams=Ngrams(unit="tokens", length=4))
    one = index_bytes(prepare(wanted, seed=1).folder)
    monkeypatch.setattr(ngrams, "RANGE_ENTRIES", 100)
    folder = prepare(dataclasses.replace(wanted, folder="many"), seed=1).folder
    many = index_bytes(folder)
    assert len(many) > 10
    for kind in ("hashes", "places"):
        assert b"".join(data for name, data in many.items() if name.endswith(kind)) == one[f"00000.{kind}"]
    tokens = Shard(next(folder.glob("*.tokens"))).document(0)[:6].tolist()
    assert NgramIndex(folder / "ngrams-tokens-4").find(tokens)


@given(st.text())
def test_words_of_a_text_are_those_of_the_filters(text: str) -> None:
    words = words_of(text)
    assert tuple(words.hashes.tolist()) == hashes_of([text])[0]
    spelled = words.spelled(0, len(words.hashes))
    assert [hashes_of([word])[0] for word in spelled] == [(value,) for value in words.hashes.tolist()]
    assert fold("ΣİK") == "σİk"


def test_words_know_their_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizers.train(map(prose, range(20)), vocabulary=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [prose(3), prose(5)]
    tokens = [tokenizer.encode(text).ids for text in texts]
    words = Speller(tmp_path / "tokenizer.json").words(
        np.array([*tokens[0], 0, *tokens[1], 0]), np.cumsum([0, len(tokens[0]) + 1, len(tokens[1]) + 1])
    )
    for word, (first, last) in enumerate(zip(words.tokens().tolist(), words.last_tokens().tolist(), strict=True)):
        spelled = tokenizer.decode([*tokens[0], 0, *tokens[1], 0][first : last + 1], skip_special_tokens=False)
        assert words.spelled(word, word + 1)[0] in spelled.lower()
