"""Scores files of predictions against files of references, and annotated summaries against their pyramid."""

from __future__ import annotations

import dataclasses
import inspect
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.metric import Metric
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.pyramid import Agreement, PyramidScore, agreement, annotate, pyramid_score
from ropewalk.evaluate.metrics.pyramid_files import read_annotation, write_annotation
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.metrics.system_tests import (
    SystemTest,
    approximate_randomization,
    paired_bootstrap,
    statistics_tables,
)
from ropewalk.evaluate.question_task import Item, Question


@dataclass(frozen=True, kw_only=True, slots=True)
class FileScore:
    """One metric of a file of predictions, and of a second one on the same references."""

    a: Metric
    b: Metric | None = None
    test: SystemTest | None = None

    def tree(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotatedScore:
    """The pyramid score of one `.pan` file, by people and by program."""

    file: str
    manual: PyramidScore
    automatic: PyramidScore


def score_files(
    metrics: Sequence[str],
    *,
    predictions: Path,
    references: Sequence[Path] = (),
    predictions_b: Path | None = None,
    options: Sequence[str] = (),
    pyramid: Path | None = None,
    test: Literal["randomization", "bootstrap"] = "randomization",
    seed: int = 0,
) -> list[FileScore]:
    """Scores each line of `predictions` against the same line of each of `references`.

    Files ending with .jsonl hold one JSON string per line, others plain lines. `options` are the metrics' own, as
    `bleu.tokenize=zh`. With `predictions_b`, both systems are measured and the difference tested.
    """
    if not metrics:
        raise UserError("name a metric or several, such as bleu,chrf")
    chosen = [_metric(name, _options(name, options, metrics)) for name in metrics]
    questions = _questions(references, pyramid, len(_lines(predictions)))
    items_a = _items(questions, predictions)
    items_b = _items(questions, predictions_b) if predictions_b else []
    return [_score(metric, items_a, items_b, test=test, seed=seed) for metric in chosen]


def score_annotations(files: Sequence[Path], *, output: Path | None = None) -> tuple[list[AnnotatedScore], Agreement]:
    """Pyramid scores of annotated summaries (.pan), by people and by program, and how well the two agree. `output` is
    a folder for the program's annotations, which DUCView opens."""
    manual = [read_annotation(file) for file in files]
    automatic = [annotate(each.pyramid, "\n".join(each.text)) for each in manual]
    if output:
        for file, annotation in zip(files, automatic, strict=True):
            write_annotation(annotation, output / file.name)
    scores = [
        AnnotatedScore(file=str(file), manual=pyramid_score(people), automatic=pyramid_score(program))
        for file, people, program in zip(files, manual, automatic, strict=True)
    ]
    return scores, agreement(list(zip(manual, automatic, strict=True)))


def _score(
    metric: ItemMetric,
    items_a: list[Item],
    items_b: list[Item],
    *,
    test: Literal["randomization", "bootstrap"],
    seed: int,
) -> FileScore:
    a = _measured(metric, items_a, seed)
    if not items_b:
        return FileScore(a=a)
    run = approximate_randomization if test == "randomization" else paired_bootstrap
    found = run(*statistics_tables(metric, items_a, items_b), seed=seed)
    return FileScore(a=a, b=_measured(metric, items_b, seed), test=found)


def _measured(metric: ItemMetric, items: list[Item], seed: int) -> Metric:
    found = measured(metric, items, seed=seed)
    if not found:
        raise UserError(f"{metric.name} does not apply to any of the {len(items)} lines")
    return found[0]


def _metric(name: str, options: Mapping[str, Any]) -> ItemMetric:
    made = METRICS[name].load()
    known = [each.name for each in inspect.signature(made).parameters.values() if each.kind == each.KEYWORD_ONLY]
    unknown = [each for each in options if each not in known]
    if unknown:
        raise UserError(f"{name}: no option `{unknown[0]}`; it has {', '.join(known) or 'none'}")
    try:
        metric = made(**options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(f"{name}: cannot be made with {given}: {error}") from error
    if not isinstance(metric, ItemMetric):
        raise UserError(f"`{name}` is no metric of items: it makes a {type(metric).__name__}")
    return metric


def _options(name: str, options: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """The options of metric `name`, out of `METRIC.OPTION=VALUE`."""
    found: dict[str, Any] = {}
    for each in options:
        where, equals, value = each.partition("=")
        metric, _, option = where.rpartition(".")
        if not (equals and metric and option):
            raise UserError(f"option `{each}`: write METRIC.OPTION=VALUE, such as bleu.tokenize=zh")
        if metric not in metrics:
            raise UserError(f"option `{each}`: `{metric}` is not among the metrics: {', '.join(metrics)}")
        if metric == name:
            found[option] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _questions(references: Sequence[Path], pyramid: Path | None, count: int) -> list[Question]:
    columns = [_lines(path) for path in references]
    for path, column in zip(references, columns, strict=True):
        if len(column) != count:
            raise DataError(f"{path}: {len(column)} lines for {count} predictions; each line answers the same one")
    if not columns and pyramid is None:
        raise UserError("name the references: --references FILE[,FILE], or --pyramid FILE.pyr")
    document = {"pyramid": str(pyramid)} if pyramid else {}
    rows = zip(*columns, strict=True) if columns else [()] * count
    return [Question(prompt=f"line {at}", references=row, document=document) for at, row in enumerate(rows, 1)]


def _items(questions: Sequence[Question], predictions: Path) -> list[Item]:
    lines = _lines(predictions)
    if len(lines) != len(questions):
        raise DataError(f"{predictions}: {len(lines)} lines for {len(questions)} questions; the files must match")
    return [Item(question=each, predictions=(line,)) for each, line in zip(questions, lines, strict=True)]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file") from error
    # Only line feeds end a line: texts may hold other line separators of Unicode.
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise DataError(f"{path}: empty; one text per line is expected")
    return [_string(line, path, at) for at, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _string(line: str, path: Path, at: int) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{at}: not JSON: {error}") from error
    if not isinstance(value, str):
        raise DataError(f"{path}:{at}: a {type(value).__name__}; each line of a .jsonl file is one JSON string")
    return value
