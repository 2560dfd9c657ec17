"""Byte-level BPE tokenizers of Hugging Face `tokenizers`: any text goes in, and comes out unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ropewalk.base.errors import DataError
from ropewalk.store.shards import Tokens, TokenType

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""What tokenizers in use call the token that closes a document, ours first."""


def train(texts: Iterator[str], *, vocabulary: int, markers: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of at most `vocabulary` tokens, fewer when `texts` hold too few pairs to merge.

    Special tokens come first: the end of text, then `markers`. The same texts give the same file, in any order and on
    any number of threads: pairs are counted over all texts, and ties are broken by token id.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def file_of(place: Path) -> Path:
    """The `tokenizer.json` meant by `place`: itself, or that of a checkpoint, of a run's newest one or of a Hugging
    Face directory."""
    if not place.is_dir() or (place / FILE).is_file():
        return place / FILE if place.is_dir() else place
    checkpoints = sorted([*place.glob(f"step-*/{FILE}"), *place.glob(f"checkpoints/step-*/{FILE}")])
    return checkpoints[-1] if checkpoints else place / FILE


def read(path: Path) -> bytes:
    """The content of a `tokenizer.json`, or of that in a folder."""
    try:
        return file_of(path).read_bytes()
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


def byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of each token id of a byte-level tokenizer, None for other kinds."""
    if (json.loads(tokenizer.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    names: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    bytes_ = {letter: byte for byte, letter in enumerate(byte_letters())}
    table = [b""] * (max(names.values()) + 1)
    for name, token in names.items():
        table[token] = name.encode() if token in added else bytes(bytes_[letter] for letter in name)
    return table


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers name each byte (GPT-2, `bytes_to_unicode`): visible Latin-1 characters
    stand for themselves, the other bytes in turn for U+0100, U+0101, ..."""
    letters = []
    hidden = 0x100
    for byte in range(256):
        visible = 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)
        letters.append(chr(byte if visible else hidden))
        hidden += not visible
    return letters


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest token id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, dtype: TokenType) -> Iterator[Tokens]:
    """The tokens of each text, without any special token."""
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array(encoding.ids, np.dtype(dtype))
