"""Damage, as storage, networks and enemies do it: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from format_samples import Sample

_HOSTILE = (
    *(b"\x00", b"\xff" * 9, b"\xed\xa0\x80", b"\n", b"\r\n\r\n", b'"', b"\\", b"{" * 3000, b"[" * 3000, b"<a>" * 2000),
    *(b"&a;", b'<!DOCTYPE x [<!ENTITY a "&b;&b;">]>', b"../../etc/passwd", b"/abs", b"WARC/1.0\r\n", b"PK\x03\x04"),
    *(b"\x1f\x8b\x08\x00", b"(\xb5/\xfd", b"PAR1", b"%PDF-1.7", b"ustar", b"Content-Length: 99999999999\r\n"),
    *(b"-1", b"9" * 40, b"\\newcommand{\\a}{\\a\\a}", b"\\begin{verbatim}", b"<svg>", b"<!--", b"]]>", b"%"),
)


def damaged(sample: Sample, others: list[bytes], draw: random.Random) -> bytes:
    """The file of `sample` with damage inside, before it was packed, or outside; `others` lend pieces."""
    if draw.random() < 0.5:
        return sample.pack(_mutated(sample.inside, others, draw))
    return _mutated(sample.data, others, draw)


def _mutated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        data = draw.choice(_KINDS)(data, others, draw)
    return data[:200_000]


Mutation = Callable[[bytes, list[bytes], random.Random], bytes]


def _flip(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8) if data else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    place = draw.randint(0, len(data))
    junk = draw.randbytes(draw.randint(1, 12))
    return data[:place] + junk + data[place + len(junk) :]


def _extreme(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    place = draw.randint(0, len(data))
    size = draw.choice((1, 2, 4, 8))
    value = draw.choice((0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1)).to_bytes(size, draw.choice(("big", "little")))
    return data[:place] + value + data[place + size :]


def _truncate(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def _remove(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    start = draw.randint(0, len(data))
    return data[:start] + data[start + draw.randint(1, 300) :]


def _repeat(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    start = draw.randint(0, len(data))
    stop = start + draw.randint(1, 300)
    return data[:stop] + data[start:stop] * draw.randint(1, 20) + data[stop:]


def _insert(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    place = draw.randint(0, len(data))
    return data[:place] + draw.choice(_HOSTILE) + data[place:]


def _splice(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    other = draw.choice(others)
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]


_KINDS: tuple[Mutation, ...] = (_flip, _overwrite, _extreme, _truncate, _remove, _repeat, _insert, _splice)
