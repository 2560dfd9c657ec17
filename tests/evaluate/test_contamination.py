"""Contamination: questions that stand in the training corpus, and the score without them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ropewalk.evaluate.contamination import find_contamination, ngram_words, question_text
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import prepare

EXACT = partial(measured, ExactMatch())
SEEN = "A ropewalk is the long hall in which raw fibre is combed, spun and laid in parallel strands into one"
FRESH = [
    f"Question {n}: which of the {n} sailors on the quay tied the {n}th knot before the tide came in" for n in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(f"Page {number}. {SEEN} rope, as page {number} says. " * 3)
    made = prepare(
        Prepare(
            sources=(Source(name="pages", paths=(str(folder / "texts"),)),),
            filter=Filter(),
            tokenizer=Tokenizer(vocab_size=300, train_bytes=3000),
            workers=1,
            folder=str(folder / "prepared"),
        ),
        seed=1,
    )
    return made.folder


def answered(prompt: str, answer: str, *, right: bool) -> Item:
    return Item(question=Question(prompt=prompt, references=(answer,)), predictions=(answer if right else "no",))


def test_the_clean_score_leaves_out_what_the_model_was_trained_on(folder: Path) -> None:
    items = [
        answered(SEEN.upper(), "rope", right=True),
        *(answered(text, "bow", right=i == 0) for i, text in enumerate(FRESH)),
    ]
    found = find_contamination(folder, {"hall": (items, EXACT), "short": (items[:0], EXACT)})["hall"]
    assert (found.questions, found.contaminated, found.unchecked) == (5, 1, 0)
    assert found.clean[0].value == 1 / 4
    (evidence,) = found.evidence
    assert evidence.share == 1
    assert evidence.source == "pages"
    assert evidence.key == items[0].question.key
    assert evidence.span == " ".join(SEEN.upper().split()[: found.words]).rstrip(",")
    assert found.tree()["clean"]["exact_match"]["n"] == 4


def test_short_questions_are_reported_as_unchecked(folder: Path) -> None:
    items = [answered("Long hall?", "ropewalk", right=True), *(answered(text, "bow", right=True) for text in FRESH)]
    found = find_contamination(folder, {"t": (items, EXACT)})["t"]
    assert (found.contaminated, found.unchecked, found.words) == (0, 1, 8)


def test_n_is_the_5th_percentile_of_lengths_between_8_and_13() -> None:
    assert ngram_words(["one two three"] * 20) == 8
    assert ngram_words(["w " * 100] * 20) == 13
    assert ngram_words(["w " * 10] * 20) == 10


def test_a_question_is_its_prompt_with_the_right_answer() -> None:
    choice = Question(prompt="Sky?", choices=(" red", " blue"), gold=(1,))
    filled = Question(prompt="_ is blue", contexts=("sea", "sky"), choices=(" is", " is"), gold=(0,))
    assert question_text(Question(prompt="Sky?", query="the sky", references=("blue",))) == "the sky"
    assert [question_text(each).split() for each in (choice, filled)] == [["Sky?", "blue"], ["sea", "is"]]
