"""Texts and addresses against lists: phrases in texts; domains, words and parts in addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..columns import Bytes, Offsets
from .numbering import Counts
from .phrases import LENGTHS, Phrases, look_up, phrase_start
from .words import FACTOR, SEED, Hashes, finished

LISTED = 1
"""The bit of a phrase in a word list."""
HARD, SOFT = 1, 2
"""The bits of words in addresses."""

_ROLL = np.uint64(0xD1342543DE82EF95)  # a multiplier of good spectrum (Steele and Vigna 2021)


@njit(cache=True, nogil=True)
def count_listed(words: Hashes, starts: Offsets, phrases: Phrases) -> Counts:
    """A row a document: the places where a listed phrase stands, and the words in them; from the left, no overlap."""
    rows = np.zeros((starts.size - 1, 2), np.int64)
    for document in range(starts.size - 1):
        free = starts[document]
        for k in range(starts[document], starts[document + 1]):
            if look_up(phrases.keys, phrases.bits, words[k]):
                first = phrase_start(phrases.keys, phrases.bits, words, free, k, LISTED)
                if first >= 0:
                    rows[document, 0] += 1
                    rows[document, 1] += k + 1 - first
                    free = k + 1
    return rows


@njit(cache=True, nogil=True)
def count_url_words(words: Hashes, starts: Offsets, phrases: Phrases) -> Counts:
    """A row an address: how many different HARD and SOFT words it holds."""
    rows = np.zeros((starts.size - 1, 2), np.int64)
    for address in range(starts.size - 1):
        for k in range(starts[address], starts[address + 1]):
            bits = look_up(phrases.keys, phrases.bits, words[k]) & ~LENGTHS
            for earlier in range(starts[address], k):
                bits *= words[earlier] != words[k]
            rows[address, 0] += bits & HARD != 0
            rows[address, 1] += bits & SOFT != 0
    return rows


@njit(cache=True, nogil=True)
def domain_keys(data: Bytes, offsets: Offsets) -> Hashes:
    """The key of each domain of a list."""
    keys = np.empty(offsets.size - 1, np.uint64)
    for entry in range(offsets.size - 1):
        begin, end = _host(data, offsets[entry], offsets[entry + 1])
        state = SEED
        for k in range(end - 1, begin - 1, -1):
            state = (state ^ np.uint64(_lower(data[k]))) * FACTOR
        keys[entry] = finished(state)
    return keys


@njit(cache=True, nogil=True)
def match_domains(data: Bytes, offsets: Offsets, domains: Hashes) -> Counts:
    """How many listed domains each address lies in: its host, and what follows each of the host's dots. Keys ascend."""
    found = np.zeros(offsets.size - 1, np.int64)
    for address in range(offsets.size - 1):
        begin, end = _host(data, offsets[address], offsets[address + 1])
        state = SEED
        for k in range(end - 1, begin - 1, -1):  # from the right, so that the key of each parent domain comes by
            state = (state ^ np.uint64(_lower(data[k]))) * FACTOR
            if k == begin or data[k - 1] == ord("."):
                found[address] += _is_in(domains, finished(state))
    return found


@njit(cache=True, nogil=True)
def part_keys(data: Bytes, offsets: Offsets) -> tuple[Hashes, Counts]:
    """The key and the length of each part of a list, in letters and digits."""
    keys, lengths = np.empty(offsets.size - 1, np.uint64), np.zeros(offsets.size - 1, np.int64)
    for entry in range(offsets.size - 1):
        rolled = np.uint64(0)
        for k in range(offsets[entry], offsets[entry + 1]):
            letter = _letter(data[k])
            if letter:
                rolled = rolled * _ROLL + np.uint64(letter)
                lengths[entry] += 1
        keys[entry] = _part_key(rolled, lengths[entry])
    return keys, lengths


@njit(cache=True, nogil=True)
def match_parts(data: Bytes, offsets: Offsets, parts: Hashes, lengths: Counts) -> Counts:
    """In how many places each address holds a listed part, its letters and digits put together. Keys ascend."""
    found = np.zeros(offsets.size - 1, np.int64)
    letters = np.empty(np.diff(offsets).max() if offsets.size > 1 else 0, np.uint64)
    for address in range(offsets.size - 1):
        count = 0
        for k in range(offsets[address], offsets[address + 1]):
            letter = _letter(data[k])
            if letter:
                letters[count] = letter
                count += 1
        for length in lengths:
            drop = np.uint64(1)
            for _ in range(length):
                drop *= _ROLL
            rolled = np.uint64(0)
            for k in range(count):
                rolled = rolled * _ROLL + letters[k]
                if k >= length:
                    rolled -= letters[k - length] * drop
                if k + 1 >= length:
                    found[address] += _is_in(parts, _part_key(rolled, length))
    return found


@njit(cache=True, nogil=True)
def _host(data: Bytes, begin: int, end: int) -> tuple[int, int]:
    """Where the host of an address stands: behind `//` and `@`, before port and path, without a last dot."""
    for k in range(begin, end - 1):
        if data[k] == ord("/"):
            if data[k + 1] == ord("/"):
                begin = k + 2
            break
    for k in range(begin, end):
        if data[k] == ord("/") or data[k] == ord("?") or data[k] == ord("#"):
            end = k
            break
    for k in range(begin, end):
        if data[k] == ord("@"):
            begin = k + 1
    for k in range(begin, end):
        if data[k] == ord(":"):
            end = k
            break
    while end > begin and data[end - 1] == ord("."):
        end -= 1
    return begin, end


@njit(cache=True, nogil=True)
def _lower(byte: Any) -> Any:
    return byte + 32 if ord("A") <= byte <= ord("Z") else byte


@njit(cache=True, nogil=True)
def _letter(byte: Any) -> Any:
    """The lower case of an ASCII letter or digit, 0 for anything else."""
    byte = _lower(byte)
    return byte if ord("a") <= byte <= ord("z") or ord("0") <= byte <= ord("9") else 0


@njit(cache=True, nogil=True)
def _part_key(rolled: Any, length: int) -> Any:
    return finished((rolled ^ np.uint64(length)) * FACTOR)


@njit(cache=True, nogil=True)
def _is_in(keys: Hashes, key: Any) -> bool:
    place = np.searchsorted(keys, key)
    return bool(place < keys.size and keys[place] == key)
