"""BLEU, chrF and TER of sums against sacrebleu's own corpus and sentence scores."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.resampling import measured, resampled_sums
from ropewalk.evaluate.metrics.translation import Bleu, ChrF, ChrFPlusPlus, SacreMetric, Ter
from ropewalk.evaluate.question_task import Question, QuestionTask
from ropewalk.evaluate.task import Generation

from .texts import answered, answered_lines, corpus_value, reference_values

sacre = pytest.importorskip("sacrebleu.metrics")

OURS = [
    "The rope is laid on a long walk.",
    "Three strands make a rope , not two",
    "the walk was a quarter of a mile",
    "Rope!",
    "",
]
REFERENCES = [
    [
        "The rope was laid on the long walk.",
        "Three strands make a rope, not two.",
        "The walk was a quarter mile.",
        "Rope",
        "A",
    ],
    ["A long walk is where rope is laid.", "It takes three strands.", "A quarter of a mile", "The rope!", "B c"],
]
ITEMS = answered_lines(OURS, REFERENCES)
CHINESE = answered_lines(["今天天气很好", "我们去公园 OK"], [["今天的天气很好。", "我们一起去公园。"]])


@pytest.mark.parametrize(
    ("method", "value"),
    [("exp", None), ("floor", None), ("floor", 0.01), ("add-k", None), ("add-k", 2), ("none", None)],
)
@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "none", "zh"])
def test_bleu_equals_sacrebleu_for_every_smoothing_and_tokenizer(
    method: str, value: float | None, tokenize: str
) -> None:
    for effective, lowercase in itertools.product((False, True), repeat=2):
        options = {"smooth_method": method, "smooth_value": value, "tokenize": tokenize, "lowercase": lowercase}
        theirs = sacre.BLEU(**options, effective_order=effective, force=True)
        assert corpus_value(Bleu(**options, effective_order=effective), ITEMS) == pytest.approx(
            theirs.corpus_score(OURS, REFERENCES).score
        )
        sentence = sacre.BLEU(**options, effective_order=True, force=True)
        for item, text in zip(ITEMS, OURS, strict=True):
            score = sentence.sentence_score(text, item.question.references).score
            assert Bleu(**options).score(item) == pytest.approx(score)


@pytest.mark.parametrize("options", [{}, {"word_order": 2}, {"beta": 3, "eps_smoothing": True}, {"whitespace": True}])
def test_chrf_equals_sacrebleu(options: dict) -> None:
    theirs = sacre.CHRF(**options)
    assert corpus_value(ChrF(**options), ITEMS) == pytest.approx(theirs.corpus_score(OURS, REFERENCES).score)
    for item, text in zip(ITEMS, OURS, strict=True):
        score = theirs.sentence_score(text, item.question.references).score
        assert ChrF(**options).score(item) == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("options", [{}, {"normalized": True}, {"no_punct": True, "case_sensitive": True}])
def test_ter_equals_sacrebleu(options: dict) -> None:
    theirs = sacre.TER(**options)
    assert corpus_value(Ter(**options), ITEMS) == pytest.approx(theirs.corpus_score(OURS, REFERENCES).score)
    empty = answered_lines(["two words", ""], [["", ""]])
    assert [Ter().score(item) for item in empty] == [100.0, 0.0]


@pytest.mark.parametrize("metric", [Bleu(), ChrF(), ChrFPlusPlus(), Ter()], ids=lambda metric: metric.name)
def test_resampled_values_are_those_of_the_resampled_corpora(metric: SacreMetric) -> None:
    table = np.array([metric.statistics(item) for item in ITEMS])
    drawn_items = np.random.default_rng(5).integers(5, size=(20, 5))
    counts = [np.bincount(row, minlength=5) for row in drawn_items]
    values = metric.value(resampled_sums(table, seed=5, resamples=20))
    for count, value in zip(counts, values, strict=True):
        drawn = [item for item, times in zip(ITEMS, count, strict=True) for _ in range(times)]
        assert value == pytest.approx(corpus_value(type(metric)(), drawn))


def test_a_measured_value_has_sacrebleus_signature_and_an_interval() -> None:
    (found,) = measured(Bleu(tokenize="intl", lowercase=True), ITEMS)
    theirs = sacre.BLEU(tokenize="intl", lowercase=True)
    value = theirs.corpus_score(OURS, REFERENCES).score
    assert (found.value, found.signature) == (pytest.approx(value), theirs.get_signature().format())
    assert found.interval is not None
    assert found.interval[0] < found.value < found.interval[1]
    mixed = [answered("a b", "a b"), answered("a b", "a b", "c")]
    assert measured(ChrF(), mixed)[0].signature.startswith("nrefs:var|")
    assert measured(ChrF(beta=1), mixed)[0].signature.endswith("|beta:1")


def test_the_tokenizer_follows_the_language_of_the_references() -> None:
    (bleu,), (ter,) = measured(Bleu(), CHINESE), measured(Ter(), CHINESE)
    lines = [[item.question.references[0] for item in CHINESE]]
    texts = [item.predictions[0] for item in CHINESE]
    assert bleu.value == pytest.approx(sacre.BLEU(tokenize="zh").corpus_score(texts, lines).score)
    assert "|tok:zh|" in bleu.signature
    asian = sacre.TER(normalized=True, asian_support=True).corpus_score(texts, lines).score
    assert ter.value == pytest.approx(asian)
    assert "|norm:yes|" in ter.signature
    assert "|asian:yes|" in ter.signature
    assert "|tok:13a|" in measured(Bleu(), ITEMS)[0].signature
    japanese = [answered("縄を編む人です", "縄を編む人でした")]
    assert "|tok:char|" in measured(Bleu(), japanese)[0].signature
    assert "|tok:13a|" in measured(Bleu(tokenize="13a"), CHINESE)[0].signature


class Translate(QuestionTask):
    name, ask = "translate", "generate_until"

    def load_questions(self) -> list[Question]:
        return [item.question for item in CHINESE]

    @property
    def item_metrics(self) -> list[SacreMetric]:
        return [Bleu()]


def test_scores_of_items_use_the_tokenizer_of_the_task() -> None:
    answers = [Generation([], item.predictions[0]) for item in CHINESE]
    task = Translate(HeldOut(None, Evaluate(), seed=0))
    theirs = sacre.BLEU(tokenize="zh", effective_order=True)
    expected = [theirs.sentence_score(item.predictions[0], item.question.references).score for item in CHINESE]
    assert [each.scores["bleu"] for each in task.records(answers)] == pytest.approx(expected)
    assert task.metrics(answers)[0].signature.startswith("nrefs:1|case:mixed|eff:no|tok:zh|")


def test_wrong_options_and_missing_references_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sacrebleu.utils.SACREBLEU_DIR", str(tmp_path))
    with pytest.raises(UserError, match='no tokenize "words"; known: none, '):
        Bleu(tokenize="words")
    with pytest.raises(UserError, match='no smooth_method "laplace"'):
        Bleu(smooth_method="laplace")
    with pytest.raises(UserError, match=r"download https://.* as this file, or choose another"):
        Bleu(tokenize="flores200")
    with pytest.raises(UserError, match="chrf: a question has no reference"):
        ChrF().statistics(answered("a"))


def test_the_vectors_of_sacrebleus_own_tests_are_reproduced() -> None:
    refs = reference_values("sacrebleu-2.6.0.json")
    for case in refs["corpus_bleu"]:
        found = corpus_value(Bleu(**case["args"]), answered_lines(case["hyps"], case["ref_streams"]))
        assert found == pytest.approx(case["score"], abs=1e-6)
    for name, effective in (("raw_bleu", False), ("effective_order", True)):
        for case in refs[name]:  # sacrebleu's `raw_corpus_bleu` and these tests smooth by .01
            metric = Bleu(tokenize="none", smooth_method="floor", smooth_value=0.01, effective_order=effective)
            found = corpus_value(metric, answered_lines(case["hyps"], case["ref_streams"]))
            assert found / 100 == pytest.approx(case["score01"])
    for case in refs["ngram_statistics"]:
        (item,) = answered_lines(case["hyps"], case["ref_streams"])
        assert Bleu(tokenize="none").statistics(item)[2:] == [*case["correct"], *case["total"]]
    sentence = refs["sentence_bleu"]
    for method, value, lowercase, tokenize, score in sentence["cases"]:
        metric = Bleu(smooth_method=method, smooth_value=value, lowercase=lowercase, tokenize=tokenize)
        assert metric.score(answered(sentence["sys"], sentence["ref"])) == pytest.approx(score, abs=1e-3)
    for case in refs["chrf"]["cases"]:
        found = corpus_value(ChrF(**refs["chrf"]["args"]), answered_lines(case["hyps"], [case["refs"]]))
        assert found == pytest.approx(case["score"], abs=1e-4)
    for case in refs["ter"]:
        found = corpus_value(Ter(), answered_lines(case["hyps"], [case["refs"]]))
        assert found / 100 == pytest.approx(case["score01"], abs=1e-3)
