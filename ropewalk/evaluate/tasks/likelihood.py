"""The task `held-out`: bits per byte beside zlib and xz, loss, perplexity and token accuracy of held-out documents."""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE, Metric

from ..intervals import Interval, intervals
from ..task import Likelihood, Rolling, ScoredDocument, Task

_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda data: zlib.compress(data, 9),
    "xz": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
}


def compressed_bits(documents: Iterable[bytes]) -> dict[str, int]:
    """Bits that zlib (level 9) and xz (preset 9, extreme) need for the documents joined into one text.

    Joining favours the compressors: they learn across documents, pay for one header and do not encode where documents
    end, while the model reads each document from an empty context and pays for its end.
    """
    text = b"".join(documents)
    return {name: 8 * len(compress(text)) for name, compress in _COMPRESSORS.items()}


class HeldOutText(Task):
    """Likelihood of the held-out documents, of all and by domain."""

    name = "held-out"

    def requests(self) -> list[Rolling]:
        return [Rolling(document.tokens) for document in self.held_out.documents]

    def metrics(self, answers: Sequence[Likelihood]) -> list[Metric]:
        names = np.array([document.domain for document in self.held_out.documents])
        parts = {str(name): self._sums(answers, np.flatnonzero(names == name)) for name in np.unique(names)}
        whole = _total(list(parts.values()))
        loss = -whole.log_probability / whole.tokens
        perplexity = float(np.exp(loss))
        if not math.isfinite(perplexity):
            raise UserError(
                f"the model gives held-out text a loss of {loss}: it has diverged; evaluate an earlier checkpoint"
            )
        found = self._intervals(answers, np.arange(len(answers)))
        tokens, interval = whole.tokens, found.get("loss")
        spread = (math.exp(interval[0]), math.exp(interval[1])) if interval else None
        bits, size, accuracy = whole.metrics(intervals=found)
        return [
            *(bits, size),
            Metric("loss", loss, interval, n=tokens, of="token", unit="nats per token", better="lower"),
            Metric("perplexity", perplexity, spread, n=tokens, of="token", better="lower"),
            accuracy,
            *(
                metric
                for name, part in parts.items()
                for metric in part.metrics(
                    group=name,
                    intervals=self._intervals(answers, np.flatnonzero(names == name)) if len(parts) > 1 else found,
                )
            ),
        ]

    def records(self, answers: Sequence[Likelihood]) -> list[ScoredDocument]:
        return [
            ScoredDocument(
                key=xxhash.xxh3_64_hexdigest(document.data),
                domain=document.domain,
                bytes=len(document.data),
                tokens=answer.tokens,
                nats=-answer.log_probability,
                correct=answer.correct,
            )
            for document, answer in zip(self.held_out.documents, answers, strict=True)
        ]

    def _intervals(self, answers: Sequence[Likelihood], here: Iterable[int]) -> Mapping[str, Interval]:
        """Intervals over some of the documents; none for fewer than two."""
        numbers = [int(index) for index in here]
        chosen = [answers[index] for index in numbers]
        found = intervals(
            np.array([-answer.log_probability for answer in chosen]),
            sizes=[len(self.held_out.documents[index].data) for index in numbers],
            tokens=np.array([answer.tokens for answer in chosen]),
            correct=np.array([answer.correct for answer in chosen]),
        )
        return found or {}

    def _sums(self, answers: Sequence[Likelihood], here: Iterable[int]) -> _Sums:
        texts = [self.held_out.documents[index].data for index in here]
        chosen = [answers[index] for index in here]
        return _Sums(
            documents=len(texts),
            log_probability=float(np.array([answer.log_probability for answer in chosen]).sum()),
            tokens=sum(answer.tokens for answer in chosen),
            correct=sum(answer.correct for answer in chosen),
            bytes=sum(map(len, texts)),
            compressed=compressed_bits(texts),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Sums over the documents of a domain, or of all domains."""

    documents: int
    log_probability: float
    tokens: int
    correct: int
    bytes: int
    compressed: Mapping[str, int]

    def metrics(self, *, group: str = "", intervals: Mapping[str, Interval] | None = None) -> list[Metric]:
        found = intervals or {}
        return [
            Metric(
                "bits_per_byte",
                -self.log_probability / math.log(2) / self.bytes,
                found.get("bits_per_byte"),
                n=self.documents,
                of="whole document",
                unit="bits",
                better="lower",
                group=group,
                references={name: bits / self.bytes for name, bits in self.compressed.items()},
                note="whole documents",
            ),
            Metric("bytes", self.bytes, n=self.documents, of="whole document", unit="B", better="neither", group=group),
            Metric(
                "accuracy",
                self.correct / self.tokens,
                found.get("accuracy"),
                n=self.tokens,
                of="token",
                unit=SHARE,
                group=group,
                note="next token is the first choice",
            ),
        ]


def _total(parts: Sequence[_Sums]) -> _Sums:
    return _Sums(
        documents=sum(part.documents for part in parts),
        log_probability=math.fsum(part.log_probability for part in parts),
        tokens=sum(part.tokens for part in parts),
        correct=sum(part.correct for part in parts),
        bytes=sum(part.bytes for part in parts),
        compressed={name: sum(part.compressed[name] for part in parts) for name in _COMPRESSORS},
    )
