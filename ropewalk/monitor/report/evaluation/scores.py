"""The headline of every task in one table: value, interval, change since an earlier run, score on clean questions."""

from __future__ import annotations

from ropewalk.base.metric import Metric, PairedDifference, read_tasks
from ropewalk.base.progress import counted

from ...comparison import metric_text
from ...draw.markup import Markup, element
from ...evaluation_view import Change, EvaluationView
from ...values import finite, mapping, text
from ..page import scrolling, table

_HEADS = ("task", "metric", "value (95 % interval)", "over")


def headline_table(view: EvaluationView, change: Change | None) -> Markup:
    """A row per task."""
    cleaned = view.contamination
    heads = [*_HEADS, *(["change"] if change else []), *(["clean questions"] if cleaned else [])]
    rows = []
    for task, metrics in view.tasks.items():
        if not metrics:
            continue
        first = metrics[0]
        row = [task, first.label, metric_text(first), "–" if first.n is None else counted(first.n, first.of)]
        row += [_change(change.differences.get((task, first.name)))] if change else []
        row += [_clean(view, task, first)] if cleaned else []
        rows.append(row)
    title = element("figcaption", element("strong", "All tasks"), element("span", _since(change), class_="unit"))
    drawn = scrolling(table(heads, rows, numeric=range(2, len(heads))))
    note = "Changes in brackets are not significant (p ≥ 0.05 by Holm)." if change else ""
    return element("figure", title, drawn, element("p", note, class_="note") if note else None)


def contamination_table(view: EvaluationView) -> Markup | None:
    """What of each task stands in the training corpus, with an example."""
    rows: list[tuple[str, ...]] = []
    clean: list[tuple[str, ...]] = []
    for task, found in view.contamination.items():
        tree = mapping(found)
        evidence = tree.get("evidence")
        first = mapping(evidence[0]) if isinstance(evidence, list) and evidence else {}
        where = f"“{text(first.get('span'))}” in {text(first.get('document'))}" if first else "–"
        counts = [finite(tree.get(key)) or 0 for key in ("contaminated", "questions", "unchecked")]
        words = finite(tree.get("words")) or 0
        (rows if counts[0] or first else clean).append(
            (task, f"{counts[0]:,.0f} of {counts[1]:,.0f}", f"{counts[2]:,.0f}", f"{words:.0f} words", where)
        )
    if not (rows or clean):
        return None
    heads = ("task", "seen in training", "too short to tell", "n-grams of", "example")
    note = (
        "A question counts as seen if any of its n-grams stands in a training document of this run. Paraphrases and "
        "translations are not found."
    )
    title = element("figcaption", element("strong", "Contamination"))
    seen = scrolling(table(heads, rows, numeric=(1, 2))) if rows else None
    rest = None
    if clean:
        summary = element("summary", f"{counted(len(clean), 'task')} without a question that was seen")
        rest = element("details", summary, scrolling(table(heads, clean, numeric=(1, 2))))
    return element("figure", title, seen, rest, element("p", note, class_="note"))


def _since(change: Change | None) -> str:
    if change is None:
        return ""
    return f"change since {change.run}" + (f", step {change.step:,.0f}" if change.step is not None else "")


def _change(difference: PairedDifference | None) -> str:
    """The paired difference; in brackets if chance explains it."""
    if difference is None:
        return "–"
    shown = difference.text(difference.value).replace("-", "−")
    return f"({shown})" if difference.verdict == "not shown" else shown


def _clean(view: EvaluationView, task: str, metric: Metric) -> str:
    tree = mapping(view.contamination.get(task))
    if not tree:
        return "–"
    if not finite(tree.get("contaminated")):
        unchecked, questions = finite(tree.get("unchecked")) or 0, finite(tree.get("questions")) or 0
        return "not checked" if questions and unchecked >= questions else "all clean"
    clean = read_tasks({"tasks": {task: tree.get("clean")}}).get(task, ())
    found = next((each for each in clean if each.name == metric.name and not each.group), None)
    return "none is clean" if found is None else f"{found.text()} (n = {found.n:,})" if found.n else found.text()
