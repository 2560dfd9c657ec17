"""Corpora of random documents with copies that differ a little, the same for the same seed."""

from __future__ import annotations

import itertools
import random

import pyarrow as pa

HAN = [chr(0x4E00 + number) for number in range(3000)]
LATIN = [f"w{number}" for number in range(3000)]


def column(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def with_copies(
    seed: int, *, originals: int, copies: int, words: int = 120, vocabulary: list[str] = LATIN, joint: str = " "
) -> list[str]:
    """`originals` documents, and `copies` of some of them with up to a tenth of the words replaced or the end cut."""
    draw = random.Random(seed)
    documents = [draw.choices(vocabulary, k=draw.randint(words // 2, words * 2)) for _ in range(originals)]
    for _ in range(copies):
        copy = list(draw.choice(documents[:originals]))
        for _ in range(draw.randint(0, max(1, len(copy) // 20))):
            copy[draw.randrange(len(copy))] = draw.choice(vocabulary)
        documents.append(copy[: draw.randint(int(len(copy) * 0.8), len(copy))])
    draw.shuffle(documents)
    return [joint.join(document) for document in documents]


def cut(texts: list[str], edges: list[int]) -> list[pa.LargeStringArray]:
    """The same documents as chunks that begin at 0 and at `edges`."""
    borders = [0, *sorted(edges), len(texts)]
    return [column(texts[a:b]) for a, b in itertools.pairwise(borders)]
