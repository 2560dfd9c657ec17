"""The wrapper that asks a task again in other words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import open_tasks
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.choices import F1
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.metrics.translation import Bleu
from ropewalk.evaluate.perturb.robustness import Robustness
from ropewalk.evaluate.question_task import Ask, Item, Question, QuestionTask
from ropewalk.evaluate.task import Generate, Generation, Likelihood, LogLikelihood, Request

QUESTIONS = [
    Question(prompt="Is the harbor big?", references=("yes",)),
    Question(prompt="Is the color red?", references=("no",)),
    Question(prompt="12 + 30 =", references=("42",)),
]


class Asked(QuestionTask):
    name, ask = "asked", "generate_until"

    def load_questions(self) -> list[Question]:
        return QUESTIONS

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [ExactMatch()]


class Chosen(Asked):
    name = "chosen"
    ask: Ask = "multiple_choice"

    def load_questions(self) -> list[Question]:
        return [Question(prompt=f"Is {n} the color?", choices=(" yes", " no"), gold=(0,)) for n in ("A cat", "it")]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [First()]


class First(ItemMetric):
    """Whether the first choice is the likely one."""

    name, unit = "acc", "share"

    def statistics(self, item: Item) -> tuple[float, float]:
        return float(item.likelihoods[0].log_probability > item.likelihoods[1].log_probability), 1.0


def held_out(corpus: Path, **settings: Any) -> HeldOut:
    return HeldOut(corpus, Evaluate(**settings), seed=4)


def answer(task: Robustness, of: dict[str, str]) -> list[Generation]:
    """What a model says, by prompt; nothing to prompts that it does not know."""
    requests = task.requests()
    assert all(isinstance(each, Generate) for each in requests)
    return [Generation([], of.get(str(each.prompt), "")) for each in requests if isinstance(each, Generate)]


def wrapped(corpus: Path, *names: str, kind: type[QuestionTask] = Asked) -> Robustness:
    return Robustness(kind(held_out(corpus, perturbations=names)))


def test_the_recipe_puts_a_wrapper_beside_each_task_of_questions(corpus: Path) -> None:
    tasks = [f"{__name__}:Asked", "held-out", f"{__name__}:Chosen"]
    names = [task.name for task in open_tasks(held_out(corpus, tasks=tasks, perturbations=("upper_case",)))]
    assert names == ["asked", "asked robustness", "held-out", "chosen", "chosen robustness"]
    assert [task.name for task in open_tasks(held_out(corpus, tasks=tasks))] == ["asked", "held-out", "chosen"]


def test_original_questions_are_asked_as_the_task_asks_them_and_others_only_if_they_change(corpus: Path) -> None:
    task = wrapped(corpus, "upper_case", "british_spelling")
    prompts = [request.prompt for request in task.requests() if isinstance(request, Generate)]
    assert prompts == [
        *(question.prompt for question in QUESTIONS),
        *("IS THE HARBOR BIG?", "IS THE COLOR RED?"),
        *("Is the harbour big?", "Is the colour red?"),
    ]
    assert list(task.requests())[:3] == Asked(task.held_out).requests()


def test_drop_consistency_and_worst_case_are_those_counted_by_hand(corpus: Path) -> None:
    task = wrapped(corpus, "upper_case", "british_spelling", "no_diacritics")
    said = {
        "Is the harbor big?": "yes",
        "Is the color red?": "no",
        "12 + 30 =": "42",
        "IS THE HARBOR BIG?": "yes",
        "IS THE COLOR RED?": "yes",
        "Is the harbour big?": "yes",
        "Is the colour red?": "no",
    }
    found = {(metric.name, metric.group): metric for metric in task.metrics(answer(task, said))}
    worst = found["worst_case_exact_match", ""]
    assert (worst.value, worst.n, worst.references) == (0.5, 2, {"as asked": 1.0})
    drops = {group: metric.value for (name, group), metric in found.items() if name == "exact_match_drop"}
    assert drops == {"": 0.25, "upper_case": 0.5, "british_spelling": 0.0}
    assert found["exact_match_drop", "upper_case"].references == {"as asked": 1.0, "perturbed": 0.5}
    same = {group: metric.value for (name, group), metric in found.items() if name == "consistency"}
    assert same == {"": 0.75, "upper_case": 0.5, "british_spelling": 1.0}
    changed = {group: metric.value for (name, group), metric in found.items() if name == "changed"}
    assert changed == {"": 2 / 3, "upper_case": 2 / 3, "british_spelling": 2 / 3, "no_diacritics": 0.0}


def test_the_interval_of_the_drop_is_a_bootstrap_of_pairs(corpus: Path) -> None:
    class Many(Asked):
        def load_questions(self) -> list[Question]:
            return [Question(prompt=f"Is number {n} big?", references=("yes",)) for n in range(40)]

    task = wrapped(corpus, "upper_case", kind=Many)
    draw = np.random.default_rng(0)
    before = {f"Is number {n} big?": "yes" if draw.random() < 0.8 else "no" for n in range(40)}
    after = {prompt.upper(): answer if draw.random() < 0.7 else "no" for prompt, answer in before.items()}
    metrics = task.metrics(answer(task, before | after))
    (drop,) = [each for each in metrics if each.name == "exact_match_drop" and not each.group]
    difference = np.array(
        [(before[prompt] == "yes") - float(after[prompt.upper()] == "yes") for prompt in before], np.float64
    )
    drawn = difference[np.random.default_rng(0).integers(40, size=(1000, 40))].mean(1)
    assert drop.value == pytest.approx(difference.mean())
    assert drop.interval == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))
    assert drop.better == "lower"


def test_the_same_choice_is_consistent_even_when_it_is_wrong(corpus: Path) -> None:
    task = wrapped(corpus, "upper_case", kind=Chosen)
    requests: Sequence[Request] = task.requests()
    assert [request.context for request in requests if isinstance(request, LogLikelihood)][4::2] == [
        "IS A CAT THE COLOR?",
        "IS IT THE COLOR?",
    ]
    answers = [Likelihood(log, 1, 0) for log in (-2.0, -1.0, -1.0, -2.0, -3.0, -2.5, -4.0, -3.0)]
    found = {metric.name: metric.value for metric in task.metrics(answers) if not metric.group}
    assert (found["consistency"], found["acc_drop"], found["worst_case_acc"]) == (0.5, 0.5, 0.0)


def test_the_interval_over_all_perturbations_draws_questions_with_all_their_wordings(corpus: Path) -> None:
    class Many(Asked):
        def load_questions(self) -> list[Question]:
            colors = [Question(prompt=f"Is number {n} the color?", references=("yes",)) for n in range(12)]
            return [*(Question(prompt=f"Is number {n} it?", references=("yes",)) for n in range(12)), *colors]

    task = wrapped(corpus, "upper_case", "british_spelling", kind=Many)
    draw = np.random.default_rng(5)
    requests = [each for each in task.requests() if isinstance(each, Generate)]
    said = {str(each.prompt): "yes" if draw.random() < 0.6 else "no" for each in requests}
    (found, *_) = [each for each in task.metrics(answer(task, said)) if each.name == "exact_match_drop"]
    rows = []
    for question in task.task.questions:
        wordings = [question.prompt.upper(), *([question.prompt.replace("or?", "our?")] * ("color" in question.prompt))]
        right = float(said[question.prompt] == "yes")
        after = sum(float(said[wording] == "yes") for wording in wordings)
        rows.append([right * len(wordings) - after, len(wordings)])
    drawn = np.array(rows)[np.random.default_rng(0).integers(24, size=(1000, 24))].sum(1)
    assert found.value == pytest.approx(np.sum(rows, 0)[0] / 36)
    assert found.interval == pytest.approx(tuple(np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])))
    assert found.n == 24


def test_a_drop_of_what_should_be_low_is_a_rise(corpus: Path) -> None:
    class Wordy(Asked):
        @property
        def item_metrics(self) -> Sequence[ItemMetric]:
            metric = Words()
            metric.better = "lower"
            return [metric]

    task = wrapped(corpus, "upper_case", kind=Wordy)
    said = {
        "Is the harbor big?": "a",
        "IS THE HARBOR BIG?": "c d e",
        "Is the color red?": "x",
        "IS THE COLOR RED?": "x",
    }
    found = {metric.name: metric.value for metric in task.metrics(answer(task, said)) if not metric.group}
    assert (found["words_drop"], found["worst_case_words"]) == (1.0, 2.0)


class Words(ItemMetric):
    """Words of completions: no verdict."""

    name = "words"

    def statistics(self, item: Item) -> tuple[float, float]:
        return float(len(item.predictions[0].split())), 1.0


class Gap(Words):
    """No mean over items."""

    name = "gap"

    def value(self, sums_K: Any) -> Any:
        return 2 * super().value(sums_K)


def test_without_a_verdict_texts_are_compared_and_the_worst_case_is_of_the_first_mean(corpus: Path) -> None:
    class Told(Asked):
        @property
        def item_metrics(self) -> Sequence[ItemMetric]:
            return [Gap(), Words(), ExactMatch()]

    task = wrapped(corpus, "upper_case", kind=Told)
    said = {
        "Is the harbor big?": "a b",
        "IS THE HARBOR BIG?": "c d",
        "Is the color red?": "x y",
        "IS THE COLOR RED?": "x",
    }
    found = {metric.name: metric for metric in task.metrics(answer(task, said)) if not metric.group}
    assert found["worst_case_words"].value == 1.5
    assert found["gap_drop"].value == 2 * (2 - 1.5)
    assert (found["consistency"].value, found["consistency"].signature) == (0.0, "strength:1|seed:4|same:text")


def test_perturbed_answers_are_recorded_under_their_perturbation(corpus: Path) -> None:
    task = wrapped(corpus, "upper_case")
    records = task.records(answer(task, {"IS THE HARBOR BIG?": "yes"}))
    assert [(each.task, each.prompt, each.scores) for each in records] == [
        ("asked upper_case", "IS THE HARBOR BIG?", {"exact_match": 1.0}),
        ("asked upper_case", "IS THE COLOR RED?", {"exact_match": 0.0}),
    ]


def test_where_nothing_changes_only_that_is_reported(corpus: Path) -> None:
    task = wrapped(corpus, "traditional")
    metrics = task.metrics(answer(task, {}))
    assert [(each.name, each.value, each.group) for each in metrics] == [
        ("changed", 0.0, ""),
        ("changed", 0.0, "traditional"),
    ]


def test_strength_changes_more_of_the_same_question(corpus: Path) -> None:
    def changed(strength: float) -> int:
        class Long(Asked):
            def load_questions(self) -> list[Question]:
                return [Question(prompt="several strands are laid into a rope " * 20, references=("x",))]

        task = Robustness(Long(held_out(corpus, perturbations=("typos",), perturbation_strength=strength)))
        prompts = [str(request.prompt) for request in task.requests() if isinstance(request, Generate)]
        return sum(a != b for a, b in zip(*prompts, strict=True))

    assert 0 < changed(1.0) < changed(4.0)


def test_a_drop_is_measured_with_the_tokenizer_of_the_tasks_language(corpus: Path) -> None:
    class Translated(Asked):
        def load_questions(self) -> list[Question]:
            return [Question(prompt=f"Translate color {n}", references=("绳子由许多股线绞成。",)) for n in range(3)]

        @property
        def item_metrics(self) -> Sequence[ItemMetric]:
            return [Bleu()]

    task = wrapped(corpus, "upper_case", kind=Translated)
    said = {question.prompt: "绳子由许多根线绞成。" for question in task.task.questions}
    (plain, *_) = task.task.metrics([Generation([], text) for text in said.values()])
    (drop, *_) = [each for each in task.metrics(answer(task, said)) if each.name == "bleu_drop"]
    assert 0 < plain.value == pytest.approx(drop.references["as asked"])
    assert "tok:zh" in drop.signature


def test_a_headline_that_does_not_add_up_leaves_the_drop_to_the_next_metric(corpus: Path) -> None:
    class Classes(Chosen):
        @property
        def item_metrics(self) -> Sequence[ItemMetric]:
            return [F1(), First()]

    task = wrapped(corpus, "upper_case", kind=Classes)
    answers = [Likelihood(log, 1, 0) for log in (-2.0, -1.0, -1.0, -2.0, -3.0, -2.5, -4.0, -3.0)]
    found = {metric.name: metric.value for metric in task.metrics(answers) if not metric.group}
    assert (found["consistency"], found["acc_drop"], found["worst_case_acc"]) == (0.5, 0.5, 0.0)
