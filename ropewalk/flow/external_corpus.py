"""Adopts existing token corpora: a manifest refers to them, and training reads them in place.

Only held-out documents, the last few of a corpus, are copied: evaluation needs whole documents, so each gets an
end-of-text token if it has none, and its bytes are counted. Nothing else is copied or converted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import ConfigError, DamagedFile, DataError, Problem
from ropewalk.base.files import committed_file, locked
from ropewalk.base.progress import Progress
from ropewalk.config.write import plain
from ropewalk.load.config import Corpus, Load
from ropewalk.load.references import ReferencedTokens
from ropewalk.load.remote import small_files
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.byte_level import byte_table
from ropewalk.prepare.pipeline import Prepared
from ropewalk.store.foreign.corpora import Format, absolute, corpus_files, detect, read_prepared, scan
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import (
    Manifest,
    ShardEntry,
    SourceEntry,
    StepCount,
    TokenizerEntry,
    check_tokenizer,
    read_manifest,
    write_manifest,
)
from ropewalk.store.origin import Origin, is_url
from ropewalk.store.references import Catalogue, write_references
from ropewalk.store.shards import Run, Shard, TokenType, Written, document_key, token_type, write_runs

from .run_stages import fingerprint

VERSION = "adopt-1"
"""Part of the hash; increment when the same corpora and settings produce another manifest."""
MOST_HELD_OUT = 4_000_000
"""Maximum held-out tokens: enough for a precise validation loss, and quick to copy."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """The corpora to refer to, and the hash that names them."""

    formats: tuple[Format, ...]
    hash: str
    """Hash of settings and contents; independent of where the files are."""
    place: str
    """Hash that includes the paths of the files; the name of the folder."""


def plan_adoption(load: Load, *, origin: Origin | None = None) -> Adoption:
    """The formats of the corpora and the hash of everything the manifest depends on. Reads indices and file sizes."""
    origin = origin or small_files(load.remote)
    formats = tuple(
        detect(absolute(corpus.path), origin=origin) if corpus.format == "auto" else corpus.format
        for corpus in load.corpus
    )
    content = [
        (dataclasses.replace(corpus, path=""), corpus_files(absolute(corpus.path), format, origin=origin))
        for corpus, format in zip(load.corpus, formats, strict=True)
    ]
    parts = {
        "version": VERSION,
        "corpora": [(plain(settings), files) for settings, files in content],
        "tokenizer": xxhash.xxh3_128_hexdigest(tokenizers.read(Path(load.tokenizer))) if load.tokenizer else "",
    }
    places = [absolute(corpus.path) for corpus in load.corpus]
    return Adoption(formats, fingerprint(parts)[:16], fingerprint([parts, places])[:16])


def adopt(load: Load, *, root: Path, adoption: Adoption, progress: Progress, origin: Origin | None = None) -> Prepared:
    """Writes the manifest of these corpora to a folder below `root`, unless it exists undamaged."""
    folder = root / adoption.place
    found = finished(folder, expected=adoption.hash)
    if found is not None:
        return Prepared(folder, found, reused=True)
    with locked(folder, wait=progress.say):
        found = finished(folder, expected=adoption.hash, say=lambda text: progress.say(f"{text}; it is made anew"))
        if found is not None:
            return Prepared(folder, found, reused=True)
        manifest = _Adopting(load, folder, adoption, progress, origin or small_files(load.remote)).manifest()
        write_manifest(folder, manifest)
    return Prepared(folder, manifest, reused=False)


def check_mixtures(manifest: Manifest, mixtures: dict[str, Any]) -> None:
    """Raises ConfigError for mixtures that name unknown sources; `mixtures` by the key of their table."""
    known = [source.name for source in manifest.sources]
    problems = [
        Problem(f"{key}.{index}.source", f'no source "{share.source}"', f"there are {', '.join(known)}")
        for key, mixture in mixtures.items()
        for index, share in enumerate(mixture)
        if share.source not in known
    ]
    if problems:
        raise ConfigError(problems)


class _Adopting:
    """Adopts the corpora of a recipe."""

    def __init__(self, load: Load, folder: Path, adoption: Adoption, progress: Progress, origin: Origin) -> None:
        self._load, self._folder, self._adoption = load, folder, adoption
        self._progress, self._origin = progress, origin
        self._prepared = [
            read_prepared(absolute(corpus.path), origin=origin) if format == "ropewalk" else None
            for corpus, format in zip(load.corpus, adoption.formats, strict=True)
        ]
        self._tokenizer = self._adopt_tokenizer()
        self._dtype: TokenType = token_type(self._tokenizer.vocabulary)
        path = folder / self._tokenizer.file
        self._bytes = _TextBytes(tokenizers.load(path))

    def manifest(self) -> Manifest:
        sources: list[SourceEntry] = []
        shards: list[ShardEntry] = []
        for corpus, format, prepared in zip(self._load.corpus, self._adoption.formats, self._prepared, strict=True):
            if prepared is not None:
                entries = list(self._referred(absolute(corpus.path), prepared))
                sources += self._weighted(corpus, prepared)
            else:
                entries = self._catalogued(corpus, format)
                sources.append(_source(corpus, entries))
            shards += entries
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(
                f"two corpora of `load.corpus` have a source named {', '.join(twice)}; give the corpora other names"
            )
        return Manifest(
            recipe_hash=self._adoption.hash,
            dtype=self._dtype,
            tokenizer=self._tokenizer,
            sources=tuple(sources),
            shards=tuple(shards),
        )

    def _adopt_tokenizer(self) -> TokenizerEntry:
        """Copies the tokenizer, which all corpora share."""
        if self._load.tokenizer:
            content, chat = tokenizers.read(Path(self._load.tokenizer)), ""
        else:
            content, chat = self._own_tokenizer()
        checksum = xxhash.xxh3_64_hexdigest(content)
        for corpus, prepared in zip(self._load.corpus, self._prepared, strict=True):
            if prepared is not None and prepared.tokenizer.checksum != checksum:
                raise DataError(
                    f"{corpus.path}: was prepared with another tokenizer than the rest of `load.corpus`; train on "
                    "corpora of one tokenizer"
                )
            chat = prepared.tokenizer.chat if prepared is not None else chat
        path = self._folder / tokenizers.FILE
        with committed_file(path) as file:
            file.write(content)
        tokenizer = tokenizers.load(path)
        return TokenizerEntry(
            file=path.name,
            checksum=checksum,
            vocabulary=tokenizers.vocabulary_size(tokenizer),
            end_of_text=tokenizers.end_of_text(tokenizer, path=path),
            chat=chat,
        )

    def _own_tokenizer(self) -> tuple[bytes, str]:
        for corpus, prepared in zip(self._load.corpus, self._prepared, strict=True):
            if prepared is not None:
                place = f"{absolute(corpus.path)}/{prepared.tokenizer.file}"
                return self._origin.read(place), prepared.tokenizer.chat
        raise ConfigError(
            [Problem("load.tokenizer", "these corpora have no tokenizer of their own", "name their tokenizer.json")]
        )

    def _weighted(self, corpus: Corpus, prepared: Manifest) -> Iterator[SourceEntry]:
        """The sources of a prepared folder. Next to other corpora, they divide its weight in the proportions of its
        mixture."""
        if corpus.weight is None and len(self._load.corpus) == 1:
            yield from prepared.sources
            return
        whole = float(prepared.tokens("train")) if corpus.weight is None else corpus.weight
        total = sum(source.weight for source in prepared.sources)
        for source in prepared.sources:
            yield dataclasses.replace(source, weight=whole * source.weight / total)

    def _referred(self, place: str, prepared: Manifest) -> Iterator[ShardEntry]:
        """The shards of a prepared folder by absolute path; held-out shards behind a URL are copied."""
        for entry in prepared.shards:
            file = entry.file if is_url(entry.file) or Path(entry.file).is_absolute() else f"{place}/{entry.file}"
            if is_url(file) and entry.split == "validation":
                with committed_file(self._folder / Path(entry.file).name) as copy:
                    copy.write(self._origin.read(file))
                file = Path(entry.file).name
            yield dataclasses.replace(entry, file=file)

    def _catalogued(self, corpus: Corpus, format: Format) -> list[ShardEntry]:
        """References to the training documents of another program's corpus, and a copy of the held-out ones."""
        self._progress.say(f"{corpus.name}: scanning {corpus.path} ({format})")
        found = scan(corpus.path, format=format, origin=self._origin, column=corpus.column, dtype=corpus.dtype)
        catalogue = dataclasses.replace(found, vocabulary=self._tokenizer.vocabulary)
        split = _first_held_out(catalogue.length, corpus.validation_share)
        if split < 1:
            raise DataError(
                f"{corpus.path}: {len(catalogue)} documents of {catalogue.tokens} tokens; at least two are needed, the "
                "last is held out"
            )
        name = f"{corpus.name}-train-00000.references"
        trained = write_references(self._folder / name, catalogue.part(0, split))
        held_out = self._hold_out(corpus, catalogue.part(split, len(catalogue)), first=split)
        self._progress.say(
            f"{corpus.name}: {trained.documents} documents of {trained.tokens} tokens, "
            f"{held_out.documents} documents of {held_out.tokens} tokens held out"
        )
        return [_entry(name, corpus, trained), held_out]

    def _hold_out(self, corpus: Corpus, catalogue: Catalogue, *, first: int) -> ShardEntry:
        source = ReferencedTokens(catalogue, fetch=self._origin)
        tokens = source.read(np.zeros(1, np.int64), np.array([catalogue.tokens], np.int32))
        documents = np.split(tokens, np.cumsum(catalogue.length)[:-1])
        end = np.array([self._tokenizer.end_of_text], self._dtype)
        closed = [d if len(d) and d[-1] == end[0] else np.concatenate([d, end]) for d in documents]
        sizes = np.array([self._bytes.of(document[:-1]) for document in closed], np.int64)
        keys = [document_key(f"{corpus.name}:{first + number}") for number in range(len(closed))]
        lengths = np.array([len(document) for document in closed], np.int64)
        run = Run(np.array(keys, np.uint64), lengths, np.concatenate(closed), None, sizes)
        name = f"{corpus.name}-validation-00000.tokens"
        written = write_runs(self._folder / name, [run], dtype=self._dtype)
        return dataclasses.replace(
            _entry(name, corpus, written), split="validation", kind="tokens", text_bytes=int(sizes.sum())
        )


class _TextBytes:
    """UTF-8 bytes of the text of tokens, as evaluation counts them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        table = byte_table(tokenizer)
        self._sizes = None if table is None else np.array([len(data) for data in table], np.int64)

    def of(self, tokens: npt.NDArray[Any]) -> int:
        if self._sizes is not None:
            return int(self._sizes[tokens].sum())
        return len(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False).encode())


def _first_held_out(lengths: npt.NDArray[np.int64], share: float) -> int:
    """Index of the first held-out document: the last ones with `share` of the tokens are held out, at least one, and at
    most MOST_HELD_OUT tokens unless a single document has more."""
    behind = np.cumsum(lengths[::-1])
    wanted = min(share * float(behind[-1]), MOST_HELD_OUT) if len(behind) else 0.0
    return len(lengths) - int(np.searchsorted(behind, wanted, side="left")) - 1


def _entry(file: str, corpus: Corpus, written: Written) -> ShardEntry:
    return ShardEntry(
        file=file,
        source=corpus.name,
        split="train",
        documents=written.documents,
        tokens=written.tokens,
        text_bytes=0,
        file_bytes=written.bytes,
        checksum=written.checksum,
        kind="references",
    )


def _source(corpus: Corpus, entries: list[ShardEntry]) -> SourceEntry:
    documents = sum(entry.documents for entry in entries)
    tokens = sum(entry.tokens for entry in entries if entry.split == "train")
    step = StepCount(
        step="read", documents_in=documents, documents_out=documents, bytes_in=0, bytes_out=0, removed={}, edited={}
    )
    weight = float(tokens) if corpus.weight is None else corpus.weight
    return SourceEntry(name=corpus.name, domain=corpus.name, weight=weight, steps=(step,))


def finished(
    folder: Path, *, expected: str | None = None, say: Callable[[str], None] = lambda text: None
) -> Manifest | None:
    """The manifest if it has the `expected` hash and the files beside it are whole; else None, after passing the fault
    to `say`. The corpora themselves are checked when they are opened."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(folder)
        check_tokenizer(folder, manifest)
    except DamagedFile as error:
        say(error.fault)
        return None
    if expected is not None and manifest.recipe_hash != expected:
        say(f"{folder / MANIFEST}: it is sound, but it is that of other corpora")
        return None
    try:
        for entry in manifest.shards:
            if not is_url(entry.file) and entry.kind == "tokens":
                Shard(folder / entry.file, checksum=entry.checksum)
    except DataError as error:
        say(error.fault if isinstance(error, DamagedFile) else str(error))
        return None
    return manifest
