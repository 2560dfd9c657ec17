"""METEOR 1.5 as its Java program computes it, from the program's own files: function words, synonyms, paraphrases.

For comparison with published values. The program keeps 40 partial alignments and may miss the best one; this search
repeats it step by step, with the rounding and the distances that it has.
"""

from __future__ import annotations

import copy
import gzip
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ropewalk.base.errors import DataError, UserError

from .meteor import ENGLISH, Meteor15, Tokenize, WordMatch
from .wordnet import RULES

if TYPE_CHECKING:
    from ..question_task import Item

BEAM = 40
Phrase = tuple[str, ...]
Paraphrases = Mapping[Phrase, Sequence[Phrase]]


class MeteorProgram(Meteor15):
    """METEOR 1.5 for English with the resources of the Java program."""

    name = "meteor_1.5_jar"

    def __init__(self, *, program: str = "", tokenize: Tokenize = "words") -> None:
        """`program` is the path of meteor-1.5.jar; its paraphrases are `data/paraphrase-en.gz` beside it."""
        if not program:
            raise UserError(f"{self.name}: name the program, as {self.name}.program=FOLDER/meteor-1.5.jar")
        super().__init__(tokenize=tokenize)
        self._parameters, jar = ENGLISH, Path(program)
        self._functions = frozenset(_entry(jar, "function/english.words").split())
        self._synsets, self._bases = _synonyms(jar)
        self._table = jar.parent / "data" / "paraphrase-en.gz"
        if not self._table.is_file():
            raise DataError(f"{self._table}: missing; it comes with the program")
        self._paraphrases: Paraphrases | None = None
        self.signature = f"1.5|en|tok:{tokenize}|case:lc|program:{jar.name}|paraphrases:{self._table.name}|refs:best"

    def for_items(self, items: Sequence[Item]) -> Self:
        """Reads the paraphrases that these items may need: about 20 s for the table of English."""
        texts = [text for item in items for text in (*item.predictions[:1], *item.question.references)]
        found = copy.copy(self)
        found._paraphrases = _read_paraphrases(self._table, {word for text in texts for word in self._tokenize(text)})
        return found

    def statistics(self, item: Item) -> list[float]:
        known = self if self._paraphrases is not None else self.for_items([item])
        return super(MeteorProgram, known).statistics(item)

    def _matches(self, prediction: list[str], reference: list[str]) -> list[WordMatch]:
        candidates: list[list[WordMatch]] = [[] for _ in reference]
        for match in self._candidates(prediction, reference):
            candidates[match.right].append(match)
        return _beam_search(candidates, len(prediction))

    def _candidates(self, prediction: list[str], reference: list[str]) -> Iterator[WordMatch]:
        """All matches, by kind, then by position in the reference."""
        pairs = [(left, right) for right in range(len(reference)) for left in range(len(prediction))]
        same = {(left, right) for left, right in pairs if prediction[left] == reference[right]}
        yield from (WordMatch(left, right, 0) for left, right in pairs if (left, right) in same)
        if prediction == reference:
            return
        others = [pair for pair in pairs if pair not in same]
        assert self._stem is not None
        stems = [[self._stem(word) for word in words] for words in (prediction, reference)]
        yield from (WordMatch(left, right, 1) for left, right in others if stems[0][left] == stems[1][right])
        senses = [[self._senses(word) for word in words] for words in (prediction, reference)]
        yield from (WordMatch(left, right, 2) for left, right in others if senses[0][left] & senses[1][right])
        for right, words, left, other in self._phrases(reference, prediction):
            yield WordMatch(left, right, 3, left_words=other, right_words=words)
        for left, words, right, other in self._phrases(prediction, reference):
            yield WordMatch(left, right, 3, left_words=words, right_words=other)

    def _phrases(self, text: list[str], other: list[str]) -> Iterator[tuple[int, int, int, int]]:
        """Phrases of `text` with a paraphrase in `other`: position and length of both."""
        assert self._paraphrases is not None
        for at in range(len(text)):
            for end in range(at + 1, len(text) + 1):
                for phrase in self._paraphrases.get(tuple(text[at:end]), ()):
                    for place in range(len(other) - len(phrase) + 1):
                        if tuple(other[place : place + len(phrase)]) == phrase:
                            yield at, end - at, place, len(phrase)

    def _senses(self, word: str) -> frozenset[str]:
        bases = self._bases.get(word) or [self._base(word)]
        return frozenset().union(*(self._synsets.get(each, frozenset()) for each in (word, *bases)))

    def _base(self, word: str) -> str:
        if word.endswith("ss") or len(word) <= 2:
            return word
        for part in ("noun", "verb", "adj"):
            for ending, new in RULES[part]:
                form = word[: -len(ending)] + new
                if (part, ending) != ("noun", "ves") and word.endswith(ending) and form in self._synsets:
                    return form
        return word


@dataclass(slots=True)
class _Partial:
    """A partial alignment of the program's search."""

    matches: tuple[WordMatch, ...]
    left_used: int
    right_used: int
    """Bit masks of words."""
    left_weight: int = 0
    right_weight: int = 0
    chunks: int = 0
    next_right: int = 0
    chunk_end: int = -1
    distance: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        return -(self.left_weight + self.right_weight), self.chunks, self.distance

    def count(self, match: WordMatch) -> None:
        weight = 1.0 if match.kind == 0 else 0.5
        # The program adds halves to whole numbers, so that a single word that is no exact match counts nothing.
        self.left_weight = int(self.left_weight + match.left_words * weight)
        self.right_weight = int(self.right_weight + match.right_words * weight)
        self.chunks += self.chunk_end not in (-1, match.left)
        self.next_right = match.right + match.right_words
        self.chunk_end = match.left + match.left_words


def _beam_search(candidates: Sequence[Sequence[WordMatch]], left_size: int) -> list[WordMatch]:
    fixed = _definite(candidates, left_size)
    start = _Partial((), 0, 0)
    for match in fixed.values():
        start.left_used |= _left_mask(match)
        start.right_used |= _right_mask(match)
    following = [start]
    for at, matches in enumerate(candidates):
        paths, following = sorted(following, key=lambda path: path.rank), []
        for path in paths[:BEAM]:
            if path.right_used >> at & 1:
                if at < path.next_right:
                    following.append(path)
                elif known := fixed.get(path.next_right):
                    path.count(known)
                    path.matches += (known,)
                    path.distance += abs(known.right - known.left)
                    following.append(path)
                continue
            for match in matches:
                if path.left_used & _left_mask(match) or path.right_used & _right_mask(match):
                    continue
                longer = replace(
                    path,
                    matches=(*path.matches, match),
                    left_used=path.left_used | _left_mask(match),
                    right_used=path.right_used | _right_mask(match),
                )
                longer.count(match)
                path.distance += abs(match.right - match.left)  # as in the program, not that of `longer`
                following.append(longer)
            if path.chunk_end != -1:
                path.chunks, path.chunk_end = path.chunks + 1, -1
            path.next_right += 1
            following.append(path)
        following = following or paths[:1]
    for path in following:
        path.chunks += path.chunk_end != -1
    return list(min(following, key=lambda path: path.rank).matches)


def _definite(candidates: Sequence[Sequence[WordMatch]], left_size: int) -> dict[int, WordMatch]:
    """Matches that share no word with another one, by their position in the reference."""
    left, right = [0] * left_size, [0] * len(candidates)
    for match in (match for matches in candidates for match in matches):
        for at in range(match.left, match.left + match.left_words):
            left[at] += 1
        for at in range(match.right, match.right + match.right_words):
            right[at] += 1
    alone = [matches[0] for matches in candidates if len(matches) == 1]
    return {
        each.right: each
        for each in alone
        if set(left[each.left : each.left + each.left_words]) == {1}
        and set(right[each.right : each.right + each.right_words]) == {1}
    }


def _left_mask(match: WordMatch) -> int:
    return ((1 << match.left_words) - 1) << match.left


def _right_mask(match: WordMatch) -> int:
    return ((1 << match.right_words) - 1) << match.right


def _synonyms(jar: Path) -> tuple[Mapping[str, frozenset[str]], Mapping[str, list[str]]]:
    """Synsets by word, and base forms by irregular form."""
    lines = _entry(jar, "synonym/english.synsets").splitlines()
    synsets = {word: frozenset(numbers.split()) for word, numbers in zip(lines[::2], lines[1::2], strict=True)}
    lines = _entry(jar, "synonym/english.exceptions").splitlines()
    bases: dict[str, list[str]] = {}
    for base, forms in zip(lines[::2], lines[1::2], strict=True):
        for form in forms.split():
            bases.setdefault(form, []).append(base)
    return synsets, bases


def _entry(jar: Path, name: str) -> str:
    try:
        with zipfile.ZipFile(jar) as archive:
            return archive.read(name).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{jar}: not the program of METEOR 1.5: {error}") from error


def _read_paraphrases(path: Path, vocabulary: set[str]) -> Paraphrases:
    """The paraphrases, of three lines each (probability, phrase, paraphrase), whose words are all in `vocabulary`."""
    found: dict[Phrase, list[Phrase]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for _, line, other in zip(file, file, file, strict=False):
                phrase = tuple(line.split())
                if vocabulary.issuperset(phrase):
                    paraphrase = tuple(other.split())
                    if vocabulary.issuperset(paraphrase):
                        found.setdefault(phrase, []).append(paraphrase)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: paraphrases of METEOR: {error}") from error
    return found
