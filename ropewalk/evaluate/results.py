"""Reads and writes `evaluation/results.json` and the lines beside it: documents, items and samples. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, read_regular, storage
from ropewalk.base.metric import upgrade_results
from ropewalk.base.seal import damaged, parse_sealed_lines, read_sealed, sealed_lines, write_sealed
from ropewalk.store.sealed import checksum_of

FORMAT = 3
SEALED_SINCE = 2
RESULTS = "evaluation/results.json"
SAMPLES = "samples.jsonl"
DOCUMENTS = "evaluation/documents.jsonl"
ITEMS = "evaluation/items.jsonl"
BESIDE = {"samples_checksum": SAMPLES, "documents_checksum": DOCUMENTS, "items_checksum": ITEMS}
"""Files that belong to the results, by the key of their checksum."""
_WHAT = {SAMPLES: "file of samples", DOCUMENTS: "file of scores", ITEMS: "file of items"}
_REMEDY = "`ropewalk evaluate` with the recipe measures it anew"


def write_results(run: Path, results: dict[str, Any], lines: Mapping[str, Iterable[dict[str, Any]]]) -> None:
    """Commits all files, the results last. `lines` are those of the files in BESIDE."""
    for file, rows in lines.items():
        with committed_file(run / file) as written:
            written.write(sealed_lines(rows))
    # Checksums detect files of another evaluation.
    beside = {key: checksum_of(run / path) for key, path in BESIDE.items()}
    write_sealed(run / RESULTS, {"format": FORMAT, **results, **beside})


def read_results(run: Path) -> dict[str, Any]:
    """Reads the results; DamagedFile if the checksum does not match."""
    return read_sealed(
        run / RESULTS,
        what="evaluation",
        remedy=_REMEDY,
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: lambda tree: tree, 2: upgrade_results},
    )


def read_whole(run: Path) -> dict[str, Any]:
    """Reads the results and verifies that samples and documents belong to them; DamagedFile otherwise."""
    read_samples(run)
    results = read_results(run)
    # Earlier versions wrote only samples.
    for key, read in (("documents_checksum", read_documents), ("items_checksum", read_items)):
        if key in results:
            read(run)
    for key, file in BESIDE.items():
        if key in results and results[key] != checksum_of(run / file):
            why = f"it is sound, but it does not belong to {RESULTS}"
            raise damaged(run / file, what=_WHAT[file], remedy=_REMEDY, why=why)
    return results


def read_samples(run: Path) -> list[Any]:
    """Reads the samples; DamagedFile if the checksum does not match."""
    return _read_lines(run, SAMPLES)


def read_documents(run: Path) -> list[Any]:
    """Reads the scores of each document; DamagedFile if the checksum does not match."""
    return _read_lines(run, DOCUMENTS)


def read_items(run: Path) -> list[Any]:
    """Reads the scored items of question tasks; DamagedFile if the checksum does not match."""
    return _read_lines(run, ITEMS)


def _read_lines(run: Path, file: str) -> list[Any]:
    path, what = run / file, _WHAT[file]
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such {what}; {_REMEDY}") from None
    return parse_sealed_lines(data, path=path, what=what, remedy=_REMEDY)
