"""Metrics of replies, by hand and by brute force; the tasks of dialogue and toxicity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.judges.judge import OpenJudge
from ropewalk.evaluate.metrics.dialogue import RecallAt, ReciprocalRank, Repetition, distinct, rank_of_gold
from ropewalk.evaluate.metrics.judged import (
    ExpectedMaximumToxicity,
    JudgedMetric,
    MeanToxicity,
    ToxicFraction,
    ToxicityProbability,
)
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.evaluate.task import Generate, Generation, Likelihood
from ropewalk.evaluate.tasks.dialogues import Dialogue, ResponseSelection
from ropewalk.evaluate.tasks.open_prompts import OpenPrompts, Toxicity


class Numbers:
    """Scores a text as the number that it is."""

    name, version = "numbers", "2"

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        return [float(text) for text in texts]


def said(*texts: str) -> Item:
    return Item(question=Question(prompt="?"), predictions=texts)


def ranked(*likely: float, gold: tuple[int, ...] = (0,)) -> Item:
    answers = tuple(Likelihood(each, 1, 0) for each in likely)
    return Item(question=Question(prompt="?", choices=("x",) * len(likely), gold=gold), likelihoods=answers)


def test_distinct_counts_ngrams_over_all_replies() -> None:
    items = [said("I like cats"), said("I like dogs, I like it"), said("猫猫")]
    (one,), (two,) = distinct(items, 1), distinct(items, 2)
    # i like cats dogs it 猫 of 3 + 6 + 2; pairs: i-like, like-cats, like-dogs, dogs-i, like-it, 猫-猫 of 2 + 5 + 1.
    assert (one.value, two.value, one.n) == (6 / 11, 6 / 8, 3)
    assert distinct([said("")], 1) == []


def test_the_interval_of_distinct_is_a_jackknife() -> None:
    items = [said("a b c"), said("a a d"), said("b e"), said("f")]
    (whole,) = distinct(items, 1)
    left = [distinct([each for each in items if each is not out], 1)[0].value for out in items]
    mean = sum(left) / 4
    error = (3 / 4 * sum((each - mean) ** 2 for each in left)) ** 0.5
    assert whole.interval == pytest.approx((whole.value - 1.959964 * error, min(1, whole.value + 1.959964 * error)))


def test_repetition_is_the_share_of_grams_that_were_there_before() -> None:
    (found,) = measured(Repetition(), [said("a b c d a b c d"), said("one two three")])
    assert (found.value, found.n) == (pytest.approx(1 / 5), 1)


def test_recall_at_k_ranks_the_gold_response_and_ties_count_against_it() -> None:
    items = [ranked(-1, -2, -3), ranked(-2, -1, -3), ranked(-2, -2, -1), ranked(-5, -1, gold=())]
    assert [rank_of_gold(item) for item in items] == [1, 2, 3, None]
    assert [measured(RecallAt(k), items)[0].value for k in (1, 2, 3)] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1]
    assert measured(ReciprocalRank(), items)[0].value == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert rank_of_gold(ranked(-3, -1, -2, gold=(0, 2))) == 2, "the best of several"


def test_toxicity_is_summed_over_completions_and_prompts() -> None:
    items = [said("0.1", "0.9"), said("0.2", "0.4"), said("0.5", "0.6")]
    kinds = (ExpectedMaximumToxicity, ToxicFraction, ToxicityProbability, MeanToxicity)
    found = {kind.name: measured(kind(OpenJudge(Numbers())), items)[0] for kind in kinds}
    assert {name: metric.value for name, metric in found.items()} == {
        "expected_maximum_toxicity": pytest.approx((0.9 + 0.4 + 0.6) / 3),
        "toxic_fraction": pytest.approx(3 / 6),
        "toxicity_probability": pytest.approx(2 / 3),
        "mean_toxicity": pytest.approx(2.7 / 6),
    }
    for metric in found.values():
        assert (metric.better, metric.signature) == ("lower", "judge:numbers 2")
        assert metric.note.endswith("judge uncalibrated")
        assert metric.interval is not None


def test_the_agreement_with_people_stands_beside_the_score(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("text,score\n0.1,1\n0.2,2\n0.9,3\n")
    (found,) = measured(JudgedMetric(OpenJudge(Numbers(), str(tmp_path / "sheet.csv")), "liking"), [said("0.5")])
    assert found.note == "mean score; judge Spearman 1.00 with people on 3 texts"


def task_of(kind: Any, corpus: Path, **settings: Any) -> Any:
    return kind(HeldOut(corpus, Evaluate(**settings), seed=3))


def test_replies_are_asked_for_after_the_true_turns_before_them(corpus: Path) -> None:
    task = task_of(Dialogue, corpus)
    requests = task.requests()
    assert len(requests) == 20
    assert requests[1].prompt == (
        "User: Where can I borrow a rope for the weekend?\n"
        "Assistant: The boat club on Mill Street lends ropes to anybody who leaves a deposit.\n"
        "User: How much is the deposit?\n"
        "Assistant:"
    )
    assert requests[-1].prompt.endswith("用户：换了线还是不行。\n助手：")
    true = [Generation([], question.references[0]) for question in task.questions]
    found = {metric.name: metric for metric in task.metrics(true) if not metric.group}
    assert {"relevance", "consistency", "repetition", "distinct_1", "distinct_2"} == {*found}
    assert found["consistency"].n == 10, "the first reply of a dialogue can contradict nothing"
    assert found["consistency"].value == 1.0
    wrong = [Generation([], task.questions[(n + 7) % 20].references[0]) for n in range(20)]
    worse = {metric.name: metric.value for metric in task.metrics(wrong) if not metric.group}
    assert worse["relevance"] < found["relevance"].value


def test_the_true_reply_stands_once_among_replies_of_other_dialogues(corpus: Path) -> None:
    task = task_of(ResponseSelection, corpus)
    for question in task.questions:
        assert len({*question.choices}) == 5
        assert question.choices[question.gold[0]].strip() == question.references[0]
    assert len({question.gold for question in task.questions}) > 1
    likely = [0.0 if index in question.gold else -1.0 for question in task.questions for index in range(5)]
    found = {metric.name: metric.value for metric in task.metrics([Likelihood(each, 1, 0) for each in likely])}
    assert found["recall_at_1"] == found["mean_reciprocal_rank"] == 1.0


def test_dialogues_of_ones_own_may_bring_their_candidates(corpus: Path, tmp_path: Path) -> None:
    row = {"turns": [{"role": "user", "content": "Hi."}, "Hello."], "candidates": [["Bye.", "No."]]}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    (question,) = task_of(ResponseSelection, corpus, dialogues=str(tmp_path / "own.jsonl")).questions
    assert {*question.choices} == {" Hello.", " Bye.", " No."}
    (tmp_path / "own.jsonl").write_text('{"turns": 3}\n')
    with pytest.raises(DataError, match=r"own.jsonl:1: no dialogue"):
        task_of(Dialogue, corpus, dialogues=str(tmp_path / "own.jsonl")).load_questions()


def test_toxicity_judges_the_continuations_that_bias_counts(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "own_judge.py").write_text(
        "class Angry:\n    name, version = 'angry', '1'\n"
        "    def scores(self, texts, contexts):\n        return [float('!' in text) for text in texts]\n"
    )
    monkeypatch.chdir(tmp_path)
    toxicity, prompts = task_of(Toxicity, corpus, toxicity_judge="own_judge:Angry"), task_of(OpenPrompts, corpus)
    requests = toxicity.requests()
    assert requests == prompts.requests()
    assert len(requests) == 150
    assert [request.repeat for request in requests[:6] if isinstance(request, Generate)] == [0, 1, 2, 3, 4, 0]
    answers = [Generation([], "she left!" if number % 5 == 0 else "he left") for number in range(150)]
    found = {metric.name: metric.value for metric in toxicity.metrics(answers) if not metric.group}
    assert found["toxic_fraction"] == pytest.approx(0.2)
    assert found["expected_maximum_toxicity"] == found["toxicity_probability"] == 1.0
    bias = {metric.name: metric.value for metric in prompts.metrics(answers) if not metric.group}
    assert bias["gender_representation"] == pytest.approx(0.3)
    assert "race_representation" not in bias, "no surname occurs"
