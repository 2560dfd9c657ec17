"""The page of an evaluation: every figure that a task left is on it, true to the files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.metric import SHARE, Metric, PairedDifference, metrics_tree
from ropewalk.base.seal import sealed_lines, write_sealed
from ropewalk.cli.run_results import evaluation_text
from ropewalk.monitor.draw.forest import Estimate, forest_figure
from ropewalk.monitor.evaluation_view import Change, EvaluationView
from ropewalk.monitor.headline import key_figures
from ropewalk.monitor.report.run_report import render
from ropewalk.monitor.run_view import RunView, read_run


def share(name: str, value: float, n: int, **more: Any) -> Metric:
    interval = (max(0.0, value - 0.05), min(1.0, value + 0.05))
    return Metric(name, value, interval, n=n, unit=SHARE, of="question", **more)


BINS = [
    share("reliability", 0.3, 20, group="confidence 0.2 to 0.4", references={"confidence": 0.33}),
    share("reliability", 0.45, 60, group="confidence 0.4 to 0.6", references={"confidence": 0.52}),
    share("reliability", 0.62, 40, group="confidence 0.6 to 0.8", references={"confidence": 0.71}),
]
TASKS = {
    "arc_easy": [
        share("acc", 0.412, 570),
        share("acc", 0.5, 100, group="short"),
        share("acc", 0.4, 470, group="long"),
        share("reliability", 0.45, 120, references={"confidence": 0.55}),
        *BINS,
    ],
    "facts": [share("exact_match", 0.31, 100, level="KM")],
    "gsm8k": [share("exact_match", 0.02, 200, level="KA")],
    "blimp": [share("acc", 0.66, 1000)],
}
RESULTS = {
    "format": 3,
    "step": 300,
    "tasks": {task: metrics_tree(metrics) for task, metrics in TASKS.items()},
    "contamination": {
        "arc_easy": {
            "words": 11,
            "questions": 570,
            "contaminated": 70,
            "unchecked": 12,
            "clean": metrics_tree([share("acc", 0.388, 500)]),
            "evidence": [
                {"key": "a", "span": "the boiling point of water", "share": 0.4, "document": "faq.txt", "source": "s"}
            ],
        },
        "gsm8k": {"words": 13, "questions": 200, "contaminated": 0, "unchecked": 0, "clean": {}, "evidence": []},
    },
    "profile": {
        "reasoning": {"value": 0.21, "interval": [0.16, 0.27], "n": 770, "tasks": ["arc_easy"], "ours": False},
        "dialogue": {"value": 0.4, "interval": [0.1, 0.7], "n": 10, "tasks": ["talk"], "ours": True},
    },
}


def difference(task: str, value: float, p: float) -> PairedDifference:
    return PairedDifference(
        task=task,
        metric="acc",
        runs=(0, 1),
        value=value,
        interval=(value - 0.02, value + 0.02),
        p_value=p,
        p_adjusted=p,
        test="McNemar, exact",
        n=500,
        unit=SHARE,
    )


CHANGE = Change(
    "first",
    200,
    {("arc_easy", "acc"): difference("arc_easy", 0.034, 0.01), ("blimp", "acc"): difference("blimp", -0.004, 0.7)},
)
ITEMS = [
    {"task": "arc_easy", "key": f"{n}", "group": "long", "prompt": f"Question {n}?", "prediction": "<b>no</b>",
     "reference": "yes", "scores": {"acc": float(n > 2)}}
    for n in range(6)
]  # fmt: skip


@pytest.fixture
def view(run: Path) -> RunView:
    write_sealed(run / "evaluation/results.json", RESULTS)
    (run / "evaluation/items.jsonl").write_bytes(sealed_lines(ITEMS))
    return read_run(run)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_every_task_stands_in_the_headline_table_with_interval_change_and_clean_score(view: RunView) -> None:
    page = text_of(render(view, change=CHANGE))
    assert "41.2 % (36.2 % to 46.2 %) 570 questions +3.4 points 38.8 % (n = 500)" in page
    assert "66.0 % (61.0 % to 71.0 %) 1000 questions (−0.4 points) –" in page  # chance explains it
    assert "2.0 % (0.0 % to 7.0 %) 200 questions – all clean" in page
    assert "change since first, step 200" in page


def test_abilities_levels_and_reliability_are_drawn(view: RunView) -> None:
    page = render(view)
    for name in ("Abilities, score above chance", "Knowledge by level, KoLA", "arc_easy: reliability diagram"):
        assert f'aria-label="{name}' in page
    assert "KM memorisation" in page
    assert "a smoke test, not a benchmark" in page
    drawn = page[page.index('aria-label="arc_easy: reliability') :]
    assert drawn[: drawn.index("</svg>")].count("<circle") == len(BINS)


def test_labels_of_estimates_never_leave_the_drawing() -> None:
    labels = ("natural language inference (20 items)", "qa")
    page = str(forest_figure("Abilities", "", [Estimate(label, 0.2, None, "") for label in labels], ends=("0", "1")))
    drawn = [(float(place), text) for place, text in re.findall(r'<text[^>]*x="([\d.]+)"[^>]*>([^<]+)<', page)]
    found = [(place, text) for place, text in drawn if text in labels]
    assert len(found) == 4  # wide, and for a phone
    assert all(place == 0 or place >= 6 * len(text) for place, text in found)


def test_contamination_names_what_was_seen_and_where(view: RunView) -> None:
    page = text_of(render(view))
    assert "arc_easy 70 of 570 12 11 words “the boiling point of water” in faq.txt" in page
    assert "1 task without a question that was seen" in page
    assert "gsm8k 0 of 200" in page


def test_a_task_whose_questions_are_too_short_is_not_called_clean(run: Path) -> None:
    short = {"arc_easy": {"questions": 10, "contaminated": 0, "unchecked": 10, "words": 8}}
    write_sealed(run / "evaluation/results.json", {**RESULTS, "contamination": short})
    page = text_of(render(read_run(run)))
    assert "not checked" in page
    assert "all clean" not in page


def test_the_worst_items_come_first_and_perfect_ones_never(view: RunView) -> None:
    page = render(view)
    section = page[page.index('id="worst-items"') :]
    shown = re.findall(r"Question (\d)\?", section[: section.index("</section>")])
    assert shown == ["0", "1", "2"]
    assert "&lt;b&gt;no&lt;/b&gt;" in section


def test_where_nothing_is_right_the_worst_items_are_shown_all_the_same(run: Path) -> None:
    wrong = [{**item, "scores": {"acc": 0.0}} for item in ITEMS]
    write_sealed(run / "evaluation/results.json", RESULTS)
    (run / "evaluation/items.jsonl").write_bytes(sealed_lines(wrong))
    assert "Question 0?" in render(read_run(run))


def test_key_figures_and_console_of_many_tasks_stay_short(run: Path) -> None:
    def smoke(name: str) -> Metric:
        return Metric(name, 0.2, (0.1, 0.4), 10, unit=SHARE, note="10 items of our own: a smoke test, not a benchmark")

    tasks = {f"own_{n}": metrics_tree([smoke("rougeL")]) for n in range(20)}
    tasks["arc_easy"] = metrics_tree([Metric("acc", 0.25, (0.2, 0.3), 570, unit=SHARE, references={"chance": 0.25})])
    results = {**RESULTS, "tasks": tasks}
    write_sealed(run / "evaluation/results.json", results)
    names = [figure.name for figure in key_figures(read_run(run))]
    assert "Arc_easy acc" in names
    assert not any(name.startswith("Own_") for name in names)
    head, first, *_, last, note = evaluation_text(results).splitlines()
    assert head.split() == ["task", "metric", "value", "95", "%", "interval", "over", "beside"]
    assert first.split() == [
        "own_0",
        "rougeL",
        "20.0",
        "%",
        "10.0",
        "%",
        "to",
        "40.0",
        "%",
        "10",
        "items",
        "smoke",
        "test",
    ]
    assert last.endswith("570 items  chance 25.0 %")
    assert note.startswith("A smoke test")


def test_whatever_stands_in_these_files_there_is_a_page(run: Path) -> None:
    strange = {
        "contamination": {"x": 3, "y": {"evidence": [7], "clean": [1]}},
        "profile": {"a": None, "b": {"value": "nan"}},
    }
    write_sealed(run / "evaluation/results.json", {**RESULTS, **strange})
    (run / "evaluation/items.jsonl").write_bytes(sealed_lines([{"scores": {"acc": "high"}}, {"task": 1}]) + b"x")
    view = read_run(run)
    assert "Evaluation" in render(view)
    assert any("items.jsonl" in line for line in view.missing)


def test_an_evaluation_without_questions_has_no_such_figures() -> None:
    view = EvaluationView({}, {}, ())
    assert (view.abilities, view.levels(), view.contamination, view.step) == ([], {}, {}, None)
