"""Prepared data in one object: what the report of `ropewalk prepare report` shows. Read from files, written as one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.seal import write_sealed
from ropewalk.store.manifest import check_table, read_manifest

from . import samples
from .columns import Mask
from .composition import compose
from .config import Prepare
from .corpus import BEFORE_RULES
from .fertility import fertility
from .ledger import FILE as LEDGER
from .ledger import STATISTICS
from .occurrences import occurrences
from .rules import judge
from .severe import addressed
from .trace import read_ledger

FORMAT = 2
FILE = "report.json"


def write_summary(folder: Path, settings: Prepare, *, recipe: str = "") -> Path:
    """Commits what is known of the data in `folder`, which was prepared with `settings`; `recipe` is how commands in
    warnings name the recipe."""
    manifest = read_manifest(folder)
    for name in (LEDGER, STATISTICS, samples.FILE):
        check_table(folder, name, manifest)
    ledger = read_ledger(folder, ["id", "source", "domain", "stage", "partner", "bytes", "split", "parts"])
    spent = fertility(folder, ledger)
    path = folder / FILE
    write_sealed(
        path,
        {
            "format": FORMAT,
            "manifest": {
                **dataclasses.asdict(manifest),
                "warnings": [addressed(line, recipe) for line in manifest.warnings],
            },
            "overlap": _overlap(folder, settings, _reaching_rules(ledger)),
            "samples": pq.read_table(folder / samples.FILE).to_pylist(),
            "repeats": _repeats(ledger),
            "fertility": spent,
            "composition": compose(folder, ledger, spent),
        },
    )
    return path


def _reaching_rules(ledger: pa.Table) -> Mask:
    """The documents that no stage before the rules has removed."""
    return ~np.asarray(pc.is_in(ledger["stage"].combine_chunks(), pa.array(BEFORE_RULES)))


def _overlap(folder: Path, settings: Prepare, asked: Mask) -> dict[str, Any]:
    """For each pair of rules the documents that break both; on the diagonal those that break one."""
    position = 0
    names: list[str] = []
    counts = np.zeros((0, 0), np.int64)
    alone = np.zeros(0, np.int64)
    with pq.ParquetFile(folder / STATISTICS) as file:
        for batch in file.iter_batches():
            verdicts = judge(batch, settings.filter)
            if not names:
                names = [rule.name for rule in verdicts.rules]
                counts, alone = np.zeros((len(names), len(names)), np.int64), np.zeros(len(names), np.int64)
            broken = verdicts.broken[:, asked[position : position + len(batch)]].astype(np.int64)
            position += len(batch)
            counts += broken @ broken.T
            alone += broken[:, broken.sum(axis=0) == 1].sum(axis=1)
    seen = np.flatnonzero(np.diag(counts))
    return {
        "rules": [names[place] for place in seen.tolist()],
        "documents": counts[np.ix_(seen, seen)].tolist(),
        "alone": alone[seen].tolist(),
    }


def _repeats(ledger: pa.Table) -> dict[str, Any]:
    """How often texts occur: documents removed as copies count towards the one that stays."""
    ids = ledger["id"].combine_chunks()
    group = np.arange(len(ids))
    partner = pc.index_in(ledger["partner"].combine_chunks(), ids)
    known = np.asarray(partner.is_valid())
    group[known] = partner.drop_null().to_numpy()
    # An equal document may point to one that is a near copy of a third.
    group = group[group]
    texts = _reaching_rules(ledger)
    found = occurrences(group[texts], ledger["bytes"].to_numpy()[texts])
    return {**dataclasses.asdict(found), "warning": found.warning}
