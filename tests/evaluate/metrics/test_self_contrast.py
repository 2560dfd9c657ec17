"""Self-contrast and the task that asks for it."""

from __future__ import annotations

import functools
import re

import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.config import TASKS, Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.metrics.self_contrast import SelfContrast, rouge_l
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.evaluate.task import Generation


def common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """The length of the longest common subsequence."""

    @functools.cache
    def until(i: int, j: int) -> int:
        if not i or not j:
            return 0
        return until(i - 1, j - 1) + 1 if first[i - 1] == second[j - 1] else max(until(i - 1, j), until(i, j - 1))

    return until(len(first), len(second))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("The cat sat, on the mat.", "the mat sat on a cat", lambda text: re.findall("[a-z]+", text.lower())),
        ("周海送了十二封信。", "周海一封一封地送信", lambda text: [*text.strip("。")]),
        ("用 GPU 训练", "用gpu训练", None),
        ("a", "b", None),
    ],
)
def test_rouge_l_is_that_of_words_and_ideographs(first: str, second: str, words) -> None:  # type: ignore[no-untyped-def]
    if words is None:
        assert rouge_l(first, second) == (100 if len(first) > 1 else 0)
        return
    a, b = (tuple(words(text)) for text in (first, second))
    assert rouge_l(first, second) == pytest.approx(200 * common(a, b) / (len(a) + len(b)))


def score(variant: str, alone: str, knowing: str, *references: str) -> float:
    item = Item(question=Question(prompt="?", references=references), predictions=(alone, knowing))
    return measured(METRICS["self_contrast"].load()(variant=variant), [item])[0].value


def test_both_variants_follow_their_formula() -> None:
    alone, knowing, reference = "a b c d", "a b x y", "a b x z"
    # d(T, R) = 50, d(Tk, R) = 75, d(T, Tk) = 50
    assert score("code", alone, knowing, reference) == pytest.approx(2 * (50 + 75) / 2 - 50)
    assert score("paper", alone, knowing, reference) == pytest.approx((50 + 75 + 50) / 3)
    assert score("code", alone, knowing, "q", reference) == score("code", alone, knowing, reference)
    assert score("code", "", "", reference) == 0


def test_the_signature_names_the_variant() -> None:
    code, paper = SelfContrast(), SelfContrast(variant="paper")
    assert (code.name, paper.name) == ("self_contrast", "self_contrast_paper")
    assert code.signature.startswith("code:2*avg(")
    assert paper.signature.startswith("paper:avg(")
    with pytest.raises(UserError, match='"code" or "paper"'):
        SelfContrast(variant="other")  # type: ignore[arg-type]


def test_each_story_is_continued_alone_and_with_its_events() -> None:
    task = TASKS["knowledge-creation"].load()(HeldOut(None, Evaluate(), seed=0))
    requests, questions = task.requests(), task.questions
    assert (len(questions), len(requests)) == (10, 20)
    assert [question.group for question in questions].count("zh") == 5
    for question, alone, knowing in zip(questions, requests[::2], requests[1::2], strict=True):
        events = question.document["events"]
        assert question.prompt in alone.prompt
        assert not any(event in alone.prompt for event in events)
        assert knowing.prompt.endswith(alone.prompt)
        assert all(event in knowing.prompt for event in events)
        assert question.references[0] not in knowing.prompt


def test_the_true_continuation_scores_best_and_the_headline_has_the_level() -> None:
    task = TASKS["knowledge-creation"].load()(HeldOut(None, Evaluate(), seed=0))

    def measure(write) -> dict[str, float]:  # type: ignore[no-untyped-def]
        answers = [Generation([], write(question, knows)) for question in task.questions for knows in (False, True)]
        metrics = task.metrics(answers)
        assert (metrics[0].name, metrics[0].level, metrics[0].n) == ("self_contrast", "KC", 10)
        return {metric.name: metric.value for metric in metrics if not metric.group}

    true = measure(lambda question, knows: question.references[0])
    listed = measure(lambda question, knows: " ".join(question.document["events"]) if knows else "")
    assert true == {"self_contrast": 100, "self_contrast_paper": 100}
    assert 0 < listed["self_contrast"] < 100
    assert measure(lambda question, knows: "")["self_contrast"] == 0
