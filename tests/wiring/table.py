"""All rows."""

from __future__ import annotations

from tests.wiring import (
    checkpoint_rows,
    code_rows,
    live_rows,
    load_rows,
    model_rows,
    parallel_rows,
    prepare_rows,
    train_rows,
)
from tests.wiring.rows import Row

ROWS: list[Row] = [
    *prepare_rows.ROWS,
    *load_rows.ROWS,
    *model_rows.ROWS,
    *parallel_rows.ROWS,
    *train_rows.ROWS,
    *checkpoint_rows.ROWS,
    *code_rows.ROWS,
    *live_rows.ROWS,
]
