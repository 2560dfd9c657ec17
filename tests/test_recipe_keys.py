"""Every key of a recipe has an effect: a run with another value differs in an event, a file, the plan or a number.

The tables are in tests/wiring/*_rows.py: key, other value, what must differ. A new key needs a row there, or a reason
in tests/wiring/unchanging.py why nothing may differ. `benchmarks/mutate.py` makes keys ineffective to see this fail.
"""

from __future__ import annotations

import random

import pytest

from tests.wiring.rows import Row, keys_of
from tests.wiring.table import ROWS
from tests.wiring.unchanging import ELSEWHERE, UNCHANGING

pytestmark = pytest.mark.xdist_group("pool")

ALONE = [row for row in ROWS if not row.pool]
TENTH = set(random.Random(25).sample([row.key for row in ALONE], len(ROWS) // 10))
"""The rows that every test run takes; the others are slow."""


def marked(row: Row) -> object:
    return pytest.param(row, id=row.key, marks=() if row.key in TENTH else pytest.mark.slow)


def test_every_key_has_a_row_or_a_reason() -> None:
    keys = {key for key, _ in keys_of() if not key.startswith(tuple(ELSEWHERE))}
    rows, reasons = [row.name for row in ROWS], UNCHANGING
    assert keys - set(rows) - set(reasons) == set(), "add a row to tests/wiring"
    assert (set(rows) | set(reasons)) - keys == set(), "no such key"
    assert sorted([*rows, *reasons]) == sorted({*rows, *reasons}), "a key stands in two places"


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_another_value_makes_a_difference(row: Row) -> None:
    without, with_it = row.without(), row.with_it()
    assert row.sees in without or row.sees in with_it, f"no fact `{row.sees}` in {sorted(without)}"
    assert with_it.get(row.sees) != without.get(row.sees), f"{row.key} = {row.value} has no effect on {row.sees}"
