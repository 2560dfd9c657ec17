"""METEOR: by hand, by NLTK, by the program of METEOR 1.5; WordNet's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.evaluate.metrics.meteor import Meteor, Meteor15
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.metrics.wordnet import WordNet, find_wordnet

from .texts import answered, corpus_value, reference_values

pytest.importorskip("nltk")
LICENCE = "  1 This software is WordNet 9.9 Copyright 2026 by nobody  \n"
SYNSETS = {
    "noun": [["cord", "rope"], ["man"], ["lane", "walk_way", "Walk"]],
    "verb": [["walk", "stroll"], ["weave"]],
    "adj": [["long(a)", "lengthy"]],
    "adv": [],
}
EXCEPTIONS = {"noun": "men man\n", "verb": "wove weave\n", "adj": "", "adv": ""}


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    """A database of six synsets, in the format of wndb(5WN)."""
    for part, synsets in SYNSETS.items():
        data, index = LICENCE, {}
        for names in synsets:
            for name in names:
                index.setdefault(name.partition("(")[0].lower(), []).append(f"{len(data):08d}")
            words = " ".join(f"{name} 0" for name in names)
            data += f"{len(data):08d} 03 {part[0]} {len(names):02x} {words} 000 | a gloss\n"
        lines = [
            f"{word} {part[0]} {len(offsets)} 1 @ {len(offsets)} 0 {' '.join(offsets)}  \n"
            for word, offsets in sorted(index.items())
        ]
        (tmp_path / f"data.{part}").write_text(data)
        (tmp_path / f"index.{part}").write_text(LICENCE + "".join(lines))
        (tmp_path / f"{part}.exc").write_text(EXCEPTIONS[part])
    return tmp_path


@pytest.fixture
def no_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.evaluate.metrics.meteor.find_wordnet", lambda folder: None)


def test_synonyms_are_the_words_of_all_synsets_of_all_base_forms(wordnet: Path) -> None:
    found = WordNet(wordnet)
    assert found.version == "9.9"
    assert found.synonyms("ropes") == {"rope", "cord"}
    assert found.synonyms("walks") == {"walk", "stroll", "lane", "Walk"}  # walk_way is two words
    assert found.synonyms("men") == {"man"}
    assert found.synonyms("wove") == {"weave"}
    assert found.synonyms("longest") == {"long", "lengthy"}
    assert found.synonyms("unknown") == frozenset()
    assert found.senses("strolled") == found.senses("stroll") < found.senses("walking")


def test_a_folder_without_a_database_is_refused(tmp_path: Path, wordnet: Path) -> None:
    with pytest.raises(DataError, match=r"no WordNet database: `index\.noun` is missing"):
        find_wordnet(tmp_path / "elsewhere")
    (wordnet / "index.noun").write_text("rope n one\n")
    with pytest.raises(DataError, match=r"index\.noun: not an index of WordNet"):
        WordNet(wordnet)


@pytest.mark.usefixtures("no_wordnet")
def test_meteor_is_the_formula_of_2007() -> None:
    item = answered("the ropes are on the walk", "The rope is on the long walk")
    # Matches: the-the, ropes-rope, on-on, the-the, walk-walk in chunks "the ropes", "on the", "walk".
    precision, recall = 5 / 6, 5 / 7
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    assert Meteor().score(item) == pytest.approx(mean * (1 - 0.5 * (3 / 5) ** 3))
    assert Meteor().score(answered("a", "b")) == Meteor().score(answered("", "b")) == 0
    assert "|syn:no|" in Meteor().signature


def test_synonyms_match_where_a_database_is_named(wordnet: Path) -> None:
    metric = Meteor(wordnet=str(wordnet))
    assert metric.score(answered("a stroll cord", "a walk rope")) == pytest.approx(1 - 0.5 / 27)
    assert "|syn:wordnet-9.9|" in metric.signature
    found = Meteor15(wordnet=str(wordnet)).statistics(answered("a lengthy cord", "a long rope"))
    assert found[4:] == [1.6, 1, 1.6, 1, 3, 3, 0]  # two synonyms at 0.8, the function word `a`; matches; no gap


@pytest.mark.usefixtures("no_wordnet")
def test_meteor_15_is_the_formula_of_2014_over_sums() -> None:
    items = [answered("the ropes are on the walk", "The rope is on the long walk"), answered("no match", "at all")]
    metric = Meteor15()
    # the, are, on, the, is are function words; ropes-rope matches by stem, at 0.6.
    assert metric.statistics(items[0]) == pytest.approx([2, 4, 3, 4, 1.6, 3, 1.6, 3, 5, 5, 3])
    words, reference = 0.75 * (2 + 1) + 0.25 * (4 + 1), 0.75 * (3 + 0) + 0.25 * (4 + 2)
    precision, recall = (0.75 * 1.6 + 0.25 * 3) / words, (0.75 * 1.6 + 0.25 * 3) / reference
    mean = 1 / (0.15 / precision + 0.85 / recall)
    assert corpus_value(metric, items) == pytest.approx(mean * (1 - 0.6 * (3 / 5) ** 0.2))
    assert metric.score(answered("a rope", "a rope")) == 1


@pytest.mark.usefixtures("no_wordnet")
def test_the_best_reference_counts_and_chinese_is_split() -> None:
    assert Meteor().score(answered("a b", "c", "a b")) == pytest.approx(1 - 0.5 / 8)
    assert Meteor15().score(answered("long rope", "x", "long rope")) == 1
    (found,) = measured(Meteor15(language="other"), [answered("今天天气好", "今天天气很好")])
    assert 0.7 < found.value < 1
    assert found.signature.startswith("1.5|other|tok:words|case:lc|stem:no|")
    with pytest.raises(UserError, match='no tokenize "13a"; known: words, space'):
        Meteor(tokenize="13a")  # type: ignore[arg-type]


def test_a_list_of_function_words_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "own.words").write_text("rope\n")
    metric = Meteor15(function_words=str(tmp_path / "own.words"))
    assert metric.statistics(answered("a rope", "a rope"))[:2] == [1, 1]
    assert "|function words:own.words|" in metric.signature
    with pytest.raises(DataError, match="function words"):
        Meteor15(function_words=str(tmp_path / "none"))


PROGRAM = [
    ("the rope walk is long", "a long walk is for the rope", 0.39692826932653014),
    (
        "three strands of hemp are laid on the walk .",
        "the strands were laid , three by three , on a walk of stone .",
        0.24662813102119463,
    ),
    ("the walk the walk the walk", "the the walk walk", 0.4032999936958687),
    (
        "she laid the rope in the long walk and he tarred it",
        "he was tarring the rope that she had laid in the long walk",
        0.3770463241869997,
    ),
    ("no word here matches", "all others differ", 0.0),
]
"""Scores of meteor-1.5.jar -l en -m "exact stem" -w "1.0 0.6", on words that both lists of function words agree on."""


@pytest.mark.usefixtures("no_wordnet")
@pytest.mark.parametrize(("prediction", "reference", "score"), PROGRAM)
def test_values_equal_those_of_the_program(prediction: str, reference: str, score: float) -> None:
    assert Meteor15(tokenize="space").score(answered(prediction, reference)) == pytest.approx(score, rel=1e-12)


def test_values_equal_nltks() -> None:
    if find_wordnet() is None:
        pytest.skip("needs WordNet 3.0: apt-get install wordnet-base")
    refs, overlap = reference_values("meteor.json"), reference_values("text-overlap.json")
    found = Meteor(tokenize="space").score(answered(refs["hyp"], *refs["refs"]))
    assert found == pytest.approx(refs["nltk_meteor_split"], abs=5e-5)
    for pair in overlap["items"]:
        found = Meteor().score(answered(pair["hyp"], pair["ref"]))
        assert found == pytest.approx(pair["nltk_meteor_regex_lower"], abs=1e-6)


def test_meteor_15_is_close_to_the_program_with_paraphrases() -> None:
    if find_wordnet() is None:
        pytest.skip("needs WordNet 3.0: apt-get install wordnet-base")
    overlap = reference_values("text-overlap.json")
    items = [answered(pair["hyp"], pair["ref"]) for pair in overlap["items"]]
    theirs = [pair["meteor_15_norm"] for pair in overlap["items"]]
    metric = Meteor15()
    assert np.corrcoef([metric.score(item) for item in items], theirs)[0, 1] > 0.995
    assert corpus_value(metric, items) == pytest.approx(overlap["meteor_15_corpus"], abs=0.005)
