"""The stages of prepare, from input files to a committed manifest.

    read, normalise, measure    chunk by chunk, in workers
    rules, duplicates, split    over all documents, on columns
    train the tokenizer         on a sample
    encode                      chunk by chunk, in workers
    shards, ledger, manifest    in canonical order

What a stage makes is committed under the hash of what it depends on (`stages`), so that a killed prepare continues and
a changed setting redoes only what depends on it. Chunks depend on the inputs alone and are joined in canonical order,
so that neither workers nor interruptions change a byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from ropewalk.base.files import committed_file
from ropewalk.base.progress import Progress, amount
from ropewalk.store.manifest import (
    Manifest,
    ShardEntry,
    SourceEntry,
    TokenizerEntry,
    describe_table,
    write_manifest,
)
from ropewalk.store.shards import TokenType, token_type

from . import faults, ledger, pack, tokenizer
from .chat import TEMPLATES, split_turns
from .chunks import Chunk, divide
from .columns import Mask
from .config import Prepare
from .corpus import first_fates, read_corpus
from .cuts import Spans
from .decide.equal import cut_pieces, remove_equals
from .decide.near import add_to_index, remove_near
from .decide.rules import apply_rules
from .decide.split import Division, close, reduced, split
from .decide.state import State
from .decide.substring import apply_repeats
from .draw import sample
from .encode import EncodeTask, choose_encoder, encode_chunk, encoders_of
from .encoders import REFERENCE
from .foreign import load_foreign
from .holdout import TRAIN, VALIDATION, Parts
from .measures import correcting, measuring
from .ngrams import index_shards
from .prune import write_used
from .samples import FILE as SAMPLES
from .samples import write_samples
from .screen import MeasureTask, ReadTask, measure_chunk, read_chunk
from .sources import InputFile
from .stages import filled, healed, key_of, read_artifact
from .texts import chosen_name, read_wanted
from .warm import groups, warm
from .workers import Workers, cores

TOKENIZER = "tokenizer.json"
TOKENIZER_VERSION = "tokenizer-1"
ENCODE_VERSION = "encode-1"
"""Parts of the names of files: raise them when the same inputs give other bytes."""

SPAWN_BYTES = 4_000_000
"""Smaller inputs are done in this process. Measured: two workers take 0.8 s to start, one core does 2 MB/s from file
to token (standard library, 2 cores shared with other work)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One folder to make."""

    settings: Prepare
    seed: int
    files: tuple[InputFile, ...]
    hash: str
    addition: str
    """Under which its documents are added to an index of near-duplicates, where the settings name one."""
    folder: Path
    stages: Path
    """Where results of stages lie, those of other jobs too."""
    progress: Progress
    recipe: str = ""
    """How commands in warnings name the recipe, where it is known."""

    @property
    def sources(self) -> list[str]:
        """The sources in the order of the recipe."""
        return [source.name for source in self.settings.sources]

    @property
    def chat_sources(self) -> tuple[str, ...]:
        """Sources whose documents are dialogues."""
        return tuple(source.name for source in self.settings.sources if source.format == "chat")


@dataclass(frozen=True, slots=True)
class Decided:
    """What becomes of every document."""

    state: State
    division: Division
    """What is trained on and what is held out."""
    masked: Spans
    """Spans that the loss does not count."""


def build(job: Job) -> Manifest:
    """Fills the folder and commits its manifest; every stage skips what an earlier attempt has committed, as long as it
    is what was written, and makes it again otherwise."""
    given = job.settings.tokenizer.file
    if given:
        # Before any work: a regular expression without end would meet the corpus only after all other stages.
        load_foreign(tokenizer.read(Path(given)), path=Path(given))
    return healed(lambda: _build(job), say=job.progress.say)


def _build(job: Job) -> Manifest:
    rules = job.settings.filter
    chunks = divide(job.files, stages=job.stages, measuring=measuring(rules), correcting=correcting(rules))
    with Workers(_processes(job, len(chunks))) as workers:
        ready = workers.start(warm, [(job.settings, group) for group in groups(job.settings)])
        workers.run("read", read_chunk, [ReadTask(chunk) for chunk in chunks], progress=job.progress)
        measures = [MeasureTask(chunk, rules, frozenset(job.chat_sources)) for chunk in chunks]
        job.progress.begin("load kernels", None, "")
        ready()
        job.progress.end()
        workers.run("measure", measure_chunk, measures, progress=job.progress)
        decided = _decide(job, chunks, workers)
        entry = _tokenizer(job, decided, workers)
        dtype = token_type(entry.vocabulary)
        choice = choose_encoder(
            job.folder / TOKENIZER, decided.state.texts, corpus_bytes=int(decided.state.fates.sizes.sum())
        )
        while True:
            encoding = _encode_tasks(job, decided, entry, choice.algorithm)
            workers.run("encode", encode_chunk, encoding, progress=job.progress)
            lengths = pack.lengths_and_bytes([task.target for task in encoding])[0]
            if (division := reduced(decided.state, decided.division, lengths)) is None:
                break
            decided = dataclasses.replace(decided, division=division)
    close(decided.state, decided.division, lengths)
    shards = _shards(job, decided, [task.target for task in encoding], dtype)
    index = _index(job, shards)
    encoders = encoders_of([task.target for task in encoding])
    if encoders != [choice.algorithm]:
        decided.state.warn(f"{choice.algorithm} gave other tokens than {REFERENCE}, which did those chunks again")
    entry = dataclasses.replace(entry, encoders=tuple(encoders), refused=choice.refused)
    state = decided.state
    ledger.write_ledger(
        job.folder,
        state.corpus,
        state.fates,
        split=decided.division.column(len(state.corpus)),
        parts=decided.division.parts,
    )
    ledger.write_statistics(job.folder, state.corpus)
    ledger.write_repeats(job.folder, state.repeats)
    texts = [chunk.texts for chunk in chunks]
    write_samples(job.folder, state.corpus, state.fates, texts, seed=job.seed)
    add_to_index(state, addition=job.addition)
    tables = [job.folder / name for name in (ledger.FILE, ledger.STATISTICS, ledger.REPEATED, SAMPLES)]
    manifest = Manifest(
        recipe_hash=job.hash,
        dtype=dtype,
        tokenizer=entry,
        sources=tuple(_sources(job, decided, shards)),
        shards=tuple(shards),
        warnings=tuple(state.warnings),
        ngrams=index,
        tables={path.name: describe_table(path) for path in tables if path.exists()},
    )
    write_used(job.stages, job.hash, workers.made)
    write_manifest(job.folder, manifest)
    return manifest


def _processes(job: Job, chunks: int) -> int:
    if sum(file.bytes for file in job.files) < SPAWN_BYTES:
        return 1
    return max(1, min(job.settings.workers or cores(), chunks))


def _decide(job: Job, chunks: Sequence[Chunk], workers: Workers) -> Decided:
    corpus = read_corpus(chunks)
    fates = first_fates(corpus, sources=job.sources, corrected=correcting(job.settings.filter) is not None)
    texts = [chunk.texts for chunk in chunks]
    state = State(job.settings, corpus, fates, texts, job.stages, workers, job.progress, job.recipe)
    # Now: whoever has nothing left, or hours to wait, should know.
    for line in faults.warnings(corpus.table, job.settings.sources):
        state.warn(line)
    duplicates, masked = job.settings.deduplicate, Spans.none()
    apply_rules(state)
    if duplicates.documents != "off":
        remove_equals(state)
    if duplicates.paragraphs:
        cut_pieces(state, "paragraphs")
    if duplicates.lines:
        cut_pieces(state, "lines")
    if duplicates.near.kind != "off":
        remove_near(state, addition=job.addition)
    if job.settings.deduplicate.substring.action != "off":
        masked = apply_repeats(state)
    return Decided(state, split(state, seed=job.seed), masked)


def _tokenizer(job: Job, decided: Decided, workers: Workers) -> TokenizerEntry:
    """Commits `tokenizer.json`: the given one as it is, or one trained on a sample of training documents."""
    given = job.settings.tokenizer.file
    content = tokenizer.read(Path(given)) if given else _trained(job, decided, workers)
    path = job.folder / TOKENIZER
    with committed_file(path) as file:
        file.write(content)
    loaded = tokenizer.load(path)
    return TokenizerEntry(
        file=TOKENIZER,
        checksum=xxhash.xxh3_64_hexdigest(content),
        vocabulary=tokenizer.vocabulary_size(loaded),
        end_of_text=tokenizer.end_of_text(loaded, path=Path(given) if given else path),
        chat=job.settings.chat.template if job.chat_sources else "",
    )


def _trained(job: Job, decided: Decided, workers: Workers) -> bytes:
    settings, corpus, fates = job.settings.tokenizer, decided.state.corpus, decided.state.fates
    trained_bytes = decided.division.trained_bytes(fates.sizes)
    candidates = np.flatnonzero(trained_bytes)
    hashes = corpus.hashes.take(pa.array(candidates))
    sizes = trained_bytes[candidates]
    chosen = np.zeros(len(corpus), bool)
    chosen[candidates[sample(hashes, sizes, limit_bytes=settings.train_bytes, seed=job.seed)]] = True
    markers = TEMPLATES[job.settings.chat.template].markers if job.chat_sources else ()
    parts = decided.division.parts
    trained_on = np.flatnonzero(~parts.held & chosen[parts.rows])
    # One document may have more than all that is asked for: then every second part of it, or every third, ...
    every = max(1, -(-int(trained_bytes[chosen].sum()) // settings.train_bytes))
    wanted = np.zeros(len(parts), bool)
    wanted[trained_on[::every]] = True
    cut = list(zip(parts.by_chunk(corpus.starts), parts.chosen(wanted).by_chunk(corpus.starts), strict=True))
    fed = [
        [chosen_name(texts, mask), *([mine.name] if len(all_parts) else [])]
        for (texts, mask, _), (all_parts, mine) in zip(decided.state.chunks(chosen), cut, strict=True)
        if mask.any()
    ]
    path = (
        job.stages / "tokenizer" / f"{key_of(TOKENIZER_VERSION, settings.kind, settings.vocab_size, markers, fed)}.json"
    )
    workers.made.add(path)
    if not path.exists():
        texts = _texts(job, decided.state, chosen, cut)
        trained = tokenizer.train(texts, vocabulary=settings.vocab_size, markers=markers, kind=settings.kind)
        job.progress.end(f"{trained.get_vocab_size()} tokens from {chosen.sum()} documents")
        with filled(path) as place:
            place.write_bytes(trained.to_str(pretty=True).encode())
    return read_artifact(path)


def _texts(job: Job, state: State, chosen: Mask, cut: Sequence[tuple[Parts, Parts]]) -> Iterator[str]:
    """The chosen documents; of those that are cut, chosen parts. `cut` has all parts of each chunk and the chosen."""
    fed = 0
    job.progress.begin("train tokenizer", int(state.fates.sizes[chosen].sum()), "B")
    for (texts, mask, size), (all_parts, parts) in zip(state.chunks(chosen), cut, strict=True):
        rows = iter(np.flatnonzero(mask).tolist())
        for ids, run in read_wanted(texts, mask):
            for name, text, row in zip(ids, run, rows, strict=False):
                if name.partition(":")[0] in job.chat_sources:
                    yield from (turn.content for turn in split_turns(text, document=name))
                elif (all_parts.rows == row).any():
                    mine, data = parts.chosen(parts.rows == row), text.encode()
                    spans = zip(mine.starts.tolist(), mine.stops.tolist(), strict=True)
                    yield from (data[start:stop].decode() for start, stop in spans)
                else:
                    yield text
        fed += size
        job.progress.advance(fed)


def _encode_tasks(job: Job, decided: Decided, entry: TokenizerEntry, encoder: str) -> list[EncodeTask]:
    by = (ENCODE_VERSION, entry.checksum, encoder, entry.chat, job.chat_sources)
    tasks = []
    starts = decided.state.corpus.starts
    masked, cut = decided.masked.by_chunk(starts), decided.division.parts.by_chunk(starts)
    chunks = decided.state.chunks(decided.state.fates.left)
    for (texts, wanted, size), spans, parts in zip(chunks, masked, cut, strict=True):
        name = key_of(*by, spans.name, chosen_name(texts, wanted), *([parts.name] if len(parts) else []))
        tasks.append(
            EncodeTask(
                texts=texts,
                wanted=wanted,
                bytes=size,
                tokenizer=job.folder / TOKENIZER,
                end_of_text=entry.end_of_text,
                dtype=token_type(entry.vocabulary),
                target=job.stages / "encode" / f"{name}.tokens",
                encoder=encoder,
                masked=spans,
                parts=parts,
                chat=entry.chat,
                chat_sources=job.chat_sources,
            )
        )
    return tasks


def _shards(job: Job, decided: Decided, tokens: Sequence[Path], dtype: TokenType) -> list[ShardEntry]:
    corpus = decided.state.corpus
    rows, held = decided.division.items()
    kept = pa.table(
        {
            "chunk": np.searchsorted(corpus.starts, rows, side="right") - 1,
            "source": corpus.table["source"].take(pa.array(rows)),
            "split": pa.array(np.where(held, VALIDATION, TRAIN), pa.string()),
        }
    )
    plans = pack.plan_shards(kept, sources=job.sources, tokens=tokens, shard_tokens=job.settings.shard_tokens)
    job.progress.begin("write shards", sum(plan.tokens for plan in plans), "tokens")
    entries: list[ShardEntry] = []
    for plan in plans:
        entries.append(
            pack.write_planned(
                plan, folder=job.folder, tokens=tokens, dtype=dtype, compression=job.settings.compression
            )
        )
        job.progress.advance(sum(entry.tokens for entry in entries))
    job.progress.end(f"{amount(sum(plan.tokens for plan in plans))} tokens in {len(plans)} shards")
    return entries


def _index(job: Job, shards: Sequence[ShardEntry]) -> str:
    """Commits the index of n-grams, if one is asked for; the name of its folder."""
    settings = job.settings.ngrams
    if settings.unit == "off":
        return ""
    with Workers(_processes(job, len(shards))) as workers:
        return index_shards(
            job.folder,
            shards,
            tokenizer=job.folder / TOKENIZER,
            unit=settings.unit,
            length=settings.length,
            workers=workers,
            progress=job.progress,
        ).name


def _sources(job: Job, decided: Decided, shards: Sequence[ShardEntry]) -> Iterator[SourceEntry]:
    for source in job.settings.sources:
        tokens = sum(shard.tokens for shard in shards if (shard.source, shard.split) == (source.name, "train"))
        yield SourceEntry(
            name=source.name,
            domain=source.domain or source.name,
            weight=float(tokens) if source.weight is None else source.weight,
            steps=decided.state.fates.counts(source.name),
        )
