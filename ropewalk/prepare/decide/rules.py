"""The rules: comparisons on the columns of statistics, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ..fates import Removal
from ..rules import judge
from ..severe import Removed, severe_rules
from ..stages import read_batches
from .state import State

STAGE = "filter"


def apply_rules(state: State) -> None:
    """Removes the documents that break a rule, each by the first that it breaks."""
    found = []
    for chunk in state.corpus.chunks:
        found += [judge(batch, state.settings.filter).removals() for batch in read_batches(chunk.measured)]
    verdicts = pa.Table.from_batches(found)
    broken = np.flatnonzero(state.fates.left & np.asarray(verdicts["rule"].is_valid()))
    gone = verdicts.take(pa.array(broken)).combine_chunks()
    rule, value, threshold = (column.combine_chunks() for column in gone.columns)
    fates = state.fates
    before = fates.left
    fates.close(STAGE, removals=[Removal(rows=broken, rule=rule, value=value, threshold=threshold)])
    if not fates.left.any():
        return  # the error that follows names the rules, and there is nothing to try thresholds on
    removed = Removed(
        broken, rule.to_numpy(zero_copy_only=False), value.to_numpy(zero_copy_only=False).astype(np.float64)
    )
    for line in severe_rules(
        removed, state.settings.filter, source=fates.source, names=fates.sources, sizes=fates.sizes, before=before
    ):
        state.warn(line)
