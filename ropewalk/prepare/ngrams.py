"""An index of n-grams: which documents hold a span of tokens or words, and where. Decontamination and audits ask it.

It is made from the shards, one after the other. Each gives its entries (a hash, and the token at which the hashed part
begins) as one sorted file; these are merged by ranges of hashes, so that memory is bounded however large the corpus is.

    ngrams-words-13/index.json       what is indexed, and by which algorithm
    ngrams-words-13/00000.hashes     entries of one range of hashes, in order: uint64
    ngrams-words-13/00000.places     shard number << 40 | token in the shard: uint64

Only some parts of each n-gram are entered (`kernels.ngrams`), about one for four words of 13-grams, 16 bytes each. No
n-gram is lost by that, and a hash only proposes: what an answer names was compared with the tokens themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DamagedFile, DataError
from ropewalk.base.files import committed_file, committed_folder
from ropewalk.base.progress import Progress
from ropewalk.base.seal import read_sealed, write_sealed
from ropewalk.store.manifest import ShardEntry
from ropewalk.store.sealed import checksum_of, sealed_file, verify
from ropewalk.store.shards import Shard

from .kernels import ngrams as kernel
from .kernels.words import WORDS_ID
from .spelling import Speller
from .stages import damaged, seal_key
from .workers import Workers

FORMAT = 2
SEALED_SINCE = 2
FILE = "index.json"
KINDS = ("hashes", "places")

Unit = Literal["tokens", "words"]
Values = npt.NDArray[np.uint64]

BLOCK_TOKENS = 1 << 20
"""Tokens of a shard that are looked at together; some 100 bytes each on the way."""
RANGE_ENTRIES = 4_000_000
"""Entries of one range of hashes, about: 64 MB, and as much again while they are sorted."""

SHARD_SHIFT = 40
"""Bits of a place that count tokens; those above number the shard."""


@dataclass(frozen=True, slots=True)
class IndexTask:
    """One shard to index."""

    number: int
    shard: Path
    bytes: int
    tokenizer: Path
    unit: Unit
    length: int
    target: Path

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.target,)


def index_name(unit: Unit, length: int) -> str:
    """The folder of an index beside the shards."""
    return f"ngrams-{unit}-{length}"


def is_intact(path: Path) -> bool:
    """Whether the index is there with all its entries; they are not read."""
    try:
        counts = read_index(path)["entries"]
        sizes = [(path / f"{number:05d}.{kind}").stat().st_size for number in range(len(counts)) for kind in KINDS]
    except (DataError, OSError, TypeError, KeyError):
        return False
    return sizes == [8 * count for count in counts for _ in KINDS]


def read_index(path: Path) -> dict[str, Any]:
    """`index.json` of the index in folder `path`; DamagedFile when it is not what was written."""
    return read_sealed(
        path / FILE,
        what="index of n-grams",
        remedy=f"delete {path} and run `ropewalk prepare` again, which makes it anew",
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: lambda tree: {**tree, "checksums": None}},
    )


def part_length(length: int) -> int:
    """Units of the parts that represent n-grams: longer ones are rarer, and more of them are needed."""
    return (length + 1) // 2


def index_shards(
    folder: Path,
    shards: Sequence[ShardEntry],
    *,
    tokenizer: Path,
    unit: Unit,
    length: int,
    workers: Workers,
    progress: Progress,
) -> Path:
    """Commits the index of the shards in `folder`, unless it is there; a killed one continues shard by shard."""
    path = folder / index_name(unit, length)
    work = _work(path)
    if is_intact(path):
        shutil.rmtree(work, ignore_errors=True)  # what a kill between the two has left
        return path
    tasks = index_tasks(folder, shards, tokenizer=tokenizer, unit=unit, length=length)
    workers.run("index n-grams", index_shard, tasks, progress=progress)
    with committed_folder(path) as partial:
        ranges = _merge([task.target for task in tasks], partial)
        described = {
            "format": FORMAT,
            "algorithm": [kernel.NGRAMS_ID, *([WORDS_ID] if unit == "words" else [])],
            "unit": unit,
            "length": length,
            "entries": ranges,
            "shards": [{"file": entry.file, "checksum": entry.checksum} for entry in shards],
            "checksums": [
                {kind: checksum_of(partial / f"{number:05d}.{kind}") for kind in KINDS} for number in range(len(ranges))
            ],
        }
        write_sealed(partial / FILE, described)
    shutil.rmtree(work)
    return path


def index_tasks(
    folder: Path, shards: Sequence[ShardEntry], *, tokenizer: Path, unit: Unit, length: int
) -> list[IndexTask]:
    """One task a shard; what they commit is merged into the index."""
    work = _work(folder / index_name(unit, length))
    return [
        IndexTask(
            number=number,
            shard=folder / entry.file,
            bytes=entry.file_bytes,
            tokenizer=tokenizer,
            unit=unit,
            length=length,
            target=work / f"{number:05d}-{entry.checksum}.entries",
        )
        for number, entry in enumerate(shards)
    ]


def _work(index: Path) -> Path:
    return index.with_name(f"{index.name}.work")


def index_shard(task: IndexTask) -> int:
    """Commits the sorted entries of one shard; the number of its documents."""
    shard = Shard(task.shard)
    shard.verify()  # what is entered here has another checksum from now on
    speller = Speller(task.tokenizer) if task.unit == "words" else None
    found = [_entries(shard, first, last, speller, task.length) for first, last in document_blocks(shard)]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(hashes for hashes, _ in found)])
    places = np.concatenate([np.zeros(0, np.uint64), *(places for _, places in found)])
    places |= np.uint64(task.number << SHARD_SHIFT)
    with sealed_file(task.target, seal_key(task.target)) as file:
        _write_sorted(hashes, places, file, file)
    return len(shard)


def document_blocks(shard: Shard) -> Iterator[tuple[int, int]]:
    """Runs of documents of about BLOCK_TOKENS."""
    first = 0
    while first < len(shard):
        last = int(np.searchsorted(shard.offsets, shard.offsets[first] + BLOCK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def _entries(shard: Shard, first: int, last: int, speller: Speller | None, length: int) -> tuple[Values, Values]:
    """(hashes, places) of the documents `first` to `last`."""
    offsets = shard.offsets[first : last + 1]
    begin = int(offsets[0])
    tokens, bounds = shard.tokens[begin : offsets[-1]], np.asarray(offsets - begin)
    part = part_length(length)
    if speller is None:
        # The end of text that closes a document belongs to no n-gram.
        hashes, places = kernel.choose_parts(tokens.astype(np.uint64), bounds[:-1], bounds[1:] - 1, length, part)
        return hashes, (places + begin).astype(np.uint64)
    words = speller.words(tokens, bounds)
    hashes, places = kernel.choose_parts(words.hashes, words.firsts[:-1], words.firsts[1:], length, part)
    return hashes, (words.tokens(places) + begin).astype(np.uint64)


def _merge(runs: Sequence[Path], folder: Path) -> list[int]:
    """Writes the entries of all runs by ranges of hashes; how many each range has."""
    sizes = [_verified(path) for path in runs]
    mapped = [
        np.memmap(path, np.uint64, "r", shape=(2, size // 16)) for path, size in zip(runs, sizes, strict=True) if size
    ]
    total = sum(run.shape[1] for run in mapped)
    bits = max(0, (total // RANGE_ENTRIES).bit_length())
    counts = []
    for number in range(1 << bits):
        low, high = number << 64 - bits if bits else 0, (number + 1 << 64 - bits if bits else 1 << 64) - 1
        parts = []
        for run in mapped:
            start = np.searchsorted(run[0], np.uint64(low), side="left")
            stop = np.searchsorted(run[0], np.uint64(high), side="right")
            parts.append(run[:, start:stop])
        hashes, places = np.concatenate([np.zeros((2, 0), np.uint64), *parts], axis=1)
        with (
            committed_file(folder / f"{number:05d}.hashes") as hash_file,
            committed_file(folder / f"{number:05d}.places") as place_file,
        ):
            _write_sorted(hashes, places, hash_file, place_file)
        counts.append(len(hashes))
    return counts


def _verified(path: Path) -> int:
    try:
        return verify(path, seal_key(path))
    except DamagedFile as error:
        raise damaged(path, error) from None


def _write_sorted(hashes: Values, places: Values, hash_file: IO[Any], place_file: IO[Any]) -> None:
    order = np.lexsort((places, hashes))
    hash_file.write(hashes[order].astype("<u8").tobytes())
    place_file.write(places[order].astype("<u8").tobytes())
