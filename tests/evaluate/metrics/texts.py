"""Answered questions out of texts, and the reference values that a checkout may have beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.question_task import Item, Question

DATA = Path(__file__).parents[4] / "shared" / "data"


def answered(prediction: str, *references: str, **document: Any) -> Item:
    question = Question(prompt="?", references=references, document=document)
    return Item(question=question, predictions=(prediction,))


def answered_lines(predictions: Sequence[str], streams: Sequence[Sequence[str]]) -> list[Item]:
    """Items of a corpus with streams of references, as sacrebleu takes them."""
    rows = zip(predictions, zip(*streams, strict=True), strict=True)
    return [answered(text, *references) for text, references in rows]


def corpus_value(metric: ItemMetric, items: Sequence[Item]) -> float:
    metric = metric.for_items(items)
    return float(metric.value(np.sum([metric.statistics(item) for item in items], axis=0)))


def reference_values(name: str) -> Any:
    path = DATA / "refs" / name
    if not path.exists():
        pytest.skip(f"needs {name}, which is not part of the repository")
    return json.loads(path.read_text(encoding="utf-8"))
