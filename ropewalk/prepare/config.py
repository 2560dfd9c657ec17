"""Settings of `prepare`: where text comes from, what is kept, how it becomes tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of documents."""

    name: str
    """Short name, used in reports and document ids."""
    paths: tuple[str, ...]
    """Files, folders or globs, relative to the working folder. `python:stdlib` is the source code and
    `python:prose` the documentation topics and docstrings of the running Python."""
    format: Literal["auto", "text", "jsonl"] = "auto"
    """`text`: one document a file. `jsonl`: one JSON object a line (also .jsonl.gz).
    `auto` decides by the file's ending."""
    text_key: str = "text"
    """Key of the text in a JSON line."""
    domain: str = ""
    """Kind of text (code, prose, ...); the source's name when empty. Python completions are checked
    in domain `code`."""
    weight: Annotated[float, Range(above=0)] | None = None
    """Share of the training mixture; when no source has one, sources are mixed by their number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Rules that remove whole documents; each can be switched off."""

    min_bytes: Annotated[int, Range(least=0)] = 200
    """Shortest document kept; 0 switches the rule off."""
    max_bytes: Annotated[int, Range(least=0)] = 2_000_000
    """Longest document kept; 0 switches the rule off."""
    max_mean_line_length: Annotated[float, Range(least=0)] = 200.0
    """Highest mean number of characters a line: longer lines are data, not text. 0 switches the rule off."""
    min_letter_share: Annotated[float, Range(least=0, most=1)] = 0.25
    """Lowest share of letters among the characters that are not white space: tables of numbers fall below."""
    max_duplicate_line_share: Annotated[float, Range(least=0, most=1)] = 0.6
    """Highest share of non-empty lines that repeat an earlier one of the document; 1 switches it off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """The tokenizer: trained on this corpus, or given."""

    file: str = ""
    """A Hugging Face `tokenizer.json` to use as it is; empty trains one."""
    vocabulary: Annotated[int, Range(least=257, most=1_000_000)] = 4096
    """Tokens of a trained byte-level BPE tokenizer, the end-of-text token included."""
    train_bytes: Annotated[int, Range(least=1000)] = 20_000_000
    """UTF-8 bytes of documents, drawn over all sources by hash, that the tokenizer is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Raw files -> filtered, deduplicated, tokenized shards and a manifest."""

    sources: tuple[Source, ...]
    """Where documents come from; one `[[prepare.sources]]` table each."""
    filter: Filter = field(default_factory=Filter)
    """Rules that remove documents."""
    deduplicate: Literal["exact", "off"] = "exact"
    """`exact` keeps the first of documents whose texts are equal, over all sources."""
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    """How text becomes tokens."""
    validation_share: Annotated[float, Range(above=0, below=1)] = 0.02
    """Share of documents held out, drawn by the hash of their text; never trained on."""
    shard_tokens: Annotated[int, Range(least=1000)] = 16_000_000
    """Most tokens in one shard; a longer document has a shard to itself."""
    workers: Annotated[int, Range(least=0), CONTINUES] = 0
    """Worker processes; 0 takes one a core. The output does not depend on it."""
    folder: Annotated[str, CONTINUES] = "prepared"
    """Prepared data lies here, in a folder named by the hash of settings and input bytes."""

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "there is none; add a [[prepare.sources]] table with `name` and `paths`"
        names = [source.name for source in self.sources]
        for index, source in enumerate(self.sources):
            if source.name in names[:index]:
                yield (
                    f"sources.{index}.name",
                    f'two sources are named "{source.name}"; give each its own name',
                )
            if not source.name.replace("-", "").replace("_", "").isalnum():
                yield f"sources.{index}.name", f'"{source.name}" names files; use letters, digits, - and _'
            if not source.paths:
                yield f"sources.{index}.paths", "the list is empty; name files, folders or globs"
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            yield "sources", "some sources have a `weight` and some have none; give all of them one, or none"
        if self.filter.max_bytes and self.filter.min_bytes > self.filter.max_bytes:
            yield (
                "filter.min_bytes",
                f"{self.filter.min_bytes} is above `max_bytes` ({self.filter.max_bytes}); every document would go",
            )
