"""Which source gives which row: shares met by the credit rule, in closed form for any row. No torch.

The source whose rows lag furthest behind its share gives the next row. With shares of whole rows in PERIOD rows that
rule repeats itself every PERIOD rows: a credit stays above -PERIOD, is a multiple of PERIOD after PERIOD rows, and all
credits sum to zero, so all are zero then. So how many rows every source has given before row i is a multiplication and
a look into a table. Weights that move are a staircase of such stretches; weights that are changed, or a source that is
used up, begin a new stretch with the counts so far: no row of a source is given twice, none is left out.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ropewalk.base.errors import DataError

PERIOD = 4096
"""Rows after which a stretch of the mixture repeats: weights are met to 1/4096, each source has at least one row."""

PIECES = 1024
"""Stretches of a line of weights. The shares then move in steps of at most 1/1024; with 65,536 pieces the tables of a
hundred sources would take 100 MB and say nothing more."""

_FINE = 32
"""Bits behind the point of the rows that are wished for: integers, so that every machine rounds alike."""

Cycle = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The weights of the sources from one row on."""

    first_row: int = 0
    weights: Mapping[str, float]
    """By the name of the source, before normalisation; a source that is not named gives no rows."""
    end_weights: Mapping[str, float] | None = None
    """The shares move along a straight line, from those of `weights` at row 0 to these at row `over_rows`."""
    over_rows: int = 0
    max_epochs: Mapping[str, float] = field(default_factory=dict)
    """How often a source is read at most, over all segments; the others share its rows from then on."""

    def __post_init__(self) -> None:
        for weights in (self.weights, *([self.end_weights] if self.end_weights is not None else [])):
            if not weights or not any(weights.values()) or not all(0 <= w < math.inf for w in weights.values()):
                raise DataError(f"the weights of the sources are {dict(weights)}; give 0 or more each, one above 0")
        if self.end_weights is not None and self.over_rows < 1:
            raise DataError(f"the weights move over {self.over_rows} rows; give 1 or more")


@dataclass(frozen=True, slots=True)
class Mixture:
    """The weights of a whole phase: one segment, and one more for every change."""

    segments: tuple[Segment, ...]

    @classmethod
    def constant(cls, weights: Mapping[str, float], *, max_epochs: Mapping[str, float] | None = None) -> Mixture:
        """The same shares for all rows."""
        return cls((Segment(weights=dict(weights), max_epochs=dict(max_epochs or {})),))

    @classmethod
    def linear(
        cls,
        start: Mapping[str, float],
        end: Mapping[str, float],
        over_rows: int,
        *,
        max_epochs: Mapping[str, float] | None = None,
    ) -> Mixture:
        """Shares that move along a straight line from `start` at row 0 to `end` at row `over_rows`."""
        most = dict(max_epochs or {})
        return cls((Segment(weights=dict(start), end_weights=dict(end), over_rows=over_rows, max_epochs=most),))

    def changed(
        self, at_row: int, weights: Mapping[str, float], *, max_epochs: Mapping[str, float] | None = None
    ) -> Mixture:
        """The same rows before `at_row`, other shares from there on."""
        return self.continued(at_row, Mixture.constant(weights, max_epochs=max_epochs))

    def continued(self, at_row: int, wanted: Mixture) -> Mixture:
        """The same rows before `at_row`, what `wanted` says of its first segment from there on; self if that is what
        holds already."""
        kept = tuple(segment for segment in self.segments if segment.first_row < at_row)
        last = replace(wanted.segments[0], first_row=at_row)
        if kept and replace(kept[-1], first_row=at_row) == last:
            return Mixture(kept)
        return Mixture((*kept, last))

    def names(self) -> list[str]:
        """Every source that any segment names, in the order of their first mention."""
        return list(dict.fromkeys(name for s in self.segments for name in (*s.weights, *(s.end_weights or ()))))

    def to_json(self) -> list[dict[str, Any]]:
        """For people and `from_json`: what is not used is left out."""
        return [_segment_to_json(segment) for segment in self.segments]

    @classmethod
    def from_json(cls, value: Sequence[Mapping[str, Any]]) -> Mixture:
        """What `to_json` gave."""
        return cls(tuple(_segment_from_json(entry) for entry in value))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows `first` to `stop` (exclusive; None: without end), in which every PERIOD rows look alike."""

    first: int
    stop: int | None
    counts: Counts
    """[2, sources]: rows given before `first`; rows in a period."""
    cycle: Cycle
    """[2, PERIOD]: the source of each slot; its rows in the period before the slot."""


class Course:
    """A mixture over sources of known size: which source gives row i, and which row is a source's k-th.

    `rows` gives the rows of each source by name; their order numbers the sources and decides nothing else: ties are
    broken by name.
    """

    def __init__(self, mixture: Mixture, rows: Mapping[str, int]) -> None:
        names = sorted(rows)
        # Inside, sources stand in the order of their names.
        self._numbers = np.array([list(rows).index(name) for name in names])
        self._inside = np.argsort(self._numbers).tolist()
        unknown = [name for name in mixture.names() if name not in rows]
        if unknown:
            raise DataError(f"the mixture names {', '.join(unknown)}; the corpus has {', '.join(rows) or 'no source'}")
        if not 1 <= len(names) <= PERIOD // 4:
            raise DataError(f"{len(names)} sources cannot be mixed; give 1 to {PERIOD // 4}, joining small ones")
        self._firsts: list[int] = []
        self._bases: list[list[int]] = []
        self._shares: list[tuple[int, ...]] = []
        self.total: int | None = None
        """Rows there are when every source is used up; None when there is no end."""
        counts = [0] * len(names)
        stops = [segment.first_row for segment in mixture.segments[1:]]
        for segment, stop in zip(mixture.segments, [*stops, None], strict=True):
            limits = [_limit(segment, name, rows[name]) for name in names]
            row: int | None = segment.first_row
            while row is not None and row != stop and self.total is None:
                row = self._lay(_Line(segment, names), row, stop, counts, limits)
        self._at = functools.lru_cache(maxsize=8)(self._stretch)

    def at(self, row: int) -> Stretch:
        """The stretch that holds `row`."""
        return self._at(self._number(row))

    def counts(self, row: int) -> list[int]:
        """How many rows each source has given before `row`."""
        row = row if self.total is None else min(row, self.total)
        number = self._number(row)
        if number < 0:
            return [0] * len(self._inside)
        counts = _advanced(self._bases[number], self._shares[number], row - self._firsts[number])
        return [counts[inside] for inside in self._inside]

    def row_of(self, source: int, given: int) -> int | None:
        """The row that is the source's row number `given`, None when it never comes."""
        inside = self._inside[source]
        number = bisect.bisect_right(self._bases, given, key=lambda base: base[inside]) - 1
        if number < 0 or not self._shares[number][inside]:
            return None
        row = self._firsts[number] + _offset_of(inside, given - self._bases[number][inside], self._shares[number])
        return row if self.total is None or row < self.total else None

    def _number(self, row: int) -> int:
        return bisect.bisect_right(self._firsts, row) - 1

    def _stretch(self, number: int) -> Stretch:
        stop = self._firsts[number + 1] if number + 1 < len(self._firsts) else self.total
        counts = np.array([self._bases[number], self._shares[number]], np.int64)[:, self._inside]
        source, before = cycle(self._shares[number])
        return Stretch(
            self._firsts[number],
            stop,
            np.ascontiguousarray(counts),
            np.stack([self._numbers[source].astype(np.int32), before]),
        )

    def _lay(self, line: _Line, row: int, stop: int | None, counts: list[int], limits: list[int | None]) -> int | None:
        """Lays stretches from `row` to `stop`, or to where a source is used up; gives that row and moves `counts`."""
        live = [limit is None or count < limit for count, limit in zip(counts, limits, strict=True)]
        for first, until, shares in _stairs(line, row, live):
            if not any(shares):
                self.total = first
                return first
            self._firsts.append(first)
            self._bases.append(list(counts))
            self._shares.append(shares)
            ends = [end for end in (until, stop) if end is not None]
            used_up = _first_used_up(shares, counts, limits, within=min(ends) - first if ends else None)
            ends += [] if used_up is None else [first + used_up]
            if not ends:
                return None
            counts[:] = _advanced(counts, shares, min(ends) - first)
            if min(ends) == stop or used_up == min(ends) - first:
                return min(ends)
        raise AssertionError("a staircase ends with a stretch without end")


@functools.lru_cache(maxsize=64)
def cycle(shares: tuple[int, ...]) -> Cycle:
    """The credit rule over one period of `shares`, as `Stretch.cycle`; of equal credits the first source's wins."""
    return _cycle(np.array(shares, np.int64))


@njit(cache=True, nogil=True)
def _cycle(shares: Counts) -> Cycle:
    result = np.empty((2, PERIOD), np.int32)
    credit, given = np.zeros(len(shares), np.int64), np.zeros(len(shares), np.int32)
    for slot in range(PERIOD):
        best = -1
        for source in range(len(shares)):
            credit[source] += shares[source]
            if shares[source] and (best < 0 or credit[source] > credit[best]):
                best = source
        credit[best] -= PERIOD
        result[0, slot], result[1, slot] = best, given[best]
        given[best] += 1
    return result


class _Line:
    """The weights of a segment as integers, one for each of `names`; they move or stand still."""

    def __init__(self, segment: Segment, names: Sequence[str]) -> None:
        self._start = _integers(segment.weights, names)
        self._end = self._start if segment.end_weights is None else _integers(segment.end_weights, names)
        self.over = segment.over_rows

    def wished(self, twice_row: int, live: Sequence[bool]) -> list[int]:
        """Rows of each source in a period around row `twice_row` / 2, in units of 2**-_FINE."""
        place = min(twice_row, 2 * self.over)
        # Without a line to follow, both ends are the same and any place on it will do.
        rest = 2 * self.over - place if self.over else 1
        weights = [
            (start * rest + end * place) * alive for start, end, alive in zip(self._start, self._end, live, strict=True)
        ]
        total = sum(weights)
        # What is wished for at all is wished for with at least one unit.
        return [max(min(weight, 1), (weight * PERIOD << _FINE) // total) for weight in weights] if total else weights


def _stairs(
    line: _Line, row: int, live: Sequence[bool]
) -> Iterator[tuple[int, int, tuple[int, ...]] | tuple[int, None, tuple[int, ...]]]:
    """(first row, row behind the last, shares) of the stretches from `row` on; the last has no end.

    What rounding takes from a source in one stretch is added to its wish in the next, up to a row a period.
    """
    step = PERIOD * max(1, -(-line.over // (PERIOD * PIECES)))
    one = 1 << _FINE
    carried = [0] * len(live)
    while row < line.over:
        wished = line.wished(2 * row + step, live)
        shares = apportioned(wished, carried)
        yield row, row + step, shares
        carried = [
            max(-one, min(one, wish + carry - share * one))
            for wish, carry, share in zip(wished, carried, shares, strict=True)
        ]
        row += step
    yield row, None, apportioned(line.wished(2 * line.over, live), [0] * len(live))


def apportioned(wished: Sequence[int], carried: Sequence[int]) -> tuple[int, ...]:
    """PERIOD rows by largest remainders of `wished` + `carried` (units of 2**-_FINE rows): at least one for every
    source that is wished for, none for the others."""
    if not any(wished):
        return (0,) * len(wished)
    one = 1 << _FINE
    wants = [wish + carry for wish, carry in zip(wished, carried, strict=True)]
    shares = [max(1, want >> _FINE) if wish else 0 for want, wish in zip(wants, wished, strict=True)]
    named = [source for source, wish in enumerate(wished) if wish]
    while (left := PERIOD - sum(shares)) != 0:
        # The source that lacks most gains a row, or the one that has most too much loses one.
        lack = {source: wants[source] - shares[source] * one for source in named if left > 0 or shares[source] > 1}
        chosen = sorted(lack, key=lambda source: -lack[source] if left > 0 else lack[source])
        for source in chosen[: abs(left)]:
            shares[source] += 1 if left > 0 else -1
    return tuple(shares)


def _integers(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """The normalised weights in units of 2**-40, at least one where there is any weight."""
    total = math.fsum(weights.values())
    exact = [weights.get(name, 0.0) for name in names]
    return [max(1, round(weight / total * 2**40)) if weight else 0 for weight in exact]


def _limit(segment: Segment, name: str, rows: int) -> int | None:
    epochs = segment.max_epochs.get(name)
    # 0.29 of 100 rows are 29, though 0.29 * 100 is 28.999999999999996.
    return None if epochs is None else int(epochs * rows + 1e-6)


def _first_used_up(
    shares: Sequence[int], counts: Sequence[int], limits: Sequence[int | None], *, within: int | None
) -> int | None:
    """After how many rows of a stretch the first source reaches its limit; None when none does `within` that many."""
    found: list[int] = []
    for source, (share, count, limit) in enumerate(zip(shares, counts, limits, strict=True)):
        if limit is None or not share:
            continue
        if within is not None and count + share * -(-within // PERIOD) < limit:
            continue
        found.append(_offset_of(source, limit - count - 1, tuple(shares)) + 1)
    first = min(found, default=None)
    return None if first is None or (within is not None and first > within) else first


def _advanced(counts: Sequence[int], shares: tuple[int, ...], rows: int) -> list[int]:
    """`counts` after so many rows of a stretch."""
    periods, slot = divmod(rows, PERIOD)
    begun = np.bincount(cycle(shares)[0, :slot], minlength=len(shares)).tolist() if slot else [0] * len(shares)
    return [count + periods * share + more for count, share, more in zip(counts, shares, begun, strict=True)]


def _offset_of(source: int, given: int, shares: tuple[int, ...]) -> int:
    """The offset in a stretch of the source's row number `given`, counted from the stretch's beginning."""
    period, number = divmod(given, shares[source])
    return period * PERIOD + int(np.flatnonzero(cycle(shares)[0] == source)[number])


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    line = {} if segment.end_weights is None else {"end": dict(segment.end_weights), "over_rows": segment.over_rows}
    most = {"max_epochs": dict(segment.max_epochs)} if segment.max_epochs else {}
    return {"row": segment.first_row, "weights": dict(segment.weights), **line, **most}


def _segment_from_json(entry: Mapping[str, Any]) -> Segment:
    return Segment(
        first_row=entry["row"],
        weights=entry["weights"],
        end_weights=entry.get("end"),
        over_rows=entry.get("over_rows", 0),
        max_epochs=entry.get("max_epochs", {}),
    )
