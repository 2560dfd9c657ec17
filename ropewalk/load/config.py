"""Settings of `load`: how prepared tokens become batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range

from .cache.config import Cache
from .media.config import Media

Packing = Literal["windows", "best-fit"]
Shuffle = Literal["all", "blocks"]
OnDamage = Literal["stop", "skip"]
AHEAD_BATCHES = 256
"""Batches made ahead at most. Small ones would be made by the ten thousand otherwise: a run of 8 steps on 4 rows of 16
tokens takes 0.26 s of a processor instead of 0.6 to 0.9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirror:
    """A second place of the same files, manifests and indices included: either may be down when a run starts."""

    of: str
    """Folder or URL with which the names of the files begin in the manifest."""
    at: str
    """Folder or URL below which the mirror holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """How shards that are not memory-mapped are read: behind a URL, or compressed."""

    prefetch_bytes: Annotated[int, Range(least=1 << 20), CONTINUES] = 256 << 20
    """Bytes read ahead of the rows, the earliest needed first; before a checkpoint or a ramp up to twice as many. What
    the steps read in the longest silence of the store should fit, and with `load.shuffle = "blocks"` two groups of
    blocks of every source, 160 MiB, or pieces are read again."""
    max_requests: Annotated[int, Range(least=1, most=256), CONTINUES] = 16
    """Requests in flight to each store: the starting value of `hill-climb`, the constant value of `fixed`."""
    policy: Annotated[Literal["hill-climb", "fixed"], CONTINUES] = "hill-climb"
    """`hill-climb`: more requests in flight while that raises the throughput, fewer while that does not lower it, half
    as many after a failure. `fixed`: always `max_requests`."""
    hedge: Annotated[float, Range(least=0), CONTINUES] = 4.0
    """A request that takes longer than this multiple of the median is hedged: sent a second time, to another store
    where there is one; the first response wins. 0: never."""
    timeout_s: Annotated[float, Range(above=0), CONTINUES] = 60.0
    """Seconds without a response before a request is retried."""
    mirrors: Annotated[tuple[Mirror, ...], CONTINUES] = ()
    """Other places that hold some of the shards; each is asked as fast as it answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """An existing corpus of tokens, read where it lies. Nothing of what is trained on is copied or converted."""

    path: Annotated[str, CONTINUES]
    """Folder, file, glob or URL. Megatron-LM: the name without `.bin` and `.idx`, or a folder of such pairs; MDS and
    litdata: the folder of `index.json`; WebDataset and Parquet: files or their folder; a folder that `prepare` made. A
    run continues from a copy elsewhere."""
    name: str = "corpus"
    """Name of the source, for mixtures and reports. A folder that `prepare` made has its own names."""
    format: Literal["auto", "ropewalk", "megatron", "mds", "litdata", "webdataset", "parquet"] = "auto"
    """`auto` decides by what lies there."""
    column: str = ""
    """Which part of a sample holds the tokens, where that is not clear: column of MDS and Parquet, number of litdata's
    leaf, ending of WebDataset's files (`tokens.npy`, `json:KEY`)."""
    dtype: Literal["", "uint8", "uint16", "uint32", "int32", "int64"] = ""
    """Type of tokens in formats that do not tell: columns of `bytes` in MDS (int64 when empty), `.bin` files of
    WebDataset (uint16)."""
    weight: Annotated[float, Range(above=0)] | None = None
    """Share of the training mixture; when no corpus has one, they are mixed by their number of tokens."""
    validation_share: Annotated[float, Range(above=0, below=1)] = 0.01
    """The last documents of the corpus with this share of its tokens, at least one and at most 4 M tokens, are held
    out and copied. A folder that `prepare` made has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceSampling:
    """Sequences drawn by their loss, and a cache that holds those that are drawn most (iCache)."""

    memory_bytes: Annotated[int, Range(least=0)] = 256 << 20
    """Memory of each process for the most important sequences. They are drawn more often than others, each in
    proportion to its smoothed loss; all others are drawn alike. A loss counts 1 / (N p) times, where p is the
    probability of its sequence among N, so that the expected mean is the mean over the corpus. Besides, every sequence
    of the corpus takes about 1 KB of memory."""
    draws: Annotated[int, Range(least=0)] = 0
    """Sequences drawn between two looks at the losses; 0: as many as the corpus has. The first look knows no loss:
    every sequence comes once."""
    floor: Annotated[float, Range(above=0, most=1)] = 0.25
    """Share of the draws that are made at random from all sequences. No loss counts more than 1 / `floor` times."""
    smoothing: Annotated[float, Range(least=0, below=1)] = 0.7
    """Weight of the earlier losses of a sequence in its importance; 0: the last loss alone."""
    packages: str = ""
    """Folder on a local disk for packages of the other sequences, each read as one (dynamic packing); a sequence of a
    package in memory stands in for one that is not. Empty: in the run directory."""
    package_bytes: Annotated[int, Range(least=1)] = 4 << 20
    """Size of a package."""
    package_memory_bytes: Annotated[int, Range(least=0)] = 64 << 20
    """Memory of each process for packages; one is held in any case."""
    shared: str = ""
    """Folder through which runs on one corpus combine what is important to each: the mean of their ranks decides what
    is held, their own losses decide what they draw. Empty: this run alone."""
    job: Annotated[int, Range(least=0)] = 0
    """Number of this run among those that share the folder `shared`."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Contradictions among these settings."""
        if self.job and not self.shared:
            yield "job", "no folder is shared; name it in `shared`, or leave `job` out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Manifest -> the same batches in the same order, from any step."""

    corpus: tuple[Corpus, ...] = ()
    """Existing corpora to train on instead of what `prepare` makes; one `[[load.corpus]]` table each."""
    tokenizer: Annotated[str, CONTINUES] = ""
    """The `tokenizer.json` that the tokens of `corpus` were made with, or a folder that holds one. Folders that
    `prepare` made have their own."""
    sequence_length: Annotated[int, Range(least=8)] = 256
    """Tokens per sequence. With `train.start_from`, not set: that of the model to start from."""
    packing: Packing = "windows"
    """`windows`: the corpus as one stream, cut every `sequence_length` tokens, without padding. `best-fit`: whole
    documents packed into sequences (99.9 % full at 2,048), each with its own positions; longer documents are cut. With
    `model.documents = "separate"` packed documents do not attend to each other."""
    shuffle: Shuffle = "all"
    """`all`: every row of a source may follow every other. `blocks`: blocks of neighbouring rows are permuted, then
    the rows of some blocks among each other; reads stay together, for disks and remote stores that dislike jumps."""
    verify: Annotated[Literal["open", "off"], CONTINUES] = "open"
    """`open` checks every byte of the shards once when training starts (about 5 GB/s); `off` checks their footers
    only."""
    on_damage: Annotated[OnDamage, CONTINUES] = "stop"
    """Reaction to a wrong checksum of a shard. `stop`: the run ends with an error that names the shard, the bytes and
    the documents. `skip`: sequences that touch damaged bytes become padding with weight 0, and a warning counts them;
    all other sequences stay the same."""
    threads: Annotated[int, Range(least=1, most=64), CONTINUES] = 1
    """Threads that make batches ahead of the step. One makes 500 million tokens a second and more from memory; more
    help where shards are read from a store or compressed. Any number makes the same batches."""
    prefetch_bytes: Annotated[int, Range(least=0), CONTINUES] = 16 << 20
    """Batches prepared ahead of the step, in bytes of 2 or 4 per token; at least one batch, and at most 256."""
    cache: Annotated[Cache | None, CONTINUES] = None
    """Memory, disk and other nodes in front of shards that are not memory-mapped; shards on a local disk need none: the
    operating system's page cache serves them."""
    importance: ImportanceSampling | None = None
    """Draws sequences by their loss instead of each once per epoch. Costs nothing on the device; pays where reading is
    slow and the corpus is read many times."""
    media: tuple[Media, ...] = ()
    """Sources of images, for `ropewalk doctor data` and `ropewalk.load.media.pipeline.open_media`. Training reads
    tokens: a recipe with a source of images is not trained."""
    remote: Remote = field(default_factory=Remote)
    """How shards are read that cannot be memory-mapped."""
    autotune: Annotated[bool, CONTINUES] = False
    """Tunes `prefetch_bytes`, `threads` and `remote.max_requests` from measured stalls; reverts changes that do not
    help. Each change is an event with its gain."""
