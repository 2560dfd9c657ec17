"""Training of a unigram vocabulary (Kudo 2018, as SentencePiece does it): from many candidates down to the best ones.

Candidates are the frequent substrings of words, whole characters each, and all single bytes, so that any text can be
encoded. Expectation and maximisation give them probabilities; those whose loss would cost the text least are dropped, a
quarter at a time, until the vocabulary has the size asked for.

Hugging Face's trainer gives other numbers in every process, since it sums in the order of a random hash table, and with
equal scores another vocabulary. Here words are in order of their bytes and sums in the order of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Bytes, Offsets
from .kernels import unigram as kernel
from .kernels.unigram import Ids, Scores, Vocabulary

SHRINK = 0.75
MARGIN = 1.1
"""Pruning stops at this many times the size; the last step takes the most likely ones."""
SUB_ITERATIONS = 2
SEEDS = 10
"""Candidates for each token in the end."""
BLOCK_BYTES = 250_000
"""Words whose substrings are counted at a time: 16 substrings a byte, 32 bytes each."""
MOST_CANDIDATES = 4_000_000

_LEAST_EXPECTED = 0.5


@dataclass(frozen=True, slots=True)
class Strings:
    """Byte strings, one after the other."""

    data: Bytes
    offsets: Offsets

    @classmethod
    def of(cls, strings: list[bytes]) -> Strings:
        """These strings."""
        return cls(np.frombuffer(b"".join(strings), np.uint8), np.cumsum([0, *map(len, strings)]))


def train_unigram(words: Mapping[bytes, int], *, size: int) -> list[tuple[bytes, float]]:
    """(token, log-probability) of at most `size` tokens, all single bytes among them; `words` with their counts.

    Fewer when the words have not so many frequent substrings.
    """
    known = sorted(word for word in words if 0 < len(word) <= kernel.WORD_LIMIT)
    corpus, counts = Strings.of(known), np.array([words[word] for word in known], np.int64)
    tokens, scores = _candidates(corpus, counts, most=max(SEEDS * size, 4 * 256))
    while True:
        for _ in range(SUB_ITERATIONS):
            expected, _ = kernel.expect(corpus.data, corpus.offsets, counts, _vocabulary(tokens, scores))
            tokens, scores = _maximised(tokens, expected)
        if len(tokens) <= max(MARGIN * size, 256 + 1):
            return _final(tokens, scores, size=size)
        keep = max(int(MARGIN * size), int(SHRINK * len(tokens)))
        tokens, scores = _pruned(corpus, counts, tokens, scores, keep=keep)


def _candidates(corpus: Strings, counts: Ids, *, most: int) -> tuple[list[bytes], Scores]:
    """The substrings that cover most bytes, and all bytes, with their shares as scores."""
    hashes, weights = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    starts, lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for first, last in _blocks(corpus.offsets):
        found = kernel.substrings(corpus.data, corpus.offsets[first : last + 1], counts[first:last])
        joined = [np.concatenate(pair) for pair in zip((hashes, weights, starts, lengths), found, strict=True)]
        hashes, places, groups = np.unique(joined[0], return_index=True, return_inverse=True)
        weights = np.bincount(groups, joined[1], minlength=len(hashes)).astype(np.int64)
        starts, lengths = joined[2][places], joined[3][places]
        if len(hashes) > MOST_CANDIDATES:
            rare = np.lexsort((hashes, -weights * lengths))[MOST_CANDIDATES:]
            hashes, weights = np.delete(hashes, rare), np.delete(weights, rare)
            starts, lengths = np.delete(starts, rare), np.delete(lengths, rare)
    often = np.flatnonzero(weights > 1)
    order = often[np.lexsort((hashes[often], -(weights * lengths)[often]))][:most]
    data = corpus.data.tobytes()
    tokens = [data[start : start + length] for start, length in zip(starts[order], lengths[order], strict=True)]
    frequent = dict(zip(tokens, (weights * lengths)[order].tolist(), strict=True))
    single = np.bincount(corpus.data, np.repeat(counts, np.diff(corpus.offsets)), minlength=256)
    frequent |= {bytes([byte]): max(1.0, float(single[byte])) for byte in range(256)}
    tokens = sorted(frequent)
    shares = np.array([frequent[token] for token in tokens], np.float64)
    return tokens, np.log(shares / shares.sum())


def _blocks(offsets: Offsets) -> Iterator[tuple[int, int]]:
    """Runs of words of about BLOCK_BYTES."""
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1
        last = min(max(last, first + 1), len(offsets) - 1)
        yield first, last
        first = last


def _vocabulary(tokens: list[bytes], scores: Scores) -> Vocabulary:
    strings = Strings.of(tokens)
    slots = 1 << (4 * len(tokens)).bit_length()
    hashes, ids = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)
    kernel.enter(kernel.hash_tokens(strings.data, strings.offsets), hashes, ids)
    return Vocabulary(hashes, ids, scores)


def _maximised(tokens: list[bytes], expected: Scores) -> tuple[list[bytes], Scores]:
    """Without tokens that are hardly expected, and with new scores: those of a sparse prior (digamma, Kudo 2018)."""
    single = np.array([len(token) == 1 for token in tokens])
    keep = single | (expected >= _LEAST_EXPECTED)
    counts = np.maximum(expected[keep], _LEAST_EXPECTED)
    scores = digamma(counts) - digamma(np.array([counts.sum()]))
    return [token for token, stays in zip(tokens, keep.tolist(), strict=True) if stays], scores


def _pruned(
    corpus: Strings, counts: Ids, tokens: list[bytes], scores: Scores, *, keep: int
) -> tuple[list[bytes], Scores]:
    """The `keep` tokens without which the words would lose most likelihood, and all single bytes.

    The loss is estimated: where a token was, its best segmentation into others would be.
    """
    vocabulary, strings = _vocabulary(tokens, scores), Strings.of(tokens)
    used = kernel.segment(corpus.data, corpus.offsets, counts, vocabulary)
    parts, starts = kernel.alternatives(strings.data, strings.offsets, vocabulary)
    number = np.diff(starts)
    owner = np.repeat(np.arange(len(tokens)), number)
    total = used.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log(used[parts] + used[owner]) - np.log(total + used * (number - 1))[owner]
        loss = used / total * (np.log(used / total) - np.bincount(owner, without, minlength=len(tokens)))
    loss[used == 0] = 0.0
    loss[(number == 0) | (np.diff(strings.offsets) == 1)] = np.inf
    best = np.sort(np.lexsort((np.arange(len(tokens)), -loss))[:keep])
    return [tokens[token] for token in best.tolist()], scores[best]


def _final(tokens: list[bytes], scores: Scores, *, size: int) -> list[tuple[bytes, float]]:
    """The likeliest tokens, single bytes in any case; most likely first."""
    single = np.array([len(token) == 1 for token in tokens])
    order = np.lexsort((np.arange(len(tokens)), -scores, ~single))[:size]
    chosen = order[np.lexsort((order, -scores[order]))]
    # Rounded: the last bits of logarithms are not the same on every processor.
    return [(tokens[token], round(float(scores[token]), 6)) for token in chosen.tolist()]


def digamma(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The derivative of the logarithm of the gamma function, of positive numbers: recurrence to 6 and beyond, then the
    asymptotic series (Abramowitz and Stegun 6.3.5, 6.3.18); right to 1e-9."""
    result = np.zeros_like(values)
    shifted = values.copy()
    while (small := shifted < 6).any():
        result[small] -= 1 / shifted[small]
        shifted[small] += 1
    inverse = 1 / (shifted * shifted)
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse / 240)))
    return result + np.log(shifted) - 0.5 / shifted - series
