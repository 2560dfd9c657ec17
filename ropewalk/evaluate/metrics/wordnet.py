"""WordNet's synonyms, from the database files of Debian's `wordnet-base`, of NLTK or of Princeton's release.

Only index, data and exception files are read (wndb(5WN)): which synsets a word is in, and the words of a synset.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ropewalk.base.errors import DataError

PARTS = ("noun", "verb", "adj", "adv")
_SUFFIXES = {
    "noun": "s: ses:s ves:f xes:x zes:z ches:ch shes:sh men:man ies:y",
    "verb": "s: ies:y es:e es: ed:e ed: ing:e ing:",
    "adj": "er: est: er:e est:e",
    "adv": "",
}
"""Rules of detachment by part of speech, `ending:replacement` (morphy(7WN))."""
RULES = {
    part: [(ending, new) for ending, _, new in (rule.partition(":") for rule in rules.split())]
    for part, rules in _SUFFIXES.items()
}
_SHARED = ("share/wordnet", "local/share/wordnet", "share/nltk_data/corpora/wordnet")

Synset = tuple[str, int]
"""Part of speech and byte offset in its data file."""


def find_wordnet(folder: Path | None = None) -> WordNet | None:
    """The database in `folder`, by default in the usual ones of Debian and NLTK; None if there is none."""
    if folder is not None:
        if not (folder / "index.noun").is_file():
            raise DataError(f"{folder}: no WordNet database: `index.noun` is missing; name the folder that holds it")
        return open_wordnet(folder)
    usual = [Path("/usr") / each for each in _SHARED]
    usual += [base / "nltk_data" / "corpora" / "wordnet" for base in (Path.home(), Path(sys.prefix))]
    return next((open_wordnet(each) for each in usual if (each / "index.noun").is_file()), None)


class WordNet:
    """Words and synsets."""

    def __init__(self, folder: Path) -> None:
        self._data = {part: _read(folder / f"data.{part}") for part in PARTS}
        self._index = {part: _index(folder / f"index.{part}") for part in PARTS}
        self._exceptions = {part: _exceptions(folder / f"{part}.exc") for part in PARTS}
        self.version = _version(self._data["noun"])
        """Such as 3.0."""
        self.synonyms: Callable[[str], frozenset[str]] = functools.lru_cache(1 << 16)(self._synonyms)
        """The words of all synsets of a word and its base forms, with their capital letters."""
        self.senses: Callable[[str], frozenset[Synset]] = functools.lru_cache(1 << 16)(self._senses)
        """The synsets of a word and its base form as METEOR 1.5 finds them: regardless of part of speech, the first
        rule that gives a known word."""

    def _synonyms(self, word: str) -> frozenset[str]:
        found = {name for part in PARTS for form in self._forms(word, part) for name in self._words(form, part)}
        return frozenset(name for name in found if "_" not in name)

    def _forms(self, word: str, part: str) -> Iterable[str]:
        """The word and its base forms that are in the index."""
        bases = self._exceptions[part].get(word)
        if bases is None:
            bases = [word[: -len(ending)] + new for ending, new in RULES[part] if word.endswith(ending)]
        return [form for form in dict.fromkeys([word, *bases]) if form in self._index[part]]

    def _words(self, form: str, part: str) -> Iterable[str]:
        data = self._data[part]
        for offset in self._index[part][form]:
            fields = data[offset : data.index(b"\n", offset)].split(b" ")
            count = int(fields[3], 16)
            # Adjectives may end with a marker of their position: `galore(ip)`.
            yield from (fields[4 + 2 * each].decode().partition("(")[0] for each in range(count))

    def _senses(self, word: str) -> frozenset[Synset]:
        bases = [base for part in PARTS for base in self._exceptions[part].get(word, [])]
        return frozenset().union(*map(self._direct, [word, *(bases or [self._base(word)])]))

    def _direct(self, word: str) -> frozenset[Synset]:
        return frozenset((part, offset) for part in PARTS for offset in self._index[part].get(word, ()))

    def _base(self, word: str) -> str:
        if word.endswith("ss") or len(word) <= 2:
            return word
        for part in PARTS:
            for ending, new in RULES[part]:
                form = word[: -len(ending)] + new
                if (part, ending) != ("noun", "ves") and word.endswith(ending) and self._direct(form):
                    return form
        return word


@functools.lru_cache(2)
def open_wordnet(folder: Path) -> WordNet:
    """The database in `folder`, read once: about half a second."""
    return WordNet(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; WordNet needs index, data and exception files") from error


def _index(path: Path) -> dict[str, tuple[int, ...]]:
    """Offsets of synsets by word."""
    lines = (line.split() for line in _read(path).decode().splitlines() if line and not line.startswith(" "))
    try:
        return {fields[0]: tuple(map(int, fields[-int(fields[2]) :])) for fields in lines}
    except (ValueError, IndexError) as error:
        raise DataError(f"{path}: not an index of WordNet ({error}); install it anew") from error


def _exceptions(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for form, *bases in (line.split() for line in _read(path).decode().splitlines() if line):
        found.setdefault(form, []).extend(bases)
    return found


def _version(data: bytes) -> str:
    """Out of the licence at the beginning: `WordNet 3.0 Copyright 2006 by Princeton University`."""
    words = data[:4000].decode(errors="replace").split()
    said = [words[at + 1] for at, word in enumerate(words[:-2]) if word == "WordNet" and words[at + 2] == "Copyright"]
    return said[0] if said else "unknown"
