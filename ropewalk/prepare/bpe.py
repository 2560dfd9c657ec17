"""A byte-level BPE `tokenizer.json` as tables for our own kernel, where it is of the kind that the kernel encodes."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import pre_tokenizers

from ropewalk.store.shards import Tokens, TokenType

from .byte_level import byte_letters
from .columns import Mask, Offsets, text_buffers
from .kernels import bpe as kernel
from .kernels import merges, pattern, runs
from .kernels.lanes import LANES
from .kernels.merges import DOUBTFUL, UNKNOWN, Room, Tables, Words
from .kernels.pattern import LETTER, NUMBER, OTHER, SPACE

ALGORITHM = "ropewalk-bpe-4"
"""Raised when the kernel changes, though its tokens must not."""

_CODES = 0x110000
_ASSIGNED = ((0, 0x40000), (0xE0000, 0xE1000))
"""Where Unicode has characters, but for those of private use far above."""
_WHITE_SPACE = (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)

_MODEL: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None, 0, 0.0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}
"""What the kernel does, by setting of the model."""


class BytePairEncoder:
    """Encodes text columns on one thread as the tokenizer of its tables does, special tokens as text."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._memory = kernel.Memory(
            short=np.zeros(kernel.SHORT_WORDS, np.uint64),
            long=np.zeros(kernel.LONG_ENTRY << kernel.LONG_BITS, np.uint64),
            long_tokens=np.empty(kernel.LONG_TOKENS << kernel.LONG_BITS, np.uint32),
            room=_room(kernel.ROOM),
            units=np.empty(runs.UNITS, np.uint32),
            joining=np.empty(runs.UNITS, np.int64),
            starts=np.empty(0, np.uint64),
            tail=np.zeros(LANES, np.uint8),
        )
        self._out: Tokens = np.empty(0, np.uint32)

    def encode(
        self, text: pa.LargeStringArray, *, end: int, dtype: TokenType = "uint32"
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """(tokens of all documents, `end` behind each; how many each has). A document that the kernel leaves to others
        has none. The tokens are valid until the next call; the kernel is compiled for each type that is asked for."""
        data, offsets = text_buffers(text)
        room = int(offsets[-1] - offsets[0]) + len(text) + kernel.SPARE
        if room > len(self._out) or self._out.dtype != dtype:
            self._out = np.empty(room, dtype)
        if len(self._memory.starts) < _blocks(offsets):
            self._memory = self._memory._replace(starts=np.empty(_blocks(offsets), np.uint64))
        lengths = np.empty(len(text), np.int64)
        written = kernel.encode_column(data, offsets, self._tables, self._memory, end, self._out, lengths)
        return self._out[:written], lengths


def tables_of(content: bytes) -> Tables | str:
    """The tables of a `tokenizer.json`, or why the kernel does not encode as it does."""
    tree = json.loads(content)
    refusal = _refusal(tree)
    if refusal:
        return refusal
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in tree["model"]["merges"]]
    tables = _empty(len(pairs))
    tables.single[:] = [vocabulary[letter] for letter in byte_letters()]
    left, right, tables.merged[:] = (
        np.array([vocabulary[name] for name in names], np.uint32)
        for names in ([a for a, _ in pairs], [b for _, b in pairs], [a + b for a, b in pairs])
    )
    if not merges.fill_pairs(left, right, np.arange(len(pairs)), tables.pairs):
        return "two of its merges are of the same pair"
    kinds = character_kinds()
    # Where the kind changes from one code point to the next; a test compares all of them.
    changes = np.flatnonzero(np.diff(kinds))
    if not same_kinds(np.union1d(changes, changes + 1), kinds):
        return "its pieces follow another version of Unicode"
    merges.fill_characters(kinds, tables, np.empty(4, np.uint8), _room(merges.GROUP))
    spelled = {letter: byte for byte, letter in enumerate(byte_letters())}
    strings = [(bytes(map(spelled.__getitem__, one)), bytes(map(spelled.__getitem__, other))) for one, other in pairs]
    for one, other in strings:
        _mark_border(one, other, tables)
    _pack(tables)
    return _with_joins(tables, left, right, strings)


def count_pieces(text: pa.LargeStringArray, counts: Counter[bytes]) -> None:
    """Adds the pieces of GPT-2's pattern in `text` to `counts`."""
    data, offsets = text_buffers(text)
    ends = np.empty(int(offsets[-1] - offsets[0]), np.int64)
    kinds, starts = character_kinds().astype(np.uint32), np.empty(_blocks(offsets), np.uint64)
    found = pattern.find_pieces(data, offsets, kinds, starts, np.zeros(LANES, np.uint8), ends)
    content = data.tobytes()
    borders = itertools.chain([int(offsets[0])], ends[:found].tolist())
    counts.update(content[start:stop] for start, stop in itertools.pairwise(borders))


@functools.cache
def character_kinds() -> npt.NDArray[np.uint8]:
    """LETTER, NUMBER, SPACE or OTHER for each code point; UNKNOWN where this Python's Unicode has no character."""
    kinds = np.full(_CODES, UNKNOWN, np.uint8)
    for first, last in _ASSIGNED:
        categories = "".join([unicodedata.category(chr(code)) for code in range(first, last)]).encode()
        major, minor = np.frombuffer(categories, np.uint8).reshape(-1, 2).T
        here = kinds[first:last]
        here[(major != ord("C")) | (minor != ord("n"))] = OTHER
        here[major == ord("L")] = LETTER
        here[major == ord("N")] = NUMBER
    kinds[list(_WHITE_SPACE)] = SPACE
    kinds.flags.writeable = False
    return kinds


def same_kinds(codes: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]) -> bool:
    """Whether Hugging Face's pattern knows these code points as the kernel does: the two may follow different versions
    of Unicode. Characters of one kind, written one after the other, are one piece."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    codes = codes[(codes < 0xD800) | (codes >= 0xE000)]
    texts = ("".join(map(chr, codes[kinds[codes] == kind])) for kind in (LETTER, NUMBER, OTHER, SPACE))
    return all(len(split(text)) <= 1 for text in texts)


def _refusal(tree: dict[str, Any]) -> str:
    """Why the kernel does not encode as this tokenizer does, "" when it does."""
    model, pieces = tree["model"], tree.get("pre_tokenizer") or {}
    for key, known in _MODEL.items():
        if model.get(key) not in known:
            return f"its model has {key} = {model.get(key)!r}"
    if (pieces.get("type"), pieces.get("add_prefix_space"), pieces.get("use_regex", True)) != (
        "ByteLevel",
        False,
        True,
    ):
        return "its pieces are not those of GPT-2"
    if tree.get("normalizer"):
        return "it normalises text"
    if not all(token["special"] for token in tree.get("added_tokens", [])):
        return "it has added tokens that are not special"
    if not set(byte_letters()) <= model["vocab"].keys():
        return "some bytes have no token"
    if max(model["vocab"].values()) + 1 >> merges.TOKEN_BITS:
        return "its vocabulary is too large"
    return ""


def _blocks(offsets: Offsets) -> int:
    """How many words of marks the longest document takes."""
    return int(np.diff(offsets).max(initial=0)) // LANES + 1


def _room(count: int) -> Room:
    return Room(ranks=np.empty(count, np.uint64), next=np.empty(count, np.int64), last=np.empty(count, np.int64))


def _empty(count: int) -> Tables:
    """Tables for so many merges, without joins."""
    return Tables(
        characters=np.zeros(_CODES, np.uint32),
        parts=np.zeros(4 * _CODES, np.uint32),
        packed=np.zeros(merges.PACKED_CODES, np.uint64),
        single=np.zeros(256, np.uint32),
        pairs=_pair_table(count),
        merged=np.zeros(count, np.uint32),
        joins=_pair_table(0),
        filter=np.zeros(1 << merges.FILTER_BITS - 6, np.uint64),
        borders=np.zeros(256, np.uint64),
    )


def _pair_table(count: int) -> Words:
    """An empty one for so many merges."""
    return np.full(1 << max(4, (3 * count).bit_length()), merges.NONE)


def _pack(tables: Tables) -> None:
    """Fills `packed` from `characters` and `parts`."""
    entries = tables.characters[: merges.PACKED_CODES].astype(np.uint64)
    kind, more = entries & 3, entries >> 2 & 3
    flags = kind << 1
    flags[entries & DOUBTFUL != 0] |= merges.UNIT_DOUBTFUL
    flags[~_in_runs(entries)] |= merges.UNIT_STOPS
    flags[more == 2] |= merges.UNIT_THREE
    flags[more != 0] |= 1 << merges.UNIT_MORE_BIT
    first, second = (tables.parts[place : 4 * merges.PACKED_CODES : 4].astype(np.uint64) for place in (0, 1))
    tables.packed[:] = first << merges.UNIT_BITS | flags
    tables.packed[:] |= (second << merges.UNIT_BITS | kind << 1) << 32


def _in_runs(entries: npt.NDArray[np.uint64]) -> Mask:
    """Which of `characters` belong to runs: those of three bytes, the line feed, and ASCII punctuation that is not
    doubtful."""
    codes, kind = np.arange(len(entries)), entries & 3
    found: Mask = (codes >= 0x800) & (kind != SPACE) | (codes < 0x80) & (kind == OTHER) & (entries & DOUBTFUL == 0)
    found[ord("\n")] = True
    found[ord("'")] = False  # it may begin a contraction
    found[entries & UNKNOWN != 0] = False
    return found


def _with_joins(
    tables: Tables,
    left: npt.NDArray[np.uint32],
    right: npt.NDArray[np.uint32],
    strings: Sequence[tuple[bytes, bytes]],
) -> Tables:
    """The tables with `joins` and `filter`: of all merges, those that may take place in a run."""
    run_kinds = _run_kinds(tables)
    joined = {rank: kind for rank, pair in enumerate(strings) if (kind := _joined_kind(*pair, run_kinds)) is not None}
    ranks, flags = np.array([*joined], np.int64), np.array([*joined.values()], np.uint32) << np.uint32(1)
    tables = tables._replace(joins=_pair_table(len(ranks)))
    merges.fill_pairs(left[ranks], right[ranks], ranks, tables.joins)
    shift = np.uint32(merges.UNIT_BITS)
    merges.fill_filter(left[ranks] << shift | flags, right[ranks] << shift | flags, tables.filter)
    return tables


def _run_kinds(tables: Tables) -> dict[str, int]:
    """The kind of each character of a run, but for the line feed, which joins nothing."""
    kinds = (tables.packed & merges.UNIT_KIND).astype(np.int64) >> 1
    codes = np.flatnonzero((tables.packed & merges.UNIT_STOPS == 0) & (kinds != SPACE))
    return dict(zip(map(chr, codes.tolist()), kinds[codes].tolist(), strict=True))


def _joined_kind(left: bytes, right: bytes, run_kinds: dict[str, int]) -> int | None:
    """The kind of the characters of a run that a merge joins; None for one that joins others, parts of characters or
    characters of different kinds, which are never in one piece."""
    try:
        kinds = {run_kinds.get(character) for character in left.decode() + right.decode()}
    except UnicodeDecodeError:
        return None
    return kinds.pop() if len(kinds) == 1 else None


def _mark_border(left: bytes, right: bytes, tables: Tables) -> None:
    """Notes a merge that joins a part of a character to another character, or the other way round.

    The first token that reaches over a border between two characters is made by a merge at that border. Where no such
    merge begins or ends inside a character, characters can be encoded first, each by itself.
    """
    if _continues(right[0]):
        return  # inside a character
    size = _size(right[0])
    if _continues(left[0]) or not _is_whole(right):
        tables.borders[right[0]] |= np.uint64(1 << (left[-1] & 63))
        first, last = _codes(right[:size])
        tables.characters[first:last] |= np.uint32(DOUBTFUL)


def _codes(begin: bytes) -> tuple[int, int]:
    """The code points whose bytes begin so, the last one exclusive."""
    size = _size(begin[0])
    value = begin[0] if size == 1 else begin[0] & 0x7F >> size
    for byte in begin[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (size - len(begin))
    return value << missing, min(value + 1 << missing, _CODES)


def _is_whole(data: bytes) -> bool:
    """Whether `data`, which begins with a character, ends with one."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _size(byte: int) -> int:
    """Bytes of the character that begins with `byte`."""
    return 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
