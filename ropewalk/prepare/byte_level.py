"""How byte-level tokenizers spell bytes."""

from __future__ import annotations

import json

from tokenizers import Tokenizer


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
