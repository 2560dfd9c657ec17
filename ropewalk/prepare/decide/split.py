"""Training or validation, for every document that is left."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import DataError

from ..draw import held_out, kin
from ..fates import Fates
from .rules import STAGE as FILTER
from .state import State


def split(state: State, *, seed: int) -> pa.StringArray:
    """`train` or `validation` for each document that is left, null for the others; DataError when too few are."""
    corpus, fates = state.corpus, state.fates
    if not fates.left.any():
        raise _nothing_left(fates)
    rows = pa.array(np.flatnonzero(fates.left))
    related = kin(corpus.ids.take(rows), corpus.hashes.take(rows))
    drawn = held_out(related, share=state.settings.validation_share, seed=seed)
    names = np.full(len(fates), None, object)
    names[fates.left] = np.where(drawn, "validation", "train")
    return pa.array(names, pa.string())


def _nothing_left(fates: Fates) -> DataError:
    rules = fates.rules()
    if not rules:
        return DataError("the sources hold no document at all; check `prepare.sources`")
    listing = ", ".join(f"`{rule}` {documents}" for _, rule, documents in rules)
    stage, worst, _ = rules[0]
    remedy = (
        f"relax `prepare.filter.{worst}`" if stage == FILTER else "check that the sources hold text in their `format`"
    )
    return DataError(f"no document is left of {len(fates)}: removed by rule: {listing}; {remedy}")
