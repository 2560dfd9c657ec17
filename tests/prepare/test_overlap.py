"""Overlaps of texts with a corpus: a search through all texts finds the same n-grams, in the same first documents."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from random_prose import prose

from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.kernels.overlap import ngram_hashes
from ropewalk.prepare.overlap import overlaps_with
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.spelling import fold, words_of

CHINESE = "绳索由许多股纤维捻合而成，每一股又由更细的线组成"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of forty texts, several shards."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(40):
        text = prose(number, words=60) + (CHINESE if number == 7 else "")
        (folder / "texts" / f"{number:02d}.txt").write_text(text, "utf-8")
    made = prepare(
        Prepare(
            sources=(Source(name="texts", paths=(str(folder / "texts"),)),),
            filter=Filter(),
            tokenizer=Tokenizer(vocab_size=320, train_bytes=5000),
            validation_share=0.2,
            shard_tokens=1500,
            workers=1,
            folder=str(folder / "prepared"),
        ),
        seed=1,
    )
    return made.folder


def spelled(text: str) -> list[str]:
    words = words_of(text)
    return [fold(word) for word in words.spelled(0, len(words.hashes))]


def test_overlaps_are_those_of_a_search_through_all_training_texts(folder: Path) -> None:
    draw = random.Random(3)
    documents = {f"{n:02d}.txt": spelled((folder.parents[1] / "texts" / f"{n:02d}.txt").read_text()) for n in range(40)}
    texts, lengths = [], []
    for number in range(40):
        source = documents[f"{draw.randrange(40):02d}.txt"]
        start = draw.randrange(len(source) - 12)
        # Words of the corpus between words that stand nowhere; case and punctuation make no difference.
        texts.append(f"xq {number} Zz: {', '.join(source[start : start + draw.randrange(3, 12)]).upper()}! vv xq xq")
        lengths.append(draw.randrange(2, 8))
    found = overlaps_with(folder, texts, lengths)
    held_out = {each.origin.file for each in overlaps_with(folder, texts, lengths, split="validation") if each.origin}
    trained = {name: words for name, words in documents.items() if name not in {Path(f).name for f in held_out}}
    for text, length, overlap in zip(texts, lengths, found, strict=True):
        words = spelled(text)
        grams = [words[first : first + length] for first in range(len(words) - length + 1)]
        hits = [gram for gram in grams if any(_holds(document, gram) for document in trained.values())]
        assert (overlap.ngrams, overlap.found) == (len(grams), len(hits))
        assert (overlap.origin is not None) == bool(hits)
        if overlap.origin:
            assert spelled(overlap.span) == hits[0]
            assert _holds(documents[Path(overlap.origin.file).name], hits[0])


def _holds(document: list[str], gram: list[str]) -> bool:
    return any(document[first : first + len(gram)] == gram for first in range(len(document) - len(gram) + 1))


def test_chinese_is_found_by_characters(folder: Path) -> None:
    both = overlaps_with(folder, [f"问：{CHINESE[3:16]}？", "绳索" * 8], [8, 8])
    splits = both + overlaps_with(folder, [f"问：{CHINESE[3:16]}？"], [8], split="validation")
    assert sorted(overlap.found > 0 for overlap in splits) == [False, False, True]


def test_a_text_shorter_than_an_n_gram_has_none(folder: Path) -> None:
    (found,) = overlaps_with(folder, ["two words"], [13])
    assert (found.ngrams, found.found, found.origin) == (0, 0, None)


def test_rolling_hashes_are_those_of_each_n_gram_alone() -> None:
    words = np.random.default_rng(0).integers(0, 2**63, 50).astype(np.uint64)
    alone = [ngram_hashes(words[first : first + 5], 5)[0] for first in range(46)]
    assert ngram_hashes(words, 5).tolist() == alone
    assert len({*alone}) == 46
