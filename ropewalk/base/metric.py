"""What an evaluation task measures, and how files keep it: `tasks`, by the name of the task and of the metric.

Results, summary, report, comparison and console show the metrics that there are, and know no task. Reading is lenient,
for pages that show damaged runs: what has no value is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .progress import amount, counted

Better = Literal["higher", "lower", "neither"]
_BETTER: tuple[Better, ...] = get_args(Better)
SHARE = "share"
"""The unit of proportions, which are shown in percent."""
_SIZES = ("B", "tokens")
"""Units that are shown with a decimal prefix."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured value."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    """95 % confidence interval."""
    n: int | None = None
    of: str = "item"
    """What `n` counts, in the singular."""
    unit: str = ""
    better: Better = "higher"
    """`neither` is for sizes: they are shown and not compared."""
    group: str = ""
    """The part of the items that was measured, such as a domain; empty for all of them."""
    references: Mapping[str, float] = field(default_factory=dict)
    """The same metric of others on the same items, by their names: compressors, the true continuations, chance."""
    note: str = ""
    """What the value means, in a few words. A metric with a note is a key figure of the report."""

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    def text(self, value: float | None = None, *, digits: int = 3) -> str:
        """The value, or another one in the same unit, for people."""
        value = self.value if value is None else value
        if self.unit == SHARE:
            return f"{100 * value:.1f} %"
        if self.unit in _SIZES:
            return amount(value, self.unit)
        return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.3g}"


Tasks = Mapping[str, Sequence[Metric]]
"""What was measured, by task."""


def titled(task: str, metric: Metric) -> str:
    """A metric of a task for people: "held-out bits per byte"."""
    return f"{task} {metric.label}"


def headline(tasks: Tasks) -> tuple[str, Metric] | None:
    """The first metric with its task: one number for a whole evaluation."""
    return next(((task, metric) for task, metrics in tasks.items() for metric in metrics), None)


def task_line(task: str, metrics: Sequence[Metric]) -> str:
    """The key figures of a task in one line."""
    first, *others = [metric for metric in metrics if not metric.group]
    measured = f" ({counted(first.n, first.of)})" if first.n is not None else ""
    beside = [f"{name} {first.text(value)}" for name, value in first.references.items()]
    rest = [f"{metric.label} {metric.text()}" for metric in others if metric.note]
    return ", ".join([f"{first.text()} {titled(task, first)}{measured}", *beside, *rest])


def metrics_tree(metrics: Iterable[Metric]) -> dict[str, Any]:
    """The metrics of one task as files keep them: by name, each with its `groups`."""
    tree: dict[str, Any] = {}
    for metric in metrics:
        kept = {key: value for key, value in dataclasses.asdict(metric).items() if key not in ("name", "group")}
        kept = {key: value for key, value in kept.items() if value not in (None, "", {})}
        if metric.group:
            shared = ("of", "unit", "better", "note")
            part = {key: value for key, value in kept.items() if key not in shared}
            tree[metric.name].setdefault("groups", {})[metric.group] = part
        else:
            tree[metric.name] = kept
    return tree


def read_tasks(tree: Mapping[str, Any]) -> dict[str, list[Metric]]:
    """What was measured, from the results or the summary of a run in any format."""
    tasks = _mapping(_mapping(upgrade_results(tree)).get("tasks"))
    return {task: list(_metrics(_mapping(metrics))) for task, metrics in tasks.items()}


def _metrics(tree: Mapping[str, Any]) -> Iterable[Metric]:
    for name, values in tree.items():
        whole = _metric(name, "", _mapping(values))
        if whole:
            yield whole
            for group, part in _mapping(_mapping(values).get("groups")).items():
                found = _metric(name, group, {**_mapping(values), "interval": None, "references": {}, **_mapping(part)})
                if found:
                    yield found


def _metric(name: str, group: str, values: Mapping[str, Any]) -> Metric | None:
    value, interval, n = _finite(values.get("value")), values.get("interval"), values.get("n")
    if value is None:
        return None
    ends = [_finite(end) for end in interval] if isinstance(interval, list | tuple) else []
    better = values.get("better")
    return Metric(
        name,
        value,
        interval=(ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None,
        n=n if isinstance(n, int) else None,
        of=str(values.get("of", "item")),
        unit=str(values.get("unit", "")),
        better=next((each for each in _BETTER if each == better), "neither"),
        group=group,
        references={
            key: found
            for key, other in _mapping(values.get("references")).items()
            if (found := _finite(other)) is not None
        },
        note=str(values.get("note", "")),
    )


_DOCUMENT, _DOCUMENTS = "whole document", "whole documents"
_TRUE = "true continuations"
_OLD: tuple[tuple[str, Metric, str], ...] = (
    (
        "held-out",
        Metric("bits_per_byte", 0, of=_DOCUMENT, unit="bits", better="lower", note="whole documents"),
        "documents",
    ),
    ("held-out", Metric("bytes", 0, of=_DOCUMENT, unit="B", better="neither"), "documents"),
    ("held-out", Metric("loss", 0, of="token", unit="nats per token", better="lower"), "tokens"),
    ("held-out", Metric("perplexity", 0, of="token", better="lower"), "tokens"),
    ("held-out", Metric("accuracy", 0, of="token", unit=SHARE, note="next token is the first choice"), "tokens"),
    ("completions", Metric("parse_rate", 0, of="code completion", unit=SHARE, note="accepted as Python"), ""),
)
"""Task, metric and the key of its `n`, of the results before format 3, which had no tasks. Their keys, such as
`bits_per_byte`, stay in `summary.json` and in what verbs return."""
_OLD_REFERENCES = {
    "bits_per_byte": {"zlib": "zlib_bits_per_byte", "xz": "xz_bits_per_byte"},
    "parse_rate": {_TRUE: "parse_rate_reference"},
}


def upgrade_results(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Results of format 1 or 2, or a summary without tasks, as format 3 has them; others as they are."""
    if "tasks" in tree:
        return dict(tree)
    tasks: dict[str, list[Metric]] = {}
    for task, metric, count in _OLD:
        intervals = _mapping(tree.get("intervals"))
        n = tree.get("evaluated_tokens", tree.get(count)) if count == "tokens" else tree.get(count)
        whole = {**_old_values(tree, metric), "interval": intervals.get(metric.name), "n": n}
        parts = {
            group: _old_values(_mapping(values), metric) for group, values in _mapping(tree.get("domains")).items()
        }
        described = {key: getattr(metric, key) for key in ("of", "unit", "better", "note")}
        found = list(_metrics({metric.name: {**described, **whole, "groups": parts}}))
        tasks.setdefault(task, []).extend(found)
    gone = {"documents", "tokens", "intervals", "domains", *(metric.name for _, metric, _ in _OLD)}
    gone |= {key for references in _OLD_REFERENCES.values() for key in references.values()}
    kept = {key: value for key, value in tree.items() if key not in gone}
    return {**kept, "tasks": {task: metrics_tree(metrics) for task, metrics in tasks.items() if metrics}}


def _old_values(values: Mapping[str, Any], metric: Metric) -> dict[str, Any]:
    references = _OLD_REFERENCES.get(metric.name, {})
    return {
        "value": values.get(metric.name),
        "references": {name: values[key] for name, key in references.items() if key in values},
        "n": None,
    }


def flat_results(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the keys of the formats before 3 added, for the built-in tasks that were run: for programs that read
    `summary.json` or what `flow.evaluate` returns."""
    tasks = read_tasks(tree)
    flat: dict[str, Any] = {}
    domains: dict[str, dict[str, float]] = {}
    intervals: dict[str, list[float]] = {}
    for task, old, count in _OLD:
        for metric in (found for found in tasks.get(task, ()) if found.name == old.name):
            into = domains.setdefault(metric.group, {}) if metric.group else flat
            into[metric.name] = metric.value
            references = _OLD_REFERENCES.get(metric.name, {})
            into.update((references[name], value) for name, value in metric.references.items() if name in references)
            if not metric.group and count:
                flat[count] = metric.n
            if not metric.group and metric.interval and task == "held-out":
                intervals[metric.name] = list(metric.interval)
    if "bits_per_byte" in flat:
        nothing = dict.fromkeys(("parse_rate", "parse_rate_reference"))
        flat = {**nothing, **flat, "domains": domains, "intervals": intervals or None}
    return {**flat, **tree}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> float | None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if sound else None
