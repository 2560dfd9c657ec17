"""Evaluation during training: true to the model of that step, under any plan, within its budget, and without effect on
training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.metric import Metric
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import evaluate
from ropewalk.evaluate.from_checkpoint import load_model
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.question_task import Item, Question, QuestionTask
from ropewalk.evaluate.sharded_model import PlannedModel
from ropewalk.evaluate.task import Sampling
from ropewalk.monitor.follow import LiveCurve
from ropewalk.monitor.report.run_report import render
from ropewalk.monitor.run_view import read_run
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.hooks import live_evaluation
from ropewalk.train.loop import train
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run

from .runs import events, last_checkpoint, quick, train_until

QUIZ = "tests.train.test_live_evaluation:Quiz"
DURING = {"evaluate__during__every_steps": 3, "evaluate__during__tasks": ("held-out", QUIZ)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


class Likelier(ItemMetric):
    """Log-likelihood of the first choice above the second."""

    name = "margin"

    def statistics(self, item: Item) -> tuple[float, float]:
        first, second = (answer.log_probability for answer in item.likelihoods)
        return first - second, 1.0


class Quiz(QuestionTask):
    name = "quiz"
    ask = "multiple_choice"

    def load_questions(self) -> list[Question]:
        return [Question(prompt=f"{n} ropes", choices=(" a", " bc"), gold=(0,)) for n in range(7)]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [Likelier()]


class Story(QuestionTask):
    name = "story"
    ask = "generate_until"
    sampling = Sampling(max_new_tokens=4)

    def load_questions(self) -> list[Question]:
        return [Question(prompt="a", references=("b",))]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [ExactMatch()]


def measured(run: Path) -> list[dict[str, float]]:
    return [
        {
            f"{task} {name}": metric["value"]
            for task, metrics in event["tasks"].items()
            for name, metric in metrics.items()
        }
        for event in events(run, "evaluation")
    ]


def test_the_curve_has_what_an_evaluation_of_the_same_weights_finds(tmp_path: Path) -> None:
    run = make_run(tmp_path, **DURING)
    train(run)
    assert [event["step"] for event in events(run, "evaluation")] == [3, 6, 8]
    last = measured(run)[-1]
    assert {"held-out bits_per_byte", "quiz margin"} <= {*last}
    model, step, _ = load_model(last_checkpoint(run), device="cpu")
    settings = Evaluate(tasks=("held-out", QUIZ), max_bytes=50_000, limit=100)
    held_out, plan = (
        HeldOut(tmp_path / "prepared", settings, seed=3),
        Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=2),
    )
    alone = PlannedModel(plan, lambda plan: apply(plan, model, None, None), spec=model.spec, held_out=held_out)
    found = evaluate(alone, held_out)
    assert step == 8
    for task, metrics in found.tasks.items():
        for metric in metrics:
            if not metric.group:
                assert last[f"{task} {metric.name}"] == pytest.approx(metric.value, rel=1e-5), metric.name


def test_the_curve_is_of_as_many_questions_and_bytes_as_the_recipe_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, **DURING, evaluate__during__limit=3, evaluate__during__max_bytes=1000)
    train(run)
    tasks = events(run, "evaluation")[0]["tasks"]
    assert tasks["quiz"]["margin"]["n"] == 3
    assert tasks["held-out"]["bytes"]["value"] <= 1000


def test_training_ends_with_the_same_bits_whether_evaluated_or_not(tmp_path: Path) -> None:
    plain, watched = make_run(tmp_path / "a"), make_run(tmp_path / "b", **DURING)
    train(plain)
    train_until(watched, 5)
    train(watched)
    assert model_bytes(plain) == model_bytes(watched)


def model_bytes(run: Path) -> dict[str, Any]:
    model, _, _ = load_model(last_checkpoint(run), device="cpu")
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def test_a_resumed_run_has_one_true_curve(tmp_path: Path) -> None:
    whole, stopped = make_run(tmp_path / "a", **DURING), make_run(tmp_path / "b", **DURING)
    train(whole)
    train_until(stopped, 7)
    train(stopped)
    curves = []
    for run in (whole, stopped):
        curve = LiveCurve(run)
        points = [
            (p.step, p.figures) for p in curve.points() if any(name.startswith("evaluation/") for name in p.figures)
        ]
        curves.append(points)
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [3, 6, 8]
    assert "evaluation/quiz/margin" in curves[0][0][1]


class Broken(Quiz):
    name = "broken"

    def metrics(self, answers: Sequence[Any]) -> list[Any]:
        return [Metric("margin", float("nan"))]


def test_a_task_that_cannot_be_measured_is_named_and_training_goes_on(tmp_path: Path) -> None:
    tasks = ("tests.train.test_live_evaluation:Broken", "held-out")
    run = make_run(tmp_path, **{**DURING, "evaluate__during__tasks": tasks})
    train(run)
    for event in events(run, "evaluation"):
        assert [*event["tasks"]] == ["held-out"]
        assert "results must be finite" in event["left_out"]["broken"]
    assert events(run, "train_finished")


def test_tasks_that_the_budget_leaves_no_time_for_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_evaluation, "clock", functools.partial(next, iter(map(float, range(0, 10_000, 40)))))
    run = make_run(tmp_path, **DURING, evaluate__during__budget_s=60.0)
    train(run)
    for event in events(run, "evaluation"):
        assert [*event["tasks"]] == ["held-out"]
        assert event["left_out"] == {"quiz": "the budget of 60 s is spent"}
    assert events(run, "train_finished")


def test_the_report_draws_the_curve_of_each_task(tmp_path: Path) -> None:
    run = make_run(tmp_path, **DURING)
    train(run)
    page = render(read_run(run))
    assert "Tasks during training" in page
    assert "Quiz margin" in page


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize(
    "parallel",
    [{"shard": 2, "zero": 3}, {"tensor": 2, "sequence": True}, {"pipeline": 2}],
    ids=str,
)
def test_ranks_that_share_the_model_find_what_one_process_finds(tmp_path: Path, parallel: dict[str, Any]) -> None:
    tasks = ("held-out", QUIZ, "tests.train.test_live_evaluation:Story")
    settings = {**DURING, "evaluate__during__tasks": tasks}
    alone = make_run(tmp_path / "a", **settings)
    train(alone)
    shared = make_run(tmp_path / "b", **settings, **{f"parallel__{key}": value for key, value in parallel.items()})
    POOL.run(_train, shared, world=2)
    mine, theirs = measured(alone), measured(shared)
    assert len(mine) == len(theirs) == 3
    left_out = events(shared, "evaluation")[0]["left_out"]
    assert [*left_out] == (["story"] if parallel.get("sequence") else [])
    for one, other in zip(mine, theirs, strict=True):
        for name, value in other.items():
            assert value == pytest.approx(one[name], rel=1e-3), name


def _train(rank: int, run: Path) -> None:
    with as_rank(rank, 2) as patch:
        quick(patch)
        train(run, stays=True)
