"""What a phase reads: its batches, its held-out rows, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.format import checksum
from ropewalk.load.batch import Batch
from ropewalk.load.loader import Loader, bytes_per_token, held_out_rows
from ropewalk.store.manifest import TokenizerEntry, read_manifest

from .phases import PhaseSpec
from .settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The prepared data, open for a phase."""

    loader: Loader
    held_out: Batch
    bytes_per_token: float
    """UTF-8 bytes of text behind a held-out token."""
    tokenizer: bytes
    """The tokenizer's file."""
    chat: str
    """Name of the chat template, empty without."""


def open_data(settings: Settings, phase: PhaseSpec, *, verify: bool, pin: bool) -> Data:
    """The data of a phase; `verify` reads all of it once, `pin` puts batches into page-locked memory, for a GPU."""
    manifest = read_manifest(settings.data)
    mixture = {share.source: share.weight for share in phase.mixture} or None
    length = phase.sequence_length
    sources = tuple(mixture) if mixture else None
    return Data(
        loader=Loader(
            settings.data,
            sequence_length=length,
            batch_rows=phase.batch_rows,
            seed=phase.seed(settings.seed),
            mixture=mixture,
            verify=verify,
            pin=pin,
        ),
        tokenizer=_read_tokenizer(settings.data, manifest.tokenizer),
        chat=manifest.tokenizer.chat,
        held_out=held_out_rows(
            settings.data,
            sequence_length=length,
            rows=settings.train.validate_rows,
            sources=sources,
            verify=verify,
        ),
        bytes_per_token=bytes_per_token(manifest, "validation", sources=sources),
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
