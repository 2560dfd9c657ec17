"""Rules that remove much of a source, in words: what they ask for, what they met, and the command that tries another
threshold.

A rule is told when it removes more than MOST_SHARE of the documents or the bytes of a source that came to the rules.
Duplicates are told apart from rules, by their own share of what the rules left.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Mask, Rows
from .config import Filter
from .rules import Rule, rules

MOST_SHARE = 1 / 3

RECIPE = "RECIPE"
"""Stands in a command for the recipe, which prepared data does not know: several recipes may share it."""

_WHAT_IF = "ropewalk prepare what-if"
_KEPT = 0.9
"""The threshold that is suggested would keep this share of what a rule removed."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Documents that the rules have removed, one entry each."""

    rows: Rows
    rules: npt.NDArray[np.object_]
    values: npt.NDArray[np.float64]
    """What was measured; NaN where that is no number."""


def severe_rules(
    removed: Removed, settings: Filter, *, source: Rows, names: Sequence[str], sizes: Rows, before: Mask
) -> Iterator[str]:
    """A sentence for each source and rule that removes much of it; `before` are the documents that came to the
    rules."""
    known = {rule.name: rule for rule in rules(settings)}
    for number, name in enumerate(names):
        mine = before & (source == number)
        arrived, arrived_bytes = int(mine.sum()), int(sizes[mine].sum())
        here = source[removed.rows] == number
        for rule in sorted(set(removed.rules[here].tolist())):
            gone = here & (removed.rules == rule)
            documents, size = int(gone.sum()), int(sizes[removed.rows[gone]].sum())
            if documents > MOST_SHARE * arrived or size > MOST_SHARE * arrived_bytes:
                shares = f"{documents:,} of {arrived:,} documents and {size / max(1, arrived_bytes):.0%} of the bytes"
                values = removed.values[gone]
                told = _measured(known[rule], values) + _trial(known[rule], settings, values)
                yield f'source "{name}": rule {rule} removed {shares}{told}'


def severe_duplicates(
    stage: str, remedy: str, *, gone: Rows, source: Rows, names: Sequence[str], sizes: Rows, before: Mask
) -> Iterator[str]:
    """A sentence for each source of which much is there already; `before` are the documents that came to the stage."""
    for number, name in enumerate(names):
        mine = before & (source == number)
        here = gone[source[gone] == number]
        if len(here) > MOST_SHARE * mine.sum() or sizes[here].sum() > MOST_SHARE * sizes[mine].sum():
            share = sizes[here].sum() / max(1, int(sizes[mine].sum()))
            yield (
                f'source "{name}": {len(here):,} of {int(mine.sum()):,} documents and {share:.0%} of the bytes were '
                f"removed as {stage}; {remedy}"
            )


def addressed(line: str, recipe: str) -> str:
    """The line with `recipe`, the words that name it in a command, where it stands for one; as it is without."""
    return line.replace(f"{_WHAT_IF} {RECIPE} ", f"{_WHAT_IF} {recipe} ") if recipe else line


def _measured(rule: Rule, values: npt.NDArray[np.float64]) -> str:
    if np.isnan(values).all():
        return ""
    bound = "at least" if rule.side == "least" else "at most"
    return f", in the middle {_short(float(np.median(values)))} where it asks for {bound} {_short(rule.threshold)}"


def _trial(rule: Rule, settings: Filter, values: npt.NDArray[np.float64]) -> str:
    """The command that shows what another threshold would keep."""
    value = _other(rule, settings, values)
    if value is None:
        return f"; look at the lists of `prepare.filter.{rule.name}`"
    change = shlex.quote(f"filter.{rule.name}={value}")
    return f"; `{_WHAT_IF} {RECIPE} {change}` shows what {value if value not in ('false', '[]') else 'none'} would keep"


def _other(rule: Rule, settings: Filter, values: npt.NDArray[np.float64]) -> str | None:
    """A setting of the rule that would keep most of what it removed, as TOML; None where lists decide."""
    present: object = settings
    for key in rule.name.split("."):
        present = getattr(present, key)
    if isinstance(present, bool):
        return "false"
    if rule.name == "language.keep":
        return "[]"
    if not isinstance(present, int | float):
        return None
    side = 1 - _KEPT if rule.side == "least" else _KEPT
    bound = float(np.quantile(values, side, method="lower" if rule.side == "least" else "higher"))
    if isinstance(present, int):
        return str(math.floor(bound) if rule.side == "least" else math.ceil(bound))
    # Two digits, rounded towards what keeps more.
    digits = 10.0 ** (math.floor(math.log10(bound)) - 1) if bound > 0 else 1.0
    rounded = (math.floor(bound / digits) if rule.side == "least" else math.ceil(bound / digits)) * digits
    return repr(float(f"{rounded:.12g}"))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
