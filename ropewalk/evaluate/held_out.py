"""Held-out documents of a run, shared by its evaluation tasks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.base.seeds import seed_for
from ropewalk.prepare.chat import jinja
from ropewalk.store.manifest import Manifest, SourceEntry, read_manifest
from ropewalk.store.shards import Shard

from .config import Evaluate
from .text import Detokenizer
from .text_encoder import TextEncoder


@dataclass(frozen=True, slots=True)
class Document:
    """One held-out document."""

    source: str
    domain: str
    tokens: np.ndarray
    """As in the shard; the last one is the end of text."""
    data: bytes
    """The text of the other tokens."""


class HeldOut:
    """What tasks are made with: the settings, the tokenizer, and the validation split of a prepared corpus if there is
    one. All is read on first use, so that tasks that need neither corpus nor tokenizer work without."""

    def __init__(
        self,
        folder: Path | None,
        settings: Evaluate,
        *,
        seed: int,
        progress: Progress | None = None,
        texts: TextEncoder | None = None,
        chat_template: str = "",
    ) -> None:
        """`folder` is the prepared corpus; without one, `texts` and `chat_template` (Jinja) are those of the model."""
        self.settings, self.seed, self.progress = settings, seed, progress or Silent()
        self.folder, self._texts, self._chat_template = folder, texts, chat_template

    @functools.cached_property
    def texts(self) -> TextEncoder:
        """How texts become tokens."""
        if self._texts is not None:
            return self._texts
        folder, entry = self._corpus, self._manifest.tokenizer
        return TextEncoder(Detokenizer(folder, entry), entry.end_of_text)

    @property
    def detokenizer(self) -> Detokenizer:
        """Converts between tokens and text."""
        return self.texts.detokenizer

    @property
    def end_of_text(self) -> int:
        """The token that ends a document."""
        return self.texts.end_of_text

    @property
    def _corpus(self) -> Path:
        if self.folder is None:
            raise UserError(
                "this model is evaluated without a corpus, which tasks over held-out documents need; choose others: "
                '`evaluate.tasks=["suite:all"]`, or a name of `ropewalk evaluate tasks`'
            )
        return self.folder

    @functools.cached_property
    def _manifest(self) -> Manifest:
        return read_manifest(self._corpus)

    @functools.cached_property
    def documents(self) -> list[Document]:
        """Documents of at most `evaluate.max_bytes` in total; selected on first use."""
        found = held_out_documents(
            self._corpus, self._manifest, self.detokenizer, max_bytes=self.settings.max_bytes, seed=self.seed
        )
        measured = {document.source for document in found}
        absent = [source.name for source in self._manifest.sources if source.name not in measured]
        if absent:
            self.progress.say(
                f"not measured: {', '.join(absent)} (no held-out document, or none that fits into its share of "
                f"{self.settings.max_bytes} bytes; see `evaluate.max_bytes` and `prepare.validation_share`)"
            )
        return found

    @functools.cached_property
    def chat_template(self) -> str:
        """The model's chat template as Jinja; empty if it has none: its corpus has no dialogues."""
        name = "" if self.folder is None else self._manifest.tokenizer.chat
        return jinja(name) if name else self._chat_template


@dataclass(frozen=True, slots=True)
class _Candidate:
    shard: Shard
    index: int
    size: int


def held_out_documents(
    folder: Path, manifest: Manifest, detokenizer: Detokenizer, *, max_bytes: int, seed: int
) -> list[Document]:
    """Samples whole validation documents of at most `max_bytes` bytes in total, each source in proportion to its bytes.

    The order is a hash of (seed, document id) and does not depend on shard boundaries. Documents above the rest of
    their source's budget are skipped, so very long documents are underrepresented. If none fits, the shortest is used.
    """
    candidates = {source.name: _candidates(folder, manifest, source, detokenizer) for source in manifest.sources}
    sizes = {name: sum(c.size for c in found) for name, found in candidates.items()}
    total = sum(sizes.values())
    share = min(1.0, max_bytes / max(1, total))
    chosen = [
        _document(source, candidate, detokenizer)
        for source in manifest.sources
        for candidate in _fitting(_shuffled(candidates[source.name], seed), int(sizes[source.name] * share))
    ]
    # A corpus of few long documents: one over the limit is better than none after hours of training.
    return chosen or [_shortest(folder, manifest, candidates, detokenizer)]


def _candidates(folder: Path, manifest: Manifest, source: SourceEntry, detokenizer: Detokenizer) -> list[_Candidate]:
    found = []
    for entry in manifest.shards_of("validation", source.name):
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        shard.verify()
        sizes = detokenizer.document_bytes(shard, entry).tolist()
        found += [_Candidate(shard, index, size) for index, size in enumerate(sizes)]
    return found


def _shuffled(candidates: list[_Candidate], seed: int) -> list[_Candidate]:
    return sorted(candidates, key=lambda c: seed_for(seed, "held-out", int(c.shard.ids[c.index])))


def _fitting(candidates: Iterable[_Candidate], budget: int) -> Iterator[_Candidate]:
    for candidate in candidates:
        if candidate.size <= budget:
            budget -= candidate.size
            yield candidate


def _shortest(
    folder: Path, manifest: Manifest, candidates: dict[str, list[_Candidate]], detokenizer: Detokenizer
) -> Document:
    found = [(c.size, source.name, c, source) for source in manifest.sources for c in candidates[source.name]]
    if not found:
        raise DataError(f"{folder}: there is no validation document; raise `prepare.validation_share`")
    _, _, candidate, source = min(found, key=lambda item: item[:2])
    return _document(source, candidate, detokenizer)


def _document(source: SourceEntry, candidate: _Candidate, detokenizer: Detokenizer) -> Document:
    tokens = np.array(candidate.shard.document(candidate.index), np.int64)
    return Document(source.name, source.domain or source.name, tokens, detokenizer.data(tokens[:-1]))
