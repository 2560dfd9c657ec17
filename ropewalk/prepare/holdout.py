"""What is held out for validation: whole documents, or blocks of long ones, so that they have a share of each source.

A *unit* is held out or trained on as one: a document, or a block of a document that is long for the share of its
source. Units are drawn in the order of a hash of their text until they have the share. Equal texts draw the same
number, so that they are never on both sides, and no order, worker or machine changes anything.

Blocks end at paragraphs or lines where they can. The text next to one, GAP_BYTES on either side, is left out.

The draw comes before there is a tokenizer, which must not see what is held out: it counts bytes. `Units.fewer` is for
when the tokens show that their share is too large.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ropewalk.base.errors import DataError

from .columns import Bytes, Mask, Rows
from .deduplicate import first_equals
from .draw import draws, mixed

TRAIN, VALIDATION, BOTH = "train", "validation", "both"
"""What the ledger says of a document; `both`: blocks of it are held out."""

Sizes = npt.NDArray[np.int64]

FEW = 20
"""Where fewer whole documents would be held out of a source, blocks are taken instead."""
BLOCKS = 32
"""About how many blocks are held out of a source whose documents are long."""
BLOCK_BYTES = 768
"""Shortest block, about 200 tokens, unless the share is less."""
LEAST_BLOCK_BYTES = 64
"""A block of less would tell nothing; shorter documents are held out whole."""
GAP_BYTES = 128
"""Text between a held-out block and training text: about 30 tokens of English and 40 of Chinese."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of documents that are cut, in order: the document's row, and bytes within it. What lies between two
    parts is in neither split."""

    rows: Rows
    starts: Rows
    stops: Rows
    held: Mask

    @classmethod
    def none(cls) -> Parts:
        """No parts."""
        nowhere = np.zeros(0, np.int64)
        return cls(nowhere, nowhere, nowhere, np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """A hash of where the parts lie."""
        digest = xxhash.xxh3_128()
        for column in (self.rows, self.starts, self.stops):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def chosen(self, mask: Mask) -> Parts:
        """The parts where `mask`."""
        return Parts(self.rows[mask], self.starts[mask], self.stops[mask], self.held[mask])

    def by_chunk(self, starts: Rows) -> list[Parts]:
        """The parts of each chunk, rows counted within it; `starts` are the first rows of the chunks and the end."""
        chunk = np.searchsorted(starts, self.rows, side="right") - 1
        shifted = dataclasses.replace(self, rows=self.rows - starts[chunk])
        return [shifted.chosen(chunk == number) for number in range(len(starts) - 1)]


@dataclass(frozen=True, slots=True)
class Texts:
    """What the draw looks at, a document each."""

    source: Rows
    """The number of its source."""
    sizes: Sizes
    """Bytes."""
    hashes: pa.Array
    """Equal for equal texts."""
    kin: pa.Array
    """Equal for texts that must be on the same side."""
    can_be_cut: Mask


@dataclass(frozen=True, slots=True)
class Units:
    """All units, and which of them are held out. Those of one document lie together."""

    first: Rows
    """The first of the documents that share the unit's text."""
    block: Rows
    """Its number among the blocks of the text, 0 for a whole document."""
    blocks: Rows
    """How many blocks the text has, 1 for a whole document."""
    number: npt.NDArray[np.uint64]
    """Those with the lowest numbers are held out."""
    source: Rows
    """The source of the first of its documents, which decides."""
    bytes: Sizes
    """Of all its copies in that source."""
    held: Mask

    def of(self, document: int) -> Rows:
        """The numbers of the units of the document that is the first with its text."""
        return np.arange(*np.searchsorted(self.first, [document, document + 1]))

    def fewer(self, source: int, *, times: float) -> Units:
        """Only about `times` the bytes of `source` held out, all of which are now; at least one unit stays."""
        mine = np.flatnonzero(self.held & (self.source == source))
        held = self.held.copy()
        held[mine] = False
        chosen = _taken(self, mine, target=int(times * self.bytes[mine].sum()))
        held[chosen if len(chosen) else _least(self, mine)] = True
        return dataclasses.replace(self, held=held)


def draw(texts: Texts, *, share: float, seed: int) -> Units:
    """Units of all documents, with `share` of the bytes of each source held out; at least one unit of the corpus is,
    and one is not.

    Raises DataError when there is only one unit.
    """
    first = first_equals(texts.kin)
    units = _units(texts, first, share=share, seed=seed)
    if len(units.first) < 2:
        raise DataError(
            "the corpus is too small: one distinct document is left, which cannot be cut; training and validation need "
            "text each; add documents or relax `prepare.filter`"
        )
    for source in np.unique(texts.source):
        mine = np.flatnonzero(units.source == source)
        if len(mine) < 2:
            continue
        total = int(texts.sizes[texts.source == source].sum())
        held = _held_bytes(units, texts, first, source=source)
        chosen = _taken(units, mine, target=int(share * total) - held, total=total - held)
        if not held and not len(chosen):
            chosen = _least(units, mine)
        units.held[chosen] = True
    if not units.held.any():
        units.held[np.argmin(units.number)] = True
    return units


def _units(texts: Texts, first: Rows, *, share: float, seed: int) -> Units:
    heads = np.flatnonzero(first == np.arange(len(first)))
    same_text = first_equals(texts.hashes)
    mixed_up = np.zeros(len(first), bool)
    mixed_up[first[(same_text != same_text[first]) | ~texts.can_be_cut]] = True
    blocks = np.ones(len(heads), np.int64)
    for source in np.unique(texts.source):
        mine = texts.source[heads] == source
        target = share * float(texts.sizes[texts.source == source].sum())
        length = _block_bytes(target)
        # A document of a few blocks is better held out whole, as long as it is not more than was asked for.
        longest = max(min(4 * length, target), 2 * length)
        if mine.sum() * share >= FEW:
            longest = max(longest, target / 8)
        sizes = texts.sizes[heads[mine]]
        blocks[mine] = np.where(sizes > longest, sizes // length, 1)
    blocks[mixed_up[heads]] = 1
    owner = np.repeat(np.arange(len(heads)), blocks)
    block = np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    # Copies in the source that decides.
    copies = texts.source == texts.source[first]
    sizes = np.bincount(first[copies], texts.sizes[copies], len(first))[heads].astype(np.int64)
    number = draws(texts.kin, seed=seed, purpose="validation")[heads][owner]
    number = np.where(blocks[owner] > 1, mixed(number ^ mixed(block.astype(np.uint64) + np.uint64(1))), number)
    return Units(
        first=heads[owner],
        block=block,
        blocks=blocks[owner],
        number=number,
        source=texts.source[heads][owner],
        bytes=np.maximum(sizes[owner] // blocks[owner], 1),
        held=np.zeros(len(owner), bool),
    )


def _block_bytes(target: float) -> int:
    """The length of blocks where `target` bytes are to be held out: 2 or 3 times a power of two, so that a few more
    documents do not move all of them."""
    size = max(LEAST_BLOCK_BYTES, int(min(max(BLOCK_BYTES, target / BLOCKS), target / 2)))
    power: int = 1 << (size.bit_length() - 1)
    return power + power // 2 if power + power // 2 <= size else power


def _held_bytes(units: Units, texts: Texts, first: Rows, *, source: int) -> int:
    """Bytes of `source` that are held out with texts of earlier sources."""
    shares = np.bincount(units.first, units.held / units.blocks, len(first))
    foreign = (texts.source == source) & (texts.source[first] != source)
    return int((texts.sizes[foreign] * shares[first[foreign]]).sum())


def _taken(units: Units, mine: Rows, *, target: int, total: int | None = None) -> Rows:
    """Units among `mine` in the order of their numbers, until they have about `target` bytes; those that would make it
    more than a tenth too many are passed over, and `total` is never reached."""
    most = 1.1 * target if total is None else min(1.1 * target, (target + total) / 2)
    order = mine[np.argsort(units.number[mine], kind="stable")]
    sums = np.cumsum(units.bytes[order])
    # All that fit in a row at once; a corpus may have millions.
    count = int(np.searchsorted(sums, min(0.95 * target, most), side="right"))
    taken, held = [order[:count]], int(sums[count - 1]) if count else 0
    for unit in order[count:].tolist():
        if held >= 0.95 * target:
            break
        if held + units.bytes[unit] <= most:
            taken.append(np.array([unit]))
            held += int(units.bytes[unit])
    return np.concatenate(taken)


def _least(units: Units, mine: Rows) -> Rows:
    """The smallest unit; of several, that with the lowest number."""
    return mine[np.lexsort((units.number[mine], units.bytes[mine]))[:1]]


def cut(data: Bytes, held: Rows, *, blocks: int) -> tuple[Rows, Rows, Mask]:
    """(starts, stops, whether it is held out) of the parts of a text of which the blocks numbered `held` are held out,
    in order."""
    size = len(data)
    reach = size // blocks // 4
    gap = min(GAP_BYTES, size // blocks // 2)
    parts: list[tuple[int, int, bool]] = []
    trained = 0
    runs = np.split(held, np.flatnonzero(np.diff(held) > 1) + 1)
    for run in runs:
        start, stop = (_border(data, int(at) * size // blocks, reach) for at in (run[0], run[-1] + 1))
        parts.append((trained, _before(data, start, gap), False))
        parts.append((start, stop, True))
        trained = _behind(data, stop, gap)
    parts.append((trained, size, False))
    # Training text of less than a gap between two blocks, and white space, is left out.
    parts = [part for part in parts if part[2] or (part[1] - part[0] >= gap and _has_text(data, *part[:2]))]
    starts, stops, is_held = (np.array(column) for column in zip(*parts, strict=True))
    return starts.astype(np.int64), stops.astype(np.int64), is_held.astype(bool)


_NEWLINE, _SPACE = 10, 32


def _border(data: Bytes, at: int, reach: int) -> int:
    """Where a block begins: at the beginning of a paragraph, a line or a word near `at`, else of a character."""
    if at <= 0 or at >= len(data):
        return min(max(at, 0), len(data))
    low, high = max(at - reach, 2), min(at + reach, len(data))
    here, before = data[low:high], data[low - 1 : high - 1]
    lines = (before == _NEWLINE) & (here != _NEWLINE)
    paragraphs = lines & (data[low - 2 : high - 2] == _NEWLINE)
    for wanted in (paragraphs, lines, before == _SPACE):
        found = np.flatnonzero(wanted) + low
        if len(found):
            return int(found[np.argmin(np.abs(found - at))])
    return _character(data, at)


def _before(data: Bytes, start: int, gap: int) -> int:
    """Where training text before a block that begins at `start` ends: behind a line, or a character."""
    if not start:
        return 0
    last = max(start - gap, 0)
    lines = np.flatnonzero(data[max(last - gap, 0) : last] == _NEWLINE)
    return int(lines[-1]) + max(last - gap, 0) + 1 if len(lines) else _character(data, last)


def _behind(data: Bytes, stop: int, gap: int) -> int:
    """Where training text behind a block that ends at `stop` begins."""
    if stop == len(data):
        return stop
    first = min(stop + gap, len(data))
    lines = np.flatnonzero(data[first : first + gap] == _NEWLINE)
    return int(lines[0]) + first + 1 if len(lines) else _character(data, first)


def part_id(document: str, start: int, stop: int) -> str:
    """The name under which shards know a part of a document."""
    return f"{document}[{start}:{stop}]"


def _character(data: Bytes, at: int) -> int:
    """The beginning of the character that holds byte `at`."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _has_text(data: Bytes, start: int, stop: int) -> bool:
    return not data[start:stop].tobytes().isspace()
