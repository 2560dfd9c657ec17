"""Opens the data of a phase: batches, held-out sequences, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ropewalk.base.errors import DamagedTokenizer
from ropewalk.base.files import read_regular
from ropewalk.checkpoint.format import checksum
from ropewalk.load.batch import Batch
from ropewalk.load.loader import Loader, bytes_per_token, held_out_rows
from ropewalk.load.mixture import Mixture
from ropewalk.load.stalls import Stalls
from ropewalk.store.manifest import TokenizerEntry, read_manifest

from .phase_spec import PhaseSpec
from .settings import Settings

_REMEDY = "restore it from a copy, or move its folder away and run the same command again, which prepares the data anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The prepared data of an open phase."""

    loader: Loader
    held_out: Batch
    bytes_per_token: float
    """Mean UTF-8 bytes of text per held-out token."""
    tokenizer: bytes
    """Content of the tokenizer file."""
    chat: str
    """Name of the chat template; empty if there is none."""


def open_data(
    settings: Settings,
    phase: PhaseSpec,
    *,
    verify: bool,
    device: torch.device,
    stalls: Stalls | None = None,
    rank: int = 0,
    world: int = 1,
    packages: Path | None = None,
) -> Data:
    """Opens the data of a phase for reader `rank` of `world`, with batches on `device`. `verify` checks all data once,
    `stalls` counts data stalls, `packages` is the directory for packs of rarely drawn sequences."""
    manifest = read_manifest(settings.data)
    length = phase.sequence_length
    sources = tuple(share.source for share in phase.mixture) or None
    return Data(
        loader=Loader(
            settings.data,
            sequence_length=length,
            batch_size=phase.batch_size,
            seed=phase.seed(settings.seed),
            mixture=mixture_of(phase),
            packing=settings.load.packing,
            shuffle=settings.load.shuffle,
            verify=verify,
            on_damage=settings.load.on_damage,
            rank=rank,
            world=world,
            device=device,
            threads=settings.load.threads,
            prefetch_bytes=settings.load.prefetch_bytes,
            remote=settings.load.remote,
            cache=settings.load.cache,
            importance=settings.load.importance,
            packages=packages,
            stalls=stalls,
        ),
        tokenizer=_read_tokenizer(settings.data, manifest.tokenizer),
        chat=manifest.tokenizer.chat,
        held_out=held_out_rows(
            settings.data,
            sequence_length=length,
            rows=settings.train.validation_sequences,
            sources=sources,
            verify=verify,
            on_damage=settings.load.on_damage,
        ),
        bytes_per_token=bytes_per_token(manifest, "validation", sources=sources),
    )


def mixture_of(phase: PhaseSpec) -> Mixture | None:
    """The mixture weights of a phase; None: those of the corpus."""
    if not phase.mixture:
        return None
    begin = {share.source: share.weight for share in phase.mixture}
    end = {share.source: share.end_weight for share in phase.mixture if share.end_weight is not None}
    most = {share.source: share.max_epochs for share in phase.mixture if share.max_epochs is not None}
    if not end:
        return Mixture.constant(begin, max_epochs=most)
    rows = phase.tokens(phase.steps) // phase.sequence_length
    return Mixture.linear(begin, begin | end, rows, max_epochs=most)


def _read_tokenizer(folder: Path, entry: TokenizerEntry) -> bytes:
    path = folder / entry.file
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise DamagedTokenizer(f"{path}: the tokenizer is missing; {_REMEDY}") from None
    if checksum(data) != entry.checksum:
        raise DamagedTokenizer(f"{path}: not the tokenizer of these shards; {_REMEDY}")
    return data
