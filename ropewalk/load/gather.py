"""Gathers rows from memory-mapped parts into one buffer: tokens, document starts and counted targets. No torch.

The kernel reads parts by their addresses, so that it compiles once for any number of them, and writes rows as they
travel: tokens of 2 or 4 bytes and two bits a place. At 2,048 tokens a row a core gathers about 2 G tokens/s from the
page cache (AMD EPYC).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from ropewalk.store.shards import TokenType

from .sources import Part

if TYPE_CHECKING:
    from .order import Rows

START, TOKENS, WIDTH, OFFSETS, DOCUMENTS, BITS = range(6)
"""Columns of the table of parts: first token on the line, address of the tokens, bytes of one, address of the document
offsets, how many documents, address of the count bits (0: all tokens count)."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Parts of several sources, by address; keeps what lies at these addresses alive."""

    first: npt.NDArray[np.int64]
    """The first part of each source, and one past the last: source s has parts first[s] to first[s + 1]."""
    table: npt.NDArray[np.int64]
    """A line for each part, columns as above."""
    tokens: npt.NDArray[np.int64]
    """Of each source."""
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, sources: Sequence[Sequence[Part]]) -> Lines:
        """The lines of sources with these parts."""
        first = np.cumsum([0, *map(len, sources)])
        table = [_entry(part, start) for parts in sources for part, start in zip(parts, _starts(parts), strict=True)]
        parts = tuple(part for several in sources for part in several)
        tokens = [sum(len(part.tokens) for part in several) for several in sources]
        return cls(first, np.array(table, np.int64).reshape(-1, 6), np.array(tokens, np.int64), parts)


@dataclass(frozen=True, slots=True)
class RowForm:
    """How a row of `length` inputs lies in memory: its tokens and one more, a bit a place that says whether a document
    begins there, a bit a place that says whether its target counts. Rows follow each other, so that any number of
    neighbours travels as one piece."""

    length: int
    dtype: TokenType

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens of a row."""
        return (self.length + 1) * self.width

    @property
    def bit_bytes(self) -> int:
        """Bytes that one kind of bits takes."""
        return -(-self.length // 8)

    @property
    def row_bytes(self) -> int:
        """A multiple of 8: every row can be seen as tokens of any width."""
        return -(-(self.token_bytes + 2 * self.bit_bytes) // 8) * 8


def gather(rows: Rows, lines: Lines, form: RowForm, *, whole: bool, buffer: npt.NDArray[np.uint8]) -> None:
    """Writes `rows` into `buffer`, one a line, as `form` says. `whole`: each piece is a document or a part of one; else
    a piece is a window over several, whose boundaries are looked up. Places that no piece fills hold token 0, count for
    nothing and are a document of their own."""
    # The kernel believes what it is told: a wrong address would be read, or written, without a word.
    assert buffer.shape == (len(rows), form.row_bytes)
    assert buffer.flags.c_contiguous, "rows are written by address"
    assert (lines.table[:, WIDTH] <= form.width).all(), "tokens do not fit their places"
    assert (rows.begin + rows.targets < lines.tokens[rows.source]).all(), "rows end where their line ends"
    _gather(
        rows.starts,
        rows.source,
        rows.begin,
        rows.length,
        rows.targets,
        lines.first,
        lines.table,
        whole,
        form.length,
        form.width,
        buffer,
    )


@dataclass(frozen=True, slots=True)
class Expanded:
    """Rows as a step on a CPU wants them, arrays of B rows."""

    tokens: npt.NDArray[np.int64]
    """One more a row than it has inputs."""
    counts: npt.NDArray[np.float32]
    """1 where the target counts, else 0."""
    positions: npt.NDArray[np.int64]
    """From the beginning of each document on; empty when not asked for."""
    documents: npt.NDArray[np.int32]
    """Numbered from 0 in each row."""


def expand(buffer: npt.NDArray[np.uint8], form: RowForm, *, positions: bool) -> Expanded:
    """What `gather` wrote, a number a place; with `positions` or without."""
    rows, length = len(buffer), form.length
    made = Expanded(
        tokens=np.empty((rows, length + 1), np.int64),
        counts=np.empty((rows, length), np.float32),
        positions=np.empty((rows, length if positions else 0), np.int64),
        documents=np.empty((rows, length), np.int32),
    )
    _expand(np.ascontiguousarray(buffer), form.width, made.tokens, made.counts, made.positions, made.documents)
    return made


def _entry(part: Part, start: int) -> tuple[int, ...]:
    assert all(array.flags.c_contiguous for array in (part.tokens, part.offsets)), "parts are read by address"
    assert part.tokens.itemsize in (2, 4), "tokens have 2 or 4 bytes"
    assert part.offsets.dtype == np.int64, "offsets have 8 bytes"
    bits = 0 if part.bits is None else part.bits.ctypes.data
    documents = len(part.offsets) - 1
    return start, part.tokens.ctypes.data, part.tokens.itemsize, part.offsets.ctypes.data, documents, bits


def _starts(parts: Sequence[Part]) -> list[int]:
    return [0, *np.cumsum([len(part.tokens) for part in parts]).tolist()][: len(parts)]


def _reader(kind: Any) -> Any:
    """A function of compiled code: the pointer to numbers of `kind` at an address."""

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), build

    return pointer


_bytes_at = _reader(types.uint8)
_shorts_at = _reader(types.uint16)
_words_at = _reader(types.uint32)
_longs_at = _reader(types.int64)


@njit(cache=True, nogil=True)
def _gather(starts, source, begin, length, targets, first, table, whole, inputs, width, buffer):  # type: ignore[no-untyped-def]
    token_bytes, bit_bytes, row_bytes = (inputs + 1) * width, (inputs + 7) >> 3, buffer.shape[1]
    for row in range(len(buffer)):
        address = buffer.ctypes.data + row * row_bytes
        _clear(address + token_bytes, row_bytes - token_bytes)
        boundary = carray(_bytes_at(address + token_bytes), (bit_bytes,))
        counted = carray(_bytes_at(address + token_bytes + bit_bytes), (bit_bytes,))
        place = written = np.int64(0)
        for piece in range(starts[row], starts[row + 1]):
            boundary[place >> 3] |= np.uint8(1 << (place & 7))
            count = np.int64(targets[piece]) + 1
            parts = table[first[source[piece]] : first[source[piece] + 1]]
            _piece(parts, begin[piece], count, length[piece], place, whole, width, address, boundary, counted)
            written = place + count
            place += length[piece]
        _clear(address + written * width, token_bytes - written * width)
        if place < inputs:
            boundary[place >> 3] |= np.uint8(1 << (place & 7))


@njit(cache=True, nogil=True)
def _expand(buffer, width, tokens, counts, positions, documents):  # type: ignore[no-untyped-def]
    length = counts.shape[1]
    token_bytes, bit_bytes = (length + 1) * width, (length + 7) >> 3
    for row in range(len(buffer)):
        address = buffer.ctypes.data + row * buffer.shape[1]
        if width == 2:
            shorts = carray(_shorts_at(address), (length + 1,))
            for place in range(length + 1):
                tokens[row, place] = shorts[place]
        else:
            words = carray(_words_at(address), (length + 1,))
            for place in range(length + 1):
                tokens[row, place] = words[place]
        boundary = carray(_bytes_at(address + token_bytes), (bit_bytes,))
        counted = carray(_bytes_at(address + token_bytes + bit_bytes), (bit_bytes,))
        document, start = np.int32(-1), 0
        for byte in range(length >> 3):
            # Nearly always all of eight places count and no document begins there.
            if counted[byte] == 255:
                for bit in range(8):
                    counts[row, 8 * byte + bit] = 1
            else:
                for bit in range(8):
                    counts[row, 8 * byte + bit] = counted[byte] >> bit & 1
            if not boundary[byte]:
                for bit in range(8):
                    documents[row, 8 * byte + bit] = document
            else:
                for bit in range(8):
                    document += np.int32(boundary[byte] >> bit & 1)
                    documents[row, 8 * byte + bit] = document
        for place in range(length & ~7, length):
            document += np.int32(boundary[place >> 3] >> (place & 7) & 1)
            documents[row, place] = document
            counts[row, place] = counted[place >> 3] >> (place & 7) & 1
        for place in range(positions.shape[1]):
            if boundary[place >> 3] >> (place & 7) & 1:
                start = place
            positions[row, place] = place - start


@njit(cache=True, nogil=True)
def _clear(address, size):  # type: ignore[no-untyped-def]
    memory = carray(_bytes_at(address), (size,))
    for index in range(size):
        memory[index] = 0


@njit(cache=True, nogil=True)
def _piece(table, begin, count, inputs, place, whole, width, address, boundary, counted):  # type: ignore[no-untyped-def]
    """`count` tokens from `begin` on, the first `inputs` of them as inputs, from place `place` of the row on."""
    part = np.int64(len(table)) - 1
    if part > 0:
        part = np.searchsorted(table[:, START], begin, side="right") - 1
    done = np.int64(0)
    while done < count:
        local = begin + done - table[part, START]
        size = count - done
        if part + 1 < len(table):
            size = min(size, table[part + 1, START] - begin - done)
        stored = table[part, WIDTH]
        _copy(table[part, TOKENS] + local * stored, stored, address + (place + done) * width, width, size)
        _count(table[part, BITS], local, size, counted, place + done - 1, done == 0)
        if not whole:
            seen = min(size, inputs - done)
            _mark(table[part, OFFSETS], table[part, DOCUMENTS], local, seen, boundary, place + done)
        done += size
        part += 1


@njit(cache=True, nogil=True)
def _copy(there, stored, here, width, size):  # type: ignore[no-untyped-def]
    """`size` tokens of `stored` bytes each from one address to another, where they take `width` bytes."""
    if stored == 2 and width == 2:
        shorts, to_shorts = carray(_shorts_at(there), (size,)), carray(_shorts_at(here), (size,))
        for index in range(size):
            to_shorts[index] = shorts[index]
    elif stored == 2:
        shorts, to_words = carray(_shorts_at(there), (size,)), carray(_words_at(here), (size,))
        for index in range(size):
            to_words[index] = shorts[index]
    else:
        words, to_words = carray(_words_at(there), (size,)), carray(_words_at(here), (size,))
        for index in range(size):
            to_words[index] = words[index]


@njit(cache=True, nogil=True)
def _count(address, local, size, counted, place, skips_first):  # type: ignore[no-untyped-def]
    """Token i of these is the target of place `place` + i; the first of a piece is nobody's."""
    low = 1 if skips_first else 0
    if address == 0:
        _fill(counted, place + low, place + size)
        return
    stored = carray(_bytes_at(address), ((local + size + 7) >> 3,))
    for index in range(low, size):
        bit = local + index
        if stored[bit >> 3] >> (bit & 7) & 1:
            counted[(place + index) >> 3] |= np.uint8(1 << ((place + index) & 7))


@njit(cache=True, nogil=True)
def _fill(bits, start, stop):  # type: ignore[no-untyped-def]
    """Sets bits `start` to `stop` (exclusive)."""
    while start < stop and start & 7:
        bits[start >> 3] |= np.uint8(1 << (start & 7))
        start += 1
    for byte in range(start >> 3, stop >> 3):
        bits[byte] = 255
    for bit in range(max(start, stop & ~7), stop):
        bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@njit(cache=True, nogil=True)
def _mark(address, documents, local, size, boundary, place):  # type: ignore[no-untyped-def]
    """Marks where documents begin among `size` tokens from `local` on, which stand from `place` on."""
    offsets = carray(_longs_at(address), (documents + 1,))
    document = np.searchsorted(offsets, local)
    while document < documents and offsets[document] < local + size:
        at = place + offsets[document] - local
        boundary[at >> 3] |= np.uint8(1 << (at & 7))
        document += 1
