"""Near-duplicates written down as plainly as they are defined: strings, Python sets, all pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.prepare.slow_statistics import words_of

Shingles = frozenset[tuple[str, ...]]


def shingles(text: str, width: int) -> Shingles:
    """The different runs of `width` words; all words as one run where there are fewer."""
    each = words_of(text)
    if not each:
        return frozenset()
    return frozenset(tuple(each[start : start + width]) for start in range(max(1, len(each) - width + 1)))


def jaccard(one: Shingles, two: Shingles) -> float:
    return len(one & two) / len(one | two) if one and two else 0.0


def stars(sets: Sequence[Shingles], order: Iterable[int], threshold: float) -> dict[int, tuple[int, float]]:
    """Document that goes -> (the closest document that stays before it, their similarity), over all pairs."""
    staying: list[int] = []
    gone: dict[int, tuple[int, float]] = {}
    for document in order:
        similar = [(jaccard(sets[document], sets[other]), -rank) for rank, other in enumerate(staying)]
        best, rank = max(similar, default=(0.0, 0))
        if best >= threshold:
            gone[document] = (staying[-rank], best)
        else:
            staying.append(document)
    return gone
