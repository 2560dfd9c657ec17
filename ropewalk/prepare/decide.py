"""What becomes of each document, over all chunks: duplicates go, the rest is for training or validation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ropewalk.base.errors import DataError

from . import deduplicate
from .config import Prepare
from .draw import Mask, held_out, kin


@dataclass(frozen=True, slots=True)
class Decided:
    """The fate of every document."""

    rows: pa.Table
    """One row a document in canonical order: the SCREENED columns, `chunk`, `partner` and `split`."""

    @property
    def kept(self) -> Mask:
        """Which documents become tokens."""
        return self.rows["rule"].is_null().to_numpy()  # type: ignore[no-any-return]

    def by_chunk(self, chosen: Mask, chunks: int) -> list[Mask]:
        """`chosen` (a mask over `rows`) as one mask a chunk, over the documents in the chunk's file."""
        stored = self.rows["hash"].is_valid().to_numpy()
        borders = np.searchsorted(self.rows["chunk"].to_numpy()[stored], np.arange(1, chunks))
        return np.split(chosen[stored], borders)

    def bytes_by_chunk(self, chosen: Mask, chunks: int) -> npt.NDArray[np.int64]:
        """Text of the `chosen` documents in each chunk."""
        numbers, sizes = self.rows["chunk"].to_numpy()[chosen], self.rows["bytes"].to_numpy()[chosen]
        return np.bincount(numbers, sizes, minlength=chunks).astype(np.int64)


def decide(screened: pa.Table, settings: Prepare, *, seed: int) -> Decided:
    """Removes duplicates and splits the rest; raises DataError when too little is left to train on."""
    stays = np.flatnonzero(screened["rule"].is_null().to_numpy())
    if not len(stays):
        raise _nothing_left(screened)
    hashes = screened["hash"].combine_chunks().take(pa.array(stays))
    partner = np.full(len(screened), None, object)
    duplicate = np.zeros(len(stays), bool)
    if settings.deduplicate == "exact":
        first = deduplicate.first_equals(hashes)
        duplicate = first != np.arange(len(first))
        partner[stays[duplicate]] = screened["id"].take(pa.array(stays[first[duplicate]])).to_pylist()
    ids = screened["id"].combine_chunks().take(pa.array(stays))
    validation = held_out(kin(ids, hashes), share=settings.validation_share, seed=seed)
    split = np.full(len(screened), None, object)
    split[stays] = np.where(validation, "validation", "train")
    split[stays[duplicate]] = None
    rows = _marked(screened, stays[duplicate])
    rows = rows.append_column("partner", pa.array(partner, pa.string()))
    return Decided(rows.append_column("split", pa.array(split, pa.string())))


def _marked(rows: pa.Table, duplicates: npt.NDArray[np.int64]) -> pa.Table:
    """`rows` with step and rule of the duplicates filled in."""
    mask = np.zeros(len(rows), bool)
    mask[duplicates] = True
    for name, value in (("step", deduplicate.STEP), ("rule", deduplicate.RULE)):
        column = pc.if_else(pa.array(mask), pa.scalar(value), rows[name])
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows


def _nothing_left(screened: pa.Table) -> DataError:
    if not len(screened):
        return DataError("the sources hold no document at all; check `prepare.sources`")
    counts = sorted(screened["rule"].value_counts().to_pylist(), key=lambda row: (-row["counts"], row["values"]))
    listing = ", ".join(f"`{row['values']}` {row['counts']}" for row in counts)
    worst = counts[0]["values"]
    step = screened["step"].to_pylist()[screened["rule"].to_pylist().index(worst)]
    remedy = (
        f"relax `prepare.filter.{worst}`" if step == "filter" else "check that the sources hold text in their `format`"
    )
    return DataError(f"no document is left of {len(screened)}: removed by rule: {listing}; {remedy}")
