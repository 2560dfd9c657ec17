"""Held-out text -> what the model is worth: loss, bits per byte beside zlib and xz, accuracy, samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.model.decoder import Decoder
from ropewalk.parallel.executor import Executor
from ropewalk.store.manifest import Manifest, read_manifest

from .compression import Compressed, compress
from .config import Evaluate
from .held_out import Document, held_out_documents
from .intervals import Interval, intervals
from .results import write_results
from .samples import Sample, draw_samples, rate
from .score import DocumentScores, score_documents
from .text import Detokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainResult:
    """What was measured on the documents of one domain."""

    bits_per_byte: float
    accuracy: float
    bytes: int
    zlib_bits_per_byte: float
    xz_bits_per_byte: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What was measured of one document. Two models are compared best by the documents that both have read."""

    key: str
    """xxh3-64 of its text, the same whatever the tokenizer."""
    domain: str
    bytes: int
    tokens: int
    nats: float
    correct: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was measured on held-out text."""

    tokens: int
    """Tokens predicted, end-of-text tokens included."""
    bytes: int
    """UTF-8 bytes of the text."""
    documents: int
    loss: float
    """Nats a token."""
    bits_per_byte: float
    """All nats, those of the end-of-text tokens too, as bits, over the bytes of the text."""
    zlib_bits_per_byte: float
    """The same bytes under zlib, the documents of each domain joined."""
    xz_bits_per_byte: float
    accuracy: float
    """Share of tokens that were the model's first choice."""
    perplexity: float
    """e to the loss."""
    parse_rate: float | None
    """Share of completions in domain `code` accepted as Python (evaluate/samples.py says how); None without any."""
    parse_rate_reference: float | None
    """The same of the true continuations: what a perfect model reaches."""
    domains: dict[str, DomainResult]
    intervals: Mapping[str, Interval] | None
    """95 % of bits per byte, loss and accuracy over documents (evaluate/intervals.py); None of one document."""
    samples: list[Sample]
    scores: list[Scored]
    """Of each document."""


def evaluate(
    executor: Executor,
    model: Decoder,
    *,
    folder: Path,
    settings: Evaluate,
    sequence_length: int,
    rows: int,
    seed: int,
    progress: Progress | None = None,
) -> Evaluation:
    """Measures a model on held-out documents of the prepared corpus in `folder`: `executor` scores, `model` completes.
    All ranks must call."""
    evaluating = Evaluating(folder, settings, seed=seed, progress=progress)
    evaluating.score(executor, sequence_length=sequence_length, rows=rows)
    evaluating.sample(model)
    return evaluating.result()


class Evaluating:
    """An evaluation in two parts, scores and samples, so that what computes the first can be freed before the second.
    All ranks must take both."""

    def __init__(self, folder: Path, settings: Evaluate, *, seed: int, progress: Progress | None = None) -> None:
        """Chooses held-out documents of the prepared corpus in `folder`."""
        self._settings, self._seed, self._progress = settings, seed, progress or Silent()
        manifest = read_manifest(folder)
        self._end_of_text = manifest.tokenizer.end_of_text
        self._detokenizer = Detokenizer(folder, manifest.tokenizer)
        self._documents = held_out_documents(
            folder, manifest, self._detokenizer, max_bytes=settings.max_bytes, seed=seed
        )
        _name_absent(manifest, self._documents, settings.max_bytes, self._progress)
        self._scores: DocumentScores | None = None
        self._samples: list[Sample] = []

    def score(self, executor: Executor, *, sequence_length: int, rows: int) -> None:
        """Loss and accuracy of the documents, `rows` rows of `sequence_length` tokens at a time."""
        self._scores = score_documents(
            executor,
            [document.tokens for document in self._documents],
            sequence_length=sequence_length,
            rows=rows,
            end_of_text=self._end_of_text,
            progress=self._progress,
        )

    def sample(self, model: Decoder | Executor) -> None:
        """Completions of the beginnings of some documents."""
        self._progress.begin("sample", None, "completions")
        self._samples = draw_samples(
            model,
            self._documents,
            self._detokenizer,
            settings=self._settings,
            end_of_text=self._end_of_text,
            seed=self._seed,
        )
        self._progress.end()

    def result(self) -> Evaluation:
        """What was measured."""
        assert self._scores is not None, "scores come first"
        return _evaluation(self._documents, self._scores, self._samples)


def write_evaluation(run: Path, evaluation: Evaluation, *, step: int) -> None:
    """Commits `evaluation/results.json`, `evaluation/documents.jsonl` and `samples.jsonl` in the run directory."""
    results = dataclasses.asdict(evaluation)
    samples, scores = results.pop("samples"), results.pop("scores")
    write_results(run, {"step": step, **results}, samples, scores)


def _name_absent(manifest: Manifest, documents: list[Document], max_bytes: int, progress: Progress) -> None:
    measured = {document.source for document in documents}
    absent = [source.name for source in manifest.sources if source.name not in measured]
    if absent:
        progress.say(
            f"not measured: {', '.join(absent)} (no held-out document, or none that fits into its share of {max_bytes} "
            "bytes; see `evaluate.max_bytes` and `prepare.validation_share`)"
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """What is added up over documents, and over domains."""

    log_probability: float
    tokens: int
    correct: int
    bytes: int
    compressed: Compressed

    def domain_result(self) -> DomainResult:
        return DomainResult(
            bits_per_byte=-self.log_probability / math.log(2) / self.bytes,
            accuracy=self.correct / self.tokens,
            bytes=self.bytes,
            zlib_bits_per_byte=self.compressed.zlib / self.bytes,
            xz_bits_per_byte=self.compressed.xz / self.bytes,
        )


def _evaluation(documents: list[Document], scores: DocumentScores, samples: list[Sample]) -> Evaluation:
    names = np.array([document.domain for document in documents])
    parts = {str(name): _domain_sums(documents, scores, names == name) for name in np.unique(names)}
    whole = _total(list(parts.values()))
    loss = -whole.log_probability / whole.tokens
    perplexity = float(np.exp(loss))
    if not math.isfinite(perplexity):
        raise UserError(
            f"the model gives held-out text a loss of {loss}: it has diverged; evaluate an earlier checkpoint"
        )
    return Evaluation(
        **dataclasses.asdict(whole.domain_result()),
        tokens=whole.tokens,
        documents=len(documents),
        loss=loss,
        perplexity=perplexity,
        parse_rate=rate([sample.parses for sample in samples]),
        parse_rate_reference=rate([sample.parses_reference for sample in samples]),
        domains={name: part.domain_result() for name, part in parts.items()},
        intervals=intervals(
            -scores.log_probabilities,
            sizes=[len(document.data) for document in documents],
            tokens=scores.tokens,
            correct=scores.correct,
        ),
        samples=samples,
        scores=[
            Scored(
                key=xxhash.xxh3_64_hexdigest(document.data),
                domain=document.domain,
                bytes=len(document.data),
                tokens=int(scores.tokens[index]),
                nats=-float(scores.log_probabilities[index]),
                correct=int(scores.correct[index]),
            )
            for index, document in enumerate(documents)
        ],
    )


def _domain_sums(documents: list[Document], scores: DocumentScores, here: np.ndarray) -> _Sums:
    texts = [documents[index].data for index in np.flatnonzero(here)]
    return _Sums(
        log_probability=float(scores.log_probabilities[here].sum()),
        tokens=int(scores.tokens[here].sum()),
        correct=int(scores.correct[here].sum()),
        bytes=sum(map(len, texts)),
        compressed=compress(texts),
    )


def _total(parts: list[_Sums]) -> _Sums:
    return _Sums(
        log_probability=math.fsum(part.log_probability for part in parts),
        tokens=sum(part.tokens for part in parts),
        correct=sum(part.correct for part in parts),
        bytes=sum(part.bytes for part in parts),
        compressed=Compressed(
            zlib=sum(part.compressed.zlib for part in parts), xz=sum(part.compressed.xz for part in parts)
        ),
    )
