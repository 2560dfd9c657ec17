"""Byte-level BPE tokenizers of Hugging Face `tokenizers`: any text goes in, and comes out unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ropewalk.base.errors import DataError
from ropewalk.store.shards import Tokens, TokenType

END_OF_TEXT = "<|endoftext|>"

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""What tokenizers in use call the token that closes a document, ours first."""


def train(texts: Iterator[str], *, vocabulary: int) -> Tokenizer:
    """A tokenizer of at most `vocabulary` tokens, fewer when `texts` hold too few pairs to merge.

    The same texts give the same file, in any order and on any number of threads: pairs are counted over all
    texts, and ties are broken by token id.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read(path: Path) -> bytes:
    """The content of a `tokenizer.json`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer; check `prepare.tokenizer.file`, or leave it empty") from None
    except OSError as error:
        raise DataError(f"{path}: this tokenizer cannot be read: {error.strerror}") from None


def load(path: Path) -> Tokenizer:
    """The tokenizer in `path`, ready to encode documents: text that spells a special token stays text."""
    content = read(path)
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"{path}: not a Hugging Face `tokenizer.json`: {error}; save it with `tokenizer.save(path)`"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer, *, path: Path) -> int:
    """The id of the token that closes a document; DataError when the tokenizer has none that we know."""
    for name in _ENDS:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    raise DataError(f"{path}: none of the tokens {', '.join(_ENDS)} is in this tokenizer; add one of them to it")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest token id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, dtype: TokenType) -> Iterator[Tokens]:
    """The tokens of each text, without any special token."""
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array(encoding.ids, np.dtype(dtype))
