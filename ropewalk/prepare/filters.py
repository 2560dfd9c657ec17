"""Rules that remove whole documents: one pass measures them all, then a rule is a comparison on a column.

A rule is named as its setting in `prepare.filter`, so that a row of the ledger says what to change. The first
rule that a document breaks removes it.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .config import Filter
from .documents import Batch, Block, Passed, Removal

STEP = "filter"

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rule:
    """`breaks(measured column, threshold)` removes a document; a document at the threshold stays."""

    name: str
    column: str
    breaks: Callable[[Any, Any], Any]
    threshold: float


def rules(settings: Filter) -> tuple[Rule, ...]:
    """The rules that are switched on, in the order in which they are asked."""
    every = (
        Rule("min_bytes", "bytes", operator.lt, settings.min_bytes),
        Rule("max_bytes", "bytes", operator.gt, settings.max_bytes or np.inf),
        Rule("max_mean_line_length", "mean_line_length", operator.gt, settings.max_mean_line_length or np.inf),
        Rule("min_letter_share", "letter_share", operator.lt, settings.min_letter_share),
        Rule("max_duplicate_line_share", "duplicate_line_share", operator.gt, settings.max_duplicate_line_share),
    )
    return tuple(rule for rule in every if np.isfinite(rule.threshold))


def filter_block(settings: Filter) -> Block:
    """The block that applies `settings`."""
    asked = rules(settings)

    def block(batch: Batch) -> Passed:
        measured = measure(batch["text"].to_pylist())
        undecided = np.ones(batch.num_rows, bool)
        removed: dict[int, Removal] = {}
        names = batch["id"]
        for rule in asked:
            column = measured[rule.column]
            broken = undecided & rule.breaks(column, rule.threshold)
            for row in np.flatnonzero(broken).tolist():
                removed[row] = Removal(names[row].as_py(), STEP, rule.name, float(column[row]), float(rule.threshold))
            undecided &= ~broken
        return Passed(batch.filter(pa.array(undecided)), [removed[row] for row in sorted(removed)])

    return block


def measure(texts: Sequence[str]) -> dict[str, Column]:
    """What the rules compare, one column a measure and one row a text."""
    rows = [(_bytes(text), _mean_line_length(text), _letter_share(text), _duplicate_line_share(text)) for text in texts]
    table = np.array(rows, np.float64).reshape(len(rows), 4)
    names = ("bytes", "mean_line_length", "letter_share", "duplicate_line_share")
    return {name: table[:, index] for index, name in enumerate(names)}


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _mean_line_length(text: str) -> float:
    """Characters a line, line ends not counted; what follows the last line end is a line unless empty."""
    ends = text.count("\n")
    lines = ends + (not text.endswith("\n"))
    return (len(text) - ends) / lines if text else 0.0


def _letter_share(text: str) -> float:
    """Letters (any script) among the characters that are not white space."""
    letters = inked = 0
    for character, count in collections.Counter(text).items():
        if not character.isspace():
            inked += count
            letters += count * character.isalpha()
    return letters / inked if inked else 0.0


def _duplicate_line_share(text: str) -> float:
    """Share of the lines with ink that repeat an earlier one."""
    lines = [line for line in text.split("\n") if line.strip()]
    return (len(lines) - len(set(lines))) / len(lines) if lines else 0.0
