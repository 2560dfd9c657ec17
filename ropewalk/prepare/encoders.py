"""Text columns -> tokens, by the fastest encoder that is seen to give the tokens of Hugging Face tokenizers.

    tokenizers-0.23.3    Hugging Face's own, which says what is right: 3 MB/s on a core
    gigatoken-0.10.0     byte-level BPE with a pattern that it knows: 300 MB/s on English and code, 25 on Chinese, since
                         its speed is that of pieces it has met before
    ropewalk-bpe-4       our kernel, for GPT-2's pattern: 240 MB/s on English and code, 480 on Chinese

(16,000 tokens, text that the encoder had not seen before, one core of an AMD EPYC.) No fast encoder is trusted. Each
is compared with Hugging Face's on hard strings and on a sample of the corpus before it is chosen, and on a stretch of
every chunk while it works; one difference, and the reference does the work. The name of what made them is kept with the
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from ropewalk.store.shards import Tokens, TokenType, token_type

from . import bpe
from .columns import text_buffers
from .kernels.closing import close_documents


def _versioned(package: str) -> str:
    """The package with its version, which is what makes tokens; one that is not there refuses when it is tried."""
    try:
        return f"{package}-{metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package}-none"


REFERENCE, GIGATOKEN = _versioned("tokenizers"), _versioned("gigatoken")

FAST_BYTES = 4_000_000
"""A smaller corpus is left to the reference: the others take 0.5 s to be made ready, once in every process."""

RENEW_BYTES = 256_000_000
"""gigatoken remembers every piece it has met, some 50 bytes each. After so much text it begins anew, which costs a
tenth of its speed and bounds memory: 100 MB for usual text, 1.3 GB if no piece came twice."""

HARD = (
    *("", " ", "\n", "a", " a", "a ", "  a", "a  b", " \n a", "\t\tx\n\n\n  y", "\r\n\r\n", "\u3000中 文\u3000\u3000a"),
    *("it's we'll I'd they've 'tis ''s 'S don'T '  'll", "<|endoftext|><|im_start|>user</s>[SEP]", "\x00\x01\x1f\x7f"),
    *("中文和English混排，。！？", "ﬁ Ⅷ ½ ٣٤ ०१ 〇一二", "e\u0301 a\u0308\u0323 \u200d\u200c\ufeff", "नमस्ते ไทย ខ្មែរ"),
    *("👩‍👩‍👧‍👦 🇨🇳 😀😀 \U0001f9ff", "\ue000\U000f0000\U0010ffff\u0378", "a" * 600, "中" * 400),
    *(" " * 500 + "x" + "\n" * 300, "été naïve Straße ÅÄÖ łódź İstanbul", "слово Ελληνικά עברית العربية"),
    *("x=1;y+=0x1F//2#!?", "１２３ａｂｃ", "ab1cd2 3e 4"),
)
"""What has told encoders apart: white space, contractions, special tokens spelled out, marks, joiners, rare scripts,
characters without a meaning, long runs."""


class Encoded(NamedTuple):
    """The tokens of a column."""

    tokens: Tokens
    """Of all documents, the end of text behind each."""
    lengths: npt.NDArray[np.int64]
    """Tokens of each document."""


class Encoder(Protocol):
    """Turns text columns (large_string without nulls) into tokens; special tokens spelled in a text are text."""

    @property
    def algorithm(self) -> str:
        """What made the tokens, with its version."""
        ...

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: TokenType) -> Encoded:
        """The tokens of each document with `end` behind them."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Which encoder is used."""

    algorithm: str
    refused: dict[str, str] = field(default_factory=dict)
    """Why others are not, by algorithm."""


class Difference(Exception):
    """A fast encoder gave other tokens than the reference."""


def choose(content: bytes, sample: Iterable[str], *, corpus_bytes: int) -> Choice:
    """The fastest encoder of the tokenizer in `content` that agrees with the reference on HARD and `sample`.

    Both fast ones are used where the sample holds text for both.
    """
    if corpus_bytes < FAST_BYTES:
        return Choice(REFERENCE)
    texts = list(sample)
    asked = [GIGATOKEN]
    refused = {GIGATOKEN: _objection(content, GIGATOKEN, texts)}
    # Our kernel takes seconds to compile: not for text that the other one encodes well.
    if refused[GIGATOKEN] or any(_is_unspaced(text.encode()) for text in texts):
        asked.append(bpe.ALGORITHM)
        refused[bpe.ALGORITHM] = _objection(content, bpe.ALGORITHM, texts)
    agreed = [name for name in asked if not refused[name]]
    return Choice("+".join(agreed) or REFERENCE, {name: why for name, why in refused.items() if why})


def open_encoder(content: bytes, algorithm: str) -> Encoder:
    """The encoder that `choose` has named, for the same tokenizer."""
    parts = [_ENCODERS[name](content) for name in algorithm.split("+")]
    return parts[0] if len(parts) == 1 else Mixed(*parts)


def encode_texts(encoder: Encoder, texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text, without an end of text."""
    encoded = encoder.encode(pa.array(texts, pa.large_string()), end=0, dtype="uint32")
    return [tokens[:-1] for tokens in _documents(encoded)]


def check(encoder: Encoder, reference: Encoder, texts: Sequence[str], *, dtype: TokenType = "uint32") -> None:
    """Raises Difference when the two give other tokens, which are of type `dtype`, for any of `texts`."""
    column = pa.array(texts, pa.large_string())
    for one, other, text in zip(
        *(_documents(coder.encode(column, end=0, dtype=dtype)) for coder in (encoder, reference)),
        texts,
        strict=True,
    ):
        if not np.array_equal(one, other):
            raise Difference(f"{encoder.algorithm} gives other tokens than {reference.algorithm} for {text[:60]!r}")


def stretch(text: pa.LargeStringArray, *, size: int) -> str:
    """About `size` bytes from the middle of a column's text, for a check: it depends on the text alone."""
    data, offsets = text_buffers(text)
    first, last = int(offsets[0]), int(offsets[-1])
    begin = max(first, (first + last - size) // 2)
    # A character that is cut at either end is left out.
    return data[begin : min(last, begin + size)].tobytes().decode(errors="ignore")


class HuggingFace:
    """The reference."""

    def __init__(self, content: bytes) -> None:
        self.algorithm = REFERENCE
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocabulary: int = self._tokenizer.get_vocab_size()

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: TokenType) -> Encoded:
        encodings = self._tokenizer.encode_batch_fast(text.to_pylist(), add_special_tokens=False)
        lengths = np.array([len(encoding) + 1 for encoding in encodings], np.int64)
        parts = [np.array([*encoding.ids, end], np.dtype(dtype)) for encoding in encodings]
        return Encoded(np.concatenate(parts) if parts else np.zeros(0, dtype), lengths)


class Gigatoken:
    """gigatoken on this thread."""

    def __init__(self, content: bytes) -> None:
        self.algorithm = GIGATOKEN
        tree = json.loads(content)
        # It would find special tokens in texts. They are in the vocabulary of the model too, but no merge makes them.
        tree["added_tokens"] = [token for token in tree.get("added_tokens", []) if not token["special"]]
        tree["post_processor"] = None
        self._content = json.dumps(tree)
        self._tokenizer, self._bytes = self._fresh(), 0

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: TokenType) -> Encoded:
        # A list of bytes costs 0.1 us a document. To hand over Arrow's buffers as they are costs 1 ms a call.
        documents = text.cast(pa.large_binary()).to_pylist()
        self._bytes += sum(map(len, documents))
        if self._bytes > RENEW_BYTES:
            self._tokenizer, self._bytes = self._fresh(), 0
        if len(documents) == 1:  # what holds the tokens of several documents takes 0.1 ms to make
            tokens = self._tokenizer.encode(documents[0])
            return closed(tokens, np.array([len(tokens)]), end=end, dtype=dtype)
        made = self._tokenizer.encode_batch(documents, parallel=False).layout
        starts = np.asarray(made.offsets.data, np.int64)
        return closed(np.asarray(made.content.data)[starts[0] :], np.diff(starts), end=end, dtype=dtype)

    def _fresh(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self._content)


class BytePairs:
    """Our kernel; documents that it leaves go to the reference."""

    def __init__(self, content: bytes) -> None:
        tables = bpe.tables_of(content)
        if isinstance(tables, str):
            raise ValueError(tables)
        self.algorithm = bpe.ALGORITHM
        self._encoder = bpe.BytePairEncoder(tables)
        self._reference = HuggingFace(content)

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: TokenType) -> Encoded:
        passing, lengths = self._encoder.encode(text, end=end, dtype=dtype)
        tokens = passing.copy()
        left = np.flatnonzero(lengths == 0)
        if not len(left):
            return Encoded(tokens, lengths)
        documents = list(_documents(Encoded(tokens, lengths)))
        others = _documents(self._reference.encode(text.take(pa.array(left)), end=end, dtype=dtype))
        for index, other in zip(left.tolist(), others, strict=True):
            documents[index] = other
        return Encoded(np.concatenate(documents), np.array([len(document) for document in documents], np.int64))


class Mixed:
    """Two encoders, the second for columns of scripts that put no spaces between words."""

    def __init__(self, spaced: Encoder, unspaced: Encoder) -> None:
        self.algorithm = f"{spaced.algorithm}+{unspaced.algorithm}"
        self._spaced, self._unspaced = spaced, unspaced

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: TokenType) -> Encoded:
        data, offsets = text_buffers(text)
        encoder = self._unspaced if _is_unspaced(data[offsets[0] : offsets[-1]]) else self._spaced
        return encoder.encode(text, end=end, dtype=dtype)


def _is_unspaced(text: bytes | npt.NDArray[np.uint8]) -> bool:
    """Whether a tenth of the bytes begins a Han or kana character: 0xE3 to 0xE9 begin U+3000 to U+9FFF."""
    data = np.frombuffer(text, np.uint8)
    if len(data) > 100_000:
        data = data[::1021]  # hundreds tell enough; a prime, since characters of two or three bytes follow each other
    return int(np.count_nonzero(data - np.uint8(0xE3) < 7)) > 0.1 * len(data)


def closed(tokens: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], *, end: int, dtype: TokenType) -> Encoded:
    """The tokens of documents with `end` behind each."""
    out = np.empty(len(tokens) + len(lengths), dtype)
    close_documents(tokens, lengths, end, out)
    return Encoded(out, lengths + 1)


def _objection(content: bytes, algorithm: str, sample: Sequence[str]) -> str:
    """Why an encoder cannot be used, "" when it can."""
    reference = HuggingFace(content)
    try:
        check(open_encoder(content, algorithm), reference, [*HARD, *sample], dtype=token_type(reference.vocabulary))
    # gigatoken raises plain exceptions of several kinds for what it does not know; each of them means the same here.
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _documents(encoded: Encoded) -> Iterator[npt.NDArray[Any]]:
    """The tokens of each document."""
    borders = np.cumsum(encoded.lengths)[:-1]
    return iter(np.split(encoded.tokens, borders) if len(encoded.lengths) else [])


_ENCODERS: dict[str, Callable[[bytes], Encoder]] = {
    REFERENCE: HuggingFace,
    GIGATOKEN: Gigatoken,
    bpe.ALGORITHM: BytePairs,
}
