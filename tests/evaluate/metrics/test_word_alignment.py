"""The best alignment against all alignments; the greedy one against NLTK."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from ropewalk.evaluate.metrics.word_alignment import Pair, best_alignment, count_chunks, greedy_alignment


def rank(pairs: Sequence[Pair], candidates: Sequence[Mapping[int, int]]) -> tuple[int, int, int]:
    weight = sum(candidates[right][left] for left, right in pairs)
    return -weight, count_chunks(pairs), sum(abs(left - right) for left, right in pairs)


def best_rank(candidates: Sequence[Mapping[int, int]]) -> tuple[int, int, int]:
    """Over all alignments."""
    ranks = []
    for chosen in itertools.product(*[[None, *matches] for matches in candidates]):
        used = [each for each in chosen if each is not None]
        if len(set(used)) == len(used):
            pairs = [(left, right) for right, left in enumerate(chosen) if left is not None]
            ranks.append(rank(pairs, candidates))
    return min(ranks)


def test_no_alignment_is_better() -> None:
    draw = random.Random(0)
    for _ in range(400):
        words = [draw.choice("aabbcd") for _ in range(draw.randint(1, 7))]
        reference = [draw.choice("aabbce") for _ in range(draw.randint(1, 6))]
        candidates = [
            {
                at: 2 if word == other else 1
                for at, word in enumerate(words)
                if word == other or word + other in "ac bd ba"
            }
            for other in reference
        ]
        assert rank(best_alignment(candidates), candidates) == best_rank(candidates), (words, reference)


def test_an_alignment_prefers_weight_then_chunks_then_nearness() -> None:
    assert best_alignment([{0: 1, 1: 2}]) == [(1, 0)]
    assert best_alignment([{0: 2, 2: 2}, {3: 2}]) == [(2, 0), (3, 1)]
    assert best_alignment([{0: 2, 1: 2}]) == [(0, 0)]
    assert best_alignment([{}, {}]) == []


def test_long_texts_keep_a_bounded_number_of_states() -> None:
    candidates = [dict.fromkeys(range(60), 2) for _ in range(60)]
    assert len(best_alignment(candidates, most_states=50)) == 60


def test_chunks_are_runs_of_adjacent_words() -> None:
    assert [count_chunks(pairs) for pairs in ([], [(3, 4)], [(0, 0), (1, 1), (2, 4), (3, 5)], [(0, 1), (1, 0)])] == [
        *(0, 1, 2, 2)
    ]


def test_greedy_stages_align_as_nltk_does() -> None:
    meteor = pytest.importorskip("nltk.translate.meteor_score")
    draw = random.Random(1)
    vocabulary = ["rope", "ropes", "roping", "walk", "walked", "long", "the"]
    from ropewalk.evaluate.metrics.rouge import porter_stem

    stem = porter_stem()
    for _ in range(200):
        one, other = ([draw.choice(vocabulary) for _ in range(draw.randint(1, 9))] for _ in range(2))
        theirs, *_ = meteor.align_words(one, other, wordnet=NoSynonyms())
        ours = greedy_alignment(one, other, [same, lambda word: (stem(word), {stem(word)})])
        assert ours == theirs
        assert count_chunks(ours) == (meteor._count_chunks(theirs) if theirs else 0)


class NoSynonyms:
    def synsets(self, word: str) -> list[str]:
        return []


def same(word: str) -> tuple[str, set[str]]:
    return word, {word}
