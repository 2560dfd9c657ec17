"""Other thresholds on the statistics that were kept: which documents they would gain and lose. No text is read.

The answer is that of prepare itself up to equal documents: the same rules on the same columns, then the same hashes.
Stages after that compare texts; what they would make of gained documents only prepare can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.errors import UserError
from ropewalk.base.progress import amount
from ropewalk.store.manifest import check_table, read_manifest

from .columns import Mask
from .config import Prepare
from .corpus import BEFORE_RULES
from .decide.rules import STAGE as FILTER
from .deduplicate import RULE as EXACT
from .deduplicate import STAGE as DEDUPLICATE
from .deduplicate import first_equals
from .ledger import FILE, STATISTICS
from .measures import covers
from .rules import judge

SAMPLES = 5
"""Ids named of the documents gained, and of those lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Documents and bytes of text that are left before and after, and the two differences."""

    documents: int
    documents_after: int
    bytes: int
    bytes_after: int
    gained_documents: int
    gained_bytes: int
    lost_documents: int
    lost_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What other settings of the filter would change, counted after rules and equal documents."""

    total: Change
    sources: dict[str, Change]
    rules: dict[str, tuple[int, int]]
    """Documents removed by each rule, before and after."""
    gained_from: dict[str, int]
    """The documents gained, by the rule that removes them now."""
    lost_to: dict[str, int]
    """The documents lost, by the rule that would remove them."""
    gained: tuple[str, ...]
    """Ids of some documents gained."""
    lost: tuple[str, ...]
    later: dict[str, int]
    """Documents that later stages remove now, by stage: not counted above, and open for what is gained."""

    def __str__(self) -> str:
        total = self.total
        lines = [
            f"after rules and equal documents: {total.documents:,} documents ({amount(total.bytes, 'B')}) become "
            f"{total.documents_after:,} ({amount(total.bytes_after, 'B')})",
            f"gained {total.gained_documents:,} documents ({amount(total.gained_bytes, 'B')})"
            + _listing(self.gained_from, "removed now by"),
            f"lost {total.lost_documents:,} documents ({amount(total.lost_bytes, 'B')})"
            + _listing(self.lost_to, "removed then by"),
        ]
        for name, change in self.sources.items():
            if change.gained_documents or change.lost_documents:
                lines.append(f"source {name}: +{change.gained_documents:,} -{change.lost_documents:,} documents")
        lines += [f"rule {rule}: {now:,} -> {then:,}" for rule, (now, then) in self.rules.items() if now != then]
        for word, ids in (("gained", self.gained), ("lost", self.lost)):
            if ids:
                lines.append(f"{word}, for example: {', '.join(ids)}")
        if self.later:
            listing = ", ".join(f"{stage} {documents:,}" for stage, documents in self.later.items())
            lines.append(f"later stages remove now: {listing}; `ropewalk prepare` tells what they would then")
        return "\n".join(lines)


def what_if(folder: Path, now: Prepare, then: Prepare) -> WhatIf:
    """What the filter of `then` would change in the data in `folder`, which was prepared with `now`.

    UserError when it asks for something that was not measured.
    """
    if not covers(now.filter, then.filter):
        raise UserError(
            "these settings change what is measured of a text (stop words, lists, corrections or the language model), "
            "not only thresholds: prepare with them to see what they do"
        )
    manifest = read_manifest(folder)
    for name in (FILE, STATISTICS):
        check_table(folder, name, manifest)
    ledger = pq.read_table(folder / FILE, columns=["id", "source", "stage"])
    stage = ledger["stage"].combine_chunks()
    texts = ~np.asarray(pc.is_in(stage, pa.array(BEFORE_RULES)))
    hashes, sizes, rules = _judged(folder, (now, then))
    before, after = (
        _removed(broken, texts, hashes, equals=settings.deduplicate.documents != "off")
        for broken, settings in zip(rules, (now, then), strict=True)
    )
    left, left_after = texts & _is_none(before), texts & _is_none(after)
    gained, lost = left_after & ~left, left & ~left_after
    ids = ledger["id"].combine_chunks()
    source = ledger["source"].combine_chunks()
    names = [entry.name for entry in now.sources]
    decided = pa.array([*BEFORE_RULES, FILTER, DEDUPLICATE])
    later = stage.filter(pc.and_(stage.is_valid(), pc.invert(pc.is_in(stage, decided))))
    return WhatIf(
        total=_change(left, left_after, sizes),
        sources={name: _change(left, left_after, sizes, np.asarray(pc.equal(source, name))) for name in names},
        rules=_both(_tally(before[texts]), _tally(after[texts])),
        gained_from=_tally(before[gained]),
        lost_to=_tally(after[lost]),
        gained=_some(ids, gained),
        lost=_some(ids, lost),
        later=_tally(later.to_numpy(zero_copy_only=False)),
    )


_Names = npt.NDArray[np.object_]


def _judged(folder: Path, settings: Sequence[Prepare]) -> tuple[pa.Array, npt.NDArray[np.int64], list[_Names]]:
    """(hashes, bytes, for each of `settings` the first rule that every document breaks, None for none)."""
    hashes, sizes = [], [np.zeros(0, np.int64)]
    found: list[list[_Names]] = [[np.zeros(0, object)] for _ in settings]
    with pq.ParquetFile(folder / STATISTICS) as file:
        for batch in file.iter_batches():
            hashes.append(batch["hash"])
            sizes.append(batch["bytes"].to_numpy())
            for rules, one in zip(found, settings, strict=True):
                rules.append(judge(batch, one.filter).removals()["rule"].to_numpy(zero_copy_only=False))
    return pa.concat_arrays(hashes), np.concatenate(sizes), [np.concatenate(rules) for rules in found]


def _removed(rules: _Names, texts: Mask, hashes: pa.Array, *, equals: bool) -> _Names:
    """The rule that removes each document, equal documents included."""
    removed = rules.copy()
    if equals:
        rows = np.flatnonzero(texts & _is_none(rules))
        first = first_equals(hashes.take(pa.array(rows)))
        removed[rows[first != np.arange(len(first))]] = EXACT
    return removed


def _is_none(names: _Names) -> Mask:
    return np.asarray(pa.array(names, pa.string()).is_null())


def _change(left: Mask, after: Mask, sizes: npt.NDArray[np.int64], among: Mask | None = None) -> Change:
    mine = np.ones(len(left), bool) if among is None else among
    gained, lost = mine & after & ~left, mine & left & ~after
    return Change(
        documents=int((mine & left).sum()),
        documents_after=int((mine & after).sum()),
        bytes=int(sizes[mine & left].sum()),
        bytes_after=int(sizes[mine & after].sum()),
        gained_documents=int(gained.sum()),
        gained_bytes=int(sizes[gained].sum()),
        lost_documents=int(lost.sum()),
        lost_bytes=int(sizes[lost].sum()),
    )


def _tally(names: _Names) -> dict[str, int]:
    """How often each name occurs, the most frequent first."""
    counted = pc.value_counts(pa.array(names, pa.string()).drop_null()).to_pylist()
    return {row["values"]: row["counts"] for row in sorted(counted, key=lambda row: (-row["counts"], row["values"]))}


def _both(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (before.get(name, 0), after.get(name, 0)) for name in {**before, **after}}


def _some(ids: pa.StringArray, chosen: Mask) -> tuple[str, ...]:
    return tuple(ids.take(pa.array(np.flatnonzero(chosen)[:SAMPLES])).to_pylist())


def _listing(rules: dict[str, int], how: str) -> str:
    return f", {how} " + ", ".join(f"{rule} {count:,}" for rule, count in rules.items()) if rules else ""
