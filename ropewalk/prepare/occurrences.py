"""How often documents occur, and whether that often does harm.

Hernandez et al. (2022, arXiv:2205.10487) trained models on data of which a small part is repeated: 0.1 % of the data
seen 100 times, a tenth of all training tokens, made a model of 800 M parameters as weak as one of 400 M. Few repeats do
little, and so does a tiny part repeated endlessly; the damage peaks between, where the part can be memorised and to do
so takes much of the model. So two numbers matter: how often a document occurs, and what share of the data such
documents make up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
"""Lowest number of occurrences of each bar; the last is open."""
HARMFUL_TIMES = 10
"""Least occurrences that count towards the warning. Our choice: the paper's example has 100, and four passes over the
same data are almost as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""
HARMFUL_SHARE = 0.1
"""Share of the data, all copies counted, that the paper's repeated part has."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Documents that occur `least` to `most` times."""

    least: int
    most: int | None
    """None: no limit."""
    documents: int
    """Different documents."""
    copies: int
    """All their occurrences."""
    bytes: int
    """Text of all their occurrences."""


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The histogram of a corpus."""

    bars: tuple[Bar, ...]
    harmful_share: float
    """Share of bytes in documents that occur `HARMFUL_TIMES` or more."""

    @property
    def warning(self) -> str:
        """What to worry about; empty when there is nothing."""
        if self.harmful_share < HARMFUL_SHARE:
            return ""
        return (
            f"{self.harmful_share:.0%} of the text are documents that occur {HARMFUL_TIMES} times or more. Hernandez "
            f"et al. (2022) found that {HARMFUL_SHARE:.0%} of such repeats can cost half of a model's parameters: "
            "remove duplicates, or lower the weight of the source that repeats"
        )


def occurrences(groups: npt.NDArray[np.integer], sizes: Counts) -> Occurrences:
    """The histogram of documents that are labelled with the group of their equals: `groups` holds any label a document
    (the first of its equals, the document that stays for it), `sizes` its bytes.
    """
    _, group, count = np.unique(groups, return_inverse=True, return_counts=True)
    text = np.bincount(group, sizes, minlength=len(count)).astype(np.int64)
    bar = np.searchsorted(EDGES, count, "right") - 1
    documents, copies, content = (
        np.bincount(bar, weights, minlength=len(EDGES)).astype(np.int64) for weights in (None, count, text)
    )
    harmful = int(text[count >= HARMFUL_TIMES].sum())
    tops = [edge - 1 for edge in EDGES[1:]]
    rows = zip(EDGES, [*tops, None], documents.tolist(), copies.tolist(), content.tolist(), strict=True)
    return Occurrences(tuple(Bar(*row) for row in rows), harmful / max(int(text.sum()), 1))
