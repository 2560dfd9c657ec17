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
SIGNIFICANT = 0.05
"""A p-value below this shows a difference."""
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
    signature: str = ""
    """How it was computed, such as `nrefs:1|case:mixed|tok:13a|version:2.6.0`. Equal signatures may be compared."""
    level: str = ""
    """KoLA's level of the task whose score this is: KM, KU, KA or KC."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """A metric of one run minus that of another, over the items that both have scored."""

    task: str
    metric: str
    runs: tuple[int, int]
    """Places of the run subtracted from and of the other, among the compared ones: 0 is the first."""
    value: float
    """The second run's value minus the first's: of item scores their means, of documents the ratio of sums."""
    interval: tuple[float, float] | None
    """95 % interval, by a bootstrap of the pairs."""
    p_value: float
    """Two-sided."""
    p_adjusted: float
    """The same by Holm, for all differences of one comparison."""
    test: str
    n: int
    """Shared items."""
    of: str = "item"
    unit: str = ""
    better: Better = "higher"

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the adjusted p-value is below 0.05, else `not shown`."""
        if self.p_adjusted >= SIGNIFICANT or self.better == "neither" or not self.value:
            return "not shown"
        return "better" if (self.value > 0) == (self.better == "higher") else "worse"

    def text(self, value: float) -> str:
        """A difference in the unit of the metric, for people; of shares in percentage points."""
        return f"{100 * value:+.1f} points" if self.unit == SHARE else f"{value:+.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """Scores of several models that were computed from one another."""

    title: str
    rows: Mapping[str, Mapping[str, float]]
    """By model and column."""
    details: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Further columns, for a page and for JSON."""
    notes: tuple[str, ...] = ()

    def cells(self, *, details: bool = False) -> list[tuple[str, ...]]:
        """As text, with a head."""
        table = self.details if details else self.rows
        columns = list(next(iter(table.values()), {}))
        rows = [(name, *(f"{row[column]:.2f}" for column in columns)) for name, row in table.items()]
        return [("model", *columns), *rows]


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
            shared = ("of", "unit", "better", "note", "signature", "level")
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
        signature=str(values.get("signature", "")),
        level=str(values.get("level", "")),
    )


_WHOLE = "whole documents"
_DOCUMENTS, _TOKENS = {"of": "whole document"}, {"of": "token"}
_SHARE = {"unit": SHARE, "better": "higher"}
_OLD: dict[str, tuple[str, str, dict[str, str]]] = {
    "bits_per_byte": ("held-out", "documents", {**_DOCUMENTS, "unit": "bits", "better": "lower", "note": _WHOLE}),
    "bytes": ("held-out", "documents", {**_DOCUMENTS, "unit": "B", "better": "neither"}),
    "loss": ("held-out", "tokens", {**_TOKENS, "unit": "nats per token", "better": "lower"}),
    "perplexity": ("held-out", "tokens", {**_TOKENS, "better": "lower"}),
    "accuracy": ("held-out", "tokens", {**_TOKENS, **_SHARE, "note": "next token is the first choice"}),
    "parse_rate": ("completions", "", {"of": "code completion", **_SHARE, "note": "accepted as Python"}),
}
"""Keys of results before format 3, which had no tasks: task, key of `n`, description. These keys stay in `summary.json`
and in what `flow.evaluate` returns."""
_OLD_REFERENCES = {
    "bits_per_byte": {"zlib": "zlib_bits_per_byte", "xz": "xz_bits_per_byte"},
    "parse_rate": {"true continuations": "parse_rate_reference"},
}


def upgrade_results(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Results of format 1 or 2, or a summary without tasks, as format 3 has them; others as they are."""
    if "tasks" in tree:
        return dict(tree)
    tasks: dict[str, dict[str, Any]] = {}
    for name, (task, count, described) in _OLD.items():
        groups = {group: _old_values(name, _mapping(part)) for group, part in _mapping(tree.get("domains")).items()}
        whole = {
            **_old_values(name, tree),
            "interval": _mapping(tree.get("intervals")).get(name),
            # In a summary `tokens` are those of training.
            "n": tree.get("evaluated_tokens" if count == "tokens" and "evaluated_tokens" in tree else count),
        }
        tasks.setdefault(task, {})[name] = {**described, **whole, "groups": groups}
    found = {task: metrics_tree(_metrics(metrics)) for task, metrics in tasks.items()}
    kept = {key: value for key, value in tree.items() if key in ("format", "step") or key.endswith("_checksum")}
    return {**kept, "tasks": {task: metrics for task, metrics in found.items() if metrics}}


def _old_values(name: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    references = _OLD_REFERENCES.get(name, {})
    return {
        "value": tree.get(name),
        "references": {other: tree[key] for other, key in references.items() if key in tree},
        "n": None,
    }


def flat_results(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the keys of the formats before 3 added, for programs that read `summary.json` or what
    `flow.evaluate` returns."""
    tree = upgrade_results(tree)
    flat: dict[str, Any] = {}
    domains: dict[str, dict[str, float]] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for task, metrics in read_tasks(tree).items():
        for metric in metrics:
            of, count, _ = _OLD.get(metric.name, ("", "", {}))
            if of != task:
                continue
            into = domains.setdefault(metric.group, {}) if metric.group else flat
            references = _OLD_REFERENCES.get(metric.name, {})
            into[metric.name] = metric.value
            into.update((references[name], value) for name, value in metric.references.items() if name in references)
            if count and not metric.group:
                flat[count] = metric.n
                intervals.update({metric.name: metric.interval} if metric.interval else {})
    if "bits_per_byte" in flat:
        nothing = dict.fromkeys(("parse_rate", "parse_rate_reference"))
        lists = {name: list(interval) for name, interval in intervals.items()}
        flat = {**nothing, **flat, "domains": domains, "intervals": lists or None}
    return {**flat, **tree}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> float | None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if sound else None
