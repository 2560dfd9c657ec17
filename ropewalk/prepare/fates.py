"""What becomes of each document of the corpus, stage by stage. Nothing disappears: the sums are checked as they grow.

Memory: about 150 bytes a document, most of it the id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ropewalk.base.errors import DataError
from ropewalk.store.manifest import SourceEntry, StepCount, check_counts

from .columns import Mask, Rows
from .documents import Edits

Numbers: TypeAlias = "npt.NDArray[np.float64] | pa.DoubleArray"

REMOVED = pa.schema(
    [
        ("row", pa.int64()),
        ("stage", pa.string()),
        ("rule", pa.string()),
        ("value", pa.float64()),  # what was measured
        ("threshold", pa.float64()),  # against what
        ("partner", pa.string()),  # id of the document that stays in its place
        ("jaccard", pa.float64()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """Documents that a stage removes, with one rule for all or one for each. What does not apply is None."""

    rows: Rows
    rule: str | pa.StringArray
    value: Numbers | None = None
    threshold: Numbers | None = None
    partner: pa.StringArray | None = None
    jaccard: Numbers | None = None

    def table(self, stage: str) -> pa.Table:
        """The REMOVED rows."""
        rules = pa.repeat(pa.scalar(self.rule), len(self.rows)) if isinstance(self.rule, str) else self.rule
        given = [self.value, self.threshold, self.partner, self.jaccard]
        nothing = [pa.nulls(len(self.rows), kind) for kind in REMOVED.types[3:]]
        rest = [empty if column is None else pa.array(column) for column, empty in zip(given, nothing, strict=True)]
        return pa.table([pa.array(self.rows), pa.repeat(stage, len(self.rows)), rules, *rest], schema=REMOVED)


class Fates:
    """Every document in canonical order: those that are left, their sizes, and why the others went."""

    def __init__(self, *, source: npt.NDArray[np.int64], sources: Sequence[str], sizes: npt.NDArray[np.int64]) -> None:
        self.source, self.sources = source, sources
        """The number of each document's source, and the names of these."""
        self._counts: dict[str, list[StepCount]] = {name: [] for name in sources}
        self._removed: list[pa.Table] = [REMOVED.empty_table()]
        self._edits: list[Edits] = []
        self.sizes = sizes
        """Bytes of each document as the last stage left it."""
        self.left: Mask = np.ones(len(source), bool)
        """The documents that no stage has removed."""

    def __len__(self) -> int:
        return len(self.left)

    def close(
        self,
        stage: str,
        *,
        removals: Iterable[Removal] = (),
        edits: Sequence[Edits] = (),
        sizes: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Ends a stage: `removals` go, `edits` are noted for those that stay, all have the new `sizes`.

        DataError when a document is removed twice, or documents or bytes do not add up for every source.
        """
        gone = pa.concat_tables([REMOVED.empty_table(), *(removal.table(stage) for removal in removals)])
        rows = gone["row"].to_numpy()
        before, after = self.left, self.left.copy()
        after[rows] = False
        if len(np.unique(rows)) != len(rows) or not before[rows].all():
            raise DataError(f"stage {stage} of prepare removed a document twice; please report this")
        new_sizes = self.sizes if sizes is None else sizes
        changes = Edits.joined(edits)
        for number, name in enumerate(self.sources):
            mine = self.source == number
            going, changing = mine[rows], (after & mine)[changes.rows]
            rules = gone["rule"].to_numpy()[going]
            count = StepCount(
                step=stage,
                documents_in=int((before & mine).sum()),
                documents_out=int((after & mine).sum()),
                bytes_in=int(self.sizes[before & mine].sum()),
                bytes_out=int(new_sizes[after & mine].sum()),
                removed=_sums(rules),
                edited=_sums(changes.rules[changing]),
                removed_bytes=_sums(rules, self.sizes[rows[going]]),
                edited_bytes=_sums(changes.rules[changing], changes.removed_bytes[changing]),
            )
            self._counts[name].append(count)
            check_counts(SourceEntry(name=name, domain="", weight=1.0, steps=self.counts(name)))
        self._removed.append(gone)
        self._edits.append(changes)
        self.left, self.sizes = after, new_sizes

    def counts(self, source: str) -> tuple[StepCount, ...]:
        """What each stage did to the documents of `source`."""
        return tuple(self._counts[source])

    def removed(self) -> pa.Table:
        """The REMOVED columns but `row`, one row a document in canonical order, null for those that stay."""
        gone = pa.concat_tables(self._removed).combine_chunks()
        index = np.full(len(self), -1)
        index[gone["row"].to_numpy()] = np.arange(len(gone))
        return gone.drop_columns("row").take(pa.array(index, mask=index < 0))

    def edits(self) -> pa.ListArray:
        """The EDITS column, one row a document."""
        return Edits.joined(self._edits).column(len(self))

    def rules(self) -> list[tuple[str, str, int]]:
        """(stage, rule, documents removed by it), the largest first."""
        gone = pa.concat_tables(self._removed)
        rows = gone.group_by(["stage", "rule"]).aggregate([([], "count_all")]).to_pylist()
        return sorted(
            ((row["stage"], row["rule"], row["count_all"]) for row in rows), key=lambda row: (-row[2], row[1])
        )


def _sums(names: npt.NDArray[np.object_], weights: npt.NDArray[np.int64] | None = None) -> dict[str, int]:
    """How often each name occurs, or the sum of its weights, in the order of names."""
    found, index = np.unique(names.astype(str), return_inverse=True)
    return dict(zip(found.tolist(), np.bincount(index, weights, len(found)).astype(int).tolist(), strict=True))
