"""The steps of prepare, from input files to a committed manifest.

    read, normalise, filter     chunk by chunk, in workers
    deduplicate, split          over all chunks
    train the tokenizer         on a sample
    encode                      chunk by chunk, in workers
    shards, ledger, manifest    in canonical order

What a step makes is committed in the folder `work`, so that a killed prepare continues. Chunks depend on the
inputs alone and are joined in canonical order, so that neither workers nor interruptions change a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ropewalk.base.files import committed_file
from ropewalk.base.progress import Progress, amount
from ropewalk.store.manifest import Manifest, ShardEntry, SourceEntry, TokenizerEntry, write_manifest
from ropewalk.store.shards import TokenType, token_type

from . import deduplicate, ledger, pack, tokenizer
from .config import Prepare
from .decide import Decided, decide
from .draw import Mask, sample
from .encode import EncodeTask, encode_chunk
from .screen import Chunk, divide, read_documents, read_screened, screen
from .sources import InputFile
from .workers import Workers, cores

WORK = "work"
TOKENIZER = "tokenizer.json"

SPAWN_BYTES = 4_000_000
"""Smaller inputs are done in this process. Measured: two workers take 0.8 s to start, one core does 2 MB/s from file
to token (standard library, 2 cores shared with other work)."""

CHUNK_BYTES = 2_000_000
"""Input in one chunk; more for a corpus that would fill more than MOST_CHUNKS."""

MOST_CHUNKS = 4000


@dataclass(frozen=True, slots=True)
class Job:
    """One folder to make."""

    settings: Prepare
    seed: int
    files: tuple[InputFile, ...]
    hash: str
    folder: Path
    progress: Progress

    @property
    def work(self) -> Path:
        """Where results wait for the next step."""
        return self.folder / WORK


def build(job: Job) -> Manifest:
    """Fills the folder and commits its manifest; every step skips what an earlier attempt has committed."""
    chunks = _chunks(job)
    with Workers(_processes(job, len(chunks))) as workers:
        _run(job, "read and filter", screen, chunks, workers)
        decided = decide(read_screened(job.work, len(chunks)), job.settings, seed=job.seed)
        entry = _tokenizer(job, decided, len(chunks))
        dtype = token_type(entry.vocabulary)
        _run(job, "encode", encode_chunk, _encode_tasks(job, decided, entry, len(chunks)), workers)
    shards = _shards(job, decided, dtype)
    ledger.write_ledger(job.folder, decided.rows)
    manifest = Manifest(
        recipe_hash=job.hash,
        dtype=dtype,
        tokenizer=entry,
        sources=tuple(_sources(job, decided, shards)),
        shards=tuple(shards),
    )
    write_manifest(job.folder, manifest)
    return manifest


def _chunks(job: Job) -> list[Chunk]:
    total = sum(file.bytes for file in job.files)
    limit = max(CHUNK_BYTES, total // MOST_CHUNKS)
    return divide(job.files, work=job.work, filter=job.settings.filter, limit_bytes=limit)


def _processes(job: Job, chunks: int) -> int:
    if sum(file.bytes for file in job.files) < SPAWN_BYTES:
        return 1
    return max(1, min(job.settings.workers or cores(), chunks))


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...
    @property
    def done(self) -> bool: ...


_Task = TypeVar("_Task", bound=_Sized)


def _run(job: Job, title: str, function: Callable[[_Task], _Task], tasks: Sequence[_Task], workers: Workers) -> None:
    """Does the tasks that no earlier attempt has done, and reports their bytes."""
    ahead = [task for task in tasks if not task.done]
    total = sum(task.bytes for task in tasks)
    done = total - sum(task.bytes for task in ahead)
    job.progress.begin(title, total, "B")
    job.progress.advance(done)
    for task in workers.map(function, ahead):
        done += task.bytes
        job.progress.advance(done)
    job.progress.end(amount(total, "B"))


def _tokenizer(job: Job, decided: Decided, chunks: int) -> TokenizerEntry:
    """Commits `tokenizer.json`: the given one as it is, or one trained on a sample of training documents."""
    given = job.settings.tokenizer.file
    path = job.work / TOKENIZER
    if not path.exists():
        _commit(path, tokenizer.read(Path(given)) if given else _trained(job, decided, chunks))
    content = tokenizer.read(path)
    loaded = tokenizer.load(path)
    end = tokenizer.end_of_text(loaded, path=Path(given) if given else path)
    _commit(job.folder / TOKENIZER, content)
    return TokenizerEntry(
        file=TOKENIZER,
        checksum=xxhash.xxh3_64_hexdigest(content),
        vocabulary=tokenizer.vocabulary_size(loaded),
        end_of_text=end,
    )


def _trained(job: Job, decided: Decided, chunks: int) -> bytes:
    rows, settings = decided.rows, job.settings.tokenizer
    candidates = np.flatnonzero(pc.fill_null(pc.equal(rows["split"], "train"), False).to_numpy())
    hashes = rows["hash"].combine_chunks().take(pa.array(candidates))
    sizes = rows["bytes"].to_numpy()[candidates]
    chosen = np.zeros(len(rows), bool)
    chosen[candidates[sample(hashes, sizes, limit_bytes=settings.train_bytes, seed=job.seed)]] = True
    texts = _texts(job, decided, chosen, chunks)
    trained = tokenizer.train(texts, vocabulary=settings.vocabulary)
    job.progress.end(f"{trained.get_vocab_size()} tokens from {chosen.sum()} documents")
    return trained.to_str(pretty=True).encode()


def _texts(job: Job, decided: Decided, chosen: Mask, chunks: int) -> Iterator[str]:
    fed = np.cumsum(decided.bytes_by_chunk(chosen, chunks))
    job.progress.begin("train tokenizer", int(fed[-1]), "B")
    for index, mask in enumerate(decided.by_chunk(chosen, chunks)):
        for _, texts in read_documents(job.work, index, mask):
            yield from texts
        job.progress.advance(int(fed[index]))


def _encode_tasks(job: Job, decided: Decided, entry: TokenizerEntry, chunks: int) -> list[EncodeTask]:
    kept = decided.kept
    sizes = decided.bytes_by_chunk(kept, chunks)
    return [
        EncodeTask(
            index=index,
            work=job.work,
            wanted=mask,
            bytes=int(sizes[index]),
            tokenizer=job.work / TOKENIZER,
            end_of_text=entry.end_of_text,
            dtype=token_type(entry.vocabulary),
        )
        for index, mask in enumerate(decided.by_chunk(kept, chunks))
    ]


def _shards(job: Job, decided: Decided, dtype: TokenType) -> list[ShardEntry]:
    plans = pack.plan_shards(
        decided.rows.filter(pa.array(decided.kept)),
        sources=[source.name for source in job.settings.sources],
        work=job.work,
        shard_tokens=job.settings.shard_tokens,
    )
    job.progress.begin("write shards", sum(plan.tokens for plan in plans), "tokens")
    entries: list[ShardEntry] = []
    for plan in plans:
        entries.append(pack.write_planned(plan, folder=job.folder, work=job.work, dtype=dtype))
        job.progress.advance(sum(entry.tokens for entry in entries))
    job.progress.end(f"{amount(sum(plan.tokens for plan in plans))} tokens in {len(plans)} shards")
    return entries


def _sources(job: Job, decided: Decided, shards: Sequence[ShardEntry]) -> Iterator[SourceEntry]:
    steps = [step for step in ledger.STEPS if step != deduplicate.STEP or job.settings.deduplicate == "exact"]
    for source in job.settings.sources:
        tokens = sum(shard.tokens for shard in shards if (shard.source, shard.split) == (source.name, "train"))
        yield SourceEntry(
            name=source.name,
            domain=source.domain or source.name,
            weight=float(tokens) if source.weight is None else source.weight,
            steps=ledger.count_steps(decided.rows, source.name, steps=steps),
        )


def _commit(path: Path, content: bytes) -> None:
    with committed_file(path) as file:
        file.write(content)
