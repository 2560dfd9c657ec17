"""What a run reads: its batches, its held-out rows, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.format import checksum
from ropewalk.load.batch import Batch
from ropewalk.load.loader import Loader, bytes_per_token, held_out_rows
from ropewalk.store.manifest import TokenizerEntry, read_manifest

from .settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The prepared data, open for training."""

    loader: Loader
    held_out: Batch
    bytes_per_token: float
    """UTF-8 bytes of text behind a held-out token."""
    tokens: int
    """Training tokens there are."""
    tokenizer: bytes
    """The tokenizer's file."""


def open_data(settings: Settings, *, pin: bool) -> Data:
    """The data of the run; `pin` puts batches into page-locked memory, for a GPU."""
    length, verify = settings.load.sequence_length, settings.load.verify == "open"
    manifest = read_manifest(settings.data)
    return Data(
        loader=Loader(
            settings.data,
            sequence_length=length,
            batch_rows=settings.train.batch_rows,
            seed=settings.seed,
            verify=verify,
            pin=pin,
        ),
        tokenizer=_read_tokenizer(settings.data, manifest.tokenizer),
        held_out=held_out_rows(settings.data, sequence_length=length, rows=settings.train.validate_rows, verify=verify),
        bytes_per_token=bytes_per_token(manifest, "validation"),
        tokens=sum(shard.tokens for shard in manifest.shards_of("train")),
    )


def _read_tokenizer(folder: Path, entry: TokenizerEntry) -> bytes:
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: the tokenizer is missing; delete {folder} and run the same command again") from None
    if checksum(data) != entry.checksum:
        raise DataError(f"{path}: not the tokenizer of these shards; delete {folder} and run the same command again")
    return data
