"""Tokens -> the words they spell, each with the tokens in which it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import UserError

from .byte_level import byte_table
from .columns import Bytes, Offsets, Rows
from .kernels import ngrams as kernel
from .kernels.words import characters
from .tokenizer import load


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some documents in order; what a word is, `kernels.words` says."""

    hashes: npt.NDArray[np.uint64]
    starts: Offsets
    stops: Offsets
    """Bytes of the text."""
    firsts: Offsets
    """The first word of each document, and the number of all."""
    token_ends: Rows
    """Where each token ends in the text; empty for a text that is no token."""
    text: Bytes

    def tokens(self, words: Any = slice(None)) -> Rows:
        """The token that holds the first byte of each of these words."""
        return np.asarray(np.searchsorted(self.token_ends, self.starts[words], side="right"))

    def last_tokens(self, words: Any = slice(None)) -> Rows:
        """The token that holds the last byte of each of these words."""
        return np.asarray(np.searchsorted(self.token_ends, self.stops[words] - 1, side="right"))

    def spelled(self, first: int, last: int) -> list[str]:
        """The words `first` to `last`, lower case where that is one character."""
        data = self.text.tobytes()
        spans = zip(self.starts[first:last].tolist(), self.stops[first:last].tolist(), strict=True)
        return [fold(data[start:stop].decode(errors="replace")) for start, stop in spans]


class Speller:
    """Knows the bytes of every token of a byte-level tokenizer; a special token is a line end."""

    def __init__(self, tokenizer: Path) -> None:
        loaded = load(tokenizer)
        table = byte_table(loaded)
        if table is None:
            raise UserError(
                f"{tokenizer}: this tokenizer is not byte-level, so that words cannot be read from its tokens; index "
                '`unit = "tokens"` instead'
            )
        for token in loaded.get_added_tokens_decoder():
            table[token] = b"\n"
        self._letters = np.frombuffer(b"".join(table), np.uint8)
        self._bounds = np.cumsum([0, *map(len, table)])

    def words(self, tokens: npt.NDArray[Any], offsets: Offsets) -> Words:
        """The words of documents whose tokens are `tokens[offsets[i] : offsets[i + 1]]`."""
        sizes = np.diff(self._bounds)[tokens]
        text, ends = np.empty(int(sizes.sum()), np.uint8), np.empty(len(tokens), np.int64)
        kernel.spell(tokens, self._letters, self._bounds, text, ends)
        bounds = np.concatenate(([0], ends))[offsets]
        hashes, starts, stops, firsts = kernel.word_spans(text, bounds, *characters())
        return Words(
            hashes=hashes,
            starts=starts,
            stops=stops,
            firsts=firsts,
            token_ends=ends,
            text=text,
        )


def words_of(text: str) -> Words:
    """The words of one text, which is no token."""
    data = np.frombuffer(text.encode(), np.uint8)
    hashes, starts, stops, firsts = kernel.word_spans(data, np.array([0, len(data)]), *characters())
    return Words(hashes, starts, stops, firsts, np.zeros(0, np.int64), data)


def fold(word: str) -> str:
    """A word as its hash sees it: every character in lower case, where that is one character."""
    return "".join(lower if len(lower := character.lower()) == 1 else character for character in word)
