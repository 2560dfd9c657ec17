"""The manifest: what prepare hands to load. One JSON file beside the shards, described in docs/formats.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_json, upgraded, write_json

from .compression import Compression

FORMAT = 2
FILE = "manifest.json"

Split = Literal["train", "validation"]
ShardKind = Literal["tokens", "references"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard: documents of one source and one split. `references` say in which files of another program the tokens
    lie (`store/references.py`)."""

    file: str
    """Relative to the manifest's folder, or an absolute path, or a URL."""
    source: str
    split: Split
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the texts that were encoded."""
    file_bytes: int
    checksum: str
    kind: ShardKind = "tokens"
    compression: Compression = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """What one step did to one source. `documents_in == documents_out + sum(removed.values())`, always; bytes likewise,
    with those that edits took."""

    step: str
    documents_in: int
    documents_out: int
    bytes_in: int
    bytes_out: int
    removed: dict[str, int]
    """Documents by the rule that removed them."""
    edited: dict[str, int]
    """Documents by the rule that changed their text."""
    removed_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the documents removed, by rule; empty where the writer did not count them."""
    edited_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that edits took from documents that stay, by rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """One source of the recipe and its way through the steps."""

    name: str
    domain: str
    weight: float
    """Share of the training mixture before normalisation."""
    steps: tuple[StepCount, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerEntry:
    """The tokenizer that wrote the shards."""

    file: str
    checksum: str
    vocabulary: int
    end_of_text: int
    """Id of the token that closes every document."""
    chat: str = ""
    """Name of the template of the dialogues (`ropewalk.prepare.chat`); empty when there are none."""
    encoders: tuple[str, ...] = ()
    """The algorithms that encoded the shards; their tokens are the same."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why faster ones did not, by algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole prepared corpus."""

    recipe_hash: str
    """Hash of the prepare settings and of the input bytes; also the name of the folder."""
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerEntry
    sources: tuple[SourceEntry, ...]
    shards: tuple[ShardEntry, ...]
    warnings: tuple[str, ...] = ()
    """What the one who prepared the data should have looked at."""
    ngrams: str = ""
    """Folder of the index of n-grams; empty when there is none."""

    def shards_of(self, split: Split, source: str | None = None) -> list[ShardEntry]:
        """The shards of one split, of one source or of all."""
        return [s for s in self.shards if s.split == split and source in (None, s.source)]

    def tokens(self, split: Split) -> int:
        """Tokens in one split."""
        return sum(shard.tokens for shard in self.shards_of(split))


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Commits the manifest; raises DataError when the counts of a source do not add up."""
    for source in manifest.sources:
        check_counts(source)
    path = folder / FILE
    write_json(path, {"format": FORMAT, **dataclasses.asdict(manifest)})
    return path


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, of this or any older format."""
    path = folder / FILE
    return parse_manifest(read_json(path, what="manifest"), path=path)


def parse_manifest(tree: Any, *, path: Path) -> Manifest:
    """The manifest in JSON that was read from `path`, of this or any older format."""
    tree = upgraded(tree, path=path, what="manifest", current=FORMAT, upgrades={1: _from_1})
    try:
        return _manifest(tree)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: this manifest is damaged: {error}; run `ropewalk prepare` again") from None


def check_counts(source: SourceEntry) -> None:
    """Raises DataError unless what enters a step is what leaves it, what was removed and what edits took; and unless
    steps join up."""
    previous: StepCount | None = None
    for step in source.steps:
        removed = sum(step.removed.values())
        if step.documents_in != step.documents_out + removed:
            raise DataError(
                f"source {source.name}, step {step.step}: {step.documents_in} documents in, but "
                f"{step.documents_out} out and {removed} removed"
            )
        counted = sum(step.removed_bytes.values()) + sum(step.edited_bytes.values())
        if (step.removed_bytes or step.edited_bytes) and step.bytes_in != step.bytes_out + counted:
            raise DataError(
                f"source {source.name}, step {step.step}: {step.bytes_in} bytes in, but {step.bytes_out} out and "
                f"{counted} removed or edited away"
            )
        if previous is not None and step.documents_in != previous.documents_out:
            raise DataError(
                f"source {source.name}: {previous.documents_out} documents left {previous.step}, "
                f"{step.documents_in} reached {step.step}"
            )
        previous = step


def _manifest(tree: dict[str, Any]) -> Manifest:
    return Manifest(
        recipe_hash=tree["recipe_hash"],
        dtype=tree["dtype"],
        tokenizer=TokenizerEntry(**{**tree["tokenizer"], "encoders": tuple(tree["tokenizer"].get("encoders", ()))}),
        sources=tuple(
            SourceEntry(**{**source, "steps": tuple(StepCount(**step) for step in source["steps"])})
            for source in tree["sources"]
        ),
        shards=tuple(ShardEntry(**shard) for shard in tree["shards"]),
        warnings=tuple(tree.get("warnings", ())),
        ngrams=tree.get("ngrams", ""),
    )


def _from_1(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds what a shard holds and how it is packed; before, all held tokens as they are."""
    return tree
