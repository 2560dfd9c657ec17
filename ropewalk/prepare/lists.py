"""Lists from the user's files as columns: addresses to keep away from, words that few documents should hold.

A file holds one entry a line; blank lines and lines that begin with # are passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_regular

from .columns import text_buffers
from .config import Filter
from .kernels import lists as kernels
from .kernels.numbering import Counts
from .kernels.phrases import PHRASE_WORDS, Phrases, make_phrases
from .kernels.words import Hashes, hashes_of, word_hashes


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of a recipe, ready to be looked up; None where the recipe has none."""

    domains: Hashes | None = None
    url_words: Phrases | None = None
    parts: tuple[Hashes, Counts] | None = None
    """Keys in order, and the lengths that occur."""
    words: Phrases | None = None


def list_files(settings: Filter) -> tuple[str, ...]:
    """The files that `settings` name; what `match` says depends on their content."""
    urls, words = settings.urls, settings.words
    return (
        *((*urls.domains, *urls.words, *urls.soft_words, *urls.parts) if urls else ()),
        *(words.files if words else ()),
    )


@functools.lru_cache(maxsize=2)
def read_lists(settings: Filter) -> Lists:
    """The lists of `settings`; DataError names a file that is missing and an entry that cannot be meant."""
    urls, words = settings.urls, settings.words
    url_words = [(entry, kernels.HARD) for entry in _entries(urls.words, "urls.words", words=1)] if urls else []
    if urls:
        url_words += [(entry, kernels.SOFT) for entry in _entries(urls.soft_words, "urls.soft_words", words=1)]
    return Lists(
        _domains(urls.domains) if urls and urls.domains else None,
        make_phrases(url_words) if url_words else None,
        _parts(urls.parts) if urls and urls.parts else None,
        make_phrases([(entry, kernels.LISTED) for entry in _entries(words.files, "words.files", words=PHRASE_WORDS)])
        if words
        else None,
    )


def match(lists: Lists, *, text: pa.LargeStringArray, urls: pa.LargeStringArray) -> pa.RecordBatch:
    """One row a document, with the columns that `rules` asks for: all int64, 0 where there is no such list.

    `url_domains`, `url_words`, `url_soft_words` and `url_parts` count what of the lists an address (empty: none) holds;
    `listed_phrases` the places of the text with a phrase of the word list, `listed_words` the words in them.
    """
    nothing = np.zeros(len(text), np.int64)
    url_words = listed = np.zeros((len(text), 2), np.int64)
    addresses = text_buffers(urls)
    if lists.url_words:
        url_words = kernels.count_url_words(*word_hashes(*addresses), lists.url_words)
    if lists.words:
        listed = kernels.count_listed(*word_hashes(*text_buffers(text)), lists.words)
    columns = {
        "url_domains": kernels.match_domains(*addresses, lists.domains) if lists.domains is not None else nothing,
        "url_words": url_words[:, 0],
        "url_soft_words": url_words[:, 1],
        "url_parts": kernels.match_parts(*addresses, *lists.parts) if lists.parts is not None else nothing,
        "listed_phrases": listed[:, 0],
        "listed_words": listed[:, 1],
    }
    return pa.record_batch([pa.array(np.ascontiguousarray(column)) for column in columns.values()], names=list(columns))


def _domains(files: Sequence[str]) -> Hashes:
    entries = [entry for entry, _ in _lines(files, "urls.domains")]
    return np.unique(kernels.domain_keys(*text_buffers(pa.array(entries, pa.large_string()))))


def _parts(files: Sequence[str]) -> tuple[Hashes, Counts]:
    found = list(_lines(files, "urls.parts"))
    keys, lengths = kernels.part_keys(*text_buffers(pa.array([entry for entry, _ in found], pa.large_string())))
    for (entry, where), length in zip(found, lengths, strict=True):
        if not length:
            raise DataError(f"{where}: {entry!r} has no letter or digit, and would be in every address; remove it")
    return np.unique(keys), np.unique(lengths)


def _entries(files: Sequence[str], setting: str, *, words: int) -> Iterator[str]:
    """The entries of word lists, each of one to `words` words."""
    found = list(_lines(files, setting))
    for (entry, where), parts in zip(found, hashes_of([entry for entry, _ in found]), strict=True):
        if not 0 < len(parts) <= words:
            most = f"one to {words} words" if words > 1 else "one word"
            raise DataError(f"{where}: {entry!r} has {len(parts)} words; `filter.{setting}` takes {most} a line")
        yield entry


def _lines(files: Sequence[str], setting: str) -> Iterator[tuple[str, str]]:
    """(entry, file:line)."""
    for name in files:
        try:
            text = read_regular(Path(name)).decode("utf-8-sig")
        except OSError as error:
            reason = f"{error.strerror}; write the list or correct the name"
            raise DataError(f"`prepare.filter.{setting}`: {name}: {reason}") from None
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 text ({error.reason}); save it as UTF-8"
            raise DataError(f"`prepare.filter.{setting}`: {name}: {reason}") from None
        for number, line in enumerate(text.split("\n"), 1):
            entry = line.strip()
            if entry and not entry.startswith("#"):
                yield entry, f"{name}:{number}"
