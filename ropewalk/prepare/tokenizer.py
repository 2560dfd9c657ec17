"""Byte-level tokenizers in the form of Hugging Face `tokenizers`: any text goes in, and comes out unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ropewalk.base.errors import DamagedTokenizer, DataError
from ropewalk.base.untrusted import Refused, read_inside
from ropewalk.store.shards import Tokens, TokenType

from .byte_level import byte_letters

FILE = "tokenizer.json"
MOST_BYTES = 256 << 20
"""Of a tokenizer's file; those in use have up to 35 MB."""
END_OF_TEXT = "<|endoftext|>"

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""What tokenizers in use call the token that closes a document, ours first."""


def train(
    texts: Iterator[str], *, vocabulary: int, markers: Sequence[str] = (), kind: Literal["bpe", "unigram"] = "bpe"
) -> Tokenizer:
    """A byte-level tokenizer of at most `vocabulary` tokens, fewer when `texts` hold too little.

    Special tokens come first: the end of text, then `markers`. The same texts give the same file, in any order and on
    any number of threads: pairs or words are counted over all texts, and ties are broken by token.
    """
    special = [END_OF_TEXT, *markers]
    return _bpe(texts, vocabulary, special) if kind == "bpe" else _unigram(texts, vocabulary, special)


def _unigram(texts: Iterator[str], vocabulary: int, special: list[str]) -> Tokenizer:
    # Here, since it takes numba, which nobody needs who only reads a tokenizer.
    from .bpe import count_pieces
    from .unigram import train_unigram

    words: Counter[bytes] = Counter()
    for batch in _batched(texts):
        count_pieces(pa.array(batch, pa.large_string()), words)
    letters = byte_letters()
    tokens = train_unigram(words, size=vocabulary - len(special))
    spelled = [("".join(letters[byte] for byte in token), score) for token, score in tokens]
    # Special tokens are never found in a piece: each spells letters and other signs.
    tokenizer = _byte_level(models.Unigram([*((name, 0.0) for name in special), *spelled], None, False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _batched(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(texts: Iterator[str], vocabulary: int, special: list[str]) -> Tokenizer:
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
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
        # A link may lead anywhere: it is the user who names this file. What is no file is never opened.
        return read_inside(file_of(path), most_bytes=MOST_BYTES, roots=[Path("/")])
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer; check `prepare.tokenizer.file`, or leave it empty") from None
    except Refused as error:
        raise DamagedTokenizer(f"{path}: this tokenizer cannot be read: {error}") from None
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
    raise DamagedTokenizer(f"{path}: none of the tokens {', '.join(_ENDS)} is in this tokenizer; add one of them to it")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest token id: ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, dtype: TokenType) -> Iterator[Tokens]:
    """The tokens of each text, without any special token."""
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array(encoding.ids, np.dtype(dtype))
