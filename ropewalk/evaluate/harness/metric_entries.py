"""Metrics that a task file names: an entry of `metric_list` becomes an `ItemMetric`.

`metric` is a name of the table `METRICS` (evaluate/metrics/metric_table.py) or `module:attr`; other keys of the entry
are its keyword arguments. `metric: !function` and `process_results: !function` of lm-eval's tasks work in trusted
folders.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.base.errors import ConfigError, DataError

from ..metrics.item_metric import Floats, ItemMetric
from ..metrics.metric_table import METRICS
from .doc_fields import DocFields
from .task_file import FunctionName, TaskFile

if TYPE_CHECKING:
    from ..question_task import Item

DEFAULTS = {
    "generate_until": ("exact_match",),
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}
"""Metrics of a task that names none, by output type."""
AGGREGATIONS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
    "f1": "f1",
    "mcc": "matthews_corrcoef",
    "bleu": "bleu",
    "chrf": "chrf",
    "chrf++": "chrf++",
    "ter": "ter",
    "brier_score": "brier_score",
}
"""How lm-eval aggregates a metric where not by the mean: ours know it themselves."""
_ABOUT = ("metric", "aggregation", "higher_is_better", "hf_evaluate", "weight_by_size")
"""Keys of an entry that are no settings of the metric."""


def metrics_of(file: TaskFile, fields: DocFields, *, delimiter: str) -> list[ItemMetric]:
    """The metrics of a task's file, the headline first; `delimiter` begins each of its choices."""
    given = file.get("metric_list")
    if given is None:
        names = DEFAULTS[file.get("output_type", "generate_until")]
        given = [{"metric": name} for name in names]
    if not given:
        raise file.wrong("metric_list", "is empty", "name at least one metric")
    found = [_metric(file, fields, entry, delimiter) for entry in given]
    if len({metric.name for metric in found}) < len(found):
        raise file.wrong("metric_list", "names a metric twice")
    return found


def _metric(file: TaskFile, fields: DocFields, entry: Any, delimiter: str) -> ItemMetric:
    if not isinstance(entry, dict) or "metric" not in entry:
        raise file.wrong("metric_list", f"has an entry without `metric`: {entry!r}")
    name, settings = entry["metric"], {key: value for key, value in entry.items() if key not in _ABOUT}
    if processed := file.get("process_results"):
        function = fields.function(processed, "process_results")
        return ProcessedResult(str(name), function, entry.get("aggregation", "mean"), _lower(entry))
    if isinstance(name, FunctionName):
        return FunctionMetric(
            name.name.rpartition(".")[2], fields.function(name, "metric_list"), settings, _lower(entry)
        )
    _check_aggregation(file, str(name), entry)
    try:
        target = METRICS.find(str(name), [file.path.parent]).load()
    except ConfigError as error:
        (problem,) = error.problems
        raise file.wrong("metric_list", f": {problem.what}", problem.remedy) from None
    try:
        takes = inspect.signature(target).parameters
        # Lengths of choices do not count the delimiter before them.
        if "delimiter" in takes and "delimiter" not in settings:
            settings["delimiter"] = delimiter
        metric = target(**settings)
    except TypeError as error:
        raise file.wrong("metric_list", f"gives `{name}` settings that it does not take: {error}") from None
    if not isinstance(metric, ItemMetric):
        raise file.wrong("metric_list", f'names "{name}", which is no metric of items', "derive it from `ItemMetric`")
    return metric


def _check_aggregation(file: TaskFile, name: str, entry: dict[str, Any]) -> None:
    given, own = entry.get("aggregation", "mean"), AGGREGATIONS.get(name, "mean")
    if isinstance(given, FunctionName):
        remedy = "write the metric as an `ItemMetric`, or run the task in lm-eval"
        raise file.wrong("metric_list", f"aggregates `{name}` by a function", remedy)
    if "aggregation" in entry and given not in (own, "nanmean"):
        raise file.wrong("metric_list", f'aggregates `{name}` by "{given}"', f'it is aggregated by "{own}"')


def _lower(entry: dict[str, Any]) -> bool:
    return entry.get("higher_is_better") is False


class FunctionMetric(ItemMetric):
    """A user's function of references and predictions, as lm-eval calls it; the mean over items."""

    def __init__(self, name: str, function: Callable[..., Any], settings: dict[str, Any], lower: bool) -> None:
        self.name, self._function, self._settings = name, function, settings
        self.better = "lower" if lower else "higher"
        self.signature = f"function:{name}"

    def statistics(self, item: Item) -> tuple[float, float]:
        found = self._function(
            references=list(item.question.references), predictions=list(item.predictions[:1]), **self._settings
        )
        if isinstance(found, dict):
            found = found.get(self.name)
        if isinstance(found, bool | int | float | np.number):
            return float(found), 1.0
        raise DataError(f"the metric function {self.name} returned {found!r}, not a number")


class ProcessedResult(ItemMetric):
    """One value of a task's `process_results`."""

    def __init__(self, name: str, function: Callable[..., Any], aggregation: Any, lower: bool) -> None:
        if aggregation not in ("mean", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte"):
            raise DataError(f"`{name}` of process_results is aggregated by {aggregation!r}; run the task in lm-eval")
        self.name, self._function, self._aggregation = name, function, aggregation
        self.better = "lower" if lower else "higher"
        self.signature = f"process_results|aggregation:{aggregation}"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        answers: list[Any] = [(each.log_probability, each.greedy) for each in item.likelihoods]
        found = self._function(dict(item.question.document), answers or list(item.predictions)).get(self.name)
        if found is None or (self._aggregation == "nanmean" and math.isnan(found)):
            return None
        if isinstance(found, Sequence):
            return float(found[0]), float(found[1])
        return float(found), 1.0

    def value(self, sums_K: Floats) -> Floats:
        mean: Floats = sums_K[..., 0] / sums_K[..., 1]
        if self._aggregation in ("perplexity", "weighted_perplexity"):
            return np.exp(-mean)
        return -mean / math.log(2) if self._aggregation == "bits_per_byte" else mean
