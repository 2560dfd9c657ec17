"""Decodes tokens to exact bytes.

`Tokenizer.decode` replaces invalid UTF-8, which is right for reading and wrong for counting. For byte-level tokenizers
the bytes of each token come from its vocabulary entry; others use `decode`, and `document_bytes` verifies the byte
count against prepare's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DamagedTokenizer, DataError
from ropewalk.base.files import read_regular
from ropewalk.prepare.byte_level import byte_table
from ropewalk.store.manifest import ShardEntry, TokenizerEntry
from ropewalk.store.shards import Shard

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer:
    """Converts tokens of a prepared corpus to bytes, and text to tokens."""

    def __init__(self, folder: Path, entry: TokenizerEntry) -> None:
        self._set(_read_tokenizer(folder / entry.file, entry.checksum), entry.end_of_text, entry.vocabulary)

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, end_of_text: int) -> Detokenizer:
        """The same for the tokenizer of a model without its corpus."""
        from ropewalk.prepare.tokenizer import vocabulary_size

        made = cls.__new__(cls)
        made._set(tokenizer, end_of_text, vocabulary_size(tokenizer))
        return made

    def _set(self, tokenizer: Tokenizer, end_of_text: int, vocabulary: int) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text
        self.vocabulary = vocabulary
        """Vocabulary size: one more than the highest token id."""
        self._table = byte_table(self._tokenizer)
        self._sizes = np.array([len(data) for data in self._table or ()], np.int64)

    def data(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `tokens`; unused ids of the vocabulary have none."""
        ids = np.asarray(tokens).tolist()
        if self._table is None:
            return self._tokenizer.decode(ids, skip_special_tokens=False).encode()
        return b"".join([self._table[token] for token in ids])

    def text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of `tokens`; invalid UTF-8 is shown as U+FFFD."""
        return self.data(tokens).decode(errors="replace")

    def continuation(self, prompt: Sequence[int], rest: Sequence[int]) -> bytes:
        """The bytes of `rest` after `prompt`: some tokenizers decode the first token of a text differently."""
        return self.data([*prompt, *rest])[len(self.data(prompt)) :]

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without end-of-text token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """The tokens of each text; `special` with those that the tokenizer adds by itself."""
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=special)]

    def document_bytes(self, shard: Shard, entry: ShardEntry) -> npt.NDArray[np.int64]:
        """Text bytes of every document of a shard, without the closing end-of-text token.

        Raises DataError unless they sum to the bytes that prepare encoded: a tokenizer that adds or drops bytes makes
        bits per byte wrong.
        """
        ends = shard.offsets[1:] - 1
        if (shard.tokens[ends] != self._end).any():
            raise DataError(f"{shard.path}: a document does not end with token {self._end}, the end of text")
        if self._table is None:
            sizes = np.array([len(self.data(shard.document(i)[:-1])) for i in range(len(shard))], np.int64)
        else:
            before = np.concatenate(([0], np.cumsum(self._sizes[shard.tokens])))
            sizes = before[ends] - before[shard.offsets[:-1]]
        if sizes.sum() != entry.text_bytes:
            raise DataError(
                f"{shard.path}: its tokens decode to {sizes.sum()} bytes, but {entry.text_bytes} were encoded: the "
                "tokenizer does not give text back exactly, so bits per byte cannot be measured; use a byte-level "
                "tokenizer without normaliser and without prefix space"
            )
        return sizes


def _read_tokenizer(path: Path, checksum: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer; run `ropewalk prepare` again") from None
    found = xxhash.xxh3_64_hexdigest(content)
    if found != checksum:
        raise DamagedTokenizer(
            f"{path}: damaged tokenizer: its checksum is {found}, the manifest says {checksum}",
            "run `ropewalk prepare` with the recipe again, which makes it anew",
        )
    return Tokenizer.from_str(content.decode())
