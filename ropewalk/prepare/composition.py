"""What prepared data is made of: documents and bytes by source, domain and language, as read and as kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .fertility import UNKNOWN
from .ledger import STATISTICS


def compose(folder: Path, ledger: pa.Table, fertility: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of `name`, `read_documents`, `read_bytes`, `kept_documents`, `kept_bytes`, the largest first.

    `ledger` has the columns `source`, `domain`, `bytes` and `split`. Where languages were not measured, they are those
    of the sample that `fertility` took of what was kept, and have `kept_bytes` alone.
    """
    found = {name: _grouped(ledger, name) for name in ("source", "domain")}
    if "language" in pq.read_schema(folder / STATISTICS).names:
        column = pq.read_table(folder / STATISTICS, columns=["language"])["language"]
        named = pc.if_else(pc.equal(column, ""), UNKNOWN, column)
        found["language"] = _grouped(ledger.append_column("language", named), "language")
    else:
        kept = sum(row["kept_bytes"] for row in found["source"])
        found["language"] = _sampled(fertility, kept_bytes=kept)
    return found


def _grouped(ledger: pa.Table, column: str) -> list[dict[str, Any]]:
    both = []
    for prefix, table in (("read", ledger), ("kept", ledger.filter(ledger["split"].is_valid()))):
        sums = table.group_by(column).aggregate([("bytes", "sum"), ([], "count_all")]).to_pylist()
        names = (f"{prefix}_documents", f"{prefix}_bytes")
        both.append({row[column]: dict(zip(names, (row["count_all"], row["bytes_sum"]), strict=True)) for row in sums})
    read, kept = both
    nothing = {"kept_documents": 0, "kept_bytes": 0}
    rows = [{"name": name, **counts, **kept.get(name, nothing)} for name, counts in read.items()]
    return sorted(rows, key=lambda row: (-row["read_bytes"], row["name"]))


def _sampled(fertility: Sequence[dict[str, Any]], *, kept_bytes: int) -> list[dict[str, Any]]:
    """The languages of a sample, scaled to all that was kept."""
    sample = [row for row in fertility if row["by"].startswith("language")]
    sizes = {row["name"]: row["tokens"] * (row["bytes_per_token"] or 0.0) for row in sample}
    scale = kept_bytes / sum(sizes.values()) if sum(sizes.values()) else 0.0
    rows = [{"name": name, "kept_bytes": round(size * scale)} for name, size in sizes.items()]
    return sorted(rows, key=lambda row: (-row["kept_bytes"], row["name"]))
