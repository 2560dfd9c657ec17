"""ROUGE against counts by hand, ROUGE-1.5.5 and rouge-score; words of any script."""

from __future__ import annotations

import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.metrics.rouge import Rouge, Rouge1, Rouge2, Rouge3, RougeL, RougeLsum

from .texts import answered, reference_values

KINDS: dict[str, type[Rouge]] = {each.kind: each for each in (Rouge1, Rouge2, Rouge3, RougeL, RougeLsum)}
PARTS = {"p": "precision", "r": "recall", "f": "f1"}


def score(kind: str, prediction: str, *references: str, **options: str | bool) -> float:
    found = KINDS[kind](**options).score(answered(prediction, *references))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_overlaps_are_those_counted_by_hand() -> None:
    prediction, reference = "the rope walk is long", "The walk is a long rope."
    assert score("rouge1", prediction, reference, part="precision") == 1
    assert score("rouge1", prediction, reference, part="recall") == pytest.approx(5 / 6)
    assert score("rouge2", prediction, reference, part="recall") == pytest.approx(1 / 5)  # walk is
    assert score("rouge3", prediction, reference) == 0
    assert score("rougeL", prediction, reference) == pytest.approx(2 * 4 / 11)  # the walk is long


def test_chinese_characters_are_words() -> None:
    text = "今天天气很好。"
    assert [score(kind, text, text) for kind in KINDS] == [1] * 5
    assert score("rouge1", text, text, tokenizer="english") == 0
    assert score("rouge2", "今天天气很好", "今天天气不好") == pytest.approx(3 / 5)
    assert score("rouge1", "Привет, мир", "привет мир") == score("rouge1", "नमस्ते दुनिया", "नमस्ते दुनिया।") == 1


def test_the_best_reference_counts() -> None:
    assert score("rougeL", "a b", "c d", "a b c", "a") == pytest.approx(0.8)


def test_sentences_are_lines_or_end_with_punctuation() -> None:
    one, other = "A rope. A walk.", "A walk. A rope."
    assert score("rougeLsum", one, other) == 0.5  # one sentence: a ... a
    assert score("rougeLsum", one, other, sentences="punctuation") == 1
    assert score("rougeLsum", "很长。好绳", "好绳。很长", sentences="punctuation") == 1


def test_signatures_and_names_tell_the_variants_apart() -> None:
    rouge_score = pytest.importorskip("importlib.metadata").version("rouge-score")
    (found,) = measured(RougeL(part="recall", stemmer=True), [answered("a", "a"), answered("ropes", "rope b")])
    assert (found.name, found.value, found.n) == ("rougeL_recall", 0.75, 2)
    assert found.interval == (0.5, 1.0)
    assert found.signature == (
        f"rougeL|recall|tok:unicode|stem:porter|refs:best f1|mean of items|rouge-score:{rouge_score}"
    )
    with pytest.raises(UserError, match='no part "f2"; known: f1, precision, recall'):
        Rouge1(part="f2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has no reference"):
        Rouge1().score(answered("a"))


@pytest.mark.parametrize("tokenizer", ["english", "unicode"])
def test_values_equal_those_of_rouge_155(tokenizer: str) -> None:
    refs = reference_values("rouge-1.5.5.json")
    for pair in refs["pairs"]:
        for way in ("plain", "stem"):
            for kind, parts in pair[way].items():
                for part, value in parts.items():
                    options = {"part": PARTS[part], "stemmer": way == "stem", "tokenizer": tokenizer}
                    found = score(kind, pair["prediction"], pair["target"], **options)
                    assert found == pytest.approx(value, abs=1e-5)
    for toy in refs["toy"]:
        for kind in toy.keys() & KINDS.keys():
            for part, value in toy[kind].items():
                found = score(kind, toy["prediction"], toy["target"], part=PARTS[part], tokenizer=tokenizer)
                assert found == pytest.approx(value, abs=1e-5)
    for pair in reference_values("text-overlap.json")["items"]:
        for name, values in pair["rouge155_stem"].items():
            kind = name.replace("-l", "L").replace("-", "")
            for part, value in zip(("precision", "recall", "f1"), values, strict=True):
                found = score(kind, pair["hyp"], pair["ref"], part=part, stemmer=True, tokenizer=tokenizer)
                assert found == pytest.approx(value, abs=1e-5)
